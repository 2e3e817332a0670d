"""The decoder's step of GPT-Neo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPTNeoForCausalLM

from cdpg.models.fast.cache import PrefixLayer, Shared
from cdpg.models.fast.steps import (
    AddLinear,
    Linear,
    RowCache,
    Steps,
    StepState,
    add_linear,
    attend,
    joined,
    linear,
    weight_and_bias,
)

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


@dataclass(frozen=True)
class _Layer:
    """The parts of a block."""

    norm_1: nn.LayerNorm
    query_key_value: Linear
    output: AddLinear
    norm_2: nn.LayerNorm
    inner: Linear
    outer: AddLinear


class GPTNeoSteps(Steps):
    """Steps of a GPT-Neo whose local windows reach back to the prompt."""

    def __init__(self, model: Any, rows: int, packs: bool) -> None:
        inner = model.transformer
        self._tokens, self._positions = inner.wte.weight.detach(), inner.wpe.weight.detach()
        self._heads: int = inner.h[0].attn.attention.num_heads
        self._layers = [_layer(block, rows, packs) for block in inner.h]
        own = inner.h[0].mlp.act
        self._activation = _gelu if model.config.activation_function in _TANH_GELU else own
        self._last_norm = inner.ln_f

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether this is such a model."""
        return type(model) is GPTNeoForCausalLM

    def begin(self, prefix: Any, shared: Shared, lengths: Tensor) -> StepState:
        prompts = [PrefixLayer(layer.keys, layer.values, shared) for layer in prefix.layers]
        features = prompts[0].keys.shape[3]
        own = RowCache(len(prompts), len(lengths), self._heads, features, prompts[0].keys)
        return StepState(prompts, own, shared, lengths)

    def step(self, states: Sequence[StepState], tokens: Tensor) -> Tensor:
        embed = nn.functional.embedding
        positions = torch.cat([state.positions for state in states])
        hidden = embed(tokens, self._tokens).add_(embed(positions, self._positions))
        for state in states:
            state.advance()
        for number, layer in enumerate(self._layers):
            mixed = layer.query_key_value(layer.norm_1(hidden)).view(len(tokens), 3, self._heads, -1)
            layer.output(attend(states, number, mixed[:, 0, :, None], mixed[:, 1], mixed[:, 2]), hidden)
            layer.outer(self._activation(layer.inner(layer.norm_2(hidden))), hidden)
        last: Tensor = self._last_norm(hidden)
        return last


def _layer(block: Any, rows: int, packs: bool) -> _Layer:
    attention, mlp = block.attn.attention, block.mlp
    how = rows, packs
    return _Layer(
        block.ln_1, linear(*joined(attention.q_proj, attention.k_proj, attention.v_proj), *how),
        add_linear(*weight_and_bias(attention.out_proj), *how),
        block.ln_2, linear(*weight_and_bias(mlp.c_fc), *how), add_linear(*weight_and_bias(mlp.c_proj), *how),
    )  # fmt: skip


def _gelu(features: Tensor) -> Tensor:
    """GELU in its tanh form, as x · σ(2√(2/π)(x + 0.044715 x³)): faster than by the hyperbolic tangent."""
    inner = torch.addcmul(features.new_tensor(_SLOPE), features, features, value=0.044715 * _SLOPE)
    return inner.mul_(features).sigmoid_().mul_(features)
