"""What the papers claim and what came out here: python -m tasks.claims.page [--check]

Claims are in configs/claims, numbers in the records that they name. docs/claims.md, which has what each paper leads
with, a page and a picture for each paper in docs/claims, and how they were judged, are made of these alone. --check
writes nothing, and fails if a page is not what the records say.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hf_sparseprior.analysis import pictures
from hf_sparseprior.base.files import write_text
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.tables import count_of_seeds, markdown_table
from tasks.claims import commands
from tasks.claims.claim import BUDGETS, TIERS, Claim, Paper, Run, read_papers
from tasks.claims.kinds import (
    FAILS,
    HOLDS,
    NOT_YET,
    OPEN,
    VERDICTS,
    HigherThan,
    Outcome,
    Pairs,
    Ranked,
    Records,
    Untried,
    number_in,
)
from tasks.common.paired import AT_LEAST, FEWEST, POWER, RULE

ROOT = Path(__file__).parents[2]
CLAIMS = Path("configs/claims")
THE_PAPER, FEW, MARGIN = "the paper", f"fewer than {FEWEST} seeds", "the claim's margin"  # of pictures
PAGE, FOLDER = Path("docs/claims.md"), Path("docs/claims")
JUDGING = FOLDER / "judging.md"
WRITTEN_AFTER, MIXED, OLDER = "†", "‡", "§"  # beside a verdict or a number, see the introduction
COLOURS = {HOLDS: "#7a9e48", FAILS: pictures.ACCENT, OPEN: pictures.INK, NOT_YET: "#999999"}
HEADLINES = f"""\
Each row is a claim that a paper leads with, and what came out when we tried it at the scale of two cores: small models
from scratch on small data, or what can be counted and timed. The papers' models and data sets are beyond us, so that
"holds" and "does not hold" are of this scale. [How claims are judged](claims/judging.md), and how many there are of
each kind; {OLDER}: what ran has changed since. These pages are made from records by `python -m tasks.claims.page`."""
INTRODUCTION = f"""\
Each row of these pages is one claim of a paper, and what came out when we tried it, at the scale of two cores. They are
made from records by `python -m tasks.claims.page`; nothing in them is written by hand. Claims, and which runs stand for
them, are in `configs/claims`; those that a paper leads with were chosen by hand (`central` there). Models, schedules
and rows were fixed before they were run, as the history of the repository shows; records that were there before these
pages did not change what stands for a claim. Claims were compared with the papers once more when some rows had been
run: {WRITTEN_AFTER} beside a verdict says that the claim was written when all its runs had a record
(`python -m tasks.claims.history`), and the last section has each test that was changed then. {OLDER} says that what ran
has changed since; "how" says what. Such runs are not repeated for it, and their records stay.

- **{VERDICTS[0]}**, **{VERDICTS[1]}**: significant by our rule. {RULE}
- **{VERDICTS[2]}**: neither is significant.
- **{VERDICTS[3]}**: some of the runs are missing, and a number is of those that are there. **{VERDICTS[4]}**: with the
  reason in place of a number.

Differences are in percentage points, with their interval and the number of seeds. "Detectable" is the
smallest difference that {round(100 * POWER)} of 100 repetitions would find significant (the power), with the spread
that was found; of a row that is to be the best, that from the row where it is largest. With fewer than {FEWEST} seeds
it is "{AT_LEAST}" what the test images or episodes alone allow, to which seeds add; "-" if not even these are recorded,
and of pairs and orders, which so few seeds cannot test. Where rows of two kinds share all other settings, the rule is
applied to the pairs of them in place of seeds. Rank correlations are Spearman's, tested by permutation to one side at
5 %; detectable is the smallest one that passes, and an order does not hold if the opposite order is significant (p near
1). Pairs and rank correlations of trained models need {FEWEST} seeds of each row, too; with fewer, their interval and
p are of those seeds alone. A claim about several differences holds if each is significant, and does not if one is
significant the other way. If no row differed, each difference would be significant the other way with a chance of one
in 40, and one of 19 of them with up to 38 %.
Ranks are by the mean; "significantly" is by the rule.

