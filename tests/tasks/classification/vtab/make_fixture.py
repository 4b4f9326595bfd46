"""A small VTAB-1K in the published layout, of scikit-learn's digits: python make_fixture.py FOLDER [TASK ...]

Each task has its name, lists and number of classes; its images are digits, labelled with the digit, modulo the number
of classes where a task has fewer than ten.
"""

import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from hf_sparseprior.images.vtab_tasks import TASKS

# Images of each list; train800val200 holds those of both.
SIZES = {"train800": 32, "val200": 20, "test": 30}


def write_task(root: Path, name: str, sizes: dict[str, int] = SIZES) -> Path:
    """Write one task; its folder."""
    folder, digits = root / name, load_digits()
    lists: dict[str, list[str]] = {}
    start = 0
    for split, count in sizes.items():
        (folder / "images" / split).mkdir(parents=True)
        for index in range(start, start + count):
            image = f"images/{split}/{index:06d}.jpg"
            Image.fromarray((digits.images[index] * 255 / 16).astype("uint8")).save(folder / image)
            lists.setdefault(split, []).append(f"{image} {digits.target[index] % TASKS[name].classes}")
        start += count
    lists["train800val200"] = lists["train800"] + lists["val200"]
    for split, lines in lists.items():
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_vtab(root: Path, names: list[str], sizes: dict[str, int] = SIZES) -> Path:
    """Write these tasks; the folder."""
    for name in names:
        write_task(root, name, sizes)
    return root


if __name__ == "__main__":
    write_vtab(Path(sys.argv[1]), sys.argv[2:] or list(TASKS))
