"""The denoising network: shapes, FiLM, time, sizes."""

import math

import pytest
import torch
from torch.nn import functional as F

from tasks.robotics.unet import ConditionalUNet1D, ResidualBlock, StepEmbedding


def test_step_embedding_is_sines_and_cosines():
    embedding, seen = StepEmbedding(8), []
    embedding.layers.register_forward_pre_hook(lambda layers, given: seen.append(given[0]))
    embedding(torch.tensor([7]))
    phases = [7 / 10000 ** (i / 3) for i in range(4)]
    expected = torch.tensor([[*map(math.sin, phases), *map(math.cos, phases)]])
    assert torch.allclose(seen[0], expected, atol=1e-6)


def test_residual_block_scales_and_shifts_between_its_convolutions():
    torch.manual_seed(0)
    block = ResidualBlock(3, 8, condition_size=5, kernel_size=5, groups=4).double()
    x, condition = torch.randn(2, 3, 16).double(), torch.randn(2, 5).double()

    def convolve(layers, x):
        x = F.conv1d(F.pad(x, (2, 2)), layers[0].weight, layers[0].bias)
        grouped = x.reshape(2, 4, 2 * 16)
        deviation = grouped.var(2, unbiased=False, keepdim=True) + 1e-5
        x = ((grouped - grouped.mean(2, keepdim=True)) / deviation.sqrt()).reshape(x.shape)
        x = x * layers[1].weight[:, None] + layers[1].bias[:, None]
        return x * torch.tanh(torch.log1p(x.exp()))

    mish = condition * torch.tanh(torch.log1p(condition.exp()))
    film = mish @ block.film[1].weight.T + block.film[1].bias
    hidden = film[:, :8, None] * convolve(block.first, x) + film[:, 8:, None]
    expected = convolve(block.second, hidden) + F.conv1d(x, block.shortcut.weight, block.shortcut.bias)
    assert torch.allclose(block(x, condition), expected, atol=1e-10)


@pytest.mark.parametrize(("widths", "middle"), [([8, 16, 32], (32, 4)), ([8, 16], (16, 8)), ([16], (16, 16))])
def test_noise_has_the_shape_of_the_actions(widths, middle):
    unet = ConditionalUNet1D(3, 5, widths, kernel_size=3, groups=4, step_embedding_size=8)
    noise, features = unet(torch.randn(2, 16, 3), torch.tensor([0, 99]), torch.randn(2, 5))
    assert noise.shape == (2, 16, 3)
    assert features.shape == (2, *middle)


def test_condition_step_and_every_action_count():
    torch.manual_seed(0)
    unet = ConditionalUNet1D(2, 3, [8, 16, 32], kernel_size=5, groups=4, step_embedding_size=8)
    actions, steps, condition = torch.randn(1, 16, 2, requires_grad=True), torch.tensor([10]), torch.randn(1, 3)
    noise, _ = unet(actions, steps, condition)
    assert not torch.allclose(noise, unet(actions, steps, condition + 1)[0])
    assert not torch.allclose(noise, unet(actions, steps + 50, condition)[0])
    noise[0, 0, 0].backward()
    assert (actions.grad != 0).all()
    assert all(parameter.grad is not None for parameter in unet.parameters())


def test_the_published_network_has_its_size():
    """Counted by hand: widths 512, 1024, 2048, kernel 5, condition 128 + 2 * 137 (Crossway's Lift)."""
    actions, condition, kernel = 10, 128 + 2 * 137, 5

    def convolution(inputs, outputs, size):
        return inputs * outputs * size + outputs

    def block(inputs, outputs):
        first, second = convolution(inputs, outputs, kernel), convolution(outputs, outputs, kernel)
        film = (condition + 1) * 2 * outputs
        shortcut = convolution(inputs, outputs, 1) if inputs != outputs else 0
        return first + second + 2 * 2 * outputs + film + shortcut

    embedding = 128 * 512 + 512 + 512 * 128 + 128
    down = sum(block(i, o) + block(o, o) for i, o in ((actions, 512), (512, 1024), (1024, 2048)))
    middle = 2 * block(2048, 2048)
    up = block(4096, 1024) + block(1024, 1024) + block(2048, 512) + block(512, 512)
    resampling = sum(convolution(w, w, 3) + convolution(w, w, 4) for w in (512, 1024))
    head = convolution(512, 512, kernel) + 2 * 512 + convolution(512, actions, 1)
    with torch.device("meta"):
        unet = ConditionalUNet1D(actions, 2 * 137)
    counted = sum(parameter.numel() for parameter in unet.parameters())
    assert counted == embedding + down + middle + up + resampling + head


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"widths=\[8, 12\] must be multiples of groups=8"):
        ConditionalUNet1D(2, 3, [8, 12])
    with pytest.raises(ValueError, match="kernel_size=4 must be odd"):
        ConditionalUNet1D(2, 3, [8, 16], kernel_size=4)
    with pytest.raises(ValueError, match="horizon=10 must be a multiple of 4"):
        ConditionalUNet1D(2, 3, [8, 16, 32])(torch.randn(1, 10, 2), torch.tensor([0]), torch.randn(1, 3))
