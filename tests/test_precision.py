"""Reduced and double precision: what is rounded, what must not be, and that log q is re-scored as the base is.

Where a bfloat16 product would end the process, it is emulated: factors and result are rounded to bfloat16, the product
itself is computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import tiny
import uneven
from cdpg import CDPGConfig
from cdpg.constraints.judge import Judge
from cdpg.contexts.contexts import Context
from cdpg.models.base import Decoding, PromptTokens, Rows
from cdpg.models.head import chosen_log_probs
from cdpg.models.loading import load_model
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import assemble, sample_chunks
from cdpg.models.tabular import TabularModel
from cdpg.models.transformer import TransformerModel
from cdpg.rollout.sampler import Sampler, Stopwatch

PROMPT = tuple(range(40, 47))


class Rounded(TorchFunctionMode):
    """Within it, products are those of bfloat16, as under ``torch.autocast``."""

    products = (
        functional.linear, functional.scaled_dot_product_attention, torch.bmm, torch.matmul, torch.addmm,
        torch.Tensor.matmul, torch.Tensor.__matmul__,
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.products:
            return func(*args, **(kwargs or {}))
        rounded = [x.bfloat16().float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        return func(*rounded, **(kwargs or {})).bfloat16()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> TransformerModel:
    """A Llama under emulated bfloat16."""
    monkeypatch.setattr("cdpg.models.loading.check_precision", lambda config, device: None)
    monkeypatch.setattr(torch, "autocast", lambda device, dtype: Rounded())
    config = CDPGConfig(device="cpu", dtype="bfloat16")
    return load_model(tiny.make_model("llama"), config, tiny.tokenizer_for("llama"))


@torch.no_grad()
def own_states(model: TransformerModel) -> Tensor:
    """The model's own last state of the prompt, under the same rounding."""
    with Rounded():
        return model.inner.model(input_ids=torch.tensor([PROMPT]), use_cache=False).last_hidden_state[:, -1]


@torch.no_grad()
def own_logits(model: TransformerModel) -> Tensor:
    with Rounded():
        return model.inner(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -1]


def test_the_emulation_rounds_and_the_weights_stay_in_float32(model: TransformerModel) -> None:
    assert own_logits(model).dtype == torch.bfloat16
    with torch.no_grad():
        exact = model.inner(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    assert 1e-3 < float((own_logits(model) - exact).abs().max()) < 1.0
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}


def test_logits_are_rounded_products_and_all_after_them_is_float32(model: TransformerModel) -> None:
    logits = own_logits(model)
    assert torch.equal(model.logits(own_states(model))[0], logits.float())
    assert model.logits(own_states(model)).dtype == torch.float32
    exact = logits.double().log_softmax(dim=0)
    tokens = torch.arange(model.vocabulary)
    rows = Rows(torch.zeros_like(tokens), tokens[:, None], torch.ones_like(tokens))
    with torch.no_grad():
        scored = model.score([PROMPT], rows).log_probs[:, 0]
    assert scored.dtype == torch.float32
    assert float((scored.double() - exact).abs().max()) < 3e-6
    coarse = logits - logits.logsumexp(dim=0)
    assert float((coarse.double() - exact).abs().max()) > 1e-3, "in bfloat16 it would not be so"


def test_the_first_token_is_drawn_and_recorded_in_float32_from_rounded_logits(model: TransformerModel) -> None:
    exact = own_logits(model).double().log_softmax(dim=0)
    chunks = list(sample_chunks(model, [PROMPT], 200, 1, UniformStream(0, "t", 1), 50))
    samples = assemble([Context(prompt="", columns={}, row=1)], [PROMPT], chunks, 200)
    tokens = samples.tokens[0, :, 0]
    u = torch.from_numpy(UniformStream(0, "t", 1).draw(np.zeros(200, dtype=np.int64), np.arange(200), 0))
    assert torch.equal(tokens, torch.searchsorted(exact.exp().cumsum(dim=0), u, right=True))
    assert float((samples.token_log_q[0, :, 0] - exact[tokens]).abs().max()) < 3e-6


def test_prompts_are_encoded_in_the_precision_of_the_scores(model: TransformerModel) -> None:
    with torch.no_grad():
        started = model.start([PROMPT], torch.zeros(1, dtype=torch.long), 3).hidden
        scored = model.score([PROMPT], Rows(torch.zeros(1).long(), torch.tensor([[5]]), torch.ones(1).long())).hidden
    assert torch.equal(started, own_states(model))
    assert torch.equal(scored[:, 0], own_states(model))


