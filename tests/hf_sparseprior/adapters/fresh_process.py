"""Loads saved models in a fresh process, with this package imported or without. `test_stock_loading` runs it.

    run_script(..., "with" or "without", *folders)

Every folder has `expected.safetensors`: images, and the outputs of the model with its prior. The script prints JSON
with the outcome for every folder and way of loading and, with the package, the attributes of classes that its import
changed.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

CLASSES = {"vit": ["ViTForImageClassification", "AutoModelForImageClassification"], "clip": ["CLIPVisionModel"]}
WAYS = ("as saved", "eager", "sdpa", "own config")
BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 9}


def attributes_of_classes() -> dict[str, dict]:
    """The attributes of every class of every loaded module of transformers and peft."""
    return {
        f"{name}.{value.__qualname__}": dict(vars(value))
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("transformers", "peft")
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ == name
    }


def import_changes() -> list[str]:
    """Import the package. Returns the attributes of others' classes that it replaced, added or removed."""
    import peft  # noqa: F401
    from transformers import (  # noqa: F401  loaded, so that they are looked at
        AutoBackbone,
        AutoModel,
        BertModel,
        PreTrainedConfig,
        PreTrainedModel,
        Trainer,
        ViTModel,
    )

    before = attributes_of_classes()
    import hf_sparseprior  # noqa: F401

    after = attributes_of_classes()
    assert "from_pretrained" in before["transformers.modeling_utils.PreTrainedModel"]
    return sorted(
        f"{name}.{key}"
        for name, attributes in before.items()
        for key in attributes.keys() | after[name].keys()
        if attributes.get(key) is not after[name].get(key)
    )


def load(folder: Path, model_class: type, options: dict) -> dict:
    """The outcome of loading a folder and of one forward."""
    expected = load_file(folder / "expected.safetensors")
    try:
        model, info = model_class.from_pretrained(
            pretrained_model_name_or_path=folder, output_loading_info=True, **options
        )
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    try:
        with torch.no_grad():
            output = model(expected["images"])[0]
    except RuntimeError as error:
        return {"forward": str(error)}
    difference = (output - expected["output"]).abs().max().item()
    return {"difference": difference, "unexpected": sorted(info["unexpected_keys"])}


def own_config(folder: Path) -> transformers.PreTrainedConfig:
    """The config of a user who knows of no prior."""
    written = json.loads((folder / "config.json").read_text())
    written = written.get("vision_config", written)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size", "patch_size")
    config_class = transformers.CLIPVisionConfig if "clip" in folder.name else transformers.ViTConfig
    return config_class(**{name: written[name] for name in sizes})


def main() -> None:
    """Load every folder in every way."""
    results: dict = {}
    if sys.argv[1] == "with":
        results["changed"] = import_changes()
    for folder in map(Path, sys.argv[2:]):
        for name in CLASSES[folder.name.partition("_")[0]]:
            for way in WAYS:
                options = {"config": own_config(folder)} if way == "own config" else {}
                options |= {"attn_implementation": way} if way in ("eager", "sdpa") else {}
                results[f"{folder.name} {name} {way}"] = load(folder, getattr(transformers, name), options)
    bert = transformers.BertModel(transformers.BertConfig(**BERT))
    bert.save_pretrained("bert")
    transformers.BertModel.from_pretrained(pretrained_model_name_or_path="bert")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
