"""Gain along runs, against samples and against seconds of training: one column for each comparison.

    python benchmarks/gain_curves.py runs/compare-translation-numbers runs/compare-code-pep8 --output gain.png

Each folder is one of ``cdpg compare``. A line is the mean over the seeds of a method, on the held-out contexts that are
evaluated along the run; the shaded band spans the seeds. Seconds are those of the epochs, without evaluations.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from matplotlib.figure import Figure

from cdpg.methods import METHODS
from cdpg.report.style import BASE, rc_settings
from cdpg.storage.jsonl import read_jsonl
from cdpg.storage.run_folder import RunFolder

AXES = {"samples": "samples drawn", "seconds": "seconds of training"}


def points(run: RunFolder) -> dict[str, np.ndarray]:
    """``samples``, ``seconds`` and ``gain``, by evaluation."""
    seconds = np.cumsum([0.0, *(record["seconds"] for record in read_jsonl(run.metrics))])
    lines = [line for line in read_jsonl(run.evaluations) if line["metrics"].get("gain", {}).get("mean") is not None]
    if not lines:
        raise SystemExit(f"{run.path}: no evaluation has a gain; raise gain_draws and evaluate along the run")
    return {
        "samples": np.array([line["samples"] for line in lines], dtype=float),
        "seconds": np.array([seconds[line["epoch"]] for line in lines]),
        "gain": np.array([line["metrics"]["gain"]["mean"] for line in lines]),
    }


def by_method(folder: Path) -> dict[str, list[RunFolder]]:
    """The runs of a comparison."""
    found: dict[str, list[RunFolder]] = {}
    for config in sorted(folder.glob("*/config.yaml")):
        method = yaml.safe_load(config.read_text(encoding="utf-8"))["method"]
        found.setdefault(method, []).append(RunFolder(config.parent))
    if not found:
        raise SystemExit(f"{folder}: no runs; give a folder of 'cdpg compare'")
    return found


def draw(axes: Any, across: str, runs: dict[str, list[RunFolder]]) -> None:
    """The lines of one comparison."""
    for method, folders in runs.items():
        found = [points(run) for run in folders]
        gains = np.stack([values["gain"] for values in found])
        places = np.mean([values[across] for values in found], axis=0)
        colour = METHODS[method].style.color
        axes.plot(places, gains.mean(axis=0), color=colour, label=method)
        axes.fill_between(places, gains.min(axis=0), gains.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    axes.axhline(0, color=BASE.color, linewidth=0.8, linestyle=":")
    axes.set_xlabel(AXES[across])
    axes.set_xlim(left=0)


def figure(folders: Sequence[Path]) -> Figure:
    """A column for each comparison, a row for samples and one for seconds."""
    settings: Any = rc_settings()
    with matplotlib.rc_context(settings):
        found = Figure(figsize=(3.2 * len(folders), 4.8), layout="constrained")
        grid = found.subplots(len(AXES), len(folders), squeeze=False)
        for column, folder in enumerate(folders):
            runs = by_method(folder)
            for row, across in enumerate(AXES):
                draw(grid[row][column], across, runs)
            grid[0][column].set_title(folder.name.removeprefix("compare-"))
        for row in range(len(AXES)):
            grid[row][0].set_ylabel("gain, nats")
        grid[0][0].legend(frameon=False)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("gain.png"))
    options = parser.parse_args()
    figure(options.folders).savefig(options.output, dpi=160)


if __name__ == "__main__":
    main()
