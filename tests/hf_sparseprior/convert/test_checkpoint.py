import argparse
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

import hf_sparseprior as sp
from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification, SparsePriorViTModel
from hf_sparseprior.__main__ import main
from hf_sparseprior.adapters.stock_saving import SCALARS_FILE
from hf_sparseprior.convert import convert_checkpoint, read_checkpoint
from tests.hf_sparseprior.convert.conversions import (
    assert_same,
    check_refused,
    check_round_trip,
    check_same_as_transformers,
    check_stock_prior_is_carried_over,
    check_there_and_back,
    check_timm_folder,
    outputs,
    pixels_for,
)
from tests.hf_sparseprior.small import scatter
from tests.timm_oracle import import_timm

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
SOURCES = {
    "vit": (ViTConfig, ViTForImageClassification, {"intermediate_size": 40, "num_labels": 5}),
    "vit base": (ViTConfig, ViTModel, {"intermediate_size": 40, "qkv_bias": False}),
    "deit": (DeiTConfig, DeiTForImageClassificationWithTeacher, {"intermediate_size": 40, "num_labels": 5}),
    "deit one head": (DeiTConfig, DeiTForImageClassification, {"intermediate_size": 40, "num_labels": 5}),
    "deit base": (DeiTConfig, DeiTModel, {"intermediate_size": 40, "layer_norm_eps": 1e-3}),
    "dinov2": (Dinov2Config, Dinov2Model, {"mlp_ratio": 2}),
    "dinov2 classifier": (Dinov2Config, Dinov2ForImageClassification, {"mlp_ratio": 3, "num_labels": 5}),
    "dinov2 registers": (Dinov2WithRegistersConfig, Dinov2WithRegistersModel, {"mlp_ratio": 2}),
    "dinov2 registers classifier": (
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersForImageClassification,
        {"mlp_ratio": 2, "num_labels": 5, "num_register_tokens": 2},
    ),
}


def make_source(kind):
    config, model, options = SOURCES[kind]
    torch.manual_seed(0)
    return scatter(model(config(**SIZES, **options)))  # no part stays at 0 or 1, where a lost weight would not show


def test_scalars_of_an_earlier_save_are_not_read(tmp_path):
    """A prior's file stays where transformers saves a model without one over it, whole or in parts."""
    model = make_source("vit")
    for options in ({}, {"max_shard_size": "20KB"}):
        folder = tmp_path / f"saved{len(options)}"
        sp.apply_prior(model, "violin").save_pretrained(folder, **options)
        assert load_file(folder / SCALARS_FILE)
        convert_checkpoint(folder, tmp_path / f"with{len(options)}")  # a prior that is there is not left out
        read = SparsePriorViTConfig.from_pretrained(tmp_path / f"with{len(options)}")
        assert read.prior_name == "violin"
        sp.remove_prior(model).save_pretrained(folder, **options)
        assert (folder / SCALARS_FILE).is_file()
        convert_checkpoint(folder, tmp_path / f"ours{len(options)}")
        ours = SparsePriorViTForImageClassification.from_pretrained(tmp_path / f"ours{len(options)}")
        images = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(ours(images).logits, model(images).logits)


@pytest.mark.parametrize("kind", SOURCES)
def test_models_of_transformers_compute_the_same(kind, tmp_path):
    check_same_as_transformers(make_source(kind), torch.randn(2, 3, 32, 32), tmp_path, "attention.attention.query")


def exact(source, folder):
    """A model of the source's class, loaded from a folder that must have exactly its weights."""
    model, info = type(source).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("kind", SOURCES)
def test_round_trips_through_ours_give_the_very_same_weights(kind, tmp_path):
    unused = ("mask_token", "pooler.dense.weight", "pooler.dense.bias")  # pretraining's, in none of our outputs
    check_round_trip(make_source(kind), torch.randn(2, 3, 32, 32), tmp_path, unused)


def small(**fields):
    """A config of ours."""
    labels = {} if "id2label" in fields else {"num_labels": 5}
    return SparsePriorViTConfig(**{**SIZES, "intermediate_size": 48, **labels, **fields})


def ours(config, folder, cls=SparsePriorViTForImageClassification):
    """A saved model of ours with no weight at 0 or 1."""
    torch.manual_seed(2)
    model = scatter(cls(config))
    model.save_pretrained(folder)
    return model


