"""Out of memory: the message names the stage and the settings that lower the need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from victim import Keeper, log_of

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.errors import RunError
from cdpg.methods.base import WeightedLoss
from cdpg.models.beams import beam_search
from cdpg.models.loading import load_model
from cdpg.models.transformer import TransformerModel
from cdpg.system.memory import is_out_of_memory, needed_for

CPU = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
ERRORS = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError(), CPU]
ERRORS += [RuntimeError("MPS backend out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")]


def always(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [True] * len(completions)


def make(folder: Path) -> CDPGTrainer:
    config = CDPGConfig(
        output_dir=str(folder), epochs=2, contexts_per_epoch=1, num_generations=4, max_completion_length=5,
        rows_per_pass=77, tokens_per_pass=99, device="cpu", warmup_epochs=0, check_workers=0,
    )  # fmt: skip
    return CDPGTrainer(
        tiny.make_model("llama"), always, config, ["two dogs"], processing_class=tiny.tokenizer_for("llama")
    )


def raising(error: BaseException) -> Any:
    def stub(*arguments: Any, **options: Any) -> Any:
        raise error

    return stub


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:12] or "MemoryError")
@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (
            TransformerModel,
            "start",
            r"while sampling: lower rows_per_pass \(now 77\) or max_completion_length \(now 5\)",
        ),
        (TransformerModel, "score", r"while scoring samples: lower tokens_per_pass \(now 99\)"),
        (WeightedLoss, "loss", r"while computing the gradient: lower tokens_per_pass \(now 99\)"),
        (torch.optim.Adam, "step", r"while taking the optimiser's first step: use a smaller model, or adapters"),
        (TransformerModel, "frozen_copy", r"while loading the model: use a smaller model, or adapters"),
    ],
)
def test_each_stage_names_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, told: str, error: BaseException
) -> None:
    monkeypatch.setattr(owner, name, raising(error))
    with pytest.raises(RunError, match=f"out of memory {told}"):
        make(tmp_path).train()


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory"), KeyError("x")])
def test_other_errors_are_left_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, needed_for("x", "y"):
        raise error
    assert caught.value is error
    assert not is_out_of_memory(error)


def test_a_real_limit(keeper: Keeper, tmp_path: Path) -> None:
    """100 MB above what the process has when it starts; 60,000 rows side by side need more."""
    large = {"kind": "llama", "num_generations": 20_000, "rows_per_pass": 60_000, "batch_size": None}
    assert keeper.run(tmp_path / "run", headroom=100 << 20, **large) == 1, log_of(tmp_path / "run").read_text()
    log = log_of(tmp_path / "run").read_text()
    assert "out of memory while sampling: lower rows_per_pass (now 60000)" in log
    assert "Traceback" not in log


def test_beams_and_loading_name_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.save(tmp_path / "t5", "t5")
    loaded = load_model(str(model), CDPGConfig(device="cpu"))
    monkeypatch.setattr(TransformerModel, "start", raising(MemoryError()))
    with pytest.raises(RunError, match=r"while searching with beams: lower rows_per_pass \(now 8\)"):
        beam_search(loaded, [(1, 2)], 5, 4, 8)
    monkeypatch.setattr("cdpg.models.loading.AutoModelForSeq2SeqLM.from_pretrained", raising(CPU))
    with pytest.raises(RunError, match="while loading the model: use a smaller model"):
        load_model(str(model), CDPGConfig(device="cpu"))
