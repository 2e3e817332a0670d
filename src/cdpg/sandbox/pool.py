"""A pool of worker processes, as the trainer sees it: submit batches, collect their outcomes later."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from cdpg.errors import RunError, UserError
from cdpg.sandbox.functions import reference_of
from cdpg.sandbox.limits import Limits
from cdpg.sandbox.protocol import Channel, pack
from cdpg.sandbox.supervisor import serve
from cdpg.sandbox.worker import POSITIONAL, exception_text

_SUPERVISOR_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); import json; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from cdpg.sandbox.supervisor import main; main(sys.argv[1:])"
)
"""``python -c`` puts the working folder first in ``sys.path``; a json.py there must not be imported."""
_MAX_START_SECONDS = 600.0
"""For the supervisor to import the functions and call their ``prepare``."""
_MAX_RESTARTS = 3
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


KINDS = ("timeout", "cpu", "memory", "recursion", "size", "crashed", "died", "exception", "value")
"""Kinds of failure: time limit; limits on CPU time, memory, recursion depth and size of the text; a crash; an end from
outside; an exception; an invalid result."""


@dataclass(frozen=True)
class Failure:
    """Why a sample has no result."""

    kind: str
    """One of ``KINDS``."""
    detail: str


@dataclass(frozen=True)
class Outcomes:
    """The results of a batch."""

    values: list[Any]
    """A result for each sample; None where it failed."""
    failures: dict[int, Failure]
    """By index in the batch."""
    exhausted: Counter[str]
    """Samples that exhausted the function, by kind; it returned a value for them all the same."""
    printed: str = ""
    """The beginning of what the function printed, if it is captured."""
    invalid: str = ""
    """What is wrong with a result for several samples, which were then judged one by one."""


class CannotStart(Exception):
    """The functions cannot be imported in another process; the message says why."""


class _Process(Protocol):
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Pool:
    """Worker processes for some functions, and the supervisor process that manages them.

    A new interpreter imports the functions by name. With ``fork``, the workers start from a copy of this process, and
    the functions need no name.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], limits: Limits, fork: bool = False) -> None:
        self._limits, self._fork = limits, fork
        self._names: dict[int, str] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._numbers = itertools.count()
        self._outstanding: dict[int, dict[str, Any]] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._restarts = 0
        self._channel: Channel
        self._finalizer: weakref.finalize[[socket.socket, _Process, int], Pool]
        for number, function in enumerate(functions):
            self._register(function, str(number) if fork else _importable(function))
        self._open()

    def submit(
        self,
        function: Callable[..., Any],
        batch: Sequence[Any] | Mapping[str, Sequence[Any]],
        urgent: bool = False,
    ) -> int:
        """Call a function on a batch, in chunks, as ``function(values)`` or ``function(**lists)``.

        Returns the batch's number, for :meth:`collect`. The values must be plain (see ``protocol.is_plain``). An
        ``urgent`` batch comes before those that wait for a worker.
        """
        name = self._names.get(id(function)) or self._import_function(function)
        lists = batch if isinstance(batch, Mapping) else {POSITIONAL: batch}
        number = next(self._numbers)
        arguments = {key: pack(values) for key, values in lists.items()}
        self._outstanding[number] = {"batch": number, "function": name, "arguments": arguments, "urgent": urgent}
        try:
            self._wait_until_ready()
            self._channel.send(self._outstanding[number])
        except (OSError, EOFError):
            self._restart()
        return number

    def collect(self, number: int) -> Outcomes:
        """Wait for a batch. A UserError of the function is raised: it concerns the function, not a sample."""
        while number not in self._answers:
            try:
                self._wait_until_ready()
                self._store_answer(self._channel.receive())
            except (OSError, EOFError):
                self._restart()
        message = self._answers.pop(number)
        if "error" in message:
            raise UserError(message["error"])
        failures = {index: Failure(kind, detail) for index, kind, detail in message["failures"]}
        exhausted = Counter(message["exhausted"])
        return Outcomes(message["values"], failures, exhausted, message["printed"], message["invalid"])

    def forget(self, number: int) -> None:
        """Do without the outcomes of a batch."""
        self._outstanding.pop(number, None)
        self._answers.pop(number, None)

    @property
    def pending(self) -> int:
        """How many batches were submitted and neither collected nor forgotten."""
        return len(self._outstanding) + len(self._answers)

    def close(self) -> None:
        """End all processes; batches not yet collected are lost. ``submit`` opens the pool again."""
        self._finalizer()
        self._outstanding.clear()
        self._answers.clear()
        self._ready = False

    def wait_until_ready(self) -> None:
        """Wait until the functions are imported; otherwise CannotStart, or the UserError that one of them raised."""
        try:
            self._wait_until_ready()
        except (OSError, EOFError) as error:
            raise CannotStart("the process that should run them died") from error

    def _register(self, function: Callable[..., Any], name: str) -> str:
        self._names[id(function)] = name
        self._functions[name] = function  # also keeps its id from being reused
        return name

    def _import_function(self, function: Callable[..., Any]) -> str:
        """Have the supervisor import one more function."""
        if self._fork:
            raise ValueError("a forked pool knows only the functions that it was made with")
        name = _importable(function)
        while True:
            try:
                self._wait_until_ready()
                self._channel.send({"function": name})
                self._wait_for_import()
                return self._register(function, name)
            except (OSError, EOFError):
                self._restart()

    def _wait_for_import(self) -> None:
        while True:
            message = self._channel.receive()
            if "known" in message:
                return
            if "unknown" in message:
                raise _cannot_start(message["raised"])
            self._store_answer(message)

    def _open(self) -> None:
        mine, theirs = socket.socketpair()
        process = (
            _fork_supervisor(mine, theirs, self._functions, self._limits)
            if self._fork
            else self._spawn_supervisor(theirs)
        )
        theirs.close()
        self._channel, self._ready = Channel(mine), False
        self._finalizer = weakref.finalize(self, _shut_down, mine, process, os.getpid())

    def _spawn_supervisor(self, end: socket.socket) -> _Process:
        # The same hashes, and so the same order of sets, in every worker and every run.
        environment = {**os.environ, "PYTHONHASHSEED": "0", **dict.fromkeys(_THREAD_VARIABLES, "1")}
        path = [os.getcwd() if entry == "" else entry for entry in sys.path]
        arguments = [json.dumps(path), str(end.fileno()), json.dumps([list(self._functions), asdict(self._limits)])]
        null = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-c", _SUPERVISOR_PROGRAM, *arguments], stdin=null, stdout=null, stderr=null,
            env=environment, pass_fds=[end.fileno()], start_new_session=True,
        )  # fmt: skip

    def _wait_until_ready(self) -> None:
        if not self._finalizer.alive:
            self._open()
        if not self._ready:
            try:
                message = self._channel.receive(_MAX_START_SECONDS)
            except TimeoutError as error:
                raise CannotStart(f"importing them takes more than {_MAX_START_SECONDS:g} s") from error
            if "failed" in message:
                raise _cannot_start(message["failed"])
            self._ready = True

    def _store_answer(self, message: dict[str, Any]) -> None:
        if "batch" in message:
            if self._outstanding.pop(message["batch"], None) is not None:  # None: forgotten
                self._answers[message["batch"]] = message
            self._restarts = 0  # over a long run, a supervisor may be killed now and then

    def _restart(self) -> None:
        """Start a new supervisor after the old one ended, and send it all unanswered batches."""
        while True:
            self._finalizer()
            self._restarts += 1
            if self._restarts > _MAX_RESTARTS:
                raise RunError(
                    f"the process that runs the checks was ended {self._restarts} times in a row: if memory is "
                    "short, lower check_workers; check_workers: 0 runs them in the training process"
                )
            try:
                self._wait_until_ready()
                for message in self._outstanding.values():
                    self._channel.send(message)
            except (OSError, EOFError):
                continue
            except CannotStart as error:
                raise RunError(
                    f"the process that runs the checks was ended, and none can be started again: {error}"
                ) from error
            return


