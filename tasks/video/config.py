"""Configuration of a video run: YAML, `base:` inheritance and key=value overrides, as in tasks/classification.

base: motion.yaml#dense          another file or cell that this one changes, relative to it; or a list, later ones win
data: {...}                      fields of DataConfig
augmentation: {...}              fields of AugmentationConfig, what happens to training clips
model: {...}                     fields of SparsePriorTimesformerConfig, plus `preset` and `image_model`
trainer: {...}                   fields of SparsePriorTrainingArguments, transformers.TrainingArguments among them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_sparseprior import SparsePriorTimesformerConfig
from hf_sparseprior.base.checks import check_boolean, check_integer
from hf_sparseprior.images.augmentation import AugmentationConfig as ImageAugmentationConfig
from hf_sparseprior.images.randaugment import Policy, parse_policy
from hf_sparseprior.models.configuration_sparseprior_vit import check_number
from hf_sparseprior.runs.config import FINAL, Config, check_known, check_trainer, load_sections, trainer_keys
from hf_sparseprior.training import Mixing
from tasks.video.motion import RENDERED, MotionConfig

SECTIONS = ("data", "augmentation", "model", "trainer")
SOURCES = ("motion", "folder", "csv", "smarthome", "nucla", "ntu60", "kinetics", "something_something_v2")
# Sources that are split by a rule, and their rules: across subjects, across views.
PROTOCOLS = {"smarthome": ("cs", "cv1", "cv2"), "nucla": ("cs", "cv"), "ntu60": ("cs", "cv")}
LISTED = ("csv", "kinetics", "something_something_v2")  # sources with lists
SPLITS = ("train", "validation", "test")
SAMPLINGS = ("stride", "segments")
CORRUPT = ("fatal", "skip", "unchecked")
MODEL_EXTRAS = ("preset", "image_model")
CROPS = (1, 3)


@dataclass
class DataConfig:
    """Where clips come from.

    source: "folder" or "imagefolder": path/SPLIT/CLASS/*.mp4 (Kinetics' layout), splits train, validation and test by
        usual names of them. "csv": lists/SPLIT.csv with the columns path, relative to `path`, and label, a class.
        "motion": a folder that is cut from real or drawn videos if it is missing (tasks/video/motion.py). "smarthome",
        "nucla", "ntu60", "kinetics", "something_something_v2": as they are published (tasks/video/sources.py).
    path: folder of the videos.
    lists: folder of the lists, for csv, kinetics and something_something_v2.
    protocol: how smarthome, nucla and ntu60 are split: cs, across subjects, or across views, cv1 or cv2 for smarthome
        and cv for the others.
    held_out: subject that tests, for nucla's cs; null: 10.
    motion: fields of MotionConfig, for motion.
    stage: "final": train on the training and the validation clips and test on the test clips. The validation clips are
        trained on, so nothing may be chosen by them and the last epoch counts. null: train without them.
    sampling: "stride": the frames of a clip are `stride` frames of the video apart. "segments": a clip spans the whole
        video and has one frame of each of equal segments (TSN).
    stride: frames of a video from one frame of a clip to the next, for sampling stride.
    short_side: pixels that the shorter side of a frame is scaled to; null: as it is.
    corrupt: what happens to videos that are missing, empty, damaged, cut off or without video. Before a run, each is
        read to its end, and the frame in its middle is decoded. "fatal": they end the run before it begins. "skip":
        they are left out and counted. "unchecked": they are not looked for. What is found only later ends the run.
    cache: decode every video once, before the run, and keep all its frames in memory.
    test_clips, test_crops: views of a video that a test looks at, clips times crops, and whose scores are averaged. The
        places where clips can start are cut into equal parts, and a clip starts in the middle of each. Segments are cut
        in the same way, and a clip has the middle of one part of each. Crops: 1, the centre, or 3, both ends and the
        centre of the longer side. The test at the end of a run and `evaluate` do so; validation looks at one clip and
        the centre.
    test_frames, test_size: number of frames, and size (one number, or height and width) of the clips of a test; null:
        the model's. Positions in a frame are interpolated, and each time embedding is that of the nearest frame.
    """

    source: str = "motion"
    path: str | None = None
    lists: str | None = None
    protocol: str | None = None
    held_out: int | None = None
    motion: dict[str, Any] = field(default_factory=dict)
    stage: str | None = None
    sampling: str = "stride"
    stride: int = 1
    short_side: int | None = None
    corrupt: str = "fatal"
    cache: bool = False
    test_clips: int = 1
    test_crops: int = 1
    test_frames: int | None = None
    test_size: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.source == "imagefolder":  # the same layout, by its name for images
            self.source = "folder"
        if self.source not in SOURCES:
            raise ValueError(f"data.source={self.source!r} must be one of {', '.join(SOURCES)}")
        if not isinstance(self.path, str) or not self.path:
            raise ValueError(f"data.path={self.path!r} must be the folder of the videos")
        if self.source in LISTED and not (isinstance(self.lists, str) and self.lists):
            raise ValueError(f"data.lists={self.lists!r} must be the folder of the lists for data.source {self.source}")
        if self.source not in LISTED and self.lists is not None:
            sources = ", ".join(LISTED)
            raise ValueError(f"data.lists={self.lists!r} is for data.source {sources}; this is {self.source}")
        self._check_protocol()
        if self.motion and self.source != "motion":
            raise ValueError(f"data.motion={self.motion!r} is for data.source motion, not {self.source}")
        if not isinstance(self.motion, dict):
            raise ValueError(f"data.motion={self.motion!r} must hold keys and values")
        if "val" in self.motion:
            raise ValueError(f"data.motion.val={self.motion['val']!r} is called data.motion.validation now")
        check_known(self.motion, [entry.name for entry in fields(MotionConfig)], "data.motion")
        self.motion_config()
        if self.stage not in (FINAL, None):
            raise ValueError(f"data.stage={self.stage!r} must be {FINAL} or null")
        if self.sampling not in SAMPLINGS:
            raise ValueError(f"data.sampling={self.sampling!r} must be one of {', '.join(SAMPLINGS)}")
        check_integer("data.stride", self.stride, 1)
        if self.sampling == "segments" and self.stride != 1:
            raise ValueError(f"data.stride={self.stride} is for data.sampling stride; with segments it must be 1")
        if self.short_side is not None:
            check_integer("data.short_side", self.short_side, 1)
        if self.corrupt not in CORRUPT:
            raise ValueError(f"data.corrupt={self.corrupt!r} must be one of {', '.join(CORRUPT)}")
        check_boolean("data.cache", self.cache)
        check_integer("data.test_clips", self.test_clips, 1)
        if isinstance(self.test_crops, bool) or self.test_crops not in CROPS:
            raise ValueError(f"data.test_crops={self.test_crops!r} must be one of {', '.join(map(str, CROPS))}")
        if self.test_frames is not None:
            check_integer("data.test_frames", self.test_frames, 1)
        if self.test_size is not None:
            check_size(self.test_size)

    def _check_protocol(self) -> None:
        allowed = PROTOCOLS.get(self.source, (None,))
        if self.protocol not in allowed:
            raise ValueError(
                f"data.protocol={self.protocol!r} must be "
                + (f"one of {', '.join(map(str, allowed))} for" if allowed[0] else "null for")
                + f" data.source {self.source}"
            )
        if self.held_out is None:
            return
        if (self.source, self.protocol) != ("nucla", "cs"):
            raise ValueError(f"data.held_out={self.held_out!r} is for data.protocol cs of data.source nucla")
        check_integer("data.held_out", self.held_out, 1)
        if self.held_out > 10:
            raise ValueError(f"data.held_out={self.held_out} must be one of the 10 subjects")

    @property
    def test_views(self) -> int:
        """Views of a video in a test."""
        return self.test_clips * self.test_crops

    def motion_config(self) -> MotionConfig:
        """How motion clips are cut."""
        return MotionConfig(**self.motion)


def check_size(size: Any) -> None:
    """Raise ValueError unless `data.test_size` is one positive integer or two."""
    sides = size if isinstance(size, (list, tuple)) and len(size) == 2 else [size]
    if any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
        raise ValueError(f"data.test_size={size!r} must be a positive integer, or height and width")


@dataclass
class AugmentationConfig:
    """What happens to a training clip; it is the same for all its frames.

    random_place: the clip is taken anywhere in its video, not in its middle; with data.sampling segments, every frame
        anywhere in its segment.
    random_crop: the window of the model's size is cut anywhere, not in the centre.
    short_side: [low, high], pixels, between which the shorter side of a training clip is drawn; null: data.short_side.
    horizontal_flip, vertical_flip: probabilities.
    brightness, contrast: largest distance from 0 and from 1, for pixels between 0 and 1.
    randaugment: timm's notation, for example rand-m7-n4-mstd0.5-inc1 (VideoMAE); null for none. Operations and their
        strengths are drawn once for a clip. It comes after crop and flips.
    mixup, cutmix, mix_probability, switch_probability, label_smoothing: as for images; a clip is mixed with one other,
        each frame with the frame of the same number, in the same shares or in the same box.
    """

    random_place: bool = False
    random_crop: bool = False
    short_side: list[int] | None = None
    horizontal_flip: float = 0.0
    vertical_flip: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    randaugment: str | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    switch_probability: float = 0.5
    label_smoothing: float = 0.0
    policy: Policy | None = field(init=False, default=None)
    mixing: Mixing = field(init=False, default=Mixing())

    def __post_init__(self) -> None:
        for name in ("random_place", "random_crop"):
            check_boolean(f"augmentation.{name}", getattr(self, name))
        if (sides := self.short_side) is not None:
            pair = isinstance(sides, (list, tuple)) and len(sides) == 2
            for side in sides if pair else ():
                check_integer("augmentation.short_side", side, 1)
            if not pair or sides[0] > sides[1]:
                raise ValueError(f"augmentation.short_side={sides!r} must be [low, high] in pixels, or null")
        for name in ("horizontal_flip", "vertical_flip", "brightness", "contrast"):
            value = getattr(self, name)
            check_number(f"augmentation.{name}", value, 0.0, 1.0 + 1e-9)
        shared = ("randaugment", "mixup", "cutmix", "mix_probability", "switch_probability", "label_smoothing")
        images = ImageAugmentationConfig(**{name: getattr(self, name) for name in shared})  # which checks them
        self.policy = parse_policy(self.randaugment) if self.randaugment else None
        self.mixing = images.mixing


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A configuration file with `section.key=value` overrides, every key checked."""
    return load_sections(path, overrides, SECTIONS, check_config)


def check_config(config: Config) -> Config:
    """Refuse unknown keys of every section and bad values; a missing section is empty."""
    model = [entry.name for entry in fields(SparsePriorTimesformerConfig)]
    known = {
        "data": [entry.name for entry in fields(DataConfig)],
        "augmentation": [entry.name for entry in fields(AugmentationConfig) if entry.init],
        "model": [*model, *MODEL_EXTRAS],
        "trainer": trainer_keys(),
    }
    for section in SECTIONS:
        check_known(config.setdefault(section, {}), known[section], f"section {section!r}")
    data, augmentation = DataConfig(**config["data"]), AugmentationConfig(**config["augmentation"])
    if data.source == "motion" and augmentation.horizontal_flip:
        raise ValueError(
            f"augmentation.horizontal_flip={augmentation.horizontal_flip} would make panning left one to the right; "
            "data.source motion needs 0"
        )
    if data.source == "motion" and data.motion_config().videos == RENDERED and augmentation.vertical_flip:
        raise ValueError(
            f"augmentation.vertical_flip={augmentation.vertical_flip} would make what falls rise, as in the class "
            "backward; data.motion.videos rendered needs 0"
        )
    if data.source == "something_something_v2" and augmentation.horizontal_flip:
        raise ValueError(
            f"augmentation.horizontal_flip={augmentation.horizontal_flip} would make from left to right from right to "
            "left; data.source something_something_v2 needs 0"
        )
    if data.source == "motion" and augmentation.random_place:
        raise ValueError("augmentation.random_place=true would move the middle frame of data.source motion; set false")
    if augmentation.short_side is not None and data.cache:
        raise ValueError(
            f"augmentation.short_side={augmentation.short_side} gives each clip its own size; data.cache=true keeps one"
        )
    check_trainer(config["trainer"])
    model_section = {key: value for key, value in config["model"].items() if key not in MODEL_EXTRAS}
    preset, image_model = config["model"].get("preset"), config["model"].get("image_model")
    if preset and image_model:
        raise ValueError(f"model.preset={preset!r} and model.image_model={image_model!r} exclude each other")
    if preset:
        SparsePriorTimesformerConfig.from_preset(preset, **model_section)
    elif not image_model:
        SparsePriorTimesformerConfig(**model_section)
    return config
