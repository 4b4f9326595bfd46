"""The comparisons of Sparsifiner's tables against what the paper prints."""

import pytest
import torch

from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.images.model import build_model
from hf_sparseprior.priors.prior import pruning_of
from hf_sparseprior.priors.sparsifiner import Sparsifiner
from tasks.analysis.paper_numbers import UP_SHARES, masked_pruning_flops, sparsifiner_mhsa
from tasks.classification.compare import load_comparison
from tests.configs import shipped
from tests.each import each

TABLES = shipped.path("experiments")

# MHSA in MFLOPs by table and row, as printed.
PRINTED = {
    1: {
        "deit_small": 357.7, "evit_0.7": 193.1, "dynamicvit_0.7": 193.1, "sparsif-evit_0.7": 113.3,
        "sparsifiner_0.7": 113.3, "evit_0.5": 149.1, "dynamicvit_0.5": 149.1, "sparsif-evit_0.5": 86.6,
        "sparsifiner_0.5": 86.6, "lvvit_small": 476.9, "evit-lv_0.7": 256.0, "evit-lv_0.5": 198.8,
        "dynamicvit-lv_0.7": 256.0, "dynamicvit-lv_0.5": 198.8, "sparsif-lv_0.5": 339.7, "sparsif-lv_0.25": 221.7,
        "sparsif-lv_0.1": 149.5,
    },
    2: {
        "1.0": 357.7, "0.9": 396.8, "0.8": 360.6, "0.7": 324.6, "0.6": 290.3, "0.5": 254.2, "0.4": 218.0, "0.3": 183.6,
        "0.2": 147.5, "0.1": 111.4, "0.05": 93.3, "0.01": 78.9,
    },
    3: {"1.0": 1534.1, "0.5": 851.0, "0.25": 452.9, "0.1": 240.5},
    4: {"linformer": 246.73, "sparsifiner": 224.04},
}  # fmt: skip
BOTH = "the share of A_down W_up in a model that also drops tokens is not printed, nor how its budget falls"
LVVIT = "no choice of three pruning blocks of 16 gives both printed numbers"
FOUR = "no keep rate gives both of Table 4's numbers; 0.4 is the nearest of Table 2, where it prints 218.0"
# Rows whose number does not come out of their configuration, and why.
DIFFERENT = {
    **{(1, f"{kind}_{rate}"): BOTH for kind in ("sparsif-evit", "sparsifiner") for rate in (0.7, 0.5)},
    **{(1, f"{kind}-lv_{rate}"): LVVIT for kind in ("evit", "dynamicvit") for rate in (0.7, 0.5)},
    (3, "0.5"): "the number is that of 288 keys, ceil(0.5 * 577) is 289",
    (3, "0.25"): "the number is that of 138 keys, ceil(0.25 * 577) is 145",
    (4, "linformer"): FOUR,
    (4, "sparsifiner"): FOUR,
}


def built(table, name, config):
    """The config of a row's model; one that starts from a checkpoint is built as the published model."""
    preset = {"preset": "lvvit_small" if name in ("lvvit_small",) or "-lv" in name else "deit_small"}
    if table == 3:
        preset = {"preset": "deit_tiny", "image_size": 384}
    model = {key: value for key, value in config["model"].items() if key != "pretrained"}
    with torch.device("meta"):
        return build_model({**preset, **model}, [str(number) for number in range(1000)]).config


def counted(config):
    """MHSA in MFLOPs by the paper's way of counting."""
    layers, heads, width = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    pruning, predictor = pruning_of(config.prior), config.prior["predictor"]
    tokens = config.grid[0] * config.grid[1]
    if pruning is not None:
        return masked_pruning_flops(pruning[0]["keep_rate"], layers) / 1e6
    if predictor is None:
        return model_flops(config).attention / 1e6
    share = UP_SHARES["LV-ViT-S" if layers == 16 else "DeiT-S" if tokens == 196 else "DeiT-T at 384 px"]
    budget = Sparsifiner.budget_of(predictor, tokens + 1)
    return sparsifiner_mhsa(layers, heads, width, tokens, budget, share) / 1e6


@pytest.fixture(scope="module")
def comparisons():
    return {
        table: load_comparison(shipped.path(f"experiments/sparsifiner_table{table}.yaml#full")) for table in PRINTED
    }


@each("table", PRINTED)
def test_the_rows_are_those_of_the_table(comparisons, table):
    ours = {1: ["sparsif_0.2", "sparsif_0.3"], 4: ["dense"]}.get(table, [])
    assert list(comparisons[table].configs) == [*PRINTED[table], *ours]


@each("table, name", [(table, name) for table, rows in PRINTED.items() for name in rows])
def test_full_size_rows_cost_what_is_printed(comparisons, table, name):
    count = counted(built(table, name, comparisons[table].configs[name]))
    assert (abs(count - PRINTED[table][name]) > 0.1) == ((table, name) in DIFFERENT), count


def test_what_table_3_prints_is_of_other_budgets():
    for budget, printed in ((288, 851.0), (138, 452.9)):
        count = sparsifiner_mhsa(12, 3, 192, 576, budget, UP_SHARES["DeiT-T at 384 px"]) / 1e6
        assert count == pytest.approx(printed, abs=0.1)


def test_the_mixers_of_table_4_have_as_many_tokens_as_sparsifiner_has_pairs(comparisons):
    configs = comparisons[4].configs
    predictor = built(4, "sparsifiner", configs["sparsifiner"]).prior["predictor"]
    assert Sparsifiner.budget_of(predictor, 197) == 79
    assert configs["linformer"]["model"]["prior"]["mixer"]["projected_tokens"] == 79


OURS = ("0.2-not-renormalised",)  # a row of Table 2's small form that the paper does not have


@each("table", PRINTED)
def test_reduced_comparisons_have_the_same_rows(comparisons, table):
    def kinds(comparison):
        """Priors and keep rates by row, in order."""
        configs = {name: config for name, config in comparison.configs.items() if name not in OURS}
        priors = [config["model"].get("prior") or "dense" for config in configs.values()]
        return [prior if isinstance(prior, str) else _rates(prior) for prior in priors]

    small = load_comparison(TABLES / f"sparsifiner_table{table}.yaml#small")
    assert set(OURS) <= set(small.configs) or table != 2
    assert small.seeds == list(range(5 if table in (2, 4) else 3))
    assert sorted(map(str, kinds(small))) == sorted(map(str, kinds(comparisons[table])))
    assert {config["data"]["source"] for config in (*small.first, *small.configs.values())} == {"cifar10"}


def _rates(prior):
    """The parts that there are, without the blocks of EViT, which drops tokens a block earlier in the small form."""
    parts = {part: settings for part, settings in prior.items() if settings}
    if "extras" in parts:
        parts["extras"] = [{key: value for key, value in extra.items() if key != "layers"} for extra in parts["extras"]]
    return parts


@each("rate", [0.7, 0.5])
def test_in_small_both_ways_of_dropping_tokens_attend_as_often(rate):
    small = load_comparison(TABLES / "sparsifiner_table1.yaml#small")
    attended = {}
    for name in ("evit", "dynamicvit"):
        given = small.configs[f"{name}_{rate}"]["model"]["prior"]["extras"][0]
        settings = {**EXTRAS[name].SETTINGS, **given}
        attended[name] = [patches for patches, _ in EXTRAS[name].layer_tokens(settings, 4, 196)]
    assert attended["evit"][0] == attended["dynamicvit"][0] == 196
    for ours, theirs in zip(*attended.values(), strict=True):
        assert abs(ours - theirs) <= 4
