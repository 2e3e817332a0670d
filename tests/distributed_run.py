"""Run by ``accelerate launch`` in the tests: most contexts never satisfy, so a process may be left without gradient."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.models.tabular import TabularModel

CONTEXTS = ("p", "q", "r", "s", "t")


def main(folder: Path, method: str, contexts_per_epoch: int = 3) -> None:
    def check(prompts: list[str], completions: list[str], **kwargs: Any) -> list[bool]:
        return ["a" in text and prompt in "pq" for prompt, text in zip(prompts, completions, strict=True)]

    model = TabularModel(CONTEXTS, ("a", "b"), max_length=3, seed=1)
    config = CDPGConfig(
        output_dir=str(folder / method),
        method=method,
        epochs=5,
        contexts_per_epoch=contexts_per_epoch,
        num_generations=8,
        max_completion_length=3,
        learning_rate=0.05,
        batch_size=8,
        device="cpu",
        save_every=2,
    )
    trainer = CDPGTrainer(model, check, config, train_dataset=[{"prompt": c} for c in CONTEXTS])
    trainer.train()
    if trainer.processes.is_main:
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        result = {"weights": weights.tolist(), "processes": trainer.processes.count}
        (folder / method / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(Path(sys.argv[1]), name)
        main(Path(sys.argv[1]) / "one-context", name, contexts_per_epoch=1)
