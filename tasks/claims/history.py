"""Which claims were written after their rows were run: python -m tasks.claims.history [--check]

The history of the repository has when a claim first stood in configs/claims, and when each record was first committed.
A claim whose rows were all recorded by then, with all the seeds that it asks for, was written with its number known.
Claims of configs/claims say so in `written: after its rows`, and docs/claims.md marks them. Prints their names; --check
fails if other claims say so than the history has. Claims that read no rows of a comparison have no such mark: what is
counted or timed comes out alike whenever it is written down.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from hf_sparseprior.runs.command import run_command
from tasks.claims import commands
from tasks.claims.claim import AFTER, Paper, Run, read_papers
from tasks.claims.page import CLAIMS, ROOT
from tasks.common.git import git
from tasks.common.records import OLD, RECORDS, ROW, SEED

LAST = sys.maxsize
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has libyaml


def first_written(root: Path, order: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """By paper and claim, the place in the history at which it first stood in configs/claims."""
    found: dict[tuple[str, str], int] = {}
    for commit, file in written_files(root, "AM", f"{CLAIMS}/*.yaml"):
        for name in _claims_of(git(root, "show", f"{commit}:{file}")):
            found.setdefault((Path(file).stem, name), order[commit])
    return found


def _claims_of(text: str) -> list[str]:
    """Names in a file of claims as it once was; none if it was not one."""
    try:
        content = yaml.load(text, LOADER)
    except yaml.YAMLError:
        return []
    claims = content.get("claims") if isinstance(content, dict) else None
    return list(claims) if isinstance(claims, dict) else []


def first_recorded(root: Path, order: Mapping[str, int]) -> dict[Run, int]:
    """By run, the place in the history at which its record was first there.

    Until there was records.jsonl, a record was FOLDER/ROW/seedN.json.
    """
    found: dict[Run, int] = {}
    for commit, file in written_files(root, "A", "*/seed*.json"):
        if OLD.fullmatch(Path(file).name):
            row, seed = Path(file).parent, int(Path(file).stem.removeprefix("seed"))
            found.setdefault((str(row.parent), row.name, seed), order[commit])
    for commit, file in written_files(root, "AM", f"*/{RECORDS}"):
        for line in git(root, "show", f"{commit}:{file}").splitlines()[1:]:
            record = json.loads(line)
            run = (str(Path(file).parent), record[ROW], record[SEED])
            found[run] = min(found.get(run, LAST), order[commit])
    return found


def written_files(root: Path, how: str, pattern: str) -> Iterator[tuple[str, str]]:
    """Commits, oldest first, and the files that each of them added (`how` "A") or changed, too ("AM")."""
    options = (f"--diff-filter={how}", "--no-renames", "--name-only", "--format=@%H")
    commit = ""
    for line in git(root, "log", "--reverse", *options, "--", pattern).splitlines():
        if line.startswith("@"):
            commit = line[1:]
        elif line:
            yield commit, line


def places(root: Path) -> dict[str, int]:
    """Place of each commit in the history, the first one 0.

    Raises:
        ValueError: if the clone is shallow.
    """
    if git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        raise ValueError(f"{root} is a shallow clone; git fetch --unshallow gets its history")
    return {commit: place for place, commit in enumerate(git(root, "rev-list", "--reverse", "HEAD").split())}


def written_after(papers: list[Paper], root: Path) -> list[tuple[str, str]]:
    """Paper and claim of all claims that first stood there when all their runs had a record.

    One that is in no commit yet is written last.
    """
    order = places(root)
    written, recorded = first_written(root, order), first_recorded(root, order)
    found = []
    for paper in papers:
        for claim in paper.claims:
            runs = claim.runs()
            known = [recorded[run] for run in runs if run in recorded]
            if runs and len(known) == len(runs) and written.get((paper.name, claim.name), LAST) > max(known):
                found.append((paper.name, claim.name))
    return found


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.history()
    arguments = parser.parse_args(argv)

    def work() -> None:
        papers = read_papers(ROOT / CLAIMS)
        found = written_after(papers, ROOT)
        if not arguments.check:
            print("\n".join(f"{paper} {name}" for paper, name in found))
            return
        said = {(paper.name, claim.name) for paper in papers for claim in paper.claims if claim.written is not None}
        if wrong := sorted(said ^ set(found)):
            paper, name = wrong[0]
            least = "should not say" if wrong[0] in said else "does not say"
            raise ValueError(f"{CLAIMS}/{paper}.yaml, {name} {least} written: {AFTER} ({len(wrong)} such claims)")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
