"""Calls constraints, in worker processes if possible, and checks what they return."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cdpg.constraints.arguments import COMPLETIONS, IDS, accepted, accepted_arguments, keyword_lists, needed_columns
from cdpg.constraints.calling import Call, Callers, collect
from cdpg.constraints.factors import Factor, Moment, Reward, Tilt, as_number, function_name
from cdpg.constraints.named import load_constraint
from cdpg.constraints.prefixes import PrefixCheck, hopeless_of
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.messages.text import plain_text
from cdpg.sandbox.functions import TEXT_FAILURES, traits_of
from cdpg.sandbox.limits import Limits
from cdpg.sandbox.pool import Failure, Outcomes
from cdpg.sandbox.worker import short_repr

_log = logging.getLogger(__name__)

Constraint = Callable[..., Any]
"""``constraint(prompts, completions, **columns)`` returns a bool or a number in [0, 1] for each completion, or None
where it does not apply.

That is the signature of TRL's reward functions, ``async def`` or not: one with values in [0, 1] fits as it is.
"""

Constraints = Constraint | str | Factor | Sequence[Constraint | str | Factor]
"""One or several factors of the target: constraints, each a function or the name of one, ``module:function``; moments;
rewards."""

_EXPECTED = "a function of (prompts, completions, **columns), or its name as 'module:function', a Moment or a Reward"
_MOST_LINES = 20
"""Of what a constraint prints on the samples that are collected together."""
_LONGEST_LINE = 2000
_MISTAKEN = ("AttributeError", "TypeError")
_OF_CHATS = (
    "; the prompts are chats, so that a completion is a list of one message: its text is completion[0]['content']"
)
"""Hint for a function that treats chat completions as texts and so raises one of these."""


@dataclass(frozen=True)
class CheckFailure:
    """Why a sample has no verdict."""

    constraint: str
    kind: str
    detail: str
    what: str = "constraint"
    """Or ``moment``, or ``reward``."""

    def __str__(self) -> str:
        none = "verdict" if self.what == "constraint" else "number"
        verb = "raised " if self.kind in ("exception", "memory", "recursion") else f"gave no {none}: "
        return f"{self.what} {self.constraint} {verb}{self.detail}"


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on some samples."""

    b: list[float]
    """The verdict on each sample; 0 if there is none."""
    failures: dict[int, CheckFailure] = field(default_factory=dict)
    """Samples without a verdict because a check failed, by index."""
    inapplicable: frozenset[int] = frozenset()
    """Indices of samples without a verdict because no constraint applies to them."""
    exhausted: Counter[str] = field(default_factory=Counter)
    """Verdicts of 0 because the text exhausted a built-in check, by kind."""
    features: list[tuple[float, ...]] = field(default_factory=list)
    """``[sample][factor]``: the values of the moments and rewards, NaN where there is none; empty without factors."""


@dataclass(frozen=True)
class Pending:
    """Samples that are being judged, with a call for each constraint, moment and reward."""

    count: int
    chats: bool
    """Whether any prompt is a chat."""
    calls: list[Call]


