"""Numbers and text from untrusted files: invalid numbers become None, invisible characters are spelt out.

Nothing here raises on what a file holds. Control characters of a terminal, invisible
characters and those that change the reading order are replaced by a visible code; other text is unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cdpg.storage.json_files import mapping, sequence

LARGEST = 1e18
"""A larger number is treated as damage: drawing it would overflow."""
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ud800-\udfff\ufdd0-\ufdef\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


@dataclass(frozen=True)
class MeanInterval:
    """A mean with the ends of its confidence interval, if they are known."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def whole(self) -> bool:
        """Whether both ends are known."""
        return self.low is not None and self.high is not None


def number(value: Any) -> float | None:
    """A finite number of a sensible size, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) and abs(result) <= LARGEST else None


def count(value: Any) -> float | None:
    """A number that is not negative, or None."""
    result = number(value)
    return result if result is not None and result >= 0 else None


def interval(value: Any) -> MeanInterval | None:
    """``{"mean", "low", "high"}``, or a number, as an interval; None without a mean."""
    if not isinstance(value, dict):
        mean = number(value)
        return None if mean is None else MeanInterval(mean)
    mean, low, high = (number(value.get(key)) for key in ("mean", "low", "high"))
    if mean is None:
        return None
    if low is None or high is None or low > high:
        return MeanInterval(mean)
    return MeanInterval(mean, low, high)


def without(value: Any, name: str) -> dict[str, Any]:
    """A mapping without one key; empty for anything else."""
    return {key: item for key, item in mapping(value).items() if key != name}


def is_chat(value: Any) -> bool:
    """Whether these are messages, each with a role and a content."""
    messages, keys = sequence(value), ("role", "content")
    return bool(messages) and all(isinstance(mapping(message).get(key), str) for message in messages for key in keys)


def text(value: Any, limit: int = 4000) -> str:
    """At most ``limit`` characters, with the number of those left out; empty for nothing, a chat with its roles."""
    if value is None:
        return ""
    if is_chat(value):
        value = "\n\n".join(f"{message['role']}: {message['content']}" for message in value)
    if isinstance(value, (list, tuple)):
        value = ", ".join(text(item, limit) for item in value[:50])
    whole = value if isinstance(value, str) else str(value)
    whole = whole.replace("\r\n", "\n")
    return whole if len(whole) <= limit else f"{whole[:limit]} … ({len(whole) - limit:,} more characters)"


def visible(value: str) -> str:
    """``value`` with invisible and bidirectional control characters spelt out."""
    return _STEERING.sub(_spell, value)


def short(value: Any, limit: int = 40) -> str:
    """A name for an axis, a row or a heading: one line, visible, shortened."""
    return _cut(_line(text(value, 10 * limit)), limit)


def distinct(names: Sequence[str], limit: int = 40) -> list[str]:
    """The names as ``short`` makes them, but all different: names that would look the same are cut where they differ.

    Names without a visible difference are numbered.
    """
    lines = [_line(name) for name in names]
    alike: dict[str, list[str]] = {}
    for line in lines:
        if len(line) > limit:
            alike.setdefault(_cut(line, limit), []).append(line)
    return numbered([_cut_at_difference(line, alike.get(_cut(line, limit), []), limit) for line in lines])


def numbered(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """The names, with a number after each that is taken or repeated."""
    used, found = set(taken), []
    for name in names:
        free, place = name, 2
        while free in used:
            free, place = f"{name} ({place})", place + 1
        used.add(free)
        found.append(free)
    return found


def mean(values: Iterable[float]) -> float | None:
    """The mean, or None without values."""
    known = list(values)
    return math.fsum(known) / len(known) if known else None


def _line(value: str) -> str:
    return " ".join(visible(value).split())


def _cut(line: str, limit: int) -> str:
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _cut_at_difference(line: str, alike: Sequence[str], limit: int) -> str:
    """The line's beginning, and its part from where it differs from lines with the same beginning."""
    if len(line) <= limit or len(set(alike)) == 1:
        return _cut(line, limit)
    first, last, head = min(alike), max(alike), limit // 4
    same = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    start = min(same - head, len(line) - (limit - head - 1))
    return _cut(f"{line[:head]}…{line[start:]}", limit)


def _spell(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"
