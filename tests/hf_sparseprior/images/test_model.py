"""Models of a configuration: where their first weights come from."""

import torch

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.images.model import build_model
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.priors.low_rank import MIXERS
from hf_sparseprior.priors.predictor import PREDICTORS
from tasks.pretraining.task import build_backbone
from tests.each import each

MODEL = {
    **{"image_size": 8, "patch_size": 2, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 48, "stem": "convolution", "stem_channels": 8},
}
PARTS = {
    **{f"decay {name}": {"decay": {"name": name}} for name in DECAYS},
    **{f"extra {name}": {"extras": [{"name": name}]} for name in EXTRAS},
    **{f"mixer {name}": {"mixer": {"name": name}} for name in MIXERS},
    **{f"predictor {name}": {"predictor": {"name": name}} for name in PREDICTORS},
    **{"several": {"support": {"name": "fibottention"}, "decay": {"name": "violin"}}, "fibottention": "fibottention"},
}
CLASSES = ["a", "b", "c"]


def built(seed, prior, make=lambda model: build_model(model, CLASSES)):
    torch.manual_seed(seed)
    model = make({**MODEL, "prior": prior})
    return model.state_dict(), torch.get_rng_state()


@each("part", PARTS)
def test_every_prior_starts_from_the_weights_of_one_dense_model(part):
    dense, own = built(1, "dense")[0], built(1, PARTS[part])[0]
    shared = [name for name in own if name in dense and own[name].shape == dense[name].shape]
    assert len(shared) > 20 and "classifier.weight" in shared
    assert [name for name in shared if not torch.equal(own[name], dense[name])] == []
    again, other = built(1, PARTS[part])[0], built(2, PARTS[part])[0]
    assert all(torch.equal(own[name], again[name]) for name in own)
    assert not torch.equal(own["classifier.weight"], other["classifier.weight"])


def test_what_a_prior_adds_is_drawn_for_each_layer_and_the_dense_model_is_the_librarys():
    own = built(1, "violin")[0]
    betas = [value for name, value in own.items() if name.endswith("beta")]
    assert len(betas) == 2 and not torch.equal(*betas) and betas[0].std() > 0
    dense, state = built(1, "dense")
    torch.manual_seed(1)
    expected = SparsePriorViTForImageClassification(SparsePriorViTConfig(**MODEL, prior="dense", num_labels=3))
    assert all(torch.equal(value, dense[name]) for name, value in expected.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(built(1, "violin")[1], state)  # what is drawn after a model is the same, too


def test_backbones_of_pretraining_start_alike():
    dense, violin = (built(1, prior, build_backbone)[0] for prior in ("dense", "violin"))
    assert set(dense) < set(violin) and all(torch.equal(value, violin[name]) for name, value in dense.items())
