"""The command, as a user types it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tiny
import unpainted
import warm
from cdpg.cli import app, completion, main
from cdpg.cli.options import SYNONYMS
from cdpg.cli.output import finish_run
from cdpg.cli.tables import print_models
from cdpg.constraints.named import load_constraint
from cdpg.errors import UserError
from cdpg.jobs import comparison
from cdpg.jobs.job import Inputs, Job, gather
from cdpg.storage.json_files import write_json, write_yaml
from cdpg.storage.jsonl import JsonlFile, read_jsonl
from cdpg.storage.run_folder import RunFolder
from noticed import noticed

CONSTRAINT = "def even(prompts, completions, **columns):\n    return [len(c) % 2 == 0 for c in completions]\n"
SMALL = ["--set", "max_completion_length=6", "--set", "num_generations=4", "--set", "contexts_per_epoch=2"]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    tiny.save(tmp_path / "llama", "llama")
    (tmp_path / "contexts.csv").write_text("source,note\ntwo dogs,1\nthree cats and a dog,2\n", encoding="utf-8")
    (tmp_path / "checks.py").write_text(CONSTRAINT, encoding="utf-8")
    return tmp_path


def cdpg(
    folder: Path, *arguments: str, timeout: float = 120, python: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python or warm.python(), "-m", "cdpg", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )


OWN = ["--model", "llama", "--contexts", "contexts.csv", "--constraint", "checks:even", "--prompt-column", "source"]


def test_run_and_sample(workplace: Path) -> None:
    result = cdpg(workplace, "run", *OWN, *SMALL, "--epochs", "3", "--output-dir", "out", "--no-report")
    assert result.returncode == 0, result.stderr
    assert "cdpg on llama: 2 contexts, 3 epochs of 2 contexts × 4 samples" in result.stderr
    assert "epoch 3/3" in result.stderr
    assert re.search(r"an epoch takes about .*; at most .* of memory", result.stderr)
    assert "cdpg sample out" in result.stdout
    assert [record["epoch"] for record in read_jsonl(workplace / "out" / "metrics.jsonl")] == [1, 2, 3]
    again = cdpg(workplace, "run", "out/config.yaml", "--output-dir", "again", "--no-report")
    assert again.returncode == 0, again.stderr
    assert (workplace / "again" / "samples.jsonl").read_bytes() == (workplace / "out" / "samples.jsonl").read_bytes()
    sampled = cdpg(workplace, "sample", "out", "--context", "two dogs", "-n", "2")
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.count("log-probability") == 2


def test_run_from_a_file(workplace: Path) -> None:
    (workplace / "job.yaml").write_text(
        "model: llama\ncontexts: contexts.csv\nprompt_column: source\nconstraint: checks:even\nmethod: reinforce\n"
        "epochs: 9\nmax_completion_length: 6\nnum_generations: 4\ncontexts_per_epoch: 2\noutput_dir: out\n",
        encoding="utf-8",
    )
    result = cdpg(workplace, "run", "job.yaml", "--epochs", "1", "--no-report")
    assert result.returncode == 0, result.stderr
    assert "reinforce on llama" in result.stderr
    assert "method: reinforce" in (workplace / "out" / "config.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", *OWN, "--set", "num_train_epochs=3"], "unknown setting 'num_train_epochs': use epochs"),
        (["run", *OWN, "--set", "learning_rte=3"], "did you mean 'learning_rate'"),
        (["run", "--model", "llama"], "contexts, constraint must be given"),
        (["run", "nowhere.yaml"], "'nowhere.yaml' does not exist: expected a task's name"),
        (
            ["run", "contexts.csv"],
            "'contexts.csv' is a file of contexts by its name: give it with --contexts; expected",
        ),
        (["run", *OWN[:4], "--constraint", "checks:odd"], "'checks' has no function 'odd'; it has even"),
        (["run", *OWN[:4], "--constraint", "nochecks:odd"], "there is no module 'nochecks'"),
        (["run", *OWN[:4], "--constraint", "checks:Evn"], "'checks' has no function 'Evn'; did you mean 'even'?"),
        (["run", *OWN[:4], "--constraint", "cheks:even"], "or an installed module; did you mean 'checks'?"),
        (["run", "code-pep8", "--preset", "papr"], "there is no preset 'papr'; did you mean 'paper'?"),
        (["run", "code-pep8", "--preset", "huge"], "there is no preset 'huge'; code-pep8 has tiny, paper"),
        (["run", *OWN, "--set", "report_to=wanbd"], "names 'wanbd', which is not a tracker: did you mean 'wandb'?"),
        (["report", "lama"], "'lama' is not a folder: expected one that cdpg run or cdpg compare wrote; did you mean "),
        (["run", *OWN[:4], "--constraint", "checks"], "module:function"),
        (["run", *OWN[:2], "--contexts", "none.csv", *OWN[4:]], "none.csv"),
        (["run", *OWN[:6]], "source"),
        (["run", "--model", "nosuch", *OWN[2:]], "cannot load the model 'nosuch'"),
        (["run", *OWN], "max_completion_length is 128, but the model's window is 128"),
        (["sample", "nosuch", "--context", "x"], "cannot load the model 'nosuch': the hub cannot be reached"),
        (["sample", "a/b/c", "--context", "x"], "there is no such folder, and it cannot be a hub id; give a folder, a"),
        (["sample", "code-tinyy", "--context", "x"], "did you mean 'code-tiny', which comes with the package?"),
        (["run", "--model", "t5_tiny", *OWN[2:]], "there is no model 't5_tiny': did you mean 't5-tiny'"),
        (["train", *OWN], "there is no command 'train': did you mean 'cdpg run'?"),
        (["generate", "code-tiny"], "there is no command 'generate': did you mean 'cdpg sample'?"),
        (["evalute", "code-tiny"], "there is no command 'evalute': did you mean 'cdpg evaluate'?"),
        (["colour"], "there is no command 'colour': cdpg --help lists the commands"),
    ],
)
def test_mistakes_exit_with_2_and_one_sentence(
    workplace: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "checks", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    sys.modules.pop("checks", None)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (workplace / "runs").exists()


def test_a_constraint_that_raises_ends_the_run_with_1_and_its_line(workplace: Path) -> None:
    (workplace / "checks.py").write_text("def even(prompts, completions):\n    return 1 / 0\n", encoding="utf-8")
    result = cdpg(workplace, "run", *OWN, *SMALL)
    assert result.returncode == 1, result.stderr
    assert "checks:even raised ZeroDivisionError" in result.stderr
    assert "line 2" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_second_run_in_the_same_folder_continues_or_replaces_the_first(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = [*OWN, *SMALL, "--output-dir", "out", "--no-report", "--set", "evaluate_at_end=false"]
    usual += ["--set", "max_completion_length=2", "--set", "check_workers=0"]

    def run(*options: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            main(["run", *usual, *options])
        return ended.value.code, capsys.readouterr().err

    def epochs() -> list[int]:
        return [record["epoch"] for record in read_jsonl(workplace / "out" / "metrics.jsonl")]

    monkeypatch.chdir(workplace)
    assert run("--epochs", "10")[0] == 0
    refused, told = run("--epochs", "10")
    assert refused == 2
    assert "continue it with --resume, replace it with --overwrite, or choose another folder with --output-dir" in told
    continued, told = run("--epochs", "20", "--resume", "--overwrite")
    assert continued == 0, told
    assert epochs() == list(range(1, 21)), "the default warm-up of 20 epochs would be another"
    assert "the run goes on with warmup_epochs=1 and evaluate_every=1" in told
    (workplace / "out" / "notes.txt").touch()
    replaced, told = run("--epochs", "1", "--overwrite")
    assert replaced == 0, told
    assert epochs() == [1]
    assert (workplace / "out" / "notes.txt").exists()


def test_a_run_is_continued_by_its_folder_alone(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*options: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            main(["run", *options, "--no-report"])
        return ended.value.code, capsys.readouterr().err

    monkeypatch.chdir(workplace)
    settings = [
        "--seed",
        "5",
        "--set",
        "evaluate_every=0",
        "--set",
        "evaluate_at_end=false",
        "--set",
        "warmup_epochs=0",
    ]
    assert run(*OWN, *SMALL, *settings, "--output-dir", "whole", "--epochs", "3")[0] == 0
    assert run(*OWN, *SMALL, *settings, "--output-dir", "out", "--epochs", "2")[0] == 0
    status, told = run("--resume", "--output-dir", "out", "--epochs", "3")
    assert status == 0, told
    assert (workplace / "out" / "samples.jsonl").read_bytes() == (workplace / "whole" / "samples.jsonl").read_bytes()
    assert run("--resume", "--set", "output_dir=out")[0] == 0
    status, told = run("--resume", "--output-dir", "out", "--seed", "6")
    assert (status, "seed" in told) == (2, True), told
    status, told = run("--resume", "--output-dir", "oud")
    assert (status, "there is no run to continue in 'oud': it holds no config.yaml; did you mean 'out'?" in told) == (
        2,
        True,
    )
    status, told = run("--resume")
    assert (status, "such as --output-dir runs/mine" in told) == (2, True)
    write_yaml(workplace / "out" / "config.yaml", {"epochs": 3, "output_dir": "out"})
    status, told = run("--resume", "--output-dir", "out")
    assert (status, "continue it there, with train(resume_from_checkpoint=True)" in told) == (2, True), told


UNEVALUATED = [*OWN, *SMALL, "--epochs", "1", "--output-dir", "out", "--set", "evaluate_at_end=false"]


def test_a_run_by_an_interpreter_of_its_own_on_a_terminal_without_greek(workplace: Path) -> None:
    """Everything that a run needs is imported; the other tests start runs where much is imported already."""
    result = cdpg(workplace, "run", *UNEVALUATED, "--no-report", python=sys.executable, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "KL(p, ?)" in result.stdout


def test_a_run_writes_its_report_unevaluated(workplace: Path) -> None:
    result = cdpg(workplace, "run", *UNEVALUATED, **unpainted.IN_A_FORK)
    assert result.returncode == 0, result.stderr
    assert "report: out/report.html" in result.stdout
    assert (workplace / "out" / "report.html").is_file()


class Closed(Console):
    """A terminal that is gone."""

    def print(self, *things: Any, **options: Any) -> None:
        raise OSError("the terminal is closed")


def test_the_report_is_written_before_anything_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr("cdpg.report.write_report", lambda runs, output: written.append(output) or output)
    record = {"epoch": 1, "satisfaction": 0.5, "coverage": 1.0, "kl_target_policy": None, "length": 2.0}
    for report in (True, False):
        with pytest.raises(OSError, match="closed"):
            finish_run(Closed(), RunFolder(tmp_path), record, report)
    assert written == [tmp_path / "report.html"]


FIGURE = {"mean": 0.41, "low": 0.38, "high": 0.44}
METHODS = ("cdpg", "dpg", "reinforce", "ziegler")
EVERY_METHOD = ["cdpg", "cdpg-paper", "dpg", "rft", "raft", "reinforce", "rloo", "ziegler"]


@pytest.mark.parametrize(
    ("terminal", "width", "cells"),
    [
        (False, 80, ["0.410 [0.380, 0.440]"]),
        (True, 200, ["0.410 [0.380, 0.440]"]),
        (True, 110, ["0.410", "[0.380, 0.440]"]),
        (True, 80, ["0.410"]),
    ],
)
def test_a_table_of_many_models_is_never_broken_within_a_figure(terminal: bool, width: int, cells: list[str]) -> None:
    models = {name: {"satisfaction": FIGURE, "kl_target_policy": FIGURE} for name in ("base", *METHODS)}
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    print_models(console, "a title", models)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = [[cell.strip() for cell in line.split("│")[2:-1]] for line in lines if line.startswith("│")]
    assert rows == [[cell] * 5 for cell in cells] * 2
    assert max(map(len, lines)) <= width or not terminal
    assert any("wider terminal" in line for line in lines) == (cells == ["0.410"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [([], list(METHODS)), (["--methods", "all"], EVERY_METHOD), (["--methods", "rft, cdpg,rft"], ["rft", "cdpg"])],
)
def test_the_methods_of_a_comparison(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], expected: list[str]
) -> None:
    def look(job: Any, runs: list[comparison.ComparisonRun], resume: bool) -> None:
        raise UserError(" ".join(run.name for run in runs))

    monkeypatch.setattr(comparison, "require_place", look)
    monkeypatch.chdir(workplace)
    contexts = ["--contexts", "contexts.csv", "--prompt-column", "source"]
    words = ["compare", "--model", "llama", *contexts, "--constraint", "test_preflight:even", *given]
    assert str(CliRunner().invoke(app, words).exception).split() == expected


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ["--set", "method=rft", "--methods", "cdpg,dpg"],
            ["method rft is not compared, only cdpg, dpg: name it in --methods"],
        ),
        (["--set", "method=dpg"], []),
        (["--methods", "dpg,rft"], []),
    ],
)
def test_a_comparison_without_the_method_of_its_settings_says_so(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], told: list[str]
) -> None:
    monkeypatch.setattr(comparison, "carry_out", lambda *arguments: None)
    monkeypatch.chdir(workplace)
    contexts = ["--contexts", "contexts.csv", "--prompt-column", "source"]
    words = ["compare", "--model", "llama", *contexts, "--constraint", "test_preflight:even", *given]
    with noticed() as heard:
        assert CliRunner().invoke(app, words).exception is None
    assert [notice for notice in heard if "method" in notice] == told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["alpha=0.3"], {"alpha": "divergence is kl, not alpha"}),
        (["alpha=0.3", "divergence=alpha"], {}),
        (["replay=2", "seed=1", "method=dpg"], {"replay": "method dpg does not use it"}),
        (["replay=2", "ziegler_beta=0.1"], {"ziegler_beta": "method cdpg does not use it"}),
        (["partition=pooled", "method=cdpg-paper"], {"partition": "method cdpg-paper does not use it"}),
    ],
)
def test_settings_without_effect_are_named(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], told: dict[str, str]
) -> None:
    monkeypatch.setattr(Job, "load", lambda *arguments: sys.exit(3))
    monkeypatch.chdir(workplace)
    words = ["run", "--model", "llama", "--contexts", "contexts.csv", "--constraint", "test_preflight:even"]
    with noticed() as heard:
        result = CliRunner().invoke(app, [*words, *(word for pair in given for word in ("--set", pair))])
    assert result.exit_code == 3
    assert heard == [f"--set {name} has no effect: {reason}" for name, reason in told.items()]


def test_the_folder_of_a_run_is_answered_with_its_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder: expected a task's name .* or a YAML file of settings$"):
        gather(tmp_path, {}, [])
    write_yaml(tmp_path / "config.yaml", {"task": "code-pep8"})
    with pytest.raises(UserError, match=r"is a folder: .* settings, for the run in it '.*/config\.yaml'$"):
        gather(tmp_path, {}, [])


def compared(folder: Path, *methods: str) -> tuple[Job, list[comparison.ComparisonRun]]:
    asked = {"model": "m", "contexts": "c.txt", "constraint": "a:b", "output_dir": str(folder)}
    job = Job.from_mapping(asked)
    return job, list(comparison.comparison_runs(job, methods, 1))


def test_a_comparison_says_what_it_will_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "train_all", lambda *arguments: None)
    monkeypatch.setattr(comparison, "compare", lambda *arguments: None)
    write_json(tmp_path / "comparison.json", {"models": {"base": {}, "cdpg": {}, "dpg": {}}})

    def told(*methods: str) -> list[str]:
        job, runs = compared(tmp_path, *methods)
        with noticed() as heard:
            comparison.carry_out(job, Inputs([], [], [], None, None), runs, 1, True, None)  # type: ignore[arg-type]
        return heard

    assert told("cdpg", "dpg", "ziegler") == []
    (notice,) = told("cdpg")
    assert "comparison.json' also holds dpg and will be replaced" in notice
    (tmp_path / "comparison.json").write_text("{damaged")
    assert told("cdpg") == []


def test_runs_of_a_comparison_leave_the_report_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(comparison.subprocess, "Popen", lambda words, **options: started.append(words))
    _, (run,) = compared(tmp_path, "cdpg")
    comparison.start_run(run, True, {})
    assert started[0][3:] == ["run", str(tmp_path / "cdpg" / "job.yaml"), "--no-report", "--resume"]


def test_a_sample_of_a_run_on_chats_is_conditioned_on_a_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "out")
    tiny.save(run.model, "llama")
    write_yaml(run.config, {"max_completion_length": 6, "device": "cpu"})

    def look(self: Any, contexts: Any, length: int) -> None:
        raise UserError(repr(contexts[0].prompt))

    monkeypatch.setattr("cdpg.models.transformer.TransformerModel.encode", look)

    def prompt() -> str:
        return str(CliRunner().invoke(app, ["sample", str(run.path), "--context", "two dogs"]).exception)

    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one cat"}]
    assert prompt() == "'two dogs'"
    write_json(run.evaluation, {"examples": [{"prompt": chat}]})
    assert prompt() == "({'role': 'user', 'content': 'two dogs'},)"
    run.samples.write_text('{"prompt": "one cat"}\n')
    assert prompt() == "'two dogs'"
    JsonlFile(run.samples).truncate(0)
    JsonlFile(run.samples).append({"prompt": chat})
    assert prompt() == "({'role': 'user', 'content': 'two dogs'},)"


def test_samples_are_drawn_anew_unless_a_seed_is_given(tmp_path: Path) -> None:
    tiny.save(tmp_path, "llama")
    words = ["sample", str(tmp_path), "--context", "two dogs", "--set", "max_completion_length=12"]
    first, second = (CliRunner().invoke(app, words) for _ in range(2))
    assert first.stdout != second.stdout
    seed = re.search(r"the same samples again: --seed (\d+)\n$", first.stderr)
    assert seed is not None
    for again in (["--seed", seed[1]], ["--set", f"seed={seed[1]}"]):
        repeated = CliRunner().invoke(app, [*words, *again])
        assert repeated.stdout == first.stdout
        assert "--seed" not in repeated.stderr


def test_the_stop_rule_of_a_run_ends_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class AtOnce:
        watch: frozenset[str] = frozenset()

        def cut(self, completion: str) -> str:
            return completion

    tiny.save(tmp_path, "llama")
    monkeypatch.setattr("cdpg.cli.results.prompting", lambda run: ("", AtOnce()))
    words = ["sample", str(tmp_path), "--context", "two dogs", "-n", "3", "--set", "max_completion_length=12"]
    assert re.findall(r"log-probability \S+, (.*)", CliRunner().invoke(app, words).stdout) == ["1 tokens"] * 3


def test_the_version_is_reported() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"cdpg {metadata.version('cdpg')}\n"


COMMANDS = ("tasks", "settings", "check", "run", "compare", "evaluate", "report", "sample", "push")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"Examples?: cdpg {command}\b", told)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    told = capsys.readouterr().out
    assert "cdpg check code-compilability" in told
    assert set(COMMANDS) == set(re.findall(r"^  (\w+) +[A-Z]", told.partition("Commands:")[2], re.MULTILINE))


def test_synonyms_are_of_commands_that_there_are() -> None:
    assert set(SYNONYMS) <= set(COMMANDS)
    names = [name for names in SYNONYMS.values() for name in names.split()]
    assert len(set(names)) == len(names), "a name has one answer"
    assert not set(names) & set(COMMANDS)


def completing(typed: str, shell: str = "bash") -> dict[str, str]:
    """What a shell tells the program that completes its words."""
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": typed}
    return {"_CDPG_COMPLETE": f"complete_{shell}", **words}


def completed(folder: Path, typed: str, shell: str = "bash") -> list[str]:
    """What the shell is offered for the last word of what was typed."""
    program = "import sys; from cdpg.cli import main; sys.argv = ['cdpg']; main()"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60,
        env={**os.environ, **completing(typed, shell)},
    )  # fmt: skip
    assert result.stderr == ""
    return result.stdout.split("\n")[:-1]


def test_the_shell_completes_tasks_and_files(tmp_path: Path) -> None:
    (tmp_path / "code.yaml").write_text("")
    (tmp_path / "code.csv").write_text("")
    assert completed(tmp_path, "cdpg run co") == ["code-compilability", "code-pep8", "code.yaml"]
    assert "code-pep8" in " ".join(completed(tmp_path, "cdpg check code-p", "zsh"))


def completions(function: Callable[[str], list[Any]], typed: str) -> list[str]:
    return [offer if isinstance(offer, str) else offer[0] for offer in function(typed)]


def test_what_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "short").mkdir(parents=True)
    (tmp_path / "runs" / "a.yaml").write_text("")
    assert completions(completion.complete_task, "runs/") == ["runs/a.yaml"]
    assert completions(completion.complete_task, "trans") == ["translation-numbers"]
    assert completions(completion.complete_run, "ru") == ["runs"]
    assert completions(completion.complete_run, "runs/") == ["runs/short"]
    assert completions(completion.complete_run, "none/x") == []
    assert completions(completion.complete_method, "") == EVERY_METHOD
    assert completions(completion.complete_methods, "cdpg,d") == ["cdpg,dpg"]
    assert completions(completion.complete_methods, "cdpg,") == [f"cdpg,{name}" for name in EVERY_METHOD[1:]]
    assert completions(completion.complete_methods, "a") == ["all"]
    assert completions(completion.complete_methods, "cdpg,a") == []
    assert completions(completion.complete_preset, "p") == ["paper"]
    assert completions(completion.complete_setting, "num_") == ["num_generations="]


@pytest.mark.parametrize("option", ["--preset", "--method"])
def test_options_are_completed_too(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {"--preset": ["tiny", "paper"], "--method": EVERY_METHOD}[option]
    for name, value in completing(f"cdpg run code-pep8 {option} ").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["cdpg"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert capsys.readouterr().out.split("\n")[:-1] == expected


def test_completion_loads_no_torch() -> None:
    program = "import sys, cdpg.cli; sys.exit(' '.join({'torch', 'transformers', 'spacy'} & set(sys.modules)) or None)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_tracker_is_refused_before_torch_is_loaded(workplace: Path) -> None:
    program = (
        "import sys\nfrom cdpg.cli import main\nsys.modules['wandb'] = None\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    sys.exit(1 if 'torch' in sys.modules else stop.code)"
    )
    command = [sys.executable, "-c", program, "run", *OWN, "--set", "report_to=[wandb]"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=workplace)
    assert result.returncode == 2, result.stderr
    assert "report_to names 'wandb', which is not installed; installed: " in result.stderr


def test_completion_is_installed_by_the_usual_option() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cdpg", "--show-completion", "bash"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "_CDPG_COMPLETE=complete_bash" in result.stdout


def test_the_working_folder_does_not_take_the_place_of_installed_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "json", "colorsys", "own_check"):
        (tmp_path / f"{name}.py").write_text("def even(prompts, completions): return [True] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    before = [path for path in sys.path if path not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", [*before])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    load_constraint("cdpg.constraints:compiles")
    assert sys.path == before, "a constraint of the package needs nothing from there"
    with pytest.raises(UserError, match=r"'colorsys' has no function 'even'.*an installed module has that name"):
        load_constraint("colorsys:even")
    assert load_constraint("own_check:even")(["x"], ["y"]) == [True]
    assert sys.path == [*before, str(tmp_path)]
    sys.modules.pop("own_check")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("rules.py:short", "not 'rules.py:short': write rules:short"),
        ("./rules.py:short", "write rules:short"),
        ("sub/rules.py:short", "write sub.rules:short"),
        (r".\sub\rules.py:short", "write sub.rules:short"),
        ("sub/rules:short", "write sub.rules:short"),
        (".rules:short", "write rules:short"),
        ("../rules.py:short", "write rules:short and start in the folder of rules.py"),
        ("/home/rules.py:short", "write rules:short and start in the folder of rules.py"),
        ("absent.py:short", "write absent:short"),
        ("./:short", "write :short"),
    ],
)
def test_a_constraint_that_is_named_by_its_file_is_answered_with_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    for folder in (tmp_path, tmp_path / "sub"):
        folder.mkdir(exist_ok=True)
        (folder / "rules.py").write_text("def short(prompts, completions): return [True] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError) as error:
        load_constraint(name)
    sys.modules.pop("rules", None)
    assert str(error.value).startswith("a constraint is given as module:function, not ")
    assert str(error.value).endswith(advice)


def test_a_module_in_a_folder_is_looked_for_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError, match=r"no module 'sub\.rules' for .*: expected sub/rules\.py in "):
        load_constraint("sub.rules:short")
