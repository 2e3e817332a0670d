"""log q recorded while sampling is the log-probability of what was sampled, for every architecture."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError, RepositoryNotFoundError
from tokenizers import processors
from torch import Tensor
from typer.testing import CliRunner

import tiny
from cdpg import CDPGConfig
from cdpg.cli import app
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.models import causal
from cdpg.models.beams import beam_search
from cdpg.models.codec import Codec
from cdpg.models.devices import choose_device
from cdpg.models.fast import packed_weights
from cdpg.models.head import chosen_log_probs
from cdpg.models.loading import load_model, load_policy_and_base
from cdpg.models.names import locate, require_model
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Samples, assemble, sample_chunks
from cdpg.models.scoring import score_samples
from cdpg.models.transformer import TransformerModel
from rounds import ordinary

PROMPTS = ("a", "two dogs", "the quick brown fox jumps over one lazy dog", "def add(a, b):")
M, LENGTH = 6, 14


def further(*families: str) -> list[Any]:
    """Families that go the same ways as those before them."""
    return [pytest.param(family, marks=pytest.mark.exhaustive) for family in families]


def contexts(prompts: Any = PROMPTS) -> list[Context]:
    return [Context(prompt=prompt, columns={}, row=i + 1) for i, prompt in enumerate(prompts)]


def language_model(family: str, **settings: Any) -> TransformerModel:
    return load_model(tiny.make_model(family), CDPGConfig(device="cpu", **settings), tiny.tokenizer_for(family))


def draw(model: TransformerModel, rows_per_pass: int = 7, prompts: Any = PROMPTS, samples: int = M) -> Samples:
    chosen = contexts(prompts)
    encoded = model.encode(chosen, LENGTH)
    stream = UniformStream(seed=0, stream="test", epoch=1)
    chunks = list(sample_chunks(model, encoded, samples, LENGTH, stream, rows_per_pass))
    return assemble(chosen, encoded, chunks, samples)


@torch.no_grad()
def alone(model: TransformerModel, samples: Samples, context: int, sample: int) -> float:
    """log π by the model's own forward on one sequence, without padding or cache."""
    return float(plain_log_prob(model, samples, context, sample))


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_recorded_rescored_and_lone_log_probs_agree(family: str) -> None:
    module = tiny.make_model(family)
    module.generation_config.eos_token_id = [2, *range(100, 130)]  # so that some sequences end
    model = load_model(module, CDPGConfig(device="cpu"), tiny.tokenizer_for(family))
    samples = draw(model)
    assert samples.ended.any(), "the end token must be among what is scored"
    rescored = score_samples(model, samples, torch.arange(len(PROMPTS) * M), tokens_per_pass=90).sum(dim=2)
    lone = torch.tensor([[alone(model, samples, c, s) for s in range(M)] for c in range(len(PROMPTS))])
    assert (samples.log_q - rescored).abs().max() < 1e-4
    assert (samples.log_q - lone).abs().max() < 1e-4
    entropy = -samples.log_q.sum() / samples.lengths.sum()
    assert 0.3 < entropy < 4.5, "a nearly uniform model could not show a mistake"


@pytest.mark.parametrize("window", [8, 64])
def test_gpt_neo_leaves_a_prompt_s_cache_in_its_place_while_its_local_window_reaches_it(window: int) -> None:
    module = tiny.make_model("gpt_neo")
    config = copy.deepcopy(module.config)
    config.window_size = window
    module = type(module)(config).eval()
    model = load_model(module, CDPGConfig(device="cpu"), tiny.tokenizer_for("gpt_neo"))
    samples = draw(model)
    lone = torch.tensor([[alone(model, samples, c, s) for s in range(M)] for c in range(len(PROMPTS))])
    assert (samples.log_q - lone).abs().max() < 1e-4
    layer = model.start(samples.prompts, torch.arange(len(PROMPTS)), LENGTH).layers[0]  # type: ignore[attr-defined]
    assert (layer.prefix is not None) == (window == 64)
    assert "_attn" not in vars(module.transformer.h[0].attn.attention), "the model's own attention is back in its place"


