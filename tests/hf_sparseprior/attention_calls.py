"""Calls of an attention layer as tests write them."""

from hf_sparseprior.attention_request import AttentionRequest


def attend(layer, q, k, v, grid, num_prefix_tokens=0, *, backend="auto", **fields):
    """Output and weights of a layer's attention; `fields` are those of `AttentionRequest`."""
    return layer.attend(AttentionRequest(q, k, v, layer.current_plan(grid, num_prefix_tokens), **fields), backend)
