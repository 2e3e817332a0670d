"""The constraints of the code tasks: a generated Python function compiles, or has no PEP8 violation.

The judged text is [c, x], the signature with its completion, cut at the function's end (the paper's appendix A.4).
Nothing is executed. The verdict does not depend on the thread, the call depth, the warnings filter or the user's
configuration, and nothing is printed. Edge cases:

* A body without a statement (empty, blank, or only comments or invalid characters) satisfies neither constraint; a
  docstring is a statement.
* A function cut at the length limit is judged like any other; *incomplete* (codeop returned None) does not compile.
* Tabs indent as in Python; PEP8 forbids them (W191, E101).
* NUL characters, lone surrogates, and text that exhausts the parser (MemoryError, RecursionError) do not compile.
* Text on which pycodestyle itself fails is not clean.
* Text of more than ``MAX_CHARACTERS`` characters is not read: it neither compiles nor is it clean.
"""

from __future__ import annotations

import ast
import codeop
import contextvars
import functools
import io
import keyword
import os
import re
import threading
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cdpg.constraints.texts import as_text
from cdpg.errors import UserError
from cdpg.sandbox.functions import note_exhaustion, text_check

T = TypeVar("T")

INCOMPLETE = "incomplete"
OK = "ok"
TOO_LONG = "too long"
MAX_CHARACTERS = 100_000
"""Far more than a model writes. The limit exists because some checks take time quadratic in the length."""

_BLANK = " \t\f\r\n"
# Python ends a line at \n, \r or \r\n, and starts the indentation anew after a form feed.
_UNINDENTED_LINE = re.compile(r"[\r\n](?:[ \t\f]*\f)?(?=[^ \t\f\r\n])")
# How a statement begins: opening brackets, unary operators, @ or *, and then a name, a number, a string, an ellipsis or
# an empty pair of brackets. The rest is ignored. Whether a non-ASCII letter begins a name is checked later.
_STATEMENT_START = re.compile(
    r"""(?:^|[\r\n])[-+~*@(\[{ \t\f]*
    (?:[A-Za-z_] | \.?[0-9] | \.\.\. | \([ \t\f]*\) | \[[ \t\f]*\] | \{[ \t\f]*\}
    | '(?:[^'\\\r\n]|\\[\s\S])*' | "(?:[^"\\\r\n]|\\[\s\S])*" | (?P<letter>[^\x00-\x7f]))""",
    re.VERBOSE,
)
_BEGIN_A_NAME = frozenset({"Lu", "Ll", "Lt", "Lm", "Lo", "Nl"})
_INCOMPLETE: int | None = getattr(codeop, "PyCF_ALLOW_INCOMPLETE_INPUT", None)  # not in the first versions of 3.10
# The messages of a compiler that has come to the end. Python 3.12 has one of its own for formatted strings.
_AT_THE_END = re.compile(r"incomplete input|unterminated (?:triple-quoted|[ft]-string)")
_GUARD = threading.Lock()  # all threads share one warnings filter


def _renew_guard() -> None:
    """Replace the lock after a fork: another thread may have held it, and the child would wait forever."""
    global _GUARD
    _GUARD = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_guard)


class FunctionEnd:
    """Stopping rule for sampling: a completion ends with the first non-empty line that is not indented.

    The completion starts on the signature's own line, as the prompt has no line break after the colon.
    """

    watch: frozenset[str] = frozenset("\n\r\f")
    """The rule applies only if one of these characters is in the last two tokens."""

    def cut(self, completion: str) -> str | None:
        """The completion up to such a line; None if there is none yet."""
        end = _UNINDENTED_LINE.search(completion)
        return None if end is None else completion[: end.start()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionEnd)

    def __hash__(self) -> int:
        return hash(FunctionEnd)


