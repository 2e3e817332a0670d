"""Decoder steps in fewer operations give the model's own states, and texts are those of the tokenizer itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
import pytest
import torch

import tiny
from cdpg import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.models import transformer
from cdpg.models.codec import Codec
from cdpg.models.fast import gpt_neo_steps, steps, t5_steps
from cdpg.models.fast.steps import RowCache, StepDecoding
from cdpg.models.loading import load_model
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Samples, assemble, sample_chunks
from cdpg.models.scoring import score_samples
from cdpg.models.transformer import TransformerModel
from test_fast import CONTEXT, PROMPTS, STEPS, check, fail, language_model, stepped, wide_gpt_neo

STEPPED = {
    "gpt_neo": wide_gpt_neo,
    **{name: partial(language_model, name) for name in ("llama", "qwen2", "qwen3", "t5", "t5_gated_untied")},
}
"""Families whose step is written in fewer operations."""


@pytest.mark.parametrize("family", list(STEPPED))
def test_steps_in_fewer_operations_give_the_model_s_own_states(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several segments of the cache, while rows leave and move; biases and norms are far from what they start as.

    The first segments are full and the last is not.
    """
    monkeypatch.setattr(steps, "LAST", 1)
    monkeypatch.setattr(steps, "SEGMENT", 2)
    monkeypatch.setattr(t5_steps, "BIASES", 2)  # too few for the last steps
    model = STEPPED[family]()
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + ("norm" in name or "ln_" in name))
    with model.sampling(8):
        assert isinstance(model.start(PROMPTS, CONTEXT, STEPS), StepDecoding)
        check(model)
    assert not isinstance(model.start(PROMPTS, CONTEXT, STEPS), StepDecoding), "made for the weights of then"


@pytest.mark.parametrize("family", list(STEPPED))
def test_steps_use_the_weights_of_now(family: str) -> None:
    model = STEPPED[family]()
    with model.sampling(8):
        before = stepped(model)[-1][0]
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(0.9)
    with model.sampling(8):
        assert not torch.allclose(stepped(model)[-1][0], before)
        check(model)


