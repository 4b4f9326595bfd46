"""Sliding windows that a user would take instead: flash attention's, FlexAttention's and NATTEN's.

A window as wide as the support's largest offset sees all that the support sees, and more. So its output is another; it
is checked against attention over its own keys. Shape letters as in `contenders`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hf_sparseprior.attention.plan import AttentionPlan
from tasks.benchmark.contenders import FLEX_BLOCK, Contender, Problem, along_offsets, flex_can_run

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def windows() -> dict[str, Contender]:
    """The contenders with a sliding window, by name."""
    return {
        "flash_window": Contender(
            "flash-attn with a window as wide as the largest offset",
            _flash_can_run, _run_flash, seen=_in_widest, prefix=False,
        ),
        "flex_window": Contender(
            "FlexAttention, compiled, in each head a window as wide as its largest offset",
            _flex_window_can_run, _run_flex_window, seen=_in_own,
        ),
        "natten": Contender(
            "NATTEN's na1d with a window as wide as the largest offset",
            _natten_can_run, _run_natten, seen=_in_natten, prefix=False,
        ),
    }  # fmt: skip


def widths(plan: AttentionPlan) -> list[int]:
    """The largest offset of each head, 0 where it has none."""
    assert plan.offsets is not None
    return [max(own, default=0) for own in plan.offsets]


# ---- which keys a row sees ------------------------------------------------------------------------------------------


def _in_widest(plan: AttentionPlan, rows: Tensor) -> Tensor:
    return ((rows[:, None] - torch.arange(plan.total)).abs() <= max(widths(plan)))[None]


def _in_own(plan: AttentionPlan, rows: Tensor) -> Tensor:
    keys, prefix = torch.arange(plan.total), plan.num_prefix_tokens
    near = (rows[:, None] - keys).abs() <= torch.tensor(widths(plan)).view(-1, 1, 1)
    return near | (rows < prefix)[:, None] | (keys < prefix)


def _in_natten(plan: AttentionPlan, rows: Tensor) -> Tensor:
    """At the ends NATTEN moves the window, so that each row has as many keys."""
    size = 2 * max(widths(plan)) + 1
    first = (rows - size // 2).clamp(0, plan.total - size)[:, None]
    keys = torch.arange(plan.total)
    return ((keys >= first) & (keys < first + size))[None]


# ---- flash attention ------------------------------------------------------------------------------------------------


def _of_cuda(problem: Problem, package: str, install: str, halves: bool) -> str | None:
    if reason := along_offsets(problem, "a window"):
        return reason
    if find_spec(package) is None:
        return f"{package} is not installed (pip install {install})"
    if problem.q.device.type != "cuda":
        return f"{package} is for CUDA, not for {problem.q.device.type}"
    if halves and problem.q.dtype not in (torch.float16, torch.bfloat16):
        return f"{package} is for float16 and bfloat16, not for {str(problem.q.dtype).removeprefix('torch.')}"
    if problem.plan.num_prefix_tokens:
        return f"the window of {package} has no prefix tokens that see everything"
    return None


def _flash_can_run(problem: Problem, trains: bool) -> str | None:
    return _of_cuda(problem, "flash_attn", "flash-attn", halves=True)


def _run_flash(problem: Problem) -> Attend:
    from flash_attn import flash_attn_func

    width = max(widths(problem.plan))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), window_size=(width, width))
        return out.transpose(1, 2)

    return attend


# ---- FlexAttention --------------------------------------------------------------------------------------------------


def _flex_window_can_run(problem: Problem, trains: bool) -> str | None:
    return along_offsets(problem, "a window") or flex_can_run(problem, trains)


def window_mask(plan: AttentionPlan, device: torch.device) -> BlockMask:
    """Block mask of the windows: blocks that are so near that a pair of them may be within the head's width."""
    prefix, total = plan.num_prefix_tokens, plan.total
    width = torch.tensor(widths(plan), device=device)
    blocks = torch.arange(-(-total // FLEX_BLOCK), device=device)
    steps = (width + FLEX_BLOCK - 1) // FLEX_BLOCK
    near = (blocks[:, None] - blocks).abs() <= steps.view(-1, 1, 1)
    if prefix:
        near[:, 0] = near[:, :, 0] = True

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((query - key).abs() <= width[head]) | (query < prefix) | (key < prefix)

    counts = near.sum(-1, dtype=torch.int32)
    order = near.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(
        counts[None], order[None], BLOCK_SIZE=FLEX_BLOCK, mask_mod=mask_mod, seq_lengths=(total, total)
    )


def _run_flex_window(problem: Problem) -> Attend:
    mask = window_mask(problem.plan, problem.q.device)
    torch._dynamo.reset()  # one compiled kernel for each size, not one for all
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


# ---- NATTEN ---------------------------------------------------------------------------------------------------------


def _natten_can_run(problem: Problem, trains: bool) -> str | None:
    if reason := _of_cuda(problem, "natten", "natten", halves=False):
        return reason
    size = 2 * max(widths(problem.plan)) + 1
    if not 1 < size <= problem.plan.total:
        return f"a window of {size} keys must be in 2..{problem.plan.total}, the tokens"
    return None


def _run_natten(problem: Problem) -> Attend:
    from natten.functional import na1d

    size = 2 * max(widths(problem.plan)) + 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = na1d(*(x.transpose(1, 2) for x in (q, k, v)), kernel_size=(size,))
        return out.transpose(1, 2)

    return attend
