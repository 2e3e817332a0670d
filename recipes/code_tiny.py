"""Train `code-tiny`, the base model of the code tasks, on the standard library.

    OMP_NUM_THREADS=1 python recipes/code_tiny.py

One command makes all that the package carries for the code tasks: the lists of signatures (``cdpg/tasks/code/data``),
the tokenizer and the model (``cdpg/assets/models/code-tiny``). The files of the standard library are split by a seed;
the model is trained on functions of the first part only, and signatures to tune and to evaluate on come from the
others. The work folder holds a checkpoint for every pass over the data; the same command resumes from the last one.
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

logger = logging.getLogger("code_tiny")

DATA = Path(__file__).resolve().parent.parent / "src" / "cdpg"
SIGNATURES = Path("tasks", "code", "data")
MODEL = Path("assets", "models", "code-tiny")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that decides the result, besides the standard library itself."""

    seed: int = 0
    vocabulary: int = 2048
    width: int = 160
    layers: int = 6
    heads: int = 5
    dropout: float = 0.0
    epochs: int = 5
    """Passes over the training functions."""
    epochs_with_stubs: int = 2
    """Passes, the first ones, that have stubs among the functions."""
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
    cooldown: float = 0.45
    """Share of the steps, the last ones, over which the rates fall linearly to 0."""
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


