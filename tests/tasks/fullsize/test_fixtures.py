"""Fixtures have the published layouts: the readers of the tasks read them, with every class."""

import csv
import functools
import json
import re

import numpy as np
import pytest
from PIL import Image

from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import load_data
from hf_sparseprior.images.vtab_tasks import TASKS
from tasks.fullsize import fixtures
from tasks.fullsize.fixtures import VTAB_TASK, WRITERS, fixture
from tests.each import each


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("fixtures")


@pytest.mark.parametrize(
    ("name", "classes", "sizes", "pixels"),
    [
        ("imagenet", 1000, (2000, 1000), (500, 375)),
        ("tiny_imagenet", 200, (400, 200), (64, 64)),
        ("cifar10", 10, (2000, 10), (32, 32)),
        ("cifar100", 100, (2000, 100), (32, 32)),
        ("vtab", TASKS[VTAB_TASK].classes, (200, 40), (480, 320)),
    ],
)
def test_images_are_read(name, classes, sizes, pixels, root):
    task = {"task": VTAB_TASK} if name == "vtab" else {}
    data = load_data(DataConfig(source=name, path=str(fixture(name, root)), stage="final", **task))
    train, test = data.splits["train"], data.splits["test"]
    assert (len(train), len(test), len(data.classes)) == (*sizes, classes)
    assert {*np.unique(train.labels)} == {*range(classes)}
    assert train.read(0).size == test.read(1).size == pixels
    assert np.asarray(train.read(0)).std() > 20  # no even picture


def test_a_fixture_is_made_once_and_whole(root, monkeypatch):
    folder = fixture("vtab", root)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert fixture("vtab", root) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before

    def broken(place):
        (place / "half").touch()
        raise OSError("full disk")

    monkeypatch.setitem(WRITERS, "broken", broken)
    with pytest.raises(OSError, match="full disk"):
        fixture("broken", root)
    assert not any("broken" in path.name for path in root.iterdir())
    with pytest.raises(ValueError, match="no fixture 'x'"):
        fixture("x", root)


def test_ade20ks_annotations_have_all_labels_at_the_size_of_their_images(root):
    folder = fixture("ade20k", root)
    for split in ("training", "validation"):
        labels = set()
        for image in (folder / "images" / split).glob("*.jpg"):
            annotation = Image.open(folder / "annotations" / split / f"{image.stem}.png")
            assert annotation.mode == "L" and annotation.size == Image.open(image).size
            labels |= {*np.unique(np.asarray(annotation))}
        assert labels == {*range(151)}


def test_cocos_annotations_have_80_categories_within_their_images(root):
    pytest.importorskip("mmdet", reason="needs make dense")
    folder = fixture("coco", root)
    content = json.loads((folder / "annotations" / "instances_train2017.json").read_text())
    used = {annotation["category_id"] for annotation in content["annotations"]}
    assert len(content["categories"]) == 80 and used == {category["id"] for category in content["categories"]}
    assert {category["name"]: category["id"] for category in content["categories"]}["toothbrush"] == 90
    for annotation in content["annotations"]:
        left, top, width, height = annotation["bbox"]
        assert left >= 0 and top >= 0 and left + width <= 640 and top + height <= 480
    assert all((folder / "train2017" / image["file_name"]).is_file() for image in content["images"])


@pytest.mark.parametrize(("name", "file"), [("lift", "image_abs.hdf5"), ("can", "image_abs.hdf5"), ("pusht", None)])
def test_demonstrations_are_read_as_the_published_ones(name, file, root):
    pytest.importorskip("h5py", reason="needs make robotics")
    pytest.importorskip("zarr", reason="needs make robotics")
    from tasks.robotics.formats import open_demonstrations

    folder = fixture(name, root)
    found = open_demonstrations(str(folder / (file or "pusht_cchi_v7_replay.zarr")))
    assert found.environment["name"] == name and len(found.split("train")) == 2
    if name == "pusht":
        assert found.shapes["image"] == (96, 96, 3) and found.shapes["keypoints"] == (18,)
        assert found.read("demo_0", "image").max() > 200
    else:
        assert found.shapes["robot0_eye_in_hand_image"] == (84, 84, 3) and found.action_size == 10


@pytest.fixture(scope="module")
def clips(root):
    """source -> the folder of its clips, made small and once."""
    pytest.importorskip("av", reason="needs pip install '.[video]'")

    @functools.cache
    def make(source):
        (folder := root / f"clips_{source}").mkdir()
        fixtures._clips(getattr(fixtures, f"_{source}"), 9, 32, 24)(folder)
        return folder

    return make


def listed(folder, split):
    with open(folder / "lists" / f"{split}.csv", newline="") as file:
        return list(csv.DictReader(file))


@each(
    "source, classes, pattern",
    [
        ("smarthome", 31, r"[A-Z][A-Za-z.]+_p(03|25|02)_r\d\d_v01_c0[152]\.mp4"),
        ("nucla", 10, r"a\d\d/v0[13]_s(01|09|10)_e\d\d\.avi"),
        ("ntu60", 60, r"S\d{3}C00[123]P0(01|38|03)R001A\d{3}_rgb\.avi"),
    ],
)
def test_clips_are_called_as_published_and_have_lists_of_every_class(source, classes, pattern, clips):
    import av

    rows = {split: listed(clips(source), split) for split in ("train", "validation", "test")}
    names = [row["path"] for own in rows.values() for row in own]
    assert len({row["label"] for row in rows["train"]}) == classes and len(rows["train"]) == 64
    assert len(names) == len({*names}) == 68 and all(re.fullmatch(pattern, name) for name in names)
    with av.open(str(clips(source) / "videos" / names[-1])) as container:
        assert [frame.width for frame in container.decode(video=0)] == [32] * 9


@each(
    "source, protocol, sizes",
    [
        ("smarthome", "cs", (64, 2, 2)),
        ("smarthome", "cv2", (38, 2, 2)),  # of 19 of the 31 classes
        ("nucla", "cs", (64, 2, 2)),
        ("ntu60", "cs", (64, 2, 2)),
    ],
)
def test_the_readers_of_videos_split_them_as_their_lists(source, protocol, sizes, clips):
    from tasks.video.config import DataConfig as VideoConfig
    from tasks.video.data import load_data as load_videos

    videos = clips(source) / "videos"
    data = load_videos(VideoConfig(source=source, path=str(videos), protocol=protocol))
    for split, size in zip(("train", "validation", "test"), sizes, strict=True):
        found = {str(path.relative_to(videos)) for path in data.splits[split].paths}
        assert found <= {row["path"] for row in listed(clips(source), split)} and len(found) == size
