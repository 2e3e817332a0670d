"""A run's files: which contexts were sampled, in which order things reach the disk, and what a restore brings back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.models.tabular import TabularModel
from cdpg.storage.atomic import write_folder
from cdpg.storage.checkpoints import load_checkpoint, save_checkpoint
from cdpg.storage.json_files import write_json
from cdpg.storage.jsonl import JsonlFile, read_jsonl
from cdpg.storage.run_folder import RunFolder, costs
from cdpg.storage.snapshot import Trainable
from cdpg.system import files

TUNED = [f"tuned {place}" for place in range(6)]
HELD_OUT = [f"held out {place}" for place in range(2)]
SEED = 13
"""Its first epoch draws the fourth context and then the third: order is seen to matter."""


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return ["a" in text for text in completions]


def trainer(folder: Path, **changes: Any) -> CDPGTrainer:
    settings: dict[str, Any] = {
        "epochs": 7, "contexts_per_epoch": 2, "num_generations": 6, "max_completion_length": 2, "warmup_epochs": 4,
        "learning_rate": 0.08, "save_every": 3, "keep_checkpoints": 9, "evaluate_every": 3, "evaluation_samples": 4,
        "log_samples": 12, "device": "cpu", "check_workers": 0, "seed": SEED, "evaluate_at_end": False,
    }  # fmt: skip
    model = TabularModel([*TUNED, *HELD_OUT], ("a", "b"), max_length=2, seed=3)
    config = CDPGConfig(output_dir=str(folder), **(settings | changes))
    return CDPGTrainer(model, has_a, config, TUNED, HELD_OUT)


@pytest.fixture(scope="module")
def synced() -> list[str]:
    """What a run waited for, in order; filled by the run below."""
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, synced: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        sync, rename = files.sync, files.rename

        def watched_sync(path: Path) -> None:
            synced.append(f"sync {path.relative_to(folder.parent)}")
            sync(path)

        def watched_rename(source: Path, target: Path) -> None:
            synced.append(f"rename to {target.relative_to(folder.parent)}")
            rename(source, target)

        patch.setattr(files, "sync", watched_sync)
        patch.setattr(files, "rename", watched_rename)
        trainer(folder).train()
    return folder


# Contexts.


def in_order(count: int) -> list[str]:
    """The first ``count`` contexts of the seed's endless sequence, from its definition."""
    found: list[str] = []
    for number in range(-(-count // len(TUNED))):
        raw = np.random.PCG64(np.random.SeedSequence(SEED, spawn_key=(number,))).random_raw(len(TUNED))
        found += [TUNED[place] for place in np.argsort(raw, kind="stable")]
    return found[:count]


def test_the_contexts_of_every_epoch_are_those_of_the_sequence_and_none_is_held_out(run: Path) -> None:
    """All samples are logged: which contexts they are of is which contexts were tuned on."""
    samples = list(read_jsonl(run / "samples.jsonl"))
    assert len(samples) == 7 * 12
    for epoch in range(1, 8):
        prompts = [sample["prompt"] for sample in samples if sample["epoch"] == epoch]
        assert list(dict.fromkeys(prompts)) == in_order(14)[2 * epoch - 2 : 2 * epoch], epoch
    assert not {sample["prompt"] for sample in samples} & set(HELD_OUT)


def test_a_sample_is_of_the_prompt_that_it_is_logged_with(run: Path) -> None:
    """In the first epoch the policy is the base: log q is looked up in its row of the table."""
    model = TabularModel([*TUNED, *HELD_OUT], ("a", "b"), max_length=2, seed=3)
    table, outcomes = model.log_prob_table().detach(), model.outcomes()
    first = [sample for sample in read_jsonl(run / "samples.jsonl") if sample["epoch"] == 1]
    assert list(dict.fromkeys(sample["row"] for sample in first)) == [4, 3]
    assert len(first) == 12
    for sample in first:
        expected = table[model.contexts.index(sample["prompt"]), outcomes.index(tuple(sample["token_ids"]))]
        assert sample["log_q"] == pytest.approx(float(expected), abs=1e-12)
        assert sample["row"] == TUNED.index(sample["prompt"]) + 1


def test_the_logged_rate_is_that_of_the_schedule(run: Path) -> None:
    rates = [record["learning_rate"] for record in read_jsonl(run / "metrics.jsonl")]
    assert rates == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.08, 0.08, 0.08], rel=1e-12)


def test_evaluations_and_checkpoints_are_made_when_they_are_due(run: Path) -> None:
    assert [line["epoch"] for line in read_jsonl(run / "evaluations.jsonl")] == [0, 3, 6, 7]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"epoch-00000{n}" for n in (3, 6, 7)]


# The order of syncs.


