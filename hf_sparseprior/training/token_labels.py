"""Token labelling: every patch token learns what a teacher sees in its place (Jiang et al. 2021, "All tokens matter").

A label map holds, for each cell of a grid over the whole image, the k most probable classes and their probabilities.
The rest of a cell's probability is spread evenly over the other classes. Outside of the image all classes are equally
likely. A folder of maps is a header (`label_maps.json`) and files of some thousand images each, which carry their
checksums.

Shape letters: B batch, N patches of the model, C classes, k classes of a map, (h, w) grid of the maps, (H, W) grid of
the model.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.files import write_bytes, write_text
from hf_sparseprior.base.json_files import read_json
from hf_sparseprior.priors.token_pruning import counted_patches, gather_tokens

HEADER = "label_maps.json"
IMAGES_PER_FILE = 4096
MOST_CLASSES = 2**15 - 1  # classes are stored in 16 bits
# In half precision the probabilities may add up to a little more than 1.
SUM_TOLERANCE = 1e-2


# ---- what of an image is seen ---------------------------------------------------------------------------------------

# A view is a 3x3 matrix that maps a place (x, y, 1) of what the model sees to its place in the whole image, both
# measured as fractions of width and height. The view of several operations is the product of their views, in their
# order.
WHOLE = np.eye(3)
FLIPPED = np.array([[-1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


def box_view(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    """The view of a box, which is given in fractions of the image."""
    return np.array([[right - left, 0.0, left], [0.0, bottom - top, top], [0.0, 0.0, 1.0]])


def affine_view(coefficients: Sequence[float], size: tuple[int, int]) -> np.ndarray:
    """The view of Pillow's `Image.transform(size, AFFINE, coefficients)` of an image of (width, height) pixels."""
    scale = np.diag([*size, 1.0])
    matrix = np.array([coefficients[:3], coefficients[3:], [0.0, 0.0, 1.0]])
    return np.linalg.inv(scale) @ matrix @ scale


