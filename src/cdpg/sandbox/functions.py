"""Functions that run elsewhere: by which name another process finds them, and what is known of them."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

OF_THE_TEXT = frozenset({"cpu", "memory", "recursion", "crashed"})
"""Failures that a marked function owes to the text alone: it fails so on every machine."""

_TRAITS = "__cdpg_check__"
_EXHAUSTION: contextvars.ContextVar[Counter[str] | None] = contextvars.ContextVar("exhaustion", default=None)


@dataclass(frozen=True)
class Traits:
    """What is promised of a function that :func:`text_check` marks."""

    text_at_fault: bool = False
    """It depends on its input alone and computes without waiting: what exhausts it does so on every machine."""
    prepare: Callable[[], Any] | None = None
    """Called once before any clock runs: loads what the function needs."""
    columns: tuple[str, ...] | None = None
    """The columns that it reads, where it takes any: the others need not be sent to it."""


def text_check(*, prepare: Callable[[], Any] | None = None, columns: tuple[str, ...] | None = None) -> Callable[[F], F]:
    """Mark a function whose failures are those of the text it is given; see :class:`Traits`."""

    def mark(function: F) -> F:
        setattr(function, _TRAITS, Traits(text_at_fault=True, prepare=prepare, columns=columns))
        return function

    return mark


def traits_of(function: Callable[..., Any]) -> Traits:
    """The traits of a function; a user's own may carry a plain attribute ``prepare``."""
    traits = getattr(function, _TRAITS, None)
    if isinstance(traits, Traits):
        return traits
    prepare = getattr(function, "prepare", None) if isinstance(function, types.FunctionType) else None
    return Traits(prepare=prepare if callable(prepare) else None)


def reference_of(function: Callable[..., Any]) -> str | None:
    """``module:name`` if another process can import the function by it; None for lambdas, objects and scripts."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


def resolve(reference: str) -> Callable[..., Any]:
    """The function that :func:`reference_of` named."""
    module, _, name = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{reference} is no function")
    function: Callable[..., Any] = found
    return function


def note_exhaustion(kind: str) -> None:
    """Tell whoever counts that a text exhausted its check, which gave a verdict all the same."""
    counter = _EXHAUSTION.get()
    if counter is not None:
        counter[kind] += 1


@contextlib.contextmanager
def exhaustion_counted() -> Iterator[Counter[str]]:
    """Within, counts what :func:`note_exhaustion` is told by this thread."""
    counter: Counter[str] = Counter()
    token = _EXHAUSTION.set(counter)
    try:
        yield counter
    finally:
        _EXHAUSTION.reset(token)
