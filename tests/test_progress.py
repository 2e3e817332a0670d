"""What is shown while it trains: rarely enough, safely, and never at the run's expense."""

from __future__ import annotations

import io
import logging
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from cdpg.config import CDPGConfig
from cdpg.evaluation.plan import final_contexts
from cdpg.messages.notices import shown_notices
from cdpg.messages.text import plain_text, safe_text
from cdpg.system import memory
from cdpg.training.forecast import guessed_context, outlook, run_seconds
from cdpg.training.notices import RunNotices
from cdpg.training.progress import RunProgress

LOG = logging.getLogger("cdpg.training.trainer")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(epoch: int, **changes: Any) -> dict[str, Any]:
    values = {"satisfaction": 0.4123, "coverage": 0.875, "kl_target_policy": 3.456, "tokens": 6000, "seconds": 5.0}
    return {"epoch": epoch, **values, **changes}


def plain_lines(total: int, seconds_per_epoch: float, first: int = 1, last: int | None = None) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with RunProgress(total, Console(file=stream), clock) as progress:
        for epoch in range(first, (total if last is None else last) + 1):
            clock.now += seconds_per_epoch
            progress.update(record(epoch, seconds=seconds_per_epoch, tokens=240 * seconds_per_epoch * 5))
    return stream.getvalue().splitlines()


def epochs_of(lines: list[str]) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in lines]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(stream: io.StringIO, width: int = 160) -> Console:
    return Console(file=stream, force_terminal=True, width=width, legacy_windows=False, _environ={"TERM": "xterm"})


# --- plain lines ---


def test_a_line_says_it_all() -> None:
    assert plain_lines(1000, 5.0, last=1) == [
        "epoch 1/1000, satisfaction 0.412, coverage 0.88, rough KL(p,pi) 3.46, 1,200 tokens/s, 1h23m left"
    ]


def test_slow_epochs_get_a_line_every_twentieth_of_the_run() -> None:
    assert epochs_of(plain_lines(100, 60.0)) == [*range(1, 100, 5), 100]


def test_quick_epochs_get_a_line_every_five_seconds() -> None:
    assert epochs_of(plain_lines(100, 0.5)) == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]


def test_very_quick_runs_get_the_first_line_and_the_last() -> None:
    assert epochs_of(plain_lines(100, 0.001)) == [1, 100]
    assert epochs_of(plain_lines(1, 0.001)) == [1]


def test_a_run_that_stops_early_or_starts_late_shows_its_ends() -> None:
    assert epochs_of(plain_lines(100, 0.001, first=41, last=57)) == [41, 57]


def test_default_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_notices(True), RunProgress(2) as progress:
        progress.update(record(1))
        LOG.info("a notice")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("epoch 1/2")
    assert err.endswith("a notice\n")


@pytest.mark.parametrize("missing", [None, float("nan"), float("inf")])
def test_what_is_not_known_is_a_dash(missing: float | None) -> None:
    stream = io.StringIO()
    with RunProgress(2, Console(file=stream), Clock()) as progress:
        progress.update(record(1, kl_target_policy=missing, satisfaction=missing, seconds=0.0))
        progress.update({"epoch": 2})
    first, second = stream.getvalue().splitlines()
    assert first == "epoch 1/2, satisfaction -, coverage 0.88, rough KL(p,pi) -, - tokens/s, 1s left"
    assert second == "epoch 2/2, satisfaction -, coverage -, rough KL(p,pi) -, - tokens/s, 1s left"


def test_notices_are_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_notices(True), RunProgress(2):
        LOG.info("[red]a\x1b[2J\nlong " + "x" * 100)
    assert capsys.readouterr().err == "[red]a[2J long " + "x" * 100 + "\n"


# --- time left ---


def test_time_left_follows_the_recent_rate() -> None:
    stream, clock = io.StringIO(), Clock()
    with RunProgress(200, Console(file=stream), clock) as progress:
        for epoch in range(1, 151):
            seconds = 100.0 if epoch <= 100 else 10.0
            clock.now += seconds
            progress.update(record(epoch, seconds=seconds))
            if epoch == 1:
                assert stream.getvalue().endswith(", 5h31m left\n")  # 199 times 100 s
    assert stream.getvalue().endswith(", 8m20s left\n")  # 50 times 10 s, the slow start forgotten


