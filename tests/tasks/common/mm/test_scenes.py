import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("skimage", reason="the photos are scikit-image's")

from hf_sparseprior.images.sources import arrays
from tasks.common.mm import scenes
from tasks.common.mm.scenes import CLASSES, SPLITS, Layer, SceneSettings, compose, main, run_lengths
from tests.each import each

pytestmark = pytest.mark.slow

needs_garments = pytest.mark.skipif(
    not Path(arrays.FASHION_MNIST).is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)
COUNTS = ["--train", "12", "--validation", "4", "--test", "5", "--size", "96"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "scenes"
    assert main([str(out), *COUNTS]) == 0
    return out


def random_layers(count, size, seed):
    """Layers each of one colour of its own, of blobs that overlap much."""
    random = np.random.default_rng(seed)
    layers = []
    for index in range(count):
        side = int(random.integers(12, 40))
        mask = random.random((side, side)) < random.uniform(0.3, 1.0)
        colours = np.full((side, side, 3), 10 * (index + 1), dtype=np.uint8)
        layers.append(Layer(index % len(CLASSES), mask, colours, *random.integers(size - side + 1, size=2).tolist()))
    return layers


@pytest.mark.parametrize("seed", range(3))
def test_masks_and_occlusion_follow_a_painter_pixel_by_pixel(seed):
    """Each layer has a colour of its own, so the image itself tells which object every pixel shows.

    Painting the layers that were kept from the lowest up gives the same picture; those left out were hidden.
    """
    layers = random_layers(7, 64, seed)
    scene = compose(np.zeros((64, 64, 3), dtype=np.uint8), layers)
    shown = sorted(set(np.unique(scene.image)) - {0})
    assert len(shown) == len(scene.masks)
    for colour, mask, label in zip(shown, scene.masks, scene.labels, strict=True):
        assert np.array_equal(mask, (scene.image == colour).all(-1))
        assert label == layers[colour // 10 - 1].label
    kept = [index for index in range(7) if (scene.image == 10 * (index + 1)).any()]
    painted = np.zeros((64, 64), dtype=int)
    for index in kept:
        layer = layers[index]
        for row, column in np.argwhere(layer.mask):
            painted[layer.top + row, layer.left + column] = 10 * (index + 1)
    assert np.array_equal(painted, scene.image[..., 0])
    for index in set(range(7)) - set(kept):
        layer, above = layers[index], [layers[other] for other in kept if other > index]
        visible = 0
        for row, column in np.argwhere(layer.mask):
            row, column = row + layer.top, column + layer.left
            hidden = any(
                0 <= row - other.top < len(other.mask)
                and 0 <= column - other.left < len(other.mask)
                and other.mask[row - other.top, column - other.left]
                for other in above
            )
            visible += not hidden
        assert visible < max(scenes.MIN_PIXELS, scenes.MIN_VISIBLE * layer.mask.sum())


def test_a_covered_object_is_dropped():
    square = np.ones((20, 20), dtype=bool)
    colours = np.full((20, 20, 3), 50, dtype=np.uint8)
    layers = [Layer(0, square, colours, 5, 5), Layer(1, square, 2 * colours, 5, 7), Layer(2, square, 3 * colours, 6, 5)]
    scene = compose(np.zeros((64, 64, 3), dtype=np.uint8), layers)
    assert scene.labels == [2]  # of the others two columns, or a row, can be seen
    assert set(np.unique(scene.image)) == {0, 150}


@needs_garments
@each("split", SPLITS)
def test_coco_and_ade20k_say_the_same(folder, split):
    """pycocotools decodes, measures and boxes what was written without it."""
    pytest.importorskip("pycocotools", reason="pycocotools comes with the extra dense")
    from pycocotools import mask as coco_mask
    from pycocotools.coco import COCO

    coco = COCO(folder / "annotations" / f"instances_{split}.json")
    assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == list(CLASSES)
    assert len(coco.getImgIds()) == {"training": 12, "validation": 4, "test": 5}[split]
    for image in coco.loadImgs(coco.getImgIds()):
        semantic = np.asarray(Image.open(folder / "annotations" / split / image["file_name"]))
        pixels = np.asarray(Image.open(folder / "images" / split / image["file_name"]))
        assert pixels.shape == (96, 96, 3) and semantic.shape == (96, 96) and semantic.dtype == np.uint8
        painted = np.ones((96, 96), dtype=np.uint8)
        annotations = coco.loadAnns(coco.getAnnIds(image["id"]))
        assert annotations
        for annotation in annotations:
            mask = coco.annToMask(annotation).astype(bool)
            encoded = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
            assert annotation["area"] == coco_mask.area(encoded)
            assert annotation["bbox"] == coco_mask.toBbox(encoded).tolist()
            assert (painted[mask] == 1).all()
            painted[mask] = annotation["category_id"] + 1
        assert np.array_equal(painted, semantic)


@needs_garments
def test_only_masked_pixels_differ_from_the_photo(folder):
    """The background is cropped again by the scene's own draws; outside the masks it is the image."""
    photos = scenes.read_photos("test")
    for number in range(5):
        random = np.random.default_rng([0, 2, number])
        background = scenes.crop_photo(photos[random.integers(len(photos))], 96, random)
        image = np.asarray(Image.open(folder / "images" / "test" / f"{number:05d}.png"))
        semantic = np.asarray(Image.open(folder / "annotations" / "test" / f"{number:05d}.png"))
        assert np.array_equal(image[semantic == 1], background[semantic == 1])
        assert (image[semantic > 1] != background[semantic > 1]).any(-1).mean() > 0.9


@needs_garments
def test_splits_share_nothing():
    objects = scenes.read_objects(0)
    for label, name in enumerate(CLASSES):
        pictures = {
            split: {objects[split][label].read(index).tobytes() for index in range(len(objects[split][label]))}
            for split in SPLITS
        }
        # Fashion-MNIST itself holds a few images twice.
        assert len(pictures["training"] & pictures["test"]) <= 2, name
        assert all(len(images) >= 15 for images in pictures.values())
    names = [name for split in SPLITS for name in scenes.PHOTOS[split]]
    assert len(names) == len(set(names))


@needs_garments
def test_scenes_are_a_function_of_seed_and_number(folder, tmp_path):
    few = ["--train", "4", "--validation", "1", "--test", "1", "--size", "96"]
    assert main([str(tmp_path / "fewer"), *few]) == 0
    assert main([str(tmp_path / "other"), *few, "--seed", "1"]) == 0
    name = Path("images/training/00003.png")
    assert (folder / name).read_bytes() == (tmp_path / "fewer" / name).read_bytes()
    assert (folder / name).read_bytes() != (tmp_path / "other" / name).read_bytes()


@needs_garments
def test_folder_is_whole_or_not_there(folder, tmp_path, monkeypatch, capsys):
    assert (folder / "classes.txt").read_text().split() == ["background", *CLASSES]
    assert json.loads((folder / "scenes.json").read_text())["size"] == 96
    with Image.open(folder / "contact_sheet.png") as sheet:
        assert min(sheet.size) > 300
    assert main([str(folder), *COUNTS]) == 0
    assert "complete already" in capsys.readouterr().out
    assert main([str(folder), *COUNTS, "--seed", "3"]) == 2
    assert "other settings" in capsys.readouterr().err

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(scenes, "draw_contact_sheet", fail)
    assert main([str(tmp_path / "out"), *COUNTS]) == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "half").mkdir()
    shutil.copytree(folder / "images", tmp_path / "half" / "images")
    assert main([str(tmp_path / "half"), *COUNTS]) == 2
    assert "exists already" in capsys.readouterr().err


@needs_garments
def test_two_that_find_the_folder_missing_write_it_once(tmp_path, monkeypatch):
    """As runs of a comparison do that begin together."""
    written, write = [], scenes.write_split

    def count(*arguments):
        written.append(arguments[2])
        time.sleep(0.3)
        return write(*arguments)

    monkeypatch.setattr(scenes, "write_split", count)
    settings = SceneSettings(training=2, validation=2, test=2, size=96)
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda _: scenes.write_scenes(tmp_path / "out", settings), range(2)))
    assert written == list(SPLITS)
    out = tmp_path / "out"
    assert sorted(said) == [f"{out} is complete already", f"{out}: 2 training, 2 validation, 2 test"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_missing_sources_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arrays, "FASHION_MNIST", str(tmp_path / "none"))
    assert main([str(tmp_path / "out")]) == 2
    assert "apt-get install dataset-fashion-mnist" in capsys.readouterr().err
    monkeypatch.setitem(scenes.PHOTOS, "test", ("skimage/data/none.png",))
    with pytest.raises(OSError, match=r"none\.png is missing"):
        scenes.read_photos("test")
    monkeypatch.setitem(scenes.PHOTOS, "test", ("no_such_package/none.png",))
    with pytest.raises(ImportError, match="pip install"):
        scenes.read_photos("test")


@each("arguments", [["--train", "0"], ["--size", "20"], ["--size", "4096"], ["--seed", "-1"], ["--validation", "-4"]])
def test_bad_values_are_named(tmp_path, capsys, arguments):
    assert main([str(tmp_path / "out"), *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and arguments[1] in message


@each("seed", range(3))
def test_run_lengths(seed):
    """Written out again, pixel by pixel down the columns."""
    mask = np.random.default_rng(seed).random((5, 7)) < 0.5
    lengths = run_lengths(mask)
    assert lengths["size"] == [5, 7]
    pixels = [index % 2 for index, count in enumerate(lengths["counts"]) for _ in range(count)]
    assert pixels == [int(mask[row, column]) for column in range(7) for row in range(5)]
