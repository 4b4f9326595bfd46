"""Detection and instance segmentation by mmdetection; importing this registers what the configs name (mm's
`custom_imports`).
"""

from contextlib import suppress
from typing import Any

with suppress(ImportError):  # without the extra `dense`: `load_task` raises it again, after `--help` was answered
    from tasks.detection import registered  # noqa: F401


def load_task() -> Any:
    """What detection adds to a run of mmengine, a `tasks.common.mm.task.Task`.

    Raises:
        ImportError: without the extra `dense`.
    """
    from tasks.detection.task import DETECTION

    return DETECTION
