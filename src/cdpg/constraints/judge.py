"""Calls constraints, in worker processes if possible, and checks what they return."""

from __future__ import annotations

import inspect
import logging
import math
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cdpg.constraints.named import load_constraint
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.messages.text import plain_text
from cdpg.sandbox.coroutines import EventLoop
from cdpg.sandbox.functions import TEXT_FAILURES, count_exhaustion, reference_of, traits_of
from cdpg.sandbox.limits import Limits
from cdpg.sandbox.pool import CannotStart, Failure, Outcomes, Pool
from cdpg.sandbox.protocol import is_plain
from cdpg.sandbox.worker import describe_exception, exception_text, plain_values, short_repr

_log = logging.getLogger(__name__)

Constraint = Callable[..., Any]
"""``constraint(prompts, completions, **columns)`` returns a bool or a number in [0, 1] for each completion, or None
where it does not apply.

That is the signature of TRL's reward functions, ``async def`` or not: one with values in [0, 1] fits as it is.
"""

Constraints = Constraint | str | Sequence[Constraint | str]
"""One or several constraints, each a function or the name of one, ``module:function``."""

_HEAVY = ("torch", "transformers")
_EXPECTED = "a function of (prompts, completions, **columns), or its name as 'module:function'"
_MOST_LINES = 20
"""Of what a constraint prints on the samples that are collected together."""
_LONGEST_LINE = 2000
_MISTAKEN = ("AttributeError", "TypeError")
_OF_CHATS = (
    "; the prompts are chats, so that a completion is a list of one message: its text is completion[0]['content']"
)
"""Hint for a function that treats chat completions as texts and so raises one of these."""
_OURS = ("completions", "completion_ids")


@dataclass(frozen=True)
class CheckFailure:
    """Why a sample has no verdict."""

    constraint: str
    kind: str
    detail: str

    def __str__(self) -> str:
        verb = "raised " if self.kind in ("exception", "memory", "recursion") else "gave no verdict: "
        return f"constraint {self.constraint} {verb}{self.detail}"


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


@dataclass(frozen=True)
class Pending:
    """Samples that are being judged: for each constraint its pool and the batch's number, or the outcomes."""

    count: int
    chats: bool
    """Whether any prompt is a chat."""
    outcomes: list[tuple[Pool, int] | Outcomes]


