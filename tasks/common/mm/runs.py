"""A run of mmengine from a config file to results.json, as segmentation and detection share it.

OUT/run_config.json       what makes the run this one
OUT/iter_N.pth            checkpoints
OUT/TIME/                 mmengine's log
OUT/model/                config.py and model.safetensors of the whole model, what `evaluate` reads,
                          and backbone/, a SparsePriorViT that every other task loads
OUT/predictions.png       truth and predictions side by side
OUT/results.json          written last
"""

from __future__ import annotations

import copy
import difflib
import itertools
import logging
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config, DictAction
from mmengine.hooks import Hook
from mmengine.model import revert_sync_batchnorm
from mmengine.runner import Runner
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hf_sparseprior import SparsePriorViTConfig
from hf_sparseprior.files import file_sha256
from tasks.common.environment import command_line, environment
from tasks.common.mm.backbone import save_backbone
from tasks.common.mm.hooks import OneLineProgress, StopOnSignal
from tasks.common.mm.loading import refuse_pickles
from tasks.common.results import write_results
from tasks.common.run_folder import MODEL, RESULTS, claim, finished_results

BACKBONE, CONFIG, WEIGHTS, PICTURE = "backbone", "config.py", "model.safetensors", "predictions.png"
PACKAGES = ("onedl-mmcv", "onedl-mmengine", "onedl-mmsegmentation", "onedl-mmdetection")
# Where a run lies, how it shows itself and how many processes read its images does not make it another run.
COSMETIC = ("work_dir", "log_level", "launcher", "resume", "num_workers", "persistent_workers", "max_keep_ckpts")
SPLITS = {"test": "test", "validation": "val"}  # ours to mm's
_RUNS = itertools.count()  # of this process


@dataclass(frozen=True)
class Task:
    """What a task adds to a run.

    name: for results.json. draw: draws predictions of a model for a dataset's first images into a file.
    baseline: metrics of the best constant predictor on the test dataset, by the framework's own metric.
    """

    name: str
    draw: Callable[[Any, Any, Path], Any]
    baseline: Callable[[Config], dict[str, Any]]


class QuietRunner(Runner):
    """mmengine's Runner, whose log goes to its file; the terminal shows errors and the progress bar."""

    def build_logger(self, *args: Any, **kwargs: Any) -> Any:
        """As mmengine's."""
        logger = super().build_logger(*args, **kwargs)
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.setLevel(max(handler.level, logging.ERROR))
        return logger


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """An mm config file with overrides; `work_dir` is outputs/NAME_OF_THE_FILE unless it says otherwise.

    Args:
        path: of the config, which is Python and is run.
        overrides: "key.key=value", values as mm's `--cfg-options` writes them.

    Raises:
        OSError: for a missing file.
        ValueError: for a file that does not run, or an override of something that is not there.
    """
    if not Path(path).is_file():
        raise OSError(f"--config {path} does not exist")
    try:
        config = Config.fromfile(str(path))
    except ImportError:
        raise
    except Exception as error:  # a config is a program and can fail like one
        raise ValueError(f"--config {path}: {type(error).__name__}: {first_line(error)}") from None
    config.setdefault("work_dir", f"outputs/{Path(path).stem}")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ValueError(f"{override!r} must be key=value")
        check_key(config, key)
        try:
            config.merge_from_dict({key: DictAction._parse_iterable(value)})
        except (AssertionError, KeyError, TypeError) as error:
            raise ValueError(f"{override!r}: {first_line(error)}") from None
    return config


def check_key(config: Any, key: str) -> None:
    """Raise ValueError unless all of a dotted key but its last part leads somewhere, or for a new key at the top."""
    parts = key.split(".")
    node: Any = config
    for depth, part in enumerate(parts):
        known = [str(index) for index in range(len(node))] if isinstance(node, (list, tuple)) else list(node)
        if part not in known:
            if 0 < depth == len(parts) - 1 and not isinstance(node, (list, tuple)):
                return
            near = difflib.get_close_matches(part, known, n=1)
            hint = f"; did you mean {'.'.join([*parts[:depth], near[0]])!r}?" if near else ""
            raise ValueError(f"{key!r}: there is no {'.'.join(parts[: depth + 1])!r} in the configuration{hint}")
        if depth < len(parts) - 1:
            node = node[int(part) if isinstance(node, (list, tuple)) else part]
            if not isinstance(node, (dict, list, tuple)):
                raise ValueError(f"{key!r}: {'.'.join(parts[: depth + 1])!r} is {node!r} and has no parts")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


