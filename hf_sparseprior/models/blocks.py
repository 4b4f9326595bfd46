"""What families share: MLP, LayerScale, stochastic depth, batch norm; stem, patches, positions and layout of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_sparseprior.attention.packing import Packing, joined
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.base.extras import make_extras
from hf_sparseprior.base.layer_sizes import MLP_WIDTH, WIDTH, UnitAxes
from hf_sparseprior.base.resolved import ResolvedModule


class MLP(nn.Module):
    """Two linear layers with an activation and the prior's extras for the MLP between them.

    Args:
        width, hidden_width: of the tokens, and between the two layers.
        activation: name of the activation.
        bias: whether the layers have biases.
        extras: the prior's, of which those for the MLP act.
    """

    OWN_UNITS: ClassVar[tuple[str, ...]] = (MLP_WIDTH,)
    UNIT_AXES: UnitAxes = {
        "fc1.weight": ((MLP_WIDTH,), (WIDTH,)),
        "fc1.bias": ((MLP_WIDTH,),),
        "fc2.weight": ((WIDTH,), (MLP_WIDTH,)),
        "fc2.bias": ((WIDTH,),),
    }

    def __init__(
        self, width: int, hidden_width: int, activation: str, bias: bool, extras: Sequence[ResolvedModule]
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden_width, bias=bias)
        self.activation = ACT2FN[activation]
        self.fc2 = nn.Linear(hidden_width, width, bias=bias)
        self.locality = make_extras(extras, "MLP", hidden_width)

    def forward(self, hidden_states: Tensor, grid: tuple[int, int] | Packing, num_prefix_tokens: int) -> Tensor:
        """Turn (B, T, C) into (B, T, C)."""
        hidden_states = self.activation(self.fc1(hidden_states))
        for branch in self.locality.values():
            if isinstance(grid, Packing):
                bound_branch = functools.partial(branch, num_prefix_tokens=num_prefix_tokens)
                hidden_states = grid.by_grid(bound_branch, hidden_states, num_prefix_tokens)
            else:
                hidden_states = branch(hidden_states, grid, num_prefix_tokens)
        return self.fc2(hidden_states)


class LayerScale(nn.Module):
    """A learned factor per channel (DeiT-III)."""

    UNIT_AXES: UnitAxes = {"scale": ((WIDTH,),)}

    def __init__(self, width: int, value: float) -> None:
        super().__init__()
        self.value = value
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Turn (..., C) into (..., C)."""
        return hidden_states * self.scale


class DropPath(nn.Module):
    """Drops a residual branch for whole samples in training and scales the others up (stochastic depth)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor, grid: Any = None, num_prefix_tokens: int = 0) -> Tensor:
        """Turn (B, ...) into (B, ...), or (1, total, C) of the images of a `Packing`, given as `grid`, likewise."""
        if not self.training or self.rate == 0.0:
            return branch
        keep, packed = 1.0 - self.rate, isinstance(grid, Packing)
        shape = (len(grid.order),) if packed else (branch.shape[0], *(1,) * (branch.dim() - 1))
        dtype = torch.promote_types(branch.dtype, torch.float32)
        kept = torch.empty(shape, dtype=dtype, device=branch.device).bernoulli_(keep)
        factors = (kept / (keep or 1.0)).to(branch.dtype)
        return branch * (grid.image_factors(factors, num_prefix_tokens) if packed else factors)

    def extra_repr(self) -> str:
        """What `print(model)` shows of the layer."""
        return f"rate={self.rate:.3f}"


def check_pixels(pixel_values: Any, num_channels: int, clips: bool = False, empty: bool = False) -> None:
    """Raise ValueError unless these are images (B, channels, height, width), or clips with frames after the batch, and
    not `empty` in a side or in frames.
    """
    is_tensor = torch.is_tensor(pixel_values)
    good = is_tensor and pixel_values.dim() == 4 + clips and pixel_values.shape[-3] == num_channels
    if not good or not (empty or all((*pixel_values.shape[1:-3], *pixel_values.shape[-2:]))):
        given = f"shape {tuple(pixel_values.shape)}" if is_tensor else type(pixel_values).__name__
        wanted = f"(batch, {'frames, ' if clips else ''}{num_channels}, height, width)"
        raise ValueError(f"pixel_values of {given} must be {wanted}")


def patch_grid(pixel_values: Tensor, num_channels: int, patch: tuple[int, int]) -> tuple[int, int]:
    """(height, width) in patches of images (B, channels, height, width).

    Raises:
        ValueError: for another shape, or sides that are no multiples of the patch.
    """
    check_pixels(pixel_values, num_channels, empty=True)
    height, width = pixel_values.shape[2:]
    if height % patch[0] or width % patch[1] or not height or not width:
        raise ValueError(
            f"image of {height}x{width} pixels must be a multiple of the {patch[0]}x{patch[1]} patch in both sides"
        )
    return height // patch[0], width // patch[1]


def resized_positions(positions: Tensor, from_grid: tuple[int, int], grid: tuple[int, int], mode: str) -> Tensor:
    """Position embeddings (1, N, C) of a grid `from_grid`, interpolated for another `grid` unless it is the same.

    `mode` is one of `F.interpolate`.
    """
    if grid == from_grid:
        return positions
    map_ = positions.reshape(1, *from_grid, -1).permute(0, 3, 1, 2)
    # Not in half precision, which would change the embedding visibly.
    precise = map_.to(torch.promote_types(map_.dtype, torch.float32))
    resized = F.interpolate(precise, size=grid, mode=mode, align_corners=False)
    return resized.to(positions.dtype).flatten(2).transpose(1, 2)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm of the channels in dimension 1.

    Statistics see a batch once: what gradient checkpointing computes a second time, in the backward pass, leaves them
    alone. And a layer whose weight has no gradient normalises with its stored statistics in training too. So a frozen
    part of a model stays what it was, under a linear probe or an adapter, whose file holds no statistics.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Turn (n, C) or (B, C, height, width) into the same shape."""
        mean, variance = self.running_mean, self.running_var
        assert mean is not None and variance is not None and self.num_batches_tracked is not None
        batch = self.training and self.weight.requires_grad
        if batch and is_recomputed():
            mean, variance = mean.clone(), variance.clone()  # that are thrown away
        elif batch:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(inputs, mean, variance, self.weight, self.bias, batch, self.momentum or 0.0, self.eps)


