"""Samples of earlier epochs: what is kept, what is drawn, and the gradient of a replayed sample, enumerated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.contexts.contexts import Context
from cdpg.methods.cdpg import CDPG
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Samples
from cdpg.rollout.replay import ReplayBuffer
from cdpg.rollout.rollout import Rollout
from cdpg.storage.jsonl import read_jsonl
from cdpg.system.distributed import Processes
from cdpg.training import resuming
from cdpg.training.optimization import accumulate
from cdpg.training.replay import Replay
from enumeration import (
    LETTERS,
    MAX_LENGTH,
    SharedTable,
    Universe,
    contexts_of,
    exact_cross_entropy_gradient,
    flat_gradient,
    relative_error,
    tabular,
)
from side_by_side import side_by_side

M = 4


def epoch_of(number: int, indices: tuple[int, ...], seed: int = 0, share: range | None = None) -> Rollout:
    """An epoch with random verdicts and lengths; a process has the contexts of its ``share``."""
    generator = torch.Generator().manual_seed(100 * number + seed)
    shape = (len(indices), M)
    share = range(len(indices)) if share is None else share
    lengths = torch.randint(1, MAX_LENGTH + 1, shape, generator=generator)
    tokens = torch.randint(1, 4, (*shape, MAX_LENGTH), generator=generator)
    tokens = tokens * (torch.arange(MAX_LENGTH) < lengths[..., None])
    b = torch.randint(0, 3, shape, generator=generator).double() / 2
    own = slice(share.start, share.stop)
    contexts = contexts_of(3)
    samples = Samples(
        contexts=tuple(contexts[indices[i]] for i in share), prompts=tuple((indices[i],) for i in share),
        texts=(("",) * M,) * len(share), tokens=tokens[own], lengths=lengths[own],
        token_log_q=torch.zeros(len(share), M, MAX_LENGTH, dtype=torch.float64),
        ended=torch.ones(len(share), M, dtype=torch.bool),
    )  # fmt: skip
    return Rollout(
        number=number, b=b, valid=torch.rand(shape, generator=generator) < 0.9,
        failed=torch.zeros(shape, dtype=torch.bool), log_q=-torch.rand(shape, generator=generator).double(),
        log_a=-torch.rand(shape, generator=generator).double(), lengths=lengths, samples=samples,
        token_log_a=torch.zeros(0, dtype=torch.float64), first_context=share.start, indices=indices,
    )  # fmt: skip


def alone(work: Callable[[Processes], Any]) -> Any:
    return side_by_side(1, work)[0]


def filled(processes: Processes, epochs: int = 3, capacity: int = 1000) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity)
    for number in range(1, epochs + 1):
        indices = (0, 2) if number % 2 else (1, 0)
        buffer = buffer.add(epoch_of(number, indices, share=processes.share(2)), processes)
    return buffer


def test_a_visit_comes_back_as_it_was_drawn() -> None:
    def work(processes: Processes) -> None:
        buffer = filled(processes)
        assert len(buffer) == 6
        assert buffer.epochs.tolist() == [1, 1, 2, 2, 3, 3]
        visits = torch.tensor([1, 2, 5])
        found = buffer.rollout(visits, contexts_of(3), [(0,), (1,), (2,)], processes)
        assert found.number == 3
        assert buffer.add(epoch_of(4, (1,)), processes).rollout(visits, contexts_of(3), [()] * 3, processes).number == 4
        assert found.indices == (2, 1, 2)
        assert found.samples.prompts == ((2,), (1,), (2,))
        assert [str(context.prompt) for context in found.samples.contexts] == ["a b c", "a b", "a b c"]
        for place, (number, row) in enumerate(((1, 1), (2, 0), (3, 1))):
            drawn = epoch_of(number, (0, 2) if number % 2 else (1, 0))
            for name in ("b", "valid", "log_q", "log_a", "lengths"):
                assert torch.equal(getattr(found, name)[place], getattr(drawn, name)[row]), name
            for sample in range(M):
                kept = bool((drawn.b > 0)[row, sample] & drawn.valid[row, sample])
                ids = drawn.samples.token_ids(row, sample)
                stored = found.samples.tokens[place, sample, : len(ids)].tolist()
                assert stored == (ids if kept else [0] * len(ids))

    alone(work)


def test_what_the_base_cannot_say_is_stored_as_not_satisfying() -> None:
    """b > 0 with log a = −∞ has weight 0, and no checkpoint holds −∞."""

    def work(processes: Processes) -> None:
        drawn = epoch_of(1, (0, 2))
        drawn = replace(
            drawn, b=torch.ones_like(drawn.b), valid=torch.ones_like(drawn.valid), log_a=drawn.log_a.clone()
        )
        drawn.log_a[0, 1] = -math.inf
        buffer = ReplayBuffer(1000).add(drawn, processes)
        assert all(bool(tensor.isfinite().all()) for tensor in buffer.tensors().values())
        found = buffer.rollout(torch.arange(2), contexts_of(3), [(0,), (1,), (2,)], processes)
        assert found.b.tolist() == [[1, 0, 1, 1], [1, 1, 1, 1]]
        assert torch.equal(found.log_ratio, drawn.log_ratio)
        for row, sample in ((0, 0), (0, 2), (1, 3)):
            ids = drawn.samples.token_ids(row, sample)
            assert found.samples.tokens[row, sample, : len(ids)].tolist() == ids

    alone(work)


def test_several_processes_hold_the_same_and_share_the_work() -> None:
    def work(processes: Processes) -> tuple[dict[str, Tensor], Rollout, range]:
        buffer = filled(processes)
        chosen = torch.tensor([0, 2, 3, 5])
        found = buffer.rollout(chosen, contexts_of(3), [(0,), (1,), (2,)], processes)
        return buffer.tensors(), found, processes.share(4)

    (whole, one, _), *_ = side_by_side(1, work)
    for tensors, part, share in side_by_side(2, work):
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(tensors[name], whole[name]) for name in whole)
        assert torch.equal(part.log_q, one.log_q)
        assert part.first_context == share.start
        width = part.samples.tokens.shape[2]
        assert torch.equal(part.samples.tokens, one.samples.tokens[share.start : share.stop, :, :width])
        assert torch.equal(part.samples.lengths, one.lengths[share.start : share.stop])
        assert part.samples.prompts == one.samples.prompts[share.start : share.stop]


def test_a_process_may_have_none_of_the_visits() -> None:
    def work(processes: Processes) -> Rollout:
        return filled(processes).rollout(torch.tensor([3]), contexts_of(3), [(0,), (1,), (2,)], processes)

    none, some = sorted(side_by_side(2, work), key=lambda part: len(part.samples.contexts))
    assert len(some.samples.contexts) == 1
    assert none.samples.contexts == () and none.samples.tokens.shape == (0, M, 0)
    assert torch.equal(some.log_ratio, none.log_ratio)


@pytest.mark.parametrize(("capacity", "kept"), [(1, [4]), (2 * M, [3, 4]), (3 * M, [2, 3, 4]), (9 * M, [1, 2, 3, 4])])
def test_epochs_of_one_visit_are_dropped_one_by_one(capacity: int, kept: list[int]) -> None:
    def work(processes: Processes) -> list[int]:
        buffer = ReplayBuffer(capacity)
        for number in (1, 2, 3, 4):
            buffer = buffer.add(epoch_of(number, (0,)), processes)
        found: list[int] = buffer.epochs.tolist()
        return found

    assert alone(work) == kept


@pytest.mark.parametrize(("capacity", "epochs"), [(1000, [1, 2, 3]), (24, [1, 2, 3]), (23, [2, 3]), (8, [3]), (1, [3])])
def test_whole_epochs_are_dropped_the_oldest_first(capacity: int, epochs: list[int]) -> None:
    def work(processes: Processes) -> None:
        buffer, everything = filled(processes, capacity=capacity), filled(processes)
        assert buffer.epochs.unique().tolist() == epochs
        kept = torch.isin(everything.epochs, torch.tensor(epochs)).nonzero()[:, 0]
        args = (contexts_of(3), [(0,), (1,), (2,)], processes)
        found, expected = buffer.rollout(torch.arange(len(kept)), *args), everything.rollout(kept, *args)
        assert torch.equal(found.samples.tokens, expected.samples.tokens)
        assert torch.equal(found.log_a, expected.log_a)

    alone(work)


def test_a_checkpoint_gives_the_buffer_back() -> None:
    def work(processes: Processes) -> None:
        buffer = filled(processes)
        again = ReplayBuffer(1000).restored(buffer.tensors())
        assert again.tensors().keys() == buffer.tensors().keys()
        assert all(torch.equal(tensor, buffer.tensors()[name]) for name, tensor in again.tensors().items())
        assert ReplayBuffer(5).restored({}).tensors() == {}

    alone(work)


def test_only_visits_with_a_satisfying_sample_are_drawn_each_at_most_once() -> None:
    def work(processes: Processes) -> None:
        buffer = filled(processes)
        tables = {**buffer.tables, "b": buffer.tables["b"].clone()}
        tables["b"][3] = 0.0
        buffer = ReplayBuffer(1000, buffer.indices, buffer.epochs, tables, buffer.tokens)
        everything = buffer.choose(10, UniformStream(0, "x", 1)).tolist()
        assert everything == [0, 1, 2, 4, 5]
        valid = tables["valid"].sum(dim=1).double()
        assert buffer.covered_share == pytest.approx(float(valid[[0, 1, 2, 4, 5]].sum() / valid.sum()), rel=1e-12)
        often = torch.zeros(6)
        for number in range(600):
            often[buffer.choose(2, UniformStream(0, "x", number))] += 1
        assert often[3] == 0
        assert often.sum() == 1200
        assert (often[[0, 1, 2, 4, 5]] - 240).abs().max() < 60, "five standard errors"

    alone(work)


# --- the gradient ---

A = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
Q = (
    torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64),
    torch.tensor([0.2, 0.2, 0.2, 0.4], dtype=torch.float64),
)
B = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)


class Visit:
    """As much of a rollout as weights are made of: two samples of one context, beside two of another."""

    is_tilted = False

    def __init__(self, outcomes: tuple[int, ...], q: Tensor) -> None:
        ratio = (A * B / q).log()
        self.log_ratio = torch.stack([ratio[list(outcomes)], torch.tensor([0.1, -math.inf], dtype=torch.float64)])
        self.indices, self.valid = (0, 1), torch.ones(2, 2, dtype=torch.bool)

    def epsilon(self, epsilon: float) -> float:
        return epsilon


def test_replayed_weights_have_the_direction_of_p_with_the_q_and_the_z_of_all_visits() -> None:
    """Over every pair of samples at both visits: the first visit's weights after the second, at another proposal."""
    made = CDPG(CDPGConfig(partition_epsilon=0.0, partition="pooled"))
    before = made.advance(made.begin(), Visit((1, 0), Q[0]))  # type: ignore[arg-type]
    before = made.advance(before, Visit((3, 1), Q[1]))  # type: ignore[arg-type]
    expected = torch.zeros(4, dtype=torch.float64)
    for first in product(range(4), repeat=2):
        for second in product(range(4), repeat=2):
            state = made.advance(before, Visit(first, Q[0]))  # type: ignore[arg-type]
            state = made.advance({**state, "prior": before["prior"]}, Visit(second, Q[1]))  # type: ignore[arg-type]
            state = {**state, "prior": before["prior"]}  # a later prior has seen the sample, as one of all samples
            weights = made.weights(Visit(first, Q[0]), state)[0]  # type: ignore[arg-type]
            probability = math.prod(float(Q[0][x]) for x in first) * math.prod(float(Q[1][x]) for x in second)
            for outcome, weight in zip(first, weights.tolist(), strict=True):
                expected[outcome] += probability * weight
    ideal = A * B / (A * B).sum()
    assert relative_error(expected / expected.sum(), ideal) < 1e-12


