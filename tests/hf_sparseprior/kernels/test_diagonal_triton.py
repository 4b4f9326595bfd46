"""The Triton kernels for diagonals against `reference` in float64: on a GPU, or small in Triton's interpreter."""

import itertools
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_sparseprior.attention.choice import choose_backend
from hf_sparseprior.attention.functional import attention
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.kernels import triton_device
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import MASK_FILLS, LayerKey
from hf_sparseprior.priors.layer import SparsePriorAttention
from hf_sparseprior.priors.prior import resolve_prior

diagonal_triton = pytest.importorskip("hf_sparseprior.kernels.diagonal_triton")
triton_sizes = pytest.importorskip("hf_sparseprior.kernels.triton_sizes")
pytestmark = pytest.mark.slow

HALF = [torch.bfloat16, torch.float16]
FEW = {"name": "window", "w": 2, "diagonal": False}  # few offsets: in the interpreter each costs milliseconds


@pytest.fixture
def launched(kernels, monkeypatch):
    """Names of the kernels that were launched, in order."""
    names = []
    kernels_by_name = ("_forward_tokens", "_forward_parts", "_forward_prefix", "_backward_rows", "_backward_tokens")
    for name in (*kernels_by_name, "_backward_prefix"):
        kernel = getattr(diagonal_triton, name)

        class Spy:
            def __init__(self, name, kernel):
                self.name, self.kernel = name, kernel

            def __getitem__(self, grid):
                names.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(diagonal_triton, name, Spy(name, kernel))
    return names


@pytest.mark.parametrize("decay", [None, "violin"])
@pytest.mark.parametrize("mask_fill", MASK_FILLS)
def test_agrees_with_the_reference(kernels, mask_fill, decay):
    cases = [((1, 1), 0), ((1, 2), 1), ((4, 3), 2), ((3, 5), 0)]
    if kernels.native:
        cases += itertools.product([(2, 2), (7, 5), (14, 14), (33, 32)], (0, 1, 5))
    else:  # half of them, the others with the other decay and with the other fill
        cases = cases[(MASK_FILLS.index(mask_fill) + (decay is None)) % 2 :: 2]
    for grid, prefix in cases:
        leaves = kernels.make(grid, prefix, decay=decay)
        kernels.check(leaves, {"name": "fibottention", "mask_fill": mask_fill}, decay, grid, prefix)


def with_fills(kernels, values):
    """Every fill of the mask with every value; in the interpreter, which is slow, each with one."""
    return itertools.product(MASK_FILLS, values) if kernels.native else zip(MASK_FILLS, values, strict=True)


def test_several_blocks_of_rows(kernels):
    grid = (64, 65) if kernels.native else (10, 7)  # blocks of 64 rows forward and 32 backward at this width
    for mask_fill, prefix in with_fills(kernels, (2, 0)):
        leaves = kernels.make(grid, prefix, heads=1, width=33, decay="manhattan")
        kernels.check(leaves, {**FEW, "mask_fill": mask_fill}, "manhattan", grid, prefix)


@pytest.mark.parametrize(
    ("launches", "mask_fill", "prefix"),
    [
        ("parts", "neg_inf", 2),  # only with a prefix are there parts
        ("parts", "zero", 2),  # which has delta before in any case
        ("delta before", "neg_inf", 0),
        ("parts and delta before", "neg_inf", 2),
    ],
)
def test_other_launches_agree_with_the_reference(kernels, launched, monkeypatch, launches, mask_fill, prefix):
    """The launches of long sequences and of many neighbours, at sizes that the interpreter can do."""
    if "parts" in launches:
        monkeypatch.setattr(diagonal_triton, "ONE_LAUNCH_TOKENS", 0)
    if "delta" in launches:
        monkeypatch.setattr(diagonal_triton, "NEIGHBOURS", 0)
    for decay, support in ((None, {"name": "fibottention"}), ("manhattan", FEW)):
        leaves = kernels.make((10, 7), prefix, heads=1, width=33, decay=decay)
        launched.clear()
        kernels.check(leaves, {**support, "mask_fill": mask_fill}, decay, (10, 7), prefix)
    # Of the window, which has few neighbours:
    before = ["_backward_rows"] if "delta" in launches or mask_fill == "zero" else []
    forward, backward = (["_forward_prefix"], ["_backward_prefix"]) if "parts" in launches else ([], [])
    assert launched == ["_forward_tokens", *forward, *before, "_backward_tokens", *backward]


