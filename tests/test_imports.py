"""Who imports whom: no circle, and nothing from a higher floor (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A saved model carries the flat files of the library; these folders it does not.
FOLDERS = {path.name for path in (ROOT / "hf_sparseprior").iterdir() if (path / "__init__.py").is_file()}
TASKS = {path.name for path in (ROOT / "tasks").iterdir() if (path / "__init__.py").is_file()}


def modules(package):
    """Dotted names of a package's modules and their files."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / package).rglob("*.py"))
    }


MODULES = {**modules("hf_sparseprior"), **modules("tasks")}


def imported(name, everywhere):
    """Modules of this repository that a module imports; those inside functions too if `everywhere`."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else iter_top_level(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            full = {f"{source}.{alias.name}" for alias in node.names}
            found.update(full & MODULES.keys(), set() if full <= MODULES.keys() else {source})
    return {other for other in found if other in MODULES} - {name}


def iter_top_level(tree):
    """Statements that run when a module is imported."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.If, ast.Try)) and "TYPE_CHECKING" not in ast.dump(getattr(node, "test", node)):
            waiting += [*node.body, *node.orelse, *(s for h in getattr(node, "handlers", []) for s in h.body)]


def floor(name):
    """The folder of the library or the task that a module belongs to; "core" for the library's flat files."""
    parts = name.split(".")
    if parts[0] == "tasks":
        return f"tasks.{parts[1]}" if len(parts) > 1 and parts[1] in TASKS else "tasks"
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "core"


def circles(edges):
    """Chains of modules that lead back to where they began."""
    done, found = set(), []

    def visit(name, path):
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for other in sorted(edges[name]):
                visit(other, [*path, name])
            done.add(name)

    for name in edges:
        visit(name, [])
    return found


# What each floor may import besides itself. The core reaches the kernels in one guarded place.
MAY_IMPORT = {
    "kernels": set(),
    "core": set(),
    "training": {"core", "adapters"},
    "adapters": {"core"},
    "analysis": {"core", "adapters"},
    "convert": {"core", "adapters"},
}
GUARDED = "hf_sparseprior.compiled_kernels"
ENTRIES = {"hf_sparseprior", "hf_sparseprior.__main__", "hf_sparseprior.doctor"}  # commands and the package's own face


def test_importing_goes_in_no_circle():
    assert circles({name: imported(name, everywhere=False) for name in MODULES}) == []


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]


@pytest.mark.parametrize(
    "name", [name for name in MODULES if name.startswith("hf_sparseprior") and name not in ENTRIES]
)
def test_the_library_imports_nothing_from_above(name):
    allowed = MAY_IMPORT[floor(name)] | {floor(name)} | ({"kernels"} if name == GUARDED else set())
    assert {other for other in imported(name, everywhere=True) if floor(other) not in allowed} == set()


@pytest.mark.parametrize("name", sorted(modules("tasks")))
def test_no_task_imports_another_and_common_imports_none(name):
    others = {floor(other) for other in imported(name, everywhere=True)} & {f"tasks.{task}" for task in TASKS}
    assert others <= {floor(name), "tasks.common"}
