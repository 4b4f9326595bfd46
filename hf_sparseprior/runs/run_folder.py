"""The folder of a run: which run it belongs to, whether that is finished, which checkpoint it goes on from."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import distributed

from hf_sparseprior.base.files import write_text
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json
from hf_sparseprior.cli.command import USER_ERRORS
from hf_sparseprior.runs.config import config_name, nested_names
from hf_sparseprior.runs.locks import NoLocks, holder, locked
from hf_sparseprior.runs.processes import check_joined
from hf_sparseprior.runs.results import check_results, finite_or_null, read_results
from hf_sparseprior.training.trainer import PROCESSES_FILE

RUN_CONFIG = "run_config.json"
RESULTS = "results.json"
MODEL = "model"
AVERAGE = "model_ema"  # the same with the moving average of the weights
ADAPTER = "adapter"  # what LoRA or DoRA learned, without the weights that it changes; MODEL has both
EVALUATION = "evaluation"
LOCK = "run.lock"  # held by the process that trains, for as long as it does
PATIENCE = 2.0  # seconds; whoever only asks who holds a lock holds it for a moment
# Where a run lies, how it shows its progress and how many processes read its data do not make it another run.
COSMETIC = (
    "nonfinite_loss",  # whether a run that diverges goes on
    *("output_dir", "disable_tqdm", "dataloader_num_workers", "save_total_limit", "report_to"),  # the Trainer's
    *("work_dir", "log_level", "launcher", "resume", "num_workers", "persistent_workers", "max_keep_ckpts"),  # mm
)


class InUse(ValueError):
    """Another process trains in the folder, or has just done so."""


def default_output_dir(task: str, config: str | Path) -> str:
    """Where a run or comparison lies unless it says otherwise: outputs/TASK/FILE, or outputs/TASK/FILE_CELL."""
    return f"outputs/{task}/{config_name(config)}"


def model_folder(given: Path, file: str) -> Path:
    """RUN/model where a run is given, which has no `file` of a saved model itself; else what is given."""
    return given / MODEL if not (given / file).is_file() and (given / MODEL / file).is_file() else given


def evaluation_folder(model: Path) -> Path:
    """Where `evaluate` writes by default: RUN/evaluation for RUN/model, RUN/evaluation/NAME for another model."""
    model = model.resolve()
    folder = model.parent / EVALUATION
    return folder if model.name == MODEL else folder / model.name


def finished_results(
    out: Path,
    config: dict[str, Any],
    overwrite: bool,
    field: str = "trainer.output_dir",
    mine: bool = False,
    needed: Sequence[str] = ("metrics",),
) -> dict[str, Any] | None:
    """The results of this run, if it is done already.

    Args:
        out: folder of the run.
        config: sections of keys and values.
        overwrite: whether another run's folder may be thrown away.
        field: the setting by which the user chose the folder, for errors.
        mine: whether this process holds the folder's lock.
        needed: parts of the results that the caller shows.

    Raises:
        InUse: if another process trains in the folder.
        ValueError: if the results are damaged, or lack one of these parts; if the folder belongs to another run or to
            something else, unless `overwrite`.
        OSError: if the run is not done and there can be no such folder.
    """
    if (results := results_of(out, config)) is not None:
        check_results(out / RESULTS, results, needed)
        return results
    claimed = (out / RUN_CONFIG).exists()
    differences = folder_differences(out, config) if claimed else []
    if not mine and (user := holder(out / LOCK)):
        raise _in_use(out, field, user)
    if differences and not overwrite:
        raise ValueError(
            f"{field}={out} belongs to another run ({'; '.join(differences)}); "
            "choose another folder or give --overwrite"
        )
    check_place(out, field)
    # A run that was killed while it claimed the folder left at most these.
    left = (f"{RUN_CONFIG}.partial", LOCK)
    if not claimed and out.exists() and any(path.name not in left for path in out.iterdir()):
        raise ValueError(f"{field}={out} is not empty and not of this program; choose another folder")
    return None


def results_of(out: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The results in a folder; None if it has none, or is another run's. ValueError if they are damaged."""
    if not (out / RUN_CONFIG).exists() or not (out / RESULTS).exists() or folder_differences(out, config):
        return None
    return read_results(out / RESULTS)


def _in_use(out: Path, field: str, user: str | None) -> InUse:
    return InUse(f"{field}={out} is in use by {user or 'another process'}; wait for its end or choose another folder")


def check_place(out: Path, field: str) -> None:
    """Raise OSError unless a folder is there, or can be made, that this process may write into.

    Args:
        out: the folder.
        field: what the user set to choose it.
    """
    place = next(path for path in (out, *out.absolute().parents) if path.exists() or path.is_symlink())
    if not place.is_dir():
        raise OSError(f"{field}={out}: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise OSError(f"{field}={out}: {place} may not be written into")


def claim(out: Path, config: dict[str, Any]) -> None:
    """Make the folder this run's; an earlier run with another configuration is thrown away."""
    if (out / RUN_CONFIG).exists() and folder_differences(out, config):
        # If this is killed half way, the folder must neither count as finished nor as another's. So the results are
        # removed first and the owner last.
        (out / RESULTS).unlink(missing_ok=True)
        throw_away(out, (RUN_CONFIG, LOCK))
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RUN_CONFIG, json.dumps(config, indent=1) + "\n")


