"""Constraints that are coroutines, apart from the others: asyncio is as much to import as all that those import."""

from __future__ import annotations

import asyncio
from typing import Any

from naughty import act


async def patient(texts: list[str]) -> list[int]:
    """As ``lengths``, asynchronously; ``wait`` waits for ever without keeping the loop busy."""
    await asyncio.sleep(0)
    for text in texts:
        if text == "wait":
            await asyncio.sleep(3600)
        act(text)
    return [len(text) for text in texts]


KEPT: list[asyncio.AbstractEventLoop] = []


async def same_loop(texts: list[str]) -> list[bool]:
    """Whether all calls in this process run in one loop, as a client that is kept between them needs."""
    KEPT.append(asyncio.get_running_loop())
    return [KEPT[0] is asyncio.get_running_loop()] * len(texts)


async def on_even(prompts: list[str], completions: list[str], kind: list[str], **columns: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [float("b" in text) if what == "even" else None for text, what in zip(completions, kind, strict=True)]
