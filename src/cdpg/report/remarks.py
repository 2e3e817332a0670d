"""The parts of a diagnosis: findings, topics that passed, and topics that could not be judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

NOTHING_LEARNT, DISTANCE, OTHER = 0, 1, 2
"""The urgency of a finding. The first two change the meaning of the figures and are shown before them."""


@dataclass(frozen=True)
class Topic:
    """One property that is checked."""

    name: str
    limit: str
    """When there is a finding."""


@dataclass(frozen=True)
class Finding:
    """One sentence of diagnosis and one of advice."""

    level: Literal["problem", "warning"]
    model: str
    title: str
    text: str
    advice: str = ""
    urgency: int = OTHER


@dataclass(frozen=True)
class Passed:
    """A topic without a finding for a model."""

    model: str
    topic: Topic
    shown: str
    """The figure that was checked."""


@dataclass(frozen=True)
class Unjudged:
    """A topic that could not be judged."""

    model: str
    topic: Topic
    why: str


Remark = Finding | Passed | Unjudged


@dataclass(frozen=True)
class TopicLine:
    """A line of the list of topics that passed."""

    name: str
    limit: str
    shown: str


@dataclass(frozen=True)
class Diagnosis:
    """All remarks on the models of a study."""

    findings: tuple[Finding, ...]
    """The most urgent first, then problems before warnings."""
    passed: tuple[TopicLine, ...]
    """A line a topic, with the figure of every model that passed."""
    unjudged: tuple[tuple[str, str], ...]
    """Reasons why topics could not be judged, with the topics, and the models if not all."""

    @property
    def urgent(self) -> tuple[Finding, ...]:
        """Findings that are shown before any figure."""
        return tuple(finding for finding in self.findings if finding.urgency < OTHER)

    @property
    def others(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.urgency == OTHER)


def diagnosis_of(remarks: Iterable[Remark], models: Iterable[str]) -> Diagnosis:
    """Remarks in order, by topic; ``models`` are all models that were checked."""
    given, everyone = list(remarks), list(models)
    order = {"problem": 0, "warning": 1}
    findings = [remark for remark in given if isinstance(remark, Finding)]
    findings.sort(key=lambda finding: (finding.urgency, order[finding.level]))
    figures: dict[Topic, dict[str, str]] = {}
    lacking: dict[str, dict[Topic, list[str]]] = {}
    for remark in given:
        if isinstance(remark, Passed):
            figures.setdefault(remark.topic, {})[remark.model] = remark.shown
        elif isinstance(remark, Unjudged):
            lacking.setdefault(remark.why, {}).setdefault(remark.topic, []).append(remark.model)
    return Diagnosis(
        tuple(findings),
        tuple(TopicLine(topic.name, topic.limit, _figures(shown, everyone)) for topic, shown in figures.items()),
        tuple((why, _listed(topics, everyone)) for why, topics in lacking.items()),
    )


def _figures(shown: dict[str, str], everyone: list[str]) -> str:
    """The figure of each model; once if all are the same."""
    if list(shown) == everyone and len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{model} {figure}" for model, figure in shown.items())


def _listed(topics: dict[Topic, list[str]], everyone: list[str]) -> str:
    """Topics grouped by their models; the models are named if they are not all."""
    together: dict[tuple[str, ...], list[str]] = {}
    for topic, models in topics.items():
        together.setdefault(tuple(models), []).append(topic.name)
    parts = []
    for some, names in together.items():
        of = "" if list(some) == everyone else f" ({', '.join(some)})"
        parts.append(f"{', '.join(names)}{of}")
    return "; ".join(parts)
