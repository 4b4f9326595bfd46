"""Swin under timm's names and from its original .pth files, both ways.

The original has the patch merging at the end of a stage, as transformers and we do, and timm at the beginning of the
next. The original's files also hold indices and masks that follow from the windows. Shapes give the architecture; the
image size is in none of them, only in a config.json of timm's layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.convert.common import field_problems, one_if_square, plain_weights, refuse, write_timm
from hf_sparseprior.convert.timm_vit import data_fields, join_qkv, replace_stem, split_qkv, swapped
from hf_sparseprior.convert.transformers_swin import our_table, their_table
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.models.configuration_sparseprior_swin import SparsePriorSwinConfig
from hf_sparseprior.patterns.relative_offsets import relative_offsets
from hf_sparseprior.patterns.windows import window_regions

TARGETS = ("timm", "original")
FAMILY = SparsePriorSwinConfig.model_type
NORM_EPS = 1e-5  # of every norm; files do not say it

# timm's stem of a name, ours. The original has "head" for timm's "head.fc".
STEMS = {
    "patch_embed.proj": "swin.embeddings.projection",
    "patch_embed.norm": "swin.embeddings.norm",
    "norm": "swin.layernorm",
    "head.fc": "classifier",
    "head": "classifier",
}
BLOCK_STEMS = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "attn.relative_position_bias_table": "attention.relative_position_bias.bias_table",
}
BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.(.+)")
MERGING = re.compile(r"layers\.(\d+)\.downsample\.(.+)")
TABLE = "relative_position_bias_table"
DERIVED = re.compile(r"\.(relative_position_index|relative_coords_table|attn_mask)$")
# Of Swin V2: cosine attention and a small network in place of the table.
VERSION_2 = re.compile(r"\.attn\.(logit_scale|cpb_mlp\..+|q_bias|v_bias)$")
UNUSED = ("mask_token",)
# Arguments of timm's class that SparsePriorSwin has only one value of.
DEFAULTS = {"head_dim": None, "always_partition": False, "norm_layer": None}


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the original's or timm's parameter names of a Swin."""
    return {"patch_embed.proj.weight", "layers.0.blocks.0.attn.qkv.weight"} <= set(keys)


