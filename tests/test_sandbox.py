"""Worker processes: whatever a function does, every sample gets an answer, and no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

import naughty
import prefix_rules
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.constraints.judge import Judge, Verdicts
from cdpg.contexts.contexts import Context
from cdpg.errors import RunError, UserError
from cdpg.evaluation.measures import Measured
from cdpg.sandbox.functions import reference_of
from cdpg.sandbox.limits import Limits
from cdpg.sandbox.pool import CannotStart, Pool
from cdpg.sandbox.protocol import as_plain, is_plain, pack, unpack
from cdpg.sandbox.reader import Reader
from cdpg.sandbox.worker_processes import WorkerProcess
from cdpg.storage.jsonl import JsonlFile, read_jsonl
from cdpg.system.distributed import Processes
from cdpg.tasks.code import constraint as python_code
from cdpg.training.failures import FailureLog
from enumeration import contexts_of, tabular
from noticed import noticed

QUICK = Limits(workers=2, seconds=1.0, megabytes=128)


@contextlib.contextmanager
def pool(*functions: Any, limits: Limits = QUICK, fork: bool = False) -> Iterator[Pool]:
    made = Pool(functions, limits, fork)
    try:
        yield made
    finally:
        made.close()


def outcome(function: Any, batch: list[str], **options: Any) -> Any:
    with pool(function, **options) as made:
        return made.collect(made.submit(function, batch))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def have_ended(pids: list[int], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def descendants(pid: int) -> list[int]:
    """A process's descendants."""
    children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [inner for child in children for inner in descendants(child)]


# Outcomes.


@pytest.mark.parametrize(
    ("verb", "kind", "detail"),
    [
        ("hang", "timeout", "no answer after 1 s"),
        ("spin", "timeout", "no answer after 1 s"),
        ("exit 0", "died", "status 0"),
        ("exit 7", "died", "status 7"),
        ("segfault", "crashed", "SIGSEGV"),
        ("exhaust", "memory", "MemoryError"),
        ("raise", "exception", r"ZeroDivisionError: oops (" + naughty.__file__),
        ("leave", "exception", "SystemExit: 3"),
    ],
)
def test_one_bad_sample_fails_alone(verb: str, kind: str, detail: str) -> None:
    batch = ["good"] * 20 + [verb] + ["fine!"] * 30
    found = outcome(naughty.lengths, batch)
    assert list(found.failures) == [20]
    assert found.failures[20].kind == kind
    assert detail in found.failures[20].detail
    assert [value for place, value in enumerate(found.values) if place != 20] == [4] * 20 + [5] * 30


def test_failures_anywhere_and_many() -> None:
    batch = ["raise", "good", "exit 1", "exit 1", "good", "hang", "segfault", "raise"]
    found = outcome(naughty.lengths, batch)
    assert {place: failure.kind for place, failure in found.failures.items()} == {
        0: "exception", 2: "died", 3: "died", 5: "timeout", 6: "crashed", 7: "exception"
    }  # fmt: skip
    assert [found.values[place] for place in (1, 4)] == [4, 4]


def test_a_text_check_that_spins_exceeds_its_cpu_limit() -> None:
    """A time limit would give a timeout instead."""
    found = outcome(naughty.of_the_text, ["good", "spin", "good"])
    assert found.failures[1].kind == "cpu"
    assert list(found.failures) == [1]


def test_cpu_time_is_limited_for_text_checks_only() -> None:
    with pool(naughty.computing_left, naughty.computing_left_of_the_text) as made:
        assert made.collect(made.submit(naughty.computing_left, ["x", "y"])).values == [False, False]
        assert made.collect(made.submit(naughty.computing_left_of_the_text, ["x", "y"])).values == [True, True]
        assert made.collect(made.submit(naughty.computing_left, ["x", "y"])).values == [False, False]


def test_a_text_check_that_uses_no_cpu_times_out() -> None:
    found = outcome(naughty.of_the_text, ["good", "stop", "good"], limits=Limits(1, 0.5, 128))
    assert {place: failure.kind for place, failure in found.failures.items()} == {1: "timeout"}
    assert found.failures[1].detail == "no answer after 1 s (setting check_seconds)", "twice what others have"


