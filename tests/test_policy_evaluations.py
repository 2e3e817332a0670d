"""The evaluations of a run: nothing is found out twice, nothing is reused that has changed, and none need be made."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.contexts.digests import prompt_digests
from cdpg.evaluation.metrics import POOLED
from cdpg.evaluation.policy_evaluations import PolicyEvaluations
from cdpg.models.scoring import score_samples
from cdpg.report import write_report
from cdpg.rollout.sampler import Sampler
from cdpg.storage.jsonl import read_jsonl
from enumeration import contexts_of, tabular
from evaluated import Case, Counted, Said, small_blocks
from side_by_side import side_by_side
from unpainted import is_one_of_a_kind, painted_if
from values import differences

CONTEXTS = [{"prompt": str(context.prompt)} for context in contexts_of(3)]


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return ["a" in completion for completion in completions]


def make(folder: Path, held_out: Any = CONTEXTS, callbacks: Any = None, **changes: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 4, "contexts_per_epoch": 3, "num_generations": 8, "max_completion_length": 3, "learning_rate": 0.05,
        "device": "cpu", "evaluate_every": 2, "evaluation_samples": 6, "check_workers": 0,
    }  # fmt: skip
    config = CDPGConfig(output_dir=str(folder), **(values | changes))
    return CDPGTrainer(tabular(4), has_a, config, CONTEXTS, held_out, callbacks=callbacks)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Contexts that a model was sampled on, one number for each block, and 0 for samples that another model scored."""
    found: list[int] = []
    draw = Sampler.draw

    def counted(self: Sampler, number: int, contexts: Any, *rest: Any, **more: Any) -> Any:
        found.extend([len(contexts)] if more.get("stream") == "evaluation" else [])
        return draw(self, number, contexts, *rest, **more)

    def scored(*given: Any) -> Any:
        found.append(0)
        return score_samples(*given)

    monkeypatch.setattr(Sampler, "draw", counted)
    monkeypatch.setattr("cdpg.evaluation.evaluator.score_samples", scored)
    return found


