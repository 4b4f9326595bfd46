"""Records of a comparison's runs: FOLDER/records.jsonl, one line a run.

    {"shared": {"data": "...", "config": {"model": {...}}, "versions": {...}, ...}}
    {"row": "dense", "seed": 0, "metrics": {"test_accuracy": 0.41}, "config": {"trainer": {"seed": 0}}, ...}
    {"row": "dense", "seed": 1, ...}

The first line has what most runs share, level by level; a run has it all, and where its own line says otherwise, what
that says. Rows stand in the order of their comparison, seeds of a row in theirs. The file is replaced whole or not at
all, and what is written twice is the same twice.

    python -m tasks.common.records FOLDER [FOLDER ...]

brings the records that earlier versions left, FOLDER/ROW/seedN.json, into FOLDER/records.jsonl and removes them.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_sparseprior.base.files import write_text
from hf_sparseprior.base.json_files import RECORD_BYTES, parse_json, read_json, read_limited
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.locks import turn
from hf_sparseprior.runs.results import finite_or_null, read_results
from tasks.common import commands

RECORDS, LOCK = "records.jsonl", "records.lock"
SHARED, ROW, SEED = "shared", "row", "seed"
OLD = re.compile("seed(0|[1-9][0-9]*)[.]json")
OLD_TABLES = re.compile("summary[.]json|differences(_.*)?[.]json")

Record = dict[str, Any]
ByRow = dict[str, dict[int, Record]]
_read: dict[Path, tuple[tuple[int, ...], ByRow]] = {}


def read_records(folder: Path) -> ByRow:
    """The records in a folder, by row and seed, in the order of the file; none if it has no file.

    They are shared by all who read them: nobody may change one.

    Raises:
        ValueError: for a file that is damaged, or has two different records of a run.
    """
    file = folder / RECORDS
    try:
        stat = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if file not in _read or _read[file][0] != state:
        _read[file] = state, _parsed(file)
    return _read[file][1]


def _parsed(file: Path) -> ByRow:
    found: ByRow = {}
    shared: Mapping[str, Any] = {}
    for number, text in enumerate(read_limited(file, RECORD_BYTES).splitlines(), start=1):
        try:
            line = parse_json(text, finite=False)
            if number == 1:
                shared = dict(line[SHARED])
                continue
            row, seed = str(line.pop(ROW)), int(line[SEED])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            way_out = "restore the file, all others need that line" if number == 1 else "remove it"
            raise ValueError(f"{file}, line {number} is damaged ({type(error).__name__}: {error}); {way_out}") from None
        _put(found, row, seed, _merged(shared, line), file)
    return found


def _put(found: ByRow, row: str, seed: int, record: Record, file: Path) -> None:
    """Take one more record; ValueError if there is another one of its run."""
    kept = found.setdefault(row, {}).setdefault(seed, record)
    if kept is not record and _text(kept) != _text(record):
        names = [key for key in sorted({*kept, *record}) if _text(kept.get(key)) != _text(record.get(key))]
        raise ValueError(
            f"{file}: there are two records of {row}, seed {seed}, which differ in {', '.join(names)}; keep one of them"
        )


def add_records(folder: Path, new: Iterable[tuple[str, Record]], order: Sequence[str] = ()) -> None:
    """Bring records of finished runs, each with the name of its row, into the file of a folder.

    Args:
        folder: is made if it is missing.
        new: those that are in the file already, and are the same, change nothing.
        order: rows as their comparison has them; others come after them.

    Raises:
        ValueError: for a record that differs from the one of its run in the file, and as `read_records`.
    """
    new = list(new)
    if not new:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with turn(folder / LOCK):
        found = {row: dict(runs) for row, runs in read_records(folder).items()}
        for row, record in new:
            _put(found, row, record[SEED], finite_or_null(record), folder / RECORDS)
        text = records_text(found, order)
        if not (folder / RECORDS).exists() or (folder / RECORDS).read_text(encoding="utf-8") != text:
            write_text(folder / RECORDS, text)


def records_text(records: Mapping[str, Mapping[int, Record]], order: Sequence[str] = ()) -> str:
    """The content of a file of these records."""
    rows = [*(row for row in order if row in records), *(row for row in records if row not in order)]
    runs = [(row, seed, records[row][seed]) for row in rows for seed in sorted(records[row])]
    shared = _shared([{key: value for key, value in record.items() if key != SEED} for _, _, record in runs])
    lines: list[Record] = [{SHARED: shared}]
    lines += [{ROW: row, SEED: seed, **_rest(record, {**shared, SEED: seed})} for row, seed, record in runs]
    return "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)


def _text(value: Any) -> str:
    """What two values have in common that are the same for JSON; 1, 1.0 and True are not."""
    return json.dumps(value, sort_keys=True)


def _shared(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What most of these have, key by key, of the keys that all of them have."""
    found: dict[str, Any] = {}
    for key in sorted(values[0]) if values else ():
        if not all(key in value for value in values):
            continue
        parts = [value[key] for value in values]
        if all(isinstance(part, Mapping) for part in parts):
            found[key] = _shared(parts)
            continue
        texts = [_text(part) for part in parts]
        usual, count = Counter(texts).most_common(1)[0]
        if 2 * count > len(texts) and not any(isinstance(part, Mapping) for part in parts):
            found[key] = parts[texts.index(usual)]
    return found


