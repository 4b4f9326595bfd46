"""`explain --time`: what a model with this prior would cost on this machine."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from hf_sparseprior.analysis.predicted_cost import PASSES, Cost, predicted_costs
from hf_sparseprior.base.checks import check_integer
from hf_sparseprior.base.families import family_of, preset_family
from hf_sparseprior.models.configuration_sparseprior_vit import SparsePriorViTConfig

PATCH = 16  # pixels of a patch where no preset says it
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ValueError for what belongs to --time without it, or is out of bounds."""
    for name in ("model", "images", "dtype"):
        if not arguments.time and (value := getattr(arguments, name)) is not None:
            raise ValueError(f"--{name}={value} belongs to --time")
    if arguments.images is not None:
        check_integer("--images", arguments.images, 1)


def config_of(prior: Mapping[str, Any], arguments: argparse.Namespace) -> PretrainedConfig:
    """The config of the model that is meant, with this prior, for images of the grid's patches.

    Raises:
        ValueError: for what it cannot be.
    """
    grid, prior = list(arguments.grid), dict(prior)
    if (saved := getattr(arguments, "config", None)) is not None:
        if arguments.set:
            if isinstance(saved.prior, list) and any(each != saved.prior[0] for each in saved.prior):
                raise ValueError(f"--set {arguments.set[0]} with --time needs one prior, not one for each stage")
            return type(saved).from_dict(saved.to_dict(), prior=prior)
        return saved
    if arguments.model is not None:
        takes: Any = "clips" if len(grid) == 3 else "images"
        family = preset_family(arguments.model, takes)
        patch = family.make_config(arguments.model).patch_size
        sides = [side * pixels for side, pixels in zip(grid[-2:], _pair(patch), strict=True)]
        frames = {"num_frames": grid[0]} if takes == "clips" else {}
        return family.make_config(arguments.model, image_size=sides, prior=prior, **frames)
    if len(grid) == 3:
        raise ValueError("--time of a clip needs --model, for example --model vit_small")
    if arguments.prefix > 1:
        raise ValueError(f"--time without --model has a class token or none, not --prefix={arguments.prefix}")
    return SparsePriorViTConfig(
        hidden_size=arguments.heads * arguments.head_dim,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        intermediate_size=4 * arguments.heads * arguments.head_dim,
        image_size=[side * PATCH for side in grid],
        patch_size=PATCH,
        use_class_token=bool(arguments.prefix),
        pooling="class_token" if arguments.prefix else "mean",
        prior=prior,
    )


def _pair(patch: int | Sequence[int]) -> tuple[int, int]:
    return (patch, patch) if isinstance(patch, int) else (patch[0], patch[1])


def explain_time(prior: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Cost]:
    """Print what the model costs; its progress goes to stderr."""
    config = config_of(prior, arguments)
    images, dtype = arguments.images or 1, arguments.dtype or "float32"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    costs = predicted_costs(
        config, images, device, DTYPES[dtype], say=lambda line: print(line, file=sys.stderr, flush=True)
    )
    family = family_of(config)
    assert family is not None
    what = "clip" if family.takes == "clips" else "image"
    several = f"{images} {what}s" if images > 1 else f"one {what}"
    where = f"{torch.get_num_threads()} CPU threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    size = "x".join(
        map(str, config.image_size if isinstance(config.image_size, (list, tuple)) else [config.image_size])
    )
    print(f"\n{arguments.model or family.title}, {several} of {size} pixels, {dtype}, {where}, predicted")
    for name in PASSES:
        cost = costs[name]
        print(
            f"{name:9} {1e3 * cost.seconds:9.1f} ms ({1e3 * cost.lower:.1f} to {1e3 * cost.upper:.1f}), "
            f"{math.ceil(cost.bytes / 2**20)} MiB besides weights and images"
        )
    return costs
