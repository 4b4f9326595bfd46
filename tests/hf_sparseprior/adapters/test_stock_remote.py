"""Stock models with a prior in processes that never imported this package: the code lies in their folders."""

import filecmp
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    BeitForImageClassification,
    DeiTForImageClassification,
    Dinov2ForImageClassification,
    SwinForImageClassification,
    TimesformerForVideoClassification,
    ViTForImageClassification,
    ViTModel,
)
from transformers.dynamic_module_utils import get_imports

import hf_sparseprior as sp
from hf_sparseprior.adapters import modeling_stock_prior
from hf_sparseprior.adapters.stock_attention import RECORD, stock_priors
from hf_sparseprior.adapters.stock_saving import CODE_ENTRY
from hf_sparseprior.attention import compiled_kernels
from tests.hf_sparseprior.adapters.stock_models import STOCK, StockCase, move_decays, tiny_clip
from tests.processes import run_script

# Name: the class, whose config STOCK has under the name's first part, the Auto class, the prior.
MODELS = {
    "vit": (ViTForImageClassification, "AutoModelForImageClassification", "fibottention+violin"),
    "deit": (DeiTForImageClassification, "AutoModelForImageClassification", "violin"),
    "dinov2": (Dinov2ForImageClassification, "AutoModelForImageClassification", "fibottention"),
    "swin": (SwinForImageClassification, "AutoModelForImageClassification", "fibottention+violin"),
    "beit": (BeitForImageClassification, "AutoModelForImageClassification", "bigbird+manhattan"),
    "timesformer": (TimesformerForVideoClassification, "AutoModelForVideoClassification", "violin"),
    "vit_base": (ViTModel, "AutoModel", "fibottention+violin"),
    "vit_mixer": (ViTForImageClassification, "AutoModelForImageClassification", "linformer"),
    "vit_topk": (ViTForImageClassification, "AutoModelForImageClassification", "topk"),
    "vit_layers": (
        *(ViTForImageClassification, "AutoModelForImageClassification"),
        {"layers": ["violin", "dense", {"heads": {"0-1": "fibottention", "2-3": "neighborhood"}}]},
    ),
}
LOAD = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file

def output(model, name):
    with torch.no_grad():
        return model(inputs[name])[0].contiguous()

