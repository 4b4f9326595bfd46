"""iFormer (Zheng 2025) under the names of its published files, both ways.

A file has blocks in one row for each stage, where an attention layer is three of them: position encoding, attention and
MLP. 1x1 convolutions of the last two are linear layers here, and the joint one of values and gate is two. Shapes give
the architecture; the image size is in none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.convert.common import field_problems, plain_weights, refuse
from hf_sparseprior.convert.timm_vit import replace_stem, swapped
from hf_sparseprior.models.configuration_sparseprior_iformer import BLOCKS_OF_A_LAYER, SparsePriorIformerConfig

TARGETS = ("original",)
FAMILY = SparsePriorIformerConfig.model_type
NORM_EPS = 1e-5  # of every batch norm; files do not say it
LAYER_SCALE = 1e-6  # at the start, in the published recipe of the model that has it
NUM_STAGES = 4

# Their stem of a name, ours.
STEMS = {
    "downsample_layers.0.0.c": "iformer.embeddings.reduction.convolution",
    "downsample_layers.0.0.bn": "iformer.embeddings.reduction.norm",
    "downsample_layers.0.2.conv_exp_bn1.c": "iformer.embeddings.expansion.convolution",
    "downsample_layers.0.2.conv_exp_bn1.bn": "iformer.embeddings.expansion.norm",
    "downsample_layers.0.2.conv_pwl_bn2.c": "iformer.embeddings.projection",
    "downsample_layers.0.2.conv_pwl_bn2.bn": "iformer.embeddings.norm",
    **{
        f"downsample_layers.{stage}.0.{theirs}": f"iformer.stages.{stage}.downsample.{ours}"
        for stage in range(1, NUM_STAGES)
        for theirs, ours in (("c", "convolution"), ("bn", "norm"))
    },
    "classifier.classifier.bn": "classifier.norm",
    "classifier.classifier.l": "classifier.linear",
    "classifier.classifier_dist.bn": "distillation_classifier.norm",
    "classifier.classifier_dist.l": "distillation_classifier.linear",
}
# The same within each kind of block, and a name by which the kind is known.
PARTS = {
    "convolution": {
        f"token_channel_mixer.m.{place}.{theirs}": f"{part}.{ours}"
        for place, part in ((0, "depthwise"), (1, "expansion"), (3, "reduction"))
        for theirs, ours in (("c", "convolution"), ("bn", "norm"))
    }
    | {"token_channel_mixer.gamma": "layer_scale.scale"},
    "encoding": {"cpe.m.c": "cpe.convolution", "cpe.m.bn": "cpe.norm"},
    "attention": {
        f"token_channel_mixer.m.{theirs}.{kind}": f"attention.{part}_{ours}"
        for theirs, part in (("q", "q"), ("k", "k"), ("v_gate", "v_gate"), ("proj", "o"))
        for kind, ours in (("c", "proj"), ("bn", "norm"))
    }
    | {"token_channel_mixer.gamma": "layer_scale1.scale"},
    "MLP": {
        f"channel_mixer.m.{place}.{theirs}": f"mlp.{ours}{number}"
        for place, number in ((0, 1), (2, 2))
        for theirs, ours in (("c", "fc"), ("bn", "norm"))
    }
    | {"channel_mixer.gamma": "layer_scale2.scale"},
}
KNOWN_BY = {
    "token_channel_mixer.m.0.c.weight": "convolution",
    "cpe.m.c.weight": "encoding",
    "token_channel_mixer.m.q.c.weight": "attention",
    "channel_mixer.m.0.c.weight": "MLP",
}
LAYER = ("encoding", "attention", "MLP")
BLOCK = re.compile(r"stages\.(\d+)\.(\d+)\.block\.(.+)")
OUR_BLOCK = re.compile(r"iformer\.stages\.(\d+)\.(convolutions|layers|final_convolutions)\.(\d+)\.(.+)")
JOINT = "v_gate"


def matches(keys: Iterable[str]) -> bool:
    """Whether these are the names of an iFormer's weights, not those of the Inception Transformer."""
    return "downsample_layers.0.2.conv_exp_bn1.c.weight" in set(keys)


# ---- theirs to ours -------------------------------------------------------------------------------------------------


