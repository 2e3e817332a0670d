"""The decoder's step of T5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5ForConditionalGeneration

from cdpg.models.fast.cache import PrefixLayer, Shared
from cdpg.models.fast.steps import (
    SEGMENT,
    AddLinear,
    Linear,
    RowCache,
    Steps,
    StepState,
    add_linear,
    all_plain,
    linear,
    own_attention,
)


@dataclass(frozen=True)
class _Layer:
    """The parts of a block; the weights of a norm are in the products that follow it."""

    query_key_value: Linear
    output: AddLinear
    cross_query: Linear
    cross_output: AddLinear
    inner: Linear
    outer: AddLinear


class T5Steps(Steps):
    """Steps of a T5 with plain feed-forward layers."""

    def __init__(self, model: Any, rows: int, packs: bool) -> None:
        decoder: Any = model.get_decoder()
        self._tokens = decoder.embed_tokens.weight.detach()
        self._first: Any = decoder.block[0].layer[0].SelfAttention
        self._heads: int = self._first.n_heads
        self._layers = [_layer(block.layer, rows, packs) for block in decoder.block]
        self._activation = decoder.block[0].layer[2].DenseReluDense.act
        self._last_norm, self._epsilon = decoder.final_layer_norm, model.config.layer_norm_epsilon
        self._biases = self._biases_of(2 * SEGMENT)

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether this is such a model, and its layers are as they were made."""
        if type(model) is not T5ForConditionalGeneration:
            return False
        found: Any = model
        blocks = [block.layer for block in found.get_decoder().block]
        plain = all(type(layers[2].DenseReluDense) is T5DenseActDense for layers in blocks)
        return plain and all_plain(
            layer
            for own, cross, dense in blocks
            for a in (own.SelfAttention, cross.EncDecAttention)
            for layer in (a.q, a.k, a.v, a.o, dense.DenseReluDense.wi, dense.DenseReluDense.wo)
        )

    def begin(self, prefix: Any, shared: Shared, lengths: Tensor) -> StepState:
        prompts = [PrefixLayer(layer.keys, layer.values, shared) for layer in prefix.cross_attention_cache.layers]
        first = prefix.self_attention_cache.layers
        context = shared.groups.context
        own = RowCache(len(first), len(context), self._heads, first[0].keys.shape[3], first[0].keys)
        for position in range(first[0].keys.shape[2]):  # the decoder's first tokens
            own.grow()
            for number, layer in enumerate(first):
                both = torch.stack([layer.keys[:, :, position], layer.values[:, :, position]], dim=1)
                own.add(number, both[context])
        return StepState(prompts, own, shared, lengths)

    def step(self, state: StepState, tokens: Tensor) -> Tensor:
        states = nn.functional.embedding(tokens, self._tokens)
        state.own.grow()
        rows, heads, length = len(tokens), self._heads, state.own.length
        if length > self._biases.shape[2]:
            self._biases = self._biases_of(2 * length)
        bias = self._biases[:, :, -length:]  # a bias depends on the distance alone

        def add_bias(scores: Tensor) -> None:
            scores.view(rows, heads, 1, -1).add_(bias)

        for number, (layer, prompt) in enumerate(zip(self._layers, state.prompts, strict=True)):
            mixed = layer.query_key_value(self._scaled(states)).view(rows, 3, heads, -1)
            state.own.add(number, mixed[:, 1:])
            query = mixed[:, 0].reshape(rows * heads, 1, -1)
            output, _ = own_attention(query, state.own.parts(number), [], add_bias)
            layer.output(output.view(rows, -1), states)
            layer.cross_output(cross_attention(layer.cross_query(self._scaled(states)), prompt, heads), states)
            layer.outer(self._activation(layer.inner(self._scaled(states))), states)
        last: Tensor = self._last_norm(states)
        return last

    def _biases_of(self, length: int) -> Tensor:
        """``[H, 1, T]``: the biases of the last of so many positions."""
        biases: Tensor = self._first.compute_bias(1, length, past_seen_tokens=length - 1)[0].detach()
        return biases

    def _scaled(self, states: Tensor) -> Tensor:
        """The root-mean-square norm without its weights."""
        norm = torch.linalg.vector_norm(states, dim=1, keepdim=True)
        scale: Tensor = norm.square_().mul_(1.0 / states.shape[1]).add_(self._epsilon).rsqrt_()
        return states * scale


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


def _layer(layers: Any, rows: int, packs: bool) -> _Layer:
    own, cross, dense = layers[0].SelfAttention, layers[1].EncDecAttention, layers[2].DenseReluDense
    norms = [layer.layer_norm.weight.detach() for layer in layers]
    joined = torch.cat([own.q.weight, own.k.weight, own.v.weight]).detach()
    how = (None, rows, packs)
    return _Layer(
        linear(joined * norms[0], *how), add_linear(own.o.weight.detach(), *how),
        linear(cross.q.weight.detach() * norms[1], *how), add_linear(cross.o.weight.detach(), *how),
        linear(dense.wi.weight.detach() * norms[2], *how), add_linear(dense.wo.weight.detach(), *how),
    )  # fmt: skip
