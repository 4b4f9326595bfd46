"""`python -m hf_sparseprior export MODEL OUT --format torch|onnx|openvino`: a file that runs without this package."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import BaseImageProcessor

from hf_sparseprior.attention.plain_operations import Plain, plain_operations
from hf_sparseprior.base.families import family_of
from hf_sparseprior.base.files import check_new, file_sha256, whole_folder, write_text
from hf_sparseprior.base.formats import EXPORT_FORMAT, FORMAT_KEY
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.base.version import __version__
from hf_sparseprior.cli import onnx_operators
from hf_sparseprior.cli.export import exported_source
from hf_sparseprior.cli.exportable import Exportable, vision_config
from hf_sparseprior.cli.labelled_images import accuracies, read_class_folders
from hf_sparseprior.cli.packages import DEPLOYMENT
from hf_sparseprior.cli.runtimes import (
    FORMATS,
    INPUT,
    Call,
    Format,
    check_weights,
    quantize_onnx,
    quantize_openvino,
    with_int8_layers,
)
from hf_sparseprior.kernels.program_libraries import torch_library
from hf_sparseprior.saving.image_processor import SparsePriorImageProcessor
from hf_sparseprior.saving.processor import PROCESSOR
from hf_sparseprior.saving.saved_processor import MAX_SIDE, load_image_processor

# Forms of attention that are PyTorch operations alone, and that fit any batch; the first is the default.
BACKENDS = ("sdpa", "gather", "diagonal", "reference")
BATCHES = (1, 3)
CHOOSING_BATCHES = (1, 8)  # of models that choose keys or tokens
ALLOWED = 1e-4  # largest difference, in units of the largest output if that is above 1
SECONDS = 3.0  # of each timed contender
MOST_CALLS = 30
SLOWER = 1.05  # what is less is noise


class Traced(NamedTuple):
    """A traced model.

    program: takes pixel_values of any batch. outputs: their names. attention: which backends ran its attention, or with
    kernels which of their operators it calls, and how often.
    """

    program: torch.export.ExportedProgram
    outputs: list[str]
    attention: dict[str, int]


class NoOperators(ValueError):
    """A file was to keep the compiled operators, and the model takes none for images of its size."""


def checked_sides(size: Any) -> tuple[int, int]:
    """(height, width) of a size in pixels, one number or two.

    Raises:
        ValueError: for anything else.
    """
    sides = (size, size) if isinstance(size, int) else size
    whole = isinstance(sides, (list, tuple)) and all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides)
    if not whole or len(sides) != 2:
        raise ValueError(f"size={size!r} must be (height, width) or one number, each from 1 to {MAX_SIDE} pixels")
    return tuple(sides)


def parse_size(text: str, option: str = "--size") -> tuple[int, int]:
    """(height, width) of "HEIGHTxWIDTH" or one number. `option`: for errors.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"([0-9]{1,6})(?:x([0-9]{1,6}))?", text)
    height, width = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise ValueError(f"{option} {text} must be HEIGHTxWIDTH or one number, each from 1 to {MAX_SIDE} pixels")
    return height, width


def deploy(
    source: str | os.PathLike,
    out: str | os.PathLike,
    format_name: str,
    size: str | None = None,
    backend: str = BACKENDS[0],
    weights: str | None = None,
    labelled: str | os.PathLike | None = None,
    kernels: bool = False,
) -> list[str]:
    """Write a saved model as a file for another program, as `export` does.

    Args:
        source: folder of a saved model, of an adapter of peft, or of a training run.
        out, backend, weights, kernels: as in `export`.
        format_name: one of `FORMATS`.
        size: of the images, "HEIGHTxWIDTH" or one number; default the model's.
        labelled: its `images`.

    Raises:
        OSError: for a source that is no saved model, or an existing `out`.
        ValueError, ImportError: as `export`.
    """
    check_options(format_name, backend, weights, kernels)
    check_new(Path(out))
    sides = None if size is None else parse_size(size)
    if kernels:
        kernels_library(FORMATS[format_name])  # before the model is loaded, which may take longer
    folder, model = exported_source(source)
    return export(
        model,
        out,
        format_name,
        size=sides,
        backend=backend,
        weights=weights,
        images=labelled,
        kernels=kernels,
        processor=folder if os.path.lexists(folder / PROCESSOR) else None,
    )


