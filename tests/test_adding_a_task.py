"""A task of one's own, with a metric and counts of its own: defined here, registered, and used by every command."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny
import warm
from cdpg import constraints, tasks
from cdpg.cli import app
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.evaluation.measures import Measured, per_output
from cdpg.evaluation.metrics import Count, Metric
from cdpg.tasks import TASKS, find_task, known_metrics, register_task, unregister_task
from cdpg.tasks.base import Draw, Preset, Row, Task
from unpainted import unpainted

NAME = "toy-shouting"
LABEL, MEANING = "loudness [of the toy]", "Share of capital letters, of the toy task."
TITLE = "First letters of the toy"


def shouts(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[bool]:
    return [len(text) % 2 == 0 for text in completions]


@dataclass(frozen=True)
class Loudness:
    beams: int = 0
    metrics: Mapping[str, Metric] = field(
        default_factory=lambda: {"toy_loudness": Metric(LABEL, MEANING, "shouts", "lower", 1)}
    )
    counts: Mapping[str, Count] = field(default_factory=lambda: {"toy_letter": Count(TITLE, "letters")})

    def __call__(self, contexts: Sequence[Context], outputs: Sequence[Sequence[str]], apply: Any = None) -> Measured:
        letters = Counter(text[:1] or "none" for texts in outputs for text in texts)
        return Measured({"toy_loudness": per_output(outputs, len)}, frequencies={"toy_letter": letters})


def rows(draw: Draw) -> tuple[list[Row], list[Row]]:
    return [{"animal": "two dogs"}, {"animal": "three cats"}], [{"animal": "one dog"}, {"animal": "four cats"}]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Task]:
    """The task, known for the time of a test; the working folder is empty but for its model."""
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "llama", "llama")
    settings = {
        "epochs": 1, "contexts_per_epoch": 2, "num_generations": 4, "max_completion_length": 6,
        "evaluation_samples": 2, "device": "cpu", "check_workers": 0,
    }  # fmt: skip
    task = Task(
        name=NAME,
        summary="shout",
        constraint="test_adding_a_task:shouts",
        measure=Loudness(),
        column="animal",
        presets={"tiny": Preset("llama", rows, settings)},
        read=lambda path, column, notify: [],
    )
    register_task(task)
    yield task
    unregister_task(NAME)
    assert NAME not in TASKS


def command(*words: str) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def row_of(output: str, label: str) -> str:
    return next(line for line in output.splitlines() if label in line)


def test_a_registered_task_goes_through_every_command(toy: Task, tmp_path: Path) -> None:
    listed = command("tasks")
    assert NAME in listed
    assert "llama" in row_of(listed, NAME)
    output = command("run", NAME, "--output-dir", "run", "--no-report")
    figure = json.loads(Path("run/evaluation.json").read_text())["tuned"]["toy_loudness"]
    assert f"{figure['mean']:.1f}" in row_of(output, LABEL), "with the decimals that its entry asks for"
    card = Path("run/model/README.md").read_text()
    assert row_of(card, "| loudness \\[of the toy\\] |").endswith("| lower |")
    with unpainted():
        output = command("compare", NAME, "--methods", "cdpg,dpg", "--output-dir", "both")
        assert LABEL in output
        command("report", "both")
    assert_shown(Path("both/report.html").read_text())


def assert_shown(page: str) -> None:
    assert f"{LABEL} (shouts)" in page
    assert MEANING in page
    assert TITLE in page
    assert "Other metrics" not in page
    assert "toy_loudness</" not in page, "the label stands in its place"


def test_a_report_knows_the_metrics_from_the_files_alone(toy: Task, tmp_path: Path) -> None:
    """A process that knows nothing of the task."""
    command("run", NAME, "--output-dir", "run", "--no-report")
    program = (
        "from cdpg.report import write_report; from pathlib import Path; write_report([Path('run')], Path('r.html'))"
    )
    Path("program.py").write_text(program)
    subprocess.run([warm.python(), "program.py"], check=True, cwd=tmp_path)
    page = Path("r.html").read_text()
    assert_shown(page)
    column = page[: page.index(f"{LABEL} (shouts)")].rindex("<th")
    assert "lower" in page[column : page.index("</th>", column)]


def test_what_a_file_says_of_a_metric_is_not_trusted() -> None:
    entries = {
        "satisfaction": {"label": "mine", "better": "lower"},
        "a": {"label": "A\x1b[31m", "digits": 99, "better": "sideways", "group": "none", "of_base": "yes", "unit": 3},
        "b": {"label": ""},
        "c": "c",
    }
    known = known_metrics({"metric_info": entries})
    assert known["satisfaction"].label == "satisfaction"
    assert known["a"] == Metric("A[31m", "")
    assert "b" not in known and "c" not in known
    assert known_metrics({"metric_info": [1]}) == known_metrics({})


def test_an_older_file_is_shown_by_the_entries_of_the_tasks() -> None:
    assert known_metrics({})["bleu_masked"].label == "BLEU-4, numbers masked"
    assert known_metrics({})["pep8_violations"].better == "lower"


def test_a_name_is_registered_once(toy: Task) -> None:
    assert find_task(NAME) is toy
    with pytest.raises(UserError, match=f"there is a task {NAME!r} already"):
        register_task(toy)


def test_every_folder_of_tasks_is_found_with_its_tasks_and_constraints() -> None:
    folders = {path.parent for path in Path(tasks.__file__).parent.glob("*/task.py")}
    assert {type(task.measure).__module__.split(".")[2] for task in TASKS.values()} == {path.name for path in folders}
    for task in TASKS.values():
        module, _, name = task.constraint.partition(":")
        assert module in ("cdpg.constraints", getattr(constraints, name).__module__)
        assert callable(getattr(constraints, name))
    for name in ("Sequence", "text_check", "_IN_SOURCE", "nothing"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(constraints, name)
