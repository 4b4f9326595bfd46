import json
import shutil
from argparse import Namespace

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, SiglipConfig, ViTConfig, ViTForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.analysis.layers import attention_weights, watch_heads
from tasks.analysis import attention, box_variance, decay, diversity
from tasks.analysis.runs import model_folder, model_names, num_channels, open_models, preparation, shown_image
from tests.each import each
from tests.tasks.analysis.conftest import BOXED, write_run

COMMANDS = {"diversity": diversity, "box_variance": box_variance, "attention": attention, "decay": decay}


def opened(*folders, names=None):
    return list(open_models(Namespace(models=list(folders), names=names, device="cpu")))


def test_a_run_its_model_and_a_stock_model_are_found(runs, stock):
    run = runs["fibottention+violin"]
    assert model_folder(run) == model_folder(run / "model") == run / "model"
    ours, theirs = opened(run, stock)
    assert (ours.attention.grid, theirs.attention.grid) == ((4, 4), (4, 4))
    assert (ours.attention.prior_name, theirs.attention.prior_name) == ("fibottention+violin", "dense")
    assert not ours.model.training and theirs.model.config._attn_implementation == "eager"


def test_names_are_what_tells_paths_apart(tmp_path):
    names = {
        ("out/dense/seed0", "out/violin/seed0"): ["dense", "violin"],
        ("out/dense/seed0", "out/dense/seed1"): ["seed0", "seed1"],
        ("a/x/model", "b/y/model"): ["a/x", "b/y"],
        ("out/dense/seed0/model",): ["seed0"],
        ("out/dense",): ["out/dense"],
        ("out/model", "out/model/inner/model"): ["model", "model/inner/model"],
        ("out/dense/seed0/model", "out/fib/seed1/model"): ["dense/seed0", "fib/seed1"],
        ("out/run/model", "out/run/model_ema"): ["model", "model_ema"],
        ("a/x", "a/x/x"): ["x", "x/x"],
    }
    for paths, expected in names.items():
        assert model_names([tmp_path / path for path in paths]) == expected
        given = [*"abc"[: len(paths)]]
        assert model_names([tmp_path / path for path in paths], given) == given
    with pytest.raises(ValueError, match="--names one must be 2 different names"):
        model_names([tmp_path / "a", tmp_path / "b"], ["one"])
    with pytest.raises(ValueError, match="a model is given twice"):
        model_names([tmp_path / "a", tmp_path / "a"])


