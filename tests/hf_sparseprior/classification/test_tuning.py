import copy
import itertools
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.classification.config import check_config, load_config
from hf_sparseprior.classification.tuning import METHODS, TuningConfig, tuned
from hf_sparseprior.images.model import build_model
from hf_sparseprior.models.pretrained import load_whole_model
from hf_sparseprior.runs.models import merged, trainable_parameters
from hf_sparseprior.runs.run_folder import last_whole_checkpoint
from hf_sparseprior.training import SparsePriorTrainer, SparsePriorTrainingArguments
from tasks.classification import evaluate as evaluation
from tasks.classification import train as training
from tasks.classification.compare import load_comparison
from tasks.classification.compare import main as compare_main
from tasks.common import compare
from tasks.common.comparison_table import table
from tasks.common.records import read_records, records_text
from tests.configs import shipped
from tests.each import each

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")]

CLASSES = [str(digit) for digit in range(10)]
WIDTH, LAYERS, HEADS, CURVES = 24, 2, 2, 8
# With the class token alone, the last layer's pairs of patches do not count, and its beta is not trained.
MODEL = {
    "image_size": 8, "patch_size": 2, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 48, "initializer_range": 0.1, "pooling": "mean",
}  # fmt: skip
TRAINER = {
    "num_train_epochs": 3, "per_device_train_batch_size": 32, "per_device_eval_batch_size": 256, "learning_rate": 5e-3,
    "weight_decay": 0.05, "seed": 3, "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip
CLASSIFIER = {"classifier.weight", "classifier.bias"}
SCALARS = {f"vit.layers.{i}.attention.decay_bias.{name}" for i in range(LAYERS) for name in ("alpha", "beta")}
LORA = {
    f"vit.layers.{i}.attention.{name}_proj.lora_{half}.weight" for i in range(LAYERS) for name in "qv" for half in "AB"
}
MAGNITUDES = {f"vit.layers.{i}.attention.{name}_proj.lora_magnitude_vector" for i in range(LAYERS) for name in "qv"}
# Names and count of what each method trains besides the scalars of a decay.
TRAINED = {
    "linear": (CLASSIFIER, 250),
    "violin": (CLASSIFIER, 250),
    "lora": (CLASSIFIER | LORA, 250 + 2 * 2 * 2 * 8 * WIDTH),
    "dora": (CLASSIFIER | LORA | MAGNITUDES, 250 + 2 * 2 * 2 * 8 * WIDTH + 2 * 2 * WIDTH),
}
NO_DECAY = r"model\.prior='dense' has none; set 'model\.prior={decay: {name: violin, init: growing}}'"
NUM_SCALARS = LAYERS * HEADS * (CURVES + 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model without a prior, not trained."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved") / "model"
    config = SparsePriorViTConfig(prior="dense", id2label=dict(enumerate(CLASSES)), **MODEL)
    SparsePriorViTForImageClassification(config).save_pretrained(folder)
    return folder


def config_of(saved, method, folder, prior="violin", tuning=None, **trainer):
    return {
        "data": {"source": "digits", "limit_train": 160, "limit_validation": 64, "limit_test": 64},
        "model": {**MODEL, "prior": prior, "pretrained": str(saved)},
        "tuning": {"method": method, **(tuning or {})},
        "trainer": {**TRAINER, "output_dir": str(folder), **trainer},
    }


def build(saved, method, prior="violin", **tuning):
    torch.manual_seed(1)
    model = build_model({**MODEL, "prior": prior, "pretrained": str(saved)}, CLASSES)
    return tuned(model, TuningConfig(method, **tuning))


def plain(name):
    """A parameter's name without what peft wraps around it, as in its files."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save", "").replace(".default", "")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def trained_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def images():
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def train(model, steps):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        model(images(), labels=torch.arange(6)).loss.backward()
        optimizer.step()


# ---- what is trained ------------------------------------------------------------------------------------------------


@each("method, prior", itertools.product(METHODS, ["dense", "violin"]))
def test_names_and_count_of_what_each_method_trains(saved, method, prior):
    if (method, prior) == ("violin", "dense"):
        with pytest.raises(ValueError, match=NO_DECAY):
            build(saved, method, prior)
        return
    model = build(saved, method, prior)
    if method == "full":
        assert trained_names(model) == {name for name, _ in model.named_parameters()}
        return
    names, count = TRAINED[method]
    with_scalars = prior == "violin" and method != "linear"
    assert {plain(name) for name in trained_names(model)} == names | (SCALARS if with_scalars else set())
    assert trainable_parameters(model) == count + (NUM_SCALARS if with_scalars else 0)


def test_violin_trains_1296_scalars_of_deit_base():
    with torch.device("meta"):
        config = SparsePriorViTConfig.from_preset("deit_base", prior="violin", num_labels=10)
        model = tuned(SparsePriorViTForImageClassification(config), TuningConfig("violin"))
    assert trainable_parameters(model) == 1296 + 10 * 769


@each("method", METHODS)
def test_steps_change_only_what_is_trained(saved, method):
    model = build(saved, method)
    before = copy.deepcopy(model.state_dict())
    train(model, 1)
    moved = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    # At first B is 0, and with it the gradient of A.
    still = {name for name in trained_names(model) if "lora_A" in name}
    assert moved == trained_names(model) - still
    train(model, 1)
    moved = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert moved == trained_names(model)


def test_with_the_class_token_alone_the_last_beta_has_no_gradient(saved):
    torch.manual_seed(1)
    options = {**MODEL, "pooling": "class_token", "prior": "violin", "pretrained": str(saved)}
    model = tuned(build_model(options, CLASSES), TuningConfig("violin"))
    model(images(), labels=torch.arange(6)).loss.backward()
    moving = {name for name in SCALARS if model.get_parameter(name).grad.abs().max() > 0}
    assert SCALARS - moving == {f"vit.layers.{LAYERS - 1}.attention.decay_bias.beta"}


@each("method, bias", [("lora", None), ("lora", "none"), ("lora", "all"), ("dora", "all"), ("dora", "lora_only")])
def test_biases_are_trained_where_they_are_asked_for(saved, method, bias):
    model = build(saved, method, rank=2, alpha=1, targets="attention+mlp", bias=bias)
    learns = trained_names(model)
    assert any(name.endswith("layernorm_before.bias") for name in learns) == (bias == "all")
    assert any(name.endswith("fc1.base_layer.bias") for name in learns) == (bias in ("all", "lora_only"))
    model(images(), labels=torch.arange(6)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@each("method", ["lora", "dora"])
def test_merged_equals_unmerged(saved, method):
    model = build(saved, method, rank=4, alpha=16, targets="attention+mlp")
    train(model, 5)
    expected = model.eval()(images()).logits
    whole = merged(model)
    assert isinstance(whole, SparsePriorViTForImageClassification)
    torch.testing.assert_close(whole(images()).logits, expected, rtol=0, atol=1e-5)
    with model.disable_adapter():
        assert (model(images()).logits - expected).abs().max() > 0.1
    assert model(images()).logits.equal(expected)  # a copy was merged, not the model


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["linear", "dora", "violin"])  # LoRA is DoRA without magnitudes
def finished(request, saved, tmp_path_factory):
    """A run whose best epoch is by construction not the last: the worst loss is called the best."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    config = config_of(saved, request.param, folder, metric_for_best_model="loss", greater_is_better=True)
    return request.param, folder, config, training.run(config)


def check_evaluation(folder, out, results):
    """`evaluate` measures of the saved model what the run did."""
    assert evaluation.main([str(folder / "model"), "--out", str(out)]) == 0
    stored = json.loads((out / "results_test.json").read_text())
    tested = {name: value for name, value in results["metrics"].items() if name.startswith("test_")}
    assert stored["metrics"] == pytest.approx(tested, abs=1e-6)


def checkpoint_weights(folder):
    path = folder / "adapter_model.safetensors"
    return load_file(path if path.exists() else folder / "model.safetensors")


def test_results_say_what_was_trained_and_evaluate_takes_the_model_as_ever(finished, tmp_path):
    method, folder, _, results = finished
    _, count = TRAINED[method]
    assert results["method"] == method
    assert results["trainable_parameters"] == count + (NUM_SCALARS if method != "linear" else 0)
    weights = folder / "adapter" / "adapter_model.safetensors"
    assert results["adapter_bytes"] == (weights.stat().st_size if method == "dora" else None)
    assert weights.exists() == (method == "dora")
    stored = json.loads((folder / "results.json").read_text())
    assert stored["config"]["tuning"] == {"method": method}
    assert not any("lora" in name for name in load_file(folder / "model" / "model.safetensors"))
    check_evaluation(folder, tmp_path, results)


def test_the_best_epoch_is_restored_in_every_tensor(finished):
    method, folder, _, _ = finished
    steps = {path.name: json.loads((path / "trainer_state.json").read_text()) for path in folder.glob("checkpoint-*")}
    best = folder / Path(steps["checkpoint-15"]["best_model_checkpoint"]).name
    assert best.name == "checkpoint-5"
    expected, last = checkpoint_weights(best), checkpoint_weights(folder / "checkpoint-15")
    final = checkpoint_weights(folder / ("adapter" if method == "dora" else "model"))
    assert final.keys() == expected.keys()
    for name, value in final.items():
        assert value.equal(expected[name]), name
    differing = {plain(name) for name, value in final.items() if not value.equal(last[name])}
    names = TRAINED[method][0] | (SCALARS if method != "linear" else set())
    assert differing == names


@pytest.mark.parametrize("finished", ["dora"], indirect=True)
def test_the_adapter_alone_is_enough(finished):
    _, folder, config, _ = finished
    torch.manual_seed(99)  # another start of the decay
    base = build_model(config["model"], CLASSES)
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    whole = load_whole_model(folder / "model").eval()
    torch.testing.assert_close(adapted(images()).logits, whole(images()).logits, rtol=0, atol=1e-5)
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size < 12_000
    assert "import hf_sparseprior" in (folder / "adapter" / "README.md").read_text()


@pytest.mark.parametrize("finished", ["violin", "dora"], indirect=True)  # checkpoints of a model and of an adapter
def test_an_interrupted_run_goes_on_to_the_same_weights(finished, tmp_path, monkeypatch):
    method, folder, config, results = finished
    config = copy.deepcopy(config)
    config["trainer"]["output_dir"] = str(tmp_path / "again")

    step = SparsePriorTrainer.training_step

    def until_12(trainer, *args, **kwargs):
        if trainer.state.global_step == 12:
            raise KeyboardInterrupt
        return step(trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SparsePriorTrainer, "training_step", until_12)
        with pytest.raises(KeyboardInterrupt):
            training.run(config)
    again = training.run(config)
    assert again["resumed_from"] == "checkpoint-10"
    assert again["trainable_parameters"] == results["trainable_parameters"]
    # The last step's weights, which followed from the restored ones, and the best epoch's.
    for name in ("checkpoint-15", *(["adapter"] if method == "dora" else []), "model"):
        expected = checkpoint_weights(folder / name)
        found = checkpoint_weights(tmp_path / "again" / name)
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert value.equal(expected[key]), (name, key)


@pytest.mark.parametrize("finished", ["violin", "dora"], indirect=True)
def test_a_checkpoint_without_its_weights_is_skipped(finished, saved, tmp_path, capsys):
    method, folder, _, _ = finished
    shutil.copytree(folder, tmp_path / "run")
    name = "adapter_model.safetensors" if method == "dora" else "model.safetensors"
    (tmp_path / "run" / "checkpoint-15" / name).unlink()
    arguments = SparsePriorTrainingArguments(output_dir=str(tmp_path / "other"), use_cpu=True)
    files = SparsePriorTrainer(build(saved, method), arguments).checkpoint_files()
    assert last_whole_checkpoint(tmp_path / "run", files) == str(tmp_path / "run" / "checkpoint-5")
    assert f"checkpoint-15 is skipped: {name} is missing" in capsys.readouterr().err


def test_moving_average_and_layer_decay(saved, tmp_path):
    config = config_of(saved, "dora", tmp_path / "run", num_train_epochs=1, ema_decay=0.8, layer_decay=0.7)
    results = training.run(config)
    for name, key in (("model", "test_accuracy"), ("model_ema", "test_ema_accuracy")):
        assert evaluation.main([str(tmp_path / "run" / name), "--out", str(tmp_path / name)]) == 0
        stored = json.loads((tmp_path / name / "results_test.json").read_text())
        assert stored["metrics"]["test_accuracy"] == results["metrics"][key]
    raw, averaged = (load_file(tmp_path / "run" / n / "model.safetensors") for n in ("model", "model_ema"))
    changed = {name for name, value in raw.items() if not value.equal(averaged[name])}
    adapted = {f"vit.layers.{i}.attention.{name}_proj.weight" for i in range(LAYERS) for name in "qv"}
    assert changed == CLASSIFIER | adapted | SCALARS


def test_a_compiled_run_saves_the_trained_model(saved, tmp_path):
    options = {"num_train_epochs": 1, "torch_compile": True, "torch_compile_backend": "eager"}
    results = training.run(config_of(saved, "lora", tmp_path / "run", **options))
    check_evaluation(tmp_path / "run", tmp_path, results)


# ---- configurations -------------------------------------------------------------------------------------------------


@each(
    "tuning, rest, message",
    [
        ({"method": "lroa"}, {}, "tuning.method='lroa' must be one of full, linear, lora, dora, violin"),
        ({"methd": "lora"}, {}, "section 'tuning' has no key 'methd'; did you mean 'method'"),
        ({"rank": 4}, {}, "tuning.rank=4 is for tuning.method lora, dora, not full"),
        ({"method": "violin", "dropout": 0.1}, {}, "tuning.dropout=0.1 is for tuning.method lora, dora, not violin"),
        ({"method": "lora", "rank": 0}, {}, "tuning.rank=0 must be an integer of 1 or more"),
        ({"bias": "all"}, {}, "tuning.bias='all' is for tuning.method lora, dora, not full"),
        ({"method": "lora", "bias": "some"}, {}, "tuning.bias='some' must be one of none, all, lora_only"),
        ({"method": "lora", "targets": "qv"}, {}, "tuning.targets='qv' must be one of query.value"),
        ({"method": "dora"}, {"model": {}}, "tuning.method=dora changes a part of a saved model; set model.pretrained"),
        ({"method": "violin"}, {"model": {"pretrained": "x", "prior": "fibottention"}}, "'fibottention' has none; set"),
        ({"method": "lora"}, {"trainer": {"fsdp": "full_shard"}}, "tuning.method=lora cannot be used with FSDP"),
    ],
)
def test_bad_values_are_named(tuning, rest, message):
    with pytest.raises(ValueError, match=message):
        check_config({"model": {"pretrained": "x"}, "tuning": tuning, **rest})


def test_fsdp_by_accelerate_launch_is_refused_too(monkeypatch):
    config = {"model": {"pretrained": "x"}, "tuning": {"method": "linear"}}
    check_config(copy.deepcopy(config))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"tuning\.method=linear cannot be used with FSDP"):
        check_config(config)


