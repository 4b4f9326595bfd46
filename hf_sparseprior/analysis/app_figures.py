"""What the app shows, as plain functions: text and PNG files. Nothing here needs gradio."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_sparseprior.analysis import explain, pictures
from hf_sparseprior.analysis.attention_maps import class_token_map, mean_query_map, query_map
from hf_sparseprior.analysis.costs_measured import seconds_per_call
from hf_sparseprior.analysis.image_maps import Panel, draw_panels
from hf_sparseprior.analysis.layers import attention_weights, connectivity, find_attention
from hf_sparseprior.analysis.predicted_cost import Twin, call_of, predicted_costs
from hf_sparseprior.base.families import family_of, preset_family, presets
from hf_sparseprior.cli.arguments import make_parser
from hf_sparseprior.models.pretrained import load_whole_model
from hf_sparseprior.saving.processor import image_processor_settings, takes_clips
from hf_sparseprior.saving.saved_processor import load_image_processor

MOST_HEADS = 6  # that are drawn
COLUMNS = 3  # of the picture of a model, so that two of them stand side by side
BUDGET = 1.0  # seconds for the rounds of one prediction
MEASURED_ROUNDS = 3
SIDES = (1, 2)  # times the side of a model's own images, at which it is timed


# ---- a prior --------------------------------------------------------------------------------------------------------


def prior_pictures(
    prior: str, out: Path, heads: int = 12, grid: str = "14x14", layer: int = 1, settings: str = ""
) -> tuple[str, list[Path]]:
    """What `explain` says of a prior, and its pictures: supports of each head, curves, decay masks.

    Args:
        prior: name, or names joined by +.
        out: folder of the pictures.
        heads, grid, layer: as of `explain`; layers count from 1.
        settings: KEY=VALUE, with spaces between them.

    Raises:
        ValueError: for a bad value.
    """
    given = ["explain", prior, "--heads", str(heads), "--grid", grid, "--layer", str(layer), "--out", str(out)]
    try:
        arguments = make_parser().parse_args([*given, *(f"--set={each}" for each in settings.split())])
    except SystemExit:
        raise ValueError(f"grid {grid!r} must be HEIGHTxWIDTH, for example 14x14") from None
    with redirect_stdout(io.StringIO()) as text:
        written = explain.run(arguments)
    lines = [line for line in text.getvalue().splitlines() if not line.startswith("picture: ")]
    return "\n".join(lines), written


# ---- attention of models --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """A model with its image processor. name: what the user gave."""

    name: str
    model: Any
    processor: Any


def open_model(source: str) -> Opened:
    """The saved model of a folder, or "PRESET PRIOR": a model with random weights.

    Raises:
        ValueError, OSError: if it is neither, or a model of clips.
    """
    from transformers import ViTImageProcessor

    preset, _, prior = source.strip().partition(" ")
    if preset in presets():
        family = preset_family(preset)
        torch.manual_seed(0)
        model = family.image_classifier(family.make_config(preset, prior=prior.strip() or "dense"))
        settings = image_processor_settings(model.config)
        processor = ViTImageProcessor(**{key: value for key, value in settings.items() if "type" not in key})
    else:
        folder = Path(source.strip())
        # transformers' own attention returns weights only with its eager implementation.
        model = load_whole_model(folder, attn_implementation="eager")
        processor = load_image_processor(folder)
    if takes_clips(model.config):
        raise ValueError(f"{source} is a model of clips; the app shows single images")
    return Opened(source.strip(), model.eval(), processor)


def example_photo() -> Path:
    """A photo that comes with scikit-learn.

    Raises:
        ImportError: without scikit-learn.
    """
    import sklearn.datasets

    return Path(str(sklearn.datasets.__file__)).parent / "images" / "flower.jpg"


def attention_picture(
    image: np.ndarray,
    opened: Opened,
    path: Path,
    layer: int = 1,
    query: tuple[int, int] | None = None,
) -> Path:
    """What each head of a model can see from a patch of an image, and the attention of the heads.

    Args:
        image: uint8 (height, width, 3).
        opened: the model.
        path: of the PNG.
        layer: from 1.
        query: (row, column) of the patch, from 1; None: the middle.

    Raises:
        ValueError: for a layer or patch that the model does not have, and for a model whose layers do not see the whole
            image.
    """
    attention = find_attention(opened.model)
    grid, prefix = attention.grid, attention.num_prefix_tokens
    if not 1 <= layer <= len(attention.layers):
        raise ValueError(f"layer {layer} must be from 1 to {len(attention.layers)} for {opened.name}")
    place = (grid[0] // 2, grid[1] // 2) if query is None else (query[0] - 1, query[1] - 1)
    if not (0 <= place[0] < grid[0] and 0 <= place[1] < grid[1]):
        raise ValueError(f"row {place[0] + 1}, column {place[1] + 1} must be in the {grid[0]}x{grid[1]} grid")
    pixels = opened.processor(image, return_tensors="pt")["pixel_values"]
    weights = attention_weights(opened.model, pixels)[layer - 1].float()
    pairs = connectivity(attention.layers[layer - 1], weights, attention)
    shown = _shown(pixels[0].numpy(), opened.processor)
    look = class_token_map if attention.has_class_token else mean_query_map
    whole = look(weights[0].mean(0), grid, prefix).numpy()
    visible, heat = (query_map(each[0], place, grid, prefix).numpy() for each in (pairs, weights))
    where: dict[str, Any] = {"query": place, "grid": grid}
    heads = range(min(MOST_HEADS, len(visible)))
    together = np.asarray(visible.any(0))
    first = [
        Panel(shown, title="image", **where),
        Panel(shown, seen=together, title=f"all heads see {together.sum()}", **where),
        Panel(shown, heat=whole, title="class token, mean" if attention.has_class_token else "all patches, mean"),
    ]
    sees = [Panel(shown, seen=visible[n], title=f"head {n + 1} sees {visible[n].sum()}", **where) for n in heads]
    attends = [
        Panel(shown, heat=heat[n], title=f"head {n + 1}, max {max(heat[n].max(), 0):.2g}", **where) for n in heads
    ]
    rows, labels = [first], [""]
    for panels, label in ((sees, "sees"), (attends, "attention")):
        rows += [panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)]
        labels += [label] * (len(rows) - len(labels))
    return draw_panels(rows, labels, path, f"layer {layer}: what the framed patch sees, and its attention")


def patch_at(opened: Opened, size: Sequence[int], point: Sequence[int]) -> tuple[int, int]:
    """The patch that shows a pixel of an image, or the nearest one if the image processor cuts the pixel off.

    Where each patch comes from is read off two images that the model's image processor prepares, whatever it resizes
    and cuts: in one the brightness of a pixel is its row, in the other its column.

    Args:
        opened: the model.
        size: (height, width) of the image, in pixels.
        point: (row, column) of the pixel, from 0.

    Returns:
        (row, column) of the patch, from 1.
    """
    grid = find_attention(opened.model).grid
    distances = np.zeros(grid)
    for axis, place in enumerate(point):
        ramp = np.linspace(0, 255, size[axis]).round().astype(np.uint8)
        image = np.repeat(np.expand_dims(ramp, 1 - axis), size[1 - axis], 1 - axis)
        pixels = opened.processor(np.repeat(image[..., None], 3, 2), return_tensors="pt")["pixel_values"][0].numpy()
        shown = _shown(pixels, opened.processor)[..., 0]
        middles = [((np.arange(n) + 0.5) * side / n).astype(int) for n, side in zip(grid, shown.shape, strict=True)]
        distances += (shown[np.ix_(*middles)] * (size[axis] - 1) - place) ** 2
    row, column = np.unravel_index(distances.argmin(), grid)
    return int(row) + 1, int(column) + 1


def same_place(patch: tuple[int, int], first: Opened, other: Opened) -> tuple[int, int]:
    """The patch of another model that lies over the middle of a patch of the first one; (row, column) from 1."""
    grids = (find_attention(opened.model).grid for opened in (first, other))
    row, column = ((2 * place - 1) * new // (2 * old) + 1 for place, old, new in zip(patch, *grids, strict=True))
    return row, column


def _shown(pixels: np.ndarray, processor: Any) -> np.ndarray:
    """An image as the model sees it, in colours again: (height, width, 3), 0 to 1."""
    normalised = getattr(processor, "do_normalize", False)
    mean, std = (processor.image_mean, processor.image_std) if normalised else (0.0, 1.0)
    mean, std = (np.broadcast_to(value, len(pixels)) for value in (mean, std))
    colours = pixels.transpose(1, 2, 0) * std + mean
    return np.clip(np.broadcast_to(colours, (*colours.shape[:2], 3)), 0, 1)


# ---- times ----------------------------------------------------------------------------------------------------------


def time_table(
    preset: str,
    priors: Sequence[str],
    sizes: Sequence[int],
    out: Path,
    measure: bool = False,
    say: Callable[[float, str], None] = lambda share, line: None,
) -> tuple[list[list[Any]], Path]:
    """Seconds of a forward pass of one image over image sizes, on this machine.

    Args:
        preset: of any family of images.
        priors: names.
        sizes: pixels a side.
        out: folder of the picture.
        measure: also time the whole model, not only predict from less deep ones.
        say: is called with the share that is done, and what comes next.

    Returns:
        Rows [prior, pixels, seconds predicted, seconds measured or None], and the picture.

    Raises:
        ValueError: for an unknown preset or prior, or a size that the model does not take.
    """
    family = preset_family(preset)
    configs = {
        (prior, pixels): family.make_config(preset, image_size=pixels, prior=prior)
        for prior in dict.fromkeys(priors)
        for pixels in sorted(set(sizes))
    }  # all of them are checked before anything is measured
    if not configs:
        raise ValueError("give at least one prior and one size")
    rows: list[list[Any]] = []
    for number, ((prior, pixels), config) in enumerate(configs.items()):
        say(number / len(configs), f"{prior}, {pixels} px")
        cost = predicted_costs(config, 1, torch.device("cpu"), passes=("forward",), budget=BUDGET)["forward"]
        rows.append([prior, pixels, cost.seconds, measured_seconds(config) if measure else None])
    return rows, _draw_times(rows, preset, out / "times.png")


def measured_seconds(config: Any) -> float:
    """Median seconds of a forward pass of one image through the whole model, with random weights."""
    device = torch.device("cpu")
    call = call_of(config, Twin({}, 1), 1, device, torch.float32, trains=False)
    return _median_seconds(call, device)


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    call()  # makes tables
    return float(np.median([seconds_per_call(call, 1, device) for _ in range(MEASURED_ROUNDS)]))


@dataclass(frozen=True)
class ModelTime:
    """The time of one model at one size. seconds: None until it is measured."""

    name: str
    size: tuple[int, int]
    seconds: float | None = None


_MEASURED: dict[str, float] = {}  # by config; the weights do not count
_ONE_AT_A_TIME = threading.Lock()


def model_times(models: Sequence[Opened]) -> Iterator[list[list[ModelTime]]]:
    """Seconds of a forward pass of one image, at the size of each model and at twice its side.

    The first lists, one for each model, have no times yet; every later ones have one more. What was measured is not
    measured again. A model of transformers that is none of our families is timed at its own size.
    """
    configs = [_sizes_of(opened.model.config) for opened in models]
    rows = [
        [ModelTime(opened.name, _pair(config.image_size)) for config in sizes]
        for opened, sizes in zip(models, configs, strict=True)
    ]
    yield [list(each) for each in rows]
    for opened, sizes, each in zip(models, configs, rows, strict=True):
        for number, config in enumerate(sizes):
            with _ONE_AT_A_TIME:
                each[number] = replace(each[number], seconds=_known_seconds(opened, config))
            yield [list(done) for done in rows]


def _sizes_of(config: Any) -> list[Any]:
    """The config, and those of larger images that the model takes."""
    configs = [config]
    if family_of(config) is None:
        return configs
    outputs = ("out_features", "out_indices", "stage_names")  # of a backbone
    fields = {key: value for key, value in config.to_dict().items() if key not in outputs}
    for times in SIDES[1:]:
        with suppress(ValueError):
            size = [side * times for side in _pair(config.image_size)]
            configs.append(type(config).from_dict({**fields, "image_size": size}))
    return configs


def _known_seconds(opened: Opened, config: Any) -> float:
    key = config.to_json_string(use_diff=False)
    if key not in _MEASURED:
        _MEASURED[key] = measured_seconds(config) if family_of(config) is not None else _stock_seconds(opened)
    return _MEASURED[key]


def _stock_seconds(opened: Opened) -> float:
    """Of a model of transformers, with the attention that it has when it is loaded by name."""
    model = load_whole_model(Path(opened.name)).eval()
    size = _pair(model.config.image_size)
    pixels = torch.randn(1, model.config.num_channels, *size)

    def forward() -> object:
        with torch.no_grad():
            return model(pixel_values=pixels).logits

    return _median_seconds(forward, torch.device("cpu"))


def _pair(side: int | Sequence[int]) -> tuple[int, int]:
    return (side, side) if isinstance(side, int) else (side[0], side[1])


def _draw_times(rows: Sequence[Sequence[Any]], preset: str, path: Path) -> Path:
    figure, axis = pictures.pyplot().subplots(figsize=(6.4, 4.2), layout="constrained")
    priors = list(dict.fromkeys(row[0] for row in rows))
    for number, prior in enumerate(priors):
        of_prior = [row[1:] for row in rows if row[0] == prior]
        colour = pictures.COLOURS[number % len(pictures.COLOURS)]
        axis.plot([row[0] for row in of_prior], [row[1] for row in of_prior], color=colour, label=f"{prior}, predicted")
        if measured := [row for row in of_prior if row[2] is not None]:
            sizes, seconds = [row[0] for row in measured], [row[2] for row in measured]
            axis.plot(sizes, seconds, "o", color=colour, label=f"{prior}, measured")
    axis.set(xscale="log", yscale="log", xlabel="image height and width, pixels", ylabel="seconds an image")
    ticks = sorted({row[1] for row in rows})
    axis.set_xticks(ticks, [str(size) for size in ticks])
    axis.xaxis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    axis.set_title(f"{preset}, one image, {torch.get_num_threads()} CPU threads", fontsize=10)
    return pictures.save(figure, path)
