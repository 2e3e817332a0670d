"""Samples that end early since b = 0 whatever follows: nothing else about the method changes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

import prefix_rules
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.constraints.judge import Judge
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.methods.base import WeightedLoss
from cdpg.models.sampling import Samples
from cdpg.models.scoring import score_samples
from cdpg.models.tabular import END, TabularModel
from cdpg.rollout import pruning
from cdpg.rollout.pruning import Pruner
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.sandbox.pool import Pool
from cdpg.system.distributed import Processes
from cdpg.target.target import log_target
from cdpg.training.optimization import accumulate
from enumeration import flat_gradient, relative_error
from noticed import noticed
from tiny import CAUSAL, make_tokenizer

PROMPTS = ("one", "two", "three")
CONTEXTS = [Context(prompt, {}, row) for row, prompt in enumerate(PROMPTS, start=1)]
LENGTH = 8


def table(seed: int, letters: Sequence[str] = ("a", "b"), length: int = LENGTH) -> TabularModel:
    """Its samples are long: the end token is rare."""
    made = TabularModel(PROMPTS, letters, length, seed=seed)
    with torch.no_grad():
        made.table[:, :, END] -= 3
    return made


def satisfied(text: str) -> bool:
    return prefix_rules.at_most_one_b([""], [text])[0]


@pytest.fixture
def unaudited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "AUDITED", 10**9)


# --- the mathematics, by enumeration ---


def stopped(model: TabularModel, outcomes: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], bool]:
    """Every sequence that pruning leaves of the outcomes, and whether it was ended early."""
    owners = [CONTEXTS[0]] * len(outcomes)
    judge = Judge(prefix_rules.at_most_one_b, prunes=True)
    watch = Pruner(judge.prefix_checks, owners, 1, {})(range(len(outcomes)))
    found: dict[tuple[int, ...], bool] = {}
    rows = list(range(len(outcomes)))
    for drawn in range(1, LENGTH + 1):
        found |= {outcomes[row]: False for row in rows if len(outcomes[row]) == drawn}
        rows = [row for row in rows if len(outcomes[row]) > drawn]
        tokens = [outcome[:drawn] for outcome in outcomes]
        ended = watch.hopeless(rows, tokens, lambda row, ids: model.decode((0,), ids))
        found |= {tokens[row]: True for row in ended}
        rows = [row for row in rows if row not in ended]
    return found


def as_samples(model: TabularModel, sequences: Sequence[tuple[int, ...]]) -> Samples:
    """Each sequence once for each context."""
    count = len(PROMPTS)
    tokens = torch.tensor([[*ids, *[0] * (LENGTH - len(ids))] for ids in sequences])
    return Samples(
        contexts=tuple(CONTEXTS), prompts=tuple(model.encode(CONTEXTS, LENGTH)),
        texts=(tuple(model.decode((0,), ids) for ids in sequences),) * count,
        tokens=tokens.expand(count, -1, -1), lengths=torch.tensor([len(ids) for ids in sequences]).expand(count, -1),
        token_log_q=torch.zeros(count, len(sequences), LENGTH, dtype=torch.float64),
        ended=torch.ones(count, len(sequences), dtype=torch.bool),
    )  # fmt: skip


class Enumerated:
    """All sequences of three models, whole or pruned: base a, proposal q and policy π."""

    def __init__(self, prunes: bool) -> None:
        self.policy, self.base, self.proposal = (table(seed) for seed in (1, 2, 3))
        outcomes = self.policy.outcomes()
        self.pruned = stopped(self.policy, outcomes) if prunes else dict.fromkeys(outcomes, False)
        self.samples = as_samples(self.policy, list(self.pruned))
        texts = self.samples.texts[0]
        b = [
            0.0 if pruned else float(satisfied(text)) for text, pruned in zip(texts, self.pruned.values(), strict=True)
        ]
        self.b = torch.tensor(b, dtype=torch.float64).expand(len(PROMPTS), -1)
        rows = torch.arange(self.b.numel())
        self.log_pi, self.log_a, self.log_q = (
            score_samples(model, self.samples, rows, 500).sum(dim=2)
            for model in (self.policy, self.base, self.proposal)
        )

    def expected_gradient(self, control_variate: bool, log_q: Tensor) -> Tensor:
        """E_q of the gradient of a sample, by the production loss: every sequence once, its terms times q(x|c).

        Times q the weight is P/Z, and the control variate π.
        """
        target = log_target(self.log_a, self.b)
        weights = (target - target.logsumexp(dim=1, keepdim=True)).exp()
        truth = torch.ones_like(self.b, dtype=torch.bool)
        rollout = Rollout(
            number=1, b=self.b, valid=truth, failed=~truth, log_q=torch.zeros_like(self.b), log_a=self.log_a,
            lengths=self.samples.lengths, samples=self.samples,
            token_log_a=torch.zeros_like(self.samples.token_log_q), first_context=0,
        )  # fmt: skip
        loss = WeightedLoss(rollout, weights, follows_policy=False, subtracts_control_variate=control_variate)
        self.policy.module.zero_grad(set_to_none=True)
        accumulate(self.policy, loss, rollout, torch.arange(self.b.numel())[loss.active], len(PROMPTS), 500)
        return flat_gradient(self.policy)


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_the_stopped_sequences_are_a_coarser_set_of_outcomes(
    delay: int, unaudited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "DELAY", delay)
    found = Enumerated(prunes=True)
    assert sum(found.pruned.values()) > 10
    for ids, pruned in found.pruned.items():
        seconds = [place for place, token in enumerate(ids, start=1) if token == 2][1:2]
        assert not pruned or len(ids) == seconds[0] + delay, "it ends a fixed number of tokens after its second b"
    for log_prob in (found.log_pi, found.log_a, found.log_q):
        assert torch.allclose(log_prob.exp().sum(dim=1), torch.ones(3, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("control_variate", [False, True])
def test_the_expected_gradient_is_that_of_whole_samples(
    control_variate: bool, delay: int, unaudited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Score terms up to a stopping time are a martingale, so that the control variate still has expectation 0."""
    monkeypatch.setattr(pruning, "DELAY", delay)
    pruned, whole = Enumerated(prunes=True), Enumerated(prunes=False)
    truth = whole.expected_gradient(False, whole.log_q)
    assert relative_error(pruned.expected_gradient(control_variate, pruned.log_q), truth) < 1e-12
    assert relative_error(whole.expected_gradient(control_variate, whole.log_q), truth) < 1e-12


