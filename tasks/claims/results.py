"""All comparisons of this repository on one page, docs/results.md: python -m tasks.claims.results [--check]

What each one compares is in configs/results.yaml; numbers are those of the table.md beside its records. --check writes
nothing, and fails if the page is not what these say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.config import read_yaml
from hf_sparseprior.runs.tables import markdown_table
from tasks.claims import commands
from tasks.claims.page import ROOT, compare_commands
from tasks.common.records import RECORDS, Record, read_records

COMPARISONS = Path("configs/results.yaml")
PAGE = Path("docs/results.md")
# Of table.md, which has them for who wants to know more.
LEFT_OUT = ("parameters", "ms a step", "seconds a run", "standard error of one seed", "points, by seed")
# Tasks whose records have a page of their own, with groups of runs at equal time.
ELSEWHERE = ("canvases",)
# The page's order, and what it says of each task.
TASKS = {
    "classification": "images: training from scratch, fine-tuning, compression",
    "segmentation": "UPerNet in mmsegmentation",
    "detection": "Mask R-CNN in mmdetection",
    "heads": "heads of transformers for boxes and masks",
    "video": "TimeSformer on clips",
    "robotics": "diffusion policies",
    "pretraining": "DINO",
}
INTRODUCTION = """\
# Results

Every comparison that has records, by task. Models are small and were trained on small data with two cores, so results
are of this scale. `python -m tasks.claims.results` makes this page from the records.

- **A comparison** trains several rows on the same data, with the same seeds, and judges them on the same test data.
- **A row** is a model with one prior, or another setting that is compared. The first table of a comparison has the
  metric of each row, in percent, mean ± standard deviation over seeds.
- **A difference** is a row minus the first row, or minus the row that its table names, seed by seed: in points, mean ±
  standard error. It is significant if 0 is outside its 95 % interval over three or more seeds, otherwise not
  significant; with fewer seeds there is no verdict. [How differences and claims are judged](claims/judging.md).
- **Below the tables**: "in words" is a text about the comparison; "full table" has each seed, parameters and times too.

