"""Knowledge distillation: a frozen teacher, and the losses by which a model learns from it (Sparsifiner Eqs. 8-10, 12).

`register_loss` makes a function a loss that a `Distillation` can weigh.

Shape letters: B batch, L layers, H heads, T tokens of the teacher, t of the student, N patches of the teacher, n of the
student, P prefix tokens, C width.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_sparseprior.base.checks import check_keys
from hf_sparseprior.models.configuration_sparseprior_vit import as_pair
from hf_sparseprior.models.pretrained import saved_family
from hf_sparseprior.priors.predictor import PREDICTORS, Predictor
from hf_sparseprior.priors.prior import pruning_of
from hf_sparseprior.priors.sparsifiner import Sparsifiner
from hf_sparseprior.priors.token_pruning import counted_patches, gather_tokens
from hf_sparseprior.training.mixing import check_mixtoken

# ---- the losses of the papers, of tensors ---------------------------------------------------------------------------


def token_loss(
    tokens: Tensor,
    teacher_tokens: Tensor,
    token_ids: Tensor | None = None,
    num_prefix_tokens: int = 0,
    kept: Tensor | None = None,
) -> Tensor:
    """Mean squared difference of the tokens after the last block, before the last norm (Sparsifiner Eq. 8).

    Patches that the student has dropped do not count, nor do fused tokens. DynamicViT's loss is like this,
    without the prefix and the last norm.

    Args:
        tokens: (B, t, C), the student's.
        teacher_tokens: (B, T, C).
        token_ids: int64 (B, n), which of the N patches the student has kept, -1 for a fused token; None: all.
        num_prefix_tokens: P, tokens before the patches.
        kept: (B, N), 1 for patches that are kept and 0 for dropped ones; None: all that are left.
    """
    if token_ids is not None:
        prefix, patches = teacher_tokens[:, :num_prefix_tokens], teacher_tokens[:, num_prefix_tokens:]
        teacher_tokens = torch.cat([prefix, gather_tokens(patches, token_ids.clamp_min(0))], 1)
    errors = (tokens.float() - teacher_tokens.float()).square().mean(-1)
    counted = counted_patches(errors[:, num_prefix_tokens:], token_ids, kept)
    counted = F.pad(counted, (num_prefix_tokens, 0), value=1.0)
    return (errors * counted).sum() / counted.sum().clamp_min(1.0)


def class_loss(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(y || y_teacher), as the mean over the batch: the order that Sparsifiner Eq. 9 prints, reverse KL.

    The expectation is over the student's classes. The published code of Sparsifiner and of DynamicViT has
    KL(y_teacher || y), which is `class_loss(teacher_logits, logits)`. logits: (B, classes).
    """
    student, teacher = F.log_softmax(logits.float(), -1), F.log_softmax(teacher_logits.float(), -1)
    return (student.exp() * (student - teacher)).sum(-1).mean()


def attention_loss(scores: Sequence[Tensor], attentions: Sequence[Tensor], num_prefix_tokens: int) -> Tensor:
    """Mean squared difference of connectivity scores and the teacher's attention (Sparsifiner Eq. 10).

    It is the mean over all layers. Pairs with a prefix token have no score, because they are always kept.

    Args:
        scores: (B, H, N, N) for each layer.
        attentions: the teacher's weights (B, H, T, T) for each layer.
        num_prefix_tokens: P = T - N.
    """
    losses = [
        F.mse_loss(layer_scores.float(), weights[..., num_prefix_tokens:, num_prefix_tokens:].float())
        for layer_scores, weights in zip(scores, attentions, strict=True)
    ]
    return torch.stack(losses).mean()


# ---- the losses by name ---------------------------------------------------------------------------------------------


@dataclass
class Step:
    """What the losses of a step are computed from.

    model: the student. outputs: the student's outputs. label_loss: loss against the labels, including the model's
    auxiliary losses (its prior weighs them). teacher: the teacher's outputs, None if no loss needs them. scores:
    connectivity scores of each layer that has a predictor.
    """

    model: Any
    outputs: Any
    label_loss: Tensor
    teacher: Any
    scores: Sequence[Tensor]


