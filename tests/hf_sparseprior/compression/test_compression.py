"""UPop's search and the smaller models that it leaves."""

import itertools
import math
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.compression import STRUCTURES, MaskSearch, compressed_model, pruned_share
from hf_sparseprior.compression.search import KINDS, PUBLISHED, SEARCH_FILE, weighted_norm
from hf_sparseprior.compression.units import Group, Units
from hf_sparseprior.convert.checkpoint import convert_checkpoint
from hf_sparseprior.models.pretrained import load_whole_model
from hf_sparseprior.patterns.supports import build_mask
from tasks.analysis.paper_numbers import unexplained_numbers
from tests.each import each
from tests.hf_sparseprior.small import SMALL

VIT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 32,
    "patch_size": 4, "num_labels": 3, "num_register_tokens": 2, "use_distillation_token": True, "layerscale_value": 0.5,
}  # fmt: skip
SWIN = {
    "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4,
    "num_labels": 3,
}  # fmt: skip
CONVIT = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_local_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "image_size": 32, "patch_size": 4, "num_labels": 3,
}  # fmt: skip
IFORMER = {
    "hidden_sizes": [12, 16, 20], "conv_depths": [1, 1, 0], "attention_depths": [0, 1, 2],
    "final_conv_depths": [0, 1, 1], "key_reduction": [1, 1, 2], "conv_ratio": 3, "mlp_ratio": 2, "image_size": 32,
    "num_labels": 3, "layer_scale_init_value": 0.5, "use_distillation_classifier": True,
}  # fmt: skip
LARGER = {
    "sparseprior_vit": VIT, "sparseprior_swin": SWIN, "sparseprior_convit": CONVIT, "sparseprior_iformer": IFORMER,
}  # fmt: skip
# Sizes with which each structure alone can give 12 %.
FINER_LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 80}
FINER = {
    "sparseprior_vit": FINER_LAYERS, "sparseprior_swin": {}, "sparseprior_convit": FINER_LAYERS,
    "sparseprior_iformer": {"hidden_sizes": [24, 32, 40], "attention_depths": [0, 1, 4]},
}  # fmt: skip
KEY_WIDTHS = {"sparseprior_vit": [6, 6], "sparseprior_iformer": [16, 10, 10]}
ALONG = {"support": {"name": "fibottention", "w_min": 1, "order": "hilbert"}, "decay": "violin"}
# Every family with a mask and a decay, and each of the others once.
PAIRS = [
    *((family, "fibottention+violin") for family in LARGER),
    *(("sparseprior_vit", ALONG), ("sparseprior_vit", "fibottention"), ("sparseprior_swin", "violin")),
    *(("sparseprior_convit", "dense"), ("sparseprior_iformer", ALONG)),
]


