import itertools
import json
from argparse import Namespace

import numpy as np
import torch
from sklearn.datasets import load_digits

import hf_sparseprior as sp
from hf_sparseprior.attention import functional as ops
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import load_data
from tasks.analysis.diversity import main, measure
from tasks.analysis.runs import open_models


def diversity_of(model, pixels):
    """By the printed formula in float64 from a layer's weights and values, for each image and layer."""
    values = []
    for layer in model.vit.layers:
        layer.attention.v_proj.register_forward_hook(lambda _, __, out: values.append(out))
    with torch.no_grad():
        weights = model(pixels, output_attentions=True).attentions
    found = np.zeros((len(pixels), len(weights)))
    for layer, (own, value) in enumerate(zip(weights, values, strict=True)):
        value = value.unflatten(-1, (own.shape[1], -1)).transpose(1, 2)
        heads = (own.double() @ value.double()).numpy()
        for image in range(len(pixels)):
            terms = [
                np.linalg.norm(a - b) / (np.linalg.norm(a) + np.linalg.norm(b))
                for a, b in itertools.combinations(heads[image], 2)
            ]
            found[image, layer] = np.mean(terms)
    return found


def test_a_row_for_each_model_and_every_layer_in_the_results(runs, capsys, figures, tmp_path):
    folders = [str(folder) for folder in runs.values()]
    assert main([*folders, "--limit", "20", "--batch-size", "8", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "lies between 0 and 1" in text
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    results = json.loads((tmp_path / "diversity.json").read_text())
    assert results["versions"]["torch"] and results["hardware"] and results["command"]
    data = load_data(DataConfig(source="digits", limit_test=20)).splits["test"]
    for row, (prior, folder), found in zip(table[1:], runs.items(), results["models"], strict=True):
        model = sp.SparsePriorViTForImageClassification.from_pretrained(folder / "model").eval()
        images = np.stack([np.asarray(data.read(index)) for index in range(20)]).transpose(0, 3, 1, 2)
        pixels = torch.tensor(images / 255, dtype=torch.float32) * 2 - 1
        expected = diversity_of(model, pixels)
        assert found["prior"] == prior and found["images"] == 20
        for layer, own in enumerate(found["layers"]):
            quantiles = np.quantile(expected[:, layer], [0, 0.25, 0.5, 0.75, 1])
            assert list(own["diversity"]) == ["min", "q1", "median", "q3", "max"]
            np.testing.assert_allclose(list(own["diversity"].values()), quantiles, rtol=1e-4)
        assert found["last_layer"] == found["layers"][-1]
        # 100 times as much in the table.
        np.testing.assert_allclose([float(cell) for cell in row[2:7]], 100 * quantiles, atol=0.0051)
    left, right = figures["diversity.png"].axes
    assert [label.get_text() for label in left.get_yticklabels()] == [found["name"] for found in results["models"]]
    for line, found in zip(right.lines, results["models"], strict=True):
        medians = [100 * layer["diversity"]["median"] for layer in found["layers"]]
        np.testing.assert_allclose(line.get_ydata(), medians)


def test_all_images_without_a_limit_whatever_the_batch(runs, tmp_path):
    found = []
    for size in ("100", "359"):
        assert main([str(runs["dense"]), "--batch-size", size, "--out", str(tmp_path)]) == 0
        found.append(json.loads((tmp_path / "diversity.json").read_text())["models"][0])
    assert found[0]["images"] == 359 == round(0.2 * len(load_digits().target))
    for one, other in zip(found[0]["layers"], found[1]["layers"], strict=True):
        np.testing.assert_allclose(list(one["diversity"].values()), list(other["diversity"].values()), rtol=1e-5)


def test_a_stock_model(stock, capsys, tmp_path):
    config = tmp_path / "data.yaml"
    config.write_text("data: {source: digits, limit_test: 10}\n")
    assert main([str(stock), "--config", str(config), "--out", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "diversity.json").read_text())["models"]
    assert found["images"] == 10 and len(found["layers"]) == 2 and 0 < found["last_layer"]["diversity"]["min"] < 1


def test_no_map_is_kept(runs, monkeypatch):
    """Sparse backends run without weights, and a batch leaves one number for each image and layer."""
    asked = []
    run_plan = ops.run_plan
    monkeypatch.setattr(
        "hf_sparseprior.priors.layer.run_plan",
        lambda request, backend: asked.append(request.need_weights) or run_plan(request, backend),
    )
    arguments = Namespace(
        models=[runs["fibottention+violin"]], names=None, device="cpu", config=None, set=[], split="test", limit=4,
        batch_size=2,
    )  # fmt: skip
    (saved,) = open_models(arguments)
    measure(saved, arguments)
    assert asked == [False] * 4


def test_a_single_head_is_refused(tmp_path, capsys):
    config = sp.SparsePriorViTConfig(
        image_size=8, patch_size=2, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    sp.SparsePriorViTForImageClassification(config).save_pretrained(tmp_path / "one")
    assert main([str(tmp_path / "one"), "--out", str(tmp_path / "out")]) == 2
    assert "has one head a layer; there is no diversity between heads" in capsys.readouterr().err
