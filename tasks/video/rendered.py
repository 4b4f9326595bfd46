"""Drawn videos in which the direction of time is visible: rings spread, wheels turn clockwise, drops fall.

In real videos of a few seconds most motion looks the same forward and backward. Here every thing moves one way only.
Which way it is shows in two frames and not in one: a ring may be of any size, a wheel at any angle, a drop anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FRAMES = 1500
THINGS = 10  # that are there at a time
SIDES = (8, 5)  # width to height


@dataclass(frozen=True)
class Thing:
    """Something that comes and goes.

    birth, life: frame that it appears in, and for how many frames it stays. row, column: its place, in heights of the
    frame. size: between 0 and 1. colours: (2, 3), from 0 to 1.
    """

    birth: int
    life: int
    row: float
    column: float
    size: float
    colours: np.ndarray


# What a scene draws: how much of each pixel a thing covers, (height, width), and where of that its second colour is.
Cover = tuple[np.ndarray, np.ndarray]


def ring(thing: Thing, age: int, rows: np.ndarray, columns: np.ndarray) -> Cover:
    """A ring that spreads at a constant speed, by 0.3 to 0.6 heights in its life."""
    radius = 0.03 + (0.3 + 0.3 * thing.size) * age / thing.life
    distance = np.hypot(rows - thing.row, columns - thing.column)
    return _soft(0.035 - np.abs(distance - radius), rows), np.zeros_like(rows)


def wheel(thing: Thing, age: int, rows: np.ndarray, columns: np.ndarray) -> Cover:
    """A wheel of two colours, one on a third of it, that turns clockwise, once in its life.

    It grows as it shrinks, so that its size does not tell the direction.
    """
    down, right = rows - thing.row, columns - thing.column
    angle = np.arctan2(down, right) - 2 * np.pi * (age / thing.life + thing.size)  # rows grow downwards
    third = np.cos(angle) > np.cos(np.pi / 3)
    radius = (0.18 + 0.12 * thing.size) * min(1.0, (age + 1) / 8, (thing.life - age) / 8)
    return _soft(radius - np.hypot(down, right), rows), third.astype(float)


def drop(thing: Thing, age: int, rows: np.ndarray, columns: np.ndarray) -> Cover:
    """A drop that falls from rest and accelerates, by one height in its life."""
    row = thing.row - 0.4 + (age / thing.life) ** 2
    distance = np.hypot(rows - row, columns - thing.column)
    return _soft(0.05 + 0.05 * thing.size - distance, rows), np.zeros_like(rows)


def _soft(inside: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Coverage of pixels from how far inside they are, with an edge of one pixel."""
    return np.clip(inside * len(rows) + 0.5, 0.0, 1.0)


SCENES: dict[str, Callable[[Thing, int, np.ndarray, np.ndarray], Cover]] = {
    "rings": ring,
    "wheels": wheel,
    "drops": drop,
}


def render(scene: str, height: int, frames: int = FRAMES) -> np.ndarray:
    """A video uint8 (frames, height, 1.6 height, 3), always the same, on a background that stands still.

    Args:
        scene: one of `SCENES`.
        height: in pixels.
        frames: its length.
    """
    generator = np.random.default_rng([list(SCENES).index(scene), 2])
    width = height * SIDES[0] // SIDES[1]
    rows, columns = (axis / height for axis in np.mgrid[:height, :width].astype(float))
    things = draw_things(generator, frames, width / height)
    video = np.repeat(background(generator, height, width)[None], frames, 0)
    for thing in things:
        for frame in range(max(thing.birth, 0), min(thing.birth + thing.life, frames)):
            cover, second = SCENES[scene](thing, frame - thing.birth, rows, columns)
            colour = thing.colours[0] + second[..., None] * (thing.colours[1] - thing.colours[0])
            video[frame] += cover[..., None] * (colour - video[frame])
    return np.round(255 * video).astype(np.uint8)


def draw_things(generator: np.random.Generator, frames: int, width: float) -> list[Thing]:
    """Things at random places and times, so many that `THINGS` are there at a time, older ones first."""
    life = 48
    births = np.sort(generator.integers(-life, frames, THINGS * (frames + life) // life))
    return [
        Thing(
            int(birth),
            life,
            generator.uniform(0, 1),
            generator.uniform(0, width),
            generator.uniform(0, 1),
            generator.uniform(0, 1, (2, 3)),
        )
        for birth in births
    ]


def background(generator: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Smooth coloured noise float (height, width, 3) of several scales, from 0 to 1, in which panning shows."""
    total = np.full((height, width, 3), 0.5)
    for cells, strength in ((4, 0.2), (10, 0.15), (25, 0.1)):
        coarse = generator.uniform(-1, 1, (cells + 1, 2 * cells + 1, 3))
        total += strength * _enlarged(_enlarged(coarse, height, 0), width, 1)
    return np.clip(total, 0.0, 1.0)


def _enlarged(values: np.ndarray, length: int, axis: int) -> np.ndarray:
    """Linear interpolation along an axis."""
    places = np.linspace(0, values.shape[axis] - 1, length)
    low = np.minimum(places.astype(int), values.shape[axis] - 2)
    share = (places - low).reshape([-1 if own == axis else 1 for own in range(values.ndim)])
    return values.take(low, axis) * (1 - share) + values.take(low + 1, axis) * share
