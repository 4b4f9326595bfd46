"""The smaller model that is left when units were pruned. Its config says what is left, and it loads as every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_sparseprior.base.layer_sizes import HEAD_WIDTH, HEADS, MLP_WIDTH, WIDTH
from hf_sparseprior.compression.units import Group, Units


def compressed_config(config: Any, kept: Mapping[Group, Tensor]) -> Any:
    """The config of a model without the units that are not kept.

    Heads keep their numbers, and so their supports.

    Args:
        config: of the model, itself compressed or not.
        kept: bool (units,) of groups; of the others everything is kept.
    """

    def left(kind: str, place: int, size: int) -> list[int]:
        mask = kept.get(Group(kind, place))
        return list(range(size)) if mask is None else [int(unit) for unit in mask.nonzero()[:, 0]]

    layers = config.layers
    compressed = {
        "heads": [
            [layer.heads[unit] for unit in left(HEADS, number, len(layer.heads))] for number, layer in enumerate(layers)
        ],
        "head_width": [len(left(HEAD_WIDTH, number, layer.head_width)) for number, layer in enumerate(layers)],
        "scale_width": [layer.scale_width for layer in layers],
        "mlp_width": [len(left(MLP_WIDTH, number, layer.mlp_width)) for number, layer in enumerate(layers)],
    }
    for kind, inner in config.inner_widths.items():
        compressed[kind] = [len(left(kind, place, width)) for place, width in enumerate(inner)]
    widths = [len(left(WIDTH, stage, width)) for stage, width in enumerate(config.stage_widths)]
    return type(config).from_dict({**config.to_dict(), "compressed": compressed, **config.with_widths(widths)})


@torch.no_grad()
def compressed_model(model: Any, kept: Mapping[Group, Tensor], units: Units | None = None) -> Any:
    """A copy of a model without the units that are not kept, of the same class, on the same device.

    Args:
        model: of one of our families.
        kept: as in `compressed_config`.
        units: of the model; None: they are found.

    Raises:
        ValueError: for a model that cannot be compressed (`Units`).
    """
    units = Units(model) if units is None else units
    with torch.random.fork_rng():  # its first weights are thrown away
        smaller = type(model)(compressed_config(model.config, kept))
    smaller.to(device=model.device, dtype=model.dtype)
    smaller.load_state_dict(units.cut(model.state_dict(), kept))
    return smaller.train(model.training)