def test_the_expected_gradient_of_a_replayed_sample_is_that_of_the_present_policy() -> None:
    """Drawn from one policy, differentiated under another: with the exact Z the gradient is that of CE(p, π)."""
    base, proposal, policy = tabular(3), tabular(4), tabular(5)
    universe = Universe.of(base, contexts_of(3))
    b = universe.satisfied(lambda prompt, text: text.count("a") != 1)
    log_a, log_q = universe.log_prob(base), universe.log_prob(proposal)
    log_z = (log_a.exp() * b).sum(dim=1).log()

    def work(processes: Processes) -> Tensor:
        rollout = universe.epoch(b, log_q, log_a)
        rollout = Rollout(**{**vars(rollout), "indices": (0, 1, 2)})
        buffer = ReplayBuffer(1000).add(rollout, processes)
        prompts = policy.encode(contexts_of(3), MAX_LENGTH)
        past = buffer.rollout(torch.arange(3), contexts_of(3), prompts, processes)

        class Exact(CDPG):
            def weights(self, rollout: Rollout, state: Any) -> Tensor:
                """P/(Z q) times q, since every outcome is there once."""
                return (rollout.log_ratio - log_z[:, None]).exp() * log_q.exp()

        loss = Exact(CDPGConfig()).replay_loss(past, {})
        policy.module.zero_grad(set_to_none=True)
        rows = torch.arange(past.b.numel())[loss.active]
        accumulate(policy, loss, past, rows, 3.0, 300)
        return flat_gradient(policy)

    exact = exact_cross_entropy_gradient(policy, universe, log_a + b.log())
    assert relative_error(alone(work), exact) < 1e-10


