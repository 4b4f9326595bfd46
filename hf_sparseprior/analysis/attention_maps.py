"""Attention weights as maps over the patches, and numbers that describe them.

The functions take the weights of any model. Some also take a boolean connectivity, either one for all images (H, T, T)
or one for each (B, H, T, T).

Shape letters: B batch, H heads, N patch tokens in a grid (height, width), P prefix tokens, T = P + N.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def query_map(pairs: Tensor, query: tuple[int, int], grid: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """What one patch gives to every patch: (..., H, height, width).

    Args:
        pairs: weights or connectivity (..., H, T, T).
        query: (row, column) of the patch, from 0.
        grid: (height, width) in patches.
        num_prefix_tokens: P.

    Raises:
        ValueError: for a patch outside the grid, or another number of tokens.
    """
    check_pairs(pairs, grid, num_prefix_tokens)
    if not (0 <= query[0] < grid[0] and 0 <= query[1] < grid[1]):
        raise ValueError(
            f"query={tuple(query)} must be (row, column) of a patch of the {grid[0]}x{grid[1]} grid, from 0"
        )
    position = num_prefix_tokens + query[0] * grid[1] + query[1]
    return pairs[..., position, num_prefix_tokens:].unflatten(-1, grid)


def class_token_map(pairs: Tensor, grid: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """What the class token gives to every patch: (..., height, width) from weights (..., T, T)."""
    check_pairs(pairs, grid, num_prefix_tokens)
    if not num_prefix_tokens:
        raise ValueError("the model has no class token; take the mean over the queries")
    return pairs[..., 0, num_prefix_tokens:].unflatten(-1, grid)


def mean_query_map(pairs: Tensor, grid: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """What all patches give to every patch, as a mean: (..., height, width) from weights (..., T, T)."""
    check_pairs(pairs, grid, num_prefix_tokens)
    return pairs[..., num_prefix_tokens:, num_prefix_tokens:].mean(-2).unflatten(-1, grid)


def check_pairs(pairs: Tensor, grid: tuple[int, int], num_prefix_tokens: int) -> None:
    """Raise ValueError unless these are values of all pairs of these tokens."""
    total = num_prefix_tokens + grid[0] * grid[1]
    if pairs.dim() < 2 or tuple(pairs.shape[-2:]) != (total, total):
        raise ValueError(
            f"values of shape {tuple(pairs.shape)} must be (..., {total}, {total}) for {num_prefix_tokens} prefix "
            f"tokens and a {grid[0]}x{grid[1]} grid"
        )


def rollouts(attentions: Iterable[Tensor]) -> Iterator[Tensor]:
    """Attention rollout from the input up to each layer, (B, T, T) (Abnar and Zuidema 2020, section 3).

    R_l = (A_l / 2 + I / 2) R_{l-1}, where A_l is the mean over the heads with rows scaled to sum 1.

    Args:
        attentions: weights (B, H, T, T) of each layer.
    """
    rolled = None
    for weights in attentions:
        mean = weights.mean(1)
        identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        step = mean / mean.sum(-1, keepdim=True) / 2 + identity / 2
        rolled = step if rolled is None else step @ rolled
        yield rolled


def attention_entropy(weights: Tensor) -> Tensor:
    """Entropy of each head's attention in nats, as the mean over all queries, (B, H). It is log T if uniform.

    Rows are scaled to sum 1 first, because decays after the softmax change their sum. Weights below 0 count as 0.
    """
    weights = weights.clamp_min(0)
    return torch.special.entr(weights / weights.sum(-1, keepdim=True)).sum(-1).mean(-1)


def attention_distance(weights: Tensor, grid: tuple[int, int], num_prefix_tokens: int) -> Tensor:
    """Mean distance of the patches that a head attends to, in patches, (B, H) (Dosovitskiy et al. 2021, Figure 7).

    Distances are Euclidean and weighted with the attention among patches; the mean is over the querying patches.
    Weights below 0, which mixers such as Linformer have, count as 0.
    """
    check_pairs(weights, grid, num_prefix_tokens)
    rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], -1)
    distances = torch.cdist(places, places).to(weights)
    patches = weights[..., num_prefix_tokens:, num_prefix_tokens:].clamp_min(0)
    total = patches.sum(-1)
    # A patch that attends to prefix tokens alone has no distance and does not count in the mean.
    looking = total > 0
    per_query = torch.where(looking, (patches * distances).sum(-1) / total.where(looking, torch.ones_like(total)), 0.0)
    return per_query.sum(-1) / looking.sum(-1).clamp_min(1)
