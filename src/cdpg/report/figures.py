"""The figures of a study: those of the paper for these runs, and those on cost and importance weights.

Only what the files hold is drawn: a figure without data is left out, never empty.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from cdpg.evaluation.held_out import warning
from cdpg.evaluation.metrics import POOLED, Metric
from cdpg.methods import Style
from cdpg.report.charts import Chart, Line, capital, compact, draw_lines, draw_stacks, mark_level, plain, stem, use_log
from cdpg.report.diversity import diversity
from cdpg.report.frequencies import frequencies, token_ranks
from cdpg.report.series import (
    Clock,
    Series,
    base_along,
    clock_of,
    contexts_along,
    evaluated,
    log10_weights,
    logged,
    pairs,
    seconds_by_stage,
    thinned,
)
from cdpg.report.study import BASE_NAME, Study
from cdpg.report.style import ACCENT, STAGES
from cdpg.report.values import count, mean
from cdpg.storage.json_files import mapping, sequence

_POOLS = " Here each point has a pool of its own, of the base and that run; the base's level is of the last."


def figures_of(study: Study) -> list[Chart]:
    """All figures for which the study has data, in the order of the report."""
    clock = clock_of(study)
    charts = [
        *_training(study, clock),
        *_cost_of_constraint(study),
        *diversity(study),
        *frequencies(study),
        *token_ranks(study),
    ]
    charts += [*_partition(study, clock), *_weights(study, clock), *_times(study)]
    by_name = {chart.name: chart for chart in reversed(charts)}  # of two of one name the first
    return [dataclasses.replace(chart, name=study.key + chart.name) for chart in reversed(by_name.values())]


def axis_label(metric: Metric) -> str:
    """The label with its unit."""
    return f"{metric.label} ({metric.unit})" if metric.unit and metric.unit not in metric.label else metric.label


def _training(study: Study, clock: Clock) -> Iterator[Chart]:
    """Every metric through training (the paper's figures 2 to 4); from the epochs' samples without evaluations."""
    records = (mapping(record.get("metrics")) for run in study.runs for record in run.evaluations)
    names = list(dict.fromkeys(name for record in records for name in record))
    order = {name: place for place, name in enumerate(study.known_metrics)}
    names.sort(key=lambda name: order.get(name, len(order)))
    seen = any(warning(record) for run in study.runs for record in run.evaluations[-1:])
    on_seen = f" On {study.evaluated_along}." if seen else ""
    several = sorted(contexts_along(study))
    uneven = f" Lines are of {' and '.join(f'{n:,.0f}' for n in several)} contexts." if len(several) > 1 else ""
    for name in names:
        lines = _lines(study, lambda group, name=name: evaluated(group, name, clock))
        if lines:
            metric, base = study.describe(name), _base_level(study, name)
            yield Chart(
                f"training-{stem(name)}",
                capital(metric.label),
                f"{metric.meaning}{on_seen}{_POOLS if name == POOLED else ''}{uneven}",
                partial(draw_lines, lines=lines, xlabel=clock.label, ylabel=axis_label(metric), base=base),
            )
    if names:
        return
    of_others = _samples_of_others(study)
    for name in ("satisfaction", "kl_target_policy", "coverage", "length"):
        lines = _lines(study, lambda group, name=name: logged(group, name, clock))
        if lines:
            metric = study.describe(name)
            pruned = name == "length" and any(record.get("pruned") for run in study.runs for record in run.metrics)
            yield Chart(
                f"training-{stem(name)}",
                capital(metric.label),
                f"{metric.meaning} From the training samples"
                f"{', those left out that were pruned' if pruned else ''}.{of_others}",
                partial(draw_lines, lines=lines, xlabel=clock.label, ylabel=axis_label(metric)),
            )


def _samples_of_others(study: Study) -> str:
    """Sentences on the runs whose training samples another model has drawn; empty if there is none."""
    sentences = ""
    for whose in ("base", "proposal"):
        labels = [group.label for group in study.groups if any(run.drawn_by == whose for run in group.runs)]
        if labels:
            sentences += f" Those of {' and '.join(labels)} are the {whose}'s own, whatever it has learnt."
    return sentences


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


def _partition(study: Study, clock: Clock) -> Iterator[Chart]:
    """How much Z_c differs between contexts: through training (the paper's figure 7), and context by context."""
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
            f"std(Z)/mean(Z) over an epoch's contexts, {noise}: an estimate for the base, whichever model is sampled. "
            "The lower it is, the closer dpg is to cdpg.",
            partial(draw_lines, lines=lines, xlabel=clock.label, ylabel="nstd(Z)"),
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
        axes.fill_between(x, y, color=ACCENT[0], alpha=0.16, linewidth=0)
        axes.plot(x, y, color=ACCENT[0], linewidth=1.8)
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
        "Wall time of the training by stage, and of the evaluations during the run.",
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

    The final evaluation has other pools than the points of a curve: its pooled KL is not a level for them. Runs that
    were evaluated along the way on different contexts have no level in common: each line begins at its own base. A
    metric that estimates a quantity of the base has no level: its line differs from the base by noise only.
    """
    if study.describe(metric).of_base or len(contexts_along(study)) > 1:
        return None
    along = mean(value.mean for run in study.runs if (value := base_along(run, metric)) is not None)
    bases = dict.fromkeys([BASE_NAME, *study.bases.values()])
    final = (study.metric(base, metric) for base in bases if metric != POOLED)
    return along if along is not None else mean(value.mean for value in final if value is not None)
