"""The decoder's step of T5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense, T5ForConditionalGeneration

from cdpg.models.fast.cache import PrefixLayer, Shared
from cdpg.models.fast.steps import (
    AddLinear,
    Linear,
    RowCache,
    Steps,
    StepState,
    add_linear,
    joined,
    linear,
    of_states,
    own_attention,
    scaled,
    weight_and_bias,
)

BIASES = 64
"""Positions whose biases are made at first."""


@dataclass(frozen=True)
class _Layer:
    """The parts of a block; the weights of a norm are in the products that follow it."""

    query_key_value: Linear
    output: AddLinear
    cross_query: Linear
    cross_output: AddLinear
    inner: Linear
    """The first product of the feed-forward layer, both halves of a gated one."""
    outer: AddLinear


class T5Steps(Steps):
    """Steps of a T5, with plain or gated feed-forward layers."""

    def __init__(self, model: Any, rows: int, packs: bool) -> None:
        decoder: Any = model.get_decoder()
        self._tokens = decoder.embed_tokens.weight.detach()
        self._first: Any = decoder.block[0].layer[0].SelfAttention
        self._heads: int = self._first.n_heads
        self._layers = [_layer(block.layer, rows, packs) for block in decoder.block]
        dense = decoder.block[0].layer[2].DenseReluDense
        self._activation, self._gated = dense.act, type(dense) is T5DenseGatedActDense
        self._last_norm, self._epsilon = decoder.final_layer_norm, model.config.layer_norm_epsilon
        self._biases = self._biases_of(BIASES)

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether this is such a model, with feed-forward layers of one known kind."""
        if type(model) is not T5ForConditionalGeneration:
            return False
        kinds = {type(block.layer[2].DenseReluDense) for block in model.get_decoder().block}
        return len(kinds) == 1 and kinds <= {T5DenseActDense, T5DenseGatedActDense}

    def begin(self, prefix: Any, shared: Shared, lengths: Tensor) -> StepState:
        prompts = [PrefixLayer(layer.keys, layer.values, shared) for layer in prefix.cross_attention_cache.layers]
        first = prefix.self_attention_cache.layers
        context = shared.groups.context
        own = RowCache(len(first), len(context), self._heads, first[0].keys.shape[3], first[0].keys)
        for position in range(first[0].keys.shape[2]):  # the decoder's first tokens
            own.grow()
            for number, layer in enumerate(first):
                own.add(number, layer.keys[context, :, position], layer.values[context, :, position])
        return StepState(prompts, own, shared, lengths)

    def step(self, states: Sequence[StepState], tokens: Tensor) -> Tensor:
        hidden = nn.functional.embedding(tokens, self._tokens)
        for state in states:
            state.advance()
        longest = max(state.own.length for state in states)
        if longest > self._biases.shape[2]:
            self._biases = self._biases_of(2 * longest)
        for number, layer in enumerate(self._layers):
            mixed = layer.query_key_value(scaled(hidden, self._epsilon)).view(len(tokens), 3, self._heads, -1)
            layer.output(self._own_attention(states, number, mixed), hidden)
            query = layer.cross_query(scaled(hidden, self._epsilon))
            layer.cross_output(self._cross_attention(states, number, query), hidden)
            layer.outer(self._activated(layer.inner(scaled(hidden, self._epsilon))), hidden)
        last: Tensor = self._last_norm(hidden)
        return last

    def _own_attention(self, states: Sequence[StepState], number: int, mixed: Tensor) -> Tensor:
        """Attention of the rows to their own positions, ``[R, 3, H, D]`` to ``[R, H · D]``."""
        found = []
        for state, part in zip(states, of_states(states, mixed), strict=True):
            state.own.add(number, part[:, 1], part[:, 2])
            query = part[:, 0].reshape(-1, 1, mixed.shape[3])
            bias = self._biases[:, :, -state.own.length :]  # a bias depends on the distance alone
            output, _ = own_attention(query, state.own.parts(number), [], partial(_add_bias, bias))
            found.append(output.view(len(part), -1))
        return torch.cat(found) if len(found) > 1 else found[0]

    def _cross_attention(self, states: Sequence[StepState], number: int, query: Tensor) -> Tensor:
        """Attention of ``[R, H · D]`` queries to the encoder's output, ``[R, H · D]``."""
        parts = zip(states, of_states(states, query), strict=True)
        found = [cross_attention(part, state.prompts[number], self._heads) for state, part in parts]
        return torch.cat(found) if len(found) > 1 else found[0]

    def _activated(self, inner: Tensor) -> Tensor:
        gate, *others = inner.chunk(2, dim=1) if self._gated else (inner,)
        found: Tensor = self._activation(gate)
        return found * others[0] if others else found

    def _biases_of(self, length: int) -> Tensor:
        """``[H, 1, T]``: the biases of the last of so many positions."""
        biases: Tensor = self._first.compute_bias(1, length, past_seen_tokens=length - 1)[0].detach()
        return biases


def _add_bias(bias: Tensor, scores: Tensor) -> None:
    """Add ``[H, 1, T]`` biases to ``[R · H, 1, T]`` scores."""
    scores.view(-1, *bias.shape).add_(bias)


def cross_attention(query: Tensor, prompt: PrefixLayer, heads: int) -> Tensor:
    """``[R, H · D]`` queries to the prompt's part of the output, ``[R, H · D]``; the rows of a context side by side."""
    groups, log_mask = prompt.shared.groups, prompt.shared.log_mask
    spread = groups.spread(query).unflatten(2, (heads, -1)).transpose(1, 2)  # [C, H, width, D]
    scores = torch.bmm(spread.flatten(0, 1), prompt.keys.flatten(0, 1).transpose(1, 2)).view(*spread.shape[:3], -1)
    if log_mask is not None:
        scores += log_mask
    weights = scores.softmax(dim=3).flatten(0, 1)
    values = torch.bmm(weights, prompt.values.flatten(0, 1)).view(spread.shape)
    merged: Tensor = groups.merge(values.transpose(1, 2).flatten(2))
    return merged


def _inner(dense: Any) -> list[nn.Linear]:
    return [dense.wi_0, dense.wi_1] if type(dense) is T5DenseGatedActDense else [dense.wi]


def _layer(layers: Any, rows: int, packs: bool) -> _Layer:
    own, cross, dense = layers[0].SelfAttention, layers[1].EncDecAttention, layers[2].DenseReluDense
    norms = [layer.layer_norm.weight.detach() for layer in layers]
    how = rows, packs
    return _Layer(
        linear(joined(own.q, own.k, own.v)[0] * norms[0], None, *how), add_linear(*weight_and_bias(own.o), *how),
        linear(cross.q.weight.detach() * norms[1], None, *how), add_linear(*weight_and_bias(cross.o), *how),
        linear(joined(*_inner(dense))[0] * norms[2], None, *how), add_linear(*weight_and_bias(dense.wo), *how),
    )  # fmt: skip
