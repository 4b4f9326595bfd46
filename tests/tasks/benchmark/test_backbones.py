"""The benchmark of backbones: what a process measures, going on, failures, and the summary."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tasks.benchmark import backbone_process, backbones
from tasks.benchmark.backbones import main, plan, summary, todo

pytestmark = pytest.mark.slow

SETTINGS = {"dtype": "float32", "device": "cpu", "threads": 1, "keep_memory": False}
TINY = ["--models", "vit_tiny", "--priors", "dense", "violin", "--sizes", "32", "--threads", "1", "--device", "cpu"]


def records(out):
    return json.loads((out / "records.json").read_text())["measured"]


def test_a_measurement_names_its_backend_and_leaves_this_process_alone():
    threads = torch.get_num_threads()
    found = backbone_process.measure("vit_tiny", "fibottention", 64, {**SETTINGS, "threads": threads})
    assert found["ran"] in ("cpp", "diagonal", "gather", "sdpa") and found["seconds"] > 0 and found["calls"] >= 1
    from hf_sparseprior import SparsePriorViTBackbone, SparsePriorViTConfig

    model = SparsePriorViTBackbone(SparsePriorViTConfig.from_preset("vit_tiny", image_size=64))
    assert found["weights"] == sum(value.numel() * 4 for value in model.parameters())
    assert torch.get_num_threads() == threads


class Allocates(torch.nn.Module):
    """Takes 10 MiB and keeps 3 of them in its first call, takes 5 MiB in each later one, and gives 1 MiB back."""

    def __init__(self, config):
        super().__init__()
        self.table = None

    def forward(self, pixel_values):
        if self.table is None:
            spare, self.table = torch.ones(7 << 20, dtype=torch.uint8), torch.ones(3 << 20, dtype=torch.uint8)
        else:
            spare = torch.ones(4 << 20, dtype=torch.uint8)
        return SimpleNamespace(feature_maps=torch.ones(1 << 20, dtype=torch.uint8) * spare[0])


def test_memory_is_that_of_tables_and_a_call(monkeypatch):
    monkeypatch.setattr(backbone_process, "preset_family", lambda name: SimpleNamespace(backbone=Allocates))
    found = backbone_process.measure("vit_tiny", "dense", 32, {**SETTINGS, "threads": torch.get_num_threads()})
    # The product has its factor of 1 MiB beside it.
    assert (found["memory"], found["set_up"]) == ((3 + 4 + 2) << 20, (7 + 3 + 2) << 20)
    assert found["weights"] == 0 and found["calls"] > 1 and found["ran"] == ""


def test_rounds_go_through_everything_before_they_start_again():
    wanted = plan(["a", "b"], ["x", "y", "z"], [1, 2], 2)
    assert [entry["round"] for entry in wanted] == [0] * 12 + [1] * 12
    assert [entry["prior"] for entry in wanted[:3]] == ["x", "y", "z"]
    assert [entry["prior"] for entry in wanted[12:15]] == ["y", "z", "x"]
    assert len({tuple(entry.values()) for entry in wanted}) == 24
    done = [{**wanted[0]}, {**wanted[1], "failed": "more than 1 s"}]
    left = todo(wanted, done)
    assert wanted[0] not in left and wanted[1] not in left
    assert not any((e["model"], e["prior"], e["pixels"]) == ("a", "y", 1) for e in left) and len(left) == 21


def test_summary_has_medians_and_ratios_of_the_same_rounds():
    random = np.random.default_rng(0)
    measured = [
        {
            "model": "m", "prior": prior, "pixels": 8, "round": number, "ran": "cpp",
            "seconds": float(random.random()), "memory": int(random.integers(1, 99)),
        }
        for number in range(5)
        for prior in ("dense", "violin")
        if (prior, number) != ("dense", 3)
    ]  # fmt: skip
    dense, violin = summary(measured)
    own = {record["round"]: record for record in measured if record["prior"] == "violin"}
    base = {record["round"]: record for record in measured if record["prior"] == "dense"}
    assert violin["seconds"]["median"] == pytest.approx(np.median([own[n]["seconds"] for n in range(5)]))
    ratios = [own[n]["seconds"] / base[n]["seconds"] for n in (0, 1, 2, 4)]
    assert violin["times_dense"]["median"] == pytest.approx(np.median(ratios))
    assert violin["memory"] == max(record["memory"] for record in own.values())
    assert dense["times_dense"]["median"] == 1 and dense["seconds"]["rounds"] == 4
    text = backbones.table([dense, violin])
    assert f"| {np.median(ratios):.2f} (" in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("benchmark") / "out"
    assert main([*TINY, "--rounds", "1", "--out", str(out)]) == 0
    return out


def test_every_measurement_is_kept_and_more_rounds_go_on(folder, monkeypatch, capsys):
    first = records(folder)
    assert [(r["model"], r["prior"], r["pixels"], r["round"]) for r in first] == [
        ("vit_tiny", "dense", 32, 0), ("vit_tiny", "violin", 32, 0),
    ]  # fmt: skip
    assert all(record["memory"] > 0 for record in first)
    assert (folder / "table.md").read_text().count("| vit_tiny | 32 |") == 2
    assert (folder / "backbones.png").stat().st_size > 5000
    asked = []

    def alone(server, arguments, limit, seconds, stop):
        asked.append(arguments[:3])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {"seconds": 0.5, "calls": 1, "first_call": 0.5, "memory": 7, "weights": 9, "ran": "sdpa"}

    monkeypatch.setattr(backbone_process, "measured_alone", alone)
    assert main([*TINY, "--rounds", "2", "--out", str(folder)]) == 130
    assert len(records(folder)) == 3 and records(folder)[:2] == first
    assert main([*TINY, "--rounds", "2", "--out", str(folder)]) == 0
    assert asked == [("vit_tiny", "violin", 32), ("vit_tiny", "dense", 32), ("vit_tiny", "dense", 32)]
    assert len(records(folder)) == 4
    assert main([*TINY, "--rounds", "2", "--out", str(folder)]) == 0  # nothing is left
    assert len(asked) == 3 and "[1/1]" in capsys.readouterr().out


def test_too_little_memory_or_time_is_a_reason_and_not_tried_again(tmp_path, capsys):
    one = ["--models", "vit_tiny", "--priors", "dense", "--sizes", "512", "--threads", "1", "--device", "cpu"]
    assert main([*one, "--rounds", "2", "--memory-gib", "0.05", "--out", str(tmp_path / "memory")]) == 0
    assert [r["failed"] for r in records(tmp_path / "memory")] == ["more than 0.05 GiB"]
    assert "| more than 0.05 GiB |" in (tmp_path / "memory" / "table.md").read_text()
    assert main([*one, "--rounds", "1", "--seconds", "0.01", "--out", str(tmp_path / "time")]) == 0
    assert [r["failed"] for r in records(tmp_path / "time")] == ["more than 0.01 s"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flag", "less", "more"), [("--seconds", "0.01", "0.02"), ("--memory-gib", "0.05", "0.06")], ids=["time", "memory"]
)
def test_what_ended_at_a_limit_is_tried_again_with_more_of_it(tmp_path, monkeypatch, capsys, flag, less, more):
    one = ["--models", "vit_tiny", "--priors", "dense", "--sizes", "512", "--threads", "1", "--device", "cpu"]
    one += ["--rounds", "1", "--out", str(tmp_path / "out")]
    assert main([*one, flag, less]) == 0
    (failed,) = records(tmp_path / "out")
    found = {"seconds": 0.5, "calls": 1, "first_call": 0.5, "memory": 7, "weights": 9, "ran": "sdpa"}
    monkeypatch.setattr(backbone_process, "measured_alone", lambda *arguments: found)
    assert main([*one, flag, less]) == 0
    assert records(tmp_path / "out") == [failed]
    assert main([*one, flag, more]) == 0
    (now,) = records(tmp_path / "out")
    assert now["seconds"] == 0.5 and "failed" not in now
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "vit_huge"], "vit_huge"),
        (["--priors", "fibotention"], "fibotention"),
        (["--sizes", "0"], "--sizes 0 must be above 0"),
        (["--rounds", "0"], "--rounds 0 must be above 0"),
        (["--seconds", "-1"], "--seconds -1.0 must be above 0"),
        (["--memory-gib", "0"], "--memory-gib 0.0 must be above 0"),
        (["--dtype", "int8"], "--dtype 'int8' must be one of"),
    ],
)
def test_bad_values_are_named(tmp_path, capsys, arguments, message):
    assert main([*TINY, *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1] and not (tmp_path / "out").exists()


def test_other_settings_and_a_second_process_are_refused(folder, capsys):
    assert main([*TINY, "--dtype", "bfloat16", "--out", str(folder)]) == 2
    assert "dtype: 'float32' there, 'bfloat16' here" in capsys.readouterr().err
    content = json.loads((folder / "records.json").read_text())
    other = shutil.copytree(folder, folder.parent / "other")
    content["versions"]["torch"] = "2.0.0"
    (other / "records.json").write_text(json.dumps(content))
    assert main([*TINY, "--out", str(other)]) == 2
    assert "(torch: '2.0.0' there, '" in capsys.readouterr().err
    with backbones.locked(folder / backbones.LOCK) as mine:
        assert mine
        assert main([*TINY, "--out", str(folder)]) == 2
    assert "is in use by another process" in capsys.readouterr().err
