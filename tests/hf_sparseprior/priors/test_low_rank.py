import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.patterns.supports import LayerKey
from hf_sparseprior.priors.layer import PriorAttention, SparsePriorAttention
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.prior import prior_pruning_ratio, resolve_prior
from tests.hf_sparseprior.attention.attention_calls import attend

GRID, HEADS, WIDTH = (3, 4), 2, 5
BUILT = [name for name in MIXERS if name != "softmax"]


def make(mixer, grid=GRID):
    torch.manual_seed(0)
    return PriorAttention(HEADS, resolve_prior({"mixer": mixer}, HEADS, grid), head_dim=WIDTH).double()


def inputs(prefix, tokens=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, HEADS, prefix + tokens, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def softmax(row):
    exps = [math.exp(x) for x in row]
    return [e / sum(exps) for e in exps]


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("share", [False, True])
def test_linformer_equals_its_definition(prefix, share):
    attention = make({"name": "linformer", "projected_tokens": 3, "share_key_value": share})
    keys = attention.mixer.mix_keys
    values = keys if share else attention.mixer.mix_values
    q, k, v = inputs(prefix)
    out, weights = attend(attention, q, k, v, GRID, prefix, need_weights=True)
    for b in range(2):
        for h in range(HEADS):
            # Rows of the prefix as they are, then mixtures of the patches, written out.
            mixed = [
                [*rows[b, h, :prefix], *(sum(w[r, n] * rows[b, h, prefix + n] for n in range(12)) for r in range(3))]
                for w, rows in ((keys, k), (values, v))
            ]
            for j in range(prefix + 12):
                probs = softmax([(q[b, h, j] @ key).item() / math.sqrt(WIDTH) for key in mixed[0]])
                expected = sum(p * value for p, value in zip(probs, mixed[1], strict=True))
                torch.testing.assert_close(out[b, h, j], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights @ v, out)
    torch.testing.assert_close(attend(attention, q, k, v, GRID, prefix)[0], out)


@pytest.mark.parametrize("mixer", BUILT)
def test_returned_weights_have_a_gradient(mixer):
    leaves = [leaf.requires_grad_() for leaf in inputs(1)]
    _, weights = attend(make(mixer), *leaves, GRID, 1, need_weights=True)
    found = torch.autograd.grad(weights.square().sum(), leaves[:2])
    assert all(grad.abs().max() > 1e-6 for grad in found)


@pytest.mark.parametrize("prefix", [0, 2])
def test_efficient_attention_equals_its_definition(prefix):
    attention = make("efficient")
    q, k, v = inputs(prefix)
    out, weights = attend(attention, q, k, v, GRID, prefix, need_weights=True)
    for b in range(2):
        for h in range(HEADS):
            queries = [softmax(row) for row in q[b, h].tolist()]
            columns = [softmax(column) for column in k[b, h].T.tolist()]  # over the tokens
            context = [sum(w * value for w, value in zip(c, v[b, h], strict=True)) for c in columns]
            for j, query in enumerate(queries):
                expected = sum(p * row for p, row in zip(query, context, strict=True))
                torch.testing.assert_close(out[b, h, j], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    torch.testing.assert_close(weights @ v, out)


@pytest.mark.parametrize("name", BUILT)
def test_some_of_the_patches_in_any_order(name):
    # All patches in another order give the same outputs in that order.
    attention = make(name)
    q, k, v = inputs(1)
    order = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(seed)) for seed in range(2)])
    places = torch.cat([torch.zeros(2, 1, dtype=torch.int64), 1 + order], 1)[:, None, :, None].expand_as(q)
    moved = [x.gather(2, places) for x in (q, k, v)]
    expected = attend(attention, q, k, v, GRID, 1)[0].gather(2, places)
    torch.testing.assert_close(attend(attention, *moved, GRID, 1, token_ids=order)[0], expected, rtol=0, atol=1e-12)
    fewer = [x[:, :, :7] for x in moved]
    out, weights = attend(attention, *fewer, GRID, 1, token_ids=order[:, :6], need_weights=True)
    torch.testing.assert_close(weights @ fewer[2], out, rtol=0, atol=1e-12)
    torch.testing.assert_close(attend(attention, *fewer, GRID, 1, token_ids=order[:, :6])[0], out, rtol=0, atol=1e-12)


def test_linformer_on_a_finer_grid_mixes_the_same_places():
    # Mixtures of constant keys stay what they are, since the sums of the weights stay.
    attention = make({"name": "linformer", "projected_tokens": 2})
    with torch.no_grad():
        attention.mixer.mix_keys.fill_(0.3)
        attention.mixer.mix_values.fill_(0.2)
    q, k, v = (torch.ones(1, HEADS, 48, WIDTH, dtype=torch.float64) * x for x in (1.0, 2.0, 3.0))
    out, _ = attend(attention, q, k, v, (6, 8))
    torch.testing.assert_close(out, torch.full_like(out, 0.2 * 12 * 3.0))


@pytest.mark.parametrize(
    ("mixer", "ratio"),
    [
        ("linformer", 100 * (1 - 5 / 197)),  # 4 mixtures and the class token
        ({"name": "efficient", "pruning_ratio": 97.98}, 100 * (1 - 4 / 197)),
        ("efficient", 100 * (1 - 64 / 197)),
    ],
)
def test_pruning_ratios(mixer, ratio):
    prior = resolve_prior({"mixer": mixer}, 12, (14, 14))
    assert prior_pruning_ratio(prior, LayerKey(12, (14, 14)), 1, 64) == pytest.approx(ratio)
    assert resolve_prior(prior, 12, (28, 28)) == prior, "a saved model keeps its sizes on another grid"


def test_linformer_of_fibottention_table_2_counts_patches():
    prior = resolve_prior("linformer", 12, (14, 14))
    assert f"{prior_pruning_ratio(prior, LayerKey(12, (14, 14)), 0, 64):.2f}" == "97.96"


def test_flops_of_narrow_keys_equal_those_that_torch_counts():
    config = SparsePriorViTConfig(
        image_size=24, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, num_labels=3, prior={"mixer": {"name": "efficient", "key_width": 3}},
    )  # fmt: skip
    model = SparsePriorViTForImageClassification(config).eval()
    # torch does not count its fused attention on CPUs.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.randn(1, 3, 24, 24))
    assert model_flops(config, convention="torch").total == counter.get_total_flops()


def test_narrow_keys():
    prior = resolve_prior({"mixer": {"name": "efficient", "key_width": 3}}, 4, (2, 2))
    attention = SparsePriorAttention(32, 4, prior)
    assert attention.q_proj.weight.shape == attention.k_proj.weight.shape == (12, 32)
    assert attention(torch.randn(2, 4, 32), (2, 2))[0].shape == (2, 4, 32)


def test_a_forced_backend_is_refused(monkeypatch):
    attention = make("linformer")
    with pytest.raises(ValueError, match="backend='diagonal' cannot run mixer 'linformer'"):
        attend(attention, *inputs(0), GRID, backend="diagonal")
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "fast")
    with pytest.raises(ValueError, match="SPARSEPRIOR_BACKEND='fast' must be one of auto, reference"):
        attend(attention, *inputs(0), GRID)
    attend(attention, *inputs(0), GRID, backend="reference")


def test_a_bias_is_refused():
    attention = make("efficient")
    with pytest.raises(ValueError, match="mixer 'efficient' has no logits of pairs to which a bias could be added"):
        attend(attention, *inputs(0), GRID, bias=torch.zeros(1))
