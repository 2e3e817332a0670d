"""Plain prompts for chat models: as a user's messages on request, and with a notice otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.cli import app
from cdpg.constraints.judge import Judge
from cdpg.contexts.chats import as_chats, warn_of_plain_prompts, warn_of_prompts
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.messages.terms import on_command_line
from cdpg.storage.jsonl import read_jsonl

USER = {"role": "user", "content": "two dogs"}
SYSTEM = {"role": "system", "content": "Be brief."}
OTHER = {"role": "system", "content": "Be long."}


def seen(prompt: Any, chat: bool, system: str = "") -> Any:
    (context,) = as_chats([Context(prompt, {"k": 1}, 7)], chat, system)
    assert (context.columns, context.row) == ({"k": 1}, 7)
    return context.prompt


def test_texts_become_messages_and_chats_stay() -> None:
    assert seen("two dogs", chat=False) == "two dogs"
    assert seen("two dogs", chat=True) == (USER,)
    assert seen("two dogs", chat=True, system="Be brief.") == (SYSTEM, USER)
    assert seen((USER,), chat=True) == (USER,)
    assert seen((USER,), chat=False, system="Be brief.") == (SYSTEM, USER)
    assert seen((OTHER, USER), chat=True, system="Be brief.") == (OTHER, USER)
    twice = as_chats(as_chats([Context("two dogs", {}, 1)], True, "Be brief."), True, "Be brief.")
    assert twice[0].prompt == (SYSTEM, USER), "what is converted already stays as it is"
    with pytest.raises(UserError, match=r"system is set, and the prompt of row 7 is a plain text.*chat=True too, or"):
        seen("two dogs", chat=False, system="Be brief.")


def test_a_chat_model_that_is_sent_plain_text_is_noticed(notices: list[str]) -> None:
    with_template, without = tiny.tokenizer_for("llama"), tiny.tokenizer_for("llama")
    without.chat_template = None
    plain, chat = Context("two dogs", {}, 1), Context((USER,), {}, 2)
    other = Context("three cats", {}, 3)
    warn_of_plain_prompts(with_template, [plain, other, chat, plain, other])
    notice = notices.pop()
    assert "the 2 prompts are plain text" in notice and "set chat=True in CDPGConfig" in notice
    with on_command_line():
        warn_of_plain_prompts(with_template, [plain])
    assert "add --chat" in notices.pop()
    warn_of_plain_prompts(with_template, [chat])
    warn_of_plain_prompts(without, [plain])
    assert notices == []


def test_an_answer_at_the_end_of_a_prompt_is_noticed(notices: list[str]) -> None:
    tokenizer, answer = tiny.tokenizer_for("llama"), {"role": "assistant", "content": "Two."}
    warn_of_prompts(tokenizer, [Context((USER,), {}, 1), Context((USER, answer, USER), {}, 2)])
    assert notices == []
    warn_of_prompts(tokenizer, [Context((USER,), {}, 1), Context((USER, answer), {}, 2)])
    assert notices == [
        "prompts end with a message of the assistant (the first: row 2), which completions continue: if it is a whole "
        "answer, leave it out of the prompt"
    ]


def test_a_function_that_takes_completions_for_texts_is_reported_what_they_are() -> None:
    def short(prompts: Any, completions: Any) -> list[bool]:
        return [len(text.split()) < 3 for text in completions]

    judge = Judge(short)
    found = judge.collect(judge.submit([Context((USER,), {}, 1)], ["yes"], [[1]]))
    assert "its text is completion[0]['content']" in str(found.failures[0])
    found = judge.collect(judge.submit([Context("two dogs", {}, 1)], ["yes"], [[1]]))
    assert found.failures == {}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny.save(tmp_path / "llama", "llama")
    (tmp_path / "contexts.csv").write_text("prompt\ntwo dogs\nthree cats\n", encoding="utf-8")
    check = "def chatty(prompts, completions):\n    return [len(c[0]['content']) % 2 == 0 for c in completions]\n"
    (tmp_path / "chat_rules.py").write_text(check, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


OWN = ["--model", "llama", "--contexts", "contexts.csv", "--constraint", "chat_rules:chatty"]
SMALL = {
    "max_completion_length": 6, "num_generations": 4, "contexts_per_epoch": 2, "epochs": 1, "evaluation_samples": 2,
    "check_workers": 0, "device": "cpu",
}  # fmt: skip
SMALL_WORDS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]


def invoked(*words: str) -> Any:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_commands_send_chats_and_follow_what_a_run_did(workplace: Path) -> None:
    words = [*OWN, *SMALL_WORDS, "--chat", "--system", "Be brief.", "--output-dir", "out"]
    told = invoked("run", *words, "--no-report").stderr
    assert "chat template" not in told
    record = yaml.safe_load((workplace / "out" / "config.yaml").read_text())
    assert (record["chat"], record["system"]) == (True, "Be brief.")
    assert [SYSTEM, USER] in [sample["prompt"] for sample in read_jsonl(workplace / "out" / "samples.jsonl")]
    # What belongs to the run is written into its folder: it is only that if the prompts are the same.
    before = (workplace / "out" / "evaluation.json").read_text()
    assert "figures: out/evaluation.json" in invoked("evaluate", "out").stdout
    assert json.loads(before)["base"] == json.loads((workplace / "out" / "evaluation.json").read_text())["base"]
    longer = ["--resume", "--set", "epochs=2", "--set", "warmup_epochs=0"]
    invoked("run", *words, "--no-report", *longer)
    refused = CliRunner().invoke(app, ["run", *OWN, *SMALL_WORDS, "--output-dir", "out", *longer])
    assert "chat was True and is False" in str(refused.exception)


def prompt_of_sample(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[str, str]:
    def look(self: Any, contexts: Any, length: int) -> None:
        raise UserError(json.dumps(contexts[0].prompt))

    with monkeypatch.context() as patch:
        patch.setattr("cdpg.models.transformer.TransformerModel.encode", look)
        result = CliRunner().invoke(app, ["sample", *words, "--context", "two dogs"])
    return str(result.exception), result.stderr


def test_samples_are_conditioned_on_chats_on_request(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, told = prompt_of_sample(monkeypatch, "llama")
    assert plain == '"two dogs"'
    assert "the prompt is plain text" in told
    chat, told = prompt_of_sample(monkeypatch, "llama", "--chat", "--system", "Be brief.")
    assert (json.loads(chat), told) == ([SYSTEM, USER], "")
    refused, _ = prompt_of_sample(monkeypatch, "llama", "--system", "Be brief.")
    assert refused.endswith("which has no place for it: add --chat, or put the text into the prompt itself")
    (workplace / "run").mkdir()
    (workplace / "llama").rename(workplace / "run" / "model")
    (workplace / "run" / "config.yaml").write_text("chat: true\nsystem: Be brief.\ndevice: cpu\n")
    assert json.loads(prompt_of_sample(monkeypatch, "run")[0]) == [SYSTEM, USER]
    own = "chat: true\nsystem: ''\ndevice: cpu\norigin: {sampling: {system: Be brief.}}\n"
    (workplace / "run" / "config.yaml").write_text(own)
    assert json.loads(prompt_of_sample(monkeypatch, "run")[0]) == [SYSTEM, USER], "that all of its prompts carried"
    other = [{"role": "system", "content": "Be long."}, USER]
    assert json.loads(prompt_of_sample(monkeypatch, "run", "--system", "Be long.")[0]) == other


def test_the_check_and_the_evaluation_notice_plain_prompts(workplace: Path) -> None:
    (workplace / "chat_rules.py").write_text("def chatty(prompts, completions):\n    return [True] * len(prompts)\n")
    for words in (["check", *OWN], ["evaluate", "llama", "--base", *OWN[1:]]):
        told = invoked(*words, *SMALL_WORDS).stderr
        assert len(re.findall("the model has a chat template, and the 2 prompts are plain text", told)) == 1, told
    assert "chat template" not in invoked("check", *OWN, *SMALL_WORDS, "--chat").stderr


def test_the_trainer_sends_chats_too(tmp_path: Path, notices: list[str]) -> None:
    seen: list[Any] = []

    def look(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        seen.extend(zip(prompts, completions, strict=True))
        return [True] * len(prompts)

    config = CDPGConfig(output_dir=str(tmp_path / "out"), chat=True, **SMALL)
    model, tokenizer = tiny.make_model("llama"), tiny.tokenizer_for("llama")
    trainer = CDPGTrainer(model, look, config, ["two dogs"], ["two dogs"], tokenizer)
    assert not any("plain text" in notice for notice in notices)
    trainer.train()
    assert all(prompt == [USER] and completion[0]["role"] == "assistant" for prompt, completion in seen)
    config = config.replace(chat=False)
    CDPGTrainer(tiny.make_model("llama"), look, config, ["two dogs"], ["two dogs"], tokenizer)
    assert any("the prompt is plain text" in notice for notice in notices)