def function_source(signature: str, body: str) -> str:
    """[c, x] cut at the function's end, trailing blanks stripped, one newline added."""
    text = signature + body
    # In a prompt with lines above the signature, the function is what follows the last of its lines.
    end = _UNINDENTED_LINE.search(text, len(signature.rstrip(_BLANK)))
    return text[: end.start() if end else None].rstrip(_BLANK) + "\n"


@text_check(columns=("signature",), watch="\r\n")
def cannot_compile(
    prompts: Sequence[Any], prefixes: Sequence[Any], *, signature: Sequence[Any] | None = None, **kwargs: Any
) -> list[bool]:
    """Where no completion that begins with the prefix compiles.

    The compiler reads the lines that are complete. Where it stops at an error before it has come to their end, it stops
    there whatever follows.
    """
    pairs = list(zip(_starts(prompts, signature), prefixes, strict=True))
    return _guarded(lambda: [_is_decided(start, prefix, _stops_the_compiler) for start, prefix in pairs])


@text_check(columns=("signature",), hopeless=cannot_compile)
def compiles(
    prompts: Sequence[Any], completions: Sequence[Any], *, signature: Sequence[Any] | None = None, **kwargs: Any
) -> list[bool]:
    """b = 1 where ``codeop.compile_command(signature + body, symbol="exec")`` returns a code object.

    If prompts hold more than the signature, the column ``signature`` holds the start of the function.
    """
    sources = _sources(_starts(prompts, signature), completions)
    return [outcome == OK for outcome in _guarded(lambda: [_compile_outcome(source) for source in sources])]


@text_check(prepare=lambda: _pycodestyle(), columns=("signature",), watch="\r\n")
def cannot_be_clean(
    prompts: Sequence[Any], prefixes: Sequence[Any], *, signature: Sequence[Any] | None = None, **kwargs: Any
) -> list[bool]:
    """Where every completion that begins with the prefix has a PEP8 violation.

    pycodestyle reads the lines that are complete. What it has found when it asks for the next line stays.
    """
    pairs = list(zip(_starts(prompts, signature), prefixes, strict=True))
    return _guarded(lambda: [_is_decided(start, prefix, _has_a_violation) for start, prefix in pairs])


@text_check(prepare=lambda: _pycodestyle(), columns=("signature",), hopeless=cannot_be_clean)
def pep8_clean(
    prompts: Sequence[Any], completions: Sequence[Any], *, signature: Sequence[Any] | None = None, **kwargs: Any
) -> list[bool]:
    """b = 1 where the body has a statement and pycodestyle, with its own defaults, finds no violation.

    If prompts hold more than the signature, the column ``signature`` holds the start of the function.
    """
    starts = _starts(prompts, signature)
    sources = _sources(starts, completions)
    bodies = [source[len(start.rstrip(_BLANK)) :] for start, source in zip(starts, sources, strict=True)]
    codes = pep8_codes_of(sources)
    return [has_statement(body) and found == [] for body, found in zip(bodies, codes, strict=True)]


def has_statement(body: str) -> bool:
    """Whether a line of the body, or the rest of the signature's line, begins like a Python statement.

    It need not compile, but blanks, comments and characters that begin no statement (``$``, a no-break space) do not
    count. Non-ASCII letters are those of Unicode 3.2, so that the verdict is the same in every version of Python.
    """
    begun = (match["letter"] for match in _STATEMENT_START.finditer(body))
    return any(letter is None or unicodedata.ucd_3_2_0.category(letter) in _BEGIN_A_NAME for letter in begun)


def compile_outcome(source: str) -> str:
    """``ok``, ``incomplete``, ``too long``, or the error's kind: ``SyntaxError: unmatched ')'``, ``MemoryError``, …

    Names, line numbers and characters are removed from the message, so that kinds can be counted.
    """
    return compile_outcomes([source])[0]


@text_check()
def compile_outcomes(sources: Sequence[str]) -> list[str]:
    """`compile_outcome` of each source."""
    return _guarded(lambda: [_compile_outcome(source) for source in sources])


