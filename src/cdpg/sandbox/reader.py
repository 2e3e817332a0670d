"""Calls of text functions in worker processes, where a hostile text can do no harm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cdpg.errors import RunError
from cdpg.sandbox.functions import TEXT_FAILURES, traits_of
from cdpg.sandbox.limits import Limits
from cdpg.sandbox.pool import CannotStart, Pool

TextFunction = Callable[[Sequence[str]], list[Any]]
"""Returns a plain value for each text, independent of the other texts; it must be importable by name."""


class Apply(Protocol):
    """A way to call text functions."""

    def __call__(self, function: TextFunction, texts: Sequence[str], exhausted: Any = None) -> list[Any]:
        """A result for each text: ``exhausted`` if the text exhausts a function marked by ``text_check``, None if the
        function failed for any other reason, which says nothing about the text."""


def directly(function: TextFunction, texts: Sequence[str], exhausted: Any = None) -> list[Any]:
    """Call the function in this process; its exceptions are raised."""
    return function(texts)


class Reader:
    """Calls functions in worker processes, which start with the first call; without workers, in this process."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._pool: Pool | None = None

    def __call__(
        self,
        function: TextFunction,
        texts: Sequence[str],
        exhausted: Any = None,
        failures: Counter[str] | None = None,
    ) -> list[Any]:
        """See :class:`Apply`; ``failures`` counts, by kind, the failures that are not the text's fault."""
        if not self.limits.workers or not texts:
            return directly(function, texts)
        if self._pool is None:
            self._pool = Pool([function], self.limits)
        try:
            found = self._pool.collect(self._pool.submit(function, list(texts)))
        except CannotStart as error:
            raise RunError(
                f"the metrics of the outputs cannot be computed in worker processes: {error}; "
                "check_workers: 0 computes them in this process"
            ) from error
        values, deterministic = list(found.values), traits_of(function).deterministic
        for index, failure in found.failures.items():
            if deterministic and failure.kind in TEXT_FAILURES:
                values[index] = exhausted
            elif failures is not None:
                failures[failure.kind] += 1
        return values

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
