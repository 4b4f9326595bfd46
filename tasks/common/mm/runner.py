"""mmengine's Runner as all our runs use it: quiet, without pickles, with checks before the first batch."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dist import broadcast, init_dist, is_distributed, is_main_process
from mmengine.hooks import Hook
from mmengine.model import BaseTTAModel, MMDistributedDataParallel, is_model_wrapper, revert_sync_batchnorm
from mmengine.runner import BaseLoop, Runner
from mmengine.utils.dl_utils import set_multi_processing
from torch import distributed

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.files import replace_durably
from hf_sparseprior.mm.backbone import check_predictors
from hf_sparseprior.mm.init_cfg import missing_layers
from hf_sparseprior.mm.loading import refuse_pickles
from hf_sparseprior.runs.models import take_weights
from hf_sparseprior.runs.processes import check_joined, join_on_cpu
from hf_sparseprior.training.finite import SETTING, STOP, check_setting
from tasks.common.mm.config import for_frameworks
from tasks.common.mm.hooks import CheckFinite, OneLineProgress, StopOnSignal, TellData, TellLearning
from tasks.common.mm.reading import check_reading

BY_CLASS = {"IoUMetric": "ClassIoUMetric"}  # metrics of mm, and what measures the same and keeps it by class
_RUNS = itertools.count()  # of this process


class QuietRunner(Runner):
    """mmengine's Runner. Its log goes to its file; the terminal shows errors and the progress bar.

    A checkpoint gets its name when the disk has all of it.
    """

    def build_logger(self, *args: Any, **kwargs: Any) -> Any:
        """As mmengine's."""
        logger = super().build_logger(*args, **kwargs)
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.setLevel(max(handler.level, logging.ERROR))
        return logger

    def build_visualizer(self, visualizer: Any = None) -> Any:
        """As mmengine's, which would write the name and the folder of this run into the config."""
        return super().build_visualizer(copy.deepcopy(visualizer) if isinstance(visualizer, dict) else visualizer)

    def build_model(self, model: Any) -> torch.nn.Module:
        """As mmengine's, and remembers what the model is drawn from."""
        self._states_before_model = _generator_states()
        return super().build_model(model)

    def _init_model_weights(self) -> None:
        """As mmengine's. Then weights that a dense model has, too, are those of the dense one of the same seed."""
        super()._init_model_weights()
        model = whole_model(self)
        goes_on = self._resume and self._load_from
        if goes_on or model.backbone.config.prior_name == "dense":
            return
        settings, states = copy.deepcopy(self.cfg.model), self._states_before_model
        settings.backbone.prior = "dense"
        with torch.random.fork_rng():
            for device, state in states.items():
                _set_generator(device, state)
            dense: Any = super().build_model(settings).to(next(model.parameters()).device)
            start = dense.backbone.start
            drawn = tuple(entry for entry in start.drawn if not missing_layers(dense.backbone, entry))
            dense.backbone.start = replace(start, drawn=drawn)
            dense.init_weights()
        take_weights(model, dense)
        for value in model.state_dict().values():  # which mmengine did before
            broadcast(value)

    @staticmethod
    def build_dataloader(dataloader: Any, seed: int | None = None, diff_rank_seed: bool = False) -> Any:
        """As mmengine's, and what its data set reads is checked."""
        loader = Runner.build_dataloader(dataloader, seed=seed, diff_rank_seed=diff_rank_seed)
        check_reading(loader.dataset)
        return loader

    def build_evaluator(self, evaluator: Any) -> Any:
        """As mmengine's, with metrics that know single classes (`classes_of`)."""
        given = evaluator if isinstance(evaluator, (list, tuple)) else [evaluator]
        if not all(isinstance(part, dict) and "type" in part for part in given):
            return super().build_evaluator(evaluator)
        return super().build_evaluator([{**part, "type": BY_CLASS.get(part["type"], part["type"])} for part in given])

    def wrap_model(self, model_wrapper_cfg: dict | None, model: torch.nn.Module) -> torch.nn.Module:
        """As mmengine's, which wants a CUDA device for each process. Without one, batch norms are each process' own."""
        if not (self.distributed and join_on_cpu()):
            return super().wrap_model(model_wrapper_cfg, model)
        if model_wrapper_cfg is not None:
            raise ValueError(f"model_wrapper_cfg={model_wrapper_cfg!r} needs a GPU for each process; leave it out")
        whole = revert_sync_batchnorm(model)
        if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in whole.modules()):
            print("batch norms are not synchronised between processes on the CPU", file=sys.stderr)
        unused = self.cfg.get("find_unused_parameters", False)
        return MMDistributedDataParallel(module=whole, broadcast_buffers=False, find_unused_parameters=unused)

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """As mmengine's."""
        scratch = f"{filename}.partial"
        super().save_checkpoint(out_dir, scratch, *args, **kwargs)
        if is_main_process():
            replace_durably(Path(out_dir) / scratch, Path(out_dir) / filename)


