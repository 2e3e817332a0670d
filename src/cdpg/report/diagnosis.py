"""The diagnosis of a study's runs: what is wrong, how far, and what to do.

The rules are in ``training_rules`` and ``outcome_rules``. A topic without a finding is listed too: with its figure if
it passed, with the reason if it could not be judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from cdpg.evaluation.metrics import POOLED
from cdpg.report.folders import Run
from cdpg.report.outcome_rules import (
    GAIN,
    SPENT,
    diversity_lost,
    far_from_base,
    farther,
    length_changed,
    moved_away,
    no_gain,
)
from cdpg.report.remarks import Diagnosis, Finding, Remark, Unjudged, diagnosis_of
from cdpg.report.series import base_along
from cdpg.report.study import BASE_NAME, Study
from cdpg.report.training_rules import (
    at_end,
    failed_checks,
    low_coverage,
    nonfinite_steps,
    nothing_learnt,
    skipped_steps,
    still_moving,
    uneven_weights,
    unfinished,
)
from cdpg.report.values import MeanInterval, count, interval, number
from cdpg.storage.json_files import mapping, sequence

_OWN = "kl_target_policy"

_TILTED = "the target has moments or rewards, of which satisfaction says nothing"


def diagnose(study: Study) -> Diagnosis:
    """All remarks on all models."""
    models = [model for group in study.groups for model in group.models]
    remarks = [remark for model in models for remark in _of_model(study, model)]
    return diagnosis_of(remarks, [study.label_of(model) for model in models])


def _of_model(study: Study, model: str) -> Iterator[Remark]:
    label, run = study.label_of(model), study.run_of(model)
    method = next(group.method for group in study.groups if model in group.models)
    nothing = [] if run is None else list(nothing_learnt(label, _column(run, "coverage")))
    yield from nothing
    starved = any(isinstance(remark, Finding) for remark in nothing)
    if not starved:  # which would explain it
        satisfaction = study.beside_base(model, "satisfaction")
        if run is not None and _is_tilted(run):
            yield Unjudged(label, GAIN, _TILTED)
        else:
            yield from no_gain(label, satisfaction.base, satisfaction.change)
    yield from _of_distance(study, model, method)
    for name, rule in (("length", length_changed), ("distinct_2", diversity_lost)):
        yield from rule(label, *ratios_to_ideal(study, model, name))
    if run is not None:
        yield from _of_training(run, label, starved)
        yield from moved_away(label, *_distance_along(run), run.best_epoch)


def _of_training(run: Run, label: str, starved: bool) -> Iterator[Remark]:
    """Remarks on the training; if nothing was learnt, coverage and skipped steps add nothing."""
    end = {key: at_end(_column(run, key)) for key in ("coverage", "satisfaction", "ess", "z_mean")}
    taken, skipped, nonfinite = (math.fsum(_column(run, key)) for key in ("steps", "steps_skipped", "steps_nonfinite"))
    steps = taken + skipped + nonfinite
    yield from unfinished(label, len(run.metrics), count(run.config.get("epochs")))
    if not starved:
        yield from low_coverage(label, end["coverage"], end["z_mean"], count(run.config.get("num_generations")))
        yield from skipped_steps(label, steps, skipped)
    yield from uneven_weights(label, run.method, end["ess"], end["satisfaction"], end["coverage"])
    yield from still_moving(label, _column(run, "satisfaction"), run.drawn_by is not None, run.best_epoch is not None)
    yield from nonfinite_steps(label, steps, nonfinite)
    yield from failed_checks(label, math.fsum(_column(run, "checks_failed")), math.fsum(_column(run, "samples")))


def _of_distance(study: Study, model: str, method: str) -> Iterator[Remark]:
    """Distances from the ideal model and from the base, by the final evaluation, else by the last during the run."""
    label, run = study.label_of(model), study.run_of(model)
    chosen = run is not None and run.best_epoch is not None
    ideal = study.beside_base(model, POOLED)
    if (ideal.base is None or ideal.tuned is None) and run is not None:
        base, points = base_along(run, POOLED), _points(run, POOLED)
        last = points[-1][1] if points else None
        yield from farther(label, method, base, last, None, " at the last evaluation of the run", chosen)
    else:
        yield from farther(label, method, ideal.base, ideal.tuned, ideal.change, chosen=chosen)
    if run is not None and _is_tilted(run):
        yield Unjudged(label, SPENT, _TILTED)
        return
    if run is not None and _is_soft(run):
        yield Unjudged(label, SPENT, "the constraint gives values between 0 and 1, and the rule is for yes or no")
        return
    satisfaction, covered = study.beside_base(model, "satisfaction"), study.beside_base(model, "coverage")
    coverage = max((value.mean for value in (covered.base, covered.tuned) if value is not None), default=None)
    spent = study.beside_base(model, "kl_policy_base").tuned
    of_outputs = (satisfaction.base, satisfaction.change, coverage)
    yield from far_from_base(label, method, spent, ideal.base, *of_outputs, chosen)


def _distance_along(run: Run) -> tuple[list[tuple[float, MeanInterval]], MeanInterval | None, bool]:
    """KL(p, π) during a run, the base's, and whether it ended above that.

    Pooled if the run logged it pooled. Then the base is not one of the points, since its figure is of the last pool.
    """
    points, name = _points(run, POOLED), POOLED
    if len(points) < 2:
        points, name = _points(run, _OWN), _OWN
    base = base_along(run, name)
    if base is None or not points:
        return points, base, _ends_above_base(run)
    worse = points[-1][1].mean > base.mean
    return points if name == POOLED else [(0.0, base), *points], base, worse


def ratios_to_ideal(study: Study, model: str, name: str) -> tuple[float | None, float, str]:
    """A metric of a model and of its base as ratios to the ideal model's, else to the base's, and which of the two."""
    versus = mapping(study.evaluation.get("versus_ideal"))
    tuned, base = (interval(mapping(versus.get(of)).get(name)) for of in (model, study.base_of(model)))
    if tuned is not None and base is not None:
        return tuned.mean, base.mean, "ideal model"
    beside = study.beside_base(model, name)
    if beside.tuned is None or beside.base is None or beside.base.mean <= 0:
        return None, 1.0, "base"
    return beside.tuned.mean / beside.base.mean, 1.0, "base"


def _ends_above_base(run: Run) -> bool:
    """Whether the tuned model is farther from the ideal model than the base, by the pool of the final evaluation."""
    base, tuned = (interval(mapping(run.evaluation.get(model)).get(POOLED)) for model in (BASE_NAME, "tuned"))
    return base is not None and tuned is not None and tuned.mean > base.mean


def _is_tilted(run: Run) -> bool:
    """Whether the target has moments or rewards."""
    names = sequence(mapping(run.config.get("origin")).get("constraints"))
    return any(isinstance(name, str) and name.startswith(("moment ", "reward ")) for name in names)


def _is_soft(run: Run) -> bool:
    """Whether any logged verdict is between 0 and 1."""
    examples = sequence(run.evaluation.get("examples"))
    outputs = [
        out for item in examples for part in mapping(mapping(item).get("outputs")).values() for out in sequence(part)
    ]
    verdicts = (number(mapping(record).get("b")) for record in [*run.samples, *outputs])
    return any(b is not None and 0 < b < 1 for b in verdicts)


def _points(run: Run, name: str) -> list[tuple[float, MeanInterval]]:
    """A metric at the evaluations during a run, by epoch, without that of the base and those after the model kept."""
    last = math.inf if run.best_epoch is None else run.best_epoch
    known = (
        (count(record.get("epoch")), interval(mapping(record.get("metrics")).get(name))) for record in run.evaluations
    )
    return [(epoch, value) for epoch, value in known if epoch and epoch <= last and value is not None]


def _column(run: Run, field: str) -> list[float]:
    values = (number(record.get(field)) for record in run.metrics)
    return [value for value in values if value is not None]
