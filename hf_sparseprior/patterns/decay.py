"""Decays: learned weights of pairs of patches that multiply the attention logits before the softmax.

Y = softmax(alpha * Q K^T / sqrt(d_h) * M) V, elementwise product, with M = mean over curves c of
gamma_c^|position_c(j) - position_c(k)| and gamma_c = sigmoid(beta_c) (VIOLIN Eqs. 12 and 13). `register_decay` makes a
class a value of `prior`; the class only says along which positions it measures distances. `PLACEMENTS` says where else
M may act.

Shape letters: B batch, H heads, C curves, A axes of a position, N patch tokens, P prefix tokens, T = P + N.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_sparseprior.base.checks import (
    check_boolean,
    check_integer,
    check_keys,
    did_you_mean,
    python_value,
    split_spec,
)
from hf_sparseprior.base.layer_sizes import HEADS, UnitAxes
from hf_sparseprior.base.limits import check_sides
from hf_sparseprior.base.registry import registering
from hf_sparseprior.base.resolved import DecayTensors, Placement, ResolvedDecay, Settings
from hf_sparseprior.patterns.curves import CURVES, TRANSPOSED_SUFFIX, curve_names, curve_rank

DECAYS: dict[str, type[Decay]] = {}


class Init(NamedTuple):
    """How the scalars of a decay start: alpha ~ N(alpha_mean, alpha_std), beta ~ U(beta_low, beta_high), and to beta
    N(0, beta_std) is added.
    """

    alpha_mean: float
    alpha_std: float
    beta_low: float
    beta_high: float
    beta_std: float = 0.0


INIT_PRESETS: dict[str, Init] = {
    "pretrain": Init(1.0, 0.0, 5.0, 9.0),  # VIOLIN D.1: beta ~ U(5, 9)
    "pretrain_gamma": Init(1.0, 0.0, 4.0, 8.5),  # the interval of gamma that D.1 prints, (0.9820, 0.9998)
    "pretrain_published": Init(0.0, 0.5, 5.0, 9.0),  # the authors' DeiT and DINO code; the paper is silent on alpha
    "finetune": Init(1.0, 0.02, 15.0, 20.0),  # VIOLIN D.1: alpha around 1, beta ~ U(15, 20); the mask hardly moves
    "moving": Init(1.0, 0.0, 6.0, 8.0),  # ours: for fine-tuning with a mask that is visibly below 1 and can move
    # ours: the base model to 1e-5; only alpha moves, because gradients of beta vanish
    "identity": Init(1.0, 0.0, 20.0, 20.0),
    # ours: the base model to 1e-5, and M moves: a gate that starts near 0 multiplies log gamma of `moving`
    "growing": Init(1.0, 0.0, 6.0, 8.0),
    # VIOLIN Table 15, first row, names no values: ours is beta = 0, so gamma = 0.5; the authors' code draws both.
    "zeros": Init(1.0, 0.0, 0.0, 0.0),
    "zeros_published": Init(0.0, 0.5, 0.0, 0.0, 0.5),
}
GROWING = "growing"
GATE_START = 1e-6  # |M - 1| <= GATE_START * exp(-6) * distance: 5e-7 on 14x14 patches
INIT_KEYS = ("alpha_mean", "alpha_std", "beta_low", "beta_high")
ALPHA_SCALES = ("logits", "mask")

# Where M acts, with A = alpha * Q K^T / sqrt(d_h) and S the softmax (VIOLIN Table 14). Decays of adapters start at M =
# 1, where all but the last two leave a pretrained model as it is. With alpha_scales="mask" A is without alpha and M is
# alpha * M, as in the authors' code; in a product both are the same.
PLACEMENTS: dict[Placement, str] = {
    "multiply": "S(A * M)",  # VIOLIN Eq. 12
    # S(A + M), which is the same: a constant that is added to all logits does not change a softmax. In this form it
    # starts as the base model also with mask_fill="zero".
    "add": "S(A + (M - 1))",
    "multiply_after": "S(A) * M",
    # Table 14's S(A) + M without the sum of all values, a vector that is the same for all queries: with it no
    # pretrained model would start as itself.
    "add_after": "S(A) + (M - 1)",
    "add_after_as_printed": "S(A) + M",
    "residual": "S(A * (1 + M))",  # S(2 A) at the start
}


def register_decay(name: str) -> Callable[[type[Decay]], type[Decay]]:
    """Register a subclass of `Decay` under `name`."""
    return registering("decay", DECAYS, name)


def resolve_decay(
    decay: str | Mapping[str, Any] | ResolvedDecay | None, grid: Sequence[int] | None = None
) -> ResolvedDecay | None:
    """The full form of a decay: its name with every setting, checked; None for no decay.

    Args:
        decay: name, or a dict of the name with settings.
        grid: (height, width) of the patches, or (frames, height, width). Decays that keep a value for each patch take
            it, if they have no `grid`.

    Raises:
        ValueError: the message has the field, the value and what is allowed.
    """
    if decay is None:
        return None
    name, spec = split_spec(decay, "decay", ["none", *DECAYS])
    if name == "none":
        check_keys(spec, [], "decay 'none'")
        return None
    if grid is not None and len(grid) == 3 and not DECAYS[name].SEES_TIME:
        raise ValueError(f"decay {name!r} measures in two dimensions; with it time must be 'frame' or 'axes'")
    settings = dict(DECAYS[name].SETTINGS)
    check_keys(spec, list(settings), f"decay {name!r}")
    settings.update(spec)
    return cast("ResolvedDecay", {"name": name, **DECAYS[name].check_settings(settings, grid)})


def check_curves(curves: Sequence[str]) -> list[str]:
    """Curve names as a list without repeats, each one known."""
    if isinstance(curves, str) or not isinstance(curves, Sequence) or not curves:
        raise ValueError(f"curves={curves!r} must be a list of at least one of {', '.join(curve_names())}")
    for curve in curves:
        if curve not in curve_names():
            hint = did_you_mean(curve, curve_names())
            raise ValueError(f"curves: {curve!r} must be one of {', '.join(curve_names())}{hint}")
    if len(set(curves)) != len(curves):
        raise ValueError(f"curves={list(curves)!r} must not repeat a curve")
    return list(curves)


def check_placement(placement: Any) -> Placement:
    """A name of `PLACEMENTS`."""
    if not isinstance(placement, str) or placement not in PLACEMENTS:
        names = ", ".join(f"{name} ({formula})" for name, formula in PLACEMENTS.items())
        raise ValueError(f"placement={placement!r} must be one of {names}{did_you_mean(placement, PLACEMENTS)}")
    return placement


def check_alpha_scales(scaled: Any) -> str:
    """A name of `ALPHA_SCALES`."""
    if scaled not in ALPHA_SCALES:
        raise ValueError(f"alpha_scales={scaled!r} must be one of {', '.join(ALPHA_SCALES)}")
    return str(scaled)


def check_gamma(gamma: float | None) -> float | None:
    """None, or a number above 0 and below 1."""
    gamma = python_value(gamma)
    number = isinstance(gamma, float) and 0.0 < gamma < 1.0
    if gamma is not None and not number:
        raise ValueError(f"gamma={gamma!r} must be a number above 0 and below 1, or None for what init says")
    return gamma


def check_start(start: str) -> str:
    """The name of a curve, or "random"."""
    if not isinstance(start, str) or start not in (*curve_names(), "random"):
        hint = did_you_mean(start, ("random", *curve_names()))
        raise ValueError(f"start={start!r} must be one of random, {', '.join(curve_names())}{hint}")
    return start


def init_values(init: str | Mapping[str, float]) -> Init:
    """The values of a preset's name, or of a dict with those of `INIT_KEYS` and perhaps `beta_std`."""
    allowed = f"one of {', '.join(INIT_PRESETS)}, or a dict of {INIT_KEYS}"
    if isinstance(init, str) and init in INIT_PRESETS:
        return INIT_PRESETS[init]
    if not isinstance(init, Mapping):
        raise ValueError(f"init={init!r} must be {allowed}{did_you_mean(init, INIT_PRESETS)}")
    check_keys(init, Init._fields, "decay init")
    if missing := [key for key in INIT_KEYS if key not in init]:
        raise ValueError(f"init={init!r} lacks {', '.join(missing)}")
    numbers = {key: python_value(value) for key, value in init.items()}
    if all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers.values()):
        values = Init(**{key: float(number) for key, number in numbers.items()})
        if values.alpha_std >= 0 and values.beta_std >= 0 and values.beta_low <= values.beta_high:
            return values
    raise ValueError(
        f"init={init!r} needs finite numbers, alpha_std and beta_std of 0 or more, beta_low not above beta_high"
    )


