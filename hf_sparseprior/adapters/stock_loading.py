"""Loading stock models with a prior: by `from_pretrained` of their own class, or by the functions here.

transformers lets other packages register quantizers. A `quantization_config` in config.json names one, which is called
around the loading of the weights. `PriorLoader` is one that quantizes nothing. It is the only way for a stock class's
`from_pretrained` to know about a prior without replacing the method. `stock_saving` says what is in the folder. What
happens:

    folder                             loaded                        result
    any saved with a prior             after the import              the prior is back, whatever `attn_implementation`
    the same, trust_remote_code=True   without the package           the same, by the code in the folder
    the same                           without the package           transformers refuses the attention hf_sparseprior
    the same, attn_implementation=...  without the package           a warning, and a report of unexpected weights
    the same, config=... of one's own  by from_pretrained            a report of unexpected weights
                                       by from_pretrained below      ValueError
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_sparseprior.adapters.stock import apply_prior, remove_prior
from hf_sparseprior.adapters.stock_attention import (
    APPLIED,
    PRIOR_MODULE,
    RECORD,
    REGISTERED,
    stock_priors,
)
from hf_sparseprior.adapters.stock_saving import CODE_ENTRY, LOADER, SCALARS_FILE, scalars_of
from hf_sparseprior.base.config_keys import config_file
from hf_sparseprior.base.formats import FORMAT_KEY, MODEL_FORMAT, check_format
from hf_sparseprior.base.loading import check_layers, load_pretrained
from hf_sparseprior.base.own_files import import_hint
from hf_sparseprior.priors.prior import is_prior_weight
from hf_sparseprior.saving.saved_config import check_record, check_saved_config, check_stock_fields

PRIOR_WEIGHTS = rf"\.{PRIOR_MODULE}\."  # what a file has of a prior, which the model has only after the load
LOCATION_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


@register_quantization_config(REGISTERED)
@dataclass
class PriorLoaderConfig(QuantizationConfigMixin):
    """The `quantization_config` of a folder with a prior; the prior itself is in the config's `sparse_prior`."""

    quant_method: Any = REGISTERED
    dequantize = True  # transformers then removes the quantizer from the loaded model, which is an ordinary one

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As in transformers. The loader has no settings.

        Raises:
            ValueError: for one.
        """
        check_record({"quantization_config": config_dict})
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)


@register_quantizer(REGISTERED)
class PriorLoader(HfQuantizer):
    """Puts the prior back after the weights of a stock model are loaded."""

    def is_serializable(self) -> bool:
        """Models with a prior can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """And trained."""
        return True

    def update_attn_implementation(self, config: Any) -> Any:
        """Called before the model is built: refuse sizes with which none can be."""
        try:
            check_stock_fields(config.to_dict(), type(config))
        except ValueError as error:
            raise ValueError(f"{config_file(config.name_or_path)}: {error}") from None
        return config

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        self.checkpoint_files = checkpoint_files
        model._keys_to_ignore_on_load_unexpected.add(PRIOR_WEIGHTS)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model._keys_to_ignore_on_load_unexpected.discard(PRIOR_WEIGHTS)
        model.__dict__.pop("is_quantized", None)
        if not self.checkpoint_files:
            raise ValueError(f"{type(model).__name__} has a prior, whose scalars a state_dict does not bring")
        _restore(model, _record_of(model), _scalars_next_to(self.checkpoint_files[0], model.name_or_path))
        return model


