"""What a model sees in images: `sparseprior predict MODEL IMAGES --out FILE`, and `sp.predict`.

Rows are written to OUT.partial as they come. A command that was killed goes on from there when it is given again, and
OUT appears whole.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparseprior.base.files import check_new, whole_file, whole_folder
from hf_sparseprior.base.json_files import parse_json
from hf_sparseprior.cli.image_files import TooDeep, printable
from hf_sparseprior.prediction.files import ARRAYS, ENDINGS, write_rows
from hf_sparseprior.prediction.inputs import Input, Reader, find_inputs, places_of
from hf_sparseprior.prediction.pictures import draw_mask, draw_objects, draw_sheet
from hf_sparseprior.prediction.predictor import Predictor
from hf_sparseprior.prediction.predictors import load_predictor

MOST = {"cpu": 16, "cuda": 64}  # images at once by default
FREE = 0.5  # share of the free memory that a batch may take
UNREADABLE = ("skip", "fatal")
TOP, THRESHOLD = 5, 0.5  # labels of an image, least score of an object
SHOWN = 5  # unreadable files that a message names


@dataclass(frozen=True)
class Options:
    """What rows depend on besides the model, and how they are made; see `predict`."""

    top: int | None = None
    features: str | None = None
    threshold: float | None = None
    every: int | None = None
    unreadable: str = "skip"
    batch: int | None = None
    overlay: bool = False

    def check(self) -> None:
        """Raise ValueError for a bad value."""
        for name in ("top", "every", "batch"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be an integer above 0")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold!r} must be from 0 to 1")
        if self.unreadable not in UNREADABLE:
            raise ValueError(f"unreadable={self.unreadable!r} must be one of {', '.join(UNREADABLE)}")


def predict(
    model: Any,
    images: str | os.PathLike | Sequence[str | os.PathLike],
    out: str | os.PathLike,
    *,
    top: int | None = None,
    features: str | None = None,
    threshold: float | None = None,
    column: str | None = None,
    every: int | None = None,
    batch: int | None = None,
    device: str | None = None,
    processor: Any = None,
    unreadable: str = "skip",
    sheet: str | os.PathLike | None = None,
    overlay: str | os.PathLike | None = None,
) -> list[str]:
    """Look at images with a model, and write what it finds.

    A classifier gives a table of paths, labels and probabilities; a model that learned numbers a table of these; a
    segmentor a folder of masks, PNG files of class numbers with a palette and a legend; a detector COCO's JSON.

    Args:
        model: folder of a training run, of a saved model of ours or of transformers, of an adapter, or of an exported
            file; a name on the hub; or a model of ours, of transformers or of timm.
        images: folders, image files, lists (.txt), tables (.csv, .tsv, .parquet) and videos, one or several. For a
            model of clips videos alone, a row each.
        out: new file: .csv, .jsonl or .parquet of a classifier, .npz or .parquet with `features`, .json of a detector;
            a new folder of a segmentor.
        top: how many labels of an image a classifier gives, the most probable first; default 5.
        features: "pooled" (images, dim) or "patches" (images, patches, dim) float32, in place of what a head finds.
        threshold: least score of an object that a detector gives; default 0.5.
        column: of a table's paths; default its column path, file, image, filename or file_name.
        every: of a video each so many frames; default all. For a model of clips, how many frames those of a clip are
            apart; default a clip spans its video.
        batch: images at once; default as many as fit the memory, at most 16 on a CPU and 64 on a GPU.
        device: default a GPU if there is one.
        processor: an image processor of transformers or a folder that has one; default the model's.
        unreadable: "skip" leaves out files that cannot be read, and lists them; "fatal" ends with the first.
        sheet: new PNG file of the images that a classifier is surest and least sure of.
        overlay: new folder of the images with masks or boxes drawn over them.

    Returns:
        Lines for the user.

    Raises:
        OSError: for a model or images that are not there, an existing `out`, one that another process writes, and with
            "fatal" for the first file that cannot be read.
        ValueError: for a bad option, and one that means nothing for this model.
    """
    options = Options(top, features, threshold, every, unreadable, batch, overlay is not None)
    options.check()
    out = Path(out)
    for new in (out, sheet, overlay):
        if new is not None:
            check_new(Path(new))
    given = places_of(images)
    predictor = load_predictor(model, processor, features, device)
    clips = predictor.num_frames is not None
    inputs, passed_over = find_inputs(given, column, every or 1, clips)
    _check_out(predictor, out, options, sheet, overlay, clips or any(own.frame is not None for own in inputs))
    partial = out.with_name(out.name + ".partial")
    with _begun(partial, predictor, options) as (log, done):
        left = [own for own in inputs if own.name not in done]
        _look(predictor, left, options, partial, log, len(inputs))
        wanted, left_out = _in_order(inputs, partial / LOG, predictor.examples)
        lines = write_rows(predictor, wanted, out, partial, features)
        if sheet is not None:
            draw_sheet(wanted, {own.name: own for own in inputs}, _reader(predictor, options), Path(sheet))
            lines.append(f"{sheet}: the images that it is surest and least sure of")
        if overlay is not None:
            _write_overlay(wanted, partial / OVERLAY, Path(overlay))
            lines.append(f"{overlay}: images with what was found")
    shutil.rmtree(partial, ignore_errors=True)
    head = f"looked at {len(wanted)} {predictor.examples}" + (f", {len(done)} of them before" if done else "")
    if (line := passed_over.line()) is not None:
        lines.append(line)
    if left_out:
        _list_unreadable(left_out, out.with_name(f"{out.stem}_unreadable.csv"), lines)
    return [f"{head} with {predictor.title}", *lines]


def _write_overlay(rows: Sequence[Mapping[str, Any]], drawn: Path, out: Path) -> None:
    with whole_folder(out) as scratch:
        for row in rows:
            shutil.copyfile(drawn / row["overlay"], scratch / row["overlay"])


def _list_unreadable(left_out: Mapping[str, str], path: Path, lines: list[str]) -> None:
    """Files that cannot be read: the first ones in a line, all of them with the reasons in a table."""
    shown = "; ".join(list(left_out.values())[:SHOWN]) + ("; ..." if len(left_out) > SHOWN else "")
    path.unlink(missing_ok=True)
    with whole_file(path) as scratch, scratch.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "reason"), *left_out.items()])
    lines.append(f"not readable: {len(left_out)}, listed in {path}: {shown}")


def _check_out(predictor: Predictor, out: Path, options: Options, sheet: Any, overlay: Any, has_videos: bool) -> None:
    """Refuse a file of a kind that what the model finds cannot be written to, and options that mean nothing."""
    allowed, kind = ENDINGS[predictor.kind], predictor.kind
    ending = out.suffix.lower()
    if ending not in allowed:
        known = "a folder, without an ending" if allowed == ("",) else f"a file that ends in {' or '.join(allowed)}"
        hint = ""
        if kind == "features" and options.features is None:
            hint = " (it has no head: features='pooled' or 'patches' says which features)"
        raise ValueError(f"out={out} must be {known} for {predictor.title}, which gives {kind}{hint}")
    if kind == "features" and options.features is None:
        raise ValueError(f"{predictor.title} has no head: features='pooled' or 'patches' says what to write")
    for name, value, takers, kinds in (
        ("top", options.top, "classifiers", ("classes",)),
        ("sheet", sheet, "classifiers", ("classes",)),
        ("threshold", options.threshold, "detectors", ("objects",)),
        ("overlay", overlay, "segmentors and detectors", ("pixels", "objects")),
    ):
        if value is not None and kind not in kinds:
            raise ValueError(f"{name}={value} is for {takers}, and {predictor.title} gives {kind}")
    if options.every is not None and not has_videos:
        raise ValueError(f"every={options.every} is for videos, and there is none")
    if sheet is not None and Path(sheet).suffix.lower() != ".png":
        raise ValueError(f"sheet={sheet} must end in .png")


# ---- going on where it stopped --------------------------------------------------------------------------------------

LOG = "rows.jsonl"
OVERLAY = "overlay"


@contextmanager
def _begun(folder: Path, predictor: Predictor, options: Options) -> Iterator[tuple[Any, set[str]]]:
    """The open log of a folder, which is made or gone on with, and the names that it has.

    Raises:
        OSError: if another process writes there. ValueError: if it is of another model or other options.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    path = folder / LOG
    head = {"model": predictor.digest, "processor": _settings(predictor.processor), "kind": predictor.kind}
    named = ("top", "features", "threshold", "overlay", *(["every"] if predictor.num_frames is not None else []))
    head |= {name: getattr(options, name) for name in named}
    with path.open("a+b") as log:
        _lock(log, folder)
        log.seek(0)
        content = log.read()
        whole = content[: content.rfind(b"\n") + 1]  # a row that a kill cut off is made again
        log.truncate(len(whole))
        lines = whole.splitlines()
        if not lines:
            log.write(json.dumps(head).encode() + b"\n")
        elif (written := _parsed(lines[0])) != head:
            names = [name for name in head if not isinstance(written, dict) or written.get(name) != head[name]]
            raise ValueError(f"{folder} is of another {' and '.join(names)}; remove it, or choose another out")
        done = {row["path"] for row in map(_parsed, lines[1:]) if isinstance(row, dict) and "unreadable" not in row}
        if done:
            place = printable(str(folder))
            print(f"goes on after {len(done)} {predictor.examples} in {place}", file=sys.stderr, flush=True)
        yield log, done


