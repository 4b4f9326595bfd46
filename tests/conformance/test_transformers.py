"""transformers' common tests of models, backbones and configs, run for our families (`make conformance`)."""

from __future__ import annotations

import os
import sys
import unittest

import pytest
import torch

from hf_sparseprior.base.families import FAMILIES
from tests.conformance.sources import DEFAULT, PACKAGE
from tests.hf_sparseprior.small import known_family

if not (DEFAULT / PACKAGE).is_dir():
    pytest.skip("transformers' own tests are not here: python -m tests.conformance.sources", allow_module_level=True)
sys.path.insert(0, str(DEFAULT))

from transformers_tests import test_backbone_common, test_configuration_common, test_modeling_common

# The tests know base models by their names, and do not train them.
BASES = {name: family.base.__name__ for name, family in FAMILIES.items()}
test_modeling_common.MODEL_MAPPING_NAMES = {**test_modeling_common.MODEL_MAPPING_NAMES, **BASES}
floats_tensor = test_modeling_common.floats_tensor
BATCH = 13
BOTH = "fibottention+violin"
VIT = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 37,
}  # fmt: skip
SIZES = {
    "sparseprior_vit": VIT,
    "sparseprior_convit": {**VIT, "num_local_layers": 1},
    "sparseprior_timesformer": {**VIT, "num_frames": 2},
    "sparseprior_swin": {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2, 1], "num_heads": [2, 2, 4],
        "window_size": 2, "mlp_ratio": 2.0,
    },
    "sparseprior_iformer": {
        "image_size": 32, "hidden_sizes": [8, 16], "conv_depths": [1, 0], "attention_depths": [1, 1],
        "final_conv_depths": [0, 1], "key_reduction": [1, 2],
    },
}  # fmt: skip


class Tester:
    """What transformers' mixins ask of a family: a small config and a batch."""

    batch_size = BATCH
    is_training = True

    def __init__(self, parent, name, prior):
        self.parent, self.name, self.prior = parent, name, prior
        self.family = FAMILIES[name]
        for key, value in SIZES[known_family(name, SIZES)].items():
            setattr(self, key, value)
        config = self.get_config()
        stage = config.stages[0]
        self.num_hidden_layers = sum(each.num_layers for each in config.stages)
        self.num_attention_heads = stage.num_heads
        self.seq_length = config.prefix_tokens(stage) + stage.grid[0] * stage.grid[1]
        self.hidden_size = config.hidden_size

    def get_config(self):
        return self.family.make_config(**SIZES[known_family(self.name, SIZES)], prior=self.prior)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        frames = [config.num_frames] if self.family.takes == "clips" else []
        return config, {"pixel_values": floats_tensor([BATCH, *frames, 3, self.image_size, self.image_size])}


class ModelTests(test_modeling_common.ModelTesterMixin):
    name, prior = None, None
    test_resize_embeddings = False

    def setUp(self):
        self.model_tester = Tester(self, self.name, self.prior)
        self.all_model_classes = tuple(
            cls for auto, cls in self.model_tester.family.models.items() if auto != "AutoBackbone"
        )

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and model_class.__name__.endswith("Classification"):
            inputs["labels"] = torch.zeros(BATCH, dtype=torch.long)
        return inputs

    def test_model_get_set_embeddings(self):
        """As in the test of ViT: patches are embedded by a convolution."""
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            assert isinstance(model.get_input_embeddings(), torch.nn.Module)

    def test_config(self):
        test_configuration_common.ConfigTester(
            self, config_class=self.model_tester.family.config_class, has_text_modality=False, image_size=64
        ).run_common_tests()


class BackboneTests(test_backbone_common.BackboneTesterMixin):
    name, prior = None, None

    def setUp(self):
        self.model_tester = Tester(self, self.name, self.prior)
        self.config_class = self.model_tester.family.config_class
        self.all_model_classes = (self.model_tester.family.backbone,)


def make(kind, name, prior):
    short = FAMILIES[name].title
    title = f"{kind.__name__}_{short}_{prior}".replace("+", "_")
    globals()[title] = type(title, (kind, unittest.TestCase), {"name": name, "prior": prior, "__module__": __name__})


ALL = os.environ.get("CONFORMANCE") == "all"
for family in FAMILIES:
    for prior in ("dense", BOTH):
        make(ModelTests, family, prior)
        if FAMILIES[family].backbone is not None:
            make(BackboneTests, family, prior)
