"""Rules on the result: distances of the tuned model from the ideal model and the base, and changes of its outputs.

Every rule is a pure function of a few numbers with its threshold beside it, so that a reader can disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from cdpg.methods import label_of, targets_p
from cdpg.report.remarks import DISTANCE, Finding, Passed, Remark, Topic, Unjudged
from cdpg.report.values import MeanInterval, short
from cdpg.training.starvation import NEARLY_ALWAYS

FAR_RATIO = 3.0
"""KL(π, a) divided by what a mixture of the base and the ideal model needs for the same satisfaction: a problem."""
FARTHER_RATIO = 1.5
"""The same ratio for a warning; chance may explain it."""
MIN_KL = 0.5
"""Nats: a KL(π, a) below this is never too large."""
SHORTER, LONGER = 0.6, 1.6
"""Mean length of the outputs over that of the ideal model, or of the base if that is not known."""
LESS_DIVERSE = 0.85
"""Distinct-2 over that of the ideal model, or of the base."""
LENGTH_MOVED, DIVERSITY_MOVED = 0.1, 0.05
"""Share by which such a ratio must differ from the base's own; a smaller difference counts as noise."""

GAIN = Topic("satisfaction, base → tuned", "no rise, or one whose interval holds 0")
IDEAL = Topic("pooled KL(p, π), base → tuned", "no fall")
SPENT = Topic(
    "KL(π, a) for what was gained",
    f"above {MIN_KL} nats and {FARTHER_RATIO:g} times what a mixture of base and ideal model needs",
)
ON_THE_WAY = Topic("KL(p, π) during the run", "the last above the smallest, intervals apart")
LENGTH = Topic(
    "length of the outputs, as a ratio", f"below {SHORTER} or above {LONGER}, and {LENGTH_MOVED:.0%} beyond the base’s"
)
DIVERSITY = Topic("Distinct-2, as a ratio", f"below {LESS_DIVERSE}, and {DIVERSITY_MOVED:.0%} below the base’s")
NO_EVALUATION = "no evaluation has it for base and tuned model"
"""There is no evaluation, or no sample satisfied, so that a KL is undefined."""


def no_gain(label: str, before: MeanInterval | None, gain: MeanInterval | None) -> Iterator[Remark]:
    """The tuned model does not satisfy more often than the base, or not by more than chance."""
    if before is None or gain is None:
        yield Unjudged(label, GAIN, NO_EVALUATION)
        return
    figures = f"{before.mean:.3f} → {before.mean + gain.mean:.3f}"
    least = gain.mean if gain.low is None else gain.low
    if least > 0:
        yield Passed(label, GAIN, figures)
        return
    ends = "" if gain.low is None or gain.high is None else f" [{gain.low:+.3f}, {gain.high:+.3f}], paired by context"
    text = f"{figures}: {gain.mean:+.3f}{ends}.".replace("-", "−")
    if gain.high is not None and gain.high < 0:
        advice = "Lower learning_rate, or take more samples a step (num_generations, contexts_per_epoch)."
        yield Finding("problem", label, "Satisfies less often than the base", text, advice, DISTANCE)
    elif before.mean >= NEARLY_ALWAYS:
        advice = "Drop the contexts where the base always satisfies the constraint, or ask for more."
        yield Finding("warning", label, "Nothing to gain: the base satisfies nearly always", text, advice)
    else:
        advice = "Tune for more epochs, or evaluate on more contexts, or with more evaluation_samples, to see it."
        yield Finding("warning", label, "No gain in satisfaction that chance does not explain", text, advice)


