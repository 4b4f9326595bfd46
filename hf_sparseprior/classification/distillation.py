"""The `distillation` section: a teacher, its losses, and which phase of Sparsifiner's training a run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.utils import parse_flag_from_env
from torch import nn

from hf_sparseprior.base.checks import check_finite
from hf_sparseprior.models.pretrained import check_saved_folder
from hf_sparseprior.training.distillation import (
    Distillation,
    Teacher,
    freeze_predictors,
    predictors,
    prune_predictors,
    train_predictors_alone,
)

SELF = "self"
# Weights of the losses that the section does not set (Sparsifiner section 4).
PHASES: dict[str, dict[str, float]] = {
    "predictor": {"labels": 0.0, "token": 0.0, "class": 0.0, "attention": 1.0},
    "model": {"labels": 1.0, "token": 0.5, "class": 0.5, "attention": 0.0},
}

CLASS_LOSSES = {"reverse": "class", "forward": "class_forward"}
UP_LOSSES = {"l2": "up_l2", "l1": "up_l1"}


@dataclass
class DistillationConfig:
    """Training with a teacher.

    teacher: a folder of a saved model, or "self": what `model.pretrained` holds, without its prior; null: no teacher.
    phase: "predictor" is phase 1 of Sparsifiner: attention is dense and the predictor alone learns; at the end of the
        run its W_up is pruned. "model" is phase 2, and what other models do: everything learns, but the predictor only
        if lambda_attention is above 0. Without it no gradient of the losses reaches the predictor, and it is frozen.
    lambda_labels, lambda_token, lambda_class, lambda_attention: weights of the losses against the labels, the
        teacher's last tokens (Eq. 8), classes (Eq. 9) and attention (Eq. 10). null: what Sparsifiner's phase has, which
        is 0, 0, 0, 1 in phase 1 and 1, 0.5, 0.5, 0 in phase 2.
    class_kl: "reverse" is KL(y || y_teacher) as Eq. 9 prints it, "forward" KL(y_teacher || y) as the published code of
        Sparsifiner and DynamicViT has it.
    up_penalty: what keeps W_up small. "weight_decay": that of the trainer, as the paper has it. "l2": lambda_up times
        the sum of its squares in the loss (Eqs. 11 and 12 as printed), "l1": of its absolute values (the published
        code's option, of which the paper says that it was tried); W_up then has no weight decay.
    lambda_up: the weight of l2 or l1. Neither the paper nor the code has a number above 0.
    """

    teacher: str | None = None
    phase: str = "model"
    lambda_labels: float | None = None
    lambda_token: float | None = None
    lambda_class: float | None = None
    lambda_attention: float | None = None
    class_kl: str = "reverse"
    up_penalty: str = "weight_decay"
    lambda_up: float | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.teacher is not None and (not isinstance(self.teacher, str) or not self.teacher):
            raise ValueError(f"distillation.teacher={self.teacher!r} must be a folder, 'self' or null")
        if self.phase not in tuple(PHASES):
            raise ValueError(f"distillation.phase={self.phase!r} must be one of {', '.join(PHASES)}")
        if self.class_kl not in CLASS_LOSSES:
            raise ValueError(f"distillation.class_kl={self.class_kl!r} must be one of {', '.join(CLASS_LOSSES)}")
        for loss in PHASES[self.phase]:
            name, value = f"lambda_{loss}", getattr(self, f"lambda_{loss}")
            if value is not None:
                check_finite(f"distillation.{name}", value)
            if value is not None and self.teacher is None:
                raise ValueError(f"distillation.{name}={value} needs distillation.teacher")
        if self.phase != "model" and self.teacher is None:
            raise ValueError(f"distillation.phase={self.phase} needs distillation.teacher")
        if self.teacher is not None and not any(self.weights().values()):
            raise ValueError("distillation: the weights of all losses are 0, there is nothing to train with")
        if self.class_kl != "reverse" and not (
            self.teacher is not None and self.weights()[CLASS_LOSSES[self.class_kl]]
        ):
            raise ValueError(f"distillation.class_kl={self.class_kl} has no effect without a class loss")
        self._check_penalty()

    def _check_penalty(self) -> None:
        if self.up_penalty == "weight_decay":
            if self.lambda_up is not None:
                raise ValueError(
                    f"distillation.lambda_up={self.lambda_up} is of up_penalty l2 or l1; weight_decay takes "
                    "trainer.weight_decay"
                )
            return
        if self.up_penalty not in UP_LOSSES:
            names = ", ".join(("weight_decay", *UP_LOSSES))
            raise ValueError(f"distillation.up_penalty={self.up_penalty!r} must be one of {names}")
        check_finite("distillation.lambda_up", self.lambda_up, zero=False)
        if self.teacher is None or not self.weights()["attention"]:
            raise ValueError(
                f"distillation.up_penalty={self.up_penalty} is for a predictor that is trained: it needs a teacher, "
                "and phase=predictor or lambda_attention above 0"
            )

    def weights(self) -> dict[str, float]:
        """Weights of the losses by name."""
        found = {}
        for loss, weight in PHASES[self.phase].items():
            given = getattr(self, f"lambda_{loss}")
            name = CLASS_LOSSES[self.class_kl] if loss == "class" else loss
            found[name] = weight if given is None else given
        if self.up_penalty in UP_LOSSES and self.lambda_up is not None:
            found[UP_LOSSES[self.up_penalty]] = self.lambda_up
        return found


def check_distillation(config: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError if the other sections do not go with the `distillation` section."""
    distillation = DistillationConfig(**config["distillation"])
    if distillation.teacher is None:
        return
    trainer = config["trainer"]
    # The variable is how `accelerate launch` asks for it.
    if trainer.get("fsdp") or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError("distillation cannot be used with FSDP, use DDP")
    if distillation.teacher == SELF and not config["model"].get("pretrained"):
        raise ValueError("distillation.teacher=self is what model.pretrained holds; set model.pretrained=FOLDER")
    method = config["tuning"].get("method", "full")
    if distillation.phase != "predictor":
        if distillation.weights()["attention"] and method != "full":
            raise ValueError(
                f"distillation.lambda_attention={distillation.lambda_attention} trains the predictor, which "
                f"tuning.method={method} leaves as it is; set it to 0"
            )
        return
    if not config["model"].get("pretrained"):
        raise ValueError("distillation.phase=predictor leaves the model as it is; set model.pretrained=FOLDER")
    if not distillation.weights()["attention"]:
        raise ValueError("distillation.phase=predictor trains with the attention loss alone; lambda_attention is 0")
    if method != "full":
        raise ValueError(f"distillation.phase=predictor has no use for tuning.method={method}")
    if trainer.get("ema_decay") is not None:
        raise ValueError("distillation.phase=predictor prunes at its end, which trainer.ema_decay would not know of")


def teacher_folder(config: dict[str, dict[str, Any]]) -> str | None:
    """The folder that the teacher of a run comes from."""
    teacher = config.get("distillation", {}).get("teacher")
    return config["model"]["pretrained"] if teacher == SELF else teacher


def make_distillation(config: dict[str, dict[str, Any]]) -> Distillation | None:
    """What the `distillation` section asks for, its teacher loaded."""
    settings = DistillationConfig(**config["distillation"])
    folder = teacher_folder(config)
    if folder is None:
        return None
    check_saved_folder(folder, "distillation.teacher")
    options = {"prior": "dense"} if settings.teacher == SELF else {}
    return Distillation(settings.weights(), Teacher.from_pretrained(folder, **options))


def start_phase(model: Any, config: DistillationConfig) -> None:
    """Let only the parameters that the phase trains require gradients."""
    if config.phase == "predictor":
        if not predictors(model):
            raise ValueError(
                f"distillation.phase=predictor needs a predictor, and model.prior={model.config.prior_name!r} has none"
            )
        train_predictors_alone(model)
    elif not config.weights()["attention"]:
        freeze_predictors(model)


def end_phase(model: nn.Module, config: DistillationConfig) -> None:
    """What is done to the model after its last step."""
    if config.phase == "predictor":
        prune_predictors(model)
