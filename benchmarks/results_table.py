"""The Markdown tables of docs/results.md, from the files of runs.

python benchmarks/results_table.py runs/compare-code-compilability/comparison.json
python benchmarks/results_table.py runs/demo/evaluation.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cdpg.evaluation.held_out import contexts_in_words
from cdpg.evaluation.metrics import Metric
from cdpg.tasks import known_metrics


def shown(metric: Metric, value: dict[str, float | None] | None) -> str:
    """``0.61 [0.59, 0.64]``."""
    if value is None or value["mean"] is None:
        return "–"
    mean, low, high = (f"{value[key] or 0.0:.{metric.digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def table(result: dict[str, Any]) -> list[str]:
    """A row for each metric, a column for each model."""
    models = result.get("models") or {name: result[name] for name in ("base", "tuned")}
    known = known_metrics(result)
    names = [metric for metric in known if any(metric in found for found in models.values())]
    lines = ["| metric | " + " | ".join(models) + " |", "| --- |" + " --- |" * len(models)]
    for metric in names:
        cells = (shown(known[metric], found.get(metric)) for found in models.values())
        lines.append(f"| {known[metric].label} | " + " | ".join(cells) + " |")
    costs = result.get("costs", {})
    if costs:
        minutes = (f"{costs[name]['seconds'] / 60:.1f}" if name in costs else "–" for name in models)
        lines.append("| minutes of training | " + " | ".join(minutes) + " |")
    return lines


def ratios(result: dict[str, Any]) -> list[str]:
    """Satisfaction against the base, and outputs against the ideal model."""
    known = known_metrics(result)
    lines = ["| model | satisfaction, ratio to the base | model / ideal |", "| --- | --- | --- |"]
    for name, changes in result["changes"].items():
        versus = result["versus_ideal"][name]
        near = ", ".join(
            f"{known[metric].label} {value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
            for metric, value in versus.items()
            if metric in ("length", "characters", "ast_nodes") and value["mean"] is not None
        )
        gain = changes["satisfaction"]["ratio"]
        lines.append(f"| {name} | {gain['mean']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}] | {near} |")
    return lines


def between(result: dict[str, Any]) -> list[str]:
    """Differences from the first method, paired by context; nothing where one model alone stands beside the base."""
    lines, known = list[str](), known_metrics(result)
    for first, others in result.get("between", {}).items():
        names = [metric for metric in known if any(metric in found for found in others.values())]
        lines += ["", f"| difference from {first} | " + " | ".join(others) + " |", "| --- |" + " --- |" * len(others)]
        for metric in names:
            cells = (shown(known[metric], found.get(metric, {}).get("difference")) for found in others.values())
            lines.append(f"| {known[metric].label} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    for path in sys.argv[1:]:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        about = f"{contexts_in_words(result)}, {result['samples_per_context']} samples each"
        sys.stdout.write("\n".join([about, "", *table(result), "", *ratios(result), *between(result), ""]) + "\n")


if __name__ == "__main__":
    main()
