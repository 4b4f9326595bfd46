"""The GPU benchmark: refused without a GPU, and whole at toy sizes in Triton's interpreter."""

import dataclasses
import json
import os
from importlib.util import find_spec

import pytest
import torch

from hf_sparseprior.attention.choice import BACKENDS
from tasks.benchmark import gpu, gpu_report, records, timing
from tasks.common.locks import locked


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_one_line(capsys):
    assert gpu.main([]) == 2
    said = capsys.readouterr().err
    assert "needs a CUDA GPU" in said and said.count("\n") == 1


def test_wrong_sizes_are_named(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--tokens", "200"])
    assert "--tokens 200 must be a square number" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_runs_from_check_to_table(monkeypatch, tmp_path, capsys):
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        # One head, and of several calls in a row one: the interpreter needs seconds for each.
        monkeypatch.setattr(gpu, "HEADS", 1)
        monkeypatch.setattr(
            gpu, "seconds_per_call", lambda call, calls, device: timing.seconds_per_call(call, 1, device)
        )
    checked, check = [], gpu.check

    def check_float32(tokens, dtype, device):  # tests of the kernels compare bfloat16 with `reference`
        checked.append((tokens, dtype))
        return check(tokens, dtype, device) if dtype == torch.float32 else {"noted": 0.0}

    monkeypatch.setattr(gpu, "check", check_float32)
    monkeypatch.setattr(gpu, "WIDTH", 8)
    monkeypatch.setattr(gpu, "SIZES", {"ViT-S": (16, 1, 2), "ViT-B": (16, 1, 2)})
    monkeypatch.setattr(gpu, "TURN_SECONDS", 0.0)
    options = ["--tokens", "9", "--batch", "1", "--rounds", "1", "--copy-bytes", "4096", "--no-models"]
    contenders = ["--contenders", "triton", "flash", "masked", "reference", "flash_window"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = [*options, *contenders, "--out", str(tmp_path)]
    # No time is left after the first step; then the same command goes on.
    assert gpu.main([*arguments, "--budget", "0"], device) == 3
    assert "the same command goes on with: check float32" in capsys.readouterr().out and not checked
    assert gpu.main(arguments, device) == 0
    results = json.loads((tmp_path / "records.json").read_text())
    assert checked == [(9, torch.float32), (9, torch.bfloat16)] and len(results["checked"]["float32"]) == 4
    found = {(row["part"], row["pass"], row["contender"]) for row in results["rows"]}
    passes, supports = ("forward", "forward+backward"), ("fibottention", "fibottention, w_max N // 3")
    of_supports = ("triton", "flash", "masked", "flash_window")
    assert found == {
        *((part, name, contender) for part in supports for name in passes for contender in of_supports),
        *(("violin", name, contender) for name in passes for contender in ("triton", "flash", "reference")),
    }
    for row in results["rows"]:
        if row["contender"] == "flash_window" and "failed" in row:
            assert row["failed"].startswith("ValueError: flash_attn is not installed")
        else:
            assert row["median"] > 0 and row["times_faster_than_dense"] > 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed and printed.count("violin") >= 6
    text = (tmp_path / "RESULTS.md").read_text()
    assert "at most 1.15 times flash attention" in text and gpu_report.NEVER not in text
    assert (tmp_path / "measured.png").read_bytes().startswith(b"\x89PNG")
    # All is done: nothing is computed again. Records of another dtype are not mixed with these.
    assert gpu.main(arguments, device) == 0 and len(checked) == 2
    assert gpu.main([*arguments, "--dtype", "float16"], device) == 2
    assert "dtype: 'bfloat16' there, 'float16' here" in capsys.readouterr().err
    assert gpu.main([*arguments, "--rounds", "2"], device) == 2
    assert "rounds: 1 there, 2 here" in capsys.readouterr().err


def test_a_wrong_kernel_is_not_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "check", lambda tokens, dtype, device: {"neg_inf": float("nan")})
    assert gpu.main(["--tokens", "9", "--out", str(tmp_path)], "cpu") == 1
    assert "WRONG float32, neg_inf: relative difference nan" in capsys.readouterr().err
    assert not (tmp_path / "records.json").exists()


def test_a_folder_in_use_is_refused_and_ctrl_c_is_one_line(monkeypatch, tmp_path, capsys):
    with locked(tmp_path / records.LOCK) as mine:
        assert mine and gpu.main(["--out", str(tmp_path)], "cpu") == 2
        assert gpu.main(["--count", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("is in use by another process" in line for line in said)

    def interrupted(records):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "steps", lambda *arguments: {"one": lambda records: None, "two": interrupted})
    assert gpu.main(["--out", str(tmp_path)], "cpu") == 130
    assert "interrupted; the same command goes on after the last finished step" in capsys.readouterr().err
    assert json.loads((tmp_path / "records.json").read_text())["done"] == ["one"]
    assert not (tmp_path / records.LOCK).exists()


def test_a_step_that_fails_is_reported_and_the_others_run(monkeypatch, tmp_path):
    def fails(records):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "steps", lambda *arguments: {"one": fails, "two": lambda records: None})
    assert gpu.main(["--out", str(tmp_path)], "cpu") == 0
    records = json.loads((tmp_path / "records.json").read_text())
    assert records["failed"] == {"one": "RuntimeError: out of memory"} and records["done"] == ["one", "two"]
    assert "one: RuntimeError: out of memory" in (tmp_path / "RESULTS.md").read_text()


def test_targets_are_met_missed_or_not_measured():
    def row(part, contender, median, tokens=4096, copies=None):
        return {
            "part": part, "pass": "forward", "tokens": tokens, "batch": 1, "contender": contender, "median": median,
            "times_copy_bound": copies,
        }  # fmt: skip

    rows = [
        row("fibottention", "triton", 1.0, copies=1.4), row("fibottention", "flex_window", 2.0),
        row("fibottention", "natten", 0.5), row("violin", "triton", 2.0), row("violin", "flash", 2.0),
        row("fibottention", "triton", 1.0, 1024, copies=9.0),
    ]  # fmt: skip
    lines = [line.split(" | ")[1:] for line in gpu_report.targets(rows).splitlines()[2:]]
    assert lines == [
        ["1024", "not measured |"], ["1024", "not measured |"],
        ["4096", "1.40, met |"], ["4096", "2.00, missed |"], ["4096", "1.00, met |"],
    ]  # fmt: skip


def test_windows_without_prefix_tokens_get_the_patches_alone(monkeypatch):
    seen = []
    rival = gpu.window_contenders.windows()["flash_window"]
    spy = dataclasses.replace(
        rival,
        can_run=lambda problem, train: None,
        prepare=lambda problem: lambda q, k, v: seen.append(q.shape) or q * k + v,
    )
    monkeypatch.setattr(gpu.window_contenders, "windows", lambda: {"flash_window": spy})
    plan, device = gpu.make_plan(gpu.FIBOTTENTION, None, 16), torch.device("cpu")
    inputs = gpu.make_inputs(1, 16, torch.float32, device)
    for train in (False, True):
        gpu.contender("flash_window", plan, inputs, train)()()
    assert {shape[2] for shape in seen} == {16}


def test_a_contender_that_fails_is_reported_and_the_others_run():
    def broken():
        raise RuntimeError("no such kernel")

    found = gpu.measure({"broken": broken, "fine": lambda: lambda: None}, 3, torch.device("cpu"))
    assert found["broken"] == {"failed": "RuntimeError: no such kernel"} and found["fine"]["median"] >= 0


@pytest.mark.parametrize(("prior", "backend"), [("dense", "sdpa"), ({"support": gpu.FIBOTTENTION}, "triton")])
@pytest.mark.parametrize("train", [False, True])
def test_a_model_runs_by_the_backend_asked_for(monkeypatch, prior, backend, train):
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)
    if backend == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    ran = []
    entry = BACKENDS[backend]
    spy = dataclasses.replace(entry, run=lambda call: ran.append(call.q.dtype) or entry.run(call))
    monkeypatch.setitem(BACKENDS, backend, spy)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu.model_call((16, 1, 2), prior, backend, 32, 1, train, torch.bfloat16, torch.device(device))()()
    assert ran == [torch.bfloat16] and "SPARSEPRIOR_BACKEND" not in os.environ
