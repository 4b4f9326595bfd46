import builtins
import copy

import peft
import pytest
import torch
import transformers

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification, SparsePriorViTModel
from hf_sparseprior.adapters import lora_config
from hf_sparseprior.adapters.lora import known_projections
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.base.families import FAMILIES as REGISTERED
from hf_sparseprior.models.heads import make_head
from tests.each import each
from tests.hf_sparseprior.adapters.fitting_peft import import_fitting_peft
from tests.hf_sparseprior.small import SMALL as SMALL_CONFIGS
from tests.hf_sparseprior.small import shipped_families

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
DECODER = {
    "decoder_hidden_size": 16, "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1,
    "decoder_intermediate_size": 32,
}  # fmt: skip
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
CLIP_QKVO = ("q_proj", "k_proj", "v_proj", "out_proj")
MLP = ("fc1", "fc2")


def ours(**options):
    torch.manual_seed(0)
    return SparsePriorViTForImageClassification(SparsePriorViTConfig(**{**SMALL, "prior": "violin", **options}))


def family(name, sizes=None):
    return lambda: REGISTERED[name].classifier(
        REGISTERED[name].make_config(**(sizes or SMALL_CONFIGS[name]), prior="violin")
    )


def stock(model, config, **options):
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**{**SMALL, **options}))


