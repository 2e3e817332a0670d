"""The trainer's end of a pool of worker processes: submit work, go on, collect what has become of it."""

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
from cdpg.sandbox.worker import POSITIONAL, in_words

_START = (
    "import sys; sys.path[:] = filter(None, sys.path); import json; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from cdpg.sandbox.supervisor import main; main(sys.argv[1:])"
)
"""An interpreter that is given code puts the working folder first: a json.py there must not be what is imported."""
_START_WITHIN = 600.0
"""Seconds for the foreman to import the functions and what they prepare."""
_RESTARTS = 3
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


KINDS = ("timeout", "cpu", "memory", "recursion", "size", "crashed", "died", "exception", "value")
"""The clock; limits on computing time, memory, depth and size; a crash; an end from outside; whatever was raised, or
returned though it is no answer."""


@dataclass(frozen=True)
class Failure:
    """Why a sample has no result."""

    kind: str
    """One of ``KINDS``."""
    detail: str


@dataclass(frozen=True)
class Outcomes:
    """What has become of a batch."""

    values: list[Any]
    """A result for each sample; None where it failed."""
    failures: dict[int, Failure]
    """By place in the batch."""
    exhausted: Counter[str]
    """Samples that exhausted the function, which coped, by kind."""
    printed: str = ""
    """The beginning of what it printed, if that is to be shown."""
    misshapen: str = ""
    """What is wrong with an answer to several samples, which were then tried one by one."""


class CannotStart(Exception):
    """The functions cannot be had in another process; the message says why."""


class _Process(Protocol):
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Pool:
    """Workers for some functions. Those that can be imported by name are run by a new interpreter; with ``fork`` they
    may be any, and the workers start from a copy of this process as it is now."""

    def __init__(self, functions: Sequence[Callable[..., Any]], limits: Limits, fork: bool = False) -> None:
        self._limits, self._fork = limits, fork
        self._names: dict[int, str] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._numbers = itertools.count()
        self._outstanding: dict[int, dict[str, Any]] = {}
        self._arrived: dict[int, dict[str, Any]] = {}
        self._restarts = 0
        self._channel: Channel
        self._finalizer: weakref.finalize[[socket.socket, _Process, int], Pool]
        for number, function in enumerate(functions):
            self._register(function, str(number) if fork else _importable(function))
        self._open()

    def submit(self, function: Callable[..., Any], batch: Sequence[Any] | Mapping[str, Sequence[Any]]) -> int:
        """Have a function called on a batch, piece by piece: ``function(values)`` or ``function(**lists)``.

        A number to :meth:`collect` the outcome by. The values must be plain (see ``frames.is_plain``).
        """
        name = self._names.get(id(function)) or self._learn(function)
        lists = batch if isinstance(batch, Mapping) else {POSITIONAL: batch}
        number = next(self._numbers)
        arguments = {key: pack(values) for key, values in lists.items()}
        self._outstanding[number] = {"batch": number, "function": name, "arguments": arguments}
        try:
            self._wait_until_ready()
            self._channel.send(self._outstanding[number])
        except (OSError, EOFError):
            self._restart()
        return number

    def collect(self, number: int) -> Outcomes:
        """Wait for a batch. UserError if the function raised one: then it is at fault, and not a sample."""
        while number not in self._arrived:
            try:
                self._wait_until_ready()
                self._note(self._channel.receive())
            except (OSError, EOFError):
                self._restart()
        message = self._arrived.pop(number)
        if "error" in message:
            raise UserError(message["error"])
        failures = {place: Failure(kind, detail) for place, kind, detail in message["failures"]}
        exhausted, told = Counter(message["exhausted"]), (message["printed"], message["misshapen"])
        return Outcomes(message["values"], failures, exhausted, *told)

    def close(self) -> None:
        """End all processes; a batch that was not collected is lost. Submitting opens the pool again."""
        self._finalizer()
        self._outstanding.clear()
        self._arrived.clear()
        self._ready = False

    def wait_until_ready(self) -> None:
        """Wait until functions are imported; CannotStart, or UserError if one of them said so, if they cannot be."""
        try:
            self._wait_until_ready()
        except (OSError, EOFError) as error:
            raise CannotStart("the process that should run them died") from error

    def _register(self, function: Callable[..., Any], name: str) -> str:
        self._names[id(function)] = name
        self._functions[name] = function  # also keeps its id from being used again
        return name

    def _learn(self, function: Callable[..., Any]) -> str:
        """Have the foreman import one more function, which counts as known once it has been."""
        if self._fork:
            raise ValueError("a forked pool knows only the functions that it was made with")
        name = _importable(function)
        while True:
            try:
                self._wait_until_ready()
                self._channel.send({"function": name})
                self._wait_until_known()
                return self._register(function, name)
            except (OSError, EOFError):
                self._restart()

    def _wait_until_known(self) -> None:
        while True:
            message = self._channel.receive()
            if "known" in message:
                return
            if "unknown" in message:
                raise _cannot_start(message["raised"])
            self._note(message)

    def _open(self) -> None:
        mine, theirs = socket.socketpair()
        process = _forked(mine, theirs, self._functions, self._limits) if self._fork else self._spawned(theirs)
        theirs.close()
        self._channel, self._ready = Channel(mine), False
        self._finalizer = weakref.finalize(self, _end, mine, process, os.getpid())

    def _spawned(self, end: socket.socket) -> _Process:
        # The same hashes, and so the same order of a set, in every worker and every run.
        environment = {**os.environ, "PYTHONHASHSEED": "0", **dict.fromkeys(_ONE_THREAD, "1")}
        path = [os.getcwd() if entry == "" else entry for entry in sys.path]
        arguments = [json.dumps(path), str(end.fileno()), json.dumps([list(self._functions), asdict(self._limits)])]
        null = subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-c", _START, *arguments], stdin=null, stdout=null, stderr=null, env=environment,
            pass_fds=[end.fileno()], start_new_session=True,
        )  # fmt: skip

    def _wait_until_ready(self) -> None:
        if not self._finalizer.alive:
            self._open()
        if not self._ready:
            try:
                message = self._channel.receive(_START_WITHIN)
            except TimeoutError as error:
                raise CannotStart(f"importing them takes more than {_START_WITHIN:g} s") from error
            if "failed" in message:
                raise _cannot_start(message["failed"])
            self._ready = True

    def _note(self, message: dict[str, Any]) -> None:
        if "batch" in message:
            self._outstanding.pop(message["batch"], None)
            self._arrived[message["batch"]] = message
            self._restarts = 0  # a long run may see a foreman ended now and then

    def _restart(self) -> None:
        """Something ended the foreman: all that is still owed is asked for again."""
        while True:
            self._finalizer()
            self._restarts += 1
            if self._restarts > _RESTARTS:
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


class _Forked:
    """A child process that was not made by :mod:`subprocess`."""

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
                raise subprocess.TimeoutExpired("foreman", timeout or 0.0)
            time.sleep(0.002)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _forked(
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
    return _Forked(pid)


def _end(end: socket.socket, process: _Process, owner: int) -> None:
    """Hang up, which ends the foreman and its workers; a copy of this process in a child leaves them alone."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # a copy of the descriptor in another process does not keep it open
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
    return CannotStart(in_words(raised))
