"""Strict JSON and YAML files: written atomically, checked when read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from cdpg.errors import UserError
from cdpg.storage.atomic import write_bytes

_UNSAFE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that are escaped although JSON allows them: surrogates, line breaks, and terminal control characters."""


def write_json(path: Path, obj: Any) -> None:
    """Write ``obj`` as indented JSON, atomically; NaN and infinities become null."""
    write_bytes(path, encode(obj, indent=2) + b"\n")


def write_yaml(path: Path, mapping: Mapping[str, Any]) -> None:
    """Write ``mapping`` as YAML that safe loading reads, atomically; NaN and infinities become null."""
    write_bytes(path, encode_yaml(mapping))


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_bytes(), parse_constant=refuse_constant)
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is not valid JSON: {error}") from error


def mapping(value: Any) -> dict[str, Any]:
    """A value as a mapping with text keys; empty if it is not a mapping."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """A value as a list; empty if it is not a list."""
    return value if isinstance(value, list) else []


def encode(obj: Any, indent: int | None = None) -> bytes:
    """Strict JSON in UTF-8: null for NaN and infinities, escapes for lone surrogates and control characters."""
    text = json.dumps(plain(obj), ensure_ascii=False, allow_nan=False, indent=indent)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode("utf-8")


def encode_yaml(mapping: Mapping[str, Any]) -> bytes:
    """YAML that safe loading reads as :func:`plain` gives it."""
    # In ASCII: PyYAML cannot read some characters that it writes, such as U+0085.
    quick = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's, if there is one: ten times as fast
    try:
        text = yaml.dump(plain(mapping), Dumper=quick, sort_keys=False, allow_unicode=False)
    except UnicodeEncodeError:  # half of a surrogate pair, which libyaml does not take
        text = yaml.safe_dump(plain(mapping), sort_keys=False, allow_unicode=False)
    return text.encode("ascii")


def refuse_constant(name: str) -> NoReturn:
    """For ``json.loads``, which takes NaN and Infinity for JSON."""
    raise ValueError(f"{name} is not JSON")


def plain(obj: Any) -> Any:
    """``obj`` in JSON's types; NaN and infinities become None."""
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else None
    if isinstance(obj, Mapping):
        return {str(key): plain(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [plain(item) for item in obj]
    return obj
