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
from torch import Tensor, nn

from hf_sparseprior.attention.plain_operations import Plain, plain_operations
from hf_sparseprior.base.families import family_of
from hf_sparseprior.base.files import check_new, file_sha256, whole_folder, write_text
from hf_sparseprior.base.json_files import read_json_object
from hf_sparseprior.base.version import __version__
from hf_sparseprior.cli import onnx_operators
from hf_sparseprior.cli.export import saved_source
from hf_sparseprior.cli.labelled_images import accuracies, read_class_folders
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
from hf_sparseprior.models.base_config import as_pair
from hf_sparseprior.models.pretrained import copy_weights
from hf_sparseprior.priors.prior import pruning_of
from hf_sparseprior.saving.image_processor import SparsePriorImageProcessor
from hf_sparseprior.saving.processor import PROCESSOR, image_processor_settings, takes_clips
from hf_sparseprior.saving.saved_processor import MAX_SIDE, load_image_processor

DEPLOYMENT = "deployment.json"
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


class Outputs(nn.Module):
    """A model whose outputs are the tensors that a model of its kind is for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        family = family_of(model.config)
        assert family is not None
        self.is_backbone = family.backbone is not None and isinstance(model, family.backbone)
        self.is_classifier = family.classifier is not None and isinstance(model, family.classifier)

    def named(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """The tensors by name: a classifier's logits, a backbone's maps, or the states of the tokens that are left."""
        output = self.model(pixel_values=pixel_values)
        if self.is_backbone:
            return dict(zip(self.model.out_features, output.feature_maps, strict=True))
        names = ("logits",) if self.is_classifier else ("last_hidden_state", "pooler_output", "token_ids")
        return {name: output[name] for name in names if output.get(name) is not None}

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        """The tensors of `named`."""
        outputs = self.named(pixel_values).values()
        return tuple(output.float() if output.is_floating_point() else output for output in outputs)


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) of "HEIGHTxWIDTH" or one number.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"([0-9]{1,6})(?:x([0-9]{1,6}))?", text)
    height, width = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise ValueError(f"--size {text} must be HEIGHTxWIDTH or one number, each from 1 to {MAX_SIDE} pixels")
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
    """Write a saved model as a file for another program, compare the two, and time the file.

    The new folder appears whole or not at all.

    Args:
        source: folder of a saved model or a training run.
        out: new folder.
        format_name: one of `FORMATS`.
        size: of the images, "HEIGHTxWIDTH" or one number; default the model's.
        backend: the form of attention, one of `BACKENDS`. Layers that it cannot run take "sdpa" or "reference".
        weights: one of `WEIGHTS` that the format takes, in place of float32.
        labelled: folder of images, a folder for each class, on which a classifier's accuracy is measured.
        kernels: the file keeps the compiled operators, and needs their library where it runs. The chooser decides which
            layers take them, as in PyTorch.

    Returns:
        Lines for the user: what was written, how it was compared, and how long it takes.

    Raises:
        OSError: for a source that is not a saved model of ours, or an existing `out`.
        ValueError: for a bad size, a model that cannot be exported, and outputs that are not those of the model.
        ImportError: for a missing package.
    """
    sides = None if size is None else parse_size(size)
    format_ = FORMATS[format_name]
    check_weights(weights, format_name)
    format_.check_packages()
    if kernels and backend != BACKENDS[0]:
        raise ValueError(
            f"--kernels and --backend {backend} exclude each other: both say how attention runs in the file"
        )
    out = Path(out)
    check_new(out)
    library = kernels_library(format_) if kernels else None
    source, model = saved_source(source)
    if sides is not None and sides != as_pair(model.config.image_size):
        model = resized(model, sides)
    model = model.float().eval().requires_grad_(False)
    model.config.return_dict, model.config.output_attentions, model.config.output_hidden_states = True, False, False
    processor = processor_settings(source, model.config)
    files = [] if labelled is None else labelled_files(labelled, model)
    with whole_folder(out) as scratch, tempfile.TemporaryDirectory() as whole:
        traced, call = export(model, format_, Path(whole) if weights else scratch, backend, kernels)
        calls, about = {"file": call}, description(model, format_, traced)
        if library is not None:
            about["kernels"] = library_record(library)
        about["compared"], line = compare(model, format_, call)
        if weights is not None:
            narrow, difference = narrow_file(model, format_, weights, Path(whole), scratch, backend, kernels)
            calls = {"file": narrow, "float32": call}
            about["weights"], about["compared"][weights] = weights, difference
            line += f"; with weights of {weights}: {difference:.1e}"
        lines = [line]
        write_text(scratch / PROCESSOR, json.dumps(processor, indent=2) + "\n")
        if files:
            about["accuracy"], line = measured_accuracy(model, format_, calls, files, scratch)
            lines.append(line)
        about["milliseconds"], about["quartiles"], timed = latencies(model, format_, calls, backend, kernels)
        write_text(scratch / DEPLOYMENT, json.dumps(about, indent=2) + "\n")
    if library is not None:
        lines.append(f"it needs the operators of {library} where it runs (docs/export.md)")
    return [f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}", *lines, *timed]


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


def _named(model: Any) -> str:
    family = family_of(model.config)
    assert family is not None
    return f"{family.title} with prior {model.config.prior_name!r}"


def resized(model: Any, sides: tuple[int, int]) -> Any:
    """A model for images of another size, with what depends on it interpolated.

    Raises:
        ValueError: if the size does not fit the model.
    """
    config = copy.deepcopy(model.config)
    config.image_size = sides[0] if sides[0] == sides[1] else list(sides)
    changed = type(model)(config)
    copy_weights(model, changed, may_start_anew=lambda name: False)
    return changed


def processor_settings(source: Path, config: Any) -> dict[str, Any]:
    """preprocessor_config.json: the saved one with the size of the exported images, or the config's.

    Raises:
        OSError, ValueError: for a file that is bad, and for one that crops to another size.
    """
    new = image_processor_settings(config)
    if not os.path.lexists(source / PROCESSOR):
        return new
    load_image_processor(source)
    saved = read_json_object(source / PROCESSOR)
    if saved.get("image_processor_type") == SparsePriorImageProcessor.__name__:  # the file goes where our code is not
        saved = {key: value for key, value in saved.items() if key not in ("auto_map", "do_grayscale")}
        saved |= {key: new[key] for key in ("image_processor_type", "do_convert_rgb")}
    if "max_num_patches" in saved:  # of images of several sizes, and the file takes one size
        return new
    if saved.get("do_center_crop"):
        crop = saved.get("crop_size")
        if crop not in (new["size"], new["size"]["height"]):
            raise ValueError(
                f"{source / PROCESSOR}: crop_size={crop} must be {new['size']}, the size of the exported images"
            )
        return saved
    return {**saved, "size": new["size"]}


# ---- the file -------------------------------------------------------------------------------------------------------


def images(config: Any, batch: int, seed: int = 0) -> Tensor:
    """Random images (batch, channels, height, width), or clips with frames before the channels."""
    clip = (config.num_frames,) if takes_clips(config) else ()
    shape = (batch, *clip, config.num_channels, *as_pair(config.image_size))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trace(model: Any, backend: str = BACKENDS[0], kernels: bool = False) -> Traced:
    """A model in evaluation mode as a graph of PyTorch's own operations, and with `kernels` of ours, for any batch.

    Raises:
        ValueError: for a backend that no layer can run, a model that cannot be traced, and with `kernels` one that
            calls none; the message names both.
    """
    outputs = Outputs(model).eval()
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    order = (backend,) if backend == "reference" else tuple(dict.fromkeys((backend, "sdpa", "reference")))
    with contextlib.nullcontext(Plain(())) if kernels else plain_operations(*order) as plain, torch.no_grad():
        try:
            names = list(outputs.named(images(model.config, 1)))
            plain.ran.clear()
            with contextlib.redirect_stderr(io.StringIO()):  # where torch prints the graph that it has come to
                program = torch.export.export(outputs, (images(model.config, 2),), dynamic_shapes=shapes, strict=False)
        except Exception as error:  # torch has many for what it cannot trace
            raise ValueError(f"{_named(model)} cannot be traced: {_reason(error)}") from error
    if kernels:
        called = onnx_operators.counted(program)
        if not called:
            raise ValueError(
                f"--kernels: {_named(model)} takes no compiled operator for images of this size: dense attention is "
                "faster there, or they cannot compute its attention (SPARSEPRIOR_LOG=debug says which)"
            )
        return Traced(program, names, dict(called))
    if backend != BACKENDS[0] and not plain.ran[backend]:
        reason = plain.refused.get(backend, "none of them computes attention over pairs")
        raise ValueError(f"--backend {backend} runs no layer of {_named(model)}: {reason}")
    return Traced(program, names, dict(plain.ran))


def export(
    model: Any, format_: Format, folder: Path, backend: str = BACKENDS[0], kernels: bool = False
) -> tuple[Traced, Call]:
    """Write a model in evaluation mode in a format, and load the file.

    Raises:
        ValueError: for what the format or its program cannot express; the message names the model.
    """
    traced = trace(model, backend, kernels)
    with refused_by_name(model, format_):
        format_.write(traced.program, traced.outputs, folder)
        call = format_.load(folder / format_.file, torch.get_num_threads())
    return traced, call


@contextlib.contextmanager
def refused_by_name(model: Any, format_: Format) -> Iterator[None]:
    """Turn what the packages of a format raise, errors of their own kinds, into a ValueError that names the model."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{_named(model)} cannot be exported to {format_.title}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The innermost cause in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def narrow_file(
    model: Any, format_: Format, weights: str, whole: Path, folder: Path, backend: str, kernels: bool = False
) -> tuple[Call, float]:
    """Write a model with other weights than float32 into a folder, load it, and find the largest of its `differences`.

    `whole` has the file of float32.

    Raises:
        ValueError: as `export`, and for outputs that are no numbers.
    """
    if weights == "bfloat16":
        call = export(copy.deepcopy(model).to(torch.bfloat16), format_, folder, backend, kernels)[1]
    elif format_ is FORMATS["torch"]:
        call = export(with_int8_layers(model), format_, folder, backend, kernels)[1]
    else:
        with refused_by_name(model, format_):
            (quantize_onnx if format_ is FORMATS["onnx"] else quantize_openvino)(whole, folder)
            call = format_.load(folder / format_.file, torch.get_num_threads())
    difference = float(differences(model, call).max())
    if not math.isfinite(difference):
        raise ValueError(f"--weights {weights}: outputs of {_named(model)} are no numbers then")
    return call, difference


