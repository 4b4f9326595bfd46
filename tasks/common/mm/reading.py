"""Reading images in mm pipelines, with errors that name a broken file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mmcv
import numpy as np
from mmcv.transforms import LoadImageFromFile
from mmengine.registry import TRANSFORMS

from hf_sparseprior.cli.image_files import decode_image, why_unreadable

# Steps of mm that read, and the function (step, data set) that makes the step of ours that reads the same and checks
# it; None: mm's own stays.
CHECKED: dict[type, Callable[[Any, Any], Any]] = {}


def read_image(path: str, flag: str = "color") -> np.ndarray:
    """Read an image file: uint8 BGR (height, width, 3), or as it is stored with flag="unchanged".

    Pillow reads it, because it refuses a file that is cut off. OpenCV would fill the rest with grey. Colours are those
    of `decode_image`, and with mm's flag "grayscale" uint8 (height, width).

    Raises:
        OSError: for a missing or broken file; the message names it.
    """
    if flag != "unchanged":
        stored = flag.endswith("_ignore_orientation")
        image = decode_image(path, path, exif="ignore" if stored else "apply")
        grey = flag.startswith("grayscale")
        return np.array(image.convert("L")) if grey else np.array(image)[..., ::-1]
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise OSError(f"{path} is missing") from None
    try:
        return mmcv.imfrombytes(content, flag=flag, backend="pillow")
    except (OSError, ValueError, SyntaxError) as error:  # Pillow's plugins raise all of them for broken files
        raise OSError(f"{path} is not a readable image ({why_unreadable(error)})") from None


@TRANSFORMS.register_module()
class ReadImage(LoadImageFromFile):
    """mm's LoadImageFromFile by Pillow, which names a broken file: uint8 BGR (height, width, 3).

    Where the data set lists the sizes of its images, as COCO's do, the file is compared with it.

    Args:
        to_float32, color_type: as mm's.
    """

    def __init__(self, to_float32: bool = False, color_type: str = "color") -> None:
        super().__init__(to_float32, color_type, imdecode_backend="pillow")

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Read results["img_path"] into results["img"].

        Raises:
            OSError: for a missing or broken file.
            ValueError: for an image of another size than its annotations are made for.
        """
        listed = (results["height"], results["width"]) if {"height", "width"} <= results.keys() else None
        image = read_image(results["img_path"], self.color_type)
        if listed is not None and image.shape[:2] != listed:
            found = "x".join(map(str, image.shape[:2]))
            raise ValueError(
                f"{results['img_path']} is of {found} pixels, the annotation file says {listed[0]}x{listed[1]}"
            )
        if self.to_float32:
            image = image.astype(np.float32)
        results.update(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2])
        return results


CHECKED[LoadImageFromFile] = lambda step, dataset: ReadImage(step.to_float32, step.color_type)


def reads_with_pillow(step: Any) -> bool:
    """Whether a step of mm reads files of this machine by Pillow, and so as `read_image` does."""
    options = ("ignore_empty", "file_client_args", "backend_args")
    return step.imdecode_backend == "pillow" and not any(getattr(step, name, None) for name in options)


def inner_datasets(dataset: Any) -> list[Any]:
    """The built data sets that a data set of mm repeats, joins or mixes; none if it is no wrapper."""
    return [*getattr(dataset, "datasets", []), *([dataset.dataset] if hasattr(dataset, "dataset") else [])]


def check_reading(dataset: Any) -> None:
    """Let the pipeline of a built data set of mm read by our steps, which name broken files, where these do the same.

    The names in a config stay mm's, which its own tools look for.
    """
    for inner in inner_datasets(dataset):
        check_reading(inner)
    _check_steps(getattr(getattr(dataset, "pipeline", None), "transforms", []), dataset)


def _check_steps(steps: list[Any], dataset: Any) -> None:
    for index, step in enumerate(steps):
        for way in getattr(step, "subroutines", []):  # of TestTimeAug
            _check_steps(way.transforms, dataset)
        make = CHECKED.get(type(step))
        if make is not None and reads_with_pillow(step):
            steps[index] = make(step, dataset)