def initial_beta(settings: Settings) -> tuple[float, float, float]:
    """(low, high, std) of beta ~ U(low, high) + N(0, std): those of `init`, or a single point if `gamma` is given."""
    if settings["gamma"] is None:
        return init_values(settings["init"])[2:]
    beta = math.log(settings["gamma"]) - math.log1p(-settings["gamma"])
    return beta, beta, 0.0


def drawn_beta(shape: torch.Size, dtype: torch.dtype, start: tuple[float, float, float]) -> Tensor:
    """beta ~ U(low, high) + N(0, std), from torch's generator."""
    low, high, std = start
    beta = torch.empty(shape, dtype=dtype).uniform_(low, high)
    return beta + std * torch.randn(beta.shape, dtype=dtype) if std else beta


def gated_beta(beta: Tensor, gate: Tensor) -> Tensor:
    """The beta of gamma^|gate|, for beta (..., H) and gate (H,): log sigmoid of it is |gate| * log sigmoid(beta).

    Its gradient by the gate is that of -log gamma, which does not vanish where the gate is near 0.
    """
    rate = gate.abs().clamp_min(1e-9) * F.softplus(-beta)  # -log gamma, above 0
    # log(e^rate - 1), for small rates by its series, because e^rate - 1 has few digits there. Both parts are finite.
    small, large = rate.clamp_max(0.5), rate.clamp_min(0.25)
    series = rate.log() + small / 2 + small.square() / 24 - small.pow(4) / 2880
    return -torch.where(rate < 0.5, series, large + torch.log1p(-torch.exp(-large)))


