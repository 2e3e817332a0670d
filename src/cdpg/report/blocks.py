"""Which runs may be compared: those of one base, one constraint and the same evaluated contexts.

A run's ``config.yaml`` names all three, base and contexts by their fingerprints. Runs that differ in one of them are in
separate blocks. If a missing or old file leaves one of them open, runs are in one block only if their evaluations have
exactly the same figures of the base: then the samples and the verdicts were the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cdpg.evaluation.metrics import POOLED
from cdpg.report.folders import Found, Run
from cdpg.report.values import MeanInterval, count, interval, number, short, without
from cdpg.storage.json_files import mapping, sequence

_REQUIRED = ("base model", "constraint", "evaluated contexts")
"""Facts that two runs must be known to share; other facts only must not differ."""
JUDGED_ALIKE = 0.05
"""The base's satisfaction in two runs of one base, one constraint by name and the same contexts: intervals farther
apart than this show that the constraint was changed in between."""
ENOUGH_CONTEXTS = 10
"""On fewer contexts, intervals over contexts are too uncertain for this."""


def blocks_of(found: Found) -> list[list[Run]]:
    """The runs in blocks, in the order in which they were given; within a block all may be compared."""
    blocks: list[list[Run]] = []
    for run in found.runs:
        joined = next((block for block in blocks if _belongs(run, block, found)), None)
        if joined is None:
            blocks.append([run])
        else:
            joined.append(run)
    return blocks


def _belongs(run: Run, block: Sequence[Run], found: Found) -> bool:
    if any(_measured_together(run, other, found) for other in block):
        return True
    alike = any(_known_alike(run, other) or _measured_alike(run, other) for other in block)
    return alike and not any(differences(run, other) for other in block)


def differences(one: Run, other: Run) -> list[str]:
    """The facts in which two runs are known to differ."""
    mine, others = facts(one), facts(other)
    found = [
        name for name in mine if mine[name] is not None and others[name] is not None and mine[name] != others[name]
    ]
    if not found and _judged_otherwise(one, other):
        found.append("constraint, or what it calls")
    return found


def reasons(blocks: Sequence[Sequence[Run]]) -> list[str]:
    """The facts in which any two of these blocks are known to differ."""
    firsts = [block[0] for block in blocks if block]
    pairs = [(one, other) for place, one in enumerate(firsts) for other in firsts[place + 1 :]]
    return list(dict.fromkeys(name for pair in pairs for name in differences(*pair)))


def facts(run: Run) -> dict[str, Any]:
    """Facts on which a run's figures depend, by name; None if its files lack it."""
    origin = mapping(run.config.get("origin"))
    names = [name for name in sequence(origin.get("constraints")) if isinstance(name, str)]
    return {
        "task": _text(run.evaluation.get("task") or run.config.get("task")),
        "base model": _text(origin.get("base")),
        "constraint": tuple(names) or None,
        "stop rule": str(origin["stop"]) if "stop" in origin else None,
        "max_completion_length": number(run.config.get("max_completion_length")),
        "evaluated contexts": _contexts(origin),
    }


def described(run: Run) -> tuple[tuple[str, str], ...]:
    """Base and constraint of a run in words, as far as its files have them."""
    origin, known = mapping(run.config.get("origin")), facts(run)
    digest = f" ({known['base model'][:8]})" if known["base model"] else ""
    names = known["constraint"] or ()
    stop = known["stop rule"] if known["stop rule"] not in (None, "None") else ""
    length = known["max_completion_length"]
    found = (
        ("base model", f"{short(origin.get('model') or run.config.get('model'), 80)}{digest}"),
        ("constraint", ", ".join(short(name, 80) for name in names)),
        ("stop rule", short(stop, 80)),
        ("completions", "" if length is None else f"at most {length:,.0f} tokens"),
    )
    return tuple((name, words) for name, words in found if words)


def _known_alike(one: Run, other: Run) -> bool:
    mine, others = facts(one), facts(other)
    return all(mine[name] is not None and mine[name] == others[name] for name in _REQUIRED)


def _measured_together(one: Run, other: Run, found: Found) -> bool:
    """Whether one ``cdpg compare`` evaluated both, with one base on the same contexts."""
    if one.path.parent != other.path.parent:
        return False
    models = mapping(found.comparisons.get(one.path.parent, {}).get("models"))
    return one.name in models and other.name in models


def _measured_alike(one: Run, other: Run) -> bool:
    """Whether two evaluations have the same figures of the base, context by context; two bases would differ."""
    return _measured(one) is not None and _measured(one) == _measured(other)


def _measured(run: Run) -> str | None:
    base = without(run.evaluation.get("base"), POOLED)
    keys = ("contexts", "samples_per_context", "seed", "partition")
    given = [run.evaluation.get(key) for key in keys]
    return json.dumps([given, base], sort_keys=True) if base else None


def _judged_otherwise(one: Run, other: Run) -> bool:
    """Whether the base's satisfaction differs so much that the constraint cannot have been the same."""
    if any((count(run.evaluation.get("contexts")) or 0) < ENOUGH_CONTEXTS for run in (one, other)):
        return False
    return judged_apart(*(interval(mapping(run.evaluation.get("base")).get("satisfaction")) for run in (one, other)))


def judged_apart(one: MeanInterval | None, other: MeanInterval | None) -> bool:
    """Whether two intervals of the base's satisfaction lie farther apart than ``JUDGED_ALIKE``."""
    if one is None or other is None or one.low is None or other.low is None or one.high is None or other.high is None:
        return False
    return max(one.low, other.low) - min(one.high, other.high) > JUDGED_ALIKE


def _contexts(origin: dict[str, Any]) -> tuple[str, str] | None:
    """The contexts of the figures: those evaluated on, or those tuned on without an evaluation."""
    if "held_out" not in origin:
        return None
    evaluated = bool(count(mapping(origin["held_out"]).get("count")))
    digest = mapping(origin["held_out"] if evaluated else origin.get("contexts")).get("sha256")
    return ("evaluated" if evaluated else "tuned on", digest) if isinstance(digest, str) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
