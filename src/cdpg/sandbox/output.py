"""Captures what a function prints in a worker, up to a limit; a worker has no standard streams."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

MAX_CAPTURED = 2000
"""Bytes captured of one call, and characters of one batch."""


class CapturedOutput(io.BufferedIOBase):
    """A stream that keeps the first bytes written to it and drops the rest."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._bytes += bytes(data)[: MAX_CAPTURED - len(self._bytes)]
        return len(data)

    @property
    def text(self) -> str:
        return self._bytes.decode("utf-8", "replace")


@contextlib.contextmanager
def capture_output(wanted: bool) -> Iterator[CapturedOutput]:
    """Capture what is printed within the block, if ``wanted``; otherwise leave the streams as they are."""
    captured = CapturedOutput()
    if not wanted:
        yield captured
        return
    stream = io.TextIOWrapper(captured, encoding="utf-8", errors="replace", write_through=True)  # type: ignore[type-var]
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield captured
