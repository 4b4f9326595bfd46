"""Priors on timm's own models, against timm's own forward with attention that is written out here."""

import copy
import io
import math
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, product
from typing import Any
from unittest import mock

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, TimmWrapperModel
from transformers.models.timm_wrapper import modeling_timm_wrapper
from transformers.utils import import_utils, is_timm_available

import hf_sparseprior as sp
from hf_sparseprior.adapters.lora import lora_config
from hf_sparseprior.adapters.stock_attention import APPLIED, PRIOR_MODULE, StockPrior
from hf_sparseprior.patterns.supports import build_mask
from tests.each import each
from tests.hf_sparseprior.adapters.stock_models import move_decays
from tests.hf_sparseprior.adapters.test_stock import replicated
from tests.hf_sparseprior.adapters.test_stock_attention import PRIORS, distances
from tests.timm_oracle import import_timm

timm = import_timm()
VisionTransformer = timm.models.vision_transformer.VisionTransformer
VisionTransformerDistilled = timm.models.deit.VisionTransformerDistilled
Eva = timm.models.eva.Eva
NaFlexVit = timm.models.naflexvit.NaFlexVit
SwinTransformer = timm.models.swin_transformer.SwinTransformer
blocks = timm.models.vision_transformer

SIZES = {"embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 5}
TINY = {"img_size": 32, "patch_size": 4, **SIZES}
FLEX = {**TINY, "pos_embed_grid_size": (8, 8)}
ROTARY = {**TINY, "use_rot_pos_emb": True, "attn_type": "rope"}
SWIN = {
    "img_size": 32, "patch_size": 2, "embed_dim": 24, "depths": (2, 2, 2), "num_heads": (2, 4, 4), "window_size": 4,
    "num_classes": 5,
}  # fmt: skip


@dataclass
class Case:
    """A model, the size of its images, and where its tokens lie."""

    model: type
    config: dict[str, Any]
    prefix: int = 1
    grid: tuple[int, int] = (8, 8)
    size: tuple[int, int] = (32, 32)
    options: dict[str, Any] = field(default_factory=dict)  # of the forward

    def build(self, **config: Any) -> nn.Module:
        """A model in eval mode whose attention is far from uniform."""
        torch.manual_seed(0)
        model = self.model(**{**self.config, **config}).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight", "reg_token", "cls_token", "bias_table", "q_bias")):
                    parameter.normal_(std=0.3)
                if name.endswith("qkv.weight"):
                    parameter[: 2 * len(parameter) // 3].normal_(std=0.3)
                if name.endswith("head.weight"):  # Eva's starts near zero
                    parameter.normal_(std=0.3)
        return model

    def images(self, size: tuple[int, int] | None = None, seed: int = 1) -> torch.Tensor:
        return torch.randn(2, 3, *(size or self.size), generator=torch.Generator().manual_seed(seed))


def causal(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


CASES = {
    "vit": Case(VisionTransformer, TINY),
    "vit_norms": Case(
        VisionTransformer,
        {**TINY, "qk_norm": True, "scale_attn_norm": True, "reg_tokens": 3, "init_values": 0.1, "global_pool": "avg"},
        prefix=4,
    ),
    "vit_map": Case(VisionTransformer, {**TINY, "class_token": False, "global_pool": "map"}, prefix=0),
    "vit_wide": Case(VisionTransformer, {**TINY, "img_size": (16, 32)}, grid=(4, 8), size=(16, 32)),
    "vit_dynamic": Case(VisionTransformer, {**TINY, "dynamic_img_size": True}, grid=(4, 6), size=(16, 24)),
    "vit_padded": Case(
        VisionTransformer, {**TINY, "dynamic_img_size": True, "dynamic_img_pad": True}, grid=(5, 6), size=(18, 24)
    ),
    "vit_post_norm": Case(VisionTransformer, {**TINY, "block_fn": blocks.ResPostBlock}),
    "vit_parallel": Case(VisionTransformer, {**TINY, "block_fn": blocks.ParallelThingsBlock}),
    "vit_causal": Case(VisionTransformer, TINY, options={"is_causal": True}),
    "vit_masked": Case(VisionTransformer, TINY, options={"attn_mask": causal(65)}),
    "vit_biased": Case(
        VisionTransformer,
        TINY,
        options={"attn_mask": torch.randn(2, 1, 65, 65, generator=torch.Generator().manual_seed(7))},
    ),
    "deit": Case(VisionTransformerDistilled, TINY, prefix=2),
    "eva": Case(Eva, {**TINY, "use_rot_pos_emb": True}),
    "eva_unfused": Case(Eva, {**TINY, "qkv_fused": False, "scale_attn_inner": True, "swiglu_mlp": True}),
    "eva_post_norm": Case(Eva, {**TINY, "use_post_norm": True}),
    "rope": Case(Eva, {**ROTARY, "num_reg_tokens": 2, "rope_rotate_half": True}, prefix=3),
    "rope_mixed": Case(Eva, {**ROTARY, "rope_type": "mixed"}),
    "rope_grouped": Case(Eva, {**ROTARY, "qkv_fused": False, "num_kv_heads": 2, "qk_norm": True}),
    "dinov3": Case(
        Eva,
        {**ROTARY, "rope_type": "dinov3", "num_reg_tokens": 4, "use_abs_pos_emb": False, "dynamic_img_size": True},
        prefix=5,
        grid=(6, 4),
        size=(24, 16),
    ),
    "naflex": Case(NaFlexVit, {**FLEX, "reg_tokens": 1}, grid=(4, 6), size=(16, 24)),
    "naflex_conv": Case(NaFlexVit, {**FLEX, "embed_proj_type": "conv", "class_token": True}),
    "naflex_rope": Case(
        NaFlexVit, {**FLEX, "rope_type": "axial", "attn_gated": True}, prefix=0, grid=(6, 4), size=(24, 16)
    ),
    "swin": Case(SwinTransformer, SWIN, prefix=0, grid=(4, 4)),
    "swin_wide": Case(SwinTransformer, {**SWIN, "window_size": (2, 4)}, prefix=0, grid=(2, 4)),
    "swin_head_width": Case(SwinTransformer, {**SWIN, "head_dim": 8}, prefix=0, grid=(4, 4)),
}
# One of each class of encoder, and of attention.
CLASSES = ("vit", "deit", "eva", "rope", "naflex", "swin")
classes = pytest.mark.parametrize("name", CLASSES)
attentions = pytest.mark.parametrize("name", ("vit", "eva", "rope", "swin"))


def output(model: nn.Module, name: str) -> torch.Tensor:
    with torch.no_grad():
        return everything(model, CASES[name].images(), **CASES[name].options)


def everything(model: nn.Module, images: torch.Tensor, **options: Any) -> torch.Tensor:
    """Features, of which a head would hide some, and logits."""
    features = model.forward_features(images, **options)
    return torch.cat([features.flatten(1), model.forward_head(features)], 1)


class WrittenOut:
    """`scaled_dot_product_attention` in float64 with whole matrices, layer by layer, for the settings of a model."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.case = case
        self.layers = [module for module in model.modules() if isinstance(module, StockPrior)]
        self.call = 0
        self.pool = F.scaled_dot_product_attention

    def __call__(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **others):
        tokens = self.case.prefix + math.prod(self.case.grid)
        if q.shape[2] != tokens:  # attention pooling
            return self.pool(q, k, v, attn_mask=attn_mask)
        layer = self.layers[self.call]
        self.call += 1
        scores = (q.double() @ k.double().transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights, kept = self.tables(layer)
        fill = -math.inf if layer.prior["support"]["mask_fill"] == "neg_inf" else 0.0
        if is_causal:
            attn_mask = causal(tokens)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -math.inf)
        if layer.layout.family.windows and fill == -math.inf and not kept.all():
            near = (attn_mask > -50) & kept
            kept = near | (torch.eye(tokens, dtype=torch.bool) & ~near.any(-1, keepdim=True))
        scores = (scores * weights).masked_fill(~kept, fill)
        if attn_mask is not None:
            scores = scores + attn_mask
        return (scores.softmax(-1) @ v.double()).to(v.dtype)

    def tables(self, layer: StockPrior) -> tuple[torch.Tensor, torch.Tensor]:
        """(H, T, T): alpha * M, and what is attended."""
        prefix, grid, heads = self.case.prefix, self.case.grid, layer.num_heads
        settings = dict(layer.prior["support"])
        name, count = settings.pop("name"), math.prod(grid)
        kept = torch.ones(heads, prefix + count, prefix + count, dtype=torch.bool)
        if name != "dense":
            sizes = {"num_heads": heads, "num_tokens": count, "num_prefix_tokens": prefix, "layer": layer.layer_idx}
            kept = torch.from_numpy(np.asarray(build_mask(name, grid=grid, **sizes, **settings)))
        weights = torch.ones(heads, prefix + count, prefix + count, dtype=torch.float64)
        if layer.decay_bias is not None:
            gamma = torch.sigmoid(layer.decay_bias.beta.detach().double())
            apart = torch.from_numpy(distances(layer.prior["decay"], grid))
            weights[:, prefix:, prefix:] = (gamma[:, :, None, None] ** apart[:, None]).mean(0)
            weights *= layer.decay_bias.alpha.detach().double()[:, None, None]
        return weights, kept


def written_out(model: nn.Module, plain: nn.Module, case: Case, images: torch.Tensor) -> torch.Tensor:
    """What timm's own forward of `plain` gives with the attention of `model`, written out."""
    for module in plain.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True  # so that timm asks for the function that is replaced
    attention = WrittenOut(model, case)
    with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", attention):
        expected = everything(plain, images, **case.options)
    assert attention.call == len(attention.layers)
    return expected


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)


# Every case with one prior, and one case of each attention of the encoders with every prior.
PAIRS = {*zip(CASES, cycle(PRIORS)), *product(("vit", "eva", "swin"), PRIORS)}


@pytest.mark.parametrize(("name", "prior"), sorted(PAIRS))
def test_equals_timms_own_attention_written_out(name, prior):
    case = CASES[name]
    model, dense = case.build(), output(case.build(), name)
    sp.apply_prior(model, PRIORS[prior])
    move_decays(model)
    got = output(model, name)
    assert_near(got, written_out(model, case.build(), case, case.images()))
    assert (got - dense).abs().max() > 1e-3


PUBLISHED = {
    "vit_small_patch16_dinov3": {},
    "vit_pe_core_tiny_patch16_384": {},
    "vit_small_patch16_rope_mixed_ape_224": {},
    "eva02_tiny_patch14_224": {"patch_size": 16},
    "vit_base_patch16_siglip_224": {},
    "vit_small_patch16_dinov3_qkvb": {"features_only": True, "out_indices": [0, 1]},
    "vit_small_patch14_reg4_dinov2": {"features_only": True, "out_indices": [0, 1], "patch_size": 16},
    "naflexvit_base_patch16_map": {},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_architectures(name):
    sizes = {"embed_dim": 48, "depth": 2, "num_heads": 4}
    if "naflex" not in name:
        sizes["img_size"] = 64
    torch.manual_seed(0)
    model, images = timm.create_model(name, **sizes, **PUBLISHED[name]).eval(), torch.randn(2, 3, 64, 64)
    run = model if "features_only" in PUBLISHED[name] else model.forward_features
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "gamma" in key:  # LayerScale, which starts near 0
                parameter.fill_(1.0)
            elif key.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight")):
                parameter.normal_(std=0.3)

        def features() -> torch.Tensor:
            out = run(images)
            out = out["patches"] if isinstance(out, dict) else out
            return torch.cat([part.flatten() for part in out])

        before = features()
        sp.apply_prior(model, "violin")
        assert_near(features(), before)
        sp.apply_prior(sp.remove_prior(model), "fibottention")
        assert (features() - before).abs().max() > 1e-2
        assert torch.equal((sp.remove_prior(model), features())[1], before)


@pytest.mark.parametrize(
    ("name", "decay", "fused"), [*zip(CLASSES, cycle(["violin", "manhattan"]), cycle([True, False, False]))]
)
def test_starts_as_the_model_it_was_and_removal_restores_every_bit(name, decay, fused):
    model = CASES[name].build()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    before, weights = output(model, name), copy.deepcopy(model.state_dict())
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    assert sp.apply_prior(model, decay) is model
    assert_near(output(model, name), before)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())
    new = set(model.state_dict()) - set(weights)
    assert {key.rpartition(f".attn.{PRIOR_MODULE}.")[2] for key in new} >= {"decay_bias.alpha", "decay_bias.beta"}
    sp.apply_prior(sp.remove_prior(model), f"fibottention+{decay}")
    assert not torch.allclose(output(model, name), before, atol=1e-3)
    sp.remove_prior(model)
    assert torch.equal(output(model, name), before) and list(model.state_dict()) == list(weights)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@attentions
def test_other_models_in_the_process_stay_as_they_are(name):
    first, second = CASES[name].build(), CASES[name].build()
    before = output(second, name)
    sp.apply_prior(first, "fibottention")
    with_prior = output(first, name)
    assert torch.equal(output(second, name), before)
    sp.apply_prior(second, "violin")
    assert torch.equal(output(first, name), with_prior)
    assert_near(output(second, name), before)
    sp.remove_prior(first)
    assert torch.equal(output(first, name), before)


@attentions
def test_copies_have_the_prior(name):
    model = sp.apply_prior(CASES[name].build(), "fibottention+violin")
    move_decays(model)
    expected = output(model, name)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(output(other, name), expected)
        sp.remove_prior(other)
        assert torch.equal(output(other, name), output(CASES[name].build(), name))
    assert torch.equal(output(model, name), expected)


@classes
def test_a_training_step(name):
    from timm.optim import param_groups_weight_decay

    model = sp.apply_prior(CASES[name].build(), "fibottention+violin").train()
    move_decays(model)
    groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    torch.manual_seed(0)  # Swin drops paths
    everything(model, CASES[name].images()).square().sum().backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        if PRIOR_MODULE in key:
            assert parameter.grad.abs().sum() > 0 and not torch.equal(parameter, before[key]), key
            assert id(parameter) not in decayed
        if key.endswith(("qkv.weight", "q_proj.weight")):
            assert parameter.grad.abs().sum() > 0


@attentions
def test_dropout_of_attention_acts_in_training(name):
    model = CASES[name].build(attn_drop_rate=0.5, drop_path_rate=0.0)
    sp.apply_prior(model, "fibottention+violin")
    assert torch.equal(output(model, name), output(model, name))
    model.train()
    assert not torch.allclose(output(model, name), output(model, name), atol=1e-3)


@pytest.mark.parametrize("name", ["vit_dynamic", "dinov3", "naflex", "naflex_conv", "naflex_rope"])
def test_the_grid_is_that_of_the_image(name):
    case, model = CASES[name], CASES[name].build()
    sp.apply_prior(model, "fibottention+violin")
    move_decays(model)
    for grid in [(4, 8), (8, 4), (7, 5)]:
        other = Case(case.model, case.config, case.prefix, grid, (4 * grid[0], 4 * grid[1]))
        with torch.no_grad():
            got = everything(model, other.images())
        assert_near(got, written_out(model, other.build(), other, other.images()))


@pytest.mark.parametrize(
    "name, options", [("vit", {"img_size": (16, 24), "patch_size": (2, 4)}), ("swin", {"window_size": (2, 8)})]
)
def test_after_set_input_size(name, options):
    model, plain = sp.apply_prior(CASES[name].build(), "violin"), CASES[name].build()
    for one in (model, plain):
        one.set_input_size(**options)
    images = CASES[name].images(options.get("img_size"))
    with torch.no_grad():
        assert_near(model(images), plain(images))


@pytest.mark.parametrize("name", ["vit_dynamic", "dinov3", "naflex_rope", "swin"])
def test_gradient_checkpointing(name):
    """Two forwards of different grids with equally many tokens come before the backward pass."""
    gradients = []
    for checkpointing in (False, True):
        model = sp.apply_prior(CASES[name].build(), "fibottention+violin").train()
        move_decays(model)
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(0)
        sizes = [(32, 32), (32, 32)] if name == "swin" else [(16, 32), (32, 16)]
        sum(everything(model, CASES[name].images(size)).square().mean() for size in sizes).backward()
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, msg=key)


def test_reentrant_checkpointing_is_refused():
    model = sp.apply_prior(CASES["vit"].build(), "violin").train()
    model.set_grad_checkpointing()
    timm.layers.set_reentrant_ckpt(True)
    try:
        loss = everything(model, CASES["vit"].images()).sum()
        with pytest.raises(RuntimeError, match="set_reentrant_ckpt"):
            loss.backward()
    finally:
        timm.layers.set_reentrant_ckpt(False)


@pytest.mark.parametrize(
    "name", ["vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rope", "naflex", "swin"))]
)
def test_compiles_as_one_graph(name):
    smaller = {"depths": (2,), "num_heads": (2,)} if name == "swin" else {"depth": 2}
    model = sp.apply_prior(CASES[name].build(**smaller), "fibottention+violin")
    move_decays(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    images = CASES[name].images()
    with torch.no_grad():
        assert_near(compiled(images), model(images))
    gradients = []
    for one in (compiled, model):
        model.zero_grad()
        one(images).square().sum().backward()
        gradients.append({key: parameter.grad.clone() for key, parameter in model.named_parameters()})
    for key, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][key], gradient, rtol=1e-4, atol=1e-4, msg=key)


