"""Small data in the published layouts, at the published sizes: a few images or demonstrations, labels of every class.

Each is made once, in a folder of its own that is there when it is whole, and is used by every run.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hf_sparseprior.base.files import whole_folder
from hf_sparseprior.images.vtab_tasks import TASKS

VTAB_TASK = "clevr_count"
PICTURES = 8  # different pictures of a data set; its files are links to them
ROBOMIMIC = {"lift": "Lift", "can": "PickPlaceCan"}


def fixture(name: str, root: Path) -> Path:
    """The folder of a fixture below `root`, made if it is not there.

    Raises:
        ValueError: for a name of no fixture.
    """
    if name not in WRITERS:
        raise ValueError(f"there is no fixture {name!r}; there are {', '.join(WRITERS)}")
    folder = root / name
    if not folder.is_dir():
        with whole_folder(folder) as scratch:
            WRITERS[name](Path(scratch))
    return folder


def pictures(width: int, height: int, count: int = PICTURES) -> list[Image.Image]:
    """RGB pictures with edges, slopes and noise, which follow from their number alone."""
    made = []
    for number in range(count):
        random = np.random.default_rng(number)
        rows, columns = np.mgrid[:height, :width]
        phases = random.uniform(0, 2 * np.pi, 3)
        waves = [np.sin(rows / random.uniform(9, 60) + columns / random.uniform(9, 60) + phase) for phase in phases]
        pixels = 128 + 80 * np.stack(waves, -1) + random.normal(0, 12, (height, width, 3))
        top, left = random.integers(0, height // 2), random.integers(0, width // 2)
        pixels[top : top + height // 3, left : left + width // 3] = random.integers(0, 256, 3)
        made.append(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
    return made


def _store(folder: Path, width: int, height: int, ending: str = ".jpg") -> list[Path]:
    folder.mkdir(parents=True)
    files = [folder / f"{number}{ending}" for number in range(PICTURES)]
    for file, picture in zip(files, pictures(width, height), strict=True):
        picture.save(file)
    return files


def _link(source: Path, target: Path) -> None:
    """A second name of a file; a copy where the file system has none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# ---- images ---------------------------------------------------------------------------------------------------------


def write_imagenet(folder: Path) -> None:
    """train/WNID/*.JPEG with two images of each of 1000 classes, val/WNID/*.JPEG with one; 500x375."""
    stored = _store(folder / ".pictures", 500, 375)
    for label in range(1000):
        wnid = f"n{label:08d}"
        for number in range(2):
            _link(stored[(2 * label + number) % PICTURES], folder / "train" / wnid / f"{wnid}_{number}.JPEG")
        _link(stored[label % PICTURES], folder / "val" / wnid / f"ILSVRC2012_val_{label:08d}.JPEG")


