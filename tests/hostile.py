"""Texts that crash, stall or bloat what reads Python or English, and a source of endless more."""

from __future__ import annotations

import random

CHARACTERS = [
    *map(chr, range(128)),
    "é",
    "ß",
    "\u0300",
    "\u0315",
    "\u2028",
    "\u200d",
    "\ufeff",
    "\ud800",
    "\udfff",
    "😀",
]
FRAGMENTS = (
    "def f(x):", "class A:", "if x:", "elif x:", "else:", "try:", "except:", "finally:", "while 1:", "for x in y:",
    "lambda:", "return x", "yield", "await x", "async def g():", "match x:", "case _:", "import a.b", "from . import *",
    "with a as b:", "pass", "break", "continue", "not ", "x", "0x1f", "1e999", "1_0", "'", '"', '"""', "'''", "f'{",
    "}'",
    "\\", "\\\n", "\n", "\n    ", "\n\t", "\r", "\f", "    ", "(", ")", "[", "]", "{", "}", ",", ":", ";", "==", "->",
    ":=", "**", "# c", "@", "~", "-", "…", "Barack Obama", "the United Nations", "Paris", "12", "2,5", "7.", "deux",
)  # fmt: skip


def _nested_finally(depth: int) -> str:
    """Every level of a ``finally`` is compiled twice: 2^depth."""
    return "".join(" " * i + "try: pass\n" + " " * i + "finally:\n" for i in range(depth)) + " " * depth + "pass\n"


def _nested_exits(depth: int) -> str:
    """The same within a loop, and with more ways out of each level."""
    levels = "".join(
        f"{' ' * i}try:\n{' ' * (i + 1)}if a: continue\n{' ' * (i + 1)}break\n{' ' * i}finally:\n"
        for i in range(1, depth + 1)
    )
    return "while 1:\n" + levels + " " * (depth + 2) + "pass\n"


BAD = {
    "finally, nested": _nested_finally(20),
    "finally, nested in a loop": _nested_exits(13),
    "words in a row": "y " * 1600,
    "longer words in a row": "and " * 1600,
    "strings in strings": '"f"{y' * 200,
    "loops over minus": 'for -("b"' * 200,
    "minuses": "-" * 6000 + "2",
    "nots": "not " * 6000 + "y",
    "calls": "b" + "()" * 3500,
    "subscripts": "b" + "[1]" * 3500,
    "conditional expressions": "y if y else " * 5500 + "y",
    "elifs": "if b==0: pass\n" + "elif b==1: pass\n" * 6000,
    "many more elifs": "if b==0: pass\n" + "elif b==1: pass\n" * 12000,
    "lambdas": "lambda:" * 2800 + "1",
    "many more lambdas": "lambda:" * 90_000 + "1",
    "marks to sort": "b" + "\u0315\u0300" * 4500,
    "many more marks to sort": "b" + "\u0315\u0300" * 24_000,
    "dotted name": "import " + "b." * 45_000 + "b",
    "list": "[" + "2," * 900_000 + "]",
    "half a pair": 'y="\ud801"',
    "NUL": "b\0c",
    "digits": "2" * 4800,
    "no blank": "0x2for y in z",
    "comment alone": "# d",
    "no body": "def g():",
    "from the future": "from __future__ import braces",
    "open brace, open quote": '{\n"\\\ng',
    "closed bracket, open quote": ']\n"\\\n#!',
    "blanks": "y" + " " * 9000 + "z\n",
    "many more blanks": "y" + " " * 90_000 + "z\n",
    "blanks in parentheses": "(" + " " * 24_000 + ")\n",
    "types": "type(" * 5500 + "\n",
    "ifs on a line": "if y: " * 5500 + "\n",
    "comparisons of types": "== type(" * 3300 + "\n",
    "NUL alone": "\0",
    "parentheses": "(" * 20_000,
    "numbers": "1 " * 50_000,
    "digits and commas": "1," * 50_000,
    "empty": "",
}
"""By what they are; some take gigabytes, some minutes, some end an interpreter."""


def fuzzed(count: int, seed: int = 0) -> list[str]:
    """Soups of characters, of fragments, of one fragment over and over, and of mixtures."""
    source = random.Random(seed)
    return [_fuzzed(source) for _ in range(count)]


def _fuzzed(source: random.Random) -> str:
    kind = source.randrange(4)
    if kind == 0:
        return "".join(source.choices(CHARACTERS, k=source.randrange(200)))
    if kind == 1:
        return "".join(source.choices(FRAGMENTS, k=source.randrange(120)))
    if kind == 2:
        unit = "".join(source.choices(FRAGMENTS, k=source.randint(1, 3)))
        return unit * source.choice([2, 10, 100, 1000])
    lines = [
        "    " * source.randrange(6) + " ".join(source.choices(FRAGMENTS, k=source.randrange(6))) for _ in range(12)
    ]
    return "\n".join(lines)
