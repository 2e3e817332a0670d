"""Held-out contexts: whose samples, how many, from which numbers, and what the files of a tuned run say, enumerated."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cdpg import CDPGConfig, CDPGTrainer, Moment
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.evaluation.evaluator import EvaluationCache, refuse_stopped_beams
from cdpg.evaluation.measures import Measured, TextMeasure
from cdpg.evaluation.policy_evaluations import PolicyEvaluations
from cdpg.models.beams import beam_search
from cdpg.models.tabular import TabularModel
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.storage.jsonl import read_jsonl
from enumeration import MAX_LENGTH, Universe, contexts_of, tabular
from evaluated import Case, Counted, Said, small_blocks
from factor_rules import minus_length
from side_by_side import side_by_side

SEED = 5


def soft(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """1 with an a, a half without one but with a b: p weighs the two by more than a."""
    return [1.0 if "a" in text else 0.5 if "b" in text else 0.0 for text in completions]


def trainer(folder: Path, check: Any = soft, held_out: Any = None, **changes: Any) -> CDPGTrainer:
    settings: dict[str, Any] = {
        "epochs": 12, "contexts_per_epoch": 3, "num_generations": 100, "learning_rate": 0.08, "warmup_epochs": 0,
        "max_completion_length": MAX_LENGTH, "evaluation_samples": 3000, "evaluation_contexts": 2, "device": "cpu",
        "evaluate_every": 6, "check_workers": 0,
    }  # fmt: skip
    measure = changes.pop("measure", None)
    config = CDPGConfig(output_dir=str(folder), **(settings | changes))
    return CDPGTrainer(tabular(SEED), check, config, contexts_of(3), held_out or contexts_of(3), measure=measure)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer(folder).train()
    return folder


def exact(run: Path, contexts: int) -> dict[str, dict[str, float]]:
    """What the figures of base and tuned model estimate, over every outcome there is."""
    base, tuned = tabular(SEED), tabular(SEED)
    with torch.no_grad():
        tuned.table.copy_(load_file(run / "model" / "model.safetensors")["table"])
    universe = Universe.of(base, contexts_of(contexts))
    a, b = universe.log_prob(base).exp().numpy(), np.array([soft([], row) for row in universe.samples.texts])
    p = a * b / (a * b).sum(axis=1, keepdims=True)
    lengths = universe.samples.lengths.numpy()
    found = {}
    for name, model in (("base", base), ("tuned", tuned)):
        q = universe.log_prob(model).exp().numpy()
        found[name] = {
            "satisfaction": (q * b).sum(axis=1).mean(),
            "kl_policy_base": (q * np.log(q / a)).sum(axis=1).mean(),
            "kl_target_policy": np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0) / q), 0.0).sum(axis=1).mean(),
            "z_mean": (a * b).sum(axis=1).mean(),
            "length": (q * lengths).sum(axis=1).mean(),
        }
        found[name]["kl_target_policy_pooled"] = found[name]["kl_target_policy"]
    found["ideal"] = {"length": (p * lengths).sum(axis=1).mean()}
    return found


def test_the_figures_of_a_tuned_model_are_those_of_enumeration(run: Path) -> None:
    """In evaluation.json; that the base's KL(π, a) is 0 would show nothing."""
    result, expected = json.loads((run / "evaluation.json").read_text()), exact(run, 3)
    assert expected["tuned"]["kl_policy_base"] > 0.1
    assert expected["base"]["kl_target_policy"] - expected["tuned"]["kl_target_policy"] > 0.1
    for name in ("base", "tuned", "ideal"):
        for metric, value in expected[name].items():
            assert result[name][metric]["mean"] == pytest.approx(value, abs=0.025), (name, metric)


def test_the_lines_along_a_run_are_of_the_policy_of_their_epoch(run: Path) -> None:
    first, middle, last = read_jsonl(run / "evaluations.jsonl")
    assert [line["epoch"] for line in (first, middle, last)] == [0, 6, 12]
    assert {(line["contexts"], line["samples_per_context"]) for line in (first, middle, last)} == {(2, 3000)}
    expected = exact(run, 2)
    for line, name in ((first, "base"), (last, "tuned")):
        for metric in set(expected[name]) - {"kl_target_policy_pooled"}:
            assert line["metrics"][metric]["mean"] == pytest.approx(expected[name][metric], abs=0.025), (name, metric)
    assert "kl_target_policy_pooled" not in first["metrics"], "the base alone makes no pool"
    pooled = "kl_target_policy_pooled"
    assert last["metrics"][pooled]["mean"] == pytest.approx(expected["tuned"][pooled], abs=0.025)
    for line in (middle, last):
        assert line["base"][pooled]["mean"] == pytest.approx(expected["base"][pooled], abs=0.025)
    between = middle["metrics"]["satisfaction"]["mean"]
    assert first["metrics"]["satisfaction"]["mean"] < between < last["metrics"]["satisfaction"]["mean"]


