"""``base_dtype``: layers that are stored in a narrow type and computed with in a wide one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.errors import UserError
from cdpg.models.base import Rows
from cdpg.models.loading import load_policy_and_base
from cdpg.models.narrow import LARGEST_ERROR, refuse_large_error
from cdpg.models.sharding import repeated_blocks
from cdpg.models.transformer import TransformerModel

ROWS = Rows(torch.tensor([0, 0, 1]), torch.arange(3, 15).view(3, 4), torch.tensor([4, 2, 3]))
PROMPTS = [(5, 6, 7), (8, 9)]


def rounded(family: str) -> Any:
    """A model whose weights came in bfloat16."""
    model = tiny.make_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def pair(model: Any, family: str, **settings: Any) -> tuple[TransformerModel, TransformerModel]:
    config = CDPGConfig(device="cpu", base_dtype="bfloat16", **settings)
    policy, base = load_policy_and_base(model, config, tiny.tokenizer_for(family))
    assert isinstance(policy, TransformerModel) and isinstance(base, TransformerModel)
    return policy, base


def layer_types(model: TransformerModel) -> set[torch.dtype]:
    return {p.dtype for block in repeated_blocks(model.module) for p in block.parameters()}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_weights_that_came_narrow_lose_nothing(family: str) -> None:
    """Only while they run are layers wide; where a weight lies in memory may change the last bits of a product."""
    policy, base = pair(rounded(family), family)
    assert layer_types(base) == {torch.bfloat16}
    with torch.no_grad():
        scores = [model.score(PROMPTS, ROWS).log_probs for model in (policy, base)]
        assert torch.allclose(*scores, rtol=0, atol=1e-5)
    assert layer_types(base) == {torch.bfloat16}
    assert layer_types(policy) == {torch.float32}
    assert all(
        torch.equal(p, b.float()) for p, b in zip(policy.module.parameters(), base.module.parameters(), strict=True)
    )
    assert refuse_large_error(policy, base, PROMPTS, 4, "") < 1e-4


def test_a_layer_is_narrow_again_after_an_error() -> None:
    _, base = pair(rounded("llama"), "llama")
    with pytest.raises(AttributeError):
        repeated_blocks(base.module)[0](hidden_states=None)
    assert layer_types(base) == {torch.bfloat16}


def test_a_base_that_is_too_far_off_is_refused(tmp_path: Path) -> None:
    policy, base = pair(tiny.make_model("llama"), "llama")
    with pytest.raises(UserError, match=r"base_dtype: bfloat16 changes .* by up to [\d.e-]+ nats, and at most 0.01"):
        refuse_large_error(policy, base, PROMPTS, 4, "base_dtype: bfloat16")
    source = tiny.save(tmp_path / "source", "llama")
    config = CDPGConfig(output_dir=str(tmp_path / "run"), device="cpu", max_completion_length=4, base_dtype="bfloat16")
    with pytest.raises(UserError, match="use base_dtype: float32"):
        CDPGTrainer(str(source), lambda prompts, completions: [1.0] * len(prompts), config, [{"prompt": "a"}])
    assert LARGEST_ERROR == 0.01


def test_the_error_is_that_of_a_whole_sample() -> None:
    """A difference of 0.003 nats a token is allowed for 3 tokens, not for 4."""
    policy, base = pair(rounded("gpt2"), "gpt2")
    score = base.score

    def shifted(*given: Any) -> Any:
        scores = score(*given)
        return type(scores)(scores.log_probs - 0.003 * scores.mask, scores.hidden, scores.mask)

    base.score = shifted  # type: ignore[method-assign]
    assert refuse_large_error(policy, base, PROMPTS, 3, "") == pytest.approx(0.009, abs=1e-4)
    with pytest.raises(UserError, match=r"0\.012 nats"):
        refuse_large_error(policy, base, PROMPTS, 4, "")


def test_adapters_have_no_base_of_their_own() -> None:
    with pytest.raises(UserError, match="the base has no weights of its own"):
        pair(tiny.make_model("llama"), "llama", lora_rank=2)
