"""SparsePriorViT against independent models: transformers' own classes, and a ViT written out in float64."""

import copy
import hashlib
import math
import random
from itertools import cycle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoBackbone,
    AutoModel,
    AutoModelForImageClassification,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    Trainer,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    ViTConfig,
    ViTModel,
)
from transformers.utils import find_labels

from hf_sparseprior import (
    SparsePriorViTBackbone,
    SparsePriorViTConfig,
    SparsePriorViTForImageClassification,
    SparsePriorViTModel,
)
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.decay import DECAYS, INIT_PRESETS
from hf_sparseprior.patterns.sequences import SEQUENCES
from hf_sparseprior.patterns.supports import SUPPORTS, build_mask, has_pairs
from tests.processes import run_script

# transformers 5.23 renames gradient_checkpointing_enable, which peft and older releases call.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

# Every support with every decay and without one, and the settings that run other code.
# The published stride of 65 leaves a small grid nothing but its diagonal, where no decay acts.
OWN = {name: {"name": "strided", "stride": 5} if name == "strided" else name for name in SUPPORTS}
PRIORS = {f"{name}+{decay}": {"support": support, "decay": decay} for name, support in OWN.items() for decay in DECAYS}
PRIORS |= {name: {"support": support} for name, support in OWN.items()}
PRIORS |= {name: {"support": {"name": "fibottention", "sequence": name}} for name in SEQUENCES if name != "wythoff"}
PRIORS |= {
    "zero fill": {"support": {"name": "fibottention", "mask_fill": "zero"}},
    "zero fill+violin": {"support": {"name": "fibottention", "mask_fill": "zero"}, "decay": "violin"},
    "modified": {"support": {"name": "fibottention", "modified": True}},
    "learned prefix": {"support": "fibottention", "decay": {"name": "violin", "learn_prefix": True}},
    "fixed gamma": {"decay": {"name": "violin", "learn_alpha": False, "learn_beta": False}},
}
# Every support, every decay and every setting once, for tests of what is the same for any two of them.
EACH = {name: prior for name, prior in PRIORS.items() if "+" not in name or "zero" in name}
EACH |= {name: PRIORS[name] for name in map("+".join, zip(SUPPORTS, cycle(DECAYS)))}
# For tests in which one prior of each kind of code is enough.
FOUR = ["dense", "fibottention", "dense+violin", "fibottention+violin"]
# Backends of whole models; diagonal is for supports with offsets.
PATHS = [(prior, backend) for prior in FOUR for backend in ("auto", "reference")]
PATHS += [(prior, "diagonal") for prior in FOUR if not prior.startswith("dense")]


def tiny(prior="dense", **settings):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    prior = PRIORS.get(prior, prior) if isinstance(prior, str) else prior
    return SparsePriorViTConfig(
        prior=prior, **{**sizes, "image_size": 32, "patch_size": 4, "num_labels": 3, **settings}
    )


