"""peft, for tests of what transformers itself does with it."""

import importlib.metadata
from types import ModuleType

import pytest
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION


def import_fitting_peft() -> ModuleType:
    """peft; skips the test where it is missing or older than transformers' own `add_adapter` accepts."""
    peft: ModuleType = pytest.importorskip("peft")
    if Version(importlib.metadata.version("peft")) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"transformers {importlib.metadata.version('transformers')} asks for peft {MIN_PEFT_VERSION}")
    return peft
