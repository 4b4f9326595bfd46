import json

import numpy as np
import pytest
from PIL import Image
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    SiglipConfig,
    SiglipModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTModel,
)

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.analysis import explain, pictures
from hf_sparseprior.patterns.curves import CURVES
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.patterns.supports import SUPPORTS, build_mask
from tests.each import each


def test_fibottention_prints_the_golden_numbers(capsys, tmp_path):
    assert main(["explain", "fibottention", "--heads", "12", "--grid", "14x14", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "12       626           0  30 49" in text
    assert "9192 patch tokens only" in text and "98.006 %" in text and "97.014 %" in text
    # Fibottention Table 2's 0.014 counts patch tokens only, its 0.72 the class token too.
    assert "0.0214 G with prefix tokens (0.0141 G patch tokens only), dense 0.7153 G" in text
    assert "2 10 9 6 11 3 4 8 5 1 12 7" in text


def test_support_picture_shows_the_twelve_heads(capsys, tmp_path):
    main(["explain", "fibottention", "--out", str(tmp_path)])
    image = np.asarray(Image.open(tmp_path / "support_fibottention_14x14.png").convert("RGB")).astype(int)
    assert image.shape[0] > 600 and image.shape[1] > 600
    ink = (np.abs(image - np.array([0x1B, 0x3A, 0x4B])).sum(-1) < 30).sum()
    # 9192 pairs, each drawn as about two pixels of its panel.
    assert ink > 9192


@pytest.mark.parametrize("name", [*SUPPORTS, *DECAYS, "fibottention+violin"])
def test_every_prior_can_be_explained(name, capsys):
    assert main(["explain", name, "--heads", "3", "--grid", "5x7", "--layer", "1", "--no-picture"]) == 0
    assert f"{name.partition('+')[0]} on a 5x7 grid" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bigbird", "neighborhood", "learned_order", "fibottention+manhattan"])
def test_priors_are_drawn(name, capsys, tmp_path):
    """With pairs of its own, in two dimensions, along positions that are learned, and with a decay."""
    assert main(["explain", name, "--heads", "3", "--grid", "5x7", "--layer", "1", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    pictures = list(tmp_path.glob("*.png"))
    assert pictures and all(str(picture) in text for picture in pictures)


@pytest.mark.parametrize("time", ["frame", "clip", "axes"])
def test_a_clip_is_explained_and_drawn_over_time(time, capsys, tmp_path):
    settings = ["--heads", "3", "--grid", "3x4x5", "--set", "w_min=2", "--set", "w_max=7", "--out", str(tmp_path)]
    drawn = time == "axes"
    assert main(["explain", f"fibottention+violin+{time}", *settings, *(["--no-picture"] * (not drawn))]) == 0
    text = capsys.readouterr().out
    spec = {"name": "fibottention", "w_min": 2, "w_max": 7, "shuffle_seed": None}
    mask = build_mask(spec, num_heads=3, num_tokens=60, grid=(3, 4, 5), time=time)
    assert f"time: {time}" in text and "on a 3x4x5 grid" in text
    assert f"{mask.sum()} patch tokens only" in text
    for number, own in enumerate(mask, start=1):
        assert f"\n{number:>7}  {own.sum():>8}  " in text
    written = {path.name for path in tmp_path.glob("*.png")}
    pictured = ("support_fibottention", "clip_fibottention", "decay_violin", "curves_violin")
    assert written == {f"{name}_3x4x5_axes.png" for name in pictured if drawn}
    assert all(name in text for name in written)


@pytest.mark.parametrize("prior", ["fibottention", "bigbird"])
def test_a_long_clip_is_counted_in_one_frame(prior, capsys, monkeypatch):
    """Its pairs are never listed, and their number is that of the same model's FLOPs."""
    monkeypatch.setattr(explain.LayerPattern, "listed", None)
    assert main(["explain", prior, "--heads", "4", "--grid", "96x28x28", "--no-picture"]) == 0
    text = capsys.readouterr().out
    sizes = {"num_heads": 4, "num_tokens": 784, "grid": (28, 28)}
    of_frame = build_mask({"name": prior, "shuffle_seed": None}, **sizes)
    alone = np.eye(784, dtype=bool) & (of_frame.sum(-1) == 1)[..., None]  # patches that see themselves alone
    nonzeros = 96**2 * (of_frame & ~alone).sum() + 96 * (of_frame & alone).sum()
    assert f"nonzeros       {nonzeros} patch tokens only" in text


def test_a_large_decay_is_shown_by_some_of_its_queries(capsys, monkeypatch):
    arguments = ["explain", "violin", "--heads", "2", "--grid", "4x16x16", "--no-picture"]
    assert main([*arguments[:-1], "--no-picture"]) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(explain, "LARGEST_PICTURE", 1000)
    monkeypatch.setattr(explain, "QUERIES", 1024)  # all of them
    assert main(arguments) == 0
    found = capsys.readouterr().out
    assert "(M of 1024 of 1024 queries" in found
    assert found.replace("(M of 1024 of 1024 queries, spread evenly)\n", "") == whole


def test_what_a_patch_sees_is_drawn_frame_by_frame(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.setdefault(path.name, figure))
    main(["explain", "window+axes", "--set", "w=1", "--heads", "1", "--grid", "3x2x4", "--out", str(tmp_path)])
    (axis,) = drawn["clip_window_3x2x4_axes.png"].axes
    shown = axis.images[0].get_array()
    seen = np.nan_to_num(np.asarray(shown, dtype=float), nan=7)  # gaps between the frames
    # The patch of row 1 and column 2 in frame 1, its neighbours, and the same patch in the frames beside.
    assert seen.tolist() == [[0, 0, 0, 0, 7, 0, 0, 0, 0, 7, 0, 0, 0, 0], [0, 0, 1, 0, 7, 0, 1, 1, 1, 7, 0, 0, 1, 0]]


def test_radial_attention_is_explained_and_grids_are_checked(capsys, tmp_path):
    assert main(["explain", "radial+manhattan", "--heads", "2", "--grid", "9x2x3", "--out", str(tmp_path)]) == 0
    assert "time: clip" in capsys.readouterr().out
    for grid in ("3", "1x2x3x4", "0x2x2", "2x-1x3"):
        with pytest.raises(SystemExit):
            main(["explain", "violin", "--grid", grid, "--no-picture"])
        assert "must be HEIGHTxWIDTH, for example 14x14, or FRAMESxHEIGHTxWIDTH" in capsys.readouterr().err
    assert main(["explain", "violin+clip", "--grid", "4x4", "--no-picture"]) == 2
    assert "time='clip' is for attention over the frames of a clip" in capsys.readouterr().err


def test_violin_prints_every_curve(capsys, tmp_path):
    main(["explain", "violin", "--grid", "4x4", "--no-picture"])
    text = capsys.readouterr().out
    for curve in CURVES:
        assert curve == "z" or f"\n{curve} " in text
    assert "0 1 14 15" in text
    assert "108 learned scalars a layer, 1296 in 12 layers" in text


WINDOW = ["explain", "window", "--set", "w=1", "--heads", "2", "--grid", "4x4"]


def test_an_order_is_explained(capsys):
    """The path of Hilbert's curve goes from neighbour to neighbour; of 15 steps in raster order 3 begin a row."""
    assert main([*WINDOW, "--set", "order=hilbert", "--no-picture"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "order hilbert: pairs of an offset are 1.00 patches apart on the grid (rows and columns, mean)" in text
    assert f"{(12 * 1 + 3 * 4) / 15:.2f} in raster order" in text
    main([*WINDOW, "--set", 'order=["hilbert","raster"]', "--no-picture"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"order hilbert, raster: pairs of an offset are {(1 + (12 * 1 + 3 * 4) / 15) / 2:.2f} patches apart" in text
    main([*WINDOW, "--no-picture"])
    assert "order  " not in capsys.readouterr().out


def test_pictures_of_an_order(capsys, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(pictures, "draw_support", lambda masks, titles, path, heading, prefix: drawn.update(
        masks=masks, titles=titles, heading=heading) or path)  # fmt: skip
    monkeypatch.setattr(pictures, "draw_curves", lambda curves, grid, path: drawn.update(curves=curves) or path)
    for order, names in (("hilbert", ["hilbert"]), ('["raster","snake"]', ["snake"])):
        main([*WINDOW, "--prefix", "1", "--layer", "2", "--set", f"order={order}", "--out", str(tmp_path)])
        assert "order_window_4x4.png" in capsys.readouterr().out and drawn["curves"] == names
        support = {"name": "window", "w": 1, "order": json.loads(order) if "[" in order else order}
        expected = build_mask(support, num_heads=2, num_tokens=16, num_prefix_tokens=1, layer=1)
        assert np.array_equal(drawn["masks"], expected)
        assert ("along hilbert" in drawn["heading"]) == (order == "hilbert")
        last = [title.rpartition(" ")[2] for title in drawn["titles"]]
        assert order == "hilbert" or sorted(last) == ["raster", "snake"]


def test_settings_reach_the_support(capsys):
    main(["explain", "fibottention", "--set", "modified=true", "--set", "w_max=65", "--no-picture"])
    assert "17446 patch tokens only" in capsys.readouterr().out


FIBOTTENTION_REFUSED = {
    "--set w_mn=3": "did you mean 'w_min'",
    "--set w_min": "KEY=VALUE",
    "--set w_min=-1": "w_min=-1 must be an integer of 1 or more",
    "--prefix -1": "--prefix=-1 must be an integer of 0 or more",
    **{f"--{key} 0": f"--{key}=0 must be an integer of 1 or more" for key in ("layers", "layer", "head-dim", "heads")},
    "--heads 1000000": "--heads=1000000 must be at most 256; the environment variable",
    "--grid 99999x99999": "--grid: grid=[99999, 99999] has 9999800001 patches",
}
REFUSED = {f"fibottention {words}": message for words, message in FIBOTTENTION_REFUSED.items()}


@each("words, message", {"fibotention": "did you mean 'fibottention'", **REFUSED}.items())
def test_bad_arguments_give_one_line(words, message, capsys):
    assert main(["explain", *words.split(), "--no-picture"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_extras_are_named_with_their_settings(capsys):
    assert main(["explain", "topk+evit", "--grid", "4x4", "--set", "keep_rate=0.5", "--no-picture"]) == 0
    text = capsys.readouterr().out
    assert "note: evit (keep_rate=0.5, " in text and "is not in these numbers" in text


def test_learned_prefix_scalars_are_counted(capsys):
    main(["explain", "violin", "--grid", "4x4", "--no-picture", "--set", "learn_prefix=true"])
    assert "1440 in 12 layers" in capsys.readouterr().out


def test_pictures_too_large_to_draw_are_refused(capsys):
    assert main(["explain", "fibottention", "--grid", "100x100"]) == 2
    assert "--no-picture" in capsys.readouterr().err
    assert main(["explain", "fibottention", "--grid", "100x100", "--no-picture"]) == 0


def test_with_a_model_the_numbers_before_the_time_are_the_models(capsys, monkeypatch):
    """ViT-S has six heads; twelve were shown above its time."""
    monkeypatch.setattr(explain.explain_time, "explain_time", lambda *_: {})
    options = ["--no-picture", "--time", "--grid", "8x8"]
    assert main(["explain", "fibottention", "--model", "vit_small", *options]) == 0
    with_model = capsys.readouterr().out
    sizes = ["--heads", "6", "--layers", "12", "--head-dim", "64", "--prefix", "1"]
    assert main(["explain", "fibottention", *sizes, *options]) == 0
    assert with_model == capsys.readouterr().out and "6 heads" in with_model
    assert main(["explain", "fibottention", "--model", "swin_tiny", *options]) == 0
    found = capsys.readouterr().out
    assert "of the first of 4 stages of swin_tiny" in found and "3 heads, 0 prefix tokens" in found
    for flag in ("heads", "layers", "head-dim", "prefix"):
        assert main(["explain", "fibottention", "--model", "vit_small", *options, f"--{flag}", "4"]) == 2
        assert f"--{flag}=4 is the model's own with --model=vit_small" in capsys.readouterr().err


SIZES = {
    "image_size": [32, 48], "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3,
    "intermediate_size": 16,
}  # fmt: skip
# In a stock model a decay starts otherwise than by its name alone.
LAYERS = {
    "layers": {"0-1": "window", "2-3": {"support": "fibottention", "decay": {"name": "violin", "init": "moving"}}}
}
BUILDERS = {
    "ours": lambda: sp.SparsePriorViTModel(sp.SparsePriorViTConfig(**SIZES, prior=LAYERS)),
    "stock": lambda: sp.apply_prior(ViTModel(ViTConfig(**SIZES)), LAYERS),
}


@each("kind", BUILDERS)
def test_a_saved_model_is_explained_as_its_prior_on_its_grid(kind, capsys, tmp_path):
    """Also the model of a training run, and one layer of it."""
    run = tmp_path / kind
    BUILDERS[kind]().save_pretrained(run / "model")
    sizes = ["--grid", "8x12", "--heads", "3", "--layers", "4", "--head-dim", "8"]
    for options in (["--no-picture"], ["--no-picture", "--layer", "3"]):
        assert main(["explain", json.dumps(LAYERS), *sizes, *options]) == 0
        expected = capsys.readouterr().out
        for folder in (run, run / "model"):
            assert main(["explain", str(folder), *options]) == 0
            assert capsys.readouterr().out == expected and "8x12 grid, 3 heads" in expected
    assert main(["explain", str(run), "--no-picture", "--grid", "4x4"]) == 2
    assert f"--grid=4x4 is the model's own with {run / 'model'}; leave it out" in capsys.readouterr().err
    assert main(["explain", str(run), "--no-picture", "--time", "--model", "vit_tiny"]) == 2
    assert "--model=vit_tiny does not go with" in capsys.readouterr().err


def test_a_saved_model_of_several_stages_is_explained_in_its_first(capsys, tmp_path):
    options = {"image_size": 64, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4]}
    config = sp.SparsePriorSwinConfig(**options, window_size=4, prior=["fibottention", "dense"])
    sp.SparsePriorSwinModel(config).save_pretrained(tmp_path / "swin")
    assert main(["explain", str(tmp_path / "swin"), "--no-picture"]) == 0
    text = capsys.readouterr().out
    assert "the numbers are of the first of 2 stages of" in text
    assert "fibottention on a 4x4 grid, 2 heads, 0 prefix tokens" in text


class Enough(Exception):
    """Ends the command once what counts is known."""


@pytest.fixture
def timed(monkeypatch):
    """Configs whose time would be predicted."""
    seen = []

    def measure(config, *given, **options):
        seen.append(config)
        raise Enough

    monkeypatch.setattr(explain.explain_time, "predicted_costs", measure)
    return seen


def test_the_time_of_a_saved_model_is_that_of_its_config(tmp_path, timed):
    model = BUILDERS["ours"]()
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(Enough):
        main(["explain", str(tmp_path / "model"), "--no-picture", "--time"])
    assert timed[0].to_dict() == type(model.config).from_pretrained(tmp_path / "model").to_dict()


@each("prior", ["fibottention", ["fibottention", "dense"]])
def test_a_setting_acts_on_the_time_of_a_saved_model(prior, capsys, tmp_path, timed):
    """One for each stage would leave open which of them it is for."""
    options = {"image_size": 64, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4]}
    config = sp.SparsePriorSwinConfig(**options, window_size=4, prior=prior)
    sp.SparsePriorSwinModel(config).save_pretrained(tmp_path / "swin")
    command = ["explain", str(tmp_path / "swin"), "--no-picture", "--time", "--set", "w_max=9"]
    if isinstance(prior, str):
        with pytest.raises(Enough):
            main(command)
        assert [each["support"]["w_max"] for each in timed[0].prior] == [9, 9]
    else:
        assert main(command) == 2 and "w_max=9 with --time needs one prior" in capsys.readouterr().err


TEXT = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 8}
STOCK = {
    "registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SIZES, num_register_tokens=4)),
    "text": lambda: SiglipModel(SiglipConfig(vision_config={**SIZES, "image_size": 32}, text_config=TEXT)),
    "stages": lambda: SwinModel(
        SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4)
    ),
}
LINES = {
    "registers": "8x12 grid, 3 heads, 5 prefix tokens",
    "text": "8x8 grid, 3 heads, 0 prefix tokens",
    "stages": "4x4 grid, 2 heads, 0 prefix tokens",
}


@each("kind", STOCK)
def test_a_saved_stock_model_is_explained_with_its_own_tokens(kind, capsys, tmp_path):
    sp.apply_prior(STOCK[kind](), "fibottention").save_pretrained(tmp_path / "model")
    assert main(["explain", str(tmp_path / "model"), "--no-picture"]) == 0
    text = capsys.readouterr().out
    assert LINES[kind] in text and ("of the first of 2 stages" in text) == (kind == "stages")
    assert main(["explain", str(tmp_path / "model"), "--no-picture", "--time"]) == 2
    assert "is one of transformers" in capsys.readouterr().err


def test_folders_that_are_no_models_with_a_prior_are_refused(capsys, tmp_path, monkeypatch):
    ViTModel(ViTConfig(**SIZES)).save_pretrained(tmp_path / "plain")
    assert main(["explain", str(tmp_path / "plain"), "--no-picture"]) == 2
    assert "holds a model of transformers without a prior" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["explain", str(tmp_path / "empty"), "--no-picture"]) == 2
    assert "is no prior" in capsys.readouterr().err
    BUILDERS["ours"]().save_pretrained(tmp_path / "dense")  # a folder that is called as a prior is
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "dense", "--no-picture"]) == 0
    assert "dense on a 14x14 grid" in capsys.readouterr().out
