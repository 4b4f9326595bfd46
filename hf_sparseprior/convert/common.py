"""What every foreign format needs: refusals, weights without a prior."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from hf_sparseprior.prior import is_prior_weight

# What SparsePriorViT has and the models of other libraries lack.
ONLY_OURS: dict[str, tuple[Any, ...]] = {"stem": ("patch",), "residual_scale": (1.0,), "token_classifier": (False,)}


def field_problems(config: Any, allowed: dict[str, tuple[Any, ...]]) -> list[str]:
    """One text for each field of a config whose value is not among the allowed ones."""
    return [
        f"{name}={getattr(config, name)!r} must be {' or '.join(map(repr, values))}"
        for name, values in allowed.items()
        if getattr(config, name) not in values
    ]


def refuse(target: str, problems: Iterable[str]) -> None:
    """Raise ValueError with every problem in one line."""
    if problems := list(problems):
        raise ValueError(f"{target} cannot express this model: {'; '.join(problems)}")


def one_if_square(pair: Sequence[int]) -> int | list[int]:
    """(height, width) as one number if both are equal; most readers of configs expect that."""
    return pair[0] if pair[0] == pair[1] else list(pair)


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a SparsePriorViT under the classifier's names ("vit.layers.0..."), the prior's left out."""
    weights = {key: value for key, value in model.state_dict().items() if not is_prior_weight(key)}
    prefix = "" if any(key.startswith("vit.") for key in weights) else "vit."
    return {prefix + key: value.contiguous() for key, value in weights.items()}