def test_what_the_saved_model_lacks_leaves_no_folder(saved, tmp_path):
    config = config_of(saved, "lora", tmp_path / "run", tuning={"targets": ["query"]})
    with pytest.raises(ValueError, match="has no module 'query'"):
        training.run(config)
    config = config_of(saved, "violin", tmp_path / "run")
    del config["model"]["prior"]  # that of the saved model
    with pytest.raises(ValueError, match=NO_DECAY):
        training.run(config)
    assert not (tmp_path / "run").exists()


SHIPPED = {
    "full_dense": ("full", "dense"), "full_violin": ("full", "violin"), "linear_dense": ("linear", "dense"),
    "linear_fibottention": ("linear", "fibottention"), "lora_dense": ("lora", "dense"),
    "lora_violin": ("lora", "violin"),
    "dora_dense": ("dora", "dense"), "dora_violin": ("dora", "violin"), "violin": ("violin", "violin"),
}  # fmt: skip
TUNING = "classification/tuning.yaml"


def test_every_shipped_way_of_tuning_is_what_its_name_says():
    cells = {f"{method}-{prior}": (method, prior) for method, prior in SHIPPED.values()}
    further = {f"{method}-fibottention": (method, "fibottention") for method in ("full", "lora", "dora")}
    assert set(shipped.runs(TUNING)) == {f"{TUNING}#{cell}" for cell in (*cells, *further)}
    comparison = load_comparison(shipped.path("classification/tuning_digits.yaml"))
    assert comparison.configs.keys() == SHIPPED.keys()
    tuned = {name: load_config(shipped.path(f"{TUNING}#{name}"), ["model.pretrained=x"]) for name in (cells | further)}
    for name, config in (tuned | comparison.configs).items():
        prior = SparsePriorViTConfig(image_size=8, patch_size=2, prior=config["model"]["prior"]).prior_name
        assert (config["tuning"].get("method", "full"), prior) == (SHIPPED | cells | further)[name]
    # What starts anew in every layer has one learning rate and no drop path.
    for name, config in tuned.items():
        assert (config["trainer"]["layer_decay"] == 1.0) == name.startswith(("lora", "dora", "violin")), name
        assert config["model"]["drop_path_rate"] == (0.1 if name.startswith("full") else 0.0), name


