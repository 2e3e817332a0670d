"""Canonical forms of values, the same on every machine, for digests."""

from __future__ import annotations

import datetime
import hashlib
import json
import numbers
from collections.abc import Mapping
from typing import Any


def canonical_line(prompt: Any, columns: Mapping[str, Any]) -> bytes:
    """A line of ASCII that equal contexts have in common."""
    return json.dumps([canonical(prompt), canonical(columns)]).encode("ascii")


def canonical(value: Any) -> Any:
    """The value in the types of JSON, with the types of others named; keys and the members of a set are sorted."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {"mapping": sorted(([str(key), canonical(inner)] for key, inner in value.items()), key=lambda p: p[0])}
    if isinstance(value, (list, tuple)):
        return [canonical(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(json.dumps(canonical(inner)) for inner in value)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    converted = in_plain_types(value)
    if converted is None and isinstance(value, (numbers.Number, datetime.timedelta)):
        converted = str(value)  # other numbers, such as decimals and numpy's longdouble
    if converted is not None:
        return {type(value).__name__: canonical(converted)}
    return {"type": f"{type(value).__module__}.{type(value).__qualname__}"}  # its text may hold a memory address


def in_plain_types(value: Any) -> Any:
    """An array, an array's scalar, a date or a time in plain types; None for other values."""
    for method in ("tolist", "isoformat"):
        converted = getattr(value, method, lambda: None)()
        if converted is not None and type(converted) is not type(value):  # numpy's longdouble returns itself
            return converted
    return None
