"""The numbers of the report's tables and figures, worked out by hand from a run's files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from cdpg.report.figures import figures_of
from cdpg.report.series import clock_of, evaluated, logged, pairs
from cdpg.report.tables import tables_of
from report_runs import compare_folder, read_study, run_folder, write_json, write_lines

PER_EPOCH = 16 * 32
"""Samples of an epoch in these runs."""


def of(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": mean, "low": low, "high": high}


def table_of(folder: Path, name: str) -> Any:
    return next(table for table in tables_of(read_study([folder])) if table.name == name)


def rows_of(table: Any) -> dict[str, dict[str, str]]:
    return {row["model"]: row for row in csv.DictReader(io.StringIO(table.csv, newline=""))}


def test_satisfaction_of_a_comparison(tmp_path: Path) -> None:
    """The interval of ziegler holds the best mean, that of dpg ends below it."""
    folder = compare_folder(tmp_path, epochs=2)
    content = json.loads((folder / "comparison.json").read_text())
    given = {
        "base": of(0.25, 0.125, 0.375),
        "cdpg": of(0.5, 0.375, 0.625),
        "dpg": of(0.625, 0.5, 0.6875),
        "reinforce": of(0.75, 0.6875, 0.8125),
        "ziegler": of(0.6875, 0.5625, 0.765625),
    }
    for name, value in given.items():
        content["models"][name]["satisfaction"] = value
    content["changes"]["cdpg"]["satisfaction"]["difference"] = of(0.25, 0.1875, 0.3125)
    write_json(folder / "comparison.json", content)
    table = table_of(folder, "requirement")
    place = [column.title for column in table.columns].index("satisfaction")
    standing = {row.name: (row.cells[place].best, row.cells[place].near) for row in table.rows if row.name in given}
    assert standing == {
        "base": (False, False),
        "cdpg": (False, False),
        "dpg": (False, False),
        "reinforce": (True, False),
        "ziegler": (False, True),
    }
    row = rows_of(table)["cdpg"]
    columns = ["satisfaction", "satisfaction low", "satisfaction high"]
    columns += ["satisfaction change", "satisfaction change low", "satisfaction change high"]
    assert [row[column] for column in columns] == ["0.5", "0.375", "0.625", "0.25", "0.1875", "0.3125"]


def test_costs_are_added_up_over_the_epochs(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=2)
    content = json.loads((run / "evaluation.json").read_text())
    write_json(run / "evaluation.json", {key: value for key, value in content.items() if key != "costs"})
    lines = [{"epoch": 1, "tokens": 100, "seconds": 4.0}, {"epoch": 2, "tokens": 300, "seconds": 12.0}]
    write_lines(run / "metrics.jsonl", lines)
    (row,) = rows_of(table_of(run, "costs")).values()
    del row["model"]
    assert row == {
        "epochs": "2",
        "samples": "1024",
        "tokens": "400",
        "seconds": "16",
        "samples per second": "64",
    }


def test_one_metric_against_another(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=2)
    metrics = [
        {"kl_policy_base": of(kl, 0.0, 9.0), "satisfaction": of(b, 0.0, 1.0)} for kl, b in ((0.0, 0.25), (2.0, 0.75))
    ]
    write_lines(run / "evaluations.jsonl", [{"epoch": n, "metrics": found} for n, found in enumerate(metrics)])
    (group,) = read_study([run]).groups
    assert pairs(group, "kl_policy_base", "satisfaction") == [(0.0, 0.25), (2.0, 0.75)]
    assert pairs(group, "satisfaction", "kl_policy_base") == [(0.25, 0.0), (0.75, 2.0)]


def test_a_bin_of_epochs(tmp_path: Path) -> None:
    """400 epochs in 40 bins of 10: the mean stands in the middle, the band leaves out the lowest and the highest."""
    run = run_folder(tmp_path / "run", epochs=1)
    write_lines(run / "metrics.jsonl", [{"epoch": epoch, "ess": float(epoch)} for epoch in range(1, 401)])
    study = read_study([run])
    series = logged(study.groups[0], "ess", clock_of(study))
    assert series.x == tuple(PER_EPOCH * (10 * place + 5.5) for place in range(40))
    assert series.y == tuple(10 * place + 5.5 for place in range(40))
    assert series.low == tuple(10 * place + 2.0 for place in range(40))
    assert series.high == tuple(10 * place + 9.0 for place in range(40))


def test_a_band_over_seeds(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / f"cdpg-seed{seed}", epochs=2, seed=seed) for seed in range(2)]
    for run, values in zip(runs, ((0.25, 0.5), (0.75, 0.625)), strict=True):
        lines = [{"epoch": n, "metrics": {"satisfaction": of(b, 0.0, 1.0)}} for n, b in enumerate(values)]
        write_lines(run / "evaluations.jsonl", lines)
    study = read_study(runs)
    series = evaluated(study.groups[0], "satisfaction", clock_of(study))
    assert (series.x, series.y) == ((0.0, PER_EPOCH), (0.5, 0.5625))
    assert (series.low, series.high) == ((0.25, 0.5), (0.75, 0.625))


def chart_of(run: Path, name: str) -> Any:
    return next(chart for chart in figures_of(read_study([run])) if chart.name == name)


def test_shares_of_importance_weights(tmp_path: Path) -> None:
    """Three weights of 1/√10 and seven of √10, each with Ẑ = 1/10: the ends of the axis, 30 bins apart."""
    import matplotlib.pyplot as plt

    run = run_folder(tmp_path / "run", epochs=2)
    ten = 2.302585092994046
    samples = [{"epoch": 2, "log_ratio": exponent * ten, "log_z": -ten} for exponent in [-1.5] * 3 + [-0.5] * 7]
    write_lines(run / "samples.jsonl", samples)
    figure, axes = plt.subplots()
    try:
        chart_of(run, "importance-weights").draw(axes)
        line = axes.lines[0]
        middles, shares = map(list, (line.get_xdata(), line.get_ydata()))
    finally:
        plt.close(figure)
    assert shares == pytest.approx([0.3, *[0.0] * 28, 0.7])
    assert [middles[0], middles[-1]] == pytest.approx([10 ** (-0.5 + 0.5 / 30), 10 ** (0.5 - 0.5 / 30)])


def test_times_in_the_unit_of_their_axis(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=2)
    write_lines(run / "metrics.jsonl", [{"epoch": 1, "seconds": 150, "seconds_sampling": 90, "seconds_gradient": 45}])
    write_lines(run / "evaluations.jsonl", [{"epoch": 0, "seconds": 30}])
    drawn = chart_of(run, "time").draw.keywords
    (parts,) = drawn["rows"].values()
    assert drawn["xlabel"] == "minutes"
    assert {part: value for part, value in parts.items() if value} == {
        "sampling": 1.5,
        "gradient": 0.75,
        "evaluation": 0.5,
        "other": 0.25,
    }
