"""What runs on this machine, what does not, and how to get it: python -m hf_sparseprior doctor"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hf_sparseprior.attention import functional as ops
from hf_sparseprior.base.checks import first_line
from hf_sparseprior.kernels import build, diagonal_cpu, program_libraries, triton_device

# Further packages than torch and transformers: what needs them, and how to get them.
OPTIONAL = {
    "matplotlib": ("pictures", "pip install '.[classification]'"),
    "accelerate": ("training", "pip install '.[classification]'"),
    "datasets": ("parquet, arrow and hub data", "pip install '.[classification]'"),
    "kornia": ("augmentation", "pip install '.[classification]'"),
    "scikit-learn": ("the digits of the demo", "pip install '.[classification]'"),
    "peft": ("LoRA and DoRA", "pip install '.[peft]'"),
    "ray": ("comparisons on a Ray cluster", "pip install '.[ray]'"),
    "tensorboard": ("trainer.report_to=tensorboard", "pip install '.[tracking]'"),
    "av": ("video", "pip install '.[video]'"),
    "pycocotools": ("objects found by heads of transformers", "make heads"),
    "onedl-mmcv": ("segmentation and detection", "make dense"),
    "onedl-mmengine": ("segmentation and detection", "make dense"),
    "onedl-mmsegmentation": ("segmentation", "make dense"),
    "onedl-mmdetection": ("detection", "make dense"),
    "robosuite": ("the robots Lift and Can", "make robotics"),
    "mujoco": ("the robots Lift and Can", "make robotics"),
    "gym-pusht": ("the robot PushT", "make robotics"),
    "gymnasium": ("the robot PushT", "make robotics"),
    "diffusers": ("policies of robots", "make robotics"),
    "h5py": ("demonstrations of Lift and Can", "make robotics"),
    "zarr": ("demonstrations of PushT", "make robotics"),
    "onnx": ("models in other programs", "pip install '.[export]'"),
    "onnxscript": ("models in other programs", "pip install '.[export]'"),
    "onnxruntime": ("models in other programs", "pip install '.[export]'"),
    "openvino": ("models in other programs", "pip install '.[export]'"),
}
# The extras that `--require` accepts, and the command that their packages name.
REQUIRABLE = {
    "video": "pip install '.[video]'",
    "heads": "make heads",
    "dense": "make dense",
    "robotics": "make robotics",
    "export": "pip install '.[export]'",
}

# What gives the library of operators with which a program runs files of `export --kernels`, by its package.
PROGRAM_LIBRARIES: dict[str, tuple[str, Callable[[], Path]]] = {
    "onnxruntime": ("ONNX Runtime", program_libraries.onnx_library),
    "openvino": ("OpenVINO", program_libraries.openvino_extension),
}

# Values of MUJOCO_GL and the library of each, in the order in which they are tried. Both render without a screen.
GL_LIBRARIES = {"osmesa": "OSMesa", "egl": "EGL"}
NO_GL = ("disable", "disabled", "off", "false", "0")  # values with which mujoco loads no library

# Runs in a process of its own: mujoco reads MUJOCO_GL on import, and a GL library without a screen may abort.
RENDER = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><light pos='0 0 3'/><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 16, 16)
renderer.update_scene(data)
assert renderer.render().max() > 0
"""


def report() -> Iterator[str]:
    """One line for each thing that is checked.

    Compiles the CPU kernels, and the operators for installed programs, if need be and possible, again if it failed.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    yield f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    yield f"CPU threads: {torch.get_num_threads()}; CUDA device: {gpu}"
    for name in OPTIONAL:
        yield _package_line(name)
    yield from _task_checks(*REQUIRABLE)
    triton = triton_device.device_reason("cuda", None) if torch.cuda.is_available() else "there is no CUDA device"
    yield "ok       Triton kernels" if triton is None else f"missing  Triton kernels: {triton}"
    build.forget_failures()
    for package, (title, library) in PROGRAM_LIBRARIES.items():
        if _version(package) is not None:
            yield _library_line(title, library)
    reason = diagonal_cpu.ready()
    if reason is not None:
        yield f"missing  compiled CPU kernels: {reason}. Attention runs without them, slower."
        return
    yield f"ok       compiled CPU kernels: {build.loaded_library()}"
    for name, error in kernel_errors().items():
        verdict = "ok      " if error < 1e-5 else "WRONG   "
        yield f"{verdict} kernel against the reference, {name}: largest difference {error:.1e}"


def missing_of(extra: str) -> list[str]:
    """What an extra's tasks lack on this machine, as lines of `report`; empty if everything is installed and works.

    Args:
        extra: one of `REQUIRABLE`.
    """
    lines = [_package_line(name) for name, (_, command) in OPTIONAL.items() if command == REQUIRABLE[extra]]
    return [line for line in (*lines, *_task_checks(extra)) if not line.startswith("ok")]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _package_line(name: str) -> str:
    purpose, install = OPTIONAL[name]
    installed = _version(name)
    return (
        f"missing  {name} ({purpose}): {install}" if installed is None else f"ok       {name} {installed} ({purpose})"
    )


def _library_line(title: str, library: Callable[[], Path]) -> str:
    """Where a program's operators are, or why there are none."""
    try:
        return f"ok       operators for {title} (files of export --kernels): {library()}"
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"missing  {first_line(error)}. Files of export without --kernels need none."