@pytest.mark.parametrize("family", ["gpt_neo", "llama", "t5", *further("gpt2", "bart")])
def test_the_same_samples_for_any_batch_split(family: str) -> None:
    """Identical in float64; sampling order, padding and neighbours leave no trace."""
    model = language_model(family, dtype="float64")
    reference = draw(model, rows_per_pass=24)
    for rows_per_pass in (1, 5):
        other = draw(model, rows_per_pass)
        assert torch.equal(other.tokens, reference.tokens)
        assert other.texts == reference.texts
        assert torch.allclose(other.log_q, reference.log_q, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", *further("gpt2", "gpt_neo", "qwen3")])
@pytest.mark.parametrize("at_once", [1, 20])
def test_prompts_that_are_run_in_parts_give_the_same_samples(
    monkeypatch: pytest.MonkeyPatch, family: str, at_once: int
) -> None:
    model = language_model(family, dtype="float64")
    whole = draw(model, rows_per_pass=24)
    monkeypatch.setattr(causal, "PREFILLED_AT_ONCE", at_once)
    runs, run = [], model.inner.base_model.forward

    def counting(*given: Any, **named: Any) -> Any:
        runs.append(named["input_ids"].numel())
        return run(*given, **named)

    monkeypatch.setattr(model.inner.base_model, "forward", counting)
    parts = draw(model, rows_per_pass=24)
    assert torch.equal(parts.tokens, whole.tokens)
    assert torch.allclose(parts.log_q, whole.log_q, atol=1e-9)
    assert max(runs) <= max(at_once, 24, max(len(prompt) for prompt in whole.prompts))
    by_itself = 0 if model.has_steps else LENGTH - 1
    assert len(runs) > 1 + by_itself, "a part at a time, then a token at a time unless it has steps of its own"


def test_samples_and_beams_share_the_encoded_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model("t5")
    encoder, runs = model.inner.get_encoder(), list[int]()
    run = encoder.forward

    def counting(*given: Any, **named: Any) -> Any:
        runs.append(named["input_ids"].numel())
        return run(*given, **named)

    def sampled_and_searched() -> tuple[Any, ...]:
        samples = draw(model, rows_per_pass=24)
        return samples.texts, beam_search(model, samples.prompts, LENGTH, 4, rows_per_pass=24)

    monkeypatch.setattr(encoder, "forward", counting)
    expected = sampled_and_searched()
    assert len(runs) == 2
    with model.remembering_prompts():
        assert sampled_and_searched() == expected
    assert len(runs) == 3
    assert sampled_and_searched() == expected
    assert len(runs) == 5, "the weights may have changed"


@pytest.mark.parametrize("family", ordinary(["llama", "t5"], "t5"))
def test_almost_the_same_samples_for_any_batch_split_in_float32(family: str) -> None:
    model = language_model(family)
    one, other = (draw(model, rows, samples=300) for rows in (1200, 173))
    width = min(one.tokens.shape[2], other.tokens.shape[2])
    same = (one.tokens[..., :width] == other.tokens[..., :width]).all(dim=2) & (one.lengths == other.lengths)
    assert (~same).sum() <= 3, "of 1,200, few may part by rounding"


def test_samples_do_not_depend_on_the_model_s_generation_config() -> None:
    model = language_model("llama")
    plain = draw(model)
    generation = model.inner.generation_config
    generation.do_sample, generation.temperature, generation.top_k, generation.top_p = True, 0.1, 1, 0.1
    generation.repetition_penalty, generation.no_repeat_ngram_size, generation.forced_eos_token_id = 5.0, 1, 2
    generation.suppress_tokens, generation.min_new_tokens = [5, 6, 7], 9
    assert torch.equal(draw(model).tokens, plain.tokens)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_dropout_is_off_even_for_a_model_in_training_mode(family: str) -> None:
    module = tiny.make_model(family)
    module.train()
    model = load_model(module, CDPGConfig(device="cpu"), tiny.tokenizer_for(family))
    samples = draw(model)
    assert (score_samples(model, samples, torch.arange(24), 200).sum(dim=2) - samples.log_q).abs().max() < 1e-4


def test_several_end_tokens_end_a_sequence() -> None:
    module = tiny.make_model("llama")
    module.generation_config.eos_token_id = [2, 70, 71, 72, 73]
    model = load_model(module, CDPGConfig(device="cpu"), tiny.tokenizer_for("llama"))
    assert model.end_ids == {2, 70, 71, 72, 73}
    samples = draw(model, samples=40)
    last = samples.tokens.gather(2, samples.lengths[..., None] - 1)[..., 0]
    ends = torch.isin(last, torch.tensor(sorted(model.end_ids)))
    assert torch.equal(ends, samples.ended)
    assert len(set(last[ends].tolist())) > 1


def test_pad_token_that_is_the_end_token_is_scored() -> None:
    """The end token's probability is part of the sequence's, though the tokenizer pads with it."""
    model = language_model("gpt2")
    assert model.codec.tokenizer.pad_token_id == model.codec.tokenizer.eos_token_id == 2
    samples = draw(model, samples=30)
    context, sample = (int(i) for i in samples.ended.nonzero()[0])
    length = int(samples.lengths[context, sample])
    assert samples.tokens[context, sample, length - 1] == 2
    assert samples.token_log_q[context, sample, length - 1] < 0
    assert abs(alone(model, samples, context, sample) - float(samples.log_q[context, sample])) < 1e-4


def test_tokenizer_without_a_pad_token() -> None:
    model = load_model(tiny.make_model("llama"), CDPGConfig(device="cpu"), tiny.make_tokenizer(pad=None))
    samples = draw(model)
    assert (score_samples(model, samples, torch.arange(24), 200).sum(dim=2) - samples.log_q).abs().max() < 1e-4


def test_a_tokenizer_that_closes_every_text_does_not_close_a_causal_prompt() -> None:
    model = load_model(tiny.make_model("llama"), CDPGConfig(device="cpu"), tiny.make_tokenizer(bos=True, eos=True))
    (prompt,) = model.encode(contexts(["two dogs"]), LENGTH)
    assert prompt[0] == tiny.BOS
    assert tiny.EOS not in prompt


def test_an_encoder_gets_its_end_token() -> None:
    (prompt,) = language_model("t5").encode(contexts(["two dogs"]), LENGTH)
    assert prompt[-1] == tiny.EOS


def test_chat_prompts_go_through_the_chat_template() -> None:
    model = language_model("llama")
    chat = [({"role": "user", "content": "two dogs"},)]
    (prompt,) = model.encode(contexts(chat), LENGTH)
    assert model.codec.tokenizer.decode(list(prompt)) == "<user>two dogs\n<assistant>"
    model.codec.tokenizer.chat_template = None
    with pytest.raises(UserError, match="chat template"):
        model.encode(contexts(chat), LENGTH)


def test_prompt_and_completion_read_on() -> None:
    """A completion keeps the space or newline it starts with."""
    model = language_model("llama")
    (prompt,) = model.encode(contexts(["def add(a, b):"]), LENGTH)
    ids = model.codec.tokenizer("\n    return a + b\n", add_special_tokens=False)["input_ids"]
    assert model.decode(prompt, [*ids, tiny.EOS]) == "\n    return a + b\n"


def test_an_empty_prompt_starts_from_the_start_token() -> None:
    model = load_model(tiny.make_model("llama"), CDPGConfig(device="cpu"), tiny.make_tokenizer())
    assert model.encode(contexts([""]), LENGTH) == [(tiny.BOS,)]


@pytest.mark.parametrize(("family", "kept"), [("llama", "start token and end"), ("gpt2", "end"), ("bart", "start")])
def test_a_context_beyond_the_window_is_refused_by_row_or_cut(family: str, kept: str) -> None:
    long = " ".join(f"word{i}" for i in range(200))
    model = language_model(family)
    with pytest.raises(UserError, match=r"row 2 .*tokens.*long_contexts: cut"):
        model.encode(contexts(["short", long]), LENGTH)
    (prompt,) = language_model(family, long_contexts="cut").encode(contexts([long]), LENGTH)
    tokens = language_model(family).codec.tokenizer(long)["input_ids"]
    if kept == "end":
        assert list(prompt) == tokens[-(128 - LENGTH) :]
    elif kept == "start token and end":
        assert list(prompt) == [tiny.BOS, *tokens[-(127 - LENGTH) :]]
    else:
        assert list(prompt) == [*tokens[:127], tiny.EOS]


@pytest.mark.parametrize("window", [1, 2, 3, 12])
def test_cut_prompts_are_as_long_as_the_window_and_end_as_the_tokenizer_ends_them(window: int) -> None:
    """A decoder keeps its start token unless there is room for one token alone; an encoder all that closes a text."""
    tokenizer = tiny.make_tokenizer(bos=True)
    tokens = tokenizer(PROMPTS[2])["input_ids"]
    (prompt,) = Codec(tokenizer, frozenset({tiny.EOS}), window + 4, False, "cut").encode(contexts(PROMPTS[2:3]), 4)
    assert list(prompt) == (tokens[-1:] if window == 1 else [tiny.BOS, *tokens[1 - window :]])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s> <s>", special_tokens=[("<s>", tiny.BOS), ("</s>", tiny.EOS)]
    )
    codec = Codec(tokenizer, frozenset({tiny.EOS}), window, True, "cut")
    kept = tokenizer(PROMPTS[2])["input_ids"][: max(0, window - 2)]
    assert [list(prompt) for prompt in codec.encode(contexts([PROMPTS[2], "</s>" * 20]), 4)] == [
        [*kept, tiny.EOS, tiny.BOS][-window:],
        [*[tiny.EOS] * (window - 1), tiny.BOS],
    ]


