"""Token merging (ToMe; Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023), for the weights of our ViT.

In each layer, between attention and MLP, the r most similar pairs of tokens become one token each. "Keeps 90 %" means
here that 90 % of the patch tokens are left after the last layer; the paper gives r instead. All layers merge alike: r
is the same in each, up to rounding.

Shape letters: B batch, C hidden size, H heads, D head width, T tokens, P prefix tokens, n = T - P.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Merges(NamedTuple):
    """Which tokens become one, by their places in the sequence, for each image.

    kept: int64 (B, tokens left), those that stay, ascending. gone: (B, r), those that are merged into others. into:
    (B, r), each one's place among `kept`.
    """

    kept: Tensor
    gone: Tensor
    into: Tensor


Match = Callable[[Tensor, int, int], Merges]


def merges_of_layers(keep: float, patches: int, layers: int) -> list[int]:
    """r of each layer, so that round(keep * patches) patch tokens are left in the end.

    Raises:
        ValueError: where a layer would have to merge more than half of its tokens, which a matching cannot.
    """
    total = patches - max(1, round(keep * patches))
    counts = [total * (layer + 1) // layers - total * layer // layers for layer in range(layers)]
    left = patches
    for number, count in enumerate(counts, start=1):
        if count > left // 2:
            raise ValueError(f"keep={keep}: layer {number} would merge {count} of {left} tokens, at most half can be")
        left -= count
    return counts


def bipartite_soft_matching(metric: Tensor, count: int, prefix: int) -> Merges:
    """The matching of section 3, "Bipartite Soft Matching".

    The patch tokens are split by turns into A and B. Each token of A has one edge, to the most similar token of B
    (cosine of `metric`, float32). The `count` most similar edges are kept, and their tokens of A are merged into those
    of B. Prefix tokens stay as they are.

    Args:
        metric: (B, T, D), by which tokens are similar: in the paper the mean of the keys over the heads.
        count: r, at most (T - P) // 2.
        prefix: P.
    """
    unit = F.normalize(metric[:, prefix:].float(), dim=-1)
    similarity, partner = (unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)).max(-1)
    order = similarity.argsort(dim=-1, descending=True, stable=True)[:, :count]
    gone = prefix + 2 * order
    places = torch.arange(metric.shape[1], device=metric.device).expand(metric.shape[0], -1)
    stays = torch.ones_like(places, dtype=torch.bool).scatter(1, gone, False)
    kept = places[stays].view(metric.shape[0], -1)
    target = prefix + 2 * partner.gather(1, order) + 1
    return Merges(kept, gone, (stays.cumsum(1) - 1).gather(1, target))


def merge(tokens: Tensor, sizes: Tensor, merges: Merges) -> tuple[Tensor, Tensor]:
    """Merged tokens (B, T - r, C), each the mean of its patches, and how many patches each stands for, (B, T - r).

    Args:
        tokens: (B, T, C).
        sizes: float32 (B, T), how many patches a token stands for.
        merges: which become one.
    """
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    weighted = tokens.to(dtype) * sizes.unsqueeze(-1)

    def gathered(values: Tensor, places: Tensor) -> Tensor:
        return values.gather(1, places.unsqueeze(-1).expand(-1, -1, values.shape[-1]))

    sums, columns = gathered(weighted, merges.kept), merges.into.unsqueeze(-1).expand(-1, -1, tokens.shape[-1])
    sums = sums.scatter_add(1, columns, gathered(weighted, merges.gone))
    sizes = sizes.gather(1, merges.kept).scatter_add(1, merges.into, sizes.gather(1, merges.gone))
    return (sums / sizes.unsqueeze(-1)).to(tokens.dtype), sizes


class MergedViT(nn.Module):
    """A dense `SparsePriorViTModel` that merges tokens, with proportional attention (section 3, Eq. 1).

    Args:
        model: the model, whose weights are shared.
        keep: share of the patch tokens that is left in the end.
        plain: with attention and merging written out, one pair after another, to compare with.
    """

    def __init__(self, model: Any, keep: float, plain: bool = False) -> None:
        super().__init__()
        self.model, self.plain = model, plain
        height, width = model.config.grid
        self.counts = merges_of_layers(keep, height * width, len(model.layers))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Images (B, channels, height, width) as tokens (B, tokens left, C) after the last norm, prefix first."""
        tokens, grid = self.model.embeddings(pixel_values)
        sizes = torch.ones(tokens.shape[:2], device=tokens.device)
        for layer, count in zip(self.model.layers, self.counts, strict=True):
            tokens, sizes = self.layer(layer, tokens, sizes, grid, count)
        return self.model.layernorm(tokens)

    def layer(self, layer: Any, tokens: Tensor, sizes: Tensor, grid: Any, count: int) -> tuple[Tensor, Tensor]:
        """One block: attention, merging, MLP."""
        prefix = self.model.config.num_prefix_tokens
        own = layer.attention
        normed = layer.layernorm_before(tokens)
        q, k, v = (
            projection(normed).unflatten(-1, (own.num_heads, -1)).transpose(1, 2)
            for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        merged_before = sizes.shape[1] < prefix + math.prod(grid)
        attend = written_out if self.plain else fused
        out = attend(q, k, v, sizes if merged_before else None)
        tokens = tokens + layer.layerscale_attention(own.o_proj(out.transpose(1, 2).flatten(2)))
        if count:
            metric = k.mean(1)
            if self.plain:
                tokens, sizes = merge_by_pairs(tokens, sizes, metric, count, prefix)
            else:
                tokens, sizes = merge(tokens, sizes, bipartite_soft_matching(metric, count, prefix))
        out = layer.mlp(layer.layernorm_after(tokens), grid, prefix)
        return tokens + layer.layerscale_mlp(out), sizes


def fused(q: Tensor, k: Tensor, v: Tensor, sizes: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D) + log s) v by torch's fused kernel; q, k, v (B, H, T, D), s (B, T) or None for ones."""
    bias = None if sizes is None else sizes.log().to(q.dtype)[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


# ---- the same, plainly ----------------------------------------------------------------------------------------------

ROWS = 256  # query rows of which the plain form has all weights at a time


def written_out(q: Tensor, k: Tensor, v: Tensor, sizes: Tensor | None) -> Tensor:
    """As `fused`: exp(q k^T / sqrt(D)) times s, over its sum, times v."""
    parts = []
    for start in range(0, q.shape[2], ROWS):
        logits = q[:, :, start : start + ROWS] @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        weights = weights if sizes is None else weights * sizes[:, None, None, :].to(weights.dtype)
        parts.append(weights @ v / weights.sum(-1, keepdim=True))
    return torch.cat(parts, 2)


def merge_by_pairs(tokens: Tensor, sizes: Tensor, metric: Tensor, count: int, prefix: int) -> tuple[Tensor, Tensor]:
    """As `bipartite_soft_matching` and `merge`, image after image and edge after edge.

    Args:
        tokens: (B, T, C). sizes: (B, T). metric: (B, T, D). count: r. prefix: P.
    """
    images = []
    for own, size, key in zip(tokens, sizes, metric, strict=True):
        unit = key / key.norm(dim=-1, keepdim=True)
        first = range(prefix, len(own), 2)
        scores = unit[list(first)] @ unit[prefix + 1 :: 2].T
        best = scores.argmax(1)
        edges = sorted(((-float(scores[a, b]), a, int(b)) for a, b in enumerate(best)))[:count]
        groups: dict[int, list[int]] = {place: [place] for place in range(len(own))}
        for _, a, b in edges:
            groups[prefix + 2 * b + 1] += groups.pop(first[a])
        new = [torch.stack([size[place] * own[place] for place in group]).sum(0) for group in groups.values()]
        news = torch.stack([size[group].sum() for group in groups.values()])
        images.append((torch.stack(new) / news.unsqueeze(-1), news))
    return torch.stack([own for own, _ in images]), torch.stack([size for _, size in images])
