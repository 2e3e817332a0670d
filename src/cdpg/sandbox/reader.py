"""Functions of single texts, called where a hostile text can do no harm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cdpg.errors import RunError
from cdpg.sandbox.functions import OF_THE_TEXT, traits_of
from cdpg.sandbox.limits import Limits
from cdpg.sandbox.pool import CannotStart, Pool

TextFunction = Callable[[Sequence[str]], list[Any]]
"""A result for each text, whatever its neighbours; defined in a module, its results plain values."""


class Apply(Protocol):
    """How functions of texts are called."""

    def __call__(self, function: TextFunction, texts: Sequence[str], exhausted: Any = None) -> list[Any]:
        """A result for each text: ``exhausted`` where the text exhausts a function that is marked as a text check,
        None where the function failed for any other reason, which says nothing of the text."""


def directly(function: TextFunction, texts: Sequence[str], exhausted: Any = None) -> list[Any]:
    """Call it here and now; what it raises is raised."""
    return function(texts)


class Reader:
    """Calls functions in worker processes, which start with the first call; without workers, here."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pool: Pool | None = None

    def __call__(
        self,
        function: TextFunction,
        texts: Sequence[str],
        exhausted: Any = None,
        failures: Counter[str] | None = None,
    ) -> list[Any]:
        """As :class:`Apply` has it; ``failures`` counts, by kind, those that are not the text's."""
        if not self._limits.workers or not texts:
            return directly(function, texts)
        if self._pool is None:
            self._pool = Pool([function], self._limits)
        try:
            found = self._pool.collect(self._pool.submit(function, list(texts)))
        except CannotStart as error:
            raise RunError(
                f"what measures the outputs cannot be run in a process of its own: {error}; "
                "check_workers: 0 runs it in this one"
            ) from error
        values, at_fault = list(found.values), traits_of(function).text_at_fault
        for place, failure in found.failures.items():
            if at_fault and failure.kind in OF_THE_TEXT:
                values[place] = exhausted
            elif failures is not None:
                failures[failure.kind] += 1
        return values

    def close(self) -> None:
        """End the processes; the next call starts them anew."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
