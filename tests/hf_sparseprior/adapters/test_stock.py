"""Priors on stock transformers models, against attention written out with masks that are made here."""

import copy
import io
import math
import subprocess
import sys

import numpy as np
import peft
import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForImageClassification,
    CLIPModel,
    CLIPVisionModel,
    HieraConfig,
    HieraModel,
    TimesformerConfig,
    TimesformerModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTModel,
    VivitConfig,
    VivitModel,
)

import hf_sparseprior as sp
from hf_sparseprior.adapters.stock_attention import PRIOR_MODULE, RECORD, StockPrior, applied_prior, APPLIED
from hf_sparseprior.adapters.stock_saving import SCALARS_FILE
from hf_sparseprior.adapters.token_layout import LayoutCheckpoint
from hf_sparseprior.curves import curve_rank
from hf_sparseprior.low_rank import MIXERS
from hf_sparseprior.supports import build_mask
from hf_sparseprior.training import SparsePriorTrainer, SparsePriorTrainingArguments
from tests.hf_sparseprior.adapters.stock_models import STOCK, TINY, tiny_clip, visible_patches

DECODER = {
    **{"decoder_hidden_size": 24, "decoder_num_hidden_layers": 1},
    **{"decoder_num_attention_heads": 2, "decoder_intermediate_size": 32, "mask_ratio": 0.5},
}
families = pytest.mark.parametrize("name", STOCK)
PRIORS = {
    "fibottention": "fibottention",
    "modified zero": {"support": {"name": "fibottention", "modified": True, "mask_fill": "zero"}},
    "violin": {"decay": {"name": "violin", "curves": ["hilbert", "snake_t"]}},
    "both": "fibottention+manhattan",
}
priors = pytest.mark.parametrize("prior", PRIORS.values(), ids=list(PRIORS))


def output(model, name, **extra):
    with torch.no_grad():
        return model(**STOCK[name].example(), **extra).last_hidden_state


def move_decays(model, seed=5):
    """Decays far from the identity, other ones in each layer."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, StockPrior) and module.decay_bias is not None:
            with torch.no_grad():
                beta, alpha = module.decay_bias.beta, module.decay_bias.alpha
                beta.copy_(torch.rand(beta.shape, generator=generator) * 3)
                alpha.copy_(1 + torch.rand(alpha.shape, generator=generator))


def distances(decay, grid):
    """(C, N, N): distances of all pairs, from the definitions."""
    if decay["name"] == "manhattan":
        row, column = (index.reshape(-1) for index in np.indices(grid))
        return (abs(row[:, None] - row) + abs(column[:, None] - column))[None]
    ranks = [
        curve_rank(curve.removesuffix("_t"), grid, transposed=curve.endswith("_t")).reshape(-1)
        for curve in decay["curves"]
    ]
    return np.stack([abs(rank[:, None] - rank) for rank in ranks])


class WrittenOut:
    """Attention in float64 with whole matrices, layer by layer, from settings and scalars read off a model."""

    def __init__(self, model, name):
        case = STOCK[name]
        self.case, self.visible = case, visible_patches(name)
        self.layers = [module for module in model.modules() if isinstance(module, StockPrior)]
        self.call = 0

    def __call__(self, module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        layer = self.layers[self.call % len(self.layers)]
        self.call += 1
        logits = (query.double() @ key.double().transpose(-1, -2)) * scaling
        weights, kept = self.tables(layer)
        logits = logits * weights
        support = layer.prior["support"]
        logits = logits.masked_fill(~kept, -math.inf if support["mask_fill"] == "neg_inf" else 0.0)
        if attention_mask is not None:
            logits = logits + attention_mask
        return (logits.softmax(-1) @ value.double()).to(value.dtype).transpose(1, 2), None

    def tables(self, layer):
        """(B or 1, H, T, T): alpha * M and what is attended."""
        prefix, (height, width) = self.case.prefix, self.case.grid
        count, heads = height * width, layer.num_heads
        settings = dict(layer.prior["support"])
        name = settings.pop("name")
        kept = torch.ones(heads, prefix + count, prefix + count, dtype=torch.bool)
        if name != "dense":
            mask = build_mask(
                name, num_heads=heads, num_tokens=count, num_prefix_tokens=prefix, layer=layer.layer_idx, **settings
            )
            kept = torch.from_numpy(mask)
        weights = torch.ones(heads, prefix + count, prefix + count, dtype=torch.float64)
        if layer.decay_bias is not None:
            gamma = torch.sigmoid(layer.decay_bias.beta.double())
            apart = torch.from_numpy(distances(layer.prior["decay"], self.case.grid))
            weights[:, prefix:, prefix:] = (gamma[:, :, None, None] ** apart[:, None]).mean(0)
            weights *= layer.decay_bias.alpha.double()[:, None, None]
        if self.visible is None:
            return weights[None], kept[None]
        tokens = [torch.cat([torch.arange(prefix), prefix + own]) for own in self.visible]
        weights = torch.stack([weights[:, own][:, :, own] for own in tokens])
        kept = torch.stack([kept[:, own][:, :, own] for own in tokens])
        alone = torch.eye(kept.shape[-1], dtype=torch.bool) & ~kept.any(-1, keepdim=True)
        return weights, kept | alone


@families
@priors
def test_equals_attention_written_out(name, prior):
    case = STOCK[name]
    model, plain = case.build(), case.build()
    sp.apply_prior(model, prior)
    move_decays(model)
    AttentionInterface.register("written_out", WrittenOut(model, name))
    plain.set_attn_implementation("written_out")
    got, expected, dense = output(model, name), output(plain, name), output(case.build(), name)
    assert (got - expected).abs().max() < 1e-5
    assert (got - dense).abs().max() > 1e-3


@families
@pytest.mark.parametrize("decay", ["violin", "manhattan"])
def test_starts_as_the_model_it_was(name, decay):
    model = STOCK[name].build()
    before = output(model, name)
    weights = copy.deepcopy(model.state_dict())
    sp.apply_prior(model, decay)
    assert (output(model, name) - before).abs().max() < 1e-5
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())


@families
def test_removal_restores_every_bit(name):
    model = STOCK[name].build()
    before, keys, config = output(model, name), list(model.state_dict()), model.config.to_json_string()
    sp.apply_prior(model, "fibottention+violin")
    assert not torch.equal(output(model, name), before)
    sp.remove_prior(model)
    assert torch.equal(output(model, name), before)
    assert list(model.state_dict()) == keys and model.config.to_json_string() == config
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    sp.apply_prior(model, "violin")  # and it can be done again


@families
@pytest.mark.parametrize("prior", ["fibottention", "fibottention+violin"])
def test_saved_and_loaded_by_the_stock_class(name, prior, tmp_path):
    model = sp.apply_prior(STOCK[name].build(), prior)
    move_decays(model)
    expected = output(model, name)
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, RECORD) and torch.equal(output(model, name), expected)
    loaded, info = STOCK[name].model.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(output(loaded, name), expected)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(output(again, name), expected)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(output(STOCK[name].model.from_pretrained(tmp_path / "again"), name), expected)


@families
def test_nothing_falls_back_to_dense(name):
    model = sp.apply_prior(STOCK[name].build(), "fibottention")
    expected, dense = output(model, name), output(STOCK[name].build(), name)
    assert not torch.allclose(expected, dense, atol=1e-3)
    for implementation in ("sdpa", "eager", "violin"):
        model.set_attn_implementation(implementation)
        assert (output(model, name) - expected).abs().max() < 1e-5
    assert (output(copy.deepcopy(model), name) - expected).abs().max() < 1e-5
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert (output(torch.load(buffer, weights_only=False), name) - expected).abs().max() < 1e-5


@families
def test_attentions_are_those_of_the_prior(name):
    model = sp.apply_prior(STOCK[name].build(), {"support": {"name": "fibottention", "w_min": 1, "w_max": 2}})
    with torch.no_grad():
        attentions = model(**STOCK[name].example(), output_attentions=True).attentions
    stages = 3 if name == "swin" else len(applied_prior(model).attention)  # transformers returns one a stage
    assert len(attentions) == stages
    for weights in attentions[:2]:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert (weights == 0).any()


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


@pytest.mark.parametrize(
    "name", ["vit", "deit", "dinov2", "dinov2_registers", "ijepa", "clip", "siglip", "swin", "dinov3"]
)
def test_another_resolution_and_a_grid_that_is_no_square(name):
    """The grid follows the image: 8 x 10 patches of a model made for 8 x 8."""
    model = STOCK[name].build()
    images = torch.randn(2, 3, 32, 40)
    extra = {} if name in ("dinov2", "dinov2_registers", "dinov3") else {"interpolate_pos_encoding": True}
    sp.apply_prior(model, "fibottention+violin")
    with torch.no_grad():
        model(pixel_values=images, **extra)
    layer = next(module for module in model.modules() if isinstance(module, StockPrior))
    (plan,) = layer._plans.values()
    assert plan.grid == ((4, 4) if name == "swin" else (8, 10)) and plan.num_prefix_tokens == STOCK[name].prefix


def test_swin_takes_a_support_in_its_first_two_stages_only():
    model = sp.apply_prior(STOCK["swin"].build(), "fibottention+violin")
    layers = [module.prior for module in model.modules() if isinstance(module, StockPrior)]
    assert [prior["support"]["name"] for prior in layers] == ["fibottention"] * 4 + ["dense"] * 2
    assert all(prior["decay"] for prior in layers)


def test_only_the_vision_tower_of_clip():
    model = sp.apply_prior(tiny_clip(), "fibottention")
    assert all(name.startswith("vision_model.") for name in applied_prior(model).attention)
    assert not any(hasattr(module, PRIOR_MODULE) for module in model.text_model.modules())


@pytest.mark.parametrize("name", ["vit", "beit", "swin", "mae", "videomae_masked"])
def test_gradients_reach_scalars_and_weights(name):
    model = sp.apply_prior(STOCK[name].build(), "fibottention+violin").train()
    move_decays(model)
    model(**STOCK[name].example()).last_hidden_state.square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        if PRIOR_MODULE in parameter_name or parameter_name.endswith(("q_proj.weight", "query.weight")):
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointed in (False, True):
        model = sp.apply_prior(STOCK["vit"].build(), "fibottention+violin").train()
        move_decays(model)
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(**STOCK["vit"].example()).last_hidden_state.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("name", ["vit", "mae"])
def test_two_forwards_before_one_checkpointed_backward(name):
    """The layers run again with the layout of their own forward: other patches are visible, or the grid is another."""
    first, second = STOCK[name].example(1), STOCK[name].example(2)
    if name == "mae":
        second["noise"] = 1 - second["noise"]
    else:
        first, second = ({"pixel_values": torch.randn(2, 3, *size)} for size in ((32, 48), (48, 32)))
        first["interpolate_pos_encoding"] = second["interpolate_pos_encoding"] = True
    gradients = []
    for checkpointed in (False, True):
        model = sp.apply_prior(STOCK[name].build(), "fibottention+violin").train()
        move_decays(model)
        if checkpointed:
            model.gradient_checkpointing_enable()
        loss = sum(model(**view).last_hidden_state.square().sum() for view in (first, second))
        loss.backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient)
    sp.remove_prior(model)
    assert not any(
        isinstance(getattr(module, "_gradient_checkpointing_func", None), LayoutCheckpoint)
        for module in model.modules()
    )


@families
def test_autocast(name):
    """Rotary positions leave queries and keys in float32 beside values in bfloat16."""
    model = sp.apply_prior(STOCK[name].build(), "fibottention+violin")
    exact = output(model, name)
    with torch.autocast("cpu", torch.bfloat16):
        assert (output(model, name).float() - exact).abs().max() < 0.1 * exact.abs().max()


def test_half_precision_keeps_the_scalars_precise():
    model = sp.apply_prior(STOCK["vit"].build().to(torch.bfloat16), "violin")
    model.to(torch.bfloat16)
    assert {p.dtype for n, p in model.named_parameters() if PRIOR_MODULE in n} == {torch.float32}
    with torch.no_grad():
        assert model(STOCK["vit"].example()["pixel_values"].bfloat16()).last_hidden_state.dtype == torch.bfloat16


def test_weight_decay_leaves_the_scalars_alone():
    from transformers import Trainer, TrainingArguments

    model = sp.apply_prior(STOCK["vit"].build(), "violin")
    trainer = Trainer(model, TrainingArguments(report_to=[], use_cpu=True))
    decayed = trainer.get_decay_parameter_names(model)
    assert decayed and not any(PRIOR_MODULE in name for name in decayed)


class Images(torch.utils.data.Dataset):
    """Random images and labels."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": index % 2}


