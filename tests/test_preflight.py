"""The preflight check: advice from figures, and the command."""

from __future__ import annotations

import math
import random
import re
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
from cdpg.cli import app
from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.evaluation.measures import TextMeasure
from cdpg.evaluation.plan import evaluated_contexts
from cdpg.jobs.job import Inputs, Job
from cdpg.preflight.advice import Advice, ProbeStatistics, advise, deviation, enough_samples, expected_kappa, kappa
from cdpg.preflight.probe import probe
from cdpg.training.forecast import Pace, context_seconds, epoch_seconds, ideal_seconds, run_seconds


def stats(hits: list[float], **changes: Any) -> ProbeStatistics:
    values: dict[str, Any] = {
        "method": "cdpg", "contexts_per_epoch": 32, "samples": 32, "z": hits, "hits": hits, "failed": 0.0,
        "failed_allowed": 0.05, "ended": 1.0, "seconds_sampling": 0.01, "seconds_constraint": 0.001, "workers": 2,
    }  # fmt: skip
    return ProbeStatistics(**(values | changes))


def only(found: list[Advice]) -> Advice:
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(("z", "samples"), [(0.006, 32), (0.3, 4), (1e-12, 64), (1.0, 3), (0.0, 5)])
def test_kappa_is_the_chance_of_one_satisfying_sample(z: float, samples: int) -> None:
    expected = 1 - (1 - z) ** samples
    assert kappa(z, samples) == pytest.approx(expected, rel=1e-3 if z == 1e-12 else 1e-12)


def test_expected_kappa_over_contexts_is_that_of_the_beta_distribution() -> None:
    alpha, beta = 0.7, 3.1
    mean, variance = alpha / (alpha + beta), alpha * beta / (alpha + beta) ** 2 / (alpha + beta + 1)
    drawn = random.Random(0)
    seen = [kappa(drawn.betavariate(alpha, beta), 8) for _ in range(40_000)]
    error = 4 * 0.5 / math.sqrt(len(seen))
    assert expected_kappa(mean, math.sqrt(variance), 8) == pytest.approx(sum(seen) / len(seen), abs=error)
    assert expected_kappa(mean, math.sqrt(variance), 1) == pytest.approx(mean)  # one sample: the mean of Z itself


def test_expected_kappa_at_the_ends() -> None:
    assert expected_kappa(0.1, 0.0, 16) == pytest.approx(kappa(0.1, 16))
    assert expected_kappa(0.25, math.sqrt(0.25 * 0.75), 1000) == pytest.approx(0.25)  # Z is 0 or 1
    assert expected_kappa(0.0, 0.0, 16) == 0.0
    assert expected_kappa(1.0, 0.0, 16) == 1.0
    assert expected_kappa(0.1, 0.05, 64) > expected_kappa(0.1, 0.05, 32) > expected_kappa(0.1, 0.2, 32)


def test_noise_is_no_deviation_between_contexts() -> None:
    drawn = random.Random(1)
    same = [sum(drawn.random() < 0.3 for _ in range(16)) / 16 for _ in range(2000)]
    assert deviation(same, 16) < 0.03
    assert deviation([0.1, 0.5] * 500, 10_000) == pytest.approx(0.2, abs=0.005)
    assert deviation([0.4], 16) == 0.0


def test_enough_is_said_with_the_figures() -> None:
    found = only(advise(stats([0.3] * 16)))
    assert found.level == "fine"
    assert "N = 32 and M = 32 suffice" in found.text
    assert "about 32 have a satisfying sample" in found.text
    assert f"{32 * 32 * 0.3:.0f} samples in all" in found.text


