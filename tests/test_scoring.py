"""Passes of many rows: within their budget, each row once, each prompt once, every score where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdpg.contexts.contexts import Context
from cdpg.models.sampling import Samples
from cdpg.models.scoring import plan_passes, prompts_and_rows, score_samples
from uneven import M, N, completions, scored, table, uneven_epoch


def samples_of(prompts: Sequence[int], lengths: Sequence[Sequence[int]]) -> Samples:
    """Samples of given lengths for prompts of given lengths; prompt ``i`` is made of ``i``, its samples count up."""
    shape, width = (len(prompts), len(lengths[0])), max(max(row) for row in lengths)
    return Samples(
        contexts=tuple(Context(prompt=str(i), columns={}, row=i + 1) for i in range(len(prompts))),
        prompts=tuple((i,) * length for i, length in enumerate(prompts)),
        texts=tuple(tuple("" for _ in row) for row in lengths),
        tokens=torch.arange(shape[0] * shape[1] * width).view(*shape, width),
        lengths=torch.tensor(lengths),
        token_log_q=torch.zeros(*shape, width, dtype=torch.float64),
        ended=torch.ones(shape, dtype=torch.bool),
    )


def cost(samples: Samples, part: Sequence[int]) -> int:
    """Tokens of a pass: its prompts once each and its rows, both padded to the longest."""
    prompts = {row // samples.shape[1]: len(samples.prompts[row // samples.shape[1]]) for row in part}
    lengths = [int(samples.lengths.flatten()[row]) for row in part]
    return len(prompts) * max(prompts.values()) + len(lengths) * max(lengths)


def greedy(samples: Samples, order: Sequence[int], limit: int) -> list[list[int]]:
    """Rows in this order, as many to a pass as it can hold."""
    parts: list[list[int]] = []
    for row in order:
        if parts and cost(samples, [*parts[-1], row]) <= limit:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


@st.composite
def cases(draw: st.DrawFn) -> tuple[Samples, list[int], int]:
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    per_context = draw(st.integers(1, 4))
    row = st.lists(st.integers(1, 9), min_size=per_context, max_size=per_context)
    lengths = draw(st.lists(row, min_size=len(prompts), max_size=len(prompts)))
    chosen = draw(st.sets(st.integers(0, len(prompts) * per_context - 1), min_size=1))
    return samples_of(prompts, lengths), draw(st.permutations(sorted(chosen))), draw(st.integers(1, 80))


@given(cases())
def test_every_pass_is_within_its_budget_and_as_full_as_its_order_allows(case: tuple[Samples, list[int], int]) -> None:
    """The cheaper of two orders: by length of the completion, or context by context from the shortest prompt on."""
    samples, rows, limit = case
    per_context, lengths = samples.shape[1], samples.lengths.flatten().tolist()
    plan = [part.tolist() for part in plan_passes(samples, torch.tensor(rows), limit)]
    assert sorted(row for part in plan for row in part) == sorted(rows)
    assert all(len(part) == 1 or cost(samples, part) <= limit for part in plan)
    by_length = sorted(rows, key=lambda row: (lengths[row], row))
    by_context = sorted(
        sorted(rows), key=lambda row: (len(samples.prompts[row // per_context]), row // per_context, lengths[row])
    )
    costs = [sum(cost(samples, part) for part in greedy(samples, order, limit)) for order in (by_length, by_context)]
    assert sum(cost(samples, part) for part in plan) == min(costs)


def test_a_budget_counts_prompts_and_padding() -> None:
    """Two prompts of 7 and 3 tokens, completions of 2 and 5: side by side they take 2 · 7 + 2 · 5 = 24 tokens."""
    samples, rows = samples_of([7, 3], [[2], [5]]), torch.tensor([0, 1])
    assert [len(part) for part in plan_passes(samples, rows, 24)] == [2]
    assert [len(part) for part in plan_passes(samples, rows, 23)] == [1, 1]
    one = samples_of([7], [[2, 5, 5]])
    assert [len(part) for part in plan_passes(one, torch.arange(3), 22)] == [3], "a shared prompt counts once"
    assert [len(part) for part in plan_passes(one, torch.arange(3), 21)] == [2, 1]
    assert plan_passes(one, torch.arange(0), 21) == []


def test_a_budget_bounds_the_keys_and_values_of_long_prompts() -> None:
    """A prompt of 100 tokens and completions of one: 100 + 100 tokens would hold 100 · 100 keys, 16 · 200 may be."""
    samples = samples_of([100], [[1] * 70])
    assert [len(part) for part in plan_passes(samples, torch.arange(70), 200)] == [32, 32, 6]
    assert [len(part) for part in plan_passes(samples, torch.arange(70), 500)] == [70]


def test_a_pass_has_the_prompts_of_its_rows_each_once() -> None:
    samples = samples_of([4, 2, 3], [[1, 2], [3, 1], [2, 2]])
    prompts, rows = prompts_and_rows(samples, torch.tensor([5, 0, 4, 1]))
    assert prompts == [(0,) * 4, (2,) * 3]
    assert [prompts[i] for i in rows.context.tolist()] == [(2,) * 3, (0,) * 4, (2,) * 3, (0,) * 4]
    assert rows.lengths.tolist() == [2, 1, 2, 2]
    assert rows.tokens.tolist() == [[15, 16], [0, 1], [12, 13], [3, 4]]


@pytest.mark.parametrize("tokens_per_pass", [1, 9, 1000])
def test_scores_of_some_rows_stand_where_the_rows_do(tokens_per_pass: int) -> None:
    """All others are 0; values are those of the table in float64, and nothing is kept for a gradient."""
    samples, model = uneven_epoch(table(1), table(2)).samples, table(3)
    chosen = [17, 2, 0, 11, 4, 5]
    scores = score_samples(model, samples, torch.tensor(chosen), tokens_per_pass)
    expected = scored(model, completions()).reshape(N * M, -1)
    expected[[row for row in range(N * M) if row not in chosen]] = 0.0
    np.testing.assert_allclose(scores.flatten(0, 1).numpy(), expected, rtol=1e-12)
    assert scores.dtype == torch.float64
    assert not scores.requires_grad
