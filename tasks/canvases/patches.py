"""A model that starts from a saved one with another patch size, image size and prior.

The patch embedding is resized by the pseudo-inverse (FlexiViT; Beyer et al., CVPR 2023, section 3.4): of all kernels of
the new size, the one whose answers to enlarged patches differ least from those of the old kernel to the patches. Of
larger patches the answers are the same.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.models.pretrained import copy_weights, load_whole_model, may_start_anew

KERNEL = "embeddings.projection.weight"


def resize_matrix(old: int, new: int) -> Tensor:
    """B, float64 (new * new, old * old), which resizes a patch bilinearly."""
    pixels = torch.eye(old * old, dtype=torch.float64).view(old * old, 1, old, old)
    resized = F.interpolate(pixels, size=(new, new), mode="bilinear", align_corners=False, antialias=new < old)
    return resized.flatten(1).T


def resize_kernel(kernel: Tensor, new: int) -> Tensor:
    """A patch embedding (C, channels, old, old) for patches of `new` pixels a side: (B^T)^+ w, of each channel."""
    old = kernel.shape[-1]
    if old == new:
        return kernel.clone()
    inverse = torch.linalg.pinv(resize_matrix(old, new).T)
    resized = kernel.detach().double().cpu().flatten(2) @ inverse.T
    return resized.view(*kernel.shape[:2], new, new).to(kernel)


def changed_model(folder: str | os.PathLike, image_size: int, patch_size: int, prior: Any) -> Any:
    """A saved classifier with another image size, patch size and prior; the prior's weights are drawn.

    Positions are interpolated to the new grid, and the patch embedding is resized.

    Raises:
        OSError: for a missing or damaged folder.
        ValueError: for bad settings.
    """
    source = load_whole_model(folder, SparsePriorViTForImageClassification)
    fields = source.config.to_dict()
    changes = {"image_size": image_size, "patch_size": patch_size, "prior": prior}
    model = SparsePriorViTForImageClassification(SparsePriorViTConfig.from_dict({**fields, **changes}))
    copy_weights(source, model, may_start_anew=lambda name: name == KERNEL or may_start_anew(name))
    with torch.no_grad():
        kernel = model.get_parameter(f"{model.base_model_prefix}.{KERNEL}")
        kernel.copy_(resize_kernel(source.get_parameter(f"{source.base_model_prefix}.{KERNEL}"), patch_size))
    return model
