"""Images and labels as every reader gives them, and what the readers share."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.cli.image_files import HIDDEN, PassedOver, TooDeep, decode_image, is_hidden
from hf_sparseprior.images.config import SPLITS, DataConfig, Decoding
from hf_sparseprior.runs.command import short, shown

# Names that common data sets give to each split's folder or file, in any case, also with "seg_" before them.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "validate", "dev"),
    "test": ("test", "testing"),
}
UNCLEAR = ("eval", "evaluation", "holdout")  # what they are for their data set alone can say


PIPELINE = Decoding()
LONGEST_NAME = 255  # longer texts are no names of files; images as base64 are
TOO_DEEP = " has more than 8 bits a channel, which transformers' pipelines cut off at 255; data.depth16=scale scales it"


@dataclass
class Images:
    """One split, whose images are read one at a time. Everything in it can be sent to another process.

    read: index -> PIL image, 8-bit RGB; raises OSError with the image's name if it cannot be read.
    labels: (count,) int64, each image's class; (count, classes) uint8, 1 for each of several; or (count, numbers)
        float32.
    name: index -> how errors call the image: its file, or "train row 12" of a table.
    stamp: index -> text that changes when the stored image does; None: unknown, then a scan for damage is not kept.
    checked: True if no image can be damaged, because all were made from arrays that were checked when read.
    boxes: index -> [left, top, width, height] in pixels of each object in the image; None: not known.
    """

    read: Callable[[int], Any]
    labels: np.ndarray
    name: Callable[[int], str] = "image {}".format
    stamp: Callable[[int], str] | None = None
    checked: bool = False
    boxes: Callable[[int], list[list[float]]] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: np.ndarray) -> Images:
        """The images at these indices."""
        return Images(
            partial(_at, self.read, indices),
            self.labels[indices],
            partial(_at, self.name, indices),
            self.stamp and partial(_at, self.stamp, indices),
            self.checked,
            self.boxes and partial(_at, self.boxes, indices),
        )

    def joined(self, others: Images) -> Images:
        """These images and then others of the same classes."""

        def after(own: Callable[[int], Any] | None, other: Callable[[int], Any] | None) -> Any:
            return own and other and partial(_of_two, own, other, len(self))

        return Images(
            after(self.read, others.read),
            np.concatenate([self.labels, others.labels]),
            after(self.name, others.name),
            after(self.stamp, others.stamp),
            self.checked and others.checked,
            after(self.boxes, others.boxes),
        )


def _of_two(first: Callable[[int], Any], second: Callable[[int], Any], count: int, index: int) -> Any:
    return first(int(index)) if index < count else second(int(index) - count)


def _at(call: Callable[[int], Any], indices: np.ndarray, index: int) -> Any:
    return call(int(indices[index]))


@dataclass
class ImageData:
    """Every split of a source and the names of its classes.

    passed_over: files that were no images. origins: where splits come from, as a run says it; the reader gives those
        that it knows, `load_data` all. cut: {split that the source did not have: how many images it was cut from}.
    """

    splits: dict[str, Images]
    classes: list[str]
    description: str
    passed_over: PassedOver = field(default_factory=PassedOver)
    origins: dict[str, str] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)


def counts(sizes: Mapping[str, Any]) -> str:
    """ "50000 train, 10000 test" for descriptions; sizes are anything with a length."""
    return ", ".join(f"{len(images)} {split}" for split, images in sizes.items())


# ---- reading one image ----------------------------------------------------------------------------------------------


def decode(source: bytes | str, name: str, decoding: Decoding = PIPELINE) -> Any:
    """An encoded image, or the file of one, as 8-bit RGB, read to its last pixel (`decode_image`).

    Raises:
        OSError: one line with `name` and why it is not readable.
        TooDeep: one line with `name`.
    """
    try:
        return decode_image(source, name, decoding.exif, decoding.depth16)
    except TooDeep:
        raise TooDeep(name + TOO_DEEP) from None


def file_images(files: Sequence[str], labels: Sequence[int] | np.ndarray, decoding: Decoding) -> Images:
    """Images in files of their own; `labels` as in `Images`."""
    files = list(files)
    return Images(
        partial(_read_file, files, decoding),
        labels if isinstance(labels, np.ndarray) else np.array(labels, dtype=np.int64),
        files.__getitem__,
        partial(_stamp_of, files, decoding),
    )


def _read_file(files: Sequence[str], decoding: Decoding, index: int) -> Any:
    return decode(files[index], files[index], decoding)


def _stamp_of(files: Sequence[str], decoding: Decoding, index: int) -> str:
    return f"{file_stamp(files[index])}|{decoding}"


def file_stamp(path: str | os.PathLike) -> str:
    """A file's path, size in bytes and time of change in nanoseconds."""
    status = os.stat(path)
    return f"{os.path.abspath(path)}|{status.st_size}|{status.st_mtime_ns}"


