"""Hugging Face callbacks: every event in Hugging Face's order, and a state as its users know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.runlog import read_jsonl
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
    seen: list[float] = []

    class Ordinary(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.best = seen

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            self.best.append(metrics["eval_satisfaction"])

    make(tmp_path, [Ordinary]).train()
    expected = [line["metrics"]["satisfaction"]["mean"] for line in read_jsonl(tmp_path / "evaluations.jsonl")]
    assert seen == expected
    assert len(seen) == 3


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
    with pytest.raises(Exception, match="EarlyStoppingCallback looks at held-out contexts"):
        trainer.add_callback(EarlyStoppingCallback)
    trainer.train()
    assert recorder.events == []
