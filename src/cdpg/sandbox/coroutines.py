"""Calls of ``async def`` functions, in one event loop that outlives the call."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported with the first coroutine: most functions have none, and workers should start at once
    import asyncio


class EventLoop:
    """An event loop in its own thread, which starts with the first coroutine.

    All calls share one loop, so that a client that a function keeps between calls stays usable. The loop has a thread,
    since a notebook already runs a loop in the main one.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def result_of(self, returned: Any) -> Any:
        """The result of a call: what it returned, awaited if it is awaitable."""
        if not inspect.isawaitable(returned):
            return returned
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="cdpg-coroutines", daemon=True).start()
        value, error = asyncio.run_coroutine_threadsafe(_outcome(returned), self._loop).result()
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the thread; the next coroutine starts another."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


async def _outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """The value or the exception. A SystemExit that is raised here would end the loop and leave the caller waiting."""
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


def _run(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
