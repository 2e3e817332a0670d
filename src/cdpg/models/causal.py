"""Decoder-only models, such as GPT-2, GPT-Neo, Llama and Qwen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from cdpg.models.base import PromptTokens
from cdpg.models.fast.cache import RowLayer, Shared
from cdpg.models.transformer import State, TransformerModel, pad


class CausalModel(TransformerModel):
    """The prefix is the prompt, padded on the left; positions are counted from its first real token."""

    def _prefill(self, prompts: Sequence[PromptTokens]) -> State:
        ids, mask = pad(prompts, left=True, device=self.device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        output = self._run(
            "decoder",
            self.inner.base_model,
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=DynamicCache(),
            use_cache=True,
        )
        return State(output.last_hidden_state[:, -1], output.past_key_values, mask, mask.sum(dim=1))

    def _extend(self, state: State, tokens: Tensor) -> Tensor:
        rows, width = tokens.shape
        positions = state.lengths[:, None] + state.steps + torch.arange(width, device=tokens.device)
        state.steps += width
        # Padding after a row's end needs no mask: nothing that counts comes after it.
        mask = torch.cat([state.mask, state.mask.new_ones(rows, state.steps)], dim=1)
        output = self._run(
            "decoder",
            self.inner.base_model,
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=state.cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _decoding_cache(self, prefix: Any, shared: Shared, capacity: int, share: bool) -> tuple[Any, list[RowLayer]]:
        layers = [RowLayer(layer.keys, layer.values, shared, capacity, share) for layer in prefix.layers]
        return Cache(layers=[*layers]), layers

    def _idle_runs(self) -> dict[str, Callable[[], Any]]:
        return {"decoder": lambda: self.inner.base_model(input_ids=pad([(0,)], True, self.device)[0], use_cache=False)}

    def _check_head(self) -> None:
        ids = torch.arange(2, device=self.device)[None]
        hidden = self.inner.base_model(input_ids=ids, use_cache=False).last_hidden_state
        self.head.check(hidden, self.inner(input_ids=ids, use_cache=False).logits, self.config.model_type)
