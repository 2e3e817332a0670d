"""The run's folder: one run at a time, strict lines, nothing half-written taken for whole."""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cdpg.config import read_yaml
from cdpg.errors import RunError, UserError
from cdpg.storage.json_files import encode, write_json, write_yaml
from cdpg.storage.jsonl import JsonlFile, read_jsonl
from cdpg.storage.run_folder import RunFolder

SOURCE = str(Path(sys.modules["cdpg.storage.run_folder"].__file__ or "").parents[2])

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)


def joined(value: Any) -> Any:
    """Two surrogates in a row are one character to JSON, as they are in UTF-16."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, dict):
        return {joined(key): joined(item) for key, item in value.items()}
    return [joined(item) for item in value] if isinstance(value, list) else value


def in_child(code: str) -> subprocess.Popen[str]:
    """Another process, which has run ``code`` once it says so on its standard output."""
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


# --- the folder ---


def test_paths_are_those_of_the_contract(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    found = (run.config, run.metrics, run.samples, run.checkpoints, run.evaluation, run.model, run.report)
    expected = "config.yaml metrics.jsonl samples.jsonl checkpoints evaluation.json model report.html"
    assert found == tuple(tmp_path / name for name in expected.split())


def test_naming_a_folder_makes_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a" / "b")
    assert not run.holds_run()
    assert not run.path.exists()
    with run:
        assert run.path.is_dir()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with RunFolder(tmp_path), pytest.raises(UserError, match=rf"in use by another run \(process {os.getpid()}\)"):
        RunFolder(tmp_path).__enter__()
    with RunFolder(tmp_path):
        pass


def hold(folder: Path, then: str) -> str:
    imports = "import os, time\nfrom cdpg.storage.run_folder import RunFolder"
    return f"{imports}\nRunFolder({str(folder)!r}).__enter__()\n{then}"


def test_another_process_is_named_and_its_death_frees_the_folder(tmp_path: Path) -> None:
    with in_child(hold(tmp_path, "print('held', flush=True)\ntime.sleep(60)")) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(UserError, match=rf"process {child.pid}\b"):
            RunFolder(tmp_path).__enter__()
        child.send_signal(signal.SIGKILL)
        child.wait()
        with RunFolder(tmp_path):
            pass


def test_a_forked_worker_that_outlives_the_run_does_not_hold_the_folder(tmp_path: Path) -> None:
    # The worker itself says that it is there: before that it may not yet have let go of the folder.
    fork = "if os.fork() == 0:\n    print(os.getpid(), flush=True)\ntime.sleep(60)"
    with in_child(hold(tmp_path, fork)) as child:
        assert child.stdout is not None
        worker = int(child.stdout.readline())
        try:
            with pytest.raises(UserError, match=rf"process {child.pid}\b"):
                RunFolder(tmp_path).__enter__()
            child.send_signal(signal.SIGKILL)
            child.wait()
            os.kill(worker, 0)  # still alive
            with RunFolder(tmp_path):
                pass
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_folder_that_was_held_is_forgotten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder:
        pass
    known = weakref.ref(folder)
    del folder
    gc.collect()
    assert known() is None, "something that outlives the run still refers to it"


def test_a_second_run_needs_resume(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics.touch()
    run.checkpoints.mkdir()
    (run.checkpoints / ".writing-epoch-000001-1").mkdir()
    run.require_fresh()
    (run.checkpoints / "epoch-000001").mkdir()
    with pytest.raises(UserError, match="overwrite_output_dir=True"):
        run.require_fresh()
    (run.checkpoints / "epoch-000001").rmdir()
    JsonlFile(run.metrics).append({"epoch": 1})
    with pytest.raises(UserError, match="overwrite_output_dir=True"):
        run.require_fresh()


@pytest.mark.parametrize("below", ["", "a/b"])
def test_a_file_in_the_place_of_the_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunFolder(tmp_path / "file" / below).__enter__()


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder that this process may not write in, also when the tests run as root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


def test_a_read_only_folder(read_only: Path) -> None:
    for path in (read_only, read_only / "new"):
        with pytest.raises(UserError, match=r"cannot write in the output folder .*Permission denied"):
            RunFolder(path).__enter__()
    for write in (write_json, write_yaml):
        with pytest.raises(RunError, match=r"cannot write .*Permission denied"):
            write(read_only / "file", {})
    with pytest.raises(RunError, match=r"cannot write .*Permission denied"):
        JsonlFile(read_only / "file").append({})


# --- lines ---


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(ANY_TEXT, JSON_VALUES, max_size=4))
def test_any_record_is_one_line_of_strict_utf8_json(record: dict[str, Any]) -> None:
    record = joined(record)
    line = encode(record)
    assert line.decode("utf-8").splitlines() == [line.decode("utf-8")]
    assert all(character.isprintable() or ord(character) > 0x9F for character in line.decode("utf-8"))
    assert json.loads(line, parse_constant=pytest.fail) == record


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "f.jsonl")
    file.append({"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (0.1, None)})
    assert file.path.read_text() == '{"a": null, "b": [null, {"c": null}], "d": [0.1, null]}\n'


def test_the_order_of_keys_does_not_depend_on_the_caller(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "f.jsonl")
    file.append({"z": 1, "epoch": 2, "a": [{"y": 1, "x": 2}]})
    file.append({"a": [{"x": 2, "y": 1}], "epoch": 2, "z": 1})
    assert file.path.read_text() == '{"epoch": 2, "a": [{"x": 2, "y": 1}], "z": 1}\n' * 2


def test_what_came_after_a_position_is_cut(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "f.jsonl")
    file.sync()
    file.truncate(0)
    assert (file.position(), file.path.exists()) == (0, False)
    positions = [file.position()]
    for epoch in range(4):
        file.append({"epoch": epoch, "text": "é\ud800\n"})
        file.sync()
        positions.append(file.position())
    with file.path.open("ab") as torn:
        torn.write(b'{"epoch": 4, "te')
    file.truncate(positions[3])
    file.append({"epoch": 3})
    assert [record["epoch"] for record in read_jsonl(file.path)] == [0, 1, 2, 3]
    file.truncate(0)
    assert file.path.read_bytes() == b""


def test_a_file_that_does_not_fit_the_position_is_refused(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "f.jsonl")
    with pytest.raises(RunError, match="was changed since the checkpoint"):
        file.truncate(5)
    file.append({"epoch": 1})
    for wrong in (file.position() + 1, file.position() - 1):
        with pytest.raises(RunError, match="was changed since the checkpoint"):
            file.truncate(wrong)
    assert list(read_jsonl(file.path)) == [{"epoch": 1}]


def test_a_line_that_does_not_fit_the_disk_is_taken_back(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "f.jsonl")
    file.append({"epoch": 1})
    before = file.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
    try:
        with pytest.raises(RunError, match="cannot write"):
            file.append({"epoch": 2})
        with pytest.raises(RunError, match="cannot write"):
            write_json(tmp_path / "f.json", ["x" * 1000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["f.jsonl"]


def test_every_cut_of_the_last_line_is_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    whole, last = encode({"epoch": 1}) + b"\n", encode({"text": "é→😀"})
    for length in range(len(last)):
        path.write_bytes(whole + last[:length])
        assert list(read_jsonl(path)) == [{"epoch": 1}]
    path.write_bytes(whole + last)
    assert list(read_jsonl(path)) == [{"epoch": 1}, {"text": "é→😀"}]


@pytest.mark.parametrize("bad", [b"{", b"", b"[1]", b"3", b'{"a": NaN}', b'{"a": "\xff"}', b"[" * 100_000, b"{} {}"])
def test_any_other_bad_line_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"epoch": 1}\n' + bad + b'\n{"epoch": 3}\n')
    records = read_jsonl(path)
    assert next(records) == {"epoch": 1}
    with pytest.raises(UserError, match=r"line 2 of .*f\.jsonl"):
        next(records)


def test_a_missing_file_is_the_users_to_know(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        list(read_jsonl(tmp_path / "f.jsonl"))


# --- whole files ---


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(ANY_TEXT, JSON_VALUES, max_size=4))
def test_whole_files_read_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()))
    content = joined(content)
    write_json(folder / "f.json", content)
    write_yaml(folder / "f.yaml", content)
    assert json.loads((folder / "f.json").read_bytes()) == content
    assert yaml.safe_load((folder / "f.yaml").read_text("utf-8")) == content


def test_yaml_keeps_order_and_small_numbers(tmp_path: Path) -> None:
    write_yaml(tmp_path / "f.yaml", {"seed": 0, "learning_rate": 1e-5, "adam_betas": (0.9, 0.999), "loss": math.nan})
    text = (tmp_path / "f.yaml").read_text()
    assert text == "seed: 0\nlearning_rate: 1.0e-05\nadam_betas:\n- 0.9\n- 0.999\nloss: null\n"
    assert yaml.safe_load(text)["learning_rate"] == 1e-5


def test_a_configuration_that_was_changed_by_hand_is_read_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_config({"adam_betas": (0.9, 0.999), "origin": {1: math.inf}})
    assert run.read_config() == read_yaml(run.config) == {"adam_betas": [0.9, 0.999], "origin": {"1": None}}
    run.config.write_text("seed: 3\n", encoding="utf-8")
    assert run.read_config() == {"seed": 3}
    run.config.unlink()
    with pytest.raises(UserError, match="cannot read the configuration file"):
        run.read_config()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "f.json"
    write_json(path, {"old": True})
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(RunError, match="No space left on device"):
        write_json(path, {"old": False})
    assert json.loads(path.read_bytes()) == {"old": True}
    assert [entry.name for entry in tmp_path.iterdir()] == ["f.json"]


def test_sigkill_at_random_moments_tears_at_most_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    code = (
        "from pathlib import Path\nfrom cdpg.storage.jsonl import JsonlFile\n"
        f"file = JsonlFile(Path({str(path)!r}))\n"
        "for epoch in range(10**9):\n"
        "    file.append({'epoch': epoch, 'text': 'x' * 5000})\n"
        "    if epoch == 0: print('started', flush=True)\n"
    )
    for wait in (0.01, 0.03, 0.07):
        path.unlink(missing_ok=True)
        with in_child(code) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "started\n"
            time.sleep(wait)
            child.send_signal(signal.SIGKILL)
        epochs = [record["epoch"] for record in read_jsonl(path)]
        assert epochs == list(range(len(epochs)))
        assert epochs


def test_no_torch_is_imported() -> None:
    code = "import sys, cdpg.storage.run_folder, cdpg.training.progress\nprint('torch' in sys.modules)"
    with in_child(code) as child:
        assert child.communicate()[0] == "False\n"
