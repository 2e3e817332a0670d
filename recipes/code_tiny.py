"""Train `code-tiny`, the base model of the code tasks, on functions of the standard library and of packages.

    OMP_NUM_THREADS=1 python recipes/code_tiny.py

One command makes all that the package carries for the code tasks: the lists of signatures (``cdpg/tasks/code/data``),
the tokenizer and the model (``cdpg/assets/models/code-tiny``). The files of the standard library are split by a seed;
the model is trained on functions of the first part only, and signatures to tune and to evaluate on come from the
others. pip downloads the packages, whose files are left out where they have one of these signatures. The work folder
holds a checkpoint for every few hundred steps; the same command resumes from the last one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoConfig, GPTNeoForCausalLM, PreTrainedTokenizerFast

from cdpg.tasks.code.signatures import python_files, split_files, split_signatures, standard_library
from code_tiny_card import evaluate, write_card, write_model
from code_tiny_data import (
    BODY_TOKENS,
    SIGNATURE_TOKENS,
    Row,
    batches,
    choose_signatures,
    encode,
    functions,
    train_tokenizer,
)
from code_tiny_packages import PACKAGES, collect

logger = logging.getLogger("code_tiny")

DATA = Path(__file__).resolve().parent.parent / "src" / "cdpg"
SIGNATURES = Path("tasks", "code", "data")
MODEL = Path("assets", "models", "code-tiny")
CHECKPOINT = 100
"""Steps from one checkpoint to the next."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the training with a plan, optimisers and a schedule of its own."""

    epochs: int
    """Passes over the functions."""
    epochs_with_stubs: int
    """Passes, the first ones, that have stubs among the functions."""
    rate: float
    """Peak of the rates, as a share of the recipe's."""
    cooldown: float
    """Share of the steps, the last ones, over which the rates fall linearly to 0."""
    steps: int | None = None
    """Steps at most; the rest of the last pass is left out."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that decides the result, besides the sources themselves."""

    seed: int = 0
    vocabulary: int = 2048
    width: int = 160
    layers: int = 6
    heads: int = 5
    dropout: float = 0.0
    first: Stage = Stage(epochs=5, epochs_with_stubs=2, rate=1.0, cooldown=0.45)
    """The standard library alone."""
    second: Stage = Stage(epochs=1, epochs_with_stubs=0, rate=0.6, cooldown=0.7, steps=1000)
    """The standard library and the packages."""
    stub_tokens: int = 16
    """A body of fewer tokens is a stub. Late passes leave them out: they are what survives a constraint too easily."""
    batch_tokens: int = 3072
    matrix_rate: float = 0.02
    """Peak rate of the matrices inside the layers (Muon)."""
    other_rate: float = 3e-3
    """Peak rate of embeddings, norms and biases (AdamW)."""
    weight_decay: float = 0.05
    """Of the matrices, times their rate."""
    warmup_steps: int = 100
    tuning_signatures: int = 2000
    evaluation_signatures: int = 1000


def new_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> GPTNeoForCausalLM:
    """GPT-Neo, a few layers of it. The local window is as long as the longest text: all attention is full."""
    torch.manual_seed(recipe.seed)
    config = GPTNeoConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        num_layers=recipe.layers,
        num_heads=recipe.heads,
        attention_types=[[["global", "local"], recipe.layers // 2]],
        max_position_embeddings=BODY_TOKENS + SIGNATURE_TOKENS,
        window_size=BODY_TOKENS + SIGNATURE_TOKENS,
        activation_function="gelu_pytorch_tanh",
        resid_dropout=recipe.dropout,
        embed_dropout=recipe.dropout,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GPTNeoForCausalLM(config)


def batch_loss(model: GPTNeoForCausalLM, batch: Sequence[Row], pad: int) -> tuple[torch.Tensor, int]:
    """Summed -log π over the bodies' tokens, end tokens included, and their number.

    Padding stands to the right, where causal attention never looks: positions start at 0 as at sampling.
    """
    longest = max(len(row.tokens) for row in batch)
    tokens = torch.tensor([row.tokens + (pad,) * (longest - len(row.tokens)) for row in batch])  # [row, token]
    position = torch.arange(longest - 1)
    first = torch.tensor([row.prompt - 1 for row in batch])[:, None]
    last = torch.tensor([len(row.tokens) - 2 for row in batch])[:, None]
    learnt = (position >= first) & (position <= last)  # [row, token - 1]
    hidden = model.transformer(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[learnt])  # [learnt token, vocabulary]
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:][learnt], reduction="sum"), int(learnt.sum())


