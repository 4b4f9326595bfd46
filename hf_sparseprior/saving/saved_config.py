"""config.json of a saved model, ours or stock, checked before anything is built from it.

transformers checks the types of most fields of stock configs, but neither sizes nor names: a head of no width is a
ZeroDivisionError, a misspelled key is kept and its field has the default.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from hf_sparseprior.base.checks import check_within
from hf_sparseprior.base.config_keys import PASSED_BY_TRANSFORMERS, check_common_value, shortened
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.base.formats import FORMAT_KEY, MODEL_FORMAT, check_format
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json_object
from hf_sparseprior.base.json_types import fits, hint_name
from hf_sparseprior.base.limits import check_limit, check_size

PRIOR_RECORD = "sparse_prior"  # what `apply_prior` leaves in config.json
PRIOR_LOADER = "hf_sparseprior"  # the `quant_method` of the quantizer that brings it back
# Fields of stock vision encoders, each a number or a list of them, and the limit of each.
SIZES = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "num_channels", "pooler_output_size"), "width"),
    **dict.fromkeys(("decoder_hidden_size", "decoder_intermediate_size", "projection_dim"), "width"),
    **dict.fromkeys(("num_attention_heads", "num_heads", "decoder_num_attention_heads"), "heads"),
    **dict.fromkeys(("num_hidden_layers", "depths", "decoder_num_hidden_layers"), "layers"),
    **dict.fromkeys(("image_size", "patch_size", "num_frames", "tubelet_size", "window_size"), "tokens"),
    "encoder_stride": "tokens",
}
SHARES = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "drop_path_rate", "mask_ratio"),
    *("hidden_dropout", "dropout"),
)
POSITIVE_OR_ZERO = ("layer_norm_eps", "initializer_range", "mlp_ratio", "layerscale_value")
ACTIVATIONS = ("hidden_act", "pooler_act")
TOWERS = ("vision_config", "text_config")


def check_saved_config(folder: str | os.PathLike, own_class: Any = None) -> dict[str, Any]:
    """The content of a saved model's config.json, if a model can be built from it. Our own configs check themselves.

    Args:
        folder: folder of the saved model.
        own_class: config class of ours that may not be registered, in the code that a saved model carries.

    Raises:
        OSError: if there is none, or if it is no JSON object; and for an index of the weights that is none.
        ValueError: for a bad field; the message has the file, the field, its value and what is allowed.
    """
    file = Path(folder) / CONFIG_NAME
    content = read_json_object(file)
    check_index(folder)
    try:
        check_content(content, own_class)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return content


def check_index(folder: str | os.PathLike) -> None:
    """Raise OSError for an index of a model's weights that transformers could not read."""
    file = Path(folder) / SAFE_WEIGHTS_INDEX_NAME
    if not os.path.lexists(file):
        return
    files = read_json_object(file, RECORD_BYTES).get("weight_map")
    names = list(files.values()) if isinstance(files, dict) else [None]
    # A name with a folder could point out of the model's own.
    if not names or not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
        raise OSError(f"{file}: weight_map={shortened(files)} must be an object of weights and names of their files")


def check_content(content: Mapping[str, Any], own_class: Any = None) -> None:
    """Raise ValueError for a field of a config.json with which no model can be built."""
    check_format("the model", content.get(FORMAT_KEY, 1), MODEL_FORMAT)
    model_type = content.get("model_type")
    if own_class is not None and model_type == own_class.model_type and model_type not in CONFIG_MAPPING:
        return
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model_type={shortened(model_type)} must be a family of models of transformers or ours{hint}")
    for key, value in content.items():
        if key == "is_encoder_decoder" and isinstance(value, bool) and model_type not in FAMILIES:
            continue  # DETRs and captioners of transformers have a decoder
        check_common_value(key, value)
    _check_auto_map(content)
    _check_attention(content, CONFIG_MAPPING[model_type])
    _check_architectures(content, model_type)
    if model_type in FAMILIES:
        check_loader(content)
        return
    check_stock_fields(content, CONFIG_MAPPING[model_type])


def check_stock_fields(content: Mapping[str, Any], config_class: Any) -> None:
    """Raise ValueError for a field of a stock config with which no model can be built, and for a bad prior in it."""
    check_record(content)
    _check_encoder(content, config_class)
    for tower in TOWERS:
        if isinstance(part := content.get(tower), dict):
            try:
                _check_encoder(part, _tower_class(part, config_class.sub_configs.get(tower, config_class)))
            except ValueError as error:
                raise ValueError(f"{tower}.{error}") from None


def check_record(content: Mapping[str, Any]) -> None:
    """Raise ValueError for a bad record of the prior with which a stock model was saved, or of its loader."""
    check_format("the model", content.get(FORMAT_KEY, 1), MODEL_FORMAT)
    if PRIOR_RECORD in content:
        record = content[PRIOR_RECORD]
        if not isinstance(record, dict) or set(record) != {"prior"}:
            raise ValueError(f"{PRIOR_RECORD}={shortened(record)} must be an object of 'prior' alone")
        if not isinstance(record["prior"], (str, dict)):
            prior = shortened(record["prior"])
            raise ValueError(f"{PRIOR_RECORD}.prior={prior} must be a name or an object of slots")
    check_loader(content)


def check_loader(content: Mapping[str, Any]) -> None:
    """Raise ValueError for a quantizer that transformers does not know."""
    if (loader := content.get("quantization_config")) is not None:
        method = loader.get("quant_method") if isinstance(loader, dict) else None
        if not isinstance(method, str):
            raise ValueError(f"quantization_config={shortened(loader)} must be an object with a 'quant_method'")
        if method == PRIOR_LOADER and set(loader) != {"quant_method"}:
            raise ValueError(f"quantization_config={shortened(loader)} must be an object of 'quant_method' alone")
        if method not in transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING:
            raise ValueError(f"quantization_config.quant_method={method!r} is no method of transformers or ours")


