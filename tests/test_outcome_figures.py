"""Every figure of an evaluation against plain NumPy, on a few numbers: soft verdicts, failed checks, several blocks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cdpg import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.evaluation.measures import Measured
from cdpg.evaluation.metrics import METRICS
from cdpg.evaluation.outcome import Outcome, outputs_of, partition_estimates, statistics_of
from cdpg.evaluation.results import Evaluation, example_indices
from cdpg.evaluation.statistics import expanded_tail, interval, mean_statistic, resample
from cdpg.models.sampling import Samples
from cdpg.rollout.rollout import Rollout
from cdpg.tasks import known_metrics

Array = npt.NDArray[Any]
EPSILON = 0.05
"""Large, so that it shows where it is left out."""
CONFIG = CDPGConfig(partition_epsilon=EPSILON, seed=3, check_failures=0.5)
COUNT, SAMPLES = 5, 6
NONE, UNCOVERED = 2, 3
"""A context without any verdict, and one without a satisfying sample."""


@dataclass(frozen=True)
class Drawn:
    """Samples of a model; arrays ``[context, sample]``."""

    b: Array
    valid: Array
    failed: Array
    log_q: Array
    log_a: Array
    lengths: Array
    ended: Array

    @classmethod
    def of(cls, seed: int, is_base: bool) -> Drawn:
        random = np.random.default_rng(seed)
        shape = (COUNT, SAMPLES)
        valid = random.random(shape) < 0.8
        valid[0], valid[NONE] = True, False
        failed = ~valid & (random.random(shape) < 0.7)  # to the others no constraint applies
        b = random.choice([0.0, 0.25, 1.0], size=shape)
        b[UNCOVERED] = 0.0
        b[:2, 0], valid[:2, 0], failed[:2, 0] = 0.25, True, False
        log_a = -random.exponential(2.0, size=shape)
        log_q = log_a if is_base else -random.exponential(1.0, size=shape)
        lengths = random.integers(1, 9, size=shape)
        return cls(np.where(valid, b, 0.0), valid, failed, log_q, log_a, lengths, lengths < 6)

    @property
    def ratio(self) -> Array:
        """P/π."""
        with np.errstate(divide="ignore"):
            found: Array = np.exp(self.log_a + np.log(self.b) - self.log_q)
        return found

    def outcome(self, **changes: Any) -> Outcome:
        contexts = tuple(Context(f"prompt {row}", {}, row) for row in range(1, COUNT + 1))
        blocks = (self._block(contexts, 0, 2), self._block(contexts, 2, COUNT))
        texts = tuple(tuple(f"{c}.{s}" for s in range(SAMPLES)) for c in range(COUNT))
        parts: dict[str, Any] = {
            "beams": None, "beam_b": None, "measured": Measured(), "tokens": Counter({7: 3, 1: 9, 4: 5}),
            "shown_ids": tuple(tuple([s] for s in range(4)) for _ in range(COUNT)),
        }  # fmt: skip
        ended = torch.from_numpy(self.ended).double()
        return Outcome(contexts=contexts, blocks=blocks, texts=texts, ended=ended, **(parts | changes))

    def _block(self, contexts: tuple[Context, ...], start: int, stop: int) -> Rollout:
        count = stop - start
        lengths = torch.from_numpy(self.lengths[start:stop])
        empty = torch.zeros(count, SAMPLES, 9, dtype=torch.float64)
        samples = Samples(
            contexts[start:stop], ((0,),) * count, (("",) * SAMPLES,) * count, empty.long(), lengths, empty,
            empty[:, :, 0].bool(),
        )  # fmt: skip
        b, valid, failed, log_q, log_a = (
            torch.from_numpy(table[start:stop]) for table in (self.b, self.valid, self.failed, self.log_q, self.log_a)
        )
        return Rollout(
            number=0, b=b, valid=valid, failed=failed, log_q=log_q, log_a=log_a, lengths=lengths, samples=samples,
            token_log_a=empty,
            first_context=0,
        )  # fmt: skip


BASE, TUNED = Drawn.of(1, is_base=True), Drawn.of(2, is_base=False)


def over_contexts(values: Array, valid: Array) -> float:
    """The mean over contexts of means over valid samples."""
    return float(np.mean([row[kept].mean() for row, kept in zip(values, valid, strict=True) if kept.any()]))


def kl_target_policy(drawn: Drawn) -> float:
    """Algorithm 2: mean over covered contexts of mean_j w_j (log P/π − log Ẑ), w = P / ((Ẑ + ε) π)."""
    found = []
    for ratio, valid in zip(drawn.ratio, drawn.valid, strict=True):
        kept = ratio[valid]
        if kept.any():
            z = kept.mean()
            terms = [value / (z + EPSILON) * math.log(value / z) for value in kept if value > 0]
            found.append(sum(terms) / len(kept))
    return float(np.mean(found))


@pytest.mark.parametrize("drawn", [BASE, TUNED], ids=["base", "tuned"])
def test_figures_of_one_model(drawn: Drawn) -> None:
    kept = [ratio[valid] for ratio, valid in zip(drawn.ratio, drawn.valid, strict=True) if valid.any()]
    z = np.array([ratio.mean() for ratio in kept])
    noise = np.mean([ratio.var(ddof=1) / len(ratio) for ratio in kept])
    covered = [ratio for ratio in kept if ratio.any()]
    assert len(kept) == COUNT - 1
    assert len(covered) == COUNT - 2
    expected = {
        "satisfaction": over_contexts(drawn.b, drawn.valid),
        "kl_target_policy": kl_target_policy(drawn),
        "kl_policy_base": over_contexts(drawn.log_q - drawn.log_a, drawn.valid),
        "coverage": len(covered) / len(kept),
        "z_mean": z.mean(),
        "z_nstd": z.std() / z.mean(),
        "z_nstd_corrected": math.sqrt(max(0.0, z.var() - noise)) / z.mean(),
        "ess": np.mean([ratio.sum() ** 2 / (ratio**2).sum() / len(ratio) for ratio in covered]),
        "length": over_contexts(drawn.lengths, drawn.valid),
        "ended": over_contexts(drawn.ended, drawn.valid),
        "checks_failed": over_contexts(drawn.failed, drawn.valid | drawn.failed),
        "not_applicable": (~drawn.valid & ~drawn.failed).mean(),
    }
    found = {name: statistic.value() for name, statistic in statistics_of(drawn.outcome(), EPSILON).items()}
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_coverage_counts_soft_verdicts() -> None:
    """A context whose only verdicts above 0 are soft is covered."""
    soft = replace(BASE, b=np.minimum(BASE.b, 0.25))
    assert statistics_of(soft.outcome(), EPSILON)["coverage"].value() == pytest.approx(3 / 4)


def test_the_partition_of_each_context() -> None:
    found = partition_estimates(BASE.outcome())
    assert math.isnan(found[NONE])
    for context in set(range(COUNT)) - {NONE}:
        valid = BASE.valid[context]
        assert found[context] == pytest.approx(BASE.ratio[context][valid].mean(), rel=1e-12)


def test_the_satisfaction_of_beams_leaves_out_failed_checks() -> None:
    beam_b = (1.0, math.nan, 0.5, 0.0, math.nan)
    outcome = BASE.outcome(beams=("x",) * COUNT, beam_b=beam_b)
    assert statistics_of(outcome, EPSILON)["satisfaction_beam"].value() == 0.5


def test_outputs_are_shown_with_the_beam_first() -> None:
    remarks = {"outcome": [[f"remark {context}"] for context in range(COUNT)]}
    outcome = BASE.outcome(
        beams=tuple(f"beam {context}" for context in range(COUNT)), beam_b=(1.0, math.nan, 0.5, 0.0, 1.0),
        measured=Measured(remarks=remarks),
    )  # fmt: skip
    for context in range(COUNT):
        beam, *samples = outputs_of(outcome, context)
        known = {0: 1.0, 1: None, 2: 0.5, 3: 0.0, 4: 1.0}[context]
        assert {key: beam[key] for key in ("text", "b", "decoding", "outcome")} == {
            "text": f"beam {context}", "b": known, "decoding": "beam", "outcome": f"remark {context}",
        }  # fmt: skip
        assert [sample["text"] for sample in samples] == [f"{context}.{s}" for s in range(3)]
        expected = [BASE.b[context, s] if BASE.valid[context, s] else None for s in range(3)]
        assert [sample["b"] for sample in samples] == expected


# Several models side by side.

SCORES = np.where(BASE.b > 0, -np.random.default_rng(9).exponential(1.5, size=BASE.b.shape), 0.0)
"""The tuned model's log-probabilities of the base's satisfying samples."""


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    outcomes = {"base": BASE.outcome(), "tuned": TUNED.outcome()}
    return Evaluation.of(outcomes, {("tuned", "base"): torch.from_numpy(SCORES)}, CONFIG, {})


@pytest.fixture(scope="module")
def file(evaluation: Evaluation) -> dict[str, Any]:
    return evaluation.to_mapping({"base": "base", "tuned": "tuned"})


def pooled() -> dict[str, float]:
    """KL(p, π_k) from the pool of both models' samples: w ∝ P/q̄, q̄ the mean of both models' probabilities."""
    found: dict[str, list[float]] = {"base": [], "tuned": []}
    for context in range(COUNT):
        log_p, log_base, log_tuned, count = [], [], [], 0
        for drawn, of_tuned in ((BASE, SCORES), (TUNED, TUNED.log_q)):
            for sample in range(SAMPLES):
                count += int(drawn.valid[context, sample])
                if drawn.b[context, sample] > 0:
                    log_p.append(drawn.log_a[context, sample] + math.log(drawn.b[context, sample]))
                    log_base.append(drawn.log_a[context, sample])
                    log_tuned.append(of_tuned[context, sample])
        if not log_p:
            continue
        ratio = np.exp(log_p) / ((np.exp(log_base) + np.exp(log_tuned)) / 2)
        weight, log_z = ratio / ratio.sum(), math.log(ratio.sum() / count)
        for name, log_model in (("base", log_base), ("tuned", log_tuned)):
            found[name].append(float((weight * (np.array(log_p) - log_z - np.array(log_model))).sum()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def test_the_pooled_divergence_is_of_both_models_samples(file: dict[str, Any]) -> None:
    for name, value in pooled().items():
        assert file[name]["kl_target_policy_pooled"]["mean"] == pytest.approx(value, rel=1e-12)


def test_the_files_divergence_has_the_runs_epsilon(file: dict[str, Any]) -> None:
    for name, drawn in (("base", BASE), ("tuned", TUNED)):
        assert file[name]["kl_target_policy"]["mean"] == pytest.approx(kl_target_policy(drawn), rel=1e-12)


def ideal_lengths() -> dict[int, float]:
    """E_p[length] of each context, from the base's samples weighted by b."""
    found = {}
    for context in range(COUNT):
        weight = np.where(BASE.valid[context], BASE.b[context], 0.0)
        if weight.any():
            found[context] = float((weight * BASE.lengths[context]).sum() / weight.sum())
    return found


def test_the_ideal_model_weighs_the_bases_samples_by_b(file: dict[str, Any]) -> None:
    ideal = ideal_lengths()
    assert len(ideal) == COUNT - 2
    assert file["ideal"]["length"]["mean"] == pytest.approx(np.mean(list(ideal.values())), rel=1e-12)
    for name, drawn in (("base", BASE), ("tuned", TUNED)):
        own = [drawn.lengths[context][drawn.valid[context]].mean() for context in ideal]
        expected = np.mean(own) / np.mean(list(ideal.values()))
        assert file["versus_ideal"][name]["length"]["mean"] == pytest.approx(expected, rel=1e-12)


def test_intervals_are_those_of_the_files_seed(file: dict[str, Any]) -> None:
    """Expanded percentiles over 1,000 resamples of the contexts, each context as often as it was drawn."""
    ends = [100 * expanded_tail(COUNT), 100 * (1 - expanded_tail(COUNT))]
    assert (file["seed"], file["resamples"], file["confidence"]) == (3, 1000, 0.95)
    drawn = np.random.Generator(np.random.PCG64(3)).integers(COUNT, size=(1000, COUNT))
    for metric, table in (("satisfaction", "b"), ("length", "lengths")):
        of_context = {
            name: {c: getattr(d, table)[c][d.valid[c]].mean() for c in range(COUNT) if c != NONE}
            for name, d in (("base", BASE), ("tuned", TUNED))
        }
        means = {
            name: np.array([np.mean([values[c] for c in row if c != NONE]) for row in drawn if set(row) != {NONE}])
            for name, values in of_context.items()
        }
        change, exact = file["changes"]["tuned"][metric], {m: np.mean(list(v.values())) for m, v in of_context.items()}
        expected = {"difference": (exact["tuned"] - exact["base"], means["tuned"] - means["base"])}
        if metric == "length":
            expected["ratio"] = (exact["tuned"] / exact["base"], means["tuned"] / means["base"])
        else:
            assert file["base"][metric]["low"] == 0
            assert change["ratio"] == {"mean": None, "low": None, "high": None}, "the base may satisfy nothing"
        found = [(file[name][metric], exact[name], values) for name, values in means.items()]
        for entry, value, values in (*found, *((change[kind], *pair) for kind, pair in expected.items())):
            low, high = np.percentile(values, ends)
            assert tuple(entry.values()) == pytest.approx((value, low, high), rel=1e-12)


