"""Exported models, measured: accuracy against the model's own, what is done twice, and what is refused."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from hf_sparseprior import SparsePriorViTForImageClassification
from hf_sparseprior.cli.runtimes import FORMATS
from hf_sparseprior.saving.processor import PROCESSOR, image_processor_settings
from tasks.benchmark import commands, deployment, deployment_times
from tasks.benchmark.__main__ import main as program
from tasks.benchmark.deployment import unpacked
from tests.each import each
from tests.hf_sparseprior.small import small

pytestmark = pytest.mark.slow
CLASSES = ["cat", "dog", "ship"]


def main(arguments):
    return program(["deployment", *arguments])


def save_model(folder, prior, seed):
    torch.manual_seed(seed)
    names = dict(enumerate(CLASSES))
    wide = {"hidden_size": 64, "intermediate_size": 1024, "patch_size": 4}  # so that weights are most of a file
    config = small(
        "sparseprior_vit", prior=prior, **wide, id2label=names, label2id={name: i for i, name in names.items()}
    )
    SparsePriorViTForImageClassification(config).save_pretrained(folder)
    (folder / PROCESSOR).write_text(json.dumps(image_processor_settings(config)))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: save_model(folder / name, name, 3) for name in ("dense", "fibottention")}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for name in CLASSES:
        (folder / name).mkdir()
        for number in range(7):
            pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def share_of(model, images):
    """Computed by transformers alone, an image at a time."""
    processor, own = AutoImageProcessor.from_pretrained(model), SparsePriorViTForImageClassification
    classifier, right = own.from_pretrained(model).eval(), []
    for file in sorted(images.glob("*/*.png")):
        with torch.no_grad():
            logits = classifier(**processor(Image.open(file), return_tensors="pt")).logits
        right.append(CLASSES[int(logits.argmax())] == file.parent.name)
    return np.mean(right)


def test_every_kind_of_file_is_measured_once(models, images, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    command = ["--images", str(images), "--formats", "torch", "--threads", "1", "--out", str(out)]
    given = [f"{name}={folder}" for name, folder in models.items()]
    assert main([given[0], *command]) == 0
    assert main([*given, *command]) == 0
    printed = capsys.readouterr().out
    assert "[3/3] dense torch int8: " in printed and "[6/6] fibottention torch int8: " in printed
    records = json.loads((out / "records.json").read_text())["measured"]
    kinds = ["float32", "bfloat16", "int8"]
    assert [(record["model"], record["weights"]) for record in records] == [(m, k) for m in models for k in kinds]
    for record in records:
        expected = share_of(models[record["model"]], images)
        assert record["accuracy"]["pytorch"] == pytest.approx(expected)
        assert record["weights"] != "float32" or record["accuracy"]["file"] == pytest.approx(expected)
        assert ("dense" in record["milliseconds"]) == (record["model"] != "dense")
        for name, value in record["milliseconds"].items():
            lower, upper = record["quartiles"][name]
            assert 0 < lower <= value <= upper
    for first in (0, 3):
        whole, half, quarter = (record["bytes"] for record in records[first : first + 3])
        assert half < whole and quarter < whole
    table = (out / "table.md").read_text()
    assert table.count("| fibottention | torch |") == 3 and "21 images" in table
    assert (out / "deployment.png").stat().st_size > 5000
    monkeypatch.setattr(deployment, "deploy", lambda *given, **more: pytest.fail("measured again"))
    assert main([*given, *command]) == 0  # all is there
    other = save_model(tmp_path / "other", "dense", 4)
    assert main([f"dense={other}", *command]) == 2
    assert "has files of another model 'dense'" in capsys.readouterr().err
    labels = tmp_path / "labels"
    shutil.copytree(images, labels)
    one, two, *_ = sorted(labels.iterdir())
    file = next(one.iterdir())
    file.rename(two / f"moved_{file.name}")
    assert main([*given, "--images", str(labels), *command[2:]]) == 2
    assert "has other measurements (images_sha256: " in capsys.readouterr().err


def test_what_a_program_cannot_run_is_said_and_the_others_go_on(models, images, tmp_path, capsys, monkeypatch):
    def refuse(model, out, format_name, weights, labelled):
        if weights == "bfloat16":
            raise ValueError("it cannot be")
        out.mkdir()
        timed = {name: 1.0 for name in ("file", "pytorch")}
        about = {**dict.fromkeys(deployment.KEPT, ""), "accuracy": timed, "milliseconds": timed}
        about["quartiles"] = {name: [1.0, 1.0] for name in timed}
        (out / deployment.DEPLOYMENT).write_text(json.dumps(about))

    monkeypatch.setattr(deployment, "deploy", refuse)
    command = ["--images", str(images), "--formats", "torch", "--threads", "1", "--out", str(tmp_path / "out")]
    assert main([f"own={models['dense']}", *command]) == 0
    assert "[2/3] own torch bfloat16: it cannot be" in capsys.readouterr().out
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| own |")]
    assert [row[4].strip() == "it cannot be" for row in rows] == [False, True, False]


def test_images_of_a_parquet_file_are_those_of_the_folder(images, tmp_path):
    datasets = pytest.importorskip("datasets")
    files = sorted(images.glob("*/*.png"))
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    rows = {
        "img": [{"bytes": file.read_bytes(), "path": None} for file in files],
        "label": [CLASSES.index(file.parent.name) for file in files],
    }
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "own.parquet"))
    (tmp_path / "scratch").mkdir()
    out = unpacked(tmp_path / "own.parquet", tmp_path / "scratch")
    found = sorted(out.glob("*/*.png"))
    assert [file.parent.name for file in found] == [file.parent.name for file in files]
    assert [file.read_bytes() for file in found] == [file.read_bytes() for file in files]
    (tmp_path / "few").mkdir()
    few = sorted(unpacked(tmp_path / "own.parquet", tmp_path / "few", 8).glob("*/*.png"))
    assert [file.read_bytes() for file in few] == [file.read_bytes() for file in files[:8]]
    bare = datasets.Dataset.from_dict({"number": [1, 2]})
    bare.to_parquet(str(tmp_path / "bare.parquet"))
    with pytest.raises(ValueError, match=r"bare\.parquet must have a column of images and one of classes"):
        unpacked(tmp_path / "bare.parquet", tmp_path / "scratch")


def test_all_formats_are_offered():
    assert list(commands.DEPLOYED) == list(FORMATS)


@each(
    "given, options, message",
    [
        (["dense"], [], "'dense' must be NAME=FOLDER"),
        (["={dense}"], [], "must be NAME=FOLDER"),
        (["a={dense}", "a={dense}"], [], "the name 'a' is taken"),
        (["a={images}"], [], "is no saved model"),
        (["a={dense}"], ["--images", "nowhere"], "--images=nowhere does not exist"),
        (["a={dense}"], ["--limit", "3"], "--limit 3 is for a .parquet file"),
        (["a={dense}"], ["--limit", "0"], "--limit 0 must be above 0"),
        (["a={dense}"], ["--threads", "0"], "--threads 0 must be above 0"),
        (["a={dense}"], ["--sizes", "32", "64"], "--sizes 32 64 is for presets, without NAME=FOLDER and --images"),
        (["a={dense}"], ["--weights", "int8"], "--weights int8 is for presets"),
    ],
)
def test_bad_options(models, images, tmp_path, given, options, message, capsys):
    places = {"dense": models["dense"], "images": images}
    models_given = [text.format(**places) for text in given]
    assert main([*models_given, "--images", str(images), "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not os.path.exists(tmp_path / "out")


def test_presets_are_timed_against_pytorch_and_dense_there(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    command = ["--presets", "vit_tiny", "--sizes", "32", "--priors", "fibottention", "--formats", "onnx", "torch"]
    command += ["--weights", "bfloat16", "--rounds", "2", "--threads", "1", "--out", str(out)]
    assert main(command) == 0
    records = {record["contender"]: record for record in json.loads((out / "records.json").read_text())["measured"]}
    assert list(records) == ["PyTorch", "onnx", "onnx dense", "torch", "torch bfloat16", "torch dense"]
    assert all(len(record["seconds"]) == 2 for record in records.values())
    assert records["onnx"]["difference"] < 1e-5 < records["torch bfloat16"]["difference"]
    table = (out / "table.md").read_text()
    assert "| times dense there |" in table and "time at most 1.05 times PyTorch | vit_tiny 32" not in table
    monkeypatch.setattr(deployment_times, "write_model", lambda *given, **more: pytest.fail("measured again"))
    assert main(command) == 0
    monkeypatch.undo()
    monkeypatch.setattr(deployment_times, "differences", lambda exported, call, batches: np.array([1e-4]))
    assert main([*command[:-1], str(tmp_path / "wrong")]) == 1
    assert "is off by 1.0e-04, allowed are 1e-05" in capsys.readouterr().err


def test_models_and_images_go_together(models, tmp_path, capsys):
    for given, message in (
        ([f"own={models['dense']}"], "NAME=FOLDER and --images go together"),
        (["--limit", "3"], "--limit 3 is for saved models with --images"),
    ):
        assert main([*given, "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
