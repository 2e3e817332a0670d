"""Whole runs: they get where the method says, survive interruption bit for bit, and do not depend on the split."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import LoggerType
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from transformers.integrations import TensorBoardCallback

import distributed_run
import tiny
import warm
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.errors import RunError, UserError
from cdpg.evaluation.measures import TextMeasure
from cdpg.evaluation.policy_evaluations import PolicyEvaluations
from cdpg.methods import METHODS
from cdpg.models.tabular import TabularModel
from cdpg.storage.jsonl import read_jsonl
from cdpg.system.trackers import TRACKERS
from cdpg.target.target import log_target
from cdpg.tasks.code.constraint import FunctionEnd, compiles, pep8_clean
from enumeration import LETTERS, Universe, contexts_of, tabular

CONTEXTS = [{"prompt": str(context.prompt)} for context in contexts_of(3)]
PROMPTS = [{"prompt": p, "note": str(i)} for i, p in enumerate(["two dogs", "the quick brown fox", "a", "def add(a):"])]


def has_a(prompts: list[str], completions: list[str], **kwargs: Any) -> list[bool]:
    return ["a" in completion for completion in completions]


def even(prompts: list[str], completions: list[str], **kwargs: Any) -> list[bool]:
    return [len(completion) % 2 == 0 for completion in completions]


def settings(folder: Path, **changes: Any) -> CDPGConfig:
    values: dict[str, Any] = {
        "epochs": 4, "contexts_per_epoch": 3, "num_generations": 8, "max_completion_length": 3,
        "learning_rate": 0.05, "save_every": 2, "device": "cpu", "warmup_epochs": 0, "check_workers": 0,
    }  # fmt: skip
    return CDPGConfig(output_dir=str(folder), **(values | changes))


def tabular_trainer(folder: Path, constraint: Any = has_a, seed: int = 4, **changes: Any) -> CDPGTrainer:
    return CDPGTrainer(tabular(seed), constraint, settings(folder, **changes), train_dataset=CONTEXTS)


def exact(trainer: CDPGTrainer) -> tuple[float, float, float]:
    """KL(p_c, π), KL(π, a) and satisfaction of the tuned table, enumerated."""
    universe = Universe.of(trainer.policy, contexts_of(3))
    b = universe.satisfied(lambda prompt, text: "a" in text)
    log_pi, log_a = universe.log_prob(trainer.policy), universe.log_prob(trainer.base)
    log_ideal = log_target(log_a, b).log_softmax(dim=1)
    kl = (log_ideal.exp() * (log_ideal - log_pi).masked_fill(b == 0, 0.0)).sum(dim=1).mean()
    to_base = (log_pi.exp() * (log_pi - log_a)).sum(dim=1).mean()
    return float(kl), float(to_base), float((log_pi.exp() * b).sum(dim=1).mean())


def weights(trainer: CDPGTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_cdpg_converges_to_the_ideal_model(tmp_path: Path) -> None:
    trainer = tabular_trainer(
        tmp_path, epochs=110, num_generations=96, learning_rate=0.2, decay_epochs=70, save_every=1000
    )
    before, _, satisfaction = exact(trainer)
    assert before > 1.0
    assert satisfaction < 0.4
    trainer.train()
    kl, _, satisfaction = exact(trainer)
    assert kl < 0.01
    assert satisfaction > 0.98


def test_reinforce_reaches_satisfaction_at_the_price_of_the_rest(tmp_path: Path) -> None:
    trainer = tabular_trainer(tmp_path, epochs=40, learning_rate=0.25, num_generations=48, method="reinforce")
    trainer.train()
    kl, to_base, satisfaction = exact(trainer)
    assert satisfaction > 0.98
    assert kl > 0.5
    assert to_base > 0.5


def test_ziegler_raises_the_reward_and_stays_near_the_base(tmp_path: Path) -> None:
    changes = {"epochs": 30, "learning_rate": 0.1, "num_generations": 48, "save_every": 1000}
    trainer = tabular_trainer(tmp_path, method="ziegler", **changes)
    _, _, before = exact(trainer)
    trainer.train()
    _, to_base, after = exact(trainer)
    assert after > before + 0.2
    assert to_base < 2.0


@pytest.mark.parametrize("method", ["cdpg", "dpg", "reinforce", "rft", "raft"])
def test_an_epoch_without_a_satisfying_sample_changes_nothing(tmp_path: Path, method: str) -> None:
    """Not a bit of a parameter, nor a moment of the optimiser, after steps that built up some."""
    calls = iter(range(100))

    def first_epoch_only(completions: list[str], prompts: list[str]) -> list[float]:
        return [0.0 if next(calls) >= 24 else 1.0 for _ in completions]

    alone = {"control_variate": False} if method == "cdpg" else {}  # with it, all samples have a gradient
    trainer = tabular_trainer(tmp_path, first_epoch_only, method=method, epochs=2, batch_size=8, **alone)
    seen: list[dict[str, Tensor]] = []
    trainer.add_callback(AtEpochEnd(1, lambda: seen.append(copy.deepcopy(tensors_of(trainer)))))
    trainer.train()
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    batches = 3 * trainer.method.passes
    assert first["steps"] == batches
    assert (second["steps"], second["steps_skipped"]) == (0, batches)
    assert second["loss"] is None
    (before,), after = seen, tensors_of(trainer)
    assert before.keys() == after.keys()
    assert any(name.endswith("exp_avg") for name in after)
    assert all(torch.equal(after[name], before[name]) for name in before)


def tensors_of(trainer: CDPGTrainer) -> dict[str, Tensor]:
    """All that changes in training: the weights, and the moments of the optimiser."""
    named = dict(trainer.model.named_parameters())
    moments = {f"{n}.{key}": value for n, p in named.items() for key, value in trainer.optimizer.state[p].items()}
    return {**{name: parameter.detach() for name, parameter in named.items()}, **moments}


class AtEpochEnd(TrainerCallback):  # type: ignore[misc]
    """Does something at the end of an epoch."""

    def __init__(self, epoch: int, action: Callable[[], Any]) -> None:
        self.epoch, self.action = epoch, action

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step == self.epoch:
            self.action()


def test_the_base_scores_satisfying_samples_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tabular_trainer(tmp_path, epochs=1)
    scored: list[int] = []
    original = TabularModel.score

    def counting(self: TabularModel, prompts: Any, rows: Any) -> Any:
        if self is trainer.base:
            scored.append(len(rows.lengths))
        return original(self, prompts, rows)

    monkeypatch.setattr(TabularModel, "score", counting)
    record = trainer.train()
    assert sum(scored) == round(record["satisfaction"] * 24)
    assert 0 < sum(scored) < 24


@pytest.mark.parametrize(
    ("method", "batch_size"),
    [("cdpg", None), ("cdpg", 7), ("ziegler", 7), pytest.param("ziegler", None, marks=pytest.mark.exhaustive)],
)
def test_tokens_per_pass_does_not_change_the_result(tmp_path: Path, method: str, batch_size: int | None) -> None:
    results = []
    for tokens in (1, 40, 10_000):
        trainer = tabular_trainer(tmp_path / str(tokens), method=method, tokens_per_pass=tokens, batch_size=batch_size)
        trainer.train()
        results.append(weights(trainer))
    for other in results[1:]:
        assert torch.allclose(other, results[0], atol=1e-9)


class KilledAfter3(TrainerCallback):
    """Ends a run that has saved its second epoch and not yet its third."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.epoch == 3:
            raise RuntimeError("killed")


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("tabular", method) for method in METHODS),
        ("t5", "cdpg"),
        *(
            pytest.param(kind, method, marks=pytest.mark.exhaustive)
            for kind in ("llama", "t5")
            for method in METHODS
            if (kind, method) != ("t5", "cdpg")
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, method: str, kind: str) -> None:
    def make(folder: str, *callbacks: TrainerCallback) -> CDPGTrainer:
        changes: dict[str, Any] = {"method": method, "batch_size": 10, "warmup_epochs": 2}
        if kind == "tabular":
            model, constraint, data, tokenizer = tabular(4), has_a, CONTEXTS, None
        else:
            changes |= {"max_completion_length": 6, "learning_rate": 1e-3}
            model, constraint, data, tokenizer = tiny.make_model(kind), even, PROMPTS, tiny.tokenizer_for(kind)
        return CDPGTrainer(
            model, constraint, settings(tmp_path / folder, **changes), train_dataset=data, processing_class=tokenizer,
            callbacks=callbacks,
        )  # fmt: skip

    whole = make("whole")
    whole.train()
    with pytest.raises(RuntimeError, match="killed"):
        make("part", KilledAfter3()).train()
    assert [path.name for path in (tmp_path / "part" / "checkpoints").iterdir()] == ["epoch-000002"]
    resumed = make("part")
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed), weights(whole))
    expected, actual = tensors_of(whole), tensors_of(resumed)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert resumed.method_state == whole.method_state
    assert untimed(tmp_path / "part") == untimed(tmp_path / "whole")
    samples = [(tmp_path / name / "samples.jsonl").read_bytes() for name in ("part", "whole")]
    assert samples[0] == samples[1]


