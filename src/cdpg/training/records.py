"""An epoch's records for ``metrics.jsonl``, ``samples.jsonl`` and ``failures.jsonl``."""

from __future__ import annotations

from math import isfinite
from typing import Any

from torch import Tensor

from cdpg.models.rng import UniformStream
from cdpg.rollout.rollout import Rollout
from cdpg.target.divergence import kl_target_policy, mean_over_covered
from cdpg.target.partition import summarize_partition
from cdpg.training.optimization import StepSummary


def metrics_record(rollout: Rollout, summary: StepSummary, learning_rate: float, epsilon: float) -> dict[str, Any]:
    """The epoch's line, without its times; means are over valid samples, zeros included, and None without any.

    A pruned sample has b = 0 and no length of its own.
    """
    partition = summarize_partition(rollout.log_ratio, rollout.valid)
    log_policy = rollout.log_q if rollout.log_policy is None else rollout.log_policy
    kl_by_context = kl_target_policy(rollout.log_p, log_policy, rollout.valid, rollout.epsilon(epsilon), rollout.log_q)
    kl, _ = mean_over_covered(kl_by_context)
    return {
        "epoch": rollout.number,
        "satisfaction": _mean(rollout.b[rollout.valid]),
        "coverage": partition.coverage,
        "z_mean": partition.mean,
        "z_nstd": partition.nstd,
        "z_nstd_corrected": partition.nstd_corrected,
        "ess": partition.ess,
        "kl_target_policy": kl,
        "length": _mean(rollout.lengths[rollout.valid & ~rollout.pruned]),
        "loss": summary.loss,
        "grad_norm": summary.grad_norm,
        "learning_rate": learning_rate,
        "steps": summary.steps,
        "steps_skipped": summary.skipped,
        "steps_nonfinite": summary.nonfinite,
        "steps_replayed": summary.replayed,
        **({"steps_replayed_nonfinite": summary.replayed_nonfinite} if summary.replayed_nonfinite else {}),
        "samples": rollout.b.numel(),
        "pruned": float(rollout.pruned.double().mean()),
        "tokens": int(rollout.lengths.sum()),
        "not_applicable": int(rollout.inapplicable.sum()),
        "checks_failed": int(rollout.failed.sum()),
        "checks_exhausted": sum(count for kind, count in rollout.checks.items() if kind.startswith("exhausted_")),
        **{f"checks_{kind}": count for kind, count in rollout.checks.items()},
        **factor_means(rollout),
        **summary.metrics,
    }


def factor_means(rollout: Rollout) -> dict[str, float | None]:
    """The means of the target's moments and rewards over the valid samples that were drawn to their end, by name."""
    counted = rollout.valid & ~rollout.pruned
    means = {name: values[counted] for name, values in rollout.by_factor().items()}
    return {name: _mean(values[~values.isnan()]) for name, values in means.items()}


def sample_records(rollout: Rollout, count: int, seed: int) -> list[dict[str, Any]]:
    """A few of this process's samples, a new choice each epoch, with all factors of their weights; pruned ones, which
    have no end, are left out."""
    samples = rollout.samples
    total = samples.lengths.numel()
    pruned = samples.pruned.expand(samples.shape).flatten().tolist()
    order = UniformStream(seed, "samples", rollout.number).permutation(total)
    chosen = [row for row in order.tolist() if not pruned[row]][:count]
    valid, lengths, ended = rollout.own(rollout.valid), samples.lengths.flatten(), samples.ended.flatten()
    records = []
    for row in sorted(chosen):
        numbers = {name: _number(value) for name, value in numbers_of_sample(rollout, row).items()}
        satisfied = bool(numbers["b"])
        records.append(
            {
                "epoch": rollout.number,
                **describe_sample(rollout, row),
                **numbers,
                "b": numbers["b"] if valid[row] else None,
                "log_a": numbers["log_a"] if satisfied else None,
                "tokens": int(lengths[row]),
                "ended": bool(ended[row]),
            }
        )
    return records


def failure_records(rollout: Rollout) -> list[dict[str, Any]]:
    """One of this process's samples for each kind of failed check."""
    examples: dict[tuple[str, str], int] = {}
    for row, failure in rollout.failures.items():
        examples.setdefault((failure.constraint, failure.kind), row)
    records = []
    for row in sorted(examples.values()):
        failure = rollout.failures[row]
        cause = {"constraint": failure.constraint, "kind": failure.kind, "detail": failure.detail}
        records.append({"epoch": rollout.number, **describe_sample(rollout, row), **cause})
    return records


def describe_sample(rollout: Rollout, row: int) -> dict[str, Any]:
    """Which of this process's samples it is, and its text."""
    samples = rollout.samples
    context, sample = divmod(row, samples.shape[1])
    return {
        "row": samples.contexts[context].row,
        "sample": sample,
        "prompt": samples.contexts[context].prompt,
        "completion": samples.texts[context][sample],
        "token_ids": samples.token_ids(context, sample),
    }


def numbers_of_sample(rollout: Rollout, row: int) -> dict[str, float]:
    """All factors of the weight of one of this process's samples; some may be infinite or NaN."""
    tensors = {
        "b": rollout.b,
        **rollout.by_factor(),
        "log_q": rollout.log_q,
        "log_a": rollout.log_a,
        "log_z": rollout.log_z[:, None].expand_as(rollout.b),
        "log_ratio": rollout.log_ratio,
    }
    return {name: float(rollout.own(tensor)[row]) for name, tensor in tensors.items()}


def _mean(values: Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def _number(value: float) -> float | None:
    """A finite number, or nothing."""
    return value if isfinite(value) else None
