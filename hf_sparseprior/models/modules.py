"""Attention and a transformer block with a prior, for models of one's own.

Parameters have the names of timm's `Attention` and `Block`, so that their weights load.

Shape letters: B batch, H heads, P prefix tokens, T = P + patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparseprior.attention.plain_operations import whole_number
from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.checks import check_boolean, check_finite, check_integer, check_within
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.limits import check_sides, check_size
from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.models.blocks import MLP, DropPath
from hf_sparseprior.patterns.supports import redraws
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.prior import PriorSpec, prior_name, resolve_prior

DEFAULT_PRIOR = "fibottention+violin"
LAYER_NORM_EPS = 1e-6  # timm's


class Attention(PriorAttention):
    """Multi-head self-attention with a prior, as a module for one's own model.

    The parameters are those of timm's `Attention` (qkv.weight, qkv.bias, proj.weight, proj.bias) and the prior's, such
    as decay_bias.beta. A decay stays in at least float32 when the module is cast to half precision.

    Args:
        dim: width of the tokens, a multiple of `num_heads`.
        num_heads: H.
        grid: (height, width) of the patches; an integer for both; or (frames, height, width) of a clip.
        prior: a name, names joined by +, a dict of slots or a resolved prior. Its extras must be within attention.
        num_prefix_tokens: P, tokens before the patches, which all heads see.
        layer: number of the layer in the model, from 0; some supports differ from layer to layer.
        qkv_bias, proj_bias: whether the projections have a bias.
        attn_drop: dropout probability of the attention weights. proj_drop: of the output.
        device, dtype: of the parameters.

    Raises:
        ValueError: for a bad argument, or a prior that a single layer cannot have; the message says what is allowed.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: int | Sequence[int],
        prior: PriorSpec | None = DEFAULT_PRIOR,
        num_prefix_tokens: int = 0,
        layer: int = 0,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.dim = check_size("dim", dim, 1, "width")
        num_heads = check_size("num_heads", num_heads, 1, "heads")
        if dim % num_heads:
            raise ValueError(f"dim={dim} must be a multiple of num_heads={num_heads}")
        self.grid = _as_grid(grid)
        self.num_prefix_tokens = check_integer("num_prefix_tokens", num_prefix_tokens, 0)
        layer = check_integer("layer", layer, 0)
        resolved = resolve_prior(prior, num_heads, self.grid)
        _check_single_layer(resolved)
        self.key_dim = self.head_dim = dim // num_heads
        if resolved["mixer"] != "softmax":  # which chooses it
            self.key_dim = MIXERS[resolved["mixer"]["name"]].key_width(resolved["mixer"], self.head_dim)
        self.widths = [num_heads * self.key_dim] * 2 + [dim]
        self.qkv = nn.Linear(dim, sum(self.widths), bias=check_boolean("qkv_bias", qkv_bias))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, bias=check_boolean("proj_bias", proj_bias))
        self.proj_drop = nn.Dropout(proj_drop)
        self._set_prior(num_heads, resolved, layer, self.head_dim)
        self.to(device=device, dtype=dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows of the module."""
        grid = "x".join(map(str, self.grid))
        return f"num_heads={self.num_heads}, grid={grid}, prior={prior_name(self.prior)}, layer={self.layer_idx}"

    def forward(
        self,
        x: Tensor,
        grid: int | Sequence[int] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Self-attention. Masks need the logits of all pairs. A query without any key attends to itself.

        Args:
            x: (B, T, dim), prefix tokens first, then the patches in raster order; or (B, height, width, dim) if there
                are no prefix tokens, of a clip (B, frames, height, width, dim).
            grid: that of x (B, T, dim), if it is not the constructor's.
            key_padding_mask: bool (B, T), True = ignored, as in `torch.nn.MultiheadAttention`.
            attn_mask: as in timm, bool, True = attended, or added to the logits after decay and support; broadcastable
                to (B, H, T, T).
            is_causal: whether each token sees only itself and those before it.

        Returns:
            As x.

        Raises:
            ValueError: for another shape, or a mask that the prior cannot have.
        """
        tokens, sides = self.tokens_and_grid(x, grid)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in self.qkv(tokens).split(self.widths, -1))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        plan, bias = self.plan(sides, self.num_prefix_tokens), None
        if key_padding_mask is not None or attn_mask is not None or is_causal:
            bias, plan = self._masked(q, plan, key_padding_mask, attn_mask, is_causal)
        dropout_p = self.attn_drop.p if self.training else 0.0
        out, _ = self.attend(AttentionRequest(q, k, v, plan, bias=bias, dropout_p=dropout_p))
        out = self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))
        return out if x.dim() == 3 else out.unflatten(1, sides)

    def tokens_and_grid(self, x: Tensor, grid: int | Sequence[int] | None) -> tuple[Tensor, tuple[int, ...]]:
        """The tokens (B, T, dim) of `x`, and the grid of their patches; arguments as of `forward`.

        Raises:
            ValueError: for shapes that do not fit.
        """
        # Sizes are tensors while `torch.jit.trace` runs; that of the batch may be any.
        shape = (x.shape[0], *map(whole_number, x.shape[1:]))
        letters = ("frames, " if len(self.grid) == 3 else "") + "height, width"
        if x.dim() not in (3, len(self.grid) + 2) or shape[-1] != self.dim:
            raise ValueError(f"x of shape {shape} must be (B, T, {self.dim}) or (B, {letters}, {self.dim})")
        sides = self.grid if grid is None else _as_grid(grid)
        if len(sides) != len(self.grid):
            raise ValueError(f"grid={grid!r} must be ({letters}), as that of the constructor, {self.grid}")
        if x.dim() > 3:
            if self.num_prefix_tokens:
                raise ValueError(
                    f"x of shape {shape} has no place for num_prefix_tokens={self.num_prefix_tokens}; it must be "
                    f"(B, T, {self.dim})"
                )
            if grid is not None and sides != shape[1:-1]:
                raise ValueError(f"grid={grid!r} must be the {shape[1:-1]} of x of shape {shape}, or None")
            return x.flatten(1, -2), shape[1:-1]
        patches = math.prod(sides)
        if shape[1] != self.num_prefix_tokens + patches:
            raise ValueError(
                f"x of shape {shape} must have {self.num_prefix_tokens + patches} tokens: {self.num_prefix_tokens} "
                f"prefix tokens and {patches} patches of a {'x'.join(map(str, sides))} grid; forward(x, grid=({letters}"
                ")) takes another grid"
            )
        return x, sides

    def _masked(
        self, q: Tensor, plan: AttentionPlan, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, AttentionPlan]:
        """The bias (B or 1, H or 1, T, T) that masks are, with the support in it, and the plan that goes with it."""
        self._check_masks(q, padding, attn_mask)
        total, device = q.shape[2], q.device
        seen = torch.ones(1, 1, total, total, dtype=torch.bool, device=device)
        if is_causal:
            seen = seen.tril()
        if padding is not None:
            seen = seen & ~padding[:, None, None]
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
            if attn_mask.dtype == torch.bool:
                seen, attn_mask = seen & attn_mask, None
        if plan.offsets is not None and plan.mask_fill == "neg_inf":
            seen = seen & plan_table(plan, "narrow_mask", device)
            plan = self.plan(plan.grid, self.num_prefix_tokens, dense=True)
        itself = torch.eye(total, dtype=torch.bool, device=device)
        seen = seen | (~seen.any(-1, keepdim=True) & itself)
        bias = torch.zeros(seen.shape, dtype=q.dtype, device=device).masked_fill(~seen, -math.inf)
        return bias if attn_mask is None else bias + attn_mask, plan

    def _check_masks(self, q: Tensor, padding: Tensor | None, attn_mask: Tensor | None) -> None:
        """Raise for masks of a wrong kind, and with a prior that cannot follow them."""
        batch, heads, total, _ = q.shape
        if padding is not None and (padding.dtype != torch.bool or padding.shape != (batch, total)):
            raise ValueError(
                f"key_padding_mask of shape {tuple(padding.shape)} and {padding.dtype} must be bool (B, T), "
                f"{(batch, total)}, True = ignored"
            )
        if attn_mask is not None:
            whole = (batch, heads, total, total)[4 - attn_mask.dim() :]
            if attn_mask.dim() > 4 or any(
                size not in (1, most) for size, most in zip(attn_mask.shape, whole, strict=False)
            ):
                raise ValueError(
                    f"attn_mask of shape {tuple(attn_mask.shape)} must be broadcastable to (B, H, T, T), "
                    f"{(batch, heads, total, total)}"
                )
        problem = None
        if self.mixer is not None:
            problem = f"mixer {self.mixer.name!r} has no logits of pairs"
        elif self.predictor is not None and self.predictor.top_k(total) is None:
            problem = f"predictor {self.predictor.name!r} chooses keys without knowing the mask"
        elif self.prior["decay"] is not None and self.prior["decay"]["placement"].startswith("add_after"):
            problem = f"placement={self.prior['decay']['placement']!r} of the decay adds to weights after the softmax"
        if problem is not None:
            name = prior_name(self.prior)
            raise ValueError(f"prior {name!r} takes no key_padding_mask, attn_mask or is_causal: {problem}")