def untimed(folder: Path) -> list[dict[str, Any]]:
    records = read_jsonl(folder / "metrics.jsonl")
    return [{k: v for k, v in record.items() if not k.startswith("seconds")} for record in records]


def test_resuming_under_other_settings_is_refused_with_what_changed(tmp_path: Path) -> None:
    tabular_trainer(tmp_path).train()
    changed = tabular_trainer(tmp_path, learning_rate=0.1, num_generations=16)
    with pytest.raises(UserError, match=r"num_generations was 8 and is 16.*learning_rate was 0.05 and is 0.1"):
        changed.train(resume_from_checkpoint=True)
    (tmp_path / "report.html").write_text("of the earlier end")
    tabular_trainer(tmp_path, epochs=6, keep_checkpoints=1).train(resume_from_checkpoint=True)
    assert len(untimed(tmp_path)) == 6
    assert not (tmp_path / "report.html").exists()


def test_a_function_of_the_package_may_have_moved_since_a_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(compiles, "__module__", "cdpg.earlier.place")
        tabular_trainer(tmp_path, compiles).train()
    tabular_trainer(tmp_path, compiles, epochs=6).train(resume_from_checkpoint=True)
    assert len(untimed(tmp_path)) == 6
    for other in (pep8_clean, has_a):
        with pytest.raises(UserError, match=r"the constraints changed from \['cdpg.*compiles'\] to "):
            tabular_trainer(tmp_path, other, epochs=7).train(resume_from_checkpoint=True)


