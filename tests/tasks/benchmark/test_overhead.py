"""The benchmark of what attention costs besides its work."""

import json
import time

import pytest

from hf_sparseprior.attention.plan import AttentionPlan
from hf_sparseprior.patterns.supports import LayerKey
from tasks.benchmark import overhead
from tasks.benchmark.overhead import main, timed_plans

QUICK = ["--threads", "1", "--device", "cpu", "--rounds", "3", "--budget", "0.2", "--sizes", "2", "--pixels", "96"]


def test_calls_and_new_sizes_are_timed(tmp_path, capsys):
    out = tmp_path / "overhead.json"
    assert main([*QUICK, "--priors", "fibottention", "violin", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert set(results["calls"]) == {overhead.DENSE, "fibottention", "violin"}
    assert all(1e-6 < own["seconds"]["median"] < 1 for own in results["calls"].values())
    assert set(results["layers"]) == {overhead.STOCK, "dense", "fibottention", "violin"}
    assert all(1e-6 < own["median"] < 1 for own in results["layers"].values())
    assert set(results["plans"]) == {"fibottention", "violin"}
    assert all(1e-5 < own["median"] < 1 for own in results["plans"].values())
    assert "microseconds" in (said := capsys.readouterr().out) and "96 px" in said


def test_only_plans_and_tables_count(monkeypatch):
    own_init, own_build = AttentionPlan.__init__, AttentionPlan.build_table

    def slow(plan, name):
        time.sleep(0.02)
        return own_build(plan, name)

    monkeypatch.setattr(AttentionPlan, "build_table", slow)
    with timed_plans() as spent:
        time.sleep(0.05)
        support = {"name": "fibottention", "w_min": 2, "w_max": 4, "modified": False, "sequence": {"name": "wythoff"}}
        plan = AttentionPlan(LayerKey(2, (4, 4)), 0, {**support, "shuffle_seed": None, "mask_fill": "neg_inf"})
        assert spent[0] < 0.02
        plan.build_table("signed_offsets")
    assert 0.02 <= spent[0] < 0.05
    assert AttentionPlan.__init__ is own_init and AttentionPlan.build_table is slow


@pytest.mark.parametrize(
    ("change", "message"),
    [(["--side", "0"], "side"), (["--pixels", "40"], "--pixels 40"), (["--priors", "nothing"], "nothing")],
)
def test_bad_values_are_refused(change, message, tmp_path, capsys):
    assert main([*QUICK, "--out", str(tmp_path / "out.json"), *change]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out.json").exists()
