"""The training loop: the order of the stages, without mathematics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from cdpg.config import CDPGConfig
from cdpg.constraints.judge import Constraints
from cdpg.evaluation.measures import Measure
from cdpg.messages.notices import shows_notices
from cdpg.messages.progress import Progress
from cdpg.models.sampling import StopRule
from cdpg.training import resuming
from cdpg.training.callbacks import Callbacks, TakesCallbacks
from cdpg.training.epoch import Epoch
from cdpg.training.evaluating import RunEvaluator, refuse_data
from cdpg.training.nonfinite import NonfiniteWatch
from cdpg.training.saving import Saver
from cdpg.training.session import Session, open_session
from cdpg.training.setup import Model, answers_unknown_arguments, set_up


class CDPGTrainer(TakesCallbacks):
    """Tunes a conditional language model towards p_c ∝ a(x|c) · b(x,c) · exp(λφ + r/β).

    ``model`` is a hub id, a folder, a loaded Hugging Face model (tuned in place) or a
    :class:`~cdpg.models.base.LanguageModel`; ``constraints`` one or several functions of
    ``(prompts, completions, **columns)``, or their names (``"module:function"``), also moments and rewards
    (:class:`~cdpg.constraints.factors.Moment`, :class:`~cdpg.constraints.factors.Reward`); ``args`` a
    :class:`~cdpg.config.CDPGConfig` or a dictionary of settings; ``train_dataset`` anything
    :func:`~cdpg.contexts.contexts.load_contexts` takes. The base and the policy are evaluated on ``eval_dataset``, of
    the same kind, during the run and at its end; it should be held out, and the figures say how many of its prompts
    are tuned on, too. ``processing_class`` is the tokenizer, by default that of the model's name; ``callbacks`` are
    those of Hugging Face, to which an epoch is a step; ``peft_config`` asks for adapters. ``stop`` may end a sequence
    before its end token, for the base and the policy alike; ``measure`` adds metrics to the evaluation. ``command`` and
    ``inputs`` (model, contexts and constraint by name) are written to ``config.yaml``, so that the run can be repeated
    from it.
    """

    @shows_notices
    @answers_unknown_arguments
    def __init__(
        self,
        model: Model,
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
        config = CDPGConfig.of(args)
        self._parts = parts = set_up(
            config, model, constraints, train_dataset, eval_dataset, processing_class=processing_class,
            peft_config=peft_config, stop=stop, measure=measure, command=command, inputs=dict(inputs or {}),
        )  # fmt: skip
        self.judge, self.processes, self.folder, self.evaluator = (
            parts.judge, parts.processes, parts.folder, parts.evaluator,
        )  # fmt: skip
        self.contexts, self.eval_contexts, self.validation = parts.contexts, parts.eval_contexts, parts.validation
        self.policy, self.base = parts.policy, parts.base
        self.method, self.optimizer = parts.method, parts.optimizer
        self._state = parts.initial_state()
        given = {"model": self.model, "processing_class": self.policy.tokenizer, "optimizer": self.optimizer}
        self._callbacks = Callbacks(callbacks or (), config, parts.is_main, bool(self.eval_contexts), given)
        self._has_trained, self._done = False, 0
        self._use(config)
        self._callbacks.call("on_init_end")

    @property
    def method_state(self) -> Mapping[str, Any]:
        """What the method carries from epoch to epoch."""
        return self._state.method

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
        record: dict[str, Any] = {}
        self._state = resuming.begin_target(self._parts, self._state, resume_from_checkpoint, self.args)
        with (
            open_session(self._parts, self.args.epochs, self._seconds_left) as session,
            closing(self._parts.proposal),
        ):
            done = self._begin(resume_from_checkpoint, session)
            nonfinite = NonfiniteWatch(self.folder.nonfinite)
            for number in range(done + 1, self.args.epochs + 1):
                self._callbacks.epoch_begin()
                epoch = Epoch(number, self._parts, self._updater, self.args, self._rescue_of(number - 1))
                self._state = epoch.synchronised(self._state)  # q, if it is not the policy of now
                samples = epoch.sample(self._state)  # contexts c, x ~ q(·|c), verdicts b(x,c), scores log a(x|c)
                summary, self._state = epoch.update(samples, self._state)  # θ ← θ + α · w(x,c) · ∇log π(x|c)
                gain, self._state = epoch.validate(self._state)  # E_p[log π − log a] on the validation contexts
                record = epoch.record(samples, summary, gain, self._state)
                self._callbacks.step_end(record)
                nonfinite.add(record)
                session.progress.update(record)
                if number == done + 1:
                    self._parts.notices.of_first_epoch(self.args, record, epoch.cores, self._run_evaluator.pace())
                self._parts.notices.of_epoch(record)
                self._done = number
                self._end_epoch(number, nonfinite, session)
                if self.processes.any(self._callbacks.control.should_training_stop):
                    break
            self._callbacks.call("on_train_end")
            self._finish(record, session)
        if self.args.report_to:
            self.processes.accelerator.end_training()
        return record or self._parts.journal.last("metrics")

    @shows_notices
    def evaluate(self, progress: Progress | None = None, **others: Any) -> dict[str, Any]:
        """The base and the tuned model on all of ``eval_dataset``, with intervals; written to ``evaluation.json``.

        ``progress`` shows how far it has come; ``others`` are refused. Callbacks are given the tuned model's means
        (``on_log``, ``on_evaluate``).
        """
        refuse_data(progress, others)
        self._state = resuming.begin_target(self._parts, self._state, True, self.args)
        found = self._run_evaluator.evaluate_all(progress)
        self._run_evaluator.report(found)
        return found

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the tuned model as a plain Hugging Face folder, by default ``model/`` in the run's folder."""
        return self._saver.save_model(output_dir)

    def push_to_hub(self, repo_id: str | None = None, **options: Any) -> str:
        """Upload the tuned model, its tokenizer and its card; ``options`` are the hub's (``private``, ``token``, …)."""
        return self._saver.push(repo_id, **options)

    def _use(self, config: CDPGConfig) -> None:
        """Train by these settings."""
        self.args, parts = config, self._parts
        self._updater = parts.updater(config, self._callbacks.call)
        self._saver = Saver(parts, self._callbacks, config)
        self._run_evaluator = RunEvaluator(parts, self._callbacks, config)

    def _seconds_left(self, done: int, epoch: float) -> float:
        return self._run_evaluator.seconds_left(done, epoch)

    def _begin(self, resume: bool | str | Path | None, session: Session) -> int:
        """Set up the folder or resume from a checkpoint; returns the number of finished epochs."""
        checkpoint = resuming.checkpoint_to_resume(self._parts, resume, self._has_trained)
        self._has_trained = True
        if checkpoint is not None:
            config, self._state = resuming.continued(self._parts, checkpoint, self.args)
            self._use(config)
        done = self._done = 0 if checkpoint is None else checkpoint.epoch
        resuming.prepare_folder(self._parts, checkpoint, self.args, keep=bool(resume))
        session.raise_if_stopped_after(done)
        self._state = resuming.begin_validation(self._parts, self._state, self.args, done, session)
        resuming.begin_callbacks(self._parts, self._callbacks, self.args, done)
        if self._run_evaluator.is_missing(done):
            self._evaluate_if(self.args.evaluates_after(done), done, session)
            session.raise_if_stopped_after(done)
        return done

    def _evaluate_if(self, due: bool, number: int, session: Session) -> bool:
        return self._run_evaluator.evaluate_if(due, number, session, self._rescue_of(number))

    def _rescue_of(self, number: int) -> Callable[[], None]:
        """Saves the finished epochs if what follows fails before it changes anything."""
        return partial(self._saver.rescue, number, self._state)

    def _end_epoch(self, number: int, nonfinite: NonfiniteWatch, session: Session) -> None:
        """Evaluate and save where it is due or a callback asks for it; end the run if a signal asks for that."""
        evaluated = self._evaluate_if(self.args.evaluates_after(number), number, session)
        signalled = session.stop_check.is_stopped()
        planned = number % self.args.save_every == 0 or number == self.args.epochs
        saved = self._saver.checkpoint_if(planned or signalled or nonfinite.is_hopeless(), number, self._state)
        self._callbacks.call("on_epoch_end")
        # A callback may have asked for either; the checkpoint should include the evaluation.
        late = not evaluated and not signalled and self._evaluate_if(False, number, session)
        if late or not saved:
            self._saver.checkpoint_if(late and saved, number, self._state)
        nonfinite.raise_if_hopeless(number)
        if signalled:  # read once: a later signal must wait until the next checkpoint
            session.stop_check.raise_if_stopped(f"stopped after epoch {number}, a checkpoint is written")

    def _finish(self, record: Mapping[str, Any], session: Session) -> None:
        """Save the last or the best model and evaluate it; ``record`` has the last epoch's metrics."""
        kept = self._saver.choose(self._state, self._done)
        if self._parts.is_main:
            self._parts.journal.describe_kept(*kept)  # first: the model's card says it
        if self._parts.is_main or self._parts.trainable.is_divided:
            session.progress.stage("saving the model")
            self.save_model()
        if self._parts.is_main:
            self._parts.notices.of_end(self.folder.metrics)
        if self.eval_contexts and self.args.evaluate_at_end:
            self._run_evaluator.finish(record, session)
        self.processes.wait()
