"""The diagnosis of the report: each threshold from both sides, and nothing claimed that was not looked at."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdpg.evaluation.metrics import POOLED
from cdpg.report import page, write_report
from cdpg.report.diagnosis import diagnose, ratios_to_ideal
from cdpg.report.outcome_rules import (
    FAR_RATIO,
    FARTHER_RATIO,
    LESS_DIVERSE,
    LONGER,
    MIN_KL,
    SHORTER,
    diversity_lost,
    far_from_base,
    farther,
    length_changed,
    moved_away,
    needed,
    no_gain,
)
from cdpg.report.remarks import Finding, Passed, Remark, Topic, Unjudged, diagnosis_of
from cdpg.report.study import Study
from cdpg.report.training_rules import (
    DEGENERATE,
    EMPTY_SHARE,
    FEW_EFFECTIVE,
    LEAST_EPOCHS,
    LEAST_MOVE,
    LOW_COVERAGE,
    NO_COVERAGE,
    failed_checks,
    low_coverage,
    nonfinite_steps,
    nothing_learnt,
    skipped_steps,
    still_moving,
    uneven_weights,
    unfinished,
)
from cdpg.report.values import MeanInterval
from report_runs import compare_folder, read_study, run_folder, run_with_pooled, write_json, write_lines


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without their figures, which take most of the time."""
    monkeypatch.setattr(page, "to_svg", lambda chart: "<svg></svg>")


def found(remarks: Iterable[Remark]) -> Finding:
    """The one remark, which is a finding."""
    (remark,) = remarks
    assert isinstance(remark, Finding), remark
    return remark


def shown(remarks: Iterable[Remark]) -> str:
    """The figure of the one remark, which finds nothing wrong."""
    (remark,) = remarks
    assert isinstance(remark, Passed), remark
    return remark.shown


def unjudged(remarks: Iterable[Remark]) -> str:
    """Why the one thing could not be judged."""
    (remark,) = remarks
    assert isinstance(remark, Unjudged), remark
    return remark.why


def around(mean: float, half: float = 0.01) -> MeanInterval:
    return MeanInterval(mean, mean - half, mean + half)


# Rules on the training.


def test_a_run_without_satisfying_samples_has_learnt_nothing() -> None:
    at, below = round(20 * EMPTY_SHARE), round(20 * EMPTY_SHARE) - 1
    finding = found(nothing_learnt("m", [1.0] * (20 - at) + [0.0] * at))
    assert (finding.level, finding.text) == (
        "problem",
        "In 16 of 20 epochs no sample satisfied the constraint; 20.0% of the contexts of the run had a satisfying "
        "sample. There was next to nothing to learn from.",
    )
    assert all(words in finding.advice for words in ("num_generations", "relax the constraint", "a base", "leave out"))
    assert shown(nothing_learnt("m", [1.0] * (20 - below) + [0.0] * below)) == "15 of 20"
    assert found(nothing_learnt("m", [NO_COVERAGE - 0.01] * 20)).level == "problem"
    assert shown(nothing_learnt("m", [NO_COVERAGE] * 20)) == "0 of 20"
    late = [0.0] * at + [LOW_COVERAGE] * (20 - at)
    assert shown(nothing_learnt("m", late)) == "16 of 20", "it has found something at last"
    assert found(nothing_learnt("m", [*late[:-1], LOW_COVERAGE - 0.01])).level == "problem"
    assert unjudged(nothing_learnt("m", [])) == "no epochs are logged"


def test_coverage() -> None:
    problem = found(low_coverage("m", NO_COVERAGE - 0.01, 0.006, 32))
    warning = found(low_coverage("m", LOW_COVERAGE - 0.01, 0.006, 32))
    assert (problem.level, warning.level) == ("problem", "warning")
    assert "M·Z = 0.19" in problem.text and "M ≈ 500" in problem.advice
    assert found(low_coverage("m", NO_COVERAGE, 0.006, 32)).level == "warning"
    assert shown(low_coverage("m", LOW_COVERAGE, 0.5, 32)) == "50%"
    assert unjudged(low_coverage("m", None, None, None)) == "no epochs are logged"


