"""A request to stop is looked for at stated places, the same on every process; progress has no part in it."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cdpg import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.errors import Interrupted
from cdpg.evaluation.evaluator import Evaluator
from cdpg.messages.progress import LineProgress, SilentProgress
from cdpg.system.distributed import Processes
from cdpg.system.signals import StopSignal
from cdpg.system.stopping import StopCheck
from enumeration import MAX_LENGTH, contexts_of, tabular
from side_by_side import side_by_side

MANY = [Context(context.prompt, {}, row) for row, context in enumerate(contexts_of(3) * 43, start=1)][:128]
"""Two blocks of contexts."""
PLACES = [
    "evaluating base: 0 of 128 contexts",
    "evaluating base: 64 of 128 contexts",
    "evaluating tuned: 0 of 128 contexts",
    "evaluating tuned: 64 of 128 contexts",
    "comparing: tuned scores the others' samples",
]


def has_an_a(prompts: Any, completions: Any, **columns: Any) -> list[bool]:
    return ["a" in text for text in completions]


def evaluator(processes: Processes) -> Evaluator:
    config = CDPGConfig(
        evaluation_samples=4, max_completion_length=MAX_LENGTH, check_workers=0, device="cpu", gain_draws=0
    )
    return replace(Evaluator.load(tabular(5), has_an_a, MANY, config), processes=processes)


class Recorder:
    """A progress that keeps what it is given, and a signal that comes to this process at one of the places."""

    def __init__(self, stop: StopSignal, place: str | None = None) -> None:
        self.messages: list[str] = []
        self._stop, self._place = stop, place

    def working(self, message: str) -> None:
        self.messages.append(message)
        if message == self._place:
            self._stop.received = signal.SIGTERM


@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_signal_to_one_process_ends_all_at_the_same_place(place: int) -> None:
    def work(processes: Processes) -> tuple[list[str], str]:
        stop = StopSignal()
        progress = Recorder(stop, None if processes.is_main else PLACES[place])
        check = partial(StopCheck(stop, processes, "so").raise_if_stopped, "stopped here")
        with pytest.raises(Interrupted) as ended:
            evaluator(processes).evaluate({"tuned": lambda: tabular(6)}, {}, progress=progress, check_stop=check)
        assert ended.value.exit_status == 143
        return progress.messages, str(ended.value)

    assert side_by_side(2, work) == [(PLACES[: place + 1], "stopped here; continue with: so")] * 2


def test_the_places_at_which_an_evaluation_may_be_stopped() -> None:
    def work(processes: Processes) -> list[str]:
        places: list[str] = []
        progress = Recorder(StopSignal())
        check = partial(places.append, "check")
        evaluator(processes).evaluate({"tuned": lambda: tabular(6)}, {}, progress=progress, check_stop=check)
        assert progress.messages == PLACES
        return places

    assert side_by_side(2, work) == [["check"] * len(PLACES)] * 2


def test_processes_may_report_their_progress_unequally() -> None:
    """One that reports and one that does not exchange the same, and nothing hangs."""

    def work(processes: Processes) -> Any:
        progress = Recorder(StopSignal()) if processes.is_main else SilentProgress()
        return evaluator(processes).evaluate({"tuned": lambda: tabular(6)}, {}, progress=progress)

    found, nothing = side_by_side(2, work)
    assert nothing is None
    (alone,) = side_by_side(1, lambda processes: evaluator(processes).evaluate({"tuned": lambda: tabular(6)}, {}))
    assert alone is not None and found.metrics() == alone.metrics()


def test_lines_of_progress_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    LineProgress().working("evaluating\x1b[2J base")
    assert capsys.readouterr().err == "evaluating[2J base\n"


def test_output_that_fails_stops_no_evaluation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
    LineProgress().working("evaluating base")
    assert (tmp_path / "log").read_text() == ""
