"""Photographs with pseudo-labels: splits share no pixel, both layouts say the same, masks are where they should be."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("skimage", reason="the photographs are scikit-image's")

from pycocotools.coco import COCO
from skimage import data, measure

from tasks.common.mm import photographs
from tasks.common.mm.photographs import CLASSES, GAP, MIN_PIXELS, SOURCES, SPLITS, THINGS, main, regions
from tests.each import each

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def photos():
    return {name: make() for name, make in SOURCES.items()}


@pytest.fixture(scope="module")
def folder(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "photographs"
    with pytest.MonkeyPatch.context() as patch:  # made once
        patch.setattr(photographs, "SOURCES", {name: (lambda photo=photo: photo) for name, photo in photos.items()})
        assert main([str(out)]) == 0
    return out


def test_two_that_find_the_folder_missing_write_it_once(photos, tmp_path, monkeypatch):
    """As runs of a comparison do that begin together."""
    written, write = [], photographs.write_split

    def count(*arguments):
        written.append(arguments[2])
        time.sleep(0.3)
        return write(*arguments)

    monkeypatch.setattr(photographs, "SOURCES", {"coins": lambda: photos["coins"]})
    monkeypatch.setattr(photographs, "write_split", count)
    settings = photographs.Settings()
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda _: photographs.write_photographs(tmp_path / "out", settings), range(2)))
    assert written == list(SPLITS) and sum("complete already" in line for line in said) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def tiles(folder):
    """(split, name of the file, photograph, top, left) of every tile."""
    for line in json.loads((folder / "photographs.json").read_text())["tiles"]:
        file, place = line.split(": ")
        source, top, left = place.split()
        yield (*file.split("/"), source, int(top), int(left))


def test_no_pixel_is_in_two_splits_and_a_gap_lies_between(folder, photos):
    size, seen = 128, {name: np.zeros(photo.labels.shape, dtype=int) for name, photo in photos.items()}
    found = list(tiles(folder))
    for split, _, source, top, left in found:
        seen[source][top : top + size, left : left + size] |= 1 << SPLITS.index(split)
    for source, used in seen.items():
        assert set(np.unique(used)) == {0, 1, 2, 4}, source  # one bit a split: none has two
        for one, other in ((1, 2), (1, 4), (2, 4)):
            rows, columns = np.nonzero(used == one)
            box = np.zeros_like(used, dtype=bool)
            for row, column in ((-GAP, 0), (GAP, 0), (0, -GAP), (0, GAP)):
                inside = (rows + row >= 0) & (rows + row < used.shape[0])
                inside &= (columns + column >= 0) & (columns + column < used.shape[1])
                box[rows[inside] + row, columns[inside] + column] = True
            assert not (box & (used == other)).any(), (source, one, other)
    held = [(split, source, top, left) for split, _, source, top, left in found if split != "training"]
    for split, source, top, left in held:
        near = [(t, x) for s, n, t, x in held if (s, n) == (split, source) and (t, x) != (top, left)]
        assert all(abs(t - top) >= size or abs(x - left) >= size for t, x in near)  # tested once


def test_tiles_are_what_the_photograph_shows_there(folder, photos):
    for split, name, source, top, left in list(tiles(folder))[::17]:
        image = np.asarray(Image.open(folder / "images" / split / name))
        labels = np.asarray(Image.open(folder / "annotations" / split / name))
        square = np.s_[top : top + 128, left : left + 128]
        assert np.array_equal(image, photos[source].image[square])
        assert np.array_equal(labels, photos[source].labels[square])
        assert labels.min() >= 1 and labels.max() <= len(CLASSES) + 1


@each("split", SPLITS)
def test_coco_and_ade20k_say_the_same(folder, split, capsys):
    coco = COCO(str(folder / "annotations" / f"instances_{split}.json"))
    assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == list(THINGS)
    assert len(coco.getImgIds()) == len(list((folder / "images" / split).iterdir())) > 10
    seen = set()
    for image in coco.loadImgs(coco.getImgIds()):
        labels = np.asarray(Image.open(folder / "annotations" / split / image["file_name"]))
        covered = np.zeros(labels.shape, dtype=int)
        for annotation in coco.loadAnns(coco.getAnnIds(imgIds=image["id"])):
            mask = coco.annToMask(annotation).astype(bool)
            name = THINGS[annotation["category_id"] - 1]
            seen.add(name)
            assert (labels[mask] == CLASSES.index(name) + 2).all()
            assert mask.sum() == annotation["area"] >= MIN_PIXELS
            rows, columns = np.nonzero(mask)
            box = [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]
            assert annotation["bbox"] == [int(value) for value in box]
            covered += mask
        assert covered.max(initial=0) <= 1
        things = np.isin(labels, [CLASSES.index(name) + 2 for name in THINGS])
        # What has no instance are parts of fewer pixels.
        left = measure.regionprops(measure.label(things & (covered == 0)))
        assert all(part.area < MIN_PIXELS for part in left)
    assert seen == set(THINGS)
    capsys.readouterr()


def test_masks_are_of_what_they_are_called(photos):
    """Against counts and brightness that do not come from the method."""
    coins = photos["coins"]
    assert len(np.unique(coins.objects)) - 1 == 24  # coins in the photograph
    grey, mask = coins.image[..., 0].astype(float), coins.objects > 0
    assert grey[mask].mean() > 1.5 * grey[~mask].mean()
    tissue = photos["ihc"]
    red, blue = (tissue.image[..., channel].astype(float) for channel in (0, 2))
    gland, nucleus = (tissue.labels == CLASSES.index(name) + 2 for name in ("gland", "nucleus"))
    assert (red - blue)[gland].mean() > 30 > (red - blue)[nucleus].mean()
    retina = photos["retina"]
    vessel = retina.labels == CLASSES.index("vessel") + 2
    green = retina.image[..., 1].astype(float)
    field = data.retina()[..., 0] > 40
    assert 0.03 < vessel.sum() / (field.mean() * vessel.size) < 0.2  # of a fundus; 10 to 15 % with the finest
    around = np.roll(vessel, 12, 0) & ~vessel
    assert green[vessel].mean() < green[around].mean()
    sky = photos["hubble"]
    assert sky.image[sky.objects > 0].mean() > 4 * sky.image[sky.objects == 0].mean()


def test_regions_keep_their_order_whatever_the_size():
    for height, width in ((303, 384), (1000, 400), (256, 257)):
        found = regions(height, width)
        used = np.zeros((height, width), dtype=int)
        for region in found.values():
            used[region] += 1
        assert used.max() == 1 and (used == 0).sum() <= GAP * (height + width)
        assert found["training"][1].stop + GAP == found["test"][1].start
        assert found["validation"][0].stop + GAP == found["test"][0].start


def test_a_folder_is_made_once_and_others_are_refused(folder, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main([str(folder)]) == 0
    assert "complete already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert main([str(folder), "--size", "64"]) == 2
    assert "other settings" in capsys.readouterr().err
    assert main([str(tmp_path / "new"), "--size", "20"]) == 2
    assert "--size 20 must be between 32 and 192 pixels" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    assert main([str(tmp_path / "mine")]) == 2
    assert "mine" in capsys.readouterr().err and (tmp_path / "mine" / "file").read_text() == "mine"


def test_a_folder_that_fails_half_way_is_not_there(tmp_path, monkeypatch):
    def fail(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(photographs, "draw_contact_sheet", fail)
    monkeypatch.setattr(photographs, "SOURCES", {"coins": SOURCES["coins"]})
    assert main([str(tmp_path / "new")]) == 130
    assert list(tmp_path.iterdir()) == []


def test_segmentation_and_detection_read_it(folder):
    pytest.importorskip("mmcv.ops", reason="the extra `dense` is not installed")
    from mmdet.registry import DATASETS as DETECTION
    from mmengine.registry import DefaultScope
    from mmseg.registry import DATASETS as SEGMENTATION

    import tasks.detection.registered
    import tasks.segmentation.registered  # noqa: F401

    with DefaultScope.overwrite_default_scope("mmseg"):  # other tests leave one of theirs
        images = SEGMENTATION.build({"type": "FolderSegmentation", "data_root": str(folder), "split": "test"})
    assert images.metainfo["classes"] == ("background", *CLASSES)
    settings = {
        "type": "CheckedCocoDataset", "data_root": str(folder), "metainfo": {"classes": THINGS}, "test_mode": True,
        "ann_file": "annotations/instances_test.json", "data_prefix": {"img": "images/test/"},
    }  # fmt: skip
    with DefaultScope.overwrite_default_scope("mmdet"):
        objects = DETECTION.build(settings)
    assert len(images) == len(objects) == len(list(Path(folder, "images", "test").iterdir()))
