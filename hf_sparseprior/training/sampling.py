"""The order of an epoch, in which every sample knows its position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler


@dataclass(frozen=True, slots=True)
class Draw:
    """One sample of one epoch. What is random about it follows from these numbers and the run's seed alone, whatever
    process or worker prepares it.

    index: the image's. epoch: from 0. position: that in the epoch's order. repeat: number of the repetition in the
    epoch.
    """

    index: int
    epoch: int
    position: int
    repeat: int = 0

    def random(self, seed: int) -> np.random.Generator:
        """The generator of this sample's augmentation."""
        return np.random.default_rng([seed, self.epoch, self.index, self.repeat])


class DrawSampler(Sampler):
    """Yields a `Draw` for each sample of an epoch, in an order that seed and epoch alone decide.

    Args:
        num_samples: number of samples of the data set.
        seed: the run's seed.
        repeats: repeated augmentation (Hoffer et al. 2020, DeiT). Each image of the epoch comes this often, augmented
            differently. An epoch keeps its length, so it has 1 / repeats of the images. Repetitions of an image are
            close together, each next to another image, so that mixup pairs it with another one each time.
        multiple_of: an epoch ends at the last multiple of this number, so that every batch is a whole one.
        labels: (num_samples,) int64, the class of each sample, if an epoch has as many samples of each class. It keeps
            its length: samples of rare classes come several times, augmented differently, and of frequent ones not all.

    Raises:
        ValueError: for repeats below 1 or together with labels, and for less samples than one batch.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int = 0,
        repeats: int = 1,
        multiple_of: int = 1,
        labels: np.ndarray | None = None,
    ) -> None:
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise ValueError(f"repeats={repeats!r} must be an integer of 1 or more")
        if num_samples < multiple_of:
            raise ValueError(f"{num_samples} training images are less than one batch of {multiple_of}")
        if labels is not None and repeats > 1:
            raise ValueError(f"repeats={repeats} cannot be used with samples that are drawn by class")
        self.labels = labels
        self.num_samples = num_samples
        self.seed = seed
        self.repeats = repeats
        self.length = num_samples - num_samples % multiple_of
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        # "order", because [seed, epoch] alone, padded with zeros, would be the generator of image 0's augmentation.
        generator = np.random.default_rng([self.seed, epoch, *b"order"])
        if self.labels is not None:
            indices, times = (own[: self.length].tolist() for own in balanced_order(self.labels, generator))
            yield from (Draw(index, epoch, position, times[position]) for position, index in enumerate(indices))
            return
        order = generator.permutation(self.num_samples)
        if self.repeats == 1:
            yield from (Draw(int(index), epoch, position) for position, index in enumerate(order[: self.length]))
            return
        position, rounds = 0, round_robin(self.repeats)
        for start in range(0, self.num_samples, len(rounds[0])):
            images = order[start : start + len(rounds[0])]
            for repeat, places in enumerate(rounds):
                for place in places:
                    if position == self.length:
                        return
                    if place < len(images):
                        yield Draw(int(images[place]), epoch, position, repeat)
                        position += 1


def balanced_order(labels: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Indices of as many samples as there are, of each class the same number but for one, in random order; and how
    often each of them came before. None comes again before all of its class have come as often.
    """
    classes = generator.permutation(np.unique(labels))
    share, rest = divmod(len(labels), len(classes))
    indices, times = [], []
    for number, label in enumerate(classes):
        members, count = np.flatnonzero(labels == label), share + (number < rest)
        rounds = -(-count // len(members))
        indices.append(np.concatenate([generator.permutation(members) for _ in range(rounds)])[:count])
        times.append(np.repeat(np.arange(rounds), len(members))[:count])
    order = generator.permutation(len(labels))
    return np.concatenate(indices)[order], np.concatenate(times)[order]


def round_robin(rounds: int) -> list[list[int]]:
    """Orders of the fewest images in which those at 2i and 2i + 1 are another pair in every round (circle method)."""
    count = rounds + 1 + (rounds + 1) % 2
    circle = list(range(1, count))
    lines = [[0, *circle[turn:], *circle[:turn]] for turn in range(rounds)]
    return [[place for i in range(count // 2) for place in (line[i], line[-1 - i])] for line in lines]
