"""Groups of heads of one layer with a support each: masks and outputs are those of the groups, each made for itself."""

import itertools
import random

import numpy as np
import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.attention.choice import BACKENDS
from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.patterns.supports import (
    SUPPORTS,
    LayerKey,
    build_mask,
    head_order,
    layer_order,
    layer_pattern,
    needs_grid,
    redraws,
    resolve_support,
    support_notes,
)
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.priors.prior import common_order, parse_prior, prior_name, resolve_prior
from tests.each import each
from tests.hf_sparseprior.small import noise

GRID = (4, 5)
SIZES = {"num_tokens": 20, "grid": GRID, "num_prefix_tokens": 2}
WINDOW = {"name": "window", "w": 2}


def mixed(*groups):
    """A support of groups (number of heads, support), and the range of each."""
    ends = list(itertools.accumulate((count for count, _ in groups), initial=0))
    ranges = [range(a, b) for a, b in itertools.pairwise(ends)]
    keys = [str(r.start) if len(r) == 1 else f"{r.start}-{r.stop - 1}" for r in ranges]
    return {"name": "heads", "heads": dict(zip(keys, (one for _, one in groups), strict=True))}, ranges


@each("name", SUPPORTS)
def test_each_group_has_the_mask_of_its_support(name):
    for layer, seed in itertools.product((0, 3), (0, None)):
        own = {"name": "fibottention", "w_min": 1, "shuffle_seed": seed}
        support, ranges = mixed((3, own), (1, name), (4, {"name": name, "shuffle_seed": seed}), (2, WINDOW))
        mask = build_mask(support, num_heads=10, layer=layer, **SIZES)
        for heads, (count, one) in zip(
            ranges, [(3, own), (1, name), (4, {"name": name, "shuffle_seed": seed}), (2, WINDOW)], strict=True
        ):
            alone = build_mask(one, num_heads=count, layer=layer, **SIZES)
            assert (mask[heads.start : heads.stop] == alone).all(), (heads, layer, seed)


@each("time", ["frame", "clip", "axes"])
def test_groups_over_the_frames_of_a_clip(time):
    groups = [(2, {"name": "fibottention", "w_min": 1}), (2, WINDOW)]
    support, ranges = mixed(*groups)
    sizes = {"num_tokens": 24, "grid": (3, 2, 4), "num_prefix_tokens": 1, "time": time, "layer": 1}
    mask = build_mask(support, num_heads=4, **sizes)
    for heads, (count, one) in zip(ranges, groups, strict=True):
        assert (mask[heads.start : heads.stop] == build_mask(one, num_heads=count, **sizes)).all()


@each("backend", BACKENDS)
def test_every_backend_computes_the_heads_of_the_groups(backend):
    for other in ("window", "neighborhood", "dense"):
        groups = [(2, {"name": "fibottention", "w_min": 1}), (2, {"name": other})]
        support, ranges = mixed(*groups)
        q, k, v = (noise(2, 4, 22, 8) * scale for scale in (1.0, 0.7, 1.3))
        options = {"num_prefix_tokens": 2, "grid": GRID, "layer": 1}
        try:
            out = sp.ops.attention(q, k, v, support=support, backend=backend, **options)
        except ValueError as error:
            assert "cannot run" in str(error), error
            continue
        for heads, (_, one) in zip(ranges, groups, strict=True):
            parts = [tensor[:, heads.start : heads.stop] for tensor in (q, k, v)]
            alone = sp.ops.attention(*parts, support=one, backend="reference", **options)
            torch.testing.assert_close(out[:, heads.start : heads.stop], alone, atol=1e-5, rtol=1e-5)


def test_some_backend_runs_what_only_lists_can_say():
    support, _ = mixed((2, WINDOW), (2, "neighborhood"))
    q = noise(1, 4, 20, 4)
    ran = []
    for backend in BACKENDS:
        try:
            sp.ops.attention(q, q, q, support=support, grid=GRID, backend=backend)
            ran.append(backend)
        except ValueError:
            pass
    assert {"reference", "gather"} <= set(ran)


