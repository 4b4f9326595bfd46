"""What a results file records of the program that ran: versions, hardware, command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "hf_sparseprior",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "evaluate",
    "numpy",
    "scikit-learn",
    "av",
    "onedl-mmcv",
    "onedl-mmengine",
    "onedl-mmsegmentation",
    "onedl-mmdetection",
    "onnx",
    "onnxruntime",
    "openvino",
)


def environment() -> dict[str, Any]:
    """Versions and hardware, as every results file records them."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    hardware = {
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    return {"versions": versions, "hardware": hardware}


def cpu_name() -> str:
    """Name of the processor as Linux gives it; on other systems as Python gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def command_line() -> str:
    """The running command, as a user types it."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    start = f"python -m {spec.name}" if spec is not None else f"python {sys.argv[0]}"
    return f"{start.removesuffix('.__main__')} {shlex.join(sys.argv[1:])}".rstrip()
