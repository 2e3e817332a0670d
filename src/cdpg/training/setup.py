"""Builds the parts of a run from the trainer's arguments."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import nn, optim

from cdpg.config import FIELDS, CDPGConfig
from cdpg.constraints.factors import describe
from cdpg.constraints.judge import Constraints, Judge, name_of
from cdpg.contexts.chats import as_chats, warn_of_prompts
from cdpg.contexts.contexts import Context, load_contexts
from cdpg.contexts.digests import prompt_digests
from cdpg.contexts.stream import ContextStream
from cdpg.errors import UserError
from cdpg.evaluation.evaluator import Evaluator, refuse_stopped_beams
from cdpg.evaluation.measures import Measure, TextMeasure
from cdpg.evaluation.policy_evaluations import PolicyEvaluations
from cdpg.messages.foreign_names import unknown_argument
from cdpg.methods import make_method
from cdpg.methods.base import Method
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.loading import load_for, load_proposal
from cdpg.models.narrow import refuse_large_error
from cdpg.models.sampling import StopRule
from cdpg.rollout.sampler import Sampler
from cdpg.sandbox.limits import Limits
from cdpg.storage import provenance, usage
from cdpg.storage.journal import Journal
from cdpg.storage.run_folder import RunFolder
from cdpg.storage.snapshot import Trainable
from cdpg.system.distributed import Processes, make_accelerator, processes_here
from cdpg.training.engine import make_engine
from cdpg.training.failures import FailureLog
from cdpg.training.moments import TargetFit
from cdpg.training.notices import RunNotices
from cdpg.training.optimization import Updater, make_optimizer, trainable_parameters
from cdpg.training.proposal import Proposal
from cdpg.training.state import RunState
from cdpg.training.validation import Validation, keeps_best, split_validation, why_no_validation

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

Model = str | PathLike[str] | nn.Module | LanguageModel
"""A hub id, a folder, a loaded Hugging Face model or a language model of this package."""


@dataclass(frozen=True)
class Parts:
    """The parts of a run; none of them is replaced while it trains."""

    judge: Judge
    contexts: list[Context]
    """The training contexts, without the validation contexts."""
    eval_contexts: list[Context]
    processes: Processes
    policy: LanguageModel
    base: LanguageModel
    prompts: Sequence[PromptTokens]
    """Those of ``contexts``, encoded."""
    validation: Validation
    """Measures the gain on the validation contexts."""
    keeps_best: bool
    """Whether the model with the largest of these gains is kept."""
    given: frozenset[str]
    """Digests of all given training prompts, those of the validation contexts included."""
    evaluator: Evaluator
    method: Method
    module: nn.Module | None
    """The method's own parameters."""
    parameters: list[nn.Parameter]
    optimizer: optim.Optimizer
    trainable: Trainable
    stream: ContextStream
    sampler: Sampler
    proposal: Proposal
    """What draws the samples."""
    target_fit: TargetFit
    """Fits λ of the target's moments."""
    folder: RunFolder
    origin: Mapping[str, Any]
    """The key ``origin`` of ``config.yaml``."""
    journal: Journal
    evaluations: PolicyEvaluations
    failures: FailureLog
    notices: RunNotices
    inputs: Mapping[str, Any]
    """Model, contexts and constraint by name, as ``config.yaml`` has them."""
    sources: Sequence[str | Path]
    """Paths of the model and the data that the run is made from; it must not remove them."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files and shows its notices."""
        return self.processes.is_main

    def initial_state(self) -> RunState:
        """The state before the first epoch."""
        return RunState.begin(self.method)

    def updater(self, config: CDPGConfig, call_callbacks: Callable[[str], None]) -> Updater:
        """Takes the optimiser's steps by these settings, and has callbacks called around each."""
        parts = (self.policy, self.method, self.module, self.optimizer, self.parameters)
        return Updater(*parts, config, self.processes, call_callbacks)