def test_a_completion_longer_than_the_window_is_refused() -> None:
    for family in ("llama", "bart"):
        with pytest.raises(UserError, match="max_completion_length is 500"):
            language_model(family).encode(contexts(["a"]), 500)


def test_decoder_prefix_is_conditioned_on_and_not_scored() -> None:
    plain, prefixed = language_model("bart"), language_model("bart", decoder_prefix="two")
    start = tuple(plain.codec.tokenizer("two", add_special_tokens=False)["input_ids"])
    assert prefixed.decoder_prefix == (tiny.EOS, *start)
    samples = draw(prefixed)
    tokens = samples.tokens[1, 0, : int(samples.lengths[1, 0])].tolist()
    ids = torch.tensor([[*prefixed.decoder_prefix, *tokens[:-1]]])
    with torch.no_grad():
        logits = prefixed.inner(input_ids=torch.tensor([samples.prompts[1]]), decoder_input_ids=ids).logits[0]
    scored = logits[len(start) :].log_softmax(dim=-1)[torch.arange(len(tokens)), tokens].sum()
    assert abs(float(scored) - float(samples.log_q[1, 0])) < 1e-4


def test_a_folder_loads_by_path_in_float32(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "bart", "bart")
    model = load_model(str(folder), CDPGConfig(device="cpu"))
    assert next(model.module.parameters()).dtype == torch.float32
    assert torch.equal(draw(model).tokens, draw(language_model("bart")).tokens)


