import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import hf_sparseprior as sp
from hf_sparseprior.analysis.flops import model_flops
from tasks.analysis.flops import main
from tasks.analysis.paper_numbers import preset_flops
from tests.each import each

EXPERIMENTS = Path(__file__).parents[3] / "configs" / "experiments"


def test_without_a_model_it_counts_figure_3_and_the_papers_numbers(capsys, tmp_path):
    assert main(["--image-sizes", "224", "1024", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "a multiply-add is 1 FLOP, softmax is not counted" in text
    assert "printed 0.72 G, counted 0.71533" in text and "class token included" in text
    assert "printed 0.014 G, counted 0.014119" in text and "class token NOT included (0.0214 with it)" in text
    assert "46.70%" in text and "the patches, the class token too from layer 11 on" in text
    results = json.loads((tmp_path / "flops.json").read_text())
    assert [counted["model"] for counted in results["models"]] == ["vit_base", "vit_tiny", "convit_base"]
    base, convit = results["models"][0], results["models"][2]
    assert base["sparse"][1]["total"] == preset_flops("vit_base", 1024, "fibottention").total
    totals = [base[kind][1]["total"] for kind in ("sparse", "dense")]
    assert base["saved_percent"][1] == pytest.approx(100 * (1 - totals[0] / totals[1]))
    assert base["dense"][1]["total"] == preset_flops("vit_base", 1024).total
    assert convit["dense"][0]["total"] == preset_flops("convit_base").total
    assert len(results["paper_numbers"]) == 25 and results["convention"]["multiply_add"] == 1 and results["command"]


def test_the_picture_has_a_line_for_each_model_in_both_panels(tmp_path):
    main(["vit_base", "vit_tiny", "--image-sizes", "224", "512", "1024", "--out", str(tmp_path)])
    image = np.asarray(Image.open(tmp_path / "flops.png").convert("RGB")).astype(int)
    middle = image.shape[1] // 2
    for panel in (image[:, :middle], image[:, middle:]):
        for colour in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)):
            assert (np.abs(panel - np.array(colour)).sum(-1) < 30).sum() > 400


def test_a_configuration_file(capsys, tmp_path):
    config = EXPERIMENTS / "fib_tables_2_3.yaml#imagenet-vit_base-fibottention"
    assert main([str(config), "--image-sizes", "224", "--convention", "torch", "--out", str(tmp_path)]) == 0
    assert "no classifier" in capsys.readouterr().out
    (counted,) = json.loads((tmp_path / "flops.json").read_text())["models"]
    prior = {"support": {"name": "fibottention", "w_min": 5, "w_max": 65}}
    expected = preset_flops("vit_base", 224, prior, "torch")
    assert counted["sparse"][0]["total"] == expected.total - expected.classifier


@pytest.mark.parametrize("inside", ["", "model"])
def test_a_saved_model_and_a_run(inside, capsys, tmp_path):
    config = sp.SparsePriorViTConfig(image_size=28, patch_size=7, hidden_size=24, num_attention_heads=3, prior="violin")
    config.save_pretrained(tmp_path / "run" / inside)
    assert main([str(tmp_path / "run"), "--out", str(tmp_path)]) == 0
    assert "M for a step" in capsys.readouterr().out
    (counted,) = json.loads((tmp_path / "flops.json").read_text())["models"]
    # Sizes that nobody gave are 28/224 of a ViT's 224, 384, 512 and so on, cut down to whole patches.
    assert [flops["image_size"][0] for flops in counted["sparse"]] == [28, 42, 63, 91, 126, 154, 189]
    assert counted["sparse"][0]["total"] == model_flops(config, 28).total
    assert counted["sparse"][0]["decay"] == model_flops(config, 28).decay


def test_a_configuration_that_starts_from_a_saved_model(capsys, tmp_path):
    saved = sp.SparsePriorViTConfig(image_size=32, patch_size=8, hidden_size=24, num_attention_heads=3, num_labels=5)
    saved.save_pretrained(tmp_path / "saved")
    file = tmp_path / "tune.yaml"
    file.write_text(f"model: {{pretrained: {tmp_path / 'saved'}, prior: fibottention}}\n")
    assert main([str(file), "--image-sizes", "64", "--out", str(tmp_path)]) == 0
    (counted,) = json.loads((tmp_path / "flops.json").read_text())["models"]
    expected = model_flops(saved, 64, "fibottention")
    assert counted["sparse"][0]["total"] == expected.total - expected.classifier
    file.write_text(f"model: {{pretrained: {tmp_path / 'nowhere'}}}\n")
    assert main([str(file), "--out", str(tmp_path)]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_prior_replaces_the_models(tmp_path):
    arguments = ["vit_tiny", "--prior", "{support: {name: window, w: 3}}", "--image-sizes", "224"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    (counted,) = json.loads((tmp_path / "flops.json").read_text())["models"]
    assert counted["prior"]["support"]["w"] == 3
    # Seven diagonals: 7 N less the corners, and the class token's row and column.
    assert counted["sparse"][0]["attended_pairs"] == [3 * (7 * 196 - 2 * (1 + 2 + 3) + 2 * 196 + 1)] * 12


@each(
    "arguments, message",
    [
        (["vit_bsae"], "did you mean 'vit_base'"),
        (["vit_base", "--image-sizes", "225"], "image_size=225x225 must be a multiple of the 16x16 patch"),
        (["vit_base", "--image-sizes", "-16"], "image_size=-16 must be an integer of 1 or more"),
        (["vit_base", "--convention", "macs"], "convention='macs' must be one of multiply_adds"),
        (["vit_base", "--prior", "fibotention"], "did you mean 'fibottention'"),
        (["vit_base", "--prior", "{support: {name: window, w: -1}}"], "w=-1 must be an integer of 0 or more"),
        (["vit_base", "--prior", "{support: ["], "is not a YAML value"),
        (["vit_base", "--prior", "3"], "prior=3 must be a name"),
        (["convit_base", "--prior", "evit"], "the gated layers of a ConViT need all patches"),
        (["missing.yaml"], "missing.yaml"),
        (["foreign"], "python -m hf_sparseprior convert"),
        (["broken"], "is not a JSON object"),
    ],
)
def test_bad_arguments_give_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("foreign", '{"model_type": "vit"}'), ("broken", "[]")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(text)
    assert main([*arguments, "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