@attentions
def test_autocast_and_half_precision(name):
    model = sp.apply_prior(CASES[name].build(), "fibottention+violin")
    exact = output(model, name)
    with torch.autocast("cpu", torch.bfloat16):
        assert (output(model, name).float() - exact).abs().max() < 0.1 * exact.abs().max()
    half = model.to(torch.bfloat16)
    assert {value.dtype for key, value in half.named_parameters() if "decay_bias" in key} == {torch.float32}
    with torch.no_grad():
        assert half(CASES[name].images().bfloat16()).dtype == torch.bfloat16


def test_float64_is_exact():
    case = CASES["eva"]
    model, images = sp.apply_prior(case.build().double(), "fibottention"), case.images().double()
    expected = written_out(model, case.build().double(), case, images)
    with torch.no_grad():
        torch.testing.assert_close(everything(model, images), expected, rtol=1e-10, atol=1e-10)


def test_swin_takes_a_support_in_its_first_two_stages_only():
    model = sp.apply_prior(CASES["swin"].build(), "fibottention+violin")
    layers = [module.prior for module in model.modules() if isinstance(module, StockPrior)]
    assert [prior["support"]["name"] for prior in layers] == ["fibottention"] * 4 + ["dense"] * 2
    assert all(prior["decay"] for prior in layers)


