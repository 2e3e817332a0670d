"""What is drawn is distributed as what is recorded, from numbers addressed by what they are for."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import uneven
from cdpg.contexts.contexts import Context
from cdpg.errors import RunError
from cdpg.models.drawing import draw_tokens
from cdpg.models.rng import UniformStream, philox4x32
from cdpg.models.sampling import Chunk, Samples, StopRule, assemble, sample_chunks
from cdpg.models.tabular import TabularModel
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
    u = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    tokens, _ = draw_tokens(logits.expand(400, -1), u)
    assert (tokens == 0).sum() == 200
    expected = 1 + ((u[200:] - 0.5) / 1e-5).floor().long()
    assert (tokens[200:] - expected).abs().max() <= 1


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


PROMPTS = [(0, 0, 0), (1,), (2, 2), (3, 3, 3, 3), (4,)]
"""Of different lengths, so that they are sampled in another order than they stand in."""


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 in whole numbers."""
    x, k, low = list(counter), list(key), 2**32 - 1
    for _ in range(10):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(second >> 32) ^ x[1] ^ k[0], second & low, (first >> 32) ^ x[3] ^ k[1], first & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return x


def plain_uniform(seed: int, stream: str, epoch: int, slot: int, sample: int, position: int) -> float:
    """The upper 52 of 64 bits as a number in (0, 1), in the middle of its cell."""
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    key = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4)]
    words = plain_philox([epoch, slot, sample, position], key)
    return ((((words[0] << 32) | words[1]) >> 12) + 0.5) / 2**52


def test_uniforms_known_answers() -> None:
    """By a second implementation, and as numbers: a run must be repeatable on every machine and version."""
    slots, samples = np.array([0, 1, 0, 5, 4_000_000_000]), np.array([0, 0, 1, 3, 7])
    for seed, stream, epoch, position in ((0, "train", 1, 0), (3, "evaluation", 12, 2), (2**63, "train", 1000, 127)):
        drawn = UniformStream(seed, stream, epoch).draw(slots, samples, position)
        pairs = zip(slots.tolist(), samples.tolist(), strict=True)
        assert drawn.tolist() == [plain_uniform(seed, stream, epoch, *pair, position) for pair in pairs]
    assert UniformStream(0, "train", 1).draw(slots[:2], samples[:2], 0).tolist() == [
        0.01895907393549401,
        0.24938819111856458,
    ]
    assert UniformStream(0, "shuffle-0", 1).permutation(8).tolist() == [1, 5, 7, 3, 2, 4, 6, 0]


def test_a_permutation_orders_the_numbers_of_its_places() -> None:
    keys = [plain_uniform(5, "s", 2, place, 0, 0) for place in range(50)]
    assert UniformStream(5, "s", 2).permutation(50).tolist() == sorted(range(50), key=lambda place: keys[place])


def test_uniforms_are_finer_than_32_bits() -> None:
    drawn = UniformStream(0, "train", 1).draw(np.arange(100), np.zeros(100, dtype=np.int64), 0)
    assert (drawn * 2**53 == np.floor(drawn * 2**53)).all()
    assert (drawn * 2**40 != np.floor(drawn * 2**40)).all()


@pytest.mark.parametrize("vocabulary", [1, 3, 256, 300])
def test_a_token_s_interval_is_as_wide_as_the_probability_recorded(vocabulary: int) -> None:
    """From just above its lower edge to just below its upper one."""
    logits, tokens = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1)), torch.arange(vocabulary)
    probabilities = logits[0].softmax(dim=0).double()
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), probabilities.cumsum(dim=0)]) / probabilities.sum()
    for share in (1e-3, 0.5, 1 - 1e-3):
        u = edges[tokens] + share * (edges[tokens + 1] - edges[tokens])
        drawn, log_probs = draw_tokens(logits.expand(len(tokens), -1), u)
        assert torch.equal(drawn, tokens)
        assert torch.allclose(log_probs, (probabilities[tokens] / probabilities.sum()).log(), rtol=0, atol=1e-7)


