"""Ways to compute attention over a support that `python -m tasks.benchmark attention` compares.

Shape letters as in `hf_sparseprior.attention.functional`: B batch, H heads, D head width, N patch tokens, P prefix
tokens, T = P + N.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hf_sparseprior.attention.choice import BACKENDS, choose_backend
from hf_sparseprior.attention.functional import run_plan
from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.resolved import DecayTensors
from hf_sparseprior.patterns.decay import DECAYS, decay_weights, make_decay, prefix_weights, resolve_decay
from hf_sparseprior.patterns.masks import self_rows
from hf_sparseprior.patterns.supports import LayerKey, resolve_support

PASSES = {"forward": "forward", "forward_backward": "forward + backward"}
CPU = torch.device("cpu")
DENSE, COPY, FRESH_COPY, WIDE = "dense_sdpa", "copy_bound", "copy_fresh", "cpp_float32"
# Largest difference to the expected values, as a share of the largest of them.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
CHECKED_ROWS = 32  # query rows that are checked; all rows, if there are up to four times as many


@dataclass(frozen=True)
class Setting:
    """What is computed, whatever its size."""

    heads: int = 12
    width: int = 64
    support: str | dict[str, Any] = "fibottention"
    decay: str | dict[str, Any] | None = None
    prefix: int = 0
    dtype: torch.dtype = torch.float32
    layout: str = "projection"
    device: torch.device = CPU
    frozen: bool = False  # a decay that does not learn


class Size(NamedTuple):
    """N patch tokens, B images."""

    tokens: int
    batch: int


@dataclass(frozen=True)
class Problem:
    """One attention to compute: q, k, v and grad_out (B, H, T, D) in the layout asked for."""

    plan: AttentionPlan
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    decay: DecayTensors | None

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that get gradients: q, k, v and the learned scalars of the decay."""
        scalars = [value for value in (self.decay or {}).values() if isinstance(value, Tensor)]
        # Where nothing gets a gradient all are leaves.
        return [self.q, self.k, self.v, *(x for x in scalars if x.requires_grad or not self.q.requires_grad)]


def make_problem(setting: Setting, size: Size, trains: bool, seed: int = 0) -> Problem:
    """Random inputs of one size, which require gradients if it `trains`.

    Layouts: with "projection" each of q, k, v is a view of its own (B, T, H, D), as three linear layers leave them;
    with "packed" they are views of one (B, T, 3, H, D); with "contiguous" they are (B, H, T, D) in memory.
    """
    grid = nearly_square(size.tokens)
    support = resolve_support(setting.support, setting.heads, size.tokens, grid)
    settings = resolve_decay(setting.decay, grid)
    plan = AttentionPlan(LayerKey(setting.heads, grid), setting.prefix, support, settings)
    generator = torch.Generator(setting.device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=setting.device, dtype=setting.dtype)

    rows = (size.batch, plan.total)
    if setting.layout == "packed":
        values = [*randn(*rows, 3, setting.heads, setting.width).unbind(2), randn(*rows, setting.heads, setting.width)]
    else:
        values = [randn(*rows, setting.heads, setting.width) for _ in range(4)]
    q, k, v, grad_out = (value.transpose(1, 2) for value in values)
    if setting.layout == "contiguous":
        q, k, v, grad_out = (value.contiguous() for value in (q, k, v, grad_out))
    decay = None
    if settings is not None:
        torch.manual_seed(seed)
        module = make_decay(settings, setting.heads)
        decay = module.to(setting.device).requires_grad_(trains and not setting.frozen)()
    q, k, v = (x.detach().requires_grad_(trains) for x in (q, k, v))
    return Problem(plan, q, k, v, grad_out, decay)


def nearly_square(tokens: int) -> tuple[int, int]:
    """The grid of `tokens` patches whose sides differ least."""
    height = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
    return height, tokens // height


