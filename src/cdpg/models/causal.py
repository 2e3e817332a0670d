"""Decoder-only models, such as GPT-2, GPT-Neo, Llama and Qwen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from cdpg.models.base import PromptTokens
from cdpg.models.fast.cache import RowLayer, Shared
from cdpg.models.state import State, pad
from cdpg.models.transformer import TransformerModel

PREFILLED_AT_ONCE = 2**14
"""Tokens of prompts that are run at once, padding included, before decoding; a single prompt may have more."""


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

    def _prefill_for_decoding(self, prompts: Sequence[PromptTokens]) -> State:
        size = max(1, PREFILLED_AT_ONCE // max(map(len, prompts)))
        first = self._prefill(prompts[:size])
        if len(prompts) <= size:
            return first
        if any(type(layer) is not DynamicLayer for layer in first.cache.layers):  # it may not hold the whole prompt
            return self._prefill(prompts)
        others = [self._prefill(prompts[start : start + size]) for start in range(size, len(prompts), size)]
        return _joined([first, *others])

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


def _joined(parts: Sequence[State]) -> State:
    """Prompts that were run in parts, as if side by side: padded on the left, and nothing attends to the padding."""
    width = max(part.mask.shape[1] for part in parts)
    missing = [width - part.mask.shape[1] for part in parts]
    cache = parts[0].cache
    for number, layer in enumerate(cache.layers):
        found = [part.cache.layers[number] for part in parts]
        for name in ("keys", "values"):
            padded = [
                nn.functional.pad(getattr(x, name), (0, 0, gap, 0)) for x, gap in zip(found, missing, strict=True)
            ]
            setattr(layer, name, torch.cat(padded))
    return State(
        torch.cat([part.hidden for part in parts]),
        cache,
        torch.cat([nn.functional.pad(part.mask, (gap, 0)) for part, gap in zip(parts, missing, strict=True)]),
        torch.cat([part.lengths for part in parts]),
    )
