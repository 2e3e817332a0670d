"""Beam search over any language model, with length penalty 1 and no blocked n-grams (the paper, sections 3.2, 3.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.system import memory

LENGTH_PENALTY = 1.0
"""A finished sequence scores its log-probability over its length to this power."""


@dataclass
class _Search:
    """The search for one context."""

    beams: int
    alive: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    finished: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def finish(self, log_prob: float, tokens: tuple[int, ...]) -> None:
        """Keep a sequence if it is among the best."""
        self.finished.append((log_prob / len(tokens) ** LENGTH_PENALTY, tokens))
        self.finished.sort(key=lambda scored: -scored[0])
        del self.finished[self.beams :]

    def is_over(self, best_alive: float, length: int) -> bool:
        """Whether no living beam, scored at its present length, can still be among the finished ones."""
        full = len(self.finished) == self.beams
        return full and best_alive / length**LENGTH_PENALTY <= self.finished[-1][0]


@torch.inference_mode()
def beam_search(
    model: LanguageModel, prompts: Sequence[PromptTokens], max_length: int, beams: int, rows_per_pass: int
) -> list[tuple[int, ...]]:
    """The best sequence of each prompt, its end token included; a sequence cut at ``max_length`` counts too."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    at_once = max(1, rows_per_pass // beams)
    found: dict[int, tuple[int, ...]] = {}
    advice = f"lower rows_per_pass (now {rows_per_pass}) or max_completion_length (now {max_length})"
    with memory.needed_for("searching with beams", advice), model.sampling(min(len(prompts), at_once) * beams):
        for start in range(0, len(order), at_once):
            part = sorted(order[start : start + at_once])  # as sampling has them, whose prompts may be known
            best = _search(model, [prompts[index] for index in part], max_length, beams)
            found.update(zip(part, best, strict=True))
    return [found[index] for index in range(len(prompts))]


def _search(
    model: LanguageModel, prompts: Sequence[PromptTokens], max_length: int, beams: int
) -> list[tuple[int, ...]]:
    searches = [_Search(beams) for _ in prompts]
    going = list(range(len(prompts)))
    context = torch.arange(len(prompts), device=model.device).repeat_interleave(beams)
    decoding = model.start(prompts, context, max_length)
    # All beams of a context start equal, so only the first may branch.
    log_probs = torch.full((len(prompts), beams), -math.inf, dtype=torch.float64)  # [context, beam]
    log_probs[:, 0] = 0.0
    for search in searches:
        search.alive = [()] * beams
    for length in range(1, max_length + 1):
        best = _best(model.logits(decoding.hidden).cpu(), log_probs, model.end_ids)
        rows, tokens, scores, stay = [], [], [], []
        for place, index in enumerate(going):
            kept = _step(searches[index], best[place], model.end_ids)
            if length < max_length and not searches[index].is_over(kept[0][0], length):
                stay.append(index)
                rows += [place * beams + beam for _, beam, _ in kept]
                tokens += [token for _, _, token in kept]
                scores.append([score for score, _, _ in kept])
            elif length == max_length:
                for (score, _, _), sequence in zip(kept, searches[index].alive, strict=True):
                    searches[index].finish(score, sequence)
        going = stay
        if not going:
            break
        decoding.keep(torch.tensor(rows, device=model.device))
        decoding.advance(torch.tensor(tokens, device=model.device))
        log_probs = torch.tensor(scores, dtype=torch.float64)
    return [search.finished[0][1] for search in searches]


def _best(logits: Tensor, log_probs: Tensor, end_ids: frozenset[int]) -> list[list[tuple[float, int, int]]]:
    """The best continuations of each context, (log-probability, beam, token), enough of them if some end.

    From ``[context · beam, token]`` logits and the ``[context, beam]`` log-probabilities of the beams. A continuation
    that is among the best of its context is among the best of its beam.
    """
    contexts, beams = log_probs.shape
    enough = beams * (1 + len(end_ids))
    steps = logits.log_softmax(dim=1).topk(min(logits.shape[1], enough), dim=1)  # [context · beam, candidate]
    candidates = log_probs[:, :, None] + steps.values.double().view(contexts, beams, -1)
    best = candidates.flatten(1).topk(min(candidates[0].numel(), enough), dim=1)
    tokens = steps.indices.view(contexts, -1).gather(1, best.indices)
    places = best.indices // candidates.shape[2]
    return [
        list(zip(*parts, strict=True))
        for parts in zip(best.values.tolist(), places.tolist(), tokens.tolist(), strict=True)
    ]


def _step(
    search: _Search, best: Sequence[tuple[float, int, int]], end_ids: frozenset[int]
) -> list[tuple[float, int, int]]:
    """One more token: the best continuations to the new living beams, (log-probability, beam, token).

    Candidates that end and are among the best ``beams`` are finished; the best of the others stay alive. If the
    vocabulary is too small, the remaining beams get log-probability −∞.
    """
    kept: list[tuple[float, int, int]] = []
    for rank, (score, beam, token) in enumerate(best):
        if token in end_ids:
            if rank < search.beams and score > -math.inf:
                search.finish(score, (*search.alive[beam], token))
        elif len(kept) < search.beams:
            kept.append((score, beam, token))
    kept += [(-math.inf, 0, 0)] * (search.beams - len(kept))
    search.alive = [(*search.alive[beam], token) for _, beam, token in kept]
    return kept
