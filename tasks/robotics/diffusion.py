"""Noise schedule and sampling of action sequences (Ho et al. 2020, DDPM; Song et al. 2021, DDIM), by diffusers.

The schedule is the cosine of Nichol and Dhariwal 2021 ("squaredcos_cap_v2"). The network predicts the noise. Every
estimate of the clean sequence is clipped to [-1, 1], where normalised actions lie (Chi et al. 2023, Diffusion Policy).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SAMPLERS = ("ddpm", "ddim")
# None: torch's own of the CPU.
Generators = torch.Generator | Sequence[torch.Generator] | None


def noise_scheduler(steps: int = 100) -> Any:
    """diffusers' DDPMScheduler of this many noise levels, which adds noise in training.

    Raises:
        ImportError: if diffusers is missing; the message has the line that installs it.
    """
    return _schedulers()["ddpm"](
        num_train_timesteps=steps,
        beta_schedule="squaredcos_cap_v2",
        prediction_type="epsilon",
        variance_type="fixed_small",
        clip_sample=True,
    )


def sampler(scheduler: Any, name: str = "ddpm", steps: int | None = None) -> Any:
    """The scheduler that removes the noise again, with the same noise levels, ready for `denoise`.

    Args:
        scheduler: as `noise_scheduler` makes it.
        name: "ddpm" (noise is drawn at every step) or "ddim" (only the start is drawn), which needs fewer steps.
        steps: evaluations of the network, at most as many as noise levels; None: as many.

    Raises:
        ValueError: for another name or number.
    """
    levels = scheduler.config.num_train_timesteps
    steps = levels if steps is None else steps
    if name not in SAMPLERS:
        raise ValueError(f"sampler={name!r} must be one of {', '.join(SAMPLERS)}")
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= levels:
        raise ValueError(f"sampling_steps={steps!r} must be an integer from 1 to the {levels} noise levels")
    # A new one, because a scheduler holds the state of one sampling.
    reverse = _schedulers()[name].from_config(scheduler.config)
    reverse.set_timesteps(steps)
    return reverse


def first_noise(size: tuple[int, ...], generator: Generators) -> Tensor:
    """Standard normal noise on the CPU; with B generators each draws one sample.

    Raises:
        ValueError: for another number of generators than samples.
    """
    if not isinstance(generator, Sequence):
        return torch.randn(size, generator=generator)
    if len(generator) != size[0]:
        raise ValueError(f"{len(generator)} generators for {size[0]} episodes; give one for each")
    return torch.cat([torch.randn(1, *size[1:], generator=each) for each in generator])


def denoise(
    predict: Callable[[Tensor, Tensor], Tensor],
    start: Tensor,
    reverse: Any,
    generator: Generators = None,
) -> Tensor:
    """Samples from noise.

    Args:
        predict: (samples (B, ...), time step int64 (B,)) -> the noise in them, (B, ...).
        start: standard normal noise (B, ...).
        reverse: as `sampler` makes it.
        generator: draws the noise of "ddpm"; of B generators each that of its sample.

    Returns:
        (B, ...), clean samples.
    """
    samples = start
    drawn_by = list(generator) if isinstance(generator, Sequence) else generator  # diffusers knows lists alone
    for step in reverse.timesteps:
        noise = predict(samples, step.to(start.device).expand(len(start)))
        samples = reverse.step(noise, step, samples, generator=drawn_by).prev_sample
    return samples


def _schedulers() -> dict[str, Any]:
    try:
        from diffusers.schedulers.scheduling_ddim import DDIMScheduler
        from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
    except ImportError as error:
        raise ImportError("diffusion policies need diffusers: pip install 'hf_sparseprior[robotics]'") from error
    return {"ddpm": DDPMScheduler, "ddim": DDIMScheduler}
