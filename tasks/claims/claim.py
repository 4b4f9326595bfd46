"""The claims of a paper, as configs/claims/PAPER.yaml has them.

    title: Fibottention
    source: what the paper is called
    central: [table2-dense]               what the paper leads with, and the page too
    older: {"what changed": [FOLDER]}     optional: records of runs that are older than a change to what they ran
    claims:
      table2-dense:                       place and a word
        where: Table 2
        claim: one sentence
        paper: the paper's numbers, as printed
        tier: A                           five seeds; B: fewer
        test: {difference: {higher: fibottention, lower: dense, paper: 7.6}}
        config: configs/experiments/fib_table2.yaml#paired
        task: classification
        records: tasks/classification/results/fib_table2_paired
        metric: test_accuracy             the default
        reduced: what is smaller than in the paper
        changed: how the test was changed when its number was known, and what the verdict had been
        written: after its rows           if all its runs had a record when it was written (tasks/claims/history.py)

A `test` is one of the classes of tasks/claims/kinds.py by its name there, or `untried: why`. A claim that is untried
has no config, task, records, metric, tier or reduced. One that reads a number (`value`, `bound`) may have a config,
which is then what wrote the record, as a command's words, and `fitted`, the setting that was chosen so that such
numbers come out.

Rows need not be those of a comparison. With `keys` they are numbers of a file, `records`, which the command of
`config` wrote; there is no task then. Keys of a row are one for each seed, in the same order in all rows:

        config: tasks.analysis.diversity outputs/... --out tasks/analysis/results/diversity
        records: tasks/analysis/results/diversity/diversity.json
        keys: {fibottention: [models/0/last_layer/diversity/median], dense: [models/1/last_layer/diversity/median]}

With `relative_to`, a key of that file, all of them are divided by the number there. If `records` and `config` have
{seed}, there is a file and a command for each seed that the tier asks for, and each row has one key:

        config: tasks.analysis.diversity outputs/.../seed{seed} ... --out tasks/analysis/results/diversity/seed{seed}
        records: tasks/analysis/results/diversity/seed{seed}/diversity.json
        keys: {fibottention: [models/fibottention/last_layer/diversity/median], dense: [...]}

Rows with keys and without a tier are counted, as FLOPs, and have no seeds; only their order can be tested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hf_sparseprior.runs.config import read_yaml
from tasks.claims.kinds import KINDS, Kind, Ranked, Untried
from tasks.common.paired import ACCURACY
from tasks.common.records import read_records

TIERS = {"A": 5, "B": 1}  # seeds
SEED = "{seed}"  # in texts that are there for each seed
AFTER = "after its rows"
BUDGETS = {"A": 30, "B": 15}  # hours of one core
Run = tuple[str, str, int]  # folder of records, row and seed


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper, and how it was tried.

    name: unique in its paper. where: the place in the paper. paper: its numbers, as printed. test: what would show it.
    tier: "A" or "B"; None: not tried, or of no seeds. config: FILE#CELL of the comparison. task: whose `compare` runs
    it. records: folder of records.jsonl; with keys, a file. metric: a share. reduced: what is smaller than in
    the paper. keys: by row, where the file has the row's numbers, seed by seed, or where each seed's file has its
    number. relative_to: where it has their unit. fitted: the setting that was chosen so that it comes out. changed: how
    the test was changed when its number was known. written: `AFTER`, or None. older: what has changed since its runs.
    """

    name: str
    where: str
    claim: str
    paper: str
    test: Kind
    tier: str | None = None
    config: str | None = None
    task: str | None = None
    records: str | None = None
    metric: str = ACCURACY
    reduced: str | None = None
    keys: Mapping[str, Sequence[str]] | None = None
    relative_to: str | None = None
    fitted: str | None = None
    changed: str | None = None
    written: str | None = None
    older: str | None = None

    @property
    def seeds(self) -> int:
        """How many seeds it asks for."""
        return TIERS[self.tier] if self.tier is not None else 0

    @property
    def record(self) -> str | None:
        """Its folder of runs, or the file that it reads."""
        return self.records or getattr(self.test, "record", None)

    @property
    def has_file_for_each_seed(self) -> bool:
        """Whether config and records are there for each seed."""
        return self.keys is not None and SEED in (self.records or "")

    def files(self) -> list[tuple[str | None, str]]:
        """Commands and the files that they write, of a claim that counts, times or analyses: one, or one a seed."""
        file = self.record
        if file is None or (self.test.rows and self.keys is None):  # of runs, whose files `runs` has
            return []
        if not self.has_file_for_each_seed:
            return [(self.config, file)]
        seeds = map(str, range(self.seeds))
        return [(str(self.config).replace(SEED, seed), file.replace(SEED, seed)) for seed in seeds]

    def numbers(self) -> dict[str, list[tuple[int, str, str]]]:
        """Where the numbers of rows with keys are: seed, file and key."""
        if self.has_file_for_each_seed:
            return {
                row: [(seed, file, key) for seed, (_, file) in enumerate(self.files())]
                for row, [key] in (self.keys or {}).items()
            }
        return {
            row: [(seed, self.records or "", key) for seed, key in enumerate(keys)]
            for row, keys in (self.keys or {}).items()
        }

    def runs(self) -> set[Run]:
        """The runs that it asks for; none if it reads numbers of files."""
        rows = self.test.rows if self.keys is None else ()
        return {(self.records or "", row, seed) for row in rows for seed in range(self.seeds)}

    def recorded(self, root: Path) -> dict[Run, Mapping[str, Any]]:
        """The records that there are of its rows, also of more seeds than it asks for."""
        if self.keys is not None or not self.test.rows:
            return {}
        folder = self.records or ""
        kept = read_records(root / folder)
        return {(folder, row, seed): kept[row][seed] for row in self.test.rows for seed in sorted(kept.get(row, {}))}