def test_parts_of_a_long_sequence_are_joined_in_two_levels(kernels, launched, monkeypatch):
    """Five parts of two patches each, two at a time; the last group has one. Logits reach 1000."""
    monkeypatch.setattr(diagonal_triton, "ONE_LAUNCH_TOKENS", 0)
    monkeypatch.setattr(diagonal_triton, "JOINED_PARTS", 2)
    for kernel in triton_sizes.DIAGONAL:
        monkeypatch.setitem(triton_sizes.TRIED, triton_sizes.entry_key(kernel, 4, 8), {"ROWS": 2, "num_warps": 1})
    grid, prefix = (5, 2), 1
    leaves = kernels.make(grid, prefix, heads=1, width=8)
    kernels.check(leaves, FEW, None, grid, prefix)
    after = ["_backward_tokens", "_backward_prefix"]
    assert launched == ["_forward_tokens", "_forward_parts", "_forward_prefix", *after]
    large = {**leaves, "q": leaves["q"] * 1e3}
    first, second = (kernels.attend(large, FEW, None, grid, prefix) for _ in range(2))
    wide = {name: leaf.double() for name, leaf in large.items()}
    expected = kernels.attend(wide, FEW, None, grid, prefix, backend="reference")
    assert torch.equal(first, second)
    torch.testing.assert_close(first.double(), expected, rtol=0, atol=2e-3)


def test_a_short_sequence_is_one_launch_each_way(kernels, launched):
    for prefix, decay in ((0, "manhattan"), (1, None)):
        launched.clear()
        kernels.run(kernels.make((3, 3), prefix, decay=decay), FEW, decay, (3, 3), prefix)
        assert launched == ["_forward_tokens", "_backward_tokens"]


def test_nothing_waits_for_the_device(kernels):
    """A CUDA graph can hold it: nothing brings a number from the device, and no size follows from one."""
    waiting = ("_local_scalar_dense", "item", "nonzero", "unique", "_to_copy", "copy_", "is_nonzero", "masked_select")
    for mask_fill, decay, dropout_p in (("neg_inf", "manhattan", 0.0), ("neg_inf", None, 0.2), ("zero", None, 0.0)):
        leaves = kernels.make((3, 3), 1, decay=decay)
        support = {**FEW, "mask_fill": mask_fill}
        for name, arguments in operator_arguments(kernels, leaves, support, decay, (3, 3), 1, dropout_p).items():
            seen = operations_within(name, arguments)
            assert seen and not [one for one in seen if one.split(".")[1] in waiting], seen


@pytest.mark.parametrize("width", [1, 16, 130])
def test_any_head_width(kernels, width):
    for value in (width, *((3, 32, 64, 80, 128, 256) if kernels.native else ())):
        kernels.check(kernels.make((3, 3), 1, heads=1, width=value), FEW, None, (3, 3), 1)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision(kernels, dtype):
    grid = (14, 14) if kernels.native else (4, 4)
    decays = (None, "violin") if dtype == torch.bfloat16 else ("violin", None)
    for mask_fill, decay in with_fills(kernels, decays):
        leaves = kernels.make(grid, 1, batch=2, decay=decay, dtype=dtype)
        kernels.check(leaves, {"name": "fibottention", "mask_fill": mask_fill}, decay, grid, 1)


@pytest.mark.parametrize("order", ["hilbert", ["snake", "raster"]], ids=str)
def test_an_order_of_the_patches(kernels, order):
    leaves = kernels.make((3, 4), 1, heads=2, decay="violin")
    kernels.check(leaves, {**FEW, "order": order}, "violin", (3, 4), 1)


def test_random_sweep(kernels):
    values = random.Random(3)
    for _ in range(150 if kernels.native else 10):
        side = 12 if kernels.native else 4
        grid = (values.randint(1, side), values.randint(1, side))
        prefix, heads, batch = values.randint(0, 5), values.randint(1, 4), values.randint(0, 2)
        support = values.choice(
            [
                {"name": "fibottention", "w_min": 1, "w_max": values.randint(1, 200)},
                {"name": "fibottention", "modified": True},
                {"name": "window", "w": values.randint(1, 90), "diagonal": values.random() < 0.5},
                {"name": "fibottention", "w_min": 1, "w_max": 1},  # most heads have no offset
            ]
        )
        support["mask_fill"] = values.choice(MASK_FILLS)
        decay = values.choice([None, *DECAYS])
        leaves = kernels.make(
            grid, prefix, heads=heads, batch=batch, width=values.choice([2, 16, 20]), decay=decay,
            prefix_beta=values.random() < 0.5,
        )  # fmt: skip
        kernels.check(leaves, support, decay, grid, prefix)


