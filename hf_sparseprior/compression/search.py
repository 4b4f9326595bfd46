"""UPop's search (Shi et al., ICML 2023): unified over all structures, and progressive.

Every unit has a mask of 1, by which the outputs of the linear layers that make it are multiplied. The gradients of the
masks are summed over all steps so far. These sums are standardised within each kind of structure and ranked together:
the units with the largest sums, whose masks the loss would lower most, are to go. Their masks are not cut off at once.
After step t of T they are 1 - p_t / p for p_t = p sqrt((1 - cos(pi t / T)) / 2), and the share of parameters that they
stand for is p_t; which units they are may change until the end. At the end they are 0, so nothing changes when they are
cut out.

The published code has masks for the width of heads, shared by the heads of a layer, and for the hidden width of the
MLP. Whole heads and the width of the tokens are ours, by the same rule. A LayerNorm takes the mask of the tokens' width
as weights of its mean and variance, which makes it the norm of the narrower model in the end.

A batch norm would undo a factor that comes before it, so layers with one have their masks behind the norm. The values
and the gate of an attention with a sigmoid, which is not 0 at 0, have theirs where the next layer reads them.

The published loss also
has the sum of the masks with a weight for each kind. Its gradient is the same for all units of a kind, and
standardising removes it, so it is left out.

Two things are settings. `ratio_of`: the parameters that the ratio is a share of: all ("model") or, as in the published
code, those of units of attention and MLP ("layers": 21.3 of DeiT-S's 22.1 million). `choice`: how units
are chosen. "fill" takes the highest scores and then others that still fit, until the share is met. "threshold" is the
published code's: one score is the threshold, and all units above it go, except the smallest of a group.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn

from hf_sparseprior.base.checks import is_number
from hf_sparseprior.base.layer_sizes import CONV_WIDTH, HEAD_WIDTH, HEADS, MLP_WIDTH, STEM_WIDTH, VALUE_WIDTH, WIDTH
from hf_sparseprior.compression.units import Group, Units

# The kinds of units of each structure; most families have the first alone.
KINDS = {
    HEADS: (HEADS,),
    HEAD_WIDTH: (HEAD_WIDTH, VALUE_WIDTH),
    MLP_WIDTH: (MLP_WIDTH, CONV_WIDTH),
    WIDTH: (WIDTH, STEM_WIDTH),
}
STRUCTURES = tuple(KINDS)
ACTIVATED = (MLP_WIDTH, CONV_WIDTH, STEM_WIDTH)  # kinds whose masks an activation follows
PUBLISHED = (HEAD_WIDTH, MLP_WIDTH)
RATIOS, CHOICES = ("model", "layers"), ("fill", "threshold")
SEARCH_FILE = "search.safetensors"
TOLERANCE = 0.01  # of all parameters, by which the pruned share may miss the ratio


def pruned_share(ratio: float, step: int, steps: int) -> float:
    """p_t, the share of the parameters that is marked after `step` of `steps` steps."""
    return ratio * math.sqrt((1 - math.cos(math.pi * step / steps)) / 2)


class MaskSearch:
    """Masks on a model and the search for those that become 0.

    Args:
        model: of one of our families; its forward uses the masks until `remove`.
        ratio: p, the share of the parameters that the search takes away, above 0 and below 1.
        structures: what may go, some of STRUCTURES.
        ratio_of: of which parameters, "model" or "layers".
        choice: of the units that go, "fill" or "threshold".

    Raises:
        ValueError: for a bad value, a ratio that these structures cannot give, and a model that cannot be compressed.
    """

    def __init__(
        self,
        model: Any,
        ratio: float,
        structures: Sequence[str] = PUBLISHED,
        ratio_of: str = "model",
        choice: str = "fill",
    ) -> None:
        check_search(ratio, structures)
        check_choice(ratio_of, choice, structures)
        self.units, self.ratio, self.by_threshold = Units(model), ratio, choice == "threshold"
        kinds = {kind for structure in structures for kind in KINDS[structure]}
        self.groups = [group for group in self.units.sizes if group.kind in kinds]
        self.masks = {
            group: torch.ones(self.units.sizes[group], device=model.device, requires_grad=True) for group in self.groups
        }
        masked = self._masked_modules()
        if any(group.kind in ACTIVATED for _, axis, place in masked if place == "output" for group in axis):
            _check_activation(model)
        self.total = self.parameters = self.units.count(self.units.sizes)
        if ratio_of == "layers":
            kinds = {kind for structure in PUBLISHED for kind in KINDS[structure]}
            sizes = {group: size for group, size in self.units.sizes.items() if group.kind in kinds}
            self.total = sum(size * self._cost(group) for group, size in sizes.items())
        least = self.units.count({**self.units.sizes, **dict.fromkeys(self.groups, 1)})
        if (most := (self.parameters - least) / self.total) < ratio:
            raise ValueError(f"ratio={ratio} must be at most {most:.3f}, which is all of {', '.join(structures)}")
        # A threshold needs scores, which there are none of yet.
        if not self.by_threshold and abs((share := self._share(self.choose(ratio))) - ratio) > TOLERANCE:
            raise ValueError(
                f"ratio={ratio} cannot be met to 1 % with {', '.join(structures)}, only {share:.3f}, because one unit "
                "has too many of the parameters; take another ratio, or mlp too"
            )
        self._handles = [
            module.register_forward_pre_hook(_masked_input(self, axis))
            if place == "input"
            else module.register_forward_hook(
                _masked_norm(self, axis) if place == "norm" else _masked_output(self, axis)
            )
            for module, axis, place in masked
        ]

    def _masked_modules(self) -> list[tuple[nn.Module, tuple[Group, ...], str]]:
        """Modules with masks, the groups along these, and where they act: "input", "output", or "norm" (weighted)."""
        weighted = [
            (module, axes)
            for name, module in self.units.modules.items()
            if (axes := self.units.axes.get(f"{name}.weight")) is not None
        ]
        normed = {axes[0] for module, axes in weighted if isinstance(module, nn.BatchNorm2d)}
        masked: list[tuple[nn.Module, tuple[Group, ...], str]] = []
        for module, axes in weighted:
            if isinstance(module, nn.LayerNorm):
                # Without batch norms the tokens' width has its masks where it is read, which is in norms.
                if _has(axes[0], WIDTH):
                    masked.append((module, axes[0], "norm"))
            elif isinstance(module, nn.BatchNorm2d):
                if not _has(axes[0], VALUE_WIDTH):
                    masked.append((module, axes[0], "output"))
            elif isinstance(module, nn.Linear):
                if axes[0] not in normed and not _has(axes[0], WIDTH):
                    masked.append((module, axes[0], "output"))
                if _has(axes[1], VALUE_WIDTH):
                    masked.append((module, axes[1], "input"))
        return [entry for entry in masked if any(group in self.masks for group in entry[1])]

    def values(self, axis: tuple[Group, ...]) -> Tensor:
        """The masks along an axis."""
        device = next(iter(self.masks.values())).device
        ones = {group: torch.ones(self.units.sizes[group], device=device) for group in axis if group not in self.masks}
        return self.units.spread(axis, {**self.masks, **ones})

    # ---- progress ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, step: int, steps: int) -> dict[Group, Tensor]:
        """Rank the units and set the masks for what follows after `step` of `steps` steps. Returns what is kept."""
        share = pruned_share(self.ratio, step, steps)
        kept = self.choose(share)
        for group, mask in self.masks.items():
            mask.copy_(kept[group].to(mask) + (~kept[group]).to(mask) * (1 - share / self.ratio))
        return kept

    def scores(self) -> dict[Group, Tensor]:
        """The sums of the masks' gradients over steps and processes, standardised within each kind, float64."""
        sums = {group: self._gradients(mask) for group, mask in self.masks.items()}
        scores: dict[Group, Tensor] = {}
        for kind in {group.kind for group in sums}:
            of_kind = {group: value for group, value in sums.items() if group.kind == kind}
            every = torch.cat(list(of_kind.values()))
            deviation = every.std() if len(every) > 1 else every.new_zeros(())
            scores |= {
                group: (value - every.mean()) / deviation if deviation > 0 else torch.zeros_like(value)
                for group, value in of_kind.items()
            }
        return scores

    @staticmethod
    def _gradients(mask: Tensor) -> Tensor:
        gradients = torch.zeros_like(mask) if mask.grad is None else mask.grad.clone()
        if _rank_and_processes()[1] > 1:
            distributed.all_reduce(gradients)
        return gradients.double().cpu()

    def choose(self, share: float) -> dict[Group, Tensor]:
        """Which units are kept if this share of the parameters goes: bool (units,) by group, on the CPU.

        Without a threshold: in the order of the scores units go as long as no more than the share is gone, and after
        the first that would be too much, those that still fit, and then one more if that is nearer to the share. Each
        group keeps at least the unit with its smallest score.
        """
        scores = self.scores()
        if self.by_threshold:
            return self._up_to_threshold(scores, share)
        ranked = [
            (float(score), group, unit)
            for group, values in scores.items()
            for unit, score in enumerate(values)
            if unit != int(values.argmin())
        ]
        ranked.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
        budget, sizes = share * self.total, dict(self.units.sizes)
        kept = {group: torch.ones(size, dtype=torch.bool) for group, size in sizes.items() if group in self.masks}
        enough = 0.0005 * self.total
        for most in (1, 2):  # largest cost of a unit, in what is left of the budget
            for _, group, unit in ranked:
                if budget < enough:
                    break
                if kept[group][unit] and (cost := self.units.cost(group, sizes)) < most * budget:
                    kept[group][unit] = False
                    sizes[group] -= 1
                    budget -= cost
        return kept

    def _up_to_threshold(self, scores: Mapping[Group, Tensor], share: float) -> dict[Group, Tensor]:
        """As `choose`, as in the published code: the units up to the score at which, in falling order, the sum of the
        parameters of units comes nearest to the share. In each group the smallest score stays, too.
        """
        every = torch.cat(list(scores.values()))
        costs = torch.cat([values.new_full(values.shape, self._cost(group)) for group, values in scores.items()])
        order = every.argsort(descending=True, stable=True)
        nearest = (costs[order].cumsum(0) - share * self.total).abs().argmin()
        threshold = every[order[nearest]]
        return {group: (values <= threshold) | (values <= values.min()) for group, values in scores.items()}

    def _cost(self, group: Group) -> int:
        """Parameters of one unit of a group in the whole model: of DeiT-S 9234 of a head's width and 769 of the MLP."""
        return self.units.cost(group, self.units.sizes)

    def kept(self) -> dict[Group, Tensor]:
        """Which units have a mask that is not 0, bool (units,) by group, on the CPU."""
        return {group: (mask.detach() != 0).cpu() for group, mask in self.masks.items()}

    def achieved(self) -> float:
        """The share of the parameters, as `ratio` counts it, that goes with the masks that are 0."""
        return self._share(self.kept())

    def _share(self, kept: Mapping[Group, Tensor]) -> float:
        sizes = {**self.units.sizes, **{group: int(mask.sum()) for group, mask in kept.items()}}
        return (self.parameters - self.units.count(sizes)) / self.total

    def to(self, device: torch.device) -> None:
        """Move masks and sums of gradients."""
        for mask in self.masks.values():
            gradient, mask.grad = mask.grad, None
            mask.data = mask.data.to(device)
            mask.grad = None if gradient is None else gradient.to(device)

    def remove(self) -> None:
        """The model's forward no longer uses the masks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike) -> None:
        """Write masks and the sums of gradients of all processes into a checkpoint folder. Every process calls it."""
        tensors = {f"mask.{group.kind}.{group.place}": mask.detach() for group, mask in self.masks.items()}
        tensors |= {f"sum.{group.kind}.{group.place}": self._gradients(mask) for group, mask in self.masks.items()}
        if _rank_and_processes()[0] == 0:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, Path(folder) / SEARCH_FILE)

    @torch.no_grad()
    def load(self, folder: str | os.PathLike) -> None:
        """Read what `save` wrote.

        Raises:
            ValueError: if the folder has none, or those of another model.
        """
        path = Path(folder) / SEARCH_FILE
        if not path.is_file():
            raise ValueError(f"{folder} has no {SEARCH_FILE}; its run was no search")
        stored = load_file(path)
        for group, mask in self.masks.items():
            values = [stored.get(f"{what}.{group.kind}.{group.place}") for what in ("mask", "sum")]
            if any(value is None or value.shape != mask.shape for value in values):
                raise ValueError(f"{path} is of another model or other structures")
            mask.copy_(values[0])
            mask.grad = (values[1] / _rank_and_processes()[1]).to(mask)


def _rank_and_processes() -> tuple[int, int]:
    joined = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if joined else (0, 1)


def check_search(ratio: Any, structures: Any, where: str = "") -> None:
    """Raise ValueError for values that no search can have. `where`: goes before names in errors."""
    if not is_number(ratio) or not 0 < ratio < 1:
        raise ValueError(f"{where}ratio={ratio!r} must be a number above 0 and below 1")
    listed = isinstance(structures, (list, tuple)) and len(structures) > 0
    if not listed or len(set(structures)) < len(structures) or not set(structures) <= set(STRUCTURES):
        raise ValueError(f"{where}structures={structures!r} must be a list of some of {', '.join(STRUCTURES)}")


def check_choice(ratio_of: Any, choice: Any, structures: Sequence[str], where: str = "") -> None:
    """Raise ValueError for other values, and for structures with which a unit has no parameters of its own."""
    for name, value, allowed in (("ratio_of", ratio_of, RATIOS), ("choice", choice, CHOICES)):
        if value not in allowed:
            raise ValueError(f"{where}{name}={value!r} must be one of {', '.join(allowed)}")
        if value != allowed[0] and not set(structures) <= set(PUBLISHED):
            raise ValueError(
                f"{where}structures={structures!r} with {name}={value!r} must be some of {', '.join(PUBLISHED)}"
            )


def _check_activation(model: Any) -> None:
    activation = next(module.activation for module in model.modules() if hasattr(module, "activation"))
    if activation(torch.zeros(1)).item() != 0:
        raise ValueError(f"hidden_act={model.config.hidden_act!r} is not 0 at 0, so a masked channel would not be gone")


def _has(axis: tuple[Group, ...], kind: str) -> bool:
    return any(group.kind == kind for group in axis)


def _masked_output(search: MaskSearch, axis: tuple[Group, ...]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        mask = search.values(axis).to(output.dtype)
        # Channels lie last in linear layers, and second in batch norms.
        return output * (mask if isinstance(module, nn.Linear) else mask.view(-1, *(1,) * (output.dim() - 2)))

    return hook


def _masked_input(search: MaskSearch, axis: tuple[Group, ...]) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return inputs[0] * search.values(axis).to(inputs[0].dtype)

    return hook


def _masked_norm(search: MaskSearch, axis: tuple[Group, ...]) -> Any:
    def hook(module: nn.LayerNorm, inputs: Any, output: Tensor) -> Tensor:
        mask = search.values(axis).repeat(output.shape[-1] // search.units.sizes[axis[0]])
        return weighted_norm(inputs[0], mask, module.weight, module.bias, module.eps)

    return hook


def weighted_norm(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of (..., C) whose mean and variance are weighted by a mask (C,) of 0 to 1, times the mask.

    Where the mask is 0 or 1 it is the norm of the channels with 1. Computed in float32 or more.
    """
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    share = mask / mask.sum()
    centred = precise - (precise * share).sum(-1, keepdim=True)
    variance = (centred.square() * share).sum(-1, keepdim=True)
    return ((centred * torch.rsqrt(variance + eps) * weight + bias) * mask).to(x.dtype)
