"""What tests of conversions share: outputs, weights and images of models, ours and others', and ways there and back."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.adapters.stock_attention import stock_priors
from hf_sparseprior.convert import convert_checkpoint
from hf_sparseprior.models.pretrained import load_whole_model
from tests.timm_oracle import import_timm


def outputs(model, pixels):
    """Logits, or the tokens after the last norm."""
    with torch.no_grad():
        output = model(pixels)
    return output.logits if "logits" in output else output.last_hidden_state


def pixels_for(config, size=None):
    """Two random images of the config's size, or of another."""
    size = size or config.image_size
    sides = (size, size) if isinstance(size, int) else size
    return torch.randn(2, config.num_channels, *sides)


def assert_same(first, second):
    """Weights of the same names and values."""
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def weights_in(folder):
    return load_file(folder / "model.safetensors")


def assert_same_config(first, second, but=()):
    """Fields of the same values, but for `but` and where a config was loaded from."""
    before, after = first.to_dict(), second.to_dict()
    assert {key for key in before if before[key] != after[key]} <= {"_name_or_path", *but}


def check_stock_prior_is_carried_over(source, prior, pixels, folder):
    """A model of transformers with a prior, its weights moved, gives what ours does after `convert`."""
    sp.apply_prior(source, prior)
    with torch.no_grad():
        for module in stock_priors(source):
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    expected = outputs(source, pixels)
    source.save_pretrained(folder / "source")
    convert_checkpoint(folder / "source", folder / "out")
    found = outputs(loader_for(source, pixels).from_pretrained(folder / "out"), pixels)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    plain = outputs(sp.remove_prior(source), pixels)
    assert (plain - expected).abs().max() > 1e-3  # the prior counts


def loader_for(source, pixels):
    """The Auto class that loads ours in the place of a model of others."""
    return AutoModelForImageClassification if "logits" in source(pixels) else AutoModel


def check_same_as_transformers(source, pixels, folder, old_name):
    """From files with the names of version 5 of transformers ours computes the same. What it writes are version 4's."""
    source.save_pretrained(folder / "source")
    path = folder / "source" / "model.safetensors"
    assert any(old_name in name for name in load_file(path))
    save_file({name: value.contiguous() for name, value in source.state_dict().items()}, path)
    assert not any(old_name in name for name in load_file(path))
    convert_checkpoint(folder / "source", folder / "out")
    model = loader_for(source, pixels).from_pretrained(folder / "out")
    torch.testing.assert_close(outputs(model, pixels), outputs(source, pixels), rtol=1e-4, atol=1e-5)


def check_round_trip(source, pixels, folder, unused=()):
    """From files with the names of version 4 of transformers ours computes the same, and back from ours the model has
    the very same weights, but for those whose names end so.
    """
    source.save_pretrained(folder / "source")
    convert_checkpoint(folder / "source", folder / "ours")
    model = loader_for(source, pixels).from_pretrained(folder / "ours")
    torch.testing.assert_close(outputs(model, pixels), outputs(source, pixels), rtol=1e-4, atol=1e-5)
    assert main(["convert", str(folder / "ours"), str(folder / "back"), "--to", source.config.model_type]) == 0
    before, after = (
        {key: value for key, value in weights_in(folder / name).items() if not key.endswith(unused)}
        for name in ("source", "back")
    )
    assert_same(before, after)
    model, info = type(source).from_pretrained(folder / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(outputs(model.eval(), pixels), outputs(source, pixels))
    own = {"dtype", "architectures", "transformers_version", "pooler_act", "use_mask_token"}
    assert_same_config(source.config, model.config, but=own)
    height, width = pixels.shape[2:]
    assert AutoImageProcessor.from_pretrained(folder / "back").size == {"height": height, "width": width}


def check_there_and_back(model, target, folder, but=()):
    """A model of ours, saved in folder/ours, as one of transformers, which is returned, and back."""
    assert main(["convert", str(folder / "ours"), str(folder / "theirs"), "--to", target]) == 0
    name = json.loads((folder / "theirs" / "config.json").read_text())["architectures"][0]
    stock, info = getattr(transformers, name).from_pretrained(folder / "theirs", output_loading_info=True)
    assert not any(info.values()), info
    pixels = pixels_for(model.config)
    torch.testing.assert_close(outputs(stock.eval(), pixels), outputs(model, pixels), rtol=1e-4, atol=1e-5)
    convert_checkpoint(folder / "theirs", folder / "back")
    back = type(model).from_pretrained(folder / "back")
    assert_same(model.state_dict(), back.state_dict())
    assert_same_config(model.config, back.config, but=but)
    return stock


def check_timm_folder(model, folder, but=()):
    """A model of ours, saved in folder/ours, as a folder of timm, which timm itself loads, and back."""
    assert main(["convert", str(folder / "ours"), str(folder / "timm"), "--to", "timm"]) == 0
    stock = import_timm().create_model(f"local-dir:{folder / 'timm'}", pretrained=True).eval()
    pixels = pixels_for(model.config)
    classifies = type(model).__name__.endswith("Classification")
    with torch.no_grad():
        output = stock(pixels) if classifies else stock.forward_features(pixels)
    own = outputs(model, pixels)
    torch.testing.assert_close(output.view_as(own), own, rtol=1e-4, atol=1e-5)
    convert_checkpoint(folder / "timm", folder / "back")
    back = load_whole_model(folder / "back", *([] if classifies else [AutoModel]))
    assert_same(model.state_dict(), back.state_dict())
    labels = [] if classifies else ["id2label", "label2id"]  # of a head
    assert_same_config(model.config, back.config, but=[*but, *labels])
    return stock


def write_timm_folder(folder, state, size=None, channels=3, **config):
    """A folder in timm's layout, as its hub has them, of five classes; without a size it says none."""
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    pretrained = {"mean": [0.1] * channels, "std": [0.2] * channels}
    pretrained |= {} if size is None else {"input_size": [3, *size]}
    config = {"num_classes": 5, "pretrained_cfg": pretrained, "label_names": list("abcde"), "model_args": {}, **config}
    (folder / "config.json").write_text(json.dumps(config))


def check_timm_both_ways(source, folder):
    """Ours computes what a model of timm does, whose folder folder/source is, and comes back. Returns ours, and timm's
    model from folder/back.
    """
    convert_checkpoint(folder / "source", folder / "ours")
    model = load_whole_model(folder / "ours")
    assert model.config.image_mean == [0.1] * source.in_chans and model.config.id2label[4] == "e"
    pixels = pixels_for(model.config)
    with torch.no_grad():
        expected = source(pixels)
    torch.testing.assert_close(outputs(model, pixels), expected, rtol=1e-5, atol=1e-5)
    assert main(["convert", str(folder / "ours"), str(folder / "back"), "--to", "timm"]) == 0
    assert_same(source.state_dict(), weights_in(folder / "back"))
    again = import_timm().create_model(f"local-dir:{folder / 'back'}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(again(pixels), expected)
    convert_checkpoint(folder / "back", folder / "again")
    assert_same_config(model.config, load_whole_model(folder / "again").config)
    return model, again


def check_refused(source, message):
    """It is not converted, and nothing is written beside it."""
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, source.parent / "out")
    assert [path.name for path in source.parent.iterdir()] == [source.name]
