"""Models of transformers, timm and peft as exported files: stock ones with a prior in place, adapters, heads.

The oracle is the model itself in float64 with attention written out.
"""

import copy
import json

import numpy as np
import peft
import pytest
import torch
from transformers import (
    BitImageProcessor,
    Dinov2Config,
    Dinov2ForImageClassification,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

import hf_sparseprior as sp
from hf_sparseprior.adapters import lora_config
from hf_sparseprior.adapters.stock_attention import stock_priors
from hf_sparseprior.cli import deployment
from hf_sparseprior.cli.deployment import DEPLOYMENT
from hf_sparseprior.cli.exportable import Exportable
from hf_sparseprior.cli.runtimes import FORMATS
from hf_sparseprior.saving.processor import PROCESSOR
from tests.each import each
from tests.hf_sparseprior.adapters.stock_models import STOCK, TINY, move_decays, tiny_clip
from tests.hf_sparseprior.cli.test_deployment import FILES, export, same
from tests.hf_sparseprior.models import head_cases
from tests.timm_oracle import import_timm

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")

PRIOR = "fibottention+violin"
BIASED = ("beit", "swin")  # a bias is added to the logits of all pairs, which no kernel takes
CLASSIFIER = {"num_labels": 3, "id2label": {0: "ant", 1: "bee", 2: "cat"}}


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    """Nothing is timed, and no other model is exported for that."""
    monkeypatch.setattr(deployment, "latencies", lambda *arguments: ({}, {}, []))


@pytest.fixture
def kernels(monkeypatch):
    """They run however few the tokens are."""
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "cpp")


def with_prior(model, prior=PRIOR):
    move_decays(sp.apply_prior(model, prior))
    return model


def written_out(model, pixels):
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv("SPARSEPRIOR_BACKEND", "reference")
        return [output.numpy() for output in Exportable(copy.deepcopy(model).double())(pixels)]


def check(model, folder, formats=FILES, **options):
    """Files give what the model gives, and the model is left alone. Returns what deployment.json says."""
    state, attention = copy.deepcopy(model.state_dict()), getattr(model, "config", None) and model.config.to_dict()
    for name in formats:
        sp.export(model, folder / name, name, **options)
        about = json.loads((folder / name / DEPLOYMENT).read_text())
        pixels = 4 * torch.randn(2, *about["input"]["shape"][1:], generator=torch.Generator().manual_seed(3))
        same(FORMATS[name].load(folder / name / about["file"], 1)(pixels), written_out(model, pixels))
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert attention is None or model.config.to_dict() == attention
    return about


def cases(names, quick):
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


# ---- transformers' models -------------------------------------------------------------------------------------------


@each("name", [name for name in STOCK if name != "mae"])
def test_a_stock_model_takes_images_alone(name):
    model, pixels = with_prior(STOCK[name].build()), STOCK[name].example()["pixel_values"]
    with torch.no_grad():
        expected = model(pixel_values=pixels).last_hidden_state
        exported = Exportable(model)
        torch.testing.assert_close(exported.named(pixels)["last_hidden_state"], expected)
    assert exported.images(2).shape == pixels.shape


# The other models of STOCK are, to a file, one of these.
EXPORTED = ["vit", "dinov3", "beit", "clip", "siglip", "videomae", "vivit", "timesformer", "swin"]


@pytest.mark.parametrize("name", cases(EXPORTED, ["vit"]))
def test_stock_models(name, tmp_path, monkeypatch):
    model = with_prior(STOCK[name].build())
    if name in ("vit", *BIASED):
        about = check(model, tmp_path, ["onnx"])
        assert about["prior"] == PRIOR and set(about["attention"]) == {"reference"}
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "cpp")
    if name in BIASED:
        with pytest.raises(ValueError, match=r"cannot be traced: .* a bias is added to the logits of all pairs"):
            sp.export(model, tmp_path / "kernels", kernels=True)
        return
    (tmp_path / "kernels").mkdir()
    about = check(model, tmp_path / "kernels", FILES if name == "vit" else ["onnx"], kernels=True)
    assert set(about["attention"]) in ({"diagonal_output", "pair_weights"}, {"listed_forward", "listed_weights"})


