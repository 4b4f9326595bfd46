"""The notebooks as pages of the site, a hook of mkdocs: cells, what they printed and what they drew.

`make docs` runs them (SPARSEPRIOR_NOTEBOOKS=run). Otherwise a page has the cells alone, which is quicker to build.
Nothing is written into the repository.
"""

from __future__ import annotations

import base64
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SECONDS = 300  # for one cell
LINK = re.compile(r"(\]\([^)\s]*notebooks/\w+)\.ipynb\)")
FIRST = "*Made from [{name}.ipynb]({name}.ipynb), which runs in Jupyter. Times are of one thread.*"
NOT_RUN = "*The cells were not run for this page: `make docs` runs them.*"


def executed(path: Path) -> Any:
    """A notebook with the outputs of its cells.

    Raises:
        nbclient.exceptions.CellExecutionError: for a cell that fails.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="hf_sparseprior-notebook-") as folder:
        quiet = ["--log-level=ERROR"]  # the kernel warns of its sockets on this machine
        where = {"metadata": {"path": folder}}
        one = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other would be slow on a busy machine
        NotebookClient(notebook, timeout=SECONDS, extra_arguments=quiet, resources=where).execute(env=one)
    return notebook


def page(name: str, notebook: Any, pictures: dict[str, bytes]) -> str:
    """A notebook as Markdown; `pictures` gets what its cells drew, by place in the site."""
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(_fenced("python", cell.source))
        for index, output in enumerate(cell.outputs):
            parts += _output(f"{name}_{number}_{index}.png", output, pictures)
    title, _, rest = parts[0].partition("\n")
    notes = [FIRST.format(name=name)]
    if not any(cell.get("outputs") for cell in notebook.cells):
        notes.append(NOT_RUN)
    return "\n\n".join([title, *notes, rest.strip(), *parts[1:], ""])


def _output(file: str, output: Any, pictures: dict[str, bytes]) -> list[str]:
    if output.output_type == "stream":
        return [_fenced("text", output.text)] if output.name == "stdout" else []
    data = output.get("data", {})
    if "image/png" in data:
        pictures[f"notebooks/{file}"] = base64.b64decode(data["image/png"])
        return [f"![what the cell drew]({file})"]
    return [_fenced("text", data["text/plain"])] if "text/plain" in data else []


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def on_files(files: Files, config: Any) -> Files:
    """mkdocs asks for the site's files."""
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    if os.environ.get("SPARSEPRIOR_NOTEBOOKS") == "run":
        notebooks = [executed(path) for path in paths]
    else:
        notebooks = [nbformat.read(path, as_version=4) for path in paths]
    pictures: dict[str, bytes] = {}
    for path, notebook in zip(paths, notebooks, strict=True):
        text = page(path.stem, notebook, pictures)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    for place, content in pictures.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Pages that link to a notebook of the repository link to its page here."""
    return LINK.sub(r"\1.md)", markdown)
