"""What the claims still need to be run: python -m tasks.claims.todo [--tier A]

Prints `compare` commands for each comparison of configs/claims some of whose runs have no record, with the rows and
seeds that are missing. Each command goes on where it was stopped, and several may be given at once. Without --tier,
then the commands that count, time or analyse, whose record is missing. Some read models that runs left in outputs; if a
run has a record but no model here, `compare --records EMPTY_FOLDER` makes the model again. The last lines, on stderr,
say how many runs there are and how long they would take.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hf_sparseprior.runs.command import run_command
from tasks.claims import commands
from tasks.claims.claim import Paper, read_papers
from tasks.claims.kinds import OfRecord, number_in
from tasks.claims.page import CLAIMS, ROOT, compare_commands, core_hours
from tasks.common.records import read_records

Place = tuple[str, str, str]


def missing(papers: list[Paper], root: Path, tier: str | None = None) -> dict[Place, dict[str, set[int]]]:
    """By (task, config, records): the seeds that each row lacks, of 0 to the claim's number of them."""
    found: dict[Place, dict[str, set[int]]] = {}
    for claim in (claim for paper in papers for claim in paper.claims if tier in (None, claim.tier)):
        for records, row, seed in sorted(claim.runs() - claim.recorded(root).keys()):
            assert claim.task is not None and claim.config is not None
            found.setdefault((claim.task, claim.config, records), {}).setdefault(row, set()).add(seed)
    return found


def hours(found: dict[Place, dict[str, set[int]]], root: Path) -> tuple[float, int]:
    """Hours of one core that missing runs would take by the records next to them, of the same row or else of the mean
    row, and how many runs have none next to them and are not in the hours.
    """
    total, unknown = 0.0, 0
    for (_, _, records), rows in found.items():
        kept = read_records(root / records)
        known = {row: core_hours(runs.values()) / len(runs) for row, runs in kept.items()}
        for row, seeds in rows.items():
            if known:
                total += len(seeds) * known.get(row, sum(known.values()) / len(known))
            else:
                unknown += len(seeds)
    return total, unknown


def missing_analyses(papers: list[Paper], root: Path) -> list[str]:
    """Commands whose record is not there, of claims that read numbers of files."""
    claims = [claim for paper in papers for claim in paper.claims]
    files = [(command, (root / record).is_file()) for claim in claims for command, record in claim.files()]
    for claim in claims:  # a file of records may lack the one run that is read
        if isinstance(claim.test, OfRecord):
            files.append((claim.config, number_in(root, claim.test.record, claim.test.key) is not None))
    return list(dict.fromkeys(f"python -m {command}" for command, is_there in files if command and not is_there))


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.todo()
    arguments = parser.parse_args(argv)

    def work() -> None:
        papers = read_papers(ROOT / CLAIMS)
        found = missing(papers, ROOT, arguments.tier)
        for (task, config, records), rows in found.items():
            print("\n".join(compare_commands(task, config, records, rows)))
        for command in missing_analyses(papers, ROOT) if arguments.tier is None else ():
            print(command)
        runs = sum(len(seeds) for rows in found.values() for seeds in rows.values())
        took, unknown = hours(found, ROOT)
        print(f"{runs} runs in {len(found)} comparisons are missing", file=sys.stderr)
        if runs:
            others = f", and {unknown} runs in folders without a record" if unknown else ""
            print(f"some {took:.1f} hours of one core, by the records next to them{others}", file=sys.stderr)

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
