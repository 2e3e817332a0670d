"""An epoch's samples: each is judged with its own context, scored as what it is, and drawn from its own numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

import factor_rules
from cdpg import CDPGConfig, Moment, Reward
from cdpg.constraints.judge import Judge
from cdpg.contexts.contexts import Context
from cdpg.models.base import Decoding, PromptTokens, Rows, TokenScores
from cdpg.models.tabular import TabularModel
from cdpg.rollout.rollout import Rollout, example_of
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.sandbox.functions import note_exhaustion
from cdpg.system.distributed import Processes
from side_by_side import side_by_side

TEXTS = ("b b b b", "a", "c c c", "a b", "c")
"""Of unsorted length: samples are drawn in another order than the contexts have."""
CONTEXTS = [Context(text, {"initial": text[0]}, row) for row, text in enumerate(TEXTS, start=1)]
SAMPLES = 7
CONFIG = CDPGConfig(num_generations=SAMPLES, max_completion_length=3, rows_per_pass=5, tokens_per_pass=40, device="cpu")


class Table(TabularModel):
    """Prompts that are as long as their texts."""

    def encode(self, contexts: Sequence[Context], max_length: int) -> list[PromptTokens]:
        return [(self.contexts.index(str(c.prompt)), *[0] * len(str(c.prompt))) for c in contexts]


def table(seed: int) -> Table:
    return Table(TEXTS, ("a", "b", "c"), max_length=3, seed=seed)


def verdict(prompt: str, text: str) -> float | None:
    """Depends on the prompt; for some texts NaN, which is no verdict, or None: there it does not apply."""
    if text[1:2] == prompt[0]:
        return math.nan
    if prompt[0] == "c" and text[:1] == "b":
        return None
    return 0.5 if text.startswith(prompt[0]) else float(text.endswith(prompt[0]))


def check(prompts: list[str], completions: list[str], initial: list[str], **columns: Any) -> list[float | None]:
    assert [prompt[0] for prompt in prompts] == initial
    for text in completions:
        if text == "b":
            note_exhaustion("size")
    return [verdict(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]


def rollout(processes: Processes | None = None, **changes: Any) -> Sampler:
    parts: dict[str, Any] = {"policy": table(1), "base": table(2), "judge": Judge(check), "config": CONFIG} | changes
    return Sampler(processes=processes or Processes(Accelerator(cpu=True)), **parts)


def collect(made: Sampler, number: int = 1, every_sample: bool = False, **options: Any) -> Rollout:
    prompts = made.policy.encode(CONTEXTS, 3)
    return made.draw(number, CONTEXTS, prompts, every_sample, Stopwatch(), **options)


@pytest.fixture(scope="module")
def epoch() -> Rollout:
    return collect(rollout())


def verdicts(epoch: Rollout) -> Tensor:
    """b of every sample, from its text and its prompt; NaN where the check fails, −1 where it does not apply."""
    found = [[verdict(text, sample) for sample in row] for text, row in zip(TEXTS, epoch.samples.texts, strict=True)]
    return torch.tensor([[-1.0 if b is None else b for b in row] for row in found], dtype=torch.float64)


def probabilities(model: TabularModel, epoch: Rollout) -> Tensor:
    """``[context, sample]``: log-probabilities, from the table itself."""
    outcomes = {outcome: place for place, outcome in enumerate(model.outcomes())}
    log_probs = model.log_prob_table().detach()
    drawn = [
        [outcomes[tuple(tokens[:length])] for tokens, length in zip(row, lengths, strict=True)]
        for row, lengths in zip(epoch.samples.tokens.tolist(), epoch.samples.lengths.tolist(), strict=True)
    ]
    return log_probs.gather(1, torch.tensor(drawn))


def test_every_sample_is_judged_with_its_own_context(epoch: Rollout) -> None:
    expected = verdicts(epoch)
    failed = expected.isnan()
    assert 3 <= int(failed.sum()) < failed.numel() / 2
    assert {-1.0, 0.0, 0.5, 1.0} <= set(expected.flatten().tolist())
    assert torch.equal(epoch.failed, failed)
    assert torch.equal(epoch.inapplicable, expected == -1)
    assert torch.equal(epoch.valid, ~failed & (expected != -1))
    assert torch.equal(epoch.b, expected.nan_to_num(0.0).clamp(min=0.0))


def test_failures_are_those_of_their_samples_over_all_chunks(epoch: Rollout) -> None:
    rows = verdicts(epoch).isnan().flatten().nonzero()[:, 0].tolist()
    assert list(epoch.failures) == rows
    assert max(rows) // CONFIG.rows_per_pass > min(rows) // CONFIG.rows_per_pass, "they are of several chunks"
    assert {failure.kind for failure in epoch.failures.values()} == {"value"}
    exhausted = sum(text == "b" for row in epoch.samples.texts for text in row)
    assert exhausted > 1
    assert epoch.checks == {"failed_value": len(rows), "exhausted_size": exhausted}


def test_samples_are_scored_by_the_model_that_they_are_said_to_be_of(epoch: Rollout) -> None:
    log_q, log_a = probabilities(table(1), epoch), probabilities(table(2), epoch)
    assert torch.allclose(epoch.log_q, log_q, atol=1e-12)
    satisfying = epoch.b > 0
    assert torch.allclose(epoch.log_a[satisfying], log_a[satisfying], atol=1e-12), "those with b = 0.5, too"
    assert not epoch.log_a[~satisfying].any(), "the others are not scored"
    everything = collect(rollout(), every_sample=True)
    assert torch.allclose(everything.log_a, log_a, atol=1e-12)
    assert torch.allclose(everything.token_log_a.sum(dim=2), log_a, atol=1e-12)


def test_log_q_is_scored_again_where_sampling_is_not_exact() -> None:
    class Rounded(Table):
        exact_sampling = False

        def logits(self, hidden: Tensor) -> Tensor:
            return (4 * hidden).round() / 4  # as reduced precision would

    model = Rounded(TEXTS, ("a", "b", "c"), max_length=3, seed=1)
    epoch = collect(rollout(policy=model))
    assert torch.allclose(epoch.log_q, probabilities(table(1), epoch), atol=1e-12)
    assert torch.allclose(epoch.samples.log_q, epoch.log_q, atol=1e-12)


def test_epochs_streams_and_seeds_have_numbers_of_their_own(epoch: Rollout) -> None:
    for again in (collect(rollout()), collect(rollout(), stream="train")):
        assert again.samples.texts == epoch.samples.texts
    others = [
        collect(rollout(), stream="evaluation"),
        collect(rollout(), number=2),
        collect(rollout(config=CONFIG.replace(seed=1))),
    ]
    for other in others:
        assert other.samples.texts != epoch.samples.texts


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_draw_and_know_what_one_does(epoch: Rollout, count: int) -> None:
    found = side_by_side(count, lambda processes: collect(rollout(processes)))
    assert sum((part.samples.texts for part in found), ()) == epoch.samples.texts
    first = 0
    for part in found:
        assert part.first_context == first
        first += len(part.samples.contexts)
        for name in ("b", "valid", "failed", "log_q", "log_a", "lengths"):
            assert torch.allclose(getattr(part, name).double(), getattr(epoch, name).double(), atol=1e-12), name
        assert part.checks == epoch.checks
    assert len(found[0].failures) < len(epoch.failures), "an example is known where it was drawn"


class Slow(Table):
    def score(self, prompts: Sequence[PromptTokens], rows: Rows) -> TokenScores:
        time.sleep(0.1)
        return super().score(prompts, rows)


def test_time_is_booked_to_the_stage_that_took_it() -> None:
    """At least what each of them sleeps, which no load makes shorter."""

    def slow_check(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
        time.sleep(0.05)
        return [True] * len(completions)

    calls = -(-len(TEXTS) * SAMPLES // CONFIG.rows_per_pass)
    base = Slow(TEXTS, ("a", "b", "c"), max_length=3)
    watch = Stopwatch()
    made = rollout(judge=Judge(slow_check), base=base, config=CONFIG.replace(tokens_per_pass=10_000))
    made.draw(1, CONTEXTS, made.policy.encode(CONTEXTS, 3), False, watch)
    assert watch.seconds["constraint"] >= 0.05 * calls
    assert watch.seconds["base"] >= 0.1
    assert set(watch.seconds) == {"sampling", "constraint", "base"}


def test_the_base_itself_is_not_scored_twice() -> None:
    model = table(1)
    found = collect(replace(rollout(policy=model, base=model), policy_is_base=True), every_sample=True)
    assert torch.equal(found.log_a, found.log_q)


def test_the_stopwatch_books_what_passed_since_the_last_lap() -> None:
    watch = Stopwatch(clock=iter([10.0, 12.0, 15.0, 16.0]).__next__)
    watch.lap("a")
    watch.lap("b")
    watch.lap("a")
    assert watch.seconds == {"a": 3.0, "b": 3.0}


def test_scoring_log_q_again_is_sampling() -> None:
    class Inexact(Slow):
        exact_sampling = False

    watch = Stopwatch()
    made = rollout(policy=Inexact(TEXTS, ("a", "b", "c"), max_length=3))
    made.draw(1, CONTEXTS, made.policy.encode(CONTEXTS, 3), False, watch)
    assert watch.seconds["sampling"] >= 0.1
    assert set(watch.seconds) == {"sampling", "constraint", "base"}


class AtAB:
    """Ends a text at its first b."""

    watch: frozenset[str] = frozenset("b")

    def cut(self, completion: str) -> str | None:
        return completion.partition("b")[0] if "b" in completion else None


def test_samples_end_where_the_stop_rule_says(epoch: Rollout) -> None:
    texts = [text for row in collect(rollout(stop=AtAB())).samples.texts for text in row]
    assert texts == [text.partition("b")[0] for row in epoch.samples.texts for text in row]


class AsBase(Table):
    """Knows whether it is asked as the base, as a model with adapters must: they are switched off then."""

    def __init__(self, seed: int) -> None:
        super().__init__(TEXTS, ("a", "b", "c"), max_length=3, seed=seed)
        self.is_base, self.sampled_as_base = False, list[bool]()

    @contextmanager
    def as_base(self) -> Iterator[None]:
        self.is_base = True
        yield
        self.is_base = False

    def start(self, prompts: Sequence[PromptTokens], context: Tensor, max_length: int) -> Decoding:
        self.sampled_as_base.append(self.is_base)
        return super().start(prompts, context, max_length)


def test_a_sampler_of_the_base_samples_the_base_and_not_the_policy() -> None:
    both = AsBase(2)
    made = rollout(policy=both, base=both)
    collect(made)
    assert not any(both.sampled_as_base)
    both.sampled_as_base.clear()
    of_base = collect(rollout(policy=table(1), base=both).of_base(CONFIG))
    assert both.sampled_as_base and all(both.sampled_as_base)
    assert of_base.samples.texts == collect(rollout(policy=table(2), base=table(2))).samples.texts
    assert of_base.samples.texts != collect(rollout()).samples.texts
    assert torch.equal(of_base.log_a, of_base.log_q)
    assert rollout(engine=both).of_base(CONFIG).engine is None, "an engine draws from the policy"


def test_without_a_known_failure_there_is_no_example() -> None:
    """It may be of another process."""
    assert example_of({}) == ""


def test_a_rollout_has_the_factors_of_its_target() -> None:
    judge = Judge([check, Reward(factor_rules.minus_length, 0.5), Moment(factor_rules.starts_with_a, 0.5, 0.7)])
    found = collect(rollout(judge=judge))
    assert found.coefficients == (2.0, 0.7)
    assert found.factor_names == ("reward_minus_length", "moment_starts_with_a")
    by_name = found.by_factor()
    known = found.valid & (found.b > 0)
    lengths = torch.tensor([[-float(len(text)) for text in row] for row in found.samples.texts], dtype=torch.float64)
    assert torch.equal(by_name["reward_minus_length"][known], lengths[known])
