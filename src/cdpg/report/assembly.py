"""Builds studies from folders: runs in blocks, seeds grouped, evaluations side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cdpg.evaluation.held_out import APPLIED, TUNED_ON, WITH_GAIN
from cdpg.evaluation.metrics import COUNT_INFO, METRIC_INFO, POOLED
from cdpg.methods import METHODS, label_of
from cdpg.report.blocks import blocks_of, differences, facts
from cdpg.report.folders import Found, Record, Run, read_folders
from cdpg.report.study import BASE_NAME, Group, Study
from cdpg.report.style import OTHERS
from cdpg.report.values import distinct, interval, number, numbered, short, without
from cdpg.storage.json_files import mapping, sequence
from cdpg.tasks import known_counts

_PLACE = {"seed", "output_dir", "origin", "save_every", "keep_checkpoints", "report_to", "device", "log_samples"}
"""Settings in which repetitions of one run may differ."""
_ORIGIN = ("contexts", "tokens", "adapters")
"""Facts in the origin on which a training depends, beside its settings."""
_OF_MODELS = ("changes", "versus_ideal", "frequencies", "costs", "pass_at_k")
_CONDITIONS = {"contexts": "contexts", "samples_per_context": "samples a context", "seed": "seed"}
"""Conditions of an evaluation, by key of the file, and their names."""


@dataclass(frozen=True)
class _Draft:
    """A group that has no label yet."""

    method: str
    members: tuple[tuple[str, Run | None], ...]
    """Names of models, with the runs that made them."""

    @property
    def stem(self) -> str:
        """The common part of the names: a single model's name, or the part before the seed."""
        first = self.members[0][0]
        return first if len(self.members) == 1 else first.split("-seed")[0]

    @property
    def place(self) -> str:
        """The same with the first run's parent folder."""
        run = self.members[0][1]
        return self.stem if run is None else f"{run.path.parent.name}/{self.stem}"


def read_studies(paths: Sequence[Path]) -> tuple[Study, ...]:
    """The studies in some folders, one for each block of the report, in the order of the given runs."""
    found = read_folders(paths)
    blocks = blocks_of(found)
    records = [_comparison_of(block, found) for block in blocks]
    for folder, record in found.comparisons.items():  # a comparison without run folders is a study of its own
        models = mapping(record.get("models"))
        gone = not any(run.path.parent == folder and run.name in models for run in found.runs)
        if (models and gone) or not blocks:
            blocks.append([])
            records.append(record)
    drafts = [_drafts(block, record) for block, record in zip(blocks, records, strict=True)]
    labels = iter(_labels([draft for block in drafts for draft in block], several=len(blocks) > 1))
    studies = []
    for place, (block, record, own) in enumerate(zip(blocks, records, drafts, strict=True), start=1):
        groups = tuple(_styled(own, [next(labels) for _ in own]))
        study = _study(block, record, groups, found.problems if place == 1 else ())
        studies.append(replace(study, key=f"block-{place}-") if len(blocks) > 1 else study)
    return tuple(studies)


def _study(block: Sequence[Run], comparison: Record, groups: tuple[Group, ...], problems: Sequence[str]) -> Study:
    notes = [*problems, *(problem for run in block for problem in run.problems)]
    compared = mapping(comparison.get("models"))
    task = next((task for run in block if (task := facts(run)["task"])), None) or comparison.get("task")
    bases: dict[str, str] = {}
    if compared:
        evaluation = comparison
        notes += _made_otherwise(block)
    else:
        evaluation, bases = _side_by_side(groups, notes)
    lack = "is not in comparison.json" if compared else "has no evaluation.json"
    named = [pair for group in groups for pair in zip(group.models, group.runs, strict=False)]
    held = set(compared) or {name for name, run in named if run.evaluation}
    order = [name for run in block for name, own in named if own is run]
    missing = (short(name, 120) for name in order if name not in held)
    notes += [f"{name} {lack}: it is missing from the tables of the evaluation" for name in missing]
    return Study(task if isinstance(task, str) else None, groups, evaluation, tuple(notes), bases)


