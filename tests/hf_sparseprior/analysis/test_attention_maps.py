import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.analysis.attention_maps import (
    attention_distance,
    attention_entropy,
    class_token_map,
    mean_query_map,
    query_map,
    rollouts,
)
from hf_sparseprior.analysis.boxes import inside_attention, patch_coverage
from hf_sparseprior.analysis.layers import attention_weights, connectivity, find_attention
from hf_sparseprior.patterns.supports import build_mask
from tests.hf_sparseprior.adapters.stock_models import STOCK

GRID, PREFIX = (3, 5), 2
TOTAL = PREFIX + 15


@pytest.fixture
def weights():
    """(B, H, T, T), rows of sum 1, some pairs without weight."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, TOTAL, TOTAL, generator=generator, dtype=torch.float64)
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -math.inf
    logits.diagonal(dim1=-2, dim2=-1).zero_()
    return torch.softmax(logits, -1)


# ---- maps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", ["(B, H, T, T)", "(H, T, T)"])
def test_maps_are_the_rows_of_the_weights_and_of_any_connectivity(weights, leading):
    pairs = weights if leading == "(B, H, T, T)" else weights[1]
    seen = pairs > 0
    for row, column in np.ndindex(GRID):
        query = query_map(pairs, (row, column), GRID, PREFIX)
        keys = query_map(seen, (row, column), GRID, PREFIX)
        assert query.shape == keys.shape == (*pairs.shape[:-2], *GRID) and keys.dtype == torch.bool
        for key_row, key_column in np.ndindex(GRID):
            pair = (PREFIX + row * 5 + column, PREFIX + key_row * 5 + key_column)
            assert torch.equal(query[..., key_row, key_column], pairs[..., pair[0], pair[1]])
            assert torch.equal(keys[..., key_row, key_column], seen[..., pair[0], pair[1]])
    token, mean = class_token_map(pairs, GRID, PREFIX), mean_query_map(pairs, GRID, PREFIX)
    for key_row, key_column in np.ndindex(GRID):
        column = pairs[..., PREFIX + key_row * 5 + key_column]
        assert torch.equal(token[..., key_row, key_column], column[..., 0])
        torch.testing.assert_close(mean[..., key_row, key_column], column[..., PREFIX:].sum(-1) / 15)


def test_bad_maps_are_named(weights):
    with pytest.raises(ValueError, match=r"query=\(3, 0\) must be \(row, column\) of a patch of the 3x5 grid"):
        query_map(weights, (3, 0), GRID, PREFIX)
    with pytest.raises(ValueError, match=r"\(2, 3, 17, 17\) must be \(..., 16, 16\) for 1 prefix"):
        mean_query_map(weights, GRID, 1)
    with pytest.raises(ValueError, match="no class token"):
        class_token_map(weights[..., 2:, 2:], GRID, 0)


def test_rollout_is_the_product_of_half_attention_and_half_identity(weights):
    attentions = [weights, weights.flip(-1).contiguous(), 3 * weights]  # the last one's rows do not sum to 1
    for image in range(2):
        expected = np.eye(TOTAL)
        for layer, rolled in zip(attentions, rollouts(iter(attentions)), strict=True):
            mean = layer[image].numpy().mean(0)
            mean = mean / mean.sum(-1, keepdims=True)
            expected = (0.5 * mean + 0.5 * np.eye(TOTAL)) @ expected
            np.testing.assert_allclose(rolled[image], expected, rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose(rolled[image].sum(-1), 1)


def test_entropy():
    uniform, alone = torch.full((1, 1, 8, 8), 1 / 8), torch.eye(8).view(1, 1, 8, 8)
    both = attention_entropy(torch.cat([uniform, 5 * uniform, alone], 1))
    torch.testing.assert_close(both, torch.tensor([[math.log(8), math.log(8), 0.0]]))


def test_distance_is_the_mean_over_pairs_one_by_one(weights):
    weights[0, 0, PREFIX + 4, PREFIX:] = 0  # sees the prefix alone
    found = attention_distance(weights, GRID, PREFIX)
    for image, head in np.ndindex(2, 3):
        means = []
        for query in range(15):
            own = weights[image, head, PREFIX + query, PREFIX:].numpy()
            away = [math.hypot(query // 5 - key // 5, query % 5 - key % 5) for key in range(15)]
            if own.sum():
                means.append((own * away).sum() / own.sum())
        assert found[image, head].item() == pytest.approx(np.mean(means), rel=1e-12)


# ---- connectivity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", ["neg_inf", "zero"])
@pytest.mark.parametrize("stock", [False, True])
def test_connectivity_of_a_support_is_its_mask(stock, fill):
    prior = {"support": {"name": "fibottention", "w_min": 2, "mask_fill": fill}}
    if stock:
        model = sp.apply_prior(STOCK["vit"].build(), prior)
    else:
        config = sp.SparsePriorViTConfig(
            image_size=32, patch_size=4, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, prior=prior
        )
        model = sp.SparsePriorViTModel(config).eval()
    attention, pixels = find_attention(model), torch.randn(2, 3, 32, 32)
    for number, (layer, weights) in enumerate(zip(attention.layers, attention_weights(model, pixels), strict=True)):
        mask = build_mask(prior["support"], num_heads=4, num_tokens=64, num_prefix_tokens=1, layer=number)
        seen = connectivity(layer, weights, attention)
        assert seen.shape == weights.shape and seen.dtype == torch.bool
        assert np.array_equal(seen[0], mask) and np.array_equal(seen[1], mask)
        # Without the fill of 0 the weights say the same.
        assert torch.equal(weights != 0, seen) == (fill == "neg_inf")


def test_connectivity_of_other_layers_are_the_pairs_with_weight(weights):
    """As a mechanism that chooses the keys of each image shows itself."""
    attention = find_attention(STOCK["vit"].build())
    layer = replace(attention.layers[0], prior=None)
    assert torch.equal(connectivity(layer, weights, attention), weights > 0)


# ---- boxes ----------------------------------------------------------------------------------------------------------


def test_attention_inside_a_box_by_hand():
    weights = torch.zeros(2, 5, 5)  # a prefix token and a 2x2 grid
    weights[0, 1:, 1:] = torch.tensor([[1.0, 2, 9, 3], [4, 5, 9, 6], [9, 9, 9, 9], [7, 8, 9, 10]])
    weights[1, 1:, 1:] = 2
    inside = torch.tensor([[True, True], [False, True]])
    found = inside_attention(weights, inside, 1)
    # Head 1 has 1 2 3 / 4 5 6 / 7 8 10 among the three patches: mean 46 / 9, mean square 304 / 9. Head 2 has 2.
    assert found.mean == pytest.approx((46 / 9 + 2) / 2)
    variance = 304 / 9 - (46 / 9) ** 2
    assert found.head_variance == pytest.approx(variance / 2)
    assert found.variance == pytest.approx(variance / 4)  # of the mean of a head and a constant
    # The patches receive 12, 15 and 19 of head 1 and 6 of head 2.
    received = [(12 + 6) / 6, (15 + 6) / 6, (19 + 6) / 6]
    assert found.patch_variance == pytest.approx(np.var(received))


def test_attention_inside_a_box_equals_numpy(weights):
    inside = torch.zeros(GRID, dtype=torch.bool)
    inside[1:, 2:4] = True
    patches = [PREFIX + 5 + 2, PREFIX + 5 + 3, PREFIX + 10 + 2, PREFIX + 10 + 3]
    for image in weights:
        pairs = np.array([[[head[j, k] for k in patches] for j in patches] for head in image.numpy()])
        found = inside_attention(image, inside, PREFIX)
        assert found.mean == pytest.approx(pairs.mean())
        assert found.variance == pytest.approx(np.var(pairs.mean(0)))
        assert found.head_variance == pytest.approx(np.mean([np.var(head) for head in pairs]))
        assert found.patch_variance == pytest.approx(np.var([pairs[:, :, key].mean() for key in range(4)]))


def test_uniform_attention_does_not_vary():
    found = inside_attention(torch.full((3, 5, 5), 0.2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.bool), 1)
    assert found == pytest.approx((0.2, 0.0, 0.0, 0.0))


def test_a_single_patch_has_no_variance():
    with pytest.raises(ValueError, match="a box of 1 patches must hold two or more"):
        inside_attention(torch.zeros(1, 5, 5), torch.tensor([False, True, False, False]), 1)


def test_coverage_counts_pixels():
    mask = torch.zeros(6, 12)
    mask[1:5, 3:9] = 1
    expected = [[mask[r : r + 3, c : c + 4].sum().item() / 12 for c in (0, 4, 8)] for r in (0, 3)]
    assert patch_coverage(mask, (2, 3)).tolist() == expected
    with pytest.raises(ValueError, match="a mask of 6x12 pixels must be a multiple of the"):
        patch_coverage(mask, (4, 4))
