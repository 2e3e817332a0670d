"""The foreman: a process between the trainer and the workers that shares out work, watches clocks and retries.

It runs nothing that it is given and waits for nobody, so that the trainer is answered whatever a worker does. It
imports the functions once; workers are forked from it and need not.
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

from cdpg.sandbox.functions import resolve, traits_of
from cdpg.sandbox.limits import Limits, adopt_orphans, be_silent, default_signals, use_one_arena
from cdpg.sandbox.output import LONGEST
from cdpg.sandbox.processes import Crew, Job, Worker
from cdpg.sandbox.protocol import Channel, pack, unpack
from cdpg.sandbox.worker import in_words, told

_FIRST_CHUNK = 16
_LARGEST_CHUNK = 256
_CHUNK_SECONDS = 0.1
"""What a chunk should take: short, so that little is done twice, and long beside the cost of a message."""
_PATIENCE = 20
"""A chunk that takes so many times what was expected is done again sample by sample, each with the whole limit."""
_LEAST_PATIENCE = 0.25
_HEARTBEAT = 5.0
_FALSE_STARTS = 5
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""What a process brings upon itself; SIGKILL comes from outside, perhaps because memory was short."""


@dataclass
class _Batch:
    """Samples for one function, and what has become of them."""

    function: str
    arguments: dict[str, list[Any]]
    left: int
    values: list[Any]
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    exhausted: Counter[str] = field(default_factory=Counter)
    printed: str = ""
    misshapen: str = ""


