"""Hugging Face callbacks (``transformers.TrainerCallback``) on this loop: an epoch is reported as a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState

from cdpg.config import CDPGConfig
from cdpg.errors import UserError

BEST = "satisfaction"
"""The held-out metric that callbacks take the best epoch by; the more the better."""


class Arguments:
    """The settings, and what Hugging Face callbacks look for among a ``TrainingArguments``, as it is here."""

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
    """Calls the user's callbacks and hears whether they want the run to stop.

    Every call is given ``parts``, by the names that Hugging Face uses: ``model``, ``processing_class``, ``optimizer``.
    A class is made into a callback without arguments, as Hugging Face does. ``evaluates``: there are held-out contexts.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
        config: CDPGConfig,
        is_main: bool,
        evaluates: bool,
        parts: Mapping[str, Any],
    ) -> None:
        self._callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        if not evaluates and any(isinstance(callback, EarlyStoppingCallback) for callback in self._callbacks):
            raise UserError(
                "EarlyStoppingCallback looks at held-out contexts, and there are none: "
                "pass eval_dataset, or leave the callback out"
            )
        self._arguments, self._parts = Arguments(config, evaluates), parts
        self._control = TrainerControl()
        self._state = TrainerState(
            max_steps=config.epochs, num_train_epochs=config.epochs, logging_steps=1,
            eval_steps=config.evaluation_interval, save_steps=config.save_every,
        )  # fmt: skip
        self._state.is_world_process_zero = self._state.is_local_process_zero = is_main

    @property
    def should_stop(self) -> bool:
        return self._control.should_training_stop

    def begin(self, done: int) -> None:
        """Training begins after so many epochs; that it was to stop before is forgotten."""
        self._control.should_training_stop = False
        self._state.epoch = self._state.global_step = done
        self.call("on_train_begin")

    def epoch_end(self, record: Mapping[str, Any]) -> None:
        """Report a finished epoch with its metrics."""
        self._state.epoch = self._state.global_step = record["epoch"]
        self._state.log_history.append(dict(record))
        self.call("on_step_end")
        self.call("on_log", logs=dict(record))
        self.call("on_epoch_end")

    def evaluated(self, metrics: Mapping[str, float | None]) -> None:
        """Report an evaluation, and then whether it is the best so far."""
        self.call("on_evaluate", metrics=dict(metrics))
        value, best = metrics.get(f"eval_{BEST}"), self._state.best_metric
        if value is not None and (best is None or value > best):
            self._state.best_metric, self._state.best_global_step = value, self._state.global_step

    def call(self, event: str, **arguments: Any) -> None:
        """Call one event of every callback."""
        for callback in self._callbacks:
            try:
                result = getattr(callback, event)(
                    self._arguments, self._state, self._control, **self._parts, **arguments
                )
            except AttributeError as error:
                if error.obj is not self._arguments:
                    raise
                raise UserError(
                    f"the callback {type(callback).__name__} reads the argument {error.name!r}, which none of the "
                    "settings answers: leave it out"
                ) from error
            self._control = self._control if result is None else result
