"""The checks of Python functions: what is cut, what compiles, what is clean, and that nothing around them matters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpg.tasks.code import constraint as python_code
from cdpg.tasks.code.constraint import (
    FunctionEnd,
    ast_nodes,
    compile_outcome,
    compile_outcomes,
    compiles,
    function_source,
    pep8_clean,
    pep8_codes,
)

SIGNATURE = "def f(x):"


def judged(body: str, signature: str = SIGNATURE) -> bool:
    return compiles([signature], [body])[0]


def clean(body: str, signature: str = SIGNATURE) -> bool:
    return pep8_clean([signature], [body])[0]


@pytest.mark.parametrize("check", [compiles, pep8_clean])
def test_chats_are_read_from_their_messages(check: Callable[..., list[bool]]) -> None:
    prompts = [[{"role": "user", "content": SIGNATURE}]] * 2
    answers = [[{"role": "assistant", "content": body}] for body in ("\n    return x", "\n    return (")]
    assert check(prompts, answers) == [True, False]
    asked = [[{"role": "user", "content": "Write f."}], SIGNATURE]
    assert check(asked, [answers[0], "\n    return x"], signature=[SIGNATURE, None]) == [True, True]


@pytest.mark.parametrize(
    ("body", "source"),
    [
        ("\n    return x", "def f(x):\n    return x\n"),
        ("\n    return x\n\n\n", "def f(x):\n    return x\n"),
        ("\n    return x  \t\n  \n", "def f(x):\n    return x\n"),
        ("\n    return x\nf(1)\n", "def f(x):\n    return x\n"),
        ("\n    a\n\n    b\n#c\n    d", "def f(x):\n    a\n\n    b\n"),
        ("\r\n    a\r\nb", "def f(x):\r\n    a\n"),
        ("\r    a\rb", "def f(x):\r    a\n"),
        ("\n    a\n\fb", "def f(x):\n    a\n"),
        ("\n    a\n    \fb", "def f(x):\n    a\n"),  # a form feed starts the indentation anew
        ("\n    a\n    \f  b", "def f(x):\n    a\n    \f  b\n"),
        ("\n    a\n\xa0", "def f(x):\n    a\n"),
        ("\n    a\xa0", "def f(x):\n    a\xa0\n"),  # not a blank of Python's
        ("\n\ta", "def f(x):\n\ta\n"),
        (" return x", "def f(x): return x\n"),
        ("", "def f(x):\n"),
    ],
)
def test_function_is_cut_at_its_end(body: str, source: str) -> None:
    assert function_source(SIGNATURE, body) == source


def test_lines_above_the_signature_are_kept() -> None:
    prompt = "import os\n\n\ndef g():\n    pass\n\n\ndef f(x):"
    assert function_source(prompt, "\n    return x\ny") == prompt + "\n    return x\n"
    assert function_source("def f(x):\n", "    return x\ny") == "def f(x):\n    return x\n"
    assert function_source("def f(x):\n", "return x") == "def f(x):\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("\n    return x", True),
        (" return x", True),
        ("\n\treturn x", True),
        ("\n    return x\nthis is not (judged", True),
        ('\n    """What it does."""', True),
        ("\n    ...", True),
        ("\n    pass  # why", True),
        ("\n    return '\\d'", True),  # a SyntaxWarning is no error
        ("\n    return x is 1", True),
        ("", False),
        ("\n", False),
        ("\n    # nothing", False),
        (" # nothing", False),
        ("\n    # nothing\n    # more", False),
        ("\n    return (x", False),
        ("\n    if x:", False),
        ("\n    if x:\n        # nothing", False),
        ("\n    return x +", False),
        ('\n    """open', False),
        ("\n        a\n    b", False),
        ("\n    if x:\n\treturn x", False),  # tabs and spaces that do not agree
        ("\n    a\x00b", False),
        ("\n    a = '\ud800'", False),
        ("\n    break", False),
        ("\n    yield x\n    return\n    nonlocal x", False),
        ("\n    return " + "-" * 100_000 + "1", False),
        ("\n    return " + "x " * 1493, False),
        ("\n    return " + "(" * 500 + ")" * 500, False),
        ("\n    return " + "1" * 5000, False),
    ],
)
def test_compiles(body: str, expected: bool) -> None:
    assert judged(body) is expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("\n    return x", True),
        ('\n    """What it does."""', True),
        ("\n    return (x", False),
        ("\n    return x ", True),  # trailing blanks of the function are stripped
        ("\n    y = x \n    return y", False),  # W291
        ("\n\treturn x", False),  # W191
        ("\n    y=x", False),  # E225
        ("\n    return '" + "a" * 80 + "'", False),  # E501
        ("\n    y = 1\n\n\n    return y", False),  # E303
        ("\n    return x\ny=1", True),
        (" return x", True),  # E704 is not among pycodestyle's defaults
        ("", False),
        ("\n    # nothing", False),
        ("  # nothing", False),
    ],
)
def test_pep8(body: str, expected: bool) -> None:
    assert clean(body) is expected


