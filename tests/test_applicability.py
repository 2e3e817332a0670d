"""Constraints as TRL has them: ``async def``, and None where one does not apply to a sample."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import coroutine_rules
import naughty
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.constraints.judge import Judge
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.methods import METHODS, make_method
from cdpg.models.base import LanguageModel
from cdpg.preflight.advice import ProbeStatistics, advise
from cdpg.sandbox.limits import Limits
from cdpg.storage.jsonl import read_jsonl
from cdpg.training.failures import FailureLog
from cdpg.training.optimization import accumulate
from enumeration import Universe, contexts_of, flat_gradient, tabular
from test_sandbox import outcome

CONTEXTS = [Context("p", {}, 1), Context("q", {}, 2), Context("r", {}, 3), Context("s", {}, 4)]


def returning(*values: Any) -> Any:
    def constraint(prompts: Any, completions: Any, **columns: Any) -> list[Any]:
        return [values[int(text)] for text in completions]

    return constraint


def raising(*places: str) -> Any:
    def broken(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        if set(places) & set(completions):
            raise ZeroDivisionError
        return [1.0] * len(completions)

    return broken


def judged(*constraints: Any) -> tuple[list[float], dict[int, str], set[int]]:
    judge = Judge(list(constraints))
    found = judge.collect(judge.submit(CONTEXTS, ["0", "1", "2", "3"], [[0]] * 4))
    return found.b, {place: failure.kind for place, failure in found.failures.items()}, set(found.inapplicable)


def test_none_is_no_factor_and_no_failure() -> None:
    some, others = returning(None, None, 0.5, 0.5), returning(None, 0.25, None, 0.5)
    assert judged(some) == ([0.0, 0.0, 0.5, 0.5], {}, {0, 1})
    assert judged(some, others) == ([0.0, 0.25, 0.5, 0.25], {}, {0})
    assert judged(some, returning(0.0, 0.0, 0.0, 1.0)) == ([0.0, 0.0, 0.0, 0.5], {}, set())


def test_a_failure_beside_none_is_a_failure() -> None:
    never = returning(None, None, None, None)
    assert judged(never, raising("1")) == ([1.0, 0.0, 1.0, 1.0], {1: "exception"}, set())
    assert judged(never) == ([0.0] * 4, {}, {0, 1, 2, 3})


# async def.


async def short(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    await asyncio.sleep(0)
    return [text < "2" for text in completions]


async def leaves(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    raise SystemExit(3)


def test_a_coroutine_is_awaited_in_the_process_and_in_workers(notices: list[str]) -> None:
    expected = ([1.0, 1.0, 0.0, 0.0], {})
    assert judged(short)[:2] == expected
    made = Judge(short, Limits(workers=1))
    found = made.collect(made.submit(CONTEXTS, ["0", "1", "2", "3"], [[0]] * 4))
    made.close()
    assert (found.b, found.failures) == expected
    assert notices == []


def test_a_coroutine_is_awaited_beside_a_loop_that_runs() -> None:
    async def notebook() -> Any:
        return judged(short)

    assert asyncio.run(notebook())[0] == [1.0, 1.0, 0.0, 0.0]


def test_a_coroutine_that_exits_fails_and_the_next_one_is_awaited() -> None:
    assert judged(leaves)[1] == dict.fromkeys(range(4), "exception")
    judge = Judge([leaves, short])
    for _ in range(2):
        found = judge.collect(judge.submit(CONTEXTS, ["0", "1", "2", "3"], [[0]] * 4))
        assert (found.b, list(found.failures)) == ([0.0] * 4, [0, 1])
        judge.close()


@pytest.mark.parametrize(("verb", "kind"), [("wait", "timeout"), ("hang", "timeout"), ("raise", "exception")])
def test_a_coroutine_has_the_limits_of_any_other_function(verb: str, kind: str) -> None:
    found = outcome(coroutine_rules.patient, ["good"] * 20 + [verb] + ["fine!"] * 10)
    assert {place: failure.kind for place, failure in found.failures.items()} == {20: kind}
    assert found.values[19:22] == [4, None, 5]


def test_calls_share_a_loop() -> None:
    assert all(outcome(coroutine_rules.same_loop, ["a"] * 64).values)


# The estimates: a sample that is left out is as good as never drawn.


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_is_that_of_the_other_contexts(method: str) -> None:
    def gradient(policy: LanguageModel, base: LanguageModel, contexts: list[Context], left_out: list[int]) -> Any:
        universe = Universe.of(policy, contexts)
        log_q, log_a = universe.log_prob(policy), universe.log_prob(base)
        b = universe.satisfied(lambda prompt, text: "a" in text)
        valid = torch.ones_like(b, dtype=torch.bool)
        valid[left_out] = False
        epoch = universe.epoch(b.where(valid, torch.zeros_like(b)), log_q, log_a, valid)
        made = make_method(CDPGConfig(method=method))
        found = made.epoch_loss(made.begin(), epoch, policy, made.make_module(policy))
        loss = found.samples
        policy.module.zero_grad(set_to_none=True)
        accumulate(policy, loss, epoch, universe.rows[loss.active], loss.normalizer, tokens_per_pass=200)
        return flat_gradient(policy), found.state

    first, second, third = contexts_of(3)
    whole, state = gradient(tabular(1), tabular(2), [first, second, third], [1])
    alone, expected = gradient(tabular(1), tabular(2), [first, third], [])
    assert whole.norm() > 0
    assert torch.allclose(whole, alone, rtol=1e-9, atol=1e-12)
    assert state == pytest.approx(expected)


KINDS = ("odd", "neither", "even")


def trained(folder: Path, constraints: Any, kinds: tuple[str, ...] = KINDS, **changes: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 2, "contexts_per_epoch": 3, "num_generations": 8, "max_completion_length": 3, "warmup_epochs": 0,
        "learning_rate": 0.05, "device": "cpu", "log_samples": 24, "evaluation_samples": 4, "check_workers": 0,
    }  # fmt: skip
    rows = [{"prompt": str(c.prompt), "kind": kind} for c, kind in zip(contexts_of(3), kinds, strict=True)]
    config = CDPGConfig(output_dir=str(folder), **(values | changes))
    trainer = CDPGTrainer(tabular(4), constraints, config, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return trainer


def test_a_run_leaves_them_out_of_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, [naughty.on_odd, coroutine_rules.on_even])
    samples = list(read_jsonl(tmp_path / "samples.jsonl"))
    for record in read_jsonl(tmp_path / "metrics.jsonl"):
        drawn = [sample for sample in samples if sample["epoch"] == record["epoch"]]
        kept = {row: [sample for sample in drawn if sample["row"] == row] for row in (1, 3)}
        assert {sample["b"] for sample in drawn if sample["row"] == 2} == {None}
        assert (record["not_applicable"], record["checks_failed"], record["samples"]) == (8, 0, 24)
        assert record["satisfaction"] == pytest.approx(sum(s["b"] for rows in kept.values() for s in rows) / 16)
        z = [sum(math.exp(s["log_ratio"]) for s in rows if s["b"]) / 8 for rows in kept.values()]
        assert record["z_mean"] == pytest.approx(sum(z) / 2)
        assert record["coverage"] == sum(one > 0 for one in z) / 2
    told = capsys.readouterr().err
    assert "epoch 1: no constraint applies to 8 samples, which were left out\n" in told
    assert "in all, no constraint applies to 16 samples, which were left out\n" in told
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["base"]["not_applicable"]["mean"] == pytest.approx(1 / 3)
    assert "checks_failed" not in result["base"]
    assert (result["contexts"], result["contexts_applied"]) == (3, 2)
    assert result["partition"][1] is None and None not in (result["partition"][0], result["partition"][2])
    assert "base: no constraint applies to 4 of 12 samples, which are left out" in result["notices"]
    outputs = {example["row"]: [output["b"] for output in example["outputs"]["base"]] for example in result["examples"]}
    assert outputs[2] == [None] * 4
    assert result["base"]["satisfaction"]["mean"] == pytest.approx(sum(outputs[1] + outputs[3]) / 8)


def test_workers_say_the_same(tmp_path: Path) -> None:
    constraints = [naughty.on_odd, coroutine_rules.on_even]
    here = trained(tmp_path / "here", constraints)
    there = trained(tmp_path / "there", constraints, check_workers=1)
    assert torch.equal(*(next(trainer.model.parameters()) for trainer in (here, there)))
    assert (tmp_path / "here" / "samples.jsonl").read_bytes() == (tmp_path / "there" / "samples.jsonl").read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_an_epoch_to_which_nothing_applies_changes_nothing(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailureLog, "problem", lambda self, epoch: None)  # as if something had applied before
    trainer = trained(tmp_path, naughty.on_odd, ("even",) * 3, method=method)
    assert torch.equal(next(trainer.model.parameters()), next(tabular(4).module.parameters()))
    for record in read_jsonl(tmp_path / "metrics.jsonl"):
        assert (record["not_applicable"], record["checks_failed"], record["steps"]) == (24, 0, 0)
        assert (record["satisfaction"], record["length"], record["z_mean"]) == (None, None, 0.0)


def test_a_run_to_which_nothing_applies_ends_after_its_first_epoch(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no constraint applies to any of the 24 samples of epoch 1"):
        trained(tmp_path, naughty.on_odd, ("even",) * 3)
    assert not (tmp_path / "model").exists()


def test_the_dry_look_says_that_nothing_applies() -> None:
    stats = ProbeStatistics("cdpg", 32, 32, z=[], hits=[], failed=0.0, failed_allowed=0.05, ended=1.0,
                seconds_sampling=1.0, seconds_constraint=0.1, workers=1)  # fmt: skip
    (advice,) = advise(stats)
    assert advice.level == "stop" and re.match("No constraint applies to any of the samples", advice.text)
