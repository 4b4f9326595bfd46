"""How many rows, keys and warps a block of the Triton kernels has: fixed tables, or what was tuned on this device.

Nothing is tuned while a model runs: that would take seconds in every process and could give other bits in another run.
`python -m tasks.benchmark gpu` tunes, and keeps what was fastest in a table in the user's cache, by device and version
of Triton. Without a table the defaults of the card's compute capability hold, so all cards of one kind give the same
bits. The logger `hf_sparseprior.kernels` says at debug level which row of the defaults a device takes.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from hf_sparseprior.kernels.triton_launch import next_power_of_2

logger = logging.getLogger("hf_sparseprior.kernels")

# No GPU chose the defaults. They follow from the compiler's report (`python -m tasks.benchmark gpu --count` for compute
# capability 9.0, `--cards` for all).
#
# Along diagonals: elements of a block of rows (rows x padded head width), and its warps. No registers spill, and as
# many warps as possible fit on a multiprocessor.
DIAGONAL = {
    "diagonal_forward": {"elements": 4096, "num_warps": 8},
    "diagonal_backward": {"elements": 2048, "num_warps": 8},
}
MAX_ROWS = 128
# Over all pairs: rows, keys, warps and stages, by bytes of an element and padded head width.
DECAYED = {
    (2, 64): {
        "decayed_forward": (64, 64, 4, 3),
        "decayed_backward": (64, 128, 8, 2),
        "decayed_gradients": (64, 64, 4, 3),
    },
    (2, 128): {
        "decayed_forward": (64, 32, 4, 2),
        "decayed_backward": (32, 64, 8, 1),
        "decayed_gradients": (64, 32, 4, 2),
    },
    (2, 256): {
        "decayed_forward": (32, 32, 4, 1),
        "decayed_backward": (32, 32, 8, 1),
        "decayed_gradients": (32, 32, 4, 1),
    },
    (4, 64): {
        "decayed_forward": (32, 32, 8, 1),
        "decayed_backward": (32, 32, 8, 1),
        "decayed_gradients": (32, 32, 8, 1),
    },
    (4, 128): {
        "decayed_forward": (32, 16, 8, 1),
        "decayed_backward": (16, 16, 8, 1),
        "decayed_gradients": (16, 16, 8, 1),
    },
    (4, 256): {
        "decayed_forward": (16, 16, 8, 1),
        "decayed_backward": (16, 16, 8, 1),
        "decayed_gradients": (16, 16, 8, 1),
    },
}
# What differs from `DECAYED`, by compute capability; a card takes the row of its own or of the nearest below. With the
# sizes above up to 408 bytes of a thread spill on other cards, and a multiprocessor of 8.6, which has less shared
# memory, holds one block of the forward pass instead of three.
Capability = tuple[int, int]
SMALLER = {
    (2, 64): {
        "decayed_forward": (64, 32, 4, 3),
        "decayed_backward": (32, 64, 4, 2),
        "decayed_gradients": (64, 32, 4, 2),
    },
    (2, 128): {"decayed_gradients": (64, 32, 4, 1)},
}
CARDS: dict[Capability, dict[tuple[int, int], dict[str, tuple[int, int, int, int]]]] = {
    (8, 0): SMALLER,
    (9, 0): {},
    (10, 0): {
        (2, 64): {
            "decayed_forward": (64, 64, 4, 2),
            "decayed_backward": (32, 64, 4, 2),
            "decayed_gradients": (64, 32, 4, 2),
        },
    },
    (12, 0): SMALLER,
}
KERNELS = (*DIAGONAL, "decayed_forward", "decayed_backward", "decayed_gradients")
LARGEST_BLOCK = 128  # rows or keys over all pairs: tables of a decay are filled up to whole blocks of it
LARGEST = {"ROWS": 1024, "KEYS": LARGEST_BLOCK, "num_warps": 32, "num_stages": 8}
VARIABLE = "SPARSEPRIOR_TRITON_TABLE"

Sizes = dict[str, int]

TRIED: dict[str, Sizes] = {}  # by `entry_key`, what a tuner tries now; it goes before the table


def block_sizes(kernel: str, q: Tensor) -> Sizes:
    """Sizes of a block as the kernels take them: WIDTH, COLUMNS and those of `default_sizes`.

    Args:
        kernel: one of `KERNELS`.
        q: (B, H, T, D), of which dtype, head width and device count.
    """
    width = q.shape[-1]
    columns = next_power_of_2(width)
    if kernel not in DIAGONAL:
        columns = max(16, columns)  # tl.dot takes 16 or more
    chosen = default_sizes(kernel, q.element_size(), columns, card_row(q.device))
    key = entry_key(kernel, q.element_size(), columns)
    chosen |= TRIED.get(key) or tuned(device_key(q.device)).get(key, {})
    return {"WIDTH": width, "COLUMNS": columns, **chosen}


def nearest_row(capability: Capability) -> Capability:
    """The row of `CARDS` for a compute capability: its own, or the nearest below."""
    return max((known for known in CARDS if known <= capability), default=min(CARDS))


@functools.cache
def card_row(device: torch.device) -> Capability:
    """The row of `CARDS` for a device. Without a GPU, that is in Triton's interpreter, it is that of 9.0."""
    if device.type != "cuda":
        return (9, 0)
    capability = torch.cuda.get_device_capability(device)
    row = nearest_row(capability)
    logger.debug(
        "%s: block sizes of compute capability %d.%d for %d.%d; %d tuned in %s",
        *(device, *row, *capability, len(tuned(device_key(device))), table_path()),
    )
    return row


