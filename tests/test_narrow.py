"""``base_dtype``: layers that are stored in a narrow type and computed with in a wide one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.models.base import LanguageModel, Rows, TokenScores
from cdpg.models.loading import load_policy_and_base
from cdpg.models.narrow import NarrowLayers, refuse_large_error
from cdpg.models.sharding import repeated_blocks
from cdpg.models.transformer import TransformerModel
from rounds import ordinary

ROWS = Rows(torch.tensor([0, 0, 1]), torch.arange(3, 15).view(3, 4), torch.tensor([4, 2, 3]))
PROMPTS = [(5, 6, 7), (8, 9)]
CONTEXTS = [Context("three", {}, 1), Context("two", {}, 2)]


def rounded(family: str, dtype: str = "bfloat16") -> Any:
    """A model whose weights came in a narrow type."""
    model = tiny.make_model(family)
    with torch.no_grad():
        for parameter in model.parameters() if dtype == "bfloat16" else ():
            parameter.copy_(parameter.bfloat16())
        for parameter in (p for block in repeated_blocks(model) for p in block.parameters() if dtype == "int8"):
            parameter.copy_(in_eight_bits(parameter))
    return model


def in_eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """The nearest weights that 8 bits can hold."""
    sizes = [size for size in range(8, 33) if weight.shape[-1] % size == 0]
    if weight.dim() < 2 or not sizes:
        return weight
    groups = weight.view(*weight.shape[:-1], -1, max(sizes))
    step = groups.abs().max(dim=-1, keepdim=True).values / 127
    return torch.where(step > 0, (groups / step).round() * step, 0.0).view_as(weight)


def pair(
    model: Any, family: str, dtype: str = "bfloat16", **settings: Any
) -> tuple[TransformerModel, TransformerModel]:
    config = CDPGConfig(device="cpu", base_dtype=dtype, **settings)
    policy, base = load_policy_and_base(model, config, tiny.tokenizer_for(family))
    assert isinstance(policy, TransformerModel) and isinstance(base, TransformerModel)
    return policy, base


def compared(policy: LanguageModel, base: LanguageModel, most: float, length: int = 4, **settings: Any) -> float:
    """The largest difference of a sample, if at most ``most`` is allowed."""
    config = CDPGConfig(max_completion_length=length, base_error=most, **settings)
    return refuse_large_error(policy, base, CONTEXTS, PROMPTS, config)


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
    assert compared(policy, base, 0.01) < 1e-4


@pytest.mark.parametrize("family", ordinary(tiny.FAMILIES, "gpt2", "t5"))
def test_weights_in_eight_bits(family: str) -> None:
    """Matrices are whole numbers, at most half a step away; only while they run are layers wide."""
    given = tiny.make_model(family)
    policy, base = pair(rounded(family, "int8"), family, "int8")
    _, other = pair(given, family, "int8")
    before = [p.clone() for p in base.module.parameters()]
    with torch.no_grad():
        scores = [model.score(PROMPTS, ROWS).log_probs for model in (policy, base, other)]
    assert torch.allclose(scores[0], scores[1], rtol=0, atol=1e-5)
    assert torch.allclose(scores[1], scores[2], rtol=0, atol=1e-5), "rounding once is rounding"
    assert all(torch.equal(p, q) and p.dtype == q.dtype for p, q in zip(base.module.parameters(), before, strict=True))
    blocks = repeated_blocks(base.module)
    for parameter in (p for block in blocks for p in block.parameters()):
        matrix = parameter.dim() > 1 and parameter.shape[-1] % 16 == 0
        assert parameter.dtype == (torch.int8 if matrix else torch.float32)
    inside = {id(p) for block in blocks for p in block.parameters()}
    assert all(p.dtype == torch.float32 for p in base.module.parameters() if id(p) not in inside)
    assert layer_types(policy) == {torch.float32}


@pytest.mark.parametrize(("width", "narrow"), [(40, True), (72, True), (7, False), (37, False)])
def test_groups_fit_the_width_of_a_matrix(width: int, narrow: bool) -> None:
    """A weight that two layers share is rounded once."""
    layers = [torch.nn.Linear(width, 3, bias=False).requires_grad_(False) for _ in range(2)]
    layers[1].weight = layers[0].weight
    given = layers[0].weight.detach().clone()
    NarrowLayers(layers, torch.int8, torch.float32)
    assert layers[0].weight.dtype == (torch.int8 if narrow else torch.float32)
    features = torch.eye(width)
    for layer in layers:
        error = (layer(features) - given.t()).abs().max()
        assert float(error) <= float(given.abs().max()) / 127 / 2 * 1.01


def test_groups_of_zeros_stay_zero() -> None:
    model = tiny.make_model("llama")
    weight = repeated_blocks(model)[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.zero_()
    _, base = pair(model, "llama", "int8")
    with torch.no_grad():
        assert base.score(PROMPTS, ROWS).log_probs.isfinite().all()


def test_how_far_a_base_may_be_is_a_setting(tmp_path: Path) -> None:
    policy, base = pair(tiny.make_model("llama"), "llama", "int8")
    found = compared(policy, base, 100.0)
    assert found > 0.001
    compared(policy, base, 1.01 * found)
    with pytest.raises(UserError, match=r"at most [\d.]+ is allowed \(base_error\)"):
        compared(policy, base, 0.99 * found)
    source = tiny.save(tmp_path / "source", "llama")
    config = CDPGConfig(
        output_dir=str(tmp_path / "run"), device="cpu", max_completion_length=4, base_dtype="int8", base_error=100,
        epochs=1, contexts_per_epoch=1, num_generations=2, check_workers=0, evaluate_at_end=False,
    )  # fmt: skip
    made = CDPGTrainer(str(source), lambda prompts, completions: [1.0] * len(prompts), config, [{"prompt": "a"}])
    made.train()
    assert torch.int8 in layer_types(made.base)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="base_dtype: int8 cannot be divided among processes"):
        CDPGConfig(base_dtype="int8", sharding="full")
    with pytest.raises(UserError, match="base_error must be a finite number of at least 0"):
        CDPGConfig(base_error=-1)


def test_a_layer_is_narrow_again_after_an_error() -> None:
    _, base = pair(rounded("llama"), "llama")
    with pytest.raises(AttributeError):
        repeated_blocks(base.module)[0](hidden_states=None)
    assert layer_types(base) == {torch.bfloat16}


def test_a_base_that_is_too_far_off_is_refused(tmp_path: Path) -> None:
    policy, base = pair(tiny.make_model("llama"), "llama")
    with pytest.raises(UserError, match=r"base_dtype: bfloat16 changes .* by up to [\d.e-]+ nats, and at most 0.01"):
        compared(policy, base, 0.01, base_dtype="bfloat16")
    source = tiny.save(tmp_path / "source", "llama")
    config = CDPGConfig(output_dir=str(tmp_path / "run"), device="cpu", max_completion_length=4, base_dtype="bfloat16")
    with pytest.raises(UserError, match="use base_dtype: float32"):
        CDPGTrainer(str(source), lambda prompts, completions: [1.0] * len(prompts), config, [{"prompt": "a"}])
    assert config.base_error == 0.01


def test_the_error_is_that_of_a_whole_sample() -> None:
    """A difference of 0.003 nats a token is allowed for 3 tokens, not for 4."""
    policy, base = pair(rounded("gpt2"), "gpt2")
    score = base.score

    def shifted(*given: Any) -> Any:
        scores = score(*given)
        return type(scores)(scores.log_probs - 0.003 * scores.mask, scores.hidden, scores.mask)

    base.score = shifted  # type: ignore[method-assign]
    assert compared(policy, base, 0.01, length=3) == pytest.approx(0.009, abs=1e-4)
    with pytest.raises(UserError, match=r"0\.012 nats"):
        compared(policy, base, 0.01)


def test_a_base_whose_scores_are_no_numbers_is_refused() -> None:
    """Also if those of other samples are right."""
    policy, base = pair(rounded("gpt2"), "gpt2")
    score = base.score

    def broken(prompts: Any, rows: Rows) -> TokenScores:
        scores = score(prompts, rows)
        first = torch.arange(len(rows.lengths)) == 0
        return replace(scores, log_probs=scores.log_probs.masked_fill(first[:, None], float("nan")))

    base.score = broken  # type: ignore[method-assign]
    with pytest.raises(UserError, match="by up to nan nats"):
        compared(policy, base, 0.01)


def test_samples_are_compared_in_passes_of_the_run() -> None:
    policy, base = pair(rounded("gpt2"), "gpt2")
    rows_of_passes: list[int] = []
    score = base.score

    def noted(prompts: Any, rows: Rows) -> TokenScores:
        rows_of_passes.append(len(rows.lengths))
        return score(prompts, rows)

    base.score = noted  # type: ignore[method-assign]
    compared(policy, base, 0.01, tokens_per_pass=11)
    assert sum(rows_of_passes) == 8
    assert len(rows_of_passes) > 2


def test_adapters_have_no_base_of_their_own() -> None:
    with pytest.raises(UserError, match="the base has no weights of its own"):
        pair(tiny.make_model("llama"), "llama", lora_rank=2)