DINOV2 = {"layerscale_value": 1, "pooling": "class_token_and_mean"}
OURS = {
    "vit": ("vit", {"image_size": (32, 48), "patch_size": (8, 4), "qkv_bias": False, "hidden_act": "relu"}),
    "vit trained": ("vit", {"drop_path_rate": 0.1, "id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}),
    "deit": ("deit", {"use_distillation_token": True}),
    "deit one head": ("deit", {"use_distillation_token": True, "use_distillation_classifier": False}),
    "dinov2": ("dinov2", {**DINOV2, "drop_path_rate": 0.1, "num_channels": 1}),
    "dinov2 registers": ("dinov2_with_registers", {**DINOV2, "num_register_tokens": 3}),
}


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        *((kind, SparsePriorViTForImageClassification) for kind in OURS),
        *((kind, SparsePriorViTModel) for kind in ("vit", "deit one head", "dinov2 registers")),
    ],
)
def test_ours_as_models_of_transformers_and_back(kind, cls, tmp_path):
    target, fields = OURS[kind]
    model = ours(small(**fields), tmp_path / "ours", cls)
    # A square may be one number. A base model of theirs does not say what a classifier would pool.
    lost = {"image_size", "patch_size"} | ({"drop_path_rate"} if "dinov2" not in kind else set())
    lost |= {"pooling", "use_distillation_classifier"} if cls is SparsePriorViTModel else set()
    stock = check_there_and_back(model, target, tmp_path, but=lost)
    assert cls.from_pretrained(tmp_path / "back").config.grid == model.config.grid
    if cls is SparsePriorViTModel:
        pixels = pixels_for(model.config)
        with torch.no_grad():
            pooled = stock(pixels).pooler_output
            torch.testing.assert_close(pooled, model(pixels).pooler_output[:, :24], rtol=1e-4, atol=1e-5)


def test_ours_to_ours_keeps_a_decay_that_stays_and_starts_another_anew(tmp_path):
    model = ours(small(prior="fibottention+violin"), tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / "same")
    convert_checkpoint(tmp_path / "ours", tmp_path / "violin", prior="violin", image_size=48)
    lines = convert_checkpoint(tmp_path / "ours", tmp_path / "manhattan", prior="manhattan", drop_classifier=True)
    assert any("'fibottention+violin' is replaced by 'manhattan'" in line for line in lines)
    same, violin, manhattan = (AutoModel.from_pretrained(tmp_path / name) for name in ("same", "violin", "manhattan"))
    weights = model.vit.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in same.state_dict().items())
    assert violin.config.grid == (6, 6) and violin.config.prior_name == "violin"
    for key, value in violin.state_dict().items():
        assert "position" in key or torch.equal(value, weights[key])
    fresh = SparsePriorViTModel(small(prior="manhattan")).state_dict()
    assert manhattan.state_dict().keys() == fresh.keys()
    for key, value in manhattan.state_dict().items():
        assert "beta" in key or torch.equal(value, (fresh if "alpha" in key else weights)[key])


def test_precision_and_processor_of_the_source_are_kept(tmp_path):
    source = make_source("vit").to(torch.bfloat16)
    source.save_pretrained(tmp_path / "source")
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 40, "width": 40}, "resample": 2}
    settings |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "source" / "preprocessor_config.json").write_text(json.dumps(settings))
    convert_checkpoint(tmp_path / "source", tmp_path / "ours", prior="violin")
    weights = load_file(tmp_path / "ours" / "model.safetensors")
    assert {value.dtype for key, value in weights.items() if "decay_bias" not in key} == {torch.bfloat16}
    assert {value.dtype for key, value in weights.items() if "decay_bias" in key} == {torch.float32}
    convert_checkpoint(tmp_path / "ours", tmp_path / "back", prior="dense", to="vit")
    model = exact(source, tmp_path / "back")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in source.state_dict().items())
    processor = AutoImageProcessor.from_pretrained(tmp_path / "back")
    assert processor.size == {"height": 40, "width": 40} and tuple(processor.image_mean) == (0.1, 0.2, 0.3)
    convert_checkpoint(tmp_path / "back", tmp_path / "larger", image_size=64)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "larger")
    assert processor.size == {"height": 64, "width": 64} and tuple(processor.image_mean) == (0.1, 0.2, 0.3)


