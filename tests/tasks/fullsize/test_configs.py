"""Which configurations are of full size, and what their commands are given."""

import functools
import json

import pytest

from hf_sparseprior.runs.hf_run import task_in
from tasks.fullsize.configs import find_runs
from tasks.fullsize.run import config_file
from tasks.fullsize.starts import model_of, named_models
from tasks.fullsize.steps import fixture_of, train_overrides
from tests.configs import shipped
from tests.configs.test_recipes import is_small

# In experiments/, ours and in small as a whole.
OURS = (
    "curve_order",
    "families_small",
    "vio_paired",
    "vio_published",
    "sparsifiner_published",
    "dino_cifar10",
    "fib_batch",
)
TASKS = {"classification", "pretraining", "video", "robotics", "segmentation", "detection"}


@pytest.fixture(scope="module")
def runs():
    pytest.importorskip("mmengine", reason="needs make dense")
    return list(find_runs())


def rows(name):
    """FILE#CELL-ROW for all rows of a sweep."""
    cells = shipped.cells(name)
    return shipped.runs(name) if shipped.runs(name) != cells else cells


def papers():
    """Names of all rows of the papers' tables, by the lists that other tests use."""
    for file in shipped.files("experiments"):
        if not file.stem.startswith(OURS):
            names = rows(f"experiments/{file.name}")
            yield from (name for name in names if not is_small(name) and "#paired" not in name)
    for task in ("segmentation", "detection"):
        for file in shipped.CONFIGS.joinpath(task).glob("*.py"):
            if file.stem not in ("smoke", "own_data", "scenes_priors", "photographs_priors"):
                yield from shipped.cells(f"{task}/{file.name}")


def test_every_row_of_the_papers_is_there_once(runs):
    names = [run.name for run in runs]
    assert {run.task for run in runs} == TASKS
    assert len(names) == len({*names})
    wanted = set(papers())
    assert len(wanted) > 400 and wanted <= {*names}
    rest = {name.partition("#")[0] for name in names if name not in wanted}  # what the papers' runs start from
    assert {"classification/imagenet.yaml", "classification/sparsifiner.yaml", "classification/vtab.yaml"} <= rest
    assert not any("smoke" in name or "digits" in name or "_small.yaml" in name for name in rest)


def test_files_of_tasks_with_other_sections_are_passed_over_and_tables_are_not(tmp_path):
    for folder in ("heads", "experiments"):
        (tmp_path / folder).mkdir()
    (tmp_path / "heads" / "own.yaml").write_text("data: {source: cifar10}\nhead: {name: upernet}\n")
    assert list(find_runs(tmp_path)) == []
    (tmp_path / "experiments" / "table.yaml").write_text("data: {source: cifar10}\nhead: {name: upernet}\n")
    with pytest.raises(ValueError, match="has no key 'head'"):
        list(find_runs(tmp_path))


def test_every_saved_model_that_a_run_reads_can_be_made(runs):
    read = {folder for run in runs for folder in named_models(run.config).values()}
    models = {folder: model_of(folder, runs) for folder in read}
    assert models["models/deit_small"] == {"preset": "deit_small", "prior": "dense"}
    assert models["checkpoints/violin_dino_base"] == {"preset": "dino_base", "prior": "violin"}
    predictor = models["outputs/sparsifiner/deit_tiny_384_predictor/model"]
    assert (predictor["preset"], predictor["image_size"], predictor["prior"]) == ("deit_tiny", 384, "sparsifiner")
    with pytest.raises(ValueError, match="no preset in its name"):
        model_of("checkpoints/something", runs)


def test_a_run_of_epochs_0_has_no_step(runs):
    still = [run for run in runs if not run.trains]
    assert {run.name for run in still} >= {"experiments/sparsifiner_table1.yaml#full-deit_small"}
    assert all(run.config["trainer"]["num_train_epochs"] == 0 for run in still)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_takes_the_overrides_of_its_configurations(task, runs, tmp_path):
    """By its own reader: names and values are known, and what is left of the recipe builds."""
    from tasks.common.mm.config import as_json

    seen = 0
    for run in one_of_each_kind(run for run in runs if run.task == task):
        models = {key: tmp_path / "model" for key in named_models(run.config)}
        overrides = train_overrides(run, tmp_path / "out", tmp_path / fixture_of(run), models)
        file = config_file(run, tmp_path / run.name.replace("/", "_"), shipped.CONFIGS)
        config = reader(task)(file, overrides)
        seen += 1
        if task in ("segmentation", "detection"):
            assert config.train_dataloader.batch_size == 2 and config.work_dir == str(tmp_path / "out")
            assert config.train_dataloader.num_workers == config.val_dataloader.num_workers == 0
            assert 2 in (config.train_cfg.get("max_iters"), config.train_cfg.get("max_epochs"))
            assert models or as_json(config.model.to_dict()) == run.config["model"]
        else:
            assert config["trainer"]["output_dir"] == str(tmp_path / "out")
            assert str(config["data"]["path"]).startswith(str(tmp_path))
            given = {key: value for key, value in config.get("model", {}).items() if f"model.{key}" not in models}
            assert given == {key: value for key, value in run.config.get("model", {}).items() if key in given}
            assert config.get("augmentation", {}) == run.config.get("augmentation", {})
            steps = config["trainer"].get("max_steps", config["trainer"].get("steps"))
            assert steps == 2 or not run.trains
    assert seen >= 2


def test_label_maps_are_made_in_the_folder_of_the_run(runs, tmp_path):
    """Whoever makes them: a teacher of the configuration, or ours where it names maps that are there already."""
    found = [run for run in runs if run.config.get("token_labels")]
    assert {run.config["token_labels"].get("teacher") for run in found} == {None, "models/lvvit_small"}
    for run in found:
        assert named_models(run.config)["token_labels.teacher"] == "models/lvvit_small"
        given = train_overrides(run, tmp_path / "x" / "run", tmp_path, {})
        assert f"token_labels.path={tmp_path / 'x' / 'run'}_label_maps" in given


def one_of_each_kind(runs):
    """The first run of each file and set of keys: others differ in values alone."""
    found = {}
    for run in runs:
        keys = json.dumps({name: sorted(part) for name, part in run.config.items() if isinstance(part, dict)})
        found.setdefault((run.name.partition("#")[0], keys), run)
    return found.values()


def reader(task):
    """(file, overrides) -> configuration."""
    if task in ("segmentation", "detection"):
        from tasks.common.mm.config import load_config

        return functools.partial(load_config, task)
    if task == "robotics":
        from tasks.robotics.config import load_config as robots

        return robots
    return task_in(f"tasks.{task}.task").load_config