@torch.no_grad()
def stir(model, seed=1, amount=0.5):
    """Move every weight far from its initial value, so that attention is not uniform and masks matter."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor, low, high):
        return torch.rand(tensor.shape, generator=generator).to(tensor.dtype) * (high - low) + low

    for name, tensor in model.state_dict().items():
        if name.endswith("beta"):
            tensor.copy_(draw(tensor, 0.0, 4.0))
        elif name.endswith("alpha"):
            tensor.copy_(draw(tensor, 0.5, 2.0))
        else:
            tensor.add_(draw(tensor, -amount, amount))
    return model


def make(prior="dense", cls=SparsePriorViTForImageClassification, amount=0.5, **settings):
    torch.manual_seed(0)
    return stir(cls(tiny(prior, **settings)), amount=amount).eval()


def images(batch=2, size=(32, 32), channels=3, dtype=torch.float32):
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(
        dtype
    )


def decays(model):
    return [layer.attention.decay_bias for layer in model.base_model.layers]


# ---- the model written out by hand ----------------------------------------------------------------------------------


def decay_by_hand(config, scalars, grid, prefix):
    """alpha * M (H, T, T), VIOLIN Eqs. 11 to 13, from powers of gamma in float64."""
    decay, heads = config.prior["decay"], config.num_attention_heads
    gamma = torch.sigmoid(scalars["beta"])
    rows, columns = np.indices(grid).reshape(2, -1)
    if decay["name"] == "manhattan":
        distances = [abs(rows[:, None] - rows) + abs(columns[:, None] - columns)]
    elif decay["name"] == "random_order":
        order = list(range(len(rows)))
        random.Random(decay["seed"]).shuffle(order)
        turned = np.array(order).reshape(grid[::-1]).T.ravel()  # the order of the transposed grid
        distances = [abs(rank[:, None] - rank) for rank in (np.array(order), turned)]
    elif decay["name"] == "learned_order":
        assert list(grid) == decay["grid"]
        place = scalars["order"].flatten()
        distances = [abs(place[:, None] - place).numpy()]
    elif decay["name"] == "violin":
        ranks = [curve_rank(curve, grid).ravel() for curve in decay["curves"]]
        distances = [abs(rank[:, None] - rank) for rank in ranks]
    else:  # one that this does not know: by the positions that it declares
        positions = DECAYS[decay["name"]].positions(decay, grid)
        distances = [sum(abs(axis[:, None] - axis) for axis in curve) for curve in positions]
    powers = [gamma[c][:, None, None] ** torch.tensor(d) for c, d in enumerate(distances)]
    weights = torch.ones(heads, prefix + len(rows), prefix + len(rows), dtype=torch.float64)
    if "prefix_beta" in scalars:
        weights = weights * torch.sigmoid(scalars["prefix_beta"])[:, None, None]
    weights[:, prefix:, prefix:] = torch.stack(powers).mean(0)
    return weights * scalars["alpha"][:, None, None] if "alpha" in scalars else weights


def attend_by_hand(config, layer, q, k, v, scalars, grid):
    """Attention weights (B, H, T, T) and their output, dense tensors only."""
    prefix, support = config.num_prefix_tokens, config.prior["support"]
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if config.prior["decay"]:
        logits = logits * decay_by_hand(config, scalars, grid, prefix)
    tokens = grid[0] * grid[1]
    settings = {"num_heads": config.num_attention_heads, "num_tokens": tokens, "num_prefix_tokens": prefix}
    mask = torch.tensor(build_mask(support, layer=layer, **settings))
    logits = torch.where(mask, logits, -math.inf if support["mask_fill"] == "neg_inf" else 0.0)
    weights = logits.softmax(-1)
    return weights, weights @ v


def vit_by_hand(model, pixels):
    """Last hidden state (B, T, C), from the model's weights, in float64 and without the library's modules."""
    config = model.config
    weights = {name: tensor.double() for name, tensor in model.base_model.state_dict().items()}
    patch = config.patch_size if isinstance(config.patch_size, list) else [config.patch_size] * 2
    grid = (pixels.shape[2] // patch[0], pixels.shape[3] // patch[1])
    width, heads = config.hidden_size, config.num_attention_heads

    def linear(x, name):
        return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

    def norm(x, name):
        return F.layer_norm(x, (width,), weights[name + ".weight"], weights[name + ".bias"], config.layer_norm_eps)

    kernel, bias = weights["embeddings.projection.weight"], weights["embeddings.projection.bias"]
    patches = F.unfold(pixels.double(), patch, stride=patch).mT @ kernel.reshape(width, -1).T + bias
    positions = weights.get("embeddings.position_embeddings")
    prefix = [weights[f"embeddings.{name}_token"] for name in ("class", "distillation") if use(config, name)]
    if positions is not None:
        with_position = len(prefix) if config.position_embedding_for_class_token else 0
        prefix = [token + positions[:, n] if n < with_position else token for n, token in enumerate(prefix)]
        map_ = positions[:, with_position:].mT.reshape(1, width, *config.grid)
        if grid != config.grid:
            map_ = F.interpolate(map_, grid, mode=config.interpolation, align_corners=False)
        patches = patches + map_.flatten(2).mT
    if config.num_register_tokens:
        prefix.append(weights["embeddings.register_tokens"])
    x = torch.cat([token.expand(len(pixels), -1, -1) for token in prefix] + [patches], 1)
    attentions = []
    for n in range(config.num_hidden_layers):
        layer = f"layers.{n}."
        x_norm = norm(x, layer + "layernorm_before")
        q, k, v = (
            linear(x_norm, f"{layer}attention.{p}_proj").unflatten(-1, (heads, -1)).transpose(1, 2) for p in "qkv"
        )
        path = layer + "attention.decay_bias."
        scalars = {name.removeprefix(path): tensor for name, tensor in weights.items() if name.startswith(path)}
        attention, out = attend_by_hand(config, n, q, k, v, scalars, grid)
        attentions.append(attention)
        scale = weights.get(layer + "layerscale_attention.scale", 1.0)
        x = x + scale * linear(out.transpose(1, 2).flatten(2), layer + "attention.o_proj")
        hidden = F.gelu(linear(norm(x, layer + "layernorm_after"), layer + "mlp.fc1"))
        x = x + weights.get(layer + "layerscale_mlp.scale", 1.0) * linear(hidden, layer + "mlp.fc2")
    return norm(x, "layernorm"), attentions


def use(config, token):
    return getattr(config, f"use_{token}_token")


ARCHITECTURES = {
    "class token": {},
    "distillation token": {"use_distillation_token": True},
    "registers": {"num_register_tokens": 3},
    "every prefix token": {"use_distillation_token": True, "num_register_tokens": 2},
    "registers only": {"use_class_token": False, "pooling": "mean", "num_register_tokens": 2},
    "no prefix token": {"use_class_token": False, "pooling": "mean"},
    "no position embedding": {"position_embedding": "none"},
    "no position nor class token": {"position_embedding": "none", "use_class_token": False, "pooling": "mean"},
    "no position of the class token": {"position_embedding_for_class_token": False, "num_register_tokens": 1},
    "LayerScale": {"layerscale_value": 0.1},
    "no qkv bias": {"qkv_bias": False},
    "no proj bias": {"proj_bias": False},
    "no mlp bias": {"mlp_bias": False},
    "mean pooling": {"pooling": "mean"},
    "class token and mean": {"pooling": "class_token_and_mean", "num_register_tokens": 2},
    "distillation token without classifier": {"use_distillation_token": True, "use_distillation_classifier": False},
    "distillation, class token and mean": {"pooling": "class_token_and_mean", "use_distillation_token": True},
    "image not square": {"image_size": (20, 32)},
    "patch not square": {"patch_size": (8, 4)},
    "neither square": {"image_size": (24, 16), "patch_size": (4, 2), "num_channels": 1},
    "one head": {"num_attention_heads": 1},
    "six heads, three layers": {"num_attention_heads": 6, "num_hidden_layers": 3},
    "eps 0": {"layer_norm_eps": 0},
}


@pytest.mark.parametrize("prior", ["dense", "fibottention+violin"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_equal_a_vit_by_hand(architecture, prior):
    model = make(prior, **ARCHITECTURES[architecture]).double()
    size = model.config.image_size
    size = size if isinstance(size, list) else [size, size]
    pixels = images(size=size, channels=model.config.num_channels, dtype=torch.float64)
    expected, _ = vit_by_hand(model, pixels)
    with torch.no_grad():
        output = model.base_model(pixels)
        logits = model(pixels).logits
    assert output.last_hidden_state.dtype == logits.dtype == torch.float64
    torch.testing.assert_close(output.last_hidden_state, expected, rtol=1e-10, atol=1e-10)
    patches = expected[:, model.config.num_prefix_tokens :]
    kinds = {"class_token": [expected[:, 0]], "mean": [patches.mean(1)]}
    pooled = torch.cat(kinds.get(model.config.pooling) or [*kinds["class_token"], *kinds["mean"]], 1)
    torch.testing.assert_close(output.pooler_output, pooled, rtol=1e-10, atol=1e-10)
    class_logits = F.linear(pooled, model.classifier.weight, model.classifier.bias)
    if model.config.use_distillation_token and model.config.use_distillation_classifier:
        head = model.distillation_classifier
        class_logits = (class_logits + F.linear(expected[:, 1], head.weight, head.bias)) / 2
    else:
        assert model.distillation_classifier is None
    torch.testing.assert_close(logits, class_logits)


@pytest.mark.parametrize("prior", PRIORS)
def test_priors_equal_a_vit_by_hand(prior):
    model = make(prior, num_register_tokens=1)
    pixels = images()
    expected, attentions = vit_by_hand(model, pixels)
    with torch.no_grad():
        single = model.base_model(pixels, output_attentions=True)
        double = model.double().base_model(pixels.double(), output_attentions=True)
    torch.testing.assert_close(double.last_hidden_state, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.stack(double.attentions), torch.stack(attentions), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(single.last_hidden_state.double(), expected, rtol=1e-4, atol=1e-4)


def reason_against_diagonals(support):
    if support["name"] == "dense":
        return "the support is dense"
    return f"support '{support['name']}' has pairs off its diagonals" if has_pairs(support["name"]) else None


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("backend", ["reference", "diagonal"])
def test_every_backend_equals_the_vit_by_hand(prior, backend, monkeypatch):
    model = make(prior).double()
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    pixels = images(dtype=torch.float64)
    if backend == "diagonal" and (reason := reason_against_diagonals(model.config.prior["support"])):
        with pytest.raises(ValueError, match=f"^SPARSEPRIOR_BACKEND='diagonal' cannot run this attention: {reason}"):
            model(pixels)
        return
    expected, _ = vit_by_hand(model, pixels)
    torch.testing.assert_close(model.base_model(pixels).last_hidden_state, expected, rtol=1e-10, atol=1e-10)


# ---- transformers' own models ---------------------------------------------------------------------------------------

STOCK = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
    "layer_norm_eps": 1e-6,
}
EMBEDDINGS = {
    "embeddings.class_token": "embeddings.cls_token",
    "embeddings.projection.": "embeddings.patch_embeddings.projection.",
}
DINO_NAMES = EMBEDDINGS | {
    "layers.": "encoder.layer.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "layerscale_attention.scale": "layer_scale1.lambda1",
    "layerscale_mlp.scale": "layer_scale2.lambda1",
}


def copy_weights(source, target, names, may_lack=()):
    """Give `target` the weights of `source`. Replacing the keys of `names` by their values gives the target's names."""
    renamed = {}
    for name, tensor in source.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    missing, unexpected = target.load_state_dict(renamed, strict=False)
    assert set(missing) == set(may_lack) and not unexpected
    return target.eval()


