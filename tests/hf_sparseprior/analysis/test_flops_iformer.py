import numpy as np
import pytest

import hf_sparseprior as sp
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.models.configuration_sparseprior_iformer import PRESETS
from tasks.analysis.paper_numbers import iformer_pruning, unexplained_numbers
from tests.each import each
from tests.hf_sparseprior.analysis.test_flops_every_family import IFORMER as SMALL

LAYERS = [((4, 5), 8, 4)] * 2 + [((2, 3), 16, 4)]  # grid, width and that of keys


# ---- models ---------------------------------------------------------------------------------------------------------


def test_a_predictors_logits_are_those_of_dense_attention():
    config = sp.SparsePriorIformerConfig(prior={"predictor": {"name": "topk", "keys": 2}}, **SMALL)
    counted, dense = model_flops(config), model_flops(config, prior="dense")
    assert counted.part("qk", "chooser") == dense.part("qk")
    assert counted.attended_pairs == [40, 40, 12]
    assert counted.part("av") == 80 * 8 + 12 * 16


def test_parts_by_hand():
    plain = model_flops(sp.SparsePriorIformerConfig(prior="fibottention+violin", **SMALL))
    assert plain.part("projections") == sum(h * w * c * (2 * k + 3 * c) for (h, w), c, k in LAYERS)
    assert plain.part("mlp") == sum(h * w * 4 * c**2 for (h, w), c, _ in LAYERS)
    assert plain.part("qk") == sum(n * k for n, (_, _, k) in zip(plain.attended_pairs, LAYERS, strict=True))
    assert plain.part("av") == sum(n * c for n, (_, c, _) in zip(plain.attended_pairs, LAYERS, strict=True))
    assert plain.grid == (16, 20)


# ---- the paper's number ---------------------------------------------------------------------------------------------


@each("preset, layers, w_max", [("iformer_small", (3, 2), 8), ("iformer_medium", (4, 2), 65)])
def test_fibottentions_pruning_of_iformer_counted_pair_by_pair(preset, layers, w_max):
    kept = total = 0
    for depth, side in zip(layers, (14, 7), strict=True):
        distance = np.abs(np.arange(side**2)[:, None] - np.arange(side**2)[None])
        seen = np.isin(distance, [offset for offset in (1, 2, 3, 5, 8, 13, 21, 34, 55) if offset <= w_max])
        kept, total = kept + depth * seen.sum(), total + depth * seen.size
    assert iformer_pruning(preset, w_max) == pytest.approx(100 * (1 - kept / total))


def test_fibottentions_pruning_of_iformer_is_among_what_was_not_explained():
    (number,) = (number for number in unexplained_numbers() if "iFormer" in number.source)
    assert (number.printed, round(number.count, 2)) == (94.4, 91.02)
    assert round(iformer_pruning("iformer_small", 8), 2) == round(iformer_pruning("iformer_small", 12), 2) == 94.44
    assert number.includes.endswith("its masks give 91.02 and modified 90.45")
    # No other size and window rounds to what is printed.
    found = {
        (preset, w_max)
        for preset in PRESETS
        for w_max in range(1, 197)
        if round(iformer_pruning(preset, w_max), 1) == number.printed
    }
    assert found == {(preset, w_max) for preset in ("iformer_tiny", "iformer_small") for w_max in range(8, 13)}
