"""Training on images that are read as they come, for sets too large to be held or scanned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import IterableDataset, get_worker_info

from hf_sparseprior.images.config import Decoding
from hf_sparseprior.images.data import Preparation
from hf_sparseprior.images.sources import PIPELINE, decode_row, row_name
from hf_sparseprior.runs.metrics import IGNORED
from hf_sparseprior.training import Draw

# Different loader processes must not have equal positions: mixup takes partners, and one draw a batch, by position.
POSITIONS_OF_A_WORKER = 1 << 32
BLANK = Image.new("RGB", (1, 1))


# A sample that fills a place: the loss and the metrics ignore its label.
FILLER: dict[str, Any] = {"row": None, "where": "", "draw": Draw(0, 0, 0)}


class StreamedImages(IterableDataset):
    """A split of `stream_data` as {"row": the encoded image, "where", "draw": Draw}; `StreamCollator` decodes.

    Images are decoded late so that several processes can each read the whole stream and keep their share of it.

    Args:
        rows: IterableDataset of `datasets` with image, label and index.
        where: what errors call the split.
        size: number of images if it is known; the length of an epoch follows from it.
        seed: seed of the order; None: the stored order.
        buffer_size: images among which the next one is drawn; shards are shuffled as a whole.
        processes, batch_size: for an evaluation by several processes. accelerate would fill the last batch up with
            images from the start, which would count twice. It is filled up with `FILLER` instead.
    """

    def __init__(
        self,
        rows: Any,
        where: str,
        size: int | None,
        seed: int | None = None,
        buffer_size: int = 10_000,
        processes: int = 1,
        batch_size: int = 1,
    ) -> None:
        self.rows = rows if seed is None else rows.shuffle(seed=seed, buffer_size=buffer_size)
        self.where = where
        self.size = size
        self.processes = processes
        self.batch_size = batch_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch
        self.rows.set_epoch(epoch)

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError("the stream does not say how many images it has; set trainer.max_steps")
        return self.size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first = 0 if worker is None else worker.id * POSITIONS_OF_A_WORKER
        samples = (
            {"row": row, "where": self.where, "draw": Draw(int(row["index"]), self.epoch, position)}
            for position, row in enumerate(self.rows, start=first)
        )
        return samples if self.processes == 1 else self._filled(samples)

    def _filled(self, samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The samples, and then fillers that make the last batch of every process a whole one."""
        while batch := list(islice(samples, self.processes * self.batch_size)):
            if len(batch) < self.processes * self.batch_size:
                for process in range(self.processes):  # each process its share of what is left
                    share = batch[process :: self.processes]
                    yield from share
                    yield from [FILLER] * (self.batch_size - len(share))
            else:
                yield from batch


class StreamCollator:
    """Decodes and prepares the rows of a batch, then hands the samples to another collator.

    Args:
        prepare: what becomes of an image.
        collate: makes a batch of {"pixel_values", "labels", "draw"}.
        skip_into: file to which damaged images are added, one a line, instead of ending the run.
        fill: replace a damaged sample by one without a label instead of leaving it out, because in an evaluation all
            processes need batches of one size.
        decoding: how an image is decoded.
    """

    def __init__(
        self,
        prepare: Preparation,
        collate: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
        skip_into: Path | None = None,
        fill: bool = False,
        decoding: Decoding = PIPELINE,
    ) -> None:
        self.prepare = prepare
        self.collate = collate
        self.skip_into = skip_into
        self.fill = fill
        self.decoding = decoding

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch of what could be read."""
        ready = []
        for sample in samples:
            row, draw = sample["row"], sample["draw"]
            name = row_name(sample["where"], draw.index)
            image = None if row is None else self._read(row, name)
            if image is not None:
                ready.append({"pixel_values": self.prepare(image, draw), "labels": int(row["label"]), "draw": draw})
            elif row is None or self.fill:
                ready.append({"pixel_values": self.prepare(BLANK, draw), "labels": IGNORED, "draw": draw})
        if not ready:
            raise OSError(f"none of the {len(samples)} images of a batch is readable, the last: {name}")
        return self.collate(ready)

    def _read(self, row: dict[str, Any], name: str) -> Any:
        try:
            return decode_row(row["image"], name, self.decoding)
        except OSError as error:
            if self.skip_into is None:
                raise
            note_damage(self.skip_into, str(error))
            return None


def note_damage(path: Path, line: str) -> None:
    """Add a line. Short lines that several processes append do not mix."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def noted_damage(path: Path) -> list[str]:
    """Every damaged image once."""
    return sorted(set(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []
