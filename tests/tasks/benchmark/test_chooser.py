"""The check of the chooser: what is drawn, that a bad choice shows, and that a stopped command goes on."""

import json

import pytest

from hf_sparseprior.attention.choice import BACKENDS, register_backend, unregister_backend
from hf_sparseprior.attention.dense import reference
from tasks.benchmark import chooser
from tasks.benchmark.chooser import draw, main
from tasks.benchmark.records import RECORDS, TABLE

QUICK = ["--rounds", "3", "--budget", "0.05", "--threads", "1", "--device", "cpu"]


def test_settings_are_always_the_same_and_of_every_kind():
    drawn = draw(60, 0)
    assert drawn == draw(60, 0) and drawn[:30] == draw(30, 0) != draw(30, 1)[:30]
    for key, values in (("dtype", 2), ("trains", 2), ("decay", 2), ("heads", 3), ("prefix", 2)):
        assert len({setting[key] for setting in drawn}) == values
    assert {json.dumps(setting["support"]) for setting in drawn} == {json.dumps(own) for own in chooser.SUPPORTS}
    assert all(setting["support"] != "dense" or setting["decay"] for setting in drawn)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(chooser, "TOKENS", (9, 16))


def test_a_bad_choice_shows_and_a_stopped_command_goes_on(small, tmp_path, capsys):
    def slow(request):
        for _ in range(20):
            found = reference(request)
        return found

    command = ["--out", str(tmp_path / "out"), *QUICK]
    assert main([*command, "--settings", "1"]) == 0
    first = json.loads((tmp_path / "out" / RECORDS).read_text())["measured"]
    register_backend("toy_slow", can_run=lambda request: None, run=slow, priority=1000)
    try:
        assert main([*command, "--settings", "3"]) == 0
    finally:
        unregister_backend("toy_slow")
    records = json.loads((tmp_path / "out" / RECORDS).read_text())["measured"]
    assert records[0] == first[0] and len(records) == 3
    assert [record["setting"] for record in records] == draw(3, 0)
    for record in records:
        # Which of two fast ones was faster in these few rounds depends on what else the machine does.
        assert set(record["milliseconds"]) <= {*BACKENDS, "toy_slow"} and record["slower"] >= 1
        assert record["best"] in record["milliseconds"] and record["best"] != "toy_slow"
    assert all(record["chosen"] == "toy_slow" and record["slower"] > chooser.ALLOWED for record in records[1:])
    assert "[1/2]" in capsys.readouterr().out
    assert "toy_slow" in (tmp_path / "out" / TABLE).read_text()
    assert (tmp_path / "out" / chooser.PICTURE).stat().st_size > 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--settings", "0"], "settings"),
        (["--seed", "-1"], "--seed=-1"),
        (["--budget", "0"], "budget"),
        (["--threads", "0"], "threads"),
    ],
)
def test_bad_values_are_refused(change, message, tmp_path, capsys):
    assert main(["--out", str(tmp_path / "out"), *QUICK, *change]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_another_seed_is_refused_in_the_folder(small, tmp_path, capsys):
    command = ["--out", str(tmp_path), *QUICK, "--settings", "1"]
    assert main(command) == 0 and main([*command, "--seed", "1"]) == 2
    assert "seed: 0 there, 1 here" in capsys.readouterr().err
