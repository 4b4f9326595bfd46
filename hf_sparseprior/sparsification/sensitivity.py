"""What it costs to change one layer: the change of the model's outputs on calibration images.

A layer is changed alone, all others stay dense, so a candidate takes a forward pass. What the blocks before the layer
give does not change: it is computed once, and these blocks do not run again, where all blocks give tokens of one shape.
Where the next block alone reads it, that of the last of them is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
def losses_of(
    subject: Subject, priors: Sequence[ResolvedPrior | None], batches: Sequence[Tensor], dense: Sequence[Tensor]
) -> list[float]:
    """Loss on each image of the model with these priors; None: a layer's own.

    Args:
        batches: images (B, channels, height, width). dense: `dense_outputs` of them.
    """
    with subject.changed(priors):
        losses = [
            subject.loss(subject.outputs(pixels), outputs) for pixels, outputs in zip(batches, dense, strict=True)
        ]
    return torch.cat(losses).tolist()


class LayerChanged:
    """One layer of a model that is changed while all others stay dense.

    Args:
        number: of the layer, from 0.
        batches: images (B, channels, height, width). dense: `dense_outputs` of them.
    """

    def __init__(self, subject: Subject, number: int, batches: Sequence[Tensor], dense: Sequence[Tensor]) -> None:
        self.subject, self.number, self.batches, self.dense = subject, number, batches, dense
        self.blocks = [layer.block for layer in subject.layers]
        self.before: dict[int, list[Any]] = {}  # by the number of a batch

    @torch.no_grad()
    def losses(self, prior: ResolvedPrior, batches: Iterable[int]) -> list[float]:
        """Loss on each image of these batches, given by their numbers."""
        found, layer = [], self.subject.layers[self.number]
        after = layer.dense.with_pairs(prior)  # its tables are made once
        for batch in batches:
            pixels = self.batches[batch]
            if batch not in self.before:
                self.before[batch] = self._outputs_before(pixels) if self.number else []
            before = self.before[batch]
            with layer.changed(after), _skipped(self.blocks, before):
                found.append(self.subject.loss(self.subject.outputs(pixels), self.dense[batch]))
        return torch.cat(found).tolist()

    def _outputs_before(self, pixels: Tensor) -> list[Any]:
        outputs = _outputs_of_blocks(self.subject, self.blocks, pixels)[: self.number]
        return outputs[-1:] * len(outputs) if read_in_sequence(self.subject) else outputs


def read_in_sequence(subject: Subject) -> bool:
    """Whether what each block gives is read by the next one alone, and not, as for feature maps, by the head too."""
    if subject.in_sequence is None:
        blocks, pixels = [layer.block for layer in subject.layers], subject.images(1)
        before = _outputs_of_blocks(subject, blocks, pixels)[:-1]
        with _skipped(blocks, before):
            expected = subject.outputs(pixels)
        with _skipped(blocks, before[-1:] * len(before)):
            subject.in_sequence = torch.equal(subject.outputs(pixels), expected)
    return subject.in_sequence


def _outputs_of_blocks(subject: Subject, blocks: Sequence[nn.Module], pixels: Tensor) -> list[Any]:
    """What each block gives; nothing if they cannot be left out."""
    seen: list[Any] = []
    if len(set(map(id, blocks))) < len(blocks):
        return []
    handles = [block.register_forward_hook(lambda module, args, output: seen.append(output)) for block in blocks]
    try:
        subject.outputs(pixels)
    finally:
        for handle in handles:
            handle.remove()
    shapes = {tokens_of(output).shape for output in seen}
    return seen if len(seen) == len(blocks) and len(shapes) == 1 else []


def tokens_of(output: Any) -> Tensor:
    """The tokens that a block gives, alone or as the first of several things."""
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def _skipped(blocks: Sequence[nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Inside the block the first of these modules give these outputs without running."""
    for block, output in zip(blocks, outputs, strict=False):
        block.forward = lambda *args, output=output, **kwargs: output
    try:
        yield
    finally:
        for block in blocks[: len(outputs)]:
            del block.forward
