"""Tables for the terminal: base → tuned, and several models side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cdpg.evaluation.catalogue import METRICS, POOLED, fixed
from cdpg.messages.text import safe_text

_FIRST = ("satisfaction", "satisfaction_beam", POOLED, "kl_target_policy", "kl_policy_base")


def print_models(
    console: Console,
    title: str,
    models: Mapping[str, Mapping[str, Any]],
    changes: Mapping[str, Any] | None = None,
    caution: str = "",
) -> None:
    """Print the table as wide as it likes into a file or a pipe, and in a terminal in the first form that fits.

    Intervals stand beside the means, or below them, or are left out. ``caution`` is a sentence to be said below.
    """
    tables = [models_table(title, models, changes, between) for between in (" ", "\n", None)]
    widths = [_width(console, table) for table in tables]
    if not console.is_terminal:
        console.width = max(console.width, widths[0])
    fitting = (table for table, width in zip(tables, widths, strict=True) if width <= console.width)
    console.print(next(fitting, tables[-1]))
    if caution:
        console.print(Text(caution), soft_wrap=True)


def models_table(
    title: str,
    models: Mapping[str, Mapping[str, Any]],
    changes: Mapping[str, Any] | None = None,
    between: str | None = " ",
) -> Table:
    """A row for each metric, a column for each model; with one tuned model also its ratio to the base.

    ``between`` stands between a mean and its interval; None leaves intervals out.
    """
    table = Table(title=safe_text(title), title_justify="left")
    if between is None:
        table.caption = "a wider terminal shows intervals, too"
    table.add_column("metric")
    for name in models:
        table.add_column(safe_text(name), justify="right")
    ratios = next(iter(changes.values())) if changes and len(changes) == 1 else None
    if ratios is not None:
        table.add_column("ratio to base", justify="right")
    names = dict.fromkeys(metric for found in models.values() for metric in found)
    for metric in sorted(
        names, key=lambda name: (name not in _FIRST, list(METRICS).index(name) if name in METRICS else 99)
    ):
        row = [with_interval(metric, found.get(metric), between) for found in models.values()]
        if ratios is not None:
            row.append(with_interval("ratio", ratios.get(metric, {}).get("ratio"), between))
        table.add_row(METRICS[metric].label if metric in METRICS else safe_text(metric), *row)
    return table


def _width(console: Console, table: Table) -> int:
    """What the table takes with nothing wrapped."""
    return console.measure(table, options=console.options.update_width(10_000)).maximum


def with_interval(metric: str, value: Mapping[str, float | None] | None, between: str | None = " ") -> str:
    """``0.412 [0.380, 0.440]``; a dash where nothing is known. Rich would read the brackets as markup."""
    if value is None or (mean := value["mean"]) is None:
        return "–"
    digits = METRICS[metric].digits if metric in METRICS else 2
    low, high = value["low"], value["high"]
    shown = fixed(mean, digits)
    if between is None or low is None or high is None:
        return shown
    return f"{shown}{between}\\[{fixed(low, digits)}, {fixed(high, digits)}]"
