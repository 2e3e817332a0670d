"""What is drawn is distributed as what is recorded, from numbers addressed by what they are for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpg.models.tabular import TabularModel
from cdpg.sampling import assemble, draw_tokens, sample_chunks
from cdpg.uniforms import UniformStream, philox4x32
from enumeration import contexts_of, tabular


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert tuple(philox4x32(np.array([counter], dtype=np.uint64), key)[0].tolist()) == expected


def test_uniforms_depend_on_every_part_of_their_address() -> None:
    slots, samples = np.arange(50), np.zeros(50, dtype=np.int64)
    reference = UniformStream(0, "train", 1).draw(slots, samples, 0)
    assert np.array_equal(reference[7:9], UniformStream(0, "train", 1).draw(slots[7:9], samples[7:9], 0))
    for other in (
        UniformStream(1, "train", 1).draw(slots, samples, 0),
        UniformStream(0, "evaluation", 1).draw(slots, samples, 0),
        UniformStream(0, "train", 2).draw(slots, samples, 0),
        UniformStream(0, "train", 1).draw(slots, samples + 1, 0),
        UniformStream(0, "train", 1).draw(slots, samples, 1),
    ):
        assert not np.isin(other, reference).any()
    many = UniformStream(0, "train", 1).draw(np.arange(200_000), np.zeros(200_000, dtype=np.int64), 3)
    assert 0.0 < many.min() < 1e-4
    assert 1.0 - 1e-4 < many.max() < 1.0
    assert abs(many.mean() - 0.5) < 5 * (1 / 12 / 200_000) ** 0.5


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 1000])
def test_every_token_is_drawn_on_its_own_interval(vocabulary: int) -> None:
    """Inverse transform: the uniform number u draws the token whose interval of the cumulative sum holds u."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    probabilities = logits[0].double().softmax(dim=0)
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), probabilities.cumsum(dim=0)])
    middles = (edges[:-1] + edges[1:]) / 2
    tokens, log_probs = draw_tokens(logits.expand(vocabulary, -1), middles)
    large = probabilities > 1e-5  # in float32 the edges are off by about 1e-7
    assert torch.equal(tokens[large], torch.arange(vocabulary)[large])
    assert torch.allclose(log_probs, probabilities.log()[tokens], atol=1e-5)


def test_a_long_tail_keeps_its_mass() -> None:
    """Half of the mass lies in 50,000 tokens of 1e-5 each: a float32 cumulative sum would lose some of it."""
    vocabulary = 50_001
    logits = torch.full((1, vocabulary), -np.log(1e5).item())
    logits[0, 0] = np.log(0.5).item()
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens, _ = draw_tokens(logits.expand(4000, -1), u)
    assert (tokens == 0).sum() == 2000
    expected = 1 + ((u[2000:] - 0.5) / 1e-5).floor().long()
    assert (tokens[2000:] - expected).abs().max() <= 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([-float("inf"), -200.0, -80.0, 0.0, 3.0]), min_size=1, max_size=600),
    st.sampled_from([2.0**-53, 0.5, 1 - 2.0**-53]),
)
def test_a_token_of_probability_zero_is_never_drawn(values: list[float], u: float) -> None:
    logits = torch.tensor([[*values, 0.0, -float("inf")]])
    tokens, log_probs = draw_tokens(logits, torch.tensor([u], dtype=torch.float64))
    assert torch.exp(logits[0, tokens[0]] - logits.max()) > 0
    assert torch.isfinite(log_probs).all()


def draw_many(model: TabularModel, count: int, max_length: int = 3) -> torch.Tensor:
    contexts = contexts_of(3)
    prompts = model.encode(contexts, max_length)
    chunks = list(sample_chunks(model, prompts, count, max_length, UniformStream(0, "t", 1), 10_000))
    samples = assemble(contexts, prompts, chunks, count)
    outcomes = {outcome: i for i, outcome in enumerate(model.outcomes())}
    index = [
        [outcomes[tuple(samples.tokens[c, s, : samples.lengths[c, s]].tolist())] for s in range(count)]
        for c in range(3)
    ]  # fmt: skip
    log_prob = model.log_prob_table().detach()
    assert torch.allclose(samples.log_q, log_prob.gather(1, torch.tensor(index)), atol=1e-12)
    return torch.stack([torch.bincount(torch.tensor(row), minlength=len(outcomes)) for row in index])


def test_samples_follow_the_model() -> None:
    """A χ² test over all outcomes of three contexts."""
    model, count = tabular(seed=4), 4000
    expected = model.log_prob_table().detach().exp() * count
    observed = draw_many(model, count)
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = expected.numel() - 3
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


class StopsAfterTwoLetters:
    watch: frozenset[str] = frozenset()

    def cut(self, completion: str) -> str | None:
        return completion[:2] if len(completion) >= 2 else None


def test_a_stop_rule_ends_a_sequence_with_the_token_that_triggered_it() -> None:
    model = tabular(seed=4)
    contexts = contexts_of(3)
    prompts = model.encode(contexts, 3)
    chunks = sample_chunks(model, prompts, 50, 3, UniformStream(0, "t", 1), 64, StopsAfterTwoLetters())
    samples = assemble(contexts, prompts, list(chunks), 50)
    assert int(samples.lengths.max()) == 2
    assert samples.ended.all()
    first, second = samples.token_log_q[..., 0], samples.token_log_q[..., 1]
    assert torch.allclose(samples.log_q, first + second)
    assert (second[samples.lengths == 2] < 0).all()
