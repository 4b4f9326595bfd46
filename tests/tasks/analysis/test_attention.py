import json
from argparse import ArgumentTypeError, Namespace

import numpy as np
import pytest
import torch
from PIL import Image

import hf_sparseprior as sp
from hf_sparseprior.analysis.image_maps import darkened, with_heat
from hf_sparseprior.images.config import DataConfig
from hf_sparseprior.images.data import load_data
from hf_sparseprior.patterns.supports import build_mask
from tasks.analysis.attention import attention_rows, main, query_rows
from tasks.analysis.commands import parse_query
from tasks.analysis.maps import chosen
from tasks.analysis.runs import open_models
from tests.each import each


@pytest.fixture
def digit(runs):
    """A test digit as colours 0 to 1, and the weights of the sparse model's layers, (3, 17, 17) each."""
    pixels = np.asarray(load_data(DataConfig(source="digits")).splits["test"].read(5)) / 255
    model = sp.SparsePriorViTForImageClassification.from_pretrained(runs["fibottention+violin"] / "model").eval()
    with torch.no_grad():
        inputs = torch.tensor(pixels.transpose(2, 0, 1)[None] * 2 - 1, dtype=torch.float32)
        weights = model(inputs, output_attentions=True).attentions
    return pixels, [layer[0].numpy() for layer in weights], model.config


def panels_of(figure, rows):
    axes = np.array(figure.axes[:-1]).reshape(rows, -1)  # the last one is the bar of colours
    titles = [[axis.get_title() for axis in line] for line in axes]
    arrays = [[axis.images[0].get_array() if axis.images else None for axis in line] for line in axes]
    return axes, titles, arrays