def cpu_seconds(pid: int) -> float:
    """Computing time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def let_compute(pid: int, seconds: float) -> None:
    """Let a stopped process compute for so long, whatever the load of the machine, and stop it again."""
    until = cpu_seconds(pid) + seconds
    os.kill(pid, signal.SIGCONT)
    while cpu_seconds(pid) < until:
        time.sleep(0.005)
    os.kill(pid, signal.SIGSTOP)


def test_a_text_check_that_gets_little_cpu_reaches_its_cpu_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline passes twice before its CPU limit is reached; two seconds are enough to see it compute."""
    monkeypatch.setattr(Limits, "wall_seconds", lambda limits, deterministic: 0.2)  # the workers are forked from here
    before = set(descendants(os.getpid()))
    with pool(naughty.of_the_text, limits=Limits(2, 1, 128), fork=True) as made:
        made.wait_until_ready()
        number = made.submit(naughty.of_the_text, ["spin"])
        started = time.monotonic()
        while not (
            workers := [pid for pid in descendants(os.getpid()) if pid not in before and not is_supervisor(pid)]
        ):
            assert time.monotonic() < started + 60
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # when its computing time is spent
            while True:
                let_compute(workers[0], 0.05)
                time.sleep(0.25)
        assert time.monotonic() - started > 0.2 + 2, "it was late, and late again"
        assert made.collect(number).failures[0].kind == "cpu"


@pytest.mark.timeout(30)
def test_a_text_check_that_removes_its_cpu_limit_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        WorkerProcess, "is_computing", lambda worker: True
    )  # whatever the load; workers are forked from here
    limits = Limits(1, 0.1, 128)
    found = outcome(naughty.of_the_text, ["good", "endless", "good"], limits=limits, fork=True)
    assert found.values == [4, None, 4]
    assert found.failures[1].kind == "timeout"
    assert limits.last_seconds == 2.0
    assert found.failures[1].detail == "no answer after 2 s (setting check_seconds)"


def test_memory_is_what_it_would_be_in_a_fresh_worker() -> None:
    """Independently of earlier samples: an allocation just below the limit succeeds, one just above it fails."""
    needs = ["90", "115", "10", "140", "90", "10", "115", "140", "5", "20", "115", "10000000"]
    found = outcome(naughty.hungry, needs, limits=Limits(workers=1, seconds=5.0, megabytes=128))
    assert found.failures == {}
    assert found.values == [int(need) < 128 for need in needs]


def test_memory_freed_by_a_call_does_not_raise_the_limit_of_the_next() -> None:
    with pool(naughty.crumbs, limits=Limits(workers=1, seconds=10.0, megabytes=128)) as made:
        for need in (5, 50, 150, 50, 150):
            found = made.collect(made.submit(naughty.crumbs, [str(need), "5"]))  # two, in a worker that has worked
            assert found.values == [need < 128, True]


def test_a_worker_is_used_again_until_it_fails() -> None:
    with pool(naughty.pids, limits=Limits(1, 1.0, 128)) as made:
        first = made.collect(made.submit(naughty.pids, ["a"] * 600)).values
        assert len(set(first)) == 1
        assert set(made.collect(made.submit(naughty.pids, ["a"])).values) == set(first)
        made.collect(made.submit(naughty.pids, ["exit 1"]))
        assert set(made.collect(made.submit(naughty.pids, ["a"])).values).isdisjoint(first)
        assert os.getpid() not in first


def test_a_function_that_is_slow_at_first_keeps_its_worker() -> None:
    """A first call that takes long, as one that loads a model does, must not make every sample a first call."""
    with pool(naughty.slow_at_first, limits=Limits(1, 5.0, 128)) as made:
        workers = [made.collect(made.submit(naughty.slow_at_first, ["a"])).values[0] for _ in range(12)]
    assert len(set(workers)) <= 2


def test_a_worker_whose_function_leaks_is_replaced() -> None:
    """No single call leaks much; the worker is replaced before it uses half of its limit."""
    with pool(naughty.pids, limits=Limits(1, 5.0, 128)) as made:
        workers = [made.collect(made.submit(naughty.pids, ["leak 12"])).values[0] for _ in range(15)]
    assert len(set(workers)) > 1
    assert workers[0] == workers[4], "it is used again as long as it holds little"


def test_hanging_samples_run_side_by_side(tmp_path: Path) -> None:
    """Each records how many hang when it starts: more than the workers for new samples."""
    batch = (["good"] * 24 + [f"crowd {tmp_path / 'hanging'}"]) * 4
    with pool(naughty.lengths) as made:
        made.collect(made.submit(naughty.lengths, ["good"] * 64))  # how long one takes is known from here on
        found = made.collect(made.submit(naughty.lengths, batch))
    assert Counter(failure.kind for failure in found.failures.values()) == {"timeout": 4}
    seen = [int(line.split()[1]) for line in (tmp_path / "hanging").read_text().splitlines()]
    assert max(seen) > QUICK.workers, seen


@pytest.mark.timeout(60)
def test_a_hanging_batch_does_not_delay_others() -> None:
    """A later batch is answered while an earlier call hangs."""
    with pool(naughty.lengths, limits=Limits(2, 600.0, 128)) as made:
        made.submit(naughty.lengths, ["hang"])
        assert made.collect(made.submit(naughty.lengths, ["good"])).values == [4]


