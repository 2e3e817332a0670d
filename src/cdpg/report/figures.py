"""The figures of a study: those of the paper for these runs, and what the constraint and the weights cost.

Only what the files hold is drawn: a figure without data is left out, never empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from cdpg.evaluation.catalogue import METRICS, POOLED, Metric
from cdpg.evaluation.unseen import warning
from cdpg.report.charts import Chart, Line, compact, draw_bars, draw_lines, draw_stacks, mark_level, plain, use_log
from cdpg.report.series import (
    Clock,
    Series,
    base_along,
    clock_of,
    evaluated,
    log10_weights,
    logged,
    pairs,
    seconds_by_stage,
    thinned,
)
from cdpg.report.study import BASE_NAME, Study
from cdpg.report.style import BASE, METHODS, STAGES, Style
from cdpg.report.values import count, distinct, mean, short
from cdpg.runlog import mapping, sequence

MOST_NAMES = 12
"""Bars of a counter: the most frequent names."""
_RELATIVE = {"compile_outcome"}
"""Counters whose names exclude one another: drawn as shares of the samples."""
_COUNTERS = {
    "compile_outcome": ("Outcomes of compiling", "share of functions"),
    "pep8_code": ("PEP8 violations by code", "violations"),
    "entity_label": ("Entities by label", "entities"),
}


def figures_of(study: Study) -> list[Chart]:
    """Every figure that the study has data for, in the order of the report."""
    clock = clock_of(study)
    charts = [*_training(study, clock), *_cost_of_constraint(study), *_frequencies(study), *_ranks(study)]
    charts += [*_partition(study, clock), *_weights(study, clock), *_times(study)]
    names: set[str] = set()
    return [chart for chart in charts if not (chart.name in names or names.add(chart.name))]  # type: ignore[func-returns-value]


def describe(name: str) -> Metric:
    """What the catalogue says of a metric; an unknown one speaks for itself."""
    return METRICS.get(name) or Metric(short(name), "A metric of this run's own.")


def axis_label(metric: Metric) -> str:
    """The label with its unit."""
    return f"{metric.label} ({metric.unit})" if metric.unit and metric.unit not in metric.label else metric.label


def _training(study: Study, clock: Clock) -> Iterator[Chart]:
    """Every metric through training (figures 2 to 4); from the epochs' own samples where nothing was evaluated."""
    records = (mapping(record.get("metrics")) for run in study.runs for record in run.evaluations)
    names = list(dict.fromkeys(name for record in records for name in record))
    names.sort(key=lambda name: list(METRICS).index(name) if name in METRICS else len(METRICS))
    seen = any(warning(record) for run in study.runs for record in run.evaluations[-1:])
    on_seen = f" On {study.evaluated_along}." if seen else ""
    for name in names:
        lines = _lines(study, lambda group, name=name: evaluated(group, name, clock))
        if lines:
            metric, base = describe(name), _base_level(study, name)
            pools = " Here each point has a pool of its own, of the base and that run; the base's level is of the last."
            yield Chart(
                f"training-{_stem(name)}",
                _capital(metric.label),
                f"{metric.meaning}{on_seen}{pools if name == POOLED else ''}",
                partial(draw_lines, lines=lines, xlabel=clock.label, ylabel=axis_label(metric), base=base),
            )
    if names:
        return
    for name in ("satisfaction", "kl_target_policy", "coverage", "length"):
        lines = _lines(study, lambda group, name=name: logged(group, name, clock))
        if lines:
            metric = describe(name)
            yield Chart(
                f"training-{_stem(name)}",
                _capital(metric.label),
                f"{metric.meaning} From the training samples.",
                partial(draw_lines, lines=lines, xlabel=clock.label, ylabel=axis_label(metric)),
            )


def _cost_of_constraint(study: Study) -> Iterator[Chart]:
    paths = [(group, pairs(group, "kl_policy_base", "satisfaction")) for group in study.groups]
    paths = [(group, path) for group, path in paths if path]
    if not paths:
        return

    def draw(axes: Any) -> None:
        lines = []
        for group, path in paths:
            x, y = zip(*path, strict=True)
            lines.append(Line(group.label, group.style, Series(x, y, (None,) * len(x), (None,) * len(x))))
        draw_lines(axes, lines, "KL(π, a) (nats)", "satisfaction", from_zero=True)
        for group, path in paths:
            axes.plot(*path[-1], marker=group.style.marker or "o", markersize=8, color=group.style.color)

    yield Chart(
        "satisfaction-against-kl",
        "Satisfaction against distance",
        "Each line is a run's path from the base (at the left) to the tuned model (the large mark): higher is better, "
        "further right is further from the base.",
        draw,
        section="cost",
    )