def array_images(pixels: np.ndarray, labels: np.ndarray, where: str) -> Images:
    """Images in memory: pixels (count, height, width) or (count, height, width, 3), uint8."""
    return Images(partial(_read_array, pixels), labels.astype(np.int64), f"{where} image {{}}".format, checked=True)


def _read_array(pixels: np.ndarray, index: int) -> Any:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels[index])).convert("RGB")


# ---- folders, splits, classes ---------------------------------------------------------------------------------------


def data_folder(config: DataConfig, or_file: bool = False) -> Path:
    """`data.path`, which must be a folder, or with `or_file` may be a file.

    Raises:
        OSError: for another path.
    """
    root = Path(config.path or "")
    if not root.is_dir() and not (or_file and root.is_file()):
        raise OSError(f"data.path={config.path} is {'neither a folder nor a file' if or_file else 'not a folder'}")
    return root


def pick_splits(available: Collection[str], config: DataConfig, where: str) -> dict[str, str]:
    """Which of a source's own splits is our train, validation and test.

    Args:
        available: the source's names.
        config: its `splits` replaces the usual names.
        where: the source, for errors.

    Returns:
        {our split: the source's name}, in our order; only "train" is always there.
    """
    if config.splits:
        for name in config.splits.values():
            if name not in available:
                raise ValueError(f"data.splits={config.splits}: {where} has no {name!r}, only {_list(available)}")
        return {split: config.splits[split] for split in SPLITS if split in config.splits}
    if unclear := sorted(name for name in available if _plain(name) in UNCLEAR):
        raise ValueError(f"{where}: data.splits is needed, {unclear[0]!r} may be for validation or for the test")
    usual = {split: usual_name(available, split, f"{where}: data.splits is needed") for split in SPLITS}
    found = {split: name for split, name in usual.items() if name is not None}
    if "train" not in found:
        names = " or ".join(SPLIT_NAMES["train"])
        raise ValueError(f"{where} has no training split named {names}, only {_list(available)}")
    return found


def usual_name(available: Collection[str], split: str, advice: str) -> str | None:
    """Which of a source's own names is usual for a split, None if none is.

    Raises:
        ValueError: if several are; the message begins with `advice`.
    """
    named = sorted(name for name in available if _plain(name) in SPLIT_NAMES[split])
    if len(named) > 1:
        raise ValueError(f"{advice}, {' and '.join(map(repr, named))} are both for {split}")
    return named[0] if named else None


def is_split(name: str) -> bool:
    """Whether a folder or file of this name is a split by usual names, or may be one."""
    return _plain(name) in (*UNCLEAR, *(usual for names in SPLIT_NAMES.values() for usual in names))


def _plain(name: str) -> str:
    return name.lower().removeprefix("seg_")


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def split_files(
    root: Path, ending: str, config: DataConfig, passed_over: PassedOver | None = None
) -> dict[str, list[str]]:
    """The files of each split in a folder: NAME.ending, NAME-00000-of-00005.ending, NAME_1.ending, ...

    In place of a folder one file, for training. `passed_over` counts those of no split.
    """
    if root.is_file():
        if root.suffix != ending or config.splits:
            given = f", so data.splits={config.splits} says nothing" if config.splits else ""
            raise ValueError(f"data.path={root} must be a folder, or one {ending} file{given}")
        return {"train": [str(root)]}
    files = sorted(root.glob(f"*{ending}"))
    named: dict[str, list[str]] = {}
    for name in config.splits.values() if config.splits else sum(SPLIT_NAMES.values(), ()):
        # "val*" would take validation.parquet again.
        pattern = re.compile(rf"{re.escape(name)}([^A-Za-z].*)?{re.escape(ending)}")
        if own := [str(path) for path in files if pattern.fullmatch(path.name)]:
            named[name] = own
    if not named:
        raise ValueError(f"{root} has no {config.splits['train'] if config.splits else 'train'}*{ending}")
    chosen = {split: named[name] for split, name in pick_splits(named, config, str(root)).items()}
    used = {name for own in chosen.values() for name in own}
    for file in files:
        if passed_over is not None and str(file) not in used:
            passed_over.add(HIDDEN if is_hidden(file.name) else "file of no split", str(file))
    return chosen


