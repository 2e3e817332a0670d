"""Token sequences as tensors: padded prompts, and a batch of sequences during decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdpg.models.fast.cache import PLAIN_LAYERS, cache_layers, select_rows, take


@dataclass
class State:
    """A batch of sequences during decoding."""

    hidden: Tensor
    """``[row, feature]``: predicts the next token."""
    cache: Any
    """Keys and values of everything before it."""
    mask: Tensor
    """``[row, position]``: which positions of the prefix are not padding."""
    lengths: Tensor
    """``[row]``: positions of the prefix that are not padding."""
    steps: int = 0
    """Tokens appended since the prefix, the same for every row."""

    def cut(self) -> list[tuple[Tensor, Tensor]]:
        """Replace hidden states, keys and values by copies without history.

        Returns what was replaced, each with its copy, whose gradient is that of the tensor. A cache that holds more
        than keys and values is left as it is: then there are no copies.
        """
        layers = cache_layers(self.cache)
        if any(type(layer) not in PLAIN_LAYERS for layer in layers):
            return []
        given = [self.hidden, *(tensor for layer in layers for tensor in (layer.keys, layer.values))]
        copies = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given]
        self.hidden = copies[0]
        for layer, keys, values in zip(layers, copies[1::2], copies[2::2], strict=True):
            layer.keys, layer.values = keys, values
        return [pair for pair in zip(given, copies, strict=True) if pair[0].requires_grad]

    def select(self, rows: Tensor) -> None:
        """Select these rows, in this order; a row may occur several times."""
        select_rows(self.cache, rows)
        self.take(rows)

    def take(self, rows: Tensor) -> None:
        """The same for all but the cache."""
        self.hidden = take(self.hidden, rows)
        self.mask, self.lengths = self.mask[rows], self.lengths[rows]


def pad(sequences: Sequence[Sequence[int]], left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[row, position]`` token ids and their mask; padding is token 0, to which nothing attends."""
    width = max(len(sequence) for sequence in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, place] = torch.tensor(sequence, dtype=torch.long)
        mask[row, place] = 1
    return ids.to(device), mask.to(device)