def log_probs(model: TabularModel, texts: list[tuple[str, ...]]) -> Tensor:
    """``[context, sample]``, looked up by text in the table of all outcomes."""
    outcomes = ["".join(model.symbols[token] for token in outcome) for outcome in model.outcomes()]
    places = torch.tensor([[outcomes.index(text) for text in row] for row in texts])
    return model.log_prob_table().detach()[: len(texts)].gather(1, places)


def test_softly_satisfying_samples_of_others_are_scored_for_the_pool(tmp_path: Path) -> None:
    made, other = trainer(tmp_path, evaluation_samples=12), tabular(SEED + 1)
    found = made.evaluator.evaluate({"tuned": lambda: other}, {})
    assert found is not None
    expected: dict[str, list[float]] = {"base": [], "tuned": []}
    texts = {name: found.outcomes[name].texts for name in ("base", "tuned")}
    for context in range(3):
        row = [*texts["base"][context], *texts["tuned"][context]]
        b = np.array(soft([], row))
        assert 0.5 in b
        logs = {
            name: log_probs(model, [row] * 3)[context].numpy()
            for name, model in (("base", made.base), ("tuned", other))
        }
        ratio = np.exp(logs["base"]) * b / ((np.exp(logs["base"]) + np.exp(logs["tuned"])) / 2)
        kept = b > 0
        log_p = logs["base"][kept] + np.log(b[kept])
        for name, values in logs.items():
            gap = log_p - math.log(ratio.mean()) - values[kept]
            expected[name].append(float((ratio[kept] / ratio.sum() * gap).sum()))
    for name, values in expected.items():
        assert found.metrics()[name]["kl_target_policy_pooled"]["mean"] == pytest.approx(np.mean(values), rel=1e-9)


def test_several_processes_evaluate_as_one_does(tmp_path: Path) -> None:
    """Each scores the other model's samples of its own contexts, which take their places in the pool."""
    whole, part = (
        side_by_side(
            count,
            lambda processes: replace(trainer(tmp_path, evaluation_samples=12).evaluator, processes=processes).evaluate(
                {"tuned": lambda: tabular(SEED + 1)}, {}
            ),
        )
        for count in (1, 2)
    )
    assert whole[0] is not None
    assert part[0] is not None
    assert part[1] is None, "the main process alone has the figures"
    assert part[0].metrics() == whole[0].metrics()


MANY = [Context(context.prompt, {}, row) for row, context in enumerate(contexts_of(3) * 43, start=1)][:128]
"""Two blocks of contexts, with the same prompts at other places."""


class Words:
    """Counts texts and, by what reads them, failures."""

    beams = 0

    def __call__(self, contexts: Any, outputs: Any, apply: Any) -> Measured:
        texts = [text for row in outputs for text in row]
        apply(len, texts)
        remarks = [[len(text) for text in row] for row in outputs]
        return Measured(frequencies={"text": Counter(texts)}, remarks={"letters": remarks})


def test_blocks_have_numbers_of_their_own_and_none_of_training(tmp_path: Path) -> None:
    held_out = [MANY[place % 64] for place in range(128)]
    made = trainer(tmp_path, held_out=held_out, evaluation_samples=4)
    texts = made.evaluator.outcome("tuned", made.policy).texts
    assert len(texts) == 128
    assert all(len(row) == 4 for row in texts)
    assert texts[:64] != texts[64:]
    assert sum(one == other for one, other in zip(texts[:64], texts[64:], strict=True)) < 16
    config = made.args.replace(num_generations=4)
    rollout = Sampler(made.policy, made.base, made.judge, config, made.processes)
    prompts = made.policy.encode(held_out[:64], MAX_LENGTH)
    for number, block in enumerate((texts[:64], texts[64:])):
        trained = rollout.draw(number, held_out[:64], prompts, True, Stopwatch()).samples.texts
        same = sum(one == other for one, other in zip(trained, block, strict=True))
        assert same < 16, "what is measured was drawn as an epoch of training would have been"


