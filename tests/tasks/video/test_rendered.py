"""Drawn videos: time runs one way, and a single frame says nothing about it."""

import numpy as np
import pytest

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")

from tasks.video.motion import CLASSES, RENDERED, MotionConfig, find_cuts, main
from tasks.video.rendered import SCENES, SHOT, SPEED, TURN, nearest, render
from tests.each import each

HEIGHT = 40


def moved(row, column, scene, frames=4):
    """Where the texture of a place is after some frames: found by trying, in heights, down and to the right.

    One centre stands at row 0.5, column 0.8.
    """
    middles = np.array([[0.5, 0.8]])
    place = [np.array(values) for values in (row, column)]
    before = np.array(SCENES[scene](0, *place, *nearest(middles, *place)))
    downs, rights = np.meshgrid(*[np.linspace(-0.1, 0.1, 201)] * 2, indexing="ij")
    after = SCENES[scene](frames, row + downs, column + rights, *nearest(middles, row + downs, column + rights))
    best = sum((own - other) ** 2 for own, other in zip(after, before, strict=True)).argmin()
    return np.array([downs.flat[best], rights.flat[best]])


@each("place", [(0.2, 0.8), (0.5, 1.2), (0.8, 0.7), (0.4, 0.5)])
def test_textures_fall_spread_and_turn_clockwise(place):
    out = np.array(place) - [0.5, 0.8]
    distance = np.hypot(*out)
    clockwise = np.array([out[1], -out[0]]) / distance  # rows grow downwards: from the right it goes down
    assert moved(*place, "falling") == pytest.approx([4 * SPEED, 0], abs=0.002)
    assert moved(*place, "spreading") == pytest.approx(4 * SPEED * out / distance, abs=0.002)
    assert moved(*place, "turning") @ clockwise == pytest.approx(distance * np.sin(4 * TURN), abs=0.002)


def test_every_pixel_belongs_to_its_nearest_centre():
    middles = np.array([[0.1, 0.2], [0.9, 0.3], [0.4, 1.5]])
    row, column = np.random.default_rng(0).uniform(0, 1.6, (2, 5, 7))
    distance, angle = nearest(middles, row, column)
    for at in np.ndindex(5, 7):
        every = [np.hypot(row[at] - y, column[at] - x) for y, x in middles]
        y, x = middles[int(np.argmin(every))]
        assert distance[at] == min(every)
        assert [distance[at] * np.sin(angle[at]), distance[at] * np.cos(angle[at])] == pytest.approx(
            [row[at] - y, column[at] - x]
        )


@pytest.mark.parametrize("scene", SCENES)
def test_a_video_is_always_the_same_and_moves_all_the_time(scene):
    video = render(scene, HEIGHT, frames=60)
    assert video.shape == (60, HEIGHT, HEIGHT * 8 // 5, 3) and video.dtype == np.uint8
    assert (video == render(scene, HEIGHT, frames=60)).all()
    assert (np.diff(video.astype(int), axis=0) != 0).any((1, 2, 3)).all()
    assert find_cuts(video).tolist() == list(range(SHOT, 60, SHOT))
    other = {name: render(name, HEIGHT, frames=1) for name in SCENES if name != scene}
    assert not any((video[:1] == frame).all() for frame in other.values())


def test_clips_are_cut_from_them(tmp_path):
    small = {"size": 24, "height": 40, "train": 1, "validation": 1, "test": 1, "frames": 5}
    options = [part for key, value in small.items() for part in (f"--{key}", str(value))]
    assert main([str(tmp_path / "clips"), *options, "--videos", RENDERED]) == 0
    for split in ("train", "validation", "test"):
        names = {f"{path.parent.name}/{path.name}" for path in (tmp_path / "clips" / split).glob("*/*")}
        assert names == {f"{kind}/{scene}_000.mkv" for kind in CLASSES for scene in SCENES}
    assert f'"videos": "{RENDERED}"' in (tmp_path / "clips" / "motion.json").read_text()
    assert MotionConfig(**small, videos=RENDERED).videos == RENDERED
