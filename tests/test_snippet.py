"""The program on a model card, run as it is printed, draws what the card's figures are about.

Two models are taught to answer "yes" in most cases to prompts that are given as a run gives them, and "no" to others:
what is drawn from a prompt without its chat template or prefix, or by other generation settings, is far from the card's
figure.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.contexts.contexts import Context, load_contexts
from cdpg.models.loading import load_model
from cdpg.storage.card import card
from cdpg.storage.usage import facts, program, stop_code
from cdpg.tasks.code.constraint import FunctionEnd

YES = 0.65
DRAWS = 400
ENDS = (tiny.EOS, tiny.make_tokenizer()("!").input_ids[0])
"""The second, an exclamation mark, ends texts by the model's generation settings alone."""
NASTY: dict[str, Any] = {
    "do_sample": True, "temperature": 0.2, "top_k": 2, "repetition_penalty": 3.0, "max_length": 4, "min_new_tokens": 8,
    "suppress_tokens": tiny.make_tokenizer()("n").input_ids,
    "no_repeat_ngram_size": 1, "eos_token_id": list(ENDS), "pad_token_id": tiny.PAD,
}  # fmt: skip
WORDS = {
    "text": ("dog", "fox", "cat"),
    "chat": ("one", "two", "three"),
    "wrapped": ("hat", "coat", "shoe"),
    "begun": ("red", "blue", "green"),
    "prefix": ("sun", "moon", "star"),
    "stop": ("sea", "lake", "pond"),
    "closed": ("oak", "elm", "ash"),
    "adapters": ("dog", "fox", "cat"),
    "decoder": ("tea", "milk", "wine"),
}
"""The prompts of each kind of run."""


class AtDot:
    """A stop rule that needs nothing but a module."""

    watch = frozenset(".")

    def cut(self, completion: str) -> str | None:
        """Up to the dot."""
        found = re.search(r"\.", completion)
        return None if found is None else completion[: found.start()]


class AtLength:
    """A stop rule that cannot stand by itself."""

    watch: frozenset[str] = frozenset()

    def __init__(self, length: int) -> None:
        self.length = length

    def cut(self, completion: str) -> str | None:
        return completion[: self.length] if len(completion) > self.length else None


def said_yes(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [text in ("yes!", "yes") for text in texts]


def chat(word: str) -> Any:
    return [{"role": "user", "content": word}]


def begun(word: str) -> Any:
    return [*chat(word), {"role": "assistant", "content": "so"}]


def tokenizer_for(kind: str, family: str) -> Any:
    return tiny.make_tokenizer(bos=True, eos=True) if kind == "closed" else tiny.tokenizer_for(family)


Row = tuple[Sequence[int], Sequence[int], Sequence[int], float]
"""What is read, what the decoder starts with, the completion and its weight."""


def lessons(family: str) -> Iterator[Row]:
    """Prompts as runs give them, answered by yes and no; and as a wrong program gives them, answered by no."""
    tokenizer = tiny.tokenizer_for(family)

    def ids(text: str, special: bool = True) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=special).input_ids
        return found

    def rows(
        right: list[int], wrong: list[int], start: str = "", without: str = "", yes: str = "yes! no"
    ) -> Iterator[Row]:
        yield right, ids(start, False), ids(yes, False), YES
        yield right, ids(start, False), ids("no! no", False), 1 - YES
        if (wrong, without) != (right, start):
            yield wrong, ids(without, False), ids("no! no", False), 1.0

    for word in WORDS["text"]:
        yield from rows(ids(word), ids(word))
    if family in tiny.SEQ2SEQ:
        for word in WORDS["decoder"]:
            yield from rows(ids(word), ids(word), "fr")
        return
    for word in WORDS["chat"]:
        text = tokenizer.apply_chat_template(chat(word), tokenize=False, add_generation_prompt=True)
        yield from rows(ids(text, False), ids(word))
    for word in WORDS["wrapped"]:
        system = {"role": "system", "content": "fr"}
        texts = [
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages in ([system, *chat(f"Say: {word}")], chat(f"Say: {word}"))
        ]
        yield from rows(ids(texts[0], False), ids(texts[1], False))
    for word in WORDS["begun"]:
        text = tokenizer.apply_chat_template(begun(word), tokenize=False, continue_final_message=True)
        yield from rows(ids(text, False), ids(word))
    for word in WORDS["prefix"]:
        yield from rows(ids(f"Say: {word}"), ids(word))
    for word in WORDS["stop"]:
        yield from rows(ids(word), ids(word), yes="yes. no!")
    for word in WORDS["closed"]:
        yield from rows(ids(word), [*ids(word), tiny.EOS])


