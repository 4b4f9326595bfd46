"""The table of block sizes: defaults without one, what was tuned with one, and one line where it is damaged."""

import functools
import json
import logging
from itertools import product
from types import SimpleNamespace

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


WIDTHS = (1, 5, 64, 80, 256)


def test_defaults_along_diagonals(path):
    for kernel, width in product(triton_sizes.DIAGONAL, WIDTHS):
        found = sizes(kernel, width)
        assert set(found) == {"WIDTH", "COLUMNS", "ROWS", "num_warps"}
        assert found["WIDTH"] == width <= found["COLUMNS"] < 2 * width + 1
        assert found["ROWS"] <= triton_sizes.MAX_ROWS
        assert found["ROWS"] * found["COLUMNS"] <= triton_sizes.DIAGONAL[kernel]["elements"]


def test_defaults_over_all_pairs(path):
    kernels = ("decayed_forward", "decayed_backward", "decayed_gradients")
    for kernel, width, dtype in product(kernels, WIDTHS, (torch.bfloat16, torch.float32)):
        found = sizes(kernel, width, dtype)
        assert set(found) == {"WIDTH", "COLUMNS", "ROWS", "KEYS", "num_warps", "num_stages"}
        assert found["WIDTH"] == width <= found["COLUMNS"] <= max(16, 2 * width)
        assert found["ROWS"] * found["KEYS"] * found["COLUMNS"] <= 64 * 128 * 64


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
    assert sizes(width=65)["ROWS"] == triton_sizes.DIAGONAL["diagonal_forward"]["elements"] // 128
    entry, tried = (
        triton_sizes.entry_key("decayed_backward", 4, 16),
        {"ROWS": 16, "KEYS": 16, "num_warps": 2, "num_stages": 3},
    )
    triton_sizes.keep_tuned(KEY, {entry: tried})
    assert sizes("decayed_backward", 12, torch.float32) == {"WIDTH": 12, "COLUMNS": 16, **tried}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kernel", triton_sizes.KERNELS)
def test_a_tuner_keeps_the_fastest_that_is_faster_than_the_default(path, monkeypatch, kernel):
    gpu_tune = pytest.importorskip("tasks.benchmark.gpu_tune")
    q = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16)
    default = sizes(kernel)
    candidates = [" x ".join(map(str, row)) for row in gpu_tune.CANDIDATES[kernel]]
    used = []

    def seconds(calls, best):
        found = {}
        for name, set_up in calls.items():
            found[name] = {"median": 0.5 if name == best else 1.0}
            set_up()()
        return found

    for best in (candidates[0], "none"):
        result = gpu_tune.fastest(
            kernel, q, lambda: used.append(triton_sizes.block_sizes(kernel, q)), functools.partial(seconds, best=best)
        )
        assert list(result["tried"])[1:] == candidates or len(result["tried"]) == len(candidates)
        chosen = None if best == "none" else dict(zip(list(default)[2:], map(int, best.split(" x ")), strict=True))
        assert result["chosen"] == chosen and result["key"] == triton_sizes.entry_key(kernel, 2, 64)
        assert used[0] == default and len(used) == len(result["tried"])
        assert [list(call.values())[2:] for call in used] == [
            list(map(int, name.split(" x "))) for name in result["tried"]
        ]
        used.clear()
    assert sizes(kernel) == default and triton_sizes.TRIED == {}


def test_a_damaged_table_is_named(path):
    entries = [
        ("diagonal_forward", {"ROWS": 48, "num_warps": 4}),
        ("diagonal_forward", {"ROWS": 32}),
        ("diagonal_forward", {"ROWS": 32, "num_warps": 64}),
        ("decayed_forward", {"ROWS": 32, "num_warps": 4}),
        ("decayed_forward", {"ROWS": 32, "KEYS": 32, "num_warps": 4, "num_stages": 9}),
        ("another", {"ROWS": 32, "num_warps": 4}),
    ]
    path.parent.mkdir()
    for content in ("{", "[]", *(json.dumps({KEY: {f"{kernel} 2 64": entry}}) for kernel, entry in entries)):
        path.write_text(content)
        triton_sizes.tuned.cache_clear()
        with pytest.raises(ValueError, match=r"table\.json is no table of block sizes .*; remove it, or tune again"):
            triton_sizes.tuned(KEY)


@pytest.fixture
def card(path, monkeypatch):
    """Makes the GPU one of another compute capability; block sizes of a call on it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(triton_sizes.triton, "__version__", "3.9.0")

    def clear():
        triton_sizes.card_row.cache_clear()
        triton_sizes.device_key.cache_clear()

    def make(*capability):
        clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        q = SimpleNamespace(shape=(1, 1, 4, 64), device=torch.device("cuda", 0), element_size=lambda: 2)
        return lambda kernel: triton_sizes.block_sizes(kernel, q)

    yield make
    clear()


@pytest.mark.parametrize(
    ("capability", "row"),
    [((8, 0), (8, 0)), ((8, 9), (8, 0)), ((9, 0), (9, 0)), ((10, 3), (10, 0)), ((99, 0), (12, 0)), ((7, 0), (8, 0))],
)
def test_a_card_takes_its_row_or_the_nearest_below_and_says_so_once(card, caplog, path, capability, row):
    with caplog.at_level(logging.DEBUG, "hf_sparseprior.kernels"):
        found = card(*capability)
        for kernel in triton_sizes.KERNELS:
            default = triton_sizes.DECAYED[2, 64].get(kernel)
            expected = triton_sizes.CARDS[row].get((2, 64), {}).get(kernel, default)
            assert list(found(kernel).values())[2:] == list(
                expected or triton_sizes.default_sizes(kernel, 2, 64).values()
            )
    own, of_card = (".".join(map(str, version)) for version in (row, capability))
    said = f"cuda:0: block sizes of compute capability {own} for {of_card}; 0 tuned in {path}"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_what_was_tuned_goes_before_the_row_of_the_card(card, path):
    found = card(8, 6)
    default, entry = found("decayed_forward"), triton_sizes.entry_key("decayed_forward", 2, 64)
    tuned = {"ROWS": 16, "KEYS": 16, "num_warps": 2, "num_stages": 1}
    triton_sizes.keep_tuned(KEY, {entry: tuned})
    assert found("decayed_forward") == {**default, **tuned} != default


def test_a_cpu_has_no_table():
    assert triton_sizes.card_row(torch.device("cpu")) == (9, 0)
    assert triton_sizes.device_key(torch.device("cpu")) is None and triton_sizes.tuned(None) == {}