def test_time_left_is_what_the_trainer_says_it_is() -> None:
    stream = io.StringIO()
    with RunProgress(10, Console(file=stream), Clock(), lambda done, epoch: 1000 * done + epoch) as progress:
        progress.update(record(3, seconds=7.0))
    assert stream.getvalue().endswith(", 50m07s left\n")


def test_something_is_left_until_the_run_is_over() -> None:
    stream = io.StringIO()
    with RunProgress(3, Console(file=stream), Clock()) as progress:
        progress.update(record(3, seconds=7.0))
        progress.stage("saving the model")
        progress.stage("final evaluation, about 3m00s")
        progress.working("final evaluation: evaluating base: 0 of 64 contexts")  # at most every 5 s
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(", 1s left")
    assert rest == ["saving the model", "final evaluation, about 3m00s"]


def test_time_left_counts_the_evaluations_to_come() -> None:
    """After the last epoch: the evaluation that follows it, then the final one, of what that has not evaluated."""
    config = CDPGConfig(epochs=10, evaluate_every=10, evaluation_contexts=64)
    assert run_seconds(config, 5.0, 2.0, held_out=200, done=10) == 2.0 * (64 + final_contexts(config, 200))
    assert final_contexts(config, 200) == 2 * (200 - 64)
    assert run_seconds(config, 5.0, 2.0, held_out=64, done=10) == 128.0
    assert run_seconds(config, 5.0, 2.0, held_out=64, done=9) == 133.0
    assert guessed_context(config, 8.0) == 8.0 / config.samples_per_epoch * config.evaluation_samples


def test_memory_is_reported_again_when_it_has_grown(monkeypatch: pytest.MonkeyPatch, notices: list[str]) -> None:
    run = RunNotices(SimpleNamespace(), 4)  # type: ignore[arg-type]
    config, watch = CDPGConfig(epochs=2), SimpleNamespace(notice=lambda threads: None)
    for peak in (1_000_000_000, 1_200_000_000, 1_300_000_000, 1_300_000_000):
        monkeypatch.setattr(memory, "peak", lambda peak=peak: {"memory": peak})
        if not notices:
            run.of_first_epoch(config, {"epoch": 1, "seconds": 1.0}, watch, (0, None))  # type: ignore[arg-type]
        else:
            run.of_memory()
    assert notices[1:] == ["in all, at most 1.3 GB of memory in use"]


def test_the_first_epoch_tells_time_and_memory() -> None:
    config = CDPGConfig(epochs=101, evaluate_every=50, evaluation_contexts=10)
    told = outlook(config, 1, 6.0, 20, 0.5, {"memory": 3_210_000_000, "GPU memory": 512_000_000})
    evaluations = 0.5 * (3 * 10 + 2 * 20)
    assert told == (
        f"an epoch takes about 6s; evaluations are {evaluations / (600 + evaluations):.0%} of the time left; "
        "at most 3.2 GB of memory, 512 MB of GPU memory in use so far"
    )
    guessed = 6.0 / config.samples_per_epoch * config.evaluation_samples * (3 * 10 + 2 * 20)
    perhaps = f"6s; evaluations are perhaps {guessed / (600 + guessed):.0%} of the time left; at most"
    assert perhaps in outlook(config, 1, 6.0, 20, None, {})
    hint = "; evaluations are 92% of the time left (evaluate_every=0 leaves out those during the run); at most"
    assert hint in outlook(config, 1, 0.03, 20, 0.5, {})
    without = config.replace(evaluate_every=0)
    assert "0.03s; evaluations are 87% of the time left; at most" in outlook(without, 1, 0.03, 20, 0.5, {})
    assert "6s; at most" in outlook(without.replace(evaluate_at_end=False), 1, 6.0, 20, None, {})
    assert "takes about 0.25s; at most" in outlook(config, 1, 0.25, 0, None, {})
    assert memory.peak()["memory"] > 10_000_000


def test_time_left_of_a_resumed_run_counts_its_own_epochs_only() -> None:
    assert plain_lines(100, 10.0, first=91, last=91)[0].endswith(", 1m30s left")


# --- in a terminal ---


