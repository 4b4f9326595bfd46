"""One call of attention as a value, and what several backends make from it: masks, positions, decay.

Shape letters as in `ops`, and n visible patches, T = P + n, K places of a list of keys. E is the width of the values,
which may be another than D, that of queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from hf_sparseprior.attention.plain_operations import plain, whole_number
from hf_sparseprior.attention.plan import AttentionPlan, decay_positions, plan_table
from hf_sparseprior.attention.rotary import Rotation
from hf_sparseprior.base.resolved import DecayTensors
from hf_sparseprior.patterns.decay import decay_weights, prefix_weights
from hf_sparseprior.patterns.masks import check_bytes
from hf_sparseprior.patterns.token_order import RASTER


class CallOptions(NamedTuple):
    """What a forward of a model asks of the attention layers that it goes through.

    output_attentions: also return the attention weights. weight_rows: of them only those of the first tokens.
    mean_keys: also return the mean of the keys over the heads.
    backend: "auto", or one of `BACKENDS` by name.
    bias, token_ids, keep_mask: as in `AttentionRequest`.
    layout: the order in which the patches come, as in `AttentionPlan`.
    rotations: rotary positions of the tokens of each grid, in their order; not with a mixer.
    draw: number of the draw of supports that draw their pairs anew, from 1; not needed in evaluation.
    """

    output_attentions: bool = False
    weight_rows: int | None = None
    backend: str = "auto"
    bias: Tensor | None = None
    token_ids: Tensor | None = None
    keep_mask: Tensor | None = None
    layout: str = RASTER
    rotations: Sequence[Rotation] | None = None
    draw: int | None = None
    mean_keys: bool = False


DEFAULT_OPTIONS = CallOptions()


# A named tuple, not a dataclass: it is made and changed in a third of the time, and dynamo traces `_replace`.
class AttentionRequest(NamedTuple):
    """One call of attention.

    Fields from `bias` on restrict or extend what the plan says, if they are not None. What follows from fields are
    methods: TorchDynamo traces properties of a named tuple only since torch 2.12.

    Args:
        q, k: (B, H, T, D). v: (B, H, T, E).
        plan: support, decay and grid of the layer, and the order in which the patches come.
        decay: settings and tensors of the decay in this step.
        scale: factor of the logits, default D ** -0.5.
        dropout_p: dropout probability of the attention weights.
        bias: added to the logits after decay and support, broadcastable to (B, H, T, T): relative positions, padding.
            Or (n, H, T, T) where B is a multiple of n: one bias for each of an image's n windows, repeated for each
            image.
        token_ids: int64 (B, n), which patches of the grid the tokens after the prefix are, if they are not all of them
            in its layout. They differ between images (masked autoencoders, token pruning). Support and decay use the
            places of the patches in the grid. -1 is a token without a place, and is treated like a prefix token.
        keep_mask: (B, T), 1 for keys that stay and 0 for keys that are dropped, with a gradient for both. A query
            always sees itself (attention masking of DynamicViT, Rao et al. 2021).
        key_ids: integers (B, H, n, K), the tokens that each patch of each image sees, counted with the prefix; -1 fills
            the list of a patch that sees fewer than K. The support is then dense.
        renormalise: True: the softmax runs over the keys of `key_ids`. False: it runs over all keys, and the weights of
            keys that are not listed are then set to 0.
        top_k: a query keeps this number of keys, those of its largest logits.
        need_weights: also return the attention weights.
        weight_rows: with `need_weights`, return only the weights of the first `weight_rows` tokens, which are prefix
            tokens. They are the weights before dropout, and not all weights are formed.
        training: gradients count as wanted, recorded now or not. Activation checkpointing calls a layer without and
            then with them, and both calls have to take the same backend, which draws what is dropped.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    plan: AttentionPlan
    decay: DecayTensors | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    bias: Tensor | None = None
    token_ids: Tensor | None = None
    keep_mask: Tensor | None = None
    key_ids: Tensor | None = None
    renormalise: bool = True
    top_k: int | None = None
    need_weights: bool = False
    weight_rows: int | None = None
    training: bool = False

    def compute_dtype(self) -> torch.dtype:
        """The dtype of q, but float32 for half precision: logits, decay and softmax are never in half precision."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def logit_scale(self) -> float:
        """`scale`, or its default."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def needs_all_weights(self) -> bool:
        """Whether the backend returns the weights (B, H, T, T)."""
        return self.need_weights and self.weight_rows is None

    def drops_after_softmax(self) -> bool:
        """Whether the softmax runs over all keys, after which keys that are not listed lose their weights."""
        return self.key_ids is not None and not self.renormalise

    def one_width(self) -> bool:
        """Whether values are as wide as queries and keys."""
        return self.q.shape[-1] == self.v.shape[-1]

    def has_lists(self) -> bool:
        """Whether pairs lie off the diagonals that all images share."""
        return self.key_ids is not None or self.plan.has_pairs


