"""`--import FILE`: a user's own support and decay in commands, and in models that load without this package."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification, ViTForImageClassification
from transformers.dynamic_module_utils import get_imports

import hf_sparseprior as sp
from hf_sparseprior.__main__ import main
from hf_sparseprior.adapters.stock_saving import CODE_ENTRY
from hf_sparseprior.attention import compiled_kernels
from hf_sparseprior.base import own_files
from hf_sparseprior.base.own_files import OwnFile, after_imports, carried, import_files, imported_paths
from hf_sparseprior.models.pretrained import load_whole_model
from hf_sparseprior.patterns.decay import DECAYS
from hf_sparseprior.saving.code import code_files
from tests.hf_sparseprior.adapters.stock_models import TINY, move_decays
from tests.own_file import OWN, PRIOR
from tests.processes import run_script
from tests.remote import check_remote_code


def small_model(**changes):
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = sp.SparsePriorViTConfig(**sizes, num_labels=3, prior=PRIOR, **changes)
    return sp.SparsePriorViTForImageClassification(config).eval()


def test_a_model_brings_the_file_to_processes_without_the_package(own_file, tmp_path):
    import_files([own_file])
    model, pixels = small_model(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, sp.Decay):
                layer.beta.fill_(0.7)
    check_remote_code({"ours": (model, pixels)}, tmp_path)  # to the bit, with the support and the decay
    text = (tmp_path / "models" / "ours" / "own_cross.py").read_text()
    assert text.count("\n") == OWN.count("\n") and "\nimport hf_sparseprior" not in text
    assert set(get_imports(tmp_path / "models" / "ours" / "own_cross.py")) == {"numpy"}
    # Saved once more by the code of the folder, and read where the package is imported and the file is given.
    script = """
import transformers
model = transformers.AutoModelForImageClassification.from_pretrained("models/ours", trust_remote_code=True)
model.save_pretrained("again")
"""
    run_script(script, folder=tmp_path)
    assert (tmp_path / "again" / "own_cross.py").read_text() == text
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(again(pixels).logits, model(pixels).logits, rtol=0, atol=1e-6)


def test_a_stock_model_brings_it_too(own_file, tmp_path):
    import_files([own_file])
    torch.manual_seed(0)
    model = sp.apply_prior(ViTForImageClassification(ViTForImageClassification.config_class(**TINY)).eval(), PRIOR)
    move_decays(model)
    model.save_pretrained(tmp_path / "stock")
    assert "from .own_cross import" in (tmp_path / "stock" / f"{CODE_ENTRY}.py").read_text()
    images = torch.randn(2, 3, 32, 32)
    save_file({"images": images}, tmp_path / "images.safetensors")
    script = """
import torch, transformers
from safetensors.torch import load_file, save_file
model = transformers.AutoModelForImageClassification.from_pretrained("stock", trust_remote_code=True)
with torch.no_grad():
    save_file({"logits": model(load_file("images.safetensors")["images"])[0]}, "logits.safetensors")
