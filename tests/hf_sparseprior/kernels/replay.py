"""Calls of the compiled operators, recorded here, and run by a program of C++ that may be for another processor.

`tests.release arm` compiles it for 64-bit ARM and runs it in an emulator.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_sparseprior.cli import onnx_operators
from hf_sparseprior.cli.deployment import trace
from hf_sparseprior.cli.exportable import Exportable
from hf_sparseprior.kernels import build

# Priors that call all operators between them.
PRIORS = (
    *("fibottention", "fibottention+violin", "violin", "bigbird", "bigbird+violin", "sparsifiner"),
    *({"support": {"name": "fibottention", "mask_fill": "zero"}},),
)
INTEGERS, FLOATS = ("prefix", "zero_fill", "pairs", "budget"), ("scale", "threshold")
Call = tuple[str, dict[str, Any], list[torch.Tensor | None], torch.Tensor]


class Recorder(TorchDispatchMode):
    """Keeps the calls of the compiled operators, and what they give, as exported files have them."""

    def __init__(self) -> None:
        super().__init__()
        self.known = {onnx_operators.operator(name): name for name in onnx_operators.OPERATORS}
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch."""
        given = func(*args, **(kwargs or {}))
        if func in self.known:
            title, gives_heads = onnx_operators.OPERATORS[self.known[func]]
            values = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False))
            values |= kwargs or {}
            numbers, tensors = {}, []
            for argument in func._schema.arguments:
                value = values.get(argument.name)
                if argument.name in onnx_operators.TRAINING:
                    continue
                if "Tensor" not in str(argument.type):
                    numbers[argument.name] = value
                elif value is None:
                    tensors.append(None)
                else:
                    value = value.transpose(1, 2) if argument.name in onnx_operators.HEADS else value
                    dtype = torch.float32 if value.is_floating_point() else torch.int32
                    tensors.append(value.to(dtype).contiguous().clone())
            out = given.transpose(1, 2) if gives_heads else given
            self.calls.append((title, numbers, tensors, out.contiguous().clone()))
        return given


def record(make: Any, sides: Sequence[int] = (64, 88)) -> list[Call]:
    """Calls of small models of all of `PRIORS`, whose `make(prior, side)` gives one."""
    recorder = Recorder()
    for prior in PRIORS:
        for side in sides:
            with pytest.MonkeyPatch.context() as patch, torch.no_grad():
                patch.setenv("SPARSEPRIOR_BACKEND", "cpp")
                exported = Exportable(make(prior, side))
                program = trace(exported, kernels=True).program.module()
                with recorder:
                    program(exported.images(2))
    missing = {title for title, _ in onnx_operators.OPERATORS.values()} - {title for title, *_ in recorder.calls}
    assert not missing, missing
    return recorder.calls


def write_calls(calls: Sequence[Call], path: Path) -> None:
    """For replay.cpp."""
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(calls)))
        for title, numbers, tensors, _ in calls:
            file.write(struct.pack("<i", len(title)) + title.encode())
            file.write(struct.pack("<4q", *(int(numbers.get(name, 0)) for name in INTEGERS)))
            file.write(struct.pack("<2f", numbers.get("scale", 1.0), numbers.get("threshold", 0.0)))
            file.write(struct.pack("<i", len(tensors)))
            for tensor in tensors:
                if tensor is None:
                    file.write(struct.pack("<i", -1))
                    continue
                file.write(
                    struct.pack(f"<2i{tensor.dim()}q", int(tensor.dtype == torch.int32), tensor.dim(), *tensor.shape)
                )
                file.write(tensor.numpy().tobytes())


def differences(calls: Sequence[Call], outputs: Path) -> dict[str, float]:
    """By operator, how far the outputs of a replay are from what was recorded; of keys the share that differs."""
    content, at, found = outputs.read_bytes(), 0, dict[str, float]()
    for title, _, _, expected in calls:
        (count,) = struct.unpack_from("<q", content, at)
        assert count == expected.numel(), (title, count, expected.shape)
        dtype = "<f4" if expected.is_floating_point() else "<i4"
        given = np.frombuffer(content, dtype, count, at + 8).reshape(expected.shape)
        at += 8 + 4 * count
        other = expected.numpy()
        off = float((given != other).mean()) if dtype == "<i4" else float(np.abs(given - other).max(initial=0))
        found[title] = max(found.get(title, 0.0), off)
    assert at == len(content)
    return found


def compile_replay(compiler: Sequence[str], folder: Path, flags: Sequence[str]) -> Path:
    """The program, compiled with the library's own flags."""
    sources = [build.FOLDER / f"{name}_cpu.cpp" for name in (*build.ARITHMETIC, "program_operators")]
    program = folder / "replay"
    words = [*compiler, *build.FLAGS, *flags, "-I", str(build.FOLDER), "-o", str(program)]
    subprocess.run([*words, str(Path(__file__).with_name("replay.cpp")), *map(str, sources)], check=True)
    return program
