"""The training loop: the order of the stages, without mathematics."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from cdpg.config import CDPGConfig
from cdpg.constraints.judge import Constraints, Judge
from cdpg.contexts.chats import as_chats, warn_of_plain_prompts
from cdpg.contexts.contexts import load_contexts
from cdpg.contexts.digests import prompt_digests
from cdpg.contexts.stream import ContextStream
from cdpg.errors import CDPGError, Interrupted, RunError, UserError
from cdpg.evaluation.evaluator import Evaluator, refuse_stopped_beams
from cdpg.evaluation.measures import Measure, TextMeasure
from cdpg.evaluation.plan import final_contexts
from cdpg.evaluation.results import BASE, TUNED
from cdpg.evaluation.run_evaluations import RunEvaluations
from cdpg.messages.notices import shows_notices
from cdpg.messages.progress import Progress as SimpleProgress
from cdpg.messages.text import duration
from cdpg.methods import make_method
from cdpg.models.base import LanguageModel
from cdpg.models.loading import load_policy_and_base
from cdpg.models.sampling import StopRule
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.sandbox.limits import Limits
from cdpg.storage import card, provenance, schedule, usage
from cdpg.storage.atomic import write_folder
from cdpg.storage.checkpoints import Checkpoint, find_checkpoint, kept_epochs
from cdpg.storage.evaluations import write_evaluation
from cdpg.storage.hub import push_folder
from cdpg.storage.journal import Journal
from cdpg.storage.provenance import how_to_resume
from cdpg.storage.run_folder import RunFolder
from cdpg.storage.snapshot import Trainable
from cdpg.system.distributed import Processes, make_accelerator, processes_here, tracker_config
from cdpg.system.signals import StopSignal
from cdpg.system.stopping import StopCheck, never_stop
from cdpg.system.threads import CoreWatch
from cdpg.training.callbacks import Callbacks, TakesCallbacks, evaluation_logs, history
from cdpg.training.failures import FailureLog
from cdpg.training.forecast import guessed_context, run_seconds
from cdpg.training.inspection import keep_refused
from cdpg.training.metrics import metrics_record, sample_records
from cdpg.training.notices import Notices, log_all
from cdpg.training.optimization import Updater, make_optimizer, trainable_parameters
from cdpg.training.progress import Progress
from cdpg.training.setup import origin_of

_log = logging.getLogger(__name__)

_NONFINITE_LIMIT = 5
"""Epochs in a row without a finite gradient after which the run stops."""


class CDPGTrainer(TakesCallbacks):
    """Tunes a conditional language model towards p_c ∝ a(x|c) · b(x,c).

    ``model`` is a hub id, a folder, a loaded Hugging Face model (tuned in place) or a
    :class:`~cdpg.models.base.LanguageModel`; ``constraints`` one or several functions of
    ``(prompts, completions, **columns)``, or their names (``"module:function"``); ``args`` a
    :class:`~cdpg.config.CDPGConfig` or a dictionary of settings; ``train_dataset`` anything
    :func:`~cdpg.contexts.contexts.load_contexts` takes. The base and the policy are evaluated on ``eval_dataset``, of
    the same kind, along the run and at its end; it should be held out, and the figures say how many of its prompts
    are tuned on, too. ``stop`` may end a sequence before its end token, for the base and the policy alike;
    ``measure`` adds metrics to the evaluation. ``command`` and ``inputs`` (model, contexts and constraint by name)
    are written to ``config.yaml``, so that the run can be repeated from it.
    """

    @shows_notices
    def __init__(
        self,
        model: str | PathLike[str] | nn.Module | LanguageModel,
        constraints: Constraints,
        args: CDPGConfig | Mapping[str, Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        *,
        stop: StopRule | None = None,
        measure: Measure | None = None,
        command: str | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        self.args = CDPGConfig.of(args)
        if train_dataset is None:
            raise UserError("no contexts were given: pass train_dataset with a 'prompt' column")
        measure = measure or TextMeasure()
        refuse_stopped_beams(measure, stop)
        self.judge = Judge(constraints, Limits.of(self.args, processes_here()))  # first: it may fork
        chat = self.args.chat, self.args.system
        self.contexts = as_chats(load_contexts(train_dataset), *chat)
        self.eval_contexts = [] if eval_dataset is None else as_chats(load_contexts(eval_dataset), *chat)
        self.judge.require_columns(self.contexts)
        self.judge.require_columns(self.eval_contexts)
        self.processes = Processes(make_accelerator(self.args))
        device = self.processes.accelerator.device if self.args.device == "auto" else None
        self.policy, self.base = load_policy_and_base(model, self.args, processing_class, device, peft_config)
        warn_of_plain_prompts(self.policy.tokenizer, [*self.contexts, *self.eval_contexts])
        self._prompts = self.policy.encode(self.contexts, self.args.max_completion_length)
        tuned_on = frozenset(prompt_digests(self.contexts))
        evaluated = (self.base, self.eval_contexts, self.judge, measure, self.args, self.processes, stop, tuned_on)
        self.evaluator = Evaluator.of(*evaluated)
        self.method = make_method(self.args)
        self.method_state, module = self.method.begin(), self.method.make_module(self.policy)
        parameters = trainable_parameters(self.policy, module)
        self.optimizer = make_optimizer(parameters, self.args)
        self._trainable = Trainable(self.policy.module, module, self.optimizer)
        self._stream = ContextStream(self.contexts, self.args.seed)
        self._sampler = Sampler(self.policy, self.base, self.judge, self.args, self.processes, stop)
        parts = {"model": self.model, "processing_class": self.policy.tokenizer, "optimizer": self.optimizer}
        self._callbacks = Callbacks(callbacks or (), self.args, self.processes.is_main, bool(self.eval_contexts), parts)
        setup = (self.policy, self.method, module, self.optimizer, parameters, self.args, self.processes)
        self._updater = Updater(*setup, self._callbacks.call)
        self.folder = RunFolder(self.args.output_dir)
        self._failures = FailureLog(self.folder.failures, self.args.check_failures, self.processes)
        self._notices = Notices(self._failures, self.args.num_generations)
        self._origin = origin_of(
            model, self.policy, self.base, self.judge, self.contexts, self._prompts, self.eval_contexts, stop,
            self.processes, command, self.args,
        )  # fmt: skip
        self._journal = Journal(self.folder, self._trainable, self._origin)
        self._used, self._inputs = False, dict(inputs or {})
        given = (model, train_dataset, eval_dataset, *self._inputs.values())
        self._sources = [source for source in given if isinstance(source, (str, Path))]
        about = {"task": self._inputs.get("task"), "command": command, "versions": self._origin["versions"]}
        self._evaluations = RunEvaluations(self.evaluator, self.policy, about)
        self._callbacks.call("on_init_end")

    @property
    def model(self) -> nn.Module:
        """The model being tuned."""
        return self.policy.module

    @shows_notices
    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> dict[str, Any]:
        """Run every epoch that is left, save the model and return the last epoch's metrics.

        ``resume_from_checkpoint`` is true for the newest whole checkpoint of ``output_dir`` (from the start when there
        is none), or the path of one.
        """
        main = self.processes.is_main
        with (
            self.folder if main else nullcontext(),  # the other processes write nothing
            closing(self.evaluator),
            StopSignal() as signal,
            Progress(self.args.epochs, silent=not main, seconds_left=self._seconds_left) as progress,
        ):
            stop = StopCheck(signal, self.processes, how_to_resume(self._origin["command"]))
            done = self._begin(resume_from_checkpoint, progress, stop)
            record = self._epochs(done, progress, stop)
            self._callbacks.call("on_train_end")
            if main:
                progress.stage("saving the model")
                self.save_model()
                self._notices.of_end(self.folder.metrics)
            if self.eval_contexts and self.args.evaluate_at_end:
                contexts = final_contexts(self.args, len(self.eval_contexts))
                seconds = contexts * self._context_seconds(record.get("seconds", 0.0))
                progress.stage("final evaluation" + (f", about {duration(seconds)}" if seconds >= 1 else ""))
                check_stop = partial(stop.raise_if_stopped, "stopped before the evaluation was done")
                found = self._evaluate_all(progress.prefixed("final evaluation: "), check_stop)
                log_all(found.get("notices", ()))
                self._notices.of_memory()
            self.processes.wait()
        if self.args.report_to:
            self.processes.accelerator.end_training()
        return record or self._journal.last("metrics")

    def _epochs(self, done: int, progress: Progress, stop: StopCheck) -> dict[str, Any]:
        """Run every epoch after the first ``done``; returns the metrics of the last, or nothing."""
        record: dict[str, Any] = {}
        nonfinite_epochs = 0
        for number in range(done + 1, self.args.epochs + 1):
            self._callbacks.epoch_begin()
            watch = CoreWatch()
            record = self._epoch(number)
            progress.update(record)
            if number == done + 1:
                evaluation = (len(self.eval_contexts), self._evaluations.seconds_per_context)
                self._notices.of_first_epoch(self.args, record, watch, evaluation)
            self._notices.of_epoch(record)
            evaluated = self._evaluate_if(self.args.evaluates_after(number), number, progress, stop)
            nonfinite_epochs = nonfinite_epochs + 1 if record["steps_nonfinite"] and not record["steps"] else 0
            hopeless = nonfinite_epochs == _NONFINITE_LIMIT
            signalled = stop.is_stopped()
            due = hopeless or signalled or number % self.args.save_every == 0 or number == self.args.epochs
            saved = self._save_if(due, number)
            self._callbacks.call("on_epoch_end")
            # A callback may have asked for either; the checkpoint should include the evaluation.
            late = not evaluated and not signalled and self._evaluate_if(False, number, progress, stop)
            if late or not saved:
                self._save_if(late and saved, number)
            if hopeless:
                raise RunError(
                    f"no finite gradient in {_NONFINITE_LIMIT} epochs: lower learning_rate or set max_grad_norm; the "
                    f"last checkpoint is of epoch {number}, the batches are in {str(self.folder.nonfinite)!r}"
                )
            if signalled:  # read once: a later signal must wait until the next checkpoint
                stop.raise_if_stopped(f"stopped after epoch {number}, a checkpoint is written")
            if self.processes.any(self._callbacks.control.should_training_stop):
                break
        return record

    @shows_notices
    def evaluate(self, progress: SimpleProgress | None = None) -> dict[str, Any]:
        """The base and the tuned model on all of ``eval_dataset``, with intervals; written to ``evaluation.json``.

        ``progress`` shows how far it has come. Callbacks are given the tuned model's means (``on_log``,
        ``on_evaluate``).
        """
        found = self._evaluate_all(progress)
        means = self.processes.from_main(evaluation_logs({"metrics": found.get(TUNED, {})}))
        self._callbacks.evaluated(means, may_be_best=False)
        return found

    def _evaluate_all(
        self, progress: SimpleProgress | None = None, check_stop: Callable[[], None] = never_stop
    ) -> dict[str, Any]:
        if not self.eval_contexts:
            raise UserError("there is nothing to evaluate on: pass eval_dataset")
        with closing(self.evaluator):
            found = self._evaluations.at_end(progress, check_stop)
        if found is None:  # not the main process
            return {}
        return write_evaluation(self.folder, found.to_mapping({BASE: BASE, TUNED: TUNED}))

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the tuned model as a plain Hugging Face folder, by default ``model/`` in the run's folder."""
        if output_dir is None:
            write_folder(self.folder.model, self._write_model)
            return self.folder.model
        self._write_model(Path(output_dir))  # not replaced: it may hold the user's files
        return Path(output_dir)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the tuned model, its tokenizer and its card; ``options`` are the hub's (``private``, ``token``, …)."""
        folder = self.save_model()
        self._callbacks.call("on_push_begin")
        return push_folder(folder, repo_id, **options)

    def _write_model(self, path: Path) -> None:
        self.policy.save(path, self.args)
        if not (path / card.FILE).exists():  # an existing one is the user's
            card.write_card(path, self.folder)

    def _epoch(self, number: int) -> dict[str, Any]:
        """One round: sample, judge, score, step, log."""
        started, watch = time.perf_counter(), Stopwatch()
        try:
            rollout = self._draw(number, watch)
        except Exception:
            self._rescue(number - 1)
            raise
        problem = self._failures.problem(rollout)
        if problem is not None:
            self._rescue(number - 1)
            self._failures.append(rollout)
            self.processes.wait()  # otherwise a launcher may end the main process while it writes
            raise problem
        summary = self._updater.update(rollout, self.method_state, lambda: self._rescue(number - 1))
        self.method_state = summary.state
        watch.lap("gradient")
        if summary.refused and self.processes.is_main:
            keep_refused(self.folder.nonfinite, rollout, summary)
        if summary.broken:
            raise RunError(
                f"a step of epoch {number} left weights that are not finite: lower learning_rate or set max_grad_norm; "
                f"the batch is in {str(self.folder.nonfinite)!r}, the checkpoints are those from before"
            )
        record = metrics_record(rollout, summary, self.args.rate(number), self.args.partition_epsilon)
        record["seconds"] = time.perf_counter() - started
        record |= {f"seconds_{stage}": seconds for stage, seconds in watch.seconds.items()}
        if self.processes.is_main:
            self._journal.append("metrics", record)
            for sample in sample_records(rollout, self.args.log_samples, self.args.seed):
                self._journal.append("samples", sample)
        self._failures.append(rollout)
        if self.args.report_to:
            numbers = {key: value for key, value in record.items() if value is not None}
            self.processes.accelerator.log(numbers, step=number)
        self._callbacks.step_end(record)
        return record

    def _draw(self, number: int, watch: Stopwatch) -> Rollout:
        """The samples of an epoch, judged and scored."""
        chosen = self._stream.draw(number - 1, self.args.contexts_per_epoch)
        contexts, prompts = [self.contexts[i] for i in chosen], [self._prompts[i] for i in chosen]
        return self._sampler.draw(number, contexts, prompts, self.method.scores_every_sample, watch)

    def _rescue(self, done: int) -> None:
        """Save the finished epochs if the next one failed before it changed anything."""
        if done and self.processes.is_main:
            with suppress(CDPGError, MemoryError, RuntimeError, OSError):  # keep the original exception
                self._journal.save(done, self.args, self.method_state)
                _log.info(f"a checkpoint of epoch {done} is written")

    def _seconds_left(self, done: int, epoch: float) -> float:
        """Seconds left after ``done`` epochs of ``epoch`` seconds each, evaluations included."""
        return run_seconds(self.args, epoch, self._context_seconds(epoch), len(self.eval_contexts), done)

    def _context_seconds(self, epoch: float) -> float:
        """Seconds to evaluate a context: of the last evaluation, else estimated from an epoch."""
        return self._evaluations.seconds_per_context or guessed_context(self.args, epoch)

    def _evaluate_if(self, due: bool, number: int, progress: Progress, stop: StopCheck) -> bool:
        """Evaluate the policy on some contexts and log it, if due or if a callback asks; returns whether it did.

        A signal puts it off until the run is resumed.
        """
        asked = self.processes.any(self._callbacks.control.should_evaluate)
        if not asked and not (due and self.eval_contexts):
            return False
        progress.working(f"evaluating after epoch {number}")
        try:
            if not self.eval_contexts:
                raise UserError(
                    "a callback asks for an evaluation, and there are no contexts for it: pass eval_dataset"
                )
            record = self._evaluations.after_epoch(number, partial(stop.raise_if_stopped, "put off"))
        except Interrupted:
            return False
        except Exception:
            self._rescue(number)
            raise
        if self.processes.is_main:
            self._journal.append("evaluations", record)
        means = evaluation_logs(record)
        if self.args.report_to:
            numbers = {name: value for name, value in means.items() if value is not None}
            self.processes.accelerator.log(numbers, step=number)
        self._callbacks.evaluated(means)
        return True

    def _begin(self, resume: bool | str | Path | None, progress: Progress, stop: StopCheck) -> int:
        """Set up the folder or resume from a checkpoint; returns the number of finished epochs."""
        checkpoint = find_checkpoint(self.folder.checkpoints, resume) if resume else None
        if checkpoint is None and self._used:
            raise UserError("this trainer has trained already, and no checkpoint takes it back: make a new one")
        self._used, done = True, 0 if checkpoint is None else checkpoint.epoch
        if checkpoint is not None:
            self._continue(checkpoint)
            self.processes.wait()  # no process may still read what is removed below
        if self.processes.is_main:
            if not resume:
                self._journal.clear(self.args, self._sources)
            self._journal.begin(checkpoint, self.args)
            self._journal.describe(self.args, self._inputs, prompt_digests(self.contexts))
        log_all(usage.notices(self._origin["sampling"]))
        if self.args.report_to:
            self.processes.accelerator.init_trackers("cdpg", config=tracker_config(self.args))
        self.processes.wait()
        stop.raise_if_stopped(f"stopped after epoch {done}" if done else "stopped before the first epoch")
        logged = history(self.folder.metrics, self.folder.evaluations) if self.processes.is_main else []
        self._callbacks.begin(self.args, done, self.processes.from_main(logged))
        last = self._journal.last("evaluations").get("epoch") if self.processes.is_main else done
        if self.processes.any(last != done):
            self._evaluate_if(self.args.evaluates_after(done), done, progress, stop)
            stop.raise_if_stopped(f"stopped after epoch {done}" if done else "stopped before the first epoch")
        return done

    def _continue(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint, unless that would change the run's result."""
        asked, then = self.args, provenance.begun_with(checkpoint.state)
        self.args = schedule.continued(asked, then, checkpoint.epoch)
        self._updater = dataclasses.replace(self._updater, config=self.args)
        kept = kept_epochs(self.folder.checkpoints)
        notices = provenance.check_resume(
            checkpoint.epoch, checkpoint.state, self.args, self._origin, self.folder.checkpoints, kept
        )
        log_all((*notices, *schedule.kept_defaults(asked, self.args, then)))
        self.method_state = self._trainable.restore(checkpoint)
        _log.info(f"continuing after epoch {checkpoint.epoch}")

    def _save_if(self, due: bool, number: int) -> bool:
        """Write a checkpoint if due, or if a callback asks for one or for the end; returns whether it did."""
        control = self._callbacks.control
        if not due and not self.processes.any(control.should_save or control.should_training_stop):
            return False
        if self.processes.is_main:
            self._journal.save(number, self.args, self.method_state)
        self._callbacks.saved()
        self.processes.wait()
        return True
