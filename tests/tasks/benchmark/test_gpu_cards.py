"""Whether kernels fit on a card: compiled for a drawn few, and what is said where one does not."""

import argparse
from importlib.util import find_spec

import pytest

from tasks.benchmark import gpu_cards

LAUNCH = {"capability": 86, "dtype": "bfloat16", "width": 64, "case": "neg_inf", "name": "_forward_rows"}
NEEDS = {"shared": 99 * 1024, "spilled": gpu_cards.SPILLED, "registers": 255, "tensor_memory": 512, "occupancy": 1 / 12}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("capability", "dtype", "width", "name", "kernels"),
    [
        (86, "bfloat16", 64, "all pairs, decay learns", 6),
        (100, "float16", 64, "all pairs, decay", 5),
    ],
)
def test_kernels_fit_on_other_cards(capability, dtype, width, name, kernels):
    launches = gpu_cards.compiled(capability, [dtype], [width], [name])
    assert len({launch["name"] for launch in launches}) == kernels
    assert [gpu_cards.too_much(launch) for launch in launches] == [None] * len(launches)
    assert all(16 <= launch["registers"] <= 255 and launch["occupancy"] > 0 for launch in launches)


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ({}, None),
        ({"shared": 99 * 1024 + 1}, "101377 bytes of shared memory, and a block may have 101376"),
        ({"spilled": 129}, "129 bytes of a thread spill, and at most 128 are accepted"),
        ({"tensor_memory": 513}, "513 columns of tensor memory, and there are 512"),
        ({"capability": 80, "shared": 163 * 1024}, None),
        ({"capability": 90, "shared": 228 * 1024}, "233472 bytes of shared memory, and a block may have 232448"),
    ],
)
def test_what_is_too_much(needs, expected):
    assert gpu_cards.too_much({**LAUNCH, **NEEDS, **needs}) == expected


def test_what_does_not_fit_is_named_after_the_table_is_written(tmp_path, monkeypatch):
    def compiled(capability, *which):
        return [{**LAUNCH, **NEEDS, "capability": capability, "shared": 100 * 1024}]

    monkeypatch.setattr(gpu_cards, "compiled", compiled)
    arguments = argparse.Namespace(cards=["9.0", "8.6"], out=tmp_path)
    message = r"_forward_rows \(neg_inf; capability 8.6, bfloat16, width 64\): 102400 bytes of shared memory"
    with pytest.raises(ValueError, match=message):
        gpu_cards.check_cards(arguments)
    table = (tmp_path / "cards.md").read_text()
    assert "| 9.0 | bfloat16 | 64 | 1 | 102400 of 232448, `_forward_rows` |" in table
    gpu_cards.check_cards(argparse.Namespace(cards=["9.0"], out=tmp_path))