def trainer_of(model, folder, **arguments):
    settings = {"report_to": [], "use_cpu": True, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    settings |= {"save_strategy": "epoch", "logging_strategy": "no", "disable_tqdm": True}
    arguments = SparsePriorTrainingArguments(output_dir=str(folder), **settings, **arguments)
    return SparsePriorTrainer(model, arguments, train_dataset=Images(), eval_dataset=Images())


def stock_classifier(config):
    torch.manual_seed(0)
    return sp.apply_prior(ViTForImageClassification(config), "fibottention+violin")


def test_resume_restores_every_tensor(tmp_path):
    """ViT is saved under older names, which transformers' own Trainer reads back without a match."""
    config = ViTConfig(**TINY)
    whole = stock_classifier(config)
    trainer_of(whole, tmp_path / "whole", num_train_epochs=2).train()
    trainer_of(stock_classifier(config), tmp_path / "two", num_train_epochs=2).train()
    resumed = stock_classifier(config)
    checkpoint = str(tmp_path / "two" / "checkpoint-2")
    trainer_of(resumed, tmp_path / "two", num_train_epochs=2).train(resume_from_checkpoint=checkpoint)
    expected = whole.state_dict()
    equal = [name for name, tensor in resumed.state_dict().items() if torch.equal(tensor, expected[name])]
    assert equal == list(expected) and any(PRIOR_MODULE in name for name in equal)


def test_the_best_model_is_loaded_with_every_tensor(tmp_path):
    model = stock_classifier(ViTConfig(**TINY))
    # The largest loss, so that the best model is not the last.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trainer_of(model, tmp_path, num_train_epochs=3, eval_strategy="epoch", **best)
    trainer.train()
    assert not trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    saved = ViTForImageClassification.from_pretrained(trainer.state.best_model_checkpoint).state_dict()
    equal = [name for name, tensor in model.state_dict().items() if torch.equal(tensor, saved[name])]
    assert equal == list(saved)


# ---- another head, and what must not pass unnoticed -----------------------------------------------------------------


def test_a_prior_survives_a_change_of_head(tmp_path):
    model = sp.apply_prior(ViTForImageClassification(ViTConfig(**TINY)).eval(), "violin")
    move_decays(model)
    model.save_pretrained(tmp_path)
    images = STOCK["vit"].example()
    body = ViTModel.from_pretrained(tmp_path, add_pooling_layer=False)
    with torch.no_grad():
        expected = model.vit(**images).last_hidden_state
        assert torch.equal(body(**images).last_hidden_state, expected)
    assert isinstance(AutoModelForImageClassification.from_pretrained(tmp_path), ViTForImageClassification)


@pytest.mark.parametrize("name", ["vit", "dinov3", "mae", "swin"])
@pytest.mark.parametrize("prior", ["topk", "linformer", "efficient", "bigbird", "random"])
def test_baselines_change_the_model_and_are_saved(name, prior, tmp_path):
    model = STOCK[name].build()
    if name == "swin" and prior in MIXERS:
        with pytest.raises(ValueError, match="has no logits of pairs, to which SwinAttention adds its relative"):
            sp.apply_prior(model, prior)
        return
    before = output(model, name)
    torch.manual_seed(2)
    sp.apply_prior(model, prior)
    expected = output(model, name)
    assert not torch.allclose(expected, before, atol=1e-3)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert output(again, name).equal(expected)
    assert output(sp.remove_prior(model), name).equal(before)


@pytest.mark.parametrize("prior", ["fibottention", "violin"])
def test_a_decoder_stays_dense_when_the_model_comes_back(prior, tmp_path):
    model = sp.apply_prior(ViTMAEForPreTraining(ViTMAEConfig(**TINY, **DECODER)).eval(), prior)
    move_decays(model)
    model.save_pretrained(tmp_path)
    inputs = STOCK["mae"].example()
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.equal(ViTMAEForPreTraining.from_pretrained(tmp_path)(**inputs).logits, expected)


def test_the_tower_of_a_saved_pair_keeps_its_prior(tmp_path):
    pair = sp.apply_prior(tiny_clip(), "fibottention+violin")
    move_decays(pair)
    pair.save_pretrained(tmp_path)
    images = STOCK["clip"].example()
    tower = CLIPVisionModel.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = pair.vision_model(**images).last_hidden_state
        assert torch.equal(tower(**images).last_hidden_state, expected)
        again = CLIPModel.from_pretrained(tmp_path)
        assert torch.equal(again.vision_model(**images).last_hidden_state, expected)
    script = f"from transformers import CLIPVisionModel; CLIPVisionModel.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0 and "violin" in done.stderr.splitlines()[-1]


def test_saving_a_part_or_a_whole_that_has_no_record_is_refused(tmp_path):
    config = ViTConfig(**TINY)
    part, whole = ViTForImageClassification(config), ViTForImageClassification(config)
    sp.apply_prior(part.vit, "fibottention")
    sp.apply_prior(whole, "fibottention")
    for model in (part, whole.vit):
        with pytest.raises(ValueError, match="applied to a part of it or to what it is a part of"):
            model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="Sequential must be a model of transformers"):
        sp.apply_prior(torch.nn.Sequential(ViTModel(config)), "fibottention")