def make(family, dtype=torch.float32, **options):
    """A model whose weights are far from their small initial values, as are the statistics of its batch norms."""
    torch.manual_seed(0)
    model = FAMILIES[family].image_classifier(FAMILIES[family].make_config(**{**LARGER[family], **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, statistics in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                statistics.add_(torch.rand_like(statistics))
    return model.to(dtype).eval()


def pixels(side=32, dtype=torch.float32):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(3), dtype=dtype)


def searched(model, ratio=0.4, structures=STRUCTURES, steps=3):
    """The end of a short search, with the weights trained on the way."""
    search = MaskSearch(model, ratio, structures)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(pixels(), labels=torch.tensor([0, 2])).loss.backward()
        optimizer.step()
        search.update(step, steps)
    return search


@pytest.mark.parametrize(("family", "prior"), PAIRS, ids=lambda value: value if isinstance(value, str) else "along")
def test_the_smaller_model_computes_what_the_masked_one_does(family, prior, tmp_path):
    model = make(family, prior=prior)
    with torch.no_grad():
        before = model(pixels()).logits
    search = searched(model)
    smaller = compressed_model(model, search.kept(), search.units)
    smaller.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        masked = model(pixels()).logits
        torch.testing.assert_close(smaller(pixels()).logits, masked, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(loaded(pixels()).logits, masked, atol=1e-5, rtol=1e-5)
    assert (masked - before).abs().max() > 1e-2  # something was cut
    counted = [sum(parameter.numel() for parameter in each.parameters()) for each in (model, smaller)]
    assert 1 - counted[1] / counted[0] == pytest.approx(search.achieved(), abs=1e-9)
    assert search.achieved() == pytest.approx(0.4, abs=0.01)
    assert loaded.config.compressed == smaller.config.compressed
    assert all(0 < len(layer.heads) <= layer.num_supports for layer in loaded.config.layers)
    bare = AutoModel.from_pretrained(tmp_path)
    assert bare(pixels()).pooler_output.shape == (2, loaded.config.pooled_size)
    assert load_whole_model(tmp_path).config.widths == smaller.config.widths


SQUEEZED = {"decay": "violin", "extras": [{"name": "localvit", "squeeze_excitation": 4}]}
ORDERS = ["hilbert", "snake", "zigzag", "z_t"]
OTHERS = {
    "sparseprior_vit": [
        *("violin+localvit", "fibottention+swin_rpb", "irpe_qk", "bigbird", "learned_order", "topk", "sparsifiner"),
        {"support": {"name": "fibottention", "mask_fill": "zero"}},
        {"support": {"name": "fibottention", "order": ORDERS}},
    ],
    "sparseprior_iformer": [SQUEEZED, "fibottention+swin_rpb", "sparsifiner", ["fibottention", "violin"]],
}
PARTS = {
    "sparseprior_vit": [
        {"stem": "convolution", "stem_channels": 4, "pooling": "class_token_and_mean"},
        {"use_distillation_token": False, "token_classifier": True, "qkv_bias": False},
    ],
    "sparseprior_iformer": [{"use_distillation_classifier": False, "layer_scale_init_value": 0}],
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {"prior": prior}) for family, priors in OTHERS.items() for prior in priors),
        *((family, {"prior": "dense", **parts}) for family, several in PARTS.items() for parts in several),
    ],
    ids=str,
)
def test_other_priors_and_parts(family, options):
    check_smaller(family, **options)


def check_smaller(family, ratio=0.4, structures=STRUCTURES, **options):
    """Also in float64 where batches are normalised by their own statistics, which enlarges rounding."""
    model = make(family, **options)
    search = searched(model, ratio, structures)
    smaller = compressed_model(model, search.kept())
    with torch.no_grad():
        torch.testing.assert_close(smaller(pixels()).logits, model(pixels()).logits, atol=1e-5, rtol=1e-5)
        precise, masked = (each.double().train()(pixels().double()).logits for each in (smaller, model))
        torch.testing.assert_close(precise, masked, atol=1e-8, rtol=1e-8)
    cut = search.units.cut(model.state_dict(), search.kept())
    for name, value in smaller.named_buffers():
        torch.testing.assert_close(value, cut[name], atol=1e-8, rtol=1e-8)


def test_maps_of_an_iformer_are_0_where_channels_went():
    model = make("sparseprior_iformer", prior="fibottention")
    search = MaskSearch(model, 0.4, STRUCTURES)
    with torch.no_grad():
        for number, mask in enumerate(search.masks.values()):
            mask[1 + number % 2 :: 3] = 0
        kept = [search.kept()[Group("width", stage)] for stage in range(3)]
        smaller = compressed_model(model, search.kept())
        masked = model.iformer(pixels(), output_hidden_states=True).reshaped_hidden_states
        maps = smaller.iformer(pixels(), output_hidden_states=True).reshaped_hidden_states
    for own, left, channels in zip(masked, maps, [kept[0], *kept], strict=True):
        assert own.shape[1] > left.shape[1] == int(channels.sum())
        torch.testing.assert_close(own[:, channels], left, atol=1e-5, rtol=1e-5)
        assert not own[:, ~channels].any()


