"""The kernels as a package of their own, in the layout of Hugging Face's `kernels` library."""

import json
import os
import subprocess
import sys

import pytest

from hf_sparseprior.kernels import build
from tests import hub_layout

RUNS = [name for name, (needed, _) in build.VARIANTS.items() if needed <= set(build._processor().split())]

# Loads the package as `kernels` does, by its path and the name in metadata.json, and compares with all pairs written
# out in float64, forward and backward: without this package, and if BESIDE is 1 once more after it has been loaded.
TRY = """
import importlib.util, json, math, os, sys
from pathlib import Path
import torch

folder = Path(sys.argv[1])
if len(sys.argv) > 2:
    from kernels import get_local_kernel
    module = get_local_kernel(Path(sys.argv[2]))
else:
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

torch.manual_seed(0)
heads, tokens, width, prefix = 2, 21, 8, 1
patches = tokens - prefix
q, k, v = (torch.randn(2, heads, tokens, width, requires_grad=True) for _ in range(3))
offsets = [[0, 1, 3], [2, 5]]


def written_out(logits_factor, allowed):
    a, b, c = (x.detach().double().requires_grad_() for x in (q, k, v))
    logits = a @ b.mT / math.sqrt(width) * logits_factor
    out = logits.masked_fill(~allowed, -math.inf).softmax(-1) @ c
    return out, torch.autograd.grad(out.square().sum(), (a, b, c))


def compare(found, expected):
    gradients = torch.autograd.grad(found.square().sum(), (q, k, v))
    for one, other in zip((found, *gradients), (expected[0], *expected[1]), strict=True):
        assert (one.double() - other).abs().max() < 1e-5, (one.double() - other).abs().max()


place = torch.arange(tokens) - prefix
distance = (place[:, None] - place).abs()
is_prefix = (place[:, None] < 0) | (place < 0)
allowed = torch.stack([is_prefix | torch.isin(distance, torch.tensor(own)) for own in offsets])
signed = [o for own in offsets for one in own for o in ((one,) if one == 0 else (one, -one))]
counts = torch.tensor([sum(1 if o == 0 else 2 for o in own) for own in offsets], dtype=torch.int32)
lonely = ~allowed.any(-1)
assert not lonely.any()
signed = torch.tensor(signed, dtype=torch.int32)

keys = torch.full((1, heads, patches, tokens), -1, dtype=torch.int32)
for head in range(heads):
    for row in range(patches):
        own = allowed[head, prefix + row].nonzero()[:, 0]
        keys[0, head, row, : len(own)] = own.int()

log_gamma, alpha, prefix_gamma = -torch.rand(1, heads), 1 + torch.rand(heads), torch.rand(heads)
positions = torch.arange(patches, dtype=torch.float32).view(1, 1, -1)
own = (log_gamma[0].double().view(-1, 1, 1) * distance).exp()
factor = torch.where(is_prefix, prefix_gamma.double().view(-1, 1, 1), own)
everywhere = torch.ones(tokens, tokens, dtype=torch.bool)


def check():
    found = module.diagonal_attention(q, k, v, signed, counts, prefix, width**-0.5)
    compare(found, written_out(1.0, allowed))
    found = module.listed_attention(q, k, v, keys, prefix, width**-0.5)
    compare(found, written_out(1.0, allowed))
    found = module.decayed_attention(q, k, v, positions, log_gamma, alpha, prefix_gamma, prefix, width**-0.5)
    compare(found, written_out(alpha.double().view(-1, 1, 1) * factor, everywhere))


check()
assert "hf_sparseprior" not in sys.modules
if os.environ["BESIDE"] == "1":
    import hf_sparseprior.kernels.diagonal_cpu as other

    assert other.ready() is None, other.ready()
    check()
print("equal", module.library.stem)
"""


@pytest.mark.slow
def test_loaded_by_its_path_it_equals_all_pairs_written_out(tmp_path):
    if not RUNS or sys.platform != "linux":
        pytest.skip("this machine runs none of the libraries of a wheel")
    if build.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    laid_out = hub_layout.lay_out(tmp_path / "sparseprior-attention", RUNS[:1])
    metadata = json.loads((laid_out / "metadata.json").read_text(encoding="utf-8"))
    assert {"id", "name", "version", "license", "python-depends", "backend"} <= metadata.keys()
    assert laid_out.name == hub_layout.VARIANT and laid_out.parent.name == "build"
    assert [path.name for path in (laid_out / "prebuilt").iterdir()] == [f"{RUNS[0]}.so"]
    for path in laid_out.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "import hf_sparseprior" not in text and "from hf_sparseprior" not in text, path
        assert "hf_sparseprior::" not in text
    calls = (laid_out / "diagonal_cpu.py").read_text(encoding="utf-8")
    assert f"torch.ops.{metadata['id']}.diagonal_forward" in calls

    (elsewhere := tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-P", "-c", TRY, str(laid_out)]
    environment = {**os.environ, "BESIDE": "1"}
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["equal", RUNS[0]]


def test_an_existing_folder_is_refused(tmp_path, capsys):
    assert hub_layout.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path) in error and len(error.splitlines()) == 1


def test_without_a_compiler_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert hub_layout.main([str(tmp_path / "out")]) == 2
    assert "no C++ compiler" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
