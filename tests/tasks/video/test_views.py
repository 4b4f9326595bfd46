"""Many views of a video in a test: the clips and crops that they should be, scores averaged, other frames and sizes."""

import json

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")
pytest.importorskip("matplotlib", reason="needs the extra classification")

from transformers import AutoModelForVideoClassification

from hf_sparseprior.cli.video_files import read_frames, write_video
from tasks.video import data, evaluate, train
from tasks.video.config import DataConfig
from tasks.video.data import Videos, make_dataset, make_test_dataset
from tasks.video.task import build_model
from tests.each import each
from tests.tasks.video.clips import write_videos

MODEL = {
    "image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 1, "num_frames": 3, "pooling": "mean",
    "num_attention_heads": 4, "intermediate_size": 24, "initializer_range": 0.4, "prior": "fibottention",
    "time_initializer_range": 0.4,
}  # fmt: skip
CLASSES = [f"class{number}" for number in range(7)]


def ramp(frames, height, width, offset=0):
    """Pixels that say where and when they are: red the column, green the row, blue the frame."""
    red, green, blue = np.meshgrid(np.arange(width), np.arange(height), np.arange(frames), indexing="ij")
    return np.stack([red, green, blue + offset], -1).transpose(2, 1, 0, 3).astype(np.uint8)


def config_of(path, **fields):
    return DataConfig(source="folder", path=str(path), **fields)


def model_of(**fields):
    torch.manual_seed(0)
    return build_model({**MODEL, **fields}, CLASSES).eval()


def where(model, pixels):
    """(columns, rows, frames) that a prepared clip of `ramp` shows."""
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (model.config.image_mean, model.config.image_std))
    red, green, blue = (((pixels * std) + mean) * 255).round().int().unbind(1)
    return red[0, 0].tolist(), green[0, :, 0].tolist(), blue[:, 0, 0].tolist()


@pytest.mark.parametrize("height, width", [(20, 36), (36, 20)])
def test_views_are_three_windows_of_each_of_some_clips(height, width, tmp_path):
    """SlowFast's `uniform_crop`: both ends and the centre of the longer side, the centre of the shorter one."""
    write_video(tmp_path / "clip.mkv", ramp(31, height, width))
    model, videos = model_of(), Videos([tmp_path / "clip.mkv"], np.array([4]))
    config = config_of(tmp_path, stride=5, test_clips=4, test_crops=3)
    views = make_test_dataset(videos, config, model.config)
    assert len(views) == 12
    expected = []
    for start in (2.5, 7.5, 12.5, 17.5):  # a clip spans 11 frames and starts in 0..20, of which these are middles
        for place in (0, 10, 20):
            long, short = list(range(place, place + 16)), list(range(2, 18))
            times = [int(start + 0.5) + 5 * step for step in range(3)]
            expected.append((long, short, times) if width > height else (short, long, times))
    assert [where(model, views[number]["pixel_values"]) for number in range(12)] == expected
    assert {views[number]["labels"] for number in range(12)} == {4}
    # One view is the clip in the middle, as in validation.
    alone = make_test_dataset(videos, config_of(tmp_path, stride=5), model.config)
    assert alone[0]["pixel_values"].equal(make_dataset(videos, config, model.config)[0]["pixel_values"])
    assert where(model, alone[0]["pixel_values"])[2] == [10, 15, 20]


def test_crops_of_a_clip_are_decoded_once(tmp_path, monkeypatch):
    write_video(tmp_path / "a.mkv", ramp(9, 20, 24))
    write_video(tmp_path / "b.mkv", ramp(9, 20, 24))
    videos = Videos([tmp_path / "a.mkv", tmp_path / "b.mkv"], np.array([0, 1]))
    reads = []
    monkeypatch.setattr(data, "read_frames", lambda path, *rest: reads.append(path.name) or read_frames(path, *rest))
    views = make_test_dataset(videos, config_of(tmp_path, test_clips=2, test_crops=3), model_of().config)
    assert len([views[number] for number in range(len(views))]) == 12
    assert reads == ["a.mkv", "a.mkv", "b.mkv", "b.mkv"]


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    """Three videos of each of seven classes, and a model that was saved and never trained."""
    folder = tmp_path_factory.mktemp("seven")
    random = np.random.default_rng(0)
    for split in ("train", "validation", "test"):
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
            for number in range(3):
                pixels = random.integers(0, 256, (12, 20, 28, 3), dtype=np.uint8)
                write_video(folder / split / name / f"{number}.mkv", pixels)
    model_of().save_pretrained(folder / "model")
    content = {"data": {"source": "folder", "path": str(folder), "stride": 2}, "model": MODEL, "trainer": {"seed": 0}}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder


@torch.no_grad()
def scores_by_hand(folder, starts, places, frames, size, stride):
    """Mean probabilities (videos, classes) in float64 of every video of test, decoded whole."""
    model = AutoModelForVideoClassification.from_pretrained(folder / "model").double()
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (model.config.image_mean, model.config.image_std))
    scores, labels = [], []
    for path in sorted((folder / "test").glob("*/*")):
        video = torch.from_numpy(read_frames(path)).permute(0, 3, 1, 2).double() / 255
        views = []
        for start in starts:
            for place in places:
                top = (20 - size) // 2
                clip = video[start : start + stride * frames : stride, :, top : top + size, place : place + size]
                views.append(model(((clip - mean) / std)[None]).logits.softmax(-1)[0])
        scores.append(torch.stack(views).mean(0))
        labels.append(CLASSES.index(path.parent.name))
    return torch.stack(scores), torch.tensor(labels)


@pytest.mark.parametrize(
    "overrides, starts, places, frames, size",
    [
        ([], [4], [6], 3, 16),  # a clip of 5 frames starts in 0..7: 3.5 is rounded up
        (["data.test_clips=2", "data.test_crops=3"], [2, 5], [0, 6, 12], 3, 16),
        (["data.test_frames=5", "data.test_crops=3"], [2], [0, 6, 12], 5, 16),
        (["data.test_size=20", "data.test_clips=2"], [2, 5], [4], 3, 20),
        (["data.test_size=[12, 12]", "data.test_frames=2"], [5], [8], 2, 12),
    ],
)
def test_evaluate_gives_the_accuracy_of_averaged_probabilities(
    overrides, starts, places, frames, size, seven, tmp_path
):
    command = [str(seven / "model"), "--config", str(seven / "config.yaml"), "--out", str(tmp_path)]
    assert evaluate.main([*command, "--batch-size", "4", *overrides]) == 0
    results = json.loads((tmp_path / "results_test.json").read_text())
    scores, labels = scores_by_hand(seven, starts, places, frames, size, 2)
    counts = torch.zeros(7, 7, dtype=torch.int64)
    for label, guess in zip(labels, scores.argmax(-1), strict=True):
        counts[label, guess] += 1
    ranks = (scores > scores.gather(1, labels[:, None])).sum(-1)
    assert results["confusion"] == counts.tolist() and results["clips"] == 21
    assert results["metrics"]["test_accuracy"] == pytest.approx((ranks == 0).double().mean().item())
    assert results["metrics"]["test_top5_accuracy"] == pytest.approx((ranks < 5).double().mean().item())
    assert 0 < results["metrics"]["test_top5_accuracy"] < 1  # the model was not trained; some are right all the same


@pytest.mark.slow
def test_a_run_is_tested_by_views_as_evaluate_does(tmp_path, capsys):
    videos = write_videos(tmp_path / "videos")
    views = {"test_clips": 2, "test_crops": 3, "test_frames": 4, "test_size": 12}
    content = {
        "data": {"source": "folder", "path": str(videos), **views},
        "model": MODEL,
        "trainer": {
            "num_train_epochs": 1, "per_device_train_batch_size": 8, "seed": 0, "disable_tqdm": True, "use_cpu": True,
            "output_dir": str(tmp_path / "run"), "ema_decay": 0.9,
        },
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert train.main(["--config", str(tmp_path / "config.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "tests on 8 clips (folder test)" in printed and "waiting for data: " in printed
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert np.sum(results["confusion"]) == 8 and results["test_correct"]["count"] == 8
    assert {"test_accuracy", "test_ema_accuracy"} <= set(results["metrics"])
    for name, metric in (("model", "test_accuracy"), ("model_ema", "test_ema_accuracy")):
        assert evaluate.main([str(tmp_path / "run" / name)]) == 0
        folder = tmp_path / "run" / "evaluation" / ("" if name == "model" else name)
        again = json.loads((folder / "results_test.json").read_text())
        assert again["metrics"]["test_accuracy"] == results["metrics"][metric]
        assert name != "model" or again["confusion"] == results["confusion"]


BAD = {
    "data.test_clips=0": "data.test_clips=0",
    "data.test_crops=2": "data.test_crops=2 must be one of 1, 3",
    "data.test_crops=true": "data.test_crops=True must be one of 1, 3",
    "data.test_frames=0": "data.test_frames=0",
    "data.test_size=0": "data.test_size=0 must be a positive integer, or height and width",
    "data.test_size=[8, 8, 8]": "data.test_size=[8, 8, 8] must be a positive integer, or height and width",
    "data.test_size=18": "data.test_frames=None, data.test_size=18: the model cannot take clips of this shape, ",
    "data.test_size=24": "frames of 20x28 pixels must be at least 24x24, data.test_size",
}


@each("override, message", BAD.items())
def test_what_cannot_be_tested_is_refused_in_one_line(override, message, seven, tmp_path, capsys):
    command = [str(seven / "model"), "--config", str(seven / "config.yaml"), "--out", str(tmp_path / "out")]
    assert evaluate.main([*command, override]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    if "18" in override or "24" in override:  # a run is refused before it starts
        out = f"trainer.output_dir={tmp_path / 'run'}"
        assert train.main(["--config", str(seven / "config.yaml"), override, out]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "run").exists()
