"""`init_cfg` of backbones in mm configs: how weights are drawn, and the checkpoint that they are then taken from."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.utils import CONFIG_NAME

from hf_sparseprior.base.families import FAMILIES, family_of
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.convert import mm_vit, own_models, read_checkpoint, timm_vit
from hf_sparseprior.convert.checkpoint import FORMATS, as_ours, unpacked
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair
from hf_sparseprior.models.pretrained import (
    check_saved_folder,
    copy_weights,
    load_whole_model,
    may_start_anew,
    saved_family,
)

PRETRAINED = "Pretrained"
SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors")
POSITIONS = "embeddings.position_embeddings"


@dataclass(frozen=True)
class Start:
    """Where the weights of a backbone come from.

    checkpoint: folder of a saved model, or file of weights; None: they are drawn.
    prefix: what the names of the backbone's weights begin with in that file.
    drawn: mm's initializers, each a dict with its `type`, which come before the checkpoint.
    """

    checkpoint: str | None = None
    prefix: str | None = None
    drawn: tuple[dict[str, Any], ...] = ()

    @property
    def folder(self) -> str | None:
        """The folder of a saved model; None: there is none."""
        return None if self.checkpoint is None or is_weights_file(self.checkpoint) else self.checkpoint


def is_weights_file(checkpoint: str) -> bool:
    """Whether a checkpoint is a file of weights, and no folder of a saved model."""
    return not Path(checkpoint).is_dir() and Path(checkpoint).suffix in SUFFIXES


def read_init_cfg(pretrained: str | None, init_cfg: Any) -> Start:
    """What `pretrained` and mm's `init_cfg`, a dict or a list of dicts, say together.

    Raises:
        ValueError: for a checkpoint in both or twice, an address, or an init_cfg of another kind.
    """
    entries = [] if init_cfg is None else [init_cfg] if isinstance(init_cfg, Mapping) else init_cfg
    if not isinstance(entries, (list, tuple)) or not all(isinstance(e, Mapping) and "type" in e for e in entries):
        raise ValueError(f"init_cfg={init_cfg!r} must be a dict with a type, or a list of such")
    loaded = [dict(entry) for entry in entries if _name(entry) == PRETRAINED]
    drawn = tuple(dict(entry) for entry in entries if _name(entry) != PRETRAINED)
    if pretrained is not None and loaded:
        raise ValueError(f"pretrained={pretrained!r} and init_cfg={init_cfg!r} exclude each other")
    if len(loaded) > 1:
        raise ValueError(f"init_cfg={init_cfg!r} has {len(loaded)} checkpoints, one is allowed")
    given = loaded[0] if loaded else {"type": PRETRAINED, "checkpoint": pretrained}
    checkpoint, prefix = given.get("checkpoint"), given.get("prefix")
    known = {"type", "checkpoint", "prefix", "map_location"}  # tensors are copied to where the model is
    if loaded and (not isinstance(checkpoint, str) or set(given) - known):
        raise ValueError(f"init_cfg={given!r} must be dict(type='Pretrained', checkpoint=FOLDER or FILE, prefix=...)")
    if checkpoint is not None and "://" in str(checkpoint):
        raise ValueError(f"checkpoint={checkpoint!r} is an address; download it and give the file or folder")
    if prefix is not None and (not isinstance(prefix, str) or not prefix):
        raise ValueError(f"prefix={prefix!r} must be the beginning of names of weights")
    if prefix is not None and not is_weights_file(str(checkpoint)):
        raise ValueError(f"prefix={prefix!r} goes with a file of weights, and checkpoint={checkpoint!r} is none")
    return Start(checkpoint, prefix, drawn)


def _name(entry: Mapping[str, Any]) -> str:
    given = entry["type"]
    return given if isinstance(given, str) else getattr(given, "__name__", "").removesuffix("Init")


def draw_weights(model: nn.Module, drawn: Sequence[dict[str, Any]]) -> None:
    """Draw weights by mm's initializers, e.g. dict(type="TruncNormal", layer="Linear", std=0.02), in their order.

    Raises:
        ValueError: for a layer that the model does not have, which mm would pass over, or a wrong initializer.
    """
    if not drawn:
        return
    from mmengine.model import initialize

    for entry in drawn:
        if missing := missing_layers(model, entry):
            raise ValueError(f"init_cfg={entry!r}: the backbone has no layer {', '.join(map(repr, missing))}")
        try:
            initialize(model, entry)
        except (KeyError, TypeError, AssertionError, RuntimeError) as error:
            raise ValueError(f"init_cfg={entry!r}: {error.args[0] if error.args else error}") from None


def missing_layers(model: nn.Module, entry: dict[str, Any]) -> list[str]:
    """Names of the layers that an initializer of mm is for, and the model does not have."""
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    layers = entry.get("layer", [])
    return [name for name in ([layers] if isinstance(layers, str) else layers) if name not in classes]


def load_start(model: Any) -> None:
    """Fill a backbone with the weights of its `start`, of our own models or of what `convert` reads.

    What depends on the grid is interpolated to the model's. Weights of a prior may be missing or left over, those of a
    classifier too; of the rest the checkpoint has to have all, and no others.

    Raises:
        OSError: for a folder or file that is missing, damaged or holds anything but tensors and plain values.
        ValueError: for weights that do not fit, with their names, that are not finite, or that the backbone would use
            in another way.
    """
    start: Start = model.start
    if start.folder is not None and is_ours(start.folder):
        load_weights(model, start.folder)
    elif start.folder is not None:
        fill_foreign(model, *read_checkpoint(start.folder))
    elif start.checkpoint is not None:
        load_file_weights(model, start)


def is_ours(folder: str) -> bool:
    """Whether a folder holds a model of our families.

    Raises:
        OSError: if it holds no saved model.
    """
    check_saved_folder(folder, "pretrained")
    return read_json_object(Path(folder) / CONFIG_NAME).get("model_type") in FAMILIES


def foreign_fields(folder: str) -> dict[str, Any]:
    """The config that a model of transformers or timm has as one of ours.

    Raises:
        OSError, ValueError: for what `convert` cannot read.
    """
    _, fields, assumed, _ = as_ours(folder, *read_checkpoint(folder))
    return {**fields, **{name: value for name, (value, _) in assumed.items()}}


def load_weights(model: Any, folder: str) -> None:
    """`load_start` of a folder of ours; a classifier is left out."""
    check_family(saved_family(folder).name, folder, type(model.config))
    source = load_whole_model(folder, _saved_class(folder, model))
    check_alike(source.config, model, folder)
    copy_weights(source, model, strict=True)


def _saved_class(folder: str, model: Any) -> Any:
    """The family's backbone for a folder with weights that only backbones have, otherwise its bare model."""
    family = family_of(model.config)
    assert family is not None
    architectures = read_json_object(Path(folder) / CONFIG_NAME).get("architectures") or [""]
    is_backbone = family.backbone_parts and family.class_named(str(architectures[0])) is family.backbone
    return family.backbone if is_backbone else family.base


