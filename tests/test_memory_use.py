"""The forecast of a run's memory: its terms, and the pass that is measured for it; memory that is freed."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from cdpg import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.models.loading import wrap_model
from cdpg.models.sampling import Samples
from cdpg.models.scoring import plan_passes
from cdpg.preflight.memory_use import MemoryUse, differentiate_largest_pass, room, used
from cdpg.system import memory

USE = MemoryUse(
    start=100, weights=40, trained=40, layers=30, largest_layer=7, sampling=190, gradient=200, room=None
)  # fmt: skip
"""Sampling needs 190 − 100 − 40 for itself, the gradient 200 − 100 − 40 − 40."""
CPU_CONFIG = CDPGConfig(device="cpu")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("use", "settings", "keeps_best", "expected"),
    [
        (USE, {}, False, 100 + 40 + 40 + 3 * 40 + 50),
        (USE, {}, True, 100 + 40 + 40 + 5 * 40 + 50),
        (USE, {"base_dtype": "bfloat16"}, False, 100 + 40 + 25 + 3 * 40 + 50),
        (USE, {"base_dtype": "int8"}, False, 100 + 40 + 40 - 30 * (3 / 4 - 1 / 32) + 3 * 40 + 50),
        (replace(USE, trained=4), {"lora_rank": 2}, False, 100 + 40 + 3 * 4 + 56),
        (replace(USE, gradient=280), {}, False, 100 + 40 + 40 + 3 * 40 + 100),
        (USE, {"sync_every": 2}, True, 100 + 40 + 40 + 7 * 40 + 50),
        (replace(USE, on_gpu=True), {"sync_every": 2}, True, 100 + 40 + 40 + 3 * 40 + 50),
    ],
)
def test_what_stays_and_what_a_stage_needs(
    use: MemoryUse, settings: dict[str, Any], keeps_best: bool, expected: float
) -> None:
    """What is held, and a tenth for memory that is freed and not returned."""
    held = expected - use.start
    assert use.run(CDPGConfig(**settings), keeps_best) == pytest.approx(use.start + 1.1 * held)


def test_a_process_holds_its_part_and_what_is_whole_meanwhile() -> None:
    """The stage; two layers; embeddings and their gradient."""
    assert USE.undivided == 100 + 50 + 2 * 7 + 2 * 10
    divided = replace(USE, on_gpu=True), CPU_CONFIG.replace(sharding="full")
    assert divided[0].stays(divided[1], True) == 40 + 40 + 5 * 40, "copies of the best model are divided, too"


@pytest.mark.parametrize(
    ("room", "sharding", "level", "said"),
    [
        (None, "none", None, ""),
        (600, "none", None, ""),
        (400, "none", "careful", "needs about 0 MB of memory, and there are 0 MB: lower tokens_per_pass"),
        (300, "none", "stop", "and there are only 0 MB: lower tokens_per_pass"),
        (400, "full", None, ""),
        (264, "full", "careful", "needs at least 3 machines with 0 MB of memory each"),
        (184, "full", "stop", "Each process needs 0 MB beside its part of the weights"),
    ],
)
def test_whether_a_run_fits_is_said(room: float | None, sharding: str, level: str | None, said: str) -> None:
    """It needs 375, or 200 that are divided and 184 in each process."""
    found = replace(USE, room=room).advice(CPU_CONFIG.replace(sharding=sharding), False)
    assert [advice.level for advice in found] == ([] if level is None else [level])
    assert all(said in advice.text for advice in found)


def test_the_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine with a GPU, a run on the CPU takes none of the GPU's memory; a container may have less."""
    monkeypatch.setattr(memory, "peak", lambda: {"memory": 7, "GPU memory": 5})
    assert (used(CPU), used(GPU)) == (7, 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    assert room(GPU, CPU_CONFIG) == 1000
    assert room(GPU, CDPGConfig(engine="vllm", engine_memory=0.4)) == 600
    assert room(GPU, CDPGConfig(engine="vllm", engine_url="http://localhost:1", engine_memory=0.4)) == 1000
    assert room(torch.device("mps"), CPU_CONFIG) is None
    of_machine = memory.of_machine()
    assert of_machine is not None and of_machine > 2**28
    limit = tmp_path / "limit"
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", (str(limit), str(tmp_path / "none")))
    for text, expected in (("max\n", None), (f"{2**28}\n", 2**28)):
        limit.write_text(text)
        found = room(CPU, CPU_CONFIG)
        assert found == expected if expected else found is not None and found > 2**28


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


def test_the_largest_pass_is_one_that_the_run_may_have() -> None:
    """Many short completions of a long prompt are divided into passes, as its keys are held for each of them."""
    config = CDPGConfig(max_completion_length=1, tokens_per_pass=200, contexts_per_epoch=1, num_generations=100)
    model = wrap_model(tiny.make_model("llama"), tiny.tokenizer_for("llama"), config)
    seen, score = [], model.score

    def noting(prompts: Any, given: Any) -> Any:
        seen.append(len(given.lengths))
        return score(prompts, given)

    model.score = noting  # type: ignore[method-assign]
    prompt = tuple(range(3, 103))
    differentiate_largest_pass(model, [prompt], config)
    shape = (1, 100)
    samples = Samples(
        (Context("", {}, 1),), (prompt,), (("",) * 100,), torch.ones(*shape, 1, dtype=torch.long),
        torch.ones(shape, dtype=torch.long), torch.zeros(*shape, 1), torch.zeros(shape, dtype=torch.bool),
    )  # fmt: skip
    assert seen == [max(map(len, plan_passes(samples, torch.arange(100), 200)))] == [32]


def test_weights_are_counted_once() -> None:
    model = wrap_model(tiny.make_model("gpt2"), tiny.tokenizer_for("gpt2"), CDPGConfig())
    use = MemoryUse.of(model, 1.0, 2.0, CDPGConfig())
    assert use.layers == 2 * use.largest_layer
    assert not use.on_gpu
    assert use.weights == use.trained == 4 * sum(p.numel() for p in model.module.parameters())
    embeddings = 4 * 32 * (300 + 128) + 2 * 4 * 32  # of tokens, which are tied, and positions; the last norm
    assert use.weights - use.layers == embeddings
    assert 0 < use.gradient <= used(CPU)


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
