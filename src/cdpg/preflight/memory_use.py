"""Forecasts the memory of a run from what the probe has used.

    run = start + 1.1 · (weights (policy, base) + gradient + Adam's two moments + copies of the best model
                         + the most that a stage needs for itself (sampling, gradient))

What stays follows from the number of weights. What a stage needs for itself depends on the model's architecture, and is
measured: the probe samples as many rows as the run does, and differentiates a pass of ``tokens_per_pass`` tokens. The
factor is for memory that is freed and not returned to the system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cdpg.config import CDPGConfig
from cdpg.models.base import LanguageModel, PromptTokens, Rows
from cdpg.models.narrow import GROUP
from cdpg.models.sharding import repeated_blocks
from cdpg.system import memory

_UNRETURNED = 1.1
"""Memory that a run takes, over what it holds; forecasts are then 1 to 8% low (``benchmarks/memory.py check``)."""
_ADAM_MOMENTS = 2
"""Numbers that Adam stores for each tuned weight."""
_BEST_COPIES = 2
"""Copies of the tuned weights if the best model is kept: when a better one is found, both are held for a moment."""

_NARROWER = {"float32": 0.0, "bfloat16": 1 / 2, "int8": 3 / 4 - 1 / GROUP}
"""The share of its layers' memory that the base saves; in 8 bits, every group has a scale."""
_HELD_COPIES = 2
"""Copies of them if an earlier policy draws the samples: its own, and that of the present one meanwhile."""


def used() -> float:
    """The peak so far, in bytes: of the GPU, if there is one."""
    found = memory.peak()
    return found.get("GPU memory", found["memory"])


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in the process of the probe."""

    start: float
    """Peak before the model was loaded."""
    weights: float
    """Of the model that was loaded."""
    trained: float
    """Of these, the ones that are tuned."""
    layers: float
    """Of all, the ones in layers, which the base may store in a narrow type."""
    sampling: float
    """Peak after samples were drawn."""
    gradient: float
    """Peak after a gradient was computed."""

    @classmethod
    def of(cls, model: LanguageModel, start: float, sampling: float) -> MemoryUse:
        """What is used now, after a gradient."""
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.module.parameters()]
        weights, trained = sum(size for size, _ in sizes), sum(size for size, tuned in sizes if tuned)
        layers = [p for block in repeated_blocks(model.module) for p in block.parameters()]
        in_layers = sum(p.numel() * p.element_size() for p in layers)
        return cls(start, weights, trained, in_layers, sampling, used())

    @property
    def stage(self) -> float:
        """The most that a stage needs for itself."""
        # A peak only shows if it is above those before it; if the second is not, the first stage needs more.
        without = self.start + self.weights
        return max(self.sampling - without, self.gradient - without - self.trained, 0.0)

    def stays(self, config: CDPGConfig, keeps_best: bool) -> float:
        """What a run holds throughout: weights, gradient, moments, copies."""
        narrow = self.layers * _NARROWER[config.base_dtype]
        base = 0.0 if config.lora_rank else self.weights - narrow
        tuned = 1 + _ADAM_MOMENTS + (_BEST_COPIES if keeps_best else 0) + (_HELD_COPIES if config.sync_every > 1 else 0)
        third = 0.0 if config.proposal in (None, "policy", "base") else self.weights
        return self.weights + base + third + self.trained * tuned

    def run(self, config: CDPGConfig, keeps_best: bool) -> float:
        """The peak of a run in one process."""
        return self.start + _UNRETURNED * (self.stays(config, keeps_best) + self.stage)


def differentiate_largest_pass(model: LanguageModel, prompts: Sequence[PromptTokens], config: CDPGConfig) -> None:
    """Compute a gradient of ``tokens_per_pass`` tokens, the largest that the run may need: the longest prompt is used.

    If a prompt and a completion have more tokens than that, it is a pass of one row. It has at most as many rows as an
    epoch has samples.
    """
    prompt = max(prompts, key=len)
    length = config.max_completion_length
    rows = max(1, min((config.tokens_per_pass - len(prompt)) // length, config.samples_per_epoch))
    tokens = torch.zeros(rows, length, dtype=torch.long)
    whole = Rows(torch.zeros(rows, dtype=torch.long), tokens, torch.full((rows,), length))
    with memory.needed_for("computing the gradient", f"lower tokens_per_pass (now {config.tokens_per_pass})"):
        model.score([prompt], whole).log_prob().sum().backward()
    model.module.zero_grad(set_to_none=False)  # the run keeps these buffers, too
