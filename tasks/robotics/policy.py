"""Crossway Diffusion (Li et al. 2024, design A) with SparsePriorViT encoders: a policy that denoises action sequences.

Every camera has its own SparsePriorViT from scratch; its class token, beside the other normalised observations, is the
condition of the U-Net. In training the U-Net's middle features also have to give the observations back.

Shape letters: B batch, O observation steps, T horizon, A action size, D size of an observation, F features a step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import CONFIG_NAME

from hf_sparseprior import SparsePriorViTConfig, SparsePriorViTModel
from hf_sparseprior.configuration_sparseprior_vit import as_pair
from hf_sparseprior.files import file_sha256, whole_folder, write_text
from hf_sparseprior.pretrained import load_whole_model
from tasks.robotics.diffusion import SAMPLERS, denoise, noise_scheduler, sampler
from tasks.robotics.normalizer import ACTIONS, Normalizer
from tasks.robotics.unet import ConditionalUNet1D

POLICY_FILE = "policy.json"
WEIGHTS_FILE = "policy.safetensors"
ENCODERS = "encoders"
FORMAT = 1


@dataclass
class PolicyConfig:
    """What a policy is made of.

    observations: {key: shape}, (height, width, 3) of a camera as it is recorded, (D,) of anything else.
    action_size: A.
    observation_steps, horizon, action_steps: how many observations it sees, actions it plans, and of them executes,
        from the one that belongs to the last observation on.
    image_size: pixels that images are scaled to first; null: as they are recorded.
    crop: pixels of the window that the encoders see, at random in training, in the centre else; null: everything.
    encoder: fields of SparsePriorViTConfig and `preset`; the image size is the crop's, without what is left of it right
        of and below whole patches. Every camera has one like this.
    widths, kernel_size, groups, step_embedding_size: of the U-Net.
    reconstruction_weight: of each observation's mean squared error in the loss; 0: nothing is decoded.
    reconstruction_size: pixels of decoded images; null: image_size.
    decoder_width, decoder_positions: channels of the image decoder and of the positions it is given.
    noise_levels: of the diffusion.
    sampler, sampling_steps: how actions are drawn, see `diffusion.sampler`.
    """

    observations: dict[str, Sequence[int]] = field(default_factory=dict)
    action_size: int = 10
    observation_steps: int = 2
    horizon: int = 16
    action_steps: int = 8
    image_size: int | None = None
    crop: int | None = None
    encoder: dict[str, Any] = field(default_factory=dict)
    widths: Sequence[int] = (512, 1024, 2048)
    kernel_size: int = 5
    groups: int = 8
    step_embedding_size: int = 128
    reconstruction_weight: float = 0.1
    reconstruction_size: int | None = None
    decoder_width: int = 128
    decoder_positions: int = 64
    noise_levels: int = 100
    sampler: str = "ddpm"
    sampling_steps: int | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        counts = ("action_size", "observation_steps", "horizon", "action_steps", "kernel_size", "groups")
        for name in (*counts, "decoder_width", "noise_levels", "decoder_positions", "step_embedding_size"):
            _check_count(name, getattr(self, name))
        for name in ("image_size", "crop", "reconstruction_size", "sampling_steps"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if not isinstance(self.observations, Mapping):
            raise ValueError(f"policy.observations={self.observations!r} must be keys with their shapes")
        if not isinstance(self.widths, (list, tuple)) or not self.widths:
            raise ValueError(f"policy.widths={self.widths!r} must be a list of channels")
        for key, shape in self.observations.items():
            if not isinstance(shape, (list, tuple)):
                raise ValueError(f"policy.observations: {key}={shape!r} must be [size] or [height, width, 3]")
        for name, values in (("widths", self.widths), *self.observations.items()):
            for value in values:
                _check_count(name, value)
        self.widths = list(self.widths)
        self.observations = {key: list(shape) for key, shape in self.observations.items()}
        if not self.observations:
            raise ValueError("policy.observations is empty; name the observations with their shapes")
        if self.observation_steps - 1 + self.action_steps > self.horizon:
            raise ValueError(
                f"policy.horizon={self.horizon} must hold observation_steps={self.observation_steps} - 1 and "
                f"action_steps={self.action_steps}"
            )
        weight = self.reconstruction_weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise ValueError(f"policy.reconstruction_weight={weight!r} must be a number of 0 or more")
        if self.sampler not in SAMPLERS:
            raise ValueError(f"policy.sampler={self.sampler!r} must be one of {', '.join(SAMPLERS)}")
        if self.sampling_steps is not None and self.sampling_steps > self.noise_levels:
            raise ValueError(
                f"policy.sampling_steps={self.sampling_steps} must be at most noise_levels={self.noise_levels}"
            )
        self._check_unet()
        self._check_images()

    def _check_unet(self) -> None:
        if any(width % self.groups for width in self.widths):
            raise ValueError(f"policy.widths={self.widths} must be multiples of groups={self.groups}")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"policy.kernel_size={self.kernel_size} must be odd")
        if self.step_embedding_size < 4 or self.step_embedding_size % 2:
            raise ValueError(f"policy.step_embedding_size={self.step_embedding_size} must be even and 4 or more")
        factor = 2 ** (len(self.widths) - 1)
        if self.horizon % factor:
            raise ValueError(
                f"policy.horizon={self.horizon} must be a multiple of {factor}, by which {len(self.widths)} widths "
                "divide it"
            )

    def _check_images(self) -> None:
        for key, shape in self.observations.items():
            if len(shape) not in (1, 3) or (len(shape) == 3 and shape[2] != 3):
                raise ValueError(f"policy.observations: {key}={shape} must be [size] or [height, width, 3]")
        for key in self.cameras:
            size = self.image_shape(key)
            if self.crop is not None and self.crop > min(size):
                raise ValueError(f"policy.crop={self.crop} must be at most the {size[0]}x{size[1]} pixels of {key}")
        if self.reconstruction_weight and self.widths[-1] % (4 * self.observation_steps):
            raise ValueError(
                f"policy.widths={self.widths}: the last must be a multiple of 4 * observation_steps="
                f"{4 * self.observation_steps}, which its features are spread over to be decoded"
            )
        if self.cameras and self.reconstruction_weight:
            if self.decoder_width % self.groups:
                raise ValueError(
                    f"policy.decoder_width={self.decoder_width} must be a multiple of groups={self.groups}"
                )
            if self.decoder_positions % 4:
                raise ValueError(f"policy.decoder_positions={self.decoder_positions!r} must be a multiple of 4")
            if any(side % 2 for key in self.cameras for side in self.decoded_shape(key)):
                raise ValueError("policy.reconstruction_size: decoded images must have even sides")

    @property
    def cameras(self) -> list[str]:
        """Keys of images."""
        return [key for key, shape in self.observations.items() if len(shape) == 3]

    @property
    def states(self) -> list[str]:
        """Keys of everything else."""
        return [key for key, shape in self.observations.items() if len(shape) == 1]

    def image_shape(self, key: str) -> tuple[int, int]:
        """(height, width) that images of this camera are scaled to."""
        if self.image_size is not None:
            return self.image_size, self.image_size
        return self.observations[key][0], self.observations[key][1]

    def decoded_shape(self, key: str) -> tuple[int, int]:
        """(height, width) of decoded images of this camera."""
        size = self.reconstruction_size
        return self.image_shape(key) if size is None else (size, size)

    def encoder_config(self, key: str) -> SparsePriorViTConfig:
        """Configuration of this camera's encoder, which checks itself.

        Raises:
            ValueError: for bad fields.
        """
        options = dict(self.encoder)
        preset = options.pop("preset", None)
        size = (self.crop, self.crop) if self.crop is not None else self.image_shape(key)
        if "image_size" in options:
            raise ValueError(f"encoder.image_size={options['image_size']!r} is policy.crop's; leave it out")
        options = {"patch_size": 8, "num_labels": 0, **options}
        # A strided convolution drops what does not fill a patch: 76 pixels are 9x9 patches of 8.
        patch = options["patch_size"]
        sides = patch if isinstance(patch, (list, tuple)) and len(patch) == 2 else [patch]
        if any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
            raise ValueError(f"encoder.patch_size={patch!r} must be an integer of 1 or more, or two of them")
        patch = as_pair(patch)
        if any(step > side for side, step in zip(size, patch, strict=True)):
            raise ValueError(
                f"encoder.patch_size={list(patch)} must be at most the {size[0]}x{size[1]} pixels of {key}"
            )
        options["image_size"] = [side - side % step for side, step in zip(size, patch, strict=True)]
        return SparsePriorViTConfig.from_preset(preset, **options) if preset else SparsePriorViTConfig(**options)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"policy.{name}={value!r} must be an integer of 1 or more")


def scaled_images(images: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 (..., height, width, 3) to uint8 of this (height, width), antialiased; the same for data and simulator."""
    if tuple(images.shape[-3:-1]) == size:
        return images
    flat = images.reshape(-1, *images.shape[-3:]).permute(0, 3, 1, 2).float()
    flat = F.interpolate(flat, size=size, mode="bilinear", antialias=True)
    return flat.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).reshape(*images.shape[:-3], *size, 3)


