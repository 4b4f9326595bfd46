"""`python -m hf_sparseprior app [MODEL [MODEL]]`: priors, attention and times in a browser. Needs gradio.

The functions behind it are in `app_figures`. Each answer is a folder of its own below a temporary one, which is removed
when the app ends. The page asks no other server: fonts are the system's, and gradio's statistics are off.
"""

from __future__ import annotations

import argparse
import inspect
import os
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis import app_figures
from hf_sparseprior.base.families import presets
from hf_sparseprior.cli.command import USER_ERRORS, one_line
from hf_sparseprior.cli.image_files import decode_image
from hf_sparseprior.priors.prior import prior_names

MODELS = ("vit_tiny fibottention", "vit_tiny violin")  # if none are given
MOST_HEADS, MOST_PIXELS, MOST_SIZES, MOST_UPLOADED = 32, 2048, 8, "20mb"
CSS = "#prior_pictures .thumbnail-item {aspect-ratio: auto} #prior_pictures .grid-wrap {max-height: none}"
VIEW = ["download", "fullscreen"]
MOST_LAYERS = MOST_PLACES = 10_000  # the models say what they have


def import_gradio() -> Any:
    """The gradio package.

    Raises:
        ImportError: without it; the message has the line that installs it.
    """
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the app needs gradio: pip install 'hf_sparseprior[app]'") from error
    return gradio


def run(arguments: argparse.Namespace) -> None:
    """Serve the app until Ctrl-C."""
    if len(arguments.models) > len(MODELS):
        raise ValueError(f"{len(arguments.models)} models are given; at most {len(MODELS)} are shown side by side")
    with tempfile.TemporaryDirectory(prefix="hf_sparseprior_app_") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # where gradio copies what it serves, and keeps uploads
        app, gradio = build(Path(folder), arguments.models), import_gradio()
        theme = gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
        app.launch(
            server_name=arguments.host,
            server_port=arguments.port,
            share=False,
            show_error=True,
            theme=theme,
            css=CSS,
            allowed_paths=[folder],
            max_file_size=MOST_UPLOADED,
            footer_links=[],
            ssr_mode=False,
        )


def build(folder: Path, models: list[str] | None = None) -> Any:
    """The app.

    Args:
        folder: where pictures are written.
        models: up to two models of the page on attention, as of `app_figures.open_model`; default `MODELS`.

    Raises:
        ValueError, OSError: for a model that cannot be opened.
    """
    gradio = import_gradio()
    for model in models or []:
        app_figures.open_model(model)  # one line now instead of an error on the page
    first, second = [*(models or MODELS), ""][:2]

    def answering(function: Callable) -> Callable:
        @wraps(function)
        def answer(*given: Any) -> Any:
            try:
                return function(Path(tempfile.mkdtemp(dir=folder)), *given)
            except USER_ERRORS as error:
                raise gradio.Error(one_line(error), print_exception=False) from None

        # gradio counts arguments, and finds the one for progress by its default.
        signature = inspect.signature(function)
        shown = list(signature.parameters.values())[1:]
        answer.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return answer

    with gradio.Blocks(title="hf_sparseprior", analytics_enabled=False) as app:
        gradio.Markdown("# hf_sparseprior\nSparse attention and spatial priors of vision transformers.")
        _prior_page(gradio, answering)
        _attention_page(gradio, answering, first, second)
        _time_page(gradio, answering)
    return app


def whole(value: float | None, name: str, low: int, high: int) -> int:
    """A number that was typed.

    Raises:
        ValueError: for none, and one that is not within the bounds.
    """
    if value is None or value != int(value) or not low <= value <= high:
        raise ValueError(f"{name}: {value} must be a whole number from {low} to {high}")
    return int(value)


def _prior_page(gradio: Any, answering: Callable) -> None:
    with gradio.Tab("Prior", id="prior"):
        with gradio.Row():
            names = sorted(prior_names())
            prior = gradio.Dropdown(
                names, value="fibottention+violin", allow_custom_value=True, label="prior, names joined by +"
            )
            grid = gradio.Textbox("14x14", label="patch grid")
            heads = gradio.Number(6, precision=0, label="heads")
            layer = gradio.Number(1, precision=0, label="layer, from 1")
            settings = gradio.Textbox("", label="settings, KEY=VALUE KEY=VALUE")
        button = gradio.Button("Show", elem_id="show_prior")
        shown = gradio.Gallery(
            label="supports of each head, what the middle patch sees, curves, decay masks",
            columns=1,
            height="auto",
            object_fit="contain",
            elem_id="prior_pictures",
        )
        text = gradio.Code(label="numbers", elem_id="prior_text")
        inputs = [prior, grid, heads, layer, settings]
        button.click(answering(show_prior), inputs, [text, shown], api_name="prior")


