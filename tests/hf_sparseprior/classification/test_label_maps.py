"""Label maps in runs: views against coordinates in pixels, the command and its resumption, runs that use them."""

import copy
import itertools
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hf_sparseprior import SparsePriorViTForImageClassification
from hf_sparseprior.base.files import file_sha256
from hf_sparseprior.classification import label_maps
from hf_sparseprior.classification.config import check_config, load_config
from hf_sparseprior.classification.data import make_datasets
from hf_sparseprior.images import randaugment
from hf_sparseprior.images.augmentation import Augmentation, AugmentationConfig
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.models.pretrained import load_whole_model
from hf_sparseprior.training import Draw, LabelMaps
from hf_sparseprior.training.token_labels import affine_view, map_probabilities
from tasks.classification import label_maps as label_maps_command
from tasks.classification import train as training
from tests.each import each
from tests.processes import ROOT, Started

pytestmark = pytest.mark.slow

CONFIG = {
    "data": {"source": "digits", "limit_train": 100, "limit_validation": 60, "limit_test": 60},
    "model": {
        "image_size": 8, "patch_size": 2, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "initializer_range": 0.1,
    },
    "trainer": {
        "num_train_epochs": 1, "per_device_train_batch_size": 20, "learning_rate": 5e-3, "seed": 3,
        "disable_tqdm": True, "use_cpu": True,
    },
}  # fmt: skip
STUDENT = {"image_size": 16, "patch_size": 4, "stem": "convolution", "stem_channels": 8, "token_classifier": True}


def config_in(folder, **changes):
    config = copy.deepcopy(CONFIG)
    for section, values in changes.items():
        config.setdefault(section, {}).update(values)
    config["trainer"]["output_dir"] = str(folder)
    return config


# ---- views ----------------------------------------------------------------------------------------------------------


def coordinates(width, height):
    """An image whose red and green say where in it a pixel is, from 0 to 255; blue marks it as covered."""
    columns, rows = np.meshgrid((np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height)
    values = np.stack([255 * columns, 255 * rows, np.full_like(rows, 255)], -1)
    return Image.fromarray(values.round().astype(np.uint8))


def check_view(pixels, view, tolerance):
    """The colours (3, height, width) in 0..1 against the places that the view gives; the number of pixels checked."""
    _, height, width = pixels.shape
    rows, columns = np.indices((height, width)) + 0.5
    places = (view @ np.stack([columns / width, rows / height, np.ones_like(rows)]).reshape(3, -1))[:2]
    seen = pixels.reshape(3, -1)
    # Not at the border, nor next to what an operation uncovered.
    checked = ((places > 0.04) & (places < 0.96)).all(0) & (seen[2] > 0.99)
    assert np.abs(seen[:2] - places)[:, checked].max(initial=0) < tolerance
    return checked.sum()


@each("name, share", itertools.product(randaugment.GEOMETRY, [0.4, -1.0]))
def test_geometric_operations_take_pixels_from_where_their_view_says(name, share):
    image = coordinates(60, 40)
    sign = 1.0 if share > 0 else -1.0
    bilinear = Image.Resampling.BILINEAR
    moved = randaugment.OPERATIONS[name](image, abs(share), sign, True, bilinear, (0, 0, 0))
    view = affine_view(randaugment.GEOMETRY[name](share, image), image.size)
    assert not np.allclose(view, np.eye(3))
    assert check_view(np.asarray(moved).transpose(2, 0, 1) / 255, view, 0.01) > 800


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        ((70, 50), {"crop": "none"}),
        ((30, 44), {"crop": "resized", "scale": (0.2, 0.7)}),
        ((70, 50), {"crop": "random", "padding": 6}),
        ((30, 44), {"crop": "random", "padding": 6}),
        ((70, 50), {"crop": "resized", "scale": (0.3, 0.9), "randaugment": "rand-m9-n2-mstd0.5-inc1-p1"}),
    ],
    ids=lambda value: value["crop"] + " changed" * ("randaugment" in value) if isinstance(value, dict) else None,
)
def test_the_view_of_an_augmented_image_is_where_its_pixels_come_from(settings, size, monkeypatch):
    geometric = {name: randaugment.OPERATIONS[name] for name in randaugment.GEOMETRY}
    monkeypatch.setattr(randaugment, "OPERATIONS", geometric)  # colours would hide the coordinates
    augment = Augmentation(
        AugmentationConfig(**settings, flip=0.5, interpolation="bilinear"), (32, 32), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    )
    views, checked = set(), 0
    for epoch in range(8):
        pixels, view = augment.with_view(coordinates(*size), Draw(0, epoch, 0).random(0))
        assert torch.equal(pixels, augment(coordinates(*size), Draw(0, epoch, 0).random(0)))
        checked += check_view(pixels.numpy(), view, 0.03)
        views.add(view.tobytes())
    assert len(views) >= 2 and checked > 2000


