"""Published label maps as ours: python -m tasks.classification.published_label_maps FOLDER --config FILE --out DIR

FOLDER is what comes out of the archive of maps by NFNet-F6 that Token Labeling (Jiang et al. 2021) offers for download,
or what its script generate_label.py has written: FOLDER/CLASS/IMAGE.pt for each training image, with the logits and the
numbers of the five highest classes. The data of FILE are the same images in folders of classes, as ImageNet's are. The
command can be killed at any moment and started again; then it goes on where it was.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.classification.label_maps import images_fingerprint, training_images
from hf_sparseprior.images.sources import ImageData
from hf_sparseprior.runs.command import run_command
from hf_sparseprior.training import MapHeader, write_label_maps
from hf_sparseprior.training.token_labels import IMAGES_PER_FILE
from tasks.classification import commands

TEACHER = "published"  # in the place of a teacher's checksum
LARGEST_LOGIT = 1e4  # half precision ends at 65504


def map_file(root: Path, image: str) -> Path:
    """Where an image's map lies: its class folder and its name up to the first dot."""
    path = Path(image)
    if path.parent.name == "":
        raise ValueError(
            f"{image}: label maps are found by class folder and file name, which this source does not have"
        )
    return root / path.parent.name / f"{path.name.partition('.')[0]}.pt"


def read_map(file: Path, num_classes: int) -> tuple[Tensor, Tensor]:
    """A published map as classes int16 (h, w, k) and probabilities float16 (h, w, k), the largest first.

    The file has a tensor (2, k, h, w) in half precision: logits, and numbers of classes. As in the published training
    code a cell's probabilities are the softmax over all classes, those that are not in the file with logit 0. So the
    other classes share the rest evenly, as in our maps.

    Raises:
        OSError: for a missing or damaged file. ValueError: for another number of classes.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise OSError(f"{file} does not exist, the label map of an image") from None
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise OSError(f"{file} is no label map: {first_line(error)}") from None
    if not isinstance(content, Tensor) or content.dim() != 4 or content.shape[0] != 2 or 0 in content.shape:
        shape = tuple(content.shape) if isinstance(content, Tensor) else type(content).__name__
        raise OSError(f"{file} is no label map: {shape} must be a tensor (2, classes, height, width)")
    logits, numbers = content.double().permute(0, 2, 3, 1)
    if not (logits.abs() <= LARGEST_LOGIT).all() or not torch.equal(numbers, numbers.round()):
        raise OSError(f"{file} is no label map: it must hold finite logits, and whole numbers of classes")
    if numbers.min() < 0 or numbers.max() >= num_classes:
        worst = int(numbers.min() if numbers.min() < 0 else numbers.max())
        raise ValueError(f"{file} has class {worst}, and the data has the classes 0 to {num_classes - 1}")
    classes = numbers.long()
    if (classes.sort(-1).values.diff(dim=-1) == 0).any():
        raise OSError(f"{file} is no label map: a cell names a class twice")
    highest = logits.max(-1, keepdim=True).values.clamp_min(0)
    weights = (logits - highest).exp()
    others = (num_classes - weights.shape[-1]) * (-highest).exp()
    scores, order = (weights / (weights.sum(-1, keepdim=True) + others)).sort(dim=-1, descending=True, stable=True)
    return classes.gather(-1, order).short(), scores.half()


def convert_maps(
    root: Path, data: ImageData, out: Path, images_per_file: int = IMAGES_PER_FILE, show_progress: bool = True
) -> MapHeader:
    """Write published maps of a data set's training images in our format. Files that exist already stay.

    Raises:
        OSError: for a map that is missing or damaged, or of another shape than the first. ValueError: for other
            classes, and for images without a class folder.
    """
    images, num_classes = data.splits["train"], len(data.classes)
    first, _ = read_map(map_file(root, images.name(0)), num_classes)
    header = MapHeader(
        images=len(images),
        classes=data.classes,
        grid=list(first.shape[:2]),
        top_k=first.shape[2],
        teacher=TEACHER,
        data=images_fingerprint(images),
        images_per_file=images_per_file,
    )
    with tqdm(total=len(images), desc="label maps", unit=" images", disable=not show_progress) as bar:

        def maps_of(indices: range) -> tuple[Tensor, Tensor]:
            maps = []
            for index in indices:
                file = map_file(root, images.name(index))
                maps.append(read_map(file, num_classes))
                if maps[-1][0].shape != first.shape:
                    found, expected = tuple(maps[-1][0].shape), tuple(first.shape)
                    raise OSError(f"{file} is (height, width, classes) = {found}, the first map {expected}")
                bar.update()
            classes, scores = (torch.stack(part) for part in zip(*maps, strict=True))
            return classes, scores

        write_label_maps(out, header, maps_of, bar)
    return header


def main(argv: list[str] | None = None) -> int:
    """Command line; a bad value prints one line and returns 2."""
    parser = commands.published_label_maps()
    arguments = parser.parse_intermixed_args(argv)
    if arguments.images_per_file < 1:
        parser.error(f"--images-per-file {arguments.images_per_file} must be 1 or more")

    def work() -> None:
        data = training_images(arguments.config, arguments.overrides)
        header = convert_maps(arguments.folder, data, arguments.out, arguments.images_per_file)
        height, width = header.grid
        print(f"{arguments.out}: maps of {header.images} images, {height}x{width}, top {header.top_k} classes")

    return run_command(parser.prog, work, "where it stopped")


if __name__ == "__main__":
    sys.exit(main())