class Decay(nn.Module):
    """The learned scalars of one layer's decay: alpha (H,) and beta (C, H), both float32 or float64.

    With `init` "growing" also gate (H,), with which gamma is sigmoid(beta)^|gate|. It starts near 0, so M starts at 1.
    It is for adapters and fine-tuning: M is of the same form (`gated_beta`), and moves by steps of a usual learning
    rate, where beta would have to come from 20 to 8.

    They stay in at least float32 when the model is cast to half precision, because in bfloat16 sigmoid(beta) rounds to
    1.

    A subclass has its own SETTINGS with defaults (a superset of these), `check_settings` for them, and `positions`. If
    it learns more than alpha and beta, it also has TENSORS and `tensor_shapes`. With SEES_TIME it takes grids (frames,
    height, width) of clips, too.

    Args:
        num_heads: H.
        settings: as `resolve_decay` returns them.
    """

    name: str
    SEES_TIME: ClassVar[bool] = False
    UNIT_AXES: UnitAxes = {
        **dict.fromkeys(("alpha", "prefix_beta", "gate"), ((HEADS,),)),
        "beta": ((), (HEADS,)),
    }
    # The tensors that `ops.attention` takes in addition to the settings.
    TENSORS: tuple[str, ...] = ("alpha", "beta", "prefix_beta")
    SETTINGS: dict[str, Any] = {
        "init": "pretrain",
        "learn_alpha": True,  # False: alpha = 1 and no parameter
        "learn_beta": True,  # False: gamma stays as initialised
        "learn_prefix": False,  # True: a learned gamma for the rows and columns of prefix tokens instead of 1
        "placement": "multiply",  # one of PLACEMENTS
        "alpha_scales": "logits",  # or "mask": what alpha is a factor of
        "gamma": None,  # a number: gamma of every curve and head at the start, which replaces init's beta
    }

    def __init__(self, num_heads: int, settings: ResolvedDecay) -> None:
        super().__init__()
        self.settings: Settings = cast("Settings", settings)
        self.key = json.dumps(settings, sort_keys=True)
        num_curves = self.positions(self.settings, (1, 1)).shape[0]
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        self.alpha: nn.Parameter | None = None
        self.prefix_beta: nn.Parameter | None = None
        self.gate: nn.Parameter | None = None
        if settings["learn_alpha"]:
            self.alpha = nn.Parameter(torch.empty(num_heads, dtype=dtype))
        beta = torch.empty(num_curves, num_heads, dtype=dtype)
        if settings["learn_beta"]:
            self.beta = nn.Parameter(beta)
        else:
            self.register_buffer("beta", beta)
        if settings["learn_prefix"]:
            self.prefix_beta = nn.Parameter(torch.empty(num_heads, dtype=dtype))
        if settings["init"] == GROWING:
            self.gate = nn.Parameter(torch.empty(num_heads, dtype=dtype))
        self.add_parameters()
        self.reset_parameters()

    def add_parameters(self) -> None:
        """Make the other parameters of a subclass; `initial_values` has to give their values."""

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int] | None) -> Settings:
        """The settings with their values checked, for a patch grid (height, width) if there is one.

        Raises:
            ValueError: the message has the setting, the value and what is allowed.
        """
        checked = dict(settings)
        for key in ("learn_alpha", "learn_beta", "learn_prefix"):
            checked[key] = check_boolean(f"decay {cls.name!r}: {key}", settings[key])
        init_values(settings["init"])
        if isinstance(settings["init"], Mapping):
            checked["init"] = {key: python_value(value) for key, value in settings["init"].items()}
        if settings["init"] == GROWING and not (settings["gamma"] is None and checked["learn_beta"]):
            raise ValueError(
                f"decay {cls.name!r}: init={GROWING!r} starts at M = 1 and learns how fast M falls; it needs "
                f"learn_beta=True and gamma=None, got {checked['learn_beta']} and {settings['gamma']!r}"
            )
        return {
            **checked,
            "placement": check_placement(settings["placement"]),
            "alpha_scales": check_alpha_scales(settings["alpha_scales"]),
            "gamma": check_gamma(settings["gamma"]),
        }

    @classmethod
    def positions(cls, settings: Settings, grid: tuple[int, ...]) -> np.ndarray:
        """Integer positions (C, A, N) of the patches; the distance of two patches is the sum over the A axes."""
        raise NotImplementedError

    @classmethod
    def learns_positions(cls, decay: Settings) -> bool:
        """Whether the distances follow from the decay's tensors (`learned_positions`), not from `positions`."""
        return False

    @classmethod
    def learned_positions(cls, decay: Settings, grid: tuple[int, ...]) -> Tensor:
        """Positions (C, A, N) that follow from the decay's tensors."""
        raise NotImplementedError

    @classmethod
    def tensor_shapes(cls, settings: Settings, num_heads: int) -> dict[str, tuple[int | str, ...]]:
        """Shapes of TENSORS; a name in place of a number means any size."""
        num_curves = cls.positions(settings, (1, 1)).shape[0]
        return {"alpha": (num_heads,), "beta": (num_curves, num_heads), "prefix_beta": (num_heads,)}

    def initial_values(self) -> dict[str, Tensor]:
        """Initial values of every scalar, drawn from torch's generator as `init` says."""
        init = init_values(self.settings["init"])
        dtype = self.beta.dtype  # given, because loading in half precision makes that the default dtype
        values = {"beta": drawn_beta(self.beta.shape, dtype, initial_beta(self.settings))}
        if self.alpha is not None:
            values["alpha"] = init.alpha_mean + init.alpha_std * torch.randn(self.alpha.shape, dtype=dtype)
        if self.prefix_beta is not None:
            values["prefix_beta"] = drawn_beta(self.prefix_beta.shape, dtype, init[2:])
        if self.gate is not None:
            values["gate"] = torch.full(self.gate.shape, GATE_START, dtype=dtype)
        return values

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every scalar anew."""
        for name, value in self.initial_values().items():
            getattr(self, name).copy_(value)

    def forward(self) -> DecayTensors:
        """The decay as `ops.attention` takes it: settings and tensors in one dict, a gate already in beta."""
        beta: Tensor | None = self.beta
        betas = [beta, self.prefix_beta]
        if self.gate is not None:
            betas = [None if beta is None else gated_beta(beta, self.gate) for beta in betas]
        tensors = dict(self.settings, alpha=self.alpha, beta=betas[0], prefix_beta=betas[1])
        return cast("DecayTensors", tensors)

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

    SEES_TIME = True
    SETTINGS = {
        "curves": [curve + suffix for curve in CURVES if curve != "z" for suffix in ("", TRANSPOSED_SUFFIX)],
        **Decay.SETTINGS,
    }

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int] | None) -> Settings:
        """As for every decay, and `curves`."""
        checked, curves = super().check_settings(settings, grid), check_curves(settings["curves"])
        if grid is not None and len(grid) == 3:
            for curve in curves:
                curve_rank(curve, (1, 1, 1))  # raises if it has two dimensions only
        return {**checked, "curves": curves}

    @classmethod
    def positions(cls, settings: Settings, grid: tuple[int, ...]) -> np.ndarray:
        """Ranks along each curve, (C, 1, N)."""
        curves = check_curves(settings.get("curves", cls.SETTINGS["curves"]))
        ranks: dict[str, np.ndarray] = {}
        for curve in curves:
            base = curve.removesuffix(TRANSPOSED_SUFFIX)
            square = base in ranks and grid[-2] == grid[-1]
            ranks[curve] = ranks[base].swapaxes(-1, -2) if square else curve_rank(curve, grid)
        return np.stack([rank.reshape(1, -1) for rank in ranks.values()])


@register_decay("manhattan")
class ManhattanDecay(Decay):
    """Distance of two patches = |row difference| + |column difference|, one gamma a head (VIOLIN Tables 7 and 13).

    In a clip with time "clip" the difference in frames is added, which is what "axes" does.

    DeiT-B has 288 scalars. Table 7 says ~0.4K, which is 432 with a second gamma for the transpose (`with_transpose`),
    although the distance there is the same.
    """

    SEES_TIME = True
    SETTINGS = {"with_transpose": False, **Decay.SETTINGS}

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int] | None) -> Settings:
        """As for every decay, and `with_transpose`."""
        checked = super().check_settings(settings, grid)
        return {**checked, "with_transpose": check_boolean("with_transpose", settings["with_transpose"])}

    @classmethod
    def positions(cls, settings: Settings, grid: tuple[int, ...]) -> np.ndarray:
        """Rows and columns, (1, 2, N), in a clip also frames, (1, 3, N); with the transpose (2, 2 or 3, N)."""
        indices = np.indices(grid).reshape(1, len(grid), -1)
        return np.concatenate([indices, indices[:, ::-1]]) if settings.get("with_transpose") else indices


def random_rank(grid: tuple[int, ...], seed: int) -> np.ndarray:
    """Rank of every patch in a random order, int64 of the grid's shape; the same on every platform."""
    order = list(range(math.prod(grid)))
    random.Random(seed).shuffle(order)
    return np.reshape(order, grid)


