"""A model with token merging (prior `tome`) written out: one image, one edge and one pair of tokens after another.

It is what the merged contenders of `rivals` are compared with. Shape letters as in the library's `token_merging`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparseprior.models.modeling_sparseprior_vit import SparsePriorViTModelOutput

ROWS = 256  # query rows of which all weights are there at a time


class PlainMerging(nn.Module):
    """The bare transformer of our ViT whose prior is `tome`, written out.

    Args:
        model: the model, whose weights are shared.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        height, width = model.config.grid
        (settings,) = model.config.prior["extras"]
        total = height * width - max(1, round(settings["keep"] * height * width))
        ends = [total * (layer + 1) // len(model.layers) for layer in range(len(model.layers))]
        self.counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def forward(self, pixel_values: Tensor) -> SparsePriorViTModelOutput:
        """Images (B, channels, height, width) as tokens (B, tokens left, C) after the last norm, prefix first."""
        tokens, grid = self.model.embeddings(pixel_values)
        sizes = torch.ones(tokens.shape[:2], dtype=tokens.dtype, device=tokens.device)
        for layer, count in zip(self.model.layers, self.counts, strict=True):
            tokens, sizes = self.layer(layer, tokens, sizes, grid, count)
        last = self.model.layernorm(tokens)
        patches = slice(self.model.config.num_prefix_tokens, None)
        mean = (last * sizes.unsqueeze(-1))[:, patches].sum(1) / sizes[:, patches].sum(1, keepdim=True)
        pooled = {"class_token": last[:, 0], "mean": mean, "class_token_and_mean": torch.cat([last[:, 0], mean], 1)}
        return SparsePriorViTModelOutput(last_hidden_state=last, pooler_output=pooled[self.model.config.pooling])

    def layer(self, layer: Any, tokens: Tensor, sizes: Tensor, grid: Any, count: int) -> tuple[Tensor, Tensor]:
        """One block: attention, merging, MLP."""
        prefix = self.model.config.num_prefix_tokens
        attention = layer.attention
        normed = layer.layernorm_before(tokens)
        q, k, v = (
            projection(normed).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        out = attention.o_proj(written_out(q, k, v, sizes).transpose(1, 2).flatten(2))
        tokens = tokens + layer.layerscale_attention(out)
        if count:
            tokens, sizes = merge_by_pairs(tokens, sizes, k.mean(1), count, prefix)
        out = layer.mlp(layer.layernorm_after(tokens), grid, prefix)
        return tokens + layer.layerscale_mlp(out), sizes


def written_out(q: Tensor, k: Tensor, v: Tensor, sizes: Tensor) -> Tensor:
    """Proportional attention (Bolya et al. 2023, Eq. 1): exp(q k^T / sqrt(D)) times s, over its sum, times v.

    Args:
        q, k, v: (B, H, T, D). sizes: (B, T), s.
    """
    parts = []
    for start in range(0, q.shape[2], ROWS):
        logits = q[:, :, start : start + ROWS] @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = (logits - logits.amax(-1, keepdim=True)).exp() * sizes[:, None, None, :]
        parts.append(weights @ v / weights.sum(-1, keepdim=True))
    return torch.cat(parts, 2)


def merge_by_pairs(tokens: Tensor, sizes: Tensor, metric: Tensor, count: int, prefix: int) -> tuple[Tensor, Tensor]:
    """As `bipartite_soft_matching` and `merge` of the library, image after image and edge after edge.

    Args:
        tokens: (B, T, C). sizes: (B, T). metric: (B, T, D). count: r. prefix: P.
    """
    images = []
    for image, size, key in zip(tokens, sizes, metric.detach(), strict=True):
        unit = key / key.norm(dim=-1, keepdim=True)
        first = range(prefix, len(image), 2)
        scores = unit[list(first)] @ unit[prefix + 1 :: 2].T
        best = scores.argmax(1)
        edges = sorted(((-float(scores[a, b]), a, int(b)) for a, b in enumerate(best)))[:count]
        groups: dict[int, list[int]] = {place: [place] for place in range(len(image))}
        for _, a, b in edges:
            groups[prefix + 2 * b + 1] += groups.pop(first[a])
        new = [torch.stack([size[place] * image[place] for place in group]).sum(0) for group in groups.values()]
        news = torch.stack([size[group].sum() for group in groups.values()])
        images.append((torch.stack(new) / news.unsqueeze(-1), news))
    return torch.stack([image for image, _ in images]), torch.stack([size for _, size in images])
