"""Relative positions in attention: Swin's bias, iRPE, Transformer-XL (VIOLIN Tables 7, 26 and 27, appendix F.6).

All are added to the logits Q K^T / sqrt(d_h) last, after a decay's M. iRPE on values is also added to the output. They
start at zero, so a pretrained model stays what it is (VIOLIN F.6).

Shape letters: B batch, H heads, D head width, N patch tokens, P prefix tokens, T = P + N, O offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.checks import check_boolean, python_value
from hf_sparseprior.base.extras import Extra, register_extra
from hf_sparseprior.base.layer_sizes import HEAD_WIDTH, HEADS
from hf_sparseprior.base.limits import check_sides
from hf_sparseprior.base.resolved import Settings
from hf_sparseprior.patterns.relative_offsets import BUCKET_METHODS, count_buckets


class RelativePosition(Extra):
    """What relative positions add to the logits of one attention layer, and to its output.

    Args:
        num_heads: H.
        head_dim: D.
    """

    uses_weights = False  # True: `value_term` is called, which needs the attention weights

    def forward(self, request: AttentionRequest) -> Tensor:
        """Bias of the logits, broadcastable to (B, H, T, T)."""
        raise NotImplementedError

    def value_term(self, weights: Tensor, plan: AttentionPlan) -> Tensor:
        """What is added to the output: (B, H, T, D) from the attention weights (B, H, T, T)."""
        raise NotImplementedError


@register_extra("swin_rpb")
class SwinRelativePositionBias(RelativePosition):
    """A bias for each offset and head (Swin Eq. 4, VIOLIN Eq. 49): 104,976 parameters on DeiT-B.

    On another grid the table is interpolated (bicubic), as Swin does for another window.
    """

    # grid: (height, width) that the table is made for, None for that of the model. learn_prefix: also learn a bias from
    # patches to prefix tokens, one from prefix tokens to patches and one among prefix tokens (BEiT).
    SETTINGS = {"grid": None, "learn_prefix": False}
    takes_layouts = True
    UNIT_AXES = {"bias_table": ((HEADS,),), "prefix_bias": ((HEADS,),)}

    def __init__(self, num_heads: int, head_dim: int, **settings: Any) -> None:
        super().__init__()
        self.grid = tuple(settings["grid"])
        height, width = self.grid
        self.bias_table = nn.Parameter(torch.empty(num_heads, 2 * height - 1, 2 * width - 1))
        self.prefix_bias = nn.Parameter(torch.empty(num_heads, 3)) if settings["learn_prefix"] else None
        self.reset_parameters()

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `Extra`, with the model's grid if none is given."""
        sides = check_sides("swin_rpb", settings["grid"], grid)
        return {"grid": sides, "learn_prefix": check_boolean("swin_rpb: learn_prefix", settings["learn_prefix"])}

    @classmethod
    def num_weights(cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int) -> int:
        """As `PriorModule`."""
        return num_heads * (2 * settings["grid"][0] - 1) * (2 * settings["grid"][1] - 1)

    @classmethod
    def multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int, grid: Sequence[int], prefix: int
    ) -> int:
        """None: a table is looked up and added."""
        return 0

    def forward(self, request: AttentionRequest) -> Tensor:
        """(1, H, T, T)."""
        table: Tensor = self.bias_table
        plan = request.plan
        prefix = plan.num_prefix_tokens
        if self.grid != plan.grid:
            size = (2 * plan.grid[0] - 1, 2 * plan.grid[1] - 1)
            table = F.interpolate(table.unsqueeze(0), size=size, mode="bicubic", align_corners=False)[0]
        bias = table.flatten(1)[:, plan_table(plan, "relative_offsets", request.q.device)]
        if self.prefix_bias is None:
            return F.pad(bias, (prefix, 0, prefix, 0)).unsqueeze(0)
        to_prefix, from_prefix, among = (column.view(-1, 1, 1) for column in self.prefix_bias.unbind(1))
        heads, tokens = bias.shape[:2]
        above = torch.cat([among.expand(heads, prefix, prefix), from_prefix.expand(heads, prefix, tokens)], 2)
        below = torch.cat([to_prefix.expand(heads, tokens, prefix), bias], 2)
        return torch.cat([above, below], 1).unsqueeze(0)


