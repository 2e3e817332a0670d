"""What a function prints in a worker, which has no standard streams of its own: kept on request, up to a limit."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

LONGEST = 2000
"""Bytes kept of what one call prints, and characters of what a batch does."""


class Kept(io.BufferedIOBase):
    """The first bytes that were written; what follows is dropped."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._bytes += bytes(data)[: LONGEST - len(self._bytes)]
        return len(data)

    @property
    def text(self) -> str:
        return self._bytes.decode("utf-8", "replace")


@contextlib.contextmanager
def output_kept(wanted: bool) -> Iterator[Kept]:
    """Within, what is printed is kept, if it is wanted; else it goes where the streams lead."""
    kept = Kept()
    if not wanted:
        yield kept
        return
    stream = io.TextIOWrapper(kept, encoding="utf-8", errors="replace", write_through=True)  # type: ignore[type-var]
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield kept
