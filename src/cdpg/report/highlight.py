"""Outputs with what matters in them marked: names that recur in the source, numerals, the parts of Python.

Everything here turns hostile text into safe HTML: each piece is made visible and escaped before any element is put
around it. All expressions run in linear time; nothing is parsed, compiled or run.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterator

from markupsafe import Markup, escape

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
_PYTHON = re.compile(
    r"(?P<comment>\#[^\n]*)"
    r"|(?P<string>[rbfuRBFU]{0,2}(?:'''(?:[^\\']|\\(?:.|\Z)|'(?!''))*(?:'''|\Z)|\"\"\"(?:[^\\\"]|\\(?:.|\Z)|\"(?!\"\"))*(?:\"\"\"|\Z)"
    r"|'(?:[^\\'\n]|\\(?:.|\Z))*(?:'|(?=\n)|\Z)|\"(?:[^\\\"\n]|\\(?:.|\Z))*(?:\"|(?=\n)|\Z)))"
    r"|(?P<number>\b\d[\w.]*)"
    r"|(?P<word>[^\W\d]\w*)",
    re.DOTALL,
)
_BUILTINS = frozenset(name for name in dir(builtins) if name.islower())


def prose(output: str, source: str) -> Markup:
    """Running text, names of the source and numerals marked."""
    parts, done = [], 0
    for start, end, kind in _marks(output, _words_of(source)):
        parts.append(_safe(output[done:start]))
        parts.append(Markup('<mark class="{}">{}</mark>').format(kind, _safe(output[start:end])))
        done = end
    return Markup("").join([*parts, _safe(output[done:])])


def python(source: str, wrong_line: int | None = None) -> Markup:
    """Python in colours; ``wrong_line``, counted from 1, is marked if the evaluation named one."""
    lines: list[list[Markup]] = [[]]
    for kind, piece in _tokens(source):
        for number, part in enumerate(piece.split("\n")):
            if number:
                lines.append([])
            if part:
                safe = _safe(part)
                lines[-1].append(Markup('<span class="{}">{}</span>').format(kind, safe) if kind else safe)
    whole = [Markup("").join(line) for line in lines]
    if wrong_line is not None and 1 <= wrong_line <= len(whole):
        marked = Markup('<span class="wrong">{}</span>').format(whole[wrong_line - 1] or " ")
        whole[wrong_line - 1] = marked
    return Markup("\n").join(whole)


def _safe(piece: str) -> Markup:
    return escape(visible(piece))


def _words_of(source: str) -> str:
    """The words of a text with a blank around each, so that a name is looked up as whole words."""
    return f" {' '.join(match[0].casefold() for match in _WORD.finditer(source))} "


def _marks(output: str, source: str) -> Iterator[tuple[int, int, str]]:
    """Places of names and numerals, in order, none within another."""
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
    """How many words from here on, each with a capital, stand in the source one after another; at most six."""
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


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    """Pieces of Python with the class of each; what is no token of interest has none."""
    done, after_def = 0, False
    for match in _PYTHON.finditer(source):
        if match.start() > done:
            yield "", source[done : match.start()]
        kind, piece = match.lastgroup or "", match[0]
        if kind == "word":
            if after_def:
                kind = "def"
            elif keyword.iskeyword(piece):
                kind = "kw"
            else:
                kind = "fun" if piece in _BUILTINS else ""
            after_def = piece in ("def", "class")
        yield {"comment": "com", "string": "str", "number": "lit"}.get(kind, kind), piece
        done = match.end()
    if done < len(source):
        yield "", source[done:]
