"""The `compression` section: a search and a retraining as one run."""

import copy
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, TrainerCallback

from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.classification.compression import search_run
from hf_sparseprior.classification.config import check_config
from hf_sparseprior.compression.search import SEARCH_FILE
from tasks.classification import compare
from tasks.classification import evaluate as evaluation
from tasks.classification import train as training
from tasks.common.records import read_records
from tests.each import each

CONFIG = {
    "data": {"source": "digits", "limit_train": 160, "limit_validation": 40, "limit_test": 40},
    "model": {
        "prior": "fibottention+violin", "image_size": 8, "patch_size": 2, "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 48, "initializer_range": 0.1, "drop_path_rate": 0.1,
    },
    "compression": {
        "method": "upop", "ratio": 0.4, "structures": ["heads", "head_width", "mlp", "width"], "search_epochs": 2,
        "interval": 3,
    },
    "trainer": {
        "num_train_epochs": 2, "per_device_train_batch_size": 40, "learning_rate": 5e-3, "weight_decay": 0.05,
        "seed": 3, "disable_tqdm": True, "use_cpu": True, "ema_decay": 0.9,
    },
}  # fmt: skip


def config_in(folder, **sections):
    config = copy.deepcopy(CONFIG)
    config["trainer"]["output_dir"] = str(folder)
    for section, values in sections.items():
        config.setdefault(section, {}).update(values)
    return config


