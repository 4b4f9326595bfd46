from decimal import ROUND_FLOOR, Decimal, localcontext
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_sparseprior.patterns.fibottention import resolve_sequence
from hf_sparseprior.patterns.sequences import (
    SEQUENCES,
    SETTING_MINIMUM,
    fibonacci_terms,
    floor_times_phi,
    head_sequence,
    register_sequence,
    sequence_settings,
    wythoff_start,
)
from tests.each import each

checked = settings(max_examples=100, deadline=None, derandomize=True)


def variants(name):
    # Defaults, then each integer setting at its minimum and above it, each boolean one the other way.
    specs = [{"name": name}]
    for key, default in sequence_settings(name).items():
        if isinstance(default, bool):
            specs.append({"name": name, key: not default})
        else:
            specs += [{"name": name, key: SETTING_MINIMUM.get(key, 0) + more} for more in (0, 1, 5)]
    return specs


VARIANTS = [pytest.param(spec, id="-".join(map(str, spec.values()))) for name in SEQUENCES for spec in variants(name)]


def decimal_floor_phi(n):
    with localcontext() as context:
        context.prec = 200
        return int((n * (1 + Decimal(5).sqrt()) / 2).to_integral_value(ROUND_FLOOR))


def decimal_wythoff(row, modified=False):
    m = decimal_floor_phi(row)
    a = decimal_floor_phi(m)
    b = a + m
    if modified:
        b_before = b - a
        return a - b_before, b_before
    return a, b


def recurrence(a, b, count=200):
    terms = [a, b]
    while len(terms) < count:
        terms.append(terms[-1] + terms[-2])
    return terms


def brute_terms(spec, head, window):
    # Membership of every integer, from the definitions in Fibottention sections 3.1, 3.2 and 6.5 to 6.8.
    name, get = spec["name"], {**sequence_settings(spec["name"]), **spec}.get
    numbers = range(1, window + 1)
    if name == "multiples":
        remainder = (head - 1) % get("c") if get("shifted") else 0
        return [o for o in numbers if o % get("c") == remainder]
    if name == "shifted_multiples":
        return [o for o in numbers if any(get("c") * n + head % get("c") == o for n in numbers)]
    if name == "powers":
        return [o for o in numbers if any(get("base") ** n == o for n in range(get("first"), 40))]
    if name == "monomials":
        return [o for o in numbers if any(n ** get("degree") == o for n in numbers)]
    if name == "wythoff":
        terms = recurrence(*decimal_wythoff(head, get("modified")))
    elif name == "fibonacci":
        terms = recurrence(get("a"), get("b"))
    elif name == "fibonacci_per_head":
        terms = recurrence(head + get("delta"), head + get("delta"))
    else:
        return None  # no independent definition here; the properties of all still cover it
    return [o for o in numbers if o in terms]


# ---- phi and the Wythoff array --------------------------------------------------------------------------------------


def test_floor_times_phi_small():
    assert [floor_times_phi(n) for n in range(3000)] == [decimal_floor_phi(n) for n in range(3000)]


@checked
@given(st.integers(0, 10**60))
def test_floor_times_phi_is_exact(n):
    # phi is the positive root of x^2 - x - 1, so m <= n phi < m + 1 is a statement about integers.
    m = floor_times_phi(n)
    assert m * m - m * n - n * n <= 0 < (m + 1) ** 2 - (m + 1) * n - n * n
    assert m == decimal_floor_phi(n)


# Row: its two predecessors, and its terms.
TABLE_1 = {
    1: ([0, 1], [1, 2, 3, 5, 8]),
    2: ([1, 3], [4, 7, 11, 18, 29]),
    3: ([2, 4], [6, 10, 16, 26, 42]),
    4: ([3, 6], [9, 15, 24, 39, 63]),
    5: ([4, 8], [12, 20, 32, 52, 84]),
}


def test_table_1():
    for row, (before, terms) in TABLE_1.items():
        assert wythoff_start(row) == tuple(terms[:2])
        assert wythoff_start(row, modified=True) == tuple(before)
        assert list(fibonacci_terms(*wythoff_start(row), terms[-1])) == terms
        assert list(fibonacci_terms(*wythoff_start(row, modified=True), terms[-1])) == before + terms


@checked
@given(st.integers(1, 10**30))
def test_wythoff_start(row):
    a, b = wythoff_start(row)
    assert (a, b) == decimal_wythoff(row)
    assert wythoff_start(row, modified=True) == decimal_wythoff(row, modified=True) == (row - 1, b - a)


def test_wythoff_rows_contain_every_integer_once():
    limit = 3000
    # Row i starts above i, so `limit` rows hold everything up to `limit`.
    terms = [term for row in range(1, limit + 1) for term in fibonacci_terms(*wythoff_start(row), limit)]
    assert sorted(terms) == list(range(1, limit + 1))


def test_wythoff_row_must_be_positive():
    for row in (0, -1):
        with pytest.raises(ValueError, match=rf"row={row} .*must be 1 or more"):
            wythoff_start(row)


# ---- Fib(a, b) ------------------------------------------------------------------------------------------------------


@checked
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 400))
def test_fibonacci_terms_follow_the_recurrence(a, b, limit):
    assume(a or b)
    # A term above the limit is left out wherever it stands: Fib(50, 1) within 30 still has 1.
    expected = {term for term in recurrence(a, b) if term <= limit}
    assert set(fibonacci_terms(a, b, limit)) == expected