@dataclass(frozen=True)
class Loss:
    """compute: computes the loss of a step. needs: those of NEEDS that it needs; each of them needs a teacher."""

    compute: Callable[[Step], Tensor]
    needs: frozenset[str]


LOSSES: dict[str, Loss] = {}
# What a loss can need, and the config fields in which student and teacher must then be equal. A family that has stages
# says its heads there; "heads" are those that compression left of each layer.
NEEDS = {
    "logits": ("num_labels",),
    "hidden_states": ("hidden_size", "num_prefix_tokens", "output_grid"),
    "attentions": ("num_hidden_layers", "num_attention_heads", "num_prefix_tokens", "grid", "stages", "heads"),
    "scores": (),
}
# The teacher is given the student's pixels.
PIXELS = ("num_channels", "image_size", "image_mean", "image_std")


def register_loss(name: str, *needs: str) -> Callable[[Callable[[Step], Tensor]], Callable[[Step], Tensor]]:
    """Register a loss under `name`, with those of NEEDS that it needs."""

    def register(compute: Callable[[Step], Tensor]) -> Callable[[Step], Tensor]:
        LOSSES[name] = Loss(compute, frozenset(needs))
        return compute

    return register


@register_loss("labels")
def _labels(step: Step) -> Tensor:
    return step.label_loss


@register_loss("token", "hidden_states")
def _token(step: Step) -> Tensor:
    return token_loss(
        step.outputs.hidden_states[-1],
        step.teacher.hidden_states[-1],
        step.outputs.get("token_ids"),
        step.model.config.num_prefix_tokens,
        step.outputs.get("kept"),
    )


@register_loss("class", "logits")
def _class(step: Step) -> Tensor:
    return class_loss(step.outputs.logits, step.teacher.logits)


@register_loss("class_forward", "logits")
def _class_forward(step: Step) -> Tensor:
    return class_loss(step.teacher.logits, step.outputs.logits)


@register_loss("attention", "attentions", "scores")
def _attention(step: Step) -> Tensor:
    config = step.model.config
    predicted = [prior["predictor"] for prior in config.layer_priors]  # not every layer need have one
    given = [
        weights
        for weights, predictor in zip(step.teacher.attentions, predicted, strict=True)
        if predictor is not None and PREDICTORS[predictor["name"]].GIVES_SCORES
    ]
    return attention_loss(step.scores, given, config.num_prefix_tokens)


# Penalties of W_up of all layers, each a sum over its weights: Sparsifiner Eq. 11, and the L1 norm that its authors
# tried and their code has as an option. A W_up with a penalty has no weight decay, which the paper has in their place.
UP_PENALTIES = ("up_l2", "up_l1")


@register_loss("up_l2")
def _up_l2(step: Step) -> Tensor:
    return torch.stack([weight.float().square().sum() for weight in trained_up_weights(step.model).values()]).sum()


@register_loss("up_l1")
def _up_l1(step: Step) -> Tensor:
    return torch.stack([weight.float().abs().sum() for weight in trained_up_weights(step.model).values()]).sum()


def trained_up_weights(model: nn.Module) -> dict[str, Tensor]:
    """W_up of each Sparsifiner that is trained, by name."""
    return {
        f"{name}.w_up".lstrip("."): module.w_up
        for name, module in model.named_modules()
        if isinstance(module, Sparsifiner) and module.w_up.requires_grad
    }


# ---- teacher and student --------------------------------------------------------------------------------------------


def _field(config: Any, name: str) -> Any:
    """A field of a config in which teacher and student are compared; None where a family does not have it."""
    if name == "heads":
        return [list(layer.heads) for layer in config.layers]
    value: Any = getattr(config, name, None)
    return as_pair(value) if name == "image_size" else value


