"""What a report is about: the runs, which of them are seeds of one another, and all evaluations side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cdpg.errors import UserError
from cdpg.evaluation.catalogue import POOLED
from cdpg.evaluation.unseen import contexts_in_words
from cdpg.report.folders import Found, Record, Run, read_folders
from cdpg.report.style import BASE, METHODS, OTHERS, Style
from cdpg.report.values import Interval, distinct, interval, number, numbered, short, text, without
from cdpg.runlog import mapping, sequence

BASE_NAME = "base"
_PLACE = {"seed", "output_dir", "origin", "save_every", "keep_checkpoints", "report_to", "device", "log_samples"}
"""Settings in which runs may differ and still be repetitions of one another."""
_OF_MODELS = ("changes", "versus_ideal", "frequencies", "costs")


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone, drawn as one line; the base is a group without runs."""

    label: str
    """To be shown: short, and no other group's."""
    method: str
    style: Style
    runs: tuple[Run, ...]
    models: tuple[str, ...]
    """The runs' names among the evaluated models."""


@dataclass(frozen=True)
class Study:
    """Everything that a report shows, in the form of ``comparison.json`` whatever the folders held."""

    task: str | None
    groups: tuple[Group, ...]
    """In order of methods; without the base."""
    evaluation: Record
    """All models side by side, checked for nothing but its outermost shape."""
    notes: tuple[str, ...]
    """What was missing or could not be read."""

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the evaluated models, the base first."""
        return tuple(mapping(self.evaluation.get("models")))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all metrics of any model, in the order of the files."""
        of_models = mapping(self.evaluation.get("models")).values()
        return tuple(dict.fromkeys(name for metrics in of_models for name in mapping(metrics)))

    @property
    def evaluated_along(self) -> str:
        """The contexts of the evaluations along the runs, in words; where runs differ in them, nothing is claimed."""
        found = {contexts_in_words(run.evaluations[-1]) for run in self.runs if run.evaluations}
        return found.pop() if len(found) == 1 else "contexts"

    def metric(self, model: str, name: str) -> Interval | None:
        """A model's figure from the final evaluation."""
        return interval(mapping(mapping(self.evaluation.get("models")).get(model)).get(name))

    def change(self, model: str, name: str) -> Interval | None:
        """Difference from the base, paired by context where the file has it."""
        changes = mapping(mapping(mapping(self.evaluation.get("changes")).get(model)).get(name))
        paired = interval(changes.get("difference"))
        mine, base = self.metric(model, name), self.metric(BASE_NAME, name)
        if paired is not None or mine is None or base is None:
            return paired
        return Interval(mine.mean - base.mean)

    def style_of(self, model: str) -> Style:
        """The colours of a model's group."""
        return next((group.style for group in self.groups if model in group.models), BASE)

    @cached_property
    def _labels(self) -> dict[str, str]:
        alone = {group.models[0]: group.label for group in self.groups if len(group.models) == 1}
        members = (model for group in self.groups for model in group.models)
        models = list(dict.fromkeys([BASE_NAME, *members, *self.models]))
        return dict(zip(models, distinct([alone.get(model, model) for model in models]), strict=True))

    def label_of(self, model: str) -> str:
        """The name to show, no other model's: the group's where the model is the only one of it."""
        return self._labels.get(model) or short(model)

    @property
    def is_code(self) -> bool:
        """Whether outputs are Python functions: by the task's name, else by what most contexts end in."""
        if self.task is not None and self.task.startswith("code"):
            return True
        prompts = [mapping(example).get("prompt") for example in sequence(self.evaluation.get("examples"))]
        prompts = prompts or [sample.get("prompt") for run in self.runs for sample in run.samples[-8:]]
        lines = [text(prompt).rstrip().rpartition("\n")[2].lstrip() for prompt in prompts]
        functions = [line.startswith(("def ", "async def ")) and line.endswith(":") for line in lines]
        return bool(functions) and 2 * sum(functions) > len(functions)


def read_study(paths: Sequence[Path]) -> Study:
    """The study that some folders hold."""
    found = read_folders(paths)
    task = _one_task(found)
    groups = tuple(_groups(found))
    notes = [*found.problems, *(problem for run in found.runs for problem in run.problems)]
    compared = mapping(found.comparison.get("models"))
    evaluation = found.comparison if compared else _side_by_side(groups, notes)
    names, lack = _names(found), "is not in comparison.json" if compared else "has no evaluation.json"
    held = set(compared) or {name for name, run in zip(names, found.runs, strict=True) if run.evaluation}
    missing = (short(name, 120) for name in names if name not in held)
    notes += [f"{name} {lack}: it is missing from the tables of the evaluation" for name in missing]
    return Study(task, groups, evaluation, tuple(notes))


