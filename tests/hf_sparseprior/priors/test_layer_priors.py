"""Priors that differ between the layers of a model, in every family and on every stock model.

The oracle are models that have one prior in all layers: a layer with the same weights, number and input computes the
same, to the bit.
"""

import copy
import json
from functools import partial

import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.adapters.stock_attention import PRIOR_MODULE, applied_prior, stock_priors
from hf_sparseprior.adapters.stock_encoder import find_encoder
from hf_sparseprior.analysis import predicted_cost
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.analysis.layers import attention_layers
from hf_sparseprior.analysis.predicted_cost import predicted_costs, twins
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.base.numbered import in_words, keyed, numbered
from hf_sparseprior.base.resolved import each_prior
from hf_sparseprior.models.pretrained import load_changed_model
from hf_sparseprior.patterns.supports import build_mask
from hf_sparseprior.priors.layer_priors import given_priors
from tests.each import each
from tests.hf_sparseprior.adapters.stock_models import STOCK, move_decays, output
from tests.hf_sparseprior.small import noise, scatter, small

# Of each family sizes with at least four layers that take a prior; ConViT has a gated one before them.
DEEP = {
    "sparseprior_vit": {"num_hidden_layers": 4, "image_size": 16},
    "sparseprior_timesformer": {"num_hidden_layers": 4, "image_size": 16, "num_frames": 2},
    "sparseprior_swin": {"depths": [2, 2]},
    "sparseprior_convit": {"num_hidden_layers": 5, "num_local_layers": 1, "image_size": 16},
    "sparseprior_iformer": {"attention_depths": [2, 2]},
}
KINDS = ["fibottention+violin", "dense", "violin", {"support": {"name": "window", "w": 1}, "extras": ["localvit"]}]
MIXED = {"layers": {"0": KINDS[0], "1-1": KINDS[1], 2: KINDS[2], "3": KINDS[3]}}
GROUPS = {"heads": {"0": {"support": {"name": "window", "w": 1}}, "1": "neighborhood"}}


def deep(family, prior, **options):
    return small(family, **{**DEEP[family], "prior": prior, **options})


def inputs(config):
    clip = (config.num_frames,) if FAMILIES[config.model_type].takes == "clips" else ()
    return noise(2, *clip, 3, config.image_size, config.image_size, dtype=torch.float64)


def seen(modules, run, given=None):
    """Arguments and result of each module in a forward pass; `given`: arguments that they get in place of theirs."""
    calls, handles = {}, []

    def before(number):
        return lambda module, args, kwargs: given[number][:2] if given else None

    def after(number):
        return lambda module, args, kwargs, result: calls.update({number: (args, kwargs, result)})

    for number, module in enumerate(modules):
        handles.append(module.register_forward_pre_hook(before(number), with_kwargs=True))
        handles.append(module.register_forward_hook(after(number), with_kwargs=True))
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return calls


def first(result):
    return result[0] if isinstance(result, tuple) else result


@each("family", DEEP)
def test_a_layer_computes_what_it_does_in_a_model_of_its_prior(family):
    config = deep(family, MIXED)
    model = scatter(FAMILIES[family].base(config).double())
    taking = [layer for layer in attention_layers(model) if layer.takes_prior]
    calls = seen(taking, lambda: model(inputs(config)))
    for number, kind in enumerate(KINDS):
        plain = FAMILIES[family].base(
            deep(family, [kind] * len(config.prior) if isinstance(config.prior, list) else kind)
        )
        layers = [layer for layer in attention_layers(plain.double().eval()) if layer.takes_prior]
        layers[number].load_state_dict(taking[number].state_dict())
        of_plain = seen(layers, partial(plain, inputs(config)), given=calls)
        assert torch.equal(first(of_plain[number][2]), first(calls[number][2])), number
        assert len(taking) == 4


@each("name", STOCK)
def test_a_layer_of_a_stock_model_computes_what_it_does_with_its_prior_alone(name):
    compare_layers(STOCK[name].build, lambda model: output(model, name))


@each("name", ["vit", "vit_parallel", "eva", "rope", "swin", "naflex"])
def test_a_layer_of_a_model_of_timm_too(name):
    from tests.hf_sparseprior.adapters import test_timm_in_place as of_timm  # which skips where timm is not installed

    compare_layers(of_timm.CASES[name].build, lambda model: of_timm.output(model, name))


