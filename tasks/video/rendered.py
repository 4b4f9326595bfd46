"""Drawn videos in which the direction of time is visible: everything falls, spreads from centres, or turns clockwise.

In real videos of a few seconds most motion looks the same forward and backward. Here every pixel moves one way only: a
texture falls, spreads from the nearest centre, or turns clockwise around it. A video has many short shots, each with
another texture and other centres, so that it does not repeat itself. No single frame tells the direction.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.ndimage import map_coordinates

FRAMES = 3000
SHOT = 15  # frames
SIDES = (8, 5)  # width to height
SPEED = 0.0125  # heights a frame
CELL = 0.1  # heights that a cell of the texture has
AROUND = 12  # cells of the texture around a centre
TURN = SPEED / 0.25  # radians a frame: at a quarter of the height from a centre the speed is `SPEED`
CENTRES = 4

# Where on the texture a pixel is, in its cells, down (or out) and across (or around); of its row and column, and its
# distance and angle, clockwise, from the nearest centre.
Place = tuple[np.ndarray, np.ndarray]


def falling(frame: int, row: np.ndarray, column: np.ndarray, distance: np.ndarray, angle: np.ndarray) -> Place:
    """A texture that falls."""
    return (row - SPEED * frame) / CELL, column / CELL


def spreading(frame: int, row: np.ndarray, column: np.ndarray, distance: np.ndarray, angle: np.ndarray) -> Place:
    """Textures that spread from the nearest centre, as ripples do."""
    return (distance - SPEED * frame) / CELL, angle * AROUND / (2 * np.pi)


def turning(frame: int, row: np.ndarray, column: np.ndarray, distance: np.ndarray, angle: np.ndarray) -> Place:
    """Textures that turn clockwise around the nearest centre."""
    return distance / CELL, (angle - TURN * frame) * AROUND / (2 * np.pi)


SCENES: dict[str, Callable[..., Place]] = {"falling": falling, "spreading": spreading, "turning": turning}


def render(scene: str, height: int, frames: int = FRAMES) -> np.ndarray:
    """A video uint8 (frames, height, 1.6 height, 3), always the same.

    Args:
        scene: one of `SCENES`.
        height: in pixels.
        frames: its length.
    """
    generator = np.random.default_rng([list(SCENES).index(scene), 3])
    width = height * SIDES[0] // SIDES[1]
    row, column = (axis / height for axis in np.mgrid[:height, :width].astype(float))
    video = np.empty((frames, height, width, 3), dtype=np.uint8)
    for frame in range(frames):
        if frame % SHOT == 0:
            texture = generator.uniform(0, 255, (3, 2 * AROUND, AROUND))
            around = nearest(generator.uniform(0, [1, width / height], (CENTRES, 2)), row, column)
        place = np.stack(SCENES[scene](frame, row, column, *around))
        for channel in range(3):
            video[frame, ..., channel] = map_coordinates(texture[channel], place, order=1, mode="grid-wrap")
    return video


def nearest(middles: np.ndarray, row: np.ndarray, column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distance from the nearest of centres (n, 2), and angle from it, clockwise from the right."""
    down, right = (axis - middles[:, number, None, None] for number, axis in enumerate((row, column)))
    distance = np.hypot(down, right)
    own = distance.argmin(0)[None]
    down, right, distance = (np.take_along_axis(values, own, 0)[0] for values in (down, right, distance))
    return distance, np.arctan2(down, right)  # rows grow downwards