def test_a_half_precision_folder_is_computed_in_float32(tmp_path: Path) -> None:
    tiny.tokenizer_for("llama").save_pretrained(tmp_path)
    tiny.make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert next(load_model(str(tmp_path), CDPGConfig(device="cpu")).module.parameters()).dtype == torch.float32


def test_a_missing_model_is_the_user_s_error() -> None:
    with pytest.raises(UserError, match="cannot load the model 'no/such-model'"):
        load_model("no/such-model", CDPGConfig(device="cpu"))


def test_the_folder_of_a_run_is_answered_with_its_model(tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert locate(str(tmp_path / "run")) == str(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("task: code-pep8\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"run' is the folder of a run: give its model, '.*/run/model'$"):
        locate(str(tmp_path / "run"))
    assert locate(str(tmp_path / "run" / "model")) == str(tmp_path / "run" / "model")


def test_a_device_that_is_none_is_answered_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"device is 'tpu', which cannot be used here .*: give auto, cpu, cuda or mps$"):
        choose_device(CDPGConfig(device="tpu"))


@pytest.mark.parametrize("name", ["./nope", "../nope", "/nope", "~/nope", "nope/", "runs/nope"])
def test_a_misspelt_path_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "runs" / "nape").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url: pytest.fail("the hub is asked"))
    meant = ": did you mean 'runs/nape'?" if name == "runs/nope" else ""
    expected = re.escape(f"there is no folder {name!r}{meant}")
    with pytest.raises(UserError, match=f"^{expected}$"):
        locate(name)
    for command in (["evaluate", name], ["sample", name, "--context", "x"]):
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, UserError) and re.match(expected, str(result.exception))
    for hub_id in ("me/nope", "nope", "code-tiny"):
        locate(hub_id)