def test_a_run_is_made_longer_only_while_its_rate_would_have_been_the_same(tmp_path: Path) -> None:
    tabular_trainer(tmp_path, epochs=4, decay_epochs=1, save_every=3).train()
    with pytest.raises(UserError, match=r"rate of epoch 4 was 0.025 and would have been 0.05 with 6 epochs"):
        tabular_trainer(tmp_path, epochs=6, decay_epochs=1).train(resume_from_checkpoint=True)
    earlier = tabular_trainer(tmp_path, epochs=6, decay_epochs=1)
    earlier.train(resume_from_checkpoint=tmp_path / "checkpoints" / "epoch-000003")
    assert [record["learning_rate"] for record in untimed(tmp_path)] == [0.05] * 5 + [0.025]
    shorter = r"^6 epochs are done already; a run cannot be made shorter: give epochs of at least 6, not 3$"
    with pytest.raises(UserError, match=shorter):
        tabular_trainer(tmp_path, epochs=3, decay_epochs=1).train(resume_from_checkpoint=True)


def test_resuming_on_another_base_is_refused_though_its_name_is_the_same(tmp_path: Path) -> None:
    """A model that was tuned in place is no longer the base it was."""
    first = tabular_trainer(tmp_path)
    first.train()
    tuned = CDPGTrainer(first.policy, has_a, settings(tmp_path, epochs=6), train_dataset=CONTEXTS)
    with pytest.raises(UserError, match="the base changed"):
        tuned.train(resume_from_checkpoint=True)


