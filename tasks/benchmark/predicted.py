"""How well `explain --time` predicts: python -m tasks.benchmark.predicted

For each model, prior, size and number of images, the cost is predicted from less deep models
(`hf_sparseprior.analysis.predicted_cost`), and then the whole model is measured as `tasks.benchmark.model` does it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.analysis import pictures
from hf_sparseprior.analysis.predicted_cost import predicted_costs
from hf_sparseprior.base.files import read_json_object, write_text
from tasks.benchmark import commands, report
from tasks.benchmark.model import PASSES, Benchmark, Contender, preset_config
from tasks.common.command import run_command
from tasks.common.results import write_results
from tasks.common.tables import markdown_table

RECORDS, TABLE, PICTURE = "records.json", "table.md", "predicted.png"
UNFINISHED = "unfinished"  # in records.json until the command is done: what is measured, by model
TARGET = 15.0  # percent of what is measured


def parse_model(text: str) -> tuple[str, str, int, int]:
    """(preset, prior, pixels, images) of "vit_tiny violin 384x2".

    Raises:
        ValueError: if it is something else.
    """
    parts = text.split()
    if len(parts) != 3:
        raise ValueError(f"--models {text!r} must be PRESET PRIOR PIXELSxIMAGES, for example 'vit_tiny violin 384x2'")
    [(pixels, images)] = report.parse_sizes("--models", parts[2])
    preset_config(parts[0], pixels, parts[1])
    return parts[0], parts[1], pixels, images


def compared(model: tuple[str, str, int, int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Predicted and measured seconds and bytes of both passes."""
    preset, prior, pixels, images = model
    dtype, device = report.machine_of(arguments)
    costs = predicted_costs(preset_config(preset, pixels, prior), images, device, dtype)
    benchmark = Benchmark(preset, {prior: Contender(prior, None)}, dtype, device, arguments.budget, arguments.rounds)
    measured = benchmark.at(pixels, images)["passes"]
    entries = []
    for name in PASSES:
        found = measured[name]["contenders"].get(prior)
        if found is None or "seconds" not in found:
            reason = measured[name]["left_out"].get(prior, "it has no time")
            print(f"{preset} {prior} {pixels}x{images}, {PASSES[name]}: left out, {reason}", flush=True)
            continue
        own: dict[str, Any] = {"preset": preset, "prior": prior, "pixels": pixels, "images": images, "pass": name}
        own |= {"predicted": costs[name].seconds, "measured": found["seconds"]["median"]}
        own |= {"predicted_bytes": costs[name].bytes, "measured_bytes": found["memory"]["call"]}
        own["error"] = 100 * (own["predicted"] / own["measured"] - 1)
        own["error_bytes"] = 100 * (own["predicted_bytes"] / own["measured_bytes"] - 1)
        entries.append(own)
    return entries


def name_of(entry: Mapping[str, Any]) -> str:
    """An entry in a cell of the table."""
    return f"{entry['preset']} {entry['prior']}, {entry['pixels']} px x {entry['images']}, {entry['pass']}"


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """A row for each model and pass."""
    rows = [
        [
            name_of(entry),
            *(f"{1e3 * entry[key]:.1f}" for key in ("predicted", "measured")),
            f"{entry['error']:+.1f} %",
            *(f"{entry[key] / 2**20:.1f}" for key in ("predicted_bytes", "measured_bytes")),
            f"{entry['error_bytes']:+.1f} %",
        ]
        for entry in entries
    ]
    return markdown_table(["", "predicted, ms", "measured, ms", "", "predicted, MiB", "measured, MiB", ""], rows)


def draw(entries: Sequence[Mapping[str, Any]], path: Path, heading: str) -> Path:
    """Errors of the predicted times, with the target."""
    figure, axes = pictures.pyplot().subplots(figsize=(8, 0.9 + 0.28 * len(entries)), layout="constrained")
    axes.axvspan(-TARGET, TARGET, color="0.93")
    axes.barh([name_of(entry) for entry in entries][::-1], [entry["error"] for entry in entries][::-1], color="#3182bd")
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("predicted time over measured, %")
    axes.set_title(heading, fontsize=8)
    return pictures.save(figure, path)


def unfinished(path: Path, now: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What the same command measured here, on this processor and with these versions, before it was interrupted."""
    if not path.exists():
        return {}
    before = read_json_object(path)
    same = all(before.get(key) == now[key] for key in ("settings", "versions", "hardware", "environment"))
    return dict(before[UNFINISHED]) if same and UNFINISHED in before else {}


def run(arguments: argparse.Namespace) -> None:
    """Predict, measure, print and write."""
    report.check_positive(rounds=arguments.rounds, budget=arguments.budget)
    models = [parse_model(text) for text in arguments.models]
    report.machine_of(arguments)
    results = report.provenance("predicted", arguments)
    report.print_provenance(results)
    records = arguments.out / RECORDS
    done = unfinished(records, results)
    for number, model in enumerate(models, start=1):
        key = " ".join(map(str, model))
        if key not in done:
            done[key] = compared(model, arguments)
            write_results(records, {**results, UNFINISHED: done})
        for entry in done[key]:
            print(f"[{number}/{len(models)}] {name_of(entry)}: {entry['error']:+.1f} %", flush=True)
    entries = [entry for own in done.values() for entry in own]
    if not entries:
        raise ValueError("nothing could be measured; the reasons are above")
    within = sum(abs(entry["error"]) <= TARGET for entry in entries)
    line = f"{within} of {len(entries)} times are predicted within {TARGET:g} %."
    machine, text = report.machine(results, arguments.device), table(entries)
    write_results(arguments.out / RECORDS, {**results, "entries": entries})
    write_text(arguments.out / TABLE, f"{machine}, {arguments.dtype}. {line}\n\n{text}\n")
    picture = draw(entries, arguments.out / PICTURE, f"{line}\n{machine}")
    print(f"\n{text}\n\n{line}\n{arguments.out / TABLE}, {picture}")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.predicted()
    arguments = parser.parse_args(argv)
    return run_command(parser.prog, lambda: run(arguments), goes_on="after the last model that was measured")


if __name__ == "__main__":
    sys.exit(main())
