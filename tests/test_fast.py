"""The fast ways of sampling (prompts stored once a context, packed weights) and the plain ones give the same."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

import tiny
from cdpg import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.models.fast import attention, packed_weights
from cdpg.models.fast.cache import Groups, PrefixLayer, RowLayer, Shared
from cdpg.models.fast.lookup import layer_of
from cdpg.models.loading import load_model
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Samples, assemble, sample_chunks
from cdpg.models.scoring import score_samples
from cdpg.models.transformer import TransformerModel
from rounds import ordinary

PROMPTS = [(40, 41, 42, 43, 44), (50, 51), (60,), (70, 71, 72)]
CONTEXT = torch.tensor([2, 0, 0, 1, 3, 3, 0, 1])
"""Rows in no order, and of uneven number for each prompt."""
STEPS = 4
KEPT = [torch.tensor([0, 7, 2, 3, 5]), torch.tensor([0, 4, 2])]
"""Rows that go on after the first and the second step: some stay, some move to a gap, all of a prompt's may leave."""


def language_model(family: str, **changes: Any) -> TransformerModel:
    module = tiny.make_model(family)
    for name, value in changes.items():
        setattr(module.config, name, value)
    return load_model(module, CDPGConfig(device="cpu", dtype="float64"), tiny.tokenizer_for(family))


def tokens_of(rows: int, step: int) -> Tensor:
    return 80 + 7 * torch.arange(rows) + step


@torch.no_grad()
def stepped(model: TransformerModel) -> list[tuple[Tensor, list[tuple[int, ...]]]]:
    """The states after each step with the sequence that each row holds: its prompt and its tokens."""
    decoding = model.start(PROMPTS, CONTEXT, STEPS)
    sequences = [PROMPTS[i] for i in CONTEXT.tolist()]
    found = [(decoding.hidden.clone(), list(sequences))]
    for step in range(STEPS):
        if 1 <= step <= len(KEPT):
            decoding.keep(KEPT[step - 1])
            sequences = [sequences[i] for i in KEPT[step - 1].tolist()]
        tokens = tokens_of(len(sequences), step)
        decoding.advance(tokens)
        sequences = [(*held, int(token)) for held, token in zip(sequences, tokens, strict=True)]
        found.append((decoding.hidden.clone(), list(sequences)))
    return found


@torch.no_grad()
def alone(model: TransformerModel, sequence: tuple[int, ...], prompt: tuple[int, ...]) -> Tensor:
    """The last state of one sequence by the model's own forward, without padding, cache or neighbours."""
    own = list(sequence[len(prompt) :])
    if not model.inner.config.is_encoder_decoder:
        return model.inner.base_model(input_ids=torch.tensor([sequence]), use_cache=False).last_hidden_state[0, -1]
    encoded = model.inner.get_encoder()(input_ids=torch.tensor([prompt])).last_hidden_state
    ids = torch.tensor([[model.inner.config.decoder_start_token_id, *own]])
    output = model.inner.get_decoder()(input_ids=ids, encoder_hidden_states=encoded, use_cache=False)
    return output.last_hidden_state[0, -1]


def prompt_of(sequence: tuple[int, ...]) -> tuple[int, ...]:
    return next(prompt for prompt in PROMPTS if sequence[: len(prompt)] == prompt)


def check(model: TransformerModel) -> None:
    for hidden, sequences in stepped(model):
        expected = torch.stack([alone(model, sequence, prompt_of(sequence)) for sequence in sequences])
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family != "gpt_neo"])
def test_prompts_are_shared_in_every_family(family: str) -> None:
    """The cache holds each prompt once; steps, rows that leave and rows that move give the model's own states."""
    model = language_model(family)
    with torch.no_grad():
        decoding: Any = model.start(PROMPTS, CONTEXT, STEPS)
    assert decoding.share
    cache = decoding.state.cache
    if model.inner.config.is_encoder_decoder:
        layers = cache.cross_attention_cache.layers
        assert all(isinstance(layer, PrefixLayer) for layer in layers)
    else:
        layers = [layer.prefix for layer in cache.layers]
        assert all(layer.keys.shape[2] == STEPS for layer in cache.layers), "a row stores its own positions alone"
    for layer in layers:
        assert layer.keys.shape[0] == layer.values.shape[0] == len(PROMPTS)
        assert layer.keys.shape[2] == 5, "the longest prompt"
    check(model)


