"""SparsePriorViT in training: dropout, gradients, fresh and missing weights, saved models, LoRA."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import Trainer

from hf_sparseprior import SparsePriorViTForImageClassification, SparsePriorViTModel
from hf_sparseprior.patterns.decay import INIT_PRESETS
from hf_sparseprior.patterns.supports import build_mask
from tests.hf_sparseprior.models.vit_oracle import EACH, FOUR, KEPT, decays, images, make, tiny

# transformers 5.23 renames gradient_checkpointing_enable, which peft and older releases call.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

# ---- dropout and stochastic depth -----------------------------------------------------------------------------------


def test_drop_path_rises_linearly_and_acts_in_training_only():
    model = make(drop_path_rate=0.4, num_hidden_layers=5)
    assert [layer.drop_path.rate for layer in model.vit.layers] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    plain = make(num_hidden_layers=5)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(images()).logits, plain(images()).logits)
    torch.manual_seed(0)
    assert not torch.equal(model.train()(images()).logits, plain(images()).logits)


def test_drop_path_drops_whole_samples_and_keeps_the_expectation():
    torch.manual_seed(0)
    drop_path = make(drop_path_rate=0.25).vit.layers[1].drop_path.train()
    branch = drop_path(torch.ones(20_000, 2, 3))
    assert (branch == branch[:, :1, :1]).all()
    assert sorted(branch.unique().tolist()) == pytest.approx([0.0, 1 / 0.75])
    # The mean of 20000 draws has a standard deviation of 0.004.
    assert branch.mean().item() == pytest.approx(1.0, abs=0.02)
    assert torch.equal(drop_path.eval()(branch), branch)


@pytest.mark.parametrize(
    ("kind", "prior"),
    [("hidden_dropout_prob", "fibottention+violin"), *(("attention_probs_dropout_prob", prior) for prior in FOUR)],
)
def test_dropout_acts_in_training_only(kind, prior):
    model, plain = make(prior, **{kind: 0.5}), make(prior)
    torch.testing.assert_close(model(images()).logits, plain(images()).logits)
    torch.manual_seed(0)
    first = model.train()(images()).logits
    assert first.isfinite().all() and not torch.equal(first, model(images()).logits)


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", EACH)
def test_every_parameter_gets_a_gradient_and_training_lowers_the_loss(prior):
    torch.manual_seed(0)
    # Class token pooling would leave the last layer's beta without a gradient: M is 1 in the class token's row.
    model = SparsePriorViTForImageClassification(tiny(prior, num_register_tokens=1, pooling="mean")).train()
    pixels, labels = images(4), torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(pixels, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.any() or name.endswith("k_proj.bias"), name
        optimizer.step()
    assert losses[-1] < losses[0]


def gradients(model, pixels):
    model.zero_grad()
    torch.manual_seed(11)
    model(pixels, labels=torch.tensor([0, 2])).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("prior", [*FOUR, "random", "zero fill+violin", "dense+learned_order"])
def test_gradient_checkpointing_changes_no_gradient(prior):
    """With dropout and drop path; reentrant checkpoints: test_every_family.py."""
    dropout = {} if prior.startswith("zero") else {"attention_probs_dropout_prob": 0.1}
    model = make(prior, drop_path_rate=0.2, **dropout).train()
    expected = gradients(model, images())
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    for name, gradient in gradients(model, images()).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_supports_stop_gradients_between_patches():
    """No gradient from a patch to a patch outside the union of its heads' supports, one layer, no prefix token."""
    prior = {"support": {"name": "fibottention", "shuffle_seed": None}}
    model = make(prior, cls=SparsePriorViTModel, num_hidden_layers=1, use_class_token=False, pooling="mean")
    pixels = images(1).requires_grad_()
    model(pixels).last_hidden_state[0, 0].sum().backward()
    seen = F.unfold(pixels.grad, 4, stride=4)[0].abs().sum(0) > 0
    expected = build_mask(prior["support"], num_heads=4, num_tokens=64).any(0)[0]
    expected[0] = True  # the residual connection
    assert torch.equal(seen, torch.tensor(expected))


def test_alpha_and_beta_are_in_no_weight_decay_group():
    model = make("learned prefix", num_register_tokens=1, use_distillation_token=True)
    scalars = {name for name, _ in model.named_parameters() if name.split(".")[-1] in ("alpha", "beta", "prefix_beta")}
    assert len(scalars) == 6
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    assert decayed and not decayed & scalars
    tokens = {"class_token", "distillation_token", "register_tokens", "position_embeddings"}
    assert {f"vit.embeddings.{name}" for name in tokens} | scalars == model.no_weight_decay()
    assert all(parameter.dim() > 1 for name, parameter in model.named_parameters() if name in decayed)


# ---- initialisation and loading -------------------------------------------------------------------------------------

INITIALISED = {
    "alpha": lambda tensor: tensor.sub(1).abs().max() < 0.2 and tensor.std() > 0,
    "beta": lambda tensor: tensor.min() >= 15 and tensor.max() <= 20 and tensor.std() > 0,
    "prefix_beta": lambda tensor: tensor.min() >= 15 and tensor.max() <= 20 and tensor.std() > 0,
    "class_token": lambda tensor: 0.005 < tensor.std() < 0.05,
    "distillation_token": lambda tensor: 0.005 < tensor.std() < 0.05,
    "register_tokens": lambda tensor: 0.005 < tensor.std() < 0.05,
    "position_embeddings": lambda tensor: 0.015 < tensor.std() < 0.025 and tensor.mean().abs() < 0.002,
    "scale": lambda tensor: (tensor == 0.25).all(),
    "bias": lambda tensor: (tensor == 0).all(),
    "weight": lambda tensor: (tensor == 1).all() if tensor.dim() == 1 else 0.01 < tensor.std() < 0.03,
}
FULL = {"use_distillation_token": True, "num_register_tokens": 2, "layerscale_value": 0.25}
FULL_PRIOR = {"decay": {"name": "violin", "init": "finetune", "learn_prefix": True}}