def test_a_config_of_ones_own_does_not_drop_the_prior(tmp_path):
    sp.apply_prior(STOCK["vit"].build(), "violin").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config=ViTConfig says nothing of the prior"):
        ViTModel.from_pretrained(tmp_path, config=ViTConfig(**TINY))
    STOCK["vit"].build().save_pretrained(tmp_path)  # without a prior, over it
    assert not (tmp_path / SCALARS_FILE).exists()
    assert isinstance(ViTModel.from_pretrained(tmp_path, config=ViTConfig(**TINY)), ViTModel)


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


def test_mixers_come_back_with_the_adapter(tmp_path):
    # Its weights start at random: an adapter without them would fit no other start.
    def fresh(seed):
        torch.manual_seed(0)
        model = STOCK["vit"].build()
        torch.manual_seed(seed)
        return sp.apply_prior(model, "linformer")

    model = fresh(1)
    adapted = peft.get_peft_model(model, sp.adapters.lora_config(model))
    with pytest.raises(ValueError, match=r"unload\(\) of the peft model"):
        sp.remove_prior(adapted.get_base_model())
    with pytest.raises(ValueError, match="save the peft model, or unload"):
        adapted.get_base_model().save_pretrained(tmp_path / "base")
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(fresh(2), tmp_path)
    expected = output(adapted.eval(), "vit")
    assert output(again.eval(), "vit").equal(expected) and not output(fresh(2), "vit").equal(expected)


