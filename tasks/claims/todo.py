"""What the claims still need to be run: python -m tasks.claims.todo [--tier A]

Prints a `compare` command for each comparison of configs/claims some of whose runs have no record, with the rows and
seeds that are missing. Each command goes on where it was stopped, and several may be given at once. Without --tier,
then the commands that count, time or analyse, whose record is missing; some read what the runs left in outputs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.claims import commands
from tasks.claims.claim import Paper, read_papers
from tasks.claims.page import CLAIMS, ROOT, compare_command
from tasks.common.command import run_command

Place = tuple[str, str, str]


def missing(papers: list[Paper], root: Path, tier: str | None = None) -> dict[Place, dict[str, set[int]]]:
    """By (task, config, records): the seeds that each row lacks, of 0 to the claim's number of them."""
    found: dict[Place, dict[str, set[int]]] = {}
    for claim in (claim for paper in papers for claim in paper.claims if tier in (None, claim.tier)):
        for (row, seed), run in claim.runs(root).items():
            if not run.is_file():
                assert claim.task is not None and claim.config is not None and claim.records is not None
                place = (claim.task, claim.config, claim.records)
                found.setdefault(place, {}).setdefault(row, set()).add(seed)
    return found


def missing_analyses(papers: list[Paper], root: Path) -> list[str]:
    """Commands whose record is not there, of claims that read numbers of one file."""
    found = []
    for claim in (claim for paper in papers for claim in paper.claims):
        record = claim.records if claim.keys is not None else getattr(claim.test, "record", None)
        if claim.config is not None and record is not None and not (root / record).is_file():
            found.append(f"python -m {claim.config}")
    return list(dict.fromkeys(found))


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.todo()
    arguments = parser.parse_args(argv)

    def work() -> None:
        papers = read_papers(ROOT / CLAIMS)
        found = missing(papers, ROOT, arguments.tier)
        for (task, config, records), rows in found.items():
            seeds = sorted(set.union(*rows.values()))
            print(compare_command(task, config, records, seeds, rows))
        for command in missing_analyses(papers, ROOT) if arguments.tier is None else ():
            print(command)
        runs = sum(len(seeds) for rows in found.values() for seeds in rows.values())
        print(f"{runs} runs in {len(found)} comparisons are missing", file=sys.stderr)

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
