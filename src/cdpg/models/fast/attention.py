"""Attention of one new position a row over its context's prompt, stored once, and the row's own positions.

Axes as in :mod:`cdpg.models.fast.cache`, with H query heads and G = H / K of them to a key-value head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from cdpg.models.fast.cache import PrefixLayer, RowLayer
from cdpg.models.fast.lookup import layer_of

NAME = "cdpg_shared_prefix"
"""The name of this attention in Transformers' registry."""


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax over the scores of both segments, which is exactly the attention over prompt and own positions.

    ``query [R, H, 1, D]`` and the row's own ``key``, ``value [R, K, T, D]`` (or the prompt's alone, when attending to
    an encoder's output) to ``[R, 1, H, D]``. The heads that share keys and, for the prompt, the rows that share a
    context become query positions of one product, so that nothing is copied.
    """
    layer = layer_of(key)
    unknown = any(kwargs.get(name) is not None for name in ("softcap", "s_aux"))
    if not isinstance(layer, (PrefixLayer, RowLayer)) or query.shape[2] != 1 or unknown:
        raise NotImplementedError(f"{type(module).__name__} asks its attention for something that is not done here")
    own = isinstance(layer, RowLayer)
    prefix = layer.prefix if isinstance(layer, RowLayer) else layer
    rows, heads, _, features = query.shape
    folded = query.reshape(rows, key.shape[1], -1, features)  # [R, K, G, D]
    scores = []
    if prefix is not None:
        scores.append(prompt_scores(folded, prefix))  # [R, K, G, P]
    if own:
        scores.append(_product(folded, key.transpose(2, 3)))  # [R, K, G, T]
    both = torch.cat(scores, dim=-1) if len(scores) > 1 else scores[0]
    both = both * (features**-0.5 if scaling is None else scaling)
    if position_bias is not None:
        both = both + position_bias.expand(-1, heads, -1, -1).reshape(-1, key.shape[1], *both.shape[2:])
    weights = both.softmax(dim=-1)
    output = _product(weights[..., -key.shape[2] :], value) if own else 0.0
    if prefix is not None:
        output = output + prompt_values(weights[..., : prefix.get_seq_length()], prefix)
    assert isinstance(output, Tensor)
    return output.reshape(rows, 1, heads, -1), None


class SharedAttention:
    """Replaces a model's own attention by the one above."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._configs: list[Any] = list({id(m.config): m.config for m in modules if hasattr(m, "config")}.values())
        # The one family whose layers do not read the attention from their configuration.
        self._gpt_neo: list[Any] = [module for module in modules if isinstance(module, GPTNeoSelfAttention)]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the model attends through the shared cache."""
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = NAME
            for module in self._gpt_neo:
                module._attn = _gpt_neo_attention(module)
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation = name
            for module in self._gpt_neo:
                vars(module).pop("_attn", None)


def _gpt_neo_attention(module: nn.Module) -> Callable[..., tuple[Tensor, None]]:
    """The attention with GPT-Neo's interface: scores are not scaled, and heads come before positions."""

    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, None]:
        output, _ = shared_attention(module, query, key, value, attention_mask, scaling=1.0)
        return output.transpose(1, 2), None

    return attend


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix products over two batch axes, flattened to one, which is faster in ``bmm``."""
    product: Tensor = torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])
    return product


def prompt_scores(folded: Tensor, prefix: PrefixLayer) -> Tensor:
    """``[R, K, G, D]`` queries to ``[R, K, G, P]`` scores against the prompt of each row's context; −∞ at padding."""
    groups, log_mask = prefix.shared.groups, prefix.shared.log_mask
    spread = groups.spread(folded).transpose(1, 2)  # [C, K, width, G, D]
    scores = _product(spread.flatten(2, 3), prefix.keys.transpose(2, 3))
    if log_mask is not None:
        scores += log_mask
    return groups.merge(scores.unflatten(2, spread.shape[2:4]).transpose(1, 2))


def prompt_values(weights: Tensor, prefix: PrefixLayer) -> Tensor:
    """``[R, K, G, P]`` weights to the prompt's part of the output, ``[R, K, G, D]``."""
    groups = prefix.shared.groups
    spread = groups.spread(weights).transpose(1, 2)  # [C, K, width, G, P]
    values = _product(spread.flatten(2, 3), prefix.values)
    return groups.merge(values.unflatten(2, spread.shape[2:4]).transpose(1, 2))


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask: padding is masked above, from the cache."""


AttentionInterface.register(NAME, shared_attention)
AttentionMaskInterface.register(NAME, _no_mask)
