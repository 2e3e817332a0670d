"""Stores the layers of a frozen model in a narrow type, and computes with them in their own.

A layer's weights are widened when it runs, and narrow again after it, so that one layer at a time is wide. There is no
arithmetic in the narrow type. Weights that were stored in it, as in most models on the hub, lose nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cdpg.errors import UserError
from cdpg.models.base import LanguageModel, PromptTokens, Rows
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import sample_chunks

LARGEST_ERROR = 0.01
"""Nats by which the log-probability of a sample may change; a weight is then wrong by 1 %."""
_CONTEXTS, _SAMPLES = 4, 4


def narrow_layers(layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Store the floating-point weights of some layers in ``dtype``; whoever runs a layer has to widen them."""
    for parameter in _floating(layers):
        parameter.data = parameter.data.to(dtype)


def widen_when_run(layers: Sequence[nn.Module], dtype: torch.dtype) -> list[RemovableHandle]:
    """Let layers compute in ``dtype`` with weights that are stored in another; the hooks that do so."""
    hooks: list[RemovableHandle] = []
    for layer in layers:
        stored: dict[nn.Parameter, Tensor] = {}

        def widen(module: nn.Module, args: Any, stored: dict[nn.Parameter, Tensor] = stored) -> None:
            for parameter in _floating([module]):
                stored[parameter] = parameter.data
                parameter.data = parameter.data.to(dtype)

        def narrow(module: nn.Module, args: Any, output: Any, stored: dict[nn.Parameter, Tensor] = stored) -> None:
            for parameter, data in stored.items():
                parameter.data = data
            stored.clear()

        hooks += [layer.register_forward_pre_hook(widen), layer.register_forward_hook(narrow, always_call=True)]
    return hooks


def refuse_large_error(
    exact: LanguageModel, narrow: LanguageModel, prompts: Sequence[PromptTokens], max_length: int, setting: str
) -> float:
    """Compare the log-probabilities of a few samples of the exact model; refuse a model that is too far from it.

    Returns the largest difference of a sample. ``setting`` is what made the model narrow.
    """
    chosen = sorted(prompts, key=len)[:_CONTEXTS]
    stream = UniformStream(0, "narrow", 0)
    differences = [0.0]
    with torch.no_grad():
        for chunk in sample_chunks(exact, chosen, _SAMPLES, max_length, stream, _CONTEXTS * _SAMPLES):
            lengths = torch.tensor([len(tokens) for tokens in chunk.tokens])
            tokens = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.long)
            for row, drawn in enumerate(chunk.tokens):
                tokens[row, : len(drawn)] = torch.tensor(drawn)
            rows = Rows(torch.tensor(chunk.row) // _SAMPLES, tokens, lengths)
            scores = [model.score(chosen, rows).log_prob().double() for model in (exact, narrow)]
            differences += (scores[0] - scores[1]).abs().tolist()
    largest = max(differences)
    if not largest <= LARGEST_ERROR:
        raise UserError(
            f"{setting} changes the base's log-probability of a sample by up to {largest:.3g} nats, and at most "
            f"{LARGEST_ERROR} is allowed, as every weight depends on it: use base_dtype: float32"
        )
    return largest


def _floating(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for layer in layers for p in layer.parameters() if p.is_floating_point()]