def _generator_states() -> dict[str, torch.Tensor]:
    """Of the generators that models are drawn from."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generator(device: str, state: torch.Tensor) -> None:
    (torch.cuda if device == "cuda" else torch).set_rng_state(state)


def join_processes(config: Config) -> None:
    """Join the processes that torchrun started; mmengine's Runner could do so on CUDA devices alone."""
    if launched() and not is_distributed():
        environment = config.get("env_cfg", {})
        set_multi_processing(**environment.get("mp_cfg", {}), distributed=True)
        if join_on_cpu():
            distributed.init_process_group("gloo")
        else:
            init_dist("pytorch", **environment.get("dist_cfg", {}))
    check_joined()


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def build_runner(config: Config) -> QuietRunner:
    """The Runner of a config, on every process that torchrun started; builds model, data and metric."""
    check_setting(SETTING, config.get(SETTING, STOP))
    refuse_pickles()
    config = for_frameworks(config)
    config.launcher = "pytorch" if launched() else "none"
    # mmengine tells runs apart by name and second: two that begin within one second would share a folder.
    config.experiment_name = f"{Path(config.filename or 'run').stem}_{next(_RUNS)}"
    with errors_in_one_line():
        runner = QuietRunner.from_cfg(config)
        check_normalisation(whole_model(runner))
        check_slide(whole_model(runner))
        check_batch(whole_model(runner), runner.cfg.get("train_dataloader"))
    name_what_is_not_taken(whole_model(runner))
    runner.register_hook(CheckClasses())
    runner.register_hook(ShareBuffers())
    runner.register_hook(TellData())
    runner.register_hook(TellLearning())
    if config.get(SETTING, STOP) == STOP:
        runner.register_hook(CheckFinite())
    if not runner.distributed:  # one process has nothing to synchronise, and a CPU cannot
        runner.model = revert_sync_batchnorm(runner.model)
    return runner


def check_slide(model: Any) -> None:
    """Raise ValueError for a segmentor that slides a window without a size, which mm needs at the first evaluation."""
    settings = getattr(model, "test_cfg", None) or {}
    if settings.get("mode") == "slide" and not (settings.get("crop_size") and settings.get("stride")):
        raise ValueError("model.test_cfg.mode=slide needs model.test_cfg.crop_size and model.test_cfg.stride")


def check_batch(model: Any, train: Any) -> None:
    """Raise ValueError for batches of one image and a head with batch norms of maps that are pooled to one pixel."""
    if launched() or not train or train.get("batch_size") != 1:
        return  # of several processes batch norms may see the others' images
    for name, module in model.named_modules():
        norm = (getattr(module, "norm_cfg", None) or {}).get("type")
        if 1 in (getattr(module, "pool_scales", None) or ()) and norm in ("BN", "SyncBN"):
            raise ValueError(
                f"train_dataloader.batch_size=1 must be 2 or more: batch norms of model.{name} see one value of each "
                f"channel (pool_scales={tuple(module.pool_scales)}); or give it another norm_cfg, such as GN"
            )


def whole_model(runner: Runner) -> Any:
    """The model without what distributes it or shows it images several times."""
    wrapped = is_model_wrapper(runner.model) or isinstance(runner.model, BaseTTAModel)
    return runner.model.module if wrapped else runner.model


def classes_of(runner: Runner) -> dict[str, Any]:
    """What the last test measured of each class, by the class's name; {} if its metrics do not say."""
    found: dict[str, Any] = {}
    for metric in runner.test_evaluator.metrics:
        for name, values in getattr(metric, "by_class", {}).items():
            found.setdefault(name, {}).update(values)
    return found


def told_of_learning(runner: Runner) -> list[str]:
    """What was warned of in the first steps of the training."""
    watches = [hook.watch for hook in runner.hooks if isinstance(hook, TellLearning)]
    return [message for watch in watches if watch is not None for message in watch.messages]


def has_trained(runner: Runner) -> bool:
    """Whether a step was done. mmengine's own `iter` would build the loop and its data if they do not exist yet."""
    return isinstance(runner._train_loop, BaseLoop) and runner.iter > 0


