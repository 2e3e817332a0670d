"""Hugging Face callbacks: every event in Hugging Face's order, and a state as its users know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.errors import UserError
from cdpg.evaluation.policy_evaluations import PolicyEvaluations
from cdpg.storage.jsonl import read_jsonl
from enumeration import tabular

CONTEXTS = ["a", "a b", "a b c"]
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return ["a" in completion for completion in completions]


def make(folder: Path, callbacks: Any = (), held_out: Any = CONTEXTS, **changes: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 3, "contexts_per_epoch": 3, "num_generations": 4, "max_completion_length": 3, "learning_rate": 0.05,
        "save_every": 2, "evaluate_every": 2, "evaluation_samples": 2, "evaluate_at_end": False, "device": "cpu",
        "warmup_epochs": 0, "check_workers": 0,
    }  # fmt: skip
    config = CDPGConfig(output_dir=str(folder), **(values | changes))
    return CDPGTrainer(tabular(4), has_a, config, CONTEXTS, held_out, callbacks=callbacks)


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Notes every event with the step at which it came."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []


def _recording(event: str) -> Any:
    def method(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append((event, state.global_step))

    return method


for _event in EVENTS:
    setattr(Recorder, _event, _recording(_event))


def epoch_events(number: int, *after: str) -> list[tuple[str, int]]:
    """What one epoch fires, with ``after`` between its log and its end."""
    before = ["on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"]
    later = ["on_step_end", "on_log", *after, "on_epoch_end"]
    return [(event, number - 1) for event in before] + [(event, number) for event in later]


def test_events_come_in_hugging_faces_order(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make(tmp_path, [recorder])
    assert recorder.events == [("on_init_end", 0)]
    recorder.events.clear()
    trainer.train()
    evaluation = ("on_log", "on_evaluate")
    assert recorder.events == [
        ("on_train_begin", 0),
        *((event, 0) for event in evaluation),
        *epoch_events(1),
        *epoch_events(2, *evaluation, "on_save"),
        *epoch_events(3, *evaluation, "on_save"),
        ("on_train_end", 3),
    ]


def test_every_optimiser_step_is_framed(tmp_path: Path) -> None:
    recorder = Recorder()
    make(tmp_path, [recorder], epochs=1, batch_size=5).train()
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    names = [name for name, _ in recorder.events]
    assert record["steps"] > 1
    assert names.count("on_pre_optimizer_step") == names.count("on_optimizer_step") == record["steps"]


def test_what_a_callback_makes_at_the_start_is_there_at_the_first_evaluation(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    class Ordinary(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.best = seen

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            self.best.append((metrics["epoch"], metrics["eval_satisfaction"]))

    make(tmp_path, [Ordinary]).train()
    lines = read_jsonl(tmp_path / "evaluations.jsonl")
    assert seen == [(line["epoch"], line["metrics"]["satisfaction"]["mean"]) for line in lines]
    assert [epoch for epoch, _ in seen] == [0, 2, 3], "Hugging Face's trainer writes it into the metrics, too"


def test_the_history_is_that_of_the_files_also_after_resuming(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", epochs=4)
    whole.train()
    make(tmp_path / "part", epochs=2).train()
    resumed = make(tmp_path / "part", epochs=4)
    resumed.train(resume_from_checkpoint=True)

    def shape(trainer: CDPGTrainer) -> list[Any]:
        timeless = ("seconds", "loss")
        return [
            {key: value for key, value in log.items() if not key.startswith(timeless)}
            for log in trainer.state.log_history
        ]

    assert shape(resumed) == shape(whole)
    steps = [(log["step"], log["epoch"], "eval_satisfaction" in log) for log in whole.state.log_history]
    assert steps == [
        (0, 0, True),
        (1, 1, False),
        (2, 2, False),
        (2, 2, True),
        (3, 3, False),
        (4, 4, False),
        (4, 4, True),
    ]
    best = max(log["eval_satisfaction"] for log in whole.state.log_history if "eval_satisfaction" in log)
    assert whole.state.best_metric == resumed.state.best_metric == best
    assert whole.state.global_step == 4


def test_a_callback_may_ask_for_a_checkpoint_and_an_evaluation(tmp_path: Path) -> None:
    class Asks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = control.should_evaluate = state.global_step == 1

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == 2

    make(tmp_path, [Asks], epochs=4, save_every=100, evaluate_every=4, keep_checkpoints=9).train()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "epoch-000001", "epoch-000002", "epoch-000004",
    ]  # fmt: skip
    assert [line["epoch"] for line in read_jsonl(tmp_path / "evaluations.jsonl")] == [0, 1, 4]


@pytest.mark.parametrize("event", ["on_epoch_begin", "on_step_end", "on_evaluate", "on_epoch_end"])
def test_a_stop_asked_for_anywhere_ends_the_run_with_a_checkpoint(tmp_path: Path, event: str) -> None:
    class Stops(TrainerCallback):  # type: ignore[misc]
        pass

    def stop(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step > 0 or event == "on_epoch_begin"

    setattr(Stops, event, stop)
    last = 2 if event == "on_evaluate" else 1
    assert make(tmp_path, [Stops], epochs=9, save_every=100).train()["epoch"] == last
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"epoch-00000{last}"]


def test_callbacks_are_added_and_removed(tmp_path: Path) -> None:
    trainer, recorder = make(tmp_path, held_out=None, epochs=1), Recorder()
    trainer.add_callback(recorder)
    assert trainer.pop_callback(Recorder) is recorder
    assert trainer.pop_callback(recorder) is None
    trainer.add_callback(Recorder)
    trainer.remove_callback(Recorder)
    with pytest.raises(UserError, match="evaluations during the run, and there are none: pass eval_dataset"):
        trainer.add_callback(EarlyStoppingCallback)
    trainer.train()
    assert recorder.events == []


def test_an_upload_without_a_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"given no repository: name it, push_to_hub\('user/name'\)"):
        make(tmp_path).push_to_hub()
    assert not (tmp_path / "model").exists()


def test_an_evaluation_takes_no_data(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(UserError, match="evaluate was given a list: it takes no data; pass eval_dataset"):
        trainer.evaluate(CONTEXTS)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="evaluate was given eval_dataset, ignore_keys: it takes no data"):
        trainer.evaluate(eval_dataset=CONTEXTS, ignore_keys=None)


def test_a_single_callback_needs_no_list(tmp_path: Path) -> None:
    recorder = Recorder()
    make(tmp_path, recorder)
    assert recorder.events == [("on_init_end", 0)]


@pytest.mark.parametrize("given", [["tensorboard"], "tensorboard", 3])
def test_what_is_no_callback_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(UserError, match=r"a callback is .*: pass callbacks of Transformers"):
        make(tmp_path, given)


def test_evaluating_and_uploading_by_hand_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    trainer = make(tmp_path, [recorder], epochs=1)
    trainer.train()
    best = trainer.state.best_metric
    recorder.events.clear()
    found = trainer.evaluate()
    monkeypatch.setattr("cdpg.training.saving.push_folder", lambda folder, repo_id: "address")
    trainer.push_to_hub("me/model")
    assert recorder.events == [("on_log", 1), ("on_evaluate", 1), ("on_push_begin", 1)]
    assert trainer.state.log_history[-1]["eval_satisfaction"] == found["tuned"]["satisfaction"]["mean"]
    assert trainer.state.best_metric == best


def test_the_end_of_an_epoch_may_ask_for_an_evaluation_that_a_resumed_run_keeps(tmp_path: Path) -> None:
    class Asks(TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = state.global_step in (1, 2, 3)

    options: dict[str, Any] = {"epochs": 4, "evaluate_every": 3, "save_every": 2, "keep_checkpoints": 1}
    make(tmp_path, [Asks], **options).train()
    assert [line["epoch"] for line in read_jsonl(tmp_path / "evaluations.jsonl")] == [0, 1, 2, 3, 4]
    make(tmp_path / "part", [Asks], **(options | {"epochs": 2, "evaluate_every": 3})).train()
    make(tmp_path / "part", **options).train(resume_from_checkpoint=True)
    assert [line["epoch"] for line in read_jsonl(tmp_path / "part" / "evaluations.jsonl")] == [0, 1, 2, 3, 4]


def test_an_evaluation_that_cannot_be_made_is_refused_and_costs_no_epoch(tmp_path: Path) -> None:
    class Asks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = state.global_step == 2

    with pytest.raises(UserError, match="a callback asks for an evaluation, but there are no contexts for it"):
        make(tmp_path, [Asks], None, save_every=100).train()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch-000002"]


def test_stock_callbacks_live_without_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock = [DefaultFlowCallback, PrinterCallback, ProgressCallback()]
    assert make(tmp_path, stock, evaluate_every=0).train()["epoch"] == 3
    assert capsys.readouterr().out.count("'satisfaction': ") == 6
    assert not (tmp_path / "evaluations.jsonl").exists()
    with pytest.raises(UserError, match="evaluations during the run, and evaluate_every is 0: raise it"):
        make(tmp_path, [EarlyStoppingCallback], evaluate_every=0)


def test_early_stopping_remembers_the_best_of_before_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {0: 0.2, 1: 0.9, 2: 0.9, 3: 0.5, 4: 0.95}

    def along(self: PolicyEvaluations, epoch: int, check_stop: Any) -> dict[str, Any]:
        return {"epoch": epoch, "metrics": {"satisfaction": {"mean": found[epoch]}}}

    monkeypatch.setattr(PolicyEvaluations, "after_epoch", along)
    make(tmp_path, epochs=1, evaluate_every=1).train()
    resumed = make(tmp_path, [EarlyStoppingCallback(2)], epochs=4, evaluate_every=1)
    assert resumed.train(resume_from_checkpoint=True)["epoch"] == 3, "twice not above the 0.9 of before the resume"
    assert (resumed.state.best_metric, resumed.state.best_global_step) == (0.9, 1), "the first of equals"


def test_callbacks_see_what_a_longer_run_keeps_and_all_that_hugging_face_passes(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(
            self, args: Any, state: Any, control: Any, lr_scheduler: Any, train_dataloader: Any, **kwargs: Any
        ) -> None:
            seen.append((args.eval_steps, state.eval_steps, state.max_steps, lr_scheduler, kwargs["eval_dataloader"]))

    make(tmp_path, [Looks], epochs=20, evaluate_every=None).train()
    make(tmp_path, [Looks], epochs=30, evaluate_every=None).train(resume_from_checkpoint=True)
    assert seen == [(2, 2, 20, None, None), (2, 2, 30, None, None)]


def test_the_gradient_of_a_step_can_be_looked_at(tmp_path: Path) -> None:
    norms: list[float] = []

    class Gradients(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            norms.append(sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5)

        on_optimizer_step = on_pre_optimizer_step

    record = make(tmp_path, [Gradients], None, epochs=1).train()
    assert norms == pytest.approx([record["grad_norm"]] * 2)