# ---- the contenders -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A way to compute attention.

    can_run: of a problem and whether gradients are wanted; None, or why it cannot run. prepare: turns a problem into
    the function of (q, k, v) that is timed. dense: whether it computes dense attention instead of the support's. seen:
    which keys it sees instead of the support's, of a plan and rows, bool (H or 1, R, T). dtype: in which it gets the
    inputs, if not in the benchmark's. prefix: whether it knows prefix tokens, which see everything.
    """

    about: str
    can_run: Callable[[Problem, bool], str | None]
    prepare: Callable[[Problem], Callable[[Tensor, Tensor, Tensor], Tensor]]
    dense: bool = False
    dtype: torch.dtype | None = None
    seen: Callable[[AttentionPlan, Tensor], Tensor] | None = None
    prefix: bool = True


def contenders() -> dict[str, Contender]:
    """All contenders by name: dense attention, every registered backend by its own name, and what else people use."""
    from tasks.benchmark.window_contenders import windows

    others = {
        DENSE: Contender("scaled_dot_product_attention, no support, no decay", _always, _run_dense, dense=True),
        "flex_offsets": Contender("FlexAttention, compiled, block mask of the offsets", flex_can_run, _run_flex),
        WIDE: _wide_contender(),
        **windows(),
    }
    if taken := [name for name in (*others, COPY, FRESH_COPY) if name in BACKENDS]:
        raise ValueError(f"backends {taken} of the library are called like contenders of the benchmark")
    return {**others, **{name: _backend_contender(name) for name in BACKENDS}}


def _always(problem: Problem, trains: bool) -> str | None:
    return None


def _run_dense(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return F.scaled_dot_product_attention


def make_request(problem: Problem) -> AttentionRequest:
    """The problem as the registry's backends and the chooser see it."""
    return AttentionRequest(problem.q, problem.k, problem.v, problem.plan, problem.decay)


