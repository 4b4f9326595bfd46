"""What tests of several files need."""

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch


@pytest.fixture
def global_generators_left_alone():
    """A block in which nothing may draw from the global random generators or seed them."""

    @contextmanager
    def block():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        yield
        assert random.getstate() == before[0]
        assert all(np.array_equal(now, then) for now, then in zip(np.random.get_state(), before[1], strict=True))
        assert torch.equal(torch.get_rng_state(), before[2])

    return block


@pytest.fixture(autouse=True)
def no_forced_backend(monkeypatch):
    """A backend that a developer forces in the shell does not apply in tests."""
    monkeypatch.delenv("SPARSEPRIOR_BACKEND", raising=False)
