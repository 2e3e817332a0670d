"""What the numbers say about a run, in words: what is wrong, how far, and what to do.

Every rule is a pure function of a few numbers with its threshold beside it, so that a reader can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cdpg.evaluation.catalogue import POOLED
from cdpg.report.folders import Run
from cdpg.report.series import base_along
from cdpg.report.study import BASE_NAME, Study
from cdpg.report.values import Interval, count, interval, mean, number
from cdpg.runlog import mapping
from cdpg.wording import term

END_SHARE = 0.1
"""What is said of the end of a run is a mean over this share of its epochs, but of 3 at least."""
LOW_COVERAGE = 0.5
"""Fewer covered contexts than this at the end of a run: much of the sampling teaches nothing."""
NO_COVERAGE = 0.1
"""Fewer than this: there is next to nothing to learn from."""
FEW_EFFECTIVE = 0.35
"""Effective sample size over the number of satisfying samples; below this the weights are uneven."""
DEGENERATE = 0.15
"""Below this a few samples decide the gradient."""
SHORTER, LONGER = 0.6, 1.6
"""Mean length of the outputs over that of the ideal model, or of the base where that is unknown."""
LESS_DIVERSE = 0.85
"""Distinct-2 over that of the ideal model, or of the base."""
LEAST_RISE = 0.01
"""A rise of satisfaction between the last two tenths of a run that counts, if it is also twice its standard error."""
LEAST_EPOCHS = 20
"""Shorter runs are not asked whether they were still rising."""
SKIPPED_SHARE = 0.2
"""Share of optimiser steps skipped for want of a satisfying sample."""
FAILED_SHARE = 0.01
"""Share of samples whose check failed: they are left out, so that the rest may not be like the whole."""


@dataclass(frozen=True)
class Finding:
    """One sentence of diagnosis and one of advice."""

    level: Literal["problem", "warning", "good"]
    model: str
    title: str
    text: str
    advice: str = ""


def diagnose(study: Study) -> list[Finding]:
    """Findings on every run, the worst first."""
    findings: list[Finding] = []
    for group in study.groups:
        for name in group.models:
            run = next((run for run, model in zip(group.runs, group.models, strict=False) if model == name), None)
            label = study.label_of(name)
            findings += _of_run(run, label) if run is not None else []
            findings += collapsed(label, study, name)
    order = {"problem": 0, "warning": 1, "good": 2}
    return sorted(findings, key=lambda finding: order[finding.level])


def _of_run(run: Run, label: str) -> Iterator[Finding]:
    per_context = count(run.config.get("num_generations"))
    end = {key: at_end(_column(run, key)) for key in ("coverage", "satisfaction", "ess", "z_mean")}
    yield from unfinished(label, len(run.metrics), count(run.config.get("epochs")))
    yield from low_coverage(label, end["coverage"], end["z_mean"], per_context)
    yield from uneven_weights(label, run.method, end["ess"], end["satisfaction"], end["coverage"])
    yield from still_rising(label, _column(run, "satisfaction"))
    yield from turned_away(label, run)
    steps = math.fsum(_column(run, "steps"))
    yield from lost_steps(
        label, steps, math.fsum(_column(run, "steps_skipped")), math.fsum(_column(run, "steps_nonfinite"))
    )
    yield from failed_checks(label, math.fsum(_column(run, "checks_failed")), math.fsum(_column(run, "samples")))


def at_end(values: Sequence[float]) -> float | None:
    """Mean over the last tenth of the epochs, three at least."""
    size = max(3, math.ceil(END_SHARE * len(values)))
    return mean(values[-size:])


def unfinished(label: str, done: int, wanted: float | None) -> Iterator[Finding]:
    """A run that stopped before its last epoch."""
    if wanted is not None and 0 < done < wanted:
        text = f"{done:,} of {wanted:,.0f} epochs are logged: what is said here is about a run that is not over."
        advice = f"Continue it with {term('resume', typed=True)}, or in Python with {term('resume', typed=False)}."
        yield Finding("warning", label, "Not finished", text, advice)


def low_coverage(label: str, coverage: float | None, z: float | None, per_context: float | None) -> Iterator[Finding]:
    """Too few contexts with a satisfying sample to learn from."""
    if coverage is None or coverage >= LOW_COVERAGE:
        return
    text = (
        f"Only {coverage:.0%} of the contexts had a satisfying sample at the end of the run; the others taught nothing."
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
) -> Iterator[Finding]:
    """Few of the satisfying samples carry the weight: ess over the satisfying share of a covered context."""
    if ess is None or not satisfaction or not coverage:
        return
    used = min(1.0, ess * coverage / satisfaction)
    if used >= FEW_EFFECTIVE:
        return
    degenerate = used < DEGENERATE
    text = f"Of the satisfying samples only {used:.0%} count effectively at the end of the run."
    if method in ("cdpg", "dpg"):
        text += " A few samples decide the gradient." if degenerate else ""
        advice = (
            "Lower learning_rate, so that the policy stays nearer to what it samples for, or raise num_generations."
        )
    else:
        text += " The policy has left the ideal model: its own samples say little about it."
        advice = "Trust the pooled KL(p, π), not the one from its own samples."
    level: Literal["problem", "warning"] = "problem" if degenerate and method in ("cdpg", "dpg") else "warning"
    yield Finding(level, label, "Weights are degenerate" if degenerate else "Weights are uneven", text, advice)


def still_rising(label: str, satisfaction: Sequence[float]) -> Iterator[Finding]:
    """Whether the last tenth of the run lies above the tenth before it by more than chance."""
    if len(satisfaction) < LEAST_EPOCHS:
        return
    size = max(3, math.ceil(END_SHARE * len(satisfaction)))
    before, last = satisfaction[-2 * size : -size], satisfaction[-size:]
    rise = math.fsum(last) / size - math.fsum(before) / size
    error = math.sqrt(_variance(before) / size + _variance(last) / size)
    if rise > LEAST_RISE and rise > 2 * error:
        text = f"Satisfaction rose by {rise:.3f} over the last {size:,} epochs, from those before."
        yield Finding("warning", label, "Still rising when it stopped", text, "Start again with more epochs.")


def turned_away(label: str, run: Run) -> Iterator[Finding]:
    """The distance from the ideal model was smaller earlier in the run, or at the base, intervals apart."""
    for name in (POOLED, "kl_target_policy"):
        base = base_along(run, name)
        later = [(epoch, _metric(record, name)) for record in run.evaluations if (epoch := count(record.get("epoch")))]
        known = [(epoch, value) for epoch, value in [(0.0, base), *later] if value is not None]
        if len(known) < 3:
            continue
        (best_epoch, best), (last_epoch, last) = min(known, key=lambda point: point[1].mean), known[-1]
        apart = best.high is not None and last.low is not None and last.low > best.high
        if apart and best_epoch < last_epoch:
            worse = _ends_above_base(run, name) if base is None else last.mean > base.mean
            text = f"KL(p, π) was {best.mean:.3g} nats at epoch {best_epoch:,.0f} and is {last.mean:.3g} at the end"
            text += f", above the base's {base.mean:.3g}." if worse and base is not None and best_epoch > 0 else "."
            advice = (
                "Stop earlier or lower learning_rate." if best_epoch > 0 else "What it gained it paid for in outputs."
            )
            level: Literal["problem", "warning"] = "problem" if worse else "warning"
            yield Finding(level, label, "Moved away from the ideal model", text, advice)
        return


def lost_steps(label: str, taken: float, skipped: float, nonfinite: float) -> Iterator[Finding]:
    """Optimiser steps that were not taken."""
    if nonfinite:
        text = f"{nonfinite:,.0f} optimiser steps were skipped for a gradient that was not finite."
        yield Finding("problem", label, "Gradients not finite", text, "Lower learning_rate, or set max_grad_norm.")
    whole = taken + skipped + nonfinite
    if whole and skipped / whole > SKIPPED_SHARE:
        text = f"{skipped / whole:.0%} of the optimiser steps had no satisfying sample and were skipped."
        yield Finding("warning", label, "Steps without a sample", text, "Raise num_generations or contexts_per_epoch.")


def failed_checks(label: str, failed: float, samples: float) -> Iterator[Finding]:
    """Samples that the constraint gave no verdict on."""
    if samples and failed / samples > FAILED_SHARE:
        text = f"The check failed on {failed / samples:.1%} of the samples, which were left out."
        advice = "See failures.jsonl; mend the constraint, or raise check_seconds or check_memory."
        yield Finding("warning", label, "Checks failed", text, advice)


def collapsed(label: str, study: Study, model: str) -> Iterator[Finding]:
    """Outputs that became much shorter, longer or more repetitive than the ideal model's (or the base's)."""
    length, beside = ratio_to_ideal(study, model, "length")
    if length is not None and not SHORTER <= length <= LONGER:
        word = "shorter" if length < 1 else "longer"
        text = f"Outputs are {length:.2f} times as long as those of the {beside}."
        advice = "Read the samples below: a length that the constraint does not ask for is a trick that was learnt."
        yield Finding("problem", label, f"Collapsed: outputs became {word}", text, advice)
    diversity, beside = ratio_to_ideal(study, model, "distinct_2")
    if diversity is not None and diversity < LESS_DIVERSE:
        text = f"Distinct-2 is {diversity:.2f} times that of the {beside}: outputs repeat themselves."
        advice = "Read the samples below, and compare token frequencies with the base's."
        yield Finding("problem", label, "Collapsed: diversity was lost", text, advice)


def ratio_to_ideal(study: Study, model: str, name: str) -> tuple[float | None, str]:
    """A metric as a ratio to the ideal model's, else to the base's, and which of the two it is."""
    versus = interval(mapping(mapping(study.evaluation.get("versus_ideal")).get(model)).get(name))
    if versus is not None:
        return versus.mean, "ideal model"
    mine, base = study.metric(model, name), study.metric(BASE_NAME, name)
    if mine is None or base is None or base.mean <= 0:
        return None, "base"
    return mine.mean / base.mean, "base"


def _ends_above_base(run: Run, name: str) -> bool:
    """Whether the final evaluation, where base and tuned model have one pool, finds the tuned one farther off."""
    base, tuned = (interval(mapping(run.evaluation.get(model)).get(name)) for model in (BASE_NAME, "tuned"))
    return base is not None and tuned is not None and tuned.mean > base.mean


def _metric(record: dict[str, object], name: str) -> Interval | None:
    return interval(mapping(record.get("metrics")).get(name))


def _column(run: Run, field: str) -> list[float]:
    values = (number(record.get(field)) for record in run.metrics)
    return [value for value in values if value is not None]


def _variance(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    middle = math.fsum(values) / len(values)
    return math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)
