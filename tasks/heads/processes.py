"""Losses of heads in several processes, as in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from accelerate import PartialState
from accelerate.utils import reduce
from transformers.loss import loss_for_object_detection
from transformers.models.mask2former import modeling_mask2former
from transformers.models.maskformer import modeling_maskformer

# Where transformers divides losses of boxes and masks by the number of objects in all processes.
COUNTING: tuple[Any, ...] = (loss_for_object_detection, modeling_mask2former, modeling_maskformer)


@contextmanager
def counted_once() -> Iterator[None]:
    """Within this, objects of all processes are counted as DETR does it: their number divided by that of processes.

    transformers (5.23) divides by the number of processes what `accelerate.utils.reduce` has averaged already, so boxes
    and masks would weigh as many times as much, beside classes, as there are processes.
    """
    with ExitStack() as changes:
        if PartialState().num_processes > 1:
            for module in COUNTING:
                changes.enter_context(mock.patch.object(module, "reduce", partial(reduce, reduction="sum")))
        yield