def cropped(images: Tensor, size: int, random: bool) -> Tensor:
    """Square windows of images (B, C, height, width): anywhere, for each image another one, or in the centre."""
    spare = torch.tensor([images.shape[2] - size, images.shape[3] - size])
    if not random:
        top, left = (spare // 2).tolist()
        return images[:, :, top : top + size, left : left + size]
    # torch's generator of the CPU on every device, so that a seed means the same windows.
    corners = (torch.rand(len(images), 2) * (spare + 1)).long().to(images.device)
    offsets = torch.arange(size, device=images.device)
    rows = (corners[:, :1] + offsets)[:, None, :, None]
    columns = (corners[:, 1:] + offsets)[:, None, None, :]
    batch = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return images[batch, channels, rows, columns]


class ImageDecoder(nn.Module):
    """An image of 2x2 features: tiled to half the size, positions beside them, two residual blocks, doubled."""

    def __init__(self, channels: int, config: PolicyConfig, size: tuple[int, int]) -> None:
        super().__init__()
        self.coarse, self.positions = (size[0] // 2, size[1] // 2), config.decoder_positions
        width, kernel, groups = config.decoder_width, config.kernel_size, config.groups
        self.blocks = nn.Sequential(
            ImageBlock(channels + self.positions, width, kernel, groups), ImageBlock(width, width, kernel, groups)
        )
        self.upsample = nn.ConvTranspose2d(width, width, 4, stride=2, padding=1)
        self.head = nn.Sequential(_image_convolution(width, width, kernel, groups), nn.Conv2d(width, 3, 1))

    def forward(self, features: Tensor) -> Tensor:
        """(B, channels, 2, 2) to (B, 3, height, width)."""
        height, width = self.coarse
        tiled = features.repeat(1, 1, math.ceil(height / 2), math.ceil(width / 2))[:, :, :height, :width]
        positions = image_positions(height, width, self.positions).to(tiled)
        x = torch.cat([tiled, positions.expand(len(tiled), -1, -1, -1)], 1)
        return self.head(self.upsample(self.blocks(x)))


class ImageBlock(nn.Module):
    """Two convolutions with GroupNorm and Mish, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _image_convolution(inputs, outputs, kernel_size, groups),
            _image_convolution(outputs, outputs, kernel_size, groups),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, height, width) to (B, outputs, height, width)."""
        return self.layers(x) + self.shortcut(x)


def _image_convolution(inputs: int, outputs: int, kernel_size: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2), nn.GroupNorm(groups, outputs), nn.Mish()
    )


def image_positions(height: int, width: int, channels: int) -> Tensor:
    """(channels, height, width): sine and cosine of 2^i pi y and 2^i pi x, y and x in [-1, 1]."""
    grid = torch.stack(
        torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    )  # (2, height, width)
    frequencies = math.pi * 2.0 ** torch.arange(channels // 4)
    phases = (frequencies[:, None, None, None] * grid).flatten(0, 1)
    return torch.cat([phases.sin(), phases.cos()])


class CrosswayPolicy(nn.Module):
    """The policy; in training a loss, in evaluation actions.

    Args:
        config: what it is made of.
        normalizer: of actions and of the observations that are no images.

    Attributes:
        about: what a saved policy was kept with, e.g. the settings of its environment.

    Raises:
        ValueError: for a configuration whose parts do not fit together.
    """

    def __init__(self, config: PolicyConfig, normalizer: Normalizer) -> None:
        super().__init__()
        self.config = config
        self.normalizer = normalizer
        self.about: dict[str, Any] = {}
        self.scheduler = noise_scheduler(config.noise_levels)
        self.encoders = nn.ModuleDict({key: SparsePriorViTModel(config.encoder_config(key)) for key in config.cameras})
        features = sum(encoder.config.pooled_size for encoder in self.encoders.values())
        features += sum(config.observations[key][0] for key in config.states)
        self.unet = ConditionalUNet1D(
            config.action_size,
            config.observation_steps * features,
            config.widths,
            config.kernel_size,
            config.groups,
            config.step_embedding_size,
        )
        self.decoders = nn.ModuleDict()
        if config.reconstruction_weight:
            per_step = config.widths[-1] // config.observation_steps
            for key in config.cameras:
                self.decoders[key] = ImageDecoder(per_step // 4, config, config.decoded_shape(key))
            for key in config.states:
                size = config.observations[key][0]
                self.decoders[key] = nn.Sequential(
                    *(nn.Linear(per_step, 4 * size), nn.Mish()),
                    *(nn.Linear(4 * size, 2 * size), nn.Mish()),
                    nn.Linear(2 * size, size),
                )

    # ---- observations -----------------------------------------------------------------------------------------------

    def normalized(self, observations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Observations of every key, steps as further samples.

        Args:
            observations: images uint8 (B, O, height, width, 3), as recorded or scaled already, others (B, O, D).

        Returns:
            Images (B * O, 3, height, width) and others (B * O, D), in about [-1, 1].
        """
        result = {}
        for key in self.config.observations:
            if key not in observations:
                raise ValueError(f"observation {key!r} is missing; given: {', '.join(observations)}")
            values = observations[key].flatten(0, 1)
            if key in self.config.cameras:
                config = self.encoders[key].config
                values = scaled_images(values, self.config.image_shape(key)).permute(0, 3, 1, 2).float() / 255
                mean, std = (
                    torch.tensor(v, device=values.device).view(1, 3, 1, 1)
                    for v in (config.image_mean, config.image_std)
                )
                result[key] = (values - mean) / std
            else:
                result[key] = self.normalizer(key, values.float())
        return result

    def encode(self, normalized: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Condition of the U-Net (B, O * F), and the losses that a prior adds in training."""
        features, losses = [], {}
        for key in self.config.observations:
            values = normalized[key]
            if key in self.encoders:
                if self.config.crop is not None:
                    values = cropped(values, self.config.crop, random=self.training)
                height, width = self.encoders[key].config.image_size
                output = self.encoders[key](values[:, :, :height, :width])
                for name, loss in (output.auxiliary_losses or {}).items():
                    losses[f"{key}_{name}"] = loss
                values = output.pooler_output
            features.append(values)
        return torch.cat(features, 1).unflatten(0, (-1, self.config.observation_steps)).flatten(1), losses

    # ---- training ---------------------------------------------------------------------------------------------------

    def forward(
        self,
        observations: Mapping[str, Tensor],
        actions: Tensor,
        noise: Tensor | None = None,
        steps: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Losses.

        Args:
            observations: as in `normalized`.
            actions: (B, T, A), not normalised.
            noise: (B, T, A); None: drawn.
            steps: int64 (B,), diffusion steps; None: drawn.

        Returns:
            "diffusion", the mean squared error of the noise, one entry for each observation (its mean squared error on
            normalised values) and each loss of a prior, and "loss", what is minimised.
        """
        clean = self.normalizer(ACTIONS, actions)
        noise = torch.randn_like(clean) if noise is None else noise
        if steps is None:
            steps = torch.randint(0, self.config.noise_levels, (len(clean),), device=clean.device)
        normalized = self.normalized(observations)
        condition, losses = self.encode(normalized)
        predicted, middle = self.unet(self.scheduler.add_noise(clean, noise, steps), steps, condition)
        diffusion = F.mse_loss(predicted, noise)
        total = diffusion
        for loss in losses.values():
            total = total + loss
        for key, decoded in self.decode(middle).items():
            losses[key] = F.mse_loss(decoded, self.targets(key, normalized[key]))
            total = total + self.config.reconstruction_weight * losses[key]
        return {"loss": total, "diffusion": diffusion, **losses}

    def decode(self, middle: Tensor) -> dict[str, Tensor]:
        """Observations from the U-Net's middle features (B, C, T'): its first time index, split over the steps."""
        if not self.decoders:
            return {}
        features = middle[:, :, 0].unflatten(1, (self.config.observation_steps, -1)).flatten(0, 1)
        return {
            key: decoder(features.unflatten(1, (-1, 2, 2)) if key in self.config.cameras else features)
            for key, decoder in self.decoders.items()
        }

    def targets(self, key: str, normalized: Tensor) -> Tensor:
        """What the decoder of this key has to give: whole images, not their crops."""
        if key not in self.config.cameras or tuple(normalized.shape[2:]) == self.config.decoded_shape(key):
            return normalized
        size = self.config.decoded_shape(key)
        return F.interpolate(normalized, size=size, mode="bilinear", antialias=True)

    # ---- acting -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def plan(self, observations: Mapping[str, Tensor], generator: torch.Generator | None = None) -> Tensor:
        """Actions (B, T, A) for the whole horizon.

        Args:
            observations: as in `normalized`.
            generator: of the CPU; the same state gives the same actions.
        """
        condition, _ = self.encode(self.normalized(observations))
        size = (len(condition), self.config.horizon, self.config.action_size)
        start = torch.randn(size, generator=generator).to(condition)
        clean = denoise(
            lambda actions, steps: self.unet(actions, steps, condition)[0],
            start,
            sampler(self.scheduler, self.config.sampler, self.config.sampling_steps),
            generator,
        )
        return self.normalizer.undo(ACTIONS, clean)

    def act(self, observations: Mapping[str, np.ndarray], generator: torch.Generator | None = None) -> np.ndarray:
        """Actions (action_steps, A) to execute now, from the last observations {key: (O, ...)} of one episode."""
        if self.training:
            raise ValueError("a policy acts in evaluation mode; call eval() first")
        device = self.normalizer.get_buffer(f"centre_{ACTIONS}").device
        batch = {
            key: torch.from_numpy(np.ascontiguousarray(value))[None].to(device) for key, value in observations.items()
        }
        first = self.config.observation_steps - 1
        return self.plan(batch, generator)[0, first : first + self.config.action_steps].cpu().numpy()

    # ---- folders ----------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, about: Mapping[str, Any] | None = None) -> None:
        """Write a folder that `from_pretrained` reads: policy.json, policy.safetensors, and a SparsePriorViT folder
        for each camera in encoders/.

        Args:
            folder: must not exist; it is written whole or not at all.
            about: kept in policy.json, e.g. the settings of the environment that the policy was trained for.
        """
        with whole_folder(folder) as scratch:
            for key, encoder in self.encoders.items():
                encoder.save_pretrained(scratch / ENCODERS / key)
            weights = {name: value.contiguous() for name, value in self.state_dict().items() if _own(name)}
            save_file(weights, scratch / WEIGHTS_FILE)
            content = {
                "format": FORMAT,
                "policy": asdict(self.config),
                "normalizer": self.normalizer.to_dict(),
                "about": dict(about or {}),
            }
            write_text(scratch / POLICY_FILE, json.dumps(content, indent=1) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> CrosswayPolicy:
        """A saved policy, in evaluation mode; what was kept with it is `about`.

        Raises:
            OSError: for a folder that is none, lacks weights or is damaged, naming the file.
        """
        folder = Path(folder)
        content = read_policy_file(folder)
        try:
            config = PolicyConfig(**content["policy"])
            normalizer = Normalizer(**content["normalizer"])
            policy = cls(config, normalizer)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError(f"{folder / POLICY_FILE} is damaged: {error}") from error
        sizes = {key: config.observations[key][0] for key in config.states} | {ACTIONS: config.action_size}
        if {key: len(low) for key, (low, _) in normalizer.bounds.items()} != sizes:
            raise OSError(f"{folder / POLICY_FILE} is damaged: its normalizer must have {sizes}, numbers by key")
        for key in config.cameras:
            source = folder / ENCODERS / key
            if not (source / CONFIG_NAME).is_file():
                raise OSError(f"{source / CONFIG_NAME} is missing, of the encoder of {key}")
            policy.encoders[key] = load_whole_model(source, SparsePriorViTModel)
        try:
            weights = load_file(folder / WEIGHTS_FILE)
        except (SafetensorError, FileNotFoundError) as error:
            raise OSError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
        expected = {name: value.shape for name, value in policy.state_dict().items() if _own(name)}
        if {name: value.shape for name, value in weights.items()} != expected:
            raise OSError(f"{folder / WEIGHTS_FILE} does not fit {POLICY_FILE} beside it")
        policy.load_state_dict(weights, strict=False)
        policy.about = content["about"]
        return policy.eval()


def read_policy_file(folder: str | Path) -> dict[str, Any]:
    """policy.json of a saved policy: format, policy, normalizer, about."""
    path = Path(folder) / POLICY_FILE
    if not path.is_file():
        raise OSError(f"{folder} is not a folder of a saved policy: {POLICY_FILE} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise OSError(f"{path} has format {content['format']!r}; this version reads {FORMAT}")
        known = {item.name for item in fields(PolicyConfig)}
        if unknown := set(content["policy"]) - known:
            raise OSError(f"{path} has unknown fields: {', '.join(sorted(unknown))}")
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{path} is damaged: {error}") from error
    if missing := [key for key in ("policy", "normalizer", "about") if not isinstance(content.get(key), dict)]:
        raise OSError(f"{path} is damaged: {missing[0]!r} must be an object with keys and values")
    return content


def _own(name: str) -> bool:
    """Whether a weight lies in policy.safetensors, neither in an encoder's folder nor (normalizer) in policy.json."""
    return not name.startswith(("encoders.", "normalizer."))


def policy_sha256(folder: str | Path) -> dict[str, str]:
    """SHA-256 of every weights file of a saved policy."""
    folder = Path(folder)
    return {str(path.relative_to(folder)): file_sha256(path) for path in sorted(folder.rglob("*.safetensors"))}
