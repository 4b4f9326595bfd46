"""Configurations of pruned models, and a run with one of them."""

import json
from pathlib import Path

import pytest
import torch

from tasks.classification.compare import load_comparison
from tasks.classification.config import load_config
from tasks.classification.train import run
from tasks.common.images.model import build_model

FOLDER = Path(__file__).parents[3] / "configs" / "classification"
CONFIGS = sorted(FOLDER.glob("token_pruning/*.yaml"))


def built(config):
    """The model of a configuration; one that starts from a converted checkpoint is built as the published model."""
    model = dict(config["model"])
    if model.pop("pretrained", None) and "hidden_size" not in model:
        model["preset"] = "lvvit_small" if config["token_labels"].get("path") else "deit_small"
    with torch.device("meta"):
        return build_model(model, [str(number) for number in range(1000)])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_build_models_that_prune(path):
    config = load_config(path)
    model = built(config)
    (extra,) = model.config.prior["extras"]
    assert extra["name"] in path.stem
    assert config["trainer"]["output_dir"].endswith(path.stem)
    assert bool(config["distillation"].get("teacher")) == ("dynamicvit" in path.stem or "sparsifiner" in path.stem)
    own = model.config
    if path.stem.startswith("lvvit_small"):
        assert (own.hidden_size, own.num_hidden_layers, own.token_classifier) == (384, 16, True)
        assert model.vit.token_pruning[extra["name"]].blocks == [5, 9, 13] and extra["keep_rate"] == 0.7
    if "deit_small" not in path.stem:
        return
    assert (own.hidden_size, own.num_attention_heads, own.num_hidden_layers, own.grid) == (384, 6, 12, (14, 14))
    assert model.vit.token_pruning[extra["name"]].blocks == [4, 7, 10]
    assert extra["keep_rate"] == float(path.stem.rpartition("_")[2])
    sparse = own.prior["predictor"]
    assert (sparse is not None) == ("sparsifiner" in path.stem)
    assert sparse is None or (sparse["name"], sparse["keep_rate"]) == ("sparsifiner", 0.25)


def test_the_rows_of_table_1_are_there():
    kinds = [f"{sparse}{name}" for sparse in ("", "sparsifiner_") for name in ("evit", "dynamicvit")]
    names = {f"deit_small_{kind}_{rate}" for kind in kinds for rate in (0.7, 0.5)}
    assert names <= {path.stem for path in CONFIGS}


def test_recipes_are_those_of_the_published_scripts():
    evit, dynamicvit = (
        load_config(FOLDER / "token_pruning" / f"deit_small_{name}_0.7.yaml") for name in ("evit", "dynamicvit")
    )
    named = ("num_train_epochs", "learning_rate", "per_device_train_batch_size", "weight_decay")
    assert [evit["trainer"][name] for name in named] == [300, 1e-3, 128, 0.05]
    assert (evit["trainer"]["keep_rate_start_epoch"], evit["trainer"]["keep_rate_epochs"]) == (10, 100)
    assert [dynamicvit["trainer"][name] for name in named] == [30, 7.5e-4, 96, 0.05]
    assert dynamicvit["trainer"]["backbone_learning_rate"] == 0.01 and dynamicvit["model"]["drop_path_rate"] == 0.0


def test_the_comparison_builds_its_models():
    comparison = load_comparison(FOLDER / "compare" / "token_pruning_digits.yaml")
    priors = {name: built(config).config.prior_name for name, config in comparison.configs.items()}
    assert priors == {name: name.partition("_")[0] for name in comparison.configs}


TINY = [
    *("model.num_hidden_layers=2", "model.hidden_size=16", "model.num_attention_heads=2", "model.intermediate_size=16"),
    *("trainer.num_train_epochs=1", "trainer.eval_steps=10", "trainer.save_steps=10", "trainer.logging_steps=5"),
    *("data.limit_train=640", "trainer.disable_tqdm=true"),
]


def test_a_run_from_a_dense_model_with_a_teacher(tmp_path):
    dense = tmp_path / "dense"
    run(load_config(FOLDER / "digits_vit_dense.yaml", [*TINY, f"trainer.output_dir={dense}"]))
    out = tmp_path / "dynamicvit"
    options = [*TINY, f"model.pretrained={dense}/model", f"trainer.output_dir={out}"]
    run(load_config(FOLDER / "token_pruning" / "digits_dynamicvit.yaml", options))
    results = json.loads((out / "results.json").read_text())
    assert results["prior"] == "dynamicvit"
    logged = [entry for entry in results["history"] if "loss" in entry]
    assert logged and all({"loss_keep_ratio", "loss_token", "loss_class"} <= set(entry) for entry in logged)
