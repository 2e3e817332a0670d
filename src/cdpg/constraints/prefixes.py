"""Asks constraints about the beginning of a sample: whether b = 0 whatever follows it.

A constraint may carry a function ``hopeless(prompts, prefixes, **columns)``. True for a prefix means that no completion
that begins with it satisfies the constraint. It is called like the constraint, in the same worker processes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from cdpg.constraints.arguments import PREFIXES, accepted, accepted_arguments, keyword_lists
from cdpg.constraints.calling import Call, Callers, Function, collect
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.sandbox.functions import TEXT_FAILURES, traits_of
from cdpg.sandbox.pool import Failure, Outcomes
from cdpg.sandbox.worker import short_repr

_log = logging.getLogger(__name__)


def hopeless_of(constraint: Function, name: str) -> Function | None:
    """The function ``hopeless`` of a constraint, if it has one."""
    found: Any = traits_of(constraint).hopeless
    if found is None or callable(found):
        return found  # type: ignore[no-any-return]
    raise UserError(
        f"hopeless of constraint {name} is {short_repr(found)}: expected a function of (prompts, prefixes, **columns)"
    )


class PrefixCheck:
    """The function ``hopeless`` of one constraint. A prefix on which it fails is not hopeless."""

    def __init__(self, label: str, function: Function, callers: Callers, place: int) -> None:
        """``label`` names it in messages; ``place`` is its place among the ``callers``."""
        self.label = label
        self.watch = _characters(traits_of(function).watch, label)
        """It is called after one of these characters; None: after every few tokens."""
        self._function, self._callers, self._place = function, callers, place
        self._accepted = accepted_arguments(function, label, PREFIXES)
        self._deterministic = traits_of(function).deterministic
        self._notified = self._too_slow = False

    def submit(self, contexts: Sequence[Context], prefixes: Sequence[str]) -> Call:
        """Start to look at prefixes, ``contexts[i]`` being the context of ``prefixes[i]``; the caller need not wait."""
        if self._too_slow:
            return Outcomes([False] * len(prefixes), {}, Counter())
        arguments = accepted(keyword_lists(contexts, PREFIXES, prefixes), self._accepted)
        return self._callers.submit(self._place, self._function, arguments, urgent=True)

    def collect(self, call: Call) -> list[bool]:
        """Wait for the answers: whether each prefix is hopeless."""
        found = collect(call)
        answers = []
        for place, value in enumerate(found.values):
            failure = found.failures.get(place) or _wrong(value)
            if failure is not None:
                self._note(failure)
            answers.append(failure is None and bool(value))
        return answers

    def _note(self, failure: Failure) -> None:
        """Log the first failure; what ran out of time once is not called again, since sampling waits for it."""
        if self._deterministic and failure.kind in TEXT_FAILURES:
            return
        slow = failure.kind == "timeout" and not self._too_slow
        if slow or not self._notified:
            then = "it is not called again in this run" if slow else "a sample on which it fails is drawn to its end"
            _log.warning(f"{self.label} failed: {failure.detail}; {then}")
        self._notified, self._too_slow = True, self._too_slow or slow


def _wrong(value: Any) -> Failure | None:
    """What is wrong with an answer, if anything is."""
    if value is None or (isinstance(value, (bool, int, float)) and value in (0, 1)):
        return None
    return Failure("value", f"it returned {short_repr(value)}, and true or false is expected")


def _characters(watch: Any, label: str) -> frozenset[str] | None:
    if watch is None:
        return None
    if isinstance(watch, Collection) and watch and all(isinstance(one, str) and len(one) == 1 for one in watch):
        return frozenset(watch)
    raise UserError(
        f"watch of {label} is {short_repr(watch)}: expected a text with the characters after which to call it"
    )
