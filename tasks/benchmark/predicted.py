"""How well `explain --time` predicts.

For each model, prior, size and number of images, the cost is predicted from less deep models
(`hf_sparseprior.analysis.predicted_cost`), and then the whole model is measured as `model` does it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_sparseprior.analysis.predicted_cost import predicted_costs
from tasks.benchmark import report
from tasks.benchmark.entry import Benchmark, Case, Row, Session
from tasks.benchmark.model import PASSES
from tasks.benchmark.model_contenders import Contender, ModelRun, preset_config
from tasks.benchmark.timing import spread

TARGET = 15.0  # percent of what is measured


def parse_model(text: str) -> dict[str, Any]:
    """Preset, prior, pixels and images of "vit_tiny violin 384x2".

    Raises:
        ValueError: if it is something else.
    """
    parts = text.split()
    if len(parts) != 3:
        raise ValueError(f"--models {text!r} must be PRESET PRIOR PIXELSxIMAGES, for example 'vit_tiny violin 384x2'")
    [(pixels, images)] = report.parse_sizes("--models", parts[2])
    preset_config(parts[0], pixels, parts[1])
    return {"preset": parts[0], "prior": parts[1], "pixels": pixels, "images": images}


class Predicted(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """--models."""
        report.check_positive(rounds=arguments.rounds)
        for text in arguments.models:
            parse_model(text)

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Both passes of each model."""
        return [[{**parse_model(text), "pass": key} for key in PASSES] for text in arguments.models]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """Predicted and measured seconds and bytes of both passes."""
        preset, prior, pixels, images, _ = cases[0].values()
        dtype, device = session.dtype, session.device
        costs = predicted_costs(preset_config(preset, pixels, prior), images, device, dtype)
        records = []
        for case in cases:
            run = ModelRun(preset, Contender(prior), pixels, images, dtype, device)
            (found,) = session.in_turns([{"of": "whole"}], {"whole": run.set_up(case["pass"])})
            if "failed" in found:
                records.append({**case, "failed": found["failed"]})
                continue
            cost, seconds = costs[case["pass"]], spread(found["seconds"])["median"]
            own = {"predicted": cost.seconds, "measured": seconds, "error": 100 * (cost.seconds / seconds - 1)}
            called = found["memory"] - found["kept"]
            own |= {"predicted_bytes": cost.bytes, "measured_bytes": called}
            records.append({**case, **own, "error_bytes": 100 * (cost.bytes / called - 1)})
        return records

    def convert(self, content: dict[str, Any]) -> dict[str, Any]:
        """Of a file that has entries, or by model what an interrupted command measured."""
        if "entries" in content:
            content = {**content, "measured": content["entries"]}
        elif "unfinished" in content:
            content = {**content, "measured": [entry for own in content["unfinished"].values() for entry in own]}
        return content

    def notes(self, rows: Sequence[Row], records: Sequence[Case], settings: Mapping[str, Any]) -> str:
        """How many predictions are good."""
        within = sum(abs(record.get("error", float("inf"))) <= TARGET for record in records)
        return f"{within} of {len(records)} times are predicted within {TARGET:g} %."


def column(key: str, scale: float, form: str) -> Any:
    """A cell of a number of the record."""
    return lambda row: f"{scale * row['records'][0][key]:{form}}"


BENCHMARK = Predicted(
    name="predicted",
    keys=("preset", "prior", "pixels", "images", "pass"),
    only_these_columns=True,
    columns={
        "predicted, ms": column("predicted", 1e3, ".1f"),
        "measured, ms": column("measured", 1e3, ".1f"),
        "over measured, %": column("error", 1, "+.1f"),
        "predicted, MiB": column("predicted_bytes", 2**-20, ".1f"),
        "measured, MiB": column("measured_bytes", 2**-20, ".1f"),
        "memory, %": column("error_bytes", 1, "+.1f"),
    },
    bar=("predicted time over measured, %", lambda row: row["records"][0]["error"]),
)
