"""FLOPs of every family of image models against torch's own count of a forward with dense attention."""

import math
from functools import cache

import pytest
import torch

from hf_sparseprior.analysis.flops import CONVENTIONS, model_flops
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.patterns.supports import SUPPORTS, build_mask
from hf_sparseprior.priors.low_rank import MIXERS
from tests.each import each
from tests.hf_sparseprior.analysis.torchs_flops import torchs_count

GREY = {"num_channels": 1, "image_mean": 0.5, "image_std": 0.5}
VIT = {
    "image_size": 32, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3,
    "intermediate_size": 40, "num_labels": 7,
}  # fmt: skip
# Windows of 3x3 in grids of 7x9 and 4x5, which are padded, and of 2x2 in a grid of 2x3.
SWIN = {
    "image_size": (28, 36), "embed_dim": 8, "depths": [2, 1, 2], "num_heads": [2, 4, 2], "window_size": 3,
    "num_labels": 5,
}  # fmt: skip
CONVIT = {
    "image_size": (28, 36), "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 5, "num_local_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 12, "num_labels": 5,
}  # fmt: skip
# Attention on maps of 4x5 and 2x3.
IFORMER = {
    "image_size": (64, 80), "hidden_sizes": [4, 6, 8, 16], "conv_depths": [1, 2, 1, 0],
    "attention_depths": [0, 0, 2, 1], "final_conv_depths": [0, 0, 1, 0], "key_reduction": [1, 1, 2, 4], "conv_ratio": 3,
    "mlp_ratio": 2, "num_labels": 5,
}  # fmt: skip
SMALL = {
    "sparseprior_vit": VIT,
    "sparseprior_swin": SWIN,
    "sparseprior_convit": CONVIT,
    "sparseprior_iformer": IFORMER,
}
# Presets in fewer layers, as those of a stage are alike; None: one in full depth, or all of them.
DEPTHS = {
    "sparseprior_vit": {"num_hidden_layers": 2},
    "sparseprior_swin": {"depths": (1, 1, 2, 1)},
    "sparseprior_convit": {"num_hidden_layers": 3, "num_local_layers": 2},
    "sparseprior_iformer": {},
}
WHOLE = ("vit_tiny", "swin_tiny", "convit_tiny")
# Of each family other models, and sizes of images.
OTHERS = {
    "sparseprior_vit": [
        ({"use_distillation_token": True}, (32, 32)),
        ({"use_distillation_token": True, "use_distillation_classifier": False, "num_register_tokens": 3}, (48, 16)),
        ({"use_class_token": False, "pooling": "mean", "position_embedding": "none"}, (32, 32)),
        ({"pooling": "class_token_and_mean", "layerscale_value": 0.1, "num_channels": 1}, (48, 16)),
        ({"num_labels": 0, "qkv_bias": False, "mlp_bias": False, "patch_size": (4, 8)}, (48, 16)),
    ],
    "sparseprior_swin": [
        ({}, (24, 48), (3, 3)),
        ({**GREY, "num_labels": 0, "qkv_bias": False, "mlp_ratio": 2.5}, (28, 36)),
        ({"patch_size": (4, 2), "depths": [3], "num_heads": [1]}, (5, 61)),
        ({"window_size": 50}, (28, 36), (5, 61)),
    ],
    "sparseprior_convit": [
        ({}, (8, 60)),
        ({**GREY, "num_labels": 0, "qkv_bias": True}, (28, 36)),
        ({"patch_size": (4, 2), "num_local_layers": 4, "pooling": "mean"}, (8, 60)),
        ({"num_local_layers": 0, "num_attention_heads": 1}, (28, 36)),
    ],
    "sparseprior_iformer": [
        ({}, (96, 64), (3, 3)),
        ({**GREY, "num_labels": 0}, (5, 61)),
        (
            {"use_distillation_classifier": True, "stem_kernel_size": 3, "kernel_size": 5, "position_kernel_size": 5},
            (64, 80),
        ),
    ],
}
REFUSED_EXTRAS = {"sparseprior_swin": ["swin_rpb"], "sparseprior_iformer": ["swin_rpb", "irpe_qkv"]}
ADDED = [
    (family, {"extras": [{"name": extra, **settings}]}, extra)
    for family in SMALL
    for extra, kind in EXTRAS.items()
    if kind.place != "model" and extra not in REFUSED_EXTRAS.get(family, [])
    for settings in [{}, *([{"squeeze_excitation": 5}] if extra == "localvit" else [])]
]
COMMON_ERRORS = [
    ({"image_size": 0}, "image_size=0 must be an integer of 1 or more"),
    ({"image_size": (28, 28, 3)}, r"image_size=\(28, 28, 3\) must be one number or \(height, width\)"),
    ({"convention": "macs"}, "convention='macs' must be one of multiply_adds, torch, torch_and_softmax"),
    ({"prior": "fibotention"}, "did you mean 'fibottention'"),
]
ERRORS = {
    "sparseprior_vit": [
        ({"image_size": 225}, "image_size=225x225 must be a multiple of the 8x8 patch"),
        ({"num_prefix_tokens": -1}, "num_prefix_tokens=-1 must be an integer of 0 or more"),
    ],
    "sparseprior_swin": [
        ({"num_prefix_tokens": 1}, "num_prefix_tokens=1 must be 0: a SparsePriorSwin has patches only"),
        ({"prior": "linformer"}, "'linformer' is for a whole image"),
        ({"prior": ["dense"]}, "a list of 1 must have one for each of 3 stages"),
    ],
    "sparseprior_convit": [
        ({"prior": "evit"}, "the gated layers of a ConViT need all patches"),
        ({"image_size": 30}, "image_size=30x30 must be a multiple of the 4x4 patch"),
    ],
    "sparseprior_iformer": [
        ({"num_prefix_tokens": 1}, "num_prefix_tokens=1 must be 0: a SparsePriorIformer has places only"),
        ({"prior": "linformer"}, "'linformer' is for values as wide as queries"),
        ({"prior": ["dense"]}, "a list of 1 must have one for each of 2 stages"),
    ],
}


