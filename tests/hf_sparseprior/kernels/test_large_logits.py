"""Gradients at logits from 10 to 10^10 in float32 against `reference` in float64."""

import math

import pytest
import torch

DECADES = [10.0**power for power in range(1, 11)]
LISTS = {"name": "random", "pruning_ratio": 60.0}
SUPPORTS = ["dense", "fibottention", {"name": "fibottention", "mask_fill": "zero"}, LISTS]
CASES = [(support, decay) for support in SUPPORTS for decay in (None, "violin") if (support, decay) != ("dense", None)]
GRID = (3, 3)


def assert_close(own, expected, what):
    for name, value in expected.items():
        assert own[name].isfinite().all(), (name, *what)
        difference = (own[name].double() - value).abs().max().item()
        assert difference <= 1e-4 * max(0.01, value.abs().max().item()), (name, difference, *what)


def sizes(kernels):
    """Sizes of logits and numbers of prefix tokens; in Triton's interpreter, which takes a second for each, a few."""
    if kernels.backend == "cpp" or kernels.native:
        return [(size, prefix) for size in DECADES for prefix in (0, 2)]
    return [(1e2, 2), (1e4, 0), (1e10, 2)]


def check_decided(kernels, support, decay, source):
    """Every row has one key with all the weight: gradients of its logits are exactly 0, whatever they are times."""
    for size, prefix in sizes(kernels):
        if size < 1e3:
            continue
        for seed in range(200):  # until all rows are so
            leaves = kernels.make(GRID, prefix, width=20, decay=decay, seed=seed)
            leaves[source] = leaves[source] * size
            expected = kernels.run(leaves, support, decay, GRID, prefix, torch.float64, backend="reference")
            others = [value for name, value in expected.items() if name not in ("out", "v")]
            if decided := max(value.abs().max() for value in others) < 1e-10:
                break
        assert decided
        assert_close(kernels.run(leaves, support, decay, GRID, prefix), expected, (size, prefix, source))


def check_ties(kernels, support, decay):
    """Every third key is the same, so that it shares its weight; all products are exact in float32, and M is 1."""
    for size, prefix in sizes(kernels):
        leaves = kernels.make(GRID, prefix, width=16, decay=decay)
        tokens, generator = prefix + 9, torch.Generator().manual_seed(0)
        draws = {name: torch.randint(-3, 4, (1, 2, tokens, 16), generator=generator) for name in "qk"}
        leaves["q"] = (draws["q"] * 2.0 ** (round(math.log2(size)) - 4)).to(kernels.device)
        leaves["k"] = draws["k"][:, :, torch.arange(tokens) % 3].float().to(kernels.device)
        if decay is not None:
            leaves.update({name: torch.full_like(leaves[name], 200.0) for name in ("beta", "prefix_beta")})
            leaves["alpha"] = torch.ones_like(leaves["alpha"])
        own = kernels.run(leaves, support, decay, GRID, prefix)
        expected = kernels.run(leaves, support, decay, GRID, prefix, torch.float64, backend="reference")
        assert expected["k"].abs().max() > size / 1000
        # The gradients of the decay's scalars are sums of terms as large as the logits, which cancel.
        assert_close(own, {name: expected[name] for name in ("out", *"qkv")}, (size, prefix))


every_case = pytest.mark.parametrize(("support", "decay"), CASES, ids=str)
triton_cases = pytest.mark.parametrize(("support", "decay"), [case for case in CASES if case[0] is not LISTS], ids=str)


@every_case
def test_cpp_where_one_key_has_all_the_weight(cpp, support, decay):
    for source in ("q", "alpha")[: 1 if decay is None else 2]:
        check_decided(cpp, support, decay, source)


@every_case
def test_cpp_where_logits_are_equal(cpp, support, decay):
    check_ties(cpp, support, decay)


@triton_cases
def test_triton_where_logits_are_equal(kernels, support, decay):
    check_ties(kernels, support, decay)


@pytest.mark.slow
@triton_cases
def test_triton_where_one_key_has_all_the_weight(kernels, support, decay):
    for source in ("q", "alpha")[: 1 if decay is None else 2]:
        check_decided(kernels, support, decay, source)


def check_overflow(kernels, side, keys):
    """Finite numbers whose products with the first `keys` patches are -inf, for the prefix token and two patches.

    A prefix row sees only such keys in its first piece, and finite logits in the next.
    """
    for mask_fill in ("neg_inf", "zero"):
        leaves = kernels.make((side, side), 1, width=16)
        leaves["q"][..., 0], leaves["q"][:, :, [0, 5, 6], 0], leaves["k"][:, :, 1 : 1 + keys, 0] = 0.0, -1e30, 1e30
        support = {"name": "fibottention", "mask_fill": mask_fill}
        own, expected = (
            kernels.run(leaves, support, None, (side, side), 1, backend=backend)
            for backend in (kernels.backend, "reference")
        )
        assert expected["out"].isfinite().all()
        assert_close(own, {name: expected[name].double() for name in ("out", "v")}, mask_fill)


def test_cpp_where_products_overflow(cpp):
    check_overflow(cpp, 17, 256)


def test_triton_where_products_overflow(kernels):
    check_overflow(kernels, 6, 20)
