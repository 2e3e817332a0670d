"""Decoder steps of some families, written as few calls a layer.

For a small model most of a step is not arithmetic: modules, masks, copies and caches with gaps take longer than the
products. A step here reads the weights of the model's own modules and does the same in fewer and larger operations. A
family has its steps in a module of its own; models of other families, and models whose layers were changed (by
adapters, for instance), are run by their own code.

Axes: C contexts, R rows, P positions of a prompt, T positions of a row's own, H heads, K key-value heads with G = H / K
heads each, D features of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdpg.models.base import Decoding
from cdpg.models.fast.attention import prompt_scores, prompt_values
from cdpg.models.fast.cache import PrefixLayer, Shared
from cdpg.models.fast.packed_weights import is_plain, packed_linear, pays

SEGMENT = 32
"""Positions in a segment of a row's cache."""


class Steps(ABC):
    """The decoder's step of one model, for weights that do not change meanwhile."""

    @abstractmethod
    def begin(self, prefix: Any, shared: Shared, lengths: Tensor) -> StepState:
        """The state of rows that continue a prefix's cache, whose own tokens are ``lengths [R]`` many."""

    @abstractmethod
    def step(self, states: Sequence[StepState], tokens: Tensor) -> Tensor:
        """Append one token to each row, ``[R]``; ``[R, feature]`` states that predict what follows.

        The rows are those of ``states``, one after the other. All go through the products side by side; each attends
        to its own cache, so that rows of different states may be at different positions.
        """


class StepState:
    """The caches of rows that are at the same position."""

    def __init__(self, prompts: list[PrefixLayer], own: RowCache, shared: Shared, positions: Tensor) -> None:
        self.prompts, self.own, self.shared = prompts, own, shared
        self.positions = positions
        """``[R]``: the position of each row's next token."""

    def advance(self) -> None:
        """Make room for one more token."""
        self.positions = self.positions + 1
        self.own.grow()

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.own.keep(rows)
        self.shared.keep(rows)
        self.positions = self.positions[rows]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of ``[R, K, G, D]`` queries to the prompt and the rows' own positions, ``[R, K · G · D]``.

        ``keys`` and ``values [R, K, D]`` are those of the last position; they are added to the cache.
        """
        self.own.add(layer, keys, values)
        rows, heads = query.shape[:2]
        before = prompt_scores(query, self.prompts[layer]).flatten(0, 1)
        output, weights = own_attention(query.flatten(0, 1), self.own.parts(layer), [before])
        output += prompt_values(weights.unflatten(0, (rows, heads)), self.prompts[layer]).flatten(0, 1)
        return output.view(rows, -1)


class RowCache:
    """Keys and values of the rows' own positions, of all layers, in segments.

    All segments but the last are full, so that attention reads memory without gaps: gaps cost it half of its speed.
    """

    def __init__(self, layers: int, rows: int, heads: int, features: int, like: Tensor) -> None:
        self.layers, self.rows, self.heads, self.features, self.like = layers, rows, heads, features, like
        self.length, self._held = 0, rows
        self.segments: list[list[Tensor]] = []
        """``[segment][layer]``: ``[2, R, K, SEGMENT, D]``, keys and values."""

    def grow(self) -> None:
        """Make room for one more position, which :meth:`add` fills."""
        if self.length == SEGMENT * len(self.segments):
            size = (2, self.rows, self.heads, SEGMENT, self.features)
            self.segments.append([self.like.new_empty(size) for _ in range(self.layers)])
        self.length += 1

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill the last position of a layer from ``[R, K, D]`` each."""
        place = (self.length - 1) % SEGMENT
        self.segments[-1][layer][0, :, :, place] = keys
        self.segments[-1][layer][1, :, :, place] = values

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values by segment, ``[R · K, positions, D]``."""
        found = []
        for number, segment in enumerate(self.segments):
            filled = min(SEGMENT, self.length - SEGMENT * number)
            keys, values = segment[layer].flatten(1, 2).unbind(0)
            found.append((keys[:, :filled], values[:, :filled]))
        return found

    def keep(self, rows: Tensor) -> None:
        """Keep these rows; only rows that change their position are copied, until half of the memory can be freed."""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        source = rows[moved]
        shrinks = 2 * len(rows) <= self._held
        for number, segment in enumerate(self.segments):
            filled = min(SEGMENT, self.length - SEGMENT * number)
            for layer, buffer in enumerate(segment):
                if len(moved):
                    buffer[:, moved, :, :filled] = buffer[:, source, :, :filled]
                kept = buffer[:, : len(rows)]
                segment[layer] = kept.clone() if shrinks else kept
        self.rows = len(rows)
        self._held = self.rows if shrinks else self._held


class StepDecoding(Decoding):
    """Decoding by :class:`Steps`."""

    def __init__(self, steps: Steps, hidden: Tensor, state: StepState) -> None:
        self.steps, self.hidden, self.state = steps, hidden, state

    def advance(self, tokens: Tensor) -> None:
        self.hidden = self.steps.step([self.state], tokens)

    def keep(self, rows: Tensor) -> None:
        self.state.keep(rows)
        self.hidden = self.hidden[rows]


def attend(states: Sequence[StepState], layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """:meth:`StepState.attend` of the rows of several states, one after the other."""
    if len(states) == 1:
        return states[0].attend(layer, query, keys, values)
    parts = zip(states, *(of_states(states, tensor) for tensor in (query, keys, values)), strict=True)
    return torch.cat([state.attend(layer, *part) for state, *part in parts])


def of_states(states: Sequence[StepState], tensor: Tensor) -> Sequence[Tensor]:
    """``[R, …]`` by state."""
    return tensor.split([state.own.rows for state in states])


def advance_together(decodings: Sequence[StepDecoding], tokens: Sequence[Tensor]) -> None:
    """Append one token to each row of several batches of one model, in one step."""
    hidden = decodings[0].steps.step([decoding.state for decoding in decodings], torch.cat([*tokens]))
    for decoding, part in zip(decodings, hidden.split([len(part) for part in tokens]), strict=True):
        decoding.hidden = part


def own_attention(
    query: Tensor,
    parts: list[tuple[Tensor, Tensor]],
    first: list[Tensor],
    adjust: Callable[[Tensor], None] = lambda scores: None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``[R · K, G, D]`` queries to the rows' own positions, ``[R · K, G, D]``.

    ``first`` may hold scores ``[R · K, G, P]`` of positions that come before. ``adjust`` changes all scores in place.
    The weights of the positions before are returned, too.
    """
    scores = [*first, *(torch.bmm(query, keys.transpose(1, 2)) for keys, _ in parts)]
    both = scores[0] if len(scores) == 1 else torch.cat(scores, dim=2)
    adjust(both)
    weights = both.softmax(dim=2)
    sizes = [part.shape[2] for part in scores]
    before, *own = weights.split(sizes, dim=2) if first else (weights[:, :, :0], *weights.split(sizes, dim=2))
    products = [torch.bmm(part, values) for part, (_, values) in zip(own, parts, strict=True)]
    output = products[0]
    for product in products[1:]:
        output += product
    return output, before


