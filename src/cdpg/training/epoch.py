"""One epoch, step by step: sample, judge and score; take the optimiser's steps; record."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cdpg.config import CDPGConfig
from cdpg.errors import RunError
from cdpg.methods.base import State
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Stopwatch
from cdpg.system.threads import CoreWatch
from cdpg.training.nonfinite import keep_refused
from cdpg.training.optimization import StepSummary, Updater
from cdpg.training.records import OF_BASE, metrics_record, sample_records
from cdpg.training.setup import Parts


class Epoch:
    """An epoch as it goes on. What fails before the first step leaves a checkpoint of the epochs before."""

    def __init__(
        self, number: int, parts: Parts, updater: Updater, config: CDPGConfig, rescue: Callable[[], None]
    ) -> None:
        """``rescue`` saves the epochs before."""
        self._number, self._parts, self._config = number, parts, config
        self._updater, self._rescue = updater, rescue
        self._started, self._watch = time.perf_counter(), Stopwatch()
        self.cores = CoreWatch()

    def sample(self) -> Rollout:
        """Draw contexts c and samples x ~ q(·|c), judge them, b(x,c), and score them, log a(x|c)."""
        parts, number = self._parts, self._number
        chosen = parts.stream.draw(number - 1, self._config.contexts_per_epoch)
        contexts, prompts = [parts.contexts[i] for i in chosen], [parts.prompts[i] for i in chosen]
        try:
            every_sample = parts.method.scores_every_sample
            rollout = parts.sampler.draw(number, contexts, prompts, every_sample, self._watch, indices=chosen)
        except Exception:
            self._rescue()
            raise
        problem = parts.failures.problem(rollout)
        if problem is not None:
            self._rescue()
            parts.failures.append(rollout)
            parts.processes.wait()  # otherwise a launcher may end the main process while it writes
            raise problem
        return rollout

    def update(self, rollout: Rollout, state: State) -> StepSummary:
        """Compute the weights and take the steps θ ← θ + α · w(x,c) · ∇log π(x|c).

        ``state`` is the method's after the epoch before.
        """
        summary = self._updater.update(rollout, state, self._rescue)
        self._watch.lap("gradient")
        if summary.refused and self._parts.is_main:
            keep_refused(self._parts.folder.nonfinite, rollout, summary)
        if summary.broken:
            raise RunError(
                f"a step of epoch {self._number} left weights that are not finite: lower learning_rate or set "
                f"max_grad_norm; the batch is in {str(self._parts.folder.nonfinite)!r}, the checkpoints are those from "
                "before"
            )
        return summary

    def record(self, rollout: Rollout, summary: StepSummary) -> dict[str, Any]:
        """The epoch's line of ``metrics.jsonl``, which is written, as are some samples and failed checks."""
        parts, config = self._parts, self._config
        record = metrics_record(rollout, summary, config.rate(self._number), config.partition_epsilon)
        record |= OF_BASE if parts.sampler.policy_is_base else {}
        record["seconds"] = time.perf_counter() - self._started
        record |= {f"seconds_{stage}": seconds for stage, seconds in self._watch.seconds.items()}
        if parts.is_main:
            parts.journal.append("metrics", record)
            for sample in sample_records(rollout, config.log_samples, config.seed):
                parts.journal.append("samples", sample)
        parts.failures.append(rollout)
        if config.report_to:
            numbers = {key: value for key, value in record.items() if value is not None}
            parts.processes.accelerator.log(numbers, step=self._number)
        return record
