"""Out of memory, told with the stage that needed it and the settings that lower the need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cdpg.errors import RunError

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory", "alloc_failed")
"""What the allocators of CPUs and accelerators say, in lower case; on a CPU it is a plain RuntimeError."""


@contextmanager
def needed_for(stage: str, advice: str) -> Iterator[None]:
    """Turn a failed allocation within it into an error that says what to lower."""
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
    """Whether an exception stands for memory that could not be had, on any device."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS))
