import io
import json
from contextlib import redirect_stdout

import numpy as np
import peft
import pytest
from safetensors.numpy import load_file
from transformers import ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.patterns.curves import curve_rank
from tasks.analysis.decay import main
from tests.tasks.analysis.conftest import kept_figures

CURVES = ["snake", "snake_t", "zigzag", "zigzag_t", "peano", "peano_t", "hilbert", "hilbert_t"]
CENTRE = 4 * 2 + 2  # of the 4x4 grid


def stored_scalars(file, name):
    """Every layer's scalars of this name in a safetensors file, (layers, ...) in float64."""
    tensors = load_file(file)
    return np.stack([tensors[key] for key in sorted(tensors) if key.endswith(f".{name}")]).astype(np.float64)


def sigmoid(beta):
    return 1 / (1 + np.exp(-beta))


def along(curve, gamma):
    """gamma^|rank difference| from the middle patch, one patch after the other, (4, 4)."""
    ranks = curve_rank(curve, (4, 4)).ravel()
    return np.array([gamma ** abs(int(rank) - int(ranks[CENTRE])) for rank in ranks]).reshape(4, 4)


@pytest.fixture(scope="module")
def drawn(runs, tmp_path_factory):
    """Weights, folder of results, printed text and figures of the command on one model."""
    run, out = runs["fibottention+violin"], tmp_path_factory.mktemp("out")
    with kept_figures() as figures, redirect_stdout(io.StringIO()) as printed:
        assert main([str(run), "--names", "both", "--out", str(out)]) == 0
        yield run / "model" / "model.safetensors", out, printed.getvalue(), figures


@pytest.mark.slow
def test_scalars_of_the_file_in_table_results_and_pictures(drawn):
    file, out, text, figures = drawn
    gamma, alpha = sigmoid(stored_scalars(file, "beta")), stored_scalars(file, "alpha")
    (found,) = json.loads((out / "decay.json").read_text())["models"]
    assert found["curves"] == CURVES and found["prior"] == "fibottention+violin"
    for name, share in {"min": 0, "Q1": 0.25, "median": 0.5, "Q3": 0.75, "max": 1}.items():
        expected = sigmoid(np.quantile(stored_scalars(file, "beta"), share))
        assert found["gammas"][name] == pytest.approx(expected, rel=1e-9)
    for number, layer in enumerate(found["layers"]):
        assert layer["layer"] == number + 1 and layer["grid"] == [4, 4]
        np.testing.assert_allclose(layer["gamma"], gamma[number], rtol=1e-12)
        np.testing.assert_allclose(layer["alpha"], alpha[number])
        masks = np.mean([[along(c, g) for g in own] for c, own in zip(CURVES, gamma[number], strict=True)], axis=0)
        axes = figures["both_heads.png"].axes[3 * number : 3 * number + 3]
        for axis, mask in zip(axes, masks, strict=True):
            np.testing.assert_allclose(axis.images[0].get_array(), mask, rtol=1e-9)
        assert f"| both | fibottention+violin | {number + 1} | {gamma[number].min():.5f} |" in text
    panels = {axis.get_title(): axis for axis in figures["both_gamma.png"].axes if axis.get_title()}
    for number, curve in enumerate(CURVES):
        np.testing.assert_allclose(panels[curve].images[0].get_array(), 1 - gamma[:, number], rtol=1e-9)
    np.testing.assert_allclose(panels["alpha"].images[0].get_array(), alpha)


@pytest.mark.slow
def test_masks_of_curves_and_of_the_learned_gammas(drawn):
    file, _, _, figures = drawn
    betas = stored_scalars(file, "beta")  # (layers, curves, heads)
    axes = np.array(figures["both_gammas.png"].axes[:40]).reshape(5, 8)
    for line, beta in zip(axes, np.quantile(betas, [0, 0.25, 0.5, 0.75, 1]), strict=True):
        assert line[0].get_ylabel().endswith(f"{sigmoid(beta):.5f}")
        for axis, curve in zip(line, CURVES, strict=True):
            np.testing.assert_allclose(axis.images[0].get_array(), along(curve, sigmoid(beta)), rtol=1e-6)
    middle = np.array(figures["both_curves.png"].axes[:24]).reshape(3, 8)[1]
    for number, (axis, curve) in enumerate(zip(middle, CURVES, strict=True)):
        gamma = sigmoid(np.median(betas[:, number]))
        np.testing.assert_allclose(axis.images[0].get_array(), along(curve, gamma), rtol=1e-6)


@pytest.mark.slow
def test_stock_models_and_adapters(stock, capsys, figures, tmp_path):
    model = ViTForImageClassification.from_pretrained(stock)
    sp.apply_prior(model, {"decay": {"name": "violin", "init": "pretrain"}})
    model.save_pretrained(tmp_path / "applied")
    config = sp.ViolinAdapterConfig(decay={"name": "manhattan", "init": "moving"}, decay_layers=[1])
    adapted = peft.get_peft_model(ViTForImageClassification.from_pretrained(stock), config)
    adapted.save_pretrained(tmp_path / "adapter")
    folders = [str(tmp_path / "applied"), str(tmp_path / "adapter")]
    assert main([*folders, "--out", str(tmp_path / "out")]) == 0
    assert "| adapter | manhattan | 2 |" in capsys.readouterr().out
    applied, adapter = json.loads((tmp_path / "out" / "decay.json").read_text())["models"]
    gamma = sigmoid(stored_scalars(tmp_path / "applied" / "sparse_prior.safetensors", "beta"))
    np.testing.assert_allclose([layer["gamma"] for layer in applied["layers"]], gamma, rtol=1e-12)
    gamma = sigmoid(stored_scalars(tmp_path / "adapter" / "adapter_model.safetensors", "beta"))
    np.testing.assert_allclose([layer["gamma"] for layer in adapter["layers"]], gamma, rtol=1e-12)
    assert len(figures) == 8 and all((tmp_path / "out" / name).is_file() for name in figures)
    assert [layer["layer"] for layer in adapter["layers"]] == [2] and adapter["curves"] == ["manhattan"]


def test_a_model_without_a_decay_is_named(runs, capsys, tmp_path):
    assert main([str(runs["dense"]), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "model: SparsePriorViTForImageClassification has no decay, its prior is 'dense'" in error
    assert error.count("\n") == 1
