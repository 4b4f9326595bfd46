"""Clips with labels by construction: the middle frame says nothing, the splits share no time."""

import json
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")
pytest.importorskip("tasks.video.motion")

from hf_sparseprior.cli.video_files import read_frames
from tasks.video import motion, sources
from tasks.video.config import DataConfig
from tasks.video.motion import (
    CLASSES,
    STRETCHES,
    VIDEOS,
    MotionConfig,
    cut_clip,
    draw_places,
    find_cuts,
    main,
    read_videos,
)
from tasks.video.task import extra_metrics

pytestmark = pytest.mark.slow

SMALL = {"size": 24, "height": 40, "train": 2, "validation": 1, "test": 1}

try:
    motion.video_folder()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("motion") / "clips"
    assert main([str(out), *[part for key, value in SMALL.items() for part in (f"--{key}", str(value))]]) == 0
    return out


def test_every_place_gives_one_clip_of_every_class_with_the_same_middle_frame(folder):
    for split, places in (("train", 2), ("validation", 1), ("test", 1)):
        found = defaultdict(dict)
        for path in (folder / split).glob("*/*.mkv"):
            found[path.name][path.parent.name] = read_frames(path)
        assert len(found) == places * len(VIDEOS)
        for clips in found.values():
            assert set(clips) == set(CLASSES)
            assert all(clip.shape == (9, 24, 24, 3) for clip in clips.values())
            middles = {clip[4].tobytes() for clip in clips.values()}
            assert len(middles) == 1  # to the bit, as decoded: a model of one frame has nothing to go by
            still = clips["still_paused"]
            assert (still == still[:1]).all()
            assert len({clip.tobytes() for clip in clips.values()}) == len(CLASSES)


def test_classes_are_what_they_are_called():
    """On a video whose pixels say where and when they are: red the column, green the row, blue the frame."""
    config = MotionConfig(size=8, frames=5, pan=2, pace=3, height=20)
    video = np.stack(np.meshgrid(np.arange(40), np.arange(20), np.arange(40), indexing="ij"), -1)[..., [2, 1, 0]]
    video = video.astype(np.uint8)
    for name in CLASSES:
        clip = cut_clip(video, (20, 5, 16), name, config)
        pan, play = name.split("_")
        column = {"left": -2, "still": 0, "right": 2}[pan]
        time = {"backward": -3, "paused": 0, "forward": 3}[play]
        for step in range(-2, 3):
            assert clip[step + 2, 0, 0].tolist() == [16 + column * step, 5, 20 + time * step]


def test_splits_share_no_frame_of_a_video():
    video = np.random.default_rng(0).integers(0, 256, (120, 30, 60, 3), dtype=np.uint8)
    config = MotionConfig(size=16, frames=5, pan=2, pace=2, height=30)
    used = {}
    for split in STRETCHES:
        places = draw_places(video, split, 50, config, np.random.default_rng(1))
        used[split] = {middle + step for middle, _, _ in places for step in range(-4, 5)}
        for _, top, left in places:
            assert 0 <= top <= 14 and 4 <= left <= 60 - 16 - 4
    assert sum(map(len, used.values())) == len(set().union(*used.values()))
    assert set().union(*used.values()) <= set(range(120))


def test_with_more_draws_more_moves():
    """On a video that stands still but for one corner, which most of the windows do not see."""
    video = np.zeros((60, 40, 80, 3), dtype=np.uint8)
    video[:, :8, :20] = np.random.default_rng(0).integers(0, 256, (60, 8, 20, 3), dtype=np.uint8)
    moving = {}
    for draws in (1, 64):
        config = MotionConfig(size=16, frames=3, pan=1, height=40, draws=draws)
        places = draw_places(video, "train", 40, config, np.random.default_rng(0))
        moving[draws] = sum(top < 8 and left < 20 for _, top, left in places)
    assert moving[1] < 20 and moving[64] == 40


