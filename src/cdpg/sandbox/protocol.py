"""Messages between processes: JSON, each preceded by its length. Reading a message never runs code."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = struct.Struct("!Q")
_READ_BYTES = 1 << 18

_MAX_BITS = 64
"""Largest integer in a message."""


class Channel:
    """One end of a socket pair, for blocking and non-blocking reads and writes of messages."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a message and wait until it is written; OSError if the other side is closed."""
        self._socket.setblocking(True)
        self._socket.sendall(_encode(message))

    def put(self, message: Mapping[str, Any]) -> None:
        """Write as much of a message as possible without waiting; :meth:`flush` writes the rest."""
        self._outgoing += _encode(message)
        self.flush()

    def flush(self) -> None:
        """Write as much of the unsent bytes as possible without waiting."""
        self._socket.setblocking(False)
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(memoryview(self._outgoing)[:_READ_BYTES])]
        except BlockingIOError:
            pass

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing)

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """Wait for the next message; EOFError if the other side is closed, TimeoutError after ``seconds``."""
        self._socket.settimeout(seconds)
        while True:
            message = self._next_message()
            if message is not None:
                return message
            self._append(self._socket.recv(_READ_BYTES))

    def available(self) -> list[dict[str, Any]]:
        """The messages that have arrived; EOFError once the other side is closed and all of them were returned."""
        self._socket.setblocking(False)
        gone = False
        # One read per call: a sender that never stops must not keep the caller here.
        if select.select([self._socket], [], [], 0)[0]:
            try:
                self._append(self._socket.recv(_READ_BYTES))
            except EOFError:
                gone = True
        messages = []
        while (message := self._next_message()) is not None:
            messages.append(message)
        if gone and not messages:
            raise EOFError
        return messages

    def _append(self, data: bytes) -> None:
        if not data:
            raise EOFError
        self._incoming += data

    def _next_message(self) -> dict[str, Any] | None:
        if len(self._incoming) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._incoming)
        end = _HEADER.size + length
        if len(self._incoming) < end:
            return None
        message: dict[str, Any] = json.loads(self._incoming[_HEADER.size : end])
        del self._incoming[:end]
        return message


def _encode(message: Mapping[str, Any]) -> bytes:
    # ASCII, since lone surrogates cannot be encoded in UTF-8.
    data = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _HEADER.pack(len(data)) + data


def pack(values: Sequence[Any]) -> dict[str, Any]:
    """A list for a message. Repeated texts are sent once: all samples of a context share its prompt."""
    places: dict[str, int] = {}
    if not all(isinstance(value, str) for value in values):
        return {"values": list(values)}
    index = [places.setdefault(value, len(places)) for value in values]
    return {"values": list(values)} if len(places) == len(values) else {"values": list(places), "index": index}


def unpack(packed: Mapping[str, Any]) -> list[Any]:
    """The inverse of :func:`pack`."""
    values: list[Any] = packed["values"]
    return [values[place] for place in packed["index"]] if "index" in packed else values


def is_plain(value: Any) -> bool:
    """Whether a message preserves a value: texts, numbers, lists, and dictionaries with text keys."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(map(is_plain, value))
    return type(value) is dict and all(type(key) is str and is_plain(inner) for key, inner in value.items())


def as_plain(value: Any) -> Any:
    """A function's result as plain values: arrays become lists, other numbers floats; otherwise TypeError."""
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return float(value)  # json refuses integers of thousands of digits
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