# ---- what a request asks for that some backends cannot do -----------------------------------------------------------


def decay_placement(decay: DecayTensors | None) -> str:
    """Where the decay acts, one of `decay.PLACEMENTS`."""
    return "multiply" if decay is None else decay.get("placement", "multiply")


def needs_all_logits(request: AttentionRequest) -> str | None:
    """Why only a dense path knows the logits that are asked for; None if others do."""
    if (placement := decay_placement(request.decay)) != "multiply":
        return f"placement={placement!r} of the decay is for the reference alone"
    if request.bias is not None:
        return "a bias is added to the logits of all pairs"
    if request.top_k is not None:
        return "only the largest logits are kept, so all are needed"
    if request.keep_mask is not None:
        return "dropped keys have a gradient, so the logits of all pairs are needed"
    if request.drops_after_softmax():
        return "renormalise=False: the softmax runs over all keys before some are dropped"
    return None


def leaves_diagonals(request: AttentionRequest) -> str | None:
    """Why the pairs do not lie on the same diagonals in every image; None if they do."""
    if request.token_ids is not None:
        return "only some patches of the grid are there, others in each image"
    if request.key_ids is not None:
        return "a predictor chose the keys of each image"
    if request.plan.has_pairs:
        return f"support {request.plan.support['name']!r} has pairs off its diagonals"
    return None


def drops_unformed_pairs(request: AttentionRequest) -> str | None:
    """Why a path along diagonals cannot drop weights; None if it can."""
    if request.dropout_p > 0 and request.plan.mask_fill == "zero":
        return "dropout with mask_fill='zero' would have to drop pairs that are never formed"
    return None


def is_transformed() -> str | None:
    """Why only PyTorch's own operations can be differentiated now; None if others can."""
    # torch.library silently drops the tangents of forward-mode derivatives.
    if torch.compiler.is_compiling():
        return None
    if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
        return "forward-mode derivatives and the transforms of torch.func take PyTorch's own operations"
    return None


# ---- biases ---------------------------------------------------------------------------------------------------------


def is_windowed(bias: Tensor, batch: int) -> bool:
    """Whether a bias has an image's windows, n of them, and not the whole batch."""
    if torch.jit.is_tracing():  # the size is read in the graph, and may be that of a batch
        return bias.dim() == 4 and whole_number(bias.shape[0]) > 1
    if plain() is not None:  # the batch is any; a single image's windows are windows, too
        return bias.dim() == 4 and isinstance(bias.shape[0], int) and bias.shape[0] > 1
    return bias.dim() == 4 and bias.shape[0] > 1 and (bias.shape[0] < batch or batch == 0)


def add_bias(logits: Tensor, bias: Tensor) -> Tensor:
    """Logits (B, H, T, T) with a bias as in `AttentionRequest`."""
    if not is_windowed(bias, logits.shape[0]):
        return logits + bias
    return (logits.unflatten(0, (-1, bias.shape[0])) + bias).flatten(0, 1)


# ---- masks ----------------------------------------------------------------------------------------------------------


def pair_mask(request: AttentionRequest) -> Tensor | None:
    """Mask (H, T, T) or (B, H, T, T) of the keys that each query sees, True = attended; None: all.

    H is 1 where all heads see the same keys.
    """
    if request.key_ids is not None:
        return listed_mask(request.key_ids, request.plan.num_prefix_tokens, request.q.shape[2])
    if request.plan.offsets is None or request.plan.density == 1.0:  # a wide window may leave nothing out
        return None
    if request.token_ids is not None:
        return _subset_mask(request.plan, request.token_ids)
    return plan_table(request.plan, "narrow_mask", request.q.device)


