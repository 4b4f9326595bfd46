import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.training import SparsePriorTrainer, SparsePriorTrainingArguments, layer_depths
from hf_sparseprior.training.layer_decay import adamw
from tests.each import each
from tests.hf_sparseprior.models.test_every_family import IMAGES, images
from tests.hf_sparseprior.small import small

RATE, DECAY, LAYER_DECAY = 1e-3, 0.05, 0.5

# name: (layer, weight decay applies). Two layers: layer l gets 1e-3 * 0.5 ** (3 - l).
LAYER = {
    "layernorm_before.weight": False, "layernorm_before.bias": False,
    "attention.q_proj.weight": True, "attention.q_proj.bias": False,
    "attention.k_proj.weight": True, "attention.k_proj.bias": False,
    "attention.v_proj.weight": True, "attention.v_proj.bias": False,
    "attention.o_proj.weight": True, "attention.o_proj.bias": False,
    "attention.decay_bias.alpha": False, "attention.decay_bias.beta": False,
    "layernorm_after.weight": False, "layernorm_after.bias": False,
    "mlp.fc1.weight": True, "mlp.fc1.bias": False, "mlp.fc2.weight": True, "mlp.fc2.bias": False,
    "layerscale_attention.scale": False, "layerscale_mlp.scale": False,
}  # fmt: skip
TABLE = {
    "vit.embeddings.class_token": (0, False), "vit.embeddings.distillation_token": (0, False),
    "vit.embeddings.register_tokens": (0, False), "vit.embeddings.position_embeddings": (0, False),
    "vit.embeddings.projection.weight": (0, True), "vit.embeddings.projection.bias": (0, False),
    **{f"vit.layers.0.{name}": (1, decayed) for name, decayed in LAYER.items()},
    **{f"vit.layers.1.{name}": (2, decayed) for name, decayed in LAYER.items()},
    "vit.layernorm.weight": (3, False), "vit.layernorm.bias": (3, False),
    "classifier.weight": (3, True), "classifier.bias": (3, False),
    "distillation_classifier.weight": (3, True), "distillation_classifier.bias": (3, False),
}  # fmt: skip
RATES = {0: 0.125e-3, 1: 0.25e-3, 2: 0.5e-3, 3: 1e-3}


def make_model():
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig(
        image_size=8, patch_size=2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        prior="fibottention+violin", layerscale_value=0.1, num_register_tokens=1, use_distillation_token=True,
    )  # fmt: skip
    return sp.SparsePriorViTForImageClassification(config)


def optimizer_of(model, folder, **options):
    arguments = SparsePriorTrainingArguments(
        output_dir=str(folder), learning_rate=RATE, weight_decay=DECAY, report_to="none", use_cpu=True,
        **{"layer_decay": LAYER_DECAY, **options},
    )  # fmt: skip
    return SparsePriorTrainer(model=model, args=arguments).create_optimizer()


