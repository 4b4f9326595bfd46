"""The package as if it were published: from an index on this machine, tried by its commands. And a Space of the app."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image

from hf_sparseprior.base.version import __version__

ROOT = Path(__file__).parents[1]
NAME = "hf_sparseprior"
PROJECT = "hf-sparseprior"  # as an index spells it
TINY = ["model.image_size=32", "model.patch_size=8", "model.num_hidden_layers=1", "augmentation.randaugment=null"]
QUICK = ["trainer.use_cpu=true", "trainer.dataloader_num_workers=0", "trainer.warmup_steps=0"]


def output(words: list[str | Path], **options: object) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(list(map(str, words)), text=True, capture_output=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(map(str, words))[:200]}: {(done.stdout + done.stderr)[-1500:]}"
    return done.stdout


def index_of_checkout(folder: Path, source: Path = ROOT) -> Path:
    """A folder as a package index (PEP 503) with a wheel of the checkout, without kernels; returns the wheel."""
    project = folder / "simple" / PROJECT
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    output([*words, "--wheel-dir", project, source], env={**os.environ, "SPARSEPRIOR_WHEEL": "pure"})
    (wheel,) = project.iterdir()
    return wheel


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def served_index(folder: Path) -> Iterator[str]:
    """The address of an index on this machine."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def borrow_packages(python: Path) -> None:
    """Let an environment see the packages that this Python has, all but ours, in place of installing them."""
    (site,) = (python.parents[1] / "lib").glob("python*/site-packages")
    for old in site.glob("setuptools*"):  # which Python 3.11 puts there
        shutil.rmtree(old)
    links = python.parents[1] / "borrowed"
    links.mkdir()
    for place in filter(os.path.isdir, sys.path):
        for entry in Path(place).iterdir() if place.endswith("site-packages") else ():
            link = links / entry.name
            if NAME not in entry.name and not entry.name.endswith(".pth") and not link.exists():
                link.symlink_to(entry)
    (site / "borrowed.pth").write_text(f"{links}\n")


def install_from(index: str, python: Path, what: str = f"{NAME}[classification]") -> None:
    """`pip install hf_sparseprior`, from this index alone."""
    # Isolated: an editable checkout that it starts in would count as installed.
    words = [python, "-I", "-m", "pip", "install", "--quiet", "--no-cache-dir", "--index-url", index]
    output([*words, what], env={**os.environ, "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull})


def ten_images(folder: Path) -> Path:
    """Ten images of 32 px in a folder for each of two classes."""
    numbers = np.random.default_rng(0)
    for number in range(10):
        file = folder / ("light", "dark")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        values = numbers.integers(0, 128, (32, 32, 3)) + (128 if number % 2 == 0 else 0)
        Image.fromarray(values.astype(np.uint8)).save(file)
    return folder


def try_installed(python: Path, folder: Path) -> str:
    """The commands of an installed package, in an empty folder: `--version`, `list`, `train` on ten images.

    Returns:
        A line about them.
    """
    script = python.parent / "sparseprior"
    outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    run = functools.partial(output, cwd=folder, env=outside)
    where = run([python, "-c", f"import {NAME}; print({NAME}.__file__)"]).strip()
    assert Path(where).is_relative_to(python.parents[1]), f"{where} is not what was installed"
    assert run([script, "--version"]).strip() == f"sparseprior {__version__}"
    listed = run([script, "list"])
    assert "fibottention" in listed and "violin" in listed
    ten_images(folder / "photos")
    words = [script, "train", "photos", "--model", "vit_tiny", "--prior", "fibottention+violin", "--out", "run"]
    said = run([*words, "--epochs", "1", "--set", *TINY, *QUICK])
    assert (folder / "run" / "results.json").is_file() and (folder / "run" / "model" / "config.json").is_file()
    accuracy = re.search(r"test_accuracy: .*", said)
    assert accuracy is not None, said[-1000:]
    return f"sparseprior {__version__}: {len(listed.splitlines())} lines of names, trained, {accuracy[0]}"


# ---- a Space --------------------------------------------------------------------------------------------------------

SPACE_APP = '''"""The app of hf_sparseprior as a Space of gradio."""

import os
import sys

from hf_sparseprior.__main__ import main

host = os.environ.get("GRADIO_SERVER_NAME", "0.0.0.0")
sys.exit(main(["app", "--host", host, "--port", os.environ.get("GRADIO_SERVER_PORT", "7860")]))
'''
SPACE_CARD = """---
title: Attention with a spatial prior
emoji: 👁
colorFrom: indigo
colorTo: gray
sdk: gradio
sdk_version: {gradio}
python_version: "3.11"
app_file: app.py
license: apache-2.0
short_description: What a patch of a photo sees, and what that costs
---

# Attention with a spatial prior

The app of `hf_sparseprior` {version}: what each patch of an image sees with Fibottention, VIOLIN and other priors, and
the time of a model on this machine. On your own machine: `pip install 'hf_sparseprior[app]'`, then `sparseprior app`.
"""


def write_space(folder: Path) -> list[str]:
    """Write a Space of gradio into a new folder: app.py, requirements.txt and the card. Returns the names."""
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(SPACE_APP, encoding="utf-8")
    (folder / "requirements.txt").write_text(f"{NAME}[app]=={__version__}\n", encoding="utf-8")
    card = SPACE_CARD.format(gradio=version("gradio"), version=__version__)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return sorted(path.name for path in folder.iterdir())
