"""The table of block sizes: defaults without one, what was tuned with one, and one line where it is damaged."""

import json

import pytest
import torch

triton_sizes = pytest.importorskip("hf_sparseprior.kernels.triton_sizes")
KEY = "NVIDIA H200, triton 3.9.0"


@pytest.fixture
def path(monkeypatch, tmp_path):
    path = tmp_path / "cache" / "table.json"
    monkeypatch.setenv(triton_sizes.VARIABLE, str(path))
    triton_sizes.tuned.cache_clear()
    yield path
    triton_sizes.tuned.cache_clear()


def sizes(kernel="diagonal_forward", width=64, dtype=torch.bfloat16):
    return triton_sizes.block_sizes(kernel, torch.empty(1, 1, 4, width, dtype=dtype))


@pytest.mark.parametrize("kernel", triton_sizes.DEFAULTS)
@pytest.mark.parametrize("width", [1, 5, 64, 80, 256])
def test_defaults(path, kernel, width):
    found = sizes(kernel, width)
    assert set(found) == {"WIDTH", "COLUMNS", "ROWS", "num_warps"}
    assert found["WIDTH"] == width <= found["COLUMNS"] < 2 * width + 1
    assert found["ROWS"] <= triton_sizes.MAX_ROWS
    assert found["ROWS"] * found["COLUMNS"] <= triton_sizes.DEFAULTS[kernel]["elements"]


def test_what_was_tuned_is_kept_and_used_on_its_device_alone(path, monkeypatch):
    entry = triton_sizes.entry_key("diagonal_forward", 2, 64)
    assert triton_sizes.tuned(KEY) == {}
    triton_sizes.keep_tuned(KEY, {entry: {"ROWS": 16, "num_warps": 2}})
    triton_sizes.keep_tuned("another", {entry: {"ROWS": 32, "num_warps": 2}})
    triton_sizes.keep_tuned(KEY, {triton_sizes.entry_key("diagonal_backward", 2, 64): {"ROWS": 8, "num_warps": 1}})
    default = sizes()
    monkeypatch.setattr(triton_sizes, "device_key", lambda device: KEY)
    assert sizes() == {**default, "ROWS": 16, "num_warps": 2}
    assert sizes("diagonal_backward")["ROWS"] == 8
    assert sizes(dtype=torch.float32) == sizes(dtype=torch.float32, kernel="diagonal_forward") != sizes()
    assert sizes(width=65)["ROWS"] == triton_sizes.DEFAULTS["diagonal_forward"]["elements"] // 128
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({KEY: {"diagonal_forward 2 64": {"ROWS": 48, "num_warps": 4}}}),
        json.dumps({KEY: {"diagonal_forward 2 64": {"ROWS": 32}}}),
        json.dumps({KEY: {"diagonal_forward 2 64": {"ROWS": 32, "num_warps": 64}}}),
    ],
)
def test_a_damaged_table_is_named(path, content):
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ValueError, match=r"table\.json is no table of block sizes .*; remove it, or tune again"):
        triton_sizes.tuned(KEY)


def test_a_cpu_has_no_table():
    assert triton_sizes.device_key(torch.device("cpu")) is None and triton_sizes.tuned(None) == {}