def test_a_dense_model_has_no_mask_of_all_pairs(tmp_path):
    """transformers makes one, which hides nothing, whenever a program is traced."""
    traced = deployment.trace(Exportable(STOCK["vit"].build()))
    tables = [node for node in traced.program.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert tables and all(len(node.args) == 3 and not node.kwargs.get("attn_mask") for node in tables)
    assert Exportable(STOCK["vit"].build()).dense_twin() is None


def test_the_dense_twin_of_a_stock_model_is_the_model():
    model = with_prior(STOCK["vit"].build())
    pixels = torch.randn(1, 3, 32, 32)
    twin = Exportable(model).dense_twin()
    with torch.no_grad():
        assert torch.equal(twin(pixels)[0], STOCK["vit"].build()(pixels).last_hidden_state)
    assert stock_priors(model)


def test_masked_autoencoders_and_towers_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"ViTMAEModel with prior .* gives other outputs than the model"):
        sp.export(with_prior(STOCK["mae"].build()), tmp_path / "out", "torch")
    with pytest.raises(ValueError, match="CLIPModel with prior 'dense' cannot be traced: You have to specify"):
        sp.export(tiny_clip(), tmp_path / "out", "torch")
    with pytest.raises(ValueError, match="ResNetModel cannot be exported: its config does not say the size of images"):
        sp.export(ResNetModel(ResNetConfig(hidden_sizes=[8] * 4, depths=[1] * 4)), tmp_path / "out", "torch")
    with pytest.raises(ValueError, match="Linear must be a model of hf_sparseprior, transformers or timm"):
        sp.export(torch.nn.Linear(1, 1), tmp_path / "out", "torch")
    with pytest.raises(ValueError, match=r"model='a\.pt2' must be a model of hf_sparseprior"):
        sp.export("a.pt2", tmp_path / "out", "torch")
    for options, message in (
        ({"format": "tflite"}, "format='tflite' must be one of torch, onnx, openvino"),
        ({"backend": "cpp"}, "backend='cpp' must be one of sdpa, gather, diagonal, reference"),
        ({"size": (0, 32)}, r"size=\(0, 32\) must be \(height, width\) or one number, each from 1 to 16384"),
        ({"processor": 3}, "processor=3 must be an image processor of transformers or a folder of one"),
        ({"images": tmp_path}, "--images is for classifiers of images, not for a ViTModel"),
    ):
        with pytest.raises(ValueError, match=message):
            sp.export(STOCK["vit"].build(), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [None, (40, 24)])
def test_a_saved_folder_with_its_processor(size, tmp_path, capsys):
    model = with_prior(ViTForImageClassification(ViTConfig(**TINY, **CLASSIFIER)).eval())
    model.save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    options = [] if size is None else ["--size", f"{size[0]}x{size[1]}"]
    assert export(tmp_path / "model", tmp_path / "out", "--format", "onnx", *options) == 0
    height, width = size or (32, 32)
    about = json.loads((tmp_path / "out" / DEPLOYMENT).read_text())
    assert about["labels"] == ["ant", "bee", "cat"] and about["input"]["shape"] == ["batch", 3, height, width]
    assert json.loads((tmp_path / "out" / PROCESSOR).read_text())["size"] == {"height": height, "width": width}
    pixels = torch.randn(2, 3, height, width)
    with torch.no_grad():
        expected = model(pixels, interpolate_pos_encoding=True).logits.numpy()
    np.testing.assert_allclose(FORMATS["onnx"].load(tmp_path / "out" / "model.onnx", 1)(pixels)[0], expected, atol=1e-5)


def test_the_processor_says_the_size_of_a_stock_model(tmp_path, capsys):
    """DINOv2 is configured for images of 518 pixels, and its processor crops to 224."""
    config = Dinov2Config(**{**TINY, "image_size": 32}, mlp_ratio=2, num_labels=3)
    model = with_prior(Dinov2ForImageClassification(config).eval())
    processor = BitImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 24, "width": 24})
    about = check(model, tmp_path, ["torch"], processor=processor)
    assert about["image_size"] == [24, 24]
    written = json.loads((tmp_path / "torch" / PROCESSOR).read_text())
    assert written["crop_size"] == {"height": 24, "width": 24} and written["size"] == {"shortest_edge": 28}
    (line,) = [line for line in sp.export(model, tmp_path / "plain", "torch") if PROCESSOR in line]
    assert line == f"without {PROCESSOR}: the model does not say how its images are prepared (processor=)"
    with pytest.raises(ValueError, match=r"crop_size=.* must be {'height': 32, 'width': 32}, the size of the exported"):
        sp.export(model, tmp_path / "other", "torch", size=32, processor=processor)


# ---- timm's ---------------------------------------------------------------------------------------------------------


