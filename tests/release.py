"""What has to hold before a release: python -m tests.release CHECK ..., see docs/releasing.md

fresh: in a clone of HEAD `make demo` sets up all it needs.
tests: `make test` in that clone.
extended: of all tests, with what the how-to pages add in every registry, the rows that document it fail alone.
conformance: transformers' own tests of models pass for every family, and for ViT with everything that is registered.
docs: `make docs` warns of nothing.
notebooks: each runs.
trackers: offline runs of W&B and MLflow, also resumed ones, have the history, the test and the pictures.
wheel: wheel and sdist are built; the wheel asks for no newer system than its name says, is installed into an empty
    environment, where no compiler is found, and every library in it that this processor runs gives what `reference`
    gives.
programs: exported files with the operators give what their models gave in ONNX Runtime 1.17.3 and in the newest one,
    two sessions at once, too; a package of AOTInductor does so from C++.
route: the commands of docs/start.md, from photos to a file, by the wheel alone, and a server that runs the file.
matrix: every cell of docs/what-works.md is run anew, and what works there still works.
arm: the kernels' arithmetic, compiled for 64-bit ARM and run in an emulator, gives what it gives here, and a wheel for
    that processor is built (Debian: g++-aarch64-linux-gnu, qemu-user-static).
kernels: their layout for Hugging Face's `kernels` library is loaded by it where this package is missing.
index: a wheel comes from an index on this machine by `pip install hf_sparseprior`, and `sparseprior --version`, `list`
    and `train` on ten images run.
space: a Space of the app is written into outputs/release/space and starts.
sdist: it is installed into an empty environment, where no compiler is found, and runs without compiled kernels.
minimum: the wheel loads with the lowest versions of torch, transformers and peft that pyproject.toml allows, and the
    quick tests pass.
newest: the quick tests with the newest versions that pip finds.
python3.11, python3.12, python3.13: the quick tests with that Python, if it is installed.
licences: what is installed with the package is under a licence that lets it be used and passed on.

Each environment is made new in outputs/release, takes some minutes and gigabytes, most of them torch, and is removed
when its check was passed. A check that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_sparseprior.kernels import build
from tests import hub_layout, release_index
from tests.hf_sparseprior.kernels.test_hub_layout import TRY as TRY_LAYOUT
from tests.pasted import DOCUMENTS, failures

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "outputs" / "release"
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = "classification,peft"
# What the lowest versions and other Pythons run: everything that depends on torch, transformers and peft most.
QUICK = ["tests/hf_sparseprior", "-m", "not slow", "--sample=1", "-q", "-p", "no:cacheprovider"]
TOOLS = ["pytest>=9", "pytest-xdist>=3.6", "hypothesis>=6.100", "setuptools>=77"]

# What an index takes says for which systems it is: those with glibc 2.34 (2021) and the libstdc++ of gcc 11, or newer.
# Elsewhere pip takes the sdist.
PLATFORM = "manylinux_2_34_x86_64"
NEWEST = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}

# Runs in the empty environment. Every attention kernel, forward and backward, in both dtypes.
TRY = """
import os, torch, hf_sparseprior as sp
from hf_sparseprior.kernels import build, diagonal_cpu
assert diagonal_cpu.ready() is None, diagonal_cpu.ready()
library = build.loaded_library()
assert library.parent.name == "prebuilt" and "site-packages" in str(library), library
priors = ("fibottention", "violin", "fibottention+violin", "bigbird", "sparsifiner")
for prior in priors:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        if (prior, dtype) == ("sparsifiner", torch.bfloat16):
            continue  # which keys it chooses hangs on the last bits
        config = sp.SparsePriorViTConfig(prior=prior, hidden_size=48, num_hidden_layers=2, num_attention_heads=3,
                                         intermediate_size=96, image_size=32, patch_size=4)
        torch.manual_seed(0)
        model = sp.SparsePriorViTModel(config).eval().to(dtype)
        images = torch.randn(2, 3, 32, 32, dtype=dtype)
        def run(backend):
            os.environ["SPARSEPRIOR_BACKEND"] = backend
            model.zero_grad()
            out = model(images).last_hidden_state
            weights = torch.sin(torch.arange(out.numel())).view_as(out)  # a sum of squares is fixed by the last norm
            (out * weights).sum().backward()
            return [x.float() for x in (out.detach(), *(p.grad for p in model.parameters() if p.grad is not None))]
        for one, other in zip(run("cpp"), run("reference"), strict=True):
            error = float((one - other).abs().max() / other.abs().max().clamp(min=1.0))
            assert error <= tolerance, (prior, dtype, error)