def assert_freshly_initialised(model, names):
    for name in names:
        tensor = model.state_dict()[name]
        assert tensor.device.type == "cpu" and tensor.isfinite().all(), name
        assert INITIALISED[name.split(".")[-1]](tensor), f"{name}: {tensor}"


def test_fresh_models_are_initialised():
    torch.manual_seed(0)
    model = SparsePriorViTForImageClassification(tiny(FULL_PRIOR, **FULL))
    assert_freshly_initialised(model, model.state_dict())


GROUPS = [(name,) for name in ("alpha", "beta", "prefix_beta", "class_token", "position_embeddings", "scale")]
GROUPS.append(tuple(INITIALISED))


@pytest.mark.parametrize(
    ("group", "dtype"), [*((group, None) for group in GROUPS), (GROUPS[-1], torch.bfloat16)], ids=str
)
def test_missing_keys_are_initialised(group, dtype, tmp_path):
    model = make(FULL_PRIOR, **FULL)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    removed = [name for name in weights if name.split(".")[-1] in group and name != "classifier.bias"]
    assert removed
    kept = {name: tensor for name, tensor in weights.items() if name not in removed}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = SparsePriorViTForImageClassification.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert set(info["missing_keys"]) == set(removed)
    assert_freshly_initialised(loaded, removed)
    for name, tensor in kept.items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(loaded.state_dict()[name].dtype)), name


def test_missing_fixed_gamma_is_initialised(tmp_path):
    prior = {"decay": {"name": "violin", "init": "finetune", "learn_beta": False}}
    make(prior).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    removed = [name for name in weights if name.endswith("beta")]
    assert len(removed) == 2  # a fixed gamma is a buffer, which is saved: it was drawn at random
    kept = {name: tensor for name, tensor in weights.items() if name not in removed}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_freshly_initialised(SparsePriorViTForImageClassification.from_pretrained(tmp_path), removed)


@pytest.mark.parametrize(
    ("support", "init"),
    [("dense", "identity"), ("dense", "finetune"), ("fibottention", "pretrain"), ("fibottention", "identity")],
)
def test_a_prior_on_a_dense_checkpoint_starts_as_its_preset_says(support, init, tmp_path):
    dense = make()
    dense.save_pretrained(tmp_path)
    prior = {"support": support, "decay": {"name": "violin", "init": init}}
    model = SparsePriorViTForImageClassification.from_pretrained(tmp_path, prior=prior)
    mean, std, low, high, _ = INIT_PRESETS[init]
    for decay in decays(model):
        assert (decay.alpha - mean).abs().max() <= 5 * std
        assert low <= decay.beta.min() and decay.beta.max() <= high
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in dense.state_dict().items())
    if init == "identity" and support == "dense":
        torch.testing.assert_close(model(images()).logits, dense(images()).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("prior", KEPT)
def test_save_and_reload_is_bit_equal(prior, tmp_path):
    model = make(prior)
    expected = model(images()).logits
    model.save_pretrained(tmp_path)
    loaded, info = SparsePriorViTForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not loaded.training
    assert loaded.config.prior == model.config.prior
    assert torch.equal(loaded(images()).logits, expected)


def test_base_model_and_classifier_load_each_others_weights(tmp_path):
    classifier = make("fibottention+violin")
    classifier.save_pretrained(tmp_path / "classifier")
    base = SparsePriorViTModel.from_pretrained(tmp_path / "classifier")
    assert torch.equal(base(images()).last_hidden_state, classifier.vit(images()).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again = SparsePriorViTForImageClassification.from_pretrained(tmp_path / "base")
    assert torch.equal(again.vit(images()).pooler_output, classifier.vit(images()).pooler_output)
    assert again.classifier.weight.isfinite().all() and again.classifier.weight.std() < 0.05


# ---- the meta device ------------------------------------------------------------------------------------------------


def fill(model, source):
    model = model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    return model.eval()


@pytest.mark.parametrize("prior", KEPT)
def test_models_can_be_made_on_the_meta_device(prior):
    source = make(prior)
    with torch.device("meta"):
        model = SparsePriorViTForImageClassification(tiny(prior))
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert model(torch.empty(2, 3, 32, 32, device="meta")).logits.shape == (2, 3)
    # Tables made for the meta device are not kept.
    assert torch.equal(fill(model, source)(images()).logits, source(images()).logits)


@pytest.mark.parametrize("include_buffers", [False, True])
def test_models_can_be_made_with_accelerates_empty_weights(include_buffers):
    accelerate = pytest.importorskip("accelerate")
    source = make("fixed gamma")
    with accelerate.init_empty_weights(include_buffers=include_buffers):
        model = SparsePriorViTForImageClassification(tiny("fixed gamma"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(fill(model, source)(images()).logits, source(images()).logits)


# ---- peft -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_lora_trains_with_gradient_checkpointing(reentrant):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("fibottention+violin"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    # With a frozen patch projection the reentrant form needs an input that requires gradients.
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()(images(), labels=torch.tensor([0, 2])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_lora_keeps_scalars_in_float32_in_half_precision():
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["decay_bias"]}
    model = peft.get_peft_model(make("dense+violin").bfloat16(), peft.LoraConfig(r=2, **settings)).bfloat16()
    scalars = {parameter.dtype for name, parameter in model.named_parameters() if name.endswith(("alpha", "beta"))}
    assert scalars == {torch.float32}
    assert model(images()).logits.isfinite().all()
