"""The training loop of a policy: steps, validation, checkpoints.

What a step draws (order of windows, noise, crops) follows from seed and step alone, so a run that goes on from a
checkpoint is the run that was never interrupted.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, get_cosine_schedule_with_warmup
from transformers.trainer import TRAINER_STATE_NAME

from hf_sparseprior.base.files import sync, whole_folder, write_text
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json
from hf_sparseprior.runs.command import RunStopped
from hf_sparseprior.runs.processes import check_joined, join_on_cpu
from hf_sparseprior.runs.run_folder import MODEL
from hf_sparseprior.training.ema import EMA_FILE, WeightAverage
from hf_sparseprior.training.finite import STOP, Diverged, LossWatch, all_finite
from hf_sparseprior.training.learning import LearningWatch
from hf_sparseprior.training.stopping import StopRequest
from hf_sparseprior.training.trainer import has_unlearned_predictor
from tasks.robotics.config import VALIDATION_SEED, TrainerConfig
from tasks.robotics.data import Windows
from tasks.robotics.policy import CrosswayPolicy
from tasks.robotics.rollout import Episode, rollout, summary

WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
SETTING = "trainer.nonfinite_loss"
LOGGED = ("loss", "diffusion")
STEPS, SAVE_STEPS = 3000, 500  # unless the config says others
CHECKPOINT_FILES = (WEIGHTS_FILE, EMA_FILE, OPTIMIZER_FILE, TRAINER_STATE_NAME)
# At validation processes wait for the one whose episodes take longest; torch would give up after ten minutes.
PATIENCE = timedelta(hours=24)


class Training:
    """The loop. All of its state goes into a checkpoint and comes back from it."""

    def __init__(
        self,
        policy: CrosswayPolicy,
        config: TrainerConfig,
        train: Windows,
        validation: Windows | None,
        out: Path,
    ) -> None:
        self.config, self.train, self.validation, self.out = config, train, validation, out
        self.accelerator = Accelerator(
            cpu=join_on_cpu(),
            mixed_precision=config.mixed_precision,
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=PATIENCE),
                DistributedDataParallelKwargs(find_unused_parameters=has_unlearned_predictor(policy)),
            ],
        )
        check_joined()
        if config.mixed_precision == "fp16" and self.accelerator.device.type == "cpu":
            raise ValueError("trainer.mixed_precision='fp16' is for GPUs; on a CPU use bf16 or no")
        processes, windows = self.accelerator.num_processes, min(config.batch_size, len(train))
        if windows < processes:
            raise ValueError(
                f"trainer.batch_size={config.batch_size} of {len(train)} windows must be at least the {processes} "
                "processes that share it"
            )
        optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=config.learning_rate,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
        )
        self.epoch_steps = max(1, len(train) // config.batch_size)  # a smaller last batch of an epoch is left out
        self.steps = config.epochs * self.epoch_steps if config.epochs else config.steps or STEPS
        # Not prepared, because accelerate would take a step for every process.
        self.schedule = get_cosine_schedule_with_warmup(optimizer, min(config.warmup_steps, self.steps), self.steps)
        self.model, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.policy: CrosswayPolicy = self.accelerator.unwrap_model(self.model)
        self.average = WeightAverage(self.policy, config.ema_decay)
        self.simulator: Any = None
        self.callbacks: Sequence[TrainerCallback] = ()  # hear of every step, `on_step_end` alone
        self.about: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.running: list[dict[str, float]] = []  # losses since the last entry of the history
        self.step = 0
        self.seconds = self.step_seconds = 0.0
        self.stop = StopRequest()
        self.watch = LossWatch()
        self.learning = LearningWatch(self.policy, is_main=self.accelerator.is_main_process)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train all steps that are left. Raises RunStopped on SIGTERM."""
        with self.stop:
            progress = tqdm(
                total=self.steps,
                initial=self.step,
                desc="training",
                disable=self.config.disable_tqdm or not self.accelerator.is_main_process,
                dynamic_ncols=True,
            )
            with progress:
                self._run(progress)
        self.learning.finish()
        if self.best is None:
            self._save_policy()

    def _run(self, progress: Any) -> None:
        self.learning.attach(self.optimizer)
        while self.step < self.steps:
            started = time.monotonic()
            self.running.append(self._update())
            elapsed = time.monotonic() - started
            self.seconds += elapsed
            self.step_seconds += elapsed
            progress.update()
            state = TrainerState(global_step=self.step, max_steps=self.steps)
            for callback in self.callbacks:
                callback.on_step_end(None, state, TrainerControl())  # without arguments
            if self.step % self.config.log_steps == 0 or self.step == self.steps:
                entry = {key: sum(losses[key] for losses in self.running) / len(self.running) for key in LOGGED}
                self.history.append({"step": self.step, **entry})
                self.running = []
                progress.set_postfix(self._numbers(), refresh=False)
            last = self.step == self.steps
            due = last or (self.config.validate_steps and self.step % self.config.validate_steps == 0)
            if due:
                self._check_weights()
                started = time.monotonic()
                self._validate()
                self.seconds += time.monotonic() - started
                progress.set_postfix(self._numbers(), refresh=False)
            every = self.config.save_steps or self.config.validate_steps or SAVE_STEPS
            stop = self.stop.agreed()
            if stop or last or self.step % every == 0:
                self._check_weights()
                self._save_checkpoint()
            if stop and not last:
                raise RunStopped(f"stopped at step {self.step}; the same command goes on from its checkpoint")

    def _update(self) -> dict[str, float]:
        """Do one step and return its losses."""
        self.model.train()
        observations, actions = self.train.batch(self._windows())
        device = self.accelerator.device
        actions = actions.to(device)
        drawn = self._drawn(actions)
        torch.manual_seed(_seed(self.config.seed, self.step, self.accelerator.process_index))
        losses = self.model({key: value.to(device) for key, value in observations.items()}, actions, **drawn)
        share = self._share()
        logged = {key: share * losses[key].detach() for key in LOGGED}
        if self.accelerator.num_processes > 1:
            logged = self.accelerator.reduce(logged, "mean")
        if self.config.nonfinite_loss == STOP:
            self.watch.check([self.step + 1], [logged["loss"].item()], SETTING)
        self.accelerator.backward(share * losses["loss"])
        if self.config.max_grad_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.average.update(ema_decay(self.step, self.config.ema_power, self.config.ema_decay))
        return {key: loss.item() for key, loss in logged.items()}

    def _drawn(self, actions: Tensor) -> dict[str, Any]:
        """Noise, diffusion steps and crops of this process' windows, as one process would draw them for all windows.

        Nothing for one process: its policy draws the same. Dropped paths and dropout are drawn by each process alone.
        """
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        if processes == 1:
            return {}
        torch.manual_seed(_seed(self.config.seed, self.step, 0))
        config = self.policy.config
        count = len(self._all_windows())
        noise = torch.randn(count, *actions.shape[1:], device=actions.device)
        steps = torch.randint(0, config.noise_levels, (count,), device=actions.device)
        drawn = {"noise": noise[index::processes], "steps": steps[index::processes]}
        if config.crop is None:
            return drawn
        places = {key: torch.rand(count * config.observation_steps, 2) for key in config.cameras}
        by_window = {key: place.unflatten(0, (count, -1)) for key, place in places.items()}
        return {**drawn, "crops": {key: place[index::processes].flatten(0, 1) for key, place in by_window.items()}}

    def _share(self) -> float:
        """What the mean loss of this process' windows is multiplied by, so that the mean over the processes is that
        over all windows: 1, unless they have different numbers of windows.
        """
        return len(self._windows()) * self.accelerator.num_processes / len(self._all_windows())

    def _check_weights(self) -> None:
        """Raise Diverged before weights that are not finite are judged or saved."""
        if self.config.nonfinite_loss == STOP and not all_finite(self.policy.parameters()):
            raise Diverged(f"the weights are not finite after step {self.step}; {self.watch.before(SETTING)}")

    def _windows(self) -> Tensor:
        """This process' windows of the next step."""
        return self._all_windows()[self.accelerator.process_index :: self.accelerator.num_processes]

    def _all_windows(self) -> Tensor:
        """The windows of the next step, of all processes. Every epoch has an order of its own."""
        size = self.config.batch_size
        epoch, index = divmod(self.step, self.epoch_steps)
        generator = torch.Generator().manual_seed(_seed(self.config.seed, epoch, 0))
        return torch.randperm(len(self.train), generator=generator)[index * size : (index + 1) * size]

    def _numbers(self) -> dict[str, str]:
        shown = {"diffusion": "loss", "validation_loss": "val loss", "validation_success": "val success"}
        latest = {key: entry[key] for entry in self.history for key in shown if key in entry}
        return {shown[key]: f"{value:.4g}" for key, value in latest.items()}

    # ---- validation -------------------------------------------------------------------------------------------------

    def _validate(self) -> None:
        """Measure validation loss and, if the simulator is used, success; save the best policy.

        Each process plays its share of the episodes. An episode follows from its seed, so it is the same anywhere.
        """
        entry: dict[str, Any] = {"step": self.step}
        with self.average.swapped_in():
            self.policy.eval()
            if self.validation is not None and self.accelerator.is_main_process:
                entry["validation_loss"] = validation_loss(
                    self.policy, self.validation, self.config.batch_size, self.config.validation_batches
                )
            played = self._played() if self.simulator is not None else []
        if self.accelerator.is_main_process:
            if self.simulator is not None:
                found = summary(played)
                entry |= {"validation_success": found["success"], "validation_max_reward": found["max_reward"]}
                if is_better(entry, self.best):
                    self.best = entry
                    self._save_policy()
            self.history.append(entry)
        self.accelerator.wait_for_everyone()

    def _played(self) -> list[Episode]:
        """The validation episodes, in the order of their seeds, of all processes."""
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        seeds = range(VALIDATION_SEED, VALIDATION_SEED + self.config.validation_episodes)
        mine = [rollout(self.policy, self.simulator, seed) for seed in seeds[index::processes]]
        return sorted(gather_object(mine), key=lambda episode: episode.seed)

    def metrics(self) -> dict[str, Any]:
        """The numbers of the policy that was saved: of the best validation or, without episodes, of the last step."""
        if self.best is not None:
            return {**_without_step(self.best), "policy_step": self.best["step"]}
        latest: dict[str, Any] = {}
        for entry in self.history:
            latest |= _without_step(entry)
        return latest

    # ---- files ------------------------------------------------------------------------------------------------------

    def _save_policy(self) -> None:
        """Save the averaged weights as the run's policy, in place of an earlier one."""
        if not self.accelerator.is_main_process:
            return
        scratch = self.out / f"{MODEL}.new"
        shutil.rmtree(scratch, ignore_errors=True)
        with self.average.swapped_in():
            self.policy.save_pretrained(scratch, {**self.about, "step": self.step})
        sync(scratch)
        shutil.rmtree(self.out / MODEL, ignore_errors=True)
        scratch.rename(self.out / MODEL)

    def _save_checkpoint(self) -> None:
        if not self.accelerator.is_main_process:
            self.accelerator.wait_for_everyone()
            return
        folder = self.out / f"checkpoint-{self.step}"
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
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
            sync(scratch)
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
        known = read_json(folder / TRAINER_STATE_NAME, RECORD_BYTES, finite=False)
        self.step, self.history, self.best = known["global_step"], known["history"], known["best"]
        self.seconds, self.step_seconds, self.running = known["seconds"], known["step_seconds"], known["running"]


def ema_decay(step: int, power: float, highest: float) -> float:
    """Decay of the moving average at update `step` (from 1): min(highest, 1 - (step - 1)^-power), 0 in the first two.

    Diffusion Policy's `EMAModel` counts updates from 0 and takes one off.
    """
    return min(highest, 1 - max(1, step - 1) ** -power)


def _seed(seed: int, step: int, process: int) -> int:
    """A seed of torch's generator for this step of this process."""
    return (seed * 1_000_003 + step) * 1_009 + process


@torch.no_grad()
def _without_step(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "step"}


def validation_loss(policy: CrosswayPolicy, windows: Windows, batch_size: int, batches: int) -> float:
    """Mean squared error of the noise over some windows, with the same windows, noise and diffusion steps every time.

    Args:
        policy: in evaluation mode.
        windows: windows of the validation episodes.
        batch_size, batches: how many windows; each is used at most once.
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


def is_better(entry: dict[str, Any], best: dict[str, Any] | None) -> bool:
    """Whether it has more successes or, with as many, more reward. Of equals the later wins: it has learned longer."""

    def rank(of: dict[str, Any]) -> tuple[float, float]:
        return of["validation_success"], of["validation_max_reward"]

    return best is None or rank(entry) >= rank(best)