def test_what_is_drawn_is_the_attention_over_the_image(runs, digit, capsys, figures, tmp_path):
    pixels, weights, config = digit
    run = str(runs["fibottention+violin"])
    arguments = ["--indices", "5", "--rollout", "--queries", "2,3", "4,1", "--names", "both"]
    assert main([run, *arguments, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert sorted(figures) == ["both_test5.png", "both_test5_query_2_3.png", "both_test5_query_4_1.png"]
    # The class token: image, mean of the heads, rollout, three heads.
    _, titles, arrays = panels_of(figures["both_test5.png"], 2)
    rolled = np.eye(17)
    for layer in range(2):
        maps = weights[layer][:, 0, 1:].reshape(3, 4, 4)
        rolled = (weights[layer].mean(0) + np.eye(17)) / 2 @ rolled
        expected = [maps.mean(0), rolled[0, 1:].reshape(4, 4), *maps]
        for drawn, title, heat in zip(arrays[layer][1:], titles[layer][1:], expected, strict=True):
            np.testing.assert_allclose(drawn, with_heat(pixels, heat), atol=1e-4)
            assert title.endswith(f"max {heat.max():.2g}")
    np.testing.assert_allclose(arrays[0][0], pixels, atol=1e-6)
    # A query: image, what three heads see, their attention.
    for name, row, column in (("2_3", 1, 2), ("4_1", 3, 0)):
        axes, titles, arrays = panels_of(figures[f"both_test5_query_{name}.png"], 2)
        place = 1 + 4 * row + column
        for layer in range(2):
            support = config.prior["support"]
            mask = build_mask(support, num_heads=3, num_tokens=16, num_prefix_tokens=1, layer=layer)
            for head in range(3):
                seen = mask[head, place, 1:].reshape(4, 4)
                np.testing.assert_allclose(arrays[layer][1 + head], darkened(pixels, seen), atol=1e-6)
                assert titles[layer][1 + head] == f"head {head + 1} sees {seen.sum()}"
                heat = weights[layer][head, place, 1:].reshape(4, 4)
                np.testing.assert_allclose(arrays[layer][4 + head], with_heat(pixels, heat), atol=1e-4)
        for axis in axes.flat:
            (frame,) = axis.patches
            assert (*frame.get_xy(), frame.get_width(), frame.get_height()) == (2 * column, 2 * row, 2, 2)


def test_numbers_of_every_layer(runs, digit, capsys, tmp_path):
    _, weights, config = digit
    run = str(runs["fibottention+violin"])
    assert main([run, "--indices", "5", "--out", str(tmp_path)]) == 0
    assert "| both |" not in capsys.readouterr().out
    results = json.loads((tmp_path / "attention.json").read_text())
    (found,) = results["models"]
    assert results["versions"]["torch"] and found["queries_of"] == "class_token"
    for layer, own in zip(found["layers"], weights, strict=True):
        # The support decides: 100 less the pruning ratio.
        assert 100 * layer["pairs_seen"] == pytest.approx(100 - config.pruning_ratio, rel=1e-5)
        terms = np.where(own > 0, -own * np.log(np.maximum(own, 1e-30)), 0)
        assert layer["entropy"] == pytest.approx(terms.sum(-1).mean(), rel=1e-4)
    assert all((tmp_path / path.rsplit("/", 1)[1]).exists() for path in found["pictures"])


def test_own_files_on_several_models(runs, stock, picture, capsys, figures, tmp_path):
    folders = [str(runs["dense"]), str(stock)]
    arguments = ["--images", str(picture), "--layers", "2", "--heads", "1", "3", "--source", "mean"]
    assert main([*folders, *arguments, "--names", "ours", "stock", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "| ours | dense | 1 | 100.0 |" in text and "| stock | dense | 2 | 100.0 |" in text
    assert sorted(figures) == [
        "ours_own.png", "ours_own_query_3_3.png", "stock_own.png", "stock_own_query_3_3.png",
    ]  # fmt: skip
    _, titles, arrays = panels_of(figures["stock_own.png"], 1)
    assert [title.split(",")[0] for title in titles[0]] == ["image", "mean", "head 1", "head 3"]
    # As the model sees it: scaled to its size, whatever the file's.
    scaled = np.asarray(Image.open(picture).resize((16, 16), Image.Resampling.BILINEAR)) / 255
    np.testing.assert_allclose(arrays[0][0], scaled, atol=0.02)
    axes, _, _ = panels_of(figures["stock_own_query_3_3.png"], 1)
    assert axes[0, 0].get_ylabel() == "layer 2" and axes.shape == (1, 5)


def test_any_weights_and_any_connectivity_can_be_drawn(runs):
    """Those of a mechanism that chooses other keys for each image, here for the second of two images."""
    (saved,) = open_models(Namespace(models=[runs["dense"]], names=None, device="cpu"))
    generator = torch.Generator().manual_seed(0)
    seen = torch.rand(2, 3, 17, 17, generator=generator) < 0.2  # (B, H, T, T)
    weights = torch.rand(2, 3, 17, 17, generator=generator) * seen
    image = np.full((8, 8, 3), 0.5)
    rows = query_rows(image, [weights[1]], [seen[1]], saved.attention, [0], [0, 2], (1, 1))
    (first, *panels) = rows[0]
    assert first.query == (1, 1) and len(panels) == 4
    for panel, head in zip(panels[:2], (0, 2), strict=True):
        np.testing.assert_array_equal(panel.seen, seen[1, head, 6, 1:].reshape(4, 4))
    for panel, head in zip(panels[2:], (0, 2), strict=True):
        np.testing.assert_array_equal(panel.heat, weights[1, head, 6, 1:].reshape(4, 4))
    (row,) = attention_rows(image, [weights[0]], saved.attention, [0], [1], "mean", False)
    np.testing.assert_allclose(row[-1].heat, weights[0, 1, 1:, 1:].mean(0).reshape(4, 4), rtol=1e-6)


def test_layers_are_spread_evenly_with_the_last_among_them():
    assert chosen(None, 12, 3, "--layers") == [0, 6, 11] and chosen(None, 2, 6, "--layers") == [0, 1]
    assert chosen(None, 1, 3, "--layers") == [0] and chosen([12, 1, 12], 12, 3, "--layers") == [11, 0]


def test_queries_are_rows_and_columns_from_1():
    assert parse_query("7,3") == (6, 2)
    for text in ("7", "0,3", "1,2,3", "a,b", "-1,2"):
        with pytest.raises(ArgumentTypeError, match="must be ROW,COLUMN of a patch, counted from 1"):
            parse_query(text)


@each(
    "arguments, message",
    [
        ([], "no image is given; give --images FILE ... or --indices N ..."),
        (["--indices", "400"], "--indices 400 must be between 0 and 358, the last of"),
        (["--indices", "0", "--layers", "3"], "--layers 3 must be between 1 and 2"),
        (["--indices", "0", "--heads", "0"], "--heads 0 must be between 1 and 3"),
        (["--indices", "0", "--queries", "5,1"], "--queries 5,1 must be from 1,1 to 4,4, the grid"),
        (["--images", "none.png"], "none.png is not a readable image (No such file or directory)"),
    ],
)
def test_bad_arguments_give_one_line(arguments, message, runs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([str(runs["dense"]), *arguments, "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_files_of_one_name_are_refused(runs, picture, capsys, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own.png").write_bytes(picture.read_bytes())
    arguments = ["--images", str(picture), str(tmp_path / "other" / "own.png"), "--out", str(tmp_path / "out")]
    assert main([str(runs["dense"]), *arguments]) == 2
    assert "two files of the same name" in capsys.readouterr().err


def test_a_register_is_no_class_token(picture, capsys, figures, tmp_path):
    config = sp.SparsePriorViTConfig(
        image_size=16, patch_size=4, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        use_class_token=False, pooling="mean", num_register_tokens=2,
    )  # fmt: skip
    sp.SparsePriorViTModel(config).save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "model"), "--images", str(picture), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert json.loads((tmp_path / "out" / "attention.json").read_text())["models"][0]["queries_of"] == "mean"
    assert main([*arguments, "--source", "class_token"]) == 2
    assert "has no class token; take mean" in capsys.readouterr().err
    sp.mixed_size_processor(config).save_pretrained(tmp_path / "model")
    assert main(arguments) == 2
    assert "is of images of several sizes (max_num_patches)" in capsys.readouterr().err
