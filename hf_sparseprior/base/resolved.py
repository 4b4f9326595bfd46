"""Types of a prior's full form, which `resolve_prior` returns and config.json holds.

They stay dicts, so that json reads and writes them. A support, a decay, a predictor, a mixer and an extra each have
their own settings in addition to the keys named here; `own_settings` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NotRequired, TypedDict, cast, get_args

from torch import Tensor

MaskFill = Literal["neg_inf", "zero"]
MASK_FILLS: tuple[MaskFill, ...] = get_args(MaskFill)
Time = Literal["frame", "clip", "axes"]
TIMES: tuple[Time, ...] = get_args(Time)
Placement = Literal["multiply", "add", "multiply_after", "add_after", "add_after_as_printed", "residual"]


class ResolvedSupport(TypedDict):
    """A support and the settings that every support has.

    shuffle_seed: decides which head has which support in which layer; None: head i has support i.
    mask_fill: the logits of pairs that are left out.
    order: the order of the patches in which offsets count, see `token_order`; left out for raster order.
    redraw: whether random pairs are drawn anew in each training pass; left out if they are not.
    heads: of the support "heads" alone, the numbers of each group of heads ("0-2", "3") and its support, which has a
        `shuffle_seed` of its own; see `mixed_heads`.
    """

    name: str
    shuffle_seed: int | None
    mask_fill: MaskFill
    order: NotRequired[str | list[str]]
    redraw: NotRequired[bool]
    heads: NotRequired[dict[str, ResolvedSupport]]


class ResolvedDecay(TypedDict):
    """A decay and the settings that every decay has; see `decay.Decay.SETTINGS`."""

    name: str
    init: str | dict[str, float]
    learn_alpha: bool
    learn_beta: bool
    learn_prefix: bool
    placement: Placement
    alpha_scales: NotRequired[str]
    gamma: float | None


class DecayTensors(ResolvedDecay):
    """A decay of one step: its settings, and its tensors as its module has them or as `ops.attention` is given them.

    beta: (C, H). alpha: (H,), missing or None for 1. prefix_beta: (H,), missing or None where the gamma of prefix
    tokens is 1. order: (1, height, width), learned positions.
    """

    beta: Tensor
    alpha: NotRequired[Tensor | None]
    prefix_beta: NotRequired[Tensor | None]
    order: NotRequired[Tensor | None]


class ResolvedSequence(TypedDict):
    """A dilation sequence of Fibottention."""

    name: str


class ResolvedModule(TypedDict):
    """A predictor, a mixer or an extra."""

    name: str


class ResolvedPrior(TypedDict):
    """All five slots, and how support and decay see time.

    time: see `prior`; left out for "frame", and for images.
    """

    support: ResolvedSupport
    decay: ResolvedDecay | None
    predictor: ResolvedModule | None
    mixer: Literal["softmax"] | ResolvedModule
    extras: list[ResolvedModule]
    time: NotRequired[Time]


PER_LAYER: Final = "layers"  # the key of priors that differ between layers
PER_HEAD: Final = "heads"  # the key of priors that differ between heads, and the support that they become


class ResolvedLayers(TypedDict):
    """Priors that differ between the layers of a stage.

    layers: for each run of layers with the same prior, their numbers in the stage ("0-3", "4") and the prior.
    """

    layers: dict[str, ResolvedPrior]


# What config.json holds: one prior for all layers, one for each run of layers, or one of these for each stage.
FullPrior = ResolvedPrior | ResolvedLayers | Sequence[ResolvedPrior | ResolvedLayers]


def each_prior(prior: FullPrior | Mapping[str, Any] | Sequence[Any]) -> list[ResolvedPrior]:
    """The priors in a full form, in the order of the layers, one for each run of layers or stage."""
    if isinstance(prior, Sequence):
        return [one for part in prior for one in each_prior(part)]
    if PER_LAYER in prior:
        return list(cast("ResolvedLayers", prior)[PER_LAYER].values())
    return [cast("ResolvedPrior", prior)]


def with_decay(prior: ResolvedPrior, decay: ResolvedDecay, time: Time) -> ResolvedPrior:
    """A prior with another decay, which sees time so."""
    changed: ResolvedPrior = {**prior, "decay": decay, "time": time}
    if time == "frame":
        del changed["time"]
    return changed


Resolved = ResolvedSupport | ResolvedDecay | ResolvedModule | ResolvedSequence
# Settings by name, as a user gives them before they are checked, or of whatever fills a slot.
Settings = Mapping[str, Any]


def own_settings(resolved: Resolved | Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a component of a prior, without its name."""
    return {key: value for key, value in cast("Mapping[str, Any]", resolved).items() if key != "name"}
