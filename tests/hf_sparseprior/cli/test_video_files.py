"""Frames by PyAV: the right ones, and one line for every file that has none."""

from fractions import Fraction

import numpy as np
import pytest

av = pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")

from hf_sparseprior.cli import video_files  # noqa: E402
from hf_sparseprior.cli.video_files import (  # noqa: E402
    SEEK_FROM,
    count_frames,
    iterate_frames,
    read_frames,
    sample_indices,
    write_video,
)
from tests.each import each  # noqa: E402


def numbered(count, height=16, width=64):
    """Frames with their number's eight bits as black and white stripes, which survive lossy codecs."""
    bits = (np.arange(count)[:, None] >> np.arange(8)) & 1
    stripes = np.repeat(255 * bits, width // 8, axis=1).astype(np.uint8)
    return np.broadcast_to(stripes[:, None, :, None], (count, height, stripes.shape[1], 3)).copy()


def numbers_of(frames):
    stripes = frames.reshape(len(frames), frames.shape[1], 8, -1).mean((1, 3)) > 127
    return (stripes << np.arange(8)).sum(1).tolist()


def encode(path, frames, codec, times=None, sound=0.0, b_frames=None):
    """Write frames, at 25 a second or at these milliseconds, and so many seconds of sound."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt, stream.gop_size = *frames.shape[1:3], "yuv420p", 12
        if b_frames is not None:
            stream.codec_context.max_b_frames = b_frames
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if sound:
            speaker = container.add_stream("aac", rate=8000, layout="mono")
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        for number in range(int(sound * 8000 / 1024)):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 8000, 1024 * number, Fraction(1, 8000)
            container.mux(speaker.encode(frame))
        if sound:
            container.mux(speaker.encode())


def cut_off(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


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
    assert read_frames(tmp_path / "clip.mkv", short_side=11).shape == (5, 15, 11, 3)


@pytest.mark.parametrize("degrees", [0, 90, 180, -90, 45])
def test_turned_videos_are_upright(degrees, tmp_path):
    """FFmpeg's own player turns a video by its display matrix; the first rows of the upright one are white."""
    upright = np.zeros((3, 32, 64, 3), np.uint8)
    upright[:, :8] = 255
    stored = np.rot90(upright, -degrees // 90, axes=(1, 2))
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = *stored.shape[1:3], "yuv420p"
        stream.set_display_rotation(degrees)
        for pixels in stored:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
        container.mux(stream.encode())
    if degrees == 45:
        with pytest.raises(OSError, match=r"clip\.mp4 asks to be turned by 45 degrees"):
            read_frames(tmp_path / "clip.mp4")
        return
    for indices in (None, [2, 0]):
        frames = read_frames(tmp_path / "clip.mp4", indices, short_side=32)
        assert frames.shape[1:] == (32, 64, 3)
        assert np.abs(frames[0].astype(int) - upright[0]).mean() < 4
    one_by_one = list(iterate_frames(tmp_path / "clip.mp4"))
    assert len(one_by_one) == 3 and all(frame.shape == (32, 64, 3) for frame in one_by_one)
    assert np.abs(one_by_one[2].astype(int) - upright[2]).mean() < 4


UNEVEN = np.cumsum([(20, 35, 90, 41, 160)[number % 5] + 7 * (number % 3) for number in range(SEEK_FROM + 60)])


@pytest.mark.parametrize(
    "name, codec, times, b_frames",
    [
        ("clip.mkv", "libx264", UNEVEN, None),  # with B-frames, its preset's
        ("clip.mp4", "libx264", UNEVEN, None),
        ("clip.mp4", "libx264", UNEVEN + 5000, 0),
        ("clip.mkv", "libx264", 40 * np.arange(len(UNEVEN)) + 3000, None),  # even, starts late
        ("clip.mp4", "mpeg4", None, 2),
        ("clip.avi", "mpeg4", None, 2),
        ("clip.avi", "libx264", UNEVEN, 0),  # an AVI says a number of frames that are ticks of its clock
        ("clip.mpg", "mpeg1video", None, 2),  # without an index to seek by
    ],
)
def test_every_frame_is_the_right_one_whatever_the_times(name, codec, times, b_frames, tmp_path):
    path, count = tmp_path / name, len(UNEVEN)
    encode(path, numbered(count), codec, None if times is None else times.tolist(), b_frames=b_frames)
    assert count_frames(path) == count
    assert numbers_of(read_frames(path)) == list(range(count))
    for number in (*range(SEEK_FROM - 3, SEEK_FROM + 24), count - 1):  # two groups of pictures, and the last frame
        assert numbers_of(read_frames(path, [number])) == [number]
    for first in range(SEEK_FROM - 1, count - 40, 3):
        group = [first + 39, first, first + 11, first + 2]
        assert numbers_of(read_frames(path, group)) == group
    assert numbers_of(read_frames(path, [*group, 3])) == [*group, 3]  # which starts without a seek
    for beyond in ([count], [SEEK_FROM, count]):
        with pytest.raises(OSError, match=f"has no frame {count}"):
            read_frames(path, beyond)


def test_frames_that_an_edit_list_cuts_away_are_not_counted(tmp_path):
    encode(tmp_path / "whole.mp4", numbered(SEEK_FROM + 60), "libx264", b_frames=0)
    # Copied from the key frame 24 on, to be shown from frame 30 on.
    with av.open(str(tmp_path / "whole.mp4")) as whole:
        source = whole.streams.video[0]
        with av.open(str(tmp_path / "clip.mp4"), "w", options={"avoid_negative_ts": "disabled"}) as container:
            stream = container.add_stream_from_template(source)
            for packet in list(whole.demux(source))[24:-1]:
                start = round(30 / 25 / packet.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts - start, packet.dts - start, stream
                container.mux(packet)
    shown = list(range(30, SEEK_FROM + 60))
    assert numbers_of(read_frames(tmp_path / "clip.mp4")) == shown
    assert count_frames(tmp_path / "clip.mp4") == len(shown)
    for number in (0, SEEK_FROM + 1, len(shown) - 1):
        assert numbers_of(read_frames(tmp_path / "clip.mp4", [number])) == [shown[number]]


def test_frames_without_times_are_counted(tmp_path, monkeypatch):
    encode(tmp_path / "clip.mkv", numbered(SEEK_FROM + 60), "libx264", UNEVEN.tolist())
    monkeypatch.setattr(video_files, "_times", lambda path: [])
    wanted = [SEEK_FROM + 31, SEEK_FROM + 7]
    assert numbers_of(read_frames(tmp_path / "clip.mkv", wanted)) == wanted


def test_a_seek_that_comes_too_late_costs_no_frame(tmp_path, monkeypatch):
    encode(tmp_path / "clip.mkv", numbered(SEEK_FROM + 60), "libx264", UNEVEN.tolist())
    times = video_files._times(tmp_path / "clip.mkv")
    # The first wanted frame's time is put after the key frame that follows it.
    wanted = SEEK_FROM + 7
    monkeypatch.setattr(
        video_files, "_times", lambda path: [*times[:wanted], times[wanted + 12] + 1, *times[wanted + 1 :]]
    )
    assert numbers_of(read_frames(tmp_path / "clip.mkv", [wanted, wanted + 1])) == [wanted, wanted + 1]


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
def test_what_is_no_video_is_named_in_one_line(kind, name, message, tmp_path):
    broken(kind, tmp_path / name)
    for read in (read_frames, count_frames):
        with pytest.raises(OSError) as caught:
            read(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value) and message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_video_that_breaks_off_names_the_frame(tmp_path):
    write_video(tmp_path / "clip.mkv", np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8))
    content = (tmp_path / "clip.mkv").read_bytes()
    (tmp_path / "clip.mkv").write_bytes(content[: len(content) // 2])
    with pytest.raises(OSError, match=r"clip\.mkv breaks off: its frames end at 0\.\d\d s, not at 0\.24 s"):
        read_frames(tmp_path / "clip.mkv", [0, 5])


@pytest.mark.parametrize(
    "name, codec, share",
    [
        *[("clip.mkv", "libx264", 0.3), ("clip.mkv", "libx264", 0.9), ("clip.mkv", "ffv1", 0.5)],
        *[("clip.webm", "libvpx", 0.3), ("clip.webm", "libvpx", 0.9)],
    ],
)
def test_a_video_that_is_cut_off_is_named(name, codec, share, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)  # more than head and index
    encode(tmp_path / name, noise, codec)
    cut_off(tmp_path / name, share)
    for read in (read_frames, count_frames):
        with pytest.raises(OSError, match=rf"{name} breaks off: its frames end at [0-7]\.\d\d s, not at 8\.00 s"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    "name, times, seconds",
    [  # each kind of file and all times, in turn with no sound, less and more of it than of the video
        (name, times, (0.0, 1.0, 20.0)[(place + number) % 3])
        for place, name in enumerate(("clip.mkv", "clip.mp4", "clip.avi"))
        for number, times in enumerate((None, UNEVEN, UNEVEN + 3000, UNEVEN[:1], UNEVEN[:2]))
    ],
)
def test_a_whole_video_is_accepted_whatever_its_sound(name, times, seconds, tmp_path):
    count = SEEK_FROM if times is None else len(times)
    encode(tmp_path / name, numbered(count), "libx264", None if times is None else times.tolist(), sound=seconds)
    assert len(read_frames(tmp_path / name)) == count_frames(tmp_path / name) == count


@each(
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