Runs that share one pretrained model, as Sparsifiner's, differ only in what comes after it, so that their intervals and
"detectable" are of that model. {MIXED}: rows of a seed were trained on different processors, which round differently;
the same run on both differed by up to 0.39 points, 0.15 on average
([where](../tasks/classification/RESULTS.md#fibottention-table-2-with-the-papers-budgets-paired)). Times are
judged by their quartiles over rounds, both of which must be within the bound. A claim of tier A asks for {TIERS["A"]}
seeds. One of tier B asks for one, which tests nothing about trained models and is there as a hint; some have more. The
schedule of `configs/recipes/paired.yaml` was chosen with dense attention alone
([how](../tasks/classification/RESULTS.md#a-model-and-schedule-for-comparisons-of-many-rows)), so if it suits any row
more than the others, it is dense attention.

In the pictures "A > B - m" is the claim that A is at most m points below B. Names in brackets are folders of
records."""

BUDGET = """\
Runs that claims ask for, each counted once, and the hours of one core that training and testing took. The hours are of
all records that claims read, also of more seeds than they ask for, and so are the hours allowed. What comes before a
row (UPop's search, pretraining, teachers, predictors) is in no record, and numbers that are counted, timed or analysed
have no hours."""
CHANGED = """\
## Tests that were changed when their number was known

Each of these was changed because it was not what the paper says, or said more; judge for yourself. Claims that were
added or taken out when rows were known are at the head of each file in `configs/claims`, and in its history."""
Way = tuple[list[str], str]  # names of claims, and how they were tried


def records_of(claim: Claim, root: Path) -> Records:
    """The records of the rows that a claim reads, seeds in order. Rows without any are left out.

    Raises:
        ValueError: for a damaged record.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row, places in claim.numbers().items():
        numbers: list[dict[str, Any]] = []
        for seed, file, key in places:
            number = number_in(root, file, key)
            unit = 1.0 if claim.relative_to is None else number_in(root, file, claim.relative_to)
            if number is not None and unit is not None:
                numbers.append({"seed": seed, "metrics": {claim.metric: number / unit}})
        if numbers:
            found[row] = numbers
    for (_, row, _), record in claim.recorded(root).items():
        found.setdefault(row, []).append(dict(record))
    return found


def outcome(claim: Claim, root: Path) -> Outcome:
    """What came out of a claim; not run yet, with a number if there can be one, until all its runs have a record.

    Raises:
        ValueError: for a damaged record, or one without the claim's metric.
    """
    records = records_of(claim, root)
    for row, runs in records.items():
        if any(run["metrics"].get(claim.metric) is None for run in runs):
            raise ValueError(f"{claim.records}/{row}: a record has no {claim.metric}")
    found = claim.test.judge(records, claim.metric, root)
    files = {root / file for places in claim.numbers().values() for _, file, _ in places}
    missing = claim.runs() - claim.recorded(root).keys()
    if found.verdict != NOT_YET and (missing or not all(file.is_file() for file in files)):
        return replace(found, verdict=NOT_YET)
    if not claim.test.rows or not records:
        return found
    if claim.tier is None:
        return replace(found, ours=found.ours.replace(f"{count_of_seeds(1)})", "counted)"))
    # Other kinds have the rule for seeds in them.
    if isinstance(claim.test, (Pairs, Ranked)) and min(map(len, records.values())) < FEWEST:
        found = replace(found, verdict=OPEN, half_width=None, detectable="-")
    return replace(found, ours=f"{found.ours} {MIXED}") if has_mixed_processors(records) else found


def has_mixed_processors(records: Records) -> bool:
    """Whether rows of a seed were trained on different processors, which round differently."""
    by_seed: dict[int, set[str]] = {}
    for run in (run for runs in records.values() for run in runs):
        if processor := run.get("hardware", {}).get("cpu"):
            by_seed.setdefault(run["seed"], set()).add(processor)
    return any(len(processors) > 1 for processors in by_seed.values())


# ---- text -----------------------------------------------------------------------------------------------------------


def pages(papers: Sequence[Paper], outcomes: Mapping[tuple[str, str], Outcome]) -> dict[Path, str]:
    """The pages in Markdown; outcomes by paper and claim."""
    found = {PAGE: headlines(papers, outcomes), JUDGING: judging(papers, outcomes)}
    found |= {FOLDER / f"{paper.name}.md": paper_text(paper, outcomes) for paper in papers}
    # Links are written as from `PAGE`.
    return {page: text if page == PAGE else text.replace("](../", "](../../") for page, text in found.items()}


def headlines(papers: Sequence[Paper], outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """What the papers lead with."""
    lines = ["# What the papers claim", HEADLINES]
    for paper in papers:
        own = [(claim, outcomes[paper.name, claim.name]) for claim in paper.claims]
        counts = Counter(found.verdict for _, found in own)
        verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        central = [(claim, found) for claim, found in own if claim.name in paper.central]
        rows = [[claim.where, claim.claim, claim.paper, found.ours, _verdict(claim, found)] for claim, found in central]
        lines.append(f"## {paper.title}")
        if rows:
            lines.append(_escaped(("where", "claim", "the paper's number", "ours", "verdict"), rows))
        lines.append(f"[All {len(own)} claims]({FOLDER.name}/{paper.name}.md): {verdicts}.")
    return "\n\n".join(lines) + "\n"


def paper_text(paper: Paper, outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """All claims of a paper, and how each was tried."""
    ways = _ways(paper)
    lines = [f"# {paper.title}", paper.source, "[How claims are judged](judging.md)", _table(paper, outcomes, ways)]
    if _drawn(paper, outcomes):
        lines.append(f"![{paper.title}: the paper's differences and ours]({picture_name(paper).name})")
    return "\n\n".join([*lines, "## How it was tried", _how(paper, ways)]) + "\n"


def judging(papers: Sequence[Paper], outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """How claims are judged, how many there are, what they cost, and which were changed."""
    lines = ["# How claims are judged", INTRODUCTION, overview(papers, outcomes), BUDGET, costs(papers, ROOT)]
    if changed := _changed(papers, outcomes):
        lines += [CHANGED, changed]
    return "\n\n".join(lines) + "\n"


def _changed(papers: Iterable[Paper], outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    rows = []
    for paper in papers:
        for claim in (claim for claim in paper.claims if claim.changed is not None):
            verdict = _verdict(claim, outcomes[paper.name, claim.name])
            rows.append([paper.title, claim.where, claim.claim, str(claim.changed), verdict])
    return _escaped(("paper", "where", "claim", "what was changed, and the verdict before", "verdict now"), rows)


def overview(papers: Iterable[Paper], outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """How many claims of each paper, by what they were judged by, have which verdict, as a Markdown table."""
    rows = []
    for paper in papers:
        for kind in dict.fromkeys(JUDGED_BY.values()):
            own = [claim for claim in paper.claims if judged_by(claim) == kind]
            counts = Counter(outcomes[paper.name, claim.name].verdict for claim in own)
            if own:
                rows.append([paper.title, kind, str(len(own)), *(str(counts[verdict]) for verdict in VERDICTS)])
    return markdown_table(("paper", "judged by", "claims", *VERDICTS), rows)


# By whether a claim reads rows, and whether these are runs of a task.
JUDGED_BY = {
    (True, True): "accuracy of trained models",
    (True, False): "rows of an analysis",
    (False, False): "one number, counted, timed or measured",
    "fitted": "one number, with a setting fitted to such numbers",
    None: "not tried",
}


def judged_by(claim: Claim) -> str:
    """By what kind of evidence a claim is judged: a value of `JUDGED_BY`."""
    if isinstance(claim.test, Untried):
        return JUDGED_BY[None]
    if claim.fitted is not None:
        return JUDGED_BY["fitted"]
    return JUDGED_BY[bool(claim.test.rows), claim.task is not None]


def costs(papers: Iterable[Paper], root: Path) -> str:
    """How many runs each tier asks for and has, and how long those took that it reads, as a Markdown table."""
    claims = [claim for paper in papers for claim in paper.claims]
    asked_before: set[Run] = set()
    read_before: set[Run] = set()
    rows = []
    for tier, seeds in TIERS.items():
        own = [claim for claim in claims if claim.tier == tier]
        asked = {run for claim in own for run in claim.runs()} - asked_before
        read = {run: record for claim in own for run, record in claim.recorded(root).items()}
        hours = core_hours(read[run] for run in sorted(read.keys() - read_before))
        recorded = len(asked & read.keys())
        rows.append([tier, str(seeds), str(BUDGETS[tier]), str(len(asked)), str(recorded), f"{hours:.1f}"])
        asked_before |= asked
        read_before |= read.keys()
    return markdown_table(("tier", "seeds", "hours allowed", "runs", "recorded", "hours taken"), rows)


def core_hours(runs: Iterable[Mapping[str, Any]]) -> float:
    """Hours of one core that recorded runs took."""
    return sum(run["seconds"] * run["hardware"]["cpu_threads"] for run in runs) / 3600


def _verdict(claim: Claim, found: Outcome) -> str:
    marks = {WRITTEN_AFTER: claim.written, OLDER: claim.older}
    return " ".join([f"**{found.verdict}**", *(mark for mark, said in marks.items() if said is not None)])


def _escaped(header: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return markdown_table(header, [[cell.replace("|", "\\|") for cell in row] for row in rows])


def _table(paper: Paper, outcomes: Mapping[tuple[str, str], Outcome], ways: Sequence[Way]) -> str:
    rows, places = [], {name: n for n, (names, _) in enumerate(ways, 1) for name in names}
    for claim in paper.claims:
        found, place = outcomes[paper.name, claim.name], places.get(claim.name)
        how = "-" if place is None else f"[{place}](#{_anchor(paper, place)})"
        cells = (found.ours, found.detectable, claim.tier or "-", _verdict(claim, found), how)
        rows.append((claim.where, claim.claim, claim.paper, *cells))
    return _escaped(("where", "claim", "the paper's number", "ours", "detectable", "tier", "verdict", "how"), rows)


def _anchor(paper: Paper, place: int) -> str:
    return f"{paper.name}-{place}"


def _how(paper: Paper, ways: Sequence[Way]) -> str:
    """A numbered line for each way in which claims were tried, to which the table links."""
    lines = [f'{n}. <a id="{_anchor(paper, n)}"></a>{line}' for n, (_, line) in enumerate(ways, 1)]
    return "\n".join(lines) or "Nothing of it was tried."


def _ways(paper: Paper) -> list[Way]:
    """Claims that were tried in one way, by name, and the way: where they stand, what is reduced, command, records."""
    groups: dict[tuple[str | None, ...], list[Claim]] = {}
    for claim in paper.claims:
        if not isinstance(claim.test, Untried):
            way = (claim.config, claim.task, claim.record, claim.reduced, claim.fitted, claim.older)
            groups.setdefault(way, []).append(claim)
    ways = []
    for (config, task, record, reduced, fitted, older), claims in groups.items():
        places = ", ".join(dict.fromkeys(place for claim in claims for place in claim.where.split(", ")))
        each = ""
        if claims[0].has_file_for_each_seed:
            each, record = f" for each seed of 0 to {claims[0].seeds - 1}", claims[0].files()[0][1]
        command = f" `python -m {config}`{each}." if config else ""
        if task is not None:
            rows: dict[str, set[int]] = {}
            for claim in claims:
                rows |= {row: rows.get(row, set()) for row in claim.test.rows}
                for _, row, seed in claim.runs() | claim.recorded(ROOT).keys():
                    rows[row].add(seed)
            commands_of = compare_commands(task, str(config), str(record), rows)
            command = f" {', '.join(f'`{line}`' for line in commands_of)}."
        table = f"{record}/table.md" if task is not None else str(record)
        link = f" [Records](../{table})." if (ROOT / table).is_file() else ""
        parts = (reduced, fitted and f"With {fitted} fitted", older and f"Since these runs {older}")
        what = "".join(f" {part}." for part in parts if part)
        ways.append(([claim.name for claim in claims], f"{places}:{what}{command}{link}"))
    return ways


def compare_commands(task: str, config: str, records: str, rows: Mapping[str, Iterable[int]]) -> list[str]:
    """The commands that run rows of a comparison, each with its seeds, and go on where they were stopped."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for row, seeds in rows.items():
        alike.setdefault(tuple(sorted(seeds)), []).append(row)
    compare = f"python -m tasks.{task}.compare --jobs 2 --config {config} --records {records}"
    return [f"{compare} --seeds {' '.join(map(str, seeds))} --variants {' '.join(own)}" for seeds, own in alike.items()]


# ---- picture --------------------------------------------------------------------------------------------------------


def picture_name(paper: Paper) -> Path:
    """A paper's picture, next to its page."""
    return FOLDER / f"{paper.name}.png"


def _drawn(paper: Paper, outcomes: Mapping[tuple[str, str], Outcome]) -> list[tuple[Claim, Outcome]]:
    found = [(claim, outcomes[paper.name, claim.name]) for claim in paper.claims]
    # Numbers of an analysis have units of their own.
    return [(claim, one) for claim, one in found if one.mean is not None and claim.keys is None]


def _labels(claims: Sequence[Claim]) -> list[str]:
    """Where the paper says it, what is compared, and the folder of records; the metric where that is not unique."""
    labels = []
    for claim in claims:
        test, compared = claim.test, claim.name.partition("-")[2] or claim.name
        if isinstance(test, HigherThan):
            higher, lower = (f"rate {row}" if row[0].isdigit() else row for row in (test.higher, test.lower))
            compared = f"{higher} > {lower}" + (f" - {test.margin:g}" if test.margin else "")
        labels.append(f"{claim.where}: {compared} ({Path(claim.records or '').name})")
    often = Counter(labels)
    for place, claim in enumerate(claims):
        if often[labels[place]] > 1:
            labels[place] = f"{labels[place][:-1]}, {claim.metric.removeprefix('test_')})"
    return labels


def picture_numbers(paper: Paper, outcomes: Mapping[tuple[str, str], Outcome]) -> str:
    """A checksum of what a paper's picture shows, which its file holds as "Description"."""
    drawn = _drawn(paper, outcomes)
    labels = _labels([claim for claim, _ in drawn])
    shown = []
    for (claim, found), label in zip(drawn, labels, strict=True):
        numbers = (found.mean, found.half_width, found.paper, getattr(claim.test, "margin", 0.0))
        rounded = [None if number is None else f"{number:.3f}" for number in numbers]
        shown.append((label, claim.task, found.verdict, *rounded))
    return f"sha256 {hashlib.sha256(repr(shown).encode()).hexdigest()}"


def is_of_these_numbers(path: Path, paper: Paper, outcomes: Mapping[tuple[str, str], Outcome]) -> bool:
    """Whether a file is the picture that `draw` would make, by the numbers that it was made from."""
    if not _drawn(paper, outcomes):
        return not path.exists()
    if not path.is_file():
        return False
    with Image.open(path) as image:
        return image.info.get("Description") == picture_numbers(paper, outcomes)


def draw(paper: Paper, outcomes: Mapping[tuple[str, str], Outcome], path: Path) -> Path | None:
    """Differences of a paper's claims, ours with their intervals and the paper's, a panel for each task; None if there
    is none.
    """
    drawn = _drawn(paper, outcomes)
    if not drawn:
        return None
    names = dict(zip((claim.name for claim, _ in drawn), _labels([claim for claim, _ in drawn]), strict=True))
    panels: dict[str, list[tuple[Claim, Outcome]]] = {}
    for claim, found in drawn:
        panels.setdefault(claim.task or "", []).append((claim, found))
    plt = pictures.pyplot()
    heights = [len(shown) + 2 for shown in panels.values()]
    figure, axes = plt.subplots(
        len(panels),
        **{"figsize": (9.0, 1.2 + 0.2 * sum(heights)), "layout": "constrained", "squeeze": False},
        height_ratios=heights,
    )
    marks: dict[str, Any] = {}
    for axis, (task, shown) in zip(axes[:, 0], panels.items(), strict=True):
        axis.axvline(0, color=pictures.INK, linewidth=0.8)
        for place, (claim, found) in enumerate(shown):
            wide = found.half_width
            mark = axis.errorbar(
                *([found.mean], [place]),
                xerr=None if wide is None else [wide],
                **{"fmt": "o" if wide is not None else "x", "color": COLOURS[found.verdict]},
                **{"capsize": 2.5, "markersize": 4.5},
            )
            marks.setdefault(found.verdict if wide is not None else FEW, mark)
            if found.paper is not None:
                mark = axis.plot([found.paper], [place], "D", color="#e0a030", markersize=4.5, zorder=0)[0]
                marks.setdefault(THE_PAPER, mark)
            if margin := getattr(claim.test, "margin", 0.0):
                mark = axis.plot([-margin], [place], "|", color=pictures.INK, markersize=9)[0]
                marks.setdefault(MARGIN, mark)
        axis.set_yticks(range(len(shown)), [names[claim.name] for claim, _ in shown], fontsize=7)
        axis.set_ylim(len(shown) - 0.5, -0.5)
        axis.set_title(task, fontsize=8, loc="left")
        _widen(axis, [max(abs(each or 0.0) for each in (found.mean, found.paper)) for _, found in shown])
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.25)
    note = "percentage points; the claim says above 0, or above its margin"
    axes[-1, 0].set_xlabel("\n".join(filter(None, (axes[-1, 0].get_xlabel(), note))), fontsize=9)
    figure.suptitle(paper.title, fontsize=10)
    legend = {label: marks[label] for label in (THE_PAPER, *VERDICTS, FEW, MARGIN) if label in marks}
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return pictures.save(figure, path, {"Description": picture_numbers(paper, outcomes)})


def _widen(axis: Any, reached: Sequence[float]) -> None:
    """Make the scale logarithmic beyond 2 points where few rows reach far, so that the others can be seen.

    reached: how far each row is from 0, in points.
    """
    if max(reached) > 10 and np.quantile(reached, 0.8) < max(reached) / 3:
        axis.set_xscale("symlog", linthresh=2, linscale=1.5)
        low, high = axis.get_xlim()
        ticks = [tick for tick in (-20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20) if low <= tick <= high]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xlabel("logarithmic beyond 2 points", fontsize=7)


# ---- command --------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.page()
    arguments = parser.parse_args(argv)

    def work() -> None:
        papers = read_papers(ROOT / CLAIMS)
        outcomes = {(paper.name, claim.name): outcome(claim, ROOT) for paper in papers for claim in paper.claims}
        new = pages(papers, outcomes)
        if arguments.check:
            for page, text in new.items():
                if not (ROOT / page).is_file() or (ROOT / page).read_text(encoding="utf-8") != text:
                    raise ValueError(f"{page} is not what the records say; run python -m tasks.claims.page")
            for paper in papers:
                if not is_of_these_numbers(ROOT / picture_name(paper), paper, outcomes):
                    raise ValueError(f"{picture_name(paper)} is not of the records; run python -m tasks.claims.page")
            return
        (ROOT / FOLDER).mkdir(exist_ok=True)
        for page, text in new.items():
            write_text(ROOT / page, text)
        for paper in papers:
            if draw(paper, outcomes, picture := ROOT / picture_name(paper)) is None:
                picture.unlink(missing_ok=True)
        print(f"{overview(papers, outcomes)}\n\n{PAGE}")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
