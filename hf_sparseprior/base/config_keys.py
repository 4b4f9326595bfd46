"""Keys of configs: their fields, what transformers puts into every config, and a warning of what looks mistyped."""

from __future__ import annotations

import difflib
import functools
import logging
import os
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig
from transformers.utils import CONFIG_NAME

from hf_sparseprior.base.formats import FORMAT_KEY, MODEL_FORMAT, check_format
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.base.limits import check_size
from hf_sparseprior.base.own_files import import_hint

logger = logging.getLogger("hf_sparseprior.config")

# Other libraries' names of some fields.
OTHER_NAMES = {
    "depth": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_registers": "num_register_tokens",
    "img_size": "image_size",
    "patch": "patch_size",
    "in_chans": "num_channels",
    "drop_path": "drop_path_rate",
    "init_values": "layerscale_value",
    "skip_lam": "residual_scale",
    "frames": "num_frames",
    "local_up_to_layer": "num_local_layers",
    "support": "prior",
    "decay": "prior",
}

# What transformers, its examples and the hub give to configs, set on them or write into config.json, those of version 4
# included, without a field of `PretrainedConfig`. Names with a leading underscore are transformers' own, too.
PASSED_BY_TRANSFORMERS = frozenset(
    {
        *(
            "model_type",
            "auto_map",
            "custom_pipelines",
            "name_or_path",
            "transformers_weights",
            "transformers.js_config",
        ),
        *("num_labels", "finetuning_task", "task_specific_params", "keys_to_ignore_at_inference"),
        *("torch_dtype", "quantization_config", "distributed_config", "use_cache", "tie_word_embeddings"),
        *("attn_implementation", "experts_implementation", "output_attentions", "use_return_dict"),
        *("stage_names", "out_features", "out_indices", "return_unused_kwargs"),
    }
)

MODEL = "the model"  # in messages about the format of saved files


@functools.cache
def config_keys(config_class: type[PretrainedConfig]) -> frozenset[str]:
    """The names that a config of this class takes, as keywords, in config.json and in assignments."""
    classes = [cls for cls in config_class.__mro__ if cls not in PretrainedConfig.__mro__]
    properties = {
        name for cls in classes for name, value in vars(cls).items() if isinstance(value, property) and value.fset
    }
    names = {field.name for field in fields(config_class)}
    return frozenset({*names, *properties, *PASSED_BY_TRANSFORMERS, *config_class.attribute_map})


