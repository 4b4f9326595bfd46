"""Images in tables: local parquet and arrow files, data sets of the Hugging Face hub."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.cli.image_files import PassedOver
from hf_sparseprior.images.config import DataConfig, Decoding
from hf_sparseprior.images.sources.images import (
    LONGEST_NAME,
    PIPELINE,
    ImageData,
    Images,
    counts,
    data_folder,
    decode,
    encode_labels,
    file_stamp,
    label_columns,
    number_labels,
    pick_splits,
    read_classes,
    several_labels,
    split_files,
)
from hf_sparseprior.runs.command import short, shown
from hf_sparseprior.runs.labels import CLASSES, NUMBERS, SEVERAL

IMAGE_COLUMNS = ("image", "img", "images", "picture", "pixels")
LABEL_COLUMNS = ("label", "labels", "class", "target")
BOX_COLUMN = "boxes"  # as `Images.boxes`; `spatial` writes it
# Environment variable: "allow" if rows of tables may name files and addresses outside of the data's folder.
OUTSIDE_FILES = "SPARSEPRIOR_OUTSIDE_FILES"
# zip://inner.png::hf://datasets/...: a file of the hub, or one within its archives.
HUB_ADDRESS = re.compile(r"((zip|tar|gzip|bz2|lz4|xz|zstd)://((?!::).)*::)*(hf://|https://huggingface\.co/)((?!::).)*$")
# Seconds to wait for the hub's first answer. `datasets` alone would try for more than twenty.
HUB_TIMEOUT = 5


# ---- whole tables ---------------------------------------------------------------------------------------------------


def read_parquet(config: DataConfig) -> ImageData:
    """A folder of train*.parquet, and validation*.parquet and test*.parquet where there are any; or one file."""
    root = data_folder(config, or_file=True)
    passed_over = PassedOver()
    files = split_files(root, ".parquet", config, passed_over)
    tables = _load(f"{root}: the parquet files", "parquet", data_files=files)
    _check_parquet(files, root)
    return _tables_data(tables, config, str(root), f"parquet in {root.name}", passed_over)


def read_arrow(config: DataConfig) -> ImageData:
    """A folder of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`, or of train*.arrow, validation*.arrow, ...; or
    one file.
    """
    root = data_folder(config, or_file=True)
    passed_over = PassedOver()
    tables = arrow_tables(root, config, passed_over)
    return _tables_data(tables, config, str(root), f"arrow in {root.name}", passed_over)


def read_hub(config: DataConfig) -> ImageData:
    """A data set of the hub, or its copy in the cache of `datasets` where the hub cannot be reached."""
    tables, where = load_hub(config, streaming=False)
    tables = _pick_tables(tables, config, where)
    return _tables_data(tables, config, where, where)


def _check_parquet(files: Mapping[str, Sequence[str]], root: Path) -> None:
    """Refuse files with different class names: `load_dataset` takes the first file's for all of them."""
    from datasets import Features
    from pyarrow.parquet import read_schema

    check_classes({split: Features.from_arrow_schema(read_schema(own[0])) for split, own in files.items()}, str(root))


def check_classes(features: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if a column's classes have other names, or another order, than in the training split."""
    for split, own in features.items():
        for name, feature in own.items():
            here, train = _stored_names(feature), _stored_names(features["train"].get(name))
            if here is not None and train is not None and here != train:
                raise ValueError(
                    f"{where}: the classes of {name!r} are {short(here)} in {split}, but {short(train)} in train"
                )


def _load(what: str, *arguments: Any, **options: Any) -> Any:
    """Turn the many kinds of errors of datasets.load_dataset into one line."""
    from datasets import load_dataset

    try:
        return load_dataset(*arguments, **options)
    except Exception as error:  # datasets raises its own types, pyarrow's among their causes
        raise OSError(f"{what} cannot be read ({first_line(error.__cause__ or error)})") from None


def arrow_tables(root: Path, config: DataConfig, passed_over: PassedOver | None = None) -> dict[str, Any]:
    """The memory-mapped table of each split of a folder of arrow files."""
    from datasets import Dataset, concatenate_datasets, load_from_disk

    try:
        if (root / "dataset_dict.json").exists():
            return _pick_tables(load_from_disk(str(root)), config, str(root))
        if (root / "state.json").exists():
            return {"train": load_from_disk(str(root))}
        return {
            split: concatenate_datasets([Dataset.from_file(file) for file in files])
            for split, files in split_files(root, ".arrow", config, passed_over).items()
        }
    except (ValueError, OSError) as error:
        if str(root) in str(error) and len(str(error).splitlines()) == 1:
            raise
        raise OSError(f"{root}: the arrow files cannot be read ({first_line(error)})") from None


def _pick_tables(tables: Mapping[str, Any], config: DataConfig, where: str) -> dict[str, Any]:
    return {split: tables[name] for split, name in pick_splits(list(tables), config, where).items()}


def _tables_data(
    tables: Mapping[str, Any], config: DataConfig, where: str, title: str, passed_over: PassedOver | None = None
) -> ImageData:
    from datasets import Image

    check_classes({split: table.features for split, table in tables.items()}, where)
    features = tables["train"].features
    image = find_image_column(features, config, where)
    columns = find_label_columns(features, image, config, where)
    for split, table in tables.items():
        if missing := {image, *columns} - set(table.column_names):
            raise ValueError(f"{where}, {split}: no column {missing.pop()!r}, only {table.column_names}")
    classes, labels = _labels_of(tables, columns, class_names(features, columns[0], config), config, where)
    splits = {}
    for split, table in tables.items():
        try:
            # Not decoded here: the same code decodes the images of every source.
            rows = table.select_columns([image]).cast_column(image, Image(decode=False))
        except Exception as error:  # pyarrow's own types
            raise ValueError(f"{where}: column {image!r} holds no images ({first_line(error)})") from None
        place = f"{where}, {split}"
        check_places(rows.data.column(image), config, place)
        splits[split] = Images(
            partial(_read_row, rows, image, place, config.decoding),
            labels[split],
            f"{place} row {{}}".format,
            _stamper(rows, image, config.decoding),
            boxes=partial(_read_value, table, BOX_COLUMN) if BOX_COLUMN in table.column_names else None,
        )
    return ImageData(splits, classes, f"{title} ({counts(splits)})", passed_over or PassedOver())


def _labels_of(
    tables: Mapping[str, Any], columns: Sequence[str], stored: list[str] | None, config: DataConfig, where: str
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Names of the classes or numbers, and each split's labels, as `Images` has them.

    Args:
        columns: of the labels; stored: names of the classes, where the table or `data.classes` has them.
    """
    if config.labels == CLASSES:
        return encode_labels({split: list(table[columns[0]]) for split, table in tables.items()}, stored, where)
    row = f"{where}, {{}} row {{}}".format
    values = {split: list(zip(*(table[name] for name in columns), strict=True)) for split, table in tables.items()}
    if config.labels == NUMBERS:
        return list(columns), number_labels(values, columns, row)
    return several_labels(values, columns, stored, row)


def check_places(column: Any, config: DataConfig, where: str) -> None:
    """Refuse rows of a table that name a file outside of the data's folder instead of holding an image.

    Args:
        column: images as `datasets` stores them, a pyarrow array of {"bytes", "path"}.

    Raises:
        ValueError: the message names the first such row and its file.
    """
    import pyarrow.compute as pc

    content, paths = (pc.struct_field(column, name) for name in ("bytes", "path"))
    named = pc.and_(pc.is_null(content), pc.is_valid(paths))
    for number, path in zip(pc.indices_nonzero(named).to_pylist(), pc.filter(paths, named).to_pylist(), strict=True):
        check_place(path, config, f"{where} row {number}")


def check_place(path: str, config: DataConfig, row: str) -> None:
    """Raise ValueError if a row names a file that is neither in the data's folder nor, for the hub's, of the hub.

    Without this, a table from elsewhere could have any image of this machine read, and any address opened.
    """
    if os.environ.get(OUTSIDE_FILES) == "allow":
        return
    from_hub = config.source == "hub"
    if "://" in path:
        inside = from_hub and HUB_ADDRESS.match(path) is not None
    else:
        # A link to a single file is followed, as in folders of images; so only the folder is resolved.
        folder = None if "\0" in path else _real(os.path.dirname(path))
        inside = folder is not None and any(folder.is_relative_to(root) for root in _roots(config))
    if not inside and len(path) > LONGEST_NAME:
        raise ValueError(f"{row} holds {len(path)} characters of text, {shown(path)}, in place of an image or its file")
    if not inside:
        place = "the hub and its caches" if from_hub else f"data.path={config.path}"
        raise ValueError(
            f"{row} names {path}, which is outside of {place}; the environment variable {OUTSIDE_FILES}=allow lets it "
            "be read"
        )


@functools.lru_cache(maxsize=1 << 16)
def _real(folder: str) -> Path:
    return Path(os.path.realpath(folder))


def _roots(config: DataConfig) -> list[Path]:
    """Folders that rows may name files in: the data's own, or those into which the hub's files are downloaded."""
    if config.source != "hub":
        path = config.path or ""
        return [_real(os.path.dirname(path) if os.path.isfile(path) else path)]
    from datasets import config as caches
    from huggingface_hub import constants

    return [_real(str(place)) for place in (caches.HF_DATASETS_CACHE, caches.HF_CACHE_HOME, constants.HF_HUB_CACHE)]


def _read_row(rows: Any, column: str, where: str, decoding: Decoding, index: int) -> Any:
    return decode_row(rows[index][column], f"{where} row {index}", decoding)


def _read_value(table: Any, column: str, index: int) -> Any:
    return table.select_columns([column])[index][column]


def decode_row(value: dict[str, Any] | None, name: str, decoding: Decoding = PIPELINE) -> Any:
    """A stored image, {"bytes": its encoding or None, "path": its file}, as 8-bit RGB.

    Raises:
        OSError, TooDeep: as `decode`.
    """
    value = value or {}
    source = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if source is None:
        raise OSError(f"{name} is not a readable image (it is empty)")
    return decode(source, name, decoding)


def _stamper(rows: Any, column: str, decoding: Decoding) -> Callable[[int], str] | None:
    """`Images.stamp` of a table in files; None for one in memory."""
    files = [entry["filename"] for entry in rows.cache_files]
    if not files or not len(rows):
        return None
    if (rows[0][column] or {}).get("bytes") is None:
        return partial(_path_stamp, rows, column, decoding)
    digest = hashlib.sha256("\n".join(file_stamp(file) for file in files).encode()).hexdigest()
    return f"{digest[:16]} {decoding} {{}}".format


def _path_stamp(rows: Any, column: str, decoding: Decoding, index: int) -> str:
    path = (rows[index][column] or {}).get("path")
    return f"{file_stamp(path)}|{decoding}" if path and Path(path).exists() else f"missing {path}"


# ---- writing --------------------------------------------------------------------------------------------------------


def write_parquet(
    images: np.ndarray,
    labels: np.ndarray,
    classes: Sequence[str],
    path: Path,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """One split as a parquet file with the hub's columns `img` (PNG) and `label`; it appears whole or not at all.

    Args:
        images: (count, height, width, 3) uint8.
        labels: (count,), each image's class.
        classes: their names.
        path: the file to write.
        columns: further columns, with a value for each image.
    """
    from datasets import ClassLabel, Dataset, Features, Image

    further = Dataset.from_dict(dict(columns or {}))
    features = Features({"img": Image(), "label": ClassLabel(names=list(classes)), **further.features})
    scratch = path.with_name(path.name + ".partial")
    # In memory (the PNGs of 50,000 images are 110 MB), so that no copy stays behind in a cache.
    encoded = [{"bytes": _png(pixels), "path": None} for pixels in images]
    values = {"img": encoded, "label": labels.tolist(), **further.to_dict()}
    Dataset.from_dict(values, features=features).to_parquet(str(scratch))
    os.replace(scratch, path)


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


# ---- columns --------------------------------------------------------------------------------------------------------


def find_columns(features: Any, config: DataConfig, where: str) -> tuple[str, str]:
    """The columns of images and of one class an image: those that the configuration names, else the only ones that can
    be meant.

    Raises:
        ValueError: if a named column is missing, or if none or several could be meant; the message lists the columns.
    """
    image = find_image_column(features, config, where)
    return image, find_label_columns(features, image, config, where)[0]


def find_image_column(features: Any, config: DataConfig, where: str) -> str:
    """The column of images, with errors as in `find_columns`."""
    from datasets import Image, Value

    _check_column(config.image_column, "image_column", features, where)
    typed = [name for name, feature in features.items() if isinstance(feature, Image)]
    # Files that `datasets` did not write do not mark images. There they are bytes, alone or with a path.
    encoded = [
        name
        for name, feature in features.items()
        if (isinstance(feature, Value) and "binary" in feature.dtype)
        or (isinstance(feature, dict) and "bytes" in feature)
    ]
    return config.image_column or _only_column(
        [typed, encoded], IMAGE_COLUMNS, "image_column", "images", features, where
    )


def find_label_columns(features: Any, image: str, config: DataConfig, where: str) -> list[str]:
    """The columns of labels, as `DataConfig.labels` says, with errors as in `find_columns`."""
    from datasets import ClassLabel

    if config.labels == CLASSES:
        _check_column(config.label_column, "label_column", features, where)
        labels = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
        return [config.label_column or _only_column([labels], LABEL_COLUMNS, "label_column", "labels", features, where)]
    lists = [name for name, own in features.items() if not isinstance(own, ClassLabel) and _stored_names(own)]
    if config.labels == SEVERAL and len(lists) == 1 and config.label_columns is None and config.label_column is None:
        return lists
    return label_columns(list(features), config, {image, BOX_COLUMN}, LABEL_COLUMNS, where)


def _check_column(name: str | None, field: str, features: Any, where: str) -> None:
    if name is not None and name not in features:
        raise ValueError(f"data.{field}={name!r} is not among the columns {list(features)} of {where}")


def _only_column(
    candidates: Sequence[Sequence[str]], usual: Sequence[str], field: str, what: str, features: Any, where: str
) -> str:
    """The only candidate of the first kind that has any. A usual name decides if there are several, or no candidate."""
    found = next((names for names in candidates if names), list(features))
    named = [name for name in found if name.lower() in usual]
    if len(found) == 1 and any(candidates):
        return found[0]
    if len(named) == 1:
        return named[0]
    raise ValueError(f"{where}: which of the columns {list(features)} holds the {what} is not clear; give data.{field}")


def class_names(features: Any, label: str, config: DataConfig) -> list[str] | None:
    """The class names of `data.classes` or of the label column's type; None if neither has them."""
    return read_classes(config.classes) if config.classes else _stored_names(features[label])


def _stored_names(feature: Any) -> list[str] | None:
    """The names that a column's type has for its classes, or a list's for what it holds; None without any."""
    from datasets import ClassLabel

    inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", feature)
    return list(inner.names) if isinstance(inner, ClassLabel) else None


# ---- hub ------------------------------------------------------------------------------------------------------------


def load_hub(config: DataConfig, streaming: bool) -> tuple[Any, str]:
    """The splits of a hub data set by their names there, and what errors call it."""
    name = config.path or ""
    if Path(name).exists():
        raise ValueError(f"data.path={name} is a folder or file here; data.source=hub takes a name on the hub")
    problem, commit = _ask_hub(name, config.revision)
    where = f"hub {name}" + (f" {config.config_name}" if config.config_name else "")
    options = {"name": config.config_name, "streaming": streaming}
    if problem is None:
        tables = _load(where, name, revision=config.revision, **options)
        return tables, f"{where} at {commit}" if commit else where
    # load_dataset would also use the cache, but only after half a minute of asking the hub again.
    builder = _cached(name, config.config_name, problem)
    if config.revision is not None and config.revision != builder.hash:
        raise OSError(
            f"data.revision={config.revision}: the hub cannot be reached ({problem}) and the cached copy of {name} is "
            f"of revision {builder.hash}"
        )
    tables = builder.as_streaming_dataset() if streaming else builder.as_dataset()
    return tables, f"{where} at {builder.hash} (cached)"


def _cached(name: str, config_name: str | None, problem: str) -> Any:
    """The builder of a hub data set's copy in the cache of `datasets`."""
    from datasets import config
    from datasets.packaged_modules.cache.cache import Cache

    try:
        return Cache(
            repo_id=name, dataset_name=name.split("/")[-1], config_name=config_name, hash="auto", version="auto"
        )
    except ValueError as error:  # it is not in the cache, or there in several configurations, or not in this one
        raise OSError(
            f"data.path={name}: the hub cannot be reached ({problem}), nor read from the cache "
            f"{config.HF_DATASETS_CACHE} ({' '.join(str(error).split())}); connect, or give local files with "
            "data.source=parquet, arrow or imagefolder"
        ) from None


def _ask_hub(name: str, revision: str | None) -> tuple[str | None, str | None]:
    """Why the hub cannot be reached, None if it can, and the commit of the data set there."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return None, HfApi().dataset_info(name, revision=revision, timeout=HUB_TIMEOUT).sha
    except HFValidationError as error:
        raise ValueError(f"data.path={name!r} must be a data set's name on the hub ({first_line(error)})") from None
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:  # GatedRepoError is one of the first
        wanted = f" in revision {revision}" if revision else ""
        raise OSError(
            f"data.path={name}: the hub has no such data set{wanted}, or it needs a login with access to it "
            f"({type(error).__name__})"
        ) from None
    except HfHubHTTPError as error:  # from a proxy, or from a hub that is busy
        return f"HTTP status {getattr(error.response, 'status_code', 'unknown')}", None
    except Exception as error:  # the HTTP library's own types, for names, connections, certificates, timeouts
        offline = type(error).__name__ == "OfflineModeIsEnabled"
        return "HF_HUB_OFFLINE is set" if offline else first_line(error), None