print(library.stem, len(priors), "priors equal")
"""


def say(text: str) -> None:
    """A line of progress."""
    print(f"release: {text}", file=sys.stderr, flush=True)


def run(words: Sequence[str | Path], **options: object) -> str:
    """Output of a command that has to succeed."""
    return subprocess.run(list(map(str, words)), check=True, stdout=subprocess.PIPE, text=True, **options).stdout  # type: ignore[call-overload]


def new_folder(name: str) -> Path:
    """An empty folder of this name in outputs/release."""
    folder = RELEASE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def environment(name: str, python: str | Path = sys.executable) -> Path:
    """A new virtual environment; returns its python."""
    folder = new_folder(name)
    run([python, "-m", "venv", folder])
    own = folder / "bin" / "python"
    run([own, "-m", "pip", "install", "--quiet", "--upgrade", "pip"])
    return own


def remove(python: Path) -> None:
    """Remove an environment that `environment` made."""
    shutil.rmtree(python.parents[1])


def install(python: Path, *what: str, constrained: bool = True) -> None:
    """pip install, in the versions that are tested unless others are asked for."""
    constraints = ["--constraint", ROOT / "constraints.txt"] if constrained else []
    run([python, "-m", "pip", "install", "--quiet", "--no-compile", *constraints, *what])


def built(kind: str) -> Path:
    """The wheel ("*.whl") or the sdist ("*.tar.gz"), made if they are not there."""
    if not list((RELEASE / "dist").glob(kind)):
        say("building wheel and sdist")
        environment = {**os.environ, "SPARSEPRIOR_WHEEL": "compiled"}
        named = f"--config-setting=--build-option=--plat-name={PLATFORM}"
        run([sys.executable, "-m", "build", named, "--outdir", new_folder("dist"), ROOT], env=environment)  # from sdist
    [file] = (RELEASE / "dist").glob(kind)
    return file


def without_compiler(**variables: str) -> dict[str, str]:
    """An environment in which no compiler, and no other program, is found."""
    return {"PATH": str(new_folder("nothing")), "HOME": str(RELEASE / "nothing"), "CXX": "", **variables}


# ---- checks ---------------------------------------------------------------------------------------------------------


def clone() -> Path:
    """A clone of HEAD."""
    folder = RELEASE / "clone"
    head = run(["git", "-C", ROOT, "rev-parse", "HEAD"])
    if not folder.is_dir() or run(["git", "-C", folder, "rev-parse", "HEAD"]) != head:
        run(["git", "clone", "--quiet", ROOT, new_folder("clone")])
    return folder


def make(target: str, folder: Path) -> None:
    """A target of the Makefile, with what it prints."""
    outside = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS")}
    subprocess.run(["make", target], cwd=folder, env=outside, check=True)


def fresh() -> None:
    """The demo in a clone."""
    shutil.rmtree(RELEASE / "clone", ignore_errors=True)
    make("demo", clone())


def tests() -> None:
    """All tests in a clone."""
    make("test", clone())
    shutil.rmtree(RELEASE / "clone")


def extended() -> None:
    """All tests, with what the how-to pages add in every registry."""
    words = [
        *("-p", "tests.pasted", "-p", "no:cacheprovider", "-n", "auto", "--dist", "loadfile", "-q", "-rfE"),
        "tests",
    ]
    log = RELEASE / "extended.log"  # who stops it sees what failed until then
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"progress: {log}", flush=True)
    with log.open("w") as file:
        subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, stdout=file)
    output = log.read_text()
    others = failures(output) - DOCUMENTS
    assert not others and " passed" in output, f"failed: {', '.join(sorted(others)) or output[-200:]}"


def conformance() -> None:
    """transformers' tests."""
    subprocess.run([sys.executable, "-m", "tests.conformance", "-n", "auto"], cwd=ROOT, check=True)


def docs() -> None:
    """The site."""
    make("docs", ROOT)


def notebooks() -> None:
    """The notebooks of the documentation."""
    words = ["tests/test_site.py", "-k", "notebook", "-q", "-p", "no:cacheprovider"]
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=True)


