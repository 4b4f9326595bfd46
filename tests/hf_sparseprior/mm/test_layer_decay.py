"""The frameworks' layer-decay constructors with our backbones and with others."""

import importlib
import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("mmcv.ops", reason="the extra `dense` is not installed", exc_type=ImportError)

from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope

from hf_sparseprior.mm.layer_decay import LayerDecay
from tests.each import each
from tests.hf_sparseprior import small

pytestmark = pytest.mark.slow

CASES = [
    ("mmseg", "LearningRateDecayOptimizerConstructor", "decay_rate"),
    ("mmseg", "LayerDecayOptimizerConstructor", "layer_decay_rate"),
    ("mmdet", "LearningRateDecayOptimizerConstructor", "decay_rate"),
]
RATE, LR = 0.5, 1e-2
SWIN = {**small.SMALL["sparseprior_swin"], "depths": [2, 3], "prior": "violin"}
VIT = {
    "type": "SparsePriorViT", "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 2, "intermediate_size": 32, "prior": "violin",
}  # fmt: skip


class Whole(nn.Module):
    """A model with a backbone and a head whose parts are called as a backbone's layers."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.decode_head = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)]), "embeddings": nn.Linear(2, 2)})


def model_of(framework, backbone):
    importlib.import_module({"mmseg": "tasks.segmentation", "mmdet": "tasks.detection"}[framework])
    init_default_scope(framework)
    return Whole(importlib.import_module(f"{framework}.registry").MODELS.build(backbone))


def groups_of(model, constructor, **paramwise):
    """For each parameter the group that it is in."""
    config = {
        "type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": LR, "weight_decay": 0.05},
        "constructor": constructor, "paramwise_cfg": paramwise,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups = build_optim_wrapper(model, config).optimizer.param_groups
    return {id(parameter): group for group in groups for parameter in group["params"]}


def vit_depth(name):
    """By hand: 0 the embedding, 1 to 3 the layers, 4 the rest."""
    if name.startswith("backbone.embeddings."):
        return 0
    return int(name.split(".")[2]) + 1 if name.startswith("backbone.layers.") else 4


def swin_depth(name):
    """By hand: two layers and three; what merges goes with the layer before it, norms of maps with the heads."""
    if name.startswith("backbone.embeddings."):
        return 0
    parts = name.split(".")
    if parts[:2] != ["backbone", "stages"]:
        return 6
    first = [0, 2][int(parts[2])]
    return first + int(parts[4]) + 1 if parts[3] == "layers" else [2, 5][int(parts[2])]


BACKBONES = [(VIT, vit_depth, 3), ({"type": "SparsePriorSwin", **SWIN}, swin_depth, 5)]


@each(
    "case, backbone, depth, layers, told",
    [(case, *BACKBONES[(i + told) % 2], told) for i, case in enumerate(CASES) for told in (False, True)],
)
def test_layers_have_their_rates(case, backbone, depth, layers, told):
    framework, constructor, rate = case
    model = model_of(framework, backbone)
    groups = groups_of(model, constructor, **{rate: RATE}, **({"num_layers": layers} if told else {}))
    seen = set()
    learned = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    assert len(learned) == len(groups)
    for name, parameter in learned:
        group = groups[id(parameter)]
        assert group["lr"] == pytest.approx(LR * RATE ** (layers + 1 - depth(name))), name
        free = parameter.ndim < 2 or "decay_bias" in name or name.rpartition(".")[2] in (
            "class_token", "position_embeddings", "bias_table",
        )  # fmt: skip
        assert group["weight_decay"] == (0 if free else 0.05), name
        seen.add(depth(name))
    assert seen == set(range(layers + 2))


@each("framework, constructor, rate, name", [(*CASES[0], "Swin"), (*CASES[2], "Iformer")])
def test_stages_have_their_rates(framework, constructor, rate, name):
    """mm's own stage-wise rule, which knows ConvNeXt by the name of its class, for names without its merging."""
    backbone = {"type": f"SparsePrior{name}", **small.SMALL[f"sparseprior_{name.lower()}"], "prior": "violin"}
    model = model_of(framework, backbone)
    stages = len(model.backbone.stages)
    constructors = importlib.import_module(f"{framework}.engine.optimizers.layer_decay_optimizer_constructor")
    for told in ({}, {"num_layers": stages}):
        groups = groups_of(model, constructor, **{rate: RATE}, decay_type="stage_wise", **told)
        ids = set()
        for parameter_name, parameter in model.named_parameters():
            if parameter.requires_grad:
                theirs = parameter_name.replace("backbone.embeddings.", "backbone.downsample_layers.")
                stage = constructors.get_stage_id_for_convnext(theirs, stages + 2)
                assert groups[id(parameter)]["lr"] == pytest.approx(LR * RATE ** (stages + 1 - stage)), parameter_name
                ids.add(stage)
        assert ids == set(range(stages + 2))
    with pytest.raises(ValueError, match=f"num_layers=6, the backbone has {stages} stages"):
        groups_of(model, constructor, **{rate: RATE}, decay_type="stage_wise", num_layers=6)


