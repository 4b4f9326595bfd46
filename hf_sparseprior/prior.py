"""The `prior` of a config: five slots, resolved and checked together.

support    which pairs are computed, known before the data        dense, fibottention, window, ...
decay      learned weights of pairs                                none, violin, manhattan, ...
predictor  keys chosen per image                                   none
mixer      what is computed over the pairs                         softmax
extras     further modules, a list                                 swin_rpb, irpe_k, localvit, ...
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from .decay import DECAYS, resolve_decay
from .extras import EXTRAS, resolve_extras
from .locality import LocalityBranch  # noqa: F401  registers itself
from .relative_position import RelativePosition  # noqa: F401  registers its kinds
from .supports import SUPPORTS, check_keys, head_offsets, pruning_ratio, resolve_support

# What a prior's modules are called within attention layers and MLPs: decay and extras.
PRIOR_MODULES = frozenset({"decay_bias", "relative_position", "locality"})
SLOTS = ("support", "decay", "predictor", "mixer", "extras")
# Filled by later mechanisms; named here so that a name finds its slot and an error can list what there is.
PREDICTORS: dict[str, Any] = {}
MIXERS: dict[str, Any] = {"softmax": None}


def prior_names() -> list[str]:
    """Every name that `prior` accepts on its own."""
    return [*SUPPORTS, *DECAYS, *PREDICTORS, *MIXERS, *EXTRAS]


def parse_prior(prior: str | dict[str, Any] | None) -> dict[str, Any]:
    """A prior as a dict of slots, not yet checked: a name fills its slot, names joined by + fill several."""
    slots: dict[str, Any] = dict.fromkeys(SLOTS)
    slots["extras"] = []
    if prior is None:
        return slots
    if isinstance(prior, dict):
        check_keys(prior, SLOTS, "prior")
        return {**slots, **prior}
    if not isinstance(prior, str):
        raise ValueError(f"prior={prior!r} must be a name, names joined by +, or a dict of {', '.join(SLOTS)}")
    for name in (part.strip() for part in prior.split("+")):
        registries: dict[str, dict] = {"support": SUPPORTS, "decay": DECAYS, "predictor": PREDICTORS, "mixer": MIXERS}
        slot = next((slot for slot, registry in registries.items() if name in registry), None)
        if name in EXTRAS:
            slots["extras"].append(name)
        elif slot is None:
            near = difflib.get_close_matches(name, prior_names(), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"prior={prior!r}: {name!r} is no prior; {hint}Names: {', '.join(prior_names())}")
        elif slots[slot] is not None:
            raise ValueError(f"prior={prior!r} fills the {slot} twice, with {slots[slot]!r} and {name!r}")
        else:
            slots[slot] = name
    return slots


def resolve_prior(prior: str | dict[str, Any] | None, num_heads: int, grid: Sequence[int]) -> dict[str, Any]:
    """The full form of a prior: every slot with every setting, ready to be written to config.json.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """
    slots = parse_prior(prior)
    num_tokens = grid[0] * grid[1]
    try:
        support = resolve_support(slots["support"], num_heads, num_tokens)
    except ValueError as error:
        raise ValueError(f"prior: {error} ({grid[0]}x{grid[1]} grid)") from None
    try:
        decay = resolve_decay(slots["decay"], grid)
    except ValueError as error:
        raise ValueError(f"prior: {error}") from None
    if slots["predictor"] is not None:
        raise ValueError(f"prior: predictor={slots['predictor']!r} must be None; this version has no predictor")
    mixer = "softmax" if slots["mixer"] is None else slots["mixer"]
    if not isinstance(mixer, str) or mixer not in MIXERS:
        raise ValueError(f"prior: mixer={mixer!r} must be one of {', '.join(MIXERS)}")
    try:
        extras = resolve_extras(slots["extras"], grid)
    except ValueError as error:
        raise ValueError(f"prior: {error}") from None
    return {"support": support, "decay": decay, "predictor": None, "mixer": mixer, "extras": extras}


def prior_name(prior: dict[str, Any]) -> str:
    """Short name of a resolved prior: "fibottention+violin"."""
    parts = [prior["support"]["name"]] if prior["support"]["name"] != "dense" else []
    parts += [prior["decay"]["name"]] if prior["decay"] else []
    parts += [extra["name"] for extra in prior["extras"]]
    return "+".join(parts) or "dense"


def of_prior(key: str) -> bool:
    """Whether a weight of this name belongs to a prior: foreign checkpoints do not have it, and it may start anew."""
    return not PRIOR_MODULES.isdisjoint(key.split("."))


def prior_pruning_ratio(prior: dict[str, Any], num_heads: int, grid: Sequence[int], num_prefix_tokens: int) -> float:
    """Percentage of all pairs, prefix included, that the prior's support leaves out."""
    num_tokens = grid[0] * grid[1]
    offsets = head_offsets(prior["support"], num_heads=num_heads, num_tokens=num_tokens)
    return pruning_ratio(offsets, num_tokens, num_prefix_tokens)