def check_options(format_name: str, backend: str, weights: str | None, kernels: bool) -> None:
    """Check options together, and what must be installed.

    Raises:
        ValueError: for values that there are not, and that exclude each other.
        ImportError: for a missing package.
    """
    for name, value, known in (("format", format_name, FORMATS), ("backend", backend, BACKENDS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
    check_weights(weights, format_name)
    FORMATS[format_name].check_packages()
    if kernels and backend != BACKENDS[0]:
        raise ValueError(
            f"--kernels and --backend {backend} exclude each other: both say how attention runs in the file"
        )


def export(
    model: Any,
    out: str | os.PathLike,
    format: str = "onnx",
    *,
    size: int | tuple[int, int] | None = None,
    kernels: bool = False,
    weights: str | None = None,
    backend: str = BACKENDS[0],
    images: str | os.PathLike | None = None,
    processor: Any = None,
) -> list[str]:
    """Write a model as a file for another program, compare the two, and time the file (`sp.export`).

    The model is not changed. The new folder appears whole or not at all.

    Args:
        model: of ours, of timm, or of transformers, with or without a prior in place; a head of transformers on a
            backbone of ours; or a model of peft, whose adapter is merged and whose decay is kept (`merge_and_unload`).
            Its one input are images or clips.
        out: new folder.
        format: one of `FORMATS`: "torch", "onnx", "openvino" or "aoti".
        size: of the images in pixels, (height, width) or one number; default the model's, or the processor's.
        kernels: the file keeps the compiled operators, and needs their library where it runs. The chooser decides which
            layers take them, as in PyTorch.
        weights: one of `WEIGHTS` that the format takes, in place of float32.
        backend: the form of attention, one of `BACKENDS`. Layers that it cannot run take "sdpa" or "reference".
        images: folder of images, a folder for each class, on which a classifier's accuracy is measured.
        processor: an image processor of transformers, or a folder that has its settings. Models of ours and of timm
            have their own.

    Returns:
        Lines for the user: what was written, how it was compared, and how long it takes.

    Raises:
        OSError: for an existing `out`.
        ValueError: for a bad size, a model that cannot be exported, and outputs that are not those of the model.
        ImportError: for a missing package.
    """
    check_options(format, backend, weights, kernels)
    format_, out = FORMATS[format], Path(out)
    check_new(out)
    library = kernels_library(format_) if kernels else None
    saved, model = saved_processor(processor), own_copy(model)
    exported = Exportable(model, checked_sides(size) if size is not None else stock_sides(model, saved))
    settings = fitted_processor(saved, exported)
    files = [] if images is None else labelled_files(images, exported, settings)
    with whole_folder(out) as scratch, tempfile.TemporaryDirectory() as whole:
        traced, call = write_model(exported, format_, Path(whole) if weights else scratch, backend, kernels)
        calls, about = {"file": call}, description(exported, format_, traced)
        if library is not None:
            about["kernels"] = library_record(library)
        about["compared"], line = compare(exported, format_, call)
        if weights is not None:
            narrow, difference = narrow_file(exported, format_, weights, Path(whole), scratch, backend, kernels)
            calls = {"file": narrow, "float32": call}
            about["weights"], about["compared"][weights] = weights, difference
            line += f"; with weights of {weights}: {difference:.1e}"
        lines = [line]
        if settings is not None:
            write_text(scratch / PROCESSOR, json.dumps(settings, indent=2) + "\n")
        if files:
            about["accuracy"], line = measured_accuracy(exported, format_, calls, files, scratch)
            lines.append(line)
        about["milliseconds"], about["quartiles"], timed = latencies(exported, format_, calls, backend, kernels)
        write_text(scratch / DEPLOYMENT, json.dumps(about, indent=2) + "\n")
    if library is not None:
        lines.append(f"it needs the operators of {library} where it runs (docs/export.md)")
    if settings is None:
        lines.append(f"without {PROCESSOR}: the model does not say how its images are prepared (processor=)")
    return [f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}", *lines, *timed]


def own_copy(model: Any) -> Any:
    """A copy of a model in float32 on the CPU, in evaluation mode and without gradients, with adapters merged.

    Raises:
        ValueError: for an adapter that cannot be merged.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r:.80} must be a model of hf_sparseprior, transformers or timm")
    model = copy.deepcopy(model)
    if hasattr(model, "get_base_model"):  # peft's
        try:
            model = model.merge_and_unload()
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise ValueError(f"the adapter of {type(model).__name__} cannot be merged: {_reason(error)}") from error
    model = model.cpu().float().eval().requires_grad_(False)
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    for config in configs.values():
        for name, value in (("return_dict", True), ("output_attentions", False), ("output_hidden_states", False)):
            if hasattr(config, name):
                setattr(config, name, value)
    return model


def kernels_library(format_: Format) -> Path:
    """The library with a format's operators.

    Raises:
        ValueError: if this machine cannot have it; without --kernels none is needed.
    """
    try:
        torch_library()  # which traces need, too
        return format_.library()
    except RuntimeError as error:
        raise ValueError(f"--kernels: {error}; a file without --kernels needs none") from error


def library_record(library: Path) -> dict[str, Any]:
    """What deployment.json says of the library that a file needs."""
    return {
        "library": library.name,
        "sha256": file_sha256(library),
        "operators": onnx_operators.VERSION,
        "hf_sparseprior": __version__,
    }


# ---- how images are prepared ----------------------------------------------------------------------------------------


def saved_processor(processor: Any) -> dict[str, Any] | None:
    """The settings of an image processor, or of a folder with its preprocessor_config.json; None for None.

    Raises:
        OSError, ValueError: for a file that is missing or bad, and for what is no image processor.
    """
    if processor is None:
        return None
    if isinstance(processor, (str, os.PathLike)):
        load_image_processor(processor)
        return read_json_object(Path(processor) / PROCESSOR)
    processor = getattr(processor, "image_processor", processor)  # of a processor of images and text
    if not isinstance(processor, BaseImageProcessor):
        raise ValueError(f"processor={processor!r:.80} must be an image processor of transformers or a folder of one")
    return dict(json.loads(processor.to_json_string()))


def stock_sides(model: Any, saved: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """(height, width) of the images that a processor gives a stock model, which may be configured for others (DINOv2);
    None: as configured.
    """
    if saved is None or family_of(vision_config(model)) is not None:
        return None
    crop = saved.get("do_center_crop", saved.get("crop_size") is not None)
    size = saved.get("crop_size") if crop else saved.get("size")
    if isinstance(size, int) and crop:
        return size, size
    if isinstance(size, Mapping) and {"height", "width"} <= size.keys():
        return size["height"], size["width"]
    return None


def fitted_processor(saved: Mapping[str, Any] | None, exported: Exportable) -> dict[str, Any] | None:
    """preprocessor_config.json: the saved one with the size of the exported images, or the model's own.

    Raises:
        ValueError: for one that crops to another size.
    """
    new = exported.processor_settings()
    if saved is None:
        return new
    if saved.get("image_processor_type") == SparsePriorImageProcessor.__name__:  # the file goes where our code is not
        assert new is not None
        saved = {key: value for key, value in saved.items() if key not in ("auto_map", "do_grayscale")}
        saved |= {key: new[key] for key in ("image_processor_type", "do_convert_rgb")}
    if "max_num_patches" in saved:  # of images of several sizes, and the file takes one size
        return new
    if saved.get("do_center_crop"):
        crop = saved.get("crop_size")
        if crop not in (exported.size, exported.size["height"]):
            raise ValueError(f"{PROCESSOR}: crop_size={crop} must be {exported.size}, the size of the exported images")
        return dict(saved)
    return {**saved, "size": exported.size}


# ---- the file -------------------------------------------------------------------------------------------------------


def trace(exported: Exportable, backend: str = BACKENDS[0], kernels: bool = False) -> Traced:
    """A model in evaluation mode as a graph of PyTorch's own operations, and with `kernels` of ours, for any batch.

    Raises:
        ValueError: for a backend that no layer can run, a model that cannot be traced, and with `kernels` one that
            calls none; the message names both.
    """
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    order = (backend,) if backend == "reference" else tuple(dict.fromkeys((backend, "sdpa", "reference")))
    with contextlib.nullcontext(Plain(())) if kernels else plain_operations(*order) as plain, torch.no_grad():
        try:
            names = list(exported.named(exported.images(1)))
            plain.ran.clear()
            with contextlib.redirect_stderr(io.StringIO()):  # where torch prints the graph that it has come to
                program = torch.export.export(exported, (exported.images(2),), dynamic_shapes=shapes, strict=False)
        except Exception as error:  # torch has many for what it cannot trace
            raise ValueError(f"{exported.title} cannot be traced: {_reason(error)}") from error
    if kernels:
        called = onnx_operators.counted(program)
        if not called:
            raise NoOperators(
                f"--kernels: {exported.title} takes no compiled operator for images of this size: dense attention is "
                "faster there, or they cannot compute its attention (SPARSEPRIOR_LOG=debug says which)"
            )
        return Traced(program, names, dict(called))
    if backend != BACKENDS[0] and not plain.ran[backend]:
        reason = plain.refused.get(backend, "none of them computes attention over pairs")
        raise ValueError(f"--backend {backend} runs no layer of {exported.title}: {reason}")
    return Traced(program, names, dict(plain.ran))


def write_model(
    exported: Exportable, format_: Format, folder: Path, backend: str = BACKENDS[0], kernels: bool = False
) -> tuple[Traced, Call]:
    """Write a model in evaluation mode in a format, and load the file.

    Raises:
        ValueError: for what the format or its program cannot express; the message names the model.
    """
    traced = trace(exported, backend, kernels)
    with refused_by_name(exported, format_):
        format_.write(traced.program, traced.outputs, folder)
        call = format_.load(folder / format_.file, torch.get_num_threads())
    return traced, call


@contextlib.contextmanager
def refused_by_name(exported: Exportable, format_: Format) -> Iterator[None]:
    """Turn what the packages of a format raise, errors of their own kinds, into a ValueError that names the model."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{exported.title} cannot be exported to {format_.title}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The innermost cause in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def narrow_file(
    exported: Exportable, format_: Format, weights: str, whole: Path, folder: Path, backend: str, kernels: bool = False
) -> tuple[Call, float]:
    """Write a model with other weights than float32 into a folder, load it, and find the largest of its `differences`.

    `whole` has the file of float32.

    Raises:
        ValueError: as `export`, and for outputs that are no numbers.
    """
    if weights == "bfloat16":
        call = write_model(copy.deepcopy(exported).to(torch.bfloat16), format_, folder, backend, kernels)[1]
    elif format_ is FORMATS["torch"]:
        call = write_model(with_int8_layers(exported), format_, folder, backend, kernels)[1]
    else:
        with refused_by_name(exported, format_):
            (quantize_onnx if format_ is FORMATS["onnx"] else quantize_openvino)(whole, folder)
            call = format_.load(folder / format_.file, torch.get_num_threads())
    difference = float(differences(exported, call).max())
    if not math.isfinite(difference):
        raise ValueError(f"--weights {weights}: outputs of {exported.title} are no numbers then")
    return call, difference


def compare(exported: Exportable, format_: Format, call: Call) -> tuple[dict[str, Any], str]:
    """What deployment.json says of how far a file is from its model, and a line for the user.

    A model that chooses keys or tokens may choose otherwise for less than half of the images.

    Raises:
        ValueError: for other outputs than the model's.
    """
    batches = CHOOSING_BATCHES if exported.chooses else BATCHES
    gaps = differences(exported, call, batches)
    apart = gaps > ALLOWED
    if apart.any() and not (exported.chooses and np.isfinite(gaps).all() and apart.mean() < 0.5):
        raise ValueError(
            f"{exported.title} as {format_.title} gives other outputs than the model, by {gaps.max():.1e}, and at most "
            f"{ALLOWED:.0e} is allowed; --backend reference writes attention out"
        )
    largest, numbers = float(gaps[~apart].max()), " and ".join(map(str, batches))
    line = f"largest difference from the model: {largest:.1e} (batches of {numbers})"
    if apart.any():
        line += (
            f"; {apart.sum()} of {len(apart)} images choose other keys or tokens, between scores that differ by "
            f"rounding alone: {gaps.max():.1e}"
        )
    about = {"batches": list(batches), "largest_difference": largest, "allowed": ALLOWED}
    return {**about, "images_that_choose_otherwise": int(apart.sum())}, line


def differences(exported: Exportable, call: Call, batches: Sequence[int] = BATCHES) -> np.ndarray:
    """Of each image, the largest difference between the outputs of a file and a model, in units of the largest output
    if that is above 1; infinite for what is no number and for outputs of another shape.
    """
    gaps = []
    for batch in batches:
        pixels = exported.images(batch, seed=batch)
        with torch.no_grad():
            expected = [output.numpy() for output in exported(pixels)]
        given = call(pixels)
        if [one.shape for one in given] != [one.shape for one in expected]:
            return np.array([np.inf])
        largest = np.zeros(batch)
        for one, other in zip(given, expected, strict=True):
            off = np.abs(one - other).reshape(batch, -1).max(1) / max(1.0, np.abs(other).max())
            largest = np.maximum(largest, off)
        gaps.append(np.where(np.isfinite(largest), largest, np.inf))
    return np.concatenate(gaps)


def description(exported: Exportable, format_: Format, traced: Traced) -> dict[str, Any]:
    """deployment.json, without what is measured."""
    return {
        FORMAT_KEY: EXPORT_FORMAT,
        "format": next(name for name, known in FORMATS.items() if known is format_),
        "file": format_.file,
        "model": type(exported.model).__name__,
        "prior": exported.prior,
        "weights": "float32",
        "input": {"name": INPUT, "shape": ["batch", *exported.images(1).shape[1:]], "dtype": "float32"},
        "image_size": list(exported.sides),
        "outputs": traced.outputs,
        "labels": exported.labels if "logits" in traced.outputs else None,
        "problem_type": getattr(getattr(exported.model, "config", None), "problem_type", None),
        "attention": traced.attention,
        "versions": format_.versions,
    }


# ---- how often it is right ------------------------------------------------------------------------------------------


def labelled_files(
    folder: str | os.PathLike, exported: Exportable, processor: Mapping[str, Any] | None
) -> list[tuple[Path, int]]:
    """Images of a folder and their classes.

    Raises:
        OSError, ValueError: as `read_class_folders`; ValueError also for a model that is no classifier of images, and
            without a processor.
    """
    if not exported.classifies_images or exported.labels is None:
        raise ValueError(f"--images is for classifiers of images, not for a {type(exported.model).__name__}")
    if processor is None:
        raise ValueError(f"--images needs {PROCESSOR} next to the model, which says how its images are prepared")
    return read_class_folders(folder, exported.labels)


def measured_accuracy(
    exported: Exportable,
    format_: Format,
    calls: Mapping[str, Call],
    files: Sequence[tuple[Path, int]],
    folder: Path,
) -> tuple[dict[str, float], str]:
    """Accuracy of files and model on images, which the processor of a folder prepares, and a line for the user."""
    classifiers: dict[str, Any] = {name: lambda pixels, call=call: call(pixels)[0] for name, call in calls.items()}
    classifiers["pytorch"] = lambda pixels: exported(pixels)[0].numpy()
    with torch.no_grad():
        shares = accuracies(classifiers, files, load_image_processor(folder), exported.num_channels)
    names = contender_names(shares, exported, format_)
    return shares, f"accuracy on {len(files)} images: " + "; ".join(
        f"{names[name]} {100 * share:.2f} %" for name, share in shares.items()
    )


# ---- how long it takes ----------------------------------------------------------------------------------------------


CONTENDERS = {
    "file": "{title}, {prior}",
    "float32": "{title}, {prior}, weights of float32",
    "default": "{title}, {prior}, without --backend",
    "portable": "{title}, {prior}, without --kernels",
    "dense": "{title}, dense",
    "pytorch": "PyTorch, {prior}",
}


def contender_names(keys: Iterable[str], exported: Exportable, format_: Format) -> dict[str, str]:
    """What the user reads for keys of `CONTENDERS`."""
    return {name: CONTENDERS[name].format(title=format_.title, prior=exported.prior) for name in keys}


def latencies(
    exported: Exportable, format_: Format, calls: Mapping[str, Call], backend: str, kernels: bool = False
) -> tuple[dict[str, float], dict[str, list[float]], list[str]]:
    """Milliseconds of an image in each of `CONTENDERS` that there is, median and quartiles, and lines for the user."""
    pixels, contenders = exported.images(1), dict(calls)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        if kernels or backend != BACKENDS[0]:
            contenders["portable" if kernels else "default"] = write_model(exported, format_, Path(first))[1]
        if (twin := exported.dense_twin()) is not None:
            contenders["dense"] = write_model(twin, format_, Path(second))[1]
        contenders["pytorch"] = exported
        with torch.no_grad():
            timings = interleaved({name: functools.partial(run, pixels) for name, run in contenders.items()})
    times = {name: round(median(values), 3) for name, values in timings.items()}
    quartiles = {name: np.percentile(values, (25, 75)).round(3).tolist() for name, values in timings.items()}
    names = contender_names(times, exported, format_)
    width = max(map(len, names.values()))
    lines = [f"one image, {torch.get_num_threads()} threads, median:"]
    lines += [f"  {names[name]:<{width}}  {value:8.2f} ms" for name, value in times.items()]
    return times, quartiles, [*lines, *advice(times, format_.title, backend)]


def advice(times: dict[str, float], title: str, backend: str) -> list[str]:
    """What to take instead of a file that is slower than another of the contenders."""
    lines, form = [], times.get("float32", times["file"])
    if times["file"] > SLOWER * form:
        lines.append(f"these weights are slower in {title} than those of float32: leave --weights out")
    if form > SLOWER * times.get("default", math.inf):
        lines.append(f"--backend {backend} is slower in {title} than the default, which gives the same outputs")
    if form > SLOWER * times.get("portable", math.inf):
        lines.append(f"this model is faster in {title} without --kernels, which gives the same outputs")
    if form > SLOWER * times.get("dense", math.inf):
        why = "" if "portable" in times else ", which has no kernels for it (--kernels takes ours along)"
        better = "this model in PyTorch" if times["pytorch"] < times["dense"] else "a model trained with prior dense"
        lines.append(f"the prior is slower than dense attention in {title}{why}; faster: {better}")
    return lines


def interleaved(contenders: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Milliseconds of the calls, which take turns. Of the two calls of a turn the second counts: during the first one,
    threads of the contender before may still wait busily.
    """
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    start = time.perf_counter()
    while True:
        for name, run in contenders.items():
            run()
            begin = time.perf_counter()
            run()
            taken[name].append(1000 * (time.perf_counter() - begin))
        calls = len(next(iter(taken.values())))
        if calls >= MOST_CALLS or (calls >= 3 and time.perf_counter() - start > SECONDS * len(contenders)):
            return taken