def test_frozen_layers_have_no_group_and_change_no_rate():
    model = model_of("mmseg", {**VIT, "frozen_stages": 1})
    groups = groups_of(model, CASES[0][1], decay_rate=RATE)
    trained = {name for name, parameter in model.named_parameters() if id(parameter) in groups}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert groups[id(model.backbone.layers[1].mlp.fc1.weight)]["lr"] == pytest.approx(LR * RATE**2)


@each(
    "paramwise, said",
    [
        ({"decay_rate": 0.5, "num_layers": 12}, "num_layers=12, the backbone has 3 layers"),
        ({"num_layers": 3}, "decay_rate=None must be a number above 0 and at most 1"),
        ({"decay_rate": 65}, "decay_rate=65 must be a number above 0 and at most 1"),
        (
            {"decay_rate": 0.5, "decay_type": "stage_wise"},
            "decay_type='stage_wise' needs a backbone with stages; use 'l",
        ),
        ({"decay_rate": 0.5, "decay_type": "stages"}, "decay_type='stages' must be 'layer_wise' or 'stage_wise'"),
        ({"decay_rate": 0.5, "norm_decay_mult": 0.0}, "paramwise_cfg.norm_decay_mult does nothing here"),
    ],
)
def test_settings_that_do_nothing_are_refused(paramwise, said):
    with pytest.raises(ValueError, match=said):
        groups_of(model_of("mmdet", VIT), CASES[0][1], **paramwise)


@each(
    "backbone, layers",
    [
        ({"type": "BEiT", "img_size": 16, "patch_size": 8, "embed_dims": 16, "num_layers": 2, "num_heads": 2}, 2),
        ({"type": "ToyConvNeXt"}, 12),
    ],
)
def test_other_backbones_have_the_groups_that_they_had(backbone, layers):
    from mmseg.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS

    if backbone["type"] == "ToyConvNeXt":

        class ToyConvNeXt(nn.Module):
            def __init__(self):
                super().__init__()
                self.downsample_layers = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(4))
                self.stages = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(4))

        MODELS.register_module(module=ToyConvNeXt, force=True)
    model = model_of("mmseg", backbone)
    ours = OPTIM_WRAPPER_CONSTRUCTORS.get(CASES[0][1])
    theirs = next(cls for cls in ours.__mro__ if cls.__name__ == ours.__name__ and not issubclass(cls, LayerDecay))
    config = {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": LR, "weight_decay": 0.05}}
    paramwise = {"num_layers": layers, "decay_rate": 0.9}
    found, expected = (cls(dict(config), dict(paramwise))(model).optimizer.param_groups for cls in (ours, theirs))
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one.pop("params"), other.pop("params"), strict=True))
        assert one == other
