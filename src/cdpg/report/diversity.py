"""Figures on precision and diversity: pass@k, and how much of the ideal model a policy still covers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from cdpg.evaluation.metrics import RECALL
from cdpg.report.charts import Chart, Line, draw_lines
from cdpg.report.series import Series
from cdpg.report.study import Study
from cdpg.report.values import count, interval
from cdpg.storage.json_files import mapping


def diversity(study: Study) -> Iterator[Chart]:
    """The figures of pass@k, and of recall against satisfaction."""
    lines = [Line(study.label_of(model), study.style_of(model), _pass_at_k(study, model)) for model in study.models]
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


def _pass_at_k(study: Study, model: str) -> Series:
    """pass@k of a model, by k."""
    found = mapping(mapping(study.evaluation.get("pass_at_k")).get(model))
    pairs = ((count(int(k)) if k.isdigit() else None, interval(value)) for k, value in found.items())
    known = sorted((k, value) for k, value in pairs if k and value is not None)
    return Series(
        tuple(k for k, _ in known),
        tuple(value.mean for _, value in known),
        tuple(value.low for _, value in known),
        tuple(value.high for _, value in known),
    )