def figures(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


def test_the_last_evaluation_along_the_run_is_the_final_one(tmp_path: Path, asked: list[int]) -> None:
    trainer = make(tmp_path)
    trainer.train()
    assert asked == [3, 3, 0, 3, 0], "the base, then twice the policy, and nothing at the end"
    last = list(read_jsonl(tmp_path / "evaluations.jsonl"))[-1]["metrics"]
    found = figures(tmp_path)
    assert found["tuned"] == last
    again = make(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert asked[5:] == [3, 3, 0], "another process knows nothing and finds out the same"
    assert figures(tmp_path) == found


def test_of_more_contexts_only_the_rest_is_evaluated_at_the_end(tmp_path: Path, asked: list[int]) -> None:
    many = [CONTEXTS[place % 3] for place in range(70)]
    make(tmp_path / "run", many, epochs=1, evaluation_contexts=64, evaluation_samples=2).train()
    assert asked == [64, 64, 0, 6, 6, 0]
    make(tmp_path / "apart", many, epochs=1, evaluate_every=0, evaluation_samples=2).train()
    assert asked[6:] == [64, 6, 64, 6, 0, 0]
    whole, apart = figures(tmp_path / "run"), figures(tmp_path / "apart")
    for found in (whole, apart):
        del found["costs"]
    assert whole == apart


def test_weights_that_someone_has_changed_are_evaluated_again(tmp_path: Path, asked: list[int]) -> None:
    class Averages(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **parts: Any) -> None:
            for parameter in model.parameters():
                parameter.data.mul_(0.5)  # which no version counter notices

    trainer = make(tmp_path, callbacks=[Averages])
    trainer.train()
    assert asked == [3, 3, 0, 3, 0, 3, 0]
    last = list(read_jsonl(tmp_path / "evaluations.jsonl"))[-1]["metrics"]
    assert figures(tmp_path)["tuned"] != last
    trainer.evaluate()
    assert len(asked) == 7
    with torch.no_grad():
        next(trainer.model.parameters()).add_(1.0)
    trainer.evaluate()
    assert asked[7:] == [3, 0]


def test_zero_leaves_out_all_evaluations_along_the_run(tmp_path: Path, asked: list[int]) -> None:
    make(tmp_path, evaluate_every=0).train()
    assert asked == [3, 3, 0]
    assert not (tmp_path / "evaluations.jsonl").exists()
    with painted_if(is_one_of_a_kind):
        assert write_report([tmp_path], tmp_path / "report.html").stat().st_size > 10_000
    make(tmp_path, evaluate_every=0, epochs=5).train(resume_from_checkpoint=True)
    assert asked[3:] == [3, 3, 0]


def test_without_any_evaluation_there_is_still_a_report(tmp_path: Path, asked: list[int]) -> None:
    make(tmp_path, evaluate_every=0, evaluate_at_end=False).train()
    assert asked == []
    assert not (tmp_path / "evaluation.json").exists()
    with painted_if(is_one_of_a_kind):
        assert write_report([tmp_path], tmp_path / "report.html").stat().st_size > 10_000


def test_lines_and_the_final_evaluation_beside_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of nine contexts along the run: a block of four counts at the end, too, the half one is evaluated anew."""
    small_blocks(monkeypatch)
    case = Case(evaluation_contexts=6)
    stops, said, policy = Counted(), Said(), case.other(0)
    evaluator = case.evaluator(tuned_on=frozenset(prompt_digests(case.given()[5:8])))
    evaluations = PolicyEvaluations(evaluator, policy, {"task": "x"})
    assert evaluations.seconds_per_context is None

    def line(epoch: int, metrics: Any) -> dict[str, Any]:
        return {
            "epoch": epoch, "samples": 24 * epoch, "contexts": 6, "contexts_tuned_on": 1, "samples_per_context": 5,
            "metrics": metrics,
        }  # fmt: skip

    started = time.perf_counter()
    found = evaluations.after_epoch(0, stops)
    assert found["seconds"] < time.perf_counter() - started
    assert evaluations.seconds_per_context == found.pop("seconds") / 6 > 0
    assert differences(found, line(0, case.expected({}, 6).metrics("base"))) == []
    assert stops.calls == 2 + 4, "before every block, and before every round of samples of the ideal model"
    for epoch in (1, 3):
        expected = case.expected({"tuned": policy}, 6)
        found = evaluations.after_epoch(epoch, stops)
        assert evaluations.seconds_per_context == found.pop("seconds") / 6 > 0
        base = {"base": {POOLED: expected.metrics("base")[POOLED]}}
        assert differences(found, line(epoch, expected.metrics("tuned")) | base) == []
        with torch.no_grad():
            next(iter(policy.module.parameters())).mul_(0.5)
    expected, before = case.expected({"tuned": policy}), stops.calls
    final = evaluations.at_end(said, stops)
    assert final is not None
    assert final.about == {"task": "x", "of_saved_model": False}
    names = {"base": "base", "tuned": "tuned"}
    whole = final.to_mapping(names)
    assert {name: differences(whole[name], expected.metrics(name)) for name in names} == {"base": [], "tuned": []}
    assert stops.calls > before
    assert said.lines[:3] == [f"evaluating base: {start} of 9 contexts" for start in (0, 4, 8)]


def test_every_process_has_the_line_of_the_main_one() -> None:
    case = Case(evaluation_contexts=3)
    one, other = side_by_side(
        2,
        lambda processes: PolicyEvaluations(
            replace(case.evaluator(), processes=processes), case.other(0), {}
        ).after_epoch(1),
    )
    assert one == other
    assert differences(one["metrics"], case.expected({"tuned": case.other(0)}, 3).metrics("tuned")) == []