class Judge:
    """b(x,c): the product of the values of all constraints that apply; one that returns None does not apply.

    Without ``limits``, or with 0 workers, constraints are called in this process. With workers, functions that can be
    imported by name, and those of a script, are called in other processes. Closures and objects may hold anything and
    are called in this process, which is logged. The verdicts are the same either way.

    Moments and rewards are called in the same way, and give a number for each sample instead of a verdict.
    """

    def __init__(self, constraints: Constraints, limits: Limits | None = None, prunes: bool = False) -> None:
        """With ``prunes``, the functions ``hopeless`` of the constraints are made ready, too."""
        self.constraints, factors = _functions(constraints)
        self.tilt = Tilt(factors)
        self._kinds = [*("constraint" for _ in self.constraints), *(factor.kind for factor in self.tilt.factors)]
        named = [(f"{kind} {name_of(f)}", f) for kind, f in zip(self._kinds, self._functions, strict=True)]
        self._named = named
        self._accepted = [accepted_arguments(function, label, COMPLETIONS) for label, function in named]
        self._invalid_notified: set[int] = set()
        judging = named[: len(self.constraints)]
        found = [(f"hopeless of {label}", hopeless_of(c, name_of(c))) for label, c in judging] if prunes else []
        self._hopeless = [(label, function) for label, function in found if function is not None]
        self._callers = Callers([*named, *self._hopeless], limits)
        self.prefix_checks = [
            PrefixCheck(label, function, self._callers, place)
            for place, (label, function) in enumerate(self._hopeless, start=len(named))
        ]

    @property
    def _functions(self) -> list[Constraint]:
        """The constraints, then those of the moments and rewards."""
        return [*self.constraints, *self.tilt.functions]

    def require_columns(self, contexts: Sequence[Context]) -> None:
        """Refuse contexts that lack a column that a constraint requires, before anything is sampled."""
        columns = dict.fromkeys(key for context in contexts for key in context.columns)
        for label, function in [*self._named, *self._hopeless] if contexts else ():
            for needed in needed_columns(function):
                if needed not in columns:
                    there = f"they have {', '.join(map(repr, columns))}" if columns else "they have the prompt alone"
                    raise UserError(
                        f"{label} takes {needed!r}, which has no default, and the contexts "
                        f"have no column {needed!r}; {there}: add the column, or give the parameter a default"
                    )

    def submit(self, contexts: Sequence[Context], texts: Sequence[str], token_ids: Sequence[Sequence[int]]) -> Pending:
        """Start judging completions, ``contexts[i]`` being the context of ``texts[i]``; the caller need not wait."""
        if not texts:
            return Pending(0, False, [])
        arguments = keyword_lists(contexts, COMPLETIONS, texts)
        arguments[IDS] = [list(ids) for ids in token_ids]
        calls = [
            self._callers.submit(place, function, accepted(arguments, keys))
            for place, (function, keys) in enumerate(zip(self._functions, self._accepted, strict=True))
        ]
        return Pending(len(texts), not all(isinstance(context.prompt, str) for context in contexts), calls)

    def collect(self, pending: Pending) -> Verdicts:
        """Wait for verdicts on what was submitted."""
        return self.collect_all([pending])[0]

    def collect_all(self, submitted: Sequence[Pending]) -> list[Verdicts]:
        """Wait for verdicts on each of several; what constraints printed on all of them together is logged."""
        printed: dict[str, list[str]] = {name_of(function): [] for function in self._functions}
        verdicts = [self._verdicts(pending, printed) for pending in submitted]
        for name, lines in printed.items():
            _log_printed(name, lines)
        return verdicts

    def _verdicts(self, pending: Pending, printed: Mapping[str, list[str]]) -> Verdicts:
        """Wait for verdicts; what was printed is added to ``printed``, by constraint.

        A sample has no verdict if a function failed on it, unless a constraint gave it 0. Nor has it a verdict if no
        constraint applies to it: all returned None, and there is no moment and no reward. Otherwise the values of those
        that apply are multiplied.
        """
        b, failures, exhausted = [1.0] * pending.count, dict[int, CheckFailure](), Counter[str]()
        inapplicable = set(range(pending.count))
        features: list[list[float]] = []
        for place, call in enumerate(pending.calls):
            function, what = self._functions[place], self._kinds[place]
            name, deterministic = name_of(function), traits_of(function).deterministic
            found = collect(call)
            exhausted += found.exhausted
            printed[name] += found.printed.splitlines()
            self._log_invalid(place, found)
            judges = what == "constraint"
            numbers = [math.nan] * pending.count
            for sample, value in enumerate(found.values):
                if judges and value is None and sample not in found.failures:
                    continue
                inapplicable.discard(sample)
                reading = as_verdict if judges else _as_feature
                verdict = reading(value) if sample not in found.failures else found.failures[sample]
                if isinstance(verdict, float):
                    b[sample] *= verdict if judges else 1.0
                    numbers[sample] = verdict
                elif judges and deterministic and verdict.kind in TEXT_FAILURES:
                    b[sample] = 0.0
                    exhausted[verdict.kind] += 1
                else:
                    hint = _OF_CHATS if pending.chats and verdict.detail.startswith(_MISTAKEN) else ""
                    failures.setdefault(sample, CheckFailure(name, verdict.kind, verdict.detail + hint, what))
            if not judges:
                features.append(numbers)
        failures = {sample: failures[sample] for sample in sorted(failures) if b[sample] > 0}
        without = failures.keys() | inapplicable
        judged = [0.0 if place in without else value for place, value in enumerate(b)]
        by_sample = list(zip(*features, strict=True))
        return Verdicts(judged, failures, frozenset(inapplicable), exhausted, by_sample)

    def close(self) -> None:
        """End the worker processes; ``submit`` starts new ones."""
        self._callers.close()

    def _log_invalid(self, place: int, found: Outcomes) -> None:
        """Say, once, that a constraint judges single samples only; if it judges none, the failures say so."""
        if not found.invalid or len(found.failures) == len(found.values) or place in self._invalid_notified:
            return
        self._invalid_notified.add(place)
        _log.warning(
            f"{self._named[place][0]} does not judge several completions at once: "
            f"{found.invalid}; it is called for each sample by itself instead, which is slow: return a list with a "
            "value for each completion"
        )


def _log_printed(name: str, lines: Sequence[str]) -> None:
    """Log what a constraint printed, a notice a line, up to a limit; the text is untrusted."""
    shown = [plain_text(line, limit=_LONGEST_LINE) for line in lines if line.strip()]
    for line in shown[:_MOST_LINES]:
        _log.info(f"{name} printed: {line}")
    if len(shown) > _MOST_LINES:
        _log.info(f"{name} printed: … (what follows is not shown)")


def _functions(constraints: Constraints) -> tuple[list[Constraint], list[Factor]]:
    """The given constraints as functions, names being imported; and the moments and rewards."""
    given: list[Any] = [constraints]
    if not callable(constraints) and not isinstance(constraints, (str, Moment, Reward)):
        given = list(constraints) if isinstance(constraints, (list, tuple)) else []
    if not given:
        what = (
            "no constraint was given" if constraints in (None, [], ()) else f"constraints is {short_repr(constraints)}"
        )
        raise UserError(f"{what}: pass {_EXPECTED}, or a list of them")
    factors = [factor for factor in given if isinstance(factor, (Moment, Reward))]
    found = [
        load_constraint(constraint) if isinstance(constraint, str) else constraint
        for constraint in given
        if not isinstance(constraint, (Moment, Reward))
    ]
    for constraint in found:
        if not callable(constraint):
            raise UserError(f"a constraint is {short_repr(constraint)}: pass {_EXPECTED}")
    return found, factors


def as_verdict(value: Any) -> float | Failure:
    """A constraint's value for a sample as a number in [0, 1], or a failure."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if 0.0 <= number <= 1.0:
        return number
    return Failure("value", f"it returned {short_repr(value)}, and true, false, a number in [0, 1] or None is expected")


def _as_feature(value: Any) -> float | Failure:
    """The value of a moment or a reward for a sample as a number, or a failure."""
    number = as_number(value)
    if number is not None:
        return number
    return Failure("value", f"it returned {short_repr(value)}, and a finite number is expected")


def name_of(constraint: Constraint) -> str:
    """The name of a constraint in messages."""
    return function_name(constraint)
