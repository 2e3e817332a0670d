"""Tables for the terminal: base → tuned, and several models side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cdpg.evaluation.metrics import GAIN, METRICS, POOLED, RECALL, Metric, fixed
from cdpg.messages.text import safe_text

_FIRST = ("satisfaction", "satisfaction_beam", GAIN, RECALL, POOLED, "kl_target_policy", "kl_policy_base")


def print_models(
    console: Console,
    title: str,
    models: Mapping[str, Mapping[str, Any]],
    changes: Mapping[str, Any] | None = None,
    caution: str = "",
    metrics: Mapping[str, Metric] = METRICS,
) -> None:
    """Print the table at full width to a file or a pipe, and in a terminal in the first form that fits.

    Intervals are shown beside the means, below them, or not at all. ``caution`` is a sentence below the table.
    ``metrics`` says how each is shown; one that is not there is shown by its name.
    """
    tables = [models_table(title, models, changes, between, metrics) for between in (" ", "\n", None)]
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
    metrics: Mapping[str, Metric] = METRICS,
) -> Table:
    """A row for each metric, a column for each model; with one tuned model also its ratio to the base.

    ``between`` is put between a mean and its interval; None leaves intervals out.
    """
    table = Table(title=safe_text(title), title_justify="left")
    if between is None:
        table.caption = "a wider terminal also shows intervals"
    table.add_column("metric")
    for name in models:
        table.add_column(safe_text(name), justify="right")
    ratios = next(iter(changes.values())) if changes and len(changes) == 1 else None
    if ratios is not None:
        table.add_column("ratio to base", justify="right")
    names = dict.fromkeys(metric for found in models.values() for metric in found)
    order = {name: place for place, name in enumerate(metrics)}
    for name in sorted(names, key=lambda name: (name not in _FIRST, order.get(name, len(order)))):
        metric = metrics.get(name)
        digits = 2 if metric is None else metric.digits
        row = [with_interval(found.get(name), digits, between) for found in models.values()]
        if ratios is not None:
            row.append(with_interval(ratios.get(name, {}).get("ratio"), 2, between))
        table.add_row(safe_text(name if metric is None else metric.label), *row)
    return table


def _width(console: Console, table: Table) -> int:
    """The width of the table without wrapping."""
    return console.measure(table, options=console.options.update_width(10_000)).maximum


def with_interval(value: Mapping[str, float | None] | None, digits: int, between: str | None = " ") -> str:
    """``0.412 [0.380, 0.440]``, or a dash without a value; not to be read as Rich markup."""
    if value is None or (mean := value["mean"]) is None:
        return "–"
    low, high = value["low"], value["high"]
    shown = fixed(mean, digits)
    if between is None or low is None or high is None:
        return shown
    return f"{shown}{between}\\[{fixed(low, digits)}, {fixed(high, digits)}]"
