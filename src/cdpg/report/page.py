"""The page: renders studies as one self-contained HTML file, which loads nothing.

Each study is a block with its own tables and figures; the only block of a page has no heading. Jinja escapes every
value; before that, invisible characters of values are spelt out (see ``values``). The content-security policy allows
one style sheet and one script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from cdpg.evaluation.held_out import contexts_in_words, on_few, on_gain, warning
from cdpg.evaluation.metrics import GAIN, METRICS, POOLED
from cdpg.messages.text import typed_command
from cdpg.report.blocks import described, reasons
from cdpg.report.charts import Chart, to_svg
from cdpg.report.diagnosis import diagnose
from cdpg.report.figures import figures_of
from cdpg.report.folders import Run
from cdpg.report.remarks import Diagnosis
from cdpg.report.samples import SampleExamples, samples_of
from cdpg.report.study import Group, Study
from cdpg.report.style import dark_twins
from cdpg.report.tables import Table, duration, tables_of, written
from cdpg.report.values import count, distinct, mean, number, short, text, visible
from cdpg.storage.json_files import mapping

_SECTIONS = {
    "training": (
        "Through training",
        "Training",
        "Methods are compared at equal numbers of training samples.",
    ),
    "cost": ("What it cost", "Cost", "In distance from the base, and in time."),
    "frequencies": ("What the outputs are made of", "Outputs", ""),
    "partition": ("How much the contexts differ", "Contexts", ""),
    "weights": ("Importance weights", "Weights", ""),
}
"""Sections of figures: heading, name in the navigation, introduction."""
_BANDS = "Bands: {confidence:.0%} intervals over contexts; with several seeds, their range."


@dataclass(frozen=True)
class Figure:
    """A drawn chart."""

    name: str
    title: str
    caption: str
    wide: bool
    svg: Markup


@dataclass(frozen=True)
class Section:
    """Figures under one heading."""

    key: str
    heading: str
    link: str
    intro: str
    figures: list[Figure]


@dataclass(frozen=True)
class Card:
    """The summary of a method."""

    label: str
    color: str
    before: str
    after: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Block:
    """The content of the page for one study."""

    key: str
    """Prefix of its identifiers; empty for the only block."""
    heading: str
    about: tuple[tuple[str, str], ...]
    """Facts that all its runs share."""
    groups: tuple[Group, ...]
    conditions: str
    warnings: list[str]
    notes: tuple[str, ...]
    cards: list[Card]
    diagnosis: Diagnosis
    models: bool
    """Whether any model was evaluated."""
    paired: bool
    """Whether changes are paired by context."""
    tables: list[Table]
    best_marked: bool
    sections: list[Section]
    samples: SampleExamples


def render(studies: Sequence[Study]) -> str:
    """The whole file."""
    css, script = style_sheet(), _asset("report.js")
    blocks = [_block(study, place) for place, study in enumerate(studies, start=1)]
    runs = [run for study in studies for run in study.runs]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            policy=_policy(css, script),
            css=Markup(css),
            script=Markup(script),
            title=_title(studies, runs),
            apart=_apart(studies),
            blocks=blocks,
            several=len(blocks) > 1,
            repeats=[_repeat(run) for run in runs],
            command=typed_command(text(studies[0].evaluation.get("command"), 2000)) if len(studies) == 1 else "",
            versions=_versions(studies),
            csv=htmlsafe_json_dumps({table.name: table.csv for block in blocks for table in block.tables if table.csv}),
        )
    )


def _title(studies: Sequence[Study], runs: Sequence[Run]) -> str:
    tasks = {study.task for study in studies}
    task = tasks.pop() if len(tasks) == 1 else None
    return task or (short(runs[0].name) if len(runs) == 1 else "runs")


def _apart(studies: Sequence[Study]) -> str:
    """Why there are several blocks, in two sentences."""
    if len(studies) < 2:
        return ""
    found = reasons([study.runs for study in studies])
    why = (
        f"They differ in {', '.join(found)}."
        if found
        else "Their files do not show that they had the same base model, constraint and evaluated contexts."
    )
    return (
        f"These runs are not one comparison and are shown in {len(studies)} blocks. {why} Each run is compared with "
        "its own base. Figures of different blocks are not comparable, and models are ranked only within their block."
    )


def _block(study: Study, place: int) -> Block:
    tables = tables_of(study)
    labels = ", ".join(group.label for group in study.groups)
    return Block(
        key=study.key,
        heading=f"Block {place}: {short(labels, 120) or 'a comparison'}",
        about=described(study.runs[0]) if study.key and study.runs else (),
        groups=study.groups,
        conditions=_conditions(study),
        warnings=_warnings(study),
        notes=study.notes,
        cards=[card for group in study.groups for card in _cards(study, group)],
        diagnosis=diagnose(study),
        models=bool(study.models),
        paired=bool(study.evaluation.get("changes")),
        tables=tables,
        best_marked=any(cell.best for table in tables for row in table.rows for cell in row.cells),
        sections=_sections(figures_of(study), study),
        samples=samples_of(study),
    )


def style_sheet() -> str:
    """The style sheet, with the colours of the figures for light and dark pages inserted."""
    twins = dark_twins()
    light = "".join(f"--c{color[1:]}:{color};" for color in twins)
    dark = "".join(f"--c{color[1:]}:{twin};" for color, twin in twins.items())
    swaps = "".join(
        f'svg [fill="{color}"]{{fill:var(--c{color[1:]})}}svg [stroke="{color}"]{{stroke:var(--c{color[1:]})}}'
        f'[data-color="{color}"]{{--own:var(--c{color[1:]})}}'
        for color in twins
    )
    return _asset("report.css").replace("/*light*/", light).replace("/*dark*/", dark).replace("/*swaps*/", swaps)


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("cdpg.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )


def _asset(name: str) -> str:
    return resources.files("cdpg.report").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def _policy(css: str, script: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(part.encode("utf-8")).digest()).decode() for part in (css, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _sections(charts: list[Chart], study: Study) -> list[Section]:
    sections = []
    for key, (title, link, intro) in _SECTIONS.items():
        figures = [
            Figure(chart.name, chart.title, chart.caption, chart.width > 5, Markup(to_svg(chart)))
            for chart in charts
            if chart.section == key
        ]
        if key == "training" and not any(run.evaluations for run in study.runs):
            intro = "On training contexts: nothing was evaluated along the way. Bands: the middle 80 % of epochs."
        elif key == "training":
            confidence = number(study.evaluation.get("confidence")) or 0.95
            intro = f"On {study.evaluated_along}. {intro} {_BANDS.format(confidence=confidence)}"
        if figures:
            sections.append(Section(key, title, link, intro, figures))
    return sections


def _cards(study: Study, group: Group) -> Iterator[Card]:
    """The summary of a method beside its own base; means over seeds."""
    known = [model for model in group.models if model in study.models]
    if not known:
        return

    def of(name: str) -> tuple[float | None, float | None]:
        pairs = [study.beside_base(model, name) for model in known]
        base, tuned = [pair.base for pair in pairs], [pair.tuned for pair in pairs]
        return mean(v.mean for v in base if v is not None), mean(v.mean for v in tuned if v is not None)

    facts = []
    epochs = [f"{run.best_epoch:,.0f}" for run in group.runs if run.best_epoch is not None]
    if epochs:
        facts.append(("model", f"of epoch {', '.join(epochs)}, chosen by the gain on validation contexts"))
    gain = of(GAIN)[1]
    if gain is not None:
        where = "nearer to" if gain >= 0 else "farther from"
        facts.append(("gain", f"{written(abs(gain), 2)} nats {where} the ideal model{_ends(study, known)}"))
    distance = POOLED if of(POOLED)[1] is not None else "kl_target_policy"
    start, end = of(distance)
    if end is not None:
        before = f"{written(start, 2)} → " if start is not None else ""
        facts.append((METRICS[distance].label, f"{before}{written(end, 2)} nats"))
    moved = of("kl_policy_base")[1]
    if moved is not None:
        facts.append(("KL(π, a)", f"{written(moved, 2)} nats"))
    costs = mapping(study.evaluation.get("costs"))
    seconds = [count(mapping(costs.get(model)).get("seconds")) for model in known]
    spent = mean(value for value in seconds if value is not None)
    if spent is not None:
        facts.append(("time of the epochs", duration(spent)))
    shown = ["–" if value is None else written(value, 3) for value in of("satisfaction")]
    yield Card(group.label, group.style.color, shown[0], shown[1], tuple(facts))


def _ends(study: Study, models: Sequence[str]) -> str:
    """The interval of the gain of a single model."""
    found = study.metric(models[0], GAIN)
    if len(models) > 1 or found is None or found.low is None or found.high is None:
        return ""
    return f" [{written(found.low, 2)}, {written(found.high, 2)}]"


def _conditions(study: Study) -> str:
    """How it was measured, in one sentence."""
    values = {key: count(study.evaluation.get(key)) for key in ("contexts", "samples_per_context", "resamples")}
    if values["contexts"] is None:
        return ""
    parts = [f"Measured on {contexts_in_words(study.evaluation)}"]
    if values["samples_per_context"] is not None:
        parts.append(f"{values['samples_per_context']:,.0f} samples each")
    confidence = number(study.evaluation.get("confidence")) or 0.95
    repeats = f" ({values['resamples']:,.0f} resamples)" if values["resamples"] else ""
    parts.append(f"in brackets the {confidence:.0%} bootstrap interval over contexts{repeats}")
    if study.evaluation.get("decoding") == "beam":
        parts.append("the task's own metrics on the outputs of beam search")
    covered = on_gain(study.evaluation)
    return f"{', '.join(parts)}." + (f" {covered[0].upper()}{covered[1:]}." if covered else "")


def _warnings(study: Study) -> list[str]:
    """Warnings on figures of contexts that were tuned on, of few contexts, or of a run's past; each sentence once."""
    records = [study.evaluation, *(run.evaluation for run in study.runs)]
    found = [sentence(record) for sentence in (warning, on_few) for record in records]
    return list(dict.fromkeys(sentence for sentence in (*found, *_outdated(study)) if sentence))