def listed_mask(key_ids: Tensor, num_prefix_tokens: int, total: int) -> Tensor:
    """Mask (B, H, T, T) of the lists of keys (B, H, n, K) that the patches see; prefix tokens see everything."""
    seen = torch.zeros(*key_ids.shape[:-1], total + 1, dtype=torch.bool, device=key_ids.device)
    seen.scatter_(-1, torch.where(key_ids < 0, total, key_ids).long(), 1)  # "no key" is the column after the last
    return F.pad(seen[..., :total], (0, 0, num_prefix_tokens, 0), value=True)


def _subset_mask(plan: AttentionPlan, token_ids: Tensor) -> Tensor:
    """Mask (B, H, T, T) for `token_ids` (B, n); a token with -1 sees all tokens and is seen by all."""
    prefix, patches = plan.num_prefix_tokens, token_ids.clamp_min(0)
    if not plan.has_pairs:
        attended = plan_table(plan, "attended", token_ids.device)
        places = patches if plan.ranks is None else plan_table(plan, "ranks", token_ids.device)[:, patches]
        distances = (places.unsqueeze(-1) - places.unsqueeze(-2)).abs()
        if plan.ranks is None:
            mask = attended[:, distances].transpose(0, 1)
        else:
            heads = torch.arange(plan.num_heads, device=token_ids.device).view(-1, 1, 1, 1)
            mask = attended[heads, distances].transpose(0, 1)
    else:
        places = patches + prefix
        whole = plan_table(plan, "narrow_mask", token_ids.device)
        mask = whole[:, places.unsqueeze(-1), places.unsqueeze(-2)].transpose(0, 1)
    mask = mask | off_grid_pairs(token_ids).unsqueeze(1)
    if not prefix:  # a patch without any visible key attends to itself
        alone = ~mask.any(-1, keepdim=True)
        mask = mask | (alone & torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device))
    return F.pad(mask, (prefix, 0, prefix, 0), value=True)


def off_grid_pairs(token_ids: Tensor) -> Tensor:
    """Mask (B, n, n) of the pairs with a token that has no place in the grid."""
    off_grid = token_ids < 0
    return off_grid.unsqueeze(-1) | off_grid.unsqueeze(-2)


# ---- the support's order ---------------------------------------------------------------------------------------------


def reordered(tokens: Tensor, order: Tensor) -> Tensor:
    """Tokens (B, H, T, D) taken in an order: int64 (1 or H, T), the token that comes to each place.

    In memory the result is (B, T, H, D), as projections are.
    """
    rows = tokens.transpose(1, 2)
    if order.shape[0] == 1:
        return rows.flatten(2).index_select(1, order[0]).unflatten(2, rows.shape[2:]).transpose(1, 2)
    return rows.gather(1, order.T[:, :, None].expand(*rows.shape)).transpose(1, 2)


class Reordered(torch.autograd.Function):
    """`reordered`, whose gradient is taken in the inverse order. That of indexing is summed up entry by entry."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """See the class."""
        ctx.save_for_backward(order, inverse)
        return reordered(tokens, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradient in the inverse order."""
        order, inverse = ctx.saved_tensors
        return Reordered.apply(grad, inverse, order), None, None


def reorder(plan: AttentionPlan, tokens: Tensor, to: str, back: str) -> Tensor:
    """Tokens (B, H, T, D) in the order of a table of the plan, (1 or H, T); `back` is the table of its inverse."""
    order = plan_table(plan, to, tokens.device)
    if is_transformed() or plain() is not None:
        return reordered(tokens, order)
    return Reordered.apply(tokens, order, plan_table(plan, back, tokens.device))


def in_order(plan: AttentionPlan, tokens: Tensor) -> Tensor:
    """Tokens (B, H, T, D) in the order in which the support counts its offsets; as they are if they come in it."""
    return tokens if plan.ranks is None else reorder(plan, tokens, "tokens_in_order", "token_ranks")


