"""A run that has nothing to learn from says so while it runs and at its end, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.training.starvation import PlentyWatch, StarvationWatch
from enumeration import tabular

ALONG, AT_END = "hardly anything to learn from", "learnt next to nothing"


def warnings(coverage: list[float]) -> list[str | None]:
    watch = StarvationWatch(8)
    return [watch.warning({"coverage": value}) for value in coverage]


def test_three_epochs_with_hardly_a_satisfying_sample_are_reported_once() -> None:
    first, second, third, fourth = warnings([0.0, 0.1, 0.1, 0.0])
    assert first is None
    assert second is None
    assert third is not None
    assert "only 6.7% of the contexts of the last 3 epochs had a satisfying sample" in third
    assert "raise num_generations (now 8)" in third
    assert fourth is None


def test_a_run_that_starves_later_is_reported_then() -> None:
    found = warnings([1.0, 1.0, 0.2, 0.0, 0.0, 0.0])
    assert found[:4] == [None] * 4
    assert found[4] is not None  # (0.2 + 0 + 0) / 3


def test_enough_coverage_is_silent() -> None:
    assert warnings([0.0, 0.0, 0.31]) == [None] * 3
    watch = StarvationWatch(8)
    assert watch.verdict([{"coverage": 0.0}] * 9 + [{"coverage": 1.0}]) is None
    assert watch.verdict([]) is None


def test_the_end_looks_at_all_epochs() -> None:
    verdict = StarvationWatch(8).verdict([{"coverage": 0.0}] * 9 + [{"coverage": 0.5}])
    assert verdict is not None
    assert "only 5.0% of the contexts of its 10 epochs had a satisfying sample" in verdict
    none = StarvationWatch(8).verdict([{"coverage": 0.0}])
    assert none is not None
    assert "no context of its 1 epochs" in none


def test_a_base_that_nearly_always_satisfies_is_reported_once_enough_samples_are_seen() -> None:
    watch, told = PlentyWatch(), []
    for epoch, z in enumerate([1.0, 0.98, 1.0, 1.0], start=1):
        told.append(watch.warning({"epoch": epoch, "samples": 60, "satisfaction": z, "z_mean": z}))
    first, second, third, fourth = told
    assert (first, third, fourth) == (None, None, None)
    assert second is not None and "by epoch 2, the base satisfies the constraint in 99% of its samples" in second
    some = {"epoch": 1, "samples": 100, "satisfaction": 1.0, "z_mean": 0.98}
    assert PlentyWatch().warning(some) is None, "the policy always satisfies, the base does not"
    verdict = PlentyWatch().verdict([some | {"z_mean": 1.02}, some | {"z_mean": 0.97}])
    assert verdict is not None and "in 100% of its samples: there was nothing to gain" in verdict
    assert PlentyWatch().verdict([some]) is None and PlentyWatch().verdict([]) is None
    assert PlentyWatch().warning(some | {"z_mean": None}) is None
    broken = [some | {"z_mean": 1.0}, some | {"z_mean": None}]
    assert verdict is not None and PlentyWatch().verdict(broken) == verdict
    few = some | {"samples": 99, "z_mean": 1.0}
    assert PlentyWatch().verdict([few]) is None, "too few samples to say so"


def never(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [False] * len(completions)


def always(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [True] * len(completions)


@pytest.mark.parametrize(("constraint", "times"), [(never, 1), (always, 0)])  # starving; with nothing to gain
def test_a_python_user_sees_it_on_standard_error(
    tmp_path: Path, constraint: Any, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CDPGConfig(
        output_dir=str(tmp_path), epochs=5, contexts_per_epoch=2, num_generations=10, max_completion_length=2,
        device="cpu", check_workers=0,
    )  # fmt: skip
    CDPGTrainer(tabular(4), constraint, config, ["a", "a b"]).train()
    err = capsys.readouterr().err
    assert [err.count(ALONG), err.count(AT_END)] == [times, times]
    assert [err.count(f"there {word} nothing to gain; drop") for word in ("is", "was")] == [1 - times, 1 - times]
    assert "by epoch 5, the base satisfies the constraint in 100% of its samples" in err or times