# ---- timm's names ---------------------------------------------------------------------------------------------------

# Prefix tokens, how many of them have a position, whether there is a head, LayerScale's name.
TIMM = {
    "vit": (["cls_token"], 1, True, None),
    "deit distilled": (["cls_token", "dist_token"], 2, True, None),
    "deit distilled base": (["cls_token", "dist_token"], 2, False, None),
    "deit3": (["cls_token"], 0, True, "gamma_{}"),  # as DeiT-III's own files have it
    "deit3 of timm": (["cls_token"], 0, True, "ls{}.gamma"),
    "dino": (["cls_token"], 1, False, None),
    "dinov2": (["cls_token"], 1, False, "ls{}.gamma"),
    "dinov2 registers": (["cls_token", "register_tokens"], 1, False, "ls{}.gamma"),
    "registers of timm": (["cls_token", "reg_token"], 0, True, "ls{}.gamma"),
    "no class token": ([], 0, True, None),
}


def timm_state(kind, depth=2, width=192, tokens=16, labels=5):
    """Random weights under the published names."""
    torch.manual_seed(1)
    prefix, positions, head, scale = TIMM[kind]
    shapes = {
        "pos_embed": (1, tokens + positions, width),
        "patch_embed.proj.weight": (width, 3, 8, 8), "patch_embed.proj.bias": (width,),
        "norm.weight": (width,), "norm.bias": (width,),
    }  # fmt: skip
    for token in prefix:
        shapes[token] = (1, 4 if token in ("register_tokens", "reg_token") else 1, width)
    if kind.startswith("dinov2"):
        shapes["mask_token"] = (1, width)
    if head:
        shapes |= {"head.weight": (labels, width), "head.bias": (labels,)}
        if "dist_token" in prefix:
            shapes |= {"head_dist.weight": (labels, width), "head_dist.bias": (labels,)}
    for n in range(depth):
        for name, shape in (
            ("norm1", (width,)), ("norm2", (width,)), ("attn.qkv", (3 * width, width)), ("attn.proj", (width, width)),
            ("mlp.fc1", (2 * width, width)), ("mlp.fc2", (width, 2 * width)),
        ):  # fmt: skip
            shapes[f"blocks.{n}.{name}.weight"] = shape
            shapes[f"blocks.{n}.{name}.bias"] = shape[:1]
        if scale:
            shapes |= {f"blocks.{n}.{scale.format(1)}": (width,), f"blocks.{n}.{scale.format(2)}": (width,)}
    return {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}


