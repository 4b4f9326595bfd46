"""Processes: those that a launcher such as torchrun started for one run, and those that a command starts itself."""

from __future__ import annotations

import os

import torch
from torch import distributed


def started() -> int:
    """How many processes a launcher says that it started for this run; 1 without one.

    Raises:
        ValueError: for a WORLD_SIZE that is no number of processes.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"WORLD_SIZE={text!r} in the environment must be an integer of 1 or more")
    return int(text)


def join_on_cpu() -> bool:
    """Whether several processes have to be asked to join on the CPU: libraries join on an accelerator or not at all."""
    return started() > 1 and not torch.accelerator.is_available()


def check_joined() -> None:
    """Raise ValueError unless all processes of this run have joined.

    Otherwise each of them would do the whole run, in one folder.
    """
    joined = distributed.is_available() and distributed.is_initialized()
    processes = distributed.get_world_size() if joined else 1
    if "WORLD_SIZE" in os.environ and started() != processes:
        raise ValueError(
            f"WORLD_SIZE={started()} in the environment, but {processes} of these processes joined; start the run with "
            "torchrun, or without WORLD_SIZE for one process"
        )


def visible_gpus() -> list[str]:
    """Names of this process's GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


def check_alone(command: str) -> None:
    """Raise ValueError if a launcher started several processes for a command that needs one: each would do it all."""
    if started() > 1:
        raise ValueError(
            f"WORLD_SIZE={started()} in the environment, but {command} runs in one process; start it alone"
        )
