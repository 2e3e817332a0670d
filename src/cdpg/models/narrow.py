"""Stores the layers of a frozen model in a narrow type, and computes with them in their own.

A layer's weights are widened when it runs, and narrow again after it, so that one layer at a time is wide. There is no
arithmetic in the narrow type. Weights that came in bfloat16, as in most models on the hub, lose nothing in bfloat16.
In 8 bits, ``int8``, every group of up to ``GROUP`` neighbouring weights of a matrix is stored as whole numbers times a
scale, the largest of them over 127.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import draw_samples
from cdpg.models.scoring import score_samples

GROUP, _SMALLEST_GROUP = 32, 8
"""Weights that share a scale in 8 bits, at most and at least."""
_LARGEST = 127
_CONTEXTS, _SAMPLES = 4, 4


class NarrowLayers:
    """Layers whose weights are stored in a narrow type; one is widened while it runs."""

    def __init__(self, layers: Sequence[nn.Module], dtype: torch.dtype, wide: torch.dtype) -> None:
        """Store them in ``dtype``, and let them compute in ``wide``."""
        self.dtype, self.wide = dtype, wide
        self._scales: dict[nn.Parameter, Tensor] = {}
        for parameter in _floating(layers):
            if dtype == torch.int8:
                self._store_groups(parameter)
            else:
                parameter.data = parameter.data.to(dtype)
        self._hooks: list[RemovableHandle] = []
        for layer in layers:
            stored: dict[nn.Parameter, Tensor] = {}

            def widen(module: nn.Module, args: Any, stored: dict[nn.Parameter, Tensor] = stored) -> None:
                for parameter in module.parameters():
                    if parameter.dtype == dtype:
                        stored[parameter] = parameter.data
                        parameter.data = self._widened(parameter)

            def narrow(module: nn.Module, args: Any, output: Any, stored: dict[nn.Parameter, Tensor] = stored) -> None:
                for parameter, data in stored.items():
                    parameter.data = data
                stored.clear()

            self._hooks += [
                layer.register_forward_pre_hook(widen),
                layer.register_forward_hook(narrow, always_call=True),
            ]

    def leave_widening(self) -> None:
        """Let someone else widen the layers when they run."""
        for hook in self._hooks:
            hook.remove()

    def _store_groups(self, parameter: nn.Parameter) -> None:
        """Store a matrix in 8 bits; what is no matrix is small, and stays as it is.

        So does a matrix whose rows cannot be divided into groups; no common width is like that.
        """
        sizes = range(GROUP, _SMALLEST_GROUP - 1, -1)
        group = next((size for size in sizes if parameter.shape[-1] % size == 0), None)
        if parameter.dim() < 2 or group is None:
            return
        groups = parameter.data.unflatten(-1, (-1, group))
        scale = groups.abs().amax(dim=-1, keepdim=True) / _LARGEST
        numbers = (groups / scale.clamp(min=torch.finfo(scale.dtype).tiny)).round()
        parameter.data = numbers.to(torch.int8).flatten(-2)
        self._scales[parameter] = scale

    def _widened(self, parameter: nn.Parameter) -> Tensor:
        if self.dtype != torch.int8:
            return parameter.data.to(self.wide)
        scale = self._scales[parameter]
        groups: Tensor = parameter.data.unflatten(-1, (scale.shape[-2], -1)).to(self.wide)
        return groups.mul_(scale).flatten(-2)


def refuse_large_error(
    exact: LanguageModel,
    narrow: LanguageModel,
    contexts: Sequence[Context],
    prompts: Sequence[PromptTokens],
    config: CDPGConfig,
) -> float:
    """Compare the log-probabilities of a few samples of the exact model; refuse a model that is too far from it.

    Returns the largest difference of a sample, in nats; the setting ``base_error`` is allowed. The contexts with the
    shortest prompts are used.
    """
    chosen = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))[:_CONTEXTS]
    given = [contexts[place] for place in chosen], [prompts[place] for place in chosen]
    samples = draw_samples(exact, *given, _SAMPLES, config, UniformStream(0, "narrow", 0))
    rows = torch.arange(samples.lengths.numel())
    scores = [score_samples(model, samples, rows, config.tokens_per_pass).sum(dim=2) for model in (exact, narrow)]
    largest = float((scores[0] - scores[1]).abs().max())  # NaN if any is
    if not largest <= config.base_error:
        raise UserError(
            f"base_dtype: {config.base_dtype} changes the base's log-probability of a sample by up to {largest:.3g} "
            f"nats, and at most {config.base_error} is allowed (base_error), as every weight depends on it: use "
            "base_dtype: float32, or raise base_error"
        )
    return largest


def _floating(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Each once, also if layers share it."""
    return list(dict.fromkeys(p for layer in layers for p in layer.parameters() if p.is_floating_point()))