# The two families whose layers have structures of their own, and the others with one that is all theirs.
NAMED = [
    *product(("sparseprior_vit", "sparseprior_iformer"), [PUBLISHED, *((one,) for one in STRUCTURES)]),
    *(("sparseprior_swin", ("width",)), ("sparseprior_swin", ("heads",)), ("sparseprior_convit", PUBLISHED)),
]


@pytest.mark.parametrize(("family", "structures"), NAMED, ids=str)
def test_only_the_named_structures_go(family, structures):
    model = make(family, prior="fibottention+violin", **FINER[family])
    ratio = 0.12
    if family == "sparseprior_iformer" and structures == ("heads",):
        with pytest.raises(ValueError, match=r"ratio=0.12 must be at most 0\.000, which is all of heads"):
            MaskSearch(model, ratio, structures)  # it has one
        return
    search = searched(model, ratio, structures, steps=1)
    smaller = compressed_model(model, search.kept())
    with torch.no_grad():
        torch.testing.assert_close(smaller(pixels()).logits, model(pixels()).logits, atol=1e-5, rtol=1e-5)
    whole, left = Units(model).sizes, Units(smaller).sizes
    gone = {group.kind for group in whole if left[group] < whole[group]}
    assert {structure for structure, kinds in KINDS.items() if gone & set(kinds)} == set(structures)
    assert gone <= {kind for structure in structures for kind in KINDS[structure]}
    if family == "sparseprior_iformer":
        assert len(gone) == 2 * len(structures)
    assert search.achieved() == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("family", LARGER)
def test_masks_of_1_change_nothing(family):
    model = make(family, prior="violin")
    with torch.no_grad():
        before = model(pixels()).logits
        search = MaskSearch(model, 0.5, STRUCTURES)
        torch.testing.assert_close(model(pixels()).logits, before, atol=1e-5, rtol=1e-5)
        search.masks[Group("mlp", 0)].zero_()
        assert (model(pixels()).logits - before).abs().max() > 1e-3
        search.remove()
        assert torch.equal(model(pixels()).logits, before)


@pytest.mark.parametrize(
    "order", ["raster", "hilbert", ["raster", "z_t", "snake", "zigzag", "peano", "hilbert"]], ids=str
)
def test_kept_heads_keep_their_supports(order):
    prior = {"support": {"name": "fibottention", "order": order}}
    model = make("sparseprior_vit", prior=prior, num_attention_heads=6, num_hidden_layers=3)
    smaller = compressed_model(model, searched(model, 0.3, ("heads", "mlp")).kept())
    for number, (own, layer) in enumerate(zip(smaller.vit.layers, smaller.config.layers, strict=True)):
        mask = build_mask(smaller.config.prior["support"], num_heads=6, num_tokens=64, layer=number)
        plan = own.attention.plan((8, 8))
        assert plan.num_heads == len(layer.heads) == own.attention.num_heads
        assert np.array_equal(plan.build_table("mask"), mask[list(layer.heads)])
    assert len({layer.heads for layer in smaller.config.layers}) > 1
    masks = [build_mask(smaller.config.prior["support"], num_heads=6, num_tokens=64, num_prefix_tokens=4, layer=number)
             for number in range(3)]  # fmt: skip
    left = np.concatenate([mask[list(layer.heads)] for mask, layer in zip(masks, smaller.config.layers, strict=True)])
    assert smaller.config.pruning_ratio == pytest.approx(100 * (1 - left.mean()))


@pytest.mark.parametrize("family", ["sparseprior_vit", "sparseprior_iformer"])
def test_a_compressed_model_is_compressed_again(family):
    model = make(family, prior="fibottention+violin")
    once = compressed_model(model, searched(model, 0.3).kept())
    search = searched(once, 0.3)
    twice = compressed_model(once, search.kept())
    with torch.no_grad():
        torch.testing.assert_close(twice(pixels()).logits, once(pixels()).logits, atol=1e-5, rtol=1e-5)
    for *all_layers, scale in zip(
        model.config.layers, once.config.layers, twice.config.layers, KEY_WIDTHS[family], strict=True
    ):
        assert all(layer.scale_width == scale for layer in all_layers)
        assert all(set(second.heads) <= set(first.heads) for first, second in itertools.pairwise(all_layers))
    assert once.num_parameters() > twice.num_parameters()


