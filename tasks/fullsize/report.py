"""The table and the picture of what was done at full size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.analysis.pictures import INK, pyplot, save
from hf_sparseprior.base.files import write_text
from tasks.fullsize.configs import Group

TABLE, PICTURE = "TABLE.md", "fullsize.png"
COLOURS = ("#2a7f9e", "#7a9e3f", "#8e5ea2", "#d9a441", "#b0578d", "#5f5f9e")
HEAD = (
    *("task", "configuration", "runs", "parameters, M", "small step: s, GiB", "went on from", "evaluated"),
    *("own step: images", "own step: s, GiB"),
)


def write_report(folder: Path, groups: Sequence[Group], records: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write TABLE.md, and the picture if anything was done. `records`: by key, those of other configurations too."""
    rows = [(group, records.get(group.key)) for group in groups]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw([record for _, record in rows if record], folder / PICTURE)
    lines = [*_summary(rows), *([f"![memory and time of a step]({PICTURE})", ""] if drawn else []), *_table(rows)]
    write_text(folder / TABLE, "\n".join(lines) + "\n")
    return folder / TABLE


def _summary(rows: Sequence[tuple[Group, Mapping[str, Any] | None]]) -> list[str]:
    runs = sum(len(group.runs) for group, _ in rows)
    small = Counter(record["status"] if record else "not yet done" for _, record in rows)
    own = Counter(
        (record.get("whole") or {}).get("status", "not yet done")
        for _, record in rows
        if record and record["status"] == "done"
    )
    covered = sum(len(group.runs) for group, record in rows if record and record["status"] == "done")
    machines = sorted({record["hardware"]["cpu"] for _, record in rows if record})
    threads = sorted({str(record["hardware"]["cpu_threads"]) for _, record in rows if record})
    return [
        "# The papers' configurations at full size",
        "",
        f"{runs} runs in {len(rows)} groups of the same step. Small steps: {_counts(small)}; they stand for {covered} "
        f"runs. Steps of the configuration's own number of images: {_counts(own)}.",
        "",
        f"Measured on {', '.join(machines) or 'nothing yet'}, {', '.join(threads) or 'no'} threads. `runs` is how many "
        "runs a row stands for, which differ only in seed, data set, rates and numbers in the settings of a prior.",
        "Seconds are those of a step, GiB the most memory of its process. A step that is not done has the predicted "
        "figure that forbade it.",
        "",
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"


def _table(rows: Sequence[tuple[Group, Mapping[str, Any] | None]]) -> list[str]:
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    return lines + [f"| {' | '.join(_cells(group, record))} |" for group, record in rows]


def _cells(group: Group, record: Mapping[str, Any] | None) -> list[str]:
    run = group.run
    cells = [run.task, f"`{run.name}`", str(len(group.runs))]
    if record is None:
        return [*cells, "", "not yet done", "", "", str(run.images), ""]
    cells.append(f"{record['parameters'] / 1e6:.1f}" if record.get("parameters") else "")
    if record["status"] != "done":
        return [*cells, f"{record['status']}: {record['reason']}".replace("|", "/"), "", "", str(run.images), ""]
    small, whole = record["small"], record.get("whole") or {}
    cells += [_figures(small) if run.trains else f"no step, {small['peak_gib']:.1f}", small["resumed_from"] or "-"]
    cells += ["loss" if "no_simulator" in small["evaluated"] else "yes"]
    if not whole:
        return [*cells, str(run.images) if run.trains else "-", "not yet done" if run.trains else "-"]
    parts = f" in {whole['parts']} parts" if whole["parts"] > 1 else ""
    return [
        *cells,
        f"{whole['images']}{parts}",
        _figures(whole) if whole["status"] == "done" else whole["reason"],
    ]


def _figures(found: Mapping[str, Any]) -> str:
    return f"{found['seconds_per_step']:.1f}, {found['peak_gib']:.1f}"


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Memory over seconds of a step: small ones, and those of the own size that were done. Returns whether any was."""
    done = [record for record in records if record["status"] == "done" and record["small"]["losses"]]
    if not done:
        return False
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    tasks = sorted({record["task"] for record in done})
    for task, colour in zip(tasks, COLOURS, strict=False):
        own = [record for record in done if record["task"] == task]
        points = [(record["small"]["seconds_per_step"], record["small"]["peak_gib"]) for record in own]
        axis.plot(*zip(*points, strict=True), "o", color=colour, mfc="none", ms=5, label=task)
        for record in own:
            whole = record.get("whole") or {}
            if whole.get("status") == "done":
                ends = [(found["seconds_per_step"], found["peak_gib"]) for found in (record["small"], whole)]
                axis.plot(*zip(*ends, strict=True), "-", color=colour, alpha=0.4, lw=1)
                axis.plot(*ends[1], "o", color=colour, ms=6)
    axis.set(xscale="log", yscale="log", xlabel="seconds a step", ylabel="memory, GiB")
    axis.set_title("Steps at full size: open, 2 images; filled, the configuration's own", fontsize=10, color=INK)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    save(figure, path)
    return True
