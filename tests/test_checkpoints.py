"""Checkpoints: exact, verified, and whole whatever happens while they are written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from cdpg.errors import RunError, UserError
from cdpg.storage import checkpoints
from cdpg.storage.checkpoints import (
    CorruptCheckpoint,
    find_checkpoint,
    kept_epochs,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from cdpg.system import files
from noticed import noticed

# Every function through which a save changes the file system.
CHANGES = (
    *((files, name) for name in ("make_folder", "write_bytes", "sync", "rename", "remove_tree")),
    (checkpoints, "save_file"),
)


def tensors_of(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"weight": torch.full((3, 4), value), "bias": torch.arange(4.0)},
        "optimizer": {"weight.exp_avg": torch.full((3, 4), -value), "step": torch.tensor(value)},
    }


def save(folder: Path, epoch: int, value: float | None = None, keep: int = 2) -> Path:
    value = float(epoch) if value is None else value
    return save_checkpoint(folder, epoch, tensors_of(value), {"value": value}, keep)


def latest_value(folder: Path) -> float:
    """The value that the latest checkpoint was made of; nothing may have been skipped on the way to it."""
    with noticed() as notices:
        found = latest_checkpoint(folder)
    assert found is not None and not notices
    value = found.state["value"]
    for stem, named in tensors_of(value).items():
        assert found.tensors[stem].keys() == named.keys()
        assert all(torch.equal(found.tensors[stem][name], tensor) for name, tensor in named.items())
    return float(value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- round trips ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    original = (torch.randn(5, 7, generator=generator) * 1e3).to(dtype)
    extremes = torch.tensor([0.0, -0.0, 1e-45, 1e38]).to(dtype)
    named = {"a": original, "b": extremes, "scalar": original[0, 0].clone(), "empty": original[:0]}
    path = save_checkpoint(tmp_path, 3, {"model": named, "nothing": {}}, {}, keep=1)
    found = load_checkpoint(path)
    assert path == tmp_path / "epoch-000003"
    assert found.epoch == 3
    assert found.tensors["nothing"] == {}
    for name, tensor in named.items():
        other = found.tensors["model"][name]
        assert (other.dtype, other.shape) == (dtype, tensor.shape)
        assert other.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_state_comes_back_exactly(tmp_path: Path) -> None:
    generator = random.Random(2)
    floats = [0.1, -0.0, 5e-324, 1.7976931348623157e308, *(generator.uniform(-1, 1) for _ in range(200))]
    state = {"floats": floats, "big": 2**200, "text": "é \ud800 \x00 ", "none": None, "nested": {"yes": [True, {}]}}
    found = load_checkpoint(save_checkpoint(tmp_path, 0, {}, state, keep=1)).state
    assert found == state
    assert [value.hex() for value in found["floats"]] == [value.hex() for value in floats]


def test_tied_and_strided_tensors_are_saved_by_value(tmp_path: Path) -> None:
    tied = torch.randn(4, 6, requires_grad=True)
    whole = torch.arange(24.0).reshape(4, 6)
    named = {"embed": tied, "head": tied, "transposed": whole.T, "rows": whole[1:3], "column": whole[:, 2]}
    found = load_checkpoint(save_checkpoint(tmp_path, 0, {"model": named}, {}, keep=1)).tensors["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in named.items())
    found["embed"].add_(1)
    assert torch.equal(found["head"], tied), "tensors that are loaded share no memory"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    save(tmp_path, 1)
    poisoned = {"model": {"good": torch.zeros(2), "bad": torch.tensor([0.0, bad])}}
    with pytest.raises(RunError, match=r"'bad' in 'model' holds NaN"):
        save_checkpoint(tmp_path, 2, poisoned, {}, keep=1)
    with pytest.raises(RunError, match="state holds NaN"):
        save_checkpoint(tmp_path, 2, {}, {"z": [1.0, {"x": bad}]}, keep=1)
    assert names(tmp_path) == ["epoch-000001"]


@pytest.mark.parametrize("stem", ["../model", "a/b", "", "model.safetensors"])
def test_a_stem_cannot_leave_the_folder(tmp_path: Path, stem: str) -> None:
    with pytest.raises(ValueError, match="stem"):
        save_checkpoint(tmp_path, 0, {stem: {}}, {}, keep=1)


# --- which ones stay ---


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept(tmp_path: Path, keep: int) -> None:
    for epoch in (0, 5, 999_999, 1_000_000):
        save(tmp_path, epoch, keep=keep)
    assert names(tmp_path) == sorted(["epoch-000000", "epoch-000005", "epoch-999999", "epoch-1000000"][-keep:])
    assert latest_value(tmp_path) == 1_000_000


def test_the_same_epoch_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, value=20)
    save(tmp_path, 2, value=21)
    assert names(tmp_path) == ["epoch-000001", "epoch-000002"]
    assert latest_value(tmp_path) == 21


def test_a_run_taken_back_forgets_its_later_checkpoints(tmp_path: Path) -> None:
    for epoch in (10, 20, 30):
        save(tmp_path, epoch, keep=3)
    save(tmp_path, 15, keep=1)
    assert names(tmp_path) == ["epoch-000015"]


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "missing") is None
    files.tidy(tmp_path / "missing")


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".writing-epoch-000002-1").mkdir()
    (tmp_path / ".removing-epoch-000000").mkdir()
    before = names(tmp_path)
    assert latest_value(tmp_path) == 1
    assert names(tmp_path) == before
    files.tidy(tmp_path)
    assert names(tmp_path) == ["epoch-000001"]


# --- damage ---


@pytest.fixture
def pristine(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    return save(folder, 2)


def damage(file: Path, generator: random.Random) -> None:
    """Flip one bit, cut the end off, or add a byte."""
    content = bytearray(file.read_bytes())
    kind = generator.choice(["flip", "flip", "flip", "cut", "grow"])
    if kind == "flip":
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    elif kind == "cut":
        del content[generator.randrange(len(content)) :]
    else:
        content.append(generator.randrange(256))
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"])
def test_damage_to_any_file_is_detected(pristine: Path, name: str) -> None:
    generator = random.Random(name)
    original = (pristine / name).read_bytes()
    for _ in range(100):
        damage(pristine / name, generator)
        with pytest.raises(CorruptCheckpoint, match=name.replace(".", r"\.")):
            load_checkpoint(pristine)
        (pristine / name).write_bytes(original)
    assert load_checkpoint(pristine).epoch == 2


def test_every_byte_of_the_manifest_counts(pristine: Path) -> None:
    """Also those of its own checksum, its white space and the case of its hexadecimal digits (bit 5)."""
    original = (pristine / "manifest.json").read_bytes()
    for position in range(len(original)):
        flipped = bytearray(original)
        flipped[position] ^= 1 << 5
        (pristine / "manifest.json").write_bytes(flipped)
        with pytest.raises(CorruptCheckpoint):
            load_checkpoint(pristine)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_a_missing_file_is_detected_and_the_one_before_used(pristine: Path, name: str, notices: list[str]) -> None:
    (pristine / name).unlink()
    found = latest_checkpoint(pristine.parent)
    assert found is not None
    assert found.epoch == 1
    assert [str(pristine / name) in notice for notice in notices] == [True]
    (found.path / name).unlink()
    assert latest_checkpoint(pristine.parent) is None


def test_a_later_format_is_not_guessed_at(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    with pytest.raises(RunError, match="format 1, and this version of cdpg reads 2") as error:
        load_checkpoint(pristine)
    assert not isinstance(error.value, CorruptCheckpoint)  # or it would be passed over, and removed


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_what_cannot_be_read_now_is_not_given_up(pristine: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read = Path.open

    def fail(path: Path, *given: Any, **options: Any) -> Any:
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error")
        return read(path, *given, **options)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(RunError, match="cannot be read: Input/output error") as error:
        latest_checkpoint(pristine.parent)
    assert not isinstance(error.value, CorruptCheckpoint)


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", "[" * 100_000, '{"sha256": "x"}'])
def test_a_manifest_may_be_anything(pristine: Path, content: str) -> None:
    (pristine / "manifest.json").write_text(content)
    with pytest.raises(CorruptCheckpoint):
        load_checkpoint(pristine)


# --- kills and failures at every step ---


class Killed(BaseException):
    """Stands for SIGKILL: from here on the process changes nothing."""


Fault = Callable[[str, Callable[..., None], tuple[Any, ...]], None]
"""Given a change's name, the function that makes it and its arguments, does something else instead."""


