"""Mixers: what replaces the softmax over all pairs (Fibottention Tables 2 and 10, Sparsifiner Table 4).

`register_mixer` makes a class a value of the `mixer` of a prior.

Shape letters: B batch, H heads, D head width, N patch tokens, P prefix tokens, T = P + N, R projected tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.checks import check_boolean, check_not_both
from hf_sparseprior.base.costs import AttentionCosts
from hf_sparseprior.base.extras import PriorModule
from hf_sparseprior.base.limits import check_sides, check_size
from hf_sparseprior.base.registry import registering
from hf_sparseprior.base.resolved import Settings
from hf_sparseprior.patterns.masks import unpruned_count

MIXERS: dict[str, type[Mixer]] = {}


def register_mixer(name: str) -> Callable[[type[Mixer]], type[Mixer]]:
    """Register a subclass of `Mixer` under `name`."""
    return registering("mixer", MIXERS, name)


class Mixer(PriorModule, AttentionCosts):
    """Base of all mixers except the softmax itself, which has no module.

    Args:
        num_heads: H.
        head_dim: D, width of the values.
        settings: resolved settings.
    """

    def __init__(self, num_heads: int, head_dim: int, **settings: Any) -> None:
        super().__init__()

    @staticmethod
    def key_width(settings: Mapping[str, Any], head_dim: int) -> int:
        """Width of the queries and keys of a head."""
        return head_dim

    def forward(self, request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
        """Output (B, H, T, D) of q, k (B, H, T, key width) and v (B, H, T, D); weights (B, H, T, T) if wanted."""
        raise NotImplementedError


@register_mixer("softmax")
class Softmax(Mixer):
    """Softmax attention, on which a prior's other slots act. It is never built."""


def resize_tokens(weight: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """(R, N) over one patch grid as (R, N) over another, interpolated bicubic in float32 at least."""
    if old == new:
        return weight
    precise = weight.to(torch.promote_types(weight.dtype, torch.float32))
    resized = F.interpolate(precise.unflatten(1, old)[None], size=new, mode="bicubic", align_corners=False)
    return resized[0].flatten(1).to(weight.dtype)


@register_mixer("linformer")
class Linformer(Mixer):
    """Softmax over R mixtures of the patches instead of the patches, and over the prefix (Wang et al. 2020).

    The mixtures of keys and of values are learned. All heads of a layer share them (Linformer's headwise sharing). R is
    `projected_tokens`, or what a pruning ratio leaves of N keys; the default is 4 of 196, 97.96 % (Fibottention Table
    2). On another grid the mixtures are interpolated, with their sums kept.
    """

    SETTINGS = {"projected_tokens": None, "share_key_value": False, "grid": None, "pruning_ratio": None}
    DEFAULT_RATIO = 97.96

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        **settings: Any,
    ) -> None:
        super().__init__(num_heads, head_dim)
        self.grid = (settings["grid"][0], settings["grid"][1])
        shape = (settings["projected_tokens"], self.grid[0] * self.grid[1])
        self.mix_keys = nn.Parameter(torch.empty(shape))
        self.mix_values = None if settings["share_key_value"] else nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `PriorModule`; the grid that the mixtures are made for is kept in the settings."""
        sides = check_sides("linformer", settings["grid"], grid)
        number, ratio = settings["projected_tokens"], settings["pruning_ratio"]
        check_not_both("linformer: projected_tokens", number, ratio)
        if number is None:
            number = unpruned_count("linformer", cls.DEFAULT_RATIO if ratio is None else ratio, sides[0] * sides[1])
        return {
            "projected_tokens": check_size("linformer: projected_tokens", number, 1, "width"),
            "share_key_value": check_boolean("linformer: share_key_value", settings["share_key_value"]),
            "grid": sides,
            "pruning_ratio": None,  # the pruning ratio has decided the number, which is the size of a weight
        }

    def initial_values(self) -> dict[str, Tensor]:
        """Normal values, so that a mixture of independent keys has their variance."""
        std = (self.grid[0] * self.grid[1]) ** -0.5
        return {name: torch.randn(weight.shape) * std for name, weight in self.named_parameters(recurse=False)}

    @classmethod
    def num_weights(cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int) -> int:
        """As `PriorModule`."""
        mixtures = settings["projected_tokens"] * settings["grid"][0] * settings["grid"][1]
        return mixtures if settings["share_key_value"] else 2 * mixtures

    @classmethod
    def cost_in_pairs(cls, settings: Mapping[str, Any], head_dim: int, num_tokens: int, num_prefix_tokens: int) -> int:
        """As `AttentionCosts`."""
        return (num_tokens + num_prefix_tokens) * (num_prefix_tokens + settings["projected_tokens"])

    @classmethod
    def other_multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, head_dim: int, num_tokens: int, num_prefix_tokens: int
    ) -> int:
        """As `AttentionCosts`: the mixing of keys and of values."""
        return 2 * settings["projected_tokens"] * num_tokens * num_heads * head_dim

    def _mix(self, weight: Tensor, tokens: Tensor, plan: AttentionPlan, token_ids: Tensor | None) -> Tensor:
        """Turn (B, H, T, D) into (B, H, P + R, D)."""
        prefix = plan.num_prefix_tokens
        weight = resize_tokens(weight, self.grid, plan.grid).to(tokens.dtype)
        weight = weight * (self.grid[0] * self.grid[1] / plan.num_tokens)
        if token_ids is not None:
            weight = weight[:, token_ids].transpose(0, 1).unsqueeze(1)  # (B, 1, R, n)
        return torch.cat([tokens[:, :, :prefix], weight @ tokens[:, :, prefix:]], 2)

    def forward(self, request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
        """As `Mixer`. The weights are those of the single values, computed through their mixtures."""
        q, v, plan, token_ids, dropout_p = request.q, request.v, request.plan, request.token_ids, request.dropout_p
        value_weight = self.mix_keys if self.mix_values is None else self.mix_values
        k, mixed = self._mix(self.mix_keys, request.k, plan, token_ids), self._mix(value_weight, v, plan, token_ids)
        scale = request.logit_scale()
        if not request.need_weights:
            return F.scaled_dot_product_attention(q, k, mixed, dropout_p=dropout_p, scale=scale), None
        dtype = torch.promote_types(q.dtype, torch.float32)
        logits = (q.to(dtype) * scale) @ k.to(dtype).transpose(-1, -2)
        probs = F.dropout(torch.softmax(logits, -1), dropout_p).to(v.dtype)
        identity = torch.eye(v.shape[2], dtype=v.dtype, device=v.device).expand(len(v), 1, -1, -1)
        return probs @ mixed, probs @ self._mix(value_weight, identity, plan, token_ids)


@register_mixer("efficient")
class EfficientAttention(Mixer):
    """softmax over features of Q, times (softmax over tokens of K)^T V: linear in the tokens (Shen et al. 2021, Eq. 5).

    Its products cost 2 T w D multiply-adds a head, where w = `key_width` is the width of queries and keys. Dense
    attention's cost 2 T^2 D, so the pruning ratio is 100 (1 - w / N) %. With the head's own width 64 that is 67.3 % at
    N = 196; Fibottention's Table 2 prints 97.98, which needs w = 4. A given pruning ratio decides w.
    """

    SETTINGS = {"key_width": None, "pruning_ratio": None}

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `PriorModule`."""
        width, ratio = settings["key_width"], settings["pruning_ratio"]
        check_not_both("efficient: key_width", width, ratio)
        if ratio is not None:
            width = unpruned_count("efficient", ratio, grid[0] * grid[1])
        width = None if width is None else check_size("efficient: key_width", width, 1, "width")
        return {"key_width": width, "pruning_ratio": None}

    @staticmethod
    def key_width(settings: Mapping[str, Any], head_dim: int) -> int:
        """As `Mixer`."""
        return head_dim if settings["key_width"] is None else settings["key_width"]

    @classmethod
    def cost_in_pairs(cls, settings: Mapping[str, Any], head_dim: int, num_tokens: int, num_prefix_tokens: int) -> int:
        """As `AttentionCosts`."""
        return (num_tokens + num_prefix_tokens) * cls.key_width(settings, head_dim)

    @classmethod
    def num_weights(cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int) -> int:
        """As `PriorModule`: what projections of another width have more, or less."""
        return 2 * width * (num_heads * cls.key_width(settings, width // num_heads) - width)

    @classmethod
    def projection_multiply_adds(cls, settings: Mapping[str, Any], num_heads: int, width: int, total: int) -> int:
        """As `AttentionCosts`: queries and keys of another width."""
        return 2 * total * width * (num_heads * cls.key_width(settings, width // num_heads) - width)

    def forward(self, request: AttentionRequest) -> tuple[Tensor, Tensor | None]:
        """As `Mixer`, but without scale and dropout."""
        q, k, v = request.q, request.k, request.v
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries, keys = torch.softmax(q.to(dtype), -1).to(q.dtype), torch.softmax(k.to(dtype), -2).to(q.dtype)
        weights = queries @ keys.transpose(-1, -2) if request.need_weights else None
        return queries @ (keys.transpose(-1, -2) @ v), weights