def _frequencies(study: Study) -> Iterator[Chart]:
    """Counters of the final evaluation (figure 5): outcomes relative, codes and labels absolute."""
    per_model = mapping(study.evaluation.get("frequencies"))
    names = dict.fromkeys(name for counters in per_model.values() for name in mapping(counters))
    for counter in names:
        if counter == "token_rank":
            continue
        values = {label: counts for label, _, counts in _counted(study, counter) if counts}
        styles = {label: style for label, style, _ in _counted(study, counter)}
        if not values:
            continue
        relative = counter in _RELATIVE
        if relative:
            values = {label: _shares(counts) for label, counts in values.items()}
        values, left_out = _most_frequent(values)
        title, unit = _COUNTERS.get(counter, (_capital(short(counter).replace("_", " ")), "count"))
        caption = "Relative frequency over all outputs." if relative else "Absolute numbers over all outputs."
        if left_out:
            caption += f" The {MOST_NAMES} most frequent; {left_out} more are not shown."
        rows = len({name for counts in values.values() for name in counts})
        yield Chart(
            f"frequency-{_stem(counter)}",
            title,
            caption,
            partial(draw_bars, values=values, styles=styles, xlabel=unit, digits=3 if relative else 0),
            width=5.4,
            height=min(14.0, 1.1 + rows * (0.14 + 0.125 * len(values))),
            section="frequencies",
        )


def _ranks(study: Study) -> Iterator[Chart]:
    """Token frequency against rank (figure 6), both axes logarithmic."""
    lines = []
    for label, style, counts in _counted(study, "token_rank"):
        total = math.fsum(counts.values())
        frequencies = [value / total for value in sorted(counts.values(), reverse=True) if value > 0] if total else []
        points = thinned(frequencies, 160, logarithmic=True)
        if len(points) > 1:
            x, y = tuple(float(place + 1) for place, _ in points), tuple(value for _, value in points)
            lines.append(Line(label, style, Series(x, y, (None,) * len(x), (None,) * len(x)), steps=False))
    if lines:
        yield Chart(
            "token-rank",
            "Token frequency against rank",
            "A model that falls back on few tokens has a steeper or a shorter line than the base.",
            partial(
                draw_lines,
                lines=lines,
                xlabel="rank of the token",
                ylabel="share of all tokens",
                log_x=True,
                log_y=True,
            ),
            section="frequencies",
        )


def _partition(study: Study, clock: Clock) -> Iterator[Chart]:
    """How much Z_c differs between contexts: through training (figure 7), and context by context."""
    field = "z_nstd_corrected"
    lines = _lines(study, lambda group: logged(group, field, clock))
    if not lines:
        field = "z_nstd"
        lines = _lines(study, lambda group: logged(group, field, clock))
    noise = "the sampling noise subtracted" if field == "z_nstd_corrected" else "sampling noise included"
    if lines:
        yield Chart(
            "partition-nstd",
            "Deviation of Z between contexts",
            f"std(Z)/mean(Z) over an epoch's contexts, {noise}. The lower it is, the closer dpg is to cdpg.",
            partial(draw_lines, lines=lines, xlabel=clock.label, ylabel="nstd(Z)", base=_base_level(study, field)),
            section="partition",
        )
    values = sorted((z for z in map(count, sequence(study.evaluation.get("partition"))) if z is not None), reverse=True)
    if len(values) > 1:
        yield _partition_by_context(values)


def _partition_by_context(values: list[float]) -> Chart:
    points = thinned(values, 400)
    x = tuple(100 * (place + 1) / len(values) for place, _ in points)
    y = tuple(value for _, value in points)
    average = math.fsum(values) / len(values)
    nothing = sum(value == 0 for value in values) / len(values)

    def draw(axes: Any) -> None:
        axes.fill_between(x, y, color=METHODS["cdpg"].color, alpha=0.16, linewidth=0)
        axes.plot(x, y, color=METHODS["cdpg"].color, linewidth=1.8)
        axes.set(xlabel="contexts, the easiest first (%)", ylabel="estimated Z", xlim=(0, 100))
        axes.set_ylim(0, max(y) * 1.08 or 1)
        plain(axes.yaxis)
        mark_level(axes, average, f"mean {compact(average, 3)}")

    return Chart(
        "partition-by-context",
        "Z by context",
        f"Share of the base's mass that satisfies the constraint, one value for each of {len(values):,} contexts; "
        f"for {nothing:.0%} of them no sample of the base satisfied.",
        draw,
        section="partition",
    )


def _weights(study: Study, clock: Clock) -> Iterator[Chart]:
    weights = {group.label: (group.style, log10_weights(group)) for group in study.groups}
    weights = {label: pair for label, pair in weights.items() if len(pair[1]) >= 10}
    if weights:
        yield _weight_histogram(weights)
    lines = _lines(study, lambda group: logged(group, "ess", clock))
    if lines:
        yield Chart(
            "effective-sample-size",
            "Effective sample size",
            "(Σw)²/Σw² of a context's samples as a share of them, mean over contexts with a satisfying sample.",
            partial(
                draw_lines, lines=lines, xlabel=clock.label, ylabel="effective sample size (share)", from_zero=True
            ),
            section="weights",
        )


