"""The ``cdpg`` command."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from cdpg.cli import checking, results, settings, tuning
from cdpg.cli.options import app
from cdpg.errors import CDPGError
from cdpg.messages.text import plain_text
from cdpg.system.threads import limit_spinning

__all__ = ["app", "checking", "exit_status", "main", "results", "settings", "tuning"]
"""The modules are imported for their commands."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command; errors become one sentence on standard error and an exit status."""
    limit_spinning()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without π shows a replacement
            stream.reconfigure(errors="replace")
    sys.exit(exit_status(lambda: app(args=arguments, prog_name="cdpg")))


def exit_status(command: Callable[[], Any]) -> int:
    """Run a command; an error is shown on standard error and becomes the exit status."""
    try:
        command()
    except CDPGError as error:
        _print_lines([f"cdpg: {plain_text(str(error), limit=4000)}"])
        return error.exit_status
    except KeyboardInterrupt:
        _print_lines(["cdpg: interrupted"])
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except Exception as error:  # a bug: the traceback, without control characters
        _print_lines([plain_text(line, limit=2000) for line in "".join(traceback.format_exception(error)).splitlines()])
        return 1
    return 0


def _print_lines(lines: list[str]) -> None:
    console = Console(stderr=True)
    with contextlib.suppress(OSError):  # the terminal may be closed, and the status still counts
        for line in lines:
            console.print(Text(line), soft_wrap=True)