def test_dense_equals_transformers_vit():
    ours = make(cls=SparsePriorViTModel)
    stock = ViTModel(ViTConfig(intermediate_size=48, **STOCK), add_pooling_layer=False)
    copy_weights(ours, stock, EMBEDDINGS)
    pixels = images()
    expected = stock(pixels, output_hidden_states=True)
    output = ours(pixels, output_hidden_states=True)
    torch.testing.assert_close(output.last_hidden_state, expected.last_hidden_state, rtol=1e-5, atol=1e-5)
    assert len(output.hidden_states) == len(expected.hidden_states)
    for own, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)


def test_dense_equals_transformers_deit():
    ours = make(cls=SparsePriorViTModel, use_distillation_token=True)
    stock = DeiTModel(DeiTConfig(intermediate_size=48, **STOCK), add_pooling_layer=False)
    copy_weights(ours, stock, EMBEDDINGS)
    expected = stock(images()).last_hidden_state
    torch.testing.assert_close(ours(images()).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def test_distilled_classifier_equals_transformers_deit():
    ours = make(use_distillation_token=True)
    stock = DeiTForImageClassificationWithTeacher(DeiTConfig(intermediate_size=48, num_labels=3, **STOCK))
    names = {
        "vit.": "deit.",
        "classifier.": "cls_classifier.",
        "distillation_cls_classifier.": "distillation_classifier.",
    }
    copy_weights(ours, stock, EMBEDDINGS | names)
    expected, output = stock(images()), ours(images())
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.class_logits, expected.cls_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.distillation_logits, expected.distillation_logits, rtol=1e-5, atol=1e-5)


