"""A plugin of pytest: `-p tests.pasted` runs what the how-to pages register before any test is collected.

What they add is then in every registry that tests run over. `test_extension.py` runs cases of it, and
`tests.release extended` all tests.
"""

import importlib
import multiprocessing
import re
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from hf_sparseprior.base.variables import variables_set
from tests.processes import IMPORTED, start_server

ADDED = ("every_other", "columns", "few_tokens", "cross", "sandwich_vit")
# What may fail then: each name is to stand in the table of what exists.
DOCUMENTS = {
    f"tests/test_readme.py::test_every_registered_name_is_in_the_table_of_what_exists[{name}]"
    for name in ADDED
    if name != "sandwich_vit"  # families stand there in words
}
PAGES = sorted((Path(__file__).parents[1] / "docs" / "how-to").glob("*.md"))


def blocks():
    """The code blocks of the pages that register something, by the name of the module that each is here."""
    return {
        f"pasted_{page.stem}_{number}".replace("-", "_"): block
        for page in PAGES
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
        if "sp.register_" in block
    }


def task_files():
    """The files of the task that a page adds, by their paths."""
    page = (PAGES[0].parent / "add-task.md").read_text()
    files = dict(re.findall(r'```py title="(tasks/\S+)"\n(.*?)```', page, re.DOTALL))
    train = files["tasks/turned/train.py"]
    return {**files, "tasks/turned/evaluate.py": train.replace("train_main", "evaluate_main")}


def failures(output):
    """The tests that failed, by the summary of a run with -rfE."""
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", output, re.MULTILINE))


def pytest_collection_modifyitems(items, config):
    """The examples of these pages were run when they were pasted, and nothing is registered twice."""
    pages = [page.stem for page in PAGES if "sp.register_" in page.read_text()]
    again = {f"test_the_examples_of_a_page_run[{page}]" for page in pages}
    config.hook.pytest_deselected(items=[item for item in items if item.name in again])
    items[:] = [item for item in items if item.name not in again]


def pytest_configure(config):
    """Before collection, in each process. Each block is a module: settings are read from it, saved models take it."""
    folder = tempfile.mkdtemp(prefix="pasted_")
    sys.path.insert(0, folder)
    config.add_cleanup(lambda: shutil.rmtree(folder))
    modules = {**blocks(), "pasted_tasks": f"import tasks\n\ntasks.__path__.append({str(Path(folder, 'tasks'))!r})\n"}
    for name, text in task_files().items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, block in modules.items():
        Path(folder, f"{name}.py").write_text(block)
        with redirect_stdout(None):  # through which processes of pytest-xdist speak with each other
            importlib.import_module(name)
    # The server of processes has them, too; started here, so that no test starts one without them.
    multiprocessing.get_context("forkserver").set_forkserver_preload([*IMPORTED, *modules])
    IMPORTED.extend(modules)
    with variables_set({"OMP_NUM_THREADS": "1"}):
        start_server()