def test_what_is_recorded_is_normalised() -> None:
    """The probabilities of a large vocabulary do not sum to 1 in float32; log q must not inherit that."""
    logits = torch.randn(64, 50_257, generator=torch.Generator().manual_seed(8))
    excess = logits.softmax(dim=1).double().sum(dim=1) - 1
    far = excess.abs() > 4e-7
    assert far.any()
    tokens, log_probs = draw_tokens(logits, torch.rand(64, generator=torch.Generator().manual_seed(9)).double())
    exact = logits.double().log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]
    assert float((log_probs - exact)[far].abs().mean()) < 1.5e-7


def test_a_token_of_tiny_probability_can_be_drawn() -> None:
    logits = torch.tensor([[0.3, 1e-10, 0.7 - 1e-10]], dtype=torch.float64).log()
    tokens, log_probs = draw_tokens(logits, torch.tensor([0.3 + 0.5e-10], dtype=torch.float64))
    assert tokens.tolist() == [1]
    assert float(log_probs) == pytest.approx(np.log(1e-10))


def test_an_interval_holds_its_lower_edge() -> None:
    u = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    assert draw_tokens(torch.zeros(4, 4), u)[0].tolist() == [0, 1, 2, 3]


def test_a_tail_that_float32_would_not_add_to_1_is_drawn() -> None:
    """Its blocks hold 2^-25 each, less than what float32 tells from 1."""
    logits = torch.full((1, 1024), -33 * np.log(2))
    logits[0, 0], logits[0, 1:256] = 0.0, -float("inf")
    places = torch.arange(768)
    u = (1 + (places.double() + 0.5) * 2.0**-33) / (1 + 768 * 2.0**-33)
    assert torch.equal(draw_tokens(logits.expand(768, -1), u)[0], 256 + places)


def test_rounding_does_not_carry_past_the_vocabulary() -> None:
    """A block's sum in float32 is above that of its members in half of the rows; the last block is not full."""
    logits = torch.randn(2000, 300, generator=torch.Generator().manual_seed(2))
    tokens, log_probs = draw_tokens(logits, torch.full((2000,), 1 - 2.0**-53, dtype=torch.float64))
    assert torch.equal(tokens, torch.full((2000,), 299))
    assert torch.allclose(log_probs, logits.double().log_softmax(dim=1)[:, 299], atol=1e-6)


def test_probabilities_that_are_not_finite_are_refused() -> None:
    message = "the model's probabilities are not finite: its weights hold NaN or are too large"
    with pytest.raises(RunError, match=f"^{message}$"):
        draw_tokens(torch.tensor([[0.0, float("nan")]]), torch.tensor([0.5], dtype=torch.float64))


def plain_completion(
    model: TabularModel, context: int, slot: int, sample: int, length: int
) -> tuple[list[int], list[float]]:
    """Ancestral sampling by inverse transform, one number for each position; tokens and log q."""
    tokens: list[int] = []
    log_q: list[float] = []
    prefix = 0
    for position in range(length):
        row = model.table[context, prefix].detach().numpy()
        probabilities = np.exp(row) / np.exp(row).sum()
        u = plain_uniform(7, "train", 3, slot, sample, position)
        token = int(np.searchsorted(np.cumsum(probabilities), u, side="right"))
        tokens.append(token)
        log_q.append(float(np.log(probabilities[token])))
        if token == 0:
            break
        prefix = prefix * 3 + token
    return tokens, log_q


def sampled(rows_per_pass: int, first_slot: int = 0, stop: StopRule | None = None) -> Samples:
    model = uneven.table(4)
    stream = UniformStream(7, "train", 3)
    chunks = list(sample_chunks(model, PROMPTS, 6, 3, stream, rows_per_pass, stop, first_slot))
    assert [len(chunk.row) for chunk in chunks[:-1]] == [rows_per_pass] * (len(chunks) - 1)
    contexts = [Context(prompt=prompt, columns={}, row=i + 1) for i, prompt in enumerate(uneven.PROMPTS)]
    return assemble(contexts, PROMPTS, chunks, 6)


