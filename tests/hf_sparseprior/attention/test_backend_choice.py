import copy
import dataclasses
import logging
import os
from itertools import product

import pytest
import torch
import torch._dynamo.testing

from hf_sparseprior.attention import compiled_kernels
from hf_sparseprior.attention import functional as ops
from hf_sparseprior.attention.choice import (
    BACKENDS,
    MOST_CHOICES,
    Backend,
    Crossover,
    register_backend,
    slower_than_dense,
    unregister_backend,
)
from hf_sparseprior.attention.compiled_kernels import diagonal_cpu, triton_device
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.patterns.supports import MASK_FILLS, SUPPORTS, LayerKey, resolve_support
from tests.hf_sparseprior.attention.attention_cases import (
    DECAY_VARIANTS,
    ON_DIAGONALS,
    PATTERNS,
    SHIPPED_BACKENDS,
    call,
    make_leaves,
    refusal,
)

PYTORCH = [name for name in SHIPPED_BACKENDS if name not in ("cpp", "triton", "frames", "flex")]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DROPOUT, WEIGHTS = {"dropout_p": 0.1}, {"need_weights": True}


# ---- what each backend runs -----------------------------------------------------------------------------------------


def should_run(backend, name, mask_fill, variant, dtype, options):
    """Which attention each backend runs on a CPU, stated once, independently of `can_run`."""
    filled_with_nothing = mask_fill == "neg_inf" or name == "dense"
    drops_unformed_pairs = options == DROPOUT and mask_fill == "zero"
    listed = name in PATTERNS and mask_fill == "neg_inf" and not options
    if backend == "reference":
        return True
    if backend == "sdpa":
        return filled_with_nothing and variant is None and options != WEIGHTS
    if backend == "diagonal":
        return name in ON_DIAGONALS and not drops_unformed_pairs
    if backend == "gather":
        return listed
    if backend in ("frames", "flex"):  # over clips alone, see test_time.py; without gradients, see test_flex.py
        return False
    if backend == "cpp":
        if dtype not in (torch.float32, torch.bfloat16) or options == WEIGHTS:
            return False
        if name == "dense":
            return variant is not None and not options
        return not drops_unformed_pairs if name in ON_DIAGONALS else listed
    assert backend == "triton"
    return False


@pytest.mark.parametrize("backend", SHIPPED_BACKENDS)
def test_backends_run_where_they_should_and_refuse_the_rest(backend):
    # Other tests run what `can_run` allows. This one finds a backend that refuses too much or too little.
    if backend == "cpp" and (reason := diagonal_cpu.ready()):
        assert not os.environ.get("CI_NEEDS_KERNELS"), reason
        pytest.skip(reason)
    cases = product(SUPPORTS, MASK_FILLS, (None, *DECAY_VARIANTS[1::4]))
    for number, (name, mask_fill, variant) in enumerate(cases):
        dtypes = DTYPES if backend == "cpp" else [DTYPES[number % 4]]  # only to cpp they are not alike
        for dtype, options in product(dtypes, ({}, DROPOUT, WEIGHTS)):
            support = {"name": name, "mask_fill": mask_fill}
            leaves = make_leaves((3, 4), 1, variant, dtype=dtype)
            reason = refusal(backend, support, variant, dtype, **options)
            assert (reason is None) == should_run(backend, name, mask_fill, variant, dtype, options), reason
            if reason is None:
                call(leaves, support, variant, (3, 4), 1, backend=backend, **options)
                continue
            with pytest.raises(ValueError) as error:
                call(leaves, support, variant, (3, 4), 1, backend=backend, **options)
            assert str(error.value) == f"backend='{backend}' cannot run this attention: {reason}"


# ---- the choice -----------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped_alone(registries):
    """Without backends that are not the package's own, since which one runs is stated for those."""
    for name in set(BACKENDS) - set(SHIPPED_BACKENDS):
        unregister_backend(name)


@pytest.fixture
def chosen(shipped_alone, caplog, monkeypatch):
    # Runs one attention and returns what the chooser wrote about it.
    monkeypatch.setattr(logging.getLogger("hf_sparseprior"), "propagate", True)

    def run(support, variant, side, prefix=1, heads=12, **options):
        leaves = make_leaves((side, side), prefix, variant, batch=1, heads=heads, width=2, dtype=torch.float32)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="hf_sparseprior.ops"):
            call(leaves, support, variant, (side, side), prefix, **options)
        return " | ".join(record.getMessage() for record in caplog.records)

    return run