def show_prior(
    out: Path, prior: str, grid: str, heads: float | None, layer: float | None, settings: str
) -> tuple[str, list[str]]:
    """Text and pictures of a prior."""
    numbers = whole(heads, "heads", 1, MOST_HEADS), whole(layer, "layer", 1, MOST_LAYERS)
    text, written = app_figures.prior_pictures((prior or "").strip(), out, numbers[0], grid, numbers[1], settings)
    return text, [str(path) for path in written]


def _attention_page(gradio: Any, answering: Callable, first: str, second: str) -> None:
    label = "folder of a saved model, or PRESET PRIOR for random weights"
    with gradio.Tab("Attention", id="attention"):
        gradio.Markdown(
            "What each head can see from a patch of your image, and what it looks at. A model of random weights shows "
            "its prior, not what attention learns."
        )
        with gradio.Row():
            # As a file: gradio's own reading cuts off 16-bit images.
            image = gradio.Image(type="filepath", image_mode=None, label="image", height=220, elem_id="image")
            with gradio.Column():
                first_box = gradio.Textbox(first, label=f"first model: {label}")
                second_box = gradio.Textbox(second, label="second model, or nothing")
                with gradio.Row():
                    layer = gradio.Number(1, precision=0, label="layer, from 1", min_width=120)
                    row = gradio.Number(0, precision=0, label="row of the patch, 0: middle", min_width=120)
                    column = gradio.Number(0, precision=0, label="column of the patch", min_width=120)
        button = gradio.Button("Look", elem_id="look")
        shown = gradio.Image(label="attention", type="filepath", buttons=VIEW, elem_id="attention_picture")
        inputs = [image, first_box, second_box, layer, row, column]
        button.click(answering(show_attention), inputs, shown, api_name="attention")


def show_attention(
    out: Path,
    image: str | None,
    first: str,
    second: str,
    layer: float | None,
    row: float | None,
    column: float | None,
) -> str:
    """The picture of the attention of one or two models over the image in a file."""
    if image is None:
        raise ValueError("give an image")
    number = whole(layer, "layer", 1, MOST_LAYERS)
    place = whole(row, "row", 0, MOST_PLACES), whole(column, "column", 0, MOST_PLACES)
    if (place[0] == 0) != (place[1] == 0):
        raise ValueError(f"row {place[0]}, column {place[1]}: give both, from 1 on, or 0 and 0 for the middle")
    if not (given := [name for name in (first, second) if name.strip()]):
        raise ValueError("give a model")
    models = [app_figures.open_model(name) for name in given]
    pixels = np.asarray(decode_image(image, Path(image).name))
    return str(app_figures.attention_picture(pixels, models, out, number, place if all(place) else None))


def _time_page(gradio: Any, answering: Callable) -> None:
    with gradio.Tab("Time", id="time"):
        gradio.Markdown(
            "Seconds of a forward pass of one image on this machine: predicted from less deep models of the same "
            "layers, and measured. A size takes some seconds, large ones longer."
        )
        with gradio.Row():
            preset = gradio.Dropdown(list(presets()), value="vit_tiny", label="model")
            priors = gradio.Textbox("dense fibottention", label="priors, with spaces between them")
            sizes = gradio.Textbox("224 384 512", label="pixels a side")
            measure = gradio.Checkbox(False, label="also measure whole models")
        button = gradio.Button("Predict", elem_id="predict")
        shown = gradio.Image(label="seconds an image", type="filepath", buttons=VIEW, elem_id="time_picture")
        table = gradio.Dataframe(
            headers=["prior", "pixels", "predicted, s", "measured, s"], label="on this machine", elem_id="time_table"
        )

        bar = gradio.Progress()

        def timed(out: Path, preset: str, priors: str, sizes: str, measure: bool, progress: Any = bar) -> Any:
            return show_times(out, preset, priors, sizes, measure, lambda share, line: progress(share, desc=line))

        button.click(answering(timed), [preset, priors, sizes, measure], [table, shown], api_name="time")


def show_times(
    out: Path,
    preset: str,
    priors: str,
    sizes: str,
    measure: bool,
    say: Callable[[float, str], None] = lambda share, line: None,
) -> tuple[list[list[Any]], str]:
    """Table and picture of the times. `say` is told the share that is done, and what comes next."""
    if bad := [text for text in sizes.split() if not (text.isascii() and text.isdecimal())]:
        raise ValueError(f"sizes: {bad[0]!r} must be a number of pixels")
    pixels = [whole(int(text), "sizes", 1, MOST_PIXELS) for text in sizes.split()]
    if len(pixels) > MOST_SIZES:
        raise ValueError(f"{len(pixels)} sizes are given; at most {MOST_SIZES} are measured at once")
    rows, picture = app_figures.time_table(preset, priors.split(), pixels, out, measure, say)
    rounded = [[*row[:2], *(None if value is None else round(value, 4) for value in row[2:])] for row in rows]
    return rounded, str(picture)