def cell_shares(views: Tensor, map_grid: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """How much each cell of a map has in each patch (B, N, h * w): RoIAlign along a view.

    A map is bilinear between the middles of its cells and constant outside of them. A patch is the mean of evenly
    spaced samples. There are as few of them as possible, but no further apart than cells are when the whole image is
    seen. Samples outside of the image count for no cell.

    Args:
        views: (B, 2, 3), upper rows of views.
        map_grid: (h, w). grid: (H, W).
    """
    samples = [max(1, -(-cells // patches)) for cells, patches in zip(map_grid, grid, strict=True)]
    rows, columns = (
        (torch.arange(patches * per_patch, device=views.device, dtype=views.dtype) + 0.5) / (patches * per_patch)
        for patches, per_patch in zip(grid, samples, strict=True)
    )
    seen = torch.stack(torch.broadcast_tensors(columns, rows[:, None], torch.ones_like(columns)), -1)
    places = torch.einsum("bij,yxj->byxi", views, seen)
    cells = torch.eye(map_grid[0] * map_grid[1], device=views.device, dtype=views.dtype).reshape(1, -1, *map_grid)
    shares = F.grid_sample(cells.expand(len(views), -1, -1, -1), 2 * places - 1, "bilinear", "border", False)
    inside = ((places >= 0) & (places <= 1)).all(-1)
    return F.avg_pool2d(shares * inside[:, None], samples).flatten(2).transpose(1, 2)


# ---- targets and loss -----------------------------------------------------------------------------------------------


def map_probabilities(classes: Tensor, scores: Tensor, num_classes: int) -> Tensor:
    """Probabilities (..., C) of maps, from classes and their scores (..., k); the rest is spread over the other
    classes.
    """
    scores = scores.float()
    others = max(1, num_classes - scores.shape[-1])
    rest = (1 - scores.sum(-1, keepdim=True)).clamp(min=0) / others
    return rest.expand(*scores.shape[:-1], num_classes).scatter(-1, classes.long(), scores)


def token_targets(batch: dict[str, Tensor], num_classes: int, grid: tuple[int, int]) -> Tensor:
    """The class probabilities (B, N, C) that the patch tokens of a training batch learn.

    Args:
        batch: as `SoftTargetCollator` gives it: classes and scores (B, h, w, k) of the maps; views (B, 2, 3), the part
            of the image that is seen; partners (B,), the row of the image that each is mixed with; shares (B, N), how
            much of a patch is the image's own.
        num_classes: C.
        grid: (H, W).
    """
    cells = map_probabilities(batch["classes"], batch["scores"], num_classes).flatten(1, 2)
    weights = cell_shares(batch["views"], (batch["classes"].shape[1], batch["classes"].shape[2]), grid)
    targets = weights @ cells + (1 - weights.sum(-1, keepdim=True)).clamp(min=0) / num_classes
    shares = batch["shares"].unsqueeze(-1)
    return shares * targets + (1 - shares) * targets[batch["partners"]]


def token_label_loss(
    token_logits: Tensor, targets: Tensor, token_ids: Tensor | None = None, kept: Tensor | None = None
) -> Tensor:
    """Mean over images and patches of the cross entropy of a patch's logits with its target.

    Args:
        token_logits: (B, n, C).
        targets: (B, N, C), probabilities.
        token_ids: int64 (B, n), which of the N patches the model has kept, if it has not kept all; -1 for a fused
            token, which does not count.
        kept: (B, N), 1 for patches that are kept and 0 for dropped ones, which do not count; None: all that are left.
    """
    if token_ids is not None:
        targets = gather_tokens(targets, token_ids.clamp_min(0))
    errors = -(targets * F.log_softmax(token_logits.float(), -1)).sum(-1)
    counted = counted_patches(errors, token_ids, kept)
    return (errors * counted).sum() / counted.sum().clamp_min(1.0)


# ---- what a teacher sees --------------------------------------------------------------------------------------------


def patch_probabilities(model: Any, pixel_values: Tensor) -> Tensor:
    """A teacher's class probabilities (B, N, C) for each patch of images.

    They are its token classifier's or, if it has none, those of its classifier on the patch tokens after the last norm:
    what the model would predict if it pooled that token alone.

    Args:
        model: a classifier of our families that keeps all its patches.
        pixel_values: (B, channels, height, width).
    """
    config = model.config
    tokens = model.base_model(pixel_values).last_hidden_state[:, config.num_prefix_tokens :]
    token_classifier = getattr(model, "token_classifier", None)
    classifier = model.classifier if token_classifier is None else token_classifier
    return classifier(tokens).float().softmax(-1)


def check_teacher(config: Any) -> None:
    """Raise ValueError unless a classifier of this config can classify each patch."""
    if not config.num_labels:
        raise ValueError("the teacher has no classifier")
    if config.pooled_size != config.hidden_size and not config.token_classifier:
        raise ValueError(f"the teacher's classifier takes pooling={config.pooling!r}, which a single token cannot give")


# ---- folders of maps ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MapHeader:
    """What a folder of label maps says about itself.

    images: number of maps. classes: names of the classes, in order. grid: (h, w). top_k: classes kept of each cell.
    teacher: SHA-256 of the weights that made the maps. data: fingerprint of the images, see `fingerprint`.
    images_per_file: number of images of every file but the last.
    """

    images: int
    classes: list[str]
    grid: list[int]
    top_k: int
    teacher: str
    data: str
    images_per_file: int = IMAGES_PER_FILE

    def __post_init__(self) -> None:
        numbers = (self.images, *self.grid, self.top_k, self.images_per_file)
        if any(not isinstance(number, int) or isinstance(number, bool) or number < 1 for number in numbers):
            raise ValueError(f"images, grid, top_k and images_per_file must be integers of 1 or more, got {numbers}")
        if len(self.grid) != 2 or not self.top_k <= len(self.classes) <= MOST_CLASSES:
            raise ValueError(
                f"a grid of {self.grid} and {self.top_k} of {len(self.classes)} classes must be (height, width) and at "
                f"most {MOST_CLASSES} classes"
            )

    @property
    def files(self) -> list[str]:
        """Names of the files of maps."""
        count = -(-self.images // self.images_per_file)
        return [f"maps-{number:05d}-of-{count:05d}.safetensors" for number in range(count)]

    def images_of(self, number: int) -> range:
        """The images of a file."""
        return range(number * self.images_per_file, min(self.images, (number + 1) * self.images_per_file))


def fingerprint(labels: Sequence[int] | np.ndarray, names: Iterable[str]) -> str:
    """SHA-256 of the images of a split, in their order: their classes and the ends of their names."""
    digest = hashlib.sha256(np.asarray(labels, dtype=np.int64).tobytes())
    for name in names:
        digest.update(name.replace("\\", "/").rpartition("/")[2].encode() + b"\n")
    return digest.hexdigest()


def read_header(folder: Path) -> MapHeader:
    """The header of a folder of maps; OSError if there is none or it is damaged."""
    path = folder / HEADER
    if not path.is_file():
        raise OSError(f"{folder} is no folder of label maps: it has no {HEADER}")
    try:
        return MapHeader(**read_json(path))
    except (ValueError, TypeError) as error:
        raise OSError(f"{path} is damaged: {first_line(error)}") from None


class LabelMaps:
    """The label maps of a training set. Files are mapped into memory at first use, so reading a map copies nothing, and
    processes share the memory.

    Args:
        folder: see `write_label_maps`.

    Raises:
        OSError: for a folder that is not one of maps, is not finished, or has a file that is cut off or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.header = read_header(self.folder)
        missing = [name for name in self.header.files if not (self.folder / name).is_file()]
        if missing:
            raise OSError(
                f"{self.folder} lacks {len(missing)} of {len(self.header.files)} files of label maps, {missing[0]} the "
                "first; the command that makes them goes on where it stopped"
            )
        for number, name in enumerate(self.header.files):
            if damage := self._shape_damage(number):
                raise OSError(f"{self.folder / name} is damaged: {damage}")
        self._open: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return self.header.images

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # other processes open the files themselves

    def check(self, images: int, classes: Sequence[str], data: str) -> None:
        """Raise ValueError unless the maps are of these images: their number, class names and fingerprint."""
        if images != self.header.images:
            raise ValueError(f"{self.folder} has label maps of {self.header.images} images, the training set {images}")
        if list(classes) != self.header.classes:
            place = next(
                (i for i, pair in enumerate(zip(classes, self.header.classes, strict=False)) if pair[0] != pair[1]),
                min(len(classes), len(self.header.classes)),
            )
            there, here = (names[place : place + 1] or ["none"] for names in (self.header.classes, list(classes)))
            raise ValueError(
                f"{self.folder} has label maps of {len(self.header.classes)} classes, the data {len(classes)}; "
                f"class {place} is {there[0]!r} there, {here[0]!r} here"
            )
        if data != self.header.data:
            raise ValueError(f"{self.folder} has label maps of other images, or of these in another order")

    def verify(self) -> None:
        """Read every file and compare it with its checksum. OSError for the first that differs."""
        for number, name in enumerate(self.header.files):
            if damage := file_damage(self.folder / name, self.header, number):
                raise OSError(f"{self.folder / name} is damaged: {damage}")

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """An image's classes int16 (h, w, k) and their probabilities float16 (h, w, k), the largest first."""
        number, place = divmod(index, self.header.images_per_file)
        if number not in self._open:
            with safe_open(self.folder / self.header.files[number], "pt") as file:
                self._open[number] = file.get_tensor("classes"), file.get_tensor("scores")
        classes, scores = self._open[number]
        return classes[place], scores[place]

    def _shape_damage(self, number: int) -> str | None:
        try:
            with safe_open(self.folder / self.header.files[number], "pt") as file:
                return _shape_damage(
                    {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()},  # noqa: SIM118
                    self.header,
                    number,
                )
        except (SafetensorError, OSError) as error:
            return first_line(error)


def _shape_damage(shapes: dict[str, tuple[int, ...]], header: MapHeader, number: int) -> str | None:
    expected = (len(header.images_of(number)), *header.grid, header.top_k)
    for name in ("classes", "scores"):
        if shapes.get(name) != expected:
            return f"{name} has the shape {shapes.get(name)} instead of (images, height, width, k) = {expected}"
    return None


def file_damage(path: Path, header: MapHeader, number: int) -> str | None:
    """What is wrong with a file of maps; None for a whole one."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            stored = (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError) as error:
        return first_line(error)
    if damage := _shape_damage({name: tuple(value.shape) for name, value in tensors.items()}, header, number):
        return damage
    if (tensors["classes"].dtype, tensors["scores"].dtype) != (torch.int16, torch.float16):
        return "its classes must be int16, its scores float16"
    classes, scores = tensors["classes"], tensors["scores"].float()
    if stored != _checksum(tensors):
        return "its content does not fit its checksum"
    if classes.min() < 0 or classes.max() >= len(header.classes):
        return f"class {int(classes.max())} is not below the {len(header.classes)} of the header"
    if not (scores >= 0).all() or not (scores.sum(-1) <= 1 + SUM_TOLERANCE).all():
        return "its scores are no probabilities"
    return None


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in ("classes", "scores"):
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def top_classes(probabilities: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k most probable classes, int16 (..., k) of (..., C), and their probabilities, float16, the largest first."""
    scores, classes = probabilities.float().topk(top_k)
    return classes.short(), scores.half()


def write_label_maps(
    folder: str | Path, header: MapHeader, maps_of: Callable[[range], tuple[Tensor, Tensor]], bar: Any = None
) -> int:
    """Make the maps of every image. Files that exist already are kept; damaged ones are made again.

    Args:
        folder: new, empty, or with this header.
        header: what the maps are.
        maps_of: indices of images -> their classes and scores (images, h, w, k), as `top_classes` gives them.
        bar: progress bar, which starts with the images whose maps exist already.

    Returns:
        The number of files that were made.

    Raises:
        ValueError: if the folder holds other maps or something else.
    """
    folder = Path(folder)
    _claim(folder, header)
    made = 0
    for number, name in enumerate(header.files):
        damage = file_damage(folder / name, header, number) if (folder / name).is_file() else "missing"
        if damage is None:
            if bar is not None:
                bar.update(len(header.images_of(number)))
            continue
        if damage != "missing":
            print(f"{folder / name} is made again: {damage}", file=sys.stderr)
        classes, scores = maps_of(header.images_of(number))
        tensors = {"classes": classes.contiguous(), "scores": scores.contiguous()}
        write_bytes(folder / name, save(tensors, {"sha256": _checksum(tensors)}))
        made += 1
    return made


def _claim(folder: Path, header: MapHeader) -> None:
    """Make the folder belong to these maps."""
    if (folder / HEADER).is_file():
        stored = asdict(read_header(folder))
        differing = [name for name, value in asdict(header).items() if stored[name] != value]
        if differing:
            raise ValueError(f"{folder} holds other label maps, they differ in {', '.join(differing)}")
    elif folder.exists() and any(path.name != f"{HEADER}.partial" for path in folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no label maps; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / HEADER, json.dumps(asdict(header), indent=1) + "\n")