def test_weights() -> None:
    problem = found(uneven_weights("m", "cdpg", 0.5 * (DEGENERATE - 0.01), 0.5, 1.0))
    warning = found(uneven_weights("m", "cdpg", 0.5 * (FEW_EFFECTIVE - 0.01), 0.5, 1.0))
    other = found(uneven_weights("m", "reinforce", 0.01, 0.9, 1.0))
    assert (problem.level, warning.level, other.level) == ("problem", "warning", "warning")
    assert "left the ideal model" in other.text
    assert shown(uneven_weights("m", "cdpg", 0.5 * FEW_EFFECTIVE, 0.5, 1.0)) == "35%"
    assert "no sample satisfied" in unjudged(uneven_weights("m", "cdpg", None, 0.0, 0.0))
    assert unjudged(uneven_weights("m", "cdpg", None, None, None)) == "no epochs are logged"
    # One satisfying sample of 32 in the covered half of the contexts: its weight is all there is, and that is fine.
    assert shown(uneven_weights("m", "cdpg", 1 / 32, 0.5 / 32, 0.5)) == "100%"


def test_satisfaction_that_moves_at_the_end() -> None:
    level, size = [0.5] * 90, 10
    for move, titles in (
        (1.1 * LEAST_MOVE, "Still rising when it stopped"),
        (-1.1 * LEAST_MOVE, "Falling when it stopped"),
    ):
        assert found(still_moving("m", [*level, *[0.5 + move] * size])).title == titles
    assert shown(still_moving("m", [*level, *[0.5 + 0.9 * LEAST_MOVE] * size])) == "+0.009"
    assert shown(still_moving("m", [*level, *[0.5 - 0.9 * LEAST_MOVE] * size])) == "−0.009"
    # A tenth that scatters by s has a mean with error s/√10; both tenths scatter: 2·s·√(2/10) = 0.89 s.
    noise = np.tile([-1.0, 1.0], 50) * 0.1 * np.sqrt(9 / 10)
    for rise, told in ((0.95 * 0.0894, False), (1.05 * 0.0894, True)):
        values = 0.5 + noise + rise * (np.arange(100) >= 90)
        assert isinstance(next(still_moving("m", values.tolist())), Finding) == told


def test_short_runs_are_not_asked_whether_they_had_levelled_off() -> None:
    values = [0.1 * epoch for epoch in range(LEAST_EPOCHS)]
    assert unjudged(still_moving("m", values[:-1])) == "a run of 19 epochs is too short: 20 are needed"
    assert found(still_moving("m", values)).title == "Still rising when it stopped"
    assert unjudged(still_moving("m", values, of_base=True)).startswith("its training samples are the base's")


def test_failed_checks() -> None:
    assert found(failed_checks("m", 11, 1000)).text == "The check failed on 1.1% of the samples, which were left out."
    assert shown(failed_checks("m", 10, 1000)) == "1.0%"
    assert unjudged(failed_checks("m", 0, 0)) == "no epochs are logged"


def test_unfinished_and_lost_steps() -> None:
    assert found(unfinished("m", 39, 40)).title == "Not finished"
    assert shown(unfinished("m", 40, 40)) == "40 of 40"
    assert "no epochs" in unjudged(unfinished("m", 0, 40)) and "configuration" in unjudged(unfinished("m", 40, None))
    assert found(nonfinite_steps("m", 100, 1)).title == "Gradients not finite"
    assert found(skipped_steps("m", 100, 21)).title == "Steps without a sample"
    assert (shown(nonfinite_steps("m", 100, 0)), shown(skipped_steps("m", 100, 20))) == ("0 of 100", "20%")
    assert unjudged(nonfinite_steps("m", 0, 0)) == unjudged(skipped_steps("m", 0, 0)) == "no epochs are logged"


# Rules on what came out.


