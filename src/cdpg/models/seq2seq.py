"""Encoder-decoder models, such as T5, BART and Marian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache

from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.models.base import PromptTokens
from cdpg.models.codec import Codec
from cdpg.models.fast.cache import PrefixLayer, RowLayer, Shared
from cdpg.models.state import State, pad
from cdpg.models.transformer import TransformerModel


class Seq2SeqModel(TransformerModel):
    """The prefix is the encoder's output and the decoder's first tokens, which are not scored."""

    def __init__(
        self,
        module: nn.Module,
        codec: Codec,
        dtype: torch.dtype,
        own_adapters: bool,
        decoder_prefix: Sequence[int],
    ) -> None:
        self.decoder_prefix = tuple(decoder_prefix)
        super().__init__(module, codec, dtype, own_adapters)

    def encode(self, contexts: Sequence[Context], max_length: int) -> list[PromptTokens]:
        window = getattr(self.config, "max_position_embeddings", None)
        needed = len(self.decoder_prefix) + max_length
        if window is not None and needed > window:
            raise UserError(
                f"max_completion_length is {max_length}, but the decoder's window is {window} tokens, "
                f"{len(self.decoder_prefix)} of them taken by its first: lower max_completion_length"
            )
        return super().encode(contexts, max_length)

    def _prefill(self, prompts: Sequence[PromptTokens]) -> State:
        ids, mask = pad(prompts, left=False, device=self.device)
        encoded = self._run("encoder", self.inner.get_encoder(), input_ids=ids, attention_mask=mask).last_hidden_state
        first = torch.tensor([self.decoder_prefix], device=self.device).expand(len(prompts), -1)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        hidden = self._decode(first, encoded, mask, cache)
        return State(hidden[:, -1], cache, mask, mask.sum(dim=1))

    def _extend(self, state: State, tokens: Tensor) -> Tensor:
        state.steps += tokens.shape[1]
        # The encoder's keys and values are in the cache, so only the shape of its output is needed.
        rows, positions = state.mask.shape
        shape_only = state.hidden.new_zeros(1).expand(rows, positions, self._encoder_features)
        return self._decode(tokens, shape_only, state.mask, state.cache)

    def _decoding_cache(self, prefix: Any, shared: Shared, capacity: int, share: bool) -> tuple[Any, list[RowLayer]]:
        """The encoder's keys and values are shared; the decoder's first tokens are few, and copied to each row."""
        own = Shared(shared.groups, None)
        layers = [RowLayer(x.keys, x.values, own, capacity, share=False) for x in prefix.self_attention_cache.layers]
        cross: list[Any] = [
            PrefixLayer(x.keys, x.values, shared) if share else RowLayer(x.keys, x.values, shared, 0, share=False)
            for x in prefix.cross_attention_cache.layers
        ]
        cache = EncoderDecoderCache(Cache(layers=[*layers]), Cache(layers=cross))
        return cache, layers if share else [*layers, *cross]

    def _decode(self, tokens: Tensor, encoded: Tensor, mask: Tensor, cache: Any) -> Tensor:
        output = self._run(
            "decoder",
            self.inner.get_decoder(),
            input_ids=tokens,
            encoder_hidden_states=encoded,
            encoder_attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    @property
    def _encoder_features(self) -> int:
        features: int = self.inner.config.hidden_size
        return features

    def _idle_runs(self) -> dict[str, Callable[[], Any]]:
        def encode() -> Any:
            return self.inner.get_encoder()(input_ids=pad([(0,)], False, self.device)[0])

        def decode() -> Any:
            encoded = torch.zeros(1, 1, self._encoder_features, device=self.device, dtype=self.inner.dtype)
            first = torch.tensor([self.decoder_prefix[:1]], device=self.device)
            return self.inner.get_decoder()(input_ids=first, encoder_hidden_states=encoded, use_cache=False)

        return {"encoder": encode, "decoder": decode}

    def _check_head(self) -> None:
        ids = torch.arange(2, device=self.device)[None]
        decoder_ids = torch.tensor([[*self.decoder_prefix, 1]], device=self.device)
        full = self.inner(input_ids=ids, decoder_input_ids=decoder_ids, use_cache=False)
        hidden = self.inner.get_decoder()(
            input_ids=decoder_ids, encoder_hidden_states=full.encoder_last_hidden_state, use_cache=False
        ).last_hidden_state
        self.head.check(hidden, full.logits, self.config.model_type)
