"""The supervisor: a process between the trainer and the workers that schedules, enforces time limits and retries.

It calls none of the functions itself and never blocks, so it answers the trainer whatever a worker does. It imports the
functions once; the workers are forked from it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cdpg.sandbox.functions import prepare_function, resolve, traits_of
from cdpg.sandbox.limits import Limits, adopt_orphans, close_standard_streams, reset_signals, use_one_malloc_arena
from cdpg.sandbox.output import MAX_CAPTURED
from cdpg.sandbox.protocol import Channel, pack, unpack
from cdpg.sandbox.worker import describe_exception, exception_text
from cdpg.sandbox.worker_processes import WorkerProcess, WorkerProcesses, WorkItem

_FIRST_CHUNK = 16
_LARGEST_CHUNK = 256
_CHUNK_SECONDS = 0.1
"""Target for a chunk: short, so that a retry repeats little; long compared with the cost of a message."""
_SLOW_FACTOR = 20
"""A chunk that takes this many times its expected time is repeated sample by sample, each with the full limit."""
_MIN_CHUNK_SECONDS = 0.25
_SLOW_SHARE = 0.1
"""A sample is slow if it takes this share of its time limit."""
_MAX_WAIT = 5.0
_MAX_FAILED_STARTS = 5
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals that a process causes itself; SIGKILL comes from outside, perhaps because memory was short."""


@dataclass
class _Batch:
    """Samples for one function, and their results so far."""

    function: str
    arguments: dict[str, list[Any]]
    left: int
    values: list[Any]
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    exhausted: Counter[str] = field(default_factory=Counter)
    printed: str = ""
    invalid: str = ""


