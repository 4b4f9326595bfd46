"""The backbone of mm configs; but for two tests at the end, none of this needs mm itself."""

import importlib
import inspect
import pickle
from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_sparseprior import (
    SparsePriorConvitConfig,
    SparsePriorConvitForImageClassification,
    SparsePriorIformerConfig,
    SparsePriorIformerForImageClassification,
    SparsePriorSwinConfig,
    SparsePriorSwinForImageClassification,
    SparsePriorViTBackbone,
    SparsePriorViTConfig,
    SparsePriorViTForImageClassification,
    SparsePriorViTModel,
)
from hf_sparseprior.base.config_keys import config_keys
from hf_sparseprior.mm.backbone import (
    MM_KEYS,
    MMBackbone,
    SparsePriorConvit,
    SparsePriorIformer,
    SparsePriorSwin,
    SparsePriorViT,
    check_predictors,
    mm_backbone,
    register_backbones,
    save_backbone,
)
from hf_sparseprior.models.pretrained import load_changed_model
from tests.each import each
from tests.hf_sparseprior import small
from tests.hf_sparseprior.toys import TwoStageConfig, TwoStageForImageClassification, TwoStageModel, registered_family

SMALL = {
    "image_size": 48, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 48, "initializer_range": 0.3,
}  # fmt: skip
PRIORS = [
    *("dense", "fibottention", "violin", "fibottention+violin", "random", "sparsifiner", "swin_rpb"),
    {"layers": {"0": "dense", "1-2": "fibottention+violin"}},
    {"heads": ["fibottention", "window"]},
]