def trackers() -> None:
    """W&B and MLflow, which `make test` does not install."""
    python = environment("trackers")
    install(python, "torch")
    install(python, *TOOLS, f"{ROOT}[{EXTRAS},tracking]", "wandb", "mlflow", constrained=False)
    test = ["tests/hf_sparseprior/runs/test_tracking.py", "-k", "offline_runs", "-q", "-p", "no:cacheprovider", "-rs"]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    said = run([python, "-m", "pytest", *test], cwd=ROOT, env=given)
    assert "2 passed" in said and "skipped" not in said, said[-500:]
    say(said.strip().splitlines()[-1])
    remove(python)


def too_new(library: bytes) -> list[str]:
    """What a compiled library asks for that systems of `PLATFORM` need not have."""
    asked = set(re.findall(rb"\b(GLIBC|GLIBCXX|CXXABI)_([0-9]+(?:\.[0-9]+)+)\0", library))
    return sorted(
        f"{name.decode()}_{version.decode()}"
        for name, version in asked
        if tuple(map(int, version.split(b"."))) > NEWEST[name.decode()]
    )


def wheel() -> None:
    """Try the wheel where no compiler is found."""
    shutil.rmtree(RELEASE / "dist", ignore_errors=True)
    file = built("*.whl")
    assert file.name.endswith(f"-py3-none-{PLATFORM}.whl"), file.name
    with zipfile.ZipFile(file) as archive:
        asked = {name: too_new(archive.read(name)) for name in archive.namelist() if name.endswith(".so")}
    assert len(asked) == 2 * len(build.VARIANTS) and not any(asked.values()), f"newer than {PLATFORM}: {asked}"
    say(f"{file.name}, {file.stat().st_size / 2**20:.1f} MiB; installing it")
    python = environment("wheel")
    install(python, "torch")
    install(python, str(file))
    known = set(build._processor().split())
    runs = [name for name, (needed, _) in build.VARIANTS.items() if needed <= known]
    assert runs, "this processor runs no library of the wheel"
    alone = without_compiler()
    nothing = alone["HOME"]
    for name in ("", *runs):
        said = run([python, "-c", TRY], cwd=nothing, env={**alone, "SPARSEPRIOR_KERNELS": name})
        say(said.strip())
        assert said.split()[0] == (name or runs[0])
    install(python, "onnxruntime")
    register = "import hf_sparseprior as sp; sp.onnx_session_options(1); print(sp.onnx_library())"
    assert "prebuilt" in run([python, "-c", register], cwd=nothing, env=alone)
    doctor = run([python, "-m", "hf_sparseprior", "doctor"], cwd=nothing, env=alone)
    assert re.search(r"ok +compiled CPU kernels: .*prebuilt", doctor) and "WRONG" not in doctor, doctor
    remove(python)


# Runs in the environment of the sdist.
TRY_PURE = """
import torch, hf_sparseprior as sp
from hf_sparseprior.kernels import build, diagonal_cpu
assert not build.PREBUILT.exists(), list(build.PREBUILT.iterdir())
reason = diagonal_cpu.ready()
assert reason is not None
config = sp.SparsePriorViTConfig(prior="fibottention+violin", hidden_size=48, num_hidden_layers=2,
                                 num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=4)
out = sp.SparsePriorViTModel(config)(torch.randn(2, 3, 32, 32)).last_hidden_state
assert out.isfinite().all()
print(sp.__version__, "runs without kernels:", reason)
"""


