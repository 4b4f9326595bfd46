"""Compare runs of segmentation or detection over seeds: python -m tasks.TASK.compare --config FILE [key=value ...]

FILE is an mm config with `cells`, one for each row (tasks/common/mm/config.py), and `seeds`:

    _base_ = ["smoke.py"]
    seeds = [0, 1, 2]
    cells = dict(dense=dict(model=dict(backbone=dict(prior="dense"))), violin=...)

A row with a seed is what `train --config FILE#ROW randomness.seed=SEED` does. Runs of one seed see the same images in
the same order, augmented alike. All else is as in every task (tasks/common/compare.py): seeds take turns, every
finished run leaves a record, a command that was killed goes on where it stopped and does no finished run again,
`--jobs N`, `--shard K/N` and `--ray ADDRESS` do several runs at a time, and tables have each row's differences to the
first one, seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from mmengine.config import Config
from mmengine.hooks import Hook
from transformers import TrainerCallback

from hf_sparseprior.runs.config import check_name, config_name, nested_names
from hf_sparseprior.runs.locks import REPORT_LOCK, turn
from hf_sparseprior.runs.processes import check_alone
from hf_sparseprior.runs.run_folder import MODEL, RESULTS
from tasks.common import compare
from tasks.common.mm.config import (
    OUTPUT_DIR,
    SEEDS,
    WORK_DIR,
    as_json,
    check_data,
    load_config,
    read_file,
    run_identity,
)
from tasks.common.mm.evaluate import runner_of
from tasks.common.mm.runner import whole_model
from tasks.common.mm.saving import CONFIG, WEIGHTS
from tasks.common.mm.task import PICTURE, Task
from tasks.common.mm.train import run
from tasks.common.queue import AnyQueue

SEED = "randomness.seed"
OWNED = {
    SEED: compare.OWNED["trainer.seed"],
    **dict.fromkeys((OUTPUT_DIR, WORK_DIR), compare.OWNED["trainer.output_dir"]),
}


@dataclass
class MMComparison(compare.Comparison):
    """What a comparison file says.

    task: the task of all runs. name: the file's name. configs: mm's, by row, without seed and output folder. seeds:
    those of every row.
    """

    task: Task  # type: ignore[assignment]  # of mm, and so are the configurations
    configs: dict[str, Config]

    def row(self, name: str, seed: int, out: Path, records: Path) -> MMRow:
        """One run of it."""
        return MMRow(self, name, seed, out, records)

    def prepare(
        self,
        pending: Sequence[Any],
        records: Sequence[Mapping[str, Any]],
        command: str | None = None,
        queue: AnyQueue | None = None,
    ) -> None:
        """See whether all data is there; nothing runs before the rows."""
        for row in pending:
            check_data(row.config)

    def draw(self, out: Path, records: Path) -> None:
        """predictions.png: what the rows of the first seed predict for the first test images, side by side.

        Rows whose model is not there, because only their record is, are left out. A picture that is newer than all
        models stays.
        """
        rows = [self.row(name, self.seeds[0], out, records) for name in self.configs]
        found = {row.name: row.folder / MODEL for row in rows if (row.folder / RESULTS).is_file()}
        picture = records / PICTURE
        newest = max(((folder / WEIGHTS).stat().st_mtime for folder in found.values()), default=0.0)
        if found:
            with turn(records / REPORT_LOCK):  # commands that do a comparison together end together
                if not picture.is_file() or picture.stat().st_mtime <= newest:
                    self._draw(found, picture)

    def _draw(self, found: Mapping[str, Path], picture: Path) -> None:
        models, dataset = {}, None
        with TemporaryDirectory() as logs:
            for name, folder in found.items():
                config = load_config(self.task.name, folder / CONFIG)
                config[WORK_DIR] = logs
                runner = runner_of(config, folder)
                models[name] = whole_model(runner)
                dataset = dataset or runner.test_dataloader.dataset
            self.task.draw(models, dataset, picture)
        print(f"picture: {picture}")


class MMRow(compare.Row):
    """One run of a comparison: a row of its table with one seed. Its configuration is mm's, whole."""

    config: Any

    def make_config(self, shared: Any) -> Any:
        """The configuration of its row, with seed and folder."""
        config = Config(shared.to_dict(), filename=shared.filename)
        config.merge_from_dict({SEED: self.seed, WORK_DIR: str(self.folder)})
        return config

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it this run and no other."""
        return run_identity(self.config)

    def stored_identity(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """`identity` of a configuration as results and records have it."""
        return {"config": nested_names(as_json(config))}

    @property
    def does(self) -> Callable[..., dict[str, Any]]:
        """What does it."""
        return do_run


def do_run(
    task: Task, config: Config, command: str | None, metric: str, callbacks: Sequence[TrainerCallback] = ()
) -> dict[str, Any]:
    """Do a run. Returns its record, which has the metric."""
    results = run(task, config, command=command, hooks=[ReportSteps(callback) for callback in callbacks])
    return compare.record_of(results, Path(config.work_dir) / RESULTS, metric)


class ReportSteps(Hook):
    """Says to a callback of transformers, which a queue listens to, which step is done."""

    priority = "VERY_LOW"

    def __init__(self, callback: TrainerCallback) -> None:
        self.callback = callback

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """One step on."""
        state = SimpleNamespace(global_step=runner.iter + 1, max_steps=runner.max_iters)
        self.callback.on_step_end(None, state, None)


def load_comparison(task: Task, path: str | Path, overrides: Sequence[str] = ()) -> MMComparison:
    """Read a comparison and every configuration in it before anything runs.

    Raises:
        ValueError: for a file that is no comparison, bad overrides, and under torchrun: several runs at a time are
            --jobs.
        OSError: for a missing file.
    """
    check_alone("compare")
    path = Path(path)
    content = read_file(path)
    rows = list(content.get("cells", {}))
    present = [name for name, found in ((SEEDS, SEEDS in content), ("cells", rows)) if found]
    compare.check_present(dict.fromkeys(present), (SEEDS, "cells"), f"{path} is no comparison")
    if "reference" in content:
        raise ValueError(f"{path}: reference is of comparisons in YAML; rows of this one are compared with the first")
    seeds = compare.check_seeds(content[SEEDS], str(path))
    compare.refuse_owned([override.partition("=")[0] for override in overrides], OWNED, "the command line")
    configs = {}
    for name in rows:
        check_name(name, f"{path}: cell")
        config = load_config(task.name, path.with_name(f"{path.name}#{name}"), overrides)
        config.setdefault("randomness", {})
        configs[name] = config
    return MMComparison(task, config_name(path), configs, seeds)
