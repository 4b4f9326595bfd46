"""Checks of the arguments of `from_pretrained` and of what it found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import CONFIG_NAME

LAYER = re.compile(r"(?:^|\.)(?:\w*layers?|blocks|stages)\.\d+(?=\.)")


def newly_initialised(loading_info: dict[str, Any]) -> list[str]:
    """Weights that `from_pretrained` initialised because the checkpoint had none, or none of that shape."""
    return sorted({*loading_info["missing_keys"], *(mismatch[0] for mismatch in loading_info["mismatched_keys"])})


def check_whole(folder: Any, loading_info: dict[str, Any]) -> None:
    """Raise OSError if `from_pretrained` initialised a weight anew, as its loading info says."""
    if fresh := newly_initialised(loading_info):
        raise OSError(f"{folder} lacks weights that fit its config: {', '.join(fresh[:3])} ({len(fresh)} in all)")


def check_layers(source: Any, names: Iterable[str], loading_info: dict[str, Any]) -> None:
    """Raise OSError if `from_pretrained` found none of a model's weights, or a stack of layers without some of them.

    Args:
        source: folder or name on the hub.
        names: of the weights that a checkpoint has to bring.
        loading_info: as `from_pretrained` returns it.
    """
    missing, names = {*loading_info["missing_keys"]}, list(names)
    if names and missing.issuperset(names):
        raise OSError(f"{source} has none of the {len(names)} weights of the model, such as {names[0]}")
    layers: dict[str, bool] = {}  # whether any weight of a layer was there
    for name in names:
        for match in LAYER.finditer(name):
            layer = name[: match.end()]
            layers[layer] = layers.get(layer, False) or name not in missing
    stacks = {layer.rpartition(".")[0] for layer, found in layers.items() if found}
    if lost := [layer for layer, found in layers.items() if not found and layer.rpartition(".")[0] in stacks]:
        raise OSError(f"{source} lacks layers that its config names: {', '.join(lost[:3])} ({len(lost)} in all)")


def check_source(source: Any, options: dict[str, Any]) -> None:
    """Refuse a folder without a config: transformers would build a model from the default config.

    Args:
        source: what `from_pretrained` was given: a folder, a name on the hub or None.
        options: its keyword arguments.
    """
    if source is None or "config" in options:
        return
    folder = Path(source) / options.get("subfolder", "")
    if folder.is_dir() and not (folder / CONFIG_NAME).is_file():
        raise OSError(f"{folder} holds no {CONFIG_NAME}")


def load_pretrained(load: Callable[..., Any], source: Any, *args: Any, **options: Any) -> Any:
    """Call a `from_pretrained`; damaged files and weights of other shapes than config.json says are named in one line.

    Args:
        load: the `from_pretrained` of a class.
        source: folder or name on the hub.
        args, options: its further arguments.

    Raises:
        OSError: for a damaged file. RuntimeError: for weights of other shapes, as in transformers. Others as `load`.
    """
    try:
        return load(source, *args, **options)
    except SafetensorError as error:
        raise OSError(
            f"{_damaged_file(source)}: the safetensors checkpoint cannot be read, it is damaged or cut off ({error})"
        ) from error
    except TypeError as error:  # of a dtype that torch has no default tensors of
        if "storage object" not in str(error):
            raise
        raise OSError(f"{source} has weights of less than 16 bits, and its {CONFIG_NAME} names no dtype") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        # transformers lists the weights in its log alone.
        _, info = load(source, *args, **{**options, "ignore_mismatched_sizes": True, "output_loading_info": True})
        found = sorted(info["mismatched_keys"])
        names = [f"{name} {tuple(stored)} for {tuple(wanted)}" for name, stored, wanted in found]
        if not names:
            raise
        raise RuntimeError(
            f"{source} lacks weights that fit its config: {', '.join(names[:3])} ({len(names)} in all); "
            "with ignore_mismatched_sizes=True they are drawn anew"
        ) from error


def _damaged_file(source: Any) -> Any:
    """The first file of a folder that is no safetensors file; the source itself if it is no such folder."""
    for file in sorted(Path(source).glob("*.safetensors")):
        try:
            safe_open(file, "pt")
        except SafetensorError:
            return file
    return source


@contextmanager
def without_code(model: Any) -> Iterator[None]:
    """Keep transformers from copying the code of a model's class to where it saves."""
    model.is_remote_code = lambda: False
    try:
        yield
    finally:
        del model.is_remote_code
