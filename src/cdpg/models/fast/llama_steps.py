"""The decoder's step of Llama and of families that differ from it in biases and norms of the heads alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

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
    scaled,
    weight_and_bias,
)

_FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(frozen=True)
class _Layer:
    """The parts of a block; the weights of a norm and the scale of the scores are in the products beside them."""

    query_key_value: Linear
    head_norms: Tensor | None
    """``[H + K, D]``: weights of the norms of queries and keys, for families that have them."""
    output: AddLinear
    gate_and_up: Linear
    down: AddLinear


class LlamaSteps(Steps):
    """Steps of a Llama, Mistral, Qwen2 or Qwen3 whose windows reach back to the prompt."""

    def __init__(self, model: Any, rows: int, packs: bool) -> None:
        config, inner = model.config, model.model
        self._tokens, self._rotary = inner.embed_tokens.weight.detach(), inner.rotary_emb
        self._heads: int = config.num_attention_heads
        self._key_heads: int = config.num_key_value_heads
        self._epsilon: float = config.rms_norm_eps
        self._activation = inner.layers[0].mlp.act_fn
        self._layers = [_layer(block, self._heads, self._key_heads, rows, packs) for block in inner.layers]
        self._last_norm = inner.norm

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether this is such a model."""
        return type(model) in _FAMILIES

    def begin(self, prefix: Any, shared: Shared, lengths: Tensor) -> StepState:
        prompts = [PrefixLayer(layer.keys, layer.values, shared) for layer in prefix.layers]
        own = RowCache(len(prompts), len(lengths), self._key_heads, prompts[0].keys.shape[3], prompts[0].keys)
        return StepState(prompts, own, shared, lengths)

    def step(self, states: Sequence[StepState], tokens: Tensor) -> Tensor:
        hidden = nn.functional.embedding(tokens, self._tokens)
        cosine, sine = self._rotary(hidden, torch.cat([state.positions for state in states])[:, None])  # [R, 1, D]
        for state in states:
            state.advance()
        rows, heads, key_heads = len(tokens), self._heads, self._key_heads
        for number, layer in enumerate(self._layers):
            mixed = layer.query_key_value(scaled(hidden, self._epsilon)).view(rows, heads + 2 * key_heads, -1)
            turned = mixed[:, : heads + key_heads]
            if layer.head_norms is not None:
                turned = scaled(turned, self._epsilon) * layer.head_norms
            turned = _rotated(turned, cosine, sine)
            query = turned[:, :heads].unflatten(1, (key_heads, -1))
            seen = attend(states, number, query, turned[:, heads:], mixed[:, heads + key_heads :])
            layer.output(seen, hidden)
            gate, up = layer.gate_and_up(scaled(hidden, self._epsilon)).chunk(2, dim=1)
            layer.down(self._activation(gate).mul_(up), hidden)
        last: Tensor = self._last_norm(hidden)
        return last


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions: the two halves of each head's features are the coordinates that are turned."""
    half = heads.shape[2] // 2
    turned = heads * cosine
    turned[..., :half].addcmul_(heads[..., half:], sine[..., :half], value=-1.0)
    turned[..., half:].addcmul_(heads[..., :half], sine[..., half:])
    return turned


def _layer(block: Any, heads: int, key_heads: int, rows: int, packs: bool) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    before = block.input_layernorm.weight.detach(), block.post_attention_layernorm.weight.detach()
    weight, bias = joined(attention.q_proj, attention.k_proj, attention.v_proj)
    head_norms, queries = None, attention.q_proj.out_features
    if hasattr(attention, "q_norm"):
        norms = attention.q_norm.weight.detach() * attention.scaling, attention.k_norm.weight.detach()
        head_norms = torch.cat([norms[0].expand(heads, -1), norms[1].expand(key_heads, -1)])
    else:
        weight[:queries] *= attention.scaling
        if bias is not None:
            bias[:queries] *= attention.scaling
    inner, inner_bias = joined(mlp.gate_proj, mlp.up_proj)
    return _Layer(
        linear(weight * before[0], bias, rows, packs), head_norms,
        add_linear(*weight_and_bias(attention.o_proj), rows, packs),
        linear(inner * before[1], inner_bias, rows, packs),
        add_linear(*weight_and_bias(mlp.down_proj), rows, packs),
    )  # fmt: skip
