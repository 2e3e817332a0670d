"""The schedule of a resumed run: which defaults are kept, and which changes are refused.

By default warm-up and evaluations follow from ``epochs``, and the learning rate falls at the end of a run. A run that
is made longer must keep the learning rates of its finished epochs; otherwise it would be another run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cdpg.config import CDPGConfig
from cdpg.errors import UserError
from cdpg.messages.terms import for_caller

FOLLOWING = {"warmup_epochs": "warmup", "evaluate_every": "evaluation_interval"}
"""Settings that follow from ``epochs`` by default, and the property with their effective value."""


def with_defaults(config: CDPGConfig) -> CDPGConfig:
    """The settings with the defaults that follow from ``epochs`` applied, as a checkpoint records them."""
    return config.replace(**{key: getattr(config, effective) for key, effective in FOLLOWING.items()})


def continued(config: CDPGConfig, then: CDPGConfig, done: int) -> CDPGConfig:
    """The settings of a resumed run that was started with ``then``: defaults that follow from ``epochs`` are kept.

    It cannot have fewer than the ``done`` epochs that are finished.
    """
    if config.epochs < done:
        raise UserError(
            f"{done} epochs are done already; a run cannot be made shorter: give epochs of at least {done}, not "
            f"{config.epochs}"
        )
    kept = {
        key: getattr(then, effective)
        for key, effective in FOLLOWING.items()
        if getattr(config, key) is None and getattr(then, effective) != getattr(config, effective)
    }
    return config.replace(**kept)


def kept_defaults(asked: CDPGConfig, config: CDPGConfig, then: CDPGConfig) -> list[str]:
    """A sentence on what :func:`continued` kept, if it kept anything."""
    kept = [f"{key}={getattr(config, key)}" for key in FOLLOWING if getattr(config, key) != getattr(asked, key)]
    if not kept:
        return []
    free = "; evaluate_every may be set to another value" if config.evaluate_every != asked.evaluate_every else ""
    return [f"the run goes on with {' and '.join(kept)}, which it has had so far ({then.epochs} epochs){free}"]


def rate_changes(
    done: int, then: CDPGConfig, config: CDPGConfig, checkpoints: Path, kept: Sequence[int] = ()
) -> list[str]:
    """A sentence if the finished epochs would have had other learning rates, with what to do about it.

    ``kept`` are the epochs of the checkpoints in the folder ``checkpoints``.
    """
    if then.learning_rate != config.learning_rate:
        return []  # it is reported as a change of its own
    differing = (epoch for epoch in range(1, done + 1) if then.rate(epoch) != config.rate(epoch))
    first = next(differing, None)
    if first is None:
        return []
    was = (
        f"the learning rate of epoch {first} was {then.rate(first):.3g} and would have been {config.rate(first):.3g} "
        f"with {config.epochs} epochs, warm-up {config.warmup} and decay {config.decay_epochs} (they were "
        f"{then.epochs}, {then.warmup}, {then.decay_epochs})"
    )
    return [f"{was}: {_cure(first, done, then, config, checkpoints, kept)}"]


def _cure(first: int, done: int, then: CDPGConfig, config: CDPGConfig, checkpoints: Path, kept: Sequence[int]) -> str:
    if first <= max(then.warmup, config.warmup) and then.warmup != config.warmup:
        return f"set warmup_epochs={then.warmup}, or leave it out"
    if first > then.epochs - then.decay_epochs:  # the rate has begun to fall
        return (
            f"the rate had begun to fall towards the end at epoch {then.epochs}: keep epochs={then.epochs} and "
            f"decay_epochs={then.decay_epochs}, or {_go_back(first, checkpoints, kept)}"
        )
    least = max(0, config.epochs - done)
    return (
        f"it would have begun to fall too early: set decay_epochs to at most {least}, or epochs to at least "
        f"{done + config.decay_epochs}"
    )


def _go_back(first: int, checkpoints: Path, kept: Sequence[int]) -> str:
    """How to continue from before an epoch, if a checkpoint allows it."""
    earlier = [epoch for epoch in kept if epoch < first]
    if not earlier:
        return "start the longer run from the beginning in another folder (no checkpoint from before the fall is left)"
    later = " and ".join(repr(str(checkpoints / f"epoch-{epoch:06d}")) for epoch in kept if epoch >= first)
    path = str(checkpoints / f"epoch-{max(earlier):06d}")
    return for_caller(
        f"remove {later} to continue from epoch {max(earlier)}",
        f"continue from epoch {max(earlier)} with train(resume_from_checkpoint={path!r})",
    )
