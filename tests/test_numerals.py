"""The numerals constraint: its edge cases, one by one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdpg.errors import UserError
from cdpg.tasks.translation.constraint import (
    NUMERALS,
    PLACEHOLDER,
    digits_of,
    mask_numbers,
    numerals_as_digits,
    numerals_of,
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Two men and a dog.", (2,)),
        ("I saw TWO men, then two women.", (2,)),
        ("This one is mine, that one is not.", (1,)),
        ("No one came; one's own.", (1,)),
        ("A five-year plan for two-thirds of them.", (5, 2)),
        ("Twenty-one dogs, thirty\u2011two cats.", ()),
        ("Twenty-one dogs and one cat.", (1,)),
        ("Someone often tenfold threesome onefold.", ()),
        ("Nine, eight; seven: six!", (9, 8, 7, 6)),
        ("translate English to French: It rains.", ()),
        ("There are 2 dogs.", ()),
        ("", ()),
    ],
)
def test_numerals_of_a_source(source: str, expected: tuple[int, ...]) -> None:
    assert numerals_of(source) == expected


@pytest.mark.parametrize(
    "text",
    [
        "2",
        "Il y en a 2.",
        "2, puis rien",
        "(2)",
        "2-3 jours",
        "2 %",
        "2€",
        "2 millions",
        "J'en ai 2...",
        "...2",
        "n°2",
        "2.Le",
        "-2",
    ],
)
def test_a_whole_two(text: str) -> None:
    assert 2 in digits_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "12",
        "20",
        "2.5",
        "2,5",
        "0,2",
        ".2",
        "1/2",
        "2/3",
        "2:30",
        "12:2",
        "2 000",
        "2\u202f000",
        "2'000",
        "2e",
        "2ème",
        "A2",
        "2h",
        "1.2.3",
        "_2",
        "\u0662",
        "deux",
        "",
    ],
)
def test_not_a_whole_two(text: str) -> None:
    assert 2 not in digits_of(text)


@given(st.integers(min_value=1, max_value=9))
def test_every_numeral_needs_its_own_digit(value: int) -> None:
    word = NUMERALS[value - 1]
    others = "".join(f"{digit} " for digit in range(1, 10) if digit != value)
    completions = [f"Les {value} chats.", f"Les {others}chats.", f"Les 1{value} chats."]
    assert numerals_as_digits([f"The {word} cats."] * 3, completions) == [True, False, False]


def test_all_numerals_are_needed_and_a_repeated_one_once() -> None:
    prompts = ["translate English to French: Two dogs, two cats and three birds."] * 3
    completions = ["2 chiens, deux chats et 3 oiseaux.", "2 chiens et trois oiseaux.", "deux chiens et 3 oiseaux."]
    assert numerals_as_digits(prompts, completions) == [True, False, False]


def test_a_source_without_numerals_is_satisfied() -> None:
    assert numerals_as_digits(["It rains."], [""]) == [True]


def test_the_source_column_stands_before_the_prompt() -> None:
    assert numerals_as_digits(["One prompt."], ["7"], source=["Seven sources."], other=[1]) == [True]
    assert numerals_as_digits(["One prompt."], ["1"], source=["Seven sources."]) == [False]


def test_a_row_without_source_and_a_chat_are_read_from_the_prompt() -> None:
    chat = [{"role": "user", "content": "Translate: two cats."}]
    answer = [{"role": "assistant", "content": "2 chats."}]
    assert numerals_as_digits([chat, "Three."], [answer, "2"], source=[None, None]) == [True, False]


def test_a_ragged_source_column_is_refused() -> None:
    with pytest.raises(UserError, match=r"2 source\(s\) and 1 prompt\(s\).*1 completions"):
        numerals_as_digits(["a"], ["b"], source=["c", "d"])


def test_masking_hides_how_a_number_is_written() -> None:
    words = mask_numbers("Deux chats, une souris et vingt-deux chiens de neuf ans.")
    digits = mask_numbers("2 chats, 1 souris et vingt-deux chiens de 9 ans.")
    assert words == digits == f"{PLACEHOLDER} chats, {PLACEHOLDER} souris et vingt-deux chiens de {PLACEHOLDER} ans."
    assert mask_numbers("12 heures et 2,5 neufs, aucune") == "12 heures et 2,5 neufs, aucune"


def test_long_and_odd_texts_are_read_quickly() -> None:
    texts = ["a" * 200_000, "1" * 200_000, "1." * 100_000, "2 " * 100_000, "_" * 200_000, "." * 200_000]
    start = time.process_time()
    verdicts = numerals_as_digits(["two"] * len(texts), texts)
    assert time.process_time() - start < 5
    assert verdicts == [False, False, False, True, False, False]
