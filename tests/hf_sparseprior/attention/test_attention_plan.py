import copy
import functools
import gc
import pickle
import weakref
from itertools import accumulate

import pytest
import torch

from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.decay import resolve_decay
from hf_sparseprior.patterns.pattern import SUPPORTS, register_support
from hf_sparseprior.patterns.supports import LayerKey, resolve_support, shared_pattern
from tests.hf_sparseprior.attention.attention_cases import CASES, brute_mask, gradients, make_leaves, make_plan


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("support", CASES)
def test_plans_hold_what_follows_from_the_settings(support, prefix):
    plan = make_plan(support, (3, 5), prefix, decay="violin")
    mask = torch.tensor(brute_mask(support, 3, (3, 5), prefix))
    assert plan.density == pytest.approx(mask.double().mean().item())
    if support["name"] != "dense":
        assert torch.equal(plan_table(plan, "mask", torch.device("cpu")), mask)
    positions = plan_table(plan, "positions", torch.device("cpu"))
    assert positions.shape == (8, 1, 15) and positions.dtype == torch.int64
    again = AttentionPlan.from_key(plan.key)
    assert again.key == plan.key and again.offsets == plan.offsets and again.decay == plan.decay
    assert (again.grid, again.num_prefix_tokens, again.layer) == ((3, 5), prefix, 2)


def test_tables_are_made_once_for_a_device():
    plan = make_plan("fibottention", (4, 4))
    cpu = torch.device("cpu")
    assert plan_table(plan, "mask", cpu) is plan_table(plan, "mask", cpu)
    # Two plans share nothing.
    assert plan_table(plan, "mask", cpu) is not plan_table(make_plan("fibottention", (4, 4)), "mask", cpu)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("support", [case for case in CASES if case.values[0]["name"] != "dense"])
def test_a_mask_that_all_heads_have_is_made_once(support, prefix):
    plan = make_plan(support, (3, 5), prefix)
    mask, narrow = plan.build_table("mask"), plan.build_table("narrow_mask")
    assert (narrow == mask).all() and narrow.shape[1:] == mask.shape[1:]
    if support["name"] in ("window", "neighborhood", "strided"):
        assert len(narrow) == 1
    assert len(narrow) == len(mask) or (mask == mask[:1]).all()


def test_layers_share_large_tables_with_the_same_content():
    resolved = resolve_support({"name": "neighborhood", "window": 3}, 3, 48 * 48, (48, 48))
    drawn = resolve_support("random", 3, 48 * 48)
    cpu = torch.device("cpu")
    first, second = (AttentionPlan(LayerKey(3, (48, 48), layer), 1, resolved) for layer in (0, 1))
    assert plan_table(first, "narrow_mask", cpu) is plan_table(second, "narrow_mask", cpu)
    other = AttentionPlan(LayerKey(3, (48, 48), 1), 1, drawn)
    again = AttentionPlan(LayerKey(3, (48, 48), 2), 1, drawn)
    assert not torch.equal(plan_table(other, "narrow_mask", cpu), plan_table(again, "narrow_mask", cpu))
    kept = weakref.ref(plan_table(first, "narrow_mask", cpu))
    del first, second
    gc.collect()
    assert kept() is None, "it goes with the last plan"


def test_a_support_that_leaves_nothing_out_needs_no_mask():
    support = {"name": "window", "w": 15}
    plan, leaves = make_plan(support, (3, 5)), make_leaves((3, 5), 1, None)
    inputs = (leaves["q"], leaves["k"], leaves["v"])
    out, _ = run_plan(AttentionRequest(*inputs, plan), backend="sdpa")
    assert plan.density == 1.0 and not plan.tables
    torch.testing.assert_close(out, run_plan(AttentionRequest(*inputs, make_plan("dense", (3, 5))), backend="sdpa")[0])
    less = make_plan({"name": "window", "w": 14, "diagonal": False}, (3, 5))
    assert less.density < 1.0


def test_plans_share_positions_only_if_they_see_time_alike():
    """Rows and columns, by "axes" with the frame as a third axis, by "clip" the frame first: written out here."""
    frames, rows, columns = torch.meshgrid(*(torch.arange(side) for side in (2, 3, 5)), indexing="ij")
    expected = {
        "frame": torch.stack([rows, columns]),
        "axes": torch.stack([rows, columns, frames]),
        "clip": torch.stack([frames, rows, columns]),
    }
    decay, support = resolve_decay("manhattan"), resolve_support("dense", 3, 30)
    plans = {time: AttentionPlan(LayerKey(3, (2, 3, 5), 0, time), 1, support, decay) for time in expected}
    for time, plan in plans.items():
        positions = plan_table(plan, "positions", torch.device("cpu"))
        assert torch.equal(positions[0], expected[time].flatten(1)), time
        again = AttentionPlan(LayerKey(3, (2, 3, 5), 1, time), 1, support, decay)
        assert plan_table(again, "positions", torch.device("cpu")) is positions