def test_dense_equals_transformers_dinov2_with_registers():
    ours = make(cls=SparsePriorViTModel, num_register_tokens=4, layerscale_value=0.3)
    stock = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(mlp_ratio=2, num_register_tokens=4, **STOCK))
    copy_weights(ours, stock, DINO_NAMES, may_lack=["embeddings.mask_token"])
    expected = stock(images()).last_hidden_state
    torch.testing.assert_close(ours(images()).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "support", [name for name in SUPPORTS if name not in ("dense", "radial")]
)  # the latter for clips
def test_support_equals_transformers_vit_with_a_4d_mask(support):
    # One mask serves all layers of the stock model, so the layers must not be shuffled; random pairs are a layer's own.
    depth = 1 if has_pairs(support) else 2
    ours = make({"support": {"name": support, "shuffle_seed": None}}, cls=SparsePriorViTModel, num_hidden_layers=depth)
    stock = ViTModel(ViTConfig(intermediate_size=48, **STOCK | {"num_hidden_layers": depth}), add_pooling_layer=False)
    copy_weights(ours, stock, EMBEDDINGS)
    mask = build_mask(support, num_heads=4, num_tokens=64, num_prefix_tokens=1, shuffle_seed=None)
    expected = stock(images(), attention_mask=torch.tensor(mask)[None]).last_hidden_state
    dense = stock(images()).last_hidden_state
    torch.testing.assert_close(ours(images()).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    assert (expected - dense).abs().max() > 0.01  # the mask reached the stock model


def test_other_resolution_equals_transformers_vit():
    ours = make(cls=SparsePriorViTModel)
    stock = copy_weights(ours, ViTModel(ViTConfig(intermediate_size=48, **STOCK), add_pooling_layer=False), EMBEDDINGS)
    pixels = images(size=(40, 24))
    expected = stock(pixels, interpolate_pos_encoding=True).last_hidden_state
    torch.testing.assert_close(ours(pixels).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


# ---- the base model is reproduced -----------------------------------------------------------------------------------


def with_decay(dense, prior, alpha, beta, **settings):
    """The model `dense` with a decay of constant scalars and otherwise the same weights."""
    model = make(prior, **settings)
    missing, unexpected = model.load_state_dict(dense.state_dict(), strict=False)
    assert not unexpected and all("decay_bias" in name for name in missing)
    for decay in decays(model):
        nn.init.constant_(decay.alpha, alpha)
        nn.init.constant_(decay.beta, beta)
    return model


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("support", SUPPORTS)
def test_alpha_one_and_huge_beta_give_the_base_model_exactly(support, decay):
    base = make(support, attn_implementation="eager")
    model = with_decay(base, f"{support}+{decay}", 1.0, 1e4, attn_implementation="eager")
    assert torch.equal(model(images()).logits, base(images()).logits)
    # The default backends sum in another order.
    torch.testing.assert_close(with_decay(base, f"{support}+{decay}", 1.0, 1e4)(images()).logits, base(images()).logits)


def test_identity_preset_gives_the_base_model_to_1e_5():
    torch.manual_seed(0)
    base = SparsePriorViTForImageClassification(tiny()).eval()
    prior = {"decay": {"name": "violin", "init": "identity"}}
    model = SparsePriorViTForImageClassification(tiny(prior)).eval()
    model.load_state_dict(base.state_dict(), strict=False)
    torch.testing.assert_close(model(images()).logits, base(images()).logits, rtol=0, atol=1e-5)


def test_alpha_and_beta_act_on_the_output():
    base = make()
    assert (with_decay(base, "dense+violin", 1.5, 1e4)(images()).logits - base(images()).logits).abs().max() > 1e-3
    assert (with_decay(base, "dense+violin", 1.0, 2.0)(images()).logits - base(images()).logits).abs().max() > 1e-3


# ---- precision ------------------------------------------------------------------------------------------------------

CASTS = {
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "bfloat16()": lambda model: model.bfloat16(),
    "half()": lambda model: model.half(),
    "to(float16), then float()": lambda model: model.to(torch.float16).float(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_casts_leave_scalars_and_supports_alone(cast):
    # Small logits, because in float16 the weight of a pair that is hardly attended would round to zero.
    model = make("fibottention+violin", amount=0.1)
    values = [parameter.clone() for decay in decays(model) for parameter in decay.parameters()]
    before = observed_masks(model)
    model = CASTS[cast](model)
    after = [parameter for decay in decays(model) for parameter in decay.parameters()]
    assert all(parameter.dtype == torch.float32 for parameter in after)
    assert all(torch.equal(old, new) for old, new in zip(values, after, strict=True))
    assert torch.equal(before, observed_masks(model))
    assert model(images()).logits.dtype == model.classifier.weight.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scalars_stay_float32_when_a_model_is_loaded_in_half_precision(dtype, tmp_path):
    model = make("fibottention+violin")
    model.save_pretrained(tmp_path)
    loaded = SparsePriorViTForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.classifier.weight.dtype == loaded.vit.layers[0].attention.q_proj.weight.dtype == dtype
    for old, new in zip(decays(model), decays(loaded), strict=True):
        assert new.alpha.dtype == new.beta.dtype == torch.float32
        assert torch.equal(old.alpha, new.alpha) and torch.equal(old.beta, new.beta)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scalars_are_float32_in_a_model_made_in_half_precision(dtype):
    prior = {"decay": {"name": "violin", "init": "finetune"}}
    model = AutoModelForImageClassification.from_config(tiny(prior), dtype=dtype)
    assert model.classifier.weight.dtype == dtype
    for decay in decays(model):
        assert decay.alpha.dtype == decay.beta.dtype == torch.float32
        # Drawn in float32, not in half precision, where alpha - 1 has steps of 1/128 (bfloat16).
        assert not torch.equal(decay.alpha, decay.alpha.to(dtype).float())
        assert not torch.equal(decay.beta, decay.beta.to(dtype).float())


def test_half_precision_is_close_to_float32():
    model = make("fibottention+violin")
    expected = model(images()).logits
    torch.testing.assert_close(model.bfloat16()(images()).logits.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("prior", "backend"), PATHS)
def test_autocast_is_close_to_float32_and_trains_the_scalars_in_float32(prior, backend, monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    model = make(prior, amount=0.2, pooling="mean")
    expected = model(images()).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(images(), labels=torch.tensor([0, 2]), output_attentions=True)
    output.loss.backward()
    assert output.logits.dtype == torch.bfloat16
    torch.testing.assert_close(output.logits.float(), expected, rtol=0.05, atol=0.05)
    support = PRIORS[prior]["support"]
    mask = torch.tensor(build_mask(support, num_heads=4, num_tokens=64, num_prefix_tokens=1, layer=1))
    assert torch.equal(output.attentions[1] != 0, mask.expand(2, -1, -1, -1))
    for decay in decays(model):
        for parameter in decay.parameters() if decay is not None else ():
            assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all() and parameter.grad.any()


def test_float64_models_keep_float64_scalars(tmp_path):
    model = make("dense+violin").double()
    assert decays(model)[0].beta.dtype == torch.float64
    model.save_pretrained(tmp_path)
    loaded = SparsePriorViTForImageClassification.from_pretrained(tmp_path, dtype=torch.float64)
    assert decays(loaded)[0].beta.dtype == torch.float64
    assert torch.equal(loaded(images(dtype=torch.float64)).logits, model(images(dtype=torch.float64)).logits)


def test_models_made_in_float64_compute_in_float64():
    model = AutoModel.from_config(tiny("fibottention+violin"), dtype=torch.float64).eval()
    pixels = images(dtype=torch.float64)
    torch.testing.assert_close(model(pixels).last_hidden_state, vit_by_hand(model, pixels)[0], rtol=1e-10, atol=1e-10)


# ---- other resolutions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", FOUR)
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(16, 16), (40, 24), (48, 32)])
def test_other_resolutions_equal_a_vit_by_hand(prior, interpolation, size):
    model = make(prior, interpolation=interpolation, num_register_tokens=1)
    expected, _ = vit_by_hand(model, images(size=size))
    output = model.base_model(images(size=size)).last_hidden_state
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)


def test_other_resolutions_are_interpolated_in_float64_for_float64_models():
    model = make("fibottention+violin").double()
    pixels = images(size=(40, 24), dtype=torch.float64)
    expected, _ = vit_by_hand(model, pixels)
    torch.testing.assert_close(model.base_model(pixels).last_hidden_state, expected, rtol=1e-10, atol=1e-10)


def test_positions_are_those_of_torchs_interpolate():
    model = make(cls=SparsePriorViTModel)
    positions = model.embeddings.position_embeddings[:, 1:]
    resized = F.interpolate(positions.mT.reshape(1, 24, 8, 8), (5, 3), mode="bicubic").flatten(2).mT
    torch.testing.assert_close(model.embeddings.patch_positions((5, 3)), resized)
    assert torch.equal(model.embeddings.patch_positions((8, 8)), positions)


def test_supports_follow_the_grid():
    model = make("fibottention")
    pixels = images(size=(48, 32))
    mask = build_mask("fibottention", num_heads=4, num_tokens=96, num_prefix_tokens=1, layer=1)
    attention = model(pixels, output_attentions=True).attentions[1]
    assert torch.equal(attention[0] > 0, torch.tensor(mask))
    # And the first grid again, whose tables are kept.
    assert observed_masks(model).shape[-1] == 65


def test_interpolation_in_half_precision_is_done_in_float32():
    model = make(cls=SparsePriorViTModel)
    expected = model.embeddings.patch_positions((5, 3))
    rounded = model.bfloat16().embeddings.patch_positions((5, 3))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 32, 32), r"\(3, 32, 32\) must be \(batch, 3, height, width\)"),
        ((2, 3, 1, 32, 32), r"\(2, 3, 1, 32, 32\) must be \(batch, 3, height, width\)"),
        ((2, 1, 32, 32), r"\(2, 1, 32, 32\) must be \(batch, 3, height, width\)"),
        ((2, 3, 30, 32), "image of 30x32 pixels must be a multiple of the 4x4 patch"),
        ((2, 3, 32, 33), "image of 32x33 pixels must be a multiple of the 4x4 patch"),
        ((2, 3, 0, 32), "image of 0x32 pixels"),
        ((2, 3, 2, 2), "image of 2x2 pixels"),
    ],
)
def test_images_that_do_not_fit_are_refused(shape, message):
    model = make("fibottention+violin")
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(shape))


