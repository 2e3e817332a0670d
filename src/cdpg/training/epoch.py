"""One epoch, step by step: sample, judge and score; take the optimiser's steps; record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cdpg.config import CDPGConfig
from cdpg.errors import RunError
from cdpg.rollout.replay import ReplayBuffer
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Stopwatch
from cdpg.system.threads import CoreWatch
from cdpg.training.nonfinite import keep_refused
from cdpg.training.optimization import StepSummary, Updater
from cdpg.training.records import metrics_record, sample_records
from cdpg.training.replay import Replay, replayed_steps
from cdpg.training.setup import Parts
from cdpg.training.state import RunState


class Epoch:
    """One epoch. If it fails before its first step, a checkpoint of the epochs before is written."""

    def __init__(
        self, number: int, parts: Parts, updater: Updater, config: CDPGConfig, rescue: Callable[[], None]
    ) -> None:
        """``rescue`` saves the epochs before."""
        self._number, self._parts, self._config = number, parts, config
        self._updater, self._rescue = updater, rescue
        self._started, self._watch = time.perf_counter(), Stopwatch()
        self.cores = CoreWatch()

    def synchronised(self, state: RunState) -> RunState:
        """The state with the weights that this epoch samples with, if they differ from the policy's. They are sent to
        an engine.
        """
        try:
            held = self._parts.proposal.synchronised(self._number - 1, state.proposal, self._config)
        except Exception:
            self._rescue()
            raise
        self._watch.lap("sampling")
        return replace(state, proposal=held)

    def sample(self, state: RunState) -> Rollout:
        """Draw contexts c and samples x ~ q(·|c), judge them, b(x,c), and score them, log a(x|c)."""
        parts, number = self._parts, self._number
        chosen = parts.stream.draw(number - 1, self._config.contexts_per_epoch)
        contexts, prompts = [parts.contexts[i] for i in chosen], [parts.prompts[i] for i in chosen]
        try:
            every_sample = parts.method.scores_every_sample
            with parts.proposal.in_use(state.proposal, number - 1):
                rollout = parts.sampler.draw(number, contexts, prompts, every_sample, self._watch, indices=chosen)
                rollout = parts.proposal.compared(rollout, self._config)
            rollout = parts.proposal.completed(rollout, state.proposal, self._config)
            if rollout.log_policy is not None:
                self._watch.lap("policy")
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

    def update(self, rollout: Rollout, state: RunState) -> tuple[StepSummary, RunState]:
        """Compute the weights and take the steps θ ← θ + α · w(x,c) · ∇log π(x|c).

        ``state`` is the run's after the epoch before; the new state is returned as well.
        """
        buffer = self._remembered(rollout, state)
        replay = self._replay(buffer) if state.may_replay else None
        summary = self._updater.update(rollout, state.method, self._rescue, replay)
        self._watch.lap("gradient")
        if summary.refused and self._parts.is_main:
            keep_refused(self._parts.folder.nonfinite, rollout, summary)
        if summary.broken:
            raise RunError(
                f"a step of epoch {self._number} left weights that are not finite: lower learning_rate or set "
                f"max_grad_norm; the batch is in {str(self._parts.folder.nonfinite)!r}, the checkpoints are those from "
                "before"
            )
        state = replace(state, method=summary.state, replay=buffer)
        return summary, self._parts.target_fit.after_epoch(rollout, state, self._config)

    def _remembered(self, rollout: Rollout, state: RunState) -> ReplayBuffer:
        """The samples for replay, with those of this epoch if they may be replayed. Without validation nothing is
        replayed. An epoch with a weight that is not finite would spoil every batch.
        """
        if not self._parts.method.replay or state.best is None or not bool(rollout.log_ratio.exp().isfinite().all()):
            return state.replay
        return state.replay.add(rollout, self._parts.processes)

    def _replay(self, buffer: ReplayBuffer) -> Replay | None:
        parts = self._parts
        if not parts.method.replay:
            return None
        steps = replayed_steps(parts.method, self._config, self._number)
        of_run = (parts.contexts, parts.prompts, self._config, parts.processes, parts.judge.tilt.coefficients)
        return Replay(buffer, steps, parts.method, *of_run)

    def validate(self, state: RunState) -> tuple[float | None, RunState]:
        """The gain on the validation contexts, if there are any, and the state with the best model so far."""
        parts = self._parts
        gains = parts.validation.gains(self._config.tokens_per_pass)
        if gains is None or state.best is None:
            return None, state
        fell = False
        if state.moments and state.moments[-1].epoch == self._number:  # gains of another target do not compare
            best = parts.validation.of_policy(self._number, gains)
        else:
            best = parts.validation.better(state.best, self._number, gains)
            fell = parts.validation.is_below(gains, state.gains)
        self._watch.lap("validation")
        return float(gains.nanmean()), replace(state, best=best, gains=tuple(gains.tolist()), fell=fell)

    def record(self, rollout: Rollout, summary: StepSummary, gain: float | None, state: RunState) -> dict[str, Any]:
        """The epoch's line of ``metrics.jsonl``, which is written, as are some samples and failed checks.

        ``gain`` is that on the validation contexts, if it was measured.
        """
        parts, config = self._parts, self._config
        record = metrics_record(rollout, summary, config.rate(self._number), config.partition_epsilon)
        if gain is not None:
            record["gain_validation"] = gain if math.isfinite(gain) else None
        record |= parts.validation.cost if self._number == 1 else {}
        record |= parts.proposal.facts(rollout, state.proposal)
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