def transposed_rank(rank: np.ndarray) -> np.ndarray:
    """The same order on the grid with rows and columns swapped, seen at (column, row), int64 of the grid's shape."""
    *frames, height, width = rank.shape
    return rank.reshape(*frames, width, height).swapaxes(-1, -2)


@register_decay("random_order")
class RandomOrderDecay(Decay):
    """Distance of two patches = difference of their ranks in a random order (VIOLIN Tables 7 and 13, M_Random).

    All layers and heads have one order, as in appendix E.2. It is used with its transpose, as a curve is (432 scalars
    on DeiT-B). Another grid has another order, because a permutation cannot be interpolated.
    """

    SEES_TIME = True
    SETTINGS = {"seed": 0, "with_transpose": True, **Decay.SETTINGS}

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int] | None) -> Settings:
        """As for every decay, `seed` and `with_transpose`."""
        checked = super().check_settings(settings, grid)
        seed = check_integer("seed", settings["seed"], 0)
        with_transpose = check_boolean("with_transpose", settings["with_transpose"])
        return {**checked, "seed": seed, "with_transpose": with_transpose}

    @classmethod
    def positions(cls, settings: Settings, grid: tuple[int, ...]) -> np.ndarray:
        """Random ranks, (1, 1, N); with the transpose (2, 1, N)."""
        seed, with_transpose = (settings.get(key, cls.SETTINGS[key]) for key in ("seed", "with_transpose"))
        rank = random_rank(grid, seed)
        ranks = [rank, transposed_rank(rank)] if with_transpose else [rank]
        return np.stack([rank.reshape(1, -1) for rank in ranks])


