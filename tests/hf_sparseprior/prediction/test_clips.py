"""Videos in models of clips: each a row, what is found that of the model for the frames that the oracle chooses."""

import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hf_sparseprior as sp
from hf_sparseprior.prediction import predict as module
from hf_sparseprior.prediction import predictors
from hf_sparseprior.saving.saved_processor import load_image_processor
from tests.hf_sparseprior.small import scatter, small
from tests.processes import Started, wait_until

av = pytest.importorskip("av", reason="PyAV is not installed: pip install '.[video]'")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A video model of four frames."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    labels = {"id2label": {0: "up", 1: "down", 2: "away"}, "label2id": {"up": 0, "down": 1, "away": 2}}
    config = small("sparseprior_timesformer", num_frames=4, prior="fibottention+violin", **labels)
    model = scatter(sp.SparsePriorTimesformerForVideoClassification(config))
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Videos of 3, 11 and 20 frames, without loss, and one that is none; {path: frames}."""
    folder, written = tmp_path_factory.mktemp("videos"), {}
    generator = np.random.default_rng(0)
    for count in (3, 11, 20):
        path = folder / f"{count}.mkv"
        frames = generator.integers(0, 256, (count, 16, 16, 3), np.uint8)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("ffv1", rate=10)
            stream.width = stream.height = 16
            stream.pix_fmt = "bgr0"
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
        written[str(path)] = frames
    return folder, written


def expected(saved, frames, numbers):
    """Probabilities of a clip."""
    folder, model = saved
    clip = [Image.fromarray(frames[number]) for number in numbers]
    pixels = load_image_processor(folder)([clip], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        return model(pixel_values=pixels).logits.softmax(-1)[0].sort(descending=True)


# The frames in the middle of four equal parts, and those two apart around the middle.
CHOSEN = {
    None: {3: [0, 1, 1, 2], 11: [1, 4, 6, 9], 20: [2, 7, 12, 17]},
    2: {3: [0, 0, 2, 2], 11: [2, 4, 6, 8], 20: [7, 9, 11, 13]},
}


@pytest.mark.parametrize("every", [None, 2])
def test_each_video_is_a_row(every, saved, videos, tmp_path):
    (tmp_path / "folder").mkdir()
    folder, written = videos
    broken = folder / "broken.mp4"
    broken.write_bytes(b"no video")
    sheet = tmp_path / "sheet.png" if every is None else None
    lines = sp.predict(saved[0], folder, tmp_path / "out.csv", every=every, batch=2, sheet=sheet)
    broken.unlink()
    assert any(line.startswith("not readable: 1") and "broken.mp4" in line for line in lines)
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["path"] for row in rows] == sorted(written)
    for row in rows:
        frames = written[row["path"]]
        numbers = CHOSEN[every][len(frames)]
        shares, labels = expected(saved, frames, numbers)
        assert row["label"] == saved[1].config.id2label[int(labels[0])]
        assert float(row["probability"]) == pytest.approx(float(shares[0]), abs=1e-5)
    assert sheet is None or np.asarray(Image.open(sheet)).std() > 20


def test_pooled_features_of_clips(saved, videos, tmp_path):
    folder, written = videos
    sp.predict(saved[0], folder, tmp_path / "out.npz", features="pooled")
    features = np.load(tmp_path / "out.npz")["features"]
    assert features.shape == (len(written), saved[1].config.hidden_size) and np.ptp(features, 0).max() > 1e-4


def test_what_is_no_video_is_refused(saved, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    with pytest.raises(ValueError, match=r"photo\.png must be a video .* for a model of clips"):
        sp.predict(saved[0], tmp_path / "photo.png", tmp_path / "out.csv")
    with pytest.raises(ValueError, match="no video there; left out: 1 no video"):
        sp.predict(saved[0], tmp_path, tmp_path / "out.csv")
    with pytest.raises(ValueError, match="features='patches' is for images"):
        predictors.load_predictor(saved[0], features="patches")


def test_a_clip_that_breaks_off_is_left_out(saved, videos, tmp_path):
    """Training refuses it, too."""
    folder, written = videos
    whole = (folder / "20.mkv").read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    lines = sp.predict(saved[0], [str(tmp_path / "cut.mkv"), *written], tmp_path / "out.csv")
    assert any(line.startswith("not readable: 1") and "cut.mkv breaks off" in line for line in lines)
    assert len(list(csv.DictReader((tmp_path / "out.csv").open()))) == len(written)


def slow_predict(model, videos, out):
    """A process's command, which takes its time for each clip."""
    found = module._found
    module._found = lambda *given: time.sleep(0.2) or found(*given)
    sp.predict(model, videos, out, batch=1)


@pytest.mark.slow
def test_a_killed_command_goes_on(saved, videos, tmp_path):
    folder, written = videos
    for number in range(4):
        for path in written:
            (tmp_path / "videos").mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / "videos" / f"{number}_{Path(path).name}")
    out, given = tmp_path / "out.jsonl", (str(saved[0]), str(tmp_path / "videos"))
    started = Started(slow_predict, *given, str(out), folder=tmp_path, log=tmp_path / "log")
    log = tmp_path / "out.jsonl.partial" / module.LOG
    wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 4, started)
    os.kill(started.pid, signal.SIGKILL)
    started.wait(60)
    assert not out.exists()
    looked = log.read_bytes().count(b"\n") - 1
    with pytest.raises(ValueError, match=r"out\.jsonl\.partial is of another every; remove it"):
        sp.predict(*given, out, every=2)
    lines = sp.predict(*given, out)
    assert lines[0].startswith(f"looked at 12 videos, {looked} of them before")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["path"] for row in rows] == sorted(str(path) for path in (tmp_path / "videos").iterdir())
    for row in rows:
        frames = written[str(folder / row["path"].rpartition("_")[2])]
        shares, _ = expected(saved, frames, CHOSEN[None][len(frames)])
        np.testing.assert_allclose(row["probabilities"], shares, atol=1e-5)
