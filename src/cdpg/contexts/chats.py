"""Prompts for chat models: turns plain texts into a user's messages, and notices plain texts sent to a chat model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cdpg.contexts.contexts import Context, Prompt
from cdpg.errors import UserError
from cdpg.messages.terms import for_caller

_log = logging.getLogger(__name__)


def as_chats(contexts: Sequence[Context], chat: bool, system: str) -> list[Context]:
    """Contexts with every plain prompt as a user's message, if ``chat`` is set.

    ``system`` is added as the first message of every chat without a system message.
    """
    plain = next((context for context in contexts if isinstance(context.prompt, str)), None)
    if system and not chat and plain is not None:
        raise UserError(
            f"system is set, and the prompt of row {plain.row} is a plain text, which has no place for it: "
            + f"{for_caller('add --chat', 'set chat=True too')}, or put the text into the prompt itself"
        )
    if not chat and not system:
        return list(contexts)
    return [replace(context, prompt=_with_system(_as_chat(context.prompt), system)) for context in contexts]


def warn_of_prompts(tokenizer: Any, contexts: Sequence[Context]) -> None:
    """Log notices on prompts that are probably not in the form that is meant."""
    warn_of_plain_prompts(tokenizer, contexts)
    chats = (context for context in contexts if not isinstance(context.prompt, str))
    begun = next((chat for chat in chats if chat.prompt[-1]["role"] == "assistant"), None)  # type: ignore[index]
    if begun is not None:
        _log.warning(
            f"prompts end with a message of the assistant (the first: row {begun.row}), which completions continue: if "
            "it is a whole answer, leave it out of the prompt"
        )


def warn_of_plain_prompts(tokenizer: Any, contexts: Sequence[Context]) -> None:
    """Log a notice if a model with a chat template is sent plain texts."""
    plain = len({context.prompt for context in contexts if isinstance(context.prompt, str)})  # some are evaluated, too
    if not plain or not getattr(tokenizer, "chat_template", None):
        return
    count = f"the {plain:,} prompts are" if plain > 1 else "the prompt is"
    _log.warning(
        f"the model has a chat template, and {count} plain text, which is sent unchanged: to send a user's "
        f"message, {for_caller('add --chat', 'set chat=True in CDPGConfig')}, or give prompts as lists of messages"
    )


def _as_chat(prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt


def _with_system(messages: tuple[Mapping[str, Any], ...], system: str) -> tuple[Mapping[str, Any], ...]:
    if not system or any(message["role"] == "system" for message in messages):
        return messages
    return ({"role": "system", "content": system}, *messages)
