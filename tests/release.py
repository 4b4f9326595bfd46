"""What has to hold before a release, beyond `make test`: python -m tests.release CHECK

wheel: wheel and sdist are built; the wheel is installed into an empty environment, where no compiler is found, and
    every library in it that this processor runs gives what `reference` gives.
minimum: the quick tests with the lowest versions of torch, transformers and peft that pyproject.toml allows.
pythons: the quick tests with each Python from 3.11 on that is installed.
licences: what is installed with the package is under a licence that lets it be used and passed on.

Each environment is made new in outputs/release and takes some minutes and gigabytes, most of them torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from hf_sparseprior.kernels import build

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "outputs" / "release"
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = "classification,peft"
# What the lowest versions and other Pythons run: everything that depends on torch, transformers and peft most.
QUICK = ["tests/hf_sparseprior", "-m", "not slow", "--sample=1", "-q", "-p", "no:cacheprovider"]
TOOLS = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "setuptools>=77"]

# Runs in the empty environment. Every attention kernel, forward and backward, in both dtypes.
TRY = """
import os, torch, hf_sparseprior as sp
from hf_sparseprior.kernels import build, diagonal_cpu
assert diagonal_cpu.ready() is None, diagonal_cpu.ready()
library = build.loaded_library()
assert library.parent.name == "prebuilt" and "site-packages" in str(library), library
priors = ("fibottention", "violin", "fibottention+violin", "bigbird", "sparsifiner")
for prior in priors:
    config = sp.SparsePriorViTConfig(prior=prior, hidden_size=48, num_hidden_layers=2, num_attention_heads=3,
                                     intermediate_size=96, image_size=32, patch_size=4)
    torch.manual_seed(0)
    model = sp.SparsePriorViTModel(config).eval()
    images = torch.randn(2, 3, 32, 32)
    def run():
        model.zero_grad()
        out = model(images).last_hidden_state
        out.square().sum().backward()
        return out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)
    os.environ["SPARSEPRIOR_BACKEND"] = "cpp"
    found = run()
    os.environ["SPARSEPRIOR_BACKEND"] = "reference"
    expected = run()
    del os.environ["SPARSEPRIOR_BACKEND"]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-4 * max(1.0, float(other.abs().max())), prior
print(library.stem, len(priors), "priors equal")
"""


def say(text: str) -> None:
    """A line of progress."""
    print(f"release: {text}", file=sys.stderr, flush=True)


def run(words: Sequence[str | Path], **options: object) -> str:
    """Output of a command that has to succeed."""
    return subprocess.run(list(map(str, words)), check=True, stdout=subprocess.PIPE, text=True, **options).stdout  # type: ignore[call-overload]


def environment(name: str, python: str | Path = sys.executable) -> Path:
    """A new virtual environment; returns its python."""
    folder = RELEASE / name
    shutil.rmtree(folder, ignore_errors=True)
    run([python, "-m", "venv", folder])
    own = folder / "bin" / "python"
    run([own, "-m", "pip", "install", "--quiet", "--upgrade", "pip"])
    return own


def install(python: Path, *what: str, constrained: bool = True) -> None:
    """pip install, in the versions that are tested unless others are asked for."""
    constraints = ["--constraint", ROOT / "constraints.txt"] if constrained else []
    run([python, "-m", "pip", "install", "--quiet", "--no-compile", *constraints, *what])


# ---- checks ---------------------------------------------------------------------------------------------------------


def wheel() -> None:
    """Build both, and try the wheel where no compiler is found."""
    dist = RELEASE / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    say("building wheel and sdist")
    built = {**os.environ, "SPARSEPRIOR_WHEEL": "compiled"}
    run([sys.executable, "-m", "build", "--outdir", dist, ROOT], env=built)  # the wheel from the sdist
    [file] = dist.glob("*.whl")
    say(f"{file.name}, {file.stat().st_size / 2**20:.1f} MiB; installing it")
    python = environment("wheel")
    install(python, "torch")
    install(python, str(file))
    known = set(build._processor().split())
    runs = [name for name, (needed, _) in build.VARIANTS.items() if needed <= known]
    assert runs, "this processor runs no library of the wheel"
    nothing = RELEASE / "nothing"
    nothing.mkdir(exist_ok=True)
    alone = {"PATH": str(nothing), "HOME": str(nothing), "CXX": ""}
    for name in ("", *runs):
        said = run([python, "-c", TRY], cwd=nothing, env={**alone, "SPARSEPRIOR_KERNELS": name})
        say(said.strip())
        assert said.split()[0] == (name or runs[0])
    doctor = run([python, "-m", "hf_sparseprior", "doctor"], cwd=nothing, env=alone)
    assert re.search(r"ok +compiled CPU kernels: .*prebuilt", doctor) and "WRONG" not in doctor, doctor


def lowest() -> list[str]:
    """The lowest versions of torch, transformers and peft that pyproject.toml allows, as requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["peft"]]
    found = {match[1]: match[2] for text in wanted if (match := re.match(r"(\w+)>=([\d.]+)", text))}
    return [f"{name}=={found[name]}.*" for name in ("torch", "transformers", "peft")]


