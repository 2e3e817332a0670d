"""Reports whose figures are left empty: painting takes three quarters of the time of a report.

For tests that look at something else. test_report.py and test_values.py paint every kind of figure.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

IN_A_FORK = {"CDPG_TESTS_UNPAINTED": "1"}
"""For the environment of a process that ``warm.py`` starts."""


@contextmanager
def unpainted() -> Iterator[None]:
    """Within it, figures get all that is drawn into them and are then left empty."""
    from matplotlib.figure import Figure

    def leave(figure: Figure, file: io.BytesIO, **options: Any) -> None:
        file.write(b'<svg xmlns="http://www.w3.org/2000/svg"/>')

    save = Figure.savefig
    Figure.savefig = leave  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Figure.savefig = save  # type: ignore[method-assign]


@contextmanager
def painted_if(chosen: Callable[[str], bool]) -> Iterator[None]:
    """Within it, a page has the figures whose names are chosen, and the others are left empty."""
    from cdpg.report import page

    paint = page.to_svg
    page.to_svg = lambda chart: paint(chart) if chosen(chart.name) else EMPTY
    try:
        yield
    finally:
        page.to_svg = paint


EMPTY = "<svg></svg>"


def is_one_of_a_kind(name: str) -> bool:
    """Of the figures that show a metric through training, which are drawn alike, only one."""
    return "training-" not in name or name.endswith("training-satisfaction")