def make_config(family, **options):
    return FAMILIES[family].make_config(**{**SMALL[family], **options})


def check_count(config, size):
    """What is counted is what torch counts; returns the count."""
    counted = model_flops(config, size, convention="torch")
    assert counted.total == torchs_count(config, *size)
    return counted


@pytest.mark.parametrize(
    ("family", "preset"), [(family, preset) for family in SMALL for preset in FAMILIES[family].presets]
)
def test_dense_presets_equal_torchs_count(family, preset):
    depths = {} if preset in WHOLE else DEPTHS[family]
    check_count(FAMILIES[family].make_config(preset, num_labels=10, **depths), (224, 224))


@each(
    "family, options, sizes",
    [(family, options, sizes) for family, others in OTHERS.items() for options, *sizes in others],
)
def test_other_models_and_sizes_equal_torchs_count(family, options, sizes):
    for size in sizes:
        check_count(make_config(family, **options), size)


@each("family, prior, extra", ADDED)
def test_extras_equal_torchs_count(family, prior, extra):
    prefixes = [{}, {"use_class_token": False, "pooling": "mean"}] if family == "sparseprior_vit" else [{}]
    for prefix in prefixes:
        config = make_config(family, prior=prior, **prefix)
        counted = check_count(config, config.image_size if isinstance(config.image_size, list) else (32, 32))
        plain = model_flops(config, convention="torch", prior="dense")
        assert (counted.total > plain.total) == (extra != "swin_rpb")
        assert (counted.attention > plain.attention) == (extra not in ("swin_rpb", "localvit"))
        if family == "sparseprior_convit":  # gated layers have none
            assert counted.layers[:2] == plain.layers[:2]


@each("mixer", [name for name in MIXERS if name != "softmax"])
def test_mixers_equal_torchs_count(mixer):
    check_count(make_config("sparseprior_convit", prior=mixer), (28, 36))


@pytest.mark.parametrize("family", SMALL)
def test_each_convention_scales_the_parts(family):
    config = make_config(family, prior="fibottention+violin")
    plain, torchs, softmax = (model_flops(config, convention=name) for name in CONVENTIONS)
    parts = plain.part("projections", "mlp", "merging")
    assert plain.total == plain.patch_embedding + plain.convolutions + plain.classifier + plain.attention + parts
    assert torchs.total == 2 * plain.total
    # Gated layers have two softmaxes over every pair.
    gated = 2 * 4 * 63**2 if family == "sparseprior_convit" else 0
    assert softmax.total - torchs.total == 5 * (sum(plain.attended_pairs) + gated)
    assert plain.decay == torchs.decay == softmax.decay
    assert plain.to_dict()["total"] == plain.total


@each("family, arguments, message", [(family, *case) for family in SMALL for case in [*COMMON_ERRORS, *ERRORS[family]]])
def test_bad_values_are_named(family, arguments, message):
    with pytest.raises(ValueError, match=message):
        model_flops(make_config(family), **arguments)


