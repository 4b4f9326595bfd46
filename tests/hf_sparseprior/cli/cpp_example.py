"""The C++ example of docs/export.md: compiled by the page's own command and run on a package that is made for it."""

import re
import subprocess
import sys
from pathlib import Path

import torch

from hf_sparseprior.cli.exportable import Exportable
from hf_sparseprior.cli.packages import FILE
from tests.hf_sparseprior.cli.test_deployment import make
from tests.processes import ROOT


def run_example(folder: Path, library: Path) -> str:
    """Make, compile and run all in a folder, compare, and return a line of what came out."""
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
    (lines,) = [block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "g++" in block]
    model = make("sparseprior_vit", prior="fibottention+violin", image_size=224, patch_size=16)
    model.save_pretrained(folder / "model")
    command = [
        sys.executable,
        "-m",
        "hf_sparseprior",
        "export",
        folder / "model",
        folder / "for_cpp",
        "--format",
        "aoti",
    ]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "SPARSEPRIOR_BACKEND": "cpp"}
    environment["PYTHONPATH"] = str(ROOT)
    subprocess.run([*command, "--kernels"], cwd=folder, env=environment, check=True)
    assert (folder / "for_cpp" / FILE).is_file()
    (folder / "run.cpp").write_text(source, encoding="utf-8")
    lines = lines.replace("libraries/attention_cpu.so", str(library))
    done = subprocess.run(
        ["bash", "-ec", lines], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    scale = float(match[1]) if (match := re.match(r"([\d.e+-]+) \*\n", done.stdout)) else 1.0
    row = done.stdout.splitlines()[1 if match else 0]
    found = scale * torch.tensor([float(number) for number in row.split()])
    with torch.no_grad():
        (expected,) = Exportable(model)(torch.ones(1, 3, 224, 224))
    torch.testing.assert_close(found, expected[0], rtol=1e-3, atol=1e-3 * float(expected.abs().max()))  # as printed
    return f"the C++ example gives {found.tolist()}, the model {expected[0].tolist()}"
