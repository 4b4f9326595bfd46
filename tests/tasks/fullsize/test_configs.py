"""Which configurations are of full size, and which of them are one step."""

import dataclasses
import functools

import pytest

from tasks.common.hf_run import task_named
from tasks.fullsize.configs import PaperRun, chosen, digest, find_groups, step_of
from tasks.fullsize.run import config_file
from tasks.fullsize.starts import model_of, named_models
from tasks.fullsize.steps import Batch, fixture_of, train_overrides
from tests.configs import shipped
from tests.configs.test_recipes import is_small

# In experiments/, ours and in small as a whole.
OURS = ("curve_order", "families_small", "vio_paired", "dino_cifar10", "fib_batch")
TASKS = {"classification", "pretraining", "video", "robotics", "segmentation", "detection"}


@pytest.fixture(scope="module")
def groups():
    pytest.importorskip("mmengine", reason="needs make dense")
    return find_groups()


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


def test_every_row_of_the_papers_is_in_one_group(groups):
    names = [run.name for group in groups for run in group.runs]
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
    assert find_groups(tmp_path) == []
    (tmp_path / "experiments" / "table.yaml").write_text("data: {source: cifar10}\nhead: {name: upernet}\n")
    with pytest.raises(ValueError, match="has no key 'head'"):
        find_groups(tmp_path)


def test_every_task_has_groups_with_names_of_their_own(groups):
    assert {group.run.task for group in groups} == TASKS
    assert len({group.name for group in groups}) == len({group.key for group in groups}) == len(groups)


def test_data_sets_of_videos_and_robots_are_done_each(groups):
    """Their layouts are read by code of their own."""
    for task, texts in (("video", ("smarthome", "nucla", "ntu")), ("robotics", ("/lift/", "/can/", "pusht"))):
        own = [group for group in groups if group.run.task == task]
        for group in own:
            found = {next(text for text in texts if text in run.config["data"]["path"]) for run in group.runs}
            assert len(found) == 1, group.name
        assert {text for text in texts for group in own if text in group.run.config["data"]["path"]} == {*texts}


def run(**changes):
    prior = {"support": {"name": "window", "w": 4, "diagonal": True}}
    config = {
        "data": {"source": "cifar10", "path": "a"},
        "model": {"preset": "deit_tiny", "prior": prior},
        "augmentation": {"mixup": 0.8},
        "trainer": {"seed": 0, "learning_rate": 1e-3, "per_device_train_batch_size": 64, "optim": "adamw_torch"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config[section] = {**config.get(section, {}), name: value}
    return PaperRun("a.yaml", "classification", config)


@pytest.mark.parametrize(
    "change",
    [
        {"data__source": "imagenet"},
        {"trainer__seed": 1},
        {"trainer__learning_rate": 1e-4},
        {"trainer__output_dir": "elsewhere"},
        {"augmentation__mixup": 0.2},
        {"model__prior": {"support": {"name": "window", "w": 40, "diagonal": True}}},
    ],
)
def test_seed_data_rates_and_numbers_of_a_prior_make_no_other_step(change):
    assert digest(step_of(run(**change))) == digest(step_of(run()))


@pytest.mark.parametrize(
    "change",
    [
        {"model__preset": "deit_small"},
        {"model__image_size": 384},
        {"model__prior": {"support": {"name": "window", "w": 4, "diagonal": False}}},
        {"model__prior": "dense"},
        {"trainer__per_device_train_batch_size": 128},
        {"trainer__optim": "sgd"},
        {"trainer__ema_decay": 0.99},
        {"augmentation__mixup": 0.0},
        {"tuning__method": "lora"},
        {"distillation__teacher": "self"},
        {"trainer__num_train_epochs": 0},
    ],
)
def test_what_changes_a_step_makes_another(change):
    assert digest(step_of(run(**change))) != digest(step_of(run()))


def test_texts_choose_by_any_name_of_a_group_and_by_task(groups):
    (group,) = chosen(groups, ["fib_table13.yaml#cifar10-w160"])
    assert any(each.name.endswith("#cifar100-w2") for each in group.runs) and not group.run.name.endswith("w160")
    assert {group.run.task for group in chosen(groups, ["robotics "])} == {"robotics"}
    assert chosen(groups, []) == groups
    with pytest.raises(ValueError, match="--only 'nothing_of_this'"):
        chosen(groups, ["nothing_of_this"])


def test_every_saved_model_that_a_run_reads_can_be_made(groups):
    runs = [run for group in groups for run in group.runs]
    read = {folder for run in runs for folder in named_models(run.config).values()}
    models = {folder: model_of(folder, runs) for folder in read}
    assert models["models/deit_small"] == {"preset": "deit_small", "prior": "dense"}
    assert models["checkpoints/violin_dino_base"] == {"preset": "dino_base", "prior": "violin"}
    predictor = models["outputs/sparsifiner/deit_tiny_384_predictor/model"]
    assert (predictor["preset"], predictor["image_size"], predictor["prior"]) == ("deit_tiny", 384, "sparsifiner")
    with pytest.raises(ValueError, match="no preset in its name"):
        model_of("checkpoints/something", runs)


def test_a_run_of_epochs_0_has_no_step(groups):
    still = [group.run for group in groups if not group.run.trains]
    assert {run.name for run in still} >= {"experiments/sparsifiner_table1.yaml#full-deit_small"}
    assert all(dataclasses.replace(run).config["trainer"]["num_train_epochs"] == 0 for run in still)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_takes_the_overrides_of_its_configurations(task, groups, tmp_path):
    """By its own reader: names and values are known, and what is left of the recipe builds."""
    from tasks.common.mm.config import as_json

    seen = 0
    for group in (group for group in groups if group.run.task == task):
        run, batch = group.run, Batch(group.run.images)
        models = {key: tmp_path / "model" for key in named_models(run.config)}
        overrides = train_overrides(run, batch, tmp_path / "out", tmp_path / fixture_of(run), models)
        file = config_file(run, tmp_path / group.name, shipped.CONFIGS)
        config = reader(task)(file, overrides)
        seen += 1
        if task in ("segmentation", "detection"):
            assert config.train_dataloader.batch_size == run.images and config.work_dir == str(tmp_path / "out")
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
    assert seen > 3


def test_label_maps_are_made_in_the_folder_of_the_run(groups, tmp_path):
    """Whoever makes them: a teacher of the configuration, or ours where it names maps that are there already."""
    found = [group.run for group in groups if group.run.config.get("token_labels")]
    assert {run.config["token_labels"].get("teacher") for run in found} == {None, "models/lvvit_small"}
    for run in found:
        assert named_models(run.config)["token_labels.teacher"] == "models/lvvit_small"
        given = train_overrides(run, Batch(2), tmp_path / "x" / "run", tmp_path, {})
        assert f"token_labels.path={tmp_path / 'x' / 'run'}_label_maps" in given


def reader(task):
    """(file, overrides) -> configuration."""
    if task in ("segmentation", "detection"):
        from tasks.common.mm.config import load_config

        return functools.partial(load_config, task)
    if task == "robotics":
        from tasks.robotics.config import load_config as robots

        return robots
    return task_named(task).load_config
