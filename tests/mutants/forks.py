"""Runs calls in forks of this process, some side by side, each with a time limit and its output in a file."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

BROKEN = 70
"""The status of a call that raised an exception."""


def nothing(folder: Path) -> None:
    """Neither before nor after a call."""


@dataclass(frozen=True)
class Call:
    """What a fork is to do."""

    name: str
    run: Callable[[Path], int]
    """Runs in the fork and returns its status. The folder is its worker's, and kept for the worker's next call."""
    limit: float
    """In seconds; those in which other programs have the cores do not count."""
    before: Callable[[Path], None] = nothing
    """Runs in this process before the fork."""
    after: Callable[[Path], None] = nothing
    """Runs in this process when the fork has ended or was killed."""


@dataclass(frozen=True)
class Result:
    """How a call ended."""

    name: str
    status: int | None
    """Negative for a signal; None when the time was up, also that of a timer of the call's own (SIGPROF)."""
    seconds: float
    computing: float
    """Seconds of processor time, of the call and of what it started and waited for."""
    output: str

    @property
    def passed(self) -> bool:
        return self.status == 0


@dataclass(frozen=True)
class _Running:
    call: Call
    folder: Path
    since: float

    @property
    def output(self) -> Path:
        return self.folder.with_suffix(".txt")


def run(calls: Iterable[Call], workers: int, prepare: Callable[[Path], None] = nothing) -> Iterator[Result]:
    """Run the calls and give each result as it comes; ``prepare`` is given the folder of each worker.

    A call is asked for when there is a worker for it, and so may depend on the results before it.
    """
    waiting = iter(calls)
    more = True
    running: dict[int, _Running] = {}
    with TemporaryDirectory(prefix="cdpg-mutants-") as temporary:
        folders = [Path(temporary) / f"worker{number}" for number in range(workers)]
        for folder in folders:
            folder.mkdir()
            prepare(folder)
        try:
            while more or running:
                while folders and (call := next(waiting, None)):
                    entry = _Running(call, folders.pop(), time.monotonic())
                    running[_start(entry)] = entry
                more = not folders
                for process, status, computing in _ended(running):
                    entry = running.pop(process)
                    entry.call.after(entry.folder)
                    folders.append(entry.folder)
                    text = entry.output.read_text(encoding="utf-8", errors="replace")
                    yield Result(entry.call.name, status, time.monotonic() - entry.since, computing, text)
                time.sleep(0.01)
        finally:
            for process in running:
                _kill(process)


def _start(entry: _Running) -> int:
    entry.call.before(entry.folder)
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    status = BROKEN
    try:
        os.setsid()  # so that what the call starts can be ended along with it
        output = os.open(entry.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # its pool of threads does not survive a fork; threads cannot make it anew at once
        status = entry.call.run(entry.folder)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)  # this process's end is not its parent's


def _ended(running: dict[int, _Running]) -> Iterator[tuple[int, int | None, float]]:
    """Those that have ended, with status and processor time; those whose time is up are killed first."""
    for process, entry in list(running.items()):
        done, status, usage = os.wait4(process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            yield process, None if code == -signal.SIGPROF else code, usage.ru_utime + usage.ru_stime
        elif time.monotonic() - entry.since - _seconds_without_a_core(process) > entry.call.limit:
            yield process, None, _kill(process)


def _seconds_without_a_core(process: int) -> float:
    """How long a process was ready to run while others had the cores; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _kill(process: int) -> float:
    """End a child and all that it started in its session, which it may have begun only now; its processor time."""
    for end in (os.killpg, os.kill):
        try:
            end(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    usage = os.wait4(process, 0)[2]
    return usage.ru_utime + usage.ru_stime
