"""One run: canvases made on the way, a budget of processor time, accuracy over that time, going on after a stop.

The clock is the processor time of the process with one thread, so other load on the machine does not count; on a GPU it
is wall time with everything waited for. It runs while a step computes. Making images, evaluations, saving and the first
call of a model, which may compile kernels, are not counted. The learning rate follows the clock: it rises during the
first twentieth of the time and falls to 0 along a cosine, for every contender alike.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hf_sparseprior
from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.base.files import replace_durably, whole_folder
from hf_sparseprior.models.pretrained import weights_sha256
from hf_sparseprior.runs.command import RunStopped
from hf_sparseprior.runs.metrics import pack_correct
from hf_sparseprior.runs.models import about_model, trainable_parameters
from hf_sparseprior.runs.results import Results
from hf_sparseprior.runs.run_folder import MODEL, RESULTS, cut_off, owned
from hf_sparseprior.training import StopRequest
from hf_sparseprior.training.distillation import (
    Distillation,
    Teacher,
    freeze_predictors,
    prune_predictors,
    train_predictors_alone,
)
from hf_sparseprior.training.layer_decay import adamw
from tasks.canvases.contenders import DENSE, SPARSIFY, VARIANTS, Run, Scale
from tasks.canvases.data import SELECTION_SEED, TEST_SEED, Canvases, as_input
from tasks.canvases.drawings import Drawings
from tasks.canvases.patches import changed_model

STATE = "state.pt"
PREDICTOR = "predictor"  # the model after Sparsifiner's first phase
SAVE_EVERY = 60.0  # seconds of the clock
WARM_UP = 0.05  # of the time
WEIGHT_DECAY, LARGEST_GRADIENT = 0.05, 1.0
EVAL_BATCH = 8
# What `sparsify` sees: half of the images are for its test, which uses four of them.
CHOICE_IMAGES, CHOICE = 32, {"calibration": 8, "test": 4, "seconds": 0.5}

Clock = Callable[[], float]


def clock_of(device: str) -> Clock:
    """Seconds as they are counted on a device."""
    return time.process_time if device == "cpu" else _after_all_work


def _after_all_work() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def check_device(device: str) -> None:
    """Raise ValueError where the device is missing; let a CPU compute with one thread."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("scale gpu needs a CUDA device, and torch finds none here")
    if device == "cpu":
        torch.set_num_threads(1)  # the clock counts processor time


def run_folder(out: Path, group: str, row: str, seed: int) -> Path:
    """The folder of a run."""
    return out / group / row / f"seed{seed}"


def start_folder(out: Path, run: Run) -> Path | None:
    """The saved model that a run starts from; None: from scratch."""
    return None if run.start is None else run_folder(out, *run.start, 0) / MODEL


def do_run(run: Run, scale: Scale, out: Path, data: str | None = None, callbacks: Iterable[Any] = ()) -> None:
    """Do a run, or go on with it, and leave results.json in its folder.

    Args:
        run: what to do. scale: its scale.
        out: folder of all runs.
        data: folder of Fashion-MNIST; None: that of Debian's package.
        callbacks: their `on_step_end` hears of the progress (tasks/common/queue.py).

    Raises:
        InUse: if another process does it.
        RunStopped: on SIGTERM, after its state was saved.
        ValueError, OSError: for bad settings and missing files.
    """
    check_device(scale.device)
    folder = run_folder(out, run.group, run.row, run.seed)

    def newest() -> str | None:
        path = folder / STATE
        return str(path) if path.exists() and cut_off(path) is None else None

    with owned(folder, run.config(scale), newest, field="OUT") as state, StopRequest() as stop:
        training = Training(run, scale, out, data)
        training.do(state, stop, list(callbacks))
        training.finish()
        (folder / STATE).unlink(missing_ok=True)
        shutil.rmtree(folder / PREDICTOR, ignore_errors=True)
        if stop.requested:
            raise RunStopped("stopped after this run; the same command goes on with the next")


