"""Scores many completions, in passes of a bounded number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cdpg.models.base import LanguageModel, PromptTokens, Rows
from cdpg.models.sampling import Samples
from cdpg.system import memory

COPIED = 16
"""Keys and values of so many tokens need about as much memory as the activations of one."""


def plan_passes(samples: Samples, rows: Tensor, tokens_per_pass: int) -> list[Tensor]:
    """Split flat rows into passes of at most ``tokens_per_pass`` tokens, padding and prompts included.

    Ordered by length, rows need little padding; ordered by context, each prompt is encoded once. The cheaper of the two
    orders is taken.
    """
    prompt_lengths = [len(prompt) for prompt in samples.prompts]
    lengths = samples.lengths.flatten().tolist()
    per_context = samples.shape[1]
    orders = (
        sorted(rows.tolist(), key=lambda row: (lengths[row], row)),
        sorted(rows.tolist(), key=lambda row: (prompt_lengths[row // per_context], row // per_context, lengths[row])),
    )
    plans = [_cut(order, prompt_lengths, lengths, per_context, tokens_per_pass) for order in orders]
    cheapest = min(plans, key=lambda plan: sum(part.cost for part in plan))
    return [torch.tensor(part.rows) for part in cheapest]


@dataclass
class _Pass:
    """Rows that are scored together."""

    rows: list[int] = field(default_factory=list)
    contexts: set[int] = field(default_factory=set)
    longest_prompt: int = 0
    longest: int = 0
    cost: int = 0
    """Tokens, padding included."""

    def takes(self, row: int, context: int, prompt: int, length: int, limit: int) -> bool:
        """Add a row, unless that would exceed the limit; a single row may exceed it. Whether it was added.

        Short completions of long prompts need most of their memory for the prompts' keys and values, which are held
        once for each row.
        """
        rows, contexts = len(self.rows) + 1, len(self.contexts) + (context not in self.contexts)
        longest_prompt, longest = max(self.longest_prompt, prompt), max(self.longest, length)
        cost, copied = contexts * longest_prompt + rows * longest, rows * longest_prompt
        if self.rows and (cost > limit or copied > COPIED * limit):
            return False
        self.rows.append(row)
        self.contexts.add(context)
        self.longest_prompt, self.longest, self.cost = longest_prompt, longest, cost
        return True


def _cut(
    order: Iterable[int], prompt_lengths: Sequence[int], lengths: Sequence[int], per_context: int, limit: int
) -> list[_Pass]:
    """Consecutive parts of ``order`` within the limit."""
    parts: list[_Pass] = []
    for row in order:
        context = row // per_context
        facts = row, context, prompt_lengths[context], lengths[row], limit
        if not parts or not parts[-1].takes(*facts):
            parts.append(_Pass())
            parts[-1].takes(*facts)
    return parts


def prompts_and_rows(samples: Samples, part: Tensor) -> tuple[list[PromptTokens], Rows]:
    """The prompts a pass needs, each once, and its rows."""
    rows = samples.rows(part)
    contexts, index = rows.context.unique(return_inverse=True)
    return [samples.prompts[i] for i in contexts.tolist()], Rows(index, rows.tokens, rows.lengths)


@torch.no_grad()
def score_samples(model: LanguageModel, samples: Samples, rows: Tensor, tokens_per_pass: int) -> Tensor:
    """``[context, sample, token]``, float64: log-probabilities of the tokens of some flat rows, 0 elsewhere."""
    scores = torch.zeros(samples.tokens.shape, dtype=torch.float64)
    flat = scores.flatten(0, 1)
    with memory.needed_for("scoring samples", f"lower tokens_per_pass (now {tokens_per_pass})"), model.in_step():
        for part in plan_passes(samples, rows, tokens_per_pass):
            log_probs = model.score(*prompts_and_rows(samples, part)).log_probs
            flat[part, : log_probs.shape[1]] = log_probs.to("cpu", torch.float64)
    return scores
