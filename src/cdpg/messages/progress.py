"""The progress of long work.

A progress shows and does nothing else. It neither raises nor communicates, so that processes may report unequally; a
request to stop is looked for elsewhere (``system/stopping.py``).
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Protocol

from cdpg.messages.text import plain_text


class Progress(Protocol):
    """Shows what is being done."""

    def working(self, message: str) -> None:
        """``evaluating tuned: 64 of 200 contexts``."""


class SilentProgress:
    """Shows nothing."""

    def working(self, message: str) -> None:
        """Does nothing."""


class LineProgress:
    """Shows every message as a line on standard error. Output that fails is dropped."""

    def working(self, message: str) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(plain_text(message) + "\n")
            sys.stderr.flush()