def set_up(
    config: CDPGConfig,
    model: Model,
    constraints: Constraints,
    train_dataset: Any,
    eval_dataset: Any,
    *,
    processing_class: Any,
    peft_config: Any,
    stop: StopRule | None,
    measure: Measure | None,
    command: str | None,
    inputs: Mapping[str, Any],
) -> Parts:
    """Load, check and connect everything; what is wrong with the arguments is found here."""
    if train_dataset is None:
        raise UserError("no contexts were given: pass train_dataset with a 'prompt' column")
    refuse_stopped_beams(measure := measure or TextMeasure(), stop)
    method = make_method(config)
    judge = Judge(constraints, Limits.of(config, processes_here()), prunes=config.prune)  # first: it may fork
    everything, eval_contexts = _contexts((train_dataset, eval_dataset), config, judge)
    processes = Processes(make_accelerator(config))
    (policy, base), drawing, divide = _loaded(model, everything, method, processes, processing_class, peft_config)
    warn_of_prompts(policy.tokenizer, [*everything, *eval_contexts])
    all_prompts = _encoded(everything, policy, base, config)
    held_out = 0 if judge.tilt.factors else len(eval_contexts)  # the gain is biased then, and does not choose
    (contexts, prompts), validation, best = _divided(everything, all_prompts, config, method, held_out)
    given = frozenset(prompt_digests(everything))
    evaluator = Evaluator.of(base, eval_contexts, judge, measure, config, processes, stop, given)
    folder = RunFolder(config.output_dir)
    origin = provenance.origin(
        model=model if isinstance(model, str) else provenance.model_name(policy.module),
        policy=policy.module, base=base.module, proposal=None if drawing in (policy, base) else drawing.module,
        contexts=everything, prompts=all_prompts, held_out=eval_contexts, tuned_on=contexts,
        keep="best" if best else "last", prune=bool(judge.prefix_checks) and not method.scores_every_sample,
        constraints=[*map(name_of, judge.constraints), *map(describe, judge.tilt.factors)],
        processes=processes.count, command=command, stop=None if stop is None else type(stop).__name__,
        sampling=usage.facts(policy, config, everything, stop),
    )  # fmt: skip
    divide()  # digests are of whole weights, the optimiser is for the parts
    module = method.make_module(policy)
    optimizer = make_optimizer(parameters := trainable_parameters(policy, module), config)
    trainable = Trainable(policy.module, module, optimizer)
    failures = FailureLog(folder.failures, config.check_failures, processes)
    from_base = method.source == "base"
    engine = make_engine(config, drawing, all_prompts, processes, folder.engine, from_base and base is policy)
    sampler = Sampler(drawing, base, judge, config, processes, stop, from_base, engine.engine if engine else None)
    journal = Journal(folder, trainable, origin)
    return Parts(
        judge=judge, contexts=contexts, eval_contexts=eval_contexts, processes=processes, policy=policy, base=base,
        prompts=prompts, evaluator=evaluator, method=method, module=module, parameters=parameters, optimizer=optimizer,
        trainable=trainable, folder=folder, origin=origin, failures=failures, inputs=inputs,
        stream=ContextStream(contexts, config.seed), sampler=sampler, given=given, keeps_best=best, journal=journal,
        proposal=Proposal(method, policy, sampler, trainable, engine),
        validation=Validation(sampler, policy, trainable, *validation),
        evaluations=PolicyEvaluations(evaluator, policy, _about(inputs, origin)),
        target_fit=TargetFit(sampler, method, everything, all_prompts, journal),
        notices=RunNotices(failures, config.num_generations, bool(judge.tilt.factors), engine is not None),
        sources=_sources(model, train_dataset, eval_dataset, *inputs.values()),
    )  # fmt: skip


def _about(inputs: Mapping[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    """What evaluations say of the run."""
    return {"task": inputs.get("task"), "command": origin["command"], "versions": origin["versions"]}


def _loaded(
    model: Model,
    contexts: Sequence[Context],
    method: Method,
    processes: Processes,
    processing_class: Any,
    peft_config: Any,
) -> tuple[tuple[LanguageModel, LanguageModel], LanguageModel, Callable[[], None]]:
    """Policy and base, what draws the samples, and a function that divides all weights, if that is asked for."""
    config = method.config
    policy, base, divide = load_for(processes, model, config, processing_class, peft_config)
    drawing, divide_drawing = load_proposal(processes, method.source, config, policy, base, contexts)

    def divide_all() -> None:
        divide()
        divide_drawing()

    return (policy, base), drawing, divide_all


Encoded = tuple[list[Context], list[PromptTokens]]
"""Contexts and their prompts."""


def _encoded(
    contexts: Sequence[Context], policy: LanguageModel, base: LanguageModel, config: CDPGConfig
) -> list[PromptTokens]:
    """The prompts; a base that its type takes too far from the policy, which is still the same model, is refused."""
    prompts = policy.encode(contexts, config.max_completion_length)
    if config.base_dtype != "float32":
        refuse_large_error(policy, base, contexts, prompts, config)
    return prompts


def _divided(
    contexts: Sequence[Context], prompts: Sequence[PromptTokens], config: CDPGConfig, method: Method, held_out: int
) -> tuple[Encoded, Encoded, bool]:
    """Training contexts, validation contexts, and whether the best model is kept, by the gain on the latter."""
    best = keeps_best(config, method, held_out)
    decides = best or method.replay > 0
    tuning, validation = (
        ([contexts[i] for i in part], [prompts[i] for i in part])
        for part in split_validation(contexts, config, decides)
    )
    if decides and not validation[0]:
        why = why_no_validation(len(contexts), config)
        if config.keep == "best":
            raise UserError(
                f"keep is 'best', but there are no validation contexts to choose the model by: {why}; or set keep: last"
            )
        _log.info(f"nothing is replayed and the last model is kept, because {why}")
    return tuning, validation, best and bool(validation[0])


def _sources(*given: Any) -> list[str | Path]:
    """The arguments that may name a file."""
    return [source for source in given if isinstance(source, (str, Path))]


def answers_unknown_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Answer a keyword that the function does not have, such as that of another trainer, with the one to use."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        problems = [unknown_argument(name, known, FIELDS) for name in kwargs if name not in known]
        if problems:
            raise UserError("; ".join(problems))
        return function(*args, **kwargs)

    return checked


def _contexts(datasets: Sequence[Any], config: CDPGConfig, judge: Judge) -> list[list[Context]]:
    """The contexts of each data set, with the columns that the constraints need; none where there is no data set."""
    found = [[] if data is None else as_chats(load_contexts(data), config.chat, config.system) for data in datasets]
    for contexts in found:
        judge.require_columns(contexts)
    return found