@text_check()
def error_lines(sources: Sequence[str]) -> list[int | None]:
    """The line of the first error, from 1; None if there is no error or the compiler names no line."""
    return _guarded(lambda: [_error_line(source) for source in sources])


def pep8_codes(source: str) -> list[str] | None:
    """Codes of all PEP8 violations, sorted, with repeats; None if pycodestyle failed on the text."""
    return pep8_codes_of([source])[0]


@text_check(prepare=lambda: _pycodestyle())
def pep8_codes_of(sources: Sequence[str]) -> list[list[str] | None]:
    """`pep8_codes` of each source."""
    pycodestyle = _pycodestyle()
    options = _pycodestyle_defaults()

    def check() -> list[list[str] | None]:
        return [_pep8_codes(source, pycodestyle, options) for source in sources]

    return _guarded(check)


def ast_nodes(source: str) -> int | None:
    """Number of nodes in the syntax tree, the module's own included; None if there is no tree."""
    return ast_nodes_of([source])[0]


@text_check()
def ast_nodes_of(sources: Sequence[str]) -> list[int | None]:
    """`ast_nodes` of each source."""
    return _guarded(lambda: [_ast_nodes(source) for source in sources])


def _starts(prompts: Sequence[Any], signature: Sequence[Any] | None) -> list[str]:
    """The start of each function: its entry in the column ``signature``, else its prompt."""
    given = [None] * len(prompts) if signature is None else signature
    return [as_text(prompt if start is None else start) for start, prompt in zip(given, prompts, strict=True)]


def _sources(starts: Sequence[str], completions: Sequence[Any]) -> list[str]:
    return [function_source(start, as_text(body)) for start, body in zip(starts, completions, strict=True)]


def _is_decided(start: str, prefix: Any, fails: Callable[[str], bool]) -> bool:
    """Whether ``fails`` holds of the complete lines of [c, prefix], and so of every function that begins with them.

    If the function goes on, it begins with these lines as they are; if it ends here, their trailing blanks are
    stripped. A function that has ended is left to the constraint.
    """
    text = start + as_text(prefix)
    lines = text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
    if len(lines) > MAX_CHARACTERS or _UNINDENTED_LINE.search(text, len(start.rstrip(_BLANK))):
        return False
    return fails(lines.rstrip(_BLANK) + "\n") and fails(lines)


def _stops_the_compiler(lines: str) -> bool:
    """Whether there is an error before the end of these lines. Names are not resolved: later lines may bind them."""
    if _INCOMPLETE is None:
        return False
    try:
        compile(lines, "<function>", "exec", ast.PyCF_ONLY_AST | _INCOMPLETE, dont_inherit=True)
    except SyntaxError as error:
        return _AT_THE_END.search(str(error.msg)) is None
    except Exception:  # as in _compile_outcome; what exhausts the parser is left to the constraint
        return False
    return False


def _has_a_violation(lines: str) -> bool:
    """Whether there is a violation whatever line follows these."""
    options, checker = _pycodestyle_defaults(), _prefix_checker()
    report = _pycodestyle().BaseReport(options)
    # A nested function of one line needs no blank line before it. Whether it has more lines may not be known yet: the
    # line that follows here, and is never read, makes it such a function.
    known = [*io.StringIO(lines, newline=None).readlines(), "def following(): pass\n"]
    try:
        checker(lines=known, options=options, report=report).check_all()
    except _AsksForMore:
        return bool(report.messages)
    except Exception:  # left to the constraint
        return False
    return bool(report.messages)


class _AsksForMore(Exception):
    """All lines are read but the last, which is not a line of the text."""


@functools.lru_cache(maxsize=1)
def _prefix_checker() -> Any:
    """pycodestyle's checker, with an exception in place of the last line."""
    checker: Any = _pycodestyle().Checker

    class PrefixChecker(checker):  # type: ignore[misc]
        def readline(self) -> Any:
            if self.line_number >= self.total_lines - 1:
                raise _AsksForMore
            return super().readline()

    return PrefixChecker


