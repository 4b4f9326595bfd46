"""Drawn videos: time runs one way, and a single frame says nothing about it."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")

from tasks.video.motion import CLASSES, RENDERED, MotionConfig, main
from tasks.video.rendered import SCENES, Thing, render

HEIGHT = 40
ROWS, COLUMNS = (axis / HEIGHT for axis in np.mgrid[:HEIGHT, : HEIGHT * 8 // 5].astype(float))


def thing(size=0.5):
    return Thing(birth=0, life=48, row=0.5, column=0.8, size=size, colours=np.zeros((2, 3)))


@pytest.mark.parametrize("size", [0.0, 1.0])
def test_rings_spread(size):
    radii = []
    for age in range(0, 40, 5):
        cover, _ = SCENES["rings"](thing(size), age, ROWS, COLUMNS)
        middle = cover[HEIGHT // 2, HEIGHT * 4 // 5 :]
        radii.append((middle * np.arange(len(middle))).sum() / middle.sum() if middle.any() else np.inf)
    assert all(later > earlier for earlier, later in pairwise(radii) if np.isfinite(later))
    assert sum(map(np.isfinite, radii)) > 4


def test_drops_fall_and_accelerate():
    rows = []
    for age in range(12, 40, 4):
        cover, _ = SCENES["drops"](thing(), age, ROWS, COLUMNS)
        rows.append((cover * ROWS).sum() / cover.sum())
    steps = np.diff(rows)
    assert (steps > 0).all() and (np.diff(steps) > 0).all()


def test_wheels_turn_clockwise_and_grow_as_they_shrink():
    angles, areas = [], []
    for age in range(48):
        cover, second = SCENES["wheels"](thing(), age, ROWS, COLUMNS)
        weight = cover * second
        down, right = ((weight * (axis - place)).sum() for axis, place in ((ROWS, 0.5), (COLUMNS, 0.8)))
        angles.append(np.arctan2(-down, right))  # counter-clockwise, as in mathematics
        areas.append(cover.sum())
    turned = np.diff(np.unwrap(angles))
    assert (turned[2:-2] < 0).all() and np.rad2deg(turned[10:-10]) == pytest.approx(-360 / 48, abs=3)
    assert areas == pytest.approx(areas[::-1])  # as many pixels forward as backward


@pytest.mark.parametrize("scene", SCENES)
def test_a_video_is_always_the_same_and_moves_all_the_time(scene):
    video = render(scene, HEIGHT, frames=60)
    assert video.shape == (60, HEIGHT, HEIGHT * 8 // 5, 3) and video.dtype == np.uint8
    assert (video == render(scene, HEIGHT, frames=60)).all()
    assert (np.diff(video.astype(int), axis=0) != 0).any((1, 2, 3)).all()
    other = {name: render(name, HEIGHT, frames=1) for name in SCENES if name != scene}
    assert not any((video[:1] == frame).all() for frame in other.values())


def test_clips_are_cut_from_them(tmp_path):
    small = {"size": 24, "height": 40, "train": 1, "validation": 1, "test": 1, "frames": 5}
    options = [part for key, value in small.items() for part in (f"--{key}", str(value))]
    assert main([str(tmp_path / "clips"), *options, "--videos", RENDERED]) == 0
    for split in ("train", "validation", "test"):
        names = sorted(
            path.relative_to(tmp_path / "clips" / split) for path in (tmp_path / "clips" / split).glob("*/*")
        )
        assert [str(name) for name in names] == sorted(
            f"{kind}/{scene}_000.mkv" for kind in CLASSES for scene in SCENES
        )
    assert f'"videos": "{RENDERED}"' in (tmp_path / "clips" / "motion.json").read_text()
    assert MotionConfig(**small, videos=RENDERED).videos == RENDERED
