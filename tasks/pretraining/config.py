"""Configuration of a pretraining run: YAML, `base:` inheritance and key=value overrides.

data: {...}          fields of DataConfig; labels are for k-NN and linear evaluation alone
crops: {...}         fields of CropConfig, what student and teacher see of an image
model: {...}         fields of the family's config (SparsePriorViTConfig), plus `family`, `preset` and `pretrained`
dino: {...}          fields of DinoConfig, head, temperatures, momentum and schedules
evaluation: {...}    fields of EvaluationConfig, k-NN and the linear classifier
trainer: {...}       fields of SparsePriorTrainingArguments, transformers.TrainingArguments among them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_sparseprior.base.checks import check_boolean, check_finite, check_integer
from hf_sparseprior.images.augmentation import EVAL_CROP_RATIOS, check_range
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.model import check_model, model_keys
from hf_sparseprior.images.sections import field_names
from hf_sparseprior.runs.config import FINAL, Config, check_known, check_trainer, trainer_keys
from hf_sparseprior.runs.labels import CLASSES
from tasks.pretraining.crops import CropConfig, check_share

SECTIONS = ("data", "crops", "model", "dino", "evaluation", "trainer")
# Keys of the Trainer that would do what DINO's own settings do, and these.
TAKEN = {
    "lr_scheduler_type": "dino.warmup_epochs and dino.min_learning_rate",
    "lr_scheduler_kwargs": "dino.warmup_epochs and dino.min_learning_rate",
    "warmup_steps": "dino.warmup_epochs",
    "warmup_ratio": "dino.warmup_epochs",
    "max_grad_norm": "dino.clip_gradient",
    "ema_decay": "dino.teacher_momentum",
    "layer_decay": "nothing: all layers learn at one rate",
    "backbone_learning_rate": "nothing: all parameters learn at one rate",
    "metric_for_best_model": "nothing: the last teacher is kept",
    "early_stopping": "nothing: the last teacher is kept",
    "label_smoothing_factor": "nothing: there are no labels",
    "progressive_sizes": "crops, whose sizes are fixed",
}


@dataclass
class DinoConfig:
    """DINO's settings (Caron et al. 2021). The defaults are those of 100 epochs with a ViT-S, as published.

    output_size: K, width of the head's output. head_layers, head_hidden_size, bottleneck_size: of its MLP.
    head_batch_norm: batch norms in the MLP; in one process.
    norm_last_layer: keep the norms of the last layer's weights at 1.
    freeze_last_layer_epochs: epochs in which the last layer is not trained.
    teacher_momentum: the teacher is momentum * teacher + (1 - momentum) * student after every step; it rises to 1 as a
        cosine.
    student_temperature: of the student's softmax. teacher_temperature: of the teacher's, which rises linearly from
        warmup_teacher_temperature in warmup_teacher_temperature_epochs.
    centre_momentum: of the mean output that is subtracted from the teacher's.
    warmup_epochs: the learning rate rises linearly to trainer.learning_rate, then falls to min_learning_rate as a
        cosine.
    weight_decay_end: trainer.weight_decay goes to it as a cosine.
    clip_gradient: largest norm of the gradient of each parameter alone, as published; null: no clipping.
    """

    output_size: int = 65536
    head_layers: int = 3
    head_hidden_size: int = 2048
    bottleneck_size: int = 256
    head_batch_norm: bool = False
    norm_last_layer: bool = True
    freeze_last_layer_epochs: int = 1
    teacher_momentum: float = 0.996
    student_temperature: float = 0.1
    teacher_temperature: float = 0.04
    warmup_teacher_temperature: float = 0.04
    warmup_teacher_temperature_epochs: int = 0
    centre_momentum: float = 0.9
    warmup_epochs: float = 10
    min_learning_rate: float = 1e-6
    weight_decay_end: float = 0.4
    clip_gradient: float | None = 3.0

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("output_size", "head_layers", "head_hidden_size", "bottleneck_size"):
            check_integer(f"dino.{name}", getattr(self, name), 1)
        for name in ("freeze_last_layer_epochs", "warmup_teacher_temperature_epochs"):
            check_integer(f"dino.{name}", getattr(self, name), 0)
        for name in ("head_batch_norm", "norm_last_layer"):
            check_boolean(f"dino.{name}", getattr(self, name))
        for name in ("teacher_momentum", "centre_momentum"):
            check_share(f"dino.{name}", getattr(self, name))
        if self.teacher_momentum == 1:
            raise ValueError("dino.teacher_momentum=1 must be below 1: the teacher, which is kept, would never change")
        for name in ("student_temperature", "teacher_temperature", "warmup_teacher_temperature"):
            check_finite(f"dino.{name}", getattr(self, name), zero=False)
        for name in ("warmup_epochs", "min_learning_rate", "weight_decay_end"):
            check_finite(f"dino.{name}", getattr(self, name))
        if self.clip_gradient is not None:
            check_finite("dino.clip_gradient", self.clip_gradient, zero=False)


@dataclass
class EvaluationConfig:
    """How features are judged, as published for DINO.

    neighbours, temperature: k-NN with cosine similarities s; a neighbour's vote has the weight exp(s / temperature).
    linear: also train a linear classifier on the frozen features at the end of the run.
    linear_layers: what the model pools (class token, mean of the patch tokens or both) of so many last layers is its
        input, each after the last norm; 4 for ViT-S, 1 for ViT-B. linear_average: also the mean of the last layer's
        patch tokens, of a model that pools the class token.
    linear_epochs, linear_learning_rate, linear_batch_size: SGD with momentum 0.9; the rate is for 256 images a step,
        grows with linear_batch_size, and falls to 0 as a cosine over the epochs.
    linear_scale: share of the area of the boxes that it is trained on, also mirrored.
    eval_crop_ratio: images are resized to 1 / ratio of the model's size by their shorter side and cut in the centre;
        null: resized to the model's size.
    """

    neighbours: int = 20
    temperature: float = 0.07
    linear: bool = False
    linear_layers: int = 4
    linear_average: bool = False
    linear_epochs: int = 100
    linear_learning_rate: float = 1e-3
    linear_batch_size: int = 1024
    linear_scale: tuple[float, float] = (0.08, 1.0)
    eval_crop_ratio: float | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("neighbours", "linear_layers", "linear_epochs", "linear_batch_size"):
            check_integer(f"evaluation.{name}", getattr(self, name), 1)
        for name in ("temperature", "linear_learning_rate"):
            check_finite(f"evaluation.{name}", getattr(self, name), zero=False)
        for name in ("linear", "linear_average"):
            check_boolean(f"evaluation.{name}", getattr(self, name))
        self.linear_scale = CropConfig.pair("evaluation.linear_scale", self.linear_scale)
        if self.eval_crop_ratio is not None:
            check_range("eval_crop_ratio", self.eval_crop_ratio, *EVAL_CROP_RATIOS, section="evaluation")


def check_config(config: Config) -> Config:
    """Refuse unknown keys of every section and bad values; a missing section is empty."""
    known = {
        "data": field_names(DataConfig),
        "crops": field_names(CropConfig),
        "model": [key for key in model_keys(config.get("model") or {}) if key != "classifier_init_std"],
        "dino": field_names(DinoConfig),
        "evaluation": field_names(EvaluationConfig),
        "trainer": trainer_keys(),
    }
    for section, keys in known.items():
        check_known(config.setdefault(section, {}), keys, f"section {section!r}")
    data = DataConfig(**config["data"])
    if data.labels != CLASSES:
        raise ValueError(f"data.labels={data.labels!r}: k-NN asks for one class an image")
    if data.streaming:
        raise ValueError("data.streaming=true: k-NN needs all training images at hand; set data.streaming=false")
    CropConfig(**config["crops"])
    DinoConfig(**config["dino"])
    EvaluationConfig(**config["evaluation"])
    _check_trainer(config["trainer"])
    if data.stage == FINAL and config["trainer"].get("eval_strategy") not in (None, "no"):
        raise ValueError(
            f"trainer.eval_strategy={config['trainer']['eval_strategy']!r} must be no with data.stage=final: the "
            "validation images are training images, and each would be its own nearest neighbour"
        )
    check_model(config["model"])
    return config


def _check_trainer(trainer: dict[str, Any]) -> None:
    check_trainer(trainer)
    for key, instead in TAKEN.items():
        if trainer.get(key) is not None:
            raise ValueError(f"trainer.{key}={trainer[key]!r} is not for DINO; use {instead}")
    for key in ("gradient_checkpointing", "activation_checkpointing"):  # the second since transformers 5.23
        if trainer.get(key):
            raise ValueError(f"trainer.{key}=true is not for DINO, whose two networks do not have it")
    if trainer.get("load_best_model_at_end"):
        raise ValueError("trainer.load_best_model_at_end=true is not for DINO, which keeps the last teacher")
    check_finite("trainer.learning_rate", trainer.get("learning_rate", 1e-3), zero=False)
    check_finite("trainer.weight_decay", trainer.get("weight_decay", 0.0))
