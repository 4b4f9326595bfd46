"""Sizes of single layers, for models from which heads and widths were pruned (`compressed` in a config).

What a model could lose is counted in units: "heads", "head_width" (channels of all heads of a layer), "mlp" (hidden
channels of a layer's MLP) and "width" (channels of the tokens, the same in all layers of a stage). Some families have
more: "value_width" (channels of a layer's values, where "head_width" is of queries and keys alone), "conv_width"
(hidden channels of a convolutional block) and "stem_width" (channels between the convolutions of a stem). A module
names, in `UNIT_AXES`, the units along each axis of its parameters, and in `OWN_UNITS` the kinds of which every such
module has units of its own; `hf_sparseprior.compression` reads that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hf_sparseprior.base.checks import check_integer, check_keys
from hf_sparseprior.base.limits import check_size

HEADS, HEAD_WIDTH, MLP_WIDTH, WIDTH = "heads", "head_width", "mlp", "width"
VALUE_WIDTH, CONV_WIDTH, STEM_WIDTH = "value_width", "conv_width", "stem_width"
# Of the place after or before the module's own: of the next stage, of the next convolution.
NEXT_WIDTH, PREVIOUS_WIDTH, NEXT_STEM_WIDTH = f"next_{WIDTH}", f"previous_{WIDTH}", f"next_{STEM_WIDTH}"
STEPS = {"next": 1, "previous": -1}
# Of a parameter, for each axis the kinds of units along it, of which the last varies fastest; axes that are left out at
# the end have none.
UnitAxes = Mapping[str, tuple[tuple[str, ...], ...]]
KEYS = ("heads", "head_width", "scale_width", "mlp_width")


class LayerSizes(NamedTuple):
    """Sizes of a transformer layer.

    width: of the tokens. num_supports: heads for which the prior has a support. heads: which of them the layer has.
    head_width: of each head's queries and keys. scale_width: logits are divided by its root; that of a head before
    compression. mlp_width: between the MLP's layers. value_width: of each head's values, if it is another.
    """

    width: int
    num_supports: int
    heads: tuple[int, ...]
    head_width: int
    scale_width: int
    mlp_width: int
    value_width: int | None = None

    @property
    def attention_width(self) -> int:
        """Width of all heads together."""
        return len(self.heads) * self.head_width


def kind_and_step(kind: str) -> tuple[str, int]:
    """A kind of units, and how many places after the module's own they are: ("width", 1) of "next_width"."""
    word, _, base_kind = kind.partition("_")
    return (base_kind, STEPS[word]) if word in STEPS else (kind, 0)


def counts(numbers: Iterable[int]) -> str:
    """Numbers of layers in words: "3", or "2 to 4" if they differ."""
    distinct = sorted(set(numbers))
    return str(distinct[0]) if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"


def whole_layer(width: int, num_heads: int, mlp_width: int) -> LayerSizes:
    """The sizes of a layer from which nothing was pruned."""
    head_width = width // num_heads
    return LayerSizes(width, num_heads, tuple(range(num_heads)), head_width, head_width, mlp_width)


def compressed_layers(compressed: Mapping[str, Sequence[Any]], layers: Sequence[LayerSizes]) -> list[LayerSizes]:
    """The layers that a config's `compressed`, in its full form, leaves of these."""
    return [
        layer._replace(heads=tuple(heads), head_width=head_width, scale_width=scale_width, mlp_width=mlp_width)
        for layer, heads, head_width, scale_width, mlp_width in zip(
            layers, *(compressed[key] for key in KEYS), strict=True
        )
    ]


def check_compressed(
    compressed: Any, layers: Sequence[LayerSizes], inner: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The full form of a config's `compressed`: lists with one entry for each layer, or each place of an inner width.

    Args:
        compressed: heads: for each layer the numbers of its heads, from 0, in order; head_width, mlp_width: of each
            layer; scale_width: width of a head by whose root the logits are divided; the kinds of `inner`. What is not
            given is whole.
        layers: the sizes without compression.
        inner: the family's other widths by kind, of each place, without compression.

    Raises:
        ValueError: the message has the key, the value and what is allowed.
    """
    whole: dict[str, Sequence[Any]] = {key: [getattr(layer, key) for layer in layers] for key in KEYS}
    whole.update(inner)
    if not isinstance(compressed, Mapping):
        raise ValueError(f"compressed={compressed!r} must be a map of {', '.join(whole)}, or None")
    check_keys(compressed, tuple(whole), "compressed")
    full: dict[str, Any] = {}
    for key, sizes in whole.items():
        values = compressed.get(key, sizes)
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != len(sizes):
            entries = "an entry for each layer" if key in KEYS else f"{len(sizes)} numbers"
            raise ValueError(f"compressed: {key}={values!r:.60} must be a list with {entries}")
        if key == HEADS:
            full[key] = [_check_heads(heads, layer.num_supports) for heads, layer in zip(values, layers, strict=True)]
        else:
            full[key] = [check_size(f"compressed: {key}", value, 1, "width") for value in values]
    return full


def _check_heads(heads: Any, num_supports: int) -> list[int]:
    listed = [] if isinstance(heads, str) or not isinstance(heads, Sequence) else list(heads)
    numbers = [check_integer("compressed: heads", head, 0) for head in listed]
    if not numbers or numbers != sorted(set(numbers)) or numbers[-1] >= num_supports:
        raise ValueError(
            f"compressed: heads={heads!r:.60} of a layer must be different numbers in order, from 0 to "
            f"{num_supports - 1}, at least one"
        )
    return numbers