def from_pretrained(model_class: Any, source: str | os.PathLike, **options: Any) -> Any:
    """A stock model with the prior that it was saved with.

    Args:
        model_class: a class of transformers, or one of its Auto classes.
        source: folder or name on the hub.
        options: arguments of `model_class.from_pretrained`. With a `quantization_config` its quantizer loads the
            weights, and then the prior is put back, which the class's own method cannot.

    Returns:
        What `model_class.from_pretrained` returns. Without a prior in `source` nothing is added.

    Raises:
        OSError: if the prior's scalars are missing, damaged or of another shape, and for a checkpoint without any of
            the model's weights or without whole layers. A new head is none of these.
        ValueError: for a bad field of config.json, and for a `config` that does not mention the prior.
    """
    location = {name: options[name] for name in LOCATION_ARGUMENTS if name in options}
    if os.path.lexists(Path(source) / CONFIG_NAME) and "config" not in options and not location.get("subfolder"):
        check_saved_config(source)
    record, config = _saved_record(source, **location), options.get("config")
    if record is not None and isinstance(config, PreTrainedConfig) and not _mentions_prior(config):
        raise ValueError(f"config={type(config).__name__} says nothing of the prior of {source}; leave it out")
    if record is not None and not _is_ours(options.get("quantization_config", PriorLoaderConfig())):
        options = {**options, "config": _without_loader(source, config, location)}
    with_info = options.pop("output_loading_info", False)
    model, info = load_pretrained(model_class.from_pretrained, source, **options, output_loading_info=True)
    brought = [name for name in model.state_dict() if not (is_prior_weight(name) or PRIOR_MODULE in name.split("."))]
    check_layers(source, brought, info)
    if record is not None and not stock_priors(model):
        load_prior(model, source, **location)
    return (model, info) if with_info else model


def _without_loader(source: Any, config: Any, location: dict[str, Any]) -> Any:
    """The config for loading a folder by a quantizer: it does not name our loader, as transformers takes only one."""
    config = AutoConfig.from_pretrained(source, **location) if config is None else copy.deepcopy(config)
    if _is_ours(getattr(config, "quantization_config", None)):
        del config.quantization_config
    return config


def load_prior(model: PreTrainedModel, source: str | os.PathLike, **location: Any) -> PreTrainedModel:
    """Give a loaded stock model the prior that a folder was saved with, and its scalars.

    Needed after a load that left the prior out; otherwise a folder brings it itself.

    Args:
        model: as `from_pretrained` of a stock class returned it.
        source: folder or name on the hub that it came from.
        location: `subfolder`, `revision` and the like, as for `from_pretrained`.

    Returns:
        The model.

    Raises:
        OSError: if the scalars are missing, damaged or of another shape; the model is left without a prior.
        ValueError: if the folder has no prior, or the model has one already or cannot take one.
    """
    record = _saved_record(source, **location)
    if record is None:
        raise ValueError(f"{source} was saved without a prior of hf_sparseprior.apply_prior")
    if stock_priors(model):
        raise ValueError(f"{type(model).__name__} has a prior already; sp.remove_prior takes it off")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{source} has a prior and {type(model).__name__} an adapter: load the prior first, then the adapter by "
            "peft.PeftModel.from_pretrained(model, folder)"
        )
    _restore(model, record, cached_file(source, SCALARS_FILE, **location))
    return model


def _restore(model: PreTrainedModel, record: dict[str, Any], scalars_path: Any) -> None:
    """Apply a recorded prior, read its scalars, and remove from the model's configs what saving wrote into them."""
    try:
        scalars = load_file(scalars_path)
    except SafetensorError as error:
        raise OSError(f"{scalars_path} is damaged: {error}") from None
    naming_us = [config for config in _configs(model) if config._attn_implementation == REGISTERED]
    for config in naming_us:
        config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    try:
        _apply_record(model, record)
        _fill_scalars(model, scalars, scalars_path)
    except (OSError, ValueError):
        if hasattr(model, APPLIED):
            remove_prior(model)
        for config in naming_us:  # so that the model goes on refusing to run as a plain one
            config._attn_implementation = REGISTERED
        raise
    for config in _configs(model):
        for name in (RECORD, FORMAT_KEY, "quantization_config"):
            if hasattr(config, name) and (name != "quantization_config" or _is_ours(config.quantization_config)):
                delattr(config, name)
        if _names_our_code(getattr(config, "auto_map", None)):
            del config.auto_map