def _settings(processor: Any) -> dict[str, Any] | None:
    """What an image processor of transformers is saved as; None for the pipeline of a run of mm, which is the run's."""
    return None if processor is None else json.loads(processor.to_json_string())


def _lock(log: Any, folder: Path) -> None:
    """Keep a second process away; where files cannot be locked nothing is done."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"{folder} is being written by another process") from None
    except OSError:
        return


def _parsed(line: bytes) -> Any:
    with suppress(ValueError):
        return parse_json(line)
    return None


def _in_order(inputs: Sequence[Input], log: Path, examples: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of a log in the order of the inputs, and why the others cannot be read, by path.

    Raises:
        OSError: if none can be.
    """
    lines = map(_parsed, log.read_bytes().splitlines()[1:])
    rows = {row["path"]: row for row in lines if isinstance(row, dict)}  # of one that came twice the last
    found = [rows[own.name] for own in inputs if own.name in rows]
    left_out = {row["path"]: row["unreadable"] for row in found if "unreadable" in row}
    if len(left_out) == len(found):
        raise OSError(f"none of {len(found)} {examples} can be read; the first: {next(iter(left_out.values()))}")
    return [row for row in found if "unreadable" not in row], left_out


# ---- looking --------------------------------------------------------------------------------------------------------


def batch_size(predictor: Predictor) -> int:
    """How many images at once fit the free memory, a power of two."""
    most = MOST["cuda" if predictor.device == "cuda" else "cpu"]
    free = _free_bytes(predictor.device)
    while most > 1 and free is not None and most * predictor.per_image > FREE * free:
        most //= 2
    return most


