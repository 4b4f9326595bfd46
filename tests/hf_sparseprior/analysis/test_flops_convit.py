import math

import numpy as np
import pytest

import hf_sparseprior as sp
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.patterns.sequences import wythoff_start
from hf_sparseprior.patterns.supports import build_mask
from tasks.analysis.paper_numbers import (
    FIGURE_3,
    patch_pruning,
    preset_flops,
    published_pruning,
    saving,
    unexplained_numbers,
)
from tests.each import each
from tests.hf_sparseprior.analysis.test_flops_every_family import CONVIT as SMALL
from tests.hf_sparseprior.analysis.torchs_flops import torchs_count


def test_logits_of_positions_are_needed_once_for_all_images():
    config = sp.SparsePriorConvitConfig(**SMALL)
    counted = model_flops(config, convention="torch")
    assert torchs_count(config, 28, 36, batch=3) == 3 * counted.total - 2 * counted.part("positions")


def test_parts_by_hand():
    config = sp.SparsePriorConvitConfig(prior="fibottention", **SMALL)
    plain, patches = model_flops(config), model_flops(config, num_prefix_tokens=0)
    assert plain.part("projections") == 4 * 8**2 * (2 * 63 + 3 * 64)
    assert plain.part("mlp") == 2 * 8 * 12 * (2 * 63 + 3 * 64)
    assert plain.part("positions") == 2 * 3 * 4 * 63**2
    assert plain.num_prefix_tokens == 1 and patches.total < plain.total


# ---- the papers' numbers --------------------------------------------------------------------------------------------


def test_figure_3_of_convit_b():
    """Its gated layers against torch's count: test_flops_every_family.py."""
    assert "convit_base" in FIGURE_3
    for size in (224, 512):
        counted, vit = (preset_flops(name, size, convention="torch").layers for name in ("convit_base", "vit_base"))
        assert counted[:10] == [counted[0]] * 10
        assert counted[10:] == vit[10:]  # the width of a head cancels in dense attention


def test_the_support_changes_convits_two_plain_layers_only():
    dense, sparse = preset_flops("convit_base"), preset_flops("convit_base", prior="fibottention")
    assert dense.layers[:10] == sparse.layers[:10] and dense.classifier == sparse.classifier == 768 * 1000
    mask = build_mask("fibottention", num_heads=16, num_tokens=196, num_prefix_tokens=1)
    assert [layer["qk"] for layer in sparse.layers[10:]] == [mask.sum() * 48] * 2
    # At most the two layers' part: 2 of 12, less for the linear layers.
    large = saving(preset_flops("convit_base", 1536, "fibottention"), preset_flops("convit_base", 1536))
    assert 0 < saving(sparse, dense) < large < 100 / 6


def pairs_by_hand(modified, w_max):
    """Nonzeros of Fibottention's masks of 16 heads over 196 patches (Eq. 3), from the Wythoff array."""
    golden, kept = (1 + 5**0.5) / 2, 0
    distance = np.abs(np.arange(196)[:, None] - np.arange(196)[None])
    for head in range(1, 17):
        below = int(head * golden)
        a, b = (head - 1, below) if modified else (int(below * golden), int(below * golden) + below)
        offsets = set()
        while a <= 196:
            offsets.add(a)
            a, b = b, a + b
        window = 5 + (w_max - 5) * (head - 1) // 15
        kept += np.isin(distance, [o for o in offsets if 1 <= o <= window]).sum()
    return kept


@each("modified, w_max", [(False, 65), (True, 65), (True, 64)])
def test_fibottentions_pruning_of_convit_b_counted_pair_by_pair(modified, w_max):
    kept = pairs_by_hand(modified, w_max)
    assert patch_pruning(16, 0, w_max, modified) == pytest.approx(100 * (1 - kept / (16 * 196**2)))
    with_prefix = kept + 16 * (2 * 196 + 1)
    assert patch_pruning(16, 1, w_max, modified) == pytest.approx(100 * (1 - with_prefix / (16 * 197**2)))


def test_fibottentions_pruning_of_convit_b_is_among_what_was_not_explained():
    (number,) = (number for number in unexplained_numbers() if "ConViT-B" in number.source)
    assert (number.printed, round(number.count, 2)) == (96.6, 96.4)
    assert all(text in number.includes for text in ("95.43 with", "98.21, 97.21", "96.59", "16.8 % of the pairs"))
    assert "give 98.21 and modified 96.37, with the class token 97.21 and modified 95.40, which" in number.includes


def masks_by_hand(heads, tokens, modified):
    """The published code's masks, (heads, N, N), with phi as a float as there."""
    masks, phi = np.zeros((heads, tokens, tokens), dtype=bool), (1 + math.sqrt(5)) / 2
    for i in range(1, heads + 1):
        a, b = math.floor(math.floor(i * phi) * phi), math.floor(math.floor(i * phi) * phi**2)
        if modified:
            a, b = 2 * a - b, b - a
        window = tokens // 3 if heads == 1 else 5 + int((tokens // 3 - 5) / (heads - 1) * (i - 1))
        row = [a, b]
        while row[-1] <= window:
            row.append(row[-1] + row[-2])
        apart = np.abs(np.arange(tokens)[:, None] - np.arange(tokens))
        masks[i - 1] = np.isin(apart, row[:-1])
    return masks


@each("modified", [False, True])
def test_masks_of_the_published_code_counted_pair_by_pair(modified):
    for stages in ([(128, 4, 49), (32, 8, 49)], [(3, 1, 196), (2, 1, 49)], [(1, 16, 196)]):
        masks = [(count, masks_by_hand(heads, tokens, modified)) for count, heads, tokens in stages]
        left = sum(count * mask.sum() for count, mask in masks) / sum(count * mask.size for count, mask in masks)
        assert published_pruning(stages, modified) == pytest.approx(100 * (1 - left))
    with_token = np.ones((16, 197, 197), dtype=bool)
    with_token[:, 1:, 1:] = masks_by_hand(16, 196, modified)
    assert published_pruning([(1, 16, 196)], modified, 1) == pytest.approx(100 * (1 - with_token.mean()))


def test_algorithm_1_with_the_diagonal_and_the_class_token_gives_what_is_printed_for_convit_b():
    """A coincidence as far as the paper says: first two terms whatever the window is, and two things it leaves out."""
    apart = np.abs(np.arange(196)[:, None] - np.arange(196))
    masks = np.ones((16, 197, 197), dtype=bool)
    for head in range(16):
        a, b = wythoff_start(head + 1)
        row = [0, a, b]
        while row[-2] + row[-1] <= 5 + 60 * head // 15:
            row.append(row[-2] + row[-1])
        masks[head, 1:, 1:] = np.isin(apart, row)
    assert f"{100 * (1 - masks.mean()):.2f}" == "96.62"
