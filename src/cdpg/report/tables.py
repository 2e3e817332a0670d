"""Tables of a study: cells with text, a sort key and a value for CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cdpg.evaluation.metrics import GAIN, POOLED, RECALL, Metric
from cdpg.methods import label_of
from cdpg.report.figures import axis_label
from cdpg.report.study import Study
from cdpg.report.values import MeanInterval, count, interval, number, short, visible
from cdpg.storage.json_files import mapping, sequence

_GROUPS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "requirement": (
        "The requirement, and how far the model moved",
        ("satisfaction", "satisfaction_beam", GAIN, RECALL, POOLED, "kl_target_policy", "kl_policy_base"),
        (),
    ),
    "outputs": ("The outputs", (), ("distinct_2", "length", "ended")),
    "sampling": (
        "The target and the weights",
        ("coverage", "z_mean", "z_nstd", "z_nstd_corrected", "ess", "checks_failed", "not_applicable"),
        (),
    ),
}
"""The title of each table, and the metrics of every evaluation that are shown before and after the task's own."""
MOST_COLUMNS = 6
"""Columns side by side; a wider table continues below, in parts of about equal width."""
_FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "|", "%")
_PLAIN_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Cell:
    """One figure."""

    shown: str
    note: str = ""
    """A second line: the interval."""
    change: str = ""
    """A third line: the change against the base."""
    sort: float | None = None
    best: bool = False
    near: bool = False
    """Not distinguishable from the best: its interval contains the best's mean."""


@dataclass(frozen=True)
class Column:
    title: str
    hint: str = ""
    better: str = ""
    """``higher``, ``lower`` or nothing."""


@dataclass(frozen=True)
class TableRow:
    name: str
    color: str
    cells: tuple[Cell, ...]
    quiet: bool = False
    """No model of this study: the base, the ideal."""