def test_a_control_variate_of_whole_samples_alone_would_be_wrong(unaudited: None) -> None:
    pruned = Enumerated(prunes=True)
    truth = pruned.expected_gradient(False, pruned.log_q)
    kept = [ids for ids, early in pruned.pruned.items() if not early]
    pruned.samples = as_samples(pruned.policy, kept)
    columns = torch.tensor([not early for early in pruned.pruned.values()])
    pruned.b, pruned.log_a = pruned.b[:, columns], pruned.log_a[:, columns]
    assert relative_error(pruned.expected_gradient(True, pruned.log_q), truth) > 0.01


# --- an epoch ---

CONFIG = CDPGConfig(num_generations=40, max_completion_length=LENGTH, rows_per_pass=50, device="cpu")


def sampler(constraint: Any = prefix_rules.at_most_one_b, **changes: Any) -> Sampler:
    config = CONFIG.replace(**changes)
    processes = Processes(Accelerator(cpu=True))
    return Sampler(table(1), table(2), Judge(constraint, prunes=config.prune), config, processes)


def draw(made: Sampler, every_sample: bool = False) -> Rollout:
    return made.draw(1, CONTEXTS, made.policy.encode(CONTEXTS, LENGTH), every_sample, Stopwatch())


def ids_of(rollout: Rollout) -> list[list[int]]:
    count = rollout.b.shape[1]
    return [rollout.samples.token_ids(*divmod(row, count)) for row in range(rollout.b.numel())]


