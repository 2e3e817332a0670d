"""An epoch's records for ``metrics.jsonl``, ``samples.jsonl`` and ``failures.jsonl``."""

from __future__ import annotations

from math import isfinite
from typing import Any

from torch import Tensor

from cdpg.models.rng import UniformStream
from cdpg.rollout.rollout import Rollout
from cdpg.target.divergence import kl_target_policy, mean_over_covered
from cdpg.target.partition import summarize_partition
from cdpg.target.target import log_target
from cdpg.training.optimization import StepSummary


def metrics_record(rollout: Rollout, summary: StepSummary, learning_rate: float, epsilon: float) -> dict[str, Any]:
    """The epoch's line, without its times; means are over valid samples, zeros included, and None without any."""
    partition = summarize_partition(rollout.log_ratio, rollout.valid)
    kl, _ = mean_over_covered(
        kl_target_policy(log_target(rollout.log_a, rollout.b), rollout.log_q, rollout.valid, epsilon)
    )
    return {
        "epoch": rollout.number,
        "satisfaction": _mean(rollout.b[rollout.valid]),
        "coverage": partition.coverage,
        "z_mean": partition.mean,
        "z_nstd": partition.nstd,
        "z_nstd_corrected": partition.nstd_corrected,
        "ess": partition.ess,
        "kl_target_policy": kl,
        "length": _mean(rollout.lengths[rollout.valid]),
        "loss": summary.loss,
        "grad_norm": summary.grad_norm,
        "learning_rate": learning_rate,
        "steps": summary.steps,
        "steps_skipped": summary.skipped,
        "steps_nonfinite": summary.nonfinite,
        "samples": rollout.b.numel(),
        "tokens": int(rollout.lengths.sum()),
        "not_applicable": int(rollout.inapplicable.sum()),
        "checks_failed": int(rollout.failed.sum()),
        "checks_exhausted": sum(count for kind, count in rollout.checks.items() if kind.startswith("exhausted_")),
        **{f"checks_{kind}": count for kind, count in rollout.checks.items()},
        **summary.metrics,
    }


def sample_records(rollout: Rollout, count: int, seed: int) -> list[dict[str, Any]]:
    """A few of this process's samples, a new choice each epoch, with all factors of their weights."""
    samples = rollout.samples
    total = samples.lengths.numel()
    order = UniformStream(seed, "samples", rollout.number).permutation(total)[:count]
    b, log_ratio, log_a, log_z = (
        rollout.own(tensor)
        for tensor in (rollout.b, rollout.log_ratio, rollout.log_a, rollout.log_z[:, None].expand_as(rollout.b))
    )
    valid = rollout.own(rollout.valid)
    log_q = samples.log_q.flatten()
    records = []
    for row in sorted(order.tolist()):
        context, sample = divmod(row, samples.shape[1])
        satisfied = bool(b[row] > 0)
        records.append(
            {
                "epoch": rollout.number,
                "row": samples.contexts[context].row,
                "sample": sample,
                "prompt": samples.contexts[context].prompt,
                "completion": samples.texts[context][sample],
                "token_ids": samples.token_ids(context, sample),
                "b": _number(b[row]) if valid[row] else None,
                "log_q": _number(log_q[row]),
                "log_a": _number(log_a[row]) if satisfied else None,
                "log_z": _number(log_z[row]),
                "log_ratio": _number(log_ratio[row]),
                "tokens": int(samples.lengths.flatten()[row]),
                "ended": bool(samples.ended.flatten()[row]),
            }
        )
    return records


def failure_records(rollout: Rollout) -> list[dict[str, Any]]:
    """One of this process's samples for each kind of failed check."""
    samples = rollout.samples
    examples: dict[tuple[str, str], int] = {}
    for row, failure in rollout.failures.items():
        examples.setdefault((failure.constraint, failure.kind), row)
    records = []
    for row in sorted(examples.values()):
        failure = rollout.failures[row]
        context, sample = divmod(row, samples.shape[1])
        records.append(
            {
                "epoch": rollout.number,
                "row": samples.contexts[context].row,
                "sample": sample,
                "constraint": failure.constraint,
                "kind": failure.kind,
                "detail": failure.detail,
                "prompt": samples.contexts[context].prompt,
                "completion": samples.texts[context][sample],
                "token_ids": samples.token_ids(context, sample),
            }
        )
    return records


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def _number(value: Tensor) -> float | None:
    """A finite number, or nothing."""
    number = float(value)
    return number if isfinite(number) else None
