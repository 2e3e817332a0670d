"""The README's code runs as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import tiny
import unpainted
import warm

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Where the hub id ``t5-small`` is a folder with a tiny model, and the run is short."""
    tiny.save(tmp_path / "t5-small", "t5")
    (tmp_path / "prompts.csv").write_text("prompt\nsummarize: two dogs\n", encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str, **environment: str) -> None:
    result = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )
    assert result.returncode == 0, result.stderr


def test_python_and_command_line_examples(workplace: Path) -> None:
    (program,) = blocks("python")
    small = "epochs=2, num_generations=2, contexts_per_epoch=1, max_completion_length=4"
    program = program.replace('output_dir="runs/short", epochs=50', f'output_dir="runs/python", {small}')
    (workplace / "program.py").write_text(program, encoding="utf-8")
    run(workplace, warm.python(), "program.py")
    assert (workplace / "runs" / "python" / "model" / "model.safetensors").is_file()

    rule = re.search(r"def short.*?\n    return .*?\n", program, re.DOTALL)
    assert rule is not None
    (workplace / "rules.py").write_text(rule[0], encoding="utf-8")
    (command,) = (block for block in blocks("sh") if "cdpg run --model" in block)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "cdpg"
    words[words.index("--epochs") + 1] = "2"
    settings = ("num_generations=2", "contexts_per_epoch=1", "max_completion_length=4")
    overrides = [word for setting in settings for word in ("--set", setting)]
    run(workplace, warm.python(), "-m", "cdpg", *words[1:], *overrides, "--no-report")
    assert (workplace / "runs" / "short" / "model" / "model.safetensors").is_file()


def test_the_two_commands_and_the_extras_are_there() -> None:
    root = Path(__file__).parents[1]
    title, sentence, *lines = [line for line in README.splitlines() if line.strip()]
    assert title == "# cdpg"
    assert sentence.endswith(".")
    first = [line.split("#")[0].split() for line in lines[:2]]
    assert first == [["make", "demo"], ["make", "test"]]
    for command in first:
        dry = subprocess.run([*command, "--dry-run"], cwd=root, capture_output=True, text=True, check=False)
        assert dry.returncode == 0, dry.stderr
        assert "pytest" in dry.stdout or "cdpg run translation-numbers" in dry.stdout
    (block,) = (block for block in blocks("sh") if "pip install" in block)
    named = set(re.findall(r"\.\[(\w+)\]", block))
    assert named
    assert named <= set(metadata.metadata("cdpg").get_all("Provides-Extra") or ())


SMALL = {
    "epochs": 1, "contexts_per_epoch": 1, "num_generations": 2, "max_completion_length": 3, "evaluation_contexts": 1,
    "evaluation_samples": 1, "evaluate_every": 1, "validation_contexts": 5, "gain_draws": 2,
}  # fmt: skip


HELD_OUT = {
    "code-compilability": "def area(width, height):\ndef close(self):\n",
    "translation-numbers": "We saw two dogs.\nThe five cats sleep.\n",
}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_commands_of_the_experiments(tmp_path: Path, whole: bool) -> None:
    """With the embedded models, as they stand, but for the size of the runs.

    The short form has one method, two held-out contexts in the place of some hundred, and no figures.
    """
    (block,) = (block for block in blocks("sh") if "cdpg tasks" in block)
    overrides = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    for task, lines in HELD_OUT.items():
        (tmp_path / f"{task}.txt").write_text(lines, encoding="utf-8")
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "cdpg"
        if not whole and "--figures" in words:
            place = words.index("--figures")
            del words[place : place + 2]
        if not whole and words[1] in ("run", "compare"):
            words += ["--eval-contexts", f"{words[2]}.txt"]
            words += ["--no-report"] if words[1] == "run" else ["--methods", "cdpg"]
        sized = words[1] in ("run", "compare", "evaluate", "check")
        painted = {} if whole else unpainted.IN_A_FORK
        run(tmp_path, warm.python(), "-m", "cdpg", *words[1:], *(overrides if sized else []), **painted)
    evaluated = json.loads((tmp_path / "runs" / "code-compilability-cdpg" / "evaluation.json").read_text())
    assert evaluated["contexts"] == (200 if whole else 2)
    assert (tmp_path / "runs" / "compare-translation-numbers" / "report.html").is_file()
    assert list((tmp_path / "figures").glob("*.pdf")) or not whole
