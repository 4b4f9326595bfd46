"""Pictures of what was found: masks with a palette, boxes over images, sheets of images."""

from __future__ import annotations

import colorsys
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.base.files import whole_file
from hf_sparseprior.prediction.inputs import Input, Reader
from hf_sparseprior.prediction.predictor import Predictor

MASKS = "masks"  # folder of masks within a partial folder
EDGE, COLUMNS, EACH = 160, 6, 12  # pixels of an image in a sheet, images in a row, and of each half
LINE = 14  # pixels of a line of text


def colours(count: int) -> list[tuple[int, int, int]]:
    """So many colours of 8 bits, those of neighbours far apart: hues at golden angles."""
    values = [
        colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.85 - 0.35 * (number // 8 % 2), 0.95 - 0.3 * (number // 16 % 2))
        for number in range(count)
    ]
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in values]


def mask_name(own: Input) -> str:
    """A file for an image's mask: its name, and some of the path's hash, which keeps images of one name apart."""
    stem = re.sub(r"[^\w.-]", "_", Path(own.file).stem)[:80]
    frame = "" if own.frame is None else f"_{own.frame}"
    return f"{stem}{frame}_{hashlib.sha256(own.name.encode()).hexdigest()[:8]}.png"


def draw_mask(
    predictor: Predictor, own: Input, image: Any, mask: np.ndarray, folder: Path, overlay: Path | None
) -> dict[str, Any]:
    """Write a mask as PNG, class numbers with a palette, above 256 classes 16 bits of grey; its row."""
    from PIL import Image

    name, places = mask_name(own), folder / MASKS
    places.mkdir(parents=True, exist_ok=True)
    count = max(len(predictor.labels or ()), int(mask.max()) + 1)
    palette = colours(count)
    if count <= 256:
        drawn = Image.fromarray(mask.astype(np.uint8), mode="P")
        drawn.putpalette([value for colour in palette for value in colour])
    else:
        drawn = Image.fromarray(mask.astype(np.uint16))
    drawn.save(places / name)
    if overlay is not None:
        overlay.mkdir(parents=True, exist_ok=True)
        coloured = Image.fromarray(np.array(palette, dtype=np.uint8)[mask])
        Image.blend(image, coloured, 0.5).save(overlay / name)
    return {"path": own.name, "mask": name, "overlay": name}


def draw_objects(
    predictor: Predictor, own: Input, image: Any, found: Sequence[Mapping[str, Any]], overlay: Path | None
) -> dict[str, Any]:
    """The row of an image's objects; with `overlay` their boxes over the image."""
    from PIL import ImageDraw

    if overlay is not None:
        overlay.mkdir(parents=True, exist_ok=True)
        drawn, labels = image.copy(), predictor.labels or []
        palette = colours(max(len(labels), 1 + max((one["category"] for one in found), default=0)))
        pen = ImageDraw.Draw(drawn)
        for one in reversed(found):
            left, top, width, height = one["bbox"]
            colour = palette[one["category"]]
            pen.rectangle((left, top, left + width, top + height), outline=colour, width=2)
            name = labels[one["category"]] if one["category"] < len(labels) else str(one["category"])
            pen.text((left + 3, top + 1), f"{name} {one['score']:.2f}", fill=colour)
        drawn.save(overlay / mask_name(own))
    about = {"path": own.name, "width": image.width, "height": image.height, "overlay": mask_name(own)}
    return {**about, "objects": list(found)}


def draw_legend(labels: Sequence[str], path: Path) -> None:
    """Classes with their colours, in columns of 30."""
    from PIL import Image, ImageDraw

    rows = max(1, min(len(labels), 30))
    columns = max(1, -(-len(labels) // rows))
    drawn = Image.new("RGB", (220 * columns, 20 * rows + 8), "white")
    pen = ImageDraw.Draw(drawn)
    for number, (name, colour) in enumerate(zip(labels, colours(len(labels)), strict=True)):
        left, top = 220 * (number // rows) + 6, 20 * (number % rows) + 6
        pen.rectangle((left, top, left + 24, top + 14), fill=colour)
        pen.text((left + 32, top + 1), f"{number} {name}"[:30], fill="black")
    drawn.save(path)


def draw_sheet(rows: Sequence[Mapping[str, Any]], inputs: Mapping[str, Input], read: Reader, out: Path) -> None:
    """The images whose most probable label has the largest and the smallest probabilities, with both, as PNG."""
    order = sorted(rows, key=lambda row: -row["probabilities"][0])

    def tile(row: Mapping[str, Any]) -> Tile:
        text = f"{row['labels'][0]} {100 * row['probabilities'][0]:.1f} %"
        image = read(inputs[row["path"]])
        middle = image[len(image) // 2] if isinstance(image, list) else image  # of a clip
        return Tile(middle, text, Path(row["path"]).name[-26:])

    halves = {"surest": order[:EACH], "least sure": order[::-1][:EACH]}
    draw_tiles({title: [tile(row) for row in own] for title, own in halves.items()}, out)


@dataclass
class Tile:
    """An image of Pillow's, and two lines below it."""

    image: Any
    text: str
    further: str

    def __post_init__(self) -> None:
        """Make the image small at once: only tiles stay in memory."""
        from PIL import ImageOps

        self.image = ImageOps.contain(self.image, (EDGE, EDGE))


def draw_tiles(parts: Mapping[str, Sequence[Tile]], out: Path) -> None:
    """Tiles in rows, below the title of their part, as PNG."""
    from PIL import Image, ImageDraw

    height = sum(LINE + 6 + -(-len(tiles) // COLUMNS) * (EDGE + 2 * LINE + 6) for tiles in parts.values())
    drawn = Image.new("RGB", (COLUMNS * (EDGE + 6) + 6, height + 6), "white")
    pen, top = ImageDraw.Draw(drawn), 6
    for title, tiles in parts.items():
        pen.text((6, top), title, fill="black")
        top += LINE + 6
        for place, tile in enumerate(tiles):
            left, down = 6 + place % COLUMNS * (EDGE + 6), top + place // COLUMNS * (EDGE + 2 * LINE + 6)
            image = tile.image
            drawn.paste(image, (left + (EDGE - image.width) // 2, down + (EDGE - image.height) // 2))
            pen.text((left, down + EDGE + 1), tile.text[:26], fill="black")
            pen.text((left, down + EDGE + 1 + LINE), tile.further[:26], fill="gray")
        top += -(-len(tiles) // COLUMNS) * (EDGE + 2 * LINE + 6)
    with whole_file(out) as scratch:
        drawn.save(scratch)
