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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdpg.models.base import Decoding
from cdpg.models.fast.attention import prompt_scores, prompt_values
from cdpg.models.fast.cache import PrefixLayer, Shared
from cdpg.models.fast.packed_weights import packed_linear, pays

_SMALL = 400
"""PyTorch multiplies many matrices of fewer numbers one by one, which is slower than to add up position by position."""
LAST = 16
"""The last positions of a row's cache, which are stored apart."""
SEGMENT = 64
"""Positions in a full segment of a row's cache, a multiple of :data:`LAST`."""


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
    """The caches of rows that have the same number of tokens of their own."""

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
        used = self.shared.drop_unused()
        if used is not None:
            for prompt in self.prompts:
                prompt.keep(used)

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
    """Keys and values of the rows' own positions, of all layers.

    Attention reads memory without gaps: gaps for positions to come take two thirds of its speed. The last positions are
    in the order of the positions, so that one more is written behind them. When there are :data:`LAST`, they are sorted
    into segments by rows, in which long products are faster.
    """

    def __init__(self, layers: int, rows: int, heads: int, features: int, like: Tensor) -> None:
        self.length, self.rows, self._held = 0, rows, rows
        self._last = [like.new_empty(2, LAST, rows, heads, features) for _ in range(layers)]
        """``[layer]``: ``[2, LAST, R, K, D]``, keys and values of the last positions."""
        self._segments: list[list[Tensor]] = []
        """``[segment][layer]``: ``[2, R, K, positions, D]``, of those before."""

    def grow(self) -> None:
        """Make room for one more position, which :meth:`add` fills."""
        if self.length and self.length % LAST == 0:
            self._sort()
        self.length += 1

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill the last position of a layer from ``[R, K, D]`` each."""
        place = (self.length - 1) % LAST
        self._last[layer][0, place] = keys
        self._last[layer][1, place] = values

    def parts(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values by segment, ``[R · K, positions, D]``."""
        whole = [segment[layer].flatten(1, 2) for segment in self._segments]
        filled = (self.length - 1) % LAST + 1
        last = self._last[layer][:, :filled].flatten(2, 3).transpose(1, 2)
        return [(keys, values) for keys, values in (*whole, last)]

    def keep(self, rows: Tensor) -> None:
        """Keep these rows; only rows that change their position are copied, until half of the memory can be freed."""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        source = rows[moved]
        shrinks = 2 * len(rows) <= self._held
        for axis, buffers in ((2, self._last), *((1, segment) for segment in self._segments)):
            for layer, buffer in enumerate(buffers):
                if len(moved):
                    buffer.index_copy_(axis, moved, buffer.index_select(axis, source))
                kept = buffer.narrow(axis, 0, len(rows))
                buffers[layer] = kept.clone() if shrinks else kept
        self.rows = len(rows)
        self._held = self.rows if shrinks else self._held

    def _sort(self) -> None:
        """Move the last positions to the segments."""
        joins = bool(self._segments) and self._segments[-1][0].shape[3] < SEGMENT
        if not joins:
            self._segments.append([])
        for layer, last in enumerate(self._last):
            by_row = last.permute(0, 2, 3, 1, 4)
            if joins:
                self._segments[-1][layer] = torch.cat([self._segments[-1][layer], by_row], dim=3)
            else:
                self._segments[-1].append(by_row.clone(memory_format=torch.contiguous_format))


class StepDecoding(Decoding):
    """Decoding by :class:`Steps`."""

    joins = True

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
    parts: Sequence[Tensor] = tensor.split([state.own.rows for state in states])
    return parts


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
    products = [_weighted(part, values) for part, (_, values) in zip(own, parts, strict=True)]
    output = products[0]
    for product in products[1:]:
        output += product
    return output, before


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Sums of ``[N, T, D]`` values by ``[N, G, T]`` weights, ``[N, G, D]``."""
    count, positions, features = values.shape
    if weights.shape[1] > 1 or positions * features >= _SMALL or count < _SMALL:
        return torch.bmm(weights, values)
    found = values[:, 0] * weights[:, 0, :1]
    for position in range(1, positions):
        found.addcmul_(values[:, position], weights[:, 0, position, None])
    return found[:, None]


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


def joined(*layers: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weights and biases of some layers as those of one."""
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    weights: list[Tensor] = [layer.weight for layer in layers]
    return torch.cat(weights).detach(), torch.cat(biases).detach() if biases else None


def weight_and_bias(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of a layer."""
    return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