def test_an_empty_batch_gives_an_empty_result():
    assert make("fibottention+violin")(torch.zeros(0, 3, 32, 32)).logits.shape == (0, 3)


# ---- outputs --------------------------------------------------------------------------------------------------------

WAYS = ["default", "reference", "diagonal", "eager"]


def attentions_of(way, prior, monkeypatch, **settings):
    if way in ("reference", "diagonal"):
        monkeypatch.setenv("SPARSEPRIOR_BACKEND", way)
    model = make(prior, attn_implementation="eager" if way == "eager" else "sdpa", **settings)
    return model(images(), output_attentions=True, output_hidden_states=True)


@pytest.mark.parametrize(
    ("way", "prior"),
    [(way, prior) for way in WAYS for prior in FOUR if way != "diagonal" or not prior.startswith("dense")],
)
def test_attentions_and_hidden_states_on_every_backend(way, prior, monkeypatch):
    output = attentions_of(way, prior, monkeypatch, num_register_tokens=1)
    assert [state.shape for state in output.hidden_states] == [(2, 66, 24)] * 3
    assert [attention.shape for attention in output.attentions] == [(2, 4, 66, 66)] * 2
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)
    expected = attentions_of("eager", prior, monkeypatch, num_register_tokens=1)
    for layer, attention in enumerate(output.attentions):
        torch.testing.assert_close(attention, expected.attentions[layer], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, 66))
        support = PRIORS[prior]["support"]
        mask = torch.tensor(build_mask(support, num_heads=4, num_tokens=64, num_prefix_tokens=2, layer=layer))
        assert torch.equal(attention != 0, mask.expand(2, -1, -1, -1))