def check_family(name: str, checkpoint: Any, config_class: Any) -> None:
    """Raise ValueError unless a checkpoint is of this family."""
    if name != config_class.model_type:
        raise ValueError(f"pretrained={checkpoint} is a {name!r}, the backbone a {config_class.model_type!r}")


def check_alike(source: Any, model: Any, checkpoint: Any, unsaid: Collection[str] = ()) -> None:
    """Raise ValueError if a backbone would use weights in another way than their config says; warn of normalisations.

    unsaid: fields that the checkpoint does not say.
    """
    for name in model.config.read_alike:
        there, here = getattr(source, name), getattr(model.config, name)
        if there != here and name not in unsaid:
            raise ValueError(f"pretrained={checkpoint} has {name}={there!r}, the backbone {name}={here!r}")
    for name in ("image_mean", "image_std"):
        there, here = getattr(source, name), getattr(model.config, name)
        if there != here and name not in unsaid:
            text = f"pretrained={checkpoint} was trained with {name}={there}, the backbone has {here}"
            warnings.warn(text, stacklevel=2)


def load_file_weights(model: Any, start: Start) -> None:
    """`load_start` of a file: .pth and the like, which are never unpickled, or safetensors."""
    from hf_sparseprior.mm.loading import read_checkpoint as read_file

    file = str(start.checkpoint)
    if not Path(file).is_file():
        raise OSError(f"checkpoint={file} does not exist")
    content = read_file(file, map_location="cpu")
    raw = file_state(content, start)
    state = {name.removeprefix(f"{model.base_model_prefix}."): value for name, value in raw.items()}
    if start.prefix is None and isinstance(content, dict):
        raw, _ = unpacked(content)
    if is_foreign(state) and is_foreign(raw):
        fill_foreign(model, raw, None)
        return
    source = type_of_source(model)(source_config(model, state))
    fill(source, model, state)


def is_foreign(state: Mapping[str, Tensor]) -> bool:
    """Whether these are names of weights that `convert` knows and that are not ours."""
    return not own_models.matches(state) and any(module.matches(state) for module in FORMATS)


