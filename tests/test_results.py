"""What an evaluation says of its models: all figures beside those of the reference, and every notice."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from unittest.mock import ANY

import numpy as np
import pytest

import values
from cdpg import Reward
from cdpg.contexts.digests import prompt_digests
from cdpg.evaluation.measures import Measured, per_output
from cdpg.evaluation.metrics import GAIN_ESS, POOLED, Count, Metric
from cdpg.evaluation.policy_evaluations import PolicyEvaluations
from cdpg.evaluation.results import Evaluation
from cdpg.messages.terms import term
from evaluated import PROMPTS, Case, parameters_of, small_blocks
from factor_rules import minus_length
from reference.model import Sequences, token_log_probs
from test_values import expected_notices, notices, on_distance, on_gain
from values import differences
from values_constraint import holds


@pytest.fixture(autouse=True)
def of_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)


def evaluated(case: Case, *names: str, about: Any = None, **given: Any) -> Evaluation:
    """The base and some models that are unlike it."""
    models = {name: case.other(seed) for seed, name in enumerate(names)}
    found = case.evaluator(**given).evaluate({n: lambda m=m: m for n, m in models.items()}, about or {})  # type: ignore[misc]
    assert found is not None
    return found


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    """As in a file, where what is not a number is null."""
    return {**result, "partition": [None if np.isnan(value) else value for value in result["partition"]]}


def test_every_figure_of_three_models() -> None:
    case, others = Case(), ("first", "second")
    result = comparable(evaluated(case, *others, about={"task": "x"}, tuned_on=frozenset()).to_mapping())
    expected = case.expected({name: case.other(seed) for seed, name in enumerate(others)})
    names = {name: name for name in ("base", *others)}
    whole = expected.to_mapping(names) | {"models": {name: expected.metrics(name) for name in names}}
    whole |= {"task": "x", "metric_info": {}, "count_info": {}}
    distances, lost = on_distance(whole, whole["models"]), expected_notices(expected, names)
    assert len(distances) == 2
    assert len(lost) == 6
    assert notices(result.pop("notices")) == [*distances, *on_gain(expected, whole), *lost]
    by_model = {name: notices(found) for name, found in result.pop("model_notices").items()}
    of_others = {name: [distance] for name, distance in zip(others, distances, strict=True)}
    assert by_model == {
        name: [*of_others.get(name, []), *(notice for notice in lost if notice[0] == name)] for name in names
    }
    assert differences(result, whole) == []


def test_every_figure_under_the_names_of_a_run() -> None:
    """Some of the models, under other names, with a pool that has the samples of all."""
    case, others = Case(), ("first", "second")
    result = comparable(evaluated(case, *others, tuned_on=frozenset()).to_mapping({"base": "base", "second": "tuned"}))
    expected = case.expected({name: case.other(seed) for seed, name in enumerate(others)})
    names = {"base": "base", "second": "tuned"}
    whole = expected.to_mapping(names) | {shown: expected.metrics(name) for name, shown in names.items()}
    whole |= {"metric_info": {}, "count_info": {}}
    del result["notices"]
    assert list(result.pop("model_notices")) == ["base", "tuned"]
    assert differences(result, whole) == []


def test_with_a_reward_the_gain_is_weighted_and_said_to_be() -> None:
    """From the samples themselves: weights exp(r/β), normalised in each context, for r minus the length and β = 2."""
    case = Case()
    found = evaluated(case, "tuned", constraints=[holds, Reward(minus_length, 2.0)])
    policy, by_row = parameters_of(case.other(0)), dict[int, list[Any]]()
    for record in found.ideal_samples:
        by_row.setdefault(record["row"], []).append(record)
    numbers, gains = [], []
    for row, records in by_row.items():
        weight = np.exp([-len(record["completion"]) / 2 for record in records])
        numbers.append(weight.sum() ** 2 / (weight**2).sum())
        prompts, ids = [case.contexts[row - 1].tokens] * len(records), [record["token_ids"] for record in records]
        log_policy = token_log_probs(policy, Sequences.of(prompts, ids)).sum(axis=1)
        gains.append((weight * (log_policy - [record["log_a"] for record in records])).sum() / weight.sum())
    assert found.about == {GAIN_ESS: pytest.approx(np.mean(numbers), rel=1e-12)}
    assert len(gains) == 9, "the reward applies to the context to which the constraint does not"
    result = found.to_mapping()
    assert result["contexts_with_gain"] == 9
    assert result["models"]["tuned"]["gain"]["mean"] == pytest.approx(np.mean(gains), rel=1e-9)
    assert [notice for notice in result["notices"] if "gain" in notice] == [
        f"with moments or rewards the gain is estimated from weighted samples of the base: {np.mean(numbers):.1f} "
        "effective samples for each context; with few of them it is biased towards 0, and a larger gain_draws "
        "improves it"
    ]


def test_the_reward_of_the_ideal_model_beside_a_line_of_the_run() -> None:
    """Its mean under p, from the base's samples weighted by b exp(r/β); b is 1 where no constraint applies."""
    case = Case()
    evaluator = case.evaluator([holds, Reward(minus_length, 2.0)])
    line = PolicyEvaluations(evaluator, case.other(0), {}).after_epoch(0)
    means = []
    for context, texts in zip(case.contexts, evaluator.outcome("base", case.base).texts, strict=True):
        verdicts = [
            1.0 if b is None else 0.0 if isinstance(b, str) else b for b in map(partial(values.judge, context), texts)
        ]
        r = -np.array([len(text) for text in texts])
        weight = np.array(verdicts) * np.exp(r / 2)
        means += [(weight * r).sum() / weight.sum()] if weight.any() else []
    assert line["ideal"] == {
        "reward_minus_length": {"mean": pytest.approx(np.mean(means), rel=1e-9), "low": ANY, "high": ANY}
    }
    assert "base" not in line


