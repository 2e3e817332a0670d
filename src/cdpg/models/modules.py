"""Helpers for PyTorch modules of any model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cdpg.system.shards import part_here


def inner_model(module: nn.Module) -> Any:
    """The Hugging Face model inside PEFT's wrapper, if there is one."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the bits of some tensors; of divided ones, of this process's part."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(part_here(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