def timm_forward(state, pixels, heads=3):
    """A ViT written out from timm's names and those of the original files; tokens if there is no head."""
    weight = state["patch_embed.proj.weight"]
    width, patch = weight.shape[0], weight.shape[2:]
    patches = F.conv2d(pixels, weight, state["patch_embed.proj.bias"], stride=patch).flatten(2).mT
    batch, count = patches.shape[:2]
    prefix = [state[name].expand(batch, -1, -1) for name in ("cls_token", "dist_token") if name in state]
    registers = [state[name].expand(batch, -1, -1) for name in ("reg_token", "register_tokens") if name in state]
    if state["pos_embed"].shape[1] == count:
        x = torch.cat([*prefix, *registers, patches + state["pos_embed"]], 1)
    else:
        x = torch.cat([*prefix, patches], 1) + state["pos_embed"]
        x = torch.cat([x[:, : len(prefix)], *registers, x[:, len(prefix) :]], 1)

    def norm(x, name):
        return F.layer_norm(x, (width,), state[name + ".weight"], state[name + ".bias"], 1e-6)

    def linear(x, name):
        return F.linear(x, state[name + ".weight"], state.get(name + ".bias"))

    def scale(n):
        return state.get(f"{block}gamma_{n}", state.get(f"{block}ls{n}.gamma", 1.0))

    n = 0
    while f"blocks.{n}.norm1.weight" in state:
        block = f"blocks.{n}."
        q, k, v = (
            linear(norm(x, block + "norm1"), block + "attn.qkv").view(batch, -1, 3, heads, width // heads).unbind(2)
        )
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + scale(1) * linear(y.transpose(1, 2).flatten(2), block + "attn.proj")
        y = linear(F.gelu(linear(norm(x, block + "norm2"), block + "mlp.fc1")), block + "mlp.fc2")
        x = x + scale(2) * y
        n += 1
    x = norm(x, "norm")
    if "head.weight" not in state:
        return x
    if not prefix:
        return linear(x[:, -count:].mean(1), "head")
    logits = linear(x[:, 0], "head")
    return (logits + linear(x[:, 1], "head_dist")) / 2 if "head_dist.weight" in state else logits


def save_timm(state, kind, container, folder):
    """Save a source as it is published. Returns its path."""
    path = folder / ("weights.safetensors" if container == "safetensors" else "weights.pth")
    if container == "safetensors":
        save_file(state, path)
    elif container == "pth":
        torch.save(state, path)
    elif kind == "dino":  # as DINO saves its teacher, projection head, command line and all
        teacher = {f"module.backbone.{name}": value for name, value in state.items()}
        arguments = argparse.Namespace(arch="vit_small", lr=1e-3)
        torch.save({"teacher": {**teacher, "module.head.mlp.0.weight": torch.zeros(2, 2)}, "args": arguments}, path)
    else:  # as DeiT saves its models
        torch.save({"model": state, "epoch": 3, "args": argparse.Namespace(lr=1e-3)}, path)
    return path


@pytest.mark.parametrize(
    ("kind", "container"), [(kind, ("safetensors", "pth", "nested")[i % 3]) for i, kind in enumerate(TIMM)]
)
def test_timm_and_original_files_compute_the_same(kind, container, tmp_path):
    state = timm_state(kind)
    convert_checkpoint(save_timm(state, kind, container, tmp_path), tmp_path / "out")
    loader = AutoModelForImageClassification if "head.weight" in state else AutoModel
    model = loader.from_pretrained(tmp_path / "out").eval()
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(outputs(model, pixels), timm_forward(state, pixels), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "timm_out"), [(kind, ("out", "out.safetensors")[i % 2]) for i, kind in enumerate(TIMM)]
)
def test_round_trips_through_ours_give_the_very_same_timm_weights(kind, timm_out, tmp_path):
    """As an original file and as a folder or a file of timm."""
    state = timm_state(kind)
    convert_checkpoint(save_timm(state, kind, "safetensors", tmp_path), tmp_path / "ours")
    check_timm_round_trip(state, kind, "timm", timm_out, tmp_path)
    if kind in ("registers of timm", "no class token"):
        with pytest.raises(ValueError, match=r"^original cannot express this model"):
            convert_checkpoint(tmp_path / "ours", tmp_path / "out.pth", to="original")
    else:
        check_timm_round_trip(state, kind, "original", "out.pth", tmp_path)


def check_timm_round_trip(state, kind, target, out, tmp_path):
    """tmp_path/ours, made from these weights, gives them again."""
    convert_checkpoint(tmp_path / "ours", tmp_path / out, to=target)
    if target == "original":
        after = torch.load(tmp_path / out, weights_only=True)
        after = after["model"] if "head.weight" in state else after
    else:
        after = load_file(tmp_path / "out" / "model.safetensors" if out == "out" else tmp_path / out)
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(timm_forward(after, pixels), timm_forward(state, pixels), rtol=1e-5, atol=1e-6)
    written = "gamma_{}" if target == "original" and "deit3" in kind else "ls{}.gamma"
    expected = {}
    for name, value in state.items():
        for n in "12":
            name = name.replace(f"gamma_{n}", f"ls{n}.gamma").replace(f"ls{n}.gamma", written.format(n))
        expected[name] = value
    if "mask_token" in expected:  # pretraining's: lost on the way
        value = expected.pop("mask_token")
        if target == "original":
            expected["mask_token"] = torch.zeros_like(value)
    if target == "timm" and kind == "dinov2 registers":  # in timm's own files the class token holds its position
        expected["reg_token"] = expected.pop("register_tokens")
        expected["cls_token"] = expected["cls_token"] + expected["pos_embed"][:, :1]
        expected["pos_embed"] = expected["pos_embed"][:, 1:]
    assert_same(expected, after)
    convert_checkpoint(tmp_path / out, tmp_path / f"again {target}")
    before, again = (read_checkpoint(tmp_path / name)[0] for name in ("ours", f"again {target}"))
    if target == "original" or kind != "dinov2 registers":
        assert before.keys() == again.keys() and all(torch.equal(value, again[name]) for name, value in before.items())


