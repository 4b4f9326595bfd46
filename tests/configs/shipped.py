"""What configs/ holds, by the names that commands take."""

import ast
from pathlib import Path

from hf_sparseprior.runs.config import read_cells, read_rows

CONFIGS = Path(__file__).parents[2] / "configs"
VIDEO = (
    *("experiments/fib_table5.yaml", "experiments/fib_arxiv_table5.yaml"),
    *("video/attention_types.yaml", "video/motion.yaml", "video/motion_evidence.yaml", "video/smoke.yaml"),
)
ROBOTICS = ("experiments/fib_table6.yaml", "robotics/smoke.yaml")
PRETRAINING = ("experiments/vio_table5.yaml", "experiments/vio_table17.yaml", "experiments/dino_cifar10.yaml")
VTAB = "classification/vtab.yaml"
SWEEPS = (VTAB, "experiments/vio_table7.yaml", "experiments/vio_table18.yaml")


def path(name: str) -> Path:
    """The file of a name, or a cell of it."""
    return CONFIGS / name


def cells(name: str) -> list[str]:
    """FILE#CELL for each cell of a file, or its name alone. mmengine's Python files are read without running them."""
    if name.endswith(".py"):
        return [f"{name}#{key}" for key in mm_cells(path(name))] or [name]
    return [f"{name}#{cell}" if cell else name for cell in read_cells(path(name))]


def mm_cells(file: Path) -> list[str]:
    """The cells of a Python file, its own or those of its bases."""
    assigned = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign)]
    values = {ast.unparse(node.targets[0]): node.value for node in assigned}
    if "cells" in values:
        return [key.arg for key in values["cells"].keywords]
    bases = ast.literal_eval(values["_base_"]) if "_base_" in values else []
    return [cell for base in bases for cell in mm_cells(file.parent / base)]


def runs(name: str) -> list[str]:
    """FILE#CELL or FILE#CELL-ROW for each run that a file describes."""
    rows = [] if name.endswith(".py") else read_rows(read_cells(path(name)), path(name))
    return [f"{name}#{row}" for row in rows] or cells(name)


def classification() -> list[str]:
    """Files of the classification task that describe runs, without the sweeps'."""
    names = [f"{folder}/{file.name}" for folder in ("classification", "experiments") for file in files(folder)]
    return [name for name in names if name not in (*VIDEO, *ROBOTICS, *PRETRAINING, *SWEEPS)]


def comparisons() -> list[str]:
    """The comparisons of the classification task."""
    return [cell for name in classification() if read_rows(read_cells(path(name)), path(name)) for cell in cells(name)]


def files(folder: str) -> list[Path]:
    """The YAML files of a folder."""
    return sorted(CONFIGS.joinpath(folder).glob("*.yaml"))