class Teacher:
    """A classifier that is used and never trained.

    Args:
        model: a classifier of our families, put into evaluation mode, its parameters frozen.
        name: for errors.
    """

    def __init__(self, model: Any, name: str = "the teacher") -> None:
        self.model = model.eval().requires_grad_(False)
        self.name = name

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike, **options: Any) -> Teacher:
        """A saved model as a teacher; `options` are fields of its config, `prior="dense"` for one before its prior."""
        return cls(saved_family(folder).image_classifier.from_pretrained(folder, **options), f"teacher {folder}")

    def check(self, config: Any, needs: frozenset[str]) -> None:
        """Raise ValueError unless the teacher fits a student of this config, in what the losses need."""
        teacher_config = self.model.config
        fields = dict.fromkeys(field for need in NEEDS if need in needs for field in NEEDS[need])
        for field in (*PIXELS, *fields):
            teachers, students = _field(teacher_config, field), _field(config, field)
            if teachers != students:
                raise ValueError(f"{self.name} has {field}={teachers!r}, the model {students!r}; they must be the same")
        if "logits" in needs and {str(name) for name in teacher_config.id2label.values()} == set(
            config.id2label.values()
        ):
            moved = next(
                (name for index, name in config.id2label.items() if teacher_config.id2label[index] != name), None
            )
            if moved is not None:
                raise ValueError(f"{self.name} has the model's classes in another order, from {moved!r} on")

    @torch.no_grad()
    def __call__(self, pixel_values: Tensor, needs: frozenset[str], token_sources: Tensor | None = None) -> Any:
        """Outputs of the teacher, with hidden states and attentions where these are needed.

        Logits are the classifier's alone, as a student's are in training: LV-ViT's model adds its tokens' logits to
        them in evaluation. `token_sources` as in the model: with MixToken the teacher sees the student's patches.
        """
        mixed = {}
        if token_sources is not None:
            patches = math.prod(self.model.config.grid)
            if token_sources.shape[1] != patches:
                raise ValueError(
                    f"{self.name} has {patches} patches, the model {token_sources.shape[1]}; with mixtoken these "
                    "must be equal"
                )
            check_mixtoken(self.model, self.name)
            mixed["token_sources"] = token_sources
        weight = getattr(self.model.config, "token_logits_weight", None)
        try:
            if weight is not None:
                self.model.config.token_logits_weight = 0.0
            return self.model(
                pixel_values,
                **mixed,
                output_hidden_states="hidden_states" in needs,
                output_attentions="attentions" in needs,
                return_dict=True,
            )
        finally:
            if weight is not None:
                self.model.config.token_logits_weight = weight


