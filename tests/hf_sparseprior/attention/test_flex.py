"""`flex` on the CPU, forward, against `reference` in float64; on a GPU, where there is one, with gradients.

torch's unfused FlexAttention on a CPU reads the mask of pairs and not which tiles are visited, so those are compared
with all pairs of the support.
"""

import copy
import dataclasses
import math

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_sparseprior.attention import choice, flex
from hf_sparseprior.attention.choice import BACKENDS, Crossover, choose_backend, slower_than_dense
from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.supports import LayerKey, resolve_support

CUDA = torch.cuda.is_available()
DEVICE, DTYPE, TOLERANCE = ("cuda", torch.float32, 1e-5) if CUDA else ("cpu", torch.float64, 1e-12)
HEADS, SQUARE = 3, (12, 13)
CASES = [
    ({"name": "random", "per_head": True, "pruning_ratio": 90, "seed": 3}, SQUARE, "frame"),
    ({"name": "bigbird", "random_keys": 2, "per_head": True, "order": "hilbert"}, SQUARE, "frame"),
    ({"name": "neighborhood", "window": 3, "dilation": [1, 2]}, SQUARE, "frame"),
    ({"name": "random", "pruning_ratio": 80}, (4, 3, 13), "frame"),
    ({"name": "radial", "decay_factor": 0.25}, (6, 2, 13), "clip"),
]
RANDOM = CASES[0][0]


@pytest.fixture(autouse=True)
def no_gradients_on_a_cpu():
    with torch.set_grad_enabled(CUDA):
        yield


def plan_of(support, grid=SQUARE, time="frame", prefix=1):
    key = LayerKey(HEADS, grid, 1, time)
    return AttentionPlan(key, prefix, resolve_support(support, HEADS, math.prod(key.own_grid), key.own_grid))


def tokens_of(plan, batch=2, width=16, dtype=DTYPE):
    generator = torch.Generator().manual_seed(0)
    shape = (3, batch, HEADS, plan.total, width)
    q, k, v = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    return [x.requires_grad_() for x in (q, k, v)]


def lists_of(plan, batch=2, seed=1):
    """Of every patch other keys, the prefix first and -1 for those that are missing; key 31 sets the sign of a word."""
    generator, prefix = torch.Generator().manual_seed(seed), plan.num_prefix_tokens
    order = torch.rand(batch, HEADS, plan.num_tokens, plan.num_tokens, generator=generator).argsort(-1)[..., :9]
    missing = torch.rand(order.shape, generator=generator) < 0.3
    missing[..., 0] = False
    order[..., 0] = 31 - prefix
    missing[..., 1:] |= order[..., 1:] == 31 - prefix
    keys = torch.where(missing, -1, order + prefix)
    return torch.cat([torch.arange(prefix).expand(*keys.shape[:3], -1), keys], -1).to(DEVICE)


def assert_equals_reference(plan, **fields):
    leaves = tokens_of(plan)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = run_plan(AttentionRequest(*leaves, plan, **fields), "flex")[0]
    expected = run_plan(AttentionRequest(*exact, plan, **fields), "reference")[0]
    pairs = [(out, expected)]
    if CUDA:
        pairs += zip(
            torch.autograd.grad(out.square().sum(), leaves),
            torch.autograd.grad(expected.square().sum(), exact),
            strict=True,
        )
    for actual, right in pairs:
        assert actual.shape == right.shape and actual.dtype == DTYPE
        assert (actual - right).abs().max() <= TOLERANCE * right.abs().max()


def pooled(mask):
    """Which tiles of 128 x 128 of a mask (..., T, T) have a pair."""
    blocks = -(-mask.shape[-1] // 128)
    return [
        [mask[..., 128 * i :, 128 * j :][..., :128, :128].any(-1).any(-1) for j in range(blocks)] for i in range(blocks)
    ]


def visited(mask):
    """The tiles of a block mask, for queries and, as backward has them, for keys."""

    def dense(counts, indices):
        tiles = torch.zeros(*indices.shape, dtype=torch.bool, device=counts.device)
        first = torch.arange(indices.shape[-1], device=counts.device) < counts[..., None]
        return tiles.scatter_(-1, indices.long(), first)

    return dense(mask.kv_num_blocks, mask.kv_indices), dense(mask.q_num_blocks, mask.q_indices).mT


def assert_is(block_mask, mask):
    """The mask (B, H, T, T) of pairs, and of tiles those that have one."""
    batch, head, query, key = (torch.arange(n, device=DEVICE) for n in mask.shape)
    found = block_mask.mask_mod(batch[:, None, None, None], head[:, None, None], query[:, None], key)
    assert torch.equal(found.expand(mask.shape), mask)
    for tiles in visited(block_mask):
        for i, row in enumerate(pooled(mask)):
            for j, expected in enumerate(row):
                assert torch.equal(tiles[..., i, j], expected)


# ---- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("support", "grid", "time", "prefix"), [(*case, 2 * (n % 2)) for n, case in enumerate(CASES)], ids=str
)
def test_supports_equal_the_reference(support, grid, time, prefix):
    assert_equals_reference(plan_of(support, grid, time, prefix))