def trainer(folder: Path, **changes: Any) -> CDPGTrainer:
    settings: dict[str, Any] = {
        "epochs": 6, "contexts_per_epoch": 2, "num_generations": 6, "max_completion_length": MAX_LENGTH,
        "learning_rate": 0.1, "warmup_epochs": 0, "device": "cpu", "check_workers": 0, "replay": 2, "save_every": 2,
        "partition": "pooled", "evaluate_every": 0, "evaluate_at_end": False, "batch_size": 6,
        "validation_contexts": 5, "gain_draws": 64,
    }  # fmt: skip
    config = CDPGConfig(output_dir=str(folder), **(settings | changes))

    def some(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        return ["a" in text for text in completions]

    contexts = [Context(prompt=f"prompt {i}", columns={}, row=i + 1) for i in range(7)]
    return CDPGTrainer(SharedTable(["a"], LETTERS, MAX_LENGTH, seed=2), some, config, contexts)


def test_batches_are_divided_so_that_the_mean_is_over_all_visits() -> None:
    def work(processes: Processes) -> None:
        buffer, config = filled(processes), CDPGConfig(contexts_per_epoch=2, num_generations=M, batch_size=4, replay=3)
        tables = {**buffer.tables, "b": buffer.tables["b"].clone()}
        tables["b"][2:4] = 0.0
        buffer = ReplayBuffer(1000, buffer.indices, buffer.epochs, tables, buffer.tokens)
        replay = Replay(buffer, 3, CDPG(config), contexts_of(3), [(0,), (1,), (2,)], config, processes)
        rollout = epoch_of(3, (0, 2))
        batches = list(replay.batches(rollout, {}))
        assert len(batches) == 3 * 2, "three for each of the two steps of an epoch"
        for batch in batches:
            assert batch.replayed
            assert len(batch.rollout.b) == 1, "a batch of four samples is one context of four"
            valid = float(batch.rollout.valid.sum())
            assert batch.divisor == pytest.approx(valid / buffer.covered_share, rel=1e-12)
        chosen = {(batch.rollout.indices, batch.rollout.log_q.sum().item()) for batch in batches}
        assert len(chosen) > 1, "each batch is drawn anew"
        wide = replace(replay, config=config.replace(batch_size=None))
        sizes = [len(batch.rollout.b) for batch in wide.batches(epoch_of(3, (0, 2) * 6), {})]
        assert sizes == [3, 3, 3], "a quarter of the twelve contexts"

    alone(work)


def test_replayed_steps_follow_the_rate(tmp_path: Path) -> None:
    made = trainer(tmp_path, replay=8, epochs=6, warmup_epochs=2, decay_epochs=3)
    made.train()
    records = list(read_jsonl(tmp_path / "metrics.jsonl"))
    shares = [record["learning_rate"] / made.args.learning_rate for record in records]
    assert shares == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    steps = [record["steps_replayed"] for record in records]
    assert all(found in (0, 2 * due) for found, due in zip(steps, (4, 8, 8, 6, 4, 2), strict=True))
    assert steps[0] == 2 * 4, "the first epoch always replays: two steps on its own samples, four for each"


def test_a_run_counts_its_replayed_steps_apart(tmp_path: Path) -> None:
    trainer(tmp_path / "with").train()
    trainer(tmp_path / "without", replay=0).train()
    found = [list(read_jsonl(tmp_path / name / "metrics.jsonl")) for name in ("with", "without")]
    assert [record["steps_replayed"] for record in found[0][:2]] == [2 * 2] * 2, "two for each of the two steps"
    assert all(record["steps_replayed"] == 0 for record in found[1])
    assert {record["steps"] + record["steps_skipped"] for record in found[0]} == {2}
    first = [records[0] for records in found]
    assert first[0]["loss"] == first[1]["loss"], "the loss is that of the epoch's own samples"
    assert found[0][1]["loss"] != found[1][1]["loss"], "the policy has moved further"


def test_an_epoch_replays_only_if_the_epoch_before_has_not_lowered_the_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first epoch is compared with the base, whose gain is 0."""
    made = trainer(tmp_path, learning_rate=2.0, epochs=12)
    better, expected, earlier = made.validation.better, [True], list[Tensor]()

    def watch(best: Any, epoch: int, gains: Tensor) -> Any:
        gap = gains - (earlier[-1] if earlier else 0.0)
        gap = gap[~gap.isnan()].numpy()
        expected.append(bool(gap.mean() >= -gap.std(ddof=1) / math.sqrt(len(gap))))
        earlier.append(gains)
        return better(best, epoch, gains)

    monkeypatch.setattr(made.validation, "better", watch)
    made.train()
    expected.pop()
    records = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [record["steps_replayed"] > 0 for record in records] == expected
    assert 0 < sum(expected) < 12, "both happen, or this shows nothing"


def test_without_contexts_set_aside_nothing_is_replayed(tmp_path: Path) -> None:
    trainer(tmp_path, validation_contexts=None).train()
    assert [record["steps_replayed"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [0] * 6
    assert not (tmp_path / "checkpoints" / "epoch-000006" / "replay.safetensors").exists(), "nothing is kept for it"


def test_replayed_steps_that_are_refused_are_counted_and_written_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, batches = trainer(tmp_path, epochs=1), Replay.batches

    def broken(self: Replay, rollout: Rollout, state: Any) -> Any:
        return (replace(batch, divisor=math.nan) for batch in batches(self, rollout, state))

    monkeypatch.setattr(Replay, "batches", broken)
    made.train()
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    counted = ("steps", "steps_nonfinite", "steps_replayed", "steps_replayed_nonfinite")
    assert [record[name] for name in counted] == [2, 0, 0, 4]
    steps = json.loads((tmp_path / "nonfinite" / "epoch-000001.json").read_text())["steps"]
    assert [step["replayed"] for step in steps] == [True] * 4
    for step in steps:
        assert step["samples"]
        for sample in step["samples"]:
            assert sample["completion"] is None
            assert sample["b"] == 1.0
            assert 1 in sample["token_ids"], "an 'a'"


def test_a_resumed_run_replays_the_same(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    trainer(whole).train()
    trainer(parted, epochs=4).train()
    resumed = trainer(parted)
    resumed.train(resume_from_checkpoint=True)
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, parted)]
    assert models[0] == models[1]
    states = [json.loads((f / "checkpoints" / "epoch-000006" / "state.json").read_text()) for f in (whole, parted)]
    assert states[0]["objective"] == states[1]["objective"]
    assert (whole / "checkpoints" / "epoch-000006" / "replay.safetensors").exists()


@pytest.mark.parametrize("partition", ["batch", "pooled"])
def test_an_epoch_without_finite_weights_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: str
) -> None:
    """Its steps are refused, and the run goes on."""
    made = trainer(tmp_path, partition=partition, epochs=1)
    begin = resuming.begin_validation

    def breaks_the_base(*given: Any) -> Any:
        state = begin(*given)
        with torch.no_grad():
            made.base.module["table"].fill_(float("nan"))  # type: ignore[index]
        return state

    monkeypatch.setattr(resuming, "begin_validation", breaks_the_base)
    made.train()
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert (record["steps"], record["steps_nonfinite"], record["steps_replayed"]) == (0, 2, 0)
    assert not (tmp_path / "checkpoints" / "epoch-000001" / "replay.safetensors").exists()
