"""Images in files: class folders, CSV files of paths, Tiny-ImageNet and ImageNet-1K in their published layouts."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from accelerate import PartialState

from hf_sparseprior.cli.image_files import (
    ENDINGS,
    HIDDEN,
    NO_IMAGE,
    PassedOver,
    as_text,
    count_unlisted,
    images_below,
    is_hidden,
    is_image,
)
from hf_sparseprior.images.config import SPLITS, DataConfig
from hf_sparseprior.images.sources.images import (
    LONGEST_NAME,
    ImageData,
    Images,
    counts,
    data_folder,
    encode_labels,
    file_images,
    is_split,
    is_whole_number,
    label_columns,
    number_labels,
    pick_splits,
    read_classes,
    several_labels,
)
from hf_sparseprior.runs.command import short, shown
from hf_sparseprior.runs.labels import CLASSES, NUMBERS

IMAGE_COLUMNS = ("image", "path", "file", "file_name", "filename", "filepath", "image_path")
SPLIT_COLUMN = "split"
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "category", "target")


# ---- class folders --------------------------------------------------------------------------------------------------


def read_image_folder(config: DataConfig) -> ImageData:
    """path/train/CLASS/*.png, with validation/ and test/ next to train/. Without these all images are for training."""
    root, passed_over = data_folder(config), PassedOver()
    available = [entry.name for entry in os.scandir(root) if _is_class(entry)]
    if not config.splits and not any(map(is_split, available)):
        folders = {"train": root}
    else:
        chosen = pick_splits(available, config, str(root))
        folders = {split: _inner(root / name, passed_over) for split, name in chosen.items()}
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
            if entry.name not in chosen.values():
                kind = "folder" if entry.is_dir() else "file"
                passed_over.add(HIDDEN if is_hidden(entry.name) else f"{kind} of no split", entry.path)
    classes = class_folders(folders["train"])
    splits = {
        split: file_images(*list_images(folder, classes, passed_over), config.decoding)
        for split, folder in folders.items()
    }
    origins = {split: f"folder {folder.name}" for split, folder in folders.items()}
    return ImageData(splits, classes, f"images in {root.name} ({counts(splits)})", passed_over, origins)


def _inner(folder: Path, passed_over: PassedOver) -> Path:
    """The folder itself, or the one of the same name that is all it holds, as some archives unpack."""
    within = list(os.scandir(folder))
    if [entry.name for entry in within if not is_hidden(entry.name)] != [folder.name] or not (
        folder / folder.name
    ).is_dir():
        return folder
    for entry in within:
        if is_hidden(entry.name):
            passed_over.add(HIDDEN, entry.path)
    return folder / folder.name


def class_folders(folder: Path) -> list[str]:
    """The sorted names of the folders in a folder, as text."""
    classes = sorted(as_text(entry.name) for entry in os.scandir(folder) if _is_class(entry))
    if len(classes) < 2:
        raise ValueError(f"{folder} must hold one folder for each of two or more classes, found {classes}")
    return classes


def _is_class(entry: os.DirEntry) -> bool:
    if is_hidden(entry.name) or not entry.is_dir():
        return False
    # A link to / or to another folder that holds the link leads back to itself.
    if entry.is_symlink() and Path(entry.path).parent.resolve().is_relative_to(target := Path(entry.path).resolve()):
        raise ValueError(f"{entry.path} is a link to {target}, a folder that holds the link")
    return True


def list_images(folder: Path, classes: Sequence[str], passed_over: PassedOver) -> tuple[list[str], list[int]]:
    """Files and labels of the images in a folder of class folders; what is no image is counted in `passed_over`."""
    index_of = {name: index for index, name in enumerate(classes)}
    files: list[str] = []
    labels: list[int] = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_file() and is_image(entry.name) and not is_hidden(entry.name):
            raise ValueError(f"{entry.path} lies outside the class folders, so it has no label")
        if not _is_class(entry):
            passed_over.add(HIDDEN if is_hidden(entry.name) else NO_IMAGE, entry.path)
            continue
        if (name := as_text(entry.name)) not in index_of:
            raise ValueError(f"{entry.path}: class {name!r} is not among the training classes {short(classes)}")
        own = sorted(images_below(entry.path, passed_over))
        if not own:
            raise ValueError(f"{entry.path} holds no image ({', '.join(ENDINGS)})")
        files += own
        labels += [index_of[name]] * len(own)
    if not files:
        raise ValueError(f"{folder} holds no class folder with images")
    return files, labels


# ---- CSV ------------------------------------------------------------------------------------------------------------


def read_csv(config: DataConfig) -> ImageData:
    """A CSV file of image paths and labels, or a folder of train.csv and, if they exist, validation.csv and test.csv.

    Paths are relative to the file's folder. Labels that are all whole numbers, as they are written, are ordered as
    such. A column called split says of each image of one file which split it is of.

    Raises:
        ValueError, OSError: for missing columns, labels or images; the message has file and line.
    """
    root, passed_over = Path(config.path or ""), PassedOver()
    if root.is_file():
        tables = {"train": root}
    elif root.is_dir():
        available = sorted(path.stem for path in root.glob("*.csv") if not is_hidden(path.name))
        tables = {split: root / f"{name}.csv" for split, name in pick_splits(available, config, f"{root}").items()}
        for name in available:
            if root / f"{name}.csv" not in tables.values():
                passed_over.add("table of no split", str(root / f"{name}.csv"))
    else:
        raise OSError(f"data.path={config.path} is neither a CSV file nor a folder of train.csv")
    rows = {split: _read_table(table, config) for split, table in tables.items()}
    origins = {split: own.name for split, own in tables.items()}
    if root.is_file() and rows["train"].splits is not None:
        rows, origins = _by_split(rows["train"], config, root)
    names = read_classes(config.classes) if config.classes else None
    if config.labels != CLASSES:
        classes, targets = _targets(rows, names, config)
        images = {split: file_images(own.files, targets[split], config.decoding) for split, own in rows.items()}
        return ImageData(images, classes, f"images of {root.name} ({counts(images)})", passed_over, origins)
    values: dict[str, Sequence[object]] = {split: [text for (text,) in own.labels] for split, own in rows.items()}
    kinds = _kinds(list(rows.values()))
    if not kinds[False] and not set(kinds[True]) <= set(names or ()):
        values = {split: [int(label) for (label,) in own.labels] for split, own in rows.items()}
    elif names is None and kinds[False] and kinds[True] and PartialState().is_main_process:
        label, place = next(iter(kinds[False].items()))
        print(f"{place}: label {shown(label)} is no whole number, so all labels are names", flush=True)
    classes, labels = encode_labels(values, names, str(root), lambda split, index: rows[split].places[index])
    splits = {split: file_images(rows[split].files, labels[split], config.decoding) for split in rows}
    return ImageData(splits, classes, f"images of {root.name} ({counts(splits)})", passed_over, origins)


@dataclass
class _Rows:
    """Of each row of a CSV file its image, label and place, and its split if there is a column of them."""

    files: list[str]
    labels: list[tuple[str, ...]]  # the texts in `columns`
    places: list[str]
    splits: list[str] | None
    columns: list[str]

    def of_split(self, name: str) -> _Rows:
        """The rows that the column of splits gives this name."""
        chosen = [index for index, own in enumerate(self.splits or ()) if own == name]
        files, places = ([values[index] for index in chosen] for values in (self.files, self.places))
        return _Rows(files, [self.labels[index] for index in chosen], places, None, self.columns)


def _kinds(rows: Sequence[_Rows]) -> dict[bool, dict[str, str]]:
    """The different labels that are whole numbers (True) and that are not, each with the place of a row that has it."""
    kinds: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for own in rows:
        for (label,), place in zip(own.labels, own.places, strict=True):
            kinds[is_whole_number(label)].setdefault(label, place)
    return kinds


def _targets(
    rows: Mapping[str, _Rows], names: Sequence[str] | None, config: DataConfig
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Names and labels of several classes an image, or of numbers."""
    columns = rows["train"].columns
    for own in rows.values():
        if own.columns != columns:
            raise ValueError(f"{own.places[0]}: the columns of labels are {own.columns}, and {columns} in train")
    values = {split: own.labels for split, own in rows.items()}

    def place(split: str, index: int) -> str:
        return rows[split].places[index]

    if config.labels == NUMBERS:
        return list(columns), number_labels(values, columns, place)
    return several_labels(values, columns, names, place)


def _by_split(rows: _Rows, config: DataConfig, table: Path) -> tuple[dict[str, _Rows], dict[str, str]]:
    """The rows of one CSV file by our split, as its column of splits says, and where each split comes from."""
    names = rows.splits or []
    chosen = pick_splits(sorted(set(names)), config, f"{table}, column {SPLIT_COLUMN}")
    if unknown := sorted(set(names) - set(chosen.values())):
        raise ValueError(f"{table}, column {SPLIT_COLUMN}: {unknown[0]!r} is no split; data.splits names others")
    origins = {split: f"rows of {SPLIT_COLUMN} {name}" for split, name in chosen.items()}
    return {split: rows.of_split(name) for split, name in chosen.items()}, origins


def _read_table(table: Path, config: DataConfig) -> _Rows:
    """Image files and labels of one CSV file, and splits if it has a column of them."""
    files, labels, places, splits, problems = [], [], [], [], []
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            columns = list(rows.fieldnames or [])
            image = _column(columns, config.image_column, "image_column", IMAGE_COLUMNS, table)
            split = next((name for name in columns if name.strip().lower() == SPLIT_COLUMN), None)
            if config.labels == CLASSES:
                chosen = [_column(columns, config.label_column, "label_column", LABEL_COLUMNS, table)]
            else:
                chosen = label_columns(columns, config, {image, split}, LABEL_COLUMNS, str(table))
            for row in rows:
                path, value = (row[image] or "").strip(), tuple((row[name] or "").strip() for name in chosen)
                splits += [(row[split] or "").strip()] if split is not None else []
                files.append(str(table.parent / path))
                labels.append(value)
                places.append(f"{table}, line {rows.line_num}")
                if not path:
                    problems.append(f"line {rows.line_num}: no {image}")
                elif config.labels == CLASSES and not value[0]:
                    problems.append(f"line {rows.line_num}: no {chosen[0]}")
                elif not os.path.isfile(files[-1]):
                    problems.append(f"line {rows.line_num}: {_named(files[-1])} does not exist")
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{table} is not a CSV file in UTF-8 ({error})") from None
    if problems:
        raise ValueError(f"{table}, {problems[0]} ({len(problems)} of {len(files)} rows are bad)")
    if not files:
        raise ValueError(f"{table} has no rows")
    return _Rows(files, labels, places, splits if split is not None else None, chosen)


def _named(path: str) -> str:
    return path if len(path) <= LONGEST_NAME else shown(path)


def _column(columns: Sequence[str], name: str | None, field: str, usual: Sequence[str], table: Path) -> str:
    if name is not None:
        if name not in columns:
            raise ValueError(f"data.{field}={name!r} is not among the columns {columns} of {table}")
        return name
    found = [column for column in columns if column.strip().lower() in usual]
    if len(found) != 1:
        raise ValueError(
            f"{table}: data.{field} is needed, {'none' if not found else 'several'} of the columns {columns} "
            f"has a usual name ({', '.join(usual)})"
        )
    return found[0]


# ---- published layouts ----------------------------------------------------------------------------------------------


def read_tiny_imagenet(config: DataConfig) -> ImageData:
    """Tiny-ImageNet as published: the folder tiny-imagenet-200, or the one that holds it.

        wnids.txt  words.txt  train/WNID/images/*.JPEG  val/images/*.JPEG  val/val_annotations.txt

    Classes are in the order of the sorted WNIDs, as published checkpoints have them, not in the order of wnids.txt. The
    published test images have no labels and are not read. The published val is our split `published_validation`.
    """
    root = data_folder(config)
    root = root / "tiny-imagenet-200" if (root / "tiny-imagenet-200").is_dir() else root
    for name in ("wnids.txt", "train", "val"):
        if not (root / name).exists():
            raise OSError(
                f"{root} has no {name}; data.path must be the extracted tiny-imagenet-200 or the folder that holds it"
            )
    classes = sorted(_lines(root / "wnids.txt"))
    found = class_folders(root / "train")
    if found != classes:
        different = sorted(set(classes) ^ set(found))
        raise ValueError(f"{root}: the folders of train are not the classes of wnids.txt, see {short(different, 3)}")
    annotations, passed_over = root / "val" / "val_annotations.txt", PassedOver()
    train = list_images(root / "train", classes, passed_over)
    if annotations.exists():
        pairs = _fields(annotations, "\t")
        published = _annotated(root / "val" / "images", pairs, classes, annotations, passed_over)
    else:  # sorted into class folders, as common scripts do
        published = list_images(root / "val", classes, passed_over)
    words = dict(_fields(root / "words.txt", "\t")) if (root / "words.txt").exists() else {}
    data = _published(root, train, published, classes, words, config)
    return replace(data, passed_over=passed_over)


def read_imagenet(config: DataConfig) -> ImageData:
    """ImageNet-1K in one of two layouts; its classes are sorted by WNID, as published checkpoints have them.

        train/WNID/*.JPEG  val/WNID/*.JPEG
        ILSVRC/Data/CLS-LOC/{train/WNID,val}/*.JPEG  LOC_val_solution.csv  LOC_synset_mapping.txt   (Kaggle's)

    The published val is our split `published_validation`.
    """
    root = data_folder(config)
    images = root / "ILSVRC" / "Data" / "CLS-LOC"
    images = images if images.is_dir() else root
    for name in ("train", "val"):
        if not (images / name).is_dir():
            raise OSError(
                f"{images} has no folder {name}; data.path must hold train/WNID/*.JPEG and val/WNID/*.JPEG, or "
                "ILSVRC/Data/CLS-LOC and LOC_val_solution.csv"
            )
    classes = class_folders(images / "train")
    solution, passed_over = root / "LOC_val_solution.csv", PassedOver()
    train = list_images(images / "train", classes, passed_over)
    if any(_is_class(entry) for entry in os.scandir(images / "val")):
        published = list_images(images / "val", classes, passed_over)
    elif solution.exists():
        rows = _fields(solution, ",")[1:]  # ImageId,PredictionString
        pairs = [(f"{name}.JPEG", (prediction.split() or [""])[0]) for name, prediction in rows]
        published = _annotated(images / "val", pairs, classes, solution, passed_over)
    else:
        raise OSError(f"{images / 'val'} has no class folders and {solution} does not exist, so val has no labels")
    mapping = root / "LOC_synset_mapping.txt"
    words = dict(_fields(mapping, " ")) if mapping.exists() else {}
    data = _published(root, train, published, classes, words, config)
    return replace(data, passed_over=passed_over)


def _published(
    root: Path,
    train: tuple[list[str], list[int]],
    validation: tuple[list[str], list[int]],
    wnids: Sequence[str],
    words: dict[str, str],
    config: DataConfig,
) -> ImageData:
    splits: dict[str, Images] = {
        "train": file_images(*train, config.decoding),
        config.published_validation: file_images(*validation, config.decoding),
    }
    splits = {split: splits[split] for split in SPLITS if split in splits}
    # Words alone are not unique: two classes of ImageNet are called "crane".
    classes = [f"{wnid} {words[wnid]}" if wnid in words else wnid for wnid in wnids]
    return ImageData(splits, classes, f"{config.source} in {root.name} ({counts(splits)})")


def _annotated(
    folder: Path, pairs: Sequence[tuple[str, str]], classes: Sequence[str], table: Path, passed_over: PassedOver
) -> tuple[list[str], list[int]]:
    """Files and labels of a flat folder, with the labels from a table of (file name, class). Others are counted."""
    index_of = {name: index for index, name in enumerate(classes)}
    present = {entry.name for entry in os.scandir(folder)} if folder.is_dir() else set()
    for name, label in pairs:
        if name not in present:
            raise ValueError(f"{table} names {name}, which {folder} does not hold")
        if label not in index_of:
            raise ValueError(f"{table}: class {label!r} of {name} is not among the training classes {short(classes)}")
    if not pairs:
        raise ValueError(f"{table} is empty")
    files = [str(folder / name) for name, _ in pairs]
    count_unlisted(folder, files, table.name, passed_over)
    return files, [index_of[label] for _, label in pairs]


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error})") from None


def _fields(path: Path, separator: str) -> list[tuple[str, str]]:
    """The first two fields of every line. The second may contain blanks, as names of classes do."""
    rows = []
    for number, line in enumerate(_lines(path), 1):
        fields = line.split(separator) if separator == "\t" else line.split(separator, 1)
        if len(fields) < 2:
            raise ValueError(f"{path}, line {number}: {line[:80]!r} has fewer than 2 fields")
        rows.append((fields[0].strip(), fields[1].strip()))
    return rows
