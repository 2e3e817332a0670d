"""Memory: errors for failed allocations, with the stage and the setting to lower; what there is, is used, is freed."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cdpg.errors import RunError

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory", "alloc_failed")
"""Messages of the allocators of CPUs and accelerators, in lower case; on a CPU it is a plain RuntimeError."""
_M_MMAP_THRESHOLD = -3
_LARGE = 2**20
"""Bytes of a block that is returned to the system when it is freed (:func:`return_freed_blocks`)."""

CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the limit of a container, by version of the kernel's control groups."""


@contextmanager
def needed_for(stage: str, advice: str) -> Iterator[None]:
    """Turn a failed allocation within the block into a RunError that says what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(
            f"out of memory while {stage}: {advice}. What was saved is intact: such a change is allowed when a run is "
            f"resumed"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that an allocation failed, on any device."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS))


def return_freed_blocks() -> None:
    """Have blocks of at least a megabyte returned to the system when they are freed, on Linux with glibc.

    By default glibc keeps freed blocks of up to 32 MB for itself, and can use them only for blocks that fit into the
    gaps. A divided model that gathers and frees its layers then takes twice the memory that it holds.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library has no such setting
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


def peak() -> dict[str, int]:
    """Peak bytes of this process so far: ``memory``, and ``GPU memory`` if there is a GPU."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    torch = sys.modules.get("torch")  # if it is not loaded, no GPU is used
    if torch is not None and torch.cuda.is_available():
        found["GPU memory"] = sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    return found


def of_machine() -> int | None:
    """Bytes of memory that the machine has, or the container if it may use less; None if that is not known."""
    found = []
    with suppress(OSError, ValueError, AttributeError):  # not every system says so
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in map(Path, CONTAINER_LIMITS):
        with suppress(OSError, ValueError):  # "max" where there is no limit
            found.append(int(path.read_text()))
    return min(found, default=None)


def format_bytes(count: float) -> str:
    """``512 MB``, ``3.2 GB``."""
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def format_memory(peak: Mapping[str, int]) -> str:
    """``3.2 GB of memory, 512 MB of GPU memory``."""
    return ", ".join(f"{format_bytes(count)} of {kind}" for kind, count in peak.items())
