"""The declarations of torch's stable C functions, against torch's own headers."""

import os
import re
import shutil
import subprocess

import pytest
from torch.utils.cpp_extension import include_paths

from hf_sparseprior.kernels import build

PROGRAM = """
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include "torch_abi.h"
{more}
"""


@pytest.fixture
def compiles(tmp_path):
    """Whether g++ takes torch's headers, ours, and some lines more."""
    compiler = shutil.which("g++")
    if compiler is None:
        assert not os.environ.get("CI_NEEDS_KERNELS"), "g++ is not installed"
        pytest.skip("g++ is not installed")
    includes = [part for path in (*include_paths(), build.FOLDER) for part in ("-I", str(path))]

    def check(more="", header="torch_abi.h"):
        (tmp_path / "main.cpp").write_text(PROGRAM.format(more=more).replace("torch_abi.h", str(header)))
        command = [compiler, "-std=c++20", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020a000000000000", *includes]
        return subprocess.run(
            [*command, str(tmp_path / "main.cpp")], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
        )

    return check


def test_the_declarations_are_torchs(compiles):
    done = compiles("static_assert(sparseprior::ABI_VERSION == TORCH_VERSION_2_10_0);")
    assert done.returncode == 0, done.stderr


def declarations():
    text = (build.FOLDER / "torch_abi.h").read_text()
    block = re.search(r'extern "C" \{\n(AOTI.*?)\n\}', text, re.DOTALL)[1]
    return [" ".join(line.split()) for line in block.split(";") if line.strip()]


def test_every_function_is_torchs_and_has_another_type_if_it_is_changed(compiles, tmp_path):
    """Without this, a name that torch does not have would be a declaration of our own."""
    text = (build.FOLDER / "torch_abi.h").read_text()
    assert len(declarations()) == 19
    for declared in declarations():
        name = re.search(r"(\w+)\(", declared)[1]
        assert f" {name}(" in text
    changed = tmp_path / "changed.h"
    # C functions with the same name and other arguments or results contradict each other only if both are declared.
    changed.write_text(re.sub(r"(?m)^(AOTITorchError|int32_t) (\w+)\(", r"double \2(", text))
    done = compiles(header=changed)
    contradicted = set(re.findall(r"conflicting declaration of C function 'double (\w+)\(", done.stderr))
    assert contradicted == {re.search(r"(\w+)\(", declared)[1] for declared in declarations()}
