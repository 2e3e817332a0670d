"""Signals that stop a run: the first lets the epoch finish, a second Ctrl-C ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from cdpg.errors import Interrupted

_NOTICE = "\nfinishing what is under way and saving it; press Ctrl-C again to stop at once\n"
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent by Ctrl-C, by a scheduler, by a closed terminal."""


class StopSignal:
    """While active, remembers the signal that asked the run to end; does nothing outside the main thread.

    A signal that the caller has chosen to ignore, as ``nohup`` does, stays ignored. They may be
    nested: the inner one starts with the signal that the outer one has received, and passes its own on.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in _CAUGHT:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._remember)
        for outer in self._outer():
            self.received = outer.received
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for outer in self._outer():
            outer.received = outer.received or self.received

    def _outer(self) -> set[StopSignal]:
        owners = (getattr(handler, "__self__", None) for handler in self._previous.values())
        return {owner for owner in owners if isinstance(owner, StopSignal)}

    def interruption(self, situation: str, how_to_resume: str) -> Interrupted:
        """The exception that stops the run; another process may have received the signal."""
        return Interrupted(f"{situation}; continue with: {how_to_resume}", self.received or signal.SIGTERM)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            _write(_NOTICE)
        self.received = number


def _write(text: str) -> None:
    # Written to the descriptor, since a handler may interrupt a write to the stream.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), text.encode("ascii"))
