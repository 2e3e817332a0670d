"""Every figure of an evaluation against plain NumPy, on samples with a soft b, failed checks and uneven contexts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.evaluation.measures import Measured
from cdpg.evaluation.outcome import (
    Outcome,
    ideal_means,
    model_means,
    outputs_of,
    partition_estimates,
    partition_statistics,
    statistics_of,
    token_ranks,
    without_token_scores,
)
from cdpg.evaluation.results import Evaluation
from cdpg.evaluation.statistics import Array
from cdpg.rollout.rollout import Rollout
from cdpg.target.divergence import pool_weights
from cdpg.target.partition import summarize_partition
from uneven import PROMPTS, VALID, B, M, N, completions, scored, table, uneven_epoch

EPSILON = 0.03
JUDGED = VALID.any(axis=1)
LENGTHS = np.array([[len(x) for x in row] for row in completions()], dtype=np.float64)
ENDED = np.array([[float(x[-1] == 0) for x in row] for row in completions()])
FEATURE = np.random.default_rng(5).normal(size=(N, M))
FEATURE[0, 0] = math.nan


def make_outcome(beams: bool = False) -> Outcome:
    """A tuned model (table 1) on samples of its own, scored by the base (table 2), in two blocks."""
    whole = uneven_epoch(table(1), table(2))
    blocks = tuple(_block(share) for share in (range(2), range(2, N)))
    return Outcome(
        contexts=tuple(Context(prompt=prompt, columns={}, row=i + 1) for i, prompt in enumerate(PROMPTS)),
        blocks=blocks,
        texts=tuple(tuple(f"{c}{s}" for s in range(M)) for c in range(N)),
        beams=tuple(f"beam {c}" for c in range(N)) if beams else None,
        beam_b=(1.0, 0.5, math.nan, 0.0, 1.0) if beams else None,
        shown_ids=tuple(([c], [c, 1], [c, 2]) for c in range(N)),
        measured=Measured(
            features={"feature": FEATURE[:, :1] if beams else FEATURE},
            remarks={"remark": [[f"on {c}"] if beams else [f"on {c}{s}" for s in range(M)] for c in range(N)]},
        ),
        tokens=Counter({7: 2, 3: 9, 5: 4}),
        ended=whole.samples.ended.double(),
    )


def _block(share: range) -> Rollout:
    """The record of some contexts, which knows of no others."""
    own = slice(share.start, share.stop)
    block = uneven_epoch(table(1), table(2), share=share)
    block.failed[3, 0] = False  # no constraint applies to this one
    names = ("b", "valid", "failed", "log_q", "log_a", "lengths")
    return replace(block, first_context=0, **{name: getattr(block, name)[own] for name in names})


def mean_of_means(values: Array) -> float:
    """Over contexts with a valid sample, of the means over their valid samples."""
    return float(np.mean([values[c][VALID[c]].mean() for c in range(N) if JUDGED[c]]))


def test_every_statistic_by_value() -> None:
    drawn = completions()
    log_pi, log_a = scored(table(1), drawn).sum(axis=2), scored(table(2), drawn).sum(axis=2)
    ratio = [(np.exp(log_a[c] - log_pi[c]) * B[c])[VALID[c]] for c in range(N) if JUDGED[c]]
    z = np.array([found.mean() for found in ratio])
    kl = []
    for found, mean in zip(ratio, z, strict=True):
        if mean > 0:
            kl.append(sum(x / (mean + EPSILON) * np.log(x / mean) for x in found if x > 0) / len(found))
    noise = np.mean([found.var(ddof=1) / len(found) for found in ratio])
    feature = [np.nanmean(np.where(VALID[c], FEATURE[c], np.nan)) for c in range(N) if JUDGED[c]]
    expected = {
        "satisfaction": mean_of_means(B),
        "kl_target_policy": np.mean(kl),
        "kl_policy_base": mean_of_means(log_pi - log_a),
        "coverage": 3 / 4,
        "z_mean": z.mean(),
        "z_nstd": z.std() / z.mean(),
        "z_nstd_corrected": math.sqrt(max(0.0, z.var() - noise)) / z.mean(),
        "ess": np.mean([found.sum() ** 2 / (found**2).sum() / len(found) for found in ratio if found.any()]),
        "length": mean_of_means(LENGTHS),
        "ended": mean_of_means(ENDED),
        "checks_failed": (1 / 4 + 0 + 1 / 4 + 3 / 3 + 1 / 4) / 5,
        "not_applicable": 1 / 20,
        "feature": np.mean(feature),
    }
    found = {name: statistic.value() for name, statistic in statistics_of(make_outcome(), EPSILON).items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-10), name


def test_the_noise_of_the_partition_is_subtracted() -> None:
    """s²/M of each context's valid samples, with M − 1 inside; here the spread over contexts is larger."""
    ratio = np.array([[0.1, 0.14, 0.12, 9.0], [0.5, 0.6, 0.4, 0.55], [0.9, 0.8, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    valid = ratio < 9
    kept = [row[known] for row, known in zip(ratio, valid, strict=True) if known.any()]
    z = np.array([row.mean() for row in kept])
    noise = np.mean([row.var(ddof=1) / len(row) for row in kept])
    found = partition_statistics(np.where(valid, ratio, 0.0), valid)
    assert found["z_mean"].value() == pytest.approx(z.mean(), rel=1e-12)
    assert found["z_nstd"].value() == pytest.approx(z.std() / z.mean(), rel=1e-12)
    assert found["z_nstd_corrected"].value() == pytest.approx(math.sqrt(z.var() - noise) / z.mean(), rel=1e-12)
    summary = summarize_partition(torch.from_numpy(ratio).log(), torch.from_numpy(valid))
    assert summary.nstd_corrected == pytest.approx(math.sqrt(z.var() - noise) / z.mean(), rel=1e-10)


def test_few_and_small_ratios() -> None:
    """One sample has no noise that is known; the effective size is a share of the samples with a verdict."""
    ratio = np.array([[0.02, 0.0, 0.0], [0.1, 0.3, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    valid = np.array([[True, False, False], [True, True, False], [True, True, True], [False, False, False]])
    found = partition_statistics(ratio, valid)
    z = np.array([0.02, 0.2, 0.0])
    assert found["z_mean"].value() == pytest.approx(z.mean(), rel=1e-12)
    noise = (0.02 / 2 + 0.0) / 2  # s² = 0.02 of two samples; three zeros have none
    assert found["z_nstd_corrected"].value() == pytest.approx(math.sqrt(max(0, z.var() - noise)) / z.mean(), rel=1e-12)
    assert found["ess"].value() == pytest.approx((1.0 + 0.4**2 / 0.1 / 2) / 2, rel=1e-12)


def test_beams_have_figures_of_their_own() -> None:
    found = statistics_of(make_outcome(beams=True), EPSILON)
    assert found["satisfaction_beam"].value() == (1.0 + 0.5 + 0.0 + 1.0) / 4
    assert found["feature"].value() == pytest.approx(np.nanmean(FEATURE[:, 0])), "also where a sample's check failed"


def test_without_failed_checks_their_share_is_0() -> None:
    outcome = make_outcome()
    for block in outcome.blocks:
        block.valid.fill_(True)
        block.failed.fill_(False)
    found = statistics_of(outcome, EPSILON)
    assert (found["checks_failed"].value(), found["not_applicable"].value()) == (0.0, 0.0)


def test_a_resample_of_contexts_is_a_weighted_mean() -> None:
    """Contexts without a verdict add nothing to any sum, however often they are drawn."""
    drawn = np.array([[2.0, 0.0, 1.0, 5.0, 0.0]])
    found = statistics_of(make_outcome(), EPSILON)
    assert found["satisfaction"].on(drawn)[0] == pytest.approx((2 * 0.5 + 0.0) / 3)
    drawn_z = found["z_mean"].on(drawn)[0]
    log_pi, log_a = (scored(table(i), completions()).sum(axis=2) for i in (1, 2))
    first = (np.exp(log_a[0] - log_pi[0]) * B[0])[VALID[0]].mean()
    assert drawn_z == pytest.approx(2 * first / 3)


def test_the_partition_of_each_context() -> None:
    log_pi, log_a = (scored(table(i), completions()).sum(axis=2) for i in (1, 2))
    found = partition_estimates(make_outcome())
    for c in range(N):
        if JUDGED[c]:
            assert found[c] == pytest.approx((np.exp(log_a[c] - log_pi[c]) * B[c])[VALID[c]].mean())
        else:
            assert math.isnan(found[c])


def test_the_ideal_model_weighs_the_base_s_samples_by_b() -> None:
    """E_p[f] = Σ b f / Σ b over valid samples, soft b and all; a sample without a figure is left out."""
    weight = np.where(VALID, B, 0.0)
    found = ideal_means([make_outcome()], weight)
    for c in range(N):
        if not weight[c].any():
            assert math.isnan(found["length"][c])
            continue
        assert found["length"][c] == pytest.approx((weight[c] * LENGTHS[c]).sum() / weight[c].sum())
        known = np.where(np.isnan(FEATURE[c]), 0.0, weight[c])
        expected = (known * np.nan_to_num(FEATURE[c])).sum() / known.sum() if known.any() else math.nan
        assert found["feature"][c] == pytest.approx(expected, nan_ok=True)
    assert ideal_means([make_outcome(beams=True)], weight).keys() == {"length"}


SCORE = np.random.default_rng(6).normal(size=(N, M))


SIGNS = np.array([1, -1, 1, -1, -1])[:, None]


def tilted_outcome(beta: float, offset: float = 0.0) -> Outcome:
    """The same with a reward: P = a·b·exp(r/β); ``offset`` is added in some contexts, and subtracted in others."""
    outcome, first, blocks = make_outcome(), 0, []
    for block in outcome.blocks:
        rows = slice(first, first := first + len(block.b))
        features = torch.from_numpy((SCORE + SIGNS * offset)[rows])[..., None]
        blocks.append(replace(block, features=features, coefficients=(1 / beta,), factor_names=("reward",)))
    return replace(outcome, blocks=tuple(blocks))


def test_figures_of_a_reward_by_value() -> None:
    """Z_c may have any scale, so that ε, which is large here, is left out."""
    drawn = completions()
    log_ratio = scored(table(2), drawn).sum(axis=2) - scored(table(1), drawn).sum(axis=2) + SCORE / 0.5
    kl = []
    for c in range(N):
        found = (np.exp(log_ratio[c]) * B[c])[VALID[c]]
        if found.any():
            kl.append(sum(x / found.mean() * np.log(x / found.mean()) for x in found if x > 0) / len(found))
    found_of = statistics_of(tilted_outcome(0.5), EPSILON)
    assert found_of["kl_target_policy"].value() == pytest.approx(np.mean(kl), rel=1e-10)
    assert found_of["reward"].value() == pytest.approx(mean_of_means(SCORE), rel=1e-10)
    assert statistics_of(make_outcome(), EPSILON)["kl_target_policy"].value() != pytest.approx(np.mean(kl), rel=1e-3)


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_the_ideal_model_of_a_reward_of_any_scale(offset: float) -> None:
    """E_p[f] with p ∝ a·b·exp(r/β), from a pool of two models: what all rewards of a context share does not matter.

    The second model's samples are those of the first, in reverse and a token longer, with another probability.
    """
    outcome = tilted_outcome(0.5, offset)
    at_base = tuple(replace(block, log_a=block.log_q) for block in outcome.blocks)
    tuned = tuple(
        _reversed(replace(block, log_q=block.log_q - block.b, lengths=block.lengths + 1)) for block in at_base
    )
    outcomes = {"base": replace(outcome, blocks=at_base), "tuned": replace(outcome, blocks=tuned)}
    log_base = torch.cat([block.log_q for block in at_base])
    scores = {("tuned", "base"): log_base - torch.from_numpy(B)}
    found = Evaluation.of(outcomes, scores, CDPGConfig(device="cpu"), {}).ideal
    for c in range(N):
        mixture = (1 + np.exp(-B[c])) / 2  # of both models, over the base
        weight = np.where(VALID[c], B[c] * np.exp(SCORE[c] / 0.5) / mixture, 0.0)
        if not weight.any():
            assert math.isnan(found["length"][c]) and math.isnan(found["reward"][c])
            continue
        assert found["length"][c] == pytest.approx((weight * LENGTHS[c]).sum() / weight.sum() + 0.5, rel=1e-9)
        assert found["reward"][c] == pytest.approx(
            (weight * SCORE[c]).sum() / weight.sum() + SIGNS[c, 0] * offset, rel=1e-9
        )


def test_weights_of_a_pool_do_not_overflow() -> None:
    log_p, valid = torch.from_numpy(SCORE), torch.from_numpy(VALID)
    log_models = torch.stack([log_p.flip(1), log_p.flip(0)])
    plain = pool_weights(log_p, log_models, valid)
    shifted = pool_weights(log_p + 900 * torch.from_numpy(SIGNS), log_models, valid)
    assert shifted.numpy() == pytest.approx(plain.numpy(), rel=1e-9, nan_ok=True)
    assert plain[JUDGED].sum(dim=1).tolist() == pytest.approx([1.0] * int(JUDGED.sum()))


def test_a_model_s_score_does_not_matter_where_the_target_is_0() -> None:
    log_p, valid = torch.from_numpy(SCORE.copy()), torch.from_numpy(VALID)
    log_p[0, 0] = -math.inf
    log_models = torch.stack([log_p.flip(1), log_p.flip(0)]).clamp(min=-5.0)
    expected = pool_weights(log_p, log_models, valid)
    log_models[:, 0, 0] = math.nan
    assert pool_weights(log_p, log_models, valid).numpy() == pytest.approx(expected.numpy(), nan_ok=True)
    assert float(expected[0, 0]) == 0 and float(expected[0, 1]) > 0


def _reversed(block: Rollout) -> Rollout:
    """The samples of each context in the opposite order."""
    tables = ("b", "valid", "log_q", "log_a", "lengths", "features")
    return replace(block, **{name: getattr(block, name).flip(1) for name in tables})


def test_a_model_s_own_means_leave_out_failed_checks() -> None:
    found = model_means(make_outcome())
    for c in range(N):
        length = LENGTHS[c][VALID[c]].mean() if JUDGED[c] else math.nan
        assert found["length"][c] == pytest.approx(length, nan_ok=True)
        known = VALID[c] & ~np.isnan(FEATURE[c])
        assert found["feature"][c] == pytest.approx(FEATURE[c][known].mean() if known.any() else math.nan, nan_ok=True)


def test_tokens_by_rank() -> None:
    assert token_ranks(make_outcome()) == [9, 4, 2]


def test_outputs_are_shown_with_their_verdicts() -> None:
    assert outputs_of(make_outcome(), 0) == [
        {"text": "00", "b": 1.0, "decoding": "ancestral", "remark": "on 00", "token_ids": [0]},
        {"text": "01", "b": 0.5, "decoding": "ancestral", "remark": "on 01", "token_ids": [0, 1]},
        {"text": "02", "b": 0.0, "decoding": "ancestral", "remark": "on 02", "token_ids": [0, 2]},
    ]
    assert [output["b"] for output in outputs_of(make_outcome(), 4)] == [0.0, None, 1.0], "one has no verdict"
    beam, first, _ = outputs_of(make_outcome(beams=True), 2)
    assert beam == {"text": "beam 2", "b": None, "decoding": "beam", "remark": "on 2", "token_ids": [2]}
    assert first == {"text": "20", "b": 0.0, "decoding": "ancestral", "token_ids": [2, 1]}


def test_a_block_drops_token_scores() -> None:
    block = without_token_scores(_block(range(2)))
    assert block.token_log_a.isnan().all()
    assert block.samples.token_log_q.isnan().all()
    assert torch.isfinite(block.log_q).all()
