"""Intervals, beams, pooled divergences and what an evaluation writes, against exact values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.contexts.contexts import Context
from cdpg.evaluation.measures import Measured, TextMeasure, per_output, table_of
from cdpg.evaluation.metrics import Metric
from cdpg.evaluation.statistics import (
    Estimate,
    context_means,
    deviation_statistic,
    difference,
    expanded_tail,
    interval,
    mean_statistic,
    ratio,
    resample,
    student_quantile,
)
from cdpg.models.beams import beam_search
from cdpg.models.loading import load_model
from cdpg.models.scoring import score_samples
from cdpg.storage.jsonl import read_jsonl
from cdpg.target.divergence import kl_target_policy_pooled
from cdpg.tasks import known_metrics
from cdpg.tasks.code.metrics import EXHAUSTED, CodeMeasure
from cdpg.tasks.summarization.constraint import labelled_entities
from cdpg.tasks.summarization.metrics import SummaryMeasure
from cdpg.tasks.translation.metrics import TranslationMeasure, bleu_statistic
from enumeration import MAX_LENGTH, Universe, contexts_of, tabular
from tiny import make_model, tokenizer_for

pytest.importorskip("sacrebleu")


# Intervals.


def test_the_interval_of_a_mean_is_that_of_the_normal_law() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    found = interval(mean_statistic(values), resample(400, seed=1))
    half = 1.959964 * values.std() / 20
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert np.array_equal(resample(400, seed=1), resample(400, seed=1)), "every model has the same resamples"
    assert not np.array_equal(resample(400, seed=1), resample(400, seed=2))
    assert (resample(400, seed=1).sum(axis=1) == 400).all()


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (6, 2.447), (10, 2.228), (29, 2.045), (1000, 1.962)]
)
def test_quantiles_of_students_law_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom, 0.95) == pytest.approx(quantile, abs=5e-4)
    assert student_quantile(1, 0.5) == pytest.approx(1.0, rel=1e-12), "of Cauchy's law"


def test_the_interval_is_the_expanded_percentile_interval() -> None:
    """By hand for 6 contexts: t = 2.570582, times √(6/5) is 2.815931, and Φ(-2.815931) = 0.0024318."""
    assert expanded_tail(6) == pytest.approx(0.0024318, abs=5e-8)
    assert expanded_tail(10**5) == pytest.approx(0.025, abs=2e-6), "with many contexts the plain percentiles"
    statistic, resamples = mean_statistic(np.array([0.0, 1.0, 2.0, 4.0, 8.0, 16.0])), resample(6, seed=1)
    found, low_and_high = interval(statistic, resamples), [0.24318, 99.75682]
    assert (found.low, found.high) == pytest.approx(np.percentile(statistic.on(resamples), low_and_high), abs=1e-4)
    alone = interval(mean_statistic(np.array([3.0])), resample(1, seed=1))
    assert (alone.mean, alone.low, alone.high) == (3.0, None, None), "one context says nothing of the others"


def test_intervals_of_few_contexts_cover_what_they_should() -> None:
    """6 contexts with 8 samples each that satisfy with probability 0.8; plain percentiles cover 85 %."""
    rng, covered, trials = np.random.default_rng(0), 0, 1000
    for seed in range(trials):
        found = interval(mean_statistic((rng.random((6, 8)) < 0.8).mean(axis=1)), resample(6, seed))
        assert found.low is not None and found.high is not None
        covered += found.low <= 0.8 <= found.high
    assert covered >= 0.92 * trials


def test_contexts_without_a_value_leave_the_mean() -> None:
    statistic = mean_statistic(np.array([1.0, np.nan, 3.0]))
    assert statistic.value() == 2.0
    assert interval(mean_statistic(np.array([np.nan, np.nan])), resample(2, 0)).mean is None


def test_means_over_outputs_leave_out_what_is_undefined_and_weigh_the_rest() -> None:
    values = np.array([[1.0, np.nan, 4.0], [np.nan, np.nan, np.nan]])
    assert context_means(values)[0] == 2.5
    assert np.isnan(context_means(values)[1])
    assert context_means(values, np.array([[3.0, 9.0, 1.0], [1.0, 1.0, 1.0]]))[0] == 1.75


def test_the_deviation_of_the_partition() -> None:
    z = np.array([0.1, 0.3, 0.2, 0.6])
    assert deviation_statistic(z, np.zeros(4)).value() == pytest.approx(z.std() / z.mean(), rel=1e-12)
    corrected = deviation_statistic(z, np.full(4, 0.01)).value()
    assert corrected == pytest.approx(np.sqrt(z.var() - 0.01) / z.mean(), rel=1e-12)
    assert deviation_statistic(z, np.full(4, 9.0)).value() == 0.0
    some = deviation_statistic(z, np.array([0.01, np.nan, np.nan, 0.02])).value()
    assert some == pytest.approx(np.sqrt(z.var() - 0.015) / z.mean(), rel=1e-12), "the mean of what is known"
    assert np.isnan(deviation_statistic(z, np.full(4, np.nan)).value())
    statistic = deviation_statistic(z, np.full(4, 0.01))
    once, twice = statistic.on(np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]))
    assert once == pytest.approx(0.0)
    assert twice == 0.0, "one context has no spread"


def test_a_ratio_is_given_where_both_are_positive() -> None:
    resamples = resample(2, seed=0)
    half, whole, nothing = (mean_statistic(np.full(2, value)) for value in (0.5, 1.0, 0.0))
    found = ratio(whole, half, resamples)
    assert (found.mean, found.low, found.high) == (2.0, 2.0, 2.0), "two contexts give an interval"
    for after, before in ((nothing, half), (half, nothing)):
        assert ratio(after, before, resamples) == Estimate(None, None, None)
    alone = ratio(mean_statistic(np.array([1.0])), mean_statistic(np.array([0.25])), resample(1, seed=0))
    assert alone == Estimate(4.0, None, None), "one context gives none"


def test_no_contexts_give_no_figure() -> None:
    assert resample(0, seed=0, resamples=7).shape == (7, 0)


def test_comparisons_are_paired_by_context() -> None:
    """Two models that differ by a constant on contexts that differ widely: the difference is certain."""
    before = np.random.default_rng(0).normal(10.0, 5.0, size=50)
    resamples = resample(50, seed=0)
    found = difference(mean_statistic(before + 1.0), mean_statistic(before), resamples)
    assert (found.low, found.high) == (pytest.approx(1.0), pytest.approx(1.0))
    doubled = ratio(mean_statistic(2 * before), mean_statistic(before), resamples)
    assert (doubled.low, doubled.high) == (pytest.approx(2.0), pytest.approx(2.0))
    assert (found.mean, doubled.mean) == (pytest.approx(1.0), pytest.approx(2.0))
    assert ratio(mean_statistic(before), mean_statistic(0 * before), resamples).mean is None


def test_a_ratio_needs_positive_figures() -> None:
    """KL estimates near 0 have either sign: the ratio of two of them means nothing."""
    values, resamples = np.linspace(-1.0, 2.0, 50), resample(50, seed=0)
    near_zero, positive = mean_statistic(values - 0.45), mean_statistic(values + 5)
    ends = interval(near_zero, resamples)
    assert ends.mean is not None and ends.low is not None and ends.mean > 0 > ends.low
    assert ratio(positive, near_zero, resamples).mean is None, "the divisor may be 0"
    assert ratio(mean_statistic(values - 5), positive, resamples).mean is None
    assert ratio(near_zero, positive, resamples).mean == pytest.approx(0.05 / 5.5)


# Beam search.


def test_a_wide_beam_finds_the_most_probable_outcome() -> None:
    model = tabular(seed=3)
    universe = Universe.of(model, contexts_of(3))
    lengths = universe.samples.lengths
    scores = universe.log_prob(model) / lengths
    best = scores.argmax(dim=1)
    expected = [
        tuple(universe.samples.tokens[context, index, : lengths[context, index]].tolist())
        for context, index in enumerate(best.tolist())
    ]
    prompts = model.encode(contexts_of(3), MAX_LENGTH)
    assert beam_search(model, prompts, MAX_LENGTH, beams=50, rows_per_pass=100) == expected


@pytest.mark.parametrize("family", ["t5", "bart", "llama", "gpt_neo"])
def test_beams_are_those_of_transformers(family: str) -> None:
    module, tokenizer = make_model(family).double(), tokenizer_for(family)
    tokenizer.padding_side = "left"
    contexts = [Context(text, {}, 1) for text in ("two dogs", "the quick brown fox jumps", "name", "a + b and three")]
    model = load_model(module, CDPGConfig(device="cpu", dtype="float64"), tokenizer)
    prompts = model.encode(contexts, 12)
    found = beam_search(model, prompts, 12, beams=4, rows_per_pass=12)
    for prompt, tokens in zip(prompts, found, strict=True):
        module.generation_config.forced_eos_token_id = None
        output = module.generate(
            torch.tensor([prompt]), num_beams=4, do_sample=False, max_new_tokens=12, length_penalty=1.0,
            early_stopping=False, no_repeat_ngram_size=0, forced_bos_token_id=None, forced_eos_token_id=None,
        )[0].tolist()  # fmt: skip
        start = 1 if module.config.is_encoder_decoder else len(prompt)
        assert output[start : start + len(tokens)] == list(tokens)


def test_what_any_text_is_measured_by() -> None:
    measured = TextMeasure()([], [["a b a b a", "a b c"], ["a", ""]])
    assert {name: values.tolist() for name, values in measured.features.items()} == {
        "distinct_2": [[0.5, 1.0], [0.0, 0.0]]
    }


def test_a_table_has_nan_for_what_is_not_known() -> None:
    found = table_of(iter([True, None, 2, 0.5]), [["a", "b"], ["c", "d"]])
    assert found.dtype == np.float64
    assert np.array_equal(found, [[1.0, np.nan], [2.0, 0.5]], equal_nan=True)


# The pooled divergence.


def test_the_pooled_divergence_is_exact_on_a_pool_that_mirrors_the_mixture() -> None:
    base, policy = tabular(seed=2), tabular(seed=1)
    for model in (base, policy):
        with torch.no_grad():
            model.table.zero_()
    with torch.no_grad():
        policy.table[:, :, 1] = np.log(3.0)  # letters and end have weights 1, 3, 1, 1
    universe = Universe.of(policy, contexts_of(2))
    log_pi, log_a = universe.log_prob(policy), universe.log_prob(base)
    b = universe.satisfied(lambda prompt, text: "b" in text)
    log_p = torch.where(b > 0, log_a, float("-inf"))
    log_z = log_p.logsumexp(dim=1)
    ideal = (log_p - log_z[:, None]).exp()
    exact = {
        name: (ideal * (log_p - log_z[:, None] - log_model).masked_fill(b == 0, 0.0)).sum(dim=1)
        for name, log_model in (("base", log_a), ("policy", log_pi))
    }
    mixture = (log_pi.exp() + log_a.exp()) / 2
    counts = (mixture[0] * 2 * 64 * 216).round().long()  # a common multiple of all the probabilities
    assert torch.allclose(counts.double() / counts.sum(), mixture[0], rtol=1e-12)
    index = torch.repeat_interleave(torch.arange(len(counts)), counts)
    table = torch.stack([log_a, log_pi])[:, :, index]
    valid = torch.ones(2, len(index), dtype=torch.bool)
    found = kl_target_policy_pooled(log_p[:, index], table, valid)
    assert torch.allclose(found, torch.stack([exact["base"], exact["policy"]]), rtol=1e-9)


def test_the_pooled_divergence_ignores_what_failed_and_knows_when_it_knows_nothing() -> None:
    log_p = torch.tensor([[-1.0, float("-inf"), -2.0], [float("-inf")] * 3], dtype=torch.float64)
    table = torch.tensor([[[-1.0, 0.0, -2.0]] * 2, [[-1.5, 0.0, -0.5]] * 2], dtype=torch.float64)
    some = torch.tensor([[True, True, False], [True, True, True]])
    found = kl_target_policy_pooled(log_p, table, some)
    # One satisfying sample of two is left: its weight is 1 and log Ẑ = log(P / q̄ / 2).
    log_mixture = table[:, 0, 0].logsumexp(0) - np.log(2)
    log_z = -1.0 - log_mixture - np.log(2)
    assert torch.allclose(found[:, 0], -1.0 - log_z - table[:, 0, 0])
    assert found[:, 1].isnan().all()


# Metrics of the tasks.


def test_bleu_from_sums_is_that_of_the_corpus() -> None:
    import sacrebleu

    outputs = ["un chat noir dort", "les deux chiens jouent dans la neige", "rien du tout ici"]
    references = ["un chat noir dort ici", "les 2 chiens jouent dans la neige fraîche", "tout autre chose que cela"]
    statistic = bleu_statistic([[text] for text in outputs], references, lambda text: text)
    assert statistic.value() == pytest.approx(sacrebleu.corpus_bleu(outputs, [references]).score, rel=1e-9)
    twice = statistic.on(np.array([[2.0, 0.0, 1.0]]))[0]
    repeated = [outputs[0], outputs[0], outputs[2]], [[references[0], references[0], references[2]]]
    assert twice == pytest.approx(sacrebleu.corpus_bleu(*repeated).score, rel=1e-9)


def test_bleu_of_any_sums_is_that_of_sacrebleu() -> None:
    """Also where an order has no match or no n-gram, and outputs are empty, short or long."""
    from sacrebleu.metrics.bleu import BLEU

    generator = np.random.default_rng(3)
    length = generator.integers(0, 9, size=500)
    totals = np.maximum(0, length[:, None] - np.arange(4))
    matches = generator.binomial(totals, generator.choice([0.0, 0.2, 0.6, 1.0], size=(500, 1)))
    reference = generator.integers(1, 9, size=500)
    sums = np.concatenate([matches, totals, length[:, None], reference[:, None]], axis=1).astype(np.float64)
    found = bleu_statistic([], [], str).of(sums.reshape(50, 10, 10))
    rows = zip(matches.tolist(), totals.tolist(), length.tolist(), reference.tolist(), strict=True)
    expected = [BLEU.compute_bleu(*row, smooth_method="exp").score for row in rows]
    assert found.shape == (50, 10)
    assert found.ravel() == pytest.approx(expected, rel=1e-12)
    assert 100 < np.count_nonzero(found) < 450


def test_bleu_by_hand() -> None:
    """BLEU = 100 · exp(min(0, 1 - r/l)) · (p₁ p₂ p₃ p₄)^(1/4), of l words against r in the reference.

    pₙ is matches over n-grams, summed over the outputs. Of the orders without a match, the first has half a match, the
    second a quarter.
    """
    reference, poor, perfect = "a b c d e", "a b x c", "a b c d e"
    # Matches of the first: a, b, c of 4 words; a b of 3 pairs; none of 2 triples; none of 1 quadruple.
    by_hand = 100 * math.exp(1 - 5 / 4) * (3 / 4 * 1 / 3 * (1 / 2) / 2 * (1 / 4) / 1) ** (1 / 4)
    assert bleu_statistic([[poor]], [reference], str).value() == pytest.approx(by_hand, rel=1e-12)
    assert by_hand == pytest.approx(27.53477, abs=1e-5)
    # Of both: 8 of 9, 5 of 7, 3 of 5, 2 of 3.
    both = 100 * math.exp(1 - 10 / 9) * (8 / 9 * 5 / 7 * 3 / 5 * 2 / 3) ** (1 / 4)
    assert bleu_statistic([[poor, perfect]], [reference], str).value() == pytest.approx(both, rel=1e-12)
    assert bleu_statistic([[poor], [perfect]], [reference] * 2, str).value() == pytest.approx(both, rel=1e-12)
    assert both == pytest.approx(63.52430, abs=1e-5)


def test_masked_bleu_does_not_care_how_numbers_are_written() -> None:
    context = Context("two cats", {"reference": "deux chats dorment sur le lit"}, 1)
    found = TranslationMeasure()([context], [["2 chats dorment sur le lit"]])
    assert found.corpus["bleu_masked"].value() == pytest.approx(100.0)
    assert found.corpus["bleu"].value() < 100.0
    assert set(TranslationMeasure()([Context("two", {}, 1)], [["2"]]).corpus) == set()


@pytest.mark.parametrize("columns", [{}, {"reference": None}, {"reference": " "}, {"reference": 3}])
def test_a_context_without_a_reference_is_not_in_bleu(columns: dict[str, Any]) -> None:
    known, bare = Context("two cats", {"reference": "deux chats dorment sur le lit"}, 1), Context("x", columns, 2)
    outputs = [["2 chats dorment sur le lit"], ["tout autre chose"]]
    found, alone = TranslationMeasure()([known, bare], outputs), TranslationMeasure()([known], outputs[:1])
    assert set(found.corpus) == {"bleu", "bleu_masked"}
    for name, statistic in found.corpus.items():
        assert statistic.value() == alone.corpus[name].value()
        assert np.isnan(statistic.on(np.array([[0.0, 2.0]]))), "a resample without a reference has no BLEU"
    assert set(TranslationMeasure()([bare], outputs[1:]).corpus) == set()
    assert found.features["distinct_2"].shape == (2, 1)


def test_code_is_measured_with_its_signature() -> None:
    context = Context("def f(a):", {}, 1)
    found = CodeMeasure()([context], [["\n    return a\n", "\n    return (a\n", "\n    return  a"]])
    assert found.features["compilability"].tolist() == [[1.0, 0.0, 1.0]]
    assert found.features["characters"][0, 0] == len("def f(a):\n    return a")
    assert np.isnan(found.features["ast_nodes"][0, 1])
    assert found.frequencies["compile_outcome"]["ok"] == 2
    assert found.frequencies["pep8_code"]["E271"] == 1
    assert found.remarks["line"] == [[None, 2, None]]


def test_figures_of_code_by_hand() -> None:
    """What stands above the signature is no part of the function; ``break`` parses here and does not compile."""
    context = Context("import os\n\n\ndef f(a):", {"signature": "def f(a):"}, 1)
    found = CodeMeasure()([context], [["\n    a = a  + 1\n    a = a  + 2\n    return a", "\n    break"]])
    assert found.features["compilability"].tolist() == [[1.0, 0.0]]
    assert found.features["pep8_violations"].tolist() == [[2.0, 0.0]]
    assert found.frequencies["pep8_code"] == {"E221": 2}
    assert found.features["characters"].tolist() == [[9 + 1 + 14 + 1 + 14 + 1 + 12, 9 + 1 + 9]]
    # Module, function, arguments and a; twice assignment, name, store, operation, name, load, sum and number; return,
    # name, load.
    assert np.array_equal(found.features["ast_nodes"], [[4 + 2 * 8 + 3, np.nan]], equal_nan=True)
    assert found.remarks["line"] == [[None, 5]]


def test_the_line_of_an_error_is_counted_from_the_prompt_s_first() -> None:
    short, long = Context("def f():", {}, 1), Context("import os\n\ndef g():", {"signature": "def g():"}, 2)
    wrong, right = "\n    x = 1\n    return )\n", "\n    pass\n"
    found = CodeMeasure()([short, long], [[wrong, right], [right, wrong]])
    assert found.remarks["line"] == [[3, None], [None, 5]]


def unread(*lost: str) -> Any:
    """Stands for worker processes: reading some texts fails, and others exhaust what reads them."""

    def apply(function: Any, texts: Any, exhausted: Any = None) -> list[Any]:
        found = function(texts)
        return [
            None if any(word in text for word in lost) else exhausted if "exhausting" in text else value
            for text, value in zip(texts, found, strict=True)
        ]

    return apply


def test_code_that_could_not_be_measured_has_no_figures() -> None:
    texts = ["\n    return a\n", "\n    return lost\n", "\n    return exhausting\n", "\n    return (a\n"]
    found = CodeMeasure()([Context("def f(a):", {}, 1)], [texts], unread("lost"))
    compiled, codes = found.features["compilability"][0], found.features["pep8_violations"][0]
    assert np.array_equal(compiled, [1.0, np.nan, 0.0, 0.0], equal_nan=True)
    assert np.isnan(found.features["ast_nodes"][0]).tolist() == [False, True, True, True]
    assert np.isnan(codes[1:3]).all()
    outcomes = found.frequencies["compile_outcome"]
    assert (outcomes["ok"], outcomes[EXHAUSTED], sum(outcomes.values())) == (1, 1, 3)
    assert found.remarks["outcome"][0][1] is None
    assert found.remarks["line"] == [[None, None, None, 2]]


def test_summaries_that_could_not_be_read_have_no_entities_to_count() -> None:
    pytest.importorskip("spacy")
    source = "Angela Merkel met Barack Obama in Berlin on Monday."
    contexts = [
        Context(source, {"source": source, "reference": "Angela Merkel met Barack Obama."}, 1),
        Context(source, {"source": source, "reference": "A lost reference."}, 2),
    ]
    outputs = [["Angela Merkel.", "A lost summary.", "An exhausting summary of Angela Merkel."], ["Barack Obama."] * 3]
    features = SummaryMeasure()(contexts, outputs, unread("lost")).features
    assert np.array_equal(features["entities"], [[1.0, np.nan, 0.0], [1.0] * 3], equal_nan=True)
    assert np.array_equal(features["precision_source"], [[1.0, np.nan, 0.0], [1.0] * 3], equal_nan=True)
    assert np.array_equal(features["recall_target"], [[0.5, np.nan, 0.0], [np.nan] * 3], equal_nan=True)
    assert not np.isnan(features["rouge_l"]).any()


def test_summaries_are_measured_against_source_and_reference() -> None:
    pytest.importorskip("spacy")
    source = "Angela Merkel met Barack Obama in Berlin on Monday."
    context = Context(source, {"source": source, "reference": "Angela Merkel met Barack Obama."}, 1)
    found = SummaryMeasure()([context], [["Angela Merkel met Barack Obama."]])
    assert found.features["entities"].tolist() == [[2.0]]
    assert found.features["precision_source"].tolist() == [[1.0]]
    assert found.features["recall_target"].tolist() == [[1.0]]
    assert found.features["rouge_l"].tolist() == [[1.0]]
    assert found.frequencies["entity_label"]["PERSON"] == 2


def capitalised(function: Any, texts: Any, exhausted: Any = None) -> list[Any]:
    """Stands for the recogniser: capitalised words are persons, those in capitals organisations."""
    assert function is labelled_entities
    return [
        [(word, "ORG" if word.isupper() else "PERSON") for word in text.split() if word[0].isupper()] for text in texts
    ]


def test_figures_of_a_summary_by_hand() -> None:
    columns = {"source": "ANNA saw Bob and Carl", "reference": "Bob saw cats with Dora"}
    summary = "Anna and Bob saw ANNA cat with Fay and Bob"
    found = SummaryMeasure()([Context("summarize: Anna", columns, 1)], [[summary]], capitalised)
    assert {name: table.tolist() for name, table in found.features.items()} == {
        "entities": [[3.0]],  # anna, bob, fay
        "precision_source": [[2 / 3]],  # anna and bob
        "recall_target": [[1 / 2]],  # bob, of bob and dora
        "distinct_2": [[8 / 9]],  # "and Bob" twice
        # Bob saw with: 3 of 10 words here, 3 of 5 there, and the harmonic mean of both shares. cat is not cats.
        "rouge_l": [[pytest.approx(2 * 0.3 * 0.6 / (0.3 + 0.6), rel=1e-12)]],
    }
    assert found.frequencies == {"entity_label": {"PERSON": 4, "ORG": 1}}


@pytest.mark.parametrize("columns", [{}, {"reference": None}, {"reference": ""}])
def test_a_summary_without_a_reference_has_neither_recall_nor_rouge(columns: dict[str, Any]) -> None:
    pytest.importorskip("spacy")
    source = "Angela Merkel met Barack Obama in Berlin on Monday."
    known, bare = Context(source, {"reference": "Angela Merkel met Barack Obama."}, 1), Context(source, columns, 2)
    features = SummaryMeasure()([bare, known], [["Angela Merkel met Barack Obama."]] * 2).features
    for name in ("recall_target", "rouge_l"):
        assert np.array_equal(features[name], [[np.nan], [1.0]], equal_nan=True)
    assert features["precision_source"].tolist() == [[1.0], [1.0]]
    assert not {"recall_target", "rouge_l"} & set(SummaryMeasure()([bare], [["Angela Merkel."]]).features)


# The whole.


def has_a(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return ["a" in text for text in completions]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = CDPGConfig(
        output_dir=str(folder), epochs=20, contexts_per_epoch=3, num_generations=200, learning_rate=0.05,
        max_completion_length=MAX_LENGTH, evaluation_samples=2000, evaluation_contexts=2, device="cpu",
        check_workers=0,
    )  # fmt: skip
    trainer = CDPGTrainer(tabular(seed=5), has_a, config, contexts_of(3), contexts_of(3))
    trainer.train()
    return folder


def test_an_evaluation_agrees_with_enumeration(run: Path) -> None:
    """Each interval of the base holds the exact value, which enumeration gives."""
    result = json.loads((run / "evaluation.json").read_text())
    base = tabular(seed=5)
    universe = Universe.of(base, contexts_of(3))
    log_a = universe.log_prob(base)
    b = universe.satisfied(lambda prompt, text: "a" in text)
    z = (log_a.exp() * b).sum(dim=1)
    exact_kl = -z.log()  # KL(p_c, a) = −log Z_c
    found = result["base"]
    assert found["satisfaction"]["mean"] == pytest.approx(float(z.mean()), abs=0.03)
    assert found["kl_target_policy_pooled"]["mean"] == pytest.approx(float(exact_kl.mean()), abs=0.05)
    assert found["kl_policy_base"]["mean"] == 0.0
    assert result["partition"] == pytest.approx(z.tolist(), abs=0.05)
    lengths = universe.samples.lengths
    ideal = ((log_a.exp() * b / z[:, None]) * lengths).sum(dim=1).mean()
    assert result["ideal"]["length"]["mean"] == pytest.approx(float(ideal), abs=0.06)


def test_the_tuned_model_stands_beside_the_base(run: Path) -> None:
    result = json.loads((run / "evaluation.json").read_text())
    assert result["tuned"]["satisfaction"]["mean"] > result["base"]["satisfaction"]["mean"]
    assert result["tuned"]["kl_target_policy_pooled"]["mean"] < result["base"]["kl_target_policy_pooled"]["mean"]
    change = result["changes"]["tuned"]["satisfaction"]
    both = result["tuned"]["satisfaction"]["mean"], result["base"]["satisfaction"]["mean"]
    assert change["ratio"]["mean"] == pytest.approx(both[0] / both[1])
    assert change["difference"]["mean"] == pytest.approx(both[0] - both[1])
    assert "between" not in result, "one model alone stands beside the base"
    assert result["costs"]["tuned"]["samples"] == 20 * 3 * 200
    assert set(result["base"]) == set(result["tuned"]) <= set(known_metrics({}))
    assert [len(example["outputs"]["tuned"]) for example in result["examples"]] == [4, 4, 4]


def test_the_run_was_evaluated_along_its_way(run: Path) -> None:
    records = list(read_jsonl(run / "evaluations.jsonl"))
    assert [record["epoch"] for record in records] == list(range(0, 21, 2))
    assert [record["samples"] for record in records] == [600 * epoch for epoch in range(0, 21, 2)]
    assert records[0]["metrics"]["kl_policy_base"]["mean"] == 0.0
    assert records[-1]["metrics"]["satisfaction"]["mean"] > records[0]["metrics"]["satisfaction"]["mean"]
    assert {record["contexts"] for record in records} == {2}


class LettersB:
    beams = 0

    def __call__(self, contexts: Any, outputs: Any, apply: Any = None) -> Measured:
        return Measured(features={"letters_b": per_output(outputs, lambda text: text.count("b"))})


def test_a_sample_whose_check_failed_is_in_no_mean_over_samples(tmp_path: Path) -> None:
    def check(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
        if any("b" in text for text in completions):
            raise ValueError("no verdict")
        return [True] * len(completions)

    config = CDPGConfig(
        output_dir=str(tmp_path), max_completion_length=MAX_LENGTH, evaluation_samples=40, device="cpu", check_workers=0
    )
    trainer = CDPGTrainer(tabular(seed=5), check, config, contexts_of(3), contexts_of(3), measure=LettersB())
    found = trainer.evaluator.evaluate({}, {})
    assert found is not None
    assert "b" in "".join(text for row in found.outcomes["base"].texts for text in row)
    metrics = found.metrics()["base"]
    assert 0 < metrics["checks_failed"]["mean"] < 1
    assert metrics["letters_b"]["mean"] == 0.0
    judged = [len([t for t in row if "b" not in t]) for row in found.outcomes["base"].texts]
    assert metrics["checks_failed"]["mean"] == pytest.approx(1 - sum(judged) / 120)


def as_words(texts: Any) -> list[list[str]]:
    """Letters as words, enough of them for BLEU's four of a row."""
    return [[" ".join(text * 4) for text in row] for row in texts]


