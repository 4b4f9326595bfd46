import json

import numpy as np
import pytest
import torch

import hf_sparseprior as sp
from hf_sparseprior.analysis.image_maps import darkened, with_heat
from hf_sparseprior.analysis.sparsifiner import masked_attention, watch_predictions
from tasks.analysis.sparsifiner import main
from tests.tasks.analysis.conftest import DIGITS, write_run

GRID, PREFIX = (4, 4), 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on digits with a predictor whose W_up is partly 0."""
    prior = {"predictor": {"name": "sparsifiner", "num_down": 6, "keep_rate": 0.25, "threshold": 0.15}}
    folder = write_run(tmp_path_factory.mktemp("predicted") / "run", {"source": "digits"}, prior=prior, **DIGITS)
    model = sp.SparsePriorViTForImageClassification.from_pretrained(folder / "model")
    with torch.no_grad():
        for layer in model.vit.layers:
            layer.attention.predictor.w_up.masked_fill_(layer.attention.predictor.w_up < 0.05, 0.0)
    model.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def model(run):
    return sp.SparsePriorViTForImageClassification.from_pretrained(run / "model").eval()


def pixels_of_digit():
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_what_is_watched_is_what_the_model_attends_to(model):
    pixels = pixels_of_digit()
    with torch.no_grad(), watch_predictions(model) as found:
        weights = model(pixels, output_attentions=True).attentions
    assert len(found) == len(weights) == 2
    for prediction, own, layer in zip(found, weights, model.vit.layers, strict=True):
        assert torch.equal(prediction.connectivity, own > 0)
        torch.testing.assert_close(masked_attention(prediction), own, rtol=1e-5, atol=1e-7)
        numbers = prediction.numbers(PREFIX)
        assert numbers["patches_kept"] == (own[..., 1:, 1:] > 0).sum(-1).double().mean().item() <= 5
        assert numbers["basis_kept"] == (layer.attention.predictor.w_up != 0).double().mean().item() < 1
        kept = (prediction.coefficients > 0.15).double()
        assert numbers["coefficients_kept"] == kept.mean().item()
        up = (layer.attention.predictor.w_up != 0).double()
        assert numbers["up_share"] == pytest.approx((kept @ up).mean().item() / 6)
        shares, highest, recalls = [], [], []
        for head_full, head_seen in zip(prediction.full_attention[0], prediction.connectivity[0], strict=True):
            for row, seen in zip(head_full[1:, 1:].tolist(), head_seen[1:, 1:].tolist(), strict=True):
                keys = {key for key, is_seen in enumerate(seen) if is_seen}
                shares.append(sum(row[key] for key in keys) / sum(row))
                best = set(sorted(range(len(row)), key=lambda key, row=row: -row[key])[: len(keys)])
                highest.append(sum(row[key] for key in best) / sum(row))
                recalls += [len(best & keys) / len(keys)] if keys else []
        assert numbers["attention_kept"] == pytest.approx(np.mean(shares))
        assert numbers["attention_best"] == pytest.approx(np.mean(highest))
        assert numbers["highest_kept"] == pytest.approx(np.mean(recalls))
        assert 0 < numbers["highest_kept"] < 1
    with torch.no_grad():
        model(pixels)
    assert len(found) == 2  # outside the block nothing is watched


def test_pictures_show_connectivity_attention_basis_and_coefficients(run, runs, model, figures, tmp_path, capsys):
    arguments = [str(run), "--others", str(runs["dense"]), "--indices", "5", "--queries", "2,3", "--names", "mine"]
    assert main([*arguments, "--layers", "1", "2", "--out", str(tmp_path)]) == 0
    names = ["basis", "test5_coefficients", "test5_compared_query_2_3", "test5_query_2_3"]
    assert sorted(figures) == [f"mine_{name}.png" for name in names]
    results = json.loads((tmp_path / "sparsifiner.json").read_text())
    (found,) = results["models"]
    assert len(found["layers"]) == 2 and 0 < found["layers"][0]["patches_kept"] <= 5
    assert "patches kept" in capsys.readouterr().out

    axes = np.array(figures["mine_test5_query_2_3.png"].axes[:-1]).reshape(2, -1)
    image = axes[0, 0].images[0].get_array()
    pixels = torch.tensor(np.asarray(image).transpose(2, 0, 1)[None] * 2 - 1, dtype=torch.float32)
    with torch.no_grad(), watch_predictions(model) as watched:
        model(pixels)
    place = PREFIX + 1 * 4 + 2
    for number, prediction in enumerate(watched):
        keys, full = (pairs[0, :, place, 1:].reshape(3, *GRID).numpy() for pairs in (
            prediction.connectivity, prediction.full_attention
        ))  # fmt: skip
        for head in range(3):
            seen, sparse, whole = (axes[number, 1 + 3 * kind + head] for kind in range(3))
            assert seen.get_title() == f"head {head + 1} sees {keys[head].sum()}"
            np.testing.assert_allclose(seen.images[0].get_array(), darkened(image, keys[head]), atol=1e-4)
            np.testing.assert_allclose(
                sparse.images[0].get_array(), with_heat(image, full[head] * keys[head]), atol=1e-3
            )
            np.testing.assert_allclose(whole.images[0].get_array(), with_heat(image, full[head]), atol=1e-3)

    dense = sp.SparsePriorViTForImageClassification.from_pretrained(runs["dense"] / "model").eval()
    with torch.no_grad():
        others = dense(pixels, output_attentions=True).attentions
    (name,) = found["distances"].keys() - {"sparse"}
    assert {one: {*own} for one, own in found["distances"].items()} == {name: {"full"}, "sparse": {"full", name}}
    of = {
        **{"sparse": [masked_attention(own) for own in watched], "full": [own.full_attention for own in watched]},
        name: others,
    }
    for one, own in found["distances"].items():
        for other, distance in own.items():
            apart = [
                np.abs(a.numpy().mean((0, 1))[PREFIX:] - b.numpy().mean((0, 1))[PREFIX:]).sum(-1).mean() / 2
                for a, b in zip(of[one], of[other], strict=True)
            ]
            assert distance == pytest.approx(np.mean(apart), rel=1e-4)

    compared = np.array(figures["mine_test5_compared_query_2_3.png"].axes[:-1]).reshape(2, -1)
    titles = [axis.get_title() for axis in compared[0]]
    assert [title.partition("\n")[0] for title in titles[1::2]] == ["full", "sparse"] and len(titles) == 4
    highest = watched[0].full_attention[0, :, place, 1:].mean(0).max().item()
    assert float(titles[1].partition("max ")[2]) == pytest.approx(highest, rel=0.06)
    basis = np.array(figures["mine_basis.png"].axes[:-1]).reshape(2, -1)
    for line, layer in zip(basis, model.vit.layers, strict=True):
        for axis, row in zip(line, layer.attention.predictor.w_up.detach(), strict=True):
            np.testing.assert_allclose(axis.images[0].get_array(), row.clamp_min(0).reshape(GRID), atol=1e-6)
    for axis, prediction in zip(figures["mine_test5_coefficients.png"].axes[:-1], watched, strict=True):
        drawn = np.asarray(axis.images[0].get_array())
        down = prediction.coefficients[0, 2].numpy()  # three heads, the last stands for the fifth
        np.testing.assert_allclose(drawn, np.where(down > 0.15, down, 0), atol=1e-5)


def test_errors_in_one_line(run, runs, tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert main([str(runs["dense"]), "--indices", "1", *out]) == 2
    assert "has no sparsifiner in its prior" in capsys.readouterr().err
    assert main([str(run), *out]) == 2
    assert "no image is given" in capsys.readouterr().err
    assert main([str(run), "--indices", "1", "--layers", "3", *out]) == 2
    assert "--layers 3 must be between 1 and 2" in capsys.readouterr().err
    boxed = write_run(tmp_path / "other", {"source": "digits"}, **{**DIGITS, "num_hidden_layers": 3})
    assert main([str(run), "--indices", "1", "--others", str(boxed), *out]) == 2
    assert "num_hidden_layers=3 must be 2" in capsys.readouterr().err
    assert main([str(run), "--indices", "1", "--queries", "1,5", *out]) == 2
    assert "--queries 1,5 must be from 1,1 to 4,4" in capsys.readouterr().err
    assert main([str(run), "--indices", "1", "--layers", "2", "2", "--heads", "1", "1", *out]) == 0