class Supervisor:
    """Schedules chunks of samples; see the module. No method blocks, except ``run``."""

    def __init__(self, trainer: Channel, functions: dict[str, Callable[..., Any]], limits: Limits) -> None:
        self._trainer, self._functions, self._limits = trainer, functions, limits
        self._workers = WorkerProcesses(functions, [trainer.fileno()])
        self._batches: dict[int, _Batch] = {}
        self._waiting: deque[WorkItem] = deque()
        self._retries: deque[WorkItem] = deque()
        self._seconds_per_sample: dict[str, float] = {}
        self._failed_starts = 0

    def run(self) -> None:
        """Serve until the trainer closes the connection or ends."""
        parent = os.getppid()
        with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
            while os.getppid() == parent:
                self._dispatch()
                for channel in self._ready_channels():
                    if channel is self._trainer:
                        for message in channel.available():
                            self._handle_request(message)
                self._read_answers()
                self._check_deadlines()
        for worker in list(self._workers.members):
            self._workers.kill(worker)

    # Messages from and to the trainer.

    def _ready_channels(self) -> list[Channel]:
        deadlines = [worker.deadline for worker in self._workers.members if worker.chunk or not worker.ready]
        wait = max(0.0, min([_MAX_WAIT, *(deadline - time.monotonic() for deadline in deadlines)]))
        with selectors.DefaultSelector() as selector:
            for channel in (self._trainer, *(worker.channel for worker in self._workers.members)):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
                selector.register(channel, events, channel)
            found = selector.select(wait)
        for key, events in found:
            if events & selectors.EVENT_WRITE:
                with contextlib.suppress(OSError):  # a dead worker is noticed when it is read from
                    key.data.flush()
        return [key.data for key, events in found if events & selectors.EVENT_READ]

    def _handle_request(self, message: dict[str, Any]) -> None:
        if "function" in message and "batch" not in message:
            self._import_function(message["function"])
            return
        arguments = {key: unpack(packed) for key, packed in message["arguments"].items()}
        count = len(next(iter(arguments.values())))
        self._batches[message["batch"]] = _Batch(message["function"], arguments, count, [None] * count)
        add = self._waiting.appendleft if message["urgent"] else self._waiting.append
        add(WorkItem(message["batch"], range(count)))
        self._send_if_complete(message["batch"])

    def _import_function(self, reference: str) -> None:
        """Import one more function; workers that were forked without it are replaced."""
        try:
            self._functions[reference] = prepare_function(resolve(reference))
        except BaseException as error:
            self._trainer.put({"unknown": reference, "raised": describe_exception(error)})
            return
        self._trainer.put({"known": reference})
        for worker in list(self._workers.members):
            worker.outdated = True
            if worker.chunk is None:
                self._workers.kill(worker)

    def _send_if_complete(self, number: int) -> None:
        batch = self._batches.get(number)
        if batch is not None and batch.left == 0:
            del self._batches[number]
            self._trainer.put(
                {
                    "batch": number,
                    "values": batch.values,
                    "failures": sorted(batch.failures),
                    "exhausted": dict(batch.exhausted),
                    "printed": batch.printed[:MAX_CAPTURED],
                    "invalid": batch.invalid,
                }
            )

    def _send_error(self, number: int, error: str) -> None:
        """Report an error of the function itself, not of a sample."""
        if self._batches.pop(number, None) is not None:
            self._trainer.put({"batch": number, "error": error})

    # Scheduling.

    def _dispatch(self) -> None:
        """Give chunks to idle workers: up to ``limits.workers`` for new chunks, up to twice that with retries.

        Retried samples often hang, and a hanging call uses little CPU. Running them side by side costs little; one
        after the other, each would take its full time limit.
        """
        members, limit = self._workers.members, self._limits.workers
        while self._retries and sum(worker.chunk is not None for worker in members) < 2 * limit:
            chunk = self._retries.popleft()
            if chunk.batch in self._batches:
                idle = self._workers.idle()
                unused = next((worker for worker in idle if worker.unused), None)
                if unused is None and len(members) >= 2 * limit:
                    self._workers.kill(idle[0])
                self._assign(unused or self._workers.spawn(), chunk)
        while self._waiting and sum(bool(worker.chunk and not worker.chunk.one_by_one) for worker in members) < limit:
            waiting = self._waiting.popleft()
            if waiting.batch not in self._batches or not waiting.indices:
                continue
            chunk, rest = self._split(waiting)
            if rest.indices:
                self._waiting.appendleft(rest)
            self._assign(self._worker_for(chunk), chunk)

    def _worker_for(self, chunk: WorkItem) -> WorkerProcess:
        """A worker for a chunk. Used workers come first: the unused ones are for retries.

        A sample that takes a good part of its limit gets an unused worker, so that its answer needs no retry. Others do
        not: a new worker's first call is slower, so that all samples would seem slow from then on.
        """
        idle = sorted(self._workers.idle(), key=lambda worker: worker.unused)
        batch = self._batches[chunk.batch]
        pace = self._seconds_per_sample.get(batch.function, math.inf)
        slow = len(chunk.indices) == 1 and pace > self._limits.seconds * _SLOW_SHARE
        if not slow or not self._is_deterministic(batch):
            return idle[0] if idle else self._workers.spawn()
        if idle and not idle[-1].unused:
            self._workers.kill(idle.pop())
            return self._workers.spawn()
        return idle[-1] if idle else self._workers.spawn()

    def _split(self, chunk: WorkItem) -> tuple[WorkItem, WorkItem]:
        pace = self._seconds_per_sample.get(self._batches[chunk.batch].function)
        size = _FIRST_CHUNK if pace is None else max(1, min(_LARGEST_CHUNK, int(_CHUNK_SECONDS / max(pace, 1e-9))))
        size = min(size, -(-len(chunk.indices) // self._limits.workers))
        return WorkItem(chunk.batch, chunk.indices[:size]), WorkItem(chunk.batch, chunk.indices[size:])

    def _assign(self, worker: WorkerProcess, chunk: WorkItem) -> None:
        batch = self._batches[chunk.batch]
        part = slice(chunk.indices.start, chunk.indices.stop)
        cpu = self._limits.cpu_seconds if self._is_deterministic(batch) else None
        message = {
            "function": batch.function,
            "arguments": {key: pack(values[part]) for key, values in batch.arguments.items()},
            "one_by_one": chunk.one_by_one,
            "cpu": cpu,
            "megabytes": self._limits.megabytes,
            "show": self._limits.show_output,
        }
        with contextlib.suppress(OSError):  # as in _ready_channels
            worker.assign(chunk, message)
        if worker.ready:
            self._start_clock(worker)

    def _is_deterministic(self, batch: _Batch) -> bool:
        return traits_of(self._functions[batch.function]).deterministic

    # Answers and ends of workers.

    def _start_clock(self, worker: WorkerProcess) -> None:
        worker.since, worker.last_cpu_seconds = time.monotonic(), None
        if worker.chunk is None:
            worker.deadline = math.inf
            return
        batch = self._batches.get(worker.chunk.batch)
        limit = self._limits.seconds if batch is None else self._limits.wall_seconds(self._is_deterministic(batch))
        pace = None if batch is None else self._seconds_per_sample.get(batch.function)
        if not worker.chunk.one_by_one and len(worker.chunk.indices) > 1 and pace is not None:
            least = max(_MIN_CHUNK_SECONDS, self._limits.seconds / 10)
            limit = min(limit, max(least, _SLOW_FACTOR * pace * len(worker.chunk.indices)))
        worker.deadline = worker.since + limit

    def _read_answers(self) -> None:
        for worker in list(self._workers.members):
            try:
                answers = worker.channel.available()
            except (EOFError, OSError):
                self._handle_exit(worker, self._workers.reap(worker))
                continue
            for answer in answers:
                if "ready" in answer:
                    worker.ready, self._failed_starts = True, 0
                    self._start_clock(worker)
                elif worker in self._workers.members and worker.chunk is not None:
                    self._handle_answer(worker, worker.chunk, answer)

    def _handle_answer(self, worker: WorkerProcess, chunk: WorkItem, answer: Mapping[str, Any]) -> None:
        batch = self._batches.get(chunk.batch)
        heavy = batch is not None and self._is_deterministic(batch) and answer["peak_growth"] > self._limits.margin
        isolated = worker.unused and worker.done == 0 and (chunk.one_by_one or len(chunk.indices) == 1)
        indices = chunk.indices[worker.done : worker.done + 1] if chunk.one_by_one else chunk.indices
        elapsed = time.monotonic() - worker.since
        worker.unused, worker.done = False, worker.done + len(indices)
        if batch is not None:
            part = WorkItem(chunk.batch, indices, chunk.one_by_one)
            self._accept_or_retry(batch, part, answer, isolated, heavy, elapsed)
        leaking = answer["leaked"] > 4 * self._limits.margin
        finished = worker.done == len(chunk.indices)
        if heavy or leaking or (finished and worker.outdated):
            self._workers.kill(worker)
            self._retry(chunk.batch, chunk.indices[worker.done :])
        elif finished:
            worker.chunk = None
            self._start_clock(worker)
            if len(self._workers.idle()) > self._limits.workers:
                self._workers.kill(worker)
        else:
            self._start_clock(worker)

    def _accept_or_retry(
        self, batch: _Batch, chunk: WorkItem, answer: Mapping[str, Any], isolated: bool, heavy: bool, elapsed: float
    ) -> None:
        """Take an answer; retry in an unused worker if earlier samples may have affected it."""
        raised = answer.get("raised")
        if "values" in answer:
            pace, now = self._seconds_per_sample.get(batch.function), elapsed / len(chunk.indices)
            self._seconds_per_sample[batch.function] = now if pace is None else 0.7 * pace + 0.3 * now
            if heavy and not isolated:
                self._retry(chunk.batch, chunk.indices)
                return
            batch.values[chunk.indices.start : chunk.indices.stop] = answer["values"]
            batch.exhausted.update(answer["exhausted"])
            batch.printed += answer["printed"]
            batch.left -= len(chunk.indices)
            self._send_if_complete(chunk.batch)
        elif raised is not None and raised["user"]:
            self._send_error(chunk.batch, raised["text"])
        elif not isolated and (not chunk.one_by_one or (raised is not None and raised["kind"] == "memory")):
            if len(chunk.indices) > 1:
                batch.invalid = batch.invalid or answer.get("invalid", "")
            self._retry(chunk.batch, chunk.indices)
        else:
            batch.printed += answer["printed"]
            kind, detail = ("value", answer["invalid"]) if raised is None else (raised["kind"], exception_text(raised))
            self._record_failure(chunk.batch, chunk.indices.start, kind, detail)

    def _retry(self, batch: int, indices: range) -> None:
        if indices and batch in self._batches:
            self._retries.append(WorkItem(batch, indices, one_by_one=True))

    def _record_failure(self, number: int, index: int, kind: str, detail: str) -> None:
        batch = self._batches.get(number)
        if batch is not None:
            batch.failures.append((index, kind, detail))
            batch.left -= 1
            self._send_if_complete(number)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.members):
            if now >= worker.deadline and self._is_starved(worker, now):
                worker.deadline = now + self._limits.seconds
            elif now >= worker.deadline:
                ready = worker.ready
                self._workers.kill(worker)
                self._handle_exit(worker, None if ready else 0)

    def _is_starved(self, worker: WorkerProcess, now: float) -> bool:
        """Whether a late text check may go on: it still uses CPU, and will reach its CPU limit.

        A function may remove its CPU limit, so nothing runs beyond ``limits.last_seconds``.
        """
        if now >= worker.since + self._limits.last_seconds:
            return False
        batch = None if worker.chunk is None else self._batches.get(worker.chunk.batch)
        if worker.chunk is None or batch is None or not worker.ready or not self._is_deterministic(batch):
            return False
        return (worker.chunk.one_by_one or len(worker.chunk.indices) == 1) and worker.is_computing()

    def _handle_exit(self, worker: WorkerProcess, status: int | None) -> None:
        """A worker has ended, or was killed at its deadline (``status`` is None): record the failure or retry."""
        chunk = worker.chunk
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise EOFError  # ends this process; the trainer reports it
            if chunk is not None:
                (self._retries if chunk.one_by_one else self._waiting).appendleft(chunk)
            return
        if chunk is None or chunk.batch not in self._batches:
            return
        waited = time.monotonic() - worker.since
        kind, detail = _failure_cause(status, self._limits, self._is_deterministic(self._batches[chunk.batch]), waited)
        isolated = worker.unused and worker.done == 0
        index, rest = chunk.indices[worker.done : worker.done + 1], chunk.indices[worker.done + 1 :]
        single = chunk.one_by_one or len(chunk.indices) == 1
        if single and (isolated or kind in ("timeout", "cpu")):
            self._record_failure(chunk.batch, index.start, kind, detail)
            self._retry(chunk.batch, rest)
        elif chunk.one_by_one:
            self._retry(chunk.batch, index)
            self._retry(chunk.batch, rest)
        else:
            self._retry(chunk.batch, chunk.indices)


def _failure_cause(status: int | None, limits: Limits, deterministic: bool, waited: float) -> tuple[str, str]:
    if status is None:
        last = deterministic and waited >= limits.last_seconds
        limit = limits.last_seconds if last else limits.wall_seconds(deterministic)
        return "timeout", f"no answer after {limit:g} s (setting check_seconds)"
    if status == -signal.SIGPROF:
        return "cpu", f"more than {limits.cpu_seconds:g} s of computing time (half of the setting check_seconds)"
    if status < 0:
        name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
        return "crashed" if -status in _CRASHES else "died", f"the worker was ended by {name}"
    return "died", f"the worker ended with status {status}"


def serve(end: socket.socket, functions: Mapping[str, Callable[..., Any] | None], limits: Limits) -> None:
    """Run a supervisor in this process; a function that is None is imported by its name."""
    close_standard_streams()
    faulthandler.disable()  # it may write to standard error by a descriptor of its own
    reset_signals()
    use_one_malloc_arena()
    adopt_orphans()
    # Forking with threads warns in newer Pythons; workers must not depend on the user's warning filter.
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # threads do not survive a fork
    trainer = Channel(end)
    try:
        found = {name: prepare_function(function or resolve(name)) for name, function in functions.items()}
    except BaseException as error:
        trainer.send({"failed": describe_exception(error)})
        return
    trainer.send({"ready": True})
    gc.freeze()  # a collection would write to, and so copy, pages shared with the workers
    Supervisor(trainer, found, limits).run()


def main(arguments: Sequence[str]) -> None:
    """Entry point of a new interpreter; arguments: a socket's descriptor, the functions' names and the limits."""
    names, limits = json.loads(arguments[1])
    try:
        serve(socket.socket(fileno=int(arguments[0])), dict.fromkeys(names), Limits(**limits))
    finally:
        os._exit(0)  # exit handlers of imported modules run in the trainer only