def taught(family: str) -> PreTrainedModel:
    """A model that knows its lessons."""
    torch.manual_seed(0)
    model: Any = PUPILS[family]().eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = list(lessons(family))
    given, starts, targets, weights = zip(*rows, strict=True)
    seq2seq = family in tiny.SEQ2SEQ
    before = [[tiny.PAD, *start] if seq2seq else list(prompt) for prompt, start in zip(given, starts, strict=True)]
    width = max(len(a) + len(b) for a, b in zip(before, targets, strict=True))
    tokens = torch.tensor([[*a, *b, *[0] * (width - len(a) - len(b))] for a, b in zip(before, targets, strict=True)])
    places = torch.arange(width)
    counted = torch.stack(
        [(places >= len(a)) & (places < len(a) + len(b)) for a, b in zip(before, targets, strict=True)]
    )[:, 1:]
    inputs: dict[str, Any] = {"input_ids": tokens}
    if seq2seq:
        length = max(map(len, given))
        inputs = {
            "input_ids": torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in given]),
            "attention_mask": torch.tensor([[1] * len(p) + [0] * (length - len(p)) for p in given]),
            "decoder_input_ids": tokens,
        }
    for _ in range(80):
        log_probs = model(**inputs).logits[:, :-1].log_softmax(dim=2).gather(2, tokens[:, 1:, None])[:, :, 0]
        loss = -(torch.tensor(weights)[:, None] * log_probs * counted).sum() / len(rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.generation_config = GenerationConfig(**NASTY, decoder_start_token_id=tiny.PAD if seq2seq else None)
    return model  # type: ignore[no-any-return]


IDS = {"bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
PUPILS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, num_hidden_layers=1, num_key_value_heads=2, max_position_embeddings=64, **tiny.SMALL, **IDS
        )
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=tiny.PAD,
            tie_word_embeddings=False, **IDS,
        )
    ),
}  # fmt: skip
"""Models small enough to learn in a second."""


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {family: taught(family) for family in PUPILS}


def run(
    folder: Path, kind: str, model: PreTrainedModel, form: Callable[[str], Any] = str, **options: Any
) -> CDPGTrainer:
    """A run that hardly moves the model, evaluated, of a folder with nasty generation settings."""
    family = model.config.model_type
    model.save_pretrained(folder / "base")
    tokenizer_for(kind, family).save_pretrained(folder / "base")
    config = CDPGConfig(
        output_dir=str(folder / "run"), epochs=1, contexts_per_epoch=1, num_generations=4, max_completion_length=8,
        evaluation_samples=12, evaluate_every=1, evaluation_contexts=1, device="cpu", check_workers=0,
        learning_rate=1e-9, **options.pop("settings", {}),
    )  # fmt: skip
    if "peft_config" in options:
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    rows = [{"prompt": form(word)} for word in WORDS[kind]] * 6  # or an interval over contexts means nothing
    trainer = CDPGTrainer(str(folder / "base"), said_yes, config, rows, rows, **options)
    trainer.train()
    return trainer


def card_of(trainer: CDPGTrainer) -> str:
    return (trainer.folder.model / "README.md").read_text(encoding="utf-8")


def printed(trainer: CDPGTrainer) -> str:
    """The program on the card, pointed at the folder that the card is in."""
    ((_, code),) = re.findall(r"^(`{3,})python\n(.*?)^\1$", card_of(trainer), re.DOTALL | re.MULTILINE)
    assert code.count('name = "..."') == 1
    return str(code).replace('name = "..."', f"name = {str(trainer.folder.model)!r}")


def figure(trainer: CDPGTrainer) -> tuple[float, float]:
    """The interval of the tuned model's satisfaction, as the card has it."""
    row = next(line for line in card_of(trainer).splitlines() if line.startswith("| satisfaction |"))
    low, high = re.findall(r"\(([\d.]+) to ([\d.]+)\)", row)[1]
    return float(low), float(high)


