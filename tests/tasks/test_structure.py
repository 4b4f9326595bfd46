"""What may import what: a task imports the library, tasks.common and itself; common imports no task, the library none.

Every file is read, imports inside functions and by name (`import_module`) included.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TASKS = sorted(folder.name for folder in (ROOT / "tasks").iterdir() if (folder / "__init__.py").is_file())
LIBRARY_AND_TASKS = sorted(path.relative_to(ROOT) for folder in ("hf_sparseprior", "tasks") for path in
                           (ROOT / folder).rglob("*.py"))  # fmt: skip


def imported_modules(path):
    """Dotted names of what a file imports anywhere, relative imports resolved."""
    package = path.parts[:-1]
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module", "__import__", "run_module",
        ):  # fmt: skip
            yield from (argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant))


def imported_tasks(path):
    """Folders of tasks/ that a file imports from."""
    parts = [name.split(".") for name in imported_modules(path)]
    return {part[1] for part in parts if part[0] == "tasks" and len(part) > 1} & set(TASKS)


def test_the_tasks_are_found():
    assert {"analysis", "benchmark", "classification", "common", "detection", "robotics", "segmentation", "video"} <= {
        *TASKS
    }


@pytest.mark.parametrize("task", TASKS)
def test_a_task_imports_no_other_task(task):
    allowed = {task, "common"}
    files = [path for path in LIBRARY_AND_TASKS if path.parts[:2] == ("tasks", task)]
    found = {str(path): imported_tasks(path) - allowed for path in files}
    assert files and not {path: other for path, other in found.items() if other}


def test_the_library_imports_no_task():
    files = [path for path in LIBRARY_AND_TASKS if path.parts[0] == "hf_sparseprior"]
    found = {str(path) for path in files if any(name.split(".")[0] == "tasks" for name in imported_modules(path))}
    assert len(files) > 50 and not found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import tasks.video.data", {"video"}),
        ("def f():\n    from tasks.video import data", {"video"}),
        ("from tasks import classification, common", {"classification", "common"}),
        ("from ..video.data import load_data", {"video"}),
        ("import importlib\nimportlib.import_module('tasks.video.train')", {"video"}),
        ("from hf_sparseprior import supports", set()),
    ],
)
def test_every_form_of_import_is_seen(source, expected, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = Path("tasks/robotics/example.py")
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source)
    assert imported_tasks(path) == expected
