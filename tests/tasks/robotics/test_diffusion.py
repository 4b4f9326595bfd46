"""The schedule and both samplers against their formulas in float64."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="the robotics extra is not installed")

from tasks.robotics.diffusion import denoise, noise_scheduler, sampler

LEVELS = 100


def signal_shares() -> np.ndarray:
    """Products of 1 - beta of the cosine schedule (Nichol and Dhariwal 2021, equation 17, betas at most 0.999)."""

    def f(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - f((i + 1) / LEVELS) / f(i / LEVELS), 0.999) for i in range(LEVELS)]
    return np.cumprod(1 - np.array(betas))


def test_noise_is_added_as_the_cosine_schedule_says():
    clean, noise = torch.randn(LEVELS, 16, 3, generator=torch.Generator().manual_seed(0)), torch.ones(LEVELS, 16, 3)
    noisy = noise_scheduler(LEVELS).add_noise(clean, noise, torch.arange(LEVELS))
    shares = signal_shares()[:, None, None]
    expected = np.sqrt(shares) * clean.double().numpy() + np.sqrt(1 - shares)
    assert np.abs(noisy.numpy() - expected).max() < 1e-5


@pytest.mark.parametrize("name", ["ddpm", "ddim"])
def test_samplers_follow_their_formulas(name):
    """With a network that is a plain function: DDPM (Ho et al. 2020, equations 6 and 7) and DDIM (Song et al. 2021,
    equation 12 without noise), the clean estimate clipped to [-1, 1].
    """
    start = torch.randn(4, 16, 2, generator=torch.Generator().manual_seed(3))

    def predict(x, step):
        return 0.4 * x + 0.1 * (step / LEVELS).view(-1, 1, 1)

    drawn = denoise(predict, start, sampler(noise_scheduler(LEVELS), name), torch.Generator().manual_seed(5))
    shares = signal_shares()
    generator, x = torch.Generator().manual_seed(5), start.double().numpy()
    for step in reversed(range(LEVELS)):
        share, before = shares[step], shares[step - 1] if step else 1.0
        noise = 0.4 * x + 0.1 * step / LEVELS
        clean = np.clip((x - np.sqrt(1 - share) * noise) / np.sqrt(share), -1, 1)
        if name == "ddim":
            x = np.sqrt(before) * clean + np.sqrt(1 - before) * noise
            continue
        alpha = share / before
        x = (np.sqrt(before) * (1 - alpha) * clean + np.sqrt(alpha) * (1 - before) * x) / (1 - share)
        if step:
            variance = (1 - before) / (1 - share) * (1 - alpha)
            x = x + np.sqrt(variance) * torch.randn(start.shape, generator=generator).double().numpy()
    assert np.abs(drawn.numpy() - x).max() < 2e-4


def test_ddim_finds_a_known_point_in_few_steps():
    """The exact noise of a single clean point leads back to it, also in steps of ten levels."""
    point = torch.tensor([0.3, -0.7, 0.9])
    shares = torch.tensor(signal_shares(), dtype=torch.float32)

    def predict(x, step):
        share = shares[step].view(-1, 1, 1)
        return (x - share.sqrt() * point) / (1 - share).sqrt()

    drawn = denoise(predict, torch.randn(2, 16, 3), sampler(noise_scheduler(LEVELS), "ddim", 10))
    assert (drawn - point).abs().max() < 1e-3


def test_bad_samplers_are_refused():
    with pytest.raises(ValueError, match="'euler' must be one of ddpm, ddim"):
        sampler(noise_scheduler(LEVELS), "euler")
    with pytest.raises(ValueError, match="101 must be an integer from 1 to the 100"):
        sampler(noise_scheduler(LEVELS), "ddim", 101)