# ---- files ----------------------------------------------------------------------------------------------------------


@attentions
def test_the_state_dict_is_the_file(name, tmp_path):
    prior, case = "fibottention+violin", CASES[name]
    model = sp.apply_prior(case.build(), prior)
    move_decays(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*sparse_prior"):
        case.build().load_state_dict(load_file(tmp_path / "model.safetensors"))
    loaded = sp.apply_prior(case.model(**case.config).eval(), prior)
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(output(loaded, name), output(model, name))
    with pytest.raises(RuntimeError, match=r"Missing key.*decay_bias"):
        loaded.load_state_dict(case.build().state_dict())


def test_files_of_timms_hub(tmp_path):
    arguments = {key: value for key, value in TINY.items() if key != "num_classes"}
    model = sp.apply_prior(timm.create_model("vit_tiny_patch16_224", num_classes=5, **arguments).eval(), "violin")
    move_decays(model)
    timm.models.save_for_hf(model, tmp_path, model_args=arguments, safe_serialization=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    loaded = sp.apply_prior(timm.create_model(f"local-dir:{tmp_path}", pretrained=False).eval(), "violin")
    timm.models.load_checkpoint(loaded, str(tmp_path / "model.safetensors"))
    assert torch.equal(output(loaded, "vit"), output(model, "vit"))


# ---- models of transformers around them -----------------------------------------------------------------------------

WRAPPED = {"vit_tiny_patch16_224": TINY, "eva02_tiny_patch14_224": TINY, "swin_tiny_patch4_window7_224": SWIN}


@pytest.fixture
def wrapped_timm(monkeypatch):
    """transformers wraps timm only where torchvision is, which no model here uses."""
    if not is_timm_available():
        monkeypatch.setitem(import_utils.BACKENDS_MAPPING, "timm", (lambda: True, ""))
        monkeypatch.setattr(modeling_timm_wrapper, "timm", timm, raising=False)


def wrapper(architecture: str, model_class: type = TimmWrapperForImageClassification) -> Any:
    arguments = {key: value for key, value in WRAPPED[architecture].items() if key != "num_classes"}
    torch.manual_seed(0)
    config = TimmWrapperConfig(architecture=architecture, model_args=arguments, num_labels=5)
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight", "head.weight")):
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(
    ("architecture", "model_class"), [*zip(WRAPPED, cycle([TimmWrapperModel, TimmWrapperForImageClassification]))]
)
@pytest.mark.usefixtures("wrapped_timm")
def test_timm_wrappers(architecture, model_class, tmp_path):
    model, images = wrapper(architecture, model_class), CASES["vit"].images()
    with torch.no_grad():
        before = model(images)[0]
        sp.apply_prior(model, "violin")
        assert_near(model(images)[0], before)
        sp.remove_prior(model)
        assert torch.equal(model(images)[0], before)
        sp.apply_prior(model, "fibottention+violin")
        move_decays(model)
        changed = model(images)[0]
        assert (changed - before).abs().max() > 1e-3
        model.save_pretrained(tmp_path)
        loaded = model_class.from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(images)[0], changed)
        assert not hasattr(model.config, "sparse_prior")


@pytest.mark.usefixtures("wrapped_timm")
def test_a_wrapper_trains_with_checkpointing():
    gradients = []
    for checkpointing in (False, True):
        model = sp.apply_prior(wrapper("vit_tiny_patch16_224"), "violin").train()
        move_decays(model)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(CASES["vit"].images(), labels=torch.tensor([0, 1])).loss.backward()
        gradients.append({key: value.grad for key, value in model.named_parameters() if PRIOR_MODULE in key})
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, msg=key)
        # The class token, which alone is pooled, is at no distance from any patch: the last beta does nothing.
        assert (gradient.abs().sum() > 0) != key.endswith("blocks.2.attn.sparse_prior.decay_bias.beta"), key