def check_key(config_class: type[PretrainedConfig], key: str) -> None:
    """Raise ValueError unless `key` is a field of these configs, as settings of our own, a task's YAML, have to be."""
    if key in config_keys(cast(Any, config_class)) or str(key).startswith("_"):
        return
    added = _added_fields(config_class)
    known = [field.name for field in fields(config_class)]
    near = [OTHER_NAMES[key]] if OTHER_NAMES.get(key) in added else difflib.get_close_matches(str(key), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f". Fields: {', '.join(added)}"
    raise ValueError(f"{key!r} is no field of {config_class.__name__}{hint}")


def _added_fields(config_class: type[PretrainedConfig]) -> list[str]:
    """Fields of a config class that not every config has."""
    common = {field.name for field in fields(PretrainedConfig)}
    return [field.name for field in fields(config_class) if field.name not in common]


def near_field(config_class: type[PretrainedConfig], key: str) -> str | None:
    """The field that was meant by a keyword that is none: a typing error of it, or another library's name for it.

    A typing error has the same letters without case and underscores, or differs in one or two (in one if the field has
    four or fewer, in three if both begin with the same two), and is no field that transformers has elsewhere.
    """
    if key in config_keys(cast(Any, config_class)) or str(key).startswith("_"):
        return None
    added = _added_fields(config_class)
    if OTHER_NAMES.get(key) in added:
        return OTHER_NAMES[key]
    plain = key.replace("_", "").lower()
    if same := [name for name in added if name.replace("_", "").lower() == plain]:
        return same[0]
    near = min(added, key=lambda name: _edits(key, name))
    allowed = 1 if len(near) <= 4 else 3 if near[:2] == key[:2] else 2
    return near if _edits(key, near) <= allowed and not is_known_elsewhere(key) else None


def _edits(one: str, other: str) -> int:
    """How many letters are put in, left out, replaced or swapped with the next (optimal string alignment)."""
    rows = [list(range(len(other) + 1))]
    for place, letter in enumerate(one, 1):
        row = [place]
        for column, its in enumerate(other, 1):
            least = min(rows[-1][column] + 1, row[-1] + 1, rows[-1][column - 1] + (letter != its))
            if place > 1 < column and (letter, its) == (other[column - 2], one[place - 2]):
                least = min(least, rows[-2][column - 2] + 1)
            row.append(least)
        rows.append(row)
    return rows[-1][-1]


@functools.cache
def is_known_elsewhere(key: str) -> bool:
    """Whether a config of transformers has a field of this name, by the text of its modules, which are not imported."""
    field = re.compile(rf"^ +{re.escape(key)}\b *[:=]", re.MULTILINE)
    files = Path(transformers.__file__).parent.glob("models/*/configuration_*.py")
    return any(field.search(file.read_text(encoding="utf-8", errors="replace")) for file in files)


class CheckedFields:
    """Goes before `PretrainedConfig` in the order of inheritance: checks values, and warns of what looks mistyped.

    As in transformers a config keeps keywords and attributes that it has no field for.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        cls = type(self)
        check_format(MODEL, kwargs.pop(FORMAT_KEY, 1), MODEL_FORMAT)
        for key, value in kwargs.items():
            check_common_value(key, value)
            if key not in config_keys(cast(Any, cls)) and hasattr(cls, key):
                raise ValueError(f"{key}={shortened(value)} cannot be set: {cls.__name__} derives it")
            warn_if_near(cast(Any, cls), key)
        labels, num_labels = getattr(self, "id2label", None), kwargs.get("num_labels")
        if labels is not None and num_labels not in (None, len(labels)):
            raise ValueError(f"num_labels={num_labels!r} must be the {len(labels)} classes of id2label")
        super().__post_init__(**kwargs)  # type: ignore[misc]

    def __setattr__(self, key: str, value: Any) -> None:
        # In a graph transformers' loss writes `problem_type`; TorchDynamo cannot trace the checks.
        if not torch.compiler.is_compiling():
            check_common_value(key, value)
        super().__setattr__(key, value)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, with the number of the format of saved models."""
        return {**super().to_dict(), FORMAT_KEY: MODEL_FORMAT}  # type: ignore[misc]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; errors about config.json name it.

        Raises:
            OSError: if it is missing or no JSON object. ValueError: for a bad field.
        """
        kwargs["_source"] = pretrained_model_name_or_path  # for `from_dict`
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike) -> Any:
        return cls._decode_special_floats(read_json_object(json_file))  # type: ignore[attr-defined]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, which leaves keywords aside that are no attributes.

        Raises:
            ValueError: for a bad field. It names config.json if that has the field, and if AutoConfig or
                `from_pretrained` of this class say where it is.
        """
        source = kwargs.pop("_source", kwargs.get("name_or_path"))
        try:
            return cls._from_dict(config_dict, **kwargs)
        except ValueError as error:
            if source is None or cls._is_good(config_dict):
                raise
            raise ValueError(f"{config_file(source)}: {import_hint(source, error)}") from None

    @classmethod
    def _is_good(cls, config_dict: dict[str, Any]) -> bool:
        """Whether a config can be made of these fields alone, so that keywords must be at fault."""
        try:
            cls._from_dict(config_dict)
        except ValueError:
            return False
        return True

    @classmethod
    def _from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if not isinstance(config_dict, dict):
            raise ValueError(f"a config must be an object of fields, not {shortened(config_dict)}")
        check_format(MODEL, config_dict.get(FORMAT_KEY, 1), MODEL_FORMAT)
        for key in kwargs:
            warn_if_near(cls, key)
        config_dict, num_labels = dict(config_dict), kwargs.get("num_labels")
        if isinstance(labels := config_dict.get("id2label"), dict) and num_labels not in (None, len(labels)):
            config_dict.update(id2label=None, label2id=None)  # names of other classes
        if config_dict.get("stage_names", ()) is None:  # which every config has
            raise ValueError(f"stage_names=None must be {COMMON_FIELDS['stage_names'][0]}")
        made = super().from_dict(config_dict, **kwargs)  # type: ignore[misc]
        # transformers assigns the keywords to a config that was checked without them.
        (made[0] if isinstance(made, tuple) else made).validate()
        return made


_WARNED: set[tuple[str, str]] = set()


def warn_if_near(config_class: type[PretrainedConfig], key: str) -> None:
    """Warn, once of each class and keyword, of one that nearly is a field (`near_field`)."""
    if (config_class.__name__, key) not in _WARNED and (near := near_field(config_class, key)) is not None:
        _WARNED.add((config_class.__name__, key))
        logger.warning("%r is no field of %s and has no effect; did you mean %r?", key, config_class.__name__, near)


def config_file(source: str | os.PathLike) -> str:
    """config.json of what `from_pretrained` was given, a folder, a file or a name on the hub, as errors call it."""
    path = Path(source)
    return str(path) if path.is_file() else str(path / CONFIG_NAME)


# ---- fields of every config ------------------------------------------------------------------------------------------


def check_common_value(key: str, value: Any) -> None:
    """Raise ValueError for a bad value of a field that every config has; transformers checks few of them."""
    if value is not None and key == "num_labels":
        check_size(key, value, 0, "labels")  # transformers makes a name for each
    elif value is not None and key in COMMON_FIELDS:
        allowed, is_good = COMMON_FIELDS[key]
        if not is_good(value):
            raise ValueError(f"{key}={shortened(value)} must be {allowed}")


def _is_dtype(value: Any) -> bool:
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


def _are_labels(value: Any) -> bool:
    if not isinstance(value, dict) or {str(key) for key in value} != {str(number) for number in range(len(value))}:
        return False
    return all(isinstance(name, (str, int, float)) for name in value.values())


def _are_label_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_integer(number) or str(number).isdigit() for number in value.values())