def randomised(model):
    """Every weight moved from where it was initialised."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture
def classifier(tmp_path):
    torch.manual_seed(0)
    model = randomised(SparsePriorViTForImageClassification(SparsePriorViTConfig(prior="fibottention+violin", **SMALL)))
    model.save_pretrained(tmp_path / "classifier")
    return model, str(tmp_path / "classifier")


@pytest.mark.parametrize(("prior", "size"), [*zip(PRIORS, cycle([(37, 90), (48, 48)]))])
def test_features_are_the_hidden_states_of_our_model_alone(prior, size):
    torch.manual_seed(0)
    backbone = randomised(SparsePriorViT(prior=prior, out_indices=(1, 3), apply_layernorm=False, **SMALL))
    alone = SparsePriorViTModel(SparsePriorViTConfig(prior=prior, **SMALL)).eval()
    alone.load_state_dict(backbone.state_dict())
    images = torch.randn(2, 3, *size)
    rows, columns = -(-size[0] // 8), -(-size[1] // 8)
    padded = torch.zeros(2, 3, 8 * rows, 8 * columns)
    padded[..., : size[0], : size[1]] = images
    with torch.no_grad():
        maps = backbone(images)
        states = alone(padded, output_hidden_states=True).hidden_states
    assert len(maps) == 2
    for found, state in zip(maps, (states[1], states[3]), strict=True):
        assert found.shape == (2, 24, rows, columns)
        expected = torch.stack([state[:, 1 + patch] for patch in range(rows * columns)], -1)
        assert torch.equal(found.flatten(2), expected)


def test_a_checkpoint_goes_there_and_back_unchanged(classifier, tmp_path):
    model, folder = classifier
    backbone = SparsePriorViT(pretrained=folder, out_indices=(1, 3), with_cp=True)
    assert set(backbone.state_dict()) == set(model.vit.state_dict())
    backbone.init_weights()
    save_backbone(backbone, str(tmp_path / "back"))
    back = SparsePriorViTForImageClassification.from_pretrained(tmp_path / "back")
    for key, value in model.vit.state_dict().items():
        assert torch.equal(back.vit.state_dict()[key], value)
    assert back.config.prior == model.config.prior and back.config.out_indices == model.config.out_indices
    back.classifier.load_state_dict(model.classifier.state_dict())
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        assert torch.equal(back.eval()(images).logits, model(images).logits)
    assert SparsePriorViTBackbone.from_pretrained(tmp_path / "back", out_indices=[2])(images).feature_maps[0].shape == (
        2, 24, 6, 6,
    )  # fmt: skip


def test_another_grid_interpolates_positions_and_another_prior_starts_anew(classifier):
    model, folder = classifier
    backbone = SparsePriorViT(pretrained=folder, image_size=64, prior="dense")
    backbone.init_weights()
    expected = model.vit.embeddings.resized_positions((8, 8))
    assert torch.equal(backbone.embeddings.position_embeddings, expected)
    assert not any("decay" in key for key in backbone.state_dict())
    with pytest.raises(ValueError, match=r"of another shape: layers\.0\.attention\.decay_bias"):
        SparsePriorViT(pretrained=folder, prior={"decay": {"name": "violin", "curves": ["snake"]}})


def test_a_folder_keeps_its_prior_where_only_the_preset_is_named(tmp_path):
    """Otherwise a folder with a mask would silently be taken for dense."""
    config = SparsePriorViTConfig.from_preset("deit_tiny", prior="fibottention", num_hidden_layers=1)
    SparsePriorViTModel(config).save_pretrained(tmp_path)
    backbone = SparsePriorViT(preset="deit_tiny", num_hidden_layers=1, pretrained=str(tmp_path), out_indices=[1])
    assert backbone.config.prior == config.prior and backbone.config.prior_name == "fibottention"


def test_mms_own_word_for_a_folder(classifier):
    _, folder = classifier
    backbone = SparsePriorViT(init_cfg={"type": "Pretrained", "checkpoint": folder})
    backbone.init_weights()
    assert torch.equal(backbone.layernorm.weight, classifier[0].vit.layernorm.weight)


def test_what_does_not_fit_is_named(classifier, tmp_path):
    _, folder = classifier
    with pytest.raises(ValueError, match=r"missing: layers\.3\.layernorm_before\.weight.*\(16 in all\)"):
        SparsePriorViT(pretrained=folder, num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"of another shape: layers\.0\.mlp\.fc1\.weight"):
        SparsePriorViT(pretrained=folder, intermediate_size=96)
    with pytest.raises(ValueError, match=r"left over: layers\.2"):
        SparsePriorViT(pretrained=folder, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"has num_attention_heads=\d, the backbone num_attention_heads=1"):
        SparsePriorViT(pretrained=folder, num_attention_heads=1)
    with pytest.warns(UserWarning, match="was trained with image_mean"):
        SparsePriorViT(pretrained=folder, image_mean=[0.1, 0.2, 0.3])
    with pytest.raises(OSError, match="pretrained=/nowhere is not a folder of a saved model"):
        SparsePriorViT(preset="deit_tiny", pretrained="/nowhere").init_weights()
    weights = load_file(f"{folder}/model.safetensors")
    del weights["vit.layers.1.mlp.fc2.weight"]
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match=r"lacks weights that fit its config: layers\.1\.mlp\.fc2\.weight"):
        SparsePriorViT(pretrained=folder)


def test_a_pickled_checkpoint_is_not_read(classifier, tmp_path):
    _, folder = classifier
    weights = tmp_path / "classifier" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "classifier" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(OSError, match="safetensors"):
        SparsePriorViT(pretrained=folder).init_weights()


def test_a_prior_that_prunes_tokens_is_refused():
    with pytest.raises(ValueError, match="drops tokens"):
        SparsePriorViT(prior="evit", **SMALL)


# ---- keys of mm's own backbones --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [0, 2, 3])
def test_frozen_stages_do_not_change(stages):
    backbone = SparsePriorViT(prior="violin", frozen_stages=stages, hidden_dropout_prob=0.5, **SMALL).train()
    learns = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
    layers = range(stages, 3)
    expected = tuple(f"layers.{layer}." for layer in layers) + (("layernorm.",) if layers else ())
    assert learns == {name for name, _ in backbone.named_parameters() if name.startswith(expected)}
    assert [layer.training for layer in backbone.layers] == [layer >= stages for layer in range(3)]
    assert not backbone.embeddings.training and backbone.eval().train().embeddings.training is False
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    if learns:
        backbone(torch.randn(1, 3, 48, 48))[0].square().sum().backward()
        torch.optim.SGD([p for p in backbone.parameters() if p.requires_grad], lr=1.0).step()
    changed = {name for name, value in backbone.state_dict().items() if not torch.equal(value, before[name])}
    assert changed <= learns and bool(changed) == bool(learns)


def test_norm_eval_keeps_the_statistics_of_batch_norms():
    images = torch.randn(2, 3, 48, 48)
    for norm_eval in (True, False):
        backbone = SparsePriorViT(stem="convolution", norm_eval=norm_eval, **SMALL).train()
        before = {name: value.clone() for name, value in backbone.named_buffers() if "running" in name}
        backbone(images)
        same = [torch.equal(value, before[name]) for name, value in backbone.named_buffers() if name in before]
        assert before and all(same) == norm_eval


@each("key, instead", MM_KEYS.items())
def test_keys_with_another_name_here_are_refused_with_it(key, instead):
    with pytest.raises(ValueError, match=f"{key}=True is no key of this backbone; use {instead.split()[0]}$"):
        SparsePriorViT(**SMALL, **{key: True})
    assert instead.split()[0] in SparsePriorViTConfig().to_dict()


@each(
    "theirs",
    [
        *(f"mmseg.models.backbones.{name}" for name in ("VisionTransformer", "SwinTransformer", "BEiT", "MAE")),
        *("mmseg.models.backbones.MixVisionTransformer", "mmdet.models.backbones.SwinTransformer"),
    ],
)
def test_every_key_of_mms_transformers_is_taken_or_answered(theirs):
    """By their signatures; a guess of what was meant would be a wrong one."""
    pytest.importorskip("mmcv.ops", reason="the extra `dense` is not installed", exc_type=ImportError)
    module, _, name = theirs.rpartition(".")
    keys = {*inspect.signature(getattr(importlib.import_module(module), name).__init__).parameters} - {"self"}
    assert len(keys) > 15
    for ours in (SparsePriorViT, SparsePriorSwin, SparsePriorConvit, SparsePriorIformer):
        known = config_keys(ours.config_class).union(inspect.signature(MMBackbone.__init__).parameters)
        for key in sorted(keys - known):
            with pytest.raises(ValueError, match=rf"^{key}=7 (is no key of|does nothing in) this backbone; ") as caught:
                ours(**{key: 7})
            used = str(caught.value).rpartition("; use ")
            assert not used[1] or used[2] in known
    both = "embed_dims=96 is no key of this backbone; use hidden_size, window_size=7 does nothing in this backbone; lea"
    with pytest.raises(ValueError, match=both):
        SparsePriorViT(embed_dims=96, window_size=7)


def test_keys_that_mean_nothing_are_refused(classifier):
    for given in ({}, {"preset": "deit_tiny"}, {"pretrained": classifier[1]}):
        with pytest.raises(ValueError, match="'rope_scale' is no field of SparsePriorViTConfig"):
            SparsePriorViT(rope_scale=0.5, **given, **SMALL)
    with pytest.raises(ValueError, match="frozen_stages=4 must be at most the 3 layers"):
        SparsePriorViT(frozen_stages=4, **SMALL)
    with pytest.raises(ValueError, match="norm_eval='yes' must be True or False"):
        SparsePriorViT(norm_eval="yes", **SMALL)


def test_a_predictor_that_would_not_be_trained_is_refused():
    backbone = SparsePriorViT(prior="sparsifiner", **SMALL)
    backbone(torch.randn(1, 3, 48, 48))[0].sum().backward()
    assert all(p.grad is None for name, p in backbone.named_parameters() if "predictor" in name)
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.predictor: prior 'sparsifiner' learns from a loss"):
        check_predictors(backbone)
    check_predictors(SparsePriorViT(prior="sparsifiner", frozen_stages=3, **SMALL))
    check_predictors(SparsePriorViT(prior="topk", **SMALL))


# ---- other families -------------------------------------------------------------------------------------------------


class Registry(dict):
    """As much of mm's as backbones need."""

    def register_module(self, module, force):
        self[module.__name__] = module


