"""Where the tokens of a stock model's current forward lie, as hooks on its embeddings see it."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_sparseprior.adapters.stock_families import StockFamily
from hf_sparseprior.models.blocks import checkpoint_layer


class TokenLayout:
    """The grid of the current forward, its prefix tokens, and which patches are visible.

    A clip's patches come one frame after another; its grid is (frames, height, width). Each thread has its own current
    forward: several may use one model, and the replicas of `nn.DataParallel` share its layout.

    Args:
        family: the model's family.
        num_prefix_tokens: class, distillation and register tokens.
        layers: the encoder's layers, which may run again in the backward pass.
        is_joint: whether attention sees the patches of several grids, the frames of a clip.
    """

    def __init__(
        self,
        family: StockFamily,
        num_prefix_tokens: int,
        layers: Sequence[GradientCheckpointingLayer],
        is_joint: bool = False,
    ) -> None:
        self.family = family
        self.num_prefix_tokens = num_prefix_tokens
        self.layers: list[Any] = list(layers)
        self.is_joint = is_joint
        self._forward = threading.local()

    @property
    def grid(self) -> tuple[int, ...] | None:
        """The grid of this thread's current forward; None before the first."""
        return getattr(self._forward, "grid", None)

    @grid.setter
    def grid(self, grid: tuple[int, ...] | None) -> None:
        self._forward.grid = grid

    @property
    def token_ids(self) -> Tensor | None:
        """Numbers (B, n) of the visible patches in this thread's current forward; None if all are."""
        return getattr(self._forward, "token_ids", None)

    @token_ids.setter
    def token_ids(self, token_ids: Tensor | None) -> None:
        self._forward.token_ids = token_ids

    def __getstate__(self) -> dict[str, Any]:
        """Thread-local state is not pickled; it belongs to a forward that runs."""
        return {name: value for name, value in vars(self).items() if name != "_forward"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _forward=threading.local())

    def watch(self, embeddings: nn.Module) -> list[Any]:
        """Register the hooks on a model's embeddings. Returns the handles that remove them."""
        projection = patch_projection(embeddings)
        handles = [projection.register_forward_pre_hook(self.see_checkpoints)]
        if self.family.windows:
            return handles
        handles.append(projection.register_forward_hook(self.see_patches))
        if self.family.shuffled:
            handles.append(embeddings.register_forward_hook(self.see_shuffled))
        if self.family.masked:
            handles.append(embeddings.register_forward_pre_hook(self.see_masked, with_kwargs=True))
        return handles

    def see_checkpoints(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the patch projection: activation checkpointing may be switched on at any time."""
        for layer in self.layers:
            checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
            if checkpoint is not None and not isinstance(checkpoint, LayoutCheckpoint):
                layer._gradient_checkpointing_func = LayoutCheckpoint(self, layer, checkpoint)

    def see_patches(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Forward hook of the patch projection: its output is the grid."""
        self.grid = tuple(output.shape[2:])

    def see_shuffled(self, module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        """Forward hook of embeddings that return how they shuffled the patches."""
        tokens, _, ids_restore = output[:3]
        self.token_ids = torch.argsort(ids_restore, dim=1)[:, : tokens.shape[1] - self.num_prefix_tokens]

    def see_masked(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of embeddings that leave out the patches of `bool_masked_pos`."""
        masked = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get("bool_masked_pos")
        self.token_ids = None if masked is None else (~masked.bool()).nonzero()[:, 1].view(masked.shape[0], -1)

    def locate(self, num_tokens: int) -> tuple[tuple[int, ...], int, Tensor | None]:
        """Grid, number of prefix tokens and token ids (B, n) for attention over this many tokens.

        Token ids are the numbers of the visible patches in raster order, frame after frame; None if all are visible.
        """
        if self.family.windows:
            side = math.isqrt(num_tokens)
            return (side, side), 0, None
        if self.grid is None:
            raise RuntimeError("attention ran before the embeddings, so the patch grid is not known")
        if self.is_joint:
            frames, rest = divmod(num_tokens - self.num_prefix_tokens, math.prod(self.grid))
            if not rest:
                return (frames, *self.grid), self.num_prefix_tokens, None
        visible = math.prod(self.grid) if self.token_ids is None else self.token_ids.shape[1]
        if num_tokens != self.num_prefix_tokens + visible:
            raise ValueError(
                f"attention over {num_tokens} tokens does not fit {self.num_prefix_tokens} prefix tokens and "
                f"{visible} patches of a {'x'.join(map(str, self.grid))} grid"
            )
        return self.grid, self.num_prefix_tokens, self.token_ids


@dataclass
class LayoutCheckpoint:
    """A layer's activation checkpointing. When the layer runs again, it finds the layout of its first run.

    Another forward may have run in between: two views of an image, a student and a teacher, several crops.
    """

    layout: TokenLayout
    layer: nn.Module
    checkpoint: Callable

    def __call__(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run a layer with `checkpoint`."""
        layout, seen = self.layout, (self.layout.grid, self.layout.token_ids)

        def run_as_seen(*inner: Any, **options: Any) -> Any:
            now = layout.grid, layout.token_ids
            layout.grid, layout.token_ids = seen
            try:
                return run(*inner, **options)
            finally:
                layout.grid, layout.token_ids = now

        return checkpoint_layer(self.layer, self.checkpoint, run_as_seen, *args, **kwargs)


def patch_projection(embeddings: nn.Module) -> Any:
    """The convolution that turns an image or a clip into patches."""
    return next(module for module in embeddings.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d)))
