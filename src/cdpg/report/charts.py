"""Kinds of chart, each drawn into the axes of a figure of its own; global settings change only while a figure is drawn.

Lines carry their names at their right end, so that no legend is needed. Names that would overlap are moved
apart.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from cdpg.methods import Style
from cdpg.report.series import Series
from cdpg.report.style import BASE, INK, MUTED, rc_settings
from cdpg.report.svg import fit_for_page

_LEAST_SPAN = 0.12
"""The vertical axis spans at least this share of its values, so that noise does not fill a figure."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Line:
    """A named line."""

    label: str
    style: Style
    series: Series
    steps: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure that has not been drawn yet."""

    name: str
    """Stem of its file."""
    title: str
    caption: str
    """The content of the figure, in a sentence or two."""
    draw: Callable[[Any], None]
    """Draws into axes."""
    width: float = 4.4
    height: float = 2.9
    """In inches."""
    section: str = "training"


def stem(name: str) -> str:
    """Safe as a file name and as an identifier."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "metric"


def capital(label: str) -> str:
    """A label with a capital; a symbol is unchanged."""
    return label if "(" in label.partition(" ")[0] else label[:1].upper() + label[1:]


def to_svg(chart: Chart) -> str:
    """The chart as an ``svg`` element."""
    with _settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the browser has letters that the font lacks
        matplotlib.rcParams["svg.hashsalt"] = chart.name
        buffer = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        _figure(chart).savefig(buffer, format="svg", metadata=nothing)
    return fit_for_page(buffer.getvalue(), chart.name, chart.title)


def to_file(chart: Chart, path: Path) -> None:
    """Write the chart in the format of the file's suffix, on white; the bytes are reproducible."""
    metadata: dict[str, Any] = {"CreationDate": None} if path.suffix == ".pdf" else {}
    with _settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        _figure(chart).savefig(path, metadata=metadata, facecolor="white")


def _settings() -> Any:
    """Matplotlib's settings for one figure; they are restored afterwards."""
    settings: Any = rc_settings()
    return matplotlib.rc_context(settings)


