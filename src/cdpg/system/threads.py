"""How PyTorch's threads wait for each other, and whether other programs take the cores.

PyTorch's threads meet after every operation. By default a waiting thread spins for a few milliseconds. That is fastest
on an idle machine; on a busy one it wastes the core that another thread needs. The number of threads is never changed
here: it decides the order of sums, and so the last bits of every result.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

_SPINS = "1000"
"""How often a waiting thread spins before it sleeps, about a microsecond in all. docs/cluster.md has the cost."""
_CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which a user chooses another way to wait."""
_BUSY_SHARE = 0.25
"""The machine counts as busy from this share of time that a process waits for a core."""


def limit_spinning(environment: MutableMapping[str, str] | None = None) -> bool:
    """Let waiting threads sleep soon; False if it is too late, since OpenMP reads the variable when torch is loaded."""
    environment = os.environ if environment is None else environment
    if "torch" in sys.modules or any(name in environment for name in _CHOSEN):
        return False
    environment["GOMP_SPINCOUNT"] = _SPINS
    return True


class CoreWatch:
    """Measures how long this process's threads are ready to run but get no core, as Linux counts it."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._waited, self._started = _waited(tasks), time.perf_counter()

    def notice(self, threads: int) -> str | None:
        """A sentence if other programs took the cores since the start; None if not, or if it is not known."""
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
    """Seconds for which threads were ready but did not run, summed; None if the system does not count them."""
    try:
        nanoseconds = [int((task / "schedstat").read_text().split()[1]) for task in sorted(tasks.iterdir())]
    except (OSError, ValueError, IndexError):
        return None
    return sum(nanoseconds) / 1e9
