"""The mistakes of tests/mutations.py can be made, and it notices which of them tests notice (in a tree made here)."""

import ast
from pathlib import Path

import pytest

from tests import mutations
from tests.each import each
from tests.mutation_list import CHOSEN, EXPLAINED, Mutation
from tests.mutation_sites import OPERATORS, changed, sites

ROOT = Path(__file__).parents[1]
LIBRARY = '''\
def clipped(value, low=0, high=10):
    """`value` between two bounds."""
    if value < low:
        return low
    return (
        high
        if value > high
        else value
    )  # a comment


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count
'''
TESTS = """\
from hf_sparseprior.base.tiny import Counter, clipped


def test_clipped():
    assert [clipped(value) for value in (-1, 5, 11)] == [0, 5, 10]


def test_counter():
    assert Counter().add(2) == 2


def test_that_always_fails():
    raise AssertionError
"""
PLACE = "hf_sparseprior/base/tiny.py::"
NOTICED = Mutation("nothing is added", f"{PLACE}Counter.add", "drop_statement", "self.count", "test_tiny.py", "counter")
SURVIVOR = Mutation("the bound itself", f"{PLACE}clipped", "compare", ">", "test_tiny.py", "clipped")


@each("mutation", CHOSEN)
def test_a_chosen_mistake_is_at_one_node_and_has_tests(mutation):
    assert mutations.site_of(ROOT, mutation).path == mutation.place.partition("::")[0]
    assert mutations.arguments_of(ROOT, mutation)


def test_sixty_mistakes_with_different_names_four_of_them_in_tasks():
    trials, wrong = mutations.trials(ROOT)
    names = {trial.site.name for trial in trials}
    assert not wrong and len(trials) == len(names) == 60 and all(trial.stages for trial in trials)
    assert sum(name.startswith("tasks/") for name in names) == 4
    assert EXPLAINED.keys() <= {trial.site.name for trial in trials if trial.title == "drawn"}


@pytest.fixture
def tree(tmp_path):
    for path, text in (("hf_sparseprior/base/tiny.py", LIBRARY), ("tests/hf_sparseprior/base/test_tiny.py", TESTS)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("operator", "before", "after"),
    [
        ("compare", "a < b in c", ["a <= b in c", "a < b not in c"]),
        ("arithmetic", "a + b * c", ["a - b * c", "a + b / c"]),
        ("constant", "(1, 0.5, True, 'a')", ["(2, 0.5, True, 'a')", "(1, 1.5, True, 'a')", "(1, 0.5, False, 'a')"]),
        ("logic", "a and b or c", ["(a and b) and c", "(a or b) or c"]),
        ("negate", "a if b else c", ["a if not b else c"]),
        ("negate", "[a for b in c if d]", ["[a for b in c if not d]"]),
        ("drop_sign", "-a or not b", ["a or not b", "-a or b"]),
        ("drop_statement", "a.b = c", ["pass"]),
        ("drop_statement", "a = b", []),
        ("drop_statement", "a = f(a)", ["pass"]),
        ("drop_statement", "raise ValueError(1)", ["pass"]),
        ("return_none", "return a", ["return None"]),
        ("swap_arguments", "f(a, b, c=d) + max(a, b) + g(*a, b)", ["f(b, a, c=d) + max(a, b) + g(*a, b)"]),
        ("drop_keyword", "f(a, b=c, **d)", ["f(a, **d)"]),
        ("drop_element", "(a, b.c, 1)", ["(b.c, 1)", "(a, 1)"]),
        ("drop_call", "a.b(c) + torch.d(e)", ["a + torch.d(e)"]),
    ],
)  # fmt: skip
def test_operators(tree, operator, before, after):
    (tree / "a.py").write_text(f"def f():\n    {before}\n")
    found = [changed((tree / "a.py").read_text(), site) for site in sites(tree, "a.py") if site.operator == operator]
    wanted = [f"def f():\n    {text}\n" for text in after]
    assert sorted(ast.dump(ast.parse(text)) for text in found) == sorted(ast.dump(ast.parse(text)) for text in wanted)


def test_every_operator_is_tried():
    rows = next(mark for mark in test_operators.pytestmark if mark.name == "parametrize").args[1]
    assert {row[0] for row in rows} == OPERATORS.keys()