class Distillation:
    """The loss of a training step: a weighted sum of losses by name (Sparsifiner Eq. 12).

    Args:
        weights: weights of the losses, by name; losses of weight 0 are not computed.
        teacher: what the student learns from; None if no loss needs one.

    Raises:
        ValueError: for unknown losses, weights below 0, none above 0, and a missing teacher.
    """

    def __init__(self, weights: Mapping[str, float], teacher: Teacher | None = None) -> None:
        check_keys(weights, list(LOSSES), "distillation")
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
                raise ValueError(f"weight {weight!r} of the {name} loss must be a number of 0 or more")
        self.weights = {name: weight for name, weight in weights.items() if weight}
        if not self.weights:
            raise ValueError(f"the weights {dict(weights)!r} leave no loss to train with")
        self.needs = frozenset(need for name in self.weights for need in LOSSES[name].needs)
        if self.needs and teacher is None:
            raise ValueError(f"the losses {', '.join(self.weights)} need a teacher")
        self.teacher = teacher

    def check(self, model: Any) -> None:
        """Raise ValueError unless a model can learn this way."""
        if self.teacher is not None:
            self.teacher.check(model.config, self.needs)
        if "scores" in self.needs and not any(predictor.GIVES_SCORES for predictor in predictors(model)):
            raise ValueError(
                f"the attention loss is for priors whose predictor has connectivity scores (sparsifiner), not for "
                f"{model.config.prior_name!r}"
            )
        if self.penalises_up and not trained_up_weights(model):
            names = " and ".join(name for name in UP_PENALTIES if name in self.weights)
            raise ValueError(
                f"the {names} loss is of a trained W_up (sparsifiner), and prior {model.config.prior_name!r} has none"
            )
        priors = getattr(model.config, "layer_priors", [])
        pruning = next((pruning for prior in priors if (pruning := pruning_of(prior)) is not None), None)
        if pruning is None:
            return
        if "attentions" in self.needs:
            raise ValueError(
                f"the attention loss compares all tokens, and prior {model.config.prior_name!r} drops some; train the "
                "predictor first and add the token pruning after it"
            )
        if pruning[0].get("ratio_weight") and "labels" not in self.weights:
            raise ValueError(
                f"the keep-ratio loss of prior {model.config.prior_name!r} comes with the labels loss, whose weight "
                "cannot be 0"
            )

    @property
    def penalises_up(self) -> bool:
        """Whether W_up has a penalty in place of weight decay."""
        return not set(self.weights).isdisjoint(UP_PENALTIES)

    def student_options(self) -> dict[str, bool]:
        """Arguments with which the student is called."""
        return {"output_hidden_states": True} if "hidden_states" in self.needs else {}

    @contextmanager
    def observed(self, model: Any) -> Iterator[list[Tensor]]:
        """Inside the block the scores of the student's predictors are collected, if they are needed.

        Raises:
            ValueError: if no scores have a gradient.
        """
        scores: list[Tensor] = []
        watched = predictors(model) if "scores" in self.needs else []
        for predictor in watched:
            predictor.recorder = scores.append
        # With gradient checkpointing, layers run again in the backward pass and have to do the same as here.
        runs_again = bool(watched) and getattr(model, "is_gradient_checkpointing", False)
        try:
            yield scores
        finally:
            for predictor in watched:
                predictor.recorder = _discard if runs_again else None
        if model.training and scores and not any(score.requires_grad for score in scores):
            if runs_again:
                raise ValueError("the attention loss needs gradient checkpointing to be without reentrance")
            raise ValueError("the attention loss has nothing to train: predictors, queries and keys are all frozen")

    def losses(
        self,
        model: nn.Module,
        outputs: Any,
        label_loss: Tensor,
        scores: Sequence[Tensor],
        pixel_values: Tensor,
        token_sources: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The losses of a step by name, not yet weighed.

        Args:
            model: the student itself, not a Trainer's wrapper around it.
            outputs: the student's outputs.
            label_loss: the loss against the labels.
            scores: what `observed` collected.
            pixel_values, token_sources: what the student saw.
        """
        teacher = None
        if self.teacher is not None and self.needs:
            teacher = self.teacher(pixel_values, self.needs, token_sources)
        step = Step(model, outputs, label_loss, teacher, scores)
        return {name: LOSSES[name].compute(step) for name in self.weights}

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Their weighted sum."""
        return torch.stack([weight * losses[name] for name, weight in self.weights.items()]).sum()


def _discard(scores: Tensor) -> None:
    pass


def predictors(model: nn.Module) -> list[Predictor]:
    """The predictors of a model, layer by layer."""
    return [module for module in model.modules() if isinstance(module, Predictor)]


def learns_from_scores(predictor: Predictor) -> bool:
    """Whether a predictor is trained, which takes a loss of its scores."""
    return predictor.GIVES_SCORES and any(parameter.requires_grad for parameter in predictor.parameters())


def train_predictors_alone(model: nn.Module) -> None:
    """Phase 1 of Sparsifiner: only predictors require gradients, and attention is dense while they train."""
    model.requires_grad_(False)
    for predictor in predictors(model):
        predictor.requires_grad_(True)
        predictor.dense_in_training = True


def freeze_predictors(model: nn.Module) -> None:
    """Phase 2 of Sparsifiner as published: no gradient of its losses reaches the predictors, so they are frozen."""
    for predictor in predictors(model):
        predictor.requires_grad_(False)


def prune_predictors(model: nn.Module) -> None:
    """The end of phase 1: predictors drop weights that are too small to count (Sparsifiner section 4)."""
    for predictor in predictors(model):
        predictor.prune()
