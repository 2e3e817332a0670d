"""A job, as a command or a configuration file describes it: a task or a model, contexts, a constraint, and settings."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdpg.config import FIELDS, GENERAL, METHOD_SETTINGS, CDPGConfig, parse_overrides, read_yaml
from cdpg.constraints.factors import Moment, Reward, Tilt, parse_factor
from cdpg.constraints.named import load_constraint
from cdpg.contexts.chats import as_chats
from cdpg.contexts.contexts import DEFAULT_COLUMN, Context, load_contexts
from cdpg.contexts.digests import count_tuned_on, prompt_digests
from cdpg.contexts.splitting import split
from cdpg.errors import UserError
from cdpg.evaluation.measures import Measure, TextMeasure
from cdpg.messages.foreign_names import unknown_setting
from cdpg.messages.terms import term
from cdpg.models.names import locate
from cdpg.models.rng import UniformStream
from cdpg.system.trackers import require_trackers
from cdpg.tasks import DEFAULT_PRESET, find_preset, find_task
from cdpg.tasks.base import Draw, Task, satisfiable
from cdpg.values import no_text

if TYPE_CHECKING:  # torch is loaded when everything that can be wrong without it has been looked at
    from cdpg.models.sampling import StopRule

_log = logging.getLogger(__name__)

_ORIGIN = "origin"
"""The key of the origin in a run's ``config.yaml``; not a setting."""
NEEDED = ("model", "contexts", "constraint")
"""Values that are required without a task; a moment or a reward may take the place of the constraint."""
_FACTORS: dict[str, type[Moment] | type[Reward]] = {"moment": Moment, "reward": Reward}
_OF_A_TASK = (
    "task",
    "preset",
    "constraint",
    "moment",
    "reward",
    "contexts",
    "eval_contexts",
    "prompt_column",
    "prompt_prefix",
)
"""Values of a job that belong to its task or override it."""
_NO_CONSTRAINT = "none"
"""The constraint of a task whose own is left out, for moments and rewards alone."""
_OF_CONTEXTS = (".csv", ".tsv", ".jsonl", ".ndjson", ".txt")
"""Endings that no file of settings has."""
_FEW = 50
"""With fewer contexts, none are held out."""
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.1, 500


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The loaded inputs of a job."""

    tuning: list[Context]
    held_out: list[Context]
    constraints: list[Any]
    measure: Measure
    stop: StopRule | None

    def count_tuned_on(self) -> int:
        """How many of the contexts to evaluate on have a prompt that is tuned on."""
        return count_tuned_on(self.held_out, set(prompt_digests(self.tuning)))


@dataclasses.dataclass(frozen=True)
class Job:
    """A run, described by names."""

    model: str
    """The model to tune: a hub id, a folder, or one that comes with the package (``code-tiny``, ``t5-tiny``)."""
    constraint: tuple[str, ...]
    """One or several ``module:function``; none if there are only moments and rewards."""
    settings: CDPGConfig
    task: str | None = None
    """One of the package's tasks; it fills in values that are not given."""
    preset: str = DEFAULT_PRESET
    """The task's scale."""
    contexts: str | None = None
    """A CSV, JSONL, JSON or text file; the task's own by default. For code also a folder of Python sources."""
    eval_contexts: str | None = None
    """The same for held-out contexts; by default the task's own, or a tenth of the contexts."""
    prompt_column: str | None = None
    """The column of the contexts that holds the prompt, or for a task the text that goes into it."""
    prompt_prefix: str | None = None
    """Text before every prompt; the task's own by default."""
    moment: tuple[str, ...] = ()
    """Moments of the target, ``module:function=mean``."""
    reward: tuple[str, ...] = ()
    """Rewards of the target, ``module:function=β``."""
    data_seed: int = 0
    """Seed for the choice of rows and of held-out contexts; separate from ``seed``, so that runs with different seeds
    are evaluated on the same contexts."""

    def inputs(self) -> dict[str, Any]:
        """All values except the settings, in the form of :meth:`from_mapping`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["settings"]
        values |= {key: list(values[key]) for key in ("constraint", *_FACTORS)}
        return {key: value for key, value in values.items() if value is not None and (value or key not in _FACTORS)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Job:
        """A job from a flat mapping of all values; everything missing or unknown is reported in one error."""
        values = {key: value for key, value in values.items() if key != _ORIGIN}
        own = {field.name for field in dataclasses.fields(cls)} - {"settings"}
        problems = [unknown_setting(key, {*FIELDS, *own}) for key in values if key not in FIELDS and key not in own]
        not_texts = list(_not_texts(values))
        problems += not_texts
        if values.get("task") is not None and not not_texts:
            values = _filled_in(find_task(values["task"]), values)
        missing = missing_inputs(values) if values.get("task") is None else []
        if missing:
            problems.append(
                f"{', '.join(missing)} must be given, by {', '.join(map(term, missing))} or in the file; "
                f"or give the name of a task (cdpg tasks lists them)"
            )
        if problems:
            raise UserError("; ".join(problems))
        return cls(
            **{key: values[key] for key in _TEXTS if values.get(key) is not None},
            constraint=tuple(name for name in _names(values.get("constraint")) if name != _NO_CONSTRAINT),
            moment=_factor_texts("moment", values.get("moment")),
            reward=_factor_texts("reward", values.get("reward")),
            settings=CDPGConfig.from_mapping({key: value for key, value in values.items() if key in FIELDS}),
            data_seed=_seed(values.get("data_seed", 0)),
        )

    def load(self, *, to_tune: bool = True) -> Inputs:
        """Read contexts and import constraints; unusual data are logged.

        Without ``to_tune``, contexts to tune on are not read; the held-out contexts take their place.
        """
        if to_tune:
            require_trackers(self.settings.report_to)
        locate(self.model)  # a misspelt name of an embedded model is refused before anything is loaded
        constraints = [load_constraint(name) for name in self.constraint] + self.factors()
        task = None if self.task is None else find_task(self.task)
        chat = self.settings.chat, self.settings.system
        tuning, held_out = (as_chats(part, *chat) for part in self._contexts(task, to_tune))
        if task is None:
            return Inputs(tuning, held_out, constraints, TextMeasure(), None)
        return Inputs(tuning, held_out, constraints, task.measure, task.stop)

    def factors(self) -> list[Any]:
        """The moments and rewards, their functions imported."""
        given = [parse_factor(_FACTORS[key], text) for key in _FACTORS for text in getattr(self, key)]
        return list(Tilt(given).factors)

    def _contexts(self, task: Task | None, to_tune: bool) -> tuple[list[Context], list[Context]]:
        """The contexts to tune on and the held-out contexts."""
        held_out = self._read(self.eval_contexts, task) if self.eval_contexts else None
        if held_out is not None and not to_tune:
            return held_out, held_out
        if self.contexts is not None:
            tuning = self._read(self.contexts, task)
            if held_out is None:
                return self._split(tuning, self.settings.evaluates or not to_tune)
        else:
            assert task is not None
            draw = Draw(self.data_seed, task.usable)
            rows = find_preset(task, self.preset).rows(draw)
            tuning, own = (task.contexts(part, self.prompt_prefix or "") for part in rows)
            if held_out is None:
                return tuning, own
        _log_shared(tuning, held_out)
        return tuning, held_out

    def _read(self, path: str, task: Task | None) -> list[Context]:
        """The contexts of a user's file or folder."""
        prefix = self.prompt_prefix or ""
        if task is None:
            found = load_contexts(path, prompt_column=self.prompt_column or DEFAULT_COLUMN)
            return [_prefixed(context, prefix) for context in found] if prefix else found
        rows = task.read(path, self.prompt_column or task.column)
        usable = satisfiable(rows, Draw(self.data_seed, task.usable))
        return load_contexts(task.contexts(usable, prefix))

    def _split(self, contexts: list[Context], evaluates: bool) -> tuple[list[Context], list[Context]]:
        """Hold out a seeded tenth of the contexts, unless they are few; no group is on both sides."""
        same = "none are held out" + (", and the evaluation uses the same ones" if evaluates else "")
        if len(contexts) < _FEW:
            _log.warning(f"only {len(contexts)} contexts: {same}")
            return contexts, contexts
        order = UniformStream(self.data_seed, "held-out", 0).permutation
        count = min(_MOST_HELD_OUT, int(len(contexts) * _HELD_OUT_SHARE))
        tuning, held_out = ([contexts[i] for i in part] for part in split(contexts, count, order))
        if not held_out:
            _log.warning(
                f"all contexts are of one file or have one prompt: {same}; {term('eval_contexts')} names others"
            )
            return contexts, contexts
        spare = len(held_out) - _MOST_HELD_OUT  # of a single large file
        unused = f", and {spare:,} that belong with them are not used" if spare > 0 else ""
        held_out = held_out[:_MOST_HELD_OUT]
        _log.info(
            f"{len(held_out):,} of {len(contexts):,} contexts are held out for evaluation{unused}; "
            f"{term('eval_contexts')} names others"
        )
        return tuning, held_out