@contextmanager
def errors_in_one_line(still: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Turn what mmengine raises for parts that do not build or do not fit each other into ValueErrors.

    Args:
        still: whether an error can still be of this kind; if not, it is a bug and stays as it is.
    """
    try:
        yield
    except (AssertionError, KeyError, AttributeError, IndexError, RuntimeError, TypeError) as error:
        if not still():
            raise
        text = str(error.args[0]).strip() if error.args else ""
        said = text.splitlines()[0] if text else type(error).__name__
        raise ValueError(f"the configuration does not build: {said}") from error


@contextmanager
def released(runner: Runner) -> Iterator[None]:
    """Close the bar and stop listening for signals, also if training ends in an error."""
    try:
        yield
    finally:
        for hook in runner.hooks:
            if isinstance(hook, (OneLineProgress, StopOnSignal)):
                hook.after_train(runner)


# How images are padded where a model is tested, by the class of its preprocessor.
PADDING = {
    "SegDataPreProcessor": "model.data_preprocessor.test_cfg.size_divisor",
    "DetDataPreprocessor": "model.data_preprocessor.pad_size_divisor",
}


def name_what_is_not_taken(model: Any) -> None:
    """Let a model that is tested say in one line which image, at which size, it does not take.

    Heads halve the maps of an image, and of a small image's map nothing may be left; which sizes are small is theirs to
    know. Images of several sizes make no batch in mmsegmentation.
    """

    def named(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def tested(data: Any) -> Any:
            try:
                return step(data)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, AssertionError) as error:
                sizes = [tuple(image.shape[-2:]) for image in data["inputs"]]
                least = min(range(len(sizes)), key=lambda index: min(sizes[index]))
                setting = PADDING.get(type(model.data_preprocessor).__name__)
                padded = f"; {setting}=32 pads images to multiples of 32" if setting else ""
                advice = "; test_dataloader.batch_size=1 takes each alone" if len({*sizes}) > 1 else padded
                raise ValueError(
                    f"the model does not take {getattr(data['data_samples'][least], 'img_path', 'an image')} at "
                    f"{'x'.join(map(str, sizes[least]))} pixels ({first_line(error)}){advice}"
                ) from error

        return tested

    model.val_step, model.test_step = named(model.val_step), named(model.test_step)


class CheckClasses(Hook):
    """Compares the heads' number of classes with the data's, before the first batch."""

    def before_train(self, runner: Runner) -> None:
        """Training and validation data."""
        data = [runner.train_dataloader, *([runner.val_dataloader] if runner.val_loop is not None else [])]
        check_classes(runner.model, [loader.dataset for loader in data])
        check_predictors(runner.model)

    def before_test(self, runner: Runner) -> None:
        """Test data."""
        check_classes(runner.model, [runner.test_dataloader.dataset])


class ShareBuffers(Hook):
    """Lets every process measure the model that is saved, the first one's: batch norms that are not synchronised have
    other statistics in each.
    """

    def before_val(self, runner: Runner) -> None:
        """Take those of the first process."""
        for buffer in runner.model.buffers():
            broadcast(buffer.data)

    before_test = before_val


def check_classes(model: torch.nn.Module, data: Sequence[Any]) -> None:
    """Raise ValueError unless every head that tells classes apart has as many classes as every data set."""
    named = ((name.removeprefix("module."), module) for name, module in model.named_modules())
    # Not the whole model, which repeats its head's number, and not a region proposal network, which tells object from
    # background.
    heads = {
        name: module.num_classes
        for name, module in named
        if name and not name.startswith("rpn_head") and hasattr(module, "num_classes")
    }
    for dataset in data:
        classes = dataset.metainfo["classes"]
        for name, number in heads.items():
            if number != len(classes):
                raise ValueError(
                    f"model.{name}.num_classes={number}, the data has {len(classes)} classes: "
                    f"{', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}"
                )


def check_normalisation(model: Any) -> None:
    """Raise ValueError unless the backbone will be saved with its images' normalisation (mm's pixels are 0 to 255)."""
    given, config = model.data_preprocessor, model.backbone.config
    for name, own in (("mean", config.image_mean), ("std", config.image_std)):
        values = getattr(given, name, None)
        if values is not None and not torch.allclose(values.flatten().float(), 255 * torch.tensor(own), atol=0.1):
            raise ValueError(
                f"model.data_preprocessor.{name}={[round(float(value), 3) for value in values.flatten()]} must be 255 "
                f"times model.backbone.image_{name}={list(own)}, which other tasks normalise by"
            )