@dataclass(frozen=True)
class Paper:
    """Claims of one paper. name: of its file. central: names of those that it leads with."""

    name: str
    title: str
    source: str
    claims: list[Claim]
    central: Sequence[str] = ()


def read_papers(folder: Path) -> list[Paper]:
    """The papers of a folder of YAML files, in the order of their names.

    Raises:
        OSError: if there is none.
        ValueError: as `read_paper`.
    """
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise OSError(f"{folder} has no claims (*.yaml)")
    return [read_paper(file) for file in files]


def read_paper(file: Path) -> Paper:
    """The claims of one file.

    Raises:
        ValueError: for what is no claim; the message names the file and the claim.
    """
    content = read_yaml(file)
    needed = {"title", "source", "claims"}
    _check_keys(content, needed | {"central", "older"}, needed, str(file))
    if not isinstance(content["claims"], dict) or not content["claims"]:
        raise ValueError(f"{file}: claims must hold a name and an entry for each claim")
    claims = [_claim(str(name), entry, f"{file}, {name}") for name, entry in content["claims"].items()]
    claims = _with_older(claims, content.get("older", {}), str(file))
    central = content.get("central", [])
    if not isinstance(central, list) or len(set(map(str, central))) < len(central):
        raise ValueError(f"{file}: central={central!r:.80} must be a list of claims, each once")
    if unknown := [name for name in central if name not in content["claims"]]:
        raise ValueError(f"{file}: central: {unknown[0]!r} is not one of its claims")
    return Paper(file.stem, str(content["title"]), str(content["source"]), claims, central)


def _with_older(claims: list[Claim], older: Any, where: str) -> list[Claim]:
    """The claims, those whose records are in a folder of `older` with what has changed since."""
    lists = list(older.values()) if isinstance(older, dict) else [None]
    if not all(isinstance(own, list) and all(isinstance(one, str) for one in own) for own in lists):
        raise ValueError(f"{where}: older={older!r:.80} must have what changed, with a list of folders of records")
    changes = {folder: str(change) for change, folders in older.items() for folder in folders}
    if unknown := sorted(changes.keys() - {str(claim.record) for claim in claims}):
        raise ValueError(f"{where}: older: no claim reads {unknown[0]}")
    return [replace(claim, older=changes.get(claim.record or "")) for claim in claims]


