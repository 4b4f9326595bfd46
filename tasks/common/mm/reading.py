"""Reading images in mm pipelines, with errors that name a broken file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mmcv
import numpy as np
from mmcv.transforms import BaseTransform
from mmengine.registry import TRANSFORMS


def read_image(path: str, flag: str = "color") -> np.ndarray:
    """Read an image file: uint8 BGR (height, width, 3), or as it is stored with flag="unchanged".

    Pillow reads it, because it refuses a file that is cut off. OpenCV would fill the rest with grey.

    Raises:
        OSError: for a missing or broken file; the message names it.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise OSError(f"{path} is missing") from None
    try:
        return mmcv.imfrombytes(content, flag=flag, backend="pillow")
    except (OSError, ValueError, SyntaxError) as error:  # Pillow's plugins raise all of them for broken files
        raise OSError(f"{path} cannot be read as an image ({str(error).splitlines()[0]})") from None


@TRANSFORMS.register_module()
class ReadImage(BaseTransform):
    """mm's LoadImageFromFile, which names a broken file: uint8 BGR (height, width, 3)."""

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Read results["img_path"] into results["img"]."""
        image = read_image(results["img_path"])
        results.update(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2])
        return results
