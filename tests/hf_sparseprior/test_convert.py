import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from hf_sparseprior.__main__ import main
from hf_sparseprior.convert import convert_checkpoint, read_checkpoint

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
SOURCES = {
    "vit": (ViTConfig, ViTForImageClassification, {"intermediate_size": 40, "num_labels": 5}),
    "vit base": (ViTConfig, ViTModel, {"intermediate_size": 40, "qkv_bias": False}),
    "deit": (DeiTConfig, DeiTForImageClassificationWithTeacher, {"intermediate_size": 40, "num_labels": 5}),
    "dinov2": (Dinov2Config, Dinov2Model, {"mlp_ratio": 2}),
    "dinov2 registers": (Dinov2WithRegistersConfig, Dinov2WithRegistersModel, {"mlp_ratio": 2}),
}


def make_source(kind):
    config, model, options = SOURCES[kind]
    torch.manual_seed(0)
    source = model(config(**SIZES, **options)).eval()
    with torch.no_grad():  # so that no part stays at 0 or 1, where a lost weight would not show
        for parameter in source.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return source


def outputs(model, pixels):
    with torch.no_grad():
        output = model(pixels)
    return output.logits if "logits" in output else output.last_hidden_state


@pytest.mark.parametrize("names", ["version 4", "version 5"])
@pytest.mark.parametrize("kind", SOURCES)
def test_models_of_transformers_compute_the_same(kind, names, tmp_path):
    source = make_source(kind)
    source.save_pretrained(tmp_path / "source")  # writes the names of version 4
    path = tmp_path / "source" / "model.safetensors"
    written = any("attention.attention.query" in name for name in load_file(path))
    assert written
    if names == "version 5":
        save_file({name: value.contiguous() for name, value in source.state_dict().items()}, path)
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    loader = AutoModelForImageClassification if "logits" in source(torch.zeros(1, 3, 32, 32)) else AutoModel
    model = loader.from_pretrained(tmp_path / "out").eval()
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(outputs(model, pixels), outputs(source, pixels), rtol=1e-4, atol=1e-5)


# ---- timm's names ---------------------------------------------------------------------------------------------------


def timm_state(kind, depth=2, width=192, tokens=16, labels=5):
    """Random weights under the published names: timm's for vit, deit, dino; gamma_1 as in DeiT-III's own files."""
    torch.manual_seed(1)
    shapes = {
        "cls_token": (1, 1, width), "patch_embed.proj.weight": (width, 3, 8, 8), "patch_embed.proj.bias": (width,),
        "norm.weight": (width,), "norm.bias": (width,),
    }  # fmt: skip
    prefix = {"vit": 1, "deit distilled": 2, "deit3": 0, "dino": 1}[kind]
    shapes["pos_embed"] = (1, tokens + prefix, width)
    if kind != "dino":
        shapes |= {"head.weight": (labels, width), "head.bias": (labels,)}
    if kind == "deit distilled":
        shapes |= {"dist_token": (1, 1, width), "head_dist.weight": (labels, width), "head_dist.bias": (labels,)}
    for n in range(depth):
        for name, shape in (
            ("norm1", (width,)), ("norm2", (width,)), ("attn.qkv", (3 * width, width)), ("attn.proj", (width, width)),
            ("mlp.fc1", (2 * width, width)), ("mlp.fc2", (width, 2 * width)),
        ):  # fmt: skip
            shapes[f"blocks.{n}.{name}.weight"] = shape
            shapes[f"blocks.{n}.{name}.bias"] = shape[:1]
        if kind == "deit3":
            shapes |= {f"blocks.{n}.gamma_1": (width,), f"blocks.{n}.gamma_2": (width,)}
    return {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}


def timm_forward(state, kind, pixels, heads=3):
    """A ViT written out from timm's names."""
    width = state["cls_token"].shape[-1]
    patches = F.conv2d(pixels, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=8)
    patches = patches.flatten(2).mT
    batch = len(pixels)
    prefix = [state[name].expand(batch, -1, -1) for name in ("cls_token", "dist_token") if name in state]
    if kind == "deit3":
        x = torch.cat([*prefix, patches + state["pos_embed"]], 1)
    else:
        x = torch.cat([*prefix, patches], 1) + state["pos_embed"]

    def norm(x, name):
        return F.layer_norm(x, (width,), state[name + ".weight"], state[name + ".bias"], 1e-6)

    def linear(x, name):
        return F.linear(x, state[name + ".weight"], state[name + ".bias"])

    n = 0
    while f"blocks.{n}.norm1.weight" in state:
        block = f"blocks.{n}."
        q, k, v = (
            linear(norm(x, block + "norm1"), block + "attn.qkv").view(batch, -1, 3, heads, width // heads).unbind(2)
        )
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        y = linear(y.transpose(1, 2).flatten(2), block + "attn.proj")
        x = x + y * state.get(block + "gamma_1", 1.0)
        y = linear(F.gelu(linear(norm(x, block + "norm2"), block + "mlp.fc1")), block + "mlp.fc2")
        x = x + y * state.get(block + "gamma_2", 1.0)
        n += 1
    x = norm(x, "norm")
    if kind == "dino":
        return x
    logits = linear(x[:, 0], "head")
    return (logits + linear(x[:, 1], "head_dist")) / 2 if kind == "deit distilled" else logits


@pytest.mark.parametrize("kind", ["vit", "deit distilled", "deit3", "dino"])
@pytest.mark.parametrize("container", ["safetensors", "pth", "nested"])
def test_timm_and_original_files_compute_the_same(kind, container, tmp_path):
    state = timm_state(kind)
    path = tmp_path / ("weights.safetensors" if container == "safetensors" else "weights.pth")
    if container == "safetensors":
        save_file(state, path)
    elif container == "pth":
        torch.save(state, path)
    elif kind == "dino":  # as DINO saves its teacher, projection head and all
        teacher = {f"module.backbone.{name}": value for name, value in state.items()}
        torch.save({"teacher": {**teacher, "module.head.mlp.0.weight": torch.zeros(2, 2)}, "epoch": 3}, path)
    else:  # as DeiT saves its models
        torch.save({"model": state}, path)
    convert_checkpoint(path, tmp_path / "out")
    loader = AutoModel if kind == "dino" else AutoModelForImageClassification
    model = loader.from_pretrained(tmp_path / "out").eval()
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(outputs(model, pixels), timm_forward(state, kind, pixels), rtol=1e-4, atol=1e-5)


# ---- options and errors ---------------------------------------------------------------------------------------------


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


def test_missing_and_left_over_weights_are_listed_and_nothing_is_written(tmp_path, capsys):
    state = timm_state("vit")
    broken = copy.copy(state)
    del broken["norm.bias"]
    broken["norm_pre.weight"] = torch.ones(3)
    broken["head.weight"] = torch.ones(5, 7)
    save_file(broken, tmp_path / "w.safetensors")
    assert main(["convert", str(tmp_path / "w.safetensors"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "missing: vit.layernorm.bias" in error and "left over: norm_pre.weight" in error
    assert "classifier.weight (5, 7) instead of (5, 192)" in error
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_hostile_and_unknown_files_are_refused(tmp_path):
    class Hostile:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    torch.save({"model": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(OSError, match=r"hostile.pth holds more than tensors"):
        read_checkpoint(tmp_path / "hostile.pth")
    assert not (tmp_path / "executed").exists()
    (tmp_path / "cut.safetensors").write_bytes(b"12345678abc")
    with pytest.raises(OSError, match=r"cut.safetensors cannot be read"):
        read_checkpoint(tmp_path / "cut.safetensors")
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
