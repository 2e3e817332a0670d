"""Writes a run's files during the run: its configuration, logs and checkpoints.

A checkpoint records the length of the logs, and a resumed run cuts them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cdpg.config import CDPGConfig
from cdpg.storage import schedule
from cdpg.storage.atomic import write_lines
from cdpg.storage.checkpoints import Checkpoint, Tensors, prune, save_checkpoint, take_part_in_saving
from cdpg.storage.json_files import write_json
from cdpg.storage.jsonl import JsonlFile, last_record
from cdpg.storage.overwriting import remove_run, require_place
from cdpg.storage.run_folder import RunFolder
from cdpg.storage.snapshot import Trainable
from cdpg.system import files

_LOGS = ("metrics", "samples", "evaluations", "failures")


class Journal:
    """Writes a run's files during the run; only in the main process."""

    def __init__(self, folder: RunFolder, trainable: Trainable, origin: Mapping[str, Any]) -> None:
        self._folder, self._trainable, self._origin = folder, trainable, origin
        self._logs = {name: JsonlFile(getattr(folder, name)) for name in _LOGS}

    def append(self, log: str, record: Mapping[str, Any]) -> None:
        """Add a line to one of the logs, by its name without the ending."""
        self._logs[log].append(record)

    def last(self, log: str) -> dict[str, Any]:
        """The last line of a log; empty if there is none."""
        return last_record(self._logs[log].path)

    def clear(self, config: CDPGConfig, sources: Iterable[object]) -> None:
        """Remove an earlier run if it may be overwritten, or refuse; ``sources`` are what the new run is made from."""
        require_place(self._folder, config.overwrite_output_dir, sources)
        remove_run(self._folder)

    def describe(self, config: CDPGConfig, inputs: Mapping[str, Any], tuned_on: Iterable[str]) -> None:
        """Write what is needed to repeat the run, and the digests of the prompts that it is tuned on."""
        write_lines(self._folder.tuned_on, sorted(set(tuned_on)))
        # Without it: a repetition from this file must not overwrite the run.
        settings = config.replace(overwrite_output_dir=False).to_mapping()
        self._folder.write_config({**inputs, **settings, "origin": self._origin})

    def describe_kept(self, keep: str, epoch: int, gain: float | None) -> None:
        """Write which model the run ends with, and its gain on the validation contexts."""
        write_json(self._folder.kept, {"keep": keep, "epoch": epoch, "gain_validation": gain})

    def describe_moments(self, fits: Mapping[str, Any]) -> None:
        """Write the multipliers of the target's moments, and what they were fitted to."""
        write_json(self._folder.moments, fits)

    def begin(self, checkpoint: Checkpoint | None, config: CDPGConfig) -> None:
        """Cut the logs at the checkpoint of a resumed run, or empty them for a new run."""
        files.tidy(self._folder.checkpoints)
        if checkpoint is not None:
            # Before the logs are cut: a later checkpoint that was skipped would need the lines that are lost.
            prune(self._folder.checkpoints, checkpoint.epoch, config.keep_checkpoints)
        for name, file in self._logs.items():
            file.truncate(0 if checkpoint is None else checkpoint.state["positions"][name])
        if checkpoint is not None and checkpoint.epoch < config.epochs:
            files.discard(self._folder.model)  # results of an earlier end are out of date
            files.discard(self._folder.kept)
            files.discard(self._folder.evaluation)
            files.discard(self._folder.ideal_samples)
            files.discard(self._folder.report)

    def save(self, epoch: int, config: CDPGConfig, values: Mapping[str, Any], tensors: Tensors) -> None:
        """Write a checkpoint; the logs are flushed to the disk first.

        ``values`` and ``tensors`` are what the run carries beside the weights and the optimiser's moments.
        """
        for file in self._logs.values():
            file.sync()
        state = {
            "config": schedule.with_defaults(config).to_mapping(),
            "origin": self._origin,
            **values,
            "positions": {name: file.position() for name, file in self._logs.items()},
        }
        everything = self._everything(tensors)
        save_checkpoint(self._folder.checkpoints, epoch, everything, state, config.keep_checkpoints)

    def take_part_in_saving(self, tensors: Tensors) -> None:
        """What the other processes do while the main one saves: give it their parts of the weights."""
        take_part_in_saving(self._everything(tensors))

    def _everything(self, tensors: Tensors) -> Tensors:
        return {**self._trainable.tensors(), **tensors}
