"""Loads saved models as they were saved, or as the start of a model with another prior, classifier or grid.

Only the weights of a prior and of a classifier may start anew. Everything else comes from the folder, or the call fails
and names what does not fit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForImageClassification
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from hf_sparseprior.base.config_keys import CheckedFields
from hf_sparseprior.base.families import FAMILIES, Family, family_of, is_backbone_weight
from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.base.loading import check_source, check_whole, load_pretrained, newly_initialised
from hf_sparseprior.priors.prior import is_prior_weight
from hf_sparseprior.saving.saved_config import PRIOR_LOADER, PRIOR_RECORD, check_saved_config

FLOATING = ("F", "BF")  # beginnings of safetensors' names of floating-point types
# Integers that stock models store: indices, and the marker of `adapters.stock_attention`.
INDICES = {"position_ids", "relative_position_index", "needs_hf_sparseprior"}


def check_saved_folder(folder: str | os.PathLike, setting: str | None = None) -> None:
    """Raise OSError unless this is a folder of a saved model. `setting`: the setting by which the user gave it."""
    if not isinstance(folder, (str, os.PathLike)) or not (Path(folder) / CONFIG_NAME).is_file():
        named = f"{setting}={folder}" if setting else f"{folder}"
        raise OSError(f"{named} is not a folder of a saved model{hub_hint(folder)}")


def hub_hint(folder: Any) -> str:
    """How to get a model that is named as on the hub, OWNER/NAME, where a folder is needed; else nothing."""
    named = isinstance(folder, (str, os.PathLike)) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(folder))
    if not named or Path(folder).exists():
        return ""
    return f"; if it is a model of the hub: hf download {folder} --local-dir FOLDER, then give FOLDER"


def saved_family(folder: str | os.PathLike) -> Family:
    """The family of a saved model.

    Raises:
        OSError: if the folder has no config, or one that cannot be read.
        ValueError: if the model is of none of our families.
    """
    name = read_json_object(Path(folder) / CONFIG_NAME).get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"{folder} holds a {name!r} model; make it ours first: python -m hf_sparseprior convert {folder} OUT"
        )
    return FAMILIES[name]


def load_whole_model(
    folder: str | os.PathLike, model_class: Any = AutoModelForImageClassification, **options: Any
) -> Any:
    """Load a saved model, whose weights must all be in the folder, in safetensors only.

    Args:
        folder: folder of the saved model.
        model_class: the model's class, or one of transformers' Auto classes.
        options: arguments of `from_pretrained`.

    Raises:
        OSError: if there is no such folder, or if weights are missing, left over, of another shape than the config
            says, not floating-point or not finite; the message names one.
        ValueError: for a bad field of config.json; the message has the file, the field and what is allowed.
    """
    if not Path(folder).is_dir():
        raise OSError(f"{folder} is not a folder of a saved model{hub_hint(folder)}")
    check_source(folder, options)
    own_class = getattr(model_class, "config_class", None)
    config = check_saved_config(folder, own_class if issubclass(own_class or type, CheckedFields) else None)
    if PRIOR_RECORD in config and (config.get("quantization_config") or {}).get("quant_method") != PRIOR_LOADER:
        raise ValueError(
            f"{Path(folder) / CONFIG_NAME}: {PRIOR_RECORD} needs quantization_config={{'quant_method': "
            f"{PRIOR_LOADER!r}}}, without which the prior is left out; hf_sparseprior.from_pretrained reads it, "
            "and save_pretrained of that model writes both"
        )
    options = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True, **options}
    model, info = load_pretrained(model_class.from_pretrained, folder, **options)
    check_whole(folder, info)
    _check_left_over(folder, model, info["unexpected_keys"])
    _check_dtypes(folder, model)
    _check_finite(folder, model)
    return model


def _check_left_over(folder: str | os.PathLike, model: Any, left_over: Collection[str]) -> None:
    """Refuse weights that the config has no place for: a prior that it does not name, or more layers.

    A bare model leaves a classifier or a backbone's parts over, and stock models what only pretraining needs.
    """
    ours = family_of(model.config) is not None
    names = sorted(name for name in left_over if is_prior_weight(name) or (ours and not may_start_anew(name)))
    if names:
        raise OSError(f"{folder} has weights for which its config has no place: {_first(names)}")


def _check_dtypes(folder: str | os.PathLike, model: Any) -> None:
    """Refuse stored integers, booleans and complex numbers, which `from_pretrained` casts to the model's dtype."""
    integers = {name.rpartition(".")[2] for name, value in model.named_buffers() if not value.is_floating_point()}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            dtypes = {name: stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118
        # Some stock models' files hold indices that today's classes make themselves.
        cast = [
            name
            for name, dtype in dtypes.items()
            if not dtype.startswith(FLOATING) and name.rpartition(".")[2] not in integers | INDICES
        ]
        if cast:
            raise OSError(f"{file}: weights must be floating-point, not {dtypes[cast[0]]}: {_first(cast)}")


def _check_finite(folder: str | os.PathLike, model: Any) -> None:
    state = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    if names := [name for name, value in state.items() if not value.isfinite().all()]:
        raise OSError(f"{folder} has weights that are NaN or infinite: {_first(names)}")


def _first(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])} ({len(names)} in all)"


