import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.models.pretrained import load_whole_model
from hf_sparseprior.saving.saved_processor import load_image_processor


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = sp.SparsePriorViTConfig(
        image_size=8, patch_size=2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        prior="fibottention", image_mean=0.3, num_labels=3,
    )  # fmt: skip
    return sp.SparsePriorViTForImageClassification(config).eval()


def test_export_makes_a_whole_folder_with_the_metrics_of_the_run(model, tmp_path, capsys):
    run = tmp_path / "run"
    model.save_pretrained(run / "model")
    results = {"metrics": {"test_accuracy": 0.875}, "data": "seven pictures", "command": "python -m somewhere"}
    results["model_sha256"] = hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()
    (run / "results.json").write_text(json.dumps(results))
    results["command"] = f"python -m somewhere --config {tmp_path}/a.yaml data.path={tmp_path}/cats b/c=1/2"
    (run / "results.json").write_text(json.dumps(results))
    assert main(["export", str(run), str(tmp_path / "up")]) == 0  # the run itself serves, as --help says
    assert main(["export", str(run / "model"), str(tmp_path / "again")]) == 0
    card = (tmp_path / "up" / "README.md").read_text()
    assert "0.875" in card and "seven pictures" in card and "python -m somewhere" in card
    assert "python -m somewhere --config a.yaml data.path=cats b/c=1/2`" in card and str(tmp_path) not in card
    assert card == (tmp_path / "again" / "README.md").read_text()
    assert f"{model.config.pruning_ratio:.2f} %" in card
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "up").eval()
    pixels = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(pixels).logits, model(pixels).logits)
    assert AutoImageProcessor.from_pretrained(tmp_path / "up").image_mean[0] == 0.3
    assert (tmp_path / "up" / "modeling_sparseprior_vit.py").exists()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("preprocessor_config.json", {"size": {"height": -8, "width": 8}}, "size.height=-8"),
        ("preprocessor_config.json", None, "must be a regular file; it is a pipe"),
        ("config.json", {"quantization_config": []}, "quantization_config=[] must be an object with a 'quant_method'"),
        ("config.json", {"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn' must be a floating dtype of torch of 16"),
        ("model.safetensors.index.json", {"weight_map": [1]}, "weight_map=[1] must be an object of weights and names"),
    ],
)
def test_export_refuses_what_evaluate_refuses(model, tmp_path, capsys, name, change, said):
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    if change is None:
        os.mkfifo(file)
    else:
        file.write_text(json.dumps({**content, **change}))
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "up")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert str(file) in error and said in error and not (tmp_path / "up").exists()
    with pytest.raises((OSError, ValueError)) as refused:  # as `evaluate` does
        load_image_processor(tmp_path / "model")
        load_whole_model(tmp_path / "model")
    assert str(refused.value) in error


def test_export_refuses_what_it_cannot_do_and_leaves_nothing(model, tmp_path, capsys):
    assert main(["export", "someone/vit-tiny", str(tmp_path / "up")]) == 2
    assert "hf download someone/vit-tiny --local-dir FOLDER" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "up")]) == 2
    assert "none" in capsys.readouterr().err
    model.save_pretrained(tmp_path / "model")
    with open(tmp_path / "model" / "model.safetensors", "r+b") as file:
        file.truncate(500)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "up")]) == 2
    assert "model" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    (tmp_path / "up").mkdir()
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "up")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_metrics_of_other_weights_stay_out_of_the_card(model, tmp_path):
    model.save_pretrained(tmp_path / "run" / "checkpoint-3")
    results = {"metrics": {"test_accuracy": 0.875}, "model_sha256": "0" * 64}
    for content in (json.dumps(results), "[1]", "{", json.dumps({"metrics": 3})):
        (tmp_path / "run" / "results.json").write_text(content)
        assert main(["export", str(tmp_path / "run" / "checkpoint-3"), str(tmp_path / "up")]) == 0
        assert "0.875" not in (tmp_path / "up" / "README.md").read_text()
        shutil.rmtree(tmp_path / "up")


def test_a_folder_that_lacks_weights_is_not_exported(model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = {name: value for name, value in load_file(path).items() if "layers.1" not in name}
    save_file(weights, path, metadata={"format": "pt"})
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "up")]) == 2
    assert "lacks weights that fit its config: vit.layers.1" in capsys.readouterr().err
    assert not (tmp_path / "up").exists()


@pytest.mark.parametrize("change", [{"model_type": "vit"}, {"architectures": ["os"]}, {"architectures": None}])
def test_other_models_are_not_exported(model, tmp_path, capsys, change):
    model.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **change}))
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "up")]) == 2
    assert "export takes the classes of SparsePriorViT, " in capsys.readouterr().err


def test_cards_say_what_the_model_is_and_follow_it_until_somebody_edits_them(model, tmp_path):
    card = tmp_path / "README.md"
    sp.SparsePriorViTModel(model.config).save_pretrained(tmp_path)
    assert "image-feature-extraction" in card.read_text() and "| classes |" not in card.read_text()
    model.save_pretrained(tmp_path)
    assert "pipeline_tag: image-classification" in card.read_text() and "| classes | 3 |" in card.read_text()
    card.write_text("mine")
    model.save_pretrained(tmp_path)
    assert card.read_text() == "mine"


def test_a_model_of_images_of_several_sizes_is_exported_for_its_own(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    sp.mixed_size_processor(model.config).save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "file"), "--format", "torch"]) == 0
    saved = json.loads((tmp_path / "file" / "preprocessor_config.json").read_text())
    assert saved["size"] == {"height": 8, "width": 8} and "max_num_patches" not in saved
