"""Heads of transformers on every backbone: forward, backward, saved and loaded by their own classes."""

import json
import re
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.models import heads
from tests.each import each
from tests.hf_sparseprior.models import head_cases
from tests.processes import run_script

PAGE = Path(__file__).parents[3] / "docs" / "heads.md"
CELLS = [(head, family) for head in heads.HEADS for family in head_cases.BACKBONES]
TAKEN = [pair for pair in CELLS if head_cases.is_taken(*pair)]

# Every head, every family, and the heads that replace batch norms with the family that has some.
SAVED = [(head, family) for head, family in TAKEN if family == "sparseprior_vit" or head == "upernet"]
SAVED += [(head, "sparseprior_iformer") for head in ("detr", "rt_detr")]


def test_every_family_with_a_backbone_and_every_head_has_a_case():
    assert {name for name, family in FAMILIES.items() if family.backbone is not None} == set(head_cases.BACKBONES)
    assert set(heads.HEADS) == set(head_cases.OPTIONS) and len(TAKEN) > 40


def test_the_table_is_what_running_every_cell_gives():
    assert head_cases.table() in PAGE.read_text()


@each("head, family", TAKEN)
def test_every_weight_of_the_backbone_learns(head, family):
    """But for what has no influence: shifts of keys, and on these small grids queries and keys where a head has one."""
    left, _ = head_cases.weights_without_gradient(head, family)
    unmoved = re.compile(r"decay_bias\.(alpha|beta)$|[qk]_proj|[qk]_norm|pos_proj")
    assert [name for name in left if not unmoved.search(name)] == []


@pytest.mark.parametrize(("head", "family"), SAVED)
def test_saved_and_loaded_by_the_heads_own_class(head, family, tmp_path):
    model = head_cases.make(head, family).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.02 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    again, info = heads.HEADS[head].model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found, expected = (heads.backbone_of(each).config.to_dict() for each in (again, model))
    assert {**found, "dtype": None} == {**expected, "dtype": None}
    with torch.no_grad():
        found, expected = again.eval()(head_cases.pixels(head)), model(head_cases.pixels(head))
    # Convolutions of a head choose their algorithm by where a weight lies in memory.
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-7)


PADDED = ["mask2former", "maskformer", "detr", "conditional_detr", "dab_detr"]  # heads; with upernet also the logits


@pytest.mark.parametrize(
    ("head", "family"),
    [*(("upernet", family) for family in head_cases.BACKBONES), *zip(PADDED, cycle(head_cases.BACKBONES))],
)
def test_images_of_odd_sizes(head, family):
    """Zeros at bottom and right, up to what the backbone divides them by, change nothing but the size of the output."""
    model = head_cases.make(head, family).eval()
    width = 92 if "patch_size" not in head_cases.BACKBONES[family] or family == "sparseprior_swin" else 96
    images, padded = head_cases.pixels(head, 61, 90), torch.zeros(2, 3, 64, width)
    padded[..., :61, :90] = images
    with torch.no_grad():
        maps, expected = (heads.backbone_of(model)(given).feature_maps for given in (images, padded))
        output = model(images)
    assert all(torch.equal(map_, other) for map_, other in zip(maps, expected, strict=True))
    assert len(maps) == heads.HEADS[head].num_maps
    if head == "upernet":
        assert output.logits.shape == (2, 3, 61, 90) and output.logits.isfinite().all()


