"""Calls of an attention layer and its parts as tests write them."""

from hf_sparseprior.attention.request import AttentionRequest


def attend(layer, q, k, v, grid, num_prefix_tokens=0, *, backend="auto", **fields):
    """Output and weights of a layer's attention; `fields` are those of `AttentionRequest`."""
    return layer.attend(AttentionRequest(q, k, v, layer.plan(grid, num_prefix_tokens), **fields), backend)


def make_request(q, k, scale, plan, token_ids=None):
    """The request for a predictor or relative positions, which do not use the values."""
    return AttentionRequest(q, k, k, plan, scale=scale, token_ids=token_ids)
