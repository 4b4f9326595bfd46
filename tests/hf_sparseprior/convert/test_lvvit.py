"""LV-ViT: against a float64 rewrite over the names of the original files, published sizes and costs."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import hf_sparseprior as sp
from hf_sparseprior.analysis.flops import model_flops
from hf_sparseprior.convert import convert_checkpoint, read_checkpoint
from hf_sparseprior.convert.lvvit import matches
from hf_sparseprior.training import WeightAverage
from tasks.analysis.paper_numbers import paper_numbers
from tests.each import each

TINY = {
    "image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "stem_channels": 8, "num_labels": 5, "initializer_range": 0.2,
}  # fmt: skip


def make(seed=0, **settings):
    torch.manual_seed(seed)
    config = sp.SparsePriorViTConfig.from_preset("lvvit_small", **{**TINY, **settings})
    return sp.SparsePriorViTForImageClassification(config)


def images(number=2, side=16, dtype=torch.float32):
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=dtype)


# ---- the float64 rewrite --------------------------------------------------------------------------------------------


def original_weights(width, layers, stem, side, patch, classes):
    """Random weights under the names of the original files; batch norms with statistics of their own."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 4

    state = {"cls_token": random(1, 1, width), "pos_embed": random(1, 1 + (side // patch) ** 2, width)}
    for number, (inputs, kernel) in enumerate([(3, 7), (stem, 3), (stem, 3)], start=1):
        state[f"patch_embed.conv{number}.weight"] = random(stem, inputs, kernel, kernel)
        norm = f"patch_embed.bn{number}"
        state |= {f"{norm}.weight": 1 + random(stem), f"{norm}.bias": random(stem)}
        state |= {f"{norm}.running_mean": random(stem), f"{norm}.running_var": random(stem).abs() + 0.5}
        state[f"{norm}.num_batches_tracked"] = torch.tensor(7)
    state |= {"patch_embed.proj.weight": random(width, stem, patch // 2, patch // 2)}
    state["patch_embed.proj.bias"] = random(width)
    for block in range(layers):
        for norm in ("norm1", "norm2"):
            state |= {f"blocks.{block}.{norm}.weight": 1 + random(width), f"blocks.{block}.{norm}.bias": random(width)}
        state[f"blocks.{block}.attn.qkv.weight"] = random(3 * width, width)
        for name, rows, columns in (("attn.proj", 1, 1), ("mlp.fc1", 3, 1), ("mlp.fc2", 1, 3)):
            state[f"blocks.{block}.{name}.weight"] = random(rows * width, columns * width)
            state[f"blocks.{block}.{name}.bias"] = random(rows * width)
    state |= {"norm.weight": 1 + random(width), "norm.bias": random(width)}
    for head in ("head", "aux_head"):
        state |= {f"{head}.weight": random(classes, width), f"{head}.bias": random(classes)}
    return state


def convolution(pixels, weight, stride, padding, bias=0.0):
    """By matrix products over unfolded windows."""
    kernel = weight.shape[-1]
    side = (pixels.shape[-1] + 2 * padding - kernel) // stride + 1
    windows = F.unfold(pixels, kernel, stride=stride, padding=padding)
    return (weight.flatten(1) @ windows).unflatten(2, (side, side)) + torch.as_tensor(bias).reshape(1, -1, 1, 1)


def layer_norm(tokens, state, name):
    centred = tokens - tokens.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def linear(tokens, state, name):
    return tokens @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)


def softmax_weights(block, query, key):
    return (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1)


def rewrite(state, pixels, heads, skip_lam, weights_of=softmax_weights):
    """Class logits and token logits of an original LV-ViT."""
    for number, (stride, padding) in enumerate([(2, 3), (1, 1), (1, 1)], start=1):
        pixels = convolution(pixels, state[f"patch_embed.conv{number}.weight"], stride, padding)
        norm = {key: state[f"patch_embed.bn{number}.{key}"].reshape(1, -1, 1, 1) for key in
                ("weight", "bias", "running_mean", "running_var")}  # fmt: skip
        pixels = (pixels - norm["running_mean"]) / (norm["running_var"] + 1e-5).sqrt() * norm["weight"] + norm["bias"]
        pixels = pixels.clamp(min=0)
    projection = state["patch_embed.proj.weight"]
    tokens = convolution(pixels, projection, projection.shape[-1], 0, state["patch_embed.proj.bias"]).flatten(2)
    tokens = torch.cat([state["cls_token"].expand(len(tokens), -1, -1), tokens.transpose(1, 2)], 1) + state["pos_embed"]
    for block in range(sum(key.endswith(".attn.proj.bias") for key in state)):
        qkv = linear(layer_norm(tokens, state, f"blocks.{block}.norm1"), state, f"blocks.{block}.attn.qkv")
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        attended = (weights_of(block, query, key) @ value).transpose(1, 2).flatten(2)
        tokens = tokens + linear(attended, state, f"blocks.{block}.attn.proj") / skip_lam
        hidden = linear(layer_norm(tokens, state, f"blocks.{block}.norm2"), state, f"blocks.{block}.mlp.fc1")
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        tokens = tokens + linear(hidden, state, f"blocks.{block}.mlp.fc2") / skip_lam
    tokens = layer_norm(tokens, state, "norm")
    return linear(tokens[:, 0], state, "head"), linear(tokens[:, 1:], state, "aux_head")


@pytest.mark.parametrize(("width", "heads", "skip_lam"), [(240, 4, 1.0), (384, 6, 2.0), (768, 12, 3.0)])
def test_a_converted_original_file_computes_what_the_rewrite_does(width, heads, skip_lam, tmp_path):
    state = original_weights(width, layers=2, stem=8, side=32, patch=8, classes=5)
    torch.save({"state_dict": state}, tmp_path / "lvvit.pth.tar")
    convert_checkpoint(tmp_path / "lvvit.pth.tar", tmp_path / "ours")
    model = sp.SparsePriorViTForImageClassification.from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    config = model.config
    assert (config.image_size, config.patch_size, config.num_attention_heads) == (32, 8, heads)
    assert not config.qkv_bias and config.token_classifier and config.stem_channels == 8
    pixels = images(side=32, dtype=torch.float64)
    class_logits, token_logits = rewrite(state, pixels, heads, skip_lam)
    with torch.no_grad():
        output = model(pixels)
    torch.testing.assert_close(output.token_logits, token_logits, atol=1e-9, rtol=1e-9)
    published = class_logits + 0.5 * token_logits.max(1).values
    torch.testing.assert_close(output.logits, published, atol=1e-9, rtol=1e-9)
    model.config.token_logits_weight = 0.0
    with torch.no_grad():
        torch.testing.assert_close(model(pixels).logits, class_logits, atol=1e-9, rtol=1e-9)


def test_an_original_file_of_no_published_width_is_refused(tmp_path):
    state = original_weights(32, layers=1, stem=8, side=16, patch=4, classes=5)
    torch.save(state, tmp_path / "lvvit.pth")
    assert matches(read_checkpoint(tmp_path / "lvvit.pth")[0])
    with pytest.raises(ValueError, match="width 32 must be of a published LV-ViT: 240, 384, 512, 768"):
        convert_checkpoint(tmp_path / "lvvit.pth", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_formats_without_these_parts_refuse_them(tmp_path):
    make().save_pretrained(tmp_path / "ours")
    for target, out in (("vit", "out"), ("timm", "out"), ("original", "out.pth")):
        with pytest.raises(ValueError, match=r"stem='convolution'.*residual_scale=0.5.*token_classifier=True"):
            convert_checkpoint(tmp_path / "ours", tmp_path / out, to=target)


# ---- published numbers ----------------------------------------------------------------------------------------------


def sizes(width, layers, heads):
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 3 * width,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "millions"),
    [
        ({}, 26.15),
        ({"image_size": 384}, 26.30),
        (sizes(512, 20, 8), 55.83),
        ({**sizes(768, 24, 12), "stem_channels": 128, "image_size": 448}, 150.47),
    ],
    ids=["S", "S at 384", "M", "L at 448"],
)
def test_parameter_counts_are_the_published_ones(settings, millions):
    with torch.device("meta"):
        config = sp.SparsePriorViTConfig.from_preset("lvvit_small", num_labels=1000, **settings)
        model = sp.SparsePriorViTForImageClassification(config)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == millions


def test_attention_costs_what_sparsifiner_prints():
    number = next(number for number in paper_numbers() if "LV-ViT" in number.source)
    assert number.printed == 476.9 and round(number.count, 1) == 476.9
    assert number.count * 1e6 == 2 * 16 * 197**2 * 384


def test_flops_are_those_that_torch_counts():
    model = make().eval()
    model.set_attn_implementation("eager")  # torch does not count its fused attention on CPUs
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images(1))
    assert model_flops(model.config, convention="torch").total == counter.get_total_flops()


# ---- behaviour ------------------------------------------------------------------------------------------------------


def test_training_logits_are_the_classifiers_alone():
    model = make().train()
    output = model(images(), labels=torch.tensor([1, 3]))
    expected = F.cross_entropy(output.logits, torch.tensor([1, 3]))
    torch.testing.assert_close(output.loss, expected)
    model.eval()
    output = model(images())
    alone = model.classifier(model.vit(images()).pooler_output)
    torch.testing.assert_close(output.logits, alone + 0.5 * output.token_logits.max(1).values)


@pytest.mark.parametrize("prior", ["fibottention+violin", "topk", "linformer", "swin_rpb"])
def test_priors_work_on_it(prior):
    model = make(prior=prior).train()
    output = model(images())
    (output.logits.sum() + output.token_logits.square().sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_token_sources_take_patches_of_other_images():
    model = make().eval()
    sources = torch.tensor([[0] * 10 + [1] * 6, [1] * 16])
    embeddings = model.vit.embeddings
    with torch.no_grad():
        mixed, _ = embeddings(images(), token_sources=sources)
        plain, _ = embeddings(images())
    expected = plain.clone()
    expected[0, 11:] = plain[1, 11:]  # one prefix token; positions are the place's, so they do not matter here
    assert torch.equal(mixed, expected)
    with pytest.raises(ValueError, match=r"token_sources of shape \(2, 3\) must be \(batch, patches\), \(2, 16\)"):
        model(images(), token_sources=sources[:, :3])


def test_token_sources_on_plain_patches_are_a_box_of_pixels():
    model = make(stem="patch").eval()
    sources = torch.tensor([[0] * 4 + [0, 1, 1, 0] * 2 + [0] * 4, [1] * 16])
    pixels = images()
    cut = pixels.clone()
    cut[0, :, 4:12, 4:12] = pixels[1, :, 4:12, 4:12]
    with torch.no_grad():
        torch.testing.assert_close(model(pixels, token_sources=sources).logits, model(cut).logits)


def test_a_frozen_stem_keeps_its_statistics():
    model = make()
    norm = model.vit.embeddings.stem.norms[0]
    model.train()(images())
    assert norm.num_batches_tracked == 1 and norm.running_mean.abs().max() > 0
    before = norm.running_mean.clone()
    model.requires_grad_(False)
    model.train()(images())
    assert torch.equal(norm.running_mean, before) and norm.num_batches_tracked == 1


def test_the_moving_average_has_the_statistics_too():
    model = make().train()
    norm = model.vit.embeddings.stem.norms[1]
    average, expected = WeightAverage(model, 0.75), norm.running_var.double()
    for _ in range(3):
        model(images())
        average.update()
        expected = 0.75 * expected + 0.25 * norm.running_var.double()
    own = norm.running_var.clone()
    with average.swapped_in():
        torch.testing.assert_close(norm.running_var.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(norm.running_var, own)


@each(
    "settings, message",
    [
        ({"stem": "conv"}, "stem='conv' must be one of patch, convolution"),
        ({"stem_channels": 0}, "stem_channels=0 must be an integer of 1 or more"),
        ({"patch_size": 1}, "patch_size=1 must be even with stem='convolution', which has stride 2"),
        ({"residual_scale": 0}, "residual_scale=0 must be above 0"),
        ({"residual_scale": "half"}, r"residual_scale='half' must be a number"),
        ({"token_classifier": 1}, "token_classifier=1 must be"),
        ({"token_logits_weight": -1}, "token_logits_weight=-1 must be a number"),
        ({"use_distillation_token": True}, "token_classifier=True and use_distillation_token=True exclude each other"),
    ],
)
def test_bad_fields_are_named(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        make(**settings)
    assert "\n" not in str(error.value)
