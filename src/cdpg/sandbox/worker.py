"""A worker process: calls functions on the samples it receives, under limits, and sends the results."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cdpg.errors import UserError
from cdpg.sandbox.coroutines import EventLoop
from cdpg.sandbox.functions import count_exhaustion
from cdpg.sandbox.limits import Memory, die_with_parent, limit_cpu, limit_memory
from cdpg.sandbox.output import capture_output
from cdpg.sandbox.protocol import Channel, as_plain, unpack

POSITIONAL = "\0"
"""Key of a list that is passed by position, ``function(values)``; no column can have this name."""
_MAX_TEXT = 1000
_KINDS = {"memory": MemoryError, "recursion": RecursionError}


def work(channel: Channel, functions: Mapping[str, Callable[..., Any]], supervisor: int) -> None:
    """Answer requests until the supervisor ends; the caller ends this process."""
    die_with_parent()
    if os.getppid() != supervisor:
        return  # the supervisor died before the line above
    baseline: int | None = None
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
        for batch in _single_samples(arguments) if request["one_by_one"] else [arguments]:
            with capture_output(request["show"]) as printed:
                answer = _call(function, batch, request["cpu"], request["megabytes"], loop)
            answer["printed"] = printed.text
            now = Memory.now()
            baseline = now.data if baseline is None else baseline
            answer["peak_growth"] = now.peak - start.peak
            answer["leaked"] = now.data - baseline
            channel.send(answer)


def _single_samples(arguments: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
    count = len(next(iter(arguments.values())))
    return [{key: values[index : index + 1] for key, values in arguments.items()} for index in range(count)]


def _call(
    function: Callable[..., Any],
    arguments: Mapping[str, Sequence[Any]],
    cpu: float | None,
    megabytes: float,
    loop: EventLoop,
) -> dict[str, Any]:
    """The result or the exception of a call, as a message."""
    keywords = {key: values for key, values in arguments.items() if key != POSITIONAL}
    positional = [arguments[POSITIONAL]] if POSITIONAL in arguments else []
    with count_exhaustion() as exhausted:
        limit_memory(Memory.now().data, megabytes)
        limit_cpu(cpu)
        try:
            values = loop.result_of(function(*positional, **keywords))
        except BaseException as error:  # SystemExit too: it must not end the worker
            limit_cpu(None)
            limit_memory(Memory.now().data, 2 * megabytes)  # describing the exception takes memory too
            return {"raised": describe_exception(error)}
        limit_cpu(None)
    found = plain_values(values, len(next(iter(arguments.values()))))
    return {"invalid": found} if isinstance(found, str) else {"values": found, "exhausted": dict(exhausted)}


def plain_values(returned: Any, count: int) -> list[Any] | str:
    """A function's result for ``count`` samples as a list of plain values, or a text that says what is wrong."""
    try:
        plain = None if isinstance(returned, (set, frozenset)) else as_plain(returned)
    except Exception:
        plain = None
    if not isinstance(plain, list):
        return f"it returned {short_repr(returned)}, and a list with a value for each completion is expected"
    return plain if len(plain) == count else f"it returned {len(plain)} values for {count} completions"


def describe_exception(error: BaseException) -> dict[str, Any]:
    """An exception as a message: type, text, the line that raised it, and its kind of failure."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return {
        "type": type(error).__name__,
        "text": _shorten(str(error)),
        "where": where,
        "user": isinstance(error, UserError),
        "kind": next((kind for kind, known in _KINDS.items() if isinstance(error, known)), "exception"),
    }


def exception_text(raised: Mapping[str, Any]) -> str:
    """The result of :func:`describe_exception` as a part of a sentence."""
    return f"{raised['type']}: {raised['text']}{raised['where']}"


def short_repr(value: Any) -> str:
    """A value's ``repr`` for an error message, shortened; works for values whose ``repr`` fails."""
    try:
        return _shorten(repr(value))
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