def test_an_epoch_differs_from_a_whole_one_in_the_ends_of_samples_alone() -> None:
    pruned, whole = draw(sampler()), draw(sampler(prune=False))
    assert not whole.pruned.any()
    assert 20 < int(pruned.pruned.sum()) < pruned.pruned.numel() - 20
    for place, (ids, full) in enumerate(zip(ids_of(pruned), ids_of(whole), strict=True)):
        context, sample = divmod(place, 40)
        second = [at for at, token in enumerate(full, start=1) if token == 2][1:2]
        due = bool(second) and second[0] + pruning.DELAY < len(full) and place % pruning.AUDITED != 0
        assert bool(pruned.pruned[context, sample]) == due
        assert ids == (full[: second[0] + pruning.DELAY] if due else full)
    assert torch.equal(pruned.lengths, pruned.samples.lengths)
    assert torch.equal(pruned.b, whole.b)
    assert bool(pruned.valid.all()) and not pruned.failed.any()
    for name in ("log_z", "log_ratio"):
        assert torch.allclose(getattr(pruned, name), getattr(whole, name), rtol=1e-12, atol=0), name
    assert torch.allclose(pruned.log_q[~pruned.pruned], whole.log_q[~pruned.pruned], rtol=1e-12, atol=0)
    assert torch.equal(pruned.samples.log_q, pruned.log_q)


@pytest.mark.parametrize("rows_per_pass", [1, 7, 120])
def test_the_batch_split_does_not_matter(rows_per_pass: int) -> None:
    one, other = draw(sampler()), draw(sampler(rows_per_pass=rows_per_pass))
    assert ids_of(one) == ids_of(other)
    assert torch.equal(one.pruned, other.pruned)
    assert torch.allclose(one.log_q, other.log_q, rtol=1e-12, atol=0)


def test_whole_samples_are_drawn_where_they_are_needed() -> None:
    assert not draw(sampler(), every_sample=True).pruned.any()


