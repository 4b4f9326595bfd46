import math
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.attention import compiled_kernels, key_selection
from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.attention.key_selection import keys_of_scores, largest_indices
from hf_sparseprior.attention.request import listed_mask
from hf_sparseprior.patterns.supports import LayerKey
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.prior import prior_pruning_ratio, resolve_prior
from hf_sparseprior.priors.sparsifiner import Sparsifiner
from tests.hf_sparseprior.attention.attention_calls import attend, make_request

GRID, HEADS, WIDTH = (3, 4), 2, 5


def make_attention(grid=GRID, heads=HEADS, head_dim=WIDTH, noise=0.3, **settings):
    # Weights of both signs, some of W_up dropped: what training may leave.
    prior = resolve_prior({"predictor": {"name": "sparsifiner", **settings}}, heads, grid)
    attention = PriorAttention(heads, prior, head_dim=head_dim).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in (attention.predictor.w_down, attention.predictor.w_up):
            weight += noise * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        dropped = torch.rand(weight.shape, generator=generator) < 0.6
        attention.predictor.w_up.masked_fill_(dropped, 0.0)
    return attention


def inputs(prefix=1, tokens=12, batch=2, seed=0, heads=HEADS, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, prefix + tokens, width)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


def brute_scores(q, k, down, up, threshold, scale):
    """Eqs. 1 to 3 before top-k, for patches alone, number by number."""
    scores = np.zeros((*q.shape[:3], q.shape[2]))
    for b, h in np.ndindex(q.shape[:2]):
        mixed = [sum(down[r][t] * k[b, h, t] for t in range(k.shape[2])) for r in range(len(down))]
        for j in range(q.shape[2]):
            powers = [math.exp((q[b, h, j] @ key) * scale) for key in mixed]
            coefficients = [power / sum(powers) for power in powers]
            kept = [c if c > threshold else 0.0 for c in coefficients]
            for t in range(k.shape[2]):
                scores[b, h, j, t] = sum(c * up[r][t] for r, c in enumerate(kept))
    return scores


def brute_attention(q, k, v, scores, budget, prefix, renormalise, scale):
    """The B highest, equal scores by index, and of these what is not zero; then Eq. 4 over what is kept, or Eq. 5."""
    out, kept_keys = np.zeros(v.shape), {}
    for b, h, j in np.ndindex(q.shape[:3]):
        everything = list(range(k.shape[2]))
        keys = everything
        if j >= prefix:
            row = scores[b, h, j - prefix]
            order = sorted(range(len(row)), key=lambda t: (-row[t], t))
            keys = [*range(prefix), *(prefix + t for t in order[:budget] if row[t] != 0)] or [j]
        powers = {t: math.exp((q[b, h, j] @ k[b, h, t]) * scale) for t in everything}
        total = sum(powers[t] for t in (keys if renormalise else everything))
        out[b, h, j] = sum(powers[t] / total * v[b, h, t] for t in keys)
        kept_keys[b, h, j] = set(keys)
    return out, kept_keys


def as_arrays(*tensors):
    return [tensor.detach().numpy() for tensor in tensors]


