"""The search: times and losses of layers, the frontier, and the choice that meets the budget when it is measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from time import monotonic

import torch
from torch import Tensor

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.resolved import ResolvedPrior
from hf_sparseprior.priors.layer import PriorAttention
from hf_sparseprior.saving.saved_processor import MAX_SIDE
from hf_sparseprior.sparsification import timing
from hf_sparseprior.sparsification.candidates import Candidate
from hf_sparseprior.sparsification.choice import DENSE, UNITS, Point, frontier, least_loss, promising
from hf_sparseprior.sparsification.plan import Plan
from hf_sparseprior.sparsification.sensitivity import LayerChanged, dense_outputs, losses_of
from hf_sparseprior.sparsification.settings import Settings
from hf_sparseprior.sparsification.subject import Call, Layer, Subject, captured

WHOLE, ATTENTION, DENSE_SECONDS = "dense", "dense attention", "seconds of the dense model"
ROUNDS = 8  # of choosing and measuring at most
BY_PREDICTION = 2  # rounds after which every other one halves what is left between two choices
NEAR = 0.05  # of the budget; a measured choice that is further from it is corrected
MET = 1.05  # times the budget: what a measured choice may take
LATE = 1.1  # times the budget: what it may take when it is measured once more, else a faster one is chosen


@dataclass
class Search:
    """A search.

    candidates: numbered from 1 in choices, where `DENSE` stands for none. batches: calibration images. refused: why
    layers cannot have a candidate, by its name. rounds: (predicted, measured) shares of choices. gain: what choices
    save in the whole model, in units of what their layers save alone; gains: of each that was measured. dense_shares:
    of the dense model's time, of each layer's attention.
    """

    subject: Subject
    candidates: list[Candidate]
    settings: Settings
    plan: Plan
    batches: list[Tensor]
    say: Callable[[str], None]
    refused: dict[str, str] = field(default_factory=dict)
    rounds: list[tuple[float, float]] = field(default_factory=list)
    gain: float = 1.0
    gains: list[float] = field(default_factory=list)
    dense_shares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.priors = [
            [self._prior(layer, candidate) for candidate in self.candidates] for layer in self.subject.layers
        ]

    def _prior(self, layer: Layer, candidate: Candidate) -> ResolvedPrior | None:
        """The prior of a layer with a candidate; None if it cannot have it."""
        try:
            return self.subject.prior_of(layer, candidate)
        except ValueError as error:
            if layer.takes_support:
                self.refused[candidate.name] = str(error)
            return None

    def unused(self) -> dict[str, str]:
        """Candidates that are faster than dense attention in no layer or that no layer can have, and why."""
        reasons = {}
        for number, candidate in enumerate(self.candidates):
            if all(saved[number + 1] == -math.inf for saved in self.table):
                reasons[candidate.name] = self.refused.get(candidate.name, "it could not run when it was timed")
            elif all(saved[number + 1] * UNITS < 1 for saved in self.table):
                reasons[candidate.name] = "no faster than dense attention"
        return reasons

    # ---- times ------------------------------------------------------------------------------------------------------

    def shares(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Times of calls as shares of that of the dense model, which takes turns with them; of `DENSE_SECONDS` its
        seconds.
        """
        subject, pixels = self.subject, self.subject.images(self.settings.batch)
        every = {WHOLE: lambda: subject.outputs(pixels, subject.dense), **calls}
        times = timing.seconds_of_rounds(every, subject.device, self.settings.seconds)
        return {DENSE_SECONDS: median(times[WHOLE]), **timing.shares_of(times, WHOLE)}

    def savings(self) -> list[list[float]]:
        """For each layer and candidate the share of the dense model's time that it saves, by the times of its attention
        alone; the first candidate is dense.
        """
        calls = captured(self.subject, self.subject.images(self.settings.batch))
        kinds, savings = dict[str, int](), list[list[float]]()
        for number, call in enumerate(calls):
            first = kinds.setdefault(self._kind(number, call), number)
            name = f"shares of layer {first + 1}"
            if name not in self.plan:
                self.say(f"timing layer {first + 1} with {len(self.candidates)} candidates")
                self.plan.add(name, self.shares(self._calls(number, call)))
            shares = self.plan.values[name]
            dense, self.dense_seconds = shares[ATTENTION], shares[DENSE_SECONDS]
            self.dense_shares.append(dense)
            saved = [
                dense - shares[candidate.name] if candidate.name in shares else -math.inf
                for candidate in self.candidates
            ]
            savings.append([0.0, *saved])
        return savings

    def _kind(self, number: int, call: Call) -> str:
        """Layers of one kind take the same time."""
        layer = call.layer
        shapes = [tuple(weight.shape) for weight in layer.attention.parameters()]
        priors = [prior is not None for prior in self.priors[number]]
        described = [type(layer.attention).__name__, layer.dense.num_supports, layer.grid, layer.dense.prior, priors]
        return json.dumps([*described, shapes, call.shapes], default=str)

    def _calls(self, number: int, call: Call) -> dict[str, Callable[[], object]]:
        """Calls of a layer's attention, dense and with each candidate that it may have."""
        layer, calls = call.layer, dict[str, Callable[[], object]]({ATTENTION: call})
        for candidate, prior in zip(self.candidates, self.priors[number], strict=True):
            if prior is None:
                continue
            changed = partial(_with_pairs, layer.dense.with_pairs(prior), call)
            try:
                with torch.no_grad():
                    changed()  # makes tables, too
            except Exception as error:  # too little memory, no backend, or what a compiler of kernels says
                self.refused[candidate.name] = first_line(error)
            else:
                calls[candidate.name] = changed
        return calls

    # ---- losses -----------------------------------------------------------------------------------------------------

    def losses(self, savings: Sequence[Sequence[float]]) -> list[list[float]]:
        """For each layer and candidate the loss of the model with that layer changed.

        Infinite if it saves nothing, or if another one is clearly better on the first batch of images.
        """
        self.dense = dense_outputs(self.subject, self.batches)
        table, left = [], TimeLeft(len(savings))
        for number, saved in enumerate(savings):
            wanted = [index for index in range(1, len(saved)) if saved[index] * UNITS >= 1]
            names = {index: f"of layer {number + 1}: {self.candidates[index - 1].name}" for index in wanted}
            if any(f"first losses {name}" not in self.plan for name in names.values()):
                self.say(f"layer {number + 1} of {len(savings)}: loss of {len(wanted)} candidates{left}")
            changed, losses = LayerChanged(self.subject, number, self.batches, self.dense), [math.inf] * len(saved)
            priors = {index: prior for index in wanted if (prior := self.priors[number][index - 1]) is not None}
            first = {
                index: self._losses(f"first losses {names[index]}", partial(changed.losses, priors[index], [0]))
                for index in wanted
            }
            kept = promising([saved[index] for index in wanted], list(first.values()))
            for index in (index for index, keep in zip(wanted, kept, strict=True) if keep):
                others = partial(changed.losses, priors[index], range(1, len(self.batches)))
                rest = self._losses(f"other losses {names[index]}", others) if len(self.batches) > 1 else []
                losses[index] = fmean([*first[index], *rest])
            left.layer_done()
            table.append([0.0, *losses[1:]])
        return table

    def _losses(self, name: str, make: Callable[[], list[float]]) -> list[float]:
        """Losses on images, from the plan or measured now."""
        losses = self.plan.values[name] if name in self.plan else make()
        if odd := [loss for loss in losses if not math.isfinite(loss)]:
            raise ValueError(f"{name}: one is {odd[0]}; images and outputs must be finite")
        return self.plan.value(name, lambda: losses)

    def priors_of(self, choice: Sequence[int]) -> list[ResolvedPrior | None]:
        """The prior of each layer of a choice; None: dense, as it is."""
        return [None if index == DENSE else self.priors[number][index - 1] for number, index in enumerate(choice)]

    def loss(self, choice: Sequence[int]) -> float:
        """The loss of the model with all of a choice, on calibration images."""
        return fmean([*self.first_losses(choice), *self._losses_of(choice, "other", slice(1, None))])

    def first_losses(self, choice: Sequence[int]) -> list[float]:
        """On each image of the first batch."""
        return self._losses_of(choice, "first", slice(1))

    def _losses_of(self, choice: Sequence[int], which: str, part: slice) -> list[float]:
        batches, dense = self.batches[part], self.dense[part]
        if not batches:
            return []
        name = f"{which} losses of {_digits(choice)}"
        return self._losses(name, lambda: losses_of(self.subject, self.priors_of(choice), batches, dense))

    # ---- the choice -------------------------------------------------------------------------------------------------

    def points(self, budget: float) -> list[Point]:
        """The frontier of all budgets, by the times of layers alone.

        Raises:
            ValueError: for a budget that the fastest choice does not meet, before losses are computed.
        """
        self.table = self.savings()
        fastest = [max(range(len(saved)), key=saved.__getitem__) for saved in self.table]
        if (least := self.share(fastest)) > budget:
            raise ValueError(self._refusal(budget, least))
        return frontier(self.table, self.losses(self.table))

    def share(self, choice: Sequence[int], name: str = "choice") -> float:
        """The share of the dense model's time that the model with a choice takes, measured with it by turns."""
        if not any(choice):
            return 1.0
        return self.plan.value(f"share of {_digits(choice)}", partial(self._measure, choice, name))

    def share_again(self, choice: Sequence[int]) -> float:
        """The same, measured once more: a choice is made by a measurement, which chance made small."""
        if not any(choice):
            return 1.0
        return self.plan.value(f"share of {_digits(choice)}, again", partial(self._measure, choice, "choice"))

    def _measure(self, choice: Sequence[int], name: str) -> float:
        pixels, model = self.subject.images(self.settings.batch), self.subject.built(self.priors_of(choice))
        return self.ratio(f"{name} {_digits(choice)}", lambda: self.subject.outputs(pixels, model))

    def ratio(self, name: str, call: Callable[[], object]) -> float:
        """The time of a call as a share of the dense model's."""
        return self.shares({name: call})[name]

    def meet(self, points: Sequence[Point], budget: float) -> Point:
        """The choice of least loss that meets the budget when the whole model is measured.

        What layers save alone is not quite what they save in the model. So the fastest choice is measured first, and
        all savings are scaled by what it saves to what it should. Then the choice is made and measured, and made again
        with the scale that was measured so far, between a choice that meets the budget and one that does not, until
        the measured time is at most `NEAR` off the budget or `ROUNDS` are over. In the end the choice is measured once
        more, and where it is late then, the next faster one is made by the mean of both.

        Raises:
            ValueError: for a budget that the fastest choice does not meet.
        """
        exceeds, meets = -1, len(points) - 1  # numbers of the nearest points that are known to do so
        if (least := self._measured(points[meets])) > budget:
            raise ValueError(self._refusal(budget, least))
        for done in range(ROUNDS):
            if exceeds + 1 >= meets:
                break
            number = min(max(_aimed(points, budget, self.gain), exceeds + 1), meets - 1)
            if done >= BY_PREDICTION and done % 2 == 0:
                number = (exceeds + meets) // 2
            predicted = 1 - self.gain * (1 - points[number].share)
            share = self._measured(points[number])
            self.rounds.append((predicted, share))
            self.say(f"chosen: {predicted:.3f} of the dense model's time predicted, {share:.3f} measured")
            exceeds, meets = (exceeds, number) if share <= MET * budget else (number, meets)
            if abs(share - budget) <= NEAR * budget:
                break
        return self._confirmed(points, meets, budget)

    def _confirmed(self, points: Sequence[Point], number: int, budget: float) -> Point:
        """A choice that meets the budget twice; or the fastest one."""
        while number + 1 < len(points):
            point = points[number]
            share, again = self.share(point.choice), self.share_again(point.choice)
            if share <= MET * budget and again <= LATE * budget:
                break
            number = max(_aimed(points, budget, _gain(point, fmean((share, again)))), number + 1)
            self.say(f"measured once more, the choice takes {again:.3f} after {share:.3f}; a faster one is chosen")
        return points[number]

    def _measured(self, point: Point) -> float:
        """The share of a point, by which the predictions are corrected: the median of what was measured counts."""
        share = self.share(point.choice)
        if point.share < 1:
            self.gains.append(_gain(point, share))
            self.gain = median(self.gains)
        return share

    def _refusal(self, budget: float, least: float) -> str:
        """Why a budget is refused, with the image size that would meet it.

        Attention of C wide tokens, T that see each other, takes 4 T C^2 multiply-adds for projections and 2 T^2 C for
        pairs; the pairs' share q of the dense model's time grows with the square of the number of tokens, all else, and
        all of the sparse model, as the number. So with n times the tokens the least share is least / (1 - q + n q).
        """
        (height, width), pairs, fastest = self.subject.sides, 0.0, 1.0
        where = f"at {height}x{width} pixels, {self.settings.batch} at once, on this machine"
        if (least := math.ceil(100 * least) / 100) >= 1:
            return f"budget={budget} cannot be met: no choice is faster than dense attention {where}; try larger images"
        for layer, share, saved in zip(self.subject.layers, self.dense_shares, self.table, strict=True):
            tokens = math.prod(layer.grid)
            if layer in self.subject.see_all:
                pairs += share * tokens / (tokens + 2 * layer.width)
            fastest -= max((share_saved for share_saved in saved[1:] if share_saved > -math.inf), default=0.0)
        text = f"budget={budget} must be {least} or more {where}"
        if pairs < 0.001:
            return f"{text}; larger images would not change that, as layers see windows alone"
        growth = (min(least, fastest) / budget - 1 + pairs) / pairs
        sides = [math.ceil(side * math.sqrt(max(growth, 1.0)) / 32) * 32 for side in (height, width)]
        if growth <= 1 or max(sides) > MAX_SIDE:
            return text
        return f"{text}; at about {sides[0]}x{sides[1]} it could be met (an estimate, by how attention grows)"


