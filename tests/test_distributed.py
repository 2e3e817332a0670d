"""What several processes agree on, without launching any."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cdpg import CDPGConfig
from cdpg.errors import RunError, UserError
from cdpg.rollout.replay import ReplayBuffer
from cdpg.storage.checkpoints import save_checkpoint
from cdpg.system import distributed
from cdpg.system.distributed import Processes, is_lost_process, make_accelerator, processes_here, processes_in_all
from cdpg.training import resuming
from cdpg.training.session import open_session
from cdpg.training.state import RunState
from side_by_side import side_by_side


@pytest.mark.parametrize(("total", "parts"), [(7, [(0, 2), (2, 4), (4, 7)]), (2, [(0, 0), (0, 1), (1, 2)])])
def test_contexts_are_shared_out_without_rest(total: int, parts: list[tuple[int, int]]) -> None:
    found = side_by_side(3, lambda processes: processes.share(total))
    assert [(share.start, share.stop) for share in found] == parts


def test_rows_are_put_together_in_their_places() -> None:
    whole = torch.arange(10.0).view(5, 2)

    def join(processes: Processes) -> torch.Tensor:
        share = processes.share(5)
        return processes.join(whole[share.start : share.stop], share, 5)

    for found in side_by_side(3, join):
        assert torch.equal(found, whole)


def test_gradients_are_added_up_and_a_process_without_one_adds_nothing() -> None:
    def add(processes: Processes) -> list[float]:
        parameter = nn.Parameter(torch.zeros(2))
        if processes.accelerator.process_index != 1:
            parameter.grad = torch.tensor([1.0, 10.0 * processes.accelerator.process_index])
        processes.sum_gradients([parameter])
        assert parameter.grad is not None
        return parameter.grad.tolist()

    assert side_by_side(3, add) == [[2.0, 20.0]] * 3


@pytest.mark.parametrize(("bucket_bytes", "calls"), [(1, 5), (24, 4), (10**6, 2)])
def test_gradients_are_added_up_in_buckets(bucket_bytes: int, calls: int) -> None:
    """Whatever the size of a bucket, the sums are the same; types are not mixed, and no gradient is divided."""

    def add(processes: Processes) -> tuple[int, list[list[float]]]:
        index, counted = processes.accelerator.process_index, 0
        reduce = processes.accelerator.reduce

        def counting(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
            nonlocal counted
            counted += 1
            return reduce(tensor, reduction=reduction)

        processes.accelerator.reduce = counting  # type: ignore[method-assign]
        parameters = [nn.Parameter(torch.zeros(size)) for size in ((2, 3), (1,), (5,), (2,))]
        parameters.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))
        for place, parameter in enumerate(parameters):
            if (place + index) % 3:  # the others have none
                parameter.grad = torch.arange(parameter.numel()).view_as(parameter).to(parameter) + 10 * index
        processes.sum_gradients(parameters, bucket_bytes)
        return counted, [p.grad.flatten().tolist() for p in parameters if p.grad is not None]

    def expected(place: int, size: int) -> list[float]:
        having = [index for index in range(3) if (place + index) % 3]
        return [float(sum(item + 10 * index for index in having)) for item in range(size)]

    sums = [expected(place, size) for place, size in enumerate((6, 1, 5, 2, 2))]
    assert side_by_side(3, add) == [(calls, sums)] * 3


def test_what_one_process_knows_all_know() -> None:
    def ask(processes: Processes) -> tuple[bool, bool, list[str], str]:
        index = processes.accelerator.process_index
        return (
            processes.any(index == 1),
            processes.any(False),
            processes.gather([f"item {index}"] * index),
            processes.from_main(f"of {index}"),
        )

    assert side_by_side(3, ask) == [(True, False, ["item 1", "item 2", "item 2"], "of 0")] * 3


def test_a_machine_is_shared_by_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (processes_here(), processes_in_all()) == (1, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (processes_here(), processes_in_all()) == (2, 8)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:535] Connection closed by peer [10.0.0.2]:2093"), True),
        (RuntimeError("Timed out waiting 8000ms for recv operation to complete"), True),
        (RuntimeError("wait timeout after 8000ms, keys: /worker/2"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_process_that_is_lost_is_known_by_its_error(error: Exception, lost: bool) -> None:
    assert is_lost_process(error) == lost


@pytest.mark.parametrize("count", [1, 2])
def test_only_a_run_of_several_processes_loses_one(count: int) -> None:
    """With one process such an error comes from elsewhere, and is shown as it is."""
    parts: Any = SimpleNamespace(
        folder=nullcontext(), evaluator=SimpleNamespace(close=lambda: None), is_main=False, origin={"command": None},
        processes=SimpleNamespace(count=count),
    )  # fmt: skip
    error = RuntimeError("Timed out waiting for a lock")
    with pytest.raises(RuntimeError if count == 1 else RunError) as raised, open_session(parts, 1, lambda *_: 0.0):
        raise error
    assert (raised.value is error) == (count == 1)


@pytest.mark.parametrize(
    ("device", "available", "on_cpu"),
    [("auto", False, True), ("auto", True, False), ("cpu", True, True), ("cuda", False, False)],
)
def test_processes_are_connected_on_cpus_too(
    device: str, available: bool, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate does so only if it is told; otherwise each process would make the whole run."""
    given: dict[str, Any] = {}

    def accelerator(**settings: Any) -> Any:
        given.update(settings)
        return SimpleNamespace(num_processes=2 if settings["cpu"] else 1, device=torch.device("cpu"))

    monkeypatch.setattr(distributed, "Accelerator", accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    make_accelerator(CDPGConfig(device=device))
    assert given["cpu"] is on_cpu
    monkeypatch.setenv("WORLD_SIZE", "2")
    if on_cpu:
        make_accelerator(CDPGConfig(device=device))
        return
    with pytest.raises(
        UserError, match="has started 2 processes, and Accelerate connects 1 of them on the device 'cpu'"
    ):
        make_accelerator(CDPGConfig(device=device))


def test_how_long_a_process_waits_for_the_others_is_a_setting() -> None:
    accelerator = make_accelerator(CDPGConfig(process_seconds=7.5, device="cpu"))
    assert accelerator.init_handler is not None and accelerator.init_handler.timeout.total_seconds() == 7.5
    with pytest.raises(UserError, match="process_seconds must be above 0"):
        CDPGConfig(process_seconds=0)
    with pytest.raises(UserError, match="process_seconds must be at most 1,000,000,000, not 1e\\+14"):
        CDPGConfig(process_seconds=1e14)


def resumed_by(processes: Processes, folder: Path, **differences: Any) -> int | str | None:
    """The epoch that a process resumes after, None to begin, or why it does not; it sees ``folder`` on its machine."""
    facts = ("base", "adapters", "proposal", "constraints", "contexts", "tuned_on", "tokens", "held_out")
    origin = {**dict.fromkeys(facts, "the same"), "processes": processes.count, **differences}
    parts: Any = SimpleNamespace(
        processes=processes, origin=origin, folder=SimpleNamespace(checkpoints=folder),
        target_fit=SimpleNamespace(looks_first=True, begin=lambda config: processes.any(True)), is_main=False,
    )  # fmt: skip
    resuming.begin_target(parts, RunState({}, replay=ReplayBuffer(1)), True, CDPGConfig())
    try:
        found = resuming.checkpoint_to_resume(parts, True, False)
    except UserError as error:
        return str(error)
    return None if found is None else found.epoch


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (("one", "two"), 3),
        (("none", "none"), None),
        *((folders, "checkpoint to resume") for folders in (("one", "none"), ("none", "one"), ("one", "older"))),
    ],
)
def test_machines_that_do_not_share_a_folder_cannot_resume_a_run(
    tmp_path: Path, folders: tuple[str, str], expected: int | str | None
) -> None:
    """One would go on, another begin at the start, and they would sum their gradients."""
    for name, epoch in (("one", 3), ("two", 3), ("older", 2)):
        save_checkpoint(tmp_path / name, epoch, {"weights": {"w": torch.ones(2)}}, {}, keep=1)

    def resume(processes: Processes) -> int | str | None:
        return resumed_by(processes, tmp_path / folders[processes.accelerator.process_index])

    one, other = side_by_side(2, resume)
    assert one == other
    if isinstance(expected, str):
        assert str(one).startswith(f"the processes of this run have read different files ({expected}): output_dir, ")
    else:
        assert one == expected


@pytest.mark.parametrize("fact", ["base", "contexts", "tuned_on", "held_out"])
def test_machines_with_different_files_cannot_make_one_run(tmp_path: Path, fact: str) -> None:
    def begin(processes: Processes) -> int | str | None:
        return resumed_by(processes, tmp_path, **{fact: processes.accelerator.process_index})

    assert [str(one).count(f"different files ({fact.replace('_', ' ')})") for one in side_by_side(2, begin)] == [1, 1]
