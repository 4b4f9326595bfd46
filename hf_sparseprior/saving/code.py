"""The code that a saved model carries, so that it loads with `trust_remote_code=True` where this package is missing.

transformers reads custom code from one folder without subfolders. So each package of ours that a model needs becomes
one file, in which its modules stand one after the other; the configuration and the modeling file of the model stay
files of their own. Source text is copied; only imports change. What cannot be joined without changing its meaning is
refused. Files of a user that registered a support or the like (`base.own_files`) lie next to them.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.abc
import importlib.util
import os
import re
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_sparseprior.base.files import write_text
from hf_sparseprior.base.own_files import IMPORTED, OwnFile, carried, library_modules
from hf_sparseprior.base.sections import name_sections
from hf_sparseprior.base.version import __version__

PACKAGE = "hf_sparseprior"
NOT_CARRIED = f"{PACKAGE}.kernels"  # imported where the package is installed, see `compiled_kernels`
LOADED = "transformers_modules."  # the package in which transformers has the code of saved models
SECTIONS = name_sections.__module__
FUTURE = "from __future__ import annotations"


def write_code(folder: str | os.PathLike, entries: Sequence[str]) -> None:
    """Write the code of a model into a folder: the same bytes on every save.

    Args:
        folder: where the model is saved.
        entries: the modules of its classes. If they come from a saved folder, the files next to them are copied. Of
            other people's modules transformers copies each, and they need this package where they are loaded.
    """
    for name, text in code_files(tuple(entries), tuple(IMPORTED.values())).items():
        write_text(Path(folder) / name, text)


@functools.lru_cache(maxsize=16)
def code_files(entries: tuple[str, ...], own: tuple[OwnFile, ...] = ()) -> dict[str, str]:
    """Names and texts of the files; see `write_code`. own: files of a user.

    Raises:
        ValueError: for an import or a name that cannot be joined; the message has module and line.
    """
    if all(_ours(name) for name in entries):
        return _Code(entries, own).files()
    if not all(_ours(name) or name.startswith(LOADED) for name in entries):
        return {}
    folders = {Path(file).parent for name in entries if (file := sys.modules[name].__file__)}
    files = [path for folder in sorted(folders) for path in sorted(folder.glob("*.py"))]
    # transformers makes a package of the folder into which it copies code.
    return {path.name: path.read_text("utf-8") for path in files if path.name != "__init__.py"}


# ---- modules and what they import -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Import:
    """A statement `from module import names`. names: of something in the module, and what it is called here."""

    node: ast.ImportFrom
    module: str
    names: tuple[tuple[str, str], ...]

    @property
    def top(self) -> bool:
        """Whether it runs when its module is imported."""
        return self.node.col_offset == 0


@dataclass(frozen=True)
class _Module:
    """One of our modules. imports: of our modules alone. origins: what each name at its top stands for, dotted."""

    name: str
    source: str
    imports: tuple[_Import, ...]
    origins: dict[str, str]

    @property
    def path(self) -> str:
        """Its place in the package."""
        return self.name.removeprefix(f"{PACKAGE}.").replace(".", "/") + ".py"


def _read(name: str) -> _Module:
    source = _source(name)
    tree = ast.parse(source)
    if FUTURE not in source:
        raise ValueError(f"{name} lacks {FUTURE!r}, which all modules of a joined file have")
    origins = {symbol: f"{name}.{symbol}" for symbol in _bound_names(source, name) - {"__all__", "annotations"}}
    for node in tree.body:
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            start = f"{_imported_module(node, name)}." if isinstance(node, ast.ImportFrom) else ""
            dotted = start + (alias.name if start or alias.asname else alias.name.split(".")[0])
            if (bound := alias.asname or dotted.removeprefix(start)) in origins:
                origins[bound] = dotted
    return _Module(name, source, tuple(_imports(name, tree)), origins)


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    source = spec.loader.get_source(name) if spec and isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if source is None:
        raise ValueError(f"the source of {name} cannot be read, and a saved model carries it")
    return source


def _bound_names(source: str, name: str) -> set[str]:
    symbols = symtable.symtable(source, name, "exec").get_symbols()
    known = {s.get_name() for s in symbols if s.is_imported() or s.is_namespace()}
    assigned = {s.get_name() for s in symbols if s.is_assigned()}
    # From Python 3.12 on the variables of comprehensions are among these.
    tree = ast.parse(source)
    loops = [node.target for node in ast.walk(tree) if isinstance(node, ast.comprehension)]
    parts = {id(part) for loop in loops for part in ast.walk(loop)}
    variables = {part.id for loop in loops for part in ast.walk(loop) if isinstance(part, ast.Name)}
    stored = {node.id for node in _at_top(tree) if isinstance(node, ast.Name) and id(node) not in parts}
    return known | (assigned - (variables - stored))


def _at_top(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module outside its functions and classes, without names that are only read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Store):
            yield node
        yield from _at_top(node)


def _imported_module(node: ast.ImportFrom, importing: str) -> str:
    parent = importing.rsplit(".", node.level)[0] if node.level else ""
    return ".".join(filter(None, (parent, node.module)))


def _imports(name: str, tree: ast.Module) -> Iterator[_Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(_ours(alias.name) for alias in node.names):
            raise ValueError(f"{name}, line {node.lineno}: only `from {PACKAGE}.MODULE import NAME` can be joined")
        if not isinstance(node, ast.ImportFrom) or not _ours(module := _imported_module(node, name)):
            continue
        if f"{module}.".startswith(f"{NOT_CARRIED}."):
            continue
        spec = importlib.util.find_spec(module)
        if spec is None or spec.submodule_search_locations is not None or any(each.name == "*" for each in node.names):
            raise ValueError(f"{name}, line {node.lineno}: only names of a module can be joined, not those of {module}")
        yield _Import(node, module, tuple((alias.name, alias.asname or alias.name) for alias in node.names))


def _ours(module: str) -> bool:
    return f"{module}.".startswith(f"{PACKAGE}.")


def _header(name: str) -> str:
    """The first line of a file: what it is, and of which version."""
    title = (ast.get_docstring(ast.parse(_source(name))) or "").partition("\n")[0]
    return f"# {PACKAGE} {__version__}, {name.removeprefix(f'{PACKAGE}.')}: {title}"


# ---- the files ------------------------------------------------------------------------------------------------------


class _Code:
    """All modules that some classes need, and the file of each."""

    def __init__(self, entries: tuple[str, ...], own: tuple[OwnFile, ...] = ()) -> None:
        self.entries, self.own = entries, own
        self.modules: dict[str, _Module] = {}
        waiting = [*entries, SECTIONS, *(name for each in own for name in library_modules(each))]
        while waiting:
            if (name := waiting.pop()) not in self.modules:
                self.modules[name] = _read(name)
                waiting += [each.module for each in self.modules[name].imports]

    def files(self) -> dict[str, str]:
        """Names and texts."""
        by_file: dict[str, list[_Module]] = {}
        for module in self.in_order():
            by_file.setdefault(self.file_of(module.name), []).append(module)
        files = {f"{file}.py": self.text(file, modules, list(by_file)) for file, modules in by_file.items()}
        return files | {f"{each.name}.py": carried(each) for each in self.own}

    def in_order(self) -> list[_Module]:
        """Each module after those that it imports when it is imported."""
        ordered: dict[str, _Module] = {}

        def add(name: str) -> None:
            if name not in ordered:
                for other in [each.module for each in self.modules[name].imports if each.top]:
                    add(other)
                ordered[name] = self.modules[name]

        for name in sorted(self.modules):
            add(name)
        return list(ordered.values())

    def file_of(self, module: str) -> str:
        """The file of a module, without its suffix: that of its package, or of the module itself."""
        parts = module.split(".")[1:]
        return parts[-1] if module in self.entries else parts[0]

    def text(self, file: str, modules: list[_Module], files: list[str]) -> str:
        """The text of one file."""
        self.check_names(file, modules)
        if modules[0].name in self.entries:
            return self.lone_text(modules[0], files)
        parts, sections = [_header(f"{PACKAGE}.{file}"), "", FUTURE], []
        for module in modules:
            parts += ["", "", f"# ==== {module.path} ".ljust(119, "=")]
            sections.append((1 + sum(part.count("\n") + 1 for part in parts), module.path))
            parts.append(self.rewritten(module).replace(f"{FUTURE}\n\n", "", 1))
        if self.file_of(SECTIONS) != file:
            parts += ["", f"from .{self.file_of(SECTIONS)} import name_sections  # noqa: E402"]
        return "\n".join([*parts, "", f"name_sections(globals(), {sections!r})"]) + "\n"

    def lone_text(self, module: _Module, files: list[str]) -> str:
        """The text of a module that stays a file of its own."""
        others = [name for name in files if name not in map(self.file_of, self.entries)]
        # transformers before 5.20 copies what this file imports, and not what is imported there.
        others += [each.name for each in self.own]  # after the rooms, whose names they use
        imports = [f"from .{name} import __doc__ as _{name}  # noqa: F401" for name in others]
        text = self.rewritten(module).replace(f"{FUTURE}\n", "\n".join([FUTURE, "", *imports, ""]), 1)
        return f"{_header(module.name)}\n{text}\n"

    def rewritten(self, module: _Module) -> str:
        """A module's source, with imports of ours as the files need them."""
        lines: list[str | None] = list(module.source.rstrip("\n").split("\n"))
        for each in module.imports:
            node, end = each.node, each.node.end_lineno or each.node.lineno
            first, last = lines[node.lineno - 1] or "", lines[end - 1] or ""
            rest = last[node.end_col_offset :].strip()
            if first[: node.col_offset].strip() or (rest and not rest.startswith("#")):
                raise ValueError(
                    f"{module.name}, line {node.lineno}: an import needs its lines for itself, to be joined"
                )
            file = self.file_of(each.module)
            if file != self.file_of(module.name):
                lines[node.lineno - 1] = re.sub(r"from\s+[\w.]+\s+import", f"from .{file} import", first, count=1)
                continue
            indent = first[: node.col_offset]
            renamed = [f"{indent}{alias} = {name}" for name, alias in each.names if name != alias]
            lines[node.lineno - 1 : end] = [None] * (end - node.lineno + 1)
            lines[node.lineno - 1] = "\n".join(renamed) or (f"{indent}pass" if indent else None)
        return "\n".join(line for line in lines if line is not None)

    def check_names(self, file: str, modules: list[_Module]) -> None:
        """Raise ValueError for a name that two modules of a file give to different things."""
        first: dict[str, tuple[str, str]] = {}
        for module in modules:
            for name, origin in module.origins.items():
                other, known = first.setdefault(name, (module.name, self.origin(origin)))
                if known != self.origin(origin):
                    raise ValueError(
                        f"{name!r} is one thing in {other} and another in {module.name}, both of {file}.py"
                    )
                if hasattr(builtins, name) and len(modules) > 1:
                    raise ValueError(f"{name!r} of {module.name} would replace Python's own in all of {file}.py")

    def origin(self, dotted: str) -> str:
        """Where something is defined that a module of ours may only pass on."""
        module, _, name = dotted.rpartition(".")
        place = self.modules[module].origins.get(name, dotted) if module in self.modules else dotted
        return dotted if place == dotted else self.origin(place)
