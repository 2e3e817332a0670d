"""Prompts and completions as plain strings, whether they are texts or chats as TRL passes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cdpg.errors import UserError


def as_text(message: Any) -> str:
    """A prompt or completion as one string; for a chat, the contents of its messages."""
    if isinstance(message, str):
        return message
    return "\n".join(str(turn["content"]) if isinstance(turn, Mapping) else str(turn) for turn in message)


def sources_of(prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]) -> list[str]:
    """What each completion is compared with: its entry in the ``source`` column, else its prompt."""
    given = columns.get("source")
    sources = prompts if given is None else given
    if isinstance(sources, str) or not len(sources) == len(prompts) == len(completions):
        count = 1 if isinstance(sources, str) else len(sources)
        raise UserError(
            f"{count} source(s) and {len(prompts)} prompt(s) were given for {len(completions)} completions; "
            "give one prompt, and if there is a source column one entry of it, for each completion"
        )
    return [as_text(prompt if source is None else source) for source, prompt in zip(sources, prompts, strict=True)]