def _comparison_of(block: Sequence[Run], found: Found) -> Record:
    """The comparison of a block: one whose folder holds all of the block's runs, and which lists one of them."""
    folders = {run.path.parent for run in block}
    record = found.comparisons.get(next(iter(folders)), {}) if len(folders) == 1 else {}
    return record if any(run.name in mapping(record.get("models")) for run in block) else {}


def _made_otherwise(block: Sequence[Run]) -> list[str]:
    """A note on runs of one comparison that differ in more than the method."""
    found = dict.fromkeys(name for run in block[1:] for name in differences(block[0], run))
    if not found:
        return []
    return [
        f"by their config.yaml these runs differ in {', '.join(found)}: the tables are of one evaluation of them all, "
        "the curves of the runs are not comparable"
    ]


def _drafts(block: Sequence[Run], comparison: Record) -> list[_Draft]:
    """Runs by method and settings, in the order of methods; models without a folder by name."""
    together: dict[tuple[str, str], list[tuple[str, Run | None]]] = {}
    names = numbered((run.name for run in block), [BASE_NAME])
    for name, run in zip(names, block, strict=True):
        settings = {key: value for key, value in run.config.items() if key not in _PLACE}
        origin = mapping(run.config.get("origin"))
        whole = [settings, [origin.get(key) for key in _ORIGIN]]
        together.setdefault((run.method, json.dumps(whole, sort_keys=True, default=str)), []).append((name, run))
    for model in mapping(comparison.get("models")):
        if model not in (BASE_NAME, *names):
            together.setdefault((model.split("-seed")[0], ""), []).append((model, None))
    order = {method: place for place, method in enumerate(METHODS)}
    keys = sorted(together, key=lambda key: (order.get(key[0], len(order)), together[key][0][0]))
    return [_Draft(key[0], tuple(together[key])) for key in keys]


def _labels(drafts: Sequence[_Draft], several: bool) -> list[str]:
    """A unique label for each group: the method if it has one group only, else the run's name.

    With several blocks every group has its run's name, since users look for the names that they gave.
    """
    methods, stems = [draft.method for draft in drafts], [draft.stem for draft in drafts]
    names = [draft.stem if stems.count(draft.stem) == 1 else draft.place for draft in drafts]
    lone = {method for method in methods if methods.count(method) == 1 and not several}
    wanted = [label_of(method) if method in lone else name for method, name in zip(methods, names, strict=True)]
    return distinct([BASE_NAME, *wanted], 24)[1:]


def _styled(drafts: Sequence[_Draft], labels: Sequence[str]) -> Iterable[Group]:
    """Groups with their styles: the first group of a method has the method's style."""
    spare, seen = 0, set()
    for draft, label in zip(drafts, labels, strict=True):
        known = METHODS.get(draft.method) if draft.method not in seen else None
        style = known.style if known else None
        seen.add(draft.method)
        if style is None:
            style = OTHERS[spare % len(OTHERS)]
            spare += 1
        runs = tuple(run for _, run in draft.members if run is not None)
        yield Group(label, draft.method, style, runs, tuple(name for name, _ in draft.members))


