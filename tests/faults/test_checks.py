"""Every built-in check on texts that are known to break it, and on thousands that might; calls that hang."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import naughty
from cdpg.constraints.judge import Judge, Verdicts
from cdpg.contexts.contexts import Context
from cdpg.sandbox.limits import Limits
from cdpg.sandbox.pool import Pool
from cdpg.tasks.code import constraint as python_code
from cdpg.tasks.summarization import constraint as entities
from cdpg.tasks.translation import constraint as numerals
from hostile import BAD, fuzzed
from rounds import ordinary

CONSTRAINTS = (
    python_code.compiles,
    python_code.pep8_clean,
    numerals.numerals_as_digits,
    entities.entities_from_source,
)
MEASURES = (
    python_code.compile_outcomes,
    python_code.pep8_codes_of,
    python_code.ast_nodes_of,
    entities.labelled_entities,
)
LIMITS = Limits(workers=2, seconds=10.0, megabytes=1024)
SHORT = Limits(workers=2, seconds=3.0, megabytes=256)
QUICK = Limits(workers=2, seconds=0.3, megabytes=256)
"""Some 150 milliseconds of computing, which every text that exhausts a check spends: good ones take five."""
SLACK = 0.5
SOURCE = "Barack Obama met Angela Merkel in Paris. Two of the United Nations' seven envoys flew to Texas with Google."


class Watch(threading.Thread):
    """The most memory that any process ever had which this one has started since, in megabytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0
        self._before = set(_family(os.getpid()))
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.02):
            for pid in set(_family(os.getpid())) - self._before:
                with contextlib.suppress(OSError, StopIteration, ValueError):
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    self.peak = max(self.peak, int(next(x for x in lines if x.startswith("VmHWM")).split()[1]) / 1024)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def _family(pid: int) -> list[int]:
    try:
        children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [inner for child in children for inner in _family(child)]


