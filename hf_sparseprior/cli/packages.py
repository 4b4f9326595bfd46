"""AOTInductor's packages: compiled models, which are code. `python -m hf_sparseprior run-package` runs one."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparseprior.base.checks import first_line
from hf_sparseprior.base.files import missing_path
from hf_sparseprior.base.formats import EXPORT_FORMAT, FORMAT_KEY, check_format
from hf_sparseprior.base.json_files import RECORD_BYTES, read_json_object
from hf_sparseprior.cli import onnx_operators
from hf_sparseprior.cli.labelled_images import pixel_values, read_image
from hf_sparseprior.kernels.build import find_compiler
from hf_sparseprior.kernels.program_libraries import torch_library
from hf_sparseprior.saving.saved_processor import load_image_processor

FILE = "model.aoti.pt2"
DEPLOYMENT = "deployment.json"  # in the folder of every exported file, what is known of it
SOURCES = (".cpp",)  # what a package has besides what runs; with every path of the machine
TOP = 5  # classes that are printed
CALLS = 10  # that are timed


def read_deployment(folder: Path) -> dict[str, Any]:
    """What is known of the exported file in a folder.

    Raises:
        OSError: for a folder that holds none. ValueError: for a newer format, or newer operators, than this version's.
    """
    if not os.path.lexists(folder):
        raise OSError(missing_path(folder, "give a folder that `export --format` made"))
    if not os.path.lexists(folder / DEPLOYMENT):
        raise OSError(f"{folder} holds no exported file: it has no {DEPLOYMENT}, which `export --format` writes")
    about = read_json_object(folder / DEPLOYMENT, RECORD_BYTES)
    try:
        check_format("the exported file", about.get(FORMAT_KEY, 1), EXPORT_FORMAT)
        if (needed := about.get("kernels")) is not None:
            check_format("the set of operators", needed["operators"], onnx_operators.VERSION, "kernels.operators")
    except ValueError as error:
        raise ValueError(f"{folder / DEPLOYMENT}: {error}") from None
    return about


def write_package(program: torch.export.ExportedProgram, outputs: Sequence[str], folder: Path) -> None:
    """Compile a traced model for this processor, with the weights in it, into a folder.

    Raises:
        ValueError: without a compiler.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ValueError("AOTInductor needs a C++ compiler; on Debian and Ubuntu: apt-get install g++")
    print("AOTInductor compiles, which takes a minute or more", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch, _without_paths(compiler, Path(scratch)), torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(scratch, "whole.pt2")))
        with zipfile.ZipFile(package) as whole, zipfile.ZipFile(folder / FILE, "w") as kept:
            for name in whole.namelist():
                if not name.endswith(SOURCES):
                    kept.writestr(name, whole.read(name))


@contextlib.contextmanager
def _without_paths(compiler: Sequence[str], scratch: Path) -> Iterator[None]:
    """Freeze the weights, and have a compiler that leaves the paths of this machine out of what it writes.

    Its last words are ours, because AOTInductor asks for lines of source files and has no setting against it.
    """
    places = {
        sysconfig.get_paths()["purelib"]: "site-packages",
        torch._inductor.runtime.cache_dir_utils.cache_dir(): ".",
    }
    words = ["-g0", *(f"-ffile-prefix-map={place}={name}" for place, name in places.items())]
    script = scratch / Path(compiler[0]).name
    place = shlex.quote(str(scratch))  # for what a compiler that is killed leaves
    script.write_text(
        f'#!/bin/sh\nTMPDIR={place} exec {shlex.join(compiler)} "$@" {shlex.join(words)}\n', encoding="utf-8"
    )
    script.chmod(0o700)
    with torch._inductor.config.patch({"freezing": True, "cpp.cxx": (None, str(script))}):
        yield


def load_package(file: Path, threads: int) -> Callable[[Tensor], list[np.ndarray]]:
    """Load a package, which runs code that is in it.

    Raises:
        OSError: for what is no package, one that is damaged, and one for another processor or torch.
    """
    try:
        with zipfile.ZipFile(file) as opened:
            names = opened.namelist()
    except zipfile.BadZipFile as error:
        raise OSError(f"{file} is no package of AOTInductor, or damaged ({error})") from None
    if not any("/aotinductor/" in name for name in names):
        raise OSError(f"{file} is no package of AOTInductor: it has no compiled model")
    try:
        model = torch._inductor.aoti_load_package(str(file))
    except RuntimeError as error:
        raise OSError(f"{file} cannot be loaded here: {first_line(error)}") from None

    def call(images: Tensor) -> list[np.ndarray]:
        with torch.no_grad():
            found = model(images)
        return [output.numpy() for output in (found if isinstance(found, (list, tuple)) else [found])]

    return call


# ---- the command ----------------------------------------------------------------------------------------------------


def run_package(folder: str | os.PathLike, images: Sequence[Path] = ()) -> Iterator[str]:
    """Run a package that `export --format aoti` made, on images or on a random one; lines for the user.

    Raises:
        OSError: for a folder that has none, and what `load_package` refuses.
        ValueError: for a newer format or newer operators, and a bad processor or image.
    """
    folder = Path(folder)
    folder = folder.parent if folder.is_file() else folder
    about = read_deployment(folder)
    if about.get("format") != "aoti" or about.get("file") != FILE:
        raise OSError(f"{folder} holds a file for {about.get('format')!r}, and run-package runs those of 'aoti'")
    if about.get("kernels") is not None:
        torch_library()
    call = load_package(folder / FILE, torch.get_num_threads())
    shape = about["input"]["shape"][1:]
    if not images:
        yield from _timed(call, torch.randn(1, *shape), about["outputs"])
        return
    processor = load_image_processor(folder)
    for image in images:
        pixels = pixel_values([read_image(image, processor, shape[0])], processor, shape[0])
        found = dict(zip(about["outputs"], call(pixels), strict=True))
        yield f"{image}: {_said(found, about.get('labels'))}"


def _said(found: dict[str, np.ndarray], labels: Any) -> str:
    logits = found.get("logits")
    if logits is None or logits.ndim != 2:
        return ", ".join(f"{name} {tuple(value.shape)}" for name, value in found.items())
    shares = torch.from_numpy(logits[0]).softmax(0)
    best = shares.argsort(descending=True)[:TOP].tolist()
    return ", ".join(f"{labels[number] if labels else number} {100 * shares[number]:.1f} %" for number in best)


def _timed(call: Callable[[Tensor], list[np.ndarray]], pixels: Tensor, outputs: Sequence[str]) -> Iterator[str]:
    found, taken = call(pixels), []
    for _ in range(CALLS):
        start = time.perf_counter()
        call(pixels)
        taken.append(1000 * (time.perf_counter() - start))
    for name, value in zip(outputs, found, strict=True):
        yield f"{name}: {tuple(value.shape)}"
    yield f"one random image, {torch.get_num_threads()} threads, median of {CALLS}: {median(taken):.2f} ms"
