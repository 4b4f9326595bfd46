"""Train a diffusion policy on demonstrations: python -m tasks.robotics.train --config FILE [section.key=value ...]

A run that was interrupted goes on from its last checkpoint; a finished run is not done again. What a step draws (order
of windows, noise, crops) follows from seed and step alone, so a resumed run is the run that was never interrupted.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import get_cosine_schedule_with_warmup
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging as transformers_logging

from hf_sparseprior import SparsePriorViTForImageClassification
from hf_sparseprior.analysis.pictures import ACCENT, INK, pyplot, save
from hf_sparseprior.files import whole_folder, write_text
from hf_sparseprior.pretrained import check_saved_folder, load_changed_model
from hf_sparseprior.training.allocator import keep_freed_memory
from hf_sparseprior.training.ema import EMA_FILE, WeightAverage
from tasks.common.command import RunStopped, run_command, train_parser
from tasks.common.environment import command_line, environment
from tasks.common.results import write_results
from tasks.common.run_folder import (
    MODEL,
    RESULTS,
    RUN_CONFIG,
    claim,
    finished_results,
    folder_differences,
    last_whole_checkpoint,
)
from tasks.robotics.config import VALIDATION_SEED, TrainerConfig, check_config, load_config
from tasks.robotics.data import Windows, check_shapes, fit_normalizer, read_episodes
from tasks.robotics.formats import demonstrations_sha256, open_demonstrations
from tasks.robotics.policy import CrosswayPolicy, policy_sha256
from tasks.robotics.rollout import make_matching_environment, rollout, summary

WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
LOGGED = ("loss", "diffusion")
CHECKPOINT_FILES = (WEIGHTS_FILE, EMA_FILE, OPTIMIZER_FILE, TRAINER_STATE_NAME)
DEMONSTRATIONS = "demonstrations"  # section of run_config.json beside the configuration's: what the file held
# One process rolls out at validation while the others wait; torch gives up after ten minutes.
PATIENCE = timedelta(hours=24)


def run(config: dict[str, dict[str, Any]], command: str | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Train, choose the policy on validation seeds if asked to, write results, policy and picture.

    Args:
        config: as `load_config` returns it; `trainer.output_dir` is where everything goes.
        command: for results.json.
        overwrite: throw away what an earlier run with another configuration left in the folder.

    Returns:
        The content of results.json.

    Raises:
        ValueError, OSError: for bad values and files, before anything is written.
        RunStopped: on SIGTERM, after a checkpoint was saved.
    """
    data, policy_config, trainer = check_config(config)
    out = Path(trainer.output_dir)
    identity = run_identity(config, out, overwrite)
    if finished := finished_results(out, identity, overwrite):
        return finished
    demonstrations = open_demonstrations(data.path)
    check_shapes(demonstrations, policy_config)
    names = demonstrations.split("train")[: data.episodes]
    episodes = read_episodes(demonstrations, names, policy_config)
    normalizer = fit_normalizer(episodes, policy_config, data.floor, data.floors)
    train_windows = Windows(episodes, policy_config)
    held_out = read_episodes(demonstrations, demonstrations.split("valid"), policy_config)
    torch.manual_seed(trainer.seed)
    policy = CrosswayPolicy(policy_config, normalizer)
    if folder := config["encoder"].get("pretrained"):
        start_encoders(policy, folder, config["encoder"])
    training = Training(policy, trainer, train_windows, Windows(held_out, policy_config) if held_out else None, out)
    training.about = {
        "environment": demonstrations.environment,
        "settings": demonstrations.settings,
        "demonstrations": Path(data.path).name,
        "seed": trainer.seed,
    }
    if trainer.validation_episodes:
        training.simulator = make_matching_environment(training.about, str(data.path))
    training.accelerator.wait_for_everyone()  # until every process has looked at what is there
    if training.accelerator.is_main_process:
        claim(out, identity)
    training.accelerator.wait_for_everyone()
    checkpoint = last_whole_checkpoint(out, CHECKPOINT_FILES)
    if checkpoint:
        print(f"going on from {checkpoint}", file=sys.stderr)
        training.load(Path(checkpoint))
    try:
        training.run()
    finally:
        if training.simulator is not None:
            training.simulator.close()
    results = {
        "task": "robotics",
        "environment": demonstrations.environment,
        "metrics": training.metrics(),
        "episodes": {"train": len(episodes), "valid": len(held_out)},
        "windows": len(train_windows),
        "prior": next((encoder.config.prior_name for encoder in policy.encoders.values()), None),
        "parameters": {name: _count(part) for name, part in policy.named_children()},
        "steps": training.steps,
        "seconds": round(training.seconds, 2),
        "seconds_per_step": training.step_seconds / training.steps,
        "processes": training.accelerator.num_processes,
        "resumed_from": checkpoint and Path(checkpoint).name,
        "command": command or command_line(),
        "config": config,
        "demonstrations_sha256": identity.get(DEMONSTRATIONS, {}).get("sha256"),
        **environment(),
        "history": training.history,
    }
    if training.accelerator.is_main_process:
        results["model_sha256"] = policy_sha256(out / MODEL)
        draw_history(training.history, out / "curves.png", f"{demonstrations.environment['name']}, {out.name}")
        # Last of all: a run counts as finished only when everything else is there.
        write_results(out / RESULTS, results)
    training.accelerator.wait_for_everyone()
    return results


