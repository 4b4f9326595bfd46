"""Time and memory of video models a clip.

Forward passes of one clip, without gradients, over frames and pixels. Each measurement is done in a process of its own,
which may have --memory-gib and no more. The rows take turns, and there are --rounds rounds; of a call of more than ten
seconds there is one. What a measurement would need is predicted from the row's three next shorter clips of the same
size (and 1, 2 and 4 frames, which are measured first); if that is too much, it is not begun, and the table says what it
would need. `joint/transformers` is transformers' own class, which writes out the matrix of all pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TimesformerConfig, TimesformerForVideoClassification

from hf_sparseprior import SparsePriorTimesformerConfig, SparsePriorTimesformerForVideoClassification
from tasks.benchmark import lone_process, report
from tasks.benchmark.commands import STOCK
from tasks.benchmark.entry import Benchmark, Case, Row, Session, turned, unique
from tasks.benchmark.timing import MEMORY_TOLERANCE, growth_law

SHORT = {name.partition("_")[0]: name for name in SparsePriorTimesformerConfig.modes["attention_type"]}
PROBES = (1, 2, 4)  # frames that a prediction begins with
POINTS = 3  # sizes that a prediction is made from
LONG = 10.0  # seconds; of a longer call there is one
TIME_TOLERANCE = 0.03  # a term may be left out of a law of time if this is the largest difference


@dataclass(frozen=True)
class Clips:
    """What is measured: a model, and the clip that it is given.

    attention: "divided", "joint" or "space", as `attention_type` begins. prior: a name or the full form; `STOCK`:
    transformers' own class. preset: width and depth, those of an image model. dtype: of weights and clip.
    """

    attention: str
    prior: Any
    frames: int
    pixels: int
    preset: str = "vit_tiny"
    dtype: str = "float32"

    @classmethod
    def of(cls, case: Mapping[str, Any], settings: Mapping[str, Any]) -> Clips:
        """What a case measures.

        Raises:
            ValueError: for a row that is not ATTENTION/PRIOR.
        """
        attention, slash, prior = case["row"].partition("/")
        if not slash:
            raise ValueError(f"--rows {case['row']!r} must be ATTENTION/PRIOR, like joint/dense")
        prior = report.from_yaml("--rows", prior)
        return cls(attention, prior, case["frames"], case["pixels"], settings["preset"], settings["dtype"])

    def config(self) -> SparsePriorTimesformerConfig:
        """The model's config.

        Raises:
            ValueError: for a bad preset, prior or size.
        """
        if self.attention not in SHORT:
            raise ValueError(f"attention {self.attention!r} must be one of {', '.join(SHORT)}")
        return SparsePriorTimesformerConfig.from_preset(
            self.preset,
            image_size=self.pixels,
            num_frames=self.frames,
            attention_type=SHORT[self.attention],
            prior="dense" if self.prior == STOCK else self.prior,
        )

    def model(self) -> nn.Module:
        """The model, with random weights, for evaluation."""
        config = self.config()
        torch.manual_seed(0)
        if self.prior == STOCK:
            same = ("image_size", "patch_size", "num_frames", "hidden_size", "num_hidden_layers")
            shared = {name: getattr(config, name) for name in (*same, "num_attention_heads", "intermediate_size")}
            stock = TimesformerConfig(**shared, attention_type=config.attention_type)
            return TimesformerForVideoClassification(stock).eval()
        return SparsePriorTimesformerForVideoClassification(config).eval()


def measure_clip(case: Case, settings: Mapping[str, Any]) -> Case:
    """What `lone_process.measured_call` returns of one clip; memory has the weights and the clip, too."""
    report.set_cpu(settings["threads"], settings["keep_memory"])
    clips, dtype = Clips.of(case, settings), getattr(torch, settings["dtype"])
    model = clips.model().to(dtype)
    pixels = torch.randn(1, clips.frames, 3, clips.pixels, clips.pixels).to(dtype)
    with torch.no_grad():
        found = lone_process.measured_call(lambda: lambda: model(pixel_values=pixels), torch.device("cpu"))
    weights = sum(own.nbytes for own in (*model.parameters(), *model.buffers()))
    needed = weights + pixels.nbytes + max(found["set_up"], found["memory"])
    return {**found, "memory": needed, "call": found["memory"], "weights": weights, "ran": found["ran"] or STOCK}


def predicted_cost(records: Sequence[Case], case: Case) -> dict[str, float] | None:
    """Seconds and GiB of a call, by the row's shorter clips; None where fewer than three were measured."""
    found: dict[int, list[Case]] = {}
    for own in records:
        same = (own["row"], own["pixels"]) == (case["row"], case["pixels"])
        if same and own["frames"] < case["frames"] and "seconds" in own:
            found.setdefault(own["frames"], []).append(own)
    shorter = sorted(found)[-POINTS:]
    if len(shorter) < POINTS:
        return None
    seconds = growth_law(shorter, [median(own["seconds"] for own in found[n]) for n in shorter], TIME_TOLERANCE)
    needed = growth_law(shorter, [max(own["memory"] for own in found[n]) for n in shorter], MEMORY_TOLERANCE)
    powers = np.array([1, case["frames"], case["frames"] ** 2])
    return {"seconds": float(powers @ seconds), "gib": float(powers @ needed) / 2**30}


