"""The public interface as a list, which docs/stability.md promises to keep: python -m tests.public [--check]

One line for each name, in tests/fixtures/public.txt. Without --check the list is written anew, after a change that is
meant; with it, the difference is printed and the exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_sparseprior.cli.arguments import KINDS, PROGRAM, make_parser

LIST = Path(__file__).parent / "fixtures" / "public.txt"
# Rooms that `import hf_sparseprior` leaves out, and which have an `__all__`.
ROOMS = ("adapters", "compression", "convert", "training")
# Classes of transformers and peft whose fields their own releases decide.
COMMON = ("LoraConfig", "PeftConfig", "PreTrainedConfig", "TrainingArguments")
PLAIN = (bool, int, float, str, type(None))


def shown(value: Any) -> str:
    """A default, the same in every version of Python: numbers, words and collections of them, else the type alone."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {shown(each)}' for key, each in value.items())}}}"
    return repr(value) if type(value) in PLAIN else f"<{type(value).__name__}>"


def signature(function: Callable[..., Any]) -> str:
    """Names, kinds and defaults of parameters; no annotations, which versions of Python write differently."""
    parts, last = [], None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and last not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            parts.append("*")
        if last is parameter.POSITIONAL_ONLY and parameter.kind is not parameter.POSITIONAL_ONLY:
            parts.append("/")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={shown(parameter.default)}"
        parts.append(f"{stars}{parameter.name}{default}")
        last = parameter.kind
    return f"({', '.join([*parts, *(['/'] if last is inspect.Parameter.POSITIONAL_ONLY else [])])})"


def own_fields(config_class: type, common: type) -> Iterator[str]:
    """Keys of a configuration that transformers' or peft's base class does not have, and their defaults."""
    known = {field.name for field in fields(common)}
    for field in fields(config_class):
        if field.name not in known:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            yield f"{field.name}={shown(default)}" if default is not MISSING else field.name


def class_lines(name: str, cls: type) -> Iterator[str]:
    """The constructor or, of a configuration, its keys; then `forward` and what begins with `from_`, if it is ours."""
    bases = {base.__name__: base for base in cls.__mro__ if not base.__module__.startswith("hf_sparseprior")}
    common = next((bases[key] for key in bases if key in COMMON), None)
    if common is None:
        yield f"{name}{signature(cls)}"
    else:
        yield from (f"{name}: {key}" for key in sorted(own_fields(cls, common)))
    ours = [base for base in cls.__mro__ if base.__module__.startswith("hf_sparseprior")]
    for method in sorted({key for base in ours for key in vars(base)}):
        if method == "forward" or (method.startswith("from_") and method not in ("from_dict", "from_pretrained")):
            yield f"{name}.{method}{signature(getattr(cls, method))}"


def module_lines(name: str, module: ModuleType) -> Iterator[str]:
    """What a module has in `__all__`; without one, its functions and classes."""
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    for key in sorted(getattr(module, "__all__", [key for key in own if not key.startswith("_")])):
        value, full = getattr(module, key), f"{name}.{key}"
        if isinstance(value, ModuleType):
            yield from module_lines(full, value)
        elif isinstance(value, type):
            yield from class_lines(full, value)
        else:
            yield f"{full}{signature(value)}" if inspect.isroutine(value) else full


def command_lines() -> Iterator[str]:
    """Commands with their arguments, options and choices."""
    (commands,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        yield f"{PROGRAM} {name}"
        for action in parser._actions:
            if action.dest != "help":
                called = ", ".join(action.option_strings) or f"<{action.dest}>"
                yield f"{PROGRAM} {name} {called}" + (f": {', '.join(action.choices)}" if action.choices else "")


def registered_lines() -> Iterator[str]:
    """Names that configurations take, with the defaults of their settings; families with their presets."""
    from hf_sparseprior.base.families import FAMILIES
    from hf_sparseprior.cli.names import _rows

    for family in FAMILIES.values():
        yield f"families {family.name}: {', '.join(family.presets)}"
    for kind in KINDS[1:]:
        for name, (_, settings) in _rows(kind).items():
            yield f"{kind} {name}" + "".join(f", {key}={shown(value)}" for key, value in settings.items())


def operator_lines() -> Iterator[str]:
    """The compiled operators, which exported files call.

    Raises:
        RuntimeError: where there is neither a compiler nor a compiled library.
    """
    from hf_sparseprior.cli.onnx_operators import OPERATORS, operator

    for name in OPERATORS:
        yield str(operator(name)._schema)


def public() -> list[str]:
    """All lines, sorted."""
    import hf_sparseprior as sp

    lines = [*module_lines("hf_sparseprior", sp), *command_lines(), *registered_lines(), *operator_lines()]
    for room in ROOMS:
        lines += module_lines(f"hf_sparseprior.{room}", importlib.import_module(f"hf_sparseprior.{room}"))
    return sorted(lines)


def difference(committed: list[str], current: list[str]) -> list[str]:
    """Lines that were added (+) or removed (-); a changed one is both."""
    lines = difflib.unified_diff(committed, current, n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.public", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="print what differs from the list, and write nothing")
    if not parser.parse_args(argv).check:
        LIST.write_text("\n".join(public()) + "\n", encoding="utf-8")
        return 0
    if changed := difference(LIST.read_text(encoding="utf-8").splitlines(), public()):
        print("\n".join(changed))
        print("docs/stability.md says what may change. If it is meant: python -m tests.public, a line in CHANGELOG.md")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