def test_a_terminal_gets_one_live_line() -> None:
    stream, clock = Terminal(), Clock()
    with shown_notices(True), RunProgress(10, terminal(stream), clock) as progress:
        for epoch in range(1, 4):
            clock.now += 2.0
            progress.update(record(epoch, seconds=2.0, tokens=2400))
        LOG.warning("[bold]a notice\x1b[2J[/bold]")
    shown = stream.getvalue()
    assert "epoch 3/10, satisfaction 0.412, coverage 0.88, rough KL(p,pi) 3.46, 1,200 tokens/s, 14s left" in shown
    assert shown.count("[bold]a notice[2J[/bold]") == 1
    assert re.search(r"\r\x1b\[2K\[bold\]a notice\[2J\[/bold\]\n.*━", shown), "above the line, which is drawn again"
    assert "\x1b[2J" not in shown
    assert "━" in shown
    assert "\r\x1b[2K" in shown, "the line is drawn over"


def test_forced_colours_do_not_make_a_terminal() -> None:
    stream = io.StringIO()
    with RunProgress(10, terminal(stream)) as progress:
        progress.update(record(1))
    assert stream.getvalue().startswith("epoch 1/10")


def test_a_narrow_terminal_still_gets_one_line() -> None:
    stream = Terminal()
    with RunProgress(10, terminal(stream, width=60), Clock()) as progress:
        progress.update(record(1))
    assert "\x1b[1A" not in stream.getvalue(), "the cursor never has to go up"
    assert "epoch 1/10" in stream.getvalue()


def test_the_bar_needs_no_thread() -> None:
    before = threading.active_count()
    with RunProgress(10, terminal(Terminal())) as progress:
        progress.update(record(1))
        assert threading.active_count() == before


# --- output that fails ---


class Gone(io.StringIO):
    """A terminal that hung up, a pipe nobody reads, a log on a full disk."""

    def __init__(self, error: OSError, is_terminal: bool) -> None:
        super().__init__()
        self.error = error
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), OSError(28, "No space left on device")])
def test_a_terminal_that_hung_up_does_not_stop_the_run(error: OSError) -> None:
    assert epochs_reached(terminal(Gone(error, is_terminal=True))) == 3


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_a_stream_that_fails_does_not_stop_the_run(error: OSError) -> None:
    assert epochs_reached(Console(file=Gone(error, is_terminal=False))) == 3


def epochs_reached(console: Console) -> int:
    """How far a loop of three epochs gets."""
    epoch = 0
    with shown_notices(True), RunProgress(3, console) as progress:
        for epoch in range(1, 4):
            progress.update(record(epoch))
            LOG.info("still here")
    return epoch


def test_a_closed_stream_does_not_stop_the_run() -> None:
    stream = io.StringIO()
    with RunProgress(3, Console(file=stream)) as progress:
        stream.close()
        progress.update(record(1))
    assert stream.closed


# --- foreign text ---


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\tb\r\nc\u2028d\x85e", "a b  c d e"),
        ("\x1b]0;title\x07\x1b[31mred\x9b2J", "]0;title[31mred2J"),
        ("abc\u202edcba\u2066\u200b\ufeff", "abcdcba"),
        ("lone \ud800 surrogate", "lone  surrogate"),
        ("\x00\x08\x7f", ""),
        ("é 日本 😀", "é 日本 😀"),
    ],
)
def test_what_steers_a_terminal_is_dropped(text: str, shown: str) -> None:
    assert plain_text(text) == shown


def test_long_text_is_cut() -> None:
    assert plain_text("x" * 10, limit=10) == "x" * 10
    assert plain_text("x" * 11, limit=10) == "x" * 9 + "…"
    assert plain_text("\x00" * 10**6, limit=10) == "…"
    assert plain_text("\x00" * 50 + "abc", limit=10) == "abc"


@settings(max_examples=300, deadline=None)
@given(st.text("[]/\\ab#@ =(.)1:\x1b\n\u202e\ud800", max_size=20))
@example("x[i] = [bold]y[/bold] [link=file:///etc/passwd]z[/link] [@click=f()]")
@example("[/nothing]")
def test_rich_shows_foreign_text_as_it_stands(text: str) -> None:
    shown = Text.from_markup(f"[red]{safe_text(text)}[/red]", emoji=False)
    assert shown.plain == plain_text(text)
    assert [span.style for span in shown.spans] == ["red"]
