"""Faster linear layers while sampling on a CPU: a batch of rows is small, and a weight's layout then matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


@contextmanager
def packed_weights(model: nn.Module, rows: int) -> Iterator[None]:
    """Within it, float32 linear layers multiply by a copy of their weights in oneDNN's own layout for ``rows`` rows.

    For use without gradient and without changing a weight. The copy costs about as much as two to four steps of
    sampling, and as much memory as the weights; both are gone at the end.
    """
    packed = []
    try:
        if _available():
            for module in model.modules():
                if _packable(module):
                    module.forward = _linear(module, rows)
                    packed.append(module)
        yield
    finally:
        for module in packed:
            del module.forward


def _available() -> bool:
    operators: Any = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(operators, "_linear_pointwise")
        and hasattr(operators, "_reorder_linear_weight")
    )


def _packable(module: nn.Module) -> bool:
    if type(module) not in (nn.Linear, Conv1D) or "forward" in vars(module):
        return False
    weight = module.weight
    return isinstance(weight, Tensor) and weight.device.type == "cpu" and weight.dtype == torch.float32


def _linear(module: Any, rows: int) -> Callable[[Tensor], Tensor]:
    weight = module.weight.detach()
    weight = torch.ops.mkldnn._reorder_linear_weight(weight.t() if isinstance(module, Conv1D) else weight, rows)
    multiply, bias = torch.ops.mkldnn._linear_pointwise.default, module.bias

    def forward(features: Tensor) -> Tensor:
        result: Tensor = multiply(features, weight, bias, "none", [], "")
        return result

    return forward
