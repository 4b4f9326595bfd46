"""Parquet, arrow and hub sources as streams: images are read as they are needed, for sets too large for a disk."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.images.config import SPLITS, DataConfig
from hf_sparseprior.images.sources.images import class_indices, class_of, data_folder, pick_splits, split_files
from hf_sparseprior.images.sources.tables import (
    arrow_tables,
    check_classes,
    check_place,
    class_names,
    find_columns,
    load_hub,
)
from hf_sparseprior.runs.command import shown

# Rows that are read at a time.
BATCH = 32
# Shards of a memory-mapped table; as many loader processes or machines can share it.
ARROW_SHARDS = 64
# A row's index is its shard's number, then so many bits for its place in the shard.
ROW_BITS = 32


@dataclass
class StreamData:
    """Every split of a source as a stream, in the stored order.

    splits: `datasets.IterableDataset`s of {"image": {"bytes", "path"}, "label": int, "index": int}. The image is still
        encoded, `decode_row` reads it; the index stands for the same image in every epoch, order and process, and
        `row_name` turns it into text for errors. They can be shuffled and split over machines and loader processes
        (`shuffle`, `datasets.distributed.split_dataset_by_node`), best over at most their `num_shards`.
    classes: names of the classes.
    sizes: number of images of each split, None if the source does not say.
    origins: where splits come from, where that is something else than their names.
    """

    splits: dict[str, Any]
    classes: list[str]
    sizes: dict[str, int | None]
    description: str
    origins: dict[str, str] = field(default_factory=dict)


@dataclass
class _Shards:
    """One split of a source. `read(shard, columns)` gives the rows of a shard, some at a time, as {column: values}."""

    features: Any
    count: int
    size: int | None
    read: Callable[[int, Sequence[str]], Iterator[Mapping[str, Sequence[Any]]]]


def stream_data(config: DataConfig) -> StreamData:
    """The three splits of a hub, parquet or arrow source without reading, decoding or downloading them as a whole.

    Raises:
        ValueError, OSError: for a split that the source does not have (a stream cannot be cut), for labels without
            names (they would have to be collected from all images), and for what readers of whole tables refuse.
    """
    sources, where = STREAMS[config.source](config)
    missing = [split for split in SPLITS if split not in sources]
    if missing:
        raise ValueError(
            f"{where} has no {' and no '.join(missing)} split, and none can be cut from a stream; give the source's "
            "own names with data.splits={train: NAME, validation: NAME, test: NAME}, or set data.streaming=false"
        )
    features = {split: source.features for split, source in sources.items()}
    if None in features.values():
        raise ValueError(f"{where} does not say its columns before it is read; set data.streaming=false")
    check_classes(features, where)
    columns = find_columns(features["train"], config, where)
    for split, own in features.items():
        if absent := set(columns) - set(own):
            raise ValueError(f"{where}, {split}: no column {absent.pop()!r}, only {list(own)}")
    classes = class_names(features["train"], columns[1], config)
    if classes is None:
        raise ValueError(
            f"{where}: column {columns[1]!r} does not say the names of its classes; give a file of them, one a line, "
            "as data.classes"
        )
    splits = {
        split: _iterable(source, columns, classes, config, f"{where}, {split}") for split, source in sources.items()
    }
    sizes = {split: source.size for split, source in sources.items()}
    known = ", ".join(f"{'unknown' if size is None else size} {split}" for split, size in sizes.items())
    return StreamData(splits, classes, sizes, f"{where} ({known})")


def row_name(where: str, index: int) -> str:
    """A streamed image's name for errors, from its "index"."""
    return f"{where} shard {index >> ROW_BITS} row {index & ((1 << ROW_BITS) - 1)}"


def _iterable(source: _Shards, columns: tuple[str, str], classes: Sequence[str], config: DataConfig, where: str) -> Any:
    from datasets import Features, Image, IterableDataset, Value

    return IterableDataset.from_generator(
        _rows,
        features=Features({"image": Image(decode=False), "label": Value("int64"), "index": Value("int64")}),
        gen_kwargs={
            "shards": list(range(source.count)),  # a list is what `datasets` shuffles and shares out
            "read": source.read,
            "columns": columns,
            "classes": tuple(classes),
            "config": config,
            "where": where,
        },
    )


