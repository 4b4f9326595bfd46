"""Every reader against the arrays that its files were written from, in the published layouts."""

import csv
import gzip
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from PIL import Image
from sklearn.datasets import load_digits

from hf_sparseprior.images.config import SOURCES, SOURCES_OF, DataConfig
from hf_sparseprior.images.data import load_data
from hf_sparseprior.images.sources import (
    READERS,
    SPLITS,
    arrays,
    balanced_subset,
    cifar,
    decode_row,
    drop_corrupt,
    find_corrupt,
    scan,
    stream_data,
    streams,
    tables,
)
from tests.each import each

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


# ---- data sets of random images, written as published ---------------------------------------------------------------


def pictures(count, size=6, channels=3, seed=0):
    shape = (count, size, size, channels) if channels == 3 else (count, size, size)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def make(classes, sizes, **options):
    """{split: (pixels, class names)} with as many images of every class."""
    return {
        split: (pictures(count * len(classes), seed=seed, **options), list(classes) * count)
        for seed, (split, count) in enumerate(sizes.items())
    }


def write_png(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(pixels))


def as_tables(made, classes, image="image", label="label"):
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=list(classes))})
    return datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict(
                {
                    image: [{"bytes": png(one), "path": None} for one in pixels],
                    label: [classes.index(n) for n in names],
                },
                features=features,
            )
            for split, (pixels, names) in made.items()
        }
    )


def write_digits(root, monkeypatch):
    digits = load_digits()
    pixels = (digits.images * 255 / 16).round().astype(np.uint8)
    return {}, {"train": (pixels, [str(label) for label in digits.target])}


def write_image_folder(root, monkeypatch):
    made = make(["cat", "dog"], {"train": 6, "valid": 2, "test": 3})
    for split, (pixels, names) in made.items():
        for number, (one, name) in enumerate(zip(pixels, names, strict=True)):
            write_png(root / split / name / f"{number}.png", one)
    return {"path": root}, made


def write_parquet(root, monkeypatch):
    made = make(["cat", "dog"], {"train": 12, "validation": 4, "test": 6})
    for split, table in as_tables(made, ["cat", "dog"], "img").items():
        root.mkdir(exist_ok=True)
        half = len(table) // 2
        table.select(range(half)).to_parquet(root / f"{split}-00000-of-00002.parquet")
        table.select(range(half, len(table))).to_parquet(root / f"{split}-00001-of-00002.parquet")
    return {"path": root}, made


def write_arrow(root, monkeypatch):
    made = make(["cat", "dog"], {"train": 12, "validation": 4, "test": 6})
    as_tables(made, ["cat", "dog"]).save_to_disk(root)
    return {"path": root}, made


def write_hub(root, monkeypatch):
    """What load_dataset leaves in its cache."""
    from datasets.packaged_modules.parquet.parquet import Parquet

    _, made = write_parquet(root, monkeypatch)
    files = {split: sorted(map(str, root.glob(f"{split}*"))) for split in made}
    builder = Parquet(dataset_name="shapes", hash=COMMIT, data_files=files)
    builder.download_and_prepare()
    configuration = Path(builder.cache_dir).parents[1]
    configuration.rename(configuration.parent / "default")
    configuration.parent.rename(configuration.parents[1] / "someone___shapes")
    return {"path": "someone/shapes"}, made


def write_csv(root, monkeypatch):
    made = make(["2", "10"], {"train": 6, "test": 2})
    for split, (pixels, names) in made.items():
        rows = []
        for number, (one, name) in enumerate(zip(pixels, names, strict=True)):
            write_png(root / "images" / f"{split}, {number}.png", one)
            rows.append({"file_name": f"images/{split}, {number}.png", "Label": name, "other": "x"})
        with open(root / f"{split}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return {"path": root}, made


def shrink(monkeypatch, made, labels):
    """Small counts instead of CIFAR's own."""
    monkeypatch.setattr(cifar, "COUNTS", {split: len(pixels) for split, (pixels, _) in made.items()})
    sums = {split: cifar.checksum(pixels, labels[split]) for split, (pixels, _) in made.items()}
    monkeypatch.setattr(cifar, "CHECKSUMS", sums)


def planes(pixels):
    return pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)


