"""The output layer: log-probabilities of given tokens, without ``[token, vocabulary]`` tensors for whole batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from cdpg.errors import UserError

LOGITS_AT_ONCE = 2**26
"""Numbers in the largest ``[token, vocabulary]`` tensor that is held: 256 MB in float32."""
_CACHED = 2**18
"""Numbers that stay in the processor's cache."""


class VocabularyHead:
    """A model's output layer, ``logits = f(hidden)``: projection, scales, bias and soft cap of its family."""

    def __init__(self, model: nn.Module) -> None:
        config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
        self._projection: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self._bias: Tensor | None = getattr(model, "final_logits_bias", None)
        scaled = getattr(config, "scale_decoder_outputs", False)
        self._input_scale = float(config.d_model) ** -0.5 if scaled else 1.0
        self._output_scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._output_scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        self._soft_cap: float | None = getattr(config, "final_logit_softcapping", None)

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens of the vocabulary, and features of a hidden state."""
        rows, columns = self._projection.weight.shape  # type: ignore[misc]
        return rows, columns

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[..., feature]`` to ``[..., vocabulary]``."""
        logits: Tensor = self._projection(hidden if self._input_scale == 1.0 else hidden * self._input_scale)
        if self._bias is not None:
            logits = logits + self._bias.view(-1)
        if self._output_scale != 1.0:
            logits = logits * self._output_scale
        if self._soft_cap:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return logits

    def check(self, hidden: Tensor, logits: Tensor, family: str) -> None:
        """Refuse a family whose own logits differ from these: every importance weight would be wrong."""
        ours = self(hidden)
        if ours.shape != logits.shape or not torch.allclose(ours, logits, rtol=1e-3, atol=1e-3):
            raise UserError(
                f"models of type {family!r} compute their logits in a way cdpg does not know, so their probabilities "
                f"could not be trusted: use a model of another type"
            )


def chosen_log_probs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    vocabulary: int,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Tensor:
    """``log softmax(head(hidden))[token]`` for ``[n, feature]`` states and ``[n]`` tokens, differentiable.

    If there are more than ``logits_at_once`` logits, they are computed in pieces, and the logits of a piece are
    computed again in the backward pass.
    """
    size = max(1, logits_at_once // vocabulary)
    if len(tokens) <= size:
        return _piece(head, hidden, tokens)
    pieces = zip(hidden.split(size), tokens.split(size), strict=True)
    if torch.is_grad_enabled() and hidden.requires_grad:
        return torch.cat([checkpoint(_piece, head, h, t, use_reentrant=False) for h, t in pieces])
    return torch.cat([_piece(head, h, t) for h, t in pieces])


def _piece(head: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor) -> Tensor:
    logits = head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    chosen: Tensor = _ChosenLogProbs.apply(logits, tokens)  # type: ignore[no-untyped-call]
    return chosen


def rows_at_once(logits: Tensor) -> int:
    """Rows whose terms stay in the processor's cache between two operations; all of them on other devices."""
    on_cpu = logits.device.type == "cpu"
    return max(1, _CACHED // logits.shape[1] if on_cpu else len(logits))


class _ChosenLogProbs(torch.autograd.Function):
    """``log softmax(logits)[token]`` for ``[n, vocabulary]`` logits and ``[n]`` tokens.

    PyTorch's own softmax on a CPU adds up the terms of a row one after the other: in a vocabulary of 150,000 tokens
    every log-probability is too large by about 1e-5, which adds up over a long completion. Sums in pairs have no such
    bias. A few rows at a time stay in the processor's cache, and the gradient takes the memory of the terms.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        terms = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        highest, total = logits.amax(dim=1, keepdim=True), logits.new_empty(len(logits), 1)
        rows = rows_at_once(logits)
        pieces = [tensor.split(rows) for tensor in (logits, highest, total)]
        places = [None] * len(pieces[0]) if terms is None else terms.split(rows)
        for part, top, total_of_part, place in zip(*pieces, places, strict=True):
            torch.sum(torch.sub(part, top, out=place).exp_(), dim=1, keepdim=True, out=total_of_part)
        if terms is not None:
            ctx.save_for_backward(terms, total, tokens)
        return (logits.gather(1, tokens[:, None]) - highest - total.log())[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        terms, total, tokens = ctx.saved_tensors
        gradient = gradient[:, None]
        terms.mul_(-gradient / total)
        return terms.scatter_add_(1, tokens[:, None], gradient), None