def test_what_lists_cost_goes_by_the_longest():
    """A dense head in a layer of lists makes all lists as long as all patches."""
    for groups, cost in (
        ([(3, {"name": "neighborhood", "window": 3}), (1, "dense")], 1.0),
        ([(3, WINDOW), (1, "dense")], None),
    ):
        support = resolve_support(mixed(*groups)[0], 4, 20, GRID)
        plan = AttentionPlan(LayerKey(4, GRID), 1, support)
        assert plan.cost_density == pytest.approx(plan.density if cost is None else cost) and plan.density < 1


def test_heads_that_were_cut_and_pairs_that_are_drawn():
    groups = [(3, "random"), (3, {"name": "random", "redraw": True, "shuffle_seed": 4})]
    support = resolve_support(mixed(*groups)[0], 6, 20, GRID)
    assert redraws(support) and not redraws(resolve_support(mixed((3, "random"), (3, "dense"))[0], 6, 20, GRID))
    whole = layer_pattern(support, LayerKey(6, GRID, 2)).mask()
    left = layer_pattern(support, LayerKey(6, GRID, 2, heads=(0, 2, 4))).mask()
    assert (left == whole[[0, 2, 4]]).all()
    drawn = layer_pattern(support, LayerKey(6, GRID, 2, draw=1)).mask()
    assert (drawn[:3] == whole[:3]).all() and (drawn[3:] != whole[3:]).any()
    alone = layer_pattern(resolve_support(groups[1][1], 3, 20, GRID), LayerKey(3, GRID, 2, draw=1)).mask()
    assert (drawn[3:] == alone).all()


def test_heads_are_shuffled_within_their_group():
    support = resolve_support(mixed((4, {**WINDOW, "shuffle_seed": 7}), (3, "dense"))[0], 7, 20)
    for layer in range(5):
        shuffled = list(range(4))
        random.Random(7 + layer).shuffle(shuffled)
        assert head_order(support, 7, layer) == [*shuffled, *(4 + number for number in layer_order(3, layer, 0))]


def test_orders_of_the_groups():
    along = {**WINDOW, "order": "hilbert"}
    both = {"heads": {"0-1": {"support": along}, "2-3": {"support": {"name": "fibottention", "order": "hilbert"}}}}
    assert common_order(resolve_prior(both, 4, (4, 4))) == "hilbert"
    other = {"heads": {"0-1": {"support": along}, "2-3": {"support": WINDOW}}}
    assert common_order(resolve_prior(other, 4, (4, 4))) == "raster" and needs_grid(mixed((2, along), (2, WINDOW))[0])
    mask = build_mask(parse_prior(other)["support"], num_heads=4, num_tokens=16)
    assert (mask[:2] == build_mask(along, num_heads=2, num_tokens=16)).all()
    model = sp.SparsePriorViTModel(small_vit(both)).eval().double()
    assert model.config.layout == "hilbert"
    pixels = noise(1, 3, 16, 16, dtype=torch.float64)
    weights = model(pixels, output_attentions=True).attentions[0][0]
    seen = build_mask(model.config.prior["support"], num_heads=4, num_tokens=16, num_prefix_tokens=1)
    assert (((weights > 0).numpy()) == seen).all()


def small_vit(prior):
    return sp.SparsePriorViTConfig(
        prior=prior, image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=16,
    )  # fmt: skip


@each("family", ["sparseprior_vit", "sparseprior_convit", "sparseprior_swin", "sparseprior_timesformer"])
def test_a_models_heads_see_what_their_groups_do(family):
    prior = {"heads": {"0": {"support": {"name": "window", "w": 0}, "decay": "violin"}, "1": "neighborhood+violin"}}
    from tests.hf_sparseprior.small import small

    layers = {"num_hidden_layers": 2} if family != "sparseprior_swin" else {}
    config = small(family, prior=prior, **layers)
    assert config.prior_name.startswith("window&neighborhood+violin")
    model = FAMILIES[family].base(config).eval()
    module = next(m for m in model.modules() if isinstance(m, PriorAttention) and m.prior["support"]["name"] == "heads")
    assert module.decay_bias.alpha.shape == (2,)
    frames = (config.num_frames,) if family == "sparseprior_timesformer" else ()
    assert torch.isfinite(model(noise(1, *frames, 3, config.image_size, config.image_size)).last_hidden_state).all()
    again = FAMILIES[family].config_class.from_dict(config.to_dict())
    assert again.prior == config.prior