def _task_checks(*extras: str) -> Iterator[str]:
    """Lines on whether what is installed for these extras also works; none for what is not installed."""
    if "dense" in extras and _version("onedl-mmcv") is not None:
        reason = mmcv_problem()
        yield f"WRONG    {reason}: make dense" if reason else "ok       nms and roi_align of mmcv"
    if "robotics" in extras and _version("mujoco") is not None:
        reason = rendering_problem()
        yield f"missing  {reason}" if reason else "ok       rendering without a screen"


def mmcv_problem() -> str | None:
    """Why mmcv's compiled operators cannot be used; None if nms and roi_align give the right results."""
    try:
        from mmcv.ops import nms, roi_align
    except Exception as error:  # a package built for another torch fails in many ways
        return f"mmcv came without compiled operators ({first_line(error)})"
    # Of two boxes that overlap by 81 / 119 only the better one stays. The box far away stays too.
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 11.0, 11.0], [20.0, 20.0, 30.0, 30.0]])
    _, kept = nms(boxes, torch.tensor([0.5, 0.9, 0.7]), 0.5)
    if kept.tolist() != [1, 2]:
        return f"nms of mmcv keeps boxes {kept.tolist()} instead of [1, 2]"
    # The mean of a linear ramp over a box is its value at the middle; pixel i has its middle at i + 0.5.
    ramp = torch.arange(16.0).expand(1, 1, 16, 16).contiguous()
    value = roi_align(ramp, torch.tensor([[0.0, 2.0, 2.0, 10.0, 10.0]]), (1, 1), 1.0, 2, "avg", True).item()
    return None if abs(value - 5.5) < 1e-4 else f"roi_align of mmcv gives {value} instead of 5.5"


def gl_library() -> str | None:
    """The value of MUJOCO_GL with which this machine renders without a screen: what the user chose, or else the first
    whose library is found. None if no library is found, or if the user wants none."""
    chosen = os.environ.get("MUJOCO_GL")
    if chosen:
        return None if chosen.lower().strip() in NO_GL else chosen
    return next((gl for gl, name in GL_LIBRARIES.items() if find_library(name)), None)


def rendering_problem() -> str | None:
    """Why mujoco cannot draw without a screen; None if it can."""
    environment = {**os.environ, "MUJOCO_GL": gl_library() or os.environ.get("MUJOCO_GL") or "osmesa"}
    done = subprocess.run([sys.executable, "-c", RENDER], capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return None
    last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return f"mujoco cannot draw with MUJOCO_GL={environment['MUJOCO_GL']} ({last[0]}): apt-get install libosmesa6"


def kernel_errors() -> dict[str, float]:
    """Largest difference of each compiled CPU kernel from float64 `reference` on a small case."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.stack([torch.randn(2, 4, 50, 32, generator=generator) for _ in range(3)])
    decay = {"name": "violin", "alpha": torch.ones(4), "beta": torch.full((8, 4), 4.0)}
    cases: list[tuple[str, str, dict[str, Any] | None]] = [
        ("diagonals", "fibottention", None),
        ("lists of keys", "bigbird", None),
        ("decay", "dense", decay),
    ]
    errors = {}
    for name, support, own_decay in cases:
        out, expected = (
            ops.attention(x[0], x[1], x[2], support, own_decay, num_prefix_tokens=1, backend=backend)
            for backend, x in (("cpp", inputs), ("reference", inputs.double()))
        )
        assert isinstance(out, torch.Tensor) and isinstance(expected, torch.Tensor)
        errors[name] = float((out - expected).abs().max())
    return errors
