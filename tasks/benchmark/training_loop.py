"""What the training loop costs besides the model: python -m tasks.benchmark.training_loop --config FILE

Steps of `SparsePriorTrainer` and of a bare PyTorch loop over the same model and the same tensors in memory take turns
in one process. Both do the same work on a step: forward, backward, gradient clipping, AdamW, schedule.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, get_scheduler
from transformers.utils import logging as transformers_logging

from hf_sparseprior.cli.command import USER_ERRORS, report_error
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair
from hf_sparseprior.training import (
    DrawSampler,
    Mixing,
    SoftTargetCollator,
    SparsePriorTrainer,
    SparsePriorTrainingArguments,
)
from tasks.benchmark import commands, report
from tasks.benchmark.timing import turn_order
from tasks.common.environment import command_line, environment
from tasks.common.images.model import build_model
from tasks.common.images.sections import load_image_config
from tasks.common.results import write_results

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
    **{"torch_compile": False, "label_smoothing_factor": 0.0, "optim": None},
}


def measure(config: dict[str, dict[str, Any]], steps: int, rounds: int) -> dict[str, Any]:
    """Median seconds a step of both loops, and the Trainer's speed as a share of the bare loop's."""
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
    model = build_model(config["model"], CLASSES)
    height, width = as_pair(model.config.image_size)
    data = TensorImages(steps * section["per_device_train_batch_size"], model.config.num_channels, (height, width))
    seconds: dict[str, list[np.ndarray]] = {"bare": [], "trainer": []}
    for number in range(rounds):
        loops = {"bare": bare_steps, "trainer": trainer_steps}
        for name in turn_order(list(loops), number):
            seconds[name].append(loops[name](copy.deepcopy(model), data, copy.deepcopy(section), steps))
            print(f"round {number + 1} of {rounds}, {name}: {1000 * np.median(seconds[name][-1]):.1f} ms a step")
    medians = {name: float(np.median(np.concatenate(values))) for name, values in seconds.items()}
    shares = [float(np.median(b) / np.median(t)) for b, t in zip(seconds["bare"], seconds["trainer"], strict=True)]
    return {
        "task": "benchmark",
        "seconds_per_step": medians,
        "share_of_bare_speed": float(np.median(shares)),
        "share_of_each_round": shares,
        "steps": steps,
        "rounds": rounds,
        "command": command_line(),
        "config": config,
        **environment(),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.training_loop()
    arguments = parser.parse_intermixed_args(argv)
    if arguments.steps < 2 or arguments.rounds < 1:
        parser.error(f"--steps {arguments.steps} must be 2 or more, --rounds {arguments.rounds} 1 or more")
    transformers_logging.set_verbosity_error()
    try:
        report.check_file(arguments.out)
        results = measure(load_image_config(arguments.config, arguments.overrides), arguments.steps, arguments.rounds)
    except USER_ERRORS as error:
        return report_error(parser.prog, error)
    write_results(arguments.out, results)
    medians, shares = results["seconds_per_step"], results["share_of_each_round"]
    print(
        f"bare loop {1000 * medians['bare']:.1f} ms a step, trainer {1000 * medians['trainer']:.1f} ms: "
        f"{100 * results['share_of_bare_speed']:.1f} % of the bare loop's speed "
        f"(rounds {100 * min(shares):.1f} to {100 * max(shares):.1f} %); {arguments.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
