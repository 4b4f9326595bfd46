"""The same backbone inside transformers' UperNet; needs transformers alone."""

import pytest
import torch
from transformers import UperNetConfig, UperNetForSemanticSegmentation

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTModel

pytestmark = pytest.mark.slow

SMALL = {
    "image_size": 64, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 48, "initializer_range": 0.2, "out_indices": [1, 2, 3, 4], "apply_layernorm": False,
}  # fmt: skip


def upernet(prior):
    torch.manual_seed(0)
    backbone = SparsePriorViTConfig(prior=prior, **SMALL)
    config = UperNetConfig(backbone_config=backbone, hidden_size=16, num_labels=5, auxiliary_in_channels=24)
    return UperNetForSemanticSegmentation(config).eval()


@pytest.mark.parametrize("prior", ["dense", "fibottention", "violin", "fibottention+violin"])
def test_features_are_those_of_our_model_alone(prior):
    model = upernet(prior)
    alone = SparsePriorViTModel(SparsePriorViTConfig(prior=prior, **SMALL)).eval()
    alone.load_state_dict(model.backbone.state_dict())
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        maps = model.backbone(images).feature_maps
        states = alone(images, output_hidden_states=True).hidden_states
    assert len(maps) == 4
    for found, state in zip(maps, states[1:], strict=True):
        assert torch.equal(found.flatten(2).transpose(1, 2), state[:, 1:])


def test_it_segments_and_learns():
    model = upernet("fibottention+violin").train()
    images, labels = torch.randn(2, 3, 64, 64), torch.zeros(2, 64, 64, dtype=torch.long)
    labels[:, :, 32:] = 3
    output = model(images, labels=labels)
    assert output.logits.shape == (2, 5, 64, 64)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.backbone.named_parameters()}
    betas = [name for name in gradients if name.endswith("decay_bias.beta")]
    assert len(betas) == 4
    for name in [*betas, "embeddings.projection.weight"]:
        assert gradients[name].abs().max() > 0


def test_the_mask_changes_the_output():
    dense, sparse = upernet("dense"), upernet("fibottention")
    sparse.load_state_dict(dense.state_dict())
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert (dense(images).logits - sparse(images).logits).abs().max() > 1e-3


def test_it_is_saved_and_comes_back(tmp_path):
    model = upernet("fibottention+violin")
    model.save_pretrained(tmp_path)
    back = UperNetForSemanticSegmentation.from_pretrained(tmp_path).eval()
    assert back.backbone.config.prior == model.backbone.config.prior
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(back(images).logits, model(images).logits)
