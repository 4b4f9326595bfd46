"""Images of several sizes in one batch: packed into one sequence, each with its own grid, and none of it padding.

Tokens lie image after image, those of one grid together: (1, total, C). Layers work on all of them at once; attention,
and what else knows where a patch is, works on one grid after another.

Shape letters: B batch, C hidden size, p patch side, M patches of the largest image, P prefix tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Packing(NamedTuple):
    """How the images of a batch lie in one sequence.

    grids: (height, width) in patches, each once. counts: how many images have each. order: the image of the batch at
    each place of the sequence.
    """

    grids: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[tuple[int, int]]) -> Packing:
        """The packing of images of these grids."""
        images: dict[tuple[int, int], list[int]] = {}
        for number, size in enumerate(sizes):
            images.setdefault(size, []).append(number)
        order = tuple(number for group in images.values() for number in group)
        return cls(tuple(images), tuple(map(len, images.values())), order)

    def lengths(self, num_prefix_tokens: int) -> list[int]:
        """Tokens of an image of each grid, prefix tokens included."""
        return [num_prefix_tokens + height * width for height, width in self.grids]

    def parts(self, tokens: Tensor, num_prefix_tokens: int) -> list[Tensor]:
        """Views (b, T, ...) of tokens (1, total, ...), one for each grid."""
        lengths = self.lengths(num_prefix_tokens)
        sizes = [count * length for count, length in zip(self.counts, lengths, strict=True)]
        parts = tokens[0].split(sizes)
        return [part.unflatten(0, (count, -1)) for part, count in zip(parts, self.counts, strict=True)]

    def by_grid(
        self, function: Callable[[Tensor, tuple[int, int]], Tensor], tokens: Tensor, num_prefix_tokens: int
    ) -> Tensor:
        """What a function makes of the tokens (b, T, C) of each grid and of the grid, in one sequence."""
        parts = self.parts(tokens, num_prefix_tokens)
        return joined([function(part, grid) for part, grid in zip(parts, self.grids, strict=True)])

    def image_factors(self, factors: Tensor, num_prefix_tokens: int) -> Tensor:
        """A number for each image of the sequence, (B,), for all of its tokens: (1, total, 1)."""
        lengths = [
            length
            for length, count in zip(self.lengths(num_prefix_tokens), self.counts, strict=True)
            for _ in range(count)
        ]
        repeats = torch.tensor(lengths, device=factors.device)
        return factors.repeat_interleave(repeats, output_size=sum(lengths)).view(1, -1, 1)

    def in_batch_order(self, images: Sequence[Tensor]) -> Tensor:
        """Rows (b, ...) of the images of each grid, as the batch had them: (B, ...)."""
        places = [0] * len(self.order)
        for place, image in enumerate(self.order):
            places[image] = place
        return torch.cat(list(images))[torch.tensor(places, device=images[0].device)]

    def padded(self, parts: Sequence[Tensor], *dims: int) -> Tensor:
        """Tensors (b, ...) of each grid in one of (B, ...), in the batch's order, zeros at the end of these dims."""
        sizes = {dim: max(part.shape[dim] for part in parts) for dim in dims}
        filled = []
        for part in parts:
            ends = [0] * (2 * part.dim())
            for dim, size in sizes.items():
                ends[2 * (part.dim() - dim) - 1] = size - part.shape[dim]
            filled.append(F.pad(part, ends))
        return self.in_batch_order(filled)

    def padded_tokens(self, tokens: Tensor, num_prefix_tokens: int) -> Tensor:
        """Tokens (1, total, C) as (B, T, C), in the batch's order, zeros behind those of the smaller images."""
        return self.padded(self.parts(tokens, num_prefix_tokens), 1)

    def token_mask(self, num_prefix_tokens: int, device: torch.device) -> Tensor:
        """Which tokens of the padded output (B, P + M) are there, bool."""
        lengths = self.lengths(num_prefix_tokens)
        counts = [torch.full((count,), length) for count, length in zip(self.counts, lengths, strict=True)]
        return (torch.arange(max(lengths)) < self.in_batch_order(counts)[:, None]).to(device)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tokens (b, T, ...) of each grid as one sequence (1, total, ...)."""
    return torch.cat([part.flatten(0, 1) for part in parts])[None]


# ---- inputs ---------------------------------------------------------------------------------------------------------


def is_packed(pixel_values: Any, **sizes: Tensor | None) -> bool:
    """Whether a call has images of several sizes."""
    return isinstance(pixel_values, (list, tuple)) or any(value is not None for value in sizes.values())


def read_images(
    pixel_values: Tensor | Sequence[Tensor],
    num_channels: int,
    patch: tuple[int, int],
    pixel_attention_mask: Tensor | None = None,
    spatial_shapes: Tensor | None = None,
    pixel_mask: Tensor | None = None,
) -> tuple[list[Tensor], Packing]:
    """The images of a batch, (b, channels, height, width) for each grid, and how they lie in one sequence.

    Args:
        pixel_values: a list of images (channels, height, width), sides multiples of the patch; or, with
            `spatial_shapes`, patches (B, M, p * p * channels), the channels of a pixel side by side, as
            Siglip2ImageProcessor gives them; or, with `pixel_mask`, padded images (B, channels, height, width).
        num_channels, patch: of the model.
        pixel_attention_mask: (B, M), 1 for the first height * width patches of each image, 0 after them.
        spatial_shapes: int64 (B, 2), height and width of each image in patches.
        pixel_mask: (B, height, width), 1 where the image is, from the upper left corner on, as DETR's processor gives
            it. What is not there counts as 0; images are padded with it to whole patches.

    Raises:
        ValueError: if they do not fit together; the message names the image.
    """
    given = {"spatial_shapes": spatial_shapes, "pixel_mask": pixel_mask}
    if isinstance(pixel_values, (list, tuple)):
        given["pixel_attention_mask"] = pixel_attention_mask
        if extra := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{extra[0]} is for a tensor of pixel_values, not for a list of images")
        images = [checked_image(image, number, num_channels, patch) for number, image in enumerate(pixel_values)]
    elif not torch.is_tensor(pixel_values):
        raise ValueError(f"pixel_values of {type(pixel_values).__name__} must be a tensor or a list of images")
    elif pixel_mask is not None:
        if spatial_shapes is not None or pixel_attention_mask is not None:
            raise ValueError("pixel_mask (padded images) excludes spatial_shapes and pixel_attention_mask (patches)")
        images = _masked_images(pixel_values, pixel_mask, num_channels, patch)
    elif spatial_shapes is None:
        raise ValueError("pixel_attention_mask needs spatial_shapes, height and width of each image in patches")
    else:
        images = _images_of_patches(pixel_values, pixel_attention_mask, spatial_shapes, num_channels, patch)
    if not images:
        raise ValueError("pixel_values holds no image")
    packing = Packing.of([(image.shape[1] // patch[0], image.shape[2] // patch[1]) for image in images])
    groups, first = [], 0
    for count in packing.counts:
        groups.append(torch.stack([images[number] for number in packing.order[first : first + count]]))
        first += count
    return groups, packing


def checked_image(image: Any, number: int, num_channels: int, patch: tuple[int, int]) -> Tensor:
    """An image (channels, height, width) of whole patches; ValueError for another, with its number in the batch."""
    if not torch.is_tensor(image) or image.dim() != 3 or image.shape[0] != num_channels:
        shape = tuple(image.shape) if torch.is_tensor(image) else type(image).__name__
        raise ValueError(f"pixel_values[{number}] of shape {shape} must be ({num_channels}, height, width)")
    height, width = image.shape[1:]
    if height % patch[0] or width % patch[1] or not height or not width:
        raise ValueError(
            f"pixel_values[{number}] of {height}x{width} pixels must be a multiple of the {patch[0]}x{patch[1]} patch "
            "in both sides"
        )
    return image


def _masked_images(images: Tensor, mask: Tensor, num_channels: int, patch: tuple[int, int]) -> list[Tensor]:
    if images.dim() != 4 or images.shape[1] != num_channels or mask.shape != images[:, 0].shape:
        raise ValueError(
            f"pixel_mask of shape {tuple(mask.shape)} must be (batch, height, width) of pixel_values, which are "
            f"(batch, {num_channels}, height, width) and have the shape {tuple(images.shape)}"
        )
    mask = mask.bool()
    heights, widths = mask.any(2).sum(1).tolist(), mask.any(1).sum(1).tolist()
    padded = []
    for number, (height, width) in enumerate(zip(heights, widths, strict=True)):
        if not height or not bool(mask[number, :height, :width].all()):
            raise ValueError(f"pixel_mask[{number}] must be a whole rectangle from the upper left corner on")
        sides = [-(-side // size) * size for side, size in zip((height, width), patch, strict=True)]
        image = images[number, :, :height, :width]
        padded.append(F.pad(image, (0, sides[1] - width, 0, sides[0] - height)))
    return padded


def _images_of_patches(
    patches: Tensor, mask: Tensor | None, shapes: Tensor, num_channels: int, patch: tuple[int, int]
) -> list[Tensor]:
    numbers = num_channels * math.prod(patch)
    if patches.dim() != 3 or patches.shape[2] != numbers or shapes.shape != (len(patches), 2):
        raise ValueError(
            f"pixel_values of shape {tuple(patches.shape)} must be (batch, patches, {numbers}) and spatial_shapes of "
            f"shape {tuple(shapes.shape)} (batch, 2)"
        )
    if mask is not None and mask.shape != patches.shape[:2]:
        raise ValueError(f"pixel_attention_mask of shape {tuple(mask.shape)} must be {tuple(patches.shape[:2])}")
    images = []
    for number, (height, width) in enumerate(shapes.tolist()):
        count = height * width
        if height < 1 or width < 1 or count > patches.shape[1]:
            raise ValueError(
                f"spatial_shapes[{number}]={[height, width]} must be 1 or more, and at most {patches.shape[1]} patches"
            )
        image = patches[number, :count].reshape(height, width, *patch, num_channels)
        images.append(image.permute(4, 0, 2, 1, 3).reshape(num_channels, height * patch[0], width * patch[1]))
    if mask is not None:
        counts = shapes.prod(1, keepdim=True).to(mask.device)
        wrong = (mask.bool() != (torch.arange(mask.shape[1], device=mask.device) < counts)).any(1)
        if bool(wrong.any()):
            raise ValueError(
                f"pixel_attention_mask[{int(wrong.int().argmax())}] must be 1 for the patches of spatial_shapes and 0 "
                "after them"
            )
    return images


def as_patches(image: Tensor, patch: tuple[int, int]) -> Tensor:
    """The patches (N, p * p * channels) of an image (channels, height, width), as Siglip2ImageProcessor lays them."""
    channels, height, width = image.shape
    blocks = image.reshape(channels, height // patch[0], patch[0], width // patch[1], patch[1])
    return blocks.permute(1, 3, 2, 4, 0).reshape(-1, math.prod(patch) * channels)