@pytest.mark.parametrize("backend", ["reference", "diagonal"])
def test_tables_made_under_inference_mode_can_be_trained_with(backend):
    plan = make_plan({"name": "fibottention", "w_min": 3}, (4, 4), decay="violin")
    leaves = make_leaves((4, 4), 1, ("violin", True, False))
    inputs = (leaves["q"], leaves["k"], leaves["v"])
    decay = {**plan.decay, "alpha": leaves["alpha"], "beta": leaves["beta"]}
    with torch.inference_mode():
        first, _ = run_plan(AttentionRequest(*inputs, plan, decay), backend=backend)
    assert plan.tables and not any(table.is_inference() for table in plan.tables.values())
    out, _ = run_plan(AttentionRequest(*inputs, plan, decay), backend=backend)
    assert torch.equal(out, first)
    assert all(grad.abs().max() > 0 for grad in gradients(out, leaves).values())


def test_tables_made_for_fake_tensors_are_not_kept():
    plan = make_plan("fibottention", (4, 4))
    with torch._subclasses.FakeTensorMode():
        assert plan_table(plan, "mask", torch.device("cpu")).shape == (3, 17, 17)
    assert not plan.tables
    assert plan_table(plan, "mask", torch.device("cpu")).any()


@pytest.mark.parametrize("offsets", [[[0], [0, 1, 4], []], [[2], [], [1, 3]], [[], []]])
def test_tables_of_signed_offsets(offsets):
    plan = make_plan("fibottention", (2, 3))
    plan.offsets = offsets
    signed = [[sign * o for o in own for sign in ((1, -1) if o else (1,))] for own in offsets]
    flat = [o for own in signed for o in own]
    lengths = [6 - o for own in offsets for o in own]
    begins = dict(zip([(h, o) for h, own in enumerate(offsets) for o in own], accumulate([0, *lengths]), strict=False))
    for name, expected, dtype in (
        ("signed_offsets", flat, torch.int32),
        ("offset_counts", [len(own) for own in signed], torch.int32),
        ("offset_begin", [0, *accumulate(len(own) for own in signed)], torch.int32),
        ("pair_begin", [begins[h, abs(o)] for h, own in enumerate(signed) for o in own], torch.int64),
    ):
        table = plan_table(plan, name, torch.device("cpu"))
        assert table.dtype == dtype and table.tolist() == expected, name


@pytest.fixture
def counted_support():
    """A support that keeps the grids it was asked for, with pairs that no pickle can hold."""
    asked = []

    @register_support("counted")
    def counted(num_heads, num_tokens):
        asked.append(num_tokens)
        return SUPPORTS["bigbird"].pattern(num_heads, num_tokens, None, {})

    yield asked
    del SUPPORTS["counted"]


def test_all_layers_of_a_model_have_one_pattern(counted_support):
    resolved = resolve_support("counted", 3, 16)
    plans = [AttentionPlan(LayerKey(3, (4, 4), layer), 1, resolved) for layer in range(4)]
    assert counted_support == [16, 16]  # to resolve, and for the plans
    assert len({plan.pairs[0].tobytes() for plan in plans}) == 4, "what is drawn differs from layer to layer"
    AttentionPlan(LayerKey(3, (4, 5)), 1, resolved)
    AttentionPlan(LayerKey(4, (4, 4)), 1, resolved)
    AttentionPlan(LayerKey(3, (4, 4)), 1, {**resolved, "mask_fill": "zero"})
    assert len(counted_support) == 5, "another grid, number of heads or setting has its own"
    pattern = shared_pattern(resolved, 3, (4, 4))
    assert len(counted_support) == 5
    del plans, pattern
    shared_pattern(resolved, 3, (4, 4))
    assert len(counted_support) == 6, "a pattern goes with its last plan"


def test_a_name_that_is_registered_anew_has_a_new_pattern():
    kept = []
    for offset in (1, 2):
        register_support("renewed")(functools.partial(lambda offset, num_heads, num_tokens: [[offset]], offset))
        try:
            kept.append(AttentionPlan(LayerKey(1, (4, 4)), 1, resolve_support("renewed", 1, 16)))
        finally:
            del SUPPORTS["renewed"]
    assert [plan.offsets for plan in kept] == [[[1]], [[2]]]


@pytest.mark.parametrize("grid", [(4, 4), (2, 2, 4)])
def test_plans_can_be_pickled_and_copied(counted_support, grid):
    support = resolve_support("counted", 3, 16)
    plan = AttentionPlan(LayerKey(3, grid, 1), 1, support)
    expected = plan_table(plan, "mask", torch.device("cpu"))
    for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        again.tables.clear()
        assert again.key == plan.key
        assert torch.equal(plan_table(again, "mask", torch.device("cpu")), expected)
        assert [own.tolist() for own in again.pairs] == [own.tolist() for own in plan.pairs]
