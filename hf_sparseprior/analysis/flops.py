"""Multiply-adds of attention, in closed form.

The papers count a multiply-add as one FLOP and both products, Q K^T and (softmax) V: dense attention costs
2 L T^2 d, a support 2 L nnz d_h. With the class token in T, ViT-B at 224 px gives 0.72 GFLOPs (Fibottention Table 2);
the 0.014 GFLOPs beside it count patch tokens only, 0.0214 with the class token.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_sparseprior.supports import count_nonzeros


def attention_flops(
    offsets: Sequence[Sequence[int]], num_tokens: int, num_prefix_tokens: int, head_dim: int, num_layers: int = 1
) -> int:
    """Multiply-adds of Q K^T and (softmax) V over a support.

    Args:
        offsets: of each head, as `supports.head_offsets` returns them.
        num_tokens: patch tokens N.
        num_prefix_tokens: P; 0 counts the patch tokens only.
        head_dim: d_h.
        num_layers: L; every layer has the same supports, in another order of heads.
    """
    nonzeros = sum(count_nonzeros(own, num_tokens, num_prefix_tokens) for own in offsets)
    return 2 * num_layers * nonzeros * head_dim


def dense_attention_flops(num_heads: int, total: int, head_dim: int, num_layers: int = 1) -> int:
    """Multiply-adds of dense attention over `total` tokens, prefix included."""
    return 2 * num_layers * num_heads * total**2 * head_dim
