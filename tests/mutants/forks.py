"""Runs calls in forks of this process, some side by side, each with a time limit and its output in a file."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory


def nothing(folder: Path) -> None:
    """Neither before nor after a call."""


@dataclass(frozen=True)
class Call:
    """What a fork is to do."""

    name: str
    run: Callable[[Path], int]
    """Runs in the fork and returns its status. The folder is its worker's, and kept for the worker's next call."""
    limit: float
    """In seconds."""
    before: Callable[[Path], None] = nothing
    """Runs in this process before the fork."""
    after: Callable[[Path], None] = nothing
    """Runs in this process when the fork has ended or was killed."""


@dataclass(frozen=True)
class Result:
    """How a call ended."""

    name: str
    status: int | None
    """Negative for a signal; None when the time was up."""
    seconds: float
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
    """Run the calls and give each result as it comes; ``prepare`` is given the folder of each worker."""
    waiting = list(calls)[::-1]
    running: dict[int, _Running] = {}
    with TemporaryDirectory(prefix="cdpg-mutants-") as temporary:
        folders = [Path(temporary) / f"worker{number}" for number in range(workers)]
        for folder in folders:
            folder.mkdir()
            prepare(folder)
        try:
            while waiting or running:
                while waiting and folders:
                    entry = _Running(waiting.pop(), folders.pop(), time.monotonic())
                    running[_start(entry)] = entry
                for process, status in _ended(running):
                    entry = running.pop(process)
                    entry.call.after(entry.folder)
                    folders.append(entry.folder)
                    text = entry.output.read_text(encoding="utf-8", errors="replace")
                    yield Result(entry.call.name, status, time.monotonic() - entry.since, text)
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
    status = 70
    try:
        os.setsid()  # so that what the call starts can be ended along with it
        output = os.open(entry.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        status = entry.call.run(entry.folder)
    finally:
        os._exit(status)  # this process's end is not its parent's


def _ended(running: dict[int, _Running]) -> Iterator[tuple[int, int | None]]:
    """Those that have ended, with their status; those whose time is up are killed first."""
    for process, entry in list(running.items()):
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            yield process, os.waitstatus_to_exitcode(status)
        elif time.monotonic() - entry.since > entry.call.limit:
            _kill(process)
            yield process, None


def _kill(process: int) -> None:
    """End a child and all that it started in its session, which it may have begun only now."""
    for end in (os.killpg, os.kill):
        try:
            end(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(process, 0)