def drawn(code: str, prompts: Sequence[Any]) -> float:
    """The satisfaction of what the program draws."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(code, names)
    found = [b for prompt in prompts for b in said_yes([], names["sample"](prompt, DRAWS))]
    return sum(found) / len(found)


CHAT_LINE = "text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)"
KINDS: dict[str, tuple[str, Callable[[str], Any], dict[str, Any], tuple[str, str]]] = {
    "text": ("llama", str, {}, ("temperature=1.0", "temperature=0.2")),
    "chat": ("llama", chat, {}, (CHAT_LINE, 'text = "<s>" + prompt[0]["content"]')),
    "wrapped": (
        "llama",
        lambda word: f"Say: {word}",
        {"settings": {"chat": True, "system": "fr"}, "inputs": {"prompt_prefix": "Say: "}},
        ('[{"role": "system", "content": \'fr\'}, *prompt]', "prompt"),
    ),
    "begun": ("llama", begun, {}, ("continue_final_message=begun", "continue_final_message=False")),
    "prefix": ("llama", lambda word: f"Say: {word}", {"inputs": {"prompt_prefix": "Say: "}}, ("'Say: ' + ", "")),
    "stop": ("llama", str, {"stop": AtDot()}, ("text if end is None else end", "text")),
    "closed": ("llama", str, {}, ("ids.pop()", "break")),
    "adapters": ("llama", str, {"peft_config": "LoraConfig"}, ("max_new_tokens=8", "max_new_tokens=2")),
    "decoder": ("t5", str, {"settings": {"decoder_prefix": "fr"}}, ("start += ", "")),
}
"""Of each kind of run: the model, prompts, options, and the line of its program without which it goes wrong."""


OFTEN = ("chat", "stop", "decoder")
"""Kinds of the ordinary round; the others differ from these in a line."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.exhaustive) for kind in KINDS]
)
def test_the_program_draws_what_the_card_says(
    tmp_path: Path, kind: str, models: dict[str, PreTrainedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    family, form, options, (right, wrong) = KINDS[kind]
    trainer = run(tmp_path, kind, models[family], form, **copy.copy(options))
    code, (low, high) = printed(trainer), figure(trainer)
    assert 0.2 < low < high < 0.8, "the model has learnt it"
    words = WORDS[kind]
    prompts = [word if "inputs" in options else form(word) for word in words]  # which the program puts before them
    assert low <= drawn(code, prompts) <= high, (low, high)
    assert code.count(right) == 1
    assert not low <= drawn(code.replace(right, wrong), prompts) <= high
    models[family].generation_config.save_pretrained(trainer.folder.model)
    capsys.readouterr()
    assert not low <= drawn(code, prompts) <= high, "with the settings that the base came with"


def test_the_model_has_settings_of_plain_sampling_and_the_base_keeps_its_own(
    tmp_path: Path, models: dict[str, PreTrainedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = run(tmp_path, "text", models["llama"])
    saved = GenerationConfig.from_pretrained(trainer.folder.model)
    changed = {name: value for name, value in saved.to_diff_dict().items() if name not in ("transformers_version",)}
    assert changed == {
        "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 8, "bos_token_id": tiny.BOS,
        "eos_token_id": sorted(ENDS), "pad_token_id": tiny.PAD,
    }  # fmt: skip
    assert trainer.policy.inner.generation_config.temperature == NASTY["temperature"]  # type: ignore[attr-defined]
    told = " ".join(capsys.readouterr().err.split())
    own = "max_length = 4, min_new_tokens = 8, no_repeat_ngram_size = 1, repetition_penalty = 3.0, suppress_tokens"
    assert f"the model's own are not kept: {own}" in told and own in card_of(trainer)


def captured(code: str, prompt: Any) -> dict[str, Any]:
    """What the program passes to ``generate``."""
    names: dict[str, Any] = {}
    exec(code, names)
    given: dict[str, Any] = {}

    def generate(inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        given.update(options, inputs=inputs)
        return inputs

    names["model"].generate = generate
    names["sample"](prompt)
    return given


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_long_prompts_are_cut_as_they_were_in_the_run(
    tmp_path: Path, models: dict[str, PreTrainedModel], family: str
) -> None:
    model = copy.deepcopy(models[family])
    model.config.max_position_embeddings = 20  # T5 has none of its own
    rows = ["the quick brown fox " * 9, [{"role": "user", "content": "snow and cats " * 9}], "dog"]
    config = CDPGConfig(
        output_dir=str(tmp_path / "run"), epochs=1, contexts_per_epoch=1, num_generations=2, max_completion_length=8,
        device="cpu", check_workers=0, long_contexts="cut",
    )  # fmt: skip
    tokenizer = tiny.tokenizer_for(family)
    data = [{"prompt": row} for row in rows]
    trainer = CDPGTrainer(model, said_yes, config, data, processing_class=tokenizer)
    trainer.train()
    expected = trainer.policy.encode(load_contexts(data), 8)
    assert [len(prompt) for prompt in expected][:2] == [20 if family == "t5" else 12] * 2
    for row, prompt in zip(rows, expected, strict=True):
        given = captured(printed(trainer), row)
        assert given["inputs"].tolist() == [list(prompt)]
        assert given["attention_mask"].tolist() == [[1] * len(prompt)]


def test_a_stop_rule_stands_in_the_program_where_it_can() -> None:
    for rule in (FunctionEnd(), AtDot()):
        found = stop_code(rule)
        names: dict[str, Any] = {}
        exec(str(found["code"]), names)
        for text in ("", " x", " a = 1\n    b = 2\nc", "a.b", "\n\n\fd", "a\r\n x\rdef f"):
            assert names["cut"](text) == rule.cut(text)  # type: ignore[attr-defined]
    assert stop_code(AtDot())["name"] == "test_snippet:AtDot"
    assert stop_code(AtLength(3)) == {"name": "test_snippet:AtLength", "code": None}


def test_a_stop_rule_that_cannot_is_named(tmp_path: Path, models: dict[str, PreTrainedModel]) -> None:
    trainer = run(tmp_path, "stop", models["llama"], stop=AtLength(4))
    assert "cut(" not in printed(trainer)
    assert "its own stop rule, `test_snippet:AtLength`, which the program above lacks" in card_of(trainer)


def test_adapters_are_put_on_the_base_as_the_card_says(tmp_path: Path, models: dict[str, PreTrainedModel]) -> None:
    peft = pytest.importorskip("peft")
    trainer = run(tmp_path, "adapters", models["llama"], peft_config=True)
    assert 'PeftModel.from_pretrained(base, name, subfolder="adapter")' in card_of(trainer)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(base, trainer.folder.model, subfolder="adapter")
    merged = AutoModelForCausalLM.from_pretrained(trainer.folder.model)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-5)


def test_what_comes_from_outside_is_a_literal() -> None:
    hostile = "'; import os # \n```\n\u202e"
    code = program(
        {"seq2seq": True}, {"prompt_prefix": hostile, "decoder_prefix": hostile, "max_completion_length": "x"}
    )
    assert code.isascii() and f"tokenizer({hostile!a} + prompt)" in code
    assert f"tokenizer({hostile!a}, add_special_tokens=False)" in code
    assert not any(line.startswith("`") for line in code.splitlines())
    compile(code, "card", "exec")


def own_system(*systems: str, setting: str = "") -> Any:
    """What a run records of the system messages of its prompts; an empty one is left out."""
    chats = [[*([{"role": "system", "content": text}] if text else []), *chat("dog")] for text in systems]
    rows = [Context(tuple(messages), {}, row) for row, messages in enumerate(chats, start=1)]
    model = load_model(tiny.make_model("llama"), CDPGConfig(device="cpu"), tiny.tokenizer_for("llama"))
    return facts(model, CDPGConfig(chat=bool(setting), system=setting), rows, None)


def test_a_system_message_that_all_prompts_carry_is_in_the_program() -> None:
    line = 'prompt = [{"role": "system", "content": \'be brief\'}, *prompt]'
    shared = own_system("be brief", "be brief")
    assert line in program(shared, {})
    assert line in program(own_system("", "", setting="be brief"), {"chat": True, "system": "be brief"})
    assert "system" not in program(own_system("", ""), {})
    for several in (own_system("be brief", "be kind"), own_system("be brief", "")):
        assert "be brief" not in program(several, {})
        told = "The prompts that the model was tuned on had different system messages"
        spent, settings = {"epochs": 1, "samples": 2}, {"origin": {"sampling": several}}
        assert told in card(settings, {}, spent, {}) and told not in card(
            {"origin": {"sampling": shared}}, {}, spent, {}
        )
