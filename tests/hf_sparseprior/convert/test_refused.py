"""What formats of others cannot express is refused by name, and a prior is dropped only when asked."""

import pytest
from transformers import AutoModel

from hf_sparseprior.__main__ import main
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.convert import convert_checkpoint, target_formats
from hf_sparseprior.models.pretrained import load_whole_model
from tests.hf_sparseprior.convert.conversions import assert_same
from tests.hf_sparseprior.models.iformer_oracle import SMALL as IFORMER
from tests.hf_sparseprior.small import scatter

VIT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8,
    "intermediate_size": 48, "num_labels": 5,
}  # fmt: skip
SMALL = {
    "sparseprior_vit": VIT,
    # Grids of 8x8 and 4x4 patches; the windows of the second layer are shifted.
    "sparseprior_swin": {
        "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 32, "patch_size": 4,
        "num_labels": 5,
    },
    "sparseprior_convit": {
        "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "num_local_layers": 2, "image_size": 32,
        "patch_size": 8, "intermediate_size": 24, "num_labels": 5,
    },
    "sparseprior_iformer": IFORMER,
}  # fmt: skip
DINOV2 = {"layerscale_value": 1, "pooling": "class_token_and_mean"}
SIGLIP = {"use_class_token": False, "pooling": "mean"}
DINOV3 = {"position_embedding": "rotary", "layerscale_value": 0.1}
GREY = {"num_channels": 1, "image_mean": 0.5, "image_std": 0.5}
# Of a family (target, fields, what the message names).
REFUSED = {
    "sparseprior_vit": [
        (
            "vit",
            {
                "pooling": "class_token_and_mean", "num_register_tokens": 2, "layerscale_value": 0.1, "mlp_bias": False,
                "position_embedding_for_class_token": False, "interpolation": "bilinear",
            },
            "pooling='class_token_and_mean'; num_register_tokens=2; layerscale_value=0.1; mlp_bias=False must be True; "
            "position_embedding_for_class_token=False must be True; interpolation='bilinear' must be 'bicubic'",
        ),
        (
            "vit",
            {"use_class_token": False, "pooling": "mean", "position_embedding": "none"},
            "pooling='mean' must be 'class_token'; use_class_token=False must be True; "
            "position_embedding='none' must be 'learned'",
        ),
        ("vit", {"use_distillation_token": True}, "use_distillation_token=True must be False"),
        ("deit", {"proj_bias": False}, "use_distillation_token=False must be True; proj_bias=False must be True"),
        (
            "dinov2",
            {"num_register_tokens": 1, "intermediate_size": 40, "image_size": (32, 48)},
            "pooling='class_token' must be 'class_token_and_mean'; layerscale_value=None must be a number; "
            "num_register_tokens=1 must be 0; intermediate_size=40 must be a multiple; image_size=[32, 48]",
        ),
        ("dinov2_with_registers", DINOV2, "num_register_tokens=0 must be at least 1"),
        ("dinov3_vit", {}, "position_embedding='learned' must be 'rotary'; layerscale_value; classifier"),
        (
            "siglip",
            {
                "num_register_tokens": 2, "layerscale_value": 0.1, "qkv_bias": False, "position_embedding": "none",
                "image_size": (32, 48), "patch_size": (8, 4),
            },
            "use_class_token=True must be False; pooling='class_token' must be 'mean'; num_register_tokens=2; "
            "layerscale_value=0.1 must be None; qkv_bias=False must be True; position_embedding='none'; "
            "image_size=[32, 48] must be square; patch_size=[8, 4] must be square",
        ),
        (
            "timm",
            {"hidden_act": "relu", "proj_bias": False, "pooling": "class_token_and_mean", "layer_norm_eps": 1e-3},
            "hidden_act='relu' must be 'gelu'; mlp_bias=True must be False; must be 'class_token' or 'mean'; "
            "layer_norm_eps=0.001 must be about 1e-06",
        ),
        (
            "timm",
            {"use_distillation_token": True, "use_distillation_classifier": False, "num_register_tokens": 1},
            "num_register_tokens=1 must be 0; use_distillation_classifier=False must be True",
        ),
        (
            "original",
            {"num_register_tokens": 1, "pooling": "mean", "proj_bias": False},
            "pooling='mean' must be 'class_token'; proj_bias=False must be True; num_register_tokens=1 must be",
        ),
        *(
            (target, {**DINOV3, "num_register_tokens": 4}, "position_embedding='rotary' must be 'learned'")
            for target in ("vit", "dinov2_with_registers", "timm", "original", "siglip")
        ),
    ],
    "sparseprior_swin": [
        ("timm", {"hidden_act": "relu"}, "hidden_act='relu' must be 'gelu'"),
        ("swin", {"layer_norm_eps": 1e-3}, "layer_norm_eps=0.001 must be 1e-05"),
        ("timm", {"image_size": 40}, "image_size=40: stage 1 has 10x10 patches, which must be a multiple"),
        ("timm", {"image_size": [32, 64]}, "stage 2 has 4x8 patches, which must be square or above a window"),
        (
            "original",
            {"image_size": 36, "window_size": 3, "depths": [1, 1], "num_heads": [2, 2]},
            "image_size=36: stage 1 has 9x9 patches, which must be even to be merged",
        ),
    ],
    "sparseprior_convit": [
        ("timm", {"hidden_act": "relu"}, "hidden_act='relu' must be 'gelu'"),
        ("timm", {"layer_norm_eps": 1e-3}, "layer_norm_eps=0.001 must be 1e-06"),
        ("timm", {"image_size": [32, 64]}, "image_size=[32, 64] has 4x8 patches, which must be a square"),
        ("timm", {"num_local_layers": 0}, "num_local_layers=0 must be at least 1"),
        ("original", {"interpolation": "bilinear"}, "interpolation='bilinear' must be 'bicubic'"),
        ("original", {"pooling": "mean"}, "pooling='mean' must be 'class_token' in a file"),
    ],
    "sparseprior_iformer": [
        ("original", {"hidden_act": "relu"}, "hidden_act='relu' must be 'gelu'"),
        ("original", {"batch_norm_eps": 1e-3}, "batch_norm_eps=0.001 must be 1e-05"),
        ("original", GREY, "num_channels=1 must be 3"),
        (
            "original",
            {name: IFORMER[name][1:] for name in IFORMER if name.endswith(("_sizes", "_depths", "_reduction"))},
            "hidden_sizes=[6, 8, 16] must be of 4 stages",
        ),
    ],
}  # fmt: skip
DROPPED = [
    (family, target)
    for target, families in target_formats().items()
    for family in families
    if family in SMALL and "sparseprior" not in target
    if family != "sparseprior_vit" or target in ("vit", "dinov3_vit", "timm", "original")
]


