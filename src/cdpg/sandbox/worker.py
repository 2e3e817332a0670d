"""A worker: calls functions on what it is sent, within limits that end it, and answers."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cdpg.errors import UserError
from cdpg.sandbox.coroutines import EventLoop
from cdpg.sandbox.functions import exhaustion_counted
from cdpg.sandbox.limits import Memory, die_with_parent, limit_cpu, limit_memory
from cdpg.sandbox.output import output_kept
from cdpg.sandbox.protocol import Channel, as_plain, unpack

POSITIONAL = "\0"
"""Name, of no column, of a list that is passed by position: ``function(values)`` and not ``function(name=values)``."""
_LONGEST_TEXT = 1000
_KINDS = {"memory": MemoryError, "recursion": RecursionError}


def work(channel: Channel, functions: Mapping[str, Callable[..., Any]], foreman: int) -> None:
    """Answer requests until the foreman is gone; the process is the caller's to end."""
    die_with_parent()
    if os.getppid() != foreman:
        return  # it died before the line above
    settled: int | None = None
    loop = EventLoop()
    start = Memory.now()
    channel.send({"ready": True})
    while True:
        try:
            request = channel.receive()
        except (EOFError, OSError):
            return
        function = functions[request["function"]]
        arguments = {key: unpack(packed) for key, packed in request["arguments"].items()}
        for batch in _singly(arguments) if request["each"] else [arguments]:
            with output_kept(request["show"]) as printed:
                answer = _called(function, batch, request["cpu"], request["megabytes"], loop)
            answer["printed"] = printed.text
            now = Memory.now()
            settled = now.data if settled is None else settled
            answer["grown"] = now.peak - start.peak
            answer["leaked"] = now.data - settled
            channel.send(answer)


def _singly(arguments: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
    count = len(next(iter(arguments.values())))
    return [{key: values[place : place + 1] for key, values in arguments.items()} for place in range(count)]


def _called(
    function: Callable[..., Any],
    arguments: Mapping[str, Sequence[Any]],
    cpu: float | None,
    megabytes: float,
    loop: EventLoop,
) -> dict[str, Any]:
    """What a call returned or raised, ready to be sent."""
    keywords = {key: values for key, values in arguments.items() if key != POSITIONAL}
    positional = [arguments[POSITIONAL]] if POSITIONAL in arguments else []
    with exhaustion_counted() as exhausted:
        limit_memory(Memory.now().data, megabytes)
        limit_cpu(cpu)
        try:
            values = loop.finished(function(*positional, **keywords))
        except BaseException as error:  # SystemExit too: a function may not end the worker politely
            limit_cpu(None)
            limit_memory(Memory.now().data, 2 * megabytes)  # telling takes memory as well
            return {"raised": told(error)}
        limit_cpu(None)
    found = one_for_each(values, len(next(iter(arguments.values()))))
    return {"misshapen": found} if isinstance(found, str) else {"values": found, "exhausted": dict(exhausted)}


def one_for_each(returned: Any, count: int) -> list[Any] | str:
    """A function's answer to ``count`` samples as a list of plain values, or what is wrong with it."""
    try:
        plain = None if isinstance(returned, (set, frozenset)) else as_plain(returned)
    except Exception:
        plain = None
    if not isinstance(plain, list):
        return f"it returned {shown(returned)}, and a list with a value for each completion is expected"
    return plain if len(plain) == count else f"it returned {len(plain)} values for {count} completions"


def told(error: BaseException) -> dict[str, Any]:
    """An exception in words, with the line it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return {
        "type": type(error).__name__,
        "text": _shortened(str(error)),
        "where": where,
        "user": isinstance(error, UserError),
        "kind": next((kind for kind, known in _KINDS.items() if isinstance(error, known)), "exception"),
    }


def in_words(raised: Mapping[str, Any]) -> str:
    """What :func:`told` found, as a part of a sentence."""
    return f"{raised['type']}: {raised['text']}{raised['where']}"


def shown(value: Any) -> str:
    """What a message may hold of a value from outside."""
    try:
        return _shortened(repr(value))
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