def test_satisfaction_that_did_not_rise() -> None:
    before = around(0.75)
    assert shown(no_gain("m", before, MeanInterval(0.1, 0.001, 0.2))) == "0.750 → 0.850"
    chance = found(no_gain("m", before, MeanInterval(0.1, 0.0, 0.2)))
    assert (chance.level, chance.text) == ("warning", "0.750 → 0.850: +0.100 [+0.000, +0.200], paired by context.")
    fell = found(no_gain("m", before, MeanInterval(-0.1, -0.2, -0.001)))
    assert (fell.level, fell.title) == ("problem", "Satisfies less often than the base")
    assert fell.text == "0.750 → 0.650: −0.100 [−0.200, −0.001], paired by context."
    assert found(no_gain("m", before, MeanInterval(-0.1, -0.2, 0.0))).level == "warning"
    assert shown(no_gain("m", before, MeanInterval(0.1))) == "0.750 → 0.850"
    assert found(no_gain("m", before, MeanInterval(0.0))).text == "0.750 → 0.750: +0.000."
    assert "no evaluation has it" in unjudged(no_gain("m", before, None))
    full = found(no_gain("m", around(1.0), MeanInterval(0.0, 0.0, 0.0)))
    assert (full.level, full.title) == ("warning", "Nothing to gain: the base satisfies nearly always")
    assert "epochs" not in full.advice
    assert found(no_gain("m", around(0.98), MeanInterval(0.0, 0.0, 0.0))).title.startswith("No gain")
    assert found(no_gain("m", around(1.0), MeanInterval(-0.5, -0.6, -0.4))).level == "problem"


