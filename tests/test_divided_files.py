"""The writer for tensors that are divided among processes: its files are those of safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cdpg.errors import RunError
from cdpg.storage.divided_files import is_divided, take_part, write_divided

NAMED = {
    "odd": torch.arange(3.0),
    "flags": torch.tensor([True, False, True]),
    "wide": torch.arange(6.0, dtype=torch.float64).view(2, 3),
    "scalar": torch.tensor(7.0),
    "turned": torch.arange(6).view(2, 3).t(),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "nothing": torch.zeros(0, 4),
}


def test_what_is_written_is_read_by_safetensors(tmp_path: Path) -> None:
    write_divided(tmp_path / "file.safetensors", NAMED)
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == NAMED.keys()
    for name, tensor in NAMED.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_nothing_is_overwritten_and_no_nan_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with pytest.raises(RunError, match="'bad' in 'file' holds NaN or infinite values"):
        write_divided(path, {"bad": torch.tensor([1.0, float("nan")])})
    with pytest.raises(FileExistsError):
        write_divided(path, NAMED)


def test_whole_tensors_are_not_divided() -> None:
    assert not is_divided(NAMED)
    take_part(NAMED)
