"""Functions that run in other processes: the names they are imported by, and their traits."""

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

TEXT_FAILURES = frozenset({"cpu", "memory", "recursion", "crashed"})
"""Failures of a text check that the text alone causes: it fails the same way on every machine."""

_TRAITS = "__cdpg_check__"
_EXHAUSTION: contextvars.ContextVar[Counter[str] | None] = contextvars.ContextVar("exhaustion", default=None)


@dataclass(frozen=True)
class Traits:
    """What the sandbox may assume about a function; :func:`text_check` sets it."""

    deterministic: bool = False
    """It depends on its input alone and never waits: a text that exhausts it does so on every machine."""
    prepare: Callable[[], Any] | None = None
    """Called once, before any time limit applies: loads what the function needs."""
    columns: tuple[str, ...] | None = None
    """The columns that it reads, if it accepts any; the others are not sent to it."""
    hopeless: Any = None
    """Of a constraint: the function that says of a prefix that nothing can follow it and satisfy the constraint."""
    watch: Any = None
    """Of such a function: the characters after which it may find something new."""


def text_check(
    *,
    prepare: Callable[[], Any] | None = None,
    columns: tuple[str, ...] | None = None,
    hopeless: Callable[..., Any] | None = None,
    watch: str | None = None,
) -> Callable[[F], F]:
    """Mark a deterministic check of a text, whose failures are the text's fault; see :class:`Traits`."""

    def mark(function: F) -> F:
        setattr(function, _TRAITS, Traits(True, prepare, columns, hopeless, watch))
        return function

    return mark


def traits_of(function: Callable[..., Any]) -> Traits:
    """The traits of a function; a user's own may carry plain attributes: ``prepare``, ``hopeless``, ``watch``."""
    traits = getattr(function, _TRAITS, None)
    if isinstance(traits, Traits):
        return traits
    prepare = getattr(function, "prepare", None) if isinstance(function, types.FunctionType) else None
    hopeless, watch = (getattr(function, name, None) for name in ("hopeless", "watch"))
    return Traits(prepare=prepare if callable(prepare) else None, hopeless=hopeless, watch=watch)


def prepare_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call the function's ``prepare``, if it has one, and return the function."""
    prepare = traits_of(function).prepare
    if prepare is not None:
        prepare()
    return function


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
    """Import the function that a reference of :func:`reference_of` names."""
    module, _, name = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{reference} is not a function")
    function: Callable[..., Any] = found
    return function


def note_exhaustion(kind: str) -> None:
    """Count a text that exhausted its check; the check still returns a verdict."""
    counter = _EXHAUSTION.get()
    if counter is not None:
        counter[kind] += 1


@contextlib.contextmanager
def count_exhaustion() -> Iterator[Counter[str]]:
    """Count the calls of :func:`note_exhaustion` within the block, in this thread."""
    counter: Counter[str] = Counter()
    token = _EXHAUSTION.set(counter)
    try:
        yield counter
    finally:
        _EXHAUSTION.reset(token)