def test_what_is_sampled_in_reduced_precision_is_not_exact(model: TransformerModel) -> None:
    assert not model.exact_sampling
    for dtype in ("float32", "float64"):
        config = CDPGConfig(device="cpu", dtype=dtype)  # type: ignore[arg-type]
        assert load_model(tiny.make_model("llama"), config, tiny.tokenizer_for("llama")).exact_sampling


def test_float64_is_not_rounded() -> None:
    model = load_model(tiny.make_model("gpt2"), CDPGConfig(device="cpu", dtype="float64"), tiny.tokenizer_for("gpt2"))
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float64}
    with torch.no_grad():
        hidden = model.start([PROMPT], torch.zeros(1, dtype=torch.long), 3).hidden
        exact = model.inner(input_ids=torch.tensor([PROMPT])).logits[0, -1]
        tokens = torch.arange(model.vocabulary)
        chosen = chosen_log_probs(model.head, hidden.expand(len(tokens), -1), tokens, model.vocabulary)
        drawn = model.logits(hidden)[0]
    assert torch.allclose(drawn, exact, rtol=1e-12, atol=1e-12)
    assert torch.allclose(chosen, exact.log_softmax(dim=0), rtol=1e-12, atol=1e-12)


class Coarse(TabularModel):
    """A table whose steps see its logits rounded, as those of a transformer in bfloat16 are; its scores do not."""

    exact_sampling = False

    def start(self, prompts: Sequence[PromptTokens], context: Tensor, max_length: int) -> Decoding:
        decoding = super().start(prompts, context, max_length)
        advance = decoding.advance

        def rounded(tokens: Tensor) -> None:
            advance(tokens)
            decoding.hidden = decoding.hidden.bfloat16().double()

        decoding.hidden = decoding.hidden.bfloat16().double()
        decoding.advance = rounded  # type: ignore[method-assign]
        return decoding


class Alone:
    """One process."""

    def share(self, total: int) -> range:
        return range(total)

    def join(self, own: Tensor, share: range, total: int) -> Tensor:
        return own

    def total(self, tensor: Tensor) -> Tensor:
        return tensor


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [0.5 if "a" in completion else 0.0 for completion in completions]


@pytest.mark.parametrize("every_sample", [False, True])
def test_log_q_of_inexact_samples_is_scored_again(every_sample: bool) -> None:
    """By the policy, for every sample, token by token; a table that is exact keeps what it recorded."""
    config = CDPGConfig(num_generations=8, max_completion_length=3, rows_per_pass=7, tokens_per_pass=20)
    contexts = [Context(prompt=prompt, columns={}, row=i + 1) for i, prompt in enumerate(uneven.PROMPTS)]
    prompts: list[PromptTokens] = [(i,) for i in range(5)]
    epochs = []
    for kind in (Coarse, TabularModel):
        policy = kind(uneven.PROMPTS, uneven.LETTERS, 3, seed=6)
        rollout = Sampler(policy, uneven.table(2), Judge(has_a), config, Alone())  # type: ignore[arg-type]
        epoch = rollout.draw(1, contexts, prompts, every_sample, Stopwatch())
        epochs.append(epoch)
        samples = epoch.samples
        for context in range(5):
            for sample in range(8):
                tokens = samples.tokens[context, sample, : int(samples.lengths[context, sample])].tolist()
                exact = uneven.token_log_probs(policy.table, context, tokens)
                assert samples.token_log_q[context, sample, : len(tokens)].tolist() == pytest.approx(exact, rel=1e-12)
                assert float(epoch.log_q[context, sample]) == pytest.approx(sum(exact), rel=1e-12)
                base = sum(uneven.token_log_probs(uneven.table(2).table, context, tokens))
                needed = every_sample or bool(epoch.b[context, sample] > 0)
                assert float(epoch.log_a[context, sample]) == pytest.approx(base if needed else 0.0, rel=1e-12)
    assert not epochs[0].b.all()
    decoding = Coarse(uneven.PROMPTS, uneven.LETTERS, 3, seed=6).start(prompts, torch.arange(5), 3)
    assert not torch.allclose(decoding.hidden, uneven.table(6).table[:, 0], rtol=1e-4), "the steps are rounded"
