"""Text for the terminal: untrusted text made harmless, durations, lists of names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

_PROGRAM = re.compile(r"\A(?:'[^'\n]*/([^'/\s]+)'|[^'\s]*/([^'/\s]+))(?=\s|\Z)")
"""A path at the start of a command, in quotation marks if it contains a blank; a group holds its last part."""
_MARKUP = re.compile(r"(\\*)(\[[a-z#/@][^\[]*?\]|\[|\Z)")
"""Backslashes, and the Rich tag, the bracket or the end that follows them."""


def plain_text(text: str, limit: int = 200) -> str:
    """Untrusted text on one line of at most ``limit`` characters, without control sequences.

    White space becomes a space; control and formatting characters (escape sequences, bidirectional overrides,
    zero-width characters) and lone surrogates are dropped.
    """
    # Most characters may be dropped, so only a bounded part of the text is read.
    kept = "".join(_visible(character) for character in text[: 10 * limit + 1])
    return kept if len(kept) <= limit and len(text) <= 10 * limit else kept[: limit - 1] + "…"


def safe_text(text: str, limit: int = 200) -> str:
    """Untrusted text for a Rich console or table: as ``plain_text``, with Rich's markup escaped.

    For ``rich.text.Text`` or a plain stream, which read no markup, use ``plain_text``.
    """
    return _MARKUP.sub(_escaped, plain_text(text, limit))


def _escaped(match: re.Match[str]) -> str:
    """Markup that Rich shows as the match. Rich's own ``escape`` loses the backslash of ``\\[`` without a tag."""
    backslashes, what = match.groups()
    if what == "[":
        return f"{backslashes}\\["
    doubled = backslashes * 2
    return f"{doubled}\\{what}" if what else doubled  # at the end: it would escape markup that the caller adds


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    return "" if unicodedata.category(character) in ("Cc", "Cf", "Cs") else character


def duration(seconds: float) -> str:
    """``45s``, ``12m05s``, ``3h07m``, ``2d04h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def any_of(names: Iterable[str]) -> str:
    """``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def typed_command(command: str) -> str:
    """A recorded command as a user types it, for cards and reports: without the folder that the program is in."""
    return _PROGRAM.sub(_typed, command)


def _typed(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    return "python -m cdpg" if name == "__main__.py" else name


def whose_samples(record: Mapping[str, Any]) -> str:
    """Whose samples the line of an epoch is of, such as `` of the base``; nothing for those of the policy."""
    if record.get("samples_of_base"):
        return " of the base"
    return " of the proposal" if record.get("samples_of") or record.get("proposal_age") else ""