def farther(
    label: str,
    method: str,
    base: MeanInterval | None,
    tuned: MeanInterval | None,
    change: MeanInterval | None,
    where: str = "",
    chosen: bool = False,
) -> Iterator[Remark]:
    """The tuned model is no nearer to the ideal model than the base is, by the KL(p, π) of one pool of samples.

    ``chosen`` says whether the best of the run's models was kept, so that stopping earlier gains nothing.
    """
    if base is None or tuned is None:
        yield Unjudged(label, IDEAL, NO_EVALUATION)
        return
    rise = tuned.mean - base.mean if change is None else change.mean
    low, high = (None, None) if change is None else (change.low, change.high)
    sure = low is not None and low > 0
    if rise < 0 or base.mean == tuned.mean == 0:
        yield Passed(label, IDEAL, f"{base.mean:.3g} → {tuned.mean:.3g} nats")
        return
    if low is None or high is None:
        measured = "there is no interval of the difference"
    else:
        measured = f"{rise:+.3g}, interval [{low:+.3g}, {high:+.3g}], paired by context".replace("-", "−")
    figures = f"{base.mean:.3g} → {tuned.mean:.3g} nats".replace("-", "−")
    text = f"The pooled KL(p, π){where} did not fall ({measured}): {figures}."
    if sure:
        title, advice = "Farther from the ideal model than the base", _nearer(method, chosen)
    else:
        title = "No nearer to the ideal model than the base"
        advice = "Chance may explain it: evaluate on more contexts, or with more evaluation_samples, to know."
    yield Finding("problem" if sure else "warning", label, title, text, advice, DISTANCE)


def _nearer(method: str, chosen: bool) -> str:
    """Advice to reduce the distance; to stop earlier gains nothing if the best of the run's models was kept."""
    if targets_p(method):
        less, more = "Lower learning_rate", "take more samples a step (num_generations, contexts_per_epoch)"
        return f"{less}, or {more}." if chosen else f"{less}, {more}, or stop earlier."
    return f"Nothing in {short(label_of(method))} aims at the ideal model: compare with cdpg."


def needed(gain: float, before: float, coverage: float, distance: float) -> float:
    """Upper bound of the KL(π, a) of a gain in satisfaction that comes from mixing the ideal model into the base.

    Of the mixture (1-t)·a + t·p_c, which satisfies with probability Z_c + t (1 - Z_c), convexity gives
    KL((1-t)·a + t·p_c, a) ≤ t KL(p_c, a) = -t log Z_c. A share ``coverage`` of the contexts has an ideal model that was
    seen; with ``before`` = mean of Z_c over all contexts, mixing t into those raises satisfaction by
    t (coverage - before), and costs at most coverage · t · ``distance``, the mean of KL(p_c, a) over them.
    """
    room = coverage - before
    share = 1.0 if room <= 0 else min(1.0, gain / room)
    return coverage * share * distance if gain > 0 else 0.0


def far_from_base(
    label: str,
    method: str,
    spent: MeanInterval | None,
    distance: MeanInterval | None,
    before: MeanInterval | None,
    gain: MeanInterval | None,
    coverage: float | None,
    chosen: bool = False,
) -> Iterator[Remark]:
    """KL(π, a) above what the gain in satisfaction needs; a problem if it holds at all ends of the intervals.

    ``distance`` is the base's pooled KL(p, a); for a yes/no constraint only. ``chosen`` is that of :func:`farther`.
    """
    if spent is None or distance is None or before is None or gain is None or coverage is None:
        yield Unjudged(label, SPENT, NO_EVALUATION)
        return
    likely = needed(gain.mean, before.mean, coverage, distance.mean)
    most = needed(gain.mean if gain.high is None else gain.high, before.mean, coverage, distance.mean)
    least_spent = spent.mean if spent.low is None else spent.low
    sure = least_spent > MIN_KL and least_spent > FAR_RATIO * most
    if not sure and (spent.mean <= MIN_KL or spent.mean <= FARTHER_RATIO * likely):
        yield Passed(label, SPENT, f"{spent.mean:.3g} nats where {likely:.3g} would do")
        return
    text = (
        f"Satisfaction went from {before.mean:.3f} to {before.mean + gain.mean:.3f} at a KL(π, a) of "
        f"{spent.mean:.3g} nats."
    )
    if gain.mean > 0:
        text += f" A mixture of the base and the ideal model that satisfies as often costs at most {likely:.3g}."
    advice = f"Read the samples for what else has changed. {_nearer(method, chosen)}"
    if sure:
        yield Finding("problem", label, "Far from the base for what was gained", text, advice, DISTANCE)
        return
    if spent.low is not None and spent.high is not None:
        text += f" The interval of KL(π, a) is [{spent.low:.3g}, {spent.high:.3g}].".replace("-", "−")
    yield Finding("warning", label, "Farther from the base than the gain needs", text, advice)