def test_a_family_that_is_registered_later_is_a_backbone_too(tmp_path):
    registry = Registry()
    register_backbones(registry)
    families = (SparsePriorViT, SparsePriorSwin, SparsePriorConvit, SparsePriorIformer)
    assert registry == {cls.__name__: cls for cls in families}
    assert pickle.loads(pickle.dumps(SparsePriorViT)) is SparsePriorViT
    with registered_family():
        torch.manual_seed(0)
        model = randomised(TwoStageForImageClassification(TwoStageConfig.from_preset("toy_tiny", prior="violin")))
        model.save_pretrained(tmp_path / "classifier")
        backbone = registry["TwoStage"](pretrained=str(tmp_path / "classifier"), out_indices=(1, 2)).eval()
        backbone.init_weights()
        images = torch.randn(2, 3, 16, 13)
        with torch.no_grad():
            maps = backbone(images)
            _, first, second = model.vit.encode(torch.nn.functional.pad(images, (0, 3)))
        assert [map_.shape for map_ in maps] == [(2, 8, 4, 4), (2, 8, 2, 2)]
        for map_, tokens in zip(maps, (first, second), strict=True):
            assert torch.equal(map_.flatten(2).transpose(1, 2), tokens)
        save_backbone(backbone, str(tmp_path / "back"))
        back = TwoStageModel.from_pretrained(tmp_path / "back")
        assert back.config.prior == model.config.prior
        assert all(torch.equal(value, model.vit.state_dict()[key]) for key, value in back.state_dict().items())
        with pytest.raises(ValueError, match="is a 'toy_two_stage', the backbone a 'sparseprior_vit'"):
            SparsePriorViT(pretrained=str(tmp_path / "classifier"))


