"""The benchmark of rivals: what contenders compute, that a wrong one is not timed, and what refuses."""

import dataclasses
import gc
from functools import partial

import numpy as np
import pytest
import torch

from hf_sparseprior import SparsePriorViTConfig
from hf_sparseprior.attention.choice import BACKENDS
from tasks.benchmark import commands, contenders_of_rivals, report, rivals
from tasks.benchmark.contenders_of_rivals import RIVALS, Problem, encodes, encodes_windows, in_torch, plainly
from tasks.benchmark.plain_attention import PLAIN, plain_attention

pytestmark = pytest.mark.slow

DTYPES = ["float32", "bfloat16"]
HERE = ("seconds", "calls", "first_call", "memory", "set_up", "ran", "prepared", "counted")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Presets of two narrow layers, and the variables of the process as they were."""

    def config(preset, pixels, prior="dense"):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        return SparsePriorViTConfig(prior=prior, image_size=pixels, patch_size=8, **sizes)

    monkeypatch.setattr(contenders_of_rivals, "preset_config", config)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, str(tmp_path))  # measuring sets them
    yield
    torch.compiler.reset()


def measure(rival, dtype, number=0):
    gc.collect()  # what goes while it is measured would count against it
    entry = {"model": "vit_tiny", "rival": rival, "dtype": dtype, "pixels": 64, "round": number}
    return rivals.measure_rival(entry, {"threads": torch.get_num_threads(), "keep_memory": False})


# ---- contenders -----------------------------------------------------------------------------------------------------


def test_contenders_are_those_that_a_user_would_pick():
    assert list(RIVALS) == [
        *("dense", "dense_compiled", "onnxruntime", "openvino", "tome_90", "tome_50", "window", "window_compiled"),
        *("fibottention", "fibottention_compiled"),
    ]
    assert {name: rival.about for name, rival in RIVALS.items()} == commands.RIVALS  # which --help lists


# Compiling takes longest, and a window is compiled as Fibottention is.
MEASURED = [(name, dtype) for name in RIVALS if not name.endswith("_compiled") for dtype in DTYPES]
MEASURED += [("dense_compiled", "float32"), ("fibottention_compiled", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), MEASURED)
def test_a_contender_is_measured_or_refuses_by_name(small, name, dtype):
    if refused := RIVALS[name].why_not(dtype):
        assert (refused["failed"] and (name, dtype) == ("onnxruntime", "bfloat16")) or "make benchmark" in str(refused)
        if "missing" in refused:
            pytest.skip(refused["failed"])
        return
    found = measure(name, dtype)
    assert set(HERE) <= found.keys() and found["seconds"] > 0 and found["memory"] > 0
    # bfloat16 has 8 bits; what is right is far from the tolerance.
    assert found["difference"] <= (1e-5 if dtype == "float32" else 0.2)
    assert found["difference"] > (0 if dtype == "float32" else 1e-4), "computed in float32"
    assert ("export" in found["prepared"]) == (found["counted"] == "resident") == (name in ("onnxruntime", "openvino"))
    assert found["first_call"] > found["seconds"] or not name.endswith("_compiled")
    if name == "dense":
        assert "difference" not in measure(name, dtype, number=1)


@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [
        *(("pattern", dtype) for dtype in DTYPES),
        *(("scale", dtype) for dtype in DTYPES),
        *(("tokens", "float32"), ("numbers", "bfloat16")),
    ],
)
def test_a_wrong_contender_is_not_timed(small, monkeypatch, wrong, dtype):
    class Wrong(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, pixel_values):
            tokens = self.model(pixel_values)
            return tokens[:, 1:] if wrong == "tokens" else tokens * torch.nan

    def make(problem):
        if wrong == "pattern":
            return encodes_windows(problem)
        model = encodes(problem, "dense")
        if wrong != "scale":
            return Wrong(model)
        for layer in model.model.layers:
            layer.attention.logit_scale = 1.0
        return model

    rival = dataclasses.replace(RIVALS["dense"], prepare=partial(in_torch, make=make))
    monkeypatch.setitem(RIVALS, "dense", rival)
    with pytest.raises(RuntimeError, match=r"^wrong: "):
        measure("dense", dtype)
    assert measure("dense", dtype, number=1)["seconds"] > 0  # a contender is checked in its first round


def test_windows_have_fibottentions_pruning_ratio():
    for pixels in (224, 512):
        problem = Problem("vit_small", pixels, "float32", 1)
        ratios = []
        for prior in (problem.window(), "fibottention"):
            config = contenders_of_rivals.preset_config("vit_small", pixels, prior)
            tokens = config.grid[0] ** 2
            layer = problem.encoder(prior).layers[0].attention
            plan = layer.plan(config.grid, 1)
            pairs = sum(sum(tokens if o == 0 else 2 * (tokens - o) for o in own) for own in plan.offsets)
            ratios.append(100 - 100 * pairs / len(plan.offsets) / tokens**2)
        assert abs(ratios[0] - ratios[1]) <= 100 * 2 / tokens  # a window is whole diagonals


@pytest.mark.parametrize("prior", ["dense", "fibottention", {"support": {"name": "window", "w": 3}}])
def test_plain_attention_is_the_reference(small, prior, monkeypatch):
    problem = Problem("vit_tiny", 160, "float32", 1)  # 400 patches, more than a block of rows
    plain = plainly(problem, partial(encodes, prior=prior))
    monkeypatch.setenv("SPARSEPRIOR_BACKEND", "reference")
    expected = encodes(problem, prior)(problem.image)
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-5)
    assert plain.shape == (1, 401, 32)


def test_plain_attention_does_not_stay_and_knows_what_it_cannot(small):
    problem = Problem("vit_tiny", 64, "float32", 1)
    with pytest.raises(ValueError, match="written without decay"), plain_attention():
        encodes(problem, "violin")(problem.image)
    assert PLAIN not in BACKENDS


def test_memory_of_other_programs_is_what_stays_and_the_peak_of_a_call():
    kept = []

    def set_up():
        kept.append(np.ones(30 << 20, dtype=np.uint8))
        return lambda: np.ones(50 << 20, dtype=np.uint8).sum()

    _, memory = rivals.measure_resident(set_up, torch.device("cpu"))
    # The C library may keep what the first call gave back, so only the sum is certain.
    assert memory.kept + memory.call == pytest.approx(80 << 20, abs=4 << 20)
    assert memory.kept > 26 << 20


def test_a_missing_package_is_a_reason_that_is_looked_for_again(monkeypatch):
    monkeypatch.setattr(contenders_of_rivals, "find_spec", lambda name: None if name == "onnxruntime" else "there")
    refused = RIVALS["onnxruntime"].why_not("float32")
    assert refused == {"failed": "onnxruntime is missing: make benchmark", "missing": True}
    assert "missing" not in RIVALS["onnxruntime"].why_not("bfloat16") and RIVALS["openvino"].why_not("float32") is None
    case = {"model": "vit_tiny", "rival": "onnxruntime", "dtype": "bfloat16", "pixels": 64, "round": 0}
    (record,) = rivals.BENCHMARK.measure([case], None)  # it needs no process
    assert record["failed"].startswith("ONNX Runtime has no bfloat16 kernels")


def test_first_calls_and_differences_are_in_the_table():
    made = [
        {
            **{"model": "m", "pixels": 8, "rival": rival, "dtype": dtype, "round": number, "ran": "x", "seconds": 1.0},
            **{"memory": 3 << 20, "prepared": {"export": 2.0}, "first_call": 1.0 + number},
            **{"counted": "resident" if rival == "openvino" else "torch"},
            **({} if number else {"difference": 0.01}),
        }
        for number in range(5)
        for dtype in DTYPES
        for rival in ("dense", "openvino")
    ]
    rows = report.summary(rivals.BENCHMARK, made)
    assert len(rows) == 4 and all(row["before"] == 7 and row["difference"] == 0.01 for row in rows)
    text = report.table(rivals.BENCHMARK, rows)
    assert text.count("| 3* |") == 2 and text.count("| 3 |") == 2
