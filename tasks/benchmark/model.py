"""Time and memory of whole vision transformers.

Models of the same size with different priors take turns in one process, over image resolutions: a forward pass without
gradients, and a training step (forward, backward, AdamW). `copy_attention` is the upper limit of speed: the dense model
with attention replaced by a copy, which takes what its linear layers alone take. `transformers` is the dense model as
transformers' own class, with the same weights. `fibottention@diagonal` forces a backend; without @ the library chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from hf_sparseprior.base.families import preset_family
from tasks.benchmark import report
from tasks.benchmark.commands import DENSE, STOCK
from tasks.benchmark.entry import Benchmark, Case, Session, Target
from tasks.benchmark.model_contenders import COPY, ModelRun, parse_contenders, preset_config, stock_format
from tasks.benchmark.timing import Forecast, free_memory

FORWARD, TRAINING = PASSES = ("forward", "training")
# Resolutions of one small image from which time and memory of a large one are predicted.
PROBES = (224, 320, 448)
PRESETS = ("vit_tiny", "vit_small", "vit_base")
TARGETS = (
    Target({"model": "vit_small", "pixels": 1024, "pass": FORWARD}, COPY, 1 / 0.9, among=("fibottention",)),
    *(
        Target({"model": model, "pixels": 224, "pass": key}, DENSE, 1.02, among=("fibottention",))
        for model in PRESETS
        for key in PASSES
    ),
    *(
        Target({"model": "vit_base", "pixels": pixels, "pass": key}, DENSE, limit, among=("violin",))
        for pixels, key, limit in ((224, FORWARD, 1.02), (512, FORWARD, 1.04), (224, TRAINING, 1.06))
    ),
    *(
        Target({"model": "vit_base", "pixels": pixels, "pass": key}, DENSE, 1.02, "memory_times", among=("violin",))
        for pixels in (224, 512)
        for key in PASSES
    ),
)


def patch_tokens(model: str, pixels: int) -> int:
    """Patch tokens of an image."""
    height, width = preset_config(model, pixels).grid
    return height * width


class Model(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """A bad name or resolution ends the command before the first measurement."""
        known = parse_contenders(arguments.priors)
        for model in arguments.models.split(","):
            if STOCK in known and stock_format(preset_family(model).name) is None:
                raise ValueError(f"--priors {STOCK}: transformers has no model like {model}")
            for pixels, _ in report.parse_sizes("--sizes", arguments.sizes):
                for contender in known.values():
                    preset_config(model, pixels, contender.prior)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Both passes of each model and size, all contenders together."""
        for model in arguments.models.split(","):
            for pixels, images in report.parse_sizes("--sizes", arguments.sizes):
                for key in PASSES:
                    size = {"model": model, "pixels": pixels, "images": images, "pass": key}
                    yield [{**size, "contender": name} for name in parse_contenders(arguments.priors)]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """All contenders in turns."""
        model, pixels, images, key = (cases[0][name] for name in self.keys[:-1])
        dtype, known = session.dtype, parse_contenders(session.arguments.priors)

        def make(name: str, side: int, batch: int) -> ModelRun:
            return ModelRun(model, known[name], side, batch, dtype, session.device)

        def too_much(name: str) -> str | None:
            if (model, name, key) not in session.forecasts:
                at = {patch_tokens(model, side): side for side in PROBES}
                session.forecasts[model, name, key] = Forecast.of(
                    lambda count: make(name, at[count], 1).set_up(key), tuple(at), session.device
                )
            size = (patch_tokens(model, pixels), images, session.arguments.seconds, free_memory(session.device))
            return session.forecasts[model, name, key].too_much(*size)

        runs = {case["contender"]: make(case["contender"], pixels, images) for case in cases}
        large = images * patch_tokens(model, pixels) > patch_tokens(model, PROBES[-1])
        forecasts = {name: partial(too_much, name) for name in runs if large}
        found = session.in_turns(cases, {name: run.set_up(key) for name, run in runs.items()}, {}, forecasts)
        return [{**own, **({} if "failed" in own else {"ran": runs[own["contender"]].ran})} for own in found]

    def targets(self, settings: Mapping[str, Any]) -> Iterable[Target]:
        """The project's, on every machine."""
        return TARGETS


BENCHMARK = Model(
    name="model", keys=("model", "pixels", "images", "pass", "contender"), bases=(DENSE, COPY), size="pixels"
)
