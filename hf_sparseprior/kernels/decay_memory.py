"""How much memory the tables of decays take on a GPU, see `decayed_triton`."""

from __future__ import annotations

_decay_memory = 1 << 29


def decay_memory() -> int:
    """Bytes that tables of decays take at most on a device, in all layers together."""
    return _decay_memory


def set_decay_memory(size: int) -> None:
    """Set `decay_memory`, 512 MB unless set.

    Args:
        size: bytes, 0 or more. Tables that are there stay. With less, M is made anew more often, and for fewer heads
            or rows at a time (at least 128 rows of one head).

    Raises:
        ValueError: if it is negative.
    """
    global _decay_memory
    if size < 0:
        raise ValueError(f"decay memory of {size} bytes must be 0 or more")
    _decay_memory = size
