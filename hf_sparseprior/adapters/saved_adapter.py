"""Loading a saved adapter of peft whole: its adapter_config.json is checked, and every weight finds its place.

peft drops keys that it does not know and leaves out weights that do not fit, with a warning or without one.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from hf_sparseprior.adapters.lora import import_peft
from hf_sparseprior.base.checks import check_finite, check_integer, check_within
from hf_sparseprior.base.config_keys import shortened
from hf_sparseprior.base.formats import ADAPTER_FORMAT, FORMAT_KEY, check_format
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.base.json_types import fits, hint_name
from hf_sparseprior.base.limits import check_limit

# Fields of LoRA for language models alone.
TEXT = ("trainable_token_indices", "alora_invocation_tokens", "layer_replication", "megatron_config")


def load_adapter(model: nn.Module, folder: str | os.PathLike) -> Any:
    """A model with the adapter of a folder, as `peft.PeftModel.from_pretrained` gives it, or an error.

    Args:
        model: the base model; it holds the adapter's layers afterwards, and may hold some of them after an error.
        folder: of `save_pretrained` of a `PeftModel`.

    Raises:
        ImportError: without peft.
        OSError: for a file that is missing, damaged or cut off, and for weights that are not the model's.
        ValueError: for a bad field of adapter_config.json. Every message has the file and the field or weight.
    """
    peft = import_peft()
    file, weights_file = Path(folder) / ADAPTER_CONFIG_NAME, Path(folder) / ADAPTER_SAFE_WEIGHTS_NAME
    written = read_json_object(file)
    weights = _read_weights(weights_file)
    try:
        check_fields(written)
        _check_ranks(written, weights)
        _check_modules(model, written)
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        loaded = peft.PeftModel(model, config)
        _check_taken(config, written)
    except ValueError as error:
        text = " ".join(str(error).split())
        raise ValueError(text if text.startswith(str(file)) else f"{file}: {text}") from None
    _check_weights(weights_file, weights, peft.get_peft_model_state_dict(loaded))
    loaded.load_adapter(str(folder), "default")
    return loaded


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise OSError(f"{file} is damaged or cut off ({error})") from None
    for name, value in weights.items():
        if not value.is_floating_point() or not value.isfinite().all():
            raise OSError(f"{file}: {name} ({value.dtype}) must be finite floating-point numbers")
    return weights


def check_fields(written: Mapping[str, Any]) -> None:
    """Raise ValueError for a key of an adapter_config.json that its method does not have, and for a bad value."""
    check_format("the adapter", written.get(FORMAT_KEY, 1), ADAPTER_FORMAT)
    methods = import_peft().mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    method = written.get("peft_type")
    names = [str(getattr(name, "value", name)) for name in methods]
    if not isinstance(method, str) or method not in names:
        near = difflib.get_close_matches(str(method), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"peft_type={shortened(method)} must be a method of peft or ours; {hint}Methods: {names}")
    config_class = next(cls for name, cls in methods.items() if str(getattr(name, "value", name)) == method)
    hints = get_type_hints(config_class)
    known = [item.name for item in fields(config_class) if item.init]
    for key, value in written.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f". Fields: {', '.join(known)}"
            raise ValueError(f"{key!r} is no field of {config_class.__name__}{hint}")
        if key != "peft_type" and not fits(value, hints[key]):
            raise ValueError(f"{key}={shortened(value)} must be {hint_name(hints[key])}")
    if written.get("task_type") is not None:
        raise ValueError(f"task_type={written['task_type']!r} must be null: peft's classes of tasks give models text")
    if method.rpartition("HF_SPARSEPRIOR_")[2] in ("LORA", "LORA_VIOLIN"):
        _check_lora(written)


def _check_lora(written: Mapping[str, Any]) -> None:
    for key in TEXT:
        if written.get(key) is not None:
            raise ValueError(f"{key}={shortened(written[key])} must be null: it is for models of text")
    check_integer("r", written.get("r", 1), 1)
    check_finite("lora_alpha", written.get("lora_alpha", 1), zero=False)
    check_within("lora_dropout", written.get("lora_dropout", 0.0), 0.0, math.nextafter(1.0, 0.0), "a number in [0, 1)")
    for key in ("rank_pattern", "alpha_pattern"):
        if (pattern := written.get(key, {})) is None:
            raise ValueError(f"{key}=None must be a map of names of modules to numbers")
        for name, value in pattern.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(f"{key}.{name}={shortened(value)} must be a number above 0")


def _check_ranks(written: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse ranks that the file's weights do not have, before layers of these ranks are made."""
    ranks = sorted(
        {value.shape[0] for name, value in weights.items() if ".lora_A." in name or "lora_embedding_A" in name}
    )
    given = {f"rank_pattern.{name}": rank for name, rank in (written.get("rank_pattern") or {}).items()}
    if not given and ranks and "r" in written:
        given = {"r": written["r"]}
    for key, rank in given.items():
        if rank not in ranks:
            raise ValueError(f"{key}={rank!r} must be a rank of {ADAPTER_SAFE_WEIGHTS_NAME}, one of {ranks}")
    if "r" in written:
        check_limit("width", written["r"], f"r={written['r']} must be")


def _check_modules(model: nn.Module, written: Mapping[str, Any]) -> None:
    """Refuse names that match no module of the model; peft leaves them out."""
    names = [name for name, _ in model.named_modules() if name]
    for key in ("target_modules", "modules_to_save", "exclude_modules", "rank_pattern", "alpha_pattern"):
        wanted = written.get(key)
        for target in wanted if isinstance(wanted, (list, dict)) else ():
            if not any(name == target or name.endswith(f".{target}") for name in names):
                raise ValueError(f"{key}: {type(model).__name__} has no module {target!r}")


def _check_taken(config: Any, written: Mapping[str, Any]) -> None:
    """Refuse values that peft replaced. Decays have more settings than need be written."""
    for key, value in written.items():
        taken = getattr(config, key)
        taken = sorted(taken) if isinstance(taken, set) else taken
        if key in ("inference_mode", "peft_type", "decay") or value is None:
            continue
        if taken != (sorted(value) if isinstance(getattr(config, key), set) and isinstance(value, list) else value):
            raise ValueError(f"{key}={shortened(value)} would become {shortened(taken)}")


def _check_weights(file: Path, weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise OSError unless a file has the weights of the adapter's layers, each of its shape, and no others."""
    for name in sorted({*weights, *wanted}):
        if name not in weights:
            raise OSError(f"{file} lacks weights that fit its config: {name}")
        if name not in wanted:
            raise OSError(f"{file} has weights for which its config has no place in the model: {name}")
        if weights[name].shape != wanted[name].shape:
            shape, needed = tuple(weights[name].shape), tuple(wanted[name].shape)
            raise OSError(f"{file} has weights of another shape than its config: {name} {shape}, not {needed}")
