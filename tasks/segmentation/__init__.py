"""Segmentation by mmsegmentation; importing this registers what the configs name (mm's `custom_imports`)."""

from contextlib import suppress
from typing import Any

with suppress(ImportError):  # without the extra `dense`: `load_task` raises it again, after `--help` was answered
    from tasks.segmentation import registered  # noqa: F401


def load_task() -> Any:
    """What segmentation adds to a run of mmengine, a `tasks.common.mm.task.Task`.

    Raises:
        ImportError: without the extra `dense`.
    """
    from tasks.segmentation.task import SEGMENTATION

    return SEGMENTATION