def read_classes(path: str) -> list[str]:
    """The class names of a file, one a line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OSError(f"data.classes={path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    classes = [line.strip() for line in lines if line.strip()]
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if len(classes) < 2 or twice:
        problem = f"{twice[0]!r} more than once" if twice else f"{len(classes)}"
        raise ValueError(
            f"data.classes={path} must hold two or more different class names, one a line, found {problem}"
        )
    return classes


def is_whole_number(text: str) -> bool:
    """Whether a text is a whole number as Python writes it: "007" and "7" are different names."""
    return re.fullmatch("0|-?[1-9][0-9]*", text) is not None


MISSING = ("", "nan", "<na>")  # what pandas writes in place of a missing value


def label_problem(value: Any) -> str | None:
    """What is wrong with a stored label that no list of classes names, or None for a name or number of a class."""
    if not isinstance(value, (str, int, float, np.generic, type(None))):
        if isinstance(value, (list, tuple, dict)):
            return f"label {shown(value)} must be one name or number, not several, which data.labels=several is for"
        return f"label {shown(value)} must be one name or number, not {type(value).__name__}"
    if value is None or value != value or (isinstance(value, str) and value.strip().lower() in MISSING):
        return f"the label is missing, it is {shown(value)}"
    return None


def class_of(value: Any, index_of: Mapping[Any, int], classes: Sequence[str]) -> int:
    """The index of a stored label's class. ValueError with what is wrong for one that has none."""
    try:
        return index_of[value]
    except (KeyError, TypeError):  # of a list
        advice = "; -1 marks images without labels, leave the split out with data.splits" if value == -1 else ""
        unknown = f"label {shown(value)} is not among the classes {short(classes)}{advice}"
        raise ValueError(label_problem(value) or unknown) from None


