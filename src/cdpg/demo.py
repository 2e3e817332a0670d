"""The worked example: a model small enough to enumerate, tuned by the real pipeline and compared with the exact ideal.

Two contexts, two letters, at most three of them: 15 possible outputs. The requirement is that an output holds an ``a``.
Since every probability can be computed, the distance to the ideal model is known, not estimated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.methods import METHODS
from cdpg.models.tabular import TabularModel
from cdpg.target.target import log_target

CONTEXTS = ("first", "second")


def has_an_a(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[bool]:
    """The requirement."""
    return ["a" in completion for completion in completions]


def make_base() -> TabularModel:
    """A base that rarely writes an ``a`` in one context and often in the other, so that Z_c varies."""
    model = TabularModel(CONTEXTS, ("a", "b"), max_length=3, seed=3)
    with torch.no_grad():
        model.table[0, :, 1] -= 2.5
        model.table[1, :, 1] += 0.5
    return model


def describe(model: TabularModel, base: TabularModel) -> tuple[Tensor, Tensor, Tensor]:
    """Satisfaction, KL(p_c, π) and KL(π, a) of each context, enumerated."""
    with torch.no_grad():
        log_pi, log_a = model.log_prob_table(), base.log_prob_table()
    texts = [model.decode((), outcome) for outcome in model.outcomes()]
    b = torch.tensor(has_an_a([], texts), dtype=torch.float64).expand_as(log_a)
    log_ideal = log_target(log_a, b).log_softmax(dim=1)
    to_ideal = (log_ideal.exp() * (log_ideal - log_pi).masked_fill(b == 0, 0.0)).sum(dim=1)
    return (log_pi.exp() * b).sum(dim=1), to_ideal, (log_pi.exp() * (log_pi - log_a)).sum(dim=1)


def tune(method: str, folder: str) -> TabularModel:
    """A run like any other, on the table."""
    config = CDPGConfig(
        output_dir=f"{folder}/{method}", method=method, epochs=300, contexts_per_epoch=2, num_generations=64,
        max_completion_length=3, learning_rate=0.05, warmup_epochs=0, save_every=300, device="cpu",
    )  # fmt: skip
    model = make_base()
    CDPGTrainer(model, has_an_a, config, train_dataset=[{"prompt": context} for context in CONTEXTS]).train()
    return model


def main() -> None:
    base = make_base()
    table = Table(title="Outputs must hold an 'a': exact figures, by enumeration")
    for column in ("model", "context", "satisfied", "KL(p, π) to the ideal", "KL(π, a) to the base"):
        table.add_column(column, justify="left" if column in ("model", "context") else "right")
    with tempfile.TemporaryDirectory() as folder:
        models = {"base": base} | {method: tune(method, folder) for method in METHODS}
    for name, model in models.items():
        satisfied, to_ideal, to_base = (figures.tolist() for figures in describe(model, base))
        for i, context in enumerate(CONTEXTS):
            row = (f"{satisfied[i]:.3f}", f"{to_ideal[i]:.3f}", f"{to_base[i]:.3f}")
            table.add_row(name if i == 0 else "", context, *row, end_section=i == len(CONTEXTS) - 1)
    Console().print(table)


if __name__ == "__main__":
    main()
