"""Swin's bias, iRPE and Transformer-XL: against loops over pairs, and as parts of models."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import SwinConfig, SwinModel, ViTConfig, ViTMAEConfig, ViTMAEModel, ViTModel

import hf_sparseprior as sp
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.patterns.decay import DECAYS, decay_mask
from hf_sparseprior.patterns.relative_offsets import (
    piecewise_index,
    relative_buckets,
    relative_offsets,
    relative_sinusoids,
)
from hf_sparseprior.patterns.supports import build_mask
from hf_sparseprior.priors.layer import SparsePriorAttention
from hf_sparseprior.priors.prior import resolve_prior
from tests.hf_sparseprior.attention.attention_calls import attend, make_request
from tests.hf_sparseprior.attention.attention_cases import SHIPPED_BACKENDS
from tests.hf_sparseprior.small import noise

GRID, HEADS, HIDDEN = (3, 4), 3, 12
PATCHES = [(row, column) for row in range(GRID[0]) for column in range(GRID[1])]
RELATIVE = [name for name, extra in EXTRAS.items() if extra.place == "attention"]
SETTINGS = [
    *({"name": name} for name in RELATIVE),
    {"name": "swin_rpb", "learn_prefix": True},
    {"name": "irpe_qkv", "method": "euclidean", "ratio": 1.2},
    {"name": "irpe_qk", "ratio": 1.0},
]


# ---- tables ---------------------------------------------------------------------------------------------------------


def index_by_hand(x, ratio):
    # iRPE Eq. 18 with alpha, beta, gamma = ratio, 2 ratio, 8 ratio; the published code rounds, clips and truncates.
    if abs(x) <= ratio:
        return round(x)
    size = ratio + math.log(abs(x) / ratio) / math.log(8) * ratio
    return int(math.copysign(min(round(size), 2 * ratio), x))


def bucket_by_hand(row, column, settings):
    if settings["method"] == "euclidean":
        return index_by_hand(round(math.sqrt(row**2 + column**2)), settings["ratio"])
    most = int(2 * settings["ratio"])
    rows, columns = (index_by_hand(x, settings["ratio"]) + most for x in (row, column))
    return rows * (2 * most + 1) + columns


def test_piecewise_index_at_the_published_ratio():
    expected = [0, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    assert piecewise_index(np.arange(14), 1.9).tolist() == expected
    assert piecewise_index(-np.arange(14), 1.9).tolist() == [-x for x in expected]


def test_piecewise_index_is_its_definition():
    offsets = np.arange(-60, 61)
    for ratio in (0.5, 1.0, 1.9, 3.3, 20.0):
        assert piecewise_index(offsets, ratio).tolist() == [index_by_hand(int(x), ratio) for x in offsets]


def test_fifty_buckets_at_14x14():
    buckets = relative_buckets("product", 1.9, (14, 14), 1)
    assert sorted(set(buckets.ravel().tolist())) == list(range(50))
    assert (buckets[0] == 49).all() and (buckets[:, 0] == 49).all() and (buckets[1:, 1:] < 49).all()


def test_offsets_are_numbered_from_the_lowest():
    offsets = relative_offsets((2, 3))
    assert offsets[0, 5] == 0 and offsets[5, 0] == 14 and (offsets.diagonal() == 7).all()
    assert sorted(set(offsets.ravel().tolist())) == list(range(15))


# ---- one layer, by hand ---------------------------------------------------------------------------------------------


def layer_with(prior, seed=0):
    torch.manual_seed(seed)
    layer = SparsePriorAttention(HIDDEN, HEADS, resolve_prior(prior, HEADS, GRID)).double()
    for parameter in layer.relative_position.parameters():
        nn.init.normal_(parameter, std=0.7)
    return layer


def tokens(prefix, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, prefix + len(PATCHES), HIDDEN, generator=generator, dtype=torch.float64)


def dot(x, y):
    return sum(a * b for a, b in zip(x.tolist(), y.tolist(), strict=True))


def added_by_hand(name, extra, settings, head, q, k, j, i, prefix):
    """What is added to the logit of query j and key i; q and k (T, D) are this head's."""
    scale = q.shape[1] ** -0.5
    both = j >= prefix and i >= prefix
    (row_j, col_j), (row_i, col_i) = (PATCHES[n - prefix] if n >= prefix else (0, 0) for n in (j, i))
    row, column = row_j - row_i, col_j - col_i
    if name == "swin_rpb":
        if both:
            return extra.bias_table[head, row + GRID[0] - 1, column + GRID[1] - 1].item()
        if extra.prefix_bias is None:
            return 0.0
        return extra.prefix_bias[head, 2 if j < prefix and i < prefix else 1 if j < prefix else 0].item()
    if name == "transformer_xl":
        total = dot(extra.content_bias[head], k[i])
        if both:
            angles = [[x / 10000 ** (n / 3) for n in range(3)] for x in (row, column)]
            wave = [f(a) for axis in angles for f in (math.sin, math.cos) for a in axis]
            projected = extra.projection @ torch.tensor(wave, dtype=torch.float64)
            total += dot(q[j] + extra.position_bias[head], projected.view(HEADS, -1)[head])
        return scale * total
    last = extra.key_table.shape[0] - 1
    added = dot(q[j], extra.key_table[bucket_by_hand(row, column, settings) if both else last])
    if extra.query_table is not None:
        added += dot(k[i], extra.query_table[bucket_by_hand(-row, -column, settings) if both else last])
    return scale * added