def _check_auto_map(content: Mapping[str, Any]) -> None:
    """Refuse what the Auto classes cannot look into."""
    classes = content.get("auto_map", {})
    for auto_class, given in classes.items() if isinstance(classes, dict) else [("", 0)]:
        names = given if isinstance(given, list) else [given]  # [slow, fast] of image processors and tokenizers
        if (
            not names
            or not all(name is None or isinstance(name, str) for name in names)
            or names == [None]
            or not auto_class.startswith("Auto")
            or not hasattr(transformers, auto_class)
        ):
            raise ValueError(f"auto_map={shortened(classes)} must be a map of Auto classes to names of classes")


def _check_attention(content: Mapping[str, Any], config_class: Any) -> None:
    """Refuse an attention that transformers does not know; names with a / are kernels of the hub."""
    given = content.get("attn_implementation")
    named = given if isinstance(given, dict) else {"": given}
    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    for part, name in named.items():
        good = name is None or (isinstance(name, str) and (name in known or "/" in name))
        if not good or part not in ("", *config_class.sub_configs):
            raise ValueError(f"attn_implementation={shortened(given)} must be one of {', '.join(known)}")


def _check_architectures(content: Mapping[str, Any], model_type: str) -> None:
    """Refuse the name of a class that is none, or that belongs to another family."""
    ours = {cls.__name__: family.name for family in FAMILIES.values() for cls in family.models.values()}
    for name in content.get("architectures") or ():
        config_class = getattr(getattr(transformers, name, None), "config_class", None)
        owner = ours.get(name, getattr(config_class, "model_type", None))
        towers = {model_type, *_tower_types(model_type)}
        if (owner is None and "auto_map" not in content) or owner not in (None, *towers):
            raise ValueError(f"architectures={content['architectures']!r} must be classes of {model_type!r} models")


def _tower_types(model_type: str) -> list[str]:
    return [getattr(part, "model_type", "") for part in CONFIG_MAPPING[model_type].sub_configs.values()]


def _tower_class(content: Mapping[str, Any], config_class: Any) -> Any:
    """The config class of a tower, which a `model_type` in it names where any is taken, as in LLaVA."""
    if is_dataclass(config_class):
        return config_class
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type={shortened(model_type)} must be a family of models of transformers or ours")
    return CONFIG_MAPPING[model_type]


def _check_encoder(content: Mapping[str, Any], config_class: Any) -> None:
    """Types by the annotations of the config's class, then names, ranges, and sizes that go together."""
    hints = {field.name: field.type for field in fields(config_class)}
    known = {*hints, *config_class.attribute_map}
    for key, value in content.items():
        if key not in known:
            _check_name(key, {*known, *PASSED_BY_TRANSFORMERS, PRIOR_RECORD, FORMAT_KEY} - set(content))
        elif key in hints and not fits(value, hints[key], integers_are_floats=False):  # as transformers
            raise ValueError(f"{key}={shortened(value)} must be {hint_name(hints[key])}")
        _check_range(key, value)
    filled = {**config_class().to_dict(), **content} if content else {}
    _check_together(filled)


def _check_name(key: str, absent: set[str]) -> None:
    if key.startswith("_") or key in (PRIOR_RECORD, FORMAT_KEY, *PASSED_BY_TRANSFORMERS):
        return
    if near := difflib.get_close_matches(key, absent, n=1, cutoff=0.85):
        raise ValueError(f"{key!r} is no field of it; did you mean {near[0]!r}?")


def _check_range(key: str, value: Any) -> None:
    """Raise ValueError for a number out of range. Every part of a list is checked."""
    if isinstance(value, list) and key in (*SIZES, *POSITIVE_OR_ZERO):
        if not value:
            raise ValueError(f"{key}={value!r} must be a number of 1 or more, or a list of them")
        for part in value:
            _check_range(key, part)
    elif value is None or key not in ("num_register_tokens", *SIZES, *SHARES, *POSITIVE_OR_ZERO, *ACTIVATIONS):
        return
    elif key == "num_register_tokens":
        check_size(key, value, 0, "tokens")
    elif key in SIZES:
        check_size(key, value, 1, SIZES[key])
    elif key in SHARES:
        check_within(key, value, 0.0, 1.0, "a number in [0, 1]")
    elif key in ACTIVATIONS:
        if not isinstance(value, str) or value not in ACT2FN:
            raise ValueError(f"{key}={shortened(value)} must be one of {', '.join(ACT2FN)}")
    else:
        check_within(key, value, 0.0, sys.float_info.max, "a finite number of 0 or more")


def _check_together(content: Mapping[str, Any]) -> None:
    """Raise ValueError for heads that have no whole width, and for images without a patch."""
    width, heads = content.get("hidden_size"), content.get("num_attention_heads")
    if isinstance(width, int) and isinstance(heads, int) and width % heads:
        raise ValueError(f"hidden_size={width} must be a multiple of num_attention_heads={heads}")
    image, patch = content.get("image_size"), content.get("patch_size")
    if image is None or patch is None:
        return
    sides = [value if isinstance(value, Sequence) else [value, value] for value in (image, patch)]
    if any(len(side) != 2 for side in sides) or any(whole < part for whole, part in zip(*sides, strict=True)):
        raise ValueError(f"image_size={image} must be at least patch_size={patch}, in height and width")
    tokens = math.prod(whole // part for whole, part in zip(*sides, strict=True))
    check_limit("tokens", tokens, f"image_size={image} and patch_size={patch} make {tokens} patches, which must be")