Elsewhere: [which prior for which problem](choose.md), [results in words](results-in-words.md), [what the papers claim
and whether it holds here](claims.md), [times, memory and throughput](../tasks/benchmark/RESULTS.md), [large images at
equal time](../tasks/canvases/results/cpu/table.md), [a dense model made
sparse](../tasks/classification/RESULTS.md#a-dense-model-made-sparse-on-larger-images)."""


@dataclass(frozen=True)
class Compared:
    """A folder of records. what: what is compared. text: file and anchor of its text.

    config: of its rows; None if today's code makes other runs.
    """

    folder: Path
    what: str
    text: str
    config: str | None = None

    @property
    def task(self) -> str:
        """The task that its runs are of."""
        return self.folder.parts[1]

    @property
    def name(self) -> str:
        """The folder below those of all results of its task."""
        return self.folder.relative_to(Path("tasks", self.task, "results")).as_posix()

    @property
    def anchor(self) -> str:
        """Where the page has it."""
        return f"{self.task}-{self.name.replace('/', '-')}"


def read_comparisons(root: Path) -> list[Compared]:
    """All comparisons, in the order of configs/results.yaml.

    Raises:
        ValueError: if a folder of records has no entry there (but for `ELSEWHERE`), an entry no folder, or a task no
            line in `TASKS`.
    """
    entries = read_yaml(root / COMPARISONS)
    found = [path.parent.relative_to(root) for path in (root / "tasks").glob(f"*/results/**/{RECORDS}")]
    folders = {folder.as_posix() for folder in found if folder.parts[1] not in ELSEWHERE}
    if differing := sorted(folders ^ set(entries)):
        which = "no entry" if differing[0] in folders else "no records"
        raise ValueError(f"{COMPARISONS}: {differing[0]} has {which}")
    comparisons = [Compared(Path(folder), **entry) for folder, entry in entries.items()]
    if unknown := {one.task for one in comparisons} - {*TASKS}:
        raise ValueError(f"{COMPARISONS}: the task {min(unknown)!r} must be one of {', '.join(TASKS)}")
    return comparisons


def results_page(root: Path) -> str:
    """docs/results.md."""
    comparisons = read_comparisons(root)
    records = {one.folder: read_records(root / one.folder) for one in comparisons}
    tasks = sorted({one.task for one in comparisons}, key=list(TASKS).index)
    lines = [INTRODUCTION, "## Tasks", _contents(comparisons, records, tasks)]
    for task in tasks:
        of_task = [one for one in comparisons if one.task == task]
        lines += [f"## {task}", _index(of_task, records)]
        lines += [_section(one, records[one.folder], root) for one in of_task]
    return "\n\n".join(lines) + "\n"


Runs = Mapping[str, Mapping[int, Record]]


def _contents(comparisons: list[Compared], records: Mapping[Path, Runs], tasks: list[str]) -> str:
    rows = []
    for task in tasks:
        own = [records[one.folder] for one in comparisons if one.task == task]
        count = sum(len(seeds) for runs in own for seeds in runs.values())
        rows.append([f"[{task}](#{task})", TASKS[task], str(len(own)), str(count)])
    return markdown_table(("task", "what", "comparisons", "runs"), rows)


def _index(comparisons: list[Compared], records: Mapping[Path, Runs]) -> str:
    rows = []
    for one in comparisons:
        runs = records[one.folder]
        rows.append([f"[{one.name}](#{one.anchor})", one.what, str(len(runs)), _seeds(runs)])
    return markdown_table(("comparison", "what", "rows", "seeds"), rows)


def _seeds(runs: Mapping[str, Mapping[int, Record]]) -> str:
    counts = sorted({len(seeds) for seeds in runs.values()})
    return " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))


def _section(one: Compared, runs: Mapping[str, Mapping[int, Record]], root: Path) -> str:
    own = [record for seeds in runs.values() for record in seeds.values()]
    data = "; ".join(dict.fromkeys(str(record["data"]) for record in own))
    machines = "; ".join(dict.fromkeys(_hardware(record) for record in own))
    lines = [
        f'<a id="{one.anchor}"></a>\n### {one.task}: {one.name}',
        f"{one.what}. Data: {data}. Hardware: {machines}.",
    ]
    if seconds := [record["seconds"] for record in own if record.get("seconds") is not None]:
        lines[-1] += f" {len(own)} runs, {np.median(seconds):.0f} s each (median)."
    if one.config is not None:
        lines.append("```bash\n" + "\n".join(compare_commands(one.task, one.config, str(one.folder), runs)) + "\n```")
    table, picture = one.folder / "table.md", one.folder / "results.png"
    links = [f"[In words](../{one.text})"]
    if (root / table).is_file():
        lines += short_tables((root / table).read_text(encoding="utf-8"))
        links.append(f"[full table](../{table.as_posix()})")
    if (root / picture).is_file():
        links.append(f"[picture](../{picture.as_posix()})")
    return "\n\n".join([*lines, ", ".join(links) + "."])


def _hardware(record: Record) -> str:
    hardware = record["hardware"]
    threads = hardware.get("cpu_threads")
    return hardware.get("cpu", "CPU (not recorded which)") + (f", {threads} threads" if (threads or 1) > 1 else "")


def short_tables(text: str) -> list[str]:
    """The tables of a table.md without the columns `LEFT_OUT`, each with the line that names its metric.

    Differences name the row that is taken away in the first column, which `LEFT_OUT` would lose.
    """
    parts = []
    for block in re.split(r"\n{2,}", text.strip()):
        if block.endswith(":") and "\n" not in block:
            parts.append(block)
        if not block.startswith("|"):
            continue
        first, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines())
        if minus := re.search(r"minus (.*), points, by seed", " ".join(first)):
            first[0] = f"minus {minus[1]}"
        kept = [place for place, name in enumerate(first) if not any(part in name for part in LEFT_OUT)]
        parts.append(markdown_table([first[place] for place in kept], [[row[place] for place in kept] for row in rows]))
    return parts


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.results()
    arguments = parser.parse_args(argv)

    def work() -> None:
        text = results_page(ROOT)
        if not arguments.check:
            write_text(ROOT / PAGE, text)
        elif not (ROOT / PAGE).is_file() or (ROOT / PAGE).read_text(encoding="utf-8") != text:
            raise ValueError(f"{PAGE} is not what the records say; run {parser.prog}")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