def _compile_outcome(source: str) -> str:
    if len(source) > MAX_CHARACTERS:
        note_exhaustion("size")
        return TOO_LONG
    try:
        code = codeop.compile_command(source, symbol="exec")
    except SyntaxError as error:
        return f"{type(error).__name__}: {_message_kind(str(error.msg))}"
    except Exception as error:  # ValueError, OverflowError, MemoryError, RecursionError: the text is at fault
        _note(error)
        return type(error).__name__
    return INCOMPLETE if code is None else OK


def _error_line(source: str) -> int | None:
    if len(source) > MAX_CHARACTERS:
        return None
    try:
        compile(source, "<function>", "exec", dont_inherit=True)
    except SyntaxError as error:
        return error.lineno
    except Exception:  # as in _compile_outcome
        return None
    return None


def _note(error: Exception) -> None:
    if isinstance(error, (MemoryError, RecursionError)):
        note_exhaustion("memory" if isinstance(error, MemoryError) else "recursion")


def _ast_nodes(source: str) -> int | None:
    if len(source) > MAX_CHARACTERS:
        return None
    try:
        return sum(1 for _ in ast.walk(ast.parse(source)))
    except Exception:  # as in _compile_outcome
        return None


def _message_kind(message: str) -> str:
    """A compiler's message without names, line numbers and characters of the text."""
    message = re.sub(r"'([^\W\d]\w*)'", lambda name: name[0] if keyword.iskeyword(name[1]) else "'name'", message)
    message = re.sub(r"^(invalid (?:non-printable )?character).*", r"\1", message)
    message = re.sub(r" \(detected at line \d+\)| on line \d+| in position .*|;.*", "", message)
    return re.sub(r"\d+", "N", message)


def _pycodestyle() -> Any:
    try:
        import pycodestyle
    except ImportError as error:
        raise UserError("PEP8 checks need pycodestyle, which is not installed: pip install 'cdpg[tasks]'.") from error
    return pycodestyle


@functools.lru_cache(maxsize=1)
def _pycodestyle_defaults() -> Any:
    """pycodestyle's built-in options. A StyleGuide would read ~/.config/pycodestyle and print violations."""
    pycodestyle = _pycodestyle()
    options = pycodestyle.get_parser().parse_args([])[0]
    options.select, options.ignore = (), tuple(pycodestyle.DEFAULT_IGNORE.split(","))
    options.benchmark_keys = list(pycodestyle.BENCHMARK_KEYS)
    guide = pycodestyle.StyleGuide.__new__(pycodestyle.StyleGuide)
    guide.options = options
    options.ignore_code = guide.ignore_code
    options.physical_checks = guide.get_checks("physical_line")
    options.logical_checks = guide.get_checks("logical_line")
    options.ast_checks = guide.get_checks("tree")
    return options


def _pep8_codes(source: str, pycodestyle: Any, options: Any) -> list[str] | None:
    if len(source) > MAX_CHARACTERS:
        note_exhaustion("size")
        return None
    report = pycodestyle.BaseReport(options)  # counts, and prints nothing
    try:
        lines = io.StringIO(source, newline=None).readlines()
        pycodestyle.Checker(lines=lines, options=options, report=report).check_all()
    except Exception as error:  # an IndexError on odd strings, a RecursionError, …
        _note(error)
        return None
    return [code for code in sorted(report.messages) for _ in range(report.counters[code])]


def _guarded(work: Callable[[], T]) -> T:
    """Run in a new thread, with warnings off.

    Python's limit on nested expressions counts from the caller's depth; a new thread always starts at the same depth.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with _GUARD, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(work())
        except BaseException as error:
            failures.append(error)

    context = contextvars.copy_context()  # with the counter of exhaustion
    thread = threading.Thread(target=context.run, args=(run,), name="cdpg-python-check", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
