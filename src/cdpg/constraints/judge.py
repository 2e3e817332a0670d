"""Calls constraints and makes sure that what they return can be used."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from cdpg.contexts import Context
from cdpg.errors import RunError, UserError

Constraint = Callable[..., Any]
"""``constraint(prompts, completions, **columns)`` returns a bool or a number in [0, 1] for each completion.

That is the signature of TRL's reward functions: one with values in [0, 1] fits as it is.
"""


class Judge:
    """b(x,c): the product of one or several constraints."""

    def __init__(self, constraints: Constraint | Sequence[Constraint]) -> None:
        self.constraints = [constraints] if callable(constraints) else list(constraints)
        if not self.constraints:
            raise UserError("no constraint was given: pass a function of (prompts, completions, **columns)")
        for constraint in self.constraints:
            if not callable(constraint):
                raise UserError(
                    f"a constraint must be a function of (prompts, completions, **columns), not {constraint!r}"
                )
        self._accepted = [_accepted_arguments(constraint) for constraint in self.constraints]

    def __call__(
        self, contexts: Sequence[Context], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[float]:
        """b of each completion, ``contexts[i]`` being the context of ``texts[i]``."""
        verdicts = [1.0] * len(texts)
        if not texts:
            return verdicts
        arguments = _arguments(contexts, texts, token_ids)
        for constraint, accepted in zip(self.constraints, self._accepted, strict=True):
            wanted = arguments if accepted is None else {key: arguments[key] for key in accepted if key in arguments}
            values = as_verdicts(name_of(constraint), _call(constraint, wanted), len(texts))
            verdicts = [verdict * value for verdict, value in zip(verdicts, values, strict=True)]
        return verdicts


def _call(constraint: Constraint, arguments: dict[str, list[Any]]) -> Any:
    """Call the user's function; what it raises is told with the line that raised it."""
    try:
        return constraint(**arguments)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"constraint {name_of(constraint)} raised {type(error).__name__}: {error} ({frame.filename}, line "
            f"{frame.lineno})"
        ) from error


def as_verdicts(name: str, values: Any, expected: int) -> list[float]:
    """The values a constraint returned, as numbers in [0, 1], or an error that names the constraint."""
    if hasattr(values, "tolist"):
        values = values.tolist()  # a tensor or an array
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UserError(f"constraint {name} must return a list with a value for each completion, not {values!r}")
    if len(values) != expected:
        raise UserError(f"constraint {name} returned {len(values)} values for {expected} completions")
    verdicts = []
    for index, value in enumerate(values):
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0.0 <= number <= 1.0:
            raise UserError(
                f"constraint {name} returned {value!r} for completion {index}: "
                f"expected true, false or a number in [0, 1]"
            )
        verdicts.append(number)
    return verdicts


def name_of(constraint: Constraint) -> str:
    """What to call a constraint in a message."""
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


def _accepted_arguments(constraint: Constraint) -> list[str] | None:
    """The keywords a constraint takes; None when it takes any."""
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