def is_recomputed() -> bool:
    """Whether this runs within a backward pass, as the forward passes of gradient checkpointing do."""
    # -1: no backward pass. torch.utils.checkpoint asks the same. A compiler recomputes without running this again.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class CheckpointedLayer(GradientCheckpointingLayer):
    """A layer for gradient checkpointing, which gets gradients also when the layers before it are frozen."""

    @property
    def _gradient_checkpointing_func(self) -> Callable:  # transformers sets and calls it
        return functools.partial(checkpoint_layer, self, self._checkpoint)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable) -> None:
        self._checkpoint = checkpoint

    @_gradient_checkpointing_func.deleter
    def _gradient_checkpointing_func(self) -> None:
        del self._checkpoint


def checkpoint_layer(layer: nn.Module, checkpoint: Callable, run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run a layer with `checkpoint`, torch's as transformers sets it.

    Reentrant checkpoints give no gradient unless an argument needs one. With frozen embeddings none does, so a layer
    with something to learn gets its first argument, the hidden states, as one that does.
    """
    if is_reentrant(checkpoint) and torch.is_grad_enabled() and torch.is_tensor(args[0]):
        needed = any(torch.is_tensor(arg) and arg.requires_grad for arg in args)
        if not needed and any(parameter.requires_grad for parameter in layer.parameters()):
            args = (args[0].detach().requires_grad_(), *args[1:])
    return checkpoint(run, *args, **kwargs)


def is_reentrant(checkpoint: Callable) -> bool:
    """Whether a layer's checkpoints, as transformers sets them, are reentrant; torch's own default is that."""
    return getattr(checkpoint, "keywords", {}).get("use_reentrant", True)


class ConvolutionStem(nn.Module):
    """Three convolutions with batch norm and ReLU before the patch projection (LV-ViT), which halve the sides.

    If they are frozen, the statistics of their batch norms stay too.
    """

    UNIT_AXES: UnitAxes = {"convolutions.*": (), "norms.*": ()}

    def __init__(self, num_channels: int, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(num_channels, width, kernel_size=7, stride=2, padding=3, bias=False),
                nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
                nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(BatchNorm(width) for _ in self.convolutions)

    def train(self, mode: bool = True) -> ConvolutionStem:
        """As in torch, but the norms of a frozen stem stay in evaluation mode."""
        super().train(mode)
        for norm in self.norms:
            norm.train(mode and all(parameter.requires_grad for parameter in norm.parameters()))
        return self

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Turn (B, channels, height, width) into (B, width of the stem, height / 2, width / 2)."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            pixel_values = F.relu(norm(convolution(pixel_values)))
        return pixel_values


def masked_patches(patches: Tensor, masked: Tensor, mask_token: Tensor | None) -> Tensor:
    """Patches (B, N, C) with the mask token (1, 1, C) in the places of `masked` (B, N), as stock ViT and Swin have it.

    Raises:
        ValueError: for a model without such a token, and another shape.
    """
    if mask_token is None:
        raise ValueError("bool_masked_pos needs a model with a mask token, made with use_mask_token=True")
    if masked.shape != patches.shape[:2]:
        raise ValueError(
            f"bool_masked_pos of shape {tuple(masked.shape)} must be (batch, patches), {tuple(patches.shape[:2])}"
        )
    weights = masked.unsqueeze(-1).to(patches.dtype)
    return patches * (1.0 - weights) + mask_token * weights


class Moves:
    """Moves patches between raster order and the layout of the layers.

    Args:
        model: knows how. plans: for each grid that the images have. grid: the grid, or the packing of several.
    """

    def __init__(self, model: Any, plans: Sequence[AttentionPlan], grid: Any) -> None:
        self.model, self.plans, self.grid = model, plans, grid

    def patches(self, tokens: Tensor, back: bool = False) -> Tensor:
        """Tokens with their patches moved into the layout, or back."""
        move = self.model.move_patches
        if not isinstance(self.grid, Packing):
            return move(tokens, self.plans[0], back=back)
        parts = self.grid.parts(tokens, self.model.config.num_prefix_tokens)
        return joined([move(part, plan, back=back) for part, plan in zip(parts, self.plans, strict=True)])

    def weights_back(self, weights: Any) -> Any:
        """Attention weights of tokens in the layout, in raster order."""
        move = self.model.move_weights_back
        if not isinstance(self.grid, Packing):
            return move(weights, self.plans[0])
        return [move(part, plan) for part, plan in zip(weights, self.plans, strict=True)]
