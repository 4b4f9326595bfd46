"""`init_cfg`, activation checkpointing and class tokens of the backbones of mm configs."""

import argparse
import os
from itertools import cycle

import pytest
import torch
import transformers
from safetensors.torch import save_file

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTModel
from hf_sparseprior.base import families
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.mm.backbone import SparsePriorConvit, SparsePriorIformer, SparsePriorSwin, SparsePriorViT
from tests.each import each
from tests.hf_sparseprior import small
from tests.timm_oracle import import_timm

VIT = {
    "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 32, "initializer_range": 0.3, "prior": "fibottention+violin",
}  # fmt: skip
FAMILIES = {
    "vit": SparsePriorViT, "swin": SparsePriorSwin, "convit": SparsePriorConvit, "iformer": SparsePriorIformer,
}  # fmt: skip


def fields_of(family):
    return dict(VIT if family == "vit" else small.SMALL[f"sparseprior_{family}"], prior="violin")


def trained(name):
    """A classifier whose every weight is moved from where it was drawn."""
    family = families.FAMILIES[f"sparseprior_{name}"]
    torch.manual_seed(0)
    model = family.classifier(family.make_config(**fields_of(name), num_labels=3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def pretrained(file, **options):
    return {"type": "Pretrained", "checkpoint": str(file), **options}


@pytest.fixture
def checkpoint(tmp_path):
    """A file as mmengine's Runner writes it, of a model whose backbone this is, and the backbone's weights."""
    pytest.importorskip("mmengine", reason="the extra `dense` is not installed")
    state = SparsePriorViT(**VIT).state_dict()
    whole = {f"backbone.{name}": value for name, value in state.items()} | {"head.weight": torch.zeros(2)}
    torch.save({"state_dict": whole, "meta": {"epoch": 1}}, tmp_path / "iter_1.pth")
    return tmp_path / "iter_1.pth", state


# ---- files of weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "form"), [*zip(FAMILIES, cycle(["mmengine", "state dict", "safetensors"]))])
def test_weights_of_a_file_are_those_of_the_folder(family, form, tmp_path):
    """The folder's loader is the other way there: the same backbone, and the same maps of an image."""
    pytest.importorskip("mmengine", reason="the extra `dense` is not installed")
    backbone, model = FAMILIES[family], trained(family)
    model.save_pretrained(tmp_path / "folder")
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    options, file = {}, tmp_path / "weights.pth"
    if form == "mmengine":
        prefix = f"{model.base_model_prefix}."
        inner = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        torch.save({"state_dict": {f"backbone.{name}": value for name, value in inner.items()}, "meta": {}}, file)
        options = {"prefix": "backbone"}
    elif form == "state dict":
        torch.save(state, file)
    else:
        save_file(state, file := tmp_path / "weights.safetensors")
    found = backbone(**fields_of(family), init_cfg=pretrained(file, **options))
    expected = backbone(pretrained=str(tmp_path / "folder"))
    for model in (found, expected):
        with torch.no_grad():
            next(model.parameters()).zero_()
        model.init_weights()
        model.eval()
    own = {name: value for name, value in found.state_dict().items() if not name.startswith("map_norms")}
    assert own and all(torch.equal(value, expected.state_dict()[name]) for name, value in own.items())
    with torch.no_grad():
        maps = [model(torch.ones(1, 3, 16, 20)) for model in (found, expected)]
    assert all(torch.equal(*pair) for pair in zip(*maps, strict=True))


def test_another_grid_interpolates_positions_of_a_file(tmp_path):
    pytest.importorskip("mmengine", reason="the extra `dense` is not installed")
    model = trained("vit")
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    backbone = SparsePriorViT(**{**VIT, "image_size": [24, 8]}, pretrained=str(tmp_path / "weights.pth"))
    backbone.init_weights()
    assert torch.equal(backbone.embeddings.position_embeddings, model.vit.embeddings.resized_positions((6, 2)))


def test_the_prior_may_differ_and_its_weights_start_anew(checkpoint):
    file, state = checkpoint
    backbone = SparsePriorViT(**{**VIT, "prior": "dense"}, init_cfg=pretrained(file, prefix="backbone."))
    backbone.init_weights()
    own = backbone.state_dict()
    assert all("decay" not in name and torch.equal(value, state[name]) for name, value in own.items())
    changed = {**VIT, "prior": {"decay": {"name": "violin", "curves": ["snake"]}}}
    with pytest.raises(ValueError, match=r"of another shape: layers\.0\.attention\.decay_bias\.\w+"):
        SparsePriorViT(**changed, init_cfg=pretrained(file, prefix="backbone."))


@pytest.mark.parametrize(
    ("change", "prefix", "said"),
    [
        (lambda state: state.pop("backbone.layers.1.mlp.fc2.weight"), "backbone.", r"missing: layers\.1\.mlp\.fc2"),
        (lambda state: state.update({"backbone.layers.7.x": torch.zeros(1)}), "backbone.", r"left over: layers\.7\.x"),
        (lambda state: state.update({"backbone.layernorm.bias": torch.zeros(3)}), "backbone", "of another shape: lay"),
        (lambda state: state["backbone.layernorm.bias"].fill_(torch.nan), "backbone.", r"not finite: layernorm\.bias"),
        (lambda state: None, None, r"missing: .*; prefix='backbone\.' may be missing"),
        (lambda state: None, "neck", r"has no weights whose names begin with 'neck\.'"),
        (lambda state: [state.pop(name) for name in list(state)], None, "holds no weights by their names"),
    ],
)
def test_weights_that_do_not_fit_are_named(checkpoint, change, prefix, said):
    file, _ = checkpoint
    content = torch.load(file, weights_only=True)
    change(content["state_dict"])
    file.unlink()
    init_cfg = pretrained(file, **({"prefix": prefix} if prefix else {}))
    backbone = SparsePriorViT(**VIT, init_cfg=init_cfg)  # which needs no file before training
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    torch.save(content, file)
    with pytest.raises(ValueError, match=said):
        SparsePriorViT(**VIT, init_cfg=init_cfg)
    with pytest.raises(ValueError, match=said) as caught:
        backbone.init_weights()
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


# ---- weights of other libraries -------------------------------------------------------------------------------------

SIZES = {
    "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip


def moved(model):
    """Every weight moved from where it was drawn."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.eval()  # which mm's models do not return
    return model


def as_maps(tokens):
    return tokens[:, -16:].transpose(1, 2).reshape(len(tokens), 16, 4, 4)


def of_transformers(images, folder):
    """A folder, its maps of the images by the model itself, and what the backbone has to be told."""
    model = moved(transformers.ViTModel(transformers.ViTConfig(**SIZES, layer_norm_eps=1e-5)))
    model.save_pretrained(folder / "vit")
    states = model(images, output_hidden_states=True).hidden_states
    return {"pretrained": str(folder / "vit")}, [as_maps(state) for state in states[1:]]


def of_timm(images, folder, save=torch.save, wrap=lambda state: state, file="vit.pth"):
    model = moved(import_timm().create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2
    ))  # fmt: skip
    save(wrap(model.state_dict()), folder / file)
    maps = model.forward_intermediates(images, indices=[0, 1], intermediates_only=True)
    return {**SIZES, "pretrained": str(folder / file)}, maps


def of_timm_as_safetensors(images, folder):
    return of_timm(images, folder, save_file, file="vit.safetensors")


def of_deit(images, folder):
    return of_timm(images, folder, wrap=lambda state: {"model": state, "args": argparse.Namespace(lr=1.0)})


def of_mmseg(images, folder, **options):
    backbones = pytest.importorskip("mmseg.models.backbones", reason="needs make dense", exc_type=ImportError)
    model = moved(backbones.VisionTransformer(
        img_size=16, patch_size=4, embed_dims=16, num_layers=2, num_heads=2, mlp_ratio=2, out_indices=(0, 1),
        norm_cfg={"type": "LN", "eps": 1e-5}, **options
    ))  # fmt: skip
    torch.save(
        {"state_dict": {f"backbone.{name}": value for name, value in model.state_dict().items()}}, folder / "v.pth"
    )
    init_cfg = pretrained(folder / "v.pth", prefix="backbone.")
    return {**SIZES, "layer_norm_eps": 1e-5, "init_cfg": init_cfg}, model(images)


def of_mmseg_with_bias(images, folder):
    return of_mmseg(images, folder, patch_bias=True)


SOURCES = (of_transformers, of_timm, of_timm_as_safetensors, of_deit, of_mmseg, of_mmseg_with_bias)


@pytest.mark.parametrize("source", SOURCES)
def test_weights_of_other_libraries_give_their_maps(source, tmp_path):
    pytest.importorskip("mmengine", reason="the extra `dense` is not installed")
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        options, expected = source(images, tmp_path)
        backbone = SparsePriorViT(**options, out_indices=[1, 2], apply_layernorm=False).eval()
        for parameter in backbone.parameters():
            parameter.zero_()
        backbone.init_weights()
        found = backbone(images)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    larger = SparsePriorViT(**{**options, "image_size": 32}, prior="violin", apply_layernorm=False)
    assert torch.equal(
        larger.embeddings.position_embeddings, backbone.embeddings.resized_positions((8, 8))
    )  # positions are interpolated, and the prior starts anew


def test_convert_writes_what_the_backbone_takes(tmp_path):
    options, _ = of_mmseg(torch.zeros(1, 3, 16, 16), tmp_path, final_norm=True)
    lines = convert_checkpoint(tmp_path / "v.pth", tmp_path / "out", num_attention_heads=2)
    assert any("layer_norm_eps is not in the source; 1e-06" in line for line in lines)
    direct = SparsePriorViT(**options)
    folder = SparsePriorViT(pretrained=str(tmp_path / "out"))
    assert all(torch.equal(value, folder.state_dict()[name]) for name, value in direct.state_dict().items())


@pytest.mark.parametrize("source", SOURCES[:2] + SOURCES[4:5])
def test_weights_of_other_libraries_that_do_not_fit_are_refused_when_the_model_is_built(source, tmp_path):
    pytest.importorskip("mmengine", reason="the extra `dense` is not installed")
    options, _ = source(torch.zeros(1, 3, 16, 16), tmp_path)
    with pytest.raises(ValueError, match=r"does not fit SparsePriorViT; missing: layers\.2\."):
        SparsePriorViT(**{**options, "num_hidden_layers": 3}, apply_layernorm=False)
    with pytest.raises(ValueError, match="is a 'sparseprior_vit', the backbone a 'sparseprior_swin'"):
        SparsePriorSwin(**{key: value for key, value in options.items() if key not in (*SIZES, "layer_norm_eps")})
    if source is of_transformers:
        with pytest.raises(ValueError, match=r"has layer_norm_eps=1e-05, the backbone layer_norm_eps=0\.1"):
            SparsePriorViT(**options, layer_norm_eps=0.1)
    if source is of_mmseg:
        with pytest.raises(ValueError, match=r"missing: layernorm\.weight, layernorm\.bias \(2 in all\)"):
            SparsePriorViT(**options)  # mm's model has no last norm


def test_a_pickle_in_a_file_of_weights_is_not_run(tmp_path):
    pytest.importorskip("mmengine", reason="the extra `dense` is not installed")

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "written"),)

    torch.save({"state_dict": {}, "meta": Attack()}, tmp_path / "bad.pth")
    with pytest.raises(OSError, match=r"bad\.pth is refused: it holds .*mkdir"):
        SparsePriorViT(**VIT, init_cfg=pretrained(tmp_path / "bad.pth")).init_weights()
    assert not (tmp_path / "written").exists()
    with pytest.raises(OSError, match=r"none\.pth does not exist"):
        SparsePriorViT(**VIT, init_cfg=pretrained(tmp_path / "none.pth")).init_weights()


# ---- lists and other initializers -----------------------------------------------------------------------------------


def test_initializers_of_mm_act_and_the_checkpoint_comes_last(checkpoint):
    file, state = checkpoint
    constant = {"type": "Constant", "layer": "LayerNorm", "val": 0.5, "bias": 0.25}
    backbone = SparsePriorViT(**VIT, init_cfg=constant)
    others = {name: value.clone() for name, value in backbone.state_dict().items() if "norm" not in name}
    backbone.init_weights()
    assert (backbone.layers[1].layernorm_after.weight == 0.5).all() and (backbone.layernorm.bias == 0.25).all()
    assert all(torch.equal(value, backbone.state_dict()[name]) for name, value in others.items())
    backbone = SparsePriorViT(**VIT, init_cfg=[pretrained(file, prefix="backbone."), constant])
    backbone.init_weights()
    assert all(torch.equal(value, state[name]) for name, value in backbone.state_dict().items())


@each(
    "options, said",
    [
        ({"init_cfg": "folder"}, "must be a dict with a type, or a list of such"),
        ({"init_cfg": [{"checkpoint": "a"}]}, "must be a dict with a type, or a list of such"),
        ({"init_cfg": {"type": "Pretrained"}}, "must be dict"),
        ({"init_cfg": pretrained("a.pth", strict=True)}, "must be dict"),
        ({"init_cfg": [pretrained("a.pth"), pretrained("b.pth")]}, "has 2 checkpoints, one is allowed"),
        ({"init_cfg": pretrained("a.pth"), "pretrained": "folder"}, "exclude each other"),
        ({"init_cfg": pretrained("https://server/a.pth")}, "is an address; download it"),
        ({"init_cfg": pretrained("a.pth", prefix="")}, "prefix='' must be the beginning"),
        ({"init_cfg": pretrained("folder", prefix="backbone")}, "goes with a file of weights"),
    ],
)
def test_init_cfg_that_says_something_else_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        SparsePriorViT(**VIT, **options)


@each(
    "entry, said",
    [
        ({"type": "Constant", "layer": "Conv9d", "val": 1}, "the backbone has no layer 'Conv9d'"),
        ({"type": "Constannt", "layer": "Linear", "val": 1}, "init_cfg={'type': 'Constannt'"),
        ({"type": "Constant", "layer": "Linear", "value": 1}, "init_cfg={'type': 'Constant'"),
    ],
)
def test_initializers_that_do_nothing_are_refused(entry, said):
    pytest.importorskip("mmengine", reason="the extra `dense` is not installed")
    with pytest.raises(ValueError, match=said):
        SparsePriorViT(**VIT, init_cfg=entry).init_weights()


# ---- activation checkpointing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "frozen"), [*zip(FAMILIES, cycle([-1, 0, 1])), ("vit", 1), ("swin", 1), ("convit", 0), ("iformer", 0)]
)
def test_activation_checkpointing_computes_twice_and_gives_the_same_gradients(family, frozen):
    backbone = FAMILIES[family]
    last = len(backbone(**fields_of(family)).map_sources) - 1
    images, gradients, calls = torch.randn(2, 3, 16, 16), [], []
    for with_cp in (False, True):
        torch.manual_seed(0)
        model = backbone(**fields_of(family), out_indices=[last], with_cp=with_cp, frozen_stages=frozen).train()
        count = []
        norms = [module for module in model.map_sources[-1].modules() if isinstance(module, torch.nn.Linear)]
        norms[0].register_forward_hook(lambda *given, count=count: count.append(1))
        model(images)[0].square().sum().backward()
        gradients.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
        calls.append(len(count))
    assert calls[1] == 2 * calls[0] > 0
    assert gradients[0] and gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=1e-4, atol=1e-6, msg=name)


# ---- class tokens, channels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("apply_layernorm", [True, False])
def test_class_tokens_are_those_of_our_model_alone(apply_layernorm):
    options = {"out_indices": (1, 3), "apply_layernorm": apply_layernorm, "output_cls_token": True}
    backbone = SparsePriorViT(**VIT, use_distillation_token=True, **options).eval()
    alone = SparsePriorViTModel(SparsePriorViTConfig(**VIT, use_distillation_token=True)).eval()
    alone.load_state_dict(backbone.state_dict())
    images = torch.randn(2, 3, 16, 24)
    with torch.no_grad():
        found = backbone(images)
        states = alone(images, output_hidden_states=True).hidden_states
        backbone.output_cls_token = False
        maps = backbone(images)
    assert len(found) == 2
    for pair, map_, number in zip(found, maps, (1, 3), strict=True):
        token = states[number][:, 0]
        assert torch.equal(pair[0], map_) and pair[0].shape == (2, 16, 4, 6)
        assert torch.equal(pair[1], alone.layernorm(token) if apply_layernorm else token)


def test_class_tokens_of_convit_join_after_its_gated_layers():
    fields = fields_of("convit")
    backbone = SparsePriorConvit(**fields, out_indices=[2], output_cls_token=True)
    ((map_, token),) = backbone(torch.randn(1, 3, 16, 16))
    assert map_.shape[:2] == token.shape == (1, fields["hidden_size"])
    with pytest.raises(ValueError, match=r"from out_indices=2 on, not at \[1\]"):
        SparsePriorConvit(**fields, out_indices=[1, 2], output_cls_token=True)


@each("family", ["swin", "iformer", "vit"])
def test_class_tokens_of_models_without_one_are_refused(family):
    fields = {**fields_of(family), **({"use_class_token": False, "pooling": "mean"} if family == "vit" else {})}
    with pytest.raises(ValueError, match="output_cls_token=True needs a class token"):
        FAMILIES[family](**fields, output_cls_token=True)
    for key in ("output_cls_token", "with_cp"):
        with pytest.raises(ValueError, match=f"{key}='yes' must be True or False"):
            SparsePriorViT(**VIT, **{key: "yes"})


@pytest.mark.parametrize("family", FAMILIES)
def test_channels_are_those_of_the_maps(family):
    backbone = FAMILIES[family](**fields_of(family), out_indices=[0, 1, 2])
    maps = backbone(torch.randn(1, 3, 16, 16))
    assert backbone.out_channels == [map_.shape[1] for map_ in maps]
    widths = backbone.embed_dims if isinstance(backbone.embed_dims, list) else [backbone.embed_dims]
    assert widths[0] == maps[0].shape[1]
