"""What things are called where the caller is: whoever types a command has options, a Python program has names.

A message that tells what to do is raised far from the caller and must not name what does not exist there. So it asks
here. The command line says once that it is the caller; everything else is Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ON_COMMAND_LINE: ContextVar[bool] = ContextVar("cdpg_on_command_line", default=False)

_TERMS = {
    "resume": ("--resume", "train(resume_from_checkpoint=True)"),
    "overwrite": ("--overwrite", "overwrite_output_dir=True"),
    "output_dir": ("--output-dir", "output_dir"),
    "model": ("--model", "model"),
    "method": ("--method", "method"),
    "contexts": ("--contexts", "train_dataset"),
    "eval_contexts": ("--eval-contexts", "eval_dataset"),
    "constraint": ("--constraint", "constraints"),
    "base": ("--base", "base"),
    "preset": ("--preset", "preset"),
    "jobs": ("--jobs", "jobs"),
}
"""What a thing is called on the command line, and in Python."""


@contextmanager
def on_command_line() -> Iterator[None]:
    """Until its end, messages are for someone who types commands."""
    token = _ON_COMMAND_LINE.set(True)
    try:
        yield
    finally:
        _ON_COMMAND_LINE.reset(token)


def term(name: str, typed: bool | None = None) -> str:
    """What the caller knows a thing by; ``typed`` says who is meant where that is not the caller."""
    return for_caller(*_TERMS[name], typed=typed)


def for_caller(command_line: str, python: str, typed: bool | None = None) -> str:
    """The part of a message that differs."""
    return command_line if (_ON_COMMAND_LINE.get() if typed is None else typed) else python
