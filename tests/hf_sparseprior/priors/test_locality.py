"""LocalViT's convolution in the MLP."""

import pytest
import torch
from torch import nn

from hf_sparseprior import SparsePriorViTForImageClassification
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.priors.locality import LocalityBranch
from tests.hf_sparseprior.priors.test_every_extra import images, moved, tiny

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