@pytest.mark.parametrize("head", ["detr", "rt_detr"])
def test_an_iformer_with_frozen_norms_computes_what_it_does_in_evaluation(head):
    """These heads replace the backbone's batch norms, those of tokens too, by frozen ones."""
    model = head_cases.make(head, "sparseprior_iformer")
    frozen = heads.backbone_of(model)
    alone = type(frozen)(frozen.config).eval()
    state = frozen.state_dict()
    assert alone.load_state_dict(state, strict=False).unexpected_keys == []
    images = head_cases.pixels(head)
    with torch.no_grad():
        for found, expected in zip(frozen.train()(images)[0], alone(images)[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_prior_changes_the_output():
    dense, sparse = (
        head_cases.make("upernet", "sparseprior_vit", prior=prior).eval() for prior in ("dense", "fibottention")
    )
    sparse.load_state_dict(dense.state_dict())
    with torch.no_grad():
        for model in (dense, sparse):
            for layer in heads.backbone_of(model).layers:
                layer.attention.q_proj.weight.mul_(50)
        found, other = (model(head_cases.pixels("upernet")).logits for model in (dense, sparse))
    assert (found - other).abs().max() > 1e-4


# ---- which maps ------------------------------------------------------------------------------------------------------


@each("family", head_cases.BACKBONES)
def test_a_pyramid_has_its_strides(family):
    model = head_cases.make("upernet", family)
    with torch.no_grad():
        maps = heads.backbone_of(model)(head_cases.pixels("upernet", 64, 128)).feature_maps
    assert [map_.shape[2:] for map_ in maps] == [(64 // stride, 128 // stride) for stride in (4, 8, 16, 32)]


@each(
    "patch, depth, scales, layers",
    [
        (16, 12, [4, 2, 1, 0.5], [3, 6, 9, 12]),
        (8, 4, [2, 1, 0.5, 0.25], [1, 2, 3, 4]),
        (32, 5, [8, 4, 2, 1], [1, 2, 4, 5]),
        (14, 6, [4, 2, 1, 0.5], [2, 3, 4, 6]),
    ],
)
def test_layers_and_scales_of_a_plain_model(patch, depth, scales, layers):
    config = head_cases.backbone_config(
        "sparseprior_vit", patch_size=patch, image_size=4 * patch, num_hidden_layers=depth
    )
    before = config.to_dict()
    fitted = heads.fitted_config("upernet", config)
    assert fitted.map_scales == scales and fitted.out_indices == layers
    assert config.to_dict() == before and fitted is not config


def test_maps_that_somebody_chose_stay():
    config = head_cases.backbone_config(
        "sparseprior_vit", num_hidden_layers=6, out_indices=[3, 4, 5, 6], map_scales=[1, 1, 1, 0.5]
    )
    fitted = heads.fitted_config("upernet", config)
    assert fitted.out_indices == [3, 4, 5, 6] and fitted.map_scales == [1, 1, 1, 0.5]


def test_one_attention_implementation_for_both():
    config = head_cases.backbone_config("sparseprior_vit", attn_implementation="eager")
    assert heads.backbone_of(heads.make_head("detr", config, **head_cases.OPTIONS["detr"])).config.to_dict()
    assert heads.fitted_config("detr", config)._attn_implementation == "eager"


@each(
    "head, family, changes, options, message",
    [
        ("fpn", "sparseprior_vit", {}, {}, "head='fpn' must be one of upernet, mask2former"),
        (["upernet"], "sparseprior_vit", {}, {}, r"head=\['upernet'\] must be one of"),
        ("upernet", "sparseprior_vit", {}, {"hiden_size": 8}, "no setting 'hiden_size'; did you mean 'hidden_size'?"),
        ("upernet", "sparseprior_vit", {}, {"backbone_config": {}}, "no setting 'backbone_config'"),
        ("detr", "sparseprior_vit", {}, {"num_labels": -1}, "num_labels=-1 must be"),
        ("mask2former", "sparseprior_swin", {}, {"num_labels": 0}, "num_labels=0 must be"),
        ("upernet", "sparseprior_vit", {}, {"num_labels": "5"}, "num_labels='5' must be"),
        ("upernet", "sparseprior_vit", {}, {"num_labels": 3, "id2label": {0: "a"}}, "num_labels=3 must be the 1 class"),
        ("detr", "sparseprior_vit", {}, {"id2label": ["a"]}, "id2label=.* must be a map of 0, 1, 2"),
        ("rt_detr", "sparseprior_vit", {}, {"encoder_in_channels": [1]}, r"encoder_in_channels=\[1\] follows from the"),
        ("upernet", "sparseprior_vit", {"num_hidden_layers": 3}, {}, "maps of 4 layers; this 'sparseprior_vit' has 3"),
        ("upernet", "sparseprior_vit", {"out_indices": [1, 2]}, {}, r"does not go with out_features=\['stage1', 'stag"),
        ("upernet", "sparseprior_vit", {"out_indices": [3]}, {}, r"does not go with out_features=\['stage3'\]"),
        ("upernet", "sparseprior_swin", {"out_indices": [1, 2, 3]}, {}, r"does not go with out_features"),
        ("upernet", "sparseprior_vit", {"patch_size": [8, 16]}, {}, r"patch_size=\[8, 16\] must be square"),
        ("upernet", "sparseprior_vit", {"reshape_hidden_states": False}, {}, "takes maps; reshape_hidden_states=False"),
        ("upernet", "sparseprior_swin", {"patch_size": 2}, {}, "takes maps of strides 4 8 16 32, up to the last stage"),
        ("rt_detr", "sparseprior_swin", head_cases.THREE_STAGES["sparseprior_swin"], {}, "_swin' has 4 8 16"),
        ("vitmatte", "sparseprior_vit", {"num_channels": 3}, {}, "num_channels=4, not 3"),
        ("vitmatte", "sparseprior_vit", {"patch_size": 14, "image_size": 56}, {}, "stride 16, which patches of 14"),
        ("vitmatte", "sparseprior_swin", {}, {}, "up to the last stage; this 'sparseprior_swin' has 4 8 16 32"),
        ("vitpose", "sparseprior_vit", {"use_class_token": True}, {}, "patches alone; in the last layer .* 1 tokens"),
        ("vitpose", "sparseprior_convit", {}, {}, "patches alone; in the last layer of this 'sparseprior_convit' 1"),
        ("dpt", "sparseprior_vit", {"num_register_tokens": 2}, {}, "one class token; in the last layer .* 3 tokens"),
        ("dpt", "sparseprior_convit", {"num_local_layers": 2}, {}, "maps of 4 layers; this 'sparseprior_convit' has 3"),
        ("dpt", "sparseprior_swin", {}, {}, "of layers of one width; a 'sparseprior_swin' has stages of several"),
    ],
)  # fmt: skip
def test_what_a_head_cannot_take_is_one_line(head, family, changes, options, message):
    config = head_cases.backbone_config(family, head if isinstance(head, str) else None, **changes)
    with pytest.raises(ValueError, match=message) as error:
        heads.make_head(head, config, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["sparseprior_timesformer", "resnet"])
def test_other_configs_are_refused(name):
    from transformers import ResNetConfig

    config = ResNetConfig() if name == "resnet" else FAMILIES[name].make_config()
    with pytest.raises(ValueError, match=f"upernet takes the config of a backbone, not a '{name}'"):
        heads.make_head("upernet", config)


def test_a_prior_that_drops_tokens_is_refused():
    with pytest.raises(ValueError, match="drops tokens, and the feature maps of a backbone need all of them"):
        head_cases.make("upernet", "sparseprior_vit", prior="evit")


def test_arguments_of_other_backbones_are_refused_unless_they_are_none():
    model = head_cases.make("vitpose", "sparseprior_vit")
    images = head_cases.pixels("vitpose")
    assert model(images, dataset_index=None).heatmaps.shape == (2, 5, 16, 16)
    with pytest.raises(TypeError, match=r"dataset_index=tensor\(\[0, 1\]\) is no argument of SparsePriorViTBackbone"):
        model(images, dataset_index=torch.tensor([0, 1]))


def test_token_backbones_refuse_odd_sizes():
    """Their heads count the patches themselves, without padding."""
    model = head_cases.make("dpt", "sparseprior_vit")
    with pytest.raises(ValueError, match="image of 61x64 pixels must be a multiple of the 16x16 patch"):
        model(head_cases.pixels("dpt", 61, 64))


FRESH = """
import hf_sparseprior
from safetensors.torch import load_file, save_file
from transformers import AutoModelForObjectDetection, AutoModelForSemanticSegmentation

images = load_file("images.safetensors")["images"]
upernet = AutoModelForSemanticSegmentation.from_pretrained("upernet").eval()
detr = AutoModelForObjectDetection.from_pretrained("detr").eval()
save_file({"upernet": upernet(images).logits.detach(), "detr": detr(images).logits.detach()}, "logits.safetensors")
"""


@pytest.mark.slow
def test_the_auto_classes_load_them_in_a_new_process(tmp_path):
    models = {name: head_cases.make(name, "sparseprior_vit").eval() for name in ("upernet", "detr")}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    images = head_cases.pixels("upernet")
    save_file({"images": images}, tmp_path / "images.safetensors")
    run_script(FRESH, folder=tmp_path, package=True)
    logits = load_file(tmp_path / "logits.safetensors")
    with torch.no_grad():
        for name, model in models.items():
            torch.testing.assert_close(logits[name], model(images).logits)
