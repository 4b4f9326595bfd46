"""Attention of stock transformers models with a prior: the module that holds it, and the function that runs it."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from hf_sparseprior.adapters.token_layout import TokenLayout
from hf_sparseprior.attention.plan import AttentionPlan, plan_table
from hf_sparseprior.attention.request import AttentionRequest
from hf_sparseprior.base.resolved import FullPrior, ResolvedPrior
from hf_sparseprior.models.base_model import asked_backend
from hf_sparseprior.patterns.supports import redraws
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.saving.saved_config import PRIOR_RECORD

# The name in `AttentionInterface`, and in config.json of models saved with a prior. Where this package is missing,
# transformers refuses the name in words that quote it, so it is the package's.
IMPLEMENTATION = "hf_sparseprior"
# What this code is registered as with transformers. The code in a saved folder has a name of its own: one process may
# load several folders, and this package.
CARRIED = not __name__.startswith(f"{IMPLEMENTATION}.")
REGISTERED = f"{IMPLEMENTATION}_{zlib.crc32(__name__.encode()):08x}" if CARRIED else IMPLEMENTATION
PRIOR_MODULE = "sparse_prior"  # what an attention module calls the module that holds its prior
_OTHER_END = -100.0  # what Swin adds to the logits of such pairs
MARKER = "needs_hf_sparseprior"  # a buffer that is reported when a model with a prior is loaded without it
RECORD = PRIOR_RECORD  # the field of config.json that says which prior a saved model has


class StockPrior(PriorAttention):
    """The prior of one stock attention module.

    Args:
        num_heads, prior, layer_idx, head_dim: as in `PriorAttention`.
        layout: layout of the model's tokens, shared by its layers.
        config: the config that the attention module came with.
        for_adapters: whether it serves adapters alone; without an active one the module's own attention runs.
    """

    def __init__(
        self,
        num_heads: int,
        prior: ResolvedPrior,
        layer_idx: int,
        layout: TokenLayout,
        config: Any,
        head_dim: int,
        for_adapters: bool = False,
    ) -> None:
        if redraws(prior["support"]):
            raise ValueError(
                f"prior: support {prior['support']['name']!r} with redraw=True must have redraw=False in a stock "
                "model, where nothing counts the passes; the models of this package do"
            )
        super().__init__(num_heads, prior, layer_idx, head_dim)
        self.layout = layout
        self.config = config
        self.for_adapters = for_adapters
        if not for_adapters:
            self.serve_all()

    def serve_all(self) -> None:
        """Serve the model itself, which is saved with it, and not adapters alone."""
        self.for_adapters = False
        device = next((weight.device for weight in self.parameters()), None)
        self.register_buffer(MARKER, torch.ones(1, dtype=torch.uint8, device=device))

    @property
    def is_idle(self) -> bool:
        """Whether the module's own attention runs, because no adapter is active."""
        return self.for_adapters and self.active_decay() is None

    @property
    def has_adapter(self) -> bool:
        """Whether peft holds scalars in it: a decay of its own, or a copy of the prior's in `modules_to_save`."""
        copied = any(name.endswith("modules_to_save") for name, _ in self.named_modules())
        return self.decay_adapter is not None or copied

    def _save_to_state_dict(self, *args: Any) -> None:
        if not self.for_adapters:
            _refuse_unrecorded_save()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if not self.for_adapters:
            state_dict.setdefault(prefix + MARKER, getattr(self, MARKER))  # a plain model's state dict has none
        super()._load_from_state_dict(state_dict, prefix, *args)


def _refuse_unrecorded_save() -> None:
    """Raise ValueError within transformers' `save_pretrained` of a model whose config does not record the prior.

    A model does not know what it is a part of, and `save_pretrained` of the whole asks a part for nothing but its
    tensors. So who asks is looked up on the stack: the next load would leave the prior out.
    """
    frame = sys._getframe()
    while frame.f_code is not PreTrainedModel.save_pretrained.__code__:
        if frame.f_back is None:
            return
        frame = frame.f_back
    whole = frame.f_locals["self"]
    if not hasattr(whole.config, RECORD) and not getattr(whole, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{type(whole).__name__}.save_pretrained would lose a prior that was applied to a part of the model; "
            "hf_sparseprior.apply_prior goes to the model that is saved"
        )