def test_rows_of_a_comparison_tune_differently(saved, tmp_path, capsys):
    config = config_of(saved, "full", "", num_train_epochs=1)
    del config["trainer"]["output_dir"], config["trainer"]["seed"]
    (tmp_path / "base.yaml").write_text(json.dumps({**config, "tuning": {}}))
    rows = {"full": {}, "lora": {"tuning": {"method": "lora", "rank": 4}}, "violin": {"tuning": {"method": "violin"}}}
    (tmp_path / "rows.yaml").write_text(json.dumps({"base": "base.yaml", "seeds": [0], "variants": rows}))
    out = tmp_path / "out"
    assert compare_main(["--config", str(tmp_path / "rows.yaml"), "--out", str(out)]) == 0
    lines = (out / "table.md").read_text().partition("\n\n")[0].splitlines()  # the second table has differences
    columns = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    trained, adapter = columns[0].index("trained"), columns[0].index("adapter, kB")
    counts = {cells[0]: (cells[trained], cells[adapter]) for cells in columns[2:]}
    kept = read_records(out)
    bytes_ = kept["lora"][0]["adapter_bytes"]
    total = sum(p.numel() for p in build(saved, "full").parameters())
    lora = 250 + NUM_SCALARS + 2 * 2 * 2 * 4 * WIDTH
    assert counts == {
        "full": (str(total), "-"), "lora": (str(lora), f"{bytes_ / 1000:.1f}"), "violin": (str(250 + NUM_SCALARS), "-"),
    }  # fmt: skip
    # A row that was recorded before there was anything to tune stays readable.
    kept = copy.deepcopy(kept)
    for key in ("method", "trainable_parameters", "adapter_bytes"):
        del kept["full"][0][key]
    del kept["full"][0]["config"]["tuning"]
    (out / "records.jsonl").write_text(records_text(kept))
    records = compare.all_records(load_comparison(tmp_path / "rows.yaml"), out)
    assert table(records).splitlines() == lines