def path_of(arguments: tuple[Any, ...]) -> Path:
    """What a change is made to: the first path among its arguments."""
    return next(argument for argument in arguments if isinstance(argument, Path))


@contextlib.contextmanager
def faults(at: int, strike: Fault, dead: bool = False) -> Iterator[list[str]]:
    """The ``at``-th change of the file system goes wrong, and if that is death no other happens; yields the changes."""
    made: list[str] = []

    def watched(name: str, original: Callable[..., None]) -> Callable[..., None]:
        def change(*arguments: Any) -> None:
            made.append(f"{name} {path_of(arguments).name}")
            if len(made) == at:
                strike(name, original, arguments)
            elif not dead or len(made) < at:
                original(*arguments)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for module, name in CHANGES:
            patch.setattr(module, name, watched(name, getattr(module, name)))
        yield made


def half_done(name: str, original: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """What a change leaves that was stopped in its midst."""
    path = path_of(arguments)
    if name in ("write_bytes", "save_file"):
        original(*arguments)
        os.truncate(path, path.stat().st_size // 2)
    elif name == "remove_tree":
        for victim in sorted(path.iterdir())[::2]:
            victim.unlink()


def kill_before(name: str, original: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    raise Killed


def kill_half_way(name: str, original: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    half_done(name, original, arguments)
    raise Killed


def disk_full(name: str, original: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    half_done(name, original, arguments)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk shows nothing where the machine itself does not go down."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("_quick_disk")
@pytest.mark.parametrize("strike", [kill_before, kill_half_way], ids=["before", "half-way"])
@pytest.mark.parametrize(("epoch", "keep"), [(3, 1), (3, 2), (2, 1)], ids=["next", "next-keep-2", "replace"])
def test_a_kill_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path, strike: Fault, epoch: int, keep: int) -> None:
    outcomes = []
    for at in range(1, 100):
        folder = tmp_path / str(at)
        save(folder, 1)
        save(folder, 2)
        with faults(at, strike, dead=True) as made, contextlib.suppress(Killed):
            save(folder, epoch, value=99, keep=keep)
        outcomes.append(latest_value(folder))
        save(folder, 4, keep=1)
        assert names(folder) == ["epoch-000004"], "the next save clears up"
        if len(made) < at:
            break
    assert len(outcomes) > 14
    assert outcomes == sorted(outcomes), "once the new one is there, it is there for good"
    assert set(outcomes) == {2.0, 99.0}


@pytest.mark.usefixtures("_quick_disk")
@pytest.mark.parametrize(("epoch", "keep"), [(3, 1), (3, 2), (2, 1)], ids=["next", "next-keep-2", "replace"])
def test_a_full_disk_at_any_step_is_an_error_that_costs_nothing(tmp_path: Path, epoch: int, keep: int) -> None:
    messages = []
    for at in range(1, 100):
        folder = tmp_path / str(at)
        save(folder, 1)
        save(folder, 2)
        with faults(at, disk_full) as made:
            try:
                save(folder, epoch, value=99, keep=keep)
            except RunError as error:
                messages.append(str(error))
                # If it is the last sync that fails, the new one has its name already, and is whole.
                assert names(folder) == ["epoch-000001", "epoch-000002"] or latest_value(folder) == 99
            else:
                assert latest_value(folder) == 99
        if len(made) < at:
            break
    assert len(messages) > 10
    assert all("No space left on device" in message for message in messages)


def test_what_must_be_on_the_disk_is_synced_before_anything_older_goes(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1)
    with faults(at=0, strike=kill_before) as made:
        save(tmp_path, 2, keep=1)
    writing = f".writing-epoch-000002-{os.getpid()}"
    tensors = [f"{step} {stem}.safetensors" for stem in tensors_of(2) for step in ("save_file", "sync")]
    texts = [f"{step} {stem}.json" for stem in ("state", "manifest") for step in ("write_bytes", "sync")]
    published = [f"sync {writing}", f"rename {writing}", f"sync {tmp_path.name}"]
    removed = ["rename epoch-000001", "remove_tree .removing-epoch-000001"]
    assert made[1:] == tensors + texts + published + removed


def test_an_interrupted_save_clears_up(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with faults(6, kill_before), pytest.raises(Killed):
        save(tmp_path, 2)
    assert names(tmp_path) == ["epoch-000001"]


def test_a_real_limit_on_file_size_is_an_error_that_costs_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    big = {"model": {"weight": torch.zeros(1 << 16)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(RunError, match="cannot write the checkpoint of epoch 2"):
            save_checkpoint(tmp_path, 2, big, {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["epoch-000001"]
    assert latest_value(tmp_path) == 1


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(RunError, match="cannot write the checkpoint"):
        save(tmp_path / "checkpoints", 1)
    with pytest.raises(RunError, match="cannot look for checkpoints"):
        latest_checkpoint(tmp_path / "checkpoints")


def save_until_killed(folder: Path, announce: int, first: int) -> None:
    """In a forked child: save one epoch after another, twice each, and announce what has been saved."""
    try:
        for epoch in range(first, first + 100_000):
            save(folder, epoch, keep=1)
            save(folder, epoch, keep=1)
            os.write(announce, epoch.to_bytes(4, "big"))
    finally:
        os._exit(1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_sigkill_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    generator = random.Random(3)
    epoch = 0
    for _ in range(20):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            save_until_killed(tmp_path, writer, epoch + 1)
        os.close(writer)
        with os.fdopen(reader, "rb") as announced:
            first = announced.read(4)
            time.sleep(generator.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            rest = announced.read()
        promised = int.from_bytes((first + rest)[-4:], "big")
        epoch = int(latest_value(tmp_path))
        assert epoch in (promised, promised + 1)


# --- which one a run goes on from ---


def test_a_run_resumes_from_the_newest_whole_one(tmp_path: Path, notices: list[str]) -> None:
    assert find_checkpoint(tmp_path, True) is None
    assert notices == [f"there is nothing to resume: {str(tmp_path)!r} has no checkpoint; the run begins at the start"]
    notices.clear()
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    assert kept_epochs(tmp_path) == [1, 2]
    found = find_checkpoint(tmp_path, True)
    assert found is not None and (found.epoch, notices) == (2, [])
    (newest / "state.json").write_bytes(b"{}")
    found = find_checkpoint(tmp_path, True)
    assert found is not None and found.epoch == 1
    assert len(notices) == 1 and notices[0].startswith("a damaged checkpoint is skipped: ")
    (tmp_path / "epoch-000001" / "state.json").write_bytes(b"{}")
    with pytest.raises(RunError) as error:
        find_checkpoint(tmp_path, True)
    assert str(error.value) == (
        f"no checkpoint in {str(tmp_path)!r} is whole: start again in another folder, or remove them to start again "
        "in this one"
    )


def test_a_checkpoint_is_chosen_by_its_path(tmp_path: Path) -> None:
    folder, other = tmp_path / "run" / "checkpoints", tmp_path / "other" / "checkpoints"
    first = save(folder, 1)
    save(folder, 2)
    for given in (first, str(first)):
        found = find_checkpoint(folder, given)
        assert found is not None and found.epoch == 1
    with pytest.raises(UserError) as error:
        find_checkpoint(other, first)
    assert str(error.value) == (
        f"the checkpoint {str(first)!r} is not one of output_dir {str(other.parent)!r}: set output_dir to the folder "
        "it belongs to; to go on elsewhere, copy that whole folder first"
    )
    missing = folder / "epoch-000009"
    with pytest.raises(UserError) as error:
        find_checkpoint(folder, missing)
    assert str(error.value) == (
        f"there is no checkpoint {str(missing)!r}: expected a folder such as checkpoints/epoch-000100"
    )


@pytest.mark.parametrize(("epoch", "keep"), [(-1, 1), (1, 0)])
def test_impossible_numbers_are_refused(tmp_path: Path, epoch: int, keep: int) -> None:
    with pytest.raises(ValueError, match=f"^epoch must be at least 0 and keep at least 1, not {epoch} and {keep}$"):
        save_checkpoint(tmp_path, epoch, {}, {}, keep)


def test_tensors_that_cannot_be_read_are_reported_with_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)

    def broken(error: Exception) -> Callable[[Path], Any]:
        def load(path: Path) -> Any:
            raise error

        return load

    monkeypatch.setattr(checkpoints, "load_file", broken(ValueError("odd")))
    with pytest.raises(CorruptCheckpoint) as corrupt:
        load_checkpoint(path)
    assert str(corrupt.value) == f"the checkpoint {str(path)!r} cannot be read: odd"
    monkeypatch.setattr(checkpoints, "load_file", broken(OSError(errno.EIO, "no luck")))
    with pytest.raises(RunError) as unreadable:
        load_checkpoint(path)
    assert str(path) in str(unreadable.value) and "no luck" in str(unreadable.value)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError("odd")])
def test_a_checkpoint_that_cannot_be_written_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def broken(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(files, "write_bytes", broken)
    with pytest.raises(RunError) as found:
        save(tmp_path, 7)
    assert str(found.value) == (
        f"cannot write the checkpoint of epoch 7 in {str(tmp_path)!r}: {error.strerror or 'odd'}; the earlier "
        "checkpoints are intact: free some space or make the folder writable, then resume the run"
    )


def test_the_manifest_by_value(tmp_path: Path) -> None:
    """Sorted, with sizes and checksums of the files and one of itself; the largest is too large for one reading."""
    tensors = {**tensors_of(3.0), "model": {"weight": torch.randn(3, 2**18)}}
    path = save_checkpoint(tmp_path, 3, tensors, {"value": 3.0}, keep=2)
    assert (path / "model.safetensors").stat().st_size > 3 * 2**20
    assert (path / "state.json").read_text(encoding="utf-8") == '{\n "value": 3.0\n}'
    described = {}
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        content = (path / name).read_bytes()
        described[name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    manifest = {"epoch": 3, "files": described, "format": 1}
    checksum = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    written = (path / "manifest.json").read_text(encoding="utf-8")
    assert written == json.dumps({**manifest, "sha256": checksum}, indent=1)


def test_a_checkpoint_of_another_format_says_who_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    with pytest.raises(RunError) as error:
        load_checkpoint(path)
    assert str(error.value) == (
        f"{str(path / 'manifest.json')!r} has format 1, and this version of cdpg reads 2: continue with the version "
        "that wrote it"
    )


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), OSError("odd")])
def test_a_folder_that_cannot_be_listed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def broken(path: Path) -> Iterator[Path]:
        raise error

    monkeypatch.setattr(Path, "iterdir", broken)
    with pytest.raises(RunError) as found:
        kept_epochs(tmp_path)
    assert str(found.value) == f"cannot look for checkpoints in {str(tmp_path)!r}: {error.strerror or 'odd'}"


def test_a_manifest_that_names_other_files_is_refused(tmp_path: Path) -> None:
    manifest = save(tmp_path, 1) / "manifest.json"
    content = json.loads(manifest.read_bytes())
    content["files"]["../else"] = content["files"]["state.json"]
    del content["sha256"]
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True, indent=1).encode()).hexdigest()
    manifest.write_text(json.dumps({**content, "sha256": checksum}, sort_keys=True, indent=1), encoding="utf-8")
    with pytest.raises(CorruptCheckpoint) as error:
        load_checkpoint(manifest.parent)
    assert str(error.value) == f"{str(manifest)!r} names files that cannot be a checkpoint's"


def test_the_library_for_tensors_says_why_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise SafetensorError("I/O error: no space")

    monkeypatch.setattr(checkpoints, "save_file", broken)
    with pytest.raises(RunError, match=r"in '.*': I/O error: no space; the earlier checkpoints are intact"):
        save(tmp_path, 1)


def test_divided_tensors_are_written_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whole tensor in memory at a time: nothing is looked at before it is written."""
    given, written = {"w": torch.zeros(2)}, list[Any]()

    def write(path: Path, named: Any) -> None:
        written.append(named)
        path.touch()

    monkeypatch.setattr(checkpoints, "is_divided", lambda named: named is given)
    monkeypatch.setattr(checkpoints, "write_divided", write)
    save_checkpoint(tmp_path, 1, {"weights": given}, {}, keep=1)
    assert len(written) == 1
    assert written[0] is given