def test_the_log_names_the_path_and_why_not_others(chosen, monkeypatch):
    monkeypatch.setattr(compiled_kernels, "INSTALLED_VERSION", None)  # as in a saved model without the package
    assert "layer 2: sdpa (16 patches, 100.0 % of the pairs kept; not cpp: dense attention" in chosen("dense", None, 4)
    message = chosen("dense", DECAY_VARIANTS[1], 4)
    assert "layer 2: reference" in message and "not sdpa: a decay multiplies the logits" in message
    assert "not cpp: the package hf_sparseprior is not installed" in message
    message = chosen("dense", None, 4, need_weights=True)
    assert "layer 2: reference" in message and "not sdpa: " in message and "weights" in message
    message = chosen({"name": "fibottention", "mask_fill": "zero"}, None, 4)
    assert "layer 2: reference" in message and "not sdpa: mask_fill='zero'" in message
    message = chosen("fibottention", None, 20)
    assert "layer 2: diagonal" in message and "400 patches, 2." in message
    message = chosen("fibottention", None, 6)
    assert "layer 2: sdpa" in message and "not diagonal: dense is faster below 400 patches" in message
    message = chosen({"name": "window", "w": 60}, None, 20)
    assert "layer 2: sdpa" in message and "not diagonal: dense is faster with more than 6.2 % of the pairs" in message
    message = chosen({"name": "fibottention", "mask_fill": "zero"}, None, 14, dropout_p=0.1)
    assert "layer 2: reference" in message and "not diagonal: dropout" in message and "not sdpa: " in message


def test_the_compiled_kernel_is_chosen_where_it_is_faster(chosen, monkeypatch):
    if reason := diagonal_cpu.ready():
        pytest.skip(reason)
    monkeypatch.setattr(diagonal_cpu, "can_run", lambda q: None)
    assert "layer 2: sdpa" in chosen("dense", None, 4)
    assert "layer 2: cpp" in chosen("dense", DECAY_VARIANTS[1], 4)
    assert "layer 2: cpp" in chosen("fibottention", None, 14)
    assert "not cpp: dense is faster in so small a call" in chosen("fibottention", None, 3)
    assert "not cpp: dense is faster with more than 3" in chosen({"name": "window", "w": 120}, None, 14)
    assert "not cpp: the C++ kernel has no dropout of dense attention" in chosen(
        "dense", DECAY_VARIANTS[1], 4, dropout_p=0.1
    )
    monkeypatch.setattr(diagonal_cpu, "can_run", lambda q: "no compiler")
    assert "layer 2: diagonal" in (message := chosen("fibottention", None, 20)) and "not cpp: no compiler" in message


def request_of(plan, device_type="cpu", dtype=torch.float32, batch=2):
    """A call without values; what is not a CPU counts as a GPU."""
    device = "cpu" if device_type == "cpu" else "meta"
    q = torch.empty(batch, plan.num_heads, plan.total, 8, dtype=dtype, device=device)
    return AttentionRequest(q, q, q, plan)


def test_every_crossover_is_of_a_sparse_path_and_a_dense_one():
    crossovers = [(name, key, limits) for name in BACKENDS for key, limits in BACKENDS[name].crossovers.items()]
    unmeasured = {name for name in SHIPPED_BACKENDS if BACKENDS[name].only_measured}
    assert {name for name, *_ in crossovers} | unmeasured >= {n for n in SHIPPED_BACKENDS if not BACKENDS[n].dense}
    checked = 0
    for name, (device_type, trains, dense_path, *dtype), limits in crossovers:
        assert BACKENDS[dense_path].dense and device_type in ("cpu", "cuda")
        assert 0 < limits.density <= 1 and all(isinstance(own, torch.dtype) for own in dtype)
        if limits.tokens > 1:
            support = resolve_support({"name": "window", "w": 1}, 3, 2)
            below = AttentionPlan(LayerKey(3, (1, limits.tokens - 1)), 0, support)
            request = request_of(below, device_type, *dtype)
            reason = slower_than_dense(BACKENDS[name], request, trains, dense_path)
            assert reason == f"dense is faster below {limits.tokens} patches"
            checked += 1
    assert checked > 10


def test_small_calls_are_worth_a_smaller_share_of_the_pairs():
    limits = Crossover(1, 0.5, pairs=1000)
    plan = AttentionPlan(LayerKey(4, (1, 10)), 0, resolve_support("dense", 4, 10))
    # (batch, 4 heads, 10 tokens, width 8): 400 pairs of width 8 in each image are 50 of width 64.
    assert limits.largest_density(request_of(plan, batch=200)) == pytest.approx(0.5 * (1 - 1000 / 10_000))
    assert limits.largest_density(request_of(plan, batch=20)) == 0
    assert limits.largest_density(request_of(plan, batch=1)) < 0
    assert Crossover(1, 0.5).largest_density(request_of(plan, batch=1)) == 0.5


