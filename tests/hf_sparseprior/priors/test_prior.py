import copy
import json
from itertools import cycle

import numpy as np
import pytest

from hf_sparseprior.patterns.decay import DECAYS, resolve_decay
from hf_sparseprior.patterns.supports import SUPPORTS, LayerKey, build_mask, resolve_support
from hf_sparseprior.priors.prior import (
    EXTRAS,
    MIXERS,
    PREDICTORS,
    SLOTS,
    parse_prior,
    prior_name,
    prior_names,
    prior_pruning_ratio,
    resolve_prior,
)

GRID = (6, 7)
DENSE = {"support": "dense", "decay": None, "predictor": None, "mixer": "softmax", "extras": []}
# Every support without a decay and with one, and every decay with dense attention.
PAIRS = [*((name, None) for name in SUPPORTS), *zip(SUPPORTS, cycle(DECAYS))]
PAIRS += [("dense", decay) for decay in DECAYS if ("dense", decay) not in PAIRS]


def joined(support, decay):
    return support if decay is None else f"{support}+{decay}"


def full(support, decay):
    return {
        **DENSE,
        "support": resolve_support(support, 4, GRID[0] * GRID[1], GRID),
        "decay": resolve_decay(decay, GRID),
    }


@pytest.mark.parametrize(
    "slots", [None, {}, "dense", {"support": "dense"}, {"mixer": "softmax"}, "softmax", {"extras": None}]
)
def test_no_prior_is_dense_softmax_attention(slots):
    assert resolve_prior(slots, 4, GRID) == full("dense", None)


@pytest.mark.parametrize(("support", "decay"), PAIRS)
def test_names_fill_their_slots_and_the_short_name_leads_back(support, decay):
    prior = full(support, decay)
    assert resolve_prior(joined(support, decay), 4, GRID) == prior
    assert resolve_prior({"support": support, "decay": decay}, 4, GRID) == prior
    if decay is not None:
        assert resolve_prior(f"{decay} + {support}", 4, GRID) == prior
        assert resolve_prior(decay, 4, GRID) == full("dense", decay)
    assert prior_name(prior) == (joined(support, decay) if support != "dense" else decay or "dense")
    assert resolve_prior(prior_name(prior), 4, GRID) == prior


@pytest.mark.parametrize(("support", "decay"), PAIRS)
def test_a_resolved_prior_is_a_fixed_point_and_survives_json(support, decay):
    prior = resolve_prior(joined(support, decay), 4, GRID)
    assert tuple(prior) == SLOTS
    kept = copy.deepcopy(prior)
    assert resolve_prior(json.loads(json.dumps(prior)), 4, GRID) == prior
    assert resolve_prior(prior, 4, GRID) == prior == kept
    # The copy belongs to the caller: changing it changes no default.
    prior["support"]["shuffle_seed"] = 99
    prior["extras"].append("x")
    assert resolve_prior(joined(support, decay), 4, GRID) == kept


@pytest.mark.parametrize("name", [name for name in EXTRAS if name != "tome"])  # it needs dense attention
def test_extras_stand_beside_support_and_decay(name):
    prior = resolve_prior(f"{name}+fibottention+violin", 4, GRID)
    assert [extra["name"] for extra in prior["extras"]] == [name]
    assert {**prior, "extras": []} == full("fibottention", "violin")
    assert prior_name(prior) == f"fibottention+violin+{name}"
    kept = copy.deepcopy(prior)
    assert resolve_prior(json.loads(json.dumps(prior)), 4, GRID) == resolve_prior(prior_name(prior), 4, GRID) == kept
    # A table belongs to the grid that it was made for.
    assert resolve_prior(prior, 4, (9, 9))["extras"] == kept["extras"]


def test_settings_are_kept():
    given = {"support": {"name": "fibottention", "w_max": 9}, "decay": {"name": "violin", "init": "moving"}}
    prior = resolve_prior(given, 4, GRID)
    assert prior["support"] == {
        **{"name": "fibottention", "w_min": 5, "w_max": 9, "modified": False, "sequence": {"name": "wythoff"}},
        **{"shuffle_seed": 0, "mask_fill": "neg_inf"},
    }
    assert prior["decay"]["init"] == "moving"


def test_a_given_prior_is_not_changed():
    given = {"support": {"name": "fibottention", "w_max": 9}, "decay": {"name": "violin"}, "extras": []}
    kept = copy.deepcopy(given)
    resolve_prior(given, 4, GRID)
    parse_prior(given)
    assert given == kept