def test_resamples_follow_the_seed() -> None:
    values = mean_statistic(np.random.default_rng(0).normal(size=30))
    first, again, other = (interval(values, resample(30, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first.low != other.low


def test_differences_between_tuned_models_are_from_the_first() -> None:
    third = Drawn.of(5, is_base=False)
    outcomes = {"base": BASE.outcome(), "tuned": TUNED.outcome(), "other": third.outcome()}
    pairs = [(a, b) for a in ("tuned", "other") for b in outcomes if a != b]
    scores = {pair: torch.zeros(COUNT, SAMPLES, dtype=torch.float64) for pair in pairs}
    found = Evaluation.of(outcomes, scores, CONFIG, {}).to_mapping()
    assert list(found["between"]) == ["tuned"]
    assert list(found["between"]["tuned"]) == ["other"]
    expected = over_contexts(third.lengths, third.valid) - over_contexts(TUNED.lengths, TUNED.valid)
    assert found["between"]["tuned"]["other"]["length"]["difference"]["mean"] == pytest.approx(expected, rel=1e-12)


def test_notices_tell_how_many_checks_failed_and_when_they_are_too_many(file: dict[str, Any]) -> None:
    total = COUNT * SAMPLES
    expected = []
    for name, drawn in (("base", BASE), ("tuned", TUNED)):
        skipped, failed = int((~drawn.valid & ~drawn.failed).sum()), int(drawn.failed.sum())
        expected += [
            f"{name}: the check failed on {failed} of {total - skipped} samples, which are left out",
            f"{name}: no constraint applies to {skipped} of {total} samples, which are left out",
        ]
    change = file["changes"]["tuned"]["kl_target_policy_pooled"]["difference"]
    before, after = (file[name]["kl_target_policy_pooled"]["mean"] for name in ("base", "tuned"))
    assert change["mean"] > 0
    assert file["notices"] == [
        f"tuned: no nearer to the ideal model than the base: pooled KL(p, π) {before:.2f} → {after:.2f} nats, "
        f"{change['mean']:+.2f} [{change['low']:+.2f}, {change['high']:+.2f}]",
        *expected,
    ]
    strict = Evaluation.of({"base": BASE.outcome()}, {}, CONFIG.replace(check_failures=0.1), {})
    notice = strict.to_mapping({"base": "base"})["notices"][0]
    assert notice.endswith("which are left out: too many for the figures to be relied upon")


def test_the_file_says_how_it_was_made(file: dict[str, Any]) -> None:
    expected = {
        "decoding": "ancestral", "contexts": COUNT, "samples_per_context": SAMPLES, "resamples": 1000,
        "confidence": 0.95, "seed": CONFIG.seed,
    }  # fmt: skip
    assert {key: file[key] for key in expected} == expected
    beams = BASE.outcome(beams=("x",) * COUNT, beam_b=(1.0,) * COUNT)
    assert Evaluation.of({"base": beams}, {}, CONFIG, {}).to_mapping({"base": "base"})["decoding"] == "beam"
    assert np.array_equal(file["partition"], partition_estimates(BASE.outcome()), equal_nan=True)


def test_without_names_of_their_own_the_models_stand_together(evaluation: Evaluation, file: dict[str, Any]) -> None:
    found = evaluation.to_mapping()
    assert found["models"] == {name: file[name] for name in ("base", "tuned")}
    assert "base" not in found


def test_changes_are_of_what_the_models_may_differ_in(file: dict[str, Any]) -> None:
    of_base = {name for name, metric in METRICS.items() if metric.of_base}
    assert {"z_mean", "z_nstd"} <= of_base & file["tuned"].keys()
    assert file["changes"]["tuned"].keys() == file["tuned"].keys() - of_base
    feature = replace(TUNED.outcome(), measured=Measured(features={"own": np.ones((COUNT, SAMPLES))}))
    scores = {("tuned", "base"): torch.from_numpy(SCORES)}
    both = Evaluation.of({"base": BASE.outcome(measured=feature.measured), "tuned": feature}, scores, CONFIG, {})
    assert "own" in both.to_mapping({"base": "base", "tuned": "tuned"})["changes"]["tuned"], "also a task's own metrics"
    alone = Evaluation.of({"base": BASE.outcome(), "tuned": feature}, scores, CONFIG, {})
    assert "own" not in alone.to_mapping({"base": "base", "tuned": "tuned"})["changes"]["tuned"], "one has it alone"


def test_contexts_to_which_a_constraint_applies_are_counted() -> None:
    """Where it applies to some sample of some model; what did not occur is left out of the figures."""
    scores = torch.zeros(COUNT, SAMPLES, dtype=torch.float64)
    everywhere = np.ones_like(BASE.valid)
    but_one = everywhere & (np.arange(COUNT) != 1)[:, None]
    for valid, applied in ((everywhere, COUNT), (but_one, COUNT - 1)):
        outcome = replace(BASE, valid=valid, failed=np.zeros_like(BASE.failed)).outcome()
        found = Evaluation.of({"base": outcome}, {}, CONFIG, {}).to_mapping({"base": "base"})
        assert found["contexts_applied"] == applied
        pair = Evaluation.of({"base": outcome, "tuned": outcome}, {("tuned", "base"): scores}, CONFIG, {})
        assert pair.to_mapping()["contexts_applied"] == applied
        assert ("checks_failed" in found["base"], "not_applicable" in found["base"]) == (False, applied < COUNT)


def test_a_model_that_came_nearer_gets_no_such_notice() -> None:
    """The tuned model is the base, but for more probability of what satisfies."""
    nearer = replace(BASE, log_q=BASE.log_q + np.where(BASE.b > 0, 0.1, -0.1))
    outcomes = {"base": BASE.outcome(), "tuned": nearer.outcome()}
    scores = torch.from_numpy(np.where(BASE.b > 0, BASE.log_a + 0.1, 0.0))
    found = Evaluation.of(outcomes, {("tuned", "base"): scores}, CONFIG, {}).to_mapping(
        {"base": "base", "tuned": "tuned"}
    )
    assert found["changes"]["tuned"]["kl_target_policy_pooled"]["difference"]["mean"] < 0
    assert not any("no nearer" in notice for notice in found["notices"])


def test_measuring_that_failed_is_reported_with_its_kinds() -> None:
    outcome = BASE.outcome(unmeasured=Counter({"timeout": 1200, "memory": 3}))
    notices = Evaluation.of({"base": outcome}, {}, CONFIG, {}).to_mapping({"base": "base"})["notices"]
    assert notices[-1] == (
        "base: measuring the outputs failed 1,203 times (timeout 1,200, memory 3), and these measurements are left out"
    )


def test_an_example_shows_its_context_and_every_models_outputs() -> None:
    columns = {"reference": "r", "count": 2, "share": 0.5, "names": ["no", "plain", "value"]}
    outcome = BASE.outcome()
    outcome = replace(outcome, contexts=tuple(Context("the prompt", columns, row) for row in range(1, COUNT + 1)))
    counters = {"kinds": Counter({"b": 1, "a": 2})}
    outcome = replace(outcome, measured=Measured(frequencies=counters))
    found = Evaluation.of({"base": outcome}, {}, CONFIG, {}).to_mapping({"base": "base"})
    first = found["examples"][0]
    assert (first["row"], first["prompt"]) == (1, "the prompt")
    assert first["columns"] == {"reference": "r", "count": 2, "share": 0.5}
    assert list(first["outputs"]) == ["base"]
    assert list(found["frequencies"]["base"]["kinds"].items()) == [("a", 2), ("b", 1)]


def test_tokens_are_counted_the_most_frequent_first(file: dict[str, Any]) -> None:
    assert file["frequencies"]["base"]["token_rank"] == [9, 5, 3]


def test_examples_are_spread_over_the_contexts(evaluation: Evaluation) -> None:
    assert [example["row"] for example in evaluation.to_mapping({"base": "base"})["examples"]] == [1, 2, 3, 4, 5]
    assert example_indices(100) == [0, 12, 25, 37, 50, 62, 75, 87]


def test_which_way_is_better() -> None:
    """As the paper reads them: what is asked for and kept should rise, distances from the ideal and violations fall.

    KL(π, a) is a price, and Z a quantity of the base.
    """
    higher = (
        "satisfaction satisfaction_beam gain recall coverage ess distinct_2 bleu bleu_masked precision_source "
        "recall_target entities rouge_l compilability valid_json fields_right fields_right_valid"
    )
    lower = "kl_target_policy kl_target_policy_pooled checks_failed pep8_violations"
    known = known_metrics({})
    expected = dict.fromkeys(known) | dict.fromkeys(higher.split(), "higher") | dict.fromkeys(lower.split(), "lower")
    assert {name: metric.better for name, metric in known.items()} == expected