class ImageRelativePosition(RelativePosition):
    """iRPE in contextual mode (Wu et al. 2021): vectors r of buckets of offsets, shared by the heads of a layer.

    On keys, q_j . r_b(j,k) is added to the logits; on queries, k_k . r_b(k,j); both with the logits' scale. On values,
    sum_k a_jk r_b(j,k) is added to the output, as in the published code. DeiT-B has 50 buckets of 64, 115,200
    parameters on all three. Buckets do not depend on a grid. The bucket of pairs with a prefix token is unused in a
    model without prefix tokens.
    """

    SETTINGS = {"method": "product", "ratio": 1.9}
    takes_layouts = True
    # Not of the values' table: what it adds to the output does not go through the values.
    UNIT_AXES = {"key_table": ((), (HEAD_WIDTH,)), "query_table": ((), (HEAD_WIDTH,))}
    on: str

    def __init__(self, num_heads: int, head_dim: int, **settings: Any) -> None:
        super().__init__()
        self.table_name = f"relative_buckets {settings['method']} {settings['ratio']}"
        buckets = count_buckets(settings["method"], settings["ratio"]) + 1
        self.key_table = nn.Parameter(torch.empty(buckets, head_dim))
        self.query_table = nn.Parameter(torch.empty(buckets, head_dim)) if "q" in self.on else None
        self.value_table = nn.Parameter(torch.empty(buckets, head_dim)) if "v" in self.on else None
        self.reset_parameters()

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `Extra`."""
        method, ratio = settings["method"], python_value(settings["ratio"])
        if method not in BUCKET_METHODS:
            raise ValueError(f"{cls.name}: method={method!r} must be one of {', '.join(BUCKET_METHODS)}")
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0.5 <= ratio <= 100:
            raise ValueError(f"{cls.name}: ratio={ratio!r} must be a number between 0.5 and 100")
        return {"method": method, "ratio": float(ratio)}

    @classmethod
    def num_weights(cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int) -> int:
        """As `PriorModule`."""
        return len(cls.on) * (count_buckets(settings["method"], settings["ratio"]) + 1) * (width // num_heads)

    @classmethod
    def multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int, grid: Sequence[int], prefix: int
    ) -> int:
        """T tokens times all buckets, of a head's width, once for each of keys, queries and values."""
        buckets = count_buckets(settings["method"], settings["ratio"]) + 1
        return len(cls.on) * (prefix + grid[0] * grid[1]) * buckets * width

    def forward(self, request: AttentionRequest) -> Tensor:
        """(B, H, T, T)."""
        q, k, scale = request.q, request.k, request.logit_scale()
        index = plan_table(request.plan, self.table_name, q.device).expand(*q.shape[:2], -1, -1)
        bias = ((q * scale) @ self.key_table.to(q.dtype).T).gather(-1, index)
        if self.query_table is not None:
            bias = bias + ((k * scale) @ self.query_table.to(k.dtype).T).gather(-1, index).transpose(-1, -2)
        return bias

    def value_term(self, weights: Tensor, plan: AttentionPlan) -> Tensor:
        """(B, H, T, D)."""
        assert self.value_table is not None
        index = plan_table(plan, self.table_name, weights.device).expand_as(weights)
        by_bucket = weights.new_zeros(*weights.shape[:-1], self.value_table.shape[0]).scatter_add(-1, index, weights)
        return by_bucket @ self.value_table.to(weights.dtype)


@register_extra("irpe_k")
class ImageRelativePositionOnKeys(ImageRelativePosition):
    """iRPE on keys."""

    on = "k"


@register_extra("irpe_qk")
class ImageRelativePositionOnQueriesKeys(ImageRelativePosition):
    """iRPE on queries and keys."""

    on = "qk"


@register_extra("irpe_qkv")
class ImageRelativePositionOnAll(ImageRelativePosition):
    """iRPE on queries, keys and values."""

    on = "qkv"
    uses_weights = True


@register_extra("transformer_xl")
class TransformerXL(RelativePosition):
    """Transformer-XL's relative positions (Dai et al. 2019, section 3.3), over the two axes of an image.

    u . k_k + (q_j + v) . W R(j - k), times the logits' scale, is added to the logits. R are the sines and cosines of
    the offset, zero for pairs with a prefix token. u and v are (H, D), W is (H D, H D), and all start at zero:
    7,096,320 parameters on DeiT-B, 1,778,688 on DeiT-S. v has a gradient once W is no longer zero.
    """

    takes_layouts = True

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.width = num_heads * head_dim
        if self.width % 4:
            raise ValueError(f"transformer_xl: hidden_size={self.width} must be a multiple of 4, for sines and cosines")
        self.content_bias = nn.Parameter(torch.empty(num_heads, head_dim))
        self.position_bias = nn.Parameter(torch.empty(num_heads, head_dim))
        self.projection = nn.Parameter(torch.empty(self.width, self.width))
        self.reset_parameters()

    @classmethod
    def num_weights(cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int) -> int:
        """As `PriorModule`."""
        return width * (width + 2)

    @classmethod
    def multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int, grid: Sequence[int], prefix: int
    ) -> int:
        """W R (once for a batch, here with every image), the patches' queries times it, and u times the keys."""
        tokens, offsets = grid[0] * grid[1], (2 * grid[0] - 1) * (2 * grid[1] - 1)
        shared = cls.shared_multiply_adds(settings, num_heads, width, hidden, grid)
        return shared + tokens * offsets * width + (prefix + tokens) * width

    @classmethod
    def shared_multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int, grid: Sequence[int]
    ) -> int:
        """As `Extra`: W R."""
        return (2 * grid[0] - 1) * (2 * grid[1] - 1) * width**2

    def forward(self, request: AttentionRequest) -> Tensor:
        """(B, H, T, T)."""
        q, k, plan = request.q, request.k, request.plan
        dtype, prefix = q.dtype, plan.num_prefix_tokens
        sinusoids = plan_table(plan, f"relative_sinusoids {self.width}", q.device).to(dtype)
        keys_HOD = (sinusoids @ self.projection.to(dtype).T).unflatten(1, self.content_bias.shape).transpose(0, 1)
        queries = q[:, :, prefix:] + self.position_bias.to(dtype).unsqueeze(1)
        index = plan_table(plan, "relative_offsets", q.device).expand(*q.shape[:2], -1, -1)
        of_pairs = (queries @ keys_HOD.transpose(1, 2)).gather(-1, index)
        of_keys = k @ self.content_bias.to(dtype).unsqueeze(-1)
        return request.logit_scale() * (F.pad(of_pairs, (prefix, 0, prefix, 0)) + of_keys.transpose(-1, -2))
