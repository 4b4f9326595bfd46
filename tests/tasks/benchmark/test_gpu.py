"""The GPU benchmark: refused without a GPU, and whole at toy sizes in Triton's interpreter."""

import dataclasses
import json
import os
from argparse import Namespace
from importlib.util import find_spec

import pytest
import torch

from hf_sparseprior.attention.choice import BACKENDS
from tasks.benchmark import commands, gpu, gpu_models, report, timing
from tasks.benchmark.__main__ import main
from tasks.benchmark.contenders import Setting, Size

CPU = ["--device", "cpu", "--tokens", "9"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("mode", [[], ["--quick"], ["--models"]])
def test_without_a_gpu_it_ends_with_one_line(mode, capsys):
    assert main(["gpu", *mode]) == 2
    said = capsys.readouterr().err
    assert "there is no CUDA device" in said and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_runs_from_check_to_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # One head, and of several calls in a row one: the interpreter needs seconds for each.
    monkeypatch.setattr(gpu, "HEADS", 1)
    monkeypatch.setattr(gpu, "WIDTH", 8)
    own = timing.seconds_per_call
    monkeypatch.setattr(timing, "seconds_per_call", lambda call, calls, device: own(call, 1, device))
    checked, check = [], gpu.check

    def check_float32(tokens, dtype, device):  # tests of the kernels compare bfloat16 with `reference`
        checked.append((tokens, dtype))
        return check(tokens, dtype, device) if dtype == torch.float32 else {"noted": 0.0}

    monkeypatch.setattr(gpu, "check", check_float32)
    names = ["triton", "dense_sdpa", "sdpa", "reference", "flash_window"]
    arguments = ["gpu", *CPU, "--batch", "1", "--rounds", "1", "--copy-bytes", "4096", "--contenders", *names]
    arguments += ["--out", str(tmp_path)]
    # No time is left after the first step; then the same command goes on.
    assert main([*arguments, "--for-seconds", "1e-9"]) == 0 and not checked
    assert main(arguments) == 0
    content = json.loads((tmp_path / "records.json").read_text())
    assert checked == [(9, torch.float32), (9, torch.bfloat16)]
    assert len(content["measured"][0]["checked"]) == 4
    found = {
        (own["part"], own["pass"], own["contender"]): own for own in content["measured"] if own["part"] in gpu.PARTS
    }
    passes, supports = (gpu.FORWARD, gpu.BOTH), ("fibottention", "fibottention, w_max N // 3")
    assert set(found) == {
        *((part, key, name) for part in supports for key in passes for name in names if name != "reference"),
        *(("violin", key, name) for key in passes for name in ("triton", "dense_sdpa", "reference")),
    }
    for (_, _, name), own_record in found.items():
        if name == "flash_window":
            assert "flash_attn is" in own_record["failed"]
        else:
            assert own_record["seconds"][0] > 0
    (copied,) = [own for own in report.summary(gpu.BENCHMARK, content["measured"]) if own["part"] == gpu.COPY]
    rows = {
        (row["part"], row["pass"], row["contender"]): row for row in report.summary(gpu.BENCHMARK, content["measured"])
    }
    row = rows["violin", gpu.FORWARD, "triton"]
    size = 4 * (9 + gpu.PREFIX) * 8 * 2
    assert row["records"][0]["bytes"] == size
    bound = size * copied["seconds"]["median"] / 8192
    assert row["times"][gpu.COPY]["median"] == pytest.approx(row["seconds"]["median"] / bound)
    text = (tmp_path / "table.md").read_text()
    assert "time at most 1.15 times dense_sdpa" in text and "neg_inf, violin: " in text
    # All is done: nothing is computed again. Records of another dtype are not mixed with these.
    assert main(arguments) == 0 and len(checked) == 2
    assert main([*arguments, "--dtype", "float16"]) == 2
    assert "dtype: 'bfloat16' there, 'float16' here" in capsys.readouterr().err


def test_a_wrong_kernel_is_not_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "check", lambda tokens, dtype, device: {"neg_inf": float("nan")})
    assert main(["gpu", *CPU, "--out", str(tmp_path)]) == 1
    assert "WRONG neg_inf: nan, allowed 1e-05" in capsys.readouterr().err
    assert not (tmp_path / "records.json").exists()


