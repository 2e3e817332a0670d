"""Limits on a worker's time and memory, and the system calls that set them."""

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
    """Memory that a call may use beyond what its worker already has."""
    show_output: bool = False
    """Whether to capture what functions print."""

    @classmethod
    def of(cls, config: CDPGConfig, processes: int = 1) -> Limits:
        """The limits in the settings; by default, one worker a core, the cores shared between processes."""
        workers = config.check_workers
        if workers is None:
            workers = max(1, min(8, _cores() // max(1, processes)))
        return cls(workers, config.check_seconds, config.check_memory, config.check_output == "show")

    @property
    def cpu_seconds(self) -> float:
        """CPU limit of a text check for one sample: half of ``seconds``, so that it is reached before the deadline."""
        return self.seconds / 2

    def wall_seconds(self, deterministic: bool) -> float:
        """Time limit of a call. A text check has a CPU limit too; its time limit is longer, in case CPU is scarce."""
        return 2 * self.seconds if deterministic else self.seconds

    @property
    def last_seconds(self) -> float:
        """Last deadline of a text check that still uses CPU; on a busy machine it may get little of a core."""
        return 20 * self.seconds

    @property
    def margin(self) -> int:
        """Bytes: a worker whose calls stay below this growth can be used again."""
        return self.megabytes * _MEGABYTE // 8


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Memory:
    """Memory of this process in bytes; zeros if the system does not report it."""

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
    """Limit this process to ``megabytes`` of writable memory beyond ``used`` bytes; an allocation beyond it fails.

    Only writable memory counts (RLIMIT_DATA): a mapped library or a mere reservation costs nothing.
    """
    if used:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = used + int(megabytes * _MEGABYTE)
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def limit_cpu(seconds: float | None) -> None:
    """End this process by SIGPROF after so many seconds of CPU time; None or 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds or 0.0)


def close_standard_streams() -> None:
    """Point standard input, output and error at the null device instead of the trainer's."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:
        os.close(null)
    # A notebook's streams do not use these descriptors.
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(place, mode, closefd=False) for place, mode in enumerate("rww"))


def reset_signals() -> None:
    """Remove the trainer's signal handlers; SIGPIPE stays ignored, as Python sets it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGPROF, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends, however it ends (Linux)."""
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of processes that a dying child leaves behind (Linux)."""
    _prctl(_SUBREAPER, 1)


def use_one_malloc_arena() -> None:
    """Use one malloc arena: an arena per thread would count against the memory limit, at random times (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MALLOC_ARENAS, 1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