def _outdated(study: Study) -> Iterator[str]:
    """A warning for each run that was made longer after its evaluation: the tables are of the model before that."""
    costs = mapping(study.evaluation.get("costs"))
    for group in study.groups:
        for model, run in zip(group.models, group.runs, strict=False):
            then, now = count(mapping(costs.get(model)).get("epochs")), len(run.metrics)
            if then is not None and then < now:
                yield (
                    f"{short(model, 120)} was evaluated after {then:,.0f} epochs and has {now:,} now: its figures in "
                    "headline and tables are of the earlier model. Evaluate it again with cdpg evaluate, or the whole "
                    f"comparison with cdpg compare --resume --epochs {now}."
                )


def _repeat(run: Run) -> dict[str, Any]:
    origin = mapping(run.config.get("origin"))
    return {
        "name": run.name,
        "command": typed_command(text(origin.get("command"), 2000)),
        "again": _again(run),
        "seed": text(run.config.get("seed"), 40),
        "method": short(run.method),
        "model": text(origin.get("model") or run.config.get("model"), 300),
        "config": text(run.config_text, 20_000),
    }


def _again(run: Run) -> str:
    """The command that repeats a run; empty for a run made in Python, whose data and constraint are not recorded."""
    if not (run.config.get("task") or run.config.get("constraint")):
        return ""
    return f"cdpg run {shlex.quote(str(run.path / 'config.yaml'))} --output-dir NEW_FOLDER"


def _versions(studies: Sequence[Study]) -> list[tuple[str, str]]:
    """Packages and their versions; if runs differ, all versions."""
    found: dict[str, dict[str, None]] = {}
    runs = [run for study in studies for run in study.runs]
    sources = [mapping(study.evaluation.get("versions")) for study in studies]
    sources += [mapping(run.evaluation.get("versions")) for run in runs]
    sources += [mapping(mapping(run.config.get("origin")).get("versions")) for run in runs]
    for source in sources:
        for package, version in list(source.items())[:40]:
            found.setdefault(package, {})[short(version)] = None
    return list(zip(distinct(list(found)), map(", ".join, found.values()), strict=True))
