"""What holds for every extra of the layers in a model: it starts where it changes nothing, is saved, and learns."""

from itertools import cycle

import pytest
import torch
from torch import nn

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.base.extras import EXTRAS
from tests.hf_sparseprior.small import noise

EXTRA = {"attention": "relative_position", "MLP": "locality"}  # the part of a layer that has it, by its place
NAMES = [name for name, extra in EXTRAS.items() if extra.place in EXTRA]
SETTINGS = [
    *({"name": name} for name in NAMES),
    {"name": "swin_rpb", "learn_prefix": True},
    {"name": "irpe_qkv", "method": "euclidean", "ratio": 1.2},
    {"name": "irpe_qk", "ratio": 1.0},
    {"name": "localvit", "kernel_size": 5},
    {"name": "localvit", "squeeze_excitation": 2},
]


def tiny(prior, **settings):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    settings = {**sizes, "image_size": 24, "patch_size": 4, "num_labels": 3, **settings}
    torch.manual_seed(0)
    return SparsePriorViTForImageClassification(SparsePriorViTConfig(prior=prior, **settings)).eval()


def is_extra(name):
    return any(f".{part}." in name for part in EXTRA.values())


def moved(prior, **settings):
    """A model whose extras are away from their start."""
    model = tiny(prior, **settings)
    for name, parameter in model.named_parameters():
        if is_extra(name):
            nn.init.normal_(parameter, std=0.3)
    return model


def images(height=24, width=24):
    return noise(2, 3, height, width)


@pytest.mark.parametrize(("settings", "base_prior"), zip(SETTINGS, cycle(["dense", "fibottention", "violin"])), ids=str)
def test_a_pretrained_model_starts_as_itself(settings, base_prior):
    base = tiny(base_prior)
    slots = {"decay": "violin"} if base_prior == "violin" else {"support": base_prior}
    model = tiny({**slots, "extras": [settings]})
    missing = model.load_state_dict(base.state_dict(), strict=False).missing_keys
    assert missing and all(map(is_extra, missing))
    with torch.no_grad():
        for size in ((24, 24), (32, 20)):
            assert (model(images(*size)).logits - base(images(*size)).logits).abs().max() < 1e-5


def test_weights_of_a_dense_model_get_zeros(tmp_path):
    base = tiny("dense")
    base.save_pretrained(tmp_path)
    model = SparsePriorViTForImageClassification.from_pretrained(tmp_path, prior="swin_rpb+irpe_qkv").eval()
    own = [parameter for name, parameter in model.named_parameters() if is_extra(name)]
    assert len(own) == 8 and all((parameter == 0).all() for parameter in own)
    torch.testing.assert_close(model(images()).logits, base(images()).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name):
    model = moved(f"violin+{name}").to(torch.bfloat16)
    logits = model(images().to(torch.bfloat16)).logits
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), moved(f"violin+{name}")(images()).logits, rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    ("prior", "preset", "parameters"),
    [
        ("swin_rpb", "deit_base", 104_976),  # VIOLIN Table 7: ~105K
        ({"extras": [{"name": "swin_rpb", "learn_prefix": True}]}, "deit_base", 104_976 + 12 * 12 * 3),
        ("irpe_k", "deit_base", 38_400),
        ("irpe_qk", "deit_base", 76_800),
        ("irpe_qkv", "deit_base", 115_200),  # VIOLIN Table 7: ~115K
        ("violin+irpe_k", "deit_tiny", 12 * 50 * 64),
        ("transformer_xl", "deit_base", 12 * (768**2 + 2 * 768)),
        ("transformer_xl", "deit_small", 12 * (384**2 + 2 * 384)),
        ("localvit", "deit_base", 12 * (3072 * 9 + 1)),  # VIOLIN Table 7 has ~6.2M and does not say of what
        ({"extras": [{"name": "localvit", "squeeze_excitation": 16}]}, "deit_base", 1_548_300),
    ],
    ids=str,
)
def test_parameter_counts(prior, preset, parameters):
    with torch.device("meta"):
        model = SparsePriorViTForImageClassification(SparsePriorViTConfig.from_preset(preset, prior=prior))
    assert sum(parameter.numel() for name, parameter in model.named_parameters() if is_extra(name)) == parameters


def test_what_gets_no_weight_decay():
    names = tiny("swin_rpb+irpe_qkv+transformer_xl").no_weight_decay()
    own = sorted(name.split("relative_position.")[1] for name in names if "layers.0.attention.relative" in name)
    assert own == ["swin_rpb.bias_table", "transformer_xl.content_bias", "transformer_xl.position_bias"]


@pytest.mark.slow
def test_compiled_whole():
    torch.compiler.reset()
    model = moved("violin+irpe_qkv+swin_rpb+transformer_xl", num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in ((24, 24), (16, 24)):
        torch.testing.assert_close(compiled(images(*size)).logits, model(images(*size)).logits, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()