def _gain(point: Point, share: float) -> float:
    """What a choice that takes this share saves in the whole model, in units of what its layers save alone."""
    return max(1 - share, 1e-6) / (1 - point.share)


def _aimed(points: Sequence[Point], budget: float, gain: float) -> int:
    """Number of the point of least loss that would meet the budget with this gain; of the fastest if none would."""
    point = least_loss(points, 1 - (1 - budget) / gain)
    return len(points) - 1 if point is None else points.index(point)


class TimeLeft:
    """How long the layers that are left will take, by those that were done. A layer takes the longer the more blocks
    come after it. Its text begins with a semicolon, and is empty where nothing is known.
    """

    def __init__(self, layers: int) -> None:
        self.layers, self.done, self.began = layers, 0, monotonic()

    def layer_done(self) -> None:
        """Another layer is done."""
        self.done += 1

    def __str__(self) -> str:
        seconds, left = monotonic() - self.began, self.layers - self.done
        if not self.done or seconds < 1:  # done before
            return ""
        blocks = self.layers * (self.layers + 1) - left * (left + 1)
        return f"; about {max(1, round(seconds / blocks * left * (left + 1) / 60))} min left for losses"


def _with_pairs(after: PriorAttention, call: Call) -> object:
    with call.layer.changed(after):
        return call()


def _digits(choice: Sequence[int]) -> str:
    return ",".join(map(str, choice))
