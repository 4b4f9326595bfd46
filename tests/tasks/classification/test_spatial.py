import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import ndimage
from sklearn.datasets import load_digits, load_sample_images

from hf_sparseprior.images.config import SPLITS, DataConfig
from hf_sparseprior.images.data import load_data
from hf_sparseprior.images.sources import arrays, cifar
from tasks.classification import spatial
from tasks.classification.spatial import GARMENT, TASKS, Pool, Sources, make_split
from tests.each import each

SIZES = {"train": 48, "validation": 24, "test": 96}
ON_PHOTOS = ("count", "position", "orientation")


@pytest.fixture(scope="module")
def sources():
    """Crops of scikit-learn's two photos, its digits, and these at 28x28 in place of garments."""
    photos = [
        photo[top : top + 32, left : left + 32]
        for photo in load_sample_images().images
        for top in range(0, 395, 32)
        for left in range(0, 608, 32)
    ]
    digits = load_digits()
    pixels = (digits.images * 255 / 16).round().astype(np.uint8)
    garments = np.pad(pixels.repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2)))
    return Sources(np.stack(photos), pixels, garments, digits.target, 1200)


@pytest.fixture(scope="module")
def made(sources):
    return {task: {split: make_split(task, split, sources, size) for split, size in SIZES.items()} for task in TASKS}


def flat(sources, **changes):
    """The same with one grey photo over and over."""
    return replace(sources, photos=np.full_like(sources.photos, 90), **changes)


def changed(example):
    return (example.pixels != 90).any(-1)


@pytest.mark.slow
def test_files_are_the_same_every_time_and_hold_what_the_command_prints(sources, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(spatial, "SIZES", SIZES)
    monkeypatch.setattr(spatial, "read_sources", lambda cifar10, fashion_mnist: sources)
    printed = []
    for folder, seed in (("first", 0), ("again", 0), ("other", 1)):
        assert spatial.main([str(tmp_path / folder), "--cifar10", "unused", "--seed", str(seed)]) == 0
        printed.append(
            re.findall(r"(\w+)/(\w+)\.parquet: (\d+) images, sha256 ([0-9a-f]{64})", capsys.readouterr().out)
        )
    assert printed[0] == printed[1]
    assert len(printed[0]) == 12 and not {line[3] for line in printed[0]} & {line[3] for line in printed[2]}
    files = [sorted((tmp_path / folder).rglob("*.parquet")) for folder in ("first", "again")]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))
    for task, split, count, digest in printed[0]:
        data = load_data(DataConfig(source="parquet", path=str(tmp_path / "first" / task)))
        images = data.splits[split]
        pixels = np.stack([np.asarray(images.read(index)) for index in range(len(images))])
        assert len(images) == int(count) == SIZES[split] and data.classes == list(TASKS[task].classes)
        assert cifar.checksum(pixels, images.labels) == digest
    assert (tmp_path / "first" / "spatial_tasks.png").stat().st_size > 10_000


@each("task", TASKS)
def test_classes_are_balanced_and_in_no_order(made, task):
    for split, examples in made[task].items():
        labels = [example.label for example in examples]
        counts = np.bincount(labels, minlength=len(TASKS[task].classes))
        assert counts.sum() == SIZES[split] and counts.max() - counts.min() <= 1
        assert labels != sorted(labels) and labels != [n % len(counts) for n in range(len(labels))]


@each("task", TASKS)
def test_no_photo_and_no_object_is_in_two_splits(made, sources, task):
    photos = {split: {e.photo for e in examples} - {None} for split, examples in made[task].items()}
    objects = {split: {n for e in examples for n in e.objects} for split, examples in made[task].items()}
    for used in (photos, objects):
        assert sum(map(len, used.values())) == len(set.union(*used.values()))
    assert all(len(photos[split]) == (SIZES[split] if task in ON_PHOTOS else 0) for split in SPLITS)
    if task != "count":
        assert min(objects["test"]) >= sources.test_garments > max(objects["train"] | objects["validation"])
        assert all(len(objects[split]) == SIZES[split] for split in SPLITS)


@each("task", ON_PHOTOS)
def test_a_photo_changes_where_the_objects_lie_and_nowhere_else(made, sources, task):
    for example in made[task]["train"]:
        difference = (example.pixels != sources.photos[example.photo]).any(-1)
        for left, top, width, height in example.boxes:
            box = difference[top : top + height, left : left + width]
            assert box.shape == (height, width) and box.any()
            box[:] = False
        assert not difference.any()


