"""While sampling, a prompt's keys and values are stored once a context: in every family, and with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from cdpg import CDPGConfig
from cdpg.models.fast.attention import NAME
from cdpg.models.fast.cache import Groups, PrefixLayer, RowLayer
from cdpg.models.loading import load_model
from cdpg.models.transformer import TransformerModel

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


def test_gpt_neo_shares_within_its_window() -> None:
    module = tiny.make_model("gpt_neo")
    module.config.window_size = 64
    module = type(module)(module.config).eval()
    model = load_model(module, CDPGConfig(device="cpu", dtype="float64"), tiny.tokenizer_for("gpt_neo"))
    with torch.no_grad():
        decoding: Any = model.start(PROMPTS, CONTEXT, STEPS)
    assert decoding.share
    assert all(layer.prefix.keys.shape[0] == len(PROMPTS) for layer in decoding.state.cache.layers)
    check(model)


@pytest.mark.parametrize("family", ["llama", "t5", "gpt2", "bart"])
def test_without_sharing_every_row_has_its_prompt(family: str) -> None:
    model = language_model(family)
    model._shares = False
    with torch.no_grad():
        decoding: Any = model.start(PROMPTS, CONTEXT, STEPS)
    assert not decoding.share
    check(model)


@pytest.mark.parametrize(("window", "share"), [(9, True), (8, False)])
def test_a_local_window_must_reach_back_to_the_prompt(window: int, share: bool) -> None:
    """Five positions of the longest prompt and four steps fit into a window of nine."""
    model = language_model("llama")
    model.config.sliding_window = window
    with torch.no_grad():
        decoding: Any = model.start(PROMPTS, CONTEXT, STEPS)
    assert decoding.share == share


def test_an_attention_that_differs_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    import cdpg.models.fast.attention as attention

    plain = attention._prompt_scores
    monkeypatch.setattr(attention, "_prompt_scores", lambda folded, prefix: plain(folded, prefix) * 1.5)
    assert not language_model("llama")._shares
    monkeypatch.setattr(attention, "_prompt_scores", lambda folded, prefix: 1 / 0)
    assert not language_model("llama")._shares
    monkeypatch.undo()
    assert language_model("llama")._shares


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_model_s_own_attention_is_back_in_its_place(family: str) -> None:
    model = language_model(family)
    configs = model._shared_attention._configs
    before = [config._attn_implementation for config in configs]
    stepped(model)
    assert [config._attn_implementation for config in configs] == before
    assert NAME not in before


def test_rows_are_spread_over_their_contexts_and_collected_again() -> None:
    groups = Groups.of(CONTEXT, 4)
    rows = torch.arange(len(CONTEXT))
    spread = groups.spread(rows)
    assert spread.shape == (4, 3)
    for context in range(4):
        held = rows[context == CONTEXT].tolist()
        assert spread[context, : len(held)].tolist() == held
    assert torch.equal(groups.collect(spread), rows)
    even = Groups.of(torch.tensor([0, 0, 1, 1]), 2)
    assert even.slots is None
    assert even.spread(rows[:4]).tolist() == [[0, 1], [2, 3]]


def test_rows_that_move_take_keys_and_values_along() -> None:
    from cdpg.models.fast.cache import Shared

    shared = Shared.of(torch.tensor([0, 1, 0, 1]), torch.ones(2, 2, dtype=torch.long))
    prefix = torch.zeros(2, 1, 2, 3)
    layer = RowLayer(prefix, prefix.clone(), shared, 2, share=True)
    keys = torch.arange(24.0).view(4, 1, 2, 3)
    layer.update(keys, -keys)
    layer.keep(torch.tensor([0, 3]))
    assert torch.equal(layer.keys, keys[[0, 3]])
    assert torch.equal(layer.values, -keys[[0, 3]])
    assert layer.get_seq_length() == 4