def test_a_module_of_ones_own_around_an_encoder():
    model = nn.Sequential(CASES["vit"].build(), nn.Linear(5, 2))
    with torch.no_grad():
        before = model(CASES["vit"].images())
        sp.apply_prior(model, "violin")
        assert_near(model(CASES["vit"].images()), before)
        assert any(key.startswith(f"0.blocks.0.attn.{PRIOR_MODULE}") for key in model.state_dict())
        assert torch.equal(sp.remove_prior(model)(CASES["vit"].images()), before)


# ---- adapters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "first"), [*zip(CLASSES, cycle(["adapter", "prior"]))])
def test_lora(name, first):
    """On qkv too where timm's own forward reads its weight alone (EvaAttention)."""
    model, images = CASES[name].build(), CASES[name].images()
    adapt = partial(peft.get_peft_model, peft_config=peft.LoraConfig(target_modules=["qkv"], lora_alpha=32))
    if first == "prior":
        model = adapt(sp.apply_prior(model, "fibottention+violin"))
    else:
        model = sp.apply_prior(adapt(model), "fibottention+violin")
    with torch.no_grad():
        before = model(images)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(parameter, std=0.1)
        adapted = model(images)
        assert (adapted - before).abs().max() > 1e-3
        with model.disable_adapter():
            assert torch.equal(model(images), before)
    model(images).sum().backward()
    assert all(value.grad.abs().sum() > 0 for key, value in model.named_parameters() if "lora_B" in key)
    merged = model.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(images), adapted, rtol=1e-4, atol=1e-4)
    sp.remove_prior(merged)