def sdist() -> None:
    """Install the sdist where no compiler is found; it has no kernels then, and runs."""
    file = built("*.tar.gz")
    python = environment("sdist")
    install(python, "torch")
    alone = without_compiler(**{key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))})
    run([python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", file], env=alone)
    say(run([python, "-c", TRY_PURE], cwd=alone["HOME"], env=alone).strip())
    remove(python)


def index() -> None:
    """`pip install hf_sparseprior` as if it were published."""
    folder = new_folder("index")
    say(release_index.index_of_checkout(folder).name)
    python = environment("installed")
    install(python, "torch")
    install(python, *requirements("classification"))
    with release_index.served_index(folder) as address:
        release_index.install_from(address, python)
    say(release_index.try_installed(python, new_folder("nothing")))
    remove(python)


def requirements(extra: str) -> list[str]:
    """What the package needs with an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"][extra]]


def space() -> None:
    """A Space of the app, to be uploaded, and that it starts."""
    from tests.test_release_index import started

    folder = new_folder("space") / "app"
    say(f"{folder}: {', '.join(release_index.write_space(folder))}")
    assert "hf_sparseprior" in started(folder)
    (folder / "log.txt").unlink()


def kernels() -> None:
    """Load the kernels by the `kernels` library."""
    python = environment("kernels")
    install(python, "torch")
    install(python, "numpy", "kernels", constrained=False)
    out = new_folder("hub") / hub_layout.NAME
    folder = hub_layout.lay_out(out)
    given = {**os.environ, "BESIDE": "0", "HF_HUB_OFFLINE": "1"}
    said = run([python, "-P", "-c", TRY_LAYOUT, folder, out], cwd=new_folder("nothing"), env=given)
    say(f"get_local_kernel: {said.strip()}")
    remove(python)


# Runs where an ONNX Runtime is installed, with a library and the folder of an exported file of tests/fixtures.
TRY_ONNX = """
import json, sys, threading
import numpy as np, onnxruntime
library, folder = sys.argv[1:]
expected = np.array(json.load(open(folder + "/expected.json"))["logits"], dtype=np.float32)
pixels = np.load(folder + "/pixels.npy")

def session(threads):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("hf_sparseprior.threads", str(threads))
    options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(folder + "/model.onnx", options, providers=["CPUExecutionProvider"])

def check(own, times=200):
    for _ in range(times):
        assert np.abs(own.run(None, {"pixel_values": pixels})[0] - expected).max() < 1e-5

sessions = [session(1), session(2)]
before = threading.active_count()
workers = [threading.Thread(target=check, args=(own,)) for own in sessions]
[worker.start() for worker in workers]
tasks = lambda: len(__import__("os").listdir("/proc/self/task"))
most = tasks()
[worker.join() for worker in workers]
check(sessions[0], 1)
assert tasks() <= most, "the operators started threads"
print(onnxruntime.__version__, "gives what the model gave, two sessions at once, too;", most, "threads in all")
"""


def programs() -> None:
    """Exported files with the operators in the first and the newest ONNX Runtime, and in C++."""
    import numpy as np
    import onnx
    import torch

    from hf_sparseprior.kernels.program_libraries import onnx_library, torch_library
    from tests.hf_sparseprior.cli.cpp_example import run_example

    say(run_example(new_folder("package"), torch_library()))
    folder = new_folder("onnx")
    with zipfile.ZipFile(ROOT / "tests" / "fixtures" / "exported.zip") as fixture:
        fixture.extractall(folder)
    for prior in sorted(path for path in folder.iterdir() if path.is_dir()):
        shutil.copyfile(prior / "expected.json", prior / "onnx" / "expected.json")
        model = onnx.load(prior / "onnx" / "model.onnx")
        model.ir_version = min(model.ir_version, 9)  # of what 1.17 reads
        onnx.save(model, prior / "onnx" / "model.onnx")
        side = model.graph.input[0].type.tensor_type.shape.dim[-1].dim_value
        np.save(
            prior / "onnx" / "pixels.npy", torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
        )
    for version in ("onnxruntime==1.17.3", "onnxruntime"):
        python = environment("programs")
        install(python, version, "numpy<2" if "1.17" in version else "numpy", constrained=False)
        for prior in sorted(path for path in folder.iterdir() if path.is_dir()):
            say(run([python, "-c", TRY_ONNX, str(onnx_library()), str(prior / "onnx")]).strip())
        remove(python)


TO_ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")


def arm() -> None:
    """The kernels' arithmetic on 64-bit ARM, in an emulator, gives what it gives here; and a wheel for it is built."""
    from tests.hf_sparseprior.cli.test_deployment import make as make_model
    from tests.hf_sparseprior.kernels import replay

    if missing := [name for name in TO_ARM if shutil.which(name) is None]:
        raise OSError(
            f"{' and '.join(missing)} must be installed: apt-get install g++-aarch64-linux-gnu qemu-user-static"
        )
    compiler, emulator = TO_ARM
    folder = new_folder("arm")
    sizes = {"patch_size": 8, "hidden_size": 40, "num_attention_heads": 4, "num_hidden_layers": 2}
    calls = replay.record(lambda prior, side: make_model("sparseprior_vit", prior=prior, image_size=side, **sizes))
    replay.write_calls(calls, folder / "calls")
    ((name, (_, flags)),) = build.MACHINES["aarch64"].items()
    program = replay.compile_replay([compiler], folder, [*flags, "-static"])
    run([emulator, program, folder / "calls", folder / "outputs"])
    found = replay.differences(calls, folder / "outputs")
    assert max(found.values()) < 1e-5, found
    say(f"{len(calls)} calls on 64-bit ARM ({name}) are off by at most {max(found.values()):.1e}")
    variables = {
        **os.environ,
        "CXX": compiler,
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SPARSEPRIOR_WHEEL": "compiled",
    }
    clone = folder / "clone"
    run(["git", "clone", "--quiet", ROOT, clone])
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
    ]
    run([*words, clone], env=variables)
    (wheel,) = folder.glob("*-py3-none-linux_aarch64.whl")
    with zipfile.ZipFile(wheel) as opened:
        libraries = [file for file in opened.namelist() if file.endswith(".so")]
        assert len(libraries) == 2, libraries
        for file in libraries:
            assert struct.unpack_from("<H", opened.read(file), 18) == (183,), file  # ELF's number of the machine
    say(f"{wheel.name}: {', '.join(libraries)}")


def route() -> None:
    """From photos to a file and a server by the commands of docs/start.md, in an environment with the wheel."""
    from tests.route import run_route

    python = environment("route_environment")
    install(python, "torch")
    install(python, f"{built('*.whl')}[{EXTRAS},export]", "fastapi", "uvicorn")
    for line in run_route(new_folder("route"), str(python), photos=60, epochs=1):
        say(line)
    remove(python)


def matrix() -> None:
    """All cells of docs/what-works.md; record and page are written anew."""
    from tests import matrix

    before = matrix.recorded()["cells"]
    matrix.main(list(matrix.WAYS))
    now = matrix.recorded()["cells"]
    lost = [name for name, found in before.items() if found == "yes" != now[name]]
    assert not lost, f"{lost[0]}: {now[lost[0]]} ({len(lost)} cells)"


def lowest() -> list[str]:
    """The lowest versions of torch, transformers and peft that pyproject.toml allows, as requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["peft"]]
    found = {match[1]: match[2] for text in wanted if (match := re.match(r"(\w+)>=([\d.]+)", text))}
    return [f"{name}=={found[name]}.*" for name in ("torch", "transformers", "peft")]


def minimum() -> None:
    """The wheel and the quick tests with the lowest versions."""
    python = environment("minimum")
    say(f"installing {', '.join(lowest())}")
    # The interpreter of Triton 3.6, which torch 2.10 and 2.11 bring, fails with numpy 2.4.
    install(python, *lowest(), "numpy<2.4", *TOOLS, f"{built('*.whl')}[{EXTRAS}]", constrained=False)
    say(run([python, "-c", TRY], cwd=without_compiler()["HOME"], env=without_compiler()).strip())
    quick(python)
    remove(python)


def newest() -> None:
    """The quick tests with the newest versions that pip finds."""
    python = environment("newest")
    install(python, "torch", "transformers", "peft", *TOOLS, f"{ROOT}[{EXTRAS}]", constrained=False)
    say(run([python, "-m", "pip", "freeze"]).replace("\n", " "))
    quick(python)
    remove(python)


def with_python(version: str) -> None:
    """The quick tests with one Python."""
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        say(f"python{version} is not installed, not tested")
        return
    python = environment(f"python{version}", found)
    ours = version == "3.11"  # for which the versions were chosen
    install(python, "torch", constrained=ours)
    install(python, *TOOLS, f"{ROOT}[{EXTRAS}]", constrained=ours)
    quick(python)
    remove(python)


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


CHECKS: dict[str, Callable[[], None]] = {
    **{
        "licences": licences,
        "extended": extended,
        "conformance": conformance,
        "docs": docs,
        "notebooks": notebooks,
        "trackers": trackers,
        "wheel": wheel,
        "index": index,
        "space": space,
        "sdist": sdist,
        "programs": programs,
        "route": route,
        "matrix": matrix,
        "arm": arm,
        "kernels": kernels,
        "minimum": minimum,
        "newest": newest,
        **{f"python{version}": functools.partial(with_python, version) for version in PYTHONS},
    },
    **{"fresh": fresh, "tests": tests},
}


def failure(check: Callable[..., None], *arguments: str) -> str | None:
    """Do a check; why it failed, in one line."""
    try:
        check(*arguments)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(shlex.join(map(str, error.cmd)).split())[:200]} ended with {error.returncode}"
    except (AssertionError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return None


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
    failed = {}
    for name in arguments.checks or CHECKS:
        begun = time.monotonic()
        reason = failure(CHECKS[name])
        say(f"{name}: {'good' if reason is None else 'FAILED'}, {time.monotonic() - begun:.0f} s")
        if reason is not None:
            failed[name] = reason
    for name, reason in failed.items():
        say(f"{name} failed: {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
