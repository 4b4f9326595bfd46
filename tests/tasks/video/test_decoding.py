"""Frames by PyAV: the right ones, and one line for every file that has none."""

import numpy as np
import pytest

av = pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")

from tasks.video.decoding import SEEK_FROM, count_frames, read_frames, sample_indices, write_video  # noqa: E402


def numbered(count, height=16, width=64):
    """Frames with their number's eight bits as black and white stripes, which survive lossy codecs."""
    bits = (np.arange(count)[:, None] >> np.arange(8)) & 1
    stripes = np.repeat(255 * bits, width // 8, axis=1).astype(np.uint8)
    return np.broadcast_to(stripes[:, None, :, None], (count, height, stripes.shape[1], 3)).copy()


def numbers_of(frames):
    stripes = frames.reshape(len(frames), frames.shape[1], 8, -1).mean((1, 3)) > 127
    return (stripes << np.arange(8)).sum(1).tolist()


def encode(path, frames, codec, rate=25, gop=12):
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt, stream.gop_size = *frames.shape[1:3], "yuv420p", gop
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def sound(path):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def test_written_frames_come_back_without_loss(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (5, 30, 22, 3), dtype=np.uint8)
    write_video(tmp_path / "clip.mkv", frames)
    assert np.array_equal(read_frames(tmp_path / "clip.mkv"), frames)
    assert np.array_equal(read_frames(tmp_path / "clip.mkv", [4, 0, 0]), frames[[4, 0, 0]])
    assert count_frames(tmp_path / "clip.mkv") == 5


@pytest.mark.parametrize("name, codec", [("clip.mp4", "libx264"), ("clip.mkv", "libx264"), ("clip.avi", "mpeg4")])
def test_frames_behind_a_seek_are_the_right_ones(name, codec, tmp_path):
    count = SEEK_FROM + 60
    frames = numbered(count)
    encode(tmp_path / name, frames, codec)
    assert count_frames(tmp_path / name) == count
    wanted = [SEEK_FROM + 7, SEEK_FROM + 31, count - 1, 3]
    for indices in (wanted[:3], wanted):  # the second starts without a seek
        assert numbers_of(read_frames(tmp_path / name, indices)) == indices


def test_short_side_keeps_the_shape(tmp_path):
    write_video(tmp_path / "clip.mkv", numbered(2, 40, 64))
    assert read_frames(tmp_path / "clip.mkv", short_side=20).shape == (2, 20, 32, 3)


def broken(kind, path):
    if kind == "missing":
        return
    if kind == "sound":
        sound(path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("no video\n" * 100)
    else:  # cut off: an mp4 has its table at the end
        encode(path, numbered(30), "libx264")
        path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    "kind, name, message",
    [
        ("missing", "clip.mp4", "does not exist"),
        ("empty", "clip.mp4", "is empty"),
        ("text", "clip.mp4", "cannot be decoded: "),
        ("sound", "clip.mkv", "holds no video, only audio"),
        ("cut", "clip.mp4", "cannot be decoded: "),
    ],
)
@pytest.mark.parametrize("read", [read_frames, count_frames])
def test_what_is_no_video_is_named_in_one_line(read, kind, name, message, tmp_path):
    broken(kind, tmp_path / name)
    with pytest.raises(OSError) as caught:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value) and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_video_that_breaks_off_names_the_frame(tmp_path):
    write_video(tmp_path / "clip.mkv", np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8))
    content = (tmp_path / "clip.mkv").read_bytes()
    (tmp_path / "clip.mkv").write_bytes(content[: len(content) // 2])
    with pytest.raises(OSError, match=r"clip\.mkv has no frame 5; it ends or breaks off before it"):
        read_frames(tmp_path / "clip.mkv", [0, 5])


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((9, 9), range(9)),
        ((9, 5, 2), [0, 2, 4, 6, 8]),
        ((9, 3, 4), [0, 4, 8]),
        ((9, 1, 4), [4]),
        ((9, 3, 2, 0.0), [0, 2, 4]),
        ((9, 3, 2, 1.0), [4, 6, 8]),
        ((4, 4, 2), [0, 1, 3, 3]),  # shorter than the clip: places -1.5, 0.5, 2.5, 4.5
        ((1, 3, 5), [0, 0, 0]),
        ((300, 8, 32, 0.0), range(0, 256, 32)),
    ],
)
def test_sampled_numbers(arguments, expected):
    assert sample_indices(*arguments) == list(expected)
