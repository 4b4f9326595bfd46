"""Extras: modules that a prior adds to support and decay. Each starts where it changes nothing.

`register_extra` makes a class a value of the `extras` of a prior. VIOLIN is compared with them (Tables 7, 26, 27).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from hf_sparseprior.base.checks import check_keys, python_value, split_spec
from hf_sparseprior.base.layer_sizes import UnitAxes
from hf_sparseprior.base.registry import registering
from hf_sparseprior.base.resolved import ResolvedModule, Settings, own_settings

Place = Literal["attention", "MLP", "model"]
EXTRAS: dict[str, type[Extra]] = {}


def register_extra(name: str) -> Callable[[type[Extra]], type[Extra]]:
    """Register a subclass of `Extra` under `name`."""
    return registering("extra", EXTRAS, name)


class PriorModule(nn.Module):
    """Base of the modules of a prior that have settings: extras, predictors, mixers.

    SETTINGS: the settings with their defaults.
    UNIT_AXES: the units along the axes of its parameters (`layer_sizes`); a model with a parameter that is not here
        cannot be compressed.
    """

    name: str
    SETTINGS: dict[str, Any] = {}
    UNIT_AXES: UnitAxes = {}

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """The settings with their values checked, for a patch grid (height, width).

        Raises:
            ValueError: the message has the setting, the value and what is allowed.
        """
        return settings

    @classmethod
    def num_weights(cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int) -> int:
        """How many weights one such module has in its matrices, which says whether it is too large to be made.

        Args:
            settings: its own, resolved. num_heads: H. width, hidden: of the tokens, and between the MLP's layers.
        """
        return 0

    def initial_values(self) -> dict[str, Tensor]:
        """Initial values of every parameter: zeros."""
        return {name: torch.zeros(parameter.shape) for name, parameter in self.named_parameters(recurse=False)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter to its initial value."""
        for name, value in self.initial_values().items():
            getattr(self, name).copy_(value)


class Extra(PriorModule):
    """Base of all extras. With its initial values (zeros by default) an extra changes nothing, unless it drops or
    merges tokens.

    place: what holds it: every "attention" layer, every "MLP", or the "model" (once).
    takes_layouts: whether patches may come in another order than raster order, because it knows them by tables of the
        plan alone.
    """

    place: Place = "attention"
    takes_layouts = False

    @classmethod
    def multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int, grid: Sequence[int], prefix: int
    ) -> int | None:
        """Multiply-adds of its matrix products and convolutions in one layer, for one image; None: not counted.

        Args:
            settings: its own, resolved. num_heads: H. width, hidden: of the tokens, and between the MLP's layers.
            grid: (height, width) of the patches. prefix: P.
        """
        return None

    @classmethod
    def shared_multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int, grid: Sequence[int]
    ) -> int:
        """Those of `multiply_adds` that do not depend on the tokens, and are needed once for all windows and images."""
        return 0

    @classmethod
    def check_model(cls, settings: Mapping[str, Any], config: Any) -> None:
        """Raise ValueError unless the settings go with a model of this config."""


ModuleSpec = str | Mapping[str, Any] | ResolvedModule


def resolve_module(
    spec: ModuleSpec, slot: str, registry: Mapping[str, type[PriorModule]], grid: Sequence[int]
) -> ResolvedModule:
    """The full form of a component: its name with every setting, checked.

    Raises:
        ValueError: the message has the slot, the setting, the value and what is allowed.
    """
    name, given = split_spec(spec, slot, registry)
    settings = dict(registry[name].SETTINGS)
    check_keys(given, list(settings), f"{slot.removesuffix('s')} {name!r}")
    settings.update((key, python_value(value)) for key, value in given.items())
    return cast("ResolvedModule", {"name": name, **registry[name].check_settings(settings, grid)})


def make_module(resolved: ResolvedModule, registry: Mapping[str, type[PriorModule]], *sizes: int) -> PriorModule:
    """The module of a resolved slot."""
    return registry[resolved["name"]](*sizes, **own_settings(resolved))


def resolve_extras(extras: Sequence[ModuleSpec] | None, grid: Sequence[int]) -> list[ResolvedModule]:
    """The full form of `extras`: a list of names with every setting, checked.

    Raises:
        ValueError: the message has the extra, the setting, the value and what is allowed.
    """
    if extras is not None and (isinstance(extras, str) or not isinstance(extras, Sequence)):
        raise ValueError(f"extras={extras!r} must be a list of {', '.join(EXTRAS)}")
    resolved = [resolve_module(extra, "extras", EXTRAS, grid) for extra in extras or ()]
    names = [extra["name"] for extra in resolved]
    if len(set(names)) != len(names):
        raise ValueError(f"extras={names!r} must not repeat a name")
    return resolved


def make_extras(extras: Sequence[ResolvedModule], place: Place, *sizes: int) -> nn.ModuleDict:
    """The modules of the resolved extras that have this place, by name."""
    return nn.ModuleDict(
        {extra["name"]: make_module(extra, EXTRAS, *sizes) for extra in extras if EXTRAS[extra["name"]].place == place}
    )
