"""`python -m hf_sparseprior list`: what has a name, with the first line of its documentation."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.base.checks import did_you_mean
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.cli.arguments import KINDS
from hf_sparseprior.patterns.curves import CLIP_CURVES, CURVES
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.pattern import SUPPORTS, support_settings
from hf_sparseprior.patterns.sequences import SEQUENCES
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.predictor import PREDICTORS

# How a name of each kind is used.
HEADINGS = {
    "families": "families: their presets, for `from_preset` of their configs",
    "supports": "supports: prior, or prior.support",
    "sequences": "sequences: prior.support.sequence of fibottention",
    "decays": "decays: prior, or prior.decay",
    "curves": "curves: prior.decay.curves, prior.support.order; NAME_t is the curve over the transposed grid",
    "predictors": "predictors: prior, or prior.predictor",
    "mixers": "mixers: prior, or prior.mixer",
    "extras": "extras: prior, or prior.extras",
    "backends": "backends: SPARSEPRIOR_BACKEND; by default the fastest that can run",
}
REGISTRIES: dict[str, Mapping[str, Any]] = {
    "sequences": SEQUENCES,
    "decays": DECAYS,
    "curves": CURVES,
    "predictors": PREDICTORS,
    "mixers": MIXERS,
    "extras": EXTRAS,
}


def listed(kinds: Sequence[str] = ()) -> Iterator[str]:
    """Lines of text: for each kind a heading and its names; of kinds that are asked for also their settings.

    Raises:
        ValueError: for a kind that does not exist.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} must be one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    for kind in kinds or KINDS:
        yield HEADINGS[kind]
        if kind == "families":
            yield from _families()
            continue
        rows = _rows(kind)
        width = max(map(len, rows))
        for name, (about, settings) in rows.items():
            yield f"  {name:<{width}}  {about}"
            if kinds and settings:
                yield " " * (width + 4) + ", ".join(f"{key}={_shown(value)}" for key, value in settings.items())


def _families() -> Iterator[str]:
    for family in FAMILIES.values():
        yield f"  {family.name} ({family.takes}), {family.config_class.__name__}"
        yield f"    {', '.join(family.presets) or 'no presets'}"


def _rows(kind: str) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """First line of the documentation and settings with their defaults, by name."""
    if kind == "supports":
        return {name: (_first_line(support.function), support_settings(name)) for name, support in SUPPORTS.items()}
    if kind == "backends":
        return {name: (_first_line(backend.run), {}) for name, backend in BACKENDS.items()}
    rows = {name: (_first_line(entry), getattr(entry, "SETTINGS", {})) for name, entry in REGISTRIES[kind].items()}
    if kind == "curves":
        clips = dict.fromkeys(CLIP_CURVES, " Also over clips.")
        return {name: (about + clips.get(name, ""), {}) for name, (about, _) in rows.items()}
    return rows


def _first_line(documented: Callable) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)
