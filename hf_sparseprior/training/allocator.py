"""Memory of tensors on CPUs."""

from __future__ import annotations

import ctypes
import sys

# glibc's numbers of mallopt's parameters.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next tensors instead of returning it to the system.

    glibc returns every freed block above 32 MiB, and smaller ones from the end of its heap. The next step then pays for
    each page it touches again, which on CPUs can cost more than the work on it. From then on the process keeps its peak
    memory until it ends. This is for programs, not for libraries, because it holds for the whole process.

    Returns:
        Whether the C library accepted it; False if it is not glibc.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return all([mallopt(M_TRIM_THRESHOLD, 2**31 - 1), mallopt(M_MMAP_MAX, 0), mallopt(M_TOP_PAD, 64 << 20)])