class Training:
    """The run itself; arguments as of `do_run`."""

    def __init__(self, run: Run, scale: Scale, out: Path, data: str | None) -> None:
        self.run, self.scale = run, scale
        self.folder, self.start = run_folder(out, run.group, run.row, run.seed), start_folder(out, run)
        self.clock = clock_of(scale.device)
        self.variant, self.contender = VARIANTS[run.variant], run.contender
        self.pools = self.variant.pools(scale.device, data)
        self.patch, self.side = scale.patch * self.contender.patch, run.side // self.contender.shrink
        self.prior = self.contender.prior
        # Of the clock: where a phase ends, with the first step of the next.
        self.ends = [60 * run.minutes]
        if self.contender.predictor_share:
            self.ends.insert(0, self.ends[0] * self.contender.predictor_share)
        self.phase, self.step, self.spent, self.images = 0, 0, 0.0, 0
        self.curve: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.model: Any = None
        self.optimizer: Any = None
        self.distillation: Distillation | None = None

    # ---- the phases -------------------------------------------------------------------------------------------------

    def do(self, state: str | None, stop: StopRequest, callbacks: list[Any]) -> None:
        """All phases, from a saved state on if one is given."""
        saved = None if state is None else torch.load(state, map_location="cpu", weights_only=True)
        if saved is not None:
            for name in ("phase", "step", "spent", "images", "curve", "losses", "prior"):
                setattr(self, name, saved[name])
        while True:
            self._begin(saved)
            saved = None
            self._train(stop, callbacks)
            if self.phase == len(self.ends) - 1:
                return
            self._end_predictor()

    @property
    def predictor_phase(self) -> bool:
        """Whether only the predictor is trained now."""
        return self.phase < len(self.ends) - 1

    def _begin(self, saved: dict[str, Any] | None) -> None:
        """Model, loss and optimizer of a phase."""
        torch.manual_seed(self.run.seed)
        self.model = self._make_model().to(self.scale.device)
        self.distillation = None
        if self.predictor_phase:
            assert self.start is not None
            train_predictors_alone(self.model)
            teacher = Teacher.from_pretrained(self.start)
            teacher.model.to(self.scale.device)
            self.distillation = Distillation({"attention": 1.0}, teacher)
            self.distillation.check(self.model)
        elif len(self.ends) > 1:
            freeze_predictors(self.model)
        self.optimizer = adamw(self.model, self.run.rate, WEIGHT_DECAY)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.model.train()
        side, batch = self._canvas()
        self.canvases = self.variant.images(self.pools["train"], side, self.run.seed)
        self._loss(*self.canvases.batch(0, batch)).backward()  # kernels may be compiled, which is not counted
        self.optimizer.zero_grad(set_to_none=True)

    def _make_model(self) -> Any:
        if self.start is None:
            sizes = {"image_size": self.side, "patch_size": self.patch, "num_labels": self.variant.classes}
            config = SparsePriorViTConfig(**self.scale.model, **sizes, prior=self.prior)
            return SparsePriorViTForImageClassification(config)
        if self.predictor_phase:
            return changed_model(self.start, self.scale.start[-1].side, self.patch, self.prior)
        folder = self.folder / PREDICTOR if len(self.ends) > 1 else self.start
        if self.contender.budget is not None and not self.spent:
            self._choose_prior(self.contender.budget)
        return changed_model(folder, self.side, self.patch, self.prior)

    def _choose_prior(self, budget: float) -> None:
        """What `sparsify` chooses on canvases of training; its time counts.

        Raises:
            ValueError: for a budget that no choice meets, from `sparsify`.
        """
        dense = changed_model(self.start or "", self.side, self.patch, DENSE).to(self.scale.device)
        images, _ = self.variant.images(self.pools["train"], self.run.side, self.run.seed).batch(0, CHOICE_IMAGES)
        settings = {**CHOICE, "batch": self.scale.inference_batch, "device": self.scale.device, "seed": self.run.seed}
        started = self.clock()
        chosen = getattr(hf_sparseprior, SPARSIFY)(dense, as_input(images), budget=budget, settings=settings)
        self.spent += self.clock() - started
        self.prior = chosen.model.config.prior
        print(f"{self.run.name}: chosen in {self.spent / 60:.2f} minutes", file=sys.stderr, flush=True)

    def _canvas(self) -> tuple[int, int]:
        """Side of the canvases of this phase, and images a step; the predictor learns at the size of the start."""
        stage = self.scale.start[-1]
        return (stage.side, stage.batch) if self.predictor_phase else (self.run.side, self.run.batch)

    def _end_predictor(self) -> None:
        """Keep what the predictor learned, from which the next phase starts on its larger grid."""
        prune_predictors(self.model)
        shutil.rmtree(self.folder / PREDICTOR, ignore_errors=True)
        with whole_folder(self.folder / PREDICTOR) as scratch:
            self.model.save_pretrained(scratch)
        self.prior = self.model.config.prior  # with the grid that its weights are of
        self.phase, self.step, self.losses = self.phase + 1, 0, []

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _train(self, stop: StopRequest, callbacks: list[Any]) -> None:
        _, batch = self._canvas()
        end, saved = self.ends[self.phase], self.spent
        if not self.predictor_phase and not self.curve:
            self._evaluate()
            self._save()
        begin = 60 * self.curve[0]["minutes"] if self.curve else 0.0  # after what came before: a predictor, a search
        while self.spent < end:
            images, labels = self.canvases.batch(self.step * batch, batch)
            started = self.clock()
            self._set_rate((self.spent - begin) / (end - begin))
            loss = self._loss(images, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            value = loss.item()
            self.spent += self.clock() - started
            if not math.isfinite(value):
                raise ValueError(f"{self.run.name}: the loss is {value} at step {self.step}")
            self.losses.append(value)
            self.step, self.images = self.step + 1, self.images + batch
            for callback in callbacks:
                seconds = SimpleNamespace(global_step=int(self.spent), max_steps=max(1, int(self.ends[-1])))
                callback.on_step_end(None, seconds, None)
            due = not self.predictor_phase and self.spent >= min(end, self._next_evaluation())
            if due:
                self._evaluate()
            if due or self.spent - saved >= SAVE_EVERY or stop.requested:
                saved = self.spent
                self._save()
            if stop.requested:
                raise RunStopped("stopped; the same command goes on from here")

    def _next_evaluation(self) -> float:
        """Seconds of the clock; evaluations are at whole multiples of `every`."""
        every = 60 * self.run.every
        return every * (math.floor(60 * self.curve[-1]["minutes"] / every + 1e-9) + 1)

    def _set_rate(self, progress: float) -> None:
        rate = self.run.rate * min(1.0, max(progress, 0.1 * WARM_UP) / WARM_UP)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (0.5 + 0.5 * math.cos(math.pi * min(1.0, progress)))

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        pixels = as_input(images, self.contender.shrink)
        with autocast(self.scale.device):
            if self.distillation is None:
                return self.model(pixel_values=pixels, labels=labels).loss
            with self.distillation.observed(self.model) as scores:
                outputs = self.model(pixel_values=pixels, labels=labels, **self.distillation.student_options())
            losses = self.distillation.losses(self.model, outputs, outputs.loss, scores, pixels)
            return self.distillation.total(losses)

    def _save(self) -> None:
        """The state, whole or not at all."""
        names = ("phase", "step", "spent", "images", "curve", "losses", "prior")
        content = {name: getattr(self, name) for name in names}
        content |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        scratch = self.folder / f"{STATE}.partial"
        torch.save(content, scratch)
        replace_durably(scratch, self.folder / STATE)

    # ---- accuracy ---------------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """A point of the curve, on the selection set."""
        labels, predicted = self._predict("selection", SELECTION_SEED, self.scale.selection_images)
        point = {
            "step": self.step,
            "minutes": self.spent / 60,
            "images": self.images,
            "loss": float(np.mean(self.losses)) if self.losses else None,
            "validation_accuracy": float((labels == predicted).mean()),
        }
        self.curve.append(point)
        self.losses = []
        print(f"{self.run.name}: {point_line(point)}", file=sys.stderr, flush=True)

    def _predict(self, split: str, seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Labels and predicted classes (count,) of a fixed set of images, of all there are if these are fewer."""
        images = self.variant.images(self.pools[split], self.run.side, seed)
        count = count if images.size is None else min(count, images.size)
        return predict(self.model, images, count, self.contender.shrink, self.scale.device)

    def finish(self) -> None:
        """The test, the record, and of a start its model."""
        labels, predicted = self._predict("test", TEST_SEED, self.scale.test_images)
        details = {
            **about_model(self.model),
            "data": self.variant.about(self.run.side),
            "chance": self.variant.chance,
            "patch": self.patch,
            "tokens": math.prod(self.model.config.grid),
            "images": self.images,
            "minutes": self.spent / 60,
            "test_images": len(labels),
            "test_correct": pack_correct(labels, predicted),
            "start_sha256": None if self.start is None else weights_sha256(self.start),
        }
        if self.run.is_start:
            shutil.rmtree(self.folder / MODEL, ignore_errors=True)
            with whole_folder(self.folder / MODEL) as scratch:
                self.model.save_pretrained(scratch)
        Results(
            task="canvases",
            metrics={"test_accuracy": float((labels == predicted).mean())},
            config=self.run.config(self.scale),
            seed=self.run.seed,
            trainable_parameters=trainable_parameters(self.model),
            steps=self.step,
            seconds=self.spent,
            seconds_per_step=self.spent / max(1, self.step),
            history=self.curve,
            parameters=details.pop("parameters"),
            details=details,
        ).write(self.folder / RESULTS)


def point_line(point: dict[str, Any]) -> str:
    """A point of a curve, for the terminal."""
    loss = "" if point["loss"] is None else f", loss {point['loss']:.3f}"
    accuracy = 100 * point["validation_accuracy"]
    return f"{point['minutes']:.2f} minutes, {point['images']} images{loss}, accuracy {accuracy:.1f} %"


def autocast(device: str) -> AbstractContextManager[Any]:
    """bfloat16 where it is fast."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode, without gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def predict(
    model: Any, images: Canvases | Drawings, count: int, shrink: int = 1, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predicted classes (count,) of the first images."""
    labels, predicted = [], []
    with evaluating(model), autocast(device):
        for first in range(0, count, EVAL_BATCH):
            pixels, answers = images.batch(first, min(EVAL_BATCH, count - first))
            labels.append(answers)
            predicted.append(model(pixel_values=as_input(pixels, shrink)).logits.argmax(-1))
    return torch.cat(labels).cpu().numpy(), torch.cat(predicted).cpu().numpy()
