"""SparsePriorConvit against timm's ConVit, and against a forward written from the paper in float64."""

import math

import numpy as np
import peft
import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.analysis.decays import learned_decay_masks, learned_decays
from hf_sparseprior.analysis.layers import attention_weights, find_attention
from hf_sparseprior.attention.request import CallOptions
from hf_sparseprior.patterns import relative_offsets
from hf_sparseprior.priors.prior import is_prior_weight
from hf_sparseprior.training.distillation import Distillation, Teacher
from tests.hf_sparseprior.small import noise, scatter
from tests.timm_oracle import import_timm

SIZES = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 24, "num_local_layers": 2,
}  # fmt: skip
THEIRS = {
    "hidden_size": "embed_dim", "num_hidden_layers": "depth", "num_attention_heads": "num_heads",
    "num_local_layers": "local_up_to_layer", "image_size": "img_size",
}  # fmt: skip
# d'Ascoli et al. 2021, Table 1: 6, 27 and 86 million.
PARAMETERS = {"convit_tiny": 5_710_512, "convit_small": 27_777_322, "convit_base": 86_540_040}


def images(height, width=None, batch=2):
    return noise(batch, 3, height, width or height)


def our_names(state):
    """Weights of timm's ConVit under our names."""
    renamed = {}
    for key, value in state.items():
        for theirs, ours in {
            "blocks.": "convit.layers.", "norm1": "layernorm_before", "norm2": "layernorm_after",
            "patch_embed.proj": "convit.embeddings.projection", "cls_token": "convit.embeddings.class_token",
            "pos_embed": "convit.embeddings.position_embeddings", "attn.gating_param": "attention.gate",
            "attn.v.": "attention.v_proj.", "attn.proj.": "attention.o_proj.", "attn.pos_proj": "attention.pos_proj",
        }.items():  # fmt: skip
            key = key.replace(theirs, ours)
        key = {"norm.weight": "convit.layernorm.weight", "norm.bias": "convit.layernorm.bias"}.get(key, key)
        key = key.replace("head.", "classifier.")
        parts = {"attn.qk.": "qk", "attn.qkv.": "qkv"}
        joint = next((part for part in parts if part in key), None)
        if joint is None:
            renamed[key] = value
        else:
            for letter, own in zip(parts[joint], value.chunk(len(parts[joint])), strict=True):
                renamed[key.replace(joint, f"attention.{letter}_proj.")] = own
    return renamed


def timms(**options):
    """timm's own class with our sizes."""
    import_timm()
    from timm.models.convit import ConVit

    sizes = {THEIRS.get(name, name): value for name, value in {**SIZES, **options}.items()}
    sizes["mlp_ratio"] = sizes.pop("intermediate_size") / sizes["embed_dim"]
    sizes["embed_dim"] //= sizes["num_heads"]
    pooling = {"mean": "avg", "class_token": "token"}[sizes.pop("pooling", "class_token")]
    positions = sizes.pop("position_embedding", "learned") == "learned"
    return scatter(ConVit(**sizes, num_classes=5, global_pool=pooling, use_pos_embed=positions))


def twins(prior="dense", **options):
    """timm's model and ours, with the same weights."""
    theirs = timms(**options)
    ours = sp.SparsePriorConvitForImageClassification(
        sp.SparsePriorConvitConfig(**{**SIZES, **options}, num_labels=5, prior=prior)
    ).eval()
    result = ours.load_state_dict(our_names(theirs.state_dict()), strict=False)
    assert not result.unexpected_keys and all(map(is_prior_weight, result.missing_keys))
    return theirs, ours


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


# ---- dense ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_local_layers": 3, "qkv_bias": True, "pooling": "mean"},
        {"num_local_layers": 0, "patch_size": 4},
        {"num_attention_heads": 9, "hidden_size": 36, "position_embedding": "none", "image_size": 40},
        {"num_attention_heads": 1, "num_hidden_layers": 2, "num_local_layers": 1},
    ],
    ids=str,
)
def test_dense_it_is_timms_convit(options):
    theirs, ours = twins(**options)
    pixels = images(ours.config.image_size)
    for implementation in ("sdpa", "eager"):
        ours.set_attn_implementation(implementation)
        with torch.no_grad():
            close(ours(pixels).logits, theirs(pixels))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_training_gives_the_gradients_of_timms_convit(implementation):
    theirs, ours = twins()
    ours.set_attn_implementation(implementation)
    labels = torch.tensor([1, 4])
    torch.nn.functional.cross_entropy(theirs.train()(images(32)), labels).backward()
    ours.train()(images(32), labels=labels).loss.backward()
    expected = our_names({name: value.grad for name, value in theirs.named_parameters()})
    compared = dict(ours.named_parameters())
    assert compared.keys() == expected.keys()
    for name, value in compared.items():
        close(value.grad, expected[name])


