"""Stock models with priors against attention written out, with masks that are made here."""

import copy
import functools
import io
import math
from itertools import cycle, product

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

import hf_sparseprior as sp
from hf_sparseprior.adapters.stock_attention import PRIOR_MODULE, StockPrior, applied_prior
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.supports import build_mask
from tests.hf_sparseprior.adapters.stock_models import STOCK, move_decays, output, visible_patches

families = pytest.mark.parametrize("name", STOCK)


PRIORS = {
    "fibottention": "fibottention",
    "modified zero": {"support": {"name": "fibottention", "modified": True, "mask_fill": "zero"}},
    "violin": {"decay": {"name": "violin", "curves": ["hilbert", "snake_t"]}},
    "both": "fibottention+manhattan",
}


# Every family with one prior, and with every prior those that differ in what the prior meets.
PAIRS = {*zip(STOCK, cycle(PRIORS)), *product(("vit", "swin", "videomae_masked", "timesformer_joint"), PRIORS)}


def distances(decay, grid):
    """(C, N, N): distances of all pairs, from the definitions."""
    if decay["name"] == "manhattan":
        row, column = (index.reshape(-1) for index in np.indices(grid))
        return (abs(row[:, None] - row) + abs(column[:, None] - column))[None]
    ranks = [
        curve_rank(curve.removesuffix("_t"), grid, transposed=curve.endswith("_t")).reshape(-1)
        for curve in decay["curves"]
    ]
    return np.stack([abs(rank[:, None] - rank) for rank in ranks])