def test_a_trainer_that_has_trained_does_not_start_over(tmp_path: Path) -> None:
    trainer = tabular_trainer(tmp_path)
    trainer.train()
    shutil.rmtree(tmp_path)
    with pytest.raises(UserError, match="make a new one"):
        trainer.train()


def test_adapters_start_the_same_for_the_same_seed(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def make(folder: str, seed: int) -> CDPGTrainer:
        return CDPGTrainer(
            tiny.make_model("llama"),
            even,
            settings(tmp_path / folder, seed=seed),
            train_dataset=PROMPTS,
            processing_class=tiny.tokenizer_for("llama"),
            peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"]),
        )

    torch.manual_seed(1)
    first = weights(make("a", seed=0))
    torch.manual_seed(2)
    assert torch.equal(weights(make("b", seed=0)), first)
    assert not torch.equal(weights(make("c", seed=1)), first)


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="report_to names 'nosuch', which is not a tracker: the trackers are aim, "):
        tabular_trainer(tmp_path, report_to=("nosuch",))


def test_the_trackers_are_those_of_accelerate() -> None:
    assert set(TRACKERS) == {str(tracker) for tracker in LoggerType} - {"all"}


def test_an_older_checkpoint_takes_the_run_back(tmp_path: Path) -> None:
    trainer = tabular_trainer(tmp_path, epochs=6, keep_checkpoints=9)
    trainer.train()
    again = tabular_trainer(tmp_path, epochs=6, keep_checkpoints=9)
    again.train(resume_from_checkpoint=tmp_path / "checkpoints" / "epoch-000002")
    assert torch.equal(weights(again), weights(trainer))
    assert [record["epoch"] for record in untimed(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(tmp_path: Path) -> None:
    tabular_trainer(tmp_path).train()
    for path in tmp_path.glob("checkpoints/epoch-*/state.json"):
        path.write_bytes(b"{}")
    with pytest.raises(RunError, match="no checkpoint"):
        tabular_trainer(tmp_path, epochs=6).train(resume_from_checkpoint=True)
    assert len(untimed(tmp_path)) == 4


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    tabular_trainer(tmp_path).train()
    with pytest.raises(UserError, match=r"continue it with train\(resume_from_checkpoint=True\), replace it with"):
        tabular_trainer(tmp_path).train()


def figures(value: Any, timed: tuple[str, ...] = ("seconds",)) -> Any:
    """What a file says, flat, without times: ``{path: value}``."""
    flat: dict[str, Any] = {}

    def walk(path: str, part: Any) -> None:
        if isinstance(part, (dict, list)):
            for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
                if key not in timed:
                    walk(f"{path}/{key}", inner)
        else:
            flat[path] = part

    walk("", value)
    return flat


def evaluations(folder: Path) -> dict[str, Any]:
    """All that a run's files say of its evaluations, and what its callbacks heard of them."""
    return {
        "along": figures(list(read_jsonl(folder / "evaluations.jsonl"))),
        "end": figures(json.loads((folder / "evaluation.json").read_text())),
        **{path.stem: figures(json.loads(path.read_text())) for path in sorted(folder.glob("heard-*.json"))},
    }


@pytest.mark.parametrize("methods", [("cdpg", "ziegler"), pytest.param(tuple(METHODS), marks=pytest.mark.exhaustive)])
def test_two_processes_do_what_one_does(tmp_path: Path, methods: tuple[str, ...]) -> None:
    """Same samples, global divisors and Z̄, for every method, and the same evaluations of samples and beams.

    The second process often has no satisfying sample, and of a single context the first one has no part.
    """
    (tmp_path / "launch.py").write_text("from accelerate.commands.launch import main\n\nmain()\n", encoding="utf-8")
    launch = [warm.python(), str(tmp_path / "launch.py"), "--multi_gpu", "--num_machines", "1"]
    launch += ["--num_processes", "2", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--num_cpu_threads_per_process", "1", "--main_process_port", "0"]
    script = Path(__file__).parent / "distributed_run.py"
    result = subprocess.run(
        [*launch, str(script), str(tmp_path / "2"), *methods], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for method in methods:
        alone = untimed(tmp_path / "2" / "one-context" / method)
        assert len(alone) == distributed_run.EPOCHS, "a process without a context stops nobody"
        distributed_run.main(tmp_path / "1", method)
        one, two = (json.loads((tmp_path / n / method / "result.json").read_text()) for n in ("1", "2"))
        assert (one["processes"], two["processes"]) == (1, 2)
        assert one["weights"] == pytest.approx(two["weights"], abs=1e-9)
        for single, double in zip(untimed(tmp_path / "1" / method), untimed(tmp_path / "2" / method), strict=True):
            none = {key for key, value in single.items() if value is None}
            assert none == {key for key, value in double.items() if value is None}
            known = [{key: value for key, value in record.items() if key not in none} for record in (single, double)]
            assert known[0] == pytest.approx(known[1], rel=1e-9, nan_ok=True)
        failures = [list(read_jsonl(tmp_path / n / method / "failures.jsonl")) for n in ("1", "2")]
        for record in (*failures[0], *failures[1]):
            del record["constraint"]  # one is a launched script's
        assert failures[0] == failures[1] != [], "an example comes from whichever process has it"
    distributed_run.main(tmp_path / "1" / "one-context", "cdpg", contexts_per_epoch=1)
    for run in (*methods, "one-context/cdpg"):
        single, double = evaluations(tmp_path / "1" / run), evaluations(tmp_path / "2" / run)
        assert double.pop("heard-1") == double["heard-0"], "callbacks of every process hear the same"
        assert {"/0/metrics/share_of_a/mean", "/0/metrics/satisfaction_beam/mean"} <= set(single["along"])
        assert {"/tuned/share_of_a/mean", "/tuned/kl_target_policy_pooled/mean"} <= set(single["end"])
        for part, found in single.items():
            numbers = {path: value for path, value in found.items() if isinstance(value, float)}
            assert {path: double[part].get(path) for path in numbers} == pytest.approx(numbers, rel=1e-9, abs=1e-12)
            assert {path: value for path, value in double[part].items() if path not in numbers} == {
                path: value for path, value in found.items() if path not in numbers
            }, (run, part)


@pytest.mark.parametrize(("kind", "auto"), [("llama", AutoModelForCausalLM), ("t5", AutoModelForSeq2SeqLM)])
def test_the_tuned_model_is_a_plain_hugging_face_folder(tmp_path: Path, kind: str, auto: Any) -> None:
    source = tiny.save(tmp_path / "source", kind)
    config = settings(tmp_path / "run", max_completion_length=6, learning_rate=1e-2, epochs=2)
    trainer = CDPGTrainer(str(source), even, config, train_dataset=PROMPTS)
    trainer.train()
    loaded = auto.from_pretrained(tmp_path / "run" / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model")("two dogs")["input_ids"]
    original = auto.from_pretrained(source)
    tuned = dict(loaded.named_parameters())
    assert all(torch.equal(tuned[name], p) for name, p in trainer.model.named_parameters())
    assert any(not torch.equal(tuned[name], p) for name, p in original.named_parameters())


def test_adapters_are_trained_and_the_base_is_the_model_without_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny.make_model("llama")
    untouched = copy.deepcopy(model)
    trainer = CDPGTrainer(
        model,
        even,
        settings(tmp_path, max_completion_length=6, learning_rate=1e-2, epochs=3),
        train_dataset=PROMPTS,
        processing_class=tiny.tokenizer_for("llama"),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    assert trainer.base is trainer.policy
    ids = torch.arange(8)[None]
    with torch.no_grad(), trainer.base.as_base():
        assert torch.allclose(trainer.model(input_ids=ids).logits, untouched(input_ids=ids).logits, atol=1e-5)
    trainer.train()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, trainer.model(input_ids=ids).logits, atol=1e-4)
    assert (tmp_path / "model" / "adapter" / "adapter_model.safetensors").is_file()


def test_constraints_get_columns_and_multiply(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def notes(prompts: list[str], completions: list[str], note: list[str], **kwargs: Any) -> list[float]:
        seen.update(note=note, prompts=prompts, ids=kwargs["completion_ids"])
        return [0.5] * len(completions)

    trainer = CDPGTrainer(
        tiny.make_model("gpt2"),
        [notes, even],
        settings(tmp_path, max_completion_length=6, epochs=1),
        train_dataset=PROMPTS,
        processing_class=tiny.tokenizer_for("gpt2"),
    )
    record = trainer.train()
    assert 0 < record["satisfaction"] < 0.5
    by_prompt = {row["prompt"]: row["note"] for row in PROMPTS}
    assert seen["note"] == [by_prompt[prompt] for prompt in seen["prompts"]]
    assert all(len(ids) >= 1 for ids in seen["ids"])


def test_metrics_and_samples_have_the_promised_fields(tmp_path: Path) -> None:
    tabular_trainer(tmp_path).train()
    promised = (
        "epoch satisfaction coverage z_mean z_nstd ess loss grad_norm learning_rate tokens seconds "
        "seconds_sampling seconds_constraint seconds_base seconds_gradient"
    )
    records = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [record["epoch"] for record in records] == [1, 2, 3, 4]
    assert all(set(promised.split()) <= set(record) for record in records)
    sample = next(read_jsonl(tmp_path / "samples.jsonl"))
    assert set(sample["completion"]) <= set(LETTERS)
    assert {"epoch", "row", "prompt", "completion", "b", "log_q"} <= set(sample)


def test_log_q_follows_from_the_recorded_token_ids(tmp_path: Path) -> None:
    """In plain Transformers, from the files alone; the texts alone would not do."""
    model, tokenizer = tiny.make_model("llama"), tiny.tokenizer_for("llama")
    ends = list(range(tiny.EOS, 40))  # many, so that some samples end
    model.generation_config.eos_token_id = ends
    untouched = copy.deepcopy(model)
    config = settings(
        tmp_path, epochs=1, max_completion_length=12, log_samples=24, learning_rate=0.0, evaluation_samples=4
    )
    trainer = CDPGTrainer(model, even, config, PROMPTS, PROMPTS, tokenizer)
    trainer.train()

    def log_prob(prompt: str, ids: list[int]) -> float:
        start = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            scores = untouched(input_ids=torch.tensor([start + ids])).logits[0].double().log_softmax(dim=1)
        return sum(float(scores[len(start) + place - 1, token]) for place, token in enumerate(ids))

    samples = list(read_jsonl(tmp_path / "samples.jsonl"))
    assert len(samples) == 24
    for sample in samples:
        assert len(sample["token_ids"]) == sample["tokens"]
        assert (sample["token_ids"][-1] in ends) == sample["ended"]
        assert sample["log_q"] == pytest.approx(log_prob(sample["prompt"], sample["token_ids"]), abs=1e-3)
    assert {sample["ended"] for sample in samples} == {True, False}
    again = [tokenizer(sample["completion"], add_special_tokens=False)["input_ids"] for sample in samples]
    assert any(ids != sample["token_ids"][: len(ids)] for ids, sample in zip(again, samples, strict=True))
    examples = json.loads((tmp_path / "evaluation.json").read_text())["examples"]
    outputs = [output for example in examples for output in example["outputs"]["tuned"]]
    assert len(outputs) == 16
    for output in outputs:
        assert tokenizer.decode(output["token_ids"], skip_special_tokens=True) == output["text"]


def test_trackers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tabular_trainer(tmp_path, report_to=("tensorboard",)).train()
    assert list(tmp_path.rglob("events.out.tfevents*"))
    shutil.rmtree(tmp_path)


def test_two_trainers_share_no_state(tmp_path: Path) -> None:
    """Running one between two epochs of another leaves no trace."""
    alone = tabular_trainer(tmp_path / "alone", method="dpg")
    alone.train()
    first, other = tabular_trainer(tmp_path / "a", method="dpg"), tabular_trainer(tmp_path / "b", method="dpg", seed=9)
    first.add_callback(AtEpochEnd(1, other.train))
    first.train()
    assert not torch.equal(weights(other), weights(first))
    assert torch.equal(weights(first), weights(alone))


def test_settings_may_be_a_dictionary_and_constraints_names(tmp_path: Path) -> None:
    usual = tabular_trainer(tmp_path / "usual")
    usual.train()
    given = settings(tmp_path / "named").to_mapping()
    named = CDPGTrainer(tabular(4), ["cdpg.demo:has_an_a"], given, CONTEXTS)
    named.train()
    assert named.args == settings(tmp_path / "named")
    assert torch.equal(weights(named), weights(usual))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"args": 3}, "args is of type int: pass a CDPGConfig, or a dictionary of its settings"),
        ({"args": {"epoch": 3}}, "unknown setting 'epoch': did you mean 'epochs'?"),
        ({"model": 3}, "model is 3: pass a hub id, a folder"),
        ({"model": None}, "model is None: pass a hub id"),
    ],
)
def test_what_the_trainer_cannot_use_is_reported_in_a_sentence(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model": "code-tiny", "constraints": has_a, "train_dataset": CONTEXTS, **changed}
    with pytest.raises(UserError, match=re.escape(message)):
        CDPGTrainer(**given)


def test_a_column_that_the_constraint_needs_is_missed_before_anything_is_sampled(tmp_path: Path) -> None:
    def needy(prompts: Any, completions: Any, source: Any) -> list[bool]:
        return [True] * len(completions)

    with pytest.raises(UserError, match=r"needy takes 'source'.*they have 'note'"):
        CDPGTrainer("nosuch", needy, settings(tmp_path), PROMPTS)
    whole = [{"prompt": "a", "source": "b"}]
    with pytest.raises(UserError, match="needy takes 'source'"):
        CDPGTrainer("nosuch", needy, settings(tmp_path), whole, PROMPTS)


def test_beams_that_would_not_be_stopped_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TextMeasure measures those of 4 beams"):
        CDPGTrainer("nosuch", has_a, settings(tmp_path), CONTEXTS, stop=FunctionEnd(), measure=TextMeasure(beams=4))


def test_a_run_that_is_done_gives_its_last_epoch(tmp_path: Path) -> None:
    done = tabular_trainer(tmp_path).train()
    again = tabular_trainer(tmp_path).train(resume_from_checkpoint=True)
    assert again["epoch"] == 4
    assert again["satisfaction"] == done["satisfaction"]


def test_callbacks_are_given_what_hugging_face_gives_them(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Looks(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.update(kwargs)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen["logged"] = logs["epoch"], kwargs["model"]

    config = settings(tmp_path, epochs=1, max_completion_length=4)
    model, tokenizer = tiny.make_model("llama"), tiny.tokenizer_for("llama")
    trainer = CDPGTrainer(model, even, config, PROMPTS, processing_class=tokenizer, callbacks=[Looks()])
    trainer.train()
    assert seen["model"] is trainer.model
    assert seen["processing_class"] is tokenizer
    assert seen["optimizer"] is trainer.optimizer
    assert seen["logged"] == (1, trainer.model)


class Stops(TrainerCallback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.epoch == 1


def test_a_run_that_a_callback_has_stopped_continues_when_resumed(tmp_path: Path) -> None:
    trainer = CDPGTrainer(tabular(4), has_a, settings(tmp_path), CONTEXTS, callbacks=[Stops])
    assert trainer.train()["epoch"] == 1
    assert trainer.train(resume_from_checkpoint=True)["epoch"] == 4


def test_stock_callbacks_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    stock = [DefaultFlowCallback, ProgressCallback(), PrinterCallback, TensorBoardCallback]
    model, tokenizer = tiny.make_model("llama"), tiny.tokenizer_for("llama")
    config = settings(tmp_path, max_completion_length=4)
    record = CDPGTrainer(model, even, config, PROMPTS, PROMPTS, tokenizer, callbacks=stock).train()
    assert record["epoch"] == 4
    told = capsys.readouterr()
    assert told.out.count("'satisfaction': ") == 8, "printed by two of them in each epoch"
    assert "4/4" in told.err
    (written,) = tmp_path.rglob("events.out.tfevents*")
    assert b"learning_rate" in written.read_bytes()
    assert b"contexts_per_epoch" in written.read_bytes()


def test_early_stopping_looks_at_held_out_satisfaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([0.2, 0.4, 0.3, 0.5, 0.5, 0.45, 0.9])

    def along(self: PolicyEvaluations, epoch: int, check_stop: Any) -> dict[str, Any]:
        return {"epoch": epoch, "metrics": {"satisfaction": {"mean": next(found)}}}

    monkeypatch.setattr(PolicyEvaluations, "after_epoch", along)
    config = settings(tmp_path, epochs=10, evaluate_every=1, evaluate_at_end=False)
    trainer = CDPGTrainer(tabular(4), has_a, config, CONTEXTS, CONTEXTS, callbacks=[EarlyStoppingCallback(2)])
    assert trainer.train()["epoch"] == 5
    assert (tmp_path / "checkpoints" / "epoch-000005").is_dir()
    with pytest.raises(
        UserError, match="EarlyStoppingCallback looks at evaluations during the run, and there are none"
    ):
        CDPGTrainer(tabular(4), has_a, config, CONTEXTS, callbacks=[EarlyStoppingCallback])


def test_a_callback_that_needs_what_is_not_here_is_refused_by_name(tmp_path: Path) -> None:
    class Needy(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert args.learning_rate == 0.05
            assert getattr(args, "hub_model_id", None) is None
            assert args.deepspeed

    with pytest.raises(UserError, match="the callback Needy reads the argument 'deepspeed'"):
        CDPGTrainer(tabular(4), has_a, settings(tmp_path), CONTEXTS, callbacks=[Needy]).train()


def test_a_tokenizer_that_is_only_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="processing_class is 't5-small': pass a tokenizer"):
        CDPGTrainer(
            tiny.make_model("llama"), lambda prompts, completions: [True] * len(prompts),
            CDPGConfig(output_dir=str(tmp_path)), ["a"], processing_class="t5-small",
        )  # fmt: skip


def test_a_model_that_could_not_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    model = tiny.make_model("llama")
    model.hf_quantizer = types.SimpleNamespace(
        is_serializable=lambda: False, quantization_config=types.SimpleNamespace(quant_method="gguf")
    )
    with pytest.raises(UserError, match=r"quantised \(gguf\), and what is tuned could not be saved"):
        CDPGTrainer(
            model, lambda prompts, completions: [True] * len(prompts), CDPGConfig(output_dir=str(tmp_path)), ["a"],
            processing_class=tiny.tokenizer_for("llama"),
        )  # fmt: skip
