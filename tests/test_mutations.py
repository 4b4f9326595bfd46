"""The mistakes of tests/mutations.py can be made: each of their texts stands once, and their tests exist."""

from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, sources

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def texts():
    return sources(ROOT)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mistake_can_be_made(mutation, texts):
    assert sum(text.count(mutation.old) for text in texts.values()) == 1 and mutation.old != mutation.new
    assert all(list((ROOT / "tests").rglob(name)) for name in mutation.tests.split())
