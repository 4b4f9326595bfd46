"""Trackers that a run of the Trainer logs to, `trainer.report_to`: TensorBoard, Weights & Biases, MLflow.

OUT/tracking/tensorboard/      event files, for `tensorboard --logdir`
OUT/tracking/wandb/            an offline run, for `wandb sync`, unless WANDB_MODE says otherwise; wandb.json: its id
OUT/tracking/mlflow/           a database and pictures, unless MLFLOW_TRACKING_URI says otherwise; mlflow.json: its run

Each gets the configuration, the history as in results.json, the test's metrics and the pictures. A resumed run has
every step once: files of TensorBoard and W&B are written anew from the history; MLflow and servers get only what they
lack.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import TrainerCallback

from hf_sparseprior.base.checks import is_number
from hf_sparseprior.runs.results import Results, read_results, trainer_history, write_results

TRACKING = "tracking"
PROJECT = "hf_sparseprior"  # of W&B and MLflow, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says otherwise


class Tracker:
    """What a run logs to.

    Args:
        folder: OUT/tracking.
        config: the run's, sections of keys and values.
        name: of the run.

    last: the last step by metric, which `write` is not called with again.
    """

    package = ""

    def __init__(self, folder: Path, config: Mapping[str, Any], name: str) -> None:
        self.last: dict[str, int] = defaultdict(lambda: -1)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of a step."""
        raise NotImplementedError

    def picture(self, path: Path, step: int) -> None:
        """Log a picture."""
        raise NotImplementedError

    def close(self, done: bool) -> None:
        """Write everything; `done`: whether the run came to its end."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files. Those of an interrupted run are replaced, and an open page forgets them."""

    package = "tensorboard"

    def __init__(self, folder: Path, config: Mapping[str, Any], name: str) -> None:
        super().__init__(folder, config, name)
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0)
        values = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in flat(config)}
        _, start, self._end = hparams(values, {})
        self._add_summary(start)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of a step."""
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)
        self.writer.flush()

    def picture(self, path: Path, step: int) -> None:
        """Log a picture."""
        with Image.open(path) as image:
            self.writer.add_image(path.stem, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self, done: bool) -> None:
        """Write everything."""
        if done:
            self._add_summary(self._end)
        self.writer.close()

    def _add_summary(self, summary: Any) -> None:
        writer: Any = self.writer.file_writer
        writer.add_summary(summary)


class WandB(Tracker):
    """A run of Weights & Biases, whose id stays the same when it is resumed."""

    package = "wandb"

    def __init__(self, folder: Path, config: Mapping[str, Any], name: str) -> None:
        super().__init__(folder, config, name)
        with ExitStack() as stack:
            # Its errors are reported to the makers by default.
            stack.enter_context(variables("WANDB_", WANDB_ERROR_REPORTING="false", WANDB_MODE="offline"))
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            alone = "WANDB_SERVICE" not in os.environ  # nobody else in this process uses it
            import wandb

            if alone:
                stack.callback(wandb.teardown)
            if os.environ["WANDB_MODE"] == "offline":
                for earlier in (folder / "wandb").glob("offline-run-*"):
                    shutil.rmtree(earlier)
            about = _remembered(folder / "wandb.json") or {"id": uuid.uuid4().hex[:8]}
            write_results(folder / "wandb.json", about)
            settings = wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True)
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=about["id"],
                name=name,
                dir=str(folder),
                config=dict(config),
                resume="allow",
                reinit="create_new",
                settings=settings,
            )
            first = self.run.starting_step  # behind what a server has
            self.last = defaultdict(lambda: first - 1)
            self._image = wandb.Image
            self._stack = stack.pop_all()

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of a step."""
        self.run.log(dict(values), step=step)

    def picture(self, path: Path, step: int) -> None:
        """Log a picture."""
        self.run.log({path.stem: self._image(str(path))}, step=step)

    def close(self, done: bool) -> None:
        """Write everything, and end the process that writes."""
        with self._stack:
            self.run.finish(exit_code=0 if done else 1)


