"""The moments of a run that was made before: their multipliers λ are in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cdpg.constraints.factors import Moment, function_name
from cdpg.errors import UserError
from cdpg.storage.json_files import mapping, read_json, sequence
from cdpg.storage.run_folder import RunFolder


def with_multipliers(constraints: Sequence[Any], folder: RunFolder) -> list[Any]:
    """The factors of a target, the moments with the λ that the run in ``folder`` was tuned for.

    They stay as they are if the run had other moments, or none.
    """
    moments = [factor for factor in constraints if isinstance(factor, Moment)]
    if not moments or not folder.moments.is_file():
        return list(constraints)
    fitted = [mapping(entry) for entry in sequence(mapping(read_json(folder.moments)).get("moments"))]
    asked = [(function_name(moment.function), moment.mean) for moment in moments]
    if [(entry.get("function"), entry.get("mean")) for entry in fitted] != asked:
        return list(constraints)
    multipliers = [entry.get("multiplier") for entry in fitted]
    if not all(isinstance(value, float) for value in multipliers):
        raise UserError(f"{str(folder.moments)!r} is damaged: expected a number as the multiplier of each moment")
    known = iter(multipliers)
    return [replace(one, multiplier=next(known)) if isinstance(one, Moment) else one for one in constraints]
