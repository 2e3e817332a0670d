"""Series for figures: evaluations with intervals, metrics of epochs in bins, importance weights, times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cdpg.evaluation.metrics import POOLED
from cdpg.report.folders import Record, Run
from cdpg.report.study import Group, Study
from cdpg.report.values import MeanInterval, count, interval, mean, number
from cdpg.storage.json_files import mapping

BINS = 40
"""Epochs are drawn in at most this many bins, so that the page of a long run is not larger."""


@dataclass(frozen=True)
class Series:
    """A line with a band; None for the ends of a missing band."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]

    def __bool__(self) -> bool:
        return bool(self.x)


@dataclass(frozen=True)
class Clock:
    """The unit of the horizontal axis: training samples if every run logs them, else epochs."""

    samples: bool

    @property
    def label(self) -> str:
        return "training samples" if self.samples else "epochs"

    def place(self, run: Run, record: Record) -> float | None:
        """The position of a record on the axis."""
        epoch, per_epoch = count(record.get("epoch")), run.samples_per_epoch
        return epoch * per_epoch if self.samples and epoch is not None and per_epoch is not None else epoch


def clock_of(study: Study) -> Clock:
    """Samples if they are known for every run, since methods are compared at equal numbers of samples."""
    return Clock(all(run.samples_per_epoch is not None for run in study.runs))


def evaluated(group: Group, metric: str, clock: Clock) -> Series:
    """A metric on held-out contexts through training; with several seeds, their mean and range."""
    lines = []
    for run in group.runs:
        points = {}
        for record in run.evaluations:
            place, value = clock.place(run, record), interval(mapping(record.get("metrics")).get(metric))
            if place is not None and value is not None:
                points[place] = (value.mean, value.low, value.high)
        if points:
            lines.append(points)
    if len(lines) <= 1:
        rows = [(place, *values) for points in lines for place, values in sorted(points.items())]
        return _series(rows)
    return _series(_across([{place: values[0] for place, values in points.items()} for points in lines]))


def base_along(run: Run, metric: str) -> MeanInterval | None:
    """The base's value on the contexts of the evaluations during a run; a pooled value is of the last pool."""
    if metric == POOLED:
        found = [mapping(record.get("base")) for record in reversed(run.evaluations)]
    else:
        found = [mapping(record.get("metrics")) for record in run.evaluations if number(record.get("epoch")) == 0]
    known = (interval(metrics.get(metric)) for metrics in found)
    return next((value for value in known if value is not None), None)


def contexts_along(study: Study) -> set[float]:
    """Numbers of contexts of the evaluations during the runs: one number, unless the runs differ."""
    counts = (count(record.get("contexts")) for run in study.runs for record in run.evaluations)
    return {value for value in counts if value is not None}


def logged(group: Group, field: str, clock: Clock) -> Series:
    """A field of ``metrics.jsonl`` in bins of epochs; the band is the middle 80 % of a bin, or the range over seeds.

    Seeds are binned alike, over the epochs that all of them have: one may not be finished.
    """
    lines = []
    for run in group.runs:
        points = ((clock.place(run, record), number(record.get(field))) for record in run.metrics)
        known = {place: value for place, value in points if place is not None and value is not None}
        if known:
            lines.append(known)
    shared = _shared(lines)
    binned = [_binned([(place, line[place]) for place in shared]) for line in lines]
    return _series(binned[0] if len(binned) == 1 else _across([{row[0]: row[1] for row in rows} for rows in binned]))


def pairs(group: Group, across: str, up: str) -> list[tuple[float, float]]:
    """Two metrics of the same evaluations, as pairs, along the first run that has both."""
    for run in group.runs:
        both = []
        for record in run.evaluations:
            metrics = mapping(record.get("metrics"))
            x, y = interval(metrics.get(across)), interval(metrics.get(up))
            if x is not None and y is not None:
                both.append((x.mean, y.mean))
        if both:
            return both
    return []


def log10_weights(group: Group) -> list[float]:
    """log₁₀ of P/(Ẑ q) of the logged samples that satisfy, of the second half of the epochs."""
    found = []
    for run in group.runs:
        last = max((count(sample.get("epoch")) or 0 for sample in run.samples), default=0)
        for sample in run.samples:
            log_ratio, log_z = number(sample.get("log_ratio")), number(sample.get("log_z"))
            if log_ratio is not None and log_z is not None and 2 * (count(sample.get("epoch")) or 0) >= last:
                found.append((log_ratio - log_z) / math.log(10))
    return found


def seconds_by_stage(run: Run, stages: Iterable[str]) -> dict[str, float]:
    """A run's seconds by stage; the rest is ``other``."""
    spent = {stage: _total(run.metrics, f"seconds_{stage}") for stage in stages if stage not in ("other", "evaluation")}
    spent["evaluation"] = _total(run.evaluations, "seconds")
    spent["other"] = max(0.0, _total(run.metrics, "seconds") - math.fsum(spent.values()) + spent["evaluation"])
    return spent


def thinned(values: Sequence[float], most: int, logarithmic: bool = False) -> list[tuple[int, float]]:
    """About ``most`` of the values with their indices, evenly spaced in the index or in its logarithm."""
    if len(values) <= most:
        return list(enumerate(values))
    last = len(values) - 1
    if logarithmic:
        places = {round(math.exp(step / (most - 1) * math.log(last + 1))) - 1 for step in range(most)}
    else:
        places = {round(step / (most - 1) * last) for step in range(most)}
    return [(place, values[place]) for place in sorted(places)]


def _total(records: Iterable[Record], field: str) -> float:
    return math.fsum(count(record.get(field)) or 0.0 for record in records)


def _binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float, float | None, float | None]]:
    size = max(1, -(-len(points) // BINS))
    rows: list[tuple[float, float, float | None, float | None]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = sorted(value for _, value in part)
        middle = math.fsum(place for place, _ in part) / len(part)
        ends = (values[len(values) // 10], values[-1 - len(values) // 10]) if len(values) >= 5 else (None, None)
        rows.append((middle, math.fsum(values) / len(values), *ends))
    return rows


def _shared(lines: Sequence[dict[float, float]]) -> list[float]:
    """The positions that all lines share, in order."""
    return sorted(set.intersection(*map(set, lines))) if lines else []


def _across(lines: Sequence[dict[float, float]]) -> list[tuple[float, float, float | None, float | None]]:
    """Mean and range at every position that all lines share."""
    rows: list[tuple[float, float, float | None, float | None]] = []
    for place in _shared(lines):
        values = [line[place] for line in lines]
        rows.append((place, mean(values) or 0.0, min(values), max(values)))
    return rows


def _series(rows: Sequence[tuple[float, float, float | None, float | None]]) -> Series:
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    return Series(*map(tuple, columns))
