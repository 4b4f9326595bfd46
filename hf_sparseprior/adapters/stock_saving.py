"""Saving stock models with a prior.

config.json                the stock model's, with the prior (`sparse_prior`), the number of this format
                           (`sparse_prior_format`), our attention (`attn_implementation`) and the loader that puts
                           the prior back (`quantization_config`, see `stock_loading`)
model.safetensors          the stock weights, the prior's scalars under their names in the model, for a Trainer that
                           goes on from here, and a marker in each layer that a load without the prior reports
sparse_prior.safetensors   the prior's learned scalars, under names that do not depend on the head; a load reads these
*.py                       the code of this package that the prior needs, for `trust_remote_code`: config.json has it as
                           `auto_map`, see `modeling_stock_prior`. Not for models whose class is not transformers' own.
README.md                  what the folder needs

transformers' `save_pretrained` of a model without a prior, over such a folder, leaves all but the first two. Only a
config.json with `sparse_prior` makes anybody read the scalars.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto

from hf_sparseprior.adapters.stock_attention import (
    APPLIED,
    IMPLEMENTATION,
    MARKER,
    PRIOR_MODULE,
    RECORD,
    applied_prior,
    stock_priors,
)
from hf_sparseprior.base.files import write_bytes
from hf_sparseprior.base.formats import FORMAT_KEY, MODEL_FORMAT
from hf_sparseprior.priors.prior import prior_name
from hf_sparseprior.saving.card import add_prior_requirement
from hf_sparseprior.saving.code import write_code
from hf_sparseprior.saving.saved_config import PRIOR_LOADER

SCALARS_FILE = "sparse_prior.safetensors"
SAVED_MODULES = ("decay_bias", "predictor", "mixer", "relative_position")  # all else belongs to adapters
CODE_ENTRY = "modeling_stock_prior"  # the module that `auto_map` names
_ABSENT = object()  # in place of a field that a config does not have
LOADER = PRIOR_LOADER  # `quant_method` of the quantizer in `stock_loading`


def save_with_prior(
    model: PreTrainedModel,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> Any:
    """Save a model with a prior as its class does, with the prior in config.json and its scalars in a file.

    `bind_saving` makes this the `save_pretrained` of one model. The classes of transformers keep theirs.

    Raises:
        ValueError: for a model that also has an adapter, and if the model is only a part of the one that `apply_prior`
            was given, or contains it.
    """
    save_stock = functools.partial(
        type(model).save_pretrained, model, save_directory, is_main_process, state_dict, **options
    )
    priors = stock_priors(model)
    by_adapter = getattr(model, "_hf_peft_config_loaded", False)  # transformers would save adapters and nothing else
    if by_adapter and all(prior.for_adapters for prior in priors):
        return save_stock()
    if by_adapter or any(prior.has_adapter for prior in priors):
        raise ValueError(
            f"{type(model).__name__} has a prior and an adapter: save the peft model, or unload() or merge first"
        )
    if getattr(model, APPLIED, None) is None:
        raise ValueError(
            f"{type(model).__name__} has a prior that was applied to a part of it or to what it is a part of; "
            "hf_sparseprior.apply_prior goes to the model that is saved"
        )
    if is_main_process:
        # This comes first, because saving may go on to upload the folder.
        os.makedirs(save_directory, exist_ok=True)
        scalars = {name: tensor.contiguous() for name, tensor in scalars_of(model, state_dict).items()}
        write_bytes(Path(save_directory) / SCALARS_FILE, save(scalars, {"format": "pt"}))
        if _carries_code(model):
            write_code(save_directory, (f"{__package__}.{CODE_ENTRY}",))
        _add_requirement(model, save_directory)
    with _recorded(model):
        return save_stock()


def upload_with_prior(model: PreTrainedModel, working_dir: str | os.PathLike, *args: Any, **options: Any) -> Any:
    """Upload a saved folder as its class does, after transformers has put the repository's card over ours."""
    _add_requirement(model, working_dir)
    return type(model)._upload_modified_files(model, working_dir, *args, **options)


