"""Cells of docs/what-works.md, drawn by a fixed seed, come out as they are recorded."""

import json
import random
from importlib.util import find_spec

import pytest

from tests import matrix

RECORD = json.loads(matrix.RECORD.read_text())
QUICK = [cell for cell in matrix.cells() if not matrix.WAYS[cell[2]].compiles and matrix.key(*cell) in RECORD["cells"]]
NEEDS = {"mm": "mmengine", "onnx": "onnxruntime", "openvino": "openvino"}


@pytest.mark.slow
@pytest.mark.parametrize("cell", random.Random(7).sample(QUICK, 20), ids=lambda cell: matrix.key(*cell))
def test_a_cell_is_what_it_was(cell):
    if (package := NEEDS.get(cell[2])) is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    before, now = RECORD["cells"][matrix.key(*cell)], matrix.outcome(*cell)
    assert (now == "yes") == (before == "yes"), f"{now}; renew it: python -m tests.matrix {cell[2]}"


def test_the_page_is_that_of_the_record():
    assert matrix.page(RECORD) == matrix.PAGE.read_text()


def test_reasons_are_short():
    for found in RECORD["cells"].values():
        if found != "yes":
            assert 1 <= len(matrix.reason(found).split()) <= 6, found