def test_a_distance_from_the_ideal_model_that_rose() -> None:
    base, tuned = around(1.35), around(1.76)
    sure = found(farther("m", "cdpg", base, tuned, MeanInterval(0.41, 0.001, 0.8)))
    assert (sure.level, sure.title) == ("problem", "Farther from the ideal model than the base")
    assert sure.text == (
        "The pooled KL(p, π) did not fall (+0.41, interval [+0.001, +0.8], paired by context): 1.35 → 1.76 nats."
    )
    perhaps = found(farther("m", "cdpg", base, tuned, MeanInterval(0.41, -0.1, 0.9)))
    assert (perhaps.level, perhaps.title) == ("warning", "No nearer to the ideal model than the base")
    assert "[−0.1, +0.9]" in perhaps.text and "Chance may explain it" in perhaps.advice
    assert "no interval" in found(farther("m", "cdpg", base, tuned, None)).text
    level = found(farther("m", "cdpg", around(1.0), around(1.08), MeanInterval(0.08, -0.3, 0.5)))
    assert level.text == (
        "The pooled KL(p, π) did not fall (+0.08, interval [−0.3, +0.5], paired by context): 1 → 1.08 nats."
    )
    below_zero = found(farther("m", "cdpg", MeanInterval(-0.01), MeanInterval(0.02), None))  # an estimate may be
    assert below_zero.text.endswith("−0.01 → 0.02 nats.")
    assert found(farther("m", "cdpg", base, base, MeanInterval(0.0, -0.1, 0.1))).level == "warning"
    assert shown(farther("m", "cdpg", base, around(1.34), MeanInterval(-0.01, -0.2, 0.2))) == "1.35 → 1.34 nats"
    assert shown(farther("m", "cdpg", MeanInterval(0.0), MeanInterval(0.0), None)) == "0 → 0 nats"
    assert found(farther("m", "cdpg", base, around(1.36), MeanInterval(0.01, 0.001, 0.02))).level == "problem"
    assert shown(farther("m", "cdpg", base, around(1.2), MeanInterval(-0.15, -0.2, -0.1))) == "1.35 → 1.2 nats"
    assert "no evaluation has it" in unjudged(farther("m", "cdpg", base, None, None))
    assert (
        "Nothing in reinforce aims" in found(farther("m", "reinforce", base, tuned, MeanInterval(0.4, 0.1, 0.8))).advice
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_mixture_of_base_and_ideal_model_costs_no_more_than_is_said(seed: int) -> None:
    """By enumeration: 30 contexts, 3 of which nothing satisfies, 6 outcomes each."""
    rng = np.random.default_rng(seed)
    base = rng.dirichlet(np.ones(6), 30)
    b = np.tile(np.array([1, 0, 0, 1, 0, 0], dtype=float), (30, 1))
    b[:3] = 0
    z = (base * b).sum(1)
    covered = z > 0
    ideal = np.where(covered[:, None], base * b / np.where(covered, z, 1)[:, None], base)
    distance = float(-np.log(z[covered]).mean())
    for share in (0.1, 0.5, 0.9, 1.0):
        mixture = (1 - share) * base + share * ideal
        cost = float((mixture * np.log(mixture / base, where=mixture > 0, out=np.zeros_like(base))).sum(1).mean())
        gain = float((mixture * b).sum(1).mean() - z.mean())
        said = needed(gain, float(z.mean()), float(covered.mean()), distance)
        assert cost <= said + 1e-12
        assert said == pytest.approx(share * covered.mean() * distance)
    assert cost == pytest.approx(said), "the ideal model itself costs just that"


def test_a_distance_from_the_base_that_is_large_for_what_was_gained() -> None:
    before, gain, distance = around(0.4), MeanInterval(0.2, 0.1, 0.3), around(0.9)
    most = 0.3 / 0.6 * 0.9  # of the upper end of the gain, everything covered

    def rule(spent: float, method: str = "cdpg") -> Iterator[Remark]:
        return far_from_base("m", method, MeanInterval(spent + 0.1, spent, spent + 0.2), distance, before, gain, 1.0)

    finding = found(rule(1.01 * FAR_RATIO * most))
    assert (finding.level, finding.title) == ("problem", "Far from the base for what was gained")
    assert "from 0.400 to 0.600 at a KL(π, a) of 1.46 nats" in finding.text and "at most 0.3." in finding.text
    near = found(rule(0.99 * FAR_RATIO * most))
    assert (near.level, near.title) == ("warning", "Farther from the base than the gain needs")
    assert near.text.endswith("costs at most 0.3. The interval of KL(π, a) is [1.34, 1.54].")

    def within(spent: float, wanted: float) -> Iterator[Remark]:
        gain = MeanInterval(0.6, 0.5, 0.7)
        return far_from_base("m", "cdpg", MeanInterval(spent, 0.1, 9.0), around(wanted), before, gain, 1.0)

    assert found(within(1.07, 0.65)).level == "warning", "though chance may explain it"
    assert shown(within(0.99 * FARTHER_RATIO * 0.65, 0.65)) == "0.965 nats where 0.65 would do"
    assert "compare with cdpg" in found(rule(9, "ziegler")).advice


def test_a_small_distance_from_the_base_is_fine_whatever_was_gained() -> None:
    nothing = MeanInterval(-0.01, -0.02, 0.0)

    def rule(spent: float) -> Iterator[Remark]:
        return far_from_base("m", "cdpg", MeanInterval(spent), around(0.9), around(0.4), nothing, 1.0)

    assert shown(rule(MIN_KL)) == "0.5 nats where 0 would do"
    assert "Satisfaction went from 0.400 to 0.390" in found(rule(1.01 * MIN_KL)).text
    assert "no evaluation has it" in unjudged(far_from_base("m", "cdpg", None, None, None, None, None))


def test_a_distance_that_was_smaller_on_the_way() -> None:
    way = [(1.0, around(0.8)), (2.0, around(0.3)), (3.0, around(0.5))]
    finding = found(moved_away("m", way, around(0.9), worse=False))
    assert (finding.level, finding.text) == ("warning", "KL(p, π) was 0.3 nats at epoch 2 and is 0.5 at the end.")
    above = found(moved_away("m", [*way, (4.0, around(1.2))], around(0.9), worse=True))
    assert above.level == "problem" and above.text.endswith("is 1.2 at the end, above the base's 0.9.")
    assert shown(moved_away("m", [*way, (4.0, around(0.319))], None, worse=False)) == "0.319 nats, at best 0.3"
    assert found(moved_away("m", [*way, (4.0, around(0.321))], None, worse=False)).level == "warning"
    assert "fewer than two" in unjudged(moved_away("m", [(0.0, around(0.1)), (1.0, around(1.0))], None, worse=True))
    assert "no intervals" in unjudged(
        moved_away("m", [(1.0, MeanInterval(0.3)), (2.0, MeanInterval(0.5))], None, worse=True)
    )
    chosen = found(moved_away("m", way, around(0.9), worse=False, kept=3.0))
    assert chosen.text.endswith("and is 0.5 at epoch 3, by the model of epoch 3 that is kept.")
    assert (finding.advice, chosen.advice) == (
        "Stop earlier or lower learning_rate.", "Lower learning_rate, and read the samples."
    )  # fmt: skip


def test_collapse() -> None:
    for ratio, word in ((SHORTER - 0.01, "shorter"), (LONGER + 0.01, "longer")):
        finding = found(length_changed("m", ratio, 1.0, "base"))
        assert finding.title == f"Collapsed: outputs became {word}"
        assert finding.text == f"Outputs are {ratio:.2f} times as long as those of the base."
    assert [shown(length_changed("m", ratio, 1.0, "base")) for ratio in (SHORTER, LONGER)] == [
        "0.60 of the base’s",
        "1.60 of the base’s",
    ]
    assert found(diversity_lost("m", LESS_DIVERSE - 0.01, 1.0, "base")).title == "Collapsed: diversity was lost"
    assert shown(diversity_lost("m", LESS_DIVERSE, 1.0, "ideal model")) == "0.85 of the ideal model’s"
    assert "no evaluation has it" in unjudged(length_changed("m", None, 1.0, "base"))
    assert "no evaluation has it" in unjudged(diversity_lost("m", None, 1.0, "base"))


def test_outputs_that_were_so_before_tuning_have_not_collapsed() -> None:
    def length(ratio: float, base: float) -> Iterator[Remark]:
        return length_changed("m", ratio, base, "ideal model")

    assert shown(length(1.80, 1.79)) == "still 1.80 times the ideal model’s (base 1.79)"
    assert shown(length(1.70, 2.50)) == "still 1.70 times the ideal model’s (base 2.50)", "it came nearer"
    assert shown(length(0.50, 0.52)) == "still 0.50 times the ideal model’s (base 0.52)"
    assert [shown(length(ratio, 2.0))[:10] for ratio in (2.19, 1.61)] == ["still 2.19", "still 1.61"]
    longer = found(length(2.21, 2.0))
    assert longer.title == "Collapsed: outputs became longer"
    assert longer.text == "Outputs are 2.21 times as long as those of the ideal model (base 2.00)."
    assert shown(length(0.46, 0.5))[:10] == "still 0.46"
    for ratio, base in ((0.44, 0.5), (0.55, 2.0), (0.59, 1.0)):
        assert found(length(ratio, base)).title == "Collapsed: outputs became shorter"
    assert found(length(1.7, 0.5)).title == "Collapsed: outputs became longer"
    assert shown(diversity_lost("m", 0.77, 0.8, "ideal model")) == "still 0.77 times the ideal model’s (base 0.80)"
    assert "(base 0.80): outputs repeat themselves" in found(diversity_lost("m", 0.75, 0.8, "ideal model")).text


def test_outputs_are_measured_by_the_ideal_model_where_it_is_known() -> None:
    models = {"base": {"length": {"mean": 10.0}}, "cdpg": {"length": {"mean": 5.0}}}
    study = Study(None, (), {"models": models}, ())
    assert ratios_to_ideal(study, "cdpg", "length") == (0.5, 1.0, "base")
    versus = {"cdpg": {"length": {"mean": 1.0}}, "base": {"length": {"mean": 2.0}}}

    def ratios(versus: dict[str, Any], bases: dict[str, str]) -> tuple[float | None, float, str]:
        return ratios_to_ideal(Study(None, (), {"models": models, "versus_ideal": versus}, (), bases), "cdpg", "length")

    assert ratios(versus, {}) == (1.0, 2.0, "ideal model")
    assert ratios({**versus, "own": {"length": {"mean": 3.0}}}, {"cdpg": "own"}) == (1.0, 3.0, "ideal model")
    assert ratios({"cdpg": versus["cdpg"]}, {}) == (0.5, 1.0, "base"), "nothing is known of how the base was"


def test_remarks_are_listed_by_topic() -> None:
    one, two = Topic("one", "above 1"), Topic("two", "any")
    remarks = [
        Passed("a", one, "0"), Passed("b", one, "0.5"), Unjudged("a", two, "too short"),
        Unjudged("a", one, "lost"), Unjudged("b", one, "lost"),
        Finding("warning", "a", "W", ""), Finding("problem", "b", "P", ""), Finding("warning", "b", "U", "", "", 1),
    ]  # fmt: skip
    made = diagnosis_of(remarks, ["a", "b"])
    assert [(line.name, line.shown, line.limit) for line in made.passed] == [("one", "a 0, b 0.5", "above 1")]
    assert made.unjudged == (("too short", "two (a)"), ("lost", "one"))
    assert [finding.title for finding in made.findings] == ["U", "P", "W"]
    assert ([f.title for f in made.urgent], [f.title for f in made.others]) == (["U"], ["P", "W"])
    same = diagnosis_of([Passed("a", one, "0"), Passed("b", one, "0")], ["a", "b"])
    assert same.passed[0].shown == "0"


# Whole runs.


def _of_distance(run: Path) -> list[tuple[str, str, str]]:
    """Level, title and figures of what is said of KL(p, π), the most urgent first."""
    said = [f for f in diagnose(read_study([run])).findings if "ideal model" in f.title]
    return [(f.level, f.title.split(" the ideal")[0], f.text.replace("KL(p, π) was ", "")) for f in said]


@pytest.mark.parametrize("base", [0.9, None])
def test_an_improving_run_is_not_called_worse_than_the_base(base: float | None, tmp_path: Path) -> None:
    """What the base alone was once given is capped at log M, and below what any pool shows later."""
    assert _of_distance(run_with_pooled(tmp_path / "run", base, [0.8, 0.6, 0.4], (0.95, 0.45))) == []
    assert _of_distance(run_with_pooled(tmp_path / "back", base, [0.8, 0.3, 0.5], (0.95, 0.55))) == [
        ("warning", "Moved away from", "0.3 nats at epoch 2 and is 0.5 at the end.")
    ]


def test_a_run_is_worse_than_the_base_by_the_same_pool(tmp_path: Path) -> None:
    for name, base, end in (("new", 0.9, ", above the base's 0.9."), ("old", None, ".")):
        run = run_with_pooled(tmp_path / name, base, [0.8, 0.7, 1.2], (0.95, 1.25))
        first, second = _of_distance(run)
        assert first[:2] == ("problem", "Farther from") and "0.95 → 1.25 nats." in first[2]
        assert second == ("problem", "Moved away from", f"0.7 nats at epoch 2 and is 1.2 at the end{end}")


def test_without_a_final_evaluation_the_last_along_the_run_speaks(tmp_path: Path) -> None:
    run = run_with_pooled(tmp_path / "run", 0.9, [1.2, 1.2], (0.9, 1.2))
    (run / "evaluation.json").unlink()
    ((level, title, text),) = _of_distance(run)
    assert (level, title) == ("warning", "No nearer to")
    assert text == (
        "The pooled KL(p, π) at the last evaluation of the run did not fall (there is no interval of the difference): "
        "0.9 → 1.2 nats."
    )


def test_two_points_say_nothing_of_a_way(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=20)
    far = {"mean": 1.0, "low": 0.9, "high": 1.1}
    near = {"mean": 0.1, "low": 0.0, "high": 0.2}
    records = [{"epoch": epoch, "metrics": {"kl_target_policy": value}} for epoch, value in enumerate((near, far, far))]
    write_lines(run / "evaluations.jsonl", records[:2])
    assert _of_distance(run) == []
    write_lines(run / "evaluations.jsonl", records)
    assert _of_distance(run) == [("problem", "Moved away from", "0.1 nats at epoch 0 and is 1 at the end.")]


def _page(run: Path) -> str:
    return write_report([run], run / "report.html").read_text(encoding="utf-8")


def test_a_short_run_that_moved_away_is_reported_first_and_not_called_level(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=10)
    content = json.loads((run / "evaluation.json").read_text())
    content["base"][POOLED] = {"mean": 1.35, "low": 1.1, "high": 1.6}
    content["tuned"][POOLED] = {"mean": 1.76, "low": 1.4, "high": 2.1}
    content["changes"]["tuned"][POOLED] = {"difference": {"mean": 0.41, "low": 0.12, "high": 0.7}}
    write_json(run / "evaluation.json", content)
    made = diagnose(read_study([run]))
    assert made.findings[0].title == "Farther from the ideal model than the base"
    assert dict(made.unjudged)["a run of 10 epochs is too short: 20 are needed"].startswith("change of satisfaction")
    text = _page(run)
    assert text.index("1.35 → 1.76 nats") < text.index('class="cards"') < text.index(">Diagnosis<")
    assert "levelled off" not in text and "stands out" not in text


def test_the_model_that_was_chosen_is_named_and_judged(tmp_path: Path) -> None:
    """The last epochs moved away from the ideal model, and the model of epoch 3 is kept."""
    run = run_with_pooled(tmp_path / "run", 1.0, [0.8, 0.5, 0.3, 0.9, 1.2], (1.0, 0.3))
    assert "Moved away from the ideal model" in [finding.title for finding in diagnose(read_study([run])).findings]
    write_json(run / "kept.json", {"keep": "best", "epoch": 3, "gain_validation": 0.7})
    content = json.loads((run / "evaluation.json").read_text())
    content["tuned"]["gain"] = {"mean": -0.25, "low": -0.5, "high": 0.125}
    write_json(run / "evaluation.json", {**content, "contexts": 500, "contexts_with_gain": 114})
    made = diagnose(read_study([run]))
    assert "Moved away from the ideal model" not in [finding.title for finding in made.findings]
    assert "0.3 nats, at best 0.3" in str(made.passed)
    text = _page(run)
    assert "of epoch 3, chosen by the gain on validation contexts" in text
    assert "0.25 nats farther from the ideal model [−0.50, 0.12]" in text
    assert "The gain is that of 114 of the 500 contexts, those with a sample of the ideal model." in text
    write_json(run / "kept.json", {"keep": "last", "epoch": 20, "gain_validation": 0.7})
    assert "chosen by the gain" not in _page(run)


def test_who_keeps_the_best_model_need_not_stop_earlier() -> None:
    base, tuned, change = around(1.35), around(1.76), MeanInterval(0.41, 0.1, 0.8)
    plain, chosen = (found(farther("m", "cdpg", base, tuned, change, chosen=best)).advice for best in (False, True))
    assert plain.endswith("or stop earlier.")
    assert chosen == "Lower learning_rate, or take more samples a step (num_generations, contexts_per_epoch)."
    falling = [0.9] * 90 + [0.5] * 10
    advice = [found(still_moving("m", falling, chosen=best)).advice for best in (False, True)]
    assert advice == ["Stop earlier, or lower learning_rate.", "Lower learning_rate."]


def test_a_run_that_learnt_nothing_is_reported_first(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=10)
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    nothing = {"coverage": 0.0, "satisfaction": 0.0, "ess": None, "steps": 0, "steps_skipped": 1}
    write_lines(run / "metrics.jsonl", [record | (nothing if record["epoch"] != 4 else {}) for record in records])
    made = diagnose(read_study([run]))
    titles = [finding.title for finding in made.findings]
    assert titles[0] == "Next to nothing was learnt"
    assert not {"Coverage too low to learn", "Steps without a sample"} & {*titles}, "said already"
    assert "satisfaction, base → tuned" not in {line.name for line in made.passed}
    text = _page(run)
    assert text.index("In 9 of 10 epochs no sample satisfied") < text.index('class="cards"')


def test_what_could_not_be_judged_is_said(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=3)
    for file in ("evaluation.json", "evaluations.jsonl", "metrics.jsonl"):
        (run / file).unlink()
    made = diagnose(read_study([run]))
    assert (made.findings, made.passed) == ((), ())
    reasons = dict(made.unjudged)
    assert "coverage at the end" in reasons["no epochs are logged"]
    assert "pooled KL(p, π)" in reasons["no evaluation has it for base and tuned model"]
    assert "Nothing could be judged." in _page(run)


def test_an_evaluation_without_a_satisfying_sample_is_not_said_to_be_missing(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=20)
    content = json.loads((run / "evaluation.json").read_text())
    for model in ("base", "tuned"):
        content[model][POOLED] = dict.fromkeys(("mean", "low", "high"))
    del content["changes"]["tuned"][POOLED]
    write_json(run / "evaluation.json", content)
    write_lines(run / "evaluations.jsonl", [{"epoch": epoch, "metrics": {}} for epoch in range(5)])
    reasons = dict(diagnose(read_study([run])).unjudged)
    both = "pooled KL(p, π), base → tuned, KL(π, a) for what was gained"
    assert reasons["no evaluation has it for base and tuned model"] == both
    assert reasons["fewer than two evaluations during the run have it"] == "KL(p, π) during the run"


def test_a_sound_run_lists_all_that_was_looked_at(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=100)
    made = diagnose(read_study([run]))
    assert (made.findings, made.unjudged) == ((), ())
    lines = {line.name: line.shown for line in made.passed}
    assert len(lines) == 14
    assert lines["epochs done"] == "100 of 100" and lines["pooled KL(p, π), base → tuned"] == "0.622 → 0.311 nats"
    text = _page(run)
    assert "The checks listed below found no problem." in text and "Could not be judged" not in text


def test_the_price_of_a_soft_constraint_is_not_judged(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", epochs=20)
    write_lines(run / "samples.jsonl", [{"epoch": 20, "prompt": "x", "completion": "y", "b": 0.5}])
    reasons = dict(diagnose(read_study([run])).unjudged)
    why = "the constraint gives values between 0 and 1, and the rule is for yes or no"
    assert reasons[why] == "KL(π, a) for what was gained"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compare_folder(tmp_path_factory.mktemp("compare") / "code", epochs=60)


def test_what_is_said_of_the_four_methods(compared: Path) -> None:
    made = diagnose(read_study([compared]))
    said = {(finding.model, finding.title) for finding in made.findings}
    assert {finding.model for finding in made.urgent} == {"reinforce", "ziegler"}
    assert ("reinforce", "Far from the base for what was gained") in said
    assert ("reinforce", "Farther from the ideal model than the base") in said
    assert ("reinforce", "Collapsed: outputs became shorter") in said
    assert ("reinforce", "Weights are degenerate") in said
    assert ("dpg", "Moved away from the ideal model") in said
    assert not any(model == "cdpg" and title != "Still rising when it stopped" for model, title in said)


def test_pooled_figures_of_a_run_are_judged_where_tables_leave_them_out(tmp_path: Path) -> None:
    """Two runs with pools of their own: each is judged by its own."""
    runs = [run_folder(tmp_path / name, name, epochs=20) for name in ("cdpg", "reinforce")]
    content: dict[str, Any] = json.loads((runs[1] / "evaluation.json").read_text())
    content["base"][POOLED]["mean"] += 0.01
    write_json(runs[1] / "evaluation.json", content)
    study = read_study(runs)
    assert POOLED not in study.metrics
    assert [finding.model for finding in diagnose(study).urgent] == ["reinforce", "reinforce"]
