"""Where images and labels come from: one reader for each source, registered by its name in `data.source`."""

from __future__ import annotations

from collections.abc import Callable

from hf_sparseprior.images.config import SPLITS, DataConfig
from hf_sparseprior.images.sources.arrays import (
    read_cifar10,
    read_cifar100,
    read_digits,
    read_fashion_mnist,
    read_mnist,
)
from hf_sparseprior.images.sources.folders import read_csv, read_image_folder, read_imagenet, read_tiny_imagenet
from hf_sparseprior.images.sources.images import (
    PIPELINE,
    SPLIT_NAMES,
    ImageData,
    Images,
    balanced_subset,
    decode,
    strata,
)
from hf_sparseprior.images.sources.scan import drop_corrupt, find_corrupt
from hf_sparseprior.images.sources.streams import StreamData, row_name, stream_data
from hf_sparseprior.images.sources.tables import decode_row, read_arrow, read_hub, read_parquet
from hf_sparseprior.images.sources.vtab import read_vtab

READERS: dict[str, Callable[[DataConfig], ImageData]] = {
    "digits": read_digits,
    "imagefolder": read_image_folder,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "hub": read_hub,
    "csv": read_csv,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "tiny_imagenet": read_tiny_imagenet,
    "imagenet": read_imagenet,
    "fashion_mnist": read_fashion_mnist,
    "mnist": read_mnist,
    "vtab": read_vtab,
}

__all__ = [
    "PIPELINE",
    "READERS",
    "SPLITS",
    "SPLIT_NAMES",
    "ImageData",
    "Images",
    "StreamData",
    "balanced_subset",
    "decode",
    "decode_row",
    "drop_corrupt",
    "find_corrupt",
    "row_name",
    "strata",
    "stream_data",
]