@pytest.mark.parametrize("norm", [True, False])
def test_the_backbones_maps_are_timms(norm):
    theirs, ours = twins()
    names = ours.config.map_names
    backbone = sp.SparsePriorConvitBackbone(
        sp.SparsePriorConvitConfig(**SIZES, out_features=names, apply_layernorm=norm)
    ).eval()
    backbone.load_state_dict(ours.convit.state_dict())
    with torch.no_grad():
        maps = backbone(images(32)).feature_maps
        expected = theirs.forward_intermediates(images(32), norm=norm, intermediates_only=True)
        embedded = theirs.patch_embed(images(32)) + theirs.pos_embed
    assert len(maps) == len(expected) + 1 == 5
    for own, other in zip(maps[1:], expected, strict=True):
        close(own, other)
    close(maps[0].flatten(2).transpose(1, 2), theirs.norm(embedded) if norm else embedded)


@pytest.mark.parametrize("preset", PARAMETERS)
def test_published_sizes(preset):
    timm = import_timm()
    with torch.device("meta"):
        model = sp.SparsePriorConvitForImageClassification(
            sp.SparsePriorConvitConfig.from_preset(preset, num_labels=1000)
        )
        theirs = timm.create_model(preset)
    counts = [sum(parameter.numel() for parameter in each.parameters()) for each in (model, theirs)]
    assert counts == [PARAMETERS[preset]] * 2
    config = model.config
    assert (theirs.local_up_to_layer, theirs.locality_strength) == (config.num_local_layers, config.locality_strength)
    assert {block.norm1.eps for block in theirs.blocks} == {config.layer_norm_eps}
    # VIOLIN adds nine scalars for each head of the two plain layers.
    with torch.device("meta"):
        model = sp.SparsePriorConvitModel(sp.SparsePriorConvitConfig.from_preset(preset, prior="violin"))
    added = {name: value.numel() for name, value in model.named_parameters() if "decay_bias" in name}
    heads = {"convit_tiny": 4, "convit_small": 9, "convit_base": 16}[preset]
    assert sum(added.values()) == 2 * heads * (8 + 1) and {name.split(".")[1] for name in added} == {"10", "11"}


# ---- the start ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "strength"), [(4, 0.5), (9, 1.0), (16, 0)])
def test_gated_layers_start_as_timms_do(heads, strength):
    import_timm()
    from timm.models.convit import GPSA

    theirs = GPSA(4 * heads, heads, locality_strength=strength)
    theirs.local_init()
    config = sp.SparsePriorConvitConfig(
        **{**SIZES, "num_attention_heads": heads, "hidden_size": 4 * heads}, locality_strength=strength
    )
    ours = sp.SparsePriorConvitModel(config).layers[0].attention
    assert torch.equal(ours.pos_proj.weight, theirs.pos_proj.weight.data.reshape(heads, 3))
    assert torch.equal(ours.v_proj.weight, theirs.v.weight) and torch.equal(ours.gate, theirs.gating_param)


def test_heads_beyond_the_square_start_at_random():
    config = sp.SparsePriorConvitConfig(**{**SIZES, "num_attention_heads": 6, "hidden_size": 24})
    weight = sp.SparsePriorConvitModel(config).layers[0].attention.pos_proj.weight
    assert (weight[:4].abs() >= 1).all() and (weight[4:] != 0).all() and (weight[4:].abs() < 0.1).all()


