"""Decays: learned weights of pairs of patches that multiply the attention logits before the softmax.

Y = softmax(alpha * Q K^T / sqrt(d_h) * M) V, elementwise product, with M = mean over curves c of
gamma_c^|position_c(j) - position_c(k)| and gamma_c = sigmoid(beta_c) (VIOLIN Eqs. 12 and 13). `register_decay` makes a
class a value of `prior`; the class only says which positions it measures distances along.

Shape letters: B batch, H heads, C curves, A axes of a position, N patch tokens, P prefix tokens, T = P + N.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .curves import CURVES, TRANSPOSED_SUFFIX, curve_names, curve_rank
from .supports import check_boolean, check_keys, plain, split_spec

DECAYS: dict[str, type[Decay]] = {}

# alpha ~ N(mean, std) and beta ~ U(low, high), in the order (mean, std, low, high).
INIT_PRESETS: dict[str, tuple[float, float, float, float]] = {
    "pretrain": (1.0, 0.0, 5.0, 9.0),  # VIOLIN D.1: beta ~ U(5, 9)
    "pretrain_gamma": (1.0, 0.0, 4.0, 8.5),  # the interval of gamma that D.1 prints, (0.9820, 0.9998)
    "finetune": (1.0, 0.02, 15.0, 20.0),  # VIOLIN D.1: alpha around 1, beta ~ U(15, 20); the mask hardly moves
    "moving": (1.0, 0.0, 6.0, 8.0),  # ours: for fine-tuning with a mask that is visibly below 1 and can move
    "identity": (1.0, 0.0, 20.0, 20.0),  # ours: the base model to 1e-5, for adapters and for stock models
}
INIT_KEYS = ("alpha_mean", "alpha_std", "beta_low", "beta_high")


def register_decay(name: str) -> Callable[[type[Decay]], type[Decay]]:
    """Register a subclass of `Decay` under `name`."""

    def register(cls: type[Decay]) -> type[Decay]:
        if name in DECAYS:
            raise ValueError(f"decay {name!r} is registered already")
        cls.name = name
        DECAYS[name] = cls
        return cls

    return register


def resolve_decay(decay: str | dict[str, Any] | None) -> dict[str, Any] | None:
    """The full form of a decay: its name with every setting, checked; None for no decay.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """
    if decay is None:
        return None
    name, spec = split_spec(decay, "decay", ["none", *DECAYS])
    if name == "none":
        check_keys(spec, [], "decay 'none'")
        return None
    settings = dict(DECAYS[name].SETTINGS)
    check_keys(spec, list(settings), f"decay {name!r}")
    settings.update(spec)
    for key in ("learn_alpha", "learn_beta", "learn_prefix"):
        settings[key] = check_boolean(f"decay {name!r}: {key}", settings[key])
    init_values(settings["init"])
    if isinstance(settings["init"], Mapping):
        settings["init"] = {key: plain(value) for key, value in settings["init"].items()}
    if "curves" in settings:
        settings["curves"] = check_curves(settings["curves"])
    return {"name": name, **settings}


def check_curves(curves: Sequence[str]) -> list[str]:
    """Curve names as a list without repeats, each one known."""
    if isinstance(curves, str) or not isinstance(curves, Sequence) or not curves:
        raise ValueError(f"curves={curves!r} must be a list of at least one of {', '.join(curve_names())}")
    for curve in curves:
        if curve not in curve_names():
            raise ValueError(f"curves: {curve!r} must be one of {', '.join(curve_names())}")
    if len(set(curves)) != len(curves):
        raise ValueError(f"curves={list(curves)!r} must not repeat a curve")
    return list(curves)


def init_values(init: str | dict[str, float]) -> tuple[float, float, float, float]:
    """(alpha mean, alpha std, beta low, beta high) of a preset's name or of a dict with those four keys."""
    if isinstance(init, str):
        if init not in INIT_PRESETS:
            raise ValueError(f"init={init!r} must be one of {', '.join(INIT_PRESETS)}, or a dict of {INIT_KEYS}")
        return INIT_PRESETS[init]
    if not isinstance(init, Mapping):
        raise ValueError(f"init={init!r} must be one of {', '.join(INIT_PRESETS)}, or a dict of {INIT_KEYS}")
    check_keys(init, INIT_KEYS, "decay init")
    if missing := [key for key in INIT_KEYS if key not in init]:
        raise ValueError(f"init={init!r} lacks {', '.join(missing)}")
    numbers = [plain(init[key]) for key in INIT_KEYS]
    if all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers):
        mean, std, low, high = (float(number) for number in numbers)
        if std >= 0 and low <= high:
            return mean, std, low, high
    raise ValueError(f"init={init!r} needs finite numbers, alpha_std of 0 or more, beta_low not above beta_high")


