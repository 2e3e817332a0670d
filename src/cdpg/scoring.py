"""Scores of many completions within a bounded number of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cdpg.models.base import LanguageModel, Prompt, Rows
from cdpg.sampling import Samples


def plan_passes(samples: Samples, rows: Tensor, tokens_per_pass: int) -> list[Tensor]:
    """Cut flat rows into passes of at most ``tokens_per_pass`` tokens, padding and prompts included.

    Rows of one length beside each other waste little padding; rows of one context beside each other encode its prompt
    once. Which matters more depends on the prompts, so the cheaper of the two orders is taken.
    """
    prompt_lengths = [len(prompt) for prompt in samples.prompts]
    lengths = samples.lengths.flatten().tolist()
    per_context = samples.shape[1]
    orders = (
        sorted(rows.tolist(), key=lambda row: (lengths[row], row)),
        sorted(rows.tolist(), key=lambda row: (prompt_lengths[row // per_context], row // per_context, lengths[row])),
    )
    plans = [_cut(order, prompt_lengths, lengths, per_context, tokens_per_pass) for order in orders]
    return [torch.tensor(part) for part in min(plans, key=lambda plan: plan[1])[0]]


def _cut(
    order: Iterable[int], prompt_lengths: Sequence[int], lengths: Sequence[int], per_context: int, limit: int
) -> tuple[list[list[int]], int]:
    """Consecutive parts of ``order`` within the limit (a row alone may exceed it), and their cost in tokens."""
    parts: list[list[int]] = []
    total = cost = 0
    for row in order:
        context = row // per_context
        if parts:
            contexts = seen | {context}
            wider = max(longest_prompt, prompt_lengths[context]), max(longest, lengths[row])
            new_cost = len(contexts) * wider[0] + (len(parts[-1]) + 1) * wider[1]
            if new_cost <= limit:
                parts[-1].append(row)
                seen, cost, (longest_prompt, longest) = contexts, new_cost, wider
                continue
        total += cost
        parts.append([row])
        seen, longest_prompt, longest = {context}, prompt_lengths[context], lengths[row]
        cost = longest_prompt + longest
    return parts, total + cost


def prompts_and_rows(samples: Samples, part: Tensor) -> tuple[list[Prompt], Rows]:
    """The prompts a pass needs, each once, and its rows."""
    rows = samples.rows(part)
    contexts, index = rows.context.unique(return_inverse=True)
    return [samples.prompts[i] for i in contexts.tolist()], Rows(index, rows.tokens, rows.lengths)


@torch.no_grad()
def score_samples(model: LanguageModel, samples: Samples, rows: Tensor, tokens_per_pass: int) -> Tensor:
    """``[context, sample, token]``, float64: log-probabilities of the tokens of some flat rows, 0 elsewhere."""
    scores = torch.zeros_like(samples.token_log_q)
    flat = scores.view(-1, scores.shape[2])
    for part in plan_passes(samples, rows, tokens_per_pass):
        log_probs = model.score(*prompts_and_rows(samples, part)).log_probs
        flat[part, : log_probs.shape[1]] = log_probs.to("cpu", torch.float64)
    return scores
