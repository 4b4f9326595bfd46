import json

import pytest

from tasks.benchmark import predictor

TINY = ["--heads", "2", "--width", "8", "--rounds", "2", "--device", "cpu"]


def test_every_way_is_timed(tmp_path, capsys):
    out = tmp_path / "predictor.json"
    assert predictor.main(["--sizes", "3x2,4x1", "--keep-rates", "0.5,0.1", *TINY, "--out", str(out)]) == 0
    entries = json.loads(out.read_text())["entries"]
    assert [(e["tokens"], e["batch"], e["keep_rate"]) for e in entries[::2]] == [
        (9, 2, 0.5), (9, 2, 0.1), (16, 1, 0.5), (16, 1, 0.1),
    ]  # fmt: skip
    for entry in entries:
        names = {predictor.DENSE, predictor.GATHERED, predictor.MASKED}
        names |= {predictor.PREDICTION, predictor.BOTH} if entry["pass"] == "forward" else set()
        assert set(entry["contenders"]) - {predictor.COMPILED} == names and set(entry["left_out"]) <= {
            predictor.COMPILED
        }
        assert all(own["seconds"]["median"] > 0 for own in entry["contenders"].values())
    assert "gather / mask" in capsys.readouterr().out


def test_a_way_that_cannot_run_is_left_out_with_the_reason(tmp_path, capsys):
    out = tmp_path / "predictor.json"
    arguments = ["--sizes", "3x1", "--keep-rates", "0.5", "--dtype", "float64", *TINY, "--out", str(out)]
    assert predictor.main(arguments) == 0
    for entry in json.loads(out.read_text())["entries"]:
        assert predictor.COMPILED in entry["left_out"] and predictor.GATHERED in entry["contenders"]
    assert "9 x 1, 0.5, forward: cpp is left out, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep-rates", "2"], "keep_rate=2 must be above 0"),
        (["--keep-rates", "1"], "--keep-rates 1 must be below 1"),
        (["--sizes", "3"], "must be two positive numbers"),
    ],
)
def test_bad_values(arguments, message, tmp_path, capsys):
    assert predictor.main([*TINY, *arguments, "--out", str(tmp_path / "x.json")]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_is_refused_as_a_file_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(predictor, "measured", lambda *_: pytest.fail("measured"))
    assert predictor.main([*TINY, "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} is a folder; it must be a file" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert predictor.main([*TINY, "--out", str(tmp_path / "file" / "x.json")]) == 2
    assert f"{tmp_path / 'file'} is not a folder" in capsys.readouterr().err
