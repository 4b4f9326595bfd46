"""LocalViT's convolution in the MLP."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTForImageClassification
from hf_sparseprior.base.extras import EXTRAS
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.priors.locality import LocalityBranch
from tests.processes import run_script

GRID = (3, 4)
SETTINGS = [{}, {"kernel_size": 5}, {"squeeze_excitation": 2}]


def branch(seed=0, channels=6, **settings):
    torch.manual_seed(seed)
    made = LocalityBranch(channels, **{**LocalityBranch.SETTINGS, **settings}).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def hidden(prefix, channels=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, prefix + 12, channels, generator=generator, dtype=torch.float64)


def by_hand(made, x, prefix):
    # hidden + gate * hardswish(sum over the neighbours), channel by channel; outside the image there are zeros.
    def hardsigmoid(value):
        return min(max(value / 6 + 0.5, 0.0), 1.0)

    out = x.clone()
    reach = made.kernel.shape[-1] // 2
    for b in range(x.shape[0]):
        local = torch.zeros(12, x.shape[2], dtype=torch.float64)
        for channel in range(x.shape[2]):
            for row in range(GRID[0]):
                for column in range(GRID[1]):
                    total = 0.0
                    for dr in range(-reach, reach + 1):
                        for dc in range(-reach, reach + 1):
                            r, c = row + dr, column + dc
                            if 0 <= r < GRID[0] and 0 <= c < GRID[1]:
                                weight = made.kernel[channel, 0, dr + reach, dc + reach]
                                total += (weight * x[b, prefix + r * GRID[1] + c, channel]).item()
                    local[row * GRID[1] + column, channel] = total * hardsigmoid(total)
        if made.squeeze is not None:
            squeezed = (made.squeeze @ local.mean(0)).clamp(min=0)
            excited = made.excite @ squeezed + made.excite_bias
            local = local * torch.tensor([hardsigmoid(value) for value in excited.tolist()], dtype=torch.float64)
        out[b, prefix:] += made.gate * local
    return out


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_branch_is_its_definition(settings, prefix):
    made, x = branch(**settings), hidden(prefix)
    with torch.no_grad():
        torch.testing.assert_close(made(x, GRID, prefix), by_hand(made, x, prefix), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_starts_with_gate_zero_and_an_identity_kernel(settings):
    made = LocalityBranch(4, **{**LocalityBranch.SETTINGS, **settings})
    x = torch.randn(2, 13, 4)
    assert torch.equal(made(x, GRID, 1), x)
    with torch.no_grad():
        made.gate.fill_(1.0)
        middle = nn.functional.hardswish(x[:, 1:])
        if made.squeeze is not None:
            middle = middle / 2  # an excitation of zero opens halfway
        torch.testing.assert_close(made(x, GRID, 1)[:, 1:], x[:, 1:] + middle)


@pytest.mark.parametrize("settings", SETTINGS)
def test_gradient_reaches_every_parameter(settings):
    made = branch(channels=4, **settings)
    made(hidden(1, 4), GRID, 1).square().sum().backward()
    for name, parameter in made.named_parameters():
        assert (parameter.grad != 0).any(), name
    fresh = LocalityBranch(4, **{**LocalityBranch.SETTINGS, **settings}).double()
    fresh(hidden(1, 4), GRID, 1).square().sum().backward()
    assert fresh.gate.grad != 0  # from there on, the others follow


def tiny(prior="localvit", **settings):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    settings = {**sizes, "image_size": 24, "patch_size": 4, "num_labels": 3, **settings}
    torch.manual_seed(0)
    return SparsePriorViTForImageClassification(SparsePriorViTConfig(prior=prior, **settings)).eval()


def moved(prior):
    model = tiny(prior)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_position" in name or "locality" in name:
                nn.init.normal_(parameter, std=0.2)
    return model


def images(height=24, width=24):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("base_prior", ["dense", "fibottention", "violin"])
def test_a_pretrained_model_starts_as_itself(base_prior):
    base, model = tiny(base_prior), tiny(f"{base_prior}+localvit")
    missing = model.load_state_dict(base.state_dict(), strict=False).missing_keys
    assert len(missing) == 4 and all("mlp.locality.localvit" in name for name in missing)
    with torch.no_grad():
        for size in ((24, 24), (32, 20)):
            assert torch.equal(model(images(*size)).logits, base(images(*size)).logits)


# VIOLIN Table 7 has ~6.2M and does not say of what.
@pytest.mark.parametrize(
    ("settings", "parameters"), [({}, 12 * (3072 * 9 + 1)), ({"squeeze_excitation": 16}, 1_548_300)]
)
def test_parameters_of_deit_b(settings, parameters):
    prior = {"extras": [{"name": "localvit", **settings}]}
    with torch.device("meta"):
        model = SparsePriorViTForImageClassification(SparsePriorViTConfig.from_preset("deit_base", prior=prior))
    assert sum(p.numel() for name, p in model.named_parameters() if "locality" in name) == parameters


def test_a_converted_model_takes_extras_and_keeps_them(tmp_path):
    base = tiny("dense")
    base.save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "local", prior="localvit+swin_rpb")
    model = SparsePriorViTForImageClassification.from_pretrained(tmp_path / "local").eval()
    torch.testing.assert_close(model(images()).logits, base(images()).logits, rtol=0, atol=1e-6)
    trained = moved("localvit+swin_rpb")
    trained.save_pretrained(tmp_path / "trained")
    convert_checkpoint(tmp_path / "trained", tmp_path / "again")
    again = SparsePriorViTForImageClassification.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(images()).logits, trained(images()).logits)
    with pytest.raises(ValueError, match=r"prior 'swin_rpb\+localvit|prior 'localvit\+swin_rpb' has no place in vit"):
        convert_checkpoint(tmp_path / "trained", tmp_path / "vit", to="vit")


REMOTE = """
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("model", trust_remote_code=True)
logits = model(load_file("pixels.safetensors")["pixels"]).logits
save_file({"logits": logits.detach().contiguous()}, "logits.safetensors")
"""


@pytest.mark.slow
def test_every_extra_of_the_layers_runs_without_the_package(tmp_path):
    decay = {"name": "learned_order", "placement": "multiply_after"}
    model = moved({"decay": decay, "extras": [name for name in EXTRAS if EXTRAS[name].place != "model"]})
    model.save_pretrained(tmp_path / "model")
    save_file({"pixels": images()}, tmp_path / "pixels.safetensors")
    run_script(REMOTE, folder=tmp_path)
    with torch.no_grad():
        assert torch.equal(load_file(tmp_path / "logits.safetensors")["logits"], model(images()).logits)
