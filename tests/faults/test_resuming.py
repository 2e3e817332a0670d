"""Resuming under other circumstances: refused, or accepted with a word on what changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.errors import Interrupted, RunError, UserError
from cdpg.evaluation.policy_evaluations import PolicyEvaluations
from cdpg.messages.terms import on_command_line
from cdpg.models.tabular import TabularModel
from cdpg.rollout.sampler import Sampler
from cdpg.storage import provenance, schedule
from cdpg.storage.jsonl import read_jsonl
from cdpg.training.optimization import Batch, Updater
from enumeration import contexts_of, tabular

CONTEXTS = [{"prompt": str(context.prompt)} for context in contexts_of(3)]


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return ["a" in completion for completion in completions]


def odd(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [len(completion) % 2 == 1 for completion in completions]


def make(
    folder: Path, data: Any = CONTEXTS, model: int = 4, constraint: Any = has_a, held_out: Any = None, **changes: Any
) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 4, "contexts_per_epoch": 3, "num_generations": 8, "max_completion_length": 3, "learning_rate": 0.05,
        "save_every": 2, "device": "cpu", "warmup_epochs": 0, "check_workers": 0,
    }  # fmt: skip
    config = CDPGConfig(output_dir=str(folder), **(values | changes))
    return CDPGTrainer(tabular(model), constraint, config, train_dataset=data, eval_dataset=held_out)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make(tmp_path / "run").train()
    return tmp_path / "run"


def epochs(folder: Path) -> list[int]:
    return [record["epoch"] for record in read_jsonl(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"learning_rate": 0.1}, "learning_rate was 0.05 and is 0.1"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"method": "dpg"}, "method was 'cdpg' and is 'dpg'"),
        ({"model": 5}, "the base changed"),
        ({"constraint": odd}, "the constraints changed"),
        ({"data": CONTEXTS[:2]}, "the contexts changed"),
        ({"data": CONTEXTS[::-1]}, "the contexts changed"),
        ({"data": [{**row, "note": 1} for row in CONTEXTS]}, "the contexts changed"),
    ],
)
def test_what_would_make_it_another_run_is_refused_and_named(run: Path, change: dict[str, Any], told: str) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(UserError, match=told):
        make(run, epochs=6, **change).train(resume_from_checkpoint=True)
    assert before == {path: path.read_bytes() for path in before}


def test_a_tokenizer_that_makes_other_prompts_of_the_same_texts_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = TabularModel.encode
    monkeypatch.setattr(TabularModel, "encode", lambda *given: encode(*given)[::-1])
    then, now = (hashlib.sha256(text).hexdigest() for text in (b"[(0,), (1,), (2,)]", b"[(2,), (1,), (0,)]"))
    told = f"the result would be different: the tokens changed from '{then}' to '{now}'. Give what"
    with pytest.raises(UserError, match=re.escape(told)):
        make(run, epochs=6).train(resume_from_checkpoint=True)


class EndsAtOnce:
    """A rule that leaves nothing of any text."""

    watch: frozenset[str] = frozenset()

    def cut(self, completion: str) -> str:
        return ""


def test_another_stop_rule_is_refused(run: Path) -> None:
    config = make(run, epochs=6).args
    made = CDPGTrainer(tabular(4), has_a, config, train_dataset=CONTEXTS, stop=EndsAtOnce())
    told = "the result would be different: the stop changed from None to 'EndsAtOnce'. Give what"
    with pytest.raises(UserError, match=re.escape(told)):
        made.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("change", [{"tokens_per_pass": 7}, {"rows_per_pass": 5}])
def test_what_memory_may_call_for_is_accepted_aloud(
    run: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make(run, epochs=6, **change).train(resume_from_checkpoint=True)
    ((name, value),) = change.items()
    told = capsys.readouterr().err
    assert "the last bits of the result may differ" in told
    assert f"{name} was {getattr(CDPGConfig(), name)} and is {value}" in told
    assert epochs(run) == [1, 2, 3, 4, 5, 6]


def test_another_number_of_threads_is_accepted_aloud(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        make(run, epochs=6).train(resume_from_checkpoint=True)
    finally:
        torch.set_num_threads(threads)
    assert f"the number of threads was {threads} and is {threads + 1}" in capsys.readouterr().err
    assert epochs(run) == [1, 2, 3, 4, 5, 6]


def test_other_versions_are_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = provenance.origin
    monkeypatch.setattr(
        provenance, "origin", lambda **given: (o := original(**given)) | {"versions": o["versions"] | {"torch": "0.0"}}
    )
    make(run, epochs=5).train(resume_from_checkpoint=True)
    assert "and is 0.0" in capsys.readouterr().err


def test_nothing_changed_and_nothing_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    make(run, epochs=6).train(resume_from_checkpoint=True)
    assert "last bits" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"held_out": CONTEXTS[:2]}, "not comparable with those before: there were 3 held-out contexts"),
        ({"evaluation_samples": 3}, "not comparable with those before: evaluation_samples was"),
        ({"check_seconds": 20.0}, "may be judged differently than before: check_seconds was 10.0 and is 20.0"),
    ],
)
def test_what_lets_lines_mean_different_things_is_reported(
    tmp_path: Path, change: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, held_out=CONTEXTS).train()
    make(tmp_path, epochs=5, **({"held_out": CONTEXTS} | change)).train(resume_from_checkpoint=True)
    assert told in capsys.readouterr().err


def test_a_finished_run_with_the_default_warmup_can_be_made_longer(tmp_path: Path) -> None:
    """Its warm-up stays: a tenth of the epochs it was made with, not of those it has now."""
    make(tmp_path, epochs=20, warmup_epochs=None, save_every=100).train()
    make(tmp_path, epochs=40, warmup_epochs=None, save_every=100).train(resume_from_checkpoint=True)
    make(tmp_path, epochs=41, warmup_epochs=None, save_every=100).train(resume_from_checkpoint=True)
    rates = [line["learning_rate"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert rates == [0.025] + [0.05] * 40
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["warmup_epochs"] == 2


def test_a_run_that_is_made_longer_is_the_long_run_and_is_evaluated_as_often_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"save_every": 100, "held_out": CONTEXTS, "evaluation_samples": 2}
    make(tmp_path / "parts", epochs=20, warmup_epochs=None, **options).train()
    capsys.readouterr()
    longer = make(tmp_path / "parts", epochs=30, warmup_epochs=None, **options)
    longer.train(resume_from_checkpoint=True)
    kept = "the run goes on with warmup_epochs=2 and evaluate_every=2, which it has had so far (20 epochs)"
    assert f"{kept}; evaluate_every may be set to another value" in " ".join(capsys.readouterr().err.split())
    assert (longer.args.warmup_epochs, longer.args.evaluate_every) == (2, 2)
    make(tmp_path / "whole", epochs=30, warmup_epochs=2, evaluate_every=2, **options).train()
    ends = [tmp_path / name / "checkpoints" / "epoch-000030" for name in ("parts", "whole")]
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()
    lines = [list(read_jsonl(tmp_path / name / "evaluations.jsonl")) for name in ("parts", "whole")]
    assert [line["epoch"] for line in lines[0]] == list(range(0, 31, 2))
    assert [line["metrics"] for line in lines[0]] == [line["metrics"] for line in lines[1]]


def test_what_a_longer_run_keeps_is_said_and_no_more() -> None:
    """The interval of evaluations may be changed, which is said where it was kept."""
    then, asked = CDPGConfig(epochs=20, evaluate_every=2), CDPGConfig(epochs=40, evaluate_every=2)
    config = schedule.continued(asked, then, 20)
    kept = "the run goes on with warmup_epochs=2, which it has had so far (20 epochs)"
    assert schedule.kept_defaults(asked, config, then) == [kept]
    assert schedule.kept_defaults(config, config, then) == []


def test_on_the_command_line_the_cure_for_a_rate_that_fell_is_to_remove_checkpoints(tmp_path: Path) -> None:
    make(tmp_path, decay_epochs=2).train()
    late = str(tmp_path / "checkpoints" / "epoch-000004")
    cure = f"remove {late!r} to continue from epoch 2"
    with on_command_line(), pytest.raises(UserError, match=re.escape(cure)):
        make(tmp_path, epochs=6, decay_epochs=2).train(resume_from_checkpoint=True)
    shutil.rmtree(late)
    make(tmp_path, epochs=6, decay_epochs=2).train(resume_from_checkpoint=True)
    assert epochs(tmp_path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("first", "then", "cure"),
    [
        ({}, {"warmup_epochs": 3}, r": set warmup_epochs=0, or leave it out\."),
        (
            {"decay_epochs": 2, "save_every": 2},
            {},
            r"the learning rate of epoch 3 was .* begun to fall towards the end at epoch 4: keep epochs=4 and "
            r"decay_epochs=2, or continue from epoch 2 with train\(resume_from_checkpoint='.*/epoch-000002'\)\.",
        ),
        (
            {"decay_epochs": 2, "save_every": 4},
            {},
            r"decay_epochs=2, or start the longer run from the beginning in another folder \(no checkpoint from",
        ),
        ({}, {"decay_epochs": 30}, "fall too early: set decay_epochs to at most 26, or epochs to at least 34"),
    ],
)
def test_another_schedule_for_epochs_that_are_done_is_refused_with_advice(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], cure: str
) -> None:
    make(tmp_path, **first).train()
    with pytest.raises(UserError, match=cure):
        make(tmp_path, epochs=30, **(first | then)).train(resume_from_checkpoint=True)


def test_adapters_that_were_asked_for_otherwise_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def train(alpha: int, epochs: int, resume: bool) -> None:
        config = CDPGConfig(
            output_dir=str(tmp_path), epochs=epochs, contexts_per_epoch=1, num_generations=2, max_completion_length=3,
            device="cpu", warmup_epochs=0,
        )  # fmt: skip
        adapters = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"])
        CDPGTrainer(
            tiny.make_model("llama"), odd, config, ["two dogs"], processing_class=tiny.tokenizer_for("llama"),
            peft_config=adapters,
        ).train(resume_from_checkpoint=resume)  # fmt: skip

    train(4, 1, resume=False)
    with pytest.raises(UserError, match="the adapters changed"):
        train(400, 2, resume=True)
    train(4, 2, resume=True)


class Trouble(Exception):
    pass


def trouble_in(monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    """From now on, sampling fails in an epoch of training."""
    draw = Sampler.draw

    def failing(self: Sampler, number: int, *given: Any, **options: Any) -> Any:
        if number == epoch and "stream" not in options:  # an evaluation names its stream
            raise Trouble
        return draw(self, number, *given, **options)

    monkeypatch.setattr(Sampler, "draw", failing)


def test_trouble_with_an_epochs_samples_costs_none_of_those_before(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble_in(monkeypatch, 4)
    with pytest.raises(Trouble):
        make(tmp_path / "other", save_every=100).train()
    assert [path.name for path in (tmp_path / "other" / "checkpoints").iterdir()] == ["epoch-000003"]
    monkeypatch.undo()
    make(tmp_path / "other", save_every=100).train(resume_from_checkpoint=True)
    assert_same_end(run, tmp_path / "other")


def test_trouble_with_an_evaluation_costs_no_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"held_out": CONTEXTS, "evaluate_every": 3, "save_every": 100, "evaluate_at_end": False}
    make(tmp_path / "whole", **options).train()
    along = PolicyEvaluations.after_epoch

    def troubled(self: PolicyEvaluations, epoch: int, check_stop: Any) -> Any:
        if epoch == 3:
            raise Trouble
        return along(self, epoch, check_stop)

    monkeypatch.setattr(PolicyEvaluations, "after_epoch", troubled)
    with pytest.raises(Trouble):
        make(tmp_path / "cut", **options).train()
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["epoch-000003"]
    monkeypatch.undo()
    make(tmp_path / "cut", **options).train(resume_from_checkpoint=True)
    assert_same_end(tmp_path / "whole", tmp_path / "cut")
    lines = [list(read_jsonl(tmp_path / name / "evaluations.jsonl")) for name in ("whole", "cut")]
    assert [line["epoch"] for line in lines[0]] == [0, 3, 4]
    assert [line["metrics"] for line in lines[0]] == [line["metrics"] for line in lines[1]]


def assert_same_end(*folders: Path) -> None:
    """Weights, moments, the method's state and all epochs."""
    ends = [folder / "checkpoints" / "epoch-000004" for folder in folders]
    for name in ("weights.safetensors", "optimizer.safetensors"):
        assert len({(end / name).read_bytes() for end in ends}) == 1
    states = [json.loads((end / "state.json").read_bytes())["objective"] for end in ends]
    assert states == states[:1] * len(ends)
    assert [epochs(folder) for folder in folders] == [[1, 2, 3, 4]] * len(folders)
    assert len({(folder / "samples.jsonl").read_bytes() for folder in folders}) == 1


