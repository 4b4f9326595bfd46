"""Finding the encoder in a stock model, and saying why there is none."""

import pytest
import torch
from transformers import (
    HieraConfig,
    HieraModel,
    Swinv2Config,
    Swinv2Model,
    YolosConfig,
    YolosModel,
)

import hf_sparseprior as sp
from hf_sparseprior.adapters.stock_attention import PRIOR_MODULE, applied_prior
from tests.hf_sparseprior.adapters.stock_models import TINY, tiny_clip

SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4}


def test_only_the_vision_tower_of_clip():
    model = sp.apply_prior(tiny_clip(), "fibottention")
    assert all(name.startswith("vision_model.") for name in applied_prior(model).attention)
    assert not any(hasattr(module, PRIOR_MODULE) for module in model.text_model.modules())


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Swinv2Model(Swinv2Config(**SWIN)), r"Swinv2SelfAttention\) computes"),
        (lambda: HieraModel(HieraConfig(image_size=[32, 32], embed_dim=16)), "itself"),
        (lambda: YolosModel(YolosConfig(**{**TINY, "image_size": [32, 32]})), r"Yolos\w*Attention\) is not known"),
        (lambda: torch.nn.Linear(2, 2), "Linear must be a model of transformers"),
        (lambda: sp.SparsePriorViTModel(sp.SparsePriorViTConfig(**TINY)), "config's `prior`"),
    ],
)
def test_a_model_that_cannot_take_a_prior_says_which_module_and_why(build, message):
    with pytest.raises(ValueError, match=message):
        sp.apply_prior(build(), "violin")