class WrittenOut:
    """Attention in float64 with whole matrices, layer by layer, from the settings and scalars of a model."""

    def __init__(self, model, name):
        case = STOCK[name]
        self.case, self.visible = case, visible_patches(name)
        self.layers = [module for module in model.modules() if isinstance(module, StockPrior)]
        self.call = 0

    def __call__(self, module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        layer = self.layers[self.call % len(self.layers)]
        self.call += 1
        logits = (query.double() @ key.double().transpose(-1, -2)) * scaling
        weights, kept = self.tables(layer)
        logits = logits * weights
        support = layer.prior["support"]
        logits = logits.masked_fill(~kept, -math.inf if support["mask_fill"] == "neg_inf" else 0.0)
        if attention_mask is not None:
            logits = logits + attention_mask
        return (logits.softmax(-1) @ value.double()).to(value.dtype).transpose(1, 2), None

    def tables(self, layer):
        """(B or 1, H, T, T): alpha * M and what is attended. Both look at places within frames, not at time."""
        prefix, (height, width) = self.case.prefix, self.case.grid
        count, heads = height * width, layer.num_heads
        # A token of the clip's, and the prefix token or the patch of a frame that it is.
        within = torch.cat([torch.arange(prefix), prefix + torch.arange(count).repeat(self.case.frames)])
        clip = (slice(None), within[:, None], within)
        settings = dict(layer.prior["support"])
        name = settings.pop("name")
        kept = torch.ones(heads, *[prefix + self.case.frames * count] * 2, dtype=torch.bool)
        if name != "dense":
            mask = build_mask(
                name, num_heads=heads, num_tokens=count, num_prefix_tokens=prefix, layer=layer.layer_idx, **settings
            )
            kept = torch.from_numpy(mask)[clip]
        weights = torch.ones(heads, prefix + count, prefix + count, dtype=torch.float64)
        if layer.decay_bias is not None:
            gamma = torch.sigmoid(layer.decay_bias.beta.double())
            apart = torch.from_numpy(distances(layer.prior["decay"], self.case.grid))
            weights[:, prefix:, prefix:] = (gamma[:, :, None, None] ** apart[:, None]).mean(0)
            weights *= layer.decay_bias.alpha.double()[:, None, None]
        weights = weights[clip]
        if self.visible is None:
            return weights[None], kept[None]
        tokens = [torch.cat([torch.arange(prefix), prefix + own]) for own in self.visible]
        weights = torch.stack([weights[:, own][:, :, own] for own in tokens])
        kept = torch.stack([kept[:, own][:, :, own] for own in tokens])
        alone = torch.eye(kept.shape[-1], dtype=torch.bool) & ~kept.any(-1, keepdim=True)
        return weights, kept | alone


def timesformer_written_out(module, attend, frames, hidden_states, output_attentions=False):
    """The forward of a stock TimeSformer's attention, whose joint tokens are put frame after frame one by one."""
    batch, total, width = hidden_states.shape
    each = (total - 1) // frames
    order = [0, *(1 + patch * frames + frame for frame in range(frames) for patch in range(each))]
    qkv = module.qkv(hidden_states[:, order]).view(batch, total, 3, module.num_heads, -1).permute(2, 0, 3, 1, 4)
    out = attend(module, *qkv, None, scaling=module.scale)[0].reshape(batch, total, width)
    back = torch.empty_like(out)
    back[:, order] = out
    return (back,)


@pytest.mark.parametrize(("name", "prior"), sorted(PAIRS))
def test_equals_attention_written_out(name, prior):
    case = STOCK[name]
    model, plain = case.build(), case.build()
    sp.apply_prior(model, PRIORS[prior])
    move_decays(model)
    written_out = WrittenOut(model, name)
    AttentionInterface.register("written_out", written_out)
    if name.startswith("timesformer"):
        for module in plain.modules():
            if type(module).__name__ == "TimesformerLayer":
                inner = module.attention.attention
                inner.forward = functools.partial(timesformer_written_out, inner, written_out, case.frames)
    else:
        plain.set_attn_implementation("written_out")
    got, expected, dense = output(model, name), output(plain, name), output(case.build(), name)
    assert (got - expected).abs().max() < 1e-5
    assert (got - dense).abs().max() > 1e-3


@families
def test_nothing_falls_back_to_dense(name, monkeypatch):
    # transformers compiles what makes flex attention's mask; the compiler's import alone takes 8 s
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model = sp.apply_prior(STOCK[name].build(), "fibottention")
    expected, dense = output(model, name), output(STOCK[name].build(), name)
    assert not torch.allclose(expected, dense, atol=1e-3)
    flex = ["flex_attention"] if model._supports_flex_attn else []  # its masks are functions
    given = ("eager",) if name.startswith("timesformer") else ("sdpa", "eager", "hf_sparseprior", *flex)
    for implementation in given:
        model.set_attn_implementation(implementation)
        assert (output(model, name) - expected).abs().max() < 1e-5
    assert (output(copy.deepcopy(model), name) - expected).abs().max() < 1e-5
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert (output(torch.load(buffer, weights_only=False), name) - expected).abs().max() < 1e-5


@families
def test_attentions_are_those_of_the_prior(name):
    model = sp.apply_prior(STOCK[name].build(), {"support": {"name": "fibottention", "w_min": 1, "w_max": 2}})
    with torch.no_grad():
        attentions = model(**STOCK[name].example(), output_attentions=True).attentions
    stages = 3 if name == "swin" else len(applied_prior(model).attention)  # transformers returns one a stage
    assert len(attentions) == stages
    for weights in attentions[:2]:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert (weights == 0).any()


@pytest.mark.parametrize("name", ["vit", "beit", "swin", "mae", "videomae_masked"])
def test_gradients_reach_scalars_and_weights(name):
    model = sp.apply_prior(STOCK[name].build(), "fibottention+violin").train()
    move_decays(model)
    model(**STOCK[name].example()).last_hidden_state.square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        if PRIOR_MODULE in parameter_name or parameter_name.endswith(("q_proj.weight", "query.weight")):
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", ["vit", "dinov3", "beit", "swin", "mae", "timesformer"])
def test_autocast(name):
    """Rotary positions leave queries and keys in float32 next to values in bfloat16."""
    model = sp.apply_prior(STOCK[name].build(), "fibottention+violin")
    exact = output(model, name)
    with torch.autocast("cpu", torch.bfloat16):
        assert (output(model, name).float() - exact).abs().max() < 0.1 * exact.abs().max()


def test_half_precision_keeps_the_scalars_precise():
    model = sp.apply_prior(STOCK["vit"].build().to(torch.bfloat16), "violin")
    model.to(torch.bfloat16)
    assert {p.dtype for n, p in model.named_parameters() if PRIOR_MODULE in n} == {torch.float32}
    with torch.no_grad():
        assert model(STOCK["vit"].example()["pixel_values"].bfloat16()).last_hidden_state.dtype == torch.bfloat16


def test_compiles_as_one_graph():
    model = sp.apply_prior(STOCK["vit"].build(), "fibottention+violin")
    move_decays(model)
    expected = output(model, "vit")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert (output(compiled, "vit") - expected).abs().max() < 1e-5
