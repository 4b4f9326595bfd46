"""Memory and time of a step before it is done.

Memory is what the weights, their gradients, the optimizer and the moving average take, plus what each example of a step
adds. Before the small step only the first part is known, and the time from the multiply-adds of the model. After it,
what an example adds is what was measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_sparseprior.analysis.flops import model_flops
from tasks.common.images.model import build_model
from tasks.fullsize.configs import PaperRun
from tasks.fullsize.steps import STEPS, Batch

GIB = 2**30
IMPORTED_GIB = 0.75  # the packages
SLOW = 10e9  # multiply-adds a second of one thread, where nothing was measured
# Bytes of a parameter besides its weight and its gradient, 4 each.
OPTIMIZER_BYTES = {"sgd": 4}
ADAM_BYTES, AVERAGE_BYTES = 8, 4


@dataclass(frozen=True)
class Need:
    """memory_gib: the most at one time. minutes: of all that is done. None: not known."""

    memory_gib: float | None
    minutes: float | None

    def over(self, memory_gib: float, minutes: float) -> str | None:
        """Which limit it does not keep, in words with both figures; None: it keeps both."""
        if self.memory_gib is not None and self.memory_gib > memory_gib:
            return f"memory: {self.memory_gib:.1f} GiB predicted, {memory_gib:.1f} allowed"
        if self.minutes is not None and self.minutes > minutes:
            return f"time: {self.minutes:.1f} minutes predicted, {minutes:.1f} allowed"
        return None

    def rounded(self) -> dict[str, float | None]:
        """For records."""
        return {key: None if value is None else round(value, 2) for key, value in asdict(self).items()}


def memory_of_machine() -> float:
    """GiB that processes can have without harm to others: what the system calls available, less a tenth."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        return 0.9 * int(found.split()[1]) / 2**20
    except (OSError, StopIteration, ValueError):
        return 0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def parameter_bytes(run: PaperRun) -> int:
    """Bytes that a parameter of the trained model takes, with all that belongs to it."""
    trainer = run.config.get("trainer", {})
    averaged = trainer.get("ema_decay") is not None or run.task == "robotics"
    optimizer = OPTIMIZER_BYTES.get(str(trainer.get("optim", "adamw")), ADAM_BYTES)
    if run.config.get("tuning", {}).get("method", "full") != "full":
        return 4  # the others are not trained
    twice = 4 if run.task == "pretraining" or run.config.get("distillation", {}).get("teacher") else 0  # its teacher
    return 8 + optimizer + (AVERAGE_BYTES if averaged else 0) + twice


def first_need(run: PaperRun, model: Mapping[str, Any] | None, images: int, threads: int) -> tuple[Need, int | None]:
    """The least that the small step needs, and the model's number of parameters.

    Args:
        run: what is trained.
        model: its `model` section from scratch, None where it is no classifier of images.
        images: of the small step.
        threads: of the computation.
    """
    if model is None:
        return Need(None, None), None
    with torch.device("meta"):
        built = build_model(dict(model), [str(label) for label in range(1000)])
    parameters = sum(parameter.numel() for parameter in built.parameters())
    memory = IMPORTED_GIB + parameters * parameter_bytes(run) / GIB
    try:
        multiply_adds = model_flops(built.config).total
    except ValueError:  # of a kind that is not counted
        return Need(memory, None), parameters
    return Need(memory, 3 * STEPS * images * multiply_adds / (SLOW * threads) / 60), parameters


def sibling_need(run: PaperRun, records: Iterable[Mapping[str, Any]]) -> Need:
    """What a small step of the same table's run of this task took, which has another prior: for models that are not
    counted. The largest of several; unknown without any.
    """
    file = run.name.partition("#")[0]
    same = [record for record in records if (record["task"], record["name"].partition("#")[0]) == (run.task, file)]
    known = [record["small"] for record in same if record.get("small")]
    if not known:
        return Need(None, None)
    return Need(max(small["peak_gib"] for small in known), max(small["seconds"] for small in known) / 60)


def whole_need(run: PaperRun, small: Mapping[str, Any], batch: Batch) -> Need:
    """What a step of the configuration's own size needs, by the record of a small one."""
    fixed = min(IMPORTED_GIB + small["parameters"] * parameter_bytes(run) / GIB, small["peak_gib"])
    each = (small["peak_gib"] - fixed) / small["images"]
    longer = STEPS * small["seconds_per_step"] * (batch.images / small["images"] - 1)
    return Need(fixed + each * batch.images / batch.parts, (small["seconds"] + longer) / 60)


def parted(run: PaperRun, small: Mapping[str, Any], memory_gib: float) -> Batch:
    """The configuration's own step in as few parts as fit into memory, each of at least as many examples as the small
    one. Only transformers' Trainer does a step in parts.
    """
    batch = Batch(run.images)
    while (
        run.task in ("classification", "pretraining", "video")
        and (whole_need(run, small, batch).memory_gib or 0) > memory_gib
        and batch.images % (2 * batch.parts) == 0
        and batch.images // (2 * batch.parts) >= small["images"]
    ):
        batch = Batch(batch.images, 2 * batch.parts)
    return batch
