"""Moments and rewards as factors of a target: what they are given, how they are called, and what they refuse."""

from __future__ import annotations

import math

import pytest

import factor_rules
from cdpg import Moment, Reward
from cdpg.constraints.factors import Tilt, describe, parse_factor
from cdpg.constraints.judge import Judge, Verdicts
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.sandbox.limits import Limits

TEXTS = ["", "a", "ab", "abc"]


def length_2(prompts: list[str], completions: list[str]) -> list[int]:
    return factor_rules.length(prompts, completions)


def verdicts(judge: Judge, texts: list[str] = TEXTS) -> Verdicts:
    context = Context("x", {}, 1)
    found = judge.collect(judge.submit([context] * len(texts), texts, [[]] * len(texts)))
    judge.close()
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_constraints_judge_and_factors_give_numbers(workers: int) -> None:
    given = [factor_rules.nonempty, Moment(factor_rules.length, 1.5), Reward(factor_rules.minus_length, 0.5)]
    judge = Judge(given, Limits(workers=workers))
    found = verdicts(judge)
    assert found.b == [0.0, 1.0, 1.0, 1.0]
    assert found.features == [(0.0, 0.0), (1.0, -1.0), (2.0, -2.0), (3.0, -3.0)]
    assert judge.tilt.coefficients == (0.0, 2.0)
    judge.tilt.set_multipliers([0.7])
    assert judge.tilt.coefficients == (0.7, 2.0)


def test_without_constraints_every_sample_satisfies() -> None:
    found = verdicts(Judge(Moment(factor_rules.length, 1.5)))
    assert (found.b, found.failures, found.inapplicable) == ([1.0] * 4, {}, frozenset())


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_finite_number_is_a_failed_check(workers: int) -> None:
    found = verdicts(
        Judge([Reward(factor_rules.odd_values, 1.0)], Limits(workers=workers)), ["nan", "inf", "none", "2"]
    )
    assert found.b == [0.0, 0.0, 0.0, 1.0]
    assert sorted(found.failures) == [0, 1, 2]
    assert str(found.failures[0]) == (
        "reward factor_rules:odd_values gave no number: it returned nan, and a finite number is expected"
    )
    assert found.features[3] == (2.0,)
    assert math.isnan(found.features[0][0])


def test_a_failure_does_not_matter_where_a_constraint_gave_0() -> None:
    found = verdicts(Judge([factor_rules.nonempty, Reward(factor_rules.odd_values, 1.0)]), ["", "nan"])
    assert (found.b, sorted(found.failures)) == ([0.0, 0.0], [1])


def test_a_constraint_that_does_not_apply_leaves_the_other_factors() -> None:
    found = verdicts(Judge([factor_rules.never_applies, Moment(factor_rules.length, 1.0)]))
    assert (found.b, found.inapplicable) == ([1.0] * 4, frozenset())


def test_names_for_files() -> None:
    tilt = Tilt([Moment(factor_rules.length, 1.0), Reward(factor_rules.length, 1.0), Moment(factor_rules.length, 2.0)])
    assert tilt.names == ["moment_length", "reward_length", "moment_length_2"]
    numbered = Tilt([Moment(length_2, 1.0), Moment(factor_rules.length, 1.0), Moment(factor_rules.length, 2.0)])
    assert numbered.names == ["moment_length_2", "moment_length", "moment_length_3"], "no name occurs twice"
    assert describe(tilt.factors[0]) == "moment factor_rules:length=1"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Reward(factor_rules.length, 0.0), "must be above 0, not 0"),
        (lambda: Reward(factor_rules.length, -1.0), "must be above 0, not -1"),
        (lambda: Reward(factor_rules.length, math.nan), "expected a finite number"),
        (lambda: Moment(factor_rules.length, math.inf), "expected a finite number"),
        (lambda: Moment(factor_rules.length, "many"), "expected a finite number"),
        (lambda: Moment(factor_rules.length, True), "expected a finite number"),
        (lambda: Moment(None, 0.5), "pass a function of (prompts, completions, **columns)"),
        (lambda: Judge([Moment("factor_rules:missing", 0.5)]), "has no function 'missing'"),
        (lambda: Judge([Moment("nowhere_at_all:length", 0.5)]), "for the moment 'nowhere_at_all:length'"),
        (lambda: Tilt([Moment(factor_rules.length, 0.5)]).require_fitted(), "multiplier=…"),
        (
            lambda: Judge([Moment(factor_rules.length, 0.5, 1.0), Moment(factor_rules.minus_length, 0.5)]),
            "λ is given for some moments, and not for factor_rules:minus_length",
        ),
        (lambda: parse_factor(Moment, "rules:length"), "is given as module:function=0.5"),
        (lambda: parse_factor(Moment, "rules:length=half"), "is given as module:function=0.5"),
        (lambda: parse_factor(Reward, "=0.5"), "with β after ="),
        (lambda: parse_factor(Reward, "rules:length=-1"), "must be above 0"),
    ],
)
def test_bad_factors(make: object, words: str) -> None:
    with pytest.raises(UserError) as error:
        make()  # type: ignore[operator]
    assert words in str(error.value)


def test_a_factor_as_text() -> None:
    assert parse_factor(Moment, "rules:length=1e-1") == Moment("rules:length", 0.1)
    assert parse_factor(Reward, "rules:length = 2") == Reward("rules:length", 2.0)
