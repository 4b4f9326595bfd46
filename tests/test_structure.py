"""The library's floors: imports go down only and in no circle; functions fit on a screen, files are read in one go."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_sparseprior"
LONGEST_FUNCTION, LONGEST_FILE = 80, 700

# From the ground up. A module imports from its own floor and from those below; folders are floors of their own.
FLOORS = [
    ("checks", "registry", "resolved", "version", "files", "loading", "families"),
    ("sequences", "curves", "masks", "relative_offsets"),
    ("pattern", "fibottention", "support_baselines", "supports"),
    ("decay", "extras", "costs"),
    ("kernels",),
    ("compiled_kernels",),
    ("attention_plan", "attention_request", "key_selection"),
    ("backend_choice", "backend_dense", "backend_diagonal", "backend_gather", "backend_kernels", "ops"),
    ("predictor", "sparsifiner", "low_rank", "relative_position", "locality", "token_pruning"),
    ("prior",),
    ("attention",),
    ("image_processor", "model_card", "hub"),
    ("configuration_sparseprior_vit", "configuration_sparseprior_timesformer"),
    ("pretrained",),
    ("modeling_sparseprior_vit", "modeling_sparseprior_timesformer"),
    ("adapters",),
    ("convert",),
    ("analysis",),
    ("training",),
    ("export", "doctor", "command"),
    ("__init__",),
    ("__main__",),
]
# Functions for Triton take everything as arguments, and half of their lines are those.
LONGER = {("kernels/diagonal_triton.py", "_backward_rows")}


def modules():
    """Path of every module by its name within the package: "ops", "kernels.build", "kernels" for its __init__."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()


def imports_when_imported(tree):
    """Import statements of a file that run when it is imported: those within functions do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports_when_imported(node)


def imported(name):
    """Names of the package's modules that a module imports."""
    path = MODULES[name]
    folder = path.relative_to(PACKAGE).parent.parts
    found = set()
    for node in imports_when_imported(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {within_package(alias.name) for alias in node.names}
            continue
        above = ("hf_sparseprior", *folder[: len(folder) - node.level + 1]) if node.level else ()
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = within_package(f"{base}.{alias.name}")
            found.add(inner if inner in MODULES else within_package(base))
    return found & MODULES.keys() - {name}


def within_package(name):
    """ "ops" of "hf_sparseprior.ops"; None for what is not of the package."""
    return name.removeprefix("hf_sparseprior.") if name.startswith("hf_sparseprior.") else None


def floor_of(name):
    """Number of a module's floor; a module of a folder has its folder's."""
    return next(number for number, floor in enumerate(FLOORS) if name.partition(".")[0] in floor)


def test_every_module_has_a_floor():
    assert {name.partition(".")[0] for name in MODULES} == {name for floor in FLOORS for name in floor}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down(name):
    assert [other for other in sorted(imported(name)) if floor_of(other) > floor_of(name)] == []


def test_imports_have_no_circle():
    graph = {name: imported(name) for name in MODULES}
    assert len(graph["ops"]) > 5 and {"ops", "adapters.stock"} <= graph["__init__"]
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert graph == {}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_files_and_functions_are_short(name):
    path = MODULES[name]
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    functions = [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    allowed = {function for file, function in LONGER if file == path.relative_to(PACKAGE).as_posix()}
    assert [found for found in functions if found[1] > LONGEST_FUNCTION and found[0] not in allowed] == []