OURS_FOR_TIMM = {
    "plain": {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}, "image_mean": 0.25},
    "not square": {"image_size": (32, 48), "patch_size": (8, 4), "num_channels": 1, "qkv_bias": False},
    "mean": {"pooling": "mean", "intermediate_size": 41},
    "mean, no class token": {"pooling": "mean", "use_class_token": False, "num_register_tokens": 2},
    "distilled": {"use_distillation_token": True},
    "DeiT-III with registers": {
        "layerscale_value": 0.1,
        "position_embedding_for_class_token": False,
        "num_register_tokens": 2,
    },
    "no output biases": {"proj_bias": False, "mlp_bias": False},
}


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        *((kind, SparsePriorViTForImageClassification) for kind in OURS_FOR_TIMM),
        *((kind, SparsePriorViTModel) for kind in ("not square", "mean, no class token", "distilled")),
    ],
)
def test_ours_as_a_folder_of_timm_and_back(kind, cls, tmp_path):
    model = ours(small(**OURS_FOR_TIMM[kind]), tmp_path / "ours", cls)
    # LayerScale's first value is read off the weights.
    check_timm_folder(model, tmp_path, but=["image_size", "patch_size", "layerscale_value"])
    assert cls.from_pretrained(tmp_path / "back").config.grid == model.config.grid


@pytest.mark.parametrize(
    ("name", "size", "out"),
    [
        ("vit_tiny_patch16_224", 64, "back"),
        ("deit_tiny_distilled_patch16_224", 64, "back.safetensors"),
        ("deit3_small_patch16_224", 64, "back"),
        ("vit_small_patch14_dinov2", 56, "back.safetensors"),
        ("vit_small_patch14_reg4_dinov2", 56, "back"),
    ],
)
def test_models_of_timm_itself_go_both_ways(name, size, out, tmp_path):
    timm = import_timm()
    options = {"img_size": size, "depth": 2}
    source = scatter(timm.create_model(name, **options), 0.1)
    save_file(source.state_dict(), tmp_path / "source.safetensors")
    convert_checkpoint(tmp_path / "source.safetensors", tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / out, to="timm")
    back = timm.create_model(name, **options)
    timm.models.load_checkpoint(back, tmp_path / out / "model.safetensors" if out == "back" else tmp_path / out)
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in source.state_dict().items())
    pixels = torch.randn(2, 3, size, size)
    with torch.no_grad():
        expected = source(pixels) if source.num_classes else source.forward_features(pixels)
    loader = AutoModelForImageClassification if source.num_classes else AutoModel
    model = loader.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(outputs(model, pixels), expected, rtol=1e-4, atol=1e-4)


