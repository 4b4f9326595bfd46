"""From photos to a server by the commands of docs/export.md, one after the other, with times and sizes.

    python -m tests.route [--parquet FILE] [--photos N] [SETTING=VALUE ...]

Photos are N images for training and N / 5 for testing of a parquet file with columns `img` and `label`, or digits of
scikit-learn. `deit-tiny` is a DeiT-Ti with random weights, so accuracy says nothing of what a user's photos give. The
settings are added to the command that trains.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers import DeiTConfig, DeiTForImageClassification

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"^## From photos to a server\n(.*?)^## ", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
SERVER = re.compile(r"## FastAPI\n+```python\n(.*?)```", re.DOTALL)
TRIES, WAIT = 240, 0.5  # until the server answers


def commands() -> list[list[str]]:
    """The page's, as lists of words."""
    section = SECTION.search((ROOT / "docs" / "export.md").read_text(encoding="utf-8"))
    assert section is not None
    (block,) = BLOCK.findall(section[1])
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]


def labelled(parquet: Path | None, count: int) -> Iterator[tuple[Image.Image, str]]:
    """Images with the names of their classes."""
    if parquet is None:
        digits = load_digits()
        for image, label in zip(digits.images[:count], digits.target, strict=False):
            yield Image.fromarray((16 * image).clip(0, 255).astype(np.uint8)).resize((224, 224)), f"class{label}"
        return
    from pyarrow.parquet import read_table

    for row in read_table(parquet).slice(0, count).to_pylist():
        yield Image.open(io.BytesIO(row["img"]["bytes"])), f"class{row['label']}"


def write_photos(folder: Path, parquet: Path | None, photos: int) -> int:
    """Class folders of JPEG files; how many classes."""
    names = set()
    for number, (image, name) in enumerate(labelled(parquet, photos + photos // 5)):
        file = folder / ("train" if number < photos else "test") / name / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.convert("RGB").save(file)
        names.add(name)
    return len(names)


def size(path: Path) -> str:
    """Megabytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB"


def answer(folder: Path, words: list[str]) -> tuple[str, float]:
    """Start the server, send it a photo; its answer, and the seconds until it came."""
    page = (ROOT / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
    (source,) = SERVER.findall(page)
    (folder / "serve.py").write_text(source, encoding="utf-8")
    photo = next((folder / "photos" / "test").rglob("*.jpg")).read_bytes()
    asked = urllib.request.Request("http://127.0.0.1:8000/classify", data=photo, headers={"Content-Type": "image/jpeg"})
    begun = time.monotonic()
    server = subprocess.Popen([sys.executable, "-m", *words], cwd=folder)
    try:
        for _ in range(TRIES):
            time.sleep(WAIT)
            assert server.poll() is None, f"{' '.join(words)} ended with {server.returncode}"
            try:
                with urllib.request.urlopen(asked) as found:
                    return found.read().decode(), time.monotonic() - begun
            except urllib.error.URLError:
                continue
        raise AssertionError(f"no answer in {TRIES * WAIT:.0f} s")
    finally:
        server.terminate()
        server.wait()


def run_route(folder: Path, parquet: Path | None, photos: int, settings: list[str]) -> list[str]:
    """All commands in a folder; lines of a table."""
    classes = write_photos(folder / "photos", parquet, photos)
    torch.manual_seed(0)
    width = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
    DeiTForImageClassification(DeiTConfig(**width, num_labels=classes)).save_pretrained(folder / "deit-tiny")
    (folder / "configs").symlink_to(ROOT / "configs")
    lines = []
    written = [folder / name for name in ("deit_tiny_fib", "outputs/photos/model", "", "served")]
    *first, last = commands()
    for words, made in zip(first, written, strict=True):
        own = settings if words[2].endswith("train") else []
        begun = time.monotonic()
        environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        subprocess.run([sys.executable, *words[1:], *own], cwd=folder, env=environment, check=True)
        minutes = (time.monotonic() - begun) / 60
        lines.append(f"| {' '.join(words[2:4])} | {minutes:.2f} min | {size(made) if made != folder else ''} |")
    said, seconds = answer(folder, last)
    lines += [f"| {' '.join(last)} | {seconds:.1f} s until the first answer | |", said]
    return lines


def main() -> None:
    """Command line."""
    from tests.release import new_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parquet", type=Path)
    parser.add_argument("--photos", type=int, default=100)
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    print("\n".join(run_route(new_folder("route"), given.parquet, given.photos, given.settings)))


if __name__ == "__main__":
    main()
