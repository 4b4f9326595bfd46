"""Configuration of a robotics run: YAML with `base:` inheritance and key=value overrides, as in classification.

data: {...}       fields of DataConfig
policy: {...}     fields of PolicyConfig, without `encoder`
encoder: {...}    fields of the family's config (SparsePriorViTConfig), `family`, `preset`, and `pretrained`, a folder
                  that every encoder starts from
trainer: {...}    fields of TrainerConfig
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_sparseprior.base.checks import check_finite, check_integer
from hf_sparseprior.runs.config import apply_overrides, check_known, check_text, read_layers
from hf_sparseprior.runs.run_folder import default_output_dir
from hf_sparseprior.training.finite import STOP, check_setting
from tasks.robotics.commands import TEST_SEED
from tasks.robotics.policy_config import PolicyConfig

SECTIONS = ("data", "policy", "encoder", "trainer")
VALIDATION_SEED = 50_000  # seeds from here on are for the choice of a checkpoint


@dataclass
class DataConfig:
    """Where demonstrations come from.

    path: HDF5 file in robomimic's layout or zarr folder in Diffusion Policy's.
    episodes: use this many of the file's training episodes, from the first on; null: all.
    floor: smallest range, in its own unit, that a dimension is taken to have when it is scaled to [-1, 1].
    floors: other floors for some keys ("actions" or an observation), a number or one for each dimension. Rotations and
        grippers lie in [-1, 1] already: null leaves them as they are; with a floor of 2 they keep their scale however
        little they move, and their middle becomes 0.
    """

    path: str = ""
    episodes: int | None = None
    floor: float = 0.02
    floors: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the fields."""
        if not isinstance(self.path, str) or not self.path:
            raise ValueError(f"data.path={self.path!r} must name a file of demonstrations")
        if self.episodes is not None:
            check_integer("data.episodes", self.episodes, 1)
        check_finite("data.floor", self.floor, zero=False)
        if not isinstance(self.floors, dict):
            raise ValueError(f"data.floors={self.floors!r} must hold keys and numbers")
        for key, values in self.floors.items():
            for value in values if isinstance(values, list) else [values]:
                if value is not None:
                    check_finite(f"data.floors: {key}", value, zero=False)


