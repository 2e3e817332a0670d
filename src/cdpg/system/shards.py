"""Tensors that are divided among the processes (``DTensor``); to gather one, all processes must take part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T", bound=Tensor)


def is_shard(tensor: Tensor) -> bool:
    """Whether this process holds only its part of the tensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # if it is not loaded, nothing is divided
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; a divided one is gathered, by all processes at the same place."""
    if not is_shard(tensor):
        return tensor
    gathered: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return gathered


def part_here(tensor: Tensor) -> Tensor:
    """This process's part of a divided tensor; another one as it is."""
    part: Tensor = tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return part


def divided_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This process's part of a tensor that all processes have, divided as ``parameter`` is; on its device."""
    if not is_shard(parameter) or is_shard(tensor):
        return tensor.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    place: Any = parameter
    # Without a source there is no communication: every process takes its part of its own copy.
    whole_one = tensor.to(parameter.device, parameter.dtype)
    part: Tensor = distribute_tensor(whole_one, place.device_mesh, place.placements, src_data_rank=None)
    return part


def split(tensors: Sequence[T]) -> tuple[list[T], list[T]]:
    """Whole tensors, and divided ones: no operation takes both kinds together."""
    return [t for t in tensors if not is_shard(t)], [t for t in tensors if is_shard(t)]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all numbers of some tensors, divided or not, on every process."""
    kinds = [kind for kind in split(tensors) if kind]
    norms = [whole(nn.utils.get_total_norm(kind)) for kind in kinds]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