def _rows(
    shards: list[int],
    read: Callable[[int, Sequence[str]], Iterator[Mapping[str, Sequence[Any]]]],
    columns: tuple[str, str],
    classes: Sequence[str],
    config: DataConfig,
    where: str,
) -> Iterator[dict[str, Any]]:
    image, label = columns
    index_of = class_indices(classes)
    for shard in shards:
        pairs = (pair for batch in read(shard, columns) for pair in zip(batch[image], batch[label], strict=True))
        for number, (stored, name) in enumerate(pairs):
            index = (shard << ROW_BITS) + number
            try:
                number_of_class = class_of(name, index_of, classes)
            except ValueError as error:
                raise ValueError(f"{row_name(where, index)}: {error}") from None
            yield {"image": _encoded(stored, config, row_name(where, index)), "label": number_of_class, "index": index}


def _encoded(stored: Any, config: DataConfig, row: str) -> dict[str, Any]:
    """A stored image as {"bytes", "path"}; one that is stored as an address (hf://...) is fetched."""
    if isinstance(stored, Mapping) or stored is None:
        stored = stored or {}
        content, path = stored.get("bytes"), stored.get("path")
    elif isinstance(stored, (bytes, str)):
        content, path = (stored, None) if isinstance(stored, bytes) else (None, stored)
    else:
        raise ValueError(f"{row} holds no image, but {shown(stored)}")
    if content is None and path:
        check_place(path, config, row)
    if content is None and path and "://" in path:
        import fsspec

        with fsspec.open(path, "rb") as file:
            content = file.read()
    return {"bytes": content, "path": path}


# ---- sources --------------------------------------------------------------------------------------------------------


def _parquet(config: DataConfig) -> tuple[dict[str, _Shards], str]:
    """A shard is a row group. Only pyarrow reads it: a scan of `datasets` that is left half read can abort Python at
    exit.
    """
    from datasets import Features
    from pyarrow.parquet import ParquetFile

    root = data_folder(config)
    sources = {}
    for split, files in split_files(root, ".parquet", config).items():
        groups, size = [], 0
        for path in files:
            try:
                with ParquetFile(path) as file:
                    groups += [(path, group) for group in range(file.num_row_groups)]
                    size += file.metadata.num_rows
                    features = Features.from_arrow_schema(file.schema_arrow)
            except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is a ValueError
                raise OSError(f"{path}: the parquet file cannot be read ({first_line(error)})") from None
        sources[split] = _Shards(features, len(groups), size, partial(_read_parquet, groups))
    return sources, str(root)


def _read_parquet(groups: Sequence[tuple[str, int]], shard: int, columns: Sequence[str]) -> Iterator[Mapping]:
    from pyarrow.parquet import ParquetFile

    path, group = groups[shard]
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH, row_groups=[group], columns=list(columns), use_threads=False):
                yield batch.to_pydict()
    except (ValueError, OSError) as error:
        raise OSError(f"{path}, row group {group}: the parquet file cannot be read ({first_line(error)})") from None


def _arrow(config: DataConfig) -> tuple[dict[str, _Shards], str]:
    root = data_folder(config)
    sources = {}
    for split, table in arrow_tables(root, config).items():
        count = max(1, min(ARROW_SHARDS, len(table)))
        read = partial(_read_arrow, table.with_format("arrow"), count)
        sources[split] = _Shards(table.features, count, len(table), read)
    return sources, str(root)


def _read_arrow(table: Any, count: int, shard: int, columns: Sequence[str]) -> Iterator[Mapping]:
    first, last = (len(table) * end // count for end in (shard, shard + 1))
    for start in range(first, last, BATCH):
        yield table[start : min(start + BATCH, last)].select(list(columns)).to_pydict()


def _hub(config: DataConfig) -> tuple[dict[str, _Shards], str]:
    tables, where = load_hub(config, streaming=True)
    known = next(iter(tables.values())).info.splits or {}
    sources = {}
    for split, name in pick_splits(list(tables), config, where).items():
        table = tables[name]
        size = known[name].num_examples if name in known else None
        sources[split] = _Shards(table.features, table.num_shards, size, partial(_read_table, table))
    return sources, where


_open_batches: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


@atexit.register
def _close_batches() -> None:
    """Close in order what is half read at Python's exit, as far as `datasets` can: see `_parquet`."""
    for batches in list(_open_batches):
        batches.close()


def _read_table(table: Any, shard: int, columns: Sequence[str]) -> Iterator[Mapping]:
    from datasets import Image

    image = columns[0]
    rows = table.select_columns(list(columns)).cast_column(image, Image(decode=False))
    # The shard itself is not iterated over: in a loader process that would split it among the processes again.
    batches = rows.shard(rows.num_shards, shard).iter(batch_size=BATCH)
    _open_batches.add(batches)
    return batches


STREAMS = {"parquet": _parquet, "arrow": _arrow, "hub": _hub}
