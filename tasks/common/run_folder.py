"""The folder of a run: which run it belongs to, whether that is finished, which checkpoint it goes on from."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import distributed
from transformers.trainer import TRAINER_STATE_NAME

from hf_sparseprior.files import write_text
from tasks.common.config import config_name
from tasks.common.results import read_results
from tasks.common.upgrade import upgraded_config

RUN_CONFIG = "run_config.json"
RESULTS = "results.json"
MODEL = "model"
AVERAGE = "model_ema"  # the same with the moving average of the weights
ADAPTER = "adapter"  # what LoRA or DoRA learned, without the weights that it changes; MODEL has both
EVALUATION = "evaluation"
# Where a run lies, how it shows its progress and how many processes read its data do not make it another run.
COSMETIC = (
    *("output_dir", "disable_tqdm", "dataloader_num_workers", "save_total_limit", "report_to"),  # the Trainer's
    *("work_dir", "log_level", "launcher", "resume", "num_workers", "persistent_workers", "max_keep_ckpts"),  # mm
)


def default_output_dir(task: str, config: str | Path) -> str:
    """Where a run or comparison lies unless it says otherwise: outputs/TASK/FILE, or outputs/TASK/FILE_CELL."""
    return f"outputs/{task}/{config_name(config)}"


def evaluation_folder(model: Path) -> Path:
    """Where `evaluate` writes by default: RUN/evaluation for RUN/model, RUN/evaluation/NAME for another model."""
    model = model.resolve()
    folder = model.parent / EVALUATION
    return folder if model.name == MODEL else folder / model.name


def finished_results(
    out: Path, config: dict[str, Any], overwrite: bool, field: str = "trainer.output_dir"
) -> dict[str, Any] | None:
    """The results of this run, if it is done already.

    Args:
        out: folder of the run.
        config: sections of keys and values.
        overwrite: whether another run's folder may be thrown away.
        field: the setting by which the user chose the folder, for errors.

    Raises:
        ValueError: if the folder belongs to another run or to something else, unless `overwrite`.
        OSError: if the run is not done and there can be no such folder.
    """
    if not (out / RUN_CONFIG).exists():
        check_place(out, field)
        # A run that was killed while it claimed the folder left at most the scratch file.
        if out.exists() and any(path.name != f"{RUN_CONFIG}.partial" for path in out.iterdir()):
            raise ValueError(f"{field}={out} is not empty and not of this program; choose another folder")
        return None
    differences = folder_differences(out, config)
    if differences and not overwrite:
        raise ValueError(
            f"{field}={out} belongs to another run ({'; '.join(differences)}); "
            "choose another folder or give --overwrite"
        )
    if not differences and (out / RESULTS).exists():
        return read_results(out / RESULTS)
    check_place(out, field)
    return None


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
        for path in out.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != RUN_CONFIG:
                path.unlink()
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RUN_CONFIG, json.dumps(config, indent=1) + "\n")


def folder_differences(out: Path, config: dict[str, Any]) -> list[str]:
    """Keys in which the run that owns the folder differs from this one."""
    try:
        stored = json.loads((out / RUN_CONFIG).read_text(encoding="utf-8"))
        return config_differences(stored, config)
    except (ValueError, AttributeError, TypeError):
        return [f"{RUN_CONFIG} is damaged"]


def config_differences(earlier: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Keys that make these two configurations different runs, with both values.

    Args:
        earlier: as a run of any version stored it; sections that `config` does not have are left out.
        config: sections of keys and values; a missing key counts as null.
    """
    earlier = upgraded_config(earlier)
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


def claim_together(out: Path, config: dict[str, Any], newest: Callable[[], str | None]) -> str | None:
    """`claim` by the first process for all that are joined. Returns the checkpoint that all of them go on from.

    Args:
        out: folder of the run.
        config: sections of keys and values.
        newest: finds the checkpoint, once the folder is this run's.
    """
    joined = distributed.is_available() and distributed.is_initialized()
    found: list[str | None] = [None]
    if joined:
        distributed.barrier()  # until every process has looked at the folder
    if not joined or distributed.get_rank() == 0:
        claim(out, config)
        found = [newest()]
        if found[0]:
            print(f"going on from {found[0]}", file=sys.stderr)
    if joined:
        distributed.broadcast_object_list(found)
    return found[0]


def checkpoint_damage(checkpoint: Path, files: Sequence[str]) -> str | None:
    """What a Trainer's checkpoint lacks, or None for a whole one. trainer_state.json is written last."""
    for name in files:
        if not (checkpoint / name).exists():
            return f"{name} is missing"
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                file.keys()
    except (ValueError, SafetensorError) as error:
        return f"it is cut off ({str(error).splitlines()[0]})"
    for path in (*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("*.bin")):
        # training_args.bin is not needed for going on.
        if path.name != "training_args.bin" and cut_off(path):
            return f"{path.name} is cut off"
    return None


def stored_config(model_folder: Path) -> dict[str, Any]:
    """The configuration of the run that saved a model in its folder.

    Raises:
        OSError: if the model is not in a run's folder, or what is stored there is damaged.
    """
    stored = model_folder.resolve().parent / RUN_CONFIG
    if not stored.exists():
        raise OSError(f"{stored} is missing, so the data is not known; give --config")
    try:
        return upgraded_config(json.loads(stored.read_text(encoding="utf-8")))
    except (ValueError, AttributeError, TypeError):
        raise OSError(f"{stored} is damaged, so the data is not known; give --config") from None
