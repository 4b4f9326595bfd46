import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_sparseprior import SparsePriorViTForImageClassification
from hf_sparseprior.classification.config import check_config, load_config
from hf_sparseprior.classification.distillation import DistillationConfig, make_distillation
from hf_sparseprior.images.model import build_model
from hf_sparseprior.runs import hf_run
from tasks.classification import train as training
from tasks.classification.compare import load_comparison
from tests.configs import shipped
from tests.each import each

pytestmark = pytest.mark.slow

SHIPPED = [run for name in ("sparsifiner", "sparsifiner_small") for run in shipped.runs(f"classification/{name}.yaml")]
SHIPPED += ["classification/deit_tiny_384.yaml", "classification/cifar10_small.yaml#40x40"]
CONFIG = {
    "data": {"source": "digits", "limit_train": 120, "limit_validation": 40, "limit_test": 40},
    "model": {
        "image_size": 8, "patch_size": 2, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "initializer_range": 0.2,
    },
    "trainer": {
        "num_train_epochs": 2, "per_device_train_batch_size": 40, "learning_rate": 5e-3, "weight_decay": 0.05,
        "seed": 3, "disable_tqdm": True, "use_cpu": True,
    },
}  # fmt: skip
SPARSIFINER = {"predictor": {"name": "sparsifiner", "keep_rate": 0.25, "up_threshold": 0.06}}
PHASE_1 = {"teacher": "self", "phase": "predictor"}


def config_of(folder, pretrained=None, prior=None, distillation=None, **trainer):
    config = copy.deepcopy(CONFIG)
    if pretrained is not None:
        config["model"] = {"pretrained": str(pretrained)}
    if prior is not None:
        config["model"]["prior"] = prior
    if distillation is not None:
        config["distillation"] = distillation
    config["trainer"].update(output_dir=str(folder), **trainer)
    return config