def _add_requirement(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    source = "transformers" if _is_of_transformers(model) else type(model).__module__
    auto_class = _auto_class_of(model) if _carries_code(model) else None
    prior = prior_name(applied_prior(model).prior)
    add_prior_requirement(Path(folder), model.config, prior, type(model).__name__, source, auto_class)


OWN_METHODS: dict[str, Callable[..., Any]] = {
    "save_pretrained": save_with_prior,
    "_upload_modified_files": upload_with_prior,
}


def bind_saving(model: nn.Module) -> None:
    """Make `save_with_prior` the `save_pretrained` of this model, and of every model within it that holds its layers.

    deepcopy and pickle copy a partial in the instance together with the model that it is bound to.
    `copy.copy` shares the layers and the partial: the `save_pretrained` of such a copy saves the original.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and stock_priors(module):
            for name, function in OWN_METHODS.items():
                module.__dict__[name] = functools.partial(function, module)


def unbind_saving(model: nn.Module) -> None:
    """Undo `bind_saving`."""
    for module in model.modules():
        for name, function in OWN_METHODS.items():
            if getattr(module.__dict__.get(name), "func", None) is function:
                del module.__dict__[name]


def refuse_files_weights(model: PreTrainedModel, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
    """A hook before `load_state_dict`: refuse the weights of a saved model that would not all come back.

    Many models have other names in files, and earlier folders have the prior's scalars in a file of their own alone.
    The Trainer of transformers, when it goes on from a checkpoint or loads the best one, would leave what it does not
    find as it is. Where all names are the model's own, it goes on rightly, and nothing is refused.
    """
    if not any(key.endswith(f".{MARKER}") for key in state_dict):
        return  # not of a model with a prior
    own = {prefix + key: key for key in model.state_dict()}
    scalars = {prefix + key for key in _scalar_names(model, own.values())}
    unknown = state_dict.keys() - own.keys()
    if unknown:  # of these, the names that files have
        unknown &= {prefix + key for key in revert_weight_conversion(model, model.state_dict())}
    if unknown or (scalars and scalars.isdisjoint(state_dict)):
        lacking = sorted(own.keys() - state_dict.keys())
        raise RuntimeError(
            f"{type(model).__name__}.load_state_dict: these weights are those of a saved model with a prior and lack "
            f"{lacking[0]} ({len(lacking)} in all); load the folder with from_pretrained, and go on from a checkpoint "
            "with hf_sparseprior.training.SparsePriorTrainer, which does"
        )


def scalars_of(model: PreTrainedModel, state_dict: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The prior's learned scalars under names that do not depend on the head: "layers.0.decay_bias.beta".

    Args:
        model: has a prior of `apply_prior`.
        state_dict: if given, they are read from it instead of the model.
    """
    tensors = model.state_dict() if state_dict is None else state_dict
    return {name: tensors[key] for key, name in _scalar_names(model, tensors).items()}


def _scalar_names(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """For each key of a state dict that is one of the prior's scalars, its name in the file."""
    prefixes = [f"{name}.{PRIOR_MODULE}." for name in applied_prior(model).attention]
    return {
        key: f"layers.{layer}.{key.removeprefix(prefix)}"
        for layer, prefix in enumerate(prefixes)
        for key in keys
        if key.startswith(tuple(f"{prefix}{module}." for module in SAVED_MODULES))
    }


@contextlib.contextmanager
def _recorded(model: PreTrainedModel) -> Iterator[None]:
    """While the model is saved: put the prior into the config.

    transformers refuses to load a config with an attention that it does not know. So without this package the saved
    model is not silently loaded without its prior.
    """
    # Also in the config of a vision tower, which a class for the tower alone reads.
    configs = {id(config): config for config in (model.config, stock_priors(model)[0].config)}
    before: list[tuple[Any, str, Any]] = []
    for config in configs.values():
        fields: dict[str, Any] = {
            RECORD: {"prior": applied_prior(model).prior},
            FORMAT_KEY: MODEL_FORMAT,
            "attn_implementation": IMPLEMENTATION,
        }
        if getattr(config, "quantization_config", None) is None:  # a quantized model needs its own to load
            fields["quantization_config"] = {"quant_method": LOADER}
        if config is model.config and _carries_code(model):
            fields["auto_map"] = {name: f"{CODE_ENTRY}.{name}" for name in _auto_classes(type(config))}
        for name, value in fields.items():
            before.append((config, name, vars(config).get(name, _ABSENT)))
            setattr(config, name, value)
    try:
        yield
    finally:
        for config, name, value in before:
            if value is _ABSENT:
                delattr(config, name)
            else:
                setattr(config, name, value)


def _carries_code(model: PreTrainedModel) -> bool:
    """Whether a folder of a model can be loaded by code that lies in it, by an Auto class of transformers."""
    return _is_of_transformers(model) and bool(_auto_classes(type(model.config)))


def _is_of_transformers(model: PreTrainedModel) -> bool:
    """Whether the class of a model is known wherever transformers is."""
    return type(model).__module__.startswith("transformers.")


def _auto_class_of(model: PreTrainedModel) -> str:
    """The Auto class that loads a model as its own class, or the first that loads models with its config."""
    names = _auto_classes(type(model.config))
    for name in names:
        loaded = getattr(modeling_auto, name)._model_mapping[type(model.config)]
        if type(model) in (loaded if isinstance(loaded, (list, tuple)) else [loaded]):
            return name
    return names[0]


def _auto_classes(config_class: type) -> list[str]:
    """The Auto classes of transformers that load models with a config of this class."""
    return sorted(
        name
        for name in modeling_auto.__all__
        if config_class in (getattr(getattr(modeling_auto, name), "_model_mapping", None) or ())
    )
