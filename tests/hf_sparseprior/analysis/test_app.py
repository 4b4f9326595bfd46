"""The app: its command, what its pages make of what is typed, and all of it in a browser."""

import json
import os
import socket
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from hf_sparseprior.__main__ import main
from hf_sparseprior.analysis import app
from hf_sparseprior.base.families import FAMILIES
from tests import app_browser
from tests.hf_sparseprior.small import small


def test_without_gradio_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["app"]) == 2
    assert "the app needs gradio: pip install 'hf_sparseprior[app]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["somebody/model"], "hf download somebody/model"),
        (["vit_tiny", "vit_tiny", "vit_tiny"], "3 models are given; at most 2"),
        (["vit_tiny nonsense"], "nonsense"),
    ],
)
def test_bad_models_are_one_line(words, message, capsys):
    pytest.importorskip("gradio")
    assert main(["app", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_a_bad_port_is_named(port, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["app", "--port", port])
    assert f"{port!r} must be from 1 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("before", [None, "elsewhere"])
def test_a_port_that_is_taken_is_one_line_and_leaves_gradio_as_it_was(before, capsys, monkeypatch):
    pytest.importorskip("gradio")
    monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("GRADIO_TEMP_DIR", before)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["app", "--port", str(port)]) == 2
    assert str(port) in capsys.readouterr().err and os.environ.get("GRADIO_TEMP_DIR") == before


@pytest.mark.parametrize("value", [None, 0, 33, 1.5, -2])
def test_numbers_have_bounds(value):
    with pytest.raises(ValueError, match=rf"heads: {value} must be a whole number from 1 to 32"):
        app.whole(value, "heads", 1, 32)
    assert app.whole(6.0, "heads", 1, 32) == 6


def test_pages_turn_what_is_typed_into_values(tmp_path, monkeypatch):
    asked = {}
    answer = ([["dense", 32, 0.12345, None]], tmp_path / "a.png")
    monkeypatch.setattr(app.app_figures, "time_table", lambda *given: asked.update(times=given[:5]) or answer)
    rows, picture = app.show_times(tmp_path, "vit_tiny", "dense violin", "32 64", False)
    assert asked["times"] == ("vit_tiny", ["dense", "violin"], [32, 64], tmp_path, False)
    assert rows == [["dense", 32, 0.1235, None]] and picture == str(tmp_path / "a.png")
    for sizes, message in (
        ("32 x", "'x' must be a number of pixels"),
        ("4096", "sizes: 4096 must be a whole number from 1 to 2048"),
        ("32 " * 9, "9 sizes are given; at most 8"),
    ):
        with pytest.raises(ValueError, match=message):
            app.show_times(tmp_path, "vit_tiny", "dense", sizes, False)
    image = str(tmp_path / "image.png")
    for given, message in (
        ((None, "a", "b", 1, 0, 0), "give an image"),
        ((image, " ", "", 1, 0, 0), "give a model"),
        ((image, "a", "b", 1, 3, 0), "row 3, column 0: give both"),
        ((image, "a", "b", None, 0, 0), "layer: None must be"),
    ):
        with pytest.raises(ValueError, match=message):
            app.show_attention(tmp_path, *given)


def test_the_page_opens_with_two_pictures_of_a_photo(tmp_path):
    """Drawn while the server starts, without a click; the times come after that."""
    gradio = pytest.importorskip("gradio")
    page = app.build(tmp_path)
    assert isinstance(page, gradio.Blocks)
    loads = [each for each in page.fns.values() if any(event == "load" for _, event in each.targets)]
    [first, second, place] = loads[0].fn()
    shapes = [np.asarray(Image.open(path)).shape for path in (first, second)]
    assert min(min(shape[:2]) for shape in shapes) > 300 and place["visible"]
    assert not np.array_equal(np.asarray(Image.open(first)), np.asarray(Image.open(second)))


def test_a_click_on_the_image_fills_row_and_column_and_draws_that_patch(tmp_path, monkeypatch):
    gradio = pytest.importorskip("gradio")
    page = app.build(tmp_path, ["vit_tiny fibottention"])
    [clicked] = [each for each in page.fns.values() if any(event == "select" for _, event in each.targets)]
    assert [each.label for each in clicked.outputs[-2:]] == ["row", "column"]
    Image.new("RGB", (280, 140)).save(tmp_path / "wide.png")
    asked, draw = [], app.app_figures.attention_picture
    monkeypatch.setattr(app.app_figures, "attention_picture", lambda *given: asked.append(given[3:]) or draw(*given))
    # gradio knows by its type which argument is the click: index is (x, y) in pixels of the image.
    given = [str(tmp_path / "wide.png"), "vit_tiny fibottention", "", 2]
    click = gradio.EventData(None, {"index": [279 - 25, 25], "value": None})
    arguments, *_ = gradio.helpers.special_args(clicked.fn, inputs=given, event_data=click)
    picture, second, place, row, column = clicked.fn(*arguments)
    assert (row, column) == (3, 13) and asked == [(2, (3, 13))]
    assert Image.open(picture).width > 300 and second is None and not place["visible"]


def test_times_fill_in_as_they_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(app.app_figures, "_MEASURED", {})
    monkeypatch.setattr(app.app_figures, "measured_seconds", lambda config: 0.25 * config.prior_name.count("e"))
    texts = list(app.show_model_times(tmp_path, "vit_tiny dense", ""))
    own, twice = "224 x 224 px: ", "448 x 448 px: "
    assert texts == [
        (f"#### `vit_tiny dense`\n{own}measuring ..., {twice}measuring ...", ""),
        (f"#### `vit_tiny dense`\n{own}**500 ms**, {twice}measuring ...", ""),
        (f"#### `vit_tiny dense`\n{own}**500 ms**, {twice}**500 ms**", ""),
    ]
    both = list(app.show_model_times(tmp_path, "vit_tiny dense", "vit_tiny violin"))[-1]
    assert [text.splitlines()[0] for text in both] == ["#### `vit_tiny dense`", "#### `vit_tiny violin`"]


@pytest.mark.slow
def test_every_page_in_a_browser(tmp_path):
    """Buttons are pressed and pictures looked at; an error is one line; no other server is asked."""
    pytest.importorskip("gradio")
    pytest.importorskip("selenium")
    if (reason := app_browser.why_not()) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    for name in ("fibottention", "violin"):
        model = FAMILIES["sparseprior_vit"].image_classifier(small("sparseprior_vit", prior=name))
        model.save_pretrained(tmp_path / name)
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(tmp_path / "noise.png")
    models = [str(tmp_path / name) for name in ("fibottention", "violin")]
    with app_browser.served(*models) as address, app_browser.Page(address) as page:
        opening = [page.pictures(f"#{name}_picture")[0] for name in ("first", "second")]
        assert all(page.pixels(one).std() > 5 for one in opening)
        for name, model in zip(("first", "second"), models, strict=True):
            text = page.wait(
                lambda name=name: (found := page.all(f"#{name}_time")[0].text).endswith("ms") and found, name
            )
            assert model in text and text.count("px") == 2
        page.wait(lambda: page.all("#image input[type=file]"), "upload")[0].send_keys(str(tmp_path / "noise.png"))
        uploaded = page.pictures("#first_picture", tuple(opening))
        assert page.pixels(uploaded[0]).std() > 5
        page.click("#image img")  # in its middle
        clicked = page.pictures("#first_picture", (*opening, *uploaded))
        assert page.pixels(clicked[0]).std() > 5
        assert page.field("row").get_attribute("value") == page.field("column").get_attribute("value") != "0"
        page.type("second model", "")
        page.click("#look")
        page.wait(lambda: not any(one.is_displayed() for one in page.all("#second_picture")), "one picture alone")
        page.type("layer", "99")
        page.click("#look")
        assert "layer 99 must be from 1 to" in page.error()

        page.tab("Prior")
        page.type("patch grid", "6x6")
        page.click("#show_prior")
        first = page.pictures("#prior_pictures")
        text = page.wait(lambda: page.all("#prior_text .cm-content")[0].text, "numbers")
        assert "fibottention on a 6x6 grid, 6 heads" in text
        shown = page.wait(lambda: len(found := page.pictures("#prior_pictures")) >= 4 and found, "four pictures")
        assert all(page.pixels(one).std() > 5 and min(page.pixels(one).shape[:2]) > 100 for one in shown)
        page.type("patch grid", "6")
        page.click("#show_prior")
        page.wait(lambda: "grid '6' must be HEIGHTxWIDTH" in page.error(), "the error")
        assert set(first) <= set(page.pictures("#prior_pictures"))  # what was there stays

        page.tab("Time")
        page.type("pixels a side", "32 48")
        page.click("#predict")
        picture = page.pictures("#time_picture")
        assert page.pixels(picture[0]).std() > 5
        table = page.wait(lambda: page.all("#time_table")[0].text, "table")
        assert "fibottention" in table and "48" in table
        asked = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
        addresses = {
            entry["params"]["request"]["url"] for entry in asked if entry["method"] == "Network.requestWillBeSent"
        }
        outside = {one for one in addresses if not one.startswith((address, "data:", "blob:", "chrome"))}
        assert not outside, outside