def fields(state: dict[str, Tensor], settings: dict[str, Any] | None) -> dict[str, Any]:
    """Fields of SparsePriorIformerConfig from the shapes; a file has no settings.

    Raises:
        ValueError: for what has no counterpart in SparsePriorIformer.
    """
    kinds = _kinds(state)
    counts = _depths(kinds)
    widths = [_shape(state, "downsample_layers.0.2.conv_pwl_bn2")[0]]
    widths += [_shape(state, f"downsample_layers.{stage}.0")[0] for stage in range(1, NUM_STAGES)]

    def first(kind: str, part: str) -> tuple[int, tuple[int, ...]] | None:
        """Stage and shape of a convolution in the first block of this kind."""
        for (stage, block), block_kind in kinds.items():
            if block_kind == kind:
                return stage, _shape(state, f"stages.{stage}.{block}.block.{part}")
        return None

    taken: dict[str, Any] = {
        "num_channels": _shape(state, "downsample_layers.0.0")[1],
        "stem_kernel_size": _shape(state, "downsample_layers.0.0")[2],
        "hidden_sizes": widths,
        **counts,
        "key_reduction": [1] * NUM_STAGES,
        "layer_scale_init_value": LAYER_SCALE if any(name.endswith(".gamma") for name in state) else 0.0,
        "use_distillation_classifier": "classifier.classifier_dist.l.weight" in state,
        "batch_norm_eps": NORM_EPS,
    }
    for name, kind, part in (
        ("kernel_size", "convolution", "token_channel_mixer.m.0"),
        ("position_kernel_size", "encoding", "cpe.m"),
    ):
        if (stage_shape := first(kind, part)) is not None:
            taken[name] = stage_shape[1][2]
    for name, kind, part in (
        ("conv_ratio", "convolution", "token_channel_mixer.m.1"),
        ("mlp_ratio", "MLP", "channel_mixer.m.0"),
    ):
        if (stage_shape := first(kind, part)) is not None:
            taken[name] = stage_shape[1][0] // widths[stage_shape[0]]
    for (stage, block), kind in kinds.items():
        if kind == "attention":
            taken["key_reduction"][stage] = _key_reduction(state, f"stages.{stage}.{block}.block", widths[stage])
    if "classifier.classifier.l.weight" in state:
        taken["num_labels"] = state["classifier.classifier.l.weight"].shape[0]
    return taken


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...]:
    """Shape of a convolution's weight; ValueError if there is none."""
    weight = state.get(f"{name}.c.weight")
    if weight is None or weight.dim() != 4:
        raise ValueError(f"{name}.c.weight is missing or no convolution: of the published models every stage has one")
    return tuple(weight.shape)


def _key_reduction(state: dict[str, Tensor], block: str, width: int) -> int:
    keys, joint = (_shape(state, f"{block}.token_channel_mixer.m.{part}") for part in ("q", JOINT))
    if keys[2:] != (1, 1) or joint != (2 * width, width, 1, 1) or width % keys[0]:
        raise ValueError(
            f"{block}: queries of shape {keys} and values with gate of {joint} must be 1x1 convolutions, the latter to "
            f"twice {width} channels, as in the published models"
        )
    return width // keys[0]


def assumed(state: dict[str, Tensor]) -> dict[str, tuple[Any, str]]:
    """The image size, with these words."""
    return {"image_size": (224, "224, at which iFormer was trained,")}


def _kinds(state: Iterable[str]) -> dict[tuple[int, int], str]:
    """The kind of each block, by its stage and its number there, in order."""
    kinds = {}
    for name in state:
        if (match := BLOCK.fullmatch(name)) and (kind := KNOWN_BY.get(match[3])):
            kinds[int(match[1]), int(match[2])] = kind
    return dict(sorted(kinds.items()))


def _depths(kinds: dict[tuple[int, int], str]) -> dict[str, list[int]]:
    """`conv_depths`, `attention_depths` and `final_conv_depths` of blocks.

    Raises:
        ValueError: for blocks in another order.
    """
    depths: dict[str, list[int]] = {"conv_depths": [], "attention_depths": [], "final_conv_depths": []}
    for stage in range(NUM_STAGES):
        blocks = [kind for (number, _), kind in kinds.items() if number == stage]
        layers = blocks.count("attention")
        begin = blocks.index(LAYER[0]) if layers and LAYER[0] in blocks else len(blocks)
        last = len(blocks) - begin - BLOCKS_OF_A_LAYER * layers
        if blocks != ["convolution"] * begin + list(LAYER) * layers + ["convolution"] * last:
            raise ValueError(f"stages.{stage} has blocks {', '.join(blocks)}; attention layers must follow each other")
        for name, number in zip(depths, (begin, layers, last), strict=True):
            depths[name].append(number)
    return depths


