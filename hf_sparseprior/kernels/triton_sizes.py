"""How many rows and warps a block of the Triton kernels has: a fixed table, or what was tuned on this device.

Nothing is tuned while a model runs: that would take seconds in every process and could give other bits in another run.
`python -m tasks.benchmark.gpu` tunes, and keeps what was fastest in a table in the user's cache, by device and version
of Triton. Without a table the defaults hold, so all machines give the same bits.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

# Elements of a block of rows (rows x padded head width), its limit in rows, and its warps. No GPU chose them. They are
# chosen by the compiler's report for compute capability 9.0 (`python -m tasks.benchmark.gpu --count`): no register
# spills, and as many warps as possible fit on a multiprocessor.
DEFAULTS = {
    "diagonal_forward": {"elements": 4096, "num_warps": 8},
    "diagonal_backward": {"elements": 2048, "num_warps": 8},
}
MAX_ROWS = 128
VARIABLE = "SPARSEPRIOR_TRITON_TABLE"

Sizes = dict[str, int]

TRIED: dict[str, Sizes] = {}  # by `entry_key`, what a tuner tries now; it goes before the table


def block_sizes(kernel: str, q: Tensor) -> Sizes:
    """Sizes of a block as the kernels along diagonals take them: WIDTH, ROWS, COLUMNS and num_warps.

    Args:
        kernel: one of `DEFAULTS`.
        q: (B, H, T, D), of which dtype, head width and device count.
    """
    width = q.shape[-1]
    columns = triton.next_power_of_2(width)
    default = DEFAULTS[kernel]
    chosen = {"ROWS": min(MAX_ROWS, default["elements"] // columns), "num_warps": default["num_warps"]}
    key = entry_key(kernel, q.element_size(), columns)
    chosen |= TRIED.get(key) or tuned(device_key(q.device)).get(key, {})
    return {"WIDTH": width, "COLUMNS": columns, **chosen}


def entry_key(kernel: str, element_size: int, columns: int) -> str:
    """Name of an entry of the table: kernel, bytes of an element, padded head width."""
    return f"{kernel} {element_size} {columns}"


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
        found = json.loads(path.read_text(encoding="utf-8")).get(device, {})
        return {key: _checked(sizes) for key, sizes in found.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no table of block sizes ({error}); remove it, or tune again") from None


def _checked(sizes: Any) -> Sizes:
    rows, warps = int(sizes["ROWS"]), int(sizes["num_warps"])
    for name, value, largest in (("ROWS", rows, 1024), ("num_warps", warps, 32)):
        if not (1 <= value <= largest and value & (value - 1) == 0):
            raise ValueError(f"{name}={value} must be a power of 2 up to {largest}")
    return {"ROWS": rows, "num_warps": warps}


def keep_tuned(device: str, entries: dict[str, Sizes]) -> Path:
    """Add entries of a device to the table, and forget what was read of it. The file is written whole."""
    path = table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    table[device] = {**table.get(device, {}), **{key: _checked(sizes) for key, sizes in entries.items()}}
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(path)
    tuned.cache_clear()
    return path