def test_what_files_cannot_say_and_what_is_no_file(tmp_path):
    ours(small(pooling="mean"), tmp_path / "ours")
    with pytest.raises(ValueError, match="pooling='mean' must be 'class_token' in a file"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "w.safetensors", to="timm")
    for name, target, written_as in (
        ("w.pth", "timm", "folder or a .safetensors file"),
        ("w.pth", "vit", "folder"),
        ("w.bin", "sparseprior_vit", "folder"),
        ("w", "original", ".pth file"),
        ("w.safetensors", "original", ".pth file"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {target} is written as a {written_as}$"):
            convert_checkpoint(tmp_path / "ours", tmp_path / name, to=target)
    with pytest.raises(ValueError, match=r"to='jax' must be one of sparseprior_vit, .*vit, .*, timm"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "w", to="jax")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_original_files_as_models_of_transformers(tmp_path):
    state = timm_state("deit distilled")
    path = save_timm(state, "deit distilled", "nested", tmp_path)
    convert_checkpoint(path, tmp_path / "deit", to="deit")
    model = DeiTForImageClassificationWithTeacher.from_pretrained(tmp_path / "deit").eval()
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(outputs(model, pixels), timm_forward(state, pixels), rtol=1e-4, atol=1e-5)


TIMM_REFUSED = {
    "fc_norm": ({"fc_norm.weight": (192,), "norm.weight": None}, {}, "fc_norm.weight: this model averages"),
    "pre_logits": ({"pre_logits.fc.weight": (192, 192)}, {}, "classifier.pre_logits.fc.weight.*--drop-classifier"),
    "gated": ({"blocks.0.mlp.fc1.weight": (768, 192)}, {}, "a gated MLP .SwiGLU. has no counterpart"),
    "gated dinov2": ({"blocks.0.mlp.fc1.weight": None, "blocks.0.mlp.w12.weight": (768, 192)}, {}, "a gated MLP"),
    "positions": ({"pos_embed": (1, 21, 192)}, {}, "21 positions are no square grid, with or without 1 prefix"),
    "image": ({}, {"img_size": [32, 48]}, r"17 positions are no grid of \[32, 48\] pixels"),
    "pool": ({}, {"global_pool": "avgmax"}, "global_pool='avgmax' must be 'token' or 'avg'"),
    "pool prefix": ({}, {"global_pool": "avg", "pool_include_prefix": True}, "pool_include_prefix=True must be False"),
    "activation": ({}, {"act_layer": "silu"}, "act_layer='silu' must be gelu or gelu_tanh"),
    "query norm": ({"blocks.0.attn.q_norm.weight": (64,)}, {}, "left over: vit.layers.0.attn.q_norm.weight"),
}


@pytest.mark.parametrize("case", TIMM_REFUSED)
def test_other_architectures_of_timm_are_refused(case, tmp_path):
    changes, arguments, message = TIMM_REFUSED[case]
    state = timm_state("vit")
    for name, shape in changes.items():
        if shape is None:
            del state[name]
        else:
            state[name] = torch.zeros(shape)
    (tmp_path / "source").mkdir()
    save_file(state, tmp_path / "source" / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "model_args": arguments}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    check_refused(tmp_path / "source", message)
    if case == "pre_logits":
        convert_checkpoint(tmp_path / "source", tmp_path / "out", drop_classifier=True)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["SparsePriorViTModel"]


# ---- options and errors ---------------------------------------------------------------------------------------------


STOCK_PRIORS = {
    "vit": "fibottention",
    "vit base": {"support": "fibottention", "decay": {"name": "violin", "curves": ["snake"]}},
    "deit": {"decay": "manhattan"},
    "dinov2": {"predictor": "sparsifiner"},
    "dinov2 registers classifier": {"support": "fibottention", "extras": ["irpe_k"]},
    "deit base": {"mixer": {"name": "linformer", "projected_tokens": 4}},
}


@pytest.mark.parametrize("kind", STOCK_PRIORS)
def test_the_prior_of_a_stock_model_is_carried_over(kind, tmp_path):
    check_stock_prior_is_carried_over(make_source(kind), STOCK_PRIORS[kind], torch.randn(2, 3, 32, 32), tmp_path)


def test_a_prior_of_a_stock_model_is_not_replaced_or_dropped_silently(tmp_path, capsys):
    source = tmp_path / "source"
    sp.apply_prior(make_source("vit"), "violin").save_pretrained(source)
    assert main(["convert", str(source), str(tmp_path / "other"), "--prior", "fibottention"]) == 0
    assert "'violin' is replaced by 'fibottention'" in capsys.readouterr().out
    assert main(["convert", str(source), str(tmp_path / "vit"), "--to", "vit"]) == 2
    assert "prior 'violin' has no place in vit; --prior dense drops it" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "vit"), "--to", "vit", "--prior", "dense"]) == 0
    assert "replaced by 'dense'" in capsys.readouterr().out
    config = json.loads((source / "config.json").read_text())
    without = {key: value for key, value in config.items() if key != "sparse_prior"}
    for changed, message in (
        ({**config, "sparse_prior": 3}, "sparse_prior=3 must be like"),
        (without, "config.json lacks 'sparse_prior'"),
    ):
        (source / "config.json").write_text(json.dumps(changed))
        assert main(["convert", str(source), str(tmp_path / "refused")]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "refused").exists()