def weights_of(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The folder of a run without a prior."""
    folder = tmp_path_factory.mktemp("runs") / "dense"
    training.run(config_of(folder))
    return folder


@pytest.fixture(scope="module")
def predicted(dense):
    """The folder of phase 1 after it, and its results."""
    folder = dense.parent / "predictor"
    return folder, training.run(config_of(folder, dense / "model", SPARSIFINER, PHASE_1))


def is_predictor(name):
    return ".predictor." in name


# ---- the phases ------------------------------------------------------------------------------------------------------


def test_phase_1_moves_the_predictor_alone_and_prunes_it(dense, predicted):
    folder, results = predicted
    before, after = weights_of(dense), weights_of(folder)
    assert set(after) - set(before) == {
        f"vit.layers.{layer}.attention.predictor.{name}" for layer in (0, 1) for name in ("w_down", "w_up")
    }
    assert all(after[name].equal(value) for name, value in before.items())
    ups = [value for name, value in after.items() if name.endswith("w_up")]
    assert all(((up == 0) | (up.abs() > 0.06)).all() and (up == 0).any() and (up != 0).any() for up in ups)
    losses = [entry["loss_attention"] for entry in results["history"] if "loss_attention" in entry]
    assert losses[-1] < losses[0]
    assert results["trainable_parameters"] == 2 * 2 * 32 * 16
    assert results["teacher_sha256"] == results["pretrained_sha256"] is not None
    assert results["config"]["distillation"] == PHASE_1
    counts = results["pruning_ratio"]
    assert counts == pytest.approx(100 * (1 - (17 + 16 * (1 + 5)) / 17**2))  # ceil(17 / 4) patches and the class token


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_a_penalty_of_w_up_makes_it_smaller_than_weight_decay_does(dense, predicted, tmp_path, penalty):
    phase = {**PHASE_1, "up_penalty": penalty, "lambda_up": 1.0}
    results = training.run(config_of(tmp_path / "run", dense / "model", SPARSIFINER, phase))
    sums = [
        sum(value.abs().sum().item() for name, value in weights_of(folder).items() if name.endswith("w_up"))
        for folder in (tmp_path / "run", predicted[0])
    ]
    assert sums[0] < 0.95 * sums[1]
    losses = [entry[f"loss_up_{penalty}"] for entry in results["history"] if f"loss_up_{penalty}" in entry]
    assert losses[-1] < losses[0] and results["config"]["distillation"] == phase


@pytest.mark.parametrize("attention", [None, 1.0])
def test_phase_2_trains_the_model_and_the_predictor_only_if_asked(predicted, tmp_path, attention):
    folder, _ = predicted
    distillation = {"teacher": "self"} if attention is None else {"teacher": "self", "lambda_attention": attention}
    results = training.run(config_of(tmp_path / "run", folder / "model", distillation=distillation))
    before, after = weights_of(folder), weights_of(tmp_path / "run")
    assert results["prior"] == "sparsifiner" and set(before) == set(after)
    for name, value in before.items():
        assert value.equal(after[name]) == (is_predictor(name) and attention is None), name
        if name.endswith("w_up"):
            assert torch.equal(value == 0, after[name] == 0)  # what phase 1 dropped stays dropped
    losses = {"loss_labels", "loss_token", "loss_class"} | ({"loss_attention"} if attention else set())
    assert losses == {name for entry in results["history"] for name in entry if name.startswith("loss_")}


def test_self_is_the_model_before_its_prior(dense, predicted):
    folder, _ = predicted
    config = check_config(config_of("unused", folder / "model", distillation={"teacher": "self"}))
    teacher = make_distillation(config).teacher.model
    pixels = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = SparsePriorViTForImageClassification.from_pretrained(dense / "model").eval()(pixels).logits
        assert teacher(pixels).logits.equal(expected)
        sparse = SparsePriorViTForImageClassification.from_pretrained(folder / "model").eval()(pixels).logits
    assert not sparse.equal(expected)


class StopAt(TrainerCallback):
    """Stands for a kill."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["training", "end"])
def test_phase_1_goes_on_from_where_it_was_killed(dense, predicted, tmp_path, monkeypatch, where):
    config = config_of(tmp_path / "run", dense / "model", SPARSIFINER, PHASE_1)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if where == "end":  # after the pruning, before anything is written
            patch.setattr(hf_run, "confusion_matrix", killed)
        training.run(copy.deepcopy(config), callbacks=[StopAt(4)] if where == "training" else [])
    assert not (tmp_path / "run" / "results.json").exists()
    results = training.run(config)
    folder, whole = predicted
    assert results["resumed_from"] and results["metrics"] == whole["metrics"]
    assert all(value.equal(weights_of(tmp_path / "run")[name]) for name, value in weights_of(folder).items())


def test_a_teacher_for_any_model(dense, tmp_path):
    teacher = {"teacher": str(dense / "model")}
    results = training.run(config_of(tmp_path / "run", prior="violin", distillation=teacher, num_train_epochs=1))
    assert results["prior"] == "violin" and results["teacher_sha256"] and results["pretrained_sha256"] is None


# ---- errors ----------------------------------------------------------------------------------------------------------


@each(
    "distillation, rest, message",
    [
        ({"phase": "both"}, {}, r"distillation\.phase='both' must be one of predictor, model"),
        ({"teacher": 3}, {}, r"distillation\.teacher=3 must be a folder, 'self' or null"),
        ({"lambda_token": 0.5}, {}, r"distillation\.lambda_token=0.5 needs distillation\.teacher"),
        ({"phase": "predictor"}, {}, r"distillation\.phase=predictor needs distillation\.teacher"),
        ({"lambda_up": 0.1}, {}, "lambda_up=0.1 is of up_penalty l2 or l1; weight_decay takes trainer.weight_decay"),
        ({**PHASE_1, "up_penalty": "L2"}, {}, "up_penalty='L2' must be one of weight_decay, l2, l1"),
        ({**PHASE_1, "up_penalty": "l2"}, {}, "lambda_up=None must be a number above 0"),
        ({**PHASE_1, "up_penalty": "l1", "lambda_up": 0}, {}, "lambda_up=0 must be a number above 0"),
        ({"teacher": "x", "up_penalty": "l1", "lambda_up": 0.1}, {}, "up_penalty=l1 .* needs a teacher, and phase="),
        ({"teacher": "x", "lambda_class": -1}, {}, r"distillation\.lambda_class=-1 must be a number of 0 or more"),
        ({"teacher": "x", "lambda_class": True}, {}, r"lambda_class=True must be a number"),
        ({"teacher": "x", "lamda_class": 1}, {}, "has no key 'lamda_class'; did you mean 'lambda_class'"),
        (
            {"teacher": "x", **dict.fromkeys(("lambda_labels", "lambda_token", "lambda_class"), 0)},
            {},
            "the weights of all losses are 0",
        ),
        ({"teacher": "self"}, {"model": {}}, r"teacher=self is what model\.pretrained holds; set model\.pretrained"),
        ({"teacher": "x", "phase": "predictor"}, {"model": {}}, r"leaves the model as it is; set model\.pretrained"),
        ({**PHASE_1, "lambda_attention": 0, "lambda_token": 1}, {}, "trains with the attention loss alone"),
        (PHASE_1, {"tuning": {"method": "linear"}}, r"has no use for tuning\.method=linear"),
        ({"teacher": "x", "lambda_attention": 1}, {"tuning": {"method": "lora"}}, r"tuning\.method=lora leaves as it"),
        (PHASE_1, {"trainer": {"ema_decay": 0.9}}, r"which trainer\.ema_decay would not know of"),
        ({"teacher": "x"}, {"trainer": {"fsdp": "full_shard"}}, "distillation cannot be used with FSDP"),
    ],
)
def test_bad_sections_are_refused(distillation, rest, message):
    with pytest.raises(ValueError, match=message):
        check_config({"model": {"pretrained": "x"}, "distillation": distillation, **rest})


def test_a_run_that_cannot_learn_this_way_writes_nothing(dense, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"phase=predictor needs a predictor, and model\.prior='dense' has none"):
        training.run(config_of(out, dense / "model", distillation=PHASE_1))
    with pytest.raises(ValueError, match="needs a predictor, and model"):
        training.run(config_of(out, dense / "model", "violin", PHASE_1))
    with pytest.raises(ValueError, match=r"connectivity scores .sparsifiner., not for 'topk'"):
        training.run(config_of(out, dense / "model", "topk", PHASE_1))
    other = config_of(out, prior=SPARSIFINER, distillation={"teacher": str(dense / "model"), "lambda_attention": 1})
    other["model"]["num_hidden_layers"] = 3
    with pytest.raises(ValueError, match=r"teacher .*model has num_hidden_layers=2, the model 3"):
        training.run(other)
    with pytest.raises(OSError, match=r"distillation\.teacher=.*nowhere is not a folder of a saved model"):
        training.run(config_of(out, dense / "model", distillation={"teacher": str(tmp_path / "nowhere")}))
    assert not list(tmp_path.glob("run/*"))


# ---- shipped configurations ------------------------------------------------------------------------------------------


@each("name", SHIPPED)
def test_every_shipped_configuration_builds_its_model(name):
    config = load_config(shipped.path(name))
    model = {key: value for key, value in config["model"].items() if key != "pretrained"}
    sizes = {
        **{"deit_small": (384, 6, 197), "deit_tiny_384": (192, 3, 577), "lvvit_small": (384, 6, 197)},
        **{"digits": (64, 4, 65), "cifar10_small_40": (96, 6, 401), "cifar10_small": (96, 6, 197)},
    }
    cell = {SHIPPED[-2]: "deit_tiny_384-dense", SHIPPED[-1]: "cifar10_small_40-dense"}.get(name, name.partition("#")[2])
    model_name, _, phase_name = cell.rpartition("-")
    base = next(size for size in sizes if model_name.startswith(size))
    if "hidden_size" not in model:
        preset = "_".join(base.split("_")[:2])
        model = {"preset": preset, "image_size": 384 if "384" in base else 224, **model}
    with torch.device("meta"):
        built = build_model(model, ["a", "b", "c"]).config
    assert (built.hidden_size, built.num_attention_heads, built.grid[0] * built.grid[1] + 1) == sizes[base]
    phase = DistillationConfig(**config["distillation"])
    assert config["trainer"].get("ema_decay") is None
    small = {"digits": {5: 10, 40: 10}, "cifar10_small_40": {5: 10, 40: 10}, "cifar10_small": {5: 2, 40: 2}}
    epochs = small.get(base, {5: 5, 40: 40})
    if phase_name == "predictor":
        assert built.prior_name == "sparsifiner" and phase.phase == "predictor"
        assert phase.weights() == {"labels": 0, "token": 0, "class": 0, "attention": 1}
        assert config["trainer"]["num_train_epochs"] == epochs[5]
        assert config["trainer"]["weight_decay"] == 0.05 and built.drop_path_rate == 0
    elif phase_name == "dense":
        assert phase.teacher is None
    else:
        assert phase.weights() == {"labels": 1, "token": 0.5, "class": 0.5, "attention": 0}
        assert config["trainer"]["num_train_epochs"] == epochs[40]
        assert config["model"]["pretrained"] == f"outputs/sparsifiner/{model_name}_predictor/model"


def test_the_order_of_the_class_loss_is_a_setting():
    """As printed by default; that of the published code by name; refused where there is no such loss."""
    assert DistillationConfig("self").weights() == {"labels": 1.0, "token": 0.5, "class": 0.5, "attention": 0.0}
    forward = DistillationConfig("self", class_kl="forward", lambda_class=2.0).weights()
    assert forward == {"labels": 1.0, "token": 0.5, "class_forward": 2.0, "attention": 0.0}
    with pytest.raises(ValueError, match="class_kl='both' must be one of reverse, forward"):
        DistillationConfig("self", class_kl="both")
    for settings in ({}, {"teacher": "self", "lambda_class": 0.0}, {"teacher": "self", "phase": "predictor"}):
        with pytest.raises(ValueError, match="class_kl=forward has no effect without a class loss"):
            DistillationConfig(**settings, class_kl="forward")


def test_a_comparison_may_change_the_distillation(tmp_path):
    (tmp_path / "base.yaml").write_text(json.dumps(config_of("x", "y", distillation={"teacher": "self"})))
    rows = {"off": {"distillation": {"lambda_token": 0.0}}, "on": {"distillation": {"lambda_attention": 1.0}}}
    (tmp_path / "rows.yaml").write_text(json.dumps({"base": "base.yaml", "seeds": [0], "variants": rows}))
    configs = load_comparison(tmp_path / "rows.yaml").configs
    assert configs["off"]["distillation"] == {"teacher": "self", "lambda_token": 0.0}
    assert configs["on"]["distillation"] == {"teacher": "self", "lambda_attention": 1.0}