def throw_away(out: Path, keep: Sequence[str] = (LOCK,)) -> None:
    """Remove everything in the folder of a run but the files of these names."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()


def folder_differences(out: Path, config: dict[str, Any]) -> list[str]:
    """Keys in which the run that owns the folder, or the one that wrote its results, differs from this one."""
    try:
        stored = read_json(out / RUN_CONFIG, finite=False)
        differences = config_differences(stored, config)
    except (ValueError, AttributeError, TypeError):
        return [f"{RUN_CONFIG} is damaged"]
    return differences or [f"{RESULTS} has {difference}" for difference in _results_differences(out / RESULTS, config)]


def _results_differences(path: Path, config: dict[str, Any]) -> list[str]:
    """Keys in which the run that wrote these results differs; [] if they do not say, or are missing or damaged."""
    try:
        results = read_results(path)
        stored = results["config"]
        if list(config) == ["config"]:  # of segmentation and detection
            stored = {"config": nested_names(stored)}
            if results.get("resumed_from"):  # whose results held the checkpoint here in earlier versions
                stored["config"]["load_from"] = config["config"].get("load_from")
        # Robotics' section about the demonstrations is not in its results.
        own = {section: finite_or_null(config[section]) for section in config if section in stored}
        return config_differences(finite_or_null(stored), own)
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return []


def config_differences(earlier: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Keys that make these two configurations different runs, with both values.

    Args:
        earlier: as a run stored it; sections that `config` does not have are left out.
        config: sections of keys and values; a missing key counts as null.
    """
    found: list[str] = []
    for section, values in config.items():
        stored = earlier.get(section) or {}
        for key in _keys(stored, values):
            found += _value_differences(f"{section}.{key}", stored.get(key), values.get(key))
    return found


def _keys(*sections: dict[str, Any]) -> list[str]:
    return sorted(set().union(*sections) - {*COSMETIC})


def _value_differences(name: str, stored: Any, current: Any) -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(current, dict):
        for key in _keys(stored, current):
            if key in stored and key in current:
                yield from _value_differences(f"{name}.{key}", stored[key], current[key])
            elif stored.get(key) != {} != current.get(key):  # an empty section counts as none
                shown = (repr(values[key]) if key in values else "nothing" for values in (stored, current))
                yield "{}: {} there, {} here".format(f"{name}.{key}", *shown)
    elif isinstance(stored, list) and isinstance(current, list) and len(stored) == len(current):
        for index, values in enumerate(zip(stored, current, strict=True)):
            yield from _value_differences(f"{name}.{index}", *values)
    elif stored != current:
        yield f"{name}: {stored!r} there, {current!r} here"


def last_whole_checkpoint(out: Path, files: Sequence[str]) -> str | None:
    """The newest checkpoint-N of a Trainer that was written to its end; others are skipped with one line.

    Args:
        out: folder of the run.
        files: names that a checkpoint of it holds, files or folders.
    """
    return newest_whole(out, ["checkpoint-*"], lambda path: checkpoint_damage(path, files))


def newest_whole(out: Path, patterns: Sequence[str], damage: Callable[[Path], str | None]) -> str | None:
    """The checkpoint with the highest number that was written to its end.

    A run that is killed while it saves leaves one that lacks files or is cut off; it is skipped with one line.

    Args:
        out: folder of the run.
        patterns: patterns of checkpoints' names, which end in a number before the suffix.
        damage: returns what a checkpoint lacks, None for a whole one.
    """
    found = [path for pattern in patterns for path in out.glob(pattern)]
    numbered = [(int(end[0]), path) for path in found if (end := re.findall(r"\d+$", path.stem))]
    for _, path in sorted(numbered, reverse=True):
        if (problem := damage(path)) is None:
            return str(path)
        print(f"{path} is skipped: {problem}", file=sys.stderr)
    return None


def cut_off(path: Path) -> str | None:
    """What is wrong with a file that torch.save wrote; None for a whole one."""
    return None if zipfile.is_zipfile(path) else "it is cut off"