def test_a_graph_for_any_batch_chooses_once(monkeypatch):
    """Where small calls are better done dense, the choice does not bind a graph to the batch of its first call."""
    monkeypatch.setenv("SPARSEPRIOR_KERNELS", "0")
    limits = {("cpu", False, "sdpa"): Crossover(1, 0.9, pairs=600)}
    monkeypatch.setitem(BACKENDS, "diagonal", dataclasses.replace(BACKENDS["diagonal"], crossovers=limits))
    plan = AttentionPlan(LayerKey(3, (4, 4)), 0, resolve_support({"name": "window", "w": 2}, 3, 16))
    small, large = (slower_than_dense(BACKENDS["diagonal"], request_of(plan, batch=b), False, "sdpa") for b in (2, 64))
    assert small == "dense is faster in so small a call" and large is None
    counter = torch._dynamo.testing.CompileCounter()

    def attend(q):
        return ops.run_plan(AttentionRequest(q, q, q, plan))[0]

    compiled = torch.compile(attend, backend=counter, dynamic=True, fullgraph=True)
    for batch in (2, 64, 5):
        q = torch.randn(batch, 3, 16, 8)
        torch.testing.assert_close(compiled(q), attend(q))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_crossover_of_a_dtype_is_its_own():
    support = resolve_support({"name": "window", "w": 120}, 3, 196)  # 85 % of the pairs
    plan = AttentionPlan(LayerKey(3, (14, 14)), 0, support)
    backend = Backend(
        lambda request: None,
        lambda request: (request.q, None),
        1,
        crossovers={
            ("cpu", False, "sdpa"): Crossover(1, 0.5),
            ("cpu", False, "sdpa", torch.bfloat16): Crossover(1, 0.9),
        },
    )
    assert "more than 50.0 %" in slower_than_dense(backend, request_of(plan), False, "sdpa")
    assert slower_than_dense(backend, request_of(plan, dtype=torch.bfloat16), False, "sdpa") is None


def test_triton_is_for_cuda_and_many_patches():
    support = resolve_support("fibottention", 3, 1024)
    many, few = (request_of(AttentionPlan(LayerKey(3, grid), 1, support), "cuda") for grid in ((32, 32), (4, 4)))
    assert slower_than_dense(BACKENDS["triton"], many, True, "sdpa") is None
    assert slower_than_dense(BACKENDS["triton"], few, True, "sdpa") == "dense is faster below 400 patches"
    for dtype in (torch.float32, torch.float64):  # the device is said before anything else
        assert "not for cpu" in triton_device.can_run(torch.zeros(1, 1, 1, 8, dtype=dtype))


def test_the_log_is_silent_above_debug(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_sparseprior"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="hf_sparseprior"):
        call(make_leaves((4, 4), 1), "fibottention", None, (4, 4), 1)
    assert not caplog.records


@pytest.mark.parametrize("backend", PYTORCH)
def test_the_environment_forces_a_backend(monkeypatch, backend):
    ran = []
    for name, entry in BACKENDS.items():
        spy = dataclasses.replace(entry, run=lambda c, name=name, run=entry.run: ran.append(name) or run(c))
        monkeypatch.setitem(BACKENDS, name, spy)
    leaves = make_leaves((4, 4), 1)
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    call(leaves, "fibottention", None, (4, 4), 1)
    assert ran == [backend]
    # The argument is nearer than the environment.
    call(leaves, "fibottention", None, (4, 4), 1, backend="reference")
    assert ran == [backend, "reference"]
    for nothing in ("auto", ""):
        monkeypatch.setenv("SPARSEPRIOR_BACKEND", nothing)
        call(leaves, "fibottention", None, (4, 4), 1)
    assert len(ran) == 4


@pytest.mark.parametrize(
    ("backend", "support", "variant", "options", "reason"),
    [
        ("sdpa", "dense", DECAY_VARIANTS[1], {}, "a decay multiplies the logits"),
        ("sdpa", "dense", None, WEIGHTS, "does not return attention weights"),
        ("sdpa", {"name": "window", "mask_fill": "zero"}, None, {}, "mask_fill='zero' keeps exp"),
        ("diagonal", "dense", None, {}, "the support is dense"),
        ("diagonal", {"name": "window", "mask_fill": "zero"}, None, DROPOUT, "dropout with mask_fill='zero'"),
    ],
)
def test_a_backend_that_the_environment_forces_and_that_cannot_run_is_an_error(
    monkeypatch, backend, support, variant, options, reason
):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", backend)
    message = rf"^SPARSEPRIOR_BACKEND='{backend}' cannot run this attention: .*{reason}"
    with pytest.raises(ValueError, match=message):
        call(make_leaves((3, 3), 0, variant), support, variant, (3, 3), 0, **options)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_an_unknown_backend_is_an_error(monkeypatch, how):
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "flash" if how == "environment" else "auto")
    options = {} if how == "environment" else {"backend": "flash"}
    source = "SPARSEPRIOR_BACKEND" if how == "environment" else "backend"
    with pytest.raises(ValueError, match=rf"^{source}='flash' must be one of auto, {', '.join(BACKENDS)}"):
        call(make_leaves((2, 2), 0), "dense", None, (2, 2), 0, **options)