def test_the_wait_for_the_hub_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(url: str) -> None:
        assert capsys.readouterr().err in ("asking the hub for me/far-away\n", ""), "before the wait"
        heard.append(url)
        raise OSError("no route")

    heard: list[str] = []
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    for _ in range(2):
        result = CliRunner().invoke(app, ["sample", "me/far-away", "--context", "x"])
        assert "the hub cannot be reached" in str(result.exception)
        assert result.stderr.count("asking the hub for me/far-away") == (len(heard) == 1)


def test_the_hub_is_asked_once_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers: dict[str, Exception] = {
        "me/unreachable": OSError("no route"),
        "me/absent": RepositoryNotFoundError("404", response=MagicMock()),
        "me/busy": HfHubHTTPError("503", response=MagicMock()),
        "me/adapters": RemoteEntryNotFoundError("no config.json", response=MagicMock()),
    }

    def ask(url: str) -> None:
        asked.append(url)
        raise next(answer for name, answer in answers.items() if name in url)

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    with pytest.raises(UserError, match=r"the hub cannot be reached, and its cache does not hold it \(no route\)"):
        load_model("me/unreachable", CDPGConfig(device="cpu"))
    with pytest.raises(UserError, match="the hub has no such model, or you may not read it"):
        load_model("me/absent", CDPGConfig(device="cpu"))
    for left_to_transformers in ("me/busy", "me/adapters"):
        require_model(left_to_transformers)
    assert len(asked) == 4
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: "/cache/" + file)
    require_model("me/cached")
    assert len(asked) == 4


def test_unknown_logits_are_refused() -> None:
    module = tiny.make_model("llama")
    original = module.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    module.forward = doubled  # type: ignore[method-assign]
    with pytest.raises(UserError, match="logits"):
        load_model(module, CDPGConfig(device="cpu"), tiny.tokenizer_for("llama"))


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
def test_gradient_of_log_prob_equals_that_of_a_plain_forward(family: str) -> None:
    """The prompt's shared cache and the encoder's shared output carry the whole gradient."""
    model = language_model(family, dtype="float64")
    samples = draw(model)
    rows = torch.tensor([0, 1, M, 2 * M, 3 * M])
    contexts_used = [0, 1, 2, 3]
    scored = model.score([samples.prompts[i] for i in contexts_used], samples.rows(rows)).log_prob().sum()
    shared = gradient(model, scored)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows.tolist():
        context, sample = divmod(row, M)
        total = total + plain_log_prob(model, samples, context, sample)
    assert float((shared - gradient(model, total)).norm() / shared.norm()) < 1e-6


@pytest.mark.parametrize("family", ["llama", "t5", *further("gpt2", "gpt_neo", "bart")])
def test_the_gradient_is_bit_for_bit_the_same_with_several_threads(family: str) -> None:
    """A prompt's part comes back from rows that several threads work on: in whatever order, were it left to them."""
    model = language_model(family)
    samples = draw(model, rows_per_pass=64, samples=32)
    rows = torch.randperm(len(PROMPTS) * 32, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(len(rows), generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *others = (
            gradient(model, model.score(list(samples.prompts), samples.rows(rows)).log_prob() @ weights)
            for _ in range(4)
        )
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first, other) for other in others)


def gradient(model: TransformerModel, value: Tensor) -> Tensor:
    model.module.zero_grad(set_to_none=True)
    value.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.module.parameters() if p.grad is not None])


