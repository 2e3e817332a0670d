"""The processes under a foreman: made by forking it, killed with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cdpg.sandbox.protocol import Channel
from cdpg.sandbox.worker import work

_READY_WITHIN = 60.0
"""Seconds for a new process to report; it has nothing to import."""


_SOME_COMPUTING = 0.02


@dataclass(frozen=True)
class Job:
    """Some samples of a batch for one worker: in one call, or one by one in a fresh worker."""

    batch: int
    places: range
    each: bool = False


@dataclass(eq=False)
class Worker:
    """A process and what it is at."""

    pid: int
    channel: Channel
    ready: bool = False
    fresh: bool = True
    stale: bool = False
    job: Job | None = None
    done: int = 0
    """Samples of the job that are answered."""
    since: float = field(default_factory=time.monotonic)
    """When the work on the present sample, or chunk, started."""
    deadline: float = field(default_factory=lambda: time.monotonic() + _READY_WITHIN)

    computed: float | None = None
    """Its computing time when it was last found to be late."""

    def is_computing(self) -> bool:
        """Whether it had any computing time to speak of since this was last asked; at first, that it may have had."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            now = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return False
        before, self.computed = self.computed, now
        return before is None or now - before > _SOME_COMPUTING

    def take(self, job: Job, message: Mapping[str, Any]) -> None:
        """Send work; OSError if the worker is gone."""
        self.job, self.done = job, 0
        self.channel.put(message)


class Crew:
    """All workers; the foreman's other children are left alone."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], inherited: Iterable[int]) -> None:
        self.members: list[Worker] = []
        self._functions = functions
        self._inherited = list(inherited)
        self._others = set(_children())

    def hire(self) -> Worker:
        """A new process, in a session of its own."""
        mine, theirs = socket.socketpair()
        foreman = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setsid()
                mine.close()
                for descriptor in (*self._inherited, *(other.channel.fileno() for other in self.members)):
                    os.close(descriptor)
                work(Channel(theirs), self._functions, foreman)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        worker = Worker(pid, Channel(mine))
        self.members.append(worker)
        return worker

    def dismiss(self, worker: Worker) -> int:
        """Kill a worker and its children; its exit status as :mod:`subprocess` has it, negative for a signal."""
        self.members.remove(worker)
        worker.channel.close()
        # Its group first: once the worker has been waited for, its number may belong to another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        self._kill_strays()
        return os.waitstatus_to_exitcode(status)

    def bury(self, worker: Worker) -> int:
        """The exit status of a worker that hung up; it is given a moment to be dead, then killed."""
        for _ in range(100):
            if os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(0.001)
        return self.dismiss(worker)

    def _kill_strays(self) -> None:
        """Children of a dead worker that left its group; the system made them the foreman's own."""
        known = self._others | {worker.pid for worker in self.members}
        while strays := set(_children()) - known:
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []
