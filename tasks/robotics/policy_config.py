"""What a policy is made of, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_sparseprior.base.checks import check_finite
from hf_sparseprior.base.families import Family
from hf_sparseprior.base.limits import check_limit, check_size
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair
from hf_sparseprior.runs.models import section_family
from tasks.robotics.diffusion import SAMPLERS


@dataclass
class PolicyConfig:
    """What a policy is made of.

    observations: {key: shape}: (height, width, 3) for a camera as it is recorded, (D,) for anything else.
    privileged: keys of observations, no images, that are for training alone: it has to give them back from the U-Net's
        middle features, as the others. The policy does not see them, and needs none of them to act.
    action_size: A.
    observation_steps: how many observations it sees. horizon: how many actions it plans. action_steps: how many of them
        it executes, from the action that belongs to the last observation on.
    image_size: pixels that images are scaled to first; null: as they are recorded.
    crop: pixels of the window that the encoders see, at a random place in training and in the centre otherwise; null:
        everything.
    encoder: fields of the config of its `family` (SparsePriorViT), and `preset`. The image size is the crop's, cut down
        to whole patches. Every camera has an encoder like this.
    widths, kernel_size, groups, step_embedding_size: as `ConditionalUNet1D` takes them.
    reconstruction_weight: weight of each observation's mean squared error in the loss; 0: nothing is decoded.
    reconstruction_size: pixels of decoded images; null: image_size.
    decoder_width, decoder_positions: channels of the image decoder and of the positions it is given.
    noise_levels: steps of the diffusion in training.
    sampler, sampling_steps: how actions are drawn, see `diffusion.sampler`.
    """

    observations: dict[str, Sequence[int]] = field(default_factory=dict)
    privileged: Sequence[str] = ()
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
            check_size(f"policy.{name}", getattr(self, name), 1, "width")
        for name in ("image_size", "crop", "reconstruction_size", "sampling_steps"):
            if getattr(self, name) is not None:
                check_size(f"policy.{name}", getattr(self, name), 1, "width")
        if not isinstance(self.observations, Mapping):
            raise ValueError(f"policy.observations={self.observations!r} must be keys with their shapes")
        if not isinstance(self.widths, (list, tuple)) or not self.widths:
            raise ValueError(f"policy.widths={self.widths!r} must be a list of channels")
        for key, shape in self.observations.items():
            if not isinstance(shape, (list, tuple)):
                raise ValueError(f"policy.observations: {key}={shape!r} must be [size] or [height, width, 3]")
        for name, values in (("widths", self.widths), *self.observations.items()):
            for value in values:
                check_size(f"policy.{name}", value, 1, "width")
        self.widths = list(self.widths)
        self.observations = {key: list(shape) for key, shape in self.observations.items()}
        if not self.observations:
            raise ValueError("policy.observations is empty; name the observations with their shapes")
        self._check_privileged()
        if self.observation_steps - 1 + self.action_steps > self.horizon:
            raise ValueError(
                f"policy.horizon={self.horizon} must hold observation_steps={self.observation_steps} - 1 and "
                f"action_steps={self.action_steps}"
            )
        check_finite("policy.reconstruction_weight", self.reconstruction_weight)
        if self.sampler not in SAMPLERS:
            raise ValueError(f"policy.sampler={self.sampler!r} must be one of {', '.join(SAMPLERS)}")
        if self.sampling_steps is not None and self.sampling_steps > self.noise_levels:
            raise ValueError(
                f"policy.sampling_steps={self.sampling_steps} must be at most noise_levels={self.noise_levels}"
            )
        self._check_unet()
        self._check_images()

    def _check_privileged(self) -> None:
        if not isinstance(self.privileged, (list, tuple)):
            raise ValueError(f"policy.privileged={self.privileged!r} must be a list of keys")
        self.privileged = list(self.privileged)
        for key in self.privileged:
            if key not in self.observations or len(self.observations[key]) != 1:
                known = [name for name, shape in self.observations.items() if len(shape) == 1]
                raise ValueError(
                    f"policy.privileged: {key!r} must be one of {', '.join(known)}, observations without images"
                )
        if self.privileged and not self.reconstruction_weight:
            raise ValueError(f"policy.privileged={self.privileged} needs reconstruction_weight above 0")
        if not self.seen:
            raise ValueError(f"policy.privileged={self.privileged} leaves the policy nothing to see")

    def _check_unet(self) -> None:
        convolutions = sum(a * b for a, b in zip([self.action_size, *self.widths], self.widths, strict=False))
        check_limit(
            "weights",
            self.kernel_size * convolutions,
            f"policy.widths={self.widths} with kernel_size={self.kernel_size} give {self.kernel_size * convolutions} "
            "weights, which must be",
        )
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
    def seen(self) -> dict[str, Sequence[int]]:
        """The observations that the policy sees, with their shapes."""
        return {key: shape for key, shape in self.observations.items() if key not in self.privileged}

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

    @property
    def encoder_family(self) -> Family:
        """The family of the encoders."""
        return section_family(self.encoder, "encoder")

    def encoder_config(self, key: str) -> Any:
        """Configuration of this camera's encoder, which checks itself.

        Raises:
            ValueError: for bad fields.
        """
        options = {name: value for name, value in self.encoder.items() if name not in ("family", "preset")}
        size = (self.crop, self.crop) if self.crop is not None else self.image_shape(key)
        if "image_size" in options:
            raise ValueError(f"encoder.image_size={options['image_size']!r} is policy.crop's; leave it out")
        options = {"patch_size": 8, "num_labels": 0, **options}
        # A strided convolution drops what does not fill a patch, so 76 pixels are 9x9 patches of 8.
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
        config = self.encoder_family.make_config(self.encoder.get("preset"), **options)
        if config.num_channels != 3:
            raise ValueError(f"encoder.num_channels={config.num_channels} must be 3, the channels of a camera's images")
        return config