def write_tiny_imagenet(folder: Path) -> None:
    """Tiny-ImageNet's folder, 200 classes of 64x64."""
    root = folder / "tiny-imagenet-200"
    stored = _store(folder / ".pictures", 64, 64)
    wnids = [f"n{label:08d}" for label in range(200)]
    lines = []
    for label, wnid in enumerate(wnids):
        for number in range(2):
            name = f"{wnid}_{number}.JPEG"
            _link(stored[(2 * label + number) % PICTURES], root / "train" / wnid / "images" / name)
        _link(stored[label % PICTURES], root / "val" / "images" / f"val_{label}.JPEG")
        lines.append(f"val_{label}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in wnids))
    (root / "val" / "val_annotations.txt").write_text("".join(lines))


CIFAR_IMAGES = 2000  # of the training split, for two steps of any of the recipes


def _cifar(classes: int, column: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        import io

        from datasets import ClassLabel, Dataset, Features
        from datasets import Image as ImageFeature

        encoded = []
        for picture in pictures(32, 32):
            file = io.BytesIO()
            picture.save(file, "PNG")
            encoded.append({"bytes": file.getvalue(), "path": None})
        features = Features({"img": ImageFeature(), column: ClassLabel(names=[f"class{n}" for n in range(classes)])})
        for split, each in (("train", CIFAR_IMAGES // classes), ("test", 1)):
            labels = [label for label in range(classes) for _ in range(each)]
            rows = {"img": [encoded[number % PICTURES] for number in range(len(labels))], column: labels}
            Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}.parquet")

    return write


def write_vtab(folder: Path) -> None:
    """One task of VTAB-1K with its four lists, of 200 and fewer lines."""
    task = TASKS[VTAB_TASK]
    stored = _store(folder / ".pictures", 480, 320)
    place = folder / task.name
    for name, count in {"train800": 160, "val200": 40, "train800val200": 200, "test": 40}.items():
        lines = []
        for number in range(count):
            _link(stored[number % PICTURES], place / "images" / name / f"{number}.jpg")
            lines.append(f"images/{name}/{number}.jpg {number % task.classes}\n")
        (place / f"{name}.txt").write_text("".join(lines))


# ---- segmentation and detection -------------------------------------------------------------------------------------


def write_ade20k(folder: Path) -> None:
    """images/SPLIT/*.jpg and annotations/SPLIT/*.png of 683x512 and 512x683, each with all 150 labels and none."""
    for split, prefix in (("training", "train"), ("validation", "val")):
        for number, picture in enumerate(pictures(683, 512)):
            turned = picture.rotate(90, expand=True) if number % 2 else picture
            width, height = turned.size
            labels = np.add.outer(np.arange(height) // 36, np.arange(width) // 12 * 11) % 151
            name = f"ADE_{prefix}_{number + 1:08d}"
            for part in ("images", "annotations"):
                (folder / part / split).mkdir(parents=True, exist_ok=True)
            turned.save(folder / "images" / split / f"{name}.jpg")
            Image.fromarray(labels.astype(np.uint8)).save(folder / "annotations" / split / f"{name}.png")


def write_coco(folder: Path) -> None:
    """annotations/instances_SPLIT2017.json with COCO's 80 categories and SPLIT2017/*.jpg of 640x480, polygons."""
    # COCO's 80 categories have numbers from 1 to 90, of which these ten are missing.
    ids = [number for number in range(1, 91) if number not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]
    from mmdet.datasets import CocoDataset

    names = CocoDataset.METAINFO["classes"]
    (folder / "annotations").mkdir()
    for split in ("train2017", "val2017"):
        (folder / split).mkdir()
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number, picture in enumerate(pictures(640, 480), start=1):
            file = f"{number:012d}.jpg"
            picture.save(folder / split / file)
            images.append({"id": number, "file_name": file, "width": 640, "height": 480})
            for box in range(10):
                left, top, width, height = 20 + 50 * box, 30 + 20 * box, 50 + 5 * box, 180
                corners = [left, top, left + width, top, left + width, top + height, left, top + height]
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": ids[(10 * (number - 1) + box) % 80],
                        "bbox": [left, top, width, height],
                        "area": width * height,
                        "iscrowd": 0,
                        "segmentation": [corners],
                    }
                )
        categories = [{"id": number, "name": name} for number, name in zip(ids, names, strict=True)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


# ---- robots ---------------------------------------------------------------------------------------------------------


def _robomimic(task: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        """image_abs.hdf5 as robomimic and Diffusion Policy publish it: two cameras of 84x84, absolute actions."""
        import h5py
        from scipy.spatial.transform import Rotation

        random = np.random.default_rng(0)
        arguments: dict[str, Any] = {
            "env_name": ROBOMIMIC[task],
            "type": 1,
            "env_version": "1.2.0",
            "env_kwargs": {"controller_configs": {"type": "OSC_POSE", "control_delta": False}, "control_freq": 20},
        }
        lengths = (60, 50, 40)
        sizes = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object": 10}
        with h5py.File(folder / "image_abs.hdf5", "w") as file:
            file.create_group("data").attrs["env_args"] = json.dumps(arguments)
            for number, length in enumerate(lengths):
                demo = file.create_group(f"data/demo_{number}")
                demo.attrs["num_samples"] = length
                tilts = Rotation.from_euler("xyz", random.normal(0, 0.1, (length, 3)))
                turns = (tilts * Rotation.from_rotvec([3.1, 0, 0])).as_rotvec()
                world = random.uniform((-0.1, -0.1, 0.8), (0.1, 0.1, 1.0), (length, 3))
                demo["actions"] = np.concatenate([world, turns, random.choice((-1.0, 1.0), (length, 1))], 1)
                for camera in ("agentview", "robot0_eye_in_hand"):
                    demo[f"obs/{camera}_image"] = random.integers(0, 256, (length, 84, 84, 3), dtype=np.uint8)
                for key, size in sizes.items():
                    demo[f"obs/{key}"] = random.normal(size=(length, size))
            file["mask/train"] = np.array([b"demo_0", b"demo_1"])
            file["mask/valid"] = np.array([b"demo_2"])

    return write


def write_pusht(folder: Path) -> None:
    """pusht_cchi_v7_replay.zarr as published: format 2, data/{action,img,keypoint,n_contacts,state}, no settings."""
    import zarr

    random = np.random.default_rng(0)
    ends = np.array([80, 150, 210])
    steps = int(ends[-1])
    arrays = {
        "data/action": random.uniform(50, 450, (steps, 2)).astype(np.float32),
        "data/img": random.integers(0, 256, (steps, 96, 96, 3)).astype(np.float32),  # floats, as published
        "data/keypoint": random.uniform(50, 450, (steps, 9, 2)).astype(np.float32),
        "data/n_contacts": np.ones((steps, 1), np.float32),
        "data/state": random.uniform(50, 450, (steps, 5)).astype(np.float32),
        "meta/episode_ends": ends,
    }
    group = zarr.open_group(str(folder / "pusht_cchi_v7_replay.zarr"), mode="w", zarr_format=2)
    for name, values in arrays.items():
        group.create_array(name, data=values)


# ---- video ----------------------------------------------------------------------------------------------------------

# {split: files below videos/ and their classes}, two batches of 32 clips to train on.
Clips = dict[str, list[tuple[str, str]]]
TRAINING_CLIPS, OTHER_CLIPS = 64, 2


def _smarthome() -> Clips:
    """CLASS_p03_r00_v01_c01.mp4: train, validation and test by subjects 3, 25 and 2, and by cameras 1, 5 and 2."""
    places = {"train": "p03_r{}_v01_c01", "validation": "p25_r{}_v01_c05", "test": "p02_r{}_v01_c02"}
    return _numbered(places, SMARTHOME_CLASSES, lambda name, place: f"{name}_{place}.mp4")


def _nucla() -> Clips:
    """a01/v01_s01_e00.avi: subjects 1, 9 and 10."""
    places = {"train": "v01_s01_e{}", "validation": "v01_s09_e{}", "test": "v03_s10_e{}"}
    return _numbered(places, NUCLA_ACTIONS, lambda name, place: f"{name}/{place}.avi")


def _ntu60() -> Clips:
    """S001C001P001R001A001_rgb.avi: subjects 1, 38 and 3, cameras 2, 3 and 1."""
    places = {"train": "S0{}C002P001", "validation": "S0{}C003P038", "test": "S0{}C001P003"}
    actions = [f"A{number:03d}" for number in range(1, 61)]
    return _numbered(places, actions, lambda name, place: f"{place}R001{name}_rgb.avi")


def _numbered(places: dict[str, str], classes: Sequence[str], call: Callable[[str, str], str]) -> Clips:
    clips: Clips = {}
    for split, place in places.items():
        count = TRAINING_CLIPS if split == "train" else OTHER_CLIPS
        # Validation and test have classes of the end of the list, which cross-view protocols have too.
        names = [classes[number % len(classes) if split == "train" else -3 - number] for number in range(count)]
        rounds = [place.format(f"{number // len(classes):02d}") for number in range(count)]
        clips[split] = [(call(name, where), name) for name, where in zip(names, rounds, strict=True)]
    return clips


def _clips(make: Callable[[], Clips], frames: int, width: int, height: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        """videos/ in the published layout, and lists/SPLIT.csv of the same videos."""
        stored, write_video = folder / ".videos", _video_writer((width, height))
        listed = make()
        ending = Path(listed["test"][0][0]).suffix
        stored.mkdir()
        clip = np.stack([np.asarray(picture) for picture in pictures(width, height)])
        for number in range(2):
            numbers = (np.arange(frames) + number) % len(clip)
            write_video(stored / f"{number}{ending}", (clip[each] for each in numbers))
        (folder / "lists").mkdir()
        for split, rows in listed.items():
            for number, (name, _) in enumerate(rows):
                _link(stored / f"{number % 2}{ending}", folder / "videos" / name)
            with open(folder / "lists" / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([("path", "label"), *rows])

    return write


SMARTHOME_CLASSES = (
    *("Cook.Cleandishes", "Cook.Cleanup", "Cook.Cut", "Cook.Stir", "Cook.Usestove", "Cutbread", "Drink.Frombottle"),
    *("Drink.Fromcan", "Drink.Fromcup", "Drink.Fromglass", "Eat.Attable", "Eat.Snack", "Enter", "Getup", "Laydown"),
    *("Leave", "Makecoffee.Pourgrains", "Makecoffee.Pourwater", "Maketea.Boilwater", "Maketea.Insertteabag"),
    *("Pour.Frombottle", "Pour.Fromcan", "Pour.Fromkettle", "Readbook", "Sitdown", "Takepills", "Uselaptop"),
    *("Usetablet", "Usetelephone", "Walk", "WatchTV"),
)
NUCLA_ACTIONS = tuple(f"a{number:02d}" for number in (1, 2, 3, 4, 5, 6, 8, 9, 11, 12))


def _video_writer(size: tuple[int, int]) -> Callable[[Path, Iterable[np.ndarray]], None]:
    import av

    def write(path: Path, frames: Iterable[np.ndarray]) -> None:
        with av.open(str(path), "w") as container:
            stream: Any = container.add_stream("mpeg4", rate=20)
            stream.pix_fmt = "yuv420p"
            stream.width, stream.height = size
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))

    return write


WRITERS: dict[str, Callable[[Path], None]] = {
    "imagenet": write_imagenet,
    "tiny_imagenet": write_tiny_imagenet,
    "cifar10": _cifar(10, "label"),
    "cifar100": _cifar(100, "fine_label"),
    "vtab": write_vtab,
    "ade20k": write_ade20k,
    "coco": write_coco,
    "lift": _robomimic("lift"),
    "can": _robomimic("can"),
    "pusht": write_pusht,
    "smarthome": _clips(_smarthome, 320, 640, 480),
    "nucla": _clips(_nucla, 80, 640, 480),
    "ntu60": _clips(_ntu60, 80, 1920, 1080),
}