def test_views_of_any_layout_and_nothing_read_around_them(kernels):
    leaves = kernels.make((3, 4), 1, width=8)
    around = {}
    for name, leaf in leaves.items():  # a view into memory full of NaN
        memory = torch.full((3, 17, 4, 10), torch.nan, device=kernels.device)
        around[name] = memory[1:2, 2:15, 1:3, 1:9].transpose(1, 2)
        around[name].copy_(leaf)
    kernels.check(around, FEW, None, (3, 4), 1)
    across = {name: leaf.transpose(2, 3).contiguous().transpose(2, 3) for name, leaf in leaves.items()}
    kernels.check({**leaves, "q": across["q"], "v": across["v"]}, FEW, None, (3, 4), 1)
    one = leaves["k"][:, :1, :1].expand(1, 2, 13, 8)  # strides of 0; gradients of q are nothing but rounding
    found, expected = (kernels.run({**leaves, "k": x, "v": x}, FEW, None, (3, 4), 1) for x in (one, one.contiguous()))
    # Compiled for a GPU, other strides may give other places to threads, and so another order of a row's sum.
    tolerance = {"rtol": 0, "atol": 1e-6 if kernels.native else 0}
    for name in found:
        torch.testing.assert_close(found[name], expected[name], **tolerance)


def test_gradients_of_any_subset(kernels):
    q, k, v = kernels.make((2, 2), 1, heads=1).values()
    for chosen in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        inputs = [x.detach().clone().requires_grad_(wanted) for x, wanted in zip((q, k, v), chosen, strict=True)]
        out = attention(*inputs, FEW, num_prefix_tokens=1, grid=(2, 2), backend="triton")
        assert out.requires_grad == any(chosen)
        if any(chosen):
            out.sum().backward()  # the gradient is expanded from one number
            assert [x.grad is not None for x in inputs] == list(chosen)


def test_every_element_is_written_and_two_runs_give_the_same_bits(kernels, monkeypatch):
    """torch fills the memory it hands out with NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=kernels.device).isnan().all()
        for mask_fill, prefix in itertools.product(MASK_FILLS, (0, 2)):
            leaves = kernels.make((3, 4), prefix, decay="manhattan")
            support = {"name": "fibottention", "mask_fill": mask_fill}
            found = kernels.run(leaves, support, "manhattan", (3, 4), prefix)
            assert all(torch.isfinite(value).all() for value in found.values())
    finally:
        torch.use_deterministic_algorithms(False)
    grid, batch = ((40, 40), 4) if kernels.native else ((3, 4), 2)
    leaves = kernels.make(grid, 1, heads=1, batch=batch, width=33, decay="manhattan")
    first, second = (kernels.run(leaves, FEW, "manhattan", grid, 1) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_dropout_against_the_mask_that_was_drawn(kernels):
    leaves = kernels.make((4, 4), 2, width=32, batch=2)  # without a prefix: test_second_derivatives.py
    kernels.check_dropout(leaves, "fibottention", None, (4, 4), 2)


def test_dropout_draws_anew(kernels):
    q, k, v = kernels.make((3, 3), 0).values()
    first, second = (attention(q, k, v, FEW, dropout_p=0.5, backend="triton") for _ in range(2))
    assert not torch.equal(first, second)
    assert attention(q, k, v, FEW, dropout_p=1.0, backend="triton").eq(0).all()


def operator_arguments(kernels, leaves, support, decay, grid, prefix, dropout_p=0.0):
    """Arguments of the forward and the backward operator in one run, by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = ("diagonal_triton", "diagonal_triton_backward")
    operators = {getattr(torch.ops.hf_sparseprior, name).default: name for name in names}
    seen = {}

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in operators:
                seen[operators[func]] = tuple(x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args)
            return func(*args, **(kwargs or {}))

    own = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    with Mode():
        kernels.attend(own, support, decay, grid, prefix, dropout_p=dropout_p).sum().backward()
    assert set(seen) == set(names)
    return seen