class Judge:
    """b(x,c): the product of the values of all constraints that apply; one that returns None does not apply.

    Without ``limits``, or with 0 workers, constraints are called in this process. With workers, functions that can be
    imported by name, and those of a script, are called in other processes. Closures and objects may hold anything and
    are called in this process, which is logged. The verdicts are the same either way.
    """

    def __init__(self, constraints: Constraints, limits: Limits | None = None) -> None:
        self.constraints = _functions(constraints)
        self._accepted = [_accepted_arguments(constraint) for constraint in self.constraints]
        self._invalid_notified: set[int] = set()
        self._loop = EventLoop()
        self._pools = self._open(limits) if limits is not None and limits.workers else [None] * len(self.constraints)

    def require_columns(self, contexts: Sequence[Context]) -> None:
        """Refuse contexts that lack a column that a constraint requires, before anything is sampled."""
        columns = dict.fromkeys(key for context in contexts for key in context.columns)
        for constraint in self.constraints:
            for needed in _needed_columns(constraint) if contexts else ():
                if needed not in columns:
                    there = f"they have {', '.join(map(repr, columns))}" if columns else "they have the prompt alone"
                    raise UserError(
                        f"constraint {name_of(constraint)} takes {needed!r}, which has no default, and the contexts "
                        f"have no column {needed!r}; {there}: add the column, or give the parameter a default"
                    )

    def submit(self, contexts: Sequence[Context], texts: Sequence[str], token_ids: Sequence[Sequence[int]]) -> Pending:
        """Start judging completions, ``contexts[i]`` being the context of ``texts[i]``; the caller need not wait."""
        if not texts:
            return Pending(0, False, [])
        arguments = _arguments(contexts, texts, token_ids)
        outcomes: list[tuple[Pool, int] | Outcomes] = []
        for place, (constraint, accepted) in enumerate(zip(self.constraints, self._accepted, strict=True)):
            wanted = arguments if accepted is None else {key: arguments[key] for key in accepted if key in arguments}
            pool = self._ready_pool(place, wanted)
            outcomes.append(
                _call(constraint, wanted, self._loop) if pool is None else (pool, pool.submit(constraint, wanted))
            )
        return Pending(len(texts), not all(isinstance(context.prompt, str) for context in contexts), outcomes)

    def collect(self, pending: Pending) -> Verdicts:
        """Wait for verdicts on what was submitted."""
        return self.collect_all([pending])[0]

    def collect_all(self, submitted: Sequence[Pending]) -> list[Verdicts]:
        """Wait for verdicts on each of several; what constraints printed on all of them together is logged."""
        printed: dict[str, list[str]] = {name_of(constraint): [] for constraint in self.constraints}
        verdicts = [self._verdicts(pending, printed) for pending in submitted]
        for name, lines in printed.items():
            _log_printed(name, lines)
        return verdicts

    def _verdicts(self, pending: Pending, printed: Mapping[str, list[str]]) -> Verdicts:
        """Wait for verdicts; what was printed is added to ``printed``, by constraint.

        A sample has no verdict if a constraint failed on it, unless another one gave it 0. Nor has it a verdict if no
        constraint applies to it: all returned None. Otherwise the values of those that apply are multiplied.
        """
        b, failures, exhausted = [1.0] * pending.count, dict[int, CheckFailure](), Counter[str]()
        inapplicable = set(range(pending.count))
        for place, outcome in enumerate(pending.outcomes):
            name, deterministic = name_of(self.constraints[place]), traits_of(self.constraints[place]).deterministic
            found = outcome if isinstance(outcome, Outcomes) else outcome[0].collect(outcome[1])
            exhausted += found.exhausted
            printed[name] += found.printed.splitlines()
            self._log_invalid(place, found)
            for sample, value in enumerate(found.values):
                if value is None and sample not in found.failures:
                    continue
                inapplicable.discard(sample)
                verdict = as_verdict(value) if sample not in found.failures else found.failures[sample]
                if isinstance(verdict, float):
                    b[sample] *= verdict
                elif deterministic and verdict.kind in TEXT_FAILURES:
                    b[sample] = 0.0
                    exhausted[verdict.kind] += 1
                else:
                    hint = _OF_CHATS if pending.chats and verdict.detail.startswith(_MISTAKEN) else ""
                    failures.setdefault(sample, CheckFailure(name, verdict.kind, verdict.detail + hint))
        failures = {sample: failures[sample] for sample in sorted(failures) if b[sample] > 0}
        without = failures.keys() | inapplicable
        judged = [0.0 if place in without else value for place, value in enumerate(b)]
        return Verdicts(judged, failures, frozenset(inapplicable), exhausted)

    def close(self) -> None:
        """End the worker processes; ``submit`` starts new ones."""
        self._loop.close()
        for pool in self._pools:
            if pool is not None:
                pool.close()

    def _open(self, limits: Limits) -> list[Pool | None]:
        """A pool, or None, for each constraint. Forking comes first, while this process has few threads."""
        kinds = [
            "forked" if _can_fork(constraint) else "named" if reference_of(constraint) else "here"
            for constraint in self.constraints
        ]
        pools = {
            kind: Pool([c for c, own in zip(self.constraints, kinds, strict=True) if own == kind], limits, fork=fork)
            for kind, fork in (("forked", True), ("named", False))
            if kind in kinds
        }
        places = [pools.get(kind) for kind in kinds]
        for constraint, pool in zip(self.constraints, places, strict=True):
            if pool is None:
                _log_in_process(constraint, "it cannot be imported by name")
        return places

    def _ready_pool(self, place: int, arguments: Mapping[str, Sequence[Any]]) -> Pool | None:
        """The pool of a constraint; None, from then on, if the constraint or its columns cannot be sent to it."""
        pool = self._pools[place]
        if pool is None:
            return None
        foreign = {key: values for key, values in arguments.items() if key not in _OURS}
        odd = next((key for key, values in foreign.items() if not all(map(is_plain, _distinct(values)))), None)
        if odd is not None:
            _log_in_process(self.constraints[place], f"the column {odd!r} holds more than texts and numbers")
            self._pools[place] = None
            return None
        try:
            pool.wait_until_ready()
        except CannotStart as error:
            _log_in_process(self.constraints[place], f"a new process cannot import it: {error}")
            self._pools[place] = None
        return self._pools[place]

    def _log_invalid(self, place: int, found: Outcomes) -> None:
        """Say, once, that a constraint judges single samples only; if it judges none, the failures say so."""
        if not found.invalid or len(found.failures) == len(found.values) or place in self._invalid_notified:
            return
        self._invalid_notified.add(place)
        _log.warning(
            f"constraint {name_of(self.constraints[place])} does not judge several completions at once: "
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


def _log_in_process(constraint: Constraint, why: str) -> None:
    _log.warning(
        f"constraint {name_of(constraint)} is called in the training process, because {why}: "
        "there nothing ends a call that hangs, and no limit on memory holds"
    )


def _functions(constraints: Constraints) -> list[Constraint]:
    """The given functions; names are imported."""
    given: list[Any] = [constraints]
    if not callable(constraints) and not isinstance(constraints, str):
        given = list(constraints) if isinstance(constraints, (list, tuple)) else []
    if not given:
        what = (
            "no constraint was given" if constraints in (None, [], ()) else f"constraints is {short_repr(constraints)}"
        )
        raise UserError(f"{what}: pass {_EXPECTED}, or a list of them")
    found = [load_constraint(constraint) if isinstance(constraint, str) else constraint for constraint in given]
    for constraint in found:
        if not callable(constraint):
            raise UserError(f"a constraint is {short_repr(constraint)}: pass {_EXPECTED}")
    return found


def _can_fork(constraint: Constraint) -> bool:
    """Whether to fork for a constraint: a script's own function, or one whose module imports a heavy library.

    A closure is not forked: it may hold a model with threads or a device.
    """
    if sys.platform != "linux" or not isinstance(constraint, types.FunctionType) or constraint.__closure__ is not None:
        return False
    return reference_of(constraint) is None or any(map(_is_heavy, constraint.__globals__.values()))


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


def _call(constraint: Constraint, arguments: Mapping[str, Sequence[Any]], loop: EventLoop) -> Outcomes:
    """Call a constraint in this process; if it raises or returns an invalid result, once more for each sample."""
    count, invalid = len(arguments["completions"]), ""
    with count_exhaustion() as exhausted:
        try:
            found = plain_values(loop.result_of(constraint(**arguments)), count)
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
        pieces = [_call(constraint, one, loop) for one in singly]
        return Outcomes(
            [piece.values[0] for piece in pieces],
            {place: piece.failures[0] for place, piece in enumerate(pieces) if piece.failures},
            sum((piece.exhausted for piece in pieces), Counter()),
            invalid=invalid,
        )
    return Outcomes([None], {0: failure}, exhausted)


def as_verdict(value: Any) -> float | Failure:
    """A constraint's value for a sample as a number in [0, 1], or a failure."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if 0.0 <= number <= 1.0:
        return number
    return Failure("value", f"it returned {short_repr(value)}, and true, false, a number in [0, 1] or None is expected")


def name_of(constraint: Constraint) -> str:
    """The name of a constraint in messages."""
    name = getattr(constraint, "__qualname__", type(constraint).__qualname__)
    return f"{getattr(constraint, '__module__', '')}:{name}".removeprefix("__main__:")


def _arguments(
    contexts: Sequence[Context], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    """Keyword lists as TRL passes them; a chat prompt is answered by a list of one message."""
    columns = dict.fromkeys(key for context in contexts for key in context.columns)
    arguments: dict[str, list[Any]] = {key: [context.columns.get(key) for context in contexts] for key in columns}
    chats = [not isinstance(context.prompt, str) for context in contexts]
    arguments["prompts"] = [
        [dict(message) for message in context.prompt] if chat else context.prompt  # type: ignore[arg-type]
        for context, chat in zip(contexts, chats, strict=True)
    ]
    arguments["completions"] = [
        [{"role": "assistant", "content": text}] if chat else text for text, chat in zip(texts, chats, strict=True)
    ]
    arguments["completion_ids"] = [list(ids) for ids in token_ids]
    return arguments


def _needed_columns(constraint: Constraint) -> list[str]:
    """Parameters without a default, except those that every constraint gets."""
    try:
        parameters = inspect.signature(constraint).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [parameter for parameter in parameters if parameter.kind in named and parameter.default is parameter.empty]
    return [parameter.name for parameter in needed if parameter.name not in ("prompts", *_OURS)]


def _accepted_arguments(constraint: Constraint) -> list[str] | None:
    """The keywords that a constraint accepts; None if it accepts any."""
    columns = traits_of(constraint).columns
    if columns is not None:
        return ["prompts", "completions", *columns]
    try:
        parameters = inspect.signature(constraint).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    for needed in ("prompts", "completions"):
        if needed not in parameters:
            raise UserError(
                f"constraint {name_of(constraint)} must take (prompts, completions, **columns); it takes "
                f"({', '.join(parameters)})"
            )
    return list(parameters)