def test_learned_keys_equal_the_reference():
    plan = plan_of("dense", prefix=2)
    assert_equals_reference(plan, key_ids=lists_of(plan))


@pytest.mark.parametrize("prefix", [0, 1, 130])
@pytest.mark.parametrize(("support", "grid", "time"), CASES, ids=lambda case: str(case))
def test_block_masks_have_the_pairs_of_the_support(support, grid, time, prefix):
    plan = plan_of(support, grid, time, prefix)
    mask = torch.from_numpy(plan.build_table("mask")).to(DEVICE)
    assert_is(flex.plan_mask(plan, torch.device(DEVICE))[0], mask[None])


@pytest.mark.parametrize("prefix", [0, 1, 130])
def test_block_masks_have_the_keys_of_each_image(prefix):
    plan = plan_of("dense", prefix=prefix) if prefix < 31 else plan_of("dense", (20, 20), prefix=prefix)
    keys = (
        lists_of(plan) if prefix < 31 else prefix + torch.arange(400, device=DEVICE).view(400, 1).expand(2, 3, -1, -1)
    )
    mask = torch.zeros(2, HEADS, plan.total, plan.total, dtype=torch.bool)
    mask[:, :, :prefix] = True
    for place, key in zip(torch.nonzero(keys >= 0).tolist(), keys[keys >= 0].tolist(), strict=True):
        mask[place[0], place[1], prefix + place[2], key] = True
    assert_is(flex.listed_block_mask(keys, prefix, plan.total)[0], mask.to(DEVICE))


def test_few_tiles_where_the_pairs_are_few():
    """Nothing grows with T x T but the numbers of tiles."""
    plan = plan_of({"name": "neighborhood", "window": 5}, (48, 48), prefix=0)
    words, numbers = plan.build_table("tile_words"), plan.build_table("tile_numbers")
    assert words.nbytes + numbers.nbytes < HEADS * plan.total**2 / 8 / 10  # a tenth of a bit for each pair
    assert numbers.max() < len(words) == 64 and (numbers[0] == numbers).all()  # all heads have the same tiles


# ---- made once ------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """The tables that plans build."""
    names, build = [], AttentionPlan.build_table
    monkeypatch.setattr(AttentionPlan, "build_table", lambda plan, name: names.append(name) or build(plan, name))
    return names


def test_a_plan_makes_its_block_mask_once(made):
    plan = plan_of(RANDOM, prefix=2)
    request = AttentionRequest(*tokens_of(plan), plan)
    with torch.inference_mode():  # what is made there serves training, too
        mask, words = flex.plan_mask(plan, request.q.device)
    count = len(made)
    assert "tile_words" in made and not words.is_inference() and not mask.kv_indices.is_inference()
    run_plan(request, "flex"), run_plan(request, "flex")
    assert len(made) == count and flex.plan_mask(plan, request.q.device)[0] is mask
    assert not copy.deepcopy(plan).block_masks


def test_calls_of_one_size_are_compiled_once():
    calls = [AttentionRequest(*tokens_of(p, batch=1), p) for p in (plan_of({**RANDOM, "seed": s}) for s in range(3))]
    calls += [calls[0]._replace(plan=(dense := plan_of("dense")), key_ids=lists_of(dense, 1, seed=n)) for n in (0, 1)]
    before = counters["stats"]["unique_graphs"]
    for request in calls:
        run_plan(request, "flex")
    assert counters["stats"]["unique_graphs"] - before == 2  # for supports, and for lists


def test_more_sizes_than_torch_compiles_of_one_function():
    with torch._dynamo.config.patch(recompile_limit=1):
        for grid in (SQUARE, (3, 4)):
            plan = plan_of(RANDOM, grid, prefix=2)
            q, k, v = tokens_of(plan)
            assert run_plan(AttentionRequest(q, k, v, plan), "flex")[0].shape == q.shape


