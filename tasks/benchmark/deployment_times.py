"""How fast exported files are that keep the compiled kernels: `deployment` without models.

A model of a preset with a prior and random weights, one image: in eager PyTorch with its kernels, as a file of each
program, and a dense model of the same size in each program, all in turns in one process. Where no kernel is chosen for
a prior at a size, PyTorch runs dense attention with a mask, and so does the file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from hf_sparseprior.base.families import preset_family
from hf_sparseprior.cli.deployment import BACKENDS, NoOperators, differences, narrow_file, trace, write_model
from hf_sparseprior.cli.exportable import Exportable
from hf_sparseprior.cli.runtimes import FORMATS, WEIGHTS, Call
from tasks.benchmark import report
from tasks.benchmark.commands import PRESETS_TIMED
from tasks.benchmark.entry import Benchmark, Case, Row, Session, Target, WrongOutput, unique
from tasks.benchmark.model_contenders import preset_config

PYTORCH, DENSE = "PyTorch", "dense"
LIMITS = {224: 0.7, 512: 0.8, 1024: 0.9}  # of PyTorch's time with kernels, by pixels a side
FASTER = {"vit_tiny": 4.0, "vit_small": 2.5}  # than dense in its program, at 1024 pixels
ALLOWED = 1e-5  # largest of `differences` from PyTorch, of models that choose no keys


def contenders(formats: Sequence[str], weights: Sequence[str]) -> list[str]:
    """Names of all contenders: PyTorch, and of each program the file, that with other weights, and the dense file."""
    names = [PYTORCH]
    for name in formats:
        names += [name, *(f"{name} {own}" for own in weights if name in WEIGHTS[own]), f"{name} {DENSE}"]
    return names


def make(model: str, pixels: int, prior: str) -> Exportable:
    """A classifier of a preset with random weights."""
    torch.manual_seed(0)
    own = preset_family(model).classifier(preset_config(model, pixels, prior))
    return Exportable(own.eval().requires_grad_(False))


def takes_kernels(exported: Exportable) -> bool:
    """Whether kernels are chosen in PyTorch for a layer of a model at its size."""
    try:
        trace(exported, kernels=True)
    except NoOperators:
        return False
    return True


class DeploymentTimes(Benchmark):
    """The entry."""

    def variant(self, arguments: argparse.Namespace) -> Benchmark:
        """Itself, with the defaults of its options."""
        for name, (default, _) in PRESETS_TIMED.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, default)
        return self

    def check(self, arguments: argparse.Namespace) -> None:
        """Presets, sizes, priors and packages."""
        transformers_logging.disable_progress_bar()
        if arguments.limit is not None:
            raise ValueError(f"--limit {arguments.limit} is for saved models with --images")
        report.check_positive(rounds=arguments.rounds)
        for name in arguments.formats:
            FORMATS[name].check_packages()
        for model in arguments.presets:
            for pixels in arguments.sizes:
                for prior in arguments.priors:
                    preset_config(model, pixels, prior)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Sizes, presets and priors, the small ones first; contenders of one prior take turns."""
        names = contenders(arguments.formats, arguments.weights)
        for pixels in sorted(set(arguments.sizes)):
            for model in unique(arguments.presets):
                for prior in unique(arguments.priors):
                    size = {"model": model, "pixels": pixels, "prior": prior}
                    yield [{**size, "contender": name} for name in names]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """Files are written, compared with the model, and timed."""
        case, arguments = cases[0], session.arguments
        exported = make(case["model"], case["pixels"], case["prior"])
        pixels = exported.images(1)
        calls: dict[str, Callable[[], Any]] = {PYTORCH: lambda: exported(pixels)}
        about: dict[str, Case] = {PYTORCH: {}}
        failed: dict[str, str] = {}
        has_kernels = takes_kernels(exported)
        with torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
            for name in arguments.formats:
                self._write(exported, name, Path(scratch), session, has_kernels, (calls, about, failed))
                dense = f"{name} {DENSE}"
                calls[dense] = partial(self._dense(case, name, session), pixels)
            set_ups = {name: (lambda call=call: call) for name, call in calls.items()}
            order = [{**case, "contender": name} for name in (*failed, *calls)]
            found = session.in_turns(order, set_ups, failed)
        return [{**own, **about.get(own["contender"], {})} for own in found]

    def _write(
        self, exported: Exportable, name: str, scratch: Path, session: Session, has_kernels: bool, into: tuple
    ) -> None:
        """The files of a program, with calls of them, what was seen and what failed."""
        calls, about, failed = into
        folder, pixels = scratch / name, exported.images(1)
        folder.mkdir()
        try:
            traced, call = write_model(exported, FORMATS[name], folder, kernels=has_kernels)
        except ValueError as error:
            failed[name] = str(error)
            return
        off = float(differences(exported, call, (1,)).max())
        if off > ALLOWED and not exported.chooses:
            raise WrongOutput(
                f"{exported.title} as {FORMATS[name].title} is off by {off:.1e}, allowed are {ALLOWED:.0e}"
            )
        calls[name], about[name] = (
            partial(call, pixels),
            {"attention": ", ".join(sorted(traced.attention)), "difference": off},
        )
        for own in session.arguments.weights:
            if name not in WEIGHTS[own]:
                continue
            narrow = scratch / f"{name} {own}"
            narrow.mkdir()
            call, off = narrow_file(exported, FORMATS[name], own, folder, narrow, BACKENDS[0], has_kernels)
            calls[f"{name} {own}"], about[f"{name} {own}"] = partial(call, pixels), {"difference": off}

    def _dense(self, case: Case, name: str, session: Session) -> Call:
        """The file of a dense model, kept from one prior to the next."""
        key = (case["model"], case["pixels"], name)
        if key not in session.forecasts:
            for other in [other for other in session.forecasts if other[:2] != key[:2]]:
                del session.forecasts[other]  # which may have gigabytes
            folder = Path(session.until_the_end.enter_context(tempfile.TemporaryDirectory()))
            dense = make(case["model"], case["pixels"], DENSE)
            session.forecasts[key] = write_model(dense, FORMATS[name], folder)[1]
        return session.forecasts[key]

    def goes_with_size(self, key: str) -> bool:
        """No key does."""
        return False

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """What was measured."""
        return "One image. Times are medians over rounds; ratios are medians of the ratios of rounds."

    def targets(self, settings: Mapping[str, Any]) -> Iterable[Target]:
        """The project's: against PyTorch with kernels, and against dense attention in the same program."""
        for pixels, limit in LIMITS.items():
            for name in FORMATS:
                most = 1.05 if name == "torch" else limit
                yield Target({"pixels": pixels, "contender": name}, PYTORCH, most)
        for prior in ("fibottention", "fibottention+violin"):
            for name in FORMATS:
                yield Target({"pixels": 512, "prior": prior, "contender": name}, f"{name} {DENSE}", 1.0, faster=True)
                for model, times in FASTER.items():
                    where = {"model": model, "pixels": 1024, "prior": prior, "contender": name}
                    yield Target(where, f"{name} {DENSE}", times, faster=True)


def of(key: str) -> Callable[[Row], str]:
    """A cell of what a record says besides."""

    def cell(row: Row) -> str:
        value = row["records"][0].get(key, "")
        return f"{value:.1e}" if isinstance(value, float) else str(value)

    return cell


def times(base: Callable[[str], str]) -> Callable[[Row], str]:
    """A cell of the ratio to the contender that follows from a contender's name."""
    return lambda row: report.ratio_text(row["times"].get(base(row["contender"])))


BENCHMARK = DeploymentTimes(
    name="deployment",
    keys=("model", "pixels", "prior", "contender"),
    machine=("threads", "keep_memory"),
    bases=(PYTORCH, *(f"{name} {DENSE}" for name in FORMATS)),
    size="pixels",
    only_these_columns=True,
    columns={
        "ms (quartiles)": lambda row: report.milliseconds(row["seconds"]),
        "times PyTorch": times(lambda name: PYTORCH),
        "times dense there": times(lambda name: f"{name.partition(' ')[0]} {DENSE}"),
        "attention": of("attention"),
        "off by": of("difference"),
    },
)
