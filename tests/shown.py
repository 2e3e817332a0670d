"""What a report shows, as numbers: what Matplotlib is told to draw, and the tables and cards of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from typing import Any

from matplotlib.colors import to_hex
from matplotlib.figure import Figure


@contextmanager
def figures_seen(draws: bool = True) -> Iterator[list[dict[str, Any]]]:
    """Within it, the figures that are saved; each is looked at when its layout is done.

    Without ``draws`` nothing is laid out and what is saved is empty, which is much faster.
    """
    seen: list[dict[str, Any]] = []
    save = Figure.savefig

    def savefig(figure: Figure, file: Any, **options: Any) -> None:
        if draws:
            save(figure, file, **options)
        else:
            file.write(b'<svg width="1pt" height="1pt" viewBox="0 0 1 1" xmlns="http://www.w3.org/2000/svg"/>')
        seen.append(_read(figure))

    Figure.savefig = savefig  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Figure.savefig = save  # type: ignore[method-assign]


def _read(figure: Figure) -> dict[str, Any]:
    (axes,) = figure.axes
    lines = [
        {
            "color": to_hex(line.get_color()),
            "points": line.get_xydata().tolist(),  # type: ignore[union-attr]
            "on_page": _on_page(figure, axes.transData.transform(line.get_xydata())),
            "spans": line.get_transform() != axes.transData,
        }
        for line in axes.lines
    ]
    bands = [
        {"color": to_hex(band.get_facecolor()[0]), "points": band.get_paths()[0].vertices.tolist()}  # type: ignore[index]
        for band in axes.collections
    ]
    bars = [
        {"color": to_hex(bar.get_facecolor()), "from": bar.get_x(), "length": bar.get_width(), "row": bar.get_y()}
        for bar in axes.patches
    ]
    names = [label.get_text() for label in axes.get_yticklabels()]
    return {
        "x": axes.get_xlabel(), "y": axes.get_ylabel(), "lines": lines, "bands": bands, "bars": bars, "names": names
    }  # fmt: skip


def _on_page(figure: Figure, points: Any) -> list[list[float]]:
    """Pixels of the figure as coordinates of an SVG file: 72 to the inch, from the top."""
    scale = 72 / figure.dpi
    return [[x * scale, 72 * figure.get_figheight() - y * scale] for x, y in points.tolist()]


def matches(shown: str, expected: float | None) -> bool:
    """Whether a number is what a text shows, to half a unit of its last digit; a dash stands for none."""
    if expected is None or shown == "–":
        return expected is None and shown == "–"
    plain = shown.replace("−", "-").replace(",", "")
    decimals = len(plain.partition(".")[2])
    enough = decimals > 0 or expected == round(expected)
    return enough and abs(float(plain) - expected) <= 0.5 * 10**-decimals + 1e-9


def numbers(text: str) -> list[str]:
    """The numbers of a text, in its order."""
    return re.findall(r"[-−+]?\d[\d,]*(?:\.\d+)?", text)


_HEADINGS = ("h2", "h3", "h4")


class Page(HTMLParser):
    """The tables, cards, drawings and embedded data of a report."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
        """Cells by the table's name, the row's name and the column's title."""
        self.cards: dict[str, str] = {}
        """The text of each card by its method."""
        self.paths: dict[str, list[dict[str, str]]] = {}
        """Attributes of every path, by the figure's name."""
        self.csv = ""
        self._table = self._row = self._figure = self._card = ""
        self._cell: dict[str, Any] | None = None
        self._inside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        if tag == "table":
            self._table = given["id"].removeprefix("t-")
            self.tables[self._table] = {}
        elif tag == "th" and given.get("scope") == "row":
            self._row, self._inside = "", ["row"]
        elif tag == "td":
            self._cell = {"shown": "", "smalls": [], "best": given.get("class") == "best", "near": False}
            self._cell["sort"] = float(given["data-sort"]) if "data-sort" in given else None
            self.tables[self._table].setdefault(self._row, {})[given["data-label"]] = self._cell
        elif tag == "span" and given.get("class") == "star" and self._cell is not None:
            self._cell["near"] = not self._cell["best"]
            self._inside = ["star"]
        elif tag in ("b", "small") and self._cell is not None:
            self._inside = [tag]
            self._cell["smalls"] += [""] * (tag == "small")
        elif tag == "figure":
            self._figure = given["id"].removeprefix("f-")
            self.paths[self._figure] = []
        elif tag == "path" and self._figure:
            self.paths[self._figure].append(given)
        elif tag == "div" and given.get("class") == "card":
            self._inside = ["card"]
        elif tag in _HEADINGS and self._inside[:1] == ["card"]:
            self._inside = ["card", "title"]
        elif tag == "script" and given.get("id") == "csv-data":
            self._inside = ["csv"]

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self._cell = None
        if tag in ("th", "td", "small", "b", "script") or (tag == "dl" and self._inside[:1] == ["card"]):
            self._inside = []
        elif tag in _HEADINGS and self._inside == ["card", "title"]:
            self._inside = ["card", "text"]
        elif tag == "figure":
            self._figure = ""

    def handle_data(self, data: str) -> None:
        place = self._inside[-1] if self._inside else ""
        if place == "row":
            self._row += data
        elif place == "b" and self._cell is not None:
            self._cell["shown"] += data
        elif place == "small" and self._cell is not None:
            self._cell["smalls"][-1] += data
        elif place == "title":
            self._card = data
            self.cards[data] = ""
        elif place == "text":
            self.cards[self._card] += f" {data}"
        elif place == "csv":
            self.csv += data


def points(path: str) -> list[list[float]]:
    """The corners of a path of straight lines."""
    return [list(map(float, pair)) for pair in re.findall(r"[ML] ?(-?[\d.]+)[ ,](-?[\d.]+)", path)]
