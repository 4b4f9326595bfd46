import json

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main


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
    (run / "results.json").write_text(json.dumps(results))
    assert main(["export", str(run / "model"), str(tmp_path / "up")]) == 0
    card = (tmp_path / "up" / "README.md").read_text()
    assert "0.875" in card and "seven pictures" in card and "python -m somewhere" in card
    assert f"{model.config.pruning_ratio:.2f} %" in card
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "up").eval()
    pixels = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(pixels).logits, model(pixels).logits)
    assert AutoImageProcessor.from_pretrained(tmp_path / "up").image_mean[0] == 0.3
    assert (tmp_path / "up" / "modeling_sparseprior_vit.py").exists()


def test_export_refuses_what_it_cannot_do_and_leaves_nothing(model, tmp_path, capsys):
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
