"""Key-value caches for decoding, in which the samples of a context share its prompt.

Axes: C contexts, R rows (samples of all contexts), P positions of a prompt, T positions of a row's own, K key-value
heads, D features of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from cdpg.models.fast.lookup import give


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]`` with a reproducible gradient.

    The gradient of indexing sums in the order of the threads, which changes the last digits; that of an embedding does
    not.
    """
    taken: Tensor = nn.functional.embedding(rows, tensor.flatten(1)).unflatten(1, tensor.shape[1:])
    return taken


PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of a cache that hold keys and values, and no other tensors."""


def cache_layers(cache: Any) -> list[Any]:
    """The layers of a prefix's cache; of an encoder-decoder model, those of both halves."""
    halves = ("self_attention_cache", "cross_attention_cache")
    parts = [getattr(cache, half) for half in halves] if hasattr(cache, halves[0]) else [cache]
    return [layer for part in parts for layer in part.layers]


def select_rows(cache: Any, rows: Tensor) -> None:
    """Select these rows of a prefix's cache; a row may occur several times."""
    for layer in cache_layers(cache):
        if type(layer) in PLAIN_LAYERS and layer.get_seq_length():
            layer.keys, layer.values = take(layer.keys, rows), take(layer.values, rows)
        else:
            layer.batch_select_indices(rows)


@dataclass(frozen=True)
class Groups:
    """The context of each row, in slots such that one product covers all rows of a context and its prompt."""

    context: Tensor
    """``[R]``: the context of each row."""
    count: int
    """Contexts."""
    slots: Tensor | None
    """``[C · width]``: the row in each slot, any row for an empty slot; None if rows are in the order of the slots."""
    place: Tensor | None
    """``[R]``: the slot of each row."""

    @classmethod
    def of(cls, context: Tensor, count: int) -> Groups:
        sizes = torch.bincount(context, minlength=count)
        width = int(sizes.max())
        order = torch.argsort(context, stable=True)
        rows = torch.arange(len(context), device=context.device)
        if len(context) == count * width and bool((order == rows).all()):
            return cls(context, count, None, None)
        first = sizes.cumsum(dim=0) - sizes
        place = torch.empty_like(context)
        place[order] = context[order] * width + rows - first[context[order]]
        slots = torch.zeros(count * width, dtype=torch.long, device=context.device)
        slots[place] = rows
        return cls(context, count, slots, place)

    def spread(self, rows: Tensor) -> Tensor:
        """``[R, …]`` to ``[C, width, …]``."""
        full = rows if self.slots is None else rows.index_select(0, self.slots)
        spread: Tensor = full.unflatten(0, (self.count, -1))
        return spread

    def merge(self, spread: Tensor) -> Tensor:
        """``[C, width, …]`` back to ``[R, …]``."""
        flat = spread.flatten(0, 1)
        return flat if self.place is None else flat.index_select(0, self.place)


@dataclass
class Shared:
    """Facts on the rows that all layers share; it changes when rows leave."""

    groups: Groups
    log_mask: Tensor | None
    """``[C, 1, 1, P]``: 0 at the prompt's tokens, −∞ at its padding; None when there is no padding."""

    @classmethod
    def of(cls, context: Tensor, mask: Tensor) -> Shared:
        padded = not bool(mask.all())
        log_mask = torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, -math.inf)[:, None, None]
        return cls(Groups.of(context, len(mask)), log_mask if padded else None)

    def keep(self, rows: Tensor) -> None:
        self.groups = Groups.of(self.groups.context[rows], self.groups.count)

    def drop_unused(self) -> Tensor | None:
        """Leave out the contexts without rows, if they are at least half of all; returns the others ``[C]``, or None.

        The caches of prompts must follow.
        """
        used: Tensor
        used, context = torch.unique(self.groups.context, return_inverse=True)
        if 2 * len(used) > self.groups.count:
            return None
        self.groups = Groups.of(context, len(used))
        self.log_mask = None if self.log_mask is None else self.log_mask[used]
        return used


class PrefixLayer(CacheLayerMixin):
    """Keys and values of the prompts, ``[C, K, P, D]``; full, and the same for all rows of a context."""

    is_sliding = False
    given: Tensor | None = None
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, shared: Shared) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self.shared, self.is_initialized = keys, values, shared, True
        give(self, keys)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to initialise."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("a prompt's cache takes no further positions")

    def keep(self, contexts: Tensor) -> None:
        """Keep these contexts, in this order."""
        self.keys, self.values = self.keys[contexts], self.values[contexts]
        give(self, self.keys)

    def get_seq_length(self) -> int:
        return int(self.keys.shape[-2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        return self.get_seq_length()


class RowLayer(CacheLayerMixin):
    """Keys and values of each row's own positions, ``[R, K, capacity, D]``, written in place.

    With ``share`` the prompt stays where it is, once a context, and the attention looks at it there; without, for a
    model whose attention is its own, the prompt is copied to the front of every row.
    """

    is_sliding = False
    given: Tensor | None = None
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, shared: Shared, capacity: int, share: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shared = shared
        self.prefix = PrefixLayer(keys, values, shared) if share else None
        context, prompt = shared.groups.context, keys.shape[2]
        self.length = 0 if share else prompt
        size = (len(context), keys.shape[1], self.length + capacity)
        self.keys, self.values = keys.new_empty(*size, keys.shape[3]), values.new_empty(*size, values.shape[3])
        if not share:
            self.keys[:, :, :prompt], self.values[:, :, :prompt] = keys[context], values[context]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to initialise: the buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = key_states, value_states
        self.length = end
        keys = self.keys[:, :, :end]
        give(self, keys)
        return keys, self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length + (0 if self.prefix is None else self.prefix.get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def keep(self, rows: Tensor) -> None:
        """Keep these rows; only rows that change their position are copied."""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        for buffer in (self.keys, self.values):
            if len(moved):
                buffer[moved, :, : self.length] = buffer[rows[moved], :, : self.length]
        self.keys, self.values = self.keys[: len(rows)], self.values[: len(rows)]