def test_prior_image_size_and_classifier_can_be_chosen(tmp_path, capsys):
    source = make_source("vit")
    source.save_pretrained(tmp_path / "source")
    command = ["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--prior", "fibottention+violin"]
    assert main([*command, "--image-size", "48", "--drop-classifier"]) == 0
    model = AutoModel.from_pretrained(tmp_path / "out")
    assert model.config.prior_name == "fibottention+violin" and model.config.grid == (6, 6)
    positions = source.vit.embeddings.position_embeddings
    map_ = positions[:, 1:].reshape(1, 4, 4, 24).permute(0, 3, 1, 2)
    expected = F.interpolate(map_, size=(6, 6), mode="bicubic", align_corners=False).flatten(2).mT
    torch.testing.assert_close(model.embeddings.position_embeddings[:, 1:], expected)
    torch.testing.assert_close(model.embeddings.position_embeddings[:, :1], positions[:, :1])
    assert "image_mean is not in the source" in capsys.readouterr().out


def test_missing_and_left_over_weights_and_those_that_are_no_numbers_are_refused(tmp_path):
    state = timm_state("vit")
    broken = {**state, "norm_pre.weight": torch.ones(3), "head.weight": torch.ones(5, 7)}
    del broken["norm.bias"]
    save_file(broken, tmp_path / "w.safetensors")
    check_refused(tmp_path / "w.safetensors", r"missing: vit\.layernorm\.bias.*left over: norm_pre\.weight")
    check_refused(tmp_path / "w.safetensors", r"classifier\.weight \(5, 7\) instead of \(5, 192\)")
    state["norm.bias"][3] = torch.nan
    state["norm.weight"] = state["norm.weight"].long()
    save_file(state, tmp_path / "w.safetensors")
    refused = r"not floating-point: vit.layernorm.weight \(torch.int64\); NaN or infinite: vit.layernorm.bias"
    check_refused(tmp_path / "w.safetensors", refused)


def test_hostile_and_unknown_files_are_refused(tmp_path, capsys):
    class Hostile:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    torch.save({"model": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(OSError, match=r"hostile.pth holds more than tensors"):
        read_checkpoint(tmp_path / "hostile.pth")
    (tmp_path / "folder").mkdir()
    shutil.copyfile(tmp_path / "hostile.pth", tmp_path / "folder" / "pytorch_model.bin")
    for source in ("hostile.pth", "folder"):
        assert main(["convert", str(tmp_path / source), str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err.splitlines()
        assert len(error) == 1 and "holds more than tensors and is not read" in error[0]
    assert not (tmp_path / "executed").exists() and not (tmp_path / "out").exists()
    (tmp_path / "cut.safetensors").write_bytes(b"12345678abc")
    with pytest.raises(OSError, match=r"cut.safetensors cannot be read"):
        read_checkpoint(tmp_path / "cut.safetensors")
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    with pytest.raises(OSError, match=r"list.pth holds a list instead of weights by name"):
        read_checkpoint(tmp_path / "list.pth")
    for name, text in (("config.json", "[]"), ("config.json", "{"), ("preprocessor_config.json", "5")):
        make_source("vit").save_pretrained(tmp_path / "vit")
        (tmp_path / "vit" / name).write_text(text)
        with pytest.raises(OSError, match=rf"vit/{name} (cannot be read|holds (list|int) instead)"):
            read_checkpoint(tmp_path / "vit")
    with pytest.raises(OSError, match=r"someone/model does not exist .* hf download someone/model"):
        convert_checkpoint("someone/model", tmp_path / "out")
    with pytest.raises(OSError, match=r"nowhere\.pth does not exist"):
        read_checkpoint(tmp_path / "nowhere.pth")
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "resnet.safetensors")
    with pytest.raises(ValueError, match=r"names like conv1.weight are of no known source"):
        convert_checkpoint(tmp_path / "resnet.safetensors", tmp_path / "out")
    save_file(timm_state("vit", width=200), tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match=r"width 200 is of no published model .*--heads"):
        convert_checkpoint(tmp_path / "odd.safetensors", tmp_path / "out")
    convert_checkpoint(tmp_path / "odd.safetensors", tmp_path / "out", num_attention_heads=4)
    with pytest.raises(OSError, match="exists already"):
        convert_checkpoint(tmp_path / "odd.safetensors", tmp_path / "out", num_attention_heads=4)
