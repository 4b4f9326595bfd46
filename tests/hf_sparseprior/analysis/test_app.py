"""The app itself, in a process of its own."""

import re
import socket
import subprocess
import sys
import time

import pytest
from PIL import Image

from hf_sparseprior.__main__ import main
from hf_sparseprior.analysis import app
from tests.processes import ROOT


def test_without_gradio_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["app"]) == 2
    assert capsys.readouterr().err.strip().endswith("the app needs gradio: pip install 'hf_sparseprior[app]'")


def test_a_model_that_is_not_there_is_one_line(capsys):
    pytest.importorskip("gradio")
    assert main(["app", "somebody/model"]) == 2
    assert "hf download somebody/model" in capsys.readouterr().err


@pytest.mark.slow
def test_the_app_answers(tmp_path):
    gradio_client = pytest.importorskip("gradio_client")
    pytest.importorskip("gradio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_sparseprior", "app", "--port", str(port)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        while not re.search("Running on local URL", (tmp_path / "log").read_text()):
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.3)
        client = gradio_client.Client(f"http://127.0.0.1:{port}", verbose=False, download_files=str(tmp_path / "files"))
        text, shown = client.predict("fibottention", "4x4", 2, 1, "w_min=2", api_name="/prior")
        assert "fibottention on a 4x4 grid, 2 heads" in text and len(shown) == 2
        with Image.open(shown[0]["image"]) as picture:
            assert min(picture.size) > 100
        with pytest.raises(Exception, match="nonsense"):
            client.predict("nonsense", "4x4", 2, 1, "", api_name="/prior")
        Image.new("RGB", (40, 30), "grey").save(tmp_path / "grey.png")
        picture = client.predict(
            gradio_client.handle_file(str(tmp_path / "grey.png")),
            *("vit_tiny fibottention", "", 1, 0, 0), api_name="/attention",
        )  # fmt: skip
        assert Image.open(picture).size[0] > 300
    finally:
        process.terminate()
        process.wait(30)


def test_pages_turn_what_is_typed_into_values(tmp_path, monkeypatch):
    asked = {}
    answer = ([["dense", 32, 0.12345, None]], tmp_path / "a.png")
    monkeypatch.setattr(app.app_figures, "cost_table", lambda *given: asked.update(costs=given) or answer)
    rows, picture = app.show_costs(tmp_path, "vit_tiny", "dense violin", "32 64", False)
    assert asked["costs"] == ("vit_tiny", ["dense", "violin"], [32, 64], tmp_path, False)
    assert rows == [["dense", 32, 0.1235, None]] and picture == str(tmp_path / "a.png")
    with pytest.raises(ValueError, match="'x' must be a number of pixels"):
        app.show_costs(tmp_path, "vit_tiny", "dense", "32 x", False)
    with pytest.raises(ValueError, match="give an image"):
        app.show_attention(tmp_path, None, "a", "b", 1, 0, 0)
