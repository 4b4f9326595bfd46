"""DINO: a student learns the outputs of a teacher, which is the student's moving average (Caron et al. 2021).

Shape letters: B images, V views of an image, G = 2 global ones among them, C width of features, K width of outputs.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from hf_sparseprior.priors.prior import pruning_of
from hf_sparseprior.training.trainer import has_unlearned_predictor
from tasks.pretraining.config import DinoConfig

STD = 0.02  # of new weights


class DinoHead(nn.Module):
    """An MLP with GELU and, if asked for, batch norms, then the unit sphere and a linear layer with weight norm and no
    bias: (..., C) to (..., K).
    """

    def __init__(self, width: int, config: DinoConfig) -> None:
        super().__init__()
        hidden = [config.head_hidden_size] * (config.head_layers - 1)
        sizes = [width, *hidden, config.bottleneck_size]
        layers: list[nn.Module] = []
        for number, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
            layers.append(nn.Linear(inputs, outputs))
            if number < config.head_layers:
                layers += [*([nn.BatchNorm1d(outputs)] if config.head_batch_norm else []), nn.GELU()]
        self.mlp = nn.Sequential(*layers)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=STD)
                nn.init.zeros_(layer.bias)
        self.last_layer: Any = weight_norm(nn.Linear(config.bottleneck_size, config.output_size, bias=False))
        norms = self.last_layer.parametrizations.weight.original0
        nn.init.ones_(norms)
        norms.requires_grad = not config.norm_last_layer

    def forward(self, features: Tensor) -> Tensor:
        """Outputs before any softmax. A batch norm sees the views of all images as one batch."""
        hidden = self.mlp(features.flatten(0, -2)).unflatten(0, features.shape[:-1])
        return self.last_layer(F.normalize(hidden, dim=-1))


class Branch(nn.Module):
    """A backbone and its head: the student, or the teacher."""

    def __init__(self, backbone: Any, head: DinoHead) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.head = head

    def forward(self, *crops: Tensor) -> Tensor:
        """Outputs (B, V, K) of crops (B, views, channels, height, width), one tensor for each size of crops.

        Each size has its own grid, so support and decay are those of that grid, and positions are interpolated to it.
        """
        return self.head(torch.cat([self.features(views) for views in crops], 1))

    def features(self, views: Tensor) -> Tensor:
        """Pooled features (B, views, C) of crops of one size."""
        pooled = self.backbone(pixel_values=views.flatten(0, 1)).pooler_output
        return pooled.unflatten(0, views.shape[:2])


class Dino(nn.Module):
    """Student, teacher and centre.

    The teacher learns by `update_teacher` alone and is never in training mode. Checkpoints hold all three.

    Args:
        backbone: a model of ours for images; `pooler_output` is what it learns. config: DINO's settings.

    Raises:
        ValueError: for a prior that drops or merges tokens, or whose keys a predictor of its own loss chooses.
    """

    def __init__(self, backbone: Any, config: DinoConfig) -> None:
        super().__init__()
        for prior in backbone.config.layer_priors:
            if pruning_of(prior) is not None or has_unlearned_predictor(backbone):
                raise ValueError(
                    f"model.prior={backbone.config.prior_name!r} leaves out tokens or has losses of its own, which "
                    "DINO does not know; pretrain without and add it afterwards"
                )
        self.settings = config
        self.student = Branch(backbone, DinoHead(backbone.config.pooled_size, config))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(config.output_size))
        self.centre: Tensor
        self.temperature = config.teacher_temperature  # of the teacher, set for every epoch
        self._sums: list[Tensor] = []  # of the teacher's outputs since the last step
        self._count = 0
        self.train(self.training)

    def train(self, mode: bool = True) -> Dino:
        """As in torch, but the teacher stays in evaluation mode and drops no paths.

        Its head's batch norms see batches, as published.
        """
        super().train(mode)
        self.teacher.eval()
        for module in self.teacher.head.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.train(mode)
        return self

    def forward(self, global_crops: Tensor, local_crops: Tensor | None = None) -> dict[str, Tensor]:
        """The loss of images and its two parts.

        Args:
            global_crops: (B, G, channels, height, width). local_crops: (B, V - G, channels, side, side), or None.

        Returns:
            loss; entropy, that of the teacher's softmax, in nats; kl, the divergence of the student from it. All are
            means; loss = entropy + kl. With entropy near 0 or log K and kl near 0 the outputs have collapsed.
        """
        views = (global_crops,) if local_crops is None else (global_crops, local_crops)
        with torch.no_grad():
            targets = self.teacher(global_crops).float()
        outputs = self.student(*views).float()
        if self.training:
            self._sums.append(targets.sum((0, 1)))
            self._count += targets.shape[0] * targets.shape[1]
        return dino_loss(outputs, targets, self.centre, self.settings.student_temperature, self.temperature)

    @torch.no_grad()
    def update_centre(self) -> None:
        """Move the centre towards the mean of the teacher's outputs since the last step, of all processes (Equation 4).

        All processes call it after every step.
        """
        total = torch.stack(self._sums).sum(0)
        count = torch.full((1,), float(self._count), device=total.device)
        if distributed.is_available() and distributed.is_initialized():
            both = torch.cat([total, count])
            distributed.all_reduce(both)
            total, count = both[:-1], both[-1:]
        self.centre.lerp_(total / count, 1 - self.settings.centre_momentum)
        self._sums, self._count = [], 0

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        """teacher <- momentum * teacher + (1 - momentum) * student, running statistics included."""
        for kind in (nn.Module.parameters, nn.Module.buffers):
            own = [value for value in kind(self.teacher) if value.is_floating_point()]
            others = [value for value in kind(self.student) if value.is_floating_point()]
            if own:
                torch._foreach_lerp_(own, others, 1 - momentum)

    @property
    def last_layer(self) -> nn.Module:
        """The student's last layer, which the first epochs keep as it is."""
        last: nn.Module = self.student.head.last_layer
        return last


def dino_loss(
    outputs: Tensor, targets: Tensor, centre: Tensor, student_temperature: float, teacher_temperature: float
) -> dict[str, Tensor]:
    """Cross entropy of each view's student with each other global view's teacher, as a mean (Equations 1 to 3).

    Args:
        outputs: the student's (B, V, K), the G global views first. targets: the teacher's (B, G, K).
        centre: (K), subtracted from the targets. student_temperature, teacher_temperature: of the softmaxes.

    Returns:
        loss, entropy and kl, scalars without and with gradient, as `Dino.forward` says.
    """
    views, teachers = outputs.shape[1], targets.shape[1]
    wanted = F.softmax((targets - centre) / teacher_temperature, dim=-1)
    log_found = F.log_softmax(outputs / student_temperature, dim=-1)
    losses = -torch.einsum("btk,bvk->tv", wanted, log_found) / len(outputs)
    pairs = views * teachers - min(views, teachers)
    loss = (losses.sum() - losses.diagonal().sum()) / pairs
    # Each global view of the teacher is in as many pairs as the others.
    entropy = torch.special.entr(wanted).sum(-1).mean().detach()
    return {"loss": loss, "entropy": entropy, "kl": loss.detach() - entropy}