def test_scalars_that_peft_holds_are_not_thrown_away(tmp_path):
    model = sp.apply_prior(ViTForImageClassification(ViTConfig(**TINY)), "violin")
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["decay_bias"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with pytest.raises(ValueError, match=r"unload\(\) of the peft model"):
        sp.remove_prior(model)
    with pytest.raises(ValueError, match="save the peft model, or unload"):
        model.save_pretrained(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")


def test_without_the_package_a_saved_model_does_not_load_as_a_dense_one(tmp_path):
    sp.apply_prior(STOCK["vit"].build(), "fibottention").save_pretrained(tmp_path)
    script = f"from transformers import ViTModel; ViTModel.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0 and "fibottention" in done.stderr.splitlines()[-1]


def test_attn_implementation_applies_the_prior_on_loading_and_is_refused_afterwards(tmp_path):
    plain = STOCK["vit"].build()
    plain.save_pretrained(tmp_path)
    model = ViTModel.from_pretrained(tmp_path, attn_implementation="fibottention")
    assert torch.equal(output(model, "vit"), output(sp.apply_prior(STOCK["vit"].build(), "fibottention"), "vit"))
    plain.set_attn_implementation("violin")
    with pytest.raises(RuntimeError, match="apply_prior"):
        output(plain, "vit")


def test_twice_is_refused_and_changes_nothing():
    model = sp.apply_prior(STOCK["vit"].build(), "fibottention")
    expected = output(model, "vit")
    with pytest.raises(ValueError, match=r"ViTModel has a prior already; hf_sparseprior.remove_prior"):
        sp.apply_prior(model, "violin")
    assert torch.equal(output(model, "vit"), expected)
    with pytest.raises(ValueError, match="ViTModel has no prior"):
        sp.remove_prior(sp.remove_prior(model))


@pytest.mark.parametrize(
    "prior, message",
    [
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


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: TimesformerModel(TimesformerConfig(**TINY, num_frames=2)), r"TimesformerSelfAttention\) computes"),
        (lambda: HieraModel(HieraConfig(image_size=[32, 32], embed_dim=16)), "itself"),
        (lambda: VivitModel(VivitConfig(**TINY, num_frames=2)), r"VivitAttention\) is not known"),
        (lambda: torch.nn.Linear(2, 2), "Linear must be a model of transformers"),
        (lambda: sp.SparsePriorViTModel(sp.SparsePriorViTConfig(**TINY)), "config's `prior`"),
    ],
)
def test_a_model_that_cannot_take_a_prior_says_which_module_and_why(build, message):
    with pytest.raises(ValueError, match=message):
        sp.apply_prior(build(), "violin")


def test_damaged_or_foreign_scalars_are_named(tmp_path):
    sp.apply_prior(STOCK["vit"].build(), "violin").save_pretrained(tmp_path)
    file = tmp_path / SCALARS_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:40])
    with pytest.raises(OSError, match=r"sparse_prior\.safetensors is damaged"):
        ViTModel.from_pretrained(tmp_path)
    other = sp.apply_prior(STOCK["vit"].build(), "manhattan")
    other.save_pretrained(tmp_path / "other")
    file.write_bytes((tmp_path / "other" / SCALARS_FILE).read_bytes())
    with pytest.raises(OSError, match=r"layers.0.decay_bias.beta has shape \(1, 4\), the model's prior \(8, 4\)"):
        ViTModel.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(OSError, match=r"sparse_prior\.safetensors"):
        ViTModel.from_pretrained(tmp_path)


def test_compiles_as_one_graph():
    model = sp.apply_prior(STOCK["vit"].build(), "fibottention+violin")
    move_decays(model)
    expected = output(model, "vit")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert (output(compiled, "vit") - expected).abs().max() < 1e-5