@pytest.mark.parametrize(
    "method",
    [
        {"method": "cdpg"},
        {"method": "cdpg", "partition": "pooled", "control_variate": True},
        {"method": "dpg"},
        {"method": "ziegler"},
    ],
    ids=["cdpg", "pooled", "dpg", "ziegler"],
)
@pytest.mark.parametrize("gradients", [0, 1])
def test_trouble_with_a_gradient_costs_no_epoch_unless_a_step_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any], gradients: int
) -> None:
    """The method's state is saved as it was before the epoch."""
    options: dict[str, Any] = {**method, "save_every": 100, "batch_size": 12}
    make(tmp_path / "whole", **options).train()
    gradient, done = Updater.gradient, []

    def troubled(self: Updater, batch: Batch) -> Any:
        if batch.rollout.number == 3:
            done.append(batch.rollout.number)
            if len(done) > gradients:
                raise MemoryError
        return gradient(self, batch)

    monkeypatch.setattr(Updater, "gradient", troubled)
    with pytest.raises(RunError, match="out of memory while computing the gradient"):
        make(tmp_path / "cut", **options).train()
    saved = [path.name for path in tmp_path.glob("cut/checkpoints/*")]
    assert saved == ([] if gradients else ["epoch-000002"])
    monkeypatch.undo()
    if saved:
        make(tmp_path / "cut", **options).train(resume_from_checkpoint=True)
        assert_same_end(tmp_path / "whole", tmp_path / "cut")