class Foreman:
    """Scheduling; see the module. Every method returns at once."""

    def __init__(self, trainer: Channel, functions: dict[str, Callable[..., Any]], limits: Limits) -> None:
        self._trainer, self._functions, self._limits = trainer, functions, limits
        self._crew = Crew(functions, [trainer.fileno()])
        self._batches: dict[int, _Batch] = {}
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._pace: dict[str, float] = {}
        self._false_starts = 0

    def run(self) -> None:
        """Serve until the trainer hangs up or is no more."""
        parent = os.getppid()
        with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
            while os.getppid() == parent:
                self._dispatch()
                for channel in self._ready_channels():
                    if channel is self._trainer:
                        for message in channel.available():
                            self._obey(message)
                self._hear_workers()
                self._watch_clocks()
        for worker in list(self._crew.members):
            self._crew.dismiss(worker)

    # The trainer's side.

    def _ready_channels(self) -> list[Channel]:
        deadlines = [worker.deadline for worker in self._crew.members if worker.job or not worker.ready]
        wait = max(0.0, min([_HEARTBEAT, *(deadline - time.monotonic() for deadline in deadlines)]))
        with selectors.DefaultSelector() as selector:
            for channel in (self._trainer, *(worker.channel for worker in self._crew.members)):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
                selector.register(channel, events, channel)
            found = selector.select(wait)
        for key, events in found:
            if events & selectors.EVENT_WRITE:
                with contextlib.suppress(OSError):  # a worker that is gone is noticed by its silence
                    key.data.flush()
        return [key.data for key, events in found if events & selectors.EVENT_READ]

    def _obey(self, message: dict[str, Any]) -> None:
        if "function" in message and "batch" not in message:
            self._learn(message["function"])
            return
        arguments = {key: unpack(packed) for key, packed in message["arguments"].items()}
        count = len(next(iter(arguments.values())))
        self._batches[message["batch"]] = _Batch(message["function"], arguments, count, [None] * count)
        self._waiting.append(Job(message["batch"], range(count)))
        self._report(message["batch"])

    def _learn(self, reference: str) -> None:
        """Import one more function; workers that were forked without it go."""
        try:
            self._functions[reference] = prepared(resolve(reference))
        except BaseException as error:
            self._trainer.put({"unknown": reference, "raised": told(error)})
            return
        self._trainer.put({"known": reference})
        for worker in list(self._crew.members):
            worker.stale = True
            if worker.job is None:
                self._crew.dismiss(worker)

    def _report(self, number: int) -> None:
        batch = self._batches.get(number)
        if batch is not None and batch.left == 0:
            del self._batches[number]
            self._trainer.put(
                {
                    "batch": number,
                    "values": batch.values,
                    "failures": sorted(batch.failures),
                    "exhausted": dict(batch.exhausted),
                    "printed": batch.printed[:LONGEST],
                    "misshapen": batch.misshapen,
                }
            )

    def _give_up(self, number: int, error: str) -> None:
        """What is wrong with the function, not with a sample: the trainer has to know."""
        if self._batches.pop(number, None) is not None:
            self._trainer.put({"batch": number, "error": error})

    # Sharing out.

    def _dispatch(self) -> None:
        """Chunks for as many workers as were asked for; as many again for samples that are suspected to hang.

        Those mostly sleep: beside the others they cost little, and waiting for them in turn would cost much.
        """
        members, limit = self._crew.members, self._limits.workers
        while self._suspects and sum(worker.job is not None for worker in members) < 2 * limit:
            job = self._suspects.popleft()
            if job.batch in self._batches:
                idle = [worker for worker in members if worker.job is None]
                fresh = next((worker for worker in idle if worker.fresh), None)
                if fresh is None and len(members) >= 2 * limit:
                    self._crew.dismiss(idle[0])
                self._assign(fresh or self._crew.hire(), job)
        while self._waiting and sum(worker.job is not None and not worker.job.each for worker in members) < limit:
            waiting = self._waiting.popleft()
            if waiting.batch not in self._batches or not waiting.places:
                continue
            chunk, rest = self._cut(waiting)
            if rest.places:
                self._waiting.appendleft(rest)
            self._assign(self._hand(chunk), chunk)

    def _hand(self, chunk: Job) -> Worker:
        """A worker for a chunk. One that has worked already is taken first: the fresh ones are for the suspects.

        A sample that comes alone because it takes long gets a fresh one, lest it be judged twice.
        """
        idle = sorted((worker for worker in self._crew.members if worker.job is None), key=lambda worker: worker.fresh)
        if len(chunk.places) > 1 or not self._at_fault(self._batches[chunk.batch]):
            return idle[0] if idle else self._crew.hire()
        if idle and not idle[-1].fresh:
            self._crew.dismiss(idle.pop())
            return self._crew.hire()
        return idle[-1] if idle else self._crew.hire()

    def _cut(self, job: Job) -> tuple[Job, Job]:
        pace = self._pace.get(self._batches[job.batch].function)
        size = _FIRST_CHUNK if pace is None else max(1, min(_LARGEST_CHUNK, int(_CHUNK_SECONDS / max(pace, 1e-9))))
        size = min(size, -(-len(job.places) // self._limits.workers))
        return Job(job.batch, job.places[:size]), Job(job.batch, job.places[size:])

    def _assign(self, worker: Worker, job: Job) -> None:
        batch = self._batches[job.batch]
        places = slice(job.places.start, job.places.stop)
        cpu = self._limits.cpu_seconds if self._at_fault(batch) else None
        message = {
            "function": batch.function,
            "arguments": {key: pack(values[places]) for key, values in batch.arguments.items()},
            "each": job.each,
            "cpu": cpu,
            "megabytes": self._limits.megabytes,
            "show": self._limits.show_output,
        }
        with contextlib.suppress(OSError):  # as in _ready_channels
            worker.take(job, message)
        if worker.ready:
            self._start_clock(worker)

    def _at_fault(self, batch: _Batch) -> bool:
        return traits_of(self._functions[batch.function]).text_at_fault

    # The workers' side.

    def _start_clock(self, worker: Worker) -> None:
        worker.since, worker.computed = time.monotonic(), None
        if worker.job is None:
            worker.deadline = math.inf
            return
        batch = self._batches.get(worker.job.batch)
        limit = self._limits.seconds if batch is None else self._limits.wall_seconds(self._at_fault(batch))
        pace = None if batch is None else self._pace.get(batch.function)
        if not worker.job.each and len(worker.job.places) > 1 and pace is not None:
            least = max(_LEAST_PATIENCE, self._limits.seconds / 10)
            limit = min(limit, max(least, _PATIENCE * pace * len(worker.job.places)))
        worker.deadline = worker.since + limit

    def _hear_workers(self) -> None:
        for worker in list(self._crew.members):
            try:
                answers = worker.channel.available()
            except (EOFError, OSError):
                self._lost(worker, self._crew.bury(worker))
                continue
            for answer in answers:
                if "ready" in answer:
                    worker.ready, self._false_starts = True, 0
                    self._start_clock(worker)
                elif worker in self._crew.members and worker.job is not None:
                    self._answered(worker, worker.job, answer)

    def _answered(self, worker: Worker, job: Job, answer: Mapping[str, Any]) -> None:
        batch = self._batches.get(job.batch)
        heavy = batch is not None and self._at_fault(batch) and answer["grown"] > self._limits.margin
        alone = worker.fresh and worker.done == 0 and (job.each or len(job.places) == 1)
        places = job.places[worker.done : worker.done + 1] if job.each else job.places
        elapsed = time.monotonic() - worker.since
        worker.fresh, worker.done = False, worker.done + len(places)
        if batch is not None:
            self._settle(batch, Job(job.batch, places, job.each), answer, alone, heavy, elapsed)
        leaking = answer["leaked"] > 4 * self._limits.margin
        finished = worker.done == len(job.places)
        if heavy or leaking or (finished and worker.stale):
            self._crew.dismiss(worker)
            self._suspect(job.batch, job.places[worker.done :])
        elif finished:
            worker.job = None
            self._start_clock(worker)
            if sum(member.job is None for member in self._crew.members) > self._limits.workers:
                self._crew.dismiss(worker)
        else:
            self._start_clock(worker)

    def _settle(
        self, batch: _Batch, job: Job, answer: Mapping[str, Any], alone: bool, heavy: bool, elapsed: float
    ) -> None:
        """Take an answer, or have it given again by a fresh worker where earlier samples may have had a part in it."""
        raised = answer.get("raised")
        if "values" in answer:
            pace, now = self._pace.get(batch.function), elapsed / len(job.places)
            self._pace[batch.function] = now if pace is None else 0.7 * pace + 0.3 * now
            if heavy and not alone:
                self._suspect(job.batch, job.places)
                return
            batch.values[job.places.start : job.places.stop] = answer["values"]
            batch.exhausted.update(answer["exhausted"])
            batch.printed += answer["printed"]
            batch.left -= len(job.places)
            self._report(job.batch)
        elif raised is not None and raised["user"]:
            self._give_up(job.batch, raised["text"])
        elif not alone and (not job.each or (raised is not None and raised["kind"] == "memory")):
            if len(job.places) > 1:
                batch.misshapen = batch.misshapen or answer.get("misshapen", "")
            self._suspect(job.batch, job.places)
        else:
            batch.printed += answer["printed"]
            kind, detail = ("value", answer["misshapen"]) if raised is None else (raised["kind"], in_words(raised))
            self._failed(job.batch, job.places.start, kind, detail)

    def _suspect(self, batch: int, places: range) -> None:
        if places and batch in self._batches:
            self._suspects.append(Job(batch, places, each=True))

    def _failed(self, number: int, place: int, kind: str, detail: str) -> None:
        batch = self._batches.get(number)
        if batch is not None:
            batch.failures.append((place, kind, detail))
            batch.left -= 1
            self._report(number)

    def _watch_clocks(self) -> None:
        now = time.monotonic()
        for worker in list(self._crew.members):
            if now >= worker.deadline and self._is_starved(worker, now):
                worker.deadline = now + self._limits.seconds
            elif now >= worker.deadline:
                ready = worker.ready
                self._crew.dismiss(worker)
                self._lost(worker, None if ready else 0)

    def _is_starved(self, worker: Worker, now: float) -> bool:
        """A marked function that computes, however slowly, comes to its own limit; one that stands still is late.

        One that got rid of its limit would compute for ever: nothing is waited for beyond the last seconds.
        """
        if now >= worker.since + self._limits.last_seconds:
            return False
        batch = None if worker.job is None else self._batches.get(worker.job.batch)
        if worker.job is None or batch is None or not worker.ready or not self._at_fault(batch):
            return False
        return (worker.job.each or len(worker.job.places) == 1) and worker.is_computing()

    def _lost(self, worker: Worker, status: int | None) -> None:
        """A worker is gone, by itself or, with None, because its time was up: who is to blame, and who is next."""
        job = worker.job
        if not worker.ready:
            self._false_starts += 1
            if self._false_starts >= _FALSE_STARTS:
                raise EOFError  # the trainer sees this process end, and says so
            if job is not None:
                (self._suspects if job.each else self._waiting).appendleft(job)
            return
        if job is None or job.batch not in self._batches:
            return
        waited = time.monotonic() - worker.since
        kind, detail = _cause(status, self._limits, self._at_fault(self._batches[job.batch]), waited)
        alone = worker.fresh and worker.done == 0
        place, rest = job.places[worker.done : worker.done + 1], job.places[worker.done + 1 :]
        single = job.each or len(job.places) == 1
        if single and (alone or kind in ("timeout", "cpu")):
            self._failed(job.batch, place.start, kind, detail)
            self._suspect(job.batch, rest)
        elif job.each:
            self._suspect(job.batch, place)
            self._suspect(job.batch, rest)
        else:
            self._suspect(job.batch, job.places)


def _cause(status: int | None, limits: Limits, text_at_fault: bool, waited: float) -> tuple[str, str]:
    if status is None:
        last = text_at_fault and waited >= limits.last_seconds
        limit = limits.last_seconds if last else limits.wall_seconds(text_at_fault)
        return "timeout", f"no answer after {limit:g} s (setting check_seconds)"
    if status == -signal.SIGPROF:
        return "cpu", f"more than {limits.cpu_seconds:g} s of computing time (half of the setting check_seconds)"
    if status < 0:
        name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
        return "crashed" if -status in _CRASHES else "died", f"the worker was ended by {name}"
    return "died", f"the worker ended with status {status}"


def prepared(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, after what it wants done before its first call."""
    prepare = traits_of(function).prepare
    if prepare is not None:
        prepare()
    return function


def serve(end: socket.socket, functions: Mapping[str, Callable[..., Any] | None], limits: Limits) -> None:
    """Be the foreman, in a process of one's own: functions are given, or imported where there is only the name."""
    be_silent()
    faulthandler.disable()  # it may have a way of its own to standard error
    default_signals()
    use_one_arena()
    adopt_orphans()
    # Workers are forked with or without threads of a library around, and must not depend on the user's filter.
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # threads do not survive a fork
    trainer = Channel(end)
    try:
        found = {name: prepared(function or resolve(name)) for name, function in functions.items()}
    except BaseException as error:
        trainer.send({"failed": told(error)})
        return
    trainer.send({"ready": True})
    gc.freeze()  # collecting would write to, and so copy, what is shared with the trainer
    Foreman(trainer, found, limits).run()


def main(arguments: Sequence[str]) -> None:
    """In a new interpreter: the number of a socket, the functions' names and the limits."""
    names, limits = json.loads(arguments[1])
    try:
        serve(socket.socket(fileno=int(arguments[0])), dict.fromkeys(names), Limits(**limits))
    finally:
        os._exit(0)  # what a module wants done at exit is the trainer's affair