@pytest.mark.parametrize("way", WAYS)
def test_zero_fill_keeps_weight_off_the_support(way, monkeypatch):
    output = attentions_of(way, "zero fill", monkeypatch)
    mask = torch.tensor(build_mask("fibottention", num_heads=4, num_tokens=64, num_prefix_tokens=1))
    off = output.attentions[0].masked_fill(mask, math.nan)[:, :, 1:]
    lowest, highest = off.nan_to_num(math.inf).amin(-1), off.nan_to_num(-math.inf).amax(-1)
    assert (lowest > 0).all()
    torch.testing.assert_close(lowest, highest)  # exp(0) / sum, the same for all pruned keys of a row


def test_outputs_asked_for_in_the_config():
    output = make(output_attentions=True, output_hidden_states=True)(images())
    assert len(output.attentions) == 2 and len(output.hidden_states) == 3
    assert make(output_attentions=True)(images(), output_attentions=False).attentions is None
    model = make("fibottention")
    assert model(images()).attentions is None and model(images()).hidden_states is None
    model.config.output_attentions = True
    assert len(model(images()).attentions) == 2


def test_tuples():
    model = make("fibottention")
    named = model(images(), labels=torch.tensor([0, 2]), output_hidden_states=True)
    plain = model(images(), labels=torch.tensor([0, 2]), output_hidden_states=True, return_dict=False)
    assert torch.equal(plain[0], named.loss) and torch.equal(plain[1], named.logits) and len(plain[2]) == 3
    base = model.base_model(images(), return_dict=False)
    assert [tuple(tensor.shape) for tensor in base] == [(2, 65, 24), (2, 24)]


def test_loss_is_cross_entropy():
    labels = torch.tensor([0, 2])
    output = make("fibottention")(images(), labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))


def test_distilled_loss_is_the_mean_of_both_heads():
    model, labels, teacher = make(use_distillation_token=True), torch.tensor([0, 2]), torch.tensor([1, 2])
    output = model(images(), labels=labels, distillation_targets=teacher)
    by_class, by_teacher = (
        F.cross_entropy(output.class_logits, labels),
        F.cross_entropy(output.distillation_logits, teacher),
    )
    torch.testing.assert_close(output.loss, (by_class + by_teacher) / 2)
    torch.testing.assert_close(output.logits, (output.class_logits + output.distillation_logits) / 2)
    both = model(images(), labels=labels)
    torch.testing.assert_close(both.loss, (by_class + F.cross_entropy(output.distillation_logits, labels)) / 2)


def test_the_trainer_sees_one_kind_of_labels():
    assert find_labels(SparsePriorViTForImageClassification) == ["labels"]


def test_no_labels_give_features():
    model = make(num_labels=0)
    torch.testing.assert_close(model(images()).logits, model.base_model(images()).pooler_output)


def test_attention_implementation_can_be_switched():
    model = make("fibottention")
    expected = model(images()).logits
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(model(images()).logits, expected, rtol=1e-5, atol=1e-5)


# ---- backbone -------------------------------------------------------------------------------------------------------


def test_backbone_maps_are_the_normed_hidden_states():
    stages = ["stem", "stage1", "stage2"]
    model = make("fibottention", cls=SparsePriorViTBackbone, image_size=(32, 24), out_features=stages)
    pixels = images(size=(32, 24))
    output = model(pixels, output_hidden_states=True, output_attentions=True)
    assert model.channels == [24, 24, 24] and len(output.attentions) == 2
    for map_, state in zip(output.feature_maps, output.hidden_states, strict=True):
        assert map_.shape == (2, 24, 8, 6)
        torch.testing.assert_close(map_.flatten(2).mT, model.layernorm(state)[:, 1:])
    assert [tuple(map_.shape[2:]) for map_ in model(images(size=(40, 20))).feature_maps] == [(10, 5)] * 3


