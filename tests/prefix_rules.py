"""Constraints with a function ``hopeless``, in a module of their own so that worker processes can import them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from cdpg.sandbox.functions import text_check


def at_most_one_b(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [text.count("b") <= 1 for text in completions]


def two_b(prompts: list[str], prefixes: list[str], **columns: Any) -> list[bool]:
    return [text.count("b") > 1 for text in prefixes]


def fragile(prompts: list[str], prefixes: list[str], **columns: Any) -> list[bool]:
    """As ``two_b``, but fails on what begins with an a."""
    if any(text.startswith("a") for text in prefixes):
        raise ZeroDivisionError("oops")
    return two_b(prompts, prefixes)


def hanging(prompts: list[str], prefixes: list[str], **columns: Any) -> list[bool]:
    while True:
        time.sleep(1)


def with_fragile(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return at_most_one_b(prompts, completions)


def with_hanging(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return at_most_one_b(prompts, completions)


def noting(texts: list[str]) -> list[None]:
    """``note FILE WORD`` adds a word to a file; ``wait FILE`` waits until there is such a file."""
    for text in texts:
        verb, path, *words = text.split()
        while verb == "wait" and not Path(path).exists():
            time.sleep(0.01)
        if verb == "note":
            with Path(path).open("a") as file:
                file.write(f"{' '.join(words)}\n")
    return [None] * len(texts)


@text_check()
def whereabouts(texts: list[str]) -> list[int]:
    """The process that is asked."""
    return [os.getpid()] * len(texts)


two_b.watch = "b"  # type: ignore[attr-defined]
fragile.watch = "b"  # type: ignore[attr-defined]
at_most_one_b.hopeless = two_b  # type: ignore[attr-defined]
with_fragile.hopeless = fragile  # type: ignore[attr-defined]
with_hanging.hopeless = hanging  # type: ignore[attr-defined]
