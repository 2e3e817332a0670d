"""Exact samples of the ideal model and the gain, against enumeration."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import factor_rules
from cdpg import CDPGConfig, CDPGTrainer, Reward
from cdpg.evaluation.ideal_samples import ENOUGH, ROUND, IdealSamples, accepts, draw_ideal_samples
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Samples
from cdpg.rollout.sampler import Sampler
from cdpg.storage.jsonl import read_jsonl
from cdpg.target.divergence import mean_by_context
from enumeration import MAX_LENGTH, Universe, contexts_of, tabular
from side_by_side import side_by_side

SEED = 5


def soft(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [1.0 if "a" in text else 0.25 if "b" in text else 0.0 for text in completions]


def rare(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    """Never in the third context, whose prompt is the longest."""
    return [text == "a" and prompt != "a b c" for prompt, text in zip(prompts, completions, strict=True)]


def trainer(folder: Path, check: Any = soft, **changes: Any) -> CDPGTrainer:
    settings: dict[str, Any] = {
        "epochs": 4, "contexts_per_epoch": 3, "num_generations": 50, "learning_rate": 0.1, "warmup_epochs": 0,
        "max_completion_length": MAX_LENGTH, "evaluation_samples": 20, "device": "cpu", "evaluate_every": 2,
        "check_workers": 0, "keep": "last",
    }  # fmt: skip
    config = CDPGConfig(output_dir=str(folder), **(settings | changes))
    return CDPGTrainer(tabular(SEED), check, config, contexts_of(3), contexts_of(3))


def base_sampler(made: CDPGTrainer) -> Sampler:
    return Sampler(made.base, made.base, made.judge, made.args, made.processes, policy_is_base=True)


def drawn(made: CDPGTrainer, draws: int, number: int = 0) -> IdealSamples:
    prompts = made.base.encode(made.eval_contexts, MAX_LENGTH)
    return draw_ideal_samples(base_sampler(made), made.eval_contexts, prompts, draws, number, "some")


def enumerated(b_of: Any, model: Any) -> tuple[Universe, Tensor, Tensor]:
    """Every outcome of the three contexts, log a of it, and p_c."""
    universe = Universe.of(model, contexts_of(3))
    rows = zip(universe.samples.contexts, universe.samples.texts, strict=True)
    b = torch.tensor([b_of([c.prompt] * len(texts), texts) for c, texts in rows], dtype=torch.float64)
    log_a = universe.log_prob(model)
    ideal = log_a.exp() * b
    return universe, log_a, ideal / ideal.sum(dim=1, keepdim=True)


def test_the_expected_gain_is_the_fall_of_kl_target_policy() -> None:
    """E_p[log π − log a] = KL(p, a) − KL(p, π), with every outcome as a sample of the ideal model."""
    base, policy = tabular(SEED), tabular(SEED + 1)
    universe, log_a, p = enumerated(soft, base)
    log_policy = universe.log_prob(policy)

    def kl(log_model: Tensor) -> Tensor:
        return torch.where(p > 0, p * (p.log() - log_model), 0.0).sum(dim=1)

    expected = kl(log_a) - kl(log_policy)
    assert expected.abs().min() > 0.01
    # The mean over samples that are drawn as often as p has them: Σ_x p(x) · [gain of x], one outcome at a time.
    outcomes = p.shape[1]
    gains = torch.stack(
        [
            mean_by_context((log_policy - log_a)[:, x], torch.arange(3), 3)  # one sample for each context
            for x in range(outcomes)
        ],
        dim=1,
    )
    assert torch.allclose((p * gains).sum(dim=1), expected, atol=1e-12)


def test_a_mean_by_context_divides_by_the_samples_of_the_context() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    found = mean_by_context(values, torch.tensor([0, 2, 2, 0]), 4, lambda sums: 2 * sums)
    assert found[[0, 2]].tolist() == [4.5, 3.0]
    assert found[[1, 3]].isnan().all()


def test_accepted_samples_are_distributed_as_p(tmp_path: Path) -> None:
    """A sample is accepted with probability b: by the share of each length, with and without an a, five errors."""
    made = trainer(tmp_path)
    universe, _, p = enumerated(soft, made.base)
    counts: Counter[tuple[int, bool, int]] = Counter()
    for number in range(40):
        found = drawn(made, ROUND, number)
        counts.update(
            (c, "a" in t[0], len(t[0])) for c, t in zip(found.owners.tolist(), found.samples.texts, strict=True)
        )
    for context in range(3):
        total = sum(count for key, count in counts.items() if key[0] == context)
        expected: Counter[tuple[int, bool, int]] = Counter()
        for text, probability in zip(universe.samples.texts[context], p[context].tolist(), strict=True):
            expected[context, "a" in text, len(text)] += probability
        assert total > 60
        for key, probability in expected.items():
            error = math.sqrt(probability * (1 - probability) / total)
            assert abs(counts[key] / total - probability) <= 5 * error + 1e-12, key


def test_a_context_is_sampled_until_it_has_enough_or_the_draws_are_used_up(tmp_path: Path) -> None:
    made = trainer(tmp_path, rare)
    draws = 60 * ROUND + 3
    found = drawn(made, draws)
    counts = found.counts(made.processes).tolist()
    assert counts[2] == 0
    assert found.draws >= draws + 2, "the context without any is sampled to the end"
    assert all(text == ("a",) for text in found.samples.texts)
    assert min(counts[:2]) >= ENOUGH, "they come in 483 draws"
    assert found.draws < 3 * draws, "contexts that have enough are left alone"


def test_a_gain_needs_a_sample_and_weighs_contexts_equally(tmp_path: Path) -> None:
    made = trainer(tmp_path, rare)
    found, policy = drawn(made, 400), tabular(SEED + 1)
    universe, log_a, _ = enumerated(rare, made.base)
    place = universe.samples.texts[0].index("a")
    expected = (universe.log_prob(policy) - log_a)[:, place]
    gain = found.gain(policy, made.processes, 1000)
    assert gain[:2].tolist() == pytest.approx(expected[:2].tolist(), rel=1e-9)
    assert math.isnan(gain[2])
    evaluation = replace(made.evaluator, config=made.args.replace(gain_draws=400)).evaluate(
        {"tuned": lambda: policy}, {}
    )
    assert evaluation is not None
    metrics = evaluation.metrics()
    assert metrics["tuned"]["gain"]["mean"] == pytest.approx(float(expected[:2].mean()), rel=1e-9)
    assert metrics["base"]["gain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_the_log_probabilities_are_those_of_the_base_when_they_were_drawn(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    found = drawn(made, ROUND)
    universe, log_a, _ = enumerated(soft, made.base)
    for owner, texts, value in zip(found.owners.tolist(), found.samples.texts, found.log_a.tolist(), strict=True):
        place = universe.samples.texts[owner].index(texts[0])
        assert value == pytest.approx(float(log_a[owner, place]), rel=1e-9)


def test_draws_differ_between_rounds_and_sets_of_contexts(tmp_path: Path) -> None:
    made = trainer(tmp_path, lambda prompts, completions, **columns: [len(text) == 3 for text in completions])
    first, same, other = (drawn(made, ROUND, number).samples.texts for number in (0, 0, 1))
    assert first == same
    assert first != other
    uniforms = [UniformStream(0, f"some-{done}", 0) for done in (0, ROUND)]
    drawn_numbers = [stream.draw(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), 0) for stream in uniforms]
    assert drawn_numbers[0] != drawn_numbers[1]


def test_acceptance_leaves_out_samples_without_a_verdict(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    universe, log_a, _ = enumerated(soft, made.base)
    b = torch.ones_like(log_a)
    valid = torch.arange(b.shape[1]).expand_as(b) % 2 == 0
    epoch = universe.epoch(b, log_a, log_a, valid)
    assert torch.equal(accepts(epoch, UniformStream(0, "x", 0)), valid), "b = 1 is always accepted"
    none = accepts(universe.epoch(torch.zeros_like(b), log_a, log_a, valid), UniformStream(0, "x", 0))
    assert not none.any()


@pytest.mark.parametrize("count", [2, 3])
def test_processes_draw_and_measure_together_what_one_does_alone(tmp_path: Path, count: int) -> None:
    def gains(processes: Any) -> tuple[list[float], int]:
        made = trainer(tmp_path, soft)
        sampler = replace(base_sampler(made), processes=processes)
        prompts = made.base.encode(made.eval_contexts, MAX_LENGTH)
        found = draw_ideal_samples(sampler, made.eval_contexts, prompts, 40, 0, "some")
        return found.gain(tabular(SEED + 1), processes, 1000).tolist(), found.draws

    alone = side_by_side(1, gains)[0]
    for values, draws in side_by_side(count, gains):
        assert values == pytest.approx(alone[0], rel=1e-12)
        assert draws == alone[1]


def test_files_have_the_gain_of_every_evaluation(tmp_path: Path) -> None:
    """Along the run and at the end, on the same samples: the last line and the final figure are equal."""
    made = trainer(tmp_path, soft)
    made.train()
    lines = read_jsonl(tmp_path / "evaluations.jsonl")
    gains = [line["metrics"]["gain"]["mean"] for line in lines]
    assert gains[0] == 0.0
    assert gains[0] < gains[1] < gains[2]
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["tuned"]["gain"]["mean"] == gains[2], "all three contexts, the same samples"
    ideal = made.evaluator.evaluate({"tuned": lambda: made.policy}, {})
    assert ideal is not None
    assert ideal.metrics()["tuned"]["gain"]["mean"] == pytest.approx(gains[2], rel=1e-12)


def test_the_gain_can_be_computed_again_from_the_samples_in_the_folder(tmp_path: Path) -> None:
    made = trainer(tmp_path, soft)
    made.train()
    universe, log_a, _ = enumerated(soft, made.base)
    log_policy = universe.log_prob(made.policy)
    by_row: dict[int, list[float]] = {}
    records = list(read_jsonl(tmp_path / "ideal_samples.jsonl"))
    for record in records:
        context = [found.row for found in universe.samples.contexts].index(record["row"])
        ids = [universe.samples.token_ids(context, place) for place in range(universe.samples.shape[1])]
        outcome = context, ids.index(record["token_ids"])
        assert record["prompt"] == universe.samples.contexts[context].prompt
        assert record["completion"] == universe.samples.texts[context][outcome[1]]
        assert record["log_a"] == pytest.approx(float(log_a[outcome]), rel=1e-12)
        by_row.setdefault(record["row"], []).append(float(log_policy[outcome] - log_a[outcome]))
    assert list(by_row) == sorted(by_row)
    means = [sum(values) / len(values) for values in by_row.values()]
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["contexts_with_gain"] == len(means) == 3
    assert result["tuned"]["gain"]["mean"] == pytest.approx(sum(means) / 3, rel=1e-12)


def test_without_draws_there_is_no_gain(tmp_path: Path) -> None:
    trainer(tmp_path, soft, gain_draws=0).train()
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert "gain" not in result["tuned"]
    assert all("gain" not in line["metrics"] for line in read_jsonl(tmp_path / "evaluations.jsonl"))


def test_no_samples_at_all_give_no_gain() -> None:
    """A process may have none of the samples."""
    found = IdealSamples(2, torch.zeros(0, dtype=torch.long), EMPTY, torch.zeros(0, dtype=torch.float64), 0)
    values = side_by_side(1, lambda processes: found.gain(tabular(SEED), processes, 1000))[0]
    assert values.shape == (2,)
    assert values.isnan().all()


def test_rounds_end_with_the_draws_or_with_enough_samples(tmp_path: Path) -> None:
    """A first round of 8, then one of 3; the third context never satisfies, and the others have 4 after the first."""
    seen: Counter[str] = Counter()

    def four_of_eight(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        seen.update(prompts)
        first = {prompt: seen[prompt] - list(prompts).count(prompt) for prompt in prompts}
        verdicts = []
        for prompt in prompts:
            verdicts.append(first[prompt] < ENOUGH and prompt != "a b c")
            first[prompt] += 1
        return verdicts

    found = drawn(trainer(tmp_path, four_of_eight), draws=ROUND + 3)
    assert found.judged.tolist() == [ROUND, ROUND, ROUND + 3]
    assert torch.bincount(found.owners, minlength=3).tolist() == [ENOUGH, ENOUGH, 0]
    assert found.draws == 3 * ROUND + 3


def test_with_a_reward_all_draws_are_made(tmp_path: Path) -> None:
    """Weights make few samples out of many. There are fewer draws than contexts."""
    found = drawn(trainer(tmp_path, Reward(factor_rules.minus_length, 2.0)), draws=2)
    assert found.judged.tolist() == [2, 2, 2]
    texts = [text for (text,) in found.samples.texts]
    assert found.features[:, 0].tolist() == [-len(text) for text in texts]
    assert len(found.samples.ended) == len(found.samples.lengths) == len(texts) == 6
    again = drawn(trainer(tmp_path, Reward(factor_rules.minus_length, 2.0)), draws=ROUND + 1)
    assert again.judged.tolist() == [ROUND + 1] * 3


def test_without_draws_there_are_no_samples(tmp_path: Path) -> None:
    found = drawn(trainer(tmp_path), draws=0)
    assert found.samples.tokens.shape == (0, 1, 0)
    assert found.samples.lengths.shape == found.samples.ended.shape == (0, 1)
    assert found.features.shape == found.every_feature.shape == (0, 0)
    assert (found.draws, found.judged.tolist()) == (0, [0, 0, 0])


EMPTY = Samples(
    (), (), (), torch.zeros(0, 1, 3, dtype=torch.long), torch.zeros(0, 1, dtype=torch.long),
    torch.zeros(0, 1, 3, dtype=torch.float64), torch.zeros(0, 1, dtype=torch.bool),
)  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_gain_and_recall_with_a_reward_by_value(processes: int) -> None:
    """Samples of the base, accepted with probability b, are weighted by exp(r/β); the third context has none."""
    generator = np.random.default_rng(3)
    owners, judged, coefficient = np.array([0, 0, 0, 1, 1, 1, 1]), np.array([6, 5, 4]), 1.5
    log_a, log_b, reward = (generator.normal(size=7) * 2 for _ in range(3))
    log_b = -np.abs(log_b)
    weight = np.exp(coefficient * reward)
    log_z = np.log([weight[owners == c].sum() / judged[c] for c in (0, 1)])
    log_p = log_a + log_b + coefficient * reward - log_z[owners]
    log_policy = log_p + np.array([0.0, -2.2, -2.4, -2.3, -2.31, 5.0, -9.0])  # log 10 is 2.303
    covered = np.array([1, 1, 0, 1, 0, 1, 0])

    def of(tensor: Any) -> Tensor:
        return torch.tensor(tensor, dtype=torch.float64)

    def work(shared: Any) -> tuple[Tensor, Tensor]:
        own = slice(3) if shared.count == 2 and shared.is_main else slice(3, 7) if shared.count == 2 else slice(7)
        found = IdealSamples(
            3, torch.tensor(owners[own]), EMPTY, of(log_a[own]), 9, of(log_b[own]), torch.tensor(judged),
            of(reward[own])[:, None], torch.tensor(owners), of(reward)[:, None],
        )  # fmt: skip
        return found.figures(of(log_policy[own]), shared, (coefficient,)), found.effective_numbers((coefficient,))

    for figures, numbers in side_by_side(processes, work):
        for context in (0, 1):
            own = owners == context
            share = weight[own] / weight[own].sum()
            assert float(figures[0, context]) == pytest.approx((share * (log_policy - log_a)[own]).sum(), rel=1e-12)
            assert float(figures[1, context]) == pytest.approx((share * covered[own]).sum(), rel=1e-12)
            assert float(numbers[context]) == pytest.approx(1 / (share**2).sum(), rel=1e-12)
        assert figures[:, 2].isnan().all()
        assert numbers[2] == 0


def test_contexts_without_a_verdict_are_not_said_to_lack_a_satisfying_sample(tmp_path: Path) -> None:
    """No constraint applies to the first; in the third no sample satisfies, and more draws might find one."""

    def some(prompts: Any, completions: Any, **columns: Any) -> list[bool | None]:
        verdicts: dict[str, bool | None] = {"a": None, "a b": True, "a b c": False}
        return [verdicts[prompt] for prompt in prompts]

    made = trainer(tmp_path, some)
    evaluation = made.evaluator.evaluate({"tuned": lambda: tabular(SEED + 1)}, {})
    assert evaluation is not None
    found = evaluation.to_mapping({"base": "base", "tuned": "tuned"})
    assert found["contexts_with_gain"] == 1
    told = "1 of 2 contexts have no satisfying sample of the base and do not count in the gain"
    assert [notice for notice in found["notices"] if "gain" in notice] == [f"{told}; raise gain_draws to find more"]
