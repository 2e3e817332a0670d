"""Completions at the edges: empty ones, ones cut at the limit, models and tokenizers that lack special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.errors import UserError
from cdpg.storage.jsonl import read_jsonl
from rounds import ordinary

PROMPTS = ["two dogs", "the quick brown fox"]


def make(folder: Path, model: Any, tokenizer: Any, constraint: Any, **changes: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 2, "contexts_per_epoch": 2, "num_generations": 6, "max_completion_length": 5, "device": "cpu",
        "warmup_epochs": 0, "log_samples": 99, "learning_rate": 1e-3, "check_workers": 0,
    }  # fmt: skip
    config = CDPGConfig(output_dir=str(folder), **(values | changes))
    return CDPGTrainer(model, constraint, config, PROMPTS, processing_class=tokenizer)


def always(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [True] * len(completions)


def samples(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(folder / "samples.jsonl"))


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_model_that_ends_at_once_gives_empty_texts_of_one_token(tmp_path: Path, kind: str) -> None:
    """The end token is scored like any other: an empty completion has a probability, and the check sees ''."""
    model, seen = tiny.make_model(kind), []
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features))
    with torch.no_grad():
        head.bias[tiny.EOS] = 200.0

    def empty(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
        seen.extend(completions)
        return [completion == "" for completion in completions]

    record = make(tmp_path, model, tiny.tokenizer_for(kind), empty, epochs=1).train()
    assert seen == [""] * 12
    assert (record["satisfaction"], record["length"], record["coverage"]) == (1.0, 1.0, 1.0)
    assert all(sample["ended"] and sample["log_q"] == pytest.approx(0.0, abs=1e-6) for sample in samples(tmp_path))
    assert record["steps_nonfinite"] == 0


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize("method", ["cdpg", "ziegler"])
def test_a_vocabulary_without_an_end_token_gives_completions_cut_at_the_limit(
    tmp_path: Path, kind: str, method: str
) -> None:
    """Each is an outcome of the truncated model, judged as it stands."""
    model = tiny.make_model(kind)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer_for(kind).backend_tokenizer)
    assert tokenizer.eos_token_id is None and tokenizer.pad_token_id is None
    record = make(tmp_path, model, tokenizer, always, method=method).train()
    assert record["length"] == 5.0
    assert all(not sample["ended"] and sample["tokens"] == 5 for sample in samples(tmp_path))
    assert record["steps"] >= 1


@pytest.mark.parametrize("kind", ordinary(["gpt2", "gpt_neo", "llama", "t5"], "gpt2", "t5"))
def test_padding_needs_no_pad_token(tmp_path: Path, kind: str) -> None:
    """The same bits with a pad token and without one: it takes part in nothing."""
    ends = []
    for pad in (True, False):
        model, tokenizer = tiny.make_model(kind), tiny.tokenizer_for(kind)
        if not pad:
            model.config.pad_token_id = model.generation_config.pad_token_id = None
            tokenizer.pad_token = None
        trainer = make(tmp_path / str(pad), model, tokenizer, always)
        trainer.train()
        ends.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    assert torch.equal(*ends)


def test_a_seq2seq_model_without_a_start_token_is_refused(tmp_path: Path) -> None:
    model = tiny.make_model("t5")
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    model.config.bos_token_id = None
    with pytest.raises(UserError, match="no decoder_start_token_id: set it"):
        make(tmp_path, model, tiny.tokenizer_for("t5"), always)


def test_a_row_that_is_too_long_is_named(tmp_path: Path) -> None:
    config = CDPGConfig(output_dir=str(tmp_path), max_completion_length=5, device="cpu")
    rows = ["short", "two dogs " * 200, "short as well", "three cats " * 200]
    with pytest.raises(UserError, match=r"row 2 \(and 1 other rows\) does not fit: \d+ tokens, at most 123"):
        CDPGTrainer(tiny.make_model("llama"), always, config, rows, processing_class=tiny.tokenizer_for("llama"))
