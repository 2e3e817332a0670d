"""The constraint of the chat task: the answer is one JSON value that follows the schema of its context, and no more.

Strict on purpose, since a program reads the answer:

- White space around the value is allowed; a code fence, a sentence or a second value is not.
- NaN, Infinity and an object that has a key twice are not JSON.
- Types are those of JSON Schema: ``"34"`` is not an integer, ``34.0`` is one, ``true`` is not a number.

A schema may refer to its own parts (``#/$defs/…``) and to nothing else: no schema is fetched.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cdpg.constraints.texts import as_text
from cdpg.errors import UserError, first_line
from cdpg.sandbox.functions import note_exhaustion, text_check

VALID, NOT_JSON = "valid", "not JSON"
_OUTCOMES = {
    "type": "a value of the wrong type",
    "required": "a field is missing",
    "additionalProperties": "a field too many",
}
_OTHER = "another rule of the schema"
_BLANK = " \t\n\r"
_FIRST = {"object": "{", "array": "[", "string": '"', "integer": "-0123456789", "number": "-0123456789"}
"""The characters with which a value of each type can begin."""
_ANY = '{["-0123456789tfn'
_DATA = ("enum", "const", "default", "examples")
"""Keywords of a schema with values, in which ``$ref`` is no reference."""


def _load_jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise UserError("JSON schemas need jsonschema, which is not installed: pip install 'cdpg[tasks]'") from error
    return jsonschema


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """The validator of a schema, given as JSON. It knows no other schemas, and so fetches none."""
    from referencing import Registry

    return _load_jsonschema().Draft202012Validator(json.loads(schema), registry=Registry())


def check_schema(schema: Any) -> str | None:
    """What is wrong with a schema, if anything is."""
    if not isinstance(schema, Mapping):
        return f"it is {json.dumps(schema)[:60]}, where an object was expected"
    library = _load_jsonschema()
    try:
        library.Draft202012Validator.check_schema(schema)
    except library.SchemaError as error:
        return first_line(error)
    for name, whole in _references(schema, schema):
        if not name.startswith("#"):
            return f"it refers to {name!r}, and only parts of its own (#/…) can be referred to"
        if not _has_part(whole, name):
            return f"it refers to {name!r}, and has no such part"
    return None


def _has_part(schema: Mapping[str, Any], reference: str) -> bool:
    """Whether a schema has the part that a reference in it names."""
    from referencing import Registry, exceptions
    from referencing.jsonschema import DRAFT202012

    whole = DRAFT202012.create_resource(schema)
    try:
        Registry().with_resource("", whole).resolver_with_root(whole).lookup(reference)
    except exceptions.Unresolvable:
        return False
    return True


def _references(schema: Any, whole: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every reference in a schema, with the schema that it is relative to: the innermost with a name (``$id``)."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$id"), str):
        whole = schema
    inner: Any = schema if isinstance(schema, list) else ()
    if isinstance(schema, Mapping):
        inner = [part for key, part in schema.items() if key not in _DATA]
    for part in inner:
        yield from _references(part, whole)
    if isinstance(schema, Mapping):
        names = (schema.get(key) for key in ("$ref", "$dynamicRef"))
        yield from ((name, whole) for name in names if isinstance(name, str))  # a property may have this name


def read_json(text: str) -> Any:
    """The value of a text that is JSON; a ValueError or RecursionError if it is not."""
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=_object)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def outcome(text: str, schema: Any) -> str:
    """``valid``, ``not JSON``, or the first kind of error against the schema."""
    try:
        value = read_json(text)
        error = next(iter(_validator(json.dumps(schema)).iter_errors(value)), None)
    except RecursionError:
        note_exhaustion("recursion")
        return NOT_JSON
    except ValueError:
        return NOT_JSON
    return VALID if error is None else _OUTCOMES.get(error.validator, _OTHER)


def _require_schemas(schema: Sequence[Any]) -> None:
    if any(not isinstance(one, Mapping) for one in schema):
        raise UserError("a context has no schema: give a JSON schema in the column 'schema' of the contexts file")


def schema_is_hopeless(
    prompts: Sequence[Any], prefixes: Sequence[Any], *, schema: Sequence[Any], **columns: Any
) -> list[bool]:
    """Whether no JSON that follows the schema begins so.

    True if the first character cannot begin a value of the schema's type, or if the value is complete and is followed
    by more, or breaks the schema.
    """
    _require_schemas(schema)
    return [_is_hopeless(as_text(prefix), own) for prefix, own in zip(prefixes, schema, strict=True)]


@text_check(prepare=_load_jsonschema, columns=("schema",), hopeless=schema_is_hopeless)
def follows_schema(
    prompts: Sequence[Any], completions: Sequence[Any], *, schema: Sequence[Any], **columns: Any
) -> list[bool]:
    """b(x, c) = 1 if the completion is JSON that follows the schema in the column ``schema``."""
    _require_schemas(schema)
    return [outcome(as_text(text), own) == VALID for text, own in zip(completions, schema, strict=True)]


def _is_hopeless(prefix: str, schema: Mapping[str, Any]) -> bool:
    text = prefix.lstrip(_BLANK)
    if not text:
        return False
    kind = schema.get("type")
    if text[0] not in (_FIRST.get(kind, _ANY) if isinstance(kind, str) else _ANY):
        return True
    if text[0] not in "{[":  # more digits or letters may follow
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # not complete, or not JSON: who knows
        return False
    return bool(text[end:].strip(_BLANK)) or outcome(text, schema) != VALID
