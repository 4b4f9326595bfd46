"""Crossway Diffusion (Li et al. 2024, design A) with SparsePriorViT encoders: a policy that denoises action sequences.

Every camera has its own SparsePriorViT from scratch. Its class token and the other normalised observations are the
condition of the U-Net. In training the U-Net's middle features also have to give the observations back.

Shape letters: B batch, O observation steps, T horizon, A action size, D size of an observation, F features a step.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import CONFIG_NAME

from hf_sparseprior.base.files import file_sha256, whole_folder, write_text
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair
from hf_sparseprior.models.pretrained import hub_hint, load_whole_model
from tasks.robotics.diffusion import Generators, denoise, first_noise, noise_scheduler, sampler
from tasks.robotics.image_decoder import ImageDecoder
from tasks.robotics.normalizer import ACTIONS, Normalizer
from tasks.robotics.policy_config import PolicyConfig
from tasks.robotics.unet import ConditionalUNet1D

POLICY_FILE = "policy.json"
WEIGHTS_FILE = "policy.safetensors"
ENCODERS = "encoders"
FORMAT = 1


def scaled_images(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale uint8 (..., height, width, 3) to this (height, width), antialiased. Data and simulator both use it."""
    if tuple(images.shape[-3:-1]) == size:
        return images
    flat = images.reshape(-1, *images.shape[-3:]).permute(0, 3, 1, 2).float()
    flat = F.interpolate(flat, size=size, mode="bilinear", antialias=True)
    return flat.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).reshape(*images.shape[:-3], *size, 3)


def cropped(images: Tensor, size: int, random: bool, places: Tensor | None = None) -> Tensor:
    """Square windows of images (B, C, height, width): at a random place for each image, or in the centre.

    Args:
        images: the images.
        size: side of the windows, pixels.
        random: whether places are random.
        places: (B, 2) in [0, 1), from top and left; None: drawn.
    """
    spare = torch.tensor([images.shape[2] - size, images.shape[3] - size])
    if not random:
        top, left = (spare // 2).tolist()
        return images[:, :, top : top + size, left : left + size]
    # torch's generator of the CPU for every device, so that a seed gives the same windows.
    places = torch.rand(len(images), 2) if places is None else places
    corners = (places * (spare + 1)).long().to(images.device)
    offsets = torch.arange(size, device=images.device)
    rows = (corners[:, :1] + offsets)[:, None, :, None]
    columns = (corners[:, 1:] + offsets)[:, None, None, :]
    batch = torch.arange(len(images), device=images.device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return images[batch, channels, rows, columns]


class CrosswayPolicy(nn.Module):
    """The policy. In training it gives a loss, in evaluation actions.

    Args:
        config: what it is made of.
        normalizer: scales actions and the observations that are no images.

    Attributes:
        about: what was saved with the policy, for example the settings of its environment.

    Raises:
        ValueError: for a configuration whose parts do not fit together.
    """

    def __init__(self, config: PolicyConfig, normalizer: Normalizer) -> None:
        super().__init__()
        self.config = config
        self.normalizer = normalizer
        self.about: dict[str, Any] = {}
        self.reset()
        self.scheduler = noise_scheduler(config.noise_levels)
        self.encoders = nn.ModuleDict(
            {key: config.encoder_family.base(config.encoder_config(key)) for key in config.cameras}
        )
        features = sum(self.encoder(key).config.pooled_size for key in config.cameras)
        features += sum(config.observations[key][0] for key in config.states if key in config.seen)
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

    def encoder(self, key: str) -> Any:
        """The encoder of a camera's images."""
        return self.encoders[key]

    # ---- observations -----------------------------------------------------------------------------------------------

    def normalized(self, observations: Mapping[str, Tensor], keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Observations of these keys (all), normalised, with the steps in the batch dimension.

        Args:
            observations: images uint8 (B, O, height, width, 3), as recorded or already scaled; others (B, O, D).
            keys: of the configuration's.

        Returns:
            Images (B * O, 3, height, width) and others (B * O, D), in about [-1, 1].
        """
        result = {}
        for key in self.config.observations if keys is None else keys:
            if key not in observations:
                raise ValueError(f"observation {key!r} is missing; given: {', '.join(observations)}")
            values = observations[key].flatten(0, 1)
            if key in self.config.cameras:
                config = self.encoder(key).config
                values = scaled_images(values, self.config.image_shape(key)).permute(0, 3, 1, 2).float() / 255
                mean, std = (
                    torch.tensor(v, device=values.device).view(1, 3, 1, 1)
                    for v in (config.image_mean, config.image_std)
                )
                result[key] = (values - mean) / std
            else:
                result[key] = self.normalizer(key, values.float())
        return result

    def encode(
        self, normalized: Mapping[str, Tensor], crops: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Condition of the U-Net (B, O * F), and the losses that a prior adds in training.

        Args:
            normalized: as `normalized` gives them.
            crops: `places` of `cropped` for each camera, in training; None: drawn.
        """
        features, losses = [], {}
        for key in self.config.seen:
            values = normalized[key]
            if key in self.encoders:
                if self.config.crop is not None:
                    values = cropped(values, self.config.crop, self.training, (crops or {}).get(key))
                height, width = as_pair(self.encoder(key).config.image_size)
                output = self.encoder(key)(values[:, :, :height, :width])
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
        crops: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Losses.

        Args:
            observations: as in `normalized`.
            actions: (B, T, A), not normalised.
            noise: (B, T, A); None: drawn.
            steps: int64 (B,), diffusion steps; None: drawn.
            crops: as in `encode`.

        Returns:
            "diffusion", the mean squared error of the noise, one entry for each observation (its mean squared error on
            normalised values) and each loss of a prior, and "loss", what is minimised.
        """
        clean = self.normalizer(ACTIONS, actions)
        noise = torch.randn_like(clean) if noise is None else noise
        if steps is None:
            steps = torch.randint(0, self.config.noise_levels, (len(clean),), device=clean.device)
        normalized = self.normalized(observations)
        condition, losses = self.encode(normalized, crops)
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
        """Observations from the U-Net's middle features (B, C, T'), of which the first time index is split over the
        steps.
        """
        if not self.decoders:
            return {}
        features = middle[:, :, 0].unflatten(1, (self.config.observation_steps, -1)).flatten(0, 1)
        return {
            key: decoder(features.unflatten(1, (-1, 2, 2)) if key in self.config.cameras else features)
            for key, decoder in self.decoders.items()
        }

    def targets(self, key: str, normalized: Tensor) -> Tensor:
        """The decoder's target for this key: whole images, not their crops."""
        if key not in self.config.cameras or tuple(normalized.shape[2:]) == self.config.decoded_shape(key):
            return normalized
        size = self.config.decoded_shape(key)
        return F.interpolate(normalized, size=size, mode="bilinear", antialias=True)

    # ---- acting -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def plan(self, observations: Mapping[str, Tensor], generator: Generators = None) -> Tensor:
        """Actions (B, T, A) for the whole horizon.

        Args:
            observations: as in `normalized`.
            generator: a generator of the CPU, or B of them; the same state gives the same actions. Of B generators each
                draws what it would draw for its episode alone.

        Raises:
            ValueError: for another number of generators than B.
        """
        condition, _ = self.encode(self.normalized(observations, self.config.seen))
        size = (len(condition), self.config.horizon, self.config.action_size)
        clean = denoise(
            lambda actions, steps: self.unet(actions, steps, condition)[0],
            first_noise(size, generator).to(condition),
            sampler(self.scheduler, self.config.sampler, self.config.sampling_steps),
            generator,
        )
        return self.normalizer.undo(ACTIONS, clean)

    def act(self, observations: Mapping[str, np.ndarray], generator: torch.Generator | None = None) -> np.ndarray:
        """Actions (action_steps, A) to execute now, from the last observations {key: (O, ...)} of one episode."""
        batch = {key: value[None] for key, value in observations.items()}
        return self.predict_action(batch, generator)["action"][0].cpu().numpy()

    def predict_action(
        self, obs_dict: Mapping[str, Tensor | np.ndarray], generator: Generators = None
    ) -> dict[str, Tensor]:
        """What Diffusion Policy's policies return under this name.

        Args:
            obs_dict: the last observations of B episodes, {key: (B, O, ...)}, as in `normalized`.
            generator: as in `plan`.

        Returns:
            "action" (B, action_steps, A), to be executed now, and "action_pred" (B, T, A), the whole plan.
        """
        if self.training:
            raise ValueError("a policy acts in evaluation mode; call eval() first")
        device = self.normalizer.get_buffer(f"centre_{ACTIONS}").device
        batch = {
            key: torch.as_tensor(np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value).to(device)
            for key, value in obs_dict.items()
            if key in self.config.seen
        }
        plan = self.plan(batch, generator)
        first = self.config.observation_steps - 1
        return {"action": plan[:, first : first + self.config.action_steps], "action_pred": plan}

    def reset(self) -> None:
        """Forget the observations that were seen and the actions that are planned: new episodes begin."""
        self._seen: deque[dict[str, Tensor]] = deque(maxlen=self.config.observation_steps)
        self._planned: deque[Tensor] = deque()

    def predict_action_chunk(self, batch: Mapping[str, Tensor | np.ndarray], generator: Generators = None) -> Tensor:
        """Actions (B, action_steps, A) to execute now, from these and the remembered observations, as in lerobot.

        Args:
            batch: the newest observations of B episodes, {key: (B, ...)}, images uint8 (B, height, width, 3); other
                keys are ignored. Before the first one, it is repeated.
            generator: as in `plan`.

        Raises:
            ValueError: for observations that are missing or of another shape, and another B than before.
        """
        self._remember(batch)
        stacked = {key: torch.stack([step[key] for step in self._seen], 1) for key in self.config.seen}
        return self.predict_action(stacked, generator)["action"]

    def select_action(self, batch: Mapping[str, Tensor | np.ndarray], generator: Generators = None) -> Tensor:
        """The next action (B, A) of B episodes that go on side by side, as in lerobot.

        It plans when no planned action is left, and otherwise only remembers what it is shown. Call `reset` when
        episodes begin, and this once for each step.

        Args, raises: as `predict_action_chunk`.
        """
        if self._planned:
            self._remember(batch)
        else:
            self._planned.extend(self.predict_action_chunk(batch, generator).unbind(1))
        return self._planned.popleft()

    def _remember(self, batch: Mapping[str, Tensor | np.ndarray]) -> None:
        newest, episodes = {}, None
        for key, shape in self.config.seen.items():
            if key not in batch:
                raise ValueError(f"observation {key!r} is missing; given: {', '.join(batch)}")
            value = torch.as_tensor(batch[key])
            wanted = tuple(value.shape[:1]) if episodes is None else (episodes,)
            if value.shape[1:] != torch.Size(shape) or tuple(value.shape[:1]) != wanted:
                said = "B" if episodes is None else episodes
                raise ValueError(f"observation {key!r} has shape {list(value.shape)}, not {[said, *shape]}")
            newest[key], episodes = value, len(value)
        before = len(next(iter(self._seen[-1].values()))) if self._seen else episodes
        if episodes != before:
            raise ValueError(f"observations of {episodes} episodes after those of {before}; call reset() between them")
        # A simulator may write its next observation into the same memory.
        newest = {key: value.clone() for key, value in newest.items()}
        self._seen.extend([newest] * (1 if self._seen else self.config.observation_steps))

    # ---- folders ----------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, about: Mapping[str, Any] | None = None) -> None:
        """Write a folder that `from_pretrained` reads: policy.json, policy.safetensors, and a SparsePriorViT folder
        for each camera in encoders/.

        Args:
            folder: must not exist; it is written whole or not at all.
            about: kept in policy.json, for example the settings of the environment that the policy was trained for.
        """
        with whole_folder(folder) as scratch:
            for key in self.encoders:
                self.encoder(key).save_pretrained(scratch / ENCODERS / key)
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
        """A saved policy, in evaluation mode. What was saved with it is its `about`.

        Raises:
            OSError: for a folder that holds no policy, lacks weights or is damaged; the message names the file.
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
            policy.encoders[key] = load_whole_model(source, config.encoder_family.base)
        try:
            weights = load_file(folder / WEIGHTS_FILE)
        except (SafetensorError, FileNotFoundError) as error:
            raise OSError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
        expected = {name: value.shape for name, value in policy.state_dict().items() if _own(name)}
        if {name: value.shape for name, value in weights.items()} != expected:
            raise OSError(f"{folder / WEIGHTS_FILE} does not fit {POLICY_FILE} next to it")
        policy.load_state_dict(weights, strict=False)
        policy.about = content["about"]
        return policy.eval()


def read_policy_file(folder: str | Path) -> dict[str, Any]:
    """policy.json of a saved policy: format, policy, normalizer, about."""
    path = Path(folder) / POLICY_FILE
    if not path.is_file():
        raise OSError(f"{folder} is not a folder of a saved policy: {POLICY_FILE} is missing{hub_hint(folder)}")
    try:
        content = read_json(path, RECORD_BYTES, finite=False)
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
    """Whether a weight is in policy.safetensors. Others are in an encoder's folder or (normalizer) in policy.json."""
    return not name.startswith(("encoders.", "normalizer."))


def policy_sha256(folder: str | Path) -> dict[str, str]:
    """SHA-256 of every weights file of a saved policy."""
    folder = Path(folder)
    return {str(path.relative_to(folder)): file_sha256(path) for path in sorted(folder.rglob("*.safetensors"))}