def scaled(hidden: Tensor, epsilon: float) -> Tensor:
    """The root-mean-square norm over the last axis, without its weights."""
    norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    scale: Tensor = norm.square_().mul_(1.0 / hidden.shape[-1]).add_(epsilon).rsqrt_()
    return hidden * scale


Linear = Callable[[Tensor], Tensor]
AddLinear = Callable[[Tensor, Tensor], Tensor]
"""Adds a product to its second argument, in place."""


def linear(weight: Tensor, bias: Tensor | None, rows: int, packs: bool) -> Linear:
    """``features · weightᵀ + bias``, by packed weights where that pays."""
    if packs and pays(weight):
        return packed_linear(weight, bias, rows)
    return lambda features: nn.functional.linear(features, weight, bias)


def add_linear(weight: Tensor, bias: Tensor | None, rows: int, packs: bool) -> AddLinear:
    """``residual += features · weightᵀ + bias``."""
    if packs and pays(weight):
        product = packed_linear(weight, bias, rows)
        return lambda features, residual: residual.add_(product(features))
    transposed = weight.t()
    if bias is None:
        return lambda features, residual: residual.addmm_(features, transposed)
    return lambda features, residual: residual.add_(bias).addmm_(features, transposed)


def all_plain(layers: Iterable[Any]) -> bool:
    """Whether these are linear layers as PyTorch has them, on a CPU, unchanged and not stored in half precision."""
    exact = (torch.float32, torch.float64)
    return all(type(layer) is nn.Linear and is_plain(layer) and layer.weight.dtype in exact for layer in layers)