@contextlib.contextmanager
def unharmed(limits: Limits) -> Iterator[None]:
    """The workers stay under their cap, and this process does not grow."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Watch() as watch:
        yield
    # What a worker has before it starts: an interpreter, and at most spaCy with its model.
    assert watch.peak < limits.megabytes * 9 / 8 + 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def slowdown() -> float:
    """How much longer than its computing time anything takes now, because other programs want the cores too."""
    wall, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < 1.0:
        pass
    return time.monotonic() - wall


@contextlib.contextmanager
def judging(constraint: Callable[..., Any], limits: Limits) -> Iterator[Callable[[Sequence[str]], Verdicts]]:
    """Judges texts as bodies of a function, or as they are."""
    code = constraint in (python_code.compiles, python_code.pep8_clean)
    prompt = "def f():" if code else SOURCE
    judge = Judge(constraint, limits)

    def verdicts(texts: Sequence[str]) -> Verdicts:
        bodies = ["\n" + textwrap.indent(text, "    ") if code else text for text in texts]
        return judge.collect(judge.submit([Context(prompt, {}, 1)] * len(texts), bodies, [[0]] * len(texts)))

    try:
        yield verdicts
    finally:
        judge.close()


def judged(constraint: Callable[..., Any], texts: Sequence[str], limits: Limits) -> Verdicts:
    """On a busy machine a text may wait longer for a core than its time limit: then it is judged anew, with more time.

    One that hangs, and uses no computing time, is late again.
    """
    with judging(constraint, limits) as verdicts_of:
        first = verdicts_of(texts)
    late = [place for place, failure in first.failures.items() if failure.kind == "timeout"]
    if not late or limits is not QUICK:
        return first
    again = judged(constraint, [texts[place] for place in late], SHORT)
    b = list(first.b)
    for place, verdict in zip(late, again.b, strict=True):
        b[place] = verdict
    failures = {place: failure for place, failure in first.failures.items() if place not in late}
    failures |= {late[place]: failure for place, failure in again.failures.items()}
    return replace(first, b=b, failures=failures, exhausted=first.exhausted + again.exhausted)


@pytest.mark.parametrize("constraint", ordinary(CONSTRAINTS, *CONSTRAINTS[0:3:2]), ids=lambda one: one.__name__)
def test_bad_inputs_get_a_verdict(constraint: Callable[..., Any]) -> None:
    with unharmed(QUICK):
        verdicts = judged(constraint, list(BAD.values()), QUICK)
    assert verdicts.failures == {}
    assert all(verdict in (0.0, 1.0) for verdict in verdicts.b)
    if constraint is python_code.compiles:
        satisfied = dict(zip(BAD, verdicts.b, strict=True))
        assert satisfied["no blank"] == satisfied["calls"] + 1 == 1.0
        assert not any(satisfied[name] for name in ("finally, nested in a loop", "many more marks to sort", "list"))
        assert verdicts.exhausted["size"] >= 3
        assert verdicts.exhausted["cpu"] + verdicts.exhausted["memory"] >= 3


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("function", MEASURES, ids=lambda function: function.__name__)
def test_each_bad_input_ends_in_time(function: Callable[..., Any]) -> None:
    """With the limits that runs have, one at a time, text as it stands."""
    pool = Pool([function], LIMITS)
    pool.wait_until_ready()
    late = {}
    try:
        with unharmed(LIMITS):
            for name, text in BAD.items():
                started = time.monotonic()
                outcome = pool.collect(pool.submit(function, [text]))
                seconds = time.monotonic() - started
                if seconds > LIMITS.seconds + SLACK and seconds / slowdown() > LIMITS.seconds + SLACK:
                    late[name] = seconds
                assert {failure.kind for failure in outcome.failures.values()} <= {"cpu", "memory", "crashed"}, name
    finally:
        pool.close()
    assert late == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint.__name__)
def test_ten_thousand_fuzzed_texts_get_a_verdict(constraint: Callable[..., Any]) -> None:
    with unharmed(LIMITS):
        verdicts = judged(constraint, fuzzed(10_000), LIMITS)
    assert verdicts.failures == {}
    assert all(verdict in (0.0, 1.0) for verdict in verdicts.b)


@pytest.mark.parametrize(
    ("constraint", "count"),
    [
        *((constraint, 20) for constraint in CONSTRAINTS[:-1]),  # the last loads spaCy in every worker
        *(pytest.param(constraint, 400, marks=pytest.mark.exhaustive) for constraint in CONSTRAINTS),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_fuzzed_texts_get_a_verdict(constraint: Callable[..., Any], count: int) -> None:
    texts = fuzzed(count, seed=1)
    # Another order, and so other neighbours and other workers.
    order = random.Random(2).sample(range(len(texts)), len(texts))
    with unharmed(SHORT), judging(constraint, SHORT) as verdicts_of:
        verdicts = verdicts_of(texts)
        again = verdicts_of([texts[place] for place in order])
    assert verdicts.failures == {}
    assert again.b == [verdicts.b[place] for place in order]


SOME_BAD = ("finally, nested in a loop", "many more marks to sort", "list", "blanks in parentheses", "no blank")
"""What exhausts memory, time or size of one of the checks on code, and what does not."""


@pytest.mark.parametrize("bad", [SOME_BAD, pytest.param(tuple(BAD), marks=pytest.mark.exhaustive)], ids=["some", "all"])
def test_verdicts_do_not_depend_on_the_surroundings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[str, ...]
) -> None:
    """Home directory, warnings, busy cores: bad texts among good ones, some of which use all the time they may.

    The short form leaves it to the other tests to keep the cores busy.
    """
    texts = [
        *(BAD[name] for name in bad),
        "return 1",
        "x = 1\nreturn x",
        "return  1",
        "return '\\d'",
        "assert (1, 2)",
        "return 1 is 1",
    ]
    limits = QUICK if bad is SOME_BAD else SHORT
    calm = {constraint: judged(constraint, texts, limits).b for constraint in CONSTRAINTS[:2]}
    assert calm[python_code.compiles][-6:] == [1.0] * 6
    assert calm[python_code.pep8_clean][-6:-3] == [1.0, 1.0, 0.0]
    (tmp_path / ".config").mkdir()
    (tmp_path / ".config" / "pycodestyle").write_text("[pycodestyle]\nignore = E,W\nmax-line-length = 5\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.cfg").write_text("[pycodestyle]\nignore = E,W\n")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(0 if bad is SOME_BAD else 4)]
    try:
        for constraint, verdicts in calm.items():
            assert judged(constraint, texts, limits).b == verdicts
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seconds", [2.0, 10.0])
def test_hanging_calls_cost_no_more_than_their_share(seconds: float) -> None:
    """One in a hundred of an epoch's samples hangs: the time lost is below failures × limit ÷ workers.

    The short form is in test_sandbox.py: hanging samples are waited for side by side.
    """
    limits = Limits(workers=2, seconds=seconds, megabytes=256)
    places = random.Random(3).sample(range(2048), 20)
    good = ["good"] * 2048
    bad = ["hang" if place in places else "good" for place in range(2048)]
    pool = Pool([naughty.lengths], limits)
    times = []
    try:
        pool.collect(pool.submit(naughty.lengths, good))
        for batch in (good, bad):
            started = time.monotonic()
            numbers = [pool.submit(naughty.lengths, batch[start : start + 256]) for start in range(0, 2048, 256)]
            failures = sum(len(pool.collect(number).failures) for number in numbers)
            times.append(time.monotonic() - started)
    finally:
        pool.close()
    assert failures == 20
    assert times[1] - times[0] < failures * limits.seconds / limits.workers