def _figure(chart: Chart) -> Any:
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    figure = Figure(figsize=(chart.width, chart.height), layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    chart.draw(axes)
    return figure


def draw_lines(
    axes: Any,
    lines: Sequence[Line],
    xlabel: str,
    ylabel: str,
    *,
    base: float | None = None,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
) -> None:
    """Lines with bands and names; ``base`` is drawn as a horizontal line."""
    for line in lines:
        x, y = line.series.x, line.series.y
        _band(axes, line)
        few = len(x) <= 30 and not line.steps
        axes.plot(
            x,
            y,
            color=line.style.color,
            linewidth=1.8,
            linestyle=(0, line.style.dash) if line.style.dash else "-",
            drawstyle="steps-mid" if line.steps else "default",
            marker=line.style.marker if few else "",
            markersize=4,
            markeredgewidth=0,
        )
    if base is not None:
        axes.axhline(base, color=BASE.color, linewidth=1.1, linestyle=(0, BASE.dash))
    axes.set(xlabel=xlabel, ylabel=ylabel)
    _scale(axes, lines, log_x, log_y, from_zero)
    ends = [(line.label, line.style.color, line.series.y[-1]) for line in lines if line.series]
    _name_ends(axes, [*ends, ("base", BASE.color, base)] if base is not None else ends, log_y)


def draw_bars(
    axes: Any, values: Mapping[str, Mapping[str, float]], styles: Mapping[str, Style], xlabel: str, digits: int
) -> None:
    """Groups of horizontal bars: for each name a bar for each model, with its value at the end."""
    names = list(dict.fromkeys(name for of_model in values.values() for name in of_model))
    thickness = 0.82 / max(1, len(values))
    for place, (model, of_model) in enumerate(values.items()):
        style = styles[model]
        heights = [row + (place - (len(values) - 1) / 2) * thickness for row in range(len(names))]
        lengths = [of_model.get(name, 0.0) for name in names]
        axes.barh(heights, lengths, thickness * 0.88, color=style.color, label=model, linewidth=0)
        for height, length in zip(heights, lengths, strict=True):
            axes.annotate(
                compact(length, digits),
                (length, height),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
                color=MUTED[0],
            )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(xlabel)
    axes.margins(x=0.12, y=0.02)
    axes.grid(False, axis="y")
    plain(axes.xaxis)
    _legend_above(axes, len(values))


def draw_stacks(
    axes: Any, rows: Mapping[str, Mapping[str, float]], colors: Mapping[str, tuple[str, str]], xlabel: str
) -> None:
    """One stacked horizontal bar a row, with its total at the end."""
    parts = [part for part in colors if any(row.get(part, 0) > 0 for row in rows.values())]
    for place, row in enumerate(rows.values()):
        left = 0.0
        for part in parts:
            label = part if place == 0 else None
            axes.barh(place, row.get(part, 0.0), 0.6, left, color=colors[part][0], label=label, linewidth=0)
            left += row.get(part, 0.0)
        axes.annotate(
            compact(left, 2), (left, place), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK[0]
        )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel(xlabel)
    axes.margins(x=0.1)
    axes.grid(False, axis="y")
    plain(axes.xaxis)
    _legend_above(axes, len(parts))


def mark_level(axes: Any, value: float, label: str, *, upright: bool = False) -> None:
    """A thin line across the axes with a label."""
    if upright:
        axes.axvline(value, color=MUTED[0], linewidth=0.9)
        where, anchor = (value, 1.0), axes.get_xaxis_transform()
    else:
        axes.axhline(value, color=MUTED[0], linewidth=0.9)
        where, anchor = (1.0, value), axes.get_yaxis_transform()
    side = "center" if upright else "right"
    axes.text(*where, label, transform=anchor, va="bottom", ha=side, fontsize=8, color=INK[0])


def use_log(axis: Any, low: float, high: float) -> None:
    """A logarithmic axis with plain-text tick labels: 10⁻³."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, -(-(last - first) // 6))
    axis._set_axes_scale("log")
    axis.set_major_locator(FixedLocator([10.0**power for power in range(first, last + 1, step)]))
    axis.set_major_formatter(FuncFormatter(_power))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def plain(axis: Any) -> None:
    """A few ticks with compact numbers."""
    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))


def compact(value: float, digits: int | None = None) -> str:
    """A number for an axis: 1,500 is 1.5k."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}".replace("-", "−")
    written = f"{value:.4g}" if digits is None else f"{value:.{digits}f}"
    if digits and "." in written:
        written = written.rstrip("0").rstrip(".") if value == round(value) else written
    return written.replace("-", "−")


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near as possible to ``wanted``, in the same order, ``gap`` apart, within bounds if they fit."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    blocks: list[list[float]] = []  # centre and size of each run of names that touch
    for index in order:
        blocks.append([wanted[index], 1])
        while True:
            for block in blocks[-2:]:
                half = (block[1] - 1) * gap / 2
                block[0] = min(max(block[0], low + half), high - half)
            if len(blocks) < 2:
                break
            (first, size), (second, more) = blocks[-2:]
            if second - first >= gap * (size + more) / 2 - 1e-12:
                break
            blocks[-2:] = [[(first * size + second * more) / (size + more), size + more]]
    places = [centre + (step - (size - 1) / 2) * gap for centre, size in blocks for step in range(int(size))]
    result = [0.0] * len(wanted)
    for index, place in zip(order, places, strict=True):
        result[index] = place
    return result


def _band(axes: Any, line: Line) -> None:
    rows = zip(line.series.x, line.series.low, line.series.high, strict=True)
    known = [(x, low, high) for x, low, high in rows if low is not None and high is not None]
    if len(known) > 1:
        x, low, high = zip(*known, strict=True)
        axes.fill_between(x, low, high, color=line.style.color, alpha=0.16, linewidth=0)


def _scale(axes: Any, lines: Sequence[Line], log_x: bool, log_y: bool, from_zero: bool) -> None:
    xs = [x for line in lines for x in line.series.x if x > 0]
    ys = [y for line in lines for y in line.series.y if y > 0]
    if log_x and xs:
        use_log(axes.xaxis, min(xs), max(xs))
    else:
        plain(axes.xaxis)
    if log_y and ys:
        use_log(axes.yaxis, min(ys), max(ys))
        return
    low, high = axes.get_ylim()
    if from_zero or (ys and min(y for line in lines for y in line.series.y) >= 0 and low < 0.35 * high):
        axes.set_ylim(0, high if high > 0 else 1)
    elif high - low < _LEAST_SPAN * abs(high):
        middle, half = (low + high) / 2, _LEAST_SPAN * abs(high) / 2
        axes.set_ylim(middle - half, middle + half)
    plain(axes.yaxis)


def _name_ends(axes: Any, ends: Sequence[tuple[str, str, float | None]], log_y: bool) -> None:
    """Each line's name beside its last value; names that would overlap are moved apart."""
    low, high = axes.get_ylim()
    known = [(label, color, value) for label, color, value in ends if value is not None]
    if log_y:
        low, high = math.log10(low), math.log10(high)
        known = [(label, color, math.log10(value)) for label, color, value in known if value > 0]
    heights = [(value - low) / (high - low) for _, _, value in known]
    gap = 10.5 / (72 * 0.72 * axes.figure.get_figheight())
    for (label, color, _), height in zip(known, spread(heights, gap, 0.0, 1.0), strict=True):
        axes.text(
            1.02, height, label, transform=axes.transAxes, color=color, fontsize=8.5, va="center", fontweight="bold"
        )


def _legend_above(axes: Any, entries: int) -> None:
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=min(entries, 6),
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=0.9,
        handletextpad=0.4,
        borderaxespad=0.2,
        labelcolor=INK[0],
    )


def _power(value: float, _: Any = None) -> str:
    if value <= 0:
        return ""
    return f"10{str(round(math.log10(value))).translate(_SUPERSCRIPTS)}"
