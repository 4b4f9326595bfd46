import dataclasses

import pytest
import torch

from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import SUPPORTS, has_pairs
from tasks.benchmark import contenders, window_contenders
from tasks.benchmark.commands import LAYOUTS
from tasks.benchmark.contenders import Setting, Size, make_problem
from tasks.benchmark.timing import traced_bytes
from tests.each import each

pytestmark = pytest.mark.slow

DIAGONAL = [name for name in SUPPORTS if name != "dense" and not has_pairs(name)]
DOUBLE = Setting(heads=3, width=4, dtype=torch.float64)


def reference(problem):
    return run_plan(contenders.make_request(problem), backend="reference")[0]


SUPPORTED = [{"name": "fibottention", "w_min": 1, "w_max": 299, "modified": True}, *DIAGONAL]
SIZES = [(0, 300), (2, 256), (0, 3), (1, 127)]  # prefix tokens and patches


@each("support, size", [(support, SIZES[index % len(SIZES)]) for index, support in enumerate(SUPPORTED)])
def test_flex_mask_is_the_support(support, size):
    prefix, tokens = size
    problem = make_problem(dataclasses.replace(DOUBLE, support=support, prefix=prefix), Size(tokens, 1), trains=False)
    mask = torch.from_numpy(problem.plan.build_table("mask"))
    block_mask = contenders.flex_mask(problem.plan, torch.device("cpu"))
    total = torch.arange(problem.plan.total)
    heads = torch.arange(3).view(-1, 1, 1)
    assert block_mask.mask_mod(torch.tensor(0), heads, total[:, None], total[None]).equal(mask)
    # No attended pair in a block that is skipped.
    visited = block_mask.to_dense()[0].bool().repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert not (mask & ~visited[:, : len(total), : len(total)]).any()


def test_flex_runs_and_is_right():
    setting = Setting(heads=2, width=16, prefix=1)
    problem = make_problem(setting, Size(200, 2), trains=False)
    call = contenders.timed_call(problem, contenders.contenders()["flex_offsets"], trains=False)
    torch.testing.assert_close(call(), reference(problem), rtol=0, atol=1e-5)


CASES = [
    ("fibottention", None, 0),
    ("fibottention", None, 2),
    ({"name": "window", "w": 2, "mask_fill": "zero"}, None, 1),
    ("dense", None, 1),
    *(("fibottention", {"name": name, "learn_prefix": learned}, 1) for name in DECAYS for learned in (True, False)),
    ("dense", "violin", 0),
    ({"name": "bigbird", "order": "hilbert"}, None, 1),
    ({"name": "fibottention", "order": ["snake", "raster", "peano_t"]}, "violin", 1),
]


@each("support, decay, prefix", CASES)
def test_expected_rows_equal_reference(support, decay, prefix):
    setting = dataclasses.replace(DOUBLE, support=support, decay=decay, prefix=prefix)
    problem = make_problem(setting, Size(30, 2), trains=True)
    rows = torch.tensor([0, 7, 29 + prefix])
    own = {leaf: leaf.detach().clone().requires_grad_() for leaf in problem.leaves}
    expected = contenders.expected_rows(problem, rows, own, dense=False)
    torch.testing.assert_close(expected, reference(problem)[:, :, rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("layout", "tokens"), zip(LAYOUTS, (300, 16, 16), strict=True))
def test_every_contender_that_can_run_is_right(layout, tokens):
    """`timed_call` raises for a wrong output or gradient."""
    for decay in (None, "violin"):
        problem = make_problem(Setting(heads=2, width=16, decay=decay, layout=layout), Size(tokens, 1), trains=True)
        ran = set()
        for name, contender in contenders.contenders().items():
            if name != "flex_offsets" and contender.can_run(problem, True) is None:
                gradients = contenders.timed_call(problem, contender, trains=True)()
                assert gradients[0].shape == problem.q.shape
                ran.add(name)
        assert {"reference", "diagonal", contenders.DENSE} <= ran
        assert "gather" in ran and ("sdpa" in ran) == (decay is None)


@each("tokens", [16, 300])
def test_wrong_outputs_and_gradients_are_caught(tokens):
    problem = make_problem(Setting(heads=2, width=16), Size(tokens, 1), trains=True)

    def shifted(q, k, v):
        return reference(problem) + torch.zeros_like(q).index_fill(2, torch.tensor([tokens - 1]), 1e-2)

    def without_gradient(q, k, v):
        return run_plan(AttentionRequest(q, k.detach() + 0 * k, v, problem.plan), backend="reference")[0]

    contenders.check(problem, lambda q, k, v: reference(problem), trains=True, dense=False)
    with pytest.raises(RuntimeError, match="WRONG: the output differs by 1"):
        contenders.check(problem, shifted, trains=True, dense=False)
    with pytest.raises(RuntimeError, match="WRONG: gradient 1 differs"):
        contenders.check(problem, without_gradient, trains=True, dense=False)


def test_the_kernel_on_float32_runs_next_to_half_precision(monkeypatch):
    wide = contenders.contenders()[contenders.WIDE]
    single, half = (
        make_problem(Setting(heads=2, width=16, dtype=dtype), Size(49, 1), trains=True)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert "float32" in wide.can_run(single, True)
    if reason := wide.can_run(half, True):
        pytest.skip(reason)
    seen, own = [], contenders.run_plan
    monkeypatch.setattr(
        contenders, "run_plan", lambda request, **options: seen.append(request.q.dtype) or own(request, **options)
    )
    gradients = contenders.timed_call(half, wide, trains=True)()
    assert set(seen) == {torch.float32} and all(gradient.dtype == torch.float32 for gradient in gradients)


def test_layouts():
    strides = {
        name: make_problem(Setting(heads=2, width=4, layout=name), Size(9, 1), trains=False).q.stride()
        for name in LAYOUTS
    }
    assert strides == {"projection": (72, 4, 8, 1), "packed": (216, 4, 24, 1), "contiguous": (72, 36, 4, 1)}


@pytest.mark.parametrize("trains", [False, True])
def test_the_copy_bound_allocates_nothing_unless_it_should(trains):
    problem = make_problem(Setting(heads=2, width=4), Size(9, 1), trains)
    size = 4 * problem.q.numel()
    for fresh, expected in ((False, 0), (True, 4 * size if trains else size)):
        assert traced_bytes(contenders.copy_bound(problem, trains, fresh), torch.device("cpu")) == (expected, 0)


def test_contenders_come_from_the_registry(monkeypatch):
    monkeypatch.setitem(BACKENDS, "new", BACKENDS["reference"])
    rivals = set(window_contenders.windows())
    assert set(contenders.contenders()) == {*BACKENDS, contenders.DENSE, contenders.WIDE, "flex_offsets", *rivals}
    monkeypatch.setitem(BACKENDS, "flex_offsets", BACKENDS["reference"])
    with pytest.raises(ValueError, match="flex_offsets"):
        contenders.contenders()


def test_reasons_for_not_running():
    flex = contenders.contenders()["flex_offsets"]
    for setting, reason in (
        (Setting(support="dense"), "the support is dense"),
        (Setting(decay="violin"), "written without a decay"),
        (Setting(support="random"), "the block mask is made from offsets, and the support has other pairs"),
        (Setting(support={"name": "window", "mask_fill": "zero"}), "written for mask_fill='neg_inf', not 'zero'"),
    ):
        problem = make_problem(setting, Size(4, 1), trains=False)
        assert flex.can_run(problem, False) == reason
    assert flex.can_run(make_problem(Setting(), Size(4, 1), True), True) == "FlexAttention has no backward on CPU"