def compare_layers(build, run):
    kinds, model = ["fibottention+violin", "dense", "bigbird"], build()
    names = list(find_encoder(model).attention)
    count = len(names)
    kinds = [*kinds, *["dense"] * count][:count]
    sp.apply_prior(model, {"layers": kinds})
    move_decays(model)
    modules = [model.get_submodule(name) for name in names]
    calls = seen(modules, partial(run, model))
    for number in range(min(3, count)):
        one = sp.apply_prior(build(), {"layers": [kinds[number]] * count})
        layers = [one.get_submodule(name) for name in names]
        getattr(layers[number], PRIOR_MODULE).load_state_dict(getattr(modules[number], PRIOR_MODULE).state_dict())
        of_plain = seen(layers, partial(run, one), given=calls)
        assert torch.equal(first(of_plain[number][2]), first(calls[number][2])), number
    sp.remove_prior(model)
    assert torch.equal(run(model), run(build()))


@each("family", DEEP)
def test_counts_are_those_of_the_layers(family):
    mixed, plain = (
        deep(family, MIXED),
        [deep(family, [kind] * 2 if "swin" in family or "iformer" in family else kind) for kind in KINDS],
    )
    dense = deep(family, "dense")
    gated = len(mixed.layer_priors) - 4
    assert [prior["support"]["name"] for prior in mixed.layer_priors[gated:]] == [
        "fibottention",
        "dense",
        "dense",
        "window",
    ]
    assert [run.first for run in mixed.prior_runs] == [*range(gated), *range(gated, gated + 4)]
    counted = model_flops(mixed)
    for number, config in enumerate(plain, start=gated):
        alone = model_flops(config)
        assert counted.layers[number] == alone.layers[number]
        assert counted.attended_pairs[number] == alone.attended_pairs[number]
    assert model_flops(dense, prior=MIXED).total == counted.total
    assert counted.decay is not None and set(counted.decay) == {"build", "apply"}
    # A prior's weights in one layer are a fourth of those that it has in four, of a stage half of those in two.
    models = [FAMILIES[family].base(config) for config in (mixed, dense)]
    tables = [
        sum(p.numel() for n, p in model.named_parameters() if "locality" in n and p.dim() > 1) for model in models
    ]
    assert mixed.num_weights - dense.num_weights == tables[0] - tables[1]


def test_the_pruning_ratio_is_the_mean_of_the_layers():
    config = deep("sparseprior_vit", {"layers": {"0-2": "fibottention", "3": GROUPS}})
    masks = [
        build_mask(prior["support"], num_heads=2, num_tokens=16, num_prefix_tokens=1, layer=layer, grid=(4, 4))
        for layer, prior in enumerate(config.layer_priors)
    ]
    kept = sum(mask.sum() for mask in masks)
    assert config.pruning_ratio == pytest.approx(100 * (1 - kept / (4 * 2 * 17**2)), abs=1e-9)


