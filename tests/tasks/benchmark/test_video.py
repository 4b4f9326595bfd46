"""What clips cost: measured in processes of their own, predicted where it would be too much, gone on with."""

import json

import pytest

from tasks.benchmark import commands, video
from tasks.benchmark.clip_model import Clips

ROWS = ["divided/dense", "joint/dense", "joint/transformers"]
MODEL = {"preset": "vit_tiny", "dtype": "float32"}
HEADS = 3


def command(out, *more):
    return ["--frames", "5,6", "--pixels", "32", "--rounds", "2", "--out", str(out), *more, "--rows", *ROWS]


@pytest.fixture
def settings(tmp_path):
    return video.settings_of(commands.video().parse_args(command(tmp_path, "--memory-gib", "3", "--seconds", "7")))


@pytest.fixture(scope="module")
def server():
    context = video.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([video.work.__module__])
    return context


def answer(server, clips, memory_gib=6.0, first=True):
    arguments = {"threads": 1, "memory_gib": memory_gib, "first": first, "long": True}
    return video.in_process(server, clips, arguments)


@pytest.mark.slow
def test_a_command_that_was_stopped_goes_on_and_measures_nothing_twice(tmp_path, capsys):
    assert video.main(command(tmp_path)) == 0
    text = capsys.readouterr()
    file = tmp_path / "records.json"
    kept = json.loads(file.read_text())
    # 1, 2 and 4 frames are for predictions.
    assert list(kept) == [f"{row}, {frames}x32" for row in ROWS for frames in (1, 2, 4, 5, 6)]
    for record in kept.values():
        assert len(record["seconds"]) == (2 if record["frames"] > 4 else 1) and min(record["seconds"]) > 0
        assert record["memory"]["call"] > 0 and record["memory"]["resident"] > record["memory"]["weights"]
    assert all(f"| 32 | {frames} | {4 * frames} | {row} |" in text.out for frames in (5, 6) for row in ROWS)
    assert text.err.count("round 1") == 15 and text.err.count("round 2") == 6
    assert (tmp_path / "clips.png").is_file() and (tmp_path / "table.md").read_text() in text.out + "\n"

    lost = kept.pop("joint/dense, 6x32")
    file.write_text(json.dumps(kept))
    assert video.main(command(tmp_path)) == 0
    assert capsys.readouterr().err.count("round") == 2
    again = json.loads(file.read_text())
    assert again.pop("joint/dense, 6x32").keys() == lost.keys() and again == kept

    assert video.main([*command(tmp_path), "--threads", "2"]) == 2
    assert "was measured otherwise (threads: 1 there, 2 here)" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_is_limited_and_that_of_dense_attention_written_out_is_its_matrix(server):
    """transformers' own class makes (heads, T, T) twice at a time: the logits and their softmax."""
    tokens = 1 + 24 * 49
    stock = answer(server, Clips("joint", "transformers", 24, 112, **MODEL))["memory"]
    fused = answer(server, Clips("joint", "dense", 24, 112, **MODEL))["memory"]
    matrix = 4 * HEADS * tokens**2
    assert 2 * matrix < stock["call"] < 2.6 * matrix and fused["call"] < matrix
    error = answer(server, Clips("joint", "transformers", 48, 224, **MODEL), memory_gib=1.0)["error"]
    assert any(word in error for word in ("allocate", "bad_alloc", "MemoryError"))  # torch's, C++'s or Python's


def test_predictions_follow_the_shorter_clips(settings, tmp_path, capsys):
    """Of a call that takes 0.3 + 0.05 F^2 seconds and 0.1 + 0.03 F^2 GiB."""
    for frames in video.PROBES:
        gib = 0.1 + 0.03 * frames**2
        memory = {"weights": 2**20, "input": 2**20, "set_up": 0, "kept": 2**20, "call": int(gib * 2**30) - 3 * 2**20}
        told = settings.told("joint/dense", frames, 32)
        seconds = [0.3 + 0.05 * frames**2]
        settings.write("joint/dense", frames, 32, {**told, "memory": memory, "seconds": seconds})
    assert video.predicted(settings, "joint/dense", 4, 32) is None  # two shorter ones are too few
    ten, thirty = (video.predicted(settings, "joint/dense", frames, 32) for frames in (10, 30))
    assert ten == pytest.approx({"seconds": 5.3, "gib": 3.1}, rel=1e-3)
    assert video.too_much(settings, ten) == "does not run: needs 3.1 GiB, 3 are allowed"
    assert video.too_much(settings, {"seconds": thirty["seconds"], "gib": 1.0}).startswith("not run: would take 45 s")
    assert video.too_much(settings, None) is None and video.too_much(settings, {"seconds": 6.9, "gib": 2.9}) is None
    # It is not begun, and the table says so.
    assert video.measure(settings, None, "joint/dense", 12, 32, 0) == "does not run: needs 4.4 GiB, 3 are allowed"
    assert video.main([*command(tmp_path, "--memory-gib", "3", "--seconds", "7", "--report")]) == 0
    text = capsys.readouterr().out
    assert "| joint/dense | not measured: would take 2.1 s and 1.2 GiB |" in text and "not measured | - |" in text
    assert (tmp_path / "clips.png").is_file() and len(json.loads((tmp_path / "records.json").read_text())) == 3
    entries = {(entry["row"], entry["frames"]): entry for entry in video.collect(settings, {})}
    assert entries["joint/dense", 6]["predicted"] and entries["divided/dense", 6]["predicted"] is None


def test_a_report_of_nothing_leaves_what_there_is(tmp_path, capsys):
    (tmp_path / "table.md").write_text("mine")
    assert video.main([*command(tmp_path), "--report"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'records.json'} has nothing of these --rows" in error and error.count("\n") == 1
    assert (tmp_path / "table.md").read_text() == "mine" and not (tmp_path / "clips.png").exists()


def test_two_at_a_time_are_refused(tmp_path, capsys):
    with video.locked(tmp_path / "lock") as mine:
        assert mine and video.main(command(tmp_path)) == 2
    assert "another process measures" in capsys.readouterr().err and not (tmp_path / "records.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "dense"], "--rows 'dense' must be ATTENTION/PRIOR"),
        (["--rows", "time/dense"], "attention 'time' must be one of divided, joint, space"),
        (["--rows", "divided/violin+clip"], "time='clip' needs attention_type='joint_space_time'"),
        (["--frames", "4,8"], "4 must be above 4"),
        (["--frames", "8,x"], "must be positive numbers"),
        (["--pixels", "30"], "image_size"),
        (["--preset", "vit_none"], "vit_none"),
        (["--memory-gib", "0"], "--memory-gib 0.0 must be above 0"),
    ],
)
def test_bad_values(arguments, message, tmp_path, capsys):
    assert video.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
