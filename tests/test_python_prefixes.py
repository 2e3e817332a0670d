"""What the code constraints say of a function's beginning: true only if no completion of it satisfies them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpg import CDPGConfig
from cdpg.constraints import compiles, pep8_clean
from cdpg.contexts.contexts import Context
from cdpg.models.loading import load_model
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import draw_samples
from cdpg.tasks.base import Draw
from cdpg.tasks.code.constraint import FunctionEnd, cannot_be_clean, cannot_compile
from cdpg.tasks.code.signatures import Definition, definitions, python_files, standard_library
from cdpg.tasks.code.task import COMPILABILITY
from rounds import ordinary

SIGNATURE = "def f(a, b):"
LONG = "    x = " + " + ".join(["abc"] * 15)
Check = Callable[..., list[bool]]
RULES: dict[str, tuple[Check, Check]] = {
    "compiles": (compiles, cannot_compile),
    "pep8_clean": (pep8_clean, cannot_be_clean),
}


def hopeless(name: str, *prefixes: str, signature: str = SIGNATURE) -> list[bool]:
    return RULES[name][1]([signature] * len(prefixes), list(prefixes))


def satisfies(name: str, *bodies: str, signature: str = SIGNATURE) -> list[bool]:
    return RULES[name][0]([signature] * len(bodies), list(bodies))


# --- by example ---


@pytest.mark.parametrize(
    "prefix",
    [
        " x = )\n",
        "\n    x = )\n",
        "\n    x = )  \n  \n\n",
        "\r    x = )\r",
        "\r\n    x = )\r\n",
        "\n    x = )\n    y",
        "\n    x = 'abc\n",
        "\n    x = f'{a b}'\n",
        "\n    x = 1 +\n",
        "\n    x = 0x\n",
        "\n    x = [1,\n    2 3\n",
        "\n    return (a\n        = 3\n",
        "\n    if x:\n    y\n",
        "\n        x\n    y\n",
        "\n    x\n        y\n",
        "\n    else:\n",
        "\n    try:\n        x\n    y\n",
        "\n    print x\n",
        "\n    x = 1\n    \\ y\n",
        "\n    '''a'''\n    (]\n",
    ],
)
def test_a_complete_line_that_no_continuation_can_mend(prefix: str) -> None:
    assert hopeless("compiles", prefix) == [True]


@pytest.mark.parametrize(
    ("prefix", "rest"),
    [
        ("", " pass"),
        ("\n", "    pass"),
        ("\n    x = )", ""),  # the line is not complete, and it is left to the constraint
        ("\n    x = (", ")"),
        ("\n    '''abc\n", "    '''"),
        ('\n    """abc)\n    (', '"""'),
        ("\n    x = (\n", "    )"),
        ("\n    x = [\n        1,\n", "    ]"),
        ("\n    x = \\\n", "    1"),
        ("\n    x = 'a\\\n", "    '"),
        ("\n    x = f'a\\\n", "    '"),
        ("\n    x = f'''{a\n", "    }'''"),
        ("\n    x = f'''\n", "    '''"),
        ("\n    x = 'a' \\\n", "    'b'"),
        ("\n    x = 'a' \\\n   \n", "    y"),
        ("\n    try:\n        x\n", "    finally:\n        y"),
        ("\n    try:\n", "        x\n    except E:\n        y"),
        ("\n    @d\n", "    def g(): pass"),
        ("\n    if x:\n", "        y"),
        ("\n    if x:\n        y\n", "    else:\n        z"),
        ("\n    for x in y:\n        z\n", "    else:\n        z"),
        ("\n    with (a as b,\n", "          c as d):\n        pass"),
        ("\n    def g():\n        nonlocal z\n", "    z = 1"),
        ("\n    # )\n", "    pass"),
        ("  # -*- coding: nonsense -*-\n", "    pass"),
        ("\n    x = 1\n\f", "    y = 2"),
        ("\n    x = 1\n", "y = )"),
    ],
)
def test_a_line_that_a_continuation_completes(prefix: str, rest: str) -> None:
    assert hopeless("compiles", prefix) == [False]
    if rest:
        assert satisfies("compiles", prefix + rest) == [True]


@pytest.mark.parametrize(
    "prefix",
    [
        "\n    x=1\n",
        "\n    x = 1 \n    y = 2\n",
        "\n    x = 1\n    \n    y = 2\n",
        f"\n{LONG}\n",
        "\n\tx = 1\n",
        "\n  x = 1\n",
        "\n    x = f(1,\n       2)\n",
        "\n    x = '\\d'\n",
        "\n    l = 1\n",
        "\n    x = 1;\n",
        "\n    x = 1\n\n\n    y = 2\n",
        "\n    x = 1\n    def g():\n        pass\n",
        "\n    @d\n\n    def g():\n",
        "\n    x = 1 # c\n",
        "\n    if x == None:\n",
        "\n    '''\n    a \n    '''\n",
        "\n        x = 1\n    y = 2\n  z = 3\n",
        "\n    x = 1\n    y = (1,\n         2 )\n    z",
    ],
)
def test_a_violation_in_a_complete_line(prefix: str) -> None:
    assert hopeless("pep8_clean", prefix) == [True]


@pytest.mark.parametrize(
    ("prefix", "rest"),
    [
        ("\n    x=1", ""),  # the line is not complete, and it is left to the constraint
        ("\n    x = 1 \n", "y"),  # trailing blanks are stripped where the function ends
        ("\n    x = 1\n    \n", "y"),
        ("\n    x = 1\n\n\n\n\n", "y"),
        ("\n    x = f(1,\n       2\n", "       )  # noqa"),
        ("\n    if x == None:  # noqa\n", "        pass"),
        ("\n    if (x ==\n            None and\n", "            y):  # noqa\n        pass"),
        (f"\n{LONG}  # noqa\n", "    y = 1"),
        (f"\n    '''\n{LONG}\n", "    '''  # noqa"),
        ("\n    '''\n    a \n", "    '''  # noqa"),
        ("\n    x = 1\n    def g():\n", ""),  # whether it has one line is not known
        ("\n    def g(): return 1\n    def h(): return 2\n", "    x = 1"),
        ("\n    x = 1\n    @d\n", "    def g(): return 1"),
        ("\n    x = 1\n    def g(\n            a):\n", ""),
        ("\n    x = {\n        'a': 1,\n", "    }"),
        ("\n    x = 1\n    y=", ""),
        ("\n\n    x = 1\n\n", "    y = 2"),
    ],
)
def test_a_line_that_may_still_be_clean(prefix: str, rest: str) -> None:
    assert hopeless("pep8_clean", prefix) == [False]
    if rest:
        assert satisfies("pep8_clean", prefix + rest) == [True]


def test_a_function_that_has_ended_is_left_to_the_constraint() -> None:
    for name in RULES:
        assert hopeless(name, "\n    x = )\ny") == [False]


def test_lines_above_the_signature_are_no_end_of_the_function() -> None:
    above = "import os\nX = 1\n\n\ndef f(a):"
    for name, wrong in (("compiles", "\n    x = )\n"), ("pep8_clean", "\n    x=1\n")):
        assert hopeless(name, wrong, "\n    x = 1\n", signature=above) == [True, False]


def test_a_text_that_exhausts_the_check_is_left_to_the_constraint() -> None:
    for name in RULES:
        assert hopeless(name, "\n    x = )\n" * 20_000) == [False]
    assert hopeless("compiles", "\n    x = " + "(" * 150 + "\n", "\n    x = '\ud800'\n") == [False, False]


def test_the_signature_column_and_chats() -> None:
    message = [{"role": "assistant", "content": "\n    x = )\n"}]
    assert cannot_compile(["irrelevant ("], [message], signature=[SIGNATURE]) == [True]
    assert cannot_be_clean(["irrelevant ("], [message], signature=[SIGNATURE + " # c"]) == [True]


# --- no pruned prefix has a satisfying continuation ---

VOCABULARIES = {
    "strings": ("compiles", ("\n    ", "x", "'", '"""', "\\\n", "#")),
    "formatted": ("compiles", ("\n    ", "f'", "'", "{", "}", "f'''")),
    "brackets": ("compiles", ("\n    ", "x", "(", ")", " = ", "\n")),
    "blocks": ("compiles", ("\n    try:", "\n    except E:", "\n    else:", "\n    if x:", "\n        x", "\n    x")),
    "indents": ("compiles", ("\n", "    ", "x", "if x:", "\f", "\t")),
    "ends": ("pep8_clean", ("\n", "    ", "x = 1", "  # noqa", "y", "\t")),
    "nested": ("pep8_clean", ("\n    def g():", " pass", "\n        pass", "\n    x = 1", "\n    @d", "\n")),
    "continued": ("pep8_clean", ("\n    x = (1,", "\n         2", "\n", ")", "  # noqa", "\n    y = 2")),
    "quoted": ("pep8_clean", ('\n    """', '"""', " \n", "x" * 45, " ", "  # noqa")),
}
"""Symbols whose sequences are looked at, all of them up to a length."""


