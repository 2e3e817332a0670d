"""The supervisor's worker processes: forked from it, killed together with every process they started."""

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
"""Seconds for a new process to report that it is ready; it has nothing to import."""
_CPU_PROGRESS = 0.02
"""Seconds of CPU time that count as progress."""


@dataclass(frozen=True)
class WorkItem:
    """Samples of a batch for one worker: judged in one call, or one by one in an unused worker."""

    batch: int
    indices: range
    one_by_one: bool = False


@dataclass(eq=False)
class WorkerProcess:
    """A worker process, its state and its deadline."""

    pid: int
    channel: Channel
    ready: bool = False
    unused: bool = True
    outdated: bool = False
    chunk: WorkItem | None = None
    done: int = 0
    """Samples of the chunk that are answered."""
    since: float = field(default_factory=time.monotonic)
    """When the work on the current sample, or chunk, started."""
    deadline: float = field(default_factory=lambda: time.monotonic() + _READY_WITHIN)

    last_cpu_seconds: float | None = None
    """Its CPU time at the last call of ``is_computing``."""

    def is_computing(self) -> bool:
        """Whether it has used CPU time since the last call; True at the first call."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            now = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return False
        before, self.last_cpu_seconds = self.last_cpu_seconds, now
        return before is None or now - before > _CPU_PROGRESS

    def assign(self, chunk: WorkItem, message: Mapping[str, Any]) -> None:
        """Send a chunk; OSError if the worker has ended."""
        self.chunk, self.done = chunk, 0
        self.channel.put(message)


class WorkerProcesses:
    """All workers of a supervisor; its other children are left alone."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], inherited: Iterable[int]) -> None:
        self.members: list[WorkerProcess] = []
        self._functions = functions
        self._inherited = list(inherited)
        self._other_children = set(_children())

    def idle(self) -> list[WorkerProcess]:
        """The workers without a chunk, oldest first."""
        return [worker for worker in self.members if worker.chunk is None]

    def spawn(self) -> WorkerProcess:
        """Fork a worker, in a session of its own."""
        mine, theirs = socket.socketpair()
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setsid()
                mine.close()
                for descriptor in (*self._inherited, *(other.channel.fileno() for other in self.members)):
                    os.close(descriptor)
                work(Channel(theirs), self._functions, supervisor)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        worker = WorkerProcess(pid, Channel(mine))
        self.members.append(worker)
        return worker

    def kill(self, worker: WorkerProcess) -> int:
        """Kill a worker and its children; its exit status as :mod:`subprocess` has it, negative for a signal."""
        self.members.remove(worker)
        worker.channel.close()
        # Its group first: once the worker has been waited for, its number may belong to another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        self._kill_orphans()
        return os.waitstatus_to_exitcode(status)

    def reap(self, worker: WorkerProcess) -> int:
        """The exit status of a worker that closed its connection; if it does not end by itself, it is killed."""
        for _ in range(100):
            if os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(0.001)
        return self.kill(worker)

    def _kill_orphans(self) -> None:
        """Kill children of a dead worker that left its process group; the system made them the supervisor's."""
        known = self._other_children | {worker.pid for worker in self.members}
        while orphans := set(_children()) - known:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []
