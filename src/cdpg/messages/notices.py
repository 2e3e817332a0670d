"""Notices: sentences to the user, through the standard ``logging``, by loggers that are named after their modules.

A program that sets up handlers or a level for the logger ``cdpg`` decides what becomes of them. Where it has not, a
trainer shows them on standard error, and so does the command line.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

from cdpg.messages.text import plain_text

P = ParamSpec("P")
R = TypeVar("R")

LOGGER = "cdpg"
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Where launchers, those of MPI too, write the number of a process; Accelerate reads the same."""
_LONGEST = 2000
_NOTHING = logging.CRITICAL + 1


class NoticeHandler(logging.Handler):
    """Writes a notice as one line of harmless text to standard error. Output that fails is dropped."""

    def emit(self, record: logging.LogRecord) -> None:
        # The stream is looked up for each: a live progress line takes its place, and shows the notice above itself.
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(plain_text(record.getMessage(), limit=_LONGEST) + "\n")
            sys.stderr.flush()


@contextmanager
def shown_notices(is_main: bool, always: bool = False) -> Iterator[None]:
    """Show notices on standard error within the block, in the main process only.

    If the program has its own handlers for them, only those get the notices, unless ``always`` is set. A level that
    the program has set for the logger ``cdpg`` is kept on every process. Without one, the main process shows notices
    from level INFO on, and the other processes give none, to any handler.
    """
    logger = logging.getLogger(LOGGER)
    level, propagate = logger.level, logger.propagate
    handlers: list[logging.Handler] = []
    if always or not _has_handlers(logger):
        # The other processes need a handler too: without one, logging itself would show warnings.
        handlers.append(NoticeHandler() if is_main else logging.NullHandler())
        logger.addHandler(handlers[0])
        logger.propagate = False  # otherwise a root logger set up meanwhile would show them again
    if level == logging.NOTSET and (handlers or not is_main):
        logger.setLevel(logging.INFO if is_main else _NOTHING)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
        logger.propagate = propagate
        if level == logging.NOTSET:
            logger.setLevel(level)


def _has_handlers(logger: logging.Logger) -> bool:
    """Whether the program has set up handlers that get the notices.

    A root logger that is set up for warnings only, as notebooks and libraries do, does not count: notices of level INFO
    would be lost.
    """
    asked = logger.level != logging.NOTSET or logger.isEnabledFor(logging.INFO)
    return bool(logger.handlers) or (logger.hasHandlers() and asked)


def shows_notices(function: Callable[P, R]) -> Callable[P, R]:
    """While the function runs, notices are shown as :func:`shown_notices` says."""

    @functools.wraps(function)
    def showing(*args: P.args, **kwargs: P.kwargs) -> R:
        with shown_notices(launched_as_main()):
            return function(*args, **kwargs)

    return showing


def launched_as_main() -> bool:
    """Whether this is the first of the processes that a launcher started, or the only one."""
    return next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0"
