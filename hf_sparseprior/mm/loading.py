"""Checkpoints of mmengine, read without running what they hold.

mmengine 0.10.12 tries `weights_only=True` and, where that fails, reads the file again with `weights_only=False`, which
runs whatever the file says. It also allows the builtin `getattr`, by which a pickle reaches any attribute of the names
that it may use. `refuse_pickles` replaces that function by `read_checkpoint` for everything that mmengine loads from a
file: resume, load_from, the init_cfg of heads and necks.
"""

from __future__ import annotations

import argparse
import os
import re
from pickle import UnpicklingError
from typing import Any, BinaryIO

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import checkpoint as mm_checkpoint
from numpy._core import multiarray as numpy_arrays
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.json_files import parse_json

DATASET_META = "dataset_meta"  # mmengine's name for what is known of a checkpoint's classes


def history_method(owner: Any, name: str) -> Any:
    """Replaces the builtin `getattr` in a checkpoint: it gives the statistics of a HistoryBuffer and nothing else.

    Raises:
        UnpicklingError: for any other attribute.
    """
    if owner is not HistoryBuffer or name not in ("min", "max", "mean", "current"):
        raise UnpicklingError(f"GLOBAL builtins.getattr of {owner!r}, {name!r}")
    return getattr(HistoryBuffer, name)


# What checkpoints hold besides tensors and plain values: mmengine's histories of losses as numpy arrays, DeiT's and
# DINO's the command line.
ALLOWED: list[Any] = [
    argparse.Namespace,
    HistoryBuffer,
    (history_method, "builtins.getattr"),
    numpy_arrays._reconstruct,
    numpy_arrays.scalar,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(name)) for name in ("float64", "float32", "int64", "int32", "uint32", "uint8", "bool")),
]


def read_checkpoint(
    file: str | os.PathLike | BinaryIO, map_location: Any = None, weights_only: bool | None = None
) -> Any:
    """Read a checkpoint of PyTorch or mmengine: tensors, plain values and loss histories. Nothing is executed.

    A model.safetensors of a run is read as mmengine has a checkpoint, with "state_dict" and "meta".

    Args:
        file: its path, or an open file.
        map_location: as `torch.load`'s.
        weights_only: mmengine's argument; False is refused.

    Raises:
        OSError: for a file that is missing, damaged or holds anything else; the message names what it holds.
    """
    if weights_only is False:
        raise OSError(f"{file} is not read with weights_only=False: a pickle can run code")
    if isinstance(file, (str, os.PathLike)) and str(file).endswith(".safetensors"):
        return read_safetensors(file, map_location)
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(file, map_location=map_location, weights_only=True)
    except UnpicklingError as error:
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise OSError(f"{file} is refused: it holds {named[1]}, and a pickle can run code") from None
        raise OSError(f"{file} cannot be read as a checkpoint, it is damaged or no file of PyTorch") from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        first = first_line(error)
        raise OSError(f"{file} cannot be read as a checkpoint, it is damaged or cut off ({first})") from None


def read_safetensors(file: str | os.PathLike, map_location: Any = None) -> dict[str, Any]:
    """Weights in a safetensors file, and the data set's classes that `save_model` put there, as mmengine has them.

    Raises:
        OSError: for a file that is missing or damaged.
    """
    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
    try:
        with safe_open(file, "pt") as stored:
            given = parse_json((stored.metadata() or {}).get(DATASET_META, "{}"), finite=False)
        weights = load_file(file, device=str(device))
    except (SafetensorError, ValueError) as error:
        raise OSError(f"{file} cannot be read as a checkpoint, it is damaged or cut off ({error})") from None
    return {"state_dict": weights, "meta": {"dataset_meta": given} if given else {}}


def refuse_pickles() -> None:
    """Make mmengine read every checkpoint file by `read_checkpoint` from now on."""
    mm_checkpoint._safe_torch_load = read_checkpoint