@pytest.mark.parametrize("first_slot", [0, 3])
@pytest.mark.parametrize("rows_per_pass", [1, 7, 100])
def test_every_sample_by_value(rows_per_pass: int, first_slot: int) -> None:
    """Whatever the split, the neighbours that leave and the order of the prompts; processes go on from their slot."""
    samples, model = sampled(rows_per_pass, first_slot), uneven.table(4)
    for context in range(5):
        for sample in range(6):
            tokens, log_q = plain_completion(model, context, first_slot + context, sample, 3)
            length = len(tokens)
            assert int(samples.lengths[context, sample]) == length
            assert samples.tokens[context, sample].tolist() == tokens + [0] * (samples.tokens.shape[2] - length)
            assert samples.token_log_q[context, sample, :length].tolist() == pytest.approx(log_q, rel=1e-9)
            assert not samples.token_log_q[context, sample, length:].any()
            assert float(samples.log_q[context, sample]) == pytest.approx(sum(log_q), rel=1e-9)
            assert bool(samples.ended[context, sample]) == (tokens[-1] == 0)
            assert samples.texts[context][sample] == "".join("abc"[token - 1] for token in tokens if token)
    assert samples.prompts == tuple(PROMPTS)
    assert not samples.ended.all(), "some are cut at the limit"
    assert len(samples.lengths.unique()) == 3


class EndsBetweenTwoLetters:
    """Ends where an *a* is followed by a *b*, and leaves the *b* out; only the *a* is watched."""

    watch = frozenset("a")

    def cut(self, completion: str) -> str | None:
        place = completion.find("ab")
        return None if place < 0 else completion[: place + 1]


@pytest.mark.parametrize("rows_per_pass", [7, 100])
def test_a_stop_rule_may_look_at_two_tokens_and_cuts_the_text(rows_per_pass: int) -> None:
    """The token that triggered the stop is scored; the text ends where the rule says."""
    whole, stopped = sampled(rows_per_pass), sampled(rows_per_pass, stop=EndsBetweenTwoLetters())
    seen = 0
    for context in range(5):
        for sample in range(6):
            tokens = whole.tokens[context, sample, : int(whole.lengths[context, sample])].tolist()
            text = whole.texts[context][sample]
            place = text.find("ab")
            kept = tokens if place < 0 else tokens[: place + 2]
            seen += place >= 0
            length = int(stopped.lengths[context, sample])
            assert stopped.tokens[context, sample, :length].tolist() == kept
            assert torch.equal(
                stopped.token_log_q[context, sample, :length], whole.token_log_q[context, sample, :length]
            )
            assert stopped.texts[context][sample] == (text if place < 0 else text[: place + 1])
            assert bool(stopped.ended[context, sample]) == (place >= 0 or tokens[-1] == 0)
    assert seen == 4


def test_the_rows_of_chunks_are_put_where_they_belong() -> None:
    chunks = [
        Chunk((3, 0), ((4, 5), (6,)), ((-1.0, -2.0), (-3.0,)), (True, False), ("d", "a")),
        Chunk((2, 1), ((7,), (8, 9)), ((-4.0,), (-5.0, -6.0)), (False, True), ("c", "b")),
    ]
    samples = assemble(contexts_of(2), [(1,), (2,)], chunks, 2)
    assert samples.texts == (("a", "b"), ("c", "d"))
    assert samples.tokens.tolist() == [[[6, 0], [8, 9]], [[7, 0], [4, 5]]]
    assert samples.token_log_q.tolist() == [[[-3.0, 0.0], [-5.0, -6.0]], [[-4.0, 0.0], [-1.0, -2.0]]]
    assert samples.lengths.tolist() == [[1, 2], [1, 2]]
    assert samples.ended.tolist() == [[False, True], [False, True]]


def test_every_position_has_a_number_of_its_own() -> None:
    """A row ends at the first position whose number is below the probability of the end token, the first in order."""
    model = TabularModel(["c"], ["a"], max_length := 40)
    model.table.data[:] = torch.tensor([0.05, 0.95], dtype=torch.float64).log()
    stream, samples, first_slot = UniformStream(3, "train", 1), 8, 5
    lengths = []
    for chunk in sample_chunks(model, [(0,), (0,)], samples, max_length, stream, 16, first_slot=first_slot):
        for row, tokens in zip(chunk.row, chunk.tokens, strict=True):
            slot, sample = divmod(row, samples)
            drawn = [float(stream.draw(np.array([slot + first_slot]), np.array([sample]), t)[0]) for t in range(40)]
            lengths.append(len(tokens))
            assert len(tokens) == next((t + 1 for t, number in enumerate(drawn) if number < 0.05), max_length)
    assert len(set(lengths)) > 5
    assert sum(20 < length < max_length for length in lengths) > 2
