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
    times = sum(config.evaluates_after(epoch) for epoch in range(done, config.epochs + 1))
    return times * along + final_contexts(config, held_out)


def final_contexts(config: CDPGConfig, held_out: int) -> int:
    """Contexts of the final evaluation, for the base and the tuned model.

    Whole blocks that the last evaluation during the run covered are not evaluated again.
    """
    along = min(held_out, config.evaluation_contexts)
    known = along if along == held_out else along // BLOCK * BLOCK
    return 2 * (held_out - known * config.evaluates_after(config.epochs)) * config.evaluate_at_end
