"""Pictures of README, concepts and architecture: python docs/site/pictures.py [FOLDER] (by default docs/).

`idea.png`, `concept_pairs.png` and `concept_parts.png` are made from the patterns themselves, `speed.png` from the
records of `tasks.benchmark backbones` and of an H100, and `architecture.png` from the imports of the library.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from concept_pictures import draw_pairs, draw_parts
from on_photo import HEADS, SIDE, clean, decay_masks, few_colours, heat_bar, photo, row_of, show_heat, show_seen

import hf_sparseprior as sp
from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tasks" / "benchmark" / "results" / "backbones" / "records.json"
GPU_RECORDS = ROOT / "tasks" / "benchmark" / "results" / "gpu" / "graphs.json"


def patch_views() -> dict[str, np.ndarray]:
    """How much one patch sees of every patch, (heads, SIDE, SIDE) from 0 to 1, by prior: layer 1 before training."""
    support = sp.supports.build_mask("fibottention", num_heads=HEADS, num_tokens=SIDE**2, layer=0)
    masks = {"dense": np.ones_like(support), "Fibottention": support, "VIOLIN": decay_masks("violin")}
    return {name: row_of(mask).astype(float) for name, mask in masks.items()}


def draw_idea(path: Path) -> Path:
    """A photo, and what its marked patch sees of it in every head."""
    figure, axes = pyplot().subplots(3, HEADS + 1, figsize=(8.6, 3.9), layout="constrained")
    for axis in axes.flat:
        clean(axis)
    for line, (name, views) in zip(axes, patch_views().items(), strict=True):
        seen, low = (views > 0).sum((1, 2)), float(views.min())
        for head, (axis, view) in enumerate(zip(line[1:], views, strict=True), start=1):
            if name == "VIOLIN":
                show_heat(axis, photo(), view, (low, 1))
            else:
                show_seen(axis, photo(), view)
            if name == "dense":
                axis.set_title(f"head {head}", fontsize=9)
        what = {
            "dense": f"every head compares\nthe patch with all {SIDE**2}",
            "Fibottention": f"with {seen.min()} to {seen.max()} patches,\ndifferent in each head",
            "VIOLIN": "with all; factor of each\nscore before training:",
        }[name]
        line[0].text(-0.03, 0.5, f"{name}\n", fontsize=11, fontweight="bold", va="center", transform=line[0].transAxes)
        line[0].text(-0.03, 0.5, what, fontsize=8, va="top", transform=line[0].transAxes)
    heat_bar(figure, (low, 1), line[0].inset_axes((0.0, 0.05, 0.85, 0.07)))
    return few_colours(save(figure, path))


def seconds(model: str, prior: str) -> dict[int, list[float]]:
    """Of a model with a prior: the time of every round, by pixels."""
    rounds: dict[int, list[float]] = {}
    for entry in json.loads(RECORDS.read_text(encoding="utf-8"))["measured"]:
        if (entry["model"], entry["prior"]) == (model, prior) and "seconds" in entry:
            rounds.setdefault(entry["pixels"], []).append(entry["seconds"])
    return rounds


def gpu_milliseconds(prior: str) -> dict[int, float]:
    """An image's share of a training step of ViT-S on an H100, in CUDA graphs, by the image's side."""
    return {
        entry["pixels"]: entry["ms"] / entry["batch"]
        for entry in json.loads(GPU_RECORDS.read_text(encoding="utf-8"))["models"]
        if (entry["prior"], entry["pass"], entry["mode"]) == (prior, "training step", "CUDA graphs")
    }


def draw_speed(path: Path) -> Path:
    """Time of an image over its size, of whole models, dense and with Fibottention, on a CPU and on a GPU."""
    figure, axes = pyplot().subplots(1, 3, figsize=(11.4, 3.4), layout="constrained", width_ratios=[1, 1, 0.75])
    models = {"vit_small": "ViT-S/16, CPU", "vit_base": "ViT-B/16, CPU"}
    for axis, (model, title) in zip(axes[:2], models.items(), strict=True):
        dense, ours = seconds(model, "dense"), seconds(model, "fibottention")
        for rounds, label, colour in ((dense, "dense", INK), (ours, "Fibottention", ACCENT)):
            values = [median(times) for times in rounds.values()]
            axis.plot(list(rounds), values, "o-", color=colour, linewidth=2)
            place = {"textcoords": "offset points", "color": colour, "va": "center"}
            axis.annotate(label, (max(rounds), values[-1]), (10, 0), **place)
        for size, times in ours.items():  # round by round, so that a slow moment of the machine does not count
            faster = median(d / o for d, o in zip(dense[size], times, strict=True))
            ends = median(times), median(dense[size])
            axis.vlines(size, *ends, color="0.6", linestyle=":")
            beside = {"xytext": (5, -4)} if size > min(ours) else {"xytext": (-16, 10)}
            said = f"{faster:.1f}x" + " as fast" * (size == max(ours))
            axis.annotate(said, (size, sum(ends) / 2), textcoords="offset points", **beside)
        axis.set_title(title, fontsize=11)
        axis.set(xlabel="side of the image, pixels", xticks=list(dense), xlim=(250, 1980), ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("seconds per image\n(forward pass, one CPU core)")
    draw_gpu_speed(axes[2])
    return save(figure, path)


def draw_gpu_speed(axis: Any) -> None:
    """The panel of the GPU."""
    dense, ours = gpu_milliseconds("dense"), gpu_milliseconds("fibottention")
    for values, label, colour in ((dense, "dense\n(flash)", INK), (ours, "Fibot-\ntention", ACCENT)):
        sizes = sorted(values)
        axis.plot(sizes, [values[size] for size in sizes], "o-", color=colour, linewidth=2)
        place = {"textcoords": "offset points", "color": colour, "va": "center"}
        axis.annotate(label, (sizes[-1], values[sizes[-1]]), (8, 0), **place)
    largest = max(ours)
    axis.vlines(largest, ours[largest], dense[largest], color="0.6", linestyle=":")
    said = f"{dense[largest] / ours[largest]:.1f}x\nas fast"
    middle = (dense[largest] + ours[largest]) / 2
    axis.annotate(said, (largest, middle), (5, 0), textcoords="offset points", va="center")
    axis.set_title("ViT-S/16, H100 GPU", fontsize=11)
    axis.set(xlabel="side of the image, pixels", xticks=sorted(dense), xlim=(150, 1330), ylim=(0, None))
    axis.set_ylabel("milliseconds per image\n(training step, CUDA graphs)")
    axis.spines[["top", "right"]].set_visible(False)


def imports_of_rooms() -> dict[str, dict[str, int]]:
    """How many of a room's modules import from each other room, from the ground up."""
    rooms: dict[str, dict[str, int]] = {}
    for path in sorted((ROOT / "hf_sparseprior").glob("*/*.py")):
        found = re.findall(r"(?m)^ *from hf_sparseprior\.(\w+)[\w.]* import", path.read_text(encoding="utf-8"))
        counts = rooms.setdefault(path.parent.name, {})
        for other in {*found} - {path.parent.name}:
            counts[other] = counts.get(other, 0) + 1
    # Of rooms that could stand side by side, that which more others import comes first.
    asked = {room: sum(room in counts for counts in rooms.values()) for room in rooms}
    order: list[str] = []
    while len(order) < len(rooms):
        free = [room for room in rooms if room not in order and not {*rooms[room]} - {*order}]
        order.append(max(free, key=lambda room: asked[room]))
    return {room: rooms[room] for room in order}


