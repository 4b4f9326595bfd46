"""Importing the package is silent, light and quick."""

import json
import os
import subprocess
import sys
from itertools import chain

import pytest

UNWANTED = ["torchvision", "timm", "mmcv", "mmengine", "mmseg", "mmdet", "matplotlib", "datasets", "sklearn", "peft"]

# transformers loads a part of torch and of itself only when PreTrainedModel is imported. Any package that registers a
# model pays for that. What counts is the time in addition to it.
SCRIPT = """
import json, logging, random, sys, time, warnings
warnings.simplefilter("always")
start = time.process_time()
from transformers import PreTrainedModel
between = time.process_time()
before = set(sys.modules)
state, level, handlers = random.getstate(), logging.root.level, list(logging.root.handlers)
import hf_sparseprior
end = time.process_time()
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


def run_import(file):
    """What the script reports of one import in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEPRIOR")}
    command = [sys.executable, "-c", SCRIPT, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return {**json.loads(file.read_text()), "printed": done.stdout + done.stderr}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return run_import(tmp_path_factory.mktemp("import") / "report.json")


@pytest.mark.slow
def test_import_is_silent_and_light(report):
    """It prints nothing, loads nothing that is not needed, leaves global state alone, and every public name exists."""
    assert report["printed"] == ""
    imported = {name.partition(".")[0] for name in report["modules"]}
    assert "hf_sparseprior" in imported and not imported & set(UNWANTED)
    assert report["random"] and report["logging"] and report["dtype"] == "torch.float32"
    assert report["all"] == []


def test_import_is_quick(report, tmp_path):
    """What it computes, against what importing torch and transformers computes on the same machine.

    The best of up to three: another process on the machine only ever makes an import slower.
    """
    attempts = chain([report], (run_import(tmp_path / "report.json") for _ in range(2)))
    assert any(attempt["package"] < 0.15 * attempt["transformers"] for attempt in attempts)


WITHOUT = """
import os, signal, sys, tempfile
sys.modules["PIL"] = None  # as if it were not installed
import torch
from transformers import PreTrainedModel
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "getuid", "killpg", "sched_getaffinity", "setsid", "O_NONBLOCK", "O_CLOEXEC"):
    delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1"):
    delattr(signal, name)
import hf_sparseprior as sp
from hf_sparseprior.attention.functional import attention
from hf_sparseprior.kernels import build
sys.platform = "win32"
sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=2)
config = sp.SparsePriorViTConfig(prior="fibottention+violin", **sizes)
model, images = sp.SparsePriorViTModel(config).eval(), torch.randn(2, 3, 8, 8)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = sp.SparsePriorViTModel.from_pretrained(folder)
assert torch.equal(model(images).last_hidden_state, again(images).last_hidden_state)
assert build.load() == "they are not built on win32", build.load()
try:
    sp.onnx_library()
except RuntimeError as error:
    assert str(error) == "no operators for ONNX Runtime: they are not built on win32", error
attention(*torch.randn(3, 1, 2, 16, 4), support="fibottention")
"""


def test_it_runs_without_pillow_and_what_windows_lacks_and_logs_as_the_environment_says():
    """Modules, functions and signals alone: torch and transformers are those of this system.

    The package does not ask for Pillow.
    """
    environment = {**os.environ, "SPARSEPRIOR_LOG": "debug"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "hf_sparseprior.ops: layer 0: " in done.stderr
