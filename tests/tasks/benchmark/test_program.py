"""Every entry at a tiny size: it measures, keeps, reports, goes on, and refuses bad values with one line."""

import ast
import json
from pathlib import Path

import pytest

from tasks.benchmark import commands, report, runner
from tasks.benchmark.__main__ import main
from tests.each import each

TINY = ["--device", "cpu", "--threads", "1", "--rounds", "2", "--seconds", "0.2"]
ALONE = ["--device", "cpu", "--threads", "1", "--rounds", "1", "--seconds", "300"]  # each round is a process
CONTENDERS = ["--contenders", "dense_sdpa,reference,diagonal,gather,copy_bound,copy_fresh"]
SMALL: dict[str, list[str]] = {
    "attention": ["--sizes", "9x2,16x1", *CONTENDERS, "--heads", "2", "--width", "8", *TINY],
    "model": ["--models", "vit_tiny", "--sizes", "48x2", "--priors", "dense", "fibottention@diagonal", *TINY],
    "backbones": ["--models", "vit_tiny", "--priors", "dense", "violin", "--sizes", "32", *ALONE],
    "memory": ["--models", "vit_tiny", "--priors", "dense", "fibottention", "--sizes", "64", *ALONE],
    "rivals": ["--models", "vit_tiny", "--sizes", "64", "--rivals", "dense", "window", "--dtypes", "float32", *ALONE],
    "video": ["--rows", "divided/dense", "joint/transformers", "--frames", "5", "--pixels", "32", *ALONE],
    "chooser": ["--settings", "2", *TINY],
    "predicted": ["--models", "vit_tiny dense 32x1", *TINY],
    "overhead": ["--priors", "fibottention", "--sizes", "2", "--pixels", "96", *TINY],
    "predictor": ["--sizes", "3x2", "--keep-rates", "0.5,0.1", "--heads", "2", "--width", "8", *TINY],
    "mixed_sizes": ["--preset", "vit_tiny", "--images", "3", "--patches", "16", "--priors", "dense", *TINY],
    "training_loop": ["--steps", "2", "--set", "model.num_hidden_layers=1", *ALONE],
}
# These need files or a GPU, and have tests of their own.
ELSEWHERE = {"deployment", "gpu"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)
    from tasks.benchmark import chooser

    monkeypatch.setattr(chooser, "TOKENS", (9, 16))
    report.set_cpu(1, False)


def test_every_entry_is_here_and_is_listed(capsys):
    assert set(SMALL) | ELSEWHERE == set(commands.ENTRIES)
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(f"{name} " in said and line in said for name, (line, *_) in commands.ENTRIES.items())


