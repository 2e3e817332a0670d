"""The output layer by value: the scales, bias and soft cap of the families, and log-probabilities piece by piece."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cdpg.errors import UserError
from cdpg.models.head import VocabularyHead, chosen_log_probs, rows_at_once

VOCABULARY, FEATURES = 5, 4


class Output(nn.Module):
    """As much of a model as its output layer is read from."""

    def __init__(self, bias: Tensor | None = None, **config: object) -> None:
        super().__init__()
        self.projection = nn.Linear(FEATURES, VOCABULARY, bias=False, dtype=torch.float64)
        text = SimpleNamespace(d_model=FEATURES, **config)
        self.config = SimpleNamespace(get_text_config=lambda decoder: text if decoder else None)
        if bias is not None:
            self.final_logits_bias = bias

    def get_output_embeddings(self) -> nn.Module:
        return self.projection


def hidden(rows: int = 7) -> Tensor:
    return 2 * torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


BIAS = torch.tensor([[0.3, -0.2, 0.5, 0.0, -0.7]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("config", "scale_in", "bias", "scale_out", "cap"),
    [
        ({}, 1.0, 0.0, 1.0, math.inf),
        ({"scale_decoder_outputs": True}, FEATURES**-0.5, 0.0, 1.0, math.inf),
        ({"scale_decoder_outputs": False, "logit_scale": 0.25}, 1.0, 0.0, 0.25, math.inf),
        ({"logits_scaling": 8.0}, 1.0, 0.0, 1 / 8, math.inf),
        ({"logit_scale": 3.0, "logits_scaling": 2.0, "final_logit_softcapping": 1.5}, 1.0, 0.0, 1.5, 1.5),
        ({"logit_scale": None, "logits_scaling": None, "final_logit_softcapping": None}, 1.0, 0.0, 1.0, math.inf),
        ({"bias": BIAS, "logit_scale": 2.0}, 1.0, BIAS.numpy()[0], 2.0, math.inf),
    ],
)
def test_logits_of_every_kind_of_output(
    config: dict[str, object], scale_in: float, bias: object, scale_out: float, cap: float
) -> None:
    """cap · tanh(scale · (W (s h) + bias) / cap)."""
    model = Output(**config)  # type: ignore[arg-type]
    head = VocabularyHead(model)
    assert head.shape == (VOCABULARY, FEATURES)
    weight = model.projection.weight.detach().numpy()
    expected = scale_out * (hidden().numpy() @ weight.T * scale_in + bias)
    if cap < math.inf:
        expected = cap * np.tanh(expected / cap)
    np.testing.assert_allclose(head(hidden()).detach(), expected, rtol=1e-12)


@pytest.mark.parametrize(("offset", "known"), [(0.0, True), (0.8e-3, True), (3e-3, False), (-1.0, False)])
def test_a_family_is_refused_whose_logits_are_others(offset: float, known: bool) -> None:
    model = Output()
    with torch.no_grad():
        model.projection.weight.zero_()
    head, theirs = VocabularyHead(model), torch.full((7, VOCABULARY), offset, dtype=torch.float64)
    if known:
        head.check(hidden(), theirs, "strange")
        return
    with pytest.raises(UserError, match=r"^models of type 'strange' compute their logits in a way .* of another type$"):
        head.check(hidden(), theirs, "strange")


def test_large_logits_may_differ_in_proportion() -> None:
    model = Output()
    head, states = VocabularyHead(model), 1e4 * hidden()
    logits = head(states).detach()
    head.check(states, logits * 1.0005, "strange")
    for other in (logits * 1.002, logits[:, :-1]):
        with pytest.raises(UserError, match="strange"):
            head.check(states, other, "strange")


class Counted:
    """A head that notes how many logits it was asked for at once."""

    def __init__(self, model: Output) -> None:
        self._head, self.sizes = VocabularyHead(model), list[int]()

    def __call__(self, states: Tensor) -> Tensor:
        self.sizes.append(len(states))
        return self._head(states)


@pytest.mark.parametrize(
    ("at_once", "sizes"),
    [(7 * VOCABULARY, [7]), (3 * VOCABULARY + 4, [3, 3, 1]), (2, [1] * 7)],
)
def test_log_probabilities_piece_by_piece(at_once: int, sizes: list[int]) -> None:
    """The same values and gradient however many logits are held; only a backward pass computes pieces again."""
    model, tokens = Output(), torch.tensor([0, 4, 2, 2, 1, 3, 0])
    weight = model.projection.weight.detach().numpy()
    logits = hidden().numpy() @ weight.T
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = np.log(probabilities[np.arange(7), tokens])
    counted, states = Counted(model), hidden().requires_grad_()
    with torch.no_grad():
        found = chosen_log_probs(counted, states, tokens, VOCABULARY, at_once)
    assert counted.sizes == sizes
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    counted.sizes.clear()
    found = chosen_log_probs(counted, states, tokens, VOCABULARY, at_once)
    found.sum().backward()
    again = [] if len(sizes) == 1 else sizes[::-1]
    assert counted.sizes == [*sizes, *again]
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-12)
    chosen = np.eye(VOCABULARY)[tokens]
    np.testing.assert_allclose(states.grad, (chosen - probabilities) @ weight, rtol=1e-9)
    counted.sizes.clear()
    chosen_log_probs(counted, hidden(), tokens, VOCABULARY, at_once)
    assert counted.sizes == sizes, "what needs no gradient is not kept to be computed again"


@pytest.mark.parametrize(("given", "computed"), [(torch.float16, torch.float32), (torch.float64, torch.float64)])
def test_log_probabilities_are_not_computed_in_reduced_precision(given: torch.dtype, computed: torch.dtype) -> None:
    found = chosen_log_probs(lambda states: states.to(given), hidden(), torch.zeros(7, dtype=torch.long), FEATURES)
    assert found.dtype == computed
    expected = hidden().to(given).to(computed).log_softmax(dim=1)[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-5 if computed == torch.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize(("count", "vocabulary"), [(7, 5), (9, 2**16), (3, 2**18 + 1), (1, 3), (0, 3)])
def test_log_probabilities_and_their_gradient_a_few_rows_at_a_time(count: int, vocabulary: int) -> None:
    """Rows that fill the cache several times, the last time in part; some tokens have no probability."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64)
    logits[:, 1] = -math.inf
    tokens, weights = torch.arange(count) * 2 % vocabulary, torch.linspace(0.5, 2.0, count, dtype=torch.float64)
    expected = logits.clone().requires_grad_()
    log_probs = expected.log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]
    (weights * log_probs).sum().backward()
    found = logits.clone().requires_grad_()
    chosen = chosen_log_probs(lambda hidden: found, torch.ones(count, 1), tokens, vocabulary, 2**62)
    with torch.no_grad():
        again = chosen_log_probs(lambda hidden: logits, torch.ones(count, 1), tokens, vocabulary, 2**62)
    assert torch.equal(again, chosen)
    assert not again.requires_grad
    torch.testing.assert_close(chosen, log_probs, rtol=1e-12, atol=1e-12)
    (weights * chosen).sum().backward()
    assert found.grad is not None and expected.grad is not None
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("count", "vocabulary", "device", "rows"),
    [(9, 2**16, "cpu", 4), (9, 2**18 + 1, "cpu", 1), (9, 2**16, "meta", 9), (0, 5, "meta", 1)],
)
def test_how_many_rows_stay_in_the_cache(count: int, vocabulary: int, device: str, rows: int) -> None:
    assert rows_at_once(torch.empty(count, vocabulary, device=device)) == rows


def test_a_long_vocabulary_has_no_bias() -> None:
    """In float32 PyTorch's own log-softmax is too large by 1e-5 on a CPU, for every token."""
    logits = 3 * torch.randn(40, 150_000, generator=torch.Generator().manual_seed(4))
    tokens = torch.arange(40)
    chosen = chosen_log_probs(lambda hidden: logits, torch.ones(40, 1), tokens, 150_000, 2**62)
    exact = logits.double().log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]
    assert abs(float((chosen - exact).mean())) < 3e-7
