"""Marks parts of outputs: names that occur in the source, numerals, and the tokens of Python.

Everything here turns hostile text into safe HTML: each piece is made visible and escaped before any element is put
around it. Nothing is compiled or run.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

from markupsafe import Markup, escape
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from cdpg.report.values import visible

_WORD = re.compile(r"\d+(?:[.,]\d+)*\w*|\w+(?:['’]\w+)?")
_GAP = re.compile(r"[ \u00a0-]")
_NUMBER_WORDS = frozenset(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion "
    "deux trois quatre cinq sept huit neuf dix onze douze treize quatorze quinze seize vingt trente quarante cinquante "
    "soixante cent mille".split()
)
_NO_NAMES = frozenset(
    "a an and as at but by for from he her his i if in is it its my no not of on or our she so that the their there "
    "they this to was we were what when who with you your mr mrs ms dr "
    "au aux ce ces cette d de des du elle en et il ils je l la le les leur mais ne nous on ou par pour qu que qui sa "
    "se ses son sur un une vous".split()
)
_PYTHON = PythonLexer()
_CLASSES = {
    Comment: "com",
    String: "str",
    Number: "lit",
    Keyword: "kw",
    Operator.Word: "kw",
    Name.Class: "def",
    Name.Function: "def",
    Name.Function.Magic: "fun",
    Name.Builtin: "fun",
    Name.Builtin.Pseudo: "",  # self, cls
}
"""The class in the style sheet of a kind of token and its subtypes."""


def prose(output: str, source: str) -> Markup:
    """Running text, with names of the source and numerals marked."""
    parts, done = [], 0
    for start, end, kind in _marks(output, _words_of(source)):
        parts.append(_safe(output[done:start]))
        parts.append(Markup('<mark class="{}">{}</mark>').format(kind, _safe(output[start:end])))
        done = end
    return Markup("").join([*parts, _safe(output[done:])])


def python(source: str, wrong_line: int | None = None) -> Markup:
    """Highlighted Python; ``wrong_line``, from 1, is marked if it is given."""
    lines: list[list[str]] = [[]]
    for kind, piece in _pieces(source):
        for number, part in enumerate(piece.split("\n")):
            if number:
                lines.append([])
            if part:
                lines[-1].append(f'<span class="{kind}">{_safe(part)}</span>' if kind else _safe(part))
    whole = ["".join(line) for line in lines]
    if wrong_line is not None and 1 <= wrong_line <= len(whole):
        whole[wrong_line - 1] = f'<span class="wrong">{whole[wrong_line - 1] or " "}</span>'
    return Markup("\n".join(whole))


def _safe(piece: str) -> Markup:
    return escape(visible(piece))


def _words_of(source: str) -> str:
    """The words of a text with a blank around each, so that a name is looked up as whole words."""
    return f" {' '.join(match[0].casefold() for match in _WORD.finditer(source))} "


def _marks(output: str, source: str) -> Iterator[tuple[int, int, str]]:
    """Spans of names and numerals, in order, without overlaps."""
    words = list(_WORD.finditer(output))
    place = 0
    while place < len(words):
        match = words[place]
        length = _name_at(output, words, place, source)
        if length:
            yield match.start(), words[place + length - 1].end(), "name"
        elif match[0][0].isdigit() or match[0].casefold() in _NUMBER_WORDS:
            yield match.start(), match.end(), "num"
        place += max(1, length)


def _name_at(output: str, words: list[re.Match[str]], place: int, source: str) -> int:
    """Number of capitalised words from here on, at most six, that occur in the source one after another."""
    run: list[str] = []
    best = 0
    for match in words[place : place + 6]:
        word = match[0]
        apart = run and not _GAP.fullmatch(output[words[place + len(run) - 1].end() : match.start()])
        if not word[0].isupper() or apart or (not run and word.casefold() in _NO_NAMES):
            break
        run.append(word.casefold())
        if f" {' '.join(run)} " in source:
            best = len(run)
    return best if best > 1 or (best and len(run[0]) > 1) else 0


def _pieces(source: str) -> Iterator[tuple[str, str]]:
    """Pieces of Python with their classes; a piece without highlighting has none."""
    tokens = _PYTHON.get_tokens_unprocessed(source)  # as it is: no line break is added or changed
    for kind, found in itertools.groupby(tokens, lambda token: _class_of(token[1])):
        yield kind, "".join(piece for _, _, piece in found)


@functools.cache
def _class_of(token: Any) -> str:
    """The class of the nearest kind of token that has one."""
    return next((_CLASSES[kind] for kind in reversed(token.split()) if kind in _CLASSES), "")