@contextmanager
def errors_in_one_line(still: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Turn what mmengine raises for parts that do not build or do not fit each other into ValueErrors.

    Args:
        still: whether an error is still one of these; where it is not, it is a bug and stays as it is.
    """
    try:
        yield
    except (AssertionError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        if not still():
            raise
        text = str(error.args[0]).strip() if error.args else ""
        said = text.splitlines()[0] if text else type(error).__name__
        raise ValueError(f"the configuration does not build: {said}") from error


@contextmanager
def released(runner: Runner) -> Iterator[None]:
    """Close the bar and stop listening for signals, also where training ends in an error."""
    try:
        yield
    finally:
        for hook in runner.hooks:
            if isinstance(hook, (OneLineProgress, StopOnSignal)):
                hook.after_train(runner)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested configuration as dotted keys and plain values, without what is cosmetic."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(part, (dict, list, tuple)) for part in value):
        items = enumerate(value)
    else:
        plain = isinstance(value, (str, int, float, bool, type(None)))
        return {prefix: value if plain else list(value) if isinstance(value, (list, tuple)) else repr(value)}
    found: dict[str, Any] = {}
    for key, part in items:
        if key not in COSMETIC:
            found.update(flat(part, f"{prefix}.{key}" if prefix else str(key)))
    return found


def last_whole_checkpoint(out: Path) -> str | None:
    """The newest checkpoint that was written to its end; one that was cut off is skipped with a line."""
    numbered = [path for path in out.glob("*_*.pth") if path.stem.rpartition("_")[2].isdigit()]
    for path in sorted(numbered, key=lambda path: int(path.stem.rpartition("_")[2]), reverse=True):
        if path.stem.startswith(("iter_", "epoch_")):
            if zipfile.is_zipfile(path):
                return str(path)
            print(f"{path} is skipped: it is cut off", file=sys.stderr)
    return None


def build_runner(config: Config) -> QuietRunner:
    """The Runner of a config, on every process that torchrun started; builds model, data and metric."""
    refuse_pickles()
    config = copy.deepcopy(config)
    config.launcher = "pytorch" if "TORCHELASTIC_RUN_ID" in os.environ else "none"
    # mmengine knows runs by name and second: one that begins within the same second would be given the other's folder.
    config.experiment_name = f"{Path(config.filename or 'run').stem}_{next(_RUNS)}"
    with errors_in_one_line():
        runner = QuietRunner.from_cfg(config)
        check_normalisation(runner.model.module if runner.distributed else runner.model)
    runner.register_hook(CheckClasses())
    if not runner.distributed:  # one process has nothing to synchronise, and a CPU cannot
        runner.model = revert_sync_batchnorm(runner.model)
    return runner


class CheckClasses(Hook):
    """Compares the heads' number of classes with the data's, before the first batch."""

    def before_train(self, runner: Runner) -> None:
        """Training and validation data."""
        data = [runner.train_dataloader, *([runner.val_dataloader] if runner.val_loop is not None else [])]
        check_classes(runner.model, [loader.dataset for loader in data])

    def before_test(self, runner: Runner) -> None:
        """Test data."""
        check_classes(runner.model, [runner.test_dataloader.dataset])


def check_classes(model: torch.nn.Module, data: Sequence[Any]) -> None:
    """Raise ValueError unless every head that tells classes apart has as many as every data set."""
    named = ((name.removeprefix("module."), module) for name, module in model.named_modules())
    # Not the whole model, which repeats its head's, nor a region proposal network, which tells object from background.
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
    """Raise ValueError unless the saved backbone will say how its images were normalised (mm's are 0 to 255)."""
    given, config = model.data_preprocessor, model.backbone.config
    for name, own in (("mean", config.image_mean), ("std", config.image_std)):
        values = getattr(given, name, None)
        if values is not None and not torch.allclose(values.flatten().float(), 255 * torch.tensor(own), atol=0.1):
            raise ValueError(
                f"model.data_preprocessor.{name}={[round(float(value), 3) for value in values.flatten()]} must be 255 "
                f"times model.backbone.image_{name}={list(own)}, which other tasks normalise by"
            )


def run(task: Task, config: Config, overwrite: bool = False, command: str | None = None) -> dict[str, Any]:
    """Train, test once, write model, picture and results. An interrupted run goes on, a finished one is not done again.

    Args:
        task: what is trained.
        config: as `load_config` returns it.
        overwrite: throw away what a run of another configuration left in `config.work_dir`.
        command: for results.json.

    Returns:
        The content of results.json.

    Raises:
        ValueError, OSError: for bad values and files.
        RunStopped: on SIGTERM, after a checkpoint was saved.
    """
    out, identity = Path(config.work_dir), {"config": flat(config.to_dict())}
    if finished := finished_results(out, identity, overwrite, "work_dir"):
        return finished
    check_data(config)
    config, new = copy.deepcopy(config), not out.exists()
    if _is_first():
        claim(out, identity)
    if checkpoint := last_whole_checkpoint(out):
        config.load_from, config.resume = checkpoint, True
        if _is_first():
            print(f"going on from {checkpoint}", file=sys.stderr)
    try:
        runner = build_runner(config)
        # Parts that do not fit each other show before the first step is done.
        with released(runner), errors_in_one_line(lambda: runner.iter == 0):
            runner.train()
    except (ValueError, OSError, TypeError, ImportError):
        # What a mistake left behind would stand in the way of the corrected run.
        if new and _is_first() and not last_whole_checkpoint(out):
            shutil.rmtree(out)
        raise
    metrics = runner.test()
    results = {
        "task": task.name,
        "metrics": {f"test_{name}": float(value) for name, value in metrics.items()},
        "baseline": task.baseline(config),
        "prior": runner.model.backbone.config.prior_name,
        "parameters": sum(parameter.numel() for parameter in runner.model.parameters()),
        "seed": runner.seed,
        "steps": runner.iter,
        **clock(runner),
        "resumed_from": checkpoint and Path(checkpoint).name,
        "command": command or command_line(),
        **surroundings(),
        "config": flat(config.to_dict()),
        "history": loss_history(runner),
    }
    if _is_first():
        model = runner.model.module if runner.distributed else runner.model
        save_model(out / MODEL, config, model)
        results["model_sha256"] = file_sha256(out / MODEL / WEIGHTS)
        task.draw(model, runner.test_dataloader.dataset, out / PICTURE)
        write_results(out / RESULTS, results)
    return results


def _is_first() -> bool:
    """Whether this is the process that writes, also before mmengine has joined the processes together."""
    return os.environ.get("RANK", "0") == "0"


def check_data(config: Config) -> None:
    """Raise OSError if a dataset's folder is missing, before anything is written."""
    for part in ("train", "val", "test"):
        root = config.get(f"{part}_dataloader", {}).get("dataset", {}).get("data_root")
        if root and not Path(root).is_dir():
            hint = f"; python -m tasks.common.mm.scenes {root} makes it" if "scenes" in Path(root).name else ""
            raise OSError(f"{part}_dataloader.dataset.data_root={root} is not a folder{hint}")


def surroundings() -> dict[str, Any]:
    """Versions and hardware, mm's packages among them."""
    from importlib.metadata import PackageNotFoundError, version

    found = environment()
    for name in PACKAGES:
        try:
            found["versions"][name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def clock(runner: Runner) -> dict[str, float]:
    """Seconds of training, those before an interruption included, and the share of waiting for data."""
    scalars = runner.message_hub.log_scalars
    if "train/time" not in scalars:
        return {}
    seconds, waiting = (float(scalars[f"train/{name}"].data[0].sum()) for name in ("time", "data_time"))
    return {"seconds": round(seconds, 2), "data_wait": waiting / max(seconds, 1e-9)}


def loss_history(runner: Runner, points: int = 200) -> dict[str, list[float]]:
    """Training loss at the end of up to `points` equal stretches of steps, averaged over each."""
    history = runner.message_hub.log_scalars.get("train/loss")
    if history is None:
        return {"step": [], "loss": []}
    losses = history.data[0]
    length = -(-len(losses) // points)
    stretches = [losses[start : start + length] for start in range(0, len(losses), length)]
    ends = [min(start + length, len(losses)) for start in range(0, len(losses), length)]
    return {"step": ends, "loss": [float(stretch.mean()) for stretch in stretches]}


def save_model(folder: Path, config: Config, model: Any) -> None:
    """Write the whole model, with a config that needs no other folder, and its backbone alone."""
    own = copy.deepcopy(config)
    given = {key: config.model.backbone[key] for key in ("type", "with_cp") if key in config.model.backbone}
    # transformers' own bookkeeping is not a matter of the architecture.
    built, default = model.backbone.config, SparsePriorViTConfig()
    names = [field.name for field in fields(SparsePriorViTConfig) if field.name in SparsePriorViTConfig.__annotations__]
    changed = {name: getattr(built, name) for name in names if getattr(built, name) != getattr(default, name)}
    own.model["backbone"] = {**given, **changed, "out_indices": list(built.out_indices)}
    for key in ("load_from", "resume"):
        own.pop(key, None)
    folder.mkdir(parents=True, exist_ok=True)
    own.dump(str(folder / CONFIG))
    save_backbone(model.backbone, str(folder / BACKBONE))
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})


def fill_model(model: torch.nn.Module, folder: Path) -> None:
    """Load the weights of `save_model`, every one and no other.

    Raises:
        OSError: for a missing or damaged file.
        ValueError: for weights that do not fit, with their names.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise OSError(f"{file} does not exist")
    try:
        state = load_file(file)
    except SafetensorError as error:
        raise OSError(f"{file} cannot be read, it is damaged or cut off ({error})") from None
    own = model.state_dict()
    wrong = sorted({*own, *state} - {key for key in {*own} & {*state} if own[key].shape == state[key].shape})
    if wrong:
        raise ValueError(f"{file} does not fit its {CONFIG}: {', '.join(wrong[:5])} ({len(wrong)} in all)")
    model.load_state_dict(state)


def evaluate(
    task: Task, folder: Path, split: str = "test", overrides: Sequence[str] = (), out: Path | None = None
) -> dict[str, Any]:
    """Metrics of a saved model on a split, with results and picture in `out` (default: FOLDER/../evaluation)."""
    if not (folder / CONFIG).is_file():
        raise OSError(f"{folder} is not a folder of a saved model: it holds no {CONFIG}")
    config = load_config(folder / CONFIG, overrides)
    out = out or folder.resolve().parent / "evaluation"
    config.work_dir = str(out)
    part = SPLITS[split]
    for name in ("dataloader", "evaluator"):
        config[f"test_{name}"] = config[f"{part}_{name}"]
    check_data(Config({"test_dataloader": config.test_dataloader}))
    for key in ("train_dataloader", "train_cfg", "optim_wrapper", "param_scheduler", "val_dataloader", "val_cfg"):
        config.pop(key, None)
    config.pop("val_evaluator", None)
    runner = build_runner(config)
    fill_model(runner.model, folder)
    metrics = {f"{split}_{name}": float(value) for name, value in runner.test().items()}
    results = {
        "task": task.name,
        "model": str(folder),
        "model_sha256": file_sha256(folder / WEIGHTS),
        "metrics": metrics,
        "images": len(runner.test_dataloader.dataset),
        "command": command_line(),
        **surroundings(),
        "config": flat(config.to_dict()),
    }
    task.draw(runner.model, runner.test_dataloader.dataset, out / f"predictions_{split}.png")
    write_results(out / f"results_{split}.json", results)
    return results
