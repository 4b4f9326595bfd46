"""Configurations of pruned models, and a run with one of them."""

import json

import pytest
import torch

from hf_sparseprior.classification.config import load_config
from hf_sparseprior.images.model import build_model
from tasks.classification.train import run
from tests.configs import shipped
from tests.each import each

TABLE = "experiments/sparsifiner_table1.yaml#full"
METHODS = {"evit": "evit", "dynamicvit": "dynamicvit", "sparsif-evit": "evit", "sparsifiner": "dynamicvit"}
MERGES = "classification/token_pruning.yaml#tome"
DEIT = [f"{TABLE}-{method}_{rate}" for method in METHODS for rate in (0.7, 0.5)]
LVVIT = [f"{TABLE}-{method}-lv_{rate}" for method in ("evit", "dynamicvit") for rate in (0.7, 0.5)]
SMALL = [f"classification/token_pruning.yaml#{method}" for method in ("evit", "dynamicvit")]


def built(config):
    """The model of a configuration; one that starts from a converted checkpoint is built as the published model."""
    model = dict(config["model"])
    if model.pop("pretrained", None) and "hidden_size" not in model:
        model["preset"] = "lvvit_small" if config["token_labels"].get("path") else "deit_small"
    with torch.device("meta"):
        return build_model(model, [str(number) for number in range(1000)])


@each("name", [*DEIT, *LVVIT, *SMALL])
def test_shipped_configurations_build_models_that_prune(name):
    config = load_config(shipped.path(name))
    method, _, rate = name.rpartition("#")[2].removeprefix("full-").partition("_")
    method = method.removesuffix("-lv")
    model = built(config)
    (extra,) = model.config.prior["extras"]
    assert extra["name"] == METHODS[method]
    assert bool(config["distillation"].get("teacher")) == (method != "evit")
    own = model.config
    if name in LVVIT:
        assert (own.hidden_size, own.num_hidden_layers, own.token_classifier) == (384, 16, True)
        assert model.vit.token_pruning[extra["name"]].blocks == [5, 9, 13] and extra["keep_rate"] == float(rate)
    if name not in DEIT:
        return
    assert (own.hidden_size, own.num_attention_heads, own.num_hidden_layers, own.grid) == (384, 6, 12, (14, 14))
    assert model.vit.token_pruning[extra["name"]].blocks == [4, 7, 10]
    assert extra["keep_rate"] == float(rate)
    sparse = own.prior["predictor"]
    assert (sparse is not None) == method.startswith("sparsif")
    assert sparse is None or (sparse["name"], sparse["keep_rate"]) == ("sparsifiner", 0.25)


def test_the_shipped_configuration_builds_a_model_that_merges():
    config = load_config(shipped.path(MERGES))
    (extra,) = built(config).config.prior["extras"]
    assert (extra["name"], extra["keep"]) == ("tome", 0.5) and not config["distillation"].get("teacher")


def test_recipes_are_those_of_the_published_scripts():
    evit, dynamicvit = (load_config(shipped.path(f"{TABLE}-{name}_0.7")) for name in ("evit", "dynamicvit"))
    named = ("num_train_epochs", "learning_rate", "per_device_train_batch_size", "weight_decay")
    assert [evit["trainer"][name] for name in named] == [300, 2e-3, 256, 0.05]
    assert (evit["trainer"]["keep_rate_start_epoch"], evit["trainer"]["keep_rate_epochs"]) == (10, 100)
    assert [dynamicvit["trainer"][name] for name in named] == [30, 1e-3, 128, 0.05]
    assert dynamicvit["trainer"]["backbone_learning_rate"] == 0.01 and dynamicvit["model"]["drop_path_rate"] == 0.0


TINY = [
    *("model.num_hidden_layers=2", "model.hidden_size=16", "model.num_attention_heads=2", "model.intermediate_size=16"),
    *("trainer.num_train_epochs=1", "trainer.eval_steps=10", "trainer.save_steps=10", "trainer.logging_steps=5"),
    *("data.limit_train=640", "data.limit_validation=60", "data.limit_test=60", "trainer.disable_tqdm=true"),
]


@pytest.mark.slow
def test_a_run_from_a_dense_model_with_a_teacher(tmp_path):
    dense = tmp_path / "dense"
    run(load_config(shipped.path("classification/digits.yaml#dense"), [*TINY, f"trainer.output_dir={dense}"]))
    for name in ("tome", "dynamicvit"):
        out = tmp_path / name
        options = [*TINY, f"model.pretrained={dense}/model", f"trainer.output_dir={out}"]
        run(load_config(shipped.path(f"classification/token_pruning.yaml#{name}"), options))
        results = json.loads((out / "results.json").read_text())
        assert results["prior"] == name
    logged = [entry for entry in results["history"] if "loss" in entry]
    assert logged and all({"loss_keep_ratio", "loss_token", "loss_class"} <= set(entry) for entry in logged)