class _ForkedProcess:
    """A child process made by ``os.fork``, with the methods of ``subprocess.Popen`` used here."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 0.0)
        while True:
            try:
                pid, status = os.waitpid(self._pid, 0 if timeout is None else os.WNOHANG)
            except ChildProcessError:
                return 0
            if pid:
                return status
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("supervisor", timeout or 0.0)
            time.sleep(0.002)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _fork_supervisor(
    mine: socket.socket, theirs: socket.socket, functions: Mapping[str, Callable[..., Any]], limits: Limits
) -> _Process:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons advise against forking a process that has threads
        pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            mine.close()
            serve(theirs, functions, limits)
        finally:
            os._exit(0)
    return _ForkedProcess(pid)


def _shut_down(end: socket.socket, process: _Process, owner: int) -> None:
    """Close the connection, which ends the supervisor and its workers; does nothing in a fork of this process."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # closes it even if another process has a copy of the descriptor
    end.close()
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:  # it is still importing
        process.kill()
        process.wait()


def _importable(function: Callable[..., Any]) -> str:
    name = reference_of(function)
    if name is None:
        raise UserError(f"{function!r} cannot be imported by name: define it with def in a module")
    return name


def _cannot_start(raised: Mapping[str, Any]) -> Exception:
    if raised["user"]:
        return UserError(raised["text"])
    return CannotStart(exception_text(raised))
