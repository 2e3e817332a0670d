"""Rules on the training: coverage, importance weights, skipped steps, failed checks, and convergence.

Every rule is a pure function of a few numbers with its threshold beside it, so that a reader can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from cdpg.messages.terms import term
from cdpg.methods import targets_p
from cdpg.report.remarks import NOTHING_LEARNT, Finding, Passed, Remark, Topic, Unjudged
from cdpg.report.values import mean
from cdpg.training.starvation import LEAST_COVERAGE

END_SHARE = 0.1
"""Figures at the end of a run are means over this share of its epochs, at least 3."""
EMPTY_SHARE = 0.8
"""If this share of the epochs or more has no satisfying sample, or mean coverage is below ``NO_COVERAGE``, next to
nothing was learnt; unless coverage was no longer low at the end."""
LOW_COVERAGE = 0.5
"""Coverage at the end of a run below which many samples are wasted."""
NO_COVERAGE = LEAST_COVERAGE
"""Coverage below which there is next to nothing to learn from; a run warns at the same share."""
FEW_EFFECTIVE = 0.35
"""Effective sample size over the number of satisfying samples, below which the weights are uneven."""
DEGENERATE = 0.15
"""Below this a few samples decide the gradient."""
LEAST_MOVE = 0.01
"""A change of satisfaction between the last two tenths of a run that counts, if it is also twice its standard error."""
LEAST_EPOCHS = 20
"""In shorter runs, a change of satisfaction at the end is not checked."""
SKIPPED_SHARE = 0.2
"""Share of optimiser steps skipped because no sample satisfied."""
FAILED_SHARE = 0.01
"""Share of samples whose check failed; they are left out, which may bias the rest."""

EPOCHS = Topic("epochs done", "fewer than asked for")
EMPTY = Topic(
    "epochs without a satisfying sample", f"{EMPTY_SHARE:.0%} or more, or a mean coverage below {NO_COVERAGE:.0%}"
)
COVERAGE = Topic("coverage at the end", f"below {LOW_COVERAGE:.0%}")
WEIGHTS = Topic("satisfying samples that count effectively at the end", f"below {FEW_EFFECTIVE:.0%}")
MOVING = Topic(
    "change of satisfaction between the last two tenths of the run", f"above {LEAST_MOVE} and twice its standard error"
)
FINITE = Topic("steps with a gradient that was not finite", "any")
SKIPPED = Topic("steps without a satisfying sample", f"above {SKIPPED_SHARE:.0%}")
CHECKS = Topic("samples whose check failed", f"above {FAILED_SHARE:.0%}")
NO_EPOCHS = "no epochs are logged"


def at_end(values: Sequence[float]) -> float | None:
    """Mean over the last tenth of the epochs, three at least."""
    size = max(3, math.ceil(END_SHARE * len(values)))
    return mean(values[-size:])


def unfinished(label: str, done: int, wanted: float | None) -> Iterator[Remark]:
    """A run that stopped before its last epoch."""
    if not done or wanted is None:
        yield Unjudged(label, EPOCHS, NO_EPOCHS if not done else "the configuration does not say how many epochs")
    elif done < wanted:
        text = f"{done:,} of {wanted:,.0f} epochs are logged: these remarks are about an unfinished run."
        advice = f"Continue it with {term('resume', typed=True)}, or in Python with {term('resume', typed=False)}."
        yield Finding("warning", label, "Not finished", text, advice)
    else:
        yield Passed(label, EPOCHS, f"{done:,} of {wanted:,.0f}")


def nothing_learnt(label: str, coverage: Sequence[float]) -> Iterator[Remark]:
    """Hardly any epoch has a satisfying sample, so there was hardly any gradient."""
    if not coverage:
        yield Unjudged(label, EMPTY, NO_EPOCHS)
        return
    empty, epochs, share, end = sum(value == 0 for value in coverage), len(coverage), mean(coverage), at_end(coverage)
    if (empty >= EMPTY_SHARE * epochs or (share or 0) < NO_COVERAGE) and (end or 0) < LOW_COVERAGE:
        text = (
            f"In {empty:,} of {epochs:,} epochs no sample satisfied the constraint; {share:.1%} of the contexts of the "
            "run had a satisfying sample. There was next to nothing to learn from."
        )
        advice = (
            "Raise num_generations, relax the constraint or let it return values between 0 and 1, start from a base "
            "that satisfies more often, or leave out contexts that it never satisfies (cdpg check shows what the base "
            "does)."
        )
        yield Finding("problem", label, "Next to nothing was learnt", text, advice, NOTHING_LEARNT)
    else:
        yield Passed(label, EMPTY, f"{empty:,} of {epochs:,}")


def low_coverage(label: str, coverage: float | None, z: float | None, per_context: float | None) -> Iterator[Remark]:
    """Too few contexts with a satisfying sample to learn from."""
    if coverage is None:
        yield Unjudged(label, COVERAGE, NO_EPOCHS)
        return
    if coverage >= LOW_COVERAGE:
        yield Passed(label, COVERAGE, f"{coverage:.0%}")
        return
    text = (
        f"Only {coverage:.0%} of the contexts had a satisfying sample at the end of the run; the others contributed "
        "nothing."
    )
    advice = "Raise num_generations"
    if z and per_context:
        text += f" With Z ≈ {z:.3g} and M = {per_context:.0f}, M·Z = {z * per_context:.2g}."
        wanted = math.ceil(3 / z)
        if wanted > per_context:
            advice += f" (M ≈ {wanted:,} would cover most contexts)" if wanted <= 4096 else " as far as time allows"
    advice += ", leave out contexts that the base can never satisfy, or start from a base that satisfies more often."
    level: Literal["problem", "warning"] = "problem" if coverage < NO_COVERAGE else "warning"
    title = "Coverage too low to learn" if level == "problem" else "Coverage is low"
    yield Finding(level, label, title, text, advice)


def uneven_weights(
    label: str, method: str, ess: float | None, satisfaction: float | None, coverage: float | None
) -> Iterator[Remark]:
    """Few of the satisfying samples have most of the weight: ess over the satisfying share of a covered context."""
    if ess is None or not satisfaction or not coverage:
        unknown = satisfaction is None or coverage is None
        yield Unjudged(label, WEIGHTS, NO_EPOCHS if unknown else "there are no weights: no sample satisfied at the end")
        return
    used = min(1.0, ess * coverage / satisfaction)
    if used >= FEW_EFFECTIVE:
        yield Passed(label, WEIGHTS, f"{used:.0%}")
        return
    degenerate = used < DEGENERATE
    text = f"Of the satisfying samples only {used:.0%} count effectively at the end of the run."
    if targets_p(method):
        text += " A few samples decide the gradient." if degenerate else ""
        advice = "Lower learning_rate, so that the policy stays nearer to the ideal model, or raise num_generations."
    else:
        text += " The policy has left the ideal model: its own samples say little about it."
        advice = "Trust the pooled KL(p, π), not the one from its own samples."
    level: Literal["problem", "warning"] = "problem" if degenerate and targets_p(method) else "warning"
    yield Finding(level, label, "Weights are degenerate" if degenerate else "Weights are uneven", text, advice)


def still_moving(
    label: str, satisfaction: Sequence[float], of_base: bool = False, chosen: bool = False
) -> Iterator[Remark]:
    """Whether the last tenth of the run differs from the tenth before it by more than chance.

    ``of_base``: the base has drawn the training samples. ``chosen``: the best of the run's models was kept.
    """
    if of_base:
        yield Unjudged(label, MOVING, "its training samples are the base's, whatever it has learnt")
        return
    epochs = len(satisfaction)
    if epochs < LEAST_EPOCHS:
        why = f"a run of {epochs:,} epoch{'s' * (epochs != 1)} is too short: {LEAST_EPOCHS} are needed"
        yield Unjudged(label, MOVING, why if epochs else NO_EPOCHS)
        return
    size = max(3, math.ceil(END_SHARE * epochs))
    before, last = satisfaction[-2 * size : -size], satisfaction[-size:]
    move = math.fsum(last) / size - math.fsum(before) / size
    error = math.sqrt(_variance(before) / size + _variance(last) / size)
    if abs(move) <= LEAST_MOVE or abs(move) <= 2 * error:
        yield Passed(label, MOVING, f"{move:+.3f}".replace("-", "−"))
        return
    title, word = ("Still rising when it stopped", "rose") if move > 0 else ("Falling when it stopped", "fell")
    text = f"Satisfaction {word} by {abs(move):.3f} over the last {size:,} epochs, from those before."
    fewer = "Lower learning_rate." if chosen else "Stop earlier, or lower learning_rate."
    advice = "Give it more epochs." if move > 0 else fewer
    yield Finding("warning", label, title, text, advice)


def nonfinite_steps(label: str, steps: float, nonfinite: float) -> Iterator[Remark]:
    """Steps that were skipped because their gradient was not finite; ``steps`` counts all steps."""
    if not steps:
        yield Unjudged(label, FINITE, NO_EPOCHS)
    elif nonfinite:
        text = f"{nonfinite:,.0f} optimiser steps were skipped for a gradient that was not finite."
        yield Finding("problem", label, "Gradients not finite", text, "Lower learning_rate, or set max_grad_norm.")
    else:
        yield Passed(label, FINITE, f"0 of {steps:,.0f}")


def skipped_steps(label: str, steps: float, skipped: float) -> Iterator[Remark]:
    """Steps that were skipped because no sample satisfied; ``steps`` counts all steps."""
    if not steps:
        yield Unjudged(label, SKIPPED, NO_EPOCHS)
    elif skipped / steps > SKIPPED_SHARE:
        text = f"{skipped / steps:.0%} of the optimiser steps had no satisfying sample and were skipped."
        yield Finding("warning", label, "Steps without a sample", text, "Raise num_generations or contexts_per_epoch.")
    else:
        yield Passed(label, SKIPPED, f"{skipped / steps:.0%}")


def failed_checks(label: str, failed: float, samples: float) -> Iterator[Remark]:
    """Samples without a verdict because the check failed."""
    if not samples:
        yield Unjudged(label, CHECKS, NO_EPOCHS)
    elif failed / samples > FAILED_SHARE:
        text = f"The check failed on {failed / samples:.1%} of the samples, which were left out."
        advice = "See failures.jsonl; fix the constraint, or raise check_seconds or check_memory."
        yield Finding("warning", label, "Checks failed", text, advice)
    else:
        yield Passed(label, CHECKS, f"{failed / samples:.1%}")


def _variance(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    middle = math.fsum(values) / len(values)
    return math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)
