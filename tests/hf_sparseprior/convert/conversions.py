"""What tests of conversions share: outputs, weights and images of models, ours and others', and ways there and back."""

import json

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


def check_same_as_transformers(source, pixels, names, folder, old_name):
    """From files with the names of version 4 of transformers, which it writes, or of 5, ours computes the same."""
    source.save_pretrained(folder / "source")
    path = folder / "source" / "model.safetensors"
    assert any(old_name in name for name in load_file(path))
    if names == "version 5":
        save_file({name: value.contiguous() for name, value in source.state_dict().items()}, path)
        assert not any(old_name in name for name in load_file(path))
    convert_checkpoint(folder / "source", folder / "out")
    model = loader_for(source, pixels).from_pretrained(folder / "out")
    torch.testing.assert_close(outputs(model, pixels), outputs(source, pixels), rtol=1e-4, atol=1e-5)


def check_round_trip(source, pixels, folder, unused=()):
    """Through ours and back a model of transformers has the very same weights, but for those whose names end so."""
    source.save_pretrained(folder / "source")
    convert_checkpoint(folder / "source", folder / "ours")
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