def plain_log_prob(model: TransformerModel, samples: Samples, context: int, sample: int) -> Tensor:
    tokens = samples.tokens[context, sample, : int(samples.lengths[context, sample])].tolist()
    prompt, module = list(samples.prompts[context]), model.inner
    if module.config.is_encoder_decoder:
        decoder_ids = torch.tensor([[module.config.decoder_start_token_id, *tokens[:-1]]])
        logits = module(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder_ids, use_cache=False).logits[0]
    else:
        logits = module(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.log_softmax(dim=-1)[torch.arange(len(tokens)), tokens].sum()


def test_large_vocabularies_are_scored_piece_by_piece_with_the_same_gradient() -> None:
    """Seven tokens at a time, the last piece smaller; the logits of a piece are computed again for the gradient."""
    model = language_model("llama", dtype="float64")
    hidden = torch.randn(24, model.head.shape[1], dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(model.vocabulary, (24,))
    sizes: list[int] = []

    def head(states: Tensor) -> Tensor:
        sizes.append(len(states))
        return model.head(states)

    def scores(logits_at_once: int) -> Tensor:
        return chosen_log_probs(head, hidden, tokens, model.vocabulary, logits_at_once)

    weights = torch.randn(24, dtype=torch.float64)
    inputs = (hidden, model.inner.get_output_embeddings().weight)
    whole = scores(24 * model.vocabulary)
    assert torch.allclose(whole, model.head(hidden).log_softmax(dim=1)[torch.arange(24), tokens], rtol=1e-12)
    expected = torch.autograd.grad((weights * whole).sum(), inputs)
    assert sizes == [24]
    pieces = scores(7 * model.vocabulary)
    assert sizes == [24, 7, 7, 7, 3]
    assert torch.allclose(pieces, whole, rtol=1e-12, atol=0)
    found = torch.autograd.grad((weights * pieces).sum(), inputs)
    assert sorted(sizes[5:]) == [3, 7, 7, 7]
    assert all(torch.allclose(mine, other, rtol=1e-12, atol=1e-14) for mine, other in zip(found, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(scores(7 * model.vocabulary), pieces)


def test_bfloat16_that_would_end_the_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe runs in a process of its own; here one that dies the way an illegal instruction does."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(UserError, match="use dtype: float32"):
        language_model("llama", dtype="bfloat16")


def test_the_base_is_a_copy_that_training_leaves_alone() -> None:
    policy, base = load_policy_and_base(tiny.make_model("llama"), CDPGConfig(device="cpu"), tiny.tokenizer_for("llama"))
    samples = draw(policy)
    before = score_samples(base, samples, torch.arange(24), 200)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(1.1)
    assert torch.equal(score_samples(base, samples, torch.arange(24), 200), before)
    assert not torch.allclose(score_samples(policy, samples, torch.arange(24), 200), before, atol=1e-2)
    assert not any(parameter.requires_grad for parameter in base.module.parameters())


@pytest.fixture
def _packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as small as these are packed, too."""
    monkeypatch.setattr(packed_weights, "SMALLEST", 0)


@pytest.mark.usefixtures("_packed")
@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_sampling_leaves_the_layers_as_they_were(family: str) -> None:
    """Packed weights are a copy: it must be gone when the weights change."""
    model = language_model(family)
    draw(model)
    assert not any("forward" in vars(module) for module in model.module.modules())


@pytest.mark.usefixtures("_packed")
def test_biases_and_the_last_bias_count() -> None:
    """Random models start with biases of 0, where a lost one does not show."""
    for family in ("gpt2", "bart", "marian"):
        module = tiny.make_model(family)
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if name.endswith("bias"):
                    tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
        model = load_model(module, CDPGConfig(device="cpu"), tiny.tokenizer_for(family))
        samples = draw(model)
        lone = torch.tensor([[alone(model, samples, c, s) for s in range(M)] for c in range(len(PROMPTS))])
        rescored = score_samples(model, samples, torch.arange(len(PROMPTS) * M), tokens_per_pass=90).sum(dim=2)
        assert (samples.log_q - lone).abs().max() < 1e-4
        assert (rescored - lone).abs().max() < 1e-4
