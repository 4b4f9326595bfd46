"""The gallery of docs/gallery.md: each registered support and decay on a photo, with what it costs.

The site adds this to the text of that page when it is built. Pictures and numbers follow from the registries and from
the records of `tasks.benchmark`; the repository holds none of it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from on_photo import HEADS, PATCH, SIDE, clean, decay_masks, heat_bar, photo, row_of, show_heat, show_seen

import hf_sparseprior as sp
from hf_sparseprior.analysis.pictures import pyplot, save
from hf_sparseprior.patterns.decay import DECAYS, make_decay, resolve_decay
from hf_sparseprior.patterns.pattern import SUPPORTS

TIMES = Path(__file__).resolve().parents[2] / "tasks" / "benchmark" / "results" / "cpu"
# Times of a ViT-S at 224 pixels in those of dense attention. There all supports have one share of the pairs.
RECORDS = (TIMES / "vit_small_baselines.json", TIMES / "vit_small_violin.json")
OTHERS = ((0, 0), (3, 11), (10, 3), (13, 7))  # patches that are drawn too where all heads see the same
# A clip of so many frames, in which the camera moves right by so many pixels a frame; these frames are drawn.
FRAMES, MOVED, SHOWN = 16, 5, (0, 4, 8, 12, 15)


def sentence(entry: Any) -> str:
    """The first line of the documentation of what is registered."""
    return (inspect.getdoc(getattr(entry, "function", entry)) or "").partition("\n")[0]


def clip_of(name: str) -> tuple[int, ...]:
    """The grid on which a support is drawn: a clip if it sees time."""
    return (FRAMES, SIDE, SIDE) if SUPPORTS[name].sees_time else (SIDE, SIDE)


def support_masks(name: str) -> np.ndarray:
    """Which pairs of patches a support keeps in layer 1 with its defaults, bool (HEADS, N, N)."""
    grid = clip_of(name)
    time = "clip" if len(grid) == 3 else "frame"
    return sp.supports.build_mask(name, num_heads=HEADS, num_tokens=int(np.prod(grid)), grid=grid, time=time)


def share_of_pairs(masks: np.ndarray) -> str:
    """ "4.5 %" of all pairs of patches."""
    return f"{100 * masks.mean():.1f} %"


def scalars(name: str) -> int:
    """How many learned scalars a decay has in a layer."""
    settings = resolve_decay({"name": name}, (SIDE, SIDE))
    return sum(parameter.numel() for parameter in make_decay(settings, HEADS).parameters())


def recorded_times() -> dict[str, float]:
    """Time of a forward pass of a ViT-S at 224 pixels in dense's, by support or decay."""
    times: dict[str, float] = {}
    for path in RECORDS:
        record = json.loads(path.read_text(encoding="utf-8"))
        (size,) = (size for size in record["sizes"] if size["resolution"] == 224)
        for contender, measured in size["passes"]["forward"]["contenders"].items():
            # A prior with settings is written as {support: {name: bigbird, pruning_ratio: 96.5}}.
            name = contender.partition("name: ")[2].partition(",")[0] or contender
            if name in (*SUPPORTS, *DECAYS):
                times[name] = measured["times_dense"]["median"]
    return times


# ---- pictures -------------------------------------------------------------------------------------------------------


def panels(count: int, room: float = 0.0) -> tuple[Any, Sequence[Any]]:
    """A figure with a row of panels. room: inches that are free on the right."""
    width = 1.45 * count
    figure, axes = pyplot().subplots(1, count, figsize=(width + room, 1.72))
    figure.subplots_adjust(0.005, 0.01, 1 - (room + 0.03) / (width + room), 0.86, wspace=0.05)
    for axis in axes:
        clean(axis)
    return figure, axes


def draw_support(name: str, path: Path) -> Path:
    """What patches of a photo see: one patch in each head or, if all heads are alike, several patches in any head."""
    masks = support_masks(name)
    if len(clip_of(name)) == 3:
        return draw_clip(masks[0], path)
    alike = (masks == masks[0]).all()
    views = [(0, patch) for patch in (PATCH, *OTHERS)] if alike else [(head, PATCH) for head in range(HEADS)]
    figure, axes = panels(len(views))
    for axis, (head, patch) in zip(axes, views, strict=True):
        seen = row_of(masks, patch)[head]
        show_seen(axis, photo(), seen, patch)
        axis.set_title(f"{'any head' if alike else f'head {head + 1}'}: {seen.sum()} patches", fontsize=8, pad=3)
    return save(figure, path)


def draw_clip(mask: np.ndarray, path: Path) -> Path:
    """What a patch of the last frame of a clip sees in some of its frames; mask (N, N) of a head."""
    last = FRAMES - 1
    seen = mask[(last * SIDE + PATCH[0]) * SIDE + PATCH[1]].reshape(FRAMES, SIDE, SIDE)
    figure, axes = panels(len(SHOWN))
    for axis, number in zip(axes, SHOWN, strict=True):
        show_seen(axis, photo(moved=MOVED * number), seen[number], PATCH if number == last else None)
        axis.set_title(f"frame {number + 1}: {seen[number].sum()} patches", fontsize=8, pad=3)
    return save(figure, path)


def draw_decay(name: str, path: Path) -> Path:
    """The factor of the scores of one patch with all patches, head by head."""
    views = row_of(decay_masks(name))
    ends = (float(views.min()), 1.0)
    figure, axes = panels(HEADS, room=0.75)
    for head, (axis, view) in enumerate(zip(axes, views, strict=True), start=1):
        show_heat(axis, photo(), view, ends)
        axis.set_title(f"head {head}: {view.mean():.3f} in the mean", fontsize=7, pad=3)
    heat_bar(figure, ends, figure.add_axes((0.935, 0.05, 0.012, 0.78)), "vertical")
    return save(figure, path)


# ---- the page -------------------------------------------------------------------------------------------------------


def gallery_text(folder: Path, pictures: dict[str, Path]) -> str:
    """Tables of costs, and each support and decay with its sentence and picture; `pictures` gets their places."""
    times = recorded_times()

    def time_of(name: str) -> str:
        return f"{times[name]:.2f}" if name in times else "-"

    lines = ["## Supports", "", "| support | share of pairs | time, in dense's |", "|---|---|---|"]
    shares = {name: share_of_pairs(support_masks(name)) for name in SUPPORTS}
    lines += [f"| [{name}](#{name}) | {share} | {time_of(name)} |" for name, share in shares.items()]
    for name, entry in SUPPORTS.items():
        where = f"of a clip of {FRAMES} frames" if len(clip_of(name)) == 3 else "of the image"
        lines += section(name, sentence(entry), f"{shares[name]} of the pairs {where}")
        pictures[f"gallery/{name}.png"] = draw_support(name, folder / f"gallery_{name}.png")
    lines += ["## Decays", "", "| decay | learned scalars a layer | time, in dense's |", "|---|---|---|"]
    lines += [f"| [{name}](#{name}) | {scalars(name)} | {time_of(name)} |" for name in DECAYS]
    for name, entry in DECAYS.items():
        lines += section(name, sentence(entry), f"all pairs, {scalars(name)} learned scalars a layer")
        pictures[f"gallery/{name}.png"] = draw_decay(name, folder / f"gallery_{name}.png")
    return "\n".join([*lines, ""])


def section(name: str, about: str, cost: str) -> list[str]:
    """Heading, sentence, cost and picture of one entry."""
    picture = f"![{name} on a photo](gallery/{name}.png)"
    return [
        "",
        f"### {name}",
        "",
        about,
        "",
        f"Costs: {cost}. [Settings](reference/priors.md#{name}).",
        "",
        picture,
        "",
    ]
