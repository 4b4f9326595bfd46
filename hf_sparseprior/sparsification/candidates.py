"""What a layer may have in place of dense attention: supports, and keys that are chosen without being learned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_sparseprior.base.checks import split_spec
from hf_sparseprior.patterns.supports import SUPPORTS
from hf_sparseprior.priors.predictor import PREDICTORS
from hf_sparseprior.priors.prior import parse_prior

CURVE = "hilbert"  # the order of patches along which windows are about square
# Settings of each support that are tried, shares of the pairs left out in percent; of others their defaults.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "window": [{"pruning_ratio": ratio, **order} for ratio in (75, 90, 97) for order in ({}, {"order": CURVE})],
    "longformer": [{"pruning_ratio": 90}],
    "strided": [{"pruning_ratio": 90}],
    "random": [{"pruning_ratio": 90}],
    "bigbird": [{"pruning_ratio": 90}],
    "neighborhood": [{"window": side} for side in (5, 7, 13)],
}
W_MAX = (3, 6, 12)  # of Fibottention: the number of patches over these
TOP_K = {"pruning_ratio": 90}
MOST_OF_TOP_K = 4096  # patches; it computes the logits of all pairs, which would take gigabytes


@dataclass(frozen=True)
class Candidate:
    """support, predictor: the slots of a prior that it fills; the others stay the layer's. name: for reports."""

    name: str
    support: Any = None
    predictor: Any = None


def default_candidates(num_tokens: int) -> list[Candidate]:
    """Every registered support but the dense one in some settings, and `topk` where its logits fit the memory.

    Args:
        num_tokens: patches that a layer sees together, after which windows are chosen.
    """
    candidates = []
    for name, known in SUPPORTS.items():
        if name == "dense" or known.sees_time:  # which keeps every pair of an image
            continue
        settings = SETTINGS.get(name, [{}])
        if name == "fibottention":
            widths = sorted({max(1, num_tokens // part) for part in W_MAX}, reverse=True)
            settings = [
                {"w_min": min(5, width), "w_max": width, **order}
                for width in widths
                for order in ({}, {"order": CURVE})
            ]
        candidates += [Candidate(_name(name, one), {"name": name, **one}) for one in settings]
    if num_tokens <= MOST_OF_TOP_K:
        candidates.append(Candidate(_name("topk", TOP_K), None, {"name": "topk", **TOP_K}))
    return candidates


def parse_candidates(given: Sequence[Any]) -> list[Candidate]:
    """Candidates that a user lists: names, JSON objects, or mappings, of a support or a predictor with its settings, or
    of slots.

    Raises:
        ValueError: for what fills another slot than these two, or is learned; the message names it.
    """
    if isinstance(given, (str, Mapping)) or not given:
        raise ValueError(f"candidates={given!r} must be a list of supports, each a name or a dict with its settings")
    candidates = [_parsed(spec) for spec in given]
    names = [candidate.name for candidate in candidates]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"candidates: {twice!r} is listed twice")
    return candidates


def _parsed(spec: Any) -> Candidate:
    if isinstance(spec, str) and spec.lstrip().startswith("{"):
        try:
            spec = json.loads(spec)
        except ValueError as error:
            raise ValueError(f"candidates: {spec} is no JSON object ({error})") from None
    if isinstance(spec, Mapping) and "name" in spec:
        slot = "predictor" if spec["name"] in PREDICTORS else "support"
        spec = {slot: dict(spec)}
    slots, parts = parse_prior(spec), {}
    for slot, value in slots.items():
        if slot not in ("support", "predictor") and value not in (None, "none", "softmax", []):
            raise ValueError(
                f"candidates: {spec!r} fills the slot {slot!r}; a candidate is a support or a predictor, all else "
                "stays as it is in the model"
            )
    for slot, registry in (("support", SUPPORTS), ("predictor", PREDICTORS)):
        if slots[slot] not in (None, "none"):
            parts[slot] = split_spec(slots[slot], slot, registry)
    if not parts or (set(parts) == {"support"} and parts["support"][0] == "dense"):
        raise ValueError(f"candidates: {spec!r} is dense, which each layer may be anyway")
    if "predictor" in parts and parts["predictor"][0] != "topk":
        raise ValueError(f"candidates: predictor {parts['predictor'][0]!r} is learned and has not been trained here")
    name = " + ".join(_name(*part) for part in parts.values())
    return Candidate(name, **{slot: {"name": kind, **settings} for slot, (kind, settings) in parts.items()})


def _name(name: str, settings: Mapping[str, Any]) -> str:
    """ "window pruning_ratio=90"."""
    return " ".join([name, *(f"{key}={value}" for key, value in settings.items())])