def _are_stages(value: Any) -> bool:
    names = list(value) if isinstance(value, (list, tuple)) else []
    return bool(names) and names == ["stem", *(f"stage{number}" for number in range(1, len(names)))]


def _are_words(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
_DTYPE = ("a floating dtype of torch of 16 bits or more, such as float32 or bfloat16", _is_dtype)
_BOOLEAN = ("True or False", lambda value: isinstance(value, bool))
# What is allowed, in words, and a check of it. None is always allowed.
COMMON_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "return_dict": _BOOLEAN,
    "output_attentions": _BOOLEAN,
    "output_hidden_states": ("True, False or a list of layers", lambda value: isinstance(value, (bool, list))),
    "chunk_size_feed_forward": ("an integer of 0 or more", lambda value: _is_integer(value) and value >= 0),
    "is_encoder_decoder": _BOOLEAN,
    "architectures": ("a list of names of classes", _are_words),
    "transformers_version": ("a text", lambda value: isinstance(value, str)),
    "auto_map": ("a map of names of classes", lambda value: isinstance(value, dict)),
    "id2label": ("a map of 0, 1, 2, ... to the names of the classes", _are_labels),
    "label2id": ("a map of the names of the classes to 0, 1, 2, ...", _are_label_numbers),
    "problem_type": (f"one of {', '.join(_PROBLEMS)}", lambda value: value in _PROBLEMS),
    "stage_names": ("stem, stage1, stage2, ...; num_hidden_layers decides how many", _are_stages),
    "attn_implementation": ("the name of an attention", lambda value: isinstance(value, (str, dict))),
}


def shortened(value: Any) -> str:
    """`repr` of a value, not longer than a line."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
