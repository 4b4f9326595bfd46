"""transformers' common tests of models, backbones and configs, with our models in place of theirs.

Here of two families with both priors; `make conformance` runs them for every family, and for ViT with everything that
is registered. What stands in `ModelTests` in place of a shared test is what the tests of ViT, Swin and TimeSformer have
in its place, too.
"""

from __future__ import annotations

import os
import re
import sys
import unittest

import pytest
import torch

from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import SUPPORTS
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.predictor import PREDICTORS
from tests.conformance.sources import DEFAULT, is_laid_out
from tests.hf_sparseprior.small import known_family

if not is_laid_out():
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
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
        "window_size": 2, "mlp_ratio": 2.0,
    },
    "sparseprior_iformer": {
        "image_size": 32, "hidden_sizes": [8, 16], "conv_depths": [1, 0], "attention_depths": [1, 1],
        "final_conv_depths": [0, 1], "key_reduction": [1, 2],
    },
}  # fmt: skip


class Tester:
    """What transformers' mixins ask of a family: a small config and a batch."""

    __test__ = False  # to pytest

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
        self.mask_length = config.grid[0] * config.grid[1]
        self.num_masks = self.mask_length // 2

    def get_config(self):
        return self.family.make_config(**SIZES[known_family(self.name, SIZES)], prior=self.prior)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        frames = [config.num_frames] if self.family.takes == "clips" else []
        return config, {"pixel_values": floats_tensor([BATCH, *frames, 3, self.image_size, self.image_size])}


# Tests that cannot apply to a prior, and why.
PAIRLESS = "its weights of pairs are worked out for `output_attentions` alone; the output is made without them"
CANNOT_APPLY = {
    ("linformer", "test_retain_grad_hidden_states_attentions"): PAIRLESS,
    ("efficient", "test_retain_grad_hidden_states_attentions"): PAIRLESS,
    **{
        (name, "test_attention_outputs"): "layers after the first have the tokens that are left"
        for name in ("dynamicvit", "tome")
    },
}
DROPS_TOKENS = ("evit", "dynamicvit", "tome")  # feature maps need all of them: backbones refuse these by name


class ModelTests(test_modeling_common.ModelTesterMixin):
    name, prior = None, None
    test_resize_embeddings = False

    def setUp(self):
        if reason := CANNOT_APPLY.get((self.prior, self._testMethodName)):
            self.skipTest(reason)
        # The basis of Sparsifiner's predictor learns by a loss of its own, as routers of mixtures of experts do.
        self.test_all_params_have_gradient = self.prior != "sparsifiner"
        self.model_tester = Tester(self, self.name, self.prior)
        self.all_model_classes = tuple(
            cls for auto, cls in self.model_tester.family.models.items() if auto != "AutoBackbone"
        )

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and model_class.__name__.endswith("Classification"):
            inputs["labels"] = torch.zeros(BATCH, dtype=torch.long)
        return inputs

    def test_attention_outputs(self):
        """Stages have windows, grids and heads of their own, as in the test of Swin."""
        if len(self.model_tester.get_config().stages) == 1:
            return super().test_attention_outputs()
        for model, inputs in self.models():
            outputs = model(**inputs, output_attentions=True)
            layers = [stage for stage in model.config.stages for _ in range(stage.num_layers)]
            tokens = [model.config.prefix_tokens(stage) + stage.grid[0] * stage.grid[1] for stage in layers]
            shapes = [
                (BATCH * stage.num_windows, stage.num_heads, number, number)
                for stage, number in zip(layers, tokens, strict=True)
            ]
            assert [tuple(weights.shape) for weights in outputs.attentions] == shapes
            both = model(**inputs, output_attentions=True, output_hidden_states=True)
            assert set(both) - set(outputs) <= {"hidden_states", "reshaped_hidden_states"} and "hidden_states" in both
        return None

    def test_hidden_states_output(self):
        """Stages have widths and grids of their own, and a clip has the tokens of all frames."""
        config = self.model_tester.get_config()
        if len(config.stages) == 1 and self.model_tester.family.takes == "images":
            return super().test_hidden_states_output()
        for model, inputs in self.models():
            model.config.output_hidden_states = True
            outputs = model(**inputs)
            places = len(model.config.stages) if len(model.config.stages) > 1 else config.num_hidden_layers
            assert len(outputs.hidden_states) == 1 + places
            for tokens, image in zip(outputs.hidden_states, outputs.get("reshaped_hidden_states") or [], strict=False):
                assert image.flatten(2).transpose(1, 2).equal(tokens)
            if config.model_type == "sparseprior_timesformer":
                assert outputs.hidden_states[0].shape == (BATCH, 1 + config.num_frames * 16, config.hidden_size)
        return None

    def models(self):
        """Each model, and a batch for it."""
        for model_class in self.all_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            with torch.no_grad():
                yield model_class(config).eval(), inputs

    def test_model_get_set_embeddings(self):
        """As in the test of ViT: patches are embedded by a convolution."""
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            assert isinstance(model.get_input_embeddings(), torch.nn.Module)

    def test_config(self):
        config_class, tester = self.model_tester.family.config_class, test_configuration_common.ConfigTester
        common = (
            None if len(self.model_tester.get_config().stages) == 1 else ["image_size", "num_channels", "hidden_size"]
        )
        tester(
            self, config_class=config_class, has_text_modality=False, common_properties=common, image_size=64
        ).run_common_tests()


class BackboneTests(test_backbone_common.BackboneTesterMixin):
    name, prior = None, None

    def setUp(self):
        self.model_tester = Tester(self, self.name, self.prior)
        self.config_class = self.model_tester.family.config_class
        self.all_model_classes = (self.model_tester.family.backbone,)


def make(kind, name, prior):
    """A class of tests, in this module, of one family and prior."""
    title = re.sub(r"\W+", "_", f"{kind.__name__}_{FAMILIES[name].title}_{prior}")
    globals()[title] = type(title, (kind, unittest.TestCase), {"name": name, "prior": prior, "__module__": __name__})


CASES = [("sparseprior_vit", BOTH), ("sparseprior_swin", BOTH)]
if os.environ.get("CONFORMANCE") == "all":
    REGISTERED = [*SUPPORTS, *DECAYS, *PREDICTORS, *MIXERS, *EXTRAS]
    CASES = [(name, prior) for name in FAMILIES for prior in ("dense", BOTH)]
    CASES += [("sparseprior_vit", prior) for prior in dict.fromkeys(REGISTERED) if prior != "dense"]
for case in CASES:
    make(ModelTests, *case)
    if FAMILIES[case[0]].backbone is not None and case[1] not in DROPS_TOKENS:
        make(BackboneTests, *case)
