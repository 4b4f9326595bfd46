"""Sparsifiner: the keys of each query, predicted for each image from a low-rank attention map (Wei et al. 2023).

Shape letters: B batch, H heads, D head width, N patches of the grid, n visible patches, P prefix tokens, T = P + N,
R reduced dimension, K listed keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_sparseprior.attention.compiled_kernels import predicted_cpu
from hf_sparseprior.attention.key_selection import kernel_predicts, keys_of_scores, predicted_keys, without_autocast
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.checks import check_boolean, check_integer, check_within
from hf_sparseprior.base.limits import check_sides, check_size
from hf_sparseprior.base.resolved import Settings
from hf_sparseprior.priors.low_rank import resize_tokens
from hf_sparseprior.priors.predictor import Predictor, register_predictor

# Steps of the plane-filling sequence of points that starts W_down and W_up: 1 / p, 1 / p^2, p^3 = p + 1 (Roberts 2018).
PLASTIC = (0.7548776662466927, 0.5698402909980532)
# A weight of W_up that is 0 stays 0, so none may start there.
LEAST_UP = 1e-4
DEFAULT_KEEP_RATE = 0.25


def check_budget(name: str, settings: Settings, sides: Sequence[int]) -> tuple[float | None, int | None]:
    """The keep rate, or the budget of keys of a query, for a patch grid; the other one is None.

    Raises:
        ValueError: the message has the setting, the value and what is allowed.
    """
    keep_rate, budget = settings["keep_rate"], settings["budget"]
    if budget is None:
        keep_rate = DEFAULT_KEEP_RATE if keep_rate is None else keep_rate
        check_within(f"{name}: keep_rate", keep_rate, 0.0, 1.0, "above 0 and at most 1")
        if keep_rate == 0:
            raise ValueError(f"{name}: keep_rate={keep_rate!r} must be above 0 and at most 1")
        return keep_rate, None
    if keep_rate is not None:
        raise ValueError(f"{name}: keep_rate={keep_rate!r} and budget={budget!r} cannot both be given")
    budget = check_integer(f"{name}: budget", budget, 1)
    if budget > sides[0] * sides[1]:
        raise ValueError(
            f"{name}: budget={budget} must be at most the {sides[0] * sides[1]} patches of a {sides[0]}x{sides[1]} grid"
        )
    return None, budget


@register_predictor("sparsifiner")
class Sparsifiner(Predictor):
    """The B keys with the largest connectivity scores. A key with score 0 is not kept (Sparsifiner Eqs. 1-3).

    W_down and W_up, (R, N) each and shared by the layer's heads, have a column for every patch. Prefix tokens have
    none: they see everything and every patch sees them, whatever B is. On another grid both are interpolated. A weight
    of W_up that is 0 stays 0, also in training, so what `prune` drops stays dropped.

    No gradient of the attention's output reaches W_down and W_up: they learn from `scores` (Eq. 10) alone. They start
    as R blobs, spread evenly over the grid. Each row of W_down has norm 1, so that logits vary as those of single keys.
    More than 5 % of A_down are then above tau, if dense attention's logits have a deviation of 1. Each row of W_up
    spreads a weight of 1 over its blob.

    Settings:
        keep_rate: in (0, 1]; B = ceil(keep_rate T). T counts all tokens of the grid, even if some were pruned (Table
            1). 1: every key is kept and nothing is predicted. The default is 0.25.
        budget: B itself, instead of a keep rate.
        num_down: R. threshold: tau (Eq. 2). up_threshold: `prune` sets weights of W_up up to this size to 0.
        renormalise: True: the softmax runs over the kept keys, as in the published code. False: the softmax runs over
            all keys, and then only the weights of the kept keys are used (Eq. 5 as printed).
        grid: (height, width) that W_down and W_up are made for.
    """

    SETTINGS = {
        "keep_rate": None,
        "budget": None,
        "num_down": 32,
        "threshold": 0.05,
        "up_threshold": 0.01,
        "renormalise": True,
        "grid": None,
    }
    UNIT_AXES = {"w_down": (), "w_up": ()}
    GIVES_SCORES = True

    def __init__(self, num_heads: int, head_dim: int, **settings: Any) -> None:
        super().__init__(num_heads, head_dim)
        self.settings = settings
        self.renormalise = settings["renormalise"]
        self.grid = (settings["grid"][0], settings["grid"][1])
        shape = (settings["num_down"], self.grid[0] * self.grid[1])
        self.w_down = nn.Parameter(torch.empty(shape))
        self.w_up = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int]) -> Settings:
        """As `PriorModule`; the grid that W_down and W_up are made for is kept in the settings."""
        sides = check_sides("sparsifiner", settings["grid"], grid)
        keep_rate, budget = check_budget("sparsifiner", settings, sides)
        return {
            "keep_rate": keep_rate,
            "budget": budget,
            "num_down": check_size("sparsifiner: num_down", settings["num_down"], 1, "width"),
            "threshold": check_within("sparsifiner: threshold", settings["threshold"], 0.0, 1.0, "from 0 to 1"),
            "up_threshold": check_within(
                "sparsifiner: up_threshold", settings["up_threshold"], 0.0, math.inf, "0 or more"
            ),
            "renormalise": check_boolean("sparsifiner: renormalise", settings["renormalise"]),
            "grid": sides,
        }

    def initial_values(self) -> dict[str, Tensor]:
        """Blobs, which are always the same; see the class."""
        blobs = torch.tensor(_blobs(self.settings["num_down"], self.grid))
        spread = (blobs / blobs.sum(1, keepdim=True)).clamp_min(LEAST_UP)
        return {"w_down": (blobs / blobs.norm(dim=1, keepdim=True)).float(), "w_up": spread.float()}

    @classmethod
    def num_weights(cls, settings: Mapping[str, Any], num_heads: int, width: int, hidden: int) -> int:
        """As `PriorModule`."""
        return 2 * settings["num_down"] * settings["grid"][0] * settings["grid"][1]

    # ---- cost -------------------------------------------------------------------------------------------------------

    @staticmethod
    def budget_of(settings: Mapping[str, Any], total: int) -> int:
        """B of a grid with T tokens."""
        if settings["budget"] is not None:
            return settings["budget"]
        return math.ceil(round(settings["keep_rate"] * total, 9))  # in floats 0.1 * 30 is above 3

    @staticmethod
    def _keeps_all(settings: Mapping[str, Any]) -> bool:
        return settings["keep_rate"] == 1

    @classmethod
    def settings_for(cls, settings: Mapping[str, Any], total: int) -> Mapping[str, Any]:
        """As `AttentionCosts`: B stays the number for all tokens of the grid."""
        if cls._keeps_all(settings):
            return settings
        return {**settings, "keep_rate": None, "budget": cls.budget_of(settings, total)}

    @classmethod
    def cost_in_pairs(cls, settings: Mapping[str, Any], head_dim: int, num_tokens: int, num_prefix_tokens: int) -> int:
        """As `AttentionCosts`: the most that can be kept, B patches and the prefix for each patch."""
        total = num_tokens + num_prefix_tokens
        if cls._keeps_all(settings):
            return total**2
        budget = min(num_tokens, cls.budget_of(settings, total))
        return num_prefix_tokens * total + num_tokens * (num_prefix_tokens + budget)

    @classmethod
    def other_multiply_adds(
        cls, settings: Mapping[str, Any], num_heads: int, head_dim: int, num_tokens: int, num_prefix_tokens: int
    ) -> int:
        """As `AttentionCosts`: W_down K, Q (W_down K)^T and A_down W_up; the last product is counted dense, as it is
        run.
        """
        if cls._keeps_all(settings):
            return 0
        down = 2 * settings["num_down"] * num_tokens * num_heads * head_dim
        return down + cls.up_multiply_adds(settings, num_heads, num_tokens)

    @staticmethod
    def up_multiply_adds(settings: Mapping[str, Any], num_heads: int, num_tokens: int) -> int:
        """Multiply-adds of A_down W_up in a layer; `up_share` says how many of them have no zero in them."""
        return num_heads * settings["num_down"] * num_tokens**2

    def up_share(self, coefficients: Tensor) -> float:
        """Share of the multiply-adds of A_down W_up that a product of sparse matrices needs (Sparsifiner section 3).

        Args:
            coefficients: (B, H, N, R), see `coefficients`.
        """
        above = (coefficients > self.settings["threshold"]).to(torch.float64).mean((0, 1, 2))
        return (above * (self.w_up != 0).to(torch.float64).mean(1)).mean().item()

    # ---- the prediction ---------------------------------------------------------------------------------------------

    def sparse_basis(self, grid: tuple[int, int]) -> Tensor:
        """W_up (R, N) on a grid; what is 0 stays 0, on another grid where more than half of the weight around is 0."""
        kept = self.w_up != 0
        basis = self.w_up * kept
        if grid == self.grid:
            return basis
        nearby = resize_tokens(kept.to(basis.dtype), self.grid, grid) > 0.5
        return resize_tokens(basis, self.grid, grid) * nearby * self._sum_kept(grid)

    def _sum_kept(self, grid: tuple[int, int]) -> float:
        """The factor that keeps the sum of a row when it is interpolated to a grid."""
        return self.grid[0] * self.grid[1] / (grid[0] * grid[1])

    def coefficients(self, request: AttentionRequest) -> Tensor:
        """A_down of the patches before the threshold, (B, H, n, R) in float32 at least (Eq. 1)."""
        q, k, plan, token_ids = request.q, request.k, request.plan, request.token_ids
        prefix, dtype = plan.num_prefix_tokens, request.compute_dtype()
        down = (resize_tokens(self.w_down, self.grid, plan.grid) * self._sum_kept(plan.grid)).to(dtype)
        if token_ids is not None:
            down = down[:, token_ids].transpose(0, 1).unsqueeze(1)  # (B, 1, R, n)
        keys = down @ k[:, :, prefix:].to(dtype)
        return torch.softmax((q[:, :, prefix:].to(dtype) * request.logit_scale()) @ keys.transpose(-1, -2), -1)

    def scores(self, request: AttentionRequest) -> Tensor:
        """Connectivity scores of the patches, (B, H, n, n) in float32 at least (Eqs. 2 and 3 before top-k)."""
        with without_autocast(request.q.device):  # values close to tau must not depend on rounding
            down = self.coefficients(request)
            down = torch.where(down > self.settings["threshold"], down, 0.0)
            return down @ self._basis_of(request.plan, request.token_ids, down.dtype)

    def _basis_of(self, plan: AttentionPlan, token_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        """W_up (R, N) on the plan's grid, or (B, 1, R, n) for the visible patches."""
        basis = self.sparse_basis(plan.grid).to(dtype)
        return basis if token_ids is None else basis[:, token_ids].transpose(0, 1).unsqueeze(1)

    def forward(self, request: AttentionRequest) -> Tensor | None:
        """As `Predictor`."""
        dense = self._keeps_all(self.settings) or (self.training and self.dense_in_training)
        if dense and self.recorder is None:
            return None
        plan, keep_mask = request.plan, request.keep_mask
        if self.recorder is None and keep_mask is None:
            return self._predict(request)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.recorder is not None):
            if keep_mask is None:
                scores = self.scores(request)
            else:
                scores = self.scores(request._replace(k=request.k * keep_mask[:, None, :, None]))
                scores = scores * keep_mask[:, None, None, plan.num_prefix_tokens :]
        if self.recorder is not None:
            self.recorder(scores)
        if dense:
            return None
        scores, budget = scores.detach(), self._places(plan, scores.shape[-1])
        if keep_mask is not None:  # dropped patches take no place
            scores = scores.masked_fill(keep_mask[:, None, None, plan.num_prefix_tokens :] == 0, -math.inf)
        return keys_of_scores(scores, plan.num_prefix_tokens, budget)

    @torch.no_grad()
    def _predict(self, request: AttentionRequest) -> Tensor:
        """The keys alone, without the scores of all pairs if a kernel can do without them."""
        plan = request.plan
        with without_autocast(request.q.device):
            down = self._compiled_coefficients(request)
            down = self.coefficients(request) if down is None else down
            basis = self._basis_of(plan, request.token_ids, down.dtype)
            budget = self._places(plan, basis.shape[-1])
            return predicted_keys(down, basis, plan.num_prefix_tokens, budget, self.settings["threshold"])

    def _compiled_coefficients(self, request: AttentionRequest) -> Tensor | None:
        """`coefficients` by a kernel; None if there is none for these tensors."""
        q, k, plan = request.q, request.k, request.plan
        if request.token_ids is not None or self.w_down.dtype != torch.float32 or not kernel_predicts(q):
            return None
        down = resize_tokens(self.w_down, self.grid, plan.grid) * self._sum_kept(plan.grid)
        return predicted_cpu.predicted_coefficients(q, k, down, plan.num_prefix_tokens, request.logit_scale())

    def _places(self, plan: AttentionPlan, patches: int) -> int:
        """B, but at most the number of patches."""
        return min(patches, self.budget_of(self.settings, plan.total))

    @torch.no_grad()
    def prune(self) -> None:
        """Set the weights of W_up of at most `up_threshold` to 0 (Sparsifiner section 4)."""
        self.w_up.masked_fill_(self.w_up.abs() <= self.settings["up_threshold"], 0.0)


def _blobs(count: int, grid: tuple[int, int]) -> np.ndarray:
    """`count` Gaussians (count, N) over a patch grid, with middles spread evenly, each as wide as its share of the
    grid.
    """
    height, width = grid
    steps = np.arange(1, count + 1)[:, None] * np.array(PLASTIC)
    middles = (steps + 0.5) % 1.0 * (height, width) - 0.5
    rows, columns = np.divmod(np.arange(height * width), width)
    squared = (rows - middles[:, :1]) ** 2 + (columns - middles[:, 1:]) ** 2
    deviation = max(0.5, 0.5 * math.sqrt(height * width / count))
    return np.exp(-squared / (2 * deviation**2))
