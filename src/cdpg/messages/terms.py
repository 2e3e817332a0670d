"""Words of messages that differ by caller: options on the command line, arguments in Python.

A message that says what to do must not name an option that the caller does not have. The command line says once that
it is the caller; everything else is Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_OPTIONS: ContextVar[Mapping[str, str] | None] = ContextVar("cdpg_options", default=None)
"""None in Python; on the command line, the option names in which this command differs from the others."""

TERMS = {
    "resume": ("--resume", "train(resume_from_checkpoint=True)"),
    "overwrite": ("--overwrite", "overwrite_output_dir=True"),
    "output_dir": ("--output-dir", "output_dir"),
    "model": ("--model", "model"),
    "method": ("--method", "method"),
    "contexts": ("--contexts", "train_dataset"),
    "eval_contexts": ("--eval-contexts", "eval_dataset"),
    "constraint": ("--constraint", "constraints"),
    "moment": ("--moment", "constraints"),
    "reward": ("--reward", "constraints"),
    "base": ("--base", "base"),
    "preset": ("--preset", "preset"),
    "jobs": ("--jobs", "jobs"),
}
"""The name of each term on the command line, and in Python."""


@contextmanager
def on_command_line(**options: str) -> Iterator[None]:
    """Word messages for the command line within the block; ``options`` are this command's own names of terms."""
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def term(name: str, typed: bool | None = None) -> str:
    """The caller's name of a term; ``typed`` chooses the command line or Python regardless of the caller."""
    option, python = TERMS[name]
    return for_caller((_OPTIONS.get() or {}).get(name, option), python, typed=typed)


def for_caller(command_line: str, python: str, typed: bool | None = None) -> str:
    """The text for the caller, on the command line or in Python."""
    return command_line if ((_OPTIONS.get() is not None) if typed is None else typed) else python