def test_too_few_covered_contexts_call_for_more_samples_or_other_contexts() -> None:
    seen = stats([0.0] * 12 + [1 / 32] * 4)
    assert seen.coverage == 0.25
    more = enough_samples(seen)
    assert more is not None
    assert more % 32 == 0
    assert seen.expected_coverage(more) >= 0.8 > seen.expected_coverage(more // 2)
    found = advise(seen)[0]
    assert found.level == "careful"
    assert f"Raise num_generations to {more}" in found.text
    assert "choose contexts" in found.text
    assert "loses its advantage over dpg" in found.text


def test_contexts_that_never_satisfy_are_not_covered_by_more_samples() -> None:
    seen = stats([0.0] * 12 + [1.0] * 4)
    assert enough_samples(seen) is None
    found = advise(seen)[0]
    assert found.level == "stop"
    assert "Even 4,096 samples" in found.text


def test_nothing_satisfies() -> None:
    found = only(advise(stats([0.0] * 16)))
    assert found.level == "stop"
    assert "None of 512 samples satisfies, so Z is probably below 0.0059" in found.text


def test_nothing_is_left_to_gain() -> None:
    found = only(advise(stats([1.0] * 15 + [0.9])))
    assert found.level == "careful"
    assert "99%" in found.text
    assert "little to gain" in found.text


def test_too_few_contexts_a_step() -> None:
    found = advise(stats([1 / 32] * 16, contexts_per_epoch=8))
    assert [advice.level for advice in found] == ["careful", "careful"]
    assert "contexts_per_epoch to about 13" in found[1].text
    assert only(advise(stats([0.5] * 16, contexts_per_epoch=2))).level == "fine"  # few, but all that were asked for


def test_weights_that_rest_on_few_samples_are_reported() -> None:
    found = only(advise(stats([0.75] * 16, samples=4)))
    assert found.level == "careful"
    assert "Raise num_generations to 8" in found.text
    assert only(advise(stats([0.75] * 16, samples=8))).level == "fine"


@pytest.mark.parametrize("method", ["dpg", "reinforce", "ziegler", "rft", "raft", "rloo"])
def test_advice_on_the_weights_of_cdpg_is_for_cdpg(method: str) -> None:
    assert only(advise(stats([0.75] * 16, samples=4, method=method))).level == "fine"
    found = advise(stats([0.0] * 12 + [1 / 32] * 4, method=method))[0]
    assert "a context rarely contributes. Raise num_generations" in found.text
    assert "cdpg" not in found.text


def test_a_slow_constraint() -> None:
    found = advise(stats([0.3] * 16, seconds_constraint=0.04))
    assert [advice.level for advice in found] == ["careful", "fine"]
    assert "40 ms a sample, sampling 10 ms" in found[0].text
    assert "check_workers (now 2)" in found[0].text
    assert "let workers do it" in advise(stats([0.3] * 16, seconds_constraint=0.04, workers=0))[0].text


def test_failed_checks_and_cut_samples() -> None:
    assert "the run would end" in advise(stats([0.3] * 16, failed=0.06))[0].text
    assert advise(stats([0.3] * 16, failed=0.04))[0].level == "careful"
    assert "60% of the samples were cut" in advise(stats([0.3] * 16, ended=0.4))[0].text
    assert only(advise(stats([], failed=1.0))).level == "stop"


def test_soft_scores_cover_by_any_score_above_0() -> None:
    seen = stats([1.0] * 16, z=[0.01] * 16)
    assert seen.satisfaction == pytest.approx(0.01)
    assert only(advise(seen)).level == "fine"


PACE = Pace(sampling=1.0, constraint=0.5, scoring=0.1, gradient=0.3)


def test_the_time_of_an_epoch() -> None:
    config = CDPGConfig(contexts_per_epoch=2, num_generations=5, control_variate=False, replay=0, warmup_epochs=0)

    def seconds(satisfying: float, pace: Pace = PACE, validation: int = 5, **changes: Any) -> float:
        return epoch_seconds(config.replace(**changes), pace, satisfying, validation)

    assert seconds(0.5) == pytest.approx(10 + 5 * 0.4)
    assert seconds(0.0, Pace(1.0, 4.0, 0.1, 0.3)) == pytest.approx(40)
    assert seconds(0.8, control_variate=True) == pytest.approx(10 + 8 * 0.1 + 10 * 0.3)
    assert seconds(0.5, control_variate=True) == pytest.approx(10 + 5 * 0.4), "too rare"
    replayed = 8 / 4 * 10 * 0.5 / (1 - 0.5**5)
    assert seconds(0.5, replay=8) == pytest.approx(10 + 5 * 0.4 + replayed * 0.3)
    falling = (8 + 8 + 6 + 4 + 2) / 5  # the rate falls over the last three epochs
    fewer = seconds(0.5, replay=8, epochs=5, decay_epochs=3)
    assert fewer == pytest.approx(10 + 5 * 0.4 + replayed * falling / 8 * 0.3)
    assert seconds(0.5, replay=8, validation=0) == seconds(0.5), "nothing shows whether it helps"
    assert seconds(0.0, replay=8) == pytest.approx(10)
    assert seconds(0.5, method="ziegler") == pytest.approx(10 + 10 * (0.1 + 4 * 0.3))
    assert seconds(0.5, method="raft") == pytest.approx(10 + 5 * (0.1 + 4 * 0.3))
    assert seconds(0.5, method="rft") == pytest.approx(10 + 5 * 4 * 0.3), "nothing to score"


def test_the_time_to_find_samples_of_the_ideal_model() -> None:
    config = CDPGConfig(gain_draws=32, evaluation_samples=16)
    assert ideal_seconds(config, PACE, 0.2, validation=5, held_out=10) == pytest.approx(5 * 20 + 10 * 4)
    assert ideal_seconds(config, PACE, 0.0, validation=5, held_out=10) == pytest.approx(5 * 32 + 10 * 16)
    assert ideal_seconds(config, PACE, 0.9, validation=0, held_out=10) == 0.0, "the evaluation's own samples are enough"
    never = config.replace(evaluate_every=0, evaluate_at_end=False)
    assert ideal_seconds(never, PACE, 0.2, validation=0, held_out=10) == 0.0
    assert ideal_seconds(config.replace(gain_draws=0), PACE, 0.2, validation=0, held_out=10) == 0.0


def test_the_time_of_evaluations() -> None:
    config = CDPGConfig(epochs=25, evaluate_every=10, evaluation_contexts=64, evaluation_samples=16)
    assert evaluated_contexts(config, 100) == 4 * 64 + 2 * 36  # before, after 10, 20, 25; the others of both models
    assert evaluated_contexts(config, 100, done=10) == 3 * 64 + 2 * 36, "that after epoch 10 is still to come"
    assert evaluated_contexts(config, 100, done=11) == 2 * 64 + 2 * 36
    assert evaluated_contexts(config.replace(epochs=29), 100, done=11) == 2 * 64 + 2 * 36, "no epoch 30"
    assert evaluated_contexts(config.replace(evaluation_contexts=70), 100) == 4 * 70 + 2 * 36, "whole blocks of 64"
    assert evaluated_contexts(config.replace(evaluation_contexts=63), 100) == 4 * 63 + 200
    assert evaluated_contexts(config, 5) == evaluated_contexts(config.replace(evaluate_at_end=False), 5) == 4 * 5
    assert evaluated_contexts(config.replace(evaluate_every=0), 100) == 200
    assert evaluated_contexts(config, 0) == 0
    assert context_seconds(config, PACE, beams=4) == pytest.approx(16 * 1.1 + 4)
    assert run_seconds(config, 2.0, 1.0, 5, done=24) == pytest.approx(2 + 5)


def test_the_number_of_evaluations_is_that_of_their_epochs_and_is_known_at_once() -> None:
    for epochs, interval, done in product((1, 2, 9, 10), (None, 0, 1, 3, 5, 20), (0, 1, 2, 5, 9, 10, 11)):
        config = CDPGConfig(epochs=epochs, evaluate_every=interval, evaluate_at_end=False)
        expected = sum(config.evaluates_after(epoch) for epoch in range(done, epochs + 1))
        assert evaluated_contexts(config, 1, done) == expected, (epochs, interval, done)
    since = time.process_time()
    assert evaluated_contexts(CDPGConfig(epochs=10**7, evaluate_every=10**6, evaluate_at_end=False), 1) == 11
    assert time.process_time() - since < 0.5, "it is asked after every epoch"


def even(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return [len(text) % 2 == 0 for text in completions]


def mostly(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return [place % 4 > 0 for place in range(len(completions))]


def never(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return [False for _ in completions]


def broken(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    raise ValueError("about \x1b[2J[red]x[/red]")


def checked(folder: Path, constraint: str, *more: str) -> str:
    model = tiny.save(folder / "llama", "llama")
    file = folder / "contexts.txt"
    file.write_text("two \x1b[2Jdogs\nthree cats\nthe fox\n", encoding="utf-8")
    arguments = [
        "check", "--model", str(model), "--contexts", str(file), "--constraint", f"test_preflight:{constraint}",
        "--output-dir", str(folder / "out"), "--set", "max_completion_length=6", "--set", "num_generations=8",
        "--set", "check_workers=0", "--set", "device=cpu", *more,
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert not (folder / "out").exists()
    assert "\x1b[2J" not in result.output
    assert str(folder / "out") not in result.output, "nothing is written there"
    return " ".join(result.output.split())


def test_the_command_shows_figures_samples_and_advice(tmp_path: Path) -> None:
    output = checked(tmp_path, "even", "-n", "2")
    assert "the base on 2 contexts, 8 samples each" in output
    for name in ("satisfaction", "coverage", "Ẑ of a context", "constraint, a sample", "the whole run", "memory"):
        assert name in output
    satisfying, failing = output.split("satisfying samples:")[1].split("failing samples:")
    assert satisfying.count("•") == 3
    assert failing.split("what to do")[0].count("•") == 3


def test_the_command_looks_with_the_method_of_the_run(tmp_path: Path) -> None:
    few = ("-n", "2", "--set", "num_generations=4", "--set", "contexts_per_epoch=2")
    assert "each weight of cdpg" in checked(tmp_path, "mostly", *few)
    assert "cdpg" not in checked(tmp_path, "mostly", *few, "--method", "reinforce").split("what to do")[1]


def test_a_run_on_samples_of_the_base_takes_as_long_at_its_end(tmp_path: Path) -> None:
    many = ("-n", "2", "--epochs", "100000")
    assert re.search(r"the whole run, about │ \w+ to \w+ │", checked(tmp_path, "even", *many))
    assert re.search(r"the whole run, about │ \w+ │", checked(tmp_path, "even", *many, "--method", "rft"))


def test_the_command_on_a_constraint_that_nothing_satisfies(tmp_path: Path) -> None:
    output = checked(tmp_path, "never")
    assert "satisfying samples: none" in output
    assert "None of 24 samples satisfies" in output


def test_the_command_on_a_constraint_that_raises(tmp_path: Path) -> None:
    output = checked(tmp_path, "broken")
    assert "the base on 3 contexts, 8 samples each" in output
    assert "contexts without a verdict on any sample │ 3" in output
    assert "100.0% (24 exception)" in output
    assert "test_preflight:broken raised ValueError" in output
    assert "fix the constraint first" in output


def needy(prompts: Any, completions: Any, source: Any) -> list[bool]:
    return [True] * len(completions)


@pytest.mark.parametrize("lacking", ["tuning", "held_out"])
def test_a_missing_column_is_reported_before_a_model_is_loaded(lacking: str) -> None:
    whole, bare = [Context("x", {"source": "y"}, 1)], [Context("x", {}, 1)]
    contexts = {"tuning": whole, "held_out": whole, lacking: bare}
    job = Job(model="nosuch", constraint=("test_preflight:needy",), settings=CDPGConfig(check_workers=0, device="cpu"))
    with pytest.raises(UserError, match="test_preflight:needy takes 'source'"):
        probe(job, Inputs(**contexts, constraints=[needy], measure=TextMeasure(), stop=None), 1)