NOTHINGS = [
    *"\xa0\x00\u200b\u3000\ufeff\u2028\x85\x1c\ud800²٣$?!.-~*@;:,=)`'\"\\",
    "..",
    "$ x",
    "\xa0x",
    "($)",
    "$\n    # why",
]
STATEMENTS = [
    "x", "_", "1", ".5", "...", "-x", "*a, b = c", "@name", "()", "[]", "{}", "(x)", "((1, 2))", "'a'", "''", '"""a"""',
    "'it\\'s'", "'a\\\n    b'", "é = 1", "変数", "return a b", "x $", "\\\n    x", "$\n    x", "(\n    x)",
]  # fmt: skip


@pytest.mark.parametrize("text", NOTHINGS)
def test_a_body_that_says_nothing_is_not_clean(text: str) -> None:
    assert not python_code.has_statement(f"\n    {text}")
    assert not clean(f"\n    {text}")
    assert not clean(f" {text}")


@pytest.mark.parametrize("text", STATEMENTS)
def test_a_statement_need_not_compile(text: str) -> None:
    for body in (f"\n    {text}", f" {text}", f"\r\n\t{text}"):
        assert python_code.has_statement(body)


@pytest.mark.parametrize("line", ["\n(", "\n'a", "\n'\\'", "(", " ", "\n" + "( " * 50, "\n \xa0"])
def test_looking_for_a_statement_takes_time_that_grows_with_the_length_alone(line: str) -> None:
    started = time.process_time()
    assert not python_code.has_statement((line * 100_000)[:100_000])
    assert time.process_time() - started < 2


def test_what_pycodestyle_fails_on_is_not_clean() -> None:
    assert pep8_codes('{\n"\\\nf') != []
    assert pep8_codes(']\n"\\\n#') != []
    assert clean('\n    {\n     "\\\n     f') is False


def test_a_signature_of_bad_style_cannot_be_clean() -> None:
    assert clean("\n    return x", "def f(x = 1):") is False
    assert judged("\n    return x", "def f(x = 1):") is True


def test_codes_are_sorted_with_repeats() -> None:
    assert pep8_codes("def f(x):\n    y=x\n    z=1 \n    return y\n") == ["E225", "E225", "W291"]
    assert pep8_codes("def f(x):\n    return x\n") == []


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("\n    return x", "ok"),
        ("", "incomplete"),
        ("\n    if x:", "incomplete"),
        ("\n    return x)", "SyntaxError: unmatched ')'"),
        ("\n    return 'a", "SyntaxError: unterminated string literal"),
        ("\n        a\n    b", "IndentationError: unindent does not match any outer indentation level"),
        ("\n    if x:\n    pass", "IndentationError: expected an indented block after 'if' statement"),
        ("\n    global x", "SyntaxError: name 'name' is parameter and global"),
        ("\n    return “x”", "SyntaxError: invalid character"),
        ("\n    a = '\ud800'", "UnicodeEncodeError"),
    ],
)
def test_outcome_names_the_kind_of_error(body: str, outcome: str) -> None:
    assert compile_outcome(function_source(SIGNATURE, body)) == outcome


@pytest.mark.parametrize("above", ["import os\n\n\n", "x = 1\ny = 2\n", "def g():\n    pass\n\n\n"])
def test_statements_above_the_signature_compile_with_the_function(above: str) -> None:
    assert judged("\n    return x", above + SIGNATURE)
    assert compile_outcome(above + SIGNATURE + "\n    return x\n") == "ok"


def test_nodes_of_the_tree() -> None:
    # Module, FunctionDef, arguments, arg, Return, Name, Load
    assert ast_nodes("def f(x):\n    return x\n") == 7
    assert ast_nodes("def f(x):\n    return (x\n") is None
    assert ast_nodes("a\x00b") is None


def test_batches_keep_their_order_and_take_other_columns() -> None:
    bodies = ["\n    return x", "\n    return (x", "\n    pass"]
    assert compiles([SIGNATURE] * 3, bodies, reference=["", "", ""]) == [True, False, True]
    assert pep8_clean([SIGNATURE] * 3, bodies, reference=["", "", ""]) == [True, False, True]
    assert compiles([], []) == [] and pep8_clean([], []) == []


def test_the_signature_column_says_what_is_judged() -> None:
    prompts = ["Complete this function:\ndef f(x):"]
    assert compiles(prompts, ["\n    return x"]) == [False]
    assert compiles(prompts, ["\n    return x"], signature=[SIGNATURE]) == [True]
    assert pep8_clean(prompts, ["\n    return x"], signature=[SIGNATURE]) == [True]
    assert pep8_clean(prompts, [""], signature=[SIGNATURE]) == [False]


