"""``gradient_checkpointing``: the same gradient bit for bit, with less memory between the two passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.models.base import Rows
from cdpg.models.loading import load_model, wrap_model
from cdpg.models.sharding import repeated_blocks
from cdpg.models.transformer import TransformerModel
from rounds import ordinary

ROWS = Rows(torch.tensor([0, 0, 1, 1, 1]), torch.arange(3, 28).view(5, 5), torch.tensor([5, 3, 1, 4, 5]))
PROMPTS = [(5, 6, 7), (8, 9)]


def gradient(model: TransformerModel) -> tuple[list[Tensor], int]:
    """Scores and gradients, and the bytes that were kept for the backward pass, weights apart."""
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.module.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = model.score(PROMPTS, ROWS)
    (scores.log_prob() * torch.arange(1.0, 6.0)).sum().backward()
    found = [scores.log_probs.detach(), scores.hidden.detach()]
    return found + [p.grad for p in model.module.parameters() if p.grad is not None], sum(kept.values())


@pytest.mark.parametrize("family", ordinary(tiny.FAMILIES, "gpt2", "gpt_neo", "llama", "t5"))
def test_what_is_computed_again_is_the_same(family: str) -> None:
    results = []
    for recomputes in (False, True):
        model = wrap_model(tiny.make_model(family), tiny.tokenizer_for(family), CDPGConfig(max_completion_length=5))
        model.recomputes = recomputes
        results.append(gradient(model))
        assert not any("forward" in vars(block) for block in repeated_blocks(model.module))
    (plain, all_kept), (again, few_kept) = results
    assert len(plain) == len(again) > 10
    assert all(map(torch.equal, plain, again))
    assert few_kept < 0.5 * all_kept


def test_the_setting_reaches_the_model(tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "source", "llama")
    for asked in (False, True):
        config = CDPGConfig(
            output_dir=str(tmp_path / "run"), gradient_checkpointing=asked, device="cpu", max_completion_length=8
        )
        assert load_model(str(source), config).recomputes is asked
        trainer = CDPGTrainer(str(source), lambda prompts, completions: [1.0] * len(prompts), config, [{"prompt": "a"}])
        assert isinstance(trainer.policy, TransformerModel) and trainer.policy.recomputes is asked
