"""Read a checkpoint in one format and write it in another; in between it is one of our models."""

from __future__ import annotations

import argparse
import copy
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import CONFIG_NAME

from hf_sparseprior.adapters.lora import CLASSIFIERS
from hf_sparseprior.adapters.stock_attention import RECORD
from hf_sparseprior.adapters.stock_saving import SCALARS_FILE
from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.base.files import check_new, missing_path, whole_file, whole_folder
from hf_sparseprior.base.json_files import read_json
from hf_sparseprior.convert import (
    iformer,
    lvvit,
    mm_vit,
    own_models,
    sparsifiner,
    timesformer,
    timm_convit,
    timm_rotary,
    timm_swin,
    timm_vit,
    transformers_dinov3,
    transformers_siglip,
    transformers_swin,
    transformers_vit,
    violin,
)
from hf_sparseprior.convert.common import ATTENTION_POOLING, base_prefix
from hf_sparseprior.models.base_config import IMAGENET, as_pair
from hf_sparseprior.models.pretrained import copy_weights, hub_hint
from hf_sparseprior.priors.prior import is_prior_weight
from hf_sparseprior.saving.processor import PROCESSOR

# timesformer and transformers_swin before transformers_vit, which would take their bare models for ViTs; violin and
# sparsifiner before lvvit and timm_vit, whose names they have, too; timm_rotary, which refuses most that it takes,
# after all others.
FORMATS: tuple[ModuleType, ...] = (
    *(timesformer, transformers_swin, transformers_vit, transformers_siglip, transformers_dinov3),
    *(violin, sparsifiner, lvvit, timm_vit, timm_swin, timm_convit),
    *(mm_vit, iformer, timm_rotary),
)
# Those whose settings are the command line beside the weights of a PyTorch file.
OF_ARGUMENTS: tuple[ModuleType, ...] = (violin, sparsifiner)
WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".bin")
# What a target is written as, if not as a folder.
WRITTEN_AS = {"timm": ("folder", ".safetensors file"), "original": (".pth file",)}


def target_formats() -> dict[str, dict[str, ModuleType]]:
    """The targets by name, our families and foreign ones: of each the formats by the family that is written with it."""
    targets = {family: {family: own_models} for family in FAMILIES}
    for module in FORMATS:
        for name in module.TARGETS:
            targets.setdefault(name, {})[module.FAMILY] = module
    return targets


