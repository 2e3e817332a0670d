"""Faster linear layers for sampling on a CPU, where batches are small and the layout of the weights matters.

PyTorch has oneDNN's own layout under private names only. They are used only here; :func:`packing_works` tries them, and
if they fail, layers multiply as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SMALLEST = 3 * 2**18
"""Numbers in the smallest weight that is packed. Products with smaller weights are as fast without packing. For a new
number of rows, oneDNN takes longer to prepare a product than to compute it."""


@contextmanager
def packed_weights(model: nn.Module, rows: int) -> Iterator[None]:
    """Within the block, large float32 linear layers use a copy of their weights in oneDNN's layout for ``rows`` rows.

    For use without gradient and without changes of the weights. The copy takes as long as two to four steps of sampling
    and as much memory as the weights; it is freed at the end.
    """
    layers = _packable_layers(model)
    try:
        for layer in layers:
            weight = layer.weight.detach()
            layer.forward = packed_linear(weight.t() if isinstance(layer, Conv1D) else weight, layer.bias, rows)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def packed_linear(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """``features · weightᵀ + bias`` as a function of ``[..., input]`` features, for an ``[output, input]`` weight."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def linear(features: Tensor) -> Tensor:
        result: Tensor = multiply(features, packed, bias, "none", [], "")
        return result

    return linear


@torch.inference_mode()
def packing_works() -> bool:
    """Whether the private operators exist and agree with the public one, on products of one to four rows."""
    weight, bias = torch.arange(48.0).sin().view(6, 8), torch.arange(6.0)
    features = torch.arange(32.0).cos().view(4, 1, 8)
    try:
        return torch.backends.mkldnn.is_available() and all(
            torch.allclose(
                packed_linear(weight, given, 4)(features[:rows]), nn.functional.linear(features[:rows], weight, given),
                rtol=1e-4, atol=1e-5,
            )
            for rows in (1, 3, 4) for given in (bias, None)
        )  # fmt: skip
    except Exception:  # a later PyTorch may have other names or signatures
        return False


def pays(weight: Tensor) -> bool:
    """Whether products with this weight are faster if it is packed."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALLEST


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is unchanged: no other ``forward``, no hook."""
    return "forward" not in vars(layer) and not layer._forward_hooks and not layer._forward_pre_hooks


def _packable_layers(model: nn.Module) -> list[Any]:
    """Large linear layers of known types whose ``forward`` is not replaced."""
    found: list[Any] = [m for m in model.modules() if type(m) in (nn.Linear, Conv1D) and "forward" not in vars(m)]
    return [layer for layer in found if isinstance(layer.weight, Tensor) and pays(layer.weight)]