# ---- theirs to ours -------------------------------------------------------------------------------------------------


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorSwinConfig from the shapes and, in timm's folders, config.json.

    Raises:
        ValueError: for what has no counterpart in SparsePriorSwin.
    """
    settings = settings or {}
    arguments = settings.get("model_args") or {}
    _refuse_other_architectures(state, settings, arguments)
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    blocks: dict[int, int] = {}
    for match in filter(None, map(BLOCK.fullmatch, state)):
        blocks[int(match[1])] = max(blocks.get(int(match[1]), 0), int(match[2]) + 1)
    num_labels = next((state[key].shape[0] for key in ("head.fc.weight", "head.weight") if key in state), 2)
    taken: dict[str, Any] = {
        "num_channels": channels,
        "patch_size": one_if_square(patch),
        "embed_dim": width,
        "depths": [blocks.get(stage, 0) for stage in range(max(blocks) + 1)],
        "num_heads": [table.shape[1] for table in _of_stages(state, f"attn.{TABLE}")],
        "window_size": max(_windows(state)),
        "mlp_ratio": _mlp_ratio(state),
        "qkv_bias": "layers.0.blocks.0.attn.qkv.bias" in state,
        "layer_norm_eps": NORM_EPS,
        "num_labels": num_labels,
        **data_fields(settings, num_labels),
    }
    if "drop_path_rate" in arguments:
        taken["drop_path_rate"] = arguments["drop_path_rate"]
    data = settings.get("pretrained_cfg") or settings
    size = arguments.get("img_size") or (data.get("input_size") or [None])[1:]
    if size:
        taken["image_size"] = size if isinstance(size, int) else one_if_square(size)
    config = SparsePriorSwinConfig(**{**{name: value for name, (value, _) in assumed(state).items()}, **taken})
    problems = _window_problems(config, "timm")
    if config.windows != _windows(state):
        problems.append(f"image_size={config.image_size} gives windows of {config.windows}, not {_windows(state)}")
    if problems:
        raise ValueError("; ".join(problems))
    return taken


def _refuse_other_architectures(state: dict[str, Tensor], settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    if second := next((key for key in sorted(state) if VERSION_2.search(key)), None):
        raise ValueError(f"{second}: Swin V2 has no counterpart in SparsePriorSwin")
    if "absolute_pos_embed" in state:
        raise ValueError("absolute_pos_embed: SparsePriorSwin has relative positions alone")
    pool = settings.get("global_pool") or arguments.get("global_pool") or "avg"
    if pool != "avg":
        raise ValueError(f"global_pool={pool!r} must be 'avg'")
    for name, value in DEFAULTS.items():
        if arguments.get(name, value) not in (value, *(["layernorm"] if name == "norm_layer" else [])):
            raise ValueError(f"{name}={arguments[name]!r} must be timm's default ({value})")


def _of_stages(state: dict[str, Tensor], name: str) -> list[Tensor]:
    """The weight of this name in the first block of each stage that has it."""
    weights: dict[int, Tensor] = {}
    stages = 0
    for key, value in state.items():
        if match := BLOCK.fullmatch(key):
            stages = max(stages, int(match[1]) + 1)
            if match[3] == name:
                weights.setdefault(int(match[1]), value)
    for stage in range(stages):
        if stage not in weights or weights[stage].dim() != 2:
            raise ValueError(f"layers.{stage}.blocks: no block has a matrix {name}")
    return [weights[stage] for stage in range(stages)]


def _windows(state: dict[str, Tensor]) -> list[int]:
    """Patches in the side of each stage's windows."""
    windows = []
    for stage, table in enumerate(_of_stages(state, f"attn.{TABLE}")):
        side = math.isqrt(table.shape[0])
        if side**2 != table.shape[0] or side % 2 == 0:
            raise ValueError(f"layers.{stage}: {TABLE} has {table.shape[0]} offsets, which no square window has")
        windows.append((side + 1) // 2)
    return windows


def _mlp_ratio(state: dict[str, Tensor]) -> float:
    """The smallest ratio that gives the width of every stage's MLP, when it is rounded down."""
    shapes = [weight.shape for weight in _of_stages(state, "mlp.fc1.weight")]
    ratio = max(hidden / width for hidden, width in shapes)
    if any(int(ratio * width) < hidden for hidden, width in shapes):
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def assumed(state: dict[str, Tensor]) -> dict[str, tuple[Any, str]]:
    """The image size at which the last stage is one window, with these words: 224 for windows of 7, 384 for 12.

    Raises:
        ValueError: if the windows of the stages are of no square image.
    """
    windows = _windows(state)
    times = 2 ** (len(windows) - 1)
    for grid in range(times * windows[-1], times * (windows[-1] - 1), -1):
        sides = [math.ceil(grid / 2**stage) for stage in range(len(windows))]
        if windows == [min(max(windows), side) for side in sides]:
            patch = state["patch_embed.proj.weight"].shape[2:]
            size = one_if_square([grid * side for side in patch])
            return {"image_size": (size, f"{size}, at which the last stage is one window,")}
    raise ValueError(f"the stages have windows of {windows}; they must be of one size, or as large as the stage")


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names, and the names left out. Unknown names stay as they are."""
    at_end = any(key.startswith("layers.0.downsample.") for key in state)
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        if key in UNUSED or DERIVED.search(key):
            continue
        renamed |= split_qkv(_our_name(key, at_end), our_table(value) if key.endswith(TABLE) else value)
    return renamed, [key for key in UNUSED if key in state]


def _our_name(name: str, at_end: bool) -> str:
    if block := BLOCK.fullmatch(name):
        return f"swin.stages.{block[1]}.layers.{block[2]}.{replace_stem(block[3], BLOCK_STEMS)}"
    if merging := MERGING.fullmatch(name):
        return f"swin.stages.{int(merging[1]) - (not at_end)}.downsample.{merging[2]}"
    return replace_stem(name, STEMS)


# ---- ours to theirs -------------------------------------------------------------------------------------------------


def check(model: Any, target: str, out: Path) -> None:
    """Raise ValueError with every field of the model that the target's Swin, or a file without config, cannot hold."""
    config = model.config
    problems = field_problems(config, {"hidden_act": ("gelu",), "layer_norm_eps": (NORM_EPS,)})
    refuse(target, [*problems, *_window_problems(config, target)])


def _window_problems(config: SparsePriorSwinConfig, target: str) -> list[str]:
    """Stages in which timm or the original computes something else than we do, or nothing.

    timm pads an image after it has shifted it, we do so before, and the original does not pad. Where one side is no
    longer than a window, timm still shifts along the other one.
    """
    problems = []
    for number, (grid, window) in enumerate(zip(config.grids, config.windows, strict=True), 1):
        if target == "original" and number < len(config.grids) and any(side % 2 for side in grid):
            problems.append(f"stage {number} has {grid[0]}x{grid[1]} patches, which must be even to be merged")
        if any(side % window for side in grid):
            problems.append(
                f"stage {number} has {grid[0]}x{grid[1]} patches, which must be a multiple of its window of {window}"
            )
        elif min(grid) <= config.window_size and grid[0] != grid[1]:
            problems.append(f"stage {number} has {grid[0]}x{grid[1]} patches, which must be square or above a window")
    return [f"image_size={config.image_size}: {text}" for text in problems]


def write(model: Any, target: str, out: Path) -> list[str]:
    """Write a .safetensors file or folder that timm loads, or a .pth file as in the original repository.

    Returns:
        What was written.
    """
    config, original = model.config, target == "original"
    weights = {
        _their_name(key, original): their_table(value) if key.endswith("bias_table") else value
        for key, value in join_qkv(plain_weights(model)).items()
    }
    if original:
        torch.save({"model": {**weights, **derived_buffers(config)}}, out)
        return ["weights as Swin's own repository names them"]
    return [write_timm(weights, timm_config(config, weights), out)]


def _their_name(name: str, original: bool) -> str:
    if layer := re.fullmatch(r"swin\.stages\.(\d+)\.layers\.(\d+)\.(.+)", name):
        return f"layers.{layer[1]}.blocks.{layer[2]}.{replace_stem(layer[3], swapped(BLOCK_STEMS))}"
    if merging := re.fullmatch(r"swin\.stages\.(\d+)\.downsample\.(.+)", name):
        return f"layers.{int(merging[1]) + (not original)}.downsample.{merging[2]}"
    stems = swapped({theirs: ours for theirs, ours in STEMS.items() if theirs != ("head.fc" if original else "head")})
    return replace_stem(name, stems)


def derived_buffers(config: SparsePriorSwinConfig) -> dict[str, Tensor]:
    """The indices (N, N) and, of shifted windows, masks (windows, N, N) that the original keeps with its weights."""
    buffers = {}
    for stage, (grid, window, depth) in enumerate(zip(config.grids, config.windows, config.depths, strict=True)):
        for layer in range(depth):
            name = f"layers.{stage}.blocks.{layer}"
            index = torch.from_numpy(relative_offsets((window, window)))
            buffers[f"{name}.attn.relative_position_index"] = index
            if layer % 2 and min(grid) > window and (shift := window // 2):
                seen = torch.from_numpy(window_regions(grid, (window, window), (shift, shift)))
                buffers[f"{name}.attn_mask"] = torch.zeros(seen.shape).masked_fill(~seen, -100.0)
    return buffers


def timm_config(config: SparsePriorSwinConfig, weights: dict[str, Tensor]) -> dict[str, Any]:
    """config.json of a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` loads."""
    # timm wants a registered name; the arguments below say what the model is.
    size = {96: "tiny", 192: "large"}.get(config.widths[0], "base")
    num_classes = weights["head.fc.weight"].shape[0] if "head.fc.weight" in weights else 0
    height, width = as_pair(config.image_size)
    return {
        "architecture": f"swin_{size}_patch4_window7_224",
        "num_classes": num_classes,
        "num_features": config.hidden_size,
        "global_pool": "avg",
        "label_names": [config.id2label[index] for index in range(num_classes)],
        "model_args": {
            "img_size": [height, width],
            "patch_size": one_if_square(as_pair(config.patch_size)),
            "in_chans": config.num_channels,
            "embed_dim": config.widths[0],
            "depths": list(config.depths),
            "num_heads": list(config.num_heads),
            "window_size": config.window_size,
            "mlp_ratio": config.mlp_ratio,
            "qkv_bias": config.qkv_bias,
            "drop_path_rate": config.drop_path_rate,
        },
        "pretrained_cfg": {
            "input_size": [config.num_channels, height, width],
            "fixed_input_size": True,
            "pool_size": list(config.grids[-1]),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "squash",
            "mean": config.image_mean,
            "std": config.image_std,
            "num_classes": num_classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head.fc",
        },
    }
