"""Maps of other strides, against loops; sizes that are no multiples of the patch; the config's checks."""

import math

import numpy as np
import pytest
import torch

from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.compression.units import Units
from hf_sparseprior.models.feature_maps import ChannelNorm, pad_to_patches, resampling
from hf_sparseprior.models.pretrained import load_changed_model
from tests.each import each
from tests.hf_sparseprior.small import SMALL, small

PLAIN = ["sparseprior_vit", "sparseprior_convit"]
IMAGES = [name for name, family in FAMILIES.items() if family.backbone is not None]


def backbone(name, **options):
    torch.manual_seed(0)
    config = small(name, **{"prior": "fibottention+violin", "initializer_range": 0.3, **options})
    return FAMILIES[name].backbone(config).eval()


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def doubled(layer, map_):
    """A transposed convolution of stride 2 in loops: each place becomes a square of four."""
    weight, bias = layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()
    _, height, width = map_.shape
    out = np.zeros((weight.shape[1], 2 * height, 2 * width))
    for row in range(2 * height):
        for column in range(2 * width):
            place = map_[:, row // 2, column // 2]
            out[:, row, column] = place @ weight[:, :, row % 2, column % 2] + bias
    return out


def halved(map_):
    """Max pooling of stride 2 in loops, the last window cut off at the edge."""
    height, width = (math.ceil(side / 2) for side in map_.shape[1:])
    out = np.zeros((map_.shape[0], height, width))
    for row in range(height):
        for column in range(width):
            out[:, row, column] = map_[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].max((1, 2))
    return out


def normed_gelu(norm, map_):
    mean, spread = map_.mean(0), np.sqrt(map_.var(0) + norm.eps)
    weight, bias = (value.detach().double().numpy()[:, None, None] for value in (norm.weight, norm.bias))
    value = (map_ - mean) / spread * weight + bias
    return value * 0.5 * (1 + np.vectorize(math.erf)(value / math.sqrt(2)))


def expected(layers, scale, map_):
    if scale >= 2:
        first, *others = layers
        map_ = doubled(first, map_)
        for norm, _, layer in zip(others[::3], others[1::3], others[2::3], strict=True):
            map_ = doubled(layer, normed_gelu(norm, map_))
    for _ in range(int(-math.log2(scale)) if scale < 1 else 0):
        map_ = halved(map_)
    return map_


@pytest.mark.parametrize("scale", [8, 4, 2, 1, 0.5, 0.25, 0.125])
def test_layers_of_each_scale_against_loops(scale):
    torch.manual_seed(0)
    layers, map_ = resampling(6, scale, 1e-5).double(), random(1, 6, 5, 3).double()
    with torch.no_grad():
        for value in layers.parameters():
            value.add_(0.3 * torch.randn_like(value))
        found = layers(map_)[0]
    assert found.shape[1:] == tuple(math.ceil(side * scale) for side in (5, 3))
    np.testing.assert_allclose(found.numpy(), expected(list(layers), scale, map_[0].numpy()), atol=1e-9)


@pytest.mark.parametrize("name", PLAIN)
def test_maps_are_those_of_the_grid_resampled(name):
    features = small(name).map_names
    scaled = backbone(name, out_features=features, map_scales=[2, 0.5, 1][: len(features)])
    plain = backbone(name, out_features=features)
    missing = plain.load_state_dict(scaled.state_dict(), strict=False)
    assert missing.missing_keys == []
    assert all(key.startswith("map_resampling.") for key in missing.unexpected_keys) and missing.unexpected_keys
    images = random(2, 3, 20, 28)
    with torch.no_grad():
        maps, originals = scaled(images).feature_maps, plain(images).feature_maps
        for feature, map_, original in zip(features, maps, originals, strict=True):
            assert torch.equal(map_, scaled.map_resampling[feature](original))
    assert [map_.shape[2:] for map_ in maps][:2] == [(10, 14), (3, 4)]


@pytest.mark.parametrize("name", IMAGES)
@each("size", [(13, 22), (16, 17), (3, 1)])
def test_images_are_padded_at_bottom_and_right(name, size):
    model = backbone(name, out_features=small(name).map_names)
    images, padded = random(2, 3, *size), torch.zeros(2, 3, *(4 * math.ceil(side / 4) for side in size))
    padded[..., : size[0], : size[1]] = images
    with torch.no_grad():
        maps, others = model(images).feature_maps, model(padded).feature_maps
    assert [map_.shape[1] for map_ in maps] == [map_.width for map_ in model.config.maps]
    for map_, other, about in zip(maps, others, model.config.maps, strict=True):
        assert torch.equal(map_, other)
        assert map_.shape[2:] == tuple(
            math.ceil(side / stride) for side, stride in zip(size, about.stride, strict=True)
        )


@pytest.mark.parametrize("name", PLAIN)
def test_prefix_tokens_of_maps_that_stay_tokens(name):
    model = backbone(name, out_features=small(name).map_names, reshape_hidden_states=False)
    with torch.no_grad():
        maps = model(random(1, 3, 8, 12)).feature_maps
    assert [map_.shape[1] for map_ in maps] == [6 + map_.prefix for map_ in model.config.maps]


def test_padding_leaves_other_shapes_alone():
    images = random(1, 3, 8, 8)
    assert pad_to_patches(images, (4, 8)) is images
    assert pad_to_patches(images[0], (3, 3)).shape == (3, 8, 8)


@pytest.mark.parametrize("name", PLAIN)
def test_weights_of_the_layers_are_drawn_saved_and_left_behind(name, tmp_path):
    options = {"out_features": small(name).map_names[-2:], "map_scales": (4, 0.5), "num_labels": 3}
    model = backbone(name, **options)
    deviation = model.map_resampling[model.out_features[0]][0].weight.std().item()
    assert 0.2 < deviation < 0.4  # initializer_range
    model.save_pretrained(tmp_path / "backbone")
    again = FAMILIES[name].backbone.from_pretrained(tmp_path / "backbone").eval()
    assert again.config.map_scales == [4, 0.5]
    images = random(1, 3, 9, 11)
    with torch.no_grad():
        for map_, other in zip(again(images).feature_maps, model(images).feature_maps, strict=True):
            assert torch.equal(map_, other)
    bare = FAMILIES[name].base.from_pretrained(tmp_path / "backbone")
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in bare.state_dict().items())
    _, anew = load_changed_model(tmp_path / "backbone", FAMILIES[name].image_classifier, num_labels=3)
    assert all(key.startswith("classifier.") for key in anew)
    bare.save_pretrained(tmp_path / "bare")
    fresh = FAMILIES[name].backbone.from_pretrained(tmp_path / "bare", map_scales=[2], out_features=["stage1"])
    assert fresh.map_resampling["stage1"][0].weight.isfinite().all()
    assert 0.2 < fresh.map_resampling["stage1"][0].weight.std().item() < 0.4


@pytest.mark.parametrize("name", PLAIN)
def test_it_counts_and_says_how_its_layers_can_be_cut(name):
    plain, scaled = (backbone(name, out_features=["stem", "stage1"], map_scales=scales) for scales in (None, [8, 0.5]))
    width = plain.config.hidden_size
    assert scaled.config.num_weights - plain.config.num_weights == 3 * 4 * width**2
    assert isinstance(scaled.map_resampling["stem"][1], ChannelNorm)
    units = Units(scaled)
    assert {name for name in units.axes if name.startswith("map_resampling")} == {
        f"map_resampling.{key}" for key in scaled.map_resampling.state_dict()
    }


@pytest.mark.parametrize("name", PLAIN)
@each(
    "scales, message",
    [
        ([3], r"map_scales=\[3\] must be None or powers of two from 1/8 to 8"),
        ([16], "powers of two"), ([0], "powers of two"), ([-2], "powers of two"), ([], "powers of two"),
        ([True], "powers of two"), ("4", "map_scales='4' must be None or powers"), (4, "map_scales=4 must be None or"),
        ([float("nan")], "powers of two"), ([None], "powers of two"), ([[4]], "powers of two"), ({}, "powers of two"),
        ([4, 2], r"map_scales=\[4, 2\] must have one number for each of out_features=\['stage"),
    ],
)  # fmt: skip
def test_bad_scales_are_refused(name, scales, message):
    with pytest.raises(ValueError, match=message):
        small(name, map_scales=scales)


@pytest.mark.parametrize("name", PLAIN)
def test_scales_without_maps_are_refused(name):
    with pytest.raises(ValueError, match=r"map_scales=\[2\] needs reshape_hidden_states=True"):
        small(name, map_scales=[2], reshape_hidden_states=False)
    model = small(name, map_scales=[2])
    model.out_features = ["stem", "stage1"]
    with pytest.raises(ValueError, match=r"map_scales=\[2\] must have one number for each of out_features"):
        FAMILIES[name].backbone(model)


def test_a_pyramid_and_a_model_without_a_backbone_refuse_them():
    for name in ("sparseprior_swin", "sparseprior_iformer"):
        with pytest.raises(ValueError, match="'map_scales' is no field of"):
            small(name, map_scales=[2])
    with pytest.raises(ValueError, match=r"map_scales=\[2\] must be None: a SparsePriorTimesformerConfig has no back"):
        FAMILIES["sparseprior_timesformer"].config_class(**SMALL["sparseprior_timesformer"], map_scales=[2])
