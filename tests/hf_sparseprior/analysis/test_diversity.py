import itertools

import numpy as np
import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.analysis.diversity import head_diversity
from hf_sparseprior.analysis.layers import attention_weights, find_attention, watch_heads
from tests.each import each
from tests.hf_sparseprior.adapters.stock_models import STOCK

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "num_labels": 3}
GRID = {"image_size": (12, 20), "patch_size": 4}


def as_printed(heads):
    """diversity(X) and the mean distance of one image, term by term. heads: (H, T, D) in float64."""
    count = len(heads)
    total = distances = 0.0
    for i, j in itertools.combinations(range(count), 2):
        difference = norm_i = norm_j = 0.0
        for token, channel in np.ndindex(heads.shape[1:]):
            difference += (heads[i, token, channel] - heads[j, token, channel]) ** 2
            norm_i += heads[i, token, channel] ** 2
            norm_j += heads[j, token, channel] ** 2
        total += difference**0.5 / (norm_i**0.5 + norm_j**0.5)
        distances += difference**0.5
    return 2 / (count * (count - 1)) * total, 2 / (count * (count - 1)) * distances


def random_heads(generator, heads, tokens, width):
    """softmax(A_i) V_i of random logits, of which a random half is left out."""
    logits = generator.normal(size=(heads, tokens, tokens))
    logits[generator.random(logits.shape) < 0.5] = -np.inf
    logits[:, np.arange(tokens), np.arange(tokens)] = 0.0
    weights = np.exp(logits)
    return weights / weights.sum(-1, keepdims=True) @ generator.normal(size=(heads, tokens, width))


@pytest.mark.parametrize(("heads", "tokens", "width"), [(2, 1, 1), (3, 7, 4), (6, 5, 2)])
def test_random_attention_equals_the_printed_formula(heads, tokens, width):
    generator = np.random.default_rng(heads)
    images = np.stack([random_heads(generator, heads, tokens, width) for _ in range(4)])
    expected = np.array([as_printed(image) for image in images])
    found = head_diversity(torch.tensor(images))
    np.testing.assert_allclose(found.relative, expected[:, 0], rtol=1e-12)
    np.testing.assert_allclose(found.distance, expected[:, 1], rtol=1e-12)


def test_closed_cases():
    one = torch.zeros(5, 8)
    one[:, :3] = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    other = one.roll(4, dims=1)  # zero where the first is not, with the same norm
    cases = {0.0: [one, one, one], 1.0: [one, -one], 2**-0.5: [one, other], 1 / 3: [one, 2 * one]}
    for expected, heads in cases.items():
        assert head_diversity(torch.stack(heads)[None]).relative.item() == pytest.approx(expected, abs=1e-12)
    nothing = torch.zeros_like(one)
    assert head_diversity(torch.stack([nothing, nothing])[None]).relative.item() == 0
    assert head_diversity(torch.stack([nothing, one])[None]).relative.item() == 1
    # The largest value for three heads: if two are opposite to each other, the third cannot be opposite to both.
    assert head_diversity(torch.stack([one, -one, nothing])[None]).relative.item() == pytest.approx(1)


def test_nearly_equal_heads_keep_their_small_difference():
    one = 1000 + torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[0, 0] += 0.25
    found = head_diversity(torch.stack([one, other])[None])
    assert found.distance.item() == pytest.approx(0.25, rel=1e-6)


def test_a_single_head_has_no_diversity():
    for shape in ((1, 1, 5, 8), (2, 5, 8)):
        with pytest.raises(ValueError, match="2 heads or more"):
            head_diversity(torch.zeros(shape))


# ---- what models give -----------------------------------------------------------------------------------------------


def heads_and_layers(model, inputs):
    seen = {}
    attention = find_attention(model)
    with torch.no_grad(), watch_heads(attention, lambda layer, heads: seen.__setitem__(layer, heads)):
        model(**inputs)
    return seen, attention


def values_of(model, inputs):
    """V (B, H, T, D) of every layer, as its own linear layer gives them."""
    found, heads = [], find_attention(model).layers[0].num_heads
    modules = [module for name, module in model.named_modules() if name.endswith("v_proj")]
    handles = [module.register_forward_hook(lambda _, __, out: found.append(out)) for module in modules]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return [out.unflatten(-1, (heads, -1)).transpose(1, 2) for out in found]


@pytest.mark.parametrize("prior", ["dense", "fibottention+violin"])
def test_the_heads_of_our_models_are_weights_times_values(prior):
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig(prior=prior, initializer_range=0.3, num_register_tokens=1, **GRID, **SMALL)
    model = sp.SparsePriorViTForImageClassification(config).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 12, 20)}
    seen, attention = heads_and_layers(model, inputs)
    assert attention.prior_name == prior and attention.grid == (3, 5) and attention.num_prefix_tokens == 2
    weights, values = attention_weights(model, inputs["pixel_values"]), values_of(model, inputs)
    assert sorted(seen) == [0, 1]
    for layer, heads in seen.items():
        torch.testing.assert_close(heads, weights[layer] @ values[layer], rtol=1e-4, atol=1e-5)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("family", "prior"),
    [
        *((family, None) for family in ("vit", "msn", "dinov2_registers", "beit", "siglip")),
        *((family, "fibottention+violin") for family in ("vit", "deit", "dinov2", "dinov3", "clip", "ijepa")),
    ],
)
def test_the_heads_of_stock_models_are_weights_times_values(family, prior):
    case = STOCK[family]
    model = case.build()
    model.set_attn_implementation("eager")
    if prior:
        sp.apply_prior(model, prior)
    seen, attention = heads_and_layers(model, case.example())
    assert (attention.grid, attention.num_prefix_tokens) == (case.grid, case.prefix)
    assert attention.prior_name == (prior or "dense")
    weights, values = attention_weights(model, case.example()["pixel_values"]), values_of(model, case.example())
    assert len(seen) == 3
    for layer, heads in seen.items():
        torch.testing.assert_close(heads, weights[layer] @ values[layer], rtol=1e-4, atol=1e-5)


@each("family", ["swin", "mae", "videomae_masked"])
def test_models_whose_layers_do_not_see_the_whole_grid_are_refused(family):
    with pytest.raises(ValueError, match="do not see all patches"):
        find_attention(STOCK[family].build())


def test_models_whose_layers_see_several_frames_have_no_grid():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    options = {"image_size": 8, "patch_size": 4, "num_frames": 3, "attention_type": "joint_space_time"}
    joint = sp.SparsePriorTimesformerModel(sp.SparsePriorTimesformerConfig(**sizes, **options))
    for model, found in ((STOCK["vivit"].build(), "2 frames of 8x8"), (joint, "3 frames of 2x2")):
        with pytest.raises(ValueError, match=f"cannot be analysed in this way: its layers see {found} patches"):
            _ = find_attention(model).grid


SWIN = {
    "image_size": (28, 36), "embed_dim": 8, "depths": [2, 1, 2], "num_heads": [2, 4, 2], "window_size": 3,
}  # fmt: skip


def test_the_heads_of_a_model_with_windows_are_weights_times_values_window_by_window():
    torch.manual_seed(0)
    prior = "fibottention+violin"
    model = sp.SparsePriorSwinModel(sp.SparsePriorSwinConfig(prior=prior, initializer_range=0.3, **SWIN)).eval()
    images = torch.randn(2, 3, 28, 36)
    found = []
    for name, module in model.named_modules():
        if name.endswith("v_proj"):
            module.register_forward_hook(lambda _, __, out: found.append(out))
    seen, attention = heads_and_layers(model, {"pixel_values": images})
    assert attention.prior_name == "fibottention+violin, violin" and sorted(seen) == list(range(5))
    assert [layer.grid for layer in attention.layers] == [(3, 3)] * 3 + [(2, 2)] * 2
    weights = attention_weights_of(model, images)
    for layer in (0, 2, 3):  # windows that are not shifted
        side, heads, values = attention.layers[layer].grid[0], attention.layers[layer].num_heads, found[layer]
        height, width = values.shape[1:3]
        place = 0
        outputs = seen[layer].unflatten(2, (height, width))
        for image, row, column in itertools.product(range(2), range(0, height, side), range(0, width, side)):
            window = slice(row, row + side), slice(column, column + side)
            own = values[image][window].flatten(0, 1).unflatten(-1, (heads, -1)).transpose(0, 1)
            expected = weights[layer][place] @ own
            torch.testing.assert_close(outputs[image][:, *window].flatten(1, 2), expected, rtol=1e-4, atol=1e-5)
            place += 1
        assert place == len(weights[layer])
    with pytest.raises(ValueError, match="SparsePriorSwinModel cannot be analysed in this way: its layers have win"):
        _ = attention.grid


def attention_weights_of(model, images):
    with torch.no_grad():
        return model(images, output_attentions=True).attentions


def test_an_attention_that_forms_no_weights_is_named():
    model = STOCK["vit"].build()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="eager"):
        attention_weights(model, STOCK["vit"].example()["pixel_values"])
