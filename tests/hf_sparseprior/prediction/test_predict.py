"""`predict`: what it writes is what transformers' own pipelines find; it goes on where it was killed."""

import csv
import fcntl
import json
import os
import signal
import time
from itertools import cycle

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, pipeline

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.adapters import lora_config
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.models import heads
from hf_sparseprior.prediction import inputs, predictors
from hf_sparseprior.prediction import predict as module
from hf_sparseprior.saving.processor import PROCESSOR
from tasks.heads import kinds
from tests.each import each
from tests.hf_sparseprior.models import head_cases
from tests.hf_sparseprior.small import SMALL
from tests.processes import Started, wait_until
from tests.timm_oracle import import_timm

NAMES = {0: "ant", 1: "bee", 2: "cat"}
LABELS = {"id2label": NAMES, "label2id": {name: number for number, name in NAMES.items()}}
TAKE_IMAGES = [name for name, family in FAMILIES.items() if family.takes == "images"]


def photos(folder, count=7):
    """So many images of different sizes below a folder; their paths in order."""
    numbers = np.random.default_rng(0)
    for number in range(count):
        place = folder / ("first" if number % 2 else "second") / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (9 + number, 14, 3), dtype=np.uint8)).save(place)
    return sorted(map(str, folder.rglob("*.png")))


def classifier(folder, name="sparseprior_vit", **options):
    """A saved classifier of three classes whose logits differ between images."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = family.classifier(family.config_class(**SMALL[name], **LABELS, prior="violin", **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def rows_of(path):
    """Rows of a file as (path, labels, probabilities)."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    elif path.suffix == ".parquet":
        from pyarrow.parquet import read_table

        rows = read_table(path).to_pylist()
    else:
        rows = list(csv.DictReader(path.open()))
        for row in rows:
            row["labels"] = [value for name, value in row.items() if name.startswith("label")]
            row["probabilities"] = [float(value) for name, value in row.items() if name.startswith("probability")]
    return [(row["path"], row["labels"], row["probabilities"]) for row in rows]


def expect(rows, model, files):
    """Rows say what transformers' pipeline says."""
    assert [path for path, *_ in rows] == files
    classify = pipeline("image-classification", model=str(model), device="cpu")
    for (_, labels, shares), found in zip(rows, classify(files, top_k=3), strict=True):
        assert labels == [one["label"] for one in found]
        np.testing.assert_allclose(shares, [one["score"] for one in found], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", TAKE_IMAGES)
def test_every_family_as_transformers_pipeline(name, tmp_path):
    classifier(tmp_path / "model", name)
    files = photos(tmp_path / "photos")
    assert main(["predict", str(tmp_path / "model"), str(tmp_path / "photos"), "--out", str(tmp_path / "out.csv")]) == 0
    expect(rows_of(tmp_path / "out.csv"), tmp_path / "model", files)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_every_kind_of_table(ending, tmp_path):
    classifier(tmp_path / "model")
    files = photos(tmp_path / "photos", 3)
    out = tmp_path / f"out.{ending}"
    lines = sp.predict(tmp_path / "model", tmp_path / "photos", out, batch=2)
    assert lines[0] == "looked at 3 images with SparsePriorViT with prior 'violin'"
    expect(rows_of(out), tmp_path / "model", files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", out.name, "photos"]
    sp.predict(tmp_path / "model", files, tmp_path / f"one.{ending}", top=1)
    assert [row[1] for row in rows_of(tmp_path / f"one.{ending}")] == [row[1][:1] for row in rows_of(out)]


def stock(folder):
    model = ViTForImageClassification(ViTConfig(**SMALL["sparseprior_vit"], **LABELS, initializer_range=0.5)).eval()
    sp.apply_prior(model, "violin")
    model.save_pretrained(folder)
    (folder / PROCESSOR).write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}})
    )
    return sp.from_pretrained(ViTForImageClassification, folder)


def adapter(folder):
    peft = pytest.importorskip("peft")
    classifier(folder.with_name("base"))
    base = sp.SparsePriorViTForImageClassification.from_pretrained(folder.with_name("base"))
    model = peft.get_peft_model(base, lora_config(base, r=2))
    model.save_pretrained(folder)
    return base


def in_timm(folder):
    model = import_timm().create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=1).eval()
    return sp.apply_prior(model, "violin")