def check_classes(model: Any, classes: Sequence[str]) -> None:
    """Raise ValueError unless a saved classifier's classes are these, in this order."""
    expected = [model.config.id2label[index] for index in range(model.config.num_labels)]
    if expected != classes:
        raise ValueError(f"the model's classes {expected} are not those of the data, {classes}")


def load_changed_model(folder: str | os.PathLike, model_class: Any, **changes: Any) -> tuple[Any, list[str]]:
    """A model that starts from a saved one and differs from it in fields of the config.

    With another prior, the prior's weights start anew. With other classes, the classifier does. With another image
    size, the position embedding is interpolated. Everything that starts anew is drawn by `model_class`.

    Args:
        folder: folder of a saved model of our families, with or without a classifier.
        model_class: a class of its family.
        changes: fields of the config that differ from the saved ones.

    Returns:
        The model, and the names of the weights that started anew.

    Raises:
        OSError: if the folder is missing or damaged.
        ValueError: for bad fields, and if other weights than those would start anew; the message names them.
    """
    check_saved_folder(folder)
    model, info = model_class.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True, **changes)
    _check_dtypes(folder, model)
    _check_finite(folder, model)
    fresh = newly_initialised(info)
    anew = [name for name in fresh if may_start_anew(name)]
    if anew != fresh:
        source, info = model_class.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True)
        copy_weights(source, model, absent=newly_initialised(info))  # names what does not fit
    return model, anew


def may_start_anew(name: str) -> bool:
    """Whether a weight of this name belongs to a prior, a classifier or a backbone's maps."""
    return "classifier" in name or is_prior_weight(name) or is_backbone_weight(name)


def _same_name(name: str) -> str:
    return name


@torch.no_grad()
def copy_weights(
    source: Any,
    target: Any,
    *,
    source_name: Callable[[str], str] = _same_name,
    may_start_anew: Callable[[str], bool] = may_start_anew,
    absent: Collection[str] = (),
    copy_prior: bool = True,
    strict: bool = False,
) -> None:
    """Copy the weights of a model into another of its family that may have another prior, classifier, dtype or grid.

    Names are compared without the prefix of the base model, so a bare model and one with a classifier fit each other.
    What depends on the grid is interpolated to the target's (`resized_weights`). If the source has no weight of the
    same name and shape, the target keeps its own, provided that it may start anew.

    Args:
        source: model to copy from.
        target: model to fill in place; nothing is written if the two do not fit.
        source_name: the source's name for a weight of the target.
        may_start_anew: whether the target may keep its own weight of this name.
        absent: names in `source` of weights that are not copied, because its folder did not hold them.
        copy_prior: also copy weights of the prior, if name and shape fit.
        strict: refuse every weight of another shape, and weights of the source that the target does not have.

    Raises:
        ValueError: the message names the weights that do not fit.
    """
    given = _state(source, absent)
    given |= {name: value for name, value in source.resized_weights(target.config).items() if name in given}
    wanted = _state(target)
    copies: dict[str, Tensor] = {}
    problems: dict[str, list[str]] = {"missing": [], "of another shape": [], "left over": []}
    for name, value in wanted.items():
        weight = given.get(source_name(name)) if copy_prior or not is_prior_weight(name) else None
        if weight is not None and weight.shape == value.shape:
            copies[name] = weight
        elif not may_start_anew(name) or (strict and weight is not None):
            problems["missing" if weight is None else "of another shape"].append(name)
    if strict:
        used = {source_name(name) for name in wanted}
        problems["left over"] = [name for name in given if name not in used and not may_start_anew(name)]
    reasons = [f"{what}: {', '.join(names[:5])} ({len(names)} in all)" for what, names in problems.items() if names]
    if reasons:
        where = source.name_or_path or type(source).__name__
        raise ValueError(f"{where} does not fit {type(target).__name__}; {'; '.join(reasons)}")
    for name, weight in copies.items():
        wanted[name].copy_(weight)


def _state(model: Any, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Weights by their names in the base model."""
    prefix = f"{model.base_model_prefix}."
    return {name.removeprefix(prefix): value for name, value in model.state_dict().items() if name not in without}


def weights_sha256(folder: str | os.PathLike) -> str | None:
    """SHA-256 of a saved model's weights; None if they are not in one file."""
    weights = Path(folder) / SAFE_WEIGHTS_NAME
    return file_sha256(weights) if weights.is_file() else None
