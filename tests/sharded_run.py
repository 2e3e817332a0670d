"""Launched with several processes in the tests: runs of tiny models whose weights are divided among them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.system.shards import is_shard
from distributed_run import BeamMeasure

PROMPTS = (
    "two dogs", "the quick brown", "def add(a, b):", "fox", "one lazy dog", "three cats play", "no more", "go on",
    "some word", "a cold morning", "four roads", "who knows", "slow motion",
)  # fmt: skip
HALF = 1
"""The epoch after which runs are resumed."""
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"evaluate_at_end": False, "gradient_checkpointing": True}),
    "llama": ("llama", {"keep": "best", "validation_contexts": 7, "max_grad_norm": 1.0, "evaluate_every": 1}),
    "t5": ("t5", {"batch_size": 7, "base_dtype": "bfloat16", "learning_rate": 3e-4}),
    "ziegler": ("gpt2", {"method": "ziegler", "ziegler_epochs": 2, "evaluate_at_end": False}),
    "adapters": ("llama", {"lora_rank": 2, "evaluate_at_end": False}),
    "stale": ("llama", {"sync_every": 2, "evaluate_at_end": False}),
}
"""Every run by its name: the family of its model, and its settings."""


def epochs() -> int:
    """Of every run: two, or five in the long round."""
    return int(os.environ.get("SHARDED_EPOCHS", "2"))


class Check:
    """Of some prompts no completion satisfies, so a process may be left without a gradient.

    The tokens of all samples, those of evaluations included, are written down.
    """

    __module__ = "sharded_run"  # also if this file is the main program: the name is part of a run's record

    def __init__(self, folder: Path, deadly: bool = False) -> None:
        """If it is ``deadly``, the second process does not live beyond the epoch ``HALF``."""
        self.folder, self.deadly = folder, deadly

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        metrics = self.folder / "metrics.jsonl"
        epochs = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if self.deadly and os.environ.get("RANK") == "1" and epochs >= HALF:
            (self.folder / "died").touch()  # when it did
            os.kill(os.getpid(), signal.SIGKILL)
        with (self.folder / f"tokens-{os.environ.get('RANK', 0)}.jsonl").open("a") as file:
            file.writelines(f"{json.dumps(item)}\n" for item in zip(prompts, completion_ids, strict=True))
        return [float("o" in prompt and len(text) % 3 > 0) for prompt, text in zip(prompts, completions, strict=True)]


def trainer(models: Path, folder: Path, name: str, sharding: str, deadly: bool = False, **others: Any) -> CDPGTrainer:
    """A run in ``folder``; ``models`` has the models by family."""
    family, settings = RUNS[name]
    values: dict[str, Any] = {
        "output_dir": str(folder), "epochs": epochs(), "contexts_per_epoch": 3, "num_generations": 4,
        "max_completion_length": 4, "learning_rate": 5e-4, "warmup_epochs": 0, "device": "cpu", "check_workers": 0,
        "sharding": sharding, "tokens_per_pass": 40, "rows_per_pass": 8, "save_every": HALF,
        "keep_checkpoints": 9, "evaluate_every": 0, "evaluation_samples": 2, "evaluation_contexts": 2, "gain_draws": 4,
        "adam_epsilon": 1e-4,  # or rounding would decide on the sign of the steps of weights without a gradient
    }  # fmt: skip
    data = [{"prompt": prompt} for prompt in PROMPTS]
    return CDPGTrainer(
        str(models / family),
        Check(folder, deadly),
        CDPGConfig(**{**values, **settings, **others}),
        data,
        data[1:4],
        measure=BeamMeasure(),
    )


def save_models(folder: Path) -> None:
    """The models, by family; the T5 came in bfloat16."""
    for family in {family for family, _ in RUNS.values()}:
        tiny.save(folder / family, family)
        if family == "t5":
            model = AutoModelForSeq2SeqLM.from_pretrained(folder / family)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.bfloat16())
            model.save_pretrained(folder / family)


def half(run: Path, copy: Path) -> Path:
    """A copy of a run that was interrupted half way."""
    shutil.copytree(run, copy)
    for checkpoint in copy.glob("checkpoints/epoch-*"):
        if int(checkpoint.name[-6:]) > HALF:
            shutil.rmtree(checkpoint)
    return copy


def main(models: Path, folder: Path, names: list[str]) -> None:
    """Make the runs, and go on with those in ``folder/half``."""
    for name in names:
        made = trainer(models, folder / name, name, "full")
        divided = [*made.model.parameters(), *made.base.module.parameters()]
        assert divided and all(map(is_shard, divided)), "Accelerate alone would make replicas"
        assert made.processes.count == int(os.environ["WORLD_SIZE"])
        made.train()
        assert all(map(is_shard, made.model.parameters())), "what is gathered is freed"
        moments = [value for state in made.optimizer.state.values() for value in state.values() if value.dim() > 1]
        assert name == "adapters" or all(is_shard(value) or value.shape[0] == 1 for value in moments)
        if name == "llama":
            if made.processes.is_main:
                half(folder / name, folder / "half" / "llama-again")
            made.processes.wait()
    for path in sorted(folder.glob("half/*")):
        trainer(models, path, path.name.partition("-")[0], "full").train(resume_from_checkpoint=True)


if __name__ == "__main__":
    if sys.argv[1] == "deadly":
        trainer(Path(sys.argv[2]), Path(sys.argv[3]), "gpt2", "full", deadly=True).train()
    elif sys.argv[1] == "engine":
        address = {"engine": "vllm", "engine_url": sys.argv[4], "learning_rate": 1e-2}
        trainer(Path(sys.argv[2]), Path(sys.argv[3]), "gpt2", "full", **address).train()
    elif sys.argv[1] in ("none", "full"):
        trainer(Path(sys.argv[2]), Path(sys.argv[3]), "llama", sys.argv[1]).train(resume_from_checkpoint=True)
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