@pytest.mark.slow
@each("framework", ["mmseg", "mmdet"])
def test_each_framework_builds_every_family(framework):
    pytest.importorskip("mmcv.ops", reason="the extra `dense` is not installed", exc_type=ImportError)
    importlib.import_module({"mmseg": "tasks.segmentation", "mmdet": "tasks.detection"}[framework])
    models = importlib.import_module(f"{framework}.registry").MODELS
    assert type(models.build({"type": "SparsePriorViT", "preset": "deit_tiny", **SMALL})) is SparsePriorViT
    assert type(models.build({"type": "SparsePriorSwin", **small.SMALL["sparseprior_swin"]})) is SparsePriorSwin
    assert type(models.build({"type": "SparsePriorConvit", **small.SMALL["sparseprior_convit"]})) is SparsePriorConvit
    assert type(models.build({"type": "SparsePriorIformer", **IFORMER})) is SparsePriorIformer
    with registered_family() as family:
        backbone = models.build({"type": "TwoStage", "preset": "toy_tiny", "prior": "violin", "out_indices": (2,)})
        assert isinstance(backbone, family.backbone) and backbone.config.prior_name == "violin"


@pytest.mark.slow
def test_the_model_folder_names_what_its_family_changes(tmp_path):
    config_module = pytest.importorskip("mmengine.config", reason="the extra `dense` is not installed")
    from tasks.common.mm.saving import save_model

    with registered_family() as family:
        backbone = mm_backbone(family.backbone)(preset="toy_tiny", prior="violin", out_indices=(2,))
        config = config_module.Config({"model": {"backbone": {"type": "TwoStage", "preset": "toy_tiny"}}})
        model = torch.nn.Module()
        model.backbone = backbone
        save_model(tmp_path, config, model)
        stored = config_module.Config.fromfile(tmp_path / "config.py").model.backbone
        assert stored.pop("type") == "TwoStage" and stored["out_indices"] == [2]
        rebuilt = TwoStageConfig(**stored)
        assert "preset" not in stored and len(family.config_fields) > 20
        assert [getattr(rebuilt, name) for name in family.config_fields] == [
            getattr(backbone.config, name) for name in family.config_fields
        ]


# ---- Swin -----------------------------------------------------------------------------------------------------------

SWIN = {**small.SMALL["sparseprior_swin"], "prior": "fibottention+violin"}


@pytest.fixture(scope="module")
def swin(tmp_path_factory):
    """The folder of a classifier."""
    folder = tmp_path_factory.mktemp("swin")
    torch.manual_seed(0)
    randomised(SparsePriorSwinForImageClassification(SparsePriorSwinConfig(**SWIN, num_labels=3))).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize("size", [(16, 16), (13, 22)])