def _one_task(found: Found) -> str | None:
    """The task that all runs share; runs of several tasks cannot be compared."""
    given = [run.evaluation.get("task") or run.config.get("task") for run in found.runs]
    named = dict(zip(_names(found), given, strict=True)) | {"comparison.json": found.comparison.get("task")}
    tasks = {task for task in named.values() if isinstance(task, str)}
    if len(tasks) > 1:
        listed = ", ".join(f"{short(name)}: {short(task)}" for name, task in named.items() if isinstance(task, str))
        raise UserError(f"these runs are of several tasks ({listed}): make a report for each task")
    return next(iter(tasks), None)


def _groups(found: Found) -> Iterable[Group]:
    """Runs by method and settings, in the order of methods, each group with a label and a style of its own."""
    together: dict[tuple[str, str], list[tuple[str, Run | None]]] = {}
    names = _names(found)
    for name, run in zip(names, found.runs, strict=True):
        settings = {key: value for key, value in run.config.items() if key not in _PLACE}
        key = (run.method, json.dumps(settings, sort_keys=True, default=str))
        together.setdefault(key, []).append((name, run))
    for model in mapping(found.comparison.get("models")):
        if model not in (BASE_NAME, *names):
            together.setdefault((model.split("-seed")[0], ""), []).append((model, None))
    order = {method: place for place, method in enumerate(METHODS)}
    keys = sorted(together, key=lambda key: (order.get(key[0], len(order)), together[key][0][0]))
    methods = [method for method, _ in keys]
    labels = [method if methods.count(method) == 1 else _stem(together[method, rest]) for method, rest in keys]
    spare = 0
    for place, (key, label) in enumerate(zip(keys, distinct([BASE_NAME, *labels], 24)[1:], strict=True)):
        method, members = key[0], together[key]
        style = METHODS.get(method) if method not in methods[:place] else None
        if style is None:
            style = OTHERS[spare % len(OTHERS)]
            spare += 1
        runs = tuple(run for _, run in members if run is not None)
        yield Group(label, method, style, runs, tuple(name for name, _ in members))


def _stem(members: Sequence[tuple[str, Run | None]]) -> str:
    """What the names of a group's runs have in common: of one run its name, of several the part before the seed."""
    first = members[0][0]
    return first if len(members) == 1 else first.split("-seed")[0]


def _names(found: Found) -> list[str]:
    """The runs' folder names, told apart by number where two folders share one; ``base`` stays free for the base."""
    return numbered((run.name for run in found.runs), [BASE_NAME])


def _side_by_side(groups: Sequence[Group], notes: list[str]) -> Record:
    """The runs' own evaluations put together as ``comparison.json`` has them."""
    whole: Record = {"models": {}, **{key: {} for key in _OF_MODELS}, "examples": []}
    conditions, pools = set(), set()
    for group in groups:
        for name, run in zip(group.models, group.runs, strict=True):
            evaluation = run.evaluation
            if not evaluation:
                continue
            conditions.add(tuple(number(evaluation.get(key)) for key in ("contexts", "samples_per_context", "seed")))
            pools.add(interval(mapping(evaluation.get(BASE_NAME)).get(POOLED)))
            whole = {**evaluation, **whole} if len(conditions) == 1 else whole
            for source, target in ((BASE_NAME, BASE_NAME), ("tuned", name)):
                whole["models"].setdefault(target, mapping(evaluation.get(source)))
                for key in _OF_MODELS:
                    part = mapping(evaluation.get(key))
                    if source in part:
                        whole[key].setdefault(target, part[source])
            _add_examples(whole["examples"], sequence(evaluation.get("examples")), name)
    if len(conditions) > 1:
        notes.append(
            "these runs were evaluated under different conditions (contexts, samples or seed): compare with care"
        )
    if len(pools - {None}) > 1:  # of one pool the base has one value
        for key in ("models", "changes"):
            whole[key] = {model: without(part, POOLED) for model, part in whole[key].items()}
        notes.append(
            "the pooled KL(p, π) is left out of tables: each of these runs has it from a pool of its own, of samples "
            "of the base and itself; cdpg compare evaluates runs with one pool for all"
        )
    return whole if whole["models"] else {}


def _add_examples(examples: list[Record], more: Iterable[object], name: str) -> None:
    """Outputs for a context that is there already are put beside the others; the base's are taken once."""
    for item in map(mapping, more):
        outputs = mapping(item.get("outputs"))
        renamed = {name if model == "tuned" else model: output for model, output in outputs.items()}
        same = [example for example in examples if all(example.get(key) == item.get(key) for key in ("row", "prompt"))]
        if same:
            same[0]["outputs"] = {**renamed, **same[0]["outputs"]}
        else:
            examples.append({**item, "outputs": renamed})
