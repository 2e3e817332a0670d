"""Functions that are ``async def``: what they return is awaited, in an event loop that outlives the call."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from typing import Any


class EventLoop:
    """An event loop in a thread of its own, which starts with the first coroutine.

    One loop for all calls, so that a client that a function keeps between them stays usable; in a thread, since a
    notebook runs a loop of its own in the main one.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def finished(self, returned: Any) -> Any:
        """What a function returned, awaited where that is what has to be done with it."""
        if not inspect.isawaitable(returned):
            return returned
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
    """The value or the exception: SystemExit would end the loop, and whoever waits would wait for ever."""
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