def test_overhead_is_small() -> None:
    """In CPU time of all processes, which does not depend on other programs."""

    def spent() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)  # known once they have ended
        return time.process_time() + children.ru_utime + children.ru_stime

    def cost(batches: int) -> float:
        start = spent()
        with pool(naughty.lengths, fork=True) as made:
            for number in [made.submit(naughty.lengths, ["some text"] * 256) for _ in range(batches)]:
                made.collect(number)
        return spent() - start

    few, many = cost(8), cost(72)
    assert many - few < 1.0  # for 16,384 texts; measured: 0.2


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match="by name"):
        Pool([lambda texts: texts], QUICK)


def test_an_answer_of_the_wrong_shape_fails_the_samples_that_are_alone_to_blame() -> None:
    found = outcome(naughty.no_list, ["a", "b"])
    assert {failure.kind for failure in found.failures.values()} == {"value"}
    assert len(found.failures) == 2
    assert "a list with a value for each completion is expected" in found.failures[0].detail
    found = outcome(naughty.too_few, ["aa", "b", "cc"])
    assert found.values == [2, None, 2]
    assert {place: failure.detail for place, failure in found.failures.items()} == {
        1: "it returned 0 values for 1 completions"
    }


def test_functions_can_be_added_later() -> None:
    with pool(naughty.lengths) as made:
        assert made.collect(made.submit(naughty.lengths, ["ab"])).values == [2]
        found = made.collect(made.submit(python_code.compile_outcomes, ["x = 1\n", "x = (\n", "x )\n"]))
        assert found.values == ["ok", "incomplete", "SyntaxError: unmatched ')'"]
        assert made.collect(made.submit(python_code.ast_nodes_of, ["x = 1\n"])).values == [5]


def test_workers_import_nothing_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "imported"
    for name in ("json", "socket", "selectors"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [os.path.abspath(path) for path in sys.path if path])
    assert outcome(naughty.lengths, ["a", "bb"]).values == [1, 2]
    assert not mark.exists()


def test_a_forked_pool_takes_any_function() -> None:
    assert outcome(lambda texts: [text.upper() for text in texts], ["a", "hang"], fork=True).values == ["A", "HANG"]
    found = outcome(naughty.lengths, ["good", "segfault", "hang", "good"], fork=True)
    assert {place: failure.kind for place, failure in found.failures.items()} == {1: "crashed", 2: "timeout"}


# No process is left, and nothing is printed.


