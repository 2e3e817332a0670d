"""The constraint of the translation task: numerals of the source are digits in the translation (appendix A.2).

What counts in the source:

- *one* to *nine* as whole words in any case: at a sentence's start (*Two men*), in capitals, *one* as a pronoun;
- hyphenated before another word (*five-year plan*, *two-thirds*), but not as the unit of a larger number
  (*twenty-one* is 21, not a one);
- a numeral that occurs twice needs its digit once. A source without numerals is always satisfied.

What counts in the translation is the digit as a whole number. The 2 of ``12``, ``2.5``, ``2,5``, ``1/2``, ``2:30``,
``2 000``, ``2e`` or ``A2`` is not a 2. Those of ``2.`` and ``2,`` before a space or at the end, of ``(2)``, ``2-3``,
``2 %`` and ``2 millions`` are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cdpg.constraints.texts import as_text, sources_of
from cdpg.sandbox.functions import text_check

NUMERALS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""The numerals that the constraint looks for, in the order of their digits."""
PLACEHOLDER = "NUM"
"""Replaces a number from one to nine in masked text; one word for any tokenizer."""

_DIGITS = {word: place + 1 for place, word in enumerate(NUMERALS)}
_SINGLE = {str(digit): digit for digit in _DIGITS.values()}
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_IN_SOURCE = re.compile(
    rf"(?<!\w)(?:(?:{_TENS})[-\u2010\u2011\u2013](?:{'|'.join(NUMERALS)})|({'|'.join(NUMERALS)}))(?!\w)", re.IGNORECASE
)
# A whole number: adjacent letters and digits, what follows a point, comma, slash or colon (decimals, fractions, hours),
# and three digits after a blank or an apostrophe (thousands). It starts only at the start of a word, so that a long
# run of letters is read once.
_NUMBER = re.compile(
    r"(?:(?<![\w.,])[.,](?=\d)|(?<!\w))\w*\d\w*(?:[.,/:\u2044]\d\w*|[ \u00a0\u202f\u2009'\u2019]\d{3}(?!\w))*"
)
_FRENCH = re.compile(r"(?<![\w-])(?:une?|deux|trois|quatre|cinq|six|sept|huit|neuf)(?!\w)", re.IGNORECASE)


def numerals_of(source: str) -> tuple[int, ...]:
    """The numerals of an English text as digits, each once, in order of appearance."""
    found = (match[1] for match in _IN_SOURCE.finditer(source))
    return tuple(dict.fromkeys(_DIGITS[word.lower()] for word in found if word))


def digits_of(text: str) -> frozenset[int]:
    """The whole numbers from 1 to 9 that are written as digits in a text."""
    return frozenset(_SINGLE[match[0]] for match in _NUMBER.finditer(text) if match[0] in _SINGLE)


def mask_numbers(text: str) -> str:
    """A French text with *un*, *une*, *deux* … *neuf* and 1 … 9 replaced by one placeholder.

    BLEU of masked texts does not depend on the spelling of numbers. The articles *un*, *une* are masked too, in output
    and reference alike.
    """
    masked = _NUMBER.sub(lambda match: PLACEHOLDER if match[0] in _SINGLE else match[0], text)
    return _FRENCH.sub(PLACEHOLDER, masked)


@text_check(columns=("source",))
def numerals_as_digits(prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[bool]:
    """b(x, c) = 1 if every numeral of the source occurs as a digit in the translation.

    The source is the ``source`` column if there is one, else the prompt; a prefix such as
    "translate English to French: " has no numeral and does not matter.
    """
    sources = sources_of(prompts, completions, kwargs)
    return [
        digits_of(as_text(completion)).issuperset(numerals_of(source))
        for source, completion in zip(sources, completions, strict=True)
    ]
