"""The schemas of the records that come with the package, and the chat that asks for a record."""

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
EXAMPLES: Mapping[str, tuple[tuple[str, tuple[str | int, ...]], ...]] = {
    "person": (
        ("Ida Berg is a tailor of 41 who lives in Rome.", ("Ida Berg", 41, "Rome", "tailor")),
        ("Born 67 years ago, Omar Diaz is a judge in Quito.", ("Omar Diaz", 67, "Quito", "judge")),
        ("The painter Lena Voss, 28, has her home in Bern.", ("Lena Voss", 28, "Bern", "painter")),
    ),
    "order": (
        ("Ida Berg takes 6 spoons, which makes 12 euros.", ("Ida Berg", "spoons", 6, 12)),
        ("Bill for Omar Diaz: 75 plates, 340 euros.", ("Omar Diaz", "plates", 75, 340)),
        ("8 tables went to Lena Voss for 1200 euros.", ("Lena Voss", "tables", 8, 1200)),
    ),
    "event": (
        ("12 guests meet on Friday for a debate in the church.", ("debate", "church", "Friday", 12)),
        ("The stadium is booked on Sunday: a parade, 900 guests.", ("parade", "stadium", "Sunday", 900)),
        ("Monday brings 45 guests to a ball at the castle.", ("ball", "castle", "Monday", 45)),
    ),
    "train": (
        ("Rome to Bern, 12:30, platform 3.", ("Rome", "Bern", "12:30", 3)),
        ("Platform 16 is for the train that leaves Quito for Lima at 05:55.", ("Quito", "Lima", "05:55", 16)),
        ("You reach Basel from Milan with the train at 22:05, platform 7.", ("Milan", "Basel", "22:05", 7)),
    ),
}
"""Sentences with their records, in the order of the fields, that stand as earlier turns before a request."""


def schema_of(kind: str) -> dict[str, Any]:
    """A flat object with exactly the fields of a kind."""
    fields = FIELDS[kind]
    return {
        "type": "object",
        "properties": {name: {"type": type_} for name, type_ in fields.items()},
        "required": list(fields),
        "additionalProperties": False,
    }


def request_of(kind: str, sentence: str) -> list[dict[str, str]]:
    """The chat that asks for a record: the task, examples as earlier turns, and the sentence.

    Without the examples the model hardly ever answers with JSON alone.
    """
    fields = ", ".join(f"{json.dumps(name)} ({type_})" for name, type_ in FIELDS[kind].items())
    task = f"Extract the {kind} from each text as one line of JSON with exactly these keys: {fields}.\n\n"
    chat: list[dict[str, str]] = []
    for text, values in EXAMPLES[kind]:
        record = dict(zip(FIELDS[kind], values, strict=True))
        chat.append({"role": "user", "content": f"{'' if chat else task}Text: {text}"})
        chat.append({"role": "assistant", "content": json.dumps(record)})
    return [*chat, {"role": "user", "content": f"Text: {sentence}"}]