def test_what_a_module_started_at_its_import_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of dead workers are killed, but not a child that the function's module started at import."""
    (tmp_path / "with_helper.py").write_text(
        "import os, subprocess\nHELPER = subprocess.Popen(['sleep', '600']).pid\n"
        "def helpers(texts):\n    if 'die' in texts:\n        os._exit(1)\n    return [HELPER] * len(texts)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import with_helper  # type: ignore[import-not-found]

    os.kill(with_helper.HELPER, signal.SIGKILL)  # this process's own
    os.waitpid(with_helper.HELPER, 0)
    with pool(with_helper.helpers) as made:
        found = made.collect(made.submit(with_helper.helpers, ["x", "die", "y"]))
        helper = found.values[0]
        assert list(found.failures) == [1]
        assert made.collect(made.submit(with_helper.helpers, ["x"])).values == [helper]
        assert is_alive(helper)
        os.kill(helper, signal.SIGKILL)
    del sys.modules["with_helper"]


def test_children_are_killed_with_their_worker(tmp_path: Path) -> None:
    found = outcome(naughty.lengths, [f"family {tmp_path / 'pids'}"])
    assert found.failures[0].kind == "timeout"
    children = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(children) >= 2
    assert have_ended(children)


def test_nothing_is_written_to_standard_output_or_error() -> None:
    program = (
        "import naughty; from cdpg.sandbox.pool import Pool; from cdpg.sandbox.limits import Limits\n"
        "for fork in (False, True):\n"
        "    p = Pool([naughty.lengths], Limits(), fork)\n"
        "    assert p.collect(p.submit(naughty.lengths, ['talk', 'segfault', 'good'])).values[2] == 4\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, env=_environment(), timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("fork", [False, True])
def test_workers_end_with_the_trainer(number: int, fork: bool, tmp_path: Path) -> None:
    program = (
        "import naughty, sys; from cdpg.sandbox.pool import Pool; from cdpg.sandbox.limits import Limits\n"
        f"p = Pool([naughty.lengths], Limits(2, 300.0), {fork})\n"
        f"n = p.submit(naughty.lengths, ['family {tmp_path / 'pids'}', 'hang'])\n"
        "print('going', flush=True); p.collect(n)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"going\n"
    end = time.monotonic() + 20
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    processes = descendants(process.pid)
    assert len(processes) >= 4  # the supervisor, a worker, its children
    process.send_signal(number)
    process.wait(20)
    process.stdout.close()
    assert have_ended(processes)


@pytest.mark.timeout(30)
def test_a_supervisor_that_is_killed_is_replaced() -> None:
    before = set(descendants(os.getpid()))
    with pool(naughty.lengths) as made:
        made.wait_until_ready()
        number = made.submit(naughty.lengths, ["good", "hang"])
        (supervisor,) = [pid for pid in descendants(os.getpid()) if pid not in before and is_supervisor(pid)]
        os.kill(supervisor, signal.SIGKILL)
        found = made.collect(number)
    assert found.values[0] == 4
    assert found.failures[1].kind == "timeout"


def test_workers_end_with_a_supervisor_that_is_killed_during_their_calls(tmp_path: Path) -> None:
    """A busy worker does not notice by itself; the system must end it."""
    before, busy = set(descendants(os.getpid())), tmp_path / "busy"
    busy.touch()
    with pool(naughty.lengths, limits=Limits(2, 600.0, 128)) as made:
        supervisor = supervisor_of(made, before)
        made.submit(naughty.lengths, [f"hold {busy}"] * 2)
        end = time.monotonic() + 60
        while busy.read_text().count("\n") < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        workers = [int(line) for line in busy.read_text().split()]
        assert sorted(workers) == sorted(descendants(supervisor))
        os.kill(supervisor, signal.SIGKILL)
        ended = have_ended(workers, seconds=20)
        for worker in filter(is_alive, workers):
            os.kill(worker, signal.SIGKILL)  # nobody else would
        assert ended


def supervisor_of(made: Pool, before: set[int]) -> int:
    """The process between this one and the workers of a pool that was made since ``before``."""
    made.wait_until_ready()
    (supervisor,) = [pid for pid in descendants(os.getpid()) if pid not in before and is_supervisor(pid)]
    return supervisor


def test_a_supervisor_that_is_killed_now_and_then_is_replaced_every_time() -> None:
    before = set(descendants(os.getpid()))
    with pool(naughty.lengths) as made:
        for _ in range(5):
            os.kill(supervisor_of(made, before), signal.SIGKILL)
            assert made.collect(made.submit(naughty.lengths, ["good"])).values == [4]


def test_a_function_that_was_added_later_survives_the_supervisor() -> None:
    before = set(descendants(os.getpid()))
    with pool(naughty.lengths) as made:
        supervisor = supervisor_of(made, before)
        os.kill(supervisor, signal.SIGKILL)
        assert have_ended([supervisor])
        assert made.collect(made.submit(python_code.ast_nodes_of, ["x = 1\n"])).values == [5]


def test_what_a_text_exhausts_is_a_result_and_any_other_failure_is_none() -> None:
    texts = ["good", "segfault", "exhaust", "exit 4", "raise", "stop"]
    read, failures = Reader(QUICK), Counter[str]()
    with contextlib.closing(read):
        assert read(naughty.of_the_text, texts, "exhausted", failures) == [
            4,
            "exhausted",
            "exhausted",
            None,
            None,
            None,
        ]
        assert failures == {"died": 1, "exception": 1, "timeout": 1}
        assert read(naughty.lengths, ["segfault", "good"], "exhausted", failures) == [None, 4], "it promises nothing"
        assert failures["crashed"] == 1


def test_a_function_that_cannot_be_imported_leaves_the_pool_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def lengths(texts):\n    return list(map(len, texts))\n")
    with pool(naughty.lengths) as made:
        made.wait_until_ready()
        monkeypatch.syspath_prepend(str(tmp_path))
        import only_here  # type: ignore[import-not-found]

        for _ in range(2):
            with pytest.raises(CannotStart, match="No module named 'only_here'"):
                made.submit(only_here.lengths, ["x"])
        monkeypatch.undo()
        made.close()
        assert made.collect(made.submit(naughty.lengths, ["good"])).values == [4]
        read = Reader(QUICK)
        with contextlib.closing(read), pytest.raises(RunError, match="No module named 'only_here'"):
            read(only_here.lengths, ["x"])
    del sys.modules["only_here"]


def is_supervisor(pid: int) -> bool:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()


def test_a_pool_that_is_forgotten_ends() -> None:
    before = set(descendants(os.getpid()))
    made = Pool([naughty.lengths], QUICK)
    made.collect(made.submit(naughty.lengths, ["good"]))
    processes = [pid for pid in descendants(os.getpid()) if pid not in before]
    assert processes
    del made
    assert have_ended(processes)


# Messages.


@pytest.mark.parametrize(
    "text", ["", "\ud800", "\udfff\ud800", "a\0b", "é😀\u2028", '"\\', "x" * 2_000_000, "".join(map(chr, range(512)))]
)
def test_any_text_arrives_as_it_was(text: str) -> None:
    found = outcome(_same, [text, "b", text], fork=True)
    assert found.values == [text, "b", text]


def _same(texts: list[str]) -> list[str]:
    return texts


def test_lists_are_packed_without_repetition() -> None:
    values = ["long"] * 5 + ["other"]
    assert pack(values) == {"values": ["long", "other"], "index": [0, 0, 0, 0, 0, 1]}
    for each in (values, [], ["a", "b"], [1, "a", None], [["a"], {"b": 1}]):
        assert unpack(json.loads(json.dumps(pack(each)))) == each


def test_results_become_plain() -> None:
    values = [np.float32(0.5), np.array([True]), (1, 2), {3: {4}}, Decimal("0.25"), None, "x"]
    assert as_plain(values) == [0.5, [True], [1, 2], {"3": [4]}, 0.25, None, "x"]
    with pytest.raises(TypeError):
        as_plain([object()])
    assert is_plain({"a": [1, None, True, "x", 0.5]})
    assert not any(is_plain(value) for value in [(1,), {1: 2}, b"", np.float32(1), [object()]])


def test_names() -> None:
    assert reference_of(naughty.lengths) == "naughty:lengths"
    assert reference_of(Pool.submit) == "cdpg.sandbox.pool:Pool.submit"
    for nameless in (lambda: 0, Path("x").open, (3).__add__, Limits()):
        assert reference_of(nameless) is None  # type: ignore[arg-type]


# Constraints.

CONTEXTS = [Context("p", {"act": None}, 1), Context("q", {"act": None}, 2)]


def judged(*constraints: Any, contexts: list[Context] | None = None, texts: tuple[str, str] = ("x", "yy")) -> Any:
    with noticed() as notices, closing(Judge(list(constraints), QUICK)) as judge:
        return judge.collect(judge.submit(contexts or CONTEXTS, texts, [[1], [2, 3]])), notices


def acting(what: str) -> list[Context]:
    return [Context("p", {"act": what}, 1), Context("q", {"act": what}, 2)]


def zero(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def test_a_failed_sample_has_no_verdict() -> None:
    verdicts, notices = judged(naughty.constraint, contexts=acting("exit 4"), texts=("abc", "bcd"))
    assert (verdicts.b, notices) == ([0.0, 1.0], [])
    assert str(verdicts.failures[0]) == "constraint naughty:constraint gave no verdict: the worker ended with status 4"
    assert list(verdicts.failures) == [0]


def test_what_another_constraint_rejects_is_rejected() -> None:
    verdicts, _ = judged(naughty.constraint, zero, contexts=acting("raise"), texts=("abc", "bcd"))
    assert (verdicts.b, verdicts.failures) == ([0.0, 0.0], {})


def test_a_built_in_check_that_is_exhausted_says_no() -> None:
    """Parser, computing time, memory and size alike: it is the text's fault, and a verdict."""
    nested = "\n" + "".join(" " * (i + 1) + "try: pass\n" + " " * (i + 1) + "finally:\n" for i in range(19))
    bodies = ["\n    return 1", "\n    x" + " x" * 1500, nested + " " * 20 + "pass", "\n    " + "x = 1;" * 20_000]
    judge = Judge(python_code.compiles, Limits(workers=2, seconds=4.0, megabytes=256))
    contexts = [Context("def f():", {}, 1)] * len(bodies)
    verdicts = judge.collect(judge.submit(contexts, bodies, [[1]] * len(bodies)))
    judge.close()
    assert verdicts.b == [1.0, 0.0, 0.0, 0.0]
    assert verdicts.failures == {}
    assert sum(verdicts.exhausted.values()) == 3
    assert verdicts.exhausted["size"] == 1


def test_a_closure_is_called_here_with_a_notice() -> None:
    seen: list[int] = []

    def closure(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        seen.append(os.getpid())
        return [True] * len(completions)

    verdicts, notices = judged(closure)
    assert verdicts.b == [1.0, 1.0]
    assert seen == [os.getpid()]
    assert "is called in the training process" in notices[0]


def test_a_lambda_is_called_in_a_fork() -> None:
    verdicts, notices = judged(lambda prompts, completions, **columns: [float(os.getppid() > 1)] * len(completions))
    assert (verdicts.b, notices) == ([1.0, 1.0], [])


def test_columns_that_are_not_plain_keep_a_constraint_in_process() -> None:
    contexts = [Context("p", {"act": b"bytes"}, 1)] * 2
    verdicts, notices = judged(naughty.constraint, contexts=contexts)
    assert verdicts.b == [1.0, 1.0]
    assert "the column 'act' holds more than texts and numbers" in notices[0]


def test_columns_that_are_no_longer_plain_leave_what_was_sent_before_to_the_workers(notices: list[str]) -> None:
    judge = Judge(naughty.constraint, QUICK)
    sent = [judge.submit([Context("p", {"act": act}, 1)], ["good"], [[1]]) for act in ("", b"bytes", "")]
    found = [judge.collect(pending).b for pending in sent]
    judge.close()
    assert found == [[1.0]] * 3
    assert len(notices) == 1


def test_a_module_that_a_new_process_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def yes(prompts, completions):\n    return [True] * len(completions)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    (tmp_path / "only_here.py").write_text("raise RuntimeError('not again')\n")
    verdicts, notices = judged(only_here.yes)
    assert verdicts.b == [1.0, 1.0]
    assert "RuntimeError: not again" in notices[0]


def test_the_environment_is_the_same_in_every_call() -> None:
    found = outcome(naughty.depth, ["a"] * 100)
    assert len({json.dumps(value) for value in found.values}) == 1
    assert found.values[0] == outcome(naughty.depth, ["a"]).values[0]


# What is printed.


def notices_of(texts: list[str], show: bool) -> list[str]:
    limits = Limits(workers=1, seconds=5.0, megabytes=256, show_output=show)
    with noticed() as notices, closing(Judge(naughty.talkative, limits)) as judge:
        judge.collect(judge.submit([Context("p", {}, 1)] * len(texts), texts, [[1]] * len(texts)))
    return notices


def test_what_a_constraint_prints_is_shown_on_request() -> None:
    start = "naughty:talkative printed: "
    assert notices_of(["a", "b"], show=False) == []
    assert notices_of(["a", "b"], show=True) == [f"{start}judging a[31m", f"{start}judging b[31m"]
    # Judged again one by one after the exception, and told once.
    again = [line.removeprefix(start) for line in notices_of(["a", "oops"], show=True)]
    assert again == ["judging a[31m", "judging oops[31m", "about to raise"]
    flood = notices_of(["flood"], show=True)
    assert len(flood) == 21 and flood[-1] == f"{start}… (what follows is not shown)"


def test_printing_does_not_change_a_run_and_is_shown_without_what_steers_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path / "hidden", naughty.talkative, epochs=1).train()
    assert "printed" not in capsys.readouterr().err
    trainer(tmp_path / "shown", naughty.talkative, epochs=1, check_output="show").train()
    told = [line for line in capsys.readouterr().err.splitlines() if "naughty:talkative printed: judging" in line]
    assert 0 < len(told) <= 20 and not any("\x1b" in line for line in told)
    hidden, shown = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("hidden", "shown"))
    assert hidden == shown


# Runs.


def trainer(folder: Path, constraint: Any, act: str = "", **changes: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 4, "contexts_per_epoch": 3, "num_generations": 64, "max_completion_length": 3, "warmup_epochs": 0,
        "learning_rate": 0.05, "save_every": 100, "device": "cpu", "check_seconds": 1.0, "check_memory": 128,
    }  # fmt: skip
    rows = [{"prompt": str(context.prompt), "act": act} for context in contexts_of(3)]
    held_out = rows if changes.pop("held_out", False) else None
    measure = changes.pop("measure", None)
    config = CDPGConfig(output_dir=str(folder), **(values | changes))
    return CDPGTrainer(tabular(4), constraint, config, train_dataset=rows, eval_dataset=held_out, measure=measure)


def test_metrics_have_the_limits_of_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one machine share its cores."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    made = trainer(tmp_path, naughty.constraint, held_out=True)
    assert made.evaluator.read.limits.workers == 2


def test_an_evaluation_says_how_many_checks_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, naughty.constraint, "exit 4", epochs=1, check_failures=1.0, held_out=True).train()
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert 0 < result["base"]["checks_failed"]["mean"] < 1
    assert result["base"]["satisfaction"]["mean"] == 1.0
    outputs = [output for example in result["examples"] for output in example["outputs"]["base"]]
    assert all((output["b"] is None) == output["text"].startswith("a") for output in outputs)
    assert re.search(r"base: the check failed on \d+ of 48 samples, which are left out\n", capsys.readouterr().err)


class Misread:
    """Reads every sample with a function whose worker dies at some of them."""

    beams = 0

    def __call__(self, contexts: Any, outputs: Any, apply: Any) -> Measured:
        texts = ["exit 4" if text.startswith("a") else text for row in outputs for text in row]
        found = [np.nan if length is None else length for length in apply(naughty.of_the_text, texts)]
        return Measured(features={"letters": np.array(found, dtype=np.float64).reshape(len(outputs), -1)})


def test_an_evaluation_leaves_out_and_counts_what_could_not_be_measured(tmp_path: Path) -> None:
    made = trainer(tmp_path, naughty.constraint, held_out=True, measure=Misread(), evaluation_samples=12)
    with contextlib.closing(made.evaluator):
        found = made.evaluator.evaluate({}, {})
    assert found is not None
    texts = [text for row in found.outcomes["base"].texts for text in row]
    died = sum(text.startswith("a") for text in texts)
    assert 0 < died < len(texts)
    lengths = [np.mean([len(t) for t in row if not t.startswith("a")]) for row in found.outcomes["base"].texts]
    assert found.metrics()["base"]["letters"]["mean"] == pytest.approx(np.mean(lengths))
    assert found.to_mapping({"base": "base"})["notices"] == [
        f"base: measuring the outputs failed {died} times (died {died}), and these measurements are left out"
    ]


def test_a_run_continues_without_its_failed_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, naughty.constraint, "exit 4", check_failures=1.0).train()
    records = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [record["epoch"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert 0 < record["checks_failed"] < 192
        assert record["checks_failed_died"] == record["checks_failed"]
        assert record["satisfaction"] == 1.0  # of those that have a verdict
        assert record["checks_exhausted"] == 0
    examples = list(read_jsonl(tmp_path / "failures.jsonl"))
    assert [(example["epoch"], example["kind"]) for example in examples] == [(n, "died") for n in (1, 2, 3, 4)]
    assert all(example["completion"].startswith("a") for example in examples)
    told = capsys.readouterr().err
    total = sum(record["checks_failed"] for record in records)
    assert f"in all, {total} checks failed (died {total}) and their samples were left out" in told


def test_failures_are_resumed_like_the_other_logs(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer(whole, naughty.half_raises, check_failures=1.0).train()
    trainer(parts, naughty.half_raises, check_failures=1.0, epochs=2).train()
    with (parts / "failures.jsonl").open("a") as file:
        file.write('{"epoch": 3}\n')  # what a killed run had written since its checkpoint
    trainer(parts, naughty.half_raises, check_failures=1.0).train(resume_from_checkpoint=True)
    assert (parts / "failures.jsonl").read_bytes() == (whole / "failures.jsonl").read_bytes()


def test_too_many_failures_stop_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, naughty.constraint, epochs=2).train()
    with pytest.raises(RunError) as error:
        # The same data, and another verdict on it from here on.
        resumed = trainer(tmp_path, naughty.constraint, epochs=5)
        resumed.judge.constraints[0] = naughty.half_raises
        resumed.train(resume_from_checkpoint=True)
    message = str(error.value)
    assert "of 192 samples of epoch 3 failed (exception " in message
    assert "more than the 5% that check_failures allows" in message
    assert "naughty:half_raises raised ZeroDivisionError: oops" in message
    assert [record["epoch"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch-000002"]
    record = trainer(tmp_path, naughty.constraint, epochs=3).train(resume_from_checkpoint=True)
    assert record["epoch"] == 3
    assert (tmp_path / "failures.jsonl").read_bytes() == b""


def test_epochs_of_few_samples_are_counted_together(tmp_path: Path) -> None:
    log = FailureLog(tmp_path / "failures.jsonl", 0.05, Processes(Accelerator(cpu=True)))

    def epoch(failed: int, total: int = 8, inapplicable: int = 0) -> Any:
        places = torch.arange(total)[None, :]
        left_out = (places >= failed) & (places < failed + inapplicable)
        counts = {"failed_died": failed}
        return types.SimpleNamespace(
            number=1, failed=places < failed, inapplicable=left_out, checks=counts, failures={}
        )

    found = [log.too_many(epoch(failed)) for failed in (1, 1, 1, 1, 1, 0, 1)]
    assert [problem is None for problem in found] == [True] * 6 + [False]
    assert "1 of 8 samples of epoch 1" in str(found[-1])
    assert "more than the 5% that check_failures allows (6 of the last 56)" in str(found[-1])
    assert log.too_many(epoch(0, 100)) is None  # and what lies far behind is forgotten
    assert log.too_many(epoch(1)) is None
    assert log.too_many(epoch(8)) is not None
    assert log.too_many(epoch(0, 100)) is None
    assert log.too_many(epoch(0, 100, inapplicable=100)) is None
    assert "the check of every sample" in str(log.too_many(epoch(2, 8, inapplicable=6)))


def test_examples_are_mentioned_only_if_there_are_some(tmp_path: Path, notices: list[str]) -> None:
    log = FailureLog(tmp_path / "failures.jsonl", 0.05, Processes(Accelerator(cpu=True)))
    metrics = JsonlFile(tmp_path / "metrics.jsonl")
    metrics.append({"epoch": 1, "checks_failed": 0, "checks_exhausted": 2, "checks_exhausted_memory": 2})
    log.log_total(metrics.path)
    metrics.append({"epoch": 2, "checks_failed": 1, "checks_exhausted": 0, "checks_failed_died": 1})
    log.log_total(metrics.path)
    assert "in all, 2 texts exhausted a built-in check (memory 2)" in notices[0]
    assert ["failures.jsonl" in text for text in notices] == [False, True]


def test_a_broken_constraint_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        trainer(tmp_path, naughty.always_raises).train()
    assert "every sample of epoch 1 failed (exception 192)" in str(error.value)
    assert f"constraint naughty:always_raises raised ZeroDivisionError: oops ({naughty.__file__}, line" in str(
        error.value
    )
    trainer(tmp_path, naughty.constraint, epochs=1).train()  # the folder holds no run that would be in the way


def test_workers_do_not_change_a_run(tmp_path: Path) -> None:
    for workers in (0, 1, 3):
        trainer(tmp_path / str(workers), naughty.constraint, check_workers=workers).train()
    untimed = [
        [{k: v for k, v in record.items() if "seconds" not in k} for record in read_jsonl(folder / "metrics.jsonl")]
        for folder in sorted(tmp_path.iterdir())
    ]
    assert untimed[0] == untimed[1] == untimed[2]


def test_no_process_is_left_after_a_run(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    made = trainer(
        tmp_path, naughty.constraint, "hang", check_failures=0.0, epochs=1, num_generations=4, check_seconds=0.2
    )
    with pytest.raises(RunError):
        made.train()
    assert have_ended([pid for pid in descendants(os.getpid()) if pid not in before])
    assert set(descendants(os.getpid())) <= before


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.parametrize("limits", [None, Limits(workers=1, seconds=5.0, megabytes=256)])
@pytest.mark.parametrize(
    ("constraint", "returned"),
    [
        (naughty.first_alone, "it returned 1 values for 3 completions; "),
        (naughty.all_at_once, "it returned False, and a list with a value for each completion is expected; "),
    ],
)
def test_an_answer_that_does_not_fit_the_batch_is_reported_once(
    constraint: Any, returned: str, limits: Limits | None, notices: list[str]
) -> None:
    judge = Judge([naughty.not_empty, constraint], limits)
    contexts = [Context("p", {}, row) for row in (1, 2, 3)]
    with contextlib.closing(judge):
        for texts, b in ((["a", "b", "a"], [1.0, 0.0, 1.0]), (["b", "a", "b"], [0.0, 1.0, 0.0])):
            assert judge.collect(judge.submit(contexts, texts, [[0]] * 3)) == Verdicts(b)
    assert notices == [
        f"constraint naughty:{constraint.__name__} does not judge several completions at once: {returned}it is called "
        "for each sample by itself instead, which is slow: return a list with a value for each completion"
    ]


@pytest.mark.parametrize("limits", [None, QUICK])
def test_an_answer_that_fits_no_sample_is_a_failure_and_no_notice(limits: Limits | None, notices: list[str]) -> None:
    judge = Judge(naughty.no_verdicts, limits)
    contexts = [Context("p", {}, 1), Context("p", {}, 2)]
    with contextlib.closing(judge):
        failures = judge.collect(judge.submit(contexts, ["a", "b"], [[0], [0]])).failures
    assert ["it returned None, and a list" in str(failure) for failure in failures.values()] == [True, True]
    assert notices == []


def test_an_urgent_batch_comes_before_those_that_wait(tmp_path: Path) -> None:
    gate, log = tmp_path / "gate", tmp_path / "log"
    with pool(prefix_rules.noting, limits=Limits(workers=1, seconds=60.0)) as made:
        batches = [made.submit(prefix_rules.noting, [f"wait {gate}"])]
        batches.append(made.submit(prefix_rules.noting, [f"note {log} patient"]))
        batches.append(made.submit(prefix_rules.noting, [f"note {log} urgent"], urgent=True))
        gate.touch()
        for batch in batches:
            made.collect(batch)
    assert log.read_text().split() == ["urgent", "patient"]


def test_a_quick_sample_alone_needs_no_new_worker() -> None:
    with pool(prefix_rules.whereabouts, limits=Limits(workers=1, seconds=60.0)) as made:
        made.collect(made.submit(prefix_rules.whereabouts, ["x"] * 20))
        found = [made.collect(made.submit(prefix_rules.whereabouts, ["x"])).values[0] for _ in range(4)]
    assert len(set(found)) == 1
