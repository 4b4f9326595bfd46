"""Python files of a user that register a support, a decay or the like: `--import FILE` of the commands.

A file is imported before a command does anything else, and every model that the process saves carries its text, in
which the imports of this package are changed to those of the code that lies next to it. The text that a saved model
carries can be given to `--import`, too. A file may import this package and what is installed, and nothing that lies
next to it.
"""

from __future__ import annotations

import ast
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PREFIX = "own_"  # of the name of a file in a saved folder, and of its module
LIBRARY = "hf_sparseprior"
ROOMS = ("base", "patterns", "attention", "priors", "saving", "models")  # whose modules such a file may import
MODULES = {"supports": "patterns", "curves": "patterns", "sequences": "patterns", "ops": "attention"}
_WAS = "  # was: "
_REWRITTEN = re.compile(rf"^([ \t]*)from \.\w+ import .*{_WAS}(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class OwnFile:
    """An imported file. name: of its module. path: where it was. source: its text."""

    name: str
    path: str
    source: str


IMPORTED: dict[str, OwnFile] = {}  # by name


def import_files(paths: Iterable[str | Path]) -> None:
    """Import Python files of one's own that register a support, a decay or the like, each once.

    Every model that this process saves afterwards carries them, and loads with `trust_remote_code=True` without them.

    Args:
        paths: each of one file, which imports this package and what is installed, and nothing that lies next to it.

    Raises:
        ValueError: for an error in one, with file and line; for two of one name; and for an import that a saved model
            could not do. OSError: for a file that cannot be read.
    """
    for path in paths:
        _import_file(Path(path))


def imported_paths() -> list[str]:
    """The files that were imported, for processes that are to import the same."""
    return [own.path for own in IMPORTED.values()]


def after_imports(paths: Iterable[str], call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Import files, then call: what another process does, which imported none."""
    import_files(paths)
    return call(*arguments, **options)


def _import_file(path: Path) -> None:
    if path.suffix != ".py":
        raise ValueError(f"--import {path} must be a Python file, FILE.py")
    source = _REWRITTEN.sub(r"\1\2", path.read_text(encoding="utf-8"))
    name = PREFIX + re.sub(r"\W", "_", path.stem).removeprefix(PREFIX)
    if name in IMPORTED and IMPORTED[name].source == source:
        return
    if name in IMPORTED:
        raise ValueError(f"--import {path}: {IMPORTED[name].path} has the same name in a saved model; rename one")
    module = ModuleType(name)
    module.__file__ = str(path)
    try:
        carried(OwnFile(name, str(path), source))
        sys.modules[name] = module
        exec(compile(source, str(path), "exec"), vars(module))
    except SyntaxError as error:
        sys.modules.pop(name, None)
        raise ValueError(f"--import {error.filename}, line {error.lineno}: {error.msg}") from error
    except Exception as error:
        sys.modules.pop(name, None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if not lines:  # of this file's own checks
            raise
        text = str(error).strip().partition("\n")[0]
        kind = "" if isinstance(error, ValueError) and text else f"{type(error).__name__}: "
        raise ValueError(f"--import {path}, line {lines[-1]}: {kind}{text}".removesuffix(": ")) from error
    IMPORTED[name] = OwnFile(name, str(path.absolute()), source)


def import_hint(folder: str | Path, error: ValueError) -> str:
    """An error about the prior of a saved model, and which files of its folder nobody has imported."""
    files = [path for path in sorted(Path(folder).glob(f"{PREFIX}*.py")) if path.stem not in IMPORTED]
    if not files or "prior" not in str(error):
        return str(error)
    options = " ".join(f"--import {path}" for path in files)
    return f"{error}; the model was made with {', '.join(path.name for path in files)}: if you trust it, {options}"


def library_modules(own: OwnFile) -> list[str]:
    """The modules of this package that a file imports by their names."""
    nodes = [node for node in ast.walk(ast.parse(own.source, own.path)) if isinstance(node, ast.ImportFrom)]
    return [node.module for node in nodes if node.module and node.module.startswith(f"{LIBRARY}.")]


def carried(own: OwnFile) -> str:
    """The text of a file as a saved model carries it. Lines keep their numbers.

    Raises:
        ValueError: for an import that it could not do there. SyntaxError: for a text that is no Python.
    """
    lines = own.source.split("\n")
    for node in ast.walk(ast.parse(own.source, own.path)):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        try:
            statement = _carried_import(node)
        except ValueError as error:
            raise ValueError(f"--import {own.path}, line {node.lineno}: {error}") from None
        if statement is None:
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        indent, rest = lines[first][: node.col_offset], lines[last - 1][node.end_col_offset :].strip()
        if indent.strip() or (rest and not rest.startswith("#")):
            raise ValueError(f"--import {own.path}, line {node.lineno}: this import needs a line for itself")
        lines[first:last] = [f"{indent}{statement}{_WAS}{ast.unparse(node)}", *[""] * (last - first - 1)]
    return "\n".join(lines)


def _carried_import(node: ast.Import | ast.ImportFrom) -> str | None:
    """What an import of this package becomes; None for one of another package."""
    if isinstance(node, ast.Import):
        names = [alias for alias in node.names if alias.name.partition(".")[0] == LIBRARY]
        if not names:
            return None
        if len(node.names) > 1 or names[0].name != LIBRARY:
            raise ValueError(
                f"`{ast.unparse(node)}` must be `import {LIBRARY} as NAME` alone, to be saved with a model"
            )
        return f"from .base import LIBRARY_NAMES as {names[0].asname or LIBRARY}"
    if node.level:
        raise ValueError(f"`{ast.unparse(node)}`: a model is saved with this file, and not with those next to it")
    first, *parts = (node.module or "").split(".")
    if first != LIBRARY:
        return None
    if not parts:
        assignments = [f"{alias.asname or alias.name} = _names.{alias.name}" for alias in node.names]
        if node.names[0].name == "*":
            raise ValueError(f"`{ast.unparse(node)}` must name what it imports, to be saved with a model")
        return "; ".join(["from .base import LIBRARY_NAMES as _names", *assignments])
    if len(parts) != 2 or parts[0] not in ROOMS:
        raise ValueError(
            f"`{ast.unparse(node)}` must import names of a module of {LIBRARY}.{', '.join(ROOMS)}, to be saved with a "
            "model"
        )
    return f"from .{parts[0]} import {', '.join(map(ast.unparse, node.names))}"


class LibraryNames:
    """What `import hf_sparseprior as sp` becomes in the code of a saved model: the names in the files next to it."""

    def __getattr__(self, name: str) -> Any:
        rooms = [MODULES[name]] if name in MODULES else ROOMS
        for room in rooms:
            module = sys.modules.get(f"{__package__}.{room}")
            if module is not None and (name in MODULES or hasattr(module, name)):
                return module if name in MODULES else getattr(module, name)
        raise AttributeError(f"the code of a saved model has no {LIBRARY}.{name}")


LIBRARY_NAMES = LibraryNames()
