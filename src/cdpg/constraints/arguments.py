"""The arguments of a constraint and of its function ``hopeless``: lists by keyword, as TRL passes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.sandbox.functions import traits_of

COMPLETIONS = "completions"
"""The argument with the texts of a constraint."""
PREFIXES = "prefixes"
"""The argument with the texts of a function ``hopeless``."""
IDS = "completion_ids"
_EVERY = ("prompts", COMPLETIONS, PREFIXES, IDS)


def keyword_lists(contexts: Sequence[Context], kind: str, texts: Sequence[str]) -> dict[str, list[Any]]:
    """Prompts, columns and texts, which are called ``kind``; a chat prompt is answered by a list of one message."""
    columns = dict.fromkeys(key for context in contexts for key in context.columns)
    arguments: dict[str, list[Any]] = {key: [context.columns.get(key) for context in contexts] for key in columns}
    chats = [not isinstance(context.prompt, str) for context in contexts]
    arguments["prompts"] = [
        [dict(message) for message in context.prompt] if chat else context.prompt  # type: ignore[arg-type]
        for context, chat in zip(contexts, chats, strict=True)
    ]
    arguments[kind] = [
        [{"role": "assistant", "content": text}] if chat else text for text, chat in zip(texts, chats, strict=True)
    ]
    return arguments


def needed_columns(function: Callable[..., Any]) -> list[str]:
    """Parameters without a default, except those that every constraint gets."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [parameter for parameter in parameters if parameter.kind in named and parameter.default is parameter.empty]
    return [parameter.name for parameter in needed if parameter.name not in _EVERY]


def accepted_arguments(function: Callable[..., Any], label: str, kind: str) -> list[str] | None:
    """The keywords that a function accepts, of texts that are called ``kind``; None if it accepts any."""
    columns = traits_of(function).columns
    if columns is not None:
        return ["prompts", kind, *columns]
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    for needed in ("prompts", kind):
        if needed not in parameters:
            raise UserError(f"{label} must take (prompts, {kind}, **columns); it takes ({', '.join(parameters)})")
    return list(parameters)


def accepted(arguments: dict[str, list[Any]], keys: Iterable[str] | None) -> dict[str, list[Any]]:
    """Those of the arguments that a function accepts."""
    return arguments if keys is None else {key: arguments[key] for key in keys if key in arguments}