@register_decay("learned_order")
class LearnedOrderDecay(Decay):
    """Distance of two patches = difference of their learned positions along a line (VIOLIN appendix F.7, Table 25).

    The paper does not say how its order is learned. Ours is the simplest form with a gradient: a real number p for each
    patch and layer, with M = gamma^|p_j - p_k|. It starts as the rank along a curve or in a random order. On another
    grid the numbers are interpolated and scaled to its number of patches.
    """

    SEES_TIME = True
    # start: a curve, or "random" with `seed`. grid: (height, width) of the numbers, None for that of the model.
    SETTINGS = {"start": "z", "seed": 0, "grid": None, **Decay.SETTINGS}
    TENSORS = (*Decay.TENSORS, "order")
    UNIT_AXES = {**Decay.UNIT_AXES, "order": ()}

    @classmethod
    def check_settings(cls, settings: Settings, grid: Sequence[int] | None) -> Settings:
        """As for every decay, `seed`, `start` and `grid`, which is the model's if it is None."""
        checked = super().check_settings(settings, grid)
        own_grid = grid if settings["grid"] is None else settings["grid"]
        sides = None if own_grid is None else check_sides("learned_order", own_grid, grid)
        seed, start = check_integer("seed", settings["seed"], 0), check_start(settings["start"])
        return {**checked, "seed": seed, "start": start, "grid": sides}

    def add_parameters(self) -> None:
        """The positions, (1, height, width) or (1, frames, height, width)."""
        grid = self.settings["grid"]
        if grid is None:
            raise ValueError("learned_order: grid=None must be (height, width), it has a position for each patch")
        self.order = nn.Parameter(torch.empty(1, *grid, dtype=self.beta.dtype))

    @classmethod
    def positions(cls, settings: Settings, grid: tuple[int, ...]) -> np.ndarray:
        """The ranks with which the positions start, (1, 1, N)."""
        start, seed = (settings.get(key, cls.SETTINGS[key]) for key in ("start", "seed"))
        rank = random_rank(grid, seed) if start == "random" else curve_rank(start, grid)
        return rank.reshape(1, 1, -1)

    @classmethod
    def learns_positions(cls, decay: Settings) -> bool:
        """True if the tensors have an "order"; without one it is the order at the start."""
        return decay.get("order") is not None

    @classmethod
    def learned_positions(cls, decay: Settings, grid: tuple[int, ...]) -> Tensor:
        """The decay's "order" on this grid."""
        return resized_order(decay["order"], grid)

    @classmethod
    def tensor_shapes(cls, settings: Settings, num_heads: int) -> dict[str, tuple[int | str, ...]]:
        """As for every decay, and "order"."""
        frames = ("frames",) if len(settings["grid"] or ()) == 3 else ()
        return {**super().tensor_shapes(settings, num_heads), "order": (1, *frames, "height", "width")}

    def initial_values(self) -> dict[str, Tensor]:
        """As for every decay, and the positions."""
        grid = tuple(self.settings["grid"])
        order = torch.tensor(self.positions(self.settings, grid), dtype=self.beta.dtype)
        return {**super().initial_values(), "order": order.view(1, *grid)}

    def forward(self) -> DecayTensors:
        """As for every decay, and the positions "order" (1, height, width) or (1, frames, height, width)."""
        return {**super().forward(), "order": self.order}


