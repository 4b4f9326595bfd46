"""The CPU kernels in the layout of Hugging Face's `kernels` library: python -m tests.hub_layout OUT

`kernels.get_local_kernel(Path(OUT))` loads them without this package, with any torch from 2.10 on. They are those of a
wheel, one library for each kind of processor, under operators of another name, so both can be in one process. OUT can
be uploaded as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_sparseprior.base.files import check_new, whole_folder, write_text
from hf_sparseprior.cli.command import USER_ERRORS, report_error
from hf_sparseprior.kernels import build

NAME = "sparseprior-attention"
VARIANT = "torch-stable-abi210-cpu-x86_64-linux"
MODULES = (
    *("build", "calling", "flop_formulas", "second_derivatives"),
    *("diagonal_cpu", "decayed_cpu", "listed_cpu", "predicted_cpu", "weights_cpu"),
)
OWN = "hf_sparseprior"
PACKAGE = '''\
"""Sparse attention on CPUs: along diagonals, over lists of keys, and over all pairs with a learned decay.

float32 and bfloat16, forward and backward. Each function says its shapes.
"""

import torch

from . import build, decayed_cpu, diagonal_cpu, listed_cpu, predicted_cpu, weights_cpu
from .decayed_cpu import decayed_attention
from .diagonal_cpu import diagonal_attention
from .listed_cpu import listed_attention
from .predicted_cpu import predicted_coefficients, predicted_keys
from .weights_cpu import listed_weights, pair_weights

library = build.prebuilt_library()
if library is None:
    raise ImportError(f"this processor runs none of the libraries: {', '.join(build.VARIANTS)}")
torch.ops.load_library(str(library))
diagonal_cpu.register()
for module in (decayed_cpu, listed_cpu, predicted_cpu, weights_cpu):
    module.register()

__all__ = [
    "decayed_attention", "diagonal_attention", "listed_attention", "listed_weights", "pair_weights",
    "predicted_coefficients", "predicted_keys",
]
'''
CARD = """\
---
library_name: kernels
license: apache-2.0
tags: [kernels]
---

# Sparse attention on CPUs

Attention along diagonals (Fibottention), over lists of keys (BigBird, Sparsifiner), and with VIOLIN's decay; float32
and bfloat16, forward and backward, for AVX2, AVX-512 and AVX-512 with bfloat16.

```python
import torch
from kernels import get_local_kernel

attention = get_local_kernel("sparseprior-attention")
q, k, v = torch.randn(3, 1, 12, 196, 64)
offsets = torch.tensor([1, -1, 2, -2] * 12, dtype=torch.int32)  # of each head
counts = torch.full((12,), 4, dtype=torch.int32)
out = attention.diagonal_attention(q, k, v, offsets, counts, num_prefix_tokens=0, scale=64**-0.5)
```
"""


def lay_out(out: Path, variants: Sequence[str] = tuple(build.VARIANTS)) -> Path:
    """Compile the kernels and write the new folder `out`, whole or not at all.

    Args:
        out: new folder.
        variants: names of `build.VARIANTS`.

    Returns:
        The folder in it that is loaded.

    Raises:
        OSError: if `out` exists.
        RuntimeError: without a compiler, and with its first error.
    """
    check_new(out)
    compiler = build.find_compiler()
    if compiler is None:
        raise RuntimeError(f"no C++ compiler ({', '.join(build.COMPILERS)}) is installed")
    sources = (*build.TORCH.sources, *build.TORCH.headers, *(build.FOLDER / f"{name}.py" for name in MODULES))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:8]
    namespace = f"_{NAME.replace('-', '_')}_cpu_{digest}"
    metadata = {
        **{"id": namespace, "name": NAME, "version": 1, "license": "Apache-2.0", "python-depends": []},
        "backend": {"type": "cpu"},
    }
    with whole_folder(out) as scratch:
        folder = scratch / "build" / VARIANT
        libraries = folder / build.PREBUILT.name
        libraries.mkdir(parents=True)
        for name in variants:
            flags = [*build.VARIANTS[name][1], "-s", f'-DSPARSEPRIOR_NAMESPACE="{namespace}"']
            build.compile_library(compiler, libraries / f"{name}.so", flags)
        (libraries / "libtorch_cpu.so").unlink()
        for name in MODULES:
            text = (build.FOLDER / f"{name}.py").read_text(encoding="utf-8")
            write_text(folder / f"{name}.py", moved(text, namespace))
        write_text(folder / "__init__.py", PACKAGE)
        write_text(folder / "metadata.json", json.dumps(metadata, indent=2) + "\n")
        write_text(scratch / "README.md", CARD)
    return out / "build" / VARIANT


def moved(text: str, namespace: str) -> str:
    """A module of this folder as one of a package of its own, whose operators have this name."""
    text = re.sub(rf"from {OWN}\.kernels\.(\w+) import", r"from .\1 import", text)
    text = text.replace(f"from {OWN}.kernels import", "from . import")
    text = text.replace(f"{OWN}::", f"{namespace}::")
    return re.sub(rf"torch\.ops\.{OWN}\b", f"torch.ops.{namespace}", text)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hub_layout",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="new folder")
    arguments = parser.parse_args(argv)
    try:
        print(lay_out(arguments.out))
    except (*USER_ERRORS, RuntimeError) as error:
        return report_error(parser.prog, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
