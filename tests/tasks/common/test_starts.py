"""Rows of a comparison start from the weights of one dense model, in every task."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from hf_sparseprior.runs.models import alike_across_priors, take_weights

CONFIGS = Path(__file__).parents[3] / "configs"
PRIORS = ("violin", "fibottention+violin", "irpe_k")


def check_alike(dense, own, least):
    """That two models of one seed share what both have, and that it is what the seed draws."""
    dense, own = (model if isinstance(model, dict) else model.state_dict() for model in (dense, own))
    shared = [name for name in own if name in dense and own[name].shape == dense[name].shape]
    assert len(shared) >= least and set(own) > set(shared)
    assert [name for name in shared if not torch.equal(own[name], dense[name])] == []


def check_priors(built, least, priors=PRIORS):
    """As `check_alike`, of the models that `built` makes of these priors."""
    dense = built("dense")
    for prior in priors:
        check_alike(dense, built(prior), least)


def test_weights_that_fit_are_taken_and_others_stay():
    torch.manual_seed(0)
    own, other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4)), torch.nn.Sequential()
    other.append(torch.nn.Linear(2, 3)).append(torch.nn.Linear(3, 5))
    second = own[1].weight.clone()
    take_weights(own, other)
    assert torch.equal(own[0].weight, other[0].weight) and torch.equal(own[1].weight, second)


def test_a_dense_model_is_made_once_and_torchs_generator_is_where_that_leaves_it():
    made = []

    def make(changes):
        made.append(changes)
        return torch.nn.Linear(2, 2 if changes else 3)

    torch.manual_seed(0)
    alike_across_priors(make, lambda model: True)
    after = torch.rand(1)
    assert made == [{}]
    torch.manual_seed(0)
    make({"prior": "dense"})
    after_dense = torch.rand(1)
    torch.manual_seed(0)
    alike_across_priors(make, lambda model: False)
    assert made[2:] == [{}, {"prior": "dense"}] and torch.equal(torch.rand(1), after_dense) and after != after_dense


@pytest.mark.parametrize("name", ["upernet", "detr"])
def test_heads_start_alike(name):
    from tasks.heads.config import check_config
    from tasks.heads.task import build_model
    from tests.tasks.heads.tiny import tiny_config

    def built(prior):
        content = tiny_config("shapes", name)
        content["model"]["prior"] = prior
        torch.manual_seed(3)
        return build_model(check_config(content), ["a", "b"])

    check_priors(built, 50)


def test_clips_start_alike():
    from tasks.video.task import build_model
    from tests.tasks.video.test_views import CLASSES, MODEL

    def built(prior):
        torch.manual_seed(3)
        return build_model({**MODEL, "prior": prior}, CLASSES)

    check_priors(built, 20, PRIORS[:2])


def test_clips_that_start_from_an_image_model_start_alike(tmp_path):
    from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTModel
    from tasks.video.task import build_model
    from tests.tasks.video.test_views import CLASSES, MODEL

    own = {key: value for key, value in MODEL.items() if key in SparsePriorViTConfig().to_dict()}
    SparsePriorViTModel(SparsePriorViTConfig(**own)).save_pretrained(tmp_path)

    def built(prior):
        torch.manual_seed(3)
        return build_model({**MODEL, "image_model": str(tmp_path), "prior": prior}, CLASSES)

    check_priors(built, 20, PRIORS[:2])


def test_students_and_teachers_start_alike():
    """What DINO adds is drawn after the backbone."""
    from tasks.pretraining.config import DinoConfig
    from tasks.pretraining.dino import Dino
    from tasks.pretraining.task import build_backbone

    model = {"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}

    def built(prior):
        torch.manual_seed(3)
        return Dino(build_backbone({**model, "prior": prior}), DinoConfig(output_size=8, head_hidden_size=8))

    check_priors(built, 60)


def test_policies_start_alike(tmp_path):
    from tasks.robotics import train
    from tasks.robotics.formats import open_demonstrations
    from tests.tasks.robotics.walk import configuration, with_cameras, write_walk

    demonstrations = write_walk(tmp_path)

    def built(prior):
        config = with_cameras(configuration(demonstrations, tmp_path / "run", seed=3))
        config["encoder"]["prior"] = prior
        return train.make_training(config, open_demonstrations(demonstrations))[0].policy

    check_priors(built, 50)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "pretrained"), [("segmentation", False), ("detection", True)])
def test_models_of_mm_start_alike(task, pretrained, tmp_path):
    """What the first training step sees; pretrained: with a saved backbone, whose prior is not dense."""
    pytest.importorskip("mmcv", reason="the extra `dense` is not installed")
    from mmengine.hooks import Hook

    from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTModel
    from tasks.common.mm.config import load_config
    from tasks.common.mm.runner import whole_model
    from tasks.common.mm.task import task_named
    from tasks.common.mm.train import run
    from tests.tasks.common.mm.shapes import data_roots, write_shapes

    tiny = import_module(f"tests.tasks.{task}.tiny").OVERRIDES
    data, seen = write_shapes(tmp_path / "shapes"), {}
    if pretrained:
        config = load_config(task, CONFIGS / task / "smoke.py", tiny)
        own = {key: value for key, value in config.model.backbone.items() if key in SparsePriorViTConfig().to_dict()}
        SparsePriorViTModel(SparsePriorViTConfig(**own)).save_pretrained(tmp_path / "saved")

    class Look(Hook):
        def before_train_iter(self, runner, *rest, **more):
            seen[runner.cfg.work_dir] = {name: v.clone() for name, v in whole_model(runner).state_dict().items()}
            raise KeyboardInterrupt

    def start(prior):
        out = str(tmp_path / prior)
        more = ["model.backbone.prior=" + prior, "randomness.seed=3", f"output_dir={out}", *data_roots(data)]
        more += [f"model.backbone.pretrained={tmp_path}/saved"] if pretrained else []
        config = load_config(task, CONFIGS / task / "smoke.py", [*tiny, *more])
        if prior != "dense" and not pretrained:  # an initializer of a layer that a dense model does not have
            config.model.backbone.init_cfg = {"type": "Constant", "layer": "ViolinDecay", "val": 0.5}
        with pytest.raises(KeyboardInterrupt):
            run(task_named(task), config, hooks=[Look()])
        return seen[out]

    check_priors(start, 50, PRIORS[1:2])
