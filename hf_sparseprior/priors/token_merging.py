"""Token merging (ToMe; Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023).

In each block, between attention and MLP, the r most similar pairs of patch tokens become one token each. Later blocks
count a token as many times as the patches that it stands for, in attention and in a mean over tokens.

Shape letters: B batch, C hidden size, D head width, N patches of the grid, n tokens that are left without the prefix, P
prefix tokens, T = P + n, r tokens that a block merges into others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior.attention.key_selection import descending_places, without_autocast
from hf_sparseprior.attention.plain_operations import whole_number
from hf_sparseprior.attention.request import CallOptions
from hf_sparseprior.base.checks import check_integer, python_value
from hf_sparseprior.base.extras import register_extra
from hf_sparseprior.base.resolved import ResolvedPrior, Settings
from hf_sparseprior.priors.token_pruning import TokenReduction, Tokens, all_ids, gather_tokens

DEFAULT_KEEP = 0.5
ROWS = 1024  # tokens of A that are compared at a time with all of B, so that no table of all pairs is formed


class Merges(NamedTuple):
    """Which tokens become one, by their places in the sequence, for each image.

    remaining: int64 (B, T - r), those that stay, ascending. merged: (B, r), those that are merged into others. targets:
    (B, r), the places of these others among `remaining`.
    """

    remaining: Tensor
    merged: Tensor
    targets: Tensor


def wanted_merges(settings: Mapping[str, Any], num_patches: int, num_layers: int) -> list[int]:
    """r of each block as the settings ask for it, for N patches: with `keep` the same in all, up to rounding."""
    keep, r = settings["keep"], settings["r"]
    if r is not None:
        return [r] * num_layers if isinstance(r, int) else list(r)
    total = num_patches - max(1, round(keep * num_patches))
    return [total * (layer + 1) // num_layers - total * layer // num_layers for layer in range(num_layers)]


def merges_of_layers(settings: Mapping[str, Any], num_patches: int, num_layers: int) -> list[int]:
    """r of each block: as wanted, but at most half of the tokens, all that a matching can merge (as published)."""
    counts, left = [], num_patches
    for count in wanted_merges(settings, num_patches, num_layers):
        counts.append(min(count, left // 2))
        left -= counts[-1]
    return counts


def bipartite_soft_matching(metric: Tensor, count: int, prefix: int) -> Merges:
    """The matching of section 3, "Bipartite Soft Matching".

    The patch tokens are split by turns into A and B. Each token of A has one edge, to the most similar token of B
    (cosine of `metric`, float32 at least). Of the `count` most similar edges, the tokens of A are merged into those of
    B. Prefix tokens stay as they are, and the order of the tokens stays. (In the published code the class token is
    split with them, and tokens of A come before those of B afterwards, so the next block splits them in another way.)
    Nothing has a gradient.

    Args:
        metric: (B, T, D), by which tokens are similar: in the paper the mean of the keys over the heads.
        count: r, at most (T - P) // 2.
        prefix: P.
    """
    dtype = torch.promote_types(metric.dtype, torch.float32)
    with without_autocast(metric.device):
        unit = F.normalize(metric.detach()[:, prefix:].to(dtype), dim=-1)
        first, second = unit[:, ::2], unit[:, 1::2].transpose(1, 2)
        best = [(rows @ second).max(-1) for rows in first.split(ROWS, 1)]
    similarity, partner = (torch.cat(parts, 1) for parts in zip(*best, strict=True))
    order = descending_places(similarity)
    merged, left = (prefix + 2 * places for places in (order[:, :count], order[:, count:]))
    places = all_ids(metric)
    remaining = torch.cat([places[:, :prefix], places[:, prefix + 1 :: 2], left], 1).sort(1).values
    stays = torch.ones_like(places).scatter(1, merged, torch.zeros_like(merged))
    target = prefix + 1 + 2 * partner.gather(1, order[:, :count])
    return Merges(remaining, merged, (stays.cumsum(1) - 1).gather(1, target))


def merge(tokens: Tensor, sizes: Tensor, merges: Merges) -> tuple[Tensor, Tensor]:
    """Merged tokens (B, T - r, C), each the mean of its patches, and how many patches each stands for, (B, T - r).

    Args:
        tokens: (B, T, C).
        sizes: (B, T), float32 at least, how many patches a token stands for.
        merges: which become one.
    """
    weighted = tokens * sizes.unsqueeze(-1)
    columns = merges.targets.unsqueeze(-1).expand(-1, -1, tokens.shape[-1])
    sums = gather_tokens(weighted, merges.remaining).scatter_add(1, columns, gather_tokens(weighted, merges.merged))
    sizes = sizes.gather(1, merges.remaining).scatter_add(1, merges.targets, sizes.gather(1, merges.merged))
    return (sums / sizes.unsqueeze(-1)).to(tokens.dtype), sizes


@register_extra("tome")
class ToMe(TokenReduction):
    """Merges the most similar patches in each block (Bolya et al. 2023). Nothing is learned.

    keep: share of the patches that is left after the last block; all blocks merge as many, up to rounding. r: instead,
    how many tokens each block merges, or a list with one number for each block. Neither: keep 0.5. `keep` follows the
    size of an image; with `r`, as published, and in images with fewer patches, a block merges at most half.
    """

    SETTINGS: dict[str, Any] = {"keep": None, "r": None}
    verb = "merges"

    def __init__(self, num_layers: int, hidden_size: int, **settings: Any) -> None:
        super().__init__()
        self.num_layers, self.settings = num_layers, settings

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `Extra`."""
        keep, r = python_value(settings["keep"]), python_value(settings["r"])
        if r is None:
            keep = DEFAULT_KEEP if keep is None else keep
            if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
                raise ValueError(f"tome: keep={keep!r} must be a number above 0 and at most 1")
            return {"keep": float(keep), "r": None}
        if keep is not None:
            raise ValueError(f"tome: keep={keep!r} and r={r!r} cannot both be given")
        if isinstance(r, Sequence) and not isinstance(r, str):
            return {"keep": None, "r": [check_integer("tome: r", count, 0) for count in r]}
        return {"keep": None, "r": check_integer("tome: r", r, 0, ", or a list with one for each block")}

    @classmethod
    def check_model(cls, settings: Mapping[str, Any], config: Any) -> None:
        """As `Extra`: refused are lists of another length, and merges that are not possible at the configured size."""
        layers, left = config.num_hidden_layers, config.grid[0] * config.grid[1]
        given = f"keep={settings['keep']}" if settings["r"] is None else f"r={settings['r']}"
        counts = wanted_merges(settings, left, layers)
        if len(counts) != layers:
            raise ValueError(f"prior: tome: {given} must have one number for each of {layers} blocks")
        for number, count in enumerate(counts, start=1):
            if count > left // 2:
                raise ValueError(
                    f"prior: tome: {given}: block {number} would merge {count} of {left} tokens, at most half can be"
                )
            left -= count

    @classmethod
    def check_prior(cls, settings: Mapping[str, Any], prior: ResolvedPrior) -> None:
        """As `TokenReduction`: only dense attention goes with it."""
        support, others = prior["support"]["name"], ("decay", "predictor")
        wrong = f"support={support!r} must be 'dense'" if support != "dense" else ""
        for slot in others:
            if (component := prior[slot]) is not None:  # type: ignore[literal-required]
                wrong = f"{slot}={component['name']!r} must be None"
        if wrong:
            raise ValueError(
                f"prior: 'tome' merges tokens, which then have no place in the grid and count by their size; {wrong}"
            )

    @classmethod
    def layer_tokens(cls, settings: Mapping[str, Any], num_layers: int, num_tokens: int) -> list[tuple[int, int]]:
        """As `TokenReduction`."""
        sizes, left = [], num_tokens
        for count in merges_of_layers(settings, num_tokens, num_layers):
            sizes.append((left, left - count))
            left -= count
        return sizes

    @classmethod
    def choice_multiply_adds(
        cls, settings: Mapping[str, Any], num_layers: int, width: int, num_heads: int, num_tokens: int, prefix: int
    ) -> dict[int, int]:
        """As `TokenReduction`: the similarities of A and B."""
        sizes = enumerate(cls.layer_tokens(settings, num_layers, num_tokens))
        return {layer: (n - n // 2) * (n // 2) * (width // num_heads) for layer, (n, left) in sizes if left < n}

    def count(self, layer_idx: int, grid: tuple[int, int]) -> int:
        """r of a block, from 0, for images of this grid."""
        num_patches = whole_number(grid[0]) * whole_number(grid[1])
        return merges_of_layers(self.settings, num_patches, self.num_layers)[layer_idx]

    def within(self, layer_idx: int, grid: tuple[int, int]) -> bool:
        """As `TokenReduction`."""
        return self.count(layer_idx, grid) > 0

    def seen_by(self, options: CallOptions) -> CallOptions:
        """As `TokenReduction`: the mean of the keys over the heads."""
        return options._replace(mean_keys=True)

    def forward(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        tokens: Tokens,
        seen: Tensor,
        grid: tuple[int, int],
        num_prefix_tokens: int,
    ) -> tuple[Tensor, Tokens]:
        """As `TokenReduction`."""
        merges = bipartite_soft_matching(seen, self.count(layer_idx, grid), num_prefix_tokens)
        sizes = tokens.sizes
        if sizes is None:
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
            sizes = torch.ones_like(hidden_states[..., 0], dtype=dtype, requires_grad=False)
        ids = all_ids(hidden_states[:, num_prefix_tokens:]) if tokens.token_ids is None else tokens.token_ids
        ids = ids.gather(1, merges.remaining[:, num_prefix_tokens:] - num_prefix_tokens)
        ids = ids.scatter(1, merges.targets - num_prefix_tokens, torch.full_like(merges.targets, -1))
        hidden_states, sizes = merge(hidden_states, sizes, merges)
        return hidden_states, tokens._replace(token_ids=ids, sizes=sizes)
