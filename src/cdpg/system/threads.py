"""Threads beside other programs: how they wait for each other, and whether the cores are taken.

PyTorch's threads meet after every operation. By default a thread that waits there spins for a few milliseconds: the
fastest way on an idle machine, but a waste of the core that the others need on a busy one, where the thread that is
waited for is not running. The number of threads is never changed here: it decides the order of sums, and so the last
bits of every result.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

_SPINS = "1000"
"""How often a waiting thread looks before it sleeps, about a microsecond. See docs/cluster.md for what it costs."""
_CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""What a user sets to choose another way to wait."""
_BUSY_SHARE = 0.25
"""Share of its time that a process spends waiting for a core, from which on the machine is called busy."""


def limit_spinning(environment: MutableMapping[str, str] | None = None) -> bool:
    """Have waiting threads sleep soon. Whether that was possible: the OpenMP library reads it when torch is loaded."""
    environment = os.environ if environment is None else environment
    if "torch" in sys.modules or any(name in environment for name in _CHOSEN):
        return False
    environment["GOMP_SPINCOUNT"] = _SPINS
    return True


class CoreWatch:
    """Measures how long this process's threads are ready to run and get no core, as Linux counts it."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._waited, self._started = _waited(tasks), time.perf_counter()

    def notice(self, threads: int) -> str | None:
        """One sentence if other programs took the cores since the start; None elsewhere or where it is not known."""
        seconds = time.perf_counter() - self._started
        waited = _waited(self._tasks)
        if waited is None or self._waited is None or seconds <= 0:
            return None
        share = (waited - self._waited) / (threads * seconds)
        if share < _BUSY_SHARE:
            return None
        cure = (
            f"; give each program its share of them, OMP_NUM_THREADS={threads // 2} for this one" if threads > 1 else ""
        )
        return (
            f"the cores are busy: this run's threads waited for one in {share:.0%} of the epoch, because of other "
            f"programs or of its own constraint{cure}"
        )


def _waited(tasks: Path) -> float | None:
    """Seconds that all threads were ready and did not run; None where the system does not count them."""
    try:
        nanoseconds = [int((task / "schedstat").read_text().split()[1]) for task in sorted(tasks.iterdir())]
    except (OSError, ValueError, IndexError):
        return None
    return sum(nanoseconds) / 1e9
