"""Applying priors to stock models and removing them."""

import copy
import re
from itertools import cycle

import peft
import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTModel

import hf_sparseprior as sp
from hf_sparseprior.adapters.stock_attention import APPLIED, PRIOR_MODULE, StockPrior
from tests.each import each
from tests.hf_sparseprior.adapters.stock_models import STOCK, TINY, output


@pytest.mark.parametrize(("name", "decay"), [*zip(STOCK, cycle(["violin", "manhattan"]))])
def test_starts_as_the_model_it_was_and_removal_restores_every_bit(name, decay):
    model = STOCK[name].build()
    before, weights, config = output(model, name), copy.deepcopy(model.state_dict()), model.config.to_json_string()
    sp.apply_prior(model, decay)
    assert (output(model, name) - before).abs().max() < 1e-5
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())
    sp.apply_prior(sp.remove_prior(model), f"fibottention+{decay}")
    assert not torch.equal(output(model, name), before)
    sp.remove_prior(model)
    assert torch.equal(output(model, name), before)
    assert list(model.state_dict()) == list(weights) and model.config.to_json_string() == config
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_two_models_that_share_a_config():
    config = ViTConfig(**TINY)
    first, second = ViTModel(config).eval(), ViTModel(config).eval()
    images = STOCK["vit"].example()
    with torch.no_grad():
        before = second(**images).last_hidden_state
        sp.apply_prior(first, "fibottention")
        assert torch.equal(second(**images).last_hidden_state, before)
        changed = first(**images).last_hidden_state
        second.set_attn_implementation("eager")
        assert torch.allclose(first(**images).last_hidden_state, changed, atol=1e-5)


def test_swin_takes_a_support_in_its_first_two_stages_only():
    model = sp.apply_prior(STOCK["swin"].build(), "fibottention+violin")
    layers = [module.prior for module in model.modules() if isinstance(module, StockPrior)]
    assert [prior["support"]["name"] for prior in layers] == ["fibottention"] * 4 + ["dense"] * 2
    assert all(prior["decay"] for prior in layers)


def test_weight_decay_leaves_the_scalars_alone(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = sp.apply_prior(STOCK["vit"].build(), "violin")
    trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    decayed = trainer.get_decay_parameter_names(model)
    assert decayed and not any(PRIOR_MODULE in name for name in decayed)


def test_twice_is_refused_and_changes_nothing():
    model = sp.apply_prior(STOCK["vit"].build(), "fibottention")
    expected = output(model, "vit")
    with pytest.raises(ValueError, match=r"ViTModel has a prior already; hf_sparseprior.remove_prior"):
        sp.apply_prior(model, "violin")
    assert torch.equal(output(model, "vit"), expected)
    with pytest.raises(ValueError, match="ViTModel has no prior"):
        sp.remove_prior(sp.remove_prior(model))


@each(
    "prior, message",
    [
        (None, r"prior=None must name a prior; hf_sparseprior.remove_prior\(model\) takes"),
        ("fibotention", "did you mean 'fibottention'"),
        ({"support": {"name": "fibottention", "w_min": -1}}, "w_min=-1"),
        ({"decay": {"name": "violin", "init": "none"}}, "init='none'"),
        ({"decay": 7}, "decay=7"),
        ({"mixer": {"name": "efficient", "key_width": 4}}, "key_width=4 is not the 12 that the model's queries"),
    ],
)
def test_a_bad_prior_leaves_the_model_alone(prior, message):
    model = STOCK["vit"].build()
    before = output(model, "vit")
    with pytest.raises(ValueError, match=message):
        sp.apply_prior(model, prior)
    assert torch.equal(output(model, "vit"), before) and not hasattr(model, APPLIED)


def test_of_a_peft_model_the_base_model_gets_the_prior(tmp_path):
    model = ViTForImageClassification(ViTConfig(**TINY)).eval()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    sp.apply_prior(adapted, "fibottention")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path)
    images = STOCK["vit"].example()
    with torch.no_grad():
        expected = merged(**images).logits
        assert torch.equal(ViTForImageClassification.from_pretrained(tmp_path)(**images).logits, expected)
    sp.remove_prior(merged)


def test_weights_of_a_prior_on_a_peft_model_are_frozen():
    """Its adapter is saved without them."""
    adapted = peft.get_peft_model(STOCK["vit"].build(), peft.LoraConfig(target_modules=["q_proj"]))
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    with pytest.warns(UserWarning, match="the prior's weights in PeftModel are frozen, because peft would not save"):
        sp.apply_prior(adapted, "violin")
    assert {name for name, weight in adapted.named_parameters() if weight.requires_grad} == trained
    assert any("decay_bias" in name for name, _ in adapted.named_parameters())


@each("model", [None, "google/vit-base-patch16-224"])
def test_what_is_no_model_is_named(model):
    with pytest.raises(ValueError, match=f"model={re.escape(repr(model))} must be a model of transformers or timm"):
        sp.apply_prior(model, "violin")


def test_a_class_without_a_source_is_refused_in_words():
    made = {}
    exec("class TypedAttention(nn.Module):\n    pass", {"nn": torch.nn}, made)

    class Other(ViTModel):
        def __init__(self, config):
            super().__init__(config)
            self.layers, self.embeddings = made["TypedAttention"](), torch.nn.Identity()

    with pytest.raises(ValueError, match=r"the token layout of layers \(TypedAttention\) is not known here"):
        sp.apply_prior(Other(ViTConfig(**TINY)), "violin")


def replicated(model, change):
    """A copy as `nn.DataParallel` makes it for another device, with every tensor changed; it asks for GPUs."""
    modules = list(model.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in copies.items():
        for name, child in module._modules.items():
            replica._modules[name] = copies.get(child)
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, change(parameter.detach()))
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else change(buffer)
    return copies[model]


@pytest.mark.parametrize(("name", "with_adapter"), [*zip(STOCK, cycle([False, True]))])
def test_replicas_of_data_parallel_run_with_their_own_weights(name, with_adapter):
    model = STOCK[name].build()
    if with_adapter:
        model = peft.get_peft_model(model, sp.ViolinAdapterConfig(decay={"name": "violin", "init": "moving"})).eval()
    else:
        sp.apply_prior(model, {"support": "fibottention", "decay": {"name": "violin", "init": "moving"}})

    def shrunk(tensor):
        return 0.7 * tensor if tensor.is_floating_point() else tensor

    expected = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*expected.parameters(), *expected.buffers()]:
            tensor.copy_(shrunk(tensor))
        found = replicated(model, shrunk)(**STOCK[name].example()).last_hidden_state
    torch.testing.assert_close(found, output(expected, name))
    assert not torch.allclose(found, output(model, name), atol=1e-3)
