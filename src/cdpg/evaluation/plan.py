"""How many held-out contexts are evaluated, and when."""

from __future__ import annotations

from cdpg.config import CDPGConfig

BLOCK = 64
"""Number of contexts that an evaluation samples, decodes and measures together."""


def evaluated_contexts(config: CDPGConfig, held_out: int, done: int = 0) -> int:
    """Contexts that a model is evaluated on after ``done`` epochs until the end of the run.

    Some along the way (before the first epoch, at every interval, at the end), the evaluation that follows the epoch
    ``done`` included, and those of the final evaluation.
    """
    along = min(held_out, config.evaluation_contexts)
    return _times(config, done) * along + final_contexts(config, held_out)


def _times(config: CDPGConfig, done: int) -> int:
    """After how many of the epochs from ``done`` on :meth:`CDPGConfig.evaluates_after` is true.

    Not one by one: it is asked after every epoch, and a run may have a million.
    """
    interval, last = config.evaluation_interval, config.epochs
    if interval == 0 or done > last:
        return 0
    return last // interval - (done - 1) // interval + (last % interval > 0)


def final_contexts(config: CDPGConfig, held_out: int) -> int:
    """Contexts of the final evaluation, for the base and the tuned model.

    Whole blocks that the last evaluation during the run covered are not evaluated again.
    """
    along = min(held_out, config.evaluation_contexts)
    known = along if along == held_out else along // BLOCK * BLOCK
    return 2 * (held_out - known * config.evaluates_after(config.epochs)) * config.evaluate_at_end