def encode_labels(
    values: Mapping[str, Sequence[Any]],
    classes: Sequence[str] | None,
    where: str,
    row: Callable[[str, int], str] | None = None,
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Labels as class indices.

    Args:
        values: each split's labels as stored: class names or, with `classes`, also class indices.
        classes: class names in order; None: the sorted labels of the training images.
        where: the source, for errors.
        row: (split, index) -> what errors call a row; None: by source, split and index.

    Returns:
        class names; each split's labels, (count,) int64.

    Raises:
        ValueError: for a label that is missing, that is several, or that no class has; the message names its row.
    """
    row = row or f"{where}, {{}} row {{}}".format
    if classes is None:
        for index, value in enumerate(values["train"]):
            if (problem := label_problem(value)) is not None:
                raise ValueError(f"{row('train', index)}: {problem}")
        ordered = sorted(set(values["train"]))
        classes = [str(value) for value in ordered]
        index_of: dict[Any, int] = {value: index for index, value in enumerate(ordered)}
    else:
        index_of = class_indices(classes)
    if len(classes) < 2:
        raise ValueError(f"{where} must hold two or more classes, found {list(classes)}")
    labels = {split: np.empty(len(own), dtype=np.int64) for split, own in values.items()}
    for split, own in values.items():
        for index, value in enumerate(own):
            try:
                labels[split][index] = class_of(value, index_of, classes)
            except ValueError as error:
                raise ValueError(f"{row(split, index)}: {error}") from None
    return list(classes), labels


def several_labels(
    values: Mapping[str, Sequence[Sequence[Any]]],
    columns: Sequence[str],
    classes: Sequence[str] | None,
    row: Callable[[str, int], str],
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Several labels an image, as a table writes them.

    Args:
        values: each split's rows, their values in `columns`: of one column a list of names, or of indices in `classes`,
            or a text of names with ; or | between them; of several 0 or 1 for the class that a column is named after.
        columns: names.
        classes: class names in order; None: the sorted names of the training images, or the columns.
        row: (split, index) -> what errors call a row.

    Returns:
        class names; each split's labels, (count, classes) uint8.

    Raises:
        ValueError: for another value; the message names its row.
    """
    if len(columns) > 1:
        if classes is not None and list(classes) != list(columns):
            raise ValueError(f"data.classes has {short(classes)}, and the columns are {short(columns)}")
        return list(columns), {split: _flags(own, columns, partial(row, split)) for split, own in values.items()}
    names = {
        split: [_names(own[0], partial(row, split, index)) for index, own in enumerate(rows)]
        for split, rows in values.items()
    }
    stored = sorted(set().union(*names["train"])) if classes is None else []
    known = list(classes) if classes is not None else [str(name) for name in stored]
    if len(known) < 2:
        raise ValueError(
            f"{row('train', 0)}: column {columns[0]!r} must hold two or more different labels, not {known}"
        )
    labels = {split: np.zeros((len(own), len(known)), np.uint8) for split, own in names.items()}
    index_of = class_indices(known) if classes is not None else {name: index for index, name in enumerate(stored)}
    for split, own in names.items():
        for index, found in enumerate(own):
            try:
                labels[split][index, [class_of(name, index_of, known) for name in found]] = 1
            except ValueError as error:
                raise ValueError(f"{row(split, index)}: {error}") from None
    return known, labels


def _names(value: Any, row: Callable[[], str]) -> list[Any]:
    """The names, or numbers, of the labels that a cell lists."""
    if isinstance(value, str):
        return [name for part in re.split("[;|]", value) if (name := part.strip())]
    if value is None:
        raise ValueError(f"{row()}: the labels are missing; an image without any has an empty list or text")
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{row()}: labels {shown(value)} must be a list, or a text with ; between names")
    for name in value:
        if isinstance(name, bool) or not isinstance(name, (str, int)) or label_problem(name) is not None:
            raise ValueError(f"{row()}: {shown(name)} in {shown(value)} must be the name or the number of a label")
    if len(set(value)) < len(value):
        raise ValueError(f"{row()}: labels {shown(value)} have one twice; a list has those of the image alone")
    return list(value)


def _flags(rows: Sequence[Sequence[Any]], columns: Sequence[str], row: Callable[[int], str]) -> np.ndarray:
    meanings = {"0": 0, "1": 1, "false": 0, "true": 1, "0.0": 0, "1.0": 1}
    labels = np.empty((len(rows), len(columns)), np.uint8)
    for index, own in enumerate(rows):
        for place, (column, stored) in enumerate(zip(columns, own, strict=True)):
            if (value := meanings.get(str(stored).lower())) is None:
                raise ValueError(f"{row(index)}: {column}={shown(stored)} must be 0 or 1")
            labels[index, place] = value
    return labels


def number_labels(
    values: Mapping[str, Sequence[Sequence[Any]]], columns: Sequence[str], row: Callable[[str, int], str]
) -> dict[str, np.ndarray]:
    """Numbers as a table writes them: each split's, (count, columns) float32; arguments as in `several_labels`.

    Raises:
        ValueError: for a value that is no finite number; the message names its row.
    """
    labels = {split: np.empty((len(own), len(columns)), np.float32) for split, own in values.items()}
    for split, rows in values.items():
        for index, own in enumerate(rows):
            for place, (column, stored) in enumerate(zip(columns, own, strict=True)):
                try:
                    labels[split][index, place] = float(stored)
                except (ValueError, TypeError):  # a text; no value, or a list
                    labels[split][index, place] = np.nan
                if not np.isfinite(labels[split][index, place]):
                    raise ValueError(f"{row(split, index)}: {column}={shown(stored)} must be a finite number")
    return labels


def label_columns(
    columns: Collection[str], config: DataConfig, others: Collection[str | None], usual: Collection[str], where: str
) -> list[str]:
    """The columns of several labels or of numbers, as `DataConfig.labels` says; `others` have something else.

    Raises:
        ValueError: for a column that is not there, and where none is left.
    """
    named = config.label_columns or ([config.label_column] if config.label_column else [])
    for name in named:
        if name not in columns:
            field = "label_columns" if config.label_columns else "label_column"
            raise ValueError(f"data.{field}={name!r} is not among the columns {list(columns)} of {where}")
    likely = [name for name in columns if name.strip().lower() in usual and name not in others]
    found = named or (likely if len(likely) == 1 else [name for name in columns if name not in others])
    if not found:
        raise ValueError(f"{where}: no column of labels, only {list(columns)}")
    return found


def strata(labels: np.ndarray) -> np.ndarray:
    """(count,) int64: what cuts and limits take the same share of, from labels as in `Images`: the class; of several
    the rarest, -1 for none; of numbers the tenth of the images that the first number is in.
    """
    if labels.ndim == 1:
        return labels
    if labels.dtype == np.uint8:
        rarity = np.where(labels > 0, labels.sum(0), np.iinfo(np.int64).max)
        return np.where(labels.any(1), rarity.argmin(1), -1)
    ranks = np.empty(len(labels), np.int64)
    ranks[np.argsort(labels[:, 0], kind="stable")] = np.arange(len(labels))
    return 10 * ranks // len(labels)


def class_indices(classes: Sequence[str]) -> dict[Any, int]:
    """{what a stored label may be, its class's name or index: index}."""
    return {index: index for index in range(len(classes))} | {name: index for index, name in enumerate(classes)}


def balanced_subset(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Indices of `count` images, sorted, with the same number of every class (give or take one).

    With one seed a smaller count gives a subset of a larger one. If a class has too few, the others have more.
    """
    generator = np.random.default_rng(seed)
    names = generator.permutation(np.unique(labels))  # which classes get one image more
    rank, order = np.empty(len(labels), dtype=np.int64), np.empty(len(labels), dtype=np.int64)
    for place, label in enumerate(names):
        members = generator.permutation(np.flatnonzero(labels == label))
        rank[members] = np.arange(len(members))
        order[members] = place
    # Every class's first image, then every class's second, ...
    return np.sort(np.lexsort((order, rank))[:count])