def moved_away(
    label: str,
    points: Sequence[tuple[float, MeanInterval]],
    base: MeanInterval | None,
    worse: bool,
    kept: float | None = None,
) -> Iterator[Remark]:
    """The distance from the ideal model was smaller earlier in the run, intervals apart.

    ``points`` are evaluations by epoch, 0 being the base; ``worse`` says whether the last is above the base. ``kept``
    is the epoch whose model was chosen, if one was: the points end there.
    """
    if sum(epoch > 0 for epoch, _ in points) < 2:
        yield Unjudged(label, ON_THE_WAY, "fewer than two evaluations during the run have it")
        return
    (best_epoch, best), (last_epoch, last) = min(points, key=lambda point: point[1].mean), points[-1]
    if best.high is None or last.low is None:
        yield Unjudged(label, ON_THE_WAY, "the evaluations during the run have no intervals")
        return
    if last.low <= best.high:
        yield Passed(label, ON_THE_WAY, f"{last.mean:.3g} nats, at best {best.mean:.3g}")
        return
    text = f"KL(p, π) was {best.mean:.3g} nats at epoch {best_epoch:,.0f} and is {last.mean:.3g} at "
    text += "the end" if kept is None else f"epoch {last_epoch:,.0f}, by the model of epoch {kept:,.0f} that is kept"
    text += f", above the base's {base.mean:.3g}." if worse and base is not None and best_epoch > 0 else "."
    advice = "Lower learning_rate, and read the samples."
    if best_epoch > 0 and kept is None:
        advice = "Stop earlier or lower learning_rate."
    level: Literal["problem", "warning"] = "problem" if worse else "warning"
    yield Finding(level, label, "Moved away from the ideal model", text, advice)


def length_changed(label: str, ratio: float | None, base: float, beside: str) -> Iterator[Remark]:
    """Outputs that became much shorter or longer than those of the ideal model, or of the base.

    ``ratio`` is the tuned model's length over that of ``beside``, which says which of the two it is; ``base`` is the
    base's. If the base is as far off itself, tuning is not the reason.
    """
    if ratio is None:
        yield Unjudged(label, LENGTH, NO_EVALUATION)
    elif SHORTER <= ratio <= LONGER:
        yield Passed(label, LENGTH, f"{ratio:.2f} of the {beside}’s")
    elif (ratio >= (1 - LENGTH_MOVED) * base) if ratio < 1 else (ratio <= (1 + LENGTH_MOVED) * base):
        yield Passed(label, LENGTH, f"still {ratio:.2f} times the {beside}’s (base {base:.2f})")
    else:
        word = "shorter" if ratio < 1 else "longer"
        text = f"Outputs are {ratio:.2f} times as long as those of the {beside}{_of_base(base, beside)}."
        advice = "Read the samples below: a length that the constraint does not ask for is a trick that was learnt."
        yield Finding("problem", label, f"Collapsed: outputs became {word}", text, advice)


def diversity_lost(label: str, ratio: float | None, base: float, beside: str) -> Iterator[Remark]:
    """Outputs that are more repetitive than those of the ideal model, or of the base."""
    if ratio is None:
        yield Unjudged(label, DIVERSITY, NO_EVALUATION)
    elif ratio >= LESS_DIVERSE:
        yield Passed(label, DIVERSITY, f"{ratio:.2f} of the {beside}’s")
    elif ratio >= (1 - DIVERSITY_MOVED) * base:
        yield Passed(label, DIVERSITY, f"still {ratio:.2f} times the {beside}’s (base {base:.2f})")
    else:
        text = (
            f"Distinct-2 is {ratio:.2f} times that of the {beside}{_of_base(base, beside)}: outputs repeat themselves."
        )
        advice = "Read the samples below, and compare token frequencies with the base's."
        yield Finding("problem", label, "Collapsed: diversity was lost", text, advice)


def _of_base(base: float, beside: str) -> str:
    """The base's own ratio, unless it is 1 by definition."""
    return "" if beside == "base" else f" (base {base:.2f})"
