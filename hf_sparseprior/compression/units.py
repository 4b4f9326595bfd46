"""The units that a model can lose, and what of its weights goes with each.

A group is the units of one kind in one place: the heads of a layer, the channels of a stage. Modules say in `UNIT_AXES`
which kinds lie along the axes of their weights; here they are counted, and weights are cut.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_sparseprior.base.layer_sizes import HEAD_WIDTH, HEADS, MLP_WIDTH, WIDTH, UnitAxes, kind_and_step
from hf_sparseprior.priors.prior import pruning_of

NORM_AXES: UnitAxes = {"weight": ((WIDTH,),), "bias": ((WIDTH,),)}


class Group(NamedTuple):
    """Units of one kind (`layer_sizes`) in one place: the number of a layer, of a stage, or of a block."""

    kind: str
    place: int


class Units:
    """The units of a model by group, and where they lie in its weights.

    sizes: how many units each group has. axes: by name of a weight, for each of its axes the groups along it; the last
    varies fastest, and the whole may be repeated, as the channels of four neighbours are in patch merging.

    Args:
        model: of one of our families.

    Raises:
        ValueError: for a model with a weight that does not say which units it has, and for a prior that goes by what
            all heads see.
    """

    def __init__(self, model: Any) -> None:
        self.config = model.config
        _check_prior(model)
        self.axes: dict[str, tuple[tuple[Group, ...], ...]] = {}
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self._holders: dict[str, list[str]] = {}  # by kind, the modules that have units of their own
        for path, module in self.modules.items():
            for kind in getattr(module, "OWN_UNITS", ()):
                self._holders.setdefault(kind, []).append(path)
        self.shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        self.sizes = self._sizes(model)
        for name in self.shapes:
            self.axes[name] = self._groups(model, name)
        self.parameters = {name for name, _ in model.named_parameters()}
        self._terms = self._count_terms()
        self._terms_of: dict[Group, list[tuple[int, tuple[Group, ...]]]] = {group: [] for group in self.sizes}
        for groups, factor in self._terms.items():
            for group in groups:
                others = tuple(other for other in groups if other != group)
                self._terms_of[group].append((factor, others))

    def _sizes(self, model: Any) -> dict[Group, int]:
        sizes: dict[Group, int] = {}
        for layer, layer_sizes in enumerate(self.config.layers):
            sizes |= {
                Group(HEADS, layer): len(layer_sizes.heads),
                Group(HEAD_WIDTH, layer): layer_sizes.head_width,
                Group(MLP_WIDTH, layer): layer_sizes.mlp_width,
            }
        for kind, widths in self.config.inner_widths.items():
            sizes |= {Group(kind, place): width for place, width in enumerate(widths)}
        # Stages that the model does not tell apart have their width together.
        last = max(model.base_model.stage_of(name) for name, _ in model.base_model.named_parameters())
        return sizes | {Group(WIDTH, stage): width for stage, width in enumerate(self.config.stage_widths[: last + 1])}

    def _groups(self, model: Any, name: str) -> tuple[tuple[Group, ...], ...]:
        """The groups along the axes of a weight."""
        owner, kinds = self._declared(model, name)
        # A batch norm's count of batches has no axis.
        kinds = kinds[: len(self.shapes[name])]
        axes = tuple(tuple(self._group(model, kind, owner) for kind in axis) for axis in kinds)
        for axis, size in zip(axes, self.shapes[name], strict=False):
            if size % math.prod(self.sizes[group] for group in axis):
                raise ValueError(
                    f"{name} of shape {self.shapes[name]} cannot be compressed: {size} is not made of {axis}"
                )
        return axes + ((),) * (len(self.shapes[name]) - len(axes))

    def _declared(self, model: Any, name: str) -> tuple[str, tuple[tuple[str, ...], ...]]:
        """The module that says which units a weight has, and what it says: the nearest that knows the name."""
        parts = name.split(".")
        for depth in range(len(parts) - 1, -1, -1):
            owner, local = ".".join(parts[:depth]), ".".join(parts[depth:])
            module = self.modules[owner]
            declared = NORM_AXES if type(module) is nn.LayerNorm else getattr(module, "UNIT_AXES", {})
            for pattern, axes in declared.items():
                if fnmatchcase(local, pattern):
                    return owner, axes
        raise ValueError(f"a {type(model).__name__} with {name} cannot be compressed: it does not say how that is cut")

    def _group(self, model: Any, kind: str, owner: str) -> Group:
        kind, step = kind_and_step(kind)
        if kind == WIDTH:
            local = f"{owner}.".removeprefix(f"{model.base_model_prefix}.") if owner else ""
            return Group(WIDTH, model.base_model.stage_of(local) + step)
        holders = enumerate(self._holders[kind])
        return Group(kind, next(n for n, path in holders if f"{owner}.".startswith(f"{path}.")) + step)

    # ---- numbers of parameters --------------------------------------------------------------------------------------

    def _count_terms(self) -> dict[tuple[Group, ...], int]:
        """Parameters are the sum of factor * product of the sizes of groups: the factors by groups."""
        terms: Counter[tuple[Group, ...]] = Counter()
        for name in self.parameters:
            groups = tuple(sorted(group for axis in self.axes[name] for group in axis))
            terms[groups] += math.prod(self.shapes[name]) // math.prod(self.sizes[group] for group in groups)
        return dict(terms)

    def count(self, sizes: Mapping[Group, int]) -> int:
        """How many parameters a model has with these sizes of groups."""
        return sum(factor * math.prod(sizes[group] for group in groups) for groups, factor in self._terms.items())

    def cost(self, group: Group, sizes: Mapping[Group, int]) -> int:
        """How many parameters one unit of a group has where groups have these sizes."""
        return sum(factor * math.prod(sizes[other] for other in others) for factor, others in self._terms_of[group])

    # ---- cutting ----------------------------------------------------------------------------------------------------

    def cut(self, state: Mapping[str, Tensor], kept: Mapping[Group, Tensor]) -> dict[str, Tensor]:
        """Weights without the units that are not kept.

        Args:
            state: weights by name.
            kept: bool (units,) of groups; of the others everything is kept.
        """
        return {name: self._cut_one(name, value, kept) for name, value in state.items()}

    def _cut_one(self, name: str, value: Tensor, kept: Mapping[Group, Tensor]) -> Tensor:
        for number, axis in enumerate(self.axes[name]):
            if any(group in kept for group in axis):
                rows = self.spread(axis, {g: kept.get(g, torch.ones(self.sizes[g], dtype=torch.bool)) for g in axis})
                index = rows.repeat(value.shape[number] // len(rows)).nonzero()[:, 0]
                value = value.index_select(number, index.to(value.device))
        return value.clone()

    def spread(self, axis: tuple[Group, ...], values: Mapping[Group, Tensor]) -> Tensor:
        """Products of the groups' values (units,) along an axis that they make up, the last varying fastest."""
        product = values[axis[0]]
        for group in axis[1:]:
            product = (product[:, None] * values[group]).flatten()
        return product


def _check_prior(model: Any) -> None:
    if getattr(model.config, "position_embedding", None) == "rotary":
        raise ValueError("position_embedding='rotary' turns pairs of a head's channels; it cannot be compressed")
    for prior in model.config.layer_priors:
        if prior["mixer"] != "softmax":
            raise ValueError(f"prior: mixer {prior['mixer']['name']!r} is not made of heads that can be cut")
        if (pruning := pruning_of(prior)) is not None:
            settings, kind = pruning
            raise ValueError(
                f"prior: {settings['name']!r} {kind.verb} tokens by what all heads see; it cannot be compressed"
            )
