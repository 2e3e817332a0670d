"""Figures of frequencies in the outputs: counters of the final evaluation, and token frequency against rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from cdpg.evaluation.metrics import Count
from cdpg.methods import Style
from cdpg.report.charts import Chart, Line, capital, draw_bars, draw_lines, stem
from cdpg.report.series import Series, thinned
from cdpg.report.study import BASE_NAME, Study
from cdpg.report.style import BASE
from cdpg.report.values import count, distinct, short
from cdpg.storage.json_files import mapping, sequence

MOST_NAMES = 12
"""Bars of a counter: the most frequent names."""


def frequencies(study: Study) -> Iterator[Chart]:
    """Counters of the final evaluation (the paper's figure 5): shares of outcomes, counts of codes and labels."""
    per_model = mapping(study.evaluation.get("frequencies"))
    names = dict.fromkeys(name for counters in per_model.values() for name in mapping(counters))
    for counter in names:
        if counter == "token_rank":
            continue
        values = {label: counts for label, _, counts in _counted(study, counter) if counts}
        styles = {label: style for label, style, _ in _counted(study, counter)}
        if not values:
            continue
        shown = study.known_counts.get(counter) or Count(capital(short(counter).replace("_", " ")))
        if shown.exclusive:
            values = {label: _shares(counts) for label, counts in values.items()}
        values, left_out = _most_frequent(values)
        caption = "Relative frequency over all outputs." if shown.exclusive else "Absolute numbers over all outputs."
        if left_out:
            caption += f" The {MOST_NAMES} most frequent; {left_out} more are not shown."
        rows = len({name for counts in values.values() for name in counts})
        yield Chart(
            f"frequency-{stem(counter)}",
            short(shown.title, 60),
            caption,
            partial(draw_bars, values=values, styles=styles, xlabel=short(shown.unit), digits=3 * shown.exclusive),
            width=5.4,
            height=min(14.0, 1.1 + rows * (0.14 + 0.125 * len(values))),
            section="frequencies",
        )


def token_ranks(study: Study) -> Iterator[Chart]:
    """Token frequency against rank (the paper's figure 6), both axes logarithmic."""
    lines = []
    for label, style, counts in _counted(study, "token_rank"):
        total = math.fsum(counts.values())
        frequencies = [value / total for value in sorted(counts.values(), reverse=True) if value > 0] if total else []
        points = thinned(frequencies, 160, logarithmic=True)
        if len(points) > 1:
            x, y = tuple(float(place + 1) for place, _ in points), tuple(value for _, value in points)
            lines.append(Line(label, style, Series(x, y, (None,) * len(x), (None,) * len(x)), steps=False))
    if lines:
        yield Chart(
            "token-rank",
            "Token frequency against rank",
            "A model that falls back on few tokens has a steeper or a shorter line than the base.",
            partial(
                draw_lines,
                lines=lines,
                xlabel="rank of the token",
                ylabel="share of all tokens",
                log_x=True,
                log_y=True,
            ),
            section="frequencies",
        )


def _counted(study: Study, counter: str) -> Iterator[tuple[str, Style, dict[str, float]]]:
    """The base and every group with its counts; means over seeds."""
    per_model = mapping(study.evaluation.get("frequencies"))
    bases = tuple(dict.fromkeys([BASE_NAME, *study.bases.values()]))
    rows: list[tuple[str, Style, tuple[str, ...]]] = [("base", BASE, bases)]
    rows += [(group.label, group.style, group.models) for group in study.groups]
    for label, style, models in rows:
        found = [_counts(mapping(per_model.get(model)).get(counter)) for model in models]
        found = [counts for counts in found if counts]
        names = dict.fromkeys(name for counts in found for name in counts)
        yield label, style, {name: math.fsum(part.get(name, 0.0) for part in found) / len(found) for name in names}


def _counts(value: Any) -> dict[str, float]:
    items = (
        mapping(value).items()
        if isinstance(value, dict)
        else ((str(i), item) for i, item in enumerate(sequence(value)))
    )
    known = ((name, count(item)) for name, item in items)
    return {name: item for name, item in known if item is not None}


def _shares(counts: dict[str, float]) -> dict[str, float]:
    total = math.fsum(counts.values())
    return {name: value / total for name, value in counts.items()} if total else {}


def _most_frequent(values: dict[str, dict[str, float]]) -> tuple[dict[str, dict[str, float]], int]:
    """The counts of the most frequent names, under names to show, and how many are left out."""
    names = dict.fromkeys(name for counts in values.values() for name in counts)
    order = sorted(names, key=lambda name: -max(counts.get(name, 0.0) for counts in values.values()))
    kept = dict(zip(order[:MOST_NAMES], distinct(order[:MOST_NAMES], 28), strict=True))
    shown = {label: {kept[name]: counts.get(name, 0.0) for name in kept} for label, counts in values.items()}
    return shown, len(order) - len(kept)