@pytest.mark.parametrize("family", LARGER)
def test_flops_equal_torchs_count(family):
    model = make(family)
    smaller = compressed_model(model, searched(model).kept())
    smaller.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        smaller(pixels()[:1])
    assert model_flops(smaller.config, convention="torch").total == counter.get_total_flops()
    assert counter.get_total_flops() < model_flops(model.config, convention="torch").total


def test_flops_of_a_support_are_those_of_the_kept_heads():
    model = make("sparseprior_vit", prior="fibottention+violin", num_attention_heads=6)
    config = compressed_model(model, searched(model, 0.4, ("heads", "head_width", "mlp")).kept()).config
    pairs = [
        build_mask(config.prior["support"], num_heads=6, num_tokens=64, num_prefix_tokens=4, layer=number)[
            list(own.heads)
        ]
        for number, own in enumerate(config.layers)
    ]
    counted = model_flops(config)
    assert counted.attended_pairs == [int(own.sum()) for own in pairs]
    assert [layer["qk"] for layer in counted.layers] == [
        int(own.sum()) * layer.head_width for own, layer in zip(pairs, config.layers, strict=True)
    ]
    assert counted.decay["build"] > 0


def test_fibottentions_pruning_of_upop_is_among_what_was_not_explained():
    (number,) = (number for number in unexplained_numbers() if "UPop" in number.source)
    support = {"name": "fibottention", "w_min": 5, "w_max": 65}
    ratios = {
        (heads, prefix): 100
        - 100 * build_mask(support, num_heads=heads, num_tokens=196, num_prefix_tokens=prefix).mean()
        for heads, prefix in ((6, 0), (8, 0), (12, 1))
    }
    assert (number.printed, round(number.count, 2)) == (97.1, round(ratios[6, 0], 2)) == (97.1, 96.46)
    assert f"8 heads give {ratios[8, 0]:.2f}" in number.includes and f"token {ratios[12, 1]:.2f}" in number.includes


# ---- the search -----------------------------------------------------------------------------------------------------


def test_the_schedule_is_the_papers():
    # p sqrt((1 - cos(pi t / T)) / 2) is p sin(pi t / 2 T)
    for step in range(11):
        assert pruned_share(0.6, step, 10) == pytest.approx(0.6 * math.sin(math.pi * step / 20))
    assert pruned_share(0.6, 10, 10) == 0.6


def test_gradients_of_masks_equal_differences_of_scaled_weights():
    """Of the loss, by the weights that make a unit, scaled; summed over two batches."""
    layer = "vit.layers.1"
    rows = {  # heads have 6 channels
        Group("heads", 1): lambda unit: [
            (f"{layer}.attention.{name}", slice(6 * unit, 6 * unit + 6)) for name in ("q_proj", "k_proj", "v_proj")
        ],
        Group("head_width", 1): lambda unit: [
            (f"{layer}.attention.{name}", slice(unit, None, 6)) for name in ("q_proj", "k_proj", "v_proj")
        ],
        Group("mlp", 1): lambda unit: [(f"{layer}.mlp.fc1", unit)],
    }
    check_gradients(make("sparseprior_vit", torch.float64, prior="violin", hidden_act="relu"), rows)