def at_depth(depth: int, work: Callable[[], list[bool]]) -> list[bool]:
    return work() if depth == 0 else at_depth(depth - 1, work)


def test_call_depth_does_not_matter() -> None:
    # From the top, Python takes expressions of some hundred levels; deep down it would take fewer.
    bodies = ["\n    return " + "-" * depth + "1" for depth in range(100, 3000, 50)]
    signatures = [SIGNATURE] * len(bodies)
    shallow = compiles(signatures, bodies)
    assert True in shallow
    assert at_depth(700, lambda: compiles(signatures, bodies)) == shallow


@pytest.mark.parametrize("action", ["error", "always", "default", "ignore"])
def test_warnings_filter_does_not_matter(action: str, capfd: pytest.CaptureFixture[str]) -> None:
    body = "\n    assert (x, 'm')\n    return x is 1, '\\d', 1if x else 2"
    with warnings.catch_warnings(record=False):
        warnings.simplefilter(action)  # type: ignore[arg-type]
        filters = list(warnings.filters)
        assert judged(body) is True
        assert ast_nodes(function_source(SIGNATURE, body)) is not None
        assert warnings.filters == filters
    assert capfd.readouterr() == ("", "")


def test_threads_do_not_matter() -> None:
    bodies = ["\n    return x is 1, '\\d'", "\n    return (x"] * 50
    results: list[list[bool]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [
            threading.Thread(target=lambda: results.append(compiles([SIGNATURE] * 100, bodies))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [[True, False] * 50] * 8


def test_user_configuration_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "pycodestyle").write_text("[pycodestyle]\nignore = E225\nnonsense = 1\nmax-line-length = 200\n")
    (tmp_path / "setup.cfg").write_text("[pycodestyle]\nignore = E225\n")
    program = "from cdpg.tasks.code.constraint import pep8_codes; assert pep8_codes('a=1\\n') == ['E225']"
    sources = str(Path(python_code.__file__).parents[2])
    environment = os.environ | {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": sources}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_not_blocked_by_a_check_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has turned warnings off, which one check does at a time, and waits for the child to be judged."""
    under_way, judged_by_child, parent = threading.Event(), threading.Event(), os.getpid()
    turn_off = warnings.simplefilter

    def wait(*arguments: Any) -> None:
        if os.getpid() == parent:
            under_way.set()
            assert judged_by_child.wait(60)
        turn_off(*arguments)

    monkeypatch.setattr(warnings, "simplefilter", wait)
    check = threading.Thread(target=judged, args=("\n    return x",))
    check.start()
    assert under_way.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if judged("\n    return x") else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    judged_by_child.set()
    check.join()
    assert status == 0


def test_function_end_stops_at_the_first_unindented_line() -> None:
    rule = FunctionEnd()
    for running in ("", " return x", "\n", "\n    return x\n", "\n    return x\n\n  \n\t", "\n    a\r\n    b", "\n\f"):
        assert rule.cut(running) is None, running
    for ended in ("\nx", "\n    a\n#", "\n    a\n\n)", "\r\nx", "\n    a\n\fx", "\n    a\n  \fx", "\n�"):
        assert rule.cut(ended) is not None, ended
    assert rule.watch == frozenset("\n\r\f")


texts = st.text(st.sampled_from(list("\n\r\f\t a#(\"'\\:")), max_size=30)


@given(texts, texts)
def test_function_end_agrees_with_the_cut_and_never_goes_back(first: str, second: str) -> None:
    rule = FunctionEnd()
    if rule.cut(first) is not None:
        assert rule.cut(first + second) == rule.cut(first)
        assert function_source(SIGNATURE, first) == function_source(SIGNATURE, first + second)
    else:
        assert function_source(SIGNATURE, first) == (SIGNATURE + first).rstrip(" \t\f\r\n") + "\n"


@given(texts)
def test_function_end_changes_only_where_it_says(text: str) -> None:
    rule = FunctionEnd()
    for end in range(2, len(text) + 1):
        if (rule.cut(text[:end]) is None) != (rule.cut(text[: end - 1]) is None):
            assert rule.watch & set(text[end - 2 : end])


@settings(max_examples=40)
@given(st.lists(st.text(max_size=40), max_size=5))
def test_any_text_gets_a_verdict_that_does_not_depend_on_its_neighbours(bodies: list[str]) -> None:
    signatures = [SIGNATURE] * len(bodies)
    assert compiles(signatures, bodies) == [judged(body) for body in bodies]
    assert pep8_clean(signatures, bodies) == [clean(body) for body in bodies]
    sources = [function_source(SIGNATURE, body) for body in bodies]
    assert [outcome == "ok" for outcome in compile_outcomes(sources)] == compiles(signatures, bodies)