def optimisers(model: GPTNeoForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest; each group remembers its peak rate."""
    matrices = [parameter for name, parameter in model.named_parameters() if parameter.ndim == 2 and ".h." in name]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    muon = Muon(matrices, recipe.matrix_rate, recipe.weight_decay)
    adam = torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for group in muon.param_groups + adam.param_groups:
        group["peak"] = group["lr"]
    return [muon, adam]


def rate_at(step: int, steps: int, recipe: Recipe) -> float:
    """Share of the peak rate: up over the warm-up, flat, then linearly down to 0."""
    return min(1.0, (step + 1) / recipe.warmup_steps, (steps - step) / (recipe.cooldown * steps))


def save_checkpoint(
    path: Path, model: GPTNeoForCausalLM, steppers: Sequence[torch.optim.Optimizer], seconds: float
) -> None:
    """Weights, moments and the processor time so far in one safetensors file."""
    tensors = {"seconds": torch.tensor(seconds)}
    tensors |= {f"model.{name}": tensor.detach().clone() for name, tensor in model.named_parameters()}
    for number, stepper in enumerate(steppers):
        for index, state in stepper.state_dict()["state"].items():
            tensors.update({f"optimiser.{number}.{index}.{key}": value.clone() for key, value in state.items()})
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def load_checkpoint(path: Path, model: GPTNeoForCausalLM, steppers: Sequence[torch.optim.Optimizer]) -> float:
    """Put a checkpoint back in place; gives its processor time."""
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
    return float(tensors["seconds"])


def plan_pass(rows: Sequence[Row], number: int, recipe: Recipe) -> list[list[Row]]:
    """The batches of a pass. They depend on the seed and its number alone: a checkpoint need not remember them."""
    least = 0 if number < recipe.epochs_with_stubs else recipe.stub_tokens
    chosen = [row for row in rows if len(row.tokens) - row.prompt >= least]
    return list(batches(chosen, recipe.batch_tokens, random.Random(f"{recipe.seed}/{number}")))


def train(
    model: GPTNeoForCausalLM, rows: Sequence[Row], held_out: Sequence[Row], pad: int, recipe: Recipe, work: Path
) -> float:
    """Train the model in place; gives the minutes of processor time that it took."""
    steppers = optimisers(model, recipe)
    plan = [plan_pass(rows, number, recipe) for number in range(recipe.epochs)]
    steps = sum(map(len, plan))
    done = max((n for n in range(1, recipe.epochs + 1) if (work / f"{n}.safetensors").exists()), default=0)
    start = time.process_time()
    if done:
        start -= load_checkpoint(work / f"{done}.safetensors", model, steppers)
    step = sum(map(len, plan[:done]))
    model.train()
    for epoch in range(done, recipe.epochs):
        torch.manual_seed(recipe.seed + epoch)
        losses = []
        for batch in plan[epoch]:
            for group in (group for stepper in steppers for group in stepper.param_groups):
                group["lr"] = group["peak"] * rate_at(step, steps, recipe)
            loss, count = batch_loss(model, batch, pad)
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
            step += 1
            losses.append(loss.item() / count)
            if step % 100 == 0:
                recent = sum(losses[-100:]) / len(losses[-100:])
                logger.info("step %d of %d, %.0f s, loss %.3f", step, steps, time.process_time() - start, recent)
        save_checkpoint(work / f"{epoch + 1}.safetensors", model, steppers, time.process_time() - start)
        logger.info("pass %d, held-out loss %.4f", epoch + 1, mean_loss(model, held_out, pad))
    return (time.process_time() - start) / 60


def write_signatures(folder: Path, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> list[str]:
    """The lists that the tasks use, one signature a line; gives those for evaluation."""
    split = split_signatures(seed=recipe.seed)
    tuning = choose_signatures(split.tuning, recipe.tuning_signatures, tokenizer, recipe.seed)
    evaluation = choose_signatures(split.evaluation, recipe.evaluation_signatures, tokenizer, recipe.seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, signatures in (("tuning", tuning), ("evaluation", evaluation)):
        (folder / f"signatures_{name}.txt").write_text("\n".join(signatures) + "\n", encoding="utf-8")
    return evaluation


def make(
    pairs: Sequence[tuple[str, str]], unseen: Sequence[tuple[str, str]], recipe: Recipe, output: Path, work: Path
) -> None:
    """Tokenizer, lists, model and card, from functions to learn from and functions of held-out files."""
    tokenizer = train_tokenizer((signature + body for signature, body in pairs), recipe.vocabulary)
    rows, held_out = encode(pairs, tokenizer), encode(unseen, tokenizer)
    evaluation = write_signatures(output / SIGNATURES, tokenizer, recipe)
    model = new_model(tokenizer, recipe)
    logger.info("%d functions, %d held out, %d parameters", len(rows), len(held_out), model.num_parameters())

    minutes = train(model, rows, held_out, tokenizer.pad_token_id, recipe, work)
    folder = output / MODEL
    write_model(model, tokenizer, folder)
    whole = [row for row in held_out if len(row.tokens) - row.prompt >= recipe.stub_tokens]
    learnt = [row for row in rows if len(row.tokens) - row.prompt >= recipe.stub_tokens]
    figures = {
        "recipe": dataclasses.asdict(recipe),
        "training_functions": len(rows),
        "training_tokens": sum(len(row.tokens) for row in rows),
        "minutes": minutes,
        "training_loss": mean_loss(model, learnt[::10], tokenizer.pad_token_id),
        "held_out_loss": mean_loss(model, whole, tokenizer.pad_token_id),
        **evaluate(folder, evaluation, unseen, pairs, recipe.seed),
    }
    (work / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    write_card(folder, figures, model.num_parameters())
    logger.info("%s", json.dumps(figures, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DATA, help="folder for tasks/code/data/ and assets/models/")
    parser.add_argument("--work", type=Path, default=Path("runs/code-tiny-base"), help="folder for checkpoints")
    parser.add_argument("--epochs", type=int, default=Recipe.epochs, help="passes over the training functions")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--measure-only", type=int, metavar="N", help="train nothing; sample for N held-out signatures")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = Recipe(seed=options.seed, epochs=options.epochs)

    files = split_files(python_files(standard_library()), recipe.seed)
    pairs = functions(files.base)
    seen = set(pairs)
    unseen = [pair for pair in functions(files.evaluation) if pair not in seen]
    if options.measure_only is not None:
        listed = (options.output / SIGNATURES / "signatures_evaluation.txt").read_text(encoding="utf-8").splitlines()
        folder = options.output / MODEL
        figures = evaluate(folder, listed[: options.measure_only], unseen, pairs, recipe.seed)
        logger.info("%s", json.dumps({"training_pairs": len(pairs), **figures}, indent=2))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    make(pairs, unseen, recipe, options.output, options.work)


if __name__ == "__main__":
    main()