def _side_by_side(groups: Sequence[Group], notes: list[str]) -> tuple[Record, dict[str, str]]:
    """The runs' own evaluations in the form of ``comparison.json``, and the base of each.

    A base that was measured once for all has one entry; where the figures differ, each run keeps its own.
    """
    members = [pair for group in groups for pair in zip(group.models, group.runs, strict=True) if pair[1].evaluation]
    if not members:
        return {}, {}
    bases = _bases(members)
    whole: Record = {"models": {}, **{key: {} for key in _OF_MODELS}, "examples": []}
    for name, run in members:
        for source, target in ((BASE_NAME, bases[name]), ("tuned", name)):
            whole["models"].setdefault(target, mapping(run.evaluation.get(source)))
            for key in _OF_MODELS:
                part = mapping(run.evaluation.get(key))
                if source in part:
                    whole[key].setdefault(target, part[source])
        _add_examples(whole["examples"], sequence(run.evaluation.get("examples")), name)
    evaluations = [run.evaluation for _, run in members]
    info = {key: _merged(key, evaluations) for key in (METRIC_INFO, COUNT_INFO)}
    whole = {**evaluations[0], **whole, **info}
    if len(members) > 1:
        whole.pop("command", None)  # it made one of them
    _drop_what_differs(whole, evaluations, notes)
    return whole, bases if len(set(bases.values())) > 1 else {}


def _merged(key: str, evaluations: Sequence[Record]) -> Record:
    """A mapping of every file, the first one's entry where several have one."""
    return {name: entry for record in reversed(evaluations) for name, entry in mapping(record.get(key)).items()}


def _bases(members: Sequence[tuple[str, Run]]) -> dict[str, str]:
    """The name of each run's base; runs with the same figures of the base share a name."""
    taken = [BASE_NAME, *(name for name, _ in members)]
    names: dict[tuple[tuple[str, str], ...], str] = {}
    bases = {}
    for name, run in members:
        figures = _rounded(without(run.evaluation.get(BASE_NAME), POOLED))
        if figures not in names:
            names[figures] = numbered([f"{BASE_NAME} of {name}"], [*taken, *names.values()])[0] if names else BASE_NAME
        bases[name] = names[figures]
    return bases


def _rounded(metrics: Record) -> tuple[tuple[str, str], ...]:
    """The means without their last digits, which differ between machines."""
    known = ((name, interval(value)) for name, value in sorted(metrics.items()))
    return tuple((name, f"{value.mean:.4g}") for name, value in known if value is not None)


def _drop_what_differs(whole: Record, evaluations: Sequence[Record], notes: list[str]) -> None:
    """Remove facts that differ between the runs, and add a note."""
    differing = [key for key in _CONDITIONS if len({number(record.get(key)) for record in evaluations}) > 1]
    for key in differing:
        whole.pop(key, None)
    if differing:
        called = ", ".join(_CONDITIONS[key] for key in differing)
        notes.append(f"these runs were not evaluated in the same way, they differ in {called}: compare with care")
    for key in (TUNED_ON, APPLIED, WITH_GAIN):
        if len({number(record.get(key)) for record in evaluations}) > 1:
            whole[key] = None
    if "samples_per_context" in differing:
        for model, counters in whole["frequencies"].items():
            kept = {"token_rank", *(name for name, count in known_counts(whole).items() if count.exclusive)}
            whole["frequencies"][model] = {key: item for key, item in mapping(counters).items() if key in kept}
        notes.append("counts are left out of the figures: they are of different numbers of outputs")
    pools = {interval(mapping(record.get(BASE_NAME)).get(POOLED)) for record in evaluations}
    if len(pools - {None}) > 1:  # of one pool the base has one value
        for key in ("models", "changes"):
            whole[key] = {model: without(part, POOLED) for model, part in whole[key].items()}
        notes.append(
            "the pooled KL(p, π) is left out of tables: each of these runs has it from a pool of its own, of samples "
            "of the base and itself; cdpg compare evaluates runs with one pool for all"
        )


def _add_examples(examples: list[Record], more: Iterable[object], name: str) -> None:
    """Merge examples by context; the base's outputs are taken once."""
    for item in map(mapping, more):
        outputs = mapping(item.get("outputs"))
        renamed = {name if model == "tuned" else model: output for model, output in outputs.items()}
        same = [example for example in examples if all(example.get(key) == item.get(key) for key in ("row", "prompt"))]
        if same:
            same[0]["outputs"] = {**renamed, **same[0]["outputs"]}
        else:
            examples.append({**item, "outputs": renamed})
