"""Classifiers that a process without this package loads from the code that was saved with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_sparseprior.attention import compiled_kernels
from tests.processes import run_script

SCRIPT = """
import sys
from pathlib import Path
import transformers
from safetensors.torch import load_file, save_file

pixels, logits = load_file("pixels.safetensors"), {}
for folder in sorted(Path("models").iterdir()):
    clips = pixels[folder.name].dim() == 5
    auto_class = transformers.AutoModelForVideoClassification if clips else transformers.AutoModelForImageClassification
    model = auto_class.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.") and not model.training
    logits[folder.name] = model(pixels[folder.name]).logits.detach().contiguous()
save_file(logits, "logits.safetensors")
assert not [name for name in sys.modules if name.partition(".")[0] == "hf_sparseprior"]
"""


def check_remote_code(models: dict[str, tuple[PreTrainedModel, torch.Tensor]], folder: Path) -> None:
    """Save models, each given with its images or clips, in folder/models/NAME; they give the same logits there.

    To the bit, but for a backend that was registered in this process alone.
    """
    for name, (model, _) in models.items():
        model.save_pretrained(folder / "models" / name)
    save_file({name: pixels for name, (_, pixels) in models.items()}, folder / "pixels.safetensors")
    run_script(SCRIPT, folder=folder)
    logits = load_file(folder / "logits.safetensors")
    assert logits.keys() == models.keys()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(compiled_kernels, "INSTALLED_VERSION", None)  # without the package there is no compiled kernel
        for name, (model, pixels) in models.items():
            torch.testing.assert_close(
                logits[name], model(pixels).logits, msg=lambda text, name=name: f"{name}: {text}"
            )
