"""The code in a saved folder: few files, the sources' own text, and refusals of what cannot be joined."""

import ast
import functools
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path

import pytest
import torch

import hf_sparseprior
from hf_sparseprior.base.families import FAMILIES
from hf_sparseprior.saving import code
from tests.hf_sparseprior.small import SMALL, shipped_families, small
from tests.processes import run_script

ROOMS = {"base", "patterns", "attention", "priors", "saving", "models"}
PACKAGE = Path(hf_sparseprior.__file__).parent


@pytest.mark.parametrize("family", shipped_families())
def test_model_and_configuration_are_saved_with_the_same_eight_files(family, tmp_path):
    torch.manual_seed(0)
    config = small(family)
    FAMILIES[family].base(config).save_pretrained(tmp_path / "model")
    config.save_pretrained(tmp_path / "config")
    saved = [{path.stem: path.read_bytes() for path in (tmp_path / of).glob("*.py")} for of in ("model", "config")]
    assert saved[0] == saved[1] and saved[0].keys() == {*ROOMS, f"configuration_{family}", f"modeling_{family}"}
    for text in saved[0].values():
        assert text.startswith(f"# hf_sparseprior {hf_sparseprior.__version__}, ".encode())


@functools.cache
def definitions(source: str) -> list[str]:
    """Every function and class at the top of a source, without the imports in it."""

    class WithoutImports(ast.NodeTransformer):
        def visit_ImportFrom(self, node):
            return ast.Pass()

    tree = ast.parse(source)
    nodes = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return [ast.dump(WithoutImports().visit(node)) for node in nodes]


@pytest.mark.parametrize("family", shipped_families())
def test_the_files_hold_the_definitions_of_the_modules(family):
    """And all of a module where one of its names is needed."""
    files = code.code_files(FAMILIES[family].modules)
    modules = [
        PACKAGE / line.split()[2] for text in files.values() for line in text.splitlines() if line.startswith("# ====")
    ]
    modules += [PACKAGE / "models" / f"{kind}_{family}.py" for kind in ("configuration", "modeling")]
    assert len(modules) > 50 and PACKAGE / "models" / "base_model.py" in modules
    expected = [each for path in modules for each in definitions(path.read_text())]
    assert sorted(expected) == sorted(each for text in files.values() for each in definitions(text))
    assert len(set(expected)) == len(expected) > 300


FOREIGN_FAMILY = """
import hf_sparseprior as sp

class ForeignConfig(sp.SparsePriorViTConfig):
    model_type = "foreign_vit"

class ForeignModel(sp.SparsePriorViTModel):
    config_class = ForeignConfig

sp.register_family(sp.Family(ForeignConfig, {"AutoModel": ForeignModel}, "Foreign", "ViT"))
"""
LOAD = """
import sys, torch
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules") and model.config.model_type == "foreign_vit"
model.save_pretrained(sys.argv[2])
"""


def test_of_other_peoples_code_that_of_the_family_alone_is_saved(tmp_path, monkeypatch, registries):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "foreign_family.py").write_text(FOREIGN_FAMILY)
    (tmp_path / "mine" / "private.py").write_text("PASSWORD = 1")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    foreign = importlib.import_module("foreign_family")
    foreign.ForeignModel(foreign.ForeignConfig(**SMALL["sparseprior_vit"])).save_pretrained(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").glob("*.py")] == ["foreign_family.py"]
    run_script(LOAD, str(tmp_path / "saved"), str(tmp_path / "again"), folder=tmp_path, package=True)
    for name in ("foreign_family.py", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


# ---- a package of its own -------------------------------------------------------------------------------------------

FUTURE = "from __future__ import annotations\n"
TOY = {
    "low/first.py": "SCALE = 2\n\n\ndef twice(x):\n    return SCALE * x\n\n\ndef fail():\n    raise KeyError('low')\n",
    "low/second.py": """from toy_rooms.low.first import (
    SCALE,  # a number
    twice as doubled,
)


class Sum:
    @property
    def total(self):
        from toy_rooms.low.first import twice

        return twice(1) + doubled(1) + SCALE
""",
    "low/third.py": "from toy_rooms.low.second import Sum\n\n__all__ = ['Sum']\n",
    "high/modeling_toy.py": """from toy_rooms.low.first import fail
from toy_rooms.low.third import Sum


def run():
    return Sum().total


def broken():
    fail()
""",
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A function that writes the package `toy_rooms` with some files changed, and gives the files of its code."""

    def make(changed=None):
        sections = (PACKAGE / "base" / "sections.py").read_text().partition(FUTURE)[2]
        for name, text in {**TOY, "base/sections.py": sections, **(changed or {})}.items():
            path = tmp_path / "toy_rooms" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name("__init__.py").write_text('"""A room."""\n')
            path.write_text('"""A module."""\n\n' + ("" if "NO FUTURE" in text else FUTURE) + "\n" + text)
        (tmp_path / "toy_rooms" / "__init__.py").write_text("")
        importlib.invalidate_caches()
        return code.code_files(("toy_rooms.high.modeling_toy",))

    monkeypatch.setattr(code, "PACKAGE", "toy_rooms")
    monkeypatch.setattr(code, "SECTIONS", "toy_rooms.base.sections")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield make
    code.code_files.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("toy_rooms", "toy_saved")]:
        del sys.modules[name]


def test_joined_modules_do_what_they_did(toy, tmp_path):
    files = toy()
    assert files.keys() == {"low.py", "base.py", "modeling_toy.py"}
    saved = tmp_path / "toy_saved"
    saved.mkdir()
    for name, text in {**files, "__init__.py": ""}.items():
        (saved / name).write_text(text)
    ours, theirs = (importlib.import_module(name) for name in ("toy_rooms.high.modeling_toy", "toy_saved.modeling_toy"))
    assert ours.run() == theirs.run() == 6
    with pytest.raises(KeyError) as caught:
        theirs.broken()
    last = traceback.format_tb(caught.tb)[-1]
    assert "low.py" in last and "in fail of low/first.py" in last and "raise KeyError('low')" in last
    low = sys.modules["toy_saved.low"]
    assert low.fail.__name__ == "fail" and low.Sum.total.fget.__code__.co_name == "total of low/second.py"


def test_variables_of_comprehensions_are_no_names_of_a_module():
    """Python counts them among the module's from 3.12 on."""
    source = """
import os
A = [b for b in range(3)]
c = {c: 1 for c in A}
for d in A:
    pass
def f(values):
    e = 1
    return [g + e for g in values]
class K:
    k = [m for m in A]
h = {j: i for j, i in enumerate(A)}
n = lambda o: [p for p in o]
"""
    assert code._bound_names(source, "module") == {"os", "A", "c", "d", "f", "K", "h", "n"}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("low/second.py", "SCALE = 3\nclass Sum: pass\n", "'SCALE' is one thing in .* and another in"),
        ("low/second.py", "from math import sqrt as twice\nclass Sum: pass\n", "'twice' is one thing in"),
        ("low/second.py", "class Sum: pass\ndef hash(): pass\n", "'hash' of .* would replace Python's own"),
        (
            "low/second.py",
            "from toy_rooms.low.first import *\nclass Sum: pass\n",
            "only names of a module can be joined",
        ),
        ("low/second.py", "from toy_rooms.low import first\nclass Sum: pass\n", "not those of toy_rooms.low"),
        ("low/second.py", "import toy_rooms.low.first\nclass Sum: pass\n", "can be joined"),
        (
            "low/second.py",
            "x = 1; from toy_rooms.low.first import fail\nclass Sum: pass\n",
            "needs its lines for itself",
        ),
        ("low/second.py", "from toy_rooms.low.missing import fail\nclass Sum: pass\n", "toy_rooms.low.missing"),
        ("low/second.py", "class Sum: pass  # NO FUTURE\n", "lacks 'from __future__ import annotations'"),
    ],
)
def test_what_cannot_be_joined_is_refused_by_name(toy, file, text, message):
    if "first" not in text and "one thing" in message:
        text = f"from toy_rooms.low.first import fail\n{text}"
    with pytest.raises(ValueError, match=message):
        toy({file: text})
