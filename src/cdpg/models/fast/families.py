"""The families whose decoder's step is written in fewer operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cdpg.models.fast.gpt_neo_steps import GPTNeoSteps
from cdpg.models.fast.llama_steps import LlamaSteps
from cdpg.models.fast.packed_weights import is_plain
from cdpg.models.fast.steps import Steps
from cdpg.models.fast.t5_steps import T5Steps

_STEPS = (GPTNeoSteps, LlamaSteps, T5Steps)
_MAKERS = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
_EXACT = (torch.float32, torch.float64)


def steps_of(model: nn.Module, rows: int, packs: bool) -> Steps | None:
    """The decoder's step of a model, by the weights of now, for about ``rows`` rows; None if there is none for it."""
    found = next((kind for kind in _STEPS if kind.fits(model)), None)
    return None if found is None or not _is_as_made(model) else found(model, rows, packs)


def _is_as_made(model: Any) -> bool:
    """Whether a decoder's modules are those of PyTorch and Transformers, unchanged, not in half precision, on a CPU.

    Adapters take the place of modules, of linear layers as well as of embeddings and norms. Their ``weight`` is that of
    the module they adapt, so that a step would leave them out.
    """
    decoder: nn.Module = model.get_decoder()
    made = all(type(m).__module__.startswith(_MAKERS) and is_plain(m) for m in decoder.modules())
    return made and all(p.dtype in _EXACT and p.device.type == "cpu" for p in decoder.parameters())
