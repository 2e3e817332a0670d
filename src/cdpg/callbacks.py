"""Hugging Face callbacks (``transformers.TrainerCallback``) on this loop: an epoch is reported as a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from cdpg.config import CDPGConfig


class Callbacks:
    """Calls the user's callbacks and hears whether they want the run to stop.

    Every call is given ``parts``, by the names that Hugging Face uses: ``model``, ``processing_class``, ``optimizer``.
    """

    def __init__(
        self, callbacks: Sequence[TrainerCallback], config: CDPGConfig, is_main: bool, parts: Mapping[str, Any]
    ) -> None:
        self._callbacks, self._config, self._parts = callbacks, config, parts
        self._control = TrainerControl()
        self._state = TrainerState(max_steps=config.epochs, num_train_epochs=config.epochs)
        self._state.is_world_process_zero = self._state.is_local_process_zero = is_main

    @property
    def should_stop(self) -> bool:
        return self._control.should_training_stop

    def epoch_end(self, record: Mapping[str, Any]) -> None:
        """Report a finished epoch with its metrics."""
        self._state.epoch = self._state.global_step = record["epoch"]
        self._state.log_history.append(dict(record))
        self.call("on_step_end")
        self.call("on_log", logs=dict(record))
        self.call("on_epoch_end")

    def call(self, event: str, **arguments: Any) -> None:
        """Call one event of every callback."""
        for callback in self._callbacks:
            result = getattr(callback, event)(self._config, self._state, self._control, **self._parts, **arguments)
            self._control = self._control if result is None else result