@pytest.mark.parametrize("make", [stock, adapter, in_timm])
def test_models_of_others(make, tmp_path):
    torch.manual_seed(0)
    model = make(tmp_path / "model")
    files = photos(tmp_path / "photos", 3)
    source = model if make is in_timm else tmp_path / "model"
    sp.predict(source, files, tmp_path / "out.jsonl")
    predictor = predictors.load_predictor(source)
    for file, (_, _, shares) in zip(files, rows_of(tmp_path / "out.jsonl"), strict=True):
        pixels = predictor.prepare([Image.open(file)])
        with torch.no_grad():
            output = model(pixels)
        logits = output if make is in_timm else output.logits
        np.testing.assert_allclose(shares, sorted(logits.softmax(-1)[0].tolist())[::-1], rtol=1e-4)


@pytest.mark.slow
def test_exported_files_find_what_their_model_finds(tmp_path, monkeypatch):
    """Those of torch.export: below."""
    pytest.importorskip("onnxscript")
    monkeypatch.setattr("hf_sparseprior.cli.deployment.latencies", lambda *arguments: ({}, {}, []))
    classifier(tmp_path / "model", num_channels=3)
    files = photos(tmp_path / "photos", 3)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "file"), "--format", "onnx"]) == 0
    sp.predict(tmp_path / "file", files, tmp_path / "out.csv")
    expect(rows_of(tmp_path / "out.csv"), tmp_path / "model", files)
    with pytest.raises(ValueError, match="features='pooled' needs a model"):
        sp.predict(tmp_path / "file", files, tmp_path / "out.npz", features="pooled")


@each(
    "written, said",
    [
        ('{"format": "aoti", "file": "model.aoti.pt2"}', "run-package AOTInductor's, which are code"),
        ('{"format": "onnx", "sparse_prior_format": 2}', r"sparse_prior_format=2: the exported file has format 2"),
    ],
)
def test_packages_and_files_of_a_newer_format_are_refused(written, said, tmp_path):
    (tmp_path / "deployment.json").write_text(written)
    files = photos(tmp_path / "photos", 1)
    with pytest.raises(ValueError, match=said):
        sp.predict(tmp_path, files, tmp_path / "out.csv")


def test_several_labels_and_numbers(tmp_path):
    files = photos(tmp_path / "photos", 2)
    model = classifier(tmp_path / "several", problem_type="multi_label_classification")
    sp.predict(tmp_path / "several", files, tmp_path / "several.jsonl")
    predictor = predictors.load_predictor(tmp_path / "several")
    for file, (_, labels, shares) in zip(files, rows_of(tmp_path / "several.jsonl"), strict=True):
        with torch.no_grad():
            expected = model(predictor.prepare([Image.open(file)])).logits[0].sigmoid()
        assert labels == [NAMES[place] for place in expected.argsort(descending=True).tolist()]
        np.testing.assert_allclose(sorted(shares), sorted(expected.tolist()), rtol=1e-5)
    model = classifier(tmp_path / "number", problem_type="regression")
    sp.predict(tmp_path / "number", files, tmp_path / "number.csv")
    rows = list(csv.DictReader((tmp_path / "number.csv").open()))
    assert list(rows[0]) == ["path", "ant", "bee", "cat"]
    with torch.no_grad():
        expected = model(predictor.prepare([Image.open(files[1])])).logits[0].tolist()
    np.testing.assert_allclose([float(rows[1][name]) for name in NAMES.values()], expected, rtol=1e-4)


# ---- features -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ending"), [*zip(TAKE_IMAGES, cycle(["npz", "parquet"]))])
def test_pooled_features_are_what_the_classifier_takes(name, ending, tmp_path):
    model = classifier(tmp_path / "model", name)
    files = photos(tmp_path / "photos", 3)
    out = tmp_path / f"out.{ending}"
    sp.predict(tmp_path / "model", files, out, features="pooled", batch=2)
    sp.predict(tmp_path / "model", files, tmp_path / "out.jsonl")
    if ending == "npz":
        stored = np.load(out)
        assert stored["paths"].tolist() == files
        features = stored["features"]
    else:
        from pyarrow.parquet import read_table

        table = read_table(out)
        assert table["path"].to_pylist() == files
        features = np.array(table["features"].to_pylist())
    named = ("classifier", "distillation_classifier")
    heads_of = [getattr(model, own) for own in named if getattr(model, own, None) is not None]
    with torch.no_grad():
        logits = [head(torch.as_tensor(features, dtype=torch.float32)) for head in heads_of]
        shares = torch.stack(logits).mean(0).softmax(-1)
    for one, (_, _, expected) in zip(shares, rows_of(tmp_path / "out.jsonl"), strict=True):
        np.testing.assert_allclose(sorted(one.tolist())[::-1], expected, rtol=1e-4)