def heads_by_hand(layer, x, prefix, decay=None, keep=None):
    (settings,) = layer.prior["extras"]
    name = settings["name"]
    extra = layer.relative_position[name]
    split = [p(x)[0].unflatten(-1, (HEADS, -1)).transpose(0, 1) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
    total = x.shape[1]
    out = torch.zeros(total, HEADS, HIDDEN // HEADS, dtype=torch.float64)
    for head, (q, k, v) in enumerate(zip(*split, strict=True)):
        for j in range(total):
            logits = torch.full((total,), -math.inf, dtype=torch.float64)
            for i in range(total):
                if keep is None or keep[head, j, i]:
                    a = dot(q[j], k[i]) * q.shape[1] ** -0.5
                    if decay is not None and j >= prefix and i >= prefix:
                        a *= decay[head, j - prefix, i - prefix].item()
                    logits[i] = a + added_by_hand(name, extra, settings, head, q, k, j, i, prefix)
            for i, weight in enumerate(torch.softmax(logits, 0)):
                value = v[i]
                if name == "irpe_qkv":
                    bucket = extra.value_table.shape[0] - 1
                    if j >= prefix and i >= prefix:
                        offset = (a - b for a, b in zip(PATCHES[j - prefix], PATCHES[i - prefix], strict=True))
                        bucket = bucket_by_hand(*offset, settings)
                    value = value + extra.value_table[bucket]
                out[j, head] += weight * value
    return layer.o_proj(out.flatten(1))[None]


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [*((settings, 2) for settings in SETTINGS), *(({"name": name}, 0) for name in ("swin_rpb", "irpe_qkv"))],
    ids=str,
)
def test_a_layer_is_its_definition(settings, prefix):
    layer, x = layer_with({"extras": [settings]}), tokens(prefix)
    with torch.no_grad():
        out, weights = layer(x, GRID, prefix)
        expected = heads_by_hand(layer, x, prefix)
    # Sines and cosines are float32.
    tolerance = 1e-6 if settings["name"] == "transformer_xl" else 1e-10
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert weights is None


@pytest.mark.parametrize("name", ["irpe_k", "irpe_qkv"])
def test_violin_multiplies_first(name):
    # VIOLIN Table 27: A * M, then what the relative position adds.
    layer = layer_with({"decay": {"name": "violin", "init": "moving", "learn_alpha": False}, "extras": [name]})
    x = tokens(1)
    positions = torch.tensor(DECAYS["violin"].positions(layer.prior["decay"], GRID))
    with torch.no_grad():
        layer.decay_bias.beta.sub_(5)
        decay = decay_mask(layer.decay_bias(), positions, torch.float64)
        torch.testing.assert_close(layer(x, GRID, 1)[0], heads_by_hand(layer, x, 1, decay), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["swin_rpb", "irpe_qkv"])
def test_a_support_stays_a_support(name):
    layer, x = layer_with(f"fibottention+{name}"), tokens(1)
    support = layer.prior["support"]
    keep = build_mask(support, num_heads=HEADS, num_tokens=12, num_prefix_tokens=1, layer=0)
    with torch.no_grad():
        out, weights = layer(x, GRID, 1, output_attentions=True)
        torch.testing.assert_close(out, heads_by_hand(layer, x, 1, keep=keep), rtol=1e-10, atol=1e-10)
    assert torch.equal(weights[0] > 0, torch.tensor(keep))


def test_extras_add_up():
    both, one, other = (layer_with({"extras": names}) for names in (["swin_rpb", "irpe_k"], ["swin_rpb"], ["irpe_k"]))
    for layer in (one, other):
        layer.load_state_dict(both.state_dict(), strict=False)
    q, k, _ = torch.randn(3, 2, HEADS, 13, HIDDEN // HEADS, dtype=torch.float64)
    plan = both.plan(GRID, 1)
    biases = [
        layer.relative_position[name](make_request(q, k, 0.5, plan))
        for layer, name in ((one, "swin_rpb"), (other, "irpe_k"))
    ]
    expected = torch.softmax(q @ k.transpose(-1, -2) * 0.5 + sum(biases), -1)
    _, weights = attend(both, q, k, k, GRID, 1, scale=0.5, need_weights=True)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("backend", [name for name in SHIPPED_BACKENDS if name not in ("reference", "sdpa", "frames")])
def test_sparse_backends_refuse_a_bias(backend):
    layer = layer_with("fibottention+swin_rpb")
    with pytest.raises(ValueError, match="cannot run this attention: a bias is added to the logits of all pairs"):
        layer(tokens(1), GRID, 1, backend=backend)


@pytest.mark.parametrize("name", ["swin_rpb", "irpe_qk", "transformer_xl"])
def test_sdpa_agrees(name):
    layer, x = layer_with(name), tokens(1)
    inputs = list(layer.parameters())
    results = [layer(x, GRID, 1, backend=backend)[0] for backend in ("sdpa", "reference")]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in results]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_gradient_reaches_every_parameter(settings):
    layer = layer_with({"extras": [settings]})
    layer(tokens(1), GRID, 1)[0].square().sum().backward()
    for name, parameter in layer.relative_position.named_parameters():
        reached = parameter.grad != 0
        if "table" in name and "irpe" in settings["name"]:  # buckets of offsets that a 3x4 grid does not have
            present = relative_buckets(*(layer.prior["extras"][0][key] for key in ("method", "ratio")), GRID, 1)
            assert reached.all(1).sum() == len(set(present.ravel().tolist())), name
        else:
            assert reached.all(), name


# ---- other grids ----------------------------------------------------------------------------------------------------


def test_swins_table_on_another_grid():
    layer = layer_with("swin_rpb")
    extra = layer.relative_position["swin_rpb"]
    q = torch.zeros(1, HEADS, 35, 4, dtype=torch.float64)
    request = make_request(q, q, 1.0, layer.plan((5, 7), 0))
    with torch.no_grad():
        bias = extra(request)[0]
        # Offset (0, 0) is the middle of both tables.
        torch.testing.assert_close(bias[:, 11, 11], extra.bias_table[:, 2, 3])
        assert bias.shape == (HEADS, 35, 35)
        # Mirrored tables make mirrored biases.
        extra.bias_table.copy_(extra.bias_table.flip(1, 2).clone())
        mirrored = extra(request)[0]
        torch.testing.assert_close(mirrored, bias.transpose(1, 2))
        extra.bias_table.fill_(0.3)
        torch.testing.assert_close(extra(request), torch.full((1, HEADS, 35, 35), 0.3).double())


def test_sinusoids_and_buckets_know_no_grid():
    # The same offset has the same row and the same bucket on every grid.
    small, large = relative_sinusoids(8, (2, 3)).reshape(3, 5, 8), relative_sinusoids(8, (4, 6)).reshape(7, 11, 8)
    assert np.array_equal(small, large[2:5, 3:8])
    few, many = (relative_buckets("product", 1.9, grid, 0) for grid in ((2, 3), (4, 6)))
    corner = [0, 1, 2, 6, 7, 8]
    assert np.array_equal(few, many[np.ix_(corner, corner)])


# ---- stock models ---------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def images():
    return noise(2, 3, 24, 24)


def stock(cls=ViTModel, config=ViTConfig, **settings):
    torch.manual_seed(0)
    return cls(config(image_size=24, **(settings or {"patch_size": 4, **SIZES}))).eval()


def swin():
    return stock(SwinModel, SwinConfig, patch_size=2, embed_dim=12, depths=[1, 1], num_heads=[3, 6], window_size=3)


@pytest.mark.parametrize(
    ("make", "name"), [*((stock, name) for name in RELATIVE), (swin, "swin_rpb"), (swin, "irpe_qkv")]
)
def test_on_stock_models(make, name, tmp_path):
    model = make()
    with torch.no_grad():
        before = model(images()).last_hidden_state
        sp.apply_prior(model, f"violin+{name}")
        torch.testing.assert_close(model(images()).last_hidden_state, before, rtol=0, atol=1e-5)
        for key, parameter in model.named_parameters():
            if "relative_position." in key:
                nn.init.normal_(parameter)
        after = model(images()).last_hidden_state
        assert (after - before).abs().max() > 1e-3
        model.save_pretrained(tmp_path)
        assert torch.equal(type(model).from_pretrained(tmp_path).eval()(images()).last_hidden_state, after)
        sp.remove_prior(model)
        assert torch.equal(model(images()).last_hidden_state, before)


def test_stock_models_say_what_they_cannot_take():
    model = stock()
    with pytest.raises(ValueError, match="'localvit' changes the MLP; apply_prior reaches attention alone"):
        sp.apply_prior(model, "localvit")
    masked = stock(ViTMAEModel, ViTMAEConfig)
    with pytest.raises(ValueError, match=r"'irpe_k' cannot follow a shuffled part of the patches \(ViTMAEAttention\)"):
        sp.apply_prior(masked, "irpe_k")
