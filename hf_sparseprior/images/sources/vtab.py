"""VTAB-1K in its published layout: for each task a folder with lists of images and labels and the folder of images."""

from __future__ import annotations

import os
from pathlib import Path

from hf_sparseprior.images.config import DataConfig, Decoding
from hf_sparseprior.images.sources.images import ImageData, Images, counts, data_folder, file_images, is_whole_number
from hf_sparseprior.images.vtab_tasks import LISTS, STAGES, TASKS, Task
from hf_sparseprior.runs.command import shown


def read_vtab(config: DataConfig) -> ImageData:
    """The lists of images that one stage of the protocol uses of one task.

    Raises:
        ValueError, OSError: for missing lists and images, lines that are not an image and a label, and labels that the
            task does not have. The message has list and line.
    """
    if config.task is None or config.stage is None:
        name, known = ("task", TASKS) if config.task is None else ("stage", STAGES)
        raise ValueError(f"data.source='vtab' needs data.{name}, one of {', '.join(known)}")
    task, stage = TASKS[config.task], STAGES[config.stage]
    folder = task_folder(data_folder(config), task)
    lists = {name: read_list(folder / f"{name}.txt", task, config.decoding) for name in set(stage.values())}
    splits = {split: lists[name] for split, name in stage.items()}
    classes = [str(label) for label in range(task.classes)]
    return ImageData(splits, classes, f"VTAB-1K {task.name}, {config.stage} ({counts(splits)})")


def task_folder(root: Path, task: Task) -> Path:
    """A task's folder, which has all of its lists.

    Raises:
        OSError: the message names the folder or list that is missing.
    """
    folder = root / task.name
    if not folder.is_dir():
        raise OSError(f"data.path={root} has no folder {task.name}")
    for name in LISTS:
        if not (folder / f"{name}.txt").is_file():
            raise OSError(f"{folder} has no list {name}.txt")
    return folder


def read_list(path: Path, task: Task, decoding: Decoding) -> Images:
    """The images and labels of a list: `images/NAME.jpg LABEL`, one a line, relative to its folder."""
    files, labels, problems = [], [], []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error})") from None
    for number, line in enumerate(lines, start=1):
        image, _, label = line.strip().rpartition(" ")
        files.append(str(path.parent / image.strip()))
        if not image or not is_whole_number(label) or int(label) < 0:
            problems.append(f"line {number}: {shown(line)} is not an image and a label")
        elif int(label) >= task.classes:
            problems.append(f"line {number}: label {label} must be below the {task.classes} classes of {task.name}")
        elif not os.path.isfile(files[-1]):
            problems.append(f"line {number}: {files[-1]} does not exist")
        else:
            labels.append(int(label))
    if problems:
        raise ValueError(f"{path}, {problems[0]} ({len(problems)} of {len(lines)} lines are bad)")
    if not lines:
        raise ValueError(f"{path} lists no images")
    return file_images(files, labels, decoding)
