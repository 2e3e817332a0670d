"""Full disks, folders that cannot be written or are in use, damaged files: told clearly, and nothing whole is lost."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aftermath import finish, result
from victim import EPOCHS, Keeper, events_of, log_of

from cdpg.storage.checkpoints import CorruptCheckpoint, latest_checkpoint, load_checkpoint
from cdpg.storage.run_folder import RunFolder
from noticed import noticed

Note = Callable[[str, object], None]


def mount(*arguments: str) -> bool:
    if shutil.which("mount") is None:
        return False
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=256k", "none", str(folder)):
        pytest.skip("a tmpfs can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def whole(folder: Path) -> list[int]:
    """The epochs of a run's checkpoints, all of which must verify."""
    found = sorted((folder / "checkpoints").glob("epoch-*"))
    return [load_checkpoint(path).epoch for path in found]


# --- no space ---


def fill_up(folder: Path, free: int) -> Path:
    """A file that leaves ``free`` bytes of the file system."""
    left = os.statvfs(folder)
    filler = folder / "filler"
    filler.write_bytes(b"\0" * max(0, left.f_bavail * left.f_frsize - free))
    return filler


def run_out_of_space(keeper: Keeper, disk: Path, log_folder: Path, free: int, expected: dict[str, Any]) -> bool:
    """Whether a run failed because the disk was full; if so, it said so, lost nothing, and resumes with free space."""
    folder = disk / "run"
    shutil.rmtree(folder, ignore_errors=True)
    filler = fill_up(disk, free)
    log = log_folder / "log"
    status = keeper.run(folder, log=str(log))
    text = log.read_text()
    filler.unlink()
    if status != 0:
        assert status in (1, 2), text
        assert "No space left on device" in text
        assert "Traceback" not in text
        if (folder / "checkpoints").exists():
            whole(folder)
    assert keeper.run(folder, log=str(log)) == 0, log.read_text()
    assert result(folder) == expected
    return status != 0


@pytest.mark.parametrize("step", [pytest.param(4096, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)]), 65_536])
def test_a_disk_that_fills_up(
    keeper: Keeper, finished: Path, small_disk: Path, tmp_path: Path, step: int, record_property: Note
) -> None:
    expected = result(finished)
    failures = [run_out_of_space(keeper, small_disk, tmp_path, free, expected) for free in range(0, 200_000, step)]
    assert failures[0]
    assert not failures[-1]
    assert sum(failures) >= 2
    record_property("disks", len(failures))
    record_property("full", sum(failures))


def fail_everywhere(keeper: Keeper, finished: Path, tmp_path: Path, every: int) -> int:
    """The disk is full at each ``every``-th change of a run: how many of them ended it."""
    expected, events = result(finished), events_of(finished)
    folder = tmp_path / "run"
    failures = 0
    for number in range(1, len(events) + 1, every):
        shutil.rmtree(folder, ignore_errors=True)
        status = keeper.run(folder, at=number, half=True, full=True)
        text = log_of(folder).read_text()
        assert status in (0, 1, 2), f"{events[number - 1]}: {text}"
        assert status == 0 or "No space left on device" in text, events[number - 1]
        if folder.exists():
            whole(folder)
        assert finish(keeper, folder) == expected, events[number - 1]
        failures += status != 0
    return failures


def test_no_space_at_some_changes(keeper: Keeper, finished: Path, tmp_path: Path) -> None:
    assert fail_everywhere(keeper, finished, tmp_path, every=47) >= 2


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_no_space_at_every_change(keeper: Keeper, finished: Path, tmp_path: Path, record_property: Note) -> None:
    failures = fail_everywhere(keeper, finished, tmp_path, every=1)
    assert failures >= 50
    record_property("changes", len(events_of(finished)))
    record_property("runs ended", failures)


# --- folders ---


def test_a_file_system_that_becomes_read_only(keeper: Keeper, finished: Path, small_disk: Path, tmp_path: Path) -> None:
    expected = result(finished)
    folder, log = small_disk / "run", tmp_path / "log"
    assert keeper.run(folder, log=str(log), epochs=3) == 0  # an epoch that a longer run evaluates, too
    assert mount("-o", "remount,ro", str(small_disk))
    try:
        assert keeper.run(folder, log=str(log)) == 2
    finally:
        assert mount("-o", "remount,rw", str(small_disk))
    assert "cannot write in the output folder" in log.read_text()
    assert "Read-only file system" in log.read_text()
    assert keeper.run(folder, log=str(log)) == 0, log.read_text()
    assert result(folder) == expected


def test_a_folder_in_use_is_left_alone(keeper: Keeper, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunFolder(folder):
        assert keeper.run(folder) == 2
        assert sorted(path.name for path in folder.iterdir()) == [".lock"]
    assert f"in use by another run (process {os.getpid()})" in log_of(folder).read_text()
    finish(keeper, folder)


# --- damage ---


def damage(file: Path, generator: random.Random) -> str:
    """Flip a bit, or cut the file."""
    content = bytearray(file.read_bytes())
    if generator.random() < 0.8:
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        file.write_bytes(content)
        return "flip"
    del content[generator.randrange(len(content)) :]
    file.write_bytes(content)
    return "cut"


def test_a_thousand_flips_and_cuts_are_all_detected(finished: Path, tmp_path: Path, record_property: Note) -> None:
    shutil.copytree(finished, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    last, earlier = folder / f"epoch-{EPOCHS:06d}", folder / f"epoch-{EPOCHS - 2:06d}"
    originals = {path: path.read_bytes() for path in last.iterdir()}
    assert len(originals) == 4
    generator, done = random.Random(5), {"flip": 0, "cut": 0}
    for number in range(1000):
        path = generator.choice(sorted(originals))
        done[damage(path, generator)] += 1
        with pytest.raises(CorruptCheckpoint):
            load_checkpoint(last)
        if number % 50 == 0:
            with noticed() as notices:
                found = latest_checkpoint(folder)
            assert found is not None and found.path == earlier
            assert len(notices) == 1 and str(path) in notices[0]
        path.write_bytes(originals[path])
    assert sum(done.values()) == 1000 and min(done.values()) > 100
    for kind, count in done.items():
        record_property(f"{kind}s detected", count)
    assert load_checkpoint(last).epoch == EPOCHS


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    keeper: Keeper, finished: Path, tmp_path: Path, name: str
) -> None:
    expected = result(finished)
    shutil.copytree(finished, tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / f"epoch-{EPOCHS:06d}"
    damage(last / name, random.Random(name))
    assert finish(keeper, tmp_path / "run") == expected
    log = log_of(tmp_path / "run").read_text()
    assert "a damaged checkpoint is skipped" in log
    assert f"continuing after epoch {EPOCHS - 2}" in log
