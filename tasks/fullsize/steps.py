"""The command lines of a run at full size: its own `train` and `evaluate`, with fixtures, two steps and a checkpoint.

Only paths of data and models, numbers of steps and images, and what belongs to the machine are replaced: processes that
read data, lines of progress, the parts in which one device does a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tasks.fullsize.configs import PaperRun
from tasks.fullsize.fixtures import VTAB_TASK

IMAGES = 2  # of a step: mixing takes pairs, and batch norms more than one
STEPS = 2  # the second one is done after the run was killed and started again
TESTED = 4  # images that are tested
NEIGHBOURS = 24  # images of pretraining's k-NN, which asks 20 of them
WINDOWS = 8  # actions of a robot's episode
FIXTURE_OF = {
    "ADEChallengeData2016": "ade20k",
    "pusht_cchi_v7_replay.zarr": "pusht",
    "image_abs.hdf5": "lift",
}  # by the last part of a path


def fixture_of(run: PaperRun) -> str:
    """The fixture that takes the place of a run's data."""
    data = run.config.get("data", {})
    path = str(data.get("path", run.config.get("data_root", "")))
    if run.task in ("robotics", "segmentation", "detection"):
        if run.task == "robotics" and "/can/" in path:
            return "can"
        return FIXTURE_OF.get(Path(path).name, Path(path).name)
    if run.task == "video":
        return next((name for name in ("smarthome", "nucla", "ntu60") if name in path), "smarthome")
    return str(data["source"])


def train_overrides(run: PaperRun, out: Path, data: Path, models: Mapping[str, Path]) -> list[str]:
    """What follows `train --config FILE#CELL`.

    Args:
        run: what is trained.
        out: the run's folder.
        data: folder of its fixture.
        models: {key: folder} of what it starts from.
    """
    make = {"robotics": _robotics, "segmentation": _mm, "detection": _mm}.get(run.task, _trainer)
    starts = [f"{key}={folder}" for key, folder in models.items()]
    return [*make(run, out, data), *starts]


def _trainer(run: PaperRun, out: Path, data: Path) -> list[str]:
    """Of tasks on transformers' Trainer."""
    trainer = {
        "output_dir": out,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "dataloader_num_workers": 0,
        "dataloader_persistent_workers": "false",
        "disable_tqdm": "true",
        "gradient_accumulation_steps": 1,
    }
    if not torch.accelerator.is_available():
        trainer["use_cpu"] = "true"  # transformers refuses bf16 without a GPU otherwise
    if run.trains:
        trainer["max_steps"] = STEPS
    if run.config["trainer"].get("effective_batch_size"):
        trainer["effective_batch_size"] = IMAGES
    else:
        trainer["per_device_train_batch_size"] = IMAGES
    overrides = [f"trainer.{key}={value}" for key, value in trainer.items()]
    if run.task == "video":
        lists = [f"data.lists={data / 'lists'}"] if run.config["data"].get("lists") else []
        return [*overrides, f"data.path={data / 'videos'}", *lists]
    train = max(STEPS * IMAGES, NEIGHBOURS if run.task == "pretraining" else 0)
    overrides += [f"data.path={data}", f"data.limit_train={train}"]
    overrides += [f"data.limit_{split}={TESTED}" for split in ("validation", "test")]
    if run.config.get("token_labels"):
        overrides.append(f"token_labels.path={out}_label_maps")
    if run.source == "vtab":
        overrides.append(f"data.task={VTAB_TASK}")
    if run.config.get("evaluation", {}).get("linear"):
        overrides.append("evaluation.linear_epochs=1")
    if run.config.get("compression", {}).get("method"):
        overrides += ["compression.search_epochs=1", "compression.interval=1"]
    return overrides


def _robotics(run: PaperRun, out: Path, data: Path) -> list[str]:
    trainer = {
        "output_dir": out,
        "epochs": "null",
        "steps": STEPS,
        "batch_size": IMAGES,
        "log_steps": 1,
        "save_steps": 1,
        "validate_steps": STEPS,
        "validation_batches": 1,
        "validation_episodes": 0,
        "disable_tqdm": "true",
    }
    path = data / Path(run.config["data"]["path"]).name
    return [f"data.path={path}", "data.episodes=null", *(f"trainer.{key}={value}" for key, value in trainer.items())]


def _mm(run: PaperRun, out: Path, data: Path) -> list[str]:
    overrides = [f"output_dir={out}", f"train_dataloader.batch_size={IMAGES}"]
    root = f"{data}/" if run.config["data_root"].endswith("/") else str(data)
    for part in ("train", "val", "test"):
        overrides += [f"{part}_dataloader.{key}" for key in ("num_workers=0", "persistent_workers=False")]
        overrides.append(f"{part}_dataloader.dataset.data_root={root}")
    if run.config["train_cfg"].get("type") == "EpochBasedTrainLoop":  # an epoch is one step
        loop = [f"train_cfg.max_epochs={STEPS}", f"train_cfg.val_interval={STEPS}"]
        loop.append(f"train_dataloader.dataset.indices={IMAGES}")
    else:
        loop = [f"train_cfg.max_iters={STEPS}", f"train_cfg.val_interval={STEPS}"]
    tested = [f"{part}_dataloader.dataset.indices=1" for part in ("val", "test")]
    return [*overrides, *loop, *tested, "default_hooks.checkpoint.interval=1", "default_hooks.logger.interval=1"]


def evaluate_arguments(run: PaperRun, out: Path) -> list[str]:
    """What follows `evaluate`."""
    if run.task != "robotics":
        return [str(out)]
    # One plan of two evaluations of the network; a whole episode has some 40 plans of 100.
    episode = ["--episodes", "1", "--max-steps", str(WINDOWS)]
    return [str(out), *episode, "--sampler", "ddim", "--sampling-steps", "2"]


def first_checkpoint(out: Path) -> Path | None:
    """The checkpoint after the first step, if it is there under its own name."""
    places = (out / "checkpoint-1", out / "iter_1.pth", out / "epoch_1.pth")
    return next((place for place in places if place.exists()), None)


def after_first(out: Path) -> list[Path]:
    """What a run wrote into its folder after its first checkpoint."""
    names = ("checkpoint-2", "iter_2.pth", "epoch_2.pth", "results.json", "model", "model_ema", "last_checkpoint")
    return [out / name for name in names if (out / name).exists()]


def losses(results: Mapping[str, Any]) -> list[float | None]:
    """The training losses of results.json, in order."""
    return [entry["loss"] for entry in results.get("history", ()) if "loss" in entry]