def test_one_group_or_nothing_left_out_is_the_plain_prior():
    plain = resolve_prior("fibottention+violin", 4, GRID)
    assert resolve_prior({"heads": {"0-3": "fibottention+violin"}}, 4, GRID) == plain
    assert resolve_prior({"heads": ["fibottention+violin"] * 4}, 4, GRID) == plain
    assert resolve_prior({"heads": {"0-1": "violin", "2-3": "violin"}}, 4, GRID) == resolve_prior("violin", 4, GRID)
    assert resolve_prior({"heads": ["topk"] * 4}, 4, GRID)["predictor"]["name"] == "topk"
    two = resolve_prior({"heads": {"0-1": "fibottention", "2-3": "fibottention"}}, 4, GRID)
    assert list(two["support"]["heads"]) == ["0-1", "2-3"] and prior_name(two) == "fibottention"
    full = resolve_prior({"heads": ["fibottention", "fibottention", "dense", "window"]}, 4, GRID)
    assert list(full["support"]["heads"]) == ["0-1", "2", "3"] and prior_name(full) == "fibottention&dense&window"
    assert resolve_prior(full, 4, GRID) == full and resolve_prior({**full, "decay": "violin"}, 4, GRID)["decay"]


BAD = {
    "heads: 2-3 are missing": {"heads": {"0-1": "dense"}},
    "heads: '0-4' is too large": {"heads": {"0-4": "dense"}},
    "heads: a list of 3 must have one for each of 4": {"heads": ["dense", "window", "dense"]},
    "heads of one layer must differ in their supports alone; decay=None": {"heads": {"0-1": "violin", "2-3": "dense"}},
    "heads of one layer must differ in their supports alone; extras=": {"heads": {"0-1": "dense", "2-3": "irpe_k"}},
    "heads of one layer must differ in their supports alone; time=": {"heads": {"0-1": "window+clip", "2-3": "dense"}},
    "mask_fill='zero' must be 'neg_inf', the same for all heads": {
        "heads": {"0-1": "dense", "2-3": {"support": {**WINDOW, "mask_fill": "zero"}}}
    },
    "the support of a group of heads cannot have groups": {"heads": {"0-1": {"heads": ["dense"] * 2}, "2-3": "dense"}},
    "'layers' must be in the prior of a whole model": {"heads": {"0-3": {"layers": ["dense"]}}},
    "decay next to 'heads' must be in each": {"heads": {"0-3": "dense"}, "decay": "violin"},
    "heads={} must be a list of priors": {"heads": {}},
    "heads='dense' must be a list of priors": {"heads": "dense"},
    r"w=-3 must be an integer of 0 or more \(heads 0-1 of 4\)": {
        "heads": {"0-1": {"support": {"name": "window", "w": -3}}, "2-3": "dense"}
    },
    "shuffle_seed=3 of support 'heads' must be in the supports": {
        "support": {"name": "heads", "heads": ["dense"] * 4, "shuffle_seed": 3}
    },
    "support 'heads' has no setting 'w'": {"support": {"name": "heads", "heads": ["dense"] * 4, "w": 3}},
    "predictor 'topk' chooses among all keys": {"heads": {"0-1": "topk", "2-3": "topk+window"}},
}


@each("message, prior", BAD.items())
def test_what_one_call_cannot_serve_is_refused(message, prior):
    with pytest.raises(ValueError, match=f"^prior.*{message}"):
        resolve_prior(prior, 4, GRID)


def test_notes_say_of_which_heads():
    support = resolve_support(
        mixed((2, "dense"), (2, {"name": "fibottention", "w_min": 1, "w_max": 2}))[0], 4, 20, GRID
    )
    notes = support_notes(support, LayerKey(4, GRID), 1)
    assert all(note.startswith("heads 2-3: ") for note in notes)
    counted = layer_pattern(support, LayerKey(4, GRID))
    assert counted.support == "dense&fibottention"
    mask = np.asarray(counted.mask(1))
    assert counted.pruning_ratio(1) == pytest.approx(100 * (1 - mask.mean()))