@each("family", DEEP)
def test_saved_and_loaded(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    config = deep(family, MIXED)
    model = scatter(FAMILIES[family].base(config))
    model.save_pretrained(folder)
    again = FAMILIES[family].base.from_pretrained(folder)
    assert again.config.prior == config.prior and again.config.layer_priors == config.layer_priors
    with torch.no_grad():
        pixels = inputs(config).float()
        assert torch.equal(again(pixels).last_hidden_state, model(pixels).last_hidden_state)
    assert (
        FAMILIES[family].config_class.from_dict(json.loads((folder / "config.json").read_text())).prior == config.prior
    )
    assert config.prior_name in (folder / "README.md").read_text()


@each("family", DEEP)
def test_equal_layers_are_the_plain_prior(family):
    """So that configs, their hashes and folders are what they were."""
    staged = family in ("sparseprior_swin", "sparseprior_iformer")
    plain = deep(family, ["fibottention+violin"] * 2 if staged else "fibottention+violin")
    for spec in (
        {"layers": ["fibottention+violin"] * 4},
        {"layers": {"2-3": "fibottention+violin", "0-1": "violin+fibottention"}},
    ):
        assert deep(family, spec).to_json_string() == plain.to_json_string()
    halves = {"layers": ["violin", "violin", "dense", "dense"]}
    if staged:
        assert deep(family, halves).to_json_string() == deep(family, ["violin", "dense"]).to_json_string()
    else:
        assert list(deep(family, halves).prior["layers"]) == ["0-1", "2-3"]


def test_a_list_is_one_for_each_stage_and_may_have_layers():
    config = deep("sparseprior_swin", ["violin", {"layers": ["fibottention", "dense"]}])
    assert [list(part) for part in config.prior][1] == ["layers"] and list(config.prior[1]["layers"]) == ["0", "1"]
    same = deep("sparseprior_swin", {"layers": {"0-1": "violin", "2": "fibottention", "3": "dense"}})
    assert same.prior == config.prior and same.prior_name == "violin, fibottention, dense"
    assert [run[2:] for run in config.prior_runs] == [(0, 0), (1, 2), (1, 3)]
    with pytest.raises(ValueError, match=r"layers: '0-2' is too large, the numbers are 0 to 1 \(stage 2 of 2\)"):
        deep("sparseprior_swin", ["violin", {"layers": {"0-2": "dense"}}])


BAD = {
    "layers: 2-3 are missing; each of 4": {"layers": {"0-1": "dense"}},
    "layers: 1 is missing": {"layers": {"0": "dense", "2-3": "dense"}},
    "layers: 1-2 must be given once, not twice": {"layers": {"0-2": "dense", "1-3": "violin"}},
    "layers: '2-4' is too large, the numbers are 0 to 3": {"layers": {"0-1": "dense", "2-4": "violin"}},
    "layers: 'first' must be a number from 0, or two like '0-3'": {"layers": {"first": "dense"}},
    "layers: '3-1' must be a number from 0": {"layers": {"3-1": "dense", "0-3": "dense"}},
    "layers: True must be a number from 0": {"layers": {True: "dense"}},
    "layers: a list of 3 must have one for each of 4": {"layers": ["dense"] * 3},
    "layers='dense' must be a list of priors, or an object": {"layers": "dense"},
    "decay next to 'layers' must be in each of the priors": {"layers": ["dense"] * 4, "decay": "violin"},
    "'layers' must be in the prior of a whole model": {"layers": [{"layers": ["dense"]}] * 4},
    r"'fibotention' is no prior; did you mean.*\(layers 2-3 of 4\)": {"layers": {"0-1": "dense", "2-3": "fibotention"}},
    r"w=-1 must be.*\(layer 3 of 4\)": {"layers": {"0-2": "dense", "3": {"support": {"name": "window", "w": -1}}}},
    "'evit' is of the whole model and must be in the prior of every layer.*among 4 layers it is not in 0, 2-3": {
        "layers": ["dense", "evit", "dense", "dense"]
    },
    "among 4 layers it is not in 3": {"layers": {"0-2": "evit", "3": {"extras": [{"name": "evit", "keep_rate": 0.1}]}}},
}


@each("message, prior", BAD.items())
def test_what_is_no_prior_of_layers_is_refused(message, prior):
    with pytest.raises(ValueError, match=f"(?s)^prior.*{message}"):
        deep("sparseprior_vit", prior)


def test_refused_on_stock_models_and_the_model_is_left_alone():
    model = STOCK["vit"].build()
    for prior, message in (
        ({"layers": ["dense"] * 4}, "a list of 4 must have one for each of 3"),
        ({"layers": ["dense", "dense", "evit"]}, r"apply_prior reaches attention alone \(layer 2 of 3\)"),
        ({"layers": ["dense", "dense", "nothing"]}, "is no prior"),
    ):
        with pytest.raises(ValueError, match=message):
            sp.apply_prior(model, prior)
        assert not stock_priors(model)


def test_token_pruning_in_all_layers_runs():
    prior = {"layers": {"0-1": "evit+violin", "2-3": "evit"}}
    model = sp.SparsePriorViTModel(deep("sparseprior_vit", prior)).eval()
    assert model.active_pruning() is not None and model(inputs(model.config).float()).last_hidden_state.shape[0] == 2
    assert prior_weights_once(model.config)


def prior_weights_once(config):
    """What the whole model has is counted once."""
    return config.num_weights == deep("sparseprior_vit", "evit").num_weights


@each("name", ["vit", "swin"])
def test_stock_models_are_saved_and_loaded(name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    model = STOCK[name].build()
    count = len(find_encoder(model).attention)
    prior = {"layers": {"0": "fibottention+violin", f"1-{count - 1}": "window"}}
    sp.apply_prior(model, prior)
    move_decays(model)
    model.save_pretrained(folder)
    again = sp.from_pretrained(type(model), folder)
    assert torch.equal(output(again, name), output(model, name))
    assert applied_prior(again).prior == applied_prior(model).prior
    assert [part.prior for part in stock_priors(again)] == [part.prior for part in stock_priors(model)]
    assert "fibottention+violin, window" in (folder / "README.md").read_text()


def test_a_support_in_all_layers_of_a_stock_swin_stays_there(tmp_path):
    """One prior for all has no support in later stages; what layers say is what they have."""
    model = STOCK["swin"].build()
    sp.apply_prior(model, {"layers": {"0-5": {"support": {"name": "window", "w": 2}}}})
    assert [part.prior["support"]["name"] for part in stock_priors(model)] == ["window"] * 6
    model.save_pretrained(tmp_path)
    again = sp.from_pretrained(type(model), tmp_path)
    assert [part.prior["support"]["name"] for part in stock_priors(again)] == ["window"] * 6


@each("before, after", [("violin", MIXED), (MIXED, "violin"), (MIXED, {"layers": KINDS[::-1]})])
def test_a_model_changes_its_priors(before, after, tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")
    family = FAMILIES["sparseprior_vit"]
    model = scatter(family.image_classifier(deep("sparseprior_vit", before)))
    model.save_pretrained(folder)
    changed, anew = load_changed_model(folder, family.image_classifier, prior=after)
    assert changed.config.prior == deep("sparseprior_vit", after).prior
    old, new = model.state_dict(), changed.state_dict()
    kept = set(old) & set(new)
    assert all(torch.equal(old[name], new[name]) for name in kept if old[name].shape == new[name].shape)
    assert set(anew) == set(new) - set(old)


@each("family", [name for name in DEEP if name != "sparseprior_iformer"])
def test_costs_are_predicted_by_kinds_of_layers(family, monkeypatch):
    monkeypatch.setattr(predicted_cost, "WARM_UP", 0.0)
    config = deep(family, {"layers": {"0": "fibottention", "1-2": "dense", "3": "fibottention"}})
    found = twins(config)
    made = [FAMILIES[family].config_class.from_dict({**config.to_dict(), **twin.changes}) for twin in found]
    assert sum(twin.share for twin in found) == pytest.approx(1)
    for run in config.prior_runs:
        same = [[one == run.prior for one in each_of(twin_config, run.stage_number)] for twin_config in made]
        whole = each_of(config, run.stage_number).count(run.prior)
        assert sum(twin.share * sum(one) for twin, one in zip(found, same, strict=True)) == pytest.approx(whole)
    said = []
    costs = predicted_costs(config, 1, torch.device("cpu"), passes=("forward",), budget=0.01, say=said.append)
    assert costs["forward"].seconds > 0 and "fibottention" in said[0]


def each_of(config, stage):
    return [run.prior for run in config.prior_runs if run.stage_number == stage for _ in range(run.stage.num_layers)]


def test_layers_run_in_the_order_that_all_have(monkeypatch):
    ordered = {"support": {"name": "window", "w": 1, "order": "hilbert"}}
    assert (
        deep("sparseprior_vit", {"layers": {"0-2": ordered, "3": {**ordered, "decay": "violin"}}}).layout == "hilbert"
    )
    assert deep("sparseprior_vit", {"layers": {"0-2": ordered, "3": "dense"}}).layout == "raster"
    mixed = deep("sparseprior_vit", {"layers": {"0-2": ordered, "3": {**ordered, "decay": "violin"}}})
    model, pixels = scatter(sp.SparsePriorViTModel(mixed).double()), inputs(mixed)
    with torch.no_grad():
        along = model(pixels).last_hidden_state
        monkeypatch.setattr(sp.SparsePriorViTConfig, "layout", "raster")
        torch.testing.assert_close(model(pixels).last_hidden_state, along)


def test_pairs_that_are_drawn_anew_in_some_layers():
    redrawn = {"support": {"name": "random", "redraw": True}}
    model = sp.SparsePriorViTModel(deep("sparseprior_vit", {"layers": {"0-1": redrawn, "2-3": "dense"}})).train()
    pixels = inputs(model.config).float()
    outs = [model(pixels).last_hidden_state for _ in range(2)]
    assert not torch.equal(*outs) and int(model.draws.count) == 2
    with pytest.raises(ValueError, match="must have redraw=False in a stock model"):
        sp.apply_prior(STOCK["vit"].build(), {"layers": [redrawn, "dense", "dense"]})


def test_the_prior_of_a_copied_config_can_be_set_wherever_it_lies():
    model = sp.SparsePriorViTModel(deep("sparseprior_vit", "dense"))
    with pytest.raises(ValueError, match="cannot be set"):
        model.config.prior = MIXED
    copied = copy.deepcopy(copy.copy(model.config))
    assert "_owned" not in vars(copied)
    copied.prior = MIXED
    assert sp.SparsePriorViTModel(copied).config.prior_name != "dense"


def test_numbers():
    assert numbered(["a", "a", "b"], 3, "x") == [(range(2), "a"), (range(2, 3), "b")]
    assert numbered({"2": "b", "0 - 1": "a"}, 3, "x") == [(range(2), "a"), (range(2, 3), "b")]
    assert keyed(["a", "a", "b", "a"]) == {"0-1": "a", "2": "b", "3": "a"}
    assert in_words([7, 1, 2, 3, 9]) == "1-3, 7, 9"
    assert given_priors([{"layers": ["a", "b"]}, "c"]) == ["a", "b", "c"]
    config = deep("sparseprior_vit", MIXED)
    assert len(each_prior(config.prior)) == len(config.prior["layers"]) == 4
