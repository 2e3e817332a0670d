"""What things are called where the caller is: whoever types a command has options, a Python program has names.

A message that tells what to do is raised far from the caller and must not name what does not exist there. So it asks
here. The command line says once that it is the caller; everything else is Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_OPTIONS: ContextVar[Mapping[str, str] | None] = ContextVar("cdpg_options", default=None)
"""None in Python; on the command line, what the command calls otherwise than the others do."""

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
def on_command_line(**options: str) -> Iterator[None]:
    """Until its end, messages are for someone who types commands; ``options`` are terms by this command's own names."""
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def term(name: str, typed: bool | None = None) -> str:
    """What the caller knows a thing by; ``typed`` says who is meant where that is not the caller."""
    option, python = _TERMS[name]
    return for_caller((_OPTIONS.get() or {}).get(name, option), python, typed=typed)


def for_caller(command_line: str, python: str, typed: bool | None = None) -> str:
    """The part of a message that differs."""
    return command_line if ((_OPTIONS.get() is not None) if typed is None else typed) else python