def two_towers(model, config):
    text = {key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
    return lambda: getattr(transformers, model)(
        getattr(transformers, config)(vision_config=SMALL, text_config={**text, "vocab_size": 9})
    )


# Model, attention path and its projections, those of the MLP, classifiers; taken from transformers' modeling files.
FAMILIES = {
    "sparseprior_vit": (ours, "vit.layers.{}.attention", QKVO, MLP, ["classifier"]),
    "sparseprior_timesformer": (
        family("sparseprior_timesformer", SMALL), "vit.layers.{}.attention", QKVO, MLP, ["classifier"],
    ),
    "sparseprior_swin": (
        family("sparseprior_swin"), "swin.stages.{}.layers.0.attention", QKVO, MLP, ["classifier"],
    ),
    "sparseprior_convit": (family("sparseprior_convit"), "convit.layers.{}.attention", QKVO, MLP, ["classifier"]),
    "sparseprior_iformer": (
        family("sparseprior_iformer"),
        "iformer.stages.{}.layers.0.attention", ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj"), MLP,
        ["classifier"],
    ),
    "vit": (stock("ViTForImageClassification", "ViTConfig"), "vit.layers.{}.attention", QKVO, MLP, ["classifier"]),
    "deit": (
        stock("DeiTForImageClassificationWithTeacher", "DeiTConfig"), "deit.layers.{}.attention", QKVO, MLP,
        ["cls_classifier", "distillation_classifier"],
    ),
    "vit_msn": (
        stock("ViTMSNForImageClassification", "ViTMSNConfig"), "vit.layers.{}.attention", QKVO, MLP, ["classifier"],
    ),
    "dinov2": (
        stock("Dinov2ForImageClassification", "Dinov2Config"), "dinov2.encoder.layer.{}.attention", QKVO, MLP,
        ["classifier"],
    ),
    "dinov2_with_registers": (
        stock("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", use_swiglu_ffn=True),
        "dinov2_with_registers.encoder.layer.{}.attention", QKVO, ("gate_proj", "up_proj", "down_proj"), ["classifier"],
    ),
    "dinov3_vit": (
        stock("DINOv3ViTModel", "DINOv3ViTConfig"), "model.layer.{}.attention", QKVO, ("up_proj", "down_proj"), [],
    ),
    "beit": (stock("BeitForImageClassification", "BeitConfig"), "beit.layers.{}.attention", QKVO, MLP, ["classifier"]),
    "clip": (
        two_towers("CLIPModel", "CLIPConfig"), "vision_model.encoder.layers.{}.self_attn", CLIP_QKVO, MLP, [],
    ),
    "clip_vision_model": (
        stock("CLIPVisionModel", "CLIPVisionConfig"), "encoder.layers.{}.self_attn", CLIP_QKVO, MLP, [],
    ),
    "siglip": (
        two_towers("SiglipForImageClassification", "SiglipConfig"), "vision_model.encoder.layers.{}.self_attn",
        CLIP_QKVO, MLP, ["classifier"],
    ),
    "siglip_vision_model": (
        stock("SiglipVisionModel", "SiglipVisionConfig"), "encoder.layers.{}.self_attn", CLIP_QKVO, MLP, [],
    ),
    "vit_mae": (
        stock("ViTMAEForPreTraining", "ViTMAEConfig", **DECODER), "vit.layers.{}.attention", QKVO, MLP, [],
    ),
    "ijepa": (
        stock("IJepaForImageClassification", "IJepaConfig"), "ijepa.layers.{}.attention", QKVO, MLP, ["classifier"],
    ),
    "videomae": (
        stock("VideoMAEForPreTraining", "VideoMAEConfig", **DECODER), "videomae.encoder.layer.{}.attention",
        ("attention.query", "attention.key", "attention.value", "output.dense"),
        ("intermediate.dense", "output.dense"), [],
    ),
    "vivit": (
        stock("VivitForVideoClassification", "VivitConfig", tubelet_size=[2, 4, 4], num_frames=4),
        "vivit.layers.{}.attention", QKVO, MLP, ["classifier"],
    ),
    "timesformer": (
        stock("TimesformerForVideoClassification", "TimesformerConfig", num_frames=2),
        "timesformer.encoder.layer.{}.attention", ("attention.qkv", "output.dense", "attention.qkv"),
        ("intermediate.dense", "output.dense"), ["classifier"],
    ),
    "swin": (
        lambda: transformers.SwinForImageClassification(
            transformers.SwinConfig(
                image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2
            )
        ),
        "swin.encoder.layers.{}.blocks.0.attention", QKVO, MLP, ["classifier"],
    ),
}  # fmt: skip


def expected_targets(family, targets):
    _, path, projections, mlp, _ = FAMILIES[family]
    chosen = [projections[0], projections[2]] if targets == "query+value" else projections
    names = {f"{path.format(layer)}.{name}" for layer in range(2) for name in chosen}
    if family in ("sparseprior_timesformer", "timesformer"):
        names |= {name.replace(".attention.", ".temporal_attention.") for name in names}
    if targets == "attention+mlp":
        below = path.rpartition(".")[0] + (".{}" if family in ("videomae", "timesformer") else ".mlp.{}")
        names |= {below.replace("{}", str(layer), 1).format(name) for layer in range(2) for name in mlp}
    return names


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def images():
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def train(model, steps):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(images(), labels=torch.tensor([0, 1, 1, 0])).loss.backward()
        optimizer.step()


def test_every_family_with_a_preset_is_tested():
    extended = REGISTERED.keys() - set(shipped_families())  # they extend others, which are tested
    assert FAMILIES.keys() == known_projections().keys() - extended


# All of them in every family, and fewer where projections have other names.
OTHER_NAMES = ("vit", "sparseprior_iformer", "sparseprior_timesformer", "timesformer", "videomae")
TARGETS = [
    *((family, "attention+mlp") for family in FAMILIES),
    *((family, targets) for family in OTHER_NAMES for targets in ("query+value", "attention")),
]


@pytest.mark.parametrize(("family", "targets"), TARGETS)
def test_what_is_adapted_and_saved_in_each_family(family, targets):
    model, classifiers = FAMILIES[family][0](), FAMILIES[family][4]
    assert model.config.model_type == family
    path = FAMILIES[family][1]
    decayed = {"sparseprior_convit": [1]}.get(family, [0, 1] if family.startswith("sparseprior_") else [])
    scalars = [f"{path.format(i)}.decay_bias" for i in decayed]
    buffers = {f"base_model.model.{name}" for name, _ in model.named_buffers()}
    leaves = ("weight", "bias")
    if family == "sparseprior_iformer":  # whose classifier has a batch norm, with statistics
        norm = (*leaves, "running_mean", "running_var", "num_batches_tracked")
        leaves = (*(f"norm.{leaf}" for leaf in norm), "linear.weight", "linear.bias")
    whole = {f"{name}.{leaf}" for name in classifiers for leaf in leaves}
    whole |= {f"{name}.{leaf}" for name in scalars for leaf in ("alpha", "beta")}
    adapted = peft.get_peft_model(model, lora_config(model, rank=2, targets=targets))
    prefix, names = "base_model.model.", expected_targets(family, targets)
    saved = {f"{prefix}{name}.lora_{half}.weight" for name in names for half in "AB"} | {prefix + n for n in whole}
    assert set(peft.get_peft_model_state_dict(adapted)) == saved
    # What is saved is what is trained, tensor for tensor.
    plain = {n.replace(".default", "").replace(".modules_to_save", "") for n in trainable(adapted)}
    assert plain == saved - buffers and len(trainable(adapted)) == len(plain)


# VIOLIN Table 4: ~0.3 M and ~0.6 M.
@pytest.mark.parametrize(("use_dora", "rank", "count"), [(False, None, 294_912), (True, 16, 608_256)])
def test_parameter_counts_on_deit_base(use_dora, rank, count):
    with torch.device("meta"):
        base = SparsePriorViTForImageClassification(SparsePriorViTConfig.from_preset("deit_base", num_labels=10))
        model = peft.get_peft_model(base, lora_config(base, rank=rank, use_dora=use_dora))
    assert sum(p.numel() for name, p in model.named_parameters() if "lora_" in name) == count


def test_alpha_follows_the_rank():
    model = ours()
    assert (lora_config(model).r, lora_config(model).lora_alpha) == (8, 8)
    config = lora_config(model, rank=4, alpha=12, dropout=0.1, use_dora=True, bias="lora_only")
    assert (config.r, config.lora_alpha, config.lora_dropout, config.use_dora) == (4, 12, 0.1, True)
    assert config.bias == "lora_only"


@pytest.mark.parametrize("use_dora", [False, True])
def test_training_changes_what_is_trained_and_merging_changes_nothing(use_dora, tmp_path):
    # With the class token only its row of the last layer counts, and there M is 1: that layer's beta has no gradient.
    base = ours(pooling="mean", use_distillation_token=True, position_embedding_for_class_token=True, num_labels=2)
    model = peft.get_peft_model(copy.deepcopy(base), lora_config(base, rank=2, use_dora=use_dora))
    torch.testing.assert_close(model(images()).logits, base(images()).logits, rtol=1e-5, atol=1e-5)
    before = copy.deepcopy(model.state_dict())
    train(model, 3)  # in the first step the gradient of A is 0, because B is
    moved = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert moved == trainable(model) and any("distillation_classifier" in name for name in moved)
    model.eval().save_pretrained(tmp_path)
    expected = model(images()).logits
    # The decay and the classifier of this base are drawn anew, because the adapter brings its own.
    torch.manual_seed(7)
    other = copy.deepcopy(base)
    for module in (other.classifier, other.distillation_classifier):
        module.reset_parameters()
    for layer in other.vit.layers:
        layer.attention.decay_bias.reset_parameters()
    again = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    assert again(images()).logits.equal(expected)
    merged = again.merge_and_unload()
    assert merged.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(merged(images()).logits, expected, rtol=0, atol=1e-5)


WITHOUT_WEIGHTS = ("evit", "tome")


@pytest.mark.parametrize(
    ("prior", "name"),
    [*((name, name) for name in EXTRAS if name not in WITHOUT_WEIGHTS), ("linformer", "mixer")],
)
def test_extras_and_mixers_are_trained_saved_and_merged(prior, name, tmp_path):
    base = ours(prior=prior, pooling="mean")
    assert lora_config(base).modules_to_save == ["classifier", name]
    model = peft.get_peft_model(copy.deepcopy(base), lora_config(base, rank=2))
    train(model, 3)
    model.eval().save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    with torch.no_grad():
        assert again(images()).logits.equal(model(images()).logits)
    before, after = base.state_dict(), again.merge_and_unload().state_dict()
    own = [key for key in before if f".{name}." in key]
    assert own and [key for key in own if after[key].equal(before[key])] == []


def test_fixed_gammas_are_saved_although_they_are_not_trained(tmp_path):
    base = ours(prior={"decay": {"name": "violin", "learn_beta": False}})
    peft.get_peft_model(copy.deepcopy(base), lora_config(base)).save_pretrained(tmp_path)
    other = copy.deepcopy(base)
    for layer in other.vit.layers:
        layer.attention.decay_bias.reset_parameters()
    again = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    assert again(images()).logits.equal(base.eval()(images()).logits)


def test_a_second_adapter_beside_the_first():
    model = ours()
    model = peft.get_peft_model(model, lora_config(model, rank=2))
    model.add_adapter("second", lora_config(model, rank=3, targets="attention"))
    assert len(model.peft_config["second"].target_modules) == 8
    model.set_adapter("second")
    assert all("second" in name for name in trainable(model)) and len(trainable(model)) == 16 + 6


def test_listed_targets_and_further_modules():
    model = ours()
    config = lora_config(model, targets=["layers.0.mlp.fc1", "o_proj"], modules_to_save=["vit.layernorm"])
    expected = {"vit.layers.0.mlp.fc1", *(f"vit.layers.{i}.attention.o_proj" for i in range(2))}
    assert set(config.target_modules) == expected
    assert config.modules_to_save == ["classifier", "decay_bias", "vit.layernorm"]
    assert lora_config(SparsePriorViTModel(SparsePriorViTConfig(**SMALL))).modules_to_save is None
    assert lora_config(model, r=4) == lora_config(model, rank=4)  # peft's name


@each(
    "options, message",
    [
        ({"rank": 0}, "rank=0 must be an integer of 1 or more"),
        ({"rank": 2.5}, "rank=2.5 must be an integer"),
        ({"r": 0}, "rank=0 must be an integer of 1 or more"),
        ({"r": 4, "rank": 4}, "rank=4 and r=4 are two names of one setting"),
        ({"alpha": 0}, "alpha=0 must be a number above 0"),
        ({"alpha": float("nan")}, "alpha=nan must be a number above 0"),
        ({"dropout": 1}, r"dropout=1 must be in \[0, 1\)"),
        ({"targets": "mlp"}, "targets='mlp' must be one of query.value, attention, attention.mlp, or a list"),
        ({"targets": []}, r"targets=\[\] must be one of"),
        ({"targets": ["query"]}, "SparsePriorViTForImageClassification has no module 'query'"),
        ({"modules_to_save": ["position_embeddings"]}, "'position_embeddings' is a parameter"),
        ({"modules_to_save": ["head"]}, "has no module 'head'"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        lora_config(ours(), **options)


def test_an_unknown_family_needs_a_list():
    model = stock("ASTModel", "ASTConfig")()
    with pytest.raises(ValueError, match="'audio-spectrogram-transformer' are not known, only"):
        lora_config(model)
    assert lora_config(model, targets=["fc1"]).target_modules


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'hf_sparseprior\[peft\]'"):
        lora_config(ours())


def test_a_model_with_an_adapter_saves_the_adapter_alone(tmp_path):
    """`add_adapter` of transformers, as for stock models: no code, no card, no image processor of the base model."""
    peft = import_fitting_peft()
    config = SparsePriorViTConfig(**SMALL_CONFIGS["sparseprior_vit"])
    model = SparsePriorViTForImageClassification(config)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    files = {file.name for file in (tmp_path / "adapter").iterdir()} - {"README.md"}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    model.delete_adapter("default")
    base = SparsePriorViTForImageClassification(config)
    base.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "modeling_sparseprior_vit.py").is_file()


def test_the_encoder_within_a_head_or_a_chat_model_is_adapted():
    """A language model's layers have projections of the same names."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    images = {"image_size": 32, "patch_size": 4}
    head = make_head("upernet", SparsePriorViTConfig(**sizes, **images), num_labels=3)
    chat = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**sizes, **images),
            text_config=transformers.LlamaConfig(**{**sizes, "num_key_value_heads": 4}, vocab_size=80, pad_token_id=0),
        )
    )
    for model, encoder in ((head, "backbone."), (chat, "model.vision_tower.")):
        targets = lora_config(model).target_modules
        assert len(targets) == 2 * 4 and all(target.startswith(encoder) for target in targets)
    assert lora_config(head, modules_to_save=["decode_head"]).modules_to_save == ["classifier", "decode_head"]
