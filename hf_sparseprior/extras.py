"""Extras: modules that a prior adds beside support and decay, each starting where it changes nothing.

`register_extra` makes a class a value of the `extras` of a prior. VIOLIN compares itself with them (Tables 7, 26, 27).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .supports import check_keys, registering, split_spec

EXTRAS: dict[str, type[Extra]] = {}


def register_extra(name: str) -> Callable[[type[Extra]], type[Extra]]:
    """Register a subclass of `Extra` under `name`."""
    return registering("extra", EXTRAS, name)


class Extra(nn.Module):
    """Base of all extras.

    SETTINGS: with their defaults. in_attention: whether the attention layer holds it; if not, the MLP does.
    """

    name: str
    SETTINGS: dict[str, Any] = {}
    in_attention = True

    @classmethod
    def check_settings(cls, settings: dict[str, Any], grid: Sequence[int]) -> dict[str, Any]:
        """The settings with their values checked, for a patch grid (height, width).

        Raises:
            ValueError: naming the setting, the value and what is allowed.
        """
        return settings

    def initial_values(self) -> dict[str, Tensor]:
        """Fresh values of every parameter: zeros, with which nothing changes."""
        return {name: torch.zeros(parameter.shape) for name, parameter in self.named_parameters(recurse=False)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter to its initial value."""
        for name, value in self.initial_values().items():
            getattr(self, name).copy_(value)


def resolve_extras(extras: Sequence[str | dict[str, Any]] | None, grid: Sequence[int]) -> list[dict[str, Any]]:
    """The full form of `extras`: a list of names with every setting, checked.

    Raises:
        ValueError: naming the extra, the setting, the value and what is allowed.
    """
    if extras is not None and (isinstance(extras, str) or not isinstance(extras, Sequence)):
        raise ValueError(f"extras={extras!r} must be a list of {', '.join(EXTRAS)}")
    resolved = []
    for extra in extras or ():
        name, spec = split_spec(extra, "extras", EXTRAS)
        settings = dict(EXTRAS[name].SETTINGS)
        check_keys(spec, list(settings), f"extra {name!r}")
        resolved.append({"name": name, **EXTRAS[name].check_settings({**settings, **spec}, grid)})
    names = [extra["name"] for extra in resolved]
    if len(set(names)) != len(names):
        raise ValueError(f"extras={names!r} must not repeat a name")
    return resolved


def make_extras(extras: Sequence[dict[str, Any]], in_attention: bool, *sizes: int) -> nn.ModuleDict:
    """The modules of resolved extras by name: those of the attention layer, or those of the MLP."""
    return nn.ModuleDict(
        {
            extra["name"]: EXTRAS[extra["name"]](*sizes, **{k: v for k, v in extra.items() if k != "name"})
            for extra in extras
            if EXTRAS[extra["name"]].in_attention == in_attention
        }
    )