def test_maps_of_swin_are_those_of_its_stages(swin, size):
    backbone = SparsePriorSwin(pretrained=str(swin), out_indices=(0, 1, 2)).eval()
    backbone.init_weights()
    model = SparsePriorSwinForImageClassification.from_pretrained(swin).eval()
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        maps = backbone(images)
        _, states, _, _ = model.swin.encode(images, False, always_shift=True)
    norms = [torch.nn.LayerNorm(width, eps=1e-5) for width in (8, 8, 16)]  # new ones change nothing but mean and spread
    for map_, state, norm in zip(maps, states, norms, strict=True):
        assert map_.is_contiguous()
        torch.testing.assert_close(map_, norm(state).permute(0, 3, 1, 2))


def test_swin_goes_to_dense_tasks_and_back(swin, tmp_path):
    """Classification, then segmentation, whose norms of maps stay for detection, then classification again."""
    first = randomised(SparsePriorSwin(pretrained=str(swin), out_indices=(1, 2)))
    first.init_weights()
    with torch.no_grad():
        for value in first.map_norms.parameters():
            value.uniform_(0.5, 2.0)
    save_backbone(first, str(tmp_path / "backbone"))
    second = SparsePriorSwin(pretrained=str(tmp_path / "backbone"), out_indices=(1, 2))
    second.init_weights()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    other = SparsePriorSwin(pretrained=str(tmp_path / "backbone"), out_indices=(2,))  # of other maps
    other.init_weights()
    assert list(other.map_norms) == ["stage2"]
    assert torch.equal(other.map_norms["stage2"].weight, first.map_norms["stage2"].weight)
    model, anew = load_changed_model(tmp_path / "backbone", SparsePriorSwinForImageClassification, num_labels=3)
    assert anew == ["classifier.bias", "classifier.weight"]
    source = SparsePriorSwinForImageClassification.from_pretrained(swin)
    assert all(torch.equal(value, model.swin.state_dict()[name]) for name, value in source.swin.state_dict().items())


def test_keys_of_mms_swin(swin):
    with pytest.raises(ValueError, match=r"embed_dims=96 is no key of this backbone; use embed_dim$"):
        SparsePriorSwin(embed_dims=96)
    assert SparsePriorSwin(**SWIN, mlp_ratio=2).config.mlp_ratio == 2
    with pytest.raises(ValueError, match=r"has window_size=2, the backbone window_size=4"):
        SparsePriorSwin(pretrained=str(swin), window_size=4).init_weights()


# ---- ConViT ---------------------------------------------------------------------------------------------------------

CONVIT = {**small.SMALL["sparseprior_convit"], "prior": "fibottention+violin"}


@pytest.fixture(scope="module")
def convit(tmp_path_factory):
    """The folder of a classifier."""
    folder = tmp_path_factory.mktemp("convit")
    torch.manual_seed(0)
    config = SparsePriorConvitConfig(**CONVIT, num_labels=3)
    randomised(SparsePriorConvitForImageClassification(config)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [(8, 8), (13, 22)])
def test_maps_of_convit_are_those_of_its_patches(convit, size):
    backbone = SparsePriorConvit(pretrained=str(convit), out_indices=(0, 1, 2), apply_layernorm=False).eval()
    backbone.init_weights()
    model = SparsePriorConvitForImageClassification.from_pretrained(convit).eval()
    images = torch.randn(2, 3, *size)
    padded = torch.nn.functional.pad(images, (0, -size[1] % 4, 0, -size[0] % 4))
    with torch.no_grad():
        maps = backbone(images)
        states = model(padded, output_hidden_states=True).hidden_states
    assert [state.shape[1] - states[0].shape[1] for state in states] == [0, 0, 1]  # the class token
    for map_, state in zip(maps, states, strict=True):
        assert map_.is_contiguous()
        torch.testing.assert_close(map_.flatten(2).transpose(1, 2), state[:, -map_.shape[2] * map_.shape[3] :])


def test_convit_goes_to_dense_tasks_and_back(convit, tmp_path):
    backbone = SparsePriorConvit(pretrained=str(convit), image_size=16, out_indices=(1, 2))
    backbone.init_weights()
    assert backbone.embeddings.position_embeddings.shape[1] == 16
    save_backbone(backbone, str(tmp_path / "backbone"))
    model, anew = load_changed_model(tmp_path / "backbone", SparsePriorConvitForImageClassification, num_labels=3)
    assert anew == ["classifier.bias", "classifier.weight"] and model.config.prior == backbone.config.prior
    state = model.convit.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in backbone.state_dict().items())
    with pytest.raises(ValueError, match=r"has num_local_layers=1, the backbone num_local_layers=0"):
        SparsePriorConvit(pretrained=str(convit), num_local_layers=0).init_weights()


