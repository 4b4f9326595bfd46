import json
import shutil
from argparse import Namespace

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil

from hf_sparseprior import SparsePriorViTForImageClassification
from tasks.analysis import resolution, trained
from tasks.analysis.trained import model_sha256
from tests.each import each
from tests.tasks.analysis.saved_runs import CLASSES, accuracy_by_evaluate, natural_image, write_images, write_run

pytestmark = pytest.mark.slow

# The middle 28 of 32 pixels, as augmentation.eval_crop_ratio=0.875 saves it.
CROP = {
    "image_processor_type": "BitImageProcessor",
    "do_center_crop": True,
    "crop_size": {"height": 28, "width": 28},
    "size": {"shortest_edge": 32},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    data = write_images(folder / "images")
    return [
        write_run(folder / "violin", data, "fibottention+violin", 0),
        write_run(folder / "cropped", data, "dense", 1, **CROP),
    ]


def prepared(file, size, cropped):
    """What the image processors do, with Pillow and numpy alone."""
    image = Image.open(file)
    if cropped:
        whole = round(size * 32 / 28)
        image = image.resize((whole, whole), Image.Resampling.BICUBIC)
        start = (whole - size) // 2
        image = image.crop((start, start, start + size, start + size))
    else:
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    pixels = (np.asarray(image) / 255 - 0.5) / 0.5
    return torch.tensor(pixels, dtype=torch.float32).permute(2, 0, 1)[None]


def test_accuracies_are_those_of_a_plain_loop_and_of_evaluate(runs, tmp_path, capsys):
    assert resolution.main([*map(str, runs), "--sizes", "42", "28", "21", "42", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    results = json.loads((tmp_path / "resolution.json").read_text())
    files = sorted((runs[0].parent / "images" / "test").glob("*/*.png"))
    for run, model in zip(runs, results["models"], strict=True):
        network = SparsePriorViTForImageClassification.from_pretrained(run / "model").eval()
        assert list(model["accuracy"]) == ["21", "28", "42"] and model["trained_at"] == [28, 28]
        for size, accuracy in model["accuracy"].items():
            right = 0
            for file in files:
                with torch.no_grad():
                    logits = network(prepared(file, int(size), run.name == "cropped")).logits
                right += CLASSES[int(logits.argmax())] == file.parent.name
            assert accuracy == right / len(files)
        assert model["accuracy"]["28"] == accuracy_by_evaluate(run, tmp_path / run.name)
        assert f"{100 * model['accuracy']['28']:.2f}*" in text
    assert text.count("*") == 2 + 1  # the two at 28 and the legend


def test_the_picture_rings_the_size_trained_at(runs, tmp_path):
    for sizes, rings in ((["14", "35"], False), (["14", "28", "35"], True)):
        assert resolution.main([str(runs[0]), "--sizes", *sizes, "--out", str(tmp_path)]) == 0
        image = np.asarray(Image.open(tmp_path / "resolution.png").convert("RGB")).astype(int)
        assert ((np.abs(image - np.array([255, 0, 0])).sum(-1) < 60).sum() > 10) == rings


def test_sizes_that_nobody_gave_are_the_papers(runs, tmp_path):
    assert resolution.main([str(runs[0]), "--limit", "3", "--out", str(tmp_path)]) == 0
    (model,) = json.loads((tmp_path / "resolution.json").read_text())["models"]
    # 144 to 512 of a model trained at 224 are 18 to 64 at 28, in whole patches of 7.
    assert list(model["accuracy"]) == ["21", "28", "35", "42", "49", "56", "63"]


def test_a_processor_that_scales_both_sides_and_cuts_keeps_its_share():
    """As DeiT's: to 256x256, of which the middle 224x224 are kept."""
    square = {"height": 224, "width": 224}
    deit = DeiTImageProcessorPil(size={"height": 256, "width": 256}, crop_size=square, do_center_crop=True)
    image = Image.fromarray(natural_image(0, 48, 40))
    for size, whole in ((224, 256), (112, 128)):
        pixels = resolution.resized_processor(deit, size)(image, return_tensors="pt")["pixel_values"][0]
        edge = (whole - size) // 2
        cut = image.resize((whole, whole), Image.Resampling.BICUBIC).crop((edge, edge, edge + size, edge + size))
        mean, std = (np.array(values) for values in (deit.image_mean, deit.image_std))
        np.testing.assert_allclose(pixels.permute(1, 2, 0), (np.asarray(cut) / 255 - mean) / std, atol=1e-5)


def test_an_adapter_beside_its_model(runs, tmp_path):
    base, adapter = runs[0] / "model", tmp_path / "adapter"
    (tmp_path / "run_config.json").write_text((runs[0] / "run_config.json").read_text())
    model = SparsePriorViTForImageClassification.from_pretrained(base)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    tuned.save_pretrained(adapter)
    assert resolution.main([str(adapter), "--sizes", "28", "35", "--out", str(tmp_path / "out")]) == 0
    (found,) = json.loads((tmp_path / "out" / "resolution.json").read_text())["models"]
    files = sorted((runs[0].parent / "images" / "test").glob("*/*.png"))
    with torch.no_grad():
        logits = [tuned.eval()(pixel_values=prepared(file, 35, False)).logits for file in files]
    right = sum(CLASSES[int(own.argmax())] == file.parent.name for own, file in zip(logits, files, strict=True))
    assert found["accuracy"]["35"] == right / len(files)
    before = model_sha256(adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 99}))
    changed = model_sha256(adapter)
    moved = shutil.copytree(base, tmp_path / "base")
    SparsePriorViTForImageClassification(model.config).save_pretrained(moved)
    settings["base_model_name_or_path"] = str(moved)
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert len({before, changed, model_sha256(adapter)}) == 3


@each(
    "sizes, message",
    [
        (["30"], "--sizes 30 must be a multiple of the models' patch of 7 pixels, as 28 or 35"),
        (["3"], "--sizes 3 must be a multiple of the models' patch of 7 pixels, as 7"),
        (["-7"], "--sizes -7 must be a multiple"),
    ],
)
def test_bad_sizes_give_one_line(runs, sizes, message, tmp_path, capsys):
    assert resolution.main([str(runs[0]), "--sizes", *sizes, "--out", str(tmp_path / "out")]) == 2
    # Where the images were not looked at before, a bar says that they are.
    [error] = [line for line in capsys.readouterr().err.splitlines() if line and "looking for damaged" not in line]
    assert message in error and not (tmp_path / "out").exists()


def test_a_model_of_another_kind_gives_one_line(runs, tmp_path, capsys):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=28, patch_size=7, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        id2label=dict(enumerate(CLASSES)), label2id={name: index for index, name in enumerate(CLASSES)},
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    processor = (runs[0] / "model" / "preprocessor_config.json").read_text()
    (tmp_path / "model" / "preprocessor_config.json").write_text(processor)
    (tmp_path / "run_config.json").write_text((runs[0] / "run_config.json").read_text())
    assert resolution.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "holds a 'vit' model" in error and error.count("\n") == 1


def test_images_are_decoded_as_those_of_training(tmp_path):
    """Turned or not, as the model's image processor says where the configuration does not."""
    data = write_images(tmp_path / "images", each=1)
    exif = Image.Exif()
    exif[0x0112] = 3  # to be turned upside down
    for file in (data / "test").rglob("*.png"):
        Image.open(file).save(file, exif=exif)
    run = write_run(tmp_path / "run", data, "dense", 0, exif="ignore")
    options = {"models": [run], "names": None, "config": None, "set": [], "limit": None, "device": "cpu"}
    _, shared = trained.load_trained(Namespace(**options))
    stored = np.asarray(Image.open(data / "test" / "cat" / "0.png"))
    assert np.array_equal(shared.data.splits["test"].read(0), stored)
