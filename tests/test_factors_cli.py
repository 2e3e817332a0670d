"""Moments and rewards on the command line and in YAML."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
import unpainted
import warm
from cdpg.errors import UserError
from cdpg.jobs.comparison import comparison_runs
from cdpg.jobs.job import Job

CHECKS = """
def even(prompts, completions, **columns):
    return [len(c) % 2 == 0 for c in completions]

def length(prompts, completions, **columns):
    return [len(c) for c in completions]

def broken(prompts, completions, **columns):
    return [float("nan") for c in completions]
"""
OWN = ["--model", "llama", "--contexts", "contexts.csv"]
SMALL = [
    *("--set", "max_completion_length=6", "--set", "num_generations=4", "--set", "contexts_per_epoch=2"),
    *("--set", "evaluation_samples=4", "--set", "moment_contexts=8", "--epochs", "2", "--output-dir", "out"),
]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    tiny.save(tmp_path / "llama", "llama")
    (tmp_path / "contexts.csv").write_text("prompt\ntwo dogs\nthree cats and a dog\n", encoding="utf-8")
    (tmp_path / "checks.py").write_text(CHECKS, encoding="utf-8")
    return tmp_path


def cdpg(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **unpainted.IN_A_FORK}
    command = [warm.python(), "-m", "cdpg", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=180, check=False, env=environment
    )


def test_a_run_with_factors_alone_and_its_evaluation(workplace: Path) -> None:
    factors = ["--moment", "checks:even=0.6", "--reward", "checks:length=20"]
    result = cdpg(workplace, "run", *OWN, *factors, *SMALL)
    assert result.returncode == 0, result.stderr
    assert "moment even" in result.stdout
    assert "moment_even: λ = " in result.stderr
    written = yaml.safe_load((workplace / "out" / "config.yaml").read_text(encoding="utf-8"))
    assert (written["constraint"], written["moment"], written["reward"]) == (
        [],
        ["checks:even=0.6"],
        ["checks:length=20"],
    )
    report = (workplace / "out" / "report.html").read_text(encoding="utf-8")
    assert "moment even" in report and "reward length" in report
    assert "satisfies nearly always" not in report
    fits = (workplace / "out" / "moments.json").read_bytes()
    before = json.loads((workplace / "out" / "evaluation.json").read_text(encoding="utf-8"))
    again = cdpg(workplace, "evaluate", "out")
    assert again.returncode == 0, again.stderr
    assert "fitting" not in again.stderr
    after = json.loads((workplace / "out" / "evaluation.json").read_text(encoding="utf-8"))
    assert after["tuned"]["moment_even"] == before["tuned"]["moment_even"]
    assert after["tuned"]["kl_target_policy"]["mean"] == pytest.approx(before["tuned"]["kl_target_policy"]["mean"])
    longer = cdpg(workplace, "run", "--resume", "--output-dir", "out", "--epochs", "3", "--no-report")
    assert longer.returncode == 0, longer.stderr
    assert (workplace / "out" / "moments.json").read_bytes() == fits
    exact = cdpg(workplace, "sample", "out", "--context", "two dogs", "--exact", "0.3", "-n", "2", "--seed", "1")
    assert exact.returncode == 0, exact.stderr
    assert "1/Z" not in exact.stdout


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        (["--moment", "checks:even=7"], "strictly between 0 and 1 can be reached"),
        (["--reward", "checks:broken=1"], "reward checks:broken gave no number: it returned nan"),
    ],
)
def test_what_cannot_be_had_leaves_no_folder(workplace: Path, factors: list[str], words: str) -> None:
    result = cdpg(workplace, "run", *OWN, *factors, *SMALL)
    assert result.returncode != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not (workplace / "out").exists()


GIVEN: dict[str, Any] = {"model": "llama", "contexts": "contexts.csv"}


@pytest.mark.parametrize(
    "moment", ["rules:short=0.5", ["rules:short=0.5"], {"rules:short": 0.5}], ids=["text", "list", "mapping"]
)
def test_moments_in_yaml(moment: Any) -> None:
    job = Job.from_mapping({**GIVEN, "moment": moment})
    assert (job.constraint, job.moment, job.reward) == ((), ("rules:short=0.5",), ())
    assert Job.from_mapping(job.inputs()) == Job.from_mapping({**GIVEN, "moment": moment})


def test_a_comparison_refuses_methods_without_the_target_before_it_runs() -> None:
    job = Job.from_mapping({**GIVEN, "reward": "rules:short=0.5"})
    assert [run.method for run in comparison_runs(job, ["cdpg", "rft"], 1)] == ["cdpg", "rft"]
    with pytest.raises(UserError, match="whose optimum is the target, not reinforce, ziegler"):
        list(comparison_runs(job, ["cdpg", "dpg", "reinforce", "ziegler"], 1))


def test_a_task_keeps_its_constraint_unless_it_is_left_out() -> None:
    values = {"task": "code-compilability", "moment": "rules:short=0.5"}
    assert Job.from_mapping(values).constraint == ("cdpg.constraints:compiles",)
    assert Job.from_mapping({**values, "constraint": "none"}).constraint == ()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "constraint must be given"),
        ({"moment": "rules:short"}, "a moment is given as module:function=0.5"),
        ({"reward": "rules:short=0"}, "must be above 0"),
        ({"reward": 3}, "reward takes module:function=number, or a list of those"),
        ({"moment": {"rules:short": "half"}}, "a moment is given as module:function=0.5"),
    ],
)
def test_bad_values(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        Job.from_mapping({**GIVEN, **values})
    assert words in str(error.value)
