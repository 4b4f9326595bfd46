"""`init_cfg` of backbones in mm configs: how weights are drawn, and the checkpoint that they are then taken from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_sparseprior.base.families import family_of
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair
from hf_sparseprior.models.pretrained import copy_weights, may_start_anew

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


def load_file_weights(model: Any, start: Start) -> None:
    """Fill a backbone with the weights of a file: .pth and the like, which are never unpickled, or safetensors.

    What depends on the grid is interpolated to the model's. Weights of a prior may be missing or left over, those of a
    classifier too; of the rest the file has to have all, and no others.

    Raises:
        OSError: for a file that is missing, damaged or holds anything but tensors and plain values.
        ValueError: for weights that do not fit, with their names, or that are not finite.
    """
    from tasks.common.mm.loading import read_checkpoint

    file = str(start.checkpoint)
    if not Path(file).is_file():
        raise OSError(f"checkpoint={file} does not exist")
    state = file_state(read_checkpoint(file, map_location="cpu"), start, model.base_model_prefix)
    source = type_of_source(model)(source_config(model, state))
    own = source.state_dict()
    problems = {
        "left over": [name for name in state if name not in own and not may_start_anew(name)],
        "of another shape": [name for name in state if name in own and state[name].shape != own[name].shape],
        "missing": [name for name in own if name not in state and not may_start_anew(name)],
        "not finite": [name for name, value in state.items() if not value.isfinite().all()],
    }
    found = [f"{what}: {', '.join(names[:5])} ({len(names)} in all)" for what, names in problems.items() if names]
    if found:
        hint = ""
        if problems["missing"] and (prefix := common_prefix(state, own)):
            hint = f"; prefix={prefix!r} may be missing"
        elif problems["missing"]:
            hint = "; python -m hf_sparseprior convert reads weights of other libraries"
        raise ValueError(f"checkpoint={file} does not fit {type(model).__name__}; {'; '.join(found)}{hint}")
    source.load_state_dict(state, strict=False)
    copy_weights(source, model, absent=[name for name in own if name not in state], strict=True)


def file_state(content: Any, start: Start, base_prefix: str) -> dict[str, Tensor]:
    """The backbone's weights in what a file holds, by their names there without the prefix.

    Raises:
        ValueError: for a file without weights, or without any of this prefix.
    """
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"checkpoint={start.checkpoint} holds no weights by their names")
    if start.prefix is not None:
        prefix = start.prefix if start.prefix.endswith(".") else f"{start.prefix}."
        state = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
        if not state:
            raise ValueError(f"checkpoint={start.checkpoint} has no weights whose names begin with {prefix!r}")
    return {name.removeprefix(f"{base_prefix}."): value for name, value in state.items()}


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
