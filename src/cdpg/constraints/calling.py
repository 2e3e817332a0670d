"""Calls functions on samples: in worker processes if possible, otherwise in this process."""

from __future__ import annotations

import logging
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cdpg.errors import UserError
from cdpg.sandbox.coroutines import EventLoop
from cdpg.sandbox.functions import count_exhaustion, reference_of
from cdpg.sandbox.limits import Limits
from cdpg.sandbox.pool import CannotStart, Failure, Outcomes, Pool
from cdpg.sandbox.protocol import is_plain
from cdpg.sandbox.worker import describe_exception, exception_text, plain_values

_log = logging.getLogger(__name__)

Function = Callable[..., Any]
"""A function of keyword lists, which returns a value for each sample."""
Call = tuple[Pool, int] | Outcomes
"""A call under way, as its pool and the batch's number; or the outcomes of one that was made in this process."""

_HEAVY = ("torch", "transformers")
_TEXTS = ("completions", "completion_ids", "prefixes")
"""Arguments that are made here; all others are the user's and may hold anything."""


class Callers:
    """Calls some functions, each known by its place in the list.

    With workers, functions that can be imported by name, and those of a script, are called in other processes.
    Closures and objects may hold anything and are called in this process, which is logged.
    """

    def __init__(self, functions: Sequence[tuple[str, Function]], limits: Limits | None) -> None:
        """``functions`` come with the words that messages name them by."""
        self._named = list(functions)
        self._loop = EventLoop()
        self._pools = self._open(limits) if limits is not None and limits.workers else [None] * len(self._named)

    def submit(
        self, place: int, function: Function, arguments: Mapping[str, Sequence[Any]], urgent: bool = False
    ) -> Call:
        """Call the function of a place, or another where that one is called; the caller need not wait.

        An urgent call is made before others that wait for a worker.
        """
        pool = self._ready_pool(place, arguments)
        if pool is None:
            return _call(function, arguments, self._loop)
        return pool, pool.submit(function, arguments, urgent)

    def close(self) -> None:
        """End the worker processes; ``submit`` starts new ones."""
        self._loop.close()
        for pool in self._pools:
            if pool is not None:
                pool.close()

    def _open(self, limits: Limits) -> list[Pool | None]:
        """A pool, or None, for each function. Forking comes first, while this process has few threads."""
        functions = [function for _, function in self._named]
        kinds = [
            "forked" if _can_fork(function) else "named" if reference_of(function) else "here" for function in functions
        ]
        pools = {
            kind: Pool([f for f, own in zip(functions, kinds, strict=True) if own == kind], limits, fork=fork)
            for kind, fork in (("forked", True), ("named", False))
            if kind in kinds
        }
        places = [pools.get(kind) for kind in kinds]
        for (label, _), pool in zip(self._named, places, strict=True):
            if pool is None:
                _log_in_process(label, "it cannot be imported by name")
        return places

    def _ready_pool(self, place: int, arguments: Mapping[str, Sequence[Any]]) -> Pool | None:
        """The pool of a function; None, from then on, if the function or its columns cannot be sent to it."""
        pool, label = self._pools[place], self._named[place][0]
        if pool is None:
            return None
        foreign = {key: values for key, values in arguments.items() if key not in _TEXTS}
        odd = next((key for key, values in foreign.items() if not all(map(is_plain, _distinct(values)))), None)
        if odd is not None:
            _log_in_process(label, f"the column {odd!r} holds more than texts and numbers")
            self._pools[place] = None
            return None
        try:
            pool.wait_until_ready()
        except CannotStart as error:
            _log_in_process(label, f"a new process cannot import it: {error}")
            self._pools[place] = None
        return self._pools[place]


def collect(call: Call) -> Outcomes:
    """Wait for the outcomes of a call."""
    return call if isinstance(call, Outcomes) else call[0].collect(call[1])


def forget(call: Call) -> None:
    """Drop a call: its outcomes are not needed."""
    if not isinstance(call, Outcomes):
        call[0].forget(call[1])


def _log_in_process(label: str, why: str) -> None:
    _log.warning(
        f"{label} is called in the training process, because {why}: there a call that hangs is not ended, and memory "
        "is not limited"
    )


def _can_fork(function: Function) -> bool:
    """Whether to fork for a function: a script's own, or one whose module imports a heavy library.

    A closure is not forked: it may hold a model with threads or a device.
    """
    if sys.platform != "linux" or not isinstance(function, types.FunctionType) or function.__closure__ is not None:
        return False
    return reference_of(function) is None or any(map(_is_heavy, function.__globals__.values()))


def _is_heavy(value: Any) -> bool:
    """Whether a module's global comes from a library that takes seconds to import, or from a module that uses one."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if not isinstance(module, str):
        return False
    used = vars(sys.modules[module]) if module in sys.modules else {}
    return module.partition(".")[0] in _HEAVY or any(name in used for name in _HEAVY)


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Each object once: all samples of a context share its columns."""
    return list({id(value): value for value in values}.values())


def _call(function: Function, arguments: Mapping[str, Sequence[Any]], loop: EventLoop) -> Outcomes:
    """Call a function in this process; if it raises or returns an invalid result, once more for each sample."""
    count, invalid = len(next(iter(arguments.values()))), ""
    with count_exhaustion() as exhausted:
        try:
            found = plain_values(loop.result_of(function(**arguments)), count)
            if not isinstance(found, str):
                return Outcomes(found, {}, exhausted)
            failure, invalid = Failure("value", found), found
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raised = describe_exception(error)
            failure = Failure(raised["kind"], exception_text(raised))
    if count > 1:
        singly = [{key: [values[i]] for key, values in arguments.items()} for i in range(count)]
        pieces = [_call(function, one, loop) for one in singly]
        return Outcomes(
            [piece.values[0] for piece in pieces],
            {place: piece.failures[0] for place, piece in enumerate(pieces) if piece.failures},
            sum((piece.exhausted for piece in pieces), Counter()),
            invalid=invalid,
        )
    return Outcomes([None], {0: failure}, exhausted)
