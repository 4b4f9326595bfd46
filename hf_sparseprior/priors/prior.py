"""The `prior` of a config: five slots, resolved and checked together.

support    which pairs are computed, known before the data        dense, fibottention, window, ...
decay      learned weights of pairs                                none, violin, manhattan, ...
predictor  keys chosen per image                                   none, topk, sparsifiner
mixer      what is computed over the pairs                         softmax, linformer, efficient
extras     further modules, a list                                 swin_rpb, irpe_k, localvit, evit, ...

Where attention sees the patches of several frames together, `time` says how support and decay see the frames: "frame",
"clip" or "axes", see `attention.plan.AttentionPlan`. Their names are joined by + like those of slots: "violin+clip".
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from hf_sparseprior.base.checks import check_keys
from hf_sparseprior.base.extras import EXTRAS, ModuleSpec, resolve_extras, resolve_module
from hf_sparseprior.base.resolved import (
    PER_HEAD,
    PER_LAYER,
    TIMES,
    FullPrior,
    ResolvedModule,
    ResolvedPrior,
    Time,
    each_prior,
)
from hf_sparseprior.patterns.curves import curve_names
from hf_sparseprior.patterns.decay import DECAYS, resolve_decay
from hf_sparseprior.patterns.mixed_heads import entries_of, is_mixed, kinds_of, support_name
from hf_sparseprior.patterns.sequences import SEQUENCES
from hf_sparseprior.patterns.supports import (
    SUPPORTS,
    LayerKey,
    check_time,
    layer_pattern,
    own_grid,
    resolve_support,
    support_pattern,
)
from hf_sparseprior.patterns.token_order import RASTER
from hf_sparseprior.priors.locality import LocalityBranch  # noqa: F401  registers itself
from hf_sparseprior.priors.low_rank import MIXERS, Mixer
from hf_sparseprior.priors.predictor import PREDICTORS, Predictor
from hf_sparseprior.priors.relative_position import RelativePosition  # noqa: F401  registers its kinds
from hf_sparseprior.priors.sparsifiner import Sparsifiner  # noqa: F401  registers itself
from hf_sparseprior.priors.sparsifiner_published import PublishedSparsifiner  # noqa: F401  registers itself
from hf_sparseprior.priors.token_merging import ToMe  # noqa: F401
from hf_sparseprior.priors.token_pruning import TokenReduction

# Names of a prior's modules in attention layers, MLPs and the model: decay, predictor, mixer, extras, count of draws.
PRIOR_MODULES = frozenset(
    {"decay_bias", "predictor", "mixer", "relative_position", "locality", "token_pruning", "draws"}
)
SLOTS = ("support", "decay", "predictor", "mixer", "extras")
TIME = "time"


def prior_names() -> list[str]:
    """Every name that `prior` accepts on its own."""
    return [*SUPPORTS, *DECAYS, *PREDICTORS, *MIXERS, *EXTRAS]


PriorSpec = str | Mapping[str, Any] | ResolvedPrior


class Stage(NamedTuple):
    """Consecutive attention layers that share heads and grid.

    num_heads: H. grid: (height, width) of the patches that see each other, or (frames, height, width). num_layers: how
    many there are. num_windows: into how many such grids an image is divided. has_prefix: whether the model's prefix
    tokens are there. takes_prior: False for layers with an attention of their own, which no prior changes.
    """

    num_heads: int
    grid: tuple[int, ...]
    num_layers: int = 1
    num_windows: int = 1
    has_prefix: bool = True
    takes_prior: bool = True


def parse_prior(prior: PriorSpec | None) -> dict[str, Any]:
    """A prior as a dict of slots, not yet checked: a name fills its slot, names joined by + fill several."""
    slots: dict[str, Any] = dict.fromkeys(SLOTS)
    slots["extras"] = []
    slots[TIME] = None
    if prior is None:
        return slots
    if isinstance(prior, Mapping):
        if PER_HEAD in prior:
            return _parse_heads(prior)
        if PER_LAYER in prior:
            raise ValueError("prior: 'layers' must be in the prior of a whole model, not in that of a layer")
        check_keys(prior, (*SLOTS, TIME), "prior")
        return {**slots, **prior}
    if not isinstance(prior, str):
        raise ValueError(f"prior={prior!r} must be a name, names joined by +, or a dict of {', '.join(SLOTS)}")
    for name in (part.strip() for part in prior.split("+")):
        registries: dict[str, dict] = {"support": SUPPORTS, "decay": DECAYS, "predictor": PREDICTORS, "mixer": MIXERS}
        slot = next((slot for slot, registry in registries.items() if name in registry), None)
        if name in TIMES:
            if slots[TIME] is not None:
                raise ValueError(f"prior={prior!r} says twice how it sees time, {slots[TIME]!r} and {name!r}")
            slots[TIME] = name
        elif name in EXTRAS:
            slots["extras"].append(name)
        elif slot is None:
            raise ValueError(
                f"prior={prior!r}: {name!r} is no prior; {_meant(name)}Names: {', '.join(prior_names())}; over the "
                f"frames of clips also {', '.join(TIMES)}"
            )
        elif slots[slot] is not None:
            raise ValueError(f"prior={prior!r} fills the {slot} twice, with {slots[slot]!r} and {name!r}")
        else:
            slots[slot] = name
    return slots


def _parse_heads(prior: Mapping[str, Any]) -> dict[str, Any]:
    """The slots of {"heads": ...}: those that all heads have in common, and the supports of the groups as one support.

    Raises:
        ValueError: for further keys, and for heads that differ in another slot than the support.
    """
    if others := [str(key) for key in prior if key != PER_HEAD]:
        raise ValueError(f"prior: {', '.join(others)} next to 'heads' must be in each of the priors of 'heads'")
    heads = prior[PER_HEAD]
    is_list = isinstance(heads, Sequence) and not isinstance(heads, str)
    if not heads or not (is_list or isinstance(heads, Mapping)):
        raise ValueError(f"prior: heads={heads!r} must be a list of priors, or an object of numbers like '0-3'")
    parsed = [parse_prior(spec) for spec in (heads if is_list else heads.values())]
    for slots in parsed[1:]:
        for slot in (*SLOTS[1:], TIME):
            if _named(slots[slot]) != _named(parsed[0][slot]):
                raise ValueError(
                    f"prior: heads of one layer must differ in their supports alone; {slot}={slots[slot]!r} of some "
                    f"is not {parsed[0][slot]!r}"
                )
    supports = ["dense" if slots["support"] is None else slots["support"] for slots in parsed]
    groups = supports if is_list else dict(zip(heads, supports, strict=True))
    return {**parsed[0], "support": {"name": PER_HEAD, PER_HEAD: groups}}


def _named(spec: Any) -> Any:
    """What fills a slot, in which a name alone is like a dict of it."""
    if isinstance(spec, list):
        return [_named(part) for part in spec]
    return {"name": spec} if isinstance(spec, str) else spec


def _meant(name: str) -> str:
    """What may have been meant by a name that is no prior: another prior, or a name that belongs into its settings."""
    for kind, known, setting in (
        ("sequence", SEQUENCES, "support: {{name: fibottention, sequence: {}}}"),
        ("curve", curve_names(), "decay: {{name: violin, curves: [{}]}}"),
    ):
        if name in known:
            return f"it is a {kind}, which is a setting: {setting.format(name)}. "
    every = [*prior_names(), *TIMES, *SEQUENCES, *curve_names()]
    near = difflib.get_close_matches(name, every, n=1)
    if not near or near[0] in prior_names() or near[0] in TIMES:
        return f"did you mean {near[0]!r}? " if near else ""
    return f"did you mean {near[0]!r}? {_meant(near[0])[0].upper()}{_meant(near[0])[1:]}"


def resolve_prior(prior: PriorSpec | None, num_heads: int, grid: Sequence[int]) -> ResolvedPrior:
    """The full form of a prior for one stage: every slot with every setting, ready to be written to config.json.

    Args:
        prior: a name, names joined by +, or a dict of slots.
        num_heads: H.
        grid: (height, width) of the patches, or (frames, height, width) of those of a clip that attention sees
            together.

    Raises:
        ValueError: the message has the field, the value and what is allowed.
    """
    slots = parse_prior(prior)
    time = _resolve_time(slots, grid)
    pattern_grid = own_grid(grid, time)
    try:
        support = resolve_support(slots["support"], num_heads, math.prod(pattern_grid), pattern_grid)
    except ValueError as error:
        raise ValueError(f"prior: {error} ({'x'.join(map(str, pattern_grid))} grid)") from None
    try:
        decay = resolve_decay(slots["decay"], pattern_grid)
    except ValueError as error:
        raise ValueError(f"prior: {error}") from None
    try:
        whole = (math.prod(grid[:-1]), grid[-1])  # what these are made for is the number of all patches
        predictor = resolve_predictor(slots["predictor"], whole)
        mixer = resolve_mixer(slots["mixer"], whole)
        extras = resolve_extras(slots["extras"], whole)
    except ValueError as error:
        raise ValueError(f"prior: {error}") from None
    resolved = ResolvedPrior(support=support, decay=decay, predictor=predictor, mixer=mixer, extras=extras)
    check_together(resolved)
    if len(grid) == 3:
        _check_clip(resolved, time, list(whole))
    if time != "frame":
        resolved["time"] = time
    return resolved


def _resolve_time(slots: Mapping[str, Any], grid: Sequence[int]) -> Time:
    """How the prior sees time: as given, or as its support needs it, or per frame."""
    given = slots[TIME]
    name = next((entry.name for entry in entries_of(slots["support"]) if entry.sees_time), None)
    sees_time = name is not None
    time: Time = "clip" if sees_time else "frame"
    if given is None:
        given = time
    try:
        time = check_time(given)
    except ValueError as error:
        raise ValueError(f"prior: {error}") from None
    if len(grid) == 2:
        if slots[TIME] not in (None, "frame"):
            raise ValueError(
                f"prior: time={time!r} is for attention over the frames of a clip; here it sees one image or frame"
            )
        return "frame"
    if sees_time and time != "clip":
        raise ValueError(f"prior: support {name!r} goes by distances in time; with it time={time!r} must be 'clip'")
    return time


def _check_clip(prior: ResolvedPrior, time: Time, whole: list[int]) -> None:
    """Raise for what has no meaning over the frames of a clip, or no effect there."""
    if (entry := predictor_or_mixer(prior)) is not None and entry[0].get("grid", whole) != whole:
        raise ValueError(
            f"prior: {entry[0]['name']}: grid={entry[0]['grid']} must be {whole}, the frames one below the other"
        )
    for extra in prior["extras"]:
        if EXTRAS[extra["name"]].place == "attention":
            raise ValueError(f"prior: {extra['name']!r} is of places in one image, and attention sees several frames")
    support = prior["support"]["name"]
    if time != "frame" and support == "dense" and prior["decay"] is None:
        raise ValueError(
            f"prior: time={time!r} is how support and decay see time, and {prior_name(prior)!r} has neither"
        )
    for kind in kinds_of(prior["support"]) if time == "axes" else ():
        if kind["name"] == "dense":
            if is_mixed(prior["support"]):
                raise ValueError("prior: heads: time='axes' leaves out pairs, which heads of 'dense' do not")
        elif not SUPPORTS[kind["name"]].sees_grid:
            pattern = support_pattern(kind, num_heads=1, num_tokens=4)
            if pattern.pairs is not None and not any(pattern.offsets):
                raise ValueError(
                    f"prior: support {kind['name']!r} has no offsets, so time='axes' would leave frames apart"
                )


def resolve_predictor(predictor: ModuleSpec | None, grid: Sequence[int]) -> ResolvedModule | None:
    """The full form of a predictor; None for none."""
    if predictor is None or predictor == "none":
        return None
    return resolve_module(predictor, "predictor", PREDICTORS, grid)


def resolve_mixer(mixer: ModuleSpec | None, grid: Sequence[int]) -> Literal["softmax"] | ResolvedModule:
    """The full form of a mixer; the softmax has no settings and stays a name."""
    resolved = resolve_module("softmax" if mixer is None else mixer, "mixer", MIXERS, grid)
    return "softmax" if resolved["name"] == "softmax" else resolved


def check_together(prior: ResolvedPrior) -> None:
    """Raise if a component has no effect because of one in another slot."""
    _check_pruning(prior)
    if prior["predictor"] is not None and prior["support"]["name"] != "dense":
        raise ValueError(
            f"prior: predictor {prior['predictor']['name']!r} chooses among all keys; with it support="
            f"{prior['support']['name']!r} must be 'dense'"
        )
    if prior["predictor"] is not None and prior["support"]["mask_fill"] != "neg_inf":
        raise ValueError(
            f"prior: predictor {prior['predictor']['name']!r} leaves keys out whole; mask_fill="
            f"{prior['support']['mask_fill']!r} must be 'neg_inf'"
        )
    if prior["mixer"] == "softmax":
        return
    others = {
        "support": [prior["support"]["name"]] if prior["support"]["name"] != "dense" else [],
        "decay": [prior["decay"]["name"]] if prior["decay"] else [],
        "predictor": [prior["predictor"]["name"]] if prior["predictor"] else [],
        "extras": [extra["name"] for extra in prior["extras"] if EXTRAS[extra["name"]].place == "attention"],
    }
    for slot, names in others.items():
        if names:
            raise ValueError(
                f"prior: mixer {prior['mixer']['name']!r} has no softmax over pairs for {slot} {', '.join(names)!r}"
            )


def pruning_of(prior: ResolvedPrior) -> tuple[Mapping[str, Any], type[TokenReduction]] | None:
    """Settings and class of the token pruning or merging of a resolved prior, if it has one."""
    for extra in prior["extras"]:
        kind = EXTRAS[extra["name"]]
        if issubclass(kind, TokenReduction):
            return extra, kind
    return None


def _check_pruning(prior: ResolvedPrior) -> None:
    """Raise if token pruning or merging comes with what needs every token, or with a second one."""
    if (pruning := pruning_of(prior)) is None:
        return
    settings, kind = pruning
    name = settings["name"]
    if others := [extra["name"] for extra in prior["extras"] if extra["name"] != name]:
        raise ValueError(f"prior: {name!r} {kind.verb} tokens, which {', '.join(others)} cannot follow")
    if prior["mixer"] != "softmax":
        raise ValueError(f"prior: {name!r} {kind.verb} tokens, which mixer {prior['mixer']['name']!r} cannot follow")
    kind.check_prior(settings, prior)
    predictor = prior["predictor"]
    if predictor is not None and settings.get("fuse") and PREDICTORS[predictor["name"]].by_place:
        raise ValueError(
            f"prior: predictor {predictor['name']!r} goes by places in the grid, and the fused token of {name!r} has "
            "none; set fuse to false"
        )


def predictor_or_mixer(prior: ResolvedPrior) -> tuple[Mapping[str, Any], type[Predictor] | type[Mixer]] | None:
    """Settings and class of the mixer or the predictor of a resolved prior; None if the support decides the pairs."""
    if prior["mixer"] != "softmax":
        return prior["mixer"], MIXERS[prior["mixer"]["name"]]
    if prior["predictor"] is not None:
        return prior["predictor"], PREDICTORS[prior["predictor"]["name"]]
    return None


def common_order(prior: FullPrior) -> str:
    """The order that patches may have throughout the layers with this prior, which is moving them only once.

    It is that of the support if all heads of all layers have the same and no module of the prior needs raster order.
    Otherwise it is raster order, and attention itself moves queries, keys and values.
    """
    orders = set()
    for one in each_prior(prior):
        if not all(EXTRAS[extra["name"]].takes_layouts for extra in one["extras"]):
            return RASTER
        for kind in kinds_of(one["support"]):
            order = kind.get("order", RASTER)
            orders |= {order} if isinstance(order, str) else set(order)
    return orders.pop() if len(orders) == 1 else RASTER


def prior_name(prior: FullPrior) -> str:
    """Short name of a resolved prior: "fibottention+violin"; of those of several layers each once, "violin, dense"."""
    return ", ".join(dict.fromkeys(map(_name, each_prior(prior))))


def _name(prior: ResolvedPrior) -> str:
    time = prior.get("time", "frame")
    shows_time = time != "frame" and not any(entry.sees_time for entry in entries_of(prior["support"]))
    parts = [support_name(prior["support"])] if prior["support"]["name"] != "dense" else []
    parts += [filled["name"] for filled in (prior["decay"], prior["predictor"]) if filled]
    parts += [prior["mixer"]["name"]] if prior["mixer"] != "softmax" else []
    parts += [extra["name"] for extra in prior["extras"]]
    parts += [time] if shows_time else []
    return "+".join(parts) or "dense"


def is_prior_weight(key: str) -> bool:
    """Whether a weight of this name belongs to a prior. Foreign checkpoints do not have it, and it may start anew."""
    return not PRIOR_MODULES.isdisjoint(key.split("."))


def prior_pruning_ratio(prior: ResolvedPrior, key: LayerKey, num_prefix_tokens: int, head_dim: int) -> float:
    """Percentage of all pairs, prefix included, that are left out by the support or the predictor of a layer.

    All heads of a layer have the same pairs in every layer. Pairs of tokens that are dropped or merged are not
    included, because they differ between layers (`analysis.flops` counts them). Mixers have no pairs. For them it is
    the percentage of the multiply-adds of Q K^T and (softmax) V that they save.
    """
    if (entry := predictor_or_mixer(prior)) is not None:
        settings, kind = entry
        kept = kind.cost_in_pairs(settings, head_dim, key.num_tokens, num_prefix_tokens)
        return 100.0 * (1.0 - kept / (key.num_tokens + num_prefix_tokens) ** 2)
    return layer_pattern(prior["support"], key).pruning_ratio(num_prefix_tokens)
