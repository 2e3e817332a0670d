"""The forecast of a run's memory: its terms, and the pass that is measured for it; memory that is freed."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from cdpg import CDPGConfig
from cdpg.models.loading import wrap_model
from cdpg.preflight.memory_use import MemoryUse, differentiate_largest_pass, used
from cdpg.system import memory

USE = MemoryUse(start=100, weights=40, trained=40, layers=30, sampling=190, gradient=200)
"""Sampling needs 190 − 100 − 40 for itself, the gradient 200 − 100 − 40 − 40."""


@pytest.mark.parametrize(
    ("use", "settings", "keeps_best", "expected"),
    [
        (USE, {}, False, 100 + 40 + 40 + 3 * 40 + 50),
        (USE, {}, True, 100 + 40 + 40 + 5 * 40 + 50),
        (USE, {"base_dtype": "bfloat16"}, False, 100 + 40 + 25 + 3 * 40 + 50),
        (USE, {"base_dtype": "int8"}, False, 100 + 40 + 40 - 30 * (3 / 4 - 1 / 32) + 3 * 40 + 50),
        (replace(USE, trained=4), {"lora_rank": 2}, False, 100 + 40 + 3 * 4 + 56),
        (replace(USE, gradient=280), {}, False, 100 + 40 + 40 + 3 * 40 + 100),
    ],
)
def test_what_stays_and_what_a_stage_needs(
    use: MemoryUse, settings: dict[str, Any], keeps_best: bool, expected: float
) -> None:
    """What is held, and a tenth for memory that is freed and not returned."""
    held = expected - use.start
    assert use.run(CDPGConfig(**settings), keeps_best) == pytest.approx(use.start + 1.1 * held)


@pytest.mark.parametrize(("tokens_per_pass", "rows"), [(30, 6), (29, 6), (28, 5), (3, 1), (1000, 8)])
def test_the_largest_pass_is_differentiated(tokens_per_pass: int, rows: int) -> None:
    """A prompt of five tokens and completions of four, of which an epoch has eight."""
    sizes = {"contexts_per_epoch": 2, "num_generations": 4}
    config = CDPGConfig(max_completion_length=4, tokens_per_pass=tokens_per_pass, **sizes)
    model = wrap_model(tiny.make_model("llama"), tiny.tokenizer_for("llama"), config)
    seen, score = [], model.score

    def noting(prompts: Any, given: Any) -> Any:
        seen.append((list(prompts), tuple(given.tokens.shape), given.lengths.tolist()))
        return score(prompts, given)

    model.score = noting  # type: ignore[method-assign]
    differentiate_largest_pass(model, [(3,), (3, 4, 5, 6, 7), (9, 9)], config)
    assert seen == [([(3, 4, 5, 6, 7)], (rows, 4), [4] * rows)]
    assert all(p.grad is not None and not p.grad.any() for p in model.module.parameters())


def test_weights_are_counted_once() -> None:
    model = wrap_model(tiny.make_model("gpt2"), tiny.tokenizer_for("gpt2"), CDPGConfig())
    use = MemoryUse.of(model, start=1.0, sampling=2.0)
    assert use.weights == use.trained == 4 * sum(p.numel() for p in model.module.parameters())
    embeddings = 4 * 32 * (300 + 128) + 2 * 4 * 32  # of tokens, which are tied, and positions; the last norm
    assert use.weights - use.layers == embeddings
    assert 0 < use.gradient <= used()


def test_freed_blocks_are_returned_to_the_system() -> None:
    """Those between others too, which the allocator of the C library would otherwise keep."""
    freed = [_forked(partial(_freed_share, returns)) for returns in (False, True)]
    assert freed[0] < 0.4, "otherwise there is nothing to return"
    assert freed[1] > 0.9


def _freed_share(returns: bool) -> float:
    """The share of freed memory that the process no longer has, of every second of many blocks of four megabytes."""
    size = 2**20
    torch.empty(4 * size)  # as it is freed, glibc keeps blocks of this size from now on
    if returns:
        memory.return_freed_blocks()
    gaps = [torch.empty(size) for _ in range(1000)]  # noqa: F841 - whatever room the heap had; takes no memory itself
    blocks = [torch.ones(size) for _ in range(32)]
    before = _resident()
    del blocks[::2]
    return (before - _resident()) / (16 * 4 * size)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _forked(work: Callable[[], float]) -> float:
    """The result of a function in a fork, whose allocator may be changed."""
    ours, theirs = multiprocessing.Pipe()
    if (child := os.fork()) == 0:
        theirs.send(work())
        os._exit(0)
    os.waitpid(child, 0)
    found: float = ours.recv()
    return found
