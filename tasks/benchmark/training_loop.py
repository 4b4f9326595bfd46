"""What the training loop costs besides the model.

Steps of `SparsePriorTrainer` and of a bare PyTorch loop over the same model and the same tensors in memory take turns
in one process. Both do the same work on a step: forward, backward, gradient clipping, AdamW, schedule.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, get_scheduler

from hf_sparseprior.images.model import build_model
from hf_sparseprior.images.sections import load_image_config
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair
from hf_sparseprior.training import (
    DrawSampler,
    Mixing,
    SoftTargetCollator,
    SparsePriorTrainer,
    SparsePriorTrainingArguments,
)
from tasks.benchmark.entry import Benchmark, Case, Session
from tasks.benchmark.timing import turn_order

BARE, TRAINER = "bare", "trainer"
CLASSES = [str(label) for label in range(10)]


class TensorImages(Dataset):
    """Random images in memory, indexed by `Draw`."""

    def __init__(self, count: int, channels: int, size: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randn(count, channels, *size, generator=generator)
        self.labels = torch.randint(len(CLASSES), (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, draw: Any) -> dict[str, Any]:
        return {"pixel_values": self.pixels[draw.index], "labels": int(self.labels[draw.index]), "draw": draw}


class StepClock(TrainerCallback):
    """Seconds of each step, from the end of the step before to its own end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())

    def seconds(self) -> np.ndarray:
        """Without the first step, which sets things up."""
        return np.diff(self.ends)


def trainer_steps(model: nn.Module, data: TensorImages, options: dict[str, Any], steps: int) -> np.ndarray:
    """Seconds of each step of SparsePriorTrainer."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = SparsePriorTrainingArguments(**{**options, "output_dir": folder, "max_steps": steps + 1})
        clock = StepClock()
        trainer = SparsePriorTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            train_sampler=DrawSampler(len(data)),
            train_collator=SoftTargetCollator(len(CLASSES), Mixing()),
            callbacks=[clock],
        )
        trainer.train()
        return clock.seconds()


def bare_steps(model: nn.Module, data: TensorImages, options: dict[str, Any], steps: int) -> np.ndarray:
    """Seconds of each step of the shortest loop that does the same."""
    arguments = SparsePriorTrainingArguments(**{**options, "output_dir": "unused"})
    device = arguments.device
    model.to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.learning_rate, weight_decay=arguments.weight_decay, eps=arguments.adam_epsilon
    )
    schedule = get_scheduler(arguments.lr_scheduler_type, optimizer, 0, steps + 1)
    size = arguments.per_device_train_batch_size
    ends = []
    for step in range(steps + 1):
        chosen = torch.arange(step * size, (step + 1) * size) % len(data)
        loss = model(pixel_values=data.pixels[chosen].to(device), labels=data.labels[chosen].to(device)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss.item() if device.type == "cpu" else torch.cuda.synchronize()
        ends.append(time.perf_counter())
    return np.diff(ends)


# What SparsePriorTrainer would do on a step besides, and the value with which it does not.
NOT_IN_THE_BARE_LOOP = {
    **{"gradient_accumulation_steps": 1, "effective_batch_size": None, "ema_decay": None, "layer_decay": 1.0},
    **{"backbone_learning_rate": 1.0, "bf16": False, "fp16": False, "gradient_checkpointing": False},
    "activation_checkpointing": False,
    **{"torch_compile": False, "label_smoothing_factor": 0.0, "optim": None},
}


def measure_loops(config: dict[str, dict[str, Any]], steps: int, rounds: int) -> dict[str, list[float]]:
    """Median seconds a step of each round, of both loops in turns.

    Raises:
        ValueError: for a configuration with which the two would do different work.
    """
    section = section_of(config)
    model = build_model(config["model"], CLASSES)
    height, width = as_pair(model.config.image_size)
    data = TensorImages(steps * section["per_device_train_batch_size"], model.config.num_channels, (height, width))
    seconds: dict[str, list[float]] = {BARE: [], TRAINER: []}
    for number in range(rounds):
        loops = {BARE: bare_steps, TRAINER: trainer_steps}
        for name in turn_order(list(loops), number):
            own = loops[name](copy.deepcopy(model), data, copy.deepcopy(section), steps)
            seconds[name].append(float(np.median(own)))
    return seconds


def section_of(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The configuration's section of the trainer, with nothing but steps to do.

    Raises:
        ValueError: for an option that the bare loop does not have.
    """
    section = {
        **{key: value for key, value in config["trainer"].items() if not key.startswith(("num_train", "warmup"))},
        **{"disable_tqdm": True, "report_to": "none", "eval_strategy": "no", "save_strategy": "no"},
        **{"dataloader_num_workers": 0, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": None},
        **{"remove_unused_columns": False, "logging_strategy": "no"},
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    for key, without in NOT_IN_THE_BARE_LOOP.items():
        if (value := section.get(key)) not in (None, without):
            raise ValueError(f"trainer.{key}={value!r} is not in the bare loop, so the two would do different work")
    return section


class TrainingLoop(Benchmark):
    """The entry."""

    def check(self, arguments: argparse.Namespace) -> None:
        """--steps and the configuration."""
        if arguments.steps < 2 or arguments.rounds < 1:
            raise ValueError(f"--steps {arguments.steps} must be 2 or more, --rounds {arguments.rounds} 1 or more")
        section_of(load_image_config(arguments.config, arguments.set))

    def plan(self, arguments: argparse.Namespace) -> Iterable[list[Case]]:
        """Both loops."""
        return [[{"loop": BARE}, {"loop": TRAINER}]]

    def measure(self, cases: list[Case], session: Session) -> list[Case]:
        """In turns."""
        arguments = session.arguments
        config = load_image_config(arguments.config, arguments.set)
        seconds = measure_loops(config, arguments.steps, arguments.rounds)
        return [{**case, "seconds": seconds[case["loop"]]} for case in cases]


BENCHMARK = TrainingLoop(
    name="training_loop",
    keys=("loop",),
    machine=("threads", "keep_memory"),
    same=("config", "set", "steps"),
    bases=(BARE,),
)
