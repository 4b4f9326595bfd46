"""The benchmark of batches with several sizes: what is drawn, and that every way is timed."""

import json
import math

import pytest
import torch

from hf_sparseprior.attention.packing import Packing
from tasks.benchmark import commands, mixed_sizes
from tasks.benchmark.mixed_sizes import draw_grids, main

TINY = [
    "--preset",
    "vit_tiny",
    "--threads",
    "1",
    "--device",
    "cpu",
    "--images",
    "3",
    "--patches",
    "16",
    "--rounds",
    "2",
]


def test_grids_are_those_asked_for():
    shapes, scales = (draw_grids(kind, 500, 400, 0) for kind in commands.KINDS)
    assert all(height * width <= 400 for height, width in shapes)
    ratios = [height / width for height, width in shapes]
    assert 0.45 < min(ratios) < 0.6 and 1.7 < max(ratios) < 2.2
    assert 0.9 < math.exp(sum(map(math.log, ratios)) / 500) < 1.1
    assert all(height == width for height, width in scales)
    assert min(scales)[0] == 7 and max(scales)[0] == 20  # 49 and 400 patches
    assert draw_grids("shapes", 5, 400, 1) == draw_grids("shapes", 5, 400, 1) != draw_grids("shapes", 5, 400, 2)


@pytest.mark.slow
def test_every_way_is_timed(tmp_path, capsys):
    out = tmp_path / "mixed.json"
    assert main([*TINY, "--kind", "scales", "--priors", "dense", "violin", "--out", str(out)]) == 0
    entries = json.loads(out.read_text())["entries"]
    assert [(e["prior"], e["pass"]) for e in entries] == [
        (prior, way) for prior in ("dense", "violin") for way in mixed_sizes.PASSES.values()
    ]
    grids = draw_grids("scales", 3, 16, 0)
    for entry in entries:
        assert set(entry["contenders"]) == set(mixed_sizes.WAYS) and not entry["left_out"]
        assert all(own["seconds"]["median"] > 0 for own in entry["contenders"].values())
        assert entry["sizes"] == len(set(grids)) and entry["patches"] == sum(a * b for a, b in grids)
        assert entry["difference"] < 1e-4
    assert "packed / alone" in capsys.readouterr().out


def test_other_logits_are_not_timed(monkeypatch):
    config = mixed_sizes.preset_config("vit_tiny", 32, "fibottention")
    model = mixed_sizes.preset_family("vit_tiny").classifier(config).eval()
    images = [torch.randn(3, 32, 16), torch.randn(3, 16, 48)]
    assert mixed_sizes.check_equal(model, images) < 1e-4
    mixed = Packing.in_batch_order
    monkeypatch.setattr(Packing, "in_batch_order", lambda self, parts: mixed(self, parts).flip(0))
    with pytest.raises(ValueError, match="packed images differ by"):
        mixed_sizes.check_equal(model, images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "swin_tiny"], "--preset swin_tiny: SparsePriorSwin takes images of one size"),
        (["--preset", "vit_huge_"], "vit_huge_"),
        (["--priors", "fibotention"], "fibotention"),
        (["--images", "0"], "--images 0 must be above 0"),
    ],
)
def test_bad_values_are_named(tmp_path, capsys, arguments, message):
    assert main([*TINY, *arguments, "--out", str(tmp_path / "x.json")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "x.json").exists()
