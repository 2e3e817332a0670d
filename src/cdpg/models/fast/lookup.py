"""Finds the cache layer that given keys come from.

A model passes keys and values to its attention, not the cache. A layer registers its keys here, and the attention looks
up the layer by its keys.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary

from torch import Tensor


class GivesKeys(Protocol):
    """A layer of a cache."""

    given: Tensor | None
    """The keys that it gave to the model last."""


_LAYERS: WeakValueDictionary[int, GivesKeys] = WeakValueDictionary()
"""Layers by the identity of the keys that they returned last; weak references."""


def give(layer: GivesKeys, keys: Tensor) -> None:
    """Note that ``keys`` are the layer's."""
    _LAYERS.pop(id(layer.given), None)
    layer.given = keys
    _LAYERS[id(keys)] = layer


def layer_of(keys: Tensor) -> GivesKeys | None:
    """The layer that gave these keys; None if none did."""
    layer = _LAYERS.get(id(keys))
    return layer if layer is not None and layer.given is keys else None
