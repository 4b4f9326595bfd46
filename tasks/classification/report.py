"""What a run leaves behind: results.json, training curves, confusion matrix."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save
from hf_sparseprior.hub import write_text

PACKAGES = (
    "hf_sparseprior",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "evaluate",
    "numpy",
    "scikit-learn",
    "av",
)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of these cells."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in rows])


def plus_minus(mean: float, deviation: float | None, sign: str = "") -> str:
    """ "70.35 ± 0.12", the mean alone where there is no deviation; with sign="+" a plus before what is not below 0."""
    return f"{mean:{sign}.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def count_of_seeds(count: int) -> str:
    """ "3 seeds" or "1 seed"."""
    return f"{count} seeds" if count > 1 else "1 seed"


def environment() -> dict[str, Any]:
    """Versions and hardware, as every results file records them."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    hardware = {
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    return {"versions": versions, "hardware": hardware}


def cpu_name() -> str:
    """Name of the processor as Linux knows it, elsewhere as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def command_line() -> str:
    """The command that runs, as a user types it."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    start = f"python -m {spec.name}" if spec is not None else f"python {sys.argv[0]}"
    return f"{start.removesuffix('.__main__')} {shlex.join(sys.argv[1:])}".rstrip()


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write results.json whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(results, indent=1) + "\n")


def read_results(path: str | os.PathLike) -> dict[str, Any]:
    """Read a results.json."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def draw_history(history: Sequence[dict[str, Any]], path: Path, heading: str) -> Path:
    """Loss and validation accuracy over epochs, from the Trainer's log."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for key, label, colour in (("loss", "training", INK), ("eval_loss", "validation", ACCENT)):
        points = [(entry["epoch"], entry[key]) for entry in history if key in entry]
        if points:
            left.plot(*zip(*points, strict=True), color=colour, label=label)
    left.set_xlabel("epoch")
    left.set_ylabel("loss")
    if left.lines:
        left.legend(frameon=False)
    points = [(entry["epoch"], 100 * entry["eval_accuracy"]) for entry in history if "eval_accuracy" in entry]
    if points:
        right.plot(*zip(*points, strict=True), color=ACCENT)
    right.set_xlabel("epoch")
    right.set_ylabel("validation accuracy, %")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle(heading)
    return save(figure, path)


def draw_confusion(counts: np.ndarray, classes: Sequence[str], path: Path, heading: str) -> Path:
    """Confusion matrix: shares of each true class, counts written where there is room."""
    plt = pyplot()
    size = min(12.0, 2.4 + 0.42 * len(classes))
    figure, axis = plt.subplots(figsize=(size, size), layout="constrained")
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(classes) <= 30:
        for row in range(len(classes)):
            for column in range(len(classes)):
                if counts[row, column]:
                    colour = "white" if shares[row, column] > 0.5 else INK
                    axis.text(column, row, counts[row, column], ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(len(classes)), classes, rotation=90 if max(map(len, classes)) > 3 else 0)
        axis.set_yticks(range(len(classes)), classes)
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    axis.set_title(heading, fontsize=10)
    return save(figure, path)
