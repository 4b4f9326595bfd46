import itertools

import numpy as np
import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.base.families import preset_family
from hf_sparseprior.patterns.supports import build_mask
from tasks.analysis.paper_numbers import swin_pruning, unexplained_numbers
from tests.each import each
from tests.hf_sparseprior.analysis.test_flops_every_family import SWIN as SMALL
from tests.hf_sparseprior.analysis.torchs_flops import torchs_count

GRIDS = [(7, 9), (4, 5), (2, 3)]


# ---- models ---------------------------------------------------------------------------------------------------------


def test_the_papers_numbers():
    """Liu et al. 2021, Table 1a."""
    for preset, published in (("swin_tiny", 4.5), ("swin_small", 8.7), ("swin_base", 15.4)):
        config = sp.SparsePriorSwinConfig.from_preset(preset, num_labels=1000)
        assert round(model_flops(config).total / 1e9, 1) == published, preset


def test_what_depends_on_no_token_is_needed_once_for_all_images():
    config = sp.SparsePriorSwinConfig(prior={"extras": ["transformer_xl"]}, **SMALL)
    offsets = [5**2, 5**2, 3**2]
    shared = sum(
        2 * depth * own * width**2 for depth, own, width in zip([2, 1, 2], offsets, config.widths, strict=True)
    )
    assert torchs_count(config, 28, 36, batch=2) == 2 * model_flops(config, convention="torch").total - shared


def test_a_predictors_logits_are_those_of_dense_attention():
    config = sp.SparsePriorSwinConfig(prior={"predictor": {"name": "topk", "keys": 2}}, **SMALL)
    counted, dense = model_flops(config), model_flops(config, prior="dense")
    assert counted.part("qk", "chooser") == dense.part("qk")
    assert counted.attended_pairs == [2 * 2 * 81] * 2 + [2 * 4 * 36] + [2 * 2 * 8] * 2
    assert counted.part("projections", "mlp", "merging") == dense.part("projections", "mlp", "merging")


def test_parts_by_hand():
    plain = model_flops(sp.SparsePriorSwinConfig(prior="fibottention+violin", **SMALL))
    assert plain.part("projections") == 4 * (2 * 9 * 9 * 8**2 + 6 * 6 * 16**2 + 2 * 2 * 4 * 32**2)
    assert plain.part("mlp") == 8 * (2 * 63 * 8**2 + 20 * 16**2 + 2 * 6 * 32**2)
    assert plain.part("merging") == 8 * (20 * 8**2 + 6 * 16**2)
    assert plain.patch_embedding == 63 * 3 * 16 * 8 and plain.classifier == 32 * 5
    assert plain.grid == (7, 9) and plain.num_prefix_tokens == 0


def test_a_prior_that_is_given_goes_where_the_configs_would():
    config = sp.SparsePriorSwinConfig(**SMALL)
    own = sp.SparsePriorSwinConfig(prior="fibottention+violin", **SMALL)
    given = model_flops(config, prior="fibottention+violin")
    assert given.to_dict() == model_flops(own).to_dict() == model_flops(config, prior=own.prior).to_dict()
    assert config.prior_name == "dense" and given.attention < model_flops(config).attention
    assert given.layers[3:] == model_flops(config).layers[3:]


# ---- pruning ratio --------------------------------------------------------------------------------------------------


@each("prior", ["dense", "violin", "fibottention", ["window", "dense", "fibottention"]])
def test_the_pruning_ratio_equals_a_count_of_every_pair_of_every_window(prior):
    config = sp.SparsePriorSwinConfig(prior=prior, **SMALL)
    kept = total = 0
    for stage, (grid, depth, heads) in enumerate(zip(GRIDS, SMALL["depths"], SMALL["num_heads"], strict=True)):
        side = min(3, *grid)
        mask = build_mask(config.prior[stage]["support"], num_heads=heads, num_tokens=side**2, num_prefix_tokens=0)
        for _, _, _, pair in itertools.product(
            range(depth), range(0, grid[0], side), range(0, grid[1], side), mask.ravel().tolist()
        ):
            kept, total = kept + pair, total + 1
    assert config.pruning_ratio == pytest.approx(100 * (1 - kept / total), abs=1e-9)
    assert (config.pruning_ratio > 0) == (prior not in ("dense", "violin"))


