import json
import zipfile
from pathlib import Path

import pytest

from tasks.common.run_folder import (
    claim,
    config_differences,
    cut_off,
    default_output_dir,
    evaluation_folder,
    finished_results,
    newest_whole,
    stored_config,
)


def test_runs_of_two_tasks_never_share_a_folder_by_default():
    assert default_output_dir("video", "configs/video/smoke.yaml") == "outputs/video/smoke"
    assert default_output_dir("classification", "configs/classification/smoke.yaml") == "outputs/classification/smoke"


def test_evaluation_lies_in_the_run_and_tells_models_of_one_run_apart(tmp_path):
    assert evaluation_folder(tmp_path / "run" / "model") == tmp_path / "run" / "evaluation"
    assert evaluation_folder(tmp_path / "run" / "model_ema") == tmp_path / "run" / "evaluation" / "model_ema"


SAME = {"trainer": {"seed": 1, "output_dir": "a"}, "model": {"prior": {"shuffle_seed": 0}, "depth": None}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"trainer": {"seed": 1, "output_dir": "b"}, "model": {"prior": {"shuffle_seed": 0}}}, []),  # cosmetic, null
        ({"trainer": {"seed": 2}}, ["trainer.seed: 1 there, 2 here"]),
        ({"trainer": {}}, ["trainer.seed: 1 there, None here"]),
        ({"data": {"source": "x"}}, ["data.source: None there, 'x' here"]),
        ({"model": {"prior": {"shuffle_seed": None}}}, ["model.prior.shuffle_seed: 0 there, None here"]),
        ({"model": {"prior": {}}}, ["model.prior.shuffle_seed: 0 there, nothing here"]),
        ({"model": {"prior": "dense"}}, ["model.prior: {'shuffle_seed': 0} there, 'dense' here"]),
        ({"config": {}}, []),
    ],
)
def test_differences_name_the_key_and_both_values(change, expected):
    assert config_differences(SAME, change) == expected


def test_lists_and_nested_sections_are_compared_part_by_part():
    def config(number, workers):
        return {"config": {"hooks": [{"type": "a"}, {"type": "b", "every": number}], "data": {"num_workers": workers}}}

    assert config_differences(config(1, 0), config(1, 8)) == []
    assert config_differences(config(1, 0), config(2, 0)) == ["config.hooks.1.every: 1 there, 2 here"]
    shorter = {"config": {"hooks": [], "data": {}}}
    assert len(config_differences(config(1, 0), shorter)) == 1


def test_an_earlier_form_of_a_stored_configuration_is_the_same_run(tmp_path):
    nested = {"config": {"model": {"layers": [{"width": 3}, {"width": 4}]}, "seed": 1}}
    flat = {"config": {"model.layers.0.width": 3, "model.layers.1.width": 4, "seed": 1}}
    claim(tmp_path / "run", flat)
    assert config_differences(flat, nested) == []
    assert stored_config(tmp_path / "run" / "model") == nested
    (tmp_path / "run" / "results.json").write_text("{}")
    assert finished_results(tmp_path / "run", nested, overwrite=False) == {}
    claim(tmp_path / "clips", {"data": {"motion": {"val": 6}}})
    assert finished_results(tmp_path / "clips", {"data": {"motion": {"validation": 6}}}, overwrite=False) is None
    with pytest.raises(ValueError, match=r"data\.motion\.validation: 6 there, 7 here"):
        finished_results(tmp_path / "clips", {"data": {"motion": {"validation": 7}}}, overwrite=False)


def test_the_newest_whole_checkpoint_counts_numbers_not_letters(tmp_path, capsys):
    for name in ("iter_9.pth", "iter_10.pth", "epoch_2.pth", "last_checkpoint", "other_99.pth", "iter_x.pth"):
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            file.writestr("data", json.dumps(name))
    patterns = ("iter_*.pth", "epoch_*.pth")
    assert newest_whole(tmp_path, patterns, cut_off) == str(tmp_path / "iter_10.pth")
    (tmp_path / "iter_10.pth").write_bytes(b"PK")
    assert newest_whole(tmp_path, patterns, cut_off) == str(tmp_path / "iter_9.pth")
    assert capsys.readouterr().err == f"{tmp_path / 'iter_10.pth'} is skipped: it is cut off\n"
    assert newest_whole(Path(tmp_path / "missing"), patterns, cut_off) is None