def settings(model, optimizer):
    """name: (rate, weight decay), as the optimizer has it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [
        (names[id(p)], (group["lr"], group["weight_decay"]))
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    assert len(dict(found)) == len(found)  # no parameter twice
    return dict(found)


def test_every_parameter_has_its_rate_and_decay(tmp_path):
    model = make_model()
    expected = {name: (RATES[layer], DECAY if decayed else 0.0) for name, (layer, decayed) in TABLE.items()}
    found = settings(model, optimizer_of(model, tmp_path))
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values), name


def test_each_group_is_one_layer_with_or_without_decay(tmp_path):
    groups = optimizer_of(make_model(), tmp_path).param_groups
    assert [(group["layer"], group["weight_decay"] > 0) for group in groups] == [
        (layer, decayed) for layer in range(4) for decayed in (False, True)
    ]


def test_layer_decay_of_one_is_the_stock_optimizer(tmp_path):
    model = make_model()
    optimizer = optimizer_of(model, tmp_path, layer_decay=1.0)
    assert len(optimizer.param_groups) == 2
    expected = {name: (RATE, DECAY if decayed else 0.0) for name, (_, decayed) in TABLE.items()}
    assert settings(model, optimizer) == expected
    nearly = optimizer_of(model, tmp_path, layer_decay=1 - 1e-12)
    assert {k: v for k, v in nearly.defaults.items() if k != "params"} == optimizer.defaults


def test_frozen_parameters_are_left_out_and_do_not_move_the_rates(tmp_path):
    model = make_model()
    frozen = [name for name, _ in model.named_parameters() if "layers.1" in name or "embeddings" in name]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    found = settings(model, optimizer_of(model, tmp_path))
    assert found.keys() == TABLE.keys() - set(frozen)
    assert found["vit.layers.0.mlp.fc1.weight"] == pytest.approx((0.25e-3, DECAY))


@each("layer_decay", [1.0, LAYER_DECAY])
def test_below_peft_the_same_rules_hold(tmp_path, layer_decay):
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["classifier", "decay_bias"])
    model = get_peft_model(make_model(), lora)
    found = settings(model, optimizer_of(model, tmp_path, layer_decay=layer_decay))
    assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("beta" in name for name in found) and any("lora_A" in name for name in found)
    for name, values in found.items():
        layer = next((i + 1 for i in range(2) if f".layers.{i}." in name), 3)
        decayed = "lora_" in name or ("classifier" in name and name.endswith("weight"))
        rate = RATE * layer_decay ** (3 - layer)
        assert values == pytest.approx((rate, DECAY if decayed else 0.0)), name


def test_transformers_own_vit_gets_the_same_layers(tmp_path):
    model = ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                  intermediate_size=8)
    )  # fmt: skip
    for name, (rate, _) in settings(model, optimizer_of(model, tmp_path)).items():
        layer = next((i + 1 for i in range(2) if f".{i}." in name), 0 if "embeddings" in name else 3)
        assert rate == pytest.approx(RATES[layer]), name


TIMM = {
    "cls_token": 0, "pos_embed": 0, "patch_embed.proj.weight": 0, "blocks.0.attn.qkv.weight": 1,
    "blocks.11.attn.qkv.weight": 2, "blocks.11.mlp.layers.0.weight": 2, "norm.weight": 3, "fc_norm.bias": 3,
    "head.weight": 3, "classifier.layers_of_head.weight": 3,
}  # fmt: skip
STOCK = {
    "encoder.layer.0.output.dense.bias": 1, "encoder.layer.1.output.dense.bias": 2, "embeddings.norm.weight": 0,
    "classifier.weight": 3,
}  # fmt: skip
SWIN = {
    "swin.embeddings.norm.weight": 0, "swin.encoder.layers.0.blocks.0.a": 1, "swin.encoder.layers.0.blocks.1.a": 2,
    "swin.encoder.layers.0.downsample.norm.weight": 2, "swin.encoder.layers.1.blocks.0.a": 3,
    "swin.layernorm.weight": 4, "classifier.bias": 4,
}  # fmt: skip
TIMM_SWIN = {"layers.0.blocks.0.a": 1, "layers.1.downsample.a": 1, "layers.1.blocks.0.a": 2, "head.fc.weight": 3}


def test_names_of_other_libraries():
    for names in (TIMM, STOCK, SWIN, TIMM_SWIN):
        assert layer_depths(names) == (names, max(names.values()) - 1)


@pytest.mark.parametrize("name", IMAGES)
def test_layers_of_every_family_are_in_the_order_in_which_they_are_called(name):
    """Each layer learns faster than what is called before it, embeddings slowest, norm and classifier fastest."""
    model = FAMILIES[name].base(small(name))
    depths, layers = layer_depths(key for key, _ in model.named_parameters())
    called = []
    for path, module in model.named_modules():
        own = {depths[f"{path}.{key}" if path else key] for key, _ in module.named_parameters(recurse=False)}
        if own:
            module.register_forward_pre_hook(lambda *_, own=own: called.append(own))
    with torch.no_grad():
        model(images(name))
    order = [depth for depths_of_one in called for depth in depths_of_one]
    assert order == sorted(order) and set(order) == set(depths.values()) >= set(range(layers + 1))


def test_the_rates_keep_their_proportions_through_the_schedule(tmp_path):
    arguments = SparsePriorTrainingArguments(
        output_dir=str(tmp_path), learning_rate=RATE, layer_decay=LAYER_DECAY, report_to="none", use_cpu=True,
        lr_scheduler_type="cosine_warmup_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-5}, warmup_steps=3,
    )  # fmt: skip
    trainer = SparsePriorTrainer(model=make_model(), args=arguments)
    trainer.create_optimizer_and_scheduler(10)
    for _ in range(10):
        rates = {group["layer"]: group["lr"] for group in trainer.optimizer.param_groups}
        assert [rates[layer] / rates[3] for layer in range(3)] == pytest.approx([0.125, 0.25, 0.5])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()


@each("value", [0, -0.5, 1.01, True, "0.65", None, float("nan")])
def test_bad_layer_decay_is_named(tmp_path, value):
    with pytest.raises(ValueError, match=rf"layer_decay={value!r} must be above 0 and at most 1"):
        SparsePriorTrainingArguments(output_dir=str(tmp_path), layer_decay=value)


def test_matrices_alone_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    model[1].weight.requires_grad_(False)
    model[0].no_weight_decay = lambda: ["bias"]
    decayed, others = adamw(model, 0.1, 0.05).param_groups
    assert decayed["params"] == [model[0].weight] and decayed["weight_decay"] == 0.05 and decayed["lr"] == 0.1
    assert len(others["params"]) == 2 and others["weight_decay"] == 0
