"""`python -m hf_sparseprior app [MODEL [MODEL]]`: what a patch of a photo sees, and times, in a browser. Needs gradio.

The page opens with two models on an example photo. Their pictures are drawn before the server starts; their times are
measured after that, and the table on the page fills row by row.

The functions behind it are in `app_figures`. Each answer is a folder of its own below a temporary one, which is removed
when the app ends. The page asks no other server: fonts are the system's, and gradio's statistics are off.
"""

from __future__ import annotations

import argparse
import inspect
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_sparseprior.analysis import app_figures
from hf_sparseprior.base.families import presets
from hf_sparseprior.base.variables import variables_set
from hf_sparseprior.cli.command import USER_ERRORS, one_line
from hf_sparseprior.cli.image_files import decode_image
from hf_sparseprior.priors.prior import prior_names

MODELS = ("vit_small dense", "vit_small fibottention")  # if none are given
MOST_HEADS, MOST_PIXELS, MOST_SIZES, MOST_UPLOADED = 32, 2048, 8, "20mb"
CSS = "#prior_pictures .thumbnail-item {aspect-ratio: auto} #prior_pictures .grid-wrap {max-height: none}"
VIEW = ["download", "fullscreen"]
GRADIO_FOLDER = "GRADIO_TEMP_DIR"
MOST_LAYERS = MOST_PLACES = 10_000  # the models say what they have
# transformers changes torch.nn.init while it makes a model, and two threads at once can leave it changed.
_OPENING = threading.Lock()


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
    with tempfile.TemporaryDirectory(prefix="hf_sparseprior_app_") as folder, variables_set({GRADIO_FOLDER: folder}):
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
        models: up to two models that the page opens with, as of `app_figures.open_model`; default `MODELS`.

    Raises:
        ValueError, OSError: for a model that cannot be opened.
    """
    gradio = import_gradio()
    first, second = [*(models or MODELS), ""][:2]
    photo = str(app_figures.example_photo())
    # Here, so that a model that cannot be opened is one line now instead of an error on the page.
    drawn = show_attention(_new_folder(folder), photo, first, second, 1, 0, 0)

    def answering(function: Callable) -> Callable:
        @wraps(function)
        def answer(*given: Any) -> Any:
            try:
                return function(_new_folder(folder), *given)
            except USER_ERRORS as error:
                raise gradio.Error(one_line(error), print_exception=False) from None

        @wraps(function)
        def stream(*given: Any) -> Any:
            try:
                yield from function(_new_folder(folder), *given)
            except USER_ERRORS as error:
                raise gradio.Error(one_line(error), print_exception=False) from None

        made = stream if inspect.isgeneratorfunction(function) else answer
        # gradio counts arguments, and finds the one for progress by its default.
        signature = inspect.signature(function)
        shown = list(signature.parameters.values())[1:]
        made.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return made

    with gradio.Blocks(title="hf_sparseprior", analytics_enabled=False) as app:
        gradio.Markdown("# hf_sparseprior\nSparse attention and spatial priors of vision transformers.")
        _photo_page(gradio, app, answering, (first, second), photo, drawn)
        _prior_page(gradio, answering)
        _time_page(gradio, answering)
    return app


def _new_folder(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


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


def _photo_page(
    gradio: Any, app: Any, answering: Callable, models: Sequence[str], photo: str, drawn: Sequence[str]
) -> None:
    with gradio.Tab("Photo", id="photo"), gradio.Row():
        with gradio.Column(scale=3, min_width=320), gradio.Row():
            places, times, pictures = [], [], []
            for name, model in zip(("first", "second"), models, strict=True):
                with gradio.Column(min_width=300, visible=bool(model)) as place:
                    times.append(gradio.Markdown(f"#### `{model}`\nmeasuring ...", elem_id=f"{name}_time"))
                    options = {"label": f"{name} model", "show_label": False, "elem_id": f"{name}_picture"}
                    pictures.append(gradio.Image(type="filepath", buttons=VIEW, **options))
                places.append(place)
        with gradio.Column(scale=1, min_width=280):
            # As a file: gradio's own reading cuts off 16-bit images.
            image = gradio.Image(
                photo, type="filepath", image_mode=None, label="your image: click on it", height=220, elem_id="image"
            )
            boxes = [
                gradio.Textbox(models[0], label="first model: a folder, or PRESET PRIOR for random weights"),
                gradio.Textbox(models[1], label="second model, or nothing"),
            ]
            with gradio.Row():
                layer = gradio.Number(1, precision=0, label="layer", min_width=70)
                row = gradio.Number(0, precision=0, label="row", min_width=70)
                column = gradio.Number(0, precision=0, label="column", min_width=70)
            button = gradio.Button("Look", elem_id="look", variant="primary")
            gradio.Markdown(
                "A click on your image chooses the framed patch, and so do row and column, from 1; 0 and 0 are the "
                "middle. Random weights show a prior, not what attention learns. Times: one image, forward, float32, "
                f"{threads()}, measured on this machine."
            )

        def opening(out: Path) -> list[Any]:
            return _two_pictures(gradio, drawn)

        def look(out: Path, *given: Any) -> list[Any]:
            return _two_pictures(gradio, show_attention(out, *given))

        def click(out: Path, image: str, first: str, second: str, layer: float | None, event: Any) -> list[Any]:
            paths, patch = show_clicked(out, image, first, second, layer, event.index)
            return [*_two_pictures(gradio, paths), *patch]

        click.__annotations__["event"] = gradio.SelectData  # by which gradio knows what to give here

        inputs, outputs = [image, *boxes, layer, row, column], [*pictures, places[1]]
        timed = answering(show_model_times)
        opened = app.load(answering(opening), None, outputs, api_visibility="private")
        opened.success(timed, boxes, times, api_name="model_times")
        for happens, name in ((button.click, "attention"), (image.upload, "attention_of_upload")):
            looked = happens(answering(look), inputs, outputs, api_name=name)
            looked.success(timed, boxes, times, api_visibility="private")
        image.select(answering(click), inputs[:4], [*outputs, row, column], api_visibility="private")


def _two_pictures(gradio: Any, paths: Sequence[str]) -> list[Any]:
    """Both pictures, and whether the place of the second one is shown."""
    first, second = [*paths, None][:2]
    return [first, second, gradio.update(visible=second is not None)]


def show_attention(
    out: Path,
    image: str | None,
    first: str,
    second: str,
    layer: float | None,
    row: float | None,
    column: float | None,
) -> list[str]:
    """The pictures of the attention of one or two models over the image in a file.

    Row and column, from 1, are those of a patch of the first model; 0 and 0 are the middle.
    """
    if image is None:
        raise ValueError("give an image")
    number = whole(layer, "layer", 1, MOST_LAYERS)
    place = whole(row, "row", 0, MOST_PLACES), whole(column, "column", 0, MOST_PLACES)
    if (place[0] == 0) != (place[1] == 0):
        raise ValueError(f"row {place[0]}, column {place[1]}: give both, from 1 on, or 0 and 0 for the middle")
    models = _open_models(first, second)
    pixels = np.asarray(decode_image(image, Path(image).name))
    return _attention_pictures(out, pixels, models, number, place if all(place) else None)


def show_clicked(
    out: Path, image: str, first: str, second: str, layer: float | None, point: Sequence[int]
) -> tuple[list[str], tuple[int, int]]:
    """The same from the patch at a pixel of the image, point = (x, y), and the row and column of this patch."""
    number = whole(layer, "layer", 1, MOST_LAYERS)
    models = _open_models(first, second)
    pixels = np.asarray(decode_image(image, Path(image).name))
    patch = app_figures.patch_at(models[0], pixels.shape[:2], (point[1], point[0]))
    return _attention_pictures(out, pixels, models, number, patch), patch


def _attention_pictures(
    out: Path, pixels: np.ndarray, models: Sequence[app_figures.Opened], layer: int, query: tuple[int, int] | None
) -> list[str]:
    """One picture for each model; a second model with another grid shows its patch at the same place."""
    queries = [query and app_figures.same_place(query, models[0], opened) for opened in models]
    return [
        str(app_figures.attention_picture(pixels, opened, out / f"model{count}.png", layer, place))
        for count, (opened, place) in enumerate(zip(models, queries, strict=True), start=1)
    ]


def _open_models(*names: str) -> list[app_figures.Opened]:
    """One or two models.

    Raises:
        ValueError: for none.
    """
    if not (given := [name for name in names if name.strip()]):
        raise ValueError("give a model")
    with _OPENING:
        return [app_figures.open_model(name) for name in given]


def show_model_times(out: Path, first: str, second: str) -> Iterator[tuple[str, str]]:
    """The times of one or two models as text of the page, again with each time that is measured."""
    opened = _open_models(first, second)
    for rows in app_figures.model_times(opened):
        texts = [times_text(rows[number]) for number in range(len(opened))]
        yield texts[0], "".join(texts[1:])


def times_text(rows: Sequence[app_figures.ModelTime]) -> str:
    """Milliseconds of one model over the sizes of images, as Markdown."""
    parts = [
        f"{row.size[0]} x {row.size[1]} px: "
        + ("measuring ..." if row.seconds is None else f"**{1000 * row.seconds:.0f} ms**")
        for row in rows
    ]
    return f"#### `{rows[0].name}`\n{', '.join(parts)}"


def threads() -> str:
    """How many threads models run with."""
    count = torch.get_num_threads()
    return f"{count} CPU thread{'s' if count > 1 else ''}"


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
    """Table and picture of the times. `say` is called with the share that is done, and what comes next."""
    if bad := [text for text in sizes.split() if not (text.isascii() and text.isdecimal())]:
        raise ValueError(f"sizes: {bad[0]!r} must be a number of pixels")
    pixels = [whole(int(text), "sizes", 1, MOST_PIXELS) for text in sizes.split()]
    if len(pixels) > MOST_SIZES:
        raise ValueError(f"{len(pixels)} sizes are given; at most {MOST_SIZES} are measured at once")
    rows, picture = app_figures.time_table(preset, priors.split(), pixels, out, measure, say)
    rounded = [[*row[:2], *(None if value is None else round(value, 4) for value in row[2:])] for row in rows]
    return rounded, str(picture)