# ---- Eqs. 1 to 6 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "keep_rate", "renormalise"),
    [(prefix, rate, (prefix + n) % 2 == 0) for prefix in range(3) for n, rate in enumerate((0.05, 0.3, 0.9))],
)
def test_equals_brute_force(prefix, keep_rate, renormalise):
    attention = make_attention(num_down=4, threshold=0.2, keep_rate=keep_rate, renormalise=renormalise)
    predictor, scale = attention.predictor, WIDTH**-0.5
    q, k, v = inputs(prefix)
    arrays = as_arrays(q, k, v)
    patches = [array[:, :, prefix:] for array in arrays]
    expected = brute_scores(*patches[:2], *as_arrays(predictor.w_down, predictor.w_up), 0.2, scale)
    scores = predictor.scores(make_request(q, k, scale, attention.plan(GRID, prefix)))
    np.testing.assert_allclose(scores.detach().numpy(), expected, rtol=0, atol=1e-12)
    assert 0.1 < (expected == 0).mean() < 0.9  # zeros matter here
    budget = math.ceil(keep_rate * (12 + prefix))
    out, kept = brute_attention(*arrays, expected, budget, prefix, renormalise, scale)
    for backend in ("reference", "sdpa", "gather") if renormalise else ("reference", "auto"):
        own, weights = attend(attention, q, k, v, GRID, prefix, backend=backend, need_weights=backend == "reference")
        np.testing.assert_allclose(own.detach().numpy(), out, rtol=0, atol=1e-12)
        if weights is not None:
            assert {place: set(map(int, row.nonzero())) for place, row in _rows(weights)} == kept
            sums = weights.sum(-1)
            assert torch.allclose(sums, torch.ones_like(sums)) == renormalise


def test_a_negative_score_takes_no_place_of_a_zero_and_what_is_dropped_takes_none():
    scores = torch.tensor([[[[0.0, 2.0, -1.0, -3.0]] * 3 + [[-math.inf, 0.0, -1.0, -3.0]]]])
    expected = {  # of the first patch, and of the last, which sees itself where it has no key
        1: ([1], [3]),
        2: ([1, -1], [2, -1]),
        3: ([1, 2, -1], [2, 3, -1]),
        4: ([1, 2, 3, -1], [2, 3, -1, -1]),
    }
    for budget, chosen in expected.items():
        keys = keys_of_scores(scores, 0, budget)[0, 0]
        assert (keys[0].tolist(), keys[3].tolist()) == chosen


def _rows(weights):
    return ((place, weights[place]) for place in np.ndindex(weights.shape[:3]))


@pytest.mark.parametrize("backend", ["reference", "sdpa", "gather"])
def test_gradients_are_those_of_the_kept_pairs(backend):
    attention = make_attention(num_down=4, keep_rate=0.3)
    q, k, v = inputs()
    keys = attention.predictor(make_request(q, k, WIDTH**-0.5, attention.plan(GRID, 1)))
    logits = (q @ k.transpose(-1, -2) * WIDTH**-0.5).masked_fill(~listed_mask(keys, 1, 13), -math.inf)
    direction = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(torch.softmax(logits, -1) @ v, (q, k, v), direction)
    out, _ = attend(attention, q, k, v, GRID, 1, backend=backend)
    for own, other in zip(torch.autograd.grad(out, (q, k, v), direction), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def test_plain_form_runs_written_out_and_says_why():
    attention = make_attention(renormalise=False)
    q, k, v = inputs()
    for backend in ("sdpa", "gather"):
        with pytest.raises(ValueError, match=f"backend='{backend}' cannot run .* the softmax runs over all keys"):
            attend(attention, q, k, v, GRID, 1, backend=backend)


# ---- budgets ---------------------------------------------------------------------------------------------------------


def trained_predictor(steps=150):
    """A predictor on DeiT-S's grid, trained on attention to near patches and a few landmarks, then pruned."""
    torch.manual_seed(0)
    prior = resolve_prior("sparsifiner", 2, (14, 14))
    attention = PriorAttention(2, prior, head_dim=16)
    predictor, plan = attention.predictor, attention.plan((14, 14), 1)
    rows = torch.arange(196) // 14
    columns = torch.arange(196) % 14
    places = torch.stack([torch.sin(rows / 3), torch.cos(rows / 3), torch.sin(columns / 3), torch.cos(columns / 3)], -1)
    mixing = torch.randn(2, 2, 4, 16)
    images = places + 0.3 * torch.randn(8, 1, 196, 4)
    q, k = (F.pad(images @ mixing[index], (0, 0, 1, 0)) for index in (0, 1))
    teacher = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)[:, :, 1:, 1:]
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=3e-3, weight_decay=0.05)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(predictor.scores(make_request(q, k, 0.25, plan)), teacher)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.3 * losses[0]
    predictor.prune()
    return attention, q, k