def read_checkpoint(source: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Weights and, if there is one, config of a folder, a .safetensors file or a .pth or .bin file.

    PyTorch files are read with `weights_only=True`: tensors come out, and nothing in them is executed. Weights may be
    under "model", "teacher" or "state_dict", with names after "module." or "backbone.", as DeiT and DINO save them.

    Returns:
        The weights by name, and config.json with `image_mean` and `image_std` of preprocessor_config.json.

    Raises:
        OSError: for a missing or unreadable file.
    """
    state, config, _ = _read_source(source)
    return state, config


def _read_source(source: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any] | None, dict[str, Any]]:
    """As `read_checkpoint`, and the command line that a PyTorch file holds beside the weights; {} for none."""
    source = Path(source)
    config = None
    if source.is_dir():
        if (source / "config.json").is_file():
            config = _read_json(source / "config.json")
            if (source / PROCESSOR).is_file():
                processor = _read_json(source / PROCESSOR)
                config.update({key: processor[key] for key in ("image_mean", "image_std") if key in processor})
        files = sorted(source.glob("*.safetensors"))
        if RECORD not in (config or {}):
            # Of an earlier save: transformers' own `save_pretrained` of a model without a prior leaves it behind.
            files = [file for file in files if file.name != SCALARS_FILE]
        files = files or sorted(source.glob("pytorch_model*.bin"))
        if not files:
            raise OSError(f"{source} holds no .safetensors file and no pytorch_model.bin")
    else:
        files = [source]
    state: dict[str, Tensor] = {}
    arguments: dict[str, Any] = {}
    for file in files:
        weights, beside = _read_file(file)
        state.update(weights)
        arguments.update(beside)
    return state, config, arguments


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except ValueError as error:
        raise OSError(f"{file} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise OSError(f"{file} holds {type(content).__name__} instead of names and values")
    return content


def _read_file(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not file.is_file():
        advice = "give a folder with config.json and weights, or a .safetensors, .pth or .bin file"
        raise OSError(missing_path(file, advice + hub_hint(file)))
    try:
        if file.suffix == ".safetensors":
            return load_file(file), {}
        # DeiT, DINO and what is made from them save their command line beside the weights; it only holds values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, ValueError) as error:
        raise OSError(f"{file} cannot be read ({first_line(error)})") from None
    except Exception as error:  # pickle's own errors, for files that hold more than tensors
        raise OSError(f"{file} holds more than tensors and is not read ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise OSError(f"{file} holds a {type(content).__name__} instead of weights by name")
    return unpacked(content)


def unpacked(content: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights that a PyTorch file holds, by their names in the backbone, and its command line; {} for none."""
    nested = next((key for key in ("model", "teacher", "state_dict") if isinstance(content.get(key), dict)), None)
    state = content[nested] if nested else content
    cleaned = {}
    for key, value in state.items():
        name = key.removeprefix("module.").removeprefix("backbone.")
        # DINO's projection head belongs to pretraining.
        if isinstance(value, Tensor) and not (nested == "teacher" and name.startswith("head.")):
            cleaned[name] = value
    arguments = content.get("args")
    return cleaned, vars(arguments) if isinstance(arguments, argparse.Namespace) else {}


def convert_checkpoint(
    source: str | os.PathLike,
    out: str | os.PathLike,
    prior: str | dict[str, Any] | None = None,
    image_size: int | None = None,
    num_attention_heads: int | None = None,
    drop_classifier: bool = False,
    to: str | None = None,
) -> list[str]:
    """Write a checkpoint in another format. With the same prior it computes what the source does.

    Args:
        source: see `read_checkpoint`; foreign or ours.
        out: new folder; to="timm" also takes a new .safetensors file, to="original" a new .pth file.
        prior: the new model's, by default the source's: that of one of our models or of a stock model with
            `apply_prior`, otherwise "dense". A decay that the source does not have starts as its `init` says; extras
            start where they change nothing.
        image_size: if it is not the source's, positions are interpolated: embeddings, or tables of smaller windows.
        num_attention_heads: for timm files of ViTs of other widths than the published ones.
        drop_classifier: write the base model alone; its pooling stays. Attention pooling (SigLIP) is left out too,
            and the new model averages its patches.
        to: one of `target_formats`, by default our own family for the source's kind of model. Foreign formats have no
            prior: prior="dense" drops the source's.

    Returns:
        Lines for the user.

    Raises:
        OSError: for files that cannot be read or an existing `out`.
        ValueError: for names that are not known, missing or left-over weights, or what the target cannot express;
            nothing is written.
    """
    out = Path(out)
    check_new(out)
    targets = target_formats()
    if to is not None and to not in targets:
        raise ValueError(f"to={to!r} must be one of {', '.join(targets)}")
    written_as = WRITTEN_AS.get(to or "", ("folder",))
    is_file = out.suffix in WEIGHT_FILES
    if (f"{out.suffix} file" if is_file else "folder") not in written_as:
        raise ValueError(f"{out}: {to or 'our own format'} is written as a {' or a '.join(written_as)}")
    weights, fields, notes = _read_as_ours(source, num_attention_heads)
    family = fields["model_type"]
    to = family if to is None else to
    if family not in targets[to]:
        raise ValueError(f"{source} is a {family}, which {to} cannot express")
    target = targets[to][family]
    config_class: Any = FAMILIES[family].config_class
    source_config = config_class.from_dict(fields)
    config = source_config if prior is None else config_class.from_dict({**fields, "prior": prior})
    if target is not own_models and config.compressed is not None:
        raise ValueError(f"{source} is compressed, which {to} cannot express: its layers differ in heads and widths")
    if target is not own_models and config.prior_name != "dense":
        raise ValueError(f"prior {config.prior_name!r} has no place in {to}; --prior dense drops it")
    if source_config.prior_name != "dense" and source_config.prior != config.prior:
        notes.append(
            f"note: the source's prior {source_config.prior_name!r} is replaced by {config.prior_name!r}; "
            "the new model computes something else"
        )
    same_prior = all(
        old["decay"] == new["decay"] and old["extras"] == new["extras"] and _same_predictor(old, new)
        for old, new in zip(source_config.layer_priors, config.layer_priors, strict=True)
    )
    if not same_prior:
        weights = {key: value for key, value in weights.items() if not is_prior_weight(key)}
    notes += _attention_pooling(weights, config, drop_classifier, source)
    model = _fill(weights, config, same_prior, drop_classifier, source)
    resized = image_size is not None and as_pair(image_size) != as_pair(config.image_size)
    if image_size is not None and resized:
        model = _resize(model, image_size)
    target.check(model, to, out)
    with whole_file(out) if is_file else whole_folder(out) as scratch:
        processor = Path(source) / PROCESSOR
        if not is_file and to not in WRITTEN_AS and processor.is_file() and not resized:
            shutil.copyfile(processor, scratch / PROCESSOR)
        what, *remarks = target.write(model, to, scratch)
    return [f"{out}: {what}, from {Path(source).name}", *notes, *remarks]


def is_foreign(folder: Any) -> bool:
    """Whether this is a folder of a saved model that is none of our families."""
    if not isinstance(folder, (str, os.PathLike)) or not (Path(folder) / CONFIG_NAME).is_file():
        return False
    return _read_json(Path(folder) / CONFIG_NAME).get("model_type") not in FAMILIES


def foreign_fields(folder: str | os.PathLike) -> dict[str, Any]:
    """Fields of our config for a foreign model; "model_type" names the family.

    Raises:
        ValueError, OSError: as `convert_checkpoint`.
    """
    return copy.deepcopy(_foreign(str(folder), _stamp(folder))[0])


def _stamp(folder: str | os.PathLike) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the files in a folder, by which a changed one is noticed."""
    entries = sorted(os.scandir(str(folder)), key=lambda entry: entry.name)
    return tuple((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries)


@functools.lru_cache(maxsize=4)
def _foreign(folder: str, stamp: tuple[tuple[str, int, int], ...]) -> tuple[dict[str, Any], bool]:
    """Fields of our config, and whether attention pools. A run asks several times, and each reads all weights."""
    weights, fields, _ = _read_as_ours(folder, None)
    return fields, any(key.startswith(ATTENTION_POOLING) for key in weights)


@contextmanager
def converted(folder: str | os.PathLike) -> Iterator[Path]:
    """A folder of our format that computes what a foreign model does, removed at the end of the block. Attention
    pooling (SigLIP) is left out, and with it the classifier.

    Raises:
        ValueError, OSError: as `convert_checkpoint`.
    """
    pooled = _foreign(str(folder), _stamp(folder))[1]
    with tempfile.TemporaryDirectory() as scratch:
        convert_checkpoint(folder, Path(scratch, "model"), drop_classifier=pooled)
        yield Path(scratch, "model")


def _same_predictor(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two priors have the same kind of predictor, or none. Its other settings need not be the same."""
    names = [None if prior["predictor"] is None else prior["predictor"]["name"] for prior in (old, new)]
    return names[0] == names[1]


def _read_as_ours(
    source: str | os.PathLike, num_attention_heads: int | None
) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
    """Weights under our classifier's names ("vit.layers.0..."), fields of the config, notes for the user."""
    weights, fields, assumed, notes = as_ours(source, *_read_source(source), num_attention_heads)
    for name, (value, words) in assumed.items():
        fields[name] = value
        notes.append(f"note: {name} is not in the source; {words} is assumed")
    return weights, fields, notes


def as_ours(
    source: str | os.PathLike,
    state: dict[str, Tensor],
    settings: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    num_attention_heads: int | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, tuple[Any, str]], list[str]]:
    """A checkpoint of any format under our names.

    Args:
        source: where it is from, for messages.
        state, settings: weights and config as `read_checkpoint` gives them.
        arguments: the command line beside the weights.
        num_attention_heads: for files of ViTs that do not say it.

    Returns:
        Weights under our classifier's names ("vit.layers.0..."), fields of the config, fields that the source does not
        say with the assumed value and words for it, and notes for the user.

    Raises:
        ValueError: for names of no known format, or an architecture without a counterpart.
    """
    module = next((module for module in (own_models, *FORMATS) if module.matches(state)), None)
    if own_models.is_ours(settings):
        module = own_models
    if module is None:
        raise ValueError(f"{source}: names like {', '.join(sorted(state)[:3])} are of no known source")
    if module in OF_ARGUMENTS:
        settings = arguments or {}
    if num_attention_heads is not None:
        if module not in (timm_vit, mm_vit):
            raise ValueError(
                f"--heads {num_attention_heads} is for a ViT under timm's or mm's names; this source has a number"
            )
        settings = {**(settings or {}), "num_attention_heads": num_attention_heads}
    own_fields = module.fields(state, settings)
    if RECORD in (settings or {}) and "prior" not in own_fields:
        raise ValueError(f"{source}: config.json has {RECORD!r}, a prior that convert cannot carry over")
    fields = {"prior": "dense", **own_fields}
    if module is not own_models:
        fields["model_type"] = module.FAMILY
    weights, unused = module.rename(state)
    notes = [f"note: left out, no output depends on it: {', '.join(unused)}"] if unused else []
    notes += module.remarks(state) if hasattr(module, "remarks") else []
    assumed = {name: (list(values), f"ImageNet's {values}") for name, values in IMAGENET.items()}
    if hasattr(module, "assumed"):
        assumed |= module.assumed(state)
    return weights, fields, {name: given for name, given in assumed.items() if name not in fields}, notes