def too_much(prediction: Mapping[str, float] | None, arguments: argparse.Namespace) -> Case | None:
    """A record that says why a measurement is not begun, or None."""
    if prediction is None:
        return None
    if prediction["gib"] > arguments.memory_gib:
        said = f"does not run: needs {prediction['gib']:.1f} GiB, {arguments.memory_gib:g} are allowed"
        return {"failed": said, "predicted": dict(prediction), "limit_bytes": int(arguments.memory_gib * 2**30)}
    if prediction["seconds"] > arguments.seconds:
        said = f"not run: would take {prediction['seconds']:.0f} s, {arguments.seconds:g} are allowed"
        return {"failed": said, "predicted": dict(prediction), "limit_seconds": arguments.seconds}
    return None


class Video(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """Bad rows and sizes end the command before the first measurement."""
        report.check_positive(memory_gib=arguments.memory_gib, **{"pixels": min(arguments.pixels)})
        if arguments.device != "cpu":
            raise ValueError(f"--device {arguments.device}: clips are measured on the CPU")
        if min(arguments.frames) <= PROBES[-1]:
            few = f"--frames {min(arguments.frames)} must be above {PROBES[-1]}"
            raise ValueError(f"{few}; {', '.join(map(str, PROBES))} are measured too")
        for cases in self.plan(arguments):
            Clips.of(cases[0], vars(arguments)).config()

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Rounds, in each of them pixels, frames and rows; what predictions begin with is in the first round."""
        rows, pixels, frames = map(unique, (arguments.rows, sorted(arguments.pixels), sorted(arguments.frames)))
        for number in range(arguments.rounds):
            for size in pixels:
                for count in frames if number else sorted({*PROBES, *frames}):
                    for row in turned(rows, number):
                        yield [{"pixels": size, "frames": count, "row": row, "round": number}]

    def measure(self, cases: list[Case], session: Session) -> list[Case] | None:
        """In a process of its own, unless it would be too much or one long call is known."""
        (case,) = cases
        first = {**case, "round": 0}
        known = [own for own in session.records if first.items() <= own.items()]
        if case["round"] and any(own.get("seconds", 0) > LONG for own in known):
            return []
        if not known and (refused := too_much(predicted_cost(session.records, case), session.arguments)):
            return [{**case, **refused}]
        return session.alone(measure_clip, case)

    def convert(self, content: dict[str, Any]) -> dict[str, Any]:
        """Of a file that has records by row and size, with the seconds of all rounds."""
        if "measured" in content or not all(", " in place for place in content):
            return content
        measured: list[Case] = []
        kept: dict[str, Any] = next(iter(content.values()), {})
        for place, old in content.items():
            memory = old["memory"]
            needed = memory["weights"] + memory["input"] + max(memory["set_up"], memory["kept"] + memory["call"])
            own = {"pixels": old["pixels"], "frames": old["frames"], "row": place.rpartition(", ")[0]}
            own |= {"memory": needed, "call": memory["kept"] + memory["call"], "weights": memory["weights"]}
            own |= {"set_up": memory["set_up"], "ran": old["ran"].split(" (")[0]}
            measured += [{**own, "round": number, "seconds": value} for number, value in enumerate(old["seconds"])]
        settings = {key: kept.get(key) for key in ("preset", "dtype", "threads")} | {"keep_memory": False}
        about = {key: kept.get(key) for key in ("command", "versions", "hardware")}
        return {"task": "benchmark", "benchmark": "video", **about, "settings": settings, "measured": measured}

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """How it was measured."""
        return (
            f"{settings['preset']}. A forward pass of one clip without gradients, whole models. MiB: weights, clip, "
            "tables and the peak of what torch allocates in a call. What was not run was predicted from the row's "
            "three next shorter clips of the same size, as a + b F + c F^2 of F frames."
        )


BENCHMARK = Video(
    name="video",
    keys=("pixels", "frames", "row"),
    machine=("dtype", "threads", "keep_memory"),
    same=("preset",),
    bases=("divided/dense", "joint/dense"),
    size="frames",
    by_base=False,
)