def test_backbone_without_norm_or_reshaping():
    plain = make("dense", cls=SparsePriorViTBackbone, apply_layernorm=False, reshape_hidden_states=False)
    output = plain(images(), output_hidden_states=True)
    assert len(output.feature_maps) == 1
    torch.testing.assert_close(output.feature_maps[0], output.hidden_states[-1])
    assert plain(images(), return_dict=False)[0][0].shape == (2, 65, 24)


def test_backbone_is_found_by_auto_backbone_and_shares_weights(tmp_path):
    model = make("fibottention+violin", cls=SparsePriorViTModel)
    assert type(AutoBackbone.from_config(model.config)) is SparsePriorViTBackbone
    model.save_pretrained(tmp_path)
    backbone = SparsePriorViTBackbone.from_pretrained(tmp_path, out_features=["stage1"])
    assert backbone.out_features == ["stage1"]
    expected = model(images(), output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(backbone(images()).feature_maps[0].flatten(2).mT, model.layernorm(expected)[:, 1:])


@pytest.mark.parametrize("prior", ["dense", "fibottention+violin"])
def test_backbone_serves_upernet(prior):
    stages = [f"stage{n}" for n in range(1, 5)]
    config = tiny(prior, num_hidden_layers=4, out_features=stages)
    sizes = {"hidden_size": 16, "auxiliary_in_channels": 24, "auxiliary_channels": 8, "num_labels": 5}
    model = UperNetForSemanticSegmentation(UperNetConfig(backbone_config=config, **sizes)).eval()
    assert type(model.backbone) is SparsePriorViTBackbone
    assert model(images(size=(64, 32))).logits.shape == (2, 5, 64, 32)


# ---- masks and randomness -------------------------------------------------------------------------------------------


def observed_masks(model, batch=2):
    """Which pairs have weight, (L, H, T, T); the same for every image."""
    attentions = torch.stack(model(images(batch), output_attentions=True).attentions)
    masks = attentions != 0
    assert (masks == masks[:, :1]).all()
    return masks[:, 0]


def test_masks_are_the_same_in_training_after_reload_and_for_every_batch(tmp_path):
    model = make("fibottention+violin", drop_path_rate=0.1)
    expected = observed_masks(model)
    assert torch.equal(observed_masks(model.train()), expected)
    assert torch.equal(observed_masks(model, batch=5), expected)
    assert torch.equal(observed_masks(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path)
    loaded = SparsePriorViTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(observed_masks(loaded), expected)


def test_layers_differ_unless_shuffling_is_off():
    first, second, third = observed_masks(make("fibottention", num_hidden_layers=3))
    assert not torch.equal(first, second) and not torch.equal(second, third)
    # The same four supports, on other heads.
    assert sorted(first.sum((1, 2)).tolist()) == sorted(second.sum((1, 2)).tolist())
    prior = {"support": {"name": "fibottention", "shuffle_seed": None}}
    first, second = observed_masks(make(prior))
    assert torch.equal(first, second)
    prior["support"]["shuffle_seed"] = 1
    # Layer 0 of seed 1 is layer 1 of seed 0.
    assert torch.equal(observed_masks(make(prior))[0], observed_masks(make("fibottention"))[1])


@pytest.mark.slow
def test_masks_are_the_same_in_another_process(tmp_path):
    """Which hashes text otherwise."""
    script = """
import hashlib, random, sys, torch
random.seed(99); torch.manual_seed(99)
from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTModel
config = SparsePriorViTConfig(prior="fibottention", image_size=32, patch_size=4, hidden_size=24,
                              num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
output = SparsePriorViTModel(config)(torch.randn(1, 3, 32, 32), output_attentions=True)
print(hashlib.sha256((torch.cat(output.attentions) != 0).numpy().tobytes()).hexdigest(), hash("fibottention"))
"""
    found, hashed = run_script(script, folder=tmp_path, package=True).stdout.split()
    assert int(hashed) != hash("fibottention")
    assert found == hashlib.sha256(observed_masks(make("fibottention")).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("prior", FOUR)
def test_forward_leaves_global_generators_alone(prior):
    model = make(prior)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    tiny(prior)
    model(images(size=(32, 24)))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_making_a_model_leaves_pythons_and_numpys_generators_alone():
    before = random.getstate(), np.random.get_state()[1].tolist()
    make("fibottention+violin")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_the_same_seed_gives_the_same_model():
    def fresh():
        torch.manual_seed(5)
        return SparsePriorViTForImageClassification(tiny("fibottention+violin")).state_dict()

    assert all(torch.equal(one, other) for one, other in zip(fresh().values(), fresh().values(), strict=True))


@pytest.mark.parametrize(("prior", "backend"), PATHS)
def test_images_of_a_batch_do_not_see_each_other(prior, backend, monkeypatch):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    model, pixels, order = make(prior), images(5), torch.tensor([3, 0, 4, 1, 2])
    together = model(pixels).logits
    torch.testing.assert_close(model(pixels[order]).logits, together[order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(pixels[2:3]).logits, together[2:3], rtol=1e-5, atol=1e-5)
    padded = torch.cat([pixels[:2], torch.full((3, 3, 32, 32), 1e4)])
    torch.testing.assert_close(model(padded).logits[:2], together[:2], rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("prior", FOUR)
@pytest.mark.parametrize("kind", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
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


@pytest.mark.parametrize("prior", EACH)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(prior, reentrant):
    dropout = {} if prior.startswith("zero") else {"attention_probs_dropout_prob": 0.1}
    model = make(prior, drop_path_rate=0.2, **dropout).train()
    expected = gradients(model, images())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    for name, gradient in gradients(model, images()).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("backend", ["auto", "reference", "diagonal"])
@pytest.mark.parametrize("prior", ["fibottention", "fibottention+violin", "zero fill+violin"])
def test_training_after_a_first_call_in_inference_mode(prior, backend, monkeypatch):
    """Tables made in inference mode cannot be saved for a backward pass."""
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    expected = gradients(make(prior), images())
    model = make(prior)
    with torch.inference_mode():
        model(images())
    found = gradients(model, images())
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


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
    assert scalars <= model.no_weight_decay()
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


@pytest.mark.parametrize("init", INIT_PRESETS)
def test_presets_of_the_scalars(init):
    torch.manual_seed(0)
    model = SparsePriorViTModel(tiny({"decay": {"name": "violin", "init": init}}, num_hidden_layers=12))
    mean, std, low, high, added = INIT_PRESETS[init]
    alpha = torch.cat([decay.alpha for decay in decays(model)])
    beta = torch.cat([decay.beta.flatten() for decay in decays(model)])
    assert abs(alpha.mean() - mean) < 0.01 + 0.4 * std and abs(alpha.std() - std) < 0.01 + 0.3 * std
    assert low - 5 * added <= beta.min() and beta.max() <= high + 5 * added
    # 384 draws cover the interval.
    assert beta.max() - beta.min() >= 0.9 * (high - low)


GROUPS = [
    ("alpha",),
    ("beta",),
    ("prefix_beta",),
    ("class_token",),
    ("position_embeddings",),
    ("scale",),
    tuple(INITIALISED),
]


@pytest.mark.parametrize("group", GROUPS, ids="+".join)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
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


@pytest.mark.parametrize("init", ["pretrain", "finetune", "identity"])
@pytest.mark.parametrize("support", ["dense", "fibottention"])
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


@pytest.mark.parametrize("prior", EACH)
def test_save_and_reload_is_bit_equal(prior, tmp_path):
    model = make(prior)
    expected = model(images()).logits
    model.save_pretrained(tmp_path)
    loaded, info = SparsePriorViTForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not loaded.training
    assert loaded.config.prior == model.config.prior
    assert torch.equal(loaded(images()).logits, expected)
    # Once more from a folder written by a loaded model, and through the registered Auto class.
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "again")
    assert type(again) is SparsePriorViTForImageClassification and torch.equal(again(images()).logits, expected)


def test_base_model_and_classifier_load_each_others_weights(tmp_path):
    classifier = make("fibottention+violin")
    classifier.save_pretrained(tmp_path / "classifier")
    base = SparsePriorViTModel.from_pretrained(tmp_path / "classifier")
    assert torch.equal(base(images()).last_hidden_state, classifier.vit(images()).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again = SparsePriorViTForImageClassification.from_pretrained(tmp_path / "base")
    assert torch.equal(again.vit(images()).pooler_output, classifier.vit(images()).pooler_output)
    assert again.classifier.weight.isfinite().all() and again.classifier.weight.std() < 0.05


def test_a_half_precision_model_is_saved_and_reloaded_bit_equal(tmp_path):
    model = make("fibottention+violin").bfloat16()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for name, tensor in weights.items() if "decay_bias" in name} == {torch.float32}
    loaded = SparsePriorViTForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(loaded(images()).logits, model(images()).logits)


def test_deep_copies_are_independent():
    model = make("fibottention+violin")
    expected = model(images()).logits
    twin = copy.deepcopy(model)
    assert torch.equal(twin(images()).logits, expected)
    stir(twin, seed=2)
    assert torch.equal(model(images()).logits, expected) and not torch.equal(twin(images()).logits, expected)


# ---- the meta device ------------------------------------------------------------------------------------------------


def fill(model, source):
    model = model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    return model.eval()


@pytest.mark.parametrize("prior", EACH)
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


@pytest.mark.parametrize("use_dora", [False, True])
def test_lora_with_the_scalars_trains_saves_and_reloads(use_dora, tmp_path):
    peft = pytest.importorskip("peft")
    base = make("fibottention+violin", pooling="mean")
    settings = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["decay_bias", "classifier"]}
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, use_dora=use_dora, **settings))
    torch.testing.assert_close(model(images()).logits, base(images()).logits, rtol=1e-4, atol=1e-4)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sum(name.endswith(("alpha", "beta")) for name in trainable) == 4
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(images(), labels=torch.tensor([0, 2])).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == set(trainable)
    expected = model.eval()(images()).logits
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    assert torch.equal(again(images()).logits, expected)
    with model.disable_adapter():
        torch.testing.assert_close(model(images()).logits, base(images()).logits, rtol=1e-5, atol=1e-5)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(images()).logits, expected, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("given", [None, np.zeros((1, 3, 32, 32), np.float32)])
def test_what_are_no_images_is_named(given):
    with pytest.raises(ValueError, match=rf"pixel_values of {type(given).__name__} must be \(batch, 3, "):
        SparsePriorViTModel(SparsePriorViTConfig(image_size=32, patch_size=16, num_hidden_layers=1))(given)