@pytest.mark.parametrize("length", [4, pytest.param(6, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ordinary(VOCABULARIES, "strings", "brackets", "indents", "quoted"))
def test_every_continuation_of_small_vocabularies(kind: str, length: int) -> None:
    name, symbols = VOCABULARIES[kind]
    sequences = [word for count in range(1, length + 1) for word in product(symbols, repeat=count)]
    verdicts = satisfies(name, *("".join(word) for word in sequences))
    satisfying = [word for word, b in zip(sequences, verdicts, strict=True) if b]
    begun = {word[:count] for word in satisfying for count in range(len(word) + 1)}
    prefixes = sorted(begun)
    found = hopeless(name, *("".join(word) for word in prefixes))
    assert [prefix for prefix, wrong in zip(prefixes, found, strict=True) if wrong] == []
    others = ["".join(word) for word in sequences if word not in begun]
    assert sum(hopeless(name, *others)) > 10, "some are pruned"


FRAGMENTS = st.sampled_from(
    [
        *"xyl1=()[]{},:'\"\\#.+-*@;\n \t\r\f$é", "\n    ", "\n        ", '"""', "'''", "f'", "f'''", "{x}", "\\\n",
        "# noqa", "if x:", "else:", "elif y:", "try:", "except E:", "finally:", "for x in y:", "while x:",
        "with x as y:", "return ", "def g():", "async def g():", "class A:", "@d", "pass", "lambda: ", "not ", " in ",
        " is ", "await ", "yield ", "import os", "from a import (", "match x:", "case 1:", "nonlocal z", "global z",
        " = ", " == ", ":=", "->", "\n\n", "\n    x = 1", "\n    if x:\n        y = 2", "\n    else:\n        pass",
        "\n    # c", "\n    def h():\n        pass",
    ]
)  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=150)
@given(prefix=st.lists(FRAGMENTS, max_size=7), rest=st.lists(st.lists(FRAGMENTS, max_size=4), max_size=6))
def test_no_continuation_of_a_pruned_prefix_satisfies(name: str, prefix: list[str], rest: list[list[str]]) -> None:
    begun = "\n    " + "".join(prefix)
    if hopeless(name, begun) == [True]:
        bodies = [begun + "".join(more) for more in rest]
        bodies += [begun + end for end in ("", "x", "\n", "\nx", "\n    pass", "'", '"""', ")", "]", "}", "  # noqa")]
        assert not any(satisfies(name, *bodies))


def beginnings(body: str) -> list[str]:
    """The text up to each line, and a character more and less."""
    ends = [place + 1 for place, character in enumerate(body) if character in "\r\n"]
    return [body[:end] for end in sorted({cut for end in ends for cut in (end - 1, end, end + 1)})]


@settings(max_examples=100)
@given(data=st.data())
def test_functions_with_a_few_odd_characters_are_pruned_only_if_they_fail(data: st.DataObject) -> None:
    function = data.draw(st.sampled_from(short_functions()))
    lines = function.body.split("\n")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(lines) - 1))
        column = data.draw(st.integers(0, len(lines[place])))
        lines[place] = lines[place][:column] + data.draw(FRAGMENTS) + lines[place][column:]
    body = "\n".join(lines)
    for name in RULES:
        if satisfies(name, body, signature=function.signature) == [True]:
            assert not any(hopeless(name, *beginnings(body), signature=function.signature))


