"""A few images of 32 pixels with a bright and a dark square, as segmentation (ADE20K's layout) and detection (COCO's
layout) read them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tasks.common.mm.scenes import mask_box, run_lengths

COUNTS = {"training": 7, "validation": 3, "test": 4}
PARTS = ("train", "val", "test")  # mm's names
CATEGORIES = {"bright": 5, "dark": 9}  # COCO's ids: neither from 0 nor without gaps


def write_shapes(root: Path) -> Path:
    """images/SPLIT/N.png, annotations/SPLIT/N.png, annotations/instances_SPLIT.json, classes.txt."""
    random = np.random.default_rng(0)
    for split, count in COUNTS.items():
        for part in ("images", "annotations"):
            (root / part / split).mkdir(parents=True)
        scenes = []
        for number in range(count):
            image = random.integers(100, 150, (32, 32, 3), dtype=np.uint8)
            labels = np.ones((32, 32), dtype=np.uint8)
            objects = []
            for label, (category, value, left) in enumerate(((5, 250, 0), (9, 5, 16)), start=2):
                top, left = random.integers(0, 18), left + random.integers(0, 3)
                mask = np.zeros((32, 32), dtype=bool)
                mask[top : top + 13, left : left + 12] = True
                image[mask], labels[mask] = value, label
                objects.append((category, mask))
            labels[0, :5] = 0
            scenes.append(objects)
            Image.fromarray(image).save(root / "images" / split / f"{number}.png")
            Image.fromarray(labels).save(root / "annotations" / split / f"{number}.png")
        write_coco(root / "annotations" / f"instances_{split}.json", scenes, 32)
    (root / "classes.txt").write_text("background\nbright\ndark\n")
    return root


def litter(root: Path) -> None:
    """Put into the training images two more that COCO's file does not list, and what is no image."""
    images, labels = (root / part / "training" for part in ("images", "annotations"))
    for name in ("8.PNG", "more/9.png"):
        for folder in (images, labels):
            (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((32, 32), 51_200, dtype=np.uint16)).save(images / name)
        palette = Image.fromarray(np.eye(32, dtype=np.uint8) + 1).convert("P")
        palette.putpalette([200, 100, 50] * 256)
        palette.save((labels / name).with_suffix(".png"))
    for name in ("._0.png", "Thumbs.db", ".ipynb_checkpoints/0.png", "notes.txt"):
        (images / name).parent.mkdir(exist_ok=True)
        (images / name).write_text("no image")


def write_coco(path: Path, scenes: list, size: int) -> None:
    """scenes: a list of (category, mask) for each image."""
    annotations = [
        {"image_id": number, "category_id": category, "bbox": mask_box(mask), "area": int(mask.sum()), "iscrowd": 0,
         "segmentation": run_lengths(mask)}
        for number, objects in enumerate(scenes)
        for category, mask in objects
    ]  # fmt: skip
    content = {
        "images": [
            {"id": number, "file_name": f"{number}.png", "height": size, "width": size} for number in range(len(scenes))
        ],
        "annotations": [{"id": index + 1, **annotation} for index, annotation in enumerate(annotations)],
        "categories": [{"id": number, "name": name} for name, number in CATEGORIES.items()],
    }
    path.write_text(json.dumps(content))


def data_roots(root: Path) -> list[str]:
    """Overrides that let every data set of a config read the folder."""
    return [f"{part}_dataloader.dataset.data_root={root}/" for part in PARTS]
