"""The order in which contexts are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cdpg.contexts.contexts import Context
from cdpg.errors import UserError


class ContextStream:
    """One seeded permutation after another, cut into epochs.

    Epoch e takes positions e·count … (e+1)·count-1 of the endless sequence, so that a pass is without replacement and
    an epoch may span two passes. The order is a function of the seed alone: nothing needs to be stored for resuming.
    """

    def __init__(self, contexts: Sequence[Context], seed: int) -> None:
        if not contexts:
            raise UserError("there are no contexts to draw from: give at least one")
        if seed < 0:
            raise UserError(f"the seed must be at least 0, not {seed}")
        self._size = len(contexts)
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def draw(self, epoch: int, count: int) -> list[int]:
        """Indices of the contexts of ``epoch`` (from 0), ``count`` of them."""
        if epoch < 0 or count < 1:
            raise ValueError(f"epoch must be at least 0 and count at least 1, not {epoch} and {count}")
        position, end = epoch * count, (epoch + 1) * count
        indices: list[int] = []
        while position < end:
            number, offset = divmod(position, self._size)
            piece = self._order(number)[offset : offset + end - position]
            indices += piece
            position += len(piece)
        return indices

    def _order(self, number: int) -> list[int]:
        """The permutation of pass ``number``; the last two are cached, since an epoch may span two."""
        order = self._orders.pop(number, None)
        if order is None:
            # Sorted raw draws, not Generator.permutation: numpy keeps only raw draws the same across versions.
            generator = np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=(number,)))
            order = np.argsort(generator.random_raw(self._size), kind="stable").tolist()
        self._orders[number] = order
        while len(self._orders) > 2:
            del self._orders[next(iter(self._orders))]
        return order