@each("name", commands.ENTRIES)
def test_help_says_what_an_entry_measures(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    source = Path(report.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    first = ast.get_docstring(ast.parse(source)).splitlines()[0]
    said = capsys.readouterr().out
    assert first in said and "--for-seconds" in said and "--base REV" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_an_entry_measures_reports_and_measures_nothing_twice(name, tmp_path, capsys, monkeypatch):
    command = [name, *SMALL[name], "--out", str(tmp_path)]
    assert main(command) == 0
    content = json.loads((tmp_path / "records.json").read_text())
    assert {"command", "environment", "versions", "hardware", "settings", "measured"} <= content.keys()
    assert content["benchmark"] == name and content["settings"]["threads"] == 1
    benchmark = runner.load(name)
    good = [record for record in content["measured"] if "failed" not in record]
    assert good and all(set(benchmark.keys) <= record.keys() for record in content["measured"])
    rows = report.summary(benchmark, content["measured"])
    assert all(row["seconds"]["rounds"] >= 1 and row["seconds"]["median"] > 0 for row in rows if "seconds" in row)
    table, said = (tmp_path / "table.md").read_text(), capsys.readouterr().out
    assert table.count("\n| ") > len(rows) and table.partition("\n\n")[2].strip() in said
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(type(benchmark), "measure", lambda *_: pytest.fail("measured again"))
    assert main(command) == 0
    assert json.loads((tmp_path / "records.json").read_text()) == content
    (tmp_path / "table.md").unlink()
    assert main([*command, "--report"]) == 0 and (tmp_path / "table.md").read_text() == table


BAD = [
    ("attention", ["--sizes", "196"], "--sizes '196': '196' must be two positive numbers, like 196x8"),
    ("attention", ["--support", "fibotention"], "fibottention"),
    ("attention", ["--support", "{name: window, w: -1}"], "w=-1 must be"),
    ("attention", ["--support", "{name: "], "--support '{name: ' must be a name or a dict in YAML"),
    ("attention", ["--decay", "violet"], "violin"),
    ("attention", ["--dtype", "int8"], "--dtype 'int8' must be one of float32, bfloat16, float16, float64"),
    ("attention", ["--device", "tpu"], "--device 'tpu' must be cpu or cuda"),
    ("attention", ["--heads", "0"], "--heads 0 must be above 0"),
    ("attention", ["--threads", "-1"], "--threads -1 must be above 0"),
    ("attention", ["--prefix-tokens", "-1"], "--prefix-tokens -1 must be 0 or more"),
    ("attention", ["--contenders", "dense"], "--contenders: 'dense' must be one of dense_sdpa, "),
    ("attention", ["--report"], "has no measurements"),
    ("model", ["--models", "vit_tinny"], "preset='vit_tinny' must be one of"),
    ("model", ["--sizes", "40x1"], "40"),
    ("model", ["--priors", "violin@fast"], "backend 'fast' must be one of"),
    ("model", ["--models", "convit_tiny", "--priors", "transformers"], "transformers has no model like convit_tiny"),
    ("backbones", ["--priors", "fibotention"], "fibotention"),
    ("backbones", ["--rounds", "-1"], "--rounds -1 must be above 0"),
    ("backbones", ["--memory-gib", "0"], "--memory-gib 0.0 must be above 0"),
    ("memory", ["--sizes", "40"], "image_size=40 must be a multiple of patch_size=16"),
    ("memory", ["--models", "vit_tinny"], "preset='vit_tinny' must be one of"),
    ("rivals", ["--models", "swin_tiny"], "--models swin_tiny: token merging is written for ViT, not for"),
    ("rivals", ["--rivals", "tensorrt"], "--rivals 'tensorrt' must be one of dense, dense_compiled, onnxruntime"),
    ("rivals", ["--dtypes", "int8"], "--dtypes 'int8' must be one of float32, bfloat16"),
    ("rivals", ["--for-seconds", "0"], "--for-seconds 0.0 must be above 0"),
    ("video", ["--rows", "dense"], "--rows 'dense' must be ATTENTION/PRIOR"),
    ("video", ["--rows", "time/dense"], "attention 'time' must be one of divided, joint, space"),
    ("video", ["--rows", "divided/violin+clip"], "time='clip' needs attention_type='joint_space_time'"),
    ("video", ["--frames", "4", "8"], "--frames 4 must be above 4"),
    ("video", ["--pixels", "30"], "image_size"),
    ("chooser", ["--settings", "0"], "--settings 0 must be above 0"),
    ("chooser", ["--seed", "-1"], "--seed=-1"),
    ("chooser", ["--base", "HEAD"], "--base HEAD: only attention and model are compared"),
    ("predicted", ["--models", "vit_tiny dense 224"], "must be two positive numbers"),
    ("predicted", ["--models", "vit_tiny"], "must be PRESET PRIOR PIXELSxIMAGES"),
    ("overhead", ["--side", "0"], "--side 0 must be above 0"),
    ("overhead", ["--pixels", "40"], "--pixels 40"),
    ("predictor", ["--keep-rates", "2"], "keep_rate=2 must be above 0"),
    ("predictor", ["--keep-rates", "1"], "--keep-rates 1 must be below 1"),
    ("mixed_sizes", ["--preset", "swin_tiny"], "--preset swin_tiny: SparsePriorSwin takes images of one size"),
    ("mixed_sizes", ["--images", "0"], "--images 0 must be above 0"),
    ("training_loop", ["--steps", "1"], "--steps 1 must be 2 or more"),
    ("training_loop", ["--set", "trainer.ema_decay=0.9"], "trainer.ema_decay=0.9 is not in the bare loop"),
    ("gpu", ["--tokens", "200"], "--tokens 200 must be a square number"),
]


@each("name, arguments, message", BAD)
def test_bad_values_are_one_line_and_leave_no_folder(name, arguments, message, tmp_path, capsys):
    out = tmp_path / name
    device = ["--device", "cpu"] if "--device" not in arguments else []
    assert main([name, *SMALL.get(name, []), *device, *arguments, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not out.exists()