def stock_priors(model: nn.Module) -> list[StockPrior]:
    """Every `StockPrior` in a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, StockPrior)]


APPLIED = "_sparse_prior"  # the attribute of a model that holds this:


@dataclass
class Applied:
    """What `apply_prior` did to a model.

    prior: the full form of all layers'; of one prior for all, the first layer's.
    attention: names of the attention modules, in the order of the layers.
    handles: handles of the hooks.
    """

    prior: FullPrior
    attention: list[str]
    handles: list[Any]


def applied_prior(model: nn.Module) -> Applied:
    """What `apply_prior` did to a model.

    Raises:
        ValueError: if it did nothing.
    """
    applied = getattr(model, APPLIED, None)
    if applied is None:
        raise ValueError(f"{type(model).__name__} has no prior from hf_sparseprior.apply_prior")
    return applied


def prior_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a stock module with its prior, as `AttentionInterface` calls it.

    Args:
        module: the attention module; `apply_prior` put a `StockPrior` into it.
        query, key, value: (B, H, T, D).
        attention_mask: added to the logits (relative positions, windows), or boolean, True = attended; (B, H, T, T) or
            broadcastable; or the BlockMask of a model that was set to flex_attention.

    Returns:
        (B, T, H, D), and the weights (B, H, T, T) if they are asked for.

    Raises:
        RuntimeError: for a module without a prior, which must not silently run as dense attention.
    """
    prior: StockPrior | None = getattr(module, PRIOR_MODULE, None)
    if prior is None:
        raise RuntimeError(_no_prior(module))
    if prior.is_idle:
        attend = _own_attention(module, prior.config)
        return attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    grid, num_prefix_tokens, token_ids = prior.layout.locate(query.shape[2])
    # Rotary positions come out in float32 under autocast, values do not.
    query, key = query.to(value.dtype), key.to(value.dtype)
    bias = _written_out(attention_mask, query, key)
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=query.dtype, device=bias.device).masked_fill(~bias, -math.inf)
    plan = prior.plan(grid, num_prefix_tokens)
    if prior.layout.family.windows and bias is not None and bias.shape[0] > 1:
        bias, plan = within_regions(bias, prior, grid)
    request = AttentionRequest(
        query,
        key,
        value,
        plan,
        scale=scaling,
        dropout_p=dropout,
        bias=bias,
        token_ids=token_ids,
        need_weights=_wants_weights(prior.config, kwargs),
    )
    # "eager" is transformers' word for the written-out form.
    out, weights = prior.attend(request, asked_backend(prior.config))
    return out.transpose(1, 2), weights


def within_regions(bias: Tensor, prior: StockPrior, window: tuple[int, ...]) -> tuple[Tensor, AttentionPlan]:
    """The bias (B, H, T, T) of shifted windows with the support in it, so that no query is left without a key.

    transformers and timm add -100 to pairs of patches from different ends of the image. A patch whose keys are all of
    that kind would attend to them; here it attends to itself, as in SparsePriorSwin.

    Returns:
        The bias and the plan that goes with it. Without a support, or with one that sets logits to 0, the bias stays.
    """
    plan = prior.plan(window)
    if plan.offsets is None or plan.mask_fill != "neg_inf":
        return bias, plan
    seen = plan_table(plan, "narrow_mask", bias.device) & (bias > 0.5 * _OTHER_END)
    itself = torch.eye(seen.shape[-1], dtype=torch.bool, device=bias.device)
    bias = bias.masked_fill(~(seen | (~seen.any(-1, keepdim=True) & itself)), -math.inf)
    return bias, prior.plan(window, dense=True)


def _written_out(mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as a tensor; None if every token sees every token."""
    if not hasattr(mask, "mask_mod"):
        return mask
    # transformers makes the mask for the model's own attention, and flex_attention takes masks as functions.
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = mask.shape[:2]
    written = create_mask(mask.mask_mod, batch, heads, query.shape[2], key.shape[2], device=str(query.device))
    return None if written.all() else written


def _no_prior(module: nn.Module) -> str:
    """Why a module whose config names our attention has no prior."""
    if hasattr(getattr(module, "config", None), RECORD):
        return (
            f"{type(module).__name__} was saved with a prior, which has not been loaded: "
            "call hf_sparseprior.load_prior(model, folder), or load with hf_sparseprior.from_pretrained"
        )
    return (
        f"{type(module).__name__} has no prior: attn_implementation alone does not know layer and grid, "
        "call hf_sparseprior.apply_prior(model, prior)"
    )


def _own_attention(module: nn.Module, config: Any) -> Callable:
    """The attention that a stock module runs with this config, looked up as in its forward."""
    written_out = sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, written_out)


def _wants_weights(config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a forward asks for the attention weights."""
    if kwargs.get("output_attentions") or config.output_attentions:
        return True
    if torch.compiler.is_compiling():
        return False
    # transformers' hooks collect outputs here; modules that take no keywords have no other way to know.
    return "attentions" in (_active_collector.get() or {})


AttentionInterface.register(REGISTERED, prior_attention)
AttentionMaskInterface.register(REGISTERED, sdpa_mask)
