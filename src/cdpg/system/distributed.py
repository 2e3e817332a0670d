"""The training processes of a run: their shares of the contexts, sums and gathers over all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, gather_object
from torch import Tensor, nn

from cdpg.config import CDPGConfig
from cdpg.errors import UserError
from cdpg.system.trackers import require_trackers

T = TypeVar("T")

_SIGNS_OF_LOSS = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "socket closed",
    "nccl",
    "remote process exited",
    "timed out waiting",
    "wait timeout after",
)
"""In messages of the libraries that processes communicate by, in lower case."""
BUCKET_BYTES = 25 * 2**20
"""Gradients that are summed in one call, unless a single one is larger."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, one or many."""

    accelerator: Accelerator

    @property
    def count(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def share(self, total: int) -> range:
        """This process's part of ``range(total)``; parts are consecutive and their sizes differ by at most one."""
        index = self.accelerator.process_index
        return range(index * total // self.count, (index + 1) * total // self.count)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, on every process."""
        if self.count == 1:
            return tensor
        moved = tensor.to(self.accelerator.device)
        summed: Tensor = self.accelerator.reduce(moved.clone(), reduction="sum")
        return summed.to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true in any process."""
        return bool(self.total(torch.tensor(int(flag))))

    def join(self, own: Tensor, share: range, total: int) -> Tensor:
        """Join the rows of all processes, ``[share, …]`` to ``[total, …]``."""
        whole = own.new_zeros(total, *own.shape[1:])
        whole[share.start : share.stop] = own
        return self.total(whole)

    def sum_gradients(self, parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        """Sum the gradients over all processes; a process without a gradient contributes zeros.

        Gradients are joined to buckets of about ``bucket_bytes``, and there is one call for each bucket.
        """
        if self.count == 1:
            return
        for bucket in _buckets(parameters, bucket_bytes):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            summed = self.total(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            parts = summed.split([gradient.numel() for gradient in gradients])
            for parameter, gradient, part in zip(bucket, gradients, parts, strict=True):
                parameter.grad = gradient.copy_(part.view_as(gradient))

    def gather(self, own: Sequence[T]) -> list[T]:
        """The items of all processes, in the order of the processes, on every process."""
        return list(own) if self.count == 1 else list(gather_object(list(own)))

    def from_main(self, own: T) -> T:
        """The main process's value, on every process."""
        return self.gather([own] if self.is_main else [])[0]

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()


def _buckets(parameters: Iterable[nn.Parameter], size: int) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one type and device, of at most ``size`` bytes together or one of them alone."""
    bucket: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        needed = parameter.numel() * parameter.element_size()
        alike = not bucket or (bucket[0].dtype, bucket[0].device) == (parameter.dtype, parameter.device)
        if bucket and (not alike or held + needed > size):
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += needed
    if bucket:
        yield bucket


def processes_here() -> int:
    """Training processes on this machine, as the launcher says; they share the cores."""
    return _launched("LOCAL_WORLD_SIZE")


def processes_in_all() -> int:
    """Training processes on all machines, as the launcher says."""
    return _launched("WORLD_SIZE")


def _launched(variable: str) -> int:
    count = os.environ.get(variable, "1")
    return int(count) if count.isdigit() else 1


def is_lost_process(error: BaseException) -> bool:
    """Whether an exception means that another process can no longer be reached."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS_OF_LOSS)


def make_accelerator(config: CDPGConfig) -> Accelerator:
    """The accelerator for the settings' device and trackers."""
    # Without mixed precision: the models enter autocast themselves.
    require_trackers(config.report_to)
    known = sorted(str(tracker) for tracker in get_available_trackers())
    if missing := [name for name in config.report_to if name not in known]:
        raise UserError(
            f"report_to names {', '.join(map(repr, missing))}, which this version of Accelerate cannot use; it can "
            f"use {', '.join(known) or 'none'}"
        )
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=config.process_seconds))
    # Accelerate connects processes on CPUs only if it is told to use CPUs.
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.accelerator.is_available())
    made = Accelerator(
        cpu=on_cpu, log_with=list(config.report_to) or None, project_dir=config.output_dir, kwargs_handlers=[patience]
    )
    if made.num_processes < processes_in_all():
        raise UserError(
            f"the launcher has started {processes_in_all()} processes, and Accelerate connects {made.num_processes} of "
            f"them on the device {str(made.device)!r}: start one process, or set device to one that it can use"
        )
    return made


def tracker_config(config: CDPGConfig) -> dict[str, Any]:
    """Settings as trackers accept them: numbers, text and booleans."""
    return {
        key: value if isinstance(value, (int, float, bool)) else str(value) for key, value in config.values().items()
    }
