import dataclasses
import json

import pytest

from hf_sparseprior.attention import functional as ops
from tasks.benchmark import attention, commands, report
from tasks.benchmark.contenders import COPY, DENSE, PASSES, Size

pytestmark = pytest.mark.slow

TINY = ["--sizes", "9x2,16x1", "--heads", "2", "--width", "8", "--rounds", "2", "--device", "cpu"]
NAMES = ["--contenders", f"{DENSE},reference,diagonal,gather,{COPY},copy_fresh"]


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch):
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)


def test_results_picture_and_tables(tmp_path, capsys):
    out = tmp_path / "attention.json"
    assert attention.main([*TINY, *NAMES, "--targets", "--memory", "25x1", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for key in (
        "command",
        "environment",
        "settings",
        "versions",
        "hardware",
        "load_average",
        "crossovers",
        "growth_fits",
        "targets",
    ):
        assert key in results
    assert results["hardware"]["cpu"] and results["settings"]["heads"] == 2
    assert [(entry["tokens"], entry["batch"]) for entry in results["sizes"]] == [(9, 2), (16, 1)]
    for entry in results["sizes"]:
        for key in PASSES:
            measured = entry["passes"][key]
            assert measured["chooser_takes"] in ops.BACKENDS and not measured["left_out"]
            assert set(measured["contenders"]) == {DENSE, "reference", "diagonal", "gather", COPY, "copy_fresh"}
            assert measured["input_bytes"] == 4 * entry["batch"] * 2 * entry["tokens"] * 8 * 4
            for name, own in measured["contenders"].items():
                assert own["seconds"]["lower"] <= own["seconds"]["median"] <= own["seconds"]["upper"]
                assert own["seconds"]["rounds"] == 2 and own["seconds"]["median"] > 0
                assert {f"times_{DENSE}", f"times_{COPY}"} <= set(own)
                assert name.startswith("copy") or own["memory"]["call"] >= measured["input_bytes"] / 4
    only_memory = results["memory"][0]["passes"]["forward_backward"]["contenders"]
    assert "seconds" not in only_memory["diagonal"]
    text = capsys.readouterr().out
    assert "9 tokens x 2, forward + backward" in text
    assert "targets of speed are for --heads 12, not 2; --width 64, not 8\n" in text
    rows = results["targets"]
    assert {row["at"] for row in rows} == {"25 x 1"}  # memory alone
    assert {row["backend"] for row in rows} == {"reference", "diagonal", "gather"} and all(
        row["value"] > 0 for row in rows
    )


def test_the_picture_shows_an_earlier_run_too(tmp_path, monkeypatch, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    few = ["--contenders", f"{DENSE},diagonal"]
    assert attention.main([*TINY, *few, "--out", str(first)]) == 0
    drawn = []
    monkeypatch.setattr(report, "draw_times", lambda rows, path, *rest: drawn.extend(rows) or path)
    larger = ["--sizes", "25x1", "--also", str(first), "--out", str(second)]
    assert attention.main([*TINY, *few, *larger]) == 0
    assert [tokens for tokens, _ in drawn[0][0].lines["diagonal"]] == [9, 16, 25]
    assert [entry["tokens"] for entry in json.loads(second.read_text())["sizes"]] == [25]
    for change in (["--width", "4"], ["--dtype", "float64"], ["--support", "window"]):
        assert attention.main([*TINY, *few, *larger, *change]) == 2
        assert f"--also {first} is of another attention ({change[0][2:]}: " in capsys.readouterr().err
    first.write_text("[]")
    assert attention.main([*TINY, *few, *larger]) != 0
    assert f"--also {first} must be a results file" in capsys.readouterr().err
    first.write_bytes(b"\x89PNG")
    assert attention.main([*TINY, *few, *larger]) == 2
    assert f"--also {first} is not JSON" in capsys.readouterr().err


def test_a_wrong_backend_is_not_timed_and_fails(tmp_path, monkeypatch, capsys):
    right = ops.BACKENDS["diagonal"]
    monkeypatch.setitem(
        ops.BACKENDS, "diagonal", dataclasses.replace(right, run=lambda call: (2 * right.run(call)[0], None))
    )
    out = tmp_path / "a.json"
    assert attention.main([*TINY, "--contenders", "diagonal", "--out", str(out)]) == 1
    assert "left out: diagonal, WRONG: the output differs" in capsys.readouterr().out
    assert json.loads(out.read_text())["sizes"][0]["passes"]["forward"]["contenders"] == {}


def test_what_would_be_too_much_is_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attention, "PROBES", (8, 12, 16))
    monkeypatch.setattr(attention, "free_memory", lambda device: 300_000)
    arguments = ["--sizes", "256x1", "--heads", "2", "--width", "8", "--rounds", "1", "--device", "cpu"]
    assert attention.main([*arguments, "--contenders", "reference,diagonal", "--out", str(tmp_path / "a.json")]) == 0
    passes = json.loads((tmp_path / "a.json").read_text())["sizes"][0]["passes"]
    assert "would need about" in passes["forward"]["left_out"]["reference"]
    assert "left out: reference, would need about" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "196"], "--sizes '196': '196' must be two positive numbers, like 196x8"),
        (["--sizes", "0x8"], "'0x8' must be two positive numbers"),
        (["--support", "fibotention"], "fibottention"),
        (["--support", "{name: window, w: -1}"], "w=-1 must be"),
        (["--support", "{name: "], "--support '{name: ' must be a name or a dict in YAML"),
        (["--decay", "violet"], "violin"),
        (["--dtype", "int8"], "--dtype 'int8' must be one of float32, bfloat16, float16, float64"),
        (["--device", "tpu"], "--device 'tpu' must be cpu or cuda"),
        (["--heads", "0"], "--heads 0 must be above 0"),
        (["--threads", "-1"], "--threads -1 must be above 0"),
        (["--prefix-tokens", "-1"], "--prefix-tokens -1 must be 0 or more"),
        (["--contenders", "dense"], "--contenders: 'dense' must be one of dense_sdpa, "),
    ],
)
def test_bad_input_gives_one_line(arguments, message, capsys, tmp_path):
    out = tmp_path / "a.json"
    assert attention.main([*arguments, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not out.exists()


def test_ctrl_c_writes_nothing(monkeypatch, capsys, tmp_path):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(attention, "measure", interrupted)
    assert attention.main([*TINY, *NAMES, "--out", str(tmp_path / "a.json")]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err and not list(tmp_path.iterdir())


def entry_of(tokens, batch, seconds):
    own = {name: {"seconds": {"median": value, "lower": value, "upper": value}} for name, value in seconds.items()}
    for entry in own.values():
        for base in (DENSE, COPY):
            entry[f"times_{base}"] = {"median": entry["seconds"]["median"] / seconds[base]}
    measured = {"contenders": own, "left_out": {}, "input_bytes": 100}
    return {"tokens": tokens, "batch": batch, "passes": dict.fromkeys(PASSES, measured)}


def test_targets_are_compared_with_the_fastest_backend():
    sizes = [entry_of(4096, 1, {DENSE: 2.5, COPY: 0.002, "reference": 9.0, "diagonal": 0.01})]
    rows = attention._speed_targets(sizes, "cpu", "float32")
    found = {(row["pass"], row["what"]): row for row in rows if row["at"] == "4096 x 1"}
    forward = found["forward", "times faster than dense"]
    assert (forward["value"], forward["target"], forward["met"]) == (pytest.approx(250), 200, True)
    bounds = found["forward", "copy bounds"]
    assert (bounds["value"], bounds["backend"], bounds["met"]) == (pytest.approx(5), "diagonal", False)
    assert all(row["value"] is None and row["met"] is None for row in rows if row["at"] != "4096 x 1")
    assert "MISSED" in attention.targets_table(rows) and "not measured" in attention.targets_table(rows)
    assert not attention._speed_targets(sizes, "cpu", "bfloat16")


def test_targets_of_speed_are_for_the_default_attention():
    sizes = [entry_of(196, 8, {DENSE: 2.5, COPY: 0.002, "diagonal": 0.01})]
    results = {"sizes": sizes, "memory": [], "growth_fits": []}
    settings = vars(commands.attention().parse_args([]))
    assert len(attention.compare_with_targets({**results, "settings": settings}, "cpu", "float32")) > 5
    for name, value in (("decay", "violin"), ("width", 32), ("prefix_tokens", 1), ("support", "bigbird")):
        other = {**settings, name: value}
        assert attention.compare_with_targets({**results, "settings": other}, "cpu", "float32") == []
        assert f"--{name.replace('_', '-')} {settings[name]}, not {value}" in attention.without_speed_targets(other)


def test_growth_exponents_are_those_of_the_times():
    growth = [entry_of(size.tokens, 1, {DENSE: 1.0, COPY: 1.0, "diagonal": 1e-6 * size.tokens**1.3})
              for size in attention.GROWTH_SIZES]  # fmt: skip
    fits = {(fit["contender"], fit["pass"]): fit for fit in attention.growth_fits(growth)}
    fit = fits["diagonal", "forward"]
    assert fit["exponent"] == pytest.approx(1.3) and fits[DENSE, "forward"]["exponent"] == pytest.approx(0, abs=1e-9)
    # d log(N log N) / d log N = 1 + 1 / log N, between its values at both ends.
    assert 1 + 1 / 11.1 < fit["n_log_n"] < 1 + 1 / 8.3
    rows = attention._growth_targets({"growth_fits": list(fits.values())})
    assert {(row["backend"], row["met"]) for row in rows} == {("diagonal", False)}


def line(law, sizes=(16, 64, 256, 1024)):
    return [(size, {"median": law(size), "lower": law(size), "upper": law(size)}) for size in sizes]


def test_crossover_of_power_laws():
    dense, sparse = line(lambda n: n**2 / 100), line(lambda n: float(n))
    assert report.crossover(sparse, dense) == pytest.approx((100, 100))
    assert report.crossover_text("x", sparse, dense, "tokens") == "x is faster than dense from 100 tokens on"
    assert report.crossover(dense, sparse) is None
    assert report.crossover_text("x", dense, sparse, "tokens") == "x is not faster than dense at 1024 tokens"
    late = line(lambda n: n / 1000)
    assert report.crossover(late, dense) is None
    assert report.crossover_text("x", late, dense, "tokens") == "x is faster than dense wherever both ran"
    # Sizes that only one of both has do not count.
    assert report.crossover(sparse[:-1], dense[1:]) == pytest.approx((100, 100))


def test_sizes_are_sorted():
    assert report.parse_sizes("--sizes", "1024x2,196x8,196x8") == [Size(196, 8), Size(1024, 2)]
    assert report.parse_sizes("--sizes", "") == []


def test_any_number_of_contenders_is_drawn_each_in_its_own_way(tmp_path):
    spread = {"median": 0.2, "lower": 0.1, "upper": 0.3}
    lines = {name: [(64, spread), (128, spread)] for name in ("dense", "copy", *map(str, range(40)))}
    path = report.draw_times([[report.Panel("forward", lines, "dense", "copy")]], tmp_path / "a.png", "many", "pixels")
    assert path.stat().st_size > 1000
    styles = report._styles([report.Panel("forward", lines, "dense", "copy")])
    looks = [(style["color"], style.get("marker")) for style in styles.values()]
    assert len(set(looks)) == len(looks) == 42