inputs, found = load_file("inputs.safetensors"), {}
for name, auto_class in zip(sys.argv[1::2], sys.argv[2::2]):
    auto_class = getattr(transformers, auto_class)
    model = auto_class.from_pretrained("models/" + name, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers.models.") and not model.training, type(model)
    assert not hasattr(model.config, "sparse_prior") and not hasattr(model.config, "auto_map"), model.config
    found[name] = output(model, name)
    model.save_pretrained("again/" + name)
    again = auto_class.from_pretrained("again/" + name, trust_remote_code=True)
    assert torch.equal(output(again, name), found[name]), name
    for options in ({}, {"trust_remote_code": False}):
        for loads in (auto_class, type(model)):
            try:
                loads.from_pretrained("models/" + name, **options)
            except ValueError as error:
                assert 'attn_implementation="hf_sparseprior"' in str(error), error
            else:
                raise AssertionError(f"{name} loaded without its code")
assert not [name for name in sys.modules if name.partition(".")[0] == "hf_sparseprior"]
save_file(found, "found.safetensors")
"""


def moved(model):
    """A model with a prior whose decays are far from the identity, for evaluation."""
    move_decays(model)
    return model.eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with models/NAME, again/NAME as a process without the package saved it, and outputs of both processes.

    The kernels of this process are off, because the other has none.
    """
    root, inputs, outputs, models = tmp_path_factory.mktemp("remote"), {}, {}, {}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(compiled_kernels, "INSTALLED_VERSION", None)
        for name, (model_class, _, prior) in MODELS.items():
            case = STOCK[name.partition("_")[0]]
            torch.manual_seed(3)
            plain = StockCase(model_class, {**case.config, "num_labels": 5}).build()
            inputs[name] = case.example()["pixel_values"].contiguous()
            dense = plain(inputs[name])[0]
            models[name] = moved(sp.apply_prior(plain, prior))
            outputs[name] = models[name](inputs[name])[0]
            assert (outputs[name] - dense).abs().max() > 1e-5, name  # a model without its prior would be seen
            models[name].save_pretrained(root / "models" / name)
    save_file(inputs, root / "inputs.safetensors")
    arguments = [word for name, (_, auto_class, _) in MODELS.items() for word in (name, auto_class)]
    run_script(LOAD, *arguments, folder=root)
    return SimpleNamespace(
        root=root, models=models, inputs=inputs, outputs=outputs, found=load_file(root / "found.safetensors")
    )


@pytest.mark.parametrize("name", MODELS)
def test_without_the_package_the_outputs_are_the_same(name, saved):
    assert saved.found.keys() == MODELS.keys()
    torch.testing.assert_close(saved.found[name], saved.outputs[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_what_such_a_process_saves_is_the_same_folder(name, saved):
    first, second = saved.root / "models" / name, saved.root / "again" / name
    names = sorted(path.name for path in first.iterdir())
    assert f"{CODE_ENTRY}.py" in names and len([name for name in names if name.endswith(".py")]) == 8
    assert names == sorted(path.name for path in second.iterdir())
    assert filecmp.cmpfiles(first, second, names, shallow=False)[1:] == ([], [])


def test_with_the_package_all_is_as_it_was(saved):
    for options in ({}, {"trust_remote_code": True}):  # the package goes first
        folder = saved.root / "again" / "vit"
        model = AutoModelForImageClassification.from_pretrained(folder, **options)
        with torch.no_grad():
            found = model(saved.inputs["vit"])[0]
        torch.testing.assert_close(found, saved.outputs["vit"], rtol=0, atol=1e-5)
        assert len(stock_priors(model)) == 3
        assert model.config.to_diff_dict() == saved.models["vit"].config.to_diff_dict()
        sp.remove_prior(model)


def test_the_files_need_no_other_package_than_every_model(saved):
    """transformers asks for all that is imported anywhere in the files of a model of the hub, in functions too."""
    usual = {*sys.stdlib_module_names, "torch", "transformers", "numpy", "safetensors", "huggingface_hub"}
    for name in ("vit", "swin"):
        for path in (saved.root / "models" / name).glob("*.py"):
            assert set(get_imports(path)) <= usual, path.name


HUB = """
import torch, transformers
from safetensors.torch import load_file, save_file
model = transformers.AutoModelForImageClassification.from_pretrained("me/vit", trust_remote_code=True)
with torch.no_grad():
    save_file({"logits": model(load_file("inputs.safetensors")["vit"])[0]}, "hub.safetensors")
"""


def test_a_model_of_the_hub_brings_code_and_scalars_of_its_commit(saved, tmp_path):
    repository, commit = tmp_path / "home" / "hub" / "models--me--vit", "0123456789abcdef" * 2 + "01234567"
    shutil.copytree(saved.root / "models" / "vit", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    shutil.copy(saved.root / "inputs.safetensors", tmp_path)
    run_script(HUB, folder=tmp_path)
    assert torch.equal(load_file(tmp_path / "hub.safetensors")["logits"], saved.found["vit"])


TOGETHER = """
import sys, torch, transformers
from safetensors.torch import load_file

inputs, found = load_file("inputs.safetensors"), load_file("found.safetensors")
def check(model, name):
    with torch.no_grad():
        torch.testing.assert_close(model(inputs[name])[0], found[name], rtol=0, atol=1e-5)
    return model
def load(name, **options):
    model = transformers.AutoModelForImageClassification.from_pretrained("models/" + name, **options)
    return check(model, name)

first, second = load("vit", trust_remote_code=True), load("deit", trust_remote_code=True)
eager = load("vit", trust_remote_code=True, attn_implementation="eager")
import hf_sparseprior as sp
sp.remove_prior(load("swin"))
for model, name in ((first, "vit"), (second, "deit"), (eager, "vit")):
    check(model, name)
"""


def test_several_folders_and_the_package_share_a_process(saved):
    """The code of a folder imports the package for its kernels, where it is installed."""
    run_script(TOGETHER, folder=saved.root, package=True)


def test_the_tower_of_a_pair_comes_back(tmp_path):
    script = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
pair = transformers.AutoModel.from_pretrained("pair", trust_remote_code=True)
with torch.no_grad():
    found = pair.vision_model(load_file("inputs.safetensors")["images"]).last_hidden_state
save_file({"found": found}, "found.safetensors")
"""
    pair = moved(sp.apply_prior(tiny_clip(), "fibottention+violin"))
    pair.save_pretrained(tmp_path / "pair")
    images = STOCK["clip"].example()["pixel_values"]
    save_file({"images": images}, tmp_path / "inputs.safetensors")
    run_script(script, folder=tmp_path)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(compiled_kernels, "INSTALLED_VERSION", None)
        expected = pair.vision_model(images).last_hidden_state
    torch.testing.assert_close(load_file(tmp_path / "found.safetensors")["found"], expected, rtol=0, atol=1e-6)


def test_what_some_versions_register_does_not_stay(saved):
    """They make the class of `auto_map` that of all models with such a config."""
    loader = modeling_stock_prior.AutoModelForImageClassification
    config = AutoConfig.from_pretrained(saved.root / "models" / "vit")
    AutoModelForImageClassification.register(type(config), loader, exist_ok=True)
    model = loader.from_pretrained(saved.root / "models" / "vit", config=config)
    assert type(model) is ViTForImageClassification and len(stock_priors(model)) == 3
    plain = AutoModelForImageClassification.from_config(ViTModel.config_class(**STOCK["vit"].config))
    assert type(plain) is ViTForImageClassification and not stock_priors(plain)


class OwnViT(ViTForImageClassification):
    """A class that transformers does not have."""


def test_a_class_of_others_is_saved_without_code(tmp_path):
    torch.manual_seed(0)
    sp.apply_prior(OwnViT(ViTModel.config_class(**STOCK["vit"].config)), "violin").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert RECORD in config and "auto_map" not in config and not list(tmp_path.glob("*.py"))
    assert "trust_remote_code" not in (tmp_path / "README.md").read_text()


def test_an_auto_map_of_the_models_own_is_put_back(tmp_path):
    model = sp.apply_prior(STOCK["vit"].build(), "violin")
    model.config.auto_map = {"AutoModel": "somebody--theirs.Model"}
    model.save_pretrained(tmp_path)
    assert model.config.auto_map == {"AutoModel": "somebody--theirs.Model"}
    written = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert written["AutoModel"] == f"{CODE_ENTRY}.AutoModel"
