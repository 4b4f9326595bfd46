"""How the compiled operators are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def records(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors has gradients to keep something for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_eager(q: Tensor) -> bool:
    """Whether a call with this tensor is neither traced nor watched, so that it need not be an operator.

    `torch.compile`, `torch.export`, modes such as counters of FLOPs, and subclasses of tensors need operators.
    """
    watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return type(q) is Tensor and not watched


def call(operator: Any, trains: bool, *arguments: Any) -> Any:
    """An operator's result; `trains` as of `records`.

    Gradients that are registered in Python cost about as much a call as the attention of 16 tokens, even where nothing
    is recorded. Such a call goes past them.
    """
    if trains or torch.compiler.is_compiling():
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)