def test_narrow_heads_start_as_a_convolution():
    """With a large locality strength each of 9 heads looks at one patch of the 3x3 around its query, and all differ."""
    config = sp.SparsePriorConvitConfig(
        **{**SIZES, "num_attention_heads": 9, "hidden_size": 36, "image_size": (40, 48)}, locality_strength=40.0
    )
    layer = sp.SparsePriorConvitModel(config).layers[0].attention
    with torch.no_grad():
        weights = layer.position_weights(layer.plan((5, 6)))
    row, column = 2, 3
    seen = {divmod(int(weights[head, row * 6 + column].argmax()), 6) for head in range(9)}
    assert seen == {(row + down, column + right) for down in (-1, 0, 1) for right in (-1, 0, 1)}
    assert (weights[:, row * 6 + column].max(-1).values > 0.999).all()


# ---- by hand --------------------------------------------------------------------------------------------------------


def gated_by_hand(layer, x, grid):
    """The gated attention (B, N, C) -> (B, N, C) and its weights, query by query."""
    heads, places = layer.num_heads, [divmod(patch, grid[1]) for patch in range(grid[0] * grid[1])]
    q, k, v = (projection(x).unflatten(-1, (heads, -1)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    weights = torch.zeros(len(x), heads, len(places), len(places), dtype=torch.float64)
    gate = torch.sigmoid(layer.gate)
    for i, (row, column) in enumerate(places):
        r = torch.tensor([[x - column, y - row, (x - column) ** 2 + (y - row) ** 2] for y, x in places]).double()
        for head in range(heads):
            content = torch.softmax((k[:, :, head] @ q[:, i, head, :, None])[..., 0] / math.sqrt(q.shape[-1]), -1)
            position = torch.softmax(r @ layer.pos_proj.weight[head] + layer.pos_proj.bias[head], -1)
            weights[:, head, i] = (1 - gate[head]) * content + gate[head] * position
    out = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
    return layer.o_proj(out), weights


def forward_by_hand(model, pixels, support, decay):
    """SparsePriorConvitModel without its dropouts, in float64."""
    config, grid = model.config, tuple(side // 8 for side in pixels.shape[2:])
    x = model.embeddings.projection(pixels).flatten(2).transpose(1, 2) + model.embeddings.position_embeddings
    for number, layer in enumerate(model.layers):
        if number == config.num_local_layers:
            x = torch.cat([model.embeddings.class_token.expand(len(x), 1, -1), x], 1)
        own, tokens = layer.attention, layer.layernorm_before(x)
        if number < config.num_local_layers:
            out, _ = gated_by_hand(own, tokens, grid)
        else:
            q, k, v = (p(tokens).unflatten(-1, (4, -1)).transpose(1, 2) for p in (own.q_proj, own.k_proj, own.v_proj))
            learned = {**decay, "alpha": own.decay_bias.alpha, "beta": own.decay_bias.beta} if decay else None
            out = sp.ops.attention(
                q, k, v, support, learned, num_prefix_tokens=1, grid=grid, layer=number, backend="reference"
            )
            out = own.o_proj(out.transpose(1, 2).flatten(2))
        x = x + out
        x = x + layer.mlp.fc2(torch.nn.functional.gelu(layer.mlp.fc1(layer.layernorm_after(x))))
    return model.layernorm(x)


FIB = {"name": "fibottention", "w_min": 1, "w_max": 11}
VIOLIN = {"name": "violin", "curves": ["snake", "hilbert"]}


@pytest.mark.parametrize(
    ("support", "decay"), [("dense", None), (FIB, None), ("dense", VIOLIN), (FIB, VIOLIN)], ids=str
)
def test_the_whole_forward_is_the_papers(support, decay):
    prior = {"support": support, "decay": decay}
    config = sp.SparsePriorConvitConfig(**{**SIZES, "image_size": (24, 40)}, prior=prior)
    model = scatter(sp.SparsePriorConvitModel(config).double())
    pixels = images(24, 40).double()
    with torch.no_grad():
        expected = forward_by_hand(model, pixels, support, decay)
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            torch.testing.assert_close(model(pixels).last_hidden_state, expected, atol=1e-9, rtol=1e-9)
        plain = sp.SparsePriorConvitModel(sp.SparsePriorConvitConfig(**{**SIZES, "image_size": (24, 40)})).double()
        plain.load_state_dict(model.state_dict(), strict=False)
        change = (plain.eval()(pixels).last_hidden_state - expected).abs().max()
    assert (change > 1e-3) == (prior != {"support": "dense", "decay": None})


@pytest.mark.parametrize("grid", [(3, 5), (4, 4), (1, 6)])
def test_the_gated_weights_by_hand(grid):
    config = sp.SparsePriorConvitConfig(**SIZES)
    layer = scatter(sp.SparsePriorConvitModel(config).double()).layers[1].attention
    tokens = torch.randn(2, grid[0] * grid[1], 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out, weights = layer(tokens, grid, options=CallOptions(True))
        alone, none = layer(tokens, grid)
        expected, by_hand = gated_by_hand(layer, tokens, grid)
    torch.testing.assert_close(weights, by_hand, atol=1e-12, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, len(tokens[0]), dtype=torch.float64))
    for own in (out, alone):
        torch.testing.assert_close(own, expected, atol=1e-12, rtol=0)
    assert none is None


def test_without_weights_no_map_of_all_pairs_is_formed():
    config = sp.SparsePriorConvitConfig(**SIZES)
    layer = sp.SparsePriorConvitModel(config).layers[0].attention
    shapes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            first = out[0] if isinstance(out, tuple) else out
            shapes.append(tuple(first.shape) if isinstance(first, torch.Tensor) else ())
            return out

    for asked in (False, True):
        shapes.clear()
        with torch.no_grad(), Sizes():
            layer(torch.randn(1, 48, 16), (6, 8), options=CallOptions(asked))
        assert any(shape[-2:] == (48, 48) for shape in shapes) == asked


def test_dropout_of_the_weights_acts_on_the_combined_map():
    layer = sp.SparsePriorConvitModel(sp.SparsePriorConvitConfig(**SIZES, attention_probs_dropout_prob=0.5)).layers[0]
    tokens = torch.randn(1, 16, 16)
    with torch.no_grad():
        _, full = layer.attention.eval()(tokens, (4, 4), options=CallOptions(True))
        torch.manual_seed(0)
        _, dropped = layer.attention.train()(tokens, (4, 4), options=CallOptions(True))
        torch.manual_seed(0)
        alone, _ = layer.attention(tokens, (4, 4))
        values = layer.attention.v_proj(tokens).unflatten(-1, (4, -1)).transpose(1, 2)
        expected = layer.attention.o_proj((dropped @ values).transpose(1, 2).flatten(2))
    kept = dropped != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(dropped, 2 * full * kept)
    torch.testing.assert_close(alone, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_relative_places_are_made_once_for_a_grid(implementation, monkeypatch):
    made = []
    original = relative_offsets.relative_steps
    monkeypatch.setattr(relative_offsets, "relative_steps", lambda grid: made.append(grid) or original(grid))
    model = sp.SparsePriorConvitModel(sp.SparsePriorConvitConfig(**SIZES)).eval()
    model.set_attn_implementation(implementation)
    of_a_layer = 2 if implementation == "sdpa" else 1  # along rows and along columns, or of all pairs
    for size, count in (((32, 32), 1), ((32, 32), 1), ((24, 40), 2), ((32, 32), 2)):
        with torch.no_grad():
            model(images(*size))
        assert len(made) == 2 * count * of_a_layer


def test_relative_steps():
    rows, columns = np.divmod(np.arange(6), 3)
    steps = relative_offsets.relative_steps((2, 3))
    assert steps.dtype == np.float32
    for i, j in np.ndindex(6, 6):
        right, down = columns[j] - columns[i], rows[j] - rows[i]
        assert steps[i, j].tolist() == [right, down, right**2 + down**2]


# ---- priors ---------------------------------------------------------------------------------------------------------


def test_a_prior_is_in_the_plain_layers_alone():
    config = sp.SparsePriorConvitConfig(**SIZES, prior="fibottention+violin+localvit+irpe_k")
    assert (
        config.prior["support"]["name"] == "fibottention" and config.prior_name == "fibottention+violin+localvit+irpe_k"
    )
    names = [prior["support"]["name"] for prior in config.layer_priors]
    assert names == ["dense", "dense", "fibottention", "fibottention"]
    model = scatter(sp.SparsePriorConvitModel(config))
    own = {name.split(".")[1] for name in model.state_dict() if is_prior_weight(name)}
    assert own == {"2", "3"}
    again = sp.SparsePriorConvitConfig.from_dict(config.to_dict())
    assert again.prior == config.prior
    with torch.no_grad():
        weights = model(images(32), output_attentions=True).attentions
    assert all((each > 0).all() for each in weights[:2]) and all((each == 0).any() for each in weights[2:])
    # Pairs: those of all layers, of which only the plain ones have a class token.
    kept = sum((each[0] != 0).sum().item() for each in weights)
    assert config.pruning_ratio == pytest.approx(100 * (1 - kept / (2 * 4 * 16**2 + 2 * 4 * 17**2)))


def test_violins_class_token_is_that_of_a_vit():
    """Its row and column of M are 1, so far decays leave only its pairs and those of a patch with itself."""
    prior = {"decay": {"name": "violin", "gamma": 1e-6, "learn_beta": False}}
    model = scatter(sp.SparsePriorConvitModel(sp.SparsePriorConvitConfig(**SIZES, prior=prior)))
    masks = learned_decay_masks(model)
    assert len(masks) == 2 and all(mask.shape == (4, 16, 16) for mask in masks)
    weights = attention_of(model, 3)
    patches = weights[:, :, 1:, 1:] - torch.diag_embed(weights[:, :, 1:, 1:].diagonal(dim1=2, dim2=3))
    other = patches.sum(-1, keepdim=True) / 15  # logits 0: the same weight for every other patch
    assert torch.allclose(patches + torch.diag_embed(other.expand(-1, -1, -1, 16)[..., 0]), other.expand_as(patches))
    assert weights[:, :, 0].std(-1).min() > 1e-3


def attention_of(model, layer):
    with torch.no_grad():
        return model(images(32), output_attentions=True).attentions[layer]


# ---- what looks at layers -------------------------------------------------------------------------------------------


def test_a_decay_as_an_adapter_goes_to_the_plain_layers():
    model = scatter(sp.SparsePriorConvitForImageClassification(sp.SparsePriorConvitConfig(**SIZES, num_labels=3)))
    with torch.no_grad():
        expected = model(images(32)).logits
        adapted = peft.get_peft_model(model, sp.ViolinAdapterConfig(decay={"name": "violin", "init": "moving"}))
        changed = adapted(images(32)).logits
        with adapted.disable_adapter():
            assert torch.equal(adapted(images(32)).logits, expected)
    assert (changed - expected).abs().max() > 1e-5
    trained = {name for name, value in adapted.named_parameters() if value.requires_grad}
    assert {name.split("layers.")[1][0] for name in trained} == {"2", "3"}
    assert adapted.peft_config["default"].decay_heads == [4, 4]
    assert [decay.layer for decay in learned_decays(adapted)] == [2, 3]
    assert find_attention(adapted).prior_name == "violin"


def test_the_attention_loss_compares_the_plain_layers():
    sizes = {**SIZES, "num_labels": 3}
    student = scatter(
        sp.SparsePriorConvitForImageClassification(sp.SparsePriorConvitConfig(**sizes, prior="sparsifiner"))
    )
    teacher = scatter(sp.SparsePriorConvitForImageClassification(sp.SparsePriorConvitConfig(**sizes)), seed=1)
    distillation = Distillation({"attention": 1.0}, Teacher(teacher))
    distillation.check(student)
    pixels = images(32)
    with distillation.observed(student) as scores:
        outputs = student(pixels, labels=torch.tensor([0, 2]))
    found = distillation.losses(student, outputs, outputs.loss, scores, pixels)["attention"]
    with torch.no_grad():
        weights = teacher(pixels, output_attentions=True).attentions[2:]
    expected = [((own - each[..., 1:, 1:]) ** 2).mean() for own, each in zip(scores, weights, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_maps_over_all_layers_are_refused_where_tokens_differ():
    model = sp.SparsePriorConvitModel(sp.SparsePriorConvitConfig(**SIZES, prior="fibottention"))
    found = find_attention(model)
    assert found.prior_name == "fibottention" and len(found.layers) == 4 and found.grid == (4, 4)
    with pytest.raises(ValueError, match="its class token joins between layers, which have 16, 17 tokens"):
        attention_weights(model, images(32))