def write_cifar10(root, monkeypatch):
    """The binary archive: five batches of training images, label byte and planes."""
    made = make(cifar.CLASSES, {"train": 2, "test": 1}, size=32)
    labels = {split: np.array([cifar.CLASSES.index(n) for n in names], np.uint8) for split, (_, names) in made.items()}
    shrink(monkeypatch, made, labels)
    root.mkdir()
    with tarfile.open(root / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for split, batches in cifar.LAYOUTS["cifar10"].batches.items():
            rows = np.concatenate([labels[split][:, None], planes(made[split][0])], 1)
            for name, part in zip(batches, np.split(rows, len(batches)), strict=True):
                member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
                member.size = part.nbytes
                archive.addfile(member, io.BytesIO(part.tobytes()))
    return {"path": root}, made


FINE = [f"fine{n}" for n in range(100)]
COARSE = [f"coarse{n}" for n in range(20)]


def write_cifar100(root, monkeypatch):
    """The extracted Python version."""
    made = make(FINE, {"train": 2, "test": 1}, size=32)
    shrink(monkeypatch, made, {split: np.zeros(0, np.uint8) for split in made})
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for split, (pixels, names) in made.items():
        fine = [FINE.index(name) for name in names]
        content = {
            "filenames": [f"{name}_s_000001.png" for name in names],
            "batch_label": f"{split} batch 1 of 1",
            "fine_labels": fine,
            "coarse_labels": [label // 5 for label in fine],
            "data": planes(pixels),
        }
        (folder / split).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": FINE, "coarse_label_names": COARSE}, protocol=2))
    return {"path": root}, made


WNIDS = ["n02", "n01", "n10"]  # wnids.txt is not sorted, nor is the published one


def write_tiny_imagenet(root, monkeypatch):
    folder = root / "tiny-imagenet-200"
    made = make(["n01 crane", "n02 crane", "n10 dish, bowl"], {"train": 4, "test": 2})
    for number, (one, name) in enumerate(zip(*made["train"], strict=True)):
        wnid = name.split()[0]
        write_png(folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", one)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("x\t0\t0\t1\t1\n")
    lines = []
    for number, (one, name) in enumerate(zip(*made["test"], strict=True)):
        write_png(folder / "val" / "images" / f"val_{number}.JPEG", one)
        lines.append(f"val_{number}.JPEG\t{name.split()[0]}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (folder / "words.txt").write_text("n00\tentity\nn01\tcrane\nn02\tcrane\nn10\tdish, bowl\n")
    write_png(folder / "test" / "images" / "test_0.JPEG", pictures(1)[0])
    return {"path": root}, made


def write_imagenet(root, monkeypatch):
    """Kaggle's layout."""
    made = make(["n01 crane", "n02 crane", "n10 dish, bowl"], {"train": 4, "test": 2})
    images = root / "ILSVRC" / "Data" / "CLS-LOC"
    for number, (one, name) in enumerate(zip(*made["train"], strict=True)):
        wnid = name.split()[0]
        write_png(images / "train" / wnid / f"{wnid}_{number}.JPEG", one)
    lines = ["ImageId,PredictionString"]
    for number, (one, name) in enumerate(zip(*made["test"], strict=True)):
        write_png(images / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", one)
        lines.append(f"ILSVRC2012_val_{number:08d},{name.split()[0]} 85 1 499 272 {name.split()[0]} 1 2 3 4 ")
    (root / "LOC_val_solution.csv").write_text("\n".join(lines) + "\n")
    (root / "LOC_synset_mapping.txt").write_text("n01 crane\nn02 crane\nn10 dish, bowl\n")
    return {"path": root}, made


def write_idx(root, classes):
    made = make(classes, {"train": 4, "test": 2}, channels=1, size=28)
    root.mkdir()
    for split, prefix in arrays.IDX_FILES.items():
        pixels, names = made[split]
        labels = bytes(classes.index(name) for name in names)
        header = struct.pack(">4i", 2051, *pixels.shape)
        (root / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels.tobytes()))
        header = struct.pack(">2i", 2049, len(labels))
        (root / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels))
    return {"path": root}, made


def write_fashion_mnist(root, monkeypatch):
    _, made = write_idx(root, list(arrays.FASHION_CLASSES))
    monkeypatch.setattr(arrays, "FASHION_MNIST", str(root))  # as if Debian's package were installed
    return {}, made


def write_mnist(root, monkeypatch):
    return write_idx(root, [str(digit) for digit in range(10)])


def write_vtab(root, monkeypatch):
    """One task with ten classes; selection judges the validation images twice."""
    made = make([str(label) for label in range(10)], {"train": 2, "validation": 1})
    lists = {"train800": "train", "val200": "validation", "train800val200": "train", "test": "train"}
    for name, split in lists.items():
        lines = []
        for number, (one, label) in enumerate(zip(*made[split], strict=True)):
            write_png(root / "eurosat" / "images" / split / f"{number}.jpg", one)
            lines.append(f"images/{split}/{number}.jpg {label}\n")
        (root / "eurosat" / f"{name}.txt").write_text("".join(lines))
    return {"path": root, "task": "eurosat", "stage": "selection"}, {**made, "test": made["validation"]}


WRITERS = {
    "digits": write_digits,
    "imagefolder": write_image_folder,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "hub": write_hub,
    "csv": write_csv,
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "tiny_imagenet": write_tiny_imagenet,
    "imagenet": write_imagenet,
    "fashion_mnist": write_fashion_mnist,
    "mnist": write_mnist,
    "vtab": write_vtab,
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """source -> its configuration, with fields changed, and what was written."""

    def write_source(source, **changes):
        options, made = WRITERS[source](tmp_path / source, monkeypatch)
        options = {name: str(value) for name, value in options.items()} | changes
        return DataConfig(source=source, **options), {
            {"valid": "validation"}.get(split, split): pairs for split, pairs in made.items()
        }

    return write_source


def rgb(pixels):
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, -1)


def contents(images, classes):
    """How often each (pixels, class name) is in a split."""
    found = [(np.asarray(images.read(n)).tobytes(), classes[images.labels[n]]) for n in range(len(images))]
    return Counter(found)


def written(pairs):
    pixels, names = pairs
    return Counter((rgb(one).tobytes(), name) for one, name in zip(pixels, names, strict=True))


# ---- every reader ---------------------------------------------------------------------------------------------------


def test_every_source_has_a_reader_and_a_test():
    assert list(READERS) == list(SOURCES) == list(WRITERS)


@pytest.mark.parametrize("source", SOURCES)
def test_a_reader_gives_the_images_and_classes_that_were_written_in_every_stage(write, source):
    config, made = write(source)
    data = READERS[source](config)
    assert list(data.splits) == list(made)
    assert len(set(data.classes)) == len(data.classes) >= 2
    for split, images in data.splits.items():
        assert contents(images, data.classes) == written(made[split])
        assert images.labels.dtype == np.int64 and set(images.labels) == set(range(len(data.classes)))
        assert images.read(0).mode == "RGB"
        assert images.name(1) != images.name(0)
        assert pickle.loads(pickle.dumps(images)).read(0) == images.read(0)  # loader processes get a copy
    assert "\n" not in data.description
    if source != "vtab":  # whose stages share images on purpose: tests/tasks/classification/vtab
        check_stages(config, made)


def check_stages(config, made):
    """Loaded splits share no image and lose none, and the final stage trains on all that is not test."""
    usual, final = (load_data(replace(config, stage=stage)) for stage in (None, "final"))
    assert list(sorted(usual.splits)) == sorted(SPLITS)
    read = {split: contents(images, usual.classes) for split, images in usual.splits.items()}
    assert sum(read.values(), Counter()) == sum(map(written, made.values()), Counter())
    names = [images.name(n) for images in usual.splits.values() for n in range(len(images))]
    assert len(set(names)) == len(names)
    assert contents(final.splits["train"], final.classes) == read["train"] + read["validation"]
    for split in ("validation", "test"):
        assert contents(final.splits[split], final.classes) == read[split]
    train = pickle.loads(pickle.dumps(final.splits["train"]))
    names = [train.name(n) for n in range(len(train))]
    assert len(set(names)) == len(names) == len(train.labels)
    assert drop_corrupt(usual, config) == drop_corrupt(final, config) == {}


@each(
    "settings, names",
    [
        ({"source": "digits"}, ("train", "validation", "test")),
        ({"source": "digits", "stage": "final"}, ("train and validation", "validation", "test")),
        (
            {"source": "imagefolder", "path": "x", "splits": {"train": "fit", "test": "held"}, "stage": "final"},
            ("fit and validation", "validation", "held"),
        ),
        ({"source": "imagenet", "path": "x"}, ("train", "validation", "the published validation images")),
        (
            {"source": "tiny_imagenet", "path": "x", "published_validation": "validation"},
            ("train", "the published validation images", "test"),
        ),
        ({"source": "vtab", "path": "x", "task": "cifar", "stage": "final"}, ("train800val200", "val200", "test")),
        ({"source": "vtab", "path": "x", "task": "cifar", "stage": "selection"}, ("train800", "val200", "val200")),
    ],
)
def test_splits_are_called_what_the_data_calls_them(settings, names):
    assert tuple(DataConfig(**settings).split_names[split] for split in SPLITS) == names


def test_limits_are_balanced_nested_and_leave_the_cut_alone(write):
    config, _ = write("digits")
    whole = load_data(config)
    names = {}
    for limit in (50, 200):
        data = load_data(DataConfig(limit_train=limit, limit_test=limit, limit_validation=30))
        assert np.ptp(np.bincount(data.splits["train"].labels)) == 0 and len(data.splits["train"]) == limit
        assert len(data.splits["validation"]) == 30
        names[limit] = {split: {i.name(n) for n in range(len(i))} for split, i in data.splits.items()}
    for split in SPLITS:
        images = whole.splits[split]
        assert names[50][split] <= names[200][split] <= {images.name(n) for n in range(len(images))}
    with pytest.raises(ValueError, match=r"data\.limit_train=5000 must be at most the 10.. images"):
        load_data(DataConfig(limit_train=5000))


def test_a_balanced_subset_makes_up_for_small_classes():
    labels = np.array([0] * 50 + [1] * 3 + [2] * 50)
    assert np.bincount(labels[balanced_subset(labels, 23, 0)]).tolist() == [10, 3, 10]
    assert sorted(np.bincount(labels[balanced_subset(labels, 8, 0)])) == [2, 3, 3]
    assert balanced_subset(labels, 103, 0).tolist() == list(range(103))
    assert not np.array_equal(balanced_subset(labels, 20, 0), balanced_subset(labels, 20, 1))
    for small, large in ((1, 2), (7, 20), (20, 90)):
        assert set(balanced_subset(labels, small, 5)) <= set(balanced_subset(labels, large, 5))


# ---- single sources -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "folder", "table", "others"),
    [
        ("tiny_imagenet", "tiny-imagenet-200/val/images", "val_annotations.txt", 3),
        ("imagenet", "ILSVRC/Data/CLS-LOC/val", "LOC_val_solution.csv", 0),
    ],
)
def test_the_published_val_may_be_our_validation_and_what_is_passed_over_is_said(
    source, folder, table, others, write, tmp_path
):
    config, made = write(source, published_validation="validation")
    folder = tmp_path / source / folder
    train = next((tmp_path / source).rglob("train"))
    for path in (folder / "more.JPEG", folder / "._0.JPEG", train / ".DS_Store"):
        path.touch()
    data = READERS[source](config)
    assert contents(data.splits["validation"], data.classes) == written(made["test"])
    assert data.classes == ["n01 crane", "n02 crane", "n10 dish, bowl"]
    counted = f"left out: 1 hidden ({train}/.DS_Store), "
    counted += f"{others} no image ({train}/n01/n01_boxes.txt), " if others else ""
    assert data.passed_over.line() == f"{counted}1 not in {table} ({folder / 'more.JPEG'})"


def test_tiny_imagenet_with_val_sorted_into_class_folders(write, tmp_path):
    config, made = write("tiny_imagenet")
    val = tmp_path / "tiny_imagenet" / "tiny-imagenet-200" / "val"
    for line in (val / "val_annotations.txt").read_text().splitlines():
        name, wnid = line.split("\t")[:2]
        (val / wnid).mkdir(exist_ok=True)
        (val / "images" / name).rename(val / wnid / name)
    (val / "images").rmdir()
    (val / "val_annotations.txt").unlink()
    data = READERS["tiny_imagenet"](config)
    assert contents(data.splits["test"], data.classes) == written(made["test"])


def test_csv_labels_as_names_or_places_of_a_file_of_classes(write, tmp_path):
    config, made = write("csv")
    names = tmp_path / "names"
    names.write_text("2\n10\n")
    data = READERS["csv"](DataConfig(source="csv", path=config.path, classes=str(names)))
    assert contents(data.splits["train"], data.classes) == written(made["train"])
    names.write_text("\n".join("abcdefghijk"))
    data = READERS["csv"](DataConfig(source="csv", path=config.path + "/train.csv", classes=str(names)))
    assert list(data.splits) == ["train"] and {data.classes[n] for n in data.splits["train"].labels} == {"c", "k"}


def test_imagenet_in_class_folders(write, tmp_path):
    _, made = write("imagenet")
    for number, (one, name) in enumerate(zip(*made["test"], strict=True)):
        write_png(tmp_path / "b" / "val" / name.split()[0] / f"{number}.JPEG", one)
    (tmp_path / "imagenet" / "ILSVRC" / "Data" / "CLS-LOC" / "train").rename(tmp_path / "b" / "train")
    data = READERS["imagenet"](DataConfig(source="imagenet", path=str(tmp_path / "b")))
    assert data.classes == ["n01", "n02", "n10"]
    short = (made["test"][0], [name.split()[0] for name in made["test"][1]])
    assert contents(data.splits["test"], data.classes) == written(short)


def test_cifar100_has_coarse_labels_and_a_binary_version(write, tmp_path):
    config, made = write("cifar100", label_column="coarse")
    coarse = {split: (pixels, [COARSE[FINE.index(n) // 5] for n in names]) for split, (pixels, names) in made.items()}
    binary = tmp_path / "binary" / "cifar-100-binary"
    binary.mkdir(parents=True)
    for split, (pixels, names) in made.items():
        fine = np.array([FINE.index(name) for name in names], np.uint8)
        rows = np.concatenate([fine[:, None] // 5, fine[:, None], planes(pixels)], 1)
        (binary / f"{split}.bin").write_bytes(rows.tobytes())
    (binary / "coarse_label_names.txt").write_text("\n".join(COARSE) + "\n\n")
    (binary / "fine_label_names.txt").write_text("\n".join(FINE) + "\n\n")
    for path, label, expected in (
        (config.path, "coarse", coarse),
        (str(binary), "coarse", coarse),
        (str(tmp_path / "binary"), "fine", made),
    ):
        data = READERS["cifar100"](DataConfig(source="cifar100", path=path, label_column=label))
        for split, images in data.splits.items():
            assert contents(images, data.classes) == written(expected[split])
    with pytest.raises(ValueError, match="label_column='super' of cifar100 must be fine or coarse"):
        READERS["cifar100"](DataConfig(source="cifar100", path=config.path, label_column="super"))


def test_cifar_as_parquet_with_the_hubs_columns(tmp_path):
    made = make(FINE, {"train": 2, "test": 1}, size=32)
    (tmp_path / "p").mkdir()
    for split, table in as_tables(made, FINE, "img", "fine_label").items():
        names = datasets.ClassLabel(names=COARSE)
        coarse = [label // 5 for label in table["fine_label"]]
        table.add_column("coarse_label", coarse).cast_column("coarse_label", names).to_parquet(
            tmp_path / "p" / f"{split}.parquet"
        )
    data = READERS["cifar100"](DataConfig(source="cifar100", path=str(tmp_path / "p")))
    assert contents(data.splits["train"], data.classes) == written(made["train"])
    data = READERS["cifar100"](DataConfig(source="cifar100", path=str(tmp_path / "p"), label_column="coarse"))
    assert data.classes == COARSE
    with pytest.raises(ValueError, match=r"the columns \['img', 'fine_label', 'coarse_label'\] holds the labels"):
        READERS["parquet"](DataConfig(source="parquet", path=str(tmp_path / "p")))


def test_cifar10_as_fetch_cifar10_writes_it(tmp_path):
    made = make(cifar.CLASSES, {"train": 2, "test": 1}, size=32)
    for split, (pixels, names) in made.items():
        labels = np.array([cifar.CLASSES.index(name) for name in names], np.uint8)
        tables.write_parquet(pixels, labels, cifar.CLASSES, tmp_path / f"{split}.parquet")
    data = READERS["cifar10"](DataConfig(source="cifar10", path=str(tmp_path)))
    assert all(contents(images, data.classes) == written(made[split]) for split, images in data.splits.items())


@pytest.mark.parametrize("source", ["parquet", "arrow"])
def test_tables_of_no_split_are_counted(source, write, tmp_path):
    config, _ = write(source)
    root = Path(config.path)
    if source == "arrow":
        for name in ("train", "test"):
            shutil.copy(next((root / name).glob("*.arrow")), tmp_path / f"{name}.arrow")
        root = tmp_path
    some = next(root.glob(f"train*.{source}"))
    for name in ("extra", "trains", ".train"):
        shutil.copy(some, root / f"{name}.{source}")
    line = READERS[source](DataConfig(source=source, path=str(root))).passed_over.line()
    assert line == f"left out: 1 hidden ({root}/.train.{source}), 2 file of no split ({root}/extra.{source})"


@pytest.mark.parametrize("source", ["parquet", "arrow"])
def test_classes_in_another_order_in_another_split_are_refused(tmp_path, source):
    tables = as_tables(make(["cat", "dog"], {"train": 3, "validation": 2}), ["cat", "dog"])
    tables["test"] = as_tables(make(["cat", "dog"], {"test": 2}), ["dog", "cat"])["test"]
    if source == "arrow":
        tables.save_to_disk(tmp_path)
    else:
        for split, table in tables.items():
            table.to_parquet(tmp_path / f"{split}.parquet")
    for read, streaming in ((load_data, False), (stream_data, True)):
        with pytest.raises(ValueError, match=r"classes of 'label' are \['dog', 'cat'\] in test, but \['cat', 'dog'\]"):
            read(DataConfig(source=source, path=str(tmp_path), streaming=streaming))


def test_arrow_files_and_a_single_saved_table(tmp_path):
    made = make(["cat", "dog"], {"train": 3, "test": 2})
    tables = as_tables(made, ["cat", "dog"])
    tables["train"].save_to_disk(tmp_path / "single")
    data = READERS["arrow"](DataConfig(source="arrow", path=str(tmp_path / "single")))
    assert list(data.splits) == ["train"] and contents(data.splits["train"], data.classes) == written(made["train"])
    (tmp_path / "files").mkdir()
    tables.save_to_disk(tmp_path / "dict")
    for split in made:
        next((tmp_path / "dict" / split).glob("*.arrow")).rename(tmp_path / "files" / f"{split}-00000.arrow")
    data = READERS["arrow"](DataConfig(source="arrow", path=str(tmp_path / "files")))
    assert contents(data.splits["test"], data.classes) == written(made["test"])
    (tmp_path / "files" / "train-00000.arrow").write_bytes(b"ARROW1 nonsense")
    with pytest.raises(OSError, match="the arrow files cannot be read") as error:
        READERS["arrow"](DataConfig(source="arrow", path=str(tmp_path / "files")))
    assert "\n" not in str(error.value)


def test_own_split_and_class_names(write, tmp_path):
    config, made = write("parquet", splits={"train": "train", "test": "validation"})
    data = READERS["parquet"](config)
    assert list(data.splits) == ["train", "test"]
    assert contents(data.splits["test"], data.classes) == written(made["validation"])
    (tmp_path / "names.txt").write_text("Katze\nHund\n")
    data = READERS["parquet"](DataConfig(source="parquet", path=config.path, classes=str(tmp_path / "names.txt")))
    assert data.classes == ["Katze", "Hund"]
    with pytest.raises(ValueError, match="has no 'dev', only train"):
        READERS["parquet"](DataConfig(source="parquet", path=config.path, splits={"train": "train", "test": "dev"}))
    (tmp_path / "names.txt").write_text("Katze\nKatze\n")
    with pytest.raises(ValueError, match="'Katze' more than once"):
        READERS["parquet"](DataConfig(source="parquet", path=config.path, classes=str(tmp_path / "names.txt")))


def test_exif_orientation_is_the_same_for_files_and_tables(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    buffer = io.BytesIO()
    Image.fromarray(pictures(1)[0][:, :4]).save(buffer, "PNG", exif=turned)
    for name in ("cat", "dog"):
        (tmp_path / "f" / name).mkdir(parents=True)
        (tmp_path / "f" / name / "a.png").write_bytes(buffer.getvalue())
    (tmp_path / "p").mkdir()
    table = datasets.Dataset.from_dict({"image": [{"bytes": buffer.getvalue(), "path": None}] * 2, "label": ["a", "b"]})
    table.to_parquet(tmp_path / "p" / "train.parquet")
    for exif, size in ((None, (6, 4)), ("apply", (6, 4)), ("ignore", (4, 6))):
        for source, folder in (("imagefolder", "f"), ("parquet", "p")):
            data = READERS[source](DataConfig(source=source, path=str(tmp_path / folder), exif=exif))
            assert data.splits["train"].read(0).size == size, (exif, source)


def test_published_sets_ignore_exif_unless_told():
    paths = {source: None if source == "digits" else "x" for source in SOURCES if source != "vtab"}
    known = {source: DataConfig(source=source, path=path).decoding.exif for source, path in paths.items()}
    assert {source for source, exif in known.items() if exif == "ignore"} == {"imagenet", "tiny_imagenet"}
    vtab = {"source": "vtab", "path": "x", "task": "cifar", "stage": "final"}
    assert DataConfig(**vtab).decoding.exif == "ignore"
    assert DataConfig(**vtab, exif="apply").decoding.exif == "apply"


def test_a_named_pipe_is_no_image(tmp_path):
    for name in ("cat", "dog"):
        write_png(tmp_path / name / "0.png", pictures(1)[0])
    os.mkfifo(tmp_path / "cat" / "1.png")
    data = READERS["imagefolder"](DataConfig(source="imagefolder", path=str(tmp_path)))
    (problem,) = find_corrupt(data.splits["train"]).values()
    assert problem.endswith("cat/1.png is not a readable image (it is no regular file)")


def test_links_to_images_and_to_folders_of_classes_are_followed(tmp_path):
    """Also those that lead out of the data's folder: they are its owner's."""
    expected = {}
    for number, name in enumerate(("cat", "dog")):
        expected[name] = pictures(1, seed=number)[0]
        write_png(tmp_path / "elsewhere" / name / "0.png", expected[name])
    (tmp_path / "data" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "data" / "train" / "cat" / "0.png").symlink_to(tmp_path / "elsewhere" / "cat" / "0.png")
    (tmp_path / "data" / "train" / "dog").symlink_to(tmp_path / "elsewhere" / "dog")
    (tmp_path / "data" / "test").symlink_to("../elsewhere")
    data = READERS["imagefolder"](DataConfig(source="imagefolder", path=str(tmp_path / "data")))
    for split in ("train", "test"):
        for index, name in enumerate(data.classes):
            np.testing.assert_array_equal(np.asarray(data.splits[split].read(index)), expected[name])


def test_links_that_could_lead_into_themselves_are_refused_by_name(tmp_path, monkeypatch):
    for name in ("cat", "dog"):
        write_png(tmp_path / "data" / "train" / name / "0.png", pictures(1)[0])
    walked, walk = [], os.walk
    monkeypatch.setattr(os, "walk", lambda folder: walked.append(folder) or walk(folder))
    loops = [(place, target) for place in ("train/cow", "test") for target in ("/", ".", "..")]
    for place, target in (*loops, ("train/cat/more", "/"), ("train/cat/more", "."), ("train/cat/more", "../dog")):
        (link := tmp_path / "data" / place).symlink_to(target)
        message = rf"{place} is a link to .*(holds the link|links to images are read)$"
        with pytest.raises(ValueError, match=message) as error:
            READERS["imagefolder"](DataConfig(source="imagefolder", path=str(tmp_path / "data")))
        assert "\n" not in str(error.value)
        link.unlink()
    assert set(walked) <= {str(tmp_path / "data" / "train" / name) for name in ("cat", "dog")}


def table_of_paths(folder, source, paths):
    """A data set whose splits each have a row for each path, with two classes in turn. `datasets` would embed files."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    values = {"image": [{"bytes": None, "path": str(path)} for path in paths], "label": [0, 1] * (len(paths) // 2)}
    table = datasets.Dataset.from_dict(values, features=features).data.table
    for split in SPLITS:
        if source == "parquet":
            pyarrow.parquet.write_table(table, folder / f"{split}.parquet")
        else:
            with pyarrow.ipc.new_stream(folder / f"{split}.arrow", table.schema) as file:
                file.write_table(table)


@pytest.fixture
def named(tmp_path):
    """An image in the data's folder, one elsewhere, and links to the second one and to its folder; two images."""
    inside, outside = tmp_path / "data" / "images" / "0.png", tmp_path / "private" / "0.png"
    expected = pictures(2)
    write_png(inside, expected[0])
    write_png(outside, expected[1])
    (linked := inside.with_name("1.png")).symlink_to(outside)
    (away := tmp_path / "data" / "away").symlink_to(outside.parent)
    return SimpleNamespace(inside=inside, outside=outside, linked=linked, away=away, expected=expected)


@pytest.mark.parametrize(("source", "streaming"), [("parquet", False), ("arrow", True)])
def test_rows_that_name_files_outside_of_the_data_are_refused(source, streaming, named, tmp_path, monkeypatch):
    def read():
        config = DataConfig(source=source, path=str(tmp_path / "data"), streaming=streaming)
        if streaming:
            return [np.asarray(decode_row(row["image"], "row")) for row in stream_data(config).splits["test"]]
        return [np.asarray(READERS[source](config).splits["test"].read(index)) for index in range(2)]

    table_of_paths(tmp_path / "data", source, [named.inside, named.linked])
    np.testing.assert_array_equal(read(), named.expected)
    table_of_paths(tmp_path / "data", source, [named.inside, named.outside])
    message = rf" row \d names {named.outside}, which is outside of data.path={tmp_path}/data; .*=allow lets it be"
    with pytest.raises(ValueError, match=message):
        read()
    with monkeypatch.context() as patch:
        patch.setenv("SPARSEPRIOR_OUTSIDE_FILES", "allow")
        np.testing.assert_array_equal(read(), named.expected)


def test_places_of_rows_are_those_that_the_system_would_open(named, tmp_path, monkeypatch):
    """By loops over links and `..`, and before an address is opened."""
    opened = []
    monkeypatch.setattr("fsspec.open", lambda path, *rest: opened.append(path))
    config = DataConfig(source="parquet", path=str(tmp_path / "data"))
    data = tmp_path / "data"
    for path in (named.inside, named.linked, data / "images" / ".." / "images" / "0.png", data / "missing.png"):
        tables.check_place(str(path), config, "row")
    monkeypatch.chdir(data)
    tables.check_place("images/0.png", config, "row")
    local = (data / "images/../../private/0.png", named.away / "0.png", named.away / "../data/../private/0.png")
    for path in (*local, f"{data}-2/0.png", "/etc/hostname", "a\0b", "../private/0.png", "file:///etc/hostname",
                 "http://127.0.0.1:9/0.png", f"zip://0.png::{named.outside}", "hf://datasets/a/b/0.png"):  # fmt: skip
        with pytest.raises(ValueError, match=r"row names .* outside of data.path=.*SPARSEPRIOR_OUTSIDE_FILES=allow"):
            streams._encoded({"bytes": None, "path": str(path)}, config, "row")
    assert streams._encoded({"bytes": b"image", "path": "/elsewhere"}, config, "row")["bytes"] == b"image"
    assert not opened


def test_rows_of_the_hub_may_name_its_files_and_those_in_its_caches(tmp_path):
    config = DataConfig(source="hub", path="someone/shapes")
    cached = Path(datasets.config.HF_DATASETS_CACHE) / "downloads" / "0.png"
    for path in (str(cached), "hf://datasets/someone/shapes/0.png", "zip://0.png::hf://datasets/someone/shapes/a.zip"):
        tables.check_place(path, config, "row")
    addresses = ("file:///etc/hostname", "hf://x::file:///etc/hostname", "file:///etc/hostname::hf://x")
    for path in (str(tmp_path / "0.png"), *addresses, "zip://a::b::hf://x", "http://10.0.0.1/a"):
        with pytest.raises(ValueError, match=r"row names .*, which is outside of the hub and its caches"):
            tables.check_place(path, config, "row")


@each("packed", [True, False])
def test_files_of_numbers_above_the_limit_are_not_read_whole(packed, tmp_path, monkeypatch):
    file = tmp_path / ("train-images-idx3-ubyte" + (".gz" if packed else ""))
    content = struct.pack(">4i", arrays.IDX_IMAGES, 1, 1000, 1000) + bytes(10**6)
    file.write_bytes(gzip.compress(content) if packed else content)
    assert arrays._read_idx(file, arrays.IDX_IMAGES).shape == (1, 1000, 1000)
    (tmp_path / "data_batch_1").write_bytes(bytes(1001))
    with monkeypatch.context() as patch:
        patch.setenv("SPARSEPRIOR_ARCHIVE_BYTES", "1000")
        with pytest.raises(OSError, match=r"unpacks to more than the 1000 bytes of SPARSEPRIOR_ARCHIVE_BYTES"):
            arrays._read_idx(file, arrays.IDX_IMAGES)
        with pytest.raises(OSError, match=r"what is read comes to 1001 bytes, more than the 1000 of SPARSEPRIOR"):
            cifar.read_members(tmp_path, ["data_batch_1"])


def test_an_archive_that_unpacks_to_more_than_its_limit_is_not_read(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.size = 2000
        archive.addfile(member, io.BytesIO(bytes(2000)))
    monkeypatch.setenv("SPARSEPRIOR_ARCHIVE_BYTES", "1999")
    with pytest.raises(OSError, match=r"tar.gz .*2000 bytes, more than the 1999 of SPARSEPRIOR_ARCHIVE"):
        cifar.read_members(tmp_path / "cifar-10-python.tar.gz", ["data_batch_1"])
    monkeypatch.setenv("SPARSEPRIOR_ARCHIVE_BYTES", "2000")
    assert cifar.read_members(tmp_path / "cifar-10-python.tar.gz", ["data_batch_1"]) == {"data_batch_1": bytes(2000)}


@pytest.mark.parametrize("corrupt", ["fatal", "skip"])
def test_deep_images_are_refused_by_name_or_scaled(corrupt, tmp_path):
    deep = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4369  # 0 to 65535
    for name in ("cat", "dog"):
        (tmp_path / "f" / name).mkdir(parents=True)
        for index in range(3):
            Image.fromarray(deep).save(tmp_path / "f" / name / f"{index}.png")
    options = {"source": "imagefolder", "path": str(tmp_path / "f"), "corrupt": corrupt}
    for _ in range(2):  # the second time from what the first scan remembered
        config = DataConfig(**options)
        with pytest.raises(ValueError, match=r"\d.png has more than 8 bits.*=scale.*such images") as error:
            drop_corrupt(load_data(config), config)
        assert "\n" not in str(error.value)
    config = DataConfig(**options, depth16="scale")
    data = load_data(config)
    assert drop_corrupt(data, config) == {}
    np.testing.assert_array_equal(np.asarray(data.splits["train"].read(0))[..., 1], deep // 256)


# ---- bad values -----------------------------------------------------------------------------------------------------


def edit(name, old, new):
    return lambda root: (root / name).write_text((root / name).read_text().replace(old, new))


def unlink(pattern):
    return lambda root: sorted(root.glob(pattern))[0].unlink()


def recompress(pattern, change):
    def damage(root):
        path = sorted(root.glob(pattern))[0]
        path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))

    return damage


def put(name, content):
    return lambda root: (root / name).write_bytes(content)


VAL = "tiny-imagenet-200/val/val_annotations.txt"
BROKEN = {
    "csv": [
        (unlink("images/train, 3.png"), r"train.csv, line 5: .*train, 3.png does not exist"),
        (edit("test.csv", '.png",10', '.png",'), r"test.csv, line 3: no Label \(2 of 4"),
        (edit("train.csv", "Label", "kind"), "data.label_column is needed, none"),
        (edit("train.csv", "other", "path"), "data.image_column is needed, several"),
        (put("train.csv", b"\xff\xfe\x00,"), "is not a CSV file in UTF-8"),
        (edit("test.csv", ",10,", ",11,"), r"test.csv, line \d: label 11 is not among the classes"),
        (unlink("train.csv"), "has no training split named train or training, only test"),
    ],
    "tiny_imagenet": [
        (unlink("*/wnids.txt"), "has no wnids.txt; data.path must be"),
        (edit("tiny-imagenet-200/wnids.txt", "n10", "n11"), "see .'n10', 'n11'"),
        (unlink("*/val/images/*2.JPEG"), "names val_2.JPEG, which .* does not"),
        (edit(VAL, "\t", " "), "val_annotations.txt, line 1: .* has fewer than 2 fields"),
    ],
    "imagenet": [
        (unlink("LOC_val_solution.csv"), "so val has no labels"),
        (lambda root: (root / "ILSVRC").rename(root / "other"), "has no folder train; data.path must hold"),
        (edit("LOC_val_solution.csv", ",n02", ",n03"), "class 'n03' of ILSVRC2012_"),
    ],
    "mnist": [
        (unlink("t10k-labels*"), "has no t10k-labels-idx1-ubyte.gz"),
        (recompress("train-i*", lambda old: old[:-1]), "its header says 40x28x28"),
        (recompress("train-l*", lambda old: b"\0" * 8 + old), "magic number 0 must be"),
        (recompress("train-l*", lambda old: old[:2]), "magic number 0 must be"),
        (recompress("train-l*", lambda old: old[:-1] + b"\x0b"), "label 11 must be below"),
        (recompress("train-l*", lambda old: struct.pack(">2i", 2049, 39) + old[9:]), "40 images, .* 39 labels"),
        (put("train-labels-idx1-ubyte.gz", b"noise"), "train-labels-idx1-ubyte.gz is not a whole gzip file"),
    ],
    "cifar10": [
        (unlink("*.gz"), "must be cifar-10-python.tar.gz or cifar-10-bin"),
        (put("cifar-10-binary.tar.gz", b"x"), "is not a readable archive"),
    ],
    "cifar100": [
        (unlink("*/meta"), "holds neither meta nor fine_label_names.txt"),
        (put("cifar-100-python/train", b"no"), "is not a CIFAR batch"),
        (unlink("*/test"), "holds neither test nor test.bin"),
    ],
    "arrow": [(unlink("train/*.arrow"), "the arrow files cannot be read|arrow")],
}


@pytest.mark.parametrize("source", BROKEN)
def test_bad_files_are_named_in_one_line(write, tmp_path, source):
    config, _ = write(source)
    root, whole = tmp_path / source, tmp_path / "whole"
    shutil.copytree(root, whole)
    for break_it, message in BROKEN[source]:
        shutil.rmtree(root)
        shutil.copytree(whole, root)
        break_it(root)
        with pytest.raises((ValueError, OSError), match=message) as error:
            load_data(config)
        assert "\n" not in str(error.value) and str(root) in str(error.value)


def test_fewer_cifar_images_than_published_are_refused_and_fashion_mnist_says_how_to_install_it(write, monkeypatch):
    config, _ = write("cifar100")
    monkeypatch.setattr(cifar, "COUNTS", {"train": 50_000, "test": 10_000})
    with pytest.raises(ValueError, match=r"CIFAR-100 train: images \(200, .* expected 50000"):
        load_data(config)
    monkeypatch.setattr(arrays, "FASHION_MNIST", "/nowhere")
    with pytest.raises(OSError, match="apt-get install dataset-fashion-mnist"):
        load_data(DataConfig(source="fashion_mnist"))


@each(
    "options, message",
    [
        ({"source": "mnist"}, "needs data.path"),
        ({"corrupt": "ignore"}, "data.corrupt='ignore' must be one of fatal, skip, unchecked"),
        ({"published_validation": "val"}, "data.published_validation='val' must be one of test, validation"),
        ({"limit_train": 0}, "data.limit_train=0 must be an integer of 1 or more"),
        ({"streaming": "yes"}, "data.streaming='yes' is for data.source parquet"),
        ({"source": "hub", "path": "a/b", "streaming": 1}, "data.streaming=1 must be True or False"),
        ({"source": "hub", "path": "a/b", "streaming": True, "limit_test": 5}, "data.limit_test=5 cannot be balanced"),
        ({"source": "hub", "path": "a/b", "splits": {"test": "val"}}, r"must be like \{train: NAME"),
        ({"source": "hub", "path": "a/b", "splits": {"train": "a", "val": "b"}}, r"must be like \{train: NAME"),
        ({"source": "hub", "path": 5}, "data.path=5 must be text"),
        (
            {"source": "parquet", "path": "x", "stage": "final", "streaming": True},
            r"data\.stage='final' cannot be used with a stream; set data\.stre",
        ),
        *(({name: "x"}, f"data.{name}='x' is for data.source ") for name in SOURCES_OF if name != "splits"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


# ---- hub ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hub_out_of_reach_gives_one_line_within_seconds_and_a_half_read_stream_ends_well(write, tmp_path):
    """In one process of its own, with the real HTTP client and a port on which nobody listens.

    Of the seconds only those count in which it waits before it asks again; datasets alone waits for more than 20.
    Two iterators of a stream are open when it ends.
    """
    config, _ = write("parquet", streaming=True)
    code = (
        "import sys, time\nfrom tasks.classification.train import main\n"
        "sleep, waits, time.sleep = time.sleep, [], lambda seconds: (waits.append(seconds), sleep(seconds))\n"
        "status = main(['--config', sys.argv[1], 'data.source=hub', 'data.path=uoft-cs/cifar10'])\n"
        "print(sum(waits) < 1)\n"
        "from hf_sparseprior.classification.config import DataConfig\n"
        "from hf_sparseprior.images.sources import stream_data\n"
        "data = stream_data(DataConfig(source='parquet', path=sys.argv[2], streaming=True))\n"
        "rows = [iter(data.splits['train']) for _ in range(2)]\nprint([next(one)['index'] for one in rows])\n"
        "sys.exit(status)\n"
    )
    (tmp_path / "run.yaml").write_text("trainer: {output_dir: %s}\n" % (tmp_path / "out"))
    root = Path(__file__).parents[3]
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PYTHONPATH": str(root)}
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run.yaml"), config.path],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    assert (process.returncode, process.stdout) == (2, "True\n[0, 0]\n"), process.stderr
    assert process.stderr.count("\n") == 1 and "the hub cannot be reached" in process.stderr
    assert "uoft-cs/cifar10" in process.stderr and "data.source=parquet" in process.stderr


@each("load, streaming", [(load_data, False), (stream_data, True)])
def test_asking_the_hub_in_vain_is_one_line_and_takes_no_retries(load, streaming, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(OSError, match=r"the hub cannot be reached \(HF_HUB_OFFLINE is set\)") as error:
        load(DataConfig(source="hub", path="uoft-cs/cifar10", streaming=streaming))
    assert "\n" not in str(error.value) and sum(waits) < 1


def test_a_cached_hub_copy_is_used_if_it_is_the_revision_that_was_asked_for(write):
    config, _ = write("hub")
    assert f"at {COMMIT} (cached)" in load_data(config).description
    load_data(DataConfig(source="hub", path=config.path, revision=COMMIT, config_name="default"))
    with pytest.raises(OSError, match=f"data.revision=main: .* is of revision {COMMIT}"):
        load_data(DataConfig(source="hub", path=config.path, revision="main"))
    with pytest.raises(OSError, match="config 'other' Available configs in the cache"):
        load_data(DataConfig(source="hub", path=config.path, config_name="other"))


def test_hub_answers(write, monkeypatch, tmp_path):
    """The hub's answers made up, what is made of them is real."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    made = make(["cat", "dog"], {"train": 3, "validation": 2, "test": 2})
    tables = as_tables(made, ["cat", "dog"])
    tables["test"] = tables["test"].map(lambda row: {"label": -1})
    asked = []
    monkeypatch.setattr(HfApi, "dataset_info", lambda self, name, **options: SimpleNamespace(sha=COMMIT))
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: asked.append((names, options)) or tables)
    with pytest.raises(ValueError, match=r"test row 0: label -1 .* leave the split out with data\.splits"):
        load_data(DataConfig(source="hub", path="someone/animals", revision="v1"))
    assert asked == [(("someone/animals",), {"name": None, "streaming": False, "revision": "v1"})]
    splits = {"train": "train", "test": "validation"}
    data = load_data(DataConfig(source="hub", path="someone/animals", splits=splits))
    assert len(data.splits["test"]) == 4 and COMMIT in data.description

    def refuse(self, name, **options):
        response = SimpleNamespace(status_code=404, headers={}, request=None)
        raise RepositoryNotFoundError("404 Client Error\n\nfar too long", response=response)

    monkeypatch.setattr(HfApi, "dataset_info", refuse)
    with pytest.raises(OSError, match=r"data.path=a/b: the hub has no such data set, .*\(RepositoryNotFoundError\)"):
        load_data(DataConfig(source="hub", path="a/b"))
    with pytest.raises(ValueError, match="is a folder or file here"):
        load_data(DataConfig(source="hub", path=str(tmp_path)))


def test_a_name_that_cannot_be_on_the_hub():
    with pytest.raises(ValueError, match=r"data\.path='a/b/c' must be a data set's name on the hub"):
        load_data(DataConfig(source="hub", path="a/b/c"))


# ---- streams --------------------------------------------------------------------------------------------------------

STREAMED = SOURCES_OF["streaming"]


def stream_contents(rows, classes):
    found = ((decode_row(row["image"], "row"), classes[row["label"]]) for row in rows)
    return Counter((np.asarray(image).tobytes(), name) for image, name in found)


@pytest.mark.parametrize("source", STREAMED)
def test_a_stream_gives_what_was_written_and_an_index_stays_with_its_image(write, source):
    config, made = write(source, streaming=True)
    data = stream_data(config)
    assert data.classes == ["cat", "dog"]
    assert data.sizes == {split: len(names) for split, (_, names) in made.items()}
    for split in SPLITS:
        assert stream_contents(data.splits[split], data.classes) == written(made[split])
        indices = [row["index"] for row in data.splits[split]]
        assert len(set(indices)) == len(indices)
    check_order(config, data.splits["train"])


def check_order(config, stream):
    """An index stays with its image in any order and process."""

    def by_index(rows):
        return {int(row["index"]): row["image"]["bytes"] for row in rows}

    expected = by_index(stream)
    shuffled = stream.shuffle(seed=3, buffer_size=5)
    assert by_index(shuffled) == expected
    assert [row["index"] for row in shuffled] != list(expected)
    stop = 7
    rows = iter(shuffled)
    first = [next(rows)["index"] for _ in range(stop)]
    resumed = stream_data(config).splits["train"].shuffle(seed=3, buffer_size=5)
    resumed = resumed.skip(stop)
    assert first + [row["index"] for row in resumed] == [row["index"] for row in shuffled]
    shuffled.set_epoch(1)
    nodes = [by_index(split_dataset_by_node(shuffled, rank, 2)) for rank in range(2)]
    assert not set(nodes[0]) & set(nodes[1]) and nodes[0] | nodes[1] == expected
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2)
    assert by_index(loader) == expected


def test_a_stream_needs_all_splits_and_the_names_of_its_classes(tmp_path):
    made = make(["cat", "dog"], {"train": 3, "val": 2})
    for split, table in as_tables(made, ["cat", "dog"]).items():
        table.cast_column("label", datasets.Value("int64")).to_parquet(tmp_path / f"{split}.parquet")
    config = DataConfig(source="parquet", path=str(tmp_path), streaming=True)
    with pytest.raises(ValueError, match="has no test split, and none can be cut from a stream"):
        stream_data(config)
    options = {"splits": {"train": "train", "validation": "val", "test": "val"}}
    with pytest.raises(ValueError, match="does not say the names of its classes; give a file of them"):
        stream_data(DataConfig(source="parquet", path=str(tmp_path), streaming=True, **options))
    (tmp_path / "names").write_text("cat\ndog\n")
    options["classes"] = str(tmp_path / "names")
    data = stream_data(DataConfig(source="parquet", path=str(tmp_path), streaming=True, **options))
    assert stream_contents(data.splits["test"], data.classes) == written(made["val"])
    table = as_tables(make(["cat", "dog", "eel"], {"train": 1}), ["cat", "dog", "eel"])["train"]
    table.cast_column("label", datasets.Value("int64")).to_parquet(tmp_path / "train.parquet")
    data = stream_data(DataConfig(source="parquet", path=str(tmp_path), streaming=True, **options))
    with pytest.raises(ValueError, match="train shard 0 row 2: label 2 is not among the classes"):
        list(data.splits["train"])


# ---- damaged images -------------------------------------------------------------------------------------------------


def damage_file(pattern):
    def damage(root):
        path = sorted(root.glob(pattern))[1]
        path.write_bytes(path.read_bytes()[:60])  # cut off within the pixels
        return path.name

    return damage


def damage_parquet(root):
    path = root / "train-00001-of-00002.parquet"
    table = datasets.Dataset.from_parquet(str(path), cache_dir=str(root / "own"))
    rows = list(table.cast_column("img", datasets.Image(decode=False)))
    rows[2]["img"]["bytes"] = rows[2]["img"]["bytes"][:60]
    datasets.Dataset.from_list(rows, features=table.features).to_parquet(path)
    return "train row 14"


DAMAGE = {
    "imagefolder": damage_file("train/cat/*.png"),
    "csv": damage_file("images/train*.png"),
    "tiny_imagenet": damage_file("*/train/n01/images/*"),
    "imagenet": damage_file("**/val/*.JPEG"),
    "parquet": damage_parquet,
}


@pytest.mark.parametrize("source", DAMAGE)
def test_damaged_images_are_fatal_skipped_or_unchecked(write, tmp_path, source, capsys):
    config, _ = write(source)
    name = DAMAGE[source](tmp_path / source)
    data = load_data(config)
    before = {split: len(images) for split, images in data.splits.items()}
    with pytest.raises(ValueError, match=rf"1 of \d+, .*{name} is not a readable image \(.*data.corrupt=skip") as error:
        drop_corrupt(data, config)
    assert "\n" not in str(error.value)
    config.corrupt = "unchecked"
    assert drop_corrupt(data, config) == {}
    with pytest.raises(OSError, match=f"{name} is not a readable image"):
        [images.read(index) for images in data.splits.values() for index in range(len(images))]
    config.corrupt = "skip"
    removed = drop_corrupt(data, config)
    ((split, (removed_name,)),) = removed.items()
    assert removed_name.endswith(name)
    assert len(data.splits[split]) == before[split] - 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and f"1 of {before[split]} images are damaged and left out" in printed
    for images in data.splits.values():
        assert find_corrupt(images) == {}


def test_processes_find_what_one_finds(write, tmp_path):
    config, _ = write("imagefolder")
    DAMAGE["imagefolder"](tmp_path / "imagefolder")
    images = READERS["imagefolder"](config).splits["train"]
    found = find_corrupt(images, workers=0)
    assert len(found) == 1 and find_corrupt(images, workers=2) == found


@pytest.mark.parametrize("source", ["imagefolder", "parquet", "arrow", "hub"])
def test_a_scan_is_remembered_until_a_file_changes(write, tmp_path, source, monkeypatch):
    config, _ = write(source, corrupt="skip")
    scans = []
    original = scan.find_corrupt
    monkeypatch.setattr(scan, "find_corrupt", lambda *arguments: scans.append(1) or original(*arguments))
    drop_corrupt(load_data(config), config)
    assert len(scans) == 3
    drop_corrupt(load_data(config), config)
    assert len(scans) == 3
    if source in DAMAGE:
        DAMAGE[source](tmp_path / source)
        for _ in range(2):
            assert len(drop_corrupt(load_data(config), config)) == 1
        assert 3 < len(scans) <= 6


def test_arrays_in_memory_are_not_scanned(write, monkeypatch):
    monkeypatch.setattr(scan, "find_corrupt", lambda *arguments: pytest.fail("scanned"))
    for source in ("digits", "cifar10", "mnist"):
        config, _ = write(source)
        assert drop_corrupt(load_data(config), config) == {}


def test_a_split_without_any_readable_image_is_refused_and_a_bomb_is_named(write, tmp_path, monkeypatch):
    config, _ = write("imagefolder", corrupt="skip")
    for path in (tmp_path / "imagefolder" / "test").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="test: none of the 6 images is readable"):
        drop_corrupt(load_data(config), config)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(OSError, match=r"0.png is not a readable image \(Image size \(36 pixels\) exceeds limit"):
        READERS["imagefolder"](config).splits["train"].read(0)