def test_features_of_patches(tmp_path):
    model = classifier(tmp_path / "model")
    files = photos(tmp_path / "photos", 3)
    for ending in ("npz", "parquet"):
        sp.predict(tmp_path / "model", files, tmp_path / f"out.{ending}", features="patches")
    from pyarrow.parquet import read_table

    predictor = predictors.load_predictor(tmp_path / "model")
    with torch.no_grad():
        pixels = predictor.prepare([Image.open(file) for file in files])
        expected = model.base_model(pixels).last_hidden_state[:, 1:].numpy()
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["features"], expected, atol=1e-5)
    np.testing.assert_allclose(read_table(tmp_path / "out.parquet")["features"].to_pylist(), expected, atol=1e-5)


def test_models_without_a_head_give_features_alone(tmp_path):
    torch.manual_seed(0)
    family = FAMILIES["sparseprior_vit"]
    family.base(family.config_class(**SMALL["sparseprior_vit"])).save_pretrained(tmp_path / "model")
    files = photos(tmp_path / "photos", 2)
    with pytest.raises(ValueError, match="features='pooled' or 'patches'"):
        sp.predict(tmp_path / "model", files, tmp_path / "out.npz")
    sp.predict(tmp_path / "model", files, tmp_path / "out.npz", features="pooled")
    assert np.load(tmp_path / "out.npz")["features"].shape == (2, 8)


# ---- segmentors and detectors ---------------------------------------------------------------------------------------


def with_head(head, folder):
    torch.manual_seed(0)
    model = head_cases.make(head, "sparseprior_vit").eval()
    model.save_pretrained(folder)
    settings = kinds.processor_settings(kinds.KINDS[head], heads.backbone_of(model).config)
    (folder / PROCESSOR).write_text(json.dumps(settings))
    return model


@pytest.mark.parametrize("head", ["upernet", "maskformer"])
def test_masks_are_those_of_transformers(head, tmp_path):
    model = with_head(head, tmp_path / "model")
    files = photos(tmp_path / "photos", 3)
    out = tmp_path / "masks"
    sp.predict(tmp_path / "model", tmp_path / "photos", out, overlay=tmp_path / "over", batch=2)
    rows = list(csv.DictReader((out / "masks.csv").open()))
    assert [row["path"] for row in rows] == files
    predictor = predictors.load_predictor(tmp_path / "model")
    for row in rows:
        image = Image.open(row["path"])
        with torch.no_grad():
            found = model(predictor.prepare([image]))
        (expected,) = predictor.processor.post_process_semantic_segmentation(found, [(image.height, image.width)])
        mask = Image.open(out / row["mask"])
        assert mask.mode == "P" and mask.size == image.size
        assert (np.asarray(mask) == expected.numpy()).mean() > 0.99
        assert Image.open(tmp_path / "over" / row["mask"]).size == image.size
    legend = list(csv.DictReader((out / "legend.csv").open()))
    assert [row["class"] for row in legend] == [model.config.id2label[number] for number in range(len(legend))]
    assert bytes.fromhex(legend[1]["colour"][1:]) == bytes(mask.getpalette()[3:6])
    assert Image.open(out / "legend.png").size[0] >= 220


def test_boxes_are_those_of_transformers(tmp_path):
    model = with_head("detr", tmp_path / "model")
    files = photos(tmp_path / "photos", 3)
    sp.predict(tmp_path / "model", files, tmp_path / "out.json", threshold=0.0, overlay=tmp_path / "over")
    content = json.loads((tmp_path / "out.json").read_text())
    assert [image["file_name"] for image in content["images"]] == files
    predictor = predictors.load_predictor(tmp_path / "model")
    for about in content["images"]:
        image = Image.open(about["file_name"])
        with torch.no_grad():
            found = model(predictor.prepare([image]))
        sides = [(image.height, image.width)]
        (expected,) = predictor.processor.post_process_object_detection(found, threshold=0.0, target_sizes=sides)
        own = [one for one in content["annotations"] if one["image_id"] == about["id"]]
        assert [one["category_id"] for one in own] == expected["labels"].tolist() and own
        for one, box in zip(own, expected["boxes"].tolist(), strict=True):
            left, top, width, height = one["bbox"]
            np.testing.assert_allclose((left, top, left + width, top + height), box, atol=0.02)
    assert len(list((tmp_path / "over").iterdir())) == 3
    sp.predict(tmp_path / "model", files, tmp_path / "none.json", threshold=1.0)
    assert json.loads((tmp_path / "none.json").read_text())["annotations"] == []