def weights_of(folder, model="model"):
    return load_file(folder / model / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, training.run(config_in(folder))


@pytest.mark.slow
def test_a_run_leaves_a_model_of_the_ratio_asked_for(finished):
    folder, results = finished
    about, model = results["compression"], AutoModelForImageClassification.from_pretrained(folder / "model")
    assert results["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert about["parameters"]["after"] == results["parameters"] == results["trainable_parameters"]
    assert 1 - results["parameters"] / about["parameters"]["before"] == pytest.approx(0.4, abs=0.01)
    assert about["flops"]["after"] == model_flops(model.config).total < about["flops"]["before"]
    assert about["heads"] == model.config.compressed["heads"]
    assert [left for left, _ in about["left"]["mlp"]] == model.config.compressed["mlp_width"]
    assert results["steps"] == about["search_steps"] == 8
    assert results["pretrained_sha256"] is None  # its search began from scratch
    assert {"curves.png", "confusion.png", "errors.png", "kept.png"} == set(results["pictures"])
    averaged = AutoModelForImageClassification.from_pretrained(folder / "model_ema")
    assert averaged.config.compressed == model.config.compressed
    assert results["metrics"]["test_ema_accuracy"] is not None


@pytest.mark.slow
def test_the_search_leaves_the_model_that_it_tested(finished, tmp_path):
    folder, _ = finished
    search = folder.with_name("run_search")
    results = json.loads((search / "results.json").read_text())
    assert evaluation.main([str(search / "model"), "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "results_test.json").read_text())
    assert stored["metrics"]["test_accuracy"] == results["metrics"]["test_accuracy"]
    assert stored["confusion"] == results["confusion"]  # of the masked model
    masks = load_file(sorted(search.glob("checkpoint-*"))[-1] / SEARCH_FILE)
    values = torch.cat([value for name, value in masks.items() if name.startswith("mask")])
    assert set(values.tolist()) == {0.0, 1.0}
    assert not (folder / "checkpoint-8" / SEARCH_FILE).exists()
    # The retraining starts from it.
    assert weights_of(folder).keys() == weights_of(search).keys()
    assert all(value.shape == weights_of(folder)[name].shape for name, value in weights_of(search).items())


class StopAt(TrainerCallback):
    """Stands for a kill: in the search or in the retraining, which have 8 steps each."""

    def __init__(self, step, searching):
        self.step, self.searching = step, searching

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.output_dir.endswith("_search") is self.searching:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("searching", [True, False])
def test_a_killed_run_goes_on_to_the_same_bits(finished, tmp_path, searching):
    folder, whole = finished
    with pytest.raises(KeyboardInterrupt):
        training.run(config_in(tmp_path / "run"), callbacks=[StopAt(6, searching)])
    assert not (tmp_path / "run" / "results.json").exists()
    assert (tmp_path / "run_search" / "results.json").exists() is not searching
    results = training.run(config_in(tmp_path / "run"))
    search = json.loads((tmp_path / "run_search" / "results.json").read_text())
    assert (search if searching else results)["resumed_from"] == "checkpoint-4"
    assert results["metrics"] == whole["metrics"] and results["compression"] == whole["compression"]
    for model in ("model", "model_ema"):
        again = weights_of(tmp_path / "run", model)
        assert all(value.equal(again[name]) for name, value in weights_of(folder, model).items())


@pytest.mark.slow
def test_a_checkpoint_without_its_search_is_skipped(tmp_path, capsys):
    config = config_in(
        tmp_path / "run", trainer={"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": False}
    )
    with pytest.raises(KeyboardInterrupt):
        training.run(copy.deepcopy(config), callbacks=[StopAt(6, True)])
    (tmp_path / "run_search" / "checkpoint-4" / SEARCH_FILE).unlink()
    with pytest.raises(KeyboardInterrupt):
        training.run(copy.deepcopy(config), callbacks=[StopAt(6, True)])
    said = capsys.readouterr().err
    assert f"checkpoint-4 is skipped: {SEARCH_FILE} is missing" in said and "going on from" in said


SWIN = {
    "family": "sparseprior_swin", "image_size": 8, "patch_size": 1, "embed_dim": 16, "depths": [1, 1],
    "num_heads": [2, 4], "window_size": 4,
}  # fmt: skip
IFORMER = {
    "family": "sparseprior_iformer", "image_size": 8, "hidden_sizes": [16, 24], "conv_depths": [1, 1],
    "attention_depths": [1, 1], "final_conv_depths": [1, 0], "key_reduction": [1, 2], "kernel_size": 3,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "left"),
    [
        (SWIN, {"heads": [(2, 2), (4, 4)], "width": [(16, 16), (32, 32)]}),
        (IFORMER, {"heads": [(1, 1), (1, 1)], "width": [(16, 16), (24, 24)], "stem_width": [(8, 8), (32, 32)]}),
    ],
    ids=["swin", "iformer"],
)
def test_a_search_alone(tmp_path, model, left):
    config = config_in(tmp_path / "run")
    config["model"] = {**model, "prior": "fibottention+violin", "initializer_range": 0.1}
    config["compression"] = {"method": "upop", "ratio": 0.3, "phase": "search", "interval": 2}
    config["trainer"] |= {"ema_decay": None, "load_best_model_at_end": False, "num_train_epochs": 1}
    results = training.run(config)
    assert not (tmp_path / "run_search").exists()
    assert results["compression"]["achieved"] == pytest.approx(0.3, abs=0.01)
    assert results["parameters"] == results["compression"]["parameters"]["after"]
    assert "kept.png" in results["pictures"]
    about = {name: list(map(tuple, pairs)) for name, pairs in results["compression"]["left"].items()}
    assert {name: about[name] for name in left} == left  # neither is one of UPop's own structures
    gone = {name for name, pairs in about.items() if any(kept < before for kept, before in pairs)}
    inner = {"value_width", "conv_width"} if "conv_width" in about else set()
    assert gone == {"head_width", "mlp"} | inner


def test_the_search_is_a_run_of_its_own():
    config = check_config(config_in("out/run", trainer={"max_steps": 7, "metric_for_best_model": "ema_accuracy"}))
    before = copy.deepcopy(config)
    first = search_run(config)
    assert config == before and search_run(check_config(first)) is None
    assert first["trainer"]["output_dir"] == "out/run_search" and first["compression"]["phase"] == "search"
    assert not {"max_steps", "ema_decay", "metric_for_best_model"} & first["trainer"].keys()
    assert first["trainer"]["learning_rate"] == 5e-3
    config["compression"]["search_learning_rate"] = 1e-4
    assert search_run(config)["trainer"]["learning_rate"] == 1e-4
    assert search_run(check_config({"model": CONFIG["model"]})) is None


@each(
    "sections, message",
    [
        ({"compression": {"method": "magnitude"}}, "compression.method='magnitude' must be one of upop, or null"),
        ({"compression": {"ratio": 1.5}}, "compression.ratio=1.5 must be a number above 0 and below 1"),
        ({"compression": {"structures": ["depth"]}}, r"compression.structures=\['depth'\] must be a list of some of"),
        ({"compression": {"interval": 0}}, "compression.interval=0 must be"),
        ({"compression": {"search_epochs": None}}, "compression.search_epochs must say how long the search is"),
        ({"compression": {"search_epochs": 0}}, "compression.search_epochs=0 must be above 0"),
        ({"compression": {"phase": "retrain"}}, "compression.phase='retrain' must be one of both, search"),
        ({"compression": {"phase": "search"}}, "compression.search_epochs=2 is for phase=both"),
        ({"compression": {"method": None}}, "need compression.method=upop"),
        ({"compression": {"rate": 0.5}}, "has no key 'rate'; did you mean 'ratio'"),
        (
            {"compression": {"phase": "search", "search_epochs": None}, "trainer": {"ema_decay": None}},
            "trainer.load_best_model_at_end=True is not for a search",
        ),
        (
            {"compression": {"structures": ["width", "mlp"]}, "distillation": {"teacher": "x"}},
            r"prunes the width, which distillation\.lambda_token=0\.5 needs to be the teacher's",
        ),
        (
            {
                "compression": {"structures": ["heads"]},
                "distillation": {"teacher": "x", "lambda_attention": 1.0},
                "model": {"prior": "sparsifiner"},
            },
            r"prunes the heads, which distillation\.lambda_attention=1 needs to be the teacher's",
        ),
        ({"trainer": {"fp16": True}}, "trainer.fp16 scales differently; use bf16"),
        ({"trainer": {"fsdp": "full_shard"}}, "compression cannot be used with FSDP"),
        ({"tuning": {"method": "linear"}, "model": {"pretrained": "x"}}, "tuning.method=linear does not"),
    ],
)
def test_bad_sections_are_named(sections, message):
    with pytest.raises(ValueError, match=message):
        check_config(config_in("out", **sections))


@pytest.mark.slow
def test_a_ratio_that_cannot_be_is_refused_before_anything_is_written(tmp_path):
    config = config_in(tmp_path / "run", compression={"ratio": 0.9, "structures": ["heads"]})
    with pytest.raises(ValueError, match=r"compression: ratio=0.9 must be at most 0\.\d+, which is all of heads"):
        training.run(config)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_comparison_keeps_what_each_search_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {**config_in("unused"), "seeds": [0], "variants": {"dense": {"model": {"prior": "dense"}}}}
    config["trainer"] |= {"num_train_epochs": 1}
    del config["trainer"]["output_dir"], config["trainer"]["seed"]
    Path("config.yaml").write_text(yaml.safe_dump(config))
    assert compare.main(["--config", "config.yaml", "--records", "records"]) == 0
    record = read_records(Path("records"))["dense"][0]
    assert record["compression"]["achieved"] == pytest.approx(0.4, abs=0.01)
    assert record["compression"]["parameters"]["after"] == record["parameters"]
    assert Path("records/table.md").is_file()