# ---- making maps ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    model = {"pooling": "mean", "use_class_token": False}
    training.run(config_in(folder, model=model, trainer={"num_train_epochs": 6}))
    return folder / "model"


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "digits.yaml"
    path.write_text("data: {source: digits, limit_train: 100, limit_validation: 60, limit_test: 60}\n")
    return path


@pytest.fixture(scope="module")
def maps(teacher, data_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("maps") / "whole"
    command = [str(teacher), "--config", str(data_file), "--out", str(out)]
    assert label_maps_command.main([*command, "--images-per-file", "16", "--batch-size", "8"]) == 0
    return out


def test_maps_hold_what_the_teacher_says_of_each_patch(maps, teacher):
    opened = LabelMaps(maps)
    opened.verify()
    header = opened.header
    assert (header.images, header.grid, header.top_k, len(header.files)) == (100, [4, 4], 5, 7)
    assert header.teacher == file_sha256(teacher / "model.safetensors")
    model = load_whole_model(teacher).eval()
    config = check_config(copy.deepcopy(CONFIG))
    data = label_maps.load_data(DataConfig(**config["data"]))
    datasets, _ = make_datasets(data, DataConfig(**config["data"]), model.config)
    for index in (0, 17, 99):
        with torch.no_grad():
            tokens = model.vit(datasets["train"][index]["pixel_values"][None]).last_hidden_state[0]
            expected = model.classifier(tokens).softmax(-1).reshape(4, 4, 10)
        own = map_probabilities(*opened.read(index), 10)
        top = expected.topk(5).indices
        torch.testing.assert_close(own.gather(-1, top), expected.gather(-1, top), atol=1e-3, rtol=0)
        torch.testing.assert_close(own.sum(-1), torch.ones(4, 4), atol=2e-3, rtol=0)


def die_with_the_second_file(arguments):
    """The command, which is killed as soon as it has a second file."""
    replace = os.replace

    def replace_and_die(source, target):
        replace(source, target)
        if Path(target).name == "maps-00001-of-00007.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace_and_die
    label_maps_command.main(arguments)


def test_the_command_goes_on_after_a_kill(maps, teacher, data_file, tmp_path):
    out, log = tmp_path / "killed", tmp_path / "log.txt"
    command = [str(teacher), "--config", str(data_file), "--out", str(out), "--images-per-file", "16"]
    command += ["--batch-size", "8"]
    process = Started(die_with_the_second_file, command, folder=ROOT, log=log, here=True)
    assert process.wait(300) == -signal.SIGKILL, log.read_text()
    done = {path.name: path.stat().st_mtime_ns for path in out.glob("maps-*.safetensors")}
    assert len(done) == 2
    assert label_maps_command.main(command) == 0
    assert all((out / name).stat().st_mtime_ns == stamp for name, stamp in done.items())
    later = [name for name in LabelMaps(out).header.files if name not in done]
    assert all((out / name).read_bytes() == (maps / name).read_bytes() for name in later)
    LabelMaps(out).verify()


@each(
    "change, message",
    [
        (["--top-k", "11"], "--top-k 11 must be between 1 and the 10 classes"),
        (["data.source=fashion"], "data.source='fashion' must be one of"),
        (["data.limit_train=90"], "holds other label maps, they differ in images, data, images_per_file"),
    ],
)
def test_bad_values_give_one_line(change, message, maps, teacher, data_file, capsys):
    before = {path.name: path.read_bytes() for path in maps.iterdir()}
    assert label_maps_command.main([str(teacher), "--config", str(data_file), "--out", str(maps), *change]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert {path.name: path.read_bytes() for path in maps.iterdir()} == before


def test_teachers_with_other_classes_are_refused(teacher, data_file, tmp_path, capsys):
    model = SparsePriorViTForImageClassification.from_pretrained(teacher)
    model.config.id2label = {**model.config.id2label, 3: "three"}
    model.save_pretrained(tmp_path / "renamed")
    command = ["--config", str(data_file), "--out", str(tmp_path / "maps")]
    assert label_maps_command.main([str(tmp_path / "renamed"), *command]) == 2
    assert "are not those of the data" in capsys.readouterr().err
    model.config.id2label = {index: str(index) for index in range(10)}
    model.config.use_class_token, model.config.pooling = True, "class_token_and_mean"
    SparsePriorViTForImageClassification(model.config).save_pretrained(tmp_path / "both")
    assert label_maps_command.main([str(tmp_path / "both"), *command]) == 2
    assert "which a single token cannot give" in capsys.readouterr().err
    assert not (tmp_path / "maps").exists()


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_learns_from_maps(maps, teacher, tmp_path):
    sections = {
        "model": STUDENT,
        "augmentation": {"crop": "resized", "scale": [0.6, 1.0], "flip": 0.5, "mixtoken": 1.0},
        "token_labels": {"path": str(maps)},
    }
    results = training.run(config_in(tmp_path / "run", **sections, trainer={"num_train_epochs": 2}))
    assert results["label_maps_teacher_sha256"] == file_sha256(teacher / "model.safetensors")
    losses = [entry["loss"] for entry in results["history"] if "loss" in entry]
    # Class and dense cross entropy of a model that knows nothing: 1.5 log 10.
    assert len(losses) == 2 and losses[1] < losses[0] < 2 * 1.5 * np.log(10)
    model = load_whole_model(tmp_path / "run" / "model")
    assert model.token_classifier is not None and model.config.token_logits_weight == 0.5
    with pytest.raises(ValueError, match=r"token_labels.weight: None there, 0.4 here"):
        changed = {**sections, "token_labels": {"path": str(maps), "weight": 0.4}}
        training.run(config_in(tmp_path / "run", **changed, trainer={"num_train_epochs": 2}))


LEARNS = {"model": STUDENT, "token_labels": {"path": "{maps}"}}


def test_a_teacher_in_the_configuration_makes_the_maps_first(maps, teacher, tmp_path):
    section = {"path": str(tmp_path / "maps"), "teacher": str(teacher)}
    training.run(config_in(tmp_path / "run", model=STUDENT, token_labels=section, trainer={"max_steps": 1}))
    own, other = LabelMaps(tmp_path / "maps"), LabelMaps(maps)
    assert own.header.data == other.header.data and own.header.teacher == other.header.teacher
    for index in (3, 60):
        assert torch.equal(own.read(index)[0], other.read(index)[0])


@each(
    "sections, message",
    [
        ({"token_labels": {"path": "{maps}"}}, "needs model.token_classifier=true"),
        ({"model": STUDENT}, "has a token_classifier, which would stay untrained"),
        ({**LEARNS, "data": {"limit_train": 90}}, "has label maps of 100 images, the training set 90"),
        ({**LEARNS, "data": {"split_seed": 1}}, "has label maps of other images"),
        ({**LEARNS, "token_labels": {"path": "nowhere"}}, "nowhere is no folder of label maps"),
        ({**LEARNS, "augmentation": {"eval_crop_ratio": 0.9}}, "needs training images that are cut at random"),
    ],
)
def test_maps_that_do_not_go_with_a_run_are_refused_before_anything_is_written(sections, message, maps, tmp_path):
    sections = json.loads(json.dumps(sections).replace("{maps}", str(maps)))
    with pytest.raises((ValueError, OSError), match=message):
        training.run(config_in(tmp_path / "run", **sections))
    assert not (tmp_path / "run").exists()


@each(
    "section, message",
    [
        ({"path": 3}, r"token_labels.path=3 must be the name of a folder"),
        ({"path": "a", "weight": 0}, r"token_labels.weight=0 must be a number above 0"),
        ({"path": "a", "weight": "0.5"}, r"token_labels.weight='0.5' must be a number above 0"),
        ({"teacher": "a"}, r"token_labels.teacher='a' needs token_labels.path"),
        ({"pth": "a"}, r"did you mean 'path'"),
    ],
)
def test_bad_sections_are_named(section, message):
    with pytest.raises(ValueError, match=message):
        check_config({"token_labels": section})


def test_streams_and_mixtures_are_refused():
    stream = {"source": "parquet", "path": "x", "streaming": True}
    with pytest.raises(ValueError, match=r"token_labels.path needs images in any order, not a stream"):
        check_config({"data": stream, "token_labels": {"path": "a"}})
    with pytest.raises(ValueError, match=r"augmentation.mixtoken=1.0 goes with neither mixup nor cutmix"):
        AugmentationConfig(mixtoken=1.0, cutmix=1.0)


def test_the_shipped_recipe_is_lv_vits():
    config = load_config(ROOT / "configs" / "classification" / "imagenet.yaml#lvvit_small")
    augmentation, trainer = config["augmentation"], config["trainer"]
    assert (augmentation["mixtoken"], augmentation["eval_crop_ratio"], augmentation["label_smoothing"]) == (1, 0.9, 0.1)
    assert augmentation["randaugment"] == "rand-m9-mstd0.5-inc1" and augmentation["erasing"] == 0.25
    named = ("learning_rate", "weight_decay", "num_train_epochs", "ema_decay", "per_device_train_batch_size")
    assert [trainer[name] for name in named] == [1.6e-3, 0.05, 300, 0.99992, 128]
    assert trainer["lr_scheduler_kwargs"]["warmup_lr_rate"] * trainer["learning_rate"] == pytest.approx(1e-6)
    assert config["token_labels"]["weight"] == 0.5 and config["model"]["drop_path_rate"] == 0.1