@pytest.mark.parametrize("low_rank", [False, True])
def test_an_adapter_is_put_on_its_model(low_rank, stock, tmp_path):
    decay = {"name": "violin", "init": "moving"}
    config = sp.ViolinAdapterConfig(decay=decay)
    if low_rank:
        config = sp.LoraViolinConfig(decay=decay, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(ViTForImageClassification.from_pretrained(stock), config)
    adapted.save_pretrained(tmp_path / "adapter")
    (saved,) = opened(tmp_path / "adapter")
    assert saved.attention.prior_name == "violin"
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = adapted.eval()(pixel_values=pixels).logits
        torch.testing.assert_close(saved.model(pixel_values=pixels).logits, expected)
    assert len(attention_weights(saved.model, pixels)) == 2
    seen = []
    with watch_heads(saved.attention, lambda layer, heads: seen.append(heads.shape)):
        saved.model(pixel_values=pixels)
    assert seen == [(2, 3, 17, 8)] * 2
    assert saved.processor.size == {"height": 16, "width": 16}
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "somewhere/else"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(OSError, match="is an adapter of the model 'somewhere/else'"):
        opened(tmp_path / "adapter")


def test_a_stock_model_with_a_prior_keeps_it(stock, tmp_path):
    model = sp.apply_prior(ViTForImageClassification.from_pretrained(stock), "fibottention+violin")
    model.save_pretrained(tmp_path / "applied")
    (saved,) = opened(tmp_path / "applied")
    assert saved.attention.prior_name == "fibottention+violin"
    weights = saved.model(pixel_values=torch.randn(1, 3, 16, 16), output_attentions=True).attentions
    assert (weights[0] == 0).any()


@pytest.mark.parametrize("channels", [1, 3])
def test_the_shown_image_is_the_scaled_image(channels, tmp_path):
    config = sp.SparsePriorViTConfig(
        image_size=8, patch_size=2, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, num_channels=channels,
        image_mean=[0.3, 0.5, 0.6][:channels], image_std=[0.2, 0.3, 0.25][:channels],
    )  # fmt: skip
    sp.SparsePriorViTForImageClassification(config).save_pretrained(tmp_path)
    (saved,) = opened(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    if channels == 1:
        pixels[:] = pixels[..., :1]
    shown = shown_image(saved, preparation(saved)(Image.fromarray(pixels)))
    np.testing.assert_allclose(shown, pixels / 255, atol=2e-3)  # grey of grey pixels may be rounded


def test_channels_of_towers_are_those_of_their_own_config():
    towers = CLIPConfig(vision_config={"num_channels": 1}), SiglipConfig(vision_config={"num_channels": 4})
    assert [num_channels(Namespace(config=config)) for config in (*towers, ViTConfig(num_channels=2))] == [1, 4, 2]


# ---- bad values -----------------------------------------------------------------------------------------------------


@each(
    "command, arguments, message",
    [
        ("diversity", ["nowhere"], "nowhere is neither the folder of a run nor of a saved model or adapter"),
        ("box_variance", ["someone/model"], "hf download someone/model --local-dir FOLDER"),
        ("attention", ["unfinished"], "unfinished is a run that is not finished, it has no model"),
        ("decay", ["broken"], "config.json is not a JSON object"),
        ("diversity", ["RUN", "RUN"], "a model is given twice"),
        ("box_variance", ["RUN", "--names", "a", "b"], "--names a b must be 1 different names"),
        ("attention", ["RUN", "--device", "abacus"], "--device abacus cannot be used"),
        ("decay", ["RUN", "--device", "abacus"], "--device abacus cannot be used"),
    ],
)
def test_bad_arguments_give_one_line(command, arguments, message, runs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, file, text in (("unfinished", "run_config.json", "{}"), ("broken", "config.json", "[")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / file).write_text(text)
    given = [str(runs["fibottention+violin"]) if text == "RUN" else text for text in arguments]
    more = ["--indices", "0"] if command == "attention" else []
    assert COMMANDS[command].main([*given, *more, "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["diversity", "box_variance", "attention"])
def test_bad_data_gives_one_line(command, runs, stock, capsys, tmp_path):
    more = ["--indices", "0"] if command == "attention" else []
    bare = shutil.copytree(runs["dense"], tmp_path / "bare")
    (bare / "model" / "preprocessor_config.json").unlink()
    cases = {
        (str(stock),): "run_config.json is missing, so the data is not known; give --config",
        (str(runs["dense"]), "--limit", "0"): "--limit 0 must be 1 or more",
        (str(runs["dense"]), "--set", "data.sorce=digits"): "did you mean 'source'?",
        (str(bare),): "has no image processor, preprocessor_config.json is missing",
    }
    for arguments, message in cases.items():
        assert COMMANDS[command].main([*arguments, *more, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["attention", "box_variance"])
def test_layers_that_drop_tokens_give_one_line(command, boxed_runs, capsys, tmp_path):
    """Whose weights have fewer rows than there are patches, and would be taken for those of others."""
    data = json.loads((boxed_runs[0][0] / "run_config.json").read_text())["data"]
    prior = {"extras": [{"name": "evit", "keep_rate": 0.5}]}
    run = write_run(tmp_path / "run", data, prior=prior, **{**BOXED, "num_hidden_layers": 4})
    more = ["--indices", "0"] if command == "attention" else []
    assert COMMANDS[command].main([str(run), *more, "--out", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]  # after the bars of reading
    assert "drops or merges tokens, its layers have 17, 17, 10, 7: the attention of those that are left" in line