# ---- what is looked at ----------------------------------------------------------------------------------------------


def test_lists_tables_files_and_what_is_passed_over(tmp_path, capsys):
    classifier(tmp_path / "model")
    files = photos(tmp_path / "photos", 5)
    (tmp_path / "photos" / "notes.md").write_text("no image")
    (tmp_path / "photos" / "first" / "broken.jpg").write_bytes(b"\xff\xd8 no more")
    relative = [os.path.relpath(file, tmp_path) for file in files]
    (tmp_path / "list.txt").write_text("\n".join(relative) + "\n\n")
    (tmp_path / "table.csv").write_text("id,file,label\n" + "".join(f"1,{file},x\n" for file in relative[:2]))
    (tmp_path / "other.tsv").write_text("id\tpicture\n" + f"1\t{relative[0]}\n")
    found, passed_over = inputs.find_inputs([tmp_path / "photos"])
    assert [own.file for own in found] == sorted([*files, str(tmp_path / "photos" / "first" / "broken.jpg")])
    assert passed_over.found["no image"][0] == 1
    assert [own.file for own in inputs.find_inputs([tmp_path / "list.txt"])[0]] == files
    assert [own.name for own in inputs.find_inputs([tmp_path / "table.csv"])[0]] == relative[:2]
    assert [own.name for own in inputs.find_inputs([tmp_path / "other.tsv"], "picture")[0]] == relative[:1]
    assert [own.name for own in inputs.find_inputs([files[3], files[1], files[3]])[0]] == [files[3], files[1]]
    with pytest.raises(ValueError, match=r"other\.tsv: which column has the paths \(column=\)\? It has id, picture"):
        inputs.find_inputs([tmp_path / "other.tsv"])
    with pytest.raises(ValueError, match="column='no' must be one of id, picture"):
        inputs.find_inputs([tmp_path / "other.tsv"], "no")
    lines = sp.predict(tmp_path / "model", tmp_path / "photos", tmp_path / "out.csv")
    assert "left out: 1 no image" in lines[2] and lines[3].startswith("not readable: 1, listed in ")
    assert [row[0] for row in rows_of(tmp_path / "out.csv")] == files
    (listed,) = csv.DictReader((tmp_path / "out_unreadable.csv").open())
    assert listed["path"].endswith("broken.jpg") and "not a readable image" in listed["reason"]
    command = ["predict", str(tmp_path / "model"), str(tmp_path / "photos"), "--unreadable", "fatal"]
    assert main([*command, "--out", str(tmp_path / "two.csv")]) == 2
    assert "broken.jpg is not a readable image" in capsys.readouterr().err


def test_frames_of_a_video(tmp_path):
    av = pytest.importorskip("av")
    classifier(tmp_path / "model")
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for number in range(7):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 30 * number, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    sp.predict(tmp_path / "model", tmp_path / "clip.mp4", tmp_path / "out.csv", every=3, batch=2)
    rows = rows_of(tmp_path / "out.csv")
    assert [path for path, *_ in rows] == [f"{tmp_path / 'clip.mp4'}#{frame}" for frame in (0, 3, 6)]
    read = inputs.Reader()
    levels = [np.asarray(read(own)).mean() for own in inputs.find_inputs([tmp_path / "clip.mp4"], every=3)[0]]
    np.testing.assert_allclose(levels, (0, 90, 180), atol=3)
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    with pytest.raises(OSError, match=r"bad\.mp4 cannot be decoded"):
        sp.predict(tmp_path / "model", tmp_path / "bad.mp4", tmp_path / "two.csv")


def test_a_sheet_shows_the_surest_and_the_least_sure(tmp_path):
    classifier(tmp_path / "model")
    photos(tmp_path / "photos", 5)
    sp.predict(tmp_path / "model", tmp_path / "photos", tmp_path / "out.csv", sheet=tmp_path / "sheet.png")
    drawn = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert drawn.shape[1] > 900 and drawn.std() > 20


