"""Forecasts the memory of a run from what the probe has used.

    run = start + 1.1 · (weights (policy, base) + gradient + Adam's two moments + copies of the best model
                         + the most that a stage needs for itself (sampling, gradient))

What stays follows from the number of weights. What a stage needs for itself depends on the model's architecture, and is
measured: the probe samples the rows of its contexts side by side, as the run does, and differentiates a pass of
``tokens_per_pass`` tokens. The factor is for memory that is freed and not returned to the system.

If the weights are divided among processes (``sharding: full``), each holds

    start + its part of what stays + the most that a stage needs + the parts of the model that are whole meanwhile

without the factor, as freed blocks are then returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cdpg.config import CDPGConfig
from cdpg.models.base import LanguageModel, PromptTokens, Rows
from cdpg.models.narrow import GROUP
from cdpg.models.scoring import COPIED
from cdpg.models.sharding import repeated_blocks
from cdpg.preflight.advice import Advice
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
_WHOLE_PARTS = 2
"""Parts of a divided model that are whole at a time: two layers; embeddings and output layer with their gradient."""
_FORECAST_ERROR = 1.15
"""How much more than the forecast a run may need."""


def used(device: torch.device) -> float:
    """The peak so far, in bytes, of the memory that a model on this device is in."""
    found = memory.peak()
    return found["GPU memory"] if device.type == "cuda" else found["memory"]


def room(device: torch.device, config: CDPGConfig) -> float | None:
    """Bytes that a run on this device may use; None if that is not known."""
    if device.type != "cuda":
        return memory.of_machine() if device.type == "cpu" else None
    engine = config.engine_memory if config.engine == "vllm" and not config.engine_url else 0.0
    return float(torch.cuda.get_device_properties(device).total_memory * (1 - engine))


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
    largest_layer: float
    """Of these, the ones in the largest layer."""
    sampling: float
    """Peak after samples were drawn."""
    gradient: float
    """Peak after a gradient was computed."""
    room: float | None
    """What there is."""
    on_gpu: bool = False

    @classmethod
    def of(cls, model: LanguageModel, start: float, sampling: float, config: CDPGConfig) -> MemoryUse:
        """What is used now, after a gradient."""
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.module.parameters()]
        weights, trained = sum(size for size, _ in sizes), sum(size for size, tuned in sizes if tuned)
        layers = [
            sum(p.numel() * p.element_size() for p in block.parameters()) for block in repeated_blocks(model.module)
        ]
        there, on_gpu = room(model.device, config), model.device.type == "cuda"
        most = max(layers, default=0)
        return cls(start, weights, trained, sum(layers), most, sampling, used(model.device), there, on_gpu)

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
        copies = (_BEST_COPIES if keeps_best else 0) + (_HELD_COPIES if config.sync_every > 1 else 0)
        if self.on_gpu and config.sharding == "none":
            copies = 0  # they are in the machine's memory
        third = 0.0 if config.proposal in (None, "policy", "base") else self.weights
        return self.weights + base + third + self.trained * (1 + _ADAM_MOMENTS + copies)

    def run(self, config: CDPGConfig, keeps_best: bool) -> float:
        """The peak of a run in one process."""
        return self.start + _UNRETURNED * (self.stays(config, keeps_best) + self.stage)

    @property
    def undivided(self) -> float:
        """What each process needs beside its part of what stays."""
        whole = _WHOLE_PARTS * (self.largest_layer + self.weights - self.layers)
        return self.start + self.stage + whole

    def advice(self, config: CDPGConfig, keeps_best: bool) -> list[Advice]:
        """What to do if the run does not fit; nothing if it does, or if it is not known what there is."""
        if self.room is None:
            return []
        if config.sharding != "none":
            return self._advice_on_processes(config, keeps_best)
        needed = self.run(config, keeps_best)
        if needed * _FORECAST_ERROR <= self.room:
            return []
        about, there = memory.format_bytes(needed), memory.format_bytes(self.room)
        sure = needed > self.room
        return [
            Advice(
                "stop" if sure else "careful",
                f"The run needs about {about} of memory, and there {'are only' if sure else 'are'} {there}: lower "
                "tokens_per_pass or rows_per_pass, set gradient_checkpointing: true, train adapters (lora_rank), or "
                "divide the model among several devices (sharding: full).",
            )
        ]

    def _advice_on_processes(self, config: CDPGConfig, keeps_best: bool) -> list[Advice]:
        assert self.room is not None
        there, left = memory.format_bytes(self.room), self.room - self.undivided
        if left <= 0:
            own = memory.format_bytes(self.undivided)
            return [
                Advice(
                    "stop",
                    f"Each process needs {own} beside its part of the weights, and there are only {there}: lower "
                    "tokens_per_pass or rows_per_pass, or set gradient_checkpointing: true.",
                )
            ]
        fewest = math.ceil(self.stays(config, keeps_best) / left)
        if fewest == 1:
            return []
        kind = "GPUs" if self.on_gpu else "machines"
        return [Advice("careful", f"The run needs at least {fewest} {kind} with {there} of memory each.")]


def differentiate_largest_pass(model: LanguageModel, prompts: Sequence[PromptTokens], config: CDPGConfig) -> None:
    """Compute a gradient of ``tokens_per_pass`` tokens, the largest that the run may need: the longest prompt is used.

    If a prompt and a completion have more tokens than that, it is a pass of one row. It has at most as many rows as an
    epoch has samples, or as may share a pass with so long a prompt (:func:`~cdpg.models.scoring.plan_passes`).
    """
    prompt = max(prompts, key=len)
    length, tokens_per_pass = config.max_completion_length, config.tokens_per_pass
    fitting = (tokens_per_pass - len(prompt)) // length, COPIED * tokens_per_pass // max(1, len(prompt))
    rows = max(1, min(*fitting, config.samples_per_epoch))
    tokens = torch.zeros(rows, length, dtype=torch.long)
    whole = Rows(torch.zeros(rows, dtype=torch.long), tokens, torch.full((rows,), length))
    with memory.needed_for("computing the gradient", f"lower tokens_per_pass (now {config.tokens_per_pass})"):
        model.score([prompt], whole).log_prob().sum().backward()
    model.module.zero_grad(set_to_none=False)  # the run keeps these buffers, too
