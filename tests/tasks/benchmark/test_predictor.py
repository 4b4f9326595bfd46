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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--keep-rates", "2"], "keep_rate=2 must be above 0"), (["--sizes", "3"], "must be two positive numbers")],
)
def test_bad_values(arguments, message, tmp_path, capsys):
    assert predictor.main([*TINY, *arguments, "--out", str(tmp_path / "x.json")]) == 2
    assert message in capsys.readouterr().err
