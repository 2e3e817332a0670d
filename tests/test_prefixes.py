"""The function ``hopeless`` of a constraint: how it is found, what it is given, and what is made of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import prefix_rules
from cdpg.constraints import compiles, pep8_clean
from cdpg.constraints.calling import forget
from cdpg.constraints.judge import Judge
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.sandbox.limits import Limits
from noticed import noticed

CONTEXTS = [Context("p", {"k": 1}, 1), Context("q", {"k": 2}, 2), Context("r", {"k": 3}, 3)]
PREFIXES = ["", "ab", "bb"]


def with_hopeless(hopeless: Any) -> Callable[..., list[bool]]:
    def fits(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        return [True] * len(prompts)

    fits.hopeless = hopeless  # type: ignore[attr-defined]
    return fits


def ask(judge: Judge, contexts: list[Context] = CONTEXTS, prefixes: list[str] = PREFIXES) -> list[list[bool]]:
    return [check.collect(check.submit(contexts, prefixes)) for check in judge.prefix_checks]


def answers(hopeless: Any) -> list[bool]:
    (found,) = ask(Judge(with_hopeless(hopeless), prunes=True))
    return found


@pytest.fixture
def workers() -> Iterator[Callable[..., Judge]]:
    made: list[Judge] = []

    def make(constraint: Any, **limits: Any) -> Judge:
        made.append(Judge(constraint, Limits(workers=2, **limits), prunes=True))
        return made[-1]

    yield make
    for judge in made:
        judge.close()


def test_it_is_an_attribute_of_a_function_or_of_an_object() -> None:
    class Fits:
        def __call__(self, prompts: Any, completions: Any) -> list[bool]:
            return [True] * len(prompts)

        def hopeless(self, prompts: Any, prefixes: Any) -> list[bool]:
            return [prefix == "ab" for prefix in prefixes]

    assert ask(Judge([prefix_rules.at_most_one_b, Fits()], prunes=True)) == [[False, False, True], [False, True, False]]
    assert Judge("prefix_rules:at_most_one_b", prunes=True).prefix_checks[0].watch == {"b"}


def test_nothing_is_asked_unless_there_is_such_a_function_and_samples_are_pruned() -> None:
    assert Judge(prefix_rules.at_most_one_b).prefix_checks == []
    assert Judge(prefix_rules.two_b, prunes=True).prefix_checks == []


def test_the_code_tasks_have_one_that_looks_at_complete_lines() -> None:
    checks = Judge([compiles, pep8_clean], prunes=True).prefix_checks
    assert [check.watch for check in checks] == [frozenset("\r\n")] * 2
    assert [check.label.rpartition(":")[2] for check in checks] == ["compiles", "pep8_clean"]


def test_it_gets_prompts_prefixes_and_columns() -> None:
    given: list[Any] = []

    def hopeless(prompts: Any, prefixes: Any, k: Any) -> list[bool]:
        given.append((prompts, prefixes, k))
        return [number == 2 for number in k]

    assert answers(hopeless) == [False, True, False]
    assert given == [(["p", "q", "r"], PREFIXES, [1, 2, 3])]


def test_a_chat_has_a_message_as_its_prefix() -> None:
    chat = [Context(({"role": "user", "content": "hi"},), {}, 1)]

    def hopeless(prompts: Any, prefixes: Any, **columns: Any) -> list[bool]:
        assert prompts == [[{"role": "user", "content": "hi"}]]
        assert prefixes == [[{"role": "assistant", "content": "yes"}]]
        return [True]

    assert ask(Judge(with_hopeless(hopeless), prunes=True), chat, ["yes"]) == [[True]]


@pytest.mark.parametrize(
    "values", [[True, False, True], [1, 0, 1.0], (True, None, True), np.array([True, False, True])]
)
def test_true_and_false_of_any_kind(values: Any) -> None:
    assert answers(lambda prompts, prefixes, **columns: values) == [True, False, True]


@pytest.mark.parametrize(
    "values", [[0.5, True, True], ["yes", True, True], [2, True, True], [float("nan"), True, True]]
)
def test_what_is_neither_is_not_hopeless_and_is_logged_once(values: Any) -> None:
    judge = Judge(with_hopeless(lambda prompts, prefixes, **columns: values), prunes=True)
    with noticed() as notices:
        assert ask(judge) == ask(judge) == [[False, True, True]]
    (notice,) = notices
    assert "true or false is expected; a sample on which it fails is drawn to its end" in notice


@pytest.mark.parametrize("here", [True, False])
def test_what_it_fails_on_is_not_hopeless(here: bool, workers: Callable[..., Judge]) -> None:
    judge = Judge(prefix_rules.with_fragile, prunes=True) if here else workers(prefix_rules.with_fragile)
    with noticed() as notices:
        assert ask(judge, prefixes=["bb", "abb", "bbb"]) == [[True, False, True]]
    (notice,) = notices
    assert "hopeless of constraint prefix_rules:with_fragile failed: ZeroDivisionError: oops" in notice


def test_answers_of_workers_are_those_of_this_process(workers: Callable[..., Judge]) -> None:
    constraints = [compiles, prefix_rules.at_most_one_b]
    prefixes = ["\n    x = )\n", "bb", "\n    x = (\n"]
    assert ask(workers(constraints), prefixes=prefixes) == ask(Judge(constraints, prunes=True), prefixes=prefixes)


def test_one_that_hangs_is_not_called_again(workers: Callable[..., Judge]) -> None:
    judge = workers(prefix_rules.with_hanging, seconds=0.5)
    with noticed() as notices:
        assert ask(judge, CONTEXTS[:1], ["x"]) == [[False]]
    (notice,) = notices
    assert "no answer after 0.5 s (setting check_seconds); it is not called again in this run" in notice
    (check,) = judge.prefix_checks
    call = check.submit(CONTEXTS, PREFIXES)
    assert not isinstance(call, tuple), "no worker has it"
    assert check.collect(call) == [False, False, False]


def test_a_batch_that_nobody_waits_for_leaves_nothing_behind(workers: Callable[..., Judge]) -> None:
    (check,) = workers(prefix_rules.at_most_one_b).prefix_checks
    first, second = check.submit(CONTEXTS, PREFIXES), check.submit(CONTEXTS, PREFIXES)
    assert isinstance(first, tuple) and isinstance(second, tuple)
    forget(first)
    assert check.collect(second) == [False, False, True]
    assert first[0].pending == 0


@pytest.mark.parametrize(
    ("hopeless", "message"),
    [
        (3, "hopeless of constraint .*fits is 3: expected a function of \\(prompts, prefixes, \\*\\*columns\\)"),
        (lambda prompts, completions: [], "hopeless of .* must take \\(prompts, prefixes, \\*\\*columns\\); it takes"),
    ],
)
def test_what_is_no_such_function_is_refused(hopeless: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Judge(with_hopeless(hopeless), prunes=True)


@pytest.mark.parametrize("watch", ["", 3, ["\n", "ab"]])
def test_what_is_no_set_of_characters_is_refused(watch: Any) -> None:
    def hopeless(prompts: Any, prefixes: Any, **columns: Any) -> list[bool]:
        return []

    hopeless.watch = watch  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"watch of hopeless of constraint .* expected a text with the characters"):
        Judge(with_hopeless(hopeless), prunes=True)


def test_a_column_that_it_needs_must_be_there() -> None:
    judge = Judge(with_hopeless(lambda prompts, prefixes, size: []), prunes=True)
    with pytest.raises(UserError, match=r"hopeless of constraint .*fits takes 'size', which has no default"):
        judge.require_columns(CONTEXTS)
