"""Time and memory of whole vision transformers: python -m tasks.benchmark.model

Models of the same size with different priors take turns in one process, over image resolutions: a forward pass and a
training step (forward, backward, AdamW). `copy_attention` is the upper limit of speed: the dense model with attention
replaced by a copy, which takes what its linear layers alone take. `transformers` is the dense model as transformers'
own class, with the same weights.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from hf_sparseprior.attention.choice import BACKENDS, register_backend, unregister_backend
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.families import preset_family
from hf_sparseprior.convert.checkpoint import convert_checkpoint, target_formats
from tasks.benchmark import commands, report
from tasks.benchmark.commands import DENSE, STOCK
from tasks.benchmark.timing import Call, Forecast, SetUp, free_memory, measure
from tasks.common.command import run_command
from tasks.common.results import write_results

PASSES = {"forward": "forward", "training": "training step"}
COPY = "copy_attention"
# Resolutions of one small image from which time and memory of a large one are predicted.
PROBES = (224, 320, 448)


@dataclass(frozen=True)
class Target:
    """A limit for one model: `value` of a contender over that of `base`, "seconds" or "memory"."""

    model: str
    prior: str
    resolution: int
    key: str
    base: str
    value: str
    limit: float
    text: str


TARGETS = (
    Target(
        "vit_small", "fibottention", 1024, "forward", COPY, "seconds", 1 / 0.9, "at least 90 % of the ceiling's speed"
    ),
    *(
        Target(model, "fibottention", 224, key, DENSE, "seconds", 1.02, "at most 2 % over dense")
        for model in ("vit_tiny", "vit_small", "vit_base")
        for key in PASSES
    ),
    Target("vit_base", "violin", 224, "forward", DENSE, "seconds", 1.02, "at most 2 % over dense"),
    Target("vit_base", "violin", 512, "forward", DENSE, "seconds", 1.04, "at most 4 % over dense"),
    Target("vit_base", "violin", 224, "training", DENSE, "seconds", 1.06, "at most 6 % over dense"),
    *(
        Target("vit_base", "violin", resolution, key, DENSE, "memory", 1.02, "memory at most 2 % over dense")
        for resolution in (224, 512)
        for key in PASSES
    ),
)


# ---- contenders -----------------------------------------------------------------------------------------------------


class CopyAttention(torch.autograd.Function):
    """Attention's unavoidable traffic and nothing else: q, k, v are read and out is written, so are three gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, T, D), in the layout of q."""
        return torch.addcmul(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of as many bytes as those of attention."""
        return grad.clone(), grad.clone(), grad.clone()


def _run_copy(request: AttentionRequest) -> tuple[Tensor, None]:
    return CopyAttention.apply(request.q, request.k, request.v), None


@contextmanager
def forced_backend(name: str | None) -> Iterator[None]:
    """Inside, every attention runs on this backend. None leaves the choice. `COPY` is a backend only inside."""
    if name is None:
        yield
        return
    before = os.environ.get("SPARSEPRIOR_BACKEND")
    if name == COPY:
        register_backend(COPY, can_run=lambda request: None, run=_run_copy, priority=-1)
    os.environ["SPARSEPRIOR_BACKEND"] = name
    try:
        yield
    finally:
        if name == COPY:
            unregister_backend(COPY)
        os.environ.pop("SPARSEPRIOR_BACKEND")
        if before is not None:
            os.environ["SPARSEPRIOR_BACKEND"] = before


@dataclass(frozen=True)
class Contender:
    """A prior, and the backend that it is forced to, if any. `STOCK` is no backend but the class of transformers."""

    prior: str | dict[str, Any]
    backend: str | None = None


def parse_contenders(texts: Sequence[str]) -> dict[str, Contender]:
    """Contenders by name, from PRIOR or PRIOR@BACKEND; the ceiling comes last.

    Raises:
        ValueError: for an unknown backend or a prior that is no YAML.
    """
    found = {}
    for text in texts:
        if text == STOCK:
            found[text] = Contender(DENSE, STOCK)
            continue
        prior, at, backend = text.rpartition("@") if "@" in text else (text, "", "")
        if at and backend not in BACKENDS:
            raise ValueError(f"--priors {text!r}: backend {backend!r} must be one of {', '.join(BACKENDS)}")
        found[text] = Contender(report.from_yaml("--priors", prior), backend or None)
    return {**found, COPY: Contender("dense", COPY)}


def preset_config(preset: str, resolution: int, prior: Any = "dense") -> Any:
    """The config of a preset of any family, for square images of so many pixels.

    Raises:
        ValueError: for an unknown preset, a bad resolution or prior.
    """
    return preset_family(preset).make_config(preset, image_size=resolution, prior=prior)


class ModelRun:
    """A model at one resolution, its images and its optimizer."""

    def __init__(
        self, preset: str, contender: Contender, resolution: int, batch: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        config = preset_config(preset, resolution, contender.prior)
        torch.manual_seed(0)
        model = preset_family(preset).classifier(config)
        stock = contender.backend == STOCK
        self.model = (as_stock(model) if stock else model).to(device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.images = torch.randn(batch, config.num_channels, resolution, resolution, device=device, dtype=dtype)
        self.labels = torch.randint(config.num_labels, (batch,), device=device)
        self.backend = None if stock else contender.backend
        self.choices: list[str] = []

    def set_up(self, key: str) -> SetUp:
        """What `timing.measure` takes for one pass. The first call notes which backend ran, in `choices`."""

        def ready() -> Call:
            self.model.train(key == "training")
            call = self.training_step if key == "training" else self.forward
            with noted_choices(self.choices):
                call()
            return call

        return ready

    def forward(self) -> Tensor:
        """Logits, no gradients."""
        with torch.no_grad(), forced_backend(self.backend):
            return self.model(pixel_values=self.images).logits

    def training_step(self) -> None:
        """Forward, backward, AdamW."""
        with forced_backend(self.backend):
            self.model(pixel_values=self.images, labels=self.labels).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def stock_format(family: str) -> str | None:
    """The model type of transformers that a family is written as; None: there is none."""
    formats = target_formats()
    return next((name for name in formats if family in formats[name] and name in CONFIG_MAPPING_NAMES), None)


def as_stock(model: Any) -> Any:
    """A dense model as transformers' own class, which runs PyTorch's fused attention."""
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs = Path(scratch, "ours"), Path(scratch, "theirs")
        model.save_pretrained(ours)
        convert_checkpoint(ours, theirs, to=stock_format(model.config.model_type))
        return AutoModelForImageClassification.from_pretrained(theirs, attn_implementation="sdpa")


@contextmanager
def noted_choices(messages: list[str]) -> Iterator[None]:
    """Collect what the chooser of backends logs: one message a layer."""
    logger = logging.getLogger("hf_sparseprior.ops")
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    messages.clear()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


# ---- measuring ------------------------------------------------------------------------------------------------------


class Benchmark:
    """Measures contenders of one model size.

    Args:
        preset: name of the config's preset.
        contenders: contenders by name.
        dtype, device: dtype and device of the models.
        budget: seconds for the rounds of one resolution and pass.
        rounds: rounds at most.
    """

    def __init__(
        self,
        preset: str,
        contenders: dict[str, Contender],
        dtype: torch.dtype,
        device: torch.device,
        budget: float,
        rounds: int,
    ) -> None:
        self.preset, self.contenders, self.dtype, self.device = preset, contenders, dtype, device
        self.budget, self.rounds = budget, rounds
        self.forecasts: dict[tuple[str, str], Forecast] = {}

    def at(self, resolution: int, batch: int) -> dict[str, Any]:
        """Both passes at one resolution."""
        runs = {name: self.make_run(name, resolution, batch) for name in self.contenders}
        tokens = self.tokens(resolution)
        passes = {key: self.measure_pass(key, runs, tokens, batch) for key in PASSES}
        return {
            "model": self.preset,
            "resolution": resolution,
            "batch": batch,
            "patch_tokens": tokens,
            "passes": passes,
        }

    def measure_pass(self, key: str, runs: Mapping[str, ModelRun], tokens: int, batch: int) -> dict[str, Any]:
        """`timing.measure` of one pass, with what the chooser of backends said about the first layer."""
        free = free_memory(self.device)
        forecasts = {}
        if batch * tokens > self.tokens(PROBES[-1]):
            forecasts = {name: lambda name=name: self.too_much(name, key, tokens, batch, free) for name in runs}
        set_ups = {name: run.set_up(key) for name, run in runs.items()}
        measured = measure(set_ups, self.device, self.budget, self.rounds, (DENSE, COPY), forecasts)
        for name, entry in measured["contenders"].items():
            entry["ran"] = runs[name].choices[0].partition(": ")[2] if runs[name].choices else STOCK
        return measured

    def make_run(self, name: str, resolution: int, batch: int) -> ModelRun:
        """A fresh model of a contender."""
        return ModelRun(self.preset, self.contenders[name], resolution, batch, self.dtype, self.device)

    def tokens(self, resolution: int) -> int:
        """Patch tokens of an image."""
        height, width = preset_config(self.preset, resolution).grid
        return height * width

    def too_much(self, name: str, key: str, tokens: int, batch: int, free: float) -> str | None:
        """Why a contender is left out at a size, or None."""
        if (name, key) not in self.forecasts:
            at = {self.tokens(resolution): resolution for resolution in PROBES}
            self.forecasts[name, key] = Forecast.of(
                lambda count: self.make_run(name, at[count], 1).set_up(key), tuple(at), self.device
            )
        return self.forecasts[name, key].too_much(tokens, batch, self.budget, free)


# ---- results --------------------------------------------------------------------------------------------------------


def size_table(measured: Mapping[str, Any]) -> str:
    """One row for each contender, then those left out."""
    rows = []
    base = measured["contenders"].get(DENSE)
    for name, entry in measured["contenders"].items():
        over = "" if base is None else percent_over(entry[f"times_{DENSE}"])
        more = "" if base is None else f"{100 * (memory_of(entry) / memory_of(base) - 1):+.1f}"
        speed = f"{100 / entry[f'times_{COPY}']['median']:.1f}" if COPY in measured["contenders"] else ""
        backend = "" if name == COPY else entry["ran"].split(" (")[0]
        timed = [report.milliseconds(entry["seconds"]), str(entry["seconds"]["rounds"])]
        rows.append([name, *timed, over, speed, report.megabytes(memory_of(entry)), more, backend])
    header = ["", "ms (quartiles)", "rounds", "% over dense", "% of ceiling", "MB", "% over dense", "backend"]
    lines = [report.text_table(header, rows)]
    return "\n".join(lines + [f"left out: {name}, {reason}" for name, reason in measured["left_out"].items()])


def percent_over(ratio: Mapping[str, float]) -> str:
    """A spread of ratios to the base: "+1.2 (+0.8 to +1.5)"."""
    median, lower, upper = (f"{100 * (ratio[part] - 1):+.1f}" for part in ("median", "lower", "upper"))
    return f"{median} ({lower} to {upper})"


def memory_of(entry: Mapping[str, Any]) -> int:
    """Bytes beyond weights and images: peak of a call and what stays."""
    return entry["memory"]["call"] + entry["memory"]["kept"]


def compare_with_targets(sizes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every target, for every contender with its prior. "value" is None where it was not measured."""
    rows = []
    for target in TARGETS:
        entries = [own for own in sizes if (own["model"], own["resolution"]) == (target.model, target.resolution)]
        measured = entries[0]["passes"][target.key]["contenders"] if entries else {}
        names = [name for name in measured if name.split("@")[0] == target.prior] or [target.prior]
        for name in names:
            value = _ratio(measured, name, target)
            met = None if value is None else value <= target.limit
            rows.append({**vars(target), "contender": name, "measured": value, "met": met})
    return rows


def _ratio(measured: Mapping[str, Any], name: str, target: Target) -> float | None:
    if name not in measured or target.base not in measured:
        return None
    if target.value == "memory":
        return memory_of(measured[name]) / memory_of(measured[target.base])
    return measured[name][f"times_{target.base}"]["median"]


def targets_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The targets as text."""
    verdict = {None: "", True: "met", False: "MISSED"}
    cells = []
    for row in rows:
        value = "not measured"
        if row["measured"] is not None:
            value = f"{100 / row['measured']:.1f} %" if row["base"] == COPY else f"{100 * (row['measured'] - 1):+.1f} %"
        where = f"{row['model']}, {row['resolution']} px"
        cells.append([where, PASSES[row["key"]], row["contender"], row["text"], value, verdict[row["met"]]])
    return report.text_table(["model", "pass", "prior", "target", "measured", ""], cells)


def panels(sizes: Sequence[Mapping[str, Any]]) -> list[list[report.Panel]]:
    """Time an image over resolution: a row a pass, a column a model."""
    models = list(dict.fromkeys(entry["model"] for entry in sizes))
    rows = []
    for key, title in PASSES.items():
        row = []
        for model in models:
            lines: dict[str, report.Line] = {}
            for entry in (own for own in sizes if own["model"] == model):
                for name, own in entry["passes"][key]["contenders"].items():
                    each = report.an_image(own["seconds"], entry["batch"])
                    lines.setdefault(name, []).append((entry["resolution"], each))
            best = next((name for name in lines if name not in (DENSE, COPY)), None)
            row.append(report.Panel(f"{model}, {title}", lines, DENSE, COPY, best))
        rows.append(row)
    return rows


# ---- command --------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, write and draw."""
    report.check_file(arguments.out)
    report.check_positive(rounds=arguments.rounds, budget=arguments.budget)
    dtype, device = report.machine_of(arguments)
    contenders = parse_contenders(arguments.priors)
    sizes = report.parse_sizes("--sizes", arguments.sizes)
    models = arguments.models.split(",")
    for model in models:  # a bad name or resolution ends the command before the first measurement
        if STOCK in contenders and stock_format(preset_family(model).name) is None:
            raise ValueError(f"--priors {STOCK}: transformers has no model like {model}")
        for resolution, _ in sizes:
            for contender in contenders.values():
                preset_config(model, resolution, contender.prior)
    results = {**report.provenance("model", arguments), "sizes": []}
    report.print_provenance(results)
    for model in models:
        benchmark = Benchmark(model, contenders, dtype, device, arguments.budget, arguments.rounds)
        for resolution, batch in sizes:
            entry = benchmark.at(resolution, batch)
            results["sizes"].append(entry)
            for key, title in PASSES.items():
                tokens = entry["patch_tokens"]
                print(f"\n{model}, {resolution} px ({tokens} patch tokens) x {batch}, {title}")
                print(size_table(entry["passes"][key]), flush=True)
    results["targets"] = compare_with_targets(results["sizes"]) if arguments.targets else []
    if arguments.targets:
        print("\n" + targets_table(results["targets"]))
    write_results(arguments.out, results)
    print(f"\n{arguments.out}")
    titles = dict.fromkeys(preset_family(model).title for model in models)
    heading = f"{', '.join(titles)}, {arguments.dtype}, {report.machine(results, device.type)}"
    print(report.draw_times(panels(results["sizes"]), arguments.out.with_suffix(".png"), heading, "pixels a side"))


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.model()
    arguments = parser.parse_args(argv)
    transformers_logging.set_verbosity_error()
    return run_command(parser.prog, lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
