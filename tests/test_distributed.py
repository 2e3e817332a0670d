"""What several processes agree on, without launching any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cdpg.system.distributed import Processes, processes_here, processes_in_all
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
