"""Mistakes that can be made in a source file, one at a time, each at a node of a function.

A site is a node and an operator, which says what the mistake is. Its name holds no line and quotes no statement: path,
function, operator, what the node is, and its number among those of the function:

    hf_sparseprior/patterns/sequences.py::head_sequence compare <= 2

So it stays the same when anything else in the file changes. The text around the node stays, too, line by line.

Operators are those of mutmut and cosmic-ray, as far as we need them. Neither would serve: cosmic-ray 8.7 names a
mistake by its number in the file, which each edit above it changes, and has one test command for all; mutmut 3.8 finds
tests by running all of them, an hour here, and adds the variants of a function to its module, which models that save
their code would save as well.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

Change = tuple[str, ast.AST, ast.AST]  # what the node is, the node, and what replaces it
Place = tuple[int, int]  # line from 1, bytes of it before

# Symbol -> its class, and the symbol that replaces it.
COMPARISONS: dict[str, tuple[type[ast.cmpop], str]] = {
    "<": (ast.Lt, "<="),
    "<=": (ast.LtE, "<"),
    ">": (ast.Gt, ">="),
    ">=": (ast.GtE, ">"),
    "==": (ast.Eq, "!="),
    "!=": (ast.NotEq, "=="),
    "in": (ast.In, "not in"),
    "not in": (ast.NotIn, "in"),
    "is": (ast.Is, "is not"),
    "is not": (ast.IsNot, "is"),
}
ARITHMETIC: dict[str, tuple[type[ast.operator], str]] = {
    "+": (ast.Add, "-"),
    "-": (ast.Sub, "+"),
    "*": (ast.Mult, "/"),
    "/": (ast.Div, "*"),
    "//": (ast.FloorDiv, "*"),
    "%": (ast.Mod, "//"),
    "**": (ast.Pow, "*"),
    "&": (ast.BitAnd, "|"),
    "|": (ast.BitOr, "&"),
    "<<": (ast.LShift, ">>"),
    ">>": (ast.RShift, "<<"),
}
SYMMETRIC = ("max", "min", "maximum", "minimum")
MODULES = ("torch", "F", "nn", "tl", "np", "math", "os", "sys", "re", "json", "ast", "random", "inspect", "itertools")


@dataclass(frozen=True)
class Site:
    """One mistake that can be made in a file.

    path: from the root of the checkout. function: "Class.method" or "outer.inner". operator: of `OPERATORS`.
    node: what the node is. number: of those in the function, from 1 in reading order.
    old, new: the node, and what replaces it.
    """

    path: str
    function: str
    operator: str
    node: str
    number: int
    old: ast.AST = field(repr=False, compare=False)
    new: ast.AST = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """Path and function, operator, node and number."""
        return f"{self.path}::{self.function} {self.operator} {self.node} {self.number}"


# ---- operators ------------------------------------------------------------------------------------------------------


def compare(node: ast.AST) -> Iterator[Change]:
    """`<` and `<=`, `>` and `>=`, `==` and `!=`, `in` and `not in`, `is` and `is not` are swapped."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            symbol, other = _symbols(COMPARISONS, operator)
            changed = [*node.ops[:i], COMPARISONS[other][0](), *node.ops[i + 1 :]]
            yield symbol, node, ast.Compare(node.left, changed, node.comparators)


def arithmetic(node: ast.AST) -> Iterator[Change]:
    """An operator becomes its other (`ARITHMETIC`)."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and not isinstance(node.op, (ast.MatMult, ast.BitXor)):
        symbol, other = _symbols(ARITHMETIC, node.op)
        operator = ARITHMETIC[other][0]()
        if isinstance(node, ast.BinOp):
            yield symbol, node, ast.BinOp(node.left, operator, node.right)
        else:
            yield symbol + "=", node, ast.AugAssign(node.target, operator, node.value)


def constant(node: ast.AST) -> Iterator[Change]:
    """A number is one more; True and False are swapped."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield repr(node.value), node, ast.Constant(value)


def logic(node: ast.AST) -> Iterator[Change]:
    """`and` and `or` are swapped."""
    if isinstance(node, ast.BoolOp):
        symbol, other = ("and", ast.Or()) if isinstance(node.op, ast.And) else ("or", ast.And())
        yield symbol, node, ast.BoolOp(other, node.values)


def negate(node: ast.AST) -> Iterator[Change]:
    """A condition is negated: of `if`, `while`, a conditional expression ("else") or a comprehension ("for")."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        word = {ast.If: "if", ast.While: "while", ast.IfExp: "else"}[type(node)]
        yield word, node.test, ast.UnaryOp(ast.Not(), node.test)
    for test in node.ifs if isinstance(node, ast.comprehension) else []:
        yield "for", test, ast.UnaryOp(ast.Not(), test)


def drop_sign(node: ast.AST) -> Iterator[Change]:
    """`-x` and `not x` become `x`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield "-" if isinstance(node.op, ast.USub) else "not", node, node.operand