def test_a_predictors_pruning_ratio_is_that_of_its_keys():
    config = sp.SparsePriorSwinConfig(prior={"predictor": {"name": "topk", "keys": 2}}, **SMALL)
    tokens = [9, 9, 4]
    pairs = [depth * windows * heads for depth, windows, heads in zip([2, 1, 2], [9, 4, 2], [2, 4, 2], strict=True)]
    kept = sum(count * 2 * own for count, own in zip(pairs, tokens, strict=True))
    total = sum(count * own**2 for count, own in zip(pairs, tokens, strict=True))
    assert config.pruning_ratio == pytest.approx(100 * (1 - kept / total))


# ---- the papers' numbers --------------------------------------------------------------------------------------------

# Fibottention Eq. 3 for 4 and 8 heads: rows of the Wythoff array, and windows of the heads by the largest.
WYTHOFF = [[1, 2, 3, 5, 8, 13, 21, 34], [4, 7, 11, 18, 29, 47], [6, 10, 16, 26, 42], [9, 15, 24, 39], [12, 20, 32],
           [14, 23, 37], [17, 28, 45], [19, 31]]  # fmt: skip
WINDOWS = {
    49: ([5, 19, 34, 49], [5, 11, 17, 23, 30, 36, 42, 49]),
    16: ([5, 8, 12, 16], [5, 6, 8, 9, 11, 12, 14, 16]),
    7: ([5, 5, 6, 7], [5, 5, 5, 5, 6, 6, 6, 7]),
}


@each("w_max", WINDOWS)
def test_fibottentions_pruning_of_swin_b_counted_pair_by_pair(w_max):
    distance = np.abs(np.arange(49)[:, None] - np.arange(49)[None])
    kept, heads_without = [], 0
    for windows in WINDOWS[w_max]:
        masks = [np.isin(distance, [o for o in own if o <= w]) for own, w in zip(WYTHOFF, windows, strict=False)]
        kept.append(sum(mask.sum() for mask in masks))
        heads_without += sum(not mask.any() for mask in masks)
    first, second = kept[0] / (4 * 49**2), kept[1] / (8 * 49**2)
    # 64 windows of 4 heads, 16 windows of 8 heads, two layers each.
    assert swin_pruning(w_max) == pytest.approx(100 * (1 - (2 * first + second) / 3))
    assert swin_pruning(w_max, each_layer=True) == pytest.approx(100 * (1 - (first + 2 * second) / 3))
    assert heads_without == {49: 0, 16: 4, 7: 7}[w_max]


def test_fibottentions_pruning_of_swin_b_is_among_what_was_not_explained():
    (number,) = (number for number in unexplained_numbers() if "Swin-B" in number.source)
    assert (number.printed, round(number.count, 2), round(swin_pruning(7), 2)) == (95.4, 92.97, 95.41)
    stages = sp.SparsePriorSwinConfig.from_preset("swin_base").stages
    pairs = [stage.num_layers * stage.num_windows * stage.num_heads for stage in stages]
    assert round(100 * sum(pairs[:2]) / sum(pairs), 1) == 38.7 and "38.7 %" in number.includes
    assert number.includes.endswith("its masks give 92.51 and modified 86.63")


@each(
    "preset, scalars",
    [("swin_tiny", 1242), ("deit_tiny", 324), ("deit_base", 1296), ("deit3_large", 3456), ("deit3_huge", 4608)],
)
def test_violins_scalars(preset, scalars):
    """For each layer and head one beta for each of 8 curves, and alpha (VIOLIN Table 1)."""
    family = preset_family(preset)
    with torch.device("meta"):
        model = family.base(family.make_config(preset, prior="violin"))
    counted = {name: value.numel() for name, value in model.named_parameters() if "decay_bias" in name.split(".")}
    assert sum(counted.values()) == scalars
    stages = model.config.stages
    assert scalars == sum(stage.num_layers * stage.num_heads * (8 + 1) for stage in stages)