def _weight_histogram(weights: dict[str, tuple[Style, list[float]]]) -> Chart:
    everything = sorted(value for _, values in weights.values() for value in values)
    edge = len(everything) // 200
    low, high = everything[edge], everything[-1 - edge]
    low, high = min(low, -0.5), max(high, 0.5)
    low, high = max(low, -12.0), min(high, 12.0)
    bins = 30
    lines = []
    for label, (style, values) in weights.items():
        shares = [0.0] * bins
        for value in values:
            place = int((min(max(value, low), high) - low) / (high - low) * bins)
            shares[min(place, bins - 1)] += 1 / len(values)
        middles = tuple(10 ** (low + (place + 0.5) * (high - low) / bins) for place in range(bins))
        lines.append(Line(label, style, Series(middles, tuple(shares), (None,) * bins, (None,) * bins), steps=True))

    def draw(axes: Any) -> None:
        for line in lines:
            axes.plot(
                line.series.x,
                line.series.y,
                color=line.style.color,
                label=line.label,
                drawstyle="steps-mid",
                linewidth=1.6,
                linestyle=(0, line.style.dash) if line.style.dash else "-",
            )
        axes.set(xlabel="importance weight P/(Ẑ q)", ylabel="share of satisfying samples")
        use_log(axes.xaxis, 10**low, 10**high)
        axes.set_ylim(bottom=0)
        plain(axes.yaxis)
        mark_level(axes, 1.0, "w = 1", upright=True)
        axes.legend(loc="upper left", handlelength=2.2, labelcolor="linecolor")

    return Chart(
        "importance-weights",
        "Importance weights",
        "Of the logged training samples that satisfy, second half of the run. All near one value: every satisfying "
        "sample counts; a long tail to the right: a few decide the gradient. The outermost bins hold what lies beyond.",
        draw,
        section="weights",
    )


def _times(study: Study) -> Iterator[Chart]:
    rows = {}
    for group in study.groups:
        for name, run in zip(group.models, group.runs, strict=False):
            spent = seconds_by_stage(run, STAGES)
            if math.fsum(spent.values()) > 0:
                rows[study.label_of(name)] = spent
    if not rows:
        return
    longest = max(math.fsum(row.values()) for row in rows.values())
    unit, size = next(
        ((unit, size) for unit, size in (("hours", 3600), ("minutes", 60)) if longest >= 2 * size), ("seconds", 1)
    )
    rows = {name: {part: value / size for part, value in row.items()} for name, row in rows.items()}
    yield Chart(
        "time",
        "Where the time went",
        "Wall time of the training by stage, and of the evaluations along the run.",
        partial(draw_stacks, rows=rows, colors=STAGES, xlabel=unit),
        width=5.4,
        height=1.2 + 0.36 * len(rows),
        section="cost",
    )


def _lines(study: Study, series_of: Any) -> list[Line]:
    lines = [Line(group.label, group.style, series_of(group)) for group in study.groups]
    return [line for line in lines if line.series]


def _base_level(study: Study, metric: str) -> float | None:
    """The base's value on the contexts of the curves, a mean over the runs; else from the final evaluation.

    The final evaluation has other pools than the points of a curve: its pooled KL is no level for them.
    """
    along = mean(value.mean for run in study.runs if (value := base_along(run, metric)) is not None)
    final = study.metric(BASE_NAME, metric) if metric != POOLED else None
    return final.mean if along is None and final is not None else along


def _counted(study: Study, counter: str) -> Iterator[tuple[str, Style, dict[str, float]]]:
    """The base and every group with its counts; over several seeds their mean."""
    per_model = mapping(study.evaluation.get("frequencies"))
    rows: list[tuple[str, Style, tuple[str, ...]]] = [("base", BASE, (BASE_NAME,))]
    rows += [(group.label, group.style, group.models) for group in study.groups]
    for label, style, models in rows:
        found = [_counts(mapping(per_model.get(model)).get(counter)) for model in models]
        found = [counts for counts in found if counts]
        names = dict.fromkeys(name for counts in found for name in counts)
        yield label, style, {name: math.fsum(part.get(name, 0.0) for part in found) / len(found) for name in names}


def _counts(value: Any) -> dict[str, float]:
    items = (
        mapping(value).items()
        if isinstance(value, dict)
        else ((str(i), item) for i, item in enumerate(sequence(value)))
    )
    known = ((name, count(item)) for name, item in items)
    return {name: item for name, item in known if item is not None}


def _shares(counts: dict[str, float]) -> dict[str, float]:
    total = math.fsum(counts.values())
    return {name: value / total for name, value in counts.items()} if total else {}


def _most_frequent(values: dict[str, dict[str, float]]) -> tuple[dict[str, dict[str, float]], int]:
    """The counts of the most frequent names, under names to show, and how many are left out."""
    names = dict.fromkeys(name for counts in values.values() for name in counts)
    order = sorted(names, key=lambda name: -max(counts.get(name, 0.0) for counts in values.values()))
    kept = dict(zip(order[:MOST_NAMES], distinct(order[:MOST_NAMES], 28), strict=True))
    shown = {label: {kept[name]: counts.get(name, 0.0) for name in kept} for label, counts in values.items()}
    return shown, len(order) - len(kept)


def _stem(name: str) -> str:
    """Safe as a file name and as an identifier."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "metric"


def _capital(label: str) -> str:
    return label if "(" in label.partition(" ")[0] else label[:1].upper() + label[1:]
