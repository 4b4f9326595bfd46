"""Whether this is the machine on which tests/fixtures/saved_79213a46 was made."""

import json
import platform
from pathlib import Path

import torch

MADE_WITH = Path(__file__).parent / "fixtures" / "saved_79213a46" / "made_with.json"


def same_machine() -> bool:
    """Whether bits can be compared. Another processor or another PyTorch sums with other last bits."""
    made = json.loads(MADE_WITH.read_text())
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return made["cpu"] in cpu and made["torch"] == torch.__version__ and made["python"] == platform.python_version()