@contextmanager
def owned(
    out: Path,
    config: dict[str, Any],
    newest: Callable[[], str | None],
    overwrite: bool = False,
    field: str = "trainer.output_dir",
) -> Iterator[str | None]:
    """The folder is this run's, and no other process may train in it until the end of the block.

    The first of the joined processes claims it for all of them. They get the checkpoint that all of them go on from.
    If a bad value ends the block before a checkpoint or the model is there, nothing is left that would refuse the
    corrected run.

    Args:
        out: folder of the run.
        config: sections of keys and values.
        newest: finds the checkpoint, once the folder is this run's.
        overwrite, field: as in `finished_results`.

    Raises:
        InUse: if another process trains in the folder, or finished it since `finished_results` was asked.
        ValueError: if another run took it since then.
        OSError: if there can be no such folder.
    """
    check_joined()
    joined = distributed.is_available() and distributed.is_initialized()
    if joined:
        distributed.barrier()  # until every process has looked at the folder
    first = not joined or distributed.get_rank() == 0
    failed: BaseException | None = None
    is_new, was_there = False, out.exists()
    with ExitStack() as held, full_disk_in_one_line(out):
        held.callback(lambda: _remove_empty(out) if is_new and not was_there else None)  # when the lock is given back
        found: list[str | None] = [None, None]  # checkpoint, what went wrong
        if first:
            try:
                held.enter_context(_locked(out, field))
                if finished_results(out, config, overwrite, field, mine=True) is not None:
                    raise InUse(f"{field}={out} was finished by another process meanwhile")
                is_new = not (out / RUN_CONFIG).exists() or bool(folder_differences(out, config))
                claim(out, config)
                found = [newest(), None]
            except USER_ERRORS as error:
                found, failed = [None, str(error)], error
        if joined:
            distributed.broadcast_object_list(found)
        checkpoint, message = found
        if message is not None:
            raise failed or ValueError(message)
        if checkpoint and first:
            print(f"going on from {checkpoint}", file=sys.stderr)
        try:
            yield checkpoint
        except USER_ERRORS:
            if is_new and newest() is None and not (out / MODEL).exists():
                throw_away(out)
            raise


def _remove_empty(out: Path) -> None:
    """Remove a folder in which nothing is, not even the lock of somebody else."""
    with suppress(OSError):
        out.rmdir()


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def full_disk_in_one_line(out: Path) -> Iterator[None]:
    """Name the folder where nothing more can be written, whichever library found out and whatever its error says."""
    try:
        with _saving_by_python():
            yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if (number := full_disk(error)) is None:
            raise
        free = shutil.disk_usage(out).free >> 20
        raise OSError(
            f"{out} cannot be written ({os.strerror(number)}; {free} MiB are free there); "
            "make room and give the same command again"
        ) from error


def full_disk(error: BaseException) -> int | None:
    """Which of the numbers `FULL` an error has, or one that it was raised after; None: it has another reason."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        number = getattr(error, "errno", None)
        if isinstance(error, SafetensorError) and (said := re.search(r"\(os error (\d+)\)", str(error))):
            number = int(said[1])
        if number in FULL:
            return number
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return None


@contextmanager
def _saving_by_python() -> Iterator[None]:
    """torch.save, which checkpoints of all libraries are written by, writes a path as a file of Python's.

    Its own writer has no error numbers, and at some sizes says of a full disk only that a position is unexpected.
    """
    save = torch.save

    def save_by_python(content: Any, place: Any, *args: Any, **options: Any) -> None:
        if not isinstance(place, (str, os.PathLike)):
            return save(content, place, *args, **options)
        with open(place, "wb") as file:
            save(content, file, *args, **options)

    torch.save = save_by_python  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.save = save


@contextmanager
def _locked(out: Path, field: str) -> Iterator[None]:
    end = time.monotonic() + PATIENCE
    with ExitStack() as held:
        try:
            while not held.enter_context(locked(out / LOCK)):
                held.close()
                if time.monotonic() > end:
                    raise _in_use(out, field, holder(out / LOCK))
                time.sleep(0.05)
        except NoLocks as error:
            print(f"{error}; a second start in this folder would not be noticed", file=sys.stderr)
        yield


def checkpoint_damage(checkpoint: Path, files: Sequence[str]) -> str | None:
    """What a Trainer's checkpoint lacks, or None for a whole one. trainer_state.json is written last."""
    for name in files:
        if not (checkpoint / name).exists():
            return f"{name} is missing"
    for path in sorted(checkpoint.iterdir()):
        if _is_cut(path):
            return f"{path.name} is cut off"
    return None


def _is_cut(path: Path) -> bool:
    """Whether a file of a Trainer's checkpoint is empty, cut off or not what its name says."""
    try:
        if path.suffix == ".json":
            return not isinstance(read_json(path, RECORD_BYTES, finite=False), dict)
        if path.name == PROCESSES_FILE:
            return int(path.read_text(encoding="utf-8")) < 1
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                file.keys()
    except (ValueError, SafetensorError):
        return True
    # training_args.bin is not needed for going on.
    return path.suffix in (".pt", ".pth", ".bin") and path.name != "training_args.bin" and cut_off(path) is not None


def stored_config(model_folder: Path) -> dict[str, Any]:
    """The configuration of the run that saved a model in its folder.

    Raises:
        OSError: if the model is not in a run's folder, or what is stored there is damaged.
    """
    stored = model_folder.resolve().parent / RUN_CONFIG
    if not stored.exists():
        raise OSError(f"{stored} is missing, so the data is not known; give --config")
    try:
        config = read_json(stored, finite=False)
        return {**config}
    except (ValueError, AttributeError, TypeError):
        raise OSError(f"{stored} is damaged, so the data is not known; give --config") from None
