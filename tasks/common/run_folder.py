"""The folder of a run: whose it is, whether it is finished, which checkpoint it goes on from."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME

from hf_sparseprior.files import write_text
from tasks.common.results import read_results

RUN_CONFIG = "run_config.json"
RESULTS = "results.json"
MODEL = "model"
AVERAGE = "model_ema"  # the same with the moving average of the weights
ADAPTER = "adapter"  # what LoRA or DoRA learned, without the weights it changes; MODEL has both
# Where a run lies and how it shows itself does not make it another run.
COSMETIC = ("output_dir", "disable_tqdm", "dataloader_num_workers", "save_total_limit", "report_to")


def finished_results(
    out: Path, config: dict[str, Any], overwrite: bool, field: str = "trainer.output_dir"
) -> dict[str, Any] | None:
    """The results of this very run if it is done already.

    Args:
        out: folder of the run.
        config: sections of keys and values.
        overwrite: whether another run's folder may be thrown away.
        field: what the user set to choose the folder, for errors.

    Raises:
        ValueError: if the folder belongs to another run or to something else, unless `overwrite`.
    """
    if not (out / RUN_CONFIG).exists():
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
    return read_results(out / RESULTS) if not differences and (out / RESULTS).exists() else None


def claim(out: Path, config: dict[str, Any]) -> None:
    """Make the folder this run's; an earlier run with another configuration is thrown away."""
    if (out / RUN_CONFIG).exists() and folder_differences(out, config):
        # Killed half way, it must neither count as finished nor as of something else: results first, owner last.
        (out / RESULTS).unlink(missing_ok=True)
        for path in out.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != RUN_CONFIG:
                path.unlink()
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RUN_CONFIG, json.dumps(config, indent=1) + "\n")


def folder_differences(out: Path, config: dict[str, dict[str, Any]]) -> list[str]:
    """Keys in which the run that has the folder differs from this one."""
    try:
        return config_differences(json.loads((out / RUN_CONFIG).read_text(encoding="utf-8")), config)
    except (ValueError, AttributeError, TypeError):
        return [f"{RUN_CONFIG} is damaged"]


def config_differences(earlier: dict[str, Any], config: dict[str, dict[str, Any]]) -> list[str]:
    """Keys that make these two configurations different runs, with both values."""
    sections = {section: dict(earlier.get(section) or {}) for section in config}
    return [
        f"{section}.{key}: {sections[section].get(key)!r} there, {config[section].get(key)!r} here"
        for section in config
        for key in sorted({*config[section], *sections[section]})
        if key not in COSMETIC and config[section].get(key) != sections[section].get(key)
    ]


def last_whole_checkpoint(out: Path, files: Sequence[str]) -> str | None:
    """The newest checkpoint that was written to its end.

    A run that is killed while it saves leaves a folder that lacks files or holds cut ones; such a folder is skipped
    with one line.

    Args:
        out: folder of the run.
        files: names that a checkpoint of it holds, files or folders.
    """
    numbered = [path for path in out.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdigit()]
    for path in sorted(numbered, key=lambda path: int(path.name.rsplit("-", 1)[1]), reverse=True):
        damage = checkpoint_damage(path, files)
        if damage is None:
            return str(path)
        print(f"{path} is skipped: {damage}", file=sys.stderr)
    return None


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
        # training_args.bin is of no use for going on.
        if path.name != "training_args.bin" and not zipfile.is_zipfile(path):
            return f"{path.name} is cut off"
    return None


def stored_config(model_folder: Path) -> dict[str, Any]:
    """The configuration of the run that saved a model in its folder.

    Raises:
        OSError: if the model is not in a run's folder.
    """
    stored = model_folder.resolve().parent / RUN_CONFIG
    if not stored.exists():
        raise OSError(f"{stored} is missing, so the data is not known; give --config")
    return json.loads(stored.read_text(encoding="utf-8"))
