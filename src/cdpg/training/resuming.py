"""How a run begins: in a folder of its own, or from a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from cdpg.config import CDPGConfig
from cdpg.errors import UserError
from cdpg.storage import provenance, schedule, usage
from cdpg.storage.checkpoints import Checkpoint, find_checkpoint, kept_epochs
from cdpg.storage.overwriting import require_place
from cdpg.system.distributed import tracker_config
from cdpg.training.callbacks import Callbacks, history
from cdpg.training.notices import log_all
from cdpg.training.session import Session
from cdpg.training.setup import Parts
from cdpg.training.state import RunState

_log = logging.getLogger(__name__)

_READ = ("base", "adapters", "proposal", "constraints", "contexts", "tuned_on", "tokens", "held_out")
"""Facts of a run's origin that every process finds out by itself, from what it has read."""


def begin_target(parts: Parts, state: RunState, resume: bool | str | Path | None, config: CDPGConfig) -> RunState:
    """Fit the target's moments unless a checkpoint has them; errors are raised before a file is written."""
    if state.moments or not parts.target_fit.looks_first:
        return state
    if resume and parts.processes.from_main(bool(kept_epochs(parts.folder.checkpoints))):
        return state
    if parts.is_main and not resume:
        require_place(parts.folder, config.overwrite_output_dir, parts.sources)
    return replace(state, moments=parts.target_fit.begin(config))


def checkpoint_to_resume(parts: Parts, resume: bool | str | Path | None, has_trained: bool) -> Checkpoint | None:
    """The checkpoint that ``resume`` asks for, None to begin at the start."""
    checkpoint = find_checkpoint(parts.folder.checkpoints, resume) if resume else None
    _require_same_files(parts, checkpoint)
    if checkpoint is None and has_trained:
        raise UserError("this trainer has trained already, and its weights have changed: make a new one")
    return checkpoint


def _require_same_files(parts: Parts, checkpoint: Checkpoint | None) -> None:
    """Refuse processes that have read different files under the same names, as on machines that do not share a folder.

    They would train different models, and the sum of their gradients would be that of neither.
    """
    own = {key: parts.origin[key] for key in _READ}
    own["checkpoint to resume"] = None if checkpoint is None else checkpoint.epoch
    first, *others = parts.processes.gather([own])
    differing = [key.replace("_", " ") for key in own if any(other[key] != first[key] for other in others)]
    if differing:
        raise UserError(
            f"the processes of this run have read different files ({', '.join(differing)}): output_dir, the model and "
            "the data must be the same on all machines, for example in a folder that they share"
        )


def continued(parts: Parts, checkpoint: Checkpoint, asked: CDPGConfig) -> tuple[CDPGConfig, RunState]:
    """Restore a checkpoint, unless that would change the run's result; settings and state to go on with."""
    then = provenance.begun_with(checkpoint.state)
    config = schedule.continued(asked, then, checkpoint.epoch)
    folder = parts.folder.checkpoints
    notices = provenance.check_resume(
        checkpoint.epoch, checkpoint.state, config, parts.origin, folder, kept_epochs(folder)
    )
    log_all((*notices, *schedule.kept_defaults(asked, config, then)))
    parts.trainable.restore(checkpoint)
    _log.info(f"continuing after epoch {checkpoint.epoch}")
    parts.processes.wait()  # no process may still read what is removed next
    state = RunState.of(checkpoint, parts.method, parts.trainable.divided)
    parts.target_fit.restore(state)
    return config, state


def prepare_folder(parts: Parts, checkpoint: Checkpoint | None, config: CDPGConfig, keep: bool) -> None:
    """Bring the run's folder to where the run begins; ``keep`` an earlier run's files if they are this run's own."""
    if parts.is_main:
        if not keep:
            parts.journal.clear(config, parts.sources)
        parts.journal.begin(checkpoint, config)
        parts.journal.describe(config, parts.inputs, parts.given)
    log_all(usage.notices(parts.origin["sampling"]))
    if config.report_to:
        parts.processes.accelerator.init_trackers("cdpg", config=tracker_config(config))
    parts.processes.wait()


def begin_validation(parts: Parts, state: RunState, config: CDPGConfig, done: int, session: Session) -> RunState:
    """Draw the samples on which the model to keep is chosen; before the first epoch the base is the best model.

    The multipliers of the target's moments are written, since all figures depend on them.
    """
    parts.target_fit.describe(state)
    session.progress.working("sampling the ideal model for the validation contexts")
    check_stop = partial(session.raise_if_stopped_after, done)
    parts.validation.begin(config, check_stop)
    if not parts.validation.is_measured:
        return state
    if done and state.best is None:
        return state
    best = parts.validation.resumed(state.best) if done and state.best else parts.validation.of_base()
    return replace(state, best=best, gains=state.gains or best.peak)


def begin_callbacks(parts: Parts, callbacks: Callbacks, config: CDPGConfig, done: int) -> None:
    """Give callbacks what the run's earlier epochs have logged."""
    logged = history(parts.folder.metrics, parts.folder.evaluations) if parts.is_main else []
    callbacks.begin(config, done, parts.processes.from_main(logged))
