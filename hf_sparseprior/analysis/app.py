"""`python -m hf_sparseprior app [MODEL]`: priors, attention and costs in a browser. Needs gradio.

The functions behind it are in `app_figures`. Each answer is a folder of its own below a temporary one, which is removed
when the app ends.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from hf_sparseprior.analysis import app_figures
from hf_sparseprior.command import USER_ERRORS, one_line
from hf_sparseprior.families import presets
from hf_sparseprior.names import prior_names

FIRST, SECOND = "vit_tiny fibottention", "vit_tiny violin"


def import_gradio() -> Any:
    """The gradio package.

    Raises:
        ImportError: without it; the message has the line that installs it.
    """
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the app needs gradio: pip install 'hf_sparseprior[app]'") from error
    return gradio


def run(arguments: argparse.Namespace) -> None:
    """Serve the app until Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="hf_sparseprior_app_") as folder:
        app = build(Path(folder), arguments.model)
        app.launch(
            server_name=arguments.host, server_port=arguments.port, share=False, allowed_paths=[folder], show_error=True
        )


def build(folder: Path, model: str | None = None) -> Any:
    """The app. `folder` is where pictures are written; `model` the first model of the page on attention."""
    gradio = import_gradio()
    if model is not None:
        app_figures.open_model(model)  # one line now instead of an error on the page

    def answering(function: Callable) -> Callable:
        @wraps(function)
        def answer(*given: Any) -> Any:
            try:
                return function(Path(tempfile.mkdtemp(dir=folder)), *given)
            except USER_ERRORS as error:
                raise gradio.Error(one_line(error)) from None

        return answer

    with gradio.Blocks(title="hf_sparseprior", analytics_enabled=False) as app:
        gradio.Markdown("# hf_sparseprior\nSparse attention and spatial priors of vision transformers.")
        _prior_page(gradio, answering)
        _attention_page(gradio, answering, model or FIRST)
        _cost_page(gradio, answering)
    return app


def _prior_page(gradio: Any, answering: Callable) -> None:
    with gradio.Tab("Prior"):
        with gradio.Row():
            prior = gradio.Dropdown(
                prior_names(), value="fibottention+violin", allow_custom_value=True, label="prior, names joined by +"
            )
            grid = gradio.Textbox("14x14", label="patch grid")
            heads = gradio.Number(6, precision=0, label="heads")
            layer = gradio.Number(1, precision=0, label="layer, from 1")
            settings = gradio.Textbox("", label="settings, KEY=VALUE KEY=VALUE")
        button = gradio.Button("Show")
        shown = gradio.Gallery(label="supports of each head, curves, decay masks", columns=2)
        text = gradio.Code(label="numbers")
        inputs = [prior, grid, heads, layer, settings]
        button.click(answering(show_prior), inputs, [text, shown], api_name="prior")


def show_prior(out: Path, prior: str, grid: str, heads: float, layer: float, settings: str) -> tuple[str, list[str]]:
    """Text and pictures of a prior."""
    text, written = app_figures.prior_pictures(prior, out, int(heads), grid, int(layer), settings)
    return text, [str(path) for path in written]


def _attention_page(gradio: Any, answering: Callable, model: str) -> None:
    label = "folder of a saved model, or PRESET PRIOR for random weights"
    with gradio.Tab("Attention"):
        with gradio.Row():
            image = gradio.Image(type="numpy", label="image", height=220)
            with gradio.Column():
                first = gradio.Textbox(model, label=f"first model: {label}")
                second = gradio.Textbox(SECOND, label="second model, or nothing")
                with gradio.Row():
                    layer = gradio.Number(1, precision=0, label="layer, from 1")
                    row = gradio.Number(0, precision=0, label="row of the patch, from 1; 0: the middle")
                    column = gradio.Number(0, precision=0, label="column")
        button = gradio.Button("Look")
        shown = gradio.Image(label="attention", type="filepath")
        inputs = [image, first, second, layer, row, column]
        button.click(answering(show_attention), inputs, shown, api_name="attention")


def show_attention(
    out: Path, image: np.ndarray | None, first: str, second: str, layer: float, row: float, column: float
) -> str:
    """The picture of the attention of one or two models."""
    if image is None:
        raise ValueError("give an image")
    models = [app_figures.open_model(name) for name in (first, second) if name.strip()]
    query = (int(row), int(column)) if row or column else None
    return str(app_figures.attention_picture(image, models, out, int(layer), query))


def _cost_page(gradio: Any, answering: Callable) -> None:
    with gradio.Tab("Time"):
        with gradio.Row():
            preset = gradio.Dropdown(list(presets()), value="vit_tiny", label="model")
            priors = gradio.Textbox("dense fibottention", label="priors, with spaces between them")
            sizes = gradio.Textbox("224 384 512", label="pixels a side")
            measure = gradio.Checkbox(False, label="also measure whole models")
        button = gradio.Button("Predict")
        shown = gradio.Image(label="seconds an image", type="filepath")
        table = gradio.Dataframe(headers=["prior", "pixels", "predicted, s", "measured, s"], label="on this machine")
        button.click(answering(show_costs), [preset, priors, sizes, measure], [table, shown], api_name="time")


def show_costs(out: Path, preset: str, priors: str, sizes: str, measure: bool) -> tuple[list[list[Any]], str]:
    """Table and picture of the times."""
    if bad := [text for text in sizes.split() if not text.isdecimal()]:
        raise ValueError(f"sizes: {bad[0]!r} must be a number of pixels")
    pixels = [int(text) for text in sizes.split()]
    rows, picture = app_figures.cost_table(preset, priors.split(), pixels, out, measure)
    return [[*row[:2], *(None if value is None else round(value, 4) for value in row[2:])] for row in rows], str(
        picture
    )
