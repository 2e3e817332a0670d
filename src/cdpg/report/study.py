"""A study: the runs of one block of a report, grouped by seed, with all their evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from cdpg.evaluation.held_out import contexts_in_words
from cdpg.evaluation.metrics import Count, Metric
from cdpg.methods import Style
from cdpg.report.folders import Record, Run
from cdpg.report.style import BASE
from cdpg.report.values import MeanInterval, distinct, interval, short, text, visible
from cdpg.storage.json_files import mapping, sequence
from cdpg.tasks import known_counts, known_metrics

BASE_NAME = "base"


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed, drawn as one line; the base is a group without runs."""

    label: str
    """The name to show: short, and unique among the groups."""
    method: str
    style: Style
    runs: tuple[Run, ...]
    models: tuple[str, ...]
    """The runs' names among the evaluated models."""


@dataclass(frozen=True)
class Beside:
    """A figure of a tuned model and of its base, from one evaluation."""

    base: MeanInterval | None
    tuned: MeanInterval | None
    change: MeanInterval | None
    """Their difference, paired by context if the file has it."""


@dataclass(frozen=True)
class Study:
    """Runs of one base, one constraint and the same contexts, in the form of ``comparison.json``."""

    task: str | None
    groups: tuple[Group, ...]
    """In order of methods; without the base."""
    evaluation: Record
    """All models side by side; only the outermost shape is checked."""
    notes: tuple[str, ...]
    """What was missing or could not be read."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """The name of each model's base, if the base was measured more than once (for example with several seeds)."""
    key: str = ""
    """Prefix of the names of its tables and figures, if a report has several studies."""

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the evaluated models, each base before the first model that was measured with it."""
        return tuple(mapping(self.evaluation.get("models")))

    @property
    def tuned(self) -> tuple[str, ...]:
        """The models except the bases."""
        return tuple(model for model in self.models if not self.is_base(model))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics of any model, in the order of the files."""
        of_models = mapping(self.evaluation.get("models")).values()
        return tuple(dict.fromkeys(name for metrics in of_models for name in mapping(metrics)))

    @cached_property
    def known_metrics(self) -> dict[str, Metric]:
        """How metrics are shown, in order: by the file's descriptions, else by the tasks'."""
        return {name: _visible(metric) for name, metric in known_metrics(self.evaluation).items()}

    @cached_property
    def known_counts(self) -> dict[str, Count]:
        """How counts are shown."""
        return known_counts(self.evaluation)

    def describe(self, name: str) -> Metric:
        """How a metric is shown; an unknown one by its name."""
        return self.known_metrics.get(name) or Metric(short(name), "A metric of this run's own.")

    @property
    def evaluated_along(self) -> str:
        """The contexts of the evaluations during the runs, in words; generic if the runs differ."""
        found = {contexts_in_words(run.evaluations[-1]) for run in self.runs if run.evaluations}
        return found.pop() if len(found) == 1 else "contexts"

    def base_of(self, model: str) -> str:
        """The base that a model was measured with."""
        return self.bases.get(model, BASE_NAME)

    def is_base(self, model: str) -> bool:
        return model == BASE_NAME or model in self.bases.values()

    def run_of(self, model: str) -> Run | None:
        """The run that made a model, if its folder was given."""
        members = (pair for group in self.groups for pair in zip(group.models, group.runs, strict=False))
        return next((run for name, run in members if name == model), None)

    def metric(self, model: str, name: str) -> MeanInterval | None:
        """A model's figure from the final evaluation."""
        return interval(mapping(mapping(self.evaluation.get("models")).get(model)).get(name))

    def change(self, model: str, name: str) -> MeanInterval | None:
        """Difference from the model's own base, paired by context if the file has it."""
        return _difference(
            self.evaluation, model, self.describe(name), name, self.metric(model, name),
            self.metric(self.base_of(model), name),
        )  # fmt: skip

    def beside_base(self, model: str, name: str) -> Beside:
        """A model and its base; a pooled figure that the models do not share is from the run's own evaluation."""
        tuned, run = self.metric(model, name), self.run_of(model)
        if tuned is not None or run is None:
            return Beside(self.metric(self.base_of(model), name), tuned, self.change(model, name))
        own = run.evaluation
        base, tuned = (interval(mapping(own.get(key)).get(name)) for key in (BASE_NAME, "tuned"))
        return Beside(base, tuned, _difference(own, "tuned", self.describe(name), name, tuned, base))

    def style_of(self, model: str) -> Style:
        """The colours of a model's group."""
        return next((group.style for group in self.groups if model in group.models), BASE)

    @cached_property
    def _labels(self) -> dict[str, str]:
        alone = {group.models[0]: group.label for group in self.groups if len(group.models) == 1}
        members = [model for group in self.groups for model in group.models]
        shown = {model: alone.get(model, model) for model in dict.fromkeys([BASE_NAME, *members, *self.models])}
        for base in dict.fromkeys(self.bases.values()):
            of = ", ".join(shown[model] for model, own in self.bases.items() if own == base)
            shown[base] = f"{BASE_NAME} of {of}"
        return dict(zip(shown, distinct(list(shown.values())), strict=True))

    def label_of(self, model: str) -> str:
        """The name to show, unique among the models: the group's name if the model is its only one."""
        return self._labels.get(model) or short(model)

    @property
    def is_code(self) -> bool:
        """Whether outputs are Python functions: by the task's name, else by the end of most contexts."""
        if self.task is not None and self.task.startswith("code"):
            return True
        prompts = [mapping(example).get("prompt") for example in sequence(self.evaluation.get("examples"))]
        prompts = prompts or [sample.get("prompt") for run in self.runs for sample in run.samples[-8:]]
        lines = [text(prompt).rstrip().rpartition("\n")[2].lstrip() for prompt in prompts]
        functions = [line.startswith(("def ", "async def ")) and line.endswith(":") for line in lines]
        return bool(functions) and 2 * sum(functions) > len(functions)


def _visible(metric: Metric) -> Metric:
    """A metric whose texts may come from a file."""
    return replace(metric, label=short(metric.label, 60), meaning=visible(metric.meaning), unit=short(metric.unit))


def _difference(
    evaluation: Record, model: str, metric: Metric, name: str, tuned: MeanInterval | None, base: MeanInterval | None
) -> MeanInterval | None:
    """The change in an evaluation, else the difference of the means; None if the models do not differ."""
    if metric.of_base:
        return None
    changes = mapping(mapping(mapping(evaluation.get("changes")).get(model)).get(name))
    paired = interval(changes.get("difference"))
    if paired is not None or tuned is None or base is None:
        return paired
    return MeanInterval(tuned.mean - base.mean)
