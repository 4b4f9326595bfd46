"""How the folders here were saved, by commit e5bff13: `python make.py OUT` with that commit's package.

Tiny stock models with random weights and a prior whose scalars are far from where they start, and in
`expected.safetensors` images and what the model makes of them.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel, ViTConfig, ViTForImageClassification

import hf_sparseprior as sp

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
TINY = {**SIZES, "image_size": 16, "patch_size": 4}
TEXT = {**SIZES, "vocab_size": 5, "max_position_embeddings": 4}
SUPPORT = {"name": "fibottention", "w_min": 1, "w_max": 2}


def scatter(model: torch.nn.Module) -> None:
    """Attention far from uniform, decays far from the identity."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.normal_(generator=generator)
            if name.endswith("beta"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 3)
            if name.endswith("alpha"):
                parameter.copy_(1 + torch.rand(parameter.shape, generator=generator))


def main(out: Path) -> None:
    """Write the three folders."""
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    for name, prior in {
        "vit_fibottention": {"support": SUPPORT},
        "vit_both": {"support": SUPPORT, "decay": "violin"},
    }.items():
        torch.manual_seed(0)
        model = sp.apply_prior(ViTForImageClassification(ViTConfig(**TINY)).eval(), prior)
        scatter(model)
        model.save_pretrained(out / name)
        with torch.no_grad():
            save_file({"images": images, "output": model(images).logits}, out / name / "expected.safetensors")
    torch.manual_seed(0)
    pair = CLIPModel(CLIPConfig(text_config=TEXT, vision_config=TINY, projection_dim=4)).eval()
    sp.apply_prior(pair, {"support": SUPPORT, "decay": "manhattan"})
    scatter(pair)
    pair.save_pretrained(out / "clip_both")
    with torch.no_grad():
        output = pair.vision_model(images).last_hidden_state
    save_file({"images": images, "output": output}, out / "clip_both" / "expected.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
