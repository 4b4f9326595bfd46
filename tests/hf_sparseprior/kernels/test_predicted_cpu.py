"""The C++ kernel of Sparsifiner's keys against loops in exact arithmetic, and against PyTorch."""

import random

import pytest
import torch

from hf_sparseprior.attention import compiled_kernels
from hf_sparseprior.attention.request import AttentionRequest, listed_mask
from hf_sparseprior.kernels import diagonal_cpu, predicted_cpu
from hf_sparseprior.priors.layer import SparsePriorAttention
from hf_sparseprior.priors.prior import resolve_prior

PRIOR = {"predictor": {"name": "sparsifiner", "keep_rate": 0.1}}


@pytest.fixture(autouse=True)
def kernels_are_there():
    if reason := diagonal_cpu.ready():
        pytest.skip(reason)


def exact(batch, heads, patches, rows, seed, density=1.0):
    """Coefficients and basis of few bits: sums of their products are exact in any order, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    coefficients = torch.randint(0, 8, (batch, heads, patches, rows), generator=generator).float() / 16
    basis = torch.randint(-3, 4, (rows, patches), generator=generator).float() / 4
    return coefficients, basis * (torch.rand(basis.shape, generator=generator) < density)


def keys_by_hand(coefficients, basis, prefix, budget, threshold):
    lists = []
    patches = basis.shape[1]
    for number, row in enumerate(coefficients.reshape(-1, basis.shape[0]).tolist()):
        scores = [0.0] * patches
        for coefficient, weights in zip(row, basis.tolist(), strict=True):
            if coefficient > threshold:
                scores = [score + coefficient * weight for score, weight in zip(scores, weights, strict=True)]
        largest = sorted(range(patches), key=lambda p: (-scores[p], p))[:budget]
        chosen = sorted(patch for patch in largest if scores[patch] != 0)
        if not prefix and not chosen:
            chosen = [number % patches]
        lists.append([*range(prefix), *(prefix + patch for patch in chosen), *[-1] * (budget - len(chosen))])
    return torch.tensor(lists, dtype=torch.int32).view(*coefficients.shape[:3], prefix + budget)


@pytest.mark.parametrize("density", [1.0, 0.3, 0.02])
def test_agrees_with_loops(density):
    values = random.Random(density)
    for seed in range(40):
        patches = values.choice([1, 2, 5, 15, 16, 17, 33, 70])
        rows, prefix, budget = values.choice([1, 3, 32]), values.randint(0, 2), values.randint(1, patches)
        coefficients, basis = exact(values.randint(1, 2), 2, patches, rows, seed, density)
        found = predicted_cpu.predicted_keys(coefficients, basis, prefix, budget, 0.1)
        assert torch.equal(found, keys_by_hand(coefficients, basis, prefix, budget, 0.1))


@pytest.mark.parametrize("patches", [196, 1024])
def test_real_scores_are_among_the_largest(patches):
    generator = torch.Generator().manual_seed(0)
    coefficients = torch.softmax(3 * torch.randn(2, 3, patches, 32, generator=generator), -1)
    basis = torch.randn(32, patches, generator=generator)
    scores = torch.where(coefficients > 0.05, coefficients, 0.0).double() @ basis.double()
    for budget in (1, 2, patches // 4, patches - 1, patches):
        keys = predicted_cpu.predicted_keys(coefficients, basis, 1, budget, 0.05).long()
        assert (keys[..., 1:] > 0).all() and (keys.diff(dim=-1) > 0).all()
        least = scores.topk(budget).values[..., -1:]
        assert (scores.gather(-1, keys[..., 1:] - 1) >= least - 1e-5).all()


def test_scores_of_all_sizes_and_signs():
    """One coefficient of 1: the scores are the basis itself, equal ones and the limits of float32 among it."""
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    basis = torch.tensor([[-huge, -1.0, -tiny, -0.0, 0.0, tiny, 1.0, 1.0, 1.0, huge, torch.inf, torch.nan]])
    coefficients = torch.ones(1, 1, basis.shape[1], 1)
    order = [10, 9, 6, 7, 8, 5, None, None, None, 2, 1, 0]  # zeros and NaN take a place, and are no key
    for budget in range(1, 13):
        keys = predicted_cpu.predicted_keys(coefficients, basis, 0, budget, 0.5)[0, 0, 3].tolist()
        chosen = sorted(place for place in order[:budget] if place is not None)
        assert keys == chosen + [-1] * (budget - len(chosen))


def test_threads_and_runs_give_the_same():
    coefficients, basis = exact(2, 3, 300, 32, 5)
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(predicted_cpu.predicted_keys(coefficients, basis, 1, 20, 0.05))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_an_empty_batch_and_strides():
    coefficients, basis = exact(2, 3, 20, 8, 1)
    assert predicted_cpu.predicted_keys(coefficients[:0], basis, 1, 4, 0.05).shape == (0, 3, 20, 5)
    expected = predicted_cpu.predicted_keys(coefficients, basis, 1, 4, 0.05)
    strided = coefficients.transpose(1, 3).contiguous().transpose(1, 3)
    assert torch.equal(predicted_cpu.predicted_keys(strided, basis.t().contiguous().t(), 1, 4, 0.05), expected)


def test_bad_inputs_give_one_line():
    coefficients, basis = exact(1, 2, 20, 8, 1)
    arguments = {"coefficients": coefficients, "basis": basis, "num_prefix_tokens": 1, "budget": 4, "threshold": 0.05}
    for change, message in (
        ({"budget": 0}, "budget=0 1 to the 20 patches"),
        ({"budget": 21}, "budget=21 1 to the 20 patches"),
        ({"num_prefix_tokens": -1}, "prefix=-1 must be 0 or more"),
        ({"basis": torch.zeros(8, 19)}, r"must be float32 \(batch, heads, patches, rows\) and \(rows, patches\)"),
        ({"basis": torch.zeros(8, 20, dtype=torch.float64)}, "must be float32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            predicted_cpu.predicted_keys(**{**arguments, **change})


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_the_layer_predicts_by_the_kernel_what_pytorch_predicts(prefix, monkeypatch):
    torch.manual_seed(0)
    layer = SparsePriorAttention(32, 2, resolve_prior(PRIOR, 2, (12, 12))).eval()
    hidden = torch.randn(2, prefix + 144, 32)
    seen = []
    layer.predictor.register_forward_hook(lambda module, inputs, keys: seen.append(keys))
    with torch.no_grad():
        out, _ = layer(hidden, (12, 12), prefix)
        monkeypatch.setattr(compiled_kernels, "INSTALLED_VERSION", None)
        expected, _ = layer(hidden, (12, 12), prefix)
    assert seen[0].dtype == torch.int32 and seen[1].dtype == torch.int64
    masks = [listed_mask(keys, prefix, prefix + 144) for keys in seen]
    assert torch.equal(*masks)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_no_table_of_all_pairs():
    from tests.hf_sparseprior.attention.attention_cases import LargestTensor

    torch.manual_seed(0)
    layer = SparsePriorAttention(
        32, 2, resolve_prior({"predictor": {"name": "sparsifiner", "keep_rate": 0.01}}, 2, (32, 32))
    )
    hidden = torch.randn(1, 1025, 32)
    with torch.no_grad(), LargestTensor() as largest:
        layer.eval()(hidden, (32, 32), 1, backend="cpp")
    assert largest.elements < 1024 * 1024 / 8


def test_compiled_and_exported():
    torch.manual_seed(0)
    layer = SparsePriorAttention(32, 2, resolve_prior(PRIOR, 2, (6, 6))).eval()
    hidden = torch.randn(2, 37, 32)
    with torch.no_grad():
        expected = layer(hidden, (6, 6), 1, backend="cpp")[0]
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(hidden, (6, 6), 1, backend="cpp")[0], expected)
        exported = torch.export.export(layer, (hidden, (6, 6), 1), {"backend": "cpp"}).module()
        torch.testing.assert_close(exported(hidden, (6, 6), 1, backend="cpp")[0], expected)


def test_half_precision_scores_in_float32():
    torch.manual_seed(0)
    layer = SparsePriorAttention(32, 2, resolve_prior(PRIOR, 2, (6, 6))).to(torch.bfloat16).eval()
    seen = []
    layer.predictor.register_forward_hook(lambda module, inputs, keys: seen.append(keys))
    with torch.no_grad():
        layer(torch.randn(2, 37, 32, dtype=torch.bfloat16), (6, 6), 1)
    assert seen[0].dtype == torch.int32


# ---- coefficients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "rows", "prefix", "dtype"),
    [
        (64, 32, 1, torch.float32),
        (64, 32, 0, torch.bfloat16),
        (5, 1, 2, torch.float32),
        (33, 3, 1, torch.float32),
        (16, 50, 0, torch.float32),
    ],
)
def test_coefficients_agree_with_float64(width, rows, prefix, dtype):
    generator = torch.Generator().manual_seed(width + rows)
    q, k = (torch.randn(2, 17 + prefix, 3, width, generator=generator).to(dtype).transpose(1, 2) for _ in range(2))
    down = torch.randn(rows, 17, generator=generator)
    found = predicted_cpu.predicted_coefficients(q, k, down, prefix, 0.3)
    own_q, own_k = (x[:, :, prefix:].double() for x in (q, k))
    expected = torch.softmax(0.3 * own_q @ (down.double() @ own_k).mT, -1)
    assert found.dtype == torch.float32 and found.shape == (2, 3, 17, rows)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    torch.library.opcheck(torch.ops.hf_sparseprior.predicted_coefficients.default, (q, k, down, prefix, 0.3))


def test_a_layer_takes_its_coefficients_from_the_kernel():
    layer = SparsePriorAttention(12, 3, resolve_prior(PRIOR, 3, (5, 5)))
    q, k = (torch.randn(2, 26, 3, 4).transpose(1, 2) for _ in range(2))
    request = AttentionRequest(q, k, q, layer.plan((5, 5), 1))
    found = layer.predictor._compiled_coefficients(request)
    torch.testing.assert_close(found, layer.predictor.coefficients(request), rtol=1e-4, atol=1e-6)
    assert layer.predictor._compiled_coefficients(request._replace(q=q.double(), k=k.double())) is None


def test_coefficients_of_what_does_not_fit_are_refused():
    q = torch.zeros(1, 2, 9, 4)
    arguments = {"q": q, "k": q, "down": torch.zeros(3, 9), "num_prefix_tokens": 0, "scale": 1.0}
    for change, message in (
        ({"k": torch.zeros(1, 2, 8, 4)}, "k of shape"),
        ({"down": torch.zeros(3, 8)}, "of 9 patches"),
        ({"down": torch.zeros(0, 8)}, "must be float32"),
        ({"num_prefix_tokens": 9}, "9 prefix tokens"),
    ):
        with pytest.raises(RuntimeError, match=message):
            predicted_cpu.predicted_coefficients(**{**arguments, **change})
