"""Damaged videos: found before a run, named, left out and counted if a setting says so."""

import json
import os
import shutil

import numpy as np
import pytest
import yaml

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")
pytest.importorskip("matplotlib", reason="needs the extra classification")

from hf_sparseprior.cli.video_files import write_video
from tasks.video import evaluate, scan, train
from tasks.video.config import DataConfig
from tasks.video.data import load_data
from tasks.video.scan import drop_corrupt, find_corrupt
from tests.tasks.video.clips import write_videos


@pytest.fixture(autouse=True)
def no_memory_of_other_tests(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_videos(tmp_path_factory.mktemp("videos"))


@pytest.fixture
def damaged(whole, tmp_path):
    """Four kinds of damage in train and one in test, and their names."""
    folder = tmp_path / "videos"
    shutil.copytree(whole, folder)
    left, right = folder / "train" / "left", folder / "train" / "right"
    (left / "00.mkv").write_bytes(b"")
    (left / "02.mkv").write_bytes(b"no video " * 50)
    noise = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    write_video(right / "01.mkv", noise)
    content = (right / "01.mkv").read_bytes()
    (right / "01.mkv").write_bytes(content[: len(content) // 2])
    (right / "03.mkv").unlink()
    (right / "03.mkv").symlink_to(tmp_path / "gone.mkv")
    (folder / "test" / "left" / "04.mkv").write_text("text")
    names = [left / "00.mkv", left / "02.mkv", right / "01.mkv", right / "03.mkv"]
    return folder, {"train": list(map(str, names)), "test": [str(folder / "test" / "left" / "04.mkv")]}


def config_of(folder, **fields):
    return DataConfig(source="folder", path=str(folder), **fields)


def test_every_kind_of_damage_is_found_with_and_without_workers(damaged):
    folder, names = damaged
    paths = load_data(config_of(folder)).splits["train"].paths
    found = find_corrupt(paths)
    assert [str(paths[index]) for index in found] == names["train"]
    kinds = ["is empty", "cannot be decoded", "breaks off: its frames end at", "does not exist"]
    for problem, name, kind in zip(found.values(), names["train"], kinds, strict=True):
        assert problem.startswith(name) and kind in problem and "\n" not in problem
    assert find_corrupt(paths, workers=2) == found


def test_damaged_videos_are_left_out_and_counted(damaged, capsys):
    folder, names = damaged
    data = load_data(config_of(folder, corrupt="skip"))
    before = {split: videos.paths for split, videos in data.splits.items()}
    assert drop_corrupt(data, config_of(folder, corrupt="skip")) == names
    for split, videos in data.splits.items():
        kept = [path for path in before[split] if str(path) not in names.get(split, ())]
        assert videos.paths == kept and len(kept) == len(before[split]) - len(names.get(split, ()))
        assert [("left", "right")[label] for label in videos.labels] == [path.parent.name for path in kept]
    assert data.description.endswith("(20 train, 8 validation, 7 test)")
    error = capsys.readouterr().err
    assert "train: 4 of 24 videos are damaged and left out, [" in error and "] and 1 more" in error
    assert "test: 1 of 8 videos are damaged and left out" in error and "validation" not in error


def test_fatal_names_them_and_unchecked_does_not_look(damaged):
    folder, _ = damaged
    with pytest.raises(
        ValueError, match=r"damaged videos \(train: 4 of 24, .*; test: 1 of 8, .*\); data\.corrupt=skip"
    ):
        drop_corrupt(load_data(config_of(folder)), config_of(folder))
    data = load_data(config_of(folder))
    assert drop_corrupt(data, config_of(folder, corrupt="unchecked")) == {}
    assert len(data.splits["train"].paths) == 24


def test_videos_that_are_too_small_are_no_damage_and_are_named(whole, tmp_path):
    """They are the size of the model's window or larger, or the run ends before it begins; scaled ones fit."""
    folder = tmp_path / "videos"
    shutil.copytree(whole, folder)
    small = folder / "test" / "right" / "05.mkv"
    write_video(small, np.zeros((6, 12, 40, 3), dtype=np.uint8))
    cuts = {"train": ((16, 16), "the model's"), "test": ((14, 14), "data.test_size")}
    for config in (config_of(folder), config_of(folder, corrupt="skip")):
        with pytest.raises(
            ValueError, match=r"05\.mkv: frames of 12x40 pixels must be at least 14x14, data\.test_size"
        ):
            drop_corrupt(load_data(config), config, cuts=cuts)
    for fields in ({"short_side": 16}, {"corrupt": "unchecked"}):
        assert drop_corrupt(load_data(config_of(folder)), config_of(folder, **fields), cuts=cuts) == {}
    assert drop_corrupt(load_data(config_of(folder)), config_of(folder)) == {}  # not what was found for a window


def test_a_split_of_nothing_but_damage_is_refused(whole, tmp_path):
    folder = tmp_path / "videos"
    shutil.copytree(whole, folder)
    for path in (folder / "validation").glob("*/*.mkv"):
        path.write_bytes(b"")
    config = config_of(folder, corrupt="skip")
    with pytest.raises(ValueError, match=r"validation: none of the 8 videos is readable, .*00\.mkv is empty"):
        drop_corrupt(load_data(config), config)


def test_a_scan_is_remembered_until_a_file_changes(damaged, monkeypatch):
    folder, names = damaged
    config, scans = config_of(folder, corrupt="skip"), []
    monkeypatch.setattr(scan, "find_corrupt", lambda *given: scans.append(len(given[0])) or find_corrupt(*given))
    for _ in range(2):
        assert drop_corrupt(load_data(config), config) == names
    assert scans == [24, 8, 8]
    video = folder / "validation" / "left" / "00.mkv"
    os.utime(video, ns=(1, 1))
    assert drop_corrupt(load_data(config), config) == names
    video.write_bytes(b"")
    assert drop_corrupt(load_data(config), config) == {**names, "validation": [str(video)]}
    assert scans == [24, 8, 8, 8, 8]


@pytest.mark.slow
def test_a_run_leaves_them_out_and_says_so(damaged, tmp_path, capsys):
    folder, names = damaged
    content = {
        "data": {"source": "folder", "path": str(folder)},
        "model": {
            **{"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 1, "num_frames": 3},
            **{"num_attention_heads": 4, "intermediate_size": 24},
        },
        "trainer": {
            **{"max_steps": 3, "per_device_train_batch_size": 8, "seed": 0, "disable_tqdm": True, "use_cpu": True},
            **{"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3},
            **{"output_dir": str(tmp_path / "run"), "dataloader_num_workers": 1},
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    command = ["--config", str(tmp_path / "config.yaml")]
    assert train.main(command) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "damaged videos (train: 4 of 24, " in error and not (tmp_path / "run").exists()
    assert train.main([*command, "data.corrupt=broken"]) == 2
    assert "data.corrupt='broken' must be one of fatal, skip, unchecked" in capsys.readouterr().err
    assert train.main([*command, "data.corrupt=skip"]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["corrupt_videos"] == names and np.sum(results["confusion"]) == 7
    printed = capsys.readouterr().out
    told = (
        "trains on 20 clips of 2 classes ['left', 'right'] (folder train), validates on 8 clips (folder validation), "
    )
    assert f"{told}tests on 7 clips" in printed
    # `evaluate` looks at its own split alone.
    for split, count in (("test", 7), ("validation", 8)):
        assert evaluate.main([str(tmp_path / "run"), "--split", split]) == 0
        again = json.loads((tmp_path / "run" / "evaluation" / f"results_{split}.json").read_text())
        assert again["clips"] == count
        assert again["corrupt_videos"] == ({"test": names["test"]} if split == "test" else {})
