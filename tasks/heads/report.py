"""Train every head once and write the table: python -m tasks.heads.report [--config FILE] [--runs DIR] [--out DIR]

Each run is a process of its own. One that was interrupted goes on, and one that is recorded is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.files import write_text
from tasks.common.command import run_command
from tasks.common.config import read_cells
from tasks.common.results import read_results
from tasks.common.run_folder import RESULTS, default_output_dir
from tasks.heads.kinds import KINDS

SMOKE = Path("configs/heads/smoke.yaml")
OUT = Path(__file__).parent / "results"
KEPT = ("head", "prior", "seed", "steps", "parameters", "seconds", "data", "versions", "hardware", "metrics", "history")


def record(config: str, run: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train one head in a process of its own. Returns its record: KEPT of its results, and `peak_mib` of the process.

    Raises:
        ValueError: if the training fails; its own line says why.
    """
    command = [sys.executable, "-m", "tasks.heads.train", "--config", config, f"trainer.output_dir={run}", *overrides]
    process = subprocess.Popen(command)
    try:
        _, status, used = os.wait4(process.pid, 0)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status:
        raise ValueError(f"{config} ended with exit status {os.waitstatus_to_exitcode(status)}")
    results = read_results(run / RESULTS)
    kept = {name: results[name] for name in KEPT}
    constant = {name: value for name, value in results.items() if name.startswith("constant_")}
    return {**kept, **constant, "config": config, "peak_mib": round(used.ru_maxrss / 1024)}


def table(records: Sequence[dict[str, Any]]) -> str:
    """A row for each record."""
    rows = ["| head | metric | test | best constant predictor | steps | seconds | memory MiB |", "|---" * 7 + "|"]
    for found in records:
        metric = KINDS[found["head"]].metric
        test, constant = found["metrics"][f"test_{metric}"], found[f"constant_{metric}"]
        cells = (f"`{found['head']}`", metric, f"{test:.3f}", f"{constant:.3f}", found["steps"])
        rows.append(f"| {' | '.join(map(str, cells))} | {found['seconds']:.0f} | {found['peak_mib']} |")
    return "\n".join(rows) + "\n"


def report(config: Path, runs: Path, out: Path, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Train what is not recorded in `out` yet, and write the table there.

    Raises:
        ValueError: for a training that fails.
    """
    records, names = [], [cell for cell in read_cells(config) if cell]
    for cell in names:
        file = out / config.stem / f"{cell}.json"
        if not file.is_file():
            found = record(f"{config}#{cell}", runs / f"{config.stem}_{cell}", overrides)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(found, indent=1) + "\n")
        records.append(json.loads(file.read_text()))
        write_text(out / f"{config.stem}.md", table(records))
    return records


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = argparse.ArgumentParser(prog="python -m tasks.heads.report", description="Train every head once; a table.")
    parser.add_argument("--config", type=Path, default=SMOKE, help=f"YAML file whose cells are heads, default {SMOKE}")
    runs = Path(default_output_dir("heads", SMOKE)).parent
    parser.add_argument("--runs", type=Path, default=runs, help=f"folder of the runs, default {runs}")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder of records and table, default tasks/heads/results"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.path=DIR")
    arguments = parser.parse_intermixed_args(argv)

    def work() -> None:
        report(arguments.config, arguments.runs, arguments.out, arguments.overrides)
        print((arguments.out / f"{arguments.config.stem}.md").read_text(), end="")

    return run_command(parser.prog, work, "with the runs that are not recorded")


if __name__ == "__main__":
    sys.exit(main())
