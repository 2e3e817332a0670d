"""Several training processes as threads of one: what they exchange is exchanged for real, and nothing is launched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from cdpg.system import distributed as parallel
from cdpg.system.distributed import Processes

T = TypeVar("T")


class Meeting:
    """Where all processes bring something and see what the others brought."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._brought: dict[int, Any] = {}
        self._barrier = threading.Barrier(count, timeout=60)

    def exchange(self, index: int, item: Any) -> list[Any]:
        self._brought[index] = item
        self._barrier.wait()
        everything = [self._brought[place] for place in range(self.count)]
        self._barrier.wait()
        return everything

    def call_off(self) -> None:
        self._barrier.abort()


class Accelerator:
    """What :class:`Processes` asks of Accelerate."""

    device = torch.device("cpu")

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting, self.process_index = meeting, index
        self.num_processes, self.is_main_process = meeting.count, index == 0

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return torch.stack(self._meeting.exchange(self.process_index, tensor)).sum(dim=0)

    def wait_for_everyone(self) -> None:
        self._meeting.exchange(self.process_index, None)


def side_by_side(count: int, work: Callable[[Processes], T]) -> list[T]:
    """What ``work`` returns in each of ``count`` processes."""
    meeting, here = Meeting(count), threading.local()

    def gather(own: list[Any]) -> list[Any]:
        return [item for items in meeting.exchange(here.index, own) for item in items]

    def run(index: int) -> T:
        here.index = index
        try:
            return work(Processes(Accelerator(meeting, index)))  # type: ignore[arg-type]
        except BaseException:
            meeting.call_off()  # or the others would wait for it
            raise

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as pool:
        patch.setattr(parallel, "gather_object", gather)
        return list(pool.map(run, range(count)))
