"""How a tuned model is saved: with generation settings of plain sampling, and with the type of its weights.

The model is tuned and evaluated by sampling from its full distribution. Its original generation settings (a
temperature, penalties, suppressed tokens) would make ``generate`` draw from another distribution, silently. So they are
replaced when the model is saved, and only then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

PLAIN = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
"""Transformers' settings for sampling from the model's own distribution."""

_IDS = ("bos_token_id", "decoder_start_token_id")
_NO_DECODING = frozenset(
    {*_IDS, "eos_token_id", "pad_token_id", "transformers_version", "use_cache", "_from_model_config"}
)
"""Generation settings that do not change the distribution, or that are kept."""


def plain_sampling(model: Any, tokenizer: Any, end_ids: Iterable[int], max_length: int | None) -> GenerationConfig:
    """Generation settings with which ``generate`` samples as the run did, with the same end tokens."""
    own = (getattr(model, "generation_config", None), model.config)
    ids = {
        name: next((found for part in own if (found := getattr(part, name, None)) is not None), None) for name in _IDS
    }
    ends = sorted(end_ids)
    return GenerationConfig(
        **PLAIN,
        **ids,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=_pad(model, tokenizer, ends),
        max_new_tokens=max_length,
    )


def _pad(model: Any, tokenizer: Any, ends: list[int]) -> int | None:
    """The token after a finished row: a special token, which decoding skips, if there is one."""
    special = set(tokenizer.all_special_ids)
    known = [tokenizer.pad_token_id, getattr(model.config, "pad_token_id", None), *ends]
    usable = [token for token in known if isinstance(token, int)]
    return next((token for token in usable if token in special), usable[0] if usable else None)


@contextmanager
def saved_by(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Give a Hugging Face model these generation settings within the block."""
    given = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = given


@contextmanager
def saved_as(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Round the weights to ``dtype``, if given, within the block; tied weights stay tied."""
    parameters = [] if dtype is None else [p for p in module.parameters() if p.is_floating_point()]
    given = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for parameter, data in zip(parameters, given, strict=True):
            parameter.data = data


def left_out(model: Any) -> dict[str, Any]:
    """The model's original generation settings that change the distribution, and are not saved."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return {}
    found = {name: value for name, value in settings.to_diff_dict().items() if name not in _NO_DECODING}
    kept = {name: value for name, value in found.items() if not _is_off(name, value) and value != PLAIN.get(name)}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str, sort_keys=True))
    return plain


def _is_off(name: str, value: Any) -> bool:
    """Whether a setting has no effect: empty, false, None, a factor of 1, or a count of 1."""
    return not value or (isinstance(value, float) and value == 1.0) or (name.startswith("num_") and value == 1)