@torch.no_grad()
def mean_loss(model: GPTNeoForCausalLM, rows: Sequence[Row], pad: int) -> float:
    """-log π per token of the bodies, in nats, dropout off."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches(rows, 8192, random.Random(0)):
        loss, number = batch_loss(model, batch, pad)
        total, count = total + loss.item(), count + number
    model.train()
    return total / count


class Muon(torch.optim.Optimizer):
    """Momentum whose step is replaced by the nearest orthogonal matrix: every direction learns at one speed."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                step = orthogonalised(parameter.grad.lerp(average, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(step, alpha=-group["lr"] * max(1.0, step.shape[0] / step.shape[1]) ** 0.5)


def orthogonalised(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """All singular values of a matrix brought near 1, by a quintic Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x: torch.Tensor = matrix.t() if tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.t() if tall else x


def optimisers(model: GPTNeoForCausalLM, recipe: Recipe, stage: Stage) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest; each group remembers its peak rate."""
    matrices = [parameter for name, parameter in model.named_parameters() if parameter.ndim == 2 and ".h." in name]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    muon = Muon(matrices, recipe.matrix_rate * stage.rate, recipe.weight_decay)
    adam = torch.optim.AdamW(others, lr=recipe.other_rate * stage.rate, betas=(0.9, 0.95), weight_decay=0.0)
    for group in muon.param_groups + adam.param_groups:
        group["peak"] = group["lr"]
    return [muon, adam]


def rate_at(step: int, steps: int, warmup: int, cooldown: float) -> float:
    """Share of the peak rate: up over the warm-up, flat, then linearly down to 0."""
    return min(1.0, (step + 1) / warmup, (steps - step) / (cooldown * steps))


def save_checkpoint(
    path: Path, model: GPTNeoForCausalLM, steppers: Sequence[torch.optim.Optimizer], seconds: float, step: int
) -> None:
    """Weights, moments, the processor time and the steps so far in one safetensors file."""
    tensors = {"seconds": torch.tensor(seconds), "step": torch.tensor(step)}
    tensors |= {f"model.{name}": tensor.detach().clone() for name, tensor in model.named_parameters()}
    for number, stepper in enumerate(steppers):
        for index, state in stepper.state_dict()["state"].items():
            tensors.update({f"optimiser.{number}.{index}.{key}": value.clone() for key, value in state.items()})
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def load_checkpoint(
    path: Path, model: GPTNeoForCausalLM, steppers: Sequence[torch.optim.Optimizer]
) -> tuple[float, int]:
    """Put a checkpoint back in place; gives its processor time and its step."""
    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for number, stepper in enumerate(steppers):
        whole = stepper.state_dict()
        for name, tensor in tensors.items():
            kind, *rest = name.split(".")
            if kind == "optimiser" and int(rest[0]) == number:
                whole["state"].setdefault(int(rest[1]), {})[rest[2]] = tensor
        stepper.load_state_dict(whole)
    return float(tensors["seconds"]), int(tensors["step"])


def planned(rows: Sequence[Row], recipe: Recipe, stage: Stage) -> list[list[Row]]:
    """The batches of a stage. They depend on the seed alone: a checkpoint need not remember them."""
    plan: list[list[Row]] = []
    for number in range(stage.epochs):
        least = 0 if number < stage.epochs_with_stubs else recipe.stub_tokens
        chosen = [row for row in rows if len(row.tokens) - row.prompt >= least]
        plan += batches(chosen, recipe.batch_tokens, random.Random(f"{recipe.seed}/{number}"))
    return plan[: stage.steps]


def train(
    model: GPTNeoForCausalLM,
    plan: Sequence[Sequence[Row]],
    held_out: Sequence[Row],
    recipe: Recipe,
    stage: Stage,
    path: Path,
) -> float:
    """Train the model in place; gives the minutes of processor time that it took. ``path`` is of the checkpoint."""
    steppers, pad = optimisers(model, recipe, stage), model.config.pad_token_id
    start, step = time.process_time(), 0
    if path.is_file():
        seconds, step = load_checkpoint(path, model, steppers)
        start -= seconds
    model.train()
    losses = []
    while step < len(plan):
        for group in (group for stepper in steppers for group in stepper.param_groups):
            group["lr"] = group["peak"] * rate_at(step, len(plan), recipe.warmup_steps, stage.cooldown)
        loss, count = batch_loss(model, plan[step], pad)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        step += 1
        losses.append(loss.item() / count)
        if step % 25 == 0:
            seconds, recent = time.process_time() - start, sum(losses[-25:]) / len(losses[-25:])
            logger.info("step %d of %d, %.0f s, loss %.3f", step, len(plan), seconds, recent)
        if step % CHECKPOINT == 0 or step == len(plan):
            save_checkpoint(path, model, steppers, time.process_time() - start, step)
            logger.info("step %d, held-out loss %.4f", step, mean_loss(model, held_out[::4], pad))
    return (time.process_time() - start) / 60


def trained(
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    more: Sequence[Row],
    held_out: Sequence[Row],
    recipe: Recipe,
    work: Path,
) -> tuple[GPTNeoForCausalLM, float]:
    """The model after both stages, and the minutes of processor time that they took.

    Between them the weights are rounded to half precision, as they are stored: a stored model in the folder ``first``
    of the work folder stands for the first stage.
    """
    stored = work / "first"
    if not (stored / "minutes.txt").is_file():
        model, plan = new_model(tokenizer, recipe), planned(rows, recipe, recipe.first)
        minutes = train(model, plan, held_out, recipe, recipe.first, work / "first.safetensors")
        write_model(model, tokenizer, stored)
        (stored / "minutes.txt").write_text(f"{minutes}\n", encoding="utf-8")
    model = GPTNeoForCausalLM.from_pretrained(stored, dtype=torch.float32)
    minutes = float((stored / "minutes.txt").read_text(encoding="utf-8"))
    plan = planned([*rows, *more], recipe, recipe.second)
    minutes += train(model, plan, held_out, recipe, recipe.second, work / "second.safetensors")
    return model, minutes


def write_signatures(folder: Path, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> tuple[list[str], list[str]]:
    """The lists that the tasks use, one signature a line; gives those to tune on and those for evaluation."""
    split = split_signatures(seed=recipe.seed)
    tuning = choose_signatures(split.tuning, recipe.tuning_signatures, tokenizer, recipe.seed)
    evaluation = choose_signatures(split.evaluation, recipe.evaluation_signatures, tokenizer, recipe.seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, signatures in (("tuning", tuning), ("evaluation", evaluation)):
        (folder / f"signatures_{name}.txt").write_text("\n".join(signatures) + "\n", encoding="utf-8")
    return tuning, evaluation


def make(
    pairs: Sequence[tuple[str, str]],
    apart: Sequence[tuple[str, str]],
    unseen: Sequence[tuple[str, str]],
    recipe: Recipe,
    output: Path,
    work: Path,
) -> None:
    """Tokenizer, lists, model and card, from functions to learn from and functions of files that are set apart.

    ``apart`` are the functions of all files with signatures to tune or to evaluate on, ``unseen`` those of the latter
    that no file to learn from has.
    """
    tokenizer = train_tokenizer((signature + body for signature, body in pairs), recipe.vocabulary)
    tuning, evaluation = write_signatures(output / SIGNATURES, tokenizer, recipe)
    bodies = {body for _, body in pairs}
    others = [pair for pair in collect(PACKAGES, work, apart, tuning + evaluation) if pair[1] not in bodies]
    rows, more, held_out = (encode(part, tokenizer) for part in (pairs, others, unseen))
    whole, own = (
        [row for row in part if len(row.tokens) - row.prompt >= recipe.stub_tokens] for part in (held_out, rows)
    )
    used = {row for batch in planned([*rows, *more], recipe, recipe.second) for row in batch}
    foreign = [row for row in more if row in used]
    logger.info("functions: %d, of packages %d, held out %d", len(rows), len(more), len(held_out))
    model, minutes = trained(tokenizer, rows, more, whole, recipe, work)
    folder = output / MODEL
    write_model(model, tokenizer, folder)
    figures = {
        "recipe": dataclasses.asdict(recipe),
        "library_functions": len(rows),
        "library_tokens": sum(len(row.tokens) for row in rows),
        "second_tokens": sum(len(row.tokens) for row in used),
        "package_functions": len(foreign),
        "package_tokens": sum(len(row.tokens) for row in foreign),
        "minutes": minutes,
        "library_loss": mean_loss(model, own[::10], tokenizer.pad_token_id),
        "package_loss": mean_loss(model, foreign[::20], tokenizer.pad_token_id),
        "held_out_loss": mean_loss(model, whole, tokenizer.pad_token_id),
        **evaluate(folder, evaluation, unseen, [*pairs, *others], recipe.seed),
    }
    (work / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    write_card(folder, figures, model.num_parameters())
    logger.info("%s", json.dumps(figures, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DATA, help="folder for tasks/code/data/ and assets/models/")
    parser.add_argument("--work", type=Path, default=Path("runs/code-tiny-base"), help="folder for checkpoints")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--measure-only", type=int, metavar="N", help="train nothing; sample for N held-out signatures")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = Recipe(seed=options.seed)

    files = split_files(python_files(standard_library()), recipe.seed)
    pairs, evaluated = functions(files.base), functions(files.evaluation)
    seen = set(pairs)
    unseen = [pair for pair in evaluated if pair not in seen]
    if options.measure_only is not None:
        listed = (options.output / SIGNATURES / "signatures_evaluation.txt").read_text(encoding="utf-8").splitlines()
        folder = options.output / MODEL
        figures = evaluate(folder, listed[: options.measure_only], unseen, pairs, recipe.seed)
        logger.info("%s", json.dumps({"training_pairs": len(pairs), **figures}, indent=2))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    make(pairs, functions(files.tuning) + evaluated, unseen, recipe, options.output, options.work)


if __name__ == "__main__":
    main()