def test_gradients_of_masks_of_an_iformer_equal_differences_of_scaled_weights():
    """Of its batch norms, and of what reads values and gate; also with the statistics of the batch."""
    stage, layer = "iformer.stages.2", "iformer.stages.2.layers.1"
    of_width = ["downsample.norm", "final_convolutions.0.depthwise.norm", "final_convolutions.0.reduction.norm"]
    of_width += [f"layers.{n}.{name}" for n in (0, 1) for name in ("cpe.norm", "attention.o_norm", "mlp.norm2")]
    rows = {
        Group("head_width", 2): lambda unit: [(f"{layer}.attention.{name}", unit) for name in ("q_norm", "k_norm")],
        Group("value_width", 2): lambda unit: [(f"{layer}.attention.o_proj", (slice(None), unit))],
        Group("mlp", 2): lambda unit: [(f"{layer}.mlp.norm1", unit)],
        Group("conv_width", 3): lambda unit: [(f"{stage}.final_convolutions.0.expansion.norm", unit)],
        Group("stem_width", 1): lambda unit: [("iformer.embeddings.expansion.norm", unit)],
        Group("width", 2): lambda unit: [
            *((f"{stage}.{name}", unit) for name in of_width),
            *((f"{name}.norm", unit) for name in ("classifier", "distillation_classifier")),
        ],
    }
    for training in (False, True):
        model = make("sparseprior_iformer", torch.float64, prior="violin").train(training)
        check_gradients(model, rows)


def check_gradients(model, rows):
    """Compare with (loss(1 + e) - loss(1 - e)) / 2 e of weights and biases, given by unit, that are scaled."""
    batches = [pixels(dtype=torch.float64), pixels(dtype=torch.float64).flip(-1)]
    labels = torch.tensor([0, 2])

    def loss_with(scale, rows):
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for name, index in rows:
                model.get_parameter(f"{name}.weight")[index] *= scale
                if (bias := model.get_submodule(name).bias) is not None:
                    bias[index] *= scale
            loss = sum(model(batch, labels=labels).loss for batch in batches)
        model.load_state_dict(kept)
        return loss.item()

    expected = {
        (group, unit): (loss_with(1 + 1e-5, of(unit)) - loss_with(1 - 1e-5, of(unit))) / 2e-5
        for (group, of), unit in product(rows.items(), (0, 3))
    }
    search = MaskSearch(model, 0.3, STRUCTURES)
    for batch in batches:
        model.zero_grad()
        model(batch, labels=labels).loss.backward()
    for (group, unit), difference in expected.items():
        assert search.masks[group].grad[unit].item() == pytest.approx(difference, rel=1e-3, abs=1e-7)


def test_scores_are_standardised_within_each_kind_and_ranked_together():
    model = make("sparseprior_vit")
    search = MaskSearch(model, 0.3, PUBLISHED)
    generator = torch.Generator().manual_seed(1)
    for group, mask in search.masks.items():
        mask.grad = torch.randn(mask.shape, generator=generator) * (100 if group.kind == "mlp" else 0.1) + 5
    sums = {group: mask.grad.double() for group, mask in search.masks.items()}
    kept = search.update(1, 1)
    gone, left = [], []
    for kind in PUBLISHED:
        every = torch.cat([value for group, value in sums.items() if group.kind == kind])
        for group, value in sums.items():
            if group.kind == kind:
                scores = (value - every.mean()) / every.std()
                gone += scores[~kept[group]].tolist()
                left += scores[kept[group]].tolist()
    # All that go have larger sums than all that stay, but for the few that fill up the share.
    threshold = sorted(gone + left, reverse=True)[len(gone) - 1]
    assert sum(score < threshold for score in gone) <= 3 and len(gone) > 20
    assert search.achieved() == pytest.approx(0.3, abs=0.005)


def published_choice(search, costs, share):
    """The published rule in plain Python: bool lists by group. `costs`: parameters of a unit of each kind."""
    sums = {group: mask.grad.double().tolist() for group, mask in search.masks.items()}
    scores = {}
    for kind in PUBLISHED:
        every = [value for group, values in sums.items() if group.kind == kind for value in values]
        mean = sum(every) / len(every)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in every) / (len(every) - 1))
        scores |= {g: [(v - mean) / deviation for v in values] for g, values in sums.items() if g.kind == kind}
    ranked = sorted(((score, costs[g.kind]) for g, values in scores.items() for score in values), reverse=True)
    wanted = share * sum(cost for _, cost in ranked)
    gone = list(itertools.accumulate(cost for _, cost in ranked))
    threshold = ranked[min(range(len(ranked)), key=lambda place: abs(gone[place] - wanted))][0]
    return {g: [value <= threshold or value == min(values) for value in values] for g, values in scores.items()}