def draw_rooms(path: Path) -> Path:
    """Which room of the library imports which, as a table in which everything lies below the diagonal."""
    rooms = imports_of_rooms()
    figure, axis = pyplot().subplots(figsize=(7.2, 4.4), layout="constrained")
    counts = np.array([[own.get(other, 0) for other in rooms] for own in rooms.values()])
    axis.imshow(np.where(counts, np.log1p(counts), np.nan), cmap="Blues", vmin=0, vmax=5)
    for row, column in np.argwhere(counts):
        axis.text(column, row, counts[row, column], ha="center", va="center", fontsize=9)
    for number in range(len(rooms)):
        axis.add_patch(pyplot().Rectangle((number - 0.5, number - 0.5), 1, 1, color="0.85"))
    axis.set_yticks(range(len(rooms)), rooms)
    axis.set_xticks(range(len(rooms)), rooms, rotation=45, ha="left", rotation_mode="anchor")
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    axis.set_ylabel("this room imports")
    axis.set_xlabel("from this one, in so many of its modules", labelpad=8)
    return save(figure, path)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    print(draw_idea(folder / "idea.png"))
    print(draw_pairs(folder / "concept_pairs.png"))
    print(draw_parts(folder / "concept_parts.png"))
    print(draw_speed(folder / "speed.png"))
    print(draw_rooms(folder / "architecture.png"))
