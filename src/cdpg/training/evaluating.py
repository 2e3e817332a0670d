"""The evaluations of a run: when they are due, where they are logged, and the time they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from cdpg.config import CDPGConfig
from cdpg.errors import Interrupted, UserError
from cdpg.evaluation.plan import final_contexts
from cdpg.evaluation.results import BASE, TUNED
from cdpg.messages.progress import Progress
from cdpg.messages.text import duration
from cdpg.storage.evaluations import write_evaluation
from cdpg.system.stopping import never_stop
from cdpg.training.callbacks import Callbacks, evaluation_logs
from cdpg.training.forecast import guessed_context, run_seconds
from cdpg.training.notices import log_all
from cdpg.training.session import Session
from cdpg.training.setup import Parts


def refuse_data(progress: Any, others: Mapping[str, Any]) -> None:
    """Refuse a data set and other arguments that Hugging Face's ``evaluate`` takes."""
    unknown = progress is not None and not hasattr(progress, "working")
    given = [*([f"a {type(progress).__name__}"] if unknown else []), *others]
    if given:
        raise UserError(
            f"evaluate was given {', '.join(given)}: it takes no data; pass eval_dataset to CDPGTrainer, or use cdpg "
            "evaluate for other contexts"
        )


@dataclass(frozen=True)
class RunEvaluator:
    """Evaluates the policy during a run and at its end; logs and writes the results."""

    parts: Parts
    callbacks: Callbacks
    config: CDPGConfig

    def evaluate_if(self, due: bool, epoch: int, session: Session, rescue: Callable[[], None]) -> bool:
        """Evaluate the policy on some contexts and log it, if due or if a callback asks; returns whether it did.

        A signal puts it off until the run is resumed. If it fails, ``rescue`` is called.
        """
        asked = self.parts.processes.any(self.callbacks.control.should_evaluate)
        if not asked and not (due and self.parts.eval_contexts):
            return False
        session.progress.working(f"evaluating after epoch {epoch}")
        try:
            if not self.parts.eval_contexts:
                raise UserError(
                    "a callback asks for an evaluation, but there are no contexts for it: pass eval_dataset"
                )
            check_stop = partial(session.stop_check.raise_if_stopped, "the evaluation is put off")
            record = self.parts.evaluations.after_epoch(epoch, check_stop)
        except Interrupted:
            return False
        except Exception:
            rescue()
            raise
        self._log(record, epoch)
        return True

    def is_missing(self, epoch: int) -> bool:
        """Whether the last evaluation that was logged is of another epoch."""
        last = self.parts.journal.last("evaluations").get("epoch") if self.parts.is_main else epoch
        return self.parts.processes.any(last != epoch)

    def finish(self, record: Mapping[str, Any], session: Session) -> None:
        """The evaluation at the end of a run, whose last epoch's metrics are ``record``; a signal ends the run."""
        contexts = final_contexts(self.config, len(self.parts.eval_contexts))
        seconds = contexts * self._context_seconds(record.get("seconds", 0.0))
        session.progress.stage("final evaluation" + (f", about {duration(seconds)}" if seconds >= 1 else ""))
        check_stop = partial(session.stop_check.raise_if_stopped, "stopped before the evaluation was done")
        found = self.evaluate_all(session.progress.prefixed("final evaluation: "), check_stop)
        log_all(found.get("notices", ()))
        self.parts.notices.of_memory()

    def evaluate_all(
        self, progress: Progress | None = None, check_stop: Callable[[], None] = never_stop
    ) -> dict[str, Any]:
        """Base and tuned model on all contexts, as ``evaluation.json`` has it; empty on all but the main process."""
        if not self.parts.eval_contexts:
            raise UserError("there is nothing to evaluate on: pass eval_dataset")
        with closing(self.parts.evaluator):
            found = self.parts.evaluations.at_end(progress, check_stop)
        if found is None:  # not the main process
            return {}
        figures = found.to_mapping({BASE: BASE, TUNED: TUNED})
        return write_evaluation(self.parts.folder, figures, found.ideal_samples)

    def report(self, found: Mapping[str, Any]) -> None:
        """Give callbacks the tuned model's means of an evaluation that was asked for outside of a run."""
        means = self.parts.processes.from_main(evaluation_logs({"metrics": found.get(TUNED, {})}))
        self.callbacks.evaluated(means, may_be_best=False)

    def pace(self) -> tuple[int, float | None]:
        """How many contexts are evaluated, and the seconds that one takes if that is known."""
        return len(self.parts.eval_contexts), self.parts.evaluations.seconds_per_context

    def seconds_left(self, done: int, epoch: float) -> float:
        """Seconds left after ``done`` epochs of ``epoch`` seconds each, evaluations included."""
        held_out = len(self.parts.eval_contexts)
        return run_seconds(self.config, epoch, self._context_seconds(epoch), held_out, done)

    def _context_seconds(self, epoch: float) -> float:
        """Seconds to evaluate a context: of the last evaluation, else estimated from an epoch."""
        return self.parts.evaluations.seconds_per_context or guessed_context(self.config, epoch)

    def _log(self, record: dict[str, Any], epoch: int) -> None:
        if self.parts.is_main:
            self.parts.journal.append("evaluations", record)
        means = evaluation_logs(record)
        if self.config.report_to:
            numbers = {name: value for name, value in means.items() if value is not None}
            self.parts.processes.accelerator.log(numbers, step=epoch)
        self.callbacks.evaluated(means)