"""
    run_script(script, folder=tmp_path)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(compiled_kernels, "INSTALLED_VERSION", None)
        expected = model(images).logits
    torch.testing.assert_close(load_file(tmp_path / "logits.safetensors")["logits"], expected, rtol=0, atol=1e-6)


def test_what_a_model_carries_can_be_imported(own_file, tmp_path, registries):
    text = carried(OwnFile("own_cross", str(own_file), OWN))
    (tmp_path / "own_cross.py").write_text(text)
    import_files([tmp_path / "own_cross.py"])
    (saved,) = own_files.IMPORTED.values()
    compile(saved.source, "cross.py", "exec")
    assert saved.name == "own_cross" and carried(saved) == text
    mask = sp.supports.build_mask("cross", num_heads=2, grid=(4, 4), num_tokens=16, reach=1, shuffle_seed=None)
    rows, columns = np.divmod(np.arange(16), 4)
    near = abs(rows[:, None] - rows) + abs(columns[:, None] - columns) <= 1
    assert (np.asarray(mask)[0] == near).all()


def test_without_a_file_models_carry_none(own_file):
    assert not [name for name in code_files(("hf_sparseprior.adapters.modeling_stock_prior",)) if "own_" in name]


def test_a_file_is_imported_once(own_file, tmp_path):
    import_files([own_file, own_file])
    import_files([str(own_file)])
    assert imported_paths() == [str(own_file)]
    assert after_imports(imported_paths(), lambda a, b: (a, b), 1, b=2) == (1, 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cross.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"other/cross.py: .*/cross.py has the same name in a saved model"):
        import_files([tmp_path / "other" / "cross.py"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import hf_sparseprior as sp\n\nsp.register_suport('x')\n",
            r"line 3: AttributeError: .* 'register_sup",
        ),
        ("def f(:\n", r"cross\.py, line 1: invalid syntax"),
        ("x = 1\nimport nothing_like_it\n", r"line 2: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("\n\nraise ValueError('a bad value')\n", r"cross\.py, line 3: a bad value$"),
        ("import hf_sparseprior.patterns.masks\n", r"line 1: `import hf_sparseprior\.patterns\.masks` must be `import"),
        ("import torch, hf_sparseprior\n", r"line 1: .* must be `import hf_sparseprior as NAME` alone"),
        ("from hf_sparseprior import *\n", r"line 1: .* must name what it imports"),
        (
            "from hf_sparseprior.training.trainer import T\n",
            r"line 1: .* must import names of a module",
        ),
        ("from .helper import x\n", r"line 1: .* not with those next to it"),
        ("x = 1; import hf_sparseprior as sp\n", r"line 1: this import needs a line for itself"),
    ],
)
def test_an_error_is_one_line_with_its_file_and_line(own_file, text, message, capsys):
    own_file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        import_files([own_file])
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"--import {own_file}, line")
    assert "own_cross" not in sys.modules and not own_files.IMPORTED
    assert main(["explain", "dense", "--no-picture", "--import", str(own_file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_file_and_another_kind_are_named(own_file, tmp_path, capsys):
    for name, text in (("nowhere.py", "nowhere.py"), ("notes.txt", "notes.txt must be a Python file, FILE.py")):
        assert main(["explain", "dense", "--no-picture", "--import", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1


def test_a_folder_whose_file_nobody_imported_names_it(own_file, tmp_path):
    import_files([own_file])
    small_model().save_pretrained(tmp_path / "ours")
    stock = ViTForImageClassification(ViTForImageClassification.config_class(**TINY))
    sp.apply_prior(stock, PRIOR).save_pretrained(tmp_path / "stock")
    for registry, name in ((sp.supports.SUPPORTS, "cross"), (DECAYS, "columns")):
        del registry[name]
    own_files.IMPORTED.clear()
    for name in ("ours", "stock"):
        with pytest.raises(ValueError, match=rf"cross.*own_cross\.py: if you trust it, --import {tmp_path}/{name}/own"):
            AutoModelForImageClassification.from_pretrained(tmp_path / name)
    with pytest.raises(ValueError) as caught:
        AutoModelForImageClassification.from_pretrained(tmp_path / "ours", hidden_size=-1)
    assert "\n" not in str(caught.value)


def test_explain_and_export_know_the_file(own_file, tmp_path, capsys):
    assert main(["explain", "cross", "--no-picture", "--grid", "4x4", "--heads", "2", "--import", str(own_file)]) == 0
    assert "cross" in capsys.readouterr().out
    model = small_model()
    model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "own_cross.py").is_file()
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), "--import", str(own_file)]) == 0
    assert (tmp_path / "out" / "own_cross.py").read_bytes() == (tmp_path / "model" / "own_cross.py").read_bytes()
    loaded = load_whole_model(tmp_path / "out", sp.SparsePriorViTForImageClassification)
    assert loaded.config.prior["support"]["name"] == "cross"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["prior"]["decay"]["name"] == "columns"