def test_a_step_that_fails_is_reported_and_the_others_run(monkeypatch, tmp_path):
    def fails(self, cases, session):
        if cases[0]["part"] == gpu.COPY:
            raise TypeError("no such kernel")
        return [{**case, "seconds": [1.0]} for case in cases]

    monkeypatch.setattr(gpu.Gpu, "step", fails)
    assert main(["gpu", *CPU, "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "records.json").read_text())["measured"]
    assert [own["part"] for own in records if "failed" in own] == [gpu.COPY]
    assert "| TypeError: no such kernel |" in (tmp_path / "table.md").read_text() and len(records) > 10


def test_an_error_of_a_compiler_is_a_reason():
    class CompilationError(Exception):
        pass

    def set_up():
        raise CompilationError("line 1\nline 2")

    found = timing.measure({"own": gpu.any_error(set_up)}, torch.device("cpu"), 1.0, 1, {})
    assert found == {"own": {"failed": "CompilationError: line 1"}}


def test_windows_without_prefix_tokens_get_the_patches_alone():
    seen = []
    spy = dataclasses.replace(
        gpu.gpu_contenders()["flash_window"],
        can_run=lambda problem, trains: None,
        prepare=lambda problem: lambda q, k, v: seen.append(q.shape) or q * k + v,
        seen=None,
    )
    setting = Setting(heads=2, width=8, support=gpu.FIBOTTENTION, prefix=1)
    for trains in (False, True):
        with pytest.raises(RuntimeError, match="WRONG"):
            gpu.operator(spy, setting, Size(16, 1), trains)()
    assert {shape[2] for shape in seen} == {16}


def test_targets_are_of_forward_passes():
    limits = {
        (target.where["part"], target.where["tokens"], target.base): target.limit
        for target in gpu.BENCHMARK.targets({})
    }
    assert limits["fibottention", 4096, gpu.COPY] == 1.5 and limits["violin", 196, "dense_sdpa"] == 1.15
    assert ("fibottention", 1024, gpu.COPY) not in limits
    size = {"tokens": 4096, "batch": 1, "pass": gpu.FORWARD, "part": "fibottention"}
    made = [{**size, "contender": name, "seconds": [own], "memory": 1, "bytes": 1}
            for name, own in (("triton", 1.0), ("flex_window", 2.0), ("natten", 0.5))]  # fmt: skip
    text = gpu.BENCHMARK.notes(report.summary(gpu.BENCHMARK, made), made, {})
    assert text.endswith("4096 patches: 2.00, MISSED (below 1)")


@pytest.mark.parametrize(("prior", "backend"), [("dense", "sdpa"), ({"support": gpu.FIBOTTENTION}, "triton")])
@pytest.mark.parametrize("train", [False, True])
def test_a_model_runs_by_the_backend_asked_for(monkeypatch, prior, backend, train):
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)
    if backend == "triton":
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2}
    whole = gpu_models.preset_config

    def config(preset, pixels, prior):
        own = whole(preset, pixels, prior)
        return type(own)(image_size=pixels, patch_size=16, prior=prior, **small)

    monkeypatch.setattr(gpu_models, "preset_config", config)
    ran = []
    entry = BACKENDS[backend]
    spy = dataclasses.replace(entry, run=lambda call: ran.append(call.q.dtype) or entry.run(call))
    monkeypatch.setitem(BACKENDS, backend, spy)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = Namespace(dtype="bfloat16", device=device)
    gpu_models.model_call("vit_small", prior, 32, 1, train, gpu_models.EAGER, arguments)()
    assert ran == [torch.bfloat16] and "SPARSEPRIOR_BACKEND" not in os.environ


def test_names_of_contenders_are_those_of_attention():
    assert {*commands.GPU_CONTENDERS, *commands.SDPA_KERNELS} <= set(gpu.gpu_contenders())