def test_logs_are_on_the_disk_before_the_checkpoint_that_counts_their_lines(run: Path, synced: list[str]) -> None:
    steps = iter(synced)
    for number in (3, 6, 7):
        before = []
        for step in steps:
            if step == f"rename to run/checkpoints/epoch-00000{number}":
                break
            before.append(step)
        writing = next(place for place, step in enumerate(before) if "/.writing-epoch-" in step)
        for log in ("metrics", "samples", "evaluations"):
            place = before.index(f"sync run/{log}.jsonl")
            assert place < writing
            assert "sync run" in before[place:writing], "the names, too"


def test_the_model_is_on_the_disk_before_it_takes_its_name(run: Path, synced: list[str]) -> None:
    named = synced.index("rename to run/model")
    writing = f"run/.writing-model-{os.getpid()}"
    before = synced[:named]
    for path in (run / "model").rglob("*"):
        assert f"sync {writing}/{path.relative_to(run / 'model')}" in before, path
    assert before[-1] == f"sync {writing}", "the folder's list of names comes last"
    assert synced[named + 1] == "sync run"


def watched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    made: list[str] = []
    sync, rename, replace = files.sync, files.rename, os.replace

    def note(step: str, path: Path) -> None:
        name = str(path.relative_to(folder)).replace(str(os.getpid()), "PID")
        made.append(f"{step} {name}")

    monkeypatch.setattr(files, "sync", lambda path: (note("sync", path), sync(path))[1])
    monkeypatch.setattr(files, "rename", lambda a, b: (note("rename to", b), rename(a, b))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (note("replace", b), replace(a, b))[1])
    return made


def test_a_folder_is_synced_with_all_that_lies_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "weights").write_bytes(b"x")
        (folder / "weights").write_bytes(b"y")

    made = watched(monkeypatch, tmp_path)
    write_folder(tmp_path / "model", fill)
    inside = [f"sync .writing-model-PID/{name}" for name in ("adapter", "adapter/weights", "weights")]
    assert made == [*inside, "sync .writing-model-PID", "rename to model", "sync ."]


def test_a_file_is_synced_before_and_its_name_after_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watched(monkeypatch, tmp_path)
    write_json(tmp_path / "f.json", {})
    assert made == ["sync .f.json.PID.tmp", "replace f.json", "sync ."]


def test_a_log_is_synced_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = JsonlFile(tmp_path / "f.jsonl")
    file.append({"epoch": 1})
    made = watched(monkeypatch, tmp_path)
    file.sync()
    assert made == ["sync f.jsonl", "sync ."]


def test_the_folder_of_checkpoints_is_on_the_disk_before_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watched(monkeypatch, tmp_path)
    save_checkpoint(tmp_path / "checkpoints", 1, {}, {}, keep=1)
    assert made[0] == "sync .", "its name in the run's folder"
    assert made[-1] == "sync checkpoints"


def test_a_write_that_the_system_cuts_short_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:7])))
    file = JsonlFile(tmp_path / "f.jsonl")
    record = {"epoch": 1, "text": "x" * 100}
    file.append(record)
    write_json(tmp_path / "f.json", record)
    assert list(read_jsonl(file.path)) == [record]
    assert json.loads((tmp_path / "f.json").read_text()) == record


# What a run cost, and what is restored.


def test_costs_are_added_up(tmp_path: Path) -> None:
    metrics = JsonlFile(tmp_path / "metrics.jsonl")
    for epoch in (1, 2, 3):
        metrics.append({"epoch": epoch, "samples": 10, "tokens": 100 * epoch, "seconds": 0.5 * epoch})
    metrics.append({"epoch": 4, "samples": 10, "tokens": None, "seconds": 1.0})
    assert costs(RunFolder(tmp_path)) == {"epochs": 4, "samples": 40, "tokens": 600, "seconds": 4.0}


def test_a_checkpoint_without_moments_leaves_none_of_later_steps(tmp_path: Path) -> None:
    """A run is taken back to before its first step, by a trainer that has taken some."""
    made = trainer(tmp_path, epochs=1)
    trainable = Trainable(made.model, None, made.optimizer)
    before = {name: tensors.copy() for name, tensors in trainable.tensors().items()}
    assert before["optimizer"] == {}
    state = {"objective": dict(made.method_state)}
    weights = {name: tensor.clone() for name, tensor in before["weights"].items()}
    path = save_checkpoint(tmp_path / "start", 0, {"weights": weights, "optimizer": {}}, state, keep=1)
    made.train()
    assert trainable.tensors()["optimizer"]
    trainable.restore(load_checkpoint(path))
    assert trainable.tensors()["optimizer"] == {}
    assert all(torch.equal(trainable.tensors()["weights"][name], tensor) for name, tensor in weights.items())