def resized_order(order: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Learned positions (C, height, width) or (C, frames, height, width) as positions (C, 1, N) on a grid: bilinear or
    trilinear, with corners aligned.

    Raises:
        ValueError: for positions of one frame on the grid of a clip, or the other way round.
    """
    curves, *sides = order.shape
    if len(sides) != len(grid):
        raise ValueError(f"learned_order: grid={sides} must have as many sides as the patches' {tuple(grid)}")
    if tuple(sides) != tuple(grid):
        stretch = max(1, math.prod(grid) - 1) / max(1, math.prod(sides) - 1)
        mode = "bilinear" if len(grid) == 2 else "trilinear"
        order = F.interpolate(order.unsqueeze(0), size=grid, mode=mode, align_corners=True)[0] * stretch
    return order.reshape(curves, 1, -1)


def make_decay(decay: ResolvedDecay, num_heads: int) -> Decay:
    """The module of a resolved decay for one layer."""
    return DECAYS[decay["name"]](num_heads, decay)


def check_decay_tensors(decay: Settings, num_heads: int) -> DecayTensors:
    """A decay that is given with tensors, after its defaults are filled in.

    Raises:
        ValueError: the message has what is missing or does not fit, and what is allowed.
    """
    name, given = split_spec(decay, "decay", DECAYS)
    kind = DECAYS[name]
    check_keys(given, [*kind.SETTINGS, *kind.TENSORS], f"decay {name!r}")
    settings = {key: given.get(key, default) for key, default in kind.SETTINGS.items()}
    settings = {"name": name, **kind.check_settings(settings, None)}
    tensors = {key: given[key] for key in kind.TENSORS if key in given}
    for key, shape in kind.tensor_shapes(settings, num_heads).items():
        tensor: Any = tensors.get(key)
        if tensor is None and key != "beta":
            continue
        fits = isinstance(tensor, Tensor) and tensor.dim() == len(shape)
        if not fits or any(want not in (have, str(want)) for want, have in zip(shape, tensor.shape, strict=True)):
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise ValueError(f"decay {key}={got} must be a tensor of shape {str(shape).replace(chr(39), '')}")
    return cast("DecayTensors", {**settings, **tensors})


def decay_settings(decay: DecayTensors | None) -> ResolvedDecay | None:
    """A decay without its tensors."""
    if decay is None:
        return None
    settings = {key: value for key, value in decay.items() if not isinstance(value, Tensor)}
    return cast("ResolvedDecay", settings)


# ---- values ---------------------------------------------------------------------------------------------------------


def log_gamma(beta: Tensor) -> Tensor:
    """Logarithm of gamma = sigmoid(beta), finite also where gamma is 0 (beta = -inf): gamma^0 is then 1, not NaN."""
    return F.logsigmoid(beta).clamp_min(-1e30)


def decay_weights(beta_CH: Tensor, distance_C: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean over curves of gamma_c^distance, gamma_c = sigmoid(beta_c).

    Args:
        beta_CH: (C, H).
        distance_C: distances (C, ...), any shape after C; integers, or real numbers of a learned order.
        dtype: dtype of the computation and of the result, never below float32.

    Returns:
        (H, ...), computed as exp(distance * logsigmoid(beta)), because in float32 sigmoid(beta)**distance has a zero
        gradient from about beta = 17 on.
    """
    compute = torch.promote_types(torch.promote_types(beta_CH.dtype, dtype), torch.float32)
    log_gamma_CH = log_gamma(beta_CH.to(compute))
    distance_C = distance_C.to(compute)
    trailing = (1,) * (distance_C.dim() - 1)
    # One curve at a time, because the (C, H, ...) array would be C times as large as the result.
    total = torch.exp(distance_C[0] * log_gamma_CH[0].view(-1, *trailing))
    for distance, log_gamma_H in zip(distance_C[1:], log_gamma_CH[1:], strict=True):
        total = total + torch.exp(distance * log_gamma_H.view(-1, *trailing))
    return (total / distance_C.shape[0]).to(dtype)


def pair_distances(positions_CAN: Tensor, dtype: torch.dtype) -> Tensor:
    """Distances (C, N, N) of all pairs of patches in a floating dtype of at least float32."""
    # Floating point is several times faster than int64, and exact below 2^24.
    positions_CAN = positions_CAN.to(dtype)
    return (positions_CAN.unsqueeze(-1) - positions_CAN.unsqueeze(-2)).abs().sum(1)


def offset_distances(positions_CAN: Tensor, offset: int) -> Tensor:
    """Distances (C, N - offset) of the pairs (j, j + offset)."""
    count = positions_CAN.shape[-1] - offset
    return (positions_CAN[..., offset:] - positions_CAN[..., :count]).abs().sum(1)


def decay_mask(decay: DecayTensors, positions_CAN: Tensor, dtype: torch.dtype) -> Tensor:
    """M (H, N, N) over the patch tokens."""
    return decay_weights(decay["beta"], pair_distances(positions_CAN, torch.promote_types(dtype, torch.float32)), dtype)


def prefix_weights(decay: DecayTensors, dtype: torch.dtype) -> Tensor | None:
    """Learned gamma (H,) of the rows and columns of prefix tokens; None if they are 1."""
    beta_H = decay.get("prefix_beta")
    if beta_H is None:
        return None
    # exp(logsigmoid) for the gradient, as in decay_weights.
    return torch.exp(F.logsigmoid(beta_H.to(torch.promote_types(beta_H.dtype, dtype)))).to(dtype)
