"""Samples side by side: the outputs of the base and of every method for the same contexts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from cdpg.report.folders import Record
from cdpg.report.highlight import prose, python
from cdpg.report.study import BASE_NAME, Study
from cdpg.report.values import count, is_chat, number, short, text
from cdpg.storage.json_files import mapping, sequence

MOST_CONTEXTS = 8
MOST_OUTPUTS = 2
"""Outputs shown for a model and a context."""
_SOURCES = ("source", "article", "document")
_LONG = 420
"""A context of more characters is folded away."""


@dataclass(frozen=True)
class Output:
    """One output of one model."""

    model: str
    color: str
    verdict: str
    """``yes``, ``no``, ``part``, or empty if b is not known."""
    score: str
    body: Markup
    outcome: str
    """The error that the evaluation found, if any."""
    note: str


@dataclass(frozen=True)
class Example:
    """A context with its outputs."""

    prompt: Markup
    opening: str
    """The first words of a context that is folded away; empty for a short one."""
    columns: tuple[tuple[str, str], ...]
    """The other columns, such as the reference, except those contained in the prompt."""
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class SampleExamples:
    evaluated: bool
    """Whether they come from an evaluation."""
    code: bool
    examples: tuple[Example, ...]


def samples_of(study: Study) -> SampleExamples:
    """Examples of the evaluation; without one, the last training samples of each run."""
    given = [mapping(item) for item in sequence(study.evaluation.get("examples"))]
    found = given or _from_training(study)
    examples = tuple(_example(study, item) for item in found[:MOST_CONTEXTS])
    return SampleExamples(bool(given), study.is_code, tuple(example for example in examples if example.outputs))


def _example(study: Study, item: Record) -> Example:
    code = study.is_code
    prompt = text(item.get("prompt"))
    columns = mapping(item.get("columns"))
    source = " ".join([prompt, *(text(columns.get(key)) for key in _SOURCES)])
    outputs = mapping(item.get("outputs"))
    shown = [BASE_NAME, *(group.models[0] for group in study.groups)]
    made = tuple(
        _output(study, model, mapping(output), prompt, source, code)
        for model in shown
        for output in sequence(outputs.get(model))[:MOST_OUTPUTS]
    )
    body = python(prompt) if code else prose(prompt, "")
    opening = f"{' '.join(prompt[:160].split())} …" if len(prompt) > _LONG else ""
    new = {key: value for key, value in columns.items() if value is not None and text(value) not in prompt}
    others = tuple((short(key), text(value, 1200)) for key, value in list(new.items())[:6])
    return Example(body, opening, others, made)


def _output(study: Study, model: str, output: Record, prompt: str, source: str, code: bool) -> Output:
    b = number(output.get("b"))
    verdict = "" if b is None else "yes" if b >= 1 else "no" if b <= 0 else "part"
    body = text(output.get("text"))
    outcome = output.get("outcome")
    wrong = outcome if isinstance(outcome, str) and outcome not in ("", "ok") else ""
    line = count(output.get("line"))
    if code:
        shown = python(prompt + body, int(line) if line is not None and wrong else None)
    else:
        shown = prose(body, source)
    label = study.label_of(model) if model == BASE_NAME else _group_label(study, model)
    score = "" if b is None or verdict in ("yes", "no") else f"b = {b:.2f}"
    color = study.style_of(model).color
    return Output(label, color, verdict, score, shown, short(wrong, 90), short(output.get("decoding"), 30))


def _group_label(study: Study, model: str) -> str:
    return next((group.label for group in study.groups if model in group.models), short(model))


def _from_training(study: Study) -> list[Record]:
    """Contexts of the last logged epochs, those shared by most runs first."""
    by_prompt: dict[str, Record] = {}
    for model, sample, decoding in _last_samples(study):
        prompt = sample.get("prompt")
        if isinstance(prompt, str) or is_chat(prompt):
            output = {"text": sample.get("completion"), "b": sample.get("b"), "decoding": decoding}
            example = by_prompt.setdefault(json.dumps(prompt), {"prompt": prompt, "outputs": {}})
            example["outputs"].setdefault(model, []).append(output)
    return sorted(by_prompt.values(), key=lambda example: -len(example["outputs"]))[:4]


def _last_samples(study: Study) -> Iterator[tuple[str, Record, str]]:
    for group in study.groups:
        for run in group.runs[:1]:
            kind = f"training sample of the {run.drawn_by}" if run.drawn_by else "training sample"
            for sample in reversed(run.samples[-32:]):
                yield group.models[0], sample, kind
