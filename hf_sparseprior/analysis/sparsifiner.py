"""What Sparsifiner's predictors do with images, layer after layer.

Shape letters: B batch, H heads, N patch tokens, T = N and the prefix tokens, R reduced dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.attention.request import AttentionRequest, listed_mask
from hf_sparseprior.priors.sparsifiner import Sparsifiner


@dataclass(frozen=True)
class Prediction:
    """What the predictor of one layer did.

    coefficients: A_down before the threshold, (B, H, N, R). basis: W_up, (R, N). connectivity: bool (B, H, T, T),
    which keys each query sees. full_attention: softmax(Q K^T) over all keys, (B, H, T, T). up_share: share of the
    multiply-adds of A_down W_up without a zero.
    """

    coefficients: Tensor
    basis: Tensor
    connectivity: Tensor
    full_attention: Tensor
    up_share: float
    threshold: float

    def numbers(self, num_prefix_tokens: int) -> dict[str, float]:
        """How many patches a patch keeps on average, and shares of nonzero pairs, coefficients and weights of W_up.

        Of full attention, over patches: the share of its weight that lies on what a patch keeps (`attention_kept`) and
        that would lie on as many of its highest values (`attention_best`), and the share of these that are kept
        (`highest_kept`).
        """
        patches = self.connectivity[..., num_prefix_tokens:, num_prefix_tokens:]
        full = self.full_attention[..., num_prefix_tokens:, num_prefix_tokens:].double()
        falling, order = full.sort(dim=-1, descending=True, stable=True)
        count = patches.sum(-1, keepdim=True)
        first = torch.arange(full.shape[-1], device=full.device) < count
        highest = (patches.gather(-1, order) & first).sum(-1, keepdim=True) / count.clamp_min(1)
        return {
            "patches_kept": patches.sum(-1).double().mean().item(),
            "pairs_seen": self.connectivity.double().mean().item(),
            "coefficients_kept": (self.coefficients > self.threshold).double().mean().item(),
            "basis_kept": (self.basis != 0).double().mean().item(),
            "up_share": self.up_share,
            "attention_kept": ((full * patches).sum(-1) / full.sum(-1)).mean().item(),
            "attention_best": ((falling * first).sum(-1) / full.sum(-1)).mean().item(),
            "highest_kept": highest[count > 0].mean().item(),
        }


@contextmanager
def watch_predictions(model: nn.Module) -> Iterator[list[Prediction]]:
    """Inside the block, every forward of the model adds a `Prediction` for each of its layers.

    Raises:
        ValueError: for a model without Sparsifiner's predictors.
    """
    predictors = [module for module in model.modules() if isinstance(module, Sparsifiner)]
    if not predictors:
        raise ValueError(f"{type(model).__name__} has no sparsifiner in its prior")
    predictions: list[Prediction] = []
    with ExitStack() as stack:
        for predictor in predictors:
            stack.callback(predictor.register_forward_hook(partial(_see, predictions)).remove)
        yield predictions


@torch.no_grad()
def _see(predictions: list[Prediction], predictor: Any, args: tuple[Any, ...], keys: Tensor | None) -> None:
    request: AttentionRequest = args[0]
    if request.keep_mask is not None:
        raise ValueError(
            "connectivity is watched in a model that drops tokens, not in one that trains with all of them"
        )
    plan, coefficients = request.plan, predictor.coefficients(request)
    full = torch.softmax((request.q.float() * request.logit_scale()) @ request.k.float().transpose(-1, -2), -1)
    predictions.append(
        Prediction(
            coefficients,
            predictor.sparse_basis(plan.grid),
            _connectivity(keys, plan, full),
            full,
            predictor.up_share(coefficients),
            predictor.settings["threshold"],
        )
    )


def _connectivity(keys: Tensor | None, plan: AttentionPlan, full: Tensor) -> Tensor:
    if keys is None:
        return torch.ones_like(full, dtype=torch.bool)
    return listed_mask(keys, plan.num_prefix_tokens, full.shape[-1])


def attention_distance(one: Tensor, other: Tensor, num_prefix_tokens: int) -> float:
    """How far the attention of patches in two models lies apart: half of the sum of absolute differences over keys, of
    the means over heads, averaged over patches. Of two distributions it is the total variation, from 0 to 1. Both are
    (B, H, T, T).
    """
    apart = one.double().mean(1) - other.double().mean(1)
    return 0.5 * apart[:, num_prefix_tokens:].abs().sum(-1).mean().item()


def masked_attention(prediction: Prediction) -> Tensor:
    """The full attention at the pairs that are seen, with each row scaled to sum 1 (Eq. 4); without a decay."""
    kept = prediction.full_attention * prediction.connectivity
    return kept / kept.sum(-1, keepdim=True)
