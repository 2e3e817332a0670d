"""A folder that holds a run is replaced on request: the run's files, no others, and never a run that is at work."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.errors import RunError, UserError
from cdpg.storage.jsonl import JsonlFile, read_jsonl
from cdpg.storage.overwriting import remove_run, require_place
from cdpg.storage.run_folder import RunFolder
from enumeration import contexts_of, tabular

CONTEXTS = [{"prompt": str(context.prompt)} for context in contexts_of(3)]


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return ["a" in completion for completion in completions]


def make(folder: Path, **changes: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 3, "contexts_per_epoch": 2, "num_generations": 4, "max_completion_length": 3, "save_every": 1,
        "device": "cpu", "evaluation_samples": 2, "learning_rate": 0.05, "check_workers": 0,
    }  # fmt: skip
    return CDPGTrainer(tabular(4), has_a, {"output_dir": str(folder), **values, **changes}, CONTEXTS, CONTEXTS)


def untimed(folder: Path) -> list[dict[str, Any]]:
    records = read_jsonl(folder / "metrics.jsonl")
    return [{key: value for key, value in record.items() if not key.startswith("seconds")} for record in records]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    make(folder).train()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run, with files of others beside and among its own."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for name in ("notes.txt", "checkpoints/best", "nonfinite/mine"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    (folder / "nonfinite" / "epoch-000001.json").touch()
    (folder / "report.html").write_text("old")
    return folder


def test_a_new_run_takes_the_place_of_the_old_and_other_files_stay(run: Path, tmp_path: Path) -> None:
    make(run, epochs=2, seed=1, overwrite_output_dir=True, evaluate_at_end=False).train()
    make(tmp_path / "alone", epochs=2, seed=1, evaluate_at_end=False).train()
    assert untimed(run) == untimed(tmp_path / "alone")
    assert {path.read_text() for path in (run / "notes.txt", run / "checkpoints/best", run / "nonfinite/mine")} == {
        "mine"
    }
    left = {path.name for path in run.iterdir()} - {path.name for path in (tmp_path / "alone").iterdir()}
    assert left == {"notes.txt", "nonfinite"}, "the old evaluation and report are gone"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best", "epoch-000001", "epoch-000002"}
    assert yaml.safe_load((run / "config.yaml").read_text())["overwrite_output_dir"] is False, (
        "it can be repeated safely"
    )


def test_every_file_of_a_run_is_removed(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    assert {"kept.json", "ideal_samples.jsonl"} <= {path.name for path in folder.iterdir()}
    remove_run(RunFolder(folder))
    assert {path.name for path in folder.iterdir()} <= {".lock"}


def test_a_run_that_is_resumed_removes_nothing(run: Path) -> None:
    make(run, epochs=4, overwrite_output_dir=True).train(resume_from_checkpoint=True)
    assert [record["epoch"] for record in untimed(run)] == [1, 2, 3, 4]


def test_a_run_at_work_is_never_overwritten(run: Path) -> None:
    with RunFolder(run), pytest.raises(UserError, match="in use by another run"):
        make(run, overwrite_output_dir=True).train()
    assert len(untimed(run)) == 3


def test_what_is_no_run_of_this_program_is_left_alone(run: Path) -> None:
    (run / "config.yaml").write_text("model: mine\n")
    with pytest.raises(UserError, match=r"no config\.yaml of a run of cdpg, so nothing in it is overwritten"):
        make(run, overwrite_output_dir=True).train()
    assert len(untimed(run)) == 3


def test_a_folder_without_a_run_loses_nothing(tmp_path: Path) -> None:
    for name in ("report.html", "evaluation.json", "notes.txt"):
        (tmp_path / name).write_text("mine")
    make(tmp_path, overwrite_output_dir=True, evaluate_at_end=False).train()
    assert (tmp_path / "report.html").read_text() == (tmp_path / "evaluation.json").read_text() == "mine"


@pytest.mark.parametrize("part", ["model", "model/config.json", "samples.jsonl"])
def test_what_the_new_run_is_made_from_is_not_removed(run: Path, part: str) -> None:
    (run / "model" / "config.json").touch()
    with pytest.raises(UserError, match="is part of the run that would be overwritten: copy it elsewhere first"):
        require_place(RunFolder(run), True, [3, "code-tiny", str(run / part)])
    require_place(RunFolder(run), True, [run / "notes.txt", run])


def test_a_run_that_cannot_be_removed_is_not_mixed_with_a_new_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdpg.system.files.rename", lambda *paths: (_ for _ in ()).throw(PermissionError(13, "no")))
    with pytest.raises(RunError, match="could not be removed"):
        remove_run(RunFolder(run))


def test_without_the_request_a_run_is_refused(tmp_path: Path) -> None:
    JsonlFile(RunFolder(tmp_path).metrics).append({"epoch": 1})
    with pytest.raises(UserError, match="holds a run already"):
        require_place(RunFolder(tmp_path), False)
    assert CDPGConfig().overwrite_output_dir is False