def wide_gpt_neo() -> TransformerModel:
    """A GPT-Neo whose local window reaches back to the prompt."""
    module = tiny.make_model("gpt_neo")
    module.config.window_size = 64
    wide = type(module)(module.config).eval()
    wide.load_state_dict(module.state_dict(), strict=False)
    return load_model(wide, CDPGConfig(device="cpu", dtype="float64"), tiny.tokenizer_for("gpt_neo"))


def test_gpt_neo_shares_within_its_window() -> None:
    model = wide_gpt_neo()
    with torch.no_grad():
        decoding: Any = model.start(PROMPTS, CONTEXT, STEPS)
    assert decoding.share
    assert all(layer.prefix.keys.shape[0] == len(PROMPTS) for layer in decoding.state.cache.layers)
    check(model)


@pytest.fixture
def replace_attention() -> Iterator[Callable[[Any], None]]:
    """Puts another function in the place of the shared attention, for every family."""
    with pytest.MonkeyPatch.context() as patch:

        def replace(function: Any) -> None:
            patch.setattr(attention, "shared_attention", function)  # GPT-Neo looks it up here
            AttentionInterface.register(attention.NAME, function)

        yield replace
    AttentionInterface.register(attention.NAME, attention.shared_attention)


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no such operator")


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_where_sharing_fails_every_row_has_its_prompt(family: str, replace_attention: Any) -> None:
    """The trial at the start finds that the attention fails; the model's own gives the same states."""
    replace_attention(fail)
    model = language_model(family)
    with torch.no_grad():
        decoding: Any = model.start(PROMPTS, CONTEXT, STEPS)
    assert not model.shares_prompts
    assert not decoding.share
    check(model)


@pytest.mark.parametrize("family", ["llama", "t5", "gpt_neo"])
def test_an_attention_that_differs_is_not_shared(family: str, replace_attention: Any) -> None:
    plain = attention.shared_attention
    assert language_model(family).shares_prompts
    replace_attention(lambda *args, **kwargs: (plain(*args, **kwargs)[0] * 1.5, None))
    assert not language_model(family).shares_prompts


def test_scores_with_a_soft_cap_are_refused() -> None:
    """Gemma 2 caps its scores, which the shared attention does not do: the trial at the start then fails."""
    shared = Shared.of(torch.tensor([0, 0]), torch.ones(1, 2, dtype=torch.long))
    layer = RowLayer(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), shared, 2, share=True)
    new = torch.ones(2, 1, 1, 3)
    keys, values = layer.update(new, new)
    output, _ = attention.shared_attention(torch.nn.Linear(1, 1), new, keys, values, None)
    assert output.shape == (2, 1, 1, 3)
    for setting in ("softcap", "s_aux"):
        with pytest.raises(NotImplementedError, match="Linear asks its attention for something"):
            attention.shared_attention(torch.nn.Linear(1, 1), new, keys, values, None, **{setting: 30.0})
    with pytest.raises(NotImplementedError, match="Linear asks"):
        attention.shared_attention(torch.nn.Linear(1, 1), new, keys.clone(), values, None)


def sampled(model: TransformerModel) -> Samples:
    contexts = [Context("a", {}, 1), Context("two dogs", {}, 2), Context("def add(a, b):", {}, 3)]
    prompts = model.encode(contexts, 12)
    return assemble(contexts, prompts, list(sample_chunks(model, prompts, 5, 12, UniformStream(0, "test", 1), 8)), 5)


def tiny_float32(family: str) -> TransformerModel:
    module = tiny.make_model(family)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # they start at 0, where a lost one does not show
    return load_model(module, CDPGConfig(device="cpu"), tiny.tokenizer_for(family))


@pytest.mark.parametrize("smallest", [0, packed_weights.SMALLEST])
@pytest.mark.parametrize("family", ordinary(tiny.FAMILIES, "gpt2", "gpt_neo", "llama", "t5", "bart"))
def test_the_fast_ways_and_the_plain_ones_give_the_same_samples_and_scores(
    family: str, smallest: int, replace_attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "SMALLEST", smallest)
    fast = tiny_float32(family)
    assert fast.has_steps == (family in ("gpt_neo", "llama", "qwen2", "qwen3", "t5", "t5_gated_untied"))
    assert fast.shares_prompts
    assert fast.packs_weights == torch.backends.mkldnn.is_available()
    found = sampled(fast)
    scores = score_samples(fast, found, torch.arange(15), 200)
    replace_attention(fail)
    monkeypatch.setattr(packed_weights, "packed_linear", fail)
    plain = tiny_float32(family)
    assert not plain.shares_prompts
    assert not plain.packs_weights
    assert not plain.has_steps
    expected = sampled(plain)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.token_log_q, expected.token_log_q, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(score_samples(plain, found, torch.arange(15), 200), scores, rtol=0, atol=0)
    torch.testing.assert_close(found.token_log_q, scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [lambda product: product * 1.5, lambda product: product[:1], fail])
