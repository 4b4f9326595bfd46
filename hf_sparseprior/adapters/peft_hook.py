"""Registers our adapters with peft when peft is imported. This package never imports peft by itself.

peft has no entry points for methods of other packages, so we wait for its import. `import hf_sparseprior` puts a finder
into `sys.meta_path`, which finds peft once, imports `adapters.violin` after it, and removes itself. The end of
`adapters.violin` shows what that changes in peft: five entries in peft's registries (`register_peft_method` takes no
name outside peft's own list), and one method of `BaseTuner`, wrapped by a check that raises or returns what peft
returned.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterPeft(MetaPathFinder):
    """Finds peft as the other finders do, and imports `hf_sparseprior.adapters.violin` once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of peft, None for every other module."""
        if fullname != "peft":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(self._load, loader.exec_module)
        return spec

    def _load(self, exec_module: Any, module: ModuleType) -> None:
        exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        importlib.import_module("hf_sparseprior.adapters.violin")


def register_with_peft() -> None:
    """Register now if peft is loaded, otherwise as soon as it is."""
    if "peft" in sys.modules:
        importlib.import_module("hf_sparseprior.adapters.violin")
    elif not any(isinstance(finder, AfterPeft) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterPeft())