def test_counts_are_over_all_blocks(tmp_path: Path) -> None:
    made = trainer(tmp_path, held_out=MANY[:70], evaluation_samples=5, measure=Words())

    def read(function: Any, texts: Any, exhausted: Any = None, failures: Any = None) -> list[None]:
        failures["died"] += len(texts)
        return [None] * len(texts)

    held_out = replace(made.evaluator, read=read)  # type: ignore[arg-type]
    outcome = held_out.outcome("tuned", made.policy)
    texts = [text for row in outcome.texts for text in row]
    assert len(texts) == 350
    assert outcome.measured.frequencies["text"] == Counter(texts)
    assert outcome.measured.remarks == {"letters": [[len(text) for text in row] for row in outcome.texts]}
    assert outcome.unmeasured == {"died": 350}
    letters = Counter(made.policy.symbols.index(letter) for text in texts for letter in text)  # type: ignore[attr-defined]
    ended = sum(len(text) < MAX_LENGTH for text in texts)
    assert outcome.tokens == letters + Counter({0: ended}), "the end token where there is one, and no padding"


def test_the_check_of_a_beam_may_fail(tmp_path: Path) -> None:
    model = tabular(SEED)
    prompts = model.encode(contexts_of(3), MAX_LENGTH)
    searched = beam_search(model, prompts, MAX_LENGTH, 2, 10)
    beams = [model.decode(prompt, tokens) for prompt, tokens in zip(prompts, searched, strict=True)]

    def check(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        failing = str(contexts_of(3)[0].prompt), beams[0]
        return [math.nan if pair == failing else 1.0 for pair in zip(prompts, completions, strict=True)]

    made = trainer(tmp_path, check, evaluation_samples=2, measure=TextMeasure(beams=2))
    found = made.evaluator.evaluate({}, {})
    assert found is not None
    assert found.outcomes["base"].beams == tuple(beams)
    shown = found.outcomes["base"].shown_ids
    assert [ids[0] for ids in shown] == [list(tokens) for tokens in searched], "then the two samples"
    assert [len(ids) for ids in shown] == [3] * 3
    assert found.metrics()["base"]["satisfaction_beam"]["mean"] == 1.0
    assert found.to_mapping({"base": "base"})["examples"][0]["outputs"]["base"][0]["b"] is None


def test_what_is_known_of_a_policy_is_forgotten_when_its_weights_change(tmp_path: Path) -> None:
    made = trainer(tmp_path, evaluation_samples=200)
    evaluations = PolicyEvaluations(made.evaluator, made.policy, {})

    def satisfaction(epoch: int) -> float:
        found: float = evaluations.after_epoch(epoch)["metrics"]["satisfaction"]["mean"]
        return found

    first = satisfaction(1)
    assert satisfaction(2) == first, "the same weights draw the same samples"
    with torch.no_grad():
        made.policy.table[:, :, 1] += 3.0  # type: ignore[attr-defined]
    assert satisfaction(3) > first + 0.1
    final = evaluations.at_end()
    assert final is not None
    assert final.metrics()["tuned"]["satisfaction"]["mean"] > first + 0.1


def test_a_model_is_forgotten_and_no_other() -> None:
    cache: Any = EvaluationCache()
    for names, found in ((("base", "tuned", "other"), cache.parts), (("tuned", "other"), cache.gains)):
        found.update({(name, number, 4): None for name in names for number in (0, 1)})
    pairs = [("tuned", "base"), ("other", "tuned"), ("other", "base"), ("tuned", "other")]
    cache.scores.update({(*pair, number, 4): None for pair in pairs for number in (0, 1)})
    cache.ideal[0, 4] = None
    cache.forget("tuned")
    assert {key[0] for key in cache.parts} == {"base", "other"}
    assert {key[0] for key in cache.gains} == {"other"}
    assert {key[:2] for key in cache.scores} == {("other", "base")}
    assert list(cache.ideal) == [(0, 4)]


def test_what_is_said_and_where_a_stop_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks, of four, four and one context."""
    small_blocks(monkeypatch)
    case, said, stops, cache = Case(), Said(), Counted(), EvaluationCache()
    models: Any = {"first": lambda: case.other(0), "second": lambda: case.other(1)}
    found = case.evaluator().evaluate(models, {}, None, cache, said, stops)
    starts = (0, 4, 8)
    comparing = [f"comparing: {name} scores the others' samples" for name in models]
    evaluating = [f"evaluating {name}: {start} of 9 contexts" for name in ("base", *models) for start in starts]
    sampling = [f"sampling the ideal model: {start} of 9 contexts" for start in starts]
    assert said.lines == [*evaluating, *sampling, *comparing]
    rounds = 2 + 2 + 1  # of samples of the ideal model, in the three blocks
    assert stops.calls == len(evaluating) + rounds + len(comparing)
    again, once_more = Said(), Counted()
    known = case.evaluator().evaluate(models, {}, None, cache, again, once_more)
    assert found is not None and known is not None
    assert known.metrics() == found.metrics()
    assert all("gain" in metrics for metrics in found.metrics().values())
    assert again.lines == [*evaluating, *comparing], "the samples of the ideal model are known"
    assert once_more.calls == len(again.lines)


def test_without_draws_there_is_no_gain() -> None:
    case = Case(gain_draws=0)
    found = case.evaluator().evaluate({"tuned": lambda: case.other(0)}, {})
    assert found is not None
    assert not any({"gain", "recall"} & set(metrics) for metrics in found.metrics().values())
    assert found.ideal_samples == []


def test_the_base_is_without_adapters_and_other_models_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In samples, in beams and in the draws for the gain."""
    case, other = Case(), Case().base
    off: list[Any] = []
    sampled: list[tuple[bool, bool]] = []

    @contextmanager
    def as_base(self: Any) -> Iterator[None]:
        off.append(self)
        yield
        off.pop()

    kind = type(case.base)
    start = kind.start

    def seen(self: Any, *given: Any) -> Any:
        sampled.append((self is case.base, self in off))
        return start(self, *given)

    monkeypatch.setattr(kind, "as_base", as_base)
    monkeypatch.setattr(kind, "start", seen)
    case.evaluator(measure=TextMeasure(beams=1)).evaluate({"tuned": lambda: other}, {})
    assert set(sampled) == {(True, True), (False, False)}


@pytest.mark.parametrize("beams", [0, 2])
def test_prompts_are_remembered_for_beams_alone(beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in each block; without beams nothing would use them again, and they take memory."""
    monkeypatch.setattr("cdpg.evaluation.evaluator.BLOCK", 2)
    measure = Words()
    measure.beams = beams
    made = trainer(tmp_path, held_out=MANY[:3], measure=measure)
    remembered = list[None]()

    def remembering(self: Any) -> Any:
        remembered.append(None)
        return nullcontext()

    monkeypatch.setattr(type(made.policy), "remembering_prompts", remembering)
    made.evaluator.outcome("tuned", made.policy)
    assert len(remembered) == (2 if beams else 0)


def test_the_main_process_alone_judges_beams_and_measures() -> None:
    """One beam is measured for each context, not the samples."""
    calls: list[Any] = []

    def check(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
        calls.append(completions)
        return ["a" in text for text in completions]

    class Lengths(Words):
        beams = 1

        def __call__(self, contexts: Any, outputs: Any, apply: Any) -> Measured:
            calls.append(outputs)
            return Measured({"length": np.array([[len(text) for text in row] for row in outputs])})

    def work(processes: Any) -> Any:
        made = Case(evaluation_samples=2).evaluator(check, measure=Lengths())
        return replace(made, processes=processes).outcome("tuned", Case().other(0))

    first, second = side_by_side(2, work)
    assert first.beams is not None
    beams = list(first.beams)
    assert calls.count(beams) == 1
    assert calls.count([[text] for text in beams]) == 1
    assert len(calls) == 4, "the samples of each process, the beams, the measure"
    assert first.measured.features["length"].tolist() == [[len(text)] for text in beams]
    assert list(first.beam_b) == [float("a" in text) for text in beams]
    assert (second.beams, second.beam_b, second.measured) == (first.beams, (), Measured())


def test_the_base_does_not_score_its_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise AssertionError("what was drawn is scored again")

    case = Case()
    monkeypatch.setattr("cdpg.rollout.sampler.score_samples", refuse)
    outcome = case.evaluator().outcome("base", case.base)
    assert torch.equal(outcome.table("log_q"), outcome.table("log_a"))


def test_known_samples_have_the_present_multipliers_of_moments() -> None:
    """λ may be fitted again between two evaluations."""
    case, cache = Case(), EvaluationCache()
    evaluator = case.evaluator(Moment(minus_length, -3.0, 0.3))
    before, fresh = evaluator.outcome("base", case.base, cache=cache), EvaluationCache()
    evaluator.judge.tilt.set_multipliers([0.7])
    known = evaluator.outcome("base", case.base, cache=cache)
    assert torch.equal(known.table("log_p"), evaluator.outcome("base", case.base, cache=fresh).table("log_p"))
    gap = 0.4 * torch.tensor([[-float(len(text)) for text in row] for row in known.texts], dtype=torch.float64)
    assert torch.allclose(known.table("log_p") - before.table("log_p"), gap, atol=1e-12)


class EndsAtB:
    """Ends a sample with its first b, and leaves it out."""

    watch = frozenset("b")

    def cut(self, completion: str) -> str | None:
        return completion.partition("b")[0] if "b" in completion else None


def test_a_stop_rule_ends_all_samples_those_of_the_gain_too() -> None:
    """Two samples of each context, then rounds of eight and of two: a batch of training has more than either."""
    case = Case(evaluation_samples=2, batch_size=24, gain_draws=12)
    found = case.evaluator(lambda prompts, completions, **_: ["a" in text for text in completions], stop=EndsAtB())
    evaluation = found.evaluate({"tuned": lambda: case.other(0)}, {})
    assert evaluation is not None
    drawn = [record["completion"] for record in evaluation.ideal_samples]
    samples = [text for name in ("base", "tuned") for row in evaluation.outcomes[name].texts for text in row]
    assert len(drawn) == 18
    assert "b" not in "".join(drawn + samples)
    plain = case.evaluator(lambda prompts, completions, **_: ["a" in text for text in completions]).evaluate({}, {})
    assert plain is not None
    texts = [record["completion"] for record in plain.ideal_samples]
    assert any("b" in text.rpartition("a")[0] for text in texts)


# Beams.


def reference_beams(model: TabularModel, context: int, beams: int) -> tuple[int, ...]:
    """Beam search by its definition, on probabilities of whole prefixes: nothing is shared with the program."""
    probabilities = model.log_prob_table().detach().exp()[context].tolist()
    outcomes = dict(zip(model.outcomes(), probabilities, strict=True))

    def log_prob(prefix: tuple[int, ...]) -> float:
        return math.log(sum(p for outcome, p in outcomes.items() if outcome[: len(prefix)] == prefix))

    alive: list[tuple[int, ...]] = [()]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, model.max_length + 1):
        candidates = sorted(
            ((*prefix, token) for prefix in alive for token in range(len(model.symbols))), key=log_prob, reverse=True
        )[: 2 * beams]
        ending = [sequence for sequence in candidates[:beams] if sequence[-1] == 0]
        alive = [sequence for sequence in candidates if sequence[-1] != 0][:beams]
        finished += [(log_prob(sequence) / len(sequence), sequence) for sequence in ending]
        if length == model.max_length:
            finished += [(log_prob(sequence) / length, sequence) for sequence in alive]
        finished = sorted(finished, reverse=True)[:beams]
        if len(finished) == beams and log_prob(alive[0]) / length <= finished[-1][0]:
            break
    return finished[0][1]


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_beams_are_those_of_the_definition(beams: int) -> None:
    """Over many tables, on which the best outcome is not always found: what is pruned must be the same."""

    class Table(TabularModel):
        def encode(self, contexts: Any, max_length: int) -> Any:
            order = [self.contexts.index(str(context.prompt)) for context in contexts]
            return [(index, *[0] * (5 - index)) for index in order]  # the later ones are shorter

    names = [f"context {index}" for index in range(4)]
    for seed in range(12):
        model = Table(names, ("a", "b", "c"), max_length=3, seed=seed)
        prompts = model.encode([Context(name, {}, 1) for name in names], 3)
        found = beam_search(model, prompts, 3, beams, rows_per_pass=2 * beams)
        assert found == [reference_beams(model, context, beams) for context in range(4)], seed


def test_an_ending_that_is_not_among_the_best_candidates_does_not_finish() -> None:
    """The second best of one beam's candidates, though it would win by its length over what the beam leads to."""
    model = TabularModel(["context"], ("a", "b", "c"), max_length=3)
    with torch.no_grad():
        model.table[:] = torch.tensor([0.0, 0.03, 0.02, 0.01])
        model.table[0, 0] = torch.tensor([0.0, 0.1, -3.0, -3.0])  # at the start: the end, a, b, c
    (found,) = beam_search(model, [(0,)], 3, beams=1, rows_per_pass=4)
    assert found == reference_beams(model, 0, 1)
    assert found[0] == 1


def test_a_stop_rule_and_beam_search_exclude_each_other() -> None:
    for measure, stop in ((TextMeasure(), lambda text: True), (TextMeasure(beams=3), None)):
        refuse_stopped_beams(measure, stop)
    with pytest.raises(UserError, match=r"^a stop rule ends .* TextMeasure measures those of 3 beams: give a measure"):
        refuse_stopped_beams(TextMeasure(beams=3), lambda text: True)
