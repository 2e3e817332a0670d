"""What constraints are given, and what is made of what they return."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from cdpg import demo
from cdpg.constraints.judge import Judge, Verdicts
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.sandbox.functions import text_check

CONTEXTS = [Context("p", {"k": 1}, 1), Context("q", {"k": 2}, 2)]


def verdicts(*constraints: Any, contexts: list[Context] = CONTEXTS) -> Verdicts:
    made = Judge(list(constraints))
    return made.collect(made.submit(contexts, ["x", "yy"], [[1], [2, 3]]))


def judge(*constraints: Any, contexts: list[Context] = CONTEXTS) -> list[float]:
    """The verdicts where no check fails."""
    found = verdicts(*constraints, contexts=contexts)
    assert not found.failures
    return found.b


def failure(constraint: Any) -> str:
    """Why one of the samples has no verdict."""
    return str(next(iter(verdicts(constraint).failures.values())))


def returning(values: Any) -> Any:
    def named(prompts: Any, completions: Any, **kwargs: Any) -> Any:
        return values

    return named


@pytest.mark.parametrize(
    "values",
    [[True, 0.5], (1, 0.5), np.array([1.0, 0.5]), torch.tensor([1.0, 0.5]), [np.float32(1), torch.tensor(0.5)]],
)
def test_bools_and_numbers_of_any_kind(values: Any) -> None:
    assert judge(returning(values)) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 1.0, 1.0], "it returned 3 values for 1 completions"),
        ([1.0, math.nan], "it returned nan, and true, false, a number in [0, 1] or None is expected"),
        ([1.0, 1.5], "it returned 1.5, and"),
        ([-0.1, 1.0], "it returned -0.1, and"),
        ([10**400, 1.0], "it returned "),
        ([10**5000, 1.0], "a list that cannot be shown"),
        (["1", 1.0], "it returned '1', and"),
        ([object(), 1.0], "a list with a value for each completion is expected"),
        (True, "it returned True, and a list with a value for each completion is expected"),
        (None, "it returned None, and a list"),
        ({1.0, 0.0}, "and a list with a value for each completion is expected"),
    ],
)
def test_anything_else_is_a_failure_that_names_the_function(values: Any, message: str) -> None:
    why = failure(returning(values))
    assert "named gave no verdict: it returned" in why
    assert message in why


def test_a_wrong_value_costs_its_own_sample_alone() -> None:
    found = verdicts(returning([math.nan, 0.5]))
    assert found.b == [0.0, 0.5]
    assert {place: failure.kind for place, failure in found.failures.items()} == {0: "value"}


def test_a_wrong_number_of_values_costs_the_samples_that_are_alone_to_blame() -> None:
    def drops_long_ones(prompts: Any, completions: Any, **kwargs: Any) -> list[bool]:
        return [True for text in completions if len(text) < 2]

    found = verdicts(drops_long_ones)
    assert found.b == [1.0, 0.0]
    assert {place: failure.kind for place, failure in found.failures.items()} == {1: "value"}


def test_a_constraint_cannot_end_the_program() -> None:
    def leaves(prompts: Any, completions: Any, **kwargs: Any) -> Any:
        raise SystemExit(0)

    assert {failure.kind for failure in verdicts(leaves).failures.values()} == {"exception"}


def test_several_multiply() -> None:
    assert judge(returning([0.5, 1.0]), returning([0.5, 0.0])) == [0.25, 0.0]


def test_columns_come_as_keyword_lists() -> None:
    def check(prompts: list[str], completions: list[str], k: list[int]) -> list[bool]:
        assert prompts == ["p", "q"]
        return [number == len(text) for number, text in zip(k, completions, strict=True)]

    assert judge(check) == [1.0, 1.0]


def test_token_ids_come_with_their_own_sample() -> None:
    given: list[Any] = []

    def check(prompts: Any, completions: Any, completion_ids: Any) -> list[bool]:
        given.append((completions, completion_ids))
        return [len(ids) == len(text) for text, ids in zip(completions, completion_ids, strict=True)]

    assert judge(check) == [1.0, 1.0]
    assert given == [(["x", "yy"], [[1], [2, 3]])]


def test_a_chat_prompt_is_answered_by_a_message() -> None:
    chat = [Context(({"role": "user", "content": "hi"},), {}, 1)] * 2

    def check(prompts: Any, completions: Any, **kwargs: Any) -> list[bool]:
        assert prompts[0] == [{"role": "user", "content": "hi"}]
        assert completions[1] == [{"role": "assistant", "content": "yy"}]
        return [True, True]

    assert judge(check, contexts=chat) == [1.0, 1.0]


def test_an_exception_is_reported_with_its_line() -> None:
    def broken(prompts: Any, completions: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("oops")

    assert re.search(r"broken raised ZeroDivisionError: oops \(.*test_judge.py, line \d+\)", failure(broken))


def raising(error: BaseException, at: str) -> Any:
    def raises(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        if at in completions:
            raise error
        return [1.0] * len(completions)

    return raises


def test_a_failure_names_the_constraint_that_failed() -> None:
    found = verdicts(returning([1.0, 1.0]), raising(ZeroDivisionError("oops"), "yy"))
    assert (found.b, found.inapplicable, found.exhausted) == ([1.0, 0.0], frozenset(), Counter())
    assert {place: (failure.constraint, failure.kind) for place, failure in found.failures.items()} == {
        1: ("test_judge:raising.<locals>.raises", "exception")
    }


@pytest.mark.parametrize(("error", "kind"), [(MemoryError(), "memory"), (RecursionError(), "recursion")])
def test_what_a_text_exhausts_is_a_verdict_of_a_marked_function_alone(error: BaseException, kind: str) -> None:
    plain, marked = raising(error, "yy"), text_check()(raising(error, "yy"))
    found = verdicts(returning([0.5, 1.0]), marked)
    assert (found.b, found.failures, found.exhausted) == ([0.5, 0.0], {}, {kind: 1})
    found = verdicts(returning([0.5, 1.0]), plain)
    assert (found.b, found.exhausted) == ([0.5, 0.0], {})
    assert {place: failure.kind for place, failure in found.failures.items()} == {1: kind}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no constraint was given: pass a function of (prompts, completions, **columns), or its name as"),
        (None, "no constraint was given"),
        ({"m": 1}, "constraints is {'m': 1}: pass a function"),
        ([3], "a constraint is 3: pass a function"),
        ("short", "a constraint is given as module:function, not 'short'"),
        (["no_such_module:short"], "there is no module 'no_such_module'"),
    ],
)
def test_what_is_no_constraint_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Judge(given)


def test_constraints_may_be_named() -> None:
    named = "cdpg.demo:has_an_a"
    for given in (named, [named], [named, returning([1.0, 0.5])]):
        made = Judge(given)
        found = made.collect(made.submit(CONTEXTS, ["ba", "a"], [[1], [2]]))
        assert found.b == ([1.0, 0.5] if len(given) == 2 else [1.0, 1.0])
        assert made.constraints[0] is demo.has_an_a


def test_a_constraint_must_take_prompts_and_completions() -> None:
    with pytest.raises(UserError, match=r"must take \(prompts, completions"):
        Judge(lambda text: True)


def test_a_column_that_a_constraint_needs_must_be_there() -> None:
    def named(prompts: Any, completions: Any, source: Any, *, level: Any, note: Any = None) -> Any:
        return [True] * len(completions)

    def any_of_them(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> Any:
        return [True] * len(completions)

    made = Judge([any_of_them, named])
    made.require_columns([Context("x", {"source": 1, "level": 2}, 1)])
    made.require_columns([])
    with pytest.raises(UserError, match=r"named takes 'level', which has no default.*they have 'source', 'other': add"):
        made.require_columns([Context("x", {"source": 1, "other": 2}, 1)])
    with pytest.raises(UserError, match="they have the prompt alone"):
        made.require_columns([Context("x", {}, 1)])
    Judge(functools.partial(named, source=[], level=[])).require_columns([Context("x", {}, 1)])