@dataclass
class TrainerConfig:
    """How it is trained. The defaults are Diffusion Policy's values.

    output_dir: where the run lies.
    seed: seeds the weights, the order of windows, noise and crops.
    steps: updates of the weights; null: 3,000, unless `epochs` says how many.
    epochs: passes over the windows, in place of `steps`.
    batch_size: windows an update, of all processes together.
    learning_rate, warmup_steps: cosine per step down to 0 after a linear warm-up.
    betas, weight_decay: as AdamW has them.
    max_grad_norm: gradients are clipped to it; null: they are not.
    ema_power, ema_decay: the weights' moving average has decay min(ema_decay, 1 - (step - 1)^-ema_power) at update
        `step`, counted from 1; 0 in the first two.
    mixed_precision: "no", "bf16" or "fp16", accelerate's.
    log_steps: updates between two entries of the log.
    validate_steps: updates between two validations: of the loss and, with validation_episodes, in the simulator;
        null: at the end only.
    validation_batches: batches of which the validation loss is the mean.
    validation_episodes: rollouts on validation seeds that choose the saved policy; 0: the last step's is saved.
    test_episodes: rollouts on the seeds of evaluation when the policy is trained, as `evaluate` plays them; 0: none.
    test_steps: actions after which such an episode has failed; null: the environment's horizon.
    test_seed: seed of the first such episode, TEST_SEED or more; null: TEST_SEED. `evaluate` begins with it, too.
    save_steps: updates between two checkpoints; null: as validate_steps, or 500.
    nonfinite_loss: at a loss or weights that are not finite, "stop" before anything is saved, or "continue".
    disable_tqdm: no progress line.
    """

    output_dir: str = ""
    seed: int = 0
    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 64
    learning_rate: float = 1e-4
    warmup_steps: int = 500
    betas: Sequence[float] = (0.95, 0.999)
    weight_decay: float = 1e-6
    max_grad_norm: float | None = None
    ema_power: float = 0.75
    ema_decay: float = 0.9999
    mixed_precision: str = "no"
    log_steps: int = 50
    validate_steps: int | None = None
    validation_batches: int = 4
    validation_episodes: int = 0
    test_episodes: int = 0
    test_steps: int | None = None
    test_seed: int | None = None
    save_steps: int | None = None
    nonfinite_loss: str = STOP
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        check_text("trainer.output_dir", self.output_dir)
        check_setting("trainer.nonfinite_loss", self.nonfinite_loss)
        for name in ("seed", "warmup_steps", "validation_episodes", "test_episodes"):
            check_integer(f"trainer.{name}", getattr(self, name), 0)
        counts = ("steps", "epochs", "batch_size", "log_steps", "validation_batches", "validate_steps", "save_steps")
        for name in (*counts, "test_steps"):
            if getattr(self, name) is not None:
                check_integer(f"trainer.{name}", getattr(self, name), 1)
        if self.test_seed is not None:
            # Demonstrations and the choice of a checkpoint have the seeds below.
            check_integer("trainer.test_seed", self.test_seed, TEST_SEED)
        for name in ("learning_rate", "ema_power"):
            check_finite(f"trainer.{name}", getattr(self, name), zero=False)
        if self.max_grad_norm is not None:
            check_finite("trainer.max_grad_norm", self.max_grad_norm, zero=False)
        for name in ("weight_decay", "ema_decay"):
            value = getattr(self, name)
            if not _is_fraction(value):
                raise ValueError(f"trainer.{name}={value!r} must be a number in [0, 1)")
        betas = self.betas
        if not isinstance(betas, Sequence) or len(betas) != 2 or not all(map(_is_fraction, betas)):
            raise ValueError(f"trainer.betas={self.betas!r} must be two numbers in [0, 1)")
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise ValueError(f"trainer.mixed_precision={self.mixed_precision!r} must be one of no, bf16, fp16")
        for name in ("test_steps", "test_seed"):
            if (value := getattr(self, name)) is not None and not self.test_episodes:
                raise ValueError(f"trainer.{name}={value} is of trainer.test_episodes, which are 0")
        if self.validation_episodes > TEST_SEED - VALIDATION_SEED:
            raise ValueError(f"trainer.validation_episodes={self.validation_episodes} reaches the seeds of evaluation")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Read a configuration file, apply `section.key=value` overrides, check every key and value.

    Raises:
        ValueError: for unknown keys (the message has the nearest known one), bad values, or text that is not YAML.
        OSError: for a missing file.
    """
    config = read_layers(Path(path), SECTIONS)
    apply_overrides(config, overrides, SECTIONS)
    if config["trainer"].get("mixed_precision") is False:
        config["trainer"]["mixed_precision"] = "no"  # YAML reads a bare no as False
    config["trainer"].setdefault("output_dir", default_output_dir("robotics", path))
    check_config(config)
    return config


def check_config(config: dict[str, dict[str, Any]]) -> tuple[DataConfig, PolicyConfig, TrainerConfig]:
    """The sections as the objects that they configure, with every key and value checked, also the encoder's."""
    known = {"data": DataConfig, "policy": PolicyConfig, "trainer": TrainerConfig}
    for section, kind in known.items():
        names = [item.name for item in fields(kind) if item.name != "encoder"]
        check_known(config.setdefault(section, {}), names, f"section {section!r}")
    encoder = dict(config.setdefault("encoder", {}))
    encoder.pop("pretrained", None)
    policy = PolicyConfig(**config["policy"], encoder=encoder)
    for key in policy.cameras:
        policy.encoder_config(key)
    if not policy.cameras:
        _refuse_images(config)
    data, trainer = DataConfig(**config["data"]), TrainerConfig(**config["trainer"])
    if trainer.epochs is not None and trainer.steps is not None:
        raise ValueError(
            f"trainer.steps={trainer.steps} and trainer.epochs={trainer.epochs} exclude each other; set one to null"
        )
    return data, policy, trainer


def _refuse_images(config: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError for settings of images, which a policy without cameras does not have."""
    given = {f"encoder.{name}": value for name, value in config["encoder"].items()}
    images = ("image_size", "crop", "reconstruction_size")
    given |= {f"policy.{name}": config["policy"][name] for name in images if config["policy"].get(name) is not None}
    if given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}={value!r} is of images, and policy.observations has no camera")


def _is_fraction(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value < 1
