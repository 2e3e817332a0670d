"""Every figure of an epoch's line and of its logged samples, against plain NumPy on a few numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from cdpg.constraints.judge import CheckFailure
from cdpg.contexts.contexts import Context
from cdpg.errors import RunError, UserError
from cdpg.models.sampling import Samples
from cdpg.rollout.rollout import Rollout
from cdpg.storage.jsonl import JsonlFile, read_jsonl
from cdpg.system.distributed import Processes
from cdpg.training.failures import FailureLog
from cdpg.training.optimization import StepSummary
from cdpg.training.records import failure_records, metrics_record, sample_records

CONTEXTS, SAMPLES, TOKENS = 4, 5, 3
EPSILON = 0.05
"""Large, so that it shows where it is left out."""
B = np.array([[1, 0.5, 0, 1, 0], [0, 0, 0, 0, 0], [0.25, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
VALID = np.array([[1, 1, 1, 0, 1], [1, 1, 0, 1, 1], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=bool)
"""The second context has no satisfying sample, the last one no verdict at all."""
FAILED = ~VALID
FAILED[2, 1] = False  # there no constraint applies
RANDOM = np.random.default_rng(3)
LENGTHS = RANDOM.integers(1, TOKENS + 1, size=(CONTEXTS, SAMPLES))
KEPT = np.arange(TOKENS) < LENGTHS[:, :, None]
TOKEN_LOG_Q = np.where(KEPT, -RANDOM.exponential(0.7, size=(CONTEXTS, SAMPLES, TOKENS)), 0.0)
LOG_Q = TOKEN_LOG_Q.sum(axis=2)
JUDGED = np.where(VALID, B, 0.0)
LOG_A = np.where(JUDGED > 0, -RANDOM.exponential(1.5, size=(CONTEXTS, SAMPLES)), 0.0)
"""0 where the base was not asked."""
FAILURES = {
    3: CheckFailure("m:one", "timeout", "no answer"),
    7: CheckFailure("m:two", "timeout", "no answer"),
    **{row: CheckFailure("m:one", "timeout" if row % 2 else "died", "no answer") for row in range(15, 20)},
}


def make_epoch(number: int = 7) -> Rollout:
    contexts = tuple(Context(f"prompt {row}", {}, 10 * row) for row in range(1, CONTEXTS + 1))
    samples = Samples(
        contexts=contexts,
        prompts=((0,),) * CONTEXTS,
        texts=tuple(tuple(f"text {c} {s}" for s in range(SAMPLES)) for c in range(CONTEXTS)),
        tokens=torch.from_numpy(np.where(KEPT, 5, 0)),
        lengths=torch.from_numpy(LENGTHS),
        token_log_q=torch.from_numpy(TOKEN_LOG_Q),
        ended=torch.from_numpy(LENGTHS < TOKENS),
    )
    return Rollout(
        number=number, b=torch.from_numpy(JUDGED), valid=torch.from_numpy(VALID),
        failed=torch.from_numpy(FAILED), log_q=torch.from_numpy(LOG_Q),
        log_a=torch.from_numpy(LOG_A), lengths=torch.from_numpy(LENGTHS), samples=samples,
        token_log_a=torch.zeros(CONTEXTS, SAMPLES, TOKENS, dtype=torch.float64), first_context=0,
        failures=FAILURES,
        checks={"failed_timeout": 5, "failed_died": 2, "exhausted_memory": 3, "exhausted_size": 1},
    )  # fmt: skip


def pruned_epoch() -> Rollout:
    """The same with two samples that were ended early, one of which has a verdict in each of two contexts."""
    epoch, pruned = make_epoch(), torch.zeros(CONTEXTS, SAMPLES, dtype=torch.bool)
    pruned[0, 2] = pruned[1, 3] = True
    return replace(epoch, pruned=pruned, samples=replace(epoch.samples, pruned=pruned))


def ratios() -> list[np.ndarray]:
    """P/q of the valid samples of every context that has some."""
    with np.errstate(divide="ignore"):
        ratio = np.exp(LOG_A + np.log(JUDGED) - LOG_Q)
    return [row[valid] for row, valid in zip(ratio, VALID, strict=True) if valid.any()]


def kl_target_policy(ratio: np.ndarray) -> float | None:
    """Algorithm 2 on one context: mean_j w_j (log P/π − log Ẑ), w = P / ((Ẑ + ε) π); none without a sample."""
    z = ratio.mean()
    terms = [value / (z + EPSILON) * (math.log(value) - math.log(z)) for value in ratio if value > 0]
    return sum(terms) / len(ratio) if terms else None


def test_an_epochs_line() -> None:
    summary = StepSummary(
        loss=1.5, grad_norm=0.25, steps=3, skipped=2, replayed=4, refused=(SimpleNamespace(replayed=False),)
    )  # type: ignore[arg-type]
    found = metrics_record(make_epoch(), summary, 0.125, EPSILON)
    z = np.array([ratio.mean() for ratio in ratios()])
    noise = np.mean([ratio.var(ddof=1) / len(ratio) for ratio in ratios()])
    covered = [ratio for ratio in ratios() if ratio.any()]
    divergences = [kl for kl in map(kl_target_policy, ratios()) if kl is not None]
    assert len(divergences) == 2
    expected = {
        "epoch": 7,
        "satisfaction": B[VALID].mean(),
        "coverage": 2 / 3,
        "z_mean": z.mean(),
        "z_nstd": z.std() / z.mean(),
        "z_nstd_corrected": math.sqrt(max(0.0, z.var() - noise)) / z.mean(),
        "ess": np.mean([ratio.sum() ** 2 / (ratio**2).sum() / len(ratio) for ratio in covered]),
        "kl_target_policy": np.mean(divergences),
        "length": LENGTHS[VALID].mean(),
        "loss": 1.5,
        "grad_norm": 0.25,
        "learning_rate": 0.125,
        "steps": 3,
        "steps_skipped": 2,
        "steps_nonfinite": 1,
        "steps_replayed": 4,
        "samples": CONTEXTS * SAMPLES,
        "pruned": 0.0,
        "tokens": LENGTHS.sum(),
        "checks_failed": 7,
        "not_applicable": 1,
        "checks_exhausted": 4,
        "checks_failed_timeout": 5,
        "checks_failed_died": 2,
        "checks_exhausted_memory": 3,
        "checks_exhausted_size": 1,
    }
    assert found == pytest.approx(expected, rel=1e-12)


def test_samples_that_were_ended_early_have_a_verdict_and_no_length() -> None:
    summary = StepSummary(loss=1.5, grad_norm=0.25, steps=3, skipped=2)
    whole, found = (metrics_record(epoch, summary, 0.125, EPSILON) for epoch in (make_epoch(), pruned_epoch()))
    kept = VALID.copy()
    kept[0, 2] = kept[1, 3] = False
    assert found == {**whole, "pruned": 0.1, "length": pytest.approx(LENGTHS[kept].mean(), rel=1e-12)}
    assert found["length"] != whole["length"]


def test_samples_that_were_ended_early_are_not_logged() -> None:
    logged = sample_records(pruned_epoch(), CONTEXTS * SAMPLES, seed=0)
    assert len(logged) == CONTEXTS * SAMPLES - 2
    assert not {(10, 2), (20, 3)} & {(record["row"], record["sample"]) for record in logged}
    whole = [(r["row"], r["sample"]) for r in sample_records(make_epoch(), CONTEXTS * SAMPLES, seed=0)]
    assert [(r["row"], r["sample"]) for r in logged] == [place for place in whole if place not in {(10, 2), (20, 3)}]
    assert len(sample_records(pruned_epoch(), 5, seed=0)) == 5


def test_logged_samples_hold_what_their_weights_are_made_of() -> None:
    records = sample_records(make_epoch(), CONTEXTS * SAMPLES, seed=0)
    assert len(records) == CONTEXTS * SAMPLES
    z = {context: row[VALID[context]] for context, row in enumerate(_ratio_table())}
    for row, record in enumerate(records):
        context, sample = divmod(row, SAMPLES)
        b, judged = JUDGED[context, sample], VALID[context, sample]
        mean = z[context].mean() if len(z[context]) else 0.0
        expected: dict[str, Any] = {
            "epoch": 7,
            "row": 10 * (context + 1),
            "sample": sample,
            "prompt": f"prompt {context + 1}",
            "completion": f"text {context} {sample}",
            "b": b if judged else None,
            "log_q": LOG_Q[context, sample],
            "log_a": LOG_A[context, sample] if b > 0 else None,
            "log_z": math.log(mean) if mean else None,
            "log_ratio": LOG_A[context, sample] + math.log(b) - LOG_Q[context, sample] if b > 0 else None,
            "tokens": LENGTHS[context, sample],
            "ended": LENGTHS[context, sample] < TOKENS,
            "token_ids": [5] * LENGTHS[context, sample],
        }
        assert set(record) == set(expected)
        for key, value in expected.items():
            assert record[key] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), (row, key)


def _ratio_table() -> np.ndarray:
    with np.errstate(divide="ignore"):
        found: np.ndarray = np.exp(LOG_A + np.log(JUDGED) - LOG_Q)
    return found


def test_samples_are_chosen_anew_each_epoch() -> None:
    chosen = {
        number: [(record["row"], record["sample"]) for record in sample_records(make_epoch(number), 6, seed=0)]
        for number in range(1, 9)
    }
    assert all(len(set(places)) == 6 for places in chosen.values())
    assert len({tuple(places) for places in chosen.values()}) > 6


def test_every_way_in_which_a_check_failed_has_an_example() -> None:
    """The first of each constraint and kind, with the sample that it failed on."""
    found = failure_records(make_epoch())
    assert [(r["constraint"], r["kind"], r["row"], r["sample"], r["prompt"], r["completion"]) for r in found] == [
        ("m:one", "timeout", 10, 3, "prompt 1", "text 0 3"),
        ("m:two", "timeout", 20, 2, "prompt 2", "text 1 2"),
        ("m:one", "died", 40, 1, "prompt 4", "text 3 1"),
    ]
    assert {(record["epoch"], record["detail"]) for record in found} == {(7, "no answer")}


# Failed checks of a run.


def log(folder: Path, share: float = 0.05) -> FailureLog:
    return FailureLog(folder / "failures.jsonl", share, Processes(Accelerator(cpu=True)))


def test_examples_go_to_their_file(tmp_path: Path) -> None:
    log(tmp_path).append(make_epoch())
    written = list(read_jsonl(tmp_path / "failures.jsonl"))
    assert written == json.loads(json.dumps(failure_records(make_epoch())))


def epoch(failed: int) -> Any:
    """One of 200 samples."""
    lost = torch.arange(200)[None, :] < failed
    none = torch.zeros_like(lost)
    checks = {"failed_died": failed}
    return SimpleNamespace(number=1, valid=~lost, failed=lost, inapplicable=none, checks=checks, failures={})


def test_good_epochs_do_not_make_up_for_a_bad_one(tmp_path: Path) -> None:
    found = log(tmp_path)
    assert [found.too_many(epoch(failed)) for failed in (0, 10, 0, 0, 10)] == [None] * 5
    assert "11 of 200 samples" in str(found.too_many(epoch(11)))


def test_a_run_in_which_every_check_fails_ends_whatever_is_allowed(tmp_path: Path) -> None:
    allowed = log(tmp_path, share=1.0)
    assert allowed.too_many(epoch(199)) is None
    assert "the check of every sample of epoch 1 failed (died 200)" in str(allowed.too_many(epoch(200)))


WORKERS = "if it needs a GPU or what only the training process has, set check_workers: 0"


@pytest.mark.parametrize(
    ("kind", "detail", "cure"),
    [
        ("timeout", "no answer after 5 s", "make it quicker or raise check_seconds"),
        ("value", "returned 3 values for 2 samples", "fix the constraint"),
        ("exception", "ValueError: about nothing", "fix the constraint"),
        ("memory", "MemoryError", "let it take less memory or raise check_memory"),
        ("died", "the worker was ended by SIGKILL", f"fix the constraint, or {WORKERS}"),
        ("exception", "ModuleNotFoundError: No module named 'x'", f"fix the constraint, or {WORKERS}"),
        (
            "exception",
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess",
            f"fix the constraint, or {WORKERS}",
        ),
    ],
)
def test_the_end_of_a_run_without_verdicts_says_what_to_do(tmp_path: Path, kind: str, detail: str, cure: str) -> None:
    lost = torch.ones(1, 8, dtype=torch.bool)
    given = SimpleNamespace(
        number=1, valid=~lost, failed=lost, inapplicable=~lost, checks={f"failed_{kind}": 8},
        failures={(0, 0): CheckFailure("m:f", kind, detail)},
    )  # fmt: skip
    problem = log(tmp_path).problem(given)  # type: ignore[arg-type]
    assert isinstance(problem, RunError)
    expected = f"; examples are in {str(tmp_path / 'failures.jsonl')!r}: {cure}, and continue with "
    assert expected in str(problem)


def test_nothing_applying_ends_a_run_in_its_first_epoch_alone(tmp_path: Path) -> None:
    def nothing(number: int) -> Any:
        return SimpleNamespace(
            number=number, failed=torch.zeros(2, 8, dtype=torch.bool), checks={}, failures={},
            inapplicable=torch.ones(2, 8, dtype=torch.bool),
        )  # fmt: skip

    problem = log(tmp_path).problem(nothing(1))
    assert isinstance(problem, UserError)
    assert str(problem).startswith("no constraint applies to any of the 16 samples of epoch 1: each returned None")
    assert log(tmp_path).problem(nothing(2)) is None, "also the first epoch of a run that is continued"


def test_a_later_epoch_to_which_nothing_applies_is_reported_once_and_counted_at_the_end(
    tmp_path: Path, notices: list[str]
) -> None:
    failures, metrics = log(tmp_path), JsonlFile(tmp_path / "metrics.jsonl")
    for number, count in enumerate((0, 8, 16, 16), start=1):
        record = {"epoch": number, "samples": 16, "not_applicable": count, "checks_failed": 0}
        metrics.append(record)
        failures.log(record)
    failures.log_total(metrics.path)
    assert notices == [
        "epoch 2: no constraint applies to 8 samples, which were left out",
        "epoch 3: no constraint applies to any of its 16 samples, so nothing is learnt from it; the run continues: "
        "raise contexts_per_epoch, or leave out contexts to which none applies",
        "in all, no constraint applies to 40 samples, among them all of 2 epochs, which were left out",
    ]


def test_each_kind_of_failure_is_noticed_once(tmp_path: Path, notices: list[str]) -> None:
    failures = log(tmp_path)
    died = {"epoch": 1, "checks_failed": 2, "checks_failed_died": 2}
    late = {"epoch": 3, "checks_failed": 3, "checks_failed_died": 1, "checks_failed_timeout": 2}
    for record in ({"epoch": 0, "checks_failed": 0}, died, {**died, "epoch": 2}, late, late):
        failures.log(record)
    assert notices == [
        "epoch 1: 2 checks failed (died 2) and their samples were left out",
        "epoch 3: 3 checks failed (died 1, timeout 2) and their samples were left out",
    ]


def test_totals_are_over_the_whole_run(tmp_path: Path, notices: list[str]) -> None:
    metrics = JsonlFile(tmp_path / "metrics.jsonl")
    metrics.append({"epoch": 1, "checks_failed": 2, "checks_failed_died": 2, "checks_exhausted": 0})
    metrics.append({"epoch": 2, "checks_failed": 3, "checks_failed_died": 3, "checks_exhausted": 1})
    metrics.append({"epoch": 3, "checks_failed": 0, "checks_exhausted": 0})
    log(tmp_path).log_total(metrics.path)
    assert len(notices) == 1
    assert notices[0].startswith("in all, 5 checks failed (died 5) and their samples were left out; 1 texts exhausted")
