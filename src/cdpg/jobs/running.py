"""Carries out a job: makes its trainer or its evaluator, and evaluates saved models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from cdpg.errors import UserError
from cdpg.evaluation.evaluator import Evaluator
from cdpg.evaluation.results import BASE, TUNED, Evaluation
from cdpg.jobs.job import Inputs, Job
from cdpg.messages.progress import LineProgress, SilentProgress
from cdpg.messages.terms import term
from cdpg.models.base import LanguageModel
from cdpg.models.loading import load_model
from cdpg.models.transformer import TransformerModel
from cdpg.storage.provenance import how_to_resume, versions
from cdpg.system.signals import StopSignal
from cdpg.system.stopping import StopCheck
from cdpg.training.notices import log_all
from cdpg.training.trainer import CDPGTrainer


def make_trainer(job: Job, inputs: Inputs, command: str | None) -> CDPGTrainer:
    """The trainer of a job."""
    return CDPGTrainer(
        job.model,
        inputs.constraints,
        job.settings,
        inputs.tuning,
        inputs.held_out,
        stop=inputs.stop,
        measure=inputs.measure,
        command=command,
        inputs=job.inputs(),
    )


def make_evaluator(job: Job, inputs: Inputs, tuned_on: frozenset[str] | None) -> Evaluator:
    """The evaluator of a job, with the job's base; ``tuned_on`` has digests of the prompts tuned on, if known."""
    return Evaluator.load(
        job.model, inputs.constraints, inputs.held_out, job.settings, inputs.measure, inputs.stop, tuned_on
    )


def evaluate_model(
    job: Job,
    inputs: Inputs,
    model: str,
    command: str | None,
    tuned_on: frozenset[str] | None,
) -> tuple[dict[str, Any], Sequence[Mapping[str, Any]]] | None:
    """Evaluate a model and the job's base: the content of ``evaluation.json``, and the samples of the ideal model.

    None except on the main process.

    A model with other tokens than the base is refused, since p is defined on the base's. ``tuned_on`` has digests of
    the prompts that it was tuned on, if they are known.
    """
    evaluator = make_evaluator(job, inputs, tuned_on)
    loaded = load_model(model, job.settings)
    _require_same_tokens(model, loaded, job.model, evaluator)
    found = evaluate_saved(evaluator, {TUNED: lambda: loaded}, job.task, command, StopSignal())
    if found is None:
        return None
    result = found.to_mapping({BASE: BASE, TUNED: TUNED})
    log_all(result["notices"])
    return result, found.ideal_samples


def evaluate_saved(
    evaluator: Evaluator,
    models: Mapping[str, Callable[[], LanguageModel]],
    task: str | None,
    command: str | None,
    signal: StopSignal,
) -> Evaluation | None:
    """Evaluate saved models on the held-out contexts; None except on the main process. A signal ends it on all."""
    processes = evaluator.processes
    check = StopCheck(signal, processes, how_to_resume(command))
    check_stop = partial(check.raise_if_stopped, "stopped before the evaluation was done")
    progress = LineProgress() if processes.is_main else SilentProgress()
    about = {"task": task, "command": command, "versions": versions(), "of_saved_model": True}
    with closing(evaluator):
        return evaluator.evaluate(models, about, progress=progress, check_stop=check_stop)


def _require_same_tokens(name: str, model: LanguageModel, base_name: str, evaluator: Evaluator) -> None:
    """Refuse a model with other tokens than the base, before anything is sampled."""
    base, length = evaluator.base, evaluator.config.max_completion_length
    if not isinstance(model, TransformerModel) or not isinstance(base, TransformerModel):
        return
    differences = list(model.token_differences(base, evaluator.contexts, length))
    if differences:
        raise UserError(
            f"the model {name!r} cannot be evaluated beside the base {base_name!r}, on whose tokens the ideal model is "
            f"defined: {'; '.join(differences)}; name the model's own base with {term('base')}"
        )