def chooses(config: Any) -> bool:
    """Whether a model chooses keys or tokens for each image, which rounding alone can decide between close scores."""
    return any(prior["predictor"] is not None or pruning_of(prior) is not None for prior in config.stage_priors)


def compare(model: Any, format_: Format, call: Call) -> tuple[dict[str, Any], str]:
    """What deployment.json says of how far a file is from its model, and a line for the user.

    A model that `chooses` may choose otherwise for less than half of the images.

    Raises:
        ValueError: for other outputs than the model's.
    """
    batches = CHOOSING_BATCHES if chooses(model.config) else BATCHES
    gaps = differences(model, call, batches)
    apart = gaps > ALLOWED
    if apart.any() and not (chooses(model.config) and np.isfinite(gaps).all() and apart.mean() < 0.5):
        raise ValueError(
            f"{_named(model)} as {format_.title} gives other outputs than the model, by {gaps.max():.1e}, and at most "
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


def differences(model: Any, call: Call, batches: Sequence[int] = BATCHES) -> np.ndarray:
    """Of each image, the largest difference between the outputs of a file and a model, in units of the largest output
    if that is above 1; infinite for what is no number and for outputs of another shape.
    """
    gaps, module = [], Outputs(model).eval()
    for batch in batches:
        pixels = images(model.config, batch, seed=batch)
        with torch.no_grad():
            expected = [output.numpy() for output in module(pixels)]
        given = call(pixels)
        if [one.shape for one in given] != [one.shape for one in expected]:
            return np.array([np.inf])
        largest = np.zeros(batch)
        for one, other in zip(given, expected, strict=True):
            off = np.abs(one - other).reshape(batch, -1).max(1) / max(1.0, np.abs(other).max())
            largest = np.maximum(largest, off)
        gaps.append(np.where(np.isfinite(largest), largest, np.inf))
    return np.concatenate(gaps)


def description(model: Any, format_: Format, traced: Traced) -> dict[str, Any]:
    """deployment.json, without what is measured."""
    config = model.config
    shape = ["batch", *images(config, 1).shape[1:]]
    labels = [config.id2label[index] for index in range(config.num_labels)] if traced.outputs == ["logits"] else None
    return {
        "format": next(name for name, known in FORMATS.items() if known is format_),
        "file": format_.file,
        "model": type(model).__name__,
        "prior": config.prior_name,
        "weights": "float32",
        "input": {"name": INPUT, "shape": shape, "dtype": "float32"},
        "image_size": list(as_pair(config.image_size)),
        "outputs": traced.outputs,
        "labels": labels,
        "attention": traced.attention,
        "versions": format_.versions,
    }


# ---- how often it is right ------------------------------------------------------------------------------------------


def labelled_files(folder: str | os.PathLike, model: Any) -> list[tuple[Path, int]]:
    """Images of a folder and their classes.

    Raises:
        OSError, ValueError: as `read_class_folders`; ValueError also for a model that is no classifier of images.
    """
    if not Outputs(model).is_classifier or takes_clips(model.config):
        raise ValueError(f"--images is for classifiers of images, not for a {type(model).__name__}")
    return read_class_folders(folder, [model.config.id2label[index] for index in range(model.config.num_labels)])


def measured_accuracy(
    model: Any, format_: Format, calls: Mapping[str, Call], files: Sequence[tuple[Path, int]], folder: Path
) -> tuple[dict[str, float], str]:
    """Accuracy of files and model on images, which the processor of a folder prepares, and a line for the user."""
    classifiers: dict[str, Any] = {name: lambda pixels, call=call: call(pixels)[0] for name, call in calls.items()}
    classifiers["pytorch"] = lambda pixels: model(pixel_values=pixels).logits.numpy()
    with torch.no_grad():
        shares = accuracies(classifiers, files, load_image_processor(folder), model.config.num_channels)
    names = contender_names(shares, model, format_)
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


def dense_twin(model: Any) -> Any:
    """A model of the same size without a prior, with random weights; None: the model has none."""
    config = copy.deepcopy(model.config)
    config.prior = "dense"
    twin = type(model)(config).eval().requires_grad_(False)
    return None if twin.config.stage_priors == model.config.stage_priors else twin


def contender_names(keys: Iterable[str], model: Any, format_: Format) -> dict[str, str]:
    """What the user reads for keys of `CONTENDERS`."""
    return {name: CONTENDERS[name].format(title=format_.title, prior=model.config.prior_name) for name in keys}


def latencies(
    model: Any, format_: Format, calls: Mapping[str, Call], backend: str, kernels: bool = False
) -> tuple[dict[str, float], dict[str, list[float]], list[str]]:
    """Milliseconds of an image in each of `CONTENDERS` that there is, median and quartiles, and lines for the user."""
    pixels, contenders = images(model.config, 1), dict(calls)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        if kernels or backend != BACKENDS[0]:
            contenders["portable" if kernels else "default"] = export(model, format_, Path(first))[1]
        if (twin := dense_twin(model)) is not None:
            contenders["dense"] = export(twin, format_, Path(second))[1]
        contenders["pytorch"] = lambda pixels: model(pixel_values=pixels)
        with torch.no_grad():
            timings = interleaved({name: functools.partial(run, pixels) for name, run in contenders.items()})
    times = {name: round(median(values), 3) for name, values in timings.items()}
    quartiles = {name: np.percentile(values, (25, 75)).round(3).tolist() for name, values in timings.items()}
    names = contender_names(times, model, format_)
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
