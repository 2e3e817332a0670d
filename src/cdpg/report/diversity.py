"""Figures on precision and diversity: pass@k, how much of the ideal model a policy still covers, both along α."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from cdpg.evaluation.metrics import GAIN, RECALL
from cdpg.methods import METHODS, Style
from cdpg.report.charts import Chart, Line, draw_lines
from cdpg.report.series import Series
from cdpg.report.study import Group, Study
from cdpg.report.style import ACCENT, OTHERS
from cdpg.report.values import MeanInterval, count, interval, mean, number
from cdpg.storage.json_files import mapping


def diversity(study: Study) -> Iterator[Chart]:
    """The figures of pass@k, of recall against satisfaction, and of both along α."""
    yield from _pass_at_k(study)
    yield from _recall_against_satisfaction(study)
    yield from _along_alpha(study)


def _pass_at_k(study: Study) -> Iterator[Chart]:
    lines = [Line(study.label_of(model), study.style_of(model), _pass_by_k(study, model)) for model in study.models]
    lines = [line for line in lines if len(line.series.x) > 1]
    if lines:
        yield Chart(
            "pass-at-k",
            "pass@k",
            "Probability that at least one of k samples of a context satisfies the constraint. A model that has lost "
            "diversity gains little from more samples.",
            partial(draw_lines, lines=lines, xlabel="k, samples", ylabel="pass@k", log_x=True),
            section="cost",
        )


def _recall_against_satisfaction(study: Study) -> Iterator[Chart]:
    points = [(model, study.metric(model, "satisfaction"), study.metric(model, RECALL)) for model in study.models]
    known = [(model, x.mean, y.mean) for model, x, y in points if x is not None and y is not None]
    if len(known) < 2:
        return

    def draw(axes: Any) -> None:
        for model, x, y in known:
            style = study.style_of(model)
            axes.plot(x, y, marker=style.marker or "o", markersize=8, color=style.color, linestyle="")
            axes.annotate(study.label_of(model), (x, y), xytext=(5, 5), textcoords="offset points", color=style.color)
        axes.set(xlabel="satisfaction", ylabel="recall of p")
        axes.margins(0.2)

    yield Chart(
        "recall-against-satisfaction",
        "Diversity against precision",
        "Each mark is a model. To the right: more of its outputs satisfy. Higher: more of the ideal model's outputs "
        "keep at least a tenth of their probability.",
        draw,
        section="cost",
    )


def _pass_by_k(study: Study, model: str) -> Series:
    """pass@k of a model, by k."""
    found = mapping(mapping(study.evaluation.get("pass_at_k")).get(model))
    pairs = ((count(int(k)) if k.isdigit() else None, interval(value)) for k, value in found.items())
    return _by_place({k: value for k, value in pairs if k and value is not None})


def _along_alpha(study: Study) -> Iterator[Chart]:
    """Satisfaction and recall, and the gain, of runs that differ in α; seeds are averaged."""
    by_alpha: dict[float, list[str]] = {}
    for group in study.groups:
        alpha = _alpha_of(group)
        if alpha is not None:
            by_alpha.setdefault(alpha, []).extend(group.models)
    if len(by_alpha) < 2:
        return
    accent = Style(*ACCENT, "o")
    for name, title, metrics, better in (
        ("along-alpha", "Precision and diversity along α", {"satisfaction": accent, RECALL: OTHERS[0]}, ""),
        ("gain-along-alpha", "Gain along α", {GAIN: accent}, " Higher is nearer to the ideal model by KL(p, π)."),
    ):
        lines = [Line(study.describe(key).label, style, _means(study, by_alpha, key)) for key, style in metrics.items()]
        lines = [line for line in lines if len(line.series.x) > 1]
        if lines:
            yield Chart(
                name,
                title,
                "Each point is a tuned model. α = 0 is the divergence KL(p, π); the nearer α is to 1, the more the run "
                f"favours outputs that satisfy over all outputs of the ideal model.{better}",
                partial(draw_lines, lines=lines, xlabel="α", ylabel=", ".join(line.label for line in lines)),
                section="cost",
            )


def _alpha_of(group: Group) -> float | None:
    """The α of a group's divergence; None if it has another divergence, or a method without one."""
    method = METHODS.get(group.method)
    settings = () if method is None else dataclasses.fields(method.Settings)
    if not group.runs or "divergence" not in {setting.name for setting in settings}:
        return None
    config = group.runs[0].config
    return {"kl": 0.0, "alpha": number(config.get("alpha"))}.get(str(config.get("divergence")))


def _means(study: Study, by_alpha: Mapping[float, list[str]], metric: str) -> Series:
    """A metric by α: with its interval for one model, the mean of several."""
    found: dict[float, MeanInterval] = {}
    for alpha, models in by_alpha.items():
        known = [value for value in (study.metric(model, metric) for model in models) if value is not None]
        average = mean(value.mean for value in known)
        if average is not None:
            found[alpha] = known[0] if len(known) == 1 else MeanInterval(average, None, None)
    return _by_place(found)


def _by_place(found: Mapping[float, MeanInterval]) -> Series:
    known = sorted(found.items())
    return Series(
        tuple(place for place, _ in known),
        tuple(value.mean for _, value in known),
        tuple(value.low for _, value in known),
        tuple(value.high for _, value in known),
    )
