"""What it costs to change one layer: the change of the model's outputs on calibration images.

A layer is changed alone, all others stay dense, so a candidate takes a forward pass. What the blocks before the layer
give does not change: it is computed once, and these blocks do not run again, where all blocks give tokens of one shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.sparsification.subject import Subject


@torch.no_grad()
def dense_outputs(subject: Subject, batches: Sequence[Tensor]) -> list[Tensor]:
    """The dense model's outputs, batch by batch."""
    return [subject.outputs(pixels) for pixels in batches]


@torch.no_grad()
def loss_of(
    subject: Subject, priors: Sequence[ResolvedPrior | None], batches: Sequence[Tensor], dense: Sequence[Tensor]
) -> float:
    """Mean loss over images of the model with these priors; None: a layer's own.

    Args:
        batches: images (B, channels, height, width). dense: `dense_outputs` of them.
    """
    with subject.changed(priors):
        losses = [
            subject.loss(subject.outputs(pixels), outputs) for pixels, outputs in zip(batches, dense, strict=True)
        ]
    return float(torch.cat(losses).mean())


@torch.no_grad()
def losses_of_layer(
    subject: Subject,
    number: int,
    priors: Sequence[ResolvedPrior],
    batches: Sequence[Tensor],
    dense: Sequence[Tensor],
) -> Iterator[float]:
    """Mean loss over images with one layer changed, for each of these priors in turn."""
    blocks = [layer.block for layer in subject.layers]
    begun = [_outputs_before(subject, blocks, number, pixels) for pixels in batches]
    for prior in priors:
        losses = []
        layer = subject.layers[number]
        with layer.changed(layer.dense.with_pairs(prior)):
            for pixels, expected, before in zip(batches, dense, begun, strict=True):
                with _skipped(blocks[:number] if before is not None else [], before):
                    losses.append(subject.loss(subject.outputs(pixels), expected))
        yield float(torch.cat(losses).mean())


def _outputs_before(subject: Subject, blocks: Sequence[nn.Module], number: int, pixels: Tensor) -> Any:
    """What the block before a layer's gives; None if blocks before it cannot be left out."""
    seen: list[Any] = []
    if number == 0 or len(set(map(id, blocks))) < len(blocks):
        return None
    handles = [block.register_forward_hook(lambda module, args, output: seen.append(output)) for block in blocks]
    try:
        subject.outputs(pixels)
    finally:
        for handle in handles:
            handle.remove()
    shapes = {tokens_of(output).shape for output in seen}
    return seen[number - 1] if len(seen) == len(blocks) and len(shapes) == 1 else None


def tokens_of(output: Any) -> Tensor:
    """The tokens that a block gives, alone or as the first of several things."""
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def _skipped(blocks: Sequence[nn.Module], output: Any) -> Iterator[None]:
    """Inside the block these modules give an output without running."""
    for block in blocks:
        block.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
