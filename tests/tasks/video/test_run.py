"""Runs on really decoded clips: they learn, go on after a kill, come back, and say what is wrong in one line."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")
pytest.importorskip("matplotlib", reason="needs the extra classification")

from transformers import AutoImageProcessor, AutoModelForVideoClassification, pipeline

from hf_sparseprior import (
    SparsePriorTimesformerConfig,
    SparsePriorViTConfig,
    SparsePriorViTForImageClassification,
)
from tasks.video import compare, data, evaluate, task, train
from tasks.video.config import AugmentationConfig, DataConfig, load_config
from tasks.video.data import load_data, make_dataset
from tasks.video.task import VIDEO, build_model, processor_settings
from tests.configs import shipped
from tests.each import each
from tests.tasks.video.clips import SPLITS, moving, write_videos

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs" / "video"


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return write_videos(tmp_path_factory.mktemp("videos"))


@pytest.fixture
def config_file(videos, tmp_path):
    content = {
        "data": {"source": "folder", "path": str(videos), "cache": True},
        "augmentation": {"random_crop": True, "vertical_flip": 0.5, "brightness": 0.1},
        "model": {
            **{"image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_frames": 5},
            **{"num_attention_heads": 4, "intermediate_size": 64, "initializer_range": 0.2, "prior": "fibottention"},
            **{"time_initializer_range": 0.3, "pooling": "mean"},
        },
        "trainer": {
            **{"num_train_epochs": 12, "per_device_train_batch_size": 8, "learning_rate": 3e-3, "seed": 0},
            **{"warmup_steps": 10, "lr_scheduler_type": "cosine", "max_grad_norm": 1.0},
            **{"output_dir": str(tmp_path / "run"), "disable_tqdm": True},
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def losses(results):
    return [(entry["step"], entry["loss"]) for entry in results["history"] if "loss" in entry]


def test_a_run_learns_and_evaluate_gives_its_metric(config_file, tmp_path, capsys):
    out = tmp_path / "run"
    rarely = [f"trainer.{what}_strategy=steps" for what in ("eval", "save")]
    rarely += [f"trainer.{what}_steps=60" for what in ("eval", "save")]
    command = ["--config", str(config_file), "trainer.num_train_epochs=40", *rarely]
    assert train.main(command) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["metrics"]["test_accuracy"] == 1.0
    assert results["data"].endswith("(24 train, 8 validation, 8 test)") and results["steps"] == 120
    assert {"versions", "hardware", "command", "config", "seconds", "model_sha256"} <= set(results)
    assert np.sum(results["confusion"]) == 8 and losses(results)[-1][1] < losses(results)[0][1]
    for name in ("curves.png", "confusion.png", "clips.png", "model/README.md"):
        assert (out / name).is_file()
    capsys.readouterr()
    assert evaluate.main([str(out / "model")]) == 0
    assert "test_accuracy: 100.00 % of 8 clips" in capsys.readouterr().out
    again = json.loads((out / "evaluation" / "results_test.json").read_text())
    assert again["metrics"]["test_accuracy"] == results["metrics"]["test_accuracy"]
    assert again["confusion"] == results["confusion"]
    assert evaluate.main([str(out / "model"), "data.test_clips=2", "data.test_crops=3"]) == 0  # of other views
    assert json.loads((out / "evaluation" / "results_test.json").read_text()) == again
    [other] = (out / "evaluation").glob("results_test_test_clips-test_crops_*.json")
    assert json.loads(other.read_text())["config"]["data"]["test_crops"] == 3


def test_a_class_that_test_lacks_is_no_matter(videos, config_file, tmp_path):
    copy = tmp_path / "videos"
    shutil.copytree(videos, copy)
    shutil.rmtree(copy / "test" / "left")
    results = train.run(load_config(config_file, [f"data.path={copy}", "trainer.num_train_epochs=1"]))
    assert results["classes"] == ["left", "right"]
    assert sum(results["confusion"][0]) == 0 and sum(results["confusion"][1]) == 4
    for name in ("results.json", "clips.png", "confusion.png", "model/model.safetensors"):
        assert (tmp_path / "run" / name).is_file()


def test_one_frame_is_chance_and_the_prior_changes_the_output(config_file, tmp_path):
    results = train.run(load_config(config_file, ["model.num_frames=1", "trainer.num_train_epochs=1"]))
    assert results["metrics"]["test_accuracy"] == 0.5  # left and right of a place have one middle frame
    folder = tmp_path / "run" / "model"
    sparse = AutoModelForVideoClassification.from_pretrained(folder)
    dense = AutoModelForVideoClassification.from_pretrained(folder, prior="dense")
    pixels = torch.randn(2, 1, 3, 16, 16)
    assert (sparse(pixels).logits - dense(pixels).logits).abs().max() > 1e-3


def test_a_broken_clip_is_named_before_anything_is_written(videos, config_file, tmp_path, capsys):
    copy = tmp_path / "videos"
    shutil.copytree(videos, copy)
    bad = copy / "train" / "left" / "04.mkv"
    bad.write_bytes(b"no video " * 50)
    assert train.main(["--config", str(config_file), f"data.path={copy}"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("python -m tasks.video.train: ") and f"{bad} cannot be decoded" in error
    assert not (tmp_path / "run").exists()


def test_a_model_of_other_classes_is_refused_before_videos_are_decoded(config_file, tmp_path, monkeypatch, capsys):
    model = build_model({**yaml.safe_load(config_file.read_text())["model"]}, ["down", "up"])
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(data, "read_frames", lambda *args, **options: pytest.fail("decoded"))
    (tmp_path / "file").write_text("mine")
    command = [str(tmp_path / "model"), "--config", str(config_file)]
    assert evaluate.main([*command, "--out", str(tmp_path / "file")]) == 2
    assert f"--out={tmp_path}/file: {tmp_path}/file is not a folder" in capsys.readouterr().err
    # The run of another task lies next to the model.
    (tmp_path / "run_config.json").write_text('{"config": {"seed": 0}}')
    assert evaluate.main([command[0], "data.stride=2"]) == 2
    assert "data.path=None must be the folder of the videos" in capsys.readouterr().err
    assert evaluate.main(command) == 2
    assert "the model's classes ['down', 'up'] are not those of the data" in capsys.readouterr().err


@each(
    "overrides, message",
    [
        (["model.num_channels=1"], "model.num_channels=1 must be 3"),
        (["data.test_size=18"], "data.test_size=18"),
        (["augmentation.mixup=1", "trainer.per_device_train_batch_size=3"], "3"),
    ],
)
def test_models_that_do_not_fit_are_refused_before_videos_are_read(
    overrides, message, config_file, monkeypatch, capsys
):
    monkeypatch.setattr(task, "drop_corrupt", lambda *args, **options: pytest.fail("read"))
    assert train.main(["--config", str(config_file), *overrides]) == 2
    assert message in capsys.readouterr().err


BAD = {
    "data.motion={val: 6}": "data.motion={'val': 6} is for data.source motion, not folder",
    "data.source=charades": "data.source='charades' must be one of motion, folder, csv, smarthome, nucla, ntu60",
    "data.path=nowhere": "nowhere/train is missing",
    "data.strid=2": "section 'data' has no key 'strid'; did you mean 'stride'?",
    "data.stride=0": "data.stride=0",
    "data.lists=x": "data.lists='x' is for data.source csv",
    "model.num_frames=0": "num_frames=0",
    "model.prior=fibotention": "'fibotention' is no prior",
    "model.image_model=nowhere": "model.image_model=nowhere is not a folder of a saved model",
    "model.image_size=24": "frames of 20x20 pixels must be at least 24x24, the model's; set data.short_side",
    "augmentation.horizontal_flip=2": "augmentation.horizontal_flip=2",
    "trainer.learning_rate=fast": "trainer.learning_rate='fast' must be a number",
    "tuning.method=lora": "the configuration has no key 'tuning'",
}


@each("override, message", BAD.items())
def test_bad_values_are_one_line(override, message, config_file, tmp_path, capsys):
    assert train.main(["--config", str(config_file), override]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith("python -m tasks.video.train: ")
    assert not (tmp_path / "run").exists()


@each(
    "overrides, message",
    [
        (["data.motion={val: 6}"], r"data\.motion\.val=6 is called data\.motion\.validation now"),
        (["augmentation.horizontal_flip=0.5"], "would make panning left one to the right"),
        (["data.motion={videos: rendered}", "augmentation.vertical_flip=0.5"], "would make what falls rise"),
        (["augmentation.random_place=true"], "would move the middle frame"),
    ],
)
def test_what_makes_no_sense_of_motion_clips_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(CONFIGS / "smoke.yaml", overrides)


def write_lists(videos, lists):
    for split in SPLITS:
        rows = [f"{path.relative_to(videos)},{path.parent.name}" for path in sorted((videos / split).glob("*/*"))]
        (lists / f"{split}.csv").write_text("\n".join(["path,label", *rows]) + "\n")


def test_csv_lists_and_long_videos(videos, tmp_path):
    lists = tmp_path
    write_lists(videos, lists)
    config = DataConfig(source="csv", path=str(videos), lists=str(lists), stride=2)
    data = load_data(config)
    folder = load_data(DataConfig(source="folder", path=str(videos)))
    assert data.classes == ["left", "right"]
    assert set(data.splits["train"].paths) == set(folder.splits["train"].paths)
    (lists / "validation.csv").write_text("path,label\na.mkv,up\n")
    with pytest.raises(ValueError, match="class 'up' of validation is not in train"):
        load_data(config)
    (lists / "validation.csv").write_text("file,label\na.mkv,left\n")
    with pytest.raises(ValueError, match=r"validation\.csv must have the columns path and label"):
        load_data(config)
    for split in SPLITS:  # as a spreadsheet writes them
        (lists / f"{split}.csv").write_text("path,label\na.mkv,up\nb.mkv,down\n", encoding="utf-8-sig")
    data = load_data(config)
    assert data.classes == ["down", "up"] and [path.name for path in data.splits["test"].paths] == ["a.mkv", "b.mkv"]


@each("source", ["folder", "csv"])
def test_the_final_stage_trains_on_all_that_is_not_test(source, videos, tmp_path):
    write_lists(videos, tmp_path)
    lists = {"lists": str(tmp_path)} if source == "csv" else {}
    read = load_data(DataConfig(source=source, path=str(videos), stage="final", **lists)).splits
    files = {split: sorted(videos.glob(f"{split}/*/*")) for split in SPLITS}
    assert read["train"].paths == files["train"] + files["validation"]
    assert read["validation"].paths == files["validation"] and read["test"].paths == files["test"]
    for found in read.values():
        assert [("left", "right")[label] for label in found.labels] == [path.parent.name for path in found.paths]
    with pytest.raises(ValueError, match=r"data\.stage='selection' must be final or null"):
        DataConfig(source="folder", path=str(videos), stage="selection")


def test_augmentation_acts_on_all_frames_alike_and_repeats(videos):
    from hf_sparseprior.training import Draw

    config = DataConfig(source="folder", path=str(videos))
    data = load_data(config)
    small = SparsePriorTimesformerConfig(**{"image_size": 16, "patch_size": 4, "num_frames": 3})
    changes = AugmentationConfig(random_crop=True, vertical_flip=0.5, horizontal_flip=0.5, brightness=0.2, contrast=0.2)
    dataset = make_dataset(data.splits["train"], config, small, changes, seed=3)
    draws = [Draw(1, epoch, 0) for epoch in range(6)]
    first, second = ([dataset[draw]["pixel_values"] for draw in draws] for _ in range(2))
    assert all(one.equal(two) for one, two in zip(first, second, strict=True))
    assert len({one.numpy().tobytes() for one in first}) == 6
    # A clip that stands is still one after it: the same window, flips and light in every frame.
    dataset.frames = lambda index, place, short_side: np.repeat(moving(0, True)[2:3], 3, axis=0)
    for draw in draws:
        pixels = dataset[draw]["pixel_values"]
        assert pixels[0].equal(pixels[1]) and pixels[0].equal(pixels[2])


def test_the_saved_processor_prepares_clips_as_evaluation_does(videos, tmp_path):
    config = DataConfig(source="folder", path=str(videos))
    data = load_data(config)
    model_config = SparsePriorTimesformerConfig(image_size=16, patch_size=4, num_frames=5, image_mean=0.3)
    settings = processor_settings(model_config, None)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    dataset = make_dataset(data.splits["test"], config, model_config)
    frames = list(dataset.frames(0))
    expected = AutoImageProcessor.from_pretrained(tmp_path)(frames, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(dataset[0]["pixel_values"], expected)


def test_pipeline_of_a_saved_model(videos, tmp_path):
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = build_model({**sizes, "intermediate_size": 24, "num_frames": 5}, ["left", "right"])
    model.save_pretrained(tmp_path)
    classify = pipeline("video-classification", model=str(tmp_path))
    scores = classify(str(next((videos / "test" / "left").iterdir())))
    assert {score["label"] for score in scores} == {"left", "right"}


def test_image_models_start_video_runs(config_file, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    image = SparsePriorViTForImageClassification(SparsePriorViTConfig(image_size=16, patch_size=4, **sizes))
    image.save_pretrained(tmp_path / "image")
    model = build_model({"image_model": str(tmp_path / "image"), "num_frames": 3}, ["a", "b", "c"])
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"} and model.config.num_labels == 3
    assert model.vit.layers[0].mlp.fc1.weight.equal(image.vit.layers[0].mlp.fc1.weight)


# ---- configurations -------------------------------------------------------------------------------------------------

# What Section 5.1 of the paper says: frames, sampling, and 94 % of pairs masked with Modified Wythoff, 1.5 % more
# with Wythoff.
TABLE_5 = "experiments/fib_table5.yaml"
ARXIV_TABLE_5 = "experiments/fib_arxiv_table5.yaml"
FULL = [*shipped.runs(TABLE_5), *shipped.runs(ARXIV_TABLE_5)]
PROTOCOLS = {"smarthome_cs": "cs", "smarthome_cv2": "cv2", "nucla_cs": "cs"}


@functools.cache
def built(section):
    """The full model of a section in JSON, made without memory."""
    with torch.device("meta"):
        return build_model({**json.loads(section), "preset": "vit_base"}, [str(number) for number in range(31)])


@each("name", FULL)
def test_full_size_configurations_parse_and_build(name):
    config = load_config(shipped.path(name))
    assert (config["model"]["num_frames"], config["data"]["stride"]) == ((8, 32) if "smarthome" in name else (16, 4))
    cell = name.partition("#")[2].partition("-")[0]
    source = "ntu60" if name.startswith(ARXIV_TABLE_5) else cell.partition("_")[0]
    assert (config["data"]["source"], config["data"]["protocol"]) == (source, PROTOCOLS.get(cell, "cs"))
    assert config["data"]["stage"] == "final"
    assert config["trainer"]["num_train_epochs"] == 15 and config["trainer"]["per_device_train_batch_size"] == 32
    section = {key: value for key, value in config["model"].items() if key != "image_model"}
    model = built(json.dumps(section))
    # TimeSformer's 121.4 million: ViT-B's 85.8, and for each of 12 layers a norm, four projections and one after them.
    backbone = sum(parameter.numel() for parameter in model.vit.parameters())
    assert backbone == 85_798_656 + 12 * (5 * (768 * 768 + 768) + 2 * 768) + config["model"]["num_frames"] * 768
    ratios = {"dense": 0.0, "bigbird": 94.0, "fibottention": 95.5, "fibottention-modified": 94.0}
    row = name.partition("#")[2].removeprefix(f"{cell}-" if cell in PROTOCOLS else "")
    if source == "ntu60":  # counted with windows of 1..65; the older paper says "only 6 %" are left
        ratios |= {"fibottention": 97.3, "fibottention-modified": 95.6}
    assert model.config.pruning_ratio == pytest.approx(ratios[row], abs=0.6)


def test_there_is_a_configuration_for_every_cell_of_table_5():
    assert len(FULL) == 12 + 4
    assert [len(compare.load_comparison(shipped.path(cell)).configs) for cell in shipped.cells(TABLE_5)] == [4, 4, 4]


def test_the_smoke_run_has_a_folder_of_its_own_and_comparisons_name_the_variant(tmp_path):
    assert VIDEO.load_config(CONFIGS / "smoke.yaml")["trainer"]["output_dir"] == "outputs/video/smoke"
    comparison = compare.load_comparison(CONFIGS / "motion.yaml")
    assert comparison.configs["single-frame"]["model"]["num_frames"] == 1
    path = tmp_path / "bad.yaml"
    path.write_text(f"base: {CONFIGS / 'smoke.yaml'}\nseeds: [0]\nvariants:\n  odd: {{model: {{num_frames: 0}}}}\n")
    with pytest.raises(ValueError, match=r"bad.yaml, variant 'odd': num_frames=0"):
        compare.load_comparison(path)