def rename(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights under our names. Nothing is left out. Unknown names stay as they are."""
    kinds = _kinds(state)
    depths = _depths(kinds)
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        match = BLOCK.fullmatch(name)
        place = (int(match[1]), int(match[2])) if match else (-1, -1)
        if match is None or place not in kinds:
            renamed[replace_stem(name, STEMS)] = value
            continue
        part = replace_stem(match[3], PARTS[kinds[place]])
        ours = f"iformer.stages.{place[0]}.{_our_place(depths, *place)}.{part}"
        renamed |= _split_joint(ours, _our_shape(part, value))
    return renamed, []


def _our_place(depths: dict[str, list[int]], stage: int, block: int) -> str:
    """Where a block of a stage is in ours: "layers.0"."""
    first, layers = depths["conv_depths"][stage], depths["attention_depths"][stage]
    after = block - first - BLOCKS_OF_A_LAYER * layers
    if block < first:
        return f"convolutions.{block}"
    return f"final_convolutions.{after}" if after >= 0 else f"layers.{(block - first) // BLOCKS_OF_A_LAYER}"


def _our_shape(part: str, value: Tensor) -> Tensor:
    """A 1x1 convolution as a matrix, and the factors of channels (1, C, 1, 1) as (C,)."""
    if part.endswith(".scale"):
        return value.flatten()
    is_matrix = re.match(r"attention\.\w+_proj|mlp\.fc", part) and value.dim() == 4
    return value.flatten(1) if is_matrix else value


def _split_joint(name: str, value: Tensor) -> dict[str, Tensor]:
    """The joint projection of values and gate, or its norm, as two."""
    if f".{JOINT}_" not in name:
        return {name: value}
    halves = value.chunk(2) if value.dim() else (value, value)  # both norms have seen as many batches
    return {
        name.replace(f".{JOINT}_", f".{part}_"): half.clone() for part, half in zip(("v", "gate"), halves, strict=True)
    }


# ---- ours to theirs -------------------------------------------------------------------------------------------------


def check(model: Any, target: str, out: Path) -> None:
    """Raise ValueError with every field of the model that the published code cannot have."""
    config = model.config
    allowed: dict[str, tuple[Any, ...]] = {
        "num_channels": (3,),
        "hidden_act": ("gelu",),
        "batch_norm_eps": (NORM_EPS,),
    }
    problems = field_problems(config, allowed)
    if len(config.hidden_sizes) != NUM_STAGES:
        problems.append(f"hidden_sizes={config.hidden_sizes} must be of {NUM_STAGES} stages")
    refuse(target, problems)


def write(model: Any, target: str, out: Path) -> list[str]:
    """Write a .pth file under the published names.

    Returns:
        What was written.
    """
    weights = {}
    for name, value in _join_gate(plain_weights(model)).items():
        match = OUR_BLOCK.fullmatch(name)
        if match is None:
            weights[replace_stem(name, swapped(STEMS))] = value
        else:
            stage, kind, index, part = int(match[1]), match[2], int(match[3]), match[4]
            theirs, block = _their_place(model.config, stage, kind, index, part)
            weights[f"stages.{stage}.{block}.block.{theirs}"] = _their_shape(theirs, value)
    torch.save({"model": weights}, out)
    return ["weights as iFormer's own repository names them"]


def _their_place(config: Any, stage: int, kind: str, index: int, part: str) -> tuple[str, int]:
    """Their name of a part of a block, and the number of their block."""
    first = config.conv_depths[stage]
    if kind != "layers":
        after = first + BLOCKS_OF_A_LAYER * config.attention_depths[stage]
        return replace_stem(part, swapped(PARTS["convolution"])), index + (after if kind.startswith("final") else 0)
    for number, block_kind in enumerate(LAYER):
        if (theirs := replace_stem(part, swapped(PARTS[block_kind]))) != part:
            return theirs, first + BLOCKS_OF_A_LAYER * index + number
    raise AssertionError(f"unreachable: {part} is in every layer")


def _their_shape(name: str, value: Tensor) -> Tensor:
    if name.endswith(".gamma"):
        return value.view(1, -1, 1, 1)
    return value.unflatten(1, (-1, 1, 1)) if name.endswith(".c.weight") and value.dim() == 2 else value


def _join_gate(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values and gate as one projection with one norm."""
    joined = {}
    for name, value in weights.items():
        if ".attention.v_" in name:
            gate = weights[name.replace(".attention.v_", ".attention.gate_")]
            name = name.replace(".attention.v_", f".attention.{JOINT}_")
            joined[name] = torch.cat([value, gate]) if value.dim() else value
        elif ".attention.gate_" not in name:
            joined[name] = value
    return joined