def saved(family, folder, **fields):
    """A saved classifier with no weight at 0 or 1."""
    model = scatter(FAMILIES[family].classifier(FAMILIES[family].make_config(**{**SMALL[family], **fields})))
    model.save_pretrained(folder)
    return model


def file_or_folder(folder, target):
    return folder / ("out.pth" if target == "original" else "out")


@pytest.mark.parametrize(
    ("family", "target", "fields", "message"),
    [(family, *case) for family in REFUSED for case in REFUSED[family]],
    ids=str,
)
def test_what_a_target_cannot_express_is_refused(family, target, fields, message, tmp_path, capsys):
    saved(family, tmp_path / "ours", **fields)
    out = file_or_folder(tmp_path, target)
    capsys.readouterr()  # transformers' bars of saving
    assert main(["convert", str(tmp_path / "ours"), str(out), "--to", target]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f" {target} cannot express this model: " in line
    assert [part for part in message.split("; ") if part not in line] == []
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(("family", "target"), DROPPED)
def test_a_prior_is_dropped_only_when_asked(family, target, tmp_path, capsys):
    fields = DINOV3 if target == "dinov3_vit" else {}
    model = saved(family, tmp_path / "ours", prior="fibottention+violin", **fields)
    out = str(file_or_folder(tmp_path, target))
    command = ["convert", str(tmp_path / "ours"), out, "--to", target]
    classifies = target != "dinov3_vit"
    command += [] if classifies else ["--drop-classifier"]
    for options, name in (([], model.config.prior_name), (["--prior", "window"], "window")):
        assert main([*command, *options]) == 2
        assert f"prior '{name}" in (error := capsys.readouterr().err)
        assert f"has no place in {target}; --prior dense drops it" in error
        assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    assert main([*command, "--prior", "dense"]) == 0
    assert "is replaced by 'dense'" in capsys.readouterr().out
    heads = ["--heads", "3"] if family == "sparseprior_vit" and target in ("timm", "original") else []
    assert main(["convert", out, str(tmp_path / "back"), *heads]) == 0
    back = load_whole_model(tmp_path / "back", *([] if classifies else [AutoModel]))
    weights = (model if classifies else model.base_model).state_dict()
    kept = {key: value for key, value in weights.items() if "decay_bias" not in key}
    assert len(kept) < len(weights) and back.config.prior_name == "dense"
    assert_same(back.state_dict(), kept)


def test_targets_and_options_of_another_family_are_refused(tmp_path):
    saved("sparseprior_swin", tmp_path / "ours")
    for target in ("vit", "timesformer", "sparseprior_vit"):
        with pytest.raises(ValueError, match=f"is a sparseprior_swin, which {target} cannot express"):
            convert_checkpoint(tmp_path / "ours", tmp_path / "out", to=target)
    convert_checkpoint(tmp_path / "ours", tmp_path / "w.safetensors", to="timm")
    with pytest.raises(ValueError, match="--heads 3 is for a ViT under timm's or mm's names; this source has a number"):
        convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "out", num_attention_heads=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "w.safetensors"]
