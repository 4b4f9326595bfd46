"""What was found in images as files: tables, arrays, COCO's JSON, folders of masks."""

from __future__ import annotations

import csv
import json
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.files import whole_file, whole_folder
from hf_sparseprior.prediction.pictures import MASKS, colours, draw_legend
from hf_sparseprior.prediction.predictor import Predictor

ENDINGS: dict[str, tuple[str, ...]] = {
    "classes": (".csv", ".jsonl", ".parquet"),
    "numbers": (".csv", ".jsonl", ".parquet"),
    "features": (".npz", ".parquet"),
    "pixels": ("",),
    "objects": (".json",),
}
ARRAYS = "arrays.f32"  # features, in a partial folder
GROUP = 256  # rows of features in a group of a parquet file


def write_rows(
    predictor: Predictor, rows: Sequence[dict[str, Any]], out: Path, partial: Path, features: str | None
) -> list[str]:
    """Write rows of one kind to a new file or folder; lines for the user."""
    if predictor.kind == "pixels":
        _write_masks(predictor, rows, out, partial)
        return [f"{out}: a mask of each image, legend.png, legend.csv and masks.csv"]
    with whole_file(out) as scratch:
        if predictor.kind == "features":
            _write_features(rows, scratch, partial / ARRAYS)
            shape = " x ".join(map(str, (len(rows), *rows[0]["shape"])))
            return [f"{out}: features ({features}), {shape} float32"]
        if predictor.kind == "objects":
            count = _write_coco(predictor, rows, scratch)
            return [f"{out}: {count} objects in COCO's format"]
        _write_table(predictor, rows, scratch)
    return [f"{out}: a row for each image"]


def _write_table(predictor: Predictor, rows: Sequence[dict[str, Any]], path: Path) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return
    if path.suffix == ".parquet":
        from pyarrow import Table
        from pyarrow.parquet import write_table

        write_table(Table.from_pylist(list(rows)), path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if predictor.kind == "numbers":
            count = len(rows[0]["values"])
            names = predictor.labels or []
            if len(names) != count or names[0].startswith("LABEL_"):  # transformers' names for what has none
                names = ["value"] if count == 1 else [f"value_{place}" for place in range(count)]
            writer.writerow(["path", *names])
            writer.writerows([row["path"], *row["values"]] for row in rows)
            return
        count = len(rows[0]["labels"])
        heads = [(f"label_{place}", f"probability_{place}") for place in range(2, count + 1)]
        writer.writerow(["path", "label", "probability", *(name for pair in heads for name in pair)])
        for row in rows:
            pairs = zip(row["labels"], (f"{value:.6g}" for value in row["probabilities"]), strict=True)
            writer.writerow([row["path"], *(value for pair in pairs for value in pair)])


def _write_features(rows: Sequence[dict[str, Any]], path: Path, arrays: Path) -> None:
    """`paths` and `features` of a .npz file, or columns `path` and `features` of a parquet file."""
    stored, shape = np.memmap(arrays, dtype="<f4", mode="r"), tuple(rows[0]["shape"])
    size = int(np.prod(shape))
    begins = [row["at"] for row in rows]
    if path.suffix == ".npz":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            with archive.open("paths.npy", "w") as file:
                np.lib.format.write_array(file, np.array([row["path"] for row in rows]), allow_pickle=False)
            with archive.open("features.npy", "w", force_zip64=True) as file:
                head = {"descr": "<f4", "fortran_order": False, "shape": (len(rows), *shape)}
                np.lib.format.write_array_header_1_0(file, head)
                for begin in begins:
                    file.write(stored[begin : begin + size].tobytes())
        return
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    kind: Any = pyarrow.float32()
    for side in reversed(shape):
        kind = pyarrow.list_(kind, side)
    schema = pyarrow.schema([("path", pyarrow.string()), ("features", kind)])
    with ParquetWriter(path, schema) as writer:
        for first in range(0, len(rows), GROUP):
            own = rows[first : first + GROUP]
            values: Any = np.concatenate([stored[row["at"] : row["at"] + size] for row in own])
            column: Any = pyarrow.array(values)
            for side in reversed(shape):
                column = pyarrow.FixedSizeListArray.from_arrays(column, side)
            writer.write_table(pyarrow.table([[row["path"] for row in own], column], schema=schema))


def _write_coco(predictor: Predictor, rows: Sequence[dict[str, Any]], path: Path) -> int:
    """COCO's format with scores; ids from 1 on, category ids from 0 on as the model numbers its classes."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        images.append({"id": number, "file_name": row["path"], "width": row["width"], "height": row["height"]})
        for own in row["objects"]:
            box = own["bbox"]
            annotations.append(
                {
                    **{"id": len(annotations) + 1, "image_id": number, "category_id": own["category"]},
                    **{"bbox": box, "score": own["score"], "area": own.get("area", round(box[2] * box[3], 2))},
                    **{"iscrowd": 0, **({"segmentation": own["segmentation"]} if "segmentation" in own else {})},
                }
            )
    labels = predictor.labels or []
    categories = [{"id": number, "name": name} for number, name in enumerate(labels)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(content), encoding="utf-8")
    return len(annotations)


def _write_masks(predictor: Predictor, rows: Sequence[dict[str, Any]], out: Path, partial: Path) -> None:
    with whole_folder(out) as scratch:
        for row in rows:
            place = scratch / row["mask"]
            shutil.copyfile(partial / MASKS / row["mask"], place)  # the partial folder stays whole until the end
        with (scratch / "masks.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("path", "mask"), *((row["path"], row["mask"]) for row in rows)])
        labels = predictor.labels or []
        with (scratch / "legend.csv").open("w", newline="", encoding="utf-8") as file:
            palette = [f"#{bytes(colour).hex()}" for colour in colours(len(labels))]
            lines = [(number, name, colour) for number, (name, colour) in enumerate(zip(labels, palette, strict=True))]
            csv.writer(file).writerows([("number", "class", "colour"), *lines])
        draw_legend(labels, scratch / "legend.png")