class Compared:
    """BLEU of translations and a feature that needs a reference, too, absent where no context of a block has one."""

    beams = 0
    metrics: ClassVar = {**TranslationMeasure().metrics, "rouge_l": Metric("ROUGE-L", "", of_reference=True)}

    def __call__(self, contexts: Any, outputs: Any, apply: Any = None) -> Measured:
        found = TranslationMeasure()(contexts, as_words(outputs))
        known = [[np.nan if context.reference is None else 1.0] * len(outputs[0]) for context in contexts]
        return Measured({"rouge_l": np.array(known)} if found.corpus else {}, found.corpus)


@pytest.mark.parametrize("without", [range(64), range(64, 70), range(3, 67), range(1), range(70), range(0)])
def test_references_may_be_missing_anywhere(tmp_path: Path, without: range) -> None:
    """More contexts than are measured together, so that some blocks, and not others, have no reference at all."""
    contexts = [
        Context(context.prompt, {"reference": None if row in without else "a b a b c a"}, row + 1)
        for row, context in enumerate(contexts_of(3) * 24)
    ][:70]
    config = CDPGConfig(
        output_dir=str(tmp_path), max_completion_length=MAX_LENGTH, evaluation_samples=3, device="cpu", check_workers=0
    )
    trainer = CDPGTrainer(tabular(seed=5), has_a, config, contexts_of(3), contexts, measure=Compared())
    found = trainer.evaluator.evaluate({}, {})
    assert found is not None
    result = found.to_mapping({"base": "base"})
    notice = f"{len(without)} of 70 contexts have no reference, and do not count in bleu, bleu_masked, rouge_l"
    assert result["notices"] == ([notice] if 0 < len(without) < 70 else [])
    if len(without) == 70:
        assert not {"bleu", "bleu_masked", "rouge_l"} & set(result["base"])
        return
    texts = [row for place, row in enumerate(found.outcomes["base"].texts) if place not in without]
    alone = bleu_statistic(as_words(texts), ["a b a b c a"] * len(texts), lambda text: text)
    assert result["base"]["bleu"]["mean"] == alone.value() > 0
    assert result["base"]["rouge_l"]["mean"] == 1.0
    counted = found.statistics["base"]["rouge_l"].terms[:, 1]
    assert [place for place, known in enumerate(counted) if not known] == list(without)


def test_an_outcome_keeps_no_log_probabilities_of_tokens(tmp_path: Path) -> None:
    config = CDPGConfig(
        output_dir=str(tmp_path), num_generations=8, max_completion_length=MAX_LENGTH, evaluation_samples=50,
        device="cpu", check_workers=0,
    )  # fmt: skip
    trainer = CDPGTrainer(tabular(seed=5), has_a, config, contexts_of(3), contexts_of(3))
    (block,) = trainer.evaluator.outcome("tuned", trainer.policy).blocks
    for tensor in (block.token_log_a, block.samples.token_log_q):
        assert tensor.shape == block.samples.tokens.shape
        assert tensor.untyped_storage().nbytes() == 8
    rows = torch.arange(block.b.numel())
    again = score_samples(trainer.base, block.samples, rows, 1000).sum(dim=2)
    assert torch.allclose(again, block.log_a, atol=1e-12), "it can still be scored"
