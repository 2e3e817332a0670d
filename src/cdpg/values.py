"""Values of settings: conversion to their types, and ranges."""

from __future__ import annotations

import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from cdpg.errors import UserError

_UNIONS = (types.UnionType, typing.Union)
"""``int | None`` is the first, ``Literal["a"] | None`` the second."""


def no_text(key: str, value: Any, expected: str = "text") -> str:
    """A sentence on the value of a text setting that YAML read as another type."""
    return f'{key} takes {expected}, not {value!r}: in YAML, put it in quotes, {key}: "..."'


def convert(key: str, value: Any, expected: Any) -> Any:
    """``value`` as the type that setting ``key`` takes, or a UserError that says what was expected."""
    options = typing.get_args(expected) if typing.get_origin(expected) in _UNIONS else (expected,)
    for option in options:
        try:
            return _as(option, value)
        except (TypeError, ValueError, OverflowError):  # OverflowError: infinity as an integer
            continue
    raise UserError(no_text(key, value) if expected is str else f"{key} takes {_describe(expected)}, not {value!r}")


def _as(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if kind is type(None):
        if value is None:
            return None
    elif origin is Literal:
        if value in typing.get_args(kind):
            return value
    elif origin is tuple:
        items = (
            [value] if isinstance(value, str) and value != "none" else [] if value in (None, "none") else list(value)
        )
        kinds = typing.get_args(kind)
        if kinds[-1] is Ellipsis:
            return tuple(_as(kinds[0], item) for item in items)
        if len(items) == len(kinds):
            return tuple(_as(inner, item) for inner, item in zip(kinds, items, strict=True))
    elif kind in (int, float):
        number = float(value)  # also "1e-5", which YAML 1.1 reads as text
        if not isinstance(value, bool) and kind is float:
            return number
        if not isinstance(value, bool) and number == int(number):
            # A large number loses digits as a float; int() does not read text such as "1e3".
            return int(number) if isinstance(value, str) and not value.strip().lstrip("+-").isdigit() else int(value)
    elif isinstance(value, kind):
        return value
    elif kind is str and isinstance(value, os.PathLike) and isinstance(os.fspath(value), str):
        return os.fspath(value)
    raise TypeError(kind)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) in _UNIONS:
        return " or ".join(_describe(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "a list"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}[kind]


def too_small(settings: Any, least: Mapping[str, int]) -> Iterator[str]:
    """A sentence for each setting that is given and below its least value."""
    for key, bound in least.items():
        value = getattr(settings, key)
        if value is not None and value < bound:
            yield f"{key} must be at least {bound}, not {value}"


def negative_or_infinite(settings: Any, *keys: str) -> Iterator[str]:
    """A sentence for each setting that is not in [0, ∞)."""
    for key in keys:
        value = getattr(settings, key)
        if not 0 <= value < math.inf:
            yield f"{key} must be a finite number of at least 0, not {value}"


def not_positive(settings: Any, *keys: str) -> Iterator[str]:
    """A sentence for each setting that is not in (0, ∞)."""
    for key in keys:
        if not 0 < getattr(settings, key) < math.inf:
            yield f"{key} must be above 0 and finite, not {getattr(settings, key)}"


def not_a_share(settings: Any, *keys: str) -> Iterator[str]:
    """A sentence for each setting that is not in [0, 1]."""
    for key in keys:
        if not 0 <= getattr(settings, key) <= 1:
            yield f"{key} must lie in [0, 1], not {getattr(settings, key)}"
