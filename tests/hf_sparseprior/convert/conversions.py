"""What tests of conversions share: outputs, weights and images of models, ours and others'."""

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForImageClassification

import hf_sparseprior as sp
from hf_sparseprior.adapters.stock_attention import stock_priors
from hf_sparseprior.convert import convert_checkpoint


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
    loader = (
        AutoModelForImageClassification if hasattr(source, "num_labels") and "logits" in source(pixels) else AutoModel
    )
    torch.testing.assert_close(outputs(loader.from_pretrained(folder / "out"), pixels), expected, rtol=1e-4, atol=1e-5)
    plain = outputs(sp.remove_prior(source), pixels)
    assert (plain - expected).abs().max() > 1e-3  # the prior counts
