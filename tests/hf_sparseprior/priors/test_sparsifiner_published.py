import itertools
import math

import pytest
import torch

from hf_sparseprior.patterns.supports import LayerKey
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.prior import prior_pruning_ratio, resolve_prior
from tests.hf_sparseprior.attention.attention_calls import attend

GRID, HEADS, WIDTH, PATCHES = (3, 4), 2, 6, 12


def make_attention(**settings):
    predictor = {"name": "sparsifiner_published", "num_down": 7, "top_coefficients": 3, **settings}
    attention = PriorAttention(HEADS, resolve_prior({"predictor": predictor}, HEADS, GRID), head_dim=WIDTH)
    attention = attention.double().eval()
    generator = torch.Generator().manual_seed(3)
    for weight in attention.predictor.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64) / 2
    return attention


def inputs(prefix, tokens=PATCHES):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, HEADS, prefix + tokens, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]


def brute_scores(predictor, q, k, prefix, places, counts):
    """Scores of one head for its patches, number by number; `places` are those of the patches in the grid."""

    def project(name, token):
        return getattr(predictor, f"{name}_weight") @ token + getattr(predictor, f"{name}_bias")

    def rows_of(column, weight):
        return [[*[float(c)] * prefix, *(float(row[p]) for p in places)] for c, row in zip(column, weight, strict=True)]

    down, up = rows_of(predictor.class_down, predictor.w_down), rows_of(predictor.class_up, predictor.w_up)
    mixed = [sum(weight * project("k", key) for weight, key in zip(row, k, strict=True)) for row in down]
    rows = []
    for query in q[prefix:]:
        logits = [float(project("q", query) @ key) / math.sqrt(HEADS) for key in mixed]
        kept = counts([math.exp(logit) / sum(map(math.exp, logits)) for logit in logits])
        pairs = [list(zip(kept, (abs(row[t]) for row in up), strict=True)) for t in range(len(k))]
        rows.append([sum(c * weight for c, weight in column if weight > 0.02) for column in pairs])
    return rows


def three_largest(coefficients):
    return [c if c in sorted(coefficients)[-3:] else 0.0 for c in coefficients]


def above_the_threshold(coefficients):
    return [c if c > 0.2 else 0.0 for c in coefficients]


@pytest.mark.parametrize(
    ("prefix", "places", "settings", "counts"),
    [
        (1, None, {"budget": 5}, three_largest),
        (0, None, {"keep_rate": 0.3}, three_largest),
        (2, None, {"budget": 4}, three_largest),
        (1, [1, 2, 5, 9, 11], {"budget": 3}, three_largest),
        (1, None, {"budget": 5, "top_coefficients": None, "threshold": 0.2}, above_the_threshold),
    ],
    ids=["class token", "none", "two", "some patches", "threshold"],
)
def test_the_keys_are_those_of_the_formula(prefix, places, settings, counts):
    attention = make_attention(**settings)
    q, k, v = inputs(prefix, len(places or range(PATCHES)))
    ids = None if places is None else torch.tensor([places, places])
    budget = settings.get("budget") or math.ceil(settings["keep_rate"] * (prefix + PATCHES))
    weights = (q @ k.mT / math.sqrt(WIDTH)).softmax(-1)
    for image, head in itertools.product(range(2), range(HEADS)):
        rows = brute_scores(
            attention.predictor, q[image, head], k[image, head], prefix, places or range(PATCHES), counts
        )
        for number, row in enumerate(rows, start=prefix):
            dropped = sorted(range(len(row)), key=lambda t: (-row[t], t))[budget:]
            weights[image, head, number, dropped] = 0.0
    weights = weights / weights.sum(-1, keepdim=True)
    for backend in ("reference", "sdpa", "gather", "cpp"):
        dtype, tolerance = (torch.float32, 1e-5) if backend == "cpp" else (torch.float64, 1e-9)
        call = (tensor.to(dtype) for tensor in (q, k, v))
        with torch.no_grad():
            out, _ = attend(attention.to(dtype), *call, GRID, prefix, token_ids=ids, backend=backend)
        torch.testing.assert_close(out, (weights @ v).to(dtype), rtol=tolerance, atol=tolerance)


def test_dropped_keys_take_no_place():
    attention = make_attention(budget=3)
    q, k, v = inputs(1)
    keep_mask = torch.ones(2, 13, dtype=torch.float64)
    keep_mask[:, 4:10] = 0.0
    with torch.no_grad():
        _, weights = attend(attention, q, k, v, GRID, 1, need_weights=True, keep_mask=keep_mask)
    dropped = weights[:, :, :, 4:10].clone()
    dropped[:, :, torch.arange(4, 10), torch.arange(6)] = 0.0  # each sees itself
    assert dropped.abs().max() == 0
    assert ((weights[:, :, 1:4] > 0).sum(-1) == 3).all()


def test_costs_are_those_of_a_count():
    prior = resolve_prior({"predictor": {"name": "sparsifiner_published", "keep_rate": 0.25}}, 6, (14, 14))
    attention = PriorAttention(6, prior, head_dim=64)
    kind, settings = type(attention.predictor), prior["predictor"]
    assert kind.cost_in_pairs(settings, 64, 196, 1) == 197 + 196 * 50
    assert (
        f"{prior_pruning_ratio(prior, LayerKey(6, (14, 14)), 1, 64):.2f}" == f"{100 * (1 - (197 + 9800) / 197**2):.2f}"
    )
    projections, down = (196 + 197) * 64 * 32, 32 * 32 * (197 + 196)  # W_down K and Q (W_down K)^T
    assert kind.other_multiply_adds(settings, 6, 64, 196, 1) == 6 * (projections + down + 196 * 32 * 197)
    biases = 2 * 32
    assert kind.num_weights(settings, 6, 384, 0) + biases == sum(p.numel() for p in attention.predictor.parameters())
    assert not any(parameter.requires_grad for parameter in attention.predictor.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_rate": 0}, "sparsifiner_published: keep_rate=0 must be above 0 and at most 1"),
        ({"keep_rate": 0.5, "budget": 3}, "keep_rate=0.5 and budget=3 cannot both be given"),
        ({"budget": 13}, "budget=13 must be at most the 12 patches of a 3x4 grid"),
        ({"top_coefficients": 8}, "top_coefficients=8 must be at most num_down=7, or None"),
        ({"width_factor": 0}, "width_factor=0 must be"),
        ({"threshold": 2}, "threshold=2 must be"),
        ({"up_threshold": -1}, "up_threshold=-1 must be"),
        ({"tau": 1}, "tau"),
    ],
    ids=str,
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        make_attention(**settings)