@pytest.mark.parametrize("lists", [False, True])
def test_graphs_have_no_breaks(lists):
    """Past the choice, which refuses graphs on a CPU."""
    plan = plan_of("dense" if lists else RANDOM)
    request = AttentionRequest(*tokens_of(plan), plan, key_ids=lists_of(plan) if lists else None)
    compiled = torch.compile(lambda request: flex.flex(request)[0], backend="eager", fullgraph=True)
    expected = run_plan(request, "reference")[0]
    assert (compiled(request) - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert not plan.block_masks  # what is traced is not kept


# ---- the choice -----------------------------------------------------------------------------------------------------


def test_nothing_chooses_it_without_a_record():
    for support, grid, time in CASES:
        plan = plan_of(support, grid, time)
        request = AttentionRequest(*tokens_of(plan), plan)
        assert flex.flex_can_run(request) is None and choose_backend(request) != "flex"
        for trains in (False, True):
            reason = slower_than_dense(BACKENDS["flex"], request, trains, "sdpa")
            assert reason == "not measured on any device"
    plan = plan_of("dense")
    assert choose_backend(AttentionRequest(*tokens_of(plan), plan, key_ids=lists_of(plan))) != "flex"


def test_a_record_is_for_its_family_of_cards(monkeypatch):
    plan = plan_of(RANDOM)
    request = AttentionRequest(*tokens_of(plan), plan)
    limits = {("cuda 9.0", False, "sdpa"): Crossover(100, 0.5)}
    backend = dataclasses.replace(BACKENDS["flex"], crossovers=limits)
    if not CUDA:
        assert slower_than_dense(backend, request, False, "sdpa") == "not measured on cpu"
    monkeypatch.setattr(choice, "device_family", lambda *device: family)
    family = "cuda 9.0"
    assert slower_than_dense(backend, request, False, "sdpa") is None
    assert slower_than_dense(backend, request, True, "sdpa") == "not measured on cuda 9.0"
    family = "cuda 8.0"
    assert slower_than_dense(backend, request, False, "sdpa") == "not measured on cuda 8.0"
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    assert choice.device_family("cuda", 0) == "cuda 8.9"


REFUSED = {
    "zero": ({**RANDOM, "mask_fill": "zero"}, {}, "mask_fill='zero' keeps exp"),
    "dense": ("dense", {}, "every patch sees every token"),
    "diagonals": ("fibottention", {}, "all pairs lie on diagonals"),
    "decay": (
        RANDOM,
        {"decay": {"name": "violin", "beta": torch.zeros(4, HEADS)}},
        "FlexAttention with a decay takes 11 to 19 times as long",
    ),
    "dropout": (RANDOM, {"dropout_p": 0.1}, "no dropout"),
    "weights": (RANDOM, {"need_weights": True}, "attention weights"),
    "bias": (RANDOM, {"bias": torch.zeros(1)}, "a bias is added"),
    "patches": (RANDOM, {"token_ids": torch.zeros(2, 156, dtype=torch.long)}, "only some patches of the grid"),
    "checkpointing": (RANDOM, {"training": True}, "FlexAttention has no gradients on a CPU"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(case):
    support, fields, reason = REFUSED[case]
    plan = plan_of(support)
    request = AttentionRequest(*(x.cpu() for x in tokens_of(plan)), plan, **fields)
    with pytest.raises(ValueError, match=rf"^backend='flex' cannot run this attention: .*{reason}"):
        run_plan(request, "flex")


def test_gradients_on_a_cpu_are_refused():
    plan = plan_of(RANDOM)
    request = AttentionRequest(*(x.cpu() for x in tokens_of(plan)), plan)
    reason = r"^backend='flex' cannot run this attention: FlexAttention has no gradients on"
    with torch.enable_grad(), pytest.raises(ValueError, match=reason):
        run_plan(request, "flex")


def test_what_kernels_for_cuda_do_not_take():
    plan = plan_of(RANDOM, (3, 4))
    with FakeTensorMode():
        for device, dtype, width, reason in (
            ("cuda", torch.bfloat16, 16, None),
            ("cuda", torch.float64, 16, "FlexAttention on CUDA is for float16, bfloat16 and float32, not for float64"),
            ("cuda", torch.bfloat16, 15, "head width 15 must be 16 or more on CUDA"),
            ("meta", torch.float32, 16, "FlexAttention runs on CPU and CUDA, not on meta"),
        ):
            q = torch.empty(2, HEADS, 13, width, device=device, dtype=dtype, requires_grad=True)
            assert flex.flex_can_run(AttentionRequest(q, q, q, plan)) == reason
