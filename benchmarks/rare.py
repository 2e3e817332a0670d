"""A constraint that few samples satisfy, for the benchmarks: the function compiles and begins with a docstring."""

from __future__ import annotations

import re
from typing import Any

from cdpg.tasks.code.constraint import cannot_compile, compiles

_DOCSTRING = re.compile(r"\s*[rRuU]?[\"']")


def documented(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    """Whether the function compiles and begins with a docstring."""
    begun = [_DOCSTRING.match(text) is not None for text in completions]
    return [
        docstring and bool(b) for docstring, b in zip(begun, compiles(prompts, completions, **columns), strict=True)
    ]


def cannot_be_documented(prompts: list[str], prefixes: list[str], **columns: Any) -> list[bool]:
    """Where the body begins with something else, or the function cannot compile any more."""
    begun = [text.strip() not in ("", *"rRuU") for text in prefixes]  # a quote may still follow a letter
    other = [some and not _DOCSTRING.match(text) for some, text in zip(begun, prefixes, strict=True)]
    return [wrong or broken for wrong, broken in zip(other, cannot_compile(prompts, prefixes, **columns), strict=True)]


cannot_be_documented.watch = "\n"  # type: ignore[attr-defined]
documented.hopeless = cannot_be_documented  # type: ignore[attr-defined]
