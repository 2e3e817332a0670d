"""The schemas of the records that come with the package, and the request that asks for a record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

FIELDS: Mapping[str, Mapping[str, str]] = {
    "person": {"name": "string", "age": "integer", "city": "string", "job": "string"},
    "order": {"customer": "string", "item": "string", "quantity": "integer", "price": "integer"},
    "event": {"event": "string", "place": "string", "day": "string", "guests": "integer"},
    "train": {"from": "string", "to": "string", "departure": "string", "platform": "integer"},
}
"""The fields of each kind of record, with their types."""


def schema_of(kind: str) -> dict[str, Any]:
    """A flat object with exactly the fields of a kind."""
    fields = FIELDS[kind]
    return {
        "type": "object",
        "properties": {name: {"type": type_} for name, type_ in fields.items()},
        "required": list(fields),
        "additionalProperties": False,
    }


def request_of(kind: str, sentence: str) -> str:
    """What the user asks for: the fields by name and type, then the sentence."""
    fields = ", ".join(f"{json.dumps(name)} ({type_})" for name, type_ in FIELDS[kind].items())
    return (
        f"Extract the {kind} from the text as one line of JSON with exactly these keys: {fields}. "
        f"Write only the JSON object.\n\nText: {sentence}"
    )