def test_every_family_of_images_is_here():
    shipped = {name for name, family in FAMILIES.items() if family.takes == "images" and "sparseprior_" in name}
    assert shipped == SMALL.keys() == OTHERS.keys() == ERRORS.keys()


@cache
def dense_count(family):
    config = make_config(family)
    return torchs_count(config, *(config.image_size if isinstance(config.image_size, list) else (32, 32)))


def masks_of(config, support):
    """The stage of each layer, and the pairs in one of its windows."""
    layers = [stage for stage in config.stages for _ in range(stage.num_layers)]
    for number, stage in enumerate(layers):
        sizes = {"num_heads": stage.num_heads, "num_tokens": math.prod(stage.grid), "grid": stage.grid}
        own, prefix = support if stage.takes_prior else "dense", config.prefix_tokens(stage)
        yield stage, build_mask(own, **sizes, num_prefix_tokens=prefix, layer=number)


def for_all_layers(family, prior):
    """By itself the last stages of a Swin would have no support."""
    return [prior] * 3 if family == "sparseprior_swin" else prior


# Those that leave pairs out on small grids.
NARROW = [
    *(name for name in SUPPORTS if not build_mask(name, num_heads=2, num_tokens=16, grid=(4, 4)).all()),
    *({"name": "window", "w": 1}, {"name": "neighborhood", "window": 1}),
]


@pytest.mark.parametrize("support", NARROW, ids=str)
@pytest.mark.parametrize("family", SMALL)
def test_sparse_models_are_torchs_dense_count_less_the_pairs_outside_the_masks(family, support):
    config, prior = make_config(family), for_all_layers(family, {"support": support})
    counted, dense = (model_flops(config, prior=own, convention="torch") for own in (prior, "dense"))
    outside, pairs = 0, counted.attended_pairs
    for (stage, mask), count, parts in zip(masks_of(config, support), pairs, dense.layers, strict=True):
        assert count == stage.num_windows * mask.sum()
        of_pair = (parts["qk"] + parts["av"]) // (stage.num_windows * mask.size)
        outside += stage.num_windows * (~mask).sum() * of_pair
    assert outside and counted.total == dense_count(family) - outside


@pytest.mark.parametrize("family", SMALL)
@each("name, learn_alpha", [("violin", True), ("violin", False), ("manhattan", True)])
def test_decay_operations_equal_a_count_of_the_masks(family, name, learn_alpha):
    """M is made once for all windows. Pairs of patches that see themselves alone: test_flops.py."""
    support, curves, build, apply = {"name": "window", "w": 2}, {"violin": 8, "manhattan": 1}[name], 0, 0
    prior = {"support": support, "decay": {"name": name, "learn_alpha": learn_alpha}}
    config = make_config(family, prior=for_all_layers(family, prior))
    for stage, mask in masks_of(config, support):
        if stage.takes_prior:
            prefix = config.prefix_tokens(stage)
            weighed = mask[:, prefix:, prefix:].sum()
            build += 3 * curves * weighed
            apply += stage.num_windows * (weighed + learn_alpha * mask.sum())
    assert model_flops(config).decay == {"build": build, "apply": apply}
    assert model_flops(config, prior="fibottention").decay is None


@pytest.mark.parametrize(  # weights of a ViT: test_attention_maps.py
    ("family", "prior"),
    [
        *(("sparseprior_swin", "fibottention"), ("sparseprior_swin", "random+violin")),
        *(("sparseprior_convit", "dense"), ("sparseprior_convit", "fibottention")),
        *(("sparseprior_iformer", "random+violin"), ("sparseprior_iformer", "fibottention")),
    ],
)
def test_pairs_are_the_weights_of_the_model(family, prior):
    config = make_config(family, prior=prior)
    torch.manual_seed(0)
    model = FAMILIES[family].base(config).eval()
    shifted = {"sparseprior_swin": {1, 4}}.get(family, set())  # windows that are shifted see less than is counted
    for size in ((32, 80), (16, 40)):
        with torch.no_grad():
            weights = model(torch.randn(1, 3, *size), output_attentions=True).attentions
        counted = model_flops(config, size).attended_pairs
        for layer, (own, pairs) in enumerate(zip(weights, counted, strict=True)):
            seen = int((own != 0).sum())
            assert seen <= pairs == counted[layer - 1] if layer in shifted else seen == pairs
