"""What the package says to the user through ``logging``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Gatherer(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def noticed() -> Iterator[list[str]]:
    """The notices of all levels that are given within, as they come."""
    messages: list[str] = []
    logger, handler = logging.getLogger("cdpg"), _Gatherer(messages)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
