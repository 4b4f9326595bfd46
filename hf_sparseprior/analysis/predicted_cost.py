"""Time and memory of a model on this machine, predicted from models of the same layers that are less deep.

Layers of one kind cost the same. So a model with two layers of each kind is timed, and for each kind one with two more;
what these add is what layers cost, and the rest is what the depth does not change (patches, classifier). They run at
the size that is asked for, by turns, some seconds in all, and the whole model is never made. Costs of single operations
would have to be known for every shape, backend and dtype, and leave out what one does to the caches of the next.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from transformers import PretrainedConfig

from hf_sparseprior.analysis.costs_measured import seconds_per_call, traced_bytes
from hf_sparseprior.base.config_keys import config_keys
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.families import family_of
from hf_sparseprior.base.resolved import PER_LAYER, ResolvedPrior, each_prior
from hf_sparseprior.priors.layer_priors import given_priors, has_layers
from hf_sparseprior.priors.prior import prior_name
from hf_sparseprior.priors.token_pruning import TokenReduction

LEAST = 2  # layers of a kind; the first one alone keeps less in memory at once than those after it
MORE = 2  # layers of a kind that are added
LEAST_SECONDS = 0.005  # of a turn, in which short calls are repeated
LEAST_ROUNDS = 3
WARM_UP = 1.0  # seconds
PASSES = ("forward", "training")


@dataclass(frozen=True)
class Cost:
    """What a call costs: median seconds with quartiles of the rounds, and the peak of what torch allocates in it.

    Inputs and weights do not count, nor does the state of an optimizer.
    """

    seconds: float
    lower: float
    upper: float
    bytes: int


@dataclass(frozen=True)
class Twin:
    """A less deep model: what of its config differs, and how many times its cost counts in that of the whole."""

    changes: Mapping[str, Any]
    share: float


def twins(config: PretrainedConfig) -> list[Twin]:
    """The models whose costs, each times its share, add up to that of the whole.

    Raises:
        ValueError: if the cost of a layer depends on its number.
    """
    for prior in each_prior(config.prior):
        for extra in prior["extras"]:
            if issubclass(module := EXTRAS[extra["name"]], TokenReduction):
                raise ValueError(
                    f"{extra['name']} {module.verb} tokens between layers, so their costs differ; it is not predicted"
                )
    if getattr(config, "compressed", None):
        raise ValueError("layers of a compressed model differ in width; its cost is not predicted")
    if (fields := _depth_fields(config)) is None:
        return [Twin({}, 1.0)]  # its layers are no few kinds, and it is measured whole
    kinds = _kinds(config)
    least = [min(LEAST, kind.depth) for kind in kinds]
    shares = [(kind.depth - one) / MORE for kind, one in zip(kinds, least, strict=True)]
    models = [Twin(_changes(config, fields, kinds, least), 1.0 - sum(shares))]
    for number, share in enumerate(shares):
        if share:
            depths = [one + MORE * (number == other) for other, one in enumerate(least)]
            models.append(Twin(_changes(config, fields, kinds, depths), share))
    return models


class _Kind(NamedTuple):
    """Layers of a stage with the same prior, and how many there are."""

    stage: int
    prior: ResolvedPrior
    depth: int


def _kinds(config: Any) -> list[_Kind]:
    """The kinds of layers of a model, each once."""
    kinds: list[_Kind] = []
    for prior, stage, number, _ in config.prior_runs:
        place = next((place for place, kind in enumerate(kinds) if kind[:2] == (number, prior)), len(kinds))
        depth = stage.num_layers + sum(kind.depth for kind in kinds[place : place + 1])
        kinds[place : place + 1] = [_Kind(number, prior, depth)]
    return kinds


def _depth_fields(config: Any) -> Callable[[Sequence[int]], dict[str, Any]] | None:
    """The fields of a config that say how many layers there are in each stage; None where that is not so simple."""
    if "depths" in config_keys(cast(Any, type(config))):  # in an iFormer three other fields say it
        return lambda depths: {"depths": list(depths)}
    if getattr(config, "num_local_layers", None) is not None:
        return lambda depths: {"num_local_layers": sum(depths[:-1]), "num_hidden_layers": sum(depths)}
    family = family_of(config)
    if family is not None and family.title in ("SparsePriorViT", "SparsePriorTimesformer"):
        return lambda depths: {"num_hidden_layers": depths[0]}
    return None


def _changes(
    config: Any, fields: Callable[[Sequence[int]], dict[str, Any]], kinds: Sequence[_Kind], depths: Sequence[int]
) -> dict[str, Any]:
    """Fields of a config that has so many layers of each kind."""
    of_stages: list[list[ResolvedPrior]] = [[] for _ in config.stages]
    for kind, depth in zip(kinds, depths, strict=True):
        of_stages[kind.stage] += [kind.prior] * depth
    changes = fields(list(map(len, of_stages)))
    if not any(map(has_layers, config.prior if isinstance(config.prior, list) else [config.prior])):
        return changes
    priors = [{PER_LAYER: priors} for priors, stage in zip(of_stages, config.stages, strict=True) if stage.takes_prior]
    return {**changes, "prior": priors[0] if len(priors) == 1 else priors}


def _in_words(twin: Twin) -> str:
    """How deep a twin is: "num_hidden_layers=6 (4 fibottention, 2 dense)"."""
    words = " ".join(f"{key}={value}" for key, value in twin.changes.items() if key != "prior") or "all"
    if "prior" not in twin.changes:
        return words
    names = [prior_name([prior]) for prior in given_priors(twin.changes["prior"])]
    return f"{words} ({', '.join(f'{count} {name}' for name, count in Counter(names).items())})"


def predicted_costs(
    config: PretrainedConfig,
    images: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    passes: Sequence[str] = PASSES,
    budget: float = 10.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Cost]:
    """Costs of a classification model of this config, for square images of its size or clips of its frames.

    Args:
        config: of a family of the package. It is not changed.
        images: how many at once.
        device, dtype: where and in what the model runs.
        passes: "forward", without gradients, and "training": forward, backward and a step of AdamW.
        budget: seconds for the rounds of each pass, which end earlier when ten are done, but not before the third.
        say: is called with what is done.

    Returns:
        {pass: cost}.

    Raises:
        ValueError: if the cost of a layer depends on its number.
    """
    models = twins(config)
    say(f"timing {len(models)} models ({', '.join(_in_words(twin) for twin in models)})")
    costs = {}
    for name in passes:
        calls, peaks = [], []
        for twin in models:
            call = call_of(config, twin, images, device, dtype, name == "training")
            call()  # makes tables and state
            peaks.append(traced_bytes(call, device)[0])
            calls.append(call)
        rounds = interleaved_rounds(calls, device, budget)
        shares = torch.tensor([twin.share for twin in models], dtype=torch.float64)
        timed = torch.tensor(rounds, dtype=torch.float64)
        # The whole has all layers of the first. Where calls are so short that noise is larger than a layer, the sum
        # could be less than that, or less than nothing.
        seconds = torch.maximum(timed @ shares, timed[:, 0])
        lower, median, upper = torch.quantile(seconds, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        # A layer that keeps nothing adds nothing; then the largest peak is that of any depth.
        memory = max(max(peaks), round(sum(twin.share * peak for twin, peak in zip(models, peaks, strict=True))))
        costs[name] = Cost(median, lower, upper, memory)
        say(f"{name}: {len(rounds)} rounds")
    return costs


def call_of(
    config: PretrainedConfig, twin: Twin, images: int, device: torch.device, dtype: torch.dtype, trains: bool
) -> Callable[[], object]:
    """A forward pass, or a step of training, of a twin of a config with random weights, as in `predicted_costs`."""
    family = family_of(config)
    assert family is not None
    outputs = ("out_features", "out_indices", "stage_names")  # of a backbone, by the number of a layer
    fields = {**{key: value for key, value in config.to_dict().items() if key not in outputs}, **twin.changes}
    torch.manual_seed(0)
    model = family.classifier(family.config_class.from_dict(fields)).to(device, dtype).train(trains)
    size = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
    frames = (config.num_frames,) if family.takes == "clips" else ()
    inputs = torch.randn(images, *frames, config.num_channels, *size, device=device, dtype=dtype)
    labels = torch.randint(config.num_labels, (images,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if trains else None

    def step() -> None:
        model(pixel_values=inputs, labels=labels).loss.backward()
        assert optimizer is not None
        optimizer.step()
        optimizer.zero_grad()

    def forward() -> object:
        with torch.no_grad():
            return model(pixel_values=inputs).logits

    return step if trains else forward


def interleaved_rounds(calls: Sequence[Callable[[], object]], device: torch.device, budget: float) -> list[list[float]]:
    """Seconds a call, for each round and call. The calls take turns.

    Args:
        budget: seconds for the rounds, which end earlier when ten are done, but not before the third.
    """
    for call in calls:
        seconds_per_call(call, 1, device)  # the first call makes tables and compiles kernels
    end = time.perf_counter() + WARM_UP  # a processor and an allocator that have just been woken are slower
    while True:
        once = [seconds_per_call(call, 1, device) for call in calls]
        if time.perf_counter() >= end:
            break
    repeats = [max(1, round(LEAST_SECONDS / max(seconds, 1e-6))) for seconds in once]
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while len(rounds) < 10:
        spent = time.perf_counter() - start
        if len(rounds) >= LEAST_ROUNDS and spent * (len(rounds) + 1) / len(rounds) > budget:
            break
        order = list(range(len(calls)))[:: 1 if len(rounds) % 2 else -1]
        timed = {number: seconds_per_call(calls[number], repeats[number], device) for number in order}
        rounds.append([timed[number] for number in range(len(calls))])
    return rounds