def _rest(value: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """What a value has besides what is shared, or otherwise."""
    found: dict[str, Any] = {}
    for key, part in sorted(value.items()):
        if key in shared and isinstance(part, Mapping) and isinstance(shared[key], Mapping):
            if rest := _rest(part, shared[key]):
                found[key] = rest
        elif key not in shared or _text(part) != _text(shared[key]):
            found[key] = _sorted(part)
    return found


def _sorted(value: Any) -> Any:
    """With the keys of maps in order, so that a text does not depend on who wrote it."""
    return {key: _sorted(part) for key, part in sorted(value.items())} if isinstance(value, Mapping) else value


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What is shared, with what a line says itself."""
    found = dict(shared)
    for key, part in own.items():
        both = isinstance(part, Mapping) and isinstance(shared.get(key), Mapping)
        found[key] = _merged(shared[key], part) if both else part
    return found


# ---- records of earlier versions ------------------------------------------------------------------------------------


def old_files(folder: Path) -> list[Path]:
    """The records that earlier versions left in a folder."""
    return sorted(file for file in folder.glob("*/seed*.json") if OLD.fullmatch(file.name))


def check_no_old(folder: Path) -> None:
    """Raise ValueError if there are such records, which nobody would see."""
    if files := old_files(folder):
        raise ValueError(
            f"{folder} has {len(files)} records of earlier versions, such as {files[0].relative_to(folder)}; "
            f"python -m tasks.common.records {folder} brings them into {RECORDS}"
        )


def convert(folder: Path) -> int:
    """Bring FOLDER/ROW/seedN.json into FOLDER/records.jsonl and remove them. Returns how many there were.

    The order of rows is that of summary.json, which is removed too, as are the numbers of the tables.

    Raises:
        ValueError: for a record that is damaged, or differs from one in the file; then nothing is changed.
    """
    if not folder.is_dir():
        raise OSError(f"{folder} is not a folder")
    files = old_files(folder)
    new = [(file.parent.name, read_results(file)) for file in files]
    if wrong := [file for file, (_, record) in zip(files, new, strict=True) if file.stem != f"seed{record.get(SEED)}"]:
        raise ValueError(f"{wrong[0]} is no record of its seed")
    summary = folder / "summary.json"
    add_records(folder, new, list(read_json(summary, RECORD_BYTES, finite=False)) if summary.is_file() else ())
    for file in (*files, *(path for path in folder.glob("*.json") if OLD_TABLES.fullmatch(path.name) and new)):
        file.unlink()
    for row in {file.parent for file in files}:
        if not any(row.iterdir()):  # else it has the runs, too
            row.rmdir()
    return len(new)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.records()
    arguments = parser.parse_args(argv)

    def work() -> None:
        for folder in arguments.folders:
            count = convert(folder)
            print(f"{folder}: {count or 'no'} records of earlier versions brought into {RECORDS}")

    return run_command(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