def test_no_clip_spans_a_cut():
    shots = [np.random.default_rng(shot).integers(0, 256, (1, 30, 60, 3), dtype=np.uint8) for shot in range(6)]
    video = np.concatenate([np.repeat(shot, 20, 0) for shot in shots])
    assert find_cuts(video).tolist() == [20, 40, 60, 80, 100]
    for within in (False, True):
        config = MotionConfig(size=16, frames=5, pan=1, pace=2, height=30, within_shots=within)
        middles = [place[0] for place in draw_places(video, "train", 50, config, np.random.default_rng(0))]
        spans = [(middle - 4) // 20 != (middle + 4) // 20 for middle in middles]
        assert any(spans) is not within
    with pytest.raises(ValueError, match="do not fit"):  # 21 frames, and no shot has more than 20
        draw_places(video, "train", 1, MotionConfig(16, 21, 1, 1, 30, within_shots=True), np.random.default_rng(0))


def test_the_cuts_of_the_real_videos_are_found():
    cuts = {name: find_cuts(video).tolist() for name, video in read_videos(MotionConfig()).items()}
    assert cuts == {"bigbuckbunny": [], "bikes": [30, 76, 137, 187, 242], "carphone_pristine": []}  # by looking


def test_bad_values_are_one_line_and_write_nothing(folder, tmp_path, capsys):
    for options, message in (
        (["--frames", "4"], "motion.frames=4 must be odd"),
        (["--size", "90", "--height", "80"], "motion.size=90 must be at most motion.height=80"),
        (["--pan", "40"], "do not fit"),
        (["--train", "0"], "motion.train=0"),
        (["--draws", "0"], "motion.draws=0"),
        (["--videos", "drawn"], "motion.videos='drawn' must be one of real, rendered"),
    ):
        assert main([str(tmp_path / "out"), *options]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    assert main([str(folder)]) == 2 and "exists already" in capsys.readouterr().err


def test_clips_cut_otherwise_are_refused(folder, tmp_path):
    motion.check_clips(folder, MotionConfig(**SMALL))
    with pytest.raises(ValueError, match=r"was cut otherwise \(pan: 3 there, 2 here\)"):
        motion.check_clips(folder, MotionConfig(**{**SMALL, "pan": 2}))
    earlier = tmp_path / "earlier"  # cut when the split was `val`
    earlier.mkdir()
    settings = {("val" if key == "validation" else key): value for key, value in asdict(MotionConfig(**SMALL)).items()}
    for later in ("videos", "draws", "within_shots"):
        del settings[later]
    (earlier / "motion.json").write_text(json.dumps(settings))
    motion.check_clips(earlier, MotionConfig(**SMALL))
    with pytest.raises(ValueError, match=r"within_shots: False there, True here"):
        motion.check_clips(earlier, MotionConfig(**SMALL, within_shots=True))
    with pytest.raises(ValueError, match="is not a folder of motion clips"):
        motion.check_clips(tmp_path, MotionConfig())
    assert json.loads((folder / "motion.json").read_text())["size"] == 24


def test_two_runs_that_find_the_clips_missing_cut_them_once(tmp_path, monkeypatch):
    """As runs of a comparison do that begin together."""
    cut, draw = [], motion.draw_places

    def count(*arguments):
        cut.append(arguments[1])
        time.sleep(0.1)
        return draw(*arguments)

    monkeypatch.setattr(motion, "draw_places", count)
    config = DataConfig(source="motion", path=str(tmp_path / "clips"), motion=SMALL)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: sources.motion(config), range(2))
    assert cut == [split for split in STRETCHES for _ in VIDEOS] and one == other
    assert [path.name for path in tmp_path.iterdir()] == ["clips"]


def test_the_direction_is_judged_on_clips_that_play_and_are_said_to_play():
    generator = np.random.default_rng(0)
    true, guess = generator.integers(0, 9, (2, 500))
    plays = [(CLASSES[t].split("_")[1], CLASSES[g].split("_")[1]) for t, g in zip(true, guess, strict=True)]
    both = [(own, said) for own, said in plays if "paused" not in (own, said)]
    counts = np.zeros((9, 9), int)
    np.add.at(counts, (true, guess), 1)
    metrics = extra_metrics(counts, CLASSES)
    assert metrics["direction_accuracy"] == sum(own == said for own, said in both) / len(both)
    assert metrics["accuracy_of_backward_forward_paused"] == sum(own == said for own, said in plays) / 500
    paused = [name.endswith("paused") for name in CLASSES]
    assert "direction_accuracy" not in extra_metrics(counts * np.array(paused), CLASSES)  # nothing is said to play
    assert "direction_accuracy" not in extra_metrics(counts, [f"{name}_2" for name in CLASSES])