@dataclass(frozen=True)
class Table:
    name: str
    """Stem of its file."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    csv: str
    first: str = "model"
    """Title of the column of names."""


def tables_of(study: Study) -> list[Table]:
    """All tables for which the study has figures."""
    tables = [_metric_table(study, *group) for group in _grouped(study, study.metrics)]
    found = (*_seeds(study), *tables, *_between(study), *_ideal(study), *_costs(study))
    return [dataclasses.replace(part, name=study.key + part.name) for table in found for part in split_table(table)]


def split_table(table: Table) -> Iterator[Table]:
    """A table split into tables of about equal width that fit a page; the first one's CSV holds all columns."""
    count = max(1, -(-len(table.columns) // MOST_COLUMNS))
    width = max(1, -(-len(table.columns) // count))
    for part in range(count):
        span = slice(part * width, (part + 1) * width)
        rows = tuple(dataclasses.replace(row, cells=row.cells[span]) for row in table.rows)
        title, content = (table.title, table.csv) if part == 0 else ("", "")
        name = table.name if part == 0 else f"{table.name}-{part + 1}"
        yield dataclasses.replace(table, name=name, title=title, columns=table.columns[span], rows=rows, csv=content)


def to_csv(rows: Sequence[Sequence[object]]) -> str:
    """Comma-separated values in which a spreadsheet finds no formula."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\r\n").writerows([[neutral(cell) for cell in row] for row in rows])
    return buffer.getvalue()


def neutral(cell: object) -> str:
    """A cell as text; one that a spreadsheet would run as a formula is preceded by an apostrophe.

    So is each part between semicolons, where spreadsheets of many countries begin a new cell.
    """
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.10g}"
    written = visible(str(cell)).replace("\n", " ").replace("\t", " ")
    return ";".join(f"'{part}" if _is_formula(part) else part for part in written.split(";"))


def _is_formula(text: str) -> bool:
    return text.lstrip()[:1] in _FORMULA_STARTS and _PLAIN_NUMBER.fullmatch(text) is None


def written(value: float, digits: int, signed: bool = False) -> str:
    """A number with its decimals, with more of them if it would round to zero, and a true minus sign."""
    if value and abs(value) < 0.5 * 10**-digits:
        digits = min(8, -math.floor(math.log10(abs(value))))
    result = f"{value:{'+' if signed else ''},.{digits}f}"
    if not float(result.replace(",", "")):
        result = f"{0:.{digits}f}"
    return result.replace("-", "−")


def duration(seconds: float) -> str:
    """1 h 12 min, 3 min 20 s, 4.1 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _grouped(study: Study, names: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Key, title and metrics of each table."""
    general = {name for _, before, after in _GROUPS.values() for name in (*before, *after)}
    own = [name for name in study.known_metrics if name in names and name not in general]
    for key, (title, before, after) in _GROUPS.items():
        members = (*before, *(name for name in own if study.describe(name).group == key), *after)
        found = [name for name in members if name in names]
        if found:
            yield key, title, found
    others = [name for name in names if name not in general and name not in own]
    if others:
        yield "other", "Other metrics", others[:60]


def _metric_table(study: Study, key: str, title: str, names: Sequence[str]) -> Table:
    ideal = mapping(study.evaluation.get("ideal"))
    rows = []
    for model in study.models:
        cells = tuple(_cell(study, model, name) for name in names)
        rows.append(TableRow(study.label_of(model), study.style_of(model).color, cells, quiet=study.is_base(model)))
    of_ideal = [interval(ideal.get(name)) for name in names]
    if any(value is not None for value in of_ideal):
        cells = tuple(_interval_cell(value, study.describe(name)) for value, name in zip(of_ideal, names, strict=True))
        rows.append(TableRow("ideal p (estimate)", "", cells, quiet=True))
    columns = tuple(_column(study.describe(name)) for name in names)
    return Table(key, title, columns, tuple(rows), _metric_csv(study, names, ideal))


def _metric_csv(study: Study, names: Sequence[str], ideal: dict[str, object]) -> str:
    head: list[object] = ["model"]
    for name in names:
        head += [name, f"{name} low", f"{name} high", f"{name} change", f"{name} change low", f"{name} change high"]
    lines = [head]
    for model in study.models:
        line: list[object] = [model]
        for name in names:
            change = None if study.is_base(model) else study.change(model, name)
            for value in (study.metric(model, name), change):
                line += [None] * 3 if value is None else [value.mean, value.low, value.high]
        lines.append(line)
    values = [interval(ideal.get(name)) for name in names]
    if any(value is not None for value in values):
        line = ["ideal"]
        for value in values:
            line += [None] * 6 if value is None else [value.mean, value.low, value.high, None, None, None]
        lines.append(line)
    return to_csv(lines)


def _cell(study: Study, model: str, name: str) -> Cell:
    metric, value = study.describe(name), study.metric(model, name)
    cell = _interval_cell(value, metric)
    if value is None or study.is_base(model):
        return cell
    change = study.change(model, name)
    best, near = _standing(study, model, name, value, metric)
    shown = "" if change is None else _change(change, metric.digits)
    return Cell(cell.shown, cell.note, shown, cell.sort, best, near)


def _standing(study: Study, model: str, name: str, value: MeanInterval, metric: Metric) -> tuple[bool, bool]:
    """Whether a tuned model is the best, and whether it is not distinguishable from it; False if there is only one."""
    others = [study.metric(other, name) for other in study.tuned]
    means = [other.mean for other in others if other is not None]
    if metric.better is None or len(means) < 2:
        return False, False
    best = max(means) if metric.better == "higher" else min(means)
    near = value.low is not None and value.high is not None and value.low <= best <= value.high
    return value.mean == best, near and value.mean != best


def _interval_cell(value: MeanInterval | None, metric: Metric) -> Cell:
    if value is None:
        return Cell("–")
    return Cell(written(value.mean, metric.digits), _ends(value, metric.digits), sort=value.mean)


def _ends(value: MeanInterval, digits: int) -> str:
    if value.low is None or value.high is None:
        return ""
    return f"[{written(value.low, digits)}, {written(value.high, digits)}]"


def _change(change: MeanInterval, digits: int) -> str:
    if change.low is None or change.high is None:
        return written(change.mean, digits, signed=True)
    low, high = (written(end, digits, signed=True) for end in (change.low, change.high))
    return f"{written(change.mean, digits, signed=True)} [{low}, {high}]"


def _column(metric: Metric) -> Column:
    return Column(axis_label(metric), metric.meaning, metric.better or "")


def _between(study: Study) -> Iterator[Table]:
    """Every other tuned model against the first: they differ if the interval excludes 0."""
    first, others = next(iter(mapping(study.evaluation.get("between")).items()), ("", None))
    per_model = {model: mapping(part) for model, part in mapping(others).items()}
    known = [name for name in study.metrics if any(name in part for part in per_model.values())]
    names = [name for key, _, group in _grouped(study, known) if key != "sampling" for name in group]
    if not names:
        return
    rows, found = [], {}
    for model, part in per_model.items():
        values = [interval(mapping(part.get(name)).get("difference")) for name in names]
        cells = tuple(_difference_cell(value, study.describe(name)) for value, name in zip(values, names, strict=True))
        rows.append(TableRow(study.label_of(model), study.style_of(model).color, cells))
        found[model] = values
    columns = tuple(_column(study.describe(name)) for name in names)
    title = f"Differences from {study.label_of(first)}, paired by context"
    yield Table("between", title, columns, tuple(rows), _interval_csv(names, found))


def _interval_csv(names: Sequence[str], found: Mapping[str, Sequence[MeanInterval | None]]) -> str:
    """A line a model, with mean and interval of each metric."""
    lines: list[list[object]] = [["model", *(f"{name}{end}" for name in names for end in ("", " low", " high"))]]
    for model, values in found.items():
        lines.append([model])
        for value in values:
            lines[-1] += [None] * 3 if value is None else [value.mean, value.low, value.high]
    return to_csv(lines)


def _difference_cell(value: MeanInterval | None, metric: Metric) -> Cell:
    if value is None:
        return Cell("–")
    shown, _, ends = _change(value, metric.digits).partition(" ")
    return Cell(shown, ends, sort=value.mean)


def _ideal(study: Study) -> Iterator[Table]:
    """Ratios of each model's metrics to the ideal model's."""
    per_model = mapping(study.evaluation.get("versus_ideal"))
    names = list(dict.fromkeys(name for part in per_model.values() for name in mapping(part)))[:12]
    if not names:
        return
    rows, found = [], {}
    for model in (model for model in study.models if model in per_model):
        values = [interval(mapping(per_model[model]).get(name)) for name in names]
        cells = tuple(_interval_cell(value, Metric("", "", digits=3)) for value in values)
        rows.append(TableRow(study.label_of(model), study.style_of(model).color, cells, quiet=study.is_base(model)))
        found[model] = values
    metrics = [study.describe(name) for name in names]
    columns = tuple(Column(metric.label, f"Model / ideal. {metric.meaning}") for metric in metrics)
    title = "Against the ideal model (ratios; 1 is the ideal)"
    yield Table("versus-ideal", title, columns, tuple(rows), _interval_csv(names, found))


def _seeds(study: Study) -> Iterator[Table]:
    """Mean and spread over repetitions of the training."""
    per_method = mapping(study.evaluation.get("seeds"))
    known = study.known_metrics
    names = [name for name in known if any(name in mapping(part) for part in per_method.values())]
    names += [name for part in per_method.values() for name in mapping(part) if name not in known][:20]
    names = [name for name in dict.fromkeys(names) if not name.startswith("z_")]
    if not names:
        return
    rows, lines = [], [["method", "metric", "mean", "low", "high", "values"]]
    for method, part in per_method.items():
        cells = []
        for name in names:
            entry = mapping(mapping(part).get(name))
            value = interval(entry)
            cells.append(_interval_cell(value, study.describe(name)))
            if value is not None:
                each = " ".join(f"{item:.6g}" for item in sequence(entry.get("values")) if number(item) is not None)
                lines.append([method, name, value.mean, value.low, value.high, each])  # type: ignore[list-item]
        group = next((group for group in study.groups if group.method == method), None)
        rows.append(TableRow(short(label_of(method)), group.style.color if group else "", tuple(cells)))
    columns = tuple(_column(study.describe(name)) for name in names)
    yield Table("seeds", "Over repetitions with other seeds", columns, tuple(rows), to_csv(lines), first="method")


def _costs(study: Study) -> Iterator[Table]:
    """The cost of each training: from the evaluation, else summed over the epochs."""
    rows, lines = [], [["model", "epochs", "samples", "tokens", "seconds", "samples per second"]]
    runs = {name: run for group in study.groups for name, run in zip(group.models, group.runs, strict=False)}
    given = mapping(study.evaluation.get("costs"))
    for model in dict.fromkeys([*runs, *study.tuned]):
        cost = {key: count(mapping(given.get(model)).get(key)) for key in ("epochs", "samples", "tokens", "seconds")}
        run = runs.get(model)
        if run is not None and run.metrics:
            per_epoch = run.samples_per_epoch
            own = {
                "epochs": float(len(run.metrics)),
                "samples": None if per_epoch is None else len(run.metrics) * per_epoch,
                "tokens": math.fsum(count(record.get("tokens")) or 0 for record in run.metrics),
                "seconds": math.fsum(count(record.get("seconds")) or 0 for record in run.metrics),
            }
            cost = {key: own[key] if value is None else value for key, value in cost.items()}
        if all(value is None for value in cost.values()):
            continue
        samples, seconds = cost["samples"], cost["seconds"]
        rate = samples / seconds if samples and seconds else None
        cells = [Cell("–") if value is None else Cell(f"{value:,.0f}", sort=value) for value in list(cost.values())[:3]]
        cells.append(Cell("–") if seconds is None else Cell(duration(seconds), sort=seconds))
        cells.append(Cell("–") if rate is None else Cell(f"{rate:,.1f}", sort=rate))
        rows.append(TableRow(study.label_of(model), study.style_of(model).color, tuple(cells)))
        lines.append([model, *cost.values(), rate])  # type: ignore[list-item]
    if rows:
        titles = ("epochs", "training samples", "training tokens", "time of the epochs", "samples per second")
        yield Table("costs", "What it cost", tuple(map(Column, titles)), tuple(rows), to_csv(lines))
