"""Evaluation of a saved model of mm on one split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config

from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.models.pretrained import hub_hint
from hf_sparseprior.runs.command import tell_passed_over
from hf_sparseprior.runs.measured import settings, suffix
from hf_sparseprior.runs.processes import check_alone
from hf_sparseprior.runs.results import Results
from hf_sparseprior.runs.run_folder import check_place, evaluation_folder, model_folder
from tasks.common.mm.config import WORK_DIR, as_json, check_data, load_config
from tasks.common.mm.hooks import all_passed_over
from tasks.common.mm.runner import QuietRunner, build_runner, classes_of, whole_model
from tasks.common.mm.saving import CONFIG, WEIGHTS, fill_model
from tasks.common.mm.task import MM_SPLITS, Task
from tasks.common.mm.tta import with_tta


def evaluate(
    task: Task,
    folder: Path,
    split: str = "test",
    overrides: Sequence[str] = (),
    out: Path | None = None,
    tta: bool = False,
) -> dict[str, Any]:
    """Metrics of a saved model on a split, with results and picture in `out` (default: RUN/evaluation).

    With `tta`, test-time augmentation (`with_tta`): results_SPLIT_tta.json, and no picture. Those of other data and
    settings have a name of their own (hf_sparseprior/runs/measured.py).
    """
    check_alone("evaluate")
    folder = model_folder(folder, CONFIG)
    if not (folder / CONFIG).is_file():
        raise OSError(f"{folder} is not a folder of a saved model: it holds no {CONFIG}{hub_hint(folder)}")
    config = load_config(task.name, folder / CONFIG, overrides)
    out = out or evaluation_folder(folder)
    check_place(out, "--out")
    config[WORK_DIR] = str(out)
    runner = runner_of(config, folder, split, tta)
    tell_passed_over(*all_passed_over(runner.test_dataloader.dataset))
    for line in task.look(runner.test_dataloader.dataset, False):
        print(line, flush=True)
    label = label_of(task, folder, as_json(config.to_dict()), split + "_tta" * tta, out)
    results = Results(
        task=task.name,
        metrics=task.metrics(split, runner.test()),
        config=as_json(config.to_dict()),
        parameters=sum(parameter.numel() for parameter in whole_model(runner).parameters()),
        details={
            "model": str(folder),
            "model_sha256": file_sha256(folder / WEIGHTS),
            "images": len(runner.test_dataloader.dataset),
            "tta": tta,
        },
    )
    results.details["classes"] = classes_of(runner)
    if not tta:
        models = {"prediction": whole_model(runner)}
        task.draw(models, runner.test_dataloader.dataset, out / f"predictions_{label}.png")
    content = results.write(out / f"results_{label}.json")
    print(f"results: {out}/results_{label}.json")
    return content


def label_of(task: Task, folder: Path, config: dict[str, Any], name: str, out: Path) -> str:
    """`name`, of the split, and what else the names of an evaluation's files have where it is not the run's own data
    and settings.
    """
    own = None
    if out.resolve() == evaluation_folder(folder).resolve():
        saved = load_config(task.name, folder / CONFIG)
        one_split(saved, folder, name.removesuffix("_tta"))
        own = as_json(saved.to_dict())

    def measured(of: Any) -> dict[str, Any]:
        return settings(of, "model", "test_dataloader", "test_evaluator", "tta_model", "tta_pipeline")

    return name + suffix(out, f"results_{name}", config, file_sha256(folder / WEIGHTS), measured, own)


def runner_of(config: Config, folder: Path, split: str = "test", tta: bool = False) -> QuietRunner:
    """A runner of a saved model for one split alone. The config, as saved with it, is changed."""
    one_split(config, folder, split)
    runner = build_runner(with_tta(config) if tta else config)
    fill_model(whole_model(runner), folder)
    return runner


def one_split(config: Config, folder: Path, split: str) -> None:
    """Leave one split in a saved config, as that of the test."""
    part = MM_SPLITS[split]
    if missing := [name for name in (f"{part}_dataloader", f"{part}_evaluator") if not config.get(name)]:
        raise ValueError(f"--split {split}: the config of {folder} has no {' and no '.join(missing)}")
    for name in ("dataloader", "evaluator"):
        config[f"test_{name}"] = config[f"{part}_{name}"]
    check_data(Config({"test_dataloader": config.test_dataloader}))
    for key in ("train_dataloader", "train_cfg", "optim_wrapper", "param_scheduler", "val_dataloader", "val_cfg"):
        config.pop(key, None)
    config.pop("val_evaluator", None)