def in_raster(plan: AttentionPlan, tokens: Tensor) -> Tensor:
    """Tokens (B, H, T, D) from the support's order in raster order; as they are if they came in the support's."""
    return tokens if plan.ranks is None else reorder(plan, tokens, "token_ranks", "tokens_in_order")


def to_layout(plan: AttentionPlan, tokens: Tensor) -> Tensor:
    """Tokens (B, H or 1, T, D) from raster order in the layout of the plan."""
    return tokens if plan.layout_ranks is None else reorder(plan, tokens, "tokens_in_order", "token_ranks")


def from_layout(plan: AttentionPlan, tokens: Tensor) -> Tensor:
    """Tokens (B, H or 1, T, D) from the layout of the plan in raster order."""
    return tokens if plan.layout_ranks is None else reorder(plan, tokens, "token_ranks", "tokens_in_order")


def weights_from_layout(plan: AttentionPlan, weights: Tensor) -> Tensor:
    """Attention weights (B, H, T, T) from the layout of the plan in raster order."""
    return from_layout(plan, from_layout(plan, weights).mT).mT


# ---- positions and decay --------------------------------------------------------------------------------------------


def token_positions(request: AttentionRequest) -> Tensor:
    """Positions (C, A, N) that the decay measures distances along; (C, A, B, n) with `token_ids`.

    The positions of a token without a place in the grid have no meaning.
    """
    assert request.decay is not None
    positions = decay_positions(request.plan, request.decay, request.q.device)
    return positions if request.token_ids is None else positions[..., request.token_ids.clamp_min(0)]


def request_keys(request: AttentionRequest) -> Tensor:
    """The tokens that each patch sees, (1 or B, H, n, K), -1 after the last."""
    return plan_table(request.plan, "keys", request.q.device)[None] if request.key_ids is None else request.key_ids


def copies_of_lists(request: AttentionRequest) -> int:
    """How many numbers are kept for each key in a list: its own and, with a decay, M; in training what M is made of."""
    if request.decay is None:
        return 1
    beta_CH = request.decay["beta"]
    return 2 + (2 * beta_CH.shape[0] if torch.is_grad_enabled() and beta_CH.requires_grad else 0)


def check_listed_decay(request: AttentionRequest, numbers: int) -> None:
    """ValueError if `numbers` of float32 for the listed pairs over the frames of a clip would take too much memory."""
    if request.plan.frames > 1 and request.key_ids is None:
        check_bytes(4 * numbers, f"a decay at the listed pairs of {request.plan.num_tokens} patches would")


def listed_decay(request: AttentionRequest, key_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """M at the listed pairs, (1 or B, H, n, K). Its value at places without a key has no effect.

    Raises:
        ValueError: if it would take too much memory over the frames of a clip.
    """
    assert request.decay is not None
    check_listed_decay(request, copies_of_lists(request) * key_ids.numel())
    prefix, positions = request.plan.num_prefix_tokens, token_positions(request)
    patches = (key_ids - prefix).clamp_min(0).long()
    beta_CH = request.decay["beta"]
    gamma_H = prefix_weights(request.decay, dtype)
    heads = []
    for head in range(request.plan.num_heads):
        patch_ids = patches[:, head]
        if request.token_ids is None:  # positions (C, A, N)
            distances = (positions[:, :, None, :, None] - positions[:, :, patch_ids]).abs().sum(1)
        else:  # (C, A, B, n)
            key_positions = (
                positions.unsqueeze(-2)
                .expand(*positions.shape[:-1], *patch_ids.shape[-2:-1], -1)
                .gather(-1, patch_ids.expand(*positions.shape[:2], *patch_ids.shape))
            )
            distances = (positions.unsqueeze(-1) - key_positions).abs().sum(1)
        weights = decay_weights(beta_CH[:, head : head + 1], distances, dtype)[0]
        prefix_weight = 1.0 if gamma_H is None else gamma_H[head]
        heads.append(torch.where(key_ids[:, head] < prefix, prefix_weight, weights))
    return torch.stack(heads, 1)