class ChannelScale(nn.Module):
    """A learned factor per channel, with the name that timm's `LayerScale` has."""

    def __init__(self, width: int, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), float(value)))

    def forward(self, x: Tensor) -> Tensor:
        """Turn (..., C) into (..., C)."""
        return x * self.gamma


class Block(nn.Module):
    """A pre-norm transformer block with a prior, as a module for one's own model.

    The parameters are those of timm's `Block` (norm1, attn, ls1, norm2, mlp, ls2) and the prior's.

    Args:
        dim, num_heads, grid, prior, num_prefix_tokens, layer, qkv_bias, attn_drop, device, dtype: as in `Attention`;
            extras may also be within the MLP.
        mlp_ratio: hidden width of the MLP, in times of `dim`.
        proj_drop: dropout probability of what attention and MLP return.
        init_values: start of the factors per channel (LayerScale); None for none.
        drop_path: probability that a branch is left out for an image in training (stochastic depth).

    Raises:
        ValueError: as `Attention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: int | Sequence[int],
        prior: PriorSpec | None = DEFAULT_PRIOR,
        mlp_ratio: float = 4.0,
        num_prefix_tokens: int = 0,
        layer: int = 0,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sides = _as_grid(grid)
        resolved = resolve_prior(prior, check_size("num_heads", num_heads, 1, "heads"), sides)
        in_mlp = [extra for extra in resolved["extras"] if EXTRAS[extra["name"]].place == "MLP"]
        if in_mlp and len(sides) == 3:
            raise ValueError(f"prior: {in_mlp[0]['name']!r} is of places in one image, and grid={grid!r} is a clip's")
        rest = [extra for extra in resolved["extras"] if extra not in in_mlp]
        attention_prior = ResolvedPrior(**{**resolved, "extras": rest})
        hidden = int(check_size("dim", dim, 1, "width") * check_finite("mlp_ratio", mlp_ratio, zero=False))
        hidden = check_size(f"mlp_ratio={mlp_ratio!r}: width", hidden, 1, "width")
        scale = None if init_values is None else check_finite("init_values", init_values)
        rate = check_within("drop_path", drop_path, 0, 1, "a probability from 0 to 1")
        # In timm's order, which is that of parameters in an optimizer.
        self.norm1 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.attn = Attention(
            *(dim, num_heads, sides, attention_prior, num_prefix_tokens, layer, qkv_bias),
            attn_drop=attn_drop,
            proj_drop=proj_drop,
        )
        self.ls1 = ChannelScale(dim, scale) if scale else nn.Identity()
        self.drop_path1 = DropPath(rate)
        self.norm2 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.mlp = MLP(dim, hidden, "gelu", True, in_mlp)
        self.mlp_drop = nn.Dropout(proj_drop)
        self.ls2 = ChannelScale(dim, scale) if scale else nn.Identity()
        self.drop_path2 = DropPath(rate)
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        grid: int | Sequence[int] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Turn x into the same shape; arguments and errors as of `Attention`."""
        tokens, sides = self.attn.tokens_and_grid(x, grid)
        branch = self.attn(self.norm1(tokens), sides, key_padding_mask, attn_mask, is_causal)
        tokens = tokens + self.drop_path1(self.ls1(branch))
        branch = self.mlp_drop(self.mlp(self.norm2(tokens), sides, self.attn.num_prefix_tokens))
        tokens = tokens + self.drop_path2(self.ls2(branch))
        return tokens if x.dim() == 3 else tokens.unflatten(1, sides)


def _as_grid(grid: Any) -> tuple[int, ...]:
    """A grid as a tuple; an integer is that of a square."""
    sides = (grid, grid) if isinstance(grid, int) and not isinstance(grid, bool) else grid
    return tuple(check_sides("attention", sides, None))


def _check_single_layer(prior: ResolvedPrior) -> None:
    """Raise for a prior that needs more than one layer."""
    for extra in prior["extras"]:
        name, place = extra["name"], EXTRAS[extra["name"]].place
        if place != "attention":
            raise ValueError(
                f"prior: {name!r} is within the MLP, which sp.Block has and sp.Attention has not"
                if place == "MLP"
                else f"prior: {name!r} acts between the layers of a model, and this is a single layer"
            )
    if redraws(prior["support"]):
        raise ValueError(
            f"prior: support {prior['support']['name']!r} with redraw=True must have redraw=False in a single layer, "
            "where nothing counts the passes; the models of this package do"
        )