def test_a_resumed_run_has_no_model_until_its_new_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, held_out=CONTEXTS).train()
    assert (tmp_path / "model").is_dir()
    assert (tmp_path / "evaluation.json").is_file()
    trouble_in(monkeypatch, 6)
    with pytest.raises(Trouble):
        make(tmp_path, held_out=CONTEXTS, epochs=6).train(resume_from_checkpoint=True)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "evaluation.json").exists()


def test_a_model_that_lies_in_the_folder_of_a_new_run_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").touch()
    trouble_in(monkeypatch, 1)
    with pytest.raises(Trouble):
        make(tmp_path).train()
    assert (tmp_path / "model" / "precious").exists()


def test_a_checkpoint_without_what_later_versions_record_is_continued(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = ("adapters", "tokens", "held_out", "tuned_on", "keep", "prune")
    original = provenance.check_resume

    def older(done: int, state: Any, *rest: Any) -> list[str]:
        origin = {key: value for key, value in state["origin"].items() if key not in later}
        return original(done, {**state, "origin": origin}, *rest)

    monkeypatch.setattr(provenance, "check_resume", older)
    make(run, epochs=5).train(resume_from_checkpoint=True)
    assert epochs(run) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("method", "told"),
    [("dpg", []), ("cdpg", ["control_variate was False and is True", "replay was 0 and is 8"])],
)
def test_a_run_of_an_earlier_version_is_compared_in_what_it_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, told: list[str]
) -> None:
    """It has none of the later settings. Those of other methods do not matter, nor do those without effect."""
    make(tmp_path, method=method, epochs=2).train()
    later = ("keep", "prune", "partition", "control_variate", "replay", "tuned_on")
    original = provenance.check_resume

    def older(done: int, state: Any, *rest: Any) -> list[str]:
        parts = {name: {key: v for key, v in state[name].items() if key not in later} for name in ("config", "origin")}
        return original(done, {**state, **parts}, *rest)

    monkeypatch.setattr(provenance, "check_resume", older)
    if told:
        with pytest.raises(UserError) as refused:
            make(tmp_path, method=method, epochs=3).train(resume_from_checkpoint=True)
        assert re.findall(r"\w+ was \w+ and is \w+", str(refused.value)) == told
    as_then = {"control_variate": False, "replay": 0} if told else {}
    make(tmp_path, method=method, epochs=3, **as_then).train(resume_from_checkpoint=True)
    assert epochs(tmp_path) == [1, 2, 3]