def drop_statement(node: ast.AST) -> Iterator[Change]:
    """`pass` instead of a call, an error, or an assignment without which the name still has a value."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield _called(node.value), node, ast.Pass()
    elif isinstance(node, ast.Raise):
        yield "raise", node, ast.Pass()
    elif isinstance(node, ast.AugAssign):
        yield ast.unparse(node.target), node, ast.Pass()
    elif isinstance(node, ast.Assign):
        target = ast.unparse(node.targets[0])
        names = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
        if isinstance(node.targets[0], (ast.Attribute, ast.Subscript)) or target in names:
            yield target, node, ast.Pass()


def return_none(node: ast.AST) -> Iterator[Change]:
    """`return None` instead of another value."""
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return", node, ast.Return(ast.Constant(None))


def swap_arguments(node: ast.AST) -> Iterator[Change]:
    """The first two arguments of a call change places, unless it is of their maximum or minimum."""
    if isinstance(node, ast.Call) and len(node.args) > 1 and _called(node) not in SYMMETRIC:
        first, second, *others = node.args
        if not any(isinstance(argument, ast.Starred) for argument in (first, second)):
            yield _called(node), node, ast.Call(node.func, [second, first, *others], node.keywords)


def drop_keyword(node: ast.AST) -> Iterator[Change]:
    """A call without one of its keyword arguments."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg is not None:
                others = [other for other in node.keywords if other is not keyword]
                yield keyword.arg, node, ast.Call(node.func, node.args, others)


def drop_element(node: ast.AST) -> Iterator[Change]:
    """A tuple or list without one of its elements, as far as these are names and attributes."""
    is_display = isinstance(node, (ast.Tuple, ast.List)) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1
    if is_display and not any(isinstance(element, ast.Slice) for element in node.elts):
        for element in node.elts:
            if isinstance(element, (ast.Name, ast.Attribute)):
                others = [other for other in node.elts if other is not element]
                yield ast.unparse(element), node, type(node)(others, ast.Load())


def drop_call(node: ast.AST) -> Iterator[Change]:
    """`x` instead of `x.method(...)`; not for functions of modules."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = ast.unparse(node.func.value)
        if owner.partition(".")[0] not in MODULES and owner not in ("self", "cls", "super()"):
            yield node.func.attr, node, node.func.value


OPERATORS: dict[str, Callable[[ast.AST], Iterator[Change]]] = {
    operator.__name__: operator
    for operator in (
        *(compare, arithmetic, constant, logic, negate, drop_sign),
        *(drop_statement, return_none, swap_arguments, drop_keyword, drop_element, drop_call),
    )
}


def _symbols(table: dict, operator: ast.AST) -> tuple[str, str]:
    return next((symbol, other) for symbol, (kind, other) in table.items() if isinstance(operator, kind))


def _called(call: ast.Call) -> str:
    """The last part of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


# ---- files ----------------------------------------------------------------------------------------------------------


def sites(root: Path, path: str) -> list[Site]:
    """Every site in the functions of a file."""
    same: dict[tuple[str, str, str], list[tuple[Place, Site]]] = {}
    for function, node in _nodes(ast.parse((root / path).read_text(encoding="utf-8")), "", within=False):
        for name, operator in OPERATORS.items():
            for what, old, new in operator(node):
                site = Site(path, function, name, what, 1, old, new)
                same.setdefault((function, name, what), []).append((_reading_place(old), site))
    found = []
    for entries in same.values():
        entries.sort(key=lambda entry: entry[0])
        found += [replace(site, number=number) for number, (_, site) in enumerate(entries, start=1)]
    return found


def changed(text: str, site: Site) -> str:
    """The text of a file with the mistake in it, and as many lines as before."""
    lines = text.encode().splitlines(keepends=True)
    (first, left), (last, right) = _start(site.old), _end(site.old)
    before, after = lines[first - 1][:left], lines[last - 1][right:]
    new = ast.unparse(ast.fix_missing_locations(site.new)) + "\n" * (last - first)
    new = f"({new})" if isinstance(site.new, ast.expr) else new  # parentheses keep an expression whole
    return b"".join([*lines[: first - 1], before, new.encode(), after, *lines[last:]]).decode()


def _nodes(parent: ast.AST, function: str, within: bool) -> Iterator[tuple[str, ast.AST]]:
    """The nodes within functions, each with the name of its function; with default values, but without decorators.

    Left out are annotations and what errors say, which no test should have to notice, patterns, which take no
    expression, and f-strings, whose nodes have no place of their own in Python 3.11.
    """
    for name, value in ast.iter_fields(parent):
        if name in ("decorator_list", "returns", "annotation", "pattern", "exc"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _nodes(node, f"{function}.{node.name}".lstrip("."), not isinstance(node, ast.ClassDef))
            elif isinstance(node, ast.AST) and not isinstance(node, ast.JoinedStr):
                if within:
                    yield function, node
                yield from _nodes(node, function, within)


def _start(node: ast.AST) -> Place:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def _end(node: ast.AST) -> Place:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def _reading_place(node: ast.AST) -> Place:
    """Where a reader sees the node: at its operator, or at the end of what is called."""
    for name in ("left", "func"):
        if (part := getattr(node, name, None)) is not None:
            return _end(part)
    return _start(node)