class MLflow(Tracker):
    """A run of MLflow, through a client of its own: MLflow's active run and its settings stay as they are."""

    package = "mlflow"

    def __init__(self, folder: Path, config: Mapping[str, Any], name: str) -> None:
        super().__init__(folder, config, name)
        # It tells the makers what is used by default.
        with variables("MLFLOW_", MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_LOGGING_LEVEL="WARNING"):
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient

            self._metric = Metric
            own = folder.absolute() / "mlflow"
            server = os.environ.get("MLFLOW_TRACKING_URI")
            own.mkdir(parents=True, exist_ok=True)
            self.client = MlflowClient(tracking_uri=server or f"sqlite:///{own / 'mlflow.db'}")
            known = folder / "mlflow.json"
            about = _remembered(known)
            if about.get("server") == server and "run" in about:
                self.run = about["run"]
                self.client.update_run(self.run, status="RUNNING")
                for tag in self.client.get_run(self.run).data.metrics:
                    self.last[tag] = max(metric.step for metric in self.client.get_metric_history(self.run, tag))
                return
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self.client.get_experiment_by_name(experiment)
            place = None if server else (own / "pictures").as_uri()
            number = found.experiment_id if found else self.client.create_experiment(experiment, place)
            self.run = self.client.create_run(number, run_name=name).info.run_id
            write_results(known, {"server": server, "run": self.run})
            params = [Param(_plain(key), str(value)[:6000]) for key, value in flat(config)]
            for start in range(0, len(params), 100):  # as many as it takes at once
                self.client.log_batch(self.run, params=params[start : start + 100])

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of a step."""
        now = int(1000 * time.time())
        metrics = [self._metric(_plain(tag), value, now, step) for tag, value in values.items()]
        self.client.log_batch(self.run, metrics=metrics)

    def picture(self, path: Path, step: int) -> None:
        """Log a picture."""
        self.client.log_artifact(self.run, str(path))

    def close(self, done: bool) -> None:
        """End the run."""
        self.client.set_terminated(self.run, "FINISHED" if done else "FAILED")


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def trackers(value: Any) -> list[str]:
    """The names in `trainer.report_to`: a name, a list, or none.

    Raises:
        ValueError: for an unknown name.
    """
    names = [] if value in (None, "none", ["none"]) else [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or any(name not in list(TRACKERS) for name in names):
        raise ValueError(f"trainer.report_to={value!r} must be none or some of {', '.join(TRACKERS)}")
    return list(dict.fromkeys(names))


def check_installed(names: Sequence[str]) -> None:
    """Raise ImportError for the first tracker that is not installed."""
    for name in names:
        package = TRACKERS[name].package
        if find_spec(package) is None:
            raise ImportError(f"trainer.report_to={name} needs {package}: pip install {package}")


class Tracking(TrainerCallback):
    """Logs what the Trainer logs, by the main process. `finish` logs what comes after training, `close` ends it.

    Args:
        names: of `TRACKERS`. out: folder of the run. config: the run's, sections of keys and values.
    """

    def __init__(self, names: Sequence[str], out: Path, config: Mapping[str, Any]) -> None:
        self.names, self.out, self.config = names, out, config
        self.opened: list[Tracker] = []
        self._done = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start, with the history up to the checkpoint that the run goes on from."""
        if not state.is_world_process_zero:
            return
        for name in self.names:
            (self.out / TRACKING).mkdir(parents=True, exist_ok=True)
            self.opened.append(TRACKERS[name](self.out / TRACKING, self.config, args.run_name or self.out.name))
        for entry in trainer_history(state.log_history):
            self._write(entry)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the newest entry of the history."""
        for entry in trainer_history(state.log_history[-1:]):
            self._write(entry)

    def finish(self, results: Results) -> None:
        """Log the test's metrics and the pictures at the last step; the run came to its end."""
        if not self.opened:
            return
        step = results.steps or 0
        tested = {name: value for name, value in results.metrics.items() if not name.startswith("validation_")}
        self._write({"step": step, **tested})
        for tracker in self.opened:
            for name in results.details["pictures"]:
                tracker.picture(self.out / name, step)
        self._done = True

    def close(self) -> None:
        """End all trackers, whatever one of them raises."""
        with ExitStack() as stack:
            for tracker in self.opened:
                stack.callback(tracker.close, self._done)
            self.opened = []

    def _write(self, entry: Mapping[str, Any]) -> None:
        step = entry["step"]
        for tracker in self.opened:
            values = {_tag(name): value for name, value in entry.items() if name != "step" and is_number(value)}
            new = {tag: value for tag, value in values.items() if step > tracker.last[tag]}
            if new:
                tracker.write(new, step)
                tracker.last.update(dict.fromkeys(new, step))


@contextmanager
def tracked(trainer: Any, names: Sequence[str], out: Path, config: Mapping[str, Any]) -> Iterator[Tracking]:
    """A Trainer logs to these trackers until the end of the block, which closes them."""
    tracking = Tracking(names, out, config)
    trainer.add_callback(tracking)
    try:
        yield tracking
    finally:
        tracking.close()


@contextmanager
def variables(prefix: str, **defaults: str) -> Iterator[None]:
    """Environment variables for the block, unless the user has set them.

    Afterwards all whose names begin with `prefix` are what they were; other threads may have set others.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    os.environ.update({name: value for name, value in defaults.items() if name not in before})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(prefix) and name not in before]:
            os.environ.pop(name, None)
        os.environ.update(before)


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys and values as pairs with dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _remembered(path: Path) -> dict[str, Any]:
    """What an earlier start of the run wrote down; {} at the first."""
    return read_results(path) if path.is_file() else {}


def _tag(name: str) -> str:
    """Name of a metric in a tracker: train/loss, validation/accuracy, test/accuracy."""
    split, _, metric = name.partition("_")
    return f"{split}/{metric}" if split in ("validation", "test") else f"train/{name}"


def _plain(name: str) -> str:
    """A name of characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)
