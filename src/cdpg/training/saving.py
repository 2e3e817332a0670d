"""Checkpoints during a run, and the tuned model."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cdpg.config import CDPGConfig
from cdpg.errors import CDPGError, UserError
from cdpg.models.base import LanguageModel
from cdpg.storage import card
from cdpg.storage.atomic import write_folder
from cdpg.storage.hub import push_folder
from cdpg.training.callbacks import Callbacks
from cdpg.training.setup import Parts
from cdpg.training.state import RunState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saver:
    """Saves a run's state and its model."""

    parts: Parts
    callbacks: Callbacks
    config: CDPGConfig

    def checkpoint_if(self, due: bool, epoch: int, state: RunState) -> bool:
        """Write a checkpoint if due, or if a callback asks for one or for the end; returns whether it did."""
        control = self.callbacks.control
        if not due and not self.parts.processes.any(control.should_save or control.should_training_stop):
            return False
        if self.parts.is_main:
            self._save(epoch, state)
        elif self.parts.trainable.is_divided:
            self.parts.journal.take_part_in_saving(state.tensors())
        self.callbacks.saved()
        self.parts.processes.wait()
        return True

    def rescue(self, epoch: int, state: RunState) -> None:
        """Save the finished epochs if what follows failed before it changed anything.

        Divided weights are not saved: all processes would have to take part, and they may not all have failed.
        """
        if epoch and self.parts.is_main and not self.parts.trainable.is_divided:
            with suppress(CDPGError, MemoryError, RuntimeError, OSError):  # keep the original exception
                self._save(epoch, state)
                _log.info(f"a checkpoint of epoch {epoch} is written")

    def _save(self, epoch: int, state: RunState) -> None:
        self.parts.journal.save(epoch, self.config, state.values(), state.tensors())

    def choose(self, state: RunState, done: int) -> tuple[str, int, float | None]:
        """Give the policy the weights that the run ends with, those of the last epoch ``done`` or of the best.

        Returns which of the two, its epoch, and its gain on the validation contexts if that was measured.
        """
        best = state.best
        if not self.parts.keeps_best or best is None:
            return "last", done, self.parts.journal.last("metrics").get("gain_validation")
        self.parts.validation.use(best)
        if best.epoch:
            _log.info(f"the model of epoch {best.epoch} is kept, by the gain on the validation contexts")
        else:
            _log.warning(
                "no epoch came nearer to the ideal model than the base, by the gain on the validation contexts: the "
                f"model that is kept is the base; lower learning_rate (now {self.config.learning_rate:g}), or use "
                "more samples for each step (num_generations, contexts_per_epoch)"
            )
        return "best", best.epoch, best.gain

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the tuned model as a plain Hugging Face folder, by default ``model/`` in the run's folder.

        If the weights are divided among the processes, all of them call it, and the main one writes.
        """
        policy = self.parts.policy.gathered(keep=self.parts.is_main or not self.parts.trainable.is_divided)
        path = self.parts.folder.model if output_dir is None else Path(output_dir)
        if policy is None:
            return path
        if output_dir is None:
            write_folder(path, partial(self._write_model, policy))
        else:
            self._write_model(policy, path)  # not replaced: it may hold the user's files
        return path

    def push(self, repo_id: str | None, **options: Any) -> str:
        """Upload the tuned model, its tokenizer and its card; if the weights are divided, from the main process."""
        if repo_id is None:  # where Hugging Face's trainer takes it from its settings
            raise UserError("push_to_hub was given no repository: name it, push_to_hub('user/name')")
        folder = self.save_model()
        if self.parts.trainable.is_divided and not self.parts.is_main:
            return ""
        self.callbacks.call("on_push_begin")
        return push_folder(folder, repo_id, **options)

    def _write_model(self, policy: LanguageModel, path: Path) -> None:
        policy.save(path, self.config)
        if not (path / card.FILE).exists():  # an existing one is the user's
            card.write_card(path, self.parts.folder)
