"""The same image is seen the same in training and by the pipelines of transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import pipeline

from hf_sparseprior.classification.data import make_datasets
from hf_sparseprior.classification.streaming import StreamCollator
from hf_sparseprior.classification.task import CLASSIFICATION
from hf_sparseprior.images.config import DataConfig, Decoding
from hf_sparseprior.images.data import load_data
from hf_sparseprior.runs.evaluate import evaluate_model
from hf_sparseprior.training import Draw
from tasks.classification import evaluate as evaluation
from tasks.classification import train as training

MODEL = {
    "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "initializer_range": 0.3,
}  # fmt: skip
TRAINER = {"num_train_epochs": 1, "disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": 8}
ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Class folders of JPEG and PNG files in all eight orientations of EXIF, none of them symmetric."""
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (root / label).mkdir()
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[ORIENTATION] = orientation
            pixels = random.integers(0, 256, (4, 5, 3), dtype=np.uint8).repeat(6, 0).repeat(6, 1)
            ending = "png" if orientation % 2 else "jpg"
            Image.fromarray(pixels).save(root / label / f"{orientation}.{ending}", exif=exif)
    return root


def train(data, out):
    """A tiny run; returns its results and the model's folder."""
    config = {"data": data, "model": MODEL, "trainer": {**TRAINER, "output_dir": str(out)}}
    return training.run(config), out / "model"


@pytest.fixture(scope="module")
def ignoring(pictures, tmp_path_factory):
    """A run that takes images as they are stored."""
    data = {"source": "imagefolder", "path": str(pictures), "exif": "ignore"}
    return train(data, tmp_path_factory.mktemp("ignoring") / "run")


def scores(classify, image):
    return [found["score"] for found in sorted(classify(image, top_k=None), key=lambda found: found["label"])]


def trained_on(classify, data):
    """(file, scores of the model for what the run's own data hand it) for each training image."""
    settings = DataConfig(**data)
    dataset = make_datasets(load_data(settings), settings, classify.model.config)[0]["train"]
    for index in range(len(dataset)):
        with torch.no_grad():
            logits = classify.model(dataset[index]["pixel_values"][None]).logits
        yield dataset.images.name(index), logits.softmax(-1)[0].tolist()


@pytest.mark.parametrize("exif", ["apply", "ignore"])
def test_pipelines_see_turned_images_as_training_does(exif, pictures, ignoring, tmp_path):
    chosen = {"source": "imagefolder", "path": str(pictures), **({"exif": exif} if exif == "ignore" else {})}
    results, folder = ignoring if exif == "ignore" else train(chosen, tmp_path / "run")
    assert results["exif"] == json.loads((folder / "preprocessor_config.json").read_text())["exif"] == exif
    card = (folder / "README.md").read_text()
    said = ("EXIF orientation applied" in card, "EXIF orientation ignored" in card)
    assert said == (exif == "apply", exif == "ignore")
    classify = pipeline("image-classification", model=str(folder), device="cpu")
    alike = []
    for file, expected in trained_on(classify, chosen):
        alike.append(scores(classify, file) == pytest.approx(expected, abs=1e-5))
        if exif == "ignore":  # what the card says
            stored = Image.fromarray(np.asarray(Image.open(file).convert("RGB")))
            assert scores(classify, stored) == pytest.approx(expected, abs=1e-5)
    assert all(alike) if exif == "apply" else 0 < sum(alike) < len(alike)


def test_evaluate_sees_images_as_the_model_was_trained(pictures, ignoring, tmp_path):
    """Also where the data say nothing of EXIF, and otherwise where they do."""
    data = {"source": "imagefolder", "path": str(pictures)}
    folder = shutil.copytree(ignoring[1].parent, tmp_path / "run") / "model"
    assert evaluation.main([str(folder.parent)]) == 0  # the run itself serves
    assert (folder.parent / "evaluation" / "results_test.json").is_file()
    config = evaluation.run_config(folder)
    sizes = {}
    for exif in (None, "apply"):
        config["data"] = {**data, **({"exif": exif} if exif else {})}
        split = CLASSIFICATION.read_split(config, "test", CLASSIFICATION.model_class.from_pretrained(folder), folder)
        sizes[exif] = [split.dataset.images.read(index).size for index in range(len(split.dataset))]
    assert set(sizes[None]) == {(30, 24)} and set(sizes["apply"]) == {(30, 24), (24, 30)}
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "exif": "perhaps"}))
    config["data"] = data
    with pytest.raises(ValueError, match=r"preprocessor_config.json: exif='perhaps' must be one of apply, ignore"):
        evaluate_model(CLASSIFICATION, folder, config, "test", tmp_path / "out")


@pytest.mark.parametrize(("exif", "size"), [("apply", (24, 30)), ("ignore", (30, 24))])
def test_streams_turn_images_as_their_data_say(exif, size, pictures):
    collate = StreamCollator(lambda image, draw: image.size, list, decoding=Decoding(exif))
    row = {"image": {"bytes": (pictures / "cat" / "6.jpg").read_bytes(), "path": None}, "label": 0}
    (sample,) = collate([{"row": row, "where": "train", "draw": Draw(0, 0, 0)}])
    assert sample["pixel_values"] == size


def test_the_card_says_how_deep_images_were_scaled(tmp_path):
    random = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for index in range(5):
            deep = random.integers(0, 65536, (16, 16), dtype=np.uint16)
            Image.fromarray(deep).save(tmp_path / "data" / label / f"{index}.png")
    data = {"source": "imagefolder", "path": str(tmp_path / "data")}
    with pytest.raises(ValueError, match="has more than 8 bits a channel"):
        train(data, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    data["depth16"] = "scale"
    _, folder = train(data, tmp_path / "run")
    card = (folder / "README.md").read_text()
    assert "16-bit images divided by 256" in card
    line = next(line for line in card.splitlines() if "astype" in line)
    classify = pipeline("image-classification", model=str(folder), device="cpu")
    for file, expected in trained_on(classify, data):
        image = line.replace("classify(", "(").replace('"image.png"', repr(file))
        seen = eval(image, {"Image": Image, "np": np})
        assert scores(classify, seen) == pytest.approx(expected, abs=1e-5)
        assert scores(classify, file) != pytest.approx(expected, abs=1e-5)
