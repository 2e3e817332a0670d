"""Messages between processes: JSON, each behind its length. Nothing that is read can run code."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = struct.Struct("!Q")
_READ = 1 << 18

_MOST_BITS = 64
"""Of a whole number in a message."""


class Channel:
    """One end of a socket pair. Reading waits for a message or takes what is there; writing may be put off."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a message, however long it takes the other side to read it; OSError if it is gone."""
        self._socket.setblocking(True)
        self._socket.sendall(_encoded(message))

    def put(self, message: Mapping[str, Any]) -> None:
        """Write a message as far as the other side takes it now; :meth:`flush` writes the rest."""
        self._outgoing += _encoded(message)
        self.flush()

    def flush(self) -> None:
        """Write as much of what was put off as goes without waiting."""
        self._socket.setblocking(False)
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(memoryview(self._outgoing)[:_READ])]
        except BlockingIOError:
            pass

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing)

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """Wait for the next message; EOFError if the other side is gone, TimeoutError if it takes too long."""
        self._socket.settimeout(seconds)
        while True:
            message = self._next()
            if message is not None:
                return message
            self._take(self._socket.recv(_READ))

    def available(self) -> list[dict[str, Any]]:
        """All messages that are there; EOFError once the other side is gone and everything it sent was given out."""
        self._socket.setblocking(False)
        gone = False
        # One look at a time: a side that writes without end must not keep the reader here.
        if select.select([self._socket], [], [], 0)[0]:
            try:
                self._take(self._socket.recv(_READ))
            except EOFError:
                gone = True
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        if gone and not messages:
            raise EOFError
        return messages

    def _take(self, data: bytes) -> None:
        if not data:
            raise EOFError
        self._incoming += data

    def _next(self) -> dict[str, Any] | None:
        if len(self._incoming) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._incoming)
        end = _HEADER.size + length
        if len(self._incoming) < end:
            return None
        message: dict[str, Any] = json.loads(self._incoming[_HEADER.size : end])
        del self._incoming[:end]
        return message


def _encoded(message: Mapping[str, Any]) -> bytes:
    # In ASCII: lone surrogates have no other form.
    data = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _HEADER.pack(len(data)) + data


def pack(values: Sequence[Any]) -> dict[str, Any]:
    """A list for a message, each text once: a source stands beside every one of its samples."""
    places: dict[str, int] = {}
    if not all(isinstance(value, str) for value in values):
        return {"values": list(values)}
    index = [places.setdefault(value, len(places)) for value in values]
    return {"values": list(values)} if len(places) == len(values) else {"values": list(places), "index": index}


def unpack(packed: Mapping[str, Any]) -> list[Any]:
    """The list that :func:`pack` was given."""
    values: list[Any] = packed["values"]
    return [values[place] for place in packed["index"]] if "index" in packed else values


def is_plain(value: Any) -> bool:
    """Whether a value comes out of a message as it went in: texts, numbers, lists and mappings by text."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(map(is_plain, value))
    return type(value) is dict and all(type(key) is str and is_plain(inner) for key, inner in value.items())


def as_plain(value: Any) -> Any:
    """A function's result in the types of a message: arrays become lists, other numbers floats; else TypeError."""
    if type(value) is int and value.bit_length() > _MOST_BITS:
        return float(value)  # a message cannot hold one of thousands of digits
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):
        return as_plain(value.tolist())  # an array, a tensor, or a number out of one
    if isinstance(value, Mapping):
        return {str(key): as_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(as_plain(inner) for inner in value)
    if isinstance(value, str):
        return str(value)
    return float(value)
