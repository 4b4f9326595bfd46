"""Comparisons that do the runs their rows start from, and rows with a base of their own."""

import json
from pathlib import Path

import pytest
import yaml

from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.classification.config import load_config
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.runs import hf_run
from tasks.classification.compare import load_comparison
from tasks.classification.compare import main as compare_main
from tasks.classification.vtab.plan import load_sweep
from tasks.common import compare
from tasks.common.compare import needed_first, run_comparison
from tasks.common.records import read_records
from tests.each import each

pytestmark = pytest.mark.slow

MODEL = {
    "prior": "dense", "image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
TRAINER = {
    "max_steps": 4, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 512, "learning_rate": 5e-2,
    "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "disable_tqdm": True,
    "use_cpu": True, "seed": 7,
}  # fmt: skip


def write(folder, name, **content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(yaml.safe_dump(content))
    return folder / name


def chain(folder, first=("dense.yaml", "predictor.yaml"), variants=None):
    """A dense model, phase 1 on it, and rows after phase 1, as Sparsifiner's tables are; the comparison's file."""
    out = folder / "outputs"
    data = {"source": "digits", "limit_train": 80, "limit_validation": 60, "limit_test": 60}
    write(folder, "tiny.yaml", data=data, model=MODEL, trainer=TRAINER)
    write(folder, "dense.yaml", base="tiny.yaml", trainer={"output_dir": f"{out}/dense"})
    write(
        folder, "predictor.yaml", base="tiny.yaml",
        model={"pretrained": f"{out}/dense/model", "prior": "sparsifiner"},
        distillation={"teacher": "self", "phase": "predictor"},
        trainer={"output_dir": f"{out}/predictor", "load_best_model_at_end": False},
    )  # fmt: skip
    write(folder, "rows.yaml", base="tiny.yaml", model={"pretrained": f"{out}/predictor/model"})
    rows = {"half": {"model": {"prior": {"predictor": {"name": "sparsifiner", "keep_rate": 0.5}}}}}
    rows["scratch"] = {"base": "tiny.yaml"}
    first = list(first) if isinstance(first, tuple) else first
    return write(folder, "table.yaml", first=first, base="rows.yaml", seeds=[0], variants=variants or rows)


def watch(patch):
    """The folders of the runs that start, by their last names."""
    started, train = [], compare.run

    def record(task, config, **options):
        started.append(config["trainer"]["output_dir"])
        return train(task, config, **options)

    patch.setattr(compare, "run", record)
    return started


def forbid(patch):
    patch.setattr(compare, "run", lambda *args, **options: pytest.fail("trained"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole comparison: its folder, file, records and what was run."""
    folder = tmp_path_factory.mktemp("first")
    path = chain(folder)
    with pytest.MonkeyPatch.context() as patch:
        started = watch(patch)
        results = run_comparison(load_comparison(path), folder / "out", folder / "records")
    return folder, path, results, [Path(out) for out in started]


def test_first_runs_come_before_the_rows_in_order(finished):
    folder, _, results, started = finished
    outputs, out = folder / "outputs", folder / "out"
    assert started == [outputs / "dense", outputs / "predictor", out / "half" / "seed0", out / "scratch" / "seed0"]
    assert results["half"][0]["pretrained_sha256"] == file_sha256(outputs / "predictor" / "model" / "model.safetensors")
    assert results["scratch"][0]["pretrained_sha256"] is None
    assert json.loads((outputs / "predictor" / "results.json").read_text())["seed"] == 7


def test_finished_first_runs_serve_other_seeds_and_a_row_of_no_epochs_tests_what_it_starts_from(
    finished, monkeypatch, tmp_path
):
    folder, path, _, _ = finished
    started, comparison = watch(monkeypatch), load_comparison(path, ["model.prior=dense"])
    comparison.seeds = [3]
    comparison.configs["half"]["trainer"].update(max_steps=-1, num_train_epochs=0)
    record = run_comparison(comparison, tmp_path / "out", tmp_path / "records", ["half"])["half"][0]
    assert started == [str(tmp_path / "out" / "half" / "seed3")]
    dense = json.loads((folder / "outputs" / "dense" / "results.json").read_text())
    # Phase 1 leaves the backbone as it was.
    assert record["metrics"]["test_accuracy"] == dense["metrics"]["test_accuracy"] and record["steps"] == 0


def test_with_all_rows_done_first_runs_may_be_gone(finished, monkeypatch):
    folder, path, results, _ = finished
    forbid(monkeypatch)
    comparison = load_comparison(path)
    comparison.first[0]["trainer"]["output_dir"] = str(folder / "gone")
    assert run_comparison(comparison, folder / "elsewhere", folder / "records") == results


def test_interrupted_in_a_first_run_the_same_command_goes_on(finished, monkeypatch, tmp_path, capsys):
    path, whole, steps = chain(tmp_path), hf_run.SparsePriorTrainer.training_step, []

    def stop(trainer, *args, **kwargs):
        steps.append(trainer.state.global_step)
        if len(steps) == 4 + 3:  # in phase 1, after its checkpoint at step 2
            raise KeyboardInterrupt
        return whole(trainer, *args, **kwargs)

    arguments = ["--config", str(path), "--out", str(tmp_path / "out"), "--variants", "half"]
    with monkeypatch.context() as patch:
        patch.setattr(hf_run.SparsePriorTrainer, "training_step", stop)
        assert compare_main(arguments) == 130
    assert not (tmp_path / "out").exists()
    assert "the same command goes on where it stopped" in capsys.readouterr().err
    started = watch(monkeypatch)
    assert compare_main(arguments) == 0
    assert started == [str(tmp_path / "outputs" / "predictor"), str(tmp_path / "out" / "half" / "seed0")]
    results = json.loads((tmp_path / "outputs" / "predictor" / "results.json").read_text())
    assert results["resumed_from"] == "checkpoint-2"
    uninterrupted = finished[0] / "outputs" / "predictor" / "results.json"
    assert results["model_sha256"] == json.loads(uninterrupted.read_text())["model_sha256"]
    row = read_records(tmp_path / "out")["half"][0]
    assert row["metrics"] == finished[2]["half"][0]["metrics"]
    # One table, one picture.
    assert (tmp_path / "out" / "table.md").read_text().strip() in capsys.readouterr().out
    assert (tmp_path / "out" / "results.png").stat().st_size > 2000
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"records.jsonl", "table.md", "results.png", "half"}


def test_a_first_run_of_another_configuration_is_refused_before_anything_runs(finished, monkeypatch, tmp_path, capsys):
    folder, path, _, _ = finished
    forbid(monkeypatch)
    arguments = ["--config", str(path), "--out", str(tmp_path / "out"), "trainer.learning_rate=1e-3"]
    assert compare_main(arguments) == 2
    error = capsys.readouterr().err
    expected = f"{folder}/outputs/dense is of another configuration (trainer.learning_rate: 0.05 there, 0.001 here)"
    assert error.count("\n") == 1 and expected in error and "remove it, or name another trainer.output_dir" in error
    assert not (tmp_path / "out").exists()


def test_a_foreign_folder_is_not_written_into(monkeypatch, tmp_path):
    path = chain(tmp_path)
    write(tmp_path / "outputs" / "predictor", "mine.yaml", a=1)
    forbid(monkeypatch)
    with pytest.raises(ValueError, match="predictor is not empty and not of this program"):
        run_comparison(load_comparison(path), tmp_path / "out", tmp_path / "out")


def test_rows_that_do_not_wait_for_a_first_run_are_checked_before_it(monkeypatch, tmp_path):
    rows = {"half": {}, "bad": {"model": {"pretrained": "nowhere"}}}
    forbid(monkeypatch)
    with pytest.raises(OSError, match=r"model\.pretrained=nowhere is not a folder of a saved model"):
        run_comparison(load_comparison(chain(tmp_path, variants=rows)), tmp_path / "out", tmp_path / "out")


def config(name, pretrained=None, **teachers):
    sections = {section: {"teacher": folder} for section, folder in teachers.items()}
    return {"model": {"pretrained": pretrained}, "trainer": {"output_dir": f"outputs/{name}"}, **sections}


@each(
    "row, needed",
    [
        (config("row"), []),
        (config("row", "outputs/a/model"), ["a"]),
        (config("row", "outputs/c/model"), ["a", "b", "c"]),
        (config("row", "outputs/d/model_ema"), ["d"]),
        (config("row", "models/x", distillation="outputs/b/model"), ["a", "b"]),
        (config("row", "models/x", token_labels="outputs/d/model"), ["d"]),
        (config("row", distillation="self"), []),
        (config("row", "outputs/ab/model"), []),  # a longer name
    ],
)
def test_only_what_a_pending_row_reads_is_done(row, needed):
    first = [config("a"), config("b", "outputs/a/model"), config("d"), config("c", distillation="outputs/b/model")]
    assert [run["trainer"]["output_dir"][-1] for run in needed_first(CLASSIFICATION, first, [row])] == needed
    assert needed_first(CLASSIFICATION, first, []) == []


def test_overrides_of_data_augmentation_and_trainer_reach_first_runs(tmp_path):
    overrides = ["data.limit_train=50", "augmentation.flip=0.5", "trainer.max_steps=1", "model.prior=violin"]
    comparison = load_comparison(chain(tmp_path), overrides)
    assert len(comparison.first) == 2
    for one in (*comparison.first, *comparison.configs.values()):
        assert (one["data"]["limit_train"], one["augmentation"]["flip"], one["trainer"]["max_steps"]) == (50, 0.5, 1)
    assert [one["model"]["prior"] for one in comparison.first] == ["dense", "sparsifiner"]
    assert {one["model"]["prior"] for one in comparison.configs.values()} == {"violin"}


def test_a_first_run_without_a_folder_lies_where_train_puts_it(tmp_path):
    comparison = load_comparison(chain(tmp_path, first=["tiny.yaml"]))
    assert comparison.first[0]["trainer"]["output_dir"] == "outputs/classification/tiny"


@each("first", ["dense.yaml", 5, {"a": "dense.yaml"}, [5]])
def test_a_bad_list_of_first_runs_is_named(tmp_path, first):
    with pytest.raises(ValueError, match=r"first=.* must be a list of names of configuration files"):
        load_comparison(chain(tmp_path, first=first))


def test_a_first_run_is_checked_when_the_file_is_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="no_such"):
        load_comparison(chain(tmp_path, first=["no_such.yaml"]))
    write(tmp_path, "bad.yaml", base="tiny.yaml", model={"patch_size": 3})
    with pytest.raises(ValueError, match=r"first '\S*bad.yaml': .*patch_size=3"):
        load_comparison(chain(tmp_path, first=["bad.yaml"]))


# ---- bases of rows --------------------------------------------------------------------------------------------------


def test_a_row_may_change_another_file(tmp_path):
    path = chain(tmp_path, variants={"plain": {}, "other": {"base": "sub/other.yaml", "model": {"prior": "violin"}}})
    changes = {"augmentation": {"flip": 0.5}, "trainer": {"weight_decay": 0.3}}
    write(tmp_path / "sub", "other.yaml", base="../tiny.yaml", **changes)
    overrides = ["trainer.max_steps=1"]
    configs = load_comparison(path, overrides).configs
    expected = load_config(tmp_path / "sub" / "other.yaml", [*overrides, "model.prior=violin"])
    assert configs["other"] == expected and "pretrained" not in configs["other"]["model"]
    assert configs["plain"] == load_config(tmp_path / "rows.yaml", overrides)


def test_bases_in_a_file_of_rows_are_relative_to_it(tmp_path):
    path = chain(tmp_path, variants="rows/all.yaml")
    write(tmp_path / "rows", "all.yaml", other={"base": "other.yaml"})
    write(tmp_path / "rows", "other.yaml", base="../tiny.yaml", trainer={"weight_decay": 0.3})
    assert load_comparison(path).configs["other"]["trainer"]["weight_decay"] == 0.3


def test_a_bad_or_missing_base_of_a_row_is_named(tmp_path):
    for base in (5, [5], {}):
        with pytest.raises(ValueError, match=r"variant 'a': base=.* must be the name of a file, or a list of names"):
            load_comparison(chain(tmp_path, variants={"a": {"base": base}}))
    with pytest.raises(FileNotFoundError, match="no_such"):
        load_comparison(chain(tmp_path, variants={"a": {"base": "no_such.yaml"}}))


def test_sweeps_have_no_rows_with_a_base(tmp_path):
    shipped = Path(__file__).parents[3] / "configs" / "classification" / "vtab.yaml#deit_tiny-full"
    path = write(tmp_path, "sweep.yaml", base=str(shipped), variants={"a": {"base": "x.yaml"}})
    with pytest.raises(ValueError, match="variant 'a' has no key 'base'"):
        load_sweep(path)
