"""From photos to a server by the commands of docs/start.md, one after the other, with times and sizes.

    python -m tests.route [--python PYTHON] [--parquet FILE] [--photos N] [--epochs N] [--model FOLDER]

Photos are N images for training and N / 5 for testing of a parquet file with columns `img` and `label`, or digits of
scikit-learn, drawn at the size of a photo. The model is that of FOLDER, a saved one, by the name that the page has; by
default a DeiT-Ti with random weights, whose accuracy says nothing of what a user's photos give. PYTHON is another
environment's, where the wheel is installed, with what runs the server of docs/how-to/serve.md (fastapi and uvicorn); by
default this one. With --epochs the training is that long, and not as many minutes as the page says.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import resource
import shlex
import shutil
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
BLOCK = re.compile(r"```(bash|python)\n(.*?)```", re.DOTALL)
SERVER = re.compile(r"## FastAPI\n+```python\n(.*?)```", re.DOTALL)
WRITTEN = {"train": "outputs/photos", "predict": "seen.csv", "export": "served"}  # by the page's commands
PHOTO = (640, 480)  # pixels
TRIES, WAIT = 240, 0.5  # until the server answers


def steps() -> list[tuple[str, list[str]]]:
    """What the page does after the installation: names, and what Python gets as arguments."""
    found = []
    for language, text in BLOCK.findall((ROOT / "docs" / "start.md").read_text(encoding="utf-8")):
        if language == "python":
            found.append(("run", ["-c", text]))
            continue
        for line in text.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line)
            if program == "sparseprior":
                found.append((words[0], ["-m", "hf_sparseprior", *words]))
            else:
                assert program == "pip", line
    return found


def labelled(parquet: Path | None, count: int) -> Iterator[tuple[Image.Image, str]]:
    """Images with the names of their classes; that of the first test image is `cat`, as on the page."""
    if parquet is None:
        digits = load_digits()
        for number in range(count):
            drawn = digits.images[number % len(digits.images)]
            image = Image.fromarray((16 * drawn).clip(0, 255).astype(np.uint8)).resize(PHOTO)
            yield image, str(digits.target[number % len(digits.images)])
        return
    from pyarrow.parquet import read_table

    for row in read_table(parquet).slice(0, count).to_pylist():
        yield Image.open(io.BytesIO(row["img"]["bytes"])), str(row["label"])


def write_photos(folder: Path, parquet: Path | None, photos: int) -> int:
    """Class folders of JPEG files, `test/cat/1.jpg` among them; how many classes."""
    images = list(labelled(parquet, photos + photos // 5))
    cat = images[photos][1]
    for number, (image, label) in enumerate(images):
        name = "cat" if label == cat else f"class{label}"
        stem = "1" if number == photos else f"photo{number}"
        file = folder / ("train" if number < photos else "test") / name / f"{stem}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.convert("RGB").save(file)
    return len({label for _, label in images})


def size(path: Path) -> str:
    """Megabytes of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB"


def answer(folder: Path, python: str) -> tuple[str, float]:
    """Start the server, send it a photo; its answer, and the seconds until it came."""
    page = (ROOT / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
    (source,) = SERVER.findall(page)
    (folder / "serve.py").write_text(source, encoding="utf-8")
    photo = (folder / "photos" / "test" / "cat" / "1.jpg").read_bytes()
    asked = urllib.request.Request("http://127.0.0.1:8000/classify", data=photo, headers={"Content-Type": "image/jpeg"})
    begun = time.monotonic()
    server = subprocess.Popen([python, "-m", "uvicorn", "serve:app"], cwd=folder, env=environment(python))
    try:
        for _ in range(TRIES):
            time.sleep(WAIT)
            assert server.poll() is None, f"the server ended with {server.returncode}"
            try:
                with urllib.request.urlopen(asked) as found:
                    return found.read().decode(), time.monotonic() - begun
            except urllib.error.URLError:
                continue
        raise AssertionError(f"no answer in {TRIES * WAIT:.0f} s")
    finally:
        server.terminate()
        server.wait()


def environment(python: str) -> dict[str, str]:
    """Variables of a command: this checkout is found by this environment's Python alone."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**inherited, "PYTHONPATH": str(ROOT)} if python == sys.executable else inherited


def run_route(
    folder: Path,
    python: str = sys.executable,
    *,
    parquet: Path | None = None,
    photos: int = 100,
    epochs: int | None = None,
    model: Path | None = None,
) -> list[str]:
    """All steps in a folder; lines of a table: minutes, minutes of all processors together, and what is written."""
    classes = write_photos(folder / "photos", parquet, photos)
    place = folder / "facebook" / "deit-tiny-patch16-224"
    if model is not None:
        shutil.copytree(model, place)
    else:
        torch.manual_seed(0)
        width = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
        DeiTForImageClassification(DeiTConfig(**width, num_labels=classes)).save_pretrained(place)
    lines, names = [], []
    for name, words in steps():
        if name == "train" and epochs is not None:
            at = words.index("--minutes")
            words[at : at + 2] = ["--epochs", str(epochs)]
        begun, used = time.monotonic(), processor_seconds()
        subprocess.run([python, *words], cwd=folder, env=environment(python), check=True)
        minutes, used = (time.monotonic() - begun) / 60, (processor_seconds() - used) / 60
        made = size(folder / WRITTEN[name]) if name in WRITTEN else ""
        lines.append(f"| {name} | {minutes:.2f} min | {used:.2f} min | {made} |")
        names.append(name)
    assert names == [*WRITTEN, "run"], names
    said, seconds = answer(folder, python)
    return [*lines, f"| uvicorn serve:app | {seconds:.1f} s until the first answer | | |", said]


def processor_seconds() -> float:
    """Of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Command line."""
    from tests.release import new_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=os.path.abspath, default=sys.executable)
    parser.add_argument("--parquet", type=Path)
    parser.add_argument("--photos", type=int, default=100)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    sizes = {"parquet": given.parquet, "photos": given.photos, "epochs": given.epochs, "model": given.model}
    print("\n".join(run_route(new_folder("route"), given.python, **sizes)))


if __name__ == "__main__":
    main()