@pytest.fixture(scope="module")
def trained():
    return trained_predictor()


@pytest.mark.parametrize(("keep_rate", "budget"), [(0.25, 50), (0.9, 178), (0.01, 2)])
def test_budgets_of_a_trained_predictor(trained, keep_rate, budget):
    attention, q, k = trained
    other = PriorAttention(
        2, resolve_prior({"predictor": {"name": "sparsifiner", "keep_rate": keep_rate}}, 2, (14, 14)), head_dim=16
    )
    other.load_state_dict(attention.state_dict())
    predictor, plan = other.predictor, other.plan((14, 14), 1)
    keys = predictor(make_request(q, k, 0.25, plan))
    mask = listed_mask(keys, 1, 197)
    scores = predictor.scores(make_request(q, k, 0.25, plan))
    patches = mask[:, :, 1:, 1:].sum(-1)
    assert torch.equal(patches, (scores.topk(budget).values != 0).sum(-1))
    assert patches.max() == budget or keep_rate == 0.9
    assert mask[:, :, 0].all() and mask[..., 0].all()  # row and column of the class token
    assert not ((keys[..., :-1] < 0) & (keys[..., 1:] >= 0)).any()  # what is no key stands after the last
    kept = scores.masked_fill(~mask[:, :, 1:, 1:], math.inf).amin(-1)
    left = scores.masked_fill(mask[:, :, 1:, 1:] | (scores == 0), -math.inf).amax(-1)
    assert (kept >= left).all()
    assert prior_pruning_ratio(other.prior, LayerKey(2, (14, 14)), 1, 16) == pytest.approx(
        100 * (1 - (197 + 196 * (1 + budget)) / 197**2)
    )


def test_training_leaves_a_sparse_basis(trained):
    attention, q, k = trained
    predictor = attention.predictor
    down = predictor.coefficients(make_request(q, k, 0.25, attention.plan((14, 14), 1)))
    assert ((predictor.w_up == 0) | (predictor.w_up.abs() > 0.01)).all()
    assert 0.3 < (predictor.w_up == 0).float().mean() < 1
    torch.testing.assert_close(down.sum(-1), torch.ones(down.shape[:-1]))


def test_rounding_of_floats_adds_no_key():
    for keep_rate, total, budget in ((0.1, 30, 3), (0.7, 10, 7), (0.07, 100, 7), (1 / 3, 9, 3), (0.35, 20, 7)):
        assert Sparsifiner.budget_of({"budget": None, "keep_rate": keep_rate}, total) == budget
    printed = {0.9: 178, 0.8: 158, 0.7: 138, 0.6: 119, 0.5: 99, 0.4: 79, 0.3: 60, 0.2: 40, 0.1: 20, 0.05: 10, 0.01: 2}
    for keep_rate, budget in printed.items():  # Table 2
        assert Sparsifiner.budget_of({"budget": None, "keep_rate": keep_rate}, 197) == budget


