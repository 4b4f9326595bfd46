"""The libraries with which PyTorch, ONNX Runtime and OpenVINO run exported files that keep the kernels."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_sparseprior.kernels import build, diagonal_cpu

TRIAL = "import openvino, sys; openvino.Core().add_extension(sys.argv[1])"


def torch_library() -> Path:
    """The operators for torch: what `torch.ops.load_library` takes.

    Raises:
        RuntimeError: if there are none on this machine.
    """
    if reason := diagonal_cpu.ready():
        raise RuntimeError(f"no CPU kernels: {reason}")
    library = build.loaded_library()
    assert library is not None
    return library


def onnx_library() -> Path:
    """The operators for ONNX Runtime 1.17 and newer: what `SessionOptions.register_custom_ops_library` takes.

    From the wheel, or compiled at the first use on a machine. It needs nothing of this package, and can be copied.

    Raises:
        RuntimeError: without a compiler where one is needed, and with its first error.
    """
    return _library(build.ONNXRUNTIME)


def onnx_session_options(threads: int) -> Any:
    """`onnxruntime.SessionOptions` for files with our operators: their library, and so many threads for a whole model.

    The operators work on the threads of their session. ONNX Runtime does not tell them how many it has, so an entry of
    the options does; without it, work is cut into as many parts as there are processors that the process may use.

    Args:
        threads: 1 or more.

    Raises:
        ImportError: if ONNX Runtime is not installed.
        RuntimeError: as `onnx_library`.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("hf_sparseprior.threads", str(threads))
    options.register_custom_ops_library(str(onnx_library()))
    return options


def openvino_extension() -> Path:
    """The operators for the installed OpenVINO: what `Core.add_extension` takes.

    Compiled at the first use on a machine, and again for each release of OpenVINO.

    Raises:
        ImportError: if OpenVINO is not installed.
        RuntimeError: without a compiler, and with its first error; --format openvino without --kernels needs none.
    """
    return _library(_openvino())


def _library(host: build.Host) -> Path:
    choice = os.environ.get("SPARSEPRIOR_KERNELS") or None
    if choice == "0":
        raise RuntimeError(f"no {host.title}: SPARSEPRIOR_KERNELS=0")
    try:
        return build.prebuilt_library(choice, host) or build.compiled_library(host)
    except RuntimeError as error:
        raise RuntimeError(f"no {host.title}: {error}") from error


@cache
def _openvino() -> build.Host:
    """The installed release of OpenVINO.

    Its wheel has libraries under their full names alone, which a process that has imported openvino has loaded, so they
    are found without a search path. Wheels differ in what std::string is: that of 2025.3 is the old one.
    """
    spec = find_spec("openvino")
    if spec is None or spec.origin is None:
        raise ImportError("OpenVINO needs openvino", name="openvino")
    root = Path(spec.origin).parent
    targets = root / "cmake" / "OpenVINOTargets.cmake"
    pattern = "lib{}.*dylib" if sys.platform == "darwin" else "lib{}.so.*"
    libraries = [
        str(path) for name in ("openvino", "tbb") for path in sorted((root / "libs").glob(pattern.format(name)))
    ]
    if len(libraries) != 2 or not targets.is_file():
        raise RuntimeError(f"no operators for OpenVINO {version('openvino')}: {root} is not laid out as its wheel")
    abi = re.search(r"_GLIBCXX_USE_CXX11_ABI=[01]", targets.read_text(encoding="utf-8"))
    return build.Host(
        title=f"operators for OpenVINO {version('openvino')}",
        file="openvino_cpu",
        own=(*build.PROGRAM, "openvino_cpu.cpp"),
        trial=lambda: TRIAL,
        links=lambda compiler, output, start: libraries,
        flags=(*([f"-D{abi[0]}"] if abi else []), "-isystem", str(root / "include")),
        key=version("openvino"),
    )