def test_lora_trains_the_scalars_too(tmp_path):
    images = CASES["vit"].images()
    model = sp.apply_prior(CASES["vit"].build(), "violin")
    model = peft.get_peft_model(model, lora_config(model, targets=["attn.qkv"], modules_to_save=["head"]))
    trained = {key for key, value in model.named_parameters() if value.requires_grad}
    assert any("decay_bias" in key for key in trained) and any("head" in key for key in trained)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key in trained:
                value.add_(0.1 * torch.rand(value.shape))
        expected = model(images)
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(sp.apply_prior(CASES["vit"].build(), "violin"), tmp_path).eval()
        assert_near(loaded(images), expected)


@classes
def test_a_decay_as_an_adapter(name, tmp_path):
    # Frozen, as peft freezes it: torch multiplies stacked rows in another way by a weight that needs a gradient.
    images, plain = CASES[name].images(), CASES[name].build().requires_grad_(False)
    model = peft.get_peft_model(CASES[name].build(), sp.ViolinAdapterConfig()).eval()
    with torch.no_grad():
        before = plain(images)
        assert_near(model(images), before)
        for key, value in model.named_parameters():
            if "decay_biases" in key:
                value.copy_(torch.rand(value.shape) * 2)
        expected = model(images)
        assert (expected - before).abs().max() > 1e-4
        with model.disable_adapter():
            assert torch.equal(model(images), before)
        model.save_pretrained(tmp_path)
        assert torch.equal(peft.PeftModel.from_pretrained(CASES[name].build(), tmp_path).eval()(images), expected)
        assert torch.equal(model.unload()(images), before)


# ---- refusals -------------------------------------------------------------------------------------------------------


class OwnAttention(nn.Module):
    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__()


def replaced() -> nn.Module:
    model = CASES["vit"].build()
    model.blocks[1].attn.forward = lambda x, **options: x
    return model


def vit(**config: Any) -> nn.Module:
    return CASES["vit"].build(**config)


REFUSED = {
    "differential": (lambda: vit(attn_layer="diff"), r"blocks.0.attn \(DiffAttention\) computes attention"),
    "in the block": (
        lambda: vit(block_fn=blocks.ParallelScalingBlock), r"blocks.0 \(ParallelScalingBlock\) computes attention",
    ),
    "differential in the block": (
        lambda: vit(block_fn=blocks.DiffParallelScalingBlock), r"blocks.0 \(DiffParallelScalingBlock\) computes att",
    ),
    "of one's own": (
        lambda: vit(attn_layer=OwnAttention), r"blocks.0.attn \(OwnAttention\) computes attention in a way that is not",
    ),
    "replaced": (replaced, r"blocks.1.attn \(Attention\) has another forward"),
    "patches left out": (lambda: vit(patch_drop_rate=0.5), r"patch_drop \(PatchDropout\).*patch_drop_rate=0"),
    "patches left out of Eva": (
        lambda: CASES["eva"].build(patch_drop_rate=0.5), r"patch_drop \(PatchDropoutWithIndices\)",
    ),
    "no grid": (
        lambda: NaFlexVit(**SIZES, patch_size=4, pos_embed="none", pos_embed_grid_size=None),
        r"embeds \(NaFlexEmbeds\) has no patch grid; give img_size",
    ),
    "another class": (
        lambda: timm.create_model("beit_base_patch16_224", **SIZES), "Beit cannot take a prior: .*timm's ViT",
    ),
    "yet another class": (
        lambda: timm.create_model("swinv2_tiny_window8_256", embed_dim=24, depths=(1, 1, 1, 1)),
        "SwinTransformerV2 cannot take a prior: .*timm's Swin",
    ),
    "several": (lambda: nn.ModuleList([vit(), vit()]), r"has several: \['0', '1'\]"),
    "parts of Swin": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", features_only=True),
        r"layers_0.blocks.0.attn \(WindowAttention\) computes its attention itself",
    ),
}  # fmt: skip