# ---- bound once -----------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(registries):
    """How often a backend, which runs everything first of all, was asked whether it can."""
    count = []

    def can_run(request):
        count.append(request.q.shape)

    register_backend("asked", can_run=can_run, run=BACKENDS["reference"].run, priority=99)
    return count


def bound_cases():
    plan = AttentionPlan(LayerKey(2, (3, 3)), 1, resolve_support("fibottention", 2, 9))
    q = torch.randn(2, 2, 10, 4, generator=torch.Generator().manual_seed(0))
    return plan, q


def test_a_second_call_asks_no_backend(asked):
    plan, q = bound_cases()
    first = ops.run_plan(AttentionRequest(q, q, q, plan))[0]
    assert len(asked) == 1
    assert torch.equal(ops.run_plan(AttentionRequest(q, q, q, plan))[0], first) and len(asked) == 1
    others = {
        "batch": AttentionRequest(*[torch.cat([q, q])] * 3, plan),
        "dtype": AttentionRequest(*[q.double()] * 3, plan),
        "gradients": AttentionRequest(*[q.clone().requires_grad_()] * 3, plan),
        "width of values": AttentionRequest(q, q, q[..., :2], plan),
        "dropout": AttentionRequest(q, q, q, plan, dropout_p=0.5),
        "weights": AttentionRequest(q, q, q, plan, need_weights=True),
        "weight rows": AttentionRequest(q, q, q, plan, need_weights=True, weight_rows=1),
        "bias": AttentionRequest(q, q, q, plan, bias=torch.zeros(10, 10)),
        "keep_mask": AttentionRequest(q, q, q, plan, keep_mask=torch.ones(2, 10)),
        "token_ids": AttentionRequest(*[q[:, :, :4]] * 3, plan, token_ids=torch.tensor([[0, 1, 2]] * 2)),
        "top_k": AttentionRequest(q, q, q, plan, top_k=3),
        "another plan": AttentionRequest(q, q, q, bound_cases()[0]),
    }
    for number, (name, request) in enumerate(others.items(), start=2):
        for _ in range(2):
            ops.run_plan(request)
            assert len(asked) == number, name


def test_a_kept_choice_gives_way(asked, monkeypatch):
    plan, q = bound_cases()
    request = AttentionRequest(q, q, q, plan)
    for _ in range(2):
        ops.run_plan(request)
    register_backend("newer", can_run=lambda request: None, run=lambda request: (request.v, None), priority=100)
    assert ops.run_plan(request)[0] is q
    unregister_backend("newer")
    assert ops.run_plan(request)[0] is not q and len(asked) == 2
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "sdpa")
    ops.run_plan(request)
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "frames")
    with pytest.raises(ValueError, match="SPARSEPRIOR_BACKEND='frames' cannot run this attention"):
        ops.run_plan(request)
    monkeypatch.delenv("SPARSEPRIOR_BACKEND")
    ops.run_plan(request)
    assert len(asked) == 2
    with pytest.raises(ValueError, match="tokens must be 1 prefix tokens"):
        ops.run_plan(AttentionRequest(*[q[:, :, 1:]] * 3, plan))


def test_every_call_is_logged_alike(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hf_sparseprior"), "propagate", True)
    plan, q = bound_cases()
    with caplog.at_level(logging.DEBUG, logger="hf_sparseprior.ops"):
        for backend in ("auto", "auto", "reference", "reference"):
            ops.run_plan(AttentionRequest(q, q, q, plan), backend)
    first, second, third, fourth = [record.getMessage() for record in caplog.records]
    assert first == second and "; not " in first and third == fourth == "layer 0: reference (forced)"


def test_choices_do_not_pile_up():
    plan, q = bound_cases()
    for batch in range(2 * MOST_CHOICES):
        ops.run_plan(AttentionRequest(*[q[:1].expand(batch + 1, -1, -1, -1)] * 3, plan), "sdpa")
        assert 1 <= len(plan.choices) <= MOST_CHOICES
    assert not copy.deepcopy(plan).choices