def test_no_predictor_can_be_named():
    assert resolve_prior({"predictor": "none"}, 4, GRID) == resolve_prior(None, 4, GRID)


def test_numpy_numbers_become_those_that_json_can_write():
    init = {"alpha_mean": np.float32(1), "alpha_std": 0, "beta_low": np.int64(5), "beta_high": np.float64(9)}
    for given, plain in (
        ({"predictor": {"name": "topk", "pruning_ratio": np.float32(50)}}, {"name": "topk", "pruning_ratio": 50.0}),
        ({"support": {"name": "fibottention", "w_max": np.int64(9)}}, {"name": "fibottention", "w_max": 9}),
        (
            {"decay": {"name": "violin", "init": init}},
            {"name": "violin", "init": {name: float(number) for name, number in init.items()}},
        ),
    ):
        prior = resolve_prior(given, 4, GRID)
        assert json.loads(json.dumps(prior)) == prior == resolve_prior(dict.fromkeys(given, plain), 4, GRID)


def test_every_name_is_accepted_on_its_own():
    assert prior_names() == [*SUPPORTS, *DECAYS, *PREDICTORS, *MIXERS, *EXTRAS]
    assert len(set(prior_names())) == len(prior_names())
    for name in prior_names():
        resolve_prior(name, 4, GRID)


@pytest.mark.parametrize(("support", "decay"), zip(SUPPORTS, cycle([None, *DECAYS])))
def test_the_pruning_ratio_counts_what_the_mask_leaves_out(support, decay):
    prior = resolve_prior(joined(support, decay), 4, GRID)
    for prefix in range(3):
        mask = build_mask(support, num_heads=4, num_tokens=42, num_prefix_tokens=prefix, grid=GRID)
        expected = pytest.approx(100 * (1 - mask.mean()), abs=1e-9)
        assert prior_pruning_ratio(prior, LayerKey(4, GRID), prefix, 8) == expected