# ---- going on -------------------------------------------------------------------------------------------------------


def test_a_stopped_command_goes_on(tmp_path, monkeypatch, capsys):
    classifier(tmp_path / "model")
    files = photos(tmp_path / "photos")
    out, looked = tmp_path / "out.jsonl", []
    found = module._found

    def counted(predictor, images, *more):
        if len(looked) == 4:
            raise KeyboardInterrupt
        looked.extend(own.name for own, _ in images)
        return found(predictor, images, *more)

    monkeypatch.setattr(module, "_found", counted)
    with pytest.raises(KeyboardInterrupt):
        sp.predict(tmp_path / "model", files, out, batch=2)
    log = tmp_path / "out.jsonl.partial" / module.LOG
    with log.open("ab") as file:
        file.write(b'{"path": "torn')
    monkeypatch.setattr(
        module, "_found", lambda predictor, images, *more: looked.append(7) or found(predictor, images, *more)
    )
    with pytest.raises(ValueError, match=r"out\.jsonl\.partial is of another top; remove it"):
        sp.predict(tmp_path / "model", files, out, top=1)
    settings = json.loads((tmp_path / "model" / PROCESSOR).read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / PROCESSOR).write_text(json.dumps({**settings, "image_mean": [0.1, 0.2, 0.3]}))
    with pytest.raises(ValueError, match=r"out\.jsonl\.partial is of another processor; remove it"):
        sp.predict(tmp_path / "model", files, out, processor=tmp_path / "other")
    with log.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="is being written by another process"):
            sp.predict(tmp_path / "model", files, out)
    lines = sp.predict(tmp_path / "model", files, out, batch=1)
    assert lines[0].startswith("looked at 7 images, 4 of them before") and looked[4:] == [7, 7, 7]
    assert "goes on after 4 images" in capsys.readouterr().err
    expect(rows_of(out), tmp_path / "model", files)
    assert not log.parent.exists()
    with pytest.raises(OSError, match=r"out\.jsonl exists already"):
        sp.predict(tmp_path / "model", files, out)


def slow_predict(model, images, out):
    """A process's command, which takes its time for each batch."""
    found = module._found
    module._found = lambda *given: time.sleep(0.2) or found(*given)
    sp.predict(model, images, out, features="pooled", batch=1)


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path):
    classifier(tmp_path / "model")
    files = photos(tmp_path / "photos", 12)
    out = tmp_path / "out.npz"
    started = Started(
        slow_predict, str(tmp_path / "model"), str(tmp_path / "photos"), str(out), folder=tmp_path, log=tmp_path / "log"
    )
    log = tmp_path / "out.npz.partial" / module.LOG
    wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 4, started)
    os.kill(started.pid, signal.SIGKILL)
    started.wait(60)
    lines = sp.predict(tmp_path / "model", files, out, features="pooled")
    assert " of them before" in lines[0]
    sp.predict(tmp_path / "model", files, tmp_path / "whole.npz", features="pooled")
    np.testing.assert_allclose(np.load(out)["features"], np.load(tmp_path / "whole.npz")["features"], atol=1e-6)


# ---- bad values -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A model and a photo in the working folder."""
    monkeypatch.chdir(tmp_path)
    classifier(tmp_path / "model")
    photos(tmp_path / "photos", 1)
    return tmp_path


@each(
    "options, message",
    [
        ({"out": "out.txt"}, "out=.*out.txt must be a file that ends in .csv or .jsonl or .parquet"),
        ({"top": 0}, "top=0 must be an integer above 0"),
        ({"batch": -1}, "batch=-1 must be an integer above 0"),
        ({"every": 0}, "every=0 must be an integer above 0"),
        ({"threshold": 2.0}, "threshold=2.0 must be from 0 to 1"),
        ({"unreadable": "no"}, "unreadable='no' must be one of skip, fatal"),
        ({"features": "all"}, "features='all' must be one of pooled, patches"),
        ({"features": "pooled"}, "must be a file that ends in .npz or .parquet"),
        ({"sheet": "sheet.jpg"}, "sheet=sheet.jpg must end in .png"),
        ({"overlay": "over"}, "overlay=.*over is for segmentors and detectors"),
        ({"threshold": 0.3}, "threshold=0.3 is for detectors"),
        ({"every": 2}, "every=2 is for videos, and there is none"),
        ({"top": 3, "features": "pooled", "out": "out.npz"}, "top=3 is for classifiers, and .* gives features"),
        ({"column": "x"}, "column='x' is for tables"),
        ({"images": "nowhere"}, "nowhere does not exist"),
        ({"images": "nowhere", "model": "not/at/all"}, "nowhere does not exist"),  # before a model is loaded
        ({"images": "model"}, "no image there"),
        ({"images": "model/config.json"}, "must be a folder, an image, a list"),
        ({"model": "nowhere/at/all"}, "nowhere/at/all does not exist .*; give the folder of a training run"),
        ({"model": "photos"}, "photos is no saved model"),
    ],
)
def test_bad_values(options, message, folders):
    given = {"model": "model", "images": "photos", "out": "out.csv", **options}
    with pytest.raises((OSError, ValueError), match=message):
        sp.predict(**given)
    assert sorted(path.name for path in folders.iterdir()) == ["model", "photos"]


