"""Keeping freed host memory in the process, for devices that are emulated on the CPU.

XLA's CPU client takes the buffers of every program from malloc. glibc maps large ones afresh and
unmaps them when they are freed, so that each step faults in and zeroes every page again: 400,000
page faults and 13 % of the CPU time of a step of the medium decoder of ``benchmarks/overhead.py``.
An accelerator's allocator keeps what it has; so does glibc when it is told to.

The price is that the process holds its peak memory until it ends. That is for a program to decide,
not for a library: jaxpipe's own programs call `keep_freed_memory` first thing, `import jaxpipe`
never does.
"""

from __future__ import annotations

import ctypes
import os
import sys

# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for reuse; whether it was told (False where malloc is other).

    Call it before jax is imported: threads that have allocated before keep their own arenas.

    >>> keep_freed_memory() in (True, False)
    True
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    largest = 2**31 - 1  # bytes of free memory at the top of the heap that are not given back
    # Freed memory stays where its arena is, so arenas are few; one alone makes threads queue.
    arenas = os.cpu_count() or 1
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, largest), (_M_ARENA_MAX, arenas))
    return all(mallopt(name, value) == 1 for name, value in settings)
