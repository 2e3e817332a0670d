"""Run by ``accelerate launch`` in the tests: most contexts never satisfy, so a process may be left without gradient."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.evaluation.measures import Measured, per_output
from cdpg.evaluation.statistics import Statistic
from cdpg.models.tabular import TabularModel

CONTEXTS = ("p", "q", "r", "s", "t")
HELD_OUT = ("q", "p", "t")
EPOCHS = 3


class BeamMeasure:
    """Of beams: a feature, a metric of the corpus and a count, as tasks have them."""

    beams = 2

    def __call__(self, contexts: Any, outputs: Any, apply: Any = None) -> Measured:
        texts = [text for row in outputs for text in row]
        terms = np.array([[float(text.count("a")), 1.0 + len(text)] for text in texts])
        return Measured(
            features={"letters": per_output(outputs, len)},
            corpus={"share_of_a": Statistic(terms, lambda sums: sums[..., 0] / sums[..., 1])},
            frequencies={"text": Counter(texts)},
            remarks={"initial": [[text[:1] for text in row] for row in outputs]},
        )


class Listener(TrainerCallback):  # type: ignore[misc]
    """What a callback is told of evaluations, on every process."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def on_evaluate(self, *arguments: Any, metrics: dict[str, Any], **parts: Any) -> None:
        self.heard.append(metrics)


def main(folder: Path, method: str, contexts_per_epoch: int = 3) -> None:
    """A run, evaluated before, along the way and at the end; with a single context, the main process has none."""

    def check(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [
            2.0 if prompt + text in ("sab", "taa") else float("a" in text and prompt in "pq")  # 2 is no verdict
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    model = TabularModel(CONTEXTS, ("a", "b"), max_length=3, seed=1)
    config = CDPGConfig(
        output_dir=str(folder / method),
        method=method,
        epochs=EPOCHS,
        contexts_per_epoch=contexts_per_epoch,
        num_generations=8,
        max_completion_length=3,
        learning_rate=0.05,
        batch_size=8,
        device="cpu",
        save_every=2,
        evaluation_samples=6,
        evaluation_contexts=min(2, contexts_per_epoch),
    )
    listener = Listener()
    trainer = CDPGTrainer(
        model, check, config,
        train_dataset=[{"prompt": c} for c in CONTEXTS],
        eval_dataset=[{"prompt": c} for c in HELD_OUT[:contexts_per_epoch]],
        callbacks=[listener],
        measure=BeamMeasure(),
    )  # fmt: skip
    trainer.train()
    place = trainer.processes.accelerator.process_index
    (folder / method / f"heard-{place}.json").write_text(json.dumps(listener.heard))
    if trainer.processes.is_main:
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        result = {"weights": weights.tolist(), "processes": trainer.processes.count}
        (folder / method / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(Path(sys.argv[1]), name)
        main(Path(sys.argv[1]) / "one-context", name, contexts_per_epoch=1)
