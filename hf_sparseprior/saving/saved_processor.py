"""preprocessor_config.json of a saved model, checked before transformers reads it.

transformers takes every key and value, and fails at the first image, or prepares it otherwise than the file says.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoImageProcessor
from transformers.utils import CONFIG_NAME, is_vision_available

from hf_sparseprior.base.checks import check_boolean, check_integer, check_within
from hf_sparseprior.base.config_keys import shortened
from hf_sparseprior.base.families import FAMILIES, Family
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.base.json_types import fits, hint_name
from hf_sparseprior.saving.image_processor import SparsePriorImageProcessor
from hf_sparseprior.saving.processor import PROCESSOR

# Keys that files have without being settings of a processor's class; the last two are those of our runs.
KINDS = ("image_processor_type", "feature_extractor_type", "processor_class", "auto_map")
DECODING = {"exif": ("apply", "ignore"), "depth16": ("refuse", "scale")}
SIZES = ("size", "crop_size", "pad_size")
MAX_SIDE = 16_384  # pixels; the processor makes such an image before the model sees it
SIZE_KEYS = (
    *({"height", "width"}, {"shortest_edge"}, {"shortest_edge", "longest_edge"}, {"longest_edge"}),
    *({"max_height", "max_width"}, {"min_pixels", "max_pixels"}),
)
# What a step needs besides itself.
NEEDS = {
    **{"do_resize": ("size", "resample"), "do_center_crop": ("crop_size",), "do_pad": ("pad_size",)},
    **{"do_rescale": ("rescale_factor",), "do_normalize": ("image_mean", "image_std")},
}
FILTERS = {0: "nearest", 1: "Lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "Hamming"}


def load_image_processor(folder: str | os.PathLike) -> Any:
    """The image processor of a saved model.

    Raises:
        OSError: if there is none, or if its file is no JSON object.
        ValueError: for a key that means nothing to it, and a value that is bad or would not be taken; the message has
            the file, the key, the value and what is allowed.
    """
    file = Path(folder) / PROCESSOR
    written = read_json_object(file)
    try:
        _check_kind(written, folder)
        for key, value in written.items():
            _check_value(key, value, _num_channels(folder))
        processor = AutoImageProcessor.from_pretrained(folder)
        for key, value in written.items():
            _check_taken(processor, key, value)
        _check_steps(processor)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return processor


def register_image_processor(family: Family) -> None:
    """Let `AutoImageProcessor` know our class, which saved models of one channel name."""
    if family.takes == "images" and is_vision_available():  # without Pillow there are no image processors
        classes = dict.fromkeys(("pil", "torchvision"), SparsePriorImageProcessor)
        AutoImageProcessor.register(family.config_class, image_processor_classes=classes, exist_ok=True)


def _num_channels(folder: str | os.PathLike) -> int | None:
    """Channels of the images that the model of a folder takes; None: its config.json does not say it."""
    file = Path(folder) / CONFIG_NAME
    config = read_json_object(file) if os.path.lexists(file) else {}
    channels = config.get("num_channels")
    return channels if isinstance(channels, int) else None


def _check_kind(written: Mapping[str, Any], folder: str | os.PathLike) -> None:
    """Refuse a class that is none. Stock models of early versions name none, and transformers knows theirs."""
    key = next((key for key in KINDS[:2] if written.get(key) is not None), KINDS[0])
    name = written.get(key)
    file = Path(folder) / CONFIG_NAME
    if name is None and os.path.lexists(file) and read_json_object(file).get("model_type") not in FAMILIES:
        return
    if name == SparsePriorImageProcessor.__name__:
        return
    known = isinstance(name, str) and re.fullmatch(r"\w+(ImageProcessor(Fast|Pil)?|FeatureExtractor)", name)
    if not known or not hasattr(transformers, str(name).replace("FeatureExtractor", "ImageProcessor")):
        raise ValueError(f"{key}={shortened(name)} must be an image processor of transformers")


def _check_value(key: str, value: Any, num_channels: int | None) -> None:
    if value is None or key in KINDS:
        return
    if key in DECODING and value not in DECODING[key]:
        raise ValueError(f"{key}={shortened(value)} must be one of {', '.join(DECODING[key])}")
    if key in SIZES:
        _check_size(key, value)
    elif key.startswith("do_"):
        check_boolean(key, value)
    elif key == "resample" and (isinstance(value, bool) or not isinstance(value, int) or value not in FILTERS):
        filters = ", ".join(f"{number} ({name})" for number, name in FILTERS.items())
        raise ValueError(f"resample={shortened(value)} must be one of {filters}")
    elif key == "rescale_factor":
        check_within(key, value, math.ulp(0.0), sys.float_info.max, "a finite number above 0")
    elif key in ("image_mean", "image_std"):
        _check_channels(key, value, num_channels)
    elif key in ("data_format", "input_data_format") and value != "channels_first":
        raise ValueError(f"{key}={shortened(value)} must be 'channels_first', as models take images")
    elif key in ("return_tensors", "device"):
        raise ValueError(f"{key}={shortened(value)} must be null; the caller says it")


def _check_size(key: str, value: Any) -> None:
    """One number, [height, width], or an object of sides."""
    if isinstance(value, dict) and set(value) in SIZE_KEYS:
        sides = {f"{key}.{side}": number for side, number in value.items()}
    elif isinstance(value, list) and len(value) == 2:
        sides = {f"{key}[{index}]": number for index, number in enumerate(value)}
    elif isinstance(value, (dict, list)):
        words = "; ".join(" and ".join(sorted(keys)) for keys in SIZE_KEYS)
        raise ValueError(f"{key}={shortened(value)} must be a number, [height, width] or an object of {words}")
    else:
        sides = {key: value}
    for name, side in sides.items():
        limit = MAX_SIDE**2 if name.endswith("_pixels") else MAX_SIDE
        if check_integer(name, side, 1, " (pixels)") > limit:
            raise ValueError(f"{name}={side} must be at most {limit}")


def _check_channels(key: str, value: Any, num_channels: int | None) -> None:
    channels = value if isinstance(value, list) else [value]
    if isinstance(value, list) and len(value) != (num_channels or len(value) or 1):
        raise ValueError(f"{key}={shortened(value)} must be one number for each of {num_channels or 3} channels")
    low, allowed = (math.ulp(0.0), "above 0") if key == "image_std" else (-sys.float_info.max, "finite")
    for channel in channels:
        check_within(key, channel, low, sys.float_info.max, f"numbers that are {allowed}, one for each channel")


def _check_taken(processor: Any, key: str, value: Any) -> None:
    """Refuse what the processor does not have, or has otherwise than written."""
    settings = type(processor).valid_kwargs.__annotations__
    if key in KINDS or key.startswith("_"):
        return
    if key not in settings and key not in DECODING and not _is_attribute(type(processor), key):
        near = difflib.get_close_matches(key, [*settings, *DECODING, *KINDS], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f". Settings: {', '.join(settings)}"
        raise ValueError(f"{key!r} is no setting of {type(processor).__name__}{hint}")
    loaded = getattr(processor, key)
    if value is None and loaded is not None:
        raise ValueError(f"{key}=None must be a value, or be left out for {shortened(_plain(loaded))}")
    hint = settings.get(key)
    if key not in SIZES and hint is not None and not fits(value, hint):
        raise ValueError(f"{key}={shortened(value)} must be {hint_name(hint)}")
    if key not in SIZES and _plain(loaded) != value:
        raise ValueError(f"{key}={shortened(value)} would become {shortened(_plain(loaded))}")


def _is_attribute(cls: type, key: str) -> bool:
    return hasattr(cls, key) and not callable(getattr(cls, key)) and not isinstance(getattr(cls, key), property)


def _plain(value: Any) -> Any:
    """A value of a processor as json writes it."""
    if isinstance(value, tuple):
        return list(value)
    return getattr(value, "value", value)


def _check_steps(processor: Any) -> None:
    """Refuse steps that lack what they need; transformers asks at the first image."""
    any_size = getattr(processor, "max_num_patches", None) is not None  # of Siglip2's, which decides the size
    for step, needs in NEEDS.items():
        for need in needs if getattr(processor, step, False) else ():
            if getattr(processor, need, None) is None and not (need == "size" and any_size):
                raise ValueError(f"{need}=None must be given with {step}=True")
    for step, key in (("do_center_crop", "crop_size"), ("do_pad", "pad_size")):
        sides: Any = getattr(processor, key, None)
        if getattr(processor, step, False) and not (sides.height and sides.width):
            raise ValueError(f"{key}={dict(sides)} must have height and width with {step}=True")
    size: Any = getattr(processor, "size", None)
    pad: Any = getattr(processor, "pad_size", None)
    if getattr(processor, "do_pad", False) and getattr(processor, "do_resize", False):
        fits_in = size.height and size.width and size.height <= pad.height and size.width <= pad.width
        if not fits_in:
            raise ValueError(f"pad_size={dict(pad)} must be at least size={dict(size)}")
