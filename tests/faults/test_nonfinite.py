"""NaN and infinity: the step is not taken, the batch is kept, and no checkpoint ever holds one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.errors import RunError, UserError
from cdpg.methods import METHODS
from cdpg.methods.base import WeightedLoss
from cdpg.methods.rloo import RLOOLoss
from cdpg.methods.ziegler import PPOLoss
from cdpg.models.tabular import TabularModel
from cdpg.storage.checkpoints import load_checkpoint
from cdpg.storage.jsonl import read_jsonl
from cdpg.training.nonfinite import MOST_FILES
from cdpg.training.optimization import Updater
from enumeration import contexts_of, tabular
from rounds import ordinary

NONFINITE_LIMIT = 5


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return ["a" in completion for completion in completions]


def make(folder: Path, callbacks: Any = (), **changes: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 6, "contexts_per_epoch": 3, "num_generations": 8, "max_completion_length": 3, "learning_rate": 0.05,
        "save_every": 1, "keep_checkpoints": 99, "device": "cpu", "warmup_epochs": 0, "check_workers": 0,
    }  # fmt: skip
    config = CDPGConfig(output_dir=str(folder), **(values | changes))
    data = [{"prompt": str(context.prompt)} for context in contexts_of(3)]
    return CDPGTrainer(tabular(4), has_a, config, train_dataset=data, callbacks=callbacks)


def weights_by_epoch(folder: Path) -> list[Tensor]:
    """The weights of every checkpoint; all that is in one must be finite."""
    found = [load_checkpoint(path) for path in sorted((folder / "checkpoints").iterdir())]
    for checkpoint in found:
        for named in checkpoint.tensors.values():
            assert all(bool(tensor.isfinite().all()) for tensor in named.values())
        assert "NaN" not in json.dumps(checkpoint.state)
    return [checkpoint.tensors["weights"]["policy.table"] for checkpoint in found]


def spoil_losses(monkeypatch: pytest.MonkeyPatch, by_epoch: dict[int, float]) -> None:
    """Multiply the loss of some epochs."""
    current: list[int] = [0]
    update = Updater.update

    def updating(self: Any, epoch: Any, *rest: Any) -> Any:
        current[0] = epoch.number
        return update(self, epoch, *rest)

    monkeypatch.setattr(Updater, "update", updating)
    for kind in LOSSES.values():
        original = kind.loss

        def loss(self: Any, rows: Tensor, scores: Any, original: Any = original) -> Tensor:
            return original(self, rows, scores) * by_epoch.get(current[0], 1.0)  # type: ignore[no-any-return]

        monkeypatch.setattr(kind, "loss", loss)


LOSSES = {"cdpg": WeightedLoss, "rloo": RLOOLoss, "ziegler": PPOLoss}
"""A method for each kind of loss; the others share one of them."""


@pytest.mark.parametrize(
    ("method", "factor"),
    [
        pytest.param(method, factor, marks=() if method in LOSSES or factor == 1e200 else pytest.mark.exhaustive)
        for method in METHODS
        for factor in (float("nan"), float("inf"), 1e200)
    ],
)
def test_a_step_is_skipped_and_its_batch_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, factor: float
) -> None:
    """1e200 is finite, but its square is not, and Adam keeps squares."""
    trainer = make(tmp_path, method=method)
    spoil_losses(monkeypatch, {3: factor})
    trainer.train()
    records = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [(r["steps"] > 0, r["steps_nonfinite"] > 0) for r in records] == [
        (number != 3, number == 3) for number in range(1, 7)
    ]
    weights = weights_by_epoch(tmp_path)
    assert len(weights) == 6
    assert [torch.equal(a, b) for a, b in zip(weights[1:], weights, strict=False)] == [False, True, False, False, False]
    (kept,) = (tmp_path / "nonfinite").iterdir()
    assert kept.name == "epoch-000003.json"
    step = json.loads(kept.read_bytes())["steps"][0]
    assert step["loss"] in ("nan", "inf", "-inf") or abs(step["loss"]) > 1e190
    assert len(step["samples"]) == 24
    sample = next(sample for sample in step["samples"] if sample["b"] == 1)
    assert {"row", "prompt", "completion", "token_ids", "log_q", "log_a", "log_z", "weight"} <= sample.keys()
    assert sample["log_q"] < 0 and "a" in sample["completion"]
    assert method == "ziegler" or sample["weight"] > 0


def test_five_epochs_without_a_finite_step_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, epochs=20)
    spoil_losses(monkeypatch, dict.fromkeys([2, *range(4, 21)], float("nan")))
    with pytest.raises(RunError, match=r"no finite gradient in 5 epochs: lower learning_rate .*nonfinite'"):
        trainer.train()
    assert len(list(read_jsonl(tmp_path / "metrics.jsonl"))) == 3 + NONFINITE_LIMIT
    weights = weights_by_epoch(tmp_path)
    assert len(weights) == 3 + NONFINITE_LIMIT
    assert torch.equal(weights[-1], weights[2])
    make(tmp_path, epochs=9).train(resume_from_checkpoint=True)  # the checkpoint is as good as any


def test_the_kept_batches_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = 2 * MOST_FILES + 10
    trainer = make(tmp_path, epochs=epochs, save_every=1000)
    spoil_losses(monkeypatch, dict.fromkeys(range(1, epochs, 2), float("nan")))
    trainer.train()
    assert len(list((tmp_path / "nonfinite").iterdir())) == MOST_FILES


@pytest.mark.parametrize("method", ordinary(METHODS, *LOSSES))
def test_a_step_that_breaks_the_weights_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    make(tmp_path / "whole", method=method).train()
    trainer = make(tmp_path / "run", method=method, save_every=2)
    steps = iter(range(100))
    original = trainer.optimizer.step
    per_epoch = trainer.method.passes

    def step(*arguments: Any) -> None:
        original(*arguments)
        if next(steps) == 3 * per_epoch:
            with torch.no_grad():
                trainer.policy.table[0, 0, 0] = float("nan")  # type: ignore[attr-defined]

    monkeypatch.setattr(trainer.optimizer, "step", step)
    with pytest.raises(RunError, match="a step of epoch 4 left weights that are not finite"):
        trainer.train()
    assert len(weights_by_epoch(tmp_path / "run")) == 1
    kept = json.loads((tmp_path / "run" / "nonfinite" / "epoch-000004.json").read_bytes())
    assert kept["steps"][0]["weights_finite"] is False
    make(tmp_path / "run", method=method).train(resume_from_checkpoint=True)
    assert torch.equal(weights_by_epoch(tmp_path / "run")[-1], weights_by_epoch(tmp_path / "whole")[-1])


def test_weights_that_something_else_broke_are_not_sampled_from(tmp_path: Path) -> None:
    class Breaker(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.epoch == 3:
                with torch.no_grad():
                    trainer.policy.table.fill_(float("inf"))  # type: ignore[attr-defined]

    trainer = make(tmp_path, callbacks=[Breaker()], save_every=2)
    with pytest.raises(RunError, match="not finite"):
        trainer.train()
    assert len(weights_by_epoch(tmp_path)) == 1


@pytest.mark.parametrize("method", ordinary(METHODS, *LOSSES))
def test_a_base_that_gives_nan_once_spoils_one_epoch_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Z̄ and β live on from epoch to epoch. Some methods do not ask the base for more than a figure to log, or never."""
    trainer = make(tmp_path, method=method)
    original, calls = TabularModel.score, iter(range(10**6))

    def score(self: TabularModel, prompts: Any, rows: Any) -> Any:
        scores = original(self, prompts, rows)
        if self is trainer.base and next(calls) == 2:
            scores.log_probs[0, 0] = float("nan")
        return scores

    monkeypatch.setattr(TabularModel, "score", score)
    trainer.train()
    records = list(read_jsonl(tmp_path / "metrics.jsonl"))
    spoilt = [record["epoch"] for record in records if record["steps_nonfinite"]]
    assert spoilt == ([] if method in ("reinforce", "rft", "raft") else [3])
    assert len(weights_by_epoch(tmp_path)) == 6


@pytest.mark.parametrize("epsilon", [0.0, 1e-46])
def test_adam_needs_its_guard(tmp_path: Path, epsilon: float) -> None:
    with pytest.raises(UserError, match="adam_epsilon must be at least"):
        make(tmp_path, adam_epsilon=epsilon)