def test_nothing_readable_is_an_error(tmp_path):
    classifier(tmp_path / "model")
    (tmp_path / "one.png").write_bytes(b"no")
    with pytest.raises(OSError, match=r"none of 1 images can be read; the first: .*one\.png"):
        sp.predict(tmp_path / "model", tmp_path / "one.png", tmp_path / "out.csv")


def test_the_hub_is_asked_for_configs_and_safetensors_alone(tmp_path, monkeypatch):
    asked = {}
    classifier(tmp_path / "model")

    def download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(tmp_path / "model")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    files = photos(tmp_path / "photos", 1)
    sp.predict("someone/model", files, tmp_path / "out.csv")
    assert asked == {"someone/model": ["*.json", "*.safetensors"]}
    expect(rows_of(tmp_path / "out.csv"), tmp_path / "model", files)
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "model").num_labels == 3


def test_masks_and_overlays_go_on(tmp_path, monkeypatch):
    with_head("upernet", tmp_path / "model")
    files = photos(tmp_path / "photos", 3)
    found, calls = module._found, []

    def stopped(*given):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return found(*given)

    monkeypatch.setattr(module, "_found", stopped)
    with pytest.raises(KeyboardInterrupt):
        sp.predict(tmp_path / "model", files, tmp_path / "masks", batch=1, overlay=tmp_path / "over")
    assert not (tmp_path / "masks").exists() and not (tmp_path / "over").exists()
    sp.predict(tmp_path / "model", files, tmp_path / "masks", overlay=tmp_path / "over")
    assert len(calls) == 4
    sp.predict(tmp_path / "model", files, tmp_path / "again", overlay=tmp_path / "once_more", batch=1)
    for one, other in (("masks", "again"), ("over", "once_more")):
        names = sorted(path.name for path in (tmp_path / one).iterdir())
        assert names == sorted(path.name for path in (tmp_path / other).iterdir()) and len(names) >= 3
        for name in names:
            assert (tmp_path / one / name).read_bytes() == (tmp_path / other / name).read_bytes()


def test_a_batch_fits_the_memory(tmp_path, monkeypatch):
    classifier(tmp_path / "model")
    predictor = predictors.load_predictor(tmp_path / "model", device="cpu")
    assert module.batch_size(predictor) == module.MOST["cpu"]
    for free, expected in ((8 * predictor.per_image, 4), (1, 1)):
        monkeypatch.setattr(module, "_free_bytes", lambda device, free=free: free)
        assert module.batch_size(predictor) == expected


def test_an_exported_file_of_several_labels_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_sparseprior.cli.deployment.latencies", lambda *arguments: ({}, {}, []))
    classifier(tmp_path / "model", problem_type="multi_label_classification")
    files = photos(tmp_path / "photos", 2)
    sp.export(sp.SparsePriorViTForImageClassification.from_pretrained(tmp_path / "model"), tmp_path / "file", "torch")
    for name in ("model", "file"):
        sp.predict(tmp_path / name, files, tmp_path / f"{name}.jsonl")
    for own, other in zip(rows_of(tmp_path / "file.jsonl"), rows_of(tmp_path / "model.jsonl"), strict=True):
        assert own[:2] == other[:2]
        np.testing.assert_allclose(own[2], other[2], rtol=1e-4)
    with pytest.raises(ValueError, match=r"processor='x' is for models, and .*file says how its images are prepared"):
        sp.predict(tmp_path / "file", files, tmp_path / "out.csv", processor="x")