def test_as_many_digits_as_the_label_says(sources):
    solid = flat(sources, digits=np.full_like(sources.digits, 255))
    for example in make_split("count", "test", solid, 96):
        found, count = ndimage.label(changed(example), np.ones((3, 3)))
        assert count == int(TASKS["count"].classes[example.label]) == len(set(example.objects))
        assert [(found == number).sum() for number in range(1, count + 1)] == [64] * count


def test_the_garment_is_in_the_cell_that_the_label_says(sources):
    solid = flat(sources, garments=np.full_like(sources.garments, 255))
    seen = set()
    for example in make_split("position", "test", solid, 160):
        rows, columns = np.nonzero(changed(example))
        assert np.ptp(rows) + 1 == np.ptp(columns) + 1 == GARMENT
        middles = [(axis.min() + axis.max() + 1) / 2 for axis in (rows, columns)]
        cells = [min(range(4), key=lambda cell: abs(middle - (7 + 6 * cell))) for middle in middles]
        assert TASKS["position"].classes[example.label] == f"row {cells[0] + 1}, column {cells[1] + 1}"
        seen.add((example.label, *middles))
    assert len(seen) > 60  # 16 cells, up to nine places in each


def test_the_shoe_turned_back_is_upright(sources):
    """Turned by scipy, not by Pillow, and compared with the object that was pasted."""
    for example in make_split("orientation", "test", flat(sources), 64):
        left, top, side, _ = example.boxes[0]
        there = changed(example)[top : top + side, left : left + side].astype(float)
        shoe = ndimage.zoom((sources.garments[example.objects[0]] >= 8).astype(float), 20 / 28, order=1)
        margin = (side - len(shoe)) // 2
        upright = np.pad(shoe, (margin, side - len(shoe) - margin))
        overlap = [
            np.corrcoef(ndimage.rotate(there, -45 * turn, reshape=False, order=1).ravel(), upright.ravel())[0, 1]
            for turn in range(8)
        ]
        assert int(np.argmax(overlap)) == example.label
        assert TASKS["orientation"].classes[example.label] == f"{45 * example.label} degrees"
        assert abs(example.angle - 45 * example.label) <= 10


def test_shoes_and_classes_are_those_of_the_labels(made, sources):
    shoes = {arrays.FASHION_CLASSES.index(name) for name in ("Sneaker", "Ankle boot")}
    assert {int(sources.kinds[e.objects[0]]) for e in made["orientation"]["train"]} == shoes
    for example in made["fashion"]["test"]:
        (garment,) = example.objects
        assert sources.kinds[garment] == example.label
        assert (example.pixels[2:30, 2:30] == sources.garments[garment][..., None]).all()
        assert example.pixels.sum() == 3 * sources.garments[garment].astype(int).sum()


def test_objects_stand_out_from_the_photo(sources):
    opaque = np.full((8, 8), 255, np.uint8)
    for below, low, high in ((0, 205, 215), (127, 205, 215), (128, 45, 55), (255, 45, 55)):
        pixels = np.full((32, 32, 3), below, np.uint8)
        spatial.paste(pixels, opaque // 2, opaque, 4, 6)
        assert low <= pixels[6:14, 4:12].mean() <= high
        assert (pixels[:6] == below).all() and (pixels[14:] == below).all()
    # Half transparent pixels are mixed.
    pixels = np.full((32, 32, 3), 100, np.uint8)
    opacity = np.array([[255, 51]], np.uint8)
    spatial.paste(pixels, opacity, opacity, 0, 0)
    # bright on dark: 210, and 0.2 * 210 + 0.8 * 100
    assert pixels[0, :3, 0].tolist() == [210, 122, 100]


def test_too_few_photos_are_said(sources):
    with pytest.raises(ValueError, match=r"position, train: 2 photos and 800 garments are too few for 20 images"):
        make_split("position", "train", replace(sources, photos=sources.photos[:7]), 20)


def test_pools_do_not_depend_on_the_task(sources):
    pools = [spatial.make_pool("train", sources, np.random.default_rng(n), 0) for n in range(2)]
    assert all(isinstance(pool, Pool) for pool in pools)
    assert set(pools[0].photos) == set(pools[1].photos) and list(pools[0].photos) != list(pools[1].photos)


def test_missing_sources_are_one_line(tmp_path, capsys):
    assert spatial.main([str(tmp_path), "--cifar10", str(tmp_path), "--fashion-mnist", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "train-images-idx3-ubyte.gz" in error
    assert spatial.main([str(tmp_path), "--cifar10", "x", "--seed", "-1"]) == 2
    assert "--seed -1 must be 0 or more" in capsys.readouterr().err
