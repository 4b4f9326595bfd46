"""Priors that differ between the layers of a model: {"layers": [one, for, each]} or {"layers": {"0-3": ..., "4": ...}}.

Layers are numbered from 0, over all attention layers that take a prior. In a list of priors, one for each stage, an
entry may be such priors too, and then has the numbers within its stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.numbered import counted, in_words, keyed, numbered
from hf_sparseprior.base.resolved import PER_LAYER, FullPrior, ResolvedLayers, ResolvedModule, ResolvedPrior
from hf_sparseprior.priors.prior import PriorSpec, Stage, predictor_or_mixer, resolve_prior

StagePrior = ResolvedPrior | ResolvedLayers


class PriorRun(NamedTuple):
    """Consecutive layers of a stage that have the same prior.

    stage: theirs, with their number of layers. stage_number: of the stage in the model, and first: of the first of
    these layers, both from 0.
    """

    prior: ResolvedPrior
    stage: Stage
    stage_number: int
    first: int


def has_layers(prior: Any) -> bool:
    """Whether a prior, in any form, differs between layers.

    Raises:
        ValueError: for further keys.
    """
    if not isinstance(prior, Mapping) or PER_LAYER not in prior:
        return False
    if others := [str(key) for key in prior if key != PER_LAYER]:
        raise ValueError(f"prior: {', '.join(others)} next to 'layers' must be in each of the priors of 'layers'")
    return True


def layer_specs(prior: Any, num_layers: int) -> list[Any]:
    """What is given as the prior of each layer, not yet checked: of one for all, or of {"layers": ...}.

    Raises:
        ValueError: for numbers that are not those of the layers.
    """
    if not has_layers(prior):
        return [prior] * num_layers
    return [spec for numbers, spec in numbered(prior[PER_LAYER], num_layers, f"prior: {PER_LAYER}") for _ in numbers]


def given_priors(prior: Any) -> list[Any]:
    """Every prior in one that is given for a model, as it is given: of stages, of layers, or itself."""
    if isinstance(prior, Sequence) and not isinstance(prior, str):
        return [one for part in prior for one in given_priors(part)]
    if not has_layers(prior):
        return [prior]
    layers = prior[PER_LAYER]
    if isinstance(layers, Mapping):
        return list(layers.values())
    return list(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else []


def changed_given(prior: Any, change: Callable[[Any], Any]) -> Any:
    """A prior that is given, in which each of `given_priors` is what `change` makes of it."""
    if isinstance(prior, Sequence) and not isinstance(prior, str):
        return [changed_given(part, change) for part in prior]
    if not has_layers(prior):
        return change(prior)
    layers = prior[PER_LAYER]
    if isinstance(layers, Mapping):
        return {PER_LAYER: {key: change(one) for key, one in layers.items()}}
    return {PER_LAYER: list(map(change, given_priors(prior)))}


def resolve_stages(prior: PriorSpec | Sequence[Any] | None, stages: Sequence[Stage]) -> list[StagePrior]:
    """The full form of a prior for each stage of a model.

    Args:
        prior: one for all stages, a list with one for each, or {"layers": ...}, whose numbers go through all stages.
        stages: heads, grid and layers of each.

    Raises:
        ValueError: as `resolve_prior`, with the stage or the layers if there are several; for a list of another length
            or numbers that are not those of the layers; and for layers with another token pruning than others.
    """
    if isinstance(prior, Sequence) and not isinstance(prior, str):
        if len(prior) != len(stages):
            raise ValueError(f"prior: a list of {len(prior)} must have one for each of {len(stages)} stages")
        specs = []
        for number, (entry, stage) in enumerate(zip(prior, stages, strict=True), start=1):
            try:
                specs.append(layer_specs(entry, stage.num_layers))
            except ValueError as error:
                raise _in_stage(error, number, stages) from None
    else:
        rest = iter(layer_specs(prior, sum(stage.num_layers for stage in stages)))
        specs = [list(itertools.islice(rest, stage.num_layers)) for stage in stages]
    resolved = []
    for number, (of_stage, stage) in enumerate(zip(specs, stages, strict=True), start=1):
        try:
            resolved.append(_resolve_layers(of_stage, stage))
        except ValueError as error:
            raise _in_stage(error, number, stages) from None
    _check_whole([prior for of_stage in resolved for prior in of_stage])
    return [full_form(of_stage) for of_stage in resolved]


def _in_stage(error: ValueError, number: int, stages: Sequence[Stage]) -> ValueError:
    return error if len(stages) == 1 else ValueError(f"{error} (stage {number} of {len(stages)})")


def _resolve_layers(specs: Sequence[Any], stage: Stage) -> list[ResolvedPrior]:
    """The full form of the prior of each layer of a stage."""
    resolved: list[ResolvedPrior] = []
    runs = numbered(specs, stage.num_layers, PER_LAYER)
    for numbers, spec in runs:
        try:
            resolved += [resolve_prior(spec, stage.num_heads, stage.grid)] * len(numbers)
        except ValueError as error:
            if len(runs) == 1:
                raise
            raise ValueError(f"{error} ({counted('layer', numbers)} of {stage.num_layers})") from None
    return resolved


def _check_whole(priors: Sequence[ResolvedPrior]) -> None:
    """Raise unless all layers have the same extras of the whole model, which are token pruning."""

    def of_model(prior: ResolvedPrior) -> list[ResolvedModule]:
        return [extra for extra in prior["extras"] if EXTRAS[extra["name"]].place == "model"]

    for extra in (extra for prior in priors for extra in of_model(prior)):
        if others := [number for number, prior in enumerate(priors) if extra not in of_model(prior)]:
            raise ValueError(
                f"prior: {extra['name']!r} is of the whole model and must be in the prior of every layer, with the "
                f"same settings; among {len(priors)} layers it is not in {in_words(others)}"
            )


def full_form(priors: Sequence[ResolvedPrior]) -> StagePrior:
    """What config.json holds of the priors of consecutive layers: the one that all have, or {"layers": ...}."""
    layers = keyed(priors)
    return next(iter(layers.values())) if len(layers) == 1 else {"layers": layers}


def prior_runs(prior: FullPrior, stages: Sequence[Stage]) -> list[PriorRun]:
    """The runs of layers with one prior, of a full form for the stages that take one; the others are dense."""
    given = iter(prior if isinstance(prior, Sequence) else [prior])
    runs: list[PriorRun] = []
    first = 0
    for number, stage in enumerate(stages):
        of_stage = next(given) if stage.takes_prior else resolve_prior(None, stage.num_heads, stage.grid)
        for numbers, one in _parts(of_stage, stage.num_layers):
            run = stage._replace(num_layers=len(numbers))
            runs.append(PriorRun(cast("ResolvedPrior", one), run, number, first + numbers.start))
        first += stage.num_layers
    return runs


def changed_layers(
    prior: FullPrior, stages: Sequence[Stage], change: Callable[[int, ResolvedPrior], ResolvedPrior]
) -> FullPrior:
    """A full form in which the prior of each layer is what `change` makes of the layer's number and its prior.

    `stages`: those that take a prior.
    """
    parts = list(prior) if isinstance(prior, Sequence) else [prior]
    forms, numbers = [], itertools.count()
    for part, stage in zip(parts, stages, strict=True):
        layers = [one for run, one in _parts(part, stage.num_layers) for _ in run]
        forms.append(full_form([change(next(numbers), one) for one in layers]))
    return forms if isinstance(prior, Sequence) else forms[0]


def _parts(prior: StagePrior, num_layers: int) -> list[tuple[range, Any]]:
    if PER_LAYER in prior:
        return numbered(cast("ResolvedLayers", prior)[PER_LAYER], num_layers, PER_LAYER)
    return [(range(num_layers), prior)]


def prior_weights(runs: Sequence[PriorRun], widths: Sequence[int], hidden: Sequence[int]) -> int:
    """Weights of the modules of priors in a model, as `PriorModule.num_weights` counts them.

    Args:
        runs: all of the model.
        widths, hidden: of the tokens, and between the MLP's layers, in each stage.
    """
    weights, of_model = 0, set()
    for prior, stage, number, _ in runs:
        sizes = stage.num_heads, widths[number], hidden[number]
        if (entry := predictor_or_mixer(prior)) is not None:
            weights += stage.num_layers * entry[1].num_weights(entry[0], *sizes)
        for extra in prior["extras"]:
            kind = EXTRAS[extra["name"]]
            if kind.place == "model" and extra["name"] in of_model:
                continue
            if kind.place == "model":
                of_model.add(extra["name"])
            weights += (1 if kind.place == "model" else stage.num_layers) * kind.num_weights(extra, *sizes)
    return weights
