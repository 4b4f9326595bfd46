import math

import pytest
import torch

from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.key_selection import largest
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.decay import PLACEMENTS
from hf_sparseprior.patterns.supports import LayerKey, resolve_support
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.predictor import TopK
from hf_sparseprior.priors.prior import prior_pruning_ratio, resolve_prior
from tests.hf_sparseprior.attention.attention_calls import attend

GRID, HEADS = (3, 4), 2
SETTINGS_OF_3 = {"name": "topk", "keys": 3}


def inputs(prefix=1, batch=2, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS, prefix + 12, width)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


def brute_topk(q, k, v, count, factor=None):
    # Python floats: of each query the `count` keys with the largest logits, equal ones by their index.
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for j in range(q.shape[2]):
                logits = [(q[b, h, j] @ key).item() / math.sqrt(q.shape[-1]) for key in k[b, h]]
                if factor is not None:
                    logits = [logit * weight for logit, weight in zip(logits, factor[h][j], strict=True)]
                kept = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:count]
                total = sum(math.exp(logits[t]) for t in kept)
                for t in kept:
                    out[b, h, j] += math.exp(logits[t]) / total * v[b, h, t].detach()
    return out


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_topk_equals_brute_force(prefix, count):
    q, k, v = inputs(prefix)
    attention = PriorAttention(HEADS, resolve_prior({"predictor": {"name": "topk", "keys": count}}, HEADS, GRID))
    out, weights = attend(attention, q, k, v, GRID, prefix, need_weights=True)
    torch.testing.assert_close(out, brute_topk(q, k, v, count), rtol=0, atol=1e-12)
    assert ((weights > 0).sum(-1) == count).all()
    torch.testing.assert_close(weights @ v, out)
    assert attend(attention, q, k, v, GRID, prefix)[0].equal(out)


def test_queries_and_keys_have_a_gradient_by_default():
    q, k, v = inputs()
    attention = PriorAttention(HEADS, resolve_prior({"predictor": "topk"}, HEADS, GRID))
    attend(attention, q, k, v, GRID, 1)[0].square().sum().backward()
    assert q.grad.abs().max() > 0.01 and k.grad.abs().max() > 0.01


def test_topk_acts_on_the_decayed_logits():
    q, k, v = inputs(0)
    prior = resolve_prior({"predictor": {"name": "topk", "keys": 3}, "decay": "manhattan"}, HEADS, GRID)
    attention = PriorAttention(HEADS, prior).double()
    with torch.no_grad():
        attention.decay_bias.beta.fill_(0.0)  # gamma 1/2
    distance = [[abs(j // 4 - t // 4) + abs(j % 4 - t % 4) for t in range(12)] for j in range(12)]
    alpha = attention.decay_bias().get("alpha", torch.ones(HEADS)).tolist()
    factor = [[[alpha[h] * 0.5**d for d in row] for row in distance] for h in range(HEADS)]
    out, _ = attend(attention, q, k, v, GRID)
    torch.testing.assert_close(out, brute_topk(q, k, v, 3, factor), rtol=0, atol=1e-12)


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "multiply"])
def test_a_decay_elsewhere_leaves_the_other_keys_out(placement):
    q, k, v = inputs()
    decay = {"name": "manhattan", "placement": placement, "learn_prefix": True}
    attention = PriorAttention(HEADS, resolve_prior({"predictor": SETTINGS_OF_3, "decay": decay}, HEADS, GRID)).double()
    with torch.no_grad():
        attention.decay_bias.beta.fill_(0.0)  # gamma 1/2
        attention.decay_bias.prefix_beta.fill_(0.0)
    out, weights = attend(attention, q, k, v, GRID, 1, need_weights=True)
    assert ((weights != 0).sum(-1) <= 3).all() and (weights != 0).any(-1).all()
    torch.testing.assert_close(weights @ v, out)
    of_prefix = attend(attention, q, k, v, GRID, 1, need_weights=True, weight_rows=1)[1]
    torch.testing.assert_close(of_prefix, weights[:, :, :1], rtol=0, atol=1e-12)


def test_topk_of_all_keys_is_dense():
    q, k, v = inputs()
    plan = AttentionPlan(LayerKey(HEADS, GRID), 1, resolve_support(None, HEADS, 12))
    dense, _ = run_plan(AttentionRequest(q, k, v, plan), backend="reference")
    for count in (13, 14, 10**6):
        out, _ = run_plan(AttentionRequest(q, k, v, plan, top_k=count))
        assert out.equal(dense)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_of_equal_values_are_those_in_front(dtype):
    values = torch.randint(-2, 3, (40, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    values[values == 2] = -math.inf
    values[::2] *= -1.0  # zeros of both signs
    for count in (1, 4, 9):
        for row, mask in zip(values.tolist(), largest(values, count).tolist(), strict=True):
            front = sorted(range(9), key=lambda place, row=row: (-row[place], place))[:count]
            assert [place for place in range(9) if mask[place]] == sorted(front)


def test_topk_gradients_equal_those_of_the_kept_keys():
    q, k, v = inputs()
    attention = PriorAttention(HEADS, resolve_prior({"predictor": {"name": "topk", "keys": 4}}, HEADS, GRID))
    out, weights = attend(attention, q, k, v, GRID, 1, need_weights=True)
    logits = (q @ k.transpose(-1, -2) / math.sqrt(5)).masked_fill(weights == 0, -math.inf)
    expected = torch.softmax(logits, -1) @ v
    direction = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for own, other in zip(
        torch.autograd.grad(out, (q, k, v), direction), torch.autograd.grad(expected, (q, k, v), direction), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def test_topk_of_fibottention_table_2():
    prior = resolve_prior("topk", 12, (14, 14))
    assert TopK(12, 64, None, 98.48).top_k(197) == 3
    assert [TopK(12, 64, None, 98.48).top_k(total) for total in (1, 2, 65)] == [1, 2, 2]
    assert f"{prior_pruning_ratio(prior, LayerKey(12, (14, 14)), 1, 64):.2f}" == "98.48"