class Decay(nn.Module):
    """The learned scalars of one layer's decay: alpha (H,) and beta (C, H), both float32 or float64.

    They stay in at least float32 when the model is cast to half precision: in bfloat16 sigmoid(beta) rounds to 1.

    Args:
        num_heads: H.
        settings: as `resolve_decay` returns them, without the name.
    """

    name: str
    SETTINGS: dict[str, Any] = {
        "init": "pretrain",
        "learn_alpha": True,  # False: alpha = 1 and no parameter
        "learn_beta": True,  # False: gamma stays as initialised
        "learn_prefix": False,  # True: a learned gamma for the rows and columns of prefix tokens instead of 1
    }

    def __init__(self, num_heads: int, **settings: Any) -> None:
        super().__init__()
        resolved = resolve_decay({"name": self.name, **settings})
        assert resolved is not None
        self.settings = resolved
        self.key = json.dumps(resolved, sort_keys=True)
        num_curves = self.positions(resolved, (1, 1)).shape[0]
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        self.alpha: nn.Parameter | None = None
        self.prefix_beta: nn.Parameter | None = None
        if resolved["learn_alpha"]:
            self.alpha = nn.Parameter(torch.empty(num_heads, dtype=dtype))
        beta = torch.empty(num_curves, num_heads, dtype=dtype)
        if resolved["learn_beta"]:
            self.beta = nn.Parameter(beta)
        else:
            self.register_buffer("beta", beta)
        if resolved["learn_prefix"]:
            self.prefix_beta = nn.Parameter(torch.empty(num_heads, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def positions(cls, settings: dict[str, Any], grid: tuple[int, int]) -> np.ndarray:
        """Integer positions (C, A, N) of the patches; the distance of two patches is the sum over the A axes."""
        raise NotImplementedError

    def initial_values(self) -> dict[str, Tensor]:
        """Fresh values of every scalar, drawn from torch's generator as `init` says."""
        mean, std, low, high = init_values(self.settings["init"])
        dtype = self.beta.dtype  # named, because loading in half precision makes that the default
        values = {"beta": torch.empty(self.beta.shape, dtype=dtype).uniform_(low, high)}
        if self.alpha is not None:
            values["alpha"] = mean + std * torch.randn(self.alpha.shape, dtype=dtype)
        if self.prefix_beta is not None:
            values["prefix_beta"] = torch.empty(self.prefix_beta.shape, dtype=dtype).uniform_(low, high)
        return values

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every scalar anew."""
        for name, value in self.initial_values().items():
            getattr(self, name).copy_(value)

    def forward(self) -> dict[str, Any]:
        """The decay as `ops.attention` takes it: settings and tensors in one dict."""
        return {**self.settings, "alpha": self.alpha, "beta": self.beta, "prefix_beta": self.prefix_beta}

    def no_weight_decay(self) -> set[str]:
        """Names of its parameters, none of which gets weight decay (timm's convention)."""
        return {name for name, _ in self.named_parameters()}

    def _apply(self, fn: Callable, recurse: bool = True) -> Decay:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(device=moved.device, dtype=torch.float32)
            return moved

        return super()._apply(keep_precision, recurse)

    def extra_repr(self) -> str:
        """What `print(model)` shows of the decay."""
        curves = f", curves={self.settings['curves']}" if "curves" in self.settings else ""
        return f"{self.name}, heads={self.beta.shape[1]}{curves}, init={self.settings['init']}"


@register_decay("violin")
class ViolinDecay(Decay):
    """Distance of two patches = difference of their ranks along each space-filling curve (VIOLIN Eq. 12).

    `curves` is any list of curve names, `_t` for the transposed ones; the default is the paper's set (Eq. 13).
    """

    SETTINGS = {
        "curves": [curve + suffix for curve in CURVES if curve != "z" for suffix in ("", TRANSPOSED_SUFFIX)],
        **Decay.SETTINGS,
    }

    @classmethod
    def positions(cls, settings: dict[str, Any], grid: tuple[int, int]) -> np.ndarray:
        """Ranks along each curve, (C, 1, N)."""
        curves = check_curves(settings.get("curves", cls.SETTINGS["curves"]))
        return np.stack([curve_rank(curve, grid).reshape(1, -1) for curve in curves])


@register_decay("manhattan")
class ManhattanDecay(Decay):
    """Distance of two patches = |row difference| + |column difference|, one gamma a head (VIOLIN Tables 7 and 13)."""

    @classmethod
    def positions(cls, settings: dict[str, Any], grid: tuple[int, int]) -> np.ndarray:
        """Rows and columns, (1, 2, N)."""
        return np.indices(grid).reshape(1, 2, -1)


def make_decay(decay: dict[str, Any], num_heads: int) -> Decay:
    """The module of a resolved decay for one layer."""
    return DECAYS[decay["name"]](num_heads, **{key: value for key, value in decay.items() if key != "name"})


# ---- values ---------------------------------------------------------------------------------------------------------


def decay_weights(beta_CH: Tensor, distance_C: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean over curves of gamma_c^distance, gamma_c = sigmoid(beta_c).

    Args:
        beta_CH: (C, H).
        distance_C: integer distances (C, ...), any shape behind C.
        dtype: of the result; computed in it, never below float32.

    Returns:
        (H, ...). Computed as exp(distance * logsigmoid(beta)): sigmoid(beta)**distance has a zero gradient in float32
        from about beta = 17 on.
    """
    compute = torch.promote_types(torch.promote_types(beta_CH.dtype, dtype), torch.float32)
    log_gamma_CH = F.logsigmoid(beta_CH.to(compute))
    distance_C = distance_C.to(compute)
    trailing = (1,) * (distance_C.dim() - 1)
    # One curve at a time: the (C, H, ...) array would be C times the size of the result.
    total = torch.exp(distance_C[0] * log_gamma_CH[0].view(-1, *trailing))
    for distance, log_gamma_H in zip(distance_C[1:], log_gamma_CH[1:], strict=True):
        total = total + torch.exp(distance * log_gamma_H.view(-1, *trailing))
    return (total / distance_C.shape[0]).to(dtype)


def pair_distances(positions_CAN: Tensor, dtype: torch.dtype) -> Tensor:
    """Distances (C, N, N) of all pairs of patches, whole numbers in a floating dtype of at least float32."""
    # Several times faster in floating point than in int64, and exact below 2^24.
    positions_CAN = positions_CAN.to(dtype)
    return (positions_CAN.unsqueeze(-1) - positions_CAN.unsqueeze(-2)).abs().sum(1)


def offset_distances(positions_CAN: Tensor, offset: int) -> Tensor:
    """Distances (C, N - offset) of the pairs (j, j + offset)."""
    count = positions_CAN.shape[-1] - offset
    return (positions_CAN[..., offset:] - positions_CAN[..., :count]).abs().sum(1)


def decay_mask(decay: dict[str, Any], positions_CAN: Tensor, dtype: torch.dtype) -> Tensor:
    """M (H, N, N) over the patch tokens."""
    return decay_weights(decay["beta"], pair_distances(positions_CAN, torch.promote_types(dtype, torch.float32)), dtype)


def prefix_weights(decay: dict[str, Any], dtype: torch.dtype) -> Tensor | None:
    """Learned gamma (H,) of the rows and columns of prefix tokens; None where they are 1."""
    beta_H = decay.get("prefix_beta")
    if beta_H is None:
        return None
    # exp(logsigmoid) for the gradient, as in decay_weights.
    return torch.exp(F.logsigmoid(beta_H.to(torch.promote_types(beta_H.dtype, dtype)))).to(dtype)
