"""Writes tensors that are divided among the processes to one safetensors file, one whole tensor in memory at a time.

The file is what ``safetensors`` itself would accept: the length of a header, the header in JSON, the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from cdpg.errors import RunError
from cdpg.system import shards

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def is_divided(named: Mapping[str, Tensor]) -> bool:
    """Whether any of the tensors is divided."""
    return any(map(shards.is_shard, named.values()))


def write_divided(path: Path, named: Mapping[str, Tensor]) -> None:
    """Write the tensors; meanwhile all other processes are in :func:`take_part`."""
    header, place = {}, 0
    for name in _order(named):
        tensor = named[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, place + size],
        }  # fmt: skip
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in _gathered(named):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise RunError(f"{name!r} in {path.stem!r} holds NaN or infinite values: no checkpoint was written")
            flat = tensor.cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


def take_part(named: Mapping[str, Tensor]) -> None:
    """Give the main process this one's parts while it writes."""
    if is_divided(named):
        for _ in _gathered(named):
            pass


def _gathered(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name in _order(named):
        yield name, shards.whole(named[name].detach())


def _order(named: Mapping[str, Tensor]) -> list[str]:
    """Names in the order of the file: wide types first, so that every tensor is aligned."""
    return sorted(named, key=lambda name: (-named[name].element_size(), name))