def operations_within(name, arguments):
    """Names of torch's operations within the operator `name`; the kernels themselves are not among them."""
    from torch._library.custom_ops import OPDEFS
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from triton.runtime import interpreter, jit

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def unseen(run):
        def run_unseen(*arguments, **options):
            with _disable_current_modes():
                return run(*arguments, **options)

        return run_unseen

    with pytest.MonkeyPatch.context() as patch:
        for kind in (interpreter.InterpretedFunction, jit.JITFunction):
            patch.setattr(kind, "run", unseen(kind.run))
        with Mode():
            OPDEFS[f"hf_sparseprior::{name}"]._init_fn(*arguments)
    return seen


def test_operators_pass_torchs_own_checks(kernels):
    leaves = kernels.make((2, 2), 1, heads=1, decay="manhattan")
    tests = ("test_schema", "test_faketensor")  # gradients are checked above
    for mask_fill in MASK_FILLS:
        support = {**FEW, "mask_fill": mask_fill}
        for name, arguments in operator_arguments(kernels, leaves, support, "manhattan", (2, 2), 1).items():
            torch.library.opcheck(getattr(torch.ops.hf_sparseprior, name).default, arguments, test_utils=tests)


class Layer(torch.nn.Module):
    """A layer with its settings filled in, as torch.export takes it."""

    def __init__(self, support):
        super().__init__()
        prior = resolve_prior({"support": support, "decay": "manhattan"}, 2, (2, 3))
        self.layer = SparsePriorAttention(8, 2, prior)

    def forward(self, tokens):
        return self.layer(tokens, (2, 3), 1, backend="triton")[0]


@pytest.mark.parametrize("support", ["dense", FEW])
def test_compiled_whole_and_exported_for_any_batch(kernels, support):
    torch.manual_seed(0)
    layer = Layer(support).to(kernels.device)
    tokens = torch.randn(3, 7, 8, device=kernels.device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    gradients = []
    torch.compiler.reset()
    for run in (layer, compiled):
        out = run(tokens)
        gradients.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    for value, other in zip(*gradients, strict=True):
        torch.testing.assert_close(value, other)
    exported = torch.export.export(layer, (tokens[:2],), dynamic_shapes={"tokens": {0: torch.export.Dim("batch")}})
    assert any("triton" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(tokens), gradients[0][0])


def test_what_cannot_run_is_named(kernels):
    q, k, v = kernels.make((3, 3), 1).values()
    for inputs, support, options, message in [
        ((q.double(), k.double(), v.double()), FEW, {}, "float16, bfloat16 and float32, not for float64"),
        ((q, k, v), "dense", {}, "dense attention without a decay"),
        ((q, k, v), FEW, {"need_weights": True}, "do not return attention weights"),
        ((q, k, v), {**FEW, "mask_fill": "zero"}, {"dropout_p": 0.1}, "dropout with mask_fill='zero'"),
    ]:
        with pytest.raises(ValueError, match=message):
            attention(*inputs, support, num_prefix_tokens=1, backend="triton", **options)
    wide = torch.zeros(1, 1, 4, 257, device=kernels.device)
    with pytest.raises(ValueError, match=r"head width 257 must be in 1\.\.256"):
        attention(wide, wide, wide, FEW, backend="triton")


def test_what_a_device_lacks_is_named(kernels, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    assert triton_device.device_reason("cuda", 0) == (
        "Tesla T4 has compute capability 7.5, and the Triton kernels need 8.0 or more; "
        "without a forced backend attention runs there in plain PyTorch"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert triton_device.device_reason("cuda", 0) is None
    monkeypatch.setattr(triton_device, "find_spec", lambda name: None)
    assert "triton is not installed" in triton_device.device_reason("cuda", 0)


def test_what_runs_on_an_older_card(kernels, monkeypatch):
    """The card is made up: its tensors have no memory."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla V100")
    plan = AttentionPlan(LayerKey(2, (4, 4)), 1, resolve_prior({"support": FEW}, 2, (4, 4))["support"], None)
    with FakeTensorMode():
        q = torch.empty(1, 2, 17, 8, device="cuda:0", dtype=torch.float16)
    assert choose_backend(AttentionRequest(q, q, q, plan)) in ("sdpa", "diagonal", "gather", "reference")
    with pytest.raises(
        ValueError, match=r"Tesla V100 has compute capability 7.0, .* need 8.0 or more; without a forced"
    ):
        choose_backend(AttentionRequest(q, q, q, plan), "triton")


def test_the_cpu_is_refused_outside_the_interpreter(kernels, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v = (leaf.cpu() for leaf in kernels.make((3, 3), 1).values())
    with pytest.raises(ValueError, match="for CUDA, not for cpu"):
        attention(q, k, v, FEW, num_prefix_tokens=1, backend="triton")