@each("build, message", REFUSED.values())
def test_what_cannot_be_carried_is_refused_by_name(build, message):
    model = build()
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    with pytest.raises(ValueError, match=message) as refusal:
        sp.apply_prior(model, "violin")
    assert "\n" not in str(refusal.value)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert not hasattr(model, APPLIED)


@pytest.mark.parametrize(
    "name, prior, message",
    [
        ("vit", "localvit", "'localvit' changes the"),
        ("vit", {"mixer": {"name": "efficient", "key_width": 4}}, "key_width=4 is not the 12"),
        ("swin_head_width", "linformer", r"mixer 'linformer' has no logits of pairs.*WindowAttention"),
    ],
)
def test_a_bad_prior_leaves_the_model_alone(name, prior, message):
    model = CASES[name].build()
    before = output(model, name)
    with pytest.raises(ValueError, match=message):
        sp.apply_prior(model, prior)
    assert torch.equal(output(model, name), before) and not hasattr(model, APPLIED)


def test_patches_with_coordinates_are_refused():
    model = sp.apply_prior(CASES["naflex"].build(), "violin")
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    coordinates = torch.stack([rows, columns], -1).reshape(1, 16, 2)
    given = {"patches": torch.randn(1, 16, 48), "patch_coord": coordinates, "patch_valid": torch.ones(1, 16).bool()}
    with pytest.raises(ValueError, match="NaFlexVit with a prior takes images"):
        model(given)


def test_replicas_of_data_parallel_run_with_their_own_weights():
    model = sp.apply_prior(VisionTransformer(**TINY).eval(), "fibottention+violin")
    replica = replicated(model, lambda tensor: 0.5 * tensor if tensor.is_floating_point() else tensor)
    expected = copy.deepcopy(model)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for tensor in [*expected.parameters(), *expected.buffers()]:
            tensor.mul_(0.5) if tensor.is_floating_point() else None
        assert_near(replica(images), expected(images))
        assert not torch.allclose(replica(images), model(images), atol=1e-3)
