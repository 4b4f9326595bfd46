"""The GPU benchmark: refused without a GPU, and whole at toy sizes in Triton's interpreter."""

import dataclasses
import json
import os
from importlib.util import find_spec

import pytest
import torch

from hf_sparseprior.backend_choice import BACKENDS
from tasks.benchmark import gpu, timing


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
    out = tmp_path / "gpu.json"
    options = ["--tokens", "9", "--batch", "1", "--rounds", "1", "--copy-bytes", "4096", "--no-models"]
    contenders = ["--contenders", "triton", "flash", "masked", "reference"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert gpu.main([*options, *contenders, "--out", str(out)], device) == 0
    results = json.loads(out.read_text())
    assert checked == [(9, torch.float32), (9, torch.bfloat16)] and len(results["checked"]["float32"]) == 4
    found = {(row["part"], row["pass"], row["contender"]) for row in results["rows"]}
    passes = ("forward", "forward+backward")
    assert found == {
        *(("fibottention", name, contender) for name in passes for contender in ("triton", "flash", "masked")),
        *(("violin", name, contender) for name in passes for contender in ("triton", "flash", "reference")),
    }
    assert all(row["median"] > 0 for row in results["rows"])
    printed = capsys.readouterr().out
    assert "WRONG" not in printed and printed.count("violin") >= 6


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
