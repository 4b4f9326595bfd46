"""Peak memory of classifiers over image sizes: forward pass, training step, training step with gradient checkpointing.

One image of its own size, nothing resized. A training step is forward, backward, AdamW. Every measurement is a process
of its own that runs the call twice; memory is what torch allocates beyond weights and image: what stays (tables, the
optimizer's two moments) and the peak of the second call, gradients included. Other programs do not change it, so it can
be measured on a busy machine, and no times are kept. What takes more than --seconds is left out, as is what
needs more than --memory-gib, which counts the whole process, with what the C library keeps of freed memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tasks.benchmark import lone_process, report
from tasks.benchmark.commands import CHECKPOINTED, DENSE
from tasks.benchmark.commands import MEMORY_PASSES as PASSES
from tasks.benchmark.entry import Benchmark, Case, Row, Session, unique
from tasks.benchmark.model_contenders import Contender, ModelRun, check_preset

FORWARD = PASSES[0]
UNTIMED = ("seconds", "calls", "first_call")


def measure_pass(case: Case, settings: Mapping[str, Any]) -> Case:
    """Bytes of one pass of one model on one image, and of its weights."""
    device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
    report.set_cpu(settings["threads"], settings["keep_memory"])
    run = ModelRun(case["model"], Contender(case["prior"]), case["pixels"], 1, dtype, device)
    if case["pass"] == CHECKPOINTED:
        model: Any = run.model  # whose older name is deprecated since transformers 5.23
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    call = run.forward if case["pass"] == FORWARD else run.training_step
    run.model.train(case["pass"] != FORWARD)
    found = lone_process.measured_call(lambda: call, device)
    weights = sum(parameter.nbytes for parameter in run.model.parameters())
    return {**{key: value for key, value in found.items() if key not in UNTIMED}, "weights": weights}


class PeakMemory(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """A bad name or size ends the command before the first measurement."""
        for model in arguments.models:
            check_preset(model, arguments)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Small images first."""
        models, priors, sizes = map(unique, (arguments.models, arguments.priors, sorted(arguments.sizes)))
        for pixels in sizes:
            for model in models:
                for key in PASSES:
                    for prior in priors:
                        yield [{"model": model, "pixels": pixels, "pass": key, "prior": prior}]

    def measure(self, cases: list[Case], session: Session) -> list[Case] | None:
        """In a process of its own."""
        return session.alone(measure_pass, cases[0])

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """What the bytes are."""
        return "MiB: weights, what stays of a call (tables, AdamW's moments) and the peak of a call, without the image."


def _whole(row: Row) -> str:
    """Weights and memory in MiB."""
    if "memory" not in row:
        return "-"
    return f"{(row['memory'] + row['records'][0]['weights']) / 2**20:.0f}"


BENCHMARK = PeakMemory(
    name="memory",
    keys=("model", "pixels", "pass", "prior"),
    machine=("dtype", "device", "threads", "keep_memory"),
    bases=(DENSE,),
    columns={
        "MiB": _whole,
        "of dense's": lambda row: report.ratio_cell(row["memory_times"].get(DENSE)),
        "attention ran on": lambda row: row["ran"],
    },
    only_these_columns=True,
    bar=("MiB", lambda row: (row["memory"] + row["records"][0]["weights"]) / 2**20),
)