def test_a_product_that_differs_is_not_used(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = packed_weights.packed_linear

    def other(*args: Any) -> Any:
        multiply = plain(*args)
        return lambda features: wrong(multiply(features))

    monkeypatch.setattr(packed_weights, "packed_linear", other)
    assert not packed_weights.packing_works()
    monkeypatch.undo()
    assert packed_weights.packing_works() == torch.backends.mkldnn.is_available()


def test_packed_weights_are_used_while_sampling_and_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "SMALLEST", 32 * 96 + 1)
    model = tiny_float32("gpt2")
    plain, made = packed_weights.packed_linear, []
    monkeypatch.setattr(packed_weights, "packed_linear", lambda *args: made.append(args) or plain(*args))
    before = [module for module in model.module.modules() if "forward" in vars(module)]
    with pytest.raises(ZeroDivisionError), model.sampling(4):
        assert len(made) == sum("forward" in vars(module) for module in model.module.modules()) > 0
        assert {args[0].numel() for args in made} == {32 * 128, 32 * 300}, "small weights are left as they are"
        raise ZeroDivisionError
    assert [module for module in model.module.modules() if "forward" in vars(module)] == before == []


def test_keys_are_known_as_long_as_they_are_the_layer_s_last() -> None:
    shared = Shared.of(torch.tensor([0, 0]), torch.ones(1, 2, dtype=torch.long))
    layer = RowLayer(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), shared, 2, share=True)
    assert layer.prefix is not None
    assert layer_of(layer.prefix.keys) is layer.prefix
    first, _ = layer.update(torch.zeros(2, 1, 1, 3), torch.zeros(2, 1, 1, 3))
    assert layer_of(first) is layer
    second, _ = layer.update(torch.zeros(2, 1, 1, 3), torch.zeros(2, 1, 1, 3))
    assert layer_of(second) is layer
    assert layer_of(first) is None
    assert layer_of(second.clone()) is None
    del layer
    gc.collect()
    assert layer_of(second) is None, "the dictionary keeps no layer alive"


@pytest.mark.parametrize(("window", "share"), [(9, True), (8, False)])
def test_a_local_window_must_reach_back_to_the_prompt(window: int, share: bool) -> None:
    """Five positions of the longest prompt and four steps fit into a window of nine."""
    model = language_model("llama")
    model.config.sliding_window = window
    with torch.no_grad():
        decoding: Any = model.start(PROMPTS, CONTEXT, STEPS)
    assert decoding.share == share


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_model_s_own_attention_is_back_in_its_place(family: str) -> None:
    model = language_model(family)
    configs = [module.config for module in model.module.modules() if hasattr(module, "config")]
    before = [config._attn_implementation for config in configs]
    stepped(model)
    assert [config._attn_implementation for config in configs] == before
    assert attention.NAME not in before


def test_rows_are_spread_over_their_contexts_and_collected_again() -> None:
    groups = Groups.of(CONTEXT, 4)
    rows = torch.arange(len(CONTEXT))
    spread = groups.spread(rows)
    assert spread.shape == (4, 3)
    for context in range(4):
        held = rows[context == CONTEXT].tolist()
        assert spread[context, : len(held)].tolist() == held
    assert torch.equal(groups.merge(spread), rows)
    even = Groups.of(torch.tensor([0, 0, 1, 1]), 2)
    assert even.slots is None
    assert even.spread(rows[:4]).tolist() == [[0, 1], [2, 3]]


def test_rows_that_move_take_keys_and_values_along() -> None:
    shared = Shared.of(torch.tensor([0, 1, 0, 1]), torch.ones(2, 2, dtype=torch.long))
    prefix = torch.zeros(2, 1, 2, 3)
    layer = RowLayer(prefix, prefix.clone(), shared, 2, share=True)
    keys = torch.arange(24.0).view(4, 1, 2, 3)
    layer.update(keys, -keys)
    layer.keep(torch.tensor([0, 3]))
    assert torch.equal(layer.keys, keys[[0, 3]])
    assert torch.equal(layer.values, -keys[[0, 3]])
    assert layer.get_seq_length() == 4
