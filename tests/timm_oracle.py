"""Imports timm as an oracle, also on machines without torchvision.

timm imports torchvision for its data loaders and one class of frozen batch norms, none of which a ViT uses, and
torchvision has no build for every PyTorch. While timm is imported, an empty module replaces a missing torchvision. A
real one is left alone, and the stand-in is removed afterwards.
"""

import enum
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

# What timm 1.0 imports.
MODULES = (
    *("torchvision", "torchvision.models", "torchvision.models.feature_extraction", "torchvision.ops"),
    *("torchvision.ops.misc", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.datasets"),
)


class StandIn(ModuleType):
    """Every public name is an empty class: enough for `from ... import`, base classes and `isinstance`."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        value = type(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class InterpolationMode(enum.Enum):
    """timm makes a table of these when it is imported."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


@contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """A stand-in in sys.modules, unless torchvision can be imported."""
    try:
        importlib.import_module("torchvision")
    except Exception:  # missing, or of another build: that ends in a RuntimeError or an AttributeError
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    else:
        yield
        return
    modules = {name: StandIn(name) for name in MODULES}
    for name, module in modules.items():
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    for name in ("torchvision.transforms", "torchvision.transforms.functional"):
        modules[name].InterpolationMode = InterpolationMode
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


def import_timm() -> ModuleType:
    """timm; a test is skipped only where it is not installed."""
    with torchvision_stand_in():
        return pytest.importorskip("timm", reason="timm is not installed")
