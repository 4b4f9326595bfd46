"""SparsePriorSwin against transformers' Swin, and against attention written out query by query in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
import transformers

import hf_sparseprior as sp
from hf_sparseprior.attention.request import CallOptions
from hf_sparseprior.patterns.curves import curve_rank
from hf_sparseprior.patterns.supports import head_offsets, layer_order
from hf_sparseprior.patterns.windows import window_regions, windowed_mask
from hf_sparseprior.priors.prior import is_prior_weight
from tests.hf_sparseprior.small import noise, scatter

SIZES = {
    "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2, 2], "num_heads": [2, 2, 4], "window_size": 4,
}  # fmt: skip
# Published (Liu et al. 2021, Table 1): 28, 50 and 88 million.
PARAMETERS = {"swin_tiny": 28_288_354, "swin_small": 49_606_258, "swin_base": 87_768_224}


def images(height, width=None, batch=2):
    return noise(batch, 3, height, width or height)


def our_names(state):
    """Weights of transformers' Swin under our names."""
    renamed = {}
    for key, value in state.items():
        key = key.replace("patch_embeddings.projection", "projection").replace("encoder.layers", "stages")
        key = key.replace(".blocks.", ".layers.").replace("hidden_states_norms", "map_norms")
        if key.endswith("relative_position_bias_table"):
            key = key.replace("relative_position_bias_table", "bias_table")
            side = math.isqrt(len(value))
            value = value.T.reshape(-1, side, side)
        renamed[key] = value
    return renamed


def twins(cls="ForImageClassification", prior="dense", **options):
    """transformers' model and ours, with the same weights."""
    theirs = getattr(transformers, f"Swin{cls}")(transformers.SwinConfig(**{**SIZES, **options}, num_labels=5))
    scatter(theirs)
    ours = getattr(sp, f"SparsePriorSwin{cls}")(
        sp.SparsePriorSwinConfig(**{**SIZES, **options}, num_labels=5, prior=prior)
    ).eval()
    state = our_names(theirs.state_dict())
    if cls == "Backbone":
        state = {key.removeprefix("swin."): value for key, value in state.items()}
    result = ours.load_state_dict(state, strict=False)
    assert not result.unexpected_keys and all(map(is_prior_weight, result.missing_keys))
    return theirs, ours


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


# ---- dense ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, (32, 32)),
        ({}, (52, 30)),  # windows are padded, and in patch merging a side is odd
        ({"window_size": 3}, (31, 31)),  # patches are padded, too
        ({"window_size": 8, "depths": [2, 2], "num_heads": [2, 4]}, (32, 32)),  # the second stage is one window
        ({"qkv_bias": False, "mlp_ratio": 2, "hidden_act": "relu", "layer_norm_eps": 1e-3}, (32, 32)),
        ({"patch_size": 4, "image_size": 32, "depths": [1, 3], "num_heads": [4, 2], "window_size": 2}, (48, 32)),
    ],
)
def test_dense_it_is_transformers_swin(options, size):
    theirs, ours = twins(**options)
    pixels = images(*size)
    if options.get("layer_norm_eps"):  # theirs is fixed in the embedding and in patch merging
        for module in theirs.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-3
    with torch.no_grad():
        expected, output = (model(pixels, output_hidden_states=True) for model in (theirs, ours))
    close(output.logits, expected.logits)
    for name in ("hidden_states", "reshaped_hidden_states"):
        for own, other in zip(output[name], expected[name], strict=True):
            close(own, other)


def test_training_gives_the_gradients_of_transformers_swin():
    theirs, ours = twins(drop_path_rate=0.0)
    labels = torch.tensor([1, 4])
    for model in (theirs, ours):
        model.train()(images(36), labels=labels).loss.backward()
    expected = our_names({name: value.grad for name, value in theirs.named_parameters()})
    for name, value in ours.named_parameters():
        close(value.grad, expected[name])


@pytest.mark.parametrize(
    ("stages", "size"), [(["stem", "stage1", "stage2", "stage3"], (32, 32)), (["stage2"], (52, 30))]
)
def test_the_backbone_is_transformers_swin_backbone(stages, size):
    theirs, ours = twins("Backbone", out_features=stages)  # the last stage is one window, which is shifted here
    with torch.no_grad():
        expected, output = theirs(images(*size)), ours(images(*size))
    assert ours.channels == theirs.channels and len(output.feature_maps) == len(stages)
    for own, other in zip(output.feature_maps, expected.feature_maps, strict=True):
        close(own, other)


def test_attention_weights_are_those_of_transformers():
    theirs, ours = twins(depths=[1, 1, 1])  # theirs are of the last layer of each stage
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        expected, output = (model(images(32), output_attentions=True) for model in (theirs, ours))
    for own, other in zip(output.attentions, expected.attentions, strict=True):
        close(own, other)


