"""Epochs on small tables in which nothing is even, and the tables' probabilities in plain NumPy.

Five contexts with four samples each: b is 0, ½ or 1, some checks failed, all of them in the fourth context; nothing
satisfies in the third. What stands in a sample whose check failed would change every figure if it counted. Policy,
proposal and base are three different tables, so that no two of log π, log q and log a can be mistaken for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdpg.contexts.contexts import Context
from cdpg.models.base import PromptTokens
from cdpg.models.sampling import Samples
from cdpg.models.tabular import TabularModel
from cdpg.rollout.rollout import Rollout

Array = NDArray[np.float64]

PROMPTS = ("v", "w", "x", "y", "z")
LETTERS = ("a", "b", "c")
MAX_LENGTH = 3
N, M = 5, 4

B = np.array(
    [[1.0, 0.5, 0.0, 1.0], [0.5, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.5, 1.0, 1.0], [0.0, 1.0, 1.0, 0.5]]
)
VALID = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]], dtype=bool)


def table(seed: int) -> TabularModel:
    return TabularModel(PROMPTS, LETTERS, MAX_LENGTH, seed=seed)


def token_log_probs(logits: Tensor, context: int, tokens: Sequence[int]) -> list[float]:
    """log π of each token of a completion: one row of the table for each prefix, numbered breadth first."""
    found, prefix = [], 0
    for token in tokens:
        row = logits[context, prefix].detach().numpy()
        found.append(float(row[token] - np.log(np.exp(row).sum())))
        prefix = prefix * len(LETTERS) + token
    return found


def prefixes(tokens: Sequence[int]) -> list[int]:
    """The row of the table that each token is drawn from."""
    found = [0]
    for token in tokens[:-1]:
        found.append(found[-1] * len(LETTERS) + token)
    return found


def completions(seed: int = 0) -> list[list[tuple[int, ...]]]:
    """``[context][sample]``: outcomes of the table, of every length."""
    outcomes = table(0).outcomes()
    drawn = np.random.default_rng(seed).integers(len(outcomes), size=(N, M))
    return [[outcomes[i] for i in row] for row in drawn]


def padded(values: Sequence[Sequence[Sequence[float]]]) -> Array:
    """``[context, sample, token]``, 0 beyond the length."""
    result = np.zeros((len(values), M, MAX_LENGTH))
    for context, row in enumerate(values):
        for sample, found in enumerate(row):
            result[context, sample, : len(found)] = found
    return result


def scored(model: TabularModel, drawn: Sequence[Sequence[Sequence[int]]], first: int = 0) -> Array:
    """``[context, sample, token]``: log-probabilities of completions of the contexts from ``first`` on."""
    return padded([[token_log_probs(model.table, first + i, x) for x in row] for i, row in enumerate(drawn)])


def uneven_epoch(
    proposal: TabularModel,
    base: TabularModel,
    number: int = 1,
    seed: int = 0,
    share: range = range(N),
    b: Array = B,
    valid: Array | NDArray[np.bool_] = VALID,
) -> Rollout:
    """The record of an epoch whose samples came from ``proposal``; ``share`` are this process's contexts."""
    drawn = completions(seed)
    log_q, log_a = scored(proposal, drawn), scored(base, drawn)
    own = drawn[share.start : share.stop]
    lengths = torch.tensor([[len(x) for x in row] for row in drawn])
    prompts: list[PromptTokens] = [(i,) for i in share]
    samples = Samples(
        contexts=tuple(Context(prompt=PROMPTS[i], columns={}, row=i + 1) for i in share),
        prompts=tuple(prompts),
        texts=tuple(tuple(proposal.decode((0,), x) for x in row) for row in own),
        tokens=torch.from_numpy(padded(own)).long(),
        lengths=lengths[share.start : share.stop],
        token_log_q=torch.from_numpy(log_q[share.start : share.stop].copy()),
        ended=torch.tensor([[x[-1] == 0 for x in row] for row in own]),
    )
    return Rollout(
        number=number,
        b=torch.from_numpy(b.copy()),
        valid=torch.from_numpy(np.array(valid, dtype=bool)),
        failed=torch.from_numpy(~np.array(valid, dtype=bool)),
        log_q=torch.from_numpy(log_q.sum(axis=2)),
        log_a=torch.from_numpy(log_a.sum(axis=2)),
        lengths=lengths,
        samples=samples,
        token_log_a=torch.from_numpy(log_a[share.start : share.stop].copy()),
        first_context=share.start,
    )


def log_prob_gradient(model: TabularModel, context: int, tokens: Sequence[int]) -> Array:
    """∂ log π(x|c) / ∂ table: one minus the probability at the token drawn, minus it at the others."""
    logits = model.table.detach().numpy()
    gradient = np.zeros_like(logits)
    for prefix, token in zip(prefixes(tokens), tokens, strict=True):
        row = logits[context, prefix]
        gradient[context, prefix] -= np.exp(row) / np.exp(row).sum()
        gradient[context, prefix, token] += 1.0
    return gradient
