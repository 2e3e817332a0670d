"""Sentences with a record in each: a person, an order, an event or a train. Held-out sentences have other templates."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

_FIRST = "Anna Ben Carla David Elena Farid Grace Hugo Ines Jonas Karin Luis Maria Nils Olga Pavel Rosa Sven Tara Victor"
_LAST = "Keller Moreau Lindqvist Okafor Petrov Silva Tanaka Novak Haddad Brown Rossi Jansen Kowalski Meyer Dupont Singh"
_CITIES = "Oslo Lisbon Vienna Dublin Prague Turin Geneva Bergen Krakow Porto Ghent Malmo Lyon Athens Leeds Zagreb"
_JOBS = "nurse teacher baker pilot lawyer carpenter dentist farmer librarian plumber gardener translator chef surgeon"
_ITEMS = "lamps chairs notebooks mugs blankets shelves candles baskets mirrors pillows clocks vases towels jackets"
_EVENTS = "concert wedding lecture workshop reunion parade festival banquet seminar ball"
_PLACES = "town hall|city library|old harbour|botanical garden|opera house|village school|market square|art museum"
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_TIMES = "06:40 07:15 08:05 09:30 10:20 11:45 13:10 14:55 16:25 17:50 19:35 21:15"

TEMPLATES: dict[str, dict[str, tuple[str, ...]]] = {
    "tune": {
        "person": (
            "{name} is {age} years old, lives in {city} and works as a {job}.",
            "{name}, a {job} from {city}, is {age} years old.",
            "At {age}, {name} still works as a {job} in {city}.",
            "Our neighbour {name} moved to {city} to work as a {job} and is now {age}.",
        ),
        "order": (
            "{customer} ordered {quantity} {item} for {price} euros.",
            "We sold {quantity} {item} to {customer} and asked {price} euros.",
            "{customer} paid {price} euros for {quantity} {item}.",
            "Please send {quantity} {item} to {customer}; the bill is {price} euros.",
        ),
        "event": (
            "The {event} takes place on {day} in the {place}, and {guests} guests are expected.",
            "On {day} there is a {event} for {guests} guests in the {place}.",
            "{guests} guests are invited to the {event} in the {place} on {day}.",
            "The {place} hosts a {event} with {guests} guests on {day}.",
        ),
        "train": (
            "The train from {from} to {to} leaves at {departure} from platform {platform}.",
            "At {departure} a train to {to} departs from {from}, platform {platform}.",
            "Platform {platform}: the {departure} train goes from {from} to {to}.",
            "To travel from {from} to {to}, take the {departure} train on platform {platform}.",
        ),
    },
    "held-out": {
        "person": (
            "Meet {name}: {age} years of age, {job}, at home in {city}.",
            "In {city} we spoke with the {job} {name}, who turned {age} last week.",
        ),
        "order": (
            "An order came in from {customer}: {quantity} {item}, {price} euros in total.",
            "For {price} euros, {customer} bought {quantity} {item}.",
        ),
        "event": (
            "Come to the {place} on {day}: a {event} with {guests} guests awaits you.",
            "Seats for {guests} guests stand ready in the {place}, where the {event} begins on {day}.",
        ),
        "train": (
            "Passengers to {to} board at platform {platform} in {from} and depart at {departure}.",
            "Leaving {from} at {departure}, the train reaches {to}; it waits on platform {platform}.",
        ),
    },
}
"""The sentences of each split and kind."""


@dataclasses.dataclass(frozen=True)
class Extract:
    """A sentence and the record that is in it."""

    kind: str
    sentence: str
    record: dict[str, Any]


def draw(rng: random.Random, split: str) -> Extract:
    """A sentence of a random kind, template and record."""
    kind = rng.choice(list(TEMPLATES[split]))
    record = _record(kind, rng)
    return Extract(kind, rng.choice(TEMPLATES[split][kind]).format(**record), record)


def _record(kind: str, rng: random.Random) -> dict[str, Any]:
    def one(words: str, separator: str | None = None) -> str:
        return rng.choice(words.split(separator))

    if kind == "person":
        name = f"{one(_FIRST)} {one(_LAST)}"
        return {"name": name, "age": rng.randint(19, 79), "city": one(_CITIES), "job": one(_JOBS)}
    if kind == "order":
        customer = f"{one(_FIRST)} {one(_LAST)}"
        return {
            "customer": customer,
            "item": one(_ITEMS),
            "quantity": rng.randint(2, 40),
            "price": rng.randint(15, 950),
        }
    if kind == "event":
        return {"event": one(_EVENTS), "place": one(_PLACES, "|"), "day": one(_DAYS), "guests": rng.randint(20, 400)}
    start, end = rng.sample(_CITIES.split(), 2)
    return {"from": start, "to": end, "departure": one(_TIMES), "platform": rng.randint(1, 14)}
