"""Hugging Face callbacks (``transformers.TrainerCallback``) on this loop: an epoch is reported as a step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState

from cdpg.config import CDPGConfig
from cdpg.errors import UserError
from cdpg.sandbox.worker import short_repr
from cdpg.storage.jsonl import read_jsonl

BEST = "satisfaction"
"""The held-out metric by which callbacks choose the best epoch; higher is better."""


class Arguments:
    """The settings, and the attributes of ``TrainingArguments`` that Hugging Face callbacks read."""

    def __init__(self, config: CDPGConfig, evaluates: bool) -> None:
        self._config = config
        self.num_train_epochs = self.max_steps = config.epochs
        self.logging_strategy, self.logging_steps, self.logging_first_step = "steps", 1, True
        self.eval_strategy = "steps" if evaluates else "no"
        self.eval_steps, self.eval_delay = max(1, config.evaluation_interval), 0
        self.save_strategy, self.save_steps = "steps", config.save_every
        self.load_best_model_at_end, self.metric_for_best_model, self.greater_is_better = False, BEST, True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._config, name):
            raise AttributeError(f"there is no setting {name!r}", name=name, obj=self)
        return getattr(self._config, name)

    def to_dict(self) -> dict[str, Any]:
        return self._config.to_mapping()

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


class Callbacks:
    """Calls the user's callbacks in Hugging Face's order, and keeps their requests.

    An epoch is one step: ``on_epoch_begin``, ``on_step_begin``, for each optimiser step ``on_pre_optimizer_step`` and
    ``on_optimizer_step``, then ``on_step_end``, ``on_log``, where due ``on_evaluate`` and ``on_save``, and
    ``on_epoch_end``. Every call is given ``parts``, by the names that Hugging Face uses: ``model``,
    ``processing_class``, ``optimizer``. A class is made into a callback without arguments; a single callback needs no
    list. ``has_contexts``: there are contexts to evaluate on.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | TrainerCallback,
        config: CDPGConfig,
        is_main: bool,
        has_contexts: bool,
        parts: Mapping[str, Any],
    ) -> None:
        self._callbacks: list[TrainerCallback] = []
        self._has_contexts = has_contexts
        self._parts = {"lr_scheduler": None, "train_dataloader": None, "eval_dataloader": None, **parts}
        self.control = TrainerControl()
        self.state = TrainerState(logging_steps=1, is_world_process_zero=is_main, is_local_process_zero=is_main)
        self._settle(config)
        single = isinstance(callbacks, str) or not isinstance(callbacks, Iterable)
        given: Any = [callbacks] if single else callbacks
        for callback in given:
            self.add(callback)

    def add(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback after the others."""
        callback = callback() if isinstance(callback, type) else callback
        if not hasattr(callback, "on_train_begin"):
            raise UserError(
                f"a callback is {short_repr(callback)}: pass callbacks of Transformers (TrainerCallback), or their "
                "classes"
            )
        if not self._evaluates and isinstance(callback, EarlyStoppingCallback):
            reason = "evaluate_every is 0: raise it" if self._has_contexts else "there are none: pass eval_dataset"
            raise UserError(
                f"EarlyStoppingCallback looks at evaluations during the run, and {reason}, or leave the callback out"
            )
        self._callbacks.append(callback)

    def pop(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove a callback, or the first of a class, and return it; None if there is none."""
        for known in self._callbacks:
            if isinstance(known, callback) if isinstance(callback, type) else known is callback:
                self._callbacks.remove(known)
                return known
        return None

    def begin(self, config: CDPGConfig, done: int, history: Sequence[Mapping[str, Any]]) -> None:
        """Training starts after so many epochs, with their ``history``; an earlier request to stop is cleared.

        ``config``: a resumed run may keep settings of its start.
        """
        self._settle(config)
        self.control.should_training_stop = False
        self.state.epoch = self.state.global_step = done
        self.state.log_history = [dict(record) for record in history]
        self.state.best_metric = self.state.best_global_step = None
        for record in history:
            self._note_best(record.get(f"eval_{BEST}"), record["step"])
        self.call("on_train_begin")

    def epoch_begin(self) -> None:
        """An epoch starts; requests from the epoch before are cleared."""
        self.control.should_epoch_stop = False
        self.call("on_epoch_begin")
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self.call("on_step_begin")

    def step_end(self, record: Mapping[str, Any]) -> None:
        """The epoch's steps are taken; its metrics are logged."""
        self.state.epoch = self.state.global_step = record["epoch"]
        self.call("on_step_end")
        self._log(record)

    def evaluated(self, metrics: Mapping[str, float | None], may_be_best: bool = True) -> None:
        """Log an evaluation and report it, with the epoch; then update the best one so far."""
        logs = {**metrics, "epoch": self.state.epoch}
        self._log(logs)
        self.control.should_evaluate = False
        self.call("on_evaluate", metrics=logs)
        if may_be_best:
            self._note_best(metrics.get(f"eval_{BEST}"), self.state.global_step)

    def saved(self) -> None:
        """A checkpoint is written."""
        self.control.should_save = False
        self.call("on_save")

    def call(self, event: str, **arguments: Any) -> None:
        """Call one event of every callback."""
        for callback in list(self._callbacks):
            try:
                result = getattr(callback, event)(self._arguments, self.state, self.control, **self._parts, **arguments)
            except AttributeError as error:
                if error.obj is not self._arguments:
                    raise
                raise UserError(
                    f"the callback {type(callback).__name__} reads the argument {error.name!r}, which has no "
                    "counterpart among the settings: leave it out"
                ) from error
            self.control = self.control if result is None else result

    def _settle(self, config: CDPGConfig) -> None:
        """Update arguments and state from the settings."""
        self._evaluates = self._has_contexts and config.evaluation_interval > 0
        self._arguments = Arguments(config, self._evaluates)
        self.state.max_steps = self.state.num_train_epochs = config.epochs
        self.state.eval_steps, self.state.save_steps = self._arguments.eval_steps, config.save_every

    def _log(self, record: Mapping[str, Any]) -> None:
        self.control.should_log = False
        self.state.log_history.append({**record, "step": self.state.global_step})
        self.call("on_log", logs={key: value for key, value in record.items() if value is not None})

    def _note_best(self, value: float | None, step: int) -> None:
        if value is not None and (self.state.best_metric is None or value > self.state.best_metric):
            self.state.best_metric, self.state.best_global_step = value, step


class TakesCallbacks:
    """The callback methods of Hugging Face's trainer, with the same names."""

    _callbacks: Callbacks

    @property
    def state(self) -> TrainerState:
        """The state that Hugging Face callbacks read: ``global_step`` (an epoch is a step), ``log_history``, …"""
        return self._callbacks.state

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a class of one."""
        self._callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first of a class, and return it; None if there is none."""
        return self._callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first of a class."""
        self._callbacks.pop(callback)


def evaluation_logs(record: Mapping[str, Any]) -> dict[str, float | None]:
    """The means of a line of ``evaluations.jsonl``, with Hugging Face's names for evaluation metrics."""
    return {f"eval_{name}": value["mean"] for name, value in record["metrics"].items()}


def history(metrics: Path, evaluations: Path) -> list[dict[str, Any]]:
    """``log_history`` of a run, from its files; missing files are empty."""
    epochs, evaluated = (list(read_jsonl(path)) if path.exists() else [] for path in (metrics, evaluations))
    logs = epochs + [{**evaluation_logs(record), "epoch": record["epoch"]} for record in evaluated]
    return [{**log, "step": log["epoch"]} for log in sorted(logs, key=lambda log: int(log["epoch"]))]