def test_settings_are_compared_by_what_they_do(run: Path) -> None:
    """There are no validation contexts and the constraint has no function 'hopeless': either value does the same."""
    make(run, epochs=5, keep="last", prune=False).train(resume_from_checkpoint=True)
    assert epochs(run) == [1, 2, 3, 4, 5]


def test_a_signal_puts_an_evaluation_off_until_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"held_out": CONTEXTS, "evaluate_every": 2, "save_every": 100, "evaluate_at_end": False}
    make(tmp_path / "whole", **options).train()
    along = PolicyEvaluations.after_epoch

    def signalled(self: PolicyEvaluations, epoch: int, check_stop: Any) -> Any:
        if epoch in (0, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        return along(self, epoch, check_stop)

    monkeypatch.setattr(PolicyEvaluations, "after_epoch", signalled)
    with pytest.raises(Interrupted, match="stopped before the first epoch"):
        make(tmp_path / "cut", **options).train()
    assert not (tmp_path / "cut" / "metrics.jsonl").exists()
    monkeypatch.setattr(
        PolicyEvaluations, "after_epoch", lambda *given: along(*given) if given[1] == 0 else signalled(*given)
    )
    with pytest.raises(Interrupted, match="stopped after epoch 2, a checkpoint is written"):
        make(tmp_path / "cut", **options).train()
    monkeypatch.undo()
    make(tmp_path / "cut", **options).train(resume_from_checkpoint=True)
    lines = [
        [{**line, "seconds": 0} for line in read_jsonl(tmp_path / name / "evaluations.jsonl")]
        for name in ("whole", "cut")
    ]
    assert [line["epoch"] for line in lines[0]] == [0, 2, 4]
    assert lines[0] == lines[1]


def test_a_checkpoint_of_another_folder_is_refused_with_what_to_do(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set output_dir to the folder it belongs to; to go on elsewhere, copy"):
        make(tmp_path / "other", epochs=6).train(resume_from_checkpoint=run / "checkpoints" / "epoch-000004")
    shutil.copytree(run, tmp_path / "copy")
    make(tmp_path / "copy", epochs=6).train(resume_from_checkpoint=tmp_path / "copy" / "checkpoints" / "epoch-000004")
    make(run, epochs=6).train(resume_from_checkpoint=True)
    assert epochs(tmp_path / "copy") == epochs(run) == [1, 2, 3, 4, 5, 6]
    ends = [folder / "checkpoints" / "epoch-000006" / "weights.safetensors" for folder in (run, tmp_path / "copy")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_checkpoint_that_is_not_there(run: Path) -> None:
    with pytest.raises(UserError, match="there is no checkpoint"):
        make(run).train(resume_from_checkpoint=run / "checkpoints" / "epoch-000003")


def test_logs_that_were_tampered_with_are_refused(run: Path) -> None:
    with (run / "samples.jsonl").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(RunError, match=r"samples\.jsonl' was changed since the checkpoint"):
        make(run, epochs=6).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (None, "train(resume_from_checkpoint=True)"),
        ("/x/cdpg/__main__.py run 'a b.yaml'", "-m cdpg run 'a b.yaml' --resume"),
        ("/nowhere/bin/cdpg-x run a.yaml --resume", "/nowhere/bin/cdpg-x run a.yaml --resume"),
        ("/bin/sh run", "sh run --resume"),
        ("/bin/sh run --overwrite", "sh run --resume"),
    ],
)
def test_the_command_to_resume(command: str | None, expected: str) -> None:
    assert provenance.how_to_resume(command).endswith(expected)
