import pytest
import torch

from hf_sparseprior.attention_plan import AttentionPlan, plan_table
from hf_sparseprior.attention_request import AttentionRequest
from hf_sparseprior.ops import run_plan
from tests.hf_sparseprior.attention_cases import CASES, brute_mask, gradients, make_leaves, make_plan


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
