"""COCO's annotation files: read and checked, without any framework."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.json_files import DATA_BYTES, read_json
from hf_sparseprior.runs.command import short, shown


@dataclass(frozen=True)
class CocoFile:
    """An annotation file in COCO's layout.

    path: of the file. images: its entries for images, in their order. annotations: those of each image, by its id,
    without crowds and what `is_nothing`. categories: names by id, in the order of the file. content: all of it.
    """

    path: Path
    images: list[dict[str, Any]]
    annotations: dict[Any, list[dict[str, Any]]]
    categories: dict[Any, str]
    content: Mapping[str, Any]

    def masks(self, image: Mapping[str, Any]) -> np.ndarray:
        """Masks of an image's objects, bool (objects, height, width), from polygons and run lengths.

        An object without segmentation has that of its box.
        """
        from pycocotools import mask as coco_mask

        height, width = image["height"], image["width"]
        found = []
        for annotation in self.annotations[image["id"]]:
            left, top, across, down = annotation["bbox"]
            corners = [left, top, left + across, top, left + across, top + down, left, top + down]
            outline = annotation.get("segmentation") or [corners]
            if isinstance(outline, list):
                outline = coco_mask.merge(coco_mask.frPyObjects(outline, height, width))
            elif isinstance(outline["counts"], list):
                outline = coco_mask.frPyObjects(outline, height, width)
            found.append(coco_mask.decode(outline).astype(bool))
        return np.stack(found) if found else np.zeros((0, height, width), dtype=bool)


def read_coco(path: Path, with_mask: bool = True) -> CocoFile:
    """Read an annotation file. `with_mask`: whether every annotation has to have a mask.

    Raises:
        OSError: if it is missing.
        ValueError: if it is no JSON, not in COCO's layout or without images or categories, for two images or categories
            of one id, for a category without a name, and for an annotation of an image or a category that does not
            exist, or whose box or mask does not fit its image.
    """
    try:
        content = read_json(path, DATA_BYTES, strict=False)
    except FileNotFoundError:
        raise OSError(f"{path} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from None
    try:
        check_tables(content)
        images = {entry["id"]: entry for entry in content["images"]}
        categories = {entry["id"]: str(entry["name"]) for entry in content["categories"]}
        annotations: dict[Any, list[dict[str, Any]]] = {key: [] for key in images}
        for entry in images.values():
            if not isinstance(entry["file_name"], str) or min(int(entry["height"]), int(entry["width"])) < 1:
                raise ValueError(f"image {entry['id']!r} needs a file_name, height and width")
        for annotation in content["annotations"]:
            _check_annotation(annotation, images, categories, with_mask)
            image = images[annotation["image_id"]]
            if not annotation.get("iscrowd") and not is_nothing(annotation, image["height"], image["width"]):
                annotations[annotation["image_id"]].append(annotation)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not COCO's layout ({type(error).__name__}: {error})") from None
    if not images or not categories:
        raise ValueError(f"{path} has {len(images)} images and {len(categories)} categories")
    return CocoFile(path, list(images.values()), annotations, categories, content)


def _check_annotation(
    annotation: Mapping[str, Any], images: Mapping[Any, Any], categories: Mapping[Any, str], with_mask: bool
) -> None:
    for key, known, table in (("image_id", images, "images"), ("category_id", categories, "categories")):
        if annotation[key] not in known:
            raise ValueError(
                f"annotation {annotation.get('id')} has {key} {shown(annotation[key])}, which is not among {table}"
            )
    image = images[annotation["image_id"]]
    if damage := annotation_damage(dict(annotation), image["height"], image["width"], with_mask):
        raise ValueError(f"annotation {annotation.get('id')} of {image['file_name']} {damage}")


def check_tables(content: Mapping[str, Any]) -> None:
    """Raise ValueError for two images or categories of one id, of which one would hide the other, or one without a
    name.
    """
    for table in ("images", "categories"):
        for key, number in Counter(entry["id"] for entry in content[table]).items():
            if number > 1:
                raise ValueError(f"{number} of the {table} have the id {shown(key)}")
    for entry in content["categories"]:
        if not isinstance(entry["name"], (str, int)) or not str(entry["name"]).strip():
            raise ValueError(f"the name of the category {shown(entry['id'])} is missing, it is {shown(entry['name'])}")


def is_nothing(annotation: Mapping[str, Any], height: int, width: int) -> bool:
    """Whether an object is less than a pixel wide or high or without area, from which mmdetection does not learn.

    Height and width of the image in pixels. The metric, pycocotools', does count such an object.
    """
    left, top, across, down = annotation["bbox"]
    inside = min(min(left + across, width) - max(left, 0), min(top + down, height) - max(top, 0))
    return inside <= 0 or min(across, down) < 1 or annotation.get("area", 1) <= 0


def look_at_objects(content: Mapping[str, Sequence[Mapping[str, Any]]], where: Any, training: bool) -> list[str]:
    """What looks wrong with an annotation file's images, categories and annotations, one line each.

    Args:
        content: of the file. where: the file. training: whether it is learned from, so that every class should occur.
    """
    images = {image["id"]: image for image in content["images"]}
    lines, learned = [], set()
    nothing = []
    for each in content["annotations"]:
        image = images[each["image_id"]]
        if is_nothing(each, image["height"], image["width"]):
            nothing.append(f"annotation {each.get('id')} of {image['file_name']}, bbox {each['bbox']}")
        elif not each.get("iscrowd"):
            learned.add(each["category_id"])
    if nothing:
        objects = f"{len(nothing)} of {len(content['annotations'])} objects are less than a pixel wide or high"
        learned_from = "nothing is learned from them, but the metric counts them"
        lines.append(f"{objects} or without area; {learned_from} (first: {nothing[0]})")
    for table, name in (("images", "file_name"), ("categories", "name")):
        times = Counter(str(entry[name]) for entry in content[table])
        if twice := [key for key, number in times.items() if number > 1]:
            lines.append(f"several {table} have the same {name}, {short(twice, 3)}")
    if training and (missing := [each["name"] for each in content["categories"] if each["id"] not in learned]):
        lines.append(f"no object to learn from is of the class {short(missing)}")
    return [f"{where}: {line}" for line in lines]


def annotation_damage(annotation: dict[str, Any], height: int, width: int, with_mask: bool = True) -> str | None:
    """What is wrong with the box or mask of one of COCO's annotations, or None. Height and width in pixels.

    `with_mask`: whether there has to be a mask.
    """
    box, mask = annotation.get("bbox"), annotation.get("segmentation")
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(value) for value in box):
        return f"has bbox {box!r}, which must be four numbers"
    left, top, across, down = box
    # A pixel of tolerance: published boxes are rounded.
    if min(across, down) < 0 or min(left, top) < -1 or left + across > width + 1 or top + down > height + 1:
        return f"has bbox {box}, which is not within its image of {height}x{width} (left, top, width, height)"
    if not (with_mask or mask):
        return None
    if isinstance(mask, list):
        if not mask or not all(
            isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0 and all(map(_is_number, polygon))
            for polygon in mask
        ):
            return "has a polygon that is not pairs of coordinates of three or more points"
        return None
    if not isinstance(mask, dict) or not isinstance(mask.get("counts"), (list, str)):
        return "has neither polygons nor run lengths as segmentation"
    if list(mask.get("size") or []) != [height, width]:
        return f"has a mask of size {mask.get('size')}, its image is {[height, width]}"
    if isinstance(mask["counts"], list) and (
        not all(isinstance(count, int) and count >= 0 for count in mask["counts"])
        or sum(mask["counts"]) != height * width
    ):
        return f"has run lengths that do not fill its image of {height}x{width}"
    if isinstance(mask["counts"], str) and packed_pixels(mask["counts"]) != height * width:
        return f"has packed run lengths that do not fill its image of {height}x{width}"
    return None


def packed_pixels(counts: str) -> int | None:
    """Number of pixels that COCO's packed run lengths cover, or None if they are no run lengths.

    A character carries five bits, and one that says whether the number goes on (pycocotools' rleFrString); from the
    third run on, numbers are differences to the run before the last.
    """
    runs: list[int] = []
    value = shift = 0
    for character in counts:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    return None if shift or any(run < 0 for run in runs) else sum(runs)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