def test_a_budget_says_the_same_as_a_keep_rate():
    q, k, v = inputs()
    by_rate, by_budget = make_attention(keep_rate=0.3), make_attention(budget=4)
    assert attend(by_rate, q, k, v, GRID, 1)[0].equal(attend(by_budget, q, k, v, GRID, 1)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_largest_indices_of_equal_values_are_the_first(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-2, 3, (50, 40), generator=generator).to(dtype)
    values[:, ::7] = -math.inf
    values[:, 3] = -0.0
    for count in (1, 7, 40):
        rows = [sorted(range(40), key=lambda t: (-row[t], t))[:count] for row in values.tolist()]
        own = largest_indices(values, count).sort(-1).values
        assert torch.equal(own, torch.tensor(rows).sort(-1).values)


@pytest.mark.parametrize("own_basis", [False, True])
def test_images_are_predicted_one_by_one_where_all_scores_would_be_many(own_basis, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    coefficients = torch.rand(3, 2, 12, 4, generator=generator, dtype=torch.float64)
    basis = torch.randn(*((3, 1) if own_basis else ()), 4, 12, generator=generator, dtype=torch.float64)
    expected = key_selection.predicted_keys(coefficients, basis, 1, 5, 0.3)
    made = []
    whole = key_selection.keys_of_scores
    monkeypatch.setattr(key_selection, "keys_of_scores", lambda s, *rest: made.append(s.shape) or whole(s, *rest))
    monkeypatch.setattr(key_selection, "MOST_SCORES", 3 * 2 * 12 * 12 - 1)
    assert torch.equal(key_selection.predicted_keys(coefficients, basis, 1, 5, 0.3), expected)
    assert made == [(1, 2, 12, 12)] * 3


def test_keep_rate_1_is_dense_bit_for_bit():
    q, k, v = (tensor.float() for tensor in inputs())
    attention = make_attention(keep_rate=1)
    out, _ = attend(attention, q, k, v, GRID, 1)
    assert out.equal(F.scaled_dot_product_attention(q, k, v, scale=WIDTH**-0.5))
    assert prior_pruning_ratio(attention.prior, LayerKey(HEADS, GRID), 1, WIDTH) == 0
    assert Sparsifiner.other_multiply_adds(attention.prior["predictor"], HEADS, WIDTH, 12, 1) == 0


def test_without_a_prefix_a_patch_without_scores_sees_itself():
    attention = make_attention(num_down=3)
    torch.nn.init.zeros_(attention.predictor.w_up)
    q, k, v = inputs(prefix=0)
    for backend in ("reference", "sdpa", "gather"):
        out, _ = attend(attention, q, k, v, GRID, 0, backend=backend)
        torch.testing.assert_close(out, v, rtol=0, atol=1e-12)


# ---- what learns -----------------------------------------------------------------------------------------------------


def test_start_passes_the_threshold_and_has_a_gradient():
    for grid in ((14, 14), (24, 24), (8, 8), (7, 9)):
        predictor = make_attention(grid=grid, heads=3, head_dim=16, noise=0).predictor.float()
        predictor.reset_parameters()
        attention = PriorAttention(3, resolve_prior("sparsifiner", 3, grid), head_dim=16)
        assert predictor.w_down.equal(attention.predictor.w_down) and predictor.w_up.equal(attention.predictor.w_up)
        q, k, _ = (t.float() for t in inputs(tokens=grid[0] * grid[1], heads=3, width=16))
        plan = attention.plan(grid, 1)
        assert (predictor.coefficients(make_request(q, k, 0.25, plan)) > 0.05).float().mean() > 0.05
        assert (predictor.w_up != 0).all()
        predictor.scores(make_request(q, k, 0.25, plan)).square().mean().backward()
        assert all((parameter.grad.abs().amax(1) > 0).all() for parameter in predictor.parameters())


def test_nothing_leads_from_the_output_to_the_predictor_but_from_the_scores():
    attention = make_attention().train()
    q, k, v = inputs()
    for backend in ("reference", "sdpa", "gather"):
        attend(attention, q, k, v, GRID, 1, backend=backend)[0].sum().backward()
        assert all(parameter.grad is None for parameter in attention.predictor.parameters())
    scores = []
    attention.predictor.recorder = scores.append
    attend(attention, q, k, v, GRID, 1)
    scores[0].square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in attention.predictor.parameters())


def test_scores_have_the_right_gradient():
    attention = make_attention(num_down=3, threshold=0.2)
    predictor, plan = attention.predictor, attention.plan(GRID, 1)
    q, k, _ = inputs(batch=1)
    for name in ("w_down", "w_up"):
        weight = getattr(predictor, name)
        kept = (weight != 0) | (name == "w_down")

        def scores(values, name=name, kept=kept):
            weights = {f"own.{name}": values * kept}
            return torch.func.functional_call(_Scores(predictor), weights, (q, k, plan))

        assert torch.autograd.gradcheck(scores, (weight.detach().clone().requires_grad_(),), atol=1e-6)


class _Scores(torch.nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, q, k, plan):
        return self.own.scores(make_request(q, k, WIDTH**-0.5, plan))


def test_dropped_weights_stay_dropped():
    attention = make_attention(num_down=4, up_threshold=0.2, noise=0.3)
    predictor, plan = attention.predictor, attention.plan(GRID, 1)
    before = predictor.w_up.detach().clone()
    predictor.prune()
    assert torch.equal(predictor.w_up, torch.where(before.abs() > 0.2, before, 0.0))
    zeros = predictor.w_up == 0
    q, k, _ = inputs()
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=0.1, weight_decay=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        (predictor.scores(make_request(q, k, 1.0, plan)) - 1).square().mean().backward()
        optimizer.step()
    assert torch.equal(predictor.w_up == 0, zeros) and 0.3 < zeros.double().mean() < 1
    assert not torch.equal(predictor.w_up, before)


def test_dense_while_it_trains_alone():
    attention = make_attention().train()
    q, k, v = inputs()
    dense = F.scaled_dot_product_attention(q, k, v, scale=WIDTH**-0.5)
    attention.predictor.dense_in_training = True
    assert attend(attention, q, k, v, GRID, 1)[0].equal(dense)
    attention.eval()
    assert not torch.allclose(attend(attention, q, k, v, GRID, 1)[0], dense)


# ---- other grids, some of the patches --------------------------------------------------------------------------------


def test_other_grids_have_the_weights_interpolated():
    attention = PriorAttention(1, resolve_prior("sparsifiner", 1, (14, 14)), head_dim=4)
    predictor = attention.predictor
    fine = predictor.sparse_basis((28, 28))
    torch.testing.assert_close(fine.sum(1), predictor.w_up.sum(1), rtol=0.06, atol=0)  # the blobs are smooth
    # Averages of 2x2 patches of the finer one are the coarser one, but for its edges.
    again = F.avg_pool2d(fine.view(1, -1, 28, 28), 2)[0].flatten(1) * 4
    assert F.cosine_similarity(again, predictor.w_up, dim=1).min() > 0.97
    with torch.no_grad():
        predictor.w_up.view(-1, 14, 14)[:, :7] = 0.0
    assert (predictor.sparse_basis((28, 28)).view(-1, 28, 28)[:, :13] == 0).all()
    assert (predictor.sparse_basis((28, 28)).view(-1, 28, 28)[:, 15:] != 0).any()
    q, k, v = (t.float() for t in inputs(tokens=20 * 11, heads=1, width=4))
    attention.train(False)
    _, weights = attend(attention, q, k, v, (20, 11), 1, need_weights=True)
    assert (weights[:, :, 0] > 0).all() and (weights[..., 0] > 0).all()
    patches = (weights[:, :, 1:, 1:] > 0).sum(-1)
    assert patches.max() == math.ceil(0.25 * 221)


def test_some_patches_are_the_whole_grid_without_the_others():
    attention = make_attention(num_down=4, keep_rate=0.3, threshold=0.2)
    predictor, plan, scale = attention.predictor, attention.plan(GRID, 1), WIDTH**-0.5
    q, k, v = inputs(tokens=7)
    ids = torch.tensor([[0, 2, 3, 5, 8, 9, 11], [1, 2, 4, 6, 7, 10, 11]])
    arrays = as_arrays(q, k, v)
    for image, own in enumerate(ids):
        down, up = (weight.detach()[:, own].numpy() for weight in (predictor.w_down, predictor.w_up))
        single = [array[image : image + 1] for array in arrays]
        scores = brute_scores(*(array[:, :, 1:] for array in single[:2]), down, up, 0.2, scale)
        # B stays that of the whole grid: ceil(0.3 * 13) = 4.
        expected, _ = brute_attention(*single, scores, 4, 1, True, scale)
        for backend in ("reference", "sdpa", "gather"):
            out, _ = attend(attention, q, k, v, GRID, 1, token_ids=ids, backend=backend)
            np.testing.assert_allclose(out[image].detach().numpy(), expected[0], rtol=0, atol=1e-12)
    everything = torch.arange(12).expand(2, -1)
    whole = inputs()
    own = predictor.scores(make_request(*whole[:2], scale, plan, everything))
    torch.testing.assert_close(own, predictor.scores(make_request(*whole[:2], scale, plan)), rtol=0, atol=1e-14)


def test_half_precision_predicts_in_float32():
    attention = make_attention(num_down=4).float()
    q, k, _ = (tensor.to(torch.bfloat16) for tensor in inputs())
    plan = attention.plan(GRID, 1)
    expected = attention.predictor.scores(make_request(q.float(), k.float(), WIDTH**-0.5, plan))
    assert attention.predictor.scores(make_request(q, k, WIDTH**-0.5, plan)).equal(expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention.predictor.scores(make_request(q.float(), k.float(), WIDTH**-0.5, plan)).equal(expected)


def test_together_with_a_decay():
    prior = resolve_prior({"predictor": {"name": "sparsifiner", "budget": 3}, "decay": "violin"}, HEADS, GRID)
    attention = PriorAttention(HEADS, prior, head_dim=WIDTH).double().eval()
    torch.nn.init.constant_(attention.decay_bias.beta, 1.0)
    q, k, v = inputs()
    out, weights = attend(attention, q, k, v, GRID, 1, backend="reference", need_weights=True)
    kept = (weights > 0).sum(-1)[:, :, 1:]
    assert kept.max() == 4 and (kept == 4).double().mean() > 0.9  # few rows have no coefficient above tau
    torch.testing.assert_close(attend(attention, q, k, v, GRID, 1, backend="gather")[0], out, rtol=0, atol=1e-12)


# ---- the choice of how to attend -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "budget", "chosen"), [(14, 2, "sdpa"), (24, 144, "sdpa"), (24, 6, "gather")])
def test_lists_are_gathered_where_that_was_faster(side, budget, chosen, caplog, monkeypatch):
    monkeypatch.setattr(compiled_kernels, "INSTALLED_VERSION", None)  # as in a saved model without the package
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)
    caplog.set_level("DEBUG", "hf_sparseprior.ops")
    prior = resolve_prior({"predictor": {"name": "sparsifiner", "budget": budget}}, 1, (side, side))
    attention = PriorAttention(1, prior, head_dim=4).eval()
    q, k, v = (tensor.detach().float() for tensor in inputs(tokens=side**2, heads=1, width=4))
    with torch.no_grad():
        attend(attention, q, k, v, (side, side), 1)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith(f"layer 0: {chosen} ({side**2} patches, up to {budget + 1} keys of each listed")
    limits = BACKENDS["gather"].crossovers["cpu", False, "sdpa"]
    if chosen == "sdpa":
        few = f"dense is faster below {limits.tokens} patches"
        many = f"dense is faster with more than {100 * limits.density:.1f} % of the pairs"
        assert f"not gather: {few if side == 14 else many}" in message


def test_explain_says_what_is_kept_and_what_it_costs(capsys):
    assert main(["explain", "sparsifiner", "--heads", "6", "--set", "budget=50", "--no-picture"]) == 0
    text = capsys.readouterr().out
    assert "budget=50" in text and f"{197 + 196 * 51} of {197**2} a head" in text
    others = 12 * (2 * 32 * 196 * 384 + 6 * 32 * 196**2) / 1e9
    assert f"{others:.4f} G besides them, dense 0.3577 G" in text


@pytest.mark.parametrize("name", ["linformer", "topk", "efficient"])
def test_explain_knows_predictors_and_mixers(name, capsys):
    assert main(["explain", name, "--set", "pruning_ratio=90", "--no-picture"]) == 0
    ratio = float(re.search(r"pruning ratio  ([\d.]+) %", capsys.readouterr().out)[1])
    assert ratio == pytest.approx(90, abs=0.8)  # whole keys, and the class token's column


# ---- models ----------------------------------------------------------------------------------------------------------

SIZES = {
    "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "initializer_range": 0.4,
}  # fmt: skip


def make_model(**settings):
    torch.manual_seed(0)
    prior = {"predictor": {"name": "sparsifiner", "num_down": 4, "keep_rate": 0.3, **settings}}
    return sp.SparsePriorViTForImageClassification(sp.SparsePriorViTConfig(prior=prior, **SIZES)).eval()


def test_a_dense_checkpoint_gets_a_fresh_predictor(tmp_path):
    torch.manual_seed(0)
    sp.SparsePriorViTForImageClassification(sp.SparsePriorViTConfig(**SIZES)).save_pretrained(tmp_path)
    model = sp.SparsePriorViTForImageClassification.from_pretrained(tmp_path, prior="sparsifiner")
    fresh = Sparsifiner(2, 8, **model.config.prior["predictor"])
    for layer in model.vit.layers:
        assert layer.attention.predictor.w_down.equal(fresh.w_down)
        assert layer.attention.predictor.w_up.equal(fresh.w_up)


@pytest.mark.filterwarnings("ignore")
def test_compiled_and_exported():
    model, pixels = make_model(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(pixels).logits
        exported = torch.export.export(model, (pixels,)).module()(pixels).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)(pixels).logits
    torch.testing.assert_close(exported, expected)
    torch.testing.assert_close(compiled, expected)


def test_weight_decay_is_the_l2_of_eq_11():
    model = make_model()
    assert not {name for name in model.no_weight_decay() if "predictor" in name}
    assert all(
        parameter.dim() == 2 for layer in model.vit.layers for parameter in layer.attention.predictor.parameters()
    )


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_rate": 0}, "sparsifiner: keep_rate=0 must be above 0 and at most 1"),
        ({"keep_rate": 1.5}, "keep_rate=1.5 must be above 0 and at most 1"),
        ({"keep_rate": True}, "keep_rate=True must be above 0"),
        ({"keep_rate": float("nan")}, "keep_rate=nan must be above 0"),
        ({"budget": 0}, "sparsifiner: budget=0 must be an integer of 1 or more"),
        ({"budget": 2.5}, "budget=2.5 must be an integer"),
        ({"budget": 13}, "budget=13 must be at most the 12 patches of a 3x4 grid"),
        ({"keep_rate": 0.5, "budget": 3}, "keep_rate=0.5 and budget=3 cannot both be given"),
        ({"num_down": 0}, "num_down=0 must be an integer of 1 or more"),
        ({"threshold": -0.1}, "threshold=-0.1 must be from 0 to 1"),
        ({"up_threshold": -1}, "up_threshold=-1 must be 0 or more"),
        ({"renormalise": 1}, "renormalise=1 must be True or False"),
        ({"grid": [3]}, r"grid=\[3\] must be \(height, width\) in patches"),
        ({"tau": 0.1}, "predictor 'sparsifiner' has no setting 'tau'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        resolve_prior({"predictor": {"name": "sparsifiner", **settings}}, HEADS, GRID)


def test_what_does_not_go_with_a_predictor():
    support = {"name": "dense", "mask_fill": "zero"}
    with pytest.raises(ValueError, match="leaves keys out whole; mask_fill='zero' must be 'neg_inf'"):
        resolve_prior({"support": support, "predictor": "sparsifiner"}, HEADS, GRID)
    with pytest.raises(ValueError, match="support='fibottention' must be 'dense'"):
        resolve_prior("fibottention+sparsifiner", HEADS, GRID)
