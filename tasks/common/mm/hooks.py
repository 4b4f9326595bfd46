"""What runs of mmengine need to stop, go on and repeat exactly: hooks, a sampler, a transform.

What a run draws depends on its seed and on the number of the step or of the training image alone, not on what was drawn
before. So a run that goes on from a checkpoint draws what it would have drawn, whatever ran in between and with any
number of workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dataset import InfiniteSampler
from mmengine.dist import get_rank, is_main_process
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import DATA_SAMPLERS, FUNCTIONS, HOOKS, TRANSFORMS
from tqdm import tqdm

from hf_sparseprior.runs.command import RunStopped, tell_data, tell_passed_over
from hf_sparseprior.training.finite import SETTING, Diverged, LossWatch, all_finite
from hf_sparseprior.training.learning import LearningWatch
from hf_sparseprior.training.stopping import StopRequest, WorkerStart
from tasks.common.mm.reading import inner_datasets


def seed_everything(*entropy: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch with a few non-negative numbers."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Draw(int):
    """Index of an image, with the number of this draw in the run (`number`) and the run's `seed`.

    What mmengine's RepeatDataset and ConcatDataset make of an index, by the two operations below, is the same draw.
    """

    number: int
    seed: int

    @classmethod
    def of(cls, index: int, number: int, seed: int) -> Draw:
        """The draw of an image."""
        draw = cls(index)
        draw.number, draw.seed = number, seed
        return draw

    def __mod__(self, length: int) -> Draw:
        return Draw.of(int(self) % length, self.number, self.seed)

    def __sub__(self, first: int) -> Draw:
        return Draw.of(int(self) - first, self.number, self.seed)


@DATA_SAMPLERS.register_module()
class NumberedSampler(InfiniteSampler):
    """mmengine's InfiniteSampler with the number of each draw, for `SeedAugmentation`. Each process has its own."""

    def skip(self, num_samples: int) -> None:
        """Start at draw `num_samples`; called when a run goes on."""
        super().skip(num_samples)
        self.start = num_samples

    def __iter__(self) -> Iterator[int]:
        for number, index in enumerate(super().__iter__(), getattr(self, "start", 0)):
            yield Draw.of(index, number * self.world_size + self.rank, self.seed)


@TRANSFORMS.register_module()
class SeedAugmentation:
    """First step of a training pipeline: seeds augmentation by the draw that `NumberedSampler` gave the image."""

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Seed the generators. `results` does not change.

        Raises:
            ValueError: if the images come from another sampler than `NumberedSampler`, or from a data set that draws
                images by itself.
        """
        draw = results["sample_idx"]
        if not isinstance(draw, Draw):
            raise ValueError(
                "SeedAugmentation needs train_dataloader.sampler.type=NumberedSampler and a data set that does not "
                "draw by itself, as ClassBalancedDataset and MultiImageMixDataset do; without this step of the "
                "pipeline a run that goes on augments otherwise"
            )
        seed_everything(draw.seed, draw.number, 1)
        return results


@FUNCTIONS.register_module()
def outlive_sigterm(worker: int) -> None:
    """`worker_init_fn`: a worker ignores a SIGTERM sent to the whole job, because its parent saves first."""
    WorkerStart()(worker)


@HOOKS.register_module()
class SeedSteps(Hook):
    """Seeds dropout, drop path and box samplers before each training step."""

    priority = "VERY_HIGH"

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Seed by the run's seed, the step and the process."""
        seed_everything(runner.seed, runner.iter, get_rank(), 0)


@HOOKS.register_module()
class StopOnSignal(Hook):
    """On SIGTERM: finish the step, save a checkpoint, end with `RunStopped`.

    Loops over epochs resume at the start of an epoch; there nothing is saved and the last epoch's checkpoint counts.
    """

    priority = "LOWEST"  # after CheckpointHook

    def __init__(self) -> None:
        self.request = StopRequest()

    def before_train(self, runner: Any) -> None:
        """Listen."""
        self.request.listen()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save and stop if any process was asked to."""
        if not self.request.agreed():
            return
        step = runner.iter + 1
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook) and not hook.by_epoch:
                if not str(hook.last_ckpt).endswith(hook.filename_tmpl.format(step)):
                    hook._save_checkpoint(runner)
                raise RunStopped(f"stopped after step {step}; the same command goes on from there")
        raise RunStopped(f"stopped after step {step}; the same command goes on from the last whole epoch")

    def after_train(self, runner: Any) -> None:
        """Stop listening."""
        self.request.release()


@HOOKS.register_module()
class CheckFinite(Hook):
    """Ends a training whose loss or weights are not finite, before a checkpoint of it is saved."""

    priority = "VERY_HIGH"  # before CheckpointHook and validation

    def __init__(self) -> None:
        self.watch = LossWatch()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """The loss, which mmengine reads after every step too."""
        if outputs and "loss" in outputs:
            self.watch.check([runner.iter + 1], [float(outputs["loss"].detach())], SETTING)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """The weights, of which a step with a finite loss may have made something else."""
        self._check_weights(runner)

    def after_train(self, runner: Any) -> None:
        """The weights that are tested and saved as the model."""
        self._check_weights(runner)

    def _check_weights(self, runner: Any) -> None:
        if not all_finite(runner.model.parameters()):
            raise Diverged(f"the weights are not finite after step {runner.iter}; {self.watch.before(SETTING)}")


class TellLearning(Hook):
    """Warns of parts that get no gradient in the first steps, and of batches without a label."""

    def __init__(self) -> None:
        self.watch: LearningWatch | None = None

    def before_train(self, runner: Any) -> None:
        """Watch the first steps from here on."""
        self.watch = LearningWatch(runner.model, is_main=is_main_process())
        self.watch.attach(getattr(runner.optim_wrapper, "optimizer", None))

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """The labels of a batch."""
        if self.watch is not None and self.watch.is_watching and isinstance(data_batch, dict):
            self.watch.note_labels(has_truth(data_batch.get("data_samples"), ignored_pixels(runner.model)))

    def after_train(self, runner: Any) -> None:
        """Of a training that ended before."""
        if self.watch is not None:
            self.watch.finish()


def has_truth(samples: Any, ignored: Collection[int]) -> bool | None:
    """Whether one of a batch's samples of mm has an object, or a pixel of a class; None if they say neither."""
    known = [
        bool(len(sample.gt_instances))
        if "gt_instances" in sample
        else not np.isin(sample.gt_sem_seg.data.cpu().numpy(), list(ignored)).all()
        for sample in samples or ()
        if "gt_instances" in sample or "gt_sem_seg" in sample
    ]
    return any(known) if known else None