def test_names_and_lines_stay(tree):
    path = PLACE.removesuffix("::")
    before = sites(tree, path)
    for site in before:
        lines = changed(LIBRARY, site).splitlines()
        assert len(lines) == len(LIBRARY.splitlines())
        assert lines != LIBRARY.splitlines()
    assert {site.function for site in before} == {"clipped", "Counter.__init__", "Counter.add"}
    (tree / path).write_text("import math\n\nLIMIT = 1 + 1\n\n\n" + LIBRARY.replace("# a comment", ""))
    assert [site.name for site in sites(tree, path)] == [site.name for site in before]


def test_a_name_without_a_number_means_the_only_node(tree):
    (tree / "a.py").write_text("def f(x):\n    return 1 + x + 1\n")
    for node, number, line in (("x", None, "0 nodes"), ("1", None, "2 nodes"), ("1", 3, "0 nodes")):
        with pytest.raises(ValueError, match=line):
            mutations.site_of(tree, Mutation("", "a.py::f", "constant", node, "", number=number))
    assert mutations.site_of(tree, Mutation("", "a.py::f", "constant", "1", "", number=2)).old.col_offset == 19


@pytest.fixture
def run(tree, monkeypatch, capsys):
    """The command on the tree with these mistakes, none of which is drawn: exit status and lines."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing them takes longer than all the rest

    def start(*chosen, explained=()):
        for name, value in (("CHOSEN", chosen), ("DRAWN", 0), ("EXPLAINED", dict(explained))):
            monkeypatch.setattr(mutations, name, value)
        status = mutations.main(["--root", str(tree), "--jobs", "1"])
        return status, capsys.readouterr().out.splitlines()

    return start


def test_a_survivor_is_reported(run, tree):
    status, lines = run(NOTICED, SURVIVOR)
    assert lines[0].startswith(f"killed    nothing is added: {PLACE}Counter.add drop_statement self.count 1")
    assert "test_counter" in lines[0]
    assert lines[1].startswith(f"SURVIVED  the bound itself: {PLACE}clipped compare > 1")
    assert status == 1 and lines[2:] == ["2 mutations: 1 killed, 1 survived, 0 explained, 0 error"]
    assert (tree / "hf_sparseprior/base/tiny.py").read_text() == LIBRARY


def test_an_explained_mistake_is_no_survivor(run):
    status, lines = run(NOTICED, SURVIVOR, explained={f"{PLACE}clipped compare > 1": "both are the bound"})
    assert status == 0 and lines[-1] == "2 mutations: 1 killed, 0 survived, 1 explained, 0 error"
    assert lines[1].startswith("explained the bound itself") and lines[1].endswith("both are the bound")


def test_what_proves_nothing_is_an_error(run):
    """Tests that fail anyway, a selection of none, a file that is missing, a node that is not there."""
    given = ({"select": "always_fails"}, {"select": "of_no_test"}, {"tests": "test_missing.py"}, {"node": "count"})
    status, lines = run(*(Mutation(**{**vars(NOTICED), **one}) for one in given))
    assert status == 1 and lines[-1] == "4 mutations: 0 killed, 0 survived, 0 explained, 4 error"
    assert all(line.startswith("ERROR") for line in lines[:4])
    assert "no test file test_missing.py" in lines[0] and "is 0 nodes" in lines[1]
    assert all(line.endswith("(without the mistake)") for line in lines[2:4])


def test_a_draw_stays_when_a_file_is_added(tree, monkeypatch):
    """Those with the smallest hashes are drawn from each file, whatever else there is."""
    monkeypatch.setattr(mutations, "DRAWN", 5)
    before = [site.name for site in mutations.drawn(tree)]
    (tree / "hf_sparseprior/other.py").write_text(LIBRARY)
    still = [name for site in mutations.drawn(tree) if (name := site.name).startswith(PLACE)]
    assert len(set(before)) == 5 and still and still == before[: len(still)]


def test_tests_of_a_module():
    """Those that import it, in either form of import and in any room, and then those of its room."""
    near, room = mutations.tests_of(ROOT, "hf_sparseprior/patterns/curves.py")
    assert "tests/hf_sparseprior/patterns/test_curves.py" in near
    assert any(not file.startswith("tests/hf_sparseprior/patterns/") for file in near)
    assert "tests/hf_sparseprior/patterns/test_sequences.py" in room and not set(near) & set(room)
    assert all(file.startswith("tests/hf_sparseprior/patterns/") for file in room)
