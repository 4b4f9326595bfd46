"""How commands end when something goes wrong."""

from __future__ import annotations

import os
import sys
import traceback

# Errors that a user's values, files and machine cause: one line and exit status 2. Every other error is a mistake of
# the program and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ImportError, MemoryError)
# What installs a package, by the name under which it is imported.
INSTALLS = {
    **dict.fromkeys(
        ("accelerate", "datasets", "evaluate", "kornia", "matplotlib", "PIL", "scipy", "sklearn", "yaml"),
        "pip install '.[classification]'",
    ),
    **dict.fromkeys(("cv2", "skimage"), "pip install '.[analysis]'"),
    **dict.fromkeys(("av", "skvideo"), "pip install '.[video]'"),
    "peft": "pip install '.[peft]'",
    "ray": "pip install '.[ray]'",
    **dict.fromkeys(("mmcv", "mmdet", "mmengine", "mmseg", "pycocotools"), "make dense"),
    **dict.fromkeys(
        (
            "diffusers",
            "gym_pusht",
            "gymnasium",
            "h5py",
            "mujoco",
            "numba",
            "pygame",
            "pymunk",
            "robosuite",
            "shapely",
            "zarr",
        ),
        "make robotics",
    ),
    "gradio": "pip install '.[app]'",
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript", "openvino"), "pip install '.[export]'"),
}
TRACEBACK = "SPARSEPRIOR_TRACEBACK"  # environment variable; 1 shows the traceback of a user's error, too


def report_error(program: str, error: BaseException) -> int:
    """Print one of `USER_ERRORS` as one line on stderr, after its traceback if SPARSEPRIOR_TRACEBACK=1.

    Returns:
        The exit status, 2.
    """
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        traceback.print_exception(error)
    print(f"{program}: {one_line(error)}", file=sys.stderr)
    return 2


def one_line(error: BaseException) -> str:
    """An error's text, or its type if it has none; for a package that cannot be imported also what installs it. The
    text of an error in a data loader worker is the worker's traceback, so only its last line is taken.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, ImportError) and (install := INSTALLS.get((error.name or "").partition(".")[0])):
        return f"{text}; install it with: {install}"
    return text.strip().splitlines()[-1].partition(": ")[2] if text.startswith("Caught ") else text
