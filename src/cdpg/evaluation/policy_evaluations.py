"""Evaluates one policy again and again while it is tuned: on some contexts during training, on all at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from cdpg.evaluation.evaluator import EvaluationCache, Evaluator
from cdpg.evaluation.held_out import TUNED_ON
from cdpg.evaluation.metrics import POOLED
from cdpg.evaluation.results import BASE, TUNED, Evaluation
from cdpg.messages.progress import Progress
from cdpg.models.base import LanguageModel
from cdpg.models.modules import digest
from cdpg.system.stopping import never_stop


class PolicyEvaluations:
    """The evaluations of one policy; what has not changed since the last one is not computed again."""

    def __init__(self, evaluator: Evaluator, policy: LanguageModel, about: Mapping[str, Any]) -> None:
        self._evaluator, self._policy, self._about = evaluator, policy, about
        self._cache, self._weights = EvaluationCache(), ""
        self.seconds_per_context: float | None = None
        """Of the last evaluation during training; None before the first."""

    def after_epoch(self, epoch: int, check_stop: Callable[[], None] = never_stop) -> dict[str, Any]:
        """The line of ``evaluations.jsonl`` after an epoch, on a part of the contexts; epoch 0 is the base.

        The same on every process: callbacks may decide by it. The line of the base has
        no pooled KL. Later lines have the pooled KL of the policy and that of the base, from the same pool.
        """
        started, config = time.perf_counter(), self._evaluator.config
        limit, contexts = config.evaluation_contexts, len(self._evaluator.contexts[: config.evaluation_contexts])
        models = {TUNED: lambda: self._policy} if epoch else {}
        found = self._evaluator.evaluate(models, {}, limit, self._up_to_date(), check_stop=check_stop)
        seconds = time.perf_counter() - started
        self.seconds_per_context = seconds / contexts
        metrics: dict[str, dict[str, Any]] = {BASE: {}, TUNED: {}}
        metrics.update({} if found is None else found.metrics())
        pooled = metrics[BASE].pop(POOLED, None)
        ideal = {} if found is None else found.ideal_factors()
        record = {
            "epoch": epoch,
            "samples": epoch * config.samples_per_epoch,
            "contexts": contexts,
            TUNED_ON: self._evaluator.count_tuned_on(limit),
            "samples_per_context": config.evaluation_samples,
            "metrics": metrics[TUNED if epoch else BASE],
            **({"base": {POOLED: pooled}} if epoch else {}),
            **({"ideal": ideal} if ideal else {}),
            "seconds": seconds,
        }
        return self._evaluator.processes.from_main(record)

    def at_end(
        self, progress: Progress | None = None, check_stop: Callable[[], None] = never_stop
    ) -> Evaluation | None:
        """The base and the tuned model, as it is in memory, on all contexts; None but on the main process.

        Contexts that were evaluated after the last epoch, in whole blocks, are not evaluated again.
        """
        about = {**self._about, "of_saved_model": False}
        cache = self._up_to_date()
        return self._evaluator.evaluate({TUNED: lambda: self._policy}, about, None, cache, progress, check_stop)

    def _up_to_date(self) -> EvaluationCache:
        """The cache, without the policy's results if its weights have changed."""
        weights = digest(p for p in self._policy.module.parameters() if p.requires_grad)
        if self._evaluator.processes.any(weights != self._weights):  # the same decision on every process
            self._cache.forget(TUNED)
            self._weights = weights
        return self._cache
