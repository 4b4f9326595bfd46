"""`flex`: pairs off the diagonals, and learned keys, by torch's FlexAttention.

Tokens come in tiles of 128 x 128 pairs. Tiles without a pair are skipped; of the others one bit says whether a query
sees a key. Bits and block mask of a support are made once, those of learned keys in each call. Shape letters as in
`ops`, n patches of a call, W = T / 32 words of bits.

Checked on a CPU: outputs of torch's unfused FlexAttention against `reference`, the block masks, graphs without breaks.
What only a GPU can check, and was not run on one: that the compiled kernels take this mask, their outputs and
gradients, and from which size on they are faster:

    python -m pytest tests/hf_sparseprior/attention/test_flex.py
    python -m tasks.benchmark attention --device cuda --dtype bfloat16 --support random --contenders flex,sdpa
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hf_sparseprior.attention.choice import register_backend, wants_gradients
from hf_sparseprior.attention.gather import not_listed
from hf_sparseprior.attention.plain_operations import plain
from hf_sparseprior.attention.plan import TABLES, AttentionPlan, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.registry import registering

TILE, WORD = 128, 32  # tokens of a tile, bits of a word
MIN_WIDTH = 16  # of a head in torch's kernels for CUDA
SIZES = 64  # compiled calls that stay


def flex_can_run(request: AttentionRequest) -> str | None:
    """None, or which part of the request FlexAttention cannot do, or another backend does better."""
    q, v = request.q, request.v
    if reason := not_listed(request):
        return reason
    if not request.has_lists():
        return "all pairs lie on diagonals"
    if request.decay is not None:
        return "FlexAttention with a decay takes 11 to 19 times as long as flash attention"
    if plain() is not None:
        return "the graph is for programs that do not know FlexAttention"
    if q.device.type == "cpu":
        if torch.compiler.is_compiling():  # of its CPU kernels some refuse masks that are made in the graph
            return "FlexAttention on a CPU runs outside graphs alone"
        return "FlexAttention has no gradients on a CPU" if wants_gradients(request) else None
    if q.device.type != "cuda":
        return f"FlexAttention runs on CPU and CUDA, not on {q.device.type}"
    if q.dtype == torch.float64:
        return "FlexAttention on CUDA is for float16, bfloat16 and float32, not for float64"
    if (width := min(q.shape[-1], v.shape[-1])) < MIN_WIDTH:
        return f"head width {width} must be {MIN_WIDTH} or more on CUDA"
    return None


def flex(request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
    """FlexAttention with a block mask: pairs off the diagonals, learned keys; chosen by name alone."""
    q, k, v = request.q, request.k, request.v
    if q.device.type == "cpu":  # where it refuses leaves even if nothing is recorded
        q, k, v = q.detach(), k.detach(), v.detach()
    if request.key_ids is None:
        mask, tables = plan_mask(request.plan, q.device)
    else:
        mask, tables = listed_block_mask(request.key_ids, request.plan.num_prefix_tokens, q.shape[2])
    run: Callable[..., Tensor] = _attend
    if not torch.compiler.is_compiling():
        sizes = q.shape, v.shape, tables.shape, request.key_ids is None, request.plan.num_prefix_tokens
        run = _compiled(q.device, q.dtype, request.logit_scale(), torch.is_grad_enabled(), *sizes)
    return run(q, k, v, mask, request.logit_scale()), None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask, scale=scale)


@lru_cache(SIZES)
def _compiled(device: torch.device, *sizes: Any) -> Callable[..., Tensor]:
    """`_attend` compiled for calls of these sizes alone; on a CPU traced and run without a compiler.

    Each has a code object of its own: torch compiles one only for eight sizes and then forms all pairs.
    """
    own = FunctionType(_attend.__code__.replace(), globals())
    return torch.compile(own, backend="eager" if device.type == "cpu" else "inductor", dynamic=False, fullgraph=True)


# ---- block masks ----------------------------------------------------------------------------------------------------


def plan_mask(plan: AttentionPlan, device: torch.device) -> tuple[BlockMask, Tensor]:
    """The block mask of a plan's support on a device, made once, and the bits that it reads."""
    if not torch.compiler.is_compiling() and (kept := plan.block_masks.get(device)) is not None:
        return kept
    with torch.inference_mode(False):
        numbers, words = (plan_table(plan, name, device) for name in ("tile_numbers", "tile_words"))
        prefix = plan.num_prefix_tokens

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            tile = numbers[head, query // TILE, key // TILE]
            word = words[tile, query % TILE, key % TILE // WORD]
            return (query < prefix) | (((word >> (key % WORD)) & 1) != 0)

        made = _block_mask((numbers > 0)[None], prefix, plan.total, seen), words
    if not torch.compiler.is_compiling() and type(words) is Tensor:
        plan.block_masks[device] = made
    return made


def listed_block_mask(key_ids: Tensor, prefix: int, total: int) -> tuple[BlockMask, Tensor]:
    """The block mask of lists of keys (B, H, n, K), each of different keys, and its bits (B, H, T, W)."""
    blocks = -(-total // TILE)
    columns = blocks * (TILE // WORD)
    keys = key_ids.long()
    bits = torch.ones_like(key_ids, dtype=torch.int32) << (keys % WORD).int()
    places = torch.where(keys < 0, columns, keys // WORD)  # "no key" has a column after the last
    words = torch.zeros(*key_ids.shape[:3], columns + 1, dtype=torch.int32, device=key_ids.device)
    words = words.scatter_add(-1, places, bits)[..., :columns]  # keys differ, so a sum of bits is their union
    words = F.pad(words, (0, 0, prefix, blocks * TILE - total))

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        word = words[batch, head, query, key // WORD]
        return (query < prefix) | (((word >> (key % WORD)) & 1) != 0)

    visited = (words != 0).unflatten(-1, (blocks, -1)).any(-1).unflatten(-2, (blocks, -1)).any(-2)
    return _block_mask(visited, prefix, total, seen), words


def _block_mask(visited: Tensor, prefix: int, total: int, seen: Callable[..., Tensor]) -> BlockMask:
    """A block mask of the tiles (B or 1, H, rows, columns) with a pair, and of those with a prefix token's row."""
    first = torch.arange(0, total, TILE, device=visited.device)
    visited = visited | (first < prefix)[:, None]
    counts = visited.sum(-1, dtype=torch.int32)
    order = visited.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=TILE, mask_mod=seen, seq_lengths=(total, total))


@registering("table", TABLES, "tile_numbers")
def _tile_numbers(plan: AttentionPlan) -> np.ndarray:
    """The tile of bits at each place, int32 (H, rows, columns), from 1; 0 for one without a pair.

    Heads with the same pairs as the first have its tiles. Rows of prefix tokens, which see everything, do not count.
    """
    lists, blocks, count = plan.build_table("keys"), -(-plan.total // TILE), 0
    numbers = np.zeros((plan.num_heads, blocks**2), dtype=np.int32)
    for head, keys in enumerate(lists):
        if head and np.array_equal(keys, lists[0]):
            numbers[head] = numbers[0]
            continue
        numbers[head, _tiles_of_pairs(plan, keys)[0]] = 1
        present = np.flatnonzero(numbers[head])
        numbers[head, present] = count + 1 + np.arange(len(present))
        count += len(present)
    return numbers.reshape(plan.num_heads, blocks, blocks)


@registering("table", TABLES, "tile_words")
def _tile_words(plan: AttentionPlan) -> np.ndarray:
    """A bit for each pair of each tile, int32 (tiles, 128, 4).

    Their number is a power of two, so that layers that draw different pairs share what is compiled.
    """
    lists, numbers = plan.build_table("keys"), _tile_numbers(plan)
    words = np.zeros((1 << int(numbers.max()).bit_length(), TILE, TILE // WORD), dtype=np.int32)
    end = 1
    for keys, numbers_of_head in zip(lists, numbers.reshape(len(lists), -1), strict=True):
        begin, end = end, max(end, int(numbers_of_head.max()) + 1)
        if begin == end:  # a head with the tiles of the first
            continue
        tiles, queries, seen = _tiles_of_pairs(plan, keys)
        bits = np.zeros((end - begin, TILE, TILE), dtype=bool)
        bits[numbers_of_head[tiles] - begin, queries % TILE, seen % TILE] = True
        words[begin:end] = np.packbits(bits, axis=-1, bitorder="little").view("<i4")
    return words


def _tiles_of_pairs(plan: AttentionPlan, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each pair of lists of keys (N, K): the place of its tile, its query and its key."""
    rows, places = np.nonzero(keys >= 0)
    queries, seen = rows + plan.num_prefix_tokens, keys[rows, places]
    return queries // TILE * -(-plan.total // TILE) + seen // TILE, queries, seen


# No card is measured, so nothing chooses it yet: with a record in tasks/benchmark/results/gpu, entries such as
# ("cuda 9.0", True, "sdpa"): Crossover(tokens, density) belong here, for each compute capability its own.
register_backend("flex", can_run=flex_can_run, run=flex, priority=47, crossovers={}, only_measured=True)