def test_a_function_that_watches_nothing_is_asked_every_few_tokens(unaudited: None) -> None:
    asked: list[str] = []

    def hopeless(prompts: Any, prefixes: list[str], **columns: Any) -> list[bool]:
        asked.extend(prefixes)
        return [True] * len(prefixes)

    def never(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        return [False] * len(prompts)

    never.hopeless = hopeless  # type: ignore[attr-defined]
    model = table(0, ("a",), 14)
    made = Sampler(
        model,
        model,
        Judge(never, prunes=True),
        CONFIG.replace(max_completion_length=14),
        Processes(Accelerator(cpu=True)),
    )
    found = made.draw(1, CONTEXTS, model.encode(CONTEXTS, 14), False, Stopwatch())
    assert set(asked) == {"a" * pruning.EVERY}
    assert set(found.lengths[found.pruned].tolist()) == {pruning.EVERY + pruning.DELAY}


def test_a_blank_is_seen_although_it_is_stripped_from_a_text_of_one_token() -> None:
    seen: list[str] = []

    def hopeless(prompts: Any, prefixes: list[str], **columns: Any) -> list[bool]:
        seen.extend(prefixes)
        return [False] * len(prefixes)

    def fits(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        return [True] * len(prompts)

    hopeless.watch = " "  # type: ignore[attr-defined]
    fits.hopeless = hopeless  # type: ignore[attr-defined]
    pieces = (" the", " dog", "s")
    watch = Pruner(Judge(fits, prunes=True).prefix_checks, CONTEXTS[:1], 1, {})([0])
    for count in (1, 2, 3):
        watch.hopeless([0], [[0, 1, 2][:count]], lambda row, ids: "".join(pieces[i] for i in ids).lstrip())
    assert seen == ["the", "the dog"]


def test_a_prefix_comes_with_its_own_context() -> None:
    def two_b(prompts: list[str], prefixes: list[str], **columns: Any) -> list[bool]:
        return [prompt == "two" and text.count("b") > 1 for prompt, text in zip(prompts, prefixes, strict=True)]

    two_b.watch = "b"  # type: ignore[attr-defined]

    def fits(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
        return [prompt != "two" or text.count("b") <= 1 for prompt, text in zip(prompts, completions, strict=True)]

    fits.hopeless = two_b  # type: ignore[attr-defined]
    pruned, whole = draw(sampler(fits)), draw(sampler(fits, prune=False))
    assert torch.equal(pruned.b, whole.b)
    assert pruned.pruned.any(dim=1).tolist() == [False, True, False]


def test_beginnings_are_not_judged() -> None:
    """A beginning may satisfy by itself, although no sample that goes on from it does."""
    judged: list[str] = []

    def fits(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
        judged.extend(completions)
        return prefix_rules.at_most_one_b(prompts, completions)

    fits.hopeless = prefix_rules.two_b  # type: ignore[attr-defined]
    found = draw(sampler(fits))
    whole = [found.samples.texts[place // 40][place % 40] for place in (~found.pruned).flatten().nonzero().flatten()]
    assert sorted(judged) == sorted(whole)
    assert len(whole) < found.pruned.numel() - 20


def test_of_several_functions_the_first_to_say_so_counts(unaudited: None) -> None:
    def two_a(prompts: Any, prefixes: list[str], **columns: Any) -> list[bool]:
        return [text.count("a") > 1 for text in prefixes]

    two_a.watch = "a"  # type: ignore[attr-defined]

    def at_most_one_a(prompts: Any, completions: list[str], **columns: Any) -> list[bool]:
        return [text.count("a") <= 1 for text in completions]

    at_most_one_a.hopeless = two_a  # type: ignore[attr-defined]
    constraints = [prefix_rules.at_most_one_b, at_most_one_a]
    pruned, whole = draw(sampler(constraints)), draw(sampler(constraints, prune=False))
    assert torch.equal(pruned.b, whole.b)
    for place, full in enumerate(ids_of(whole)):
        first = min(
            [at for at in range(1, len(full) + 1) if max(full[:at].count(1), full[:at].count(2)) == 2], default=99
        )
        length = min(len(full), first + pruning.DELAY)
        assert int(pruned.lengths[divmod(place, 40)]) == length


def test_an_unfinished_character_is_left_out_of_a_prefix() -> None:
    from cdpg.models.loading import load_model

    seen: list[str] = []

    def hopeless(prompts: Any, prefixes: list[str], **columns: Any) -> list[bool]:
        seen.extend(prefixes)
        return [False] * len(prefixes)

    def fits(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        return [True] * len(prompts)

    fits.hopeless = hopeless  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = load_model(CAUSAL["gpt2"](300), CDPGConfig(device="cpu"), make_tokenizer())
    config = CDPGConfig(num_generations=64, max_completion_length=10, device="cpu")
    made = Sampler(model, model, Judge(fits, prunes=True), config, Processes(Accelerator(cpu=True)))
    contexts = [Context("the", {}, 1)]
    made.draw(1, contexts, model.encode(contexts, 10), False, Stopwatch())
    assert any("\ufffd" in text for text in seen), "random bytes are seldom characters"
    assert not any(text.endswith("\ufffd") for text in seen)


# --- a function that is wrong ---


def wrongly_pruned(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    return [0.25 if text.endswith("a") else 0.0 for text in completions]


wrongly_pruned.hopeless = prefix_rules.two_b  # type: ignore[attr-defined]


def test_a_wrong_answer_is_noticed_on_the_samples_that_are_drawn_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "AUDITED", 2)
    with pytest.raises(UserError) as error:
        draw(sampler(wrongly_pruned))
    message = str(error.value)
    said = r"wrong: it returned true for the prefix .([ab]+)., and the constraint gave 0.25 for .([ab]+).:"
    found = re.search(said, message)
    assert found is not None, message
    assert found[2].startswith(found[1]) and found[1].count("b") == 2
    assert "set prune: false" in message


def test_one_sample_of_so_many_is_drawn_to_its_end_whatever_process_draws_it() -> None:
    owners = [CONTEXTS[0]] * 100
    whole = [row for row in range(100) if Pruner([], owners, 0, {}).is_audited(row)]
    assert whole == [0, 32, 64, 96]
    assert [row + 50 for row in range(50) if Pruner([], owners, 50, {}).is_audited(row)] == [64, 96]


# --- a run ---


def train(folder: Path, **settings: Any) -> CDPGTrainer:
    options: dict[str, Any] = {
        "epochs": 4,
        "contexts_per_epoch": 3,
        "num_generations": 30,
        "max_completion_length": LENGTH,
    }
    options |= {"learning_rate": 0.05, "evaluation_samples": 4, "save_every": 2, "log_samples": 50, "device": "cpu"}
    config = CDPGConfig(output_dir=str(folder), **(options | {"check_workers": 0} | settings))
    data = [{"prompt": prompt} for prompt in PROMPTS]
    trainer = CDPGTrainer(table(1), "prefix_rules:at_most_one_b", config, data, data)
    trainer.train(resume_from_checkpoint=(folder / "checkpoints").exists())
    return trainer


def lines(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith("seconds")} for record in records]


def weights(trainer: CDPGTrainer) -> Tensor:
    return next(iter(trainer.policy.module.parameters())).detach()


def test_a_run_learns_the_same_pruned_or_not(tmp_path: Path) -> None:
    plain = {"control_variate": False, "replay": 0}  # a control variate sees the tokens of every sample
    pruned, whole = train(tmp_path / "pruned", **plain), train(tmp_path / "whole", **plain, prune=False)
    assert torch.allclose(weights(pruned), weights(whole), rtol=0, atol=1e-12)
    ours, theirs = lines(tmp_path / "pruned/metrics.jsonl"), lines(tmp_path / "whole/metrics.jsonl")
    for record, other in zip(ours, theirs, strict=True):
        assert 0.05 < record.pop("pruned") < 0.95
        assert other.pop("pruned") == 0
        assert record.pop("tokens") < other.pop("tokens")
        assert record.pop("length") != other.pop("length")
        assert record == pytest.approx(other, rel=1e-9)
    ours, theirs = lines(tmp_path / "pruned/evaluations.jsonl"), lines(tmp_path / "whole/evaluations.jsonl")
    for record, other in zip(ours, theirs, strict=True):
        assert record["metrics"]["length"] == pytest.approx(other["metrics"]["length"])


def test_no_logged_sample_is_a_beginning(tmp_path: Path) -> None:
    train(tmp_path / "pruned", log_samples=90)
    train(tmp_path / "whole", log_samples=90, prune=False)
    whole = {(r["epoch"], r["row"], r["sample"]): r for r in lines(tmp_path / "whole/samples.jsonl")}
    found = lines(tmp_path / "pruned/samples.jsonl")
    assert 0 < len(found) < len(whole) == 4 * 90
    for record in found:
        full = whole[record["epoch"], record["row"], record["sample"]]
        assert (record["token_ids"], record["b"]) == (full["token_ids"], full["b"])


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.exhaustive), {"control_variate": True, "partition": "pooled"}],
)
def test_a_resumed_run_with_workers_repeats_itself(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**settings, "batch_size": 30}
    whole = train(tmp_path / "whole", **settings)
    train(tmp_path / "parts", **settings, epochs=2, evaluate_every=1)
    parts = train(tmp_path / "parts", **settings, check_workers=2, evaluate_every=1)
    assert torch.equal(weights(whole), weights(parts))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert lines(tmp_path / "whole" / name) == lines(tmp_path / "parts" / name)


def test_a_run_whose_method_needs_whole_samples_is_not_pruned(tmp_path: Path) -> None:
    train(tmp_path, method="ziegler", epochs=1)
    assert [record["pruned"] for record in lines(tmp_path / "metrics.jsonl")] == [0]


def test_pruning_cannot_be_changed_along_a_run(tmp_path: Path) -> None:
    train(tmp_path, epochs=2)
    with pytest.raises(UserError, match="prune"):
        train(tmp_path, prune=False)


def test_no_answer_is_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    close = Pool.close

    def look_and_close(pool: Pool) -> None:
        left.append(pool.pending)
        close(pool)

    monkeypatch.setattr(Pool, "close", look_and_close)
    with noticed():
        train(tmp_path, check_workers=1)
    assert left and not any(left)