def _claim(name: str, entry: Any, where: str) -> Claim:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(f"{where}: the name must be of a-z, 0-9 and single dashes")
    known = {field.name for field in fields(Claim)} - {"name", "older"}
    _check_keys(entry, known, {"where", "claim", "paper", "test"}, where)
    test = _test(entry["test"], where)
    of_runs, has_keys = {"tier", "config", "task", "records", "reduced"}, "keys" in entry
    not_needed = {"task"} | (set() if SEED in str(entry.get("records")) else {"tier"}) if has_keys else set()
    if missing := sorted((of_runs - not_needed if test.rows else set()) - set(entry)):
        raise ValueError(f"{where}: {test.name} needs {', '.join(missing)}")
    if isinstance(test, Untried):
        without = of_runs | {"metric", "keys", "relative_to", "fitted"}
    elif test.rows:
        without = {"fitted"} | ({"task", "metric"} if has_keys else {"relative_to"})
    else:
        without = {"records", "metric", "keys", "relative_to"}
    if extra := sorted(without & set(entry)):
        raise ValueError(
            f"{where}: {test.name} has no {', '.join(extra)}" + " with keys" * (test.rows != () and has_keys)
        )
    keys = _keys(entry["keys"], test, where) if has_keys else None
    each_seed = {key for key in ("config", "records") if SEED in str(entry.get(key))}
    if each_seed and (keys is None or len(each_seed) < 2 or any(len(own) != 1 for own in keys.values())):
        raise ValueError(f"{where}: {SEED} must be in config and records, of rows with one key each")
    if keys is not None and "tier" not in entry and any(len(own) != 1 for own in keys.values()):
        raise ValueError(f"{where}: without a tier each row must have one key")
    if keys is not None and "tier" not in entry and not isinstance(test, Ranked):
        raise ValueError(f"{where}: {test.name} is tested over seeds, so that it needs a tier")
    texts = {key: value for key, value in entry.items() if key not in ("test", "keys")}
    if wrong := [key for key, value in texts.items() if not isinstance(value, str) or not value.strip()]:
        raise ValueError(f"{where}: {wrong[0]}={texts[wrong[0]]!r} must be a text")
    if texts.get("tier") not in (None, *TIERS):
        raise ValueError(f"{where}: tier={texts['tier']} must be one of {', '.join(TIERS)}")
    if texts.get("written") not in (None, AFTER):
        raise ValueError(f"{where}: written={texts['written']!r} must be {AFTER!r}")
    if "written" in texts and (not test.rows or keys is not None):
        raise ValueError(f"{where}: {test.name} reads no runs, which written is about")
    return Claim(name=name, test=test, keys=keys, **{key: " ".join(value.split()) for key, value in texts.items()})


def _keys(entry: Any, test: Kind, where: str) -> dict[str, list[str]]:
    if not isinstance(entry, dict) or set(entry) != set(test.rows):
        raise ValueError(f"{where}: keys must name the rows {', '.join(test.rows)}, and no others")
    for row, keys in entry.items():
        if not isinstance(keys, list) or not keys or not all(isinstance(key, str) and key for key in keys):
            raise ValueError(f"{where}: keys of {row!r} must be a list of texts")
    if len({len(keys) for keys in entry.values()}) > 1:
        raise ValueError(f"{where}: rows must have keys for the same number of seeds")
    return entry


def _test(entry: Any, where: str) -> Kind:
    if not isinstance(entry, Mapping) or len(entry) != 1 or next(iter(entry)) not in KINDS:
        raise ValueError(f"{where}: test={entry!r:.80} must be one of {', '.join(KINDS)}, with what it needs")
    [(kind, settings)] = entry.items()
    try:
        return KINDS[kind].read(settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {kind}: {error}") from None


def _check_keys(content: Any, known: set[str], needed: set[str], where: str) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a map, not {content!r:.60}")
    if unknown := sorted(set(map(str, content)) - known):
        raise ValueError(f"{where}: {unknown[0]!r} is not known; known are {', '.join(sorted(known))}")
    if missing := sorted(needed - set(content)):
        raise ValueError(f"{where} lacks {', '.join(missing)}")