def _backend_contender(name: str) -> Contender:
    def can_run(problem: Problem, trains: bool) -> str | None:
        with torch.set_grad_enabled(trains):
            return BACKENDS[name].can_run(make_request(problem))

    def prepare(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: run_plan(AttentionRequest(q, k, v, problem.plan, problem.decay), backend=name)[0]

    return Contender((BACKENDS[name].run.__doc__ or name).split("\n")[0], can_run, prepare)


def _wide_contender() -> Contender:
    """The C++ kernels on float32, next to those on half precision."""
    own = _backend_contender("cpp")

    def can_run(problem: Problem, trains: bool) -> str | None:
        if problem.q.dtype == torch.float32:
            return "the inputs are float32, so it would be `cpp` once more"
        return own.can_run(_in_dtype(problem, torch.float32), trains)

    return Contender("`cpp` on the same inputs in float32", can_run, own.prepare, dtype=torch.float32)


def _in_dtype(problem: Problem, dtype: torch.dtype) -> Problem:
    q, k, v = (x.detach().to(dtype).requires_grad_(x.requires_grad) for x in (problem.q, problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v, grad_out=problem.grad_out.to(dtype))


def chosen_backend(problem: Problem, trains: bool) -> str:
    """The backend that the library chooses for this problem."""
    with torch.set_grad_enabled(trains):
        return choose_backend(make_request(problem))


def _plain_support(problem: Problem) -> str | None:
    if problem.plan.offsets is None:
        return "the support is dense"
    if problem.decay is not None:
        return "written without a decay"
    if problem.plan.mask_fill != "neg_inf":
        return f"written for mask_fill='neg_inf', not {problem.plan.mask_fill!r}"
    return None


def along_offsets(problem: Problem, what: str) -> str | None:
    """Why `what` cannot be made from the support's offsets, or None."""
    if reason := _plain_support(problem):
        return reason
    if problem.plan.pairs is not None:
        return f"{what} is made from offsets, and the support has other pairs"
    if problem.plan.ranks is not None:
        return f"{what} is written for offsets in raster order"
    return None


# ---- FlexAttention --------------------------------------------------------------------------------------------------

FLEX_BLOCK = 128


def flex_can_run(problem: Problem, trains: bool) -> str | None:
    """Why FlexAttention cannot run this, or None."""
    if reason := along_offsets(problem, "the block mask"):
        return reason
    if trains and problem.q.device.type == "cpu":
        return "FlexAttention has no backward on CPU"
    if problem.plan.num_prefix_tokens > FLEX_BLOCK:
        return f"the block mask is written for up to {FLEX_BLOCK} prefix tokens"
    return None


def _run_flex(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    mask = flex_mask(problem.plan, problem.q.device)
    torch._dynamo.reset()  # one compiled kernel for each size, not one for all
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def flex_mask(plan: AttentionPlan, device: torch.device) -> BlockMask:
    """Block mask of a support, made from its offsets: torch's `create_block_mask` would form (H, T, T).

    A pair at distance o lies o // block or one more blocks off the diagonal.
    """
    assert plan.offsets is not None
    heads, prefix, total = plan.num_heads, plan.num_prefix_tokens, plan.total
    attended = torch.zeros(heads, total, dtype=torch.bool)
    alone = torch.zeros(heads, total, dtype=torch.bool)
    blocks = -(-total // FLEX_BLOCK)
    near = torch.zeros(heads, blocks, blocks, dtype=torch.bool)
    for head, own in enumerate(plan.offsets):
        attended[head, own] = True
        rows = self_rows(own, plan.num_tokens, prefix)
        alone[head, rows.start : rows.stop] = True
        for offset in (*own, 0):
            for step in (offset // FLEX_BLOCK, -(-offset // FLEX_BLOCK)):
                near[head].diagonal(step).fill_(True)
                near[head].diagonal(-step).fill_(True)
    if prefix:
        near[:, 0] = near[:, :, 0] = True
    attended, alone, near = attended.to(device), alone.to(device), near.to(device)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = attended[head, (query - key).abs()] | ((query == key) & alone[head, query])
        return inside | (query < prefix) | (key < prefix)

    counts = near.sum(-1, dtype=torch.int32)
    order = near.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(
        counts[None], order[None], BLOCK_SIZE=FLEX_BLOCK, mask_mod=mask_mod, seq_lengths=(total, total)
    )


# ---- copy bound -----------------------------------------------------------------------------------------------------


def copy_bound(problem: Problem, trains: bool, fresh: bool = False) -> Callable[[], None]:
    """The memory traffic that no attention can avoid, at the speed of torch's own elementwise kernels.

    Forward: one `addcmul` reads q, k, v once and writes out once, into memory that is allocated before; all are
    contiguous. Of torch's ways to read three tensors and write one (add twice, sum, lerp, addcmul) it is the only
    one that touches each of them once and is vectorised. Backward: q, k, v, out and its gradient are read once, three
    gradients are written once. A small problem stays in the cache, for this bound as for everybody.

    Args:
        problem: its q, k, v and gradient of the output are copied to contiguous memory.
        trains: forward and backward.
        fresh: write to memory allocated by each call, as attention does. The C library gives large blocks back to the
            system, and then the system maps and clears every page of the next one anew.
    """
    given = (problem.q, problem.k, problem.v, problem.grad_out)
    q, k, v, grad_out = (x.detach().clone(memory_format=torch.contiguous_format) for x in given)
    # torch allocates where `out` is None.
    out, dq, dk, dv = (None if fresh else torch.zeros_like(q) for _ in given)

    def forward() -> None:
        torch.addcmul(q, k, v, out=out)

    def forward_backward() -> None:
        written = torch.addcmul(q, k, v, out=out)
        gradients = (
            torch.addcmul(q, k, v, out=dq),
            torch.add(written, grad_out, out=dk),
            torch.full(v.shape, 1.0, dtype=v.dtype, device=v.device, out=dv),
        )
        del gradients  # together, as a backward returns them

    return forward_backward if trains else forward


# ---- what is timed, and whether it is right -------------------------------------------------------------------------


def timed_call(problem: Problem, contender: Contender, trains: bool) -> Callable[[], object]:
    """The call that is timed; its outputs are checked first.

    Raises:
        RuntimeError: if an output or a gradient is not what it should be.
    """
    # A plan of its own, so that no contender finds the tables of another one.
    plan = AttentionPlan.from_key(problem.plan.key)
    problem = replace(problem, plan=plan, decay=None if contender.dense else problem.decay)
    problem = problem if contender.dtype is None else _in_dtype(problem, contender.dtype)
    function = contender.prepare(problem)
    check(problem, function, trains, contender.dense, contender.seen)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(problem.q, problem.k, problem.v)

    def forward_backward() -> tuple[Tensor, ...]:
        out = function(problem.q, problem.k, problem.v)
        return torch.autograd.grad(out, problem.leaves, problem.grad_out)

    return forward_backward if trains else forward


def check(
    problem: Problem,
    function: Callable,
    trains: bool,
    dense: bool,
    seen: Callable[[AttentionPlan, Tensor], Tensor] | None = None,
) -> None:
    """Compare the output of some rows with `expected_rows`, and every gradient of a loss over these rows."""
    rows = checked_rows(problem.plan)
    doubles = {leaf: leaf.detach().double().requires_grad_(trains) for leaf in problem.leaves}
    expected = expected_rows(problem, rows, doubles, dense, None if seen is None else seen(problem.plan, rows))
    with torch.set_grad_enabled(trains):
        out = function(problem.q, problem.k, problem.v)
    _compare(out[:, :, rows], expected, problem.q.dtype, "the output")
    if not trains:
        return
    grad_out = torch.zeros_like(problem.grad_out)
    grad_out[:, :, rows] = problem.grad_out[:, :, rows]
    gradients = torch.autograd.grad(out, problem.leaves, grad_out)
    wanted_gradients = torch.autograd.grad(expected, list(doubles.values()), problem.grad_out[:, :, rows].double())
    for number, (gradient, wanted_gradient) in enumerate(zip(gradients, wanted_gradients, strict=True)):
        _compare(gradient, wanted_gradient, problem.q.dtype, f"gradient {number}")


def checked_rows(plan: AttentionPlan) -> Tensor:
    """The rows that are checked: all rows of a small problem; the prefix and some spread rows of a large one."""
    if plan.total <= 4 * CHECKED_ROWS:
        return torch.arange(plan.total)
    patches = torch.linspace(plan.num_prefix_tokens, plan.total - 1, CHECKED_ROWS).round().long()
    return torch.cat([torch.arange(plan.num_prefix_tokens), patches]).unique()


def expected_rows(
    problem: Problem, rows: Tensor, doubles: dict[Tensor, Tensor], dense: bool, seen: Tensor | None = None
) -> Tensor:
    """Attention of some query rows as it is defined, in float64: softmax over whole rows of logits.

    Args:
        problem: what is computed.
        rows: token numbers (R,).
        doubles: the problem's tensors in float64.
        dense: whether to leave the support out.
        seen: which keys the rows see, bool (H or 1, R, T), instead of the support's.

    Returns:
        (B, H, R, D).
    """
    plan, device = problem.plan, problem.q.device
    q, k, v = (doubles[x] for x in (problem.q, problem.k, problem.v))
    rows = rows.to(device)
    logits = q[:, :, rows] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    keys = torch.arange(plan.total, device=device)
    of_patches = (rows[:, None] >= plan.num_prefix_tokens) & (keys >= plan.num_prefix_tokens)
    if problem.decay is not None:
        decay = {key: doubles.get(x, x) if isinstance(x, Tensor) else x for key, x in problem.decay.items()}
        logits = logits * _decay_rows(plan, cast("DecayTensors", decay), rows, of_patches)
    if seen is not None:
        logits = logits.masked_fill(~seen.to(device), -math.inf)
    elif plan.offsets is not None and not dense:
        # Numbers of the tokens in the order of each head, (H, T).
        numbers = keys.expand(plan.num_heads, -1)
        if plan.ranks is not None:
            numbers = plan_table(plan, "token_ranks", device).expand(plan.num_heads, -1)
        distance = (numbers[:, rows, None] - numbers[:, None]).abs()
        mask = torch.stack(
            [torch.isin(d, torch.tensor(own, device=device)) for d, own in zip(distance, plan.offsets, strict=True)]
        )
        for head, pairs in enumerate(plan.pairs or ()):
            tokens = numbers[head].argsort()
            query, key = (tokens[torch.from_numpy(column).to(device) + plan.num_prefix_tokens] for column in pairs.T)
            place, pair = (rows[:, None] == query).nonzero(as_tuple=True)
            mask[head, place, key[pair]] = True
        mask = mask | ~of_patches
        mask = mask | ((distance == 0) & ~mask.any(-1, keepdim=True))
        logits = logits.masked_fill(~mask, -math.inf if plan.mask_fill == "neg_inf" else 0.0)
    return torch.softmax(logits, -1) @ v


def _decay_rows(plan: AttentionPlan, decay: DecayTensors, rows: Tensor, of_patches: Tensor) -> Tensor:
    """alpha M of some rows, (H, R, T)."""
    positions = torch.from_numpy(DECAYS[decay["name"]].positions(decay, plan.grid)).to(rows.device)
    positions = F.pad(positions, (plan.num_prefix_tokens, 0))
    distance_CRT = (positions[:, :, rows, None] - positions[:, :, None]).abs().sum(1)
    gamma_H = prefix_weights(decay, torch.float64)
    around = torch.ones(plan.num_heads, device=rows.device) if gamma_H is None else gamma_H
    weights = torch.where(of_patches, decay_weights(decay["beta"], distance_CRT, torch.float64), around.view(-1, 1, 1))
    alpha_H = decay.get("alpha")
    return weights if alpha_H is None else weights * alpha_H.view(-1, 1, 1)


def _compare(value: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    difference = float((value.detach().double() - expected.detach()).abs().max())
    limit = TOLERANCE[dtype] * max(1e-3, float(expected.detach().abs().max()))
    if not difference <= limit:
        raise RuntimeError(f"WRONG: {what} differs by {difference:.1e} from the expected values, allowed {limit:.1e}")
