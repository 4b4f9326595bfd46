"""mm config files: where a run lies, what makes it this run, runs that were begun before results had a version."""

import json
import re
import sys

import pytest

pytest.importorskip("mmengine", reason="the extra `dense` is not installed")

from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.pattern import SUPPORTS
from hf_sparseprior.runs.run_folder import folder_differences
from tasks.common.mm.config import as_json, load_config, run_identity
from tasks.common.parsers import mm_train_parser

TEXT = """
model = dict(type="Net", sizes=(1, 2), parts=[dict(width=3), dict(width=4)], options=dict())
custom_keys = {"head.last": dict(lr=30), "head": dict(lr=3)}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "smoke.py"
    path.write_text(TEXT)
    return path


def test_the_folder_is_output_dir_and_work_dir_is_the_same(file):
    assert load_config("segmentation", file).work_dir == "outputs/segmentation/smoke"
    assert load_config("detection", file).work_dir == "outputs/detection/smoke"
    for name in ("output_dir", "work_dir"):
        assert load_config("detection", file, [f"{name}=here"]).work_dir == "here"
        file.write_text(f"{TEXT}{name} = 'there'\n")
        config = load_config("detection", file)
        assert config.work_dir == "there" and "output_dir" not in config
        assert load_config("detection", file, ["output_dir=here"]).work_dir == "here"


def test_custom_imports_bring_a_support_of_the_users_as_help_says(file, own_file, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        mm_train_parser("segmentation").parse_args(["--help"])
    (line,) = re.findall(r"^custom_imports = .*\)(?=\.$)", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.syspath_prepend(str(own_file.parent))
    monkeypatch.delitem(sys.modules, "cross", raising=False)
    file.write_text(f"{TEXT}{line.replace('tasks.segmentation', 'hf_sparseprior')}\n")  # which need not have mmseg
    load_config("segmentation", file)
    assert "cross" in SUPPORTS and "columns" in DECAYS
    del sys.modules["cross"]


@pytest.mark.parametrize("value", ["dict(a=1,b=2)", "((1,2)"])
def test_a_value_that_mmengine_cannot_read_is_refused_in_one_line(file, value):
    with pytest.raises(ValueError, match=r"^'model\.options=") as found:
        load_config("detection", file, [f"model.options={value}"])
    assert "\n" not in str(found.value)


def test_a_configuration_is_stored_nested(file):
    stored = as_json(load_config("detection", file, ["model.parts.1.width=5"]).to_dict())
    assert stored["model"] == {"type": "Net", "sizes": [1, 2], "parts": [{"width": 3}, {"width": 5}], "options": {}}
    assert stored["custom_keys"] == {"head.last": {"lr": 30}, "head": {"lr": 3}}
    assert json.loads(json.dumps(stored)) == stored


def test_whether_a_run_that_diverges_goes_on_can_be_said_for_every_file_and_makes_no_other_run(file, tmp_path):
    values = [["nonfinite_loss=stop"], ["nonfinite_loss=continue"]]
    stopping, going_on = (run_identity(load_config("detection", file, value)) for value in values)
    assert going_on["config"]["nonfinite_loss"] == "continue"
    for stored in (stopping, run_identity(load_config("detection", file))):
        (tmp_path / "run_config.json").write_text(json.dumps(stored))
        assert folder_differences(tmp_path, going_on) == []


def test_heads_without_a_number_of_classes_have_as_many_as_the_data(tmp_path):
    heads = "model = dict(roi_head=dict(bbox_head=[dict(num_classes=None), dict(num_classes=7)]), neck=None)\n"
    data = 'train_dataloader = dict(dataset=dict(type="{}", data_root="{}"{}))\n'
    file = tmp_path / "own.py"
    file.write_text(heads + data.format("CheckedCocoDataset", tmp_path, ', metainfo=dict(classes=("a", "b", "c"))'))
    numbers = [head.num_classes for head in load_config("detection", file).model.roi_head.bbox_head]
    assert numbers == [3, 7]
    (tmp_path / "classes.txt").write_text("a\n\nb\n")
    file.write_text(heads + data.format("FolderSegmentation", tmp_path, ""))
    assert load_config("segmentation", file).model.roi_head.bbox_head[0].num_classes == 2
    file.write_text(heads + data.format("CheckedCocoDataset", tmp_path, ""))
    with pytest.raises(ValueError, match=r"num_classes=None needs train_dataloader\.dataset\.metainfo\.classes"):
        load_config("detection", file)


def test_a_variable_of_the_file_that_was_used_already_is_no_setting(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("steps = 7\ntrain_cfg = dict(max_iters=steps)\npipeline = [dict(type='Resize')]\n")
    for override in ("steps=3", "pipeline.0.type=Crop"):
        with pytest.raises(ValueError, match=f"'{override}' would do nothing: {override.split('=')[0].split('.')[0]} "):
            load_config("detection", file, [override])
    assert load_config("detection", file, ["train_cfg.max_iters=3"]).train_cfg.max_iters == 3
