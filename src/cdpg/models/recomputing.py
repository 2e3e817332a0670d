"""Layers whose activations are not kept for the gradient, but computed again in the backward pass.

A layer reads and extends the key-value cache. When it runs a second time, it must find the cache as it was the first
time; so the state of the cache is noted before the first run, and put back before the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache


@contextmanager
def recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which layers keep only their inputs; the backward pass may come after it."""
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = partial(_run, layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    states: list[_State] = []

    def run() -> Any:
        if states:  # the backward pass: everything else is the same as the first time
            for state in states:
                state.put_back()
        else:
            states.extend(_State(cache) for cache in caches)
        return forward(*args, **kwargs)

    return checkpoint(run, use_reentrant=False, preserve_rng_state=False)


class _State:
    """What a cache holds: lists of keys and values, which layers replace and never change in place."""

    def __init__(self, cache: Cache) -> None:
        halves = ("self_attention_cache", "cross_attention_cache")
        parts: list[Any] = [getattr(cache, half) for half in halves if hasattr(cache, half)] or [cache]
        self._layers = [(part.layers, [(layer, dict(vars(layer))) for layer in part.layers]) for part in parts]
        self._updated: Any = getattr(cache, "is_updated", None)
        self._was_updated = dict(self._updated or {})

    def put_back(self) -> None:
        for layers, before in self._layers:
            layers[:] = [layer for layer, _ in before]
            for layer, values in before:
                vars(layer).clear()
                vars(layer).update(values)
        if self._updated is not None:
            self._updated.clear()
            self._updated.update(self._was_updated)