def idle_settings(names: Iterable[str], config: CDPGConfig) -> dict[str, str]:
    """Those of some settings that have no effect in a run, each with the reason."""
    own = METHOD_SETTINGS[config.method]
    of_others = {*FIELDS} - {*GENERAL} - {field.name for field in dataclasses.fields(own)}
    reasons = dict.fromkeys(of_others, f"method {config.method} does not use it")
    reasons |= config.settings_of(own).idle()
    return {name: reasons[name] for name in names if name in reasons}


_TEXTS = frozenset(field.name for field in dataclasses.fields(Job)) - {
    *("constraint", "settings", "data_seed"),
    *_FACTORS,
}
"""The values of a job that are texts."""


def missing_inputs(values: Mapping[str, Any]) -> list[str]:
    """Those of the values that a job without a task needs and that are not given."""
    has_factor = any(values.get(key) for key in _FACTORS)
    return [key for key in NEEDED if not values.get(key) and not (key == "constraint" and has_factor)]


def _names(value: Any) -> list[str]:
    """One name or several, as a list."""
    return [value] if isinstance(value, str) else list(value or ())


def _factor_texts(key: str, value: Any) -> tuple[str, ...]:
    """Moments or rewards as ``module:function=number``; YAML may also map names to numbers."""
    texts = [f"{name}={number}" for name, number in value.items()] if isinstance(value, Mapping) else _names(value)
    for text in texts:
        parse_factor(_FACTORS[key], text)  # refused here, with all that is wrong with the settings
    return tuple(texts)


