"""Sparsifiner's predictor as in the code that was published with it, which differs from the paper (Wei et al. 2023).

Shape letters: B batch, H heads, D head width, N patches of the grid, n visible patches, P prefix tokens, T = P + N,
R reduced dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_sparseprior.attention.key_selection import largest, largest_indices, without_autocast
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.checks import check_integer, check_within
from hf_sparseprior.base.limits import check_sides, check_size
from hf_sparseprior.base.resolved import Settings
from hf_sparseprior.priors.low_rank import resize_tokens
from hf_sparseprior.priors.predictor import Predictor, register_predictor
from hf_sparseprior.priors.sparsifiner import Sparsifiner, check_budget


@register_predictor("sparsifiner_published")
class PublishedSparsifiner(Predictor):
    """The B keys with the largest scores A_down |W_up|, for checkpoints of the published code.

    It differs from `Sparsifiner`: queries and keys are projected to fewer channels, by weights that a layer's heads
    share, before they meet; logits are divided by the root of H; the largest of a row of A_down count instead of those
    above tau, and |W_up| instead of W_up; prefix tokens have columns in W_down and W_up, so that a patch sees them only
    if they are among its B keys; keys with score 0 fill the budget. Prefix tokens see everything. If there are several,
    all have the column of the class token.

    No gradient reaches it, and it gives no scores to learn from: it is read, not trained.

    Settings:
        keep_rate, budget: B, as of `Sparsifiner`.
        num_down: R, 32 of 197 tokens. width_factor: the projections have D // width_factor channels.
        top_coefficients: how many of a row of A_down count; None: those above `threshold`.
        up_threshold: absolute values of W_up up to this one count as 0.
        grid: (height, width) that W_down and W_up are made for; on another one they are interpolated.
    """

    SETTINGS = {
        **{"keep_rate": None, "budget": None, "num_down": 32, "width_factor": 2, "top_coefficients": 8},
        **{"threshold": 0.05, "up_threshold": 0.02, "grid": None},
    }

    def __init__(self, num_heads: int, head_dim: int, **settings: Any) -> None:
        super().__init__(num_heads, head_dim)
        self.settings = settings
        self.grid = (settings["grid"][0], settings["grid"][1])
        self.scale = num_heads**-0.5
        down, reduced = settings["num_down"], reduced_width(settings, head_dim)
        for name in ("q", "k"):
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(reduced, head_dim)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(reduced)))
        for name in ("down", "up"):
            self.register_parameter(f"w_{name}", nn.Parameter(torch.empty(down, self.grid[0] * self.grid[1])))
            self.register_parameter(f"class_{name}", nn.Parameter(torch.empty(down, 1)))
        self.requires_grad_(False)  # none would come, and DDP waits for one that is expected
        self.reset_parameters()

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `PriorModule`; the grid that W_down and W_up are made for is kept in the settings."""
        name = cls.name
        sides = check_sides(name, settings["grid"], grid)
        keep_rate, budget = check_budget(name, settings, sides)
        down, top = check_size(f"{name}: num_down", settings["num_down"], 1, "width"), settings["top_coefficients"]
        if top is not None and check_integer(f"{name}: top_coefficients", top, 1) > down:
            raise ValueError(f"{name}: top_coefficients={top} must be at most num_down={down}, or None")
        return {
            **{"keep_rate": keep_rate, "budget": budget, "num_down": down, "top_coefficients": top, "grid": sides},
            "width_factor": check_integer(f"{name}: width_factor", settings["width_factor"], 1),
            "threshold": check_within(f"{name}: threshold", settings["threshold"], 0.0, 1.0, "from 0 to 1"),
            "up_threshold": check_within(f"{name}: up_threshold", settings["up_threshold"], 0.0, math.inf, "0 or more"),
        }

    def initial_values(self) -> dict[str, Tensor]:
        """Truncated normal numbers with deviation 0.02, from torch's generator, and biases of 0."""
        values = {name: torch.zeros(parameter.shape) for name, parameter in self.named_parameters()}
        for name, value in values.items():
            if not name.endswith("bias"):
                nn.init.trunc_normal_(value, std=0.02)
        return values

    @classmethod
    def num_weights(cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int) -> int:
        """As `PriorModule`."""
        head_dim = width // num_heads
        columns = settings["grid"][0] * settings["grid"][1] + 1
        return 2 * (settings["num_down"] * columns + head_dim * reduced_width(settings, head_dim))

    # ---- cost -------------------------------------------------------------------------------------------------------

    @classmethod
    def settings_for(cls, settings: Mapping[str, Any], total: int) -> Mapping[str, Any]:
        """As `AttentionCosts`: B stays the number for all tokens of the grid."""
        return {**settings, "keep_rate": None, "budget": Sparsifiner.budget_of(settings, total)}

    @classmethod
    def cost_in_pairs(cls, settings: Mapping[str, Any], head_dim: int, num_tokens: int, num_prefix_tokens: int) -> int:
        """As `AttentionCosts`: B tokens for each patch, the prefix among them or not."""
        total = num_tokens + num_prefix_tokens
        return num_prefix_tokens * total + num_tokens * min(total, Sparsifiner.budget_of(settings, total))

    @classmethod
    def other_multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, head_dim: int, num_tokens: int, num_prefix_tokens: int
    ) -> int:
        """As `AttentionCosts`: the projections, W_down K, Q (W_down K)^T and A_down |W_up|, which is counted dense."""
        total, reduced = num_tokens + num_prefix_tokens, reduced_width(settings, head_dim)
        projections = (num_tokens + total) * head_dim * reduced
        down = (num_tokens + total) * settings["num_down"] * reduced
        return num_heads * (projections + down + settings["num_down"] * num_tokens * total)

    # ---- the prediction ---------------------------------------------------------------------------------------------

    def _columns(self, name: str, request: AttentionRequest) -> Tensor:
        """W_down or W_up of the visible tokens, (R, T) or (B, 1, R, P + n), on the request's grid."""
        plan, ids = request.plan, request.token_ids
        weight, prefix = getattr(self, f"w_{name}"), getattr(self, f"class_{name}")
        patches = resize_tokens(weight, self.grid, plan.grid).to(request.compute_dtype())
        prefix = prefix.to(patches.dtype).expand(-1, plan.num_prefix_tokens)
        if ids is None:
            return torch.cat([prefix, patches], 1)
        patches = patches[:, ids].transpose(0, 1)
        return torch.cat([prefix.expand(len(patches), -1, -1), patches], -1).unsqueeze(1)

    def scores(self, request: AttentionRequest) -> Tensor:
        """Scores of all visible tokens for each patch, (B, H, n, P + n) in float32 at least."""
        dtype, keep_mask = request.compute_dtype(), request.keep_mask
        projected = {}
        for name, tokens in (("q", request.q), ("k", request.k)):
            weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
            projected[name] = F.linear(tokens.to(dtype), weight.to(dtype), bias.to(dtype))
            if keep_mask is not None:
                projected[name] = projected[name] * keep_mask[:, None, :, None]
        keys = self._columns("down", request) @ projected["k"]
        logits = projected["q"][:, :, request.plan.num_prefix_tokens :] @ keys.transpose(-1, -2)
        down = torch.softmax(logits * self.scale, -1)
        top = self.settings["top_coefficients"]
        counts = down > self.settings["threshold"] if top is None else largest(down, top)
        basis = self._columns("up", request).abs()
        return (down * counts) @ torch.where(basis > self.settings["up_threshold"], basis, 0.0)

    @torch.no_grad()
    def forward(self, request: AttentionRequest) -> Tensor:
        """As `Predictor`."""
        with without_autocast(request.q.device):
            scores = self.scores(request)
        if request.keep_mask is not None:  # dropped patches take no place
            scores = scores.masked_fill(request.keep_mask[:, None, None, :] == 0, -math.inf)
        budget = min(scores.shape[-1], Sparsifiner.budget_of(self.settings, request.plan.total))
        chosen = largest_indices(scores, budget)
        return torch.where(scores.gather(-1, chosen) == -math.inf, -1, chosen)


def reduced_width(settings: Mapping[str, Any], head_dim: int) -> int:
    """Channels of the projected queries and keys of a head."""
    return max(1, head_dim // settings["width_factor"])