def functions_of(files: list[Path], most_lines: int) -> Iterator[Definition]:
    for file in files:
        try:
            found = definitions(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        yield from (function for function in found if function.body.count("\n") <= most_lines)


@functools.cache
def short_functions() -> list[Definition]:
    library = standard_library()
    names = ("argparse.py", "dataclasses.py", "shlex.py", "textwrap.py", "typing.py")
    return list(functions_of([library / name for name in names], 25))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_no_beginning_of_a_satisfying_function_is_pruned(whole: bool) -> None:
    """The functions of Python's own library; every eighth short one of some of its modules."""
    files = sorted(python_files(standard_library()))
    functions = list(functions_of(files, 100)) if whole else short_functions()[::8]
    counts = dict.fromkeys(RULES, 0)
    for function in functions:
        for name in RULES:
            if satisfies(name, function.body, signature=function.signature) == [True]:
                counts[name] += 1
                found = beginnings(function.body)
                assert not any(hopeless(name, *found, signature=function.signature)), (name, function)
    assert min(counts.values()) > (10_000 if whole else 17), counts


@pytest.mark.parametrize("count", [10, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_no_satisfying_sample_of_the_base_is_pruned(count: int) -> None:
    """At any of its tokens; ``count`` samples for each constraint."""
    config = CDPGConfig(max_completion_length=128, rows_per_pass=512, device="cpu")
    model = load_model("code-tiny", config)
    rows, _ = COMPILABILITY.presets["tiny"].rows(Draw(0, COMPILABILITY.usable))
    contexts = [Context(str(row["signature"]), dict(row), place) for place, row in enumerate(rows)]
    found = dict.fromkeys(RULES, 0)
    for number, start in enumerate(range(0, len(contexts), 8)):
        some = contexts[start : start + 8]
        prompts = model.encode(some, 128)
        drawn = draw_samples(model, some, prompts, 8, config, UniformStream(0, "prefixes", number), FunctionEnd())
        for place, (context, prompt) in enumerate(zip(some, prompts, strict=True)):
            signature = str(context.prompt)
            for sample, text in enumerate(drawn.texts[place]):
                ids = drawn.token_ids(place, sample)
                begun = [model.decode(prompt, ids[:length]) for length in range(1, len(ids))]
                for name in RULES:
                    if found[name] < count and satisfies(name, text, signature=signature) == [True]:
                        found[name] += 1
                        assert not any(hopeless(name, *begun, signature=signature)), (name, signature, text)
        if min(found.values()) >= count:
            return
    pytest.fail(f"the contexts do not suffice: {found}")
