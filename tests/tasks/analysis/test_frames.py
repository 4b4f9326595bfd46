"""Attention over the frames of a clip."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from hf_sparseprior import (
    SparsePriorTimesformerConfig,
    SparsePriorTimesformerModel,
    SparsePriorViTConfig,
    SparsePriorViTModel,
)
from hf_sparseprior.cli.video_files import write_video
from tasks.analysis import attention, decay, diversity, frames
from tests.each import each

av = pytest.importorskip("av")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A video file of seven frames of 24x32 pixels."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for number in range(7):
            pixels = np.full((24, 32, 3), 40 * number % 250, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model of 16x16 pixels."""
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    path = tmp_path_factory.mktemp("model")
    SparsePriorViTModel(SparsePriorViTConfig(prior="violin", intermediate_size=8, **sizes)).save_pretrained(path)
    return path


def test_frames_larger_than_those_of_training_are_drawn(clip, folder, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(frames, "draw_panels", lambda rows, labels, path, heading: seen.extend([rows, labels]) or path)
    arguments = ["--clip", str(clip), "--size", "12x20", "--heads", "2", "--mass", "0.5", "--out", str(tmp_path)]
    assert frames.main([str(folder), *arguments]) == 0
    found = json.loads((tmp_path / "frames.json").read_text())["models"][0]
    assert found["frames"] == 7 and found["layer"] == 2 and found["size"] == [12, 20]
    rows, labels = seen
    assert labels == ["frame", "attention", "50 % of it", "head 2"] and [len(row) for row in rows] == [6] * 4
    model = SparsePriorViTModel.from_pretrained(folder).eval()
    first = frames.read_frames(clip, None)[0].resize((20, 12), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.asarray(first) / 255.0).permute(2, 0, 1).float()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (model.config.image_mean, model.config.image_std))
    weights = model(((pixels - mean) / std)[None], output_attentions=True).attentions[-1][0]
    expected = weights[:, 0, 1:].unflatten(-1, (3, 5)).detach().numpy()
    np.testing.assert_allclose(rows[1][0].heat, expected.mean(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(rows[3][0].heat, expected[1], rtol=1e-3, atol=1e-4)
    with Image.open(next(tmp_path.glob("*.gif"))) as animation:
        assert animation.size == (60, 12) and animation.n_frames >= 1


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        ("divided_space_time", "class_token"),
        ("joint_space_time", "class_token"),
        ("joint_space_time", "mean"),
        ("space_only", "mean"),
    ],
)
def test_a_model_of_clips_sees_the_clip(kind, pooling, clip, tmp_path, monkeypatch, capsys):
    """By default as many frames as it is configured for; maps are those of its weights, place by place."""
    seen = []
    monkeypatch.setattr(frames, "draw_panels", lambda rows, labels, path, heading: seen.extend(rows) or path)
    torch.manual_seed(0)
    sizes = {
        "image_size": (12, 20),
        "patch_size": 4,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = SparsePriorTimesformerConfig(
        intermediate_size=8, prior="violin", num_frames=3, attention_type=kind, pooling=pooling,
        use_class_token=pooling == "class_token", **sizes,
    )  # fmt: skip
    model = SparsePriorTimesformerModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    given = ["--clip", str(clip), "--heads", "2", "--out", str(tmp_path / "out")]
    assert frames.main([str(tmp_path / "model"), *given]) == 0
    found = json.loads((tmp_path / "out" / "frames.json").read_text())["models"][0]
    assert found["frames"] == 3 and [len(row) for row in seen] == [3] * 4
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.image_mean, config.image_std))
    read = [frames.read_frames(clip, None)[place] for place in (0, 3, 6)]
    pixels = [torch.from_numpy(np.asarray(one.resize((20, 12), Image.Resampling.BICUBIC)) / 255.0) for one in read]
    pixels = torch.stack([(one.permute(2, 0, 1).float() - mean) / std for one in pixels])
    weights = model(pixels[None], output_attentions=True).attentions[-1].detach().numpy()
    prefix = int(pooling == "class_token")
    for frame in range(3):
        for row, column in np.ndindex(3, 5):
            place = prefix + 5 * row + column
            if kind == "joint_space_time":
                own, place = weights[0], prefix + 3 * (5 * row + column) + frame
            else:
                own = weights[frame]
            given = own[:, 0, place] if prefix else own[:, :, place].mean(1)
            assert seen[1][frame].heat[row, column] == pytest.approx(given.mean(), rel=1e-3, abs=1e-5)
            assert seen[3][frame].heat[row, column] == pytest.approx(given[1], rel=1e-3, abs=1e-5)
    assert frames.main([str(tmp_path / "model"), *given_frames(clip, tmp_path, "5")]) == 0
    assert decay.main([str(tmp_path / "model"), "--out", str(tmp_path / "decay")]) == 0
    layers = json.loads((tmp_path / "decay" / "decay.json").read_text())["models"][0]["layers"]
    betas = [layer.attention.decay_bias.beta for layer in model.layers]
    np.testing.assert_allclose([layer["beta"] for layer in layers], torch.stack(betas).detach(), rtol=1e-5)
    image = tmp_path / "image.png"
    Image.new("RGB", (20, 12)).save(image)
    capsys.readouterr()
    for command, own in ((attention, ["--images", str(image)]), (diversity, ["--set", "data.source=digits"])):
        assert command.main([str(tmp_path / "model"), "--out", str(tmp_path / "none"), *own]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        own_line = "model is a model of clips, and this is measured on single images; of" in error
        assert own_line or "cannot be analysed in this way: its layers see 3 frames of 3x5 patches together" in error
    assert json.loads((tmp_path / "five" / "frames.json").read_text())["models"][0]["frames"] == 5


def given_frames(clip, folder, count):
    return ["--clip", str(clip), "--frames", count, "--out", str(folder / "five")]


def test_most_of_the_attention_is_the_fewest_patches_that_hold_it():
    attention = torch.tensor([[0.1, 0.4], [0.3, 0.2]])
    assert frames.most_of(attention, 0.6).tolist() == [[False, True], [True, False]]
    assert frames.most_of(attention, 0.75).tolist() == [[False, True], [True, True]]
    assert frames.most_of(attention, 1.0).all() and frames.most_of(attention, 0.01).sum() == 1


@each(
    "options, message",
    [
        (["--size", "10x20"], "--size 10x20 must be a multiple of the 4x4 patch"),
        (["--layer", "3"], "--layer 3 must be between 1 and 2"),
        (["--layer", "0"], "--layer 0 must be between 1 and 2"),
        (["--frames", "8"], "--frames 8 must be at most 7, the frames of"),
        (["--mass", "0"], "--mass 0.0 must be above 0"),
        (["--frames", "0"], "--frames 0 must be 1 or more"),
    ],
)
def test_bad_values_are_one_line(options, message, clip, folder, tmp_path, capsys):
    assert frames.main([str(folder), "--clip", str(clip), "--out", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_video_is_named(folder, tmp_path, capsys):
    (tmp_path / "clip.mp4").write_bytes(b"no video")
    assert frames.main([str(folder), "--clip", str(tmp_path / "clip.mp4"), "--out", str(tmp_path)]) == 2
    assert "clip.mp4 cannot be read as a video" in capsys.readouterr().err


@pytest.mark.parametrize("count", [None, 3])
def test_a_container_that_does_not_say_its_number_of_frames_is_read(tmp_path, count):
    pixels = np.arange(5, dtype=np.uint8)[:, None, None, None] * 40 + np.zeros((5, 8, 12, 3), np.uint8)
    write_video(tmp_path / "clip.mkv", pixels)
    with av.open(str(tmp_path / "clip.mkv")) as container:
        assert container.streams.video[0].frames == 0
    found = [np.asarray(frame)[0, 0, 0] for frame in frames.read_frames(tmp_path / "clip.mkv", count)]
    np.testing.assert_allclose(found, [0, 40, 80, 120, 160] if count is None else [0, 80, 160], atol=2)
