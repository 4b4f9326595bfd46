from itertools import cycle, product

import pytest

from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import MASK_FILLS
from tests.hf_sparseprior.attention.attention_cases import (
    ON_DIAGONALS,
    SHIPPED_SUPPORTS,
    call,
    largest_tensor,
    make_leaves,
    make_plan,
)

VARIANTS = [None, *((name, True, True) for name in DECAYS)]


@pytest.mark.parametrize(
    ("name", "mask_fill", "variant"),
    [(*case, variant) for case, variant in zip(product(ON_DIAGONALS, MASK_FILLS), cycle(VARIANTS))],
)
def test_the_diagonal_path_makes_no_tensor_of_all_pairs(name, variant, mask_fill):
    plan = make_plan(name, (32, 32))
    columns = max(len(own) for own in plan.offsets) * 2
    # A head's logits, or a sixteenth of all pairs.
    most = max(1024 * 1024 / 16, 1024 * (columns + 2))
    assert largest_tensor("diagonal", {"name": name, "mask_fill": mask_fill}, variant) < most
    assert name not in SHIPPED_SUPPORTS or most == 1024 * 1024 / 16


def test_the_measure_of_memory_sees_a_tensor_of_all_pairs():
    assert largest_tensor("reference", "fibottention", None, side=16) >= 2 * 257 * 257


def test_the_diagonal_path_keeps_no_mask():
    plan = make_plan("fibottention", (8, 8), decay="violin")
    leaves = make_leaves((8, 8), 1, ("violin", True, False))
    decay = {**plan.decay, "alpha": leaves["alpha"], "beta": leaves["beta"]}
    run_plan(AttentionRequest(leaves["q"], leaves["k"], leaves["v"], plan, decay), backend="diagonal")
    assert [name for name, _ in plan.tables] == ["positions"]


def test_dropout_with_zero_fill_goes_to_the_reference():
    leaves = make_leaves((16, 16), 0, batch=1)
    support = {"name": "fibottention", "mask_fill": "zero"}
    with pytest.raises(ValueError, match="backend='diagonal' cannot run this attention: dropout with mask_fill='zero'"):
        call(leaves, support, None, (16, 16), 0, backend="diagonal", dropout_p=0.1)
    call(leaves, support, None, (16, 16), 0, dropout_p=0.1)
