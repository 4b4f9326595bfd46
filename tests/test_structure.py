"""Who imports whom (docs/architecture.md), and how long files and functions are. Every file is read, none imported."""

import ast
from pathlib import Path

import pytest

from tests.each import each

ROOT = Path(__file__).parents[1]
LONGEST_FUNCTION, LONGEST_FILE = 80, 700
TASKS = {path.name for path in (ROOT / "tasks").iterdir() if (path / "__init__.py").is_file()}

# The rooms of the library from the ground up. A room imports those before it and no other, within functions too.
ROOMS = (
    *("kernels", "base", "patterns", "attention", "priors", "saving", "models", "adapters", "cli"),
    *("convert", "training", "compression", "analysis", "mm", "prediction", "runs", "images", "classification"),
    "sparsification",
)
# The kernels are imported where they may be missing, and where it is asked whether they are.
KNOW_KERNELS = {
    *("hf_sparseprior.attention.compiled_kernels", "hf_sparseprior.cli.doctor"),
    *("hf_sparseprior.cli.runtimes", "hf_sparseprior.cli.onnx_operators", "hf_sparseprior.cli.deployment"),
    "hf_sparseprior.cli.packages",
}
FACES = ("__init__", "__main__")  # what a user imports and calls, which know all rooms


def modules(package):
    """Dotted names of a package's modules and their files."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / package).rglob("*.py"))
    }


LIBRARY, TASK_MODULES = modules("hf_sparseprior"), modules("tasks")
MODULES = {**LIBRARY, **TASK_MODULES}


def nodes_when_imported(tree):
    """The parts of a file that run when it is imported: not the bodies of functions, nor what only types need."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from nodes_when_imported(node)


def imported_names(source, package, everywhere=True):
    """Dotted names that the source of a module of a package imports, relative ones and `import_module("...")` included.

    Of `from a import b` it is "a.b". Only those that run when it is imported, unless `everywhere`.
    """
    tree = ast.parse(source)
    parents = package.split(".")
    for node in ast.walk(tree) if everywhere else nodes_when_imported(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module", "__import__", "run_module",
        ):  # fmt: skip
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def all_imported_names(name, everywhere=True):
    """`imported_names` of one of our modules."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return set(imported_names(path.read_text(encoding="utf-8"), package, everywhere))


def imported_modules(name, everywhere=True):
    """The modules of ours among these; of "a.b" it is a where b is something in it."""
    found = {other if other in MODULES else other.rpartition(".")[0] for other in all_imported_names(name, everywhere)}
    return found & MODULES.keys() - {name}


def tasks_in(names):
    """Folders of tasks/ that dotted names lead into."""
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "tasks" and len(part) > 1} & TASKS


def within(name):
    """The room of a library module, or one of FACES."""
    return [*name.split("."), "__init__"][1]


def circle(edges):
    """Modules that are in a circle or lead to one, by name."""
    left = dict(edges)
    while leaves := [name for name, others in left.items() if not others & left.keys()]:
        for name in leaves:
            del left[name]
    return set(left)


def test_the_modules_are_found():
    assert {"analysis", "benchmark", "classification", "common", "detection", "robotics", "segmentation"} <= TASKS
    assert "video" in TASKS and len(LIBRARY) > 50 and len(TASK_MODULES) > 50
    assert len(imported_modules("hf_sparseprior.attention.functional")) > 5
    assert "hf_sparseprior.adapters.stock" in imported_modules("hf_sparseprior")


@pytest.mark.parametrize(
    ("source", "tasks", "when_imported"),
    [
        ("import tasks.video.data", {"video"}, True),
        ("def f():\n    from tasks.video import data", {"video"}, False),
        ("class A:\n    if True:\n        from tasks.video import data", {"video"}, True),
        ("if TYPE_CHECKING:\n    import tasks.video.data", {"video"}, False),
        ("from tasks import classification, common", {"classification", "common"}, True),
        ("from ..video.data import load_data", {"video"}, True),
        ("import importlib\nimportlib.import_module('tasks.video.train')", {"video"}, True),
        ("from hf_sparseprior import supports", set(), True),
    ],
)
def test_every_form_of_import_is_seen(source, tasks, when_imported):
    assert tasks_in(imported_names(source, "tasks.robotics")) == tasks
    assert tasks_in(imported_names(source, "tasks.robotics", everywhere=False)) == (tasks if when_imported else set())


def test_importing_goes_in_no_circle():
    assert circle({name: imported_modules(name, everywhere=False) for name in MODULES}) == set()
    assert circle({name: imported_modules(name) for name in LIBRARY}) == set()


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}}) == {"a", "b", "c"}


def test_tests_lie_in_the_rooms_of_what_they_test():
    folders = {path.name for path in (ROOT / "tests" / "hf_sparseprior").iterdir() if any(path.glob("*.py"))}
    assert folders == set(ROOMS)


def test_every_module_of_the_library_is_in_a_room():
    assert {within(name) for name in LIBRARY} == {*ROOMS, *FACES}


@each("name", [name for name in LIBRARY if within(name) not in FACES])
def test_imports_of_the_library_go_down(name):
    assert "TYPE_CHECKING" not in LIBRARY[name].read_text(encoding="utf-8")  # it would hide imports from this test
    allowed = ROOMS[: ROOMS.index(within(name)) + 1][name not in KNOW_KERNELS and within(name) != "kernels" :]
    assert {other for other in imported_modules(name) if other in LIBRARY and within(other) not in allowed} == set()


@each("name", LIBRARY)
def test_the_library_imports_no_task(name):
    assert {other for other in all_imported_names(name) if other.split(".")[0] == "tasks"} == set()


@each("name", TASK_MODULES)
def test_no_task_imports_another_and_common_imports_none(name):
    allowed = {"common", *name.split(".")[1:2]}
    assert tasks_in(all_imported_names(name)) <= allowed


@each("name", LIBRARY)
def test_files_and_functions_of_the_library_are_short(name):
    text = LIBRARY[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {function: lines for function, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


MOST_PARAMETERS = 8
# The signatures of calls of everything at once; and those of the kernels, which saved models call.
MANY_PARAMETERS = {
    *("hf_sparseprior.attention.functional.attention", "hf_sparseprior.cli.deployment.export"),
    *("hf_sparseprior.models.modules.Attention.__init__", "hf_sparseprior.models.modules.Block.__init__"),
    "hf_sparseprior.prediction.predict.predict",
}


def public_signatures(name):
    """Public functions and methods of a file, and how many parameters each has besides self and cls."""
    for scope in ast.walk(ast.parse(LIBRARY[name].read_text())):
        if not isinstance(scope, (ast.Module, ast.ClassDef)):
            continue
        for node in scope.body:
            if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                where = ".".join([name, *([scope.name] if isinstance(scope, ast.ClassDef) else []), node.name])
                yield where, sum(argument.arg not in ("self", "cls") for argument in given)


def is_prescribed(where):
    """Whether transformers decides what a function takes: the forward of a model."""
    return ".modeling_" in where and where.endswith(("Model.forward", "ForImageClassification.forward"))


@each("name", [name for name in LIBRARY if not name.startswith("hf_sparseprior.kernels.")])
def test_public_signatures_are_short(name):
    long = {
        where: count
        for where, count in public_signatures(name)
        if count > MOST_PARAMETERS and where not in MANY_PARAMETERS and not is_prescribed(where)
    }
    assert not long