def test_a_threshold_keeps_what_the_published_code_does():
    model = make("sparseprior_vit", num_hidden_layers=3)
    search = MaskSearch(model, 0.4, PUBLISHED, "layers", "threshold")
    generator = torch.Generator().manual_seed(1)
    for group, mask in search.masks.items():
        mask.grad = torch.randn(mask.shape, generator=generator) - 9 * (group == Group("mlp", 1))
        mask.grad[:] += 9 * (group == Group("head_width", 2))  # all of a layer is above the threshold but one
    # q, k, v of 4 heads with 24 inputs and a bias, and what reads their output; two matrices and a bias.
    costs = {"head_width": 3 * 4 * 25 + 4 * 24, "mlp": 25 + 24}
    for step in (1, 2, 3):
        kept = search.update(step, 3)
        expected = published_choice(search, costs, pruned_share(0.4, step, 3))
        assert {group: mask.tolist() for group, mask in kept.items()} == expected
    assert int(kept[Group("head_width", 2)].sum()) == 1
    whole = 3 * (6 * costs["head_width"] + 40 * costs["mlp"])
    gone = sum(int((~mask).sum()) * costs[group.kind] for group, mask in kept.items())
    assert search.achieved() == pytest.approx(gone / whole) and search.total == whole
    smaller = compressed_model(model, search.kept(), search.units)
    assert search.parameters - sum(parameter.numel() for parameter in smaller.parameters()) == gone


@pytest.mark.parametrize("choice", ["fill", "threshold"])
def test_a_ratio_of_the_layers_is_of_what_attention_and_mlp_have(choice):
    """DeiT-S: 9234 parameters of a head's width and 769 of the MLP's are the published code's numbers."""
    with torch.device("meta"):
        model = sp.SparsePriorViTForImageClassification(
            sp.SparsePriorViTConfig.from_preset("deit_small", num_labels=1000)
        )
    units = Units(model)
    costs = {group.kind: units.cost(group, units.sizes) for group in units.sizes}
    assert (costs["head_width"], costs["mlp"]) == (9234, 769)
    whole = 12 * (64 * 9234 + 1536 * 769)
    left = {}
    for ratio_of in ("model", "layers"):
        small = make("sparseprior_vit", num_hidden_layers=4)
        search = MaskSearch(small, 0.5, PUBLISHED, ratio_of, choice)
        generator = torch.Generator().manual_seed(2)
        for mask in search.masks.values():
            mask.grad = torch.randn(mask.shape, generator=generator)
        search.update(1, 1)
        smaller = compressed_model(small, search.kept(), search.units)
        counts = [sum(parameter.numel() for parameter in each.parameters()) for each in (small, smaller)]
        total = counts[0] if ratio_of == "model" else 4 * (6 * 396 + 40 * 49)
        left[ratio_of] = counts[1]
        assert (counts[0] - counts[1]) / total == pytest.approx(0.5, abs=0.025) == search.achieved()
    assert left["model"] < left["layers"]
    all_parameters = sum(parameter.numel() for parameter in model.parameters())
    shown = [f"{(all_parameters - share * base) / 1e6:.2f}" for base in (whole, all_parameters) for share in (0.5, 0.3)]
    assert (f"{whole / 1e6:.2f}", f"{all_parameters / 1e6:.2f}") == ("21.27", "22.05")
    assert shown == ["11.42", "15.67", "11.03", "15.44"]


@each(
    "settings, message",
    [
        ({"ratio_of": "all"}, "ratio_of='all' must be one of model, layers"),
        ({"choice": "greedy"}, "choice='greedy' must be one of fill, threshold"),
        ({"ratio_of": "layers"}, r"structures=\('heads', .*\) with ratio_of='layers' must be some of head_width, mlp"),
        ({"choice": "threshold"}, r"with choice='threshold' must be some of head_width, mlp"),
    ],
)
def test_bad_readings_of_a_search(settings, message):
    with pytest.raises(ValueError, match=message):
        MaskSearch(make("sparseprior_vit"), 0.3, STRUCTURES, **settings)


