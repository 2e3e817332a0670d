"""Recall of the ideal model and pass@k, against enumeration."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cdpg import CDPGConfig, CDPGTrainer, Reward
from cdpg.evaluation.ideal_samples import draw_ideal_samples
from cdpg.evaluation.pass_at_k import pass_at_k
from cdpg.report import write_report
from cdpg.report.charts import to_svg
from cdpg.report.figures import figures_of
from cdpg.rollout.sampler import Sampler, Stopwatch
from enumeration import MAX_LENGTH, Universe, contexts_of, tabular
from report_runs import change_config, read_study, run_folder, write_json
from shown import figures_seen
from unpainted import is_one_of_a_kind, painted_if


def soft(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0 if "a" in text else 0.25 if "b" in text else 0.0 for text in completions]


def b_count(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(text.count("b")) for text in completions]


def trainer(folder: Path, factors: Any, **changes: Any) -> CDPGTrainer:
    config = CDPGConfig(
        output_dir=str(folder), epochs=1, contexts_per_epoch=3, num_generations=8, max_completion_length=MAX_LENGTH,
        device="cpu", check_workers=0, keep="last", evaluation_samples=8, **changes,
    )  # fmt: skip
    return CDPGTrainer(tabular(5), factors, config, contexts_of(3), contexts_of(3))


@pytest.mark.parametrize("tilted", [False, True])
def test_recall_is_the_share_of_p_that_keeps_a_tenth_of_its_probability(tmp_path: Path, tilted: bool) -> None:
    made = trainer(tmp_path, [soft, Reward(b_count, 1.0)] if tilted else soft)
    sampler = Sampler(made.base, made.base, made.judge, made.args, made.processes, policy_is_base=True)
    prompts = made.base.encode(made.eval_contexts, MAX_LENGTH)
    many = draw_ideal_samples(sampler, made.eval_contexts, prompts, 1, 0, "some", _known(sampler, made, prompts))
    other = tabular(8)
    universe = Universe.of(other, contexts_of(3))
    texts = universe.samples.texts
    b = torch.tensor([soft([], list(row)) for row in texts], dtype=torch.float64)
    tilt = torch.tensor([b_count([], list(row)) for row in texts], dtype=torch.float64) if tilted else torch.zeros(1)
    log_a, log_pi = universe.log_prob(made.base), universe.log_prob(other)
    ideal = (log_a + b.log() + tilt).softmax(dim=1)
    exact = (ideal * (log_pi.exp() >= ideal / 10)).sum(dim=1)
    found = many.figures(many.log_policy(other, 1000), made.processes, made.judge.tilt.coefficients)
    assert 0.2 < float(exact.min()) < 0.95
    assert found[1].tolist() == pytest.approx(exact.tolist(), abs=0.04)
    gain = (ideal * (log_pi - log_a)).sum(dim=1)
    assert found[0].tolist() == pytest.approx(gain.tolist(), abs=0.1)


def _known(sampler: Sampler, made: CDPGTrainer, prompts: Any) -> Any:
    drawing = replace(sampler, config=made.args.replace(num_generations=4000))
    return drawing.draw(0, made.eval_contexts, prompts, True, Stopwatch())


@pytest.mark.parametrize("count", range(6))
def test_pass_at_k_is_the_mean_over_all_choices(count: int) -> None:
    """Over every choice of k of five samples, of which some satisfy; the sixth has no verdict."""
    satisfying = np.array([[1.0] * count + [0.0] * (5 - count) + [1.0]])
    valid = np.array([[1.0] * 5 + [0.0]])
    found = pass_at_k(satisfying, valid)
    assert list(found) == [1, 2, 4]
    for k, values in found.items():
        chosen = [max(one) for one in itertools.combinations(satisfying[0, :5], k)]
        assert values[0] == pytest.approx(sum(chosen) / len(chosen))


def test_pass_at_k_needs_k_samples() -> None:
    found = pass_at_k(np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([[1.0, 1.0], [1.0, 0.0]]))
    assert found[1].tolist() == [0.5, 0.0]
    assert found[2][0] == 1.0
    assert math.isnan(found[2][1])


def test_files_and_report_have_them(tmp_path: Path) -> None:
    trainer(tmp_path, soft).train()
    found = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    assert list(found["pass_at_k"]["tuned"]) == ["1", "2", "4", "8"]
    assert 0 <= found["tuned"]["recall"]["mean"] <= 1
    with painted_if(is_one_of_a_kind):
        page = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "pass@k" in page
    assert "Diversity against precision" in page


def run_at(folder: Path, values: dict[str, float], **settings: Any) -> Path:
    """A run that ended with some figures."""
    run = change_config(run_folder(folder, epochs=4), **settings)
    evaluation = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    evaluation["tuned"] |= {
        name: {"mean": mean, "low": mean - 0.1, "high": mean + 0.2} for name, mean in values.items()
    }
    write_json(run / "evaluation.json", evaluation)
    return run


def test_figures_along_alpha(tmp_path: Path) -> None:
    """The KL is α = 0. Other divergences and methods have no place there; seeds are averaged."""
    runs = [
        run_at(tmp_path / "half", {"satisfaction": 0.7, "recall": 0.6, "gain": 0.3}, divergence="alpha", alpha=0.5),
        run_at(tmp_path / "kl", {"satisfaction": 0.5, "recall": 0.9, "gain": 0.4}, divergence="kl", alpha=0.9),
        run_at(
            tmp_path / "kl-1", {"satisfaction": 0.6, "recall": 0.8, "gain": 0.2}, divergence="kl", alpha=0.9, seed=1
        ),
        run_at(tmp_path / "tv", {"satisfaction": 0.1, "recall": 0.1, "gain": 0.1}, divergence="tv", alpha=0.2),
        run_at(tmp_path / "other", {"satisfaction": 0.2, "recall": 0.2}, divergence="alpha", alpha=0.7, method="dpg"),
    ]
    charts = {chart.name: chart for chart in figures_of(read_study(runs))}
    with figures_seen() as seen:
        for name in ("along-alpha", "gain-along-alpha"):
            to_svg(charts[name])
    shares, gain = ([line["points"] for line in figure["lines"]] for figure in seen)
    assert shares == [[[0.0, pytest.approx(0.55)], [0.5, 0.7]], [[0.0, pytest.approx(0.85)], [0.5, 0.6]]]
    assert gain == [[[0.0, pytest.approx(0.3)], [0.5, 0.3]]]
    assert (seen[0]["x"], seen[0]["y"]) == ("α", "satisfaction, recall of p")
    alone = {chart.name for chart in figures_of(read_study(runs[1:]))}
    assert not alone & {"along-alpha", "gain-along-alpha"}, "a line needs two points"