def run_identity(config: dict[str, dict[str, Any]], out: Path, overwrite: bool) -> dict[str, dict[str, Any]]:
    """What makes the run this one: its configuration, and what its demonstrations hold, by SHA-256.

    The range of the demonstrations is the policy's normaliser: weights that were trained on others must not meet it.
    A run that did not note them, and a finished one whose demonstrations are gone, go by the configuration alone.

    Raises:
        ValueError: if the folder holds this run with other demonstrations, unless `overwrite`.
    """
    path, known = Path(config["data"]["path"]), None
    if (out / RUN_CONFIG).exists() and not folder_differences(out, config):
        stored = json.loads((out / RUN_CONFIG).read_text(encoding="utf-8"))
        known = stored[DEMONSTRATIONS]["sha256"] if DEMONSTRATIONS in stored else None
        if known is None or not path.exists():
            return config
    sha256 = demonstrations_sha256(path) if path.exists() else None
    if known not in (None, sha256) and not overwrite:
        raise ValueError(
            f"data.path={path} holds other demonstrations than those that {out} was trained on; "
            "choose another trainer.output_dir or give --overwrite"
        )
    return {**config, DEMONSTRATIONS: {"sha256": sha256}}


def start_encoders(policy: CrosswayPolicy, folder: str, encoder: dict[str, Any]) -> None:
    """Let every camera's encoder start from a saved SparsePriorViT; positions are interpolated to its grid.

    Raises:
        ValueError, OSError: if the folder does not fit.
    """
    check_saved_folder(folder, "encoder.pretrained")
    options = {key: value for key, value in encoder.items() if key not in ("preset", "pretrained")}
    for key in policy.config.cameras:
        size = policy.encoders[key].config.image_size
        changes = {**options, "image_size": size}
        classifier, _ = load_changed_model(folder, SparsePriorViTForImageClassification, **changes)
        policy.encoders[key].load_state_dict(classifier.vit.state_dict())


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Training:
    """The loop: what it knows goes into a checkpoint and comes back."""

    def __init__(
        self,
        policy: CrosswayPolicy,
        config: TrainerConfig,
        train: Windows,
        valid: Windows | None,
        out: Path,
    ) -> None:
        self.config, self.train, self.valid, self.out = config, train, valid, out
        self.accelerator = Accelerator(
            mixed_precision=config.mixed_precision, kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)]
        )
        processes, windows = self.accelerator.num_processes, min(config.batch_size, len(train))
        if windows < processes:
            raise ValueError(
                f"trainer.batch_size={config.batch_size} of {len(train)} windows must be at least the {processes} "
                "processes that share it"
            )
        optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=config.learning_rate,
            betas=tuple(config.betas),
            weight_decay=config.weight_decay,
        )
        self.epoch_steps = max(1, len(train) // config.batch_size)  # what is left of an epoch is left out
        self.steps = config.epochs * self.epoch_steps if config.epochs else config.steps
        # Not prepared: accelerate would take a step for every process.
        self.schedule = get_cosine_schedule_with_warmup(optimizer, min(config.warmup_steps, self.steps), self.steps)
        self.model, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.policy: CrosswayPolicy = self.accelerator.unwrap_model(self.model)
        self.average = WeightAverage(self.policy, config.ema_decay)
        self.simulator: Any = None
        self.about: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.running: list[dict[str, float]] = []  # losses since the last entry of the history
        self.step = 0
        self.seconds = self.step_seconds = 0.0
        self._stop = False

    # ---- steps ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All steps that are left; RunStopped on SIGTERM."""
        with _Terminate(self._request):
            progress = tqdm(
                total=self.steps,
                initial=self.step,
                desc="training",
                disable=self.config.disable_tqdm or not self.accelerator.is_main_process,
                dynamic_ncols=True,
            )
            with progress:
                self._run(progress)
        if self.best is None:
            self._save_policy()

    def _run(self, progress: Any) -> None:
        while self.step < self.steps:
            started = time.monotonic()
            self.running.append(self._update())
            elapsed = time.monotonic() - started
            self.seconds += elapsed
            self.step_seconds += elapsed
            progress.update()
            if self.step % self.config.log_steps == 0 or self.step == self.steps:
                entry = {key: sum(losses[key] for losses in self.running) / len(self.running) for key in LOGGED}
                self.history.append({"step": self.step, **entry})
                self.running = []
                progress.set_postfix(self._numbers(), refresh=False)
            last = self.step == self.steps
            due = last or (self.config.validate_steps and self.step % self.config.validate_steps == 0)
            if due:
                started = time.monotonic()
                self._validate()
                self.seconds += time.monotonic() - started
                progress.set_postfix(self._numbers(), refresh=False)
            every = self.config.save_steps or self.config.validate_steps
            stop = self._stop_requested()
            if stop or last or (every and self.step % every == 0):
                self._save_checkpoint()
            if stop and not last:
                raise RunStopped(f"stopped at step {self.step}; the same command goes on from its checkpoint")

    def _update(self) -> dict[str, float]:
        """One step; its losses."""
        self.model.train()
        torch.manual_seed(_seed(self.config.seed, self.step, self.accelerator.process_index))
        observations, actions = self.train.batch(self._windows())
        device = self.accelerator.device
        losses = self.model({key: value.to(device) for key, value in observations.items()}, actions.to(device))
        if not torch.isfinite(losses["loss"]):
            raise ValueError(
                f"the loss of step {self.step + 1} is {losses['loss'].item()}; lower trainer.learning_rate"
            )
        self.accelerator.backward(losses["loss"])
        if self.config.max_grad_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.average.update(ema_decay(self.step, self.config.ema_power, self.config.ema_decay))
        return {key: losses[key].item() for key in LOGGED}

    def _windows(self) -> Tensor:
        """This process' windows of the next step; every epoch has an order of its own."""
        size = self.config.batch_size
        epoch, index = divmod(self.step, self.epoch_steps)
        generator = torch.Generator().manual_seed(_seed(self.config.seed, epoch, 0))
        order = torch.randperm(len(self.train), generator=generator)[index * size : (index + 1) * size]
        return order[self.accelerator.process_index :: self.accelerator.num_processes]

    def _numbers(self) -> dict[str, str]:
        shown = {"diffusion": "loss", "validation_loss": "val loss", "validation_success": "val success"}
        latest = {key: entry[key] for entry in self.history for key in shown if key in entry}
        return {shown[key]: f"{value:.4g}" for key, value in latest.items()}

    def _request(self) -> None:
        self._stop = True

    def _stop_requested(self) -> bool:
        """Whether any process was told to stop."""
        if self.accelerator.num_processes == 1:
            return self._stop
        flag = torch.tensor(int(self._stop), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum"))

    # ---- validation -------------------------------------------------------------------------------------------------

    def _validate(self) -> None:
        """Validation loss and, if the simulator is asked, success; the best policy is saved. By one process."""
        if self.accelerator.is_main_process:
            entry: dict[str, Any] = {"step": self.step}
            with self.average.swapped_in():
                self.policy.eval()
                if self.valid is not None:
                    entry["validation_loss"] = validation_loss(
                        self.policy, self.valid, self.config.batch_size, self.config.validation_batches
                    )
                if self.simulator is not None:
                    seeds = range(VALIDATION_SEED, VALIDATION_SEED + self.config.validation_episodes)
                    found = summary([rollout(self.policy, self.simulator, seed) for seed in seeds])
                    entry |= {
                        "validation_success": found["success"],
                        "validation_max_reward": found["max_reward"],
                    }
            if self.simulator is not None and _better(entry, self.best):
                self.best = entry
                self._save_policy()
            self.history.append(entry)
        self.accelerator.wait_for_everyone()

    def metrics(self) -> dict[str, Any]:
        """The numbers of the policy that was saved."""
        latest: dict[str, Any] = {}
        for entry in self.history:
            latest |= {key: value for key, value in entry.items() if key != "step"}
        if self.best is not None:
            latest |= {key: value for key, value in self.best.items() if key != "step"} | {
                "policy_step": self.best["step"]
            }
        return latest

    # ---- files ------------------------------------------------------------------------------------------------------

    def _save_policy(self) -> None:
        """The averaged weights as the run's policy, in place of an earlier one."""
        if not self.accelerator.is_main_process:
            return
        scratch = self.out / f"{MODEL}.new"
        shutil.rmtree(scratch, ignore_errors=True)
        with self.average.swapped_in():
            self.policy.save_pretrained(scratch, {**self.about, "step": self.step})
        shutil.rmtree(self.out / MODEL, ignore_errors=True)
        scratch.rename(self.out / MODEL)

    def _save_checkpoint(self) -> None:
        if not self.accelerator.is_main_process:
            self.accelerator.wait_for_everyone()
            return
        folder = self.out / f"checkpoint-{self.step}"
        shutil.rmtree(folder, ignore_errors=True)  # one that was found damaged
        with whole_folder(folder) as scratch:
            state = {name: value.contiguous() for name, value in self.policy.state_dict().items()}
            save_file(state, scratch / WEIGHTS_FILE)
            self.average.save(scratch)
            scaler = self.accelerator.scaler
            torch.save(
                {
                    "optimizer": self.optimizer.state_dict(),
                    "schedule": self.schedule.state_dict(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                },
                scratch / OPTIMIZER_FILE,
            )
            known = {
                "global_step": self.step,
                "seconds": self.seconds,
                "step_seconds": self.step_seconds,
                "best": self.best,
                "history": self.history,
                "running": self.running,
            }
            write_text(scratch / TRAINER_STATE_NAME, json.dumps(known, indent=1) + "\n")
        for other in self.out.glob("checkpoint-*"):
            if other != folder and other.name.rsplit("-", 1)[1].isdigit():
                shutil.rmtree(other)
        self.accelerator.wait_for_everyone()

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        self.policy.load_state_dict(load_file(folder / WEIGHTS_FILE))
        self.average.load(folder)
        stored = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(stored["optimizer"])
        self.schedule.load_state_dict(stored["schedule"])
        if self.accelerator.scaler is not None and stored["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(stored["scaler"])
        known = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        self.step, self.history, self.best = known["global_step"], known["history"], known["best"]
        self.seconds, self.step_seconds, self.running = known["seconds"], known["step_seconds"], known["running"]


class _Terminate:
    """Calls a function on SIGTERM instead of ending the process, while the block runs."""

    def __init__(self, request: Any) -> None:
        self.request = request

    def __enter__(self) -> None:
        # Elsewhere Python allows no handlers.
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.earlier = signal.signal(signal.SIGTERM, lambda signum, frame: self.request())

    def __exit__(self, *exception: object) -> None:
        if self.main:
            signal.signal(signal.SIGTERM, self.earlier)


def ema_decay(step: int, power: float, highest: float) -> float:
    """Decay of the moving average at update `step` (from 1): min(highest, 1 - step^-power), 0 at the first."""
    return min(highest, 1 - step**-power)


def _seed(seed: int, step: int, process: int) -> int:
    """A seed of torch's generator for this step of this process."""
    return (seed * 1_000_003 + step) * 1_009 + process


@torch.no_grad()
def validation_loss(policy: CrosswayPolicy, windows: Windows, batch_size: int, batches: int) -> float:
    """Mean squared error of the noise over some windows, with the same windows, noise and diffusion steps every time.

    Args:
        policy: in evaluation mode.
        windows: of validation episodes.
        batch_size, batches: how many windows; each at most once.
    """
    generator = torch.Generator().manual_seed(0)
    device = next(policy.parameters()).device
    losses, count = 0.0, 0
    for chosen in torch.randperm(len(windows), generator=generator).split(batch_size)[:batches]:
        observations, actions = windows.batch(chosen)
        noise = torch.randn(actions.shape, generator=generator)
        steps = torch.randint(0, policy.config.noise_levels, (len(chosen),), generator=generator)
        losses += (
            len(chosen)
            * policy(
                {key: value.to(device) for key, value in observations.items()},
                *(tensor.to(device) for tensor in (actions, noise, steps)),
            )["diffusion"].item()
        )
        count += len(chosen)
    return losses / count


def _better(entry: dict[str, Any], best: dict[str, Any] | None) -> bool:
    """More successes, then more reward; of equals the later one, which has learned for longer."""

    def rank(of: dict[str, Any]) -> tuple[float, float]:
        return of["validation_success"], of["validation_max_reward"]

    return best is None or rank(entry) >= rank(best)


def draw_history(history: Sequence[dict[str, Any]], path: Path, heading: str) -> Path:
    """Losses over steps and, if the simulator was asked, success on validation seeds."""
    plt = pyplot()
    simulated = [
        (entry["step"], 100 * entry["validation_success"]) for entry in history if "validation_success" in entry
    ]
    figure, axes = plt.subplots(1, 2 if simulated else 1, figsize=(9 if simulated else 5, 3.6), layout="constrained")
    left = axes[0] if simulated else axes
    for key, label, colour in (("diffusion", "training", INK), ("validation_loss", "validation, EMA", ACCENT)):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        if points:
            left.plot(*zip(*points, strict=True), color=colour, label=label, marker="." if len(points) < 3 else None)
    left.set_yscale("log")
    left.set_ylabel("mean squared error of the noise")
    left.legend(frameon=False)
    if simulated:
        axes[1].plot(*zip(*simulated, strict=True), color=ACCENT, marker=".")
        axes[1].set_ylim(-4, 104)
        axes[1].set_ylabel("success on validation seeds, %")
    for axis in axes if simulated else [axes]:
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle(heading)
    return save(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = train_parser("robotics", "Train a diffusion policy on demonstrations.", "encoder.prior=violin")
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()  # bars for reading and writing weights; the training bar stays

    def work() -> None:
        keep_freed_memory()
        config = load_config(arguments.config, arguments.overrides)
        results = run(config, overwrite=arguments.overwrite)
        if not PartialState().is_main_process:
            return
        out = config["trainer"]["output_dir"]
        for name, value in results["metrics"].items():
            print(f"{name}: {value:.4g}")
        print(f"{results['steps']} steps in {results['seconds']:.0f} s")
        print(f"results: {out}/{RESULTS}, picture: {out}/curves.png, policy: {out}/{MODEL}")

    return run_command(parser.prog, work, "from the last checkpoint")


if __name__ == "__main__":
    sys.exit(main())