def _free_bytes(device: str) -> int | None:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def _reader(predictor: Predictor, options: Options) -> Reader:
    return Reader(predictor.processor, predictor.num_frames, options.every)


def _look(predictor: Predictor, inputs: list[Input], options: Options, folder: Path, log: Any, total: int) -> None:
    """Write a row for each input, in batches; the next batch is read meanwhile."""
    size = options.batch or batch_size(predictor)
    read = _reader(predictor, options)
    arrays = folder / ARRAYS
    progress = _Progress(predictor.examples, total, total - len(inputs))
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(_read, read, inputs[:size], options.unreadable)
        first = 0
        while first < len(inputs):
            images, rows = ahead.result()
            first += size
            ahead = pool.submit(_read, read, inputs[first : first + size], options.unreadable)
            if images:
                try:
                    rows += _found(predictor, images, options, folder)
                except torch.OutOfMemoryError:
                    if len(images) == 1 or options.batch is not None:
                        raise MemoryError(f"batch={size}: the GPU's memory is too small for it") from None
                    torch.cuda.empty_cache()
                    size = max(1, size // 2)
                    for begin in range(0, len(images), size):
                        rows += _found(predictor, images[begin : begin + size], options, folder)
                    ahead.result()
                    ahead = pool.submit(_read, read, inputs[first : first + size], options.unreadable)
            _append(log, rows, arrays)
            progress.add(len(rows))
    progress.close()


def _append(log: Any, rows: list[dict[str, Any]], arrays: Path) -> None:
    """Rows as lines; features go before them into a file of their own, at a place that the row names."""
    for row in rows:
        if (value := row.pop("array", None)) is not None:
            with arrays.open("ab") as file:
                file.seek(0, os.SEEK_END)
                row |= {"at": file.tell() // 4, "shape": list(value.shape)}
                file.write(np.ascontiguousarray(value, dtype="<f4").tobytes())
    log.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    log.flush()


def _read(read: Reader, inputs: Sequence[Input], unreadable: str) -> tuple[list[tuple[Input, Any]], list[dict]]:
    """Images with what they are, and rows of those that cannot be read."""
    images, rows = [], []
    for own in inputs:
        try:
            images.append((own, read(own)))
        except (OSError, TooDeep) as error:
            if unreadable == "fatal":
                raise
            rows.append({"path": own.name, "unreadable": str(error)})
    return images, rows


def _found(
    predictor: Predictor, images: Sequence[tuple[Input, Any]], options: Options, folder: Path
) -> list[dict[str, Any]]:
    """Rows of a batch."""
    overlay = folder / OVERLAY if options.overlay else None
    names, pictures = [own.name for own, _ in images], [image for _, image in images]
    if predictor.kind == "pixels":
        return [
            draw_mask(predictor, own, image, mask, folder, overlay)
            for (own, image), mask in zip(images, predictor.masks(pictures), strict=True)
        ]
    if predictor.kind == "objects":
        threshold = THRESHOLD if options.threshold is None else options.threshold
        return [
            draw_objects(predictor, own, image, one, overlay)
            for (own, image), one in zip(images, predictor.objects(pictures, threshold), strict=True)
        ]
    outputs = predictor.found(pictures)
    if predictor.kind == "features":
        return [{"path": name, "array": value.numpy()} for name, value in zip(names, outputs["features"], strict=True)]
    if predictor.kind == "numbers":
        return [{"path": name, "values": value.tolist()} for name, value in zip(names, outputs["logits"], strict=True)]
    rows = classes(outputs["logits"], predictor, options.top or TOP)
    return [{"path": name, **row} for name, row in zip(names, rows, strict=True)]


def classes(logits: Tensor, predictor: Predictor, top: int) -> list[dict[str, Any]]:
    """Of logits (B, classes) the `top` labels and their probabilities, the most probable first.

    With one class an image probabilities add up to 1; with several each is a probability of its own.
    """
    shares = logits.double().softmax(-1) if predictor.one_class else logits.double().sigmoid()
    best = shares.sort(dim=-1, descending=True, stable=True)
    names = predictor.labels or [str(number) for number in range(logits.shape[-1])]
    return [
        {"labels": [names[place] for place in order], "probabilities": values}
        for order, values in zip(best.indices[:, :top].tolist(), best.values[:, :top].tolist(), strict=True)
    ]


class _Progress:
    """A line of progress on a terminal; elsewhere one line each tenth."""

    def __init__(self, examples: str, total: int, done: int) -> None:
        self.examples = examples
        self.total, self.done, self.said = total, done, 10 * done // max(total, 1)

    def add(self, count: int) -> None:
        self.done += count
        tenth = 10 * self.done // max(self.total, 1)
        line = f"{self.done} of {self.total} {self.examples}"
        if sys.stderr.isatty():
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        elif tenth > self.said:
            print(line, file=sys.stderr, flush=True)
        self.said = tenth

    def close(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)