def _names_our_code(auto_map: Any) -> bool:
    """Whether an auto map is that of a saved folder with a prior; names of the hub come with their repository."""
    names = auto_map.values() if isinstance(auto_map, dict) else ()
    return any(isinstance(name, str) and name.rpartition("--")[2].startswith(f"{CODE_ENTRY}.") for name in names)


def _apply_record(model: PreTrainedModel, record: dict[str, Any]) -> None:
    """Apply a recorded prior; a ValueError names the file that has it."""
    try:
        check_record({RECORD: record})
        apply_prior(model, record["prior"])
    except ValueError as error:
        text = import_hint(model.name_or_path, error)
        raise ValueError(f"{config_file(model.name_or_path)}: {RECORD}: {text}") from None


def _fill_scalars(model: PreTrainedModel, scalars: dict[str, Tensor], path: Any) -> None:
    """Copy scalars into a model's prior; OSError unless they are exactly those that it has."""
    expected = scalars_of(model)
    given = {name: tuple(tensor.shape) for name, tensor in scalars.items()}
    for name in sorted({*expected, *given}):
        shape = tuple(expected[name].shape) if name in expected else None
        if name not in given:
            raise OSError(f"{path} lacks {name}, which the model's prior has")
        if given.get(name) != shape:
            raise OSError(f"{path}: {name} has shape {given.get(name)}, the model's prior {shape}")
        if not scalars[name].is_floating_point() or not scalars[name].isfinite().all():
            raise OSError(f"{path}: {name} ({scalars[name].dtype}) must be finite floating-point numbers")
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(scalars[name])


def _scalars_next_to(weights: str, name: str) -> str | None:
    """The file of scalars next to a file of weights. On the hub it is downloaded from the same commit."""
    folder = Path(weights).parent
    if (file := folder / SCALARS_FILE).is_file():
        return str(file)
    # cache/models--owner--name/snapshots/commit/subfolder, see huggingface_hub's cache.
    cached = re.fullmatch(r"(.*)[/\\]models--[^/\\]+[/\\]snapshots[/\\](\w+)[/\\]?(.*)", str(folder))
    if cached is None:
        return cached_file(str(folder), SCALARS_FILE)  # says that it is not there
    return cached_file(name, SCALARS_FILE, cache_dir=cached[1], revision=cached[2], subfolder=cached[3])


def _configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """Every config in a model: decoders and towers have their own."""
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            yield config


def _record_of(model: PreTrainedModel) -> dict[str, Any]:
    """What a model's configs say about the prior that it was saved with."""
    for config in _configs(model):
        if hasattr(config, RECORD):
            return getattr(config, RECORD)
    raise ValueError(
        f"{config_file(model.name_or_path)} names the loader {LOADER!r} in quantization_config and lacks {RECORD!r}, "
        "the prior"
    )


def _saved_record(source: str | os.PathLike, **location: Any) -> dict[str, Any] | None:
    """What config.json says about a saved model's prior; None without a prior, and for a folder of an adapter."""
    try:
        content = PreTrainedConfig.get_config_dict(source, **location)[0]
    except OSError:
        return None  # the loading of the model has a better message for what is missing
    try:
        check_format("the model", content.get(FORMAT_KEY, 1), MODEL_FORMAT)
    except ValueError as error:
        raise ValueError(f"{config_file(source)}: {error}") from None
    return content.get(RECORD)


def _is_ours(quantization_config: Any) -> bool:
    if isinstance(quantization_config, dict):
        return quantization_config.get("quant_method") in (LOADER, REGISTERED)
    return isinstance(quantization_config, PriorLoaderConfig)


def _mentions_prior(config: Any) -> bool:
    parts = [getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None]
    return hasattr(config, RECORD) or any(_mentions_prior(part) for part in parts)