@pytest.mark.parametrize(("a", "b"), [(0, 0), (-1, 3), (3, -1)])
def test_fibonacci_terms_need_a_term_to_start_from(a, b):
    with pytest.raises(ValueError, match=rf"Fib\(a={a}, b={b}\) needs two non-negative terms, not both zero"):
        list(fibonacci_terms(a, b, 10))


# ---- every registered sequence --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", VARIANTS)
def test_terms_are_those_of_the_definition_sorted_and_inside_the_window(spec):
    for head in (1, 2, 3, 5, 12):
        for window in (1, 2, 7, 65, 130):
            expected = brute_terms(spec, head, window)
            assert expected is None or head_sequence(spec, head, window) == expected
    for head in range(1, 17):
        widest = head_sequence(spec, head, 300)
        assert all(type(o) is int and 1 <= o <= 300 for o in widest)
        assert all(low < high for low, high in pairwise(widest))
        # The window only cuts: a smaller one gives the same offsets up to it.
        for window in (1, 2, 10, 64, 65, 66, 299):
            assert head_sequence(spec, head, window) == [o for o in widest if o <= window]


UP_TO_65 = [
    ({"name": "wythoff"}, 12, [30, 49]),
    ({"name": "wythoff", "modified": True}, 1, [1, 2, 3, 5, 8, 13, 21, 34, 55]),
    ({"name": "wythoff", "modified": True}, 12, [11, 19, 30, 49]),
    ({"name": "fibonacci"}, 7, [1, 2, 3, 5, 8, 13, 21, 34, 55]),
    ({"name": "fibonacci", "a": 5, "b": 10}, 3, [5, 10, 15, 25, 40, 65]),
    ({"name": "fibonacci_per_head", "delta": 2}, 3, [5, 10, 15, 25, 40, 65]),
    ({"name": "powers", "base": 3}, 1, [3, 9, 27]),
    ({"name": "powers", "base": 3, "first": 0}, 1, [1, 3, 9, 27]),
    ({"name": "powers", "first": 10**9}, 1, []),
    ({"name": "monomials"}, 1, [1, 4, 9, 16, 25, 36, 49, 64]),
    ({"name": "monomials", "degree": 3}, 1, [1, 8, 27, 64]),
    ({"name": "multiples", "c": 20}, 9, [20, 40, 60]),
    ({"name": "multiples", "c": 20, "shifted": True}, 9, [8, 28, 48]),
    ({"name": "multiples", "c": 20, "shifted": True}, 21, [20, 40, 60]),
    ({"name": "shifted_multiples", "c": 20}, 9, [29, 49]),
    ({"name": "shifted_multiples", "c": 20}, 20, [20, 40, 60]),
]


@each("spec, head, expected", UP_TO_65)
def test_terms_up_to_the_papers_largest_window(spec, head, expected):
    assert head_sequence(spec, head, 65) == expected


@each("name", SEQUENCES)
def test_the_full_form_has_every_setting_and_each_is_checked(name):
    full, settings = resolve_sequence(name), sequence_settings(name)
    # `modified` of the Wythoff rows belongs to the support, where configs set it.
    assert full == {"name": name, **({} if name == "wythoff" else settings)}
    assert resolve_sequence(full) == full == resolve_sequence({"name": name})
    for key in full.keys() - {"name"}:
        if isinstance(settings[key], bool):
            values, rule = (1, "yes", None), "must be True or False"
        else:
            minimum = SETTING_MINIMUM.get(key, 0)
            assert resolve_sequence({"name": name, key: minimum})[key] == minimum
            values, rule = (minimum - 1, 2.0, "2", True, None), f"must be an integer of {minimum} or more"
        for bad in values:
            with pytest.raises(ValueError, match=rf"{name}.*{key}={bad!r} {rule}"):
                resolve_sequence({"name": name, key: bad})
    allowed = ", ".join(key for key in full if key != "name")
    with pytest.raises(ValueError, match=rf"sequence '{name}' has no setting 'zzzz'.*{allowed}"):
        resolve_sequence({"name": name, "zzzz": 1})


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_unknown_settings_come_with_the_nearest_known_one():
    with pytest.raises(ValueError, match=r"sequence 'multiples' has no setting 'shift'.* mean 'shifted'.* c, shifted"):
        resolve_sequence({"name": "multiples", "shift": True})


@each("sequence", ["lucas", {"name": "lucas"}, {}, {"name": None}, None, 5, True, {"name": ["wythoff"]}])
def test_what_is_no_sequence_is_refused(sequence):
    with pytest.raises(ValueError, match=r"sequence.*wythoff, fibonacci"):
        resolve_sequence(sequence)


def test_fib_0_0_is_refused():
    with pytest.raises(ValueError, match="a=0 and b=0 give no offset; at least one must be 1 or more"):
        resolve_sequence({"name": "fibonacci", "a": 0, "b": 0})


def test_names_are_registered_once():
    before = dict(SEQUENCES)
    with pytest.raises(ValueError, match="sequence 'wythoff' is registered already"):
        register_sequence("wythoff")(lambda head, window: [])
    assert before == SEQUENCES