def test_the_pruning_ratio_of_the_paper():
    prior = resolve_prior({"support": {"name": "fibottention", "w_max": 65}}, 12, (14, 14))
    assert f"{prior_pruning_ratio(prior, LayerKey(12, (14, 14)), 0, 64):.2f}" == "98.01"  # Fibottention Table 2
    assert prior_pruning_ratio(resolve_prior(None, 12, (14, 14)), LayerKey(12, (14, 14)), 1, 64) == 0


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ("fibotention", r"'fibotention'.*mean 'fibottention'.*dense, fibottention, .*violin"),
        ("fibottention+violn", r"prior='fibottention\+violn'.*'violn'.*mean 'violin'.*dense, fibottention"),
        ("", r"prior=''.*dense, fibottention, .*violin"),
        ("fibottention+", r"prior='fibottention\+'.*dense, fibottention, .*violin"),
        ("fibottention+dense", r"prior='fibottention\+dense' fills the support twice, with 'fibottention' and 'dense'"),
        ("violin+manhattan", r"prior='violin\+manhattan' fills the decay twice, with 'violin' and 'manhattan'"),
        (5, r"prior=5 must be a name, names joined by \+, or a dict of support, decay, predictor, mixer, extras"),
        (["dense"], r"prior=\['dense'\] must be a name, names joined by \+, or a dict of support, decay"),
        ({"suport": "dense"}, r"prior has no setting 'suport'.*mean 'support'.*support, decay, predictor, mixer"),
        ({"name": "dense"}, r"prior has no setting 'name'.*support, decay, predictor, mixer"),
        ({"support": "violin"}, r"prior: support='violin' must be one of dense, fibottention.*6x7 grid"),
        ({"support": {"name": "fibottention", "w_min": -1}}, r"prior: w_min=-1 must be .*42 patch tokens.*6x7 grid"),
        ({"support": {"name": "fibottention", "w_mx": 1}}, r"prior: .*'w_mx'.*mean 'w_max'.*6x7 grid"),
        ({"decay": "fibottention"}, r"prior: decay='fibottention' must be one of none, violin"),
        ({"decay": {"name": "violin", "curves": ["x"]}}, r"prior: curves: 'x' must be one of z, z_t"),
        ({"predictor": "sparsifier"}, r"prior: predictor='sparsifier' must be one of topk"),
        ({"predictor": {}}, r"prior: predictor needs a 'name', one of topk, sparsifiner, .*; got \{\}"),
        ({"predictor": {"name": "topk", "keys": 0}}, r"prior: topk: keys=0 must be an integer of 1 or more"),
        ({"predictor": {"name": "topk", "keys": 2, "pruning_ratio": 9}}, r"keys=2 and .*ratio=9 cannot both be given"),
        ({"predictor": {"name": "topk", "pruning_ratio": 101}}, r"topk: pruning_ratio=101 must be a percentage from 0"),
        ("fibottention+topk", r"'topk' chooses among all keys; with it support='fibottention' must be 'dense'"),
        ({"mixer": "linformr"}, r"prior: mixer='linformr' must be one of softmax, .*did you mean 'linformer'"),
        ({"mixer": {"name": "softmax", "x": 1}}, r"prior: mixer 'softmax' has no setting 'x'"),
        ({"mixer": {"name": "linformer", "projected_tokens": 0}}, r"linformer: projected_tokens=0 must be an integer"),
        ({"mixer": {"name": "linformer", "grid": 4}}, r"linformer: grid=4 must be \(height, width\)"),
        ({"mixer": {"name": "efficient", "key_width": 2.5}}, r"efficient: key_width=2.5 must be an integer"),
        ("fibottention+linformer", r"mixer 'linformer' has no softmax over pairs for support 'fibottention'"),
        ("violin+efficient", r"mixer 'efficient' has no softmax over pairs for decay 'violin'"),
        ("topk+efficient", r"mixer 'efficient' has no softmax over pairs for predictor 'topk'"),
        ("irpe_k+efficient", r"mixer 'efficient' has no softmax over pairs for extras 'irpe_k'"),
        ({"support": {"name": "random", "pruning_ratio": "98"}}, r"pruning_ratio='98' must be a percentage"),
        ({"support": {"name": "longformer", "w": 3}}, r"w=3 must be even, it counts both sides"),
        ({"support": {"name": "longformer", "w": 2, "pruning_ratio": 9}}, r"w=2 and pruning_ratio=9 cannot both be"),
        ({"support": {"name": "bigbird", "random_keys": -1}}, r"random_keys=-1 must be a number of 0 or more"),
        ({"support": {"name": "strided", "stride": 0}}, r"stride=0 must be an integer of 1 or more"),
        ({"extras": ["irpe"]}, r"prior: extras='irpe' must be one of .*swin_rpb, .*did you mean 'irpe_k'"),
        ({"extras": "irpe_k"}, r"prior: extras='irpe_k' must be a list of .*swin_rpb"),
        ({"extras": 5}, r"prior: extras=5 must be a list of .*swin_rpb"),
        ("irpe_k+irpe_k", r"prior: extras=\['irpe_k', 'irpe_k'\] must not repeat a name"),
        ({"extras": [{"name": "irpe_k", "method": "cross"}]}, r"irpe_k: method='cross' must be one of product, eucl"),
        ({"extras": [{"name": "irpe_k", "ratio": 0}]}, r"irpe_k: ratio=0 must be a number between 0.5 and 100"),
        ({"extras": [{"name": "irpe_k", "ratios": 1}]}, r"extra 'irpe_k' has no setting 'ratios'.*mean 'ratio'"),
        ({"extras": [{"name": "swin_rpb", "grid": 7}]}, r"swin_rpb: grid=7 must be \(height, width\)"),
        ({"extras": [{"name": "swin_rpb", "learn_prefix": 1}]}, r"swin_rpb: learn_prefix=1 must be True or False"),
        ({"extras": [{"name": "localvit", "kernel_size": 4}]}, r"localvit: kernel_size=4 must be odd"),
        ({"extras": [{"name": "localvit", "squeeze_excitation": -1}]}, r"squeeze_excitation=-1 must be an integer"),
        ({"support": 5}, r"prior: support=5 must be one of dense, fibottention"),
        ({"support": ["fibottention"]}, r"prior: support=\['fibottention'\] must be one of dense, fibottention"),
        ({"decay": 5}, r"prior: decay=5 must be .*violin"),
    ],
)
def test_wrong_priors_are_refused(prior, message):
    with pytest.raises(ValueError, match=message):
        resolve_prior(prior, 4, GRID)


def test_no_decay_has_three_spellings_and_no_settings():
    for decay in (None, "none", {"name": "none"}):
        assert resolve_prior({"decay": decay}, 4, (4, 4))["decay"] is None
    with pytest.raises(ValueError, match="decay 'none' has no setting 'init'"):
        resolve_prior({"decay": {"name": "none", "init": "moving"}}, 4, (4, 4))
