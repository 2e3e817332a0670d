"""The families whose decoder's step is written in fewer operations."""

from __future__ import annotations

from torch import nn

from cdpg.models.fast.gpt_neo_steps import GPTNeoSteps
from cdpg.models.fast.llama_steps import LlamaSteps
from cdpg.models.fast.steps import Steps
from cdpg.models.fast.t5_steps import T5Steps

_STEPS = (GPTNeoSteps, LlamaSteps, T5Steps)


def steps_of(model: nn.Module, rows: int, packs: bool) -> Steps | None:
    """The decoder's step of a model, by the weights of now, for about ``rows`` rows; None if there is none for it."""
    found = next((kind for kind in _STEPS if kind.fits(model)), None)
    return None if found is None else found(model, rows, packs)