def default_sizes(kernel: str, element_size: int, columns: int, row: Capability = (9, 0)) -> Sizes:
    """What a kernel takes without a table: ROWS and num_warps, over all pairs also KEYS and num_stages.

    Args:
        kernel: one of `KERNELS`. element_size: bytes of an element. columns: the padded head width. row: of `CARDS`.
    """
    if kernel in DIAGONAL:
        settings = DIAGONAL[kernel]
        return {"ROWS": max(1, min(MAX_ROWS, settings["elements"] // columns)), "num_warps": settings["num_warps"]}
    names = ("ROWS", "KEYS", "num_warps", "num_stages")
    key = element_size, max(64, columns)
    return dict(zip(names, CARDS[row].get(key, {}).get(kernel, DECAYED[key][kernel]), strict=True))


def entry_key(kernel: str, element_size: int, columns: int) -> str:
    """Name of an entry of the table: kernel, bytes of an element, padded head width."""
    return f"{kernel} {element_size} {columns}"


@functools.cache
def device_key(device: torch.device) -> str | None:
    """What a table is made for: the device's name and Triton's version; None if it is not CUDA."""
    if device.type != "cuda":
        return None
    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}"


def table_path() -> Path:
    """The file of the table: $SPARSEPRIOR_TRITON_TABLE, or one in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(VARIABLE) or cache / "hf_sparseprior" / "triton.json")


@functools.cache
def tuned(device: str | None) -> dict[str, Sizes]:
    """What was tuned for a device, by `entry_key`. It is read once in a process.

    Raises:
        ValueError: if the file is not such a table.
    """
    path = table_path()
    if device is None or not path.is_file():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8")).get(device, {})
        return {key: _checked(key, sizes) for key, sizes in entries.items()}
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is no table of block sizes ({error}); remove it, or tune again") from None


def _checked(key: str, sizes: Any) -> Sizes:
    """The sizes of an entry, which has those of its kernel's default."""
    kernel, element_size, columns = key.split()
    numbers = {name: int(sizes[name]) for name in default_sizes(kernel, int(element_size), int(columns))}
    for name, value in numbers.items():
        largest = LARGEST["KEYS" if kernel not in DIAGONAL and name == "ROWS" else name]
        if not 1 <= value <= largest:
            raise ValueError(f"{name}={value} must be 1 to {largest}")
        if name != "num_stages" and value & (value - 1):
            raise ValueError(f"{name}={value} must be a power of 2")
    return numbers


def keep_tuned(device: str, entries: dict[str, Sizes]) -> Path:
    """Add entries of a device to the table, and forget what was read of it. The file is written whole."""
    path = table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    table[device] = {**table.get(device, {}), **{key: _checked(key, sizes) for key, sizes in entries.items()}}
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(path)
    tuned.cache_clear()
    return path