def minimum() -> None:
    """The quick tests with the lowest versions."""
    python = environment("minimum")
    say(f"installing {', '.join(lowest())}")
    install(python, *lowest(), *TOOLS, f"{ROOT}[{EXTRAS}]", constrained=False)
    quick(python)


def pythons() -> None:
    """The quick tests with every Python."""
    for version in PYTHONS:
        found = shutil.which(f"python{version}")
        if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode:
            say(f"python{version} is not installed, not tested")
            continue
        say(f"python{version}")
        python = environment(f"python{version}", found)
        install(python, "torch")
        install(python, *TOOLS, f"{ROOT}[{EXTRAS}]", constrained=version == "3.11")
        quick(python)


def quick(python: Path) -> None:
    """The quick tests of the checkout with another environment's packages."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([python, "-m", "pytest", *QUICK], cwd=ROOT, env=environment, check=True)


COPYLEFT = re.compile(r"\bA?GPL|General Public", re.IGNORECASE)
LESSER = re.compile(r"\bLGPL|Lesser", re.IGNORECASE)


def licence_of(name: str) -> str:
    """What an installed distribution says of its licence."""
    about = importlib.metadata.metadata(name)
    classifiers = [text.rpartition("::")[2].strip() for text in about.get_all("Classifier", []) if "License ::" in text]
    return about.get("License-Expression") or "; ".join(classifiers) or (about.get("License") or "").split("\n")[0]


def required(name: str, seen: set[str]) -> set[str]:
    """A distribution and what it needs, directly or not, as far as it is installed."""
    try:
        wanted = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return seen
    seen.add(name)
    for text in wanted:
        other = re.match(r"[\w.-]+", text)
        if other and "extra ==" not in text and other[0].lower().replace("_", "-") not in seen:
            required(other[0].lower().replace("_", "-"), seen)
    return seen


def licences() -> None:
    """No dependency of the library may be under a licence that reaches what uses it."""
    names = sorted(required("hf_sparseprior", set()))
    for name in names:
        text = licence_of(name)
        assert text, f"{name} names no licence"
        assert not COPYLEFT.search(LESSER.sub("", text)), f"{name}: {text}"
    assert len(names) > 10
    say(f"licences of {len(names)} packages: none reaches what uses it")


CHECKS = {"wheel": wheel, "minimum": minimum, "pythons": pythons, "licences": licences}


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"{', '.join(CHECKS)}; default: all")
    arguments = parser.parse_args(argv)
    for name in arguments.checks:
        if name not in CHECKS:
            parser.error(f"{name!r} must be one of {', '.join(CHECKS)}")
    RELEASE.mkdir(parents=True, exist_ok=True)
    for name in arguments.checks or CHECKS:
        CHECKS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