def prompting(values: Mapping[str, Any]) -> tuple[str, StopRule | None]:
    """The prompt prefix and the stop rule, from the values of a command or of a run's file."""
    task = None if values.get("task") is None else find_task(str(values["task"]))
    known = values if task is None else _filled_in(task, values)
    return str(known.get("prompt_prefix") or ""), None if task is None else task.stop


def without_task(values: Mapping[str, Any]) -> dict[str, Any]:
    """A run's values without those of its task and preset, those that override them, and the defaults."""
    task = None if values.get("task") is None else find_task(str(values["task"]))
    preset = {} if task is None else find_preset(task, str(values.get("preset") or DEFAULT_PRESET)).settings
    usual = CDPGConfig.from_mapping(preset).to_mapping()
    return {
        key: value
        for key, value in values.items()
        if key not in _OF_A_TASK and not (key in usual and value == usual[key])
    }


def _filled_in(task: Task, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the task's preset, overridden by the given ones."""
    preset = find_preset(task, str(values.get("preset") or DEFAULT_PRESET))
    given = {key: value for key, value in values.items() if value is not None}
    own = {"model": preset.model, "constraint": task.constraint, "prompt_prefix": preset.prefix}
    return {**own, **preset.settings, **given}


def _not_texts(values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each value that should be a text but is not."""
    for key, value in values.items():
        if key in _TEXTS and not isinstance(value, str | None):
            yield no_text(key, value)
    constraint = values.get("constraint")
    items = constraint if isinstance(constraint, (list, tuple)) else [constraint]
    if constraint is not None and not all(isinstance(item, str) for item in items):
        yield no_text("constraint", constraint, "module:function, or a list of those")
    for key in _FACTORS:
        given = values.get(key)
        items = given if isinstance(given, (list, tuple)) else [given]
        if given is not None and not isinstance(given, Mapping) and not all(isinstance(item, str) for item in items):
            yield no_text(key, given, "module:function=number, or a list of those")


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"data_seed takes a whole number of at least 0, not {value!r}")
    return value


def _log_shared(tuning: Sequence[Context], held_out: Sequence[Context]) -> None:
    shared = count_tuned_on(held_out, set(prompt_digests(tuning)))
    if shared:
        _log.warning(
            f"{shared:,} of {len(held_out):,} contexts to evaluate on have a prompt that is also tuned on: the "
            "evaluation is not only of unseen contexts"
        )


def _prefixed(context: Context, prefix: str) -> Context:
    if not isinstance(context.prompt, str):
        raise UserError(f"row {context.row} is a chat, and prompt_prefix goes before a text: put it into the messages")
    return dataclasses.replace(context, prompt=prefix + context.prompt)


def gather(config: Path | None, options: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A file's settings, overridden by the options, then by ``--set``."""
    if config is not None and not config.is_file():
        what = "is a folder" if config.is_dir() else "does not exist"
        own = config / "config.yaml"
        hint = f", for the run in it {str(own)!r}" if own.is_file() else ""
        raise UserError(f"{str(config)!r} {what}: expected a task's name (cdpg tasks) or a YAML file of settings{hint}")
    if config is not None and config.suffix.lower() in _OF_CONTEXTS:
        raise UserError(
            f"{str(config)!r} is a file of contexts by its name: give it with {term('contexts')}; expected a task's "
            "name (cdpg tasks) or a YAML file of settings"
        )
    values = read_yaml(config) if config is not None else {}
    given = {key: value for key, value in options.items() if value is not None and value != []}
    return {**values, **given, **parse_overrides(overrides, _TEXTS)}