def test_masks_fade_as_the_share_grows_and_every_group_keeps_a_unit():
    model = make("sparseprior_vit")
    search = MaskSearch(model, 0.6, ("heads", "mlp"))
    for mask in search.masks.values():
        mask.grad = torch.linspace(-1, 1, len(mask))
    counts = []
    for step in range(1, 5):
        search.update(step, 4)
        values = torch.cat([mask.detach() for mask in search.masks.values()])
        faded = 1 - math.sin(math.pi * step / 8)
        assert all(min(abs(value - 1), abs(value - faded)) < 1e-6 for value in values.tolist())
        counts.append(int((values < 1).sum()))
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert all(mask.any() for mask in search.kept().values())


def test_a_weighted_norm_is_the_norm_of_the_channels_that_are_left():
    x, weight, bias = torch.randn(2, 5, 8), torch.randn(8), torch.randn(8)
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 1])
    kept = mask.bool()
    expected = torch.zeros(2, 5, 8)
    expected[..., kept] = F.layer_norm(x[..., kept], (5,), weight[kept], bias[kept], 1e-6)
    torch.testing.assert_close(weighted_norm(x, mask, weight, bias, 1e-6), expected)
    whole = F.layer_norm(x, (8,), weight, bias, 1e-6)
    torch.testing.assert_close(weighted_norm(x, torch.ones(8), weight, bias, 1e-6), whole)


def test_a_search_goes_on_from_its_file(tmp_path):
    first = searched(make("sparseprior_vit", prior="violin"), steps=2)
    first.save(tmp_path)
    model = make("sparseprior_vit", prior="violin")
    again = MaskSearch(model, 0.4, STRUCTURES)
    again.load(tmp_path)
    for group, mask in first.masks.items():
        assert torch.equal(again.masks[group], mask) and torch.equal(again.masks[group].grad, mask.grad)
    with pytest.raises(ValueError, match="of another model or other structures"):
        MaskSearch(make("sparseprior_swin"), 0.4, STRUCTURES).load(tmp_path)
    (tmp_path / SEARCH_FILE).unlink()
    with pytest.raises(ValueError, match="its run was no search"):
        again.load(tmp_path)


# ---- what is refused ------------------------------------------------------------------------------------------------


@each(
    "ratio, structures, options, message",
    [
        (0, PUBLISHED, {}, "ratio=0 must be a number above 0 and below 1"),
        (1.0, PUBLISHED, {}, "ratio=1.0 must be a number above 0 and below 1"),
        (True, PUBLISHED, {}, "ratio=True must be a number"),
        (0.5, (), {}, r"structures=\(\) must be a list of some of heads, head_width, mlp, width"),
        (0.5, ["head"], {}, r"structures=\['head'\] must be"),
        (0.5, "mlp", {}, "structures='mlp' must be"),
        (0.9, ("heads",), {}, r"ratio=0.9 must be at most 0\.\d+, which is all of heads"),
        (0.1, ("width",), {}, "ratio=0.1 cannot be met to 1 % with width, only 0.082"),
        (0.3, STRUCTURES, {"prior": "evit"}, "'evit' drops tokens by what all heads see"),
        (0.3, STRUCTURES, {"prior": "linformer"}, "mixer 'linformer' is not made of heads"),
        (0.3, STRUCTURES, {"prior": "irpe_qkv"}, r"value_table cannot be compressed"),
        (0.3, STRUCTURES, {"prior": "transformer_xl"}, r"content_bias cannot be compressed"),
        (0.3, STRUCTURES, {"hidden_act": "sigmoid"}, "hidden_act='sigmoid' is not 0 at 0"),
    ],
)
def test_bad_searches(ratio, structures, options, message):
    with pytest.raises(ValueError, match=message):
        MaskSearch(make("sparseprior_vit", **options), ratio, structures)


