"""DINOv3's ViT of transformers as ours and back, of timm and its own files as ours; the oracles are their classes."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, DINOv3ViTBackbone, DINOv3ViTConfig, DINOv3ViTModel

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.convert import convert_checkpoint
from tests.hf_sparseprior.small import scatter
from tests.timm_oracle import import_timm

SIZES = {
    **{"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8},
    **{"intermediate_size": 80, "num_register_tokens": 4, "layerscale_value": 0.5},
}
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def source(folder, cls=DINOv3ViTModel, memory=False, **fields):
    """A saved model of transformers in which no weight is 0 or 1, and the model."""
    torch.manual_seed(0)
    model = scatter(cls(DINOv3ViTConfig(**{**SIZES, **fields})))
    model.save_pretrained(folder)
    if memory:  # the names that version 5 has
        state = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("memory", "fields"),
    [
        *((False, {}), (True, {"num_register_tokens": 0}), (False, {"key_bias": True})),
        *((True, {"query_bias": False, "value_bias": False}), (True, {"rope_theta": 50.0, "image_size": [32, 48]})),
    ],
)
def test_same_tokens(tmp_path, memory, fields) -> None:
    theirs = source(tmp_path / "source", memory=memory, **fields)
    convert_checkpoint(tmp_path / "source", tmp_path / "ours")
    ours = sp.SparsePriorViTModel.from_pretrained(tmp_path / "ours").eval()
    for size in ((32, 32), (48, 32), (64, 24)):
        pixels = torch.randn(2, 3, *size)
        with torch.no_grad():
            expected, found = theirs(pixels), ours(pixels)
        torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(found.pooler_output, expected.pooler_output, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("prior", ["fibottention+violin", "topk"])
def test_a_prior_does_what_apply_prior_does(tmp_path, prior: str) -> None:
    theirs = source(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "ours", prior=prior)
    ours = sp.SparsePriorViTModel.from_pretrained(tmp_path / "ours").eval()
    given = sp.apply_prior(theirs, ours.config.prior).eval()
    weights = {name: value for name, value in ours.state_dict().items() if "predictor" in name or "decay_bias" in name}
    own = dict(given.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            layer, _, rest = name.removeprefix("layers.").partition(".attention.")
            [match] = [key for key in own if f"layer.{layer}." in key and key.endswith(rest)]
            own[match].copy_(value)
        torch.testing.assert_close(ours(PIXELS)[0], given(PIXELS)[0], atol=2e-5, rtol=1e-4)


def test_training_changes_the_places_alike(tmp_path) -> None:
    theirs = source(tmp_path / "source", pos_embed_rescale=2.0, pos_embed_shift=0.1).train()
    convert_checkpoint(tmp_path / "source", tmp_path / "ours")
    ours = sp.SparsePriorViTModel.from_pretrained(tmp_path / "ours").train()
    found = []
    for model in (theirs, ours):
        torch.manual_seed(4)
        with torch.no_grad():
            found.append(model(PIXELS).last_hidden_state)
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        assert (ours(PIXELS).last_hidden_state - found[1]).abs().max() > 1e-3


def test_backbone(tmp_path) -> None:
    theirs = source(tmp_path / "source", DINOv3ViTBackbone, memory=True, out_features=["stage1", "stage2"])
    convert_checkpoint(tmp_path / "source", tmp_path / "ours")
    ours = sp.SparsePriorViTBackbone.from_pretrained(tmp_path / "ours", out_features=["stage1", "stage2"]).eval()
    with torch.no_grad():
        for one, other in zip(ours(PIXELS).feature_maps, theirs(PIXELS).feature_maps, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"num_register_tokens": 0}, {"key_bias": True}, {"pos_embed_rescale": None}])
def test_there_and_back(tmp_path, fields, capsys) -> None:
    theirs = source(tmp_path / "source", **fields)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "dinov3_vit"]) == 0
    assert "SparsePriorViTModel as DINOv3ViTModel" in capsys.readouterr().out
    back = AutoModel.from_pretrained(tmp_path / "back").eval()
    assert type(back) is DINOv3ViTModel
    ignored = {"mask_token"}
    for (name, one), (other_name, other) in zip(back.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(one, other) or name.rpartition(".")[2] in ignored, name
    same = ("rope_theta", "query_bias", "key_bias", "value_bias", "pos_embed_rescale", "layer_norm_eps", "image_size")
    assert [getattr(back.config, name) for name in same] == [getattr(theirs.config, name) for name in same]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_gated_mlp": True}, "use_gated_mlp=True: a gated MLP has no counterpart"),
        ({"value_bias": False}, "value_bias=False must be query_bias=True"),
        ({"model_type": "vit"}, "model_type='vit' must be dinov3_vit"),
    ],
)
def test_what_ours_cannot_express_is_refused(tmp_path, change, message, capsys) -> None:
    source(tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# ---- timm, and the original files -----------------------------------------------------------------------------------

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3, "mlp_ratio": 2.0}
ARCHITECTURES = ("vit_small_patch16_dinov3", "vit_small_patch16_dinov3_qkvb")


def timm_model(name: str, **arguments):
    """A model of timm in which no weight is 0 or 1."""
    torch.manual_seed(0)
    return scatter(import_timm().create_model(name, **TINY, **arguments))


@pytest.mark.parametrize(
    ("name", "classes", "pool"),
    [(ARCHITECTURES[0], 0, "token"), (ARCHITECTURES[0], 5, "avg"), (ARCHITECTURES[1], 5, "token")],
)
def test_folders_of_timm(tmp_path, name: str, classes: int, pool: str) -> None:
    theirs = timm_model(name, num_classes=classes, global_pool=pool)
    arguments = {**TINY, "global_pool": pool}
    import_timm().models.save_for_hf(theirs, tmp_path / "source", model_args=arguments, safe_serialization=True)
    convert_checkpoint(tmp_path / "source", tmp_path / "ours")
    cls = sp.SparsePriorViTForImageClassification if classes else sp.SparsePriorViTModel
    ours = cls.from_pretrained(tmp_path / "ours").eval()
    for size in ((32, 32), (48, 40)):
        pixels = torch.randn(2, 3, *size)
        with torch.no_grad():
            expected = theirs(pixels) if classes else theirs.forward_features(pixels)
            torch.testing.assert_close(ours(pixels)[0], expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_files_of_timm_and_the_original_names(tmp_path, name: str) -> None:
    """timm's own reader of the original files says which of their weights is which of its own."""
    theirs = timm_model(name, num_classes=0)
    state = {key: value.contiguous() for key, value in theirs.state_dict().items()}
    save_file(state, tmp_path / "timm.safetensors")
    renamed = {"reg_token": "storage_tokens"}
    original = {
        renamed.get(key, key).replace(".gamma_1", ".ls1.gamma").replace(".gamma_2", ".ls2.gamma"): value
        for key, value in state.items()
        if "attn.q_bias" not in key
    }
    width = TINY["embed_dim"]
    for number in range(TINY["depth"]):
        block = f"blocks.{number}.attn"
        original.pop(f"{block}.v_bias", None)
        if f"{block}.q_bias" in state:
            biases = (state[f"{block}.q_bias"], torch.zeros(width), state[f"{block}.v_bias"])
            original[f"{block}.qkv.bias"] = torch.cat(biases)
            original[f"{block}.qkv.bias_mask"] = torch.cat([torch.ones(width), torch.zeros(width), torch.ones(width)])
    original |= {"mask_token": torch.zeros(1, width), "rope_embed.periods": torch.ones(width // 3 // 4)}
    torch.save(original, tmp_path / "dinov3.pth")
    filtered = import_timm().models.eva.checkpoint_filter_fn(dict(original), theirs)
    assert filtered.keys() == state.keys() and all(torch.equal(filtered[key], state[key]) for key in state)
    for file in ("timm.safetensors", "dinov3.pth"):
        convert_checkpoint(tmp_path / file, tmp_path / f"{file} ours")
        ours = sp.SparsePriorViTModel.from_pretrained(tmp_path / f"{file} ours").eval()
        with torch.no_grad():
            expected = theirs.forward_features(PIXELS)
            torch.testing.assert_close(ours(PIXELS)[0], expected, atol=5e-5, rtol=1e-4)


def test_gated_models_of_timm_are_refused(tmp_path, capsys) -> None:
    theirs = timm_model("vit_small_plus_patch16_dinov3", num_classes=0)
    import_timm().models.save_for_hf(theirs, tmp_path / "source", model_args=TINY, safe_serialization=True)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "vit_small_plus_patch16_dinov3: a gated MLP (SwiGLU) has no counterpart" in error
    assert len(error.splitlines()) == 1 and not (tmp_path / "out").exists()
