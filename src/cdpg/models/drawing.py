"""Draws tokens from logits, with the log-probabilities that they are drawn with."""

from __future__ import annotations

import torch
from torch import Tensor

from cdpg.errors import RunError


def draw_tokens(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse transform: one token a row and its log-probability, from ``[row, vocabulary]`` and ``[row]`` float64.

    The cumulative sum runs in float64, over sums of blocks and then within one block. So tokens are drawn with the
    probabilities that are recorded, however large the vocabulary. A token of probability 0 is never drawn.
    """
    vocabulary = logits.shape[1]
    size = 1 << vocabulary.bit_length() // 2  # of a block: about as many tokens as there are blocks
    probabilities = logits.softmax(dim=1)
    blocks = _block_sums(probabilities, size).double().cumsum(dim=1)  # [row, block]
    total = blocks[:, -1:]
    if not bool(total.isfinite().all()):
        raise RunError("the model's probabilities are not finite: its weights hold NaN or are too large")
    block, goal = _first_above(blocks, uniforms.to(total)[:, None] * total)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)

    members = block * size + torch.arange(size, device=logits.device)  # [row, token of the block]
    inside = probabilities.gather(1, members.clamp(max=vocabulary - 1)).double()
    inside = inside.masked_fill_(members >= vocabulary, 0.0)
    place, _ = _first_above(inside.cumsum(dim=1), goal - before)
    log_probs = inside.gather(1, place).log() - total.log()
    return (block * size + place)[:, 0], log_probs[:, 0]


def _block_sums(weights: Tensor, size: int) -> Tensor:
    whole = weights.shape[1] // size * size
    sums: Tensor = weights[:, :whole].unflatten(1, (-1, size)).sum(dim=2)
    if whole < weights.shape[1]:
        sums = torch.cat([sums, weights[:, whole:].sum(dim=1, keepdim=True)], dim=1)
    return sums


def _first_above(edges: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first of ``[row, edge]`` cumulative sums above the goal, and the goal, kept below the last sum."""
    top = edges[:, -1:]
    goal = torch.minimum(goal, torch.nextafter(top, torch.zeros_like(top)))
    return torch.searchsorted(edges, goal, right=True), goal
