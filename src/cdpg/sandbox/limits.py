"""What a worker may use, and how the system is told."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from dataclasses import dataclass

from cdpg.config import CDPGConfig

_MALLOC_ARENAS = -8
_DEATH_SIGNAL, _SUBREAPER = 1, 36
_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of a pool; see the settings of the same names in :class:`~cdpg.config.CDPGConfig`."""

    workers: int = 2
    seconds: float = 10.0
    """From the start of a call on one sample to the end of its worker."""
    megabytes: int = 1024
    """What a worker may add to the memory that it had at its start."""
    show_output: bool = False
    """Whether to keep what functions print."""

    @classmethod
    def of(cls, config: CDPGConfig, processes: int = 1) -> Limits:
        """The settings, with the number of workers chosen where it was not: the cores, shared between processes."""
        workers = config.check_workers
        if workers is None:
            workers = max(1, min(8, _cores() // max(1, processes)))
        return cls(workers, config.check_seconds, config.check_memory, config.check_output == "show")

    @property
    def cpu_seconds(self) -> float:
        """Computing time of a marked function on one sample: half, so that it is spent before the clock runs out."""
        return self.seconds / 2

    def wall_seconds(self, text_at_fault: bool) -> float:
        """A marked function only computes, and has a limit on that: the clock is for one that does not get to it."""
        return 2 * self.seconds if text_at_fault else self.seconds

    @property
    def last_seconds(self) -> float:
        """A marked function that computes is given more time than that, since it may get little of a core: so much."""
        return 20 * self.seconds

    @property
    def margin(self) -> int:
        """Bytes: a call that stays below leaves the worker as good as new."""
        return self.megabytes * _MEGABYTE // 8


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Memory:
    """Bytes of this process; zeros where the system does not tell."""

    data: int = 0
    peak: int = 0

    @classmethod
    def now(cls) -> Memory:
        try:
            with open("/proc/self/status", "rb") as file:
                fields = dict(line.split(b":", 1) for line in file if line.startswith(b"Vm"))
            data, peak = (int(fields[key].split()[0]) * 1024 for key in (b"VmData", b"VmPeak"))
        except (OSError, KeyError, ValueError):
            return cls()
        return cls(data, peak)


def limit_memory(used: int, megabytes: float) -> None:
    """Let this process have so much more writable memory than ``used`` bytes; an allocation beyond it fails.

    Counted is what is written to (RLIMIT_DATA): a library or a large reservation that is only mapped costs nothing.
    """
    if used:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = used + int(megabytes * _MEGABYTE)
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def limit_cpu(seconds: float | None) -> None:
    """Die by SIGPROF after so much computing time; None or 0 takes the limit away."""
    signal.setitimer(signal.ITIMER_PROF, seconds or 0.0)


def be_silent() -> None:
    """Nothing is read from, or written to, the streams that the trainer has."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:
        os.close(null)
    # A notebook's streams do not end in these descriptors.
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(place, mode, closefd=False) for place, mode in enumerate("rww"))


def default_signals() -> None:
    """Forget what the trainer does on signals; a broken pipe stays an error, as Python has it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGPROF, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def die_with_parent() -> None:
    """Have the system kill this process when the one that made it ends, however it ends (Linux)."""
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Processes that a dying child leaves behind become this process's own (Linux)."""
    _prctl(_SUBREAPER, 1)


def use_one_arena() -> None:
    """Every thread would otherwise reserve memory of its own, and the limit be met sooner or later (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MALLOC_ARENAS, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