@pytest.mark.parametrize("preset", PARAMETERS)
def test_published_sizes(preset):
    with torch.device("meta"):
        model = sp.SparsePriorSwinForImageClassification(sp.SparsePriorSwinConfig.from_preset(preset, num_labels=1000))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[preset]


# ---- priors ---------------------------------------------------------------------------------------------------------


def places(top, left, window, grid, shift):
    """Row and column of each patch of a window in the image before it was rolled."""
    return [((top + i // window + shift) % grid[0], (left + i % window + shift) % grid[1]) for i in range(window**2)]


def seen_by(support, heads, layer, window, grid, shift):
    """For each window, head and patch the keys that it sees, from offsets and places in the image alone."""
    offsets = [None] * heads
    if support is not None:
        own = head_offsets("fibottention", num_heads=heads, num_tokens=window**2, **support)
        offsets = [own[head] for head in layer_order(heads, layer, 0)]
    found = {}
    for top in range(0, grid[0], window):
        for left in range(0, grid[1], window):
            place = places(top, left, window, grid, shift)
            for head in range(heads):
                for a, (row, column) in enumerate(place):
                    near = [b for b, (y, x) in enumerate(place) if max(abs(y - row), abs(x - column)) < window]
                    keys = [b for b in near if offsets[head] is None or abs(a - b) in offsets[head]]
                    found[top, left, head, a] = keys or [a]
    return found


def attention_by_hand(layer, maps, shift, support, violin):
    """`SparsePriorSwinAttention` on float64 maps (B, H, W, C), query by query."""
    heads, window = layer.num_heads, layer.window[0]
    grid, out = maps.shape[1:3], torch.zeros_like(maps)
    q, k, v = (projection(maps).unflatten(-1, (heads, -1)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    seen = seen_by(support, heads, layer.layer_idx, window, grid, shift)
    table = layer.relative_position_bias.bias_table
    if violin:
        curves = ("snake", "zigzag", "peano", "hilbert")
        ranks = [curve_rank(c, (window, window), transposed=t).ravel() for c in curves for t in (False, True)]
        gammas, alpha = torch.sigmoid(layer.decay_bias.beta.double()), layer.decay_bias.alpha.double()
    for (top, left, head, a), keys in seen.items():
        place = places(top, left, window, grid, shift)
        row, column = place[a]
        logits = []
        for b in keys:
            y, x = place[b]
            logit = (q[:, row, column, head] * k[:, y, x, head]).sum(-1) / math.sqrt(q.shape[-1])
            if violin:
                weight = sum(g[head] ** abs(int(r[a]) - int(r[b])) for g, r in zip(gammas, ranks, strict=True)) / 8
                logit = logit * alpha[head] * weight
            dy, dx = a // window - b // window, a % window - b % window
            logits.append(logit + table[head, dy + window - 1, dx + window - 1])
        shares = torch.stack(logits, 1).softmax(1)
        values = torch.stack([v[:, y, x, head] for y, x in (place[b] for b in keys)], 1)
        width = values.shape[-1]
        out[:, row, column, head * width : (head + 1) * width] = (shares.unsqueeze(-1) * values).sum(1)
    return layer.o_proj(out)


FIB = {"w_min": 1, "w_max": 15}


@pytest.mark.parametrize(
    ("support", "violin", "shift"), [(None, False, 2), (FIB, False, 2), (None, True, 2), (FIB, True, 0), (FIB, True, 2)]
)
def test_windows_are_attended_as_written_by_hand(support, violin, shift):
    prior = {"support": {"name": "fibottention", **FIB} if support else "dense", "decay": "violin" if violin else None}
    config = sp.SparsePriorSwinConfig(**{**SIZES, "depths": [2], "num_heads": [2]}, prior=prior)
    layer = scatter(sp.SparsePriorSwinModel(config).double()).stages[0].layers[1].attention
    maps = torch.randn(2, 8, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = attention_by_hand(layer, maps, shift, support, violin)
    seen = seen_by(support, 2, 1, 4, (8, 12), shift)
    corners = [(top, left) for top in (0, 4) for left in (0, 4, 8)]
    for backend in ("auto", "reference"):
        with torch.no_grad():
            out, weights = layer(maps, shift, CallOptions(True, backend=backend))
            alone, _ = layer(maps, shift, CallOptions(backend=backend))
        torch.testing.assert_close(out, expected, atol=1e-9, rtol=0)
        torch.testing.assert_close(alone, expected, atol=1e-9, rtol=0)
        assert weights.shape == (2 * 6, 2, 16, 16)
        for (number, (top, left)), head, a in itertools.product(enumerate(corners), range(2), range(16)):
            assert weights[number, head, a].nonzero().ravel().tolist() == seen[top, left, head, a]


def test_a_patch_whose_keys_are_all_beyond_the_shift_sees_itself():
    regions = window_regions((8, 8), (4, 4), (2, 2))
    mask = np.abs(np.arange(16)[:, None] - np.arange(16)[None]) == 10  # one distance
    allowed = windowed_mask(regions, mask[None])
    lonely = ~(regions[:, None] & mask).any(-1)
    assert lonely.any() and not lonely.all() and allowed.any(-1).all()
    assert (allowed[lonely].sum(-1) == 1).all()
    window, head, patch = np.nonzero(lonely)
    assert allowed[window, head, patch, patch].all()
    assert (allowed[~lonely] == (regions[:, None] & mask)[~lonely]).all()


@pytest.mark.parametrize("mask_fill", ["neg_inf", "zero"])
def test_pruned_pairs_within_shifted_windows(mask_fill):
    """With "zero" pruned pairs keep exp(0), those beyond the shift never do."""
    prior = {"support": {"name": "window", "w": 1, "mask_fill": mask_fill}}
    config = sp.SparsePriorSwinConfig(**{**SIZES, "depths": [2], "num_heads": [2]}, prior=prior)
    layer = scatter(sp.SparsePriorSwinModel(config).double()).stages[0].layers[1].attention
    maps = torch.randn(1, 8, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        _, weights = layer(maps, 2, CallOptions(True))
    regions = torch.from_numpy(window_regions((8, 8), (4, 4), (2, 2)))
    band = (torch.arange(16)[:, None] - torch.arange(16)[None]).abs() <= 1
    expected = regions & band if mask_fill == "neg_inf" else regions
    expected = expected | (~expected.any(-1, keepdim=True) & torch.eye(16, dtype=torch.bool))
    assert torch.equal(weights != 0, expected[:, None].expand_as(weights))


@pytest.mark.parametrize("prior", ["fibottention", "violin", "fibottention+violin", "topk", "irpe_qkv"])
def test_apply_prior_to_transformers_swin_gives_the_same_numbers(prior):
    theirs, ours = twins(prior=prior)
    with torch.no_grad():
        plain = ours(images(32)).logits if prior == "irpe_qkv" else theirs(images(32)).logits
        sp.apply_prior(theirs, prior)
        for own, other in zip(prior_weights(ours), prior_weights(theirs), strict=True):
            own.uniform_(0.5, 2.0)
            other.copy_(own)
        expected, output = theirs(images(32)).logits, ours(images(32)).logits
    close(output, expected)
    assert (output - plain).abs().max() > 1e-3


def prior_weights(model):
    return [parameter for name, parameter in model.named_parameters() if is_prior_weight(name)]


def test_one_prior_puts_its_support_into_the_first_two_stages():
    config = sp.SparsePriorSwinConfig(**SIZES, prior="fibottention+violin+irpe_k")
    assert [prior["support"]["name"] for prior in config.prior] == ["fibottention", "fibottention", "dense"]
    assert all(prior["decay"]["name"] == "violin" and len(prior["extras"]) == 1 for prior in config.prior)
    given = ["dense", "violin", {"support": "fibottention"}]
    listed = sp.SparsePriorSwinConfig(**SIZES, prior=given)
    assert [prior["support"]["name"] for prior in listed.prior] == ["dense", "dense", "fibottention"]
    again = sp.SparsePriorSwinConfig.from_dict(listed.to_dict())
    assert again.prior == listed.prior and again.prior_name == "dense, violin, fibottention"


def test_a_stage_smaller_than_a_window_is_one_window():
    config = sp.SparsePriorSwinConfig(**{**SIZES, "window_size": 7})
    assert config.grids == [(16, 16), (8, 8), (4, 4)] and config.windows == [7, 7, 4]
    assert [stage.num_windows for stage in config.stages] == [9, 4, 1]
    model = scatter(sp.SparsePriorSwinModel(config))
    tables = [stage.layers[0].attention.relative_position_bias.bias_table.shape for stage in model.stages]
    assert tables == [(2, 13, 13), (2, 13, 13), (4, 7, 7)]
    with torch.no_grad():
        assert model(images(64)).last_hidden_state.isfinite().all()  # the last stage has four windows now


def test_a_batch_of_no_image():
    """A detector's crops may be none; the second layer's windows are shifted and have a bias each."""
    for prior in ("dense", "window", "violin", "learned_order", "irpe_qkv", "topk"):
        model = sp.SparsePriorSwinModel(sp.SparsePriorSwinConfig(**SIZES, prior=prior)).eval()
        with torch.no_grad():
            assert model(images(32, batch=0)).last_hidden_state.shape == (0, 16, 32), prior