@pytest.mark.parametrize(
    ("family", "module", "name"), [("gpt_neo", gpt_neo_steps, "_gelu"), ("t5", t5_steps, "cross_attention")]
)
def test_steps_that_differ_or_fail_are_not_used(
    family: str, module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = getattr(module, name)
    assert STEPPED[family]().has_steps
    monkeypatch.setattr(module, name, lambda *args: plain(*args) * 1.5)
    assert not STEPPED[family]().has_steps
    monkeypatch.setattr(module, name, fail)
    model = STEPPED[family]()
    assert not model.has_steps
    with model.sampling(8):
        check(model)


@pytest.mark.parametrize("family", list(STEPPED))
def test_changed_layers_have_no_steps(family: str) -> None:
    """A hook, or a layer of another kind as adapters have it, is not bypassed, be it a product, embedding or norm."""
    module = tiny.make_model(family)
    config, tokenizer = CDPGConfig(device="cpu"), tiny.tokenizer_for(family)
    assert load_model(module, config, tokenizer).has_steps
    decoder = list(module.get_decoder().modules())
    norms = [layer for layer in decoder if "Norm" in type(layer).__name__]
    kinds = [[layer for layer in decoder if isinstance(layer, kind)] for kind in (torch.nn.Linear, torch.nn.Embedding)]
    for changed in (norms[0], norms[-1], *(layers[-1] for layers in kinds)):
        hook = changed.register_forward_hook(lambda layer, args, output: output * 1.0)
        assert not load_model(module, config, tokenizer).has_steps
        hook.remove()
        own = type(changed)
        changed.__class__ = type("Other", (own,), {"__module__": "elsewhere"})
        assert not load_model(module, config, tokenizer).has_steps
        changed.__class__ = own
    assert load_model(module, config, tokenizer).has_steps


def test_adapters_of_embeddings_are_sampled_with() -> None:
    """They are the identity at first, so that a step which leaves them out agrees when the model is loaded."""
    module = tiny.make_model("llama")
    module.config.tie_word_embeddings = False
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    adapted = peft.get_peft_model(module, peft.LoraConfig(target_modules=["embed_tokens"], r=4))
    model = load_model(adapted, CDPGConfig(device="cpu"), tiny.tokenizer_for("llama"))
    with torch.no_grad():
        for parameter in (p for name, p in adapted.named_parameters() if "lora" in name):
            parameter.copy_(torch.randn_like(parameter))
    samples = sampled(model, 20)
    scores = score_samples(model, samples, torch.arange(20), 1000).sum(dim=2)
    torch.testing.assert_close(scores, samples.log_q, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", list(STEPPED))
def test_rows_that_wait_take_the_places_of_rows_that_finished(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same samples as in one pass, token for token, though rows at different positions are in one step."""
    model = STEPPED[family]()
    model.end_ids = frozenset(range(0, 300, 6))  # so that rows end at different times
    whole = sampled(model, 20)
    plain, steps_of_8 = transformer.advance_together, list[list[int]]()

    def counted(decodings: Any, tokens: Any) -> None:
        steps_of_8.append([len(part) for part in tokens])
        plain(decodings, tokens)

    monkeypatch.setattr(transformer, "advance_together", counted)
    few = sampled(model, 8)
    assert torch.equal(few.tokens, whole.tokens)
    assert torch.equal(few.lengths, whole.lengths)
    assert len(whole.lengths.unique()) > 4
    torch.testing.assert_close(few.token_log_q, whole.token_log_q, rtol=1e-6, atol=1e-7)
    assert max(map(len, steps_of_8)) > 1, "several batches in one step"
    assert max(map(sum, steps_of_8)) <= 8
    monkeypatch.setattr(StepDecoding, "joins", False)
    steps_alone = len(steps_of_8)
    sampled(model, 8)
    assert steps_alone < len(steps_of_8) - steps_alone, "fewer steps, since none is half empty while rows wait"


def test_batches_that_cannot_be_joined_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and its completion exceed the window, so that the model's own code runs each batch by itself."""
    model = language_model("llama")
    model.config.sliding_window = 4
    plain, alive = type(model).advance, list[int]()

    def counted(self: Any, decodings: Any, tokens: Any) -> None:
        alive.append(len(decodings))
        plain(self, decodings, tokens)

    monkeypatch.setattr(type(model), "advance", counted)
    model.end_ids = frozenset(range(0, 300, 6))
    with model.sampling(8):
        assert not isinstance(model.start(PROMPTS, CONTEXT, 12), StepDecoding)
    sampled(model, 8)
    assert set(alive) == {1}


def test_prompts_without_rows_are_freed() -> None:
    """Those of a few long completions stay, not those of all contexts that began with them."""
    model = STEPPED["llama"]()
    with model.sampling(8), torch.inference_mode():
        decoding = model.start(PROMPTS, CONTEXT, STEPS)
        assert isinstance(decoding, StepDecoding)
        decoding.keep(torch.tensor([0, 1, 3, 4]))
        assert decoding.state.prompts[0].keys.shape[0] == 4, "all have rows"
        decoding.keep(torch.tensor([0, 2]))  # of contexts 2 and 1
        assert {len(tensor) for prompt in decoding.state.prompts for tensor in (prompt.keys, prompt.values)} == {2}
        assert decoding.state.shared.log_mask is not None and len(decoding.state.shared.log_mask) == 2
        own = model.start(PROMPTS, CONTEXT[[0, 3]], STEPS)
        for one in (decoding, own):
            one.advance(torch.tensor([90, 91]))
        torch.testing.assert_close(decoding.hidden, own.hidden)


def sampled(model: TransformerModel, rows_per_pass: int) -> Samples:
    contexts = [Context("", {}, row) for row in range(4)]
    chunks = list(sample_chunks(model, PROMPTS, 5, 12, UniformStream(0, "test", 1), rows_per_pass))
    return assemble(contexts, PROMPTS, chunks, 5)


def test_rows_of_a_segmented_cache_move_with_what_they_hold() -> None:
    cache = RowCache(2, rows=4, heads=1, features=3, like=torch.zeros(1))
    held = torch.arange(2 * 90 * 4 * 2 * 3.0).view(2, 90, 4, 2, 1, 3)  # [layer, position, row, key or value, head, …]
    for position in range(90):
        cache.grow()
        for layer in range(2):
            cache.add(layer, *held[layer, position].unbind(1))
    kept = torch.tensor([0, 3, 2])
    cache.keep(kept)
    assert memory_of(cache) == 2 * 4 * 64 * 3 * 4, "one row is not worth copying"
    check_cache(cache, held, kept)
    cache.keep(torch.tensor([0, 2]))
    assert memory_of(cache) == 2 * 2 * 64 * 3 * 4, "half of the memory is free"
    check_cache(cache, held, kept[[0, 2]])
    cache.keep(torch.tensor([1, 1]))  # as beams do it
    check_cache(cache, held, kept[[2, 2]])


def memory_of(cache: RowCache) -> int:
    """Bytes of the first segment of a layer."""
    return cache.parts(0)[0][0].untyped_storage().nbytes()


def check_cache(cache: RowCache, held: torch.Tensor, kept: torch.Tensor) -> None:
    assert [keys.shape[1] for keys, _ in cache.parts(0)] == [64, 16, 10]
    for layer in range(2):
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*cache.parts(layer), strict=True))
        assert torch.equal(keys, held[layer, :, kept, 0, 0].transpose(0, 1))
        assert torch.equal(values, held[layer, :, kept, 1, 0].transpose(0, 1))


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_texts_are_those_of_the_tokenizer_itself(family: str) -> None:
    """Special tokens and ids beyond the vocabulary are left out; a tokenizer's own way of decoding is respected."""
    tokenizer = tiny.tokenizer_for(family)
    codec = Codec(tokenizer, frozenset({tiny.EOS}), None, family == "t5")
    tokens = (70, 299, tiny.BOS, 120, 300, 45, tiny.EOS)
    known = [token for token in tokens if token < 300]
    expected = tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert codec.decode((50, 60), tokens) == expected
    for name in ("decode", "_decode"):
        shouting = {name: lambda self, *args, **kwargs: expected.upper() + "!"}
        tokenizer.__class__ = type("Shouting", (type(tokenizer),), shouting)
        assert Codec(tokenizer, frozenset(), None, True).decode((50, 60), tokens) == expected.upper() + "!"
        tokenizer.__class__ = type(tokenizer).__mro__[1]