TIMM = {
    "vit": ("vision_transformer", "VisionTransformer", {"patch_size": 4}),
    "rotary": ("eva", "Eva", {"patch_size": 4, "use_rot_pos_emb": True, "attn_type": "rope"}),
    "flexible": ("naflexvit", "NaFlexVit", {"patch_size": 4, "pos_embed_grid_size": (8, 8)}),
    "swin": (
        "swin_transformer",
        "SwinTransformer",
        {"patch_size": 2, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
    ),
}


@pytest.mark.parametrize("name", cases(TIMM, ["vit"]))
def test_timm_models(name, tmp_path, kernels):
    timm = import_timm()
    module, cls, options = TIMM[name]
    torch.manual_seed(0)
    sizes = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}
    if name == "swin":
        sizes = {"img_size": 32, "num_classes": 5}
    model = getattr(getattr(timm.models, module), cls)(**{**sizes, **options}).eval()
    model.pretrained_cfg = {
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.2, 0.2),
        "crop_pct": 0.5,
        "interpolation": "bicubic",
    }
    with_prior(model)
    if name == "swin":
        with pytest.raises(ValueError, match="a bias is added to the logits of all pairs"):
            sp.export(model, tmp_path / "out", kernels=True)
        return
    about = check(model, tmp_path, ["onnx"], kernels=True)
    assert about["outputs"] == ["logits"] and set(about["attention"]) == {"diagonal_output", "pair_weights"}
    written = json.loads((tmp_path / "onnx" / PROCESSOR).read_text())
    assert written["size"] == {"shortest_edge": 64} and written["image_mean"] == [0.5, 0.4, 0.3]


# ---- peft's ---------------------------------------------------------------------------------------------------------


def moved(model):
    """An adapter that changes its model."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "classifier" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif "decay_biases" in name:
                parameter.copy_(2 * torch.rand(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize(
    ("own", "decay"),
    [(False, True), pytest.param(True, False, marks=pytest.mark.slow)],
)
def test_folders_of_adapters(own, decay, tmp_path, capsys, monkeypatch):
    """LoRA is merged, a decay is kept, and the classifier has as many classes as it was trained for."""
    if own:
        base = sp.SparsePriorViTForImageClassification(sp.SparsePriorViTConfig(**TINY, prior="fibottention"))
    else:
        base = ViTForImageClassification(ViTConfig(**TINY))
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base", num_labels=3, ignore_mismatched_sizes=True)
    lora = lora_config(base, r=2)
    model = moved(peft.get_peft_model(base, sp.LoraViolinConfig.from_lora(lora) if decay else lora))
    model.save_pretrained(tmp_path / "adapter")
    if decay:
        monkeypatch.setenv("SPARSEPRIOR_BACKEND", "cpp")
    assert export(tmp_path / "adapter", tmp_path / "out", "--format", "onnx", *["--kernels"] * decay) == 0
    about = json.loads((tmp_path / "out" / DEPLOYMENT).read_text())
    assert about["prior"] == "+".join(["fibottention"] * own + ["violin"] * decay or ["dense"])
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(pixels).logits.numpy()
    assert expected.shape == (2, 3)
    found = FORMATS["onnx"].load(tmp_path / "out" / "model.onnx", 1)(pixels)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    sp.export(model, tmp_path / "again", "torch")  # and from memory
    assert any("lora_A" in name for name, _ in model.named_parameters())


def test_adapters_without_a_model_are_refused_in_a_line(tmp_path, capsys):
    base = ViTForImageClassification(ViTConfig(**TINY))
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(
        type(base).from_pretrained(tmp_path / "base"), peft.LoraConfig(target_modules=["q_proj"])
    )
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    written = json.loads(file.read_text())
    for key, value, message in (
        ("auto_mapping", {"base_model_class": "Net"}, "the adapter was made on 'Net', and models of transformers and"),
        ("base_model_name_or_path", None, "base_model_name_or_path=None must name the model"),
    ):
        file.write_text(json.dumps({**written, key: value}))
        assert export(tmp_path / "adapter", tmp_path / "out", "--format", "torch") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---- heads ----------------------------------------------------------------------------------------------------------


HEADS = {"upernet": {"logits"}, "detr": {"logits", "pred_boxes"}, "dpt": {"predicted_depth"}, "vitpose": {"heatmaps"}}


@each("head", HEADS)
def test_outputs_of_heads(head):
    exported = Exportable(head_cases.make(head, "sparseprior_vit").eval())
    with torch.no_grad():
        assert set(exported.named(exported.images(1))) == HEADS[head]
    assert exported.dense_twin().prior == "dense"


@pytest.mark.parametrize("head", cases(["upernet", "detr"], ["upernet"]))
def test_heads_of_transformers(head, tmp_path, kernels):
    model = head_cases.make(head, "sparseprior_vit").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    about = check(model, tmp_path, ["onnx"], kernels=True)
    assert set(about["outputs"]) == HEADS[head] and about["attention"]["diagonal_output"] == 4
