"""Importing the package is silent, light and quick."""

import json
import os
import subprocess
import sys

import pytest

UNWANTED = ["torchvision", "timm", "mmcv", "mmengine", "mmseg", "mmdet", "matplotlib", "datasets", "sklearn", "peft"]
REPEATS = 3

# transformers loads a part of torch and of itself only when PreTrainedModel is imported. Any package that registers a
# model pays for that. What counts is the time in addition to it.
SCRIPT = """
import json, logging, random, sys, time, warnings
warnings.simplefilter("always")
start = time.perf_counter()
from transformers import PreTrainedModel
between = time.perf_counter()
before = set(sys.modules)
state, level, handlers = random.getstate(), logging.root.level, list(logging.root.handlers)
import hf_sparseprior
end = time.perf_counter()
import torch
report = {
    "transformers": between - start,
    "package": end - between,
    "modules": sorted(set(sys.modules) - before),
    "random": random.getstate() == state,
    "logging": (logging.root.level, logging.root.handlers) == (level, handlers),
    "dtype": str(torch.get_default_dtype()),
    "all": [name for name in hf_sparseprior.__all__ if not hasattr(hf_sparseprior, name)],
}
with open(sys.argv[1], "w") as file:
    json.dump(report, file)
"""


def run(script, *arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEPRIOR")}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**environment, **variables}, check=True)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("import")
    found = []
    for number in range(REPEATS):
        done = run(SCRIPT, str(folder / f"{number}.json"))
        found.append({**json.loads((folder / f"{number}.json").read_text()), "printed": done.stdout + done.stderr})
    return found


@pytest.mark.slow
def test_import_prints_nothing(reports):
    assert [report["printed"] for report in reports] == [""] * REPEATS


def test_import_takes_nothing_that_is_not_needed(reports):
    imported = {name.partition(".")[0] for name in reports[0]["modules"]}
    assert "hf_sparseprior" in imported and not imported & set(UNWANTED)


def test_import_is_quick(reports):
    # The best of three: another process on the machine only ever makes an import slower.
    assert min(report["package"] for report in reports) < 0.5


def test_import_leaves_global_state_alone(reports):
    assert all(report["random"] and report["logging"] and report["dtype"] == "torch.float32" for report in reports)


def test_every_public_name_exists(reports):
    assert reports[0]["all"] == []


@pytest.mark.slow
def test_log_level_comes_from_the_environment():
    script = """
import torch
from hf_sparseprior.ops import attention
attention(*torch.randn(3, 1, 2, 16, 4), support="fibottention")
"""
    done = run(script, SPARSEPRIOR_LOG="debug")
    assert done.stdout == "" and "hf_sparseprior.ops: layer 0: " in done.stderr