def test_an_iformer_with_an_activation_that_is_not_0_at_0():
    model = make("sparseprior_iformer", hidden_act="sigmoid")
    for structures in (("mlp",), ("width",)):  # the stem has channels, too
        with pytest.raises(ValueError, match="hidden_act='sigmoid' is not 0 at 0"):
            MaskSearch(model, 0.1, structures)
    check_smaller("sparseprior_iformer", ratio=0.1, structures=("head_width",), hidden_act="sigmoid")


def test_other_libraries_have_no_place_for_a_compressed_model(tmp_path):
    model = make("sparseprior_vit", use_distillation_token=False, num_register_tokens=0, layerscale_value=None)
    compressed_model(model, searched(model).kept()).save_pretrained(tmp_path / "compressed")
    with pytest.raises(ValueError, match="is compressed, which vit cannot express"):
        convert_checkpoint(tmp_path / "compressed", tmp_path / "vit", to="vit")
    convert_checkpoint(tmp_path / "compressed", tmp_path / "ours", prior="violin")
    assert load_whole_model(tmp_path / "ours").config.compressed is not None


def test_a_family_that_cannot_be_compressed_says_so():
    others = [name for name in FAMILIES if not FAMILIES[name].config_class.can_be_compressed]
    assert "sparseprior_timesformer" in others and not LARGER.keys() & others
    for name in others:
        model = FAMILIES[name].base(FAMILIES[name].make_config(**SMALL[name]))
        with pytest.raises(ValueError, match="cannot be compressed"):
            Units(model)
        with pytest.raises(ValueError, match="cannot be compressed"):
            FAMILIES[name].make_config(**SMALL[name], compressed={})


@each(
    "compressed, message",
    [
        ("half", "compressed='half' must be a map of heads, head_width"),
        ({"head": [[0], [1]]}, "head"),
        ({"heads": [[0]]}, r"heads=\[\[0\]\] must be a list with an entry for each layer"),
        ({"heads": [[], [0]]}, r"heads=\[\] of a layer must be different numbers in order, from 0 to 3"),
        ({"heads": [[1, 0], [0]]}, r"heads=\[1, 0\] of a layer"),
        ({"heads": [[4], [0]]}, r"heads=\[4\] of a layer"),
        ({"mlp_width": [0, 3]}, "mlp_width=0 must be"),
        ({"head_width": [2, 2**40]}, "head_width=.* must be at most"),
    ],
)
def test_bad_configs(compressed, message):
    with pytest.raises(ValueError, match=message):
        sp.SparsePriorViTConfig(**VIT, compressed=compressed)


@each(
    "compressed, message",
    [
        ({"value_width": [8]}, r"value_width=\[8\] must be a list with 3 numbers"),
        ({"stem_width": [6, 0]}, "stem_width=0 must be"),
        ({"conv": [6]}, "conv"),
    ],
)
def test_bad_configs_of_an_iformer(compressed, message):
    with pytest.raises(ValueError, match=message):
        sp.SparsePriorIformerConfig(**IFORMER, compressed=compressed)


def test_a_config_that_names_a_part_is_whole_in_the_rest():
    config = sp.SparsePriorViTConfig(**VIT, compressed={"mlp_width": [7, 9]})
    assert config.compressed == {
        "heads": [[0, 1, 2, 3]] * 2, "head_width": [6, 6], "scale_width": [6, 6], "mlp_width": [7, 9],
    }  # fmt: skip
    assert [layer.mlp.fc1.out_features for layer in sp.SparsePriorViTModel(config).layers] == [7, 9]
    config = sp.SparsePriorIformerConfig(**IFORMER, compressed={"conv_width": [5, 6, 7, 8], "head_width": [3, 4, 5]})
    assert config.compressed == {
        "heads": [[0]] * 3, "head_width": [3, 4, 5], "scale_width": [16, 10, 10], "mlp_width": [32, 40, 40],
        "value_width": [16, 20, 20], "conv_width": [5, 6, 7, 8], "stem_width": [6, 24],
    }  # fmt: skip
