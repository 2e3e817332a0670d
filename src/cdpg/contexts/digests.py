"""Digests of contexts and prompts, the same on every machine; they identify prompts that were tuned on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable

from cdpg.contexts.canonical import canonical, canonical_line
from cdpg.contexts.contexts import Context


def fingerprint(contexts: Iterable[Context]) -> str:
    """SHA-256 over all prompts and columns, in order; the same on every machine."""
    digest = hashlib.sha256()
    for context in contexts:
        digest.update(canonical_line(context.prompt, context.columns))
        digest.update(b"\n")
    return digest.hexdigest()


def prompt_key(context: Context) -> str:
    """A text that is the same for equal prompts only."""
    return json.dumps(canonical(context.prompt))


def prompt_digests(contexts: Iterable[Context]) -> list[str]:
    """A short hash of each context's prompt: it identifies a prompt without revealing it."""
    return [hashlib.sha256(prompt_key(context).encode("ascii")).hexdigest()[:16] for context in contexts]


def count_tuned_on(contexts: Iterable[Context], tuned_on: Container[str]) -> int:
    """How many of the contexts have a prompt that was tuned on; ``tuned_on`` holds the digests of those prompts."""
    return sum(digest in tuned_on for digest in prompt_digests(contexts))