def test_effective_samples_are_those_of_contexts_that_have_any() -> None:
    """Five draws each. Nothing satisfies in the first context, one sample in the second, all of them in the third."""
    case, seen = Case(gain_draws=5), set[str]()
    case.contexts = case.contexts[:3]

    def check(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        verdicts = []
        for prompt in prompts:
            verdicts.append(prompt == PROMPTS[2] or (prompt == PROMPTS[1] and prompt not in seen))
            seen.add(prompt)
        return verdicts

    found = evaluated(case, constraints=[check, Reward(minus_length, 2.0)])
    weight = np.exp([-len(record["completion"]) / 2 for record in found.ideal_samples if record["row"] == 3])
    assert len(weight) == 5
    assert len(found.ideal_samples) == 6
    third = weight.sum() ** 2 / (weight**2).sum()
    assert found.about == {GAIN_ESS: pytest.approx((1 + third) / 2, rel=1e-12)}
    told = found.to_mapping()
    assert told["contexts_with_gain"] == 2
    assert told["notices"] == [], "the gain of the base is 0"
    case.contexts = case.contexts[:2]
    seen.clear()
    assert evaluated(case, constraints=[check, Reward(minus_length, 2.0)]).about == {GAIN_ESS: 1.0}


def test_without_any_sample_of_the_ideal_model_no_number_of_them_is_told() -> None:
    found = evaluated(Case(gain_draws=5), constraints=[no, Reward(minus_length, 2.0)], about={"task": "x"})
    assert found.about == {"task": "x"}
    assert found.ideal_samples == []


def no(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return [False for _ in completions]


def test_an_evaluation_on_some_contexts_counts_those_and_keeps_no_samples() -> None:
    case = Case()
    evaluator = case.evaluator(tuned_on=frozenset(prompt_digests(case.given()[1:7])))
    found = evaluator.evaluate({}, {}, limit=6)
    assert found is not None
    assert found.tuned_on == 5
    assert found.ideal_samples == []
    assert "tuned on" not in "".join(found.to_mapping()["notices"]), "no model of it was tuned"
    whole = evaluator.evaluate({"tuned": lambda: case.other(0)}, {})
    assert whole is not None
    assert whole.tuned_on == 6
    assert whole.to_mapping()["notices"][0] == (
        "6 of the 9 contexts of this evaluation were tuned on: the figures may be better than on new contexts; give "
        f"others to evaluate on with {term('eval_contexts')}"
    )


class Letters:
    """Measures and counts letters, and would measure more."""

    beams = 0
    metrics: ClassVar = {name: Metric(name, "higher") for name in ("letters", "absent")}
    counts: ClassVar = {name: Count(name, "times") for name in ("letter", "none")}

    def __call__(self, contexts: Any, outputs: Any, apply: Any = None) -> Measured:
        letters = Counter("".join(text for row in outputs for text in row).replace(" ", ""))
        return Measured({"letters": per_output(outputs, len)}, frequencies={"letter": letters})


def test_what_is_measured_is_described_and_nothing_else() -> None:
    result = evaluated(Case(), measure=Letters()).to_mapping()
    assert result["metric_info"] == {"letters": Letters.metrics["letters"].to_mapping()}
    assert result["count_info"] == {"letter": Letters.counts["letter"].to_mapping()}
    assert set(result["frequencies"]["base"]) == {"letter", "token_rank"}


def test_a_model_as_near_as_the_base_is_not_told_of() -> None:
    found = evaluated(Case(gain_draws=0), "tuned")
    statistics = {**found.statistics, "tuned": {**found.statistics["tuned"], POOLED: found.statistics["base"][POOLED]}}
    same = replace(found, statistics=statistics).to_mapping()
    for result, told in ((found.to_mapping(), True), (same, False)):
        assert any("no nearer" in notice for notice in result["notices"]) == told
        assert "contexts_with_gain" not in result


def test_the_distance_on_one_context_has_no_interval() -> None:
    case = Case(gain_draws=0)
    case.contexts = case.contexts[:1]
    found = evaluated(case, "tuned")
    before, after = (found.metrics()[name][POOLED]["mean"] for name in ("base", "tuned"))
    assert before is not None and after is not None
    assert after > before
    assert found.to_mapping()["notices"] == [
        f"tuned: no nearer to the ideal model than the base: pooled KL(p, π) {before:.2f} → {after:.2f} nats, "
        f"{after - before:+.2f}"
    ]


def test_pass_at_k_needs_two_samples() -> None:
    two, one = Case(evaluation_samples=2), Case(evaluation_samples=1)
    expected = two.expected({"tuned": two.other(0)}).to_mapping({"base": "base", "tuned": "tuned"})["pass_at_k"]
    assert list(expected["base"]) == ["1", "2"]
    assert differences(evaluated(two, "tuned").to_mapping()["pass_at_k"], expected) == []
    assert "pass_at_k" not in evaluated(one, "tuned").to_mapping()


def test_the_recall_of_the_base_with_a_reward_by_value() -> None:
    """All 16 draws are accepted. p = a w/Z, w = exp(r/β): the base covers a sample if w ≤ 10 Z, Z the mean of w."""
    found, by_row = evaluated(Case(), constraints=Reward(minus_length, 0.3)), dict[int, list[float]]()
    for record in found.ideal_samples:
        by_row.setdefault(record["row"], []).append(math.exp(-len(record["completion"]) / 0.3))
    weights = np.array(list(by_row.values()))
    assert weights.shape == (9, 16)
    covered = weights <= 10 * weights.mean(axis=1, keepdims=True)
    expected = (weights * covered).sum(axis=1) / weights.sum(axis=1)
    assert abs(expected.mean() - covered.mean()) > 0.1
    assert found.metrics()["base"]["recall"]["mean"] == pytest.approx(expected.mean(), rel=1e-9)
