"""Colours, markers and dashes, the same in every figure of every report; each method has its own in its file.

The colours were chosen to maximise the smallest distance between any two of them under normal sight and under simulated
protanopia, deuteranopia and tritanopia, with enough contrast to serve as text. Markers and dashes
identify the methods in print without colour. Each colour has a counterpart for dark pages, which a style sheet
substitutes, so that a figure is drawn once.
"""

from __future__ import annotations

from typing import Any

from cdpg.methods import METHODS, Style

BASE = Style("#30363d", "#d0d6dd", "", (1.2, 1.6))
OTHERS: tuple[Style, ...] = (
    Style("#b3204d", "#ff8fa8", "v", (6.0, 1.5, 1.0, 1.5)),
    Style("#4c6b00", "#b5d24b", "P", (4.0, 1.2)),
    Style("#006d7a", "#4fd0de", "X", (7.0, 2.0)),
    Style("#5b4bc4", "#a99bff", "h", (1.0, 1.0)),
)
"""Styles for further runs of a method and for unknown methods, in order; then from the start again."""

STAGES: dict[str, tuple[str, str]] = {
    "sampling": ("#33339a", "#8f9bff"),
    "constraint": ("#d9b84a", "#e8cf78"),
    "base": ("#3aa38f", "#57c9b4"),
    "gradient": ("#8c2455", "#e0709f"),
    "evaluation": ("#86c5ea", "#a7daf7"),
    "other": ("#9aa1a9", "#7d858e"),
}
"""Stages of a run's time, with their colours on light and dark pages."""

ACCENT = ("#0b6fd8", "#5a97fa")
"""The colour of figures that show one thing alone, on light and dark pages."""
INK = ("#1c2126", "#e6eaef")
MUTED = ("#59626c", "#a3adb8")
GRID = ("#e3e7eb", "#2e353d")
PAPER = ("#fefefe", "#14181d")
"""Colours of text, secondary text, grid lines and background, on light and dark pages."""


def dark_twins() -> dict[str, str]:
    """Every colour of the figures, and its replacement on a dark page."""
    styles = (BASE, *(method.style for method in METHODS.values()), *OTHERS)
    return dict([ACCENT, INK, MUTED, GRID, PAPER, *STAGES.values(), *((style.color, style.dark) for style in styles)])


def rc_settings() -> dict[str, Any]:
    """Settings of Matplotlib for one figure at a time; text is never read as mathematics."""
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": MUTED[0],
        "axes.facecolor": "none",
        "axes.formatter.use_mathtext": False,
        "axes.grid": True,
        "axes.labelcolor": INK[0],
        "axes.labelsize": 9,
        "axes.linewidth": 0.8,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.unicode_minus": True,
        "figure.facecolor": "none",
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "grid.color": GRID[0],
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "pdf.fonttype": 42,
        "savefig.dpi": 300,
        "svg.fonttype": "none",
        "text.color": INK[0],
        "text.parse_math": False,
        "text.usetex": False,
        "xtick.color": MUTED[0],
        "xtick.labelsize": 8.5,
        "xtick.major.size": 3,
        "ytick.color": MUTED[0],
        "ytick.labelsize": 8.5,
        "ytick.major.size": 0,
    }