def ignored_pixels(model: Any) -> set[int]:
    """Classes of pixels that a model's heads leave out; 255 is what images are padded with."""
    return {
        255,
        *(module.ignore_index for module in model.modules() if isinstance(getattr(module, "ignore_index", None), int)),
    }


class TellData(Hook):
    """Prints what is trained on, validated on and tested on. Builds the test data, whose mistakes so show first."""

    priority = "VERY_HIGH"  # before the progress bar

    def before_train(self, runner: Any) -> None:
        """Once, by one process."""
        loaders = {"trains": runner.train_dataloader}
        if runner.val_loop is not None:
            loaders["validates"] = runner.val_dataloader
        if runner.test_loop is not None:
            loaders["tests"] = runner.test_dataloader
        data = {does: loader.dataset for does, loader in loaders.items()}
        if is_main_process():
            splits = {does: (len(dataset), split_name(dataset)) for does, dataset in data.items()}
            tell_passed_over(*(left_out for dataset in data.values() for left_out in all_passed_over(dataset)))
            tell_data("images", splits, data["trains"].metainfo["classes"])


def all_passed_over(dataset: Any) -> list[Any]:
    """What a data set of mm and those that it repeats, joins or mixes left out, where they say it."""
    own = [dataset.passed_over] if hasattr(dataset, "passed_over") else []
    return own + [left_out for inner in inner_datasets(dataset) for left_out in all_passed_over(inner)]


class LookAtData(Hook):
    """Prints what looks wrong with the data before training, and refuses what cannot be learned from or measured.

    Args:
        look: as `Task.look`.
    """

    priority = "VERY_HIGH"  # before the progress bar

    def __init__(self, look: Callable[[Any, bool], list[str]]) -> None:
        self.look = look

    def before_train(self, runner: Any) -> None:
        """Once; every process looks, so that all of them end."""
        loaders = [runner.train_dataloader, *([runner.val_dataloader] if runner.val_loop is not None else [])]
        loaders += [runner.test_dataloader] if runner.test_loop is not None else []
        whole = {dataset: loader is loaders[0] for loader in loaders for dataset in inmost(loader.dataset)}
        lines = [line for dataset, training in whole.items() for line in self.look(dataset, training)]
        if is_main_process():
            print(*lines, sep="\n", end="\n" * bool(lines), flush=True)


def inmost(dataset: Any) -> list[Any]:
    """The built data sets that read images, which others repeat, join or mix; itself if it is one."""
    return [own for part in inner_datasets(dataset) for own in inmost(part)] or [dataset]


def split_name(dataset: Any) -> str:
    """What a data set of mm calls its split: the name of its list of images or, without one, of their folder.

    Of a data set that repeats, joins or mixes others, their names.
    """
    if inner := inner_datasets(dataset):
        return " + ".join(dict.fromkeys(map(split_name, inner)))
    return Path(dataset.ann_file or next(iter(dataset.data_prefix.values()))).name


@HOOKS.register_module()
class OneLineProgress(Hook):
    """One bar for the whole training, with the loss and the last validation's numbers after it.

    Args:
        metrics: names of validation metrics to show, as the evaluator returns them.
    """

    def __init__(self, metrics: tuple[str, ...] = ()) -> None:
        self.metrics = tuple(metrics)
        self.numbers: dict[str, str] = {}
        self.bar: tqdm | None = None

    def before_train(self, runner: Any) -> None:
        """Open the bar where the run starts or goes on."""
        total = runner.max_iters
        self.bar = tqdm(
            total=total,
            initial=runner.iter,
            desc="training",
            unit="step",
            mininterval=1.0,
            disable=not is_main_process(),
        )

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """One step on."""
        assert self.bar is not None
        if outputs and "loss" in outputs:
            self.numbers["loss"] = f"{outputs['loss'].item():.4g}"
        self.bar.set_postfix(self.numbers, refresh=False)
        self.bar.update()

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Keep validation's numbers."""
        for name in self.metrics:
            if metrics and name in metrics:
                self.numbers[name.rpartition("/")[2]] = f"{metrics[name]:.4g}"

    def after_train(self, runner: Any) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