def _attention_pooling(weights: dict[str, Tensor], config: Any, drop_classifier: bool, source: Any) -> list[str]:
    """A note for the user if attention pooling is left out; ValueError if it is there and must stay."""
    if not any(key.startswith(ATTENTION_POOLING) for key in weights):
        return []
    pooling = f"pooling of the new model is {config.pooling!r}"
    if not drop_classifier:
        raise ValueError(
            f"{source}: attention pooling has no counterpart in {FAMILIES[config.model_type].title}; "
            f"--drop-classifier leaves it out, and then the {pooling}"
        )
    return [f"note: attention pooling is left out; the {pooling}"]


def _fill(state: dict[str, Tensor], config: Any, with_prior: bool, drop_classifier: bool, source: Any) -> Any:
    """A model with exactly these weights, or an error that lists what is missing and what is left over.

    A prior's weights are among them if `with_prior`; otherwise they have their initial values.
    """
    heads = {key for key in state if key.split(".")[0] in CLASSIFIERS}
    family = FAMILIES[config.model_type]
    if drop_classifier or not heads:
        model: Any = family.base(config)
        prefix = base_prefix(family.name)
        state = {key.removeprefix(prefix): value for key, value in state.items() if key not in heads}
    else:
        model = family.classifier(config)
    # In the precision of the source, if all of it has the same; a decay stays in float32.
    dtypes = {value.dtype for key, value in state.items() if value.is_floating_point() and not is_prior_weight(key)}
    model.to(functools.reduce(torch.promote_types, dtypes or {torch.float32}))
    expected = {key: value for key, value in model.state_dict().items() if with_prior or not is_prior_weight(key)}
    missing = sorted(set(expected) - set(state))
    left_over = sorted(set(state) - set(expected))
    shapes = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(expected[key].shape)}"
        for key in sorted(set(expected) & set(state))
        if state[key].shape != expected[key].shape
    ]
    numbers = {key: value for key, value in state.items() if key in expected and expected[key].is_floating_point()}
    casts = [f"{key} ({value.dtype})" for key, value in numbers.items() if not value.is_floating_point()]
    endless = [key for key, value in numbers.items() if not value.isfinite().all()]
    problems = [
        f"{what}: {', '.join(names)}"
        for what, names in (
            *(("missing", missing), ("left over", left_over), ("of another shape", shapes)),
            *(("not floating-point", casts), ("NaN or infinite", endless)),
        )
        if names
    ]
    if problems:
        hint = " (--drop-classifier leaves classifiers out)" if any("classifier" in text for text in problems) else ""
        raise ValueError(f"{source} does not fit {type(model).__name__}; {'; '.join(problems)}{hint}")
    model.load_state_dict(state, strict=False)
    return model.eval()


def _resize(model: Any, image_size: int) -> Any:
    """The same model for another image size."""
    config = type(model.config).from_dict({**model.config.to_dict(), "image_size": image_size})
    resized = type(model)(config).to(model.dtype)
    copy_weights(model, resized, may_start_anew=lambda name: False, strict=True)
    return resized.eval()