# ---- iFormer --------------------------------------------------------------------------------------------------------

IFORMER = {**small.SMALL["sparseprior_iformer"], "prior": "fibottention+violin"}


def test_iformer_goes_to_dense_tasks_and_back(tmp_path):
    torch.manual_seed(0)
    model = randomised(SparsePriorIformerForImageClassification(SparsePriorIformerConfig(**IFORMER, num_labels=3)))
    model.train()(torch.randn(2, 3, 16, 16))  # statistics of batch norms that are not the first ones
    model.eval().save_pretrained(tmp_path / "classifier")
    backbone = SparsePriorIformer(pretrained=str(tmp_path / "classifier"), out_indices=(0, 1, 2)).eval()
    backbone.init_weights()
    images = torch.randn(2, 3, 24, 36)
    with torch.no_grad():
        maps = backbone(images)
        expected = model(images, output_hidden_states=True).reshaped_hidden_states
    assert [map_.shape for map_ in maps] == [(2, 4, 6, 9), (2, 4, 6, 9), (2, 8, 3, 5)]
    assert all(map_.is_contiguous() and torch.equal(map_, other) for map_, other in zip(maps, expected, strict=True))
    save_backbone(backbone, str(tmp_path / "backbone"))
    again, anew = load_changed_model(
        tmp_path / "backbone", SparsePriorIformerForImageClassification, num_labels=3, out_indices=None
    )
    assert anew and all(name.startswith("classifier.") for name in anew)
    state = again.iformer.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.iformer.state_dict().items())


# What each stage freezes; of Swin the last norm is never trained, because its maps have norms of their own.
STAGES = {
    SparsePriorSwin: (SWIN, [["layernorm."], ["embeddings."], ["stages.0."], ["stages.1."]]),
    SparsePriorConvit: (CONVIT, [[], ["embeddings."], ["layers.0."], ["layers.1.", "layernorm."]]),
    SparsePriorIformer: (IFORMER, [[], ["embeddings."], ["stages.0."], ["stages.1."]]),
}


@each("family, stages", [(family, stages) for family in STAGES for stages in (-1, 0, 1, 2)])
def test_frozen_stages_of_other_families(family, stages):
    fields, frozen = STAGES[family]
    backbone = family(**fields, out_indices=(1, 2), frozen_stages=stages).train()
    trained = {name for name, value in backbone.named_parameters() if value.requires_grad}
    names = tuple(name for own in frozen[: stages + 2] for name in own)
    assert trained == {name for name, _ in backbone.named_parameters() if not name.startswith(names)}
    if family is SparsePriorSwin and trained:
        sum(map_.square().sum() for map_ in backbone(torch.randn(2, 3, 16, 16))).backward()
        assert all(value.grad is not None for name, value in backbone.named_parameters() if name in trained)
    with pytest.raises(ValueError, match="frozen_stages=3 must be at most the 2 layers or stages"):
        SparsePriorSwin(**SWIN, frozen_stages=3)


@each("stages, norm_eval", [(-1, False), (-1, True), (0, False), (1, True)])
def test_statistics_of_frozen_stages_of_iformer(stages, norm_eval):
    backbone = SparsePriorIformer(**IFORMER, frozen_stages=stages, norm_eval=norm_eval).train()
    before = {name: value.clone() for name, value in backbone.named_buffers() if name.endswith("running_mean")}
    backbone(torch.randn(2, 3, 16, 16))
    frozen = tuple(["embeddings.", "stages.0.", "stages.1."][: stages + 1])
    for name, value in backbone.named_buffers():
        if name in before:
            assert torch.equal(value, before[name]) == (norm_eval or name.startswith(frozen or "nothing"))


def test_keys_of_mm_for_iformer():
    for key, instead in (("embed_dims", "hidden_sizes"), ("norm_cfg", "batch_norm_eps")):
        with pytest.raises(ValueError, match=rf"{key}=96 is no key of this backbone; use {instead}$"):
            SparsePriorIformer(**{key: 96})