def fill_foreign(model: Any, state: dict[str, Tensor], settings: dict[str, Any] | None) -> None:
    """Fill a backbone with the weights of a model of another library, which leaves the prior's as they are.

    Args:
        model: the backbone.
        state, settings: weights and config.json, if there is one, as `convert` reads them.

    Raises:
        ValueError: for another architecture than the backbone's, with what differs.
    """
    config, checkpoint = model.config, model.start.checkpoint
    for module in [module for module in FORMATS if module.matches(state)][:1]:
        check_family(module.FAMILY, checkpoint, type(config))
    # Files of ViTs do not say the number of heads; published widths have published ones.
    says_heads = settings is not None or not (mm_vit.matches(state) or timm_vit.matches(state))
    own_heads = not says_heads and (mm_vit.matches(state) or config.hidden_size not in timm_vit.HEADS)
    heads = config.num_attention_heads if own_heads else None
    weights, fields, assumed, _ = as_ours(checkpoint, state, settings, num_attention_heads=heads)
    family = family_of(config)
    assert family is not None
    source = family.base(type(config).from_dict({**fields, **{name: value for name, (value, _) in assumed.items()}}))
    unsaid = {*assumed, *(["image_mean", "image_std"] if settings is None else [])}
    check_alike(source.config, model, checkpoint, unsaid)
    prefix = f"{source.base_model_prefix}."
    fill(source, model, {name.removeprefix(prefix): value for name, value in weights.items()})


def fill(source: Any, model: Any, state: Mapping[str, Tensor]) -> None:
    """Fill a backbone with weights that first go into `source`, a model of its family for the checkpoint's grid.

    Raises:
        ValueError: for weights that do not fit, with their names, or that are not finite.
    """
    own, file = source.state_dict(), str(model.start.checkpoint)

    def may_be_absent(name: str) -> bool:
        # The last norm has no part in maps that are taken before it.
        unused = name.startswith("layernorm.") and not getattr(model.config, "apply_layernorm", True)
        return may_start_anew(name) or unused

    problems = {
        "left over": [name for name in state if name not in own and not may_start_anew(name)],
        "of another shape": [name for name in state if name in own and state[name].shape != own[name].shape],
        "missing": [name for name in own if name not in state and not may_be_absent(name)],
        "not finite": [name for name, value in state.items() if not value.isfinite().all()],
    }
    found = [f"{what}: {', '.join(names[:5])} ({len(names)} in all)" for what, names in problems.items() if names]
    if found:
        hint = ""
        if problems["missing"] and (prefix := common_prefix(state, own)):
            hint = f"; prefix={prefix!r} may be missing"
        elif problems["missing"]:
            hint = "; python -m hf_sparseprior convert says what it reads of other libraries"
        raise ValueError(f"checkpoint={file} does not fit {type(model).__name__}; {'; '.join(found)}{hint}")
    source.load_state_dict(state, strict=False)
    absent = [name for name in own if name not in state]
    copy_weights(source, model, may_start_anew=may_be_absent, absent=absent, strict=True)


def file_state(content: Any, start: Start) -> dict[str, Tensor]:
    """The backbone's weights in what a file holds, by their names there without the prefix.

    Raises:
        ValueError: for a file without weights, or without any of this prefix.
    """
    nested = content if isinstance(content, dict) else {}
    state = next((nested[key] for key in ("state_dict", "model", "teacher") if key in nested), nested)
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"checkpoint={start.checkpoint} holds no weights by their names")
    if start.prefix is not None:
        prefix = start.prefix if start.prefix.endswith(".") else f"{start.prefix}."
        state = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        if not state:
            raise ValueError(f"checkpoint={start.checkpoint} has no weights whose names begin with {prefix!r}")
    return dict(state)


def common_prefix(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    """The prefix with which most names of a model are among the names of a file; None: there is none."""
    ends = {name[: -len(key)] for name in state for key in list(own)[:3] if name.endswith(f".{key}")}
    return next((prefix for prefix in sorted(ends, key=len) if sum(f"{prefix}{key}" in state for key in own) > 1), None)


def type_of_source(model: Any) -> Any:
    """The class that holds the file's weights before they are fitted to the model."""
    family = family_of(model.config)
    assert family is not None
    return family.backbone


def source_config(model: Any, state: Mapping[str, Tensor]) -> Any:
    """The model's config with the image size of a file whose position embedding has another, square, grid."""
    fields = model.config.to_dict()
    own, stored = model.state_dict().get(POSITIONS), state.get(POSITIONS)
    if own is not None and stored is not None and stored.ndim == 3 and own.shape[1] != stored.shape[1]:
        rows, columns = model.config.grid
        patches = stored.shape[1] - (own.shape[1] - rows * columns)
        side = isqrt(max(patches, 0))
        if side and side * side == patches:
            height, width = as_pair(model.config.patch_size)
            fields["image_size"] = [side * height, side * width]
    return type(model.config).from_dict(fields)
